"""permute_pad_quantize_*: the quantizers of permuted rows, byte for byte."""

from __future__ import annotations

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

from moe_fp8_ext import (
    combine,
    permute_indices,
    permute_pad,
    permute_pad_quantize_1x128,
    permute_pad_quantize_1x128_128x1,
    permute_pad_quantize_mx_1x32,
    permute_pad_quantize_mx_1x32_32x1,
    permute_pad_quantize_rowcol,
    permute_pad_quantize_rowwise,
    quantize_1x128_128x1,
    quantize_rowcol,
    quantize_rowwise,
    reference,
    sort_tokens,
)


def check(x: Tensor, indices: Tensor, offs: Tensor, top_k: int = 1, align: int = 16, *rule: object) -> None:
    what = f"{short(x.dtype)} {short(x.shape)} top_k {top_k} offs {offs.tolist()[:20]}"
    want = reference.permute_pad_quantize_rowcol(x, indices, offs, top_k, align, *rule)
    assert_same(permute_pad_quantize_rowcol(x, indices, offs, top_k, align, *rule), want, what)
    assert_same(permute_pad_quantize_rowwise(x, indices, top_k, *rule), want[:2], what)
    for transpose in (True, False):
        args = x, indices, offs, top_k, align, *(rule or (None,)), *(() if len(rule) > 1 else (False,)), transpose
        want = reference.permute_pad_quantize_1x128_128x1(*args)
        assert_same(permute_pad_quantize_1x128_128x1(*args), want, what)
    assert_same(permute_pad_quantize_1x128(x, indices, top_k, *rule), want[:2], what)
    check_mx(x, indices, offs, top_k, *rule[:1])


def check_mx(x: Tensor, indices: Tensor, offs: Tensor, top_k: int = 1, fp8: torch.dtype | None = None) -> None:
    for layout, groups in (("rowmajor", None), ("blocked", None), ("blocked", offs)):
        args = x, indices, groups, top_k, "rceil", layout, fp8
        assert_same(permute_pad_quantize_mx_1x32(*args), reference.permute_pad_quantize_mx_1x32(*args), f"{args[2:]}")
        args = x, indices, offs, top_k, "floor", layout, 64, fp8
        want = reference.permute_pad_quantize_mx_1x32_32x1(*args)
        assert_same(permute_pad_quantize_mx_1x32_32x1(*args), want, f"{args[2:]}")


@pytest.mark.parametrize("pow2_scale", [False, True])
@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=short)
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
def test_formats(dtype, fp8, pow2_scale, device):
    x, offs = wide(131, 67, dtype=dtype, device=device), group_offs("zipf", 170, 5, device)
    check(x, slot_indices(131, 2, 170, device), offs, 2, 16, fp8, pow2_scale)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("top_k", [1, 2, 3, 8])
def test_group_layouts(layout, top_k, device):
    for m, k, p, e in ((1, 1, 1, 1), (37, 33, 60, 3), (500, 303, 700, 5), (300, 2880, 450, 9), (1000, 1048, 1300, 2)):
        check(wide(m, k, device=device), slot_indices(m, top_k, p, device), group_offs(layout, p, e, device), top_k)


@pytest.mark.parametrize("align", [1, 2, 16, 64, 256])
def test_align(align, device):
    for layout in LAYOUTS:
        offs = group_offs(layout, 301, 6, device)
        check(wide(250, 40, device=device), slot_indices(250, 1, 301, device), offs, 1, align)


@pytest.mark.parametrize("k", [1, 7, 8, 15, 16, 33, 63, 129, 257, 1025, 2048, 9001, 33000])
def test_widths(k, device):
    for dtype in (torch.bfloat16, torch.float32):
        x, offs = wide(23, k, dtype=dtype, device=device), group_offs("zipf", 40, 3, device)
        check(x, slot_indices(23, 2, 40, device), offs, 2)


def test_one_index_of_rows_at_odd_distances(device):
    """One row to write, any row to read: what lies between rows still decides how they may be loaded."""
    for k in (16, 1024, 2048):
        x = wide(8, k + 1, device=device)[:, :k]
        for index in (3, 4):
            indices, offs = (torch.tensor([i], dtype=torch.int32, device=device) for i in (index, 1))
            check(x, indices, offs)


@pytest.mark.parametrize("shape", [(0, 0, 0, 0), (0, 5, 3, 2), (5, 0, 3, 2), (5, 3, 0, 2), (5, 3, 4, 0)], ids=short)
def test_zero_sizes(shape, device):
    m, k, p, e = shape
    check(
        wide(m, k, device=device), torch.zeros(p, dtype=torch.int32, device=device), group_offs("uniform", p, e, device)
    )


def test_longest_and_most_groups(device):
    check(wide(9001, 40, device=device), slot_indices(9001, 1, 9100, device), group_offs("one_giant", 9100, 3, device))
    check(wide(700, 24, device=device), slot_indices(700, 1, 900, device), group_offs("zipf", 900, 1024, device))


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
def test_strides_and_alignment(dtype, device):
    x, offs = wide(70, 1024, dtype=dtype, device=device), group_offs("zipf", 90, 3, device)
    indices = slot_indices(70, 2, 90, device)
    for _, view in strided_2d(x):
        check(view, indices, offs, 2)
    for elements in (1, 2, 4, 8):
        check(misaligned(x, elements), misaligned(indices), misaligned(offs), 2)


def test_corrupt_offsets_and_indices(device):
    indices = torch.tensor([-1, 2**31 - 1, -(2**31), 40, 39, 0, 39, -40, 80, 7, 7, 7] * 4, dtype=torch.int32)
    for offs in corrupt_offs(48, device):
        for top_k in (1, 2):
            check(wide(40, 50, device=device), indices.to(device), offs, top_k)
            check(wide(40, 1024, device=device), indices.to(device), offs, top_k)


def test_non_finite_values(device):
    x = wide(60, 1030, device=device)
    x[5, 3], x[17, 700] = float("nan"), float("-inf")
    for fp8 in FP8_DTYPES:
        check(x, slot_indices(60, 1, 80, device), group_offs("tail_rows", 80, 4, device), 1, 16, fp8)


def test_after_an_exchange(device):
    """With the indices of permute_indices: the operands of an expert-major, padded tensor that is never made."""
    counts = torch.randint(0, 30, (4, 6), generator=torch.Generator().manual_seed(0)).to(device)
    x = wide(int(counts.sum()) + 3, 1024, device=device)
    indices, offs, _ = permute_indices(counts, 4, 6, len(x))
    y = permute_pad(x, indices)
    assert_same(permute_pad_quantize_rowwise(x, indices), quantize_rowwise(y))
    assert_same(permute_pad_quantize_rowcol(x, indices, offs), quantize_rowcol(y, offs))
    assert_same(permute_pad_quantize_1x128_128x1(x, indices, offs), quantize_1x128_128x1(y, offs))


def both(x: Tensor, indices: Tensor, offs: Tensor) -> tuple[Tensor, ...]:
    rowwise = *permute_pad_quantize_rowwise(x, indices, 2), *permute_pad_quantize_rowcol(x, indices, offs, 2)
    blockwise = permute_pad_quantize_1x128(x, indices, 2), permute_pad_quantize_1x128_128x1(x, indices, offs, 2)
    mx = permute_pad_quantize_mx_1x32_32x1(x, indices, offs, 2)
    return *rowwise, *blockwise[0], *blockwise[1], *mx, *permute_pad_quantize_mx_1x32(x, indices, None, 2)


def arguments(m: int, k: int, device: str, seed: int = 0, layout: str = "zipf") -> list[Tensor]:
    p = m * 5 // 4
    x, indices = wide(m, k, device=device, seed=seed), slot_indices(m, 2, p, device, seed)
    return [x, indices, group_offs(layout, p, 9, device)]


def test_opcheck(device):
    x, indices, offs = arguments(37, 33, device)
    check_opcheck("permute_pad_quantize_rowwise", [x, indices, 2])
    check_opcheck("permute_pad_quantize_rowcol", [x, indices, offs, 2, 32])
    check_opcheck("permute_pad_quantize_1x128", [x, indices, 2])
    check_opcheck("permute_pad_quantize_1x128_128x1", [x, indices, offs, 2, 32])
    check_opcheck("permute_pad_quantize_mx_1x32", [x, indices, offs, 2, "floor", "blocked"])
    check_opcheck("permute_pad_quantize_mx_1x32_32x1", [x, indices, offs, 2, "rceil", "rowmajor"])


def test_deterministic(device):
    check_deterministic(both, arguments(1000, 1048, device))


def test_compiles_with_dynamic_rows(device):
    check_compiled(both, [arguments(m, 48, device) for m in (50, 64, 131)], device, dynamic=(0, 1))


def test_cuda_graph(gpu):
    first, later = (arguments(700, 2048, gpu, seed, layout) for seed, layout in enumerate(("zipf", "one_giant")))
    check_cuda_graph(both, first, later)


def test_two_streams(gpu):
    check_two_streams(both, [arguments(4000, 2048, gpu, seed) for seed in (0, 1)])


def test_stream_order(gpu):
    check_stream_order(both, [arguments(4000, 2048, gpu, seed) for seed in range(4)])


def layer(ids: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """Ops one after the other that take what the kernel ahead of them writes, and of which some start early."""
    permutation, offs, inverse = sort_tokens(ids, 9)
    quantized = permute_pad_quantize_rowcol(x, permutation, offs, 2)
    order, _, _ = sort_tokens(inverse, 900)
    y = permute_pad(x, permutation, 2)
    return permutation, offs, inverse, *quantized, order, y, combine(y, inverse)


def test_order_of_kernels_that_start_early(gpu):
    calls = []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 9, (4000, 2), generator=generator).int().to(gpu)
        calls.append([ids, wide(4000, 2048, device=gpu, seed=seed)])
    check_stream_order(layer, calls, overwrite=-1)
    for (ids, x), got in zip(calls, [layer(*call) for call in calls], strict=True):
        permutation, offs, inverse = reference.sort_tokens(ids, 9)
        assert_same(got[:3], (permutation, offs, inverse))
        assert_same(got[3:8], reference.permute_pad_quantize_rowcol(x, permutation, offs, 2))


def test_second_gpu(second_gpu):
    check_second_gpu(both, arguments(700, 512, "cpu"), second_gpu)


@pytest.mark.large
def test_more_than_2_31_elements(big_gpu):
    """In blocks of rows against the quantizer of rows; columns against those of a narrow piece."""
    x = torch.randn(300_011, 8_192, dtype=torch.bfloat16, device=big_gpu)
    indices, offs = torch.randperm(len(x), device=big_gpu).int(), group_offs("uniform", len(x), 7, big_gpu)
    q, scale, q_t, scale_t, _ = permute_pad_quantize_rowcol(x, indices, offs)
    for part in (slice(0, 500), slice(-500, None)):
        want = quantize_rowwise(x[indices[part].long()])
        assert_same((q[part].clone(), scale[part].clone()), want)
    narrow = x[:, -64:][indices.long()].contiguous()
    want = reference.quantize_colwise(narrow, offs)
    assert_same((q_t[-64:].clone(), scale_t[:, -64:].contiguous()), want[:2])


X, INDICES = torch.zeros(6, 4), torch.zeros(9, dtype=torch.int32)
OFFS = torch.tensor([2, 9], dtype=torch.int32)


@pytest.mark.parametrize(
    ("args", "argument", "got"),
    [
        ([X.double(), INDICES, OFFS], "x", "float64"),
        ([X[0], INDICES, OFFS], "x", "1"),
        ([X.t(), INDICES, OFFS], "x", "stride 4"),
        ([X, INDICES.long(), OFFS], "indices", "int64"),
        ([X, INDICES[None], OFFS], "indices", "2"),
        ([X, INDICES.repeat(2)[::2], OFFS], "indices", "stride 2"),
        ([X, INDICES, OFFS, 0], "top_k", "0"),
        ([X, INDICES, OFFS.long()], "offs", "int64"),
        ([X, INDICES, OFFS, 1, 24], "align", "24"),
        ([X, INDICES, OFFS, 1, 16, torch.float16], "dtype", "float16"),
    ],
)
def test_errors(args, argument, got, device):
    args = on(device, args)
    for op in ("rowcol", "1x128_128x1"):
        check_error(f"permute_pad_quantize_{op}", args, argument, got)
    if argument not in ("offs", "align"):
        for op in ("rowwise", "1x128"):
            check_error(f"permute_pad_quantize_{op}", [*args[:2], *args[3:4], *args[5:]], argument, got)


@pytest.mark.parametrize(
    ("args", "argument", "got"),
    [
        ([X.double(), INDICES, OFFS], "x", "float64"),
        ([X, INDICES.long(), OFFS], "indices", "int64"),
        ([X, INDICES, OFFS, 0], "top_k", "0"),
        ([X, INDICES, OFFS.long(), 1, "rceil", "blocked"], "offs", "int64"),
        ([X, INDICES, OFFS, 1, "up", "blocked"], "scaling", "'up'"),
        ([X, INDICES, OFFS, 1, "rceil", "rows"], "layout", "'rows'"),
    ],
)
def test_errors_of_mx(args, argument, got, device):
    for op in ("mx_1x32", "mx_1x32_32x1"):
        check_error(f"permute_pad_quantize_{op}", on(device, args), argument, got)
    rows, both = "permute_pad_quantize_mx_1x32", "permute_pad_quantize_mx_1x32_32x1"
    check_error(rows, on(device, [X, INDICES, OFFS]), "offs", "tensor")
    check_error(both, on(device, [X, INDICES, OFFS, 1, "rceil", "blocked", 16]), "align", "16")


def test_a_gradient_is_refused(device):
    x = X.to(device).requires_grad_()
    for fn in (permute_pad_quantize_rowwise, permute_pad_quantize_1x128, permute_pad_quantize_mx_1x32):
        with pytest.raises(RuntimeError, match=f"^{fn.__name__}: x must not ask for a gradient"):
            fn(x, INDICES.to(device))
    for fn in (permute_pad_quantize_rowcol, permute_pad_quantize_1x128_128x1, permute_pad_quantize_mx_1x32_32x1):
        with pytest.raises(RuntimeError, match=f"^{fn.__name__}: x must not ask for a gradient"):
            fn(x, INDICES.to(device), OFFS.to(device))
