"""sum_groups, and the same sums in quantize_activated_backward: the rows of a group are added in one order."""

from __future__ import annotations

import math

import pytest
import torch
from activation_checks import h_for
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
from moe_fp8_ext.ops import sum_groups
from moe_fp8_ext.reference.numerics import int32


def check(x: Tensor, offs: Tensor, **how: object) -> None:
    what = f"{short(x.dtype)} {short(x.shape)} {sorted(how)}"
    assert_same(sum_groups(x, offs, **how), reference.sum_groups(x, offs, **how), what)


def slots_of(x: Tensor, p: int, top_k: int) -> dict[str, object]:
    """Rows taken by index, some of which are no slots, and the scores of slots."""
    make = torch.Generator().manual_seed(p)
    indices = torch.randint(-1, len(x) * top_k + 1, (p,), generator=make, dtype=torch.int32)
    scores = torch.randn(len(x) * top_k, generator=make)
    return {"indices": indices.to(x.device), "top_k": top_k, "scores": scores.to(x.device)}


@pytest.mark.parametrize(
    *pairs(
        dtype=INPUT_DTYPES,
        p=[0, 1, 131, 1100],
        n=[0, 1, 8, 67, 520, 2056],
        ends=[[131], [0, 16, 37, 37, 120], [], [0, 0], [1, 5, 70, 1099], list(range(100))],
        offset=[0, 1, 8],
        by=["ones", "rows", "slots"],
    ),
    ids=short,
)
def test_pairs(dtype, p, n, ends, offset, by, device):
    """Groups are empty, have one row, and end before, at and behind the ends of all partial sums."""
    x, how = misaligned(h_for("silu", p, n, dtype, device), offset), {}
    if by == "rows":
        how["scores"] = torch.rand(p, device=device)
    elif by == "slots":
        how = slots_of(x, 700 if p else 0, 3)
    check(x, int32(ends, device), **how)


def test_edges(device):
    x = h_for("silu", 600, 64, device=device)
    for _, view in strided_2d(x):
        check(view, int32([9, 9, 400], device))
    for offs in corrupt_offs(600, device):
        check(x, offs)
    x[1, 5], x[2, 6], x[3, 7], x[4, 8], x[599, 9] = math.nan, math.inf, -math.inf, -0.0, math.nan
    x[10:, 6], x[300:, 7], x[:9, 10] = 0, math.inf, -0.0
    check(x, int32([9, 9, 400], device))
    got = sum_groups(x, int32([1, 9, 9, 400], device))
    assert got[0].isfinite().all() and (got[2] == 0).all() and not got[2].signbit().any()
    assert got[1, 5].isnan() and got[1, 6] == math.inf and got[3, 7] == math.inf and got[:, 9].isfinite().all()
    scores = torch.rand(600, device=device)
    scores[7] = math.inf
    check(x, int32([9, 9, 400], device), scores=scores)


@pytest.mark.parametrize("scored", [False, True])
def test_error_of_a_large_group(scored, device):
    """A term is part of 8 additions within 256 rows and, of P rows, of P / 256 more: each rounds by 2^-24 at most. A
    score rounds its product once more."""
    p = 60_000
    x, scores = h_for("silu", p, 24, device=device), torch.rand(p, device=device)
    got = sum_groups(x, int32([5, p], device), scores=scores if scored else None).double()
    terms = x.double() * scores.double()[:, None] if scored else x.double()
    want = torch.stack([terms[:5].sum(0), terms[5:].sum(0)])
    roundings = 8 + math.ceil(p / 256) + scored
    bound = torch.stack([terms[:5].abs().sum(0), terms[5:].abs().sum(0)]) * ((1 + 2**-24) ** roundings - 1)
    assert ((got - want).abs() <= bound).all()
    # In a row, all ones would be lost, because 2^24 + 1 rounds to 2^24. Here the first four rows lose one.
    lost = torch.ones(300, 1, device=device)
    lost[0] = 2**24
    assert sum_groups(lost, int32([300], device)).item() == 2**24 + 298


def every_kind(x: Tensor, offs: Tensor, scores: Tensor) -> list[Tensor]:
    indices = (torch.arange(len(x), device=x.device, dtype=torch.int32) * 7) % len(x)
    by_slot = sum_groups(x, offs, scores=scores, indices=indices, top_k=1)
    return [sum_groups(x, offs), sum_groups(x, offs, scores=scores), by_slot]


def arguments(p: int, device: str = "cpu", seed: int = 0) -> list[Tensor]:
    x = h_for("silu", p, 256, device=device).roll(seed)
    return [x, int32([p // 3, p // 2, p - 5], device), torch.linspace(0, 1, p, device=device)]


def test_deterministic(device):
    check_deterministic(every_kind, arguments(3000, device))


def test_compiles_with_dynamic_rows(device):
    check_compiled(every_kind, [arguments(p, device) for p in (50, 66, 131)], device, dynamic=(0, 2))


def test_cuda_graph(gpu):
    check_cuda_graph(every_kind, *(arguments(700, gpu, seed) for seed in (0, 1)))


def test_second_gpu(second_gpu):
    check_second_gpu(every_kind, arguments(700), second_gpu)


def test_opcheck(device):
    x, offs, scores = arguments(37, device)
    check_opcheck("sum_groups", [x, offs])
    check_opcheck("sum_groups", [x, offs], scores=scores)
    check_opcheck("sum_groups", [x, offs], **slots_of(x, 40, 2))


@pytest.mark.parametrize("spelling", SPELLINGS, ids=SPELLINGS.get)
def test_derivatives_that_there_are_not(spelling):
    check_no_tangent(lambda x: spelling.sum_groups(x, int32([4], "cpu")), torch.randn(10, 8))


X, OFFS, SCORES = torch.zeros(6, 8), torch.zeros(2, dtype=torch.int32), torch.zeros(6)
INDICES = torch.zeros(6, dtype=torch.int32)


@pytest.mark.parametrize(
    ("args", "how", "argument", "got"),
    [
        ([X.double(), OFFS], {}, "x", "float64"),
        ([X[0], OFFS], {}, "x", "1"),
        ([X, OFFS.long()], {}, "offs", "int64"),
        ([X, OFFS], {"scores": SCORES[:5]}, "scores", "5"),
        ([X, OFFS], {"scores": SCORES.half()}, "scores", "float16"),
        ([X, OFFS], {"scores": SCORES, "indices": INDICES, "top_k": 2}, "scores", "6"),
        ([X, OFFS], {"indices": INDICES}, "top_k", "None"),
        ([X, OFFS], {"top_k": 2}, "indices", "None"),
        ([X, OFFS], {"indices": INDICES.long(), "top_k": 2}, "indices", "int64"),
        ([X, OFFS], {"indices": INDICES, "top_k": 0}, "top_k", "0"),
    ],
)
def test_errors(args, how, argument, got, device):
    check_error("sum_groups", on(device, args), argument, got, **on(device, how))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_rows_with_the_padding_of_partial_sums(device):
    """Positions of partial sums on a GPU are 32-bit numbers."""
    x, offs = torch.zeros(2**31 - 1024, 0, device=device), torch.zeros(64, dtype=torch.int32, device=device)
    with pytest.raises(RuntimeError, match="^sum_groups: x must have at most .* rows with padding, got 2147486720$"):
        sum_groups(x, offs)
