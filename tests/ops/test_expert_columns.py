"""take_expert_columns and spread_expert_columns: byte equality with the reference."""

from __future__ import annotations

import pytest
import torch
from derivatives import SPELLINGS, check_no_tangent
from helpers import (
    INPUT_DTYPES,
    INT32_MAX,
    INT32_MIN,
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
from moe_fp8_ext.ops import sort_tokens, spread_expert_columns, take_expert_columns

Routing = tuple[Tensor, Tensor, Tensor]


def routing(t: int, top_k: int, e: int, device: str = "cpu", seed: int = 0) -> Routing:
    """The permutation, ends and inverse of ids that drop some slots and repeat some experts of a token."""
    generator = torch.Generator().manual_seed(seed)
    return sort_tokens(torch.randint(-1, e, (t, top_k), generator=generator).to(device), e)


def scores_for(inverse: Tensor) -> Tensor:
    return wide(*inverse.shape, dtype=torch.float32, seed=5).to(inverse.device)


def check(x: Tensor, y: Tensor, of: Routing, top_k: int) -> None:
    permutation, offs, inverse = of
    what = f"{short(x.dtype)} {short(x.shape)} {short(inverse.shape)}"
    args = x, offs, permutation, top_k
    assert_same(take_expert_columns(*args), reference.take_expert_columns(*args), what)
    for scores in (None, scores_for(inverse)):
        args = y, offs, inverse, scores
        assert_same(spread_expert_columns(*args), reference.spread_expert_columns(*args), what)


@pytest.mark.parametrize(
    *pairs(dtype=INPUT_DTYPES, t=[0, 1, 31], top_k=[1, 2, 5, 70], e=[1, 3, 40], r=[0, 1, 8, 16, 67]), ids=short
)
def test_pairs(dtype, t, top_k, e, r, device):
    x, y = wide(t, e * r, dtype=dtype, device=device), wide(t * top_k, r, dtype=dtype, device=device)
    check(x, y, routing(t, top_k, e, device), top_k)


def test_edges(device):
    x, y, of = wide(20, 5 * 16, device=device), wide(60, 16, device=device), routing(20, 3, 5, device)
    for (_, x_view), (_, y_view) in zip(strided_2d(x), strided_2d(y), strict=True):
        check(x_view, y_view, of, 3)
    for elements in (1, 2, 4, 8):
        check(misaligned(x, elements), misaligned(y, elements), of, 3)
    for offs in corrupt_offs(60, device):
        e = len(offs)
        check(wide(20, e * 16, device=device), y, (of[0], offs, of[2]), 3)
    rows = [-1, 60, INT32_MAX, INT32_MIN, 3, 3, *range(54)]
    corrupt = torch.tensor(rows, dtype=torch.int32, device=device)
    check(x, y, (corrupt, of[1], corrupt.view(20, 3)), 3)


def test_rows_without_a_slot_or_a_group_are_not_read(device):
    permutation, offs, inverse = sort_tokens(torch.tensor([[0, -1], [-1, 1]], device=device), 2)
    x, y = torch.full((2, 6), torch.nan, device=device), torch.full((4, 3), torch.nan, device=device)
    y[:2] = 1
    scores = torch.tensor([[2.0, torch.nan], [torch.nan, 3.0]], device=device)
    spread = spread_expert_columns(y, offs, inverse, scores).cpu()
    assert spread.tolist() == [[2.0] * 3 + [0.0] * 3, [0.0] * 3 + [3.0] * 3]
    x[0, :3], x[1, 3:] = 4, 5
    taken = take_expert_columns(x, offs, permutation, 2).cpu()
    assert taken.tolist() == [[4.0] * 3, [5.0] * 3, [0.0] * 3, [0.0] * 3]


def test_each_undoes_the_other(device):
    """Where no token has an expert twice, taking what was spread gives the rows of all slots."""
    ids = torch.rand(30, 9, device=device).topk(4).indices
    permutation, offs, inverse = sort_tokens(ids, 9)
    y = wide(120, 16, device=device)
    assert_same(take_expert_columns(spread_expert_columns(y, offs, inverse), offs, permutation, 4), y)


def both(x: Tensor, y: Tensor, permutation: Tensor, offs: Tensor, inverse: Tensor, scores: Tensor) -> list[Tensor]:
    taken = take_expert_columns(x, offs, permutation, inverse.shape[1])
    return [taken, spread_expert_columns(y, offs, inverse, scores)]


def arguments(t: int, device: str = "cpu", seed: int = 0) -> list[Tensor]:
    of = routing(t, 3, 5, device, seed)
    return [wide(t, 80, device=device, seed=seed), wide(3 * t, 16, device=device), *of, scores_for(of[2])]


def test_deterministic(device):
    check_deterministic(both, arguments(300, device))


def test_compiles_with_dynamic_rows(device):
    check_compiled(both, [arguments(t, device) for t in (50, 66, 131)], device, dynamic=(0, 1, 2, 4, 5))


def test_cuda_graph(gpu):
    check_cuda_graph(both, *(arguments(700, gpu, seed) for seed in (0, 1)))


def test_second_gpu(second_gpu):
    check_second_gpu(both, arguments(700), second_gpu)


def test_opcheck(device):
    x, y, permutation, offs, inverse, scores = arguments(37, device)
    check_opcheck("take_expert_columns", [x, offs, permutation, 3])
    check_opcheck("spread_expert_columns", [y, offs, inverse, scores])


@pytest.mark.parametrize("spelling", SPELLINGS, ids=SPELLINGS.get)
def test_derivatives_that_there_are_not(spelling):
    x, y, permutation, offs, inverse, scores = arguments(10)
    check_no_tangent(lambda x: spelling.take_expert_columns(x, offs, permutation, 3), x.float())
    check_no_tangent(lambda y: spelling.spread_expert_columns(y, offs, inverse, scores), y.float())


X, Y, OFFS = torch.zeros(3, 8), torch.zeros(6, 4), torch.zeros(2, dtype=torch.int32)
INDICES, INVERSE = torch.zeros(6, dtype=torch.int32), torch.zeros(3, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("op", "args", "argument", "got"),
    [
        ("take_expert_columns", [X.double(), OFFS, INDICES, 2], "x", "float64"),
        ("take_expert_columns", [X[:, :7], OFFS, INDICES, 2], "x", "7"),
        ("take_expert_columns", [X, OFFS[:0], INDICES, 2], "x", "8"),
        ("take_expert_columns", [X, OFFS.long(), INDICES, 2], "offs", "int64"),
        ("take_expert_columns", [X, OFFS, INDICES.long(), 2], "indices", "int64"),
        ("take_expert_columns", [X, OFFS, INDICES, 0], "top_k", "0"),
        ("spread_expert_columns", [Y.double(), OFFS, INVERSE, None], "y", "float64"),
        ("spread_expert_columns", [Y, OFFS.long(), INVERSE, None], "offs", "int64"),
        ("spread_expert_columns", [Y, OFFS, INVERSE.t(), None], "inverse", "stride"),
        ("spread_expert_columns", [Y, OFFS, INVERSE, torch.zeros(3, 2).half()], "topk_scores", "float16"),
        ("spread_expert_columns", [Y, OFFS, INVERSE, torch.zeros(3, 1)], "topk_scores", "1"),
    ],
)
def test_errors(op, args, argument, got, device):
    check_error(op, on(device, args), argument, got)
