"""The kernels of the blockwise recipe without a GPU: see test_simt.py."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    FP8_DTYPES,
    INPUT_DTYPES,
    LAYOUTS,
    corrupt_offs,
    group_offs,
    misaligned,
    short,
    slot_indices,
    strided_2d,
    wide,
)
from simt_checks import ON_LINUX, check, exact_fp8, exact_scales
from simt_kernels import SimtKernels
from torch import Tensor

from moe_fp8_ext import shapes

pytestmark = ON_LINUX
E4M3, E5M2 = FP8_DTYPES[:2]


def check_blockwise(kernels: SimtKernels, x: Tensor, offs: Tensor, align: int = 128, *rule: object) -> None:
    rule = rule or (E4M3,)
    check(kernels, "quantize_1x128", x, *rule)
    for transpose in (True, False):
        for op in ("quantize_128x1", "quantize_1x128_128x1"):
            pow2_scale = rule[1] if len(rule) > 1 else False
            check(kernels, op, x, offs, align, rule[0], pow2_scale, transpose)


@pytest.mark.parametrize("pow2_scale", [False, True])
@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=short)
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
def test_blockwise_formats(kernels, dtype, fp8, pow2_scale):
    for k in (67, 136):
        x = wide(140, k, dtype=dtype)
        check_blockwise(kernels, x, group_offs("zipf", 140, 2), 16, fp8, pow2_scale)
        check(kernels, "quantize_128x128", x[:138].view(1, 138, k), fp8, pow2_scale)


@pytest.mark.parametrize("align", [1, 8, 16, 128, 256])
def test_blockwise_groups(kernels, align):
    for layout in LAYOUTS:
        check_blockwise(kernels, wide(301, 40), group_offs(layout, 301, 5), align)
    sizes = torch.tensor([1, 16, 127, 128, 129, 0, 257])
    check_blockwise(kernels, wide(int(sizes.sum()) + 3, 264), sizes.cumsum(0).int(), align)
    for offs in corrupt_offs(200):
        check_blockwise(kernels, wide(200, 50), offs, align)


def test_blockwise_sizes(kernels):
    for m, k, e in ((0, 0, 0), (0, 0, 3), (5, 0, 2), (0, 5, 2), (5, 3, 0), (1, 1, 1), (7, 33, 3), (70, 1480, 2)):
        check_blockwise(kernels, wide(m, k), group_offs("uniform", m, e))
        check(kernels, "quantize_128x128", wide(e, m, k), E4M3)
    check_blockwise(kernels, wide(700, 24), group_offs("zipf", 700, shapes.MAX_EXPERTS), 64)
    check(kernels, "quantize_128x128", wide(3, 300, 272)[::2, 1:, 8:], E4M3)


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
def test_blockwise_strides_alignment_and_poison(kernels, dtype):
    x = wide(130, 136, dtype=dtype)
    x[4, 5], x[129, 131] = float("nan"), float("-inf")
    for _, view in [*strided_2d(x), ("misaligned", misaligned(x, 3)), ("row 0", x[:1].expand(130, 136))]:
        check_blockwise(kernels, view, group_offs("tail_rows", 130, 2), 32)
        check(kernels, "quantize_128x128", view[None], E4M3)


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
def test_permute_pad_quantize_blockwise(kernels, dtype):
    for k in (33, 136):
        x, indices, offs = wide(100, k, dtype=dtype), slot_indices(100, 2, 290), group_offs("zipf", 280, 3)
        for top_k in (1, 2):
            check(kernels, "permute_pad_quantize_1x128", x, indices, top_k, E4M3)
            for transpose in (True, False):
                args = x, indices, offs, top_k, 128, E4M3, False, transpose
                check(kernels, "permute_pad_quantize_1x128_128x1", *args)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scaled_grouped_mm_of_blocks(kernels, layout):
    for m, k, n, e in ((1, 1, 1, 1), (300, 150, 65, 3)):
        offs, (b_k, b_n) = group_offs(layout, m, e), (-(-size // 128) for size in (k, n))
        a, w = exact_fp8(m, k, dtype=E4M3), exact_fp8(e, n, k, dtype=E5M2)
        scales = exact_scales(b_k, m).t(), exact_scales(e, b_n, b_k).mT
        check(kernels, "scaled_grouped_mm", a, w.mT, *scales, offs, torch.float32, None, 128)
        a, b, blocks = exact_fp8(n, m, dtype=E4M3), exact_fp8(k, m, dtype=E4M3), -(-m // 128) + e
        scales = exact_scales(blocks, n).t(), exact_scales(blocks, k)
        check(kernels, "scaled_grouped_mm", a, b.t(), *scales, offs, torch.float32, None, 128)
