"""quantize_weight: both directions of every expert's weight, one scaling block per row and one per column."""

from __future__ import annotations

import pytest
import torch
from helpers import (
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
    misaligned,
    on,
    short,
    wide,
)
from hypothesis import given
from hypothesis import strategies as st

from moe_fp8_ext import quantize_weight, reference


def check(w: torch.Tensor, *args: object) -> None:
    assert_same(quantize_weight(w, *args), reference.quantize_weight(w, *args), f"{short(w.dtype)} {short(w.shape)}")


@pytest.mark.parametrize("pow2_scale", [False, True])
@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=short)
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
def test_formats(dtype, fp8, pow2_scale, device):
    check(wide(3, 67, 101, dtype=dtype, device=device), fp8, pow2_scale)


@pytest.mark.parametrize(
    "shape",
    [
        *[(0, 4, 4), (2, 0, 5), (2, 5, 0), (0, 0, 0), (1, 1, 1), (3, 1, 40), (3, 40, 1), (5, 33, 31)],
        *[
            (4, 64, 64),
            (2, 129, 257),
            (2, 1408, 200),
            (1, 200, 1408),
            (1, 576, 303),
            (1024, 3, 5),
            (2, 2880, 24),
            (3, 50, 2048),
            (2, 33, 15000),
        ],
    ],
    ids=short,
)
def test_sizes(shape, device):
    check(wide(*shape, device=device))


def test_strides_and_alignment(device):
    w = wide(3, 40, 96, device=device)
    for elements in range(1, 9):
        check(misaligned(w, elements))
    check(w[:, ::2])
    check(w[::2, 3:, 5:])
    check(w.transpose(0, 1))
    check(w[:1].expand(4, 40, 96))
    check(w[:, :1].expand(3, 7, 96))


def test_is_rowwise_of_the_weight_and_of_its_transpose(device):
    w = wide(2, 24, 40, device=device)
    got = quantize_weight(w)
    assert_same(got[:2], reference.quantize_rowwise(w))
    assert_same(got[2:], reference.quantize_rowwise(w.transpose(1, 2)))


def test_non_finite_poisons_its_row_and_its_column_only(device):
    w = wide(3, 20, 30, device=device)
    clean_q, clean_scale, clean_q_t, clean_scale_t = reference.quantize_weight(w)
    w[1, 7, 11] = float("inf")
    for fp8 in FP8_DTYPES:
        check(w, fp8)
    q, scale, q_t, scale_t = quantize_weight(w)
    assert scale.isnan().nonzero().tolist() == [[1, 7]]
    assert scale_t.isnan().nonzero().tolist() == [[1, 11]]
    assert_same((q[:, :7], scale[:, :7]), (clean_q[:, :7], clean_scale[:, :7]))
    assert_same((q_t[:, :11], scale_t[:, :11]), (clean_q_t[:, :11], clean_scale_t[:, :11]))


@given(
    shape=st.tuples(st.integers(0, 5), st.integers(0, 80), st.integers(0, 80)),
    dtype=st.sampled_from(INPUT_DTYPES),
    fp8=st.sampled_from(FP8_DTYPES),
    pow2_scale=st.booleans(),
)
def test_any_shape(shape, dtype, fp8, pow2_scale, device):
    check(wide(*shape, dtype=dtype, device=device), fp8, pow2_scale)


@pytest.mark.large
def test_more_than_2_31_elements(big_gpu):
    w = torch.randn(9, 16_400, 16_384, dtype=torch.bfloat16, device=big_gpu)
    assert w.numel() > 2**31
    got = quantize_weight(w)
    for e in range(w.shape[0]):
        assert_same([t[e : e + 1] for t in got], reference.quantize_weight(w[e : e + 1]), f"expert {e}")


def test_opcheck(device):
    check_opcheck("quantize_weight", [wide(2, 5, 33, device=device), torch.float8_e4m3fnuz, True])


def test_deterministic(device):
    check_deterministic(quantize_weight, [wide(5, 301, 103, device=device)])


def test_compiles_with_dynamic_experts(device):
    check_compiled(quantize_weight, [[wide(e, 48, 40, device=device)] for e in (2, 3, 5)], device)


def test_cuda_graph(gpu):
    check_cuda_graph(quantize_weight, [wide(3, 300, 512, device=gpu)], [wide(3, 300, 512, device=gpu, seed=1)])


def test_two_streams(gpu):
    check_two_streams(quantize_weight, [[wide(8, 512, 1024, device=gpu, seed=seed)] for seed in (0, 1)])


def test_stream_order(gpu):
    for n, k in ((64, 64), (200, 1024), (500, 5120)):
        check_stream_order(quantize_weight, [[wide(8, n, k, device=gpu, seed=s)] for s in range(4)])


def test_second_gpu(second_gpu):
    check_second_gpu(quantize_weight, [wide(3, 300, 512)], second_gpu)


@pytest.mark.parametrize(
    ("args", "argument", "got"),
    [
        ([torch.zeros(2, 3, 4, dtype=torch.float64)], "w", "float64"),
        ([torch.zeros(3, 4, dtype=torch.bfloat16)], "w", "2"),
        ([torch.zeros(2, 2, 3, 4, dtype=torch.bfloat16)], "w", "4"),
        ([torch.zeros(2, 3, 4, dtype=torch.bfloat16).transpose(1, 2)], "w", "stride 4"),
        ([torch.zeros(2, 3, 4, dtype=torch.bfloat16), torch.bfloat16], "dtype", "bfloat16"),
        ([torch.empty(0, 128, 2**38, dtype=torch.bfloat16)], "w", "274877906944"),
        ([torch.empty(0, 2**38, 128, dtype=torch.bfloat16)], "w", "274877906944"),
    ],
)
def test_errors(args, argument, got, device):
    check_error("quantize_weight", on(device, args), argument, got)


def test_gradient_is_not_lost_silently(device):
    w = torch.zeros(2, 3, 4, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="^quantize_weight: w must not ask for a gradient.*got"):
        quantize_weight(w)
    with torch.no_grad():
        quantize_weight(w)
