"""The gradients of a Router, and what it keeps for them."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import assert_same
from torch import Tensor, nn

from moe_fp8_ext import Router
from moe_fp8_ext.layer import router
from moe_fp8_ext.matmul import float32 as float32_mm


def of_logits(experts: int, top_k: int, device: str, **options: object) -> Router:
    """A router whose tokens are its logits, bit by bit."""
    made = Router(experts, experts, top_k, **options).to(device)
    nn.init.eye_(made.weight)
    return made


def exact_scores(logits: Tensor, ids: Tensor, made: Router) -> Tensor:
    scores = logits.softmax(1) if made.scoring == "softmax" else logits.sigmoid()
    chosen = scores.gather(1, ids)
    return made.scaling_factor * (chosen / (chosen.sum(1, keepdim=True) + 1e-20) if made.normalize else chosen)


@pytest.mark.parametrize("bias_rate", [0.0, 0.1])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("t", "experts", "top_k"), [(300, 64, 8), (40, 16, 16), (5, 9, 1), (0, 8, 2)])
def test_of_scores(t, experts, top_k, scoring, normalize, bias_rate, device):
    """Against plain PyTorch in float64; every other token has logits that are equal.

    With u = 2^-24: scores are within d = 2e-6 + u * (difference of logits), relatively, of softmax, and within 1e-6 of
    sigmoid; sums of up to 64 have six levels. A share s / N is then off by 2 d + 7 u of itself, the sum A of shares
    times h, which are at most H, by H (2 d + 15 u), w = (h - A) / N by H (4 d + 31 u), the sum of w * s by
    H (6 d + 45 u), as what it is a sum of is off by and s adds to 2 H, and s * (w - sum) by H (12 d + 84 u) of s / N.
    Without N all of that is less, and the share is s. That of sigmoid is no more: w * s * (1 - s) has no second sum.
    """
    options = dict(scoring=scoring, normalize=normalize, bias_rate=bias_rate, scaling_factor=2.5)
    made = of_logits(experts, top_k, device, **options)
    if bias_rate:
        made.e_score_correction_bias.normal_(std=0.3)
    x = 3 * torch.randn(t, experts, device=device)
    x[::2] = x[::2].round()
    x.requires_grad_()
    ids, scores, _ = made(x)
    grad = torch.randn_like(scores)
    (got,) = torch.autograd.grad(scores, x, grad)
    logits = x.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(exact_scores(logits, ids, made), logits, grad.double())
    below = logits.amax(1, keepdim=True) - logits if t else logits
    shares = logits.softmax(1) if scoring == "softmax" else logits.sigmoid()
    if normalize:
        shares = shares / shares.gather(1, ids).sum(1, keepdim=True)
    largest = 2.5 * grad.double().abs().amax(1, keepdim=True)
    assert ((got.double() - want).abs() <= (12 * (2e-6 + 2**-24 * below) + 84 * 2**-24) * largest * shares).all()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_has_no_part_of_the_least_sum(scoring, device):
    """Where a bias chooses experts whose scores are about 1e-20 in sum or less: the gradient of scores that add up to 1
    all the same, for with softmax those that are kept know of no others; with sigmoid, that of the scores."""
    logits = torch.tensor([[0.0, -1, -46, -47, -300]], device=device) - (0 if scoring == "softmax" else 1)
    made = of_logits(5, 2, device, scoring=scoring, bias_rate=0.1)
    made.e_score_correction_bias.copy_(torch.tensor([-9.0, -9, 0, 0, -9]))
    x = logits.clone().requires_grad_()
    ids, scores, _ = made(x)
    assert ids.tolist() == [[2, 3]] and scores.sum() < 0.9
    (got,) = torch.autograd.grad(scores[:, 0].sum(), x)
    exact = x.detach().double().requires_grad_()
    chosen = exact.gather(1, ids).softmax(1) if scoring == "softmax" else exact_scores(exact, ids, made)
    (want,) = torch.autograd.grad(chosen[:, 0].sum(), exact)
    # The bound of test_of_scores, 3e-5 of a share of at most 0.75, where the gradient is a fifth and more of that.
    torch.testing.assert_close(got.double(), want, rtol=2e-4, atol=0)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_of_logits_that_are_minus_infinity(scoring, normalize, device):
    """Their scores are zero and stay it: so are their gradients, also where a bias has chosen no other."""
    made = Router(5, 1, 2, scoring=scoring, normalize=normalize, bias_rate=0.1).to(device)
    with torch.no_grad():
        made.weight[:, 0] = torch.tensor([1, 2, -3e38, -3e38, 3])
    x = torch.tensor([[3.0], [1.0]], device=device, requires_grad=True)  # -Inf for the first token alone
    for best in ((2, 3), (2, 4)):
        made.e_score_correction_bias.fill_(-9)[list(best)] = 9
        ids, scores, _ = made(x)
        assert sorted(ids[0].tolist()) == [*best] and not scores[0, ids[0] != 4].any()
        (got,) = torch.autograd.grad(scores[0].square().sum(), made.weight)
        assert got.isfinite().all() and not got[2:4].any()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("expert", [0, 5])
@pytest.mark.parametrize("of", [math.nan, math.inf])
def test_not_finite_scores_have_gradients_that_are_not(of, expert, scoring, device):
    """Also where none of the chosen logits is to blame."""
    made = of_logits(6, 2, device, scoring=scoring)
    with torch.no_grad():
        made.weight[expert] = of
    x = torch.rand(4, 6, device=device)
    ids, scores, _ = made(x)
    scores.sum().backward()
    if scores.isnan().any():
        assert scores.isnan().all() and made.weight.grad[ids.unique()].isnan().all()
    else:
        assert scoring == "sigmoid" and of == math.inf and made.weight.grad.isfinite().all()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_keeps_logits_of_the_chosen(scoring, normalize, device):
    """Beside tokens and weight, which are there: with normalize nothing that is as large as the logits."""
    t, experts, top_k, d = 100, 64, 4, 32
    made = Router(experts, d, top_k, scoring=scoring, normalize=normalize).to(device)
    x, kept = torch.randn(t, d, device=device).requires_grad_(), {}

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        ids, scores, _ = made(x)
    logits = t * top_k if normalize else t * experts
    assert sum(kept.values()) == x.nbytes + made.weight.nbytes + ids.nbytes + 4 * logits
    scores.sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("normalize", [True, False])
def test_products_take_parts_from_the_kernel(normalize, z_loss, compiled, device, monkeypatch):
    """Where nothing is added to the gradient of the scores; the bytes are those of parts that are made later."""
    asked, choose = [], router.choose_experts_backward

    def choose_experts_backward(*args: object) -> Tensor:
        asked.append(args[-1])
        return choose(*args)

    if device == "cpu":  # as if it had what products by parts want
        monkeypatch.setattr(float32_mm, "_has_out_dtype", lambda x: True)
        monkeypatch.setattr(float32_mm, "_mm", lambda a, b: a.float() @ b.float())
    made = Router(24, 40, 4, normalize=normalize, z_loss=z_loss).to(device, torch.bfloat16)
    x = torch.randn(70, 40, device=device).bfloat16().requires_grad_()

    def step(x: Tensor) -> Tensor:
        _, scores, loss = made(x)
        return scores.square().sum() + loss

    if compiled:
        call = torch.compile(step, fullgraph=True, backend="aot_eager")
    else:
        call = step
        monkeypatch.setattr(router, "choose_experts_backward", choose_experts_backward)
    got = torch.autograd.grad(call(x), (x, made.weight))
    monkeypatch.setattr(router, "takes_parts", lambda *_: False)
    want = torch.autograd.grad(step(x), (x, made.weight))
    assert compiled or asked == [1 if z_loss else 2, 1]
    assert_same(got, want)
    assert got[0].any() and got[1].any()
