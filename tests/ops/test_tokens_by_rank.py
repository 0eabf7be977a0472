"""tokens_by_rank: the ranks that each token goes to, and the number of tokens and slots for each rank."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    assert_same,
    check_compiled,
    check_cuda_graph,
    check_deterministic,
    check_error,
    check_opcheck,
    check_second_gpu,
    check_two_streams,
    misaligned,
    on,
    short,
)
from routing_problem import ID_DTYPES, random_ids
from torch import Tensor

from moe_fp8_ext import reference
from moe_fp8_ext.ops import sort_tokens, tokens_by_rank


def check(ids: Tensor, experts: int, ranks: int) -> None:
    want = reference.tokens_by_rank(ids, experts, ranks)
    assert_same(tokens_by_rank(ids, experts, ranks), want, f"{short(ids.dtype)} {short(ids.shape)} {experts} {ranks}")


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 100, 256, 257, 1024])
def test_ranks(ranks, device):
    for of_rank, dtype in zip((1, 7, 1024), (*ID_DTYPES, torch.int64), strict=True):
        for shape in ((1, 1), (5000, 8), (77, 3)):
            check(random_ids(*shape, experts=ranks * of_rank, dtype=dtype, device=device), ranks * of_rank, ranks)


def test_routings(device):
    """Tokens go to one rank, to the ranks in turn, to every rank, or to no expert."""
    slots = torch.arange(24_000, device=device).view(3000, 8)
    for ids in (slots * 0 + 3, slots % 64, slots % 8 * 8, slots // 375, slots * 0 - 1, slots + 64):
        for dtype in ID_DTYPES:
            check(ids.to(dtype), 64, 8)


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0, 0)], ids=short)
def test_zero_sizes(shape, device):
    for dtype in ID_DTYPES:
        check(torch.empty(shape, dtype=dtype, device=device), 6, 3)


def test_ids_that_int32_cannot_hold(device):
    ids = torch.tensor([[2**32, 2**32 + 1], [-(2**63), 2**63 - 1], [1, -(2**32)], [0, 2**31]], device=device)
    check(ids, 2, 2)


def test_strides_and_alignment(device):
    for dtype in ID_DTYPES:
        ids = random_ids(500, 16, experts=9, dtype=dtype, device=device)
        for view in (ids[:, :8], ids[:, 3:4], ids[::3], ids[::2, 5:], ids[7:8, 1:], ids[:1].expand(500, 16)):
            check(view, 9, 3)
        check(misaligned(ids), 9, 3)


def test_sorted_by_rank(device):
    """Each rank gets as many rows as counts say, and each row's token has an expert there."""
    ids = random_ids(300, 4, experts=12, device=device)
    by_rank, counts = tokens_by_rank(ids, 12, 3)
    permutation, offs, _ = sort_tokens(by_rank, 3)
    rows = offs.diff(prepend=offs[:1] * 0)
    assert torch.equal(rows.long(), counts[:, 0])
    ranks = torch.arange(3, device=device).repeat_interleave(counts[:, 0])
    assert (ids[permutation[: len(ranks)].long() // 3] // 4 == ranks[:, None]).any(1).all()
    assert int(counts[:, 1].sum()) == int(((ids >= 0) & (ids < 12)).sum())


def test_opcheck(device):
    for dtype in ID_DTYPES:
        check_opcheck("tokens_by_rank", [random_ids(37, 3, experts=6, dtype=dtype, device=device), 6, 2])


def test_deterministic(device):
    check_deterministic(tokens_by_rank, [random_ids(20_000, 8, experts=256, device=device), 256, 8])


def test_compiles_with_dynamic_rows(device):
    check_compiled(tokens_by_rank, [[random_ids(t, 4, experts=6, device=device), 6, 2] for t in (50, 64, 131)], device)


def test_cuda_graph(gpu):
    first, later = ([random_ids(30_000, 8, experts=256, device=gpu), 256, 8] for _ in range(2))
    check_cuda_graph(tokens_by_rank, first, later)


def test_two_streams(gpu):
    check_two_streams(tokens_by_rank, [[random_ids(30_000, 8, experts=256, device=gpu), 256, 8] for _ in range(2)])


def test_after_a_kernel_that_writes_its_ids(gpu):
    """The launch may begin before the previous kernel has ended. It reads ids only after that."""
    calls = [random_ids(30_000, 8, experts=256, device=gpu) for _ in range(4)]
    want = [tokens_by_rank(ids, 256, 8) for ids in calls]
    ids, got = torch.empty_like(calls[0]), []
    for source in calls * 5:
        ids.copy_(source)
        got.append(tokens_by_rank(ids, 256, 8))
        ids.fill_(-1)
    for i, result in enumerate(got):
        assert_same(result, want[i % len(calls)], f"call {i}")


def test_second_gpu(second_gpu):
    check_second_gpu(tokens_by_rank, [random_ids(3000, 8, experts=64), 64, 4], second_gpu)


@pytest.mark.large
def test_many_slots(big_gpu):
    ids = torch.randint(-1, 65, (40_000_001, 8), device=big_gpu, dtype=torch.int32)
    by_rank, counts = tokens_by_rank(ids, 64, 32)
    for rank in range(32):
        slots = (ids // 2 == rank).sum(1)
        assert torch.equal(by_rank[:, rank], torch.where(slots > 0, rank, -1).int())
        assert counts[rank].tolist() == [int((slots > 0).sum()), int(slots.sum())]


IDS = torch.zeros(6, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("args", "argument", "got"),
    [
        ([IDS.short(), 4, 2], "topk_ids", "int16"),
        ([IDS.float(), 4, 2], "topk_ids", "float32"),
        ([IDS[0], 4, 2], "topk_ids", "1"),
        ([IDS[None], 4, 2], "topk_ids", "3"),
        ([IDS.t(), 4, 2], "topk_ids", "stride 4"),
        ([IDS[:1, :1].expand(2**28, 8).as_strided((2**28, 8), (0, 1)), 4, 2], "topk_ids", "2147483648"),
        ([IDS[:1, :0].expand(2**30, 0), 4, 4], "topk_ids", "1073741824"),
        ([IDS, 4, 0], "num_ranks", "0"),
        ([IDS, 1025, 1025], "num_ranks", "1025"),
        ([IDS, 0, 2], "num_experts", "0"),
        ([IDS, 5, 2], "num_experts", "5"),
        ([IDS, 2050, 2], "num_experts", "2050"),
        ([IDS, -2, 2], "num_experts", "-2"),
    ],
)
def test_errors(args, argument, got, device):
    if args[0].numel() > 2**30:
        device = "cpu"
    check_error("tokens_by_rank", args if device == "cpu" else on(device, args), argument, got)
