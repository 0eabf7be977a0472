"""save_ops: backward of a checkpointed layer recomputes only the ops that are not saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch
from experts_problem import layer
from helpers import assert_same, blocks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from moe_fp8_ext import experts, grouped_mm, save_ops
from moe_fp8_ext._torch import ONLY_PUBLIC

PRODUCTS = {str(op) for op in save_ops() if "grouped_mm" in str(op)}
SAVING = {"context_fn": partial(create_selective_checkpoint_contexts, save_ops())}


class Calls(TorchDispatchMode):
    """Counts ops by name."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[str] = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.of[str(op)] += 1
        return op(*args, **(kwargs or {}))


def backward(fn: Callable[..., Tensor], leaves: list[Tensor]) -> tuple[Counter[str], tuple[Tensor, ...]]:
    """Returns how often backward called each op, and the gradients."""
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in leaves]
    with Calls() as calls:
        out = fn(*leaves)
        calls.of.clear()
        grads = torch.autograd.grad(out.float().square().sum(), [t for t in leaves if t.requires_grad])
    return calls.of, grads


def problem(kind: str, recipe: str, device: str) -> tuple[Callable[..., Tensor], list[Tensor], int]:
    """Returns a function, its tensors, and the number of products in its forward."""
    p = layer(t=64, d=32, f=32, e=4, top_k=2, bias=kind == "biases").at(device)
    if kind != "grouped_mm":
        tensors = [p.x, p.scores, p.w_gate_up, p.w_down, *((p.b_gate_up, p.b_down) if kind == "biases" else ())]

        def fn(x: Tensor, s: Tensor, up: Tensor, down: Tensor, *biases: Tensor) -> Tensor:
            of = dict(zip(("b_gate_up", "b_down"), biases, strict=False))
            return experts(x, p.ids, s, up, down, recipe=recipe, **of)

        return fn, tensors, 2
    offs = torch.tensor([10, 10, 50, 64], dtype=torch.int32, device=device)
    return lambda x, w: grouped_mm(x, w.mT, offs, recipe=recipe), [p.x, p.w_gate_up], 1


@pytest.mark.parametrize("kind", ["experts", "biases", "grouped_mm"])
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8", "bf16"])
def test_products_are_not_computed_again(kind, recipe, device):
    fn, tensors, products = problem(kind, recipe, device)
    plain, want = backward(fn, tensors)
    whole, of_whole = backward(lambda *t: checkpoint(fn, *t, use_reentrant=False), tensors)
    saving, of_saving = backward(lambda *t: checkpoint(fn, *t, use_reentrant=False, **SAVING), tensors)
    assert_same(of_whole, want)
    assert_same(of_saving, want)
    of_products = [sum(calls[name] for name in PRODUCTS) for calls in (plain, whole, saving)]
    stops_early = kind != "grouped_mm" and not ONLY_PUBLIC  # no tensor is saved behind the last product of a layer
    assert of_products == [2 * products, 3 * products - stops_early, 2 * products]
    assert whole["moe_fp8.sort_tokens.default"] == (kind != "grouped_mm") and not saving["moe_fp8.sort_tokens.default"]


@pytest.mark.parametrize("kind", ["experts", "biases"])
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "bf16"])
def test_last_product_is_computed_again_only_if_its_result_is_needed(kind, recipe, device):
    fn, tensors, _ = problem(kind, recipe, device)

    def calls_of(region: Callable[..., Tensor], **options: bool) -> int:
        calls, grads = backward(lambda *t: checkpoint(region, *t, use_reentrant=False, **options), tensors)
        assert_same(grads, backward(region, tensors)[1])
        return sum(calls[name] for name in PRODUCTS)

    fewest = calls_of(fn)
    assert calls_of(lambda x, *rest: x + fn(x, *rest)) == fewest  # a sum saves no tensor
    assert calls_of(lambda *t: fn(*t).tanh()) == fewest + (not ONLY_PUBLIC)
    assert calls_of(fn, early_stop=False) == fewest + (not ONLY_PUBLIC)


def test_layers_save_on_the_cpu_what_they_save(device):
    fn, tensors, _ = problem("experts", "rowwise", device)
    want = backward(fn, tensors)[1]
    with torch.autograd.graph.save_on_cpu():
        assert_same(backward(fn, tensors)[1], want)


def test_documents():
    """Runs the block of docs/training.md."""
    (block,) = blocks("docs/training.md", "Activation checkpointing")
    fn, (x, w), _ = problem("grouped_mm", "rowwise", "cpu")
    names = {"x": x.requires_grad_(), "block": lambda x: fn(x, w)}
    exec(f"import functools, moe_fp8_ext, torch\n{block}", names)
    assert_same(names["y"], fn(x, w))


def test_is_a_new_list():
    save_ops().clear()
    assert save_ops()
