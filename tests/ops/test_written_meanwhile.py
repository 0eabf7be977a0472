"""A thread writes index tensors while an op on the CPU reads them. Ops read no number twice, so results stay in range
and fit one another, and nothing is touched out of bounds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from moe_fp8_ext import ops

TOKENS, TOP_K, EXPERTS, RANKS, FEATURES = 512, 4, 16, 4, 16
SLOTS = TOKENS * TOP_K
CALLS = 1500  # calls of each op, which take a second at most


@contextmanager
def written(least: int, most: int, *shape: int, dtype: torch.dtype = torch.int32) -> Iterator[Tensor]:
    """A tensor that a thread overwrites with random numbers all the time."""
    g = torch.Generator().manual_seed(1)
    others = [torch.randint(least, most + 1, shape, dtype=dtype, generator=g) for _ in range(7)]
    numbers, done = others[0].clone(), threading.Event()

    def write() -> None:
        while not done.is_set():
            for other in others:
                numbers.copy_(other)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield numbers
    finally:
        done.set()
        thread.join()


def within(x: Tensor, least: int, most: int) -> None:
    assert int(x.min()) >= least and int(x.max()) <= most, (x.min(), x.max())


def check_sorted(ids: Tensor) -> None:
    permutation, offs, inverse = ops.sort_tokens(ids, EXPERTS)
    within(permutation, -1, SLOTS - 1), within(inverse, -1, SLOTS - 1)
    within(offs.diff(prepend=offs[:1] * 0), 0, SLOTS)
    kept = int(offs[-1])
    assert kept <= SLOTS and (permutation[kept:] == -1).all() and int((inverse >= 0).sum()) == kept
    assert torch.equal(inverse.flatten()[permutation[:kept].long()], torch.arange(kept, dtype=torch.int32))


def check_ranks(ids: Tensor) -> None:
    by_rank, counts = ops.tokens_by_rank(ids, EXPERTS, RANKS)
    assert ((by_rank == -1) | (by_rank == torch.arange(RANKS))).all()
    assert torch.equal((by_rank >= 0).sum(0), counts[:, 0])
    assert (counts[:, 0] <= counts[:, 1]).all() and int(counts[:, 1].sum()) <= SLOTS


def check_gradient_of_choice(ids: Tensor) -> None:
    grad = ops.choose_experts_backward(torch.ones(TOKENS, TOP_K), torch.zeros(TOKENS, EXPERTS), ids)
    assert grad.isfinite().all()


def check_messages(ids: Tensor) -> None:
    places = torch.arange(TOKENS, dtype=torch.int32)
    message = ops.pack_tokens(torch.zeros(TOKENS, 16, dtype=torch.uint8), ids, None, None, places, 1, EXPERTS)
    within(message[:, 16:32].view(torch.int32), 0, EXPERTS)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("check", [check_sorted, check_ranks, check_gradient_of_choice, check_messages])
def test_ids(check, dtype):
    with written(-3, EXPERTS + 2, TOKENS, TOP_K, dtype=dtype) as ids:
        for _ in range(CALLS):
            check(ids)


def check_rows(indices: Tensor) -> None:
    within(ops.permute_pad(torch.ones(TOKENS, FEATURES), indices, TOP_K), 0, 1)


def check_rows_put_back(indices: Tensor) -> None:
    within(ops.unpermute(torch.ones(SLOTS, FEATURES), indices, TOP_K, TOKENS), 0, TOP_K)


def check_sums(inverse: Tensor) -> None:
    within(ops.combine(torch.ones(SLOTS, FEATURES), inverse.view(TOKENS, TOP_K)), 0, TOP_K)


def check_quantized_rows(indices: Tensor) -> None:
    q, scale = ops.quantize_rows(torch.ones(TOKENS, FEATURES), "rowwise", indices=indices, top_k=TOP_K)
    assert q.float().isfinite().all() and scale.isfinite().all()


@pytest.mark.parametrize("check", [check_rows, check_rows_put_back, check_sums, check_quantized_rows])
def test_indices(check):
    far = 2**31 - 1
    for least, most in ((-3, SLOTS + 2), (-far, far)):
        with written(least, most, SLOTS) as indices:
            for _ in range(CALLS // 2):
                check(indices)


def quantize_tokens(x: Tensor, offs: Tensor) -> Tensor:
    return ops.quantize_tokens(x, "blockwise", offs=offs, align=16)[2]


def pad_token_groups(x: Tensor, offs: Tensor) -> Tensor:
    return ops.pad_token_groups(x, offs)[2]


@pytest.mark.parametrize("pad", [quantize_tokens, pad_token_groups])
def test_ends_of_groups(pad: Callable[[Tensor, Tensor], Tensor]):
    x = torch.ones(TOKENS, FEATURES)
    with written(-3, TOKENS + 2, EXPERTS) as offs:
        for _ in range(CALLS):
            padded = pad(x, offs)
            within(padded, 0, TOKENS + 16 * EXPERTS)
            assert (padded.diff() >= 0).all() and (padded % 16 == 0).all()


def test_counts():
    with written(-3, 2 * SLOTS // (RANKS * EXPERTS), RANKS, EXPERTS) as counts:
        for _ in range(CALLS):
            indices, padded_offs, sizes = ops.permute_indices(counts, EXPERTS, RANKS, SLOTS)
            kept = indices[indices >= 0]
            assert int(sizes.sum()) == len(kept) == len(kept.unique()) <= SLOTS
            within(indices, -1, SLOTS - 1), within(padded_offs, 0, len(indices))
