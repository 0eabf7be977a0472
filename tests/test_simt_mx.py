"""The kernels of the MXFP8 recipe without a GPU: see test_simt.py."""

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
from simt_checks import ON_LINUX, check
from simt_kernels import SimtKernels
from torch import Tensor

from moe_fp8_ext import shapes

pytestmark = ON_LINUX
E4M3 = torch.float8_e4m3fn


def check_mx(
    kernels: SimtKernels, x: Tensor, offs: Tensor, scaling: str = "rceil", fp8: torch.dtype = E4M3, align: int = 32
) -> None:
    for layout, groups in (("rowmajor", None), ("blocked", None), ("blocked", offs)):
        check(kernels, "quantize_mx_1x32", x, scaling, layout, groups, fp8)
    for layout in ("rowmajor", "blocked"):
        for op in ("quantize_mx_32x1", "quantize_mx_1x32_32x1"):
            check(kernels, op, x, offs, scaling, layout, align, fp8)


@pytest.mark.parametrize("scaling", ["rceil", "floor"])
@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=short)
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
def test_formats(kernels, dtype, fp8, scaling):
    for k in (67, 136):
        x = wide(140, k, dtype=dtype)
        check_mx(kernels, x, group_offs("zipf", 140, 2), scaling, fp8)
        check(kernels, "quantize_mx_weight", x[:138].view(1, 138, k), scaling, fp8)


@pytest.mark.parametrize("align", [32, 64, 128])
def test_groups(kernels, align):
    for layout in LAYOUTS:
        check_mx(kernels, wide(301, 40), group_offs(layout, 301, 5), align=align)
    sizes = torch.tensor([1, 31, 32, 33, 127, 128, 129, 0, 257])
    check_mx(kernels, wide(int(sizes.sum()) + 3, 264), sizes.cumsum(0).int(), align=align)
    for offs in corrupt_offs(200):
        check_mx(kernels, wide(200, 50), offs, align=align)


def test_sizes(kernels):
    for m, k, e in ((0, 0, 0), (0, 0, 3), (5, 0, 2), (0, 5, 2), (5, 3, 0), (1, 1, 1), (7, 33, 3), (70, 1480, 2)):
        check_mx(kernels, wide(m, k), group_offs("uniform", m, e))
        check(kernels, "quantize_mx_weight", wide(e, m, k), "rceil", E4M3)
    check_mx(kernels, wide(700, 24), group_offs("zipf", 700, shapes.MAX_EXPERTS), align=64)
    check(kernels, "quantize_mx_weight", wide(3, 300, 272)[::2, 1:, 8:], "rceil", E4M3)


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
def test_strides_alignment_and_poison(kernels, dtype):
    x = wide(130, 136, dtype=dtype)
    x[4, 5], x[129, 131], x[64:96] = float("nan"), float("-inf"), 0
    for _, view in [*strided_2d(x), ("misaligned", misaligned(x, 3)), ("row 0", x[:1].expand(130, 136))]:
        check_mx(kernels, view, group_offs("tail_rows", 130, 2))
        check(kernels, "quantize_mx_weight", view[None], "floor", E4M3)


def test_every_exponent(kernels):
    """Of float32, subnormals included, alone and as the amax of a block: no chip here converts to E8M0 itself."""
    x = torch.cat([1 << torch.arange(23), torch.arange(1, 255) << 23]).int()[:, None] + torch.tensor([-1, 0, 1])
    x = x.flatten().view(torch.float32)[:, None]
    for scaling in ("rceil", "floor"):
        for fp8 in FP8_DTYPES:
            check(kernels, "quantize_mx_1x32", x, scaling, "rowmajor", None, fp8)


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
def test_permute_pad_quantize(kernels, dtype):
    for k in (33, 136):
        x, indices, offs = wide(100, k, dtype=dtype), slot_indices(100, 2, 290), group_offs("zipf", 280, 3)
        for top_k in (1, 2):
            for layout in ("rowmajor", "blocked"):
                groups = offs if layout == "blocked" else None
                check(kernels, "permute_pad_quantize_mx_1x32", x, indices, groups, top_k, "rceil", layout, E4M3)
                args = x, indices, offs, top_k, "rceil", layout, 32, E4M3
                check(kernels, "permute_pad_quantize_mx_1x32_32x1", *args)
