"""An MoE layer as modules, with the names and layouts that models of Hugging Face Transformers have in state dicts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from moe_fp8_ext.bf16 import autocast_dtype, cast
from moe_fp8_ext.experts import KEEP, experts
from moe_fp8_ext.float32_mm import float32_mm, float32_mm_backward
from moe_fp8_ext.formats import MAX_EXPERTS
from moe_fp8_ext.ops.activations import GATED
from moe_fp8_ext.ops.checks import INPUT_DTYPES, check_dense, check_int, check_one_of, dtype_name, either, require
from moe_fp8_ext.ops.choose_experts import SCORINGS, check_choice, choose_experts, choose_experts_backward
from moe_fp8_ext.ops.dispatch import asks_for_gradient, differentiable_once, unit_stride
from moe_fp8_ext.recipes import Recipe, get_recipe
from moe_fp8_ext.sharded import draw_in_turn, is_dtensor, of_all, of_rank, on_every_rank, sum_of_ranks

if TYPE_CHECKING:
    from moe_fp8_ext.distributed import ExpertParallel


class Experts(nn.Module):
    """The routed experts: `experts` with parameters of its own.

    Parameters may be DTensors, sharded by expert (`Shard(0)`) over a mesh of one dimension. With tensors of a rank,
    ids are those of the rank's experts. With DTensors that every rank has (`Replicate()`), ids are those of all
    experts, and the result is a DTensor whose sum over ranks is left to be taken (`Partial()`).

    With ep the parameters are of this rank's experts alone: [num_experts / ranks, ...], or, where ep was made from a
    DeviceMesh, DTensors sharded by expert over that. Tokens are those of the rank, ids those of all experts.

    Attributes:
        gate_up_proj: [E, 2 F, D], or up_proj [E, F, D] with an activation that is not gated.
        down_proj: [E, D, F].
        gate_up_proj_bias or up_proj_bias, down_proj_bias: [E, 2 F] or [E, F], [E, D], with bias.

    Args:
        num_experts, hidden_size, intermediate_size: E, of all ranks together, D and F.
        bias: whether experts have biases.
        recipe, activation, interleaved, keep: as in `experts`.
        main_grad: whether the gradient of each weight that needs one is added to its attribute `main_grad`, which the
            trainer sets, as `experts` does it. Biases have gradients of autograd's as ever.
        ep: over whose ranks experts are spread, by `ExpertParallel.experts`. Copies of the module share it.
        device, dtype: of the parameters.

    Raises:
        RuntimeError: num_experts or the recipe is not that of ep; in forward, a weight that needs a gradient has no
            main_grad; else as in `experts`, or as in `ExpertParallel.experts`.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        recipe: str | Recipe = "rowwise",
        activation: str = "swiglu",
        interleaved: bool = False,
        bias: bool = False,
        keep: str = "fp8",
        main_grad: bool = False,
        ep: ExpertParallel | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_experts, self.ep, self.adds_to_main_grad = num_experts, ep, main_grad
        self.options = dict(recipe=get_recipe(recipe), activation=activation, interleaved=interleaved, keep=keep)
        check_fits(ep, num_experts, self.options["recipe"])
        check_one_of("Experts", "activation", activation, list(GATED))
        check_one_of("Experts", "keep", keep, KEEP)
        check_sizes("Experts", num_experts, hidden_size=hidden_size, intermediate_size=intermediate_size)
        self.up = "gate_up_proj" if GATED[activation] else "up_proj"
        rows = intermediate_size * (2 if GATED[activation] else 1)
        sizes = {self.up: (rows, hidden_size), "down_proj": (hidden_size, intermediate_size)}
        for name, (n, k) in sizes.items():
            self.register_parameter(name, self._parameter(n, k, device=device, dtype=dtype))
            self.register_parameter(f"{name}_bias", self._parameter(n, device=device, dtype=dtype) if bias else None)
        self.reset_parameters()

    def _parameter(self, *size: int, **options: object) -> nn.Parameter:
        count = self.num_experts if self.ep is None else self.ep.peers.num_local_experts
        mine, mesh = torch.empty(count, *size, **options), getattr(self.ep, "mesh", None)
        return nn.Parameter(mine if mesh is None else of_all(mine, mesh))

    def reset_parameters(self) -> None:
        """As nn.Linear does: uniform, up to 1 / sqrt(inputs); expert by expert, the same on any number of ranks."""
        for name in (self.up, "down_proj"):
            weight, bias = getattr(self, name), getattr(self, f"{name}_bias")
            bound = weight.shape[2] ** -0.5
            for parameter in (weight,) if bias is None else (weight, bias):
                draw_in_turn(parameter, self._first(), self.num_experts, partial(nn.init.uniform_, a=-bound, b=bound))

    def _first(self) -> int:
        """Of the experts of parameters that do not know it themselves."""
        plain = self.ep is not None and self.ep.mesh is None
        return self.ep.peers.rank * self.ep.peers.num_local_experts if plain else 0

    def forward(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_scores: Tensor,
        shared_experts: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """x [T, D], topk_ids and topk_scores [T, top_k] -> [T, D]. shared_experts: as in `ExpertParallel.experts`."""
        call = x, topk_ids, topk_scores
        if self.ep is not None:
            return self._over_ranks(*call, shared_experts)
        require(shared_experts is None, "Experts: shared_experts must be None without ep, got one")
        return sum_of_ranks(self._of_rank, self.down_proj, *call) if is_dtensor(x) else self._of_rank(*call)

    def _of_rank(self, x: Tensor, topk_ids: Tensor, topk_scores: Tensor) -> Tensor:
        return experts(x, topk_ids, topk_scores, **self._rest(), **self.options)

    def _over_ranks(
        self, x: Tensor, topk_ids: Tensor, topk_scores: Tensor, shared_experts: Callable[[Tensor], Tensor] | None
    ) -> Tensor:
        with self.ep.errors_told():
            rest = self._rest()
        options = {name: value for name, value in self.options.items() if name != "recipe"}  # which ep has
        return self.ep.experts(x, topk_ids, topk_scores, shared_experts=shared_experts, **rest, **options)

    def _rest(self) -> dict[str, Tensor | None]:
        """What else is of this rank in a call."""
        rest: dict[str, Tensor | None] = {}
        for argument, name in (("gate_up", self.up), ("down", "down_proj")):
            rest[f"w_{argument}"] = of_rank(name, getattr(self, name))
            rest[f"b_{argument}"] = of_rank(f"{name}_bias", getattr(self, f"{name}_bias"))
            rest[f"main_grad_{argument}"] = of_rank(f"main_grad of {name}", self._main_grad(name))
        return rest

    def _main_grad(self, name: str) -> Tensor | None:
        weight = getattr(self, name)
        if not self.adds_to_main_grad or not asks_for_gradient(weight):
            return None
        main_grad = getattr(weight, "main_grad", None)
        require(main_grad is not None, f"Experts: {name} must have a main_grad with main_grad=True, got none")
        return main_grad


def check_sizes(op: str, num_experts: int, **sizes: int) -> None:
    for name, size in dict(num_experts=num_experts, **sizes).items():
        check_int(op, name, size)
    within = 1 <= num_experts <= MAX_EXPERTS
    require(within, f"{op}: num_experts must be from 1 to {MAX_EXPERTS}, got {num_experts}")
    for name, size in sizes.items():
        require(size >= 1, f"{op}: {name} must be at least 1, got {size}")


def check_fits(ep: ExpertParallel | None, num_experts: int, recipe: Recipe) -> None:
    for name, got in (("num_experts", num_experts), ("recipe", recipe)):
        wanted = getattr(ep, name, got)
        require(got == wanted, f"Experts: {name} must be that of ep, {wanted}, got {got}")


def _without_autocast(x: Tensor) -> AbstractContextManager:
    return nullcontext() if autocast_dtype(x) is None else torch.autocast(x.device.type, enabled=False)


class _Choice(torch.autograd.Function):
    """logits = x @ weight^T in float32, under torch.autocast too, and what `choose_experts` makes of them, ids and
    scores. x is kept as it is, and not a float32 copy of it; of logits, if normalize, those of the chosen alone."""

    @staticmethod
    def forward(ctx, x, weight, top_k, bias, scoring, normalize, scaling_factor, num_groups, top_groups):
        ctx.how = scoring, normalize, scaling_factor
        with _without_autocast(x):
            logits = float32_mm(x, weight.t())
        ids, scores = choose_experts(logits, top_k, bias, *ctx.how, num_groups, top_groups)
        # NaN scores can come of a logit that was not chosen: the sum has them.
        kept = logits.gather(1, ids).add_(scores, alpha=0) if normalize else logits
        ctx.save_for_backward(x, weight, kept, ids)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(ids)
        return logits, ids, scores

    @staticmethod
    @differentiable_once
    def backward(ctx, grad, _, of_scores):
        x, weight, kept, ids = ctx.saved_tensors
        if of_scores is not None:
            of_logits = _gradient_of_logits(unit_stride(of_scores), kept, ids, weight.shape[0], *ctx.how)
            grad = of_logits if grad is None else grad + of_logits
        gradients = (None, None)
        if grad is not None:
            with _without_autocast(x):
                gradients = float32_mm_backward(grad, x, weight, *ctx.needs_input_grad[:2])
        return *gradients, *[None] * 7


def _gradient_of_logits(
    of_scores: Tensor, kept: Tensor, ids: Tensor, num_experts: int, scoring: str, normalize: bool, factor: float
) -> Tensor:
    """kept: logits, or, if normalize, [T, top_k] of the chosen, which share all of the score among themselves."""
    if not normalize:
        return choose_experts_backward(of_scores, kept, ids, scoring, normalize, factor)
    all_of_them = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    of_chosen = choose_experts_backward(of_scores, kept, all_of_them, scoring, normalize, factor)
    return of_chosen.new_zeros(ids.shape[0], num_experts).scatter_(1, ids, of_chosen)


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
        tokens_per_expert: [E] int64, what was chosen in training since the last `update_bias`; not in state dicts. A
            forward that a checkpoint computes again may be counted again.

    Args:
        num_experts, hidden_size, top_k: E, at most 1024, D and experts a token.
        scoring: "softmax" over the experts or "sigmoid" of each.
        normalize: whether scores of a token add up to scaling_factor.
        scaling_factor: of the scores.
        num_groups, top_groups: experts are num_groups groups of neighbours, of which a token chooses from those
            top_groups whose two best experts have the largest sum.
        bias_rate: what `update_bias` moves the bias by, for balance without a loss.
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
        self.top_k, self.scoring, self.normalize, self.scaling_factor = top_k, scoring, normalize, scaling_factor
        self.num_groups, self.top_groups, self.bias_rate = num_groups, top_groups, bias_rate
        self.balance_loss, self.z_loss = balance_loss, z_loss
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        balanced, counts = bias_rate != 0, torch.zeros(num_experts, device=device, dtype=torch.int64)
        bias = torch.zeros(num_experts, device=device, dtype=torch.float32)
        self.register_buffer("e_score_correction_bias", bias if balanced else None)
        self.register_buffer("tokens_per_expert", counts if balanced else None, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The weight as nn.Linear has it; the bias and the counts, if there are any, of zero."""
        nn.init.uniform_(self.weight, -(self.weight.shape[1] ** -0.5), self.weight.shape[1] ** -0.5)
        for buffer in self.buffers():
            buffer.zero_()

    def forward(self, x: Tensor) -> Routing:
        """x [T, D] -> ids and scores [T, top_k], losses; of DTensors that are Replicate(), the same.

        x: bfloat16, float16 or float32, on the weight's device.
        """
        check_dense("Router", "x", x, 2)
        require(x.dtype in INPUT_DTYPES, f"Router: x must be {either(map(dtype_name, INPUT_DTYPES))}, got {x.dtype}")
        (_, size), device = self.weight.shape, self.weight.device
        require(x.shape[1] == size, f"Router: x must have size {size} in dimension 1, got {x.shape[1]}")
        require(x.device == device, f"Router: x must be on the device of weight, {device}, got {x.device}")
        bias = self.e_score_correction_bias
        bias = None if bias is None else cast(bias, torch.float32)
        how = self.scoring, self.normalize, self.scaling_factor, self.num_groups, self.top_groups
        choose = partial(on_every_rank, "Router", _Choice.apply) if is_dtensor(x) else _Choice.apply
        logits, ids, scores = choose(x, self.weight, self.top_k, bias, *how)
        loss = self._loss(logits, ids)
        if self.training and self.tokens_per_expert is not None:
            counts = self._counts(ids)
            if is_dtensor(counts) and not is_dtensor(self.tokens_per_expert):
                counts = counts.to_local()  # of all tokens, as every rank has them
            self.tokens_per_expert.add_(counts)  # no assignment, which no graph has under a checkpoint
        return Routing(ids, scores, loss)

    @torch.no_grad()
    def update_bias(self) -> None:
        """Moves the bias of every expert by bias_rate towards balance, and counts anew: once a step of the optimizer.

        Data-parallel ranks add up their tokens_per_expert before.
        """
        require(self.tokens_per_expert is not None, "Router: bias_rate must not be 0 for update_bias, got 0")
        counts = self.tokens_per_expert.double()
        self.e_score_correction_bias.add_(self.bias_rate * (counts.mean() - counts).sign().float())
        self.tokens_per_expert.zero_()

    def _loss(self, logits: Tensor, ids: Tensor) -> Tensor:
        loss, tokens = logits.new_zeros(()), max(ids.shape[0], 1)
        if self.balance_loss:
            scores = logits.softmax(-1) if self.scoring == "softmax" else logits.sigmoid()
            shares = self._counts(ids) / (tokens * self.top_k)
            probabilities = (scores / scores.sum(-1, keepdim=True)).sum(0) / tokens
            loss = loss + self.balance_loss * len(shares) * (shares * probabilities).sum()
        if self.z_loss:
            loss = loss + self.z_loss * logits.logsumexp(-1).square().sum() / tokens
        return loss

    def _counts(self, ids: Tensor) -> Tensor:
        counts = ids.new_zeros(self.weight.shape[0])
        return counts.scatter_add(0, ids.flatten(), torch.ones_like(ids).flatten())


class MoE(nn.Module):
    """A router, the experts that it chooses, and experts that every token has, if any.

    Attributes:
        gate, experts, shared_experts: under which their parameters are in state dicts.

    Args:
        router: its forward [T, D] -> `Routing`, such as a `Router`.
        experts: such as `Experts`.
        shared_experts: any module [..., D] -> [..., D], such as a dense feed-forward layer; where experts have an
            ep, called while tokens travel to them.
    """

    def __init__(self, router: nn.Module, experts: nn.Module, shared_experts: nn.Module | None = None) -> None:
        super().__init__()
        self.gate, self.experts, self.shared_experts = router, experts, shared_experts

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [..., D] -> out, shaped as x, and the losses of the router, to be added to that of the model."""
        tokens = x.reshape(-1, x.shape[-1])
        routing = self.gate(tokens)
        call = tokens, routing.topk_ids, routing.topk_scores
        if self.shared_experts is None:
            return self.experts(*call).view(x.shape), routing.loss
        if getattr(self.experts, "ep", None) is None:
            return self.experts(*call).view(x.shape) + self.shared_experts(x), routing.loss
        out = self.experts(*call, shared_experts=lambda t: self.shared_experts(t.view(x.shape)).view(t.shape))
        return out.view(x.shape), routing.loss
