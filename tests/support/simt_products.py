"""Operands of scaled_grouped_mm for the emulated GEMMs, laid out as quantizers do it, with exact sums."""

from __future__ import annotations

import torch
from helpers import FP8_DTYPES
from simt_checks import e8m0, exact_fp8, exact_scales
from torch import Tensor

from moe_fp8_ext import ops
from moe_fp8_ext.reference.numerics import E8M0

E4M3, E5M2 = FP8_DTYPES[:2]


def scales_like(scale: Tensor) -> Tensor:
    """Powers of two, so that sums stay exact, with the shape and strides of `scale`."""
    values = e8m0(*scale.shape) if scale.dtype == E8M0 else exact_scales(*scale.shape)
    return torch.empty_strided(scale.shape, scale.stride(), dtype=scale.dtype).copy_(values)


def dtype_of_b(fp8: torch.dtype, native: bool) -> torch.dtype:
    """The dtype of b: one that the chip's instructions multiply by an a of `fp8` if there is one (native), or one that
    none does."""
    return (FP8_DTYPES[2] if "fnuz" in str(fp8) else E4M3) if native else E5M2


def products(
    format: str, offs: Tensor, m: int, k: int, n: int, fp8: torch.dtype, native: bool = True, amax: str = "group"
) -> list[tuple[object, ...]]:
    """Arguments of a forward product and of a wgrad, with the layouts of the quantizers. amax is the amax of x."""
    x, dy, w = torch.zeros(m, k), torch.zeros(m, n), torch.zeros(len(offs), n, k)
    _, scale, q_t, scale_t, ends = ops.quantize_both(x, format, offs=offs, amax=amax)
    w_scale, (dy_t, dy_scale, _) = ops.quantize_weight(w, format)[1], ops.quantize_tokens(dy, format, offs=offs)
    w_scale, x_scale = (w_scale.mT, scale_t.mT) if format == "blockwise" else (w_scale, scale_t)
    b_dtype = dtype_of_b(fp8, native)
    b, a, b_t = (exact_fp8(*t.shape, dtype=dtype) for t, dtype in ((w, b_dtype), (dy_t, fp8), (q_t, b_dtype)))
    return [
        (exact_fp8(m, k, dtype=fp8), b.mT, scales_like(scale), scales_like(w_scale), format, offs),
        (a, b_t.t(), scales_like(dy_scale), scales_like(x_scale), format, ends),
    ]
