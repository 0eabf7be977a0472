"""The kernels that use gfx950's MFMA with scales, without a GPU. See test_simt.py; test_simt_scales.py covers other
sizes, types and groups."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gemm_accuracy import real_operands
from helpers import FP8_DTYPES, group_offs, short
from simt_checks import ON_LINUX, e8m0
from simt_kernels import SimtKernels
from simt_products import products
from torch import Tensor

from moe_fp8_ext import reference
from moe_fp8_ext.reference.numerics import E8M0

pytestmark = ON_LINUX
OF_BLOCKS_OF_32 = pytest.mark.parametrize("fmt", ["mxfp8", "mxfp8_rowmajor"])
E4M3, E5M2 = FP8_DTYPES[:2]
OF_A = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=short)


@pytest.fixture
def gfx950(gemm_with_scales: Path) -> SimtKernels:
    return SimtKernels(gemm_with_scales)


def product(kernels: SimtKernels, args: list[object]) -> tuple[Tensor, Tensor]:
    """Returns the float32 product and the reference's in float64."""
    want = reference.scaled_grouped_mm(*args, out_dtype=torch.float64)
    return kernels.run("scaled_grouped_mm", (want.float(),), *args, out_dtype=torch.float32)[0], want


def other_scales(like: Tensor, low: int, high: int) -> Tensor:
    out = torch.empty_strided(like.shape, like.stride(), dtype=E8M0)
    return out.copy_(e8m0(*like.shape, low=low, high=high))


@OF_A
def test_instruction_that_runs(dtype, gfx950):
    """Zeros are multiplied by 2^127 twice. Other kernels multiply both scales in float32 first, which gives NaN."""
    assert (gfx950.chip, gfx950.wave, gfx950.native_fnuz()) == ("gfx950", 64, False)
    offs = torch.tensor([40], dtype=torch.int32)
    a, b, scale_a, scale_b, *_ = products("mxfp8", offs, 40, 200, 24, dtype)[0]
    zeros, huge = torch.zeros(a.shape).to(dtype), (other_scales(s, 254, 255) for s in (scale_a, scale_b))
    got, want = product(gfx950, [zeros, b, *huge, "mxfp8", offs])
    assert torch.equal(got.double(), want) and not want.any()


@OF_BLOCKS_OF_32
@pytest.mark.parametrize("sizes", [(140, 200, 72, 3), (200, 129, 130, 2), (70, 384, 40, 2)], ids=short)
def test_real_values(sizes, fmt, gfx950):
    """The error is at most 32 * 2^-24 of the sum of magnitudes M, 2^-24 M a block, and 2^-150 a block.

    An addition rounds by at most 2^-24 of its result, which is at most M. A block has 32 additions, and the magnitudes
    of all blocks add up to M: 32 * 2^-24 M in all. Then each block is added to the blocks before it: 2^-24 M a block.
    Products and scales are exact, except for values that underflow: 2^-150 a block.
    """
    for (a, b, *rest), terms, _ in real_operands(fmt, *sizes, "cpu"):
        got, want = product(gfx950, [a, b, *rest])
        magnitude = reference.scaled_grouped_mm(a.float().abs(), b.float().abs(), *rest, out_dtype=torch.float64)
        blocks = -(-terms // 32)
        bound = (32 + blocks) * 2.0**-24 * magnitude * 1.001 + blocks * 2.0**-150
        assert magnitude.max() > 0 and ((got.double() - want).abs() <= bound).all()


@OF_A
@OF_BLOCKS_OF_32
def test_every_element_meets_the_scales_of_its_block(fmt, dtype, gfx950):
    """Row m has one nonzero element, number m. Every block has another scale from 2^-60 to 2^60."""
    k = 300
    x, offs = torch.zeros(k, k), torch.tensor([k], dtype=torch.int32)
    _, of_x, x_t, of_x_t, ends = reference.quantize_both(x, fmt, offs=offs)
    of_w = reference.quantize_weight(x[None], fmt)[1]
    for like, scale_a, scale_b, each in ((x, of_x, of_w, offs), (x_t, of_x_t, of_x_t, ends)):
        ones = torch.ones(k, like.shape[1]).to(E4M3)
        b = ones[None].mT if each is offs else ones.t()
        scales = (other_scales(s, 67, 188) for s in (scale_a, scale_b))
        got, want = product(gfx950, [torch.eye(*like.shape).to(dtype), b, *scales, fmt, each])
        assert torch.equal(got.double(), want) and want.count_nonzero() == k * k


@OF_BLOCKS_OF_32
def test_smallest_scale(fmt, gfx950):
    """Byte 0 stands for 2^-127. The other scale is 2^127."""
    for a, b, scale_a, scale_b, _, ends in products(fmt, group_offs("tail_rows", 90, 2), 90, 70, 40, E4M3):
        for of_a, of_b in ((0, 254), (254, 0)):
            scales = other_scales(scale_a, of_a, of_a + 1), other_scales(scale_b, of_b, of_b + 1)
            got, want = product(gfx950, [a, b, *scales, fmt, ends])
            assert torch.equal(got.double(), want) and want.any()


@OF_BLOCKS_OF_32
def test_nan_is_of_its_own_block(fmt, gfx950):
    """A NaN scale poisons only its own block, or no block if its byte is padding. K and groups end within the 128
    elements that one instruction multiplies."""
    poisoned = 0
    for operands in products(fmt, torch.tensor([10, 50, 70], dtype=torch.int32), 75, 40, 33, E4M3):
        for which in (2, 3) * 12:
            args = list(operands)
            args[which] = scale = operands[which].clone()
            flat = scale.view(torch.uint8).view(-1)
            flat[torch.randint(flat.numel(), ())] = 255
            got, want = product(gfx950, args)
            assert torch.equal(got.isnan(), want.isnan())
            assert torch.equal(got.nan_to_num(0).double(), want.nan_to_num(0))
            poisoned += bool(want.isnan().any())
    assert 0 < poisoned < 48
