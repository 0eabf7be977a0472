"""permute_indices, permute_pad and unpermute: rows from rank-major to expert-major order and back, byte for byte."""

from __future__ import annotations

import pytest
import torch
from derivatives import SPELLINGS, check_no_tangent
from helpers import (
    FP8_DTYPES,
    INPUT_DTYPES,
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
    short,
    slot_indices,
    strided_2d,
    wide,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_fp8_ext import reference
from moe_fp8_ext.ops import permute_indices, permute_pad, sort_tokens, unpermute

DTYPES = (*INPUT_DTYPES, *FP8_DTYPES, torch.int8, torch.int32, torch.bool, torch.float8_e8m0fnu)


def check_indices(counts: Tensor, num_tokens: int, align: int = 16, align_empty: bool = False) -> tuple[Tensor, ...]:
    args = counts, *counts.shape[::-1], num_tokens, align, align_empty
    got = permute_indices(*args)
    assert_same(got, reference.permute_indices(*args), f"{counts.tolist()} {num_tokens} {align} {align_empty}")
    return got


def check_rows(x: Tensor, indices: Tensor, top_k: int = 1) -> None:
    what = f"{short(x.dtype)} {short(x.shape)} top_k {top_k}"
    y = permute_pad(x, indices, top_k)
    assert_same(y, reference.permute_pad(x, indices, top_k), what)
    if top_k == 1 or x.dtype in INPUT_DTYPES:
        want = reference.unpermute(y, indices, top_k, x.shape[0])
        assert_same(unpermute(y, indices, top_k, x.shape[0]), want, what)


def random_counts(ranks: int, experts: int, device: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 9, (ranks, experts), generator=generator).to(device)


@pytest.mark.parametrize("align", [1, 2, 16, 256])
@pytest.mark.parametrize("align_empty", [False, True])
def test_indices(align, align_empty, device):
    for ranks, experts in ((1, 1), (1, 7), (5, 1), (4, 3), (8, 8), (64, 5), (3, 400)):
        counts = random_counts(ranks, experts, device)
        tokens = int(counts.sum())
        for num_tokens in (tokens, tokens + 5, tokens // 2, 1, 0):
            check_indices(counts, num_tokens, align, align_empty)
            check_indices(counts.int(), num_tokens, align, align_empty)


def test_indices_of_most_counts(device):
    for ranks, experts in ((4, 1024), (4096, 1), (512, 8)):
        counts = random_counts(ranks, experts, device)
        check_indices(counts, int(counts.sum()))
        check_indices(torch.zeros_like(counts), 0)


def test_empty_experts(device):
    counts = torch.zeros(3, 5, dtype=torch.int64, device=device)
    counts[1, 2], counts[2, 2], counts[0, 4] = 5, 1, 2
    _, ends, tokens = check_indices(counts, 8, 4)
    assert ends.tolist() == [0, 0, 8, 8, 12]
    assert tokens.tolist() == [0, 0, 6, 0, 2]
    _, ends, _ = check_indices(counts, 8, 4, True)
    assert ends.tolist() == [4, 8, 16, 20, 24]


def test_counts_that_cannot_be(device):
    """Negative counts are taken as 0, and sums beyond the tokens are cut off. Neither overflows."""
    for counts in ([-1, 5, -(2**31), 3], [2**31 - 1] * 4, [0, 2**31 - 1, 1, 2**31 - 1]):
        counts = torch.tensor(counts, dtype=torch.int32, device=device).view(2, 2)
        for num_tokens in (0, 6, 50):
            check_indices(counts, num_tokens)
            check_indices(counts.long() * 2**31, num_tokens)


def test_flat_counts(device):
    counts = random_counts(3, 4, device)
    assert_same(permute_indices(counts.flatten(), 4, 3, 40), permute_indices(counts, 4, 3, 40))


@pytest.mark.parametrize("top_k", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_rows(dtype, top_k, device):
    for k in (1, 3, 8, 70, 200):
        words = torch.randint(0, 2 if dtype == torch.bool else 256, (53, k * dtype.itemsize), dtype=torch.uint8)
        check_rows(words.to(device).view(dtype), slot_indices(53, top_k, 90, device), top_k)


def test_row_lengths(device):
    for k in (1024, 4096, 5000, 16384, 40000):
        check_rows(wide(7, k, device=device), slot_indices(7, 1, 9, device))


@pytest.mark.parametrize("shape", [(0, 0, 0), (0, 5, 3), (5, 0, 3), (5, 3, 0), (1, 1, 1)], ids=short)
def test_zero_sizes(shape, device):
    m, k, p = shape
    indices = torch.zeros(p, dtype=torch.int32, device=device)
    for top_k in (1, 2):
        check_rows(wide(m, k, device=device), indices, top_k)


def test_strides_and_alignment(device):
    x, indices = wide(70, 128, device=device), slot_indices(70, 2, 90, device)
    for _, view in strided_2d(x):
        check_rows(view, indices, 2)
        y = view[: len(indices)]
        short_indices = indices[: len(y)]
        for top_k in (1, 2):
            want = reference.unpermute(y, short_indices, top_k, 40)
            assert_same(unpermute(y, short_indices, top_k, 40), want)
    for elements in range(1, 9):
        check_rows(misaligned(x, elements), misaligned(indices))


def test_indices_out_of_range_and_doubled(device):
    """Indices out of range are skipped, and never dereferenced. Of equal indices the last one counts, in every run."""
    limits = [-1, 2**31 - 1, -(2**31), 40, 39, 0, 39, -40, 80, 7, 7, 7]
    indices = torch.tensor(limits * 3, dtype=torch.int32, device=device)
    for top_k in (1, 2):
        check_rows(wide(40, 24, device=device), indices, top_k)


@given(
    counts=st.lists(st.lists(st.integers(0, 6), min_size=3, max_size=3), min_size=1, max_size=5),
    spare=st.integers(0, 9),
    align=st.sampled_from([1, 4, 16]),
    dtype=st.sampled_from(DTYPES[:-2]),
)
def test_round_trip(counts, spare, align, dtype, device):
    counts = torch.tensor(counts, device=device)
    tokens = int(counts.sum())
    indices, ends, sizes = check_indices(counts, tokens + spare, align)
    x = torch.randint(0, 2, (tokens + spare, 6 * dtype.itemsize), dtype=torch.uint8, device=device).view(dtype)
    y = permute_pad(x, indices, 1)
    back = unpermute(y, indices, 1, len(x))
    assert_same(back[:tokens], x[:tokens])
    assert not back[tokens:].view(torch.uint8).any()
    of_token = torch.arange(3, device=device).repeat(len(counts)).repeat_interleave(counts.flatten())
    for e, (end, size) in enumerate(zip(ends.tolist(), sizes.tolist(), strict=True)):
        start = end - (size + align - 1) // align * align
        assert_same(y[start : start + size], x[:tokens][of_token == e])


def test_scales_travel_along(device):
    """A second call permutes the row-major scales of quantized tokens."""
    indices = slot_indices(37, 1, 50, device)
    for scale in (torch.rand(37, 1), torch.rand(37, 2), torch.rand(37, 2).byte(), torch.rand(37, 0)):
        check_rows(scale.to(device), indices)


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
@pytest.mark.parametrize("spelling", SPELLINGS, ids=SPELLINGS.get)
def test_gradients(spelling, dtype, top_k, device):
    """Compares with plain indexing. Gradients of copies are copies, and sums of a few small integers are exact."""
    x = torch.randint(-8, 9, (50, 24), device=device).to(dtype).requires_grad_()
    indices = slot_indices(50, top_k, 100, device)
    there = (indices >= 0) & (indices < 50 * top_k)
    rows = indices[there].long() // top_k
    grad = torch.randint(-8, 9, (100, 24), device=device).to(dtype)
    (got,) = torch.autograd.grad(spelling.permute_pad(x, indices, top_k), x, grad.t().contiguous().t())
    want = torch.zeros_like(x).index_add(0, rows, grad[there]).detach()
    assert_same(got, want)
    y = grad.detach().requires_grad_()
    (got,) = torch.autograd.grad(spelling.unpermute(y, indices, top_k, 50), y, x.detach())
    want = torch.zeros_like(y).detach()
    want[there] = x.detach()[rows]
    assert_same(got, want)


@pytest.mark.parametrize("spelling", SPELLINGS, ids=SPELLINGS.get)
def test_second_derivative(spelling, device):
    x, indices = torch.randn(20, 5, device=device, requires_grad=True), slot_indices(20, 1, 30, device)

    def square(x: Tensor) -> Tensor:
        y = spelling.permute_pad(x, indices, 1)
        return spelling.unpermute(y * y, indices, 1, 20)

    (first,) = torch.autograd.grad(square(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    found = torch.zeros(20, dtype=torch.bool, device=device)
    found[indices[(indices >= 0) & (indices < 20)].long()] = True
    assert_same(second, torch.full_like(x, 2).detach() * found[:, None])


@pytest.mark.parametrize("spelling", SPELLINGS, ids=SPELLINGS.get)
def test_forward_mode_raises(spelling):
    indices = slot_indices(8, 1, 9)
    check_no_tangent(lambda x: spelling.permute_pad(x, indices, 1), torch.ones(8, 4))
    check_no_tangent(lambda y: spelling.unpermute(y, indices, 1, 8), torch.ones(9, 4))


def test_from_sort_tokens(device):
    """The permutation of sort_tokens is an index with top_k slots a row."""
    ids = torch.randint(0, 6, (40, 2), device=device)
    permutation, _, _ = sort_tokens(ids, 6)
    x = wide(40, 16, device=device)
    order = ids.flatten().argsort(stable=True)
    assert_same(permute_pad(x, permutation, 2), x[order // 2])


def test_opcheck(device):
    counts = random_counts(3, 4, device)
    check_opcheck("permute_indices", [counts, 4, 3, 50, 16, True])
    x, indices = wide(37, 33, device=device), slot_indices(37, 2, 60, device)
    check_opcheck("permute_pad", [x, indices, 2])
    y = permute_pad(x, indices, 2)
    check_opcheck("unpermute", [y, indices, 1, 37])
    check_opcheck("unpermute", [y, indices, 2, 37])


def there_and_back(x: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
    indices, ends, tokens = permute_indices(counts, *counts.shape[::-1], x.shape[0])
    y = permute_pad(x, indices, 1)
    return indices, ends, tokens, y, *(unpermute(y, indices, top_k, x.shape[0]) for top_k in (1, 2))


def arguments(m: int, k: int, device: str, seed: int = 0) -> list[Tensor]:
    counts = random_counts(8, 8, device, seed)
    return [wide(m, k, device=device, seed=seed), counts * (m // int(counts.sum()))]


def test_deterministic(device):
    check_deterministic(there_and_back, arguments(1000, 303, device))


def test_compiles_with_dynamic_rows(device):
    calls = [[wide(m, 48, device=device), random_counts(2, 3, device, m)] for m in (50, 64, 131)]
    check_compiled(there_and_back, calls, device)


def test_cuda_graph(gpu):
    check_cuda_graph(there_and_back, *(arguments(700, 512, gpu, seed) for seed in (0, 1)))


def test_two_streams(gpu):
    check_two_streams(there_and_back, [arguments(4000, 1024, gpu, seed) for seed in (0, 1)])


def test_stream_order(gpu):
    check_stream_order(there_and_back, [arguments(4000, 1024, gpu, seed) for seed in range(4)])


def test_second_gpu(second_gpu):
    check_second_gpu(there_and_back, arguments(700, 512, "cpu"), second_gpu)


@pytest.mark.large
def test_more_than_2_31_elements(big_gpu):
    x = torch.randint(0, 256, (600_011, 4_096), dtype=torch.uint8, device=big_gpu)
    indices = torch.randperm(len(x), device=big_gpu).int()
    y = permute_pad(x, indices, 1)
    for part in (slice(0, 1000), slice(-1000, None)):
        assert torch.equal(y[part], x[indices[part].long()])
    assert torch.equal(unpermute(y, indices, 1, len(x)), x)


COUNTS, X, INDICES = torch.ones(2, 3, dtype=torch.int64), torch.zeros(6, 4), torch.zeros(9, dtype=torch.int32)
Y = torch.zeros(9, 4)


@pytest.mark.parametrize(
    ("op", "args", "argument", "got"),
    [
        ("permute_indices", [COUNTS.float(), 3, 2, 6], "tokens_per_rank_expert", "float32"),
        ("permute_indices", [COUNTS[None], 3, 2, 6], "tokens_per_rank_expert", "3"),
        ("permute_indices", [COUNTS.t(), 2, 3, 6], "tokens_per_rank_expert", "stride"),
        ("permute_indices", [COUNTS, 4, 2, 6], "tokens_per_rank_expert", "[2, 3]"),
        ("permute_indices", [COUNTS, 2, 3, 6], "tokens_per_rank_expert", "[2, 3]"),
        ("permute_indices", [COUNTS.flatten(), 4, 2, 6], "tokens_per_rank_expert", "6"),
        ("permute_indices", [COUNTS, 3, 2, 2**31 - 300, 256], "num_tokens", "2147484160"),
        ("permute_indices", [COUNTS, 3, 0, 6], "num_ranks", "0"),
        ("permute_indices", [COUNTS, 2, 4096, 6], "num_ranks", "4096"),
        ("permute_indices", [COUNTS, 1025, 2, 6], "num_local_experts", "1025"),
        ("permute_indices", [COUNTS, 3, 2, -1], "num_tokens", "-1"),
        ("permute_indices", [COUNTS, 3, 2, 6, 12], "align", "12"),
        ("permute_pad", [X.double(), INDICES, 1], "x", "float64"),
        ("permute_pad", [X[0], INDICES, 1], "x", "1"),
        ("permute_pad", [X.t(), INDICES, 1], "x", "stride 4"),
        ("permute_pad", [X, INDICES.long(), 1], "indices", "int64"),
        ("permute_pad", [X, INDICES[None], 1], "indices", "2"),
        ("permute_pad", [X, INDICES.repeat(2)[::2], 1], "indices", "stride 2"),
        ("permute_pad", [X, INDICES, 0], "top_k", "0"),
        ("permute_pad", [X, INDICES, 2**30], "top_k", "1073741824"),
        ("unpermute", [Y.double(), INDICES, 1, 6], "y", "float64"),
        ("unpermute", [Y.int(), INDICES, 2, 6], "y", "int32"),
        ("unpermute", [Y, INDICES, 1, -3], "num_tokens", "-3"),
        ("unpermute", [Y, INDICES[1:], 1, 6], "indices", "8"),
        ("unpermute", [Y, INDICES, -2, 6], "top_k", "-2"),
    ],
)
def test_errors(op, args, argument, got, device):
    check_error(op, on(device, args), argument, got)


def test_error_on_another_device(device):
    other = "cpu" if device == "cuda" else "meta"
    for call in (lambda i: permute_pad(X.to(device), i, 1), lambda i: unpermute(Y.to(device), i, 1, 6)):
        with pytest.raises(RuntimeError, match=f": indices must be on the device of .*got {other}"):
            call(INDICES.to(other))
