"""Experts over several processes that compute while tokens travel, in chunks and beside shared experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from distributed_problem import EXPERTS, D, F, World, check_graph, module, process
from experts_problem import Layer, assert_equal, run
from helpers import NO_SECOND_GPU, assert_same_tensor
from processes import NEEDS_GLOO, in_processes
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from moe_fp8_ext import MoE, Recipe, Router, save_ops
from moe_fp8_ext.distributed import ExpertParallel
from moe_fp8_ext.distributed.plan import Route, Transfer

RECIPES = "bf16", "rowwise", "blockwise", "mxfp8"
WEIGHTS = "w_gate_up", "w_down"
BIASES = "b_gate_up", "b_down"


def parts_of(problem: Layer, chunks: int) -> list[Layer]:
    """Returns one problem per chunk, with the slots of the chunk."""
    places = torch.arange(len(problem.ids), device=problem.ids.device).tensor_split(chunks)
    nothing = torch.full_like(problem.ids, -1)
    return [replace(problem, ids=nothing.index_copy(0, at, problem.ids[at])) for at in places]


def check_against_parts(problem: Layer, chunks: int, parallel: Callable[..., ExpertParallel], recipe: Recipe) -> None:
    """Each token has the results of its chunk alone, and sums over tokens are sums over chunks.

    But on a CPU, torch's float32 products add up in an order that depends on the number of rows. If a sum is next to a
    tie of bfloat16, which is rare, a value moves by at most 2^-8 of it, in each of three products on a path.
    """
    got, want = run(problem, parallel(chunks=chunks).experts), run(problem, parallel().experts)
    found = [run(part, parallel().experts) for part in parts_of(problem, chunks)]
    for name in WEIGHTS + BIASES if problem.b_down is not None else WEIGHTS:
        total, last = got.pop(name).double(), want.pop(name)
        parts = [part[name].double() for part in found]
        if name in BIASES:
            # Sums of float32 parts are rounded to bfloat16 once, as each part is in its own run: by 2^-8 of it at most.
            # 1.01 covers the rounding of float32, and that bounds are of rounded numbers.
            assert ((total - sum(parts)).abs() <= 1.01 * 2**-7 * sum(part.abs() for part in parts)).all(), name
            assert total.shape == last.shape, name
            continue
        if recipe.format is None or recipe.wgrad_high_precision:
            added = parts[0]
            for part in parts[1:]:
                added = (added + part).bfloat16().double()
            assert_same_tensor(total, added, name)
            continue
        # Here each product is added in float32 to a bfloat16 sum, which is rounded by 2^-8 of it each time. The parts
        # are each rounded by 2^-8, and summed exactly. Sums of magnitudes bound both errors.
        bound = sum(part.abs() for part in parts) * 2**-8 * (1 + 2**-8) * chunks
        assert ((total - sum(parts)).abs() <= bound).all() and total.shape == last.shape, name
    if recipe.format in (None, "blockwise") and problem.x.device.type == "cpu":  # sums of other recipes are exact here
        for name, value in want.items():
            assert (got[name].double() - value.double()).norm() <= 2**-8 * value.double().norm(), name
    else:
        assert_equal(got, want)


def check_chunks(world: World) -> None:
    """Ranks have odd numbers of tokens, one token, or none on one rank or all."""
    uneven = [9 + 4 * rank for rank in range(world.size)]
    cases = [("exact", uneven, 2, 3), ("exact", [*uneven[:-1], 0], 2, 2), ("exact", [0] * world.size, 2, 2)]
    cases += [
        ("exact", [1] * world.size, 2, 2),
        ("static", [15] * world.size, 3, 2),
        ("static", [1] * world.size, 2, 1),
        ("exact", [1] * world.size, 1, 2),
    ]
    for i, (mode, tokens, chunks, top_k) in enumerate(cases):
        recipe = Recipe(RECIPES[i % 4])
        problem = world.part(world.whole(tokens, top_k, bias=i % 2 == 0), tokens)
        check_against_parts(problem, chunks, partial(world.parallel, top_k, recipe, mode=mode), recipe)
    tokens = [12] * world.size
    problem = world.part(world.whole(tokens, 2), tokens)
    precise = Recipe("rowwise", wgrad_high_precision=True)
    check_against_parts(problem, 2, partial(world.parallel, 2, precise), precise)
    check_against_parts(problem, 2, partial(world.parallel, 2, gradients="fp8"), Recipe("rowwise"))
    tokens = [2] * world.size  # each chunk has one token for its gradients
    two = world.part(world.whole(tokens, 2), tokens)
    blocks = Recipe("blockwise")
    check_against_parts(two, 2, partial(world.parallel, 2, blocks, gradients="fp8"), blocks)
    for frozen in (("x",), ("scores",), WEIGHTS):
        got, want = (run(problem, world.parallel(2, chunks=chunks).experts, frozen) for chunks in (2, 1))
        assert_equal(*({n: t for n, t in found.items() if n not in WEIGHTS} for found in (got, want)))
        assert got.keys() == want.keys()


def check_main_grad(world: World) -> None:
    """Main gradients of two chunks equal two calls, one for each chunk."""
    tokens = [13] * world.size
    problem = world.part(world.whole(tokens, 2), tokens)
    for recipe in ("bf16", "rowwise"):
        totals = []
        for chunks, calls in ((2, [problem]), (1, parts_of(problem, 2))):
            into = {f"main_grad_{n[2:]}": torch.ones_like(getattr(problem, n), dtype=torch.float32) for n in WEIGHTS}
            for call in calls:
                assert not run(call, world.parallel(2, recipe, chunks=chunks).experts, **into).keys() & {*WEIGHTS}
            totals.append(into)
        assert_equal(*totals)


def check_twice(world: World) -> None:
    tokens = [10] * world.size
    problem = world.part(world.whole(tokens, 2), tokens)
    for mode, recipe in product(("exact", "static"), ("bf16", "rowwise")):
        experts = world.parallel(2, recipe, mode=mode, chunks=2).experts
        want = run(problem, experts)
        assert_equal(run(problem, experts), want)
        assert_equal(run(problem, partial(checkpoint, experts, use_reentrant=False)), want)


def check_saved_order(world: World) -> None:
    """A checkpoint saves the order of slots before slots beyond the capacity are dropped."""
    tokens = [8] * world.size
    problem = world.part(world.whole(tokens, 2), tokens)
    experts = world.parallel(2, mode="static", capacity=1.0, overflow="count").experts
    saving = {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, save_ops())}
    assert_equal(run(problem, partial(checkpoint, experts, **saving)), run(problem, experts))


def check_capacity(world: World) -> None:
    """In each chunk all tokens go to one rank, which has room for half of them."""
    tokens = [16] * world.size
    problem = world.whole(tokens, 1)
    problem = world.part(replace(problem, ids=torch.zeros_like(problem.ids)), tokens)
    parallel = world.parallel(1, mode="static", capacity=world.size / 2, chunks=2)
    got = run(problem, parallel.experts)
    served = (torch.arange(16, device=world.device) % 8 < 4)[:, None]
    want = run(replace(problem, ids=torch.where(served, 0, -1)), world.parallel(1).experts)
    assert_same_tensor(got["out"], want["out"], "out")
    world.raises(f"{8 * world.size} tokens and 0 slots were left out", parallel.check)


def check_errors(world: World) -> None:
    last = world.rank == world.size - 1
    problem = world.part(world.whole([8] * world.size, 2), [8] * world.size)
    strange = replace(problem, x=problem.x.double()) if last else problem
    for mode in ("exact", "static"):
        experts = world.parallel(2, mode=mode, chunks=3).experts
        text = "x must be bfloat16" if last else f"error was raised on rank {world.size - 1}"
        world.raises(text, lambda call=experts: run(strange, call))
        run(problem, experts)
    world.raises("chunks must be at least 1, got 0", lambda: world.parallel(2, chunks=0))
    if world.size > 1:
        world.raises("chunks must be the same on all ranks", lambda: world.parallel(2, chunks=1 + last))


def check_order(world: World) -> None:
    """All sends start before anything waits for them. Shared experts run between the sends and the waits."""
    problem, order = world.part(world.whole([8] * world.size, 2), [8] * world.size), []
    experts = partial(world.parallel(2, chunks=2).experts, shared_experts=lambda x: order.append("shared") or x)
    sends, waits = Route._exchange, Transfer.wait
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Route, "_exchange", lambda *args: order.append("sent") or sends(*args))
        patch.setattr(Transfer, "wait", lambda self: order.append("arrived") or waits(self))
        run(problem, experts)
    there = ["sent", "sent"]
    forward = [*there, "shared", *["arrived", "sent"] * 2, *["arrived"] * 2]
    assert order == [*forward, *there, *["arrived", "sent", "sent"] * 2, *["arrived"] * 4]


class Checkpointed(nn.Module):
    """Wraps a module as checkpoint wrappers do: arguments are positional, and attributes are the module's."""

    def __init__(self, experts: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.experts, self.ep, self.use_reentrant = experts, experts.ep, use_reentrant

    def forward(self, *call: Tensor, shared_experts: Callable[[Tensor], Tensor]) -> Tensor:
        return checkpoint(self.experts, *call, shared_experts, use_reentrant=self.use_reentrant)


def check_shared_experts(world: World) -> None:
    """A layer that computes shared experts while tokens travel has the bytes of one that computes them later."""
    tokens = [12] * world.size
    problem = world.part(world.whole(tokens, 2), tokens)
    torch.manual_seed(world.rank)
    shared = nn.Sequential(nn.Linear(D, F), nn.SiLU(), nn.Linear(F, D)).to(world.device, torch.bfloat16)
    router = Router(EXPERTS, D, 2, device=world.device)
    for chunks in (1, 2):
        experts = module(world, ep=world.parallel(2, chunks=chunks))
        found = []
        for layer in (None, experts, Checkpointed(experts, False), Checkpointed(experts, True)):
            x = problem.x.view(2, -1, D).clone().requires_grad_()
            if layer is None:
                routing = router(x.view(-1, D))
                out = experts(x.view(-1, D), *routing[:2]).view(x.shape) + shared(x)
            else:
                out, _ = MoE(router, layer, shared)(x)
            leaves = [*router.parameters(), *experts.parameters(), *shared.parameters()]
            out.backward(problem.grad.view(x.shape))
            names = map(str, range(len(leaves)))
            found.append(dict(zip(names, [p.grad for p in leaves], strict=True)) | dict(out=out.detach(), x=x.grad))
            for p in leaves:
                p.grad = None
        for other in found[1:]:
            assert_equal(other, found[0])
    plain = module(world)
    text = "^Experts: shared_experts must be None without ep, got one$"
    world.raises(text, lambda: plain(problem.x, problem.ids, problem.scores, shared))


CHECKS = (
    *(check_chunks, check_main_grad, check_twice, check_saved_order, check_capacity, check_errors, check_order),
    check_shared_experts,
    partial(check_graph, chunks=2),
)


@NEEDS_GLOO
@pytest.mark.parametrize("size", [1, 2, 4])
def test_processes(size, tmp_path):
    in_processes(size, process, size, False, CHECKS, tmp_path)


@NO_SECOND_GPU
def test_two_gpus(tmp_path):
    in_processes(2, process, 2, True, CHECKS, tmp_path, backend="nccl")
