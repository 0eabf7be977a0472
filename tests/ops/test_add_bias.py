"""add_bias: the bias of each row's group; and quantize_activated with a bias."""

from __future__ import annotations

import math

import pytest
import torch
from activation_checks import ACTIVATIONS, h_for
from derivatives import SPELLINGS, check_no_tangent
from helpers import (
    INPUT_DTYPES,
    assert_same,
    check_compiled,
    check_cuda_graph,
    check_deterministic,
    check_error,
    check_opcheck,
    check_second_gpu,
    corrupt_offs,
    misaligned,
    on,
    pairs,
    short,
    strided_2d,
)
from torch import Tensor

from moe_fp8_ext import reference
from moe_fp8_ext.layer.bias import plus_bias
from moe_fp8_ext.ops import add_bias, quantize_activated
from moe_fp8_ext.reference.numerics import FORMATS, int32


def check(x: Tensor, bias: Tensor, offs: Tensor) -> None:
    assert_same(add_bias(x, bias, offs), reference.add_bias(x, bias, offs), f"{short(x.dtype)} {short(x.shape)}")


@pytest.mark.parametrize(
    *pairs(
        dtype=INPUT_DTYPES,
        p=[0, 1, 131],
        n=[0, 1, 8, 67, 2056],
        ends=[[131], [0, 16, 37, 37, 120], [], [0, 0], list(range(100))],
        offset=[0, 1, 8],
    ),
    ids=short,
)
def test_pairs(dtype, p, n, ends, offset, device):
    x, bias = h_for("silu", p, n, dtype, device), h_for("silu", len(ends), n, dtype, device)
    check(misaligned(x, offset), bias, int32(ends, device))


def test_edges(device):
    x, bias = h_for("silu", 50, 64, device=device), h_for("silu", 3, 64, device=device)
    for _, view in strided_2d(x):
        check(view, bias, int32([9, 9, 40], device))
    for offs in corrupt_offs(50, device):
        check(x, h_for("silu", len(offs), 64, device=device), offs)
    x[1, 5], x[2, 6], x[3, 7], x[45, 8] = math.nan, math.inf, -0.0, -0.0
    bias[0, 5], bias[0, 6], bias[0, 7] = 1, -math.inf, -0.0
    check(x, bias, int32([9, 9, 40], device))


def test_is_torchs_sum(device):
    """Equals the composed sum that autograd sees."""
    x, bias, offs = h_for("silu", 90, 40, device=device), h_for("silu", 4, 40, device=device), [7, 7, 50, 80]
    assert_same(add_bias(x, bias, int32(offs, device)), plus_bias(x, bias, int32(offs, device)))


@pytest.mark.parametrize(
    *pairs(
        activation=ACTIVATIONS,
        format=list(FORMATS),
        dtype=INPUT_DTYPES,
        f=[1, 8, 128, 520],
        interleaved=[False, True],
        keep_h=[False, True],
        ends=[[67], [0, 16, 37, 37, 60], [], [0, 0]],
    ),
    ids=short,
)
def test_quantized(activation, format, dtype, f, interleaved, keep_h, ends, device):
    h, offs = h_for(activation, 67, f, dtype, device), int32(ends, device)
    how = {"bias": h_for(activation, len(ends), f, dtype, device), "interleaved": interleaved, "keep_h": keep_h}
    got = quantize_activated(h, activation, format, offs=offs, **how)
    assert_same(got, reference.quantize_activated(h, activation, format, offs=offs, **how), f"{activation} {format}")


def both(x: Tensor, bias: Tensor, offs: Tensor) -> list[Tensor]:
    return [add_bias(x, bias, offs), *quantize_activated(x, "swiglu", "blockwise", bias=bias, offs=offs)]


def arguments(p: int, device: str = "cpu", seed: int = 0) -> list[Tensor]:
    x = h_for("swiglu", p, 128, device=device)
    return [x.roll(seed), x[:3].clone(), int32([p // 3, p // 2, p - 5], device)]


def test_deterministic(device):
    check_deterministic(both, arguments(300, device))


def test_compiles_with_dynamic_rows(device):
    check_compiled(both, [arguments(p, device) for p in (50, 66, 131)], device, dynamic=(0,))


def test_cuda_graph(gpu):
    check_cuda_graph(both, *(arguments(700, gpu, seed) for seed in (0, 1)))


def test_second_gpu(second_gpu):
    check_second_gpu(both, arguments(700), second_gpu)


def test_opcheck(device):
    x, bias, offs = arguments(37, device)
    check_opcheck("add_bias", [x, bias, offs])
    for format in FORMATS:
        check_opcheck("quantize_activated", [x, "swiglu", format], bias=bias, offs=offs)


@pytest.mark.parametrize("spelling", SPELLINGS, ids=SPELLINGS.get)
def test_derivatives_that_there_are_not(spelling):
    check_no_tangent(lambda x: spelling.add_bias(x, torch.zeros(1, 8), int32([4], "cpu")), torch.randn(10, 8))


X, BIAS, OFFS = torch.zeros(6, 8), torch.zeros(2, 8), torch.zeros(2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("args", "argument", "got"),
    [
        ([X.double(), BIAS, OFFS], "x", "float64"),
        ([X[0], BIAS, OFFS], "x", "1"),
        ([X, BIAS.half(), OFFS], "bias", "float16"),
        ([X, BIAS[:1], OFFS], "bias", "1"),
        ([X, BIAS[:, :4].contiguous(), OFFS], "bias", "4"),
        ([X, BIAS, OFFS.long()], "offs", "int64"),
    ],
)
def test_errors(args, argument, got, device):
    check_error("add_bias", on(device, args), argument, got)


def test_a_bias_without_groups(device):
    args = on(device, [X, "swiglu", "rowwise"])
    with pytest.raises(RuntimeError, match="quantize_activated: offs must be given with bias, got None"):
        quantize_activated(*args, bias=BIAS.to(device))
