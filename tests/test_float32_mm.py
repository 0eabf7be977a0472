"""Products in float32 by parts in bfloat16."""

import itertools

import pytest
import torch

from moe_fp8_ext.float32_mm import float32_mm, mm_by_parts, parts

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_add_up(dtype):
    x = (torch.randn(4096) * torch.exp2(torch.randint(-14, 15, (4096,)))).to(dtype)
    of_x = parts(torch.cat([x, -x, x[:1] * 0]))
    assert len(of_x) == DTYPES.index(dtype) + 1
    assert torch.equal(sum(part.double() for part in of_x), torch.cat([x, -x, x[:1] * 0]).double())


@pytest.mark.parametrize(("a", "b"), itertools.product(DTYPES, DTYPES))
@pytest.mark.parametrize(("m", "k", "n"), [(9, 200, 5), (200, 9, 33), (40, 1, 33), (1, 1, 99), (0, 4, 4), (4, 0, 4)])
def test_products(a, b, m, k, n, device):
    """Within what is left out, 2^-23 of every product, and k roundings of float32 sums, of both ways."""
    a, b = torch.randn(m, k).to(a), torch.randn(n, k).to(b)
    want, size = a.double() @ b.double().t(), a.double().abs() @ b.double().abs().t()
    for mm in (float32_mm, mm_by_parts):
        got = mm(a.to(device), b.to(device).t()).cpu()
        assert got.dtype == torch.float32
        assert ((got.double() - want).abs() <= (2 * k + 8) * 2**-23 * size).all()


def test_compiles(device):
    a, b = torch.randn(9, 20, device=device), torch.randn(20, 5, device=device).bfloat16()
    compiled = torch.compile(mm_by_parts, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(a, b), mm_by_parts(a, b))


def test_float64(device):
    """Which has no parts: a number of 64 bits is rounded first."""
    a, b = torch.randn(9, 20, device=device).double(), torch.randn(20, 5, device=device).bfloat16()
    assert torch.equal(float32_mm(a, b), a.float() @ b.float())
