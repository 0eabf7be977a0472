"""Which experts a token is sent to, as a module."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moe_fp8_ext.distributed.dtensor import is_dtensor, on_every_rank
from moe_fp8_ext.matmul.bf16 import autocast_dtype, cast
from moe_fp8_ext.matmul.float32 import float32_mm, float32_mm_backward, takes_parts
from moe_fp8_ext.ops.checks import (
    INPUT_DTYPES,
    check_bool,
    check_dense,
    check_number,
    check_one_of,
    check_parameter_dtype,
    check_sizes,
    dtype_name,
    either,
    require,
)
from moe_fp8_ext.ops.dispatch import differentiable_once, unit_stride
from moe_fp8_ext.ops.router import SCORINGS, check_choice, choose_experts, choose_experts_backward


def _without_autocast(x: Tensor) -> AbstractContextManager:
    return nullcontext() if autocast_dtype(x) is None else torch.autocast(x.device.type, enabled=False)


class Rule(NamedTuple):
    """What `choose_experts` takes behind logits."""

    top_k: int
    bias: Tensor | None
    scoring: str
    normalize: bool
    scaling_factor: float
    num_groups: int
    top_groups: int

    @property
    def scores(self) -> tuple[str, bool, float]:
        """How scores are made of logits."""
        return self.scoring, self.normalize, self.scaling_factor


def choice(x: Tensor, weight: Tensor, rule: Rule) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits = x @ weight^T in float32, under torch.autocast too; what `choose_experts` makes of them, ids and scores;
    and what `choice_backward` needs of logits: if they are normalized, those of the chosen alone."""
    with _without_autocast(x):
        logits = float32_mm(x, weight.t())
    ids, scores, of_chosen = choose_experts(logits, *rule)
    return logits, ids, scores, of_chosen if rule.normalize else logits


def choice_backward(
    of_logits: Tensor | None,
    of_scores: Tensor | None,
    kept: tuple[Tensor, Tensor, Tensor, Tensor],
    rule: Rule,
    needs: tuple[bool, bool],
    onto: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and weight, of those that are needed, from those of logits and scores, if there are any.

    kept: x, weight, what `choice` says, and ids. onto: as in `float32_mm_backward`.
    """
    x, weight, logits, ids = kept
    grad = of_logits
    if of_scores is not None:
        of_chosen = weight.shape[0] if rule.normalize else None
        count = 2 if grad is None and takes_parts(x, weight, *needs) else 1
        of_all = choose_experts_backward(unit_stride(of_scores), logits, ids, of_chosen, *rule.scores, count)
        grad = of_all if grad is None else grad + of_all
    if grad is None:
        return onto, None
    with _without_autocast(x):
        return float32_mm_backward(grad, x, weight, *needs, onto)


class _Choice(torch.autograd.Function):
    """x is kept as it is, and not a float32 copy of it."""

    @staticmethod
    def forward(ctx, x, weight, *rule):
        ctx.rule = Rule(*rule)
        logits, ids, scores, kept = choice(x, weight, ctx.rule)
        ctx.save_for_backward(x, weight, kept, ids)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(ids)
        return logits, ids, scores

    @staticmethod
    @differentiable_once
    def backward(ctx, of_logits, _, of_scores):
        needs = ctx.needs_input_grad[:2]
        return *choice_backward(of_logits, of_scores, ctx.saved_tensors, ctx.rule, needs), *[None] * len(ctx.rule)


class Routing(NamedTuple):
    """topk_ids [T, top_k] int64, topk_scores [T, top_k] float32, and the losses of the router, a scalar."""

    topk_ids: Tensor
    topk_scores: Tensor
    loss: Tensor


class Router(nn.Module):
    """Chooses experts, in float32 whatever the dtypes of tokens and weight are, and under torch.autocast too.

        scores = scoring(x @ weight^T); the choice is the top_k of scores + e_score_correction_bias; the scores of the
        chosen are those without the bias, divided by their sum if normalize, times scaling_factor (`choose_experts`)

    Attributes:
        weight: [E, D].
        e_score_correction_bias: [E] float32, a buffer that `update_bias` moves, where bias_rate is not 0. A cast of the
            whole module casts it too, and bfloat16 loses small steps: construct with `dtype` instead.
        tokens_per_expert: [E] int64, what was chosen in training since the last `update_bias`. State dicts do not have
            it: where one is loaded that has the bias, counts begin at zero. A forward that a checkpoint computes again
            may be counted again.

    Args:
        num_experts, hidden_size, top_k: E, at most 1024, D and experts a token.
        scoring: "softmax" over the experts or "sigmoid" of each.
        normalize: whether scores of a token add up to scaling_factor.
        scaling_factor: of the scores.
        num_groups, top_groups: experts are num_groups groups of neighbours, of which a token chooses from those
            top_groups whose two best experts have the largest sum, as DeepSeek-V3 does and DeepSeek-V2 does not.
        bias_rate: what `update_bias` moves the bias by, for balance without a loss; not negative. A bias that is loaded
            and stays takes any rate, and no `update_bias`.
        balance_loss: coefficient of E * sum_e (share of the slots of e) * (mean probability of e), 1 where balanced;
            probabilities are scores divided by their sum.
        z_loss: coefficient of the mean of logsumexp(logits)^2.
        device, dtype: of the weight.

    Source: Switch Transformer, equations 4 to 6 (balance_loss); ST-MoE, equation 5 (z_loss); DeepSeek-V3 technical
        report, section 2.1.2 (groups, sigmoid, bias_rate).
    """

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
        bias_rate: float = 0.0,
        balance_loss: float = 0.0,
        z_loss: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_one_of("Router", "scoring", scoring, SCORINGS)
        check_sizes("Router", num_experts, hidden_size=hidden_size)
        check_choice("Router", num_experts, top_k, num_groups, top_groups)
        check_bool("Router", "normalize", normalize)
        check_parameter_dtype("Router", dtype)
        numbers = dict(scaling_factor=scaling_factor, bias_rate=bias_rate, balance_loss=balance_loss, z_loss=z_loss)
        for name, value in numbers.items():
            check_number("Router", name, value)
        require(bias_rate >= 0, f"Router: bias_rate must be at least 0, got {bias_rate}")
        self.top_k, self.scoring, self.normalize, self.scaling_factor = top_k, scoring, normalize, scaling_factor
        self.num_groups, self.top_groups, self.bias_rate = num_groups, top_groups, bias_rate
        self.balance_loss, self.z_loss = balance_loss, z_loss
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        balanced, counts = bias_rate != 0, torch.zeros(num_experts, device=device, dtype=torch.int64)
        bias = torch.zeros(num_experts, device=device, dtype=torch.float32)
        self.register_buffer("e_score_correction_bias", bias if balanced else None)
        self.register_buffer("tokens_per_expert", counts if balanced else None, persistent=False)
        self.reset_parameters()

    def extra_repr(self) -> str:
        experts, hidden = self.weight.shape
        return f"num_experts={experts}, hidden_size={hidden}, top_k={self.top_k}, scoring={self.scoring!r}"

    def reset_parameters(self) -> None:
        """The weight as nn.Linear has it; the bias and the counts, if there are any, of zero."""
        nn.init.uniform_(self.weight, -(self.weight.shape[1] ** -0.5), self.weight.shape[1] ** -0.5)
        for buffer in self.buffers():
            buffer.zero_()

    def _load_from_state_dict(self, state_dict: dict[str, object], prefix: str, *args: object) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        counts, bias = self.tokens_per_expert, self.e_score_correction_bias
        if counts is None or bias is None or f"{prefix}e_score_correction_bias" not in state_dict:
            return
        if counts.device == bias.device:
            counts.zero_()  # may be what memory held before `to_empty`
        else:  # of a module on the meta device, which has been assigned what was loaded
            self.tokens_per_expert = torch.zeros_like(bias, dtype=torch.int64)

    def forward(self, x: Tensor) -> Routing:
        """x [T, D] -> ids and scores [T, top_k], losses; of DTensors that are Replicate(), the same.

        x: bfloat16, float16 or float32, on the weight's device.
        """
        rule = self._rule(x)
        choose = partial(on_every_rank, "Router", _Choice.apply) if is_dtensor(x) else _Choice.apply
        logits, ids, scores = choose(x, self.weight, *rule)
        return Routing(ids, scores, self._losses_and_counts(logits, ids))

    def _rule(self, x: Tensor) -> Rule:
        """Of a forward with x, which it checks."""
        check_dense("Router", "x", x, 2)
        require(x.dtype in INPUT_DTYPES, f"Router: x must be {either(map(dtype_name, INPUT_DTYPES))}, got {x.dtype}")
        (_, size), device = self.weight.shape, self.weight.device
        require(x.shape[1] == size, f"Router: x must have size {size} in dimension 1, got {x.shape[1]}")
        require(x.device == device, f"Router: x must be on the device of weight, {device}, got {x.device}")
        bias = self.e_score_correction_bias
        bias = None if bias is None else cast(bias, torch.float32)
        scores = self.scoring, self.normalize, self.scaling_factor
        return Rule(self.top_k, bias, *scores, self.num_groups, self.top_groups)

    def _losses_and_counts(self, logits: Tensor, ids: Tensor) -> Tensor:
        """The losses of a choice, which is counted where a bias balances experts."""
        loss = self._loss(logits, ids)
        if self.training and self.tokens_per_expert is not None:
            wanted, got = ids.device, self.tokens_per_expert.device  # on the meta device nothing would be counted
            require(got == wanted, f"Router: tokens_per_expert must be on the device of x, {wanted}, got {got}")
            counts = self._counts(ids)
            if is_dtensor(counts) and not is_dtensor(self.tokens_per_expert):
                counts = counts.to_local()  # of all tokens, as every rank has them
            self.tokens_per_expert.add_(counts)  # no assignment, which no graph has under a checkpoint
        return loss

    @torch.no_grad()
    def update_bias(self) -> None:
        """Moves the bias of every expert by bias_rate towards balance, and counts anew: once a step of the optimizer.

        Data-parallel ranks add up their tokens_per_expert before; DistributedDataParallel with broadcast_buffers=True,
        its default, replaces them by those of rank 0 in its first forward, and in the next after each that it
        synchronizes.
        """
        require(self.tokens_per_expert is not None, "Router: bias_rate must not be 0 for update_bias, got 0")
        counts = self.tokens_per_expert.double()
        self.e_score_correction_bias.add_(self.bias_rate * (counts.mean() - counts).sign().float())
        self.tokens_per_expert.zero_()

    def _loss(self, logits: Tensor, ids: Tensor) -> Tensor:
        losses, tokens = [], max(ids.shape[0], 1)  # a sum that begins with a zero would be two launches more
        if self.balance_loss:
            scores = logits.softmax(-1) if self.scoring == "softmax" else logits.sigmoid()
            shares = self._counts(ids).to(scores.dtype) / (tokens * self.top_k)
            probabilities = (scores / scores.sum(-1, keepdim=True)).sum(0) / tokens
            losses.append(self.balance_loss * len(shares) * (shares * probabilities).sum())
        if self.z_loss:
            losses.append(self.z_loss * logits.logsumexp(-1).square().sum() / tokens)
        return reduce(torch.add, losses) if losses else logits.new_zeros(())

    def _counts(self, ids: Tensor) -> Tensor:
        counts = ids.new_zeros(self.weight.shape[0])
        return counts.scatter_add(0, ids.flatten(), torch.ones_like(ids).flatten())
