"""What Megatron's DDP expects of a backward that adds to main gradients, without Megatron: attributes and a hook."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from helpers import assert_same_tensor
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from moe_fp8_ext import Experts, Recipe, _torch, experts, experts_of_groups, grouped_mm
from moe_fp8_ext.training import main_grad

E, D, T = 3, 32, 40
OFFS = torch.tensor([13, 13, 40], dtype=torch.int32)


def of_experts(x: Tensor, up: Tensor, down: Tensor, recipe: str, **main_grads: Tensor) -> Tensor:
    ids = torch.arange(T)[:, None] % E
    return experts(x, ids, torch.ones(T, 1), up, down, activation="silu", recipe=recipe, **main_grads)


def of_groups(x: Tensor, up: Tensor, down: Tensor, recipe: str, **main_grads: Tensor) -> Tensor:
    return experts_of_groups(x, OFFS, None, up, down, activation="silu", recipe=recipe, **main_grads)


def of_products(x: Tensor, up: Tensor, down: Tensor, recipe: str, **main_grads: Tensor) -> Tensor:
    for w, name in ((up, "main_grad_gate_up"), (down, "main_grad_down")):
        main_grad = {"main_grad": main_grads[name].mT} if main_grads else {}
        x = grouped_mm(x, w.mT, OFFS, recipe=recipe, **main_grad)
    return x


needs_base = pytest.mark.skipif(_torch.ONLY_PUBLIC, reason="no public name tells the parameter of a view")
CALLS = pytest.mark.parametrize("call", [of_experts, of_groups, pytest.param(of_products, marks=needs_base)])
RECIPES = pytest.mark.parametrize("recipe", ["bf16", "rowwise"])


def parameters(marked: bool = True, fill: float = 0.0) -> list[nn.Parameter]:
    """Two weights of one shape, as Megatron's DDP marks them."""
    g = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(E, D, D, generator=g).bfloat16()) for _ in range(2)]
    for p in made:
        p.main_grad = torch.full(p.shape, fill)
        if marked:
            p.grad_added_to_main_grad = False
    return made


def backward(call: Callable, of: list[nn.Parameter], recipe: str, uses_main_grad: bool = True) -> None:
    g = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(T, D, generator=g).bfloat16() for _ in range(2))
    names = ("main_grad_gate_up", "main_grad_down") if uses_main_grad else ()
    call(x.requires_grad_(), *of, recipe, **{n: p.main_grad for n, p in zip(names, of, strict=False)}).backward(grad)


@CALLS
@RECIPES
def test_ddp_is_told(call, recipe):
    """The hook sees a dense gradient and the mark, whenever it runs. All weights of a shape share the memory of the
    gradient, which autograd does not copy."""
    plain, made, seen = parameters(), parameters(), []
    backward(call, plain, recipe, uses_main_grad=False)
    for p in made:
        p.register_post_accumulate_grad_hook(lambda p: seen.append((p.grad.data_ptr(), p.grad_added_to_main_grad)))
    backward(call, made, recipe)
    addresses, marks = zip(*seen, strict=True)
    assert marks == (True, True) and len(set(addresses)) == 1
    for p, want in zip(made, plain, strict=True):
        assert p.grad.is_contiguous() and p.grad.dtype == p.dtype and not p.grad.any()
        assert not want.grad_added_to_main_grad and want.grad.any()
        assert_same_tensor(p.main_grad.bfloat16() + 0.0, want.grad + 0.0, "main_grad")  # -0 becomes +0


@CALLS
def test_zero_out_wgrad(call):
    """The hook then adds the gradient to main_grad nevertheless."""
    made = parameters()
    backward(call, made, "bf16")
    made[0].grad.fill_(7)  # as a trainer that accumulates there; the memory is shared
    made = parameters()
    made[0].zero_out_wgrad = made[1].zero_out_wgrad = True
    backward(call, made, "bf16")
    assert not made[0].grad.any() and not made[1].grad.any()


@CALLS
@RECIPES
def test_overwrite_main_grad(call, recipe):
    want, made = parameters(), parameters(fill=3.0)
    backward(call, want, recipe)
    made[1].overwrite_main_grad = True
    backward(call, made, recipe)
    assert_same_tensor(made[1].main_grad, want[1].main_grad, "overwritten")
    assert_same_tensor(made[0].main_grad, want[0].main_grad + 3.0, "added to")


@CALLS
def test_without_ddp_autograd_gets_no_gradient(call):
    made = parameters(marked=False)
    backward(call, made, "bf16")
    assert all(p.grad is None and p.main_grad.any() for p in made)


def test_frozen_weights_and_graphs_are_not_marked():
    made = parameters()
    made[0].requires_grad_(False)
    backward(of_experts, made, "bf16")
    assert [p.grad_added_to_main_grad for p in made] == [False, True]
    made = parameters()
    torch._dynamo.reset()
    backward(torch.compile(of_experts, backend="aot_eager", fullgraph=True), made, "bf16")
    assert [p.grad_added_to_main_grad for p in made] == [False, False]
    assert all(p.grad is None and p.main_grad.any() for p in made)


@pytest.mark.parametrize("fake_first", [True, False])
def test_fake_tensors_share_no_memory_with_real_ones(fake_first):
    """Estimates of memory run backward in a FakeTensorMode, before or after a real one."""
    main_grad._placeholder.cache_clear()
    for fake in (fake_first, not fake_first):
        with FakeTensorMode() if fake else contextlib.nullcontext():
            made = [nn.Parameter(torch.ones(E, D, D)) for _ in range(2)]
            for p in made:
                p.main_grad, p.grad_added_to_main_grad = torch.zeros(p.shape), False
            x = torch.ones(T, D, requires_grad=True)
            names = dict(main_grad_gate_up=made[0].main_grad, main_grad_down=made[1].main_grad)
            ids = torch.zeros(T, 1, dtype=torch.int64)
            experts(x, ids, torch.ones(T, 1), *made, activation="silu", **names).sum().backward()
        assert all(p.grad_added_to_main_grad and isinstance(p.grad, FakeTensor) == fake for p in made)


def test_modules_tell_it_too():
    made = Experts(E, D, D, main_grad=True, recipe=Recipe("bf16"), dtype=torch.bfloat16)
    for p in made.parameters():
        p.main_grad, p.grad_added_to_main_grad = torch.zeros_like(p), False
    made(torch.randn(T, D).bfloat16(), torch.arange(T)[:, None] % E, torch.ones(T, 1)).sum().backward()
    for p in made.parameters():
        assert p.grad_added_to_main_grad and p.main_grad.any() and not p.grad.any()
