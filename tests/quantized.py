"""Operands as the reference quantizes them, for the tests of what reads them."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8_ext import reference

E4M3 = torch.float8_e4m3fn
OPERANDS = (
    "rowwise",
    "colwise",
    "1x128",
    "128x1",
    "128x128",
    "1x32",
    "1x32_blocked",
    "1x32_blocked rows",
    "1x32_blocked 3D",
    "32x1_blocked",
)
GROUPED = ("colwise", "128x1", "32x1_blocked", "1x32_blocked rows")


def operand(kind: str, x: Tensor, offs: Tensor, fp8: torch.dtype = E4M3, align: int | None = None) -> list[object]:
    """Arguments of `dequantize`: x [M, K] as a quantizer of the reference leaves it."""
    layout, _, how = kind.partition(" ")
    if layout == "rowwise":
        return [*reference.quantize_rowwise(x, fp8), layout]
    if layout == "colwise":
        q_t, scale_t, ends = reference.quantize_colwise(x, offs, align or 16, fp8)
        return [q_t, scale_t, layout, ends]
    if layout == "1x128":
        return [*reference.quantize_1x128(x, fp8), layout]
    if layout == "128x1":
        q_t, scale_t, ends = reference.quantize_128x1(x, offs, align or 128, fp8)
        return [q_t, scale_t, layout, ends]
    if layout == "128x128":
        q, _, scale = reference.quantize_128x128(torch.stack([x, -2 * x]), fp8)
        return [q, scale, layout]
    if layout == "1x32":
        return [*reference.quantize_mx_1x32(x, dtype=fp8), layout]
    if layout == "32x1_blocked":
        q_t, scale_t, ends = reference.quantize_mx_32x1(x, offs, align=align or 32, dtype=fp8)
        return [q_t, scale_t, layout, ends]
    if how == "3D":
        q, scale, *_ = reference.quantize_mx_weight(torch.stack([x, -2 * x, x / 3]), dtype=fp8)
        return [q, scale, layout]
    groups = offs if how == "rows" else None
    return [*reference.quantize_mx_1x32(x, layout="blocked", offs=groups, dtype=fp8), layout, groups]
