"""permute_quantized: quantized rows by index, values and scales of every layout, byte for byte."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from helpers import (
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
    slot_indices,
    strided_2d,
    wide,
)
from torch import Tensor

from moe_fp8_ext import ops, reference
from moe_fp8_ext.reference.numerics import FORMATS

SIZES = [(53, 70, 90, 2), (5, 7, 9, 1), (300, 1000, 700, 3), (130, 0, 70, 1), (40, 33, 0, 2), (0, 33, 5, 1)]


def check(q: Tensor, scale: Tensor, format: str, indices: Tensor, top_k: int, offs: Tensor | None = None) -> None:
    got = ops.permute_quantized(q, scale, format, indices, top_k, offs=offs)
    what = f"{format} {short(q.shape)} indices {len(indices)} top_k {top_k} offs {offs}"
    assert_same(got, reference.permute_quantized(q, scale, format, indices, top_k, offs=offs), what)
    if got[1].stride() != got[1].contiguous().stride():  # bytes between column-major scales are zero
        room = got[1].as_strided((got[1].shape[1], got[1].stride(1)), (got[1].stride(1), 1))
        assert not room[:, len(indices) :].view(torch.uint8).any(), what


@pytest.mark.parametrize("sizes", SIZES, ids=short)
@pytest.mark.parametrize("format", FORMATS)
def test_sizes(format, sizes, device):
    m, k, p, top_k = sizes
    q, scale = ops.quantize_rows(wide(m, k, device=device), format)
    for offs in (None, group_offs("zipf", p, 9, device), torch.zeros(0, dtype=torch.int32, device=device)):
        check(q, scale, format, slot_indices(m, top_k, p, device), top_k, offs)


@pytest.mark.parametrize("format", FORMATS)
def test_groups(format, device):
    q, scale = ops.quantize_rows(wide(70, 300, device=device), format)
    indices = slot_indices(70, 3, 500, device)
    for offs in (*(group_offs(layout, 500, 7, device) for layout in LAYOUTS), *corrupt_offs(500, device)):
        check(q, scale, format, indices, 3, offs)
    check(q, scale, format, indices, 3, group_offs("zipf", 500, 1024, device))


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=short)
@pytest.mark.parametrize("format", FORMATS)
def test_strides_and_alignment(format, dtype, device):
    q, scale = ops.quantize_rows(wide(70, 160, device=device), format, dtype=dtype)
    indices, offs = slot_indices(70, 2, 90, device), group_offs("zipf", 90, 5, device)
    for _, view in strided_2d(q.view(torch.uint8)):
        check(view.view(dtype), scale, format, indices, 2, offs)
    if FORMATS[format].order == "column_major":
        for view in (scale.contiguous(), scale[:, :1].expand(scale.shape)):
            check(q, view, format, indices, 2)
    else:
        for elements in (1, 2, 3):
            check(q, misaligned(scale, elements), format, indices, 2, offs)


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
@pytest.mark.parametrize("format", FORMATS)
def test_is_the_quantizer_by_index(format, dtype, device):
    """Permuting quantized rows equals quantizing rows by index, for values and for blocks of scales."""
    x, e = wide(90, 200, dtype=dtype, device=device), 6
    permutation, offs, _ = ops.sort_tokens(torch.randint(0, e, (90, 3), device=device), e)
    want = ops.quantize_rows(x, format, offs=offs, indices=permutation, top_k=3)
    assert_same(ops.permute_quantized(*ops.quantize_rows(x, format), format, permutation, 3, offs=offs), want)


def test_indices_out_of_range_and_doubled(device):
    limits = [-1, 2**31 - 1, -(2**31), 40, 39, 0, 39, -40, 80, 7, 7, 7]
    indices = torch.tensor(limits * 3, dtype=torch.int32, device=device)
    for format in FORMATS:
        q, scale = ops.quantize_rows(wide(40, 70, device=device), format)
        for top_k in (1, 2):
            check(q, scale, format, indices, top_k)


def of_tokens(x: Tensor, indices: Tensor, offs: Tensor) -> list[Tensor]:
    """Permutes rows of every format."""
    moved = []
    for format in FORMATS:
        moved += ops.permute_quantized(*ops.quantize_rows(x, format), format, indices, 2, offs=offs)
    return moved


def arguments(m: int, k: int, device: str, seed: int = 0) -> list[Tensor]:
    p = m * 3 // 2
    indices = slot_indices(m, 2, p, device, seed)
    return [wide(m, k, device=device, seed=seed), indices, group_offs("tail_rows", p, 9, device)]


def test_opcheck(device):
    for format in FORMATS:
        x, indices, offs = arguments(37, 70, device)
        check_opcheck("permute_quantized", [*ops.quantize_rows(x, format), format, indices, 2], offs=offs)


def test_deterministic(device):
    check_deterministic(of_tokens, arguments(1000, 303, device))


def test_compiles_with_dynamic_rows(device):
    check_compiled(of_tokens, [arguments(m, 48, device) for m in (50, 64, 131)], device, dynamic=(0, 1))


def test_cuda_graph(gpu):
    check_cuda_graph(of_tokens, *(arguments(700, 512, gpu, seed) for seed in (0, 1)))


def test_two_streams(gpu):
    check_two_streams(of_tokens, [arguments(4000, 1024, gpu, seed) for seed in (0, 1)])


def test_stream_order(gpu):
    check_stream_order(of_tokens, [arguments(4000, 1024, gpu, seed) for seed in range(4)])


def test_second_gpu(second_gpu):
    check_second_gpu(of_tokens, arguments(700, 512, "cpu"), second_gpu)


@pytest.mark.large
def test_more_than_2_31_elements(big_gpu):
    q = torch.randint(0, 100, (600_011, 4_096), dtype=torch.uint8, device=big_gpu).view(torch.float8_e4m3fn)
    indices = torch.randperm(len(q), device=big_gpu).int()
    for format, blocks in (("blockwise", 32), ("mxfp8", 128)):
        if format == "blockwise":
            scale = torch.rand(blocks, 600_012, device=big_gpu).t()[: len(q)]
        else:
            scale = torch.randint(0, 255, (len(q) + -len(q) % 128, blocks), dtype=torch.uint8, device=big_gpu)
            scale = scale.view(torch.float8_e8m0fnu)
        got, got_scale = ops.permute_quantized(q, scale, format, indices, 1)
        for part in (slice(0, 1000), slice(-1000, None)):
            assert torch.equal(got.view(torch.uint8)[part], q.view(torch.uint8)[indices[part].long()])
        if format == "mxfp8":
            rows = (ops.unswizzle_scales(s.view(torch.uint8), len(q), blocks) for s in (scale, got_scale))
        else:
            rows = scale, got_scale
        before, after = rows
        assert torch.equal(after, before[indices.long()])


Q, SCALE = torch.zeros(6, 160).to(FP8_DTYPES[0]), torch.ones(6)
COLUMNS = torch.ones(2, 8).t()[:6]
INDICES, OFFS = torch.zeros(9, dtype=torch.int32), torch.tensor([3, 9], dtype=torch.int32)
E8M0 = torch.float8_e8m0fnu


@pytest.mark.parametrize(
    ("args", "argument", "got"),
    [
        ([Q.float(), SCALE, "rowwise", INDICES, 1], "q", "float32"),
        ([Q[0], SCALE, "rowwise", INDICES, 1], "q", "1"),
        ([Q.t(), SCALE, "rowwise", INDICES, 1], "q", "stride 160"),
        ([Q, SCALE.double(), "rowwise", INDICES, 1], "scale", "float64"),
        ([Q, SCALE[1:], "rowwise", INDICES, 1], "scale", "5"),
        ([Q, SCALE.repeat(2)[::2], "rowwise", INDICES, 1], "scale", "stride 2"),
        ([Q, SCALE, "blockwise", INDICES, 1], "scale", "1"),
        ([Q, COLUMNS[:5], "blockwise", INDICES, 1], "scale", "5"),
        ([Q, torch.zeros(6, 5).to(E8M0), "mxfp8", INDICES, 1], "scale", "6"),
        ([Q, torch.zeros(6, 4).to(E8M0), "mxfp8_rowmajor", INDICES, 1], "scale", "4"),
        ([Q, SCALE, "fp8", INDICES, 1], "format", "fp8"),
        ([Q, SCALE, "rowwise", INDICES.long(), 1], "indices", "int64"),
        ([Q, SCALE, "rowwise", INDICES[None], 1], "indices", "2"),
        ([Q, SCALE, "rowwise", INDICES, 0], "top_k", "0"),
        ([Q, SCALE, "rowwise", INDICES, 2**30], "top_k", "1073741824"),
        ([Q, SCALE, "rowwise", INDICES, 1, OFFS.long()], "offs", "int64"),
        ([Q, SCALE, "rowwise", INDICES, 1, OFFS.repeat(513)], "offs", "1026"),
    ],
)
def test_errors(args, argument, got, device):
    check_error("permute_quantized", on(device, args), argument, got)


@pytest.mark.parametrize("argument", ["scale", "indices", "offs"])
def test_error_on_another_device(argument, device):
    other = "cpu" if device == "cuda" else "meta"
    tensors = dict(zip(("q", "scale", "indices", "offs"), on(device, [Q, SCALE, INDICES, OFFS]), strict=True))
    tensors[argument] = tensors[argument].to(other)
    call = partial(ops.permute_quantized, format="rowwise", top_k=1, **tensors)
    with pytest.raises(RuntimeError, match=f": {argument} must be on the device of q, .*got {other}"):
        call()
