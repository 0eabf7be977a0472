"""A router and its experts as one node: what the two modules give, one gradient of tokens in place of two."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_same
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from moe_fp8_ext import Experts, MoE, Router, float32_mm

E, D, F, TOP_K = 8, 64, 48, 3


def layer_of(device: str, dtype: torch.dtype = torch.bfloat16, hidden: int = D, **options: object) -> MoE:
    torch.manual_seed(0)
    how = dict(device=device, dtype=dtype)
    return MoE(Router(E, hidden, TOP_K, **options, **how), Experts(E, hidden, F, bias=True, **how))


def tokens(device: str, t: int = 50, hidden: int = D) -> Tensor:
    x = torch.randn(t, hidden, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    return x.requires_grad_()


def is_one(layer: MoE, x: Tensor) -> bool:
    return type(layer(x)[0].grad_fn.next_functions[0][0]).__name__ == "_LayerBackward"


def by_modules(layer: MoE) -> MoE:
    """The same, but that a hook sees what the router returns."""
    layer.gate.register_forward_hook(lambda *_: None)
    return layer


def gradients(layer: MoE, x: Tensor, **of: Tensor) -> list[Tensor]:
    out, loss = layer(x)
    total = (out * of.get("dout", torch.ones_like(out))).sum() + loss
    return [out.detach(), loss.detach(), *torch.autograd.grad(total, (x, *layer.parameters()))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "options",
    [{}, {"z_loss": 0.1, "balance_loss": 0.2}, {"normalize": False}, {"scoring": "sigmoid", "bias_rate": 0.1}],
    ids=["plain", "losses", "not normalized", "sigmoid"],
)
def test_is_the_two_modules(options, dtype, device):
    x, layer = tokens(device), layer_of(device, dtype, **options)
    dout = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(x)
    assert is_one(layer, x)
    got = gradients(layer, x, dout=dout)
    counts = None if layer.gate.tokens_per_expert is None else layer.gate.tokens_per_expert.clone()
    by_modules(layer)
    assert not is_one(layer, x)
    if counts is not None:
        layer.gate.tokens_per_expert.zero_()
        layer(x)
        layer(x)
        assert_same(layer.gate.tokens_per_expert, counts)
    for mine, want in zip(got, gradients(layer, x, dout=dout), strict=True):
        assert_same(mine, want)


def test_adds_both_gradients(device):
    """Of so many numbers that the router's product is added to the experts' gradient where it is computed, on a GPU.

    a, the experts' part, is the same bits; b, the router's, is rounded to 8 bits here and maybe there, and the sum is
    there: at most 2^-9 |b| + 2^-9 |a + b|, and twice that for a b of another order of sums.
    """
    t, hidden = (8192, 1024) if device == "cuda" else (64, 1024)
    x, layer = tokens(device, t, hidden), layer_of(device, hidden=hidden)
    got = gradients(layer, x)[2].double()
    ids, scores, _ = layer.gate(x)
    of_scores = scores.detach().requires_grad_()
    of_experts = x.detach().requires_grad_()
    out = layer.experts(of_experts, ids, of_scores)
    a, of_scores = torch.autograd.grad(out.sum(), (of_experts, of_scores))
    (b,) = torch.autograd.grad(scores, x, of_scores)
    a, b = a.double(), b.double()
    bound = 2**-8 * (b.abs() + (a + b).abs())
    assert (b.abs() > bound).any()  # without it, it would fail
    assert ((got - (a + b)).abs() <= bound).all()


def test_of_the_loss_alone(device):
    x, layer = tokens(device), layer_of(device, z_loss=0.1)
    got = torch.autograd.grad(layer(x)[1], (x, layer.gate.weight))
    for mine, want in zip(got, torch.autograd.grad(by_modules(layer)(x)[1], (x, layer.gate.weight)), strict=True):
        assert_same(mine, want)


def test_gradients_that_came_in_are_as_they_were(device):
    x, layer = tokens(device), layer_of(device)
    dout = torch.ones_like(x)
    layer(x)[0].backward(dout)
    assert_same(dout, torch.ones_like(x))


def test_under_a_checkpoint(device):
    x, layer = tokens(device), layer_of(device, balance_loss=0.1)
    want = gradients(layer, x)
    out, loss = checkpoint(layer, x, use_reentrant=False)
    for mine, one in zip(torch.autograd.grad(out.sum() + loss, (x, *layer.parameters())), want[2:], strict=True):
        assert_same(mine, one)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_tokens_of_other_types(dtype, device):
    x = tokens(device).detach().to(dtype).requires_grad_()
    layer = layer_of(device, z_loss=0.1)
    got = gradients(layer, x)
    for mine, want in zip(got, gradients(by_modules(layer), x), strict=True):
        assert_same(mine, want)


def test_twice_through_a_graph_that_is_kept(device):
    x, layer = tokens(device), layer_of(device)
    out = layer(x)[0].sum()
    (first,) = torch.autograd.grad(out, x, retain_graph=True)
    kept = first.clone()
    assert_same(torch.autograd.grad(out, x)[0], kept)
    assert_same(first, kept)


def test_compiled_autograd_adds_both(monkeypatch):
    """Forward is eager, a graph is traced of backward alone; by parts, as on CUDA."""
    monkeypatch.setattr(float32_mm, "_has_out_dtype", lambda _: True)
    monkeypatch.setattr(float32_mm, "_mm", lambda a, b: a.float() @ b.float())
    x, layer = tokens("cpu"), layer_of("cpu")
    out = layer(x)[0].sum()
    (want,) = torch.autograd.grad(out, x, retain_graph=True)
    torch._dynamo.reset()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        out.backward()
    assert_same(x.grad, want)


class Louder(Experts):
    def forward(self, x: Tensor, topk_ids: Tensor, topk_scores: Tensor) -> Tensor:
        return 2 * super().forward(x, topk_ids, topk_scores)


def watched(layer: MoE) -> None:
    layer.experts.register_forward_pre_hook(lambda *_: None)


def seen_backward(layer: MoE) -> None:
    layer.gate.register_full_backward_hook(lambda *_: None)


def replaced(layer: MoE) -> None:
    own = layer.experts.forward
    layer.experts.forward = lambda *call: own(*call)


def of_a_subclass(layer: MoE) -> None:
    layer.experts = Louder(E, D, F, device=layer.gate.weight.device, dtype=torch.bfloat16)


def compiled(layer: MoE) -> None:
    layer.experts.compile(backend="eager")


def of_a_frozen_router(layer: MoE) -> None:
    layer.gate.weight.requires_grad_(False)


@pytest.mark.parametrize("change", [watched, seen_backward, replaced, of_a_subclass, compiled, of_a_frozen_router])
def test_is_not_one_where_that_could_be_seen(change, device):
    x, layer = tokens(device), layer_of(device)
    change(layer)
    assert not is_one(layer, x)


def test_is_not_one_under_autocast_and_global_hooks(device):
    x, layer = tokens(device), layer_of(device)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        assert not is_one(layer, x)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert not is_one(layer, x)
    finally:
        handle.remove()
    assert is_one(layer, x)


def test_is_not_one_where_its_class_is_patched(device, monkeypatch):
    x, layer, calls = tokens(device), layer_of(device), []
    own = Experts.forward
    monkeypatch.setattr(Experts, "forward", lambda self, *call: (calls.append(self), own(self, *call))[1])
    assert not is_one(layer, x) and calls == [layer.experts]


def test_other_derivatives_are_refused_as_those_of_the_modules_are(device):
    x, layer = tokens(device).detach(), layer_of(device)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x)).requires_grad_()
        with pytest.raises(RuntimeError, match="jvp"):
            layer(dual)
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda t: layer(t)[0].sum())(x)
