"""Experts behind the all-to-all of DeepEP, in its normal mode. Tokens travel in FP8 with recipe "blockwise".

    buffer = deep_ep.Buffer(group, num_nvl_bytes, num_rdma_bytes)
    out = experts(buffer, x, topk_ids, topk_scores, w_gate_up, w_down, num_experts=256)

DeepEP moves tokens, and sums over ranks what their experts return. Experts multiply the received FP8 values as they
are. Gradients travel in BF16. DeepEP itself waits for the host, to learn how many tokens a rank receives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from moe_fp8_ext.layer.adapter import LoRA
from moe_fp8_ext.layer.experts import Projection, layer_call
from moe_fp8_ext.layer.node import LayerFunction
from moe_fp8_ext.layer.source import Chunk, Source
from moe_fp8_ext.layer.weight_gradients import DelayedWgrads
from moe_fp8_ext.matmul.engine import Groups
from moe_fp8_ext.ops import quantize_rows, sort_tokens
from moe_fp8_ext.ops.checks import fail
from moe_fp8_ext.quantization.casting import cast, row_major
from moe_fp8_ext.quantization.prepare import Operand
from moe_fp8_ext.quantization.recipe import Recipe

_OP = "deepep.experts"
_METHODS = "get_dispatch_layout", "dispatch", "combine"
_SCORES = object()  # stands for gradients of scores


def experts(
    buffer: object,
    x: Tensor,
    topk_ids: Tensor,
    topk_scores: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    *,
    num_experts: int,
    recipe: str | Recipe = "blockwise",
    activation: str = "swiglu",
    interleaved: bool = False,
    b_gate_up: Tensor | None = None,
    b_down: Tensor | None = None,
    keep: str = "fp8",
    main_grad_gate_up: Tensor | None = None,
    main_grad_down: Tensor | None = None,
    lora_gate_up: LoRA | tuple[Tensor, Tensor, float] | None = None,
    lora_down: LoRA | tuple[Tensor, Tensor, float] | None = None,
    delay_wgrad: DelayedWgrads | None = None,
) -> Tensor:
    """Computes `moe_fp8_ext.experts` for this rank's tokens with the experts of all ranks. Differentiable once.

    Args:
        buffer: a `deep_ep.Buffer`. The group has num_experts / E ranks.
        x: [T, D] of this rank.
        topk_ids: [T, top_k] int64, ids of all experts; -1 for a slot without an expert.
        topk_scores: [T, top_k].
        w_gate_up, w_down: of this rank's E experts. They, and all other arguments, are as in `moe_fp8_ext.experts`.
        num_experts: of all ranks together.
        recipe: with another recipe than "blockwise", tokens travel in BF16.

    Raises:
        RuntimeError: as `moe_fp8_ext.experts`, or buffer is no `deep_ep.Buffer`.
    """
    if missing := [name for name in _METHODS if not callable(getattr(buffer, name, None))]:
        fail(_OP, f"buffer must be a deep_ep.Buffer, got a {type(buffer).__name__} without {missing[0]}")
    up = Projection(w_gate_up, b_gate_up, main_grad_gate_up, lora_gate_up)
    down = Projection(w_down, b_down, main_grad_down, lora_down)
    options = up, down, recipe, activation, interleaved, keep, delay_wgrad
    call, *inputs = layer_call(_OP, x, topk_ids, topk_scores, *options)
    if topk_ids.dtype != torch.int64:
        fail(_OP, f"topk_ids must be int64, which DeepEP takes, got {topk_ids.dtype}")
    if num_experts % call.experts:
        fail(_OP, f"num_experts must be a multiple of the experts of w_down, {call.experts}, got {num_experts}")
    source = _Dispatched(buffer, topk_ids, num_experts, call.experts, call.recipe)
    return LayerFunction.apply(call, source, None, *inputs)


class _Dispatched(Source):
    """Tokens that DeepEP brings from all ranks, each once, with the ids of this rank's experts and -1 for others."""

    def __init__(self, buffer: object, ids: Tensor, num_experts: int, local_experts: int, recipe: Recipe) -> None:
        self.buffer, self.ids, self.num_experts, self.local_experts = buffer, ids, num_experts, local_experts
        self.rule = (recipe.dtype, recipe.rounding) if recipe.format == "blockwise" else None
        self.handle: object = None  # of DeepEP: where the tokens came from
        self.of_scores: Tensor | None = None  # [N, top_k] of received tokens, until they are combined
        self.scores: Tensor | None = None  # [T, top_k], afterwards

    def chunks(self, x: Tensor, scores: Tensor) -> Iterable[Chunk]:
        to_ranks, to_nodes, to_experts, is_sent, _ = self.buffer.get_dispatch_layout(self.ids, self.num_experts)
        layout = dict(num_tokens_per_rank=to_ranks, num_tokens_per_rdma_rank=to_nodes, is_token_in_rank=is_sent)
        sent = row_major(cast(x, torch.bfloat16))
        if self.rule is not None:
            q, scale = quantize_rows(sent, "blockwise", dtype=self.rule[0], rounding=self.rule[1])
            sent = q, scale.contiguous()
        routing = dict(topk_idx=self.ids, topk_weights=scores, num_tokens_per_expert=to_experts)
        rows, ids, scores, _, self.handle, _ = self.buffer.dispatch(sent, **layout, **routing)
        permutation, offs, inverse = sort_tokens(ids, self.local_experts)
        tokens = Operand(*rows) if isinstance(rows, tuple) else Operand(rows)
        return [Chunk(tokens, scores, Groups(offs, permutation, ids.shape[1], inverse))]

    def gradient_chunks(self, dout: Tensor) -> Iterable[Operand]:
        rows, *_ = self.buffer.dispatch(row_major(cast(dout, torch.bfloat16)), handle=self.handle)
        return [Operand(rows)]

    def give_back(self, chunk: int, rows: Tensor) -> object:
        if rows.dtype == torch.float32:  # gradients of scores wait, because they travel with the gradients of x
            self.of_scores = rows
            return _SCORES
        self.width = rows.shape[1]
        out, self.scores, _ = self.buffer.combine(rows, self.handle, topk_weights=self.of_scores)
        self.of_scores = None
        return out

    def collect(self, given_back: Sequence[object]) -> Tensor:
        (rows,) = given_back
        if rows is not _SCORES:
            return rows
        if self.of_scores is not None:  # x needs no gradient
            self.give_back(0, self.of_scores.new_zeros(len(self.of_scores), self.width, dtype=torch.bfloat16))
        return self.scores

    def static(self) -> Source:
        return self  # the handle has no memory of tokens
