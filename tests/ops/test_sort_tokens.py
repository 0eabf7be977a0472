"""sort_tokens: a stable sort of slots by expert, byte for byte."""

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
from hypothesis import given
from hypothesis import strategies as st
from routing_problem import ID_DTYPES, random_ids
from torch import Tensor

from moe_fp8_ext import reference
from moe_fp8_ext.ops import sort_tokens


def check(ids: Tensor, experts: int) -> None:
    want = reference.sort_tokens(ids, experts)
    assert_same(sort_tokens(ids, experts), want, f"{short(ids.dtype)} {short(ids.shape)} of {experts}")


@pytest.mark.parametrize("experts", [1, 2, 3, 8, 60, 64, 65, 256, 384, 1000, 1024])
def test_experts(experts, device):
    for dtype, shapes in zip(ID_DTYPES, (((1,), (5000,), (300, 8)), ((77,), (1, 1), (4096, 6))), strict=True):
        for shape in shapes:
            check(random_ids(*shape, experts=experts, dtype=dtype, device=device), experts)


def test_routings(device):
    """All slots have one expert, or experts in turn, in blocks or in falling order, or all slots are dropped."""
    slots = torch.arange(20_000, device=device)
    for ids in (slots * 0 + 3, slots % 16, slots // 1250, 15 - slots // 1250, slots * 0 - 1, slots + 16):
        check(ids, 16)
        check(ids.view(2500, 8).int(), 16)


@pytest.mark.parametrize("shape", [(0,), (0, 8), (8, 0), (0, 0)], ids=short)
def test_zero_sizes(shape, device):
    for dtype in ID_DTYPES:
        check(torch.empty(shape, dtype=dtype, device=device), 5)


def test_ids_that_int32_cannot_hold(device):
    ids = torch.tensor([2**32, 2**32 + 1, -(2**63), 2**63 - 1, 1, -(2**32), 0, 2**31], device=device)
    check(ids, 2)


def test_strides_and_alignment(device):
    for dtype in ID_DTYPES:
        ids = random_ids(500, 16, experts=9, dtype=dtype, device=device)
        for view in (ids[:, :8], ids[:, 3:4], ids[::3], ids[::2, 5:], ids[7:8, 1:], ids[:1].expand(500, 16)):
            check(view, 9)
        check(misaligned(ids), 9)


@given(
    ids=st.lists(st.integers(-2, 12), max_size=200),
    experts=st.integers(1, 11),
    dtype=st.sampled_from(ID_DTYPES),
)
def test_stable_and_undone_by_its_inverse(ids, experts, dtype, device):
    ids = torch.tensor(ids, dtype=dtype, device=device)
    permutation, offs, inverse = sort_tokens(ids, experts)
    kept = int(offs[-1])
    order = permutation[:kept].long()
    keys = list(zip(ids[order].tolist(), order.tolist(), strict=True))
    assert keys == sorted(keys)  # slots are sorted by expert, and by slot within an expert
    assert torch.equal(inverse[order], torch.arange(kept, dtype=torch.int32, device=device))
    assert (permutation[kept:] == -1).all()
    assert ((inverse == -1) == ((ids < 0) | (ids >= experts))).all()
    assert torch.equal(offs.diff(prepend=offs[:1] * 0).long(), torch.stack([(ids == e).sum() for e in range(experts)]))


def test_opcheck(device):
    for dtype in ID_DTYPES:
        check_opcheck("sort_tokens", [random_ids(37, 3, experts=6, dtype=dtype, device=device), 6])
    check_opcheck("sort_tokens", [random_ids(37, experts=6, device=device), 6])


def test_deterministic(device):
    check_deterministic(sort_tokens, [random_ids(20_000, 8, experts=256, device=device), 256])


def test_compiles_with_dynamic_rows(device):
    check_compiled(sort_tokens, [[random_ids(t, 4, experts=5, device=device), 5] for t in (50, 64, 131)], device)


def test_cuda_graph(gpu):
    first, later = ([random_ids(30_000, 8, experts=256, device=gpu), 256] for _ in range(2))
    check_cuda_graph(sort_tokens, first, later)


def test_two_streams(gpu):
    check_two_streams(sort_tokens, [[random_ids(30_000, 8, experts=256, device=gpu), 256] for _ in range(2)])


def test_after_a_kernel_that_writes_its_ids(gpu):
    """Both launches may begin before the previous kernel has ended. Neither may read ids before that."""
    calls = [random_ids(30_000, 8, experts=256, device=gpu) for _ in range(4)]
    want = [sort_tokens(ids, 256) for ids in calls]
    ids = torch.empty_like(calls[0])
    got = []
    for _ in range(5):
        for source in calls:
            ids.copy_(source)
            got.append(sort_tokens(ids, 256))
            ids.fill_(-1)
    for i, result in enumerate(got):
        assert_same(result, want[i % len(calls)], f"call {i}")


def test_second_gpu(second_gpu):
    check_second_gpu(sort_tokens, [random_ids(3000, 8, experts=64), 64], second_gpu)


@pytest.mark.large
def test_many_slots(big_gpu):
    ids = torch.randint(-1, 1025, (40_000_001, 8), device=big_gpu, dtype=torch.int32)
    permutation, offs, inverse = sort_tokens(ids, 1024)
    kept = int(offs[-1])
    order = permutation[:kept].long()
    sorted_ids = ids.view(-1)[order]
    assert kept == int(((ids >= 0) & (ids < 1024)).sum()) and (permutation[kept:] == -1).all()
    keys = sorted_ids.long() * ids.numel() + order
    assert (keys.diff() > 0).all()
    assert torch.equal(torch.bincount(sorted_ids, minlength=1024).cumsum(0).int(), offs)
    assert torch.equal(inverse.view(-1)[order], torch.arange(kept, dtype=torch.int32, device=big_gpu))


IDS = torch.zeros(6, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("args", "argument", "got"),
    [
        ([IDS.short(), 4], "topk_ids", "int16"),
        ([IDS.float(), 4], "topk_ids", "float32"),
        ([IDS[None], 4], "topk_ids", "3"),
        ([IDS[0, 0], 4], "topk_ids", "0"),
        ([IDS.t(), 4], "topk_ids", "stride 4"),
        ([IDS[:, 0], 4], "topk_ids", "stride 4"),
        ([IDS[:1, :1].expand(2**28, 8).as_strided((2**28, 8), (0, 1)), 4], "topk_ids", "2147483648"),
        ([IDS, 0], "num_experts", "0"),
        ([IDS, 1025], "num_experts", "1025"),
        ([IDS, -1], "num_experts", "-1"),
    ],
)
def test_errors(args, argument, got, device):
    if args[0].numel() > 2**30:
        device = "cpu"
    check_error("sort_tokens", args if device == "cpu" else on(device, args), argument, got)
