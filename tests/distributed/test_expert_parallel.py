"""Experts sharded by expert over two processes equal experts of one process."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers import ROOT, blocks, full
from processes import NEEDS_GLOO, in_processes
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from moe_fp8_ext import Experts, Router, convert_, grouped_mm
from moe_fp8_ext.distributed import ExpertParallel
from moe_fp8_ext.distributed.plan import Route
from moe_fp8_ext.integrations.transformers import register

PROCESSES, D, F, TOKENS, TOP_K = 2, 64, 48, 40, 2
MODEL = "qwen3_moe"


def experts_of(count: int, recipe: str = "rowwise", **options: object) -> Experts:
    torch.manual_seed(0)
    return Experts(count, D, F, recipe=recipe, dtype=torch.bfloat16, **options)


def sharded(experts: nn.Module, mesh: DeviceMesh, placement: object = Shard(0)) -> nn.Module:
    for name, p in list(experts.named_parameters(recurse=False)):
        experts.register_parameter(name, nn.Parameter(distribute_tensor(p.detach(), mesh, [placement])))
    return experts


def calls(count: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, ids, scores and the gradient of the output, the same in every process. One id names no expert."""
    g = torch.Generator().manual_seed(seed)
    x, grad = (torch.randn(TOKENS, D, generator=g).bfloat16() for _ in range(2))
    ids = torch.rand(TOKENS, count, generator=g).topk(TOP_K).indices
    ids[3, 1] = -1
    return x, ids, torch.rand(TOKENS, TOP_K, generator=g), grad


def results(experts: Callable, parameters: dict[str, Tensor], x: Tensor, ids: Tensor, scores: Tensor, grad: Tensor):
    x, scores = x.detach().requires_grad_(), scores.detach().requires_grad_()
    out = experts(x, ids, scores)
    out.backward(grad)
    return dict(out=out.detach(), x=x.grad, scores=scores.grad, **{name: p.grad for name, p in parameters.items()})


def check_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Weights and scores belong to one rank, so their gradients are equal. A token's row is a sum of the ranks' rows.
    Each of these is rounded, and so is the sum; the whole is rounded once. A rounding to bfloat16 is at most 2^-8 of a
    value."""
    for name, whole in want.items():
        value = got[name].full_tensor()
        if name in ("out", "x"):
            assert got[name].placements == (Partial(),)
            of_ranks = DTensor.from_local(got[name].to_local().abs().float(), got[name].device_mesh, [Partial()])
            bound = 2**-8 * (of_ranks.full_tensor() + value.abs().float() + whole.abs().float())
            assert ((value.float() - whole.float()).abs() <= bound).all(), name
        else:
            assert torch.equal(value, whole), name


def check_tokens_of_all(mesh: DeviceMesh, count: int, compiled: bool = False, **options: object) -> None:
    whole, call = experts_of(count, **options), calls(count)
    want = results(whole, dict(whole.named_parameters()), *call)
    experts = sharded(experts_of(count, **options), mesh)
    fn = torch.compile(experts, fullgraph=True, backend="aot_eager") if compiled else experts
    everywhere = [DTensor.from_local(t, mesh, [Replicate()]) for t in call]
    check_same(results(fn, dict(experts.named_parameters()), *everywhere), want)


def check_tokens_of_ranks(mesh: DeviceMesh, fsdp: bool) -> None:
    """A dispatcher has brought tokens to a rank, with ids of the rank."""
    rank, parameters = mesh.get_local_rank(), []
    experts, whole = sharded(experts_of(4), mesh), experts_of(2)
    with torch.no_grad():
        for p, part in zip(experts.parameters(), whole.parameters(), strict=True):
            part.copy_(p.to_local())
    if fsdp:
        fully_shard(experts, mesh=init_device_mesh("cpu", (1, PROCESSES), mesh_dim_names=("dp", "ep"))["dp"])
    call = calls(2, seed=rank)
    parameters = dict(experts.named_parameters())
    got, want = results(experts, parameters, *call), results(whole, dict(whole.named_parameters()), *call)
    for name, value in want.items():
        local = got[name].to_local() if name in parameters else got[name]
        assert torch.equal(local, value), name


def check_documents(mesh: DeviceMesh) -> None:
    """Runs the block of docs/expert-parallel.md, with tokens that every rank has."""
    (block,) = blocks("docs/expert-parallel.md", "Experts without a dispatcher")
    experts, call = experts_of(4), calls(4)
    x, topk_ids, topk_scores = (DTensor.from_local(t, mesh, [Replicate()]) for t in call[:3])
    names = dict(globals(), experts=experts, mesh=mesh, x=x, topk_ids=topk_ids, topk_scores=topk_scores)
    exec(block, names)
    assert names["out"].placements == (Partial(),) and experts.down_proj.placements == (Shard(0),)


def check_main_grad(mesh: DeviceMesh) -> None:
    whole, call = experts_of(4, main_grad=True), calls(4)
    experts = sharded(experts_of(4, main_grad=True), mesh)
    for p, q in zip(whole.parameters(), experts.parameters(), strict=True):
        p.main_grad, q.main_grad = (torch.ones_like(t, dtype=torch.float32) for t in (p.detach(), q.detach()))
    whole(*call[:3]).backward(call[3])
    x, ids, scores, grad = (DTensor.from_local(t, mesh, [Replicate()]) for t in call)
    experts(x, ids, scores).backward(grad)
    for p, q in zip(whole.parameters(), experts.parameters(), strict=True):
        assert torch.equal(q.main_grad.full_tensor(), p.main_grad)
        assert q.grad is None or not q.grad.to_local().any()  # torch 2.11 makes zeros of None


def check_router(mesh: DeviceMesh) -> None:
    """A router whose tokens every rank has gives the bytes of one process."""
    torch.manual_seed(0)
    alone, router = (Router(8, D, TOP_K, z_loss=0.1, bias_rate=0.1) for _ in range(2))
    router.load_state_dict(alone.state_dict())
    router.weight = nn.Parameter(distribute_tensor(router.weight.detach(), mesh, [Replicate()]))
    x, grad = torch.randn(TOKENS, D), torch.randn(TOKENS, TOP_K)
    found = []
    for of, place in ((alone, lambda t: t), (router, lambda t: DTensor.from_local(t, mesh, [Replicate()]))):
        tokens = place(x.clone()).requires_grad_()
        ids, scores, loss = of(tokens)
        torch.autograd.backward([scores, loss], [place(grad), None])
        results = ids, scores.detach(), loss.detach(), tokens.grad, of.weight.grad, of.tokens_per_expert
        found.append([full(t) for t in results])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    tokens = DTensor.from_local(x, mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match=r"^Router: tensors must be \(Replicate\(\),\) on .*got \(Shard\(dim=0\),\)"):
        router(tokens)


def check_errors(mesh: DeviceMesh) -> None:
    x, ids, scores, _ = calls(4)
    everywhere = [DTensor.from_local(t, mesh, [Replicate()]) for t in (x, ids, scores)]
    experts = sharded(experts_of(4), mesh)
    for i, name in enumerate(("x", "topk_ids", "topk_scores")):
        of_rank, call = [x, ids, scores][i], list(everywhere)
        call[i] = DTensor.from_local(of_rank, mesh, [Shard(0)])
        check_refused(rf"{name} must be \(Replicate\(\),\) on the mesh .*got \(Shard\(dim=0\),\) on", experts, call)
        if i:
            call[i] = of_rank
            check_refused(rf"{name} must be \(Replicate\(\),\) on the mesh .*got no DTensor$", experts, call)
    check_refused(r"x must be \(Replicate\(\),\) on the mesh of the parameters, None", experts_of(4), everywhere)
    for placement in (Replicate(), Shard(1)):
        experts = sharded(experts_of(4), mesh, placement)
        for call in (everywhere, (x, ids, scores)):
            check_refused(r"gate_up_proj must be sharded by expert, \(Shard\(dim=0\),\), got ", experts, call)
    weight, offs = sharded(experts_of(4), mesh).down_proj, torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="does not have a sharding strategy"):  # torch's own error
        grouped_mm(x[:, :F].contiguous(), weight.mT, offs)
    one = sharded(experts_of(1), mesh)
    for call in (everywhere, (x, ids, scores)):
        check_refused("gate_up_proj must have experts for each of 2 ranks, as Shard cuts, got 1", one, call)


def check_refused(text: str, experts: Experts, call: list[Tensor]) -> None:
    with pytest.raises(RuntimeError, match=f"^Experts: {text}"):
        experts(*call)


def run(rank: int, checks: Callable[[DeviceMesh], None]) -> None:
    checks(init_device_mesh("cpu", (PROCESSES,), mesh_dim_names=("ep",)))


def check_experts(mesh: DeviceMesh) -> None:
    for recipe, bias, count in itertools.product(("rowwise", "blockwise", "mxfp8", "bf16"), (False, True), (4, 5)):
        check_tokens_of_all(mesh, count, recipe=recipe, bias=bias)
    check_tokens_of_all(mesh, 4, compiled=True)
    check_tokens_of_ranks(mesh, fsdp=False)
    check_tokens_of_ranks(mesh, fsdp=True)
    check_main_grad(mesh)
    check_documents(mesh)
    check_router(mesh)
    check_errors(mesh)


PLAN = {
    **{f"0.{name}": "grouped_gemm" for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")},
    "0": "ep_dispatch_experts",
}


def by_plan(name: str, mesh: DeviceMesh, of_one_batch: DeviceMesh, implementation: str) -> nn.Module:
    """Returns experts of a model of Transformers, after its parallel plan. A seed determines their weights."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers_models import EXPERTS, experts_of

    torch.manual_seed(0)
    model = nn.Sequential(experts_of(name))
    convert_(model, "bf16")
    there = {name for name, _ in [*model.named_parameters(), *model.named_modules()]}
    plan = {name: style for name, style in PLAN.items() if name in there}
    apply_expert_parallelism(model, mesh, of_one_batch, plan, implementation)
    assert model[0].num_experts == EXPERTS // PROCESSES
    return model[0]


def check_plan_of_transformers(mesh: DeviceMesh) -> None:
    """`convert_` runs after the plan. The plan's all-reduce and all-to-all give local tensors to the experts."""
    from transformers_models import calls as calls_of_model
    from transformers_models import experts_of

    register()
    ours = "moe_fp8_bf16"
    for name, implementation in (*((MODEL, i) for i in ("all_reduce", "all_to_all", ours)), ("gpt_oss", ours)):
        torch.manual_seed(0)
        whole, (x, ids, scores) = experts_of(name), calls_of_model()
        convert_(whole, "bf16")
        want = results(whole, dict(whole.named_parameters()), x, ids, scores, torch.ones_like(x))
        experts = by_plan(name, mesh, mesh, implementation)
        got = results(experts, dict(experts.named_parameters()), x, ids, scores, torch.ones_like(x))
        for of, value in want.items():
            value, part = value.double(), full(got[of]).double()
            # A path has at most 5 roundings to bfloat16 that the other path has not: of products with scores and of
            # sums, in both directions. Each moves a value by 2^-8 / sqrt(3) or less in the root mean square, and 12 of
            # them by 2^-7.
            assert (part - value).norm() <= 2**-7 * value.norm(), (name, implementation, of)


def check_tokens_of_transformers(mesh: DeviceMesh) -> None:
    """Each rank has its own batch. ExpertParallel sends it in messages in FP8."""
    from transformers_models import EXPERTS
    from transformers_models import calls as calls_of_model

    register("blockwise")
    alone = init_device_mesh("cpu", (PROCESSES, 1), mesh_dim_names=("dp", "tp"))["tp"]
    torch.manual_seed(mesh.get_local_rank())
    x, ids, scores = calls_of_model(tokens=20 + mesh.get_local_rank())
    for implementation, recipe in (("moe_fp8", "blockwise"), ("moe_fp8_rowwise", "rowwise")):
        experts = by_plan(MODEL, mesh, alone, implementation)
        ep = ExpertParallel(mesh, EXPERTS, ids.shape[1], recipe=recipe)
        weights = {f"w_{n}": getattr(experts, f"{n}_proj").to_local().detach() for n in ("gate_up", "down")}
        weights = {n: w.clone().requires_grad_() for n, w in weights.items()}
        want = results(partial(ep.experts, **weights), weights, x, ids, scores, torch.ones_like(x))
        with patch.object(Route, "send", autospec=True, side_effect=Route.send) as sent:
            got = results(experts, dict(experts.named_parameters()), x, ids, scores, torch.ones_like(x))
        assert sent.call_args_list[0].args[1].dtype == torch.uint8  # the type of a message; tokens would be bfloat16
        for part, value in zip(got.values(), want.values(), strict=True):
            assert torch.equal(part.to_local() if isinstance(part, DTensor) else part, value)
    with pytest.raises(RuntimeError, match="^ExpertParallel: recipe must be the same for all sizes"):
        by_plan(MODEL, mesh, alone, "moe_fp8_auto")(x, ids, scores)
    with pytest.raises(RuntimeError, match="^moe_fp8: MuseSparkExperts must be one operation of moe_fp8_ext"):
        by_plan("muse_spark_text", mesh, alone, "moe_fp8")


@pytest.mark.parametrize("dim", [1, 7, 8])
def test_static_rows_of_any_width(dim, world_of_one):
    """Headers have 4 bytes. Rows of outputs and gradients may be an odd number of bfloat16 values."""
    parallel = ExpertParallel(dist.group.WORLD, 2, 1, recipe="rowwise", mode="static")
    x, ids = torch.ones(3, dim, dtype=torch.bfloat16, requires_grad=True), torch.tensor([[0], [1], [1]])
    out = parallel.experts(x, ids, torch.ones(3, 1), torch.ones(2, 16, dim), torch.ones(2, dim, 8))
    out.sum().backward()
    assert x.grad.all()
    parallel.check()


@NEEDS_GLOO
@pytest.mark.parametrize("checks", [check_experts, check_plan_of_transformers, check_tokens_of_transformers])
def test_two_processes(checks):
    if checks is not check_experts:
        pytest.importorskip("transformers.distributed.expert_parallel", reason="transformers 5.23.0 has such plans")
    in_processes(PROCESSES, run, checks)


def test_bench_table(monkeypatch):
    """The table has the options, microseconds and ratios."""
    pytest.importorskip("tabulate", reason="the bench's dependencies are not installed")
    monkeypatch.syspath_prepend(ROOT / "bench")
    by_recipe = dict(bf16=2000.0, rowwise=1000.0, blockwise=1100.0)
    layers = {"torch BF16": 9000.0, "rowwise exact": 5000.0, "blockwise exact": 6000.0}
    layers |= {"rowwise static": 4000.0, "blockwise static": 6000.0, "rowwise exact, FP8 gradients": 4000.0}
    layers |= {"blockwise exact, 2 chunks": 5000.0, "bf16 exact": 7500.0}
    result = dict(gpus=2, device="a GPU", commit=None, torch="2", dispatch_us=by_recipe, bytes=by_recipe)
    result |= dict(exchange_us={"in a dispatch": 1000.0, "alone": 950.0}, layer_us=layers)
    tables = importlib.import_module("tables")
    lines = tables.parallel_text(result).splitlines()[-9:]
    assert [[cell.strip() for cell in line.split("|")[2:-1]] for line in lines] == [
        ["<= 0.60", "2,000", "1,000 (0.50)", "1,100 (0.55)"],
        ["<= 0.52", "2,000", "1,000 (0.50)", "1,100 (0.55)"],
        [">= 0.90", "", "0.95", ""],
        ["", "9,000", "", ""],
        [">= 1.45", "", "5,000 (1.80 x)", "6,000 (1.50 x)"],
        ["", "", "5,000 (1.50 x)", "6,000 (1.25 x)"],
        [">= 0.97", "", "4,000 (1.25 x)", "6,000 (1.00 x)"],
        ["", "", "4,000 (1.25 x)", ""],
        ["", "", "", "5,000 (1.20 x)"],
    ]
    run = dict(recipe="bf16", losses=[], held_out=1.5)
    losses = dict(device="a GPU", commit="1" * 40, steps=9, ranks=2, one=[run])
    text = tables.parallel_text(result, losses | {"over ranks": [run | dict(held_out=1.53)]})
    assert [cell.strip() for cell in text.splitlines()[-1].split("|")[1:-1]] == ["bf16", "1.5300", "1.5000", "+2.00%"]
