"""Formats, casts, scale rules and the arithmetic of groups: sections 3 and 4 of DESIGN.md."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """What a quantized operand is.

    Attributes:
        block: neighbouring elements of a line that share a scale, where a line is a row of x, or a column of a group of
            tokens; None: all of them.
        weight_rows: rows of a weight that share their scales.
        scale_dtype: float32 or float8_e8m0fnu.
        order: how scales lie: "row_major", "column_major" or "blocked".
        aligns: the least and the most to a multiple of which groups can be padded along tokens.
        align: the usual one.
        roundings: of scales; the first is the usual one.
        amaxes: along tokens, of what a column has its largest value, see `quantize_tokens`; the first is the usual one.
    """

    block: int | None
    weight_rows: int
    scale_dtype: torch.dtype
    order: str
    aligns: tuple[int, int]
    align: int
    roundings: tuple[str, str]
    amaxes: tuple[str, ...]

    def blocks(self, size: int) -> int:
        """Scaling blocks of a line; the last may be short."""
        return ceil_div(size, self.block) if self.block else 1

    def group_blocks(self, size: int, align: int) -> int:
        """Scaling blocks that a group of tokens has room for: it begins with a new one."""
        return round_up(size, max(align, self.block)) // self.block if self.block else 1


E8M0 = torch.float8_e8m0fnu
FORMATS = {
    "rowwise": Format(None, 1, torch.float32, "row_major", (1, 256), 32, ("exact", "pow2"), ("group", "batch")),
    "blockwise": Format(128, 128, torch.float32, "column_major", (1, 256), 32, ("exact", "pow2"), ("group", "square")),
    "mxfp8": Format(32, 1, E8M0, "blocked", (32, 128), 32, ("rceil", "floor"), ("group",)),
    "mxfp8_rowmajor": Format(32, 1, E8M0, "row_major", (32, 128), 32, ("rceil", "floor"), ("group",)),
}

FP8_MAX = {
    torch.float8_e4m3fn: 448.0,
    torch.float8_e5m2: 57344.0,
    torch.float8_e4m3fnuz: 240.0,
    torch.float8_e5m2fnuz: 57344.0,
}
# One NaN a dtype, where the dtype has more, so that equal results are equal bytes.
FP8_NAN_BYTE = {
    torch.float8_e4m3fn: 0x7F,
    torch.float8_e5m2: 0x7F,
    torch.float8_e4m3fnuz: 0x80,
    torch.float8_e5m2fnuz: 0x80,
}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # a dtype that torch can copy, for every size of element
E8M0_NAN = 255
E8M0_VALUES = torch.tensor([2.0 ** (e - 127) for e in range(E8M0_NAN)] + [math.nan], dtype=torch.float64)
E8M0_FACTORS = (1 / E8M0_VALUES).float()
AMAX_FLOOR = 1e-12  # keeps the scale of an all-zero block finite
FLOAT32_EXPONENT = 0x7F800000


def default_dtype(device: torch.device) -> torch.dtype:
    """float8_e4m3fnuz where the fp8 instructions of the device are FNUZ (gfx942), else float8_e4m3fn."""
    if device.type == "cuda" and torch.version.hip:
        if torch.cuda.get_device_properties(device).gcnArchName.startswith("gfx94"):
            return torch.float8_e4m3fnuz
    return torch.float8_e4m3fn


# Casts


def cast_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts float32 to FP8: round to nearest even, saturating, one NaN.

    Clamping first makes torch's cast saturate in every dtype and version: nothing up to FP8_MAX rounds above it.
    """
    limit = FP8_MAX[dtype]
    q = x.clamp(-limit, limit).to(dtype).view(torch.uint8)
    return q.masked_fill(x.isnan(), FP8_NAN_BYTE[dtype]).view(dtype)


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to nearest even, with one NaN a dtype."""
    return x.to(dtype).masked_fill(x.isnan(), float("nan"))


# Scales


def block_amax(x: Tensor) -> Tensor:
    """x [..., n] -> max |x| [...]; NaN > Inf > finite, and 0 for an empty block."""
    return x.abs().amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])


def float_scale(amax: Tensor, dtype: torch.dtype, rounding: str) -> tuple[Tensor, Tensor]:
    """Returns m, the factor that x is multiplied by, and the dequantization scale RN32(1 / m)."""
    # Tensor by tensor: torch computes `scalar / tensor` as scalar * reciprocal, which rounds twice.
    m = torch.full_like(amax, FP8_MAX[dtype]) / amax.clamp(min=AMAX_FLOOR)
    if rounding == "pow2":
        m = (m.view(torch.int32) & FLOAT32_EXPONENT).view(torch.float32)
    m = m.masked_fill(~amax.isfinite(), math.nan)
    scale = torch.ones_like(m) / m
    return m, scale.masked_fill(m.isnan(), math.nan)


def e8m0_scale(amax: Tensor, dtype: torch.dtype, rounding: str) -> tuple[Tensor, Tensor]:
    """Returns 2^(127 - e), the factor that x is multiplied by, and the biased exponent e, the scale."""
    if rounding == "floor":
        mantissa, exponent = torch.frexp(amax.double())  # mantissa in [0.5, 1)
        e = exponent - 1 - (math.frexp(FP8_MAX[dtype])[1] - 1)
    else:
        mantissa, exponent = torch.frexp((amax * torch.tensor(1 / FP8_MAX[dtype], dtype=torch.float32)).double())
        e = exponent - (mantissa == 0.5).int()
    e = (e.clamp(-127, 127) + 127).masked_fill(mantissa == 0, 0).masked_fill(~amax.isfinite(), E8M0_NAN)
    return E8M0_FACTORS.to(amax.device)[e.long()], e.to(torch.uint8).view(E8M0)


def scale_of(amax: Tensor, format: Format, dtype: torch.dtype, rounding: str | None) -> tuple[Tensor, Tensor]:
    """Returns the factor that x is multiplied by, and the scale that is stored."""
    rule = e8m0_scale if format.scale_dtype == E8M0 else float_scale
    return rule(amax, dtype, rounding or format.roundings[0])


def scale_values(scale: Tensor) -> Tensor:
    """The scales in float64; of a byte e of E8M0 2^(e - 127), NaN of 255."""
    if scale.dtype != E8M0:
        return scale.double()
    return E8M0_VALUES.to(scale.device)[scale.view(torch.uint8).long()]


# Sizes and groups


def ceil_div(size: int, divisor: int) -> int:
    return (size + divisor - 1) // divisor


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `size`."""
    return ceil_div(size, multiple) * multiple


def padded_extent(m: int, e: int, align: int) -> int:
    """Padding every group to `align` adds fewer than `align` tokens a group: the bound holds for all group sizes."""
    return round_up(m, align) + e * align


def group_bounds(offs: Tensor, m: int) -> list[tuple[int, int]]:
    """Returns (start, end) of every group: offsets clamped into [0, m] and made non-decreasing."""
    bounds, start = [], 0
    for offset in offs.tolist():
        end = max(start, min(max(offset, 0), m))
        bounds.append((start, end))
        start = end
    return bounds


def row_major(t: Tensor) -> Tensor:
    """t, contiguous also where it is empty, which Tensor.contiguous would return as it is."""
    return t.clone(memory_format=torch.contiguous_format)


def int32(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
