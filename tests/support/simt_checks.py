"""Shared by tests of the emulated kernels: wave sizes, and operands with exact sums."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

WAVES = (32, 64)
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the emulation reads Linux' ELF structures")


def exact_fp8(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Small integers, so that every sum of products is exact in float32."""
    return torch.randint(-3, 4, shape, dtype=torch.int8).float().to(dtype)


def exact_scales(*shape: int) -> Tensor:
    return torch.exp2(torch.randint(-3, 4, shape, dtype=torch.int8).float())


def e8m0(*shape: int, low: int = 125, high: int = 130) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)
