"""What recipes are: which ops a product is made of, which formats it takes, which names there are."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from grouped_problem import MIN_SQNR_DB, exact, gradients, problem, run
from helpers import assert_same, group_offs, sqnr_db
from torch import Tensor

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


def test_mxfp8_is_the_composition_of_its_ops(device):
    a, b_t, offs, g = problem(300, 160, 144, group_offs("tail_rows", 300, 3), device)
    got = run(a, b_t, offs, g, "mxfp8")
    q_a, s_a, qt_a, st_a, padded_offs = reference.quantize_mx_1x32_32x1(a.detach(), offs)
    q_g, s_g, qt_g, st_g, _ = reference.quantize_mx_1x32_32x1(g, offs)
    q_w, s_w, qt_w, st_w = reference.quantize_mx_weight(b_t.detach().transpose(1, 2))
    how = torch.float64, True, 32
    want = (
        reference.scaled_grouped_mm(q_a, q_w.mT, s_a, s_w, offs, *how),
        reference.scaled_grouped_mm(q_g, qt_w.mT, s_g, st_w, offs, *how),
        reference.scaled_grouped_mm(qt_g, qt_a.t(), st_g, st_a, padded_offs, *how).mT,
    )
    # Dequantized operands are exact in bfloat16: one rounding, of the product, and the accumulator.
    for name, ours, ideal in zip(("out", "dA", "dB_t"), got, want, strict=True):
        assert sqnr_db(ours, ideal) > 48.1, name


@pytest.mark.parametrize("mx_scaling", ["rceil", "floor"])
def test_mxfp8_accuracy(mx_scaling, device):
    """28.5 dB with scales that saturate nothing (see grouped_problem.py), 0.5 of it for the spread of draws and, in
    wgrad, for short blocks. Rounded down, a scale cuts what is above 448 of 512, 1/8 of it at most: of one in 32
    elements, the largest, whose mean square is 5 times that of all, in the log2(8/7) = 0.19 of blocks whose largest is
    there. That is 1/64 * 5/32 * 0.19 = 0.0005 more noise an operand than 0.0007: 26.2 dB, a bound that needs no room.
    """
    a, b_t, offs, g = problem(1000, 512, 384, group_offs("zipf", 1000, 4), device)
    recipe = dataclasses.replace(RECIPES["mxfp8"], mx_scaling=mx_scaling)
    for ours, ideal in zip(run(a, b_t, offs, g, recipe), exact(a, b_t, offs, g), strict=True):
        assert sqnr_db(ours, ideal) >= {"rceil": 28, "floor": 26.2}[mx_scaling]


@pytest.mark.parametrize("scaling", ["rowwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("indexed", [False, True])
def test_wgrad_high_precision(scaling, indexed, device):
    """The gradient of weights is that of recipe "bf16", bit for bit; the rest is the recipe's own."""
    recipe = dataclasses.replace(RECIPES[scaling], wgrad_high_precision=True)
    a, b_t, offs, g = problem(120, 90, 75, group_offs("tail_rows", 120, 3), device)
    indices = torch.randperm(120, generator=torch.Generator().manual_seed(0)).int().to(device) if indexed else None

    def gradients_of(recipe: str | Recipe) -> list[Tensor]:
        return gradients(lambda a, b: grouped_mm(a, b, offs, recipe=recipe, indices=indices), a, b_t, g)

    out, d_a, d_b = gradients_of(recipe)
    assert_same((out, d_a), gradients_of(scaling)[:2])
    assert_same(d_b, gradients_of("bf16")[2])


def test_wgrad_high_precision_of_frozen_operands(device):
    recipe = dataclasses.replace(RECIPES["mxfp8"], wgrad_high_precision=True)
    a, b_t, offs, g = problem(120, 64, 48, group_offs("zipf", 120, 3), device)
    both = run(a, b_t, offs, g, recipe)
    for frozen, names in ((a, (0, 2)), (b_t, (0, 1))):
        frozen.requires_grad_(False)
        got = run(a, b_t, offs, g, recipe)
        frozen.requires_grad_()
        assert_same([got[i] for i in names], [both[i] for i in names])
        assert sum(t is None for t in got) == 1


# E5M2 has a bit less: four times the noise of E4M3 in one of two operands, 4 dB less than its 25.8 or 28.5 dB.
@pytest.mark.parametrize("scaling", ["rowwise", "blockwise", "mxfp8"])
def test_gradients_in_another_format(scaling, device):
    recipe = dataclasses.replace(RECIPES[scaling], grad_dtype=torch.float8_e5m2)
    a, b_t, offs, g = problem(120, 96, 80, group_offs("zipf", 120, 3), device)
    got, want = run(a, b_t, offs, g, recipe), exact(a, b_t, offs, g)
    assert_same(got[0], run(a, b_t, offs, g, scaling)[0])
    for ours, ideal, fine in zip(got[1:], want[1:], run(a, b_t, offs, g, scaling)[1:], strict=True):
        assert MIN_SQNR_DB[scaling] - 4 <= sqnr_db(ours, ideal) < sqnr_db(fine, ideal) - 2


def test_alignment_follows_from_the_scaling():
    assert [Recipe("mine", scaling=scaling).align for scaling in ("rowwise", "blockwise", "mxfp8")] == [16, 128, 32]
    assert Recipe("mine", scaling="blockwise", align=32).align == 32


@pytest.mark.parametrize(("scaling", "align"), [("mxfp8", 16), ("mxfp8", 256), ("rowwise", 24), ("blockwise", 512)])
def test_recipe_of_wrong_alignment(scaling, align):
    with pytest.raises(ValueError, match=f"align must be a power of two .* got {align}"):
        Recipe("mine", scaling=scaling, align=align)


def test_wgrad_high_precision_takes_as_many_experts_as_torch(gpu):
    a, b_t, offs, _ = problem(50, 32, 16, group_offs("uniform", 50, 1024), gpu)
    recipe = dataclasses.replace(RECIPES["mxfp8"], wgrad_high_precision=True)
    with pytest.raises(RuntimeError, match="at most 1023 entries with wgrad_high_precision, got 1024"):
        grouped_mm(a, b_t, offs, recipe=recipe)


def test_recipe_of_unknown_scaling():
    with pytest.raises(ValueError, match="scaling must be one of .* got 'tensorwise'"):
        Recipe("mine", scaling="tensorwise")
    with pytest.raises(ValueError, match="mx_scaling must be one of .* got 'even'"):
        Recipe("mine", scaling="mxfp8", mx_scaling="even")


def test_unknown_recipe(device):
    a, b_t, offs, _ = problem(50, 32, 16, group_offs("uniform", 50, 2), device)
    with pytest.raises(ValueError, match="rowwise.*nosuch"):
        grouped_mm(a, b_t, offs, recipe="nosuch")
