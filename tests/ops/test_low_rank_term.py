"""scaled_grouped_mm with a low-rank term, which an adapter of the weights adds to a 2D x 3D product."""

from __future__ import annotations

import pytest
import torch
from gemm_problem import FORMATS, exact_2d2d, exact_2d3d, scales, ternary
from helpers import (
    LAYOUTS,
    as_bytes,
    assert_same,
    check_compiled,
    check_cuda_graph,
    check_error,
    check_opcheck,
    check_second_gpu,
    corrupt_offs,
    group_offs,
    misaligned,
)
from torch import Tensor

from moe_fp8_ext import reference
from moe_fp8_ext.ops import quantize_rows, scaled_grouped_mm

SHAPES = (200, 64, 48, 5), (131, 100, 33, 4), (300, 272, 144, 1), (520, 400, 272, 3)  # M, K, N, E
RANKS = (1, 4, 8, 16, 40, 136)


def factors(args: list[object], rank: int, rows: int | None = None) -> dict[str, Tensor]:
    """Factors of small integers, so that sums with the product are exact in float32."""
    a, b, *_ = args
    (e, _, n), rows = b.shape, a.shape[0] if rows is None else rows
    made = ternary(rows, rank, dtype=torch.bfloat16), ternary(e, n, rank, dtype=torch.bfloat16).mT
    return dict(zip(("low_rank_a", "low_rank_b"), (m.to(a.device) for m in made), strict=True))


def check(args: list[object], of: dict[str, Tensor], **how: object) -> Tensor:
    """Compares bytes with the reference, in float32 and in bfloat16, and returns the result in bfloat16.

    GEMMs that do not add the term themselves round the product first, and the sum again.
    """
    want = reference.scaled_grouped_mm(*args, **of, **how, out_dtype=torch.float32)
    assert_same(scaled_grouped_mm(*args, **of, **how, out_dtype=torch.float32) + 0.0, want + 0.0)  # -0 becomes +0
    got, once = scaled_grouped_mm(*args, **of, **how) + 0.0, want.bfloat16() + 0.0
    if got.is_cuda and not torch.equal(as_bytes(got), as_bytes(once)):
        product = reference.scaled_grouped_mm(*args, **how, out_dtype=torch.float32)
        once = (product.bfloat16().float() + (want - product)).bfloat16() + 0.0
    assert_same(got, once)
    return got


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_is_exact_on_integers(layout, fmt, device):
    for i, (m, k, n, e) in enumerate(SHAPES):
        offs = group_offs(layout, m, e)
        for rank in (RANKS[i], RANKS[-1 - i]):
            args = exact_2d3d(fmt, m, k, n, offs, device)
            out = check(args, factors(args, rank), use_fast_accum=i % 2 == 0)
            assert not out[int(offs[-1]) :].any()


@pytest.mark.parametrize("shape", [(0, 32, 16, 2), (5, 0, 16, 2), (5, 16, 0, 2), (5, 16, 16, 0), (0, 0, 0, 0)])
@pytest.mark.parametrize("fmt", FORMATS)
def test_zero_sizes(fmt, shape, device):
    m, _, _, e = shape
    args = exact_2d3d(fmt, *shape[:3], group_offs("uniform", m, e), device)
    check(args, factors(args, 8))
    args = exact_2d3d(fmt, 20, 32, 16, group_offs("uniform", 20, 3), device)
    of = factors(args, 0)
    assert_same(scaled_grouped_mm(*args, **of), scaled_grouped_mm(*args))


def test_the_sum_is_rounded_once(device):
    """A product of "blockwise" and its term round to other values apart than together: 1 + 2^-8, twice."""
    if device != "cpu" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only Hopper's GEMM and the CPU's add the term before they round")
    a, b = torch.ones(16, 128), torch.zeros(1, 16, 128)
    b[..., 0] = 1
    scale_a, scale_b = torch.full((1, 16), 1 + 2**-8).t(), torch.ones(1, 1, 1)
    offs = torch.tensor([16], dtype=torch.int32)
    e4m3 = torch.float8_e4m3fn
    args = [a.to(e4m3), b.to(e4m3).mT, scale_a, scale_b, "blockwise", offs]
    args = [x.to(device) if isinstance(x, Tensor) else x for x in args]
    args[1], args[2] = args[1].mT.contiguous().mT, args[2].t().contiguous().t()
    of = {"low_rank_a": torch.full((16, 4), 2.0**-6), "low_rank_b": torch.full((1, 16, 4), 2.0**-4).mT}
    of = {name: m.bfloat16().to(device) for name, m in of.items()}
    assert (
        scaled_grouped_mm(*args, **of) == 1 + 2**-7
    ).all()  # 1 + 2^-8 alone is rounded to 1, and 2^-8 is added to it
    assert (scaled_grouped_mm(*args) == 1).all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_by_index(fmt, device):
    m, p, top_k, e = 40, 100, 3, 4
    args = exact_2d3d(fmt, m, 64, 48, group_offs("tail_rows", p, e), device)
    args[2] = scales(fmt, *quantize_rows(torch.zeros(m, 64), fmt)[1].shape).to(device)
    indices = torch.randint(-1, m * top_k, (p,), dtype=torch.int32, device=device)
    check(args, factors(args, 8, rows=p), indices=indices, top_k=top_k)


def test_nothing_beyond_the_last_group_is_read(device):
    for fmt in FORMATS:
        args = exact_2d3d(fmt, 64, 32, 16, group_offs("tail_rows", 64, 3), device)
        of = factors(args, 8)
        of["low_rank_a"][int(args[-1][-1]) :] = float("nan")
        assert check(args, of).isfinite().all()


def test_factors_at_any_address(device):
    """Hopper's kernel loads four elements at a time; other addresses and strides take another kernel."""
    args = exact_2d3d("blockwise", 200, 128, 48, group_offs("zipf", 200, 3), device)
    of = factors(args, 8)
    want = scaled_grouped_mm(*args, **of)
    wide = torch.zeros(200, 11, dtype=torch.bfloat16, device=device)
    wide[:, 1:9] = of["low_rank_a"]
    assert_same(scaled_grouped_mm(*args, **of | {"low_rank_a": wide[:, 1:9]}), want)
    moved = misaligned(of["low_rank_b"].mT.contiguous(), 1).mT
    assert_same(scaled_grouped_mm(*args, **of | {"low_rank_b": moved}), want)


def test_corrupt_offsets(device):
    for offs in corrupt_offs(5):
        args = exact_2d3d("blockwise", 64, 128, 32, offs, device)
        check(args, factors(args, 8))


def problem(fmt: str, device: str) -> list[object]:
    args = exact_2d3d(fmt, 96, 128, 32, group_offs("uniform", 96, 3), device)
    return [*args, None, None, 1, None, True, None, False, *factors(args, 8).values()]


@pytest.mark.parametrize("fmt", FORMATS)
def test_opcheck(fmt, device):
    check_opcheck("scaled_grouped_mm", problem(fmt, device))


@pytest.mark.parametrize("fmt", ["rowwise", "blockwise"])
def test_compiles(fmt, device):
    check_compiled(torch.ops.moe_fp8.scaled_grouped_mm, [problem(fmt, device)], device, dynamic=())


@pytest.mark.parametrize("fmt", FORMATS)
def test_cuda_graph(fmt, gpu):
    check_cuda_graph(torch.ops.moe_fp8.scaled_grouped_mm, problem(fmt, gpu), problem(fmt, gpu))


@pytest.mark.parametrize("fmt", FORMATS)
def test_second_gpu(fmt, second_gpu):
    call = torch.ops.moe_fp8.scaled_grouped_mm
    check_second_gpu(lambda *args: [call(*args)], problem(fmt, "cpu"), second_gpu)


ARGS = exact_2d3d("blockwise", 60, 128, 32, group_offs("uniform", 60, 3))
A, B = factors(ARGS, 8).values()


@pytest.mark.parametrize(
    ("changed", "argument", "got"),
    [
        ({"low_rank_a": A.float()}, "low_rank_a", "float32"),
        ({"low_rank_a": A[:50]}, "low_rank_a", "50"),
        ({"low_rank_a": A[0]}, "low_rank_a", "1"),
        ({"low_rank_a": A.t().contiguous().t()}, "low_rank_a", "stride 60"),
        ({"low_rank_a": A.to("meta")}, "low_rank_a", "meta"),
        ({"low_rank_a": A[:, :4].contiguous()}, "low_rank_b", "8"),
        ({"low_rank_b": B.half()}, "low_rank_b", "float16"),
        ({"low_rank_b": B[:2]}, "low_rank_b", "2"),
        ({"low_rank_b": B[..., :16]}, "low_rank_b", "16"),
        ({"low_rank_b": B.contiguous()}, "low_rank_b", "stride 32"),
        ({"low_rank_b": None}, "low_rank_b", "None"),
        ({"low_rank_a": None}, "low_rank_a", "None"),
    ],
)
def test_errors(changed, argument, got):
    check_error("scaled_grouped_mm", ARGS, argument, got, **{"low_rank_a": A, "low_rank_b": B} | changed)


def test_no_term_of_a_sum_over_tokens():
    args = exact_2d2d("blockwise", 256, 32, 16, torch.tensor([128, 256], dtype=torch.int32))
    a, b = torch.zeros(16, 8, dtype=torch.bfloat16), torch.zeros(2, 32, 8, dtype=torch.bfloat16).mT
    check_error("scaled_grouped_mm", args, "low_rank_a", "a tensor", low_rank_a=a, low_rank_b=b)
