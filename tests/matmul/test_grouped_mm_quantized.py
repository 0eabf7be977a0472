"""grouped_mm with an operand that is already quantized has the same bytes as with the tensor, or raises a clear
error."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from grouped_problem import gradients, problem, run
from helpers import assert_same, check_compiled, group_offs
from torch import Tensor
from torch.autograd import forward_ad

from moe_fp8_ext import Quantized, Recipe, grouped_mm, quantize_both, quantize_rows, quantize_weight, scaled_grouped_mm
from moe_fp8_ext.quantization.format import FORMATS


def both_ways(a: Tensor, b_t: Tensor, offs: Tensor, recipe: Recipe) -> tuple[tuple, tuple]:
    """A along rows and along tokens, and the weights with their transpose, quantized as the recipe does."""
    rule = {"dtype": recipe.dtype, "rounding": recipe.rounding}
    of_a = quantize_both(a.detach(), recipe.format, offs=offs, align=recipe.align, amax=recipe.amax_of_groups, **rule)
    return of_a, quantize_weight(b_t.detach().mT, recipe.format, **rule)


@pytest.mark.parametrize("rule", [{}, {"dtype": torch.float8_e5m2}, {"grad_dtype": torch.float8_e5m2, "align": 64}])
@pytest.mark.parametrize("name", FORMATS)
def test_gives_the_same_bytes(name, rule, device):
    recipe = Recipe(name, **rule)
    a, b_t, offs, g = problem(300, 96, 80, group_offs("tail_rows", 300, 3), device)
    out, d_a, d_b = run(a, b_t, offs, g, recipe)
    of_a, w = both_ways(a, b_t, offs, recipe)

    def product(a: Tensor | Quantized | tuple, b: Tensor | Quantized | tuple) -> Tensor:
        return grouped_mm(a, b, offs, recipe=recipe)

    for first in (
        of_a,
        of_a[0],
        quantize_rows(a.detach(), name, offs=offs, dtype=recipe.dtype, rounding=recipe.rounding),
    ):
        for second in (w, w[0], b_t.detach()):
            assert_same(product(first, second), out)
    got = gradients(lambda a, _: product(a, w), a, b_t.detach(), g)
    assert_same(got[:2], (out, d_a))
    got = gradients(lambda _, b: product(of_a, b), a.detach(), b_t, g)
    assert_same((got[0], got[2]), (out, d_b))


@pytest.mark.parametrize("name", FORMATS)
def test_weights_that_are_cached(name, device):
    """Many calls share one quantization of the weights, in training too."""
    recipe = Recipe(name)
    a, b_t, offs, g = problem(120, 64, 48, group_offs("zipf", 120, 3), device)
    _, w = both_ways(a, b_t, offs, recipe)
    wants = [run(x, b_t.detach(), offs, g, recipe) for x in (a, (a * 2).detach().requires_grad_())]
    for x, want in zip((a, (a * 2).detach().requires_grad_()), wants, strict=True):
        got = gradients(lambda a, _: grouped_mm(a, w, offs, recipe=recipe), x, b_t.detach(), g)
        assert_same(got[:2], want[:2])


def test_dtype_of_the_result(device):
    a, b_t, offs, _ = problem(40, 32, 16, group_offs("zipf", 40, 2), device, torch.float32)
    of_a, w = both_ways(a, b_t, offs, Recipe("rowwise"))
    assert grouped_mm(of_a, b_t, offs).dtype == grouped_mm(a, w, offs).dtype == torch.float32
    assert grouped_mm(of_a, w, offs).dtype == torch.bfloat16


@pytest.mark.parametrize("name", FORMATS)
def test_compiles(name, device):
    recipe = Recipe(name)
    a, b_t, offs, _ = problem(70, 64, 48, group_offs("zipf", 70, 3), device)
    _, (w, w_t) = both_ways(a, b_t, offs, recipe)
    parts = w.q, w.scale, w_t.q, w_t.scale

    def call(a: Tensor, offs: Tensor) -> Tensor:
        q, scale, q_t, scale_t = parts
        pair = Quantized(q, scale, name), Quantized(q_t, scale_t, name, transposed=True)
        return grouped_mm(a, pair, offs, recipe=recipe)

    check_compiled(call, [[a.detach()[:m], group_offs("zipf", m, 3, device)] for m in (40, 50, 70)], device)


A, B_T, OFFS, _ = problem(64, 32, 16, group_offs("uniform", 64, 2))


@pytest.mark.parametrize("name", FORMATS)
def test_unfit_operands(name, device):
    recipe, other = Recipe(name), Recipe("blockwise" if name == "rowwise" else "rowwise")
    a, b_t, offs = (t.detach().to(device) for t in (A, B_T, OFFS))
    (rows, tokens), w_pair = both_ways(a, b_t, offs, recipe)
    (w, _), narrow = w_pair, quantize_weight(b_t[:, :, :8].mT, name, rounding=recipe.rounding)
    half = quantize_both(a[:32], name, offs=offs // 2, align=recipe.align, rounding=recipe.rounding)[1]
    of_other, w_of_other = both_ways(a, b_t, offs, other)
    indices = torch.arange(64, dtype=torch.int32, device=device)
    b_grad, a_grad = (t.clone().requires_grad_() for t in (b_t, a))
    for first, second, how, text in (
        (of_other[0], b_t, {}, f"A must be of the recipe's format '{name}', got '{other.format}'"),
        (a, w_of_other, {}, f"B_t must be of the recipe's format '{name}', got '{other.format}'"),
        (rows, b_t, {"recipe": "bf16"}, f"A must be a tensor with recipe 'bf16', got '{name}'"),
        (a, w, {"recipe": "bf16"}, f"B_t must be a tensor with recipe 'bf16', got '{name}'"),
        (tokens, b_t, {}, "A must be quantized along rows, got tokens"),
        ((rows, rows), b_t, {}, "A must be quantized along tokens, got rows"),
        (a, tokens, {}, "B_t must be quantized along rows, got tokens"),
        (rows, b_grad, {}, "A must be the pair of quantize_both .*got a Quantized along rows"),
        *([] if name == "blockwise" else [(a_grad, w, {}, "B_t must be the pair .*got its first alone; pass both .*")]),
        (rows, b_t, {"indices": indices, "top_k": 1}, "indices must be None where A is quantized, got a tensor"),
        (a, w_pair[::-1], {}, "B_t must have what quantize_weight returns first there, got the other one"),
        (a, (w, w), {}, "B_t must have what quantize_weight returns second there, got the other one"),
        (a, (w, narrow[1]), {}, r"B_t must be two of one tensor, the second of shape \(2, 32, 16\), got \(2, 32, 8\)"),
        ((rows, half), b_t, {}, "A must be two of one tensor, the second of shape .*, got .*"),
        ((rows, a), b_t, {}, "A must be .*got tuple"),
        (dataclasses.replace(rows, q=None), b_t, {}, "q of A must be a tensor, got NoneType"),
        ((rows, tokens, rows), b_t, {}, "A must be .*got tuple"),
        (a, rows, {}, "B_t must have 3 dimensions, got 2"),
        (w, b_t, {}, "A must have 2 dimensions, got 3"),
        (a[:, :31], w, {}, "B_t must have size 31 .*got 32"),
        (rows, b_t[:1], {}, "offs must have 1 entries, .*got 2"),
    ):
        with pytest.raises(RuntimeError, match=f"^grouped_mm: {text}"):
            grouped_mm(first, second, offs, **{"recipe": recipe, **how})


def test_constants_that_ask_for_a_derivative(device):
    """A Quantized is a constant. A derivative that would silently be lost raises."""
    a, b_t, offs = (t.detach().to(device) for t in (A, B_T, OFFS))
    (rows, _), (w, w_t) = both_ways(a, b_t, offs, Recipe("rowwise"))
    asking = dataclasses.replace(w, scale=w.scale.clone().requires_grad_())
    with pytest.raises(RuntimeError, match="^grouped_mm: B_t must not ask for a gradient where it is quantized .*got"):
        grouped_mm(a, (asking, w_t), offs)
    with torch.no_grad():
        grouped_mm(a, (asking, w_t), offs)
    with forward_ad.dual_level():
        dual = dataclasses.replace(rows, scale=forward_ad.make_dual(rows.scale, torch.ones_like(rows.scale)))
        with pytest.raises(RuntimeError, match="^grouped_mm: A must have no tangent where it is quantized, got one$"):
            grouped_mm(dual, b_t, offs)


def test_blocked_scales_need_groups(device):
    x, b_t, offs, _ = problem(64, 32, 16, group_offs("uniform", 64, 2), device)
    rows = quantize_rows(x.detach(), "mxfp8")
    with pytest.raises(RuntimeError, match="^grouped_mm: A must be quantized for offs, .* got one without"):
        grouped_mm(rows, b_t.detach(), offs, recipe="mxfp8")


@pytest.mark.parametrize("name", FORMATS)
def test_product_of_objects(name, device):
    """scaled_grouped_mm of quantizers' results gives all three products of grouped_mm."""
    a, b_t, offs, g = problem(100, 64, 48, group_offs("tail_rows", 100, 3), device)
    recipe = Recipe(name)
    (rows, tokens), (w, w_t) = both_ways(a, b_t, offs, recipe)
    g_rows, g_tokens = quantize_both(g, name, offs=offs, align=recipe.align, rounding=recipe.rounding)
    got = scaled_grouped_mm(rows, w), scaled_grouped_mm(g_rows, w_t, offs), scaled_grouped_mm(g_tokens, tokens).mT
    assert_same(got, run(a, b_t, offs, g, recipe))
    assert rows.dequantize().shape == rows.q.shape and w_t.dequantize().shape == (3, 64, 48)
    assert tokens.dequantize(torch.float32).dtype == torch.float32
    with pytest.raises(dataclasses.FrozenInstanceError):
        rows.q = a


def test_products_of_objects_that_do_not_fit():
    (rows, tokens), (w, _) = both_ways(A, B_T, OFFS, Recipe("rowwise"))
    (_, wider), _ = both_ways(A, B_T, OFFS, Recipe("rowwise", align=64))
    blocks, _ = quantize_weight(B_T.detach().mT, "blockwise")
    without, columns = dataclasses.replace(rows, offs=None), dataclasses.replace(w, along="cols")
    for args, text in (
        ((rows, blocks), "b must have the format of a, 'rowwise', got 'blockwise'"),
        ((rows, tokens), "b must be quantized along rows as a is, got along tokens"),
        ((tokens, wider), "b must be padded to 32 as a is, got 64"),
        ((rows, rows), "b must be a weight of 3 dimensions, got 2"),
        ((rows, w, OFFS.clone()), "offs must be None where a has its own, got another tensor"),
        ((without, w), "offs must be given where a has none, got None"),
        ((rows.q, w), "a must be a Quantized, got Tensor"),
        ((dataclasses.replace(rows, q=None), w), "q of a must be a tensor, got NoneType"),
        ((rows, dataclasses.replace(w, scale=1.0)), "scale of b must be a tensor, got float"),
        ((columns, columns), "along of a must be 'rows' or 'tokens', got 'cols'"),
        ((rows, columns), "b must be quantized along rows as a is, got along cols"),
        ((dataclasses.replace(rows, format="foo"), w), "format must be 'rowwise', .* got 'foo'"),
        ((rows, None), "b must be a Quantized, got NoneType"),
    ):
        with pytest.raises(RuntimeError, match=f"^scaled_grouped_mm: {text}"):
            scaled_grouped_mm(*args)
