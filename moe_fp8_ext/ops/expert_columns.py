"""Conversion between rows of slots and rows of tokens with columns for each expert, for dense products."""

import torch
from torch import Tensor

from moe_fp8_ext.ops.checks import check_indices, check_shape, require
from moe_fp8_ext.ops.dispatch import fake

_take_expert_columns = torch.ops.moe_fp8.take_expert_columns.default
_spread_expert_columns = torch.ops.moe_fp8.spread_expert_columns.default


def take_expert_columns(x: Tensor, offs: Tensor, indices: Tensor, top_k: int) -> Tensor:
    """Gathers for each slot the columns of its expert from the row of its token.

        out[p, r] = x[indices[p] // top_k, e * R + r]        e: offs[e-1] <= p < offs[e]

    The op is not differentiable.

    Args:
        x: [T, E * R], any dtype of 1, 2 or 4 bytes; stride 1 along the columns, any row stride.
        offs: [E] ends of groups of indices, as in `moe_fp8_ext.ops`. A row without a group is zero.
        indices: [P] int32 on x's device, as in `permute_pad`: the permutation of `sort_tokens`.
        top_k: slots per row of x.

    Returns:
        out [P, R] of x's dtype, contiguous.
    """
    return _take_expert_columns(x, offs, indices, top_k)


def spread_expert_columns(y: Tensor, offs: Tensor, inverse: Tensor, topk_scores: Tensor | None = None) -> Tensor:
    """Puts the row of each slot into the columns of its expert, in the row of its token.

        out[t, e * R + r] = sum over j of topk_scores[t, j] * y[inverse[t, j], r]        j: inverse[t, j] is in group e

    Products and sums are rounded to float32, with rising j. The last sum is rounded to the dtype of `y`. Columns of an
    expert that the token does not use are zero. Without scores nothing is multiplied. The op is not differentiable.

    Args:
        y: [P, R] bfloat16, float16 or float32; stride 1 along R, any row stride.
        offs: [E] ends of groups of rows, as in `moe_fp8_ext.ops`. A row without a group is not used.
        inverse: [T, top_k] int32 on y's device, contiguous, as in `combine`.
        topk_scores: [T, top_k] float32, contiguous, on the same device. None: all scores are 1.

    Returns:
        out [T, E * R] of y's dtype, contiguous.
    """
    return _spread_expert_columns(y, offs, inverse, topk_scores)


@fake(_take_expert_columns)
def _(op, x, offs, indices, top_k):
    check_indices(op, x.shape[0], top_k)
    e, columns = offs.shape[0], x.shape[1]
    fits = columns % e == 0 if e else columns == 0
    require(fits, f"{op}: x must have as many columns for each of the {e} groups, got {columns}")
    return x.new_empty((indices.shape[0], columns // e if e else 0))


@fake(_spread_expert_columns)
def _(op, y, offs, inverse, topk_scores):
    if topk_scores is not None:
        check_shape(op, "topk_scores", topk_scores, inverse.shape)
    return y.new_empty((inverse.shape[0], offs.shape[0] * y.shape[1]))
