"""A weight of grouped_mm, the results of calls with it, and how often they quantize it."""

from __future__ import annotations

import torch
from grouped_problem import problem
from helpers import assert_same, group_offs
from torch import Tensor
from torch.nn import Parameter

from moe_fp8_ext import Recipe, grouped_mm

A, B_T, OFFS, G = problem(60, 96, 64, group_offs("zipf", 60, 3))
W = B_T.detach().mT


def parameter(device: str, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Parameter:
    return Parameter((W * scale).to(device, dtype, copy=True))


def call(w: Tensor, recipe: str | Recipe = "rowwise", a_grad: bool = True) -> tuple[Tensor, Tensor | None]:
    """out and dA of a call with the transposed view of w; each call makes a new view."""
    a = A.detach().to(w.device, w.dtype).requires_grad_(a_grad)
    out = grouped_mm(a, w.transpose(-2, -1), OFFS.to(w.device), recipe=recipe)
    if out.requires_grad:
        out.backward(G.to(w.device, out.dtype))
    return (out.detach(), a.grad) if a_grad else (out.detach(),)


def check_fresh(w: Tensor, **how: object) -> None:
    """The next call gives the bytes that a copy of the weight, which no cache knows, gives."""
    assert_same(call(w, **how), call(w.detach().clone().requires_grad_(w.requires_grad), **how))
