"""scaled_grouped_mm with a scale for every block of 128, and what it must agree with: torch's dense blockwise GEMM."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    FP8_DTYPES,
    LAYOUTS,
    assert_same,
    check_compiled,
    check_cuda_graph,
    check_error,
    check_opcheck,
    corrupt_offs,
    group_offs,
    on,
    short,
    sqnr_db,
    wide,
)
from torch import Tensor

from moe_fp8_ext import quantize_1x128, quantize_128x1, quantize_128x128, reference, scaled_grouped_mm

E4M3 = torch.float8_e4m3fn


def ternary(*shape: int, dtype: torch.dtype = E4M3) -> Tensor:
    """Values in {-1, 0, 1}: with scales that are powers of two near 1, bfloat16 operands and float32 sums are exact."""
    return torch.randint(-1, 2, shape).float().to(dtype)


def scales(*shape: int) -> Tensor:
    return torch.exp2(torch.randint(-2, 3, shape).float())


def blocks(size: int) -> int:
    return -(-size // 128)


def exact_2d3d(m: int, k: int, n: int, offs: Tensor, device: str, dtypes=(E4M3, E4M3)) -> list[object]:
    e = len(offs)
    a, b = ternary(m, k, dtype=dtypes[0]), ternary(e, n, k, dtype=dtypes[1]).mT
    return [*on(device, [a, b, scales(blocks(k), m).t(), scales(e, blocks(n), blocks(k)).mT, offs]), None, True, 128]


def exact_2d2d(p: int, k: int, n: int, offs: Tensor, device: str, dtypes=(E4M3, E4M3)) -> list[object]:
    b = blocks(p) + len(offs)
    a_t, x_t = ternary(n, p, dtype=dtypes[0]), ternary(k, p, dtype=dtypes[1])
    return [*on(device, [a_t, x_t.t(), scales(b, n).t(), scales(b, k), offs]), None, True, 128]


def check_exact(args: list[object], out_dtype: torch.dtype | None = None) -> None:
    args[5] = out_dtype
    assert_same(scaled_grouped_mm(*args) + 0.0, reference.scaled_grouped_mm(*args) + 0.0)  # -0 is 0


@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=short)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_is_exact_on_integers(layout, out_dtype, device):
    for m, k, n, e in ((200, 64, 48, 5), (131, 100, 33, 4), (7, 16, 16, 3), (300, 272, 144, 1), (300, 400, 256, 3)):
        check_exact(exact_2d3d(m, k, n, group_offs(layout, m, e), device), out_dtype)
        check_exact(exact_2d2d(m, k, n, group_offs(layout, m, e), device), out_dtype)
        whole = group_offs(layout, m // 16, e) * 16
        check_exact(exact_2d2d(m // 16 * 16, 64, 48, whole, device), out_dtype)


@pytest.mark.parametrize("a_dtype", FP8_DTYPES, ids=short)
@pytest.mark.parametrize("b_dtype", FP8_DTYPES, ids=short)
def test_formats(a_dtype, b_dtype, device):
    for k in (208, 100):
        check_exact(exact_2d3d(90, k, 48, group_offs("zipf", 90, 3), device, (a_dtype, b_dtype)))
        check_exact(exact_2d2d(208, k, 48, group_offs("zipf", 13, 3) * 16, device, (a_dtype, b_dtype)))


def test_sizes_of_nothing(device):
    for m, k, n, e in ((0, 32, 16, 2), (5, 0, 16, 2), (5, 16, 0, 2), (5, 16, 16, 0)):
        check_exact(exact_2d3d(m, k, n, group_offs("uniform", m, e), device))
        check_exact(exact_2d2d(m, k, n, group_offs("uniform", m, e), device))


def test_corrupt_offsets(device):
    for offs in corrupt_offs(48):
        check_exact(exact_2d3d(48, 160, 32, offs, device))
        check_exact(exact_2d2d(48, 64, 32, offs, device))


def test_operands_as_quantized(device):
    """Real values. A GPU rounds dequantized operands and the product to bfloat16, each at most 2^-14 / 12 of the
    signal: 48.1 dB; elsewhere the product alone is rounded."""
    offs, w = group_offs("tail_rows", 500, 4, device), wide(4, 192, 304, device=device)
    x, g = wide(500, 304, device=device), wide(500, 192, device=device, seed=1)
    (a, scale_a), (q, _, scale) = quantize_1x128(x), quantize_128x128(w)
    x_t, scale_x, padded_offs = quantize_128x1(x, offs)
    g_t, scale_g, _ = quantize_128x1(g, offs)
    for args in (
        [a, q.mT, scale_a, scale.mT, offs],
        [g_t, x_t.t(), scale_g, scale_x.t(), padded_offs],
    ):
        want = reference.scaled_grouped_mm(*args, torch.float64, True, 128)
        assert sqnr_db(scaled_grouped_mm(*args, None, True, 128), want) > 48.1
        assert sqnr_db(scaled_grouped_mm(*args, torch.float32, True, 128), want) > 100  # 24 bits, a few roundings


def test_matches_torch_dense_blockwise_gemm(gpu):
    """One group, scales handed over as they are: the layout is that of torch.nn.functional.scaled_mm."""
    functional = torch.nn.functional
    if not hasattr(functional, "scaled_mm") or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("torch.nn.functional.scaled_mm has blockwise scales on sm90, in torch 2.10 and later")
    kinds, plain = functional.ScalingType, functional.SwizzleType.NO_SWIZZLE
    x, w = wide(512, 1024, device=gpu), wide(1, 768, 1024, device=gpu)
    (a, scale_a), (q, _, scale) = quantize_1x128(x), quantize_128x128(w)
    offs = torch.tensor([512], dtype=torch.int32, device=gpu)
    want = functional.scaled_mm(
        a,
        q[0].t(),
        scale_a,
        kinds.BlockWise1x128,
        scale[0].t(),
        kinds.BlockWise128x128,
        swizzle_a=plain,
        swizzle_b=plain,
        output_dtype=torch.bfloat16,
    )
    got = scaled_grouped_mm(a, q.mT, scale_a, scale.mT, offs, None, True, 128)
    # Ours has three roundings to bfloat16, torch's has one and sums blocks of 128 in the tensor cores' own 14 bits:
    # 4 * 2^-14 / 12 and sqrt(128) * 2^-13, squared, of the signal are 46.5 dB; 1.5 dB for the spread of draws.
    assert sqnr_db(got, want) > 45


def test_opcheck(device):
    check_opcheck("scaled_grouped_mm", exact_2d3d(20, 48, 32, group_offs("zipf", 20, 3), device))
    check_opcheck("scaled_grouped_mm", exact_2d2d(48, 48, 32, group_offs("zipf", 3, 3) * 16, device))


def with_blocks(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor) -> Tensor:
    return scaled_grouped_mm(a, b, scale_a, scale_b, offs, None, True, 128)


def test_compiles_with_dynamic_rows(device):
    calls = []
    for m in (50, 64, 131):
        a, b, scale_a, scale_b, offs, *_ = exact_2d3d(m, 64, 48, group_offs("zipf", m, 3), device)
        calls.append([a, b, scale_a.contiguous(), scale_b, offs])
    check_compiled(with_blocks, calls, device, dynamic=(0, 2))


def test_cuda_graph(gpu):
    first, later = (exact_2d3d(300, 64, 48, group_offs(layout, 300, 4), gpu)[:5] for layout in ("zipf", "tail_rows"))
    check_cuda_graph(with_blocks, first, later)


ARGS = exact_2d3d(6, 160, 8, torch.tensor([2, 6], dtype=torch.int32), "cpu")[:5]
SUM = exact_2d2d(32, 8, 16, torch.tensor([16, 32], dtype=torch.int32), "cpu")[:5]


@pytest.mark.parametrize(
    ("args", "block_size", "argument", "got"),
    [
        (ARGS, 64, "block_size", "64"),
        ([*ARGS[:2], torch.ones(6), *ARGS[3:]], 128, "scale_a", "1"),
        ([*ARGS[:2], torch.ones(6, 1), *ARGS[3:]], 128, "scale_a", "1"),
        ([*ARGS[:3], torch.ones(2, 8), ARGS[4]], 128, "scale_b", "2"),
        ([*ARGS[:3], torch.ones(2, 1, 1), ARGS[4]], 128, "scale_b", "1"),
        ([*ARGS[:3], ARGS[3].double(), ARGS[4]], 128, "scale_b", "float64"),
        ([*SUM[:2], torch.ones(16, 0), *SUM[3:]], 128, "scale_a", "0"),
        ([*SUM[:3], torch.ones(1, 8), SUM[4]], 128, "scale_b", "1"),
    ],
)
def test_errors(args, block_size, argument, got, device):
    check_error("scaled_grouped_mm", [*on(device, args), None, True, block_size], argument, got)
