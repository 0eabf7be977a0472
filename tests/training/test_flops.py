"""FlopCounterMode counts the products of this package: against counts by hand."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from moe_fp8_ext import Experts, LoRA, Recipe, experts, experts_of_groups, grouped_mm
from moe_fp8_ext.training.flops import count_torch_products, register_formulas, register_when_imported

E, D, F, T, TOP_K = 4, 64, 96, 64, 2
P = T * TOP_K  # rows of a layer; a multiple of every alignment
RECIPES = ["rowwise", "blockwise", "mxfp8", Recipe("rowwise", wgrad_high_precision=True), Recipe("rowwise", align=128)]


def counted(function: object) -> int:
    with FlopCounterMode(display=False, custom_mapping=count_torch_products()) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize("recipe", [*RECIPES, "bf16"], ids=str)
@pytest.mark.parametrize("adds", [False, True])
def test_layer(recipe, adds, device):
    """By hand: 2 operations for each of P rows and of the 3 F D weights of an expert, and twice as many backward."""
    layer = Experts(E, D, F, recipe=recipe, main_grad=adds, device=device)
    if adds:
        for weight in layer.parameters():
            weight.main_grad = torch.zeros_like(weight)
    x, scores = torch.randn(T, D, device=device).bfloat16().requires_grad_(), torch.rand(T, TOP_K, device=device)
    ids = torch.rand(T, E, device=device).argsort(1)[:, :TOP_K]
    forward = 2 * P * 3 * F * D
    assert counted(lambda: layer(x, ids, scores)) == forward
    assert counted(lambda: layer(x, ids, scores).sum().backward()) == 3 * forward


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_dropped_rows_and_padding_count_as_rows(recipe, device):
    """Sizes alone are counted: rows behind the last group are counted, and rounding P up to align adds some."""
    offs = torch.tensor([3, 3, 9, 11], device=device).int()
    w, x = (torch.randn(*size, device=device).bfloat16().requires_grad_() for size in ((E, D, 48), (40, D)))
    assert counted(lambda: grouped_mm(x, w, offs, recipe=recipe)) == 2 * 40 * D * 48
    rounded = -(-40 // Recipe(recipe).align) * Recipe(recipe).align
    got = counted(lambda: grouped_mm(x, w, offs, recipe=recipe).sum().backward())
    assert got == 2 * (40 + 40 + rounded) * D * 48


def test_frozen_weights_have_no_gradient_to_count(device):
    up, down = (torch.randn(E, *size, device=device).bfloat16() for size in ((2 * F, D), (D, F)))
    x, offs = (
        torch.randn(P, D, device=device).bfloat16().requires_grad_(),
        torch.arange(1, E + 1, device=device).int() * 32,
    )
    got = counted(lambda: experts_of_groups(x, offs, None, up, down).sum().backward())
    assert got == 2 * 2 * P * 3 * F * D


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8", "bf16"])
@pytest.mark.parametrize("rank", [8, 12, 32, 40, 64, 72])  # kernels multiply up to 32; products add up to 64
@pytest.mark.parametrize("shared", [False, True])
def test_adapters(recipe, rank, shared, device):
    """By hand: 2 R (D + 2 F) for a row of gate_up and 2 R (F + D) of down, and twice as many backward.

    R is the rank, rounded up to a multiple of 8. D columns of a factor that experts share meet tokens instead of rows.
    """

    def factor(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device).bfloat16().requires_grad_()

    def call(**adapters: object) -> int:
        return counted(lambda: experts(x, ids, scores, up, down, recipe=recipe, **adapters).sum().backward())

    x, scores = factor(T, D), torch.rand(T, TOP_K, device=device)
    ids = torch.rand(T, E, device=device).argsort(1)[:, :TOP_K]
    up, down = factor(E, 2 * F, D).detach(), factor(E, D, F).detach()
    of_experts = () if shared else (E,)
    lora_gate_up = LoRA(factor(*of_experts, rank, D), factor(E, 2 * F, rank))
    lora_down = LoRA(factor(E, rank, F), factor(*of_experts, D, rank))
    forward = 2 * (rank + -rank % 8) * (P * 3 * F + 2 * (T if shared else P) * D)
    assert call(lora_gate_up=lora_gate_up, lora_down=lora_down) - call() == 3 * forward


def test_a_second_registration_changes_nothing():
    before = dict(flop_registry)
    register_formulas()
    assert flop_registry == before


def test_registered_when_the_counter_is_imported(monkeypatch):
    """A fresh import of the counter registers the formulas, and no finder stays behind."""
    finders = list(sys.meta_path)
    monkeypatch.delitem(sys.modules, "torch.utils.flop_counter")
    monkeypatch.setattr(torch.utils, "flop_counter", None)
    register_when_imported()
    assert len(sys.meta_path) == len(finders) + 1
    fresh = importlib.import_module("torch.utils.flop_counter")
    assert fresh.flop_registry is not flop_registry and torch.ops.moe_fp8.scaled_grouped_mm in fresh.flop_registry
    assert sys.meta_path == finders
    register_when_imported()
    assert sys.meta_path == finders
