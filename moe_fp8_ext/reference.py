"""Every op in plain PyTorch, written to be read.

This is the second, independent definition of the numbers: the compiled ops must return the same bytes. It runs on CPU
and on CUDA tensors, reads group sizes on the host, and cares about nothing but being right.

Dims: M tokens, K input features, N output features, E experts, P padded tokens. `scale` is always the dequantization
factor: x ~ q * scale.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import shapes
from .recipes import default_fp8_dtype

FP8_MAX = {
    torch.float8_e4m3fn: 448.0,
    torch.float8_e5m2: 57344.0,
    torch.float8_e4m3fnuz: 240.0,
    torch.float8_e5m2fnuz: 57344.0,
}
# One NaN a format, where the format has more, so that equal results are equal bytes.
FP8_NAN_BYTE = {
    torch.float8_e4m3fn: 0x7F,
    torch.float8_e5m2: 0x7F,
    torch.float8_e4m3fnuz: 0x80,
    torch.float8_e5m2fnuz: 0x80,
}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # a dtype that torch can copy, for every size of element
E8M0_NAN = 255
AMAX_FLOOR = 1e-12  # keeps the scale of an all-zero block finite
FLOAT32_EXPONENT = 0x7F800000


def cast_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts float32 to FP8: round to nearest even, saturating, one NaN.

    Clamping first makes torch's cast saturate in every format and version: nothing up to FP8_MAX rounds above it.
    """
    limit = FP8_MAX[dtype]
    q = x.clamp(-limit, limit).to(dtype).view(torch.uint8)
    return q.masked_fill(x.isnan(), FP8_NAN_BYTE[dtype]).view(dtype)


def block_amax(x: Tensor, dim: int) -> Tensor:
    """Returns max |x| along `dim`, which stays with size 1; NaN > Inf > finite, and 0 for an empty block."""
    if x.shape[dim] == 0:
        return x.new_zeros([1 if d == dim % x.ndim else n for d, n in enumerate(x.shape)])
    return x.abs().amax(dim, keepdim=True)


def scale_f32(amax: Tensor, dtype: torch.dtype, pow2_scale: bool) -> tuple[Tensor, Tensor]:
    """Returns m, the factor that x is multiplied by, and the dequantization scale RN32(1 / m)."""
    # Tensor by tensor: torch computes `scalar / tensor` as scalar * reciprocal, which rounds twice.
    m = torch.full_like(amax, FP8_MAX[dtype]) / amax.clamp(min=AMAX_FLOOR)
    if pow2_scale:
        m = (m.view(torch.int32) & FLOAT32_EXPONENT).view(torch.float32)
    m = m.masked_fill(~amax.isfinite(), float("nan"))
    scale = torch.ones_like(m) / m
    return m, scale.masked_fill(m.isnan(), float("nan"))


def quantize(x: Tensor, dim: int, dtype: torch.dtype | None, pow2_scale: bool) -> tuple[Tensor, Tensor]:
    """Quantizes with one scaling block per line along `dim`; returns q, shaped as x, and scale, without `dim`."""
    dtype = dtype or default_fp8_dtype(x.device)
    x = x.float()
    m, scale = scale_f32(block_amax(x, dim), dtype, pow2_scale)
    return cast_fp8(x * m, dtype).contiguous(), scale.squeeze(dim).contiguous()


def group_bounds(offs: Tensor, m: int) -> list[tuple[int, int]]:
    """Returns (start, end) of every group: offsets clamped into [0, m] and made non-decreasing."""
    bounds, start = [], 0
    for offset in offs.tolist():
        end = max(start, min(max(offset, 0), m))
        bounds.append((start, end))
        start = end
    return bounds


def quantize_rowwise(x: Tensor, dtype: torch.dtype | None = None, pow2_scale: bool = False) -> tuple[Tensor, Tensor]:
    """x [..., K] -> q [..., K], scale [...]: one block per row."""
    return quantize(x, -1, dtype, pow2_scale)


def quantize_colwise(
    x: Tensor, offs: Tensor, align: int = 16, dtype: torch.dtype | None = None, pow2_scale: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, K] -> q_t [K, P], scale_t [E, K], padded_offs [E]: one block per group and column.

    Group e lies in columns [at, at + size_e) of q_t, at = padded_offs[e] - round_up(size_e, align). The rest is 0.
    """
    dtype = dtype or default_fp8_dtype(x.device)
    q_t_shape, scale_t_shape, _ = shapes.quantize_colwise(x.shape, offs.shape[0], align)
    q_t = torch.zeros(q_t_shape, dtype=torch.uint8, device=x.device)
    scale_t = torch.empty(scale_t_shape, dtype=torch.float32, device=x.device)
    padded_offs, at = [], 0
    for e, (start, end) in enumerate(group_bounds(offs, x.shape[0])):
        q, scale_t[e] = quantize(x[start:end], 0, dtype, pow2_scale)
        q_t[:, at : at + end - start] = q.view(torch.uint8).t()
        at += shapes.round_up(end - start, align)
        padded_offs.append(at)
    return q_t.view(dtype), scale_t, torch.tensor(padded_offs, dtype=torch.int32, device=x.device)


def quantize_rowcol(
    x: Tensor, offs: Tensor, align: int = 16, dtype: torch.dtype | None = None, pow2_scale: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x [M, K] -> q [M, K], scale [M], q_t [K, P], scale_t [E, K], padded_offs [E]: both directions."""
    return *quantize_rowwise(x, dtype, pow2_scale), *quantize_colwise(x, offs, align, dtype, pow2_scale)


def quantize_weight(
    w: Tensor, dtype: torch.dtype | None = None, pow2_scale: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """w [E, N, K] -> q [E, N, K], scale [E, N], q_t [E, K, N], scale_t [E, K]: both directions of every expert."""
    q, scale = quantize(w, 2, dtype, pow2_scale)
    q_t, scale_t = quantize(w.transpose(1, 2), 2, dtype, pow2_scale)
    return q, scale, q_t, scale_t


def row_major(q: Tensor) -> Tensor:
    """q, contiguous also where it is empty, which Tensor.contiguous would return as it is."""
    return q.clone(memory_format=torch.contiguous_format)


def column_major(scale: Tensor) -> Tensor:
    """scale [M, B] with stride (1, round_up(M, 4)); the memory between columns is zero."""
    m, b = scale.shape
    stride = shapes.round_up(m, 4)
    out = scale.new_zeros(b * stride).as_strided((m, b), (1, stride))
    return out.copy_(scale)


def quantize_1x128(x: Tensor, dtype: torch.dtype | None = None, pow2_scale: bool = False) -> tuple[Tensor, Tensor]:
    """x [M, K] -> q [M, K], scale [M, ceil(K / 128)]: one block per 128 elements of a row, the last may be short."""
    blocks = [quantize(block, 1, dtype, pow2_scale) for block in x.split(shapes.BLOCK, 1)] if x.shape[1] else []
    if not blocks:
        return quantize(x, 1, dtype, pow2_scale)[0], column_major(x.new_zeros(x.shape[0], 0, dtype=torch.float32))
    q = torch.cat([q.view(torch.uint8) for q, _ in blocks], 1).view(blocks[0][0].dtype)
    return q, column_major(torch.stack([scale for _, scale in blocks], 1))


def quantize_128x1(
    x: Tensor,
    offs: Tensor,
    align: int = 128,
    dtype: torch.dtype | None = None,
    pow2_scale: bool = False,
    transpose: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, K] -> q_t [K, P], scale_t [K, B], padded_offs [E]: quantize_1x128 of each group's transpose, side by side.

    A group takes round_up(size, align) columns of q_t and the blocks of as many rounded up to 128; what it does not
    fill is 0. Not transposed: [P, K] and [B, K].
    """
    dtype, k = dtype or default_fp8_dtype(x.device), x.shape[1]
    b = shapes.blocks_extent(x.shape[0], offs.shape[0], align)
    p = shapes.padded_extent(x.shape[0], offs.shape[0], align)
    q_t = torch.zeros(k, p, dtype=torch.uint8, device=x.device)
    scale_t = torch.zeros(k, b, device=x.device)
    padded_offs, at, block = [], 0, 0
    for start, end in group_bounds(offs, x.shape[0]):
        q, scale = quantize_1x128(x[start:end].t(), dtype, pow2_scale)
        q_t[:, at : at + end - start] = q.view(torch.uint8)
        scale_t[:, block : block + scale.shape[1]] = scale
        at += shapes.round_up(end - start, align)
        block += shapes.round_up(end - start, max(align, shapes.BLOCK)) // shapes.BLOCK
        padded_offs.append(at)
    padded_offs = torch.tensor(padded_offs, dtype=torch.int32, device=x.device)
    if transpose:
        return q_t.view(dtype), column_major(scale_t), padded_offs
    return row_major(q_t.t()).view(dtype), column_major(scale_t).t(), padded_offs


def quantize_1x128_128x1(
    x: Tensor,
    offs: Tensor,
    align: int = 128,
    dtype: torch.dtype | None = None,
    pow2_scale: bool = False,
    transpose: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x [M, K] -> q [M, K], scale [M, ceil(K / 128)], q_t [K, P], scale_t [K, B], padded_offs [E]: both directions."""
    columns = quantize_128x1(x, offs, align, dtype, pow2_scale, transpose)
    return *quantize_1x128(x, dtype, pow2_scale), *columns


def quantize_128x128(
    w: Tensor, dtype: torch.dtype | None = None, pow2_scale: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """w [E, N, K] -> q [E, N, K], q_t [E, K, N], scale [E, ceil(N / 128), ceil(K / 128)]: one block per square."""
    dtype = dtype or default_fp8_dtype(w.device)
    q = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    scale = torch.empty(shapes.quantize_128x128(w.shape)[2], device=w.device)
    for a in range(scale.shape[1]):
        for b in range(scale.shape[2]):
            rows, columns = (slice(i * shapes.BLOCK, (i + 1) * shapes.BLOCK) for i in (a, b))
            square = w[:, rows, columns]
            of_square, scale[:, a, b] = quantize(square.flatten(1), 1, dtype, pow2_scale)
            q[:, rows, columns] = of_square.view(torch.uint8).view(square.shape)
    return q.view(dtype), row_major(q.transpose(1, 2)).view(dtype), scale


def scale_e8m0(amax: Tensor, dtype: torch.dtype, scaling: str) -> tuple[Tensor, Tensor]:
    """Returns 2^(127 - e), the factor that x is multiplied by, in float64, and the biased exponent e, the scale."""
    if scaling == "floor":
        mantissa, exponent = torch.frexp(amax.double())  # mantissa in [0.5, 1)
        e = exponent - 1 - (math.frexp(FP8_MAX[dtype])[1] - 1)
    else:
        mantissa, exponent = torch.frexp((amax * torch.tensor(1 / FP8_MAX[dtype], dtype=torch.float32)).double())
        e = exponent - (mantissa == 0.5).int()
    e = (e.clamp(-127, 127) + 127).masked_fill(mantissa == 0, 0).masked_fill(~amax.isfinite(), E8M0_NAN)
    factors = torch.tensor([2.0 ** (127 - i) for i in range(E8M0_NAN)] + [math.nan], dtype=torch.float64)
    return factors.to(amax.device)[e.long()], e.to(torch.uint8).view(torch.float8_e8m0fnu)


def quantize_mx(x: Tensor, dtype: torch.dtype | None, scaling: str) -> tuple[Tensor, Tensor]:
    """x [..., K] -> q [..., K], scale [..., ceil(K / 32)] E8M0: one block per 32 elements, the last may be short."""
    dtype, k = dtype or default_fp8_dtype(x.device), x.shape[-1]
    blocks = torch.nn.functional.pad(x.float(), (0, -k % shapes.MX_BLOCK))
    blocks = blocks.view(*x.shape[:-1], blocks.shape[-1] // shapes.MX_BLOCK, shapes.MX_BLOCK)
    factor, scale = scale_e8m0(block_amax(blocks, -1), dtype, scaling)
    q = cast_fp8((blocks.double() * factor).float(), dtype).flatten(-2)[..., :k]
    return row_major(q.view(torch.uint8)).view(dtype), scale.squeeze(-1)


def blocked(scale: Tensor) -> Tensor:
    """scale [R, C] -> its bytes in the layout of the tensor cores, with zeros up to 128 rows and 4 columns, flat.

    Of each block of 128 rows by 4 columns, bytes go by row % 32, then by row / 32, then by column.
    """
    rows, columns = shapes.swizzle_scales_2d(scale.shape)
    out = torch.zeros(rows, columns, dtype=torch.uint8, device=scale.device)
    out[: scale.shape[0], : scale.shape[1]] = scale.view(torch.uint8)
    return out.view(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4).reshape(-1)


def unblocked(scale: Tensor, rows: int, columns: int) -> Tensor:
    """The matrix [rows, columns] that `blocked` made the bytes from."""
    shape = shapes.swizzle_scales_2d((rows, columns))
    out = scale.view(shape[0] // 128, shape[1] // 4, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(shape)
    return out[:rows, :columns]


def swizzle_scales_2d(scale: Tensor) -> Tensor:
    """scale [R, C] -> blocked [round_up(R, 128), round_up(C, 4)]."""
    return blocked(scale).view(shapes.swizzle_scales_2d(scale.shape)).view(scale.dtype)


def swizzle_scales_m_groups(scale: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
    """scale [R, C], groups of rows -> blocked [R + 128 E, round_up(C, 4)], group by group, starts [E] of its rows."""
    shape = shapes.swizzle_scales_m_groups(scale.shape, offs.shape[0])
    out, starts, at = torch.zeros(shape, dtype=torch.uint8, device=scale.device), [], 0
    for start, end in group_bounds(offs, scale.shape[0]):
        of_group = blocked(scale[start:end])
        out.view(-1)[at * shape[1] :][: of_group.numel()] = of_group
        starts.append(at)
        at += shapes.round_up(end - start, shapes.SCALE_ROWS)
    return out.view(scale.dtype), torch.tensor(starts, dtype=torch.int32, device=scale.device)


def swizzle_scales_k_groups(scale: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
    """scale [R, C], groups of columns -> blocked [round_up(R, 128), C + 4 E], group by group, starts [E] of columns."""
    shape = shapes.swizzle_scales_k_groups(scale.shape, offs.shape[0])
    out, starts, at = torch.zeros(shape, dtype=torch.uint8, device=scale.device), [], 0
    for start, end in group_bounds(offs, scale.shape[1]):
        of_group = blocked(scale[:, start:end])
        out.view(-1)[at * shape[0] :][: of_group.numel()] = of_group
        starts.append(at)
        at += shapes.round_up(end - start, shapes.SCALE_COLUMNS)
    return out.view(scale.dtype), torch.tensor(starts, dtype=torch.int32, device=scale.device)


def swizzle_scales_3d(scale: Tensor) -> Tensor:
    """scale [E, R, C] -> blocked [E, round_up(R, 128) * round_up(C, 4)], expert by expert."""
    out = torch.empty(shapes.swizzle_scales_3d(scale.shape), dtype=torch.uint8, device=scale.device)
    for e in range(scale.shape[0]):
        out[e] = blocked(scale[e])
    return out.view(scale.dtype)


def unswizzle_scales_2d(blocked: Tensor, rows: int, cols: int) -> Tensor:
    """blocked [round_up(rows, 128), round_up(cols, 4)] -> scale [rows, cols]: undoes swizzle_scales_2d."""
    return row_major(unblocked(blocked.view(torch.uint8), rows, cols)).view(blocked.dtype)


def unswizzle_scales_m_groups(blocked: Tensor, offs: Tensor, rows: int, cols: int) -> Tensor:
    """blocked [rows + 128 E, round_up(cols, 4)] -> scale [rows, cols], zero in rows of no group."""
    out, at = blocked.new_zeros((rows, cols), dtype=torch.uint8), 0
    for start, end in group_bounds(offs, rows):
        padded = shapes.round_up(end - start, shapes.SCALE_ROWS)
        out[start:end] = unblocked(blocked.view(torch.uint8)[at : at + padded], end - start, cols)
        at += padded
    return out.view(blocked.dtype)


def unswizzle_scales_k_groups(blocked: Tensor, offs: Tensor, rows: int, cols: int) -> Tensor:
    """blocked [round_up(rows, 128), cols + 4 E] -> scale [rows, cols], zero in columns of no group."""
    out, flat = blocked.new_zeros((rows, cols), dtype=torch.uint8), blocked.view(torch.uint8).reshape(-1)
    for start, end in group_bounds(offs, cols):
        of_group, flat = flat.tensor_split([math.prod(shapes.swizzle_scales_2d((rows, end - start)))])
        out[:, start:end] = unblocked(of_group, rows, end - start)
    return out.view(blocked.dtype)


def unswizzle_scales_3d(blocked: Tensor, rows: int, cols: int) -> Tensor:
    """blocked [E, round_up(rows, 128) * round_up(cols, 4)] -> scale [E, rows, cols]."""
    out = blocked.new_empty((blocked.shape[0], rows, cols), dtype=torch.uint8)
    for e in range(blocked.shape[0]):
        out[e] = unblocked(blocked[e].view(torch.uint8), rows, cols)
    return out.view(blocked.dtype)


def quantize_mx_1x32(
    x: Tensor,
    scaling: str = "rceil",
    layout: str = "rowmajor",
    offs: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """x [M, K] -> q [M, K], scale [M, ceil(K / 32)], or blocked, as a whole or by groups of rows."""
    q, scale = quantize_mx(x, dtype, scaling)
    if layout == "blocked":
        scale = swizzle_scales_2d(scale) if offs is None else swizzle_scales_m_groups(scale, offs)[0]
    return q, scale


def quantize_mx_32x1(
    x: Tensor,
    offs: Tensor,
    scaling: str = "rceil",
    layout: str = "blocked",
    align: int = 32,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, K] -> q_t [K, P], scale_t [K, P / 32], or blocked by groups of columns, padded_offs [E].

    quantize_mx_1x32 of each group's transpose, side by side; what a group does not fill is 0.
    """
    dtype = dtype or default_fp8_dtype(x.device)
    q_t_shape, scale_t_shape, _ = shapes.quantize_mx_32x1(x.shape, offs.shape[0], align, False)
    q_t, scale_t = (torch.zeros(s, dtype=torch.uint8, device=x.device) for s in (q_t_shape, scale_t_shape))
    padded_offs, at = [], 0
    for start, end in group_bounds(offs, x.shape[0]):
        q, scale = quantize_mx(x[start:end].t(), dtype, scaling)
        q_t[:, at : at + end - start] = q.view(torch.uint8)
        block = at // shapes.MX_BLOCK
        scale_t[:, block : block + scale.shape[1]] = scale.view(torch.uint8)
        at += shapes.round_up(end - start, align)
        padded_offs.append(at)
    padded_offs = torch.tensor(padded_offs, dtype=torch.int32, device=x.device)
    scale_t = scale_t.view(torch.float8_e8m0fnu)
    if layout == "blocked":
        scale_t, _ = swizzle_scales_k_groups(scale_t, padded_offs // shapes.MX_BLOCK)
    return q_t.view(dtype), scale_t, padded_offs


def quantize_mx_1x32_32x1(
    x: Tensor,
    offs: Tensor,
    scaling: str = "rceil",
    layout: str = "blocked",
    align: int = 32,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x [M, K] -> q, scale, q_t, scale_t, padded_offs: both directions, blocked by groups of rows and of columns."""
    rows = quantize_mx_1x32(x, scaling, layout, offs if layout == "blocked" else None, dtype)
    return *rows, *quantize_mx_32x1(x, offs, scaling, layout, align, dtype)


def quantize_mx_weight(
    w: Tensor, scaling: str = "rceil", dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """w [E, N, K] -> q [E, N, K], scale, q_t [E, K, N], scale_t: both directions of every expert, blocked by expert."""
    q, scale = quantize_mx(w, dtype, scaling)
    q_t, scale_t = quantize_mx(w.transpose(1, 2), dtype, scaling)
    return q, swizzle_scales_3d(scale), q_t, swizzle_scales_3d(scale_t)


def pad_token_groups(x: Tensor, offs: Tensor, align: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, K] -> x_padded [P, K], padded_starts [E], padded_offs [E]: groups begin at multiples of `align`."""
    starts, ends, at = [], [], 0
    for start, end in group_bounds(offs, x.shape[0]):
        starts.append(at)
        at += shapes.round_up(end - start, align)
        ends.append(at)
    starts, ends = (torch.tensor(t, dtype=torch.int32, device=x.device) for t in (starts, ends))
    p = shapes.padded_extent(x.shape[0], offs.shape[0], align)
    return pad_token_groups_to(x, offs, starts, p), starts, ends


def pad_token_groups_to(x: Tensor, offs: Tensor, padded_starts: Tensor, num_padded: int) -> Tensor:
    """x [M, K] -> x_padded [num_padded, K]: group e from padded_starts[e] on, at most to the next one's start."""
    out = x.new_zeros(num_padded, x.shape[1], dtype=BITS[x.element_size()])
    places = [start for _, start in group_bounds(padded_starts, num_padded)] + [num_padded]
    for (start, end), place, limit in zip(group_bounds(offs, x.shape[0]), places, places[1:], strict=False):
        size = min(end - start, limit - place)
        out[place : place + size] = x[start : start + size].contiguous().view(out.dtype)
    return out.view(x.dtype)


def unpad_token_groups(y: Tensor, offs: Tensor, padded_starts: Tensor, num_tokens: int) -> Tensor:
    """y [P, K] -> x [num_tokens, K]: row i of group e is row padded_starts[e] + i of y, zero if there is none."""
    out = y.new_zeros(num_tokens, y.shape[1], dtype=BITS[y.element_size()])
    bits = y.contiguous().view(out.dtype)
    for (start, end), place in zip(group_bounds(offs, num_tokens), padded_starts.tolist(), strict=True):
        for row in range(start, end):
            if 0 <= place + row - start < y.shape[0]:
                out[row] = bits[place + row - start]
    return out.view(y.dtype)


def sort_tokens(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """topk_ids [T] or [T, top_k] -> permutation [T * top_k], offs [E], inverse as topk_ids: slots sorted by expert."""
    ids = topk_ids.reshape(-1)
    kept = ((ids >= 0) & (ids < num_experts)).nonzero()[:, 0]
    slots = kept[ids[kept].argsort(stable=True)]
    offs = torch.stack([(ids[kept] <= e).sum() for e in range(num_experts)]).int()
    permutation, inverse = (torch.full(ids.shape, -1, dtype=torch.int32, device=ids.device) for _ in range(2))
    permutation[: len(slots)] = slots.int()
    inverse[slots] = torch.arange(len(slots), dtype=torch.int32, device=ids.device)
    return permutation, offs, inverse.view(topk_ids.shape)


def permute_indices(
    tokens_per_rank_expert: Tensor,
    num_ranks: int,
    num_local_experts: int,
    num_tokens: int,
    align: int = 16,
    align_empty: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """counts [R, E] -> indices [P], padded_offs [E], tokens_per_expert [E]: from rank-major to expert-major tokens."""
    rows: list[list[int]] = [[] for _ in range(num_local_experts)]
    token = 0
    for i, count in enumerate(tokens_per_rank_expert.flatten().tolist()):
        end = min(token + max(count, 0), num_tokens)
        rows[i % num_local_experts] += range(token, end)
        token = end
    assert i + 1 == num_ranks * num_local_experts
    indices, padded_offs = [], []
    for of_expert in rows:
        indices += of_expert
        size = max(len(of_expert), 1 if align_empty else 0)
        indices += [-1] * (shapes.round_up(size, align) - len(of_expert))
        padded_offs.append(len(indices))
    indices += [-1] * (shapes.padded_extent(num_tokens, num_local_experts, align) - len(indices))
    device = tokens_per_rank_expert.device
    lists = indices, padded_offs, [len(of_expert) for of_expert in rows]
    return tuple(torch.tensor(values, dtype=torch.int32, device=device) for values in lists)


def source_rows(indices: Tensor, m: int, top_k: int) -> tuple[Tensor, Tensor]:
    """The row of [m, ...] that each index stands for, and whether there is one (row 0 if not)."""
    there = (indices >= 0) & (indices < m * top_k)
    return torch.where(there, indices, 0).long() // top_k, there


def permute_pad(x: Tensor, indices: Tensor, top_k: int = 1) -> Tensor:
    """x [M, K], indices [P] -> [P, K]: row p is x[indices[p] // top_k], zeros where the index is out of range."""
    out = x.new_zeros(indices.shape[0], x.shape[1], dtype=BITS[x.element_size()])
    rows, there = source_rows(indices, x.shape[0], top_k)
    out[there] = x.contiguous().view(out.dtype)[rows[there]]
    return out.view(x.dtype)


def unpermute(y: Tensor, indices: Tensor, num_tokens: int, top_k: int = 1) -> Tensor:
    """y [P, K], indices [P] -> [num_tokens, K]: y[p] where indices[p] is the token; with top_k > 1 their float32 sum.

    Of several rows with the same index, the last counts.
    """
    inverse = indices.new_full((num_tokens * top_k,), -1)
    for p, i in enumerate(indices.tolist()):
        if 0 <= i < len(inverse):
            inverse[i] = p
    return combine(y, inverse.view(num_tokens, top_k)) if top_k > 1 else permute_pad(y, inverse)


def permute_pad_quantize_rowwise(
    x: Tensor, indices: Tensor, top_k: int = 1, dtype: torch.dtype | None = None, pow2_scale: bool = False
) -> tuple[Tensor, Tensor]:
    """x [M, K], indices [P] -> q [P, K], scale [P]: quantize_rowwise of permute_pad."""
    return quantize_rowwise(permute_pad(x, indices, top_k), dtype, pow2_scale)


def permute_pad_quantize_rowcol(
    x: Tensor,
    indices: Tensor,
    offs: Tensor,
    top_k: int = 1,
    align: int = 16,
    dtype: torch.dtype | None = None,
    pow2_scale: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x [M, K], indices [P] -> quantize_rowcol of permute_pad."""
    return quantize_rowcol(permute_pad(x, indices, top_k), offs, align, dtype, pow2_scale)


def permute_pad_quantize_1x128(
    x: Tensor, indices: Tensor, top_k: int = 1, dtype: torch.dtype | None = None, pow2_scale: bool = False
) -> tuple[Tensor, Tensor]:
    """x [M, K], indices [P] -> q [P, K], scale [P, ceil(K / 128)]: quantize_1x128 of permute_pad."""
    return quantize_1x128(permute_pad(x, indices, top_k), dtype, pow2_scale)


def permute_pad_quantize_1x128_128x1(
    x: Tensor,
    indices: Tensor,
    offs: Tensor,
    top_k: int = 1,
    align: int = 128,
    dtype: torch.dtype | None = None,
    pow2_scale: bool = False,
    transpose: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x [M, K], indices [P] -> quantize_1x128_128x1 of permute_pad."""
    return quantize_1x128_128x1(permute_pad(x, indices, top_k), offs, align, dtype, pow2_scale, transpose)


def permute_pad_quantize_mx_1x32(
    x: Tensor,
    indices: Tensor,
    offs: Tensor | None = None,
    top_k: int = 1,
    scaling: str = "rceil",
    layout: str = "rowmajor",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """x [M, K], indices [P] -> quantize_mx_1x32 of permute_pad."""
    return quantize_mx_1x32(permute_pad(x, indices, top_k), scaling, layout, offs, dtype)


def permute_pad_quantize_mx_1x32_32x1(
    x: Tensor,
    indices: Tensor,
    offs: Tensor,
    top_k: int = 1,
    scaling: str = "rceil",
    layout: str = "blocked",
    align: int = 32,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x [M, K], indices [P] -> quantize_mx_1x32_32x1 of permute_pad."""
    return quantize_mx_1x32_32x1(permute_pad(x, indices, top_k), offs, scaling, layout, align, dtype)


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to nearest even, with one NaN a format."""
    return x.to(dtype).masked_fill(x.isnan(), float("nan"))


def combine(y: Tensor, inverse: Tensor, topk_scores: Tensor | None = None) -> Tensor:
    """y [P, K], inverse [T, top_k], topk_scores [T, top_k] -> out [T, K]: in float32, slot by slot, rounded once."""
    out = torch.zeros(shapes.combine(y.shape, inverse.shape), device=y.device)
    for j in range(inverse.shape[1]):
        row = inverse[:, j].long()
        tokens = ((row >= 0) & (row < y.shape[0])).nonzero()[:, 0]
        term = y[row[tokens]].float()
        if topk_scores is not None:
            term = term * topk_scores[tokens, j].float()[:, None]
        out[tokens] = out[tokens] + term
    return round_to(out, y.dtype)


def combine_backward(
    grad: Tensor, y: Tensor | None, inverse: Tensor, topk_scores: Tensor | None, num_rows: int
) -> tuple[Tensor, Tensor]:
    """grad [T, K], y [P, K], inverse and topk_scores [T, top_k] -> grad_y [P, K], grad_scores [T, top_k] or [0].

    A row of y belongs to the largest slot that names it. Dot products are taken in float64 and rounded once: the op is
    within float32 error of them.
    """
    places, slots = inverse.reshape(-1).long(), torch.arange(inverse.numel(), device=grad.device)
    slot_of = torch.full((num_rows,), -1, device=grad.device)
    kept = (places >= 0) & (places < num_rows)
    slot_of.scatter_reduce_(0, places[kept], slots[kept], "amax")
    rows = (slot_of >= 0).nonzero()[:, 0]
    slots = slot_of[rows]
    of_rows = grad[slots // max(inverse.shape[1], 1)]
    term = of_rows.float()
    if topk_scores is not None:
        term = term * topk_scores.reshape(-1)[slots].float()[:, None]
    y_shape, scores_shape = shapes.combine_backward(grad.shape, inverse.shape, num_rows, y is not None)
    grad_y = torch.zeros(y_shape, device=grad.device)
    grad_y[rows] = term
    grad_scores = torch.zeros(scores_shape, dtype=torch.float64, device=grad.device)
    if y is not None:
        grad_scores.view(-1)[slots] = (of_rows.double() * y[rows].double()).sum(1)
    scores_dtype = torch.float32 if topk_scores is None else topk_scores.dtype
    return round_to(grad_y, grad.dtype), round_to(grad_scores, scores_dtype)


def e8m0_values(scale: Tensor) -> Tensor:
    """2^(e - 127) of every byte e, NaN of 255, in float64."""
    powers = torch.tensor([2.0 ** (e - 127) for e in range(E8M0_NAN)] + [math.nan], dtype=torch.float64)
    return powers.to(scale.device)[scale.view(torch.uint8).long()]


def spread(scale: Tensor, block: int, k: int) -> Tensor:
    """scale [..., blocks] -> [..., k]: of every element that of its block, in float64."""
    return scale.double().repeat_interleave(block, -1)[..., :k]


def spread_blocked(scale: Tensor, rows: int, k: int) -> Tensor:
    """The bytes of `blocked` scales, which may be followed by others -> [rows, k]."""
    shape = rows, shapes.round_up(k, shapes.MX_BLOCK) // shapes.MX_BLOCK
    of_matrix = scale.reshape(-1).view(torch.uint8)[: math.prod(shapes.swizzle_scales_2d(shape))]
    return spread(e8m0_values(unblocked(of_matrix, *shape)), shapes.MX_BLOCK, k)


def scales_of(q: Tensor, scale: Tensor, layout: str, offs: Tensor | None) -> list[tuple[tuple, Tensor]]:
    """Parts of q, all that belong to a group, as indices, with the scales of their elements in float64."""
    k, all_of_q = q.shape[-1], (slice(None),) * q.ndim
    if layout == "rowwise":
        return [(all_of_q, scale.double()[..., None])]
    if layout == "1x128":
        return [(all_of_q, spread(scale, shapes.BLOCK, k))]
    if layout == "128x128":
        return [(all_of_q, spread(scale.repeat_interleave(shapes.BLOCK, 1)[:, : q.shape[1]], shapes.BLOCK, k))]
    if layout == "1x32":
        return [(all_of_q, spread(e8m0_values(scale), shapes.MX_BLOCK, k))]
    if layout == "1x32_blocked" and q.ndim == 3:
        return [((e,), spread_blocked(scale[e], q.shape[1], k)) for e in range(q.shape[0])]
    if layout == "1x32_blocked" and offs is None:
        return [(all_of_q, spread_blocked(scale, q.shape[0], k))]
    parts, block, at, width = [], 0, 0, scale.shape[0 if layout == "32x1_blocked" else 1]
    for e, (start, end) in enumerate(group_bounds(offs, q.shape[0 if layout == "1x32_blocked" else 1])):
        size, of_group = end - start, (slice(None), slice(start, end))
        if layout == "colwise":
            of_elements = scale[e, :, None].double()
        elif layout == "128x1":
            of_elements = spread(scale[:, block:], shapes.BLOCK, size)
        elif layout == "1x32_blocked":  # the groups before take whole blocks of 128 rows, of so many columns
            of_group, of_elements = (slice(start, end),), spread_blocked(scale.reshape(-1)[at * width :], size, k)
            at += shapes.round_up(size, shapes.SCALE_ROWS)
        else:  # whole blocks of 4 columns, of so many rows
            of_elements = spread_blocked(scale.reshape(-1)[at * width :], q.shape[0], size)
            at += shapes.round_up(shapes.round_up(size, shapes.MX_BLOCK) // shapes.MX_BLOCK, shapes.SCALE_COLUMNS)
        block += shapes.round_up(size, shapes.BLOCK) // shapes.BLOCK
        parts.append((of_group, of_elements))
    return parts


def dequantize(
    q: Tensor, scale: Tensor, layout: str, offs: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """q and the scales of the quantizer that `layout` names -> q * scale in float32, rounded; 0 outside of groups."""
    out = torch.zeros(q.shape, device=q.device)
    for part, of_elements in scales_of(q, scale, layout, offs):
        out[part] = q.float()[part] * of_elements.float()
    return round_to(out, out_dtype or torch.bfloat16)


def exact_values(q: Tensor, scale: Tensor, layout: str, offs: Tensor | None = None) -> Tensor:
    """The same in float64, not rounded."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for part, of_elements in scales_of(q, scale, layout, offs):
        out[part] = q.double()[part] * of_elements
    return out


def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = True,
    block_size: int | None = None,
) -> Tensor:
    """Matmul per group of dequantized operands, in float64 and rounded once: the op is within float32 error of this.

    a [M, K], b [E, K, N], scale_a [M], scale_b [E, N]: groups are rows of a; out [M, N], zero in tail rows.
    a [N, P], b [P, K], scale_a [E, N], scale_b [E, K]: groups are slices of P; out [E, N, K].
    With blocks of 128: scale_a [M, K / 128], scale_b [E, K / 128, N / 128]; scale_a [N, B], scale_b [B, K].
    With blocks of 32: a and b.mT have blocked scales, by groups of rows and by expert, or both by groups of columns.
    """
    if block_size and b.ndim == 3:
        of_a, of_b = ("1x128", "128x128") if block_size == shapes.BLOCK else ("1x32_blocked", "1x32_blocked")
        a = exact_values(a, scale_a, of_a, offs if block_size == shapes.MX_BLOCK else None)
        b = exact_values(b.mT, scale_b.mT if block_size == shapes.BLOCK else scale_b, of_b).mT
    elif block_size:
        layout = "128x1" if block_size == shapes.BLOCK else "32x1_blocked"
        scale_b = scale_b.t() if block_size == shapes.BLOCK else scale_b
        a, b = exact_values(a, scale_a, layout, offs), exact_values(b.t(), scale_b, layout, offs).t()
    out = torch.zeros(shapes.scaled_grouped_mm(a.shape, b.shape, len(offs)), dtype=torch.float64, device=a.device)
    for e, (start, end) in enumerate(group_bounds(offs, a.shape[0 if b.ndim == 3 else 1])):
        if start == end:  # an empty group is zero whatever its scales are
            continue
        rows = slice(start, end) if b.ndim == 3 else slice(None)
        product = a[rows].double() @ b[e].double() if b.ndim == 3 else a[:, start:end].double() @ b[start:end].double()
        if not block_size:
            of_rows = scale_a[rows] if b.ndim == 3 else scale_a[e]
            product = product * of_rows[:, None].double() * scale_b[e].double()
        out[rows if b.ndim == 3 else e] = product
    return out.to(out_dtype or torch.bfloat16)


def grouped_mm(A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
    """A [M, K], B_t [E, K, N] -> out [M, N] in the dtype of A: the unquantized product, differentiable by autograd."""
    bounds = group_bounds(offs, A.shape[0])
    tail = A.shape[0] - (bounds[-1][1] if bounds else 0)
    groups = [A[start:end] @ B_t[e] for e, (start, end) in enumerate(bounds)]
    return torch.cat([*groups, A.new_zeros(tail, B_t.shape[2])])
