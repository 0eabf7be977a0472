"""pad_token_groups, pad_token_groups_to and unpad_token_groups: rows of groups between two layouts, bit by bit."""

from __future__ import annotations

import pytest
import torch
from derivatives import SPELLINGS, check_no_tangent
from helpers import (
    CORRECTNESS_MKE,
    FP8_DTYPES,
    INPUT_DTYPES,
    LAYOUTS,
    assert_same,
    check_compiled,
    check_cuda_graph,
    check_deterministic,
    check_error,
    check_opcheck,
    check_second_gpu,
    check_stream_order,
    check_two_streams,
    corrupt_offs,
    group_offs,
    misaligned,
    on,
    short,
    strided_2d,
    wide,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_fp8_ext import reference
from moe_fp8_ext.ops import pad_token_groups, pad_token_groups_to, unpad_token_groups
from moe_fp8_ext.reference.numerics import group_bounds

DTYPES = (*INPUT_DTYPES, *FP8_DTYPES, torch.int8, torch.int32, torch.bool, torch.float8_e8m0fnu)


def bits(m: int, k: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Random bits of any dtype, NaNs included: copies keep all bits."""
    words = torch.randint(0, 2 if dtype == torch.bool else 256, (m, k * dtype.itemsize), dtype=torch.uint8)
    return words.to(device).view(dtype) if k else torch.empty(m, 0, dtype=dtype, device=device)


def check(x: Tensor, offs: Tensor, align: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Compares all three ops with the reference, and checks that the last one undoes the others."""
    what = f"{short(x.dtype)} {short(x.shape)} offs {offs.tolist()[:20]}"
    padded, starts, ends = got = pad_token_groups(x, offs, align)
    assert_same(got, reference.pad_token_groups(x, offs, align), what)
    assert_same(pad_token_groups_to(x, offs, starts, padded.shape[0]), padded, what)
    back = unpad_token_groups(padded, offs, starts, x.shape[0])
    assert_same(back, reference.unpad_token_groups(padded, offs, starts, x.shape[0]), what)
    tail = group_bounds(offs, x.shape[0])[-1][1] if len(offs) else 0
    assert_same(back[:tail], x[:tail].contiguous(), what)
    return got


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_dtypes(dtype, device):
    for k in (1, 3, 8, 70, 200):
        check(bits(53, k, dtype, device), group_offs("zipf", 53, 5, device))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", CORRECTNESS_MKE, ids=short)
def test_group_layouts(shape, layout, device):
    m, k, e = shape
    check(wide(m, k, device=device), group_offs(layout, m, e, device))


@pytest.mark.parametrize("align", [1, 2, 16, 64, 256])
def test_align(align, device):
    for layout in LAYOUTS:
        check(wide(301, 40, device=device), group_offs(layout, 301, 6, device), align)


@pytest.mark.parametrize("shape", [(0, 0, 0), (0, 0, 3), (5, 0, 2), (0, 5, 2), (5, 3, 0), (1, 1, 1)], ids=short)
def test_zero_sizes(shape, device):
    m, k, e = shape
    check(wide(m, k, device=device), group_offs("uniform", m, e, device))


def test_max_experts(device):
    for m in (0, 700, 3000):
        check(wide(m, 24, device=device), group_offs("zipf", m, 1024, device))


def test_strides_and_alignment(device):
    x, offs = wide(70, 128, device=device), group_offs("zipf", 70, 3, device)
    for _, view in strided_2d(x):
        check(view, offs)
    for elements in range(1, 9):
        check(misaligned(x, elements), offs)
    check(x[:1].expand(70, 128), misaligned(offs))


def test_corrupt_offsets(device):
    for m in (1, 37, 200):
        for offs in corrupt_offs(m, device):
            check(wide(m, 50, device=device), offs)


def test_corrupt_places(device):
    """Nothing out of bounds is read or written, whatever the places are."""
    x, offs = wide(40, 50, device=device), torch.tensor([10, 10, 33, 40], dtype=torch.int32, device=device)
    for starts in (
        [-5, 0, 3, 70],
        [60, 5, 5, 0],
        [2**31 - 1] * 4,
        [-(2**31)] * 4,
        [0, 2**31 - 1, 10, 20],
        [7, 20, 60, 63],
    ):
        starts = torch.tensor(starts, dtype=torch.int32, device=device)
        for rows in (0, 1, 64):
            got = pad_token_groups_to(x, offs, starts, rows)
            assert_same(got, reference.pad_token_groups_to(x, offs, starts, rows), f"{starts.tolist()} {rows}")
        assert_same(unpad_token_groups(x, offs, starts, 40), reference.unpad_token_groups(x, offs, starts, 40))


@given(
    m=st.integers(0, 90),
    k=st.integers(0, 40),
    offs=st.lists(st.integers(0, 90), max_size=9),
    align=st.sampled_from([1, 4, 16, 64]),
    dtype=st.sampled_from(DTYPES),
)
def test_round_trip(m, k, offs, align, dtype, device):
    offs = torch.tensor(sorted(min(end, m) for end in offs), dtype=torch.int32, device=device)
    check(bits(m, k, dtype, device), offs, align)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
@pytest.mark.parametrize("spelling", SPELLINGS, ids=SPELLINGS.get)
def test_gradients(spelling, dtype, device):
    """Compares with plain indexing. The gradient of a copy is a copy, so every bit must agree."""
    offs = group_offs("tail_rows", 50, 4, device)
    x = wide(50, 24, dtype=dtype, device=device).requires_grad_()
    padded, starts, _ = spelling.pad_token_groups(x, offs)
    bounds = group_bounds(offs, 50)
    rows = torch.tensor([r for start, end in bounds for r in range(start, end)], device=device)
    places = torch.cat(
        [torch.arange(end - start, device=device) + s for (start, end), s in zip(bounds, starts, strict=True)]
    )
    grad = wide(*padded.shape, dtype=dtype, device=device, seed=1)
    (got,) = torch.autograd.grad(padded, x, grad)
    want = torch.zeros_like(x).index_copy(0, rows, grad[places]).detach()
    assert_same(got, want)
    (got,) = torch.autograd.grad(
        spelling.pad_token_groups_to(x, offs, starts, padded.shape[0]), x, grad.t().contiguous().t()
    )
    assert_same(got, want)
    y = padded.detach().requires_grad_()
    grad = wide(50, 24, dtype=dtype, device=device, seed=2)
    (got,) = torch.autograd.grad(spelling.unpad_token_groups(y, offs, starts, 50), y, grad)
    assert_same(got, torch.zeros_like(y).index_copy(0, places, grad[rows]).detach())


@pytest.mark.parametrize("spelling", SPELLINGS, ids=SPELLINGS.get)
def test_second_derivative(spelling, device):
    offs = group_offs("zipf", 20, 3, device)
    x = torch.randn(20, 5, device=device, requires_grad=True)

    def square(x: Tensor) -> Tensor:
        padded, starts, _ = spelling.pad_token_groups(x, offs)
        return spelling.unpad_token_groups(padded * padded, offs, starts, 20)

    (first,) = torch.autograd.grad(square(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert_same(second, torch.full_like(x, 2).detach() * (torch.arange(20, device=device) < offs[-1])[:, None])


@pytest.mark.parametrize("spelling", SPELLINGS, ids=SPELLINGS.get)
def test_forward_mode_raises(spelling):
    offs, starts, x = group_offs("zipf", 20, 3), torch.tensor([0, 16, 32], dtype=torch.int32), torch.ones(20, 5)
    check_no_tangent(lambda x: spelling.pad_token_groups(x, offs), x)
    check_no_tangent(lambda x: spelling.pad_token_groups_to(x, offs, starts, 80), x)
    check_no_tangent(lambda y: spelling.unpad_token_groups(y, offs, starts, 20), torch.ones(80, 5))


def test_opcheck(device):
    x, offs = wide(37, 33, device=device), group_offs("zipf", 37, 3, device)
    check_opcheck("pad_token_groups", [x, offs, 32])
    padded, starts, _ = pad_token_groups(x, offs, 32)
    check_opcheck("pad_token_groups_to", [x, offs, starts, padded.shape[0]])
    check_opcheck("unpad_token_groups", [padded, offs, starts, 37])


def round_trip(x: Tensor, offs: Tensor) -> tuple[Tensor, ...]:
    padded, starts, ends = pad_token_groups(x, offs)
    return padded, starts, ends, unpad_token_groups(padded, offs, starts, x.shape[0])


def test_deterministic(device):
    check_deterministic(round_trip, [wide(1000, 303, device=device), group_offs("zipf", 1000, 7, device)])


def test_compiles_with_dynamic_rows(device):
    calls = [[wide(m, 48, device=device), group_offs("zipf", m, 4, device)] for m in (50, 64, 131)]
    check_compiled(round_trip, calls, device)


def test_cuda_graph(gpu):
    first, later = (
        [wide(700, 512, device=gpu, seed=seed), group_offs(layout, 700, 9, gpu)]
        for seed, layout in enumerate(("zipf", "one_giant"))
    )
    check_cuda_graph(round_trip, first, later)


def test_two_streams(gpu):
    check_two_streams(
        round_trip, [[wide(4000, 1024, device=gpu, seed=s), group_offs("zipf", 4000, 9, gpu)] for s in (0, 1)]
    )


def test_stream_order(gpu):
    calls = [[wide(4000, 1024, device=gpu, seed=s), group_offs("zipf", 4000, 9, gpu)] for s in range(4)]
    check_stream_order(round_trip, calls)


def test_second_gpu(second_gpu):
    check_second_gpu(round_trip, [wide(700, 512), group_offs("zipf", 700, 9)], second_gpu)


@pytest.mark.large
def test_more_than_2_31_elements(big_gpu):
    x = torch.randint(0, 256, (600_011, 4_096), dtype=torch.uint8, device=big_gpu)
    offs = group_offs("uniform", len(x), 7, big_gpu)
    padded, starts, _ = pad_token_groups(x, offs)
    for (start, end), place in zip(group_bounds(offs, len(x)), starts.tolist(), strict=True):
        assert torch.equal(padded[place : place + end - start], x[start:end])
    assert torch.equal(unpad_token_groups(padded, offs, starts, len(x)), x)


X, OFFS, STARTS = torch.zeros(6, 4), torch.tensor([2, 6], dtype=torch.int32), torch.tensor([0, 16], dtype=torch.int32)


@pytest.mark.parametrize(
    ("op", "args", "argument", "got"),
    [
        ("pad_token_groups", [X.double(), OFFS], "x", "float64"),
        ("pad_token_groups", [X[0], OFFS], "x", "1"),
        ("pad_token_groups", [X.t(), OFFS], "x", "stride 4"),
        ("pad_token_groups", [X, OFFS.long()], "offs", "int64"),
        ("pad_token_groups", [X, OFFS, 48], "align", "48"),
        ("pad_token_groups_to", [X.cfloat(), OFFS, STARTS, 32], "x", "complex64"),
        ("pad_token_groups_to", [X, OFFS, STARTS[:1], 32], "padded_starts", "1"),
        ("pad_token_groups_to", [X, OFFS, STARTS.long(), 32], "padded_starts", "int64"),
        ("pad_token_groups_to", [X, OFFS, STARTS[None], 32], "padded_starts", "2"),
        ("pad_token_groups_to", [X, OFFS, STARTS, -1], "num_padded", "-1"),
        ("unpad_token_groups", [X.double(), OFFS, STARTS, 6], "y", "float64"),
        ("unpad_token_groups", [X, OFFS, STARTS, -3], "num_tokens", "-3"),
        ("unpad_token_groups", [X, OFFS, STARTS, 2**31], "num_tokens", "2147483648"),
        ("unpad_token_groups", [X, OFFS[None], STARTS, 6], "offs", "2"),
        ("unpad_token_groups", [X, OFFS, STARTS.repeat(2)[::2], 6], "padded_starts", "stride 2"),
    ],
)
def test_errors(op, args, argument, got, device):
    check_error(op, on(device, args), argument, got)


@pytest.mark.parametrize("argument", ["offs", "padded_starts"])
def test_error_on_another_device(argument, device):
    other = "cpu" if device == "cuda" else "meta"
    there = {"offs": OFFS.to(device), "padded_starts": STARTS.to(device), argument: OFFS.to(other)}
    for fn in (pad_token_groups_to, unpad_token_groups):
        with pytest.raises(RuntimeError, match=f"^{fn.__name__}: {argument} must be on the device of .*got {other}"):
            fn(X.to(device), *there.values(), 32)
