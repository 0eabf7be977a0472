"""Memory that grouped_mm keeps for backward: bytes of saved tensors equal the formula of its docstring."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch
from grouped_problem import Calls, gradients, problem
from helpers import assert_same, group_offs, saved_tensors, slot_indices
from torch import Tensor

from moe_fp8_ext import Recipe, grouped_mm
from moe_fp8_ext.quantization.format import FORMATS
from moe_fp8_ext.reference.numerics import round_up

QUANTIZED = tuple(FORMATS)
NAMES = ("bf16", *QUANTIZED)
SMALL = 16 * 1024  # room for offs and padded_offs


def kept(a: Tensor, b_t: Tensor, offs: Tensor, recipe: str | Recipe, **kwargs: object) -> dict[int, Tensor]:
    """Returns the tensors kept for backward, one per storage."""
    with saved_tensors() as saved:
        grouped_mm(a, b_t, offs, recipe=recipe if isinstance(recipe, Recipe) else Recipe(recipe), **kwargs)
    return {t.untyped_storage().data_ptr(): t for t in saved}


def bytes_of(tensors: dict[int, Tensor]) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors.values())


def operands(m: int, k: int, e: int, device: str, n: int = 16, dtype: torch.dtype = torch.bfloat16):
    a, b_t, offs, g = problem(m, k, n, group_offs("zipf", m, e), device, dtype)
    return a, b_t.detach(), offs, g


def of_tokens(name: str, m: int, k: int, e: int, align: int) -> int:
    """Bytes of A [M, K] along tokens: values and scales."""
    p = round_up(m, align) + e * align
    whole = max(align, 128)
    scales = {
        "rowwise": 4 * e * k,
        "blockwise": 4 * round_up(-(-k // 128), 4) * ((round_up(m, whole) + e * whole) // 128),  # scales of squares
        "mxfp8": round_up(k, 128) * (p // 32 + 4 * e),
        "mxfp8_rowmajor": k * (p // 32),
    }
    return k * p + scales[name]


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("m", [0, 100, 512, 2048])
def test_what_wgrad_needs_of_activations(m, name, device):
    """wgrad keeps the copy of A along tokens or A itself, whichever is smaller, and offs."""
    for k, e, align in ((64, 2, None), (90, 3, None), (64, 9, None), (64, 4, 128), (33, 5, 32)):
        recipe = Recipe(name, align=align)
        a, b_t, offs, _ = operands(m, k, e, device)
        b_t = b_t.requires_grad_()
        copy, itself = of_tokens(name, m, k, e, recipe.align), 2 * m * k
        want = min(copy, itself) + 4 * e
        assert bytes_of(kept(a.detach(), b_t, offs, recipe)) == want, (k, e, align)


@pytest.mark.parametrize("name", QUANTIZED)
def test_many_experts_and_few_tokens(name, device):
    """With M = 4096 and E = 256, at most A's own bytes are kept."""
    a, b_t, offs, _ = operands(4096, 128, 256, device)
    tensors = kept(a.detach(), b_t.requires_grad_(), offs, name)
    assert bytes_of(tensors) <= 2 * 4096 * 128 + SMALL


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize(
    ("indexed", "dtype"), [(False, torch.bfloat16), (True, torch.bfloat16), (False, torch.float32)]
)
def test_either_way_gives_the_same_bytes(indexed, dtype, name, device):
    """Here A is smaller than its copy along tokens. With a long tail of no group, the copy is smaller. Results are
    equal."""
    a, b_t, offs, g = problem(100, 64, 16, group_offs("zipf", 100, 40), device, dtype)
    tail, indices = 8000, slot_indices(100, 2, 100, device)
    longer_a, longer_g = (torch.cat([t.detach(), t.new_zeros(tail, t.shape[1])]) for t in (a, g))
    indices = indices.where((indices >= 0) & (indices < 200), -1)  # no slot of the longer tensor either
    results = []
    for tokens, grad, slots, keeps_a in (
        (a, g, indices, True),
        (longer_a.requires_grad_(), longer_g, torch.cat([indices, indices.new_full((tail,), -1)]), False),
    ):
        how = {"indices": slots, "top_k": 2} if indexed else {}
        kept_storages = kept(tokens, b_t, offs, name, **how)
        assert (tokens.untyped_storage().data_ptr() in kept_storages) == keeps_a
        step = functools.partial(grouped_mm, offs=offs, recipe=Recipe(name), **how)
        results.append(gradients(step, tokens, b_t, grad))
    (out, d_a, d_b), (longer_out, longer_d_a, longer_d_b) = results
    assert_same((out, d_a, d_b), (longer_out[:100], longer_d_a[:100], longer_d_b))


@pytest.mark.parametrize(
    "recipe", [*NAMES, Recipe("mxfp8", wgrad_high_precision=True)], ids=lambda r: getattr(r, "name", r)
)
def test_bytes_of_another_token(recipe, device):
    """Each further row of A adds the bytes that docs/recipes.md states."""
    recipe = Recipe(recipe) if isinstance(recipe, str) else recipe
    sizes = []
    for m in (512, 2048):
        a, b_t, offs, _ = operands(m, 128, 2, device)
        sizes.append(bytes_of(kept(a.detach(), b_t.requires_grad_(), offs, recipe)))
    # Columns of scales have room for at least four squares.
    of_squares = 4 * 4 / 128 / 128
    an_element = {"bf16": 2, "rowwise": 1, "blockwise": 1 + of_squares}
    want = 2 if recipe.wgrad_high_precision else an_element.get(recipe.name, 1 + 1 / 32)
    assert sizes[1] - sizes[0] == (2048 - 512) * 128 * want


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("recipe", NAMES)
def test_only_what_a_gradient_needs(recipe, contiguous, device):
    def sizes(a_grad: bool, b_grad: bool) -> tuple[set[int], list[Tensor]]:
        found = []
        for m in (512, 2048):
            a, b_t, offs, _ = operands(m, 64, 2, device, n=48)
            b_t = b_t.contiguous() if contiguous else b_t
            found.append(kept(a.detach().requires_grad_(a_grad), b_t.requires_grad_(b_grad), offs, recipe))
        return {bytes_of(t) for t in found}, list(found[0].values())

    totals, _ = sizes(True, False)
    assert len(totals) == 1, "dA needs no activation"
    _, tensors = sizes(False, True)
    assert not [t.shape for t in tensors if t.numel() == 2 * 64 * 48], "dB_t needs no weight"
    totals, tensors = sizes(False, False)
    assert totals == {0} and not tensors


@pytest.mark.parametrize("name", QUANTIZED)
def test_weights_are_kept_as_dgrad_needs_them(name, device):
    a, b_t, offs, _ = operands(64, 96, 3, device, n=80)
    scales = {
        "rowwise": 4 * 3 * 96,
        "blockwise": 4 * 3 * 1 * 1,
        "mxfp8": 3 * 128 * 4,
        "mxfp8_rowmajor": 3 * 96 * 3,
    }
    assert kept(a, b_t, offs, name).keys() == {t.untyped_storage().data_ptr() for t in (b_t, offs)}, "a frozen B_t"
    trained = b_t.clone().requires_grad_()
    for_tokens = bytes_of(kept(a.detach(), trained, offs, name))  # what the gradient of B_t alone needs
    assert bytes_of(kept(a, trained, offs, name)) - for_tokens == 3 * 96 * 80 + scales[name]


def test_no_bfloat16_operand_survives_the_forward(device):
    leaf, b_t, offs, _ = problem(256, 32, 16, group_offs("uniform", 256, 2), device)
    a = leaf * 1
    alive = weakref.ref(a)
    out = grouped_mm(a, b_t, offs)
    del a
    gc.collect()
    assert alive() is None
    out.sum().backward()
    assert leaf.grad is not None


@pytest.mark.parametrize("name", QUANTIZED)
def test_what_a_frozen_input_would_need_is_not_computed(name, device):
    gemm, rows, tokens, both = "scaled_grouped_mm", "quantize_rows", "quantize_tokens", "quantize_both"
    weight = "quantize_weight"
    want = {
        (True, True): ([both, weight, gemm], [both, gemm, gemm]),
        (True, False): ([rows, weight, gemm], [rows, weight, gemm]),  # B_t is kept by reference
        (False, True): ([both, weight, gemm], [tokens, gemm]),
        (False, False): ([rows, weight, gemm], []),
    }
    a, b_t, offs, g = problem(512, 64, 48, group_offs("zipf", 512, 2), device)
    for (a_grad, b_grad), (forward, backward) in want.items():
        leaves = a.detach().requires_grad_(a_grad), b_t.detach().requires_grad_(b_grad)
        with Calls() as calls:
            out = grouped_mm(*leaves, offs, recipe=Recipe(name))
        assert calls.names == forward, (a_grad, b_grad)
        if out.requires_grad:
            with Calls() as calls:
                out.backward(g)
            assert calls.names == backward, (a_grad, b_grad)
