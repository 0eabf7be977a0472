"""grouped_mm(main_grad=...): backward adds the gradient of the weights to the caller's tensor."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from grouped_problem import problem, run
from helpers import as_bytes, assert_same, error_of, group_offs, slot_indices, wide
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_fp8_ext import Quantized, Recipe, grouped_mm, quantize_both, quantize_weight, reuse_weights

RECIPES = [
    *(Recipe(name) for name in ("bf16", "rowwise", "blockwise", "mxfp8")),
    Recipe("rowwise", wgrad_high_precision=True),
    Recipe("blockwise", grad_dtype=torch.float8_e5m2, use_fast_accum=False),
]
OF_ALL_RECIPES = pytest.mark.parametrize("recipe", RECIPES, ids=str)
DTYPES = (torch.float32, torch.bfloat16)


def operands(device: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    return problem(150, 64, 48, group_offs("empty_middle", 150, 3), device, dtype)


def main_grad_of(b_t: Tensor, dtype: torch.dtype = torch.float32, fill: float = 0) -> Tensor:
    e, k, n = b_t.shape
    return torch.full((e, n, k), fill, dtype=dtype, device=b_t.device).transpose(-2, -1)


def step(recipe: Recipe, a: Tensor, b_t: Tensor, offs: Tensor, g: Tensor, main_grad: Tensor) -> tuple[Tensor, Tensor]:
    """Returns out and dA, and checks that B_t got no gradient."""
    a, b_t = a.detach().requires_grad_(), b_t.detach().requires_grad_()
    out = grouped_mm(a, b_t, offs, recipe=recipe, main_grad=main_grad)
    out.backward(g)
    assert b_t.grad is None
    return out.detach(), a.grad


@OF_ALL_RECIPES
def test_adds_what_autograd_would_get(recipe, device):
    """In bfloat16 the main gradient equals autograd's gradient. out and dA do not change."""
    a, b_t, offs, g = operands(device)
    out, d_a, d_b = run(a, b_t, offs, g, recipe)
    rounded, exact = main_grad_of(b_t, torch.bfloat16), main_grad_of(b_t)
    assert_same(step(recipe, a, b_t, offs, g, rounded), (out, d_a))
    assert_same(step(recipe, a, b_t, offs, g, exact), (out, d_a))
    assert_same(rounded + 0.0, d_b + 0.0)  # -0 becomes +0
    assert_same(exact.bfloat16() + 0.0, d_b + 0.0)


@OF_ALL_RECIPES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_steps_are_the_sum(recipe, dtype, device):
    a, b_t, offs, g = operands(device)
    g = [g, wide(*g.shape, device=device, seed=5)]
    alone = [main_grad_of(b_t) for _ in g]
    both = main_grad_of(b_t, dtype, fill=0.3)
    want = both.clone()
    for each, main_grad in zip(g, alone, strict=True):
        step(recipe, a, b_t, offs, each, main_grad)
        step(recipe, a, b_t, offs, each, both)
        want = (want.float() + main_grad).to(dtype)
    assert_same(both, want)
    assert torch.equal(as_bytes(both[1]), as_bytes(main_grad_of(b_t, dtype, fill=0.3)[1]))  # no tokens


@OF_ALL_RECIPES
def test_a_leaf_behind_a_view(recipe, device):
    """The usual case is a parameter [E, N, K] and its main_grad. A float32 parameter keeps the precision of the sum."""
    a, b_t, offs, g = operands(device, torch.float32)
    w = torch.nn.Parameter(b_t.detach().transpose(-2, -1).contiguous())
    w.main_grad = torch.zeros_like(w)
    grouped_mm(a, w.transpose(-2, -1), offs, recipe=recipe, main_grad=w.main_grad.transpose(-2, -1)).backward(g)
    assert w.grad is None
    want = main_grad_of(b_t)
    step(recipe, a, b_t, offs, g, want)
    assert_same(w.main_grad, want.transpose(-2, -1))
    assert w.main_grad.any()


@OF_ALL_RECIPES
def test_without_a_gradient_nothing_is_written(recipe, device):
    a, b_t, offs, g = operands(device)
    main_grad = main_grad_of(b_t, fill=7)
    grouped_mm(a, b_t.detach(), offs, recipe=recipe, main_grad=main_grad).backward(g)
    with torch.no_grad():
        grouped_mm(a, b_t, offs, recipe=recipe, main_grad=main_grad)
    grouped_mm(a, b_t, offs, recipe=recipe, main_grad=main_grad)  # no backward
    assert (main_grad == 7).all()


@OF_ALL_RECIPES
def test_frozen_tokens(recipe, device):
    a, b_t, offs, g = operands(device)
    want, got = main_grad_of(b_t), main_grad_of(b_t)
    step(recipe, a, b_t, offs, g, want)
    grouped_mm(a.detach(), b_t, offs, recipe=recipe, main_grad=got).backward(g)
    assert_same(got, want)


@OF_ALL_RECIPES
def test_every_backward_adds(recipe, device):
    """A backward for the tokens alone adds too, because it looks the same as any other."""
    a, b_t, offs, g = operands(device)
    once, got = main_grad_of(b_t), main_grad_of(b_t)
    step(recipe, a, b_t, offs, g, once)
    out = grouped_mm(a, b_t, offs, recipe=recipe, main_grad=got)
    torch.autograd.grad(out, a, g, retain_graph=True)
    assert_same(got, once)
    out.backward(g)
    assert_same(got, 2 * once)


@OF_ALL_RECIPES
def test_two_uses_before_backward(recipe, device):
    """Neither backward fails because the other wrote to main_grad. Doubling is exact."""
    a, b_t, offs, g = operands(device)
    once, twice = main_grad_of(b_t), main_grad_of(b_t)
    step(recipe, a, b_t, offs, g, once)
    outs = [grouped_mm(a, b_t, offs, recipe=recipe, main_grad=twice) for _ in range(2)]
    torch.autograd.backward(outs, [g, g])
    assert_same(twice, 2 * once)


@pytest.mark.usefixtures("unchecked")
@OF_ALL_RECIPES
def test_beside_indices_checkpoints_and_reused_weights(recipe, device):
    a, b_t, offs, g = operands(device)
    indices = slot_indices(150, 1, 150, device)
    how = {"recipe": recipe, "indices": indices, "top_k": 1}
    want, got = main_grad_of(b_t), main_grad_of(b_t)
    grouped_mm(a, b_t, offs, **how, main_grad=want).backward(g)
    with reuse_weights():
        checkpoint(grouped_mm, a, b_t, offs, **how, main_grad=got, use_reentrant=False).backward(g)
    assert_same(got, want)


@pytest.mark.parametrize(
    ("recipe", "backend"), [*product(RECIPES, ["aot_eager"]), (Recipe("mxfp8"), "inductor")], ids=str
)
def test_compiles(recipe, backend, device):
    """Inductor compiles mxfp8 too. Beside scales in float8_e8m0fnu, inductor refuses ops that write."""
    a, b_t, offs, g = operands(device)
    want, got = main_grad_of(b_t), main_grad_of(b_t)
    torch._dynamo.reset()
    compiled = torch.compile(grouped_mm, fullgraph=True, backend=backend)
    for _ in range(2):
        grouped_mm(a, b_t, offs, recipe=recipe, main_grad=want).backward(g)
        compiled(a, b_t, offs, recipe=recipe, main_grad=got).backward(g)
    assert b_t.grad is None
    assert_same(got, want)


@OF_ALL_RECIPES
def test_cuda_graph(recipe, gpu):
    """Every replay adds the gradient once more."""
    a, b_t, offs, g = operands(gpu)
    once, main_grad = main_grad_of(b_t), main_grad_of(b_t)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(recipe, a, b_t, offs, g, once)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(recipe, a, b_t, offs, g, main_grad)
    want = torch.zeros_like(once)
    for _ in range(3):
        graph.replay()
        want = want + once
        assert_same(main_grad, want)


A, B_T, OFFS, _ = operands("cpu")
GOOD = main_grad_of(B_T)


@pytest.mark.parametrize(
    ("main_grad", "text"),
    [
        (GOOD.half(), "must be bfloat16 or float32, got torch.float16"),
        (GOOD[0], "must have 3 dimensions, got 2"),
        (GOOD[:2], r"must have the shape of B_t, \(3, 64, 48\), got \(2, 64, 48\)"),
        (GOOD.transpose(-2, -1), r"must have the shape of B_t, \(3, 64, 48\), got \(3, 48, 64\)"),
        (GOOD.contiguous(), r"must be the transposed view of a contiguous tensor, got strides \(3072, 48, 1\)"),
        (GOOD.to("meta"), "must be on the device of B_t, cpu, got meta"),
        (GOOD.clone().requires_grad_(), "must not ask for a gradient, got requires_grad=True"),
        ("main_grad", "must be a tensor, got str"),
    ],
)
@pytest.mark.parametrize("recipe", ["bf16", "rowwise"])
def test_errors(recipe, main_grad, text):
    with pytest.raises(RuntimeError, match=f"^grouped_mm: main_grad {text}$"):
        grouped_mm(A, B_T, OFFS, recipe=recipe, main_grad=main_grad)


def quantized(b_t: Tensor, recipe: Recipe) -> tuple[Quantized, Quantized]:
    return quantize_weight(b_t.detach().mT, recipe.format, dtype=recipe.dtype, rounding=recipe.rounding)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", RECIPES[1:], ids=str)
def test_weights_that_are_quantized_once(recipe, compiled, device):
    """Several calls of a graph share one quantization. All results equal the results with the weights themselves."""
    a, b_t, offs, g = operands(device)
    want, got = main_grad_of(b_t), main_grad_of(b_t)
    torch._dynamo.reset()
    call = torch.compile(grouped_mm, fullgraph=True, backend="aot_eager") if compiled else grouped_mm
    w = quantized(b_t, recipe)
    for scale in (1, 2):
        expected = step(recipe, a * scale, b_t, offs, g, want)
        leaf = (a * scale).detach().requires_grad_()
        out = call(leaf, w, offs, recipe=recipe, main_grad=got)
        out.backward(g)
        assert_same((out.detach(), leaf.grad), expected)
    assert_same(got, want)
    assert got.any()


def test_weights_that_are_quantized_once_in_a_cuda_graph(gpu):
    a, b_t, offs, g = operands(gpu)
    w, once, main_grad = quantized(b_t, RECIPES[1]), main_grad_of(b_t), main_grad_of(b_t)
    a = a.detach().requires_grad_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        grouped_mm(a, w, offs, main_grad=once).backward(g)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_mm(a, w, offs, main_grad=main_grad).backward(g)
    graph.replay()
    graph.replay()
    assert_same(main_grad, once + once)


def test_quantized_weights_without_a_backward():
    """Only a gradient of A could run backward, so A must ask for one. Without gradients there is no such rule."""
    w = quantized(B_T, RECIPES[1])
    of_rows = quantize_both(A.detach(), "rowwise", offs=OFFS)
    main_grad = main_grad_of(B_T, fill=7)
    for a, got in ((A.detach(), "requires_grad=False"), (of_rows, "a Quantized")):
        text = error_of(grouped_mm, [a, w, OFFS], {"main_grad": main_grad})
        assert text == f"grouped_mm: A must ask for a gradient where main_grad belongs to a quantized B_t, got {got}"
        with torch.no_grad():
            grouped_mm(a, w, OFFS, main_grad=main_grad)
    text = error_of(grouped_mm, [A, w, OFFS], {"main_grad": main_grad[:2]})
    assert text == "grouped_mm: main_grad must have the shape of B_t, (3, 64, 48), got (2, 64, 48)"
    text = error_of(grouped_mm, [A, w[0], OFFS], {"main_grad": main_grad})
    assert text.startswith("grouped_mm: B_t must be the pair of quantize_weight where A needs a gradient")
    assert (main_grad == 7).all()
