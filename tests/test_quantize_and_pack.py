"""quantize_and_pack: tokens quantized into the rows of messages, bit by bit."""

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
from moe_fp8_ext.distributed.messages import Casts, Message
from moe_fp8_ext.ops import pack_tokens, quantize_and_pack, quantize_rows, sort_tokens, tokens_by_rank
from moe_fp8_ext.reference.numerics import FORMATS


def check(*args: object, **how: object) -> Tensor:
    got = quantize_and_pack(*args, **how)
    assert_same(got, reference.quantize_and_pack(*args, **how), f"{short(args[0].shape)} {args[1]} {how}")
    return got


def routed(t: int, n: int, ranks: int, device: str, seed: int = 0) -> list[object]:
    """ids, scores, their number of experts, and the rows for ranks as a sender has them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, 9, (t, n), generator=generator)
    scores = torch.rand(t, n, generator=generator)
    _, _, inverse = sort_tokens(tokens_by_rank(ids, 9, ranks)[0], ranks)
    return [*on(device, [ids, scores]), 9, inverse.to(device), t * ranks]


def arguments(t: int, k: int, device: str, seed: int = 0, fmt: str = "rowwise") -> list[object]:
    return [wide(t, k, device=device, seed=seed), fmt, *routed(t, 4, 3, device, seed)]


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
    check(x, fmt, *routed(53, 4, ranks, device), **how)


@pytest.mark.parametrize("fmt", FORMATS)
def test_is_pack_tokens_of_quantize_rows(fmt, device):
    """By the other index of the same rows; of "mxfp8" scales as "mxfp8_rowmajor" has them."""
    x = wide(200, 384, device=device)
    ids, scores, experts, inverse, rows = routed(200, 5, 3, device)
    permutation, offs, _ = sort_tokens(tokens_by_rank(ids, 9, 3)[0], 3)
    got = check(x, fmt, ids, scores, experts, inverse, rows)
    q, scale = quantize_rows(x, "mxfp8_rowmajor" if fmt == "mxfp8" else fmt)
    assert_same(got, pack_tokens(q, scale, ids, scores, experts, permutation, 3))
    assert int(offs[-1]) < rows and not got[int(offs[-1]) :].any()


@pytest.mark.parametrize("fmt", [None, *FORMATS])
def test_columns_of_a_message(fmt, device):
    """Where `ExpertParallel` reads them is where they are."""
    x, (ids, scores, experts, inverse, rows) = wide(60, 200, device=device), routed(60, 5, 3, device)
    indices = torch.full((rows,), -1, dtype=torch.int32, device=device)
    named = inverse.flatten() >= 0
    indices[inverse.flatten()[named].long()] = torch.arange(180, dtype=torch.int32, device=device)[named]
    message = Message(x, ids, scores, None if fmt is None else Casts(fmt, None, FORMATS[fmt].roundings[0]))
    got = message.rows(experts, indices, inverse)
    token, there = indices.long() // 3, indices >= 0
    q, scale = (x, None) if fmt is None else quantize_rows(x, "mxfp8_rowmajor" if fmt == "mxfp8" else fmt)
    want = [q, *([] if scale is None else [scale.view(60, -1)]), (ids + 1).int(), scores]
    for column, known in zip(message.columns(), want, strict=True):
        assert_same(column.read(got)[there].contiguous(), known[token[there]].contiguous())


def test_long_rows(device):
    """As long as a kernel takes, and longer."""
    for k in (16376, 16384, 16392):
        for fmt in ("rowwise", "blockwise", "mxfp8"):
            check(wide(3, k, device=device), fmt, *routed(3, 2, 3, device))


def test_not_finite(device):
    x = wide(20, 512, device=device)
    x[3, 100], x[5, 200], x[7] = torch.nan, -torch.inf, 0
    for fmt in FORMATS:
        check(x, fmt, *routed(20, 4, 3, device))


def test_columns_that_there_are(device):
    ids, scores, experts, inverse, rows = routed(41, 5, 3, device)
    for k in (24, 64):
        x = wide(41, k, device=device)
        for of_token in ((None, None), (ids, None), (None, scores.half()), (ids.int(), scores)):
            check(x, "blockwise", *of_token, experts, inverse, rows)


def test_rows_that_none_or_several_name(device):
    x = wide(40, 64, device=device)
    for top_k in (1, 2, 40, 256, 257):
        inverse = slot_indices(50, 1, 40 * top_k, device).view(40, top_k)
        check(x, "rowwise", None, None, 0, inverse, 50)
        check(x, "mxfp8", None, None, 0, inverse, 30)
    for slots in (256, 257, 300):  # as many rows as a kernel holds, and more
        inverse = torch.randperm(3 * slots, generator=torch.Generator().manual_seed(0)).int().view(3, slots)
        check(x[:3], "blockwise", None, None, 0, inverse.to(device), 3 * slots)
    limits = torch.tensor([[-1, 2**31 - 1], [-(2**31), 4], [4, 3], [7, 8]], dtype=torch.int32, device=device)
    check(x[:4], "rowwise", None, None, 0, limits, 8)


@pytest.mark.parametrize("shape", [(0, 0, 0, 0, 0), (0, 8, 3, 2, 4), (5, 0, 3, 2, 4), (5, 8, 0, 2, 4)], ids=short)
@pytest.mark.parametrize("fmt", FORMATS)
def test_zero_sizes(fmt, shape, device):
    t, k, n, top_k, p = shape
    ids, scores = torch.zeros(t, n, dtype=torch.int64, device=device), torch.rand(t, n, device=device)
    inverse = torch.zeros(t, top_k, dtype=torch.int32, device=device)
    for rows in (p, 0):
        for rows_of_tokens in (inverse, inverse[:, :0].contiguous()):
            check(wide(t, k, device=device), fmt, ids, scores, 9, rows_of_tokens, rows)


def test_strides_and_alignment(device):
    x, (ids, scores, *others) = wide(70, 128, device=device), routed(70, 8, 3, device)
    for _, view in strided_2d(x):
        t = len(view)
        inverse = others[1][:t]
        check(view, "rowwise", ids[:t], scores[:t], 9, inverse, 210)
        check(view, "blockwise", ids[:t], scores[:t], 9, inverse, 210)
    check(x, "rowwise", ids[:, 1:4], scores[:, 3:], *others)
    for elements in range(1, 9):
        check(misaligned(x, elements), "mxfp8", misaligned(ids, elements), misaligned(scores, elements), *others)


def test_opcheck(device):
    check_opcheck("quantize_and_pack", arguments(37, 33, device))
    check_opcheck("quantize_and_pack", arguments(37, 64, device, fmt="blockwise"))


def test_deterministic(device):
    check_deterministic(quantize_and_pack, arguments(1000, 304, device))


def test_compiles_with_dynamic_rows(device):
    calls = [arguments(t, 48, device, t)[:-1] for t in (50, 64, 131)]
    check_compiled(lambda *args: quantize_and_pack(*args, 3 * args[0].shape[0]), calls, device, dynamic=(0, 2, 3, 5))


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
    inverse = torch.randperm(len(x), device=big_gpu).int()[:, None]
    rows = quantize_and_pack(x, "rowwise", None, None, 0, inverse, len(x))
    for part in (slice(0, 1000), slice(-1000, None)):
        q, scale = quantize_rows(x[part], "rowwise")
        at = inverse[part, 0].long()
        assert_same(rows[at, :4096], q.view(torch.uint8))
        assert_same(rows[at, 4096:4100].contiguous().view(torch.float32), scale[:, None])


X, INVERSE = torch.zeros(6, 4), torch.zeros(6, 2, dtype=torch.int32)
IDS, SCORES = torch.zeros(6, 3, dtype=torch.int64), torch.zeros(6, 3)


@pytest.mark.parametrize(
    ("args", "argument", "got"),
    [
        ([X.double(), "rowwise", IDS, SCORES, 9, INVERSE, 9], "x", "float64"),
        ([X[0], "rowwise", IDS, SCORES, 9, INVERSE, 9], "x", "1"),
        ([X.t(), "rowwise", None, None, 9, INVERSE, 9], "x", "stride 4"),
        ([X, "fp8", IDS, SCORES, 9, INVERSE, 9], "format", "fp8"),
        ([X, "rowwise", IDS.short(), SCORES, 9, INVERSE, 9], "topk_ids", "int16"),
        ([X, "rowwise", IDS[1:], SCORES, 9, INVERSE, 9], "topk_ids", "5"),
        ([X, "rowwise", IDS.t().contiguous().t(), SCORES, 9, INVERSE, 9], "topk_ids", "stride 6"),
        ([X, "rowwise", IDS, SCORES.double(), 9, INVERSE, 9], "topk_scores", "float64"),
        ([X, "rowwise", IDS, SCORES[:4], 9, INVERSE, 9], "topk_scores", "4"),
        ([X, "rowwise", IDS, SCORES, -1, INVERSE, 9], "num_experts", "-1"),
        ([X, "rowwise", IDS, SCORES, 2**31, INVERSE, 9], "num_experts", "2147483648"),
        ([X, "rowwise", IDS, SCORES, 9, INVERSE.long(), 9], "inverse", "int64"),
        ([X, "rowwise", IDS, SCORES, 9, INVERSE[:5], 9], "inverse", "5"),
        ([X, "rowwise", IDS, SCORES, 9, INVERSE[:, 0], 9], "inverse", "1"),
        ([X, "rowwise", IDS, SCORES, 9, INVERSE[:, :1], 9], "inverse", "stride 2"),
        ([X, "rowwise", IDS, SCORES, 9, INVERSE, -1], "num_rows", "-1"),
        ([X, "rowwise", IDS, SCORES, 9, INVERSE, 2**31], "num_rows", "2147483648"),
    ],
)
def test_errors(args, argument, got, device):
    check_error("quantize_and_pack", on(device, args), argument, got)


def test_errors_of_casts(device):
    args = on(device, [X, "rowwise", IDS, SCORES, 9, INVERSE, 9])
    check_error("quantize_and_pack", args, "dtype", "float32", dtype=torch.float32)
    check_error("quantize_and_pack", args, "rounding", "rceil", rounding="rceil")
