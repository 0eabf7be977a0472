"""quantize_rowcol: quantize_rowwise and quantize_colwise of the same tensor in one op."""

from __future__ import annotations

import torch
from grouped_quantizer import GroupedQuantizerTests
from helpers import FP8_DTYPES, INPUT_DTYPES, assert_same, group_offs, wide
from hypothesis import given
from hypothesis import strategies as st

from moe_fp8_ext import quantize_colwise, quantize_rowcol, quantize_rowwise, reference


class TestQuantizeRowcol(GroupedQuantizerTests):
    op = "quantize_rowcol"


@given(
    m=st.integers(0, 150),
    k=st.integers(0, 80),
    offs=st.lists(st.one_of(st.integers(0, 150), st.integers(-(2**31), 2**31 - 1)), max_size=9),
    sort=st.booleans(),
    align=st.sampled_from([1, 4, 16, 64, 256]),
    dtype=st.sampled_from(INPUT_DTYPES),
    fp8=st.sampled_from(FP8_DTYPES),
    pow2_scale=st.booleans(),
)
def test_any_groups(m, k, offs, sort, align, dtype, fp8, pow2_scale, device):
    x = wide(m, k, dtype=dtype, device=device)
    offs = torch.tensor(sorted(offs) if sort else offs, dtype=torch.int32, device=device)
    args = x, offs, align, fp8, pow2_scale
    assert_same(quantize_rowcol(*args), reference.quantize_rowcol(*args))


def test_equals_the_two_single_ops(device):
    x, offs = wide(500, 200, device=device), group_offs("tail_rows", 500, 6, device)
    want = *quantize_rowwise(x), *quantize_colwise(x, offs, 32)
    assert_same(quantize_rowcol(x, offs, 32), want)


def test_non_finite_poisons_its_row_and_leaves_other_rows(device):
    x, offs = wide(60, 30, device=device), group_offs("tail_rows", 60, 3, device)
    clean_q, clean_scale = reference.quantize_rowwise(x)
    tail = int(offs[-1])
    x[7, 3], x[tail + 1, 5] = float("nan"), float("inf")
    q, scale, *_ = quantize_rowcol(x, offs)
    assert scale.isnan().nonzero().flatten().tolist() == [7, tail + 1]
    kept = [row for row in range(60) if row not in (7, tail + 1)]
    assert_same((q[kept], scale[kept]), (clean_q[kept], clean_scale[kept]))
