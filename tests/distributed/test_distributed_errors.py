"""Experts over several processes: errors that every rank must raise, dropped tokens, and gradients in FP8."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from distributed_problem import EXPERTS, D, F, World, meshes, process
from experts_problem import OF_OPERAND, SPREAD_DB, Layer, assert_equal, run
from helpers import NO_SECOND_GPU, assert_same_tensor
from processes import NEEDS_GLOO, in_processes
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from moe_fp8_ext import Experts, MoE, Recipe, Router, _torch
from moe_fp8_ext.distributed import ExpertParallel
from moe_fp8_ext.distributed import message as messages
from moe_fp8_ext.distributed.exchange import Exchange, ExchangedTokens
from moe_fp8_ext.distributed.plan import Agreement
from moe_fp8_ext.layer import node
from moe_fp8_ext.layer.router import Routing
from moe_fp8_ext.matmul.engine import Fp8Engine

SIZE = 4


def check_arguments(world: World) -> None:
    """Bad arguments of one rank raise on all ranks. Bad arguments of all ranks raise as in one process."""
    strange = dict(num_experts=7), dict(top_k=0), dict(recipe="none"), dict(gradients="fp16"), dict(capacity=1.0)
    strange += dict(num_experts=float(EXPERTS)), dict(top_k=2.0), dict(gradients=Recipe("bf16"))
    for options in strange:
        usual = dict(num_experts=EXPERTS, top_k=2)
        options = usual | options if world.rank == 1 else usual
        text = "must be the same on all ranks, got .* on rank . and .* on rank ."
        world.raises(text, partial(ExpertParallel, dist.group.WORLD, **options))
    equal = dict(recipe=Recipe("rowwise"), capacity=1, mode="static") | dict(top_k=2, num_experts=EXPERTS)
    ExpertParallel(dist.group.WORLD, **(equal | dict(recipe="rowwise", capacity=1.0) if world.rank == 1 else equal))
    refused = (
        (dict(num_experts=7), "num_experts must be a multiple"),
        (dict(num_experts=8.0), "num_experts must be an int, got float"),
        (dict(top_k="2"), "top_k must be an int, got str"),
        (dict(chunks=1.5), "chunks must be an int, got float"),
        (dict(mode="static", capacity="1"), "capacity must be None, or with mode 'static' .*, got '1'"),
    )
    for options, text in refused:
        options = dict(num_experts=EXPERTS, top_k=2) | options
        world.raises(f"^ExpertParallel: {text}", partial(ExpertParallel, dist.group.WORLD, **options))
    text = "^ExpertParallel: group must be a ProcessGroup or a DeviceMesh of one dimension, got one of 2$"
    world.raises(text, partial(ExpertParallel, meshes(world, 2), EXPERTS, 2))
    # Numbers need not have Python's own classes; numpy's have not.
    assert ExpertParallel(dist.group.WORLD, EXPERTS, 2, mode="static", capacity=Fraction(1, 2)).capacity == 0.5


def check_order_of_mesh(world: World) -> None:
    """A ProcessGroup sorts its ranks. In another order, parameters would belong to other experts than the router's."""
    ranks = list(range(world.size))
    mesh, text = (
        DeviceMesh(torch.device(world.device).type, ranks[::-1]),
        f"of its ProcessGroup, {ranks}, got {ranks[::-1]}",
    )
    world.raises(re.escape(text), lambda: ExpertParallel(mesh, EXPERTS, 2))


def check_inference_mode(world: World) -> None:
    """An ExpertParallel that inference mode has constructed trains like any other."""
    with torch.inference_mode():
        parallel = world.parallel(2, mode="static")
    problem = world.part(world.whole([8] * world.size, 2), [8] * world.size)
    assert_equal(run(problem, parallel.experts), run(problem, world.parallel(2).experts))
    parallel.check()


def check_names_of_ranks(world: World) -> None:
    """A group may begin at any rank, and errors name the global rank."""
    if world.size < 4:
        return
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    world.raises("group must have this rank", lambda: ExpertParallel(groups[world.rank < 2], EXPERTS, 2))
    part = World(world.rank % 2, 2, world.device, world.folder)
    problem = part.part(part.whole([8, 8], 2), [8, 8])
    problem = replace(problem, x=problem.x.double()) if world.rank == 3 else problem
    call = partial(run, problem, ExpertParallel(groups[world.rank // 2], EXPERTS, 2).experts)
    if world.rank < 2:
        call()
    else:
        world.raises("on rank 3: see there" if world.rank == 2 else "x must be bfloat16", call)


def check_unknown_option(world: World) -> None:
    """An option that one rank misspells raises there, and the other ranks do not wait for its tokens."""
    call = partial(run, world.part(world.whole([8] * world.size, 2), [8] * world.size), world.parallel(2).experts)
    if world.rank == 1:
        with pytest.raises(TypeError, match="^ExpertParallel: options must be activation, .*, got activaton$"):
            call(activaton="geglu")
    else:
        world.raises("on rank 1: see there", call)
    call()


def check_sizes(world: World) -> None:
    """Static mode needs the same number of tokens on all ranks."""
    tokens = [8 + rank for rank in range(world.size)]
    call = partial(run, world.part(world.whole(tokens, 2), tokens), world.parallel(2, mode="static").experts)
    world.raises("x, and what asks for a gradient, must be alike", call)


def check_casts(world: World) -> None:
    """An error may come as late as the message, such as a lack of memory for it. All ranks raise."""
    problem = world.part(world.whole([8] * world.size, 2), [8] * world.size)
    for mode in ("exact", "static"):
        call = partial(run, problem, world.parallel(2, mode=mode).experts)
        with pytest.MonkeyPatch.context() as monkeypatch:
            last = world.size - 1
            if world.rank == last:
                monkeypatch.setattr(messages, "_quantize_and_pack", lambda *of_message: torch.empty(2**62))
            text = f"error was raised on rank {last}" if world.rank != last else "memory|allocate|overflow"
            world.raises(text, call)
        call()


def check_capture(world: World) -> None:
    """Capturing a graph raises if the call would have to wait."""
    problem = world.part(world.whole([8] * world.size, 2), [8] * world.size)
    for mode, text in (("exact", "mode must be 'static'"), ("static", "the first call must come before")):
        parallel = world.parallel(2, mode=mode)
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            monkeypatch.setattr(parallel._exchange.exact, "side", object())  # as on a GPU
            world.raises(f"^ExpertParallel: {text}", partial(run, problem, parallel.experts))
        run(problem, parallel.experts)


def check_routers(world: World) -> None:
    """If a Router raises on one rank, before tokens are sent, all ranks raise."""
    last = world.size - 1
    how = dict(device=world.device, dtype=torch.bfloat16)
    moe = MoE(Router(EXPERTS, D, 2, **how), Experts(EXPERTS, D, F, ep=world.parallel(2), **how))
    usual = world.part(world.whole([8] * world.size, 2), [8] * world.size).x
    for x, text in ((usual.double(), "Router: x must be"), (usual[:, 1:], "Router: x must"), (None, "MoE: x must be")):
        text = text if world.rank == last else f"error was raised on rank {last}"
        world.raises(text, partial(moe, x if world.rank == last else usual))
    moe(usual)


class ReportingRouter(nn.Module):
    """A router that reports its own errors, also within a MoE."""

    def __init__(self, ep: ExpertParallel, raises: bool, **how: object) -> None:
        super().__init__()
        self.ep, self.raises, self.router = ep, raises, Router(EXPERTS, D, 2, **how)

    def forward(self, x: Tensor) -> Routing:
        with self.ep.errors_on_all_ranks():
            if self.raises:
                raise RuntimeError("mine")
            return self.router(x)


def check_nested_reports(world: World) -> None:
    """A rank reports an error once, so all ranks stay in the same call."""
    last, how = world.size - 1, dict(device=world.device, dtype=torch.bfloat16)
    for mode, is_wrapped in product(("exact", "static"), (False, True)):
        ep = world.parallel(2, mode=mode)
        moe = MoE(ReportingRouter(ep, world.rank == last, **how), Experts(EXPERTS, D, F, ep=ep, **how))
        x = world.part(world.whole([8] * world.size, 2), [8] * world.size).x
        with pytest.raises(RuntimeError, match="mine" if world.rank == last else f"error was raised on rank {last}"):
            with ep.errors_on_all_ranks() if is_wrapped else nullcontext():
                moe(x)
        assert ep._call == 1
        moe.gate.raises = False
        moe(x)


def check_experts_kept_equal(world: World) -> None:
    """DDP and FSDP2 over the group would give every rank the experts of other ranks."""
    how, text = dict(device=world.device, dtype=torch.bfloat16), "experts must differ between the ranks of the group"
    x, pairs = torch.randn(8, D, **how), meshes(world, 2)

    def layer(group: dist.ProcessGroup, **options: object) -> MoE:
        ep = ExpertParallel(group, EXPERTS, 2, recipe="blockwise")
        torch.manual_seed(3)
        return MoE(Router(EXPERTS, D, 2, **how), Experts(EXPERTS, D, F, recipe="blockwise", ep=ep, **options, **how))

    for freeze, options in product((lambda experts: None, Experts.freeze_), ({}, {"lora_rank": 2})):
        moe = layer(dist.group.WORLD, **options)
        freeze(moe.experts)
        if not _torch.ONLY_PUBLIC:
            world.raises(f"{text}, but Distributed", partial(DistributedDataParallel(moe), x))
        names = [name for name, _ in (*moe.named_parameters(), *moe.named_buffers()) if name.startswith("experts.")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(moe, names)
        kept = copy.deepcopy(moe.experts.state_dict())
        DistributedDataParallel(moe)(x)
        assert all(torch.equal(t, kept[name]) for name, t in moe.experts.state_dict().items())
    world.raises(f"{text}, but fully_shard", partial(fully_shard, layer(dist.group.WORLD)))
    want = (moe := layer(pairs["ep"].get_group()))(x)[0]
    for module in (moe.experts, moe):
        fully_shard(module, mesh=pairs["dp"])
    assert torch.equal(moe(x)[0], want)


# A CPU then computes with wrong ids, as a GPU does without validation.
UNCHECKED = patch("moe_fp8_ext.ops.checks.contents", lambda x: None)


def check_ids(world: World) -> None:
    problem = world.part(world.whole([8] * world.size, 2), [8] * world.size)
    own = torch.arange(8, device=world.device)[:, None] == world.rank
    problem = replace(problem, ids=torch.where(own, EXPERTS, problem.ids))
    call = partial(run, problem, world.parallel(2).experts)
    with UNCHECKED:
        call()
    if world.device != "cpu":
        os.environ["MOE_FP8_VALIDATE"] = "1"
    text = f"topk_ids must be -1 or from 0 to {EXPERTS - 1}, got {EXPERTS} in slot {2 * world.rank}"
    world.raises(f"^ExpertParallel: {text}$", call)
    run(replace(problem, ids=torch.where(problem.ids == EXPERTS, -1, problem.ids)), call.args[1])


def check_capacity(world: World) -> None:
    """If every rank has more tokens than the capacity allows, the first tokens are served."""
    tokens = [32] * world.size
    problem = world.whole(tokens, 1)
    served = problem.ids.clone()
    for ids, first in product(served.split(32), range(0, EXPERTS, EXPERTS // world.size)):
        there = (ids >= first) & (ids < first + EXPERTS // world.size)
        ids[there & (there.cumsum(0) > 32 // world.size // 2)] = -1
    parallel = world.parallel(1, "bf16", mode="static", capacity=0.5)
    got = run(world.part(problem, tokens), parallel.experts)
    assert_equal(got, world.wanted(replace(problem, ids=served), tokens, recipe="bf16"))
    world.raises(f"{(served < 0).sum()} tokens and 0 slots were left out", parallel.check)


def check_unsent(world: World) -> None:
    """If another rank's error ends the first call, nothing counts as left out in the next call."""
    problem = world.part(world.whole([8] * world.size, 2), [8] * world.size)
    crowded = replace(problem, ids=torch.tensor([0, 1], device=world.device).repeat(8, 1))
    even = replace(problem, ids=torch.arange(EXPERTS, device=world.device).view(4, 2).repeat(2, 1))
    parallel = world.parallel(2, mode="static", capacity=1.0)
    strange = replace(crowded, x=crowded.x.double()) if world.rank == 1 else crowded
    text = "x must be bfloat16" if world.rank == 1 else "an error was raised on rank 1"
    world.raises(text, partial(run, strange, parallel.experts))
    run(even, parallel.experts)
    parallel.check()
    run(crowded, parallel.experts)
    world.raises("were left out", parallel.check)


def check_without_gradients(world: World) -> None:
    """Without a backward in between, the next call reports tokens that were left out."""
    problem = world.part(world.whole([8] * world.size, 2), [8] * world.size)
    crowded = replace(problem, ids=torch.tensor([0, 1], device=world.device).repeat(8, 1))
    parallel = world.parallel(2, mode="static", capacity=1.0)
    call = partial(parallel.experts, crowded.x, crowded.ids, crowded.scores, crowded.w_gate_up, crowded.w_down)
    with torch.no_grad():
        call()
        world.raises("were left out", call)


def check_gradients(world: World) -> None:
    """Gradients that travel in FP8 equal one process's gradients, cast to the dtype of gradients.

    But b_down, which sums them, is different: one process does not cast them. E5M2 has twice the steps of E4M3.
    """
    tokens, recipe = [24] * world.size, Recipe("rowwise", grad_dtype=torch.float8_e5m2)
    problem = world.whole(tokens, 2, bias=True)
    got = run(world.part(problem, tokens), world.parallel(2, recipe, gradients="fp8").experts)
    want = world.wanted(problem, tokens, recipe=recipe)
    cast, exact = got["b_down"].double(), want["b_down"].double()
    assert 0 < (cast - exact).norm() <= (4 * OF_OPERAND * 10 ** (SPREAD_DB / 10)) ** 0.5 * exact.norm()
    for name in ("out", "x", "w_gate_up", "b_gate_up"):
        assert_same_tensor(got[name], want[name], name)


def sent(parallel: ExpertParallel, problem: Layer, ids: Tensor) -> ExchangedTokens:
    """Sends the tokens of a problem to other experts than the problem's own."""
    exchange = parallel._exchange
    return exchange.send(exchange.prepare(problem.x, ids, problem.scores), Agreement(0, 1), (True, True))


def check_calls(world: World) -> None:
    """A rank whose router raised, and which goes on, is one call behind. All ranks then raise."""
    tokens = [8] * world.size
    problem, last = world.part(world.whole(tokens, 2), tokens), world.size - 1
    for chunks, overflow in ((1, "raise"), (1, "count"), (2, "count")):
        parallel = world.parallel(2, mode="static", chunks=chunks, overflow=overflow)
        want = run(problem, parallel.experts)
        if world.rank == last:  # the other ranks wait in this rank's second call
            with pytest.raises(ZeroDivisionError), parallel.errors_on_all_ranks():
                _ = 1 / 0
        text = "^ExpertParallel: all ranks must be in the same call, "
        if overflow == "raise":  # `check` counts as a call
            world.raises(text + "but they have made 1 to 2 calls", partial(run, problem, parallel.experts))
        elif world.device == "cpu":
            mine, others = (3, 2) if world.rank == last else (2, 3)
            text += f"this one waits for the tokens of call {mine} and got the tokens of call {others}"
            world.raises(text, partial(run, problem, parallel.experts))
        else:  # contents are checked only when the host waits
            run(problem, parallel.experts)
            world.raises(text + "but another message arrived in place of the tokens of call [23]", parallel.check)
        assert_equal(run(problem, parallel.experts), want)  # all ranks count alike again


class FailsOnce:
    """Calls fn, but raises an error in call number `at`."""

    def __init__(self, fn: Callable, at: int = 1) -> None:
        self.fn, self.at, self.calls = fn, at, 0

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.calls += 1
        return 1 / 0 if self.calls == self.at else self.fn(*args, **kwargs)


def check_errors_after_tokens(world: World) -> None:
    """A rank that raises after it has sent its tokens sends the messages that others wait for, marked. So all ranks
    raise in the same call, and the next call works as usual. On GPUs `check` raises, at the end of a backward."""
    tokens, last = [8] * world.size, world.size - 1
    problem = world.part(world.whole(tokens, 2), tokens)
    for chunks, overflow in ((1, "raise"), (2, "count")):
        faults = (
            ("outputs", node, "_combine", FailsOnce(node._combine)),
            ("gradients of outputs", Exchange, "gradient", FailsOnce(Exchange.gradient)),
            ("dscores", Fp8Engine, "gradients", FailsOnce(Fp8Engine.gradients)),
            ("dx", node, "_combine", FailsOnce(node._combine, at=chunks + 1)),
        )
        for message, owner, name, fault in faults if world.device == "cpu" else faults[1:]:
            parallel = world.parallel(2, mode="static", chunks=chunks, overflow=overflow)
            want = run(problem, parallel.experts)
            call = partial(run, problem, parallel.experts)
            with pytest.MonkeyPatch.context() as monkeypatch:
                if world.rank == last:
                    method = fault if owner is node else lambda *args, fault=fault: fault(*args)
                    monkeypatch.setattr(owner, name, method)
                    with pytest.raises(ZeroDivisionError):
                        call()
                elif world.device == "cpu":
                    text = f"every rank must complete call 2, but an error was raised on rank {last}: see there"
                    world.raises(f"^ExpertParallel: {text}", call)
                else:
                    call()
            if world.device != "cpu":
                # An error frees messages that are still on their way, so an earlier one of the call may be named.
                named = "(dscores|dx)" if message == "dx" else message
                world.raises(f"another message arrived in place of the {named} of call 2", parallel.check)
            assert_equal(run(problem, parallel.experts), want)


def check_calls_in_backward(world: World) -> None:
    """Ranks that run their backwards in different orders raise."""
    tokens, last = [8] * world.size, world.size - 1
    problem = world.part(world.whole(tokens, 2), tokens)
    parallel, weights = world.parallel(2, mode="static"), (problem.w_gate_up, problem.w_down)
    x = problem.x.clone().requires_grad_()
    outs = [parallel.experts(x, problem.ids, problem.scores, *weights) for _ in range(2)]
    mine, others = (1, 2) if world.rank != last else (2, 1)
    call = partial(torch.autograd.backward, outs[mine - 1], problem.grad)
    if world.device == "cpu":
        gradients = "gradients of outputs of call"
        world.raises(f"this one waits for the {gradients} {mine} and got the {gradients} {others}", call)
    else:
        call()
        text = "another message arrived in place of the gradients of outputs of call 1"
        world.raises(text, parallel.check)


def check_messages_back(world: World) -> None:
    """Rows that go back have the number of their message too. Outputs and dx have the same size."""
    tokens, last = [8] * world.size, world.size - 1
    problem = world.part(world.whole(tokens, 2), tokens)
    parallel = world.parallel(2, mode="static")
    source = sent(parallel, problem, problem.ids)
    rows = [torch.zeros(len(chunk.groups.inverse), D).bfloat16() for chunk in source.chunks(problem.x, problem.scores)]
    mine, theirs = ("dx", "outputs") if world.rank == last else ("outputs", "dx")
    source.due = [(mine, 0)]
    given_back = [source.give_back(rows[0].to(world.device))]
    if world.device == "cpu":
        text = f"this one waits for the {mine} of call 1 and got the {theirs} of call 1"
        world.raises(text, partial(source.collect, given_back))
    else:
        source.collect(given_back)
        world.raises("another message arrived in place of the outputs of call 1", parallel.check)


def check_compiled(world: World) -> None:
    """A graph breaks at the exchange. With fullgraph the error says why."""
    tokens = [8] * world.size
    problem = world.part(world.whole(tokens, 2), tokens)
    parallel = world.parallel(2)

    def model(*call: object, **options: object) -> Tensor:
        return 2 * parallel.experts(*call, **options)

    assert_equal(run(problem, torch.compile(model, backend="eager")), run(problem, model))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    world.raises("ExpertParallel exchanges tokens, eagerly: compile without fullgraph", partial(run, problem, compiled))


def check_room(world: World) -> None:
    """Dropped tokens are in no index. The number of indices is the number of received slots or the capacity."""
    os.environ["MOE_FP8_VALIDATE"] = "1"
    problem = world.part(world.whole([8] * world.size, 2), [8] * world.size)
    crowded = replace(problem, ids=torch.tensor([0, 1], device=world.device).repeat(8, 1))
    for recipe in ("bf16", "rowwise"):
        run(crowded, world.parallel(2, recipe, mode="static", capacity=1.0).experts)
    for ids, options in ((problem.ids, {}), (crowded.ids, {}), (crowded.ids, dict(mode="static", capacity=1.0))):
        parallel = world.parallel(2, **options)
        [chunk] = sent(parallel, problem, ids).chunks(problem.x, problem.scores)
        assert len(chunk.groups.indices) == (16 if options else chunk.groups.offs[-1])
    [route] = sent(world.parallel(2), problem, torch.full_like(problem.ids, -1)).routes
    assert sum(route.sent) == 0


def check_meta(world: World) -> None:
    """A model may be built on the meta device, with its ExpertParallel."""
    with torch.device("meta"):
        experts = Experts(EXPERTS, D, F, ep=world.parallel(2), dtype=torch.bfloat16)
    experts.to_empty(device=world.device)
    torch.manual_seed(0)
    experts.reset_parameters()
    problem = world.part(world.whole([8] * world.size, 2), [8] * world.size)
    torch.manual_seed(0)
    alike = Experts(EXPERTS, D, F, ep=world.parallel(2), dtype=torch.bfloat16, device=world.device)
    call = problem.x, problem.ids, problem.scores
    assert_same_tensor(experts(*call).detach(), alike(*call).detach(), "out")


def check_strides(world: World) -> None:
    problem = world.part(world.whole([8] * world.size, 2), [8] * world.size)
    columns = replace(problem, ids=problem.ids.t().contiguous().t())
    assert_equal(*(run(of, world.parallel(2).experts) for of in (columns, problem)))


def check_large_ids(world: World) -> None:
    """Ids travel in 32 bits, and this one would become expert 0."""
    problem = world.part(world.whole([8] * world.size, 2), [8] * world.size)
    ids = (torch.tensor([[1, of_no_expert]], device=world.device).expand(8, 2) for of_no_expert in (2**32, -1))
    with UNCHECKED:
        got, want = (run(replace(problem, ids=i), world.parallel(2).experts) for i in ids)
    assert_equal(got, want)


CHECKS = (
    *(check_arguments, check_order_of_mesh, check_inference_mode, check_names_of_ranks),
    *(check_unknown_option, check_sizes, check_casts, check_capture),
    *(check_routers, check_nested_reports, check_experts_kept_equal),
    *(check_gradients, check_capacity, check_unsent, check_without_gradients, check_large_ids, check_ids),
    *(check_room, check_strides, check_meta, check_calls, check_compiled),
    *(check_errors_after_tokens, check_calls_in_backward, check_messages_back),
)


@NEEDS_GLOO
def test_processes(tmp_path):
    in_processes(SIZE, process, SIZE, False, CHECKS, tmp_path)


@NO_SECOND_GPU
def test_two_gpus(tmp_path):
    in_processes(2, process, 2, True, CHECKS, tmp_path, backend="nccl")


@NEEDS_GLOO
def test_a_group_whose_backend_nobody_named(tmp_path):
    dist.init_process_group(init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        parallel = ExpertParallel(dist.group.WORLD, 1, 1)
        assert parallel.ranks.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
        assert copy.deepcopy([parallel]) == [parallel]  # copies are the same object, as in a model
    finally:
        dist.destroy_process_group()
