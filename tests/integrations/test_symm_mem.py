"""Experts behind torch's symmetric memory, which is replaced by memory that threads share, a rank each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch
from helpers import NO_SECOND_GPU, assert_same_tensor
from processes import in_processes
from torch import Tensor

from moe_fp8_ext import (
    DelayedWgrads,
    Recipe,
    _torch,
    combine,
    experts_of_groups,
    permute_pad,
    quantize_rows,
    quantize_weight,
    sort_tokens,
)
from moe_fp8_ext.integrations.symm_mem import AllToAll

RANKS, E, D, F, TOP_K, LAYERS, STEPS = 2, 6, 160, 64, 3, 2, 2
LOCAL = E // RANKS
TOKENS = (17, 26)
LATE = 1  # the rank that reads the others' memory as late as it may


@dataclass
class World:
    """How far each rank is, and what it passed to its last op."""

    rank_of: threading.local = field(default_factory=threading.local)
    moved: threading.Condition = field(default_factory=threading.Condition)
    entered: list[int] = field(default_factory=lambda: [0] * RANKS)
    given: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    group_name: str = "experts"

    def size(self) -> int:
        return RANKS

    def enter(self, *given: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Waits until all ranks have entered, and returns their live memory. The late rank also waits until the other
        one has entered its next op, if there is one: before, that rank may write to what it sends next."""
        rank = self.rank_of.rank
        with self.moved:
            self.entered[rank] = op = self.entered[rank] + 1
            self.given[rank, op] = given
            self.moved.notify_all()
            assert self.moved.wait_for(lambda: min(self.entered) >= op, timeout=60)
            if rank == LATE:
                self.moved.wait_for(lambda: self.entered[1 - LATE] > op, timeout=0.1)
            return [self.given[r, op] for r in range(RANKS)]

    # What torch documents of torch.ops.symm_mem.

    def all_to_all_vdev_2d(
        self, input: Tensor, out: Tensor, in_splits: Tensor, places: Tensor, group_name: str
    ) -> None:
        assert in_splits.shape == (E,) and places.shape == (2, E) and group_name == self.group_name
        of_all, rank = self.enter(input, in_splits), self.rank_of.rank
        at = 0
        for expert in range(LOCAL):
            start = at
            for r, (rows, counts) in enumerate(of_all):
                first, count = int(counts[: rank * LOCAL + expert].sum()), int(counts[rank * LOCAL + expert])
                out[at : at + count] = rows[first : first + count]
                places[:, expert * RANKS + r] = torch.tensor([count, at])
                at += count
            at = max(at, start + 1)  # an expert without rows takes one, of any contents

    def all_to_all_vdev_2d_offset(
        self, input: Tensor, out: Tensor, given: Tensor, back: Tensor, group_name: str
    ) -> None:
        of_all, rank, at = self.enter(input, given), self.rank_of.rank, 0
        for r, (rows, places) in enumerate(of_all):
            for expert in range(LOCAL):
                count, first = places[:, expert * RANKS + rank].tolist()
                out[at : at + count] = rows[first : first + count]
                back[:, r * LOCAL + expert] = torch.tensor([count, at])
                at += count


def symmetric(world: World, backend: str | None = "NVSHMEM") -> _torch.SymmetricMemory:
    def make(size: tuple[int, ...], dtype: torch.dtype, device: str, group: World) -> Tensor:
        return (
            torch.full(size, 0xFF, dtype=torch.uint8).to(dtype)
            if dtype == torch.uint8
            else torch.full(size, -1).to(dtype)
        )

    return _torch.SymmetricMemory(backend, make, world.all_to_all_vdev_2d, world.all_to_all_vdev_2d_offset)


def problem() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    t = sum(TOKENS)
    x, grad = (torch.randn(t, D, generator=g).bfloat16() for _ in range(2))
    ids = torch.rand(t, E - 1, generator=g).topk(TOP_K).indices  # no token has the last expert
    ids[ids == 1] = 4  # nor the second; some have the same twice
    ids[3, 1] = ids[20, 0] = -1
    up, down = torch.randn(E, 2 * F, D, generator=g) * D**-0.5, torch.randn(E, D, F, generator=g) * F**-0.5
    scores = torch.rand(t, TOP_K, generator=g)
    return dict(x=x, grad=grad, ids=ids, scores=scores, up=up.bfloat16(), down=down.bfloat16())


def leaves(
    p: dict[str, Tensor], needs_x: bool, rows: slice = slice(None), mine: slice = slice(None)
) -> dict[str, Tensor]:
    cut = dict(x=p["x"][rows], scores=p["scores"][rows], up=p["up"][mine], down=p["down"][mine])
    return {name: t.clone().requires_grad_(needs_x or name != "x") for name, t in cut.items()}


def cut(rank: int, ranks: int) -> tuple[slice, slice]:
    """The tokens and the experts of a rank."""
    tokens = TOKENS if ranks == RANKS else (sum(TOKENS),)
    rows = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
    return rows, slice(rank * E // ranks, (rank + 1) * E // ranks)


def of_rank(rank: int, world: World, recipe: Recipe, needs_x: bool) -> dict[str, Tensor]:
    p, world.rank_of.rank = problem(), rank
    rows, mine = cut(rank, RANKS)
    of = leaves(p, needs_x, rows, mine)
    exchange = AllToAll(world, tokens=max(TOKENS), top_k=TOP_K, num_experts=E, recipe=recipe, device="cpu")
    for _ in range(STEPS):
        out = of["x"]
        for _ in range(LAYERS):
            out = exchange.experts(out, p["ids"][rows], of["scores"], of["up"], of["down"])
        with torch.autograd.set_multithreading_enabled(False):
            out.backward(p["grad"][rows])
    return dict(out=out.detach(), **{name: t.grad for name, t in of.items()})


def on_one(p: dict[str, Tensor], of: dict[str, Tensor], x: Tensor, recipe: Recipe) -> Tensor:
    """The layer of the same parts, without travel: slots as rows, quantized before they are sorted."""
    permutation, offs, inverse = sort_tokens(p["ids"], E)
    rows, named = permute_pad(x.bfloat16(), permutation, TOP_K), {}
    if recipe.format is not None and not recipe.wgrad_high_precision:
        groups = offs if recipe.format == "mxfp8" else None
        named["stand_in"] = rows
        rows = quantize_rows(rows.detach(), recipe.format, offs=groups, rounding=recipe.rounding)
    y = experts_of_groups(rows, offs, None, of["up"], of["down"], recipe=recipe, **named)
    return combine(y, inverse, of["scores"]).to(x.dtype)


@pytest.fixture
def world(monkeypatch) -> World:
    world = World()
    monkeypatch.setattr(_torch, "symmetric_memory", lambda device: symmetric(world))
    return world


@pytest.mark.parametrize("needs_x", [True, False])
@pytest.mark.parametrize(
    "recipe",
    [Recipe(name) for name in ("bf16", "rowwise", "blockwise", "mxfp8")]
    + [Recipe("rowwise", wgrad_high_precision=True)],
    ids=str,
)
def test_ranks_equal_one(recipe, needs_x, world):
    """All bytes equal the bytes of one process, because a slot is a row of its own on both sides."""
    with ThreadPoolExecutor(RANKS) as pool:
        made = list(pool.map(lambda rank: of_rank(rank, world, recipe, needs_x), range(RANKS)))
    p = problem()
    of = leaves(p, needs_x)
    for _ in range(STEPS):
        out = of["x"]
        for _ in range(LAYERS):
            out = on_one(p, of, out, recipe)
        out.backward(p["grad"])
    for name, whole in dict(out=out.detach(), **{name: t.grad for name, t in of.items()}).items():
        if whole is None:
            assert all(of_one[name] is None for of_one in made)
        elif name == "scores":
            # Of both layers, by the order of autograd's sum.
            torch.testing.assert_close(torch.cat([of_one[name] for of_one in made]), whole, rtol=1e-6, atol=1e-6)
        else:
            assert_same_tensor(torch.cat([of_one[name] for of_one in made]), whole, name)


def of_ranks(world: World, fn: Callable[[AllToAll, dict[str, Tensor], Tensor], object], needs_x: bool) -> list[object]:
    """Calls fn on every rank, with an exchange, the tensors of the rank, and the ids of its tokens."""

    def on(rank: int) -> object:
        world.rank_of.rank, p = rank, problem()
        rows, mine = cut(rank, RANKS)
        exchange = AllToAll(world, tokens=max(TOKENS), top_k=TOP_K, num_experts=E, device="cpu")
        with torch.autograd.set_multithreading_enabled(False):
            return fn(exchange, leaves(p, needs_x, rows, mine), p["ids"][rows])

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(on, range(RANKS)))


def test_evaluation_before_training_and_two_widths(world):
    """Memory of the first call, in inference mode, serves training. A layer of another width has its own."""

    def fn(exchange: AllToAll, of: dict[str, Tensor], ids: Tensor) -> None:
        with torch.inference_mode():
            want = exchange.experts(of["x"], ids, of["scores"], of["up"], of["down"]).clone()
        out = exchange.experts(of["x"], ids, of["scores"], of["up"], of["down"])
        narrow = exchange.experts(out[:, :64], ids, of["scores"], of["up"][..., :64], of["down"][:, :64])
        narrow.sum().backward()
        assert_same_tensor(out.detach(), want, "out")
        assert of["x"].grad.any()

    of_ranks(world, fn, needs_x=True)


@pytest.mark.parametrize("options", ["delayed", "quantized"])
def test_scores_alone_make_no_backward_of_weights(options, world):
    """Without a gradient of x autograd would not call the backward that computes these gradients."""

    def fn(exchange: AllToAll, of: dict[str, Tensor], ids: Tensor) -> str:
        up, down, named = of["up"], of["down"], {"delay_wgrad": DelayedWgrads()}
        if options == "quantized":
            named = {f"main_grad_{n}": torch.zeros(w.shape) for n, w in (("gate_up", up), ("down", down))}
            up, down = (quantize_weight(w.detach(), "blockwise") for w in (up, down))
        with pytest.raises(RuntimeError) as info:
            exchange.experts(of["x"], ids, of["scores"], up, down, **named)
        return str(info.value)

    for text in of_ranks(world, fn, needs_x=False):
        assert text.startswith("symm_mem.AllToAll: x or another input must require a gradient, because ")


def on_gpus(rank: int, ranks: int) -> None:
    import torch.distributed._symmetric_memory as memory

    memory.set_backend("NVSHMEM")
    p = {name: t.cuda() for name, t in problem().items()}
    rows, mine = cut(rank, ranks)
    for recipe in (Recipe("rowwise"), Recipe("blockwise"), Recipe("mxfp8")):
        exchange = AllToAll(
            torch.distributed.group.WORLD, tokens=sum(TOKENS), top_k=TOP_K, num_experts=E, recipe=recipe
        )
        of, whole = leaves(p, True, rows, mine), leaves(p, True)
        for _ in range(STEPS):
            out = exchange.experts(of["x"], p["ids"][rows], of["scores"], of["up"], of["down"])
            out.backward(p["grad"][rows])
            want = on_one(p, whole, whole["x"], recipe)
            want.backward(p["grad"])
        assert_same_tensor(out.detach(), want.detach()[rows], "out")
        for name, part in (("x", rows), ("scores", rows), ("up", mine), ("down", mine)):
            assert_same_tensor(of[name].grad, whole[name].grad[part], name)


@NO_SECOND_GPU
def test_with_nvshmem():
    """torch's own ops."""
    if _torch.symmetric_memory is None or _torch.symmetric_memory("cuda").dispatch is None:
        pytest.skip("this torch has no NVSHMEM")
    in_processes(RANKS, on_gpus, RANKS, backend="nccl")


def test_mistakes(world):
    p = problem()
    how = dict(tokens=20, top_k=TOP_K, num_experts=E, device="cpu")
    exchange = AllToAll(world, **how)
    call = p["x"][:20], p["ids"][:20], p["scores"][:20], p["up"][:LOCAL], p["down"][:LOCAL]
    for change, text in (
        ({0: p["x"][:21], 1: p["ids"][:21], 2: p["scores"][:21]}, "x must have at most 20 tokens, got 21"),
        ({3: p["up"], 4: p["down"]}, "top_k and the experts of w_down must be (3, 3), got (3, 6)"),
        ({1: p["ids"][:20, :2], 2: p["scores"][:20, :2]}, "top_k and the experts of w_down must be (3, 3), got (2, 3)"),
        ({1: p["ids"][:20].clamp(min=E)}, f"topk_ids must be -1 or from 0 to {E - 1}, got {E} in slot 0"),
    ):
        with pytest.raises(RuntimeError) as info:
            exchange.experts(*(change.get(i, t) for i, t in enumerate(call)))
        assert str(info.value) == f"symm_mem.AllToAll: {text}"
    with pytest.raises(TypeError, match=r"^symm_mem.AllToAll: options must be activation, .*, got stand_in$"):
        exchange.experts(*call, stand_in=None)
    for change, text in (
        ({"num_experts": 7}, "num_experts must be a multiple of the 2 ranks, got 7"),
        ({"recipe": "auto"}, "recipe must be the same for all sizes, got 'auto'"),
        ({"tokens": 1.5}, "tokens must be an int, got float"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
    ):
        with pytest.raises(RuntimeError) as info:
            AllToAll(world, **how | change)
        assert str(info.value) == f"symm_mem.AllToAll: {text}"
    with pytest.raises(RuntimeError, match="^symm_mem.AllToAll: group must be a ProcessGroup, .*, got NoneType$"):
        AllToAll(None, **how)


@pytest.mark.parametrize("backend", [None, "CUDA"])
def test_another_backend(backend, world, monkeypatch):
    monkeypatch.setattr(_torch, "symmetric_memory", lambda device: symmetric(world, backend))
    text = f"symmetric memory of torch must have the backend NVSHMEM, got {backend}; call torch.distributed"
    with pytest.raises(RuntimeError, match=text):
        AllToAll(world, tokens=1, top_k=1, num_experts=E, device="cpu")


def test_without_a_gpu(world, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"^SymmetricRows: device must be a GPU that torch sees, got cuda"):
        AllToAll(world, tokens=1, top_k=1, num_experts=E)


def test_without_symmetric_memory(world, monkeypatch):
    monkeypatch.setattr(_torch, "symmetric_memory", None)
    with pytest.raises(RuntimeError, match="must have the backend NVSHMEM, got None; call"):
        AllToAll(world, tokens=1, top_k=1, num_experts=E, device="cpu")


@pytest.mark.skipif(_torch.symmetric_memory is None, reason="private names of torch are switched off")
def test_torch_has_what_the_adapter_calls():
    """The names, and the arguments of the ops in order."""
    memory = _torch.symmetric_memory("cuda")
    if memory.dispatch is None:
        pytest.skip("this torch has no NVSHMEM")
    for op, arguments in (
        (memory.dispatch, ["input", "out", "in_splits", "out_splits_offsets", "group_name"]),
        (memory.combine, ["input", "out", "in_splits_offsets", "out_splits_offsets", "group_name"]),
    ):
        assert [a.name for a in op.default._schema.arguments][:5] == arguments
