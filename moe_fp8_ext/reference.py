"""Every op in plain PyTorch, written to be read.

This is the second, independent definition of the numbers: the compiled ops must return the same bytes. It runs on CPU
and on CUDA tensors, reads group sizes on the host, and cares about nothing but being right.

Dims: M tokens, K input features, N output features, E experts, P padded tokens. `scale` is always the dequantization
factor: x ~ q * scale.
"""

from __future__ import annotations

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


def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = True,
) -> Tensor:
    """Matmul per group of dequantized operands, in float64 and rounded once: the op is within float32 error of this.

    a [M, K], b [E, K, N], scale_a [M], scale_b [E, N]: groups are rows of a; out [M, N], zero in tail rows.
    a [N, P], b [P, K], scale_a [E, N], scale_b [E, K]: groups are slices of P; out [E, N, K].
    """
    e = offs.shape[0]
    out = torch.zeros(shapes.scaled_grouped_mm(a.shape, b.shape, e), dtype=torch.float64, device=a.device)
    a, b, scale_a, scale_b = (t.to(torch.float64) for t in (a, b, scale_a, scale_b))
    if b.ndim == 3:
        for e, (start, end) in enumerate(group_bounds(offs, a.shape[0])):
            out[start:end] = (a[start:end] @ b[e]) * scale_a[start:end, None] * scale_b[e]
    else:
        for e, (start, end) in enumerate(group_bounds(offs, a.shape[1])):
            if start < end:  # an empty group is zero whatever its scales are
                out[e] = (a[:, start:end] @ b[start:end]) * scale_a[e, :, None] * scale_b[e]
    return out.to(out_dtype or torch.bfloat16)


def grouped_mm(A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
    """A [M, K], B_t [E, K, N] -> out [M, N] in the dtype of A: the unquantized product, differentiable by autograd."""
    bounds = group_bounds(offs, A.shape[0])
    tail = A.shape[0] - (bounds[-1][1] if bounds else 0)
    groups = [A[start:end] @ B_t[e] for e, (start, end) in enumerate(bounds)]
    return torch.cat([*groups, A.new_zeros(tail, B_t.shape[2])])
