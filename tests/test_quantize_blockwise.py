"""The operands of the blockwise recipe: quantize_1x128, quantize_128x1, quantize_1x128_128x1, quantize_128x128."""

from __future__ import annotations

import pytest
import torch
from grouped_quantizer import GroupedQuantizerTests
from helpers import (
    CORRECTNESS_MKE,
    FP8_DTYPES,
    INPUT_DTYPES,
    LAYOUTS,
    assert_same,
    check_compiled,
    check_cuda_graph,
    check_deterministic,
    check_error,
    check_opcheck,
    check_second_gpu,
    check_stream_order,
    check_two_streams,
    flushed_subnormals,
    group_offs,
    misaligned,
    on,
    short,
    strided_2d,
    wide,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_fp8_ext import (
    permute_pad_quantize_1x128,
    quantize_1x128,
    quantize_1x128_128x1,
    quantize_128x1,
    quantize_128x128,
    reference,
)


def check_gaps(scale: Tensor) -> None:
    """What lies between the columns of a column-major scale is zero."""
    rows, columns = scale.shape
    assert scale.stride() == (1, -(-rows // 4) * 4)
    assert not scale.as_strided((scale.stride(1), columns), scale.stride())[rows:].any()


class ColumnTests(GroupedQuantizerTests):
    """What differs from one scale a group and column: blocks, and outputs that may stay as they lie."""

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("align", [1, 8, 16, 128, 256])
    def test_in_place(self, align, layout, device):
        for m, k, e in ((0, 3, 2), (131, 67, 3), (300, 272, 5), (1000, 128, 2)):
            self.check(wide(m, k, device=device), group_offs(layout, m, e, device), align, None, False, False)

    @pytest.mark.parametrize("fp8", FP8_DTYPES, ids=short)
    @pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
    def test_in_place_formats(self, dtype, fp8, device):
        for k in (67, 136):
            x = wide(140, k, dtype=dtype, device=device)
            self.check(x, group_offs("zipf", 140, 3, device), 16, fp8, True, False)

    def test_block_sizes(self, device):
        sizes = torch.tensor([127, 128, 129, 0, 255, 256, 257, 1], device=device)
        x = wide(int(sizes.sum()) + 5, 136, device=device)
        for align in (1, 32, 128, 256):
            self.check(x, sizes.cumsum(0).int(), align)

    def test_non_finite_poisons_its_block_only(self, device):
        x, offs = wide(600, 40, device=device), torch.tensor([300, 500], dtype=torch.int32, device=device)
        clean = reference.quantize_128x1(x, offs)
        x[130, 3], x[299, 5], x[550, 8] = float("nan"), float("-inf"), float("inf")
        for fp8 in FP8_DTYPES:
            self.check(x, offs, 128, fp8)
            self.check(x, offs, 128, fp8, True, False)
        q_t, scale_t, _ = self.fn(x, offs)[-3:]
        assert scale_t.isnan().nonzero().tolist() == [[3, 1], [5, 2]]
        kept = [k for k in range(40) if k not in (3, 5)]
        assert_same((q_t[kept], scale_t[kept].contiguous()), (clean[0][kept], clean[1][kept].contiguous()))

    test_non_finite_poisons_its_group_and_column_only = None

    def test_memory_between_scales_is_zero(self, device):
        for k in (133, 136):
            x, offs = wide(130, k, device=device), group_offs("zipf", 130, 3, device)
            for transpose in (True, False):
                *rows, scale_t, _ = self.fn(x, offs, 128, None, False, transpose)
                check_gaps(scale_t if transpose else scale_t.t())
                if len(rows) == 3:
                    check_gaps(rows[1])

    @pytest.mark.large
    def test_more_than_2_31_elements(self, big_gpu):
        m, k, e = 524_400, 4_104, 7
        x = torch.randn(m, k, dtype=torch.bfloat16, device=big_gpu)
        assert x.numel() > 2**31
        offs = group_offs("uniform", m, e, big_gpu)
        got = self.fn(x, offs)
        for columns in (slice(0, 128), slice(4_096, None)):
            q_t, scale_t, padded_offs = reference.quantize_128x1(x[:, columns].contiguous(), offs)
            assert_same((got[-3][columns], got[-1]), (q_t, padded_offs), f"columns {columns}")
            assert torch.equal(got[-2][columns], scale_t)
        if len(got) == 5:
            rows = slice(m - 1000, m)
            q, scale = reference.quantize_1x128(x[rows])
            assert_same(got[0][rows], q)
            assert torch.equal(got[1][rows], scale)


class TestQuantize128x1(ColumnTests):
    op = "quantize_128x1"


class TestQuantize1x128And128x1(ColumnTests):
    op = "quantize_1x128_128x1"


@pytest.mark.parametrize("m", [1, 2, 31, 33, 130])
def test_memory_between_scales_of_rows_is_zero(m, device):
    for k in (133, 264):
        check_gaps(quantize_1x128(wide(m, k, device=device))[1])
        indices = torch.arange(m, dtype=torch.int32, device=device)
        check_gaps(permute_pad_quantize_1x128(wide(m, k, device=device), indices)[1])


def test_both_equal_the_two_single_ops(device):
    x, offs = wide(500, 200, device=device), group_offs("tail_rows", 500, 6, device)
    for transpose in (True, False):
        want = *quantize_1x128(x), *quantize_128x1(x, offs, 32, None, False, transpose)
        assert_same(quantize_1x128_128x1(x, offs, 32, None, False, transpose), want)


def test_columns_are_1x128_of_each_transposed_group(device):
    x, offs = wide(300, 40, device=device), torch.tensor([130, 300], dtype=torch.int32, device=device)
    q_t, scale_t, padded_offs = quantize_128x1(x, offs)
    assert padded_offs.tolist() == [256, 512]
    for start, end, at in ((0, 130, 0), (130, 300, 256)):
        q, scale = quantize_1x128(x[start:end].t().contiguous())
        assert_same(q_t[:, at : at + end - start].contiguous(), q)
        assert torch.equal(scale_t[:, at // 128 : at // 128 + 2], scale)


def check_rows(x: Tensor, *args: object) -> None:
    got, want = quantize_1x128(x, *args), reference.quantize_1x128(x, *args)
    assert_same(got, want, f"{short(x.dtype)} {short(x.shape)}")


def check_squares(w: Tensor, *args: object) -> None:
    got, want = quantize_128x128(w, *args), reference.quantize_128x128(w, *args)
    assert_same(got, want, f"{short(w.dtype)} {short(w.shape)}")


@pytest.mark.parametrize("pow2_scale", [False, True])
@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=short)
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
def test_formats(dtype, fp8, pow2_scale, device):
    for k in (301, 304):
        check_rows(wide(67, k, dtype=dtype, device=device), fp8, pow2_scale)
        check_squares(wide(2, 131, k, dtype=dtype, device=device), fp8, pow2_scale)


@pytest.mark.parametrize("shape", [s[:2] for s in CORRECTNESS_MKE] + [(0, 0), (0, 5), (5, 0), (3, 1)], ids=short)
def test_sizes_of_rows(shape, device):
    check_rows(wide(*shape, device=device))


@pytest.mark.parametrize("k", [1, 7, 8, 15, 16, 63, 64, 65, 127, 128, 129, 255, 256, 257, 2880, 9001])
def test_widths(k, device):
    check_rows(wide(37, k, device=device))
    check_rows(wide(37, k, dtype=torch.float32, device=device))
    check_squares(wide(2, 37, k, device=device))


@pytest.mark.parametrize(
    "shape",
    [(0, 4, 4), (2, 0, 5), (2, 5, 0), (0, 0, 0), (1, 1, 1), (3, 128, 128), (2, 129, 257), (1024, 3, 5), (2, 2880, 24)],
    ids=short,
)
def test_sizes_of_experts(shape, device):
    check_squares(wide(*shape, device=device))


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
def test_strides_and_alignment(dtype, device):
    x = wide(70, 256, dtype=dtype, device=device)
    for _, view in strided_2d(x):
        check_rows(view)
        check_squares(view[None])
    for elements in range(1, 9):
        check_rows(misaligned(x, elements))
        check_squares(misaligned(x[None], elements))
    w = wide(3, 150, 272, dtype=dtype, device=device)
    for view in (w[:, ::2], w[::2, 3:, 8:], w.transpose(0, 1), w[:1].expand(4, 150, 272), w[:, :1].expand(3, 7, 272)):
        check_squares(view)


def test_non_finite_poisons_its_block_only(device):
    x = wide(9, 300, device=device)
    clean_q, clean_scale = reference.quantize_1x128(x)
    x[1, 5], x[4, 290] = float("nan"), float("-inf")
    for fp8 in FP8_DTYPES:
        check_rows(x, fp8)
        check_squares(x[None], fp8, True)
    q, scale = quantize_1x128(x)
    assert scale.isnan().nonzero().tolist() == [[1, 0], [4, 2]]
    assert_same(q[:, 128:256].contiguous(), clean_q[:, 128:256].contiguous())
    assert torch.equal(scale[:, 1], clean_scale[:, 1])


@given(
    shape=st.tuples(st.integers(0, 3), st.integers(0, 300), st.integers(0, 300)),
    dtype=st.sampled_from(INPUT_DTYPES),
    fp8=st.sampled_from(FP8_DTYPES),
    pow2_scale=st.booleans(),
)
def test_any_shape(shape, dtype, fp8, pow2_scale, device):
    w = wide(*shape, dtype=dtype, device=device)
    check_squares(w, fp8, pow2_scale)
    check_rows(w.flatten(0, 1), fp8, pow2_scale)


@given(
    m=st.integers(0, 400),
    k=st.integers(0, 150),
    offs=st.lists(st.one_of(st.integers(0, 400), st.integers(-(2**31), 2**31 - 1)), max_size=9),
    sort=st.booleans(),
    align=st.sampled_from([1, 4, 16, 64, 128, 256]),
    dtype=st.sampled_from(INPUT_DTYPES),
    transpose=st.booleans(),
)
def test_any_groups(m, k, offs, sort, align, dtype, transpose, device):
    x = wide(m, k, dtype=dtype, device=device)
    offs = torch.tensor(sorted(offs) if sort else offs, dtype=torch.int32, device=device)
    args = x, offs, align, torch.float8_e4m3fn, False, transpose
    assert_same(quantize_1x128_128x1(*args), reference.quantize_1x128_128x1(*args))


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
def test_flushed_subnormals_change_nothing(dtype):
    x = torch.tensor([[2.0**-16, -(2.0**-20), 2.0**-24, 1e-40, 0.0]]).to(dtype)
    want = *reference.quantize_1x128(x), *reference.quantize_128x128(x[None])
    with flushed_subnormals():
        got = *quantize_1x128(x), *quantize_128x128(x[None])
    assert_same(got, want)


@pytest.mark.large
def test_more_than_2_31_elements(big_gpu):
    w = torch.randn(9, 16_400, 16_384, dtype=torch.bfloat16, device=big_gpu)
    assert w.numel() > 2**31
    got = quantize_128x128(w)
    for e in (0, 8):
        assert_same([t[e : e + 1] for t in got], reference.quantize_128x128(w[e : e + 1]), f"expert {e}")
    q, scale = quantize_1x128(w.view(-1, 16_384))
    rows = slice(9 * 16_400 - 3000, None)
    want_q, want_scale = reference.quantize_1x128(w.view(-1, 16_384)[rows])
    assert_same(q[rows], want_q)
    assert torch.equal(scale[rows], want_scale)


SINGLE = {quantize_1x128: (300, 512), quantize_128x128: (3, 300, 512)}


@pytest.mark.parametrize("fn", SINGLE)
def test_house_keeping(fn, device):
    shape = SINGLE[fn]
    check_opcheck(fn.__name__, [wide(*shape, device=device), torch.float8_e5m2, True])
    check_deterministic(fn, [wide(*shape, device=device)])
    check_compiled(fn, [[wide(n, *shape[1:-1], 48, device=device)] for n in (2, 64, 131)], device)
    with torch.autocast(device, dtype=torch.bfloat16):
        x = wide(*shape, dtype=torch.float32, device=device)
        assert_same(fn(x), getattr(reference, fn.__name__)(x))


@pytest.mark.parametrize("fn", SINGLE)
def test_streams_and_graphs(fn, gpu):
    calls = [[wide(*SINGLE[fn], device=gpu, seed=seed)] for seed in range(4)]
    check_cuda_graph(fn, *calls[:2])
    check_two_streams(fn, calls[:2])
    check_stream_order(fn, calls)


@pytest.mark.parametrize("fn", SINGLE)
def test_second_gpu(fn, second_gpu):
    check_second_gpu(fn, [wide(*SINGLE[fn])], second_gpu)


@pytest.mark.parametrize(
    ("op", "args", "argument", "got"),
    [
        ("quantize_1x128", [torch.zeros(3, 4, dtype=torch.float64)], "x", "float64"),
        ("quantize_1x128", [torch.zeros(4)], "x", "1"),
        ("quantize_1x128", [torch.zeros(3, 8)[:, ::2]], "x", "stride 2"),
        ("quantize_1x128", [torch.zeros(3, 4), torch.uint8], "dtype", "uint8"),
        ("quantize_128x128", [torch.zeros(3, 4)], "w", "2"),
        ("quantize_128x128", [torch.zeros(2, 3, 4, dtype=torch.int8)], "w", "int8"),
        ("quantize_128x128", [torch.zeros(2, 3, 4).mT], "w", "stride 4"),
        ("quantize_128x128", [torch.zeros(1025, 1, 1)], "w", "1025"),
        ("quantize_128x128", [torch.empty(0, 2**38, 128)], "w", "274877906944"),
        ("quantize_128x128", [torch.zeros(2, 3, 4), torch.float16], "dtype", "float16"),
    ],
)
def test_errors(op, args, argument, got, device):
    check_error(op, on(device, args), argument, got)


@pytest.mark.parametrize("fn", SINGLE)
def test_gradient_is_not_lost_silently(fn, device):
    x = torch.zeros(SINGLE[fn], device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match=f"^{fn.__name__}: . must not ask for a gradient.*got"):
        fn(x)
    with torch.no_grad():
        fn(x)
