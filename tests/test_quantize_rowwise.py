"""quantize_rowwise: one scaling block per row, any number of leading dimensions."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    CORRECTNESS_MKE,
    FP8_DTYPES,
    INPUT_DTYPES,
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
    misaligned,
    on,
    short,
    strided_2d,
    wide,
)
from hypothesis import given
from hypothesis import strategies as st

from moe_fp8_ext import quantize_rowwise, reference


def check(x: torch.Tensor, *args: object) -> None:
    assert_same(quantize_rowwise(x, *args), reference.quantize_rowwise(x, *args), f"{short(x.dtype)} {short(x.shape)}")


@pytest.mark.parametrize("pow2_scale", [False, True])
@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=short)
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
def test_formats(dtype, fp8, pow2_scale, device):
    check(wide(67, 301, dtype=dtype, device=device), fp8, pow2_scale)


@pytest.mark.parametrize("shape", [s[:2] for s in CORRECTNESS_MKE], ids=short)
def test_shapes_of_the_bench(shape, device):
    check(wide(*shape, device=device))


@pytest.mark.parametrize(
    "shape",
    [
        (0,),
        (1,),
        (17,),
        (0, 0),
        (0, 5),
        (5, 0),
        (3, 1),
        (2, 0, 8),
        (2, 3, 40),
        (2, 1, 3, 16),
        (1, 2, 1, 2, 1, 2, 9),
        (4, 33, 129),
        (2, 20001),
    ],
    ids=short,
)
def test_ranks_and_sizes(shape, device):
    check(wide(*shape, device=device))


@pytest.mark.parametrize("k", [*range(1, 36), 63, 64, 65, 127, 255, 257, 511, 513, 1023, 1025, 4095, 8191, 8193])
def test_row_lengths(k, device):
    check(wide(3, k, device=device))
    check(wide(3, k, device=device, dtype=torch.float32))


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
def test_strides_and_alignment(dtype, device):
    x = wide(21, 256, dtype=dtype, device=device)
    for name, view in strided_2d(x):
        assert_same(quantize_rowwise(view), reference.quantize_rowwise(x), name)
    for elements in range(1, 9):
        check(misaligned(x, elements))


def test_leading_strides(device):
    x = wide(6, 5, 4, 48, device=device)
    check(x.transpose(0, 1))
    check(x.permute(2, 0, 1, 3))
    check(x[:, ::2, 1:])
    check(x[:1].expand(6, 5, 4, 48))
    check(x[0, 0, 0].expand(7, 48))


def test_one_column_of_any_stride(device):
    check(wide(1, 9, device=device).t())
    check(wide(4, 9, device=device)[:, 3:4])


def test_non_finite_poisons_its_row_only(device):
    x = wide(9, 77, device=device)
    clean = reference.quantize_rowwise(x)
    for row, value in ((1, float("nan")), (4, float("inf")), (6, -float("inf"))):
        x[row, 5 * row] = value
    for fp8 in FP8_DTYPES:
        check(x, fp8)
        check(x, fp8, True)
    q, scale = quantize_rowwise(x)
    assert scale.isnan().nonzero().flatten().tolist() == [1, 4, 6]
    kept = [0, 2, 3, 5, 7, 8]
    assert_same([q[kept], scale[kept]], [clean[0][kept], clean[1][kept]])


@given(
    shape=st.lists(st.integers(0, 20), min_size=0, max_size=3),
    k=st.integers(0, 300),
    dtype=st.sampled_from(INPUT_DTYPES),
    fp8=st.sampled_from(FP8_DTYPES),
    pow2_scale=st.booleans(),
)
def test_any_shape(shape, k, dtype, fp8, pow2_scale, device):
    check(wide(*shape, k, dtype=dtype, device=device), fp8, pow2_scale)


@pytest.mark.large
@pytest.mark.parametrize(("m", "k"), [(524_291, 4_099), (524_400, 4_096)])
def test_more_than_2_31_elements(m, k, big_gpu):
    x = torch.randn(m, k, dtype=torch.bfloat16, device=big_gpu)
    assert x.numel() > 2**31
    q, scale = quantize_rowwise(x)
    for start in range(0, m, 65_536):
        rows = slice(start, start + 65_536)
        assert_same((q[rows], scale[rows]), reference.quantize_rowwise(x[rows]), f"rows from {start}")


@pytest.mark.large
def test_row_stride_reaches_beyond_2_31(big_gpu):
    x = torch.randn(5, 2**29 + 5, dtype=torch.bfloat16, device=big_gpu)[:, :1000]
    check(x)


def test_opcheck(device):
    check_opcheck("quantize_rowwise", [wide(5, 33, device=device), torch.float8_e5m2, True])


def test_autocast_changes_nothing(device):
    with torch.autocast(device, dtype=torch.bfloat16):
        check(wide(37, 33, dtype=torch.float32, device=device))


def test_deterministic(device):
    check_deterministic(quantize_rowwise, [wide(301, 303, device=device)])


def test_compiles_with_dynamic_rows(device):
    check_compiled(quantize_rowwise, [[wide(m, 48, device=device)] for m in (5, 64, 130)], device)


def test_cuda_graph(gpu):
    check_cuda_graph(quantize_rowwise, [wide(300, 512, device=gpu)], [wide(300, 512, device=gpu, seed=1)])


def test_two_streams(gpu):
    check_two_streams(quantize_rowwise, [[wide(3000, 2048, device=gpu, seed=seed)] for seed in (0, 1)])


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
def test_flushed_subnormals_change_nothing(dtype):
    x = torch.tensor([[2.0**-16, -(2.0**-20), 2.0**-24, 1e-40, 0.0]]).to(dtype)
    want = reference.quantize_rowwise(x)
    with flushed_subnormals():
        got = quantize_rowwise(x)
    assert_same(got, want)


def test_more_rows_than_a_launch_has(gpu):
    x = wide(9_000_001, 8, device=gpu)
    assert_same(quantize_rowwise(x), reference.quantize_rowwise(x))


def test_stream_order(gpu):
    for k in (64, 2048, 7168):
        check_stream_order(quantize_rowwise, [[wide(4000, k, device=gpu, seed=s)] for s in range(4)])


def test_second_gpu(second_gpu):
    check_second_gpu(quantize_rowwise, [wide(300, 512)], second_gpu)


@pytest.mark.parametrize(
    ("args", "argument", "got"),
    [
        ([torch.zeros(3, 4, dtype=torch.float64)], "x", "float64"),
        ([torch.zeros(3, 4, dtype=torch.int8)], "x", "int8"),
        ([torch.zeros((), dtype=torch.bfloat16)], "x", "0"),
        ([torch.zeros([1] * 8, dtype=torch.bfloat16)], "x", "8"),
        ([torch.zeros(7, 4, dtype=torch.bfloat16).t()], "x", "stride 4"),
        ([torch.zeros(3, 8, dtype=torch.bfloat16)[:, ::2]], "x", "stride 2"),
        ([torch.zeros(3, 4, dtype=torch.bfloat16), torch.float16], "dtype", "float16"),
        ([torch.zeros(3, 4, dtype=torch.bfloat16), torch.uint8], "dtype", "uint8"),
        ([torch.empty(0, 2**31, dtype=torch.bfloat16)], "x", "2147483648"),
    ],
)
def test_errors(args, argument, got, device):
    check_error("quantize_rowwise", on(device, args), argument, got)


def test_gradient_is_not_lost_silently(device):
    x = torch.zeros(3, 4, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="^quantize_rowwise: x must not ask for a gradient.*got"):
        quantize_rowwise(x)
    with torch.no_grad():
        quantize_rowwise(x)
