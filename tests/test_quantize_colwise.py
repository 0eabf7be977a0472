"""quantize_colwise: one scaling block per group and column, transposed and group-padded output."""

from __future__ import annotations

import torch
from grouped_quantizer import GroupedQuantizerTests
from helpers import FP8_DTYPES, INPUT_DTYPES, assert_same, group_offs, wide
from hypothesis import given
from hypothesis import strategies as st

from moe_fp8_ext import quantize_colwise, reference, shapes


class TestQuantizeColwise(GroupedQuantizerTests):
    op = "quantize_colwise"


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
    assert_same(quantize_colwise(*args), reference.quantize_colwise(*args))


def test_is_rowwise_of_each_transposed_group(device):
    x, offs = wide(100, 40, device=device), group_offs("zipf", 100, 4, device)
    q_t, scale_t, padded_offs = quantize_colwise(x, offs)
    start = 0
    for e, (end, padded_end) in enumerate(zip(offs.tolist(), padded_offs.tolist(), strict=True)):
        q, scale = reference.quantize_rowwise(x[start:end].t())
        at = padded_end - shapes.round_up(end - start, 16)
        assert_same((q_t[:, at : at + end - start].contiguous(), scale_t[e]), (q, scale), f"group {e}")
        start = end
