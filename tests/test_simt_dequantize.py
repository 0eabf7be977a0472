"""The kernels that read quantized operands, without a GPU: see test_simt.py."""

from __future__ import annotations

import pytest
import torch
from helpers import FP8_DTYPES, INPUT_DTYPES, LAYOUTS, corrupt_offs, group_offs, misaligned, short, wide
from quantized import GROUPED, OPERANDS, operand
from simt_checks import ON_LINUX, check, exact_fp8
from torch import Tensor

from moe_fp8_ext import shapes

pytestmark = ON_LINUX
E4M3, E5M2 = FP8_DTYPES[:2]
E8M0 = torch.float8_e8m0fnu


def e8m0(*shape: int, low: int = 125, high: int = 130) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8).view(E8M0)


@pytest.mark.parametrize("out_dtype", INPUT_DTYPES, ids=short)
@pytest.mark.parametrize("kind", OPERANDS)
def test_dequantize(kernels, kind, out_dtype):
    for fp8, (m, k) in zip(FP8_DTYPES, ((70, 136), (67, 301), (129, 32), (1, 33)), strict=True):
        args = operand(kind, wide(m, k), group_offs("zipf", m, 3), fp8)
        check(kernels, "dequantize", *[*args, None][:4], out_dtype)
        q, scale, *rest = args
        check(kernels, "dequantize", misaligned(q), misaligned(scale.contiguous(), 3), *[*rest, None][:2], out_dtype)


@pytest.mark.parametrize("kind", GROUPED)
def test_dequantize_groups(kernels, kind):
    for layout in LAYOUTS:
        check(kernels, "dequantize", *operand(kind, wide(301, 40), group_offs(layout, 301, 5)))
    check(kernels, "dequantize", *operand(kind, wide(700, 8), group_offs("zipf", 700, shapes.MAX_EXPERTS)))


def test_dequantize_sizes(kernels):
    """None at all, more rows than the blocks of a launch take at once, rows of several blocks."""
    for kind in OPERANDS:
        for m, k in ((0, 0), (0, 5), (5, 0), (300, 520), (20, 2064)):
            check(kernels, "dequantize", *operand(kind, wide(m, k), group_offs("tail_rows", m, 2)))
    q, offs = exact_fp8(300, 8192, dtype=E4M3), torch.tensor([100, 290], dtype=torch.int32)
    check(kernels, "dequantize", q, torch.rand(300, 64), "1x128")
    check(kernels, "dequantize", q, e8m0(*shapes.swizzle_scales_m_groups((300, 256), 2)), "1x32_blocked", offs)
    check(kernels, "dequantize", q, e8m0(*shapes.swizzle_scales_k_groups((300, 256), 2)), "32x1_blocked", offs * 8)


def test_dequantize_with_any_offsets(kernels):
    """Corrupt ones, and groups that are not padded: pieces of a vector belong to several of them."""
    for offs in (*corrupt_offs(80), torch.tensor([3, 4, 4, 37, 75, 78], dtype=torch.int32)):
        e, q = len(offs), exact_fp8(45, 80, dtype=E5M2)
        check(kernels, "dequantize", q, torch.rand(e, 45), "colwise", offs)
        check(kernels, "dequantize", q, torch.rand(45, 1 + e), "128x1", offs)
        kernels.dequantize(q, torch.rand(45, 1), "128x1", offs)  # too few blocks: any numbers
        check(kernels, "dequantize", q, e8m0(*shapes.swizzle_scales_k_groups((45, 3), e)), "32x1_blocked", offs)
        scale = e8m0(*shapes.swizzle_scales_m_groups((80, 2), e))
        check(kernels, "dequantize", q.t().contiguous(), scale, "1x32_blocked", offs)


@pytest.mark.parametrize("out_dtype", INPUT_DTYPES, ids=short)
def test_dequantize_every_scale_byte(kernels, out_dtype):
    scale = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 8).contiguous().view(E8M0)
    for fp8 in FP8_DTYPES:
        q = torch.arange(256, dtype=torch.uint8).view(fp8).expand(256, 256)
        check(kernels, "dequantize", q, scale, "1x32", None, out_dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scaled_grouped_mm_of_mx(kernels, layout):
    for m, k, n, e in ((1, 1, 1, 1), (300, 150, 65, 3)):
        offs, blocks = group_offs(layout, m, e), -(-k // 32)
        a, w = exact_fp8(m, k, dtype=E4M3), exact_fp8(e, n, k, dtype=E5M2)
        of_a, of_b = shapes.swizzle_scales_m_groups((m, blocks), e), shapes.swizzle_scales_3d((e, n, blocks))
        check(kernels, "scaled_grouped_mm", a, w.mT, e8m0(*of_a), e8m0(*of_b), offs, torch.float32, None, 32)
        a, b = exact_fp8(n, m, dtype=E4M3), exact_fp8(k, m, dtype=E4M3)
        of_a, of_b = (shapes.swizzle_scales_k_groups((rows, -(-m // 32)), e) for rows in (n, k))
        check(kernels, "scaled_grouped_mm", a, b.t(), e8m0(*of_a), e8m0(*of_b), offs, torch.float32, None, 32)


def test_scaled_grouped_mm_of_mx_with_corrupt_offsets(kernels):
    for offs in corrupt_offs(40):
        e = len(offs)
        a, w = exact_fp8(40, 40, dtype=E4M3), exact_fp8(e, 9, 40, dtype=E4M3)
        of_a, of_b = shapes.swizzle_scales_m_groups((40, 2), e), shapes.swizzle_scales_3d((e, 9, 2))
        check(kernels, "scaled_grouped_mm", a, w.mT, e8m0(*of_a), e8m0(*of_b), offs, torch.float32, None, 32)
        of_a, of_b = (shapes.swizzle_scales_k_groups((rows, 2), e) for rows in (40, 9))
        b = exact_fp8(9, 40, dtype=E4M3)
        check(kernels, "scaled_grouped_mm", a, b.t(), e8m0(*of_a), e8m0(*of_b), offs, torch.float32, None, 32)
