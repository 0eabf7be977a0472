"""experts in torch: memory kept for backward, reused weights, checkpoints, graphs, derivatives and errors."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from derivatives import check_no_second_derivative, check_no_tangent
from experts_problem import LEAVES, assert_equal, layer, run
from grouped_problem import Calls
from helpers import assert_same, assert_same_tensor, check_cuda_graph, counted_backend, kept_bytes
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import moe_fp8_ext
from moe_fp8_ext import Recipe, _torch, experts
from moe_fp8_ext.quantization.format import FORMATS
from moe_fp8_ext.reference.numerics import round_up

RECIPES = ("bf16", *FORMATS)
HIGH = Recipe("high precision", "rowwise", wgrad_high_precision=True)


def kept(problem, frozen: tuple[str, ...] = (), **options) -> int:
    """Bytes kept for backward, without x, scores and weights, which exist anyway."""
    leaves = {n: getattr(problem, n) for n in LEAVES if getattr(problem, n) is not None}
    for n, leaf in leaves.items():
        leaf.requires_grad_(n not in frozen)
    call = problem.x, problem.ids, problem.scores, problem.w_gate_up, problem.w_down
    return kept_bytes(lambda: experts(*call, **options), *leaves.values())


@pytest.mark.parametrize("keep", ["fp8", "bf16"])
@pytest.mark.parametrize("name", RECIPES)
def test_what_is_kept(name, keep, device):
    t, d, f, e, top_k = 150, 96, 80, 5, 3
    p, n = t * top_k, 2 * f
    scales = {
        "rowwise": lambda rows, k: 4 * rows,
        "blockwise": lambda rows, k: 4 * round_up(rows, 4) * -(-k // 128),
        "mxfp8": lambda rows, k: round_up(rows, 128) * round_up(-(-k // 32), 4),
        "mxfp8_rowmajor": lambda rows, k: rows * -(-k // 32),
    }.get(name)
    squares = {"blockwise": lambda rows, k: 4 * -(-rows // 128) * -(-k // 128)}
    of_weight = squares.get(name, scales)
    h = 2 * p * n if scales is None or keep == "bf16" else p * n + scales(p, n)
    weights = 0 if scales is None else e * (2 * f * d + d * f + of_weight(d, 2 * f) + of_weight(f, d))
    problem = layer(t, d, f, e, top_k).at(device)
    # These are the order of slots, its inverse and the ends of groups. Scores belong to the caller.
    assert kept(problem, recipe=Recipe(name), keep=keep) == h + weights + 8 * p + 4 * e
    # If only W_down needs a gradient, backward multiplies by no weight.
    frozen = "x", "scores", "w_gate_up"
    assert kept(problem, frozen, recipe=Recipe(name), keep=keep) == h + 8 * p + 4 * e


OF_REUSE = pytest.mark.skipif(_torch.state_of is None, reason="reuse_weights takes private names of torch")


@OF_REUSE
@pytest.mark.parametrize("name", RECIPES)
def test_weights_are_reused(name, device):
    problem = layer(t=60, d=64, f=48).at(device)
    want = run(problem, recipe=Recipe(name))
    leaves = {n: getattr(problem, n).clone().requires_grad_() for n in LEAVES[:4]}
    with moe_fp8_ext.reuse_weights(), Calls() as called:
        for _ in range(2):
            out = experts(leaves["x"], problem.ids, *list(leaves.values())[1:], recipe=Recipe(name))
            assert_same_tensor(out, want["out"], "out")
            out.backward(problem.grad)
    assert called.names.count("quantize_weight") == (0 if name == "bf16" else 2)
    for n, leaf in leaves.items():
        assert_same_tensor(leaf.grad, 2 * want[n], n)


@OF_REUSE
def test_weights_are_shared_with_grouped_mm(device):
    problem, offs = layer(t=30, d=32, f=32, e=4, top_k=2).at(device), torch.tensor([0, 9, 9, 30], dtype=torch.int32)
    w_gate_up, w_down = problem.w_gate_up.requires_grad_(), problem.w_down.requires_grad_()
    with moe_fp8_ext.reuse_weights(), Calls() as called:
        experts(problem.x, problem.ids, problem.scores, w_gate_up, w_down)
        for w in (w_gate_up, w_down):
            moe_fp8_ext.grouped_mm(problem.x, w.mT, offs.to(device))
    assert called.names.count("quantize_weight") == 2


@pytest.mark.parametrize("name", RECIPES)
def test_checkpointing(name, device):
    """Two layers form one checkpoint, so backward of the second recomputes both."""

    def block(x: Tensor, *call: Tensor, **options: object) -> Tensor:
        for _ in range(2):
            x = x + experts(x, *call, **options)
        return x

    problem = layer(bias=True).at(device)
    want = run(problem, block, recipe=Recipe(name))
    got = run(problem, lambda *a, **k: checkpoint(block, *a, use_reentrant=False, **k), recipe=Recipe(name))
    assert_equal(got, want)


@pytest.mark.parametrize("name", ["rowwise", "bf16"])
def test_used_twice(name, device):
    """Two calls share weights and one backward. A retained graph gives the same gradients again."""
    problem = layer(t=60, d=64, f=48).at(device)
    want = run(problem, recipe=name)
    leaves = [getattr(problem, n).clone().requires_grad_() for n in LEAVES[:4]]
    call = leaves[0], problem.ids, *leaves[1:]
    out = experts(*call, recipe=name) + experts(*call, recipe=name)
    first = torch.autograd.grad(out, leaves, problem.grad, retain_graph=True)
    assert_same(torch.autograd.grad(out, leaves, problem.grad), first)
    for n, got in zip(LEAVES, first, strict=False):
        assert_same_tensor(got, 2 * want[n], n)


def test_other_derivatives_raise(device):
    """Forward-mode and second derivatives raise; they are never silently zero."""
    problem = layer(t=9, d=32, f=16).at(device)
    weights = problem.w_gate_up, problem.w_down
    check_no_tangent(lambda x: experts(x, problem.ids, problem.scores, *weights), problem.x)
    check_no_tangent(lambda scores: experts(problem.x, problem.ids, scores, *weights), problem.scores)
    leaves = problem.x.requires_grad_(), problem.scores.requires_grad_()
    check_no_second_derivative(experts(leaves[0], problem.ids, leaves[1], *weights), *leaves)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacfwd, torch.func.jacrev, torch.vmap])
def test_transforms_of_torch_func_raise(transform, device):
    problem = layer(t=9, d=32, f=16).at(device)
    weights = problem.w_gate_up, problem.w_down
    x = problem.x if transform is not torch.vmap else problem.x.expand(2, -1, -1)
    with pytest.raises(RuntimeError, match="functorch transforms"):
        transform(lambda x: experts(x, problem.ids, problem.scores, *weights).float().sum())(x)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("exported_with_gradients", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_export_has_forward_alone(strict, exported_with_gradients, frozen, device):
    made = moe_fp8_ext.MoE(moe_fp8_ext.Router(4, 32, 2), moe_fp8_ext.Experts(4, 32, 16)).to(device)
    made.requires_grad_(not frozen)
    x = torch.randn(9, 32, device=device)
    with torch.set_grad_enabled(exported_with_gradients):
        exported = torch.export.export(made, (x,), strict=strict).module()
    with torch.no_grad():
        want = made(x)
        assert_same(exported(x), want)
    asks = x.clone().requires_grad_()
    for tokens in (x, asks):
        # A strict export of a call with gradients contains the whole Function. Its output is then a constant.
        is_constant = strict and exported_with_gradients and not frozen
        if is_constant or (frozen and tokens is x):
            got = exported(tokens)
            assert_same(got, want)
            assert not got[0].requires_grad
            continue
        with pytest.raises(RuntimeError, match=r"must not ask for a gradient.* under torch.no_grad\(\)"):
            exported(tokens)


@pytest.mark.parametrize("name", RECIPES)
def test_deterministic(name, device):
    problem = layer(bias=True).at(device)
    assert_equal(run(problem, recipe=Recipe(name)), run(problem, recipe=Recipe(name)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["rowwise", "bf16"])
def test_autocast(name, dtype, device):
    """Autocast equals casting by the caller. float32 leaves get float32 gradients."""
    problem = layer(bias=True).at(device)
    wide = replace(problem, **{n: getattr(problem, n).float() for n in LEAVES})
    with torch.autocast(device, dtype):
        got = run(wide, recipe=name)
    cast = {n: getattr(problem, n).to(dtype) for n in LEAVES if n != "scores"}
    want = run(replace(problem, **cast, grad=problem.grad.to(dtype)), recipe=name)
    assert got["out"].dtype == dtype and all(got[n].dtype == torch.float32 for n in LEAVES)
    assert_equal({n: t.to(want[n].dtype) for n, t in got.items()}, want)


COMPILED = [*((Recipe(name), name != "blockwise") for name in RECIPES), (HIGH, True)]


@pytest.mark.parametrize(("recipe", "bias"), COMPILED, ids=lambda x: getattr(x, "name", None))
def test_compiles_with_dynamic_tokens(recipe, bias, device):
    frames = counted_backend(device)
    compiled = torch.compile(experts, fullgraph=True, backend=frames)

    def call(x, ids, scores, *weights, **options):
        for t in (x, ids, scores):
            torch._dynamo.mark_dynamic(t, 0)
        return compiled(x, ids, scores, *weights, **options)

    for t in (37, 50, 131):
        problem = layer(t, 64, 48, bias=bias).at(device)
        assert_equal(run(problem, call, recipe=recipe), run(problem, recipe=recipe))
    assert frames.frame_count == 1


def test_compiles_with_dynamic_sizes(device):
    """Tokens, experts and slots vary, and one graph serves all."""
    frames = counted_backend(device)
    compiled = torch.compile(experts, fullgraph=True, backend=frames, dynamic=True)
    for t, e, top_k in ((37, 8, 2), (50, 9, 3)):
        problem = layer(t, 64, 48, e, top_k).at(device)
        assert_equal(run(problem, compiled), run(problem))
    assert frames.frame_count == 1


def graph_step(name: str):
    def step(x, ids, scores, w_gate_up, w_down, grad):
        leaves = [t.detach().requires_grad_() for t in (x, scores, w_gate_up, w_down)]
        out = experts(leaves[0], ids, *leaves[1:], recipe=Recipe(name))
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    return step


@pytest.mark.parametrize("name", RECIPES)
def test_cuda_graph(name, gpu):
    problems = (layer(seed=seed).at(gpu) for seed in (0, 1))
    tensors = [(p.x, p.ids, p.scores, p.w_gate_up, p.w_down, p.grad) for p in problems]
    check_cuda_graph(graph_step(name), *tensors)


def test_gradients_of_any_strides(device):
    problem = layer(t=60, d=64, f=48).at(device)
    for grad in (problem.grad.t().contiguous().t(), problem.grad[:1].expand(60, 64)):
        want = run(replace(problem, grad=grad.contiguous()))
        assert_equal(run(replace(problem, grad=grad)), want)


@pytest.mark.parametrize("name", RECIPES)
def test_meta_tensors(name):
    problem = layer(t=20, d=64, f=48, bias=True)
    got = run(problem.at("meta"), recipe=Recipe(name))
    for n, want in run(problem, recipe=Recipe(name)).items():
        assert got[n].is_meta and (got[n].shape, got[n].dtype) == (want.shape, want.dtype), n


@pytest.mark.parametrize(
    ("recipe", "wanted", "what"),
    [
        ("bf16", "scores", 'recipe "bf16"'),
        (HIGH, "w_down", "wgrad_high_precision"),
        (HIGH, "scores", None),
        ("rowwise", "b_down", "biases that need a gradient"),
        ("rowwise", "w_down", None),
    ],
)
def test_max_experts_of_torch(recipe, wanted, what, monkeypatch):
    """Its grouped product takes fewer on a GPU, here 7: an error before anything runs."""
    monkeypatch.setattr(sys.modules["moe_fp8_ext.layer.experts"], "max_experts", lambda x, has_factors: 7)
    frozen = tuple(n for n in LEAVES if n != wanted)
    if what is None:
        assert run(layer(bias=True), recipe=recipe, frozen=frozen).keys() == {"out", wanted}
        return
    with pytest.raises(RuntimeError, match=f"^experts: w_down must have at most 7 experts with {what}, got 8"):
        run(layer(bias=True), recipe=recipe, frozen=frozen)


@pytest.mark.parametrize("name", ["lora_gate_up", "lora_down"])
def test_max_experts_with_adapters(name):
    """Rows without a group count as rows of one more expert, whose factor is zero."""

    def call(e: int) -> Tensor:
        weights = torch.randn(e, 16, 8), torch.randn(e, 8, 8)
        adapter = torch.randn(e, 2, 8), torch.randn(e, 16 if name == "lora_gate_up" else 8, 2), 1.0
        return experts(torch.randn(3, 8), torch.full((3, 1), e - 1), torch.ones(3, 1), *weights, **{name: adapter})

    assert call(1023).isfinite().all()
    with pytest.raises(RuntimeError, match="^experts: w_down must have at most 1023 experts with adapters, got 1024"):
        call(1024)


P = layer(t=6, d=16, f=8, e=2, top_k=1, bias=True)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (dict(x=P.x.double()), {}, "x must be bfloat16, float16 or float32, got torch.float64"),
        (dict(x=P.x[0]), {}, "x must have 2 dimensions, got 1"),
        (dict(x=[1]), {}, "x must be a tensor, got list"),
        (dict(x=P.x.to_sparse()), {}, "x must be a dense tensor, got torch.sparse_coo"),
        (dict(ids=P.ids.float()), {}, "topk_ids must be int32 or int64, got torch.float32"),
        (dict(ids=P.ids[:, :0]), {}, "topk_ids must have at least 1 column, got 0"),
        (dict(ids=P.ids[1:]), {}, "topk_ids must have size 6 in dimension 0 .the rows of x., got 5"),
        (dict(scores=P.scores[:, 0]), {}, "topk_scores must have 2 dimensions, got 1"),
        (
            dict(scores=P.scores.repeat(1, 2)),
            {},
            "topk_scores must have size 1 in dimension 1 .the columns of topk_ids., got 2",
        ),
        (
            dict(w_gate_up=P.w_gate_up[:1]),
            {},
            "w_gate_up must have size 2 in dimension 0 .the experts of w_down., got 1",
        ),
        (dict(w_gate_up=P.w_gate_up[:, 1:]), {}, "w_gate_up must have size 16 in dimension 1, got 15"),
        (
            dict(w_gate_up=P.w_gate_up[:, :, 1:]),
            {},
            "w_gate_up must have size 16 in dimension 2 .the columns of x., got 15",
        ),
        ({}, dict(activation="relu2"), "w_gate_up must have size 8 in dimension 1, got 16"),
        (dict(w_down=P.w_down[:, 1:]), {}, "w_down must have size 16 in dimension 1 .the columns of x., got 15"),
        (dict(w_down=P.w_down[:0]), {}, "w_down must have from 1 to 1024 experts, got 0"),
        (dict(b_gate_up=P.b_gate_up[:, 1:]), {}, "b_gate_up must have size 16 in dimension 1, got 15"),
        (dict(b_down=P.b_down[0]), {}, "b_down must have 2 dimensions, got 1"),
        (dict(b_down=P.b_down.to("meta")), {}, "b_down must be on the device of x, cpu, got meta"),
        ({}, dict(keep="fp4"), "keep must be 'fp8' or 'bf16', got 'fp4'"),
        ({}, dict(activation="tanh"), "activation must be "),
    ],
)
def test_errors(change, options, message):
    p = replace(P, **change)
    with pytest.raises(RuntimeError, match=f"^experts: {message}"):
        biases = dict(b_gate_up=p.b_gate_up, b_down=p.b_down)
        experts(p.x, p.ids, p.scores, p.w_gate_up, p.w_down, **biases, **options)


@pytest.mark.parametrize("name", ["x", "topk_ids", "topk_scores", "w_gate_up", "w_down", "b_down"])
def test_a_dtensor_is_refused(name, world_of_one):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    given = dict(x=P.x, topk_ids=P.ids, topk_scores=P.scores, w_gate_up=P.w_gate_up, w_down=P.w_down, b_down=P.b_down)
    given[name] = distribute_tensor(given[name], mesh, [Shard(0)])
    text = rf"^experts: {name} must be a tensor of the rank, got a DTensor; pass its to_local\(\), or use Experts, .*"
    with pytest.raises(RuntimeError, match=text):
        experts(**given)


@pytest.mark.parametrize("shape", [(5, 0), (0,), (2, 3, 0)])
def test_tokens_of_size_zero(shape, device):
    made = moe_fp8_ext.MoE(moe_fp8_ext.Router(4, 32, 2), moe_fp8_ext.Experts(4, 32, 16)).to(device)
    with pytest.raises(RuntimeError, match="^Router: x must have size 32 in dimension 1, got 0"):
        made(torch.zeros(shape, device=device))


def test_experts_of_another_size_than_the_router():
    with pytest.raises(RuntimeError, match="^MoE: experts must have the hidden_size of router, 64, got 32$"):
        moe_fp8_ext.MoE(moe_fp8_ext.Router(4, 64, 2), moe_fp8_ext.Experts(4, 32, 16))


def test_sizes_are_printed():
    printed = "Experts(num_experts=4, hidden_size=32, intermediate_size=16, recipe='rowwise', activation='relu2')"
    assert repr(moe_fp8_ext.Experts(4, 32, 16, activation="relu2")) == printed
    printed = "Router(num_experts=4, hidden_size=32, top_k=2, scoring='sigmoid')"
    assert repr(moe_fp8_ext.Router(4, 32, 2, scoring="sigmoid")) == printed


def test_a_rate_away_from_balance():
    with pytest.raises(RuntimeError, match="^Router: bias_rate must be at least 0, got -0.1$"):
        moe_fp8_ext.Router(4, 32, 2, bias_rate=-0.1)


def test_recipes_that_do_not_exist():
    for error, recipe in ((ValueError, "fp9"), (TypeError, 8)):
        with pytest.raises(error, match="recipe must be"):
            experts(P.x, P.ids, P.scores, P.w_gate_up, P.w_down, recipe=recipe)


@pytest.mark.parametrize("recipe", ["rowwise", "bf16"])
def test_float32_biases_under_inductor(recipe):
    """Biases are rounded to bfloat16 before they are added, as in eager mode. Inductor would drop the cast if it fused
    it."""
    torch.manual_seed(0)
    how = dict(device="cpu", dtype=torch.float32)
    sizes = {"w_gate_up": (4, 32, 64), "w_down": (4, 64, 16), "b_gate_up": (4, 32), "b_down": (4, 64)}
    weights = {name: torch.randn(size, **how).requires_grad_() for name, size in sizes.items()}
    x, ids = torch.randn(20, 64, **how).requires_grad_(), torch.randint(4, (20, 2))
    scores = torch.rand(20, 2)

    def results(call):
        out = call(x, ids, scores, **weights, recipe=recipe)
        return [out.detach(), *torch.autograd.grad(out.sum(), (x, *weights.values()))]

    torch._dynamo.reset()
    for got, want in zip(results(torch.compile(experts, fullgraph=True)), results(experts), strict=True):
        assert torch.equal(got, want)
