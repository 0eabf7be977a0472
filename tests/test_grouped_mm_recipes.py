"""What recipes are: which ops a product is made of, which formats it takes, which names there are."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from grouped_problem import MIN_SQNR_DB, exact, problem, run
from helpers import assert_same, group_offs, sqnr_db

from moe_fp8_ext import RECIPES, Recipe, grouped_mm, reference


def test_rowwise_is_the_composition_of_its_ops(device):
    """The recipe adds nothing to the three products of quantized operands."""
    a, b_t, offs, g = problem(100, 64, 48, group_offs("tail_rows", 100, 3), device)
    got = run(a, b_t, offs, g, "rowwise")
    recipe = RECIPES["rowwise"]
    rule = recipe.dtype, recipe.pow2_scale
    q_a, s_a, qt_a, st_a, padded_offs = reference.quantize_rowcol(a.detach(), offs, recipe.align, *rule)
    q_g, s_g, qt_g, st_g, _ = reference.quantize_rowcol(g, offs, recipe.align, *rule)
    q_w, s_w, qt_w, st_w = reference.quantize_weight(b_t.detach().transpose(1, 2), *rule)
    want = (
        reference.scaled_grouped_mm(q_a, q_w.transpose(1, 2), s_a, s_w, offs, torch.float64),
        reference.scaled_grouped_mm(q_g, qt_w.transpose(1, 2), s_g, st_w, offs, torch.float64),
        reference.scaled_grouped_mm(qt_g, qt_a.t(), st_g, st_a, padded_offs, torch.float64).transpose(1, 2),
    )
    # What is left is one rounding to bfloat16, 2^-14 / 12 of the signal at most, and the accumulator.
    for name, ours, ideal in zip(("out", "dA", "dB_t"), got, want, strict=True):
        assert sqnr_db(ours, ideal) > 45, name


def test_blockwise_is_the_composition_of_its_ops(device):
    a, b_t, offs, g = problem(300, 160, 144, group_offs("tail_rows", 300, 3), device)
    got = run(a, b_t, offs, g, "blockwise")
    q_a, s_a, qt_a, st_a, padded_offs = reference.quantize_1x128_128x1(a.detach(), offs)
    q_g, s_g, qt_g, st_g, _ = reference.quantize_1x128_128x1(g, offs)
    q_w, qt_w, s_w = reference.quantize_128x128(b_t.detach().transpose(1, 2))
    how = torch.float64, True, 128
    want = (
        reference.scaled_grouped_mm(q_a, q_w.mT, s_a, s_w.mT, offs, *how),
        reference.scaled_grouped_mm(q_g, qt_w.mT, s_g, s_w, offs, *how),
        reference.scaled_grouped_mm(qt_g, qt_a.t(), st_g, st_a.t(), padded_offs, *how).mT,
    )
    # At most three roundings to bfloat16, 2^-14 / 12 of the signal each: two operands and the product.
    for name, ours, ideal in zip(("out", "dA", "dB_t"), got, want, strict=True):
        assert sqnr_db(ours, ideal) > 48.1, name


@pytest.mark.parametrize("scaling", ["rowwise", "blockwise"])
def test_gradients_in_another_format(scaling, device):
    """E5M2 has a bit less: four times the noise of E4M3 in one of two operands, 4 dB less than its 25.8 or 28.5 dB."""
    recipe = dataclasses.replace(RECIPES[scaling], grad_dtype=torch.float8_e5m2)
    a, b_t, offs, g = problem(120, 96, 80, group_offs("zipf", 120, 3), device)
    got, want = run(a, b_t, offs, g, recipe), exact(a, b_t, offs, g)
    assert_same(got[0], run(a, b_t, offs, g, scaling)[0])
    for ours, ideal, fine in zip(got[1:], want[1:], run(a, b_t, offs, g, scaling)[1:], strict=True):
        assert MIN_SQNR_DB[scaling] - 4 <= sqnr_db(ours, ideal) < sqnr_db(fine, ideal) - 2


def test_alignment_follows_from_the_scaling():
    assert [Recipe("mine", scaling=scaling).align for scaling in ("rowwise", "blockwise")] == [16, 128]
    assert Recipe("mine", scaling="blockwise", align=32).align == 32


def test_recipe_of_unknown_scaling():
    with pytest.raises(ValueError, match="scaling must be one of .* got 'tensorwise'"):
        Recipe("mine", scaling="tensorwise")


@pytest.mark.parametrize("recipe", ["mxfp8"])
def test_recipes_to_come(recipe, device):
    a, b_t, offs, _ = problem(50, 32, 16, group_offs("uniform", 50, 2), device)
    with pytest.raises(NotImplementedError, match="rowwise"):
        grouped_mm(a, b_t, offs, recipe=recipe)


def test_unknown_recipe(device):
    a, b_t, offs, _ = problem(50, 32, 16, group_offs("uniform", 50, 2), device)
    with pytest.raises(ValueError, match="rowwise.*nosuch"):
        grouped_mm(a, b_t, offs, recipe="nosuch")
