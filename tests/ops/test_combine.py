"""combine and combine_backward: byte equality with the reference, and their gradients."""

from __future__ import annotations

import pytest
import torch
from derivatives import SPELLINGS, check_no_second_derivative, check_no_tangent
from helpers import (
    INPUT_DTYPES,
    INT32_MAX,
    INT32_MIN,
    assert_same,
    check_compiled,
    check_cuda_graph,
    check_deterministic,
    check_error,
    check_opcheck,
    check_second_gpu,
    check_stream_order,
    check_two_streams,
    misaligned,
    on,
    saved_tensors,
    short,
    strided_2d,
    wide,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_fp8_ext import reference
from moe_fp8_ext.ops import combine, combine_backward, sort_tokens


def places(t: int, top_k: int, p: int, device: str = "cpu", seed: int = 0) -> Tensor:
    """inverse [t, top_k]: distinct rows of p in random order. It is -1 in a few slots, and in all slots beyond p
    rows."""
    generator = torch.Generator().manual_seed(seed)
    inverse = torch.full((t * top_k,), -1, dtype=torch.int32)
    rows = torch.randperm(p, generator=generator)[: t * top_k].int()
    inverse[torch.randperm(t * top_k, generator=generator)[: len(rows)]] = rows
    inverse[torch.rand(t * top_k, generator=generator) < 0.1] = -1
    return inverse.view(t, top_k).to(device)


def scores_for(inverse: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return wide(*inverse.shape, dtype=dtype, seed=5).to(inverse.device)


def check_dots(got: Tensor, grad: Tensor, y: Tensor, inverse: Tensor, scores: Tensor | None) -> None:
    """A float32 sum of K products, in any order, is off by less than K * 2^-24 * sum |products|. Rounding the sum and
    the reference to the dtype of the scores adds half a unit of the last place each. 1.01 covers terms of higher
    order."""
    args = scores, inverse, y.shape[0]
    want = reference.combine_backward(grad, y, *args)[1]
    size = reference.combine_backward(grad.abs(), y.abs(), None, inverse, y.shape[0])[1].double()
    assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
    unit = torch.finfo(want.dtype).eps * want.double().abs().clamp(min=torch.finfo(want.dtype).tiny)
    tolerance = 1.01 * (y.shape[1] * 2.0**-24 * size + unit)
    assert ((got == want) | ((got.double() - want.double()).abs() <= tolerance)).all()


def check(y: Tensor, inverse: Tensor, scores: Tensor | None = None, grad: Tensor | None = None) -> None:
    """Checks both ops against the reference."""
    what = f"{short(y.dtype)} {short(y.shape)} {short(inverse.shape)}"
    assert_same(combine(y, inverse, scores), reference.combine(y, inverse, scores), what)
    if grad is None:
        grad = wide(inverse.shape[0], y.shape[1], dtype=y.dtype, device=y.device, seed=7)
    args = scores, inverse, y.shape[0]
    got_y, got_scores = combine_backward(grad, y, *args)
    assert_same(got_y, reference.combine_backward(grad, y, *args)[0], what)
    check_dots(got_scores, grad, y, inverse, scores)
    assert_same(combine_backward(grad, None, *args), reference.combine_backward(grad, None, *args), what)


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
def test_dtypes(dtype, device):
    inverse = places(31, 3, 83, device)
    of_all = (None, scores_for(inverse), scores_for(inverse, dtype))
    for k, kinds in (
        (1, of_all[:1]),
        (3, of_all[1:]),
        (8, of_all),
        (70, of_all),
        (200, of_all[:2]),
        (2056, of_all[1:]),
    ):
        for scores in kinds:
            check(wide(83, k, dtype=dtype, device=device), inverse, scores)


@pytest.mark.parametrize("top_k", [1, 2, 4, 5, 8, 9, 17])
def test_slots(top_k, device):
    """There are more rows than slots, about as many, or fewer."""
    for p in (300, 20 * top_k, 13):
        inverse = places(20, top_k, p, device)
        check(wide(p, 72, device=device), inverse, scores_for(inverse))


@pytest.mark.parametrize("shape", [(0, 2, 4, 8), (3, 0, 4, 8), (3, 2, 0, 8), (3, 2, 4, 0), (0, 0, 0, 0)], ids=short)
def test_zero_sizes(shape, device):
    t, top_k, p, k = shape
    inverse = places(t, top_k, p, device)
    for scores in (None, scores_for(inverse)):
        check(wide(p, k, device=device), inverse, scores)


def test_strides_and_alignment(device):
    y, inverse = wide(70, 128, device=device), places(30, 2, 70, device)
    grad, scores = wide(30, 128, device=device, seed=1), scores_for(inverse)
    for (_, y_view), (_, grad_view) in zip(strided_2d(y), strided_2d(grad), strict=True):
        check(y_view, inverse, scores, grad)
        check(y, inverse, scores, grad_view)
    for elements in (1, 2, 4, 8):
        check(misaligned(y, elements), misaligned(inverse), misaligned(scores), grad)
    check(y[:1].expand(70, 128), inverse, scores, grad[:1].expand(30, 128))


def test_corrupt_places(device):
    """Rows out of range count for nothing. If several slots name the same row, the last slot has it."""
    y = wide(10, 40, device=device)
    for rows in ([-1, 10, INT32_MAX, INT32_MIN, 3, 4], [5, 5, 5, 5, 5, 5], [0, 9, 9, 0, 2, 10], [-7] * 6):
        inverse = torch.tensor(rows, dtype=torch.int32, device=device).view(3, 2)
        check(y, inverse, scores_for(inverse))


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
def test_slots_that_share_rows(dtype, device):
    """Without grad_y, the gradients of scores are the same bytes as where every slot has its own copy of the row."""
    grad, y = wide(40, 72, dtype=dtype, device=device), wide(6, 72, dtype=dtype, device=device, seed=1)
    shared = torch.randint(-2, 8, (40, 3), dtype=torch.int32).to(device)
    for scores in (None, scores_for(shared), scores_for(shared, dtype)):
        grad_y, got = combine_backward(grad, y, scores, shared, 6, keep_grad_y=False)
        own = torch.arange(120, dtype=torch.int32, device=device).view(40, 3)
        copies = y[shared.clamp(0, 5).flatten().long()]
        inverse = torch.where((shared < 0) | (shared > 5), -1, own)
        assert_same(got, combine_backward(grad, copies, scores, inverse, 120)[1])
        check_dots(got, grad, copies, inverse, scores)
        assert grad_y.shape == (0, 72)
        assert combine_backward(grad, None, scores, shared, 6, keep_grad_y=False)[1].shape == (0,)


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
def test_non_finite_values(dtype, device):
    """Rows and scores of dropped slots are ignored. Every NaN becomes the same NaN. Values beyond the range become
    Inf."""
    values = [float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0, torch.finfo(dtype).max, 1.0]
    y = torch.tensor(values, device=device).to(dtype)[None].repeat(8, 1)
    y = torch.cat([y, y.t(), y.view(dtype).roll(3, 1)])
    inverse = torch.randperm(24)[:20].int().view(5, 4).to(device)
    inverse[0, 2:] = -1
    scores = scores_for(inverse).clone()
    scores[0, 2], scores[1, 1], scores[2, 0] = float("nan"), float("nan"), float("inf")
    for s in (None, scores):
        assert_same(combine(y, inverse, s), reference.combine(y, inverse, s))
        grad = y[:5].contiguous()
        (got_y, got), (want_y, want) = (
            f.combine_backward(grad, y, s, inverse, 24) for f in (torch.ops.moe_fp8, reference)
        )
        assert_same(got_y, want_y)
        assert_same(*(torch.where(got.isnan() | want.isnan(), t, 0) for t in (got, want)), "NaNs of grad_scores")
        assert not got[inverse < 0].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
def test_results_are_rounded_to_nearest_even(dtype, device):
    """Inputs are every value of the dtype, every tie between two values, and the neighbours of every tie."""
    values = torch.arange(2**15, dtype=torch.int16).view(dtype).float()
    values = values[values.isfinite()]
    ties = (values[1:] + values[:-1]) / 2
    below, above = torch.nextafter(ties, values[:-1]), torch.nextafter(ties, values[1:])
    sums = torch.cat([values, ties, below, above, torch.tensor([torch.finfo(dtype).max * 1.001])])
    sums = torch.cat([sums, -sums]).to(device)
    ones = torch.ones(1, 1, dtype=dtype, device=device)
    inverse = torch.zeros(len(sums), 1, dtype=torch.int32, device=device)
    assert_same(combine(ones, inverse, sums[:, None]), reference.combine(ones, inverse, sums[:, None]))
    assert_same(combine(ones, inverse, sums[:, None]), (sums + 0.0).to(dtype)[:, None])


@given(
    t=st.integers(0, 20),
    top_k=st.integers(0, 10),
    p=st.integers(0, 60),
    k=st.integers(0, 40),
    dtype=st.sampled_from(INPUT_DTYPES),
    seed=st.integers(0, 99),
)
def test_any_shape(t, top_k, p, k, dtype, seed, device):
    inverse = places(t, top_k, p, device, seed)
    check(wide(p, k, dtype=dtype, device=device), inverse, scores_for(inverse))


def test_undoes_a_sort(device):
    """Every row holds its token's number, so the sum of a token's slots is top_k times that number."""
    ids = torch.randint(0, 16, (500, 4), device=device)
    permutation, _, inverse = sort_tokens(ids, 16)
    y = (permutation // 4).float()[:, None].repeat(1, 8)
    assert torch.equal(combine(y, inverse), torch.arange(500.0, device=device)[:, None].repeat(1, 8) * 4)


def plain(y: Tensor, inverse: Tensor, scores: Tensor) -> Tensor:
    """Computes the sum with torch's own indexing."""
    kept = (inverse >= 0) & (inverse < y.shape[0])
    return (y[inverse.clamp(0, y.shape[0] - 1).long()] * (scores * kept)[:, :, None]).sum(1)


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
@pytest.mark.parametrize("spelling", SPELLINGS, ids=SPELLINGS.get)
def test_gradients(spelling, dtype, device):
    """Compares with autograd of plain indexing in float64."""
    combine = spelling.combine
    inverse = places(40, 3, 150, device)
    y, scores = wide(150, 24, dtype=dtype, device=device), torch.rand(40, 3, device=device)
    grad = wide(40, 24, dtype=dtype, device=device, seed=2)
    double = [t.double().requires_grad_() for t in (y, scores)]
    want_y, want_scores = torch.autograd.grad(plain(double[0], inverse, double[1]), double, grad.double())
    y.requires_grad_()
    scores.requires_grad_()
    got_y, got_scores = torch.autograd.grad(combine(y, inverse, scores), (y, scores), grad)
    # A product is rounded to float32 and then to the dtype. Together that is less than one unit of the dtype's last
    # place.
    unit = torch.finfo(dtype).eps * want_y.abs().clamp(min=torch.finfo(dtype).tiny)
    assert ((got_y.double() - want_y).abs() <= unit).all()
    check_dots(got_scores, grad, y.detach(), inverse, scores.detach())
    # The sum has K = 24 terms, so its error is below 2^-19 of the sum of their magnitudes.
    size = reference.combine_backward(grad.abs(), y.detach().abs(), None, inverse, 150)[1]
    assert ((got_scores.double() - want_scores).abs() <= 2.0**-19 * size).all()
    for wrt in (y, scores):
        (got,) = torch.autograd.grad(combine(y, inverse, scores), wrt, grad.t().contiguous().t())
        assert_same(got, got_y if wrt is y else got_scores)
    (got,) = torch.autograd.grad(combine(y, inverse), y, grad[:1].expand(40, 24))
    assert_same(got, combine_backward(grad[:1].expand(40, 24), None, None, inverse, 150)[0])
    (got,) = torch.autograd.grad(combine(y.float(), inverse, scores.detach()).sum(), y)
    assert got.shape == y.shape


@pytest.mark.parametrize("spelling", SPELLINGS, ids=SPELLINGS.get)
def test_derivatives_that_there_are_not(spelling):
    """Second and forward-mode derivatives raise; they are never a silent zero."""
    inverse = places(10, 2, 30)
    y, scores = torch.randn(30, 8), scores_for(inverse)
    check_no_tangent(lambda y: spelling.combine(y, inverse, scores), y)
    check_no_tangent(lambda scores: spelling.combine(y, inverse, scores), scores)
    check_no_tangent(lambda grad: spelling.combine_backward(grad, y, scores, inverse, 30), torch.randn(10, 8))
    out = spelling.combine(y.requires_grad_(), inverse, scores.requires_grad_())
    check_no_second_derivative(out, y, scores)
    check_no_second_derivative(spelling.combine(y, inverse), y)


def test_saves_rows_for_the_gradient_of_scores_alone(device):
    inverse = places(10, 2, 30, device)
    y, scores = torch.randn(30, 8, device=device, requires_grad=True), scores_for(inverse)
    saved = []
    for s in (None, scores, scores.clone().requires_grad_()):
        with saved_tensors() as kept:
            combine(y, inverse, s)
        saved.append(any(t.shape == y.shape for t in kept))
    assert saved == [False, False, True]


def test_opcheck(device):
    inverse = places(37, 3, 130, device)
    y, grad = wide(130, 33, device=device), wide(37, 33, device=device, seed=1)
    for scores in (None, scores_for(inverse), scores_for(inverse, torch.bfloat16)):
        check_opcheck("combine", [y, inverse, scores])
        check_opcheck("combine_backward", [grad, y, scores, inverse, 130])
        check_opcheck("combine_backward", [grad, None, scores, inverse, 130])
        check_opcheck("combine_backward", [grad, y, scores, inverse, 130], keep_grad_y=False)


def both(y: Tensor, inverse: Tensor, scores: Tensor) -> tuple[Tensor, ...]:
    out = combine(y, inverse, scores)
    return out, *combine_backward(out, y, scores, inverse, y.shape[0])


def arguments(t: int, top_k: int, k: int, device: str = "cpu", seed: int = 0) -> list[Tensor]:
    inverse = places(t, top_k, t * top_k, device, seed)
    return [wide(t * top_k, k, device=device, seed=seed), inverse, scores_for(inverse)]


def test_deterministic(device):
    check_deterministic(both, arguments(500, 5, 303, device))


def test_compiles_with_dynamic_rows(device):
    calls = [arguments(t, 4, 48, device) for t in (50, 64, 131)]
    check_compiled(both, calls, device, (0, 1, 2))

    def gradients(y: Tensor, inverse: Tensor, scores: Tensor) -> tuple[Tensor, ...]:
        out = combine(y, inverse, scores)
        return out, *torch.autograd.grad(out.square().sum(), (y, scores))

    for y, inverse, scores in calls:
        want = gradients(y.requires_grad_(), inverse, scores.requires_grad_())
        compiled = torch.compile(combine, fullgraph=True, backend="aot_eager", dynamic=True)
        out = compiled(y, inverse, scores)
        assert_same((out, *torch.autograd.grad(out.square().sum(), (y, scores))), want)


def test_cuda_graph(gpu):
    check_cuda_graph(both, *(arguments(700, 4, 512, gpu, seed) for seed in (0, 1)))


def test_two_streams(gpu):
    check_two_streams(both, [arguments(4000, 4, 1024, gpu, seed) for seed in (0, 1)])


def test_stream_order(gpu):
    check_stream_order(both, [arguments(4000, 4, 1024, gpu, seed) for seed in range(4)])


def test_second_gpu(second_gpu):
    check_second_gpu(both, arguments(700, 4, 512), second_gpu)


@pytest.mark.large
def test_more_than_2_31_elements(big_gpu):
    inverse = torch.randperm(600_012, device=big_gpu).int().view(150_003, 4)
    y = torch.randn(600_012, 4_096, dtype=torch.bfloat16, device=big_gpu)
    scores = torch.rand(150_003, 4, device=big_gpu)
    out, grad_y, grad_scores = both(y, inverse, scores)
    for tokens in (slice(0, 50), slice(149_953, 150_003)):
        rows = inverse[tokens].reshape(-1).long()
        local = torch.arange(200, device=big_gpu).int().view(50, 4)
        assert_same(out[tokens], reference.combine(y[rows], local, scores[tokens]))
        want, _ = reference.combine_backward(out[tokens], None, scores[tokens], local, 200)
        assert_same(grad_y[rows], want)
        check_dots(grad_scores[tokens], out[tokens], y[rows], local, scores[tokens])


Y, INVERSE, SCORES = torch.zeros(6, 4), torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2)
GRAD = torch.zeros(3, 4)


@pytest.mark.parametrize(
    ("op", "args", "argument", "got"),
    [
        ("combine", [Y.double(), INVERSE], "y", "float64"),
        ("combine", [Y[0], INVERSE], "y", "1"),
        ("combine", [Y.t(), INVERSE], "y", "stride 4"),
        ("combine", [Y, INVERSE.long()], "inverse", "int64"),
        ("combine", [Y, INVERSE[0]], "inverse", "1"),
        ("combine", [Y, INVERSE.t()], "inverse", "stride 2"),
        ("combine", [Y, INVERSE, SCORES.bfloat16()], "topk_scores", "bfloat16"),
        ("combine", [Y.half(), INVERSE, SCORES.double()], "topk_scores", "float64"),
        ("combine", [Y, INVERSE, SCORES[0]], "topk_scores", "1"),
        ("combine", [Y, INVERSE, SCORES[:2]], "topk_scores", "2"),
        ("combine", [Y, INVERSE, SCORES[:, :1].contiguous()], "topk_scores", "1"),
        ("combine", [Y, INVERSE, SCORES.t().contiguous().t()], "topk_scores", "stride 3"),
        ("combine_backward", [GRAD.double(), None, None, INVERSE, 6], "grad", "float64"),
        ("combine_backward", [GRAD[:2], None, None, INVERSE, 6], "grad", "2"),
        ("combine_backward", [GRAD.t().contiguous().t(), None, None, INVERSE, 6], "grad", "stride 3"),
        ("combine_backward", [GRAD, None, None, INVERSE.short(), 6], "inverse", "int16"),
        ("combine_backward", [GRAD, None, SCORES.half(), INVERSE, 6], "topk_scores", "float16"),
        ("combine_backward", [GRAD, None, SCORES[:1], INVERSE, 6], "topk_scores", "1"),
        ("combine_backward", [GRAD, None, SCORES, INVERSE, -1], "num_rows", "-1"),
        ("combine_backward", [GRAD, None, SCORES, INVERSE, 2**31], "num_rows", "2147483648"),
        ("combine_backward", [GRAD, Y.half(), SCORES, INVERSE, 6], "y", "float16"),
        ("combine_backward", [GRAD, Y[0], SCORES, INVERSE, 6], "y", "1"),
        ("combine_backward", [GRAD, Y[:5], SCORES, INVERSE, 6], "y", "5"),
        ("combine_backward", [GRAD, Y[:, :3], SCORES, INVERSE, 6], "y", "3"),
        ("combine_backward", [GRAD, Y.t().contiguous().t(), SCORES, INVERSE, 6], "y", "stride 6"),
    ],
)
def test_errors(op, args, argument, got, device):
    check_error(op, on(device, args), argument, got)


@pytest.mark.parametrize("argument", ["inverse", "topk_scores", "y"])
def test_error_on_another_device(argument, device):
    other = "cpu" if device == "cuda" else "meta"
    there = {"y": Y.to(device), "inverse": INVERSE.to(device), "topk_scores": SCORES.to(device)}
    there[argument] = there[argument].to(other)
    calls = [lambda: combine_backward(GRAD.to(device), **there, num_rows=6)]
    if argument != "y":
        calls.append(lambda: combine(**there))
    for call in calls:
        with pytest.raises(RuntimeError, match=f": {argument} must be on the device of .*got {other}"):
            call()
