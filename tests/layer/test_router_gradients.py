"""The gradients of a Router's scores and losses, and the memory that it keeps for backward."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import assert_same, kept_bytes
from torch import Tensor, nn

from moe_fp8_ext import Router
from moe_fp8_ext.layer import router
from moe_fp8_ext.matmul import float32 as float32_mm


def identity_router(experts: int, top_k: int, device: str, **options: object) -> Router:
    """A router with the identity as its weight, so that tokens are logits, bit by bit."""
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
def test_gradient_of_scores(t, experts, top_k, scoring, normalize, bias_rate, device):
    """Compares with plain PyTorch in float64. The logits of every other token are rounded, so that some are equal.

    Let u = 2^-24, and let H bound h. Names are as in DESIGN.md section 3. Relative errors add up as follows.

    - A score s is within d = 2e-6 + u * (difference of logits) of softmax, and within 1e-6 of sigmoid.
    - A sum of up to 64 scores has six levels, so a share s / N is off by 2 d + 7 u.
    - The sum A of shares times h is off by H (2 d + 15 u), and w = (h - A) / N by H (4 d + 31 u).
    - The sum of w * s is off by H (6 d + 45 u), because w is off and s contributes up to 2 H.
    - s * (w - sum) is off by H (12 d + 84 u) of s / N.

    Without N the errors are smaller, and the share is s. Sigmoid's are no larger: w * s * (1 - s) has no second sum.
    """
    options = dict(scoring=scoring, normalize=normalize, bias_rate=bias_rate, scaling_factor=2.5)
    made = identity_router(experts, top_k, device, **options)
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
def test_gradient_ignores_the_epsilon_of_the_sum(scoring, device):
    """A bias chooses experts whose scores add up to about 1e-20 or less.

    With softmax it is the gradient of scores that add up to 1, because backward keeps only the chosen logits. With
    sigmoid it is the gradient of the scores themselves.
    """
    logits = torch.tensor([[0.0, -1, -46, -47, -300]], device=device) - (0 if scoring == "softmax" else 1)
    made = identity_router(5, 2, device, scoring=scoring, bias_rate=0.1)
    made.e_score_correction_bias.copy_(torch.tensor([-9.0, -9, 0, 0, -9]))
    x = logits.clone().requires_grad_()
    ids, scores, _ = made(x)
    assert ids.tolist() == [[2, 3]] and scores.sum() < 0.9
    (got,) = torch.autograd.grad(scores[:, 0].sum(), x)
    exact = x.detach().double().requires_grad_()
    chosen = exact.gather(1, ids).softmax(1) if scoring == "softmax" else exact_scores(exact, ids, made)
    (want,) = torch.autograd.grad(chosen[:, 0].sum(), exact)
    # test_gradient_of_scores allows 3e-5 of a share, which is at most 0.75. The gradient is at least a fifth of that.
    torch.testing.assert_close(got.double(), want, rtol=2e-4, atol=0)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_of_logits_that_are_minus_infinity(scoring, normalize, device):
    """Their scores are zero, and so are their gradients, even if a bias chooses no other experts."""
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
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_scores_that_are_nan_have_gradients_that_are_nan(value, expert, scoring, device):
    """Even if the experts whose logits are not finite are not chosen."""
    made = identity_router(6, 2, device, scoring=scoring)
    with torch.no_grad():
        made.weight[expert] = value
    x = torch.rand(4, 6, device=device)
    ids, scores, _ = made(x)
    scores.sum().backward()
    if scores.isnan().any():
        assert scores.isnan().all() and made.weight.grad[ids.unique()].isnan().all()
    else:
        assert scoring == "sigmoid" and value == math.inf and made.weight.grad.isfinite().all()


def exact_probabilities(logits: Tensor, scoring: str) -> Tensor:
    """Scores over their sum, in float64. Sigmoid scores are divided by exp(largest) first, so that none underflows."""
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
    """Compares each loss and its gradient with float64.

    Let u = 2^-24 and L the largest magnitude of a logit.

    - Logarithms of scores and of sums are rounded 3 times, by u L each, so their differences are off by 6 u L.
    - Probabilities and softmax are off by that and by 20 u of sums and quotients, relatively. Call it r: at most 4e-4.
    - The balance loss is a sum of products without cancellation, off by r and 20 u more.
    - Its gradient p * (share - sum of share * p) * sigmoid(-logit) is within p * (r + 2 r + r) * the largest share.
    - The gradient of the z loss is 2 logsumexp * softmax.
    """
    rows = torch.cat([*LOGITS.values(), torch.randn(20, 8)]) if name == "all of them" else LOGITS[name]
    x = rows.to(device).requires_grad_()
    wide = x.detach().double().requires_grad_()
    t, experts = x.shape
    r = (6 * rows.abs().max().item() + 20) * 2**-24
    p = exact_probabilities(wide, scoring)

    made = identity_router(experts, 2, device, scoring=scoring, balance_loss=0.01)
    ids, _, loss = made(x)
    shares = nn.functional.one_hot(ids, experts).double().mean((0, 1))
    want = 0.01 * experts * (shares * p.mean(0)).sum()
    (got_grad,), (want_grad,) = torch.autograd.grad(loss, x), torch.autograd.grad(want, wide)
    torch.testing.assert_close(loss.double(), want, rtol=r + 20 * 2**-24, atol=0)
    size = 0.01 * experts / t * p.detach() * shares.max()
    # Subnormal probabilities may be flushed to 0.
    assert ((got_grad.double() - want_grad).abs() <= 4 * r * size + 2**-126).all()

    made = identity_router(experts, 2, device, scoring=scoring, z_loss=0.01)
    loss, lse = made(x).loss, wide.logsumexp(1)
    want = 0.01 * lse.square().mean()
    (got_grad,), (want_grad,) = torch.autograd.grad(loss, x), torch.autograd.grad(want, wide)
    torch.testing.assert_close(loss.double(), want, rtol=r, atol=0)
    size = 0.02 / t * lse.detach().abs()[:, None] * wide.detach().softmax(1)
    assert ((got_grad.double() - want_grad).abs() <= 4 * r * size + 2**-126).all()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_token_of_small_logits_leaves_weights_finite(scoring, device):
    """Takes one step with clipped gradients. The sigmoid scores of one token are all 0 in float32."""
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
    torch.testing.assert_close(loss.double(), want, rtol=1e-4, atol=0)  # for logits of 100, the r above is 4e-5
    (scores.square().sum() + loss).backward()
    nn.utils.clip_grad_norm_(made.parameters(), 1.0)
    torch.optim.SGD(made.parameters(), 0.1).step()
    assert made.weight.isfinite().all()


@pytest.mark.parametrize("logit", [-100.0, -1000.0, -3e38])
@pytest.mark.parametrize("normalize", [True, False])
def test_sigmoid_scores_of_small_logits_are_finite(normalize, logit, device):
    """Scores of such logits are 0, and so are their gradients, because the sum that divides them is at least 1e-20."""
    made = identity_router(8, 2, device, scoring="sigmoid", normalize=normalize, scaling_factor=2.5)
    x = torch.full((3, 8), logit, device=device, requires_grad=True)
    _, scores, _ = made(x)
    (got,) = torch.autograd.grad(scores, x, torch.full_like(scores, 1e3))
    assert not scores.any() and not got.any()  # any() is True for NaN
    want = exact_scores(x.detach().double(), torch.zeros(3, 2, dtype=torch.int64, device=device), made)
    assert (want < 1e-22).all() if normalize else (want < 1e-43).all()


@pytest.mark.parametrize("scoring", ["sigmoid", "sqrtsoftplus"])
def test_balance_loss_of_tokens_whose_logits_are_all_minus_infinity(scoring, device):
    """Their probabilities are equal and have no gradient, like their scores, which are 0."""
    made = Router(5, 1, 2, scoring=scoring, balance_loss=0.1).to(device)
    nn.init.constant_(made.weight, -3e38)
    x = torch.tensor([[3.0], [2.0]], device=device, requires_grad=True)
    ids, scores, loss = made(x)
    assert ids.tolist() == [[0, 1]] * 2 and not scores.any()
    assert loss.item() == pytest.approx(0.1)  # 5 * (2 experts of a share of 1/2) * 1/5
    for grad in torch.autograd.grad(loss, (x, made.weight)):
        assert not grad.any()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_losses_of_dtensors(scoring, masked, world_of_one):
    """DTensors give the bytes of plain tensors, although losses use an op whose gradient DTensor lacks."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    made, x = Router(8, 16, 2, scoring=scoring, balance_loss=0.1, z_loss=0.01), torch.randn(20, 16)
    mask = torch.arange(20) % 3 > 0 if masked else None
    want = torch.autograd.grad(made(x, mask).loss, made.weight)
    weight = made.weight = nn.Parameter(distribute_tensor(made.weight.detach(), mesh, [Replicate()]))
    loss = made(DTensor.from_local(x, mesh, [Replicate()]), mask).loss
    assert loss.placements == (Replicate(),)
    assert_same([grad.full_tensor() for grad in torch.autograd.grad(loss, weight)], want)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_keeps_the_chosen_logits(scoring, normalize, device):
    """With normalize, backward keeps nothing as large as the logits, except tokens and weight, which exist anyway."""
    t, experts, top_k, d = 100, 64, 4, 32
    made = Router(experts, d, top_k, scoring=scoring, normalize=normalize).to(device)
    x, routings = torch.randn(t, d, device=device).requires_grad_(), []
    kept = kept_bytes(lambda: routings.append(made(x)), x, made.weight)
    assert kept == 8 * t * top_k + 4 * (t * top_k if normalize else t * experts)  # ids and logits
    routings[0].topk_scores.sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("normalize", [True, False])
def test_products_take_parts_from_the_kernel(normalize, z_loss, compiled, device, monkeypatch):
    """If no loss adds to the gradient of the logits, their kernel writes both parts. The bytes do not change."""
    counts, choose = [], router.choose_experts_backward

    def choose_experts_backward(*args: object) -> Tensor:
        counts.append(args[-1])
        return choose(*args)

    if device == "cpu":  # pretends that torch.mm on a CPU has out_dtype
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
    assert compiled or counts == [1 if z_loss else 2, 1]
    assert_same(got, want)
    assert got[0].any() and got[1].any()
