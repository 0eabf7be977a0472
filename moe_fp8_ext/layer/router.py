"""The router of an MoE layer: scores experts for each token and chooses top_k of them."""

from __future__ import annotations

from functools import partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, softplus

from moe_fp8_ext import _torch
from moe_fp8_ext.distributed.dtensor import draw_in_turn, is_dtensor, on_every_rank
from moe_fp8_ext.matmul.float32 import float32_mm, float32_mm_backward, takes_parts
from moe_fp8_ext.ops.checks import (
    INPUT_DTYPES,
    check_bool,
    check_dense,
    check_dtype,
    check_number,
    check_one_of,
    check_parameter_dtype,
    check_shape,
    check_sizes,
    contents,
    fail,
    is_int,
    require,
    validate_ids,
)
from moe_fp8_ext.ops.dispatch import differentiable_once, unit_stride
from moe_fp8_ext.ops.router import GROUP_SCORES, SCORINGS, check_choice, choose_experts, choose_experts_backward
from moe_fp8_ext.quantization.casting import cast, without_autocast
from moe_fp8_ext.quantization.format import MAX_EXPERTS


class ChoiceOptions(NamedTuple):
    """The arguments of `choose_experts` after the logits."""

    top_k: int
    bias: Tensor | None
    scoring: str
    normalize: bool
    scaling_factor: float
    num_groups: int
    top_groups: int
    group_score: str
    given_ids: Tensor | None


class _Choice(torch.autograd.Function):
    """Chooses experts by logits = x @ weight^T, in float32, under torch.autocast too.

    Keeps x as it is for backward, rather than a float32 copy of it. A token that mask has False for gets the ids -1 and
    the scores 0.
    """

    @staticmethod
    def forward(ctx, x, weight, mask, *options):
        ctx.options = ChoiceOptions(*options)
        with without_autocast(x):
            logits = float32_mm(x, weight.t())
        topk_ids, topk_scores, topk_logits = choose_experts(logits, *options)
        if mask is not None:
            padding = ~mask[:, None]
            topk_ids, topk_scores = topk_ids.masked_fill(padding, -1), topk_scores.masked_fill(padding, 0)
        # With normalize, the scores depend on the logits of the chosen experts alone.
        ctx.save_for_backward(x, weight, topk_logits if ctx.options.normalize else logits, topk_ids)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(topk_ids)
        return logits, topk_ids, topk_scores

    @staticmethod
    @differentiable_once
    def backward(ctx, grad, _, grad_scores):
        (x, weight, logits, topk_ids), options, needs = ctx.saved_tensors, ctx.options, ctx.needs_input_grad[:2]
        grads = None, None
        if grad_scores is not None:
            num_experts = weight.shape[0] if options.normalize else None
            count = 2 if grad is None and takes_parts(x, weight, *needs) else 1
            how = options.scoring, options.normalize, options.scaling_factor, count
            grad_scores = unit_stride(grad_scores)
            through_scores = choose_experts_backward(grad_scores, logits, topk_ids, num_experts, *how)
            grad = through_scores if grad is None else grad + through_scores
        if grad is not None:
            with without_autocast(x):
                grads = float32_mm_backward(grad, x, weight, *needs)
        return *grads, None, *[None] * len(options)


class Routing(NamedTuple):
    """The result of a router.

    Attributes:
        topk_ids: [T, top_k] int64, the chosen experts.
        topk_scores: [T, top_k] float32, their scores.
        loss: a scalar, the sum of the router's losses.
    """

    topk_ids: Tensor
    topk_scores: Tensor
    loss: Tensor


def _zero_counts(router: Router, state_dict: dict[str, object], prefix: str, *_: object) -> None:
    """Runs before a state dict is loaded. Counts belong to a bias, and after `to_empty` their memory is undefined."""
    if router.tokens_per_expert is not None and f"{prefix}e_score_correction_bias" in state_dict:
        router.tokens_per_expert.zero_()


def _adjust_buffers(router: Router, _: object) -> None:
    """Runs after a state dict was loaded. With assign=True, the bias is the state dict's, of its device and dtype."""
    counts, bias = router.tokens_per_expert, router.e_score_correction_bias
    if counts is not None and bias is not None:
        router.e_score_correction_bias = bias.float()
        if counts.device != bias.device:
            router.tokens_per_expert = torch.zeros_like(bias, dtype=torch.int64)


class Router(_torch.ModuleWithFloat32):
    """Chooses top_k experts for each token. It computes in float32 for all dtypes of tokens and weight, and also under
    torch.autocast.

        scores = scoring(x @ weight^T)
        choice: the experts with the top_k largest scores + e_score_correction_bias
        topk_scores: the scores of the chosen experts without the bias, divided by their sum if normalize, times
        scaling_factor (see `choose_experts`)

    Attributes:
        weight: [E, D].
        e_score_correction_bias: [E] float32, a buffer that `update_bias` moves; None where bias_rate is 0. It stays
            float32 if the module is cast, such as by `model.bfloat16()`, because bfloat16 loses small steps.
        tokens_per_expert: [E] int64, how often each expert was chosen in training since the last `update_bias`; None
            where bias_rate is 0. State dicts leave it out. Loading a state dict that has the bias sets it to zero. If
            activation checkpointing recomputes a forward, its tokens may count twice.

    Args:
        num_experts, hidden_size, top_k: E, at most 1024; D; and the number of experts of a token.
        scoring: "softmax" over the experts; or, for each expert's logit alone, "sigmoid" (DeepSeek-V3) or
            "sqrtsoftplus" (DeepSeek-V4), the square root of softplus.
        normalize: whether a token's scores add up to scaling_factor.
        scaling_factor: multiplies the scores.
        num_groups, top_groups: experts form num_groups groups of neighbours. A token chooses from the top_groups groups
            with the largest value.
        group_score: the value of a group: "top2_sum", the sum of its two best experts, as in DeepSeek-V3; or "max", its
            best expert, as in DeepSeek-V2.
        bias_rate: the step by which `update_bias` moves the bias, to balance experts without a loss; not negative. To
            load a bias and keep it fixed, pass any rate but 0 and never call `update_bias`.
        balance_loss: coefficient of E * sum_e (share of the slots that chose e) * (mean probability of e), which is 1
            where experts are balanced. A token's probabilities are its scores of all experts divided by their sum.
        z_loss: coefficient of the mean over tokens of logsumexp(logits)^2.
        device, dtype: of the weight.

    Source: Switch Transformer, equations 4 to 6 (balance_loss); ST-MoE, equation 5 (z_loss); DeepSeek-V3 technical
        report, section 2.1.2 (groups, sigmoid, bias_rate); DeepSeek-V2, section 2.1.2 (groups by their best expert);
        DeepSeek-V4 as Transformers has it (sqrtsoftplus).
    """

    in_float32 = "e_score_correction_bias"

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        top_k: int,
        *,
        scoring: str = "softmax",
        normalize: bool = True,
        scaling_factor: float = 1.0,
        num_groups: int = 1,
        top_groups: int = 1,
        group_score: str = "top2_sum",
        bias_rate: float = 0.0,
        balance_loss: float = 0.0,
        z_loss: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_one_of("Router", "scoring", scoring, SCORINGS)
        if is_int(num_experts) and num_experts > MAX_EXPERTS:
            got = f"got {num_experts}; sizes are given as Router(num_experts, hidden_size, top_k)"
            fail("Router", f"num_experts must be from 1 to {MAX_EXPERTS}, {got}")
        check_sizes("Router", num_experts, hidden_size=hidden_size)
        check_choice("Router", num_experts, top_k, num_groups, top_groups)
        check_one_of("Router", "group_score", group_score, GROUP_SCORES)
        check_bool("Router", "normalize", normalize)
        check_parameter_dtype("Router", dtype)
        numbers = dict(scaling_factor=scaling_factor, bias_rate=bias_rate, balance_loss=balance_loss, z_loss=z_loss)
        for name, value in numbers.items():
            check_number("Router", name, value)
        require(bias_rate >= 0, f"Router: bias_rate must be at least 0, got {bias_rate}")
        self.top_k, self.scoring, self.normalize, self.scaling_factor = top_k, scoring, normalize, scaling_factor
        self.num_groups, self.top_groups, self.group_score = num_groups, top_groups, group_score
        self.bias_rate = bias_rate
        self.balance_loss, self.z_loss = balance_loss, z_loss
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        balanced, counts = bias_rate != 0, torch.zeros(num_experts, device=device, dtype=torch.int64)
        bias = torch.zeros(num_experts, device=device, dtype=torch.float32)
        self.register_buffer("e_score_correction_bias", bias if balanced else None)
        self.register_buffer("tokens_per_expert", counts if balanced else None, persistent=False)
        self.register_load_state_dict_pre_hook(_zero_counts)
        self.register_load_state_dict_post_hook(_adjust_buffers)
        self.reset_parameters()

    def extra_repr(self) -> str:
        experts, hidden = self.weight.shape
        return f"num_experts={experts}, hidden_size={hidden}, top_k={self.top_k}, scoring={self.scoring!r}"

    def reset_parameters(self) -> None:
        """Draws the weight as nn.Linear does, and zeros the bias and the counts, if the router has them.

        A seed gives the same weight on any number of ranks.
        """
        experts, hidden = self.weight.shape
        draw_in_turn(self.weight, 0, experts, partial(nn.init.uniform_, a=-(hidden**-0.5), b=hidden**-0.5))
        for buffer in self.buffers():
            buffer.zero_()

    def forward(
        self, x: Tensor, mask: Tensor | None = None, topk_ids: Tensor | None = None, topk_scores: Tensor | None = None
    ) -> Routing:
        """Routes x [T, D]. DTensors must be Replicate(); the results are then Replicate() too.

        Args:
            x: bfloat16, float16 or float32, on the weight's device. Also for padding tokens it must be finite.
            mask: [T] bool, True for real tokens. A padding token chooses no expert: its ids are -1, its scores 0. It
                adds nothing to losses, counts and gradients. None: all tokens are real.
            topk_ids: [T, top_k] int32 or int64, the choice of an earlier call or of a table, in place of this call's.
                Scores are computed from this call's logits, with gradients. An id of -1 drops its slot. So does any id
                out of [0, E), or it raises, as in `moe_fp8_ext.experts`. Without topk_scores, an expert may stand in
                one slot of a token at most: of several slots, only one would get a gradient. Where ids out of [0, E)
                raise, such ids raise too.
            topk_scores: [T, top_k] bfloat16, float16 or float32, with topk_ids only: these scores, as float32, in place
                of computed ones. The weight then has gradients of the losses alone.
        """
        options = self._options(x, topk_ids)
        self._check_given(x, mask, topk_ids, topk_scores)
        choose = partial(on_every_rank, _Choice.apply) if is_dtensor(x) else _Choice.apply
        logits, topk_ids, scores = choose(x, self.weight, mask, *options)
        self._count(topk_ids)
        loss = self._loss(logits, topk_ids, mask)
        if topk_scores is not None:
            scores = _of_real(cast(topk_scores, torch.float32), mask)
        return Routing(topk_ids, scores, loss)

    def _check_given(self, x: Tensor, mask: Tensor | None, topk_ids: Tensor | None, topk_scores: Tensor | None) -> None:
        """Checks the arguments of a forward after x."""
        tokens, slots = (x.shape[0],), (x.shape[0], self.top_k)
        if topk_ids is None:
            require(topk_scores is None, "Router: topk_scores must be None without topk_ids, got a tensor")
        arguments = ("mask", mask, tokens), ("topk_ids", topk_ids, slots), ("topk_scores", topk_scores, slots)
        for name, given, shape in arguments:
            if given is not None:
                check_dense("Router", name, given, len(shape))
                check_shape("Router", name, given, shape)
                text = f"Router: {name} must be on the device of x, {x.device}, got {given.device}"
                require(given.device == x.device, text)
        if topk_ids is not None:
            is_int = topk_ids.dtype in (torch.int32, torch.int64)
            require(is_int, f"Router: topk_ids must be torch.int32 or torch.int64, got {topk_ids.dtype}")
        if mask is not None:
            cause = ", got {0} (an attention_mask of 0 and 1: pass attention_mask.bool())"
            require(mask.dtype == torch.bool, "Router: mask must be torch.bool" + cause.format(mask.dtype))
        if topk_ids is not None and not is_dtensor(topk_ids) and contents(topk_ids) is not None:
            ids = topk_ids if mask is None else topk_ids.masked_fill(~mask[:, None], -1)  # ids of padding may be any
            validate_ids("Router", ids, self.weight.shape[0])
            if topk_scores is None:
                _check_distinct(ids)
        if topk_scores is not None:
            check_dtype("Router", "topk_scores", topk_scores.dtype, *INPUT_DTYPES)

    def _options(self, x: Tensor, given_ids: Tensor | None) -> ChoiceOptions:
        """Checks x and returns the options of a forward."""
        check_dense("Router", "x", x, 2)
        check_dtype("Router", "x", x.dtype, *INPUT_DTYPES)
        (experts, size), device = self.weight.shape, self.weight.device
        if x.shape[1] != size:
            cause = "; sizes are given as Router(num_experts, hidden_size, top_k)" if x.shape[1] == experts else ""
            fail("Router", f"x must have size {size} in dimension 1, got {x.shape[1]}{cause}")
        if x.device != device:
            fail("Router", f"x must be on the device of weight, {device}, got {x.device}")
        bias = self.e_score_correction_bias
        bias = None if bias is None else cast(bias, torch.float32)
        scores = self.scoring, self.normalize, self.scaling_factor
        return ChoiceOptions(self.top_k, bias, *scores, self.num_groups, self.top_groups, self.group_score, given_ids)

    def _count(self, topk_ids: Tensor) -> None:
        """Adds the choice to tokens_per_expert, in training and where a bias balances experts."""
        if not self.training or self.tokens_per_expert is None:
            return
        # Counts on the meta device would be lost.
        wanted, got = topk_ids.device, self.tokens_per_expert.device
        require(got == wanted, f"Router: tokens_per_expert must be on the device of x, {wanted}, got {got}")
        counts = self._counts(topk_ids)
        if is_dtensor(counts) and not is_dtensor(self.tokens_per_expert):
            counts = counts.to_local()  # every rank counts all tokens
        # In place: under activation checkpointing, graphs of torch.compile cannot assign to an attribute.
        self.tokens_per_expert.add_(counts)

    @torch.no_grad()
    def update_bias(self) -> None:
        """Moves every expert's bias by bias_rate towards balance, and zeros the counts. Call it once an optimizer step.

        Data-parallel ranks must add up their tokens_per_expert before the call. DistributedDataParallel with
        broadcast_buffers=True, its default, replaces them by the buffers of rank 0: in its first forward, and in
        the first forward after each backward that synchronizes gradients.
        """
        require(
            self.tokens_per_expert is not None,
            "Router: the constructor's bias_rate must not be 0 for update_bias, got 0",
        )
        counts = self.tokens_per_expert.double()
        self.e_score_correction_bias.add_(self.bias_rate * (counts.mean() - counts).sign().float())
        self.tokens_per_expert.zero_()

    def _loss(self, logits: Tensor, topk_ids: Tensor, mask: Tensor | None) -> Tensor:
        if is_dtensor(logits):  # on local tensors: DTensor knows no gradient of logsigmoid
            (loss,) = on_every_rank(lambda *local: [self._loss(*local)], logits, topk_ids, mask)
            return loss
        losses: list[Tensor] = []  # adding to a zero would launch two more kernels
        tokens = max(topk_ids.shape[0], 1) if mask is None else mask.sum().clamp(min=1)
        if self.balance_loss:
            mean_probabilities = _of_real(self._probabilities(logits), mask).sum(0) / tokens
            slot_shares = self._counts(topk_ids).to(logits.dtype) / (tokens * self.top_k)
            losses.append(self.balance_loss * len(slot_shares) * (slot_shares * mean_probabilities).sum())
        if self.z_loss:
            losses.append(self.z_loss * _of_real(logits.logsumexp(-1).square(), mask).sum() / tokens)
        return reduce(torch.add, losses) if losses else logits.new_zeros(())

    def _probabilities(self, logits: Tensor) -> Tensor:
        """Each token's scores [T, E], divided by their sum.

        Scores other than softmax are divided in log space. Where all logits of a token are below about -88 its scores
        are zero in float32, and their quotient and its gradient would be 0 / 0.
        """
        if self.scoring == "softmax":
            return logits.softmax(-1)
        log_scores = logsigmoid(logits) if self.scoring == "sigmoid" else _log_sqrt_softplus(logits)
        # If all logits of a token are -Inf, its probabilities are equal and have no gradient: the clamp stops it.
        return log_scores.clamp(min=torch.finfo(log_scores.dtype).min).softmax(-1)

    def _counts(self, topk_ids: Tensor) -> Tensor:
        """How many slots chose each expert, [E]. Slots of the id -1 chose none."""
        counts = topk_ids.new_zeros(1 + self.weight.shape[0])
        return counts.scatter_add(0, topk_ids.flatten() + 1, torch.ones_like(topk_ids).flatten())[1:]


def _check_distinct(topk_ids: Tensor) -> None:
    """Checks that no token has an expert twice. Each slot would get its score, but only one slot its gradient."""
    ids = topk_ids.sort(1).values
    twice = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)
    if twice.any():
        token, slot = twice.nonzero()[0].tolist()
        got = f"got expert {ids[token, slot]} twice in token {token}"
        fail("Router", f"topk_ids must have an expert in one slot of a token at most, {got}; or pass topk_scores")


def _of_real(rows: Tensor, mask: Tensor | None) -> Tensor:
    """Returns rows [T, ...] with zeros for padding tokens, whose gradients are zero."""
    return rows if mask is None else rows.masked_fill(~mask.view(-1, *[1] * (rows.dim() - 1)), 0)


def _log_sqrt_softplus(x: Tensor) -> Tensor:
    """log(sqrt(softplus(x))). Below -20, softplus(x) is e^x in float32, and would be zero where x is below -103."""
    small = x < -20
    return 0.5 * torch.where(small, x, softplus(x.masked_fill(small, 0)).log())
