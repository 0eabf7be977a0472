"""quantize_tokens and quantize_both with one scale for a column of the whole batch. Bytes equal the reference's, and
groups have no influence on scales."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import (
    CORRECTNESS_MKE,
    FP8_DTYPES,
    INPUT_DTYPES,
    LAYOUTS,
    assert_same,
    assert_same_tensor,
    check_compiled,
    check_cuda_graph,
    check_deterministic,
    check_error,
    check_opcheck,
    check_second_gpu,
    check_stream_order,
    check_two_streams,
    corrupt_offs,
    flushed_subnormals,
    group_offs,
    misaligned,
    on,
    pairs,
    short,
    slot_indices,
    sqnr_db,
    strided_2d,
    wide,
)
from quantizers import CASTS, GENERIC, caller, tensors
from torch import Tensor

from moe_fp8_ext import ops, quantize_tokens, reference, scaled_grouped_mm
from moe_fp8_ext.reference.numerics import FORMATS, FP8_NAN_BYTE

call, both = (caller(op, "rowwise", amax="batch") for op in ("quantize_tokens", "quantize_both"))
by_index = pytest.mark.parametrize("gather", [False, True])


def check(x: Tensor, offs: Tensor, **how: object) -> None:
    what = f"{short(x.dtype)} {short(x.shape)} {short(how)}"
    want = reference.quantize_both(x, "rowwise", offs=offs, amax="batch", **how)
    assert_same(ops.quantize_both(x, "rowwise", offs=offs, amax="batch", **how), want, f"both of {what}")
    assert_same(ops.quantize_tokens(x, "rowwise", offs=offs, amax="batch", **how), want[2:], f"tokens of {what}")


def taken(m: int, p: int, device: str, top_k: int = 2) -> dict[str, object]:
    return {"indices": slot_indices(m, top_k, p, device), "top_k": top_k}


# Bytes


@pytest.mark.parametrize(*pairs(rounding=["exact", "pow2"], cast=CASTS, generic=GENERIC), ids=short)
def test_dtypes(rounding, cast, generic, device):
    x, offs = wide(131, 304, dtype=cast[0], device=device), group_offs("zipf", 170, 5, device)
    for view in (x, generic(x)):
        for how in ({}, taken(131, 170, device)):
            check(view, offs, dtype=cast[1], rounding=rounding, **how)


@pytest.mark.parametrize(*pairs(layout=LAYOUTS, shape=CORRECTNESS_MKE, top_k=[1, 2, 3, 8]), ids=short)
def test_group_layouts(layout, shape, top_k, device):
    m, k, e = shape
    x, p = wide(m, k, device=device), m * top_k * 5 // 4
    check(x, group_offs(layout, m, e, device))
    check(x, group_offs(layout, p, e, device), **taken(m, p, device, top_k))


@pytest.mark.parametrize("align", [2**i for i in range(9)])
def test_align(align, device):
    for layout in LAYOUTS:
        offs = group_offs(layout, 301, 6, device)
        check(wide(250, 40, device=device), offs, align=align, **taken(250, 301, device))


@pytest.mark.parametrize("shape", [(0, 0, 0), (0, 0, 3), (5, 0, 2), (0, 5, 2), (5, 3, 0), (1, 1, 1)], ids=short)
def test_zero_sizes(shape, device):
    m, k, e = shape
    check(wide(m, k, device=device), group_offs("uniform", m, e, device))
    for p in (0, 7):
        check(wide(m, k, device=device), group_offs("uniform", p, e, device), **taken(m, p, device))


@pytest.mark.parametrize("k", [1, 2, 7, 8, 15, 16, 17, 33, 64, 127, 128, 129, 257, 1025, 2880, 9001])
def test_widths(k, device):
    for dtype in (torch.bfloat16, torch.float32):
        x, offs = wide(37, k, dtype=dtype, device=device), group_offs("zipf", 60, 3, device)
        check(x, offs, **taken(37, 60, device))


def test_longest_and_most_groups(device):
    check(wide(9001, 40, device=device), group_offs("one_giant", 9100, 3, device), **taken(9001, 9100, device))
    check(wide(700, 24, device=device), group_offs("zipf", 900, 1024, device), **taken(700, 900, device))


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
def test_strides_and_alignment(dtype, device):
    x, offs, how = wide(70, 1024, dtype=dtype, device=device), group_offs("zipf", 90, 3, device), taken(70, 90, device)
    for _, view in (*strided_2d(x), ("row 0", x[:1].expand(x.shape))):
        check(view, offs, **how)
    for elements in (1, 2, 4, 8):
        how["indices"] = misaligned(how["indices"])
        check(misaligned(x, elements), misaligned(offs), **how)


def test_corrupt_offsets_and_indices(device):
    indices = torch.tensor([-1, 2**31 - 1, -(2**31), 40, 39, 0, 39, -40, 80, 7, 7, 7] * 4, dtype=torch.int32)
    for offs in corrupt_offs(48, device):
        for top_k in (1, 2):
            check(wide(40, 50, device=device), offs, indices=indices.to(device), top_k=top_k)


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
def test_flushed_subnormals_change_nothing(dtype):
    x = wide(40, 30, dtype=torch.float32) * 1e-38
    x[:, 3] = 1e-40
    x, offs = x.to(dtype), group_offs("zipf", 40, 3)
    want = reference.quantize_both(x, "rowwise", offs=offs, amax="batch")
    with flushed_subnormals():
        assert_same(ops.quantize_both(x, "rowwise", offs=offs, amax="batch"), want)


# Meaning


def test_rows_are_those_of_x(device):
    x, offs = wide(60, 72, device=device), group_offs("tail_rows", 100, 5, device)
    q, scale, *_ = ops.quantize_both(x, "rowwise", offs=offs, amax="batch", **taken(60, 100, device))
    assert_same((q, scale), ops.quantize_rows(x, "rowwise"))


def test_scales_are_those_of_one_group_of_all_rows(device):
    """Scales equal the scales of one group of all rows that groups take. If the batch is one group, all bytes are
    equal."""
    x, offs = wide(200, 72, device=device), group_offs("tail_rows", 500, 5, device)
    one = torch.tensor([len(x)], dtype=torch.int32, device=device)
    want = ops.quantize_tokens(x, "rowwise", offs=one)
    assert_same(ops.quantize_tokens(x, "rowwise", offs=one, amax="batch"), want)
    how = taken(200, 500, device, 3)
    grouped = {**how, "indices": how["indices"][: int(offs[-1])]}
    one = torch.tensor([int(offs[-1])], dtype=torch.int32, device=device)
    scale = ops.quantize_tokens(x, "rowwise", offs=one, **grouped)[1].expand(5, -1).contiguous()
    used = torch.zeros(200, dtype=torch.bool)
    used[[i // 3 for i in grouped["indices"].tolist() if 0 <= i < 600]] = True
    assert not used.all()
    for loud in (None, 1e30):
        if loud:
            x[~used.to(device)] = loud
        got = ops.quantize_tokens(x, "rowwise", offs=offs, amax="batch", **how)
        assert_same_tensor(got[1], scale, "scale")
    none = {"indices": torch.full((500,), -1, dtype=torch.int32, device=device), "top_k": 3}
    q_t, scale, _ = ops.quantize_tokens(x, "rowwise", offs=offs, amax="batch", **none)
    assert not q_t.view(torch.uint8).any()
    assert_same_tensor(scale, ops.quantize_tokens(x[:0], "rowwise", offs=offs * 0)[1], "of nothing")


@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=short)
def test_what_is_not_finite_is_one_nan(fp8, device):
    """NaN and Inf change no scale and no byte but their own, whether a group takes their row or not."""
    x = wide(60, 40, device=device)
    x[[5, 17, 44], [3, 4, 5]] = 0
    how = {"offs": group_offs("tail_rows", 100, 4, device), "dtype": fp8, "amax": "batch", **taken(60, 100, device)}
    want = ops.quantize_tokens(x, "rowwise", **how)
    x[[5, 17, 44], [3, 4, 5]] = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=x.dtype, device=device)
    check(x, **{n: v for n, v in how.items() if n != "amax"})
    got = ops.quantize_tokens(x, "rowwise", **how)
    assert_same(got[1:], want[1:])
    found, finite = (t[0].view(torch.uint8) for t in (got, want))
    changed = (found != finite).nonzero()
    assert {int(k) for k, _ in changed} <= {3, 4, 5} and len(changed)
    assert bool((found[found != finite] == FP8_NAN_BYTE[fp8]).all())
    x[:] = torch.nan
    q_t, scale, _ = ops.quantize_tokens(x, "rowwise", **how)
    assert_same_tensor(
        scale, ops.quantize_tokens(x[:0], "rowwise", **{**how, "indices": how["indices"][:0]})[1], "of 0"
    )


# Two operands have the noise 2 * 0.544 / 768, see grouped_problem.py. Numbers below the normal ones of E4M3 are rounded
# to steps of 2^-9 scales, which is a noise of step^2 / 12 for an element of x. Signal and noise of a product [N, K] of
# some hundred tokens are each within 2% in the root mean square, 0.1 dB. All experts must be within five times that.
SPREAD_DB = 0.5


@pytest.mark.parametrize("rounding", ["exact", "pow2"])
@pytest.mark.parametrize("by_loudness", [False, True])
@pytest.mark.parametrize("octaves", [0, 8])
def test_accuracy_of_wgrad(octaves, by_loudness, rounding, device):
    """The gradient of every expert's weights is as accurate as with its own scales. Tokens are equally loud, or differ
    by up to 2^8, at random or with one expert for the quietest eighth."""
    t, d, n, e = 2000, 128, 96, 8
    g = torch.Generator().manual_seed(octaves)
    loudness = torch.exp2(-octaves * torch.rand(t, generator=g))
    x = (torch.randn(t, d, generator=g) * loudness[:, None]).bfloat16().to(device)
    ids = torch.rand(t, e, generator=g).topk(3).indices
    if by_loudness:
        ids = loudness.argsort().argsort()[:, None] * e // t
    permutation, offs, _ = ops.sort_tokens(ids.to(device), e)
    dy, rows = torch.randn(ids.numel(), n, generator=g).bfloat16().to(device), permutation.long() // ids.shape[1]
    how = {"offs": offs, "rounding": rounding, "dtype": torch.float8_e4m3fn}
    dy_t, taken = quantize_tokens(dy, "rowwise", **how), {"indices": permutation, "top_k": ids.shape[1]}
    for amax in ("group", "batch"):
        x_t = quantize_tokens(x, "rowwise", amax=amax, **taken, **how)
        got, start = scaled_grouped_mm(dy_t, x_t, out_dtype=torch.float32, use_fast_accum=False), 0
        for i, end in enumerate(offs.tolist()):
            of_group = x[rows[start:end]].double()
            below = (x_t.scale[i].double() * 2**-9).square().sum() / 12 * (end - start) / of_group.square().sum()
            want = dy[start:end].double().t() @ of_group
            least = -10 * math.log10(2 * 0.544 / 768 + below.item()) - SPREAD_DB
            assert sqnr_db(got[i], want) >= least > 27.9, (amax, i)
            start = end


# Registration, graphs and streams


@by_index
def test_opcheck(gather, device):
    gathered = taken(37, 50, device) if gather else {}
    how = {"offs": group_offs("zipf", 50 if gather else 37, 3, device), "align": 64, **gathered}
    for op in ("quantize_tokens", "quantize_both"):
        check_opcheck(op, [wide(37, 33, device=device), "rowwise"], amax="batch", **how)


def test_compiles_with_dynamic_sizes(device):
    for gather in (False, True):
        calls = [tensors("quantize_tokens", m, 48, device, gather=gather) for m in (50, 64, 131)]
        check_compiled(both, calls, device, dynamic=(0, 2) if gather else (0,))


@by_index
def test_deterministic(gather, device):
    for k in (303, 304):
        check_deterministic(both, tensors("quantize_both", 601, k, device, gather=gather))


@by_index
@pytest.mark.parametrize("call", [call, both], ids=["tokens", "both"])
def test_on_a_gpu(call, gather, gpu):
    """Runs in CUDA graphs, on two streams, and between kernels that start early."""
    first, later = (
        tensors("quantize_tokens", 4000, 1024, gpu, seed, layout, gather)
        for seed, layout in enumerate(("zipf", "one_giant"))
    )
    check_cuda_graph(call, first, later)
    check_two_streams(call, [first, tensors("quantize_tokens", 4000, 1024, gpu, 1, gather=gather)])
    for m, k in ((4000, 64), (4000, 1024), (1000, 5120)):
        check_stream_order(call, [tensors("quantize_tokens", m, k, gpu, seed, gather=gather) for seed in range(4)])


@by_index
def test_second_gpu(gather, second_gpu):
    check_second_gpu(call, tensors("quantize_tokens", 700, 512, "cpu", gather=gather), second_gpu)


@pytest.mark.large
def test_more_than_2_31_elements(big_gpu):
    """Compares narrow pieces with the reference."""
    x = torch.randn(300_011, 8_192, dtype=torch.bfloat16, device=big_gpu)
    how = {"indices": torch.randperm(len(x), device=big_gpu).int(), "top_k": 1, "amax": "batch"}
    offs = group_offs("uniform", len(x), 7, big_gpu)
    q_t, scale_t, ends = ops.quantize_tokens(x, "rowwise", offs=offs, **how)
    for piece in (slice(0, 128), slice(-128, None)):
        want = reference.quantize_tokens(x[:, piece].contiguous(), "rowwise", offs=offs, **how)
        assert_same((q_t[piece].clone(), scale_t[:, piece].contiguous(), ends), want)


# Errors


def test_errors(device):
    x, offs = on(device, [torch.zeros(6, 4), torch.tensor([2, 6], dtype=torch.int32)])
    for op in ("quantize_tokens", "quantize_both"):
        check_error(op, [x, "rowwise"], "amax", "'row'", offs=offs, amax="row")
        for format in FORMATS:
            for amax in ("batch", "") if FORMATS[format].block else ("",):
                check_error(op, [x, format], "amax", f"'{amax}'", offs=offs, amax=amax)
