"""Products of tokens with factors of a low rank, by group: the narrow products of adapters, and their gradients."""

import torch
from torch import Tensor

from moe_fp8_ext.ops.checks import (
    FP8_DTYPES,
    check_both_or_none,
    check_dim,
    check_dtype,
    check_one_of,
    check_optional_indices,
    check_scale,
    require,
)
from moe_fp8_ext.ops.dispatch import fake
from moe_fp8_ext.quantization.format import FORMATS

_narrow_tokens = torch.ops.moe_fp8.narrow_tokens.default
_outer_tokens = torch.ops.moe_fp8.outer_tokens.default

FORMATS_OF_TOKENS = "rowwise", "blockwise"  # of x: their scales are in float32, and do not depend on groups


def narrow_tokens(
    x: Tensor,
    m: Tensor,
    offs: Tensor,
    *,
    x_scale: Tensor | None = None,
    format: str | None = None,
    indices: Tensor | None = None,
    top_k: int | None = None,
) -> Tensor:
    """Multiplies each row by the factor of its group.

        u[p, r] = sum over w of x[token, w] * m[e, r, w]
        token: indices[p] // top_k, or p without indices        e: offs[e-1] <= p < offs[e]

    A row is zero if it has no group, or if its index is no slot. The op does not read the token of such a row, nor the
    factor of an empty group. Sums are in float32, in an order that depends on the GPU and on sizes, and are rounded
    once. Two calls give the same bytes. The op is not differentiable.

    Args:
        x: [T, W] bfloat16, or FP8 with x_scale; stride 1 along W, any row stride. An element of FP8 stands for
            RN(q * scale) in bfloat16, as `dequantize` returns it.
        m: [E, R, W] bfloat16 on x's device; stride 1 along W, any other strides.
        offs: [E] ends of groups of rows, or of indices if there are any, as in `moe_fp8_ext.ops`.
        x_scale: float32 scales of x along rows, as `quantize_rows` returns them without indices.
        format: format of x, "rowwise" or "blockwise", given with x_scale and only then.
        indices: [P] int32 on x's device, as in `permute_pad`: the permutation of `sort_tokens`. None: P = T, and row p
            is x[p].
        top_k: slots per row of x, given with indices and only then.

    Returns:
        u [P, R] bfloat16, contiguous.
    """
    return _narrow_tokens(x, m, offs, x_scale, format, indices, top_k)


def outer_tokens(
    u: Tensor,
    x: Tensor,
    offs: Tensor,
    *,
    scores: Tensor | None = None,
    x_scale: Tensor | None = None,
    format: str | None = None,
    indices: Tensor | None = None,
    top_k: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Sums the outer products of the rows of each group, which is the gradient of the factor of `narrow_tokens`.

        out[e, r, w] = sum over the rows p of group e of RN(score * u[p, r]) * x[token, w]
        token: indices[p] // top_k, or p without indices        score: scores[indices[p]], or scores[p] without indices

    RN rounds to bfloat16. Without scores nothing is multiplied. A row whose index is no slot adds nothing, and neither
    does a row behind the last group; the op does not read such rows. An empty group gives zeros. Sums are in float32,
    in an order that depends on the GPU and on sizes, and are rounded once. Two calls give the same bytes. The op is not
    differentiable.

    Args:
        u: [P, R] bfloat16; stride 1 along R, any row stride.
        x: [T, W] on u's device, as in `narrow_tokens`.
        offs: [E] ends of groups of rows of u, as in `moe_fp8_ext.ops`.
        scores: float32 on u's device, contiguous, in any shape: T * top_k elements, such as [T, top_k], or P without
            indices. None: all scores are 1.
        x_scale: on u's device, as in `narrow_tokens`.
        format: format of x, given with x_scale and only then.
        indices: [P] int32 on u's device, as in `narrow_tokens`. None: T = P, and row p is x[p].
        top_k: slots per row of x, given with indices and only then.
        out_dtype: bfloat16 (default) or float32.

    Returns:
        out [E, R, W] of `out_dtype`, contiguous.
    """
    return _outer_tokens(u, x, offs, scores, x_scale, format, indices, top_k, out_dtype)


def _check_tokens(op, x, x_scale, format):
    check_both_or_none(op, x_scale=x_scale, format=format)
    check_dtype(op, "x", x.dtype, *((torch.bfloat16,) if x_scale is None else FP8_DTYPES))
    if x_scale is not None:
        check_one_of(op, "format", format, FORMATS_OF_TOKENS)
        check_scale(op, "x_scale", x_scale, FORMATS[format], FORMATS[format].scale_of_rows(x.shape).shape)


@fake(_narrow_tokens)
def _(op, x, m, offs, x_scale, format, indices, top_k):
    _check_tokens(op, x, x_scale, format)
    check_optional_indices(op, x.shape[0], indices, top_k)
    check_dim(op, "x", x, 1, m.shape[2])
    check_dim(op, "offs", offs, 0, m.shape[0])
    return m.new_empty((x.shape[0] if indices is None else indices.shape[0], m.shape[1]))


@fake(_outer_tokens)
def _(op, u, x, offs, scores, x_scale, format, indices, top_k, out_dtype):
    _check_tokens(op, x, x_scale, format)
    check_optional_indices(op, x.shape[0], indices, top_k)
    check_dim(op, "u", u, 0, x.shape[0] if indices is None else indices.shape[0])
    if scores is not None:
        slots = x.shape[0] if top_k is None else x.shape[0] * top_k
        require(scores.numel() == slots, f"{op}: scores must have {slots} elements, got {scores.numel()}")
    out_dtype = out_dtype or torch.bfloat16
    check_dtype(op, "out_dtype", out_dtype, torch.bfloat16, torch.float32)
    return u.new_empty((offs.shape[0], u.shape[1], x.shape[1]), dtype=out_dtype)
