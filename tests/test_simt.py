"""The GPU kernels without a GPU: hipified, run on the CPU at wave sizes 32 and 64, compared byte for byte.

Outputs start as 0xFF between inaccessible pages; a barrier that some threads miss, an access out of bounds, a
misaligned vector access or a launch that never ends fails the call (tests/toolchain/simt).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from helpers import (
    CORRECTNESS_MKE,
    FP8_DTYPES,
    INPUT_DTYPES,
    LAYOUTS,
    assert_same,
    corrupt_offs,
    group_offs,
    misaligned,
    short,
    slot_indices,
    strided_2d,
    wide,
)
from simt_checks import ON_LINUX, WAVES, check, exact_fp8, exact_scales
from simt_kernels import SimtKernels
from torch import Tensor

from moe_fp8_ext import reference, shapes

pytestmark = ON_LINUX
E4M3, E5M2 = FP8_DTYPES[:2]
GROUPED = ("quantize_colwise", "quantize_rowcol")


def check_grouped(kernels: SimtKernels, x: Tensor, offs: Tensor, align: int = 16, *args: object) -> None:
    for op in GROUPED:
        check(kernels, op, x, offs, align, *(args or (E4M3,)))


@pytest.mark.parametrize("pow2_scale", [False, True])
@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=short)
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
def test_formats(kernels, dtype, fp8, pow2_scale):
    for k in (67, 72):
        x = wide(131, k, dtype=dtype)
        check(kernels, "quantize_rowwise", x, fp8, pow2_scale)
        check_grouped(kernels, x, group_offs("zipf", 131, 5), 16, fp8, pow2_scale)
        check(kernels, "quantize_weight", x[:129].view(3, 43, k), fp8, pow2_scale)


@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=short)
def test_every_bfloat16_value_is_cast(kernels, fp8):
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    values = values[values.abs() < reference.FP8_MAX[fp8]]
    rows = torch.nn.functional.pad(values, (0, -len(values) % 255)).view(-1, 255)
    x = torch.nn.functional.pad(rows, (0, 1), value=reference.FP8_MAX[fp8])  # so that every row has multiplier 1
    check(kernels, "quantize_rowwise", x, fp8)


@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=short)
def test_ties_and_their_neighbours_are_cast(kernels, fp8):
    codes = torch.arange(256, dtype=torch.uint8).view(fp8).float()
    codes = codes[codes.isfinite()].sort().values
    ties = (codes[1:] + codes[:-1]) / 2
    values = torch.cat([ties, torch.nextafter(ties, codes[:-1]), torch.nextafter(ties, codes[1:])])
    x = torch.nn.functional.pad(values, (0, 1), value=reference.FP8_MAX[fp8])[None]
    check(kernels, "quantize_rowwise", x, fp8)


@pytest.mark.parametrize("shape", CORRECTNESS_MKE, ids=short)
def test_group_layouts(kernels, shape):
    m, k, e = shape
    for layout in LAYOUTS if m * k < 200_000 else ("zipf", "tail_rows"):  # seconds for each of the large ones
        check_grouped(kernels, wide(m, k), group_offs(layout, m, e))


@pytest.mark.parametrize("shape", CORRECTNESS_MKE, ids=short)
def test_shapes_without_groups(kernels, shape):
    m, k, e = shape
    check(kernels, "quantize_rowwise", wide(m, k), E5M2)
    check(kernels, "quantize_weight", wide(e, min(m, 150), k), E5M2)


@pytest.mark.parametrize("shape", [(0, 0, 0), (0, 0, 3), (5, 0, 2), (0, 5, 2), (5, 3, 0)], ids=short)
def test_zero_sizes(kernels, shape):
    m, k, e = shape
    check(kernels, "quantize_rowwise", wide(m, k), E4M3)
    check(kernels, "quantize_weight", wide(e, m, k), E4M3)
    check_grouped(kernels, wide(m, k), group_offs("uniform", m, e))


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
@pytest.mark.parametrize("k", [1, 8, 4096, 9001, 33000])
def test_rows_from_one_element_to_more_than_registers_hold(kernels, k, dtype):
    check(kernels, "quantize_rowwise", wide(3, k, dtype=dtype), E4M3)


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
def test_rows_that_run_beside_columns(kernels, dtype):
    """Rows from 2048 to 6544 bytes, the emulated chip's limits, and their neighbours, which follow the columns."""
    shortest, longest = 2048 // dtype.itemsize, 6544 // dtype.itemsize
    for k in (shortest - 8, shortest, shortest + 8, shortest + 9, longest, longest + 8):
        x = wide(21, k, dtype=dtype)
        x[4, 5], x[20, 7] = float("nan"), float("inf")
        check(kernels, "quantize_rowcol", x, group_offs("tail_rows", 21, 3), 16, E4M3)
        check(kernels, "quantize_weight", x.view(3, 7, k)[::2, 1:], E4M3)


def test_group_longer_than_shared_memory_holds(kernels):
    for dtype in INPUT_DTYPES:
        check_grouped(kernels, wide(2500, 40, dtype=dtype), group_offs("one_giant", 2500, 3))


def test_group_sizes_around_every_tile(kernels):
    sizes = torch.tensor([1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 257])
    for align in (1, 8, 16, 64, 256):
        check_grouped(kernels, wide(int(sizes.sum()), 72), sizes.cumsum(0).int(), align)


def test_most_experts(kernels):
    for m in (0, 700):
        check_grouped(kernels, wide(m, 24), group_offs("zipf", m, shapes.MAX_EXPERTS))


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
def test_strides_and_alignment(kernels, dtype):
    x, offs = wide(70, 128, dtype=dtype), group_offs("zipf", 70, 3)
    views = [
        *strided_2d(x),
        *((f"misaligned {n}", misaligned(x, n)) for n in range(1, 8)),
        ("row 0", x[:1].expand(70, 128)),
    ]
    for _, view in views:
        check(kernels, "quantize_rowwise", view, E4M3)
        check(kernels, "quantize_weight", view.view(7, 10, 128) if view.is_contiguous() else view[None], E4M3)
        check_grouped(kernels, view, offs)
    check(kernels, "quantize_weight", wide(6, 20, 64, dtype=dtype)[::2, 1::3, :40], E4M3)


def test_corrupt_offsets(kernels):
    for m in (1, 37, 200):
        for offs in corrupt_offs(m):
            check_grouped(kernels, wide(m, 50), offs)


@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=short)
def test_non_finite_values(kernels, fp8):
    """Sizes of every remainder modulo 4: padding is zero beside the NaN bytes of a poisoned column too."""
    offs = torch.tensor([1, 2, 3, 4, 13, 15, 0, 30]).cumsum(0).int()
    x = wide(90, 40)
    x[(offs - 1).long(), 3], x[offs[4], 5], x[89, 8] = float("nan"), float("-inf"), float("inf")
    for pow2_scale in (False, True):
        check(kernels, "quantize_rowwise", x, fp8, pow2_scale)
        check(kernels, "quantize_weight", x.view(3, 30, 40), fp8, pow2_scale)
        check_grouped(kernels, x, offs, 16, fp8, pow2_scale)


@pytest.mark.parametrize("wave", WAVES)
def test_another_number_of_multiprocessors(wave, libraries, tmp_path, monkeypatch):
    """Another grid, another distribution of the work. Device attributes are read once, hence a copy of the library."""
    monkeypatch.setenv("SIMT_MULTIPROCESSORS", "7")
    kernels = SimtKernels(Path(shutil.copy(libraries[wave], tmp_path)))
    check_grouped(kernels, wide(300, 303), group_offs("zipf", 300, 5))
    check(kernels, "sort_tokens", torch.randint(-1, 40, (9000,)), 39)


def test_default_format(libraries):
    assert SimtKernels(libraries[64]).native_fnuz()  # gfx942
    assert not SimtKernels(libraries[32]).native_fnuz()


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=short)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scaled_grouped_mm(kernels, layout, out_dtype):
    for fp8, (m, k, n, e) in zip(
        FP8_DTYPES, [(1, 1, 1, 1), (70, 33, 65, 3), (129, 40, 17, 5), (17, 8, 3, 2)], strict=True
    ):
        a, w = exact_fp8(m, k, dtype=fp8), exact_fp8(e, n, k, dtype=E5M2)
        offs = group_offs(layout, m, e)
        check(kernels, "scaled_grouped_mm", a, w.mT, exact_scales(m), exact_scales(e, n), offs, out_dtype)
        a, b = exact_fp8(n, m, dtype=fp8), exact_fp8(k, m, dtype=E4M3)
        check(kernels, "scaled_grouped_mm", a, b.t(), exact_scales(e, n), exact_scales(e, k), offs, out_dtype)


def test_scaled_grouped_mm_with_corrupt_offsets(kernels):
    for offs in corrupt_offs(40):
        e = offs.shape[0]
        a, w = exact_fp8(40, 24, dtype=E4M3), exact_fp8(e, 9, 24, dtype=E4M3)
        args = a, w.mT, exact_scales(40), exact_scales(e, 9), offs, torch.float32
        check(kernels, "scaled_grouped_mm", *args)


def test_scaled_grouped_mm_after_a_native_gemm(kernels):
    """A flag on the device decides whether it computes; its grid is small then, so that blocks take many tiles."""
    a, b = exact_fp8(200, 70, dtype=E4M3), exact_fp8(300, 70, dtype=E4M3)
    offs = torch.tensor([3, 50, 69], dtype=torch.int32)
    args = a, b.t(), exact_scales(3, 200), exact_scales(3, 300), offs, torch.bfloat16
    check(kernels, "scaled_grouped_mm", *args)
    todo, done = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    assert_same(kernels.scaled_grouped_mm(*args, todo), reference.scaled_grouped_mm(*args))
    assert kernels.scaled_grouped_mm(*args, done).view(torch.int16).eq(-1).all()  # the 0xFF it started with


def test_offsets_for_a_native_gemm(kernels):
    for offs in [*corrupt_offs(40), group_offs("tail_rows", 40, 4), torch.tensor([16, 32, 32], dtype=torch.int32)]:
        ends = torch.tensor([end for _, end in reference.group_bounds(offs, 40)], dtype=torch.int32)
        assert_same(kernels.prepare_offs(offs, 40, 1), torch.cat([ends, ends[-1:]]))
        rounded = ends // 16 * 16
        as_they_were = torch.tensor([torch.equal(rounded, ends)], dtype=torch.int32)
        assert_same(kernels.prepare_offs(offs, 40, 16), torch.cat([rounded, as_they_were]))


def test_zero_rows(kernels):
    out = torch.arange(60, dtype=torch.int32).view(12, 5)
    for first in (0, 7, 12):
        want = out.clone()
        want[first:] = 0
        assert_same(kernels.zero_rows(out, first), want)


def check_token_groups(kernels: SimtKernels, x: Tensor, offs: Tensor, align: int = 16) -> None:
    check(kernels, "pad_token_groups", x, offs, align)
    padded, starts, _ = reference.pad_token_groups(x, offs, align)
    check(kernels, "pad_token_groups_to", x, offs, starts, padded.shape[0])
    check(kernels, "unpad_token_groups", padded, offs, starts, x.shape[0])


@pytest.mark.parametrize("dtype", [E4M3, torch.bfloat16, torch.float32], ids=short)
def test_token_groups(kernels, dtype):
    for k in (0, 1, 3, 6, 70, 8, 560):
        x = wide(53, k).to(dtype)
        for layout in LAYOUTS:
            check_token_groups(kernels, x, group_offs(layout, 53, 5), 4)
    x = wide(70, 130).to(dtype)
    for view in (x[:, 3:40], x[::2], x[1:, 1:]):
        check_token_groups(kernels, view, group_offs("zipf", len(view), 3))


def test_token_groups_with_corrupt_places(kernels):
    x, offs = wide(40, 50), torch.tensor([10, 10, 33, 40], dtype=torch.int32)
    for starts in ([-5, 0, 3, 70], [60, 5, 5, 0], [2**31 - 1] * 4, [-(2**31)] * 4, [7, 20, 60, 63]):
        starts = torch.tensor(starts, dtype=torch.int32)
        check(kernels, "pad_token_groups_to", x, offs, starts, 64)
        check(kernels, "unpad_token_groups", x, offs, starts, 40)
    for offs in corrupt_offs(40):
        check_token_groups(kernels, x, offs)


@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_permute_pad(kernels, top_k):
    for k, dtype in ((1, torch.uint8), (3, torch.bfloat16), (70, torch.bfloat16), (64, torch.float32)):
        check(
            kernels,
            "permute_pad",
            wide(37, k).view(torch.uint8)[:, :k] if k == 1 else wide(37, k, dtype=dtype),
            slot_indices(37, top_k, 50),
            top_k,
        )


def test_permute_indices(kernels):
    for r, e in ((1, 1), (3, 5), (8, 8), (70, 3), (2, 700)):
        counts = torch.randint(-2, 9, (r, e), generator=torch.Generator().manual_seed(r))
        tokens = int(counts.clamp(min=0).sum())
        for m, empty in ((tokens, False), (tokens + 7, True), (tokens // 2, True), (0, False)):
            check(kernels, "permute_indices", counts, r, e, m, 16, empty)
            check(kernels, "permute_indices", counts.int(), r, e, m, 1, empty)
    counts = torch.tensor([2**62, -(2**62), 2**31, 5])
    check(kernels, "permute_indices", counts, 2, 2, 90, 4, False)
    check(kernels, "permute_indices", torch.tensor([2**31 - 1] * 4, dtype=torch.int32), 2, 2, 90, 4, False)


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
def test_permute_pad_quantize(kernels, dtype):
    """Aligned and not, rows beside columns and not, groups that shared memory holds and one that it does not."""
    for m, k, e in ((53, 70, 3), (200, 1048, 4), (90, 33, 5), (3000, 40, 2)):
        x, indices, offs = wide(m, k, dtype=dtype), slot_indices(m, 2, m + 40), group_offs("zipf", m + 30, e)
        for top_k in (1, 2):
            check(kernels, "permute_pad_quantize_rowwise", x, indices, top_k, E4M3)
            check(kernels, "permute_pad_quantize_rowcol", x, indices, offs, top_k, 16, E4M3)
    x, indices, offs = wide(8, 1025, dtype=dtype)[:, :1024], *(torch.tensor([i], dtype=torch.int32) for i in (3, 1))
    check(kernels, "permute_pad_quantize_rowcol", x, indices, offs, 1, 16, E4M3)
    for _, view in strided_2d(wide(50, 64, dtype=dtype)):
        check(
            kernels, "permute_pad_quantize_rowcol", view, slot_indices(50, 1, 60), group_offs("zipf", 60, 3), 1, 4, E5M2
        )


def test_invert_indices(kernels):
    """Repeated indices, those of nothing, none at all, more than a block."""
    for count, size in ((0, 0), (0, 5), (5, 0), (1, 1), (300, 200), (700, 3), (1000, 2000)):
        indices = torch.randint(-2, size + 2, (count,), dtype=torch.int32)
        want = torch.full((size,), -1, dtype=torch.int32)
        for i, index in enumerate(indices.tolist()):
            if 0 <= index < size:
                want[index] = i
        assert_same(kernels.invert_indices(indices, size), want)


def test_sort_tokens(kernels):
    """Few slots and many blocks' worth, every number of bits, few waves (1,024 experts), one expert for all."""
    for shape, e in (
        ((0,), 3),
        ((1,), 1),
        ((5, 1), 2),
        ((300, 2), 7),
        ((1500, 3), 64),
        ((700, 4), 300),
        ((999, 3), 1024),
    ):
        for dtype in (torch.int32, torch.int64):
            check(kernels, "sort_tokens", torch.randint(-1, e + 1, shape, dtype=dtype), e)
    check(kernels, "sort_tokens", torch.full((400, 8), 5, dtype=torch.int32), 8)
    check(kernels, "sort_tokens", torch.full((400, 8), -1), 8)
    check(kernels, "sort_tokens", torch.randint(0, 9, (800, 8))[::2, 3:6], 9)


def check_combine(kernels: SimtKernels, y: Tensor, inverse: Tensor, scores: Tensor | None, grad: Tensor) -> None:
    check(kernels, "combine", y, inverse, scores)
    args = inverse, scores, y.shape[0]
    check(kernels, "combine_backward", grad, None, *args)
    got, want = kernels.combine_backward(grad, y, *args), reference.combine_backward(grad, y, *args)
    assert_same(got[0], want[0])
    # Sums of K products, in any order: see check_dots in test_combine.py.
    size = reference.combine_backward(grad.abs(), y.abs(), inverse, None, y.shape[0])[1]
    unit = torch.finfo(want[1].dtype).eps
    tolerance = 1.01 * (y.shape[1] * 2.0**-24 * size + unit * want[1].float().abs())
    assert ((got[1].float() - want[1].float()).abs() <= tolerance).all()


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
def test_combine(kernels, dtype):
    """Rows of one vector, of several a block, of several blocks; misaligned ones; slots beyond one batch."""
    for t, top_k, p, k in (
        (19, 3, 40, 8),
        (7, 1, 300, 1),
        (5, 9, 45, 2056),
        (3, 2, 6, 520),
        (4, 5, 20, 67),
        (0, 2, 3, 8),
    ):
        inverse = torch.full((t * top_k,), -1, dtype=torch.int32)
        inverse[: min(p, t * top_k)] = torch.randperm(p)[: t * top_k].int()
        inverse = inverse[torch.randperm(t * top_k)].view(t, top_k)
        y, grad = torch.randn(p, k).to(dtype), torch.randn(t, k).to(dtype)
        for scores in (None, torch.rand(t, top_k), torch.rand(t, top_k).to(dtype)):
            check_combine(kernels, y, inverse, scores, grad)
        check_combine(kernels, misaligned(y), inverse, None, grad)
    for rows in ([-1, 6, 2**31 - 1, -(2**31), 3, 4], [5, 5, 5, 0, 5, 5]):
        inverse = torch.tensor(rows, dtype=torch.int32).view(3, 2)
        check_combine(kernels, torch.randn(6, 24).to(dtype), inverse, torch.rand(3, 2), torch.randn(3, 24).to(dtype))
    for t, top_k, p, k in ((3, 0, 5, 8), (3, 2, 0, 8), (3, 2, 4, 0)):
        inverse = torch.full((t, top_k), -1, dtype=torch.int32)
        check_combine(kernels, torch.randn(p, k).to(dtype), inverse, torch.rand(t, top_k), torch.randn(t, k).to(dtype))
