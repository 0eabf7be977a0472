"""choose_experts and its gradient: byte equality with the reference, and accuracy against PyTorch."""

from __future__ import annotations

import math

import pytest
import torch
from derivatives import SPELLINGS, check_no_second_derivative
from helpers import (
    assert_same,
    check_compiled,
    check_cuda_graph,
    check_deterministic,
    check_error,
    check_opcheck,
    check_second_gpu,
    check_stream_order,
    check_two_streams,
    flushed_subnormals,
    misaligned,
    on,
    pairs,
    short,
    strided_2d,
)
from routing_problem import logits_of
from torch import Tensor

from moe_fp8_ext import reference
from moe_fp8_ext.matmul.float32 import parts
from moe_fp8_ext.ops import choose_experts, choose_experts_backward

LOGITS, IDS = torch.randn(5, 8), torch.randint(8, (5, 2))
GRAD = torch.randn(5, 2)


def check_gradient(args: tuple[object, ...], what: str = "output") -> None:
    for count in (1, 2):
        want = reference.choose_experts_backward(*args, parts=count)
        assert_same(choose_experts_backward(*args, parts=count), want, f"{what}, parts: {count}")


def check(logits: Tensor, top_k: int, bias: Tensor | None = None, *how: object) -> None:
    """`how` holds scoring, normalize, scaling_factor, num_groups and top_groups."""
    what = f"{short(logits.shape)} {top_k} {how}"
    want = reference.choose_experts(logits, top_k, bias, *how)
    assert_same(choose_experts(logits, top_k, bias, *how), want, what)
    grad = torch.randn(want[1].shape).to(logits.device)
    for ids in (want[0], want[0].int()):
        check_gradient((grad, logits, ids, None, *how[:3]), f"gradient {what}")
        if len(how) < 2 or how[1]:
            args = grad, want[2], ids, logits.shape[1], *how[:3]
            check_gradient(args, f"gradient of the chosen {what}")


@pytest.mark.parametrize(
    *pairs(
        sizes=[
            (1, 1),
            (5, 2),
            (8, 2),
            (64, 6),
            (128, 8),
            (130, 7),
            (256, 8),
            (400, 33),
            (512, 10),
            (1021, 3),
            (1024, 8),
        ],
        scoring=["softmax", "sigmoid", "sqrtsoftplus"],
        normalize=[True, False],
        bias=[True, False],
        factor=[1.0, 2.5],
        t=[1, 37, 200],
    )
)
def test_choice(sizes, scoring, normalize, bias, factor, t, device):
    e, top_k = sizes
    check(logits_of(t, e, device), top_k, torch.randn(e).to(device) if bias else None, scoring, normalize, factor)


@pytest.mark.parametrize(
    ("e", "top_k", "groups", "top_groups"),
    [(8, 3, 4, 2), (6, 2, 3, 2), (5, 3, 5, 3), (256, 8, 8, 4), (130, 7, 13, 2), (1024, 9, 1024, 700), (1000, 9, 8, 3)],
)
def test_groups(e, top_k, groups, top_groups, device):
    bias = torch.randn(e, device=device)
    calls = ("softmax", None, "top2_sum"), ("sigmoid", bias, "top2_sum"), ("softmax", bias, "max")
    for scoring, given, rule in calls:
        check(logits_of(300, e, device), top_k, given, scoring, True, 1.0, groups, top_groups, rule)


def test_groups_by_their_best_expert(device):
    """By hand: the first group has the best expert, the second the best two."""
    logits = torch.tensor([[5.0, 0.0, 4.0, 3.0]], device=device)
    how = dict(scoring="sigmoid", num_groups=2, top_groups=1)
    assert choose_experts(logits, 1, **how)[0].tolist() == [[2]]
    assert choose_experts(logits, 1, **how, group_score="max")[0].tolist() == [[0]]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("e", "top_k"), [(9, 3), (300, 40)])
def test_given_ids(scoring, normalize, e, top_k, device):
    """The ids of a choice give its bytes again, in any order. Slots of no expert are dropped; an id may stand twice."""
    logits, bias = logits_of(50, e, device), torch.randn(e, device=device)
    logits[0], logits[1, 3], logits[2, 5] = -math.inf, math.nan, math.inf
    how = scoring, normalize, -2.5
    ids, *of_ids = choose_experts(logits, top_k, bias, *how)
    order = torch.rand(ids.shape, device=device).argsort(1)
    given = ids.gather(1, order)
    got = choose_experts(logits, top_k, None, *how, given_ids=given.int())
    assert_same(got, (given, *(t.gather(1, order) for t in of_ids)))
    given[3:20:2, 0], given[4:9, top_k - 1], given[7, 1], given[9, 1] = -1, e, 2**40, -(2**63)
    given[30], given[31] = -1, given[31, 0]
    for strided in (given.int(), torch.stack([given, given], 1)[:, 0], given):
        want = reference.choose_experts(logits, top_k, None, *how, given_ids=strided)
        assert_same(choose_experts(logits, top_k, None, *how, given_ids=strided), want)
    is_dropped = (given < 0) | (given >= e)
    assert is_dropped.any() and (want[0][is_dropped] == -1).all() and not any(t[is_dropped].any() for t in want[1:])


def test_gradient_of_given_ids(device):
    """The gradient equals torch's over the given experts, without dropped slots."""
    logits = logits_of(20, 12, device).requires_grad_()
    given = torch.rand(20, 12, device=device).argsort(1)[:, :4]
    given[:5, 2] = -1
    _, scores, _ = choose_experts(logits, 4, None, "sqrtsoftplus", given_ids=given)
    exact = logits.detach().double().requires_grad_()
    s = torch.nn.functional.softplus(exact).sqrt().gather(1, given.clamp(min=0)) * (given >= 0)
    grad = torch.randn_like(scores)
    (want,) = torch.autograd.grad(s / s.sum(1, keepdim=True), exact, grad.double())
    (got,) = torch.autograd.grad(scores, logits, grad)
    # As in test_is_what_torch_computes; slopes of softplus' root are at most half of a score.
    assert ((got - want).abs() <= 2e-5 * grad.abs().amax(1, keepdim=True)).all()


def test_as_many_choices_as_experts(device):
    for e in (32, 65, 200, 1024):
        check(logits_of(40, e, device), e)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_is_what_torch_computes(scoring, device):
    """Experts equal torch.topk's where neighbouring scores differ enough. Scores and gradients are close to torch's."""
    logits = (2 * torch.randn(300, 64)).to(device).double().requires_grad_()
    softplus = torch.nn.functional.softplus
    scores = dict(
        softmax=lambda: logits.softmax(1), sigmoid=logits.sigmoid, sqrtsoftplus=lambda: softplus(logits).sqrt()
    )[scoring]()
    values, want_ids = scores.topk(7)
    apart = (values[:, :-1] - values[:, 1:] > 1e-5 * values[:, :-1]).all(1)
    assert apart.sum() > 250
    narrow = logits.detach().float().requires_grad_()
    ids, got, _ = choose_experts(narrow, 6, None, scoring, True, 2.5)
    assert torch.equal(ids[apart], want_ids[apart, :6])
    chosen = scores.gather(1, ids)
    want = 2.5 * chosen / chosen.sum(1, keepdim=True)
    # Logits below 16 are rounded by 2^-21. An exponential is off by as much, and a quotient by twice as much.
    # Exponentials are within 1e-6, and a dozen roundings of 2^-24 remain.
    torch.testing.assert_close(got.double(), want, rtol=5e-6, atol=0)
    grad = torch.randn_like(got)
    (exact,) = torch.autograd.grad(want, logits, grad.double())
    (dlogits,) = torch.autograd.grad(got, narrow, grad)
    # A gradient is a share times the difference of 2.5 * grad and its mean, so its terms have the errors above.
    size = 2.5 * grad.abs().amax(1, keepdim=True)
    assert ((dlogits.double() - exact).abs() <= 2e-5 * size).all()


@pytest.mark.parametrize("e", [2, 128, 1024])
def test_softmax_is_near(e, device):
    """The error is within DESIGN.md's bound: 2^-24 of a difference of logits, and 2e-6 for exponentials, sums and
    quotient."""
    for size in (0.1, 4, 30):
        logits = size * torch.randn(500, e, device=device)
        ids, scores, _ = choose_experts(logits, e, None, "softmax", False)
        want = logits.double().softmax(1).gather(1, ids)
        below = (logits.amax(1, keepdim=True) - logits).gather(1, ids).double()
        bound = (2e-6 + 2**-24 * below) * want
        assert ((scores.double() - want).abs() <= torch.where(below > 87, want, bound)).all()


def test_equal_scores_go_to_the_smaller_id(device):
    for scoring in ("softmax", "sigmoid", "sqrtsoftplus"):
        ids, scores, _ = choose_experts(torch.zeros(3, 200, device=device), 9, None, scoring)
        assert torch.equal(ids, torch.arange(9, device=device).expand(3, 9))
        assert torch.equal(scores, scores[:1, :1].expand(3, 9))
        # The bias decides groups too: it lowers the first of four.
        bias = torch.zeros(8, device=device)
        bias[0] = -1
        ids, _, _ = choose_experts(torch.zeros(1, 8, device=device), 3, bias, scoring, num_groups=4, top_groups=2)
        assert ids.tolist() == [[2, 3, 4]]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_not_finite(scoring, device):
    """NaN is chosen first, and its scores are NaN. Infinity makes every softmax score NaN, but no sigmoid score. Its
    sqrtsoftplus score is infinite, so scores that are divided by their sum are NaN, or 0 beside it."""
    logits = logits_of(9, 140).to(device)
    logits[0] = -math.inf
    logits[1, 77] = logits[2, 3] = logits[2, 139] = math.nan
    logits[3, 100] = math.inf
    logits[4, 5:] = -math.inf
    bias = torch.randn(140, device=device)
    bias[9], bias[20], bias[90] = math.inf, -math.inf, math.nan
    for normalize in (True, False):
        for given in (None, bias):
            check(logits, 12, given, scoring, normalize, 1.0, 7, 3)
    ids, scores, _ = choose_experts(logits, 4, None, scoring)
    isnan = scores.isnan().all(1).tolist()
    if scoring == "softmax":
        assert isnan == [True, True, True, True, False, False, False, False, False]
        assert ids[:4].tolist() == [[0, 1, 2, 3]] * 4
    else:
        assert isnan == [False, True, True, False, False, False, False, False, False]
        assert scores[3].isnan().tolist() == [scoring == "sqrtsoftplus", False, False, False]
        assert ids[1, 0] == 77 and ids[2, :2].tolist() == [3, 139] and ids[3, 0] == 100


def test_scores_that_vanish(device):
    """If the scores of all allowed experts are about zero, the smallest allowed sum divides them."""
    logits = torch.tensor([[0.0, 1.0, -60.0, -61.0, -90.0, -200.0]], device=device)
    bias = torch.tensor([-9.0, -9, 0, 0, 0, 0], device=device)
    for top_k in (1, 2, 4):
        check(logits, top_k, bias)
        check(logits - 50, top_k, bias, "sigmoid")
        check(logits - 50, top_k, bias, "sqrtsoftplus")
    assert choose_experts(logits, 2, bias)[1].sum() < 1e-5


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_logits_of_the_chosen(scoring, device):
    """They equal gathered logits, and are NaN where scores are NaN. Zeros have the sign that adding 0 * scores
    gives."""
    logits = logits_of(60, 20).to(device)
    logits[0], logits[1, 3], logits[2, 5], logits[6, 4] = -math.inf, math.nan, math.inf, 1e-40
    logits[5] = -0.0
    for factor, normalize in ((1.0, True), (-2.5, True), (2.5, False), (1e38, False)):
        ids, scores, got = choose_experts(logits, 6, None, scoring, normalize, factor)
        want = logits.gather(1, ids).add_(scores, alpha=0)
        assert_same(got, want.masked_fill(want.isnan(), math.nan))
        assert scores[1].isnan().any() and got[scores.isnan()].isnan().all()
        assert got[5].signbit().all() == (factor < 0)


def test_one_choice_has_all_of_the_score(device):
    ids, scores, _ = choose_experts(logits_of(100, 20, device), 1)
    assert torch.equal(scores, torch.ones_like(scores)) and ids.shape == (100, 1)


def test_ids_of_any_numbers(device):
    """Ids of no expert count for nothing. If an id stands at several slots, the last one counts."""
    ids = torch.tensor([[5, 5, 2], [-1, 9, 3], [2**40, -(2**63), 2**32], [0, 0, 0]], device=device)
    for logits in (logits_of(4, 9, device), logits_of(4, 300, device)):
        for scoring in ("softmax", "sigmoid", "sqrtsoftplus"):
            for normalize in (True, False):
                check_gradient((torch.randn(4, 3, device=device), logits, ids, None, scoring, normalize))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("experts", [7, 300])
def test_gradient_from_logits_of_the_chosen(scoring, experts, device):
    """Slots may have no expert, or logits of -Inf, Inf or NaN, or -Inf in all slots. Experts come in any order."""
    logits = logits_of(64, 5, device)
    logits[8, 1], logits[9, 2], logits[10, 3], logits[11] = -torch.inf, torch.inf, torch.nan, -torch.inf
    ids = torch.rand(64, experts, device=device).argsort(1)[:, :5]
    ids[:7:2, 3], ids[12], ids[1, 0] = -1, 2**40, experts
    grad = torch.randn(64, 5, device=device)
    for factor in (1.0, -2.5):
        args = grad, logits, ids, experts, scoring, True, factor
        check_gradient(args)
        got = choose_experts_backward(*args)
        assert not got[12].any() and got[8, ids[8, 1]] == 0 and got[10, ids[10]].isnan().any()


@pytest.mark.parametrize("of_chosen", [False, True])
def test_parts_are_those_of_a_product(of_chosen, device):
    """All bytes but NaN payloads are equal, also for large numbers, subnormals and zeros."""
    logits, grad = logits_of(300, 60, device), torch.randn(300, 7, device=device)
    logits[0], logits[1, 5] = -math.inf, math.nan
    sizes = (math.inf, math.nan, 3e38, 1e-38, 1e-40, 0.0)
    grad[10:16] *= torch.tensor(sizes, device=device)[:, None]
    ids = choose_experts(logits, 7, None, "sigmoid")[0]
    args = grad, logits.gather(1, ids) if of_chosen else logits, ids, 60 if of_chosen else None, "sigmoid", True, 8.0
    want = parts(choose_experts_backward(*args), 2, 1)
    got = choose_experts_backward(*args, parts=2).flatten(1)
    assert want.isnan().any() and torch.equal(got.isnan(), want.isnan())
    assert_same(got.masked_fill(got.isnan(), 0), want.masked_fill(want.isnan(), 0))


@pytest.mark.parametrize(("t", "e"), [(0, 8), (0, 1)])
def test_no_tokens(t, e, device):
    check(torch.empty(t, e, device=device), 1)


def test_nothing_to_differentiate(device):
    for t, e, top_k in ((4, 0, 0), (4, 9, 0), (4, 0, 2)):
        logits, ids = torch.randn(t, e, device=device), torch.zeros(t, top_k, dtype=torch.int64, device=device)
        grad = torch.randn(t, top_k, device=device)
        assert_same(choose_experts_backward(grad, logits, ids), torch.zeros(t, e, device=device))
        check_gradient((grad, logits, ids))


def test_strides_and_alignment(device):
    for e in (64, 260):
        for _, logits in strided_2d(logits_of(50, e, device)):
            check(logits, 6, misaligned(torch.randn(e, device=device)))
        check(logits_of(1, e, device).expand(50, e), 6)
    ids, scores, _ = choose_experts(LOGITS.to(device), 2)
    wide_ids, wide_grad = ids.new_zeros(5, 7), scores.new_zeros(5, 9)
    wide_ids[:, 3:5], wide_grad[:, 1:3] = ids, scores
    args = wide_grad[:, 1:3], LOGITS.to(device), wide_ids[:, 3:5]
    check_gradient(args)


def test_flushed_subnormals():
    logits = 40 * logits_of(60, 30) - 80
    for scoring in ("sigmoid", "sqrtsoftplus"):
        want = choose_experts(logits, 5, None, scoring, False)
        with flushed_subnormals():
            assert_same(choose_experts(logits, 5, None, scoring, False), want)


@pytest.mark.parametrize("spelling", SPELLINGS, ids=SPELLINGS.get)
def test_gradient(spelling, device):
    logits = logits_of(30, 20, device).requires_grad_()
    how = "sigmoid", False, 1.5
    ids, scores, topk_logits = spelling.choose_experts(logits, 4, None, *how)
    assert scores.requires_grad and not ids.requires_grad and not topk_logits.requires_grad
    grad = torch.randn_like(scores)
    want = choose_experts_backward(grad, logits.detach(), ids, None, *how)
    assert_same(torch.autograd.grad(scores, logits, grad, retain_graph=True), (want,))
    (of_sum,) = torch.autograd.grad(scores.sum(), logits)  # the gradient of a sum is an expanded tensor
    assert_same(of_sum, choose_experts_backward(torch.ones_like(grad), logits.detach(), ids, None, *how))
    ids, scores, _ = spelling.choose_experts(logits, 4)
    want = choose_experts_backward(grad, logits.detach(), ids)
    assert_same(torch.autograd.grad(scores, logits, grad, retain_graph=True), (want,))
    check_no_second_derivative(scores, logits)


@pytest.mark.parametrize("spelling", SPELLINGS, ids=SPELLINGS.get)
def test_a_bias_has_no_gradient(spelling):
    with pytest.raises(RuntimeError, match="^choose_experts: bias must not ask for a gradient"):
        spelling.choose_experts(LOGITS, 2, torch.zeros(8, requires_grad=True))


def test_opcheck(device):
    bias, logits = torch.randn(8, device=device), LOGITS.to(device, copy=True)
    of_groups = [logits, 2, bias, "sigmoid", False, 2.5, 4, 2]
    for args in ([logits, 2], of_groups, [*of_groups, "max", IDS.to(device)]):
        check_opcheck("choose_experts", args)
        # With a gradient, opcheck would add scores to the sum of ids, which are integers. test_compiled_gradient covers
        # that.
        kinds = "test_schema", "test_autograd_registration", "test_faketensor"
        args[0] = args[0].clone().requires_grad_()
        torch.library.opcheck(torch.ops.moe_fp8.choose_experts.default, tuple(args), test_utils=kinds)
    check_opcheck("choose_experts_backward", on(device, [GRAD, LOGITS, IDS]))
    check_opcheck("choose_experts_backward", on(device, [GRAD, LOGITS[:, :2], IDS, 8, "sigmoid", True, 2.0, 2]))


def test_deterministic(device):
    logits, grad = logits_of(5000, 128, device), torch.randn(5000, 8, device=device)
    check_deterministic(choose_experts, [logits, 8])
    check_deterministic(choose_experts_backward, [grad, logits, choose_experts(logits, 8)[0]])


def both(logits: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    ids, *floats = choose_experts(logits, grad.shape[1])
    return ids, *floats, choose_experts_backward(grad, logits, ids)


def calls(device: str) -> list[list[Tensor]]:
    return [[logits_of(t, 128, device), torch.randn(t, 8, device=device)] for t in (300, 301, 700)]


def test_compiled(device):
    check_compiled(both, calls(device), device, dynamic=(0, 1))


def test_compiled_gradient(device):
    def gradient(logits: Tensor, grad: Tensor) -> Tensor:
        return torch.autograd.grad(choose_experts(logits, 8)[1], logits, grad)[0]

    logits, grad = calls(device)[0]
    logits.requires_grad_()
    compiled = torch.compile(lambda x: (choose_experts(x, 8)[1] * grad).sum(), fullgraph=True, backend="aot_eager")
    assert_same(torch.autograd.grad(compiled(logits), logits)[0], gradient(logits, grad))


def test_cuda_graph(gpu):
    first, _, _ = calls(gpu)
    check_cuda_graph(both, first, [logits_of(300, 128, gpu) * 3, -first[1]])


def test_streams(gpu):
    check_two_streams(both, calls(gpu))
    check_stream_order(both, calls(gpu)[:1] * 3)


def test_second_gpu(second_gpu):
    check_second_gpu(both, calls("cuda:0")[0], second_gpu)


def test_bytes_of_the_cpu(gpu):
    """Differences of logits take all values near the steps of the power of two, and many others."""
    logits = torch.cat([torch.linspace(-95, 3, 2**17).view(-1, 128), torch.randn(4000, 128) * 4, torch.zeros(40, 128)])
    grad = torch.randn(len(logits), 8)
    for scoring in ("softmax", "sigmoid", "sqrtsoftplus"):
        want = choose_experts(logits, 8, None, scoring)
        got = choose_experts(logits.to(gpu), 8, None, scoring)
        assert_same([t.cpu() for t in got], want)
        of_logits = choose_experts_backward(grad.to(gpu), logits.to(gpu), got[0], scoring=scoring)
        assert_same(of_logits.cpu(), choose_experts_backward(grad, logits, want[0], scoring=scoring))


@pytest.mark.large
def test_over_2_31_elements(big_gpu):
    t, e = 2**21 + 3, 1024
    logits = torch.randn(t, e, device=big_gpu)
    got = choose_experts(logits, 3)
    dlogits = choose_experts_backward(got[1], logits, got[0])
    for rows in (slice(0, 99), slice(t - 99, t)):
        want = reference.choose_experts(logits[rows], 3)
        assert_same([t[rows] for t in got], want)
        assert_same(dlogits[rows], reference.choose_experts_backward(want[1], logits[rows], want[0]))


@pytest.mark.parametrize(
    ("args", "argument", "got"),
    [
        ([LOGITS.bfloat16(), 2], "logits", "bfloat16"),
        ([LOGITS[0], 2], "logits", "1"),
        ([LOGITS.t(), 2], "logits", "stride 8"),
        ([torch.zeros(2, 1025), 2], "logits", "1025"),
        ([torch.zeros(2, 0), 1], "top_k", "1"),
        ([LOGITS, 0], "top_k", "0"),
        ([LOGITS, 9], "top_k", "9"),
        ([LOGITS, 3, None, "softmax", True, 1.0, 4, 1], "top_k", "3"),
        ([LOGITS, 2, LOGITS[0, :7]], "bias", "7"),
        ([LOGITS, 2, LOGITS], "bias", "2"),
        ([LOGITS, 2, LOGITS[0].double()], "bias", "float64"),
        ([LOGITS, 2, None, "tanh"], "scoring", "'tanh'"),
        ([LOGITS, 2, None, "softmax", True, 1.0, 3], "num_groups", "3"),
        ([LOGITS, 2, None, "softmax", True, 1.0, 0], "num_groups", "0"),
        ([LOGITS, 2, None, "softmax", True, 1.0, 4, 5], "top_groups", "5"),
        ([LOGITS, 2, None, "softmax", True, 1.0, 4, 0], "top_groups", "0"),
        ([LOGITS, 2, None, "softmax", True, 1.0, 4, 2, "mean"], "group_score", "'mean'"),
        ([LOGITS, 2, None, "softmax", True, 1.0, 1, 1, "max", IDS[:4]], "given_ids", "4"),
        ([LOGITS, 1, None, "softmax", True, 1.0, 1, 1, "max", IDS], "given_ids", "2"),
        ([LOGITS, 2, None, "softmax", True, 1.0, 1, 1, "max", IDS.float()], "given_ids", "float32"),
    ],
)
def test_errors(args, argument, got, device):
    check_error("choose_experts", on(device, args), argument, got)


@pytest.mark.parametrize(
    ("args", "argument", "got"),
    [
        ([GRAD.double(), LOGITS, IDS], "grad", "float64"),
        ([GRAD[:4], LOGITS, IDS], "grad", "4"),
        ([torch.randn(2, 5).t(), LOGITS, IDS], "grad", "stride 5"),
        ([GRAD, LOGITS.half(), IDS], "logits", "float16"),
        ([GRAD, torch.zeros(5, 1025), IDS], "logits", "1025"),
        ([GRAD, LOGITS, IDS[:, :1]], "topk_ids", "1"),
        ([GRAD, LOGITS, IDS[:4]], "topk_ids", "4"),
        ([GRAD, LOGITS, IDS.short()], "topk_ids", "int16"),
        ([GRAD, LOGITS, IDS, None, "tanh"], "scoring", "'tanh'"),
        ([GRAD, LOGITS, IDS, 8], "logits", "8"),
        ([GRAD, LOGITS[:, :2], IDS, 8, "softmax", False], "normalize", "False"),
        ([GRAD, LOGITS[:, :2], IDS, 1025], "num_experts", "1025"),
        ([GRAD, LOGITS[:, :2], IDS, 0], "num_experts", "0"),
        ([GRAD, LOGITS, IDS, None, "softmax", True, 1.0, 3], "parts", "3"),
    ],
)
def test_errors_of_the_gradient(args, argument, got, device):
    check_error("choose_experts_backward", on(device, args), argument, got)
