"""A whole MoE layer: NaN stays local, training steps leave nothing behind, checkpoints, graphs."""

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
@pytest.mark.parametrize("bias", [False, True])
def test_gathers_no_scores(recipe, bias, device):
    """Scores and their gradients are not permuted, because the ops between the products take scores of slots. Trained
    biases change none of this: they need no gradients in bfloat16, and no rows of biases."""
    layer, x = layer_of(device, of_experts={"bias": bias, "recipe": recipe}), tokens(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(x)[0].sum().backward()
    names = {event.name for event in profile.events()}
    assert "moe_fp8::quantize_activated_backward" in names
    assert not names & {"moe_fp8::permute_pad", "moe_fp8::activate_backward", "aten::index"}


def gradients(layer: MoE, x: Tensor, **of: Tensor) -> list[Tensor]:
    out, loss = layer(x)
    total = (out * of.get("dout", torch.ones_like(out))).sum() + loss
    return [out.detach(), loss.detach(), *torch.autograd.grad(total, (x, *layer.parameters()))]


SIGMOID = {"scoring": "sigmoid", "bias_rate": 0.1}


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
def test_nan_in_one_token(recipe, device):
    """Outside the router, NaN stays in its token and in the first experts. The token has these experts without NaN
    too."""
    x, layer, token = tokens(device), layer_of(device, z_loss=0.1, of_experts={"recipe": recipe}), 17
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
    """NaN fills the router's gradient, or only the rows of the first experts and the column of the feature
    (docs/how-it-works.md)."""
    x, layer = tokens(device), layer_of(device, **options)
    x.data[17, 5] = math.nan
    names = ["out", "loss", "x", *(n for n, _ in layer.named_parameters())]
    got = dict(zip(names, gradients(layer, x), strict=True))
    want = torch.full((E, D), whole, device=device)
    want[:TOP_K] = want[:, 5] = True
    assert_same(got["gate.weight"].isnan(), want)
    assert got["loss"].isnan() == ("z_loss" in options)


def step_of_training(device: str) -> tuple[Callable[..., tuple[Tensor, ...]], list[list[Tensor]]]:
    """Returns two inputs and a step of forward, backward and bias update. Its results depend on nothing but the
    input."""
    layer = layer_of(device, z_loss=0.1, **SIGMOID)
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


def test_a_step_of_training(device):
    """The first step gives the same bytes after another step. The tests below rely on this."""
    step, (first, later) = step_of_training(device)
    got, others = step(*first), step(*later)
    assert_same(step(*first), got)
    assert all(t.isfinite().all() and not torch.equal(t, other) for t, other in zip(got, others, strict=True))
    assert got[-2].sum() == 100 * TOP_K
    assert_same(got[-1], first[2] + 0.1 * (100 * TOP_K / E - got[-2]).sign())


def test_cuda_graph(gpu):
    step, inputs = step_of_training(gpu)
    check_cuda_graph(step, *inputs)


def test_cuda_never_waits_for_the_device(gpu):
    step, (first, later) = step_of_training(gpu)
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


def test_twice_through_a_graph_that_is_kept(device):
    x, layer = tokens(device), layer_of(device)
    out = layer(x)[0].sum()
    (first,) = torch.autograd.grad(out, x, retain_graph=True)
    kept = first.clone()
    assert_same(torch.autograd.grad(out, x)[0], kept)
    assert_same(first, kept)


def test_compiled_autograd(monkeypatch):
    """Forward runs eagerly, and only backward is traced. Products are computed by parts, as on CUDA."""
    monkeypatch.setattr(float32_mm, "_has_out_dtype", lambda _: True)
    monkeypatch.setattr(float32_mm, "_mm", lambda a, b: a.float() @ b.float())
    x, layer = tokens("cpu"), layer_of("cpu")
    out = layer(x)[0].sum()
    (want,) = torch.autograd.grad(out, x, retain_graph=True)
    torch._dynamo.reset()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        out.backward()
    assert_same(x.grad, want)


def test_other_derivatives_are_refused(device):
    x, layer = tokens(device).detach(), layer_of(device)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x)).requires_grad_()
        with pytest.raises(RuntimeError, match="jvp"):
            layer(dual)
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda t: layer(t)[0].sum())(x)
