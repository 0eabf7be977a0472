"""The MX reference equals torchao, if torchao is installed."""

from __future__ import annotations

import pytest
import torch
from helpers import LAYOUTS, assert_same, assert_same_tensor, group_offs, short
from torch import Tensor

from moe_fp8_ext import reference

formats = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="torchao is not installed")
config = pytest.importorskip("torchao.prototype.mx_formats.config", reason="torchao is not installed")
groups = pytest.importorskip("torchao.prototype.moe_training.kernels.mxfp8", reason="torchao is not installed")


def blocks_of_32() -> Tensor:
    """Blocks with ever larger amax, from subnormals to nearly the largest bfloat16."""
    return torch.randn(2000, 32) * torch.exp2(torch.linspace(-135, 124, 2000))[:, None]


@pytest.mark.parametrize("rounding", ["rceil", "floor"])
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=short)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=short)
def test_to_mx(dtype, fp8, rounding):
    x = blocks_of_32().to(dtype)
    x = x[x.isfinite().all(1)]
    q, scale = reference.quantize_rows(x, "mxfp8_rowmajor", dtype=fp8, rounding=rounding)
    want_scale, want = formats.to_mx(x, fp8, 32, config.ScaleCalculationMode[rounding.upper()])
    assert_same_tensor(scale.view(torch.uint8), want_scale.view(torch.uint8).view(scale.shape), "scale")
    # The byte 0 stands for 2^-127, and its blocks are multiplied by 2^127; torchao multiplies them by 1 or by 2^126.
    tiny = (scale.view(torch.uint8) == 0)[:, 0]
    assert 0 < tiny.sum() < len(x) // 4
    assert_same_tensor(q[~tiny], want[~tiny], "q")


def scales(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_in_blocks(layout):
    """Both functions agree where the room behind the last group begins. torchao needs whole blocks along the other
    side."""
    scale, offs = scales(300, 8), group_offs(layout, 300, 5)
    want, starts = groups.torch_to_blocked_2d_M_groups(scale, offs)
    assert_same(reference.swizzle_scales(scale, groups="rows", offs=offs), (want, starts[:5].int()))
    scale, offs = scales(300, 67), group_offs(layout, 67, 5)
    want, starts = groups.torch_to_blocked_2d_K_groups(scale, offs)
    assert_same(reference.swizzle_scales(scale, groups="columns", offs=offs), (want, starts[:5].int()))
    scale = scales(3, 300, 7)
    assert_same(reference.swizzle_scales(scale, groups="experts")[0], groups.torch_to_blocked_per_group_3d(scale))
