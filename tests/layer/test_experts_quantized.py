"""experts() with weights that are already quantized: all results equal the results with the weights themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from experts_problem import ARGUMENT, WEIGHTS, Layer, assert_equal, but, layer, main_grads, run
from helpers import assert_same
from torch import Tensor

from moe_fp8_ext import Quantized, Recipe, experts, quantize_rows, quantize_weight
from moe_fp8_ext.distributed import ExpertParallel
from moe_fp8_ext.quantization.format import FORMATS

RECIPES = [
    *(Recipe(name) for name in FORMATS),
    Recipe("rowwise", wgrad_high_precision=True),
    Recipe("rowwise", grad_dtype=torch.float8_e5m2, rounding="exact"),
]
OF_ALL_RECIPES = pytest.mark.parametrize("recipe", RECIPES, ids=str)
SIZES = dict(t=60, d=64, f=48)


def quantized(w: Tensor, recipe: Recipe) -> tuple[Quantized, Quantized]:
    return quantize_weight(w.detach(), recipe.format, dtype=recipe.dtype, rounding=recipe.rounding)


def with_quantized(
    problem: Layer, recipe: Recipe, names: tuple[str, ...] = WEIGHTS, fn: Callable = experts
) -> Callable:
    """Returns a function for `run` that calls `fn` with quantized weights in place of the given ones."""
    pairs = {n: quantized(getattr(problem, n), recipe) for n in names}

    def call(x: Tensor, ids: Tensor, scores: Tensor, w_gate_up: Tensor, w_down: Tensor, **options: object) -> Tensor:
        weights = pairs.get("w_gate_up", w_gate_up), pairs.get("w_down", w_down)
        return fn(x, ids, scores, *weights, recipe=recipe, **options)

    return call


@OF_ALL_RECIPES
@pytest.mark.parametrize("names", [WEIGHTS, *((n,) for n in WEIGHTS)], ids="+".join)
def test_constants(recipe, names, device):
    problem = layer(**SIZES, bias=True).at(device)
    want = run(problem, recipe=recipe, frozen=names)
    assert_equal(run(problem, with_quantized(problem, recipe, names)), want)


@pytest.mark.parametrize("which", [0, 1])
def test_constants_that_ask_for_a_gradient(which, device):
    problem, pairs = layer(**SIZES).at(device), []
    for n in WEIGHTS:
        pairs.append([*quantized(getattr(problem, n), Recipe("rowwise"))])
    half = pairs[1][which]
    pairs[1][which] = dataclasses.replace(half, scale=half.scale.clone().requires_grad_())
    with pytest.raises(RuntimeError, match="^experts: w_down must not ask for a gradient where it is quantized .*got"):
        experts(problem.x, problem.ids, problem.scores, *pairs)


@OF_ALL_RECIPES
@pytest.mark.parametrize("compiled", [False, True])
def test_trained_by_main_grad(recipe, compiled, device):
    """One quantization serves several calls. Main gradients are the same as with the weights themselves."""
    problem = layer(**SIZES).at(device)
    want, got = main_grads(problem), main_grads(problem)
    torch._dynamo.reset()
    fn = torch.compile(experts, fullgraph=True, backend="aot_eager") if compiled else experts
    call = with_quantized(problem, recipe, fn=fn)
    for _ in range(2):
        expected = run(problem, recipe=recipe, **want)
        assert_equal(run(problem, call, **got), expected)
    assert_same(list(got.values()), list(want.values()))
    assert all(t.any() for t in got.values())


def test_main_grad_where_scores_alone_ask(device):
    problem, recipe = layer(**SIZES).at(device), RECIPES[0]
    want, got = main_grads(problem), main_grads(problem)
    run(problem, recipe=recipe, **want)
    results = run(problem, with_quantized(problem, recipe), frozen=("x",), **got)
    assert results.keys() == {"out", "scores"}
    assert_same(list(got.values()), list(want.values()))


def test_cuda_graph(gpu):
    problem, recipe = layer(**SIZES).at(gpu), RECIPES[0]
    once, added = main_grads(problem), main_grads(problem)
    call, x = with_quantized(problem, recipe), problem.x.detach().requires_grad_()

    def step(grads: dict[str, Tensor]) -> None:
        weights = problem.w_gate_up, problem.w_down
        call(x, problem.ids, problem.scores, *weights, **grads).backward(problem.grad)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(once)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(added)
    graph.replay()
    graph.replay()
    for name in once:
        assert_same(added[name], once[name] + once[name])


@OF_ALL_RECIPES
def test_over_ranks(recipe, world_of_one):
    problem = layer(**SIZES)
    ep = ExpertParallel(dist.group.WORLD, 8, 3, recipe=recipe)

    def over_ranks(*args: object, recipe: Recipe, **options: object) -> Tensor:
        return ep.experts(*args, **options)

    want, got = main_grads(problem), main_grads(problem)
    expected = run(problem, lambda *a, **k: ep.experts(*a, **k), **want)
    assert_equal(run(problem, with_quantized(problem, recipe, fn=over_ranks), **got), but(expected, *WEIGHTS))
    assert_same(list(got.values()), list(want.values()))


def test_first_alone_without_a_backward():
    problem, recipe = layer(**SIZES), RECIPES[0]
    first = [quantized(getattr(problem, n), recipe)[0] for n in WEIGHTS]
    call = problem.x, problem.ids, problem.scores, *first
    assert_same(experts(*call), experts(*call[:3], problem.w_gate_up, problem.w_down))
    sentence = "must be the pair of quantize_weight where backward multiplies by it, got its first alone; pass both .*$"
    x = problem.x.detach().requires_grad_()
    with pytest.raises(RuntimeError, match=f"^experts: w_gate_up {sentence}"):
        experts(x, *call[1:])
    with pytest.raises(RuntimeError, match=f"^experts: w_down {sentence}"):
        experts(*call[:2], problem.scores.detach().requires_grad_(), *call[3:])


PROBLEM = layer(**SIZES)
GOOD = [quantized(getattr(PROBLEM, n), RECIPES[0]) for n in WEIGHTS]
BLOCKS = quantized(PROBLEM.w_down, RECIPES[1])


@pytest.mark.parametrize(
    ("name", "value", "recipe", "text"),
    [
        ("w_down", BLOCKS, "rowwise", "must be of the recipe's format 'rowwise', got 'blockwise'"),
        ("w_down", GOOD[1], "bf16", "must be a tensor with recipe 'bf16', got 'rowwise'"),
        ("w_gate_up", GOOD[1], "rowwise", "must have size 96 in dimension 1, got 64"),
        ("w_gate_up", (GOOD[0][0], PROBLEM.x), "rowwise", "must be a tensor, a Quantized or a pair of them, got tuple"),
        ("w_gate_up", GOOD[0][0].q, "rowwise", "must be bfloat16, float16 or float32, got torch.float8_e4m3fn"),
        ("w_gate_up", quantize_rows(PROBLEM.x, "rowwise"), "rowwise", "must have 3 dimensions, got 2"),
        ("w_gate_up", None, "rowwise", "must be a tensor, a Quantized or a pair of them, got NoneType"),
    ],
)
def test_errors(name, value, recipe, text):
    weights = {n: getattr(PROBLEM, n) for n in WEIGHTS} | {name: value}
    with pytest.raises(RuntimeError, match=f"^experts: {name} {text}$"):
        experts(PROBLEM.x, PROBLEM.ids, PROBLEM.scores, **weights, recipe=recipe)


@pytest.mark.parametrize("i", [0, 1])
def test_main_grad_without_a_backward(i):
    name, added = WEIGHTS[i], main_grads(PROBLEM, fill=7)
    weights = {n: getattr(PROBLEM, n) for n in WEIGHTS} | {name: GOOD[i]}
    call = lambda: experts(  # noqa: E731
        PROBLEM.x, PROBLEM.ids, PROBLEM.scores, **weights, **{ARGUMENT[name]: added[ARGUMENT[name]]}
    )
    why = f"because main_grad belongs to a quantized {name}, which autograd does not see"
    text = f"x or another input must require a gradient, {why}, got none that does"
    with pytest.raises(RuntimeError, match=f"^experts: {text}$"):
        call()
    with torch.no_grad():
        call()
    assert all((t == 7).all() for t in added.values())
