"""Three steps of a converted layer with torch.autocast, gradient clipping and each kind of AdamW, as trainers use
them."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import assert_same
from torch import Tensor
from torch.func import functional_call
from torch.nn.utils import clip_grad_norm_

from moe_fp8_ext import Experts, MoE, Router, convert_

E, D, F, TOKENS, STEPS, RATE = 4, 32, 48, 50, 3, 1e-2
RECIPES = ("rowwise", "blockwise", "mxfp8")


def layer(recipe: str, device: str) -> MoE:
    """A layer with float32 weights."""
    torch.manual_seed(0)
    made = MoE(Router(E, D, 2, balance_loss=0.1), Experts(E, D, F, recipe="bf16", bias=True))
    convert_(made, recipe)
    return made.to(device)


def tokens(step: int, device: str) -> Tensor:
    return torch.randn(TOKENS, D, generator=torch.Generator().manual_seed(step)).to(device)


def loss_of(result: tuple[Tensor, Tensor]) -> Tensor:
    out, balance = result
    return (out.float() - 1).square().mean() + balance


@pytest.mark.parametrize("recipe", RECIPES)
def test_autocast(recipe, device):
    """Autocast equals casting the experts' weights and tokens. The router computes in float32 either way. Biases are
    rounded in the layer, and their gradients are not."""
    model = layer(recipe, device)
    other = copy.deepcopy(model)
    steps = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, other)]
    for step in range(STEPS):
        x = tokens(step, device)
        with torch.autocast(device, torch.bfloat16):
            loss = loss_of(model(x))
        loss.backward()
        routing = other.gate(x)
        cast = {name: p if "bias" in name else p.bfloat16() for name, p in other.experts.named_parameters()}
        out = functional_call(other.experts, cast, (x.bfloat16(), routing.topk_ids, routing.topk_scores))
        loss_of((out, routing.loss)).backward()
        assert_same([p.grad for p in model.parameters()], [p.grad for p in other.parameters()])
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("foreach", [False, True])
def test_clip_grad_norm(foreach, device):
    model = layer("rowwise", device)
    optimizer, most = torch.optim.SGD(model.parameters(), 0.1), 1e-3
    # A float32 sum of n squares, in any order, has a relative error of at most n 2^-24. Its root has half of that.
    tolerance = sum(p.numel() for p in model.parameters()) * 2**-24
    for step in range(STEPS):
        loss_of(model(tokens(step, device))).backward()
        before = [p.grad.clone() for p in model.parameters()]
        norm = sum(grad.double().square().sum() for grad in before).sqrt()
        assert norm > 10 * most
        got = clip_grad_norm_(model.parameters(), most, foreach=foreach)
        torch.testing.assert_close(got.double(), norm, rtol=tolerance, atol=0)
        for p, grad in zip(model.parameters(), before, strict=True):
            # Clipping adds 1e-6 to the norm.
            want = grad.double() * (most / (norm + 1e-6))
            torch.testing.assert_close(p.grad.double(), want, rtol=tolerance, atol=0)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_adamw(kind, recipe, device):
    """Compares each step with a step of the plain loop.

    Both start every step from the loop's parameters, so that casts to FP8 do not amplify small differences. A parameter
    p is rounded twice, for weight decay and for the update, by 2^-24 |p|. The update is RATE m / sqrt(v), with means m
    and v whose bias is corrected. In three steps |m| is at most the largest |g|, and sqrt(v) is at least sqrt(1 / 3) of
    it. So 25 operations round by at most 25 sqrt(3) 2^-24 RATE. Both steps may be off by that.
    """
    models = {kind: layer(recipe, device), "loop": layer(recipe, device)}
    optimizers = [
        torch.optim.AdamW(models[kind].parameters(), RATE, **{kind: True}),
        torch.optim.AdamW(models["loop"].parameters(), RATE, foreach=False, fused=False),
    ]
    got, want = (list(model.parameters()) for model in models.values())
    for step in range(STEPS):
        for model, optimizer in zip(models.values(), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model(tokens(step, device))).backward()
        assert_same([p.grad for p in got], [p.grad for p in want])
        start = [p.detach().clone() for p in want]
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for p, q, old in zip(got, want, start, strict=True):
                assert (q - old).abs().max() > RATE / 10
                assert ((p - q).abs() <= 2 * 2**-24 * (2 * old.abs() + 25 * 3**0.5 * RATE)).all()
                p.copy_(q)
