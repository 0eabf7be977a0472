"""scaled_grouped_mm: the two grouped products of FP8 training, 2D x 3D and 2D x 2D, of operands of every format.

Products of small integers are exact in every accumulator, so layout, groups and scales must be right to the last bit.
"""

from __future__ import annotations

import pytest
import torch
from gemm_problem import E4M3, E8M0, FORMATS, UNIT, check_exact, exact_2d2d, exact_2d3d, scales
from helpers import (
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
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_fp8_ext import reference
from moe_fp8_ext.ops import scaled_grouped_mm

MAX_EXPERTS = 1024
ANY_OFFS = FORMATS[:3]  # the place of scales does not depend on where groups begin


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_is_exact_on_integers(layout, fmt, device):
    shapes = (200, 64, 48, 5), (131, 100, 33, 4), (7, 16, 16, 3), (300, 272, 144, 1), (300, 400, 256, 3)
    out_dtypes = None, torch.float32, torch.bfloat16, torch.float32, None
    for (m, k, n, e), out_dtype in zip(shapes, out_dtypes, strict=True):
        offs = group_offs(layout, m, e)
        out = check_exact(exact_2d3d(fmt, m, k, n, offs, device), out_dtype=out_dtype)
        assert not out[int(offs[-1]) :].any()
        if fmt in ANY_OFFS:
            check_exact(exact_2d2d(fmt, m, k, n, offs, device), out_dtype=out_dtype)
        unit = UNIT[fmt]
        whole = group_offs(layout, m // unit, e) * unit
        for align in (1, unit):
            args = exact_2d2d(fmt, m // unit * unit, 64, 48, whole, device)
            out = check_exact(args, out_dtype=out_dtype, align=align)
        sizes = torch.diff(whole, prepend=torch.zeros(1, dtype=torch.int32))
        assert not out[(sizes == 0).to(device)].any()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("a_dtype", FP8_DTYPES, ids=short)
def test_pairs_of_dtypes(a_dtype, fmt, device):
    for b_dtype in FP8_DTYPES:
        for k in (224, 100):
            dtypes = a_dtype, b_dtype
            check_exact(exact_2d3d(fmt, 90, k, 48, group_offs("zipf", 90, 3), device, dtypes))
            args = exact_2d2d(fmt, 224, k, 48, group_offs("zipf", 7, 3) * 32, device, dtypes)
            check_exact(args, align=32)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    ("m", "k", "n", "e"),
    [(0, 32, 16, 2), (5, 0, 16, 2), (5, 16, 0, 2), (5, 16, 16, 0), (0, 0, 0, 0), (1, 1, 1, 1), (17, 1, 3, 2)],
)
def test_zero_and_one_sizes(m, k, n, e, fmt, device):
    check_exact(exact_2d3d(fmt, m, k, n, group_offs("uniform", m, e), device))
    check_exact(exact_2d2d(fmt, UNIT[fmt] * m, k, n, group_offs("uniform", m, e) * UNIT[fmt], device), align=UNIT[fmt])


@pytest.mark.parametrize("fmt", FORMATS)
def test_max_experts(fmt, device):
    unit, e = UNIT[fmt], MAX_EXPERTS
    check_exact(exact_2d3d(fmt, 1500, 32, 16, group_offs("zipf", 1500, e), device))
    check_exact(exact_2d2d(fmt, 1100 * unit, 16, 16, group_offs("zipf", 1100, e) * unit, device), align=unit)


def test_nothing_beyond_the_last_group_is_read(device):
    a, b, scale_a, scale_b, fmt, offs = exact_2d3d("rowwise", 64, 32, 16, group_offs("tail_rows", 64, 3), device)
    scale_a[48:] = float("nan")
    check_exact([a, b, scale_a, scale_b, fmt, offs])
    a, b, scale_a, scale_b, fmt, offs = exact_2d2d("rowwise", 128, 32, 16, group_offs("tail_rows", 8, 3) * 16, device)
    a.view(torch.uint8)[:, 96:] = 0x7F
    check_exact([a, b, scale_a, scale_b, fmt, offs])


def test_scales_of_nothing_are_not_read(device):
    """NaN scales in the padding between groups and experts change no result."""
    a, b, scale_a, scale_b, fmt, offs = exact_2d3d("mxfp8", 64, 64, 32, group_offs("tail_rows", 64, 3), device)
    ones = torch.ones(3, 64, 2, dtype=torch.uint8, device=device)
    used, _ = reference.swizzle_scales(ones[0], groups="rows", offs=offs)
    scale_a = scale_a.view(torch.uint8).masked_fill(used == 0, 255).view(E8M0)
    used, _ = reference.swizzle_scales(ones[:, :32], groups="experts")
    scale_b = scale_b.view(torch.uint8).masked_fill(used == 0, 255).view(E8M0)
    assert check_exact([a, b, scale_a, scale_b, fmt, offs]).isfinite().all()


def test_empty_group_is_zero_whatever_its_scales(device):
    offs = torch.tensor([16, 16, 48, 64], dtype=torch.int32)
    args = exact_2d2d("rowwise", 64, 32, 16, offs, device)
    args[2][1], args[3][1] = float("nan"), float("inf")
    assert not check_exact(args)[1].any()


@pytest.mark.parametrize("k", [0, 32])
def test_nan_scale_stays_in_its_row(k, device):
    args = exact_2d3d("rowwise", 64, k, 16, group_offs("uniform", 64, 3), device)
    args[2][5] = float("nan")
    out = scaled_grouped_mm(*args)
    assert out.isnan().any(1).nonzero().flatten().tolist() == [5]
    assert k or (out[5].isnan().all() and not out.nan_to_num().any())


@pytest.mark.parametrize("fmt", FORMATS)
def test_repeated_rows(fmt, device):
    a, b, *rest = exact_2d3d(fmt, 60, 32, 16, group_offs("zipf", 60, 3), device)
    check_exact([a[:1].expand(60, 32), b, *rest])
    check_exact([a, b.mT[:, :1].expand(3, 16, 32).mT, *rest])


@pytest.mark.parametrize("fmt", FORMATS)
def test_flushed_subnormals_change_nothing(fmt):
    a, *rest = exact_2d3d(fmt, 8, 32, 16, torch.tensor([8], dtype=torch.int32))
    a = torch.full(a.shape, 1, dtype=torch.uint8).view(a.dtype)  # the smallest subnormal
    want = reference.scaled_grouped_mm(a, *rest)
    with flushed_subnormals():
        got = scaled_grouped_mm(a, *rest)
    assert want.any()
    assert_same(got, want)


@pytest.mark.parametrize("fmt", FORMATS)
def test_corrupt_offsets_stay_in_bounds(fmt, device):
    for offs in corrupt_offs(48):
        check_exact(exact_2d3d(fmt, 48, 160, 32, offs, device))
        if fmt in ANY_OFFS:
            check_exact(exact_2d2d(fmt, 48, 64, 32, offs, device))
    unit = UNIT[fmt]
    for offs in corrupt_offs(5):
        in_units = (offs.long() * unit).clamp(-(2**31), 2**31 - unit).int()
        check_exact(exact_2d2d(fmt, 5 * unit, 64, 32, in_units, device), align=unit)


@pytest.mark.parametrize("fmt", FORMATS)
def test_broken_promise_of_align_stays_in_bounds(fmt, device):
    """Values may then be wrong. Memory is safe, and the shape is right."""
    for offs in (*corrupt_offs(200), torch.tensor([3, 50, 99], dtype=torch.int32)):
        args = exact_2d2d(fmt, 256, 48, 32, offs, device)
        assert scaled_grouped_mm(*args, align=32).shape == (len(offs), 32, 48)


@pytest.mark.parametrize("fmt", ANY_OFFS)
def test_any_group_start_in_2d2d(fmt, device):
    """No quantizer makes such groups. Their offsets may rule out a native GEMM, so the call is slower, but never
    wrong."""
    for ends in ([64, 64, 512, 1024], [16, 512, 544, 1024], [8, 512, 544, 1024], [32, 512, 515, 1024]):
        check_exact(exact_2d2d(fmt, 1024, 256, 144, torch.tensor(ends, dtype=torch.int32), device))
    check_exact(exact_2d2d(fmt, 100, 32, 16, torch.tensor([3, 50, 99], dtype=torch.int32), device))


@pytest.mark.parametrize("fmt", FORMATS)
def test_strides_and_alignment(fmt, device):
    def wider(t: Tensor) -> Tensor:
        buffer = torch.zeros(*t.shape[:-1], t.shape[-1] + 16, dtype=torch.uint8, device=device).view(t.dtype)
        buffer[..., : t.shape[-1]] = t
        return buffer[..., : t.shape[-1]]

    offs = group_offs("zipf", 60, 3)
    for k in (64, 63):
        a, b, *rest = exact_2d3d(fmt, 60, k, 16, offs, device)
        check_exact([wider(a), wider(b.mT).mT, *rest])
    a, b, scale_a, scale_b, _, offs = exact_2d3d(fmt, 60, 64, 16, offs, device)
    a2, b2, *rest2 = exact_2d2d(fmt, 64, 32, 16, group_offs("zipf", 2, 3) * 32, device)
    for elements in (1, 4, 8):
        moved = [s if fmt == "blockwise" else misaligned(s, elements) for s in (scale_a, scale_b)]
        check_exact([misaligned(a, elements), misaligned(b.mT, elements).mT, *moved, fmt, misaligned(offs)])
        check_exact([misaligned(a2, elements), misaligned(b2.t(), elements).t(), *rest2], align=32)


@given(
    fmt=st.sampled_from(FORMATS),
    m=st.integers(0, 100),
    k=st.integers(0, 70),
    n=st.integers(0, 40),
    offs=st.lists(st.one_of(st.integers(0, 100), st.integers(-(2**31), 2**31 - 1)), max_size=6),
    sort=st.booleans(),
)
def test_any_groups(fmt, m, k, n, offs, sort, device):
    offs = torch.tensor(sorted(offs) if sort else offs, dtype=torch.int32)
    check_exact(exact_2d3d(fmt, m, k, n, offs, device))


def test_torch_takes_these_shapes():
    """torch's own GEMM checks the operands that it would be given. This stands in for a run on sm100."""
    for m, k, n, e in ((500, 320, 192, 4), (16, 32, 16, 1), (1000, 512, 640, 8), (96, 160, 144, 3)):
        offs = torch.empty(e, dtype=torch.int32)
        for args in (exact_2d3d("mxfp8", m, k, n, offs, "meta"), exact_2d2d("mxfp8", k, 48, n, offs, "meta")):
            out = torch._scaled_grouped_mm(*args[:4], offs=args[5], out_dtype=torch.bfloat16, use_fast_accum=True)
            assert out.shape == scaled_grouped_mm(*args).shape


@pytest.mark.large
def test_more_than_2_31_elements_out(big_gpu):
    m, k, n, e = 540_016, 16, 4_096, 3
    args = exact_2d3d("rowwise", m, k, n, group_offs("uniform", m, e), big_gpu)
    out = scaled_grouped_mm(*args)
    assert out.numel() > 2**31
    a, b, scale_a, scale_b, *_ = args
    rows = slice(m - 1000, m)
    one = torch.tensor([1000], dtype=torch.int32, device=big_gpu)
    want = reference.scaled_grouped_mm(a[rows], b[-1:], scale_a[rows], scale_b[-1:], "rowwise", one)
    assert torch.equal(out[rows], want)


@pytest.mark.large
def test_more_than_2_31_elements_in(big_gpu):
    m, k, n, e = 9_000_016, 240, 16, 3
    a = torch.ones(m, k, dtype=torch.bfloat16, device=big_gpu).to(E4M3)
    assert a.numel() > 2**31
    _, b, _, scale_b, fmt, offs = exact_2d3d("rowwise", 8, k, n, group_offs("uniform", m, e), big_gpu)
    out = scaled_grouped_mm(a, b, torch.ones(m, device=big_gpu), scale_b, fmt, offs)
    want = b[-1].float().sum(0) * scale_b[-1]
    assert (out[m - 1000 :].float() == want).all()


def both_shapes(fmt: str, device: str) -> list[list[object]]:
    return [
        exact_2d3d(fmt, 96, 64, 32, group_offs("zipf", 96, 3), device),
        exact_2d2d(fmt, 96, 64, 32, group_offs("uniform", 3, 3) * 32, device),
    ]


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=short)
@pytest.mark.parametrize("fmt", FORMATS)
def test_transposed_out(fmt, out_dtype, fast, device):
    """It is the contiguous out, byte for byte, also where sums are not exact: scales are drawn anew."""
    shapes = (640, 272, 144, 5), (96, 100, 33, 4), (64, 0, 16, 2), (96, 1, 3, 3)
    for (p, k, n, e), dtype in zip(shapes, FP8_DTYPES, strict=True):
        offs = group_offs("tail_rows", p // 32, e) * 32
        a, b, scale_a, scale_b, *rest = exact_2d2d(fmt, p, k, n, offs, device, (dtype, E4M3))
        if scale_a.dtype == torch.float32:
            scale_a, scale_b = (scale * (1 + torch.rand_like(scale)) for scale in (scale_a, scale_b))
        args, how = (a, b, scale_a, scale_b, *rest), dict(align=32, out_dtype=out_dtype, use_fast_accum=fast)
        want, got = scaled_grouped_mm(*args, **how), scaled_grouped_mm(*args, **how, out_transposed=True)
        assert got.stride() == want.new_empty(e, k, n).mT.stride()
        assert_same(got.clone(memory_format=torch.contiguous_format), want)


@pytest.mark.parametrize("fmt", FORMATS)
def test_opcheck(fmt, device):
    rows, sums = both_shapes(fmt, device)
    check_opcheck("scaled_grouped_mm", sums, align=32, out_transposed=True)
    check_opcheck("scaled_grouped_mm", rows)
    check_opcheck("scaled_grouped_mm", sums, align=32, out_dtype=torch.float32, use_fast_accum=False)


@pytest.mark.parametrize("fmt", FORMATS)
def test_autocast_changes_nothing(fmt, device):
    for args in both_shapes(fmt, device):
        with torch.autocast(device, dtype=torch.bfloat16):
            check_exact(args)
            check_exact(args, out_dtype=torch.float32)


@pytest.mark.parametrize("fmt", FORMATS)
def test_deterministic(fmt, device):
    for args in both_shapes(fmt, device):
        check_deterministic(scaled_grouped_mm, args)


@pytest.mark.parametrize("fmt", FORMATS)
def test_compiles_with_dynamic_rows(fmt, device):
    calls = []
    for m in (50, 64, 131):
        a, b, scale_a, *rest = exact_2d3d(fmt, m, 64, 48, group_offs("zipf", m, 3), device)
        calls.append([a, b, scale_a.contiguous(), *rest])
    check_compiled(scaled_grouped_mm, calls, device, dynamic=(0, 2))


@pytest.mark.parametrize("fmt", FORMATS)
def test_cuda_graph(fmt, gpu):
    for first, later in zip(both_shapes(fmt, gpu), both_shapes(fmt, gpu), strict=True):
        check_cuda_graph(scaled_grouped_mm, first, later)


@pytest.mark.parametrize("fmt", FORMATS)
def test_two_streams(fmt, gpu):
    check_two_streams(scaled_grouped_mm, [both_shapes(fmt, gpu)[0], both_shapes(fmt, gpu)[0]])
    check_two_streams(scaled_grouped_mm, both_shapes(fmt, gpu))


@pytest.mark.parametrize("fmt", FORMATS)
def test_second_gpu(fmt, second_gpu):
    for args in both_shapes(fmt, "cpu"):
        check_second_gpu(lambda *args: [scaled_grouped_mm(*args)], args, second_gpu)


OPERANDS = ("a", "b", "scale_a", "scale_b", "format", "offs")
OF_ROWS = {f: exact_2d3d(f, 6, 160, 16, torch.tensor([2, 6], dtype=torch.int32)) for f in FORMATS}
OF_SUMS = {f: exact_2d2d(f, 64, 48, 16, torch.tensor([32, 64], dtype=torch.int32)) for f in FORMATS}
A, B, SCALE_A, SCALE_B, _, OFFS = OF_ROWS["rowwise"]
A2, B2, SCALE_A2, SCALE_B2, *_ = OF_SUMS["rowwise"]


@pytest.mark.parametrize(
    ("fmt", "problem", "changed", "argument", "got"),
    [
        *(
            ("rowwise", OF_ROWS, *case)
            for case in [
                ({"a": A.float()}, "a", "float32"),
                ({"a": A[0]}, "a", "1"),
                ({"a": A[:, ::2], "b": B[:, ::2]}, "a", "stride 2"),
                ({"b": B.bfloat16()}, "b", "bfloat16"),
                ({"b": B[0, 0]}, "b", "1"),
                ({"b": B[:, :31]}, "b", "31"),
                ({"b": B.mT.contiguous().view(2, 160, 16)}, "b", "stride 16"),
                ({"scale_a": SCALE_A.double()}, "scale_a", "float64"),
                ({"scale_a": SCALE_A[:5]}, "scale_a", "5"),
                ({"scale_b": SCALE_B.half()}, "scale_b", "float16"),
                ({"scale_b": SCALE_B.t().contiguous().t()}, "scale_b", "stride"),
                ({"scale_b": SCALE_B[:, :15]}, "scale_b", "15"),
                ({"scale_b": SCALE_B[0]}, "scale_b", "1"),
                ({"offs": OFFS.long()}, "offs", "int64"),
                ({"offs": OFFS[:1]}, "b", "2"),
                ({"offs": OFFS[None]}, "offs", "2"),
                ({"out_dtype": torch.float16}, "out_dtype", "float16"),
                ({"align": 0}, "align", "0"),
                ({"out_transposed": True}, "out_transposed", "True"),
                ({"align": 24}, "align", "24"),
                ({"format": "fp4"}, "format", "'fp4'"),
            ]
        ),
        *(
            ("rowwise", OF_SUMS, *case)
            for case in [
                ({"offs": torch.zeros(1025, dtype=torch.int32)}, "offs", "1025"),
                ({"b": B2[:31]}, "b", "31"),
                ({"b": B2.contiguous()}, "b", "stride 48"),
                ({"scale_a": SCALE_A2[:1]}, "scale_a", "1"),
                ({"scale_b": SCALE_B2[:, :47]}, "scale_b", "47"),
            ]
        ),
        *(
            ("blockwise", OF_ROWS, *case)
            for case in [
                ({"scale_a": torch.ones(6)}, "scale_a", "1"),
                ({"scale_a": torch.ones(6, 1)}, "scale_a", "1"),
                ({"scale_a": scales("mxfp8", 262, 8)}, "scale_a", "float8_e8m0fnu"),
                ({"scale_b": torch.ones(2, 16)}, "scale_b", "2"),
                ({"scale_b": torch.ones(2, 1, 1)}, "scale_b", "1"),
                ({"scale_b": torch.ones(2, 2, 1).double()}, "scale_b", "float64"),
            ]
        ),
        ("blockwise", OF_SUMS, {"scale_a": torch.ones(16, 0)}, "scale_a", "0"),
        ("blockwise", OF_SUMS, {"scale_b": torch.ones(1, 48)}, "scale_b", "1"),
        *(
            ("mxfp8", OF_ROWS, *case)
            for case in [
                ({"scale_a": torch.ones(262, 8)}, "scale_a", "float32"),
                ({"scale_a": scales("mxfp8", 6)}, "scale_a", "1"),
                ({"scale_a": scales("mxfp8", 256, 8)}, "scale_a", "256"),
                ({"scale_a": scales("mxfp8", 262, 5)}, "scale_a", "5"),
                ({"scale_a": scales("mxfp8", 8, 262).t()}, "scale_a", "stride 262"),
                ({"scale_b": scales("mxfp8", 2, 128, 8)}, "scale_b", "3"),
                ({"scale_b": scales("mxfp8", 2, 1020)}, "scale_b", "1020"),
                ({"scale_b": scales("mxfp8", 2, 1024).view(torch.uint8)}, "scale_b", "uint8"),
                ({"offs": OFFS[:1]}, "b", "2"),
            ]
        ),
        *(
            ("mxfp8", OF_SUMS, *case)
            for case in [
                ({"scale_a": scales("mxfp8", 16, 10)}, "scale_a", "16"),
                ({"scale_a": scales("mxfp8", 128, 8)}, "scale_a", "8"),
                ({"scale_b": scales("mxfp8", 128, 2)}, "scale_b", "2"),
            ]
        ),
        ("mxfp8_rowmajor", OF_ROWS, {"scale_a": scales("mxfp8", 6, 4)}, "scale_a", "4"),
        ("mxfp8_rowmajor", OF_ROWS, {"scale_b": scales("mxfp8", 2, 16)}, "scale_b", "2"),
        ("mxfp8_rowmajor", OF_SUMS, {"scale_a": scales("mxfp8", 16, 1)}, "scale_a", "1"),
        ("mxfp8_rowmajor", OF_SUMS, {"scale_b": torch.ones(48, 2)}, "scale_b", "float32"),
    ],
)
def test_errors(fmt, problem, changed, argument, got, device):
    changed = dict(zip(changed, on(device, list(changed.values())), strict=True))
    args = dict(zip(OPERANDS, on(device, problem[fmt]), strict=True))
    kwargs = {name: value for name, value in changed.items() if name not in args}
    check_error(
        "scaled_grouped_mm",
        list((args | {n: changed[n] for n in changed if n in args}).values()),
        argument,
        got,
        **kwargs,
    )


@pytest.mark.parametrize("argument", ["b", "scale_a", "scale_b", "offs"])
def test_error_other_device(argument, device):
    other = "cpu" if device == "cuda" else "meta"
    args = on(device, OF_ROWS["rowwise"])
    place = OPERANDS.index(argument)
    args[place] = on(other, [OF_ROWS["rowwise"][place]])[0]
    check_error("scaled_grouped_mm", args, argument, other)


@pytest.mark.parametrize("argument", ["scale_a", "scale_b"])
def test_error_for_a_gradient(argument, device):
    args = on(device, OF_ROWS["rowwise"])
    args[OPERANDS.index(argument)].requires_grad_()
    for op in (scaled_grouped_mm, torch.ops.moe_fp8.scaled_grouped_mm):
        with pytest.raises(RuntimeError, match=f"^scaled_grouped_mm: {argument} must not ask for a gradient"):
            op(*args)
