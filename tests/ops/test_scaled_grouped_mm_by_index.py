"""scaled_grouped_mm of rows by index equals the product of rows that permute_quantized moves, byte for byte."""

from __future__ import annotations

import random

import pytest
import torch
from gemm_problem import FORMATS, check_exact
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
    corrupt_offs,
    group_offs,
    on,
    short,
    slot_indices,
)
from torch import Tensor

from moe_fp8_ext.ops import permute_quantized, quantize_rows, quantize_weight, scaled_grouped_mm

E4M3 = torch.float8_e4m3fn


def problem(
    fmt: str, t: int, k: int, n: int, offs: Tensor, top_k: int, device: str = "cpu", dtype: torch.dtype = E4M3
) -> tuple[list[object], dict[str, object]]:
    """Rows hold small integers and scales are powers of two, so every sum of products is exact."""
    rounding = "floor" if fmt.startswith("mxfp8") else "pow2"
    x = torch.randint(-1, 2, (t, k)).bfloat16()
    w = torch.randint(-1, 2, (len(offs), n, k)).bfloat16()
    q, scale = quantize_rows(x, fmt, dtype=dtype, rounding=rounding)
    b, scale_b, *_ = quantize_weight(w, fmt, dtype=E4M3, rounding=rounding)
    if fmt == "blockwise":
        scale_b = scale_b.mT
    indices = slot_indices(t, top_k, int(offs[-1]) + 7 if len(offs) else 7)
    args = on(device, [q, b.mT, scale, scale_b, fmt, offs])
    return args, {"indices": indices.to(device), "top_k": top_k}


def moved(args: list[object], indices: Tensor, top_k: int) -> list[object]:
    a, b, scale_a, scale_b, fmt, offs = args
    a, scale_a = permute_quantized(a, scale_a, fmt, indices, top_k, offs=offs)
    return [a, b, scale_a, scale_b, fmt, offs]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("top_k", [1, 3])
def test_is_the_product_of_moved_rows(top_k, fmt, device):
    """Tiles are whole or cut short, several of them end a group, and sums end within a pipeline stage."""
    for t, k, n, sizes in (
        (300, 272, 144, [0, 1, 127, 128, 129, 256, 64]),
        (90, 1040, 272, [200, 0, 90]),
        (40, 37, 33, [20, 13]),
        (500, 128, 640, [400, 300]),
    ):
        offs = torch.tensor(sizes).cumsum(0, dtype=torch.int32)
        args, rows = problem(fmt, t, k, n, offs, top_k, device)
        for how in ({}, {"out_dtype": torch.float32}, {"use_fast_accum": False}):
            out = check_exact(args, **rows, **how)
            assert_same(out, scaled_grouped_mm(*moved(args, **rows), **how))
            assert not out[(rows["indices"] < 0) | (rows["indices"] >= t * top_k)].any()


def test_more_columns_than_hopper_takes_by_index(device):
    args, rows = problem("rowwise", 60, 128, 2576, group_offs("zipf", 150, 3), 3, device)
    assert_same(check_exact(args, **rows), scaled_grouped_mm(*moved(args, **rows)))


@pytest.mark.parametrize("seed", range(12))
def test_random_problems(seed, device):
    r = random.Random(seed)
    e, top_k, t = r.randint(1, 40), r.randint(1, 8), r.randint(1, 400)
    k, n = 16 * r.randint(1, 80), 16 * r.randint(1, 60)
    offs = group_offs(r.choice(LAYOUTS), t * top_k * 3 // 4, e)
    args, rows = problem(r.choice(("rowwise", "blockwise")), t, k, n, offs, top_k, device)
    check_exact(args, **rows)


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=short)
@pytest.mark.parametrize("fmt", FORMATS)
def test_dtypes(fmt, dtype, device):
    args, rows = problem(fmt, 60, 160, 48, group_offs("zipf", 150, 3), 2, device, dtype)
    check_exact(args, **rows)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("t", "k", "n", "e"), [(0, 32, 16, 2), (5, 0, 16, 2), (5, 16, 0, 2), (5, 16, 16, 0)])
def test_zero_sizes(t, k, n, e, fmt, device):
    args, rows = problem(fmt, t, k, n, group_offs("uniform", 2 * t, e), 2, device)
    check_exact(args, **rows)


@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_that_lie_apart(fmt, device):
    args, rows = problem(fmt, 60, 64, 48, group_offs("zipf", 100, 3), 2, device)
    wide = torch.zeros(60, 96, dtype=torch.uint8, device=device).view(E4M3)
    wide[:, :64] = args[0]
    check_exact([wide[:, :64], *args[1:]], **rows)


def test_nan_stays_in_the_rows_of_its_token(device):
    args, rows = problem("rowwise", 50, 64, 32, group_offs("uniform", 140, 3), 3, device)
    args[0].view(torch.uint8)[7] = 0x7F
    out = scaled_grouped_mm(*args, **rows)
    of_token = (rows["indices"] >= 21) & (rows["indices"] < 24)
    of_token[int(args[5][-1]) :] = False
    assert of_token.any()
    assert torch.equal(out.isnan().all(1), of_token)
    assert torch.equal(out.isnan().any(1), of_token)


@pytest.mark.parametrize("fmt", FORMATS)
def test_corrupt_offsets_stay_in_bounds(fmt, device):
    args, rows = problem(fmt, 30, 160, 32, group_offs("uniform", 48, 3), 2, device)
    for offs in corrupt_offs(len(rows["indices"]), device):
        b = args[1][:1].expand(len(offs), -1, -1)
        scale_b = args[3][:1].expand(len(offs), *args[3].shape[1:])
        scale_b = scale_b if fmt == "blockwise" else scale_b.contiguous()
        check_exact([args[0], b, args[2], scale_b, fmt, offs], **rows)


def by_index(a: Tensor, b: Tensor, scale_a: Tensor, *rest: object) -> Tensor:
    scale_b, fmt, offs, indices, top_k = rest
    return scaled_grouped_mm(a, b, scale_a, scale_b, fmt, offs, indices=indices, top_k=top_k)


def flat(fmt: str, t: int, device: str) -> list[object]:
    args, rows = problem(fmt, t, 64, 48, group_offs("zipf", 2 * t, 3), 3, device)
    return [*args, *rows.values()]


@pytest.mark.parametrize("fmt", FORMATS)
def test_opcheck_deterministic_compiled(fmt, device):
    args, rows = problem(fmt, 40, 64, 48, group_offs("zipf", 90, 3), 3, device)
    check_opcheck("scaled_grouped_mm", args, **rows)
    check_deterministic(by_index, flat(fmt, 40, device))
    check_compiled(by_index, [flat(fmt, t, device) for t in (40, 64, 132)], device, dynamic=(0, 2, 6))


@pytest.mark.parametrize("fmt", FORMATS)
def test_cuda_graph(fmt, gpu):
    check_cuda_graph(by_index, flat(fmt, 40, gpu), flat(fmt, 40, gpu))


@pytest.mark.parametrize("fmt", FORMATS)
def test_second_gpu(fmt, second_gpu):
    check_second_gpu(lambda *args: [by_index(*args)], flat(fmt, 40, "cpu"), second_gpu)


@pytest.mark.parametrize(
    ("changed", "argument", "got"),
    [
        ({"top_k": None}, "top_k", "None"),
        ({"indices": None}, "indices", "None"),
        ({"top_k": 0}, "top_k", "0"),
        ({"indices": torch.zeros(4, dtype=torch.int64)}, "indices", "int64"),
        ({"indices": torch.zeros(4, 1, dtype=torch.int32)}, "indices", "2"),
        ({"indices": torch.zeros(8, dtype=torch.int32)[::2]}, "indices", "stride 2"),
        ({"scale_a": torch.ones(9)}, "scale_a", "9"),
    ],
)
def test_errors(changed, argument, got, device):
    args, rows = problem("rowwise", 10, 32, 16, group_offs("uniform", 12, 3), 2, device)
    if "scale_a" in changed:
        args[2] = changed["scale_a"].to(device)
    else:
        rows |= on(device, changed)
    check_error("scaled_grouped_mm", args, argument, got, **rows)


def test_error_other_device(device):
    args, rows = problem("rowwise", 10, 32, 16, group_offs("uniform", 12, 3), 2, device)
    other = "cpu" if device == "cuda" else "meta"
    check_error("scaled_grouped_mm", args, "indices", other, **{**rows, "indices": rows["indices"].to(other)})


def test_error_for_sums(device):
    args, rows = problem("rowwise", 10, 32, 16, group_offs("uniform", 12, 3), 2, device)
    check_error("scaled_grouped_mm", [args[0], args[1][0], *args[2:]], "indices", "a tensor", **rows)


def test_error_of_indices_comes_before_that_of_sizes(device):
    """A call has two mistakes. Eager and fake mode report the same one."""
    args, rows = problem("rowwise", 10, 32, 16, group_offs("uniform", 12, 3), 2, device)
    short = args[1][:, :16]
    check_error(
        "scaled_grouped_mm",
        [args[0], short, *args[2:]],
        "indices",
        "torch.int64",
        **rows | {"indices": rows["indices"].long()},
    )
