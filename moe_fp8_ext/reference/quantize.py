"""The quantizers. Each applies `quantize_lines`: to rows, to the columns of a group, or to squares."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from .numerics import (
    BITS,
    FORMATS,
    Format,
    block_amax,
    cast_fp8,
    ceil_div,
    default_dtype,
    group_bounds,
    int32,
    multiplier_and_scale,
    padded_extent,
    round_up,
    row_major,
)
from .scales import column_major, swizzle_scales, unswizzle_scales
from .signature import of_op
from .tokens import permute_pad


def quantize_lines(x: Tensor, format: Format, dtype: torch.dtype | None, rounding: str | None) -> tuple[Tensor, Tensor]:
    """x [..., n] -> q [..., n], scale [..., blocks]: one scale per block of neighbours.

    The last block may be short; zeros do not change its amax.
    """
    dtype, n = dtype or default_dtype(x.device), x.shape[-1]
    blocks, size = format.blocks(n), format.block or n
    x = pad(x.float(), (0, blocks * size - n)).reshape(*x.shape[:-1], blocks, size)
    multiplier, scale = multiplier_and_scale(block_amax(x), format, dtype, rounding)
    q = cast_fp8(x * multiplier[..., None], dtype).flatten(-2)[..., :n]
    return row_major(q.view(torch.uint8)).view(dtype), scale


def batch_scale(x: Tensor, format: Format, dtype: torch.dtype | None, rounding: str | None) -> tuple[Tensor, Tensor]:
    """x [M, K] -> multiplier [K], scale [K]: one per column, from its finite values."""
    finite = torch.where(x.isfinite(), x, 0).float()
    return multiplier_and_scale(block_amax(finite.t()), format, dtype or default_dtype(x.device), rounding)


def cast_lines(x: Tensor, multiplier: Tensor, dtype: torch.dtype) -> Tensor:
    """x [lines, n], multiplier [lines] -> q [lines, n]; a value that is not finite becomes NaN.

    The multiplier says nothing about such values, so the cast alone would turn an Inf into +-FP8_MAX.
    """
    return cast_fp8((x.float() * multiplier[:, None]).masked_fill(~x.isfinite(), torch.nan), dtype)


def quantize_squares(
    w: Tensor, format: Format, dtype: torch.dtype | None, rounding: str | None
) -> tuple[Tensor, Tensor]:
    """w [E, N, K] -> q [E, N, K], scale [E, ceil(N / 128), ceil(K / 128)]: one scale per square of 128 x 128.

    Each square is flattened into one line, which is quantized as a whole.
    """
    size, (e, n, k) = format.block, w.shape
    rows, cols = ceil_div(n, size), ceil_div(k, size)  # of squares
    padded = pad(w.float(), (0, cols * size - k, 0, rows * size - n))
    squares = padded.view(e, rows, size, cols, size).transpose(2, 3)
    lines = squares.reshape(e, rows, cols, size * size)
    q, scale = quantize_lines(lines, replace(format, block=None), dtype, rounding)
    q_padded = q.view(torch.uint8).view(squares.shape).transpose(2, 3).reshape(padded.shape)
    return row_major(q_padded[:, :n, :k]).view(q.dtype), row_major(scale.squeeze(-1))


def arrange_scales(scale: Tensor, format: Format, groups: str | None, offs: Tensor | None) -> Tensor:
    """scale [..., rows, blocks] in the memory order of the format; [..., rows] if a line has one scale."""
    if format.block is None:
        return row_major(scale.squeeze(-1))
    if format.order == "blocked":
        return swizzle_scales(scale, groups=groups, offs=offs)[0]
    if format.order == "column_major":
        return column_major(scale)
    return row_major(scale)


@of_op
def quantize_rows(x, format, offs, indices, top_k, dtype, rounding):
    """x [M, K] ("rowwise": [..., K]) -> q, shaped as x, and scale [M] or [M, blocks].

    With offs, blocked scales go by groups of rows. With indices, x is permute_pad(x, indices, top_k).
    """
    x = x if indices is None else permute_pad(x, indices, top_k)
    q, scale = quantize_lines(x, FORMATS[format], dtype, rounding)
    return q, arrange_scales(scale, FORMATS[format], None if offs is None else "rows", offs)


@of_op
def permute_quantized(q, scale, format, indices, top_k, offs):
    """q [M, K] and scale of quantize_rows, indices [P] -> q [P, K] and scale of the gathered rows.

    A row whose index is no slot has zero bytes.
    """
    f, (m, k) = FORMATS[format], q.shape
    if f.block is None:
        scale = scale[:, None]
    if f.order == "blocked":
        scale = unswizzle_scales(scale, m, f.blocks(k))
    scale = permute_pad(scale, indices, top_k)
    return permute_pad(q, indices, top_k), arrange_scales(scale, f, None if offs is None else "rows", offs)


@of_op
def quantize_tokens(x, format, offs, indices, top_k, align, dtype, rounding, amax):
    """x [M, K] -> q_t [K, P], scale_t [E, K] or [K, blocks], padded_offs [E].

    q_t holds the transposes of all groups side by side. A group takes round_up(size, align) columns of q_t. Columns
    that it does not fill are zero, and so are scales of blocks without rows.

    With amax "batch" a column has one scale, from the rows of all groups. With amax "square" 128 columns share a scale:
    scale_t is [ceil(K / 128), blocks].
    """
    f, dtype = FORMATS[format], dtype or default_dtype(x.device)
    x = x if indices is None else permute_pad(x, indices, top_k)
    m, k = x.shape
    bounds = group_bounds(offs, m)
    align = align or f.align
    q_t = torch.zeros(k, padded_extent(m, len(offs), align), dtype=torch.uint8, device=x.device)
    scale_rows = ceil_div(k, f.weight_rows) if amax == "square" else k
    blocks = padded_extent(m, len(offs), max(align, f.block)) // f.block if f.block else len(offs)
    scale_t = torch.zeros(scale_rows, blocks, dtype=BITS[f.scale_dtype.itemsize], device=x.device)
    if amax == "batch":
        rows_of_groups = x[: bounds[-1][1] if bounds else 0]
        batch_multiplier, batch_scales = batch_scale(rows_of_groups, f, dtype, rounding)
    padded_offs, position, block = [], 0, 0
    for start, end in bounds:
        lines = x[start:end].t()
        if amax == "batch":
            q, scale = cast_lines(lines, batch_multiplier, dtype), batch_scales[:, None]
        elif amax == "square":
            q, scale = (t[0] for t in quantize_squares(lines[None], f, dtype, rounding))
        else:
            q, scale = quantize_lines(lines, f, dtype, rounding)
        q_t[:, position : position + end - start] = q.view(torch.uint8)
        scale_t[:, block : block + scale.shape[1]] = scale.view(scale_t.dtype)
        position += round_up(end - start, align)
        block += f.group_blocks(end - start, align)
        padded_offs.append(position)
    padded_offs, scale_t = int32(padded_offs, x.device), scale_t.view(f.scale_dtype)
    if f.block is None:
        scale_t = row_major(scale_t.t())
    else:
        scale_t = arrange_scales(scale_t, f, "columns", padded_offs // f.block)
    return q_t.view(dtype), scale_t, padded_offs


@of_op
def quantize_both(x, format, offs, indices, top_k, align, dtype, rounding, amax):
    """x [M, K] -> q, scale, q_t, scale_t, padded_offs: both directions.

    With amax "batch", q and scale hold the rows of x, without indices.
    """
    gathered = x if indices is None else permute_pad(x, indices, top_k)
    rows = quantize_rows(x if amax == "batch" else gathered, format, offs=offs, dtype=dtype, rounding=rounding)
    options = dict(offs=offs, align=align, dtype=dtype, rounding=rounding, amax=amax)
    return *rows, *quantize_tokens(gathered, format, **options)


@of_op
def quantize_weight(w, format, dtype, rounding, directions):
    """w [E, N, K] -> q [E, N, K], scale, q_t [E, K, N], scale_t: both directions of every expert.

    With directions "rows" or "transposed", the results of the other direction have no experts.
    """
    f = FORMATS[format]
    if f.weight_rows > 1:
        q, scale = quantize_squares(w, f, dtype, rounding)
        q_t, scale_t = row_major(q.view(torch.uint8).mT).view(q.dtype), row_major(scale.mT)
    else:
        (q, scale), (q_t, scale_t) = (quantize_lines(lines, f, dtype, rounding) for lines in (w, w.mT))
        scale, scale_t = (arrange_scales(s, f, "experts", None) for s in (scale, scale_t))
    of_rows, of_columns = (0 if directions == other else len(w) for other in ("transposed", "rows"))
    return q[:of_rows], scale[:of_rows], q_t[:of_columns], scale_t[:of_columns]


@of_op
def transpose_weight(q):
    """q [E, N, K] -> q_t [E, K, N], contiguous."""
    return row_major(q.view(torch.uint8).mT).view(q.dtype)
