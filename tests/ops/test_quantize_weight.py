"""quantize_weight in every format: both directions of every expert, byte equality with the reference."""

from __future__ import annotations

import pytest
import torch
from helpers import FP8_DTYPES, INPUT_DTYPES, assert_same, misaligned, pairs, short, strided_2d, wide
from hypothesis import given
from hypothesis import strategies as st
from quantizers import CASTS, GENERIC, RULES, check_weight, count_nans, line_blocks

from moe_fp8_ext import ops, reference
from moe_fp8_ext.reference.numerics import FORMATS

every_format = pytest.mark.parametrize("format", FORMATS)


@pytest.mark.parametrize(*pairs(rule=RULES, cast=CASTS, generic=GENERIC), ids=short)
def test_dtypes(rule, cast, generic, device):
    w = wide(2, 131, 304, dtype=cast[0], device=device)
    for view in (w, generic(w)):
        check_weight(view, rule[0], dtype=cast[1], rounding=rule[1])


@every_format
@pytest.mark.parametrize(
    "shape",
    [
        *[(0, 4, 4), (2, 0, 5), (2, 5, 0), (0, 0, 0), (1, 1, 1), (3, 1, 40), (3, 40, 1), (5, 33, 31), (4, 64, 64)],
        *[(3, 128, 128), (2, 129, 257), (2, 1408, 200), (1, 200, 1408), (1, 576, 303), (1024, 3, 5), (2, 2880, 24)],
        *[(3, 50, 2048), (2, 33, 15000), (2, 37, 9001)],
    ],
    ids=short,
)
def test_sizes(shape, format, device):
    check_weight(wide(*shape, device=device), format)


@every_format
def test_widths(format, device):
    for k in (1, 7, 8, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257):
        check_weight(wide(2, 37, k, device=device), format)


@pytest.mark.parametrize(*pairs(dtype=INPUT_DTYPES, format=list(FORMATS)), ids=short)
def test_strides_and_alignment(dtype, format, device):
    w = wide(3, 150, 272, dtype=dtype, device=device)
    views = [w[:, ::2], w[::2, 3:, 8:], w[::2, 3:, 5:], w.transpose(0, 1), w[:1].expand(4, 150, 272)]
    for view in (*views, w[:, :1].expand(3, 7, 272), *(view[None] for _, view in strided_2d(w[0]))):
        check_weight(view, format)
    for elements in range(1, 9):
        check_weight(misaligned(w, elements), format)


@given(
    shape=st.tuples(st.integers(0, 5), st.integers(0, 300), st.integers(0, 300)),
    rule=st.sampled_from(RULES),
    cast=st.sampled_from(CASTS),
)
def test_any_shape(shape, rule, cast, device):
    check_weight(wide(*shape, dtype=cast[0], device=device), rule[0], dtype=cast[1], rounding=rule[1])


@pytest.mark.parametrize("format", ["rowwise", "mxfp8_rowmajor"])
def test_is_rows_of_the_weight_and_of_its_transpose(format, device):
    w = wide(2, 24, 40, device=device)
    got = ops.quantize_weight(w, format)
    for e in range(2):
        assert_same([t[e] for t in got[:2]], ops.quantize_rows(w[e], format))
        assert_same([t[e] for t in got[2:]], ops.quantize_rows(w[e].t().contiguous(), format))


def test_squares_share_their_scale_in_both_directions(device):
    q, scale, q_t, scale_t = ops.quantize_weight(wide(2, 200, 300, device=device), "blockwise")
    assert_same(q_t, q.view(torch.uint8).mT.contiguous().view(q.dtype))
    assert_same(scale_t, scale.mT.contiguous())


def test_blocked_scales_are_swizzled_row_major_ones(device):
    w = wide(3, 70, 200, device=device)
    q, scale, q_t, scale_t = ops.quantize_weight(w, "mxfp8_rowmajor")
    blocked, blocked_t = (ops.swizzle_scales(s, groups="experts")[0] for s in (scale, scale_t))
    assert_same(ops.quantize_weight(w, "mxfp8"), (q, blocked, q_t, blocked_t))


@every_format
@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=short)
def test_what_is_not_finite_poisons_its_blocks_only(fp8, format, device):
    clean, f = wide(3, 200, 300, device=device), FORMATS[format]
    w = clean.clone()
    w[1, 7, 131] = torch.inf
    check_weight(w, format, dtype=fp8)
    q, scale, q_t, scale_t = ops.quantize_weight(w, format, dtype=fp8)
    want = reference.quantize_weight(clean, format, dtype=fp8)
    assert count_nans(scale) == count_nans(scale_t) == 1
    for got, wanted, row, column in ((q, want[0], 7, 131), (q_t, want[2], 131, 7)):
        poisoned = torch.zeros(got.shape, dtype=torch.bool, device=device)
        [block] = [b for b in line_blocks(f, got.shape[2]) if b.start <= column < b.stop]
        first = row // f.weight_rows * f.weight_rows
        poisoned[1, first : first + f.weight_rows, block] = True
        assert torch.equal(got.float().isnan(), poisoned)
        assert torch.equal(got.view(torch.uint8)[~poisoned], wanted.view(torch.uint8)[~poisoned])


@pytest.mark.large
@every_format
def test_more_than_2_31_elements(format, big_gpu):
    w = torch.randn(9, 16_400, 16_384, dtype=torch.bfloat16, device=big_gpu)
    assert w.numel() > 2**31
    got = ops.quantize_weight(w, format)
    for e in range(9):
        assert_same([t[e : e + 1] for t in got], reference.quantize_weight(w[e : e + 1], format), f"expert {e}")
