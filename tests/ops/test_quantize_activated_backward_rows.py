"""quantize_activated_backward_rows: gradients of activations where the weights are frozen."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from activation_checks import ACTIVATIONS, SCORED, check_dscores, da_for, h_for, scored, scores_for
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
from moe_fp8_ext.ops import activate_backward, quantize_activated_backward_rows, quantize_rows
from moe_fp8_ext.reference.numerics import FORMATS, int32

CHIP = [t for t in FP8_DTYPES if str(t).endswith("fnuz") == (torch.version.hip is not None)]
KEEP = [(False, False), (True, False), (False, True), (True, True)]


def check(h: Tensor, da: Tensor, activation: str, format: str, **how: object) -> None:
    """Every byte equals the reference's. dscores may differ as much as the order of a sum allows."""
    *got, dscores = quantize_activated_backward_rows(da, h, activation, format, **how)
    *want, wanted = reference.quantize_activated_backward_rows(da, h, activation, format, **how)
    assert_same(got, want, f"{activation} {format} {short(h.dtype)} {short(h.shape)} {how}")
    of_h = {"h_scale": how.get("h_scale"), "format": format, "interleaved": how.get("interleaved", False)}
    check_dscores(dscores, wanted, h, da, activation, **of_h, indices=how.get("indices"))


@pytest.mark.parametrize(
    *pairs(
        activation=ACTIVATIONS,
        format=list(FORMATS),
        fp8=[None, *FP8_DTYPES],
        out=FP8_DTYPES,
        dtype=INPUT_DTYPES,
        f=[1, 8, 72, 128, 520],
        ends=[[67], [0, 16, 37, 37, 60], [], [0, 0]],
        interleaved=[False, True],
        rounding=[0, 1],
        by=SCORED,
        keep=KEEP,
    ),
    ids=short,
)
def test_pairs(activation, format, fp8, out, dtype, f, ends, interleaved, rounding, by, keep, device):
    x = h_for(activation, 67, f, dtype, device)
    h, scale = (x, None) if fp8 is None else reference.quantize_rows(x, format, dtype=fp8)
    how = {"dtype": out, "rounding": FORMATS[format].roundings[rounding], "interleaved": interleaved}
    how |= {"keep_grad_h": keep[0], "keep_a": keep[1], "offs": int32(ends, device), **scored(x, by)}
    check(h, da_for(x, activation), activation, format, h_scale=scale, **how)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_as_a_chip_casts(activation, format, device):
    """Covers the kernels on a GPU: rows of one wave, of several, of a cluster, and scaling blocks that are partial."""
    sizes = 640, 8, 256, 136, 2880
    ways = itertools.product(sizes, (False, True), CHIP, FORMATS[format].roundings, SCORED, KEEP)
    for f, interleaved, out, rounding, by, keep in itertools.islice(ways, 0, None, 7 if device != "cpu" else 97):
        x = h_for(activation, 75, f, device=device)
        h, scale = reference.quantize_rows(x, format, dtype=CHIP[0])
        how = {"dtype": out, "rounding": rounding, "interleaved": interleaved, "offs": int32([7, 7, 50, 70], device)}
        how |= {"keep_grad_h": keep[0], "keep_a": keep[1], **scored(x, by)}
        check(h, da_for(x, activation), activation, format, h_scale=scale, **how)


@pytest.mark.parametrize("format", ["rowwise", "blockwise"])
def test_edges(format, device):
    """Takes sizes and addresses at the limits of the kernels, on either side."""
    for p, f in ((0, 64), (0, 0), (5, 0), (1, 64), (3, 2048), (3, 2056), (2, 14336), (1, 16392)):
        x = h_for("swiglu", p, f, device=device)
        h, scale = reference.quantize_rows(x, format, dtype=CHIP[0])
        check(h, da_for(x, "swiglu"), "swiglu", format, h_scale=scale, offs=int32([p // 2, p], device), dtype=CHIP[0])
    x = h_for("swiglu", 50, 128, device=device)
    da, (h, scale) = da_for(x, "swiglu"), reference.quantize_rows(x, format, dtype=CHIP[0])
    how = {"offs": int32([9, 9, 40], device), "dtype": CHIP[0], "h_scale": scale, "keep_grad_h": True}
    for _, view in strided_2d(h):
        check(view, da, "swiglu", format, **how)
    for _, view in strided_2d(da):
        check(h, view, "swiglu", format, **how)
    for elements, interleaved in itertools.product((1, 4, 8), (False, True)):
        check(misaligned(h, elements), misaligned(da, elements), "swiglu", format, **how, interleaved=interleaved)
    for offs in corrupt_offs(50, device):
        check(h, da, "swiglu", format, **how | {"offs": offs})


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_not_finite(format, device):
    """A NaN or Inf poisons its row, or only its scaling block if the format has blocks."""
    x = h_for("swiglu", 60, 768, device=device)
    da, scores = da_for(x, "swiglu"), scores_for(x)
    x[1, 5], da[20, 700], da[40, 9], scores[50], x[55, 300] = math.nan, math.inf, math.nan, math.nan, -math.inf
    h, scale = reference.quantize_rows(x, format, dtype=CHIP[0])
    check(h, da, "swiglu", format, h_scale=scale, scores=scores, offs=int32([4, 30], device), dtype=CHIP[0])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("f", "interleaved"), [(256, False), (1544, False), (4104, False), (200, True), (2880, True)])
def test_is_made_of_the_others(format, f, interleaved, device):
    """Equals the separate ops byte for byte, dscores included: a device has one order of sums."""
    x = h_for("swiglu", 300, f, device=device)
    da, offs = da_for(x, "swiglu"), int32([100, 130, 130, 280], device)
    h, h_scale = quantize_rows(x, format)
    how = {"h_scale": h_scale, "interleaved": interleaved, **scored(x, "slots")}
    got = quantize_activated_backward_rows(da, h, "swiglu", format, offs=offs, keep_grad_h=True, keep_a=True, **how)
    parts = activate_backward(da, h, "swiglu", format=format, **how)
    assert_same(got, [*quantize_rows(parts[0], format, offs=offs), *parts])


def every_format(h: Tensor, da: Tensor, offs: Tensor) -> list[Tensor]:
    results = []
    for format in FORMATS:
        q, scale = quantize_rows(h, format)
        results += quantize_activated_backward_rows(da, q, "swiglu", format, offs=offs, h_scale=scale)
        results += quantize_activated_backward_rows(da, h, "swiglu", format, offs=offs, keep_grad_h=True, keep_a=True)
    return results


def arguments(p: int, f: int, device: str = "cpu", seed: int = 0) -> list[Tensor]:
    h = wide(p, 2 * f, device=device, seed=seed)
    return [h, da_for(h, "swiglu"), int32([p // 3, p // 2, p - 5], device)]


def test_deterministic(device):
    check_deterministic(every_format, arguments(300, 384, device))


def test_compiles_with_dynamic_rows(device):
    """Numbers of rows are no multiples of 4. Otherwise inductor guards whether column-major scales are contiguous."""
    check_compiled(every_format, [arguments(p, 128, device) for p in (50, 66, 131)], device, dynamic=(0, 1))


def test_cuda_graph(gpu):
    check_cuda_graph(every_format, *(arguments(700, 512, gpu, seed) for seed in (0, 1)))


def test_second_gpu(second_gpu):
    check_second_gpu(every_format, arguments(700, 512), second_gpu)


def test_opcheck(device):
    offs, op = int32([9, 30], device), "quantize_activated_backward_rows"
    for format, activation in itertools.product(FORMATS, ("swiglu", "relu2")):
        h = h_for(activation, 37, 40, device=device)
        da, keep = da_for(h, activation), {"offs": offs, "keep_grad_h": activation == "swiglu", "keep_a": True}
        check_opcheck(op, [da, h, activation, format], interleaved=True, **scored(h, "slots"), **keep)
        q, scale = quantize_rows(h, format)
        check_opcheck(op, [da, q, activation, format], h_scale=scale, dtype=CHIP[1], offs=offs)


@pytest.mark.parametrize("spelling", SPELLINGS, ids=SPELLINGS.get)
def test_derivatives_that_there_are_not(spelling):
    offs, da = torch.tensor([4], dtype=torch.int32), torch.randn(10, 4)
    op = spelling.quantize_activated_backward_rows
    check_no_tangent(lambda h: op(da, h, "swiglu", "rowwise", offs=offs), torch.randn(10, 8))


H, DA, OFFS = torch.zeros(6, 8), torch.zeros(6, 4), torch.zeros(2, dtype=torch.int32)
Q, SCALE, SCORES = H.to(torch.float8_e4m3fn), torch.zeros(6), torch.zeros(6)


@pytest.mark.parametrize(
    ("args", "kwargs", "argument", "got"),
    [
        ([DA, H.double(), "swiglu", "rowwise", OFFS], {}, "h", "float64"),
        ([DA, Q, "swiglu", "rowwise", OFFS], {}, "h", "float8_e4m3fn"),
        ([DA.half(), H, "swiglu", "rowwise", OFFS], {}, "grad", "float16"),
        ([DA[:5], H, "swiglu", "rowwise", OFFS], {}, "grad", "5"),
        ([DA, H, "relu", "rowwise", OFFS], {}, "activation", "relu"),
        ([DA, H, "swiglu", "fp4", OFFS], {}, "format", "fp4"),
        ([DA, H, "swiglu", "rowwise", torch.zeros(2)], {}, "offs", "float32"),
        ([DA, H, "swiglu", "rowwise", OFFS], {"scores": SCORES[:5]}, "scores", "5"),
        ([DA, H, "swiglu", "rowwise", OFFS], {"indices": torch.arange(6, dtype=torch.int32)}, "scores", "None"),
        ([DA, Q, "swiglu", "rowwise", OFFS], {"h_scale": SCALE[:5]}, "h_scale", "5"),
        ([DA, H, "swiglu", "rowwise", OFFS], {"dtype": torch.int8}, "dtype", "int8"),
        ([DA, H, "swiglu", "rowwise", OFFS], {"rounding": "floor"}, "rounding", "floor"),
    ],
)
def test_errors(args, kwargs, argument, got, device):
    *args, offs = on(device, args)
    check_error("quantize_activated_backward_rows", args, argument, got, offs=offs, **on(device, kwargs))
