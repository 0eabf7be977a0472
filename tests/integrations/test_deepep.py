"""Experts behind DeepEP, whose buffers are replaced by ones that move tensors between threads, a rank each."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch
from helpers import assert_same_tensor
from torch import Tensor

import moe_fp8_ext
from moe_fp8_ext import Recipe
from moe_fp8_ext.integrations import deepep

RANKS, E, D, F, TOP_K = 2, 6, 128, 64, 3
TOKENS = (17, 26)
IS_FP8 = {  # whether tokens travel so
    "bf16": False,
    "rowwise": False,
    "blockwise": True,
    Recipe("blockwise", wgrad_high_precision=True): False,
}


@dataclass
class Buffers:
    """What the ranks tell each other."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(RANKS, timeout=60))
    posted: dict[int, object] = field(default_factory=dict)

    def exchange(self, rank: int, mine: object) -> list[object]:
        self.posted[rank] = mine
        self.barrier.wait()
        of_all = [self.posted[r] for r in range(RANKS)]
        self.barrier.wait()
        return of_all


class Buffer:
    """The calls of `deep_ep.Buffer` in its normal mode, with the shapes and dtypes of its documentation."""

    def __init__(self, shared: Buffers, rank: int) -> None:
        self.shared, self.rank, self.sent = shared, rank, []

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple:
        self.local = num_experts // RANKS
        ranks = torch.where(topk_idx < 0, -1, topk_idx // self.local)
        is_sent = torch.stack([(ranks == r).any(1) for r in range(RANKS)], 1)
        to_experts = (topk_idx[..., None] == torch.arange(num_experts)).sum((0, 1)).int()
        return is_sent.sum(0).int(), None, to_experts, is_sent, None

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        *,
        handle: list[Tensor] | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
    ) -> tuple:
        parts = x if isinstance(x, tuple) else (x,)
        assert all(t.is_contiguous() for t in parts)
        self.sent.append([t.dtype for t in parts])
        of_all = self.shared.exchange(self.rank, (parts, topk_idx, topk_weights, is_token_in_rank))
        if handle is None:
            assert topk_idx.dtype == torch.int64 and topk_weights.dtype == torch.float32
            assert num_tokens_per_expert.shape == (2 * self.local,) and num_tokens_per_rank.shape == (RANKS,)
            handle = [sent[:, self.rank].nonzero()[:, 0] for *_, sent in of_all]
        rows = [torch.cat([p[i][at] for (p, *_), at in zip(of_all, handle, strict=True)]) for i in range(len(parts))]
        x = tuple(rows) if isinstance(x, tuple) else rows[0]
        if topk_idx is None:
            return x, None, None, None, None, None
        ids = torch.cat([ids[at] for (_, ids, *_), at in zip(of_all, handle, strict=True)])
        scores = torch.cat([scores[at] for (_, _, scores, _), at in zip(of_all, handle, strict=True)])
        is_here = ids // self.local == self.rank
        ids = torch.where(is_here, ids - self.rank * self.local, -1)
        counts = (ids[..., None] == torch.arange(self.local)).sum((0, 1)).tolist()
        return x, ids, torch.where(is_here, scores, 0), counts, handle, None

    def combine(self, x: Tensor, handle: list[Tensor], *, topk_weights: Tensor | None = None) -> tuple:
        assert x.dtype == torch.bfloat16 and x.is_contiguous()
        of_all = self.shared.exchange(self.rank, (x, handle, topk_weights))
        out = torch.zeros(TOKENS[self.rank], x.shape[1])
        weights = None if topk_weights is None else torch.zeros(TOKENS[self.rank], topk_weights.shape[1])
        for rows, to, of_rows in of_all:
            first = sum(len(at) for at in to[: self.rank])
            mine = slice(first, first + len(to[self.rank]))
            out.index_add_(0, to[self.rank], rows[mine].float())
            if weights is not None:
                weights.index_add_(0, to[self.rank], of_rows[mine])
        return out.bfloat16(), weights, None


def problem() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    t = sum(TOKENS)
    x, grad = (torch.randn(t, D, generator=g).bfloat16() for _ in range(2))
    ids = torch.rand(t, E, generator=g).topk(TOP_K).indices
    ids[3, 1] = ids[20, 0] = -1
    up, down = torch.randn(E, 2 * F, D, generator=g) * D**-0.5, torch.randn(E, D, F, generator=g) * F**-0.5
    scores = torch.rand(t, TOP_K, generator=g)
    return dict(x=x, grad=grad, ids=ids, scores=scores, up=up.bfloat16(), down=down.bfloat16())


def of_rank(rank: int, shared: Buffers, recipe: str | Recipe, needs_x: bool) -> dict[str, Tensor]:
    p = problem()
    rows = slice(sum(TOKENS[:rank]), sum(TOKENS[: rank + 1]))
    mine = slice(rank * E // RANKS, (rank + 1) * E // RANKS)
    x, scores = p["x"][rows].clone().requires_grad_(needs_x), p["scores"][rows].clone().requires_grad_()
    up, down = p["up"][mine].clone().requires_grad_(), p["down"][mine].clone().requires_grad_()
    buffer = Buffer(shared, rank)
    out = deepep.experts(buffer, x, p["ids"][rows], scores, up, down, num_experts=E, recipe=recipe)
    out.backward(p["grad"][rows])
    forward = [torch.float8_e4m3fn, torch.float32] if IS_FP8[recipe] else [torch.bfloat16]
    assert buffer.sent == [forward, [torch.bfloat16]]
    return dict(out=out.detach(), x=x.grad, scores=scores.grad, up=up.grad, down=down.grad)


@pytest.mark.parametrize("needs_x", [True, False])
@pytest.mark.parametrize("recipe", IS_FP8, ids=str)
def test_ranks_equal_one(recipe, needs_x):
    shared = Buffers()
    with ThreadPoolExecutor(RANKS) as pool:
        made = list(pool.map(lambda rank: of_rank(rank, shared, recipe, needs_x), range(RANKS)))
    p = problem()
    leaves = {n: p[n].clone().requires_grad_(needs_x or n != "x") for n in ("x", "scores", "up", "down")}
    out = moe_fp8_ext.experts(leaves["x"], p["ids"], leaves["scores"], leaves["up"], leaves["down"], recipe=recipe)
    out.backward(p["grad"])
    want = dict(out=out.detach(), **{n: t.grad for n, t in leaves.items()})
    for name, whole in want.items():
        if whole is None:
            assert all(of_one[name] is None for of_one in made)
            continue
        got = torch.cat([of_one[name] for of_one in made])
        if name in ("scores", "down") or (name == "up" and not IS_FP8[recipe]):
            assert_same_tensor(got, whole, name)  # one rank computes them, from the same bytes
        elif name == "up":
            # Received tokens are quantized along tokens from their FP8 values. That adds a rounding of 2^-4 at most.
            assert (got - whole).float().norm() < 2**-4 * whole.float().norm()
        else:
            # Each rank's part is rounded to BF16, 2^-9 of it, and so is the sum; the whole is rounded once. Parts may
            # be larger than their sum: a bound for each element is three roundings of the largest value of its row.
            largest = whole.float().abs().amax(1, keepdim=True)
            assert ((got.float() - whole.float()).abs() <= 3 * 2**-9 * 2 * largest).all()


def test_mistakes():
    p = problem()
    call = p["x"], p["ids"], p["scores"], p["up"], p["down"]
    for buffer, ids, count, text in (
        (None, p["ids"], E, "buffer must be a deep_ep.Buffer, got a NoneType without get_dispatch_layout"),
        (Buffer(Buffers(), 0), p["ids"].int(), E, "topk_ids must be int64, which DeepEP takes, got torch.int32"),
        (Buffer(Buffers(), 0), p["ids"], 7, "num_experts must be a multiple of the experts of w_down, 6, got 7"),
        (Buffer(Buffers(), 0), p["ids"], 0, "num_experts must be a multiple of the experts of w_down, 6, got 0"),
        (Buffer(Buffers(), 0), p["ids"].clamp(min=6), 6, "topk_ids must be -1 or from 0 to 5, got 6 in slot 0"),
        (Buffer(Buffers(), 0), p["ids"][:1], E, "topk_ids must have size 43 in dimension 0 (the rows of x), got 1"),
    ):
        with pytest.raises(RuntimeError) as info:
            deepep.experts(buffer, call[0], ids, *call[2:], num_experts=count)
        assert str(info.value) == f"deepep.experts: {text}"
    for options in ({"activaton": "geglu"}, {"quantized": None}):  # layer_call has an argument `quantized`
        with pytest.raises(
            TypeError, match=f"^deepep.experts: options must be activation, .*, got {next(iter(options))}$"
        ):
            deepep.experts(Buffer(Buffers(), 0), *call, num_experts=E, **options)
