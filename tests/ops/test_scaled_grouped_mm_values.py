"""scaled_grouped_mm of real values, as quantizers make them: accuracy, with derived bounds."""

from __future__ import annotations

import pytest
import torch
from gemm_accuracy import fp8_gemm_db, real_operands
from gemm_problem import FORMATS
from helpers import CORRECTNESS_MKE, short, sqnr_db, wide

from moe_fp8_ext import reference
from moe_fp8_ext.ops import dequantize, quantize_rows, quantize_weight, scaled_grouped_mm


def close(args: list[object], k: int, min_db: float, **kwargs: object) -> None:
    """Compares with the float64 reference. k is the number of products in a sum (the largest of all groups), and min_db
    is the bound on a GPU."""
    got = scaled_grouped_mm(*args, **kwargs)
    want = reference.scaled_grouped_mm(*args, out_dtype=torch.float64)
    assert got.isfinite().all()
    if got.device.type == "cpu":
        # Every operand is dequantized with one rounding, and a product of two is rounded once. A sum of k terms in any
        # order has relative error k against the sum of magnitudes. All are in units of 2^-24. Then out is rounded.
        a, b, *rest = args
        magnitude = reference.scaled_grouped_mm(a.float().abs(), b.float().abs(), *rest, out_dtype=torch.float64)
        rounding = 2.0**-24 if got.dtype == torch.float32 else 2.0**-8
        bound = (k + 5) * 2.0**-24 * magnitude + rounding * want.abs() * 1.01
        assert ((got.double() - want).abs() <= bound).all()
    else:
        assert sqnr_db(got, want) >= min_db


# Bounds on a GPU. With bfloat16 results, blocks of 128 may use dequantized operands: they and the product are rounded,
# each by at most 2^-14 / 12 of the signal, 48.1 dB. Hopper's tensor cores sum 128 products, and then promote the sum.
# With blocks of 32, fp8 times a power of two is exact, and only the product is rounded, 52.9 dB. Blackwell's tensor
# cores may sum in 14 bits, sqrt(320) * 2^-13, squared, 53.2 dB: both together are 50.0 dB. float32 results reach 100 dB
# (24 bits, a few roundings), or bf16_gemm_db() for up to 660 terms. The number of bits in the MFMA that takes scales is
# not known.
BF16_DB = {"blockwise": fp8_gemm_db(128, torch.bfloat16), "mxfp8": 49.9, "mxfp8_rowmajor": 49.9}
FLOAT32_DB = BF16_DB | {"blockwise": fp8_gemm_db(128, torch.float32), "mxfp8": 100, "mxfp8_rowmajor": 100}


@pytest.mark.parametrize(("out_dtype", "fast"), [(None, True), (None, False), (torch.float32, True)])
@pytest.mark.parametrize("shape", CORRECTNESS_MKE, ids=short)
def test_real_values(shape, out_dtype, fast, device):
    m, k, e = shape
    for args, terms, how in real_operands("rowwise", m, k, 48, e, device):
        close(args, terms, fp8_gemm_db(terms, out_dtype), out_dtype=out_dtype, use_fast_accum=fast, **how)


@pytest.mark.parametrize("fmt", BF16_DB)
@pytest.mark.parametrize("shape", [(500, 320, 192, 4), (300, 303, 48, 5), (129, 129, 130, 2)], ids=short)
def test_real_values_of_blocks(shape, fmt, device):
    for args, terms, how in real_operands(fmt, *shape, device):
        close(args, terms, BF16_DB[fmt], **how)
        close(args, terms, FLOAT32_DB[fmt], out_dtype=torch.float32, **how)


@pytest.mark.parametrize("fmt", FORMATS)
def test_dequantized_operands_give_the_same(fmt, device):
    """A product of operands from `dequantize` gives the same values, so both ops read the same layouts."""
    (a, b, scale_a, scale_b, _, offs), *_ = real_operands(fmt, 500, 320, 192, 4, device)[0]
    values = dequantize(a, scale_a, fmt, offs=offs, out_dtype=torch.float32)
    of_weight = scale_b.mT.contiguous() if fmt == "blockwise" else scale_b
    weights = dequantize(b.mT, of_weight, fmt, out_dtype=torch.float32)
    start = 0
    got = scaled_grouped_mm(a, b, scale_a, scale_b, fmt, offs, out_dtype=torch.float32)
    for e, end in enumerate(offs.tolist()):
        want = values[start:end].double() @ weights[e].t().double()
        least = 100 if got.device.type == "cpu" or fmt.startswith("mxfp8") else fp8_gemm_db(320, torch.float32)
        assert sqnr_db(got[start:end], want) > least
        start = end


def test_matches_torch_dense_blockwise_gemm(gpu):
    """With one group, torch.nn.functional.scaled_mm takes the same scales, unchanged."""
    functional = torch.nn.functional
    if not hasattr(functional, "scaled_mm") or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("torch.nn.functional.scaled_mm has blockwise scales on sm90, in torch 2.10 and later")
    kinds, plain = functional.ScalingType, functional.SwizzleType.NO_SWIZZLE
    a, scale_a = quantize_rows(wide(512, 1024, device=gpu), "blockwise")
    q, scale, *_ = quantize_weight(wide(1, 768, 1024, device=gpu), "blockwise")
    want = functional.scaled_mm(
        *(a, q[0].t(), scale_a, kinds.BlockWise1x128, scale[0].t(), kinds.BlockWise128x128),
        swizzle_a=plain,
        swizzle_b=plain,
        output_dtype=torch.bfloat16,
    )
    offs = torch.tensor([512], dtype=torch.int32, device=gpu)
    got = scaled_grouped_mm(a, q.mT, scale_a, scale.mT, "blockwise", offs)
    # Our product has three roundings to bfloat16. torch's has one, and sums blocks of 128 in the 14 bits of the tensor
    # cores. 4 * 2^-14 / 12 and sqrt(128) * 2^-13, squared, of the signal are 46.5 dB. 1.5 dB are left for the spread of
    # draws.
    assert sqnr_db(got, want) > 45
