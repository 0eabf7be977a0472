"""What the tests of the emulated kernels share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from helpers import assert_same
from torch import Tensor

from moe_fp8_ext import reference

sys.path.insert(0, str(Path(__file__).parent / "toolchain"))
from simt_kernels import SimtKernels  # noqa: E402

WAVES = (32, 64)
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the emulation reads Linux' ELF structures")


def check(kernels: SimtKernels, op: str, *args: object) -> None:
    assert_same(getattr(kernels, op)(*args), getattr(reference, op)(*args), op)


def exact_fp8(*shape: int, dtype: torch.dtype) -> Tensor:
    """Small integers: every sum of products is exact in float32."""
    return torch.randint(-3, 4, shape).float().to(dtype)


def exact_scales(*shape: int) -> Tensor:
    return torch.exp2(torch.randint(-3, 4, shape).float())
