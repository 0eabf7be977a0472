"""The weighted sum over the slots of each token, and its gradient."""

import torch
from torch import Tensor

from moe_fp8_ext.ops.checks import check_count, check_shape, require
from moe_fp8_ext.ops.dispatch import differentiable_once, fake, register_gradient, unit_stride

_combine = torch.ops.moe_fp8.combine.default
_combine_backward = torch.ops.moe_fp8.combine_backward.default


def combine(y: Tensor, inverse: Tensor, topk_scores: Tensor | None = None) -> Tensor:
    """Sums the rows of each token's slots, weighted by the router's scores, back in the order of tokens.

        out[t] = sum over j = 0, 1, ... of topk_scores[t, j] * y[inverse[t, j]]

    Products and sums are rounded to float32, in that order. The last sum is rounded to the dtype of `y`, to nearest
    even; a NaN becomes the quiet NaN of the dtype. Without scores, rows are only added.

    The op is differentiable once, in y and topk_scores, if no two slots have the same row.

    Args:
        y: [P, K] bfloat16, float16 or float32; stride 1 along K, any row stride.
        inverse: [T, top_k] int32 on y's device, contiguous: the row of y of each slot, as `sort_tokens` returns it for
            ids of two dimensions. A value out of [0, P), such as the -1 of a dropped slot, adds nothing. With
            MOE_FP8_VALIDATE=1 the op raises for such a value unless it is -1, and backward raises for two slots with
            the same row.
        topk_scores: [T, top_k] float32 or of y's dtype, contiguous, on the same device. None: all scores are 1.

    Returns:
        out [T, K] of y's dtype, contiguous.
    """
    return _combine(y, inverse, topk_scores)


def combine_backward(
    grad: Tensor,
    y: Tensor | None,
    topk_scores: Tensor | None,
    inverse: Tensor,
    num_rows: int,
    *,
    keep_grad_y: bool = True,
) -> tuple[Tensor, Tensor]:
    """Computes the gradients of `combine`, for callers that write their own backward.

        grad_y[inverse[t, j]] = topk_scores[t, j] * grad[t]
        grad_scores[t, j]     = grad[t] . y[inverse[t, j]]

    Rows of y without a slot get zeros. If several slots have the same row, only the slot with the largest number gets a
    gradient. Dot products are summed in float32, in an order that depends only on the device.

    Args:
        grad: [T, K] bfloat16, float16 or float32; stride 1 along K, any row stride.
        y: [num_rows, K] of grad's dtype, on the same device; stride 1 along K, any row stride. None: no gradient of the
            scores.
        topk_scores: [T, top_k] float32 or of grad's dtype, as in `combine`. None: all scores are 1.
        inverse: [T, top_k] int32, as in `combine`.
        num_rows: P, the number of rows of y.
        keep_grad_y: whether to compute grad_y; otherwise it has no rows. Without grad_y, slots may share rows of y,
            such as the bias of an expert, and each slot gets the gradient of its score.

    Returns:
        grad_y [num_rows, K] of grad's dtype; grad_scores [T, top_k], or [0] without y, of topk_scores' dtype, float32
        without scores. Both contiguous.
    """
    return _combine_backward(grad, y, topk_scores, inverse, num_rows, keep_grad_y)


def _save(ctx, inputs, output):
    y, inverse, *scores = inputs
    topk_scores = scores[0] if scores else None
    ctx.needs_scores = topk_scores is not None and topk_scores.requires_grad
    ctx.rows = y.shape[0]
    ctx.save_for_backward(y if ctx.needs_scores else None, topk_scores, inverse)


@differentiable_once
def _backward(ctx, grad):
    grad_y, grad_scores = _combine_backward(unit_stride(grad), *ctx.saved_tensors, ctx.rows, True)
    return (grad_y, None, grad_scores) if ctx.needs_scores else (grad_y,)


register_gradient(_combine, _save, _backward)


@fake(_combine)
def _(op, y, inverse, topk_scores):
    if topk_scores is not None:
        check_shape(op, "topk_scores", topk_scores, inverse.shape)
    return y.new_empty((inverse.shape[0], y.shape[1]))


@fake(_combine_backward)
def _(op, grad, y, topk_scores, inverse, num_rows, keep_grad_y):
    t, got = inverse.shape[0], grad.shape[0]
    require(got == t, f"{op}: grad must have the {t} rows of inverse, got {got}")
    if topk_scores is not None:
        check_shape(op, "topk_scores", topk_scores, inverse.shape)
    check_count(op, "num_rows", num_rows)
    if y is not None:
        require(y.dtype == grad.dtype, f"{op}: y must be, like grad, {grad.dtype}, got {y.dtype}")
        check_shape(op, "y", y, (num_rows, grad.shape[1]))
    dtype = torch.float32 if topk_scores is None else topk_scores.dtype
    scores_shape = (0,) if y is None else inverse.shape
    return grad.new_empty((num_rows if keep_grad_y else 0, grad.shape[1])), grad.new_empty(scores_shape, dtype=dtype)
