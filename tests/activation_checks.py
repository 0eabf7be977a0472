"""What the tests of activations share: problems, and how near dscores must be."""

from __future__ import annotations

import torch
from helpers import wide
from torch import Tensor

from moe_fp8_ext import reference

GATED = ("swiglu", "geglu", "swiglu_oai")
ACTIVATIONS = (*GATED, "silu", "gelu", "relu2")


def h_for(activation: str, p: int, f: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Tensor:
    return wide(p, 2 * f if activation in GATED else f, dtype=dtype, device=device)


def da_for(h: Tensor, activation: str, dtype: torch.dtype | None = None) -> Tensor:
    f = h.shape[1] // 2 if activation in GATED else h.shape[1]
    return wide(h.shape[0], f, dtype=dtype or h.dtype, device=h.device, seed=3)


def scores_for(h: Tensor) -> Tensor:
    return wide(1, h.shape[0], dtype=torch.float32, device=h.device, seed=5)[0]


def check_dscores(got: Tensor, want: Tensor, h: Tensor, da: Tensor, activation: str, **how: object) -> None:
    """A float32 sum of F products, in any order, is off by less than F * 2^-24 * sum |products|. Rounding the reference
    adds half a unit of its last place; 1.01 is for terms of higher order."""
    scale, format = how.get("h_scale"), how.get("format")
    values = h if scale is None else reference.dequantize(h, scale, format, out_dtype=torch.float32)
    a = reference.activate(values.float(), activation, interleaved=how.get("interleaved", False))
    size = (da.double() * a.double()).abs().sum(1)
    assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
    tolerance = 1.01 * (da.shape[1] * 2.0**-24 * size + 2.0**-24 * want.double().abs() + 2.0**-149)
    same = (got == want) | (got.isnan() & want.isnan())
    assert (same | ((got.double() - want.double()).abs() <= tolerance)).all()
