"""Operands that the reference has quantized, for tests of the ops that read them."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8_ext import reference
from moe_fp8_ext.reference.numerics import FORMATS

E4M3 = torch.float8_e4m3fn
# "<format> <what>": rows; groups of rows, if scales go by groups; tokens of groups; or weights of experts.
GROUPS = tuple(f"{name} groups" for name, f in FORMATS.items() if f.order == "blocked")
OPERANDS = (*(f"{f} {what}" for f in FORMATS for what in ("rows", "tokens", "weight")), *GROUPS)
GROUPED = (*(f"{f} tokens" for f in FORMATS), *GROUPS)


def operand(kind: str, x: Tensor, offs: Tensor, fp8: torch.dtype = E4M3, align: int | None = None) -> dict[str, object]:
    """Arguments of `dequantize`: x [M, K], quantized by the reference; along tokens, groups are padded to `align`."""
    format, what = kind.split()
    if what == "tokens":
        q, scale, offs = reference.quantize_tokens(x, format, offs=offs, align=align, dtype=fp8)
        return {"q": q, "scale": scale, "format": format, "along": "tokens", "offs": offs}
    if what == "weight":
        q, scale, _, _ = reference.quantize_weight(torch.stack([x, -2 * x, x / 3]), format, dtype=fp8)
        return {"q": q, "scale": scale, "format": format}
    offs = offs if what == "groups" else None
    q, scale = reference.quantize_rows(x, format, offs=offs, dtype=fp8)
    return {"q": q, "scale": scale, "format": format, "offs": offs}
