"""quantize_rows, quantize_tokens and quantize_both in every format: byte equality with the reference."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    CORRECTNESS_MKE,
    FP8_DTYPES,
    INPUT_DTYPES,
    LAYOUTS,
    assert_same,
    check_cuda_graph,
    check_two_streams,
    corrupt_offs,
    group_offs,
    misaligned,
    pairs,
    short,
    strided_2d,
    wide,
)
from hypothesis import given
from hypothesis import strategies as st
from quantizers import ALIGNS, CASTS, GENERIC, RULES, check_activation, count_nans, line_blocks
from torch import Tensor

from moe_fp8_ext import ops, reference
from moe_fp8_ext.reference.numerics import E8M0, FORMATS, row_major

every_format = pytest.mark.parametrize("format", FORMATS)


def offsets(*ends: int, device: str) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=device)


# Dtypes, groups and sizes


@pytest.mark.parametrize(*pairs(rule=RULES, cast=CASTS, generic=GENERIC), ids=short)
def test_dtypes(rule, cast, generic, device):
    """Fast kernels take 16-byte boundaries and the GPU's own FP8 formats. A generic kernel takes all other inputs."""
    x = wide(140, 304, dtype=cast[0], device=device)
    for view in (x, generic(x)):
        check_activation(view, rule[0], group_offs("zipf", 140, 3, device), dtype=cast[1], rounding=rule[1])


@pytest.mark.parametrize(*pairs(layout=LAYOUTS, shape=CORRECTNESS_MKE, format=list(FORMATS)), ids=short)
def test_group_layouts(layout, shape, format, device):
    m, k, e = shape
    check_activation(wide(m, k, device=device), format, group_offs(layout, m, e, device))


@pytest.mark.parametrize(("format", "align"), ALIGNS)
def test_align(format, align, device):
    for layout in LAYOUTS:
        check_activation(wide(301, 40, device=device), format, group_offs(layout, 301, 6, device), align)


@every_format
@pytest.mark.parametrize(
    "shape", [(0, 0, 0), (0, 0, 3), (5, 0, 2), (0, 5, 2), (5, 3, 0), (1, 1, 1), (3, 1, 1), (300, 128, 0)], ids=short
)
def test_zero_sizes(shape, format, device):
    m, k, e = shape
    check_activation(wide(m, k, device=device), format, group_offs("uniform", m, e, device))


@every_format
@pytest.mark.parametrize(
    "k",
    [1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 1023, 1024, 1025, 2880, 9001],
)
def test_widths(k, format, device):
    for dtype in (torch.bfloat16, torch.float32):
        check_activation(wide(37, k, dtype=dtype, device=device), format, group_offs("zipf", 37, 2, device))


@every_format
def test_group_sizes_around_every_block(format, device):
    sizes = [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 0, 160, 255, 256, 257, 1]
    offs = torch.tensor(sizes, device=device).cumsum(0).int()
    x = wide(sum(sizes) + 5, 136, device=device)
    for align in (32, 128, *([1, 256] if FORMATS[format].aligns[0] == 1 else [64])):
        check_activation(x, format, offs, align)


@every_format
def test_longest_and_most_groups(format, device):
    check_activation(wide(9001, 40, device=device), format, offsets(9001, device=device))
    for m, align in ((0, None), (1500, None), (700, FORMATS[format].aligns[1])):
        check_activation(wide(m, 24, device=device), format, group_offs("zipf", m, 1024, device), align)


@pytest.mark.parametrize("short_ones, long", [(64, 4000), (7, 4000), (7, 30000), (2, 40000)])
def test_one_long_group_among_tiny_and_empty_ones(short_ones, long, device):
    """Kernels plan for the average group. So strips are planned for several blocks a multiprocessor, for one block, and
    for clusters of some or of most blocks. In each plan one strip is longer than all that its blocks can hold."""
    sizes = torch.tensor([0, 1, 5, 130, 17, 0, 3]).repeat(10)[:short_ones]
    offs = torch.cat([sizes[: short_ones // 2], torch.tensor([long]), sizes[short_ones // 2 :]]).cumsum(0).int()
    for tail, align in ((0, None), (70, 8)):
        x = wide(int(offs[-1]) + tail, 72, device=device)
        check_activation(x, "rowwise", offs.to(device), align)


@pytest.mark.parametrize(
    "sizes",
    [
        (20000, 9000, 0, 35000, 2, 15000),
        (120000, 1, 3000),
        (13000, 13000, 13000),
        (7000, 3300, 1500, 700, 300, 40, 0, 12000),
        (300000, 200, 1),
        (75000, 75000, 75000, 75000),
    ],
)
def test_long_groups_beside_one_another(sizes, device):
    """A GPU shares a long strip among several clusters, which make several rounds at these sizes. It gives short strips
    to one cluster, as many as the cluster has room for. The longest strip exceeds all shared memory."""
    offs = torch.tensor(sizes).cumsum(0).int().to(device)
    torch.full((1 << 20,), -1, device=device)  # the op's next allocation holds these bits
    x = wide(int(offs[-1]) + 500, 328 if device == "cuda" else 40, device=device)
    check_activation(x, "rowwise", offs)
    permutation = torch.randperm(len(x), device=device).int()
    got = ops.quantize_tokens(x, "rowwise", offs=offs, indices=permutation, top_k=1)
    assert_same(got, ops.quantize_tokens(x[permutation.long()], "rowwise", offs=offs), "by index")


@pytest.mark.parametrize("layout", ["uniform", "zipf"])
def test_rows_in_step_with_columns(layout, gpu):
    """x is several times as large as the L2. Both directions in one call have the bytes that each has alone."""
    e, n, k = 128, 2048, 1024
    x = torch.randn(e * n, k, device=gpu, dtype=torch.bfloat16)
    offs = group_offs(layout, e * n, e, gpu)
    both = ops.quantize_both(x, "rowwise", offs=offs)
    assert_same(both[:2], ops.quantize_rows(x, "rowwise"), "rows")
    assert_same(both[2:], ops.quantize_tokens(x, "rowwise", offs=offs), "tokens")
    if layout == "uniform":
        q, scale, q_t, scale_t, _ = (t.view(torch.uint8) for t in both)
        want = q, scale, q_t[:, : len(x)].reshape(k, e, n).transpose(0, 1), scale_t
        got = ops.quantize_weight(x.view(e, n, k), "rowwise")
        assert all(torch.equal(g.view(torch.uint8).view_as(w), w) for g, w in zip(got, want, strict=True))


def test_long_groups_in_graphs_and_streams(gpu):
    """Group sizes change between replays. Two grids run side by side, so neither has the GPU to itself."""

    def quantize(x: Tensor, offs: Tensor) -> tuple[Tensor, ...]:
        return ops.quantize_both(x, "rowwise", offs=offs)

    x = wide(30000, 328, device=gpu)
    one, other = (torch.tensor(ends).int().to(gpu) for ends in ((20000, 20001, 30000), (100, 29000, 29999)))
    calls = [(x, one), (x.flip(0), other)]
    check_cuda_graph(quantize, *calls)
    check_two_streams(quantize, calls)


def test_many_rows_without_columns(device):
    """Without columns, blocks send no messages and have no mailbox."""
    x = torch.empty(40000, 8, dtype=torch.bfloat16, device=device)[:, :0]
    offs = torch.tensor([30, 39000, 40000], dtype=torch.int32, device=device)
    assert_same(ops.quantize_both(x, "rowwise", offs=offs), reference.quantize_both(x, "rowwise", offs=offs))


@pytest.mark.parametrize("sizes", [(20000, 1, 9999), (15000, *[260] * 19)], ids=["clusters", "single blocks"])
def test_long_groups_while_another_stream_holds_multiprocessors(sizes, gpu):
    """A softmax has one long-running block for every row. It keeps most blocks that share a strip from running, and the
    other blocks finish without them."""
    x, offs = wide(sum(sizes), 1024), torch.tensor(sizes).cumsum(0).int()
    want = ops.quantize_both(x, "rowwise", offs=offs, dtype=torch.float8_e4m3fn)
    x, offs, side = x.to(gpu), offs.to(gpu), torch.cuda.Stream()
    held = torch.cuda.get_device_properties(gpu).multi_processor_count * 3 // 4
    rows = torch.zeros(held, 2**23, dtype=torch.bfloat16, device=gpu)
    for op, results in ((ops.quantize_both, want), (ops.quantize_tokens, want[2:])):
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            for _ in range(5):
                rows.softmax(1)
        got = op(x, "rowwise", offs=offs, dtype=torch.float8_e4m3fn)
        assert_same([t.cpu() for t in got], list(results), "beside another kernel")


@every_format
def test_corrupt_offsets(format, device):
    for m in (1, 37, 200):
        for offs in corrupt_offs(m, device):
            check_activation(wide(m, 50, device=device), format, offs)


@pytest.mark.parametrize("m", [1, 2, 31, 32, 33, 127, 128, 129, 300])
def test_every_byte_of_blocked_padding_is_zero(m, device):
    """Outputs are 0xFF before the op. The reference's padding is zero, so equality shows that all padding is
    written."""
    for k, e in ((1, 1), (1, 20), (130, 3), (1100, 1), (1100, 20)):
        check_activation(wide(m, k, device=device), "mxfp8", group_offs("uniform", m, e, device))


@pytest.mark.parametrize("m", [1, 2, 31, 33, 130])
@pytest.mark.parametrize("gather", [False, True])
def test_memory_between_column_major_scales_is_zero(m, gather, device):
    for k in (133, 136, 264):
        x, offs = wide(m, k, device=device), group_offs("zipf", m, 3, device)
        source = {"indices": torch.arange(m, dtype=torch.int32, device=device), "top_k": 1} if gather else {}
        of_both = ops.quantize_both(x, "blockwise", offs=offs, **source)
        of_rows = ops.quantize_rows(x, "blockwise", **source)
        of_tokens = ops.quantize_tokens(x, "blockwise", offs=offs, **source)
        for scale in (of_both[1], of_both[3], of_rows[1], of_tokens[1]):
            rows, columns = scale.shape
            assert scale.stride() == (1, -(-rows // 4) * 4)
            assert not scale.as_strided((scale.stride(1), columns), scale.stride())[rows:].any()


@given(
    m=st.integers(0, 400),
    k=st.integers(0, 300),
    offs=st.lists(st.one_of(st.integers(0, 400), st.integers(-(2**31), 2**31 - 1)), max_size=9),
    sort=st.booleans(),
    rule=st.sampled_from(RULES),
    align=st.sampled_from([1, 4, 16, 32, 64, 128, 256, None]),
    cast=st.sampled_from(CASTS),
)
def test_any_groups(m, k, offs, sort, rule, align, cast, device):
    format, rounding = rule
    offs = torch.tensor(sorted(offs) if sort else offs, dtype=torch.int32, device=device)
    x, align = wide(m, k, dtype=cast[0], device=device), align if (format, align) in ALIGNS else None
    check_activation(x, format, offs, align, dtype=cast[1], rounding=rounding)


# Strides and alignment


@pytest.mark.parametrize(*pairs(dtype=INPUT_DTYPES, format=list(FORMATS)), ids=short)
def test_strides_and_alignment(dtype, format, device):
    x, offs = wide(70, 256, dtype=dtype, device=device), group_offs("tail_rows", 70, 3, device)
    for _, view in strided_2d(x):
        check_activation(view, format, offs)
    for elements in range(1, 9):
        check_activation(misaligned(x, elements), format, offs)
    check_activation(x[:1].expand(70, 256), format, misaligned(offs))


@pytest.mark.parametrize(
    "shape", [(0,), (1,), (17,), (2, 0, 8), (2, 3, 40), (2, 1, 3, 16), (1, 2, 1, 2, 1, 2, 9), (4, 33, 129)], ids=short
)
def test_leading_dimensions(shape, device):
    x = wide(*shape, device=device)
    assert_same(ops.quantize_rows(x, "rowwise"), reference.quantize_rows(x, "rowwise"))


@given(
    shape=st.lists(st.integers(0, 20), min_size=0, max_size=3),
    k=st.integers(0, 300),
    cast=st.sampled_from(CASTS),
    rounding=st.sampled_from(["exact", "pow2"]),
)
def test_any_leading_dimensions(shape, k, cast, rounding, device):
    x, kwargs = wide(*shape, k, dtype=cast[0], device=device), {"dtype": cast[1], "rounding": rounding}
    assert_same(ops.quantize_rows(x, "rowwise", **kwargs), reference.quantize_rows(x, "rowwise", **kwargs))


def test_leading_strides(device):
    x, w = wide(6, 5, 4, 48, device=device), wide(4, 9, device=device)
    views = [x.transpose(0, 1), x.permute(2, 0, 1, 3), x[:, ::2, 1:], x[:1].expand(6, 5, 4, 48)]
    for view in (*views, x[0, 0, 0].expand(7, 48), w[:1].t(), w[:, 3:4]):
        assert_same(ops.quantize_rows(view, "rowwise"), reference.quantize_rows(view, "rowwise"), f"{view.stride()}")


@pytest.mark.parametrize("k", [*range(1, 36), 4095, 8191, 8193, 20001])
def test_row_lengths(k, device):
    for dtype in (torch.bfloat16, torch.float32):
        x = wide(3, k, dtype=dtype, device=device)
        assert_same(ops.quantize_rows(x, "rowwise"), reference.quantize_rows(x, "rowwise"))


@pytest.mark.parametrize("format", ["rowwise", "blockwise"])
def test_more_rows_than_a_launch_has(format, gpu):
    x = wide(9_000_001, 8, device=gpu)
    assert_same(ops.quantize_rows(x, format), reference.quantize_rows(x, format))


# Properties between ops


@pytest.mark.parametrize("format", ["rowwise", "blockwise", "mxfp8_rowmajor"])
def test_tokens_are_rows_of_each_transposed_group(format, device):
    x, ends = wide(300, 40, device=device), (130, 130, 297)
    q_t, scale_t, padded_offs = ops.quantize_tokens(x, format, offs=offsets(*ends, device=device), align=32)
    assert padded_offs.tolist() == [160, 160, 352]
    block = start = at = 0
    for e, (end, padded_end) in enumerate(zip(ends, padded_offs.tolist(), strict=True)):
        q, scale = ops.quantize_rows(row_major(x[start:end].t()), format)
        assert_same(row_major(q_t[:, at : at + end - start]), q, f"group {e}")
        assert not q_t[:, at + end - start : padded_end].view(torch.uint8).any()
        if format == "rowwise":
            assert_same(scale_t[e], scale, f"scales of group {e}")
        else:
            got, blocks = scale_t[:, block : block + scale.shape[1]], FORMATS[format].group_blocks(end - start, 32)
            assert_same(row_major(got), row_major(scale), f"scales of group {e}")
            assert not row_major(scale_t[:, block + scale.shape[1] : block + blocks]).view(torch.uint8).any()
            block += blocks
        start, at = end, padded_end


def test_blocked_scales_are_swizzled_row_major_ones(device):
    x, offs = wide(500, 200, device=device), group_offs("zipf", 500, 6, device)
    q, scale, q_t, scale_t, padded_offs = ops.quantize_both(x, "mxfp8_rowmajor", offs=offs)
    of_rows, _ = ops.swizzle_scales(scale, groups="rows", offs=offs)
    of_tokens, _ = ops.swizzle_scales(scale_t, groups="columns", offs=padded_offs // 32)
    assert_same(ops.quantize_both(x, "mxfp8", offs=offs), (q, of_rows, q_t, of_tokens, padded_offs))
    assert_same(ops.quantize_rows(x, "mxfp8"), (q, ops.swizzle_scales(scale)[0]))


# NaN and Inf


@every_format
@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=short)
def test_what_is_not_finite_poisons_its_blocks_only(fp8, format, device):
    """NaN and Inf poison each block of their row, and of their column within their group. No other byte changes."""
    clean, ends, f = wide(600, 300, device=device), (300, 500), FORMATS[format]
    offs, groups = offsets(*ends, device=device), [slice(0, 300), slice(300, 500)]
    bad = {(1, 5): torch.nan, (299, 290): -torch.inf, (300, 5): torch.inf, (410, 131): torch.nan, (550, 8): torch.inf}
    x = clean.clone()
    for place, value in bad.items():
        x[place] = value
    check_activation(x, format, offs, dtype=fp8)
    want = reference.quantize_both(clean, format, offs=offs, dtype=fp8)
    q, scale, q_t, scale_t, padded_offs = ops.quantize_both(x, format, offs=offs, dtype=fp8)
    of_rows, of_tokens = (torch.zeros(t.shape, dtype=torch.bool, device=device) for t in (q, q_t))
    blocks, places = set(), [0, int(padded_offs[0])]
    for row, k in bad:
        [block] = [b for b in line_blocks(f, 300) if b.start <= k < b.stop]
        of_rows[row, block] = True
        for e, group in enumerate(groups):
            for b in line_blocks(f, group.stop - group.start):
                if b.start <= row - group.start < b.stop:
                    of_tokens[k, places[e] + b.start : places[e] + b.stop] = True
                    blocks.add((e, b.start, k))
    assert count_nans(scale) == len(bad) - (format == "mxfp8")  # mxfp8 has no scales of the tail
    assert count_nans(scale_t) == len(blocks) == 4
    for got, wanted, poisoned in ((q, want[0], of_rows), (q_t, want[2], of_tokens)):
        assert torch.equal(got.float().isnan(), poisoned)
        assert torch.equal(got.view(torch.uint8)[~poisoned], wanted.view(torch.uint8)[~poisoned])


def test_special_bytes_of_e8m0(device):
    """A block of zeros has the scale byte 0. A block with NaN or Inf has 255, and NaN values. Its neighbours do not
    change."""
    x = torch.zeros(4, 96, dtype=torch.bfloat16, device=device)
    x[1], x[2, 40], x[3, 95] = 448.0, torch.nan, torch.inf
    q, scale = ops.quantize_rows(x, "mxfp8_rowmajor")
    assert scale.dtype == E8M0
    assert scale.view(torch.uint8).tolist() == [[0, 0, 0], [127, 127, 127], [0, 255, 0], [0, 0, 255]]
    assert (q[1].float() == 448).all()


# More than 2^31 elements


@pytest.mark.large
@every_format
def test_rows_of_more_than_2_31_elements(format, big_gpu):
    """Rows are whole or odd numbers of vectors. swizzle_scales defines the expected blocked scales."""
    for m, k in ((524_291, 4_099), (524_400, 4_096)):
        x = torch.randn(m, k, dtype=torch.bfloat16, device=big_gpu)
        assert x.numel() > 2**31
        q, scale = ops.quantize_rows(x, format)
        if format == "mxfp8":
            scale = ops.unswizzle_scales(scale, m, -(-k // 32))
        plain = "mxfp8_rowmajor" if format == "mxfp8" else format
        for start in range(0, m, 65_536):
            rows = slice(start, start + 65_536)
            want_q, want_scale = reference.quantize_rows(x[rows], plain)
            assert_same(q[rows], want_q, f"rows from {start}")
            assert_same(scale[rows].contiguous(), want_scale.contiguous(), f"scales of rows from {start}")


@pytest.mark.large
def test_row_stride_reaches_beyond_2_31(big_gpu):
    x = torch.randn(5, 2**29 + 5, dtype=torch.bfloat16, device=big_gpu)[:, :1000]
    for format in FORMATS:
        assert_same(ops.quantize_rows(x, format), reference.quantize_rows(x, format), format)


@pytest.mark.large
@every_format
@pytest.mark.parametrize("op", ["quantize_tokens", "quantize_both"])
def test_tokens_of_more_than_2_31_elements(op, format, big_gpu):
    m, k, e = 524_400, 4_104, 7
    x = torch.randn(m, k, dtype=torch.bfloat16, device=big_gpu)
    assert x.numel() > 2**31
    offs = group_offs("uniform", m, e, big_gpu)
    *of_rows, q_t, scale_t, padded_offs = getattr(ops, op)(x, format, offs=offs)
    if format == "mxfp8":
        p = q_t.shape[1] // 32
        scale_t = ops.unswizzle_scales(scale_t, k, p, groups="columns", offs=padded_offs // 32)
    plain = "mxfp8_rowmajor" if format == "mxfp8" else format
    for columns in (slice(0, 128), slice(2_048, 2_112), slice(4_096, None)):
        want = reference.quantize_tokens(x[:, columns].contiguous(), plain, offs=offs)
        got = scale_t[:, columns] if format == "rowwise" else scale_t[columns]
        assert_same((q_t[columns], padded_offs), want[::2], f"columns {columns}")
        assert_same(got.contiguous(), want[1].contiguous(), f"scales of columns {columns}")
    if of_rows:
        assert_same(of_rows, ops.quantize_rows(x, format, offs=offs))
