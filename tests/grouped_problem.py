"""What the tests of grouped_mm multiply, and how they get its gradients."""

from __future__ import annotations

import torch
from helpers import on
from torch import Tensor

from moe_fp8_ext import grouped_mm


def problem(
    m: int, k: int, n: int, offs: Tensor, device: str = "cpu", dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A, B_t (the transposed view of [E, N, K]), offs and the gradient of out."""
    generator = torch.Generator().manual_seed(seed)
    a, b, g = (torch.randn(s, generator=generator).to(dtype) for s in ((m, k), (len(offs), n, k), (m, n)))
    a, b, offs, g = on(device, [a, b, offs, g])
    return a.requires_grad_(), b.transpose(1, 2).requires_grad_(), offs, g


def gradients(fn, a: Tensor, b_t: Tensor, g: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """out, dA and dB_t of fn(a, b_t) on fresh leaves; an operand that needs no gradient gets None."""
    a, b_t = (t.detach().requires_grad_(t.requires_grad) for t in (a, b_t))
    out = fn(a, b_t)
    out.backward(torch.ones_like(out) if g is None else g)
    return out.detach(), a.grad, b_t.grad


def run(a: Tensor, b_t: Tensor, offs: Tensor, g: Tensor, recipe: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return gradients(lambda a, b: grouped_mm(a, b, offs, recipe=recipe), a, b_t, g)
