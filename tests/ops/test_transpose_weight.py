"""transpose_weight: the bytes of a quantized weight with rows and columns exchanged, byte for byte."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    FP8_DTYPES,
    assert_same,
    check_compiled,
    check_cuda_graph,
    check_deterministic,
    check_error,
    check_opcheck,
    misaligned,
    short,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_fp8_ext import ops, reference

Q = torch.zeros(2, 6, 5).to(torch.float8_e4m3fn)


def fp8(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Every byte, NaN included."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device).view(dtype)


def check(q: Tensor) -> None:
    assert_same(ops.transpose_weight(q), reference.transpose_weight(q), f"{short(q.shape)} {q.stride()}")


SHAPES = [
    *[(0, 4, 4), (2, 0, 5), (2, 5, 0), (1, 1, 1), (3, 1, 40), (3, 40, 1), (5, 33, 31), (3, 128, 128), (2, 129, 257)],
    *[(2, 144, 260), (1, 200, 1408), (1024, 3, 5), (2, 2880, 24)],
]


@pytest.mark.parametrize("shape", SHAPES, ids=short)
def test_sizes(shape, device):
    check(fp8(*shape, device=device))


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=short)
def test_dtypes(dtype, device):
    got = ops.transpose_weight(fp8(2, 40, 70, device=device, dtype=dtype))
    assert got.dtype == dtype
    check(fp8(2, 40, 70, device=device, dtype=dtype))


def test_strides_and_alignment(device):
    q = fp8(3, 160, 272, device=device)
    for view in (q[:, ::2], q[::2, 3:, 8:], q[::2, 3:, 5:], q.transpose(0, 1), q[:1].expand(4, 160, 272)):
        check(view)
    for elements in range(1, 9):
        check(misaligned(q, elements))


@given(shape=st.tuples(st.integers(0, 5), st.integers(0, 300), st.integers(0, 300)))
def test_any_shape(shape, device):
    check(fp8(*shape, device=device))


def test_is_the_other_direction_of_square_blocks(device):
    w = torch.randn(2, 200, 300, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    q, _, q_t, _ = ops.quantize_weight(w, "blockwise")
    assert_same(ops.transpose_weight(q), q_t)
    assert_same(ops.transpose_weight(q_t), q)


def test_graphs_and_opcheck(device):
    q = torch.randn(2, 48, 80, generator=torch.Generator().manual_seed(0)).to(device, torch.float8_e4m3fn)
    check_opcheck("transpose_weight", [q])
    check_compiled(ops.transpose_weight, [[q], [fp8(3, 48, 80, device=device)]], device)
    check_deterministic(ops.transpose_weight, [q])


def test_cuda_graph(gpu):
    check_cuda_graph(ops.transpose_weight, [fp8(2, 48, 80, device=gpu)], [fp8(2, 48, 80, device=gpu).flip(0)])


@pytest.mark.parametrize(
    ("q", "got"),
    [
        (Q.float(), "torch.float32"),
        (Q.view(torch.uint8), "torch.uint8"),
        (Q[0], "2"),
        (Q.mT, "5"),
    ],
)
def test_errors(q, got, device):
    check_error("transpose_weight", [q.to(device)], "q", got)


@pytest.mark.large
def test_more_than_2_31_elements(big_gpu):
    q = fp8(9, 16_400, 16_384, device=big_gpu)
    got = ops.transpose_weight(q)
    for e in range(9):
        assert torch.equal(got[e].view(torch.uint8), q[e].view(torch.uint8).t()), f"expert {e}"
