"""Products with float32 accuracy, computed from parts in bfloat16."""

import itertools

import pytest
import torch
from helpers import assert_same

from moe_fp8_ext.matmul.float32 import _mm, float32_mm, float32_mm_backward, gradients_by_parts, mm_by_parts, parts

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_add_up(dtype, dim, device):
    """The sum of all parts is exact, and the sum of the first n is within 2^(-8 n). That is twice the
    remainder of n roundings to 8 bits."""
    x = (torch.randn(64, 65) * torch.exp2(torch.randint(-14, 15, (64, 65)))).to(dtype)
    x = torch.cat([x, -x, x[:1] * 0]).to(device)
    for given in (x, x.t(), x[::2, 3:]):
        for count in range(1, DTYPES.index(dtype) + 2):
            parts_of_x = parts(given, count, dim).double().chunk(count, dim)
            assert ((sum(parts_of_x) - given.double()).abs() <= 2.0 ** (-8 * count) * given.double().abs()).all()
        assert torch.equal(sum(parts_of_x), given.double())


@pytest.mark.parametrize(("a", "b"), [*itertools.product(DTYPES, DTYPES)])
@pytest.mark.parametrize(("m", "k", "n"), [(9, 200, 5), (200, 9, 33), (40, 1, 33), (1, 1, 99), (0, 4, 4), (4, 0, 4)])
def test_products(a, b, m, k, n, device):
    """The error is at most 2^-23 of every product, which both ways leave out, and k roundings of float32 sums."""
    a, b = torch.randn(m, k).to(a), torch.randn(n, k).to(b)
    want, size = a.double() @ b.double().t(), a.double().abs() @ b.double().abs().t()
    for mm in (float32_mm, mm_by_parts):
        got = mm(a.to(device), b.to(device).t()).cpu()
        assert got.dtype == torch.float32
        assert ((got.double() - want).abs() <= (2 * k + 8) * 2**-23 * size).all()


@pytest.mark.parametrize(("a", "b"), [*itertools.product(DTYPES, DTYPES)])
@pytest.mark.parametrize(("m", "k", "n"), [(9, 200, 5), (200, 9, 33)])
@pytest.mark.parametrize("out", DTYPES)
def test_rounded_products(out, a, b, m, k, n, device):
    """The error is at most half a unit of out, the error of float32 sums in test_products, and the remainder of parts.

    For bfloat16 this remainder is 2^-16 of each factor and of the product of the second parts: a little over 3 * 2^-16.
    """
    a, b = torch.randn(m, k).to(a), torch.randn(n, k).to(b)
    want, size = a.double() @ b.double().t(), a.double().abs() @ b.double().abs().t()
    got = float32_mm(a.to(device), b.to(device).t(), out).cpu()
    left_out = 2**-14 if out == torch.bfloat16 else 0
    bound = ((2 * k + 8) * 2**-23 + left_out) * size
    assert got.dtype == out
    assert ((got.double() - want).abs() <= torch.finfo(out).eps / 2 * (want.abs() + bound) + bound).all()


def test_gradients_from_parts_that_are_made_once(device):
    """Both gradients are as exact as the two products. These leave out 2^-16 of every product, sum in float32, and
    round by half a unit."""
    grad, a, b = torch.randn(50, 20), torch.randn(50, 9).bfloat16(), torch.randn(20, 9).bfloat16()
    factors = ((grad, b), (grad.t(), a))
    for given in (grad.to(device), grad.t().contiguous().to(device).t(), grad[:1].expand(50, 20).to(device)):
        got = gradients_by_parts(given, a.to(device), b.to(device))
        from_parts = gradients_by_parts(parts(given, 2, 1).unflatten(1, (2, -1)), a.to(device), b.to(device))
        assert all(map(torch.equal, from_parts, got))
        for product, (_, other), wide in zip(got, factors, (given.cpu(), given.cpu().t()), strict=True):
            want, size = wide.double() @ other.double(), wide.double().abs() @ other.double().abs()
            bound = (2**-16 + 2 * 100 * 2**-24) * size
            half = 2**-8 * (want.abs() + bound)
            assert product.dtype == torch.bfloat16 and product.shape == want.shape
            assert ((product.cpu().double() - want).abs() <= half + bound).all()


@pytest.mark.parametrize("strided", [False, True])
def test_parts_of_a_gradient_are_added_in_float32(strided, device):
    """The gradient of b is rounded once, for every magnitude, infinities and NaN. It is contiguous, whatever strides b
    has."""
    grad, a, b = torch.randn(50, 20), torch.randn(50, 300).bfloat16(), torch.randn(20, 300).bfloat16()
    grad = (grad * torch.exp2(torch.randint(-99, 99, (1, 20)))).to(device)
    grad[3, 5], grad[3, 7] = torch.inf, torch.nan
    a, b = a.to(device), b.to(device)
    first, second = _mm(parts(grad, 2, 1).t(), a).unflatten(0, (2, -1))
    _, grad_b = gradients_by_parts(grad, a, b.t().contiguous().t() if strided else b)
    assert_same(grad_b, (first + second).bfloat16())
    assert grad_b.isnan().any() and grad_b.isfinite().any()


def test_a_large_gradient_is_rounded_once(device):
    """cuBLAS writes it in bfloat16, within half a unit of the float32 sum. That sum leaves out 2^-16 of every product
    and has 2 * k roundings."""
    e = 256  # the most experts for which cuBLAS writes bfloat16
    t, d = (2**8, 2**8) if device == "cpu" else (2**12, 2**11)
    grad, a, b = (torch.randn(*size, device=device) for size in ((t, e), (t, d), (e, d)))
    a, b = a.bfloat16(), b.bfloat16()
    (got, _), (grad_a, _) = gradients_by_parts(grad, a, b), float32_mm_backward(grad, a, b, True, True)
    assert got.dtype == grad_a.dtype == torch.bfloat16
    want, size = grad.double() @ b.double(), grad.double().abs() @ b.double().abs()
    bound = (2**-16 + 2 * 2 * e * 2**-24) * size
    for gradient in (got, grad_a):
        assert ((gradient.double() - want).abs() <= 2**-8 * (want.abs() + bound) + bound).all()


@pytest.mark.parametrize(("a", "b"), [(a, b) for a in DTYPES for b in DTYPES])
def test_backward(a, b, device):
    """Computes each gradient alone and both, in the dtypes of a and b, within the bounds of test_rounded_products."""
    grad = torch.randn(50, 20, device=device)
    a, b = torch.randn(50, 9, device=device).to(a), torch.randn(20, 9, device=device).to(b)
    factors = (grad.double(), b.double(), a.dtype), (grad.t().double(), a.double(), b.dtype)
    for needs in ((True, True), (True, False), (False, True), (False, False)):
        for got, needed, (wide, other, out) in zip(
            float32_mm_backward(grad, a, b, *needs), needs, factors, strict=True
        ):
            if not needed:
                assert got is None
                continue
            want, size = wide @ other, wide.abs() @ other.abs()
            bound = ((2 * 50 + 8) * 2**-23 + (2**-14 if out == torch.bfloat16 else 0)) * size
            assert got.dtype == out
            assert ((got.double() - want).abs() <= torch.finfo(out).eps / 2 * (want.abs() + bound) + bound).all()


def test_compiles(device):
    a, b = torch.randn(9, 20, device=device), torch.randn(20, 5, device=device).bfloat16()
    compiled = torch.compile(mm_by_parts, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(a, b), mm_by_parts(a, b))
    compiled = torch.compile(gradients_by_parts, fullgraph=True, backend="aot_eager")
    args = torch.randn(9, 5, device=device), torch.randn(9, 20, device=device).bfloat16(), b.t().contiguous()
    assert all(map(torch.equal, compiled(*args), gradients_by_parts(*args)))


def test_float64(device):
    """float64 is not split into parts: it is rounded to float32 first."""
    a, b = torch.randn(9, 20, device=device).double(), torch.randn(20, 5, device=device).bfloat16()
    assert torch.equal(float32_mm(a, b), a.float() @ b.float())
