"""The kernels that read scales without a GPU: swizzle_scales, dequantize, scaled_grouped_mm. See test_simt.py."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
import torch
from helpers import (
    FP8_DTYPES,
    INPUT_DTYPES,
    LAYOUTS,
    assert_same,
    corrupt_offs,
    group_offs,
    misaligned,
    pairs,
    short,
    strided_2d,
    wide,
)
from simt_checks import ON_LINUX, WAVES, e8m0, exact_fp8
from simt_kernels import FORMATS, Waves
from simt_products import products
from torch import Tensor

from moe_fp8_ext import reference
from moe_fp8_ext.reference.numerics import E8M0, group_bounds

pytestmark = ON_LINUX
E4M3, E5M2 = FP8_DTYPES[:2]
MOST_EXPERTS = 1024


# ---- swizzle_scales, unswizzle_scales --------------------------------------------------------------------------------


def scales(*shape: int) -> Tensor:
    return torch.randint(1, 256, shape, dtype=torch.uint8)


def check_experts(kernels: Waves, scale: Tensor) -> None:
    kernels.check("swizzle_scales", scale, groups="experts")
    blocked, _ = reference.swizzle_scales(scale, groups="experts")
    kernels.check("unswizzle_scales", blocked, *scale.shape[1:], groups="experts")


def check_matrix(kernels: Waves, scale: Tensor) -> None:
    kernels.check("swizzle_scales", scale)
    kernels.check("unswizzle_scales", reference.swizzle_scales(scale)[0], *scale.shape)
    check_experts(kernels, scale[None])


def check_groups(kernels: Waves, scale: Tensor, offs: Tensor, groups: str) -> None:
    """unswizzle_scales ignores bytes that belong to no scale; they hold 77 here."""
    kernels.check("swizzle_scales", scale, groups=groups, offs=offs)
    blocked, _ = reference.swizzle_scales(scale, groups=groups, offs=offs)
    kernels.check("unswizzle_scales", blocked.masked_fill(blocked == 0, 77), *scale.shape, groups=groups, offs=offs)


def check_both(kernels: Waves, scale: Tensor, layout: str, e: int) -> None:
    for size, groups in zip(scale.shape, ("rows", "columns"), strict=True):
        check_groups(kernels, scale, group_offs(layout, size, e), groups)


SIZES = [(0, 0), (0, 5), (5, 0), (1, 1), (31, 7), (128, 16), (129, 64), (127, 90), (300, 67), (385, 200)]


@pytest.mark.parametrize("shape", SIZES, ids=short)
def test_swizzle(kernels, shape):
    check_matrix(kernels, scales(*shape))
    check_both(kernels, scales(*shape), "zipf", 0)
    check_both(kernels, scales(*shape), "tail_rows", 3)
    for e in (0, 3):
        check_experts(kernels, scales(e, *shape))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_swizzle_group_layouts(kernels, layout):
    for shape, e in (((300, 67), 5), ((129, 96), 40), ((520, 264), 4)):
        check_both(kernels, scales(*shape), layout, e)


def test_swizzle_groups_of_whole_blocks(kernels):
    sizes = torch.tensor([4, 0, 12, 16, 20, 64, 8, 100])
    for more in (0, 3):
        check_groups(kernels, scales(140, int(sizes.sum()) + more), sizes.cumsum(0).int(), "columns")


def test_swizzle_max_experts(kernels):
    for size in (0, 700):
        check_both(kernels, scales(size, 6), "zipf", MOST_EXPERTS)
        check_groups(kernels, scales(6, size), group_offs("zipf", size, MOST_EXPERTS), "columns")
        check_groups(kernels, scales(6, 4 * size), group_offs("uniform", 4 * size, MOST_EXPERTS), "columns")


def test_swizzle_strides_and_alignment(kernels):
    scale = scales(150, 96)
    views = [view for _, view in strided_2d(scale)] + [misaligned(scale, n) for n in (2, 4, 8, 15)]
    for view in [*views, scale[:1].expand(150, 96), scale[:, 3:50], scale[::2, 1:]]:
        check_matrix(kernels, view)
        check_both(kernels, view, "zipf", 3)
    experts = scales(6, 40, 64)
    for view in (experts[::2, 1::3, :41], experts.transpose(0, 1), experts[:, :, 5:]):
        check_experts(kernels, view)
    groups = {"groups": "rows", "offs": group_offs("zipf", 150, 3)}
    blocked, (of_groups, _) = reference.swizzle_scales(scale)[0], reference.swizzle_scales(scale, **groups)
    for n in (1, 2, 4, 8, 15):
        kernels.check("unswizzle_scales", misaligned(blocked, n), 150, 96)
        kernels.check("unswizzle_scales", misaligned(of_groups, n), 150, 96, **groups)


def test_swizzle_with_corrupt_offsets(kernels):
    for size in (1, 37, 200):
        for offs in corrupt_offs(size):
            check_groups(kernels, scales(size, 50), offs, "rows")
            check_groups(kernels, scales(140, size), offs, "columns")


@pytest.mark.parametrize("wave", WAVES)
def test_swizzle_of_fewer_blocks_than_tiles(wave, libraries, tmp_path, monkeypatch):
    """On one multiprocessor, blocks process tile after tile. The setting is read once per library, so the library is
    copied."""
    monkeypatch.setenv("SIMT_MULTIPROCESSORS", "1")
    kernels = Waves(Path(shutil.copy(libraries[wave], tmp_path)))
    for layout in ("uniform", "tail_rows"):
        check_both(kernels, scales(1300, 300), layout, 7)


# ---- transpose_weight ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 150, 272), (1, 144, 132), (3, 33, 31), (1, 16, 4), (2, 1, 129), (0, 5, 4)])
def test_transpose_weight(kernels, shape):
    """Words and whole chunks, either, and neither; full and partial tiles."""
    q = torch.randint(0, 256, shape, dtype=torch.uint8).view(E4M3)
    kernels.check("transpose_weight", q)
    if shape[0] > 1:
        kernels.check("transpose_weight", q[:, :, 3:])
        kernels.check("transpose_weight", q[:1].expand(shape))


# ---- dequantize ------------------------------------------------------------------------------------------------------


def check_operands(kernels: Waves, format: str, x: Tensor, offs: Tensor, fp8: torch.dtype, **how: object) -> None:
    """Checks every operand that a quantizer makes of x, with its groups, and misaligned copies of all."""
    q, scale, q_t, scale_t, ends = reference.quantize_both(x, format, offs=offs, dtype=fp8)
    w, w_scale, w_t, w_scale_t = reference.quantize_weight(torch.stack([x, -2 * x]), format, dtype=fp8)
    along = {"along": "tokens", "offs": ends}
    operands = [(w, w_scale, {}), (w_t, w_scale_t, {}), (q_t, scale_t, along), (q, scale, {"offs": offs})]
    if FORMATS[format].order == "blocked":
        operands.append((*reference.quantize_rows(x, format, dtype=fp8), {}))
    for q, scale, more in operands:
        want = (reference.dequantize(q, scale, format, **more, **how),)
        for pair in ((q, scale), (misaligned(q), misaligned(scale.contiguous(), 3))):
            kernels.check_as(want, "dequantize", *pair, format, **more, **how)


@pytest.mark.parametrize("out_dtype", INPUT_DTYPES, ids=short)
@pytest.mark.parametrize("format", FORMATS)
def test_dequantize(kernels, format, out_dtype):
    for fp8, (m, k) in zip(FP8_DTYPES, ((70, 136), (67, 301), (129, 32), (1, 33)), strict=True):
        check_operands(kernels, format, wide(m, k), group_offs("zipf", m, 3), fp8, out_dtype=out_dtype)


@pytest.mark.parametrize("format", FORMATS)
def test_dequantize_groups(kernels, format):
    for layout in LAYOUTS:
        check_operands(kernels, format, wide(301, 40), group_offs(layout, 301, 5), E4M3)
    check_operands(kernels, format, wide(700, 8), group_offs("zipf", 700, MOST_EXPERTS), E4M3)


@pytest.mark.parametrize("format", FORMATS)
def test_dequantize_sizes(kernels, format):
    """There are no rows, more rows than one launch's blocks take at once, and rows that span several blocks."""
    for m, k in ((0, 0), (0, 5), (5, 0), (300, 520), (20, 2064)):
        check_operands(kernels, format, wide(m, k), group_offs("tail_rows", m, 2), E4M3)
    q, offs = exact_fp8(300, 8192), torch.tensor([100, 290], dtype=torch.int32)
    if format == "blockwise":
        kernels.check("dequantize", q, torch.rand(300, 64), format)
    if format == "mxfp8":
        of_rows, _ = reference.swizzle_scales(e8m0(300, 256), groups="rows", offs=offs)
        kernels.check("dequantize", q, of_rows, format, offs=offs)


def test_dequantize_with_any_offsets(kernels):
    """Offsets are corrupt, or groups are not padded, so that one vector belongs to several groups."""
    for offs in (*corrupt_offs(80), torch.tensor([3, 4, 4, 37, 75, 78], dtype=torch.int32)):
        e, q, along = len(offs), exact_fp8(45, 80, dtype=E5M2), {"along": "tokens", "offs": offs}
        kernels.check("dequantize", q, torch.rand(e, 45), "rowwise", **along)
        kernels.check("dequantize", q, torch.rand(45, 1 + e), "blockwise", **along)
        whole = {"along": "tokens", "offs": offs.div(32, rounding_mode="floor").int() * 32}
        kernels.check("dequantize", q, e8m0(45, 3 + e), "mxfp8_rowmajor", **whole)
        blocks = sum(-(-(end - start) // 32) for start, end in group_bounds(offs, 80))
        of_columns = e8m0(128, -(-blocks // 4) * 4 + 4 * e)
        kernels.check("dequantize", q, of_columns, "mxfp8", **along)
        of_rows, _ = reference.swizzle_scales(e8m0(80, 2), groups="rows", offs=offs)
        kernels.check("dequantize", q.t().contiguous(), of_rows, "mxfp8", offs=offs)


@pytest.mark.parametrize("out_dtype", INPUT_DTYPES, ids=short)
def test_dequantize_every_scale_byte(kernels, out_dtype):
    scale = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 8).contiguous().view(E8M0)
    for fp8 in FP8_DTYPES:
        q = torch.arange(256, dtype=torch.uint8).view(fp8).expand(256, 256)
        kernels.check("dequantize", q, scale, "mxfp8_rowmajor", out_dtype=out_dtype)


# ---- expand_scales ---------------------------------------------------------------------------------------------------


def check_expanded(kernels: Waves, m: int, k: int, offs: Tensor) -> None:
    """Scales along rows, of groups and of none, and of a weight; along tokens, of features and of squares."""
    of = lambda *shape: torch.ldexp(torch.ones(shape), torch.randint(-127, 128, shape))  # noqa: E731
    q, blocks, squares = exact_fp8(m, k), -(-k // 128), -(-m // 128)
    kernels.check("expand_scales", q, of(m, blocks))
    kernels.check("expand_scales", q, of(blocks, m).t(), offs=offs)
    kernels.check("expand_scales", exact_fp8(2, m, k), of(2, squares, blocks))
    used = sum(-(-(end - start) // 128) for start, end in group_bounds(offs, m))
    for rows in (k, blocks):
        scale = of(max(used, squares) + 1, rows).t()
        kernels.check("expand_scales", q.t().contiguous(), scale, along="tokens", offs=offs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_expand_scales(kernels, layout):
    for m, k, e in ((300, 67, 5), (129, 400, 40), (0, 5, 2), (5, 0, 1), (5, 300, 1), (64, 8200, 3)):
        check_expanded(kernels, m, k, group_offs(layout, m, e))
    check_expanded(kernels, 5, 300, torch.zeros(0, dtype=torch.int32))


def test_expand_scales_with_corrupt_offsets(kernels):
    for offs in (*corrupt_offs(200), group_offs("zipf", 200, MOST_EXPERTS)):
        check_expanded(kernels, 200, 50, offs)


def test_expand_scales_that_are_no_powers(kernels):
    scale = torch.tensor([0, -1, 3, 2**-127, 2**-128, 2.0**127, float("inf"), float("nan")])[:, None]
    kernels.check("expand_scales", exact_fp8(8, 128), scale)


# ---- scaled_grouped_mm -----------------------------------------------------------------------------------------------


PRODUCTS = pairs(
    layout=LAYOUTS,
    format=list(FORMATS),
    shape=[(1, 1, 1, 1), (70, 33, 65, 3), (300, 150, 17, 5), (150, 208, 144, 2), (17, 8, 3, 2)],
    fp8=FP8_DTYPES,
    native=[True, False],
    out_dtype=[torch.float32, torch.bfloat16],
)


@pytest.mark.parametrize(*PRODUCTS, ids=short)
def test_scaled_grouped_mm(gemms, layout, format, shape, fp8, native, out_dtype):
    m, k, n, e = shape
    offs = group_offs(layout, m, e)
    for operands in products(format, offs, m, k, n, fp8, native):
        gemms.check("scaled_grouped_mm", *operands, out_dtype=out_dtype)
    if format == "blockwise":
        operands = products(format, offs, m, k, n, fp8, native, "square")[1]
        gemms.check("scaled_grouped_mm", *operands, out_dtype=out_dtype)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=short)
@pytest.mark.parametrize("format", FORMATS)
def test_transposed_scaled_grouped_mm(gemms, format, out_dtype):
    for m, k, n, e in ((96, 33, 65, 3), (64, 144, 16, 2)):
        operands = products(format, group_offs("tail_rows", m, e), m, k, n, E4M3)[1]
        gemms.check("scaled_grouped_mm", *operands, out_dtype=out_dtype, out_transposed=True)


def test_scaled_grouped_mm_of_many_tiles(gemms):
    """There are more tile rows than are rasterized at a time, more groups than blocks, and operands with stride 0."""
    for sizes, k, n in (([2200, 0, 40], 8, 130), ([int(e % 40 == 7) for e in range(MOST_EXPERTS)], 40, 9)):
        offs = torch.tensor(sizes).cumsum(0).int()
        for operands in products("mxfp8", offs, int(offs[-1]), k, n, E4M3):
            gemms.check("scaled_grouped_mm", *operands, out_dtype=torch.float32)
    a, b, *rest = products("rowwise", torch.tensor([100, 150], dtype=torch.int32), 150, 64, 40, E4M3)[0]
    a, b = a[:1].expand(150, 64), b[:, :, :1].expand(2, 64, 40)
    gemms.check("scaled_grouped_mm", a, b, *rest, out_dtype=torch.float32)


@pytest.mark.parametrize("format", FORMATS)
def test_scaled_grouped_mm_with_corrupt_offsets(gemms, format):
    for offs in corrupt_offs(40):
        forward, backward = products(format, torch.tensor([10, 20, 40], dtype=torch.int32), 40, 40, 9, E4M3)
        # Row-major scales of a K-grouped product go by position, so its groups begin at multiples of a block.
        whole = offs.div(32, rounding_mode="floor").int() * 32 if format == "mxfp8_rowmajor" else offs
        for (*operands, _), ends in ((forward, offs[:3]), (backward, whole[:3])):
            gemms.check("scaled_grouped_mm", *operands, ends, out_dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
@pytest.mark.parametrize("format", FORMATS)
def test_add_scaled_grouped_mm(gemms, format, dtype):
    for (m, k, n, e), layout, fp8 in zip(((70, 33, 65, 3), (90, 64, 16, 5)), LAYOUTS[-2:], FP8_DTYPES, strict=False):
        operands = products(format, group_offs(layout, m, e), m, k, n, fp8)[1]
        total = wide(e, n, k, dtype=dtype)
        total[:, 0] = -0.0  # stays in empty groups
        want = total.clone()
        reference.add_scaled_grouped_mm(want, *operands)
        for at in (total, misaligned(total)):
            gemms.check_as((want,), "add_scaled_grouped_mm", at, *operands)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
def test_add_groups(kernels, dtype):
    """Adds the product of a native GEMM. Totals of empty groups do not change, whatever their product holds."""
    ends = torch.tensor([0, 3, 7, 7, 9], dtype=torch.int32)
    shapes = ((5, 8, 8), (5, 24, 40))
    for shape, of_product in itertools.product(shapes, (torch.bfloat16, torch.float32)):
        total, product = wide(*shape, dtype=dtype), wide(*shape, dtype=of_product, seed=1)
        product[::3], total[0] = float("nan"), -0.0
        want = (total.float() + product.float()).to(dtype)
        want[::3] = total[::3]
        for each in kernels:
            assert_same(each.add_groups(total, product, ends), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
def test_add_low_rank(kernels, dtype):
    """Adds the term of an adapter. Rows behind the last group keep their bytes, whatever their factors hold."""
    for (m, n, rank, e), layout in zip(((70, 33, 5, 3), (150, 272, 16, 4), (200, 130, 72, 2)), LAYOUTS, strict=False):
        for offs in (group_offs(layout, m, e), *corrupt_offs(m)[:1]):
            out, of_experts = torch.randint(-9, 9, (m, n)).to(dtype), torch.randint(-3, 4, (len(offs), n, rank))
            a, b, want = torch.randint(-3, 4, (m, rank)).bfloat16(), of_experts.bfloat16(), out.clone()
            for i, (start, end) in enumerate(reference.group_bounds(offs, m)):
                want[start:end] = (want[start:end].float() + a[start:end].float() @ b[i].float().t()).to(dtype)
            a[reference.group_bounds(offs, m)[-1][1] :] = float("nan")
            for each in kernels:
                assert_same(each.add_low_rank(out, a, b, offs), want)


def test_offsets_for_a_native_gemm(kernels):
    for offs in [*corrupt_offs(40), group_offs("tail_rows", 40, 4), torch.tensor([16, 32, 32], dtype=torch.int32)]:
        ends = torch.tensor([end for _, end in group_bounds(offs, 40)], dtype=torch.int32)
        for each in kernels:
            assert_same(each.prepare_offs(offs, 40, 1), torch.cat([ends, ends[-1:]]))
            assert_same(each.prepare_offs(offs, 40, 16), torch.cat([ends // 16 * 16, ends[-1:]]))


def test_zero_rows(kernels):
    out = torch.arange(60, dtype=torch.int32).view(12, 5)
    for first in (0, 7, 12):
        want = out.clone()
        want[first:] = 0
        for each in kernels:
            assert_same(each.zero_rows(out, first), want)


def test_zero_empty_groups(kernels):
    out = torch.arange(1, 61, dtype=torch.int32).view(4, 3, 5)
    want = out.clone()
    want[::3] = 0
    ends = torch.tensor([0, 3, 7, 7], dtype=torch.int32)
    for each in kernels:
        assert_same(each.zero_empty_groups(out, ends), want)
