"""Conversion of scales to and from the blocked layout that Blackwell's tensor cores read."""

import torch
from torch import Tensor

from moe_fp8_ext.ops.checks import (
    check_count,
    check_dims,
    check_one_of,
    check_padded,
    check_scale_of_operand,
    check_shape,
    check_size,
    require,
)
from moe_fp8_ext.ops.dispatch import fake
from moe_fp8_ext.quantization.format import FORMATS, blocked_shape

_swizzle_scales = torch.ops.moe_fp8.swizzle_scales.default
_unswizzle_scales = torch.ops.moe_fp8.unswizzle_scales.default
_expand_scales = torch.ops.moe_fp8.expand_scales.default


def swizzle_scales(scale: Tensor, *, groups: str | None = None, offs: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Moves scales of one byte into the blocked layout that Blackwell's tensor cores read.

        scale[r, c]  ->  block (r // 128, c // 4), byte 16 * (r % 32) + 4 * (r // 32 % 4) + c % 4

    A block is 128 rows by 4 columns, 512 neighbouring bytes. Blocks follow one another along a row of blocks. With
    groups, every group is a separate blocked matrix, one behind the other:

        None        one matrix
        "rows"      group e is the rows of `blocked` from starts[e] to starts[e] + round_up(size of e, 128)
        "columns"   group e is the bytes of `blocked` from starts[e] * round_up(R, 128) on
        "experts"   blocked[e] is scale[e] blocked, flat

    Args:
        scale: [R, C] ("experts": [E, R, C]), any dtype of one byte; stride 1 along C, any other strides.
        groups: None, "rows", "columns" or "experts", as above.
        offs: [E], as in `moe_fp8_ext.ops`; required for "rows" and "columns", otherwise None. A column of scales stands
            for a block of tokens, so with "columns" offs counts blocks, not tokens.

    Returns:
        blocked of scale's dtype, contiguous. The shape only counts bytes; their order follows the blocks. Padding and
        bytes that belong to no group are zero.

        - None: [round_up(R, 128), round_up(C, 4)];
        - "rows": [R + 128 * E, round_up(C, 4)];
        - "columns": [round_up(R, 128), C + 4 * E];
        - "experts": [E, round_up(R, 128) * round_up(C, 4)].

        starts int32: for "rows" [E], the first row of each group in `blocked`; for "columns" [E], the sum of the sizes
        of the previous groups, each rounded up to 4; otherwise [0].

    Source: NVIDIA cuBLAS, "1D block scaling factors layout".
    """
    return _swizzle_scales(scale, groups, offs)


def unswizzle_scales(
    blocked: Tensor, rows: int, cols: int, *, groups: str | None = None, offs: Tensor | None = None
) -> Tensor:
    """Moves scales out of the blocked layout: the inverse of `swizzle_scales`.

        swizzle_scales(scale, ...)[0] = blocked

    Args:
        blocked: as `swizzle_scales` returns it for scales of these sizes; any dtype of one byte, contiguous.
        rows, cols: the size of the result; for "experts", the size of one matrix.
        groups, offs: as in `swizzle_scales`.

    Returns:
        scale [rows, cols] ("experts": [E, rows, cols]) of blocked's dtype, contiguous; zero bytes from `offs[-1]` on.

    Source: the layout of `swizzle_scales`.
    """
    return _unswizzle_scales(blocked, rows, cols, groups, offs)


def expand_scales(q: Tensor, scale: Tensor, *, along: str = "rows", offs: Tensor | None = None) -> Tensor:
    """Turns scales of "blockwise" that are powers of two into the scales of "mxfp8" for the same fp8 values.

        scale of the block k // 128  ->  its E8M0 byte, for each of the blocks k // 32, in the blocked layout

    The operand then has format "mxfp8": `dequantize` and `scaled_grouped_mm` give the same bytes as before. Quantizers
    with rounding="pow2" return scales that are powers of two. An E8M0 byte holds 2^-127 to 2^127 and NaN. Nothing is
    rounded: any other scale becomes NaN, such as a scale of rounding="exact", 0, an infinity or a negative number.

    Args:
        q: the values of the operand, along="rows" [M, K] or a weight [E, N, K], along="tokens" [K, P]. Any fp8 dtype;
            stride 1 in the last dimension. The op reads its shape only.
        scale: float32, as the quantizer of "blockwise" returned it: [M, ceil(K / 128)], [E, ceil(N / 128), ceil(K /
            128)] or, for K features or their squares, [K, B] or [ceil(K / 128), B]. Any strides.
        along: "rows" or "tokens".
        offs: [E], as in `moe_fp8_ext.ops`. Along tokens, offs is required and counts positions: the quantizer's
            padded_offs. Along rows, give the groups of the product's rows, or None for scales of one matrix. None for a
            weight.

    Returns:
        scale float8_e8m0fnu, contiguous, as the quantizers of "mxfp8" lay it out. Padding and bytes that belong to no
        group are zero.

        - groups of rows: [M + 128 * E, round_up(ceil(K / 32), 4)]; without groups [round_up(M, 128), ...];
        - a weight: [E, round_up(N, 128) * round_up(ceil(K / 32), 4)];
        - along tokens: [round_up(K, 128), ceil(P / 32) + 4 * E].

    Source: the formats of DESIGN.md sections 3 and 5; the layout of `swizzle_scales`.
    """
    return _expand_scales(q, scale, along, offs)


def _check_groups(op: str, groups: str | None, offs: Tensor | None) -> None:
    text = f"{op}: groups must be None, 'rows', 'columns' or 'experts', got '{groups}'"
    require(groups in (None, "rows", "columns", "experts"), text)
    needs_offs = groups in ("rows", "columns")
    require(offs is not None or not needs_offs, f"{op}: offs must be given with groups '{groups}', got None")
    require(offs is None or needs_offs, f"{op}: offs must be None with groups {groups}, got a tensor")


def _blocked_shape(
    op: str, arg: str, x: Tensor, rows: int, cols: int, groups: str | None, offs: Tensor | None
) -> tuple[int, ...]:
    if offs is None:
        return blocked_shape(rows, cols, groups, x.shape[0])
    shape = blocked_shape(rows, cols, groups, offs.shape[0])
    check_size(op, arg, shape[0 if groups == "rows" else 1], f"{groups} with padding")
    return shape


@fake(_swizzle_scales)
def _(op, scale, groups, offs):
    _check_groups(op, groups, offs)
    dims = 3 if groups == "experts" else 2
    check_dims(op, "scale", scale, dims, dims)
    shape = _blocked_shape(op, "scale", scale, *scale.shape[-2:], groups, offs)
    starts = (0,) if offs is None else offs.shape
    return scale.new_empty(shape), scale.new_empty(starts, dtype=torch.int32)


@fake(_unswizzle_scales)
def _(op, blocked, rows, cols, groups, offs):
    _check_groups(op, groups, offs)
    check_count(op, "rows", rows)
    check_count(op, "cols", cols)
    check_shape(op, "blocked", blocked, _blocked_shape(op, "blocked", blocked, rows, cols, groups, offs))
    return blocked.new_empty((blocked.shape[0], rows, cols) if groups == "experts" else (rows, cols))


@fake(_expand_scales)
def _(op, q, scale, along, offs):
    check_one_of(op, "along", along, ("rows", "tokens"))
    along_tokens, e = along == "tokens", None
    if along_tokens:
        check_dims(op, "q", q, 2, 2)
        require(offs is not None, f"{op}: offs must be given along tokens, got None")
    require(offs is None or q.dim() != 3, f"{op}: offs must be None for a weight, got a tensor")
    if offs is not None:
        e = offs.shape[0]
        check_padded(op, "q", q.shape[1 if along_tokens else 0], e, along_tokens)
    check_scale_of_operand(op, q, scale, FORMATS["blockwise"], along_tokens, e)
    mxfp8 = FORMATS["mxfp8"]
    return mxfp8.scale_of_operand(q.shape, along_tokens, e).empty(q, mxfp8.scale_dtype)
