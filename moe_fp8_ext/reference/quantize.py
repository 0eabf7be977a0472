"""The quantizers. Every one is `quantize_lines` of something: of rows, of the columns of a group, of squares."""

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
    padded_extent,
    round_up,
    row_major,
    scale_of,
)
from .scales import column_major, swizzle_scales, unswizzle_scales
from .tokens import permute_pad


def quantize_lines(x: Tensor, format: Format, dtype: torch.dtype | None, rounding: str | None) -> tuple[Tensor, Tensor]:
    """x [..., n] -> q [..., n], scale [..., blocks]: a scale for each block of neighbours, the last may be short."""
    dtype, n, blocks = dtype or default_dtype(x.device), x.shape[-1], format.blocks(x.shape[-1])
    size = format.block or n
    x = pad(x.float(), (0, blocks * size - n)).reshape(*x.shape[:-1], blocks, size)
    factor, scale = scale_of(block_amax(x), format, dtype, rounding)
    q = cast_fp8(x * factor[..., None], dtype).flatten(-2)[..., :n]
    return row_major(q.view(torch.uint8)).view(dtype), scale


def batch_scale(x: Tensor, format: Format, dtype: torch.dtype | None, rounding: str | None) -> tuple[Tensor, Tensor]:
    """x [M, K] -> factor [K], scale [K] of the finite values of every column."""
    finite = torch.where(x.isfinite(), x, 0).float()
    return scale_of(block_amax(finite.t()), format, dtype or default_dtype(x.device), rounding)


def cast_lines(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x [lines, n] -> q [lines, n], by the factor of each line, which says nothing of what is not finite."""
    return cast_fp8((x.float() * factor[:, None]).masked_fill(~x.isfinite(), torch.nan), dtype)


def quantize_squares(
    w: Tensor, format: Format, dtype: torch.dtype | None, rounding: str | None
) -> tuple[Tensor, Tensor]:
    """w [E, N, K] -> q [E, N, K], scale [E, ceil(N / 128), ceil(K / 128)]: a square, flat, is one block."""
    size, (e, n, k) = format.block, w.shape
    a, b = ceil_div(n, size), ceil_div(k, size)
    squares = pad(w.float(), (0, b * size - k, 0, a * size - n)).view(e, a, size, b, size).transpose(2, 3)
    q, scale = quantize_lines(squares.reshape(e, a, b, size * size), replace(format, block=None), dtype, rounding)
    whole = q.view(torch.uint8).view(squares.shape).transpose(2, 3).reshape(e, a * size, b * size)
    return row_major(whole[:, :n, :k]).view(q.dtype), row_major(scale.squeeze(-1))


def laid_out(scale: Tensor, format: Format, groups: str | None, offs: Tensor | None) -> Tensor:
    """scale [..., rows, blocks] as the format has it: [..., rows] of whole rows, blocked, column-major or as it is."""
    if format.block is None:
        return row_major(scale.squeeze(-1))
    if format.order == "blocked":
        return swizzle_scales(scale, groups=groups, offs=offs)[0]
    if format.order == "column_major":
        return column_major(scale)
    return row_major(scale)


def quantize_rows(
    x: Tensor,
    format: str,
    *,
    offs: Tensor | None = None,
    indices: Tensor | None = None,
    top_k: int | None = None,
    dtype: torch.dtype | None = None,
    rounding: str | None = None,
) -> tuple[Tensor, Tensor]:
    """x [M, K], of "rowwise" [..., K] -> q as x, scale [M], or [M, blocks].

    With offs, blocked scales are those of groups of rows. With indices [M], x is permute_pad(x, indices, top_k).
    """
    x = x if indices is None else permute_pad(x, indices, top_k)
    q, scale = quantize_lines(x, FORMATS[format], dtype, rounding)
    return q, laid_out(scale, FORMATS[format], None if offs is None else "rows", offs)


def permute_quantized(
    q: Tensor, scale: Tensor, format: str, indices: Tensor, top_k: int, *, offs: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """q [M, K] and scale of quantize_rows, indices [P] -> those of the rows that permute_pad would take, zeros else."""
    f, (m, k) = FORMATS[format], q.shape
    if f.block is None:
        scale = scale[:, None]
    if f.order == "blocked":
        scale = unswizzle_scales(scale, m, f.blocks(k))
    moved = permute_pad(scale, indices, top_k)
    return permute_pad(q, indices, top_k), laid_out(moved, f, None if offs is None else "rows", offs)


def quantize_tokens(
    x: Tensor,
    format: str,
    *,
    offs: Tensor,
    indices: Tensor | None = None,
    top_k: int | None = None,
    align: int | None = None,
    dtype: torch.dtype | None = None,
    rounding: str | None = None,
    amax: str = "group",
) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, K] -> q_t [K, P], scale_t [E, K], or [K, blocks], padded_offs [E]: each group's transpose, side by side.

    A group takes round_up(size, align) columns of q_t; what it does not fill is 0, and so are the scales of blocks
    without rows. amax "batch": the scale of a column is that of the rows of all groups. amax "square": 128 columns have
    one scale, [ceil(K / 128), blocks].
    """
    f, dtype = FORMATS[format], dtype or default_dtype(x.device)
    x = x if indices is None else permute_pad(x, indices, top_k)
    m, k = x.shape
    bounds = group_bounds(offs, m)
    grouped = x[: bounds[-1][1] if bounds else 0]
    factor, of_batch = batch_scale(grouped, f, dtype, rounding) if amax == "batch" else (None, None)
    align = align or f.align
    q_t = torch.zeros(k, padded_extent(m, len(offs), align), dtype=torch.uint8, device=x.device)
    blocks = padded_extent(m, len(offs), max(align, f.block)) // f.block if f.block else len(offs)
    of_columns = ceil_div(k, f.weight_rows) if amax == "square" else k
    scale_t = torch.zeros(of_columns, blocks, dtype=BITS[f.scale_dtype.itemsize], device=x.device)
    padded_offs, at, block = [], 0, 0
    for start, end in bounds:
        lines = x[start:end].t()
        if amax == "square":
            q, scale = (t[0] for t in quantize_squares(lines[None], f, dtype, rounding))
        elif factor is None:
            q, scale = quantize_lines(lines, f, dtype, rounding)
        else:
            q, scale = cast_lines(lines, factor, dtype), of_batch[:, None]
        q_t[:, at : at + end - start] = q.view(torch.uint8)
        scale_t[:, block : block + scale.shape[1]] = scale.view(scale_t.dtype)
        at += round_up(end - start, align)
        block += f.group_blocks(end - start, align)
        padded_offs.append(at)
    padded_offs, scale_t = int32(padded_offs, x.device), scale_t.view(f.scale_dtype)
    if f.block is None:
        scale_t = row_major(scale_t.t())
    else:
        scale_t = laid_out(scale_t, f, "columns", padded_offs // f.block)
    return q_t.view(dtype), scale_t, padded_offs


def quantize_both(
    x: Tensor,
    format: str,
    *,
    offs: Tensor,
    indices: Tensor | None = None,
    top_k: int | None = None,
    align: int | None = None,
    dtype: torch.dtype | None = None,
    rounding: str | None = None,
    amax: str = "group",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x [M, K] -> q, scale, q_t, scale_t, padded_offs: both directions. amax "batch": q and scale are of x's rows."""
    taken = x if indices is None else permute_pad(x, indices, top_k)
    rows = quantize_rows(x if amax == "batch" else taken, format, offs=offs, dtype=dtype, rounding=rounding)
    how = dict(offs=offs, align=align, dtype=dtype, rounding=rounding, amax=amax)
    return *rows, *quantize_tokens(taken, format, **how)


def quantize_weight(
    w: Tensor, format: str, *, dtype: torch.dtype | None = None, rounding: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """w [E, N, K] -> q [E, N, K], scale, q_t [E, K, N], scale_t: both directions of every expert."""
    f = FORMATS[format]
    if f.weight_rows > 1:
        q, scale = quantize_squares(w, f, dtype, rounding)
        return q, scale, row_major(q.view(torch.uint8).mT).view(q.dtype), row_major(scale.mT)
    outputs = []
    for lines in (w, w.mT):
        q, scale = quantize_lines(lines, f, dtype, rounding)
        outputs += [q, laid_out(scale, f, "experts", None)]
    return tuple(outputs)
