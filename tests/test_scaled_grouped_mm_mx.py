"""scaled_grouped_mm with an E8M0 scale for every block of 32, blocked as Blackwell's tensor cores read them: MXFP8."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    FP8_DTYPES,
    LAYOUTS,
    assert_same,
    check_compiled,
    check_cuda_graph,
    check_deterministic,
    check_error,
    check_opcheck,
    check_second_gpu,
    check_two_streams,
    corrupt_offs,
    group_offs,
    misaligned,
    on,
    short,
    sqnr_db,
    wide,
)
from torch import Tensor

from moe_fp8_ext import dequantize, reference, scaled_grouped_mm, shapes

E4M3 = torch.float8_e4m3fn
E8M0 = torch.float8_e8m0fnu


def ternary(*shape: int, dtype: torch.dtype = E4M3) -> Tensor:
    """Values in {-1, 0, 1}: with scales that are powers of two near 1, bfloat16 operands and float32 sums are exact."""
    return torch.randint(-1, 2, shape).float().to(dtype)


def scales(*shape: int) -> Tensor:
    return torch.randint(125, 130, shape, dtype=torch.uint8).view(E8M0)


def blocks(size: int) -> int:
    return -(-size // 32)


def exact_2d3d(m: int, k: int, n: int, offs: Tensor, device: str, dtypes=(E4M3, E4M3)) -> list[object]:
    e = len(offs)
    a, b = ternary(m, k, dtype=dtypes[0]), ternary(e, n, k, dtype=dtypes[1]).mT
    scale_a = scales(*shapes.swizzle_scales_m_groups((m, blocks(k)), e))
    scale_b = scales(*shapes.swizzle_scales_3d((e, n, blocks(k))))
    return [*on(device, [a, b, scale_a, scale_b, offs]), None, True, 32]


def exact_2d2d(p: int, k: int, n: int, offs: Tensor, device: str, dtypes=(E4M3, E4M3)) -> list[object]:
    a_t, x_t = ternary(n, p, dtype=dtypes[0]), ternary(k, p, dtype=dtypes[1])
    of_a, of_b = (scales(*shapes.swizzle_scales_k_groups((rows, blocks(p)), len(offs))) for rows in (n, k))
    return [*on(device, [a_t, x_t.t(), of_a, of_b, offs]), None, True, 32]


def check_exact(args: list[object], out_dtype: torch.dtype | None = None) -> Tensor:
    args[5] = out_dtype
    got = scaled_grouped_mm(*args)
    assert_same(got + 0.0, reference.scaled_grouped_mm(*args) + 0.0)  # -0 is 0
    return got


@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=short)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_is_exact_on_integers(layout, out_dtype, device):
    for m, k, n, e in ((200, 64, 48, 5), (131, 100, 33, 4), (7, 16, 16, 3), (300, 272, 144, 1), (300, 400, 256, 3)):
        offs = group_offs(layout, m, e)
        out = check_exact(exact_2d3d(m, k, n, offs, device), out_dtype)
        assert not out[int(offs[-1]) :].any()
        check_exact(exact_2d2d(m, k, n, offs, device), out_dtype)
        whole = group_offs(layout, m // 32, e) * 32
        out = check_exact(exact_2d2d(m // 32 * 32, 64, 48, whole, device), out_dtype)
        sizes = torch.diff(whole, prepend=torch.zeros(1, dtype=torch.int32))
        assert not out[(sizes == 0).to(device)].any()


@pytest.mark.parametrize("a_dtype", FP8_DTYPES, ids=short)
@pytest.mark.parametrize("b_dtype", FP8_DTYPES, ids=short)
def test_formats(a_dtype, b_dtype, device):
    for k in (224, 100):
        check_exact(exact_2d3d(90, k, 48, group_offs("zipf", 90, 3), device, (a_dtype, b_dtype)))
        check_exact(exact_2d2d(224, k, 48, group_offs("zipf", 7, 3) * 32, device, (a_dtype, b_dtype)))


def test_sizes_of_nothing(device):
    for m, k, n, e in ((0, 32, 16, 2), (5, 0, 16, 2), (5, 16, 0, 2), (5, 16, 16, 0), (1, 1, 1, 1)):
        check_exact(exact_2d3d(m, k, n, group_offs("uniform", m, e), device))
        check_exact(exact_2d2d(m, k, n, group_offs("uniform", m, e), device))


def test_most_experts(device):
    e = shapes.MAX_EXPERTS
    check_exact(exact_2d3d(1500, 32, 16, group_offs("zipf", 1500, e), device))
    check_exact(exact_2d2d(32 * 1100, 16, 16, group_offs("zipf", 1100, e) * 32, device))


def test_corrupt_offsets(device):
    for offs in corrupt_offs(48):
        check_exact(exact_2d3d(48, 160, 32, offs, device))
        check_exact(exact_2d2d(48, 64, 32, offs, device))
    for offs in corrupt_offs(5):
        in_units = (offs.long() * 32).clamp(-(2**31), 2**31 - 32).int()
        check_exact(exact_2d2d(160, 64, 32, in_units, device))


def test_any_group_start_in_2d2d(device):
    """Groups that no quantizer made, where only the offsets stand against a native GEMM: of 32, of 16, of 8, of 1."""
    for ends in ([64, 64, 512, 1024], [16, 512, 544, 1024], [8, 512, 544, 1024], [32, 512, 515, 1024]):
        check_exact(exact_2d2d(1024, 256, 144, torch.tensor(ends, dtype=torch.int32), device))


def test_strides_and_alignment(device):
    a, b, *rest = exact_2d3d(60, 64, 32, group_offs("zipf", 60, 3), device)
    wide_a = torch.zeros(60, 96, dtype=torch.uint8, device=device).view(a.dtype)
    wide_a[:, :64] = a
    check_exact([wide_a[:, :64], b, *rest])
    for elements in (1, 8):
        b_view = misaligned(b.mT, elements).mT
        check_exact([misaligned(a, elements), b_view, *(misaligned(t, elements) for t in rest[:2]), *rest[2:]])


def test_scales_of_nothing_are_not_read(device):
    """A NaN in the padding between groups and experts stays there."""
    a, b, scale_a, scale_b, offs, *rest = exact_2d3d(64, 64, 32, group_offs("tail_rows", 64, 3), device)
    used, _ = reference.swizzle_scales_m_groups(torch.ones(64, 2, dtype=torch.uint8, device=device), offs)
    scale_a = scale_a.view(torch.uint8).masked_fill(used == 0, 255).view(E8M0)
    used = reference.swizzle_scales_3d(torch.ones(3, 32, 2, dtype=torch.uint8, device=device))
    scale_b = scale_b.view(torch.uint8).masked_fill(used.view(torch.uint8) == 0, 255).view(E8M0)
    assert check_exact([a, b, scale_a, scale_b, offs, *rest]).isfinite().all()


def real_values(device: str) -> list[list[Tensor]]:
    offs = group_offs("tail_rows", 500, 4, device)
    x, g = wide(500, 320, device=device), wide(500, 192, device=device, seed=1)
    q, scale, *_ = reference.quantize_mx_weight(wide(4, 192, 320, device=device), dtype=E4M3)
    a, scale_a = reference.quantize_mx_1x32(x, layout="blocked", offs=offs, dtype=E4M3)
    x_t, scale_x, padded_offs = reference.quantize_mx_32x1(x, offs, dtype=E4M3)
    g_t, scale_g, _ = reference.quantize_mx_32x1(g, offs, dtype=E4M3)
    return [[a, q.mT, scale_a, scale, offs], [g_t, x_t.t(), scale_g, scale_x, padded_offs]]


def test_operands_as_quantized(device):
    """Real values. Fp8 times a power of two is exact in bfloat16, so that only the product is rounded, by at most
    2^-14 / 12 of the signal: 52.9 dB. Blackwell's tensor cores may sum in 14 bits: sqrt(320) * 2^-13, squared, are
    53.2 dB. Both together are 50.0 dB."""
    for args in real_values(device):
        want = reference.scaled_grouped_mm(*args, torch.float64, True, 32)
        assert sqnr_db(scaled_grouped_mm(*args, None, True, 32), want) > 49.9
        assert sqnr_db(scaled_grouped_mm(*args, torch.float32, True, 32), want) > 100  # 24 bits, a few roundings


def test_dequantized_operands_give_the_same(device):
    """What the op does by hand: the layouts of `dequantize` are those of the operands."""
    (a, b, scale_a, scale_b, offs), _ = real_values(device)
    values = dequantize(a, scale_a, "1x32_blocked", offs, torch.float32)
    weights = dequantize(b.mT, scale_b, "1x32_blocked", None, torch.float32)
    start = 0
    got = scaled_grouped_mm(a, b, scale_a, scale_b, offs, torch.float32, True, 32)
    for e, end in enumerate(offs.tolist()):
        want = values[start:end].double() @ weights[e].t().double()
        assert sqnr_db(got[start:end], want) > 100
        start = end


def test_torch_takes_these_shapes():
    """What stands in for a run on sm100: the checks of torch's own GEMM, on the operands that it is handed."""
    for m, k, n, e in ((500, 320, 192, 4), (16, 32, 16, 1), (1000, 4096, 7168, 8), (96, 160, 144, 3)):
        offs = torch.empty(e, dtype=torch.int32)
        for args in (exact_2d3d(m, k, n, offs, "meta"), exact_2d2d(k, 48, n, offs, "meta")):
            out = torch._scaled_grouped_mm(*args[:4], offs=args[4], out_dtype=torch.bfloat16, use_fast_accum=True)
            assert out.shape == shapes.scaled_grouped_mm(args[0].shape, args[1].shape, e)


def with_blocks(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor) -> Tensor:
    return scaled_grouped_mm(a, b, scale_a, scale_b, offs, None, True, 32)


def both_shapes(device: str) -> list[list[Tensor]]:
    return [
        exact_2d3d(96, 64, 32, group_offs("zipf", 96, 3), device)[:5],
        exact_2d2d(96, 64, 32, group_offs("uniform", 3, 3) * 32, device)[:5],
    ]


def test_opcheck(device):
    for args in both_shapes(device):
        check_opcheck("scaled_grouped_mm", args, block_size=32)
        check_opcheck("scaled_grouped_mm", args, out_dtype=torch.float32, block_size=32)


def test_autocast_changes_nothing(device):
    for args in both_shapes(device):
        with torch.autocast(device, dtype=torch.bfloat16):
            check_exact([*args, None, True, 32], torch.float32)


def test_deterministic(device):
    for args in both_shapes(device):
        check_deterministic(with_blocks, args)


def test_compiles_with_dynamic_rows(device):
    calls = [exact_2d3d(m, 64, 48, group_offs("zipf", m, 3), device)[:5] for m in (50, 64, 131)]
    check_compiled(with_blocks, calls, device, dynamic=(0, 2))


def test_cuda_graph(gpu):
    for first, later in zip(both_shapes(gpu), both_shapes(gpu), strict=True):
        check_cuda_graph(with_blocks, first, later)


def test_two_streams(gpu):
    check_two_streams(with_blocks, both_shapes(gpu))


def test_second_gpu(second_gpu):
    for args in both_shapes("cpu"):
        check_second_gpu(lambda *args: [with_blocks(*args)], args, second_gpu)


ARGS = exact_2d3d(6, 160, 16, torch.tensor([2, 6], dtype=torch.int32), "cpu")[:5]
SUM = exact_2d2d(64, 16, 16, torch.tensor([32, 64], dtype=torch.int32), "cpu")[:5]


@pytest.mark.parametrize(
    ("args", "block_size", "argument", "got"),
    [
        (ARGS, 16, "block_size", "16"),
        ([*ARGS[:2], torch.ones(262, 8), *ARGS[3:]], 32, "scale_a", "float32"),
        ([*ARGS[:2], scales(6), *ARGS[3:]], 32, "scale_a", "1"),
        ([*ARGS[:2], scales(256, 8), *ARGS[3:]], 32, "scale_a", "256"),
        ([*ARGS[:2], scales(262, 5), *ARGS[3:]], 32, "scale_a", "5"),
        ([*ARGS[:2], scales(8, 262).t(), *ARGS[3:]], 32, "scale_a", "stride 262"),
        ([*ARGS[:3], scales(2, 128, 8), ARGS[4]], 32, "scale_b", "3"),
        ([*ARGS[:3], scales(2, 1020), ARGS[4]], 32, "scale_b", "1020"),
        ([*ARGS[:3], scales(2, 1024).view(torch.uint8), ARGS[4]], 32, "scale_b", "uint8"),
        ([*ARGS[:4], ARGS[4][:1]], 32, "b", "2"),
        ([*SUM[:2], scales(16, 10), *SUM[3:]], 32, "scale_a", "16"),
        ([*SUM[:2], scales(128, 8), *SUM[3:]], 32, "scale_a", "8"),
        ([*SUM[:3], scales(128, 2), SUM[4]], 32, "scale_b", "2"),
        ([*ARGS[:2], scales(262, 8), *ARGS[3:]], 128, "scale_a", "float8_e8m0fnu"),
    ],
)
def test_errors(args, block_size, argument, got, device):
    check_error("scaled_grouped_mm", [*on(device, args), None, True, block_size], argument, got)
