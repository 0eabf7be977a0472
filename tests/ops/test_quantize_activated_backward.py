"""quantize_activated_backward: gradients of activations, quantized as operands of the next products."""

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
from moe_fp8_ext.ops import (
    activate_backward,
    quantize_activated_backward,
    quantize_both,
    quantize_rows,
    quantize_tokens,
    sum_groups,
)
from moe_fp8_ext.reference.numerics import FORMATS, int32

# GPUs cast to these in hardware.
CHIP = [t for t in FP8_DTYPES if str(t).endswith("fnuz") == (torch.version.hip is not None)]
ENDS = ([131], [0, 16, 37, 37, 120], [], [0, 0], [1, 2, 3, 131])


def check(h: Tensor, da: Tensor, activation: str, format: str, **how: object) -> None:
    """Every byte equals the reference's. dscores may differ as much as the order of a sum allows."""
    what = f"{activation} {format} {short(h.dtype)} {short(h.shape)} {how}"
    *got, dscores, sums = quantize_activated_backward(da, h, activation, format, **how)
    *want, wanted, sums_wanted = reference.quantize_activated_backward(da, h, activation, format, **how)
    assert_same([*got, sums], [*want, sums_wanted], what)
    of_h = {"h_scale": how.get("h_scale"), "format": format, "interleaved": how.get("interleaved", False)}
    of_h["indices"] = how.get("indices")
    check_dscores(dscores, wanted, h, da, activation, **of_h)


def kept(x: Tensor, format: str, fp8: torch.dtype | None) -> dict[str, Tensor | None]:
    """h in its own dtype, or h in fp8 with its scales."""
    q, scale = (x, None) if fp8 is None else reference.quantize_rows(x, format, dtype=fp8)
    return {"h": q, "h_scale": scale}


@pytest.mark.parametrize(
    *pairs(
        activation=ACTIVATIONS,
        format=list(FORMATS),
        fp8=[None, *FP8_DTYPES],
        out=FP8_DTYPES,
        grad=[None, *FP8_DTYPES],
        dtype=INPUT_DTYPES,
        f=[1, 8, 72, 128, 264, 520],
        ends=ENDS,
        align=[None, 0, 1],
        interleaved=[False, True],
        rounding=[0, 1],
        by=SCORED,
        amax=[0, 1],
        sums=[False, True],
    ),
    ids=short,
)
def test_pairs(
    activation, format, fp8, out, grad, dtype, f, ends, align, interleaved, rounding, by, amax, sums, device
):
    x = h_for(activation, 131, f, dtype, device)
    how = {"dtype": out, "grad_dtype": grad, "rounding": FORMATS[format].roundings[rounding]}
    how |= {"align": None if align is None else FORMATS[format].aligns[align], "interleaved": interleaved}
    how |= {"offs": int32(ends, device), **scored(x, by)}
    how |= {"amax": FORMATS[format].amaxes[-amax], "sum_grad_h": sums}
    check(**kept(x, format, fp8), da=da_for(x, activation), activation=activation, format=format, **how)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_as_a_chip_casts(activation, format, device):
    """Covers all inputs of the kernels with one and two reads (a GPU takes all options), and inputs just outside their
    limits."""
    rule = FORMATS[format]
    aligns = sorted({max(16, rule.aligns[0]), 32, rule.aligns[1]})
    sizes = 640, 8, 256, 136
    ways = itertools.product(sizes, rule.amaxes, (None, CHIP[0]), (False, True), CHIP, rule.roundings, aligns, SCORED)
    for i, (f, amax, fp8, interleaved, grad, rounding, align, by) in enumerate(
        itertools.islice(ways, 0, None, 1 if device != "cpu" else 97)
    ):
        x = h_for(activation, 300, f, device=device)
        how = {"dtype": CHIP[0], "grad_dtype": grad, "rounding": rounding, "align": align, "interleaved": interleaved}
        how |= {"offs": int32([7, 7, 200, 290], device), "amax": amax, "sum_grad_h": i % 3 > 0, **scored(x, by)}
        check(**kept(x, format, fp8), da=da_for(x, activation), activation=activation, format=format, **how)


@pytest.mark.parametrize("fp8", [None, CHIP[0]], ids=["bfloat16", "fp8"])
def test_edges(fp8, device):
    """Takes sizes and addresses at the limits of the kernels, on either side."""

    def both(x: Tensor, da: Tensor, *ends: int, **how: object) -> None:
        given = {"offs": int32(list(ends), device), "dtype": CHIP[0], "sum_grad_h": True, **how}
        check(**kept(x, "rowwise", fp8), da=da, activation="swiglu", format="rowwise", **given)

    for p, f in (
        (0, 64),
        (0, 0),
        (5, 0),
        (1, 64),
        (3, 2048),
        (3, 2056),
        (9, 14336),
        (2, 16392),
        (600, 64),
        (130, 1408),
    ):
        x = h_for("swiglu", p, f, device=device)
        both(x, da_for(x, "swiglu"), p // 2, p, p)
    x = h_for("swiglu", 50, 128, device=device)
    da, h = da_for(x, "swiglu"), kept(x, "rowwise", fp8)
    how = {"offs": int32([9, 9, 40], device), "dtype": CHIP[0], "h_scale": h["h_scale"]}
    for _, view in strided_2d(h["h"]):
        check(view, da, "swiglu", "rowwise", **how)
    for _, view in strided_2d(da):
        check(h["h"], view, "swiglu", "rowwise", **how)
    # Interleaved gates and ups are loaded 16 bytes at a time.
    for elements, interleaved in itertools.product((1, 4, 8), (False, True)):
        places = misaligned(h["h"], elements), misaligned(da, elements)
        check(*places, "swiglu", "rowwise", **how, interleaved=interleaved)
    wide_rows = torch.empty(50, 264, dtype=h["h"].dtype, device=device)[:, :256]
    check(wide_rows.copy_(h["h"]), da, "swiglu", "rowwise", **how, interleaved=True)
    for align in (1, 8):
        check(h["h"], da, "swiglu", "rowwise", **how, align=align)
    for offs in corrupt_offs(50, device):
        check(h["h"], da, "swiglu", "rowwise", **how | {"offs": offs})
    for dtype, grad in ((CHIP[1], None), (CHIP[0], FP8_DTYPES[2 if CHIP[0] == FP8_DTYPES[0] else 0])):
        check(h["h"], da, "swiglu", "rowwise", **how | {"dtype": dtype, "grad_dtype": grad})


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("fp8", [None, CHIP[0]], ids=["bfloat16", "fp8"])
def test_what_is_not_finite(activation, fp8, format, device):
    """A NaN or Inf poisons its row, and its columns within its group, or only its blocks if the format has blocks."""
    x = h_for(activation, 200, 768, device=device)
    da, scores = da_for(x, activation), scores_for(x)
    x[1, 5], da[20, 700], da[40, 9], scores[50], x[190, 300] = math.nan, math.inf, math.nan, math.nan, -math.inf
    how = {"offs": int32([4, 30, 30, 180], device), "scores": scores, "dtype": CHIP[0], "sum_grad_h": True}
    check(**kept(x, format, fp8), da=da, activation=activation, format=format, **how)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("f", "interleaved"), [*((f, False) for f in (72, 256, 384, 1544, 4104)), (200, True), (2880, True)]
)
def test_is_made_of_the_others(format, f, interleaved, device):
    """Equals the separate ops byte for byte. dscores included: a device has one order of sums. A zero from underflow
    has the same sign."""
    x = h_for("swiglu", 500, f, device=device)
    da, of_slots, offs = da_for(x, "swiglu"), scored(x, "slots"), int32([100, 130, 130, 480], device)
    gates, ups = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, f), slice(f, None))
    x[7, gates], x[7, ups], da[7] = 1e-12, -1e-12, 1e-38
    h, h_scale = quantize_rows(x, format)
    how = {"h_scale": h_scale, "interleaved": interleaved, **of_slots}
    got = quantize_activated_backward(da, h, "swiglu", format, offs=offs, sum_grad_h=True, **how)
    dh, a, dscores = activate_backward(da, h, "swiglu", format=format, **how)
    *of_dh, padded_offs = quantize_both(dh, format, offs=offs)
    separate = [*of_dh, *quantize_tokens(a, format, offs=offs)[:2], padded_offs, dscores]
    assert_same(got, [*separate, sum_groups(dh, offs)])
    *others, sums = quantize_activated_backward(da, h, "swiglu", format, offs=offs, **how)
    assert_same(others, separate)
    assert sums.shape == (0, 2 * f)


@pytest.mark.parametrize("format", FORMATS)
def test_peak_of_memory_without_kernels(format):
    """With swiglu the peak is 9 bytes a feature: 4 of dh in bfloat16, 2 + 2 of quantized dh, and 1 of quantized a. If a
    were kept in bfloat16, it would be 2 more."""
    p, f = 2048, 512
    x = h_for("swiglu", p, f)
    da, offs = da_for(x, "swiglu"), int32([p // 2, p], "cpu")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        quantize_activated_backward(da, x, "swiglu", format, offs=offs)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    assert 9 < max(held) / (p * f) < 10


def every_format(h: Tensor, da: Tensor, offs: Tensor) -> list[Tensor]:
    results = []
    for format in FORMATS:
        q, scale = quantize_rows(h, format)
        results += quantize_activated_backward(da, q, "swiglu", format, offs=offs, h_scale=scale, sum_grad_h=True)
        results += quantize_activated_backward(da, h, "swiglu", format, offs=offs, interleaved=True)
    return results


def arguments(p: int, f: int, device: str = "cpu", seed: int = 0) -> list[Tensor]:
    h = wide(p, 2 * f, device=device, seed=seed)
    return [h, da_for(h, "swiglu"), int32([p // 3, p // 2, p - 5], device)]


def test_deterministic(device):
    check_deterministic(every_format, arguments(500, 384, device))


def test_compiles_with_dynamic_rows(device):
    """Numbers of rows are no multiples of 4. Otherwise inductor guards whether column-major scales are contiguous."""
    check_compiled(every_format, [arguments(p, 128, device) for p in (50, 66, 131)], device, dynamic=(0, 1))


def test_cuda_graph(gpu):
    check_cuda_graph(every_format, *(arguments(700, 512, gpu, seed) for seed in (0, 1)))


def test_two_streams(gpu):
    check_two_streams(every_format, [arguments(4000, 1024, gpu, seed) for seed in (0, 1)])


def test_stream_order(gpu):
    *_, offs = arguments(4000, 1024, gpu)
    calls = [arguments(4000, 1024, gpu, seed)[:2] for seed in range(4)]
    check_stream_order(lambda h, da: every_format(h, da, offs), calls)


def test_second_gpu(second_gpu):
    check_second_gpu(every_format, arguments(700, 512), second_gpu)


@pytest.mark.large
def test_more_than_2_31_elements(big_gpu):
    """Rows are far apart, and there are many groups."""
    p, f, e = 600_012, 2_048, 256
    h, h_scale = quantize_rows(torch.randn(p, 2 * f, dtype=torch.bfloat16, device=big_gpu), "rowwise")
    da = torch.randn(p, f, dtype=torch.bfloat16, device=big_gpu)
    offs = (torch.arange(1, e + 1, device=big_gpu) * (p // e)).to(torch.int32)
    got = quantize_activated_backward(da, h, "swiglu", "rowwise", offs=offs, h_scale=h_scale)
    for group in (0, 100, e - 1):
        first, last = group * (p // e), (group + 1) * (p // e)
        rows, of_group = slice(first, last), int32([last - first], big_gpu)
        given = {"offs": of_group, "h_scale": h_scale[rows]}
        want = reference.quantize_activated_backward(da[rows], h[rows], "swiglu", "rowwise", **given)
        start = group * (-(-(p // e) // 32) * 32)
        positions = slice(start, start + want[6].item())
        assert_same([got[0][rows], got[1][rows]], want[:2])
        for q_t, scale_t in ((2, 3), (4, 5)):
            columns = got[q_t][:, positions].contiguous()
            assert_same([columns, got[scale_t][group]], [want[q_t][:, : want[6]].contiguous(), want[scale_t][0]])


@pytest.mark.large
@pytest.mark.parametrize("format", [name for name, f in FORMATS.items() if f.block])
def test_blocks_of_more_than_2_31_elements(format, big_gpu):
    p, f, e = 600_012, 2_048, 256
    h, h_scale = quantize_rows(torch.randn(p, 2 * f, dtype=torch.bfloat16, device=big_gpu), format)
    da = torch.randn(p, f, dtype=torch.bfloat16, device=big_gpu)
    offs = (torch.arange(1, e + 1, device=big_gpu) * (p // e)).to(torch.int32)
    got = quantize_activated_backward(da, h, "swiglu", format, offs=offs, h_scale=h_scale)
    dh, a, dscores = activate_backward(da, h, "swiglu", h_scale=h_scale, format=format)
    assert_same(got[:4], quantize_both(dh, format, offs=offs)[:4])
    assert_same([*got[4:6], got[7]], [*quantize_tokens(a, format, offs=offs)[:2], dscores])


def test_opcheck(device):
    offs, op = int32([9, 30], device), "quantize_activated_backward"
    for format, activation in itertools.product(FORMATS, ("swiglu", "relu2")):
        h = h_for(activation, 37, 40, device=device)
        da, how = da_for(h, activation), {"offs": offs, "grad_dtype": CHIP[1]}
        check_opcheck(op, [da, h, activation, format], interleaved=True, **scored(h, "rows"), **how)
        check_opcheck(op, [da, h, activation, format], **scored(h, "slots"), sum_grad_h=True, **how)
        q, scale = quantize_rows(h, format)
        check_opcheck(op, [da, q, activation, format], h_scale=scale, amax=FORMATS[format].amaxes[-1], **how)


@pytest.mark.parametrize("spelling", SPELLINGS, ids=SPELLINGS.get)
def test_derivatives_that_there_are_not(spelling):
    offs, da = torch.tensor([4], dtype=torch.int32), torch.randn(10, 4)
    op = spelling.quantize_activated_backward
    check_no_tangent(lambda h: op(da, h, "swiglu", "rowwise", offs=offs), torch.randn(10, 8))


H, DA, OFFS, SCORES = torch.zeros(6, 8), torch.zeros(6, 4), torch.zeros(2, dtype=torch.int32), torch.zeros(6)
Q, SCALE, SLOTS = H.to(torch.float8_e4m3fn), torch.zeros(6), torch.arange(6, dtype=torch.int32)


@pytest.mark.parametrize(
    ("args", "kwargs", "argument", "got"),
    [
        ([DA, H.double(), "swiglu", "rowwise", OFFS], {}, "h", "float64"),
        ([DA, Q, "swiglu", "rowwise", OFFS], {}, "h", "float8_e4m3fn"),
        ([DA, H, "swiglu", "rowwise", OFFS], {"h_scale": SCALE}, "h", "float32"),
        ([DA.half(), H, "swiglu", "rowwise", OFFS], {}, "grad", "float16"),
        ([DA[:5], H, "swiglu", "rowwise", OFFS], {}, "grad", "5"),
        ([DA, H.mT.contiguous().mT, "swiglu", "rowwise", OFFS], {}, "h", "stride 6"),
        ([DA[0], H, "swiglu", "rowwise", OFFS], {}, "grad", "1"),
        ([DA, H, "relu", "rowwise", OFFS], {}, "activation", "relu"),
        ([DA, H, "swiglu", "fp4", OFFS], {}, "format", "fp4"),
        ([DA, H, "swiglu", "rowwise", torch.zeros(2)], {}, "offs", "float32"),
        ([DA, H, "swiglu", "rowwise", torch.zeros(1025, dtype=torch.int32)], {}, "offs", "1025"),
        ([DA, H, "swiglu", "rowwise", OFFS], {"scores": SCORES[:5]}, "scores", "5"),
        ([DA, H, "swiglu", "rowwise", OFFS], {"scores": SCORES.half()}, "scores", "float16"),
        ([DA, H, "swiglu", "rowwise", OFFS], {"indices": SLOTS}, "scores", "None"),
        ([DA, H, "swiglu", "rowwise", OFFS], {"scores": SCORES, "indices": SLOTS[:5]}, "indices", "5"),
        ([DA, H, "swiglu", "rowwise", OFFS], {"scores": SCORES, "indices": SLOTS.long()}, "indices", "int64"),
        ([DA, Q, "swiglu", "rowwise", OFFS], {"h_scale": SCALE[:5]}, "h_scale", "5"),
        ([DA, Q, "swiglu", "mxfp8", OFFS], {"h_scale": SCALE}, "h_scale", "float32"),
        ([DA, H, "swiglu", "rowwise", OFFS], {"align": 48}, "align", "48"),
        ([DA, H, "swiglu", "mxfp8", OFFS], {"align": 16}, "align", "16"),
        ([DA, H, "swiglu", "rowwise", OFFS], {"dtype": torch.int8}, "dtype", "int8"),
        ([DA, H, "swiglu", "rowwise", OFFS], {"grad_dtype": torch.int8}, "grad_dtype", "int8"),
        ([DA, H, "swiglu", "rowwise", OFFS], {"rounding": "floor"}, "rounding", "floor"),
        ([DA, H, "swiglu", "mxfp8", OFFS], {"amax": "square"}, "amax", "square"),
    ],
)
def test_errors(args, kwargs, argument, got, device):
    *args, offs = on(device, args)
    check_error("quantize_activated_backward", args, argument, got, offs=offs, **on(device, kwargs))


@pytest.mark.parametrize("name", ["grad", "offs", "scores", "h_scale", "indices"])
def test_error_on_another_device(name, device):
    given = {"grad": DA, "h": Q, "offs": OFFS, "scores": SCORES, "h_scale": SCALE, "indices": SLOTS}
    other = "cpu" if device == "cuda" else "meta"
    there = {n: t.to(other if n == name else device) for n, t in given.items()}
    with pytest.raises(RuntimeError, match=f"^quantize_activated_backward: {name} must be on the device of h, "):
        quantize_activated_backward(**there, activation="swiglu", format="rowwise")
