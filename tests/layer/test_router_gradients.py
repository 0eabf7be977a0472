"""The gradients of a Router, and what it keeps for them."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import assert_same
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

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


def exact_probabilities(logits: Tensor, scoring: str) -> Tensor:
    """Scores over their sum, in float64. Sigmoid scores are divided by exp(largest) first, so that none vanishes."""
    if scoring == "softmax":
        return logits.softmax(1)
    largest = logits.detach().amax(1, keepdim=True).clamp(max=0)
    scores = (logits - largest).exp() / (1 + logits.exp())
    return scores / scores.sum(1, keepdim=True)


# Logits of tokens, for 8 experts. Sigmoid scores of the first three, and of most of the fourth, are 0 in float32.
LOGITS = {
    "all -100": torch.full((1, 8), -100.0),
    "all -1000": torch.full((1, 8), -1000.0),
    "spread below -88": -90 - torch.arange(8.0)[None] / 4,
    "mixed": torch.tensor([[-1000, -100, -100.5, -89, -88, -87, -1000, -103.0]]),
    "mixed with moderate ones": torch.tensor([[-1000, -100, 0.5, -0.5, -88, 3, -1000, 0.0]]),
    "all equal": torch.full((1, 8), 0.25),
    "all 0": torch.zeros(1, 8),
    "all 100": torch.full((1, 8), 100.0),
}


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("name", [*LOGITS, "all of them"])
def test_losses_of_extreme_logits(name, scoring, device):
    """Each loss and its gradient against float64.

    Let u = 2^-24 and L the largest magnitude of a logit. Logarithms of scores and of sums are rounded 3 times, by u L
    each, so that their differences are off by 6 u L, and probabilities and softmax by that and 20 u of sums and
    quotients, relatively: r. The balance loss is a sum of products of these without cancellation: r and 20 u more. Its
    gradient is p * (share - sum of share * p) * sigmoid(-logit), within p * (r + 2 r + r) * the largest share; r is at
    most 4e-4 here. The gradient of the z loss is 2 logsumexp * softmax.
    """
    rows = torch.cat([*LOGITS.values(), torch.randn(20, 8)]) if name == "all of them" else LOGITS[name]
    x = rows.to(device).requires_grad_()
    wide = x.detach().double().requires_grad_()
    t, experts = x.shape
    r = (6 * rows.abs().max().item() + 20) * 2**-24
    p = exact_probabilities(wide, scoring)

    made = of_logits(experts, 2, device, scoring=scoring, balance_loss=0.01)
    ids, _, loss = made(x)
    shares = nn.functional.one_hot(ids, experts).double().mean((0, 1))
    want = 0.01 * experts * (shares * p.mean(0)).sum()
    (got_grad,), (want_grad,) = torch.autograd.grad(loss, x), torch.autograd.grad(want, wide)
    torch.testing.assert_close(loss.double(), want, rtol=r + 20 * 2**-24, atol=0)
    size = 0.01 * experts / t * p.detach() * shares.max()
    # Probabilities below float32's smallest normal number may be flushed to 0.
    assert ((got_grad.double() - want_grad).abs() <= 4 * r * size + 2**-126).all()

    made = of_logits(experts, 2, device, scoring=scoring, z_loss=0.01)
    loss, lse = made(x).loss, wide.logsumexp(1)
    want = 0.01 * lse.square().mean()
    (got_grad,), (want_grad,) = torch.autograd.grad(loss, x), torch.autograd.grad(want, wide)
    torch.testing.assert_close(loss.double(), want, rtol=r, atol=0)
    size = 0.02 / t * lse.detach().abs()[:, None] * wide.detach().softmax(1)
    assert ((got_grad.double() - want_grad).abs() <= 4 * r * size + 2**-126).all()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_token_of_small_logits_leaves_weights_finite(scoring, device):
    """One step with clipped gradients, with a token whose sigmoid scores are all 0 in float32."""
    made = Router(8, 32, 2, scoring=scoring, balance_loss=0.01).to(device)
    x = torch.randn(64, 32, device=device)
    x[5] = 0
    x[5, 0] = -100
    with torch.no_grad():
        made.weight[:, 0] = 1
    ids, scores, loss = made(x)
    logits = x.double() @ made.weight.detach().double().t()
    shares = nn.functional.one_hot(ids, 8).double().mean((0, 1))
    want = 0.01 * 8 * (shares * exact_probabilities(logits, scoring).mean(0)).sum()
    torch.testing.assert_close(loss.double(), want, rtol=1e-4, atol=0)  # r above, of logits of 100, is 4e-5
    (scores.square().sum() + loss).backward()
    nn.utils.clip_grad_norm_(made.parameters(), 1.0)
    torch.optim.SGD(made.parameters(), 0.1).step()
    assert made.weight.isfinite().all()


@pytest.mark.parametrize("logit", [-100.0, -1000.0, -3e38])
@pytest.mark.parametrize("normalize", [True, False])
def test_sigmoid_scores_of_small_logits_are_finite(normalize, logit, device):
    """The sum that scores are divided by is never below 1e-20; scores of such logits are 0, and so are gradients."""
    made = of_logits(8, 2, device, scoring="sigmoid", normalize=normalize, scaling_factor=2.5)
    x = torch.full((3, 8), logit, device=device, requires_grad=True)
    _, scores, _ = made(x)
    (got,) = torch.autograd.grad(scores, x, torch.full_like(scores, 1e3))
    assert not scores.any() and not got.any()  # which a NaN would be
    want = exact_scores(x.detach().double(), torch.zeros(3, 2, dtype=torch.int64, device=device), made)
    assert (want < 1e-22).all() if normalize else (want < 1e-43).all()


def test_balance_loss_of_tokens_whose_logits_are_all_minus_infinity(device):
    """Their probabilities are equal, without a gradient: scores, which are 0, have none either."""
    made = Router(5, 1, 2, scoring="sigmoid", balance_loss=0.1).to(device)
    nn.init.constant_(made.weight, -3e38)
    x = torch.tensor([[3.0], [2.0]], device=device, requires_grad=True)
    ids, scores, loss = made(x)
    assert ids.tolist() == [[0, 1]] * 2 and not scores.any()
    assert loss.item() == pytest.approx(0.1)  # 5 * (2 experts of a share of 1/2) * 1/5
    for grad in torch.autograd.grad(loss, (x, made.weight)):
        assert not grad.any()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_losses_of_dtensors(scoring, world_of_one):
    """The bytes are those of tensors: losses use ops that DTensors lack."""
    mesh = init_device_mesh("cpu", (1,))
    made, x = Router(8, 16, 2, scoring=scoring, balance_loss=0.1, z_loss=0.01), torch.randn(20, 16)
    want = torch.autograd.grad(made(x).loss, made.weight)
    weight = made.weight = nn.Parameter(distribute_tensor(made.weight.detach(), mesh, [Replicate()]))
    loss = made(DTensor.from_local(x, mesh, [Replicate()])).loss
    assert loss.placements == (Replicate(),)
    assert_same([grad.full_tensor() for grad in torch.autograd.grad(loss, weight)], want)


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
