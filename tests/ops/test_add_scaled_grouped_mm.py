"""add_scaled_grouped_mm: the 2D x 2D product, added in place to a total."""

from __future__ import annotations

import pytest
import torch
from gemm_problem import E4M3, FORMATS, UNIT, exact_2d2d, exact_2d3d
from helpers import (
    LAYOUTS,
    as_bytes,
    assert_same,
    check_compiled,
    check_cuda_graph,
    check_error,
    check_opcheck,
    check_second_gpu,
    corrupt_offs,
    error_of,
    group_offs,
    misaligned,
    short,
    wide,
)
from torch import Tensor

from moe_fp8_ext import ops, reference
from moe_fp8_ext.ops import quantize_tokens, scaled_grouped_mm
from moe_fp8_ext.reference import group_bounds

DTYPES = (torch.float32, torch.bfloat16)
OF_ALL_DTYPES = pytest.mark.parametrize("dtype", DTYPES, ids=short)


def some_total(args: list[object], dtype: torch.dtype) -> Tensor:
    """Values of many magnitudes, so that sums are rounded."""
    a, b, *_, offs = args
    return wide(len(offs), a.shape[0], b.shape[1], dtype=dtype, device=a.device, seed=3)


def added(total: Tensor, *args: object, **how: object) -> Tensor:
    total = total.clone()
    ops.add_scaled_grouped_mm(total, *args, **how)
    return total


def check(args: list[object], dtype: torch.dtype, **how: object) -> None:
    """Compares bytes. torch's GEMMs take only bfloat16 totals, and round the product to bfloat16 first."""
    total = some_total(args, dtype)
    got, want = added(total, *args, **how), total.clone()
    reference.add_scaled_grouped_mm(want, *args, **how)
    may_round = total.is_cuda and dtype == torch.bfloat16
    if may_round and not torch.equal(as_bytes(got), as_bytes(want)):
        product = reference.scaled_grouped_mm(*args, **how)
        sizes = torch.tensor([end - start for start, end in group_bounds(args[5], args[0].shape[1])])
        empty = (sizes == 0).to(total.device)[:, None, None]
        want = torch.where(empty, total, (total.float() + product.float()).to(dtype))
    assert_same(got, want)


@OF_ALL_DTYPES
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_is_exact_on_integers(layout, fmt, dtype, device):
    unit = UNIT[fmt]
    for p, k, n, e in ((6, 64, 48, 5), (4, 33, 17, 3), (9, 272, 144, 4), (0, 16, 16, 2), (3, 0, 16, 2), (3, 1, 1, 1)):
        args = exact_2d2d(fmt, p * unit, k, n, group_offs(layout, p, e) * unit, device)
        for how in ({}, {"align": unit, "use_fast_accum": False}, {"align": unit}):
            check(args, dtype, **how)


# (K, N): multiples of 16; two pairs of multiples of 8, which torch's BF16 GEMM takes and Hopper's kernels do not; odd.
SIZES = pytest.mark.parametrize(("k", "n"), [(48, 32), (600, 312), (568, 528), (33, 17)])


def real_problem(k: int, n: int, fmt: str, device: str) -> list[object]:
    """Operands whose products have more digits than bfloat16 holds."""
    offs = group_offs("zipf", 150, 3).to(device)
    (x, scale_x, ends), (dy, scale_dy, _) = (
        quantize_tokens(wide(150, size, seed=seed, device=device), fmt, offs=offs) for size, seed in ((k, 0), (n, 1))
    )
    return [dy, x.t(), scale_dy, scale_x.t() if fmt == "blockwise" else scale_x, fmt, ends]


@OF_ALL_DTYPES
@pytest.mark.parametrize("fmt", FORMATS)
@SIZES
def test_adding_to_zeros_gives_the_plain_product(k, n, fmt, dtype, device):
    """Every GEMM writes the bytes of the plain product in the total's dtype. A float32 total loses no digits."""
    args = real_problem(k, n, fmt, device)
    product = scaled_grouped_mm(*args, align=32, out_dtype=dtype)
    if dtype == torch.float32:
        assert not torch.equal(product, product.bfloat16().float())
    assert_same(added(torch.zeros_like(product), *args, align=32), product + 0)  # zero plus -0 is 0


@OF_ALL_DTYPES
@pytest.mark.parametrize("fmt", FORMATS)
@SIZES
def test_adds_the_product_before_it_is_rounded(k, n, fmt, dtype, device):
    """The total becomes RN(RN32(old + product)). The product is float32, unless torch's GEMM adds to a bfloat16
    total."""
    args = real_problem(k, n, fmt, device)
    products = [scaled_grouped_mm(*args, align=32, out_dtype=torch.float32)]
    if device != "cpu" and dtype == torch.bfloat16:
        products.append(scaled_grouped_mm(*args, align=32, out_dtype=dtype).float())
    total = some_total(args, dtype)
    once = added(total, *args, align=32)
    product = next((p for p in products if torch.equal(once, (total.float() + p).to(dtype))), products[0])
    assert_same(once, (total.float() + product).to(dtype))
    assert_same(added(once, *args, align=32), (once.float() + product).to(dtype))


@OF_ALL_DTYPES
@pytest.mark.parametrize("fmt", FORMATS)
def test_empty_groups_stay_as_they_are(fmt, dtype, device):
    """Their totals keep every bit: NaNs of any payload and zeros of either sign. Scales of empty groups have no
    effect."""
    args = exact_2d2d(fmt, 96, 32, 16, torch.tensor([0, 32, 32, 96, 96], dtype=torch.int32), device)
    if fmt == "rowwise":
        args[2][2], args[3][2] = float("nan"), float("inf")
    total = some_total(args, dtype)
    empty = torch.tensor([0, 2, 4], device=device)
    total.view(torch.uint8)[empty] = torch.randint(256, (3, 16, 32 * dtype.itemsize), dtype=torch.uint8, device=device)
    total[0, 0] = -0.0
    for align in (1, 32):
        got = added(total, *args, align=align)
        assert torch.equal(as_bytes(got[empty]), as_bytes(total[empty]))
        assert not torch.equal(got[1], total[1])


@OF_ALL_DTYPES
@pytest.mark.parametrize("fmt", FORMATS)
def test_total_at_any_address(fmt, dtype, device):
    args = exact_2d2d(fmt, 96, 64, 32, group_offs("uniform", 3, 3) * 32, device)
    total = some_total(args, dtype)
    want = added(total, *args, align=32)
    for elements in (1, 2, 4):
        moved = misaligned(total, elements)
        ops.add_scaled_grouped_mm(moved, *args, align=32)
        assert_same(moved, want)


@pytest.mark.parametrize("fmt", FORMATS)
def test_corrupt_offsets(fmt, device):
    unit = UNIT[fmt]
    for offs in corrupt_offs(5):
        in_units = (offs.long() * unit).clamp(-(2**31), 2**31 - unit).int()
        for align in (1, unit):
            check(exact_2d2d(fmt, 5 * unit, 64, 32, in_units, device), torch.float32, align=align)


def problem(fmt: str, device: str) -> list[object]:
    args = exact_2d2d(fmt, 96, 64, 32, group_offs("uniform", 3, 3) * 32, device)
    return [some_total(args, torch.float32), *args]


@pytest.mark.parametrize("fmt", FORMATS)
def test_opcheck(fmt, device):
    check_opcheck("add_scaled_grouped_mm", problem(fmt, device), align=32, use_fast_accum=False)


@pytest.mark.parametrize("call", [ops.add_scaled_grouped_mm, torch.ops.moe_fp8.add_scaled_grouped_mm], ids=short)
def test_a_write_counts(call, device):
    """A call increases the version counter, so backward refuses a total that autograd saved before the call."""
    total, *args = problem("rowwise", device)
    before = total._version
    call(total, *args)
    assert total._version == before + 1
    x = torch.ones_like(total, requires_grad=True)
    product = x * total
    call(total, *args)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("fmt", FORMATS)
def test_compiles(fmt, device):
    """A graph writes to the given tensor, and keeps the order of other reads and writes."""
    if device == "cuda" and fmt.startswith("mxfp8"):
        pytest.skip("inductor keeps writes beside float8_e8m0fnu functional, and then stops: pytorch issue 189522")

    def step(total: Tensor, *args: object) -> tuple[Tensor, Tensor]:
        before = total * 2
        ops.add_scaled_grouped_mm(total, *args, align=32)
        total.mul_(0.5)
        ops.add_scaled_grouped_mm(total, *args, align=32)
        return before, total + 1

    def fresh(total: Tensor, *args: object) -> tuple[Tensor, ...]:
        total = total.clone()
        return *step(total, *args), total

    args = problem(fmt, device)
    check_compiled(fresh, [args], device, dynamic=())
    torch._dynamo.reset()
    given, want = args[0].clone(), fresh(*args)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(given, *args[1:])
    assert_same((*got, given), want)


@pytest.mark.parametrize("fmt", FORMATS)
def test_cuda_graph(fmt, gpu):
    check_cuda_graph(added, problem(fmt, gpu), problem(fmt, gpu))


@pytest.mark.parametrize("fmt", FORMATS)
def test_second_gpu(fmt, second_gpu):
    check_second_gpu(lambda *args: [added(*args)], problem(fmt, "cpu"), second_gpu)


@pytest.mark.large
def test_more_than_2_31_elements(big_gpu):
    args = exact_2d2d("rowwise", 64, 32_768, 16_400, torch.tensor([0, 32, 32, 64], dtype=torch.int32), big_gpu)
    total = torch.ones(4, 16_400, 32_768, dtype=torch.bfloat16, device=big_gpu)
    assert total.numel() > 2**31
    ops.add_scaled_grouped_mm(total, *args, align=32)
    a, b, scale_a, scale_b, fmt, _ = args
    one = torch.tensor([32], dtype=torch.int32, device=big_gpu)
    last = [a[-64:, 32:], b[32:], scale_a[3:, -64:], scale_b[3:], fmt, one]
    want = torch.ones(1, 64, 32_768, dtype=torch.bfloat16, device=big_gpu)
    reference.add_scaled_grouped_mm(want, *last)
    assert torch.equal(total[3:, -64:], want)
    assert (total[::2] == 1).all()


TOTAL, A, B, SCALE_A, SCALE_B, _, OFFS = problem("rowwise", "cpu")
ROWS = exact_2d3d("rowwise", 6, 64, 16, torch.tensor([2, 4, 6], dtype=torch.int32))


@pytest.mark.parametrize(
    ("changed", "argument", "got"),
    [
        ({"total": TOTAL.half()}, "total", "float16"),
        ({"total": TOTAL.double()}, "total", "float64"),
        ({"total": TOTAL[0]}, "total", "2"),
        ({"total": TOTAL[:2]}, "total", "2"),
        ({"total": TOTAL[:, 1:].contiguous()}, "total", "31"),
        ({"total": TOTAL.mT.contiguous().mT}, "total", "stride"),
        ({"total": TOTAL[..., :1].expand(TOTAL.shape)}, "total", "stride 0"),
        ({"total": TOTAL.to("meta")}, "total", ""),
        ({"b": ROWS[1]}, "b", "3"),
        ({"a": A.float()}, "a", "float32"),
        ({"b": B.contiguous()}, "b", "stride 64"),
        ({"scale_a": SCALE_A[:2]}, "scale_a", "2"),
        ({"scale_b": SCALE_B.double()}, "scale_b", "float64"),
        ({"offs": OFFS.long()}, "offs", "int64"),
        ({"align": 24}, "align", "24"),
        ({"format": "fp4"}, "format", "'fp4'"),
    ],
)
def test_errors(changed, argument, got):
    args = dict(
        zip(("total", "a", "b", "scale_a", "scale_b", "format", "offs"), problem("rowwise", "cpu"), strict=True)
    )
    align = changed.get("align", 32)
    args |= {name: value for name, value in changed.items() if name != "align"}
    if changed.get("total") is not None and changed["total"].is_meta:
        text = error_of(ops.add_scaled_grouped_mm, list(args.values()), {"align": align})
        assert text == "add_scaled_grouped_mm: total must be on the device of a, cpu, got meta"
    else:
        check_error("add_scaled_grouped_mm", list(args.values()), argument, got, align=align)


def test_total_that_asks_for_a_gradient():
    total, *args = problem("rowwise", "cpu")
    total.requires_grad_()
    text = error_of(ops.add_scaled_grouped_mm, [total, *args])
    assert text.startswith("add_scaled_grouped_mm: total must not ask for a gradient")
    with torch.no_grad():
        ops.add_scaled_grouped_mm(total, *args)


def test_plain_product_traces_as_ever():
    """A functionalized graph contains scaled_grouped_mm itself, because adding is a separate op."""
    a, b, scale_a, scale_b, fmt, offs = exact_2d2d("rowwise", 64, 32, 16, group_offs("uniform", 2, 2) * 32)
    traced = torch.fx.experimental.proxy_tensor.make_fx(
        torch.func.functionalize(lambda a: scaled_grouped_mm(a, b, scale_a, scale_b, fmt, offs))
    )(a)
    assert [n.target for n in traced.graph.nodes if n.op == "call_function"][-1].name() == "moe_fp8::scaled_grouped_mm"
    assert a.dtype == E4M3
