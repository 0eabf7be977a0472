"""quantize_and_pack: tokens quantized into the rows of messages, byte for byte."""

from __future__ import annotations

import pytest
import torch
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
    inverse_of,
    misaligned,
    on,
    pairs,
    short,
    slot_indices,
    strided_2d,
    wide,
)
from torch import Tensor

from moe_fp8_ext import reference
from moe_fp8_ext.distributed.message import Message
from moe_fp8_ext.ops import pack_tokens, quantize_and_pack, quantize_rows, sort_tokens, tokens_by_rank
from moe_fp8_ext.quantization.recipe import Rule
from moe_fp8_ext.reference.numerics import FORMATS


def check(*args: object, **how: object) -> Tensor:
    got = quantize_and_pack(*args, **how)
    assert_same(got, reference.quantize_and_pack(*args, **how), f"{short(args[0].shape)} {args[3]} {how}")
    return got


def routed(t: int, n: int, ranks: int, device: str, seed: int = 0) -> tuple[list[Tensor], list[object]]:
    """Returns ids and scores, and then indices and inverse of rows for ranks, as a sender has them, and the number of
    experts."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, 9, (t, n), generator=generator)
    scores = torch.rand(t, n, generator=generator)
    indices, _, inverse = sort_tokens(tokens_by_rank(ids, 9, ranks)[0], ranks)
    return on(device, [ids, scores]), [*on(device, [indices, inverse]), 9]


def arguments(t: int, k: int, device: str, seed: int = 0, fmt: str = "rowwise") -> list[object]:
    of_token, rows = routed(t, 4, 3, device, seed)
    return [wide(t, k, device=device, seed=seed), *of_token, fmt, *rows]


@pytest.mark.parametrize(
    *pairs(
        fmt=list(FORMATS),
        dtype=INPUT_DTYPES,
        fp8=[None, *FP8_DTYPES],
        k=[1, 7, 8, 16, 31, 40, 128, 272, 1000, 7168],
        ranks=[1, 3, 9],
        rounding=[0, 1],
    ),
    ids=short,
)
def test_values(fmt, dtype, fp8, k, ranks, rounding, device):
    x = wide(53, k, dtype=dtype, device=device)
    how = {"dtype": fp8, "rounding": FORMATS[fmt].roundings[rounding]}
    of_token, rows = routed(53, 4, ranks, device)
    check(x, *of_token, fmt, *rows, **how)


@pytest.mark.parametrize("fmt", FORMATS)
def test_is_pack_tokens_of_quantize_rows(fmt, device):
    """Scales of "mxfp8" have the layout of "mxfp8_rowmajor"."""
    x = wide(200, 384, device=device)
    (ids, scores), (indices, inverse, experts) = routed(200, 5, 3, device)
    got = check(x, ids, scores, fmt, indices, inverse, experts)
    q, scale = quantize_rows(x, "mxfp8_rowmajor" if fmt == "mxfp8" else fmt)
    assert_same(got, pack_tokens(q, ids, scores, scale, indices, 3, experts))
    rows = int((indices >= 0).sum())
    assert rows < len(indices) and not got[rows:].any()


@pytest.mark.parametrize("fmt", [None, *FORMATS])
def test_columns_of_a_message(fmt, device):
    """Every part of a message is in the column where `ExpertParallel` reads it."""
    x = wide(60, 200, device=device)
    (ids, scores), (indices, inverse, experts) = routed(60, 5, 3, device)
    message = Message(x, ids, scores, None if fmt is None else Rule(fmt, None, FORMATS[fmt].roundings[0]))
    got = message.rows(experts, indices, inverse)
    token, there = indices.long() // 3, indices >= 0
    q, scale = (x, None) if fmt is None else quantize_rows(x, "mxfp8_rowmajor" if fmt == "mxfp8" else fmt)
    want = [q, *([] if scale is None else [scale.view(60, -1)]), (ids + 1).int(), scores]
    for column, known in zip(message.columns(), want, strict=True):
        assert_same(column.read(got)[there].contiguous(), known[token[there]].contiguous())


def test_long_rows(device):
    """Rows are as long as the longest that a kernel takes, and longer."""
    of_token, rows = routed(3, 2, 3, device)
    for k in (16376, 16384, 16392):
        for fmt in ("rowwise", "blockwise", "mxfp8"):
            check(wide(3, k, device=device), *of_token, fmt, *rows)


def test_not_finite(device):
    x = wide(20, 512, device=device)
    x[3, 100], x[5, 200], x[7] = torch.nan, -torch.inf, 0
    of_token, rows = routed(20, 4, 3, device)
    for fmt in FORMATS:
        check(x, *of_token, fmt, *rows)


def test_columns_that_there_are(device):
    (ids, scores), others = routed(41, 5, 3, device)
    for k in (24, 64):
        x = wide(41, k, device=device)
        for of_token in ((None, None), (ids, None), (None, scores.half()), (ids.int(), scores)):
            check(x, *of_token, "blockwise", *others)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_indices(dtype, device):
    """Indices come in any order. A token has as many rows as a kernel can hold, and more."""
    x = wide(40, 64, dtype=dtype, device=device)
    for top_k in (1, 2, 40, 256, 257):
        for rows in (0, 30, 40 * top_k):
            indices = slot_indices(40, top_k, rows, device)
            check(x, None, None, "rowwise", indices, inverse_of(indices, 40, top_k), 0)
    for slots in (256, 257, 300):
        indices = torch.randperm(3 * slots, generator=torch.Generator().manual_seed(0)).int().to(device)
        check(x[:3], None, None, "blockwise", indices, inverse_of(indices, 3, slots), 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_indices_and_inverse_that_differ(dtype, device):
    """Where the two disagree, rows are zeros. Numbers out of range are never dereferenced."""
    x = wide(40, 64, dtype=dtype, device=device)
    for top_k in (1, 3, 70):
        indices = torch.cat([slot_indices(40, top_k, 60, device), slot_indices(40, top_k, 60, device, seed=1)])
        inverse = inverse_of(indices, 40, top_k)
        assert not check(x, None, None, "rowwise", indices, torch.full_like(inverse, -1), 0).any()
        others = slot_indices(120, 1, 40 * top_k, device).view(40, top_k)
        for of_slots in (inverse, others, torch.where(inverse % 2 == 0, inverse, others)):
            check(x, None, None, "mxfp8", indices, of_slots, 0)
    indices = torch.tensor([-1, 7, -(2**31), 8, 2**31 - 1, 2, 4, 2], dtype=torch.int32, device=device)
    inverse = torch.tensor([[-1, 2**31 - 1], [-(2**31), 5], [8, -2], [6, 1]], dtype=torch.int32, device=device)
    check(x[:4], None, None, "rowwise", indices, inverse, 0)


@pytest.mark.parametrize("shape", [(0, 0, 0, 0, 0), (0, 8, 3, 2, 4), (5, 0, 3, 2, 4), (5, 8, 0, 2, 4)], ids=short)
@pytest.mark.parametrize("fmt", FORMATS)
def test_zero_sizes(fmt, shape, device):
    t, k, n, top_k, p = shape
    ids, scores = torch.zeros(t, n, dtype=torch.int64, device=device), torch.rand(t, n, device=device)
    inverse = torch.zeros(t, top_k, dtype=torch.int32, device=device)
    for rows in (p, 0):
        indices = torch.zeros(rows, dtype=torch.int32, device=device)
        for rows_of_tokens in (inverse, inverse[:, :0].contiguous()):
            check(wide(t, k, device=device), ids, scores, fmt, indices, rows_of_tokens, 9)


def test_strides_and_alignment(device):
    x, ((ids, scores), others) = wide(70, 128, device=device), routed(70, 8, 3, device)
    for _, view in strided_2d(x):
        t, (indices, inverse) = len(view), others[:2]
        for fmt in ("rowwise", "blockwise"):
            check(view, ids[:t], scores[:t], fmt, indices, inverse[:t], 9)
    check(x, ids[:, 1:4], scores[:, 3:], "rowwise", *others)
    for elements in range(1, 9):
        check(misaligned(x, elements), misaligned(ids, elements), misaligned(scores, elements), "mxfp8", *others)


def test_opcheck(device):
    check_opcheck("quantize_and_pack", arguments(37, 33, device))
    check_opcheck("quantize_and_pack", arguments(37, 64, device, fmt="blockwise"))


def test_deterministic(device):
    check_deterministic(quantize_and_pack, arguments(1000, 304, device))


def test_compiles_with_dynamic_rows(device):
    calls = [arguments(t, 48, device, t) for t in (50, 64, 131)]
    check_compiled(quantize_and_pack, calls, device, dynamic=(0, 1, 2, 4, 5))


def test_cuda_graph(gpu):
    check_cuda_graph(quantize_and_pack, *(arguments(700, 512, gpu, seed) for seed in (0, 1)))


def test_two_streams(gpu):
    check_two_streams(quantize_and_pack, [arguments(4000, 1024, gpu, seed) for seed in (0, 1)])


def test_stream_order(gpu):
    check_stream_order(quantize_and_pack, [arguments(4000, 1024, gpu, seed) for seed in range(4)])


def test_second_gpu(second_gpu):
    check_second_gpu(quantize_and_pack, arguments(700, 512, "cpu"), second_gpu)


@pytest.mark.large
def test_more_than_2_31_elements(big_gpu):
    x = torch.randn(600_011, 4_096, dtype=torch.bfloat16, device=big_gpu)
    indices = torch.randperm(len(x), device=big_gpu).int()
    inverse = indices.argsort().int()[:, None]
    rows = quantize_and_pack(x, None, None, "rowwise", indices, inverse, 0)
    for part in (slice(0, 1000), slice(-1000, None)):
        q, scale = quantize_rows(x[part], "rowwise")
        at = inverse[part, 0].long()
        assert_same(rows[at, :4096], q.view(torch.uint8))
        assert_same(rows[at, 4096:4100].contiguous().view(torch.float32), scale[:, None])


X, INDICES, INVERSE = torch.zeros(6, 4), torch.zeros(9, dtype=torch.int32), torch.zeros(6, 2, dtype=torch.int32)
IDS, SCORES = torch.zeros(6, 3, dtype=torch.int64), torch.zeros(6, 3)


@pytest.mark.parametrize(
    ("args", "argument", "got"),
    [
        ([X.double(), IDS, SCORES, "rowwise", INDICES, INVERSE, 9], "x", "float64"),
        ([X[0], IDS, SCORES, "rowwise", INDICES, INVERSE, 9], "x", "1"),
        ([X.t(), None, None, "rowwise", INDICES, INVERSE, 9], "x", "stride 4"),
        ([X, IDS, SCORES, "fp8", INDICES, INVERSE, 9], "format", "fp8"),
        ([X, IDS.short(), SCORES, "rowwise", INDICES, INVERSE, 9], "topk_ids", "int16"),
        ([X, IDS[1:], SCORES, "rowwise", INDICES, INVERSE, 9], "topk_ids", "5"),
        ([X, IDS.t().contiguous().t(), SCORES, "rowwise", INDICES, INVERSE, 9], "topk_ids", "stride 6"),
        ([X, IDS, SCORES.double(), "rowwise", INDICES, INVERSE, 9], "topk_scores", "float64"),
        ([X, IDS, SCORES[:4], "rowwise", INDICES, INVERSE, 9], "topk_scores", "4"),
        ([X, IDS, SCORES, "rowwise", INDICES, INVERSE, -1], "num_experts", "-1"),
        ([X, IDS, SCORES, "rowwise", INDICES, INVERSE, 2**31], "num_experts", "2147483648"),
        ([X, IDS, SCORES, "rowwise", INDICES, INVERSE.long(), 9], "inverse", "int64"),
        ([X, IDS, SCORES, "rowwise", INDICES, INVERSE[:5], 9], "inverse", "5"),
        ([X, IDS, SCORES, "rowwise", INDICES, INVERSE[:, 0], 9], "inverse", "1"),
        ([X, IDS, SCORES, "rowwise", INDICES, INVERSE[:, :1], 9], "inverse", "stride 2"),
        ([X, IDS, SCORES, "rowwise", INDICES.long(), INVERSE, 9], "indices", "int64"),
        ([X, IDS, SCORES, "rowwise", INDICES[:, None], INVERSE, 9], "indices", "2"),
        ([X, IDS, SCORES, "rowwise", INDICES[::2], INVERSE, 9], "indices", "stride 2"),
    ],
)
def test_errors(args, argument, got, device):
    check_error("quantize_and_pack", on(device, args), argument, got)


def test_errors_of_casts(device):
    args = on(device, [X, IDS, SCORES, "rowwise", INDICES, INVERSE, 9])
    check_error("quantize_and_pack", args, "dtype", "float32", dtype=torch.float32)
    check_error("quantize_and_pack", args, "rounding", "rceil", rounding="rceil")
