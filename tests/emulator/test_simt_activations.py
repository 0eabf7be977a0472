"""The kernels of activations without a GPU, see test_simt.py."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from activation_checks import GATED, NAMED, SCORED, check_dscores, da_for, h_for, scored, scores_for
from helpers import FP8_DTYPES, INPUT_DTYPES, assert_same, misaligned, pairs, short
from simt_checks import ON_LINUX
from simt_kernels import Waves, assert_zeros_between_columns
from torch import Tensor

from moe_fp8_ext import reference
from moe_fp8_ext.reference.numerics import FORMATS

pytestmark = ON_LINUX


def check_backward(
    kernels: Waves, h: Tensor, da: Tensor, activation: str, scores: Tensor | None = None, **how: object
) -> None:
    want = reference.activate_backward(da, h, activation, scores=scores, **how)
    for each in kernels:
        got = each.run("activate_backward", want, da, h, activation, scores=scores, **how)
        assert_same(got[:2], want[:2], f"{activation} {short(h.shape)} {how} at wave size {each.wave}")
        check_dscores(got[2], want[2], h, da, activation, **how)


@pytest.mark.parametrize(
    *pairs(
        activation=NAMED,
        dtype=INPUT_DTYPES,
        p=[0, 1, 35],
        f=[0, 1, 8, 67, 264, 1040],
        interleaved=[False, True],
        offset=[0, 1, 8],
    ),
    ids=short,
)
def test_activate(kernels, activation, dtype, p, f, interleaved, offset):
    """A lane has no, one or several vectors. Vectors do not fit some rows, and a block has fewer waves than there are
    rows."""
    h = misaligned(h_for(activation, p, f, dtype), offset)
    da = da_for(h, activation)
    kernels.check("activate", h, activation, interleaved=interleaved)
    check_backward(kernels, h, da, activation, interleaved=interleaved)
    check_backward(kernels, h, misaligned(da), activation, scores_for(h), interleaved=interleaved)
    check_backward(kernels, h, da, activation, **scored(h, "slots"), interleaved=interleaved)


@pytest.mark.parametrize(
    *pairs(
        activation=NAMED,
        format=list(FORMATS),
        fp8=FP8_DTYPES,
        dtype=INPUT_DTYPES,
        f=[8, 19, 136, 520],
        interleaved=[False, True],
        by=SCORED,
    ),
    ids=short,
)
def test_fp8(kernels, activation, format, fp8, dtype, f, interleaved, by):
    x = h_for(activation, 133, f)
    q, scale = reference.quantize_rows(x, format, dtype=fp8)
    how = {"h_scale": scale, "format": format, "interleaved": interleaved, **scored(x, by)}
    check_backward(kernels, q, da_for(x, activation, dtype), activation, **how)


@pytest.mark.parametrize(
    *pairs(
        activation=NAMED,
        format=list(FORMATS),
        p=[37, 300],
        f=[128, 256, 640, 1152],
        interleaved=[False, True],
        keep_h=[False, True],
        e5m2=[False, True],
        rounding=[0, 1],
        groups=[None, 0, 5],
    ),
    ids=short,
)
def test_quantized(kernels, activation, format, p, f, interleaved, keep_h, e5m2, rounding, groups):
    """A wave has four rows, two rows, one row or half a row. The last waves are not full."""
    h = h_for(activation, p, f)
    how = {"interleaved": interleaved, "keep_h": keep_h, "rounding": FORMATS[format].roundings[rounding]}
    if groups is not None and FORMATS[format].order == "blocked":
        how["offs"] = torch.tensor([0, 7, 7, p // 2, p - 3][:groups], dtype=torch.int32)
    for each in kernels:
        how["dtype"] = [t for t in FP8_DTYPES if short(t).endswith("fnuz") == each.native_fnuz()][e5m2]
        want = reference.quantize_activated(h, activation, format, **how)
        got = each.run("quantize_activated", want, h, activation, format, **how)
        assert_same(got, want, f"at wave size {each.wave}")
        assert_zeros_between_columns(got, f"at wave size {each.wave}")


OFFS = ([9, 9, 30], [0, 50], [], [40, 3, 41], list(range(1, 71)))  # of groups: empty, all rows, none, corrupt, many


@pytest.mark.parametrize(
    *pairs(dtype=INPUT_DTYPES, p=[0, 1, 41], n=[0, 1, 8, 67, 264, 2056], offs=OFFS, offset=[0, 1, 8]), ids=short
)
def test_add_bias(kernels, dtype, p, n, offs, offset):
    """A lane has no, one or several vectors. Vectors do not fit some rows, and rows follow the last group."""
    x = misaligned(h_for("silu", p, n, dtype), offset)
    kernels.check("add_bias", x, h_for("silu", len(offs), n, dtype), torch.tensor(offs, dtype=torch.int32))


@pytest.mark.parametrize(
    *pairs(
        dtype=INPUT_DTYPES,
        p=[0, 1, 300, 2500],
        n=[0, 1, 8, 67, 520],
        offs=[*OFFS, [70, 71, 2400]],
        offset=[0, 1, 8],
        by=["ones", "rows", "slots"],
    ),
    ids=short,
)
def test_sum_groups(kernels, dtype, p, n, offs, offset, by):
    """Groups have parts of a partial sum, or several steps of a block."""
    x, how = misaligned(h_for("silu", p, n, dtype), offset), {}
    if by != "ones":
        how["scores"] = torch.rand(p * (2 if by == "slots" else 1))
    if by == "slots":
        how |= {"indices": torch.randint(-1, 2 * p + 1, (2400 if p else 0,), dtype=torch.int32), "top_k": 2}
    kernels.check("sum_groups", x, torch.tensor(offs, dtype=torch.int32), **how)


def check_quantized(kernels, h, activation, format, how):
    """Emulated `quantize_activated` gives the reference's bytes, and zeros between columns of scales."""
    for each in kernels:
        dtype = next(t for t in FP8_DTYPES if short(t).endswith("fnuz") == each.native_fnuz())
        want = reference.quantize_activated(h, activation, format, dtype=dtype, **how)
        got = each.run("quantize_activated", want, h, activation, format, dtype=dtype, **how)
        assert_same(got, want, f"at wave size {each.wave}")
        assert_zeros_between_columns(got, f"at wave size {each.wave}")


@pytest.mark.parametrize(
    *pairs(
        activation=NAMED,
        format=list(FORMATS),
        f=[128, 256, 1152],
        interleaved=[False, True],
        keep_h=[False, True],
        offs=OFFS,
    ),
    ids=short,
)
def test_quantized_with_bias(kernels, activation, format, f, interleaved, keep_h, offs):
    h, offs = h_for(activation, 41, f), torch.tensor(offs, dtype=torch.int32)
    how = {"interleaved": interleaved, "keep_h": keep_h, "rounding": FORMATS[format].roundings[0], "offs": offs}
    how["bias"] = h_for(activation, 80, f)[: len(offs)]
    check_quantized(kernels, h, activation, format, how)


@pytest.mark.parametrize(
    *pairs(
        activation=NAMED,
        format=[name for name, f in FORMATS.items() if f.block],
        f=[8, 32, 160, 224, 264, 320, 704],
        interleaved=[False, True],
        groups=[None, 0, 5],
        bias=[False, True],
    ),
    ids=short,
)
def test_quantized_partial_blocks(kernels, activation, format, f, interleaved, groups, bias):
    """The last scaling block of a row is partial, or the blocks do not fill a 128x4 atom. A block of an interleaved h
    may end a row in the middle of the last block of a."""
    interleaved |= f % 32 != 0 and FORMATS[format].block == 32  # no kernel takes a block of 32 gates and ups
    h, how = h_for(activation, 133, f), {"interleaved": interleaved, "rounding": FORMATS[format].roundings[0]}
    h[::7, -1], h[3::7, f - 1] = 1e4, -2e4  # the amax of a block is in its last vector
    if bias or (groups is not None and FORMATS[format].order == "blocked"):
        how["offs"] = torch.tensor([0, 7, 7, 66, 130][:groups], dtype=torch.int32)
    if bias:
        how["bias"] = h_for(activation, 5, f)[: len(how["offs"])]
    check_quantized(kernels, h, activation, format, how)


@pytest.mark.parametrize("f", [8, 24, 120, 136, 248, 264, 424, 520, 960, 1416])
def test_quantized_block_of_gates_and_ups(kernels, f):
    """Ups begin at every place of a scaling block: they are shifted by 1 to 15 lanes, in one to six waves."""
    for p, bias in ((7, False), (66, True)):
        h, offs = h_for("swiglu", p, f), torch.tensor([9, 9, 30, 61], dtype=torch.int32)
        h[1, torch.randint(2 * f, (3,))] = torch.tensor([math.nan, math.inf, 1e30]).bfloat16()
        h[2] *= torch.randn(2 * f).exp().exp()  # a few features are an amax, each of its block
        how = {"rounding": "exact"} | ({"offs": offs, "bias": h_for("swiglu", 4, f)} if bias else {})
        check_quantized(kernels, h, "swiglu", "blockwise", how)


@pytest.mark.parametrize("f", [8, 72, 200, 4104, 8192])
def test_quantized_rows_of_any_vectors(kernels, f):
    for each in kernels:
        dtype = torch.float8_e4m3fnuz if each.native_fnuz() else torch.float8_e4m3fn
        for p in (1, 3):
            h = h_for("swiglu", p, f)
            h[0, f // 2] = math.nan
            how = {"dtype": dtype, "rounding": "pow2"}
            want = reference.quantize_activated(h, "swiglu", "rowwise", **how)
            assert_same(each.run("quantize_activated", want, h, "swiglu", "rowwise", **how), want)


def check_quantized_backward(
    kernels: Waves,
    x: Tensor,
    da: Tensor,
    activation: str,
    offs: Tensor,
    e5m2: bool,
    format: str = "rowwise",
    **how: object,
) -> None:
    """Quantizes x as forward keeps it, in the emulated chip's type, and checks backward."""
    for each in kernels:
        e4m3, other = [t for t in FP8_DTYPES if short(t).endswith("fnuz") == each.native_fnuz()]
        h, scale = reference.quantize_rows(x, format, dtype=e4m3)
        given = {"dtype": e4m3, "grad_dtype": other if e5m2 else e4m3, "h_scale": scale, "offs": offs, **how}
        want = reference.quantize_activated_backward(da, h, activation, format, **given)
        run = partial(each.run, "quantize_activated_backward", want, da, h, activation, format, **given)
        halves, f, of_blocks = activation in GATED and not how.get("interleaved"), da.shape[1], FORMATS[format].block
        refused = of_blocks and halves and f % 128  # a scaling block would have gates and ups
        if each.wave == 64:  # such chips have too little shared memory for tiles, and no clusters for long rows
            refused = of_blocks or f > 2048
        if refused:
            with pytest.raises(RuntimeError, match="no kernels take these rows"):
                run()
            continue
        *got, dscores, sums = run()
        *want, wanted, sums_wanted = want
        what = f"{activation} {format} {short(h.shape)} {how} at wave size {each.wave}"
        assert_same([*got, sums], [*want, sums_wanted], what)
        of_h = {"h_scale": scale, "format": format, "interleaved": how.get("interleaved", False)}
        of_h["indices"] = how.get("indices")
        check_dscores(dscores, wanted, h, da, activation, **of_h)
        parts = reference.activate_backward(da, h, activation, scores=how["scores"], **of_h)
        parts = each.run("activate_backward", parts, da, h, activation, scores=how["scores"], **of_h)
        assert_same(dscores, parts[-1], "dscores")


@pytest.mark.parametrize(
    *pairs(
        activation=NAMED,
        f=[8, 72, 256, 264, 520],
        ends=[[131], [0, 16, 37, 37, 120], [], [0, 0], [1, 2, 3, 131]],
        align=[16, 32, 256],
        e5m2=[False, True],
        by=SCORED,
        interleaved=[False, True],
        rounding=["exact", "pow2"],
        sums=[False, True],
    ),
    ids=short,
)
def test_quantized_backward(kernels, activation, f, ends, align, e5m2, by, interleaved, rounding, sums):
    """Teams have one wave or several, tiles are not full, groups end anywhere, and rows follow the last group."""
    x, offs = h_for(activation, 131, f), torch.tensor(ends, dtype=torch.int32)
    how = {"align": align, "interleaved": interleaved, "rounding": rounding, "sum_grad_h": sums, **scored(x, by)}
    check_quantized_backward(kernels, x, da_for(x, activation), activation, offs, e5m2, **how)


@pytest.mark.parametrize(
    ("activation", "f", "interleaved"),
    [("swiglu_oai", 2880, True), ("swiglu", 4104, False), ("geglu", 2056, True), ("relu2", 4200, False)],
)
def test_quantized_backward_of_long_rows(kernels, activation, f, interleaved):
    """A row is shared by the two or three blocks of a cluster, whose last one has fewer features."""
    x, offs = h_for(activation, 37, f), torch.tensor([0, 5, 30], dtype=torch.int32)
    da, how = da_for(x, activation), {"interleaved": interleaved, "rounding": "exact", **scored(x, "slots")}
    how["sum_grad_h"] = True
    x[7, f // 2], da[33, 3] = math.nan, math.inf
    check_quantized_backward(kernels, x, da, activation, offs, e5m2=interleaved, **how)


@pytest.mark.parametrize(
    *pairs(
        activation=NAMED,
        format=[name for name, f in FORMATS.items() if f.block],
        f=[128, 384, 72, 192, 336],
        ends=[[331], [0, 16, 37, 37, 320], [], [0, 0], [1, 2, 130, 331]],
        align=[32, 128, 256],
        e5m2=[False, True],
        by=SCORED,
        interleaved=[False, True],
        rounding=[0, 1],
        amax=[0, 1],
        sums=[False, True],
    ),
    ids=short,
)
def test_quantized_backward_of_blocks(
    kernels, activation, format, f, ends, align, e5m2, by, interleaved, rounding, amax, sums
):
    """Tiles are not full, hold only padding, or hold rows behind the last group. The last tile of a row has features in
    one scaling block of h or in two."""
    x, offs = h_for(activation, 331, f), torch.tensor(ends, dtype=torch.int32)
    rule = FORMATS[format]
    how = {"align": min(align, rule.aligns[1]), "interleaved": interleaved, "rounding": rule.roundings[rounding]}
    how |= {"amax": rule.amaxes[-amax], "sum_grad_h": sums, **scored(x, by)}
    check_quantized_backward(kernels, x, da_for(x, activation), activation, offs, e5m2, format, **how)


@pytest.mark.parametrize(
    *pairs(
        activation=NAMED,
        format=list(FORMATS),
        f=[8, 72, 160, 256, 640, 2056],
        ends=[[61], [0, 16, 37, 37, 50], [], [0, 0]],
        e5m2=[False, True],
        by=SCORED,
        interleaved=[False, True],
        rounding=[0, 1],
        keep=[(False, False), (True, False), (False, True), (True, True)],
    ),
    ids=short,
)
def test_quantized_backward_along_rows(kernels, activation, format, f, ends, e5m2, by, interleaved, rounding, keep):
    """A wave has rows and features that are not there, a scaling block is partial, and rows follow the last group."""
    x, rule = h_for(activation, 61, f), FORMATS[format]
    da, offs = da_for(x, activation), torch.tensor(ends, dtype=torch.int32)
    x[3, f // 2], da[7, 5] = math.nan, math.inf
    how = {"interleaved": interleaved, "rounding": rule.roundings[rounding], "offs": offs, **scored(x, by)}
    how |= {"keep_grad_h": keep[0], "keep_a": keep[1]}
    halves = activation in GATED and not interleaved
    for each in kernels:
        fp8 = [t for t in FP8_DTYPES if short(t).endswith("fnuz") == each.native_fnuz()]
        h, scale = reference.quantize_rows(x, format, dtype=fp8[0])
        given = {"dtype": fp8[e5m2], "h_scale": scale, **how}
        want = reference.quantize_activated_backward_rows(da, h, activation, format, **given)
        run = partial(each.run, "quantize_activated_backward_rows", want, da, h, activation, format, **given)
        if halves and rule.block and f % 128 or rule.block is None and f > 2048 and each.wave == 64:
            with pytest.raises(RuntimeError, match="no kernels take these rows"):
                run()
            continue
        got, what = run(), f"{activation} {format} at wave size {each.wave}"
        assert_same(got[:-1], want[:-1], what)
        assert_zeros_between_columns(got, what)
        of_h = {"h_scale": scale, "format": format, "interleaved": interleaved, "indices": how.get("indices")}
        parts = reference.activate_backward(da, h, activation, scores=how["scores"], **of_h)
        parts = each.run("activate_backward", parts, da, h, activation, scores=how["scores"], **of_h)
        assert_same(got[-1], parts[-1], f"dscores, {what}")


@pytest.mark.parametrize("f", [32, 96, 160])
def test_scales_of_whole_groups_fill_their_atoms(kernels, f):
    """A group has 128 rows, so only the columns behind its last scale are padding. Those bytes are zero."""
    x, offs = h_for("swiglu", 150, f), torch.tensor([3, 131], dtype=torch.int32)
    da, how = da_for(x, "swiglu"), {"offs": offs, "interleaved": True, "rounding": "exact"}
    for each in kernels:
        e4m3 = next(t for t in FP8_DTYPES if short(t).endswith("fnuz") == each.native_fnuz())
        h, scale = reference.quantize_rows(x, "mxfp8", dtype=e4m3)
        args, how["dtype"] = (da, h, "swiglu", "mxfp8"), e4m3
        want = reference.quantize_activated_backward_rows(*args, h_scale=scale, **how)
        got = each.run("quantize_activated_backward_rows", want, *args, h_scale=scale, **how)
        assert_same(got[:2], want[:2], f"at wave size {each.wave}")


@pytest.mark.parametrize("interleaved", [False, True])
def test_quantized_backward_of_rows_that_are_apart(kernels, interleaved):
    """h is loaded 8 columns at a time, or 16 with interleaved gates and ups. Rows at other distances are refused."""
    x, offs = h_for("swiglu", 50, 128), torch.tensor([9, 9, 40], dtype=torch.int32)
    da, how = da_for(x, "swiglu"), {"offs": offs, "interleaved": interleaved, "rounding": "exact"}
    for each in kernels:
        e4m3 = next(t for t in FP8_DTYPES if short(t).endswith("fnuz") == each.native_fnuz())
        h, scale = reference.quantize_rows(x, "rowwise", dtype=e4m3)
        given = ("swiglu", "rowwise"), {**how, "h_scale": scale, "dtype": e4m3, "grad_dtype": e4m3}
        want = reference.quantize_activated_backward(da, h, *given[0], **given[1])
        for extra in (4, 8, 16):
            apart = torch.empty(50, 256 + extra, dtype=e4m3)[:, :256].copy_(h)
            run = partial(each.run, "quantize_activated_backward", want, da, apart, *given[0], **given[1])
            if extra % (16 if interleaved else 8):
                with pytest.raises(RuntimeError, match="no kernels take these rows"):
                    run()
            else:
                assert_same(run()[:-2], want[:-2], f"rows {256 + extra} apart at wave size {each.wave}")


@pytest.mark.parametrize("format", FORMATS)
def test_quantized_backward_of_many_groups(kernels, format):
    """There are as many groups as allowed, and some are empty. The gradient of one score underflows to -0."""
    x, offs = h_for("swiglu", 300, 128), torch.randint(0, 301, (1024,), dtype=torch.int32).sort().values
    align, rounding = max(16, FORMATS[format].aligns[0]), FORMATS[format].roundings[0]
    da, how = da_for(x, "swiglu"), {"align": align, "rounding": rounding, "sum_grad_h": True, **scored(x, "slots")}
    x[7, :128], x[7, 128:], da[7] = 1e-12, -1e-12, 1e-38
    check_quantized_backward(kernels, x, da, "swiglu", offs, e5m2=False, format=format, **how)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("activation", NAMED)
def test_quantized_backward_of_what_is_not_finite(kernels, activation, format):
    """A NaN or Inf poisons its row, and its columns within its group. Rows are as long as a team can hold."""
    x = h_for(activation, 9, 2048)
    da, scores = da_for(x, activation), scores_for(x)
    x[1, 5], da[2, 700], da[4, 9], scores[5], x[8, 2000] = math.nan, math.inf, math.nan, math.nan, -math.inf
    offs = torch.tensor([4, 5, 5, 8], dtype=torch.int32)
    how = {"scores": scores, "rounding": FORMATS[format].roundings[0], "sum_grad_h": True}
    check_quantized_backward(kernels, x, da, activation, offs, e5m2=False, format=format, **how)


@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=short)
def test_every_byte(kernels, fp8):
    q = torch.arange(256, dtype=torch.uint8).view(fp8).repeat(2, 2)
    check_backward(kernels, q, torch.ones(2, 256).bfloat16(), "swiglu", h_scale=torch.ones(2), format="rowwise")


@pytest.mark.parametrize("activation", NAMED)
def test_every_value(kernels, activation):
    """Gates and ups take every value of bfloat16, beside NaN and Inf."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(64, 1024)
    others = torch.tensor([1.0, -1.0, math.inf, -math.inf, math.nan, -math.nan, 0.0, 7.0]).bfloat16().repeat(64, 128)
    for h in (torch.cat([values, others], 1), torch.cat([others, values], 1)) if activation in GATED else (values,):
        kernels.check("activate", h, activation)
        check_backward(kernels, h, others, activation, others[:, 5].float())
