"""The kernels that move tokens without a GPU, see test_simt.py."""

from __future__ import annotations

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
    inverse_of,
    misaligned,
    pairs,
    short,
    slot_indices,
    wide,
)
from simt_checks import ON_LINUX, WAVES
from simt_kernels import SimtKernels, Waves
from torch import Tensor

from moe_fp8_ext import reference
from moe_fp8_ext.reference.numerics import FORMATS

pytestmark = ON_LINUX


def test_default_format(libraries):
    assert SimtKernels(libraries[64]).native_fnuz()  # the chip is gfx942
    assert not SimtKernels(libraries[32]).native_fnuz()


def check_token_groups(kernels: Waves, x: Tensor, offs: Tensor, align: int = 16) -> None:
    kernels.check("pad_token_groups", x, offs, align)
    padded, starts, _ = reference.pad_token_groups(x, offs, align)
    kernels.check("pad_token_groups_to", x, offs, starts, padded.shape[0])
    kernels.check("unpad_token_groups", padded, offs, starts, x.shape[0])


@pytest.mark.parametrize("dtype", [FP8_DTYPES[0], torch.bfloat16, torch.float32], ids=short)
def test_token_groups(kernels, dtype):
    for k in (0, 1, 3, 6, 70, 8, 560):
        x = wide(53, k).to(dtype)
        for layout in LAYOUTS if k == 70 else ("zipf",):
            check_token_groups(kernels, x, group_offs(layout, 53, 5), 4)
    x = wide(70, 130).to(dtype)
    for view in (x[:, 3:40], x[::2], x[1:, 1:]):
        check_token_groups(kernels, view, group_offs("zipf", len(view), 3))


def test_token_groups_with_corrupt_places(kernels):
    x, offs = wide(40, 50), torch.tensor([10, 10, 33, 40], dtype=torch.int32)
    for starts in ([-5, 0, 3, 70], [60, 5, 5, 0], [2**31 - 1] * 4, [-(2**31)] * 4, [7, 20, 60, 63]):
        starts = torch.tensor(starts, dtype=torch.int32)
        kernels.check("pad_token_groups_to", x, offs, starts, 64)
        kernels.check("unpad_token_groups", x, offs, starts, 40)
    for offs in corrupt_offs(40):
        check_token_groups(kernels, x, offs)


@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_permute_pad(kernels, top_k):
    for k, dtype in ((1, torch.uint8), (3, torch.bfloat16), (70, torch.bfloat16), (64, torch.float32)):
        x = torch.randint(0, 256, (37, k), dtype=torch.uint8) if dtype == torch.uint8 else wide(37, k, dtype=dtype)
        kernels.check("permute_pad", x, slot_indices(37, top_k, 50), top_k)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_pack_tokens(kernels, top_k):
    """Columns have every access width, aligned or not, and may be transposed. Ids have both dtypes. Long columns are
    split."""
    indices = slot_indices(37, top_k, 300)
    for k, n, dtype in ((700, 8, torch.int64), (5, 3, torch.int32), (0, 1, torch.int64), (272, 4, torch.int32)):
        x = torch.randint(0, 256, (37, k), dtype=torch.uint8)
        scale, ids, scores = torch.randn(37, 6), torch.randint(-2, 12, (37, n), dtype=dtype), torch.randn(37, n)
        for of_x in (x, wide(37, k), torch.randn(37, k)):
            for of_scale in (None, scale, scale[:, 0], scale.t().contiguous().t(), scale.byte().t().contiguous().t()):
                kernels.check("pack_tokens", of_x, ids, scores, of_scale, indices, top_k, 9)
        kernels.check("pack_tokens", x, None, scores.half(), scale.bfloat16().t().contiguous().t(), indices, top_k, 0)
        kernels.check("pack_tokens", x, None, None, None, indices, top_k, 0)
        kernels.check("pack_tokens", x[:, k // 3 :], ids[:, :1], None, None, indices[:0], top_k, 9)


@pytest.mark.parametrize(
    *pairs(
        format=list(FORMATS),
        k=[16, 32, 80, 272, 1040, 4112],
        top_k=[0, 1, 3, 70, 256],
        e5m2=[False, True],
        rounding=[0, 1],
        n=[0, 3, 8],
    ),
    ids=short,
)
def test_quantize_and_pack(kernels, format, k, top_k, e5m2, rounding, n):
    """A row takes one wave or several rounds. A token may have more slots than a wave has lanes, or slots without a
    row."""
    x, ids, scores = wide(37, k), torch.randint(-2, 12, (37, n)), torch.randn(37, n)
    indices = slot_indices(37, top_k, 110)
    others = torch.randint(-3, 115, (37, top_k), dtype=torch.int32)
    inverse = torch.where(others % 4 == 0, others, inverse_of(indices, 37, top_k))
    for each in kernels:
        dtype = [t for t in FP8_DTYPES if short(t).endswith("fnuz") == each.native_fnuz()][e5m2]
        how = {"dtype": dtype, "rounding": FORMATS[format].roundings[rounding]}
        for of_token in ((ids, scores), (ids.int(), None), (None, None)):
            args = x, *of_token, format, indices, inverse, 9
            want = reference.quantize_and_pack(*args, **how)
            assert_same(each.run("quantize_and_pack", (want,), *args, **how)[0], want, f"at wave size {each.wave}")


def test_permute_indices(kernels):
    for r, e in ((1, 1), (3, 5), (8, 8), (70, 3), (2, 700)):
        counts = torch.randint(-2, 9, (r, e), generator=torch.Generator().manual_seed(r))
        tokens = int(counts.clamp(min=0).sum())
        for m, empty in ((tokens, False), (tokens + 7, True), (tokens // 2, True), (0, False)):
            kernels.check("permute_indices", counts, e, r, m, 16, empty)
            kernels.check("permute_indices", counts.int(), e, r, m, 1, empty)
    counts = torch.tensor([2**62, -(2**62), 2**31, 5])
    kernels.check("permute_indices", counts, 2, 2, 90, 4, False)
    kernels.check("permute_indices", torch.tensor([2**31 - 1] * 4, dtype=torch.int32), 2, 2, 90, 4, False)


def test_invert_indices(kernels):
    """Indices repeat, name no slot, are absent, or exceed one block."""
    for count, size in ((0, 0), (0, 5), (5, 0), (1, 1), (300, 200), (700, 3), (1000, 2000)):
        indices = torch.randint(-2, size + 2, (count,), dtype=torch.int32)
        want = torch.full((size,), -1, dtype=torch.int32)
        for i, index in enumerate(indices.tolist()):
            if 0 <= index < size:
                want[index] = i
        for each in kernels:
            assert_same(each.invert_indices(indices, size), want)


def test_sort_tokens(kernels):
    """There are few slots or slots for many blocks, every number of bits, few waves (1,024 experts), or one expert for
    all."""
    sizes = ((0,), 3), ((1,), 1), ((5, 1), 2), ((300, 2), 7), ((1500, 3), 64), ((700, 4), 300), ((999, 3), 1024)
    for shape, e in sizes:
        for dtype in (torch.int32, torch.int64):
            kernels.check("sort_tokens", torch.randint(-1, e + 1, shape, dtype=dtype), e)
    kernels.check("sort_tokens", torch.full((400, 8), 5, dtype=torch.int32), 8)
    kernels.check("sort_tokens", torch.full((400, 8), -1), 8)
    kernels.check("sort_tokens", torch.randint(0, 9, (800, 8))[::2, 3:6], 9)


@pytest.mark.parametrize("wave", WAVES)
def test_sort_tokens_on_more_multiprocessors(wave, libraries, tmp_path, monkeypatch):
    monkeypatch.setenv("SIMT_MULTIPROCESSORS", "7")  # read once per library, so the library is copied
    kernels = Waves(Path(shutil.copy(libraries[wave], tmp_path)))
    kernels.check("sort_tokens", torch.randint(-1, 40, (9000,)), 39)


def test_tokens_by_rank(kernels):
    """There are no tokens or no choices, ranks that divide a block or not, more ranks than a block's threads, or many
    blocks."""
    sizes = (
        (0, 3, 4, 2),
        (5, 0, 4, 2),
        (1, 1, 1, 1),
        (700, 8, 64, 2),
        (5000, 3, 60, 3),
        (90, 6, 2048, 64),
        (9, 4, 900, 300),
    )
    for t, top_k, e, ranks in sizes:
        for dtype in (torch.int32, torch.int64):
            kernels.check("tokens_by_rank", torch.randint(-2, e + 2, (t, top_k), dtype=dtype), e, ranks)
    for extreme in (torch.iinfo(torch.int64).min, 2**32, 2**63 - 1):
        kernels.check("tokens_by_rank", torch.tensor([[extreme, 1], [extreme, extreme]]), 4, 4)
    kernels.check("tokens_by_rank", torch.randint(0, 9, (800, 8))[::2, 3:6], 9, 3)


def check_combine(kernels: Waves, y: Tensor, inverse: Tensor, scores: Tensor | None, grad: Tensor) -> None:
    kernels.check("combine", y, inverse, scores)
    args = scores, inverse, y.shape[0]
    kernels.check("combine_backward", grad, None, *args)
    kernels.check("combine_backward", grad, None, *args, keep_grad_y=False)  # nothing is wanted
    want = reference.combine_backward(grad, y, *args)
    # These are sums of K products, in any order: see check_dots in test_combine.py.
    size = reference.combine_backward(grad.abs(), y.abs(), None, inverse, y.shape[0])[1]
    of_scores = reference.combine_backward(grad, y, *args, keep_grad_y=False)
    size_of_scores = reference.combine_backward(grad.abs(), y.abs(), None, *args[1:], keep_grad_y=False)[1]
    unit = torch.finfo(want[1].dtype).eps
    tolerance = 1.01 * (y.shape[1] * 2.0**-24 * size + unit * want[1].float().abs())
    tolerance_of_scores = 1.01 * (y.shape[1] * 2.0**-24 * size_of_scores + unit * of_scores[1].float().abs())
    for each in kernels:
        got = each.run("combine_backward", want, grad, y, *args)
        assert_same(got[0], want[0])
        assert ((got[1].float() - want[1].float()).abs() <= tolerance).all()
        alone = each.run("combine_backward", of_scores, grad, y, *args, keep_grad_y=False)[1]
        assert ((alone.float() - of_scores[1].float()).abs() <= tolerance_of_scores).all()
        assert_same(*(torch.where(want[1] == 0, 0, scores) for scores in (alone, got[1])))  # of rows of one slot


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
def test_combine(kernels, dtype):
    """A row has one vector, fills part of a block, needs several blocks, or several rounds. Rows may be misaligned, and
    slots may exceed one batch."""
    sizes = (19, 3, 40, 8), (7, 1, 300, 1), (5, 9, 45, 2056), (3, 2, 6, 520), (4, 5, 20, 67), (0, 2, 3, 8)
    sizes += ((131, 9, 1300, 8),)
    for t, top_k, p, k in sizes:
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


@pytest.mark.parametrize("format", FORMATS)
def test_permute_quantized(kernels, format):
    """Scales are grouped or not, exceed a block's threads in rows and columns, and may have odd addresses. Rows consist
    of whole vectors, which the same blocks move in pieces or whole, or are misaligned."""
    sizes = [(37, 70, 50, 3), (5, 0, 9, 1), (40, 130, 0, 2), (300, 400, 600, 2)]
    sizes += [(7, 9232, 5, 1), (3, 4816, 200, 1), (9, 4500, 20, 2)]  # blocks of 256 threads, and of 192
    for m, k, p, top_k in sizes:
        q, scale = reference.quantize_rows(wide(m, k), format)
        indices = slot_indices(m, top_k, p)
        for offs in (None, group_offs("tail_rows", p, 5), *corrupt_offs(p)[:2]):
            kernels.check("permute_quantized", q, scale, format, indices, top_k, offs=offs)
        kernels.check("permute_quantized", misaligned(q), scale, format, indices, top_k)
    if scale.element_size() == 1:
        kernels.check("permute_quantized", q, misaligned(scale), format, indices, top_k)
    elif FORMATS[format].order == "column_major":  # whole rows as messages have them, and odd addresses
        for room in (0, 1, 4):
            view = torch.nn.functional.pad(scale, (room, 0))[:, room:]
            kernels.check("permute_quantized", q, view, format, indices, top_k)
