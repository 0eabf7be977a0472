"""cast_factor: factors of adapters in another type, order and size, byte for byte."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from derivatives import SPELLINGS, check_no_tangent
from helpers import (
    INPUT_DTYPES,
    assert_same,
    check_cuda_graph,
    check_deterministic,
    check_error,
    check_opcheck,
    check_second_gpu,
    counted_backend,
    flushed_subnormals,
    misaligned,
    pairs,
    short,
    wide,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_fp8_ext import reference
from moe_fp8_ext.ops import cast_factor
from moe_fp8_ext.ops.factors import ORDERS, order_of

SCALINGS = (1.0, -0.7, 1e30, math.inf, math.nan, 0.0)


def ordered(m: Tensor, order: str) -> Tensor:
    """A copy of m, whose dimensions lie in memory as `order` says."""
    names = "erc"[-m.dim() :]
    return m.permute([names.index(d) for d in order]).contiguous().permute([order.index(d) for d in names])


def factor(*shape: int, order: str | None = None, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Values of many magnitudes, some of them special."""
    m = wide(*shape, dtype=torch.float32)
    special = torch.tensor([0.0, -0.0, 1e-40, -math.inf, math.nan, 3e38, 2.0**-20])
    places = m.view(-1)[:: max(m.numel() // 40, 1)]
    places.copy_(special.repeat(len(places))[: len(places)])
    return ordered(m.to(dtype), order or "erc"[-len(shape) :]).to(device)


def check(m: Tensor, *args: object, **how: object) -> Tensor:
    got = cast_factor(m, *args, **how)
    assert_same(got, reference.cast_factor(m, *args, **how), f"{short(m.shape)} {m.stride()} {args} {how}")
    return got


def padded(n: int) -> int:
    return n + -n % 8


@pytest.mark.parametrize("shape", [(3, 16, 200), (5, 12, 64), (130, 7, 33), (1, 1, 9), (40, 64, 72)], ids=short)
@pytest.mark.parametrize("layout", ORDERS[3])
def test_orders_and_padding(shape, layout, device):
    e, r, c = shape
    m = factor(*shape, order=layout, device=device)
    for order in ORDERS[3]:
        check(m, r, c, order, torch.bfloat16)
        check(m, padded(r), c, order, torch.bfloat16, num_experts=e + 1, scaling=0.3)
        check(m, max(r - 3, 0), c + 1, order, torch.float32, num_experts=e - 1)


@pytest.mark.parametrize(
    *pairs(dtype=INPUT_DTYPES, out=INPUT_DTYPES, scaling=SCALINGS, order=["erc", "ecr"]),
    ids=short,
)
def test_dtypes_and_scalings(dtype, out, scaling, order, device):
    """Padding is +0, whatever the scaling is."""
    for layout in ("erc", "ecr"):
        got = check(factor(4, 12, 80, order=layout, dtype=dtype, device=device), 16, 80, order, out, 5, scaling)
        assert got.stride() == ((1280, 80, 1) if order == "erc" else (1280, 1, 16))
        for zeros in (got[4], got[:, 12:]):
            assert not zeros.contiguous().view(torch.uint8).any()


@pytest.mark.parametrize("layout", ORDERS[2])
def test_shared_factors(layout, device):
    m = factor(12, 100, order=layout, device=device)
    for order in ORDERS[2]:
        check(m, 16, 100, order, torch.bfloat16, scaling=2.0)
        check(m, 5, 40, order, torch.float16)


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
def test_strides_and_alignment(dtype, device):
    m = factor(4, 24, 136, dtype=dtype, device=device)
    views = [m[::2], m[:, 1::2], m[:, :, ::3], m[:, :, 8:], m[:, 3:, 1:77], m[:1].expand(4, 24, 136)]
    views += [m[:, :1].expand(4, 24, 136), m[:, :, :1].expand(4, 24, 136), m[:1, :1, :1].expand(4, 24, 136)]
    for view in (*views, *(misaligned(m, n) for n in (1, 2, 4, 7))):
        for order in ("erc", "ecr", "cre"):
            check(view, *view.shape[1:], order, torch.bfloat16)
            check(view, 32, 144, order, torch.float32, 5, 0.5)


def test_gradients_lie_as_their_factors(device):
    """A gradient [E, R padded, C] is cropped to the factor, with the factor's strides and dtype."""
    for layout, dtype in itertools.product(ORDERS[3], INPUT_DTYPES):
        m, grad = factor(6, 12, 72, order=layout, device=device, dtype=dtype), factor(6, 16, 72, device=device)
        got = check(grad.bfloat16(), 12, 72, order_of(m), m.dtype, scaling=0.25)
        assert (got.stride(), got.shape, got.dtype) == (m.stride(), m.shape, m.dtype)


def test_is_torchs_product(device):
    """scaling * m, rounded once, is what torch.mul writes to an out of another type."""
    m = wide(5, 16, 72, dtype=torch.float32, device=device)
    for scaling in (1.0, 2.0, 0.3, 1 / 3, -1e-3):
        out = torch.empty_like(m, dtype=torch.bfloat16)
        torch.mul(m, scaling, out=out)
        assert_same(cast_factor(m, 16, 72, "erc", torch.bfloat16, scaling=scaling), out)


def test_order_of():
    for order in ORDERS[3]:
        assert order_of(ordered(torch.empty(3, 4, 5), order)) == order
    assert order_of(torch.empty(3, 1, 5)) == order_of(torch.empty(3, 4, 1)) == "erc"
    assert order_of(torch.empty(4, 5).t()) == "cr"


@given(
    shape=st.tuples(st.integers(0, 20), st.integers(0, 80), st.integers(0, 300)),
    sizes=st.tuples(st.integers(0, 20), st.integers(0, 80), st.integers(0, 300)),
    layout=st.sampled_from(ORDERS[3]),
    order=st.sampled_from(ORDERS[3]),
)
def test_any_shape(shape, sizes, layout, order, device):
    m = ordered(torch.randn(shape, generator=torch.Generator().manual_seed(1)), layout).to(device)
    check(m, sizes[1], sizes[2], order, torch.bfloat16, sizes[0], 0.7)


def test_more_than_one_share_of_threads():
    """The rows of out are divided among threads."""
    check(factor(9, 16, 2000, order="rce"), 16, 2000, "ecr", torch.bfloat16, 10, 0.3)
    check_deterministic(cast_factor, [factor(9, 16, 2000), 16, 2000, "ecr", torch.bfloat16, 10])


def test_subnormals_are_kept():
    m = torch.tensor([[1e-40, -3e-39, 1e-30]])
    want = cast_factor(m, 1, 3, "rc", torch.float32, scaling=1e-3)
    with flushed_subnormals():
        got = cast_factor(m, 1, 3, "rc", torch.float32, scaling=1e-3)
    assert torch.equal(got.view(torch.int32), want.view(torch.int32)) and want.view(torch.int32).all()


def twice(m: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """A factor in BF16 as a product takes it, and its way back."""
    e, r, c = m.shape
    by_column = cast_factor(m, r + -r % 8, c, "ecr", torch.bfloat16, e + 1, scaling)
    return by_column, cast_factor(by_column, r, c, order_of(m), m.dtype, e, scaling)


@pytest.mark.parametrize("layout", ["erc", "ecr", "rce"])
def test_compiles(layout, device):
    compiled = torch.compile(twice, fullgraph=True, backend=counted_backend(device))
    for e, r, c, scaling in ((3, 12, 72, 0.5), (4, 12, 72, 0.25)):
        m = factor(e, r, c, order=layout, device=device)
        assert_same(compiled(m, scaling), twice(m, scaling))


@pytest.mark.parametrize("layout", ["erc", "rce"])
def test_compiles_with_dynamic_sizes_and_scaling(layout, device):
    """One graph serves all sizes. The schema has no symbolic floats, so each scaling has a graph of its own."""
    frames = counted_backend(device)
    compiled = torch.compile(twice, fullgraph=True, dynamic=True, backend=frames)

    def run(e: int, r: int, c: int, scaling: float) -> int:
        m = factor(e, r, c, order=layout, device=device)
        assert_same(compiled(m, scaling), twice(m, scaling))
        return frames.frame_count

    graphs = run(3, 12, 72, 0.5)
    assert {run(*sizes, 0.5) for sizes in ((4, 20, 80), (5, 12, 40))} == {graphs}
    assert run(4, 20, 80, 0.25) > graphs


def test_scaling_that_a_graph_computes(device):
    compiled = torch.compile(lambda m, s: twice(m, s * 2 + 0.1), fullgraph=True, dynamic=True, backend="aot_eager")
    m = factor(3, 12, 72, device=device)
    for scaling in (0.5, 0.25):
        assert_same(compiled(m, scaling), twice(m, scaling * 2 + 0.1))


def test_exports(device):
    class Cast(torch.nn.Module):
        def forward(self, m: Tensor) -> Tensor:
            return cast_factor(m, 16, m.shape[2], "ecr", torch.bfloat16, m.shape[0] + 1, 0.5)

    m, more = (factor(e, 12, c, device=device) for e, c in ((3, 72), (5, 80)))
    dims = ({0: torch.export.Dim("e"), 2: torch.export.Dim("c")},)
    exported = torch.export.export(Cast(), (m,), dynamic_shapes=dims).module()
    for x in (m, more):
        assert_same(exported(x), Cast()(x))


@pytest.mark.parametrize("order", ["erc", "ecr"])
def test_cuda_graph(order, gpu):
    how = 16, 200, order, torch.bfloat16, 9, 0.5
    check_cuda_graph(cast_factor, [factor(8, 12, 200, device=gpu), *how], [wide(8, 12, 200, device=gpu).float(), *how])


def test_second_gpu(second_gpu):
    args = [factor(8, 12, 200), 16, 200, "ecr", torch.bfloat16, 9, 0.5]
    check_second_gpu(lambda *a: [cast_factor(*a)], args, second_gpu)


def test_opcheck(device):
    m = wide(3, 12, 40, dtype=torch.float32, device=device)
    check_opcheck("cast_factor", [m, 16, 40, "erc", torch.bfloat16, 4, 0.5])
    check_opcheck("cast_factor", [m[0], 8, 40, "cr", torch.float16])


@pytest.mark.parametrize("spelling", SPELLINGS, ids=SPELLINGS.get)
def test_derivatives_that_there_are_not(spelling):
    check_no_tangent(lambda m: spelling.cast_factor(m, 16, 40, "erc", torch.bfloat16), wide(3, 12, 40).float())


M = torch.zeros(2, 3, 4)


@pytest.mark.parametrize(
    ("args", "argument", "got"),
    [
        ([M.double(), 3, 4, "erc", torch.bfloat16], "m", "float64"),
        ([M[0, 0], 3, 4, "rc", torch.bfloat16], "m", "1"),
        ([M[None], 3, 4, "erc", torch.bfloat16], "m", "4"),
        ([M, -1, 4, "erc", torch.bfloat16], "rows", "-1"),
        ([M, 3, 2**31, "erc", torch.bfloat16], "cols", "2147483648"),
        ([M, 3, 4, "rc", torch.bfloat16], "order", "rc"),
        ([M[0], 3, 4, "erc", torch.bfloat16], "order", "erc"),
        ([M, 3, 4, "err", torch.bfloat16], "order", "err"),
        ([M, 3, 4, "erc", torch.float8_e4m3fn], "dtype", "float8_e4m3fn"),
        ([M, 3, 4, "erc", torch.bfloat16, -1], "num_experts", "-1"),
        ([M[0], 3, 4, "rc", torch.bfloat16, 1], "num_experts", "1"),
        ([M, 2**31 - 256, 2**31 - 256, "ecr", torch.float32], "a result", "2147483392, 2147483392"),
    ],
)
def test_errors(args, argument, got, device):
    check_error("cast_factor", [args[0].to(device), *args[1:]], argument, got)


@pytest.mark.large
@pytest.mark.parametrize("order", ["rc", "cr"])
def test_more_than_2_31_elements(order, big_gpu):
    m = torch.arange(70_000, dtype=torch.float32, device=big_gpu)[:, None].expand(70_000, 33_000)
    got = cast_factor(m, 70_000, 33_000, order, torch.float32)
    assert torch.equal(got, m)
