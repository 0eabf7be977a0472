"""scaled_grouped_mm: the two grouped products of FP8 training, 2D x 3D and 2D x 2D.

Two kinds of check. Products of small integers are exact in every accumulator, so layout, groups and scales must be
right to the last bit. Products of real values carry the accumulator's error, which has a derived bound.
"""

from __future__ import annotations

import math

import pytest
import torch
from helpers import (
    CORRECTNESS_MKE,
    FP8_DTYPES,
    LAYOUTS,
    assert_same,
    check_compiled,
    check_cuda_graph,
    check_deterministic,
    check_error,
    check_opcheck,
    check_second_gpu,
    check_two_streams,
    corrupt_offs,
    flushed_subnormals,
    group_offs,
    misaligned,
    on,
    short,
    sqnr_db,
    wide,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_fp8_ext import quantize_colwise, quantize_rowwise, quantize_weight, reference, scaled_grouped_mm, shapes


def ternary(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Values in {-1, 0, 1}: any accumulator holds the sum of thousands of products exactly, so out is rounded once."""
    return torch.randint(-1, 2, shape).float().to(dtype)


def powers_of_two(*shape: int) -> Tensor:
    return torch.exp2(torch.randint(-3, 4, shape).float())


def exact_2d3d(m: int, k: int, n: int, e: int, offs: Tensor, device: str, dtype=torch.float8_e4m3fn) -> list[Tensor]:
    a, b = ternary(m, k, dtype=dtype), ternary(e, n, k, dtype=dtype).transpose(1, 2)
    return on(device, [a, b, powers_of_two(m), powers_of_two(e, n), offs])


def exact_2d2d(p: int, k: int, n: int, e: int, offs: Tensor, device: str, dtype=torch.float8_e4m3fn) -> list[Tensor]:
    a, b = ternary(n, p, dtype=dtype), ternary(k, p, dtype=dtype).t()
    return on(device, [a, b, powers_of_two(e, n), powers_of_two(e, k), offs])


def check_exact(args: list[object]) -> Tensor:
    got, want = scaled_grouped_mm(*args), reference.scaled_grouped_mm(*args)
    assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
    wrong = (got != want).nonzero()
    assert not len(wrong), f"{len(wrong)} of {want.numel()} differ, first at {wrong[0].tolist()}"
    return got


def check_close(args: list[object], k: int) -> None:
    """Compares with the float64 reference; k is the number of products in a sum, or the most of any group."""
    got, want = scaled_grouped_mm(*args), reference.scaled_grouped_mm(*args[:5], torch.float64)
    assert got.isfinite().all()
    rounding = 2.0**-24 if got.dtype == torch.float32 else 2.0**-8
    if got.device.type == "cpu":
        # Every operand is dequantized with one rounding, a product of two is rounded once, and a sum of k terms in any
        # order has relative error k against the sum of magnitudes, all in units of 2^-24. Then out is rounded.
        a, b, scale_a, scale_b, offs = args[:5]
        magnitude = reference.scaled_grouped_mm(a.float().abs(), b.float().abs(), scale_a, scale_b, offs, torch.float64)
        bound = (k + 5) * 2.0**-24 * magnitude + rounding * want.abs() * 1.01
        assert ((got.double() - want).abs() <= bound).all()
    else:
        # Hopper's FP8 tensor core aligns all addends to the largest and keeps 13 fraction bits of it: per addend an
        # error uniform in one unit, variance 2^-26 / 3 relative to the squared accumulator, which itself is at most
        # about the result (factor 4 for the unit of the accumulator's octave). k independent addends add up; the
        # final rounding is uniform within its half unit. 6 dB cover the spread between draws.
        noise = 4 * k * 2.0**-26 / 3 + rounding**2 / 3
        assert sqnr_db(got, want) >= -10 * math.log10(noise) - 6


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16, torch.float32], ids=short)
def test_2d3d_is_exact_on_integers(layout, out_dtype, device):
    for m, k, n, e in ((200, 64, 48, 5), (131, 100, 33, 4), (7, 16, 16, 3), (300, 208, 96, 1)):
        args = exact_2d3d(m, k, n, e, group_offs(layout, m, e), device)
        out = check_exact([*args, out_dtype])
        assert not out[int(args[-1][-1]) :].any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16, torch.float32], ids=short)
def test_2d2d_is_exact_on_integers(layout, out_dtype, device):
    for p, k, n, e in ((256, 64, 48, 5), (128, 33, 100, 4), (16, 16, 16, 3), (208, 96, 208, 1)):
        offs = group_offs(layout, p // 16, e) * 16
        args = exact_2d2d(p, k, n, e, offs, device)
        out = check_exact([*args, out_dtype])
        sizes = torch.diff(offs, prepend=torch.zeros(1, dtype=torch.int32))
        assert not out[(sizes == 0).to(device)].any()


@pytest.mark.parametrize("a_dtype", FP8_DTYPES, ids=short)
@pytest.mark.parametrize("b_dtype", FP8_DTYPES, ids=short)
def test_format_pairs(a_dtype, b_dtype, device):
    a, b, *rest = exact_2d3d(96, 64, 32, 3, group_offs("zipf", 96, 3), device, a_dtype)
    check_exact([a, b.float().to(b_dtype), *rest])
    a, b, *rest = exact_2d2d(96, 64, 32, 3, group_offs("uniform", 6, 3) * 16, device, a_dtype)
    check_exact([a, b.float().to(b_dtype), *rest])


@pytest.mark.parametrize("use_fast_accum", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=short)
@pytest.mark.parametrize("shape", CORRECTNESS_MKE, ids=short)
def test_real_values(shape, out_dtype, use_fast_accum, device):
    m, k, e = shape
    n = 48
    offs = group_offs("zipf", m, e, device)
    x, dy = wide(m, k, device=device), wide(m, n, device=device, seed=1)
    q, scale, q_t, scale_t = quantize_weight(wide(e, n, k, device=device, seed=2))
    a, scale_a = quantize_rowwise(x)
    check_close([a, q.transpose(1, 2), scale_a, scale, offs, out_dtype, use_fast_accum], k)
    a, scale_a = quantize_rowwise(dy)
    check_close([a, q_t.transpose(1, 2), scale_a, scale_t, offs, out_dtype, use_fast_accum], n)
    a, scale_a, padded_offs = quantize_colwise(dy, offs)
    b, scale_b, _ = quantize_colwise(x, offs)
    check_close([a, b.t(), scale_a, scale_b, padded_offs, out_dtype, use_fast_accum], m)


@pytest.mark.parametrize(
    ("m", "k", "n", "e"),
    [(0, 16, 16, 2), (5, 0, 16, 2), (5, 16, 0, 2), (5, 16, 16, 0), (0, 0, 0, 0), (1, 1, 1, 1), (17, 1, 3, 2)],
)
def test_zero_and_one_sizes(m, k, n, e, device):
    check_exact(exact_2d3d(m, k, n, e, group_offs("uniform", m, e), device))
    check_exact(exact_2d2d(16 * m, k, n, e, group_offs("uniform", m, e) * 16, device))


def test_most_experts(device):
    e = shapes.MAX_EXPERTS
    check_exact(exact_2d3d(3000, 32, 16, e, group_offs("zipf", 3000, e), device))
    check_exact(exact_2d2d(16 * 1500, 32, 16, e, group_offs("zipf", 1500, e) * 16, device))


def test_nothing_beyond_the_last_group_is_read(device):
    a, b, scale_a, scale_b, offs = exact_2d3d(64, 32, 16, 3, group_offs("tail_rows", 64, 3), device)
    scale_a[48:] = float("nan")
    check_exact([a, b, scale_a, scale_b, offs])
    a, b, scale_a, scale_b, offs = exact_2d2d(128, 32, 16, 3, group_offs("tail_rows", 8, 3) * 16, device)
    a.view(torch.uint8)[:, 96:] = 0x7F
    check_exact([a, b, scale_a, scale_b, offs])


def test_empty_group_is_zero_whatever_its_scales(device):
    a, b, scale_a, scale_b, offs = exact_2d2d(64, 32, 16, 4, torch.tensor([16, 16, 48, 64]), device)
    scale_a[1] = float("nan")
    scale_b[1] = float("inf")
    assert not check_exact([a, b, scale_a, scale_b, offs.int()])[1].any()


def test_nan_scale_stays_in_its_row(device):
    a, b, scale_a, scale_b, offs = exact_2d3d(64, 32, 16, 3, group_offs("uniform", 64, 3), device)
    scale_a[5] = float("nan")
    out = scaled_grouped_mm(a, b, scale_a, scale_b, offs)
    assert out.isnan().any(1).nonzero().flatten().tolist() == [5]


def test_nan_scale_of_an_empty_sum(device):
    a, b, scale_a, scale_b, offs = exact_2d3d(8, 0, 16, 2, group_offs("uniform", 8, 2), device)
    scale_a[5] = float("nan")
    out = scaled_grouped_mm(a, b, scale_a, scale_b, offs)
    assert out.isnan().all(1).nonzero().flatten().tolist() == [5]
    assert not out.nan_to_num().any()


def test_repeated_rows(device):
    a, b, scale_a, scale_b, offs = exact_2d3d(60, 32, 16, 3, group_offs("zipf", 60, 3), device)
    check_exact([a[:1].expand(60, 32), b, scale_a, scale_b, offs])
    check_exact([a, b.mT[:, :1].expand(3, 16, 32).mT, scale_a, scale_b, offs])


def test_flushed_subnormals_change_nothing():
    a, b, scale_a, scale_b, offs = exact_2d3d(8, 16, 16, 1, torch.tensor([8], dtype=torch.int32), "cpu")
    a = torch.full(a.shape, 1, dtype=torch.uint8).view(a.dtype)  # the smallest subnormal
    want = reference.scaled_grouped_mm(a, b, scale_a, scale_b, offs)
    with flushed_subnormals():
        got = scaled_grouped_mm(a, b, scale_a, scale_b, offs)
    assert want.any()
    assert_same(got, want)


def test_corrupt_offsets_stay_in_bounds(device):
    for offs in corrupt_offs(80):
        e = len(offs)
        check_exact(exact_2d3d(80, 32, 16, e, offs, device))
    for offs in corrupt_offs(5):
        in_units = (offs.long() * 16).clamp(-(2**31), 2**31 - 16).int()
        check_exact(exact_2d2d(80, 32, 16, len(offs), in_units, device))


def test_any_group_start_in_2d2d(device):
    """Groups that are not padded are slower, never wrong, also where only the offsets stand against a native GEMM."""
    for p in (100, 112):
        check_exact(exact_2d2d(p, 32, 16, 3, torch.tensor([3, 50, 99], dtype=torch.int32), device))
    check_exact(exact_2d2d(1024, 256, 144, 4, torch.tensor([16, 512, 515, 1024], dtype=torch.int32), device))


def test_strides_and_alignment(device):
    a, b, scale_a, scale_b, offs = exact_2d3d(60, 32, 16, 3, group_offs("zipf", 60, 3), device)
    wide_a = torch.zeros(60, 48, dtype=torch.uint8, device=device).view(a.dtype)
    wide_a[:, :32] = a
    wide_b = torch.zeros(3, 16, 48, dtype=torch.uint8, device=device).view(b.dtype)
    wide_b[:, :, :32] = b.transpose(1, 2)
    check_exact([wide_a[:, :32], wide_b[:, :, :32].transpose(1, 2), scale_a, scale_b, offs])
    check_exact([wide_a[:, :31], wide_b[:, :, :31].transpose(1, 2), scale_a, scale_b, offs])
    for elements in (1, 4, 8):
        b_view = misaligned(b.transpose(1, 2), elements).transpose(1, 2)
        check_exact([misaligned(a, elements), b_view, misaligned(scale_a), misaligned(scale_b), misaligned(offs)])
    a, b, scale_a, scale_b, offs = exact_2d2d(64, 32, 16, 3, group_offs("zipf", 4, 3) * 16, device)
    for elements in (1, 4, 8):
        args = misaligned(a, elements), misaligned(b.t(), elements).t(), misaligned(scale_a), misaligned(scale_b), offs
        check_exact(list(args))


@given(
    m=st.integers(0, 100),
    k=st.integers(0, 70),
    n=st.integers(0, 40),
    offs=st.lists(st.one_of(st.integers(0, 100), st.integers(-(2**31), 2**31 - 1)), max_size=6),
    sort=st.booleans(),
)
def test_any_groups(m, k, n, offs, sort, device):
    offs = torch.tensor(sorted(offs) if sort else offs, dtype=torch.int32)
    check_exact(exact_2d3d(m, k, n, len(offs), offs, device))


@pytest.mark.large
def test_more_than_2_31_elements_out(big_gpu):
    m, k, n, e = 540_016, 16, 4_096, 3
    args = exact_2d3d(m, k, n, e, group_offs("uniform", m, e), big_gpu)
    out = scaled_grouped_mm(*args)
    assert out.numel() > 2**31
    a, b, scale_a, scale_b, _ = args
    rows = slice(m - 1000, m)
    one = torch.tensor([1000], dtype=torch.int32, device=big_gpu)
    want = reference.scaled_grouped_mm(a[rows], b[-1:], scale_a[rows], scale_b[-1:], one)
    assert torch.equal(out[rows], want)


@pytest.mark.large
def test_more_than_2_31_elements_in(big_gpu):
    m, k, n, e = 9_000_016, 240, 16, 3
    a = torch.ones(m, k, dtype=torch.bfloat16, device=big_gpu).to(torch.float8_e4m3fn)
    assert a.numel() > 2**31
    _, b, _, scale_b, offs = exact_2d3d(8, k, n, e, group_offs("uniform", m, e), big_gpu)
    out = scaled_grouped_mm(a, b, torch.ones(m, device=big_gpu), scale_b, offs)
    want = b[-1].float().sum(0) * scale_b[-1]
    assert (out[m - 1000 :].float() == want).all()


def both_shapes(device: str) -> list[list[Tensor]]:
    return [
        exact_2d3d(96, 64, 32, 3, group_offs("zipf", 96, 3), device),
        exact_2d2d(96, 64, 32, 3, group_offs("uniform", 6, 3) * 16, device),
    ]


def test_opcheck(device):
    for args in both_shapes(device):
        check_opcheck("scaled_grouped_mm", args)
        check_opcheck("scaled_grouped_mm", args, out_dtype=torch.float32, use_fast_accum=False)


def test_autocast_changes_nothing(device):
    for args in both_shapes(device):
        with torch.autocast(device, dtype=torch.bfloat16):
            check_exact(args)
            check_exact([*args, torch.float32])


def test_deterministic(device):
    for args in both_shapes(device):
        check_deterministic(scaled_grouped_mm, args)


def test_compiles_with_dynamic_rows(device):
    calls = [exact_2d3d(m, 64, 32, 3, group_offs("zipf", m, 3), device) for m in (50, 64, 131)]
    check_compiled(scaled_grouped_mm, calls, device, dynamic=(0, 2))


def test_cuda_graph(gpu):
    for first, later in zip(both_shapes(gpu), both_shapes(gpu), strict=True):
        check_cuda_graph(scaled_grouped_mm, first, later)


def test_two_streams(gpu):
    check_two_streams(scaled_grouped_mm, [both_shapes(gpu)[0], both_shapes(gpu)[0]])
    check_two_streams(scaled_grouped_mm, both_shapes(gpu))


def test_second_gpu(second_gpu):
    for args in both_shapes("cpu"):
        check_second_gpu(lambda *args: [scaled_grouped_mm(*args)], args, second_gpu)


A, B, SCALE_A, SCALE_B, OFFS = exact_2d3d(6, 32, 16, 2, torch.tensor([2, 6], dtype=torch.int32), "cpu")
A2, B2, SCALE_A2, SCALE_B2, OFFS2 = exact_2d2d(32, 48, 16, 2, torch.tensor([16, 32], dtype=torch.int32), "cpu")


@pytest.mark.parametrize(
    ("args", "argument", "got"),
    [
        ([A.float(), B, SCALE_A, SCALE_B, OFFS], "a", "float32"),
        ([A[0], B, SCALE_A, SCALE_B, OFFS], "a", "1"),
        ([A[:, ::2], B[:, ::2], SCALE_A, SCALE_B, OFFS], "a", "stride 2"),
        ([A, B.bfloat16(), SCALE_A, SCALE_B, OFFS], "b", "bfloat16"),
        ([A, B[0, 0], SCALE_A, SCALE_B, OFFS], "b", "1"),
        ([A, B[:, :31], SCALE_A, SCALE_B, OFFS], "b", "31"),
        ([A, B.transpose(1, 2).contiguous().view(2, 32, 16), SCALE_A, SCALE_B, OFFS], "b", "stride 16"),
        ([A, B, SCALE_A.double(), SCALE_B, OFFS], "scale_a", "float64"),
        ([A, B, SCALE_A[:5], SCALE_B, OFFS], "scale_a", "5"),
        ([A, B, SCALE_A, SCALE_B.half(), OFFS], "scale_b", "float16"),
        ([A, B, SCALE_A, SCALE_B.t().contiguous().t(), OFFS], "scale_b", "stride"),
        ([A, B, SCALE_A, SCALE_B[:, :15], OFFS], "scale_b", "15"),
        ([A, B, SCALE_A, SCALE_B[0], OFFS], "scale_b", "1"),
        ([A, B, SCALE_A, SCALE_B, OFFS.long()], "offs", "int64"),
        ([A, B, SCALE_A, SCALE_B, OFFS[:1]], "b", "2"),
        ([A, B, SCALE_A, SCALE_B, OFFS[None]], "offs", "2"),
        ([A2, B2, SCALE_A2, SCALE_B2, torch.zeros(1025, dtype=torch.int32)], "offs", "1025"),
        ([A, B, SCALE_A, SCALE_B, OFFS, torch.float16], "out_dtype", "float16"),
        ([A2, B2[:31], SCALE_A2, SCALE_B2, OFFS2], "b", "31"),
        ([A2, B2.contiguous(), SCALE_A2, SCALE_B2, OFFS2], "b", "stride 48"),
        ([A2, B2, SCALE_A2[:1], SCALE_B2, OFFS2], "scale_a", "1"),
        ([A2, B2, SCALE_A2, SCALE_B2[:, :47], OFFS2], "scale_b", "47"),
    ],
)
def test_errors(args, argument, got, device):
    check_error("scaled_grouped_mm", on(device, args), argument, got)


@pytest.mark.parametrize("argument", ["b", "scale_a", "scale_b", "offs"])
def test_error_other_device(argument, device):
    other = "cpu" if device == "cuda" else "meta"
    args = on(device, [A, B, SCALE_A, SCALE_B, OFFS])
    args[["a", "b", "scale_a", "scale_b", "offs"].index(argument)] = on(
        other, [{"b": B, "scale_a": SCALE_A, "scale_b": SCALE_B, "offs": OFFS}[argument]]
    )[0]
    check_error("scaled_grouped_mm", args, argument, other)
