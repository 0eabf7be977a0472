"""dequantize: the operands of every quantizer back, byte for byte as the reference has them."""

from __future__ import annotations

import pytest
import torch
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
    flushed_subnormals,
    group_offs,
    misaligned,
    on,
    short,
    strided_2d,
    wide,
)
from quantized import GROUPED, OPERANDS, operand
from torch import Tensor

from moe_fp8_ext import dequantize, reference, shapes

E4M3 = torch.float8_e4m3fn
E8M0 = torch.float8_e8m0fnu
NO_GROUPS = torch.zeros(0, dtype=torch.int32)


def check(args: list[object], out_dtype: torch.dtype | None = None) -> Tensor:
    args = [*args, None][:4]
    got = dequantize(*args, out_dtype)
    assert_same(got, reference.dequantize(*args, out_dtype), f"{args[2]} {short(args[0].shape)}")
    return got


@pytest.mark.parametrize("kind", OPERANDS)
@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=short)
@pytest.mark.parametrize("out_dtype", [None, *INPUT_DTYPES], ids=short)
def test_formats(kind, fp8, out_dtype, device):
    for m, k in ((70, 136), (67, 301)):
        check(operand(kind, wide(m, k, device=device), group_offs("zipf", m, 3, device), fp8), out_dtype)


@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_group_layouts(kind, layout, device):
    for m, k, e in CORRECTNESS_MKE:
        if m <= 300:
            for align in (32, 128, 256):
                check(operand(kind, wide(m, k, device=device), group_offs(layout, m, e, device), align=align))


@pytest.mark.parametrize("kind", OPERANDS)
def test_odd_sizes(kind, device):
    for m, k in ((0, 0), (0, 5), (5, 0), (1, 1), (1, 33), (33, 1), (129, 127), (3, 1025), (260, 31), (300, 520)):
        x = wide(m, k, device=device)
        for offs in (NO_GROUPS.to(device), *(group_offs("tail_rows", m, e, device) for e in (1, 4))):
            check(operand(kind, x, offs))


def test_gives_back_what_was_quantized(device):
    """Within half a unit of the format's 3 bits, of amax where values are subnormal, and bfloat16's own rounding."""
    x, offs = wide(300, 256, device=device), group_offs("tail_rows", 300, 3, device)
    for kind in OPERANDS:
        args = operand(kind, x, offs)
        got = check(args, torch.float32)
        rows = int(offs[-1]) if len(args) == 4 and args[3] is not None else 300
        if kind in ("colwise", "128x1", "32x1_blocked"):
            sizes = torch.diff(offs, prepend=offs[:1] * 0).tolist()
            ends = args[3].tolist()
            starts = [0, *ends[:-1]]
            got = torch.cat([got[:, s : s + n] for s, n in zip(starts, sizes, strict=True)], 1).t()
        else:
            got = got.reshape(-1, *x.shape)[0]
        want = x[:rows].float()
        assert ((got[:rows] - want).abs() <= want.abs() / 16 + want.abs().max() * 2.0**-10).all(), kind


def test_leading_dimensions(device):
    x = wide(6, 5, 4, 72, device=device)
    for layout in ("rowwise", "1x32"):
        quantize = reference.quantize_rowwise if layout == "rowwise" else reference.quantize_mx
        args = (E4M3,) if layout == "rowwise" else (E4M3, "rceil")
        for view in (x, x[0, 0, 0], x[:, :0], x[0], x[None, :, None]):
            check([*quantize(view, *args), layout])
        q, scale = quantize(x, *args)
        for order in ((1, 0, 2), (2, 0, 1)):
            check([q.permute(*order, 3), scale.permute(*order, *range(3, scale.ndim)).contiguous(), layout])


@pytest.mark.parametrize("kind", OPERANDS)
def test_strides_and_alignment(kind, device):
    q, scale, layout, *offs = operand(kind, wide(37, 64, device=device), group_offs("zipf", 37, 3, device))
    flat = q.reshape(-1, q.shape[-1])
    for elements in (1, 2, 4, 8):
        check([misaligned(q, elements), misaligned(scale.contiguous(), elements), layout, *offs])
    for _, view in strided_2d(flat.view(torch.uint8)):
        view = view.view(q.dtype)
        if q.ndim == 2:
            check([view, scale, layout, *offs])
    if q.ndim == 3:
        wide_rows = torch.zeros(*q.shape[:2], q.shape[2] + 16, dtype=torch.uint8, device=device).view(q.dtype)
        wide_rows[..., : q.shape[2]] = q
        check([wide_rows[..., : q.shape[2]], scale, layout])
    if layout in ("1x128", "128x1", "128x128"):
        check([q, scale.contiguous(), layout, *offs])
        check([q, scale.repeat_interleave(2, -1)[..., ::2], layout, *offs])


def test_transposed_squares(device):
    _, q_t, scale = reference.quantize_128x128(wide(2, 200, 300, device=device))
    check([q_t, scale.mT, "128x128"])


@pytest.mark.parametrize("out_dtype", INPUT_DTYPES, ids=short)
@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=short)
def test_every_scale_byte_of_every_code(fp8, out_dtype, device):
    """2^-127 is a subnormal, 2^127 overflows with most codes, 255 is NaN; row-major and blocked, aligned and not."""
    q = torch.arange(256, dtype=torch.uint8, device=device).view(fp8).expand(256, 256)
    scale = torch.arange(256, dtype=torch.uint8, device=device)[:, None].expand(256, 8).contiguous().view(E8M0)
    got = check([q, scale, "1x32"], out_dtype)
    assert got[255].isnan().all()
    assert_same(check([q, reference.swizzle_scales_2d(scale), "1x32_blocked"], out_dtype), got)
    assert_same(check([misaligned(q), scale, "1x32"], out_dtype), got)


@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=short)
def test_flushed_subnormals_change_nothing(fp8):
    q = torch.arange(256, dtype=torch.uint8).view(fp8).expand(40, 256)
    scale = torch.arange(40, dtype=torch.uint8)[:, None].expand(40, 8).contiguous().view(E8M0)
    for out_dtype in INPUT_DTYPES:
        want = reference.dequantize(q, scale, "1x32", None, out_dtype)
        with flushed_subnormals():
            got = dequantize(q, scale, "1x32", None, out_dtype)
        assert_same(got, want)


def test_nan_stays_in_its_block(device):
    x, offs = wide(200, 256, device=device), group_offs("uniform", 200, 2, device)
    x[3, 5], x[150, 200] = float("nan"), float("inf")
    for kind in OPERANDS:
        assert check(operand(kind, x, offs)).isnan().any()


def test_nothing_of_the_tail_is_read(device):
    for kind in GROUPED:
        q, scale, layout, offs = operand(kind, wide(96, 64, device=device), group_offs("tail_rows", 96, 3, device))
        end = int(offs[-1])
        tail = q[end:] if layout == "1x32_blocked" else q[:, end:]
        tail.view(torch.uint8).fill_(0x7F)
        out = check([q, scale, layout, offs])
        assert not (out[end:] if layout == "1x32_blocked" else out[:, end:]).any()


def test_corrupt_offsets_stay_in_bounds(device):
    for p in (80, 160):
        for offs in corrupt_offs(p, device):
            e = len(offs)
            q = torch.randint(0, 126, (45, p), dtype=torch.uint8, device=device).view(E4M3)
            check([q, torch.rand(e, 45, device=device), "colwise", offs])
            check([q, torch.rand(45, p // 128 + 1 + e, device=device), "128x1", offs])
            dequantize(q, torch.rand(45, p // 128 + 1, device=device), "128x1", offs)  # too few blocks: any numbers
            sizes = shapes.swizzle_scales_k_groups((45, -(-p // 32)), e)
            check([q, torch.randint(0, 255, sizes, dtype=torch.uint8, device=device).view(E8M0), "32x1_blocked", offs])
            sizes = shapes.swizzle_scales_m_groups((p, 2), e)
            scale = torch.randint(0, 255, sizes, dtype=torch.uint8, device=device).view(E8M0)
            check([q.t().contiguous(), scale, "1x32_blocked", offs])


def test_groups_of_any_size(device):
    """Groups that are not padded: pieces of a vector belong to several of them."""
    offs = torch.tensor([3, 4, 4, 37, 100, 103], dtype=torch.int32, device=device)
    q = torch.randint(0, 126, (50, 128), dtype=torch.uint8, device=device).view(E4M3)
    check([q, torch.rand(6, 50, device=device), "colwise", offs])
    check([q, torch.rand(50, 7, device=device), "128x1", offs])
    scale = torch.randint(100, 150, (128, 4 + 24), dtype=torch.uint8, device=device).view(E8M0)
    check([q, scale, "32x1_blocked", offs])


def test_most_experts(device):
    e = shapes.MAX_EXPERTS
    for kind in ("colwise", "32x1_blocked", "1x32_blocked rows"):
        check(operand(kind, wide(1500, 24, device=device), group_offs("zipf", 1500, e, device)))


@pytest.mark.large
def test_more_than_2_31_elements(big_gpu):
    m, k = 524_400, 4_096
    q = torch.randint(0, 126, (m, k), dtype=torch.uint8, device=big_gpu).view(E4M3)
    scale = torch.rand(m, k // 128, device=big_gpu)
    out = dequantize(q, scale, "1x128")
    for start in range(0, m, 65_536):
        rows = slice(start, start + 65_536)
        assert_same(out[rows], reference.dequantize(q[rows], scale[rows], "1x128"), f"rows from {start}")


def some_calls(device: str, m: int = 96) -> list[list[object]]:
    x, offs = wide(m, 72, device=device), group_offs("zipf", m, 3, device)
    return [[*operand(kind, x, offs), None][:4] for kind in OPERANDS]


def test_opcheck(device):
    for args in some_calls(device):
        check_opcheck("dequantize", args, out_dtype=torch.float32)


def test_autocast_changes_nothing(device):
    with torch.autocast(device, dtype=torch.bfloat16):
        for args in some_calls(device):
            check(args, torch.float32)


def test_deterministic(device):
    for args in some_calls(device, 301):
        check_deterministic(dequantize, args)


@pytest.mark.parametrize("kind", ["rowwise", "1x128", "1x32", "1x32_blocked rows"])
def test_compiles_with_dynamic_rows(kind, device):
    def call(q: Tensor, scale: Tensor, offs: Tensor) -> Tensor:
        return dequantize(q, scale, kind.split()[0], offs if "rows" in kind else None)

    calls = []
    for m in (50, 64, 131):
        offs = group_offs("zipf", m, 3, device)
        q, scale, *_ = operand(kind, wide(m, 64, device=device), offs)
        calls.append([q, scale.contiguous(), offs])
    check_compiled(call, calls, device, dynamic=(0, 1))


def test_cuda_graph(gpu):
    for first, later in zip(some_calls(gpu), some_calls(gpu), strict=True):
        check_cuda_graph(dequantize, first, later)


def test_two_streams(gpu):
    check_two_streams(dequantize, some_calls(gpu, 2000)[:2])


def test_stream_order(gpu):
    for kind in ("rowwise", "colwise", "1x32_blocked rows"):
        offs = group_offs("zipf", 2000, 3, gpu)
        calls = [[*operand(kind, wide(2000, 512, device=gpu, seed=s), offs), None][:4] for s in range(4)]
        check_stream_order(lambda *args: [dequantize(*args)], calls)


def test_second_gpu(second_gpu):
    for args in some_calls("cpu"):
        check_second_gpu(lambda *args: [dequantize(*args)], args, second_gpu)


OFFS = torch.tensor([2, 4], dtype=torch.int32)
Q = torch.zeros(4, 40, dtype=E4M3)
Q3 = torch.zeros(2, 4, 40, dtype=E4M3)


def e8m0(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(E8M0)


@pytest.mark.parametrize(
    ("args", "argument", "got"),
    [
        ([Q, torch.ones(4), "columnwise"], "layout", "columnwise"),
        ([Q.float(), torch.ones(4), "rowwise"], "q", "float32"),
        ([Q3.new_zeros([1] * 8), torch.ones([1] * 7), "rowwise"], "q", "8"),
        ([Q[0], torch.ones(4, 1), "1x128"], "q", "1"),
        ([Q3, torch.ones(4, 1), "1x128"], "q", "3"),
        ([Q, torch.ones(4, 1), "128x128"], "q", "2"),
        ([Q[0], e8m0(128, 4), "1x32_blocked"], "q", "1"),
        ([Q[:, ::2], torch.ones(4), "rowwise"], "q", "stride 2"),
        ([Q, torch.ones(4).half(), "rowwise"], "scale", "float16"),
        ([Q, torch.ones(4, 2), "1x32"], "scale", "float32"),
        ([Q, e8m0(4), "rowwise"], "scale", "float8_e8m0fnu"),
        ([Q, torch.ones(4, 1), "rowwise"], "scale", "2"),
        ([Q, torch.ones(3), "rowwise"], "scale", "3"),
        ([Q, torch.ones(8)[::2], "rowwise"], "scale", "stride 2"),
        ([Q, torch.ones(4, 2), "1x128"], "scale", "2"),
        ([Q, torch.ones(2, 5), "colwise", OFFS], "scale", "5"),
        ([Q, torch.ones(4, 0), "128x1", OFFS], "scale", "0"),
        ([Q3, torch.ones(2, 1, 2), "128x128"], "scale", "2"),
        ([Q, e8m0(4, 1), "1x32"], "scale", "1"),
        ([Q, e8m0(128, 2), "1x32_blocked"], "scale", "2"),
        ([Q, e8m0(128, 4), "1x32_blocked", OFFS], "scale", "128"),
        ([Q3, e8m0(2, 511), "1x32_blocked"], "scale", "511"),
        ([Q, e8m0(128, 4), "32x1_blocked", OFFS], "scale", "4"),
        ([Q, e8m0(4, 128).t(), "1x32_blocked"], "scale", "stride 1"),
        ([Q, torch.ones(2, 4), "colwise"], "offs", "None"),
        ([Q, torch.ones(4), "rowwise", OFFS], "offs", "tensor"),
        ([Q3, e8m0(2, 512), "1x32_blocked", OFFS], "offs", "tensor"),
        ([Q, torch.ones(2, 4), "colwise", OFFS.long()], "offs", "int64"),
        ([Q, torch.ones(4), "rowwise", None, torch.float64], "out_dtype", "float64"),
    ],
)
def test_errors(args, argument, got, device):
    check_error("dequantize", on(device, args), argument, got)


def test_error_other_device(device):
    other = "cpu" if device == "cuda" else "meta"
    args = on(device, [Q, torch.ones(2, 4), "colwise", OFFS])
    for i, argument in ((1, "scale"), (3, "offs")):
        check_error("dequantize", [*args[:i], args[i].to(other), *args[i + 1 :]], argument, other)
