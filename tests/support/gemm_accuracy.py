"""The accuracy of GEMMs on tensor cores, with derived bounds, and operands of real values as quantizers make them."""

from __future__ import annotations

import math

import torch
from helpers import group_offs, wide

from moe_fp8_ext.ops import quantize_rows, quantize_tokens, quantize_weight


def fp8_gemm_db(k: int, out_dtype: torch.dtype) -> float:
    """The SQNR of Hopper's FP8 tensor cores for sums of k products.

    They align all addends to the largest one and keep 13 fraction bits of it. Each addend has an error uniform in one
    unit, with variance 2^-26 / 3 relative to the squared accumulator. The accumulator is at most about the result; the
    factor 4 is for the unit of the accumulator's octave. The errors of k independent addends add up. The final rounding
    is uniform within half a unit. 6 dB cover the spread between draws.
    """
    rounding = 2.0**-24 if out_dtype == torch.float32 else 2.0**-8
    return -10 * math.log10(4 * max(k, 1) * 2.0**-26 / 3 + rounding**2 / 3) - 6


def bf16_gemm_db(k: int, out_dtype: torch.dtype) -> float:
    """The SQNR of Hopper's BF16 tensor cores for sums of k products of operands that are exact in BF16.

    An instruction adds 16 products to a sum and truncates it to float32. The error is below 2^-23 of the sum and always
    towards zero, so errors add up. The final rounding and the spread are as in fp8_gemm_db.
    """
    rounding = 2.0**-24 if out_dtype == torch.float32 else 2.0**-8
    return -10 * math.log10((math.ceil(k / 16) * 2.0**-23) ** 2 + rounding**2 / 3) - 6


def real_operands(fmt: str, m: int, k: int, n: int, e: int, device: str) -> list[tuple[list[object], int, dict]]:
    """The three products of a layer, each with the number of terms of its longest sum and with further arguments."""
    offs = group_offs("tail_rows", m, e, device)
    x, dy = wide(m, k, device=device), wide(m, n, device=device, seed=1)
    q, scale, q_t, scale_t = quantize_weight(wide(e, n, k, device=device, seed=2), fmt)
    x_t, scale_x, ends = quantize_tokens(x, fmt, offs=offs)
    dy_t, scale_dy, _ = quantize_tokens(dy, fmt, offs=offs)
    column_major = fmt == "blockwise"
    scale_b, scale_b_t, scale_x = (s.mT if column_major else s for s in (scale, scale_t, scale_x))
    (x_q, x_scale), (dy_q, dy_scale) = (quantize_rows(t, fmt, offs=offs) for t in (x, dy))
    return [
        ([x_q, q.mT, x_scale, scale_b, fmt, offs], k, {}),
        ([dy_q, q_t.mT, dy_scale, scale_b_t, fmt, offs], n, {}),
        ([dy_t, x_t.t(), scale_dy, scale_x, fmt, ends], m, {"align": 32}),
    ]
