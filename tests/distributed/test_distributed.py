"""Experts over several processes equal one process that has all tokens and all experts."""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from distributed_problem import EXPERTS, D, F, World, check_graph, meshes, module, process
from experts_problem import OF_OPERAND, SPREAD_DB, assert_equal, run
from gemm_accuracy import fp8_gemm_db
from helpers import NO_SECOND_GPU, assert_same_tensor, blocks
from processes import NEEDS_GLOO, in_processes
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

import moe_fp8_ext
from moe_fp8_ext import Experts, MoE, Recipe, Router, convert_, revert_
from moe_fp8_ext.distributed import ExpertParallel
from moe_fp8_ext.quantization.format import FORMATS

RECIPES = tuple(map(Recipe, ("bf16", *FORMATS)))


# x along tokens was FP8 along rows before. Blocks with arbitrary scales round it again, and then three casts differ
# between the two. Powers of two only shift exponents. Values that underflow are within 2^-9 steps of 1/224 of the
# largest number, 5e-5 of the others in the root mean square. That moves one of 80 roundings to bfloat16, of 2^-8,
# across a tie: 2^-11 in all.
TWICE = {"blockwise": (3 * OF_OPERAND * 10 ** (SPREAD_DB / 10)) ** 0.5}
SHIFTED = 2**-10


def assert_matches(got: dict[str, Tensor], want: dict[str, Tensor], recipe: Recipe) -> None:
    if recipe.format and not recipe.wgrad_high_precision and "w_gate_up" in got:
        twice, once = got.pop("w_gate_up").double(), want.pop("w_gate_up").double()
        assert (twice - once).norm() <= TWICE.get(recipe.format, SHIFTED) * once.norm()
    assert_equal(got, want)


def check_bytes(world: World) -> None:
    tokens = [40] * world.size
    for i, recipe in enumerate(RECIPES):
        top_k = (1, 3, EXPERTS)[(i + world.size) % 3]  # differs between recipes, and between two and four processes
        problem = world.whole(tokens, top_k)
        want = world.wanted(problem, tokens, recipe=recipe)
        for mode in ("exact", "static"):
            got = run(world.part(problem, tokens), world.parallel(top_k, recipe, mode=mode).experts)
            assert_matches(got, dict(want), recipe)


def check_options(world: World) -> None:
    tokens = [37 + 3 * rank for rank in range(world.size)]
    precise = Recipe("rowwise", wgrad_high_precision=True)
    cases = (
        ("blockwise", dict(format="blockwise", wgrad_high_precision=True), {}, 2),
        ("rowwise", {}, dict(bias=True), 2),
        ("rowwise", {}, dict(activation="relu2", rows=1), 2),
        ("bf16", {}, dict(activation="swiglu_oai", interleaved=True, bias=True), 2),
    )
    for name, recipe, options, top_k in cases:
        options = dict(options)
        made = {n: options.pop(n) for n in ("bias", "rows") if n in options}
        recipe = Recipe(name, **recipe)
        problem = world.whole(tokens, top_k, **made)
        got = run(world.part(problem, tokens), world.parallel(top_k, recipe).experts, **options)
        assert_matches(got, world.wanted(problem, tokens, recipe=recipe, **options), recipe)
    # Gradients that travel in FP8 are the rows that one process makes. The gradient of W_down reads them along tokens.
    problem = world.whole(tokens, 2)
    got = run(world.part(problem, tokens), world.parallel(2, gradients="fp8").experts)
    want = world.wanted(problem, tokens, recipe="rowwise")
    twice, once = got.pop("w_down").double(), want.pop("w_down").double()
    assert (twice - once).norm() <= SHIFTED * once.norm()
    assert_matches(got, want, Recipe("rowwise"))
    for frozen in (("x",), ("w_gate_up", "w_down"), ("x", "scores", "w_gate_up", "w_down")):
        got = run(world.part(problem, tokens), world.parallel(2, precise).experts, frozen)
        assert_equal(got, world.wanted(problem, tokens, recipe=precise, frozen=frozen))
    wide = replace(problem, x=problem.x.float(), w_gate_up=problem.w_gate_up.float())
    got = run(world.part(wide, tokens), world.parallel(2).experts)
    assert got["out"].dtype == got["x"].dtype == torch.float32 and got["w_down"].dtype == torch.bfloat16


def check_routings(world: World) -> None:
    """A rank or all ranks have no tokens, all tokens choose one expert, or ids name no expert."""
    for mode, recipe in product(("exact", "static"), ("rowwise", "bf16")):
        even = [16] * world.size
        for tokens in ([0] * world.size, even, [5, *[0] * (world.size - 1)]):
            if mode == "static" and len(set(tokens)) > 1:
                continue
            problem = world.whole(tokens, 2)
            for ids in (problem.ids, torch.full_like(problem.ids, -1), torch.where(problem.ids < 4, problem.ids, -1)):
                case = replace(problem, ids=ids)
                got = run(world.part(case, tokens), world.parallel(2, recipe, mode=mode).experts)
                assert_matches(got, world.wanted(case, tokens, recipe=recipe), Recipe(recipe))
        one = world.whole(even, 1)
        one = replace(one, ids=torch.full_like(one.ids, 5))
        got = run(world.part(one, even), world.parallel(1, recipe, mode=mode).experts)
        assert_matches(got, world.wanted(one, even, recipe=recipe), Recipe(recipe))


def check_capacity(world: World) -> None:
    """Tokens beyond the capacity have no effect. `check` reports them on every rank, once."""
    tokens = [32] * world.size
    problem = world.whole(tokens, 1)
    problem = replace(problem, ids=torch.zeros_like(problem.ids))
    room = 32 // world.size // 2
    parallel = world.parallel(1, mode="static", capacity=0.5)
    got = run(world.part(problem, tokens), parallel.experts)
    kept = (torch.arange(32 * world.size, device=world.device) % 32 < room)[:, None]
    served = replace(problem, ids=torch.where(kept, 0, -1))
    assert_matches(got, world.wanted(served, tokens, recipe="rowwise"), Recipe("rowwise"))
    lost = f"{world.size * (32 - room)} tokens and 0 slots"
    world.raises(lost, lambda: run(world.part(problem, tokens), parallel.experts))  # raises in the next step
    run(world.part(problem, tokens), parallel.experts)
    world.raises(lost, parallel.check)
    parallel.check()
    counting = world.parallel(1, mode="static", capacity=0.5, overflow="count")
    for _ in range(2):
        run(world.part(problem, tokens), counting.experts)
    world.raises(f"{2 * world.size * (32 - room)} tokens and 0 slots", counting.check)
    if world.size == 1:
        return
    # All tokens choose two experts of rank 0, which has room for 16 rows and 16 slots. Expert 0 is served first.
    tokens = [8] * world.size
    problem = world.whole(tokens, 2)
    ids = torch.tensor([0, 1], device=world.device).repeat(8 * world.size, 1)
    parallel = world.parallel(2, mode="static", capacity=1.0)
    got = run(world.part(replace(problem, ids=ids), tokens), parallel.experts)
    kept = torch.arange(8 * world.size, device=world.device) % 8 < 16 // world.size
    ids = torch.where(kept[:, None], torch.tensor([0, -1], device=world.device), -1)
    assert_matches(got, world.wanted(replace(problem, ids=ids), tokens, recipe="rowwise"), Recipe("rowwise"))
    world.raises(f"{8 * world.size - 16} tokens and 16 slots", parallel.check)


def check_errors(world: World) -> None:
    """An error on one rank raises on all ranks, and the next call works."""
    tokens = [8] * world.size
    problem = world.part(world.whole(tokens, 2), tokens)
    last = world.rank == world.size - 1
    strange = replace(problem, x=problem.x.double())
    cut = {n: getattr(problem, n)[..., :64] for n in ("x", "w_gate_up", "grad")}
    narrow = replace(problem, **cut, w_down=problem.w_down[:, :64])
    for mode in ("exact", "static"):
        call = partial(run, fn=world.parallel(2, mode=mode).experts)
        text = "x must be bfloat16" if last else f"error was raised on rank {world.size - 1}"
        world.raises(text, partial(call, strange if last else problem))
        if world.size > 1:
            world.raises("must be alike on all ranks", partial(call, narrow if last else problem))
            world.raises("must be alike", partial(call, problem, frozen=("x",) if last else ()))
        call(problem)
    first, got = (list(p.x.shape) for p in (problem, narrow))
    text = f"x must be shaped as in the first call with mode 'static', {first}, got {got}"
    world.raises(re.escape(text), partial(call, narrow))
    experts = world.parallel(2).experts
    args = problem.x, problem.ids, problem.scores, problem.w_gate_up, problem.w_down
    one = [a[:, :1] for a in args[1:3]]
    world.raises("topk_ids must have 2 columns, got 1", lambda: experts(args[0], *one, *args[3:]))
    world.raises("w_down must have the", lambda: experts(*args[:3], *(w[:1] for w in args[3:])))
    world.raises("num_experts must be a multiple", lambda: ExpertParallel(dist.group.WORLD, 0, 2))
    if world.size > 1:
        world.raises("top_k must be the same on all ranks", lambda: world.parallel(2 + last))
        world.raises("recipe must be the same on all ranks", lambda: world.parallel(2, "bf16" if last else "rowwise"))
    world.raises("recipe must be the same for all sizes", lambda: world.parallel(2, "auto"))
    world.raises("gradients must be 'bf16'", lambda: world.parallel(2, "bf16", gradients="fp8"))
    world.raises("mode must be", lambda: world.parallel(2, mode="loose"))
    world.raises("capacity must be", lambda: world.parallel(2, mode="static", capacity=0.0))
    world.raises("capacity must be", lambda: world.parallel(2, capacity=1.0))
    world.raises("group must be a ProcessGroup", lambda: ExpertParallel("world", EXPERTS, 2))


def check_determinism(world: World) -> None:
    tokens = [33] * world.size
    problem = world.part(world.whole(tokens, 3), tokens)
    for mode in ("exact", "static"):
        experts = world.parallel(3, "blockwise", mode=mode).experts
        assert_equal(run(problem, experts), run(problem, experts))


def check_reuse_and_recomputation(world: World) -> None:
    tokens = [24] * world.size
    problem = world.part(world.whole(tokens, 2), tokens)
    experts = world.parallel(2).experts
    want = run(problem, experts)
    with moe_fp8_ext.reuse_weights():
        assert_equal(run(problem, experts), want)
    again = partial(torch.utils.checkpoint.checkpoint, experts, use_reentrant=False)
    assert_equal(run(problem, again), want)


def check_modules(world: World) -> None:
    """A seed gives the same experts as in one process. A module has the bytes of the function, also with DTensor
    parameters."""
    tokens = [24] * world.size
    problem = world.part(world.whole(tokens, 2), tokens)
    whole = dict(module(world).named_parameters())
    by_mesh = ExpertParallel(meshes(world, world.size)["ep"], EXPERTS, 2)
    for ep in (world.parallel(2), by_mesh):
        experts = module(world, ep=ep)
        mine = {n: p.to_local() if ep.mesh else p for n, p in experts.named_parameters()}
        assert_equal(mine, {n: p[world.local] for n, p in whole.items()})
        weights = dict(zip(("w_gate_up", "b_gate_up", "w_down", "b_down"), mine.values(), strict=True))
        want = run(replace(problem, **{n: w.detach() for n, w in weights.items()}), ep.experts)
        for copy in (experts, deepcopy(experts)):
            assert copy.ep is ep
            x, scores = problem.x.clone().requires_grad_(), problem.scores.clone().requires_grad_()
            out = copy(x, problem.ids, scores)
            out.backward(problem.grad)
            grads = [p.grad for p in copy.parameters()]
            assert all(isinstance(g, DTensor) == (ep.mesh is not None) for g in grads)
            grads = dict(zip(weights, [g.to_local() if ep.mesh else g for g in grads], strict=True))
            assert_equal(dict(out=out.detach(), x=x.grad, scores=scores.grad, **grads), want)
    torch.manual_seed(0)
    router = Router(EXPERTS, D, 2, device=world.device)
    out, _ = MoE(router, experts)(problem.x.view(2, -1, D))
    assert out.shape == (2, len(problem.x) // 2, D) and out.isfinite().all()


def check_checkpoints(world: World) -> None:
    """Checkpoints of groups of ranks load into a group twice as large, and into one process. So do frozen weights.

    The state dict of one process loads into a group.
    """
    for freeze in (lambda experts: experts, Experts.freeze_):
        ep = ExpertParallel(meshes(world, max(world.size // 2, 1))["ep"], EXPERTS, 2)
        torch.manual_seed(3)
        saved = freeze(module(world, ep=ep))
        folder = world.folder / f"checkpoint {freeze.__name__}"
        checkpoint.save(saved.state_dict(), checkpoint_id=folder)
        larger = freeze(module(world, ep=ExpertParallel(meshes(world, world.size)["ep"], EXPERTS, 2)))
        for other, alone in ((larger, False), (freeze(module(world)), True)):
            with torch.no_grad():
                for t in (*other.parameters(), *other.buffers()):
                    t.zero_()
            state = other.state_dict()
            checkpoint.load(state, checkpoint_id=folder, no_dist=alone)
            other.load_state_dict(state)
            for name, t in other.state_dict().items():
                whole = saved.state_dict()[name]
                assert torch.equal(*(t.full_tensor() if isinstance(t, DTensor) else t for t in (t, whole))), name
                assert isinstance(whole, DTensor) or name.endswith("_extra_state")
        whole = freeze(module(world)).state_dict()
        set_model_state_dict(larger, dict(whole), options=StateDictOptions(full_state_dict=True))
        for name, t in larger.state_dict().items():
            assert torch.equal(t.full_tensor() if isinstance(t, DTensor) else t, whole[name]), name


def check_documents(world: World) -> None:
    """Runs the blocks of docs/expert-parallel.md. Over a mesh of two dimensions, gradients equal the gradients of one
    process."""
    names = {}
    plain, sharded, step, _ = blocks("docs/expert-parallel.md")
    torch.manual_seed(world.rank)  # every rank has different tokens
    with torch.device(world.device):
        exec(plain, names)
        assert names["out"].shape == names["x"].grad.shape
        if world.size == 1:
            return
        if world.device == "cpu" and world.size > 2:
            for_gloo = "layer.experts.set_force_sum_reduction_for_comms(True)"
            sharded = sharded.replace("\nfully_shard(layer)\n", f"\n{for_gloo}\nfully_shard(layer)\n")
        torch.manual_seed(0)
        exec(sharded, names)
        torch.manual_seed(0)
        layer = MoE(Router(EXPERTS, 256, 2), Experts(EXPERTS, 256, 128))
    tokens = [torch.empty_like(names["x"]) for _ in range(world.size)]
    dist.all_gather(tokens, names["x"].detach())
    layer(torch.cat(tokens))[0].mean().backward()
    for p, q in zip(names["layer"].parameters(), layer.parameters(), strict=True):
        # The whole and its parts, of independent tokens, are each rounded to bfloat16, by 2^-8 / sqrt(3) in the root
        # mean square at most. Two such errors are 2^-8 sqrt(2 / 3). For tensor cores see fp8_gemm_db.
        terms = world.size * len(names["x"])
        lost = SHIFTED + 2**-8 if world.device == "cpu" else 10 ** (-fp8_gemm_db(terms, torch.bfloat16) / 20)
        assert (p.grad.full_tensor() - q.grad).norm() <= lost * q.grad.norm()
    before = [p.detach().clone() for p in names["layer"].parameters()]
    exec(step, names)
    after = names["layer"].parameters()
    assert not any(torch.equal(p.full_tensor(), q.full_tensor()) for p, q in zip(after, before, strict=True))


def check_errors_of_modules(world: World) -> None:
    ep, last = world.parallel(2), world.rank == world.size - 1
    world.raises("^Experts: num_experts must equal ep's, 8, got 4$", lambda: Experts(4, D, F, ep=ep))
    text = r"recipe must equal ep's, Recipe\('rowwise'\), got Recipe\('bf16'\)"
    world.raises(f"^Experts: {text}$", lambda: Experts(EXPERTS, D, F, recipe="bf16", ep=ep))
    experts = module(world, ep=ep, main_grad=True)
    with pytest.raises(ValueError, match=text):
        convert_(experts, "bf16")
    assert convert_(experts, "rowwise").converted
    revert_(experts)
    for name, p in experts.named_parameters():
        if not (last and name == "down_proj"):
            p.main_grad = torch.zeros_like(p)
    tokens = [8] * world.size
    problem = world.part(world.whole(tokens, 2), tokens)
    call = problem.x, problem.ids, problem.scores
    text = "down_proj must have a main_grad" if last else f"error was raised on rank {world.size - 1}"
    world.raises(text, lambda: experts(*call))
    strange = DTensor.from_local(problem.x, meshes(world, world.size)["ep"])
    text = "tensors must be the rank's own, got a DTensor" if last else "error was raised on rank"
    experts = module(world, ep=ep)
    world.raises(text, lambda: experts(strange if last else problem.x, *call[1:]))
    experts(*call)


CHECKS = (
    *(check_bytes, check_options, check_routings, check_capacity, check_errors, check_determinism),
    *(
        check_reuse_and_recomputation,
        check_modules,
        check_checkpoints,
        check_documents,
        check_errors_of_modules,
        check_graph,
    ),
)


@NEEDS_GLOO
@pytest.mark.parametrize("size", [1, 2, 4])
def test_processes(size, tmp_path):
    in_processes(size, process, size, False, CHECKS, tmp_path)


@NO_SECOND_GPU
def test_two_gpus(tmp_path):
    in_processes(2, process, 2, True, CHECKS, tmp_path, backend="nccl")


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match="group must be one of torch.distributed, which is not initialized"):
        ExpertParallel(None, EXPERTS, 2)


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8_rowmajor"])
def test_a_message_is_half_of_one_in_bfloat16(recipe):
    x, ids, scores = torch.randn(4, 7168).bfloat16(), torch.zeros(4, 8, dtype=torch.int32), torch.zeros(4, 8)
    q, scale = moe_fp8_ext.ops.quantize_rows(x, recipe)
    indices = torch.arange(4, dtype=torch.int32)
    ours, theirs = (
        moe_fp8_ext.ops.pack_tokens(t, ids, scores, of_t, indices, 1, 8) for t, of_t in ((q, scale), (x, None))
    )
    assert ours.shape[1] <= 0.52 * theirs.shape[1]


@pytest.mark.parametrize(("fmt", "rounding"), [("rowwise", "pow2"), ("mxfp8_rowmajor", "rceil")])
def test_powers_of_two_only_shift_exponents(fmt, rounding):
    """FP8 rows, quantized again along tokens, keep their values to half a step of the column's scale."""
    powers = torch.arange(-126, 127, dtype=torch.float64)  # all of bfloat16's; below 2^-40 the amax of a row is 1e-12
    x = torch.exp2(powers)[:, None] * (1 + torch.rand(253, 64)) * torch.randn(253, 64).sign()
    x = (x * torch.exp2(torch.randint(-9, 1, (253, 64)))).bfloat16()
    q, scale = moe_fp8_ext.ops.quantize_rows(x, fmt, rounding=rounding)
    rows = moe_fp8_ext.ops.dequantize(q, scale, fmt, out_dtype=torch.float32)
    assert_same_tensor(rows, moe_fp8_ext.ops.dequantize(q, scale, fmt).float(), "bfloat16 holds them")
    ops = moe_fp8_ext.ops
    for first in range(0, 253, 3):
        group = rows[first : first + 12]
        offs = torch.tensor([len(group)], dtype=torch.int32)
        q_t, scale_t, ends = ops.quantize_tokens(group.bfloat16(), fmt, offs=offs, rounding=rounding)
        columns = ops.dequantize(q_t, scale_t, fmt, along="tokens", offs=ends, out_dtype=torch.float32)
        step = scale_t.float().view(64, -1)[:, 0] * 2**-9  # the step of the smallest numbers of E4M3
        got, exact = columns[:, : len(group)].t(), group.abs() >= step * 2**3  # normal numbers
        assert torch.equal(got[exact], group[exact]) and (exact.any() or powers[first] < -46)
        assert ((got - group).abs() <= step / 2).all()
