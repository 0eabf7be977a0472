"""Quantizers of rows taken by index equal the quantizers of permute_pad(x, indices, top_k), byte for byte."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    FP8_DTYPES,
    INPUT_DTYPES,
    LAYOUTS,
    assert_same,
    check_stream_order,
    corrupt_offs,
    group_offs,
    misaligned,
    pairs,
    short,
    slot_indices,
    strided_2d,
    wide,
)
from quantizers import ACTIVATIONS, ALIGNS, CASTS, GENERIC, RULES, caller, check_activation
from torch import Tensor

from moe_fp8_ext import ops, reference
from moe_fp8_ext.reference.numerics import FORMATS

every_format = pytest.mark.parametrize("format", FORMATS)


def check(x: Tensor, format: str, indices: Tensor, offs: Tensor, top_k: int, *args: object, **kwargs: object) -> None:
    check_activation(x, format, offs, *args, indices=indices, top_k=top_k, **kwargs)


@pytest.mark.parametrize(*pairs(rule=RULES, cast=CASTS, generic=GENERIC), ids=short)
def test_dtypes(rule, cast, generic, device):
    x, offs = wide(131, 304, dtype=cast[0], device=device), group_offs("zipf", 170, 5, device)
    for view in (x, generic(x)):
        check(view, rule[0], slot_indices(131, 2, 170, device), offs, 2, dtype=cast[1], rounding=rule[1])


@pytest.mark.parametrize(
    *pairs(
        layout=LAYOUTS,
        shape=[(1, 1, 1, 1), (37, 33, 60, 3), (500, 303, 700, 5), (300, 2880, 450, 9), (1000, 1048, 1300, 2)],
        format=list(FORMATS),
        top_k=[1, 2, 3, 8],
    ),
    ids=short,
)
def test_group_layouts(layout, shape, format, top_k, device):
    m, k, p, e = shape
    indices, offs = slot_indices(m, top_k, p, device), group_offs(layout, p, e, device)
    check(wide(m, k, device=device), format, indices, offs, top_k)


@pytest.mark.parametrize(*pairs(rule=ALIGNS, layout=LAYOUTS), ids=short)
def test_align(rule, layout, device):
    indices, offs = slot_indices(250, 1, 301, device), group_offs(layout, 301, 6, device)
    check(wide(250, 40, device=device), rule[0], indices, offs, 1, rule[1])


@every_format
@pytest.mark.parametrize("k", [1, 7, 8, 15, 16, 33, 63, 129, 257, 1025, 2048, 9001, 33000])
def test_widths(k, format, device):
    for dtype in (torch.bfloat16, torch.float32):
        x, offs = wide(23, k, dtype=dtype, device=device), group_offs("zipf", 40, 3, device)
        check(x, format, slot_indices(23, 2, 40, device), offs, 2)


@every_format
def test_one_index_of_rows_at_odd_distances(format, device):
    """One row is written, and any row may be read. So the distance between rows still decides how wide loads may be."""
    for k in (16, 1024, 2048):
        x = wide(8, k + 1, device=device)[:, :k]
        for index in (3, 4):
            indices, offs = (torch.tensor([i], dtype=torch.int32, device=device) for i in (index, 1))
            check(x, format, indices, offs, 1)


@every_format
@pytest.mark.parametrize("shape", [(0, 0, 0, 0), (0, 5, 3, 2), (5, 0, 3, 2), (5, 3, 0, 2), (5, 3, 4, 0)], ids=short)
def test_zero_sizes(shape, format, device):
    m, k, p, e = shape
    indices = torch.zeros(p, dtype=torch.int32, device=device)
    check(wide(m, k, device=device), format, indices, group_offs("uniform", p, e, device), 1)


@every_format
def test_longest_and_most_groups(format, device):
    x, indices = wide(9001, 40, device=device), slot_indices(9001, 1, 9100, device)
    check(x, format, indices, group_offs("one_giant", 9100, 3, device), 1)
    x, indices = wide(700, 24, device=device), slot_indices(700, 1, 900, device)
    check(x, format, indices, group_offs("zipf", 900, 1024, device), 1)


@pytest.mark.parametrize(*pairs(dtype=INPUT_DTYPES, format=list(FORMATS)), ids=short)
def test_strides_and_alignment(dtype, format, device):
    x, offs = wide(70, 1024, dtype=dtype, device=device), group_offs("zipf", 90, 3, device)
    indices = slot_indices(70, 2, 90, device)
    for _, view in strided_2d(x):
        check(view, format, indices, offs, 2)
    for elements in (1, 2, 4, 8):
        check(misaligned(x, elements), format, misaligned(indices), misaligned(offs), 2)


@every_format
def test_corrupt_offsets_and_indices(format, device):
    indices = torch.tensor([-1, 2**31 - 1, -(2**31), 40, 39, 0, 39, -40, 80, 7, 7, 7] * 4, dtype=torch.int32)
    for offs in corrupt_offs(48, device):
        for top_k in (1, 2):
            check(wide(40, 50, device=device), format, indices.to(device), offs, top_k)
        check(wide(40, 1024, device=device), format, indices.to(device), offs, 2)


@pytest.mark.parametrize(*pairs(fp8=FP8_DTYPES, format=list(FORMATS)), ids=short)
def test_values_that_are_not_finite(fp8, format, device):
    x = wide(60, 1030, device=device)
    x[5, 3], x[17, 700] = torch.nan, -torch.inf
    check(x, format, slot_indices(60, 1, 80, device), group_offs("tail_rows", 80, 4, device), 1, dtype=fp8)


@every_format
def test_after_an_exchange(format, device):
    """With indices of permute_indices the result equals quantizing the expert-major, padded tensor, which is never
    made."""
    counts = torch.randint(0, 30, (4, 6), generator=torch.Generator().manual_seed(0)).to(device)
    x = wide(int(counts.sum()) + 3, 1024, device=device)
    indices, offs, _ = ops.permute_indices(counts, 6, 4, len(x))
    y, source = ops.permute_pad(x, indices, 1), {"offs": offs, "indices": indices, "top_k": 1}
    for op in ACTIVATIONS:
        assert_same(getattr(ops, op)(x, format, **source), getattr(ops, op)(y, format, offs=offs), op)


# Streams


def layer(ids: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """Calls ops in turn. Each reads the output of the kernel before it, and some of the kernels start early."""
    permutation, offs, inverse = ops.sort_tokens(ids, 9)
    quantized = caller("quantize_both", "rowwise")(x, offs, permutation)
    order, _, _ = ops.sort_tokens(inverse, 900)
    y = ops.permute_pad(x, permutation, 2)
    return permutation, offs, inverse, *quantized, order, y, ops.combine(y, inverse)


def test_order_of_kernels_that_start_early(gpu):
    calls = []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 9, (4000, 2), generator=generator).int().to(gpu)
        calls.append([ids, wide(4000, 2048, device=gpu, seed=seed)])
    check_stream_order(layer, calls, overwrite=-1)
    for (ids, x), got in zip(calls, [layer(*call) for call in calls], strict=True):
        permutation, offs, inverse = reference.sort_tokens(ids, 9)
        assert_same(got[:3], (permutation, offs, inverse))
        assert_same(got[3:8], reference.quantize_both(x, "rowwise", offs=offs, indices=permutation, top_k=2))


@pytest.mark.large
@every_format
def test_more_than_2_31_elements(format, big_gpu):
    """Rows are compared in parts with quantize_rows, and columns in a narrow piece with the reference."""
    x = torch.randn(300_011, 8_192, dtype=torch.bfloat16, device=big_gpu)
    indices, offs = torch.randperm(len(x), device=big_gpu).int(), group_offs("uniform", len(x), 7, big_gpu)
    q, _, q_t, scale_t, _ = ops.quantize_both(x, format, offs=offs, indices=indices, top_k=1)
    for part in (slice(0, 500), slice(-500, None)):
        assert_same(q[part].clone(), ops.quantize_rows(x[indices[part].long()], format)[0])
    narrow = x[:, -128:][indices.long()].contiguous()
    want_q_t, want_scale_t, _ = reference.quantize_tokens(narrow, format, offs=offs)
    assert_same(q_t[-128:].clone(), want_q_t)
    if format == "rowwise":
        assert_same(scale_t[:, -128:].contiguous(), want_scale_t)
    elif format != "mxfp8":
        assert_same(scale_t[-128:].contiguous(), want_scale_t.contiguous())
