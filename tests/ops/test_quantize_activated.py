"""quantize_activated: activations of experts and, with keep_h, their inputs, quantized along rows."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from activation_checks import ACTIVATIONS, h_for
from derivatives import SPELLINGS, check_no_tangent
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
    corrupt_offs,
    misaligned,
    on,
    pairs,
    short,
    strided_2d,
    wide,
)
from torch import Tensor

from moe_fp8_ext import reference
from moe_fp8_ext.ops import quantize_activated
from moe_fp8_ext.reference.numerics import FORMATS

# GPUs cast to these in hardware.
CHIP = [t for t in FP8_DTYPES if str(t).endswith("fnuz") == (torch.version.hip is not None)]


def check(h: Tensor, activation: str, format: str, **how: object) -> None:
    what = f"{activation} {format} {short(h.dtype)} {short(h.shape)} {how}"
    got = quantize_activated(h, activation, format, **how)
    assert_same(got, reference.quantize_activated(h, activation, format, **how), what)


@pytest.mark.parametrize(
    *pairs(
        activation=ACTIVATIONS,
        format=list(FORMATS),
        fp8=FP8_DTYPES,
        dtype=INPUT_DTYPES,
        f=[1, 8, 72, 128, 264, 512, 768, 1032],
        interleaved=[False, True],
        keep_h=[False, True],
        rounding=[0, 1],
        grouped=[False, True],
    ),
    ids=short,
)
def test_pairs(activation, format, fp8, dtype, f, interleaved, keep_h, rounding, grouped, device):
    h = h_for(activation, 131, f, dtype, device)
    how = {"dtype": fp8, "rounding": FORMATS[format].roundings[rounding], "keep_h": keep_h}
    offs = torch.tensor([5, 5, 40, 120], dtype=torch.int32, device=device) if grouped else None
    check(h, activation, format, interleaved=interleaved, offs=offs, **how)


@pytest.mark.parametrize("format", FORMATS)
def test_as_a_chip_casts(format, device):
    """Covers all inputs of the single-read kernel (all options only on a GPU), and inputs just outside its limits."""
    ways = list(itertools.product((False, True), (False, True), FORMATS[format].roundings, CHIP))
    for activation in ACTIVATIONS:
        for f in (640,) if device == "cpu" else (128, 256, 640, 1024, 1416, 2880):
            h = h_for(activation, 130, f, device=device)
            for interleaved, keep_h, rounding, dtype in ways if f == 640 and device != "cpu" else ways[::5]:
                check(h, activation, format, interleaved=interleaved, keep_h=keep_h, rounding=rounding, dtype=dtype)
    for f in (8192, 8320):
        check(h_for("swiglu", 3, f, device=device), "swiglu", format)
    h = h_for("swiglu", 50, 128, device=device)
    for _, view in strided_2d(h):
        check(view, "swiglu", format)
    for elements in (1, 4, 8):
        check(misaligned(h, elements), "swiglu", format)
    for e in (0, 1, 3):
        check(h, "swiglu", format, offs=torch.tensor([9, 9, 30][:e], dtype=torch.int32, device=device))
    for shape in ((0, 128), (0, 0), (5, 0), (1, 128), (4, 128)):
        check(h_for("swiglu", *shape, device=device), "swiglu", format)
    wider = torch.full((3, 768), math.nan, device=device).bfloat16()
    wider[:, :512] = h_for("swiglu", 3, 256, device=device)
    wider[1, 300] = math.inf
    check(wider[:, :512], "swiglu", format)


def every_format(h: Tensor) -> list[Tensor]:
    return [t for format in FORMATS for t in quantize_activated(h, "swiglu", format)]


def arguments(p: int, f: int, device: str = "cpu", seed: int = 0) -> list[Tensor]:
    return [wide(p, 2 * f, device=device, seed=seed)]


def test_deterministic(device):
    check_deterministic(every_format, arguments(500, 384, device))


def test_compiles_with_dynamic_rows(device):
    """Numbers of rows are no multiples of 4. Otherwise inductor guards whether column-major scales are contiguous."""
    check_compiled(every_format, [arguments(p, 128, device) for p in (50, 66, 131)], device)


def test_cuda_graph(gpu):
    check_cuda_graph(every_format, *(arguments(700, 512, gpu, seed) for seed in (0, 1)))


def test_two_streams(gpu):
    check_two_streams(every_format, [arguments(4000, 1024, gpu, seed) for seed in (0, 1)])


def test_stream_order(gpu):
    check_stream_order(every_format, [arguments(4000, 1024, gpu, seed) for seed in range(4)])


def test_second_gpu(second_gpu):
    check_second_gpu(every_format, arguments(700, 512), second_gpu)


def compact(t: Tensor) -> Tensor:
    """Clones to dense strides. A single column counts as contiguous whatever its stride, so contiguous() is not
    enough."""
    return t.clone(memory_format=torch.contiguous_format)


@pytest.mark.large
@pytest.mark.parametrize("format", ["rowwise", "blockwise"])
def test_more_than_2_31_elements(format, big_gpu):
    h = torch.randn(600_012, 8_192, dtype=torch.bfloat16, device=big_gpu)
    got = quantize_activated(h, "swiglu", format)
    for rows in (slice(0, 52), slice(599_960, 600_012)):
        want = reference.quantize_activated(h[rows], "swiglu", format)
        assert_same([compact(t[rows]) for t in got], [compact(t) for t in want])


@pytest.mark.parametrize("keep_h", [False, True])
@pytest.mark.parametrize(
    ("format", "p", "f"),
    [
        ("rowwise", 1_050_019, 8),
        ("rowwise", 132_004, 1032),
        ("blockwise", 1_050_019, 128),
        ("mxfp8_rowmajor", 1_050_019, 128),
    ],
)
def test_more_rows_than_blocks_along_y(format, p, f, keep_h, gpu):
    """A launch has at most 65,535 blocks along y, which is fewer than there are rows. The last block has no rows."""
    h = torch.randn(p, f, dtype=torch.bfloat16, device=gpu)
    got = quantize_activated(h, "silu", format, keep_h=keep_h)
    for first in (0, 65_535, 131_000, p - 1000):
        rows = slice(first, first + 1000)
        want = reference.quantize_activated(h[rows], "silu", format, keep_h=keep_h)
        assert_same([compact(t[rows]) for t in got], [compact(t) for t in want])


def test_opcheck(device):
    offs = torch.tensor([9, 30], dtype=torch.int32, device=device)
    for format in FORMATS:
        check_opcheck("quantize_activated", [h_for("swiglu", 37, 33, device=device), "swiglu", format], offs=offs)
        check_opcheck("quantize_activated", [h_for("relu2", 37, 33, device=device), "relu2", format], keep_h=False)


@pytest.mark.parametrize("spelling", SPELLINGS, ids=SPELLINGS.get)
def test_derivatives_that_there_are_not(spelling):
    check_no_tangent(lambda h: spelling.quantize_activated(h, "swiglu", "rowwise"), torch.randn(10, 8))


@pytest.mark.parametrize("format", FORMATS)
def test_corrupt_offsets(format, device):
    h = h_for("swiglu", 60, 128, device=device)
    for offs in corrupt_offs(60, device):
        check(h, "swiglu", format, offs=offs)


H, Q = torch.zeros(6, 8), torch.zeros(6, 8, dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("args", "kwargs", "argument", "got"),
    [
        ([H.double(), "swiglu", "rowwise"], {}, "h", "float64"),
        ([Q, "swiglu", "rowwise"], {}, "h", "float8_e4m3fn"),
        ([H[0], "swiglu", "rowwise"], {}, "h", "1"),
        ([H.t(), "silu", "rowwise"], {}, "h", "stride 8"),
        ([H[:, :7], "swiglu", "rowwise"], {}, "h", "7"),
        ([H, "relu", "rowwise"], {}, "activation", "relu"),
        ([H, "swiglu", "fp4"], {}, "format", "fp4"),
        ([H, "swiglu", "rowwise"], {"offs": torch.zeros(6)}, "offs", "float32"),
        ([H, "swiglu", "rowwise"], {"offs": torch.zeros(2, 2, dtype=torch.int32)}, "offs", "2"),
        ([H, "swiglu", "rowwise"], {"offs": torch.zeros(6, dtype=torch.int32)[::2]}, "offs", "stride 2"),
        ([H, "swiglu", "rowwise"], {"dtype": torch.int8}, "dtype", "int8"),
        ([H, "swiglu", "rowwise"], {"rounding": "floor"}, "rounding", "floor"),
        ([H, "swiglu", "mxfp8"], {"offs": torch.zeros(1025, dtype=torch.int32)}, "offs", "1025"),
    ],
)
def test_errors(args, kwargs, argument, got, device):
    check_error("quantize_activated", on(device, args), argument, got, **on(device, kwargs))


def test_error_on_another_device(device):
    other = "cpu" if device == "cuda" else "meta"
    with pytest.raises(RuntimeError, match=f"^quantize_activated: offs must be on the device of h, .*got {other}"):
        quantize_activated(H.to(device), "swiglu", "mxfp8", offs=torch.zeros(2, dtype=torch.int32, device=other))
