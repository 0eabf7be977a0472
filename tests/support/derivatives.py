"""Checks of derivatives: both spellings of an op, no second derivatives, no forward-mode derivatives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import moe_fp8_ext

SPELLINGS = {moe_fp8_ext.ops: "ops", torch.ops.moe_fp8: "torch.ops"}


def check_no_second_derivative(out: Tensor, *leaves: Tensor) -> None:
    """create_graph=True raises, whether or not the gradient of out depends on out."""
    for of_sum in (out.float().sum(), out.float().square().sum()):
        torch.autograd.grad(of_sum, leaves, retain_graph=True)
        for leaf in leaves:
            with pytest.raises(RuntimeError, match="moe_fp8_ext has no second derivatives"):
                torch.autograd.grad(of_sum, leaf, create_graph=True)


def check_no_tangent(fn: Callable[[Tensor], object], x: Tensor) -> None:
    """fn of a dual tensor raises, because no derivative may silently be zero."""
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach().clone(), torch.ones_like(x))
        with pytest.raises(RuntimeError):
            fn(dual)
