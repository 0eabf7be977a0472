"""Inputs for tests of activations, and the tolerance of grad_scores."""

from __future__ import annotations

import torch
from helpers import wide
from torch import Tensor

from moe_fp8_ext import clamped_swiglu, reference

CLAMPED = clamped_swiglu(1.5, alpha=0.75, offset=-0.25)
GATED = ("swiglu", "geglu", "swiglu_oai", CLAMPED)
ACTIVATIONS = (*GATED, "silu", "gelu", "relu2")
NAMED = tuple(name for name in ACTIVATIONS if name != CLAMPED)  # that the emulator knows


def h_for(activation: str, p: int, f: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Tensor:
    return wide(p, 2 * f if activation in GATED else f, dtype=dtype, device=device)


def da_for(h: Tensor, activation: str, dtype: torch.dtype | None = None) -> Tensor:
    f = h.shape[1] // 2 if activation in GATED else h.shape[1]
    return wide(h.shape[0], f, dtype=dtype or h.dtype, device=h.device, seed=3)


def scores_for(h: Tensor) -> Tensor:
    return wide(1, h.shape[0], dtype=torch.float32, device=h.device, seed=5)[0]


SCORED = None, "rows", "slots"


def scored(h: Tensor, by: str | None) -> dict[str, Tensor | None]:
    """The keyword arguments for scores: none, per row, or per slot. Some slots have no row, and some rows no slot."""
    if by != "slots":
        return {"scores": scores_for(h) if by else None}
    rows, slots = len(h), len(h) + 7
    indices = torch.randperm(slots, generator=torch.Generator().manual_seed(7))[:rows].int()
    indices[2::5], indices[4::11] = -1, slots
    return {"scores": wide(1, slots, dtype=torch.float32, device=h.device, seed=5)[0], "indices": indices.to(h.device)}


def check_dscores(got: Tensor, want: Tensor, h: Tensor, da: Tensor, activation: str, **how: object) -> None:
    """Compares grad_scores with the reference, within the error of a float32 sum.

    In any order, a float32 sum of F products is off by less than F * 2^-24 * sum |products|. Rounding the reference
    adds half a unit of its last place. The factor 1.01 covers terms of higher order.
    """
    scale, format, indices = how.get("h_scale"), how.get("format"), how.get("indices")
    values = h if scale is None else reference.dequantize(h, scale, format, out_dtype=torch.float32)
    a = reference.activate(values.float(), activation, interleaved=how.get("interleaved", False))
    magnitude = (da.double() * a.double()).abs().sum(1)
    if indices is not None:
        valid = (indices >= 0) & (indices < len(want))
        magnitude = torch.zeros_like(want.double()).index_copy(0, indices[valid].long(), magnitude[valid])
    assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
    tolerance = 1.01 * (da.shape[1] * 2.0**-24 * magnitude + 2.0**-24 * want.double().abs() + 2.0**-149)
    same = (got == want) | (got.isnan() & want.isnan())
    assert (same | ((got.double() - want.double()).abs() <= tolerance)).all()
