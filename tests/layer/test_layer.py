"""A router and its experts as one node: what the two modules give, one gradient of tokens in place of two."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from helpers import assert_same, check_cuda_graph
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from moe_fp8_ext import Experts, MoE, Router
from moe_fp8_ext.matmul import float32 as float32_mm

E, D, F, TOP_K = 8, 64, 48, 3


def layer_of(
    device: str,
    dtype: torch.dtype = torch.bfloat16,
    hidden: int = D,
    of_experts: dict[str, object] | None = None,
    **options: object,
) -> MoE:
    torch.manual_seed(0)
    how = dict(device=device, dtype=dtype)
    experts = Experts(E, hidden, F, **{"bias": True} | (of_experts or {}), **how)
    return MoE(Router(E, hidden, TOP_K, **options, **how), experts)


def tokens(device: str, t: int = 50, hidden: int = D) -> Tensor:
    x = torch.randn(t, hidden, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    return x.requires_grad_()


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8"])
def test_gathers_no_scores(recipe, device):
    """Nor their gradients: ops between the products take those of slots."""
    layer, x = layer_of(device, of_experts={"bias": False, "recipe": recipe}), tokens(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(x)[0].sum().backward()
    names = {event.name for event in profile.events()}
    assert "moe_fp8::quantize_activated_backward" in names and "moe_fp8::permute_pad" not in names


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


SIGMOID = {"scoring": "sigmoid", "bias_rate": 0.1}
CASES = {
    "plain": ({}, {}),
    "losses": ({"z_loss": 0.1, "balance_loss": 0.2}, {"keep": "bf16"}),
    "not normalized": ({"normalize": False}, {"recipe": "blockwise"}),
    "sigmoid": (SIGMOID, {"activation": "swiglu_oai", "interleaved": True}),
    "groups": (SIGMOID | {"num_groups": 4, "top_groups": 2}, {"recipe": "mxfp8", "interleaved": True}),
    "scaled": ({"scaling_factor": 2.5}, {"recipe": "bf16", "activation": "relu2", "bias": False}),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("options", "of_experts"), CASES.values(), ids=CASES)
def test_is_the_two_modules(options, of_experts, dtype, device):
    x, layer = tokens(device), layer_of(device, dtype, of_experts=of_experts, **options)
    dout = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(x)
    dout[:, 0] *= 2**12  # what has a scale with it underflows, in no two recipes the same
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


def test_shared_experts_add_theirs(device):
    x, layer = tokens(device), layer_of(device, z_loss=0.1)
    want = gradients(layer, x)
    shared = nn.Linear(D, D, device=device, dtype=torch.bfloat16)
    out = shared(x)
    dx, *of_shared = torch.autograd.grad(out, (x, *shared.parameters()), torch.ones_like(out))
    layer.shared_experts = shared
    want[0] += out.detach()
    want[2] += dx
    assert_same(gradients(layer, x), [*want, *of_shared])


@pytest.mark.parametrize("recipe", ["bf16", "rowwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("modules", [1, 2])
def test_nan_in_one_token(modules, recipe, device):
    """And nowhere else but in the router: NaN goes to the first experts, to which the token goes without it too."""
    x, layer, token = tokens(device), layer_of(device, z_loss=0.1, of_experts={"recipe": recipe}), 17
    layer = layer if modules == 1 else by_modules(layer)
    assert is_one(layer, x) == (modules == 1)
    names, chosen = ["out", "loss", "x", *(n for n, _ in layer.named_parameters())], torch.arange(TOP_K, device=device)
    x.data[token] = layer.gate.weight[:TOP_K].sum(0)
    x.data[token, 5] = 0
    ids, want = layer.gate(x).topk_ids, dict(zip(names, gradients(layer, x), strict=True))
    assert_same(ids[token].sort().values, chosen)
    x.data[token, 5] = math.nan
    ids[token] = chosen
    assert_same(layer.gate(x).topk_ids, ids)
    got = dict(zip(names, gradients(layer, x), strict=True))
    for name in ("out", "x", *(n for n in names if n.startswith("experts"))):
        touched = torch.zeros(len(got[name]), dtype=torch.bool, device=device)
        touched[token if name in ("out", "x") else chosen] = True
        assert all(row.isnan().any() for row in got[name][touched]), name
        assert want[name].isfinite().all()
        assert_same(got[name][~touched], want[name][~touched], name)


@pytest.mark.parametrize(
    ("options", "whole"),
    [
        ({}, False),
        ({"scoring": "sigmoid"}, False),
        ({"scoring": "sigmoid", "normalize": False}, False),
        ({"normalize": False}, True),
        ({"z_loss": 0.1}, True),
    ],
)
def test_nan_in_one_token_and_its_router(options, whole, device):
    """As docs/layer.md says: of the router's gradient all, or what the first experts and that feature have."""
    x, layer = tokens(device), layer_of(device, **options)
    x.data[17, 5] = math.nan
    names = ["out", "loss", "x", *(n for n, _ in layer.named_parameters())]
    got = dict(zip(names, gradients(layer, x), strict=True))
    want = torch.full((E, D), whole, device=device)
    want[:TOP_K] = want[:, 5] = True
    assert_same(got["gate.weight"].isnan(), want)
    assert got["loss"].isnan() == ("z_loss" in options)


def step_of_training(modules: int, device: str) -> tuple[Callable[..., tuple[Tensor, ...]], list[list[Tensor]]]:
    """Forward, backward and what moves the bias, of tokens, a gradient and that bias alone; with two such inputs."""
    layer = layer_of(device, z_loss=0.1, **SIGMOID)
    layer = layer if modules == 1 else by_modules(layer)
    assert is_one(layer, tokens(device)) == (modules == 1)
    layer.shared_experts = nn.Sequential(nn.Linear(D, F), nn.SiLU(), nn.Linear(F, D)).to(device, torch.bfloat16)

    def step(x: Tensor, dout: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        layer.gate.e_score_correction_bias.copy_(bias)
        layer.gate.tokens_per_expert.zero_()
        results = gradients(layer, x.detach().requires_grad_(), dout=dout)
        counts = layer.gate.tokens_per_expert.clone()
        layer.gate.update_bias()
        return *results, counts, layer.gate.e_score_correction_bias.clone()

    g = torch.Generator().manual_seed(3)
    sizes = (100, D), (100, D), (E,)
    inputs = [[torch.randn(size, generator=g).to(device) for size in sizes] for _ in range(2)]
    return step, [[x.bfloat16(), dout.bfloat16(), 0.1 * bias] for x, dout, bias in inputs]


@pytest.mark.parametrize("modules", [1, 2])
def test_a_step_of_training(modules, device):
    """That it leaves nothing behind is what the tests below stand on."""
    step, (first, later) = step_of_training(modules, device)
    got, others = step(*first), step(*later)
    assert_same(step(*first), got)
    assert all(t.isfinite().all() and not torch.equal(t, other) for t, other in zip(got, others, strict=True))
    assert got[-2].sum() == 100 * TOP_K
    assert_same(got[-1], first[2] + 0.1 * (100 * TOP_K / E - got[-2]).sign())


@pytest.mark.parametrize("modules", [1, 2])
def test_cuda_graph(modules, gpu):
    step, inputs = step_of_training(modules, gpu)
    check_cuda_graph(step, *inputs)


@pytest.mark.parametrize("modules", [1, 2])
def test_cuda_never_waits_for_the_device(modules, gpu):
    step, (first, later) = step_of_training(modules, gpu)
    step(*first)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(*later)
    finally:
        torch.cuda.set_sync_debug_mode("default")


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
