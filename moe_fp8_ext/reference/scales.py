"""Memory orders of scales: column-major for float32, and the blocked layout that Blackwell's tensor cores read."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from .numerics import E8M0, FORMATS, group_bounds, int32, round_up, row_major
from .signature import of_op

ROWS, COLUMNS = 128, 4  # size of a block of scales


def column_major(scale: Tensor) -> Tensor:
    """scale [M, B] with the strides (1, round_up(M, 4)); the memory between columns is zero."""
    m, b = scale.shape
    stride = round_up(m, 4)
    out = scale.new_zeros(b * stride).as_strided((m, b), (1, stride))
    return out.copy_(scale)


def blocked_shape(rows: int, cols: int) -> tuple[int, int]:
    """The shape of [rows, cols] padded to whole blocks of 128 x 4 scales."""
    return round_up(rows, ROWS), round_up(cols, COLUMNS)


def blocked(scale: Tensor) -> Tensor:
    """scale [R, C] -> its bytes in the blocked layout, padded with zeros to whole blocks, flat.

    Within a block of 128 rows by 4 columns, bytes go by row % 32, then by row // 32, then by column.
    """
    rows, cols = blocked_shape(*scale.shape)
    out = torch.zeros(rows, cols, dtype=torch.uint8, device=scale.device)
    out[: scale.shape[0], : scale.shape[1]] = scale.view(torch.uint8)
    return out.view(rows // ROWS, 4, 32, cols // COLUMNS, COLUMNS).permute(0, 3, 2, 1, 4).reshape(-1)


def unblocked(data: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """The matrix [rows, cols] at the beginning of `data`, out of the blocked layout, and the bytes behind it."""
    shape = blocked_shape(rows, cols)
    first, rest = data.tensor_split([shape[0] * shape[1]])
    out = first.view(shape[0] // ROWS, shape[1] // COLUMNS, 32, 4, COLUMNS).permute(0, 3, 2, 1, 4).reshape(shape)
    return out[:rows, :cols], rest


def matrices(scale: Tensor, groups: str | None, offs: Tensor | None) -> list[Tensor]:
    """The matrices that are blocked one by one: scale itself, or its groups of rows or columns, or its experts."""
    if groups is None:
        return [scale]
    if groups == "experts":
        return list(scale)
    by_rows = groups == "rows"
    bounds = group_bounds(offs, scale.shape[0 if by_rows else 1])
    return [scale[start:end] if by_rows else scale[:, start:end] for start, end in bounds]


@of_op
def swizzle_scales(scale, groups, offs):
    """scale -> blocked and starts: blocked matrices, one behind the other.

        groups None:       [R, C] -> [round_up(R, 128), round_up(C, 4)], starts [0]
        groups "rows":     [R, C] -> [R + 128 E, round_up(C, 4)], starts [E] in rows
        groups "columns":  [R, C] -> [round_up(R, 128), C + 4 E], starts [E] in columns
        groups "experts":  [E, R, C] -> [E, round_up(R, 128) * round_up(C, 4)], starts [0]

    Bytes behind the last matrix are zero.
    """
    *experts, rows, cols = scale.shape
    parts, shape, starts = matrices(scale, groups, offs), blocked_shape(rows, cols), []
    if groups == "experts":
        shape = experts[0], shape[0] * shape[1]
    elif groups == "rows":
        shape = rows + ROWS * len(offs), shape[1]
        starts = list(accumulate([round_up(part.shape[0], ROWS) for part in parts], initial=0))[:-1]
    elif groups == "columns":
        shape = shape[0], cols + COLUMNS * len(offs)
        starts = list(accumulate([round_up(part.shape[1], COLUMNS) for part in parts], initial=0))[:-1]
    out = torch.zeros(shape, dtype=torch.uint8, device=scale.device)
    data = torch.cat([out.new_zeros(0), *map(blocked, parts)])
    out.view(-1)[: len(data)] = data
    return out.view(scale.dtype), int32(starts, scale.device)


@of_op
def unswizzle_scales(blocked, rows, cols, groups, offs):
    """The inverse of swizzle_scales: blocked -> scale [rows, cols], for "experts" [E, rows, cols].

    Scales that belong to no group are zero.
    """
    data = blocked.view(torch.uint8).reshape(-1)
    shape = (blocked.shape[0], rows, cols) if groups == "experts" else (rows, cols)
    out = torch.zeros(shape, dtype=torch.uint8, device=blocked.device)
    for part in matrices(out, groups, offs):
        matrix, data = unblocked(data, *part.shape)
        part.copy_(matrix)
    return row_major(out).view(blocked.dtype)


def e8m0_of_power(scale: Tensor) -> Tensor:
    """The E8M0 bytes of float32 scales: of 2^n its exponent n + 127, for n from -127 to 127; of all else 255, NaN."""
    values = scale.double()  # 2^-127 is a subnormal of float32, which frexp may not take
    mantissa, exponent = torch.frexp(torch.where(values.isfinite(), values, 0))
    n = exponent - 1  # the mantissa of a power of two is 0.5
    is_power = (mantissa == 0.5) & (n >= -127) & (n <= 127)
    return torch.where(is_power, n + 127, 255).to(torch.uint8)


@of_op
def expand_scales(q, scale, along, offs):
    """Scales of "blockwise" -> the scales of "mxfp8" for the same values: a byte for each block of 32, blocked."""
    blockwise, mxfp8 = FORMATS["blockwise"], FORMATS["mxfp8"]
    data, (rows, k) = e8m0_of_power(scale), q.shape[-2:]
    if q.ndim == 3 or len(data) < rows:  # squares
        data = data.repeat_interleave(blockwise.weight_rows, -2)[..., :rows, :]
    times = blockwise.block // mxfp8.block
    if along == "rows":
        groups = "experts" if q.ndim == 3 else None if offs is None else "rows"
        plain = data.repeat_interleave(times, -1)[..., : mxfp8.blocks(k)]
        return swizzle_scales(plain, groups=groups, offs=offs)[0].view(E8M0)
    parts, ends, first, size = [data[:, :0]], [], 0, 0
    for start, end in group_bounds(offs, k):
        blocks = blockwise.blocks(end - start)
        part = data[:, first : first + blocks].repeat_interleave(times, 1)[:, : mxfp8.blocks(end - start)]
        first, size = first + blocks, size + part.shape[1]
        parts.append(part)
        ends.append(size)
    used = swizzle_scales(torch.cat(parts, 1), groups="columns", offs=int32(ends, q.device))[0].view(-1)
    out = torch.zeros(round_up(rows, ROWS), mxfp8.blocks(k) + COLUMNS * len(offs), dtype=torch.uint8, device=q.device)
    count = min(out.numel(), used.numel())  # either may have more room than groups need
    out.view(-1)[:count] = used[:count]
    return out.view(E8M0)
