"""pack_tokens: values, scales, ids and scores of tokens side by side in rows taken by index. Bytes equal the
reference's."""

from __future__ import annotations

import pytest
import torch
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
    misaligned,
    on,
    short,
    slot_indices,
    strided_2d,
    wide,
)
from torch import Tensor

from moe_fp8_ext import reference
from moe_fp8_ext.ops import pack_tokens, quantize_rows, sort_tokens, tokens_by_rank
from moe_fp8_ext.reference.numerics import FORMATS

ID_DTYPES = torch.int32, torch.int64


def check(*args: object) -> Tensor:
    got = pack_tokens(*args)
    what = " ".join(f"{short(t.dtype)} {short(t.shape)}" for t in args[:4] if t is not None)
    assert_same(got, reference.pack_tokens(*args), what)
    return got


def known(t: int, k: int, n: int, device: str, dtype: torch.dtype = torch.int64, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, 10, (t, n), dtype=dtype, generator=generator)
    scale, scores = torch.rand(t, generator=generator), torch.rand(t, n, generator=generator)
    return [wide(t, k, device=device, seed=seed), *on(device, [ids, scores, scale])]


def arguments(t: int, k: int, device: str, seed: int = 0) -> list[object]:
    return [*known(t, k, 8, device, seed=seed), slot_indices(t, 2, 2 * t, device), 2, 9]


@pytest.mark.parametrize("top_k", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", ID_DTYPES, ids=short)
def test_rows(dtype, top_k, device):
    indices = slot_indices(53, top_k, 130, device)
    for k in (1, 3, 8, 70, 128, 200, 5000):
        for n in (1, 3, 4, 8):
            check(*known(53, k, n, device, dtype), indices, top_k, 9)


@pytest.mark.parametrize("which", range(8))
def test_columns_that_there_are(which, device):
    x, *others = known(41, 24, 5, device)
    given = [t if which >> i & 1 else None for i, t in enumerate(others)]
    rows = check(x, *given, slot_indices(41, 2, 60, device), 2, 9)
    # X takes 64 bytes and each part 32; rows are padded to 64.
    assert rows.shape[1] == (64, 128, 128, 192)[sum(t is not None for t in given)]


@pytest.mark.parametrize("fmt", FORMATS)
def test_formats(fmt, device):
    """Scales have the layouts of quantize_rows, column-major ones too."""
    q, scale = quantize_rows(wide(77, 7168, device=device), fmt)
    check(q, None, None, scale[:77], slot_indices(77, 2, 100, device), 2, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=short)
def test_scales_of_any_strides(dtype, device):
    scale = torch.arange(60 * 14, device=device).view(60, 14).to(dtype)
    x, indices = wide(60, 16, device=device), slot_indices(60, 2, 70, device)
    for view in (scale[:, :1], scale[:, 3], scale[:, ::2], scale.t().contiguous().t(), scale[:1].expand(60, 14)):
        check(x, None, None, view, indices, 2, 0)
    check(x, None, None, scale[:, 1:2].expand(60, 5), indices, 2, 0)
    check(x, None, None, scale[:, :0], indices, 2, 0)


def test_ids(device):
    """Ids travel as id + 1. All ids of no expert travel as 0."""
    limits = [[2**32, 2**32 + 1, -(2**63)], [2**63 - 1, -1, 0], [8, 9, -(2**31)], [2**31, -2, 1]]
    ids, x = torch.tensor(limits, device=device), torch.zeros(4, 0, device=device)
    indices = torch.arange(4, dtype=torch.int32, device=device)
    rows = check(x, ids, None, None, indices, 1, 9)
    assert rows.view(torch.int32)[:, :3].tolist() == [[0, 0, 0], [0, 0, 1], [9, 0, 0], [0, 0, 2]]
    assert not rows[:, 12:].any()
    assert not check(x, ids, None, None, indices, 1, 0).any()
    int32 = ids.clamp(-(2**31), 2**31 - 1).int()
    check(x, int32, None, None, indices, 1, 9)
    check(x, int32, None, None, indices, 1, 2**31 - 256)


def test_a_message(device):
    """A message has a row for each rank of a token, and each column holds the token's bits."""
    x, ids, scores, scale = known(200, 96, 4, device)
    permutation, offs, _ = sort_tokens(tokens_by_rank(ids, 9, 3)[0], 3)
    rows = check(x, ids, scores, scale, permutation, 3, 9)
    there = permutation[: int(offs[-1])].long() // 3
    assert_same(rows[: len(there), :192].contiguous().view(x.dtype), x[there])
    assert_same(rows[: len(there), 192:196].contiguous().view(torch.float32), scale[there, None])
    assert not rows[: len(there), 196:224].any() and not rows[len(there) :].any()
    assert_same(rows[: len(there), 256:272].contiguous().view(torch.float32), scores[there])


@pytest.mark.parametrize("shape", [(0, 0, 0, 0), (0, 5, 3, 4), (5, 0, 3, 4), (5, 3, 0, 4), (5, 3, 3, 0)], ids=short)
def test_zero_sizes(shape, device):
    t, k, n, p = shape
    for top_k in (1, 2):
        check(*known(t, k, n, device), torch.zeros(p, dtype=torch.int32, device=device), top_k, 9)


def test_strides_and_alignment(device):
    x, ids, scores, scale = known(70, 128, 8, device)
    indices = slot_indices(70, 2, 90, device)
    for _, view in strided_2d(x):
        of_tokens = (t[: len(view)] for t in (ids, scores, scale))
        check(view, *of_tokens, indices, 2, 9)
    check(x, ids[:, 1:4], scores[:, 3:], scale, indices, 2, 9)
    check(x, ids[:, :1].expand(70, 1), scores[:1].expand(70, 8), scale, indices, 2, 9)
    for elements in range(1, 9):
        check(*(misaligned(t, elements) for t in (x, ids, scores, scale)), misaligned(indices), 2, 9)


def test_indices_out_of_range_and_doubled(device):
    limits = [-1, 2**31 - 1, -(2**31), 40, 39, 0, 39, -40, 80, 7, 7, 7]
    indices = torch.tensor(limits * 3, dtype=torch.int32, device=device)
    for top_k in (1, 2):
        check(*known(40, 24, 3, device), indices, top_k, 9)


def test_opcheck(device):
    check_opcheck("pack_tokens", arguments(37, 33, device))
    x, indices = wide(37, 33, device=device), slot_indices(37, 2, 60, device)
    check_opcheck("pack_tokens", [x, None, None, None, indices, 2, 0])


def test_deterministic(device):
    check_deterministic(pack_tokens, arguments(1000, 303, device))


def test_compiles_with_dynamic_rows(device):
    calls = [arguments(t, 48, device, t) for t in (50, 64, 131)]
    check_compiled(pack_tokens, calls, device, dynamic=(0, 1, 2, 3, 4))


def test_cuda_graph(gpu):
    check_cuda_graph(pack_tokens, *(arguments(700, 512, gpu, seed) for seed in (0, 1)))


def test_two_streams(gpu):
    check_two_streams(pack_tokens, [arguments(4000, 1024, gpu, seed) for seed in (0, 1)])


def test_stream_order(gpu):
    check_stream_order(pack_tokens, [arguments(4000, 1024, gpu, seed) for seed in range(4)])


def test_second_gpu(second_gpu):
    check_second_gpu(pack_tokens, arguments(700, 512, "cpu"), second_gpu)


@pytest.mark.large
def test_more_than_2_31_elements(big_gpu):
    x = torch.randint(0, 256, (600_011, 4_096), dtype=torch.uint8, device=big_gpu)
    ids = torch.randint(0, 9, (len(x), 4), device=big_gpu)
    indices = torch.randperm(len(x), device=big_gpu).int()
    rows = pack_tokens(x, ids, None, None, indices, 1, 9)
    for part in (slice(0, 1000), slice(-1000, None)):
        assert torch.equal(rows[part, :4096], x[indices[part].long()])
        assert torch.equal(rows[part, 4096:4112].contiguous().view(torch.int32), ids[indices[part].long()].int() + 1)


X, SCALE, INDICES = torch.zeros(6, 4), torch.zeros(6), torch.zeros(9, dtype=torch.int32)
IDS, SCORES = torch.zeros(6, 3, dtype=torch.int64), torch.zeros(6, 3)


@pytest.mark.parametrize(
    ("args", "argument", "got"),
    [
        ([X.double(), IDS, SCORES, SCALE, INDICES, 1, 9], "x", "float64"),
        ([X[0], IDS, SCORES, SCALE, INDICES, 1, 9], "x", "1"),
        ([X.t(), None, None, None, INDICES, 1, 9], "x", "stride 4"),
        ([X, IDS, SCORES, SCALE.double(), INDICES, 1, 9], "scale", "float64"),
        ([X, IDS, SCORES, SCALE[1:], INDICES, 1, 9], "scale", "5"),
        ([X, IDS, SCORES, SCALE[None, None], INDICES, 1, 9], "scale", "3"),
        ([X, IDS.short(), SCORES, SCALE, INDICES, 1, 9], "topk_ids", "int16"),
        ([X, IDS[1:], SCORES, SCALE, INDICES, 1, 9], "topk_ids", "5"),
        ([X, IDS[:, 0], SCORES, SCALE, INDICES, 1, 9], "topk_ids", "1"),
        ([X, IDS.t().contiguous().t(), SCORES, SCALE, INDICES, 1, 9], "topk_ids", "stride 6"),
        ([X, IDS, SCORES.double(), SCALE, INDICES, 1, 9], "topk_scores", "float64"),
        ([X, IDS, SCORES[:4], SCALE, INDICES, 1, 9], "topk_scores", "4"),
        ([X, IDS, SCORES.t().contiguous().t(), SCALE, INDICES, 1, 9], "topk_scores", "stride 6"),
        ([X, IDS, SCORES, SCALE, INDICES, 1, -1], "num_experts", "-1"),
        ([X, IDS, SCORES, SCALE, INDICES, 1, 2**31], "num_experts", "2147483648"),
        ([X, IDS, SCORES, SCALE, INDICES.long(), 1, 9], "indices", "int64"),
        ([X, IDS, SCORES, SCALE, INDICES[None], 1, 9], "indices", "2"),
        ([X, IDS, SCORES, SCALE, INDICES, 0, 9], "top_k", "0"),
        ([X, IDS, SCORES, SCALE, INDICES, 2**30, 9], "top_k", "1073741824"),
    ],
)
def test_errors(args, argument, got, device):
    check_error("pack_tokens", on(device, args), argument, got)
