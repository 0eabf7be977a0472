"""What all ops share: formats, casts and scale rules (DESIGN.md section 3), sizes and groups (section 4)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """A quantization format: which elements share a scale, and how scales are computed and stored.

    A *line* is a row of x or, along tokens, a column of a group.

    Attributes:
        block: number of neighbouring elements of a line that share a scale; None: the whole line.
        weight_rows: number of neighbouring rows of a weight that share their scales.
        scale_dtype: float32 or float8_e8m0fnu.
        order: memory order of scales: "row_major", "column_major" or "blocked".
        aligns: the smallest and the largest multiple to which groups can be padded along tokens.
        align: the default multiple.
        roundings: roundings of scales; the first is the default.
        amaxes: granularities of scales along tokens, see `quantize_tokens`; the first is the default.
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
        """The number of scaling blocks of a line of `size` elements; the last may be short."""
        return ceil_div(size, self.block) if self.block else 1

    def group_blocks(self, size: int, align: int) -> int:
        """The number of scaling blocks reserved for a group of `size` tokens. Every group begins with a new block."""
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
# A dtype may have several NaNs. One is used, so that equal results are equal bytes.
FP8_NAN_BYTE = {
    torch.float8_e4m3fn: 0x7F,
    torch.float8_e5m2: 0x7F,
    torch.float8_e4m3fnuz: 0x80,
    torch.float8_e5m2fnuz: 0x80,
}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes per element: an integer dtype to move bits as
E8M0_NAN = 255
E8M0_VALUES = torch.tensor([2.0 ** (e - 127) for e in range(E8M0_NAN)] + [math.nan], dtype=torch.float64)
E8M0_MULTIPLIERS = (1 / E8M0_VALUES).float()  # 2^(127 - e)
AMAX_FLOOR = 1e-12  # keeps the scale of an all-zero block finite
FLOAT32_EXPONENT = 0x7F800000


def default_dtype(device: torch.device) -> torch.dtype:
    """float8_e4m3fnuz if the FP8 instructions of the device are FNUZ (gfx942), else float8_e4m3fn."""
    if device.type == "cuda" and torch.version.hip:
        if torch.cuda.get_device_properties(device).gcnArchName.startswith("gfx94"):
            return torch.float8_e4m3fnuz
    return torch.float8_e4m3fn


# Casts


def cast_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts float32 to FP8: to nearest even, saturating at +-FP8_MAX, with one NaN per dtype.

    Clamping first makes torch's cast saturate in every dtype and version, because nothing up to FP8_MAX rounds above
    it.
    """
    limit = FP8_MAX[dtype]
    q = x.clamp(-limit, limit).to(dtype).view(torch.uint8)
    return q.masked_fill(x.isnan(), FP8_NAN_BYTE[dtype]).view(dtype)


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds x to `dtype`, to nearest even, with one NaN per dtype."""
    return x.to(dtype).masked_fill(x.isnan(), float("nan"))


# Scales


def block_amax(x: Tensor) -> Tensor:
    """x [..., n] -> max |x| [...], where NaN > Inf > finite; 0 for an empty block."""
    return x.abs().amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])


def float_scale(amax: Tensor, dtype: torch.dtype, rounding: str) -> tuple[Tensor, Tensor]:
    """The multiplier m of x, and the scale RN32(1 / m).

        m = RN32(FP8_MAX / max(amax, 1e-12))

    Rounding "pow2" clears the mantissa of m.
    """
    # Both operands are tensors, because torch computes `scalar / tensor` as scalar * reciprocal, which rounds twice.
    m = torch.full_like(amax, FP8_MAX[dtype]) / amax.clamp(min=AMAX_FLOOR)
    if rounding == "pow2":
        m = (m.view(torch.int32) & FLOAT32_EXPONENT).view(torch.float32)
    m = m.masked_fill(~amax.isfinite(), math.nan)  # a NaN or an Inf poisons its block
    scale = torch.ones_like(m) / m
    return m, scale.masked_fill(m.isnan(), math.nan)


def e8m0_scale(amax: Tensor, dtype: torch.dtype, rounding: str) -> tuple[Tensor, Tensor]:
    """The multiplier 2^(127 - e) of x, and the scale, a biased exponent byte e.

        "floor"   e = clamp(floor(log2 amax) - floor(log2 FP8_MAX), -127, 127) + 127
        "rceil"   e = the exponent of RN32(amax * RN32(1 / FP8_MAX)), rounded up to a power of two

    An amax that is not finite gives e = 255.
    """
    if rounding == "floor":
        mantissa, exponent = torch.frexp(amax.double())  # mantissa in [0.5, 1): floor(log2 amax) = exponent - 1
        e = exponent - 1 - (math.frexp(FP8_MAX[dtype])[1] - 1)
    else:
        mantissa, exponent = torch.frexp((amax * torch.tensor(1 / FP8_MAX[dtype], dtype=torch.float32)).double())
        e = exponent - (mantissa == 0.5).int()  # a power of two is its own ceiling
    e = (e.clamp(-127, 127) + 127).masked_fill(mantissa == 0, 0).masked_fill(~amax.isfinite(), E8M0_NAN)
    return E8M0_MULTIPLIERS.to(amax.device)[e.long()], e.to(torch.uint8).view(E8M0)


def multiplier_and_scale(
    amax: Tensor, format: Format, dtype: torch.dtype, rounding: str | None
) -> tuple[Tensor, Tensor]:
    """The multiplier of x and the stored scale, by the rule of the format."""
    rule = e8m0_scale if format.scale_dtype == E8M0 else float_scale
    return rule(amax, dtype, rounding or format.roundings[0])


def scale_values(scale: Tensor) -> Tensor:
    """The scales as float64; byte e of E8M0 is 2^(e - 127), and 255 is NaN."""
    if scale.dtype != E8M0:
        return scale.double()
    return E8M0_VALUES.to(scale.device)[scale.view(torch.uint8).long()]


# Sizes and groups


def ceil_div(size: int, divisor: int) -> int:
    """size / divisor, rounded up."""
    return (size + divisor - 1) // divisor


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `size`."""
    return ceil_div(size, multiple) * multiple


def padded_extent(m: int, e: int, align: int) -> int:
    """P, the extent of m tokens in e groups, each padded to `align`.

    Padding adds fewer than `align` tokens to each group, so the bound holds for all group sizes.
    """
    return round_up(m, align) + e * align


def group_bounds(offs: Tensor, m: int) -> list[tuple[int, int]]:
    """(start, end) of every group, with offsets clamped into [0, m] and made non-decreasing."""
    bounds, start = [], 0
    for offset in offs.tolist():
        end = max(start, min(max(offset, 0), m))
        bounds.append((start, end))
        start = end
    return bounds


def row_major(t: Tensor) -> Tensor:
    """A contiguous copy of t, even if t is empty, where Tensor.contiguous would keep the strides."""
    return t.clone(memory_format=torch.contiguous_format)


def int32(values: list[int], device: torch.device) -> Tensor:
    """An int32 tensor of the values."""
    return torch.tensor(values, dtype=torch.int32, device=device)
