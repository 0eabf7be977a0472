"""experts(main_grad_gate_up=..., main_grad_down=...): backward adds gradients of weights to the caller's tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from experts_problem import ARGUMENT, LEAVES, WEIGHTS, Layer, assert_equal, but, layer, main_grads, run
from helpers import as_bytes, assert_same, assert_same_tensor
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_fp8_ext import Experts, MoE, Recipe, Router, experts, reuse_weights

RECIPES = [
    *(Recipe(name) for name in ("bf16", "rowwise", "blockwise", "mxfp8")),
    Recipe("rowwise", wgrad_high_precision=True),
    Recipe("blockwise", grad_dtype=torch.float8_e5m2, use_fast_accum=False),
]
OF_ALL_RECIPES = pytest.mark.parametrize("recipe", RECIPES, ids=str)
DTYPES = (torch.float32, torch.bfloat16)


def small(device: str, seed: int = 0, **options: object) -> Layer:
    """A problem whose last expert has no tokens."""
    problem = layer(60, 64, 48, **options, seed=seed).at(device)
    return replace(problem, ids=problem.ids % 7)


@OF_ALL_RECIPES
@pytest.mark.parametrize("bias", [False, True])
def test_adds_what_autograd_would_get(recipe, bias, device):
    """In bfloat16 the main gradient equals autograd's gradient. All other results do not change."""
    problem = small(device, bias=bias)
    want = run(problem, recipe=recipe)
    for dtype in DTYPES:
        added = main_grads(problem, dtype)
        assert_equal(run(problem, recipe=recipe, **added), but(want, *WEIGHTS))
        for n in WEIGHTS:
            assert_same_tensor(added[ARGUMENT[n]].bfloat16() + 0.0, want[n] + 0.0, n)  # -0 becomes +0


@OF_ALL_RECIPES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_steps_are_the_sum(recipe, dtype, device):
    first = small(device)
    steps = [first, replace(small(device, seed=1), w_gate_up=first.w_gate_up, w_down=first.w_down)]
    both = main_grads(first, dtype, fill=0.3)
    want = {name: t.clone() for name, t in both.items()}
    for step in steps:
        alone = main_grads(step)
        run(step, recipe=recipe, **alone)
        run(step, recipe=recipe, **both)
        want = {name: (t.float() + alone[name]).to(dtype) for name, t in want.items()}
    untouched = main_grads(first, dtype, fill=0.3)
    for name in both:
        assert_same_tensor(both[name], want[name], name)
        assert torch.equal(as_bytes(both[name][7]), as_bytes(untouched[name][7]))


@OF_ALL_RECIPES
@pytest.mark.parametrize("one", WEIGHTS)
def test_one_of_the_two(recipe, one, device):
    problem = small(device)
    added = main_grads(problem)
    want = run(problem, recipe=recipe)
    run(problem, recipe=recipe, **added)
    alone = {ARGUMENT[one]: torch.zeros_like(added[ARGUMENT[one]])}
    assert_equal(run(problem, recipe=recipe, **alone), but(want, one))
    assert_same_tensor(alone[ARGUMENT[one]], added[ARGUMENT[one]], one)


FROZEN = [("w_gate_up",), ("w_down",), ("x", "scores"), ("x", "scores", "w_gate_up"), LEAVES]


@OF_ALL_RECIPES
@pytest.mark.parametrize("frozen", FROZEN, ids="+".join)
def test_frozen_inputs(recipe, frozen, device):
    """Nothing is added for a frozen weight, and frozen tensors do not change the other main gradients."""
    problem = small(device)
    want, got = main_grads(problem, fill=7), main_grads(problem, fill=7)
    run(problem, recipe=recipe, **want)
    run(problem, recipe=recipe, frozen=frozen, **got)
    for n in WEIGHTS:
        changed = not bool((got[ARGUMENT[n]] == 7).all())
        assert changed == (n not in frozen)
        if changed:
            assert_same_tensor(got[ARGUMENT[n]], want[ARGUMENT[n]], n)


@pytest.mark.parametrize("recipe", ["bf16", "rowwise"])
@pytest.mark.parametrize("routing", ["no expert", "no tokens"])
def test_nothing_to_add(recipe, routing, device):
    problem = small(device)
    if routing == "no expert":
        problem = replace(problem, ids=torch.full_like(problem.ids, -1))
    else:
        problem = replace(problem, **{n: getattr(problem, n)[:0] for n in ("x", "ids", "scores", "grad")})
    added = main_grads(problem, fill=7)
    run(problem, recipe=recipe, **added)
    assert all((t == 7).all() for t in added.values())


@OF_ALL_RECIPES
def test_every_backward_adds(recipe, device):
    """Covers a retained graph, two uses, and a backward for the tokens alone. Doubling is exact."""
    problem = small(device)
    once, got = main_grads(problem), main_grads(problem)
    run(problem, recipe=recipe, **once)
    leaves = {n: getattr(problem, n).clone().requires_grad_() for n in LEAVES[:4]}
    call = leaves["x"], problem.ids, *list(leaves.values())[1:]
    outs = [experts(*call, recipe=recipe, **got) for _ in range(2)]
    torch.autograd.grad(outs[0], leaves["x"], problem.grad, retain_graph=True)
    assert_same(list(got.values()), list(once.values()))
    torch.autograd.backward(outs, [problem.grad] * 2)
    assert leaves["w_gate_up"].grad is None and leaves["w_down"].grad is None
    for name in got:
        assert_same_tensor(got[name], 2 * once[name] + once[name], name)


@OF_ALL_RECIPES
def test_checkpoints_and_reused_weights(recipe, device):
    problem = small(device, bias=True)
    want, got = main_grads(problem), main_grads(problem)
    results = run(problem, recipe=recipe, **want)
    with reuse_weights():
        again = run(problem, lambda *a, **k: checkpoint(experts, *a, use_reentrant=False, **k), recipe=recipe, **got)
    assert_equal(again, results)
    assert_same(list(got.values()), list(want.values()))


@OF_ALL_RECIPES
def test_compiles(recipe, device):
    problem = small(device)
    want, got = main_grads(problem), main_grads(problem)
    torch._dynamo.reset()
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        results = run(problem, recipe=recipe, **want)
        assert_equal(run(problem, compiled, recipe=recipe, **got), results)
    assert_same(list(got.values()), list(want.values()))


@OF_ALL_RECIPES
def test_cuda_graph(recipe, gpu):
    """Every replay adds the gradient once more."""
    problem = small(gpu)
    once, added = main_grads(problem), main_grads(problem)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(problem, recipe=recipe, **once)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(problem, recipe=recipe, **added)
    want = {name: torch.zeros_like(t) for name, t in once.items()}
    for _ in range(3):
        graph.replay()
        want = {name: t + once[name] for name, t in want.items()}
        assert_same(list(added.values()), list(want.values()))


P = layer(t=6, d=16, f=8, e=2, top_k=1)
GOOD = main_grads(P)


@pytest.mark.parametrize("recipe", ["bf16", "rowwise"])
@pytest.mark.parametrize("n", WEIGHTS)
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (Tensor.half, "must be bfloat16 or float32, got torch.float16"),
        (lambda t: t[0], "must have 3 dimensions, got 2"),
        (lambda t: t[:1], "must have the shape of {n}, (2, {rows}, {columns}), got (1, {rows}, {columns})"),
        (lambda t: t.mT.contiguous().mT, "must be contiguous, got strides ({size}, 1, {rows})"),
        (lambda t: t.to("meta"), "must be on the device of {n}, cpu, got meta"),
        (lambda t: t.clone().requires_grad_(), "must not ask for a gradient, got requires_grad=True"),
        (lambda t: "tensor", "must be a tensor, got str"),
    ],
)
def test_errors(change, text, n, recipe):
    _, rows, columns = getattr(P, n).shape
    text = text.format(n=n, rows=rows, columns=columns, size=rows * columns)
    with pytest.raises(RuntimeError) as info:
        run(P, recipe=recipe, **{ARGUMENT[n]: change(GOOD[ARGUMENT[n]])})
    assert str(info.value) == f"experts: {ARGUMENT[n]} {text}"


# Modules


def module(device: str, **options: object) -> Experts:
    torch.manual_seed(0)
    return Experts(4, 64, 48, device=device, dtype=torch.bfloat16, **options)


def step(made: nn.Module, device: str) -> Tensor:
    """Runs forward and backward and returns the gradient of the tokens."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(50, 64, generator=g).bfloat16().to(device).requires_grad_()
    scores = torch.rand(50, 2, generator=g).to(device)
    ids = torch.randint(0, 4, (50, 2), generator=g).to(device)
    made(x, ids, scores).float().square().mean().backward()
    return x.grad


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_parameters_have_main_grads(activation, compiled, device):
    """Biases get gradients as usual, and the module ignores main_grad of a frozen weight."""
    plain, made = (module(device, activation=activation, bias=True, main_grad=given) for given in (False, True))
    made.load_state_dict(plain.state_dict())
    for p in (made.down_proj, getattr(made, made.up)):
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    torch._dynamo.reset()
    called = torch.compile(made, fullgraph=True, backend="aot_eager") if compiled else made
    assert_same(step(called, device), step(plain, device))
    for name, p in made.named_parameters():
        want = plain.get_parameter(name).grad
        if name.endswith("bias"):
            assert_same_tensor(p.grad, want, name)
        else:
            assert p.grad is None and want.any()
            assert_same_tensor(p.main_grad.bfloat16() + 0.0, want + 0.0, name)
    before = made.down_proj.main_grad.clone()
    made.down_proj.requires_grad_(False)
    step(made, device)
    assert_same(made.down_proj.main_grad, before)


@pytest.mark.parametrize("of_tokens", [True, False])
def test_a_layer_adds_to_those_of_its_experts(of_tokens, device):
    """If tokens need a gradient, experts and their router are one autograd node. Weights still add to their
    main_grad."""
    plain, made = (module(device, main_grad=given) for given in (False, True))
    for p in made.parameters():
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    gate, of_others = Router(4, 64, 2, device=device), []
    x = torch.randn(2, 9, 64, device=device, dtype=torch.bfloat16).requires_grad_(of_tokens)
    for experts_of in (plain, made):
        gate.weight.grad = x.grad = None
        MoE(gate, experts_of)(x)[0].float().square().mean().backward()
        of_others.append([gate.weight.grad, x.grad] if of_tokens else [gate.weight.grad])
    assert_same(*of_others)
    for name, p in made.named_parameters():
        want = plain.get_parameter(name).grad
        assert p.grad is None and want.any()
        assert_same_tensor(p.main_grad.bfloat16() + 0.0, want + 0.0, name)


def test_a_weight_without_a_main_grad():
    made = module("cpu", main_grad=True)
    made.gate_up_proj.main_grad = torch.zeros_like(made.gate_up_proj)
    with pytest.raises(RuntimeError, match="^Experts: down_proj must have a main_grad with main_grad=True, got none$"):
        step(made, "cpu")
    made.down_proj.requires_grad_(False)
    step(made, "cpu")
    with torch.no_grad():
        made(torch.zeros(3, 64, dtype=torch.bfloat16), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
