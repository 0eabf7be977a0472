"""Expert parallelism over DeepEP, in its normal mode. Tokens travel in FP8 with recipe "blockwise".

    buffer = deep_ep.Buffer(group, num_nvl_bytes, num_rdma_bytes)
    out = experts(buffer, x, topk_ids, topk_scores, w_gate_up, w_down, num_experts=256)

DeepEP moves tokens to the ranks of their experts, and sums the results over ranks. Gradients travel in BF16. In DeepEP,
the host waits until it knows how many tokens its rank receives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8_ext.distributed.message import rule_of_tokens
from moe_fp8_ext.layer.experts import call_with_options
from moe_fp8_ext.layer.node import LayerFunction
from moe_fp8_ext.layer.source import RoutedTokens
from moe_fp8_ext.ops import quantize_rows
from moe_fp8_ext.ops.checks import check_int, fail, validate_ids
from moe_fp8_ext.quantization.casting import cast, row_major
from moe_fp8_ext.quantization.prepare import Operand
from moe_fp8_ext.quantization.recipe import Recipe, Rule

_OP = "deepep.experts"
_METHODS = "get_dispatch_layout", "dispatch", "combine"


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
    **options: object,
) -> Tensor:
    """Computes `moe_fp8_ext.experts` for this rank's tokens with the experts of all ranks. Differentiable once.

    Args:
        buffer: a `deep_ep.Buffer`. The group has num_experts / E ranks.
        x, topk_ids, topk_scores: [T, D] and [T, top_k] of this rank. Ids are int64 and count all experts; -1 is no
            expert.
        w_gate_up, w_down: weights of this rank's E experts.
        num_experts: experts of all ranks.
        recipe: with "blockwise", tokens travel in FP8. With other recipes, and with wgrad_high_precision, in BF16.
        options: other arguments of `moe_fp8_ext.experts`.

    Raises:
        RuntimeError: buffer has not the methods of a `deep_ep.Buffer`; otherwise as in `moe_fp8_ext.experts`.
    """
    if missing := [name for name in _METHODS if not callable(getattr(buffer, name, None))]:
        fail(_OP, f"buffer must be a deep_ep.Buffer, got a {type(buffer).__name__} without {missing[0]}")
    call, x, scores, *rest = call_with_options(_OP, x, topk_ids, topk_scores, w_gate_up, w_down, recipe, **options)
    if topk_ids.dtype != torch.int64:
        fail(_OP, f"topk_ids must be int64, which DeepEP takes, got {topk_ids.dtype}")
    check_int(_OP, "num_experts", num_experts)
    if num_experts < 1 or num_experts % call.experts:
        fail(_OP, f"num_experts must be a multiple of the experts of w_down, {call.experts}, got {num_experts}")
    validate_ids(_OP, topk_ids, num_experts)
    rule = rule_of_tokens(call.recipe) if call.recipe.format == "blockwise" else None
    rows, scores, quantized, ids, handle = _Dispatch.apply(buffer, topk_ids, num_experts, rule, x, scores)
    source, call = RoutedTokens(ids, call.experts, quantized), call._replace(x_is_quantized=rule is not None)
    out = LayerFunction.apply(call, source, None, rows, scores, *rest)
    return cast(_Combine.apply(buffer, handle, out), x.dtype)


class _Dispatch(torch.autograd.Function):
    """Sends each token once to every rank with any of its experts. Received ids count this rank's experts."""

    @staticmethod
    def forward(ctx, buffer: object, ids: Tensor, num_experts: int, rule: Rule | None, x: Tensor, scores: Tensor):
        to_ranks, to_nodes, to_experts, is_sent, _ = buffer.get_dispatch_layout(ids, num_experts)
        sent = row_major(cast(x, torch.bfloat16))
        if rule is not None:
            cast_rows = quantize_rows(sent, rule.format, dtype=rule.dtype, rounding=rule.rounding)
            sent = tuple(t.contiguous() for t in cast_rows)
        counts = dict(num_tokens_per_rank=to_ranks, num_tokens_per_rdma_rank=to_nodes, num_tokens_per_expert=to_experts)
        routing = dict(is_token_in_rank=is_sent, topk_idx=ids, topk_weights=scores)
        rows, ids, scores, _, handle, _ = buffer.dispatch(sent, **counts, **routing)
        quantized = None if rule is None else Operand(*rows)
        if quantized is not None:  # a stand-in gets the gradient
            rows = x.new_empty((), dtype=torch.bfloat16).expand(quantized.values.shape)
        ctx.buffer, ctx.handle, ctx.dtype = buffer, handle, x.dtype
        ctx.mark_non_differentiable(ids)
        return rows, scores, quantized, ids, handle

    @staticmethod
    def backward(ctx, drows: Tensor, dscores: Tensor, *_: None):
        of_scores = dscores if ctx.needs_input_grad[5] else None
        dx, dscores, _ = ctx.buffer.combine(drows, ctx.handle, topk_weights=of_scores)
        return None, None, None, None, cast(dx, ctx.dtype), dscores


class _Combine(torch.autograd.Function):
    """Returns the results of ranks to their tokens, and sums them."""

    @staticmethod
    def forward(ctx, buffer: object, handle: object, rows: Tensor) -> Tensor:
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine(rows, handle)[0]

    @staticmethod
    def backward(ctx, dout: Tensor):
        return None, None, ctx.buffer.dispatch(row_major(cast(dout, torch.bfloat16)), handle=ctx.handle)[0]
