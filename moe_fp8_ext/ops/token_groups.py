"""Padding of token groups, for consumers that need every group to begin at a multiple of `align`."""

import torch
from torch import Tensor

from moe_fp8_ext.ops.checks import check_align, check_count, require
from moe_fp8_ext.ops.dispatch import fake, register_gradient, unit_stride
from moe_fp8_ext.quantization.format import padded_extent

_pad_token_groups = torch.ops.moe_fp8.pad_token_groups.default
_pad_token_groups_to = torch.ops.moe_fp8.pad_token_groups_to.default
_unpad_token_groups = torch.ops.moe_fp8.unpad_token_groups.default


def pad_token_groups(x: Tensor, offs: Tensor, align: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Copies token groups into a padded layout, in which each group begins at a multiple of `align`.

        x_padded[padded_starts[e] + i] = x[start of group e + i]

    All other rows of `x_padded` are zero. The op is differentiable in x.

    Args:
        x: [M, K], any dtype of 1, 2 or 4 bytes; stride 1 along K, any row stride.
        offs: [E] ends of groups of rows, as in `moe_fp8_ext.ops`.
        align: A power of two from 1 to 256.

    Returns:
        x_padded [P, K] of x's dtype, P = round_up(M, align) + E * align; padded_starts [E] int32, the first row of each
        group; padded_offs [E] int32, the row behind the padding of each group. All contiguous.

    Source: the equation above; padded layout of DESIGN.md section 4.
    """
    return _pad_token_groups(x, offs, align)


def pad_token_groups_to(x: Tensor, offs: Tensor, padded_starts: Tensor, num_padded: int) -> Tensor:
    """Copies token groups to given rows, such as `pad_token_groups` chose for another tensor of the same tokens.

        x_padded[padded_starts[e] + i] = x[start of group e + i]

    All other rows of `x_padded` are zero. The op is differentiable in x.

    Args:
        x: [M, K], any dtype of 1, 2 or 4 bytes; stride 1 along K, any row stride.
        offs: [E] ends of groups of rows, as in `moe_fp8_ext.ops`.
        padded_starts: [E] int32 on the same device, non-decreasing: the first row of each group in the result. The op
            clamps the contents into [0, num_padded] and makes them monotonic. A row that does not fit before the next
            group is left out. With MOE_FP8_VALIDATE=1 the op checks them.
        num_padded: rows of the result.

    Returns:
        x_padded [num_padded, K] of x's dtype, contiguous.
    """
    return _pad_token_groups_to(x, offs, padded_starts, num_padded)


def unpad_token_groups(y: Tensor, offs: Tensor, padded_starts: Tensor, num_tokens: int) -> Tensor:
    """Copies padded token groups into a layout without gaps: the inverse of `pad_token_groups`.

        x[start of group e + i] = y[padded_starts[e] + i]

    Rows from `offs[-1]` on are zero. The op is differentiable in y.

    Args:
        y: [P, K], any dtype of 1, 2 or 4 bytes; stride 1 along K, any row stride.
        offs: [E] ends of groups of rows of the result, as in `moe_fp8_ext.ops`.
        padded_starts: [E] int32 on the same device: the first row of each group in y. A row beyond y is zero.
        num_tokens: rows of the result.

    Returns:
        x [num_tokens, K] of y's dtype, contiguous.
    """
    return _unpad_token_groups(y, offs, padded_starts, num_tokens)


def _save(ctx, inputs, output):
    ctx.rows = inputs[0].shape[0]
    padded_starts = inputs[2] if isinstance(output, Tensor) else output[1]  # given or, by `pad_token_groups`, chosen
    ctx.save_for_backward(inputs[1], padded_starts)


def _pad_backward(ctx, grad, *_):
    return (unpad_token_groups(unit_stride(grad), *ctx.saved_tensors, ctx.rows),)


def _unpad_backward(ctx, grad):
    return (pad_token_groups_to(unit_stride(grad), *ctx.saved_tensors, ctx.rows),)


register_gradient(_pad_token_groups, _save, _pad_backward)
register_gradient(_pad_token_groups_to, _save, _pad_backward)
register_gradient(_unpad_token_groups, _save, _unpad_backward)


def _check_starts(op: str, starts: Tensor, offs: Tensor) -> None:
    e, got = offs.shape[0], starts.shape[0]
    require(got == e, f"{op}: padded_starts must have the {e} entries of offs, got {got}")


@fake(_pad_token_groups)
def _(op, x, offs, align):
    (m, k), e = x.shape, offs.shape[0]
    check_align(op, align, "x", m, e)
    return x.new_empty((padded_extent(m, e, align), k)), offs.new_empty((e,)), offs.new_empty((e,))


@fake(_pad_token_groups_to)
def _(op, x, offs, padded_starts, num_padded):
    _check_starts(op, padded_starts, offs)
    check_count(op, "num_padded", num_padded)
    return x.new_empty((num_padded, x.shape[1]))


@fake(_unpad_token_groups)
def _(op, y, offs, padded_starts, num_tokens):
    check_count(op, "num_tokens", num_tokens)
    _check_starts(op, padded_starts, offs)
    return y.new_empty((num_tokens, y.shape[1]))
