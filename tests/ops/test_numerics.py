"""The numerical contract: the FP8 cast and the scale, alone and through the ops, over whole ranges of numbers."""

from __future__ import annotations

import pytest
import torch
from helpers import FP8_DTYPES, INPUT_DTYPES, assert_same, assert_same_tensor, flushed_subnormals, pairs, short
from quantizers import CASTS, RULES, check_activation, check_weight
from torch import Tensor

from moe_fp8_ext import ops, reference
from moe_fp8_ext.reference.numerics import E8M0_NAN, FP8_MAX, cast_fp8, e8m0_scale, float_scale

# Exponent bits, mantissa bits, exponent bias and largest finite value, from the definitions of the formats.
FORMATS = {
    torch.float8_e4m3fn: (4, 3, 7, 448.0),
    torch.float8_e5m2: (5, 2, 15, 57344.0),
    torch.float8_e4m3fnuz: (4, 3, 8, 240.0),
    torch.float8_e5m2fnuz: (5, 2, 16, 57344.0),
}


def all_bits16(dtype: torch.dtype) -> Tensor:
    """Every value of a 16-bit floating-point type, NaNs and infinities included."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)


def float32_boundaries() -> Tensor:
    """Every power of two of float32, subnormal ones included, and its neighbours, with both signs; 0, Inf and NaN."""
    powers = torch.cat([torch.arange(1, 256) << 23, 1 << torch.arange(23)])
    mantissas = torch.tensor([-2, -1, 0, 1, 2, 1 << 19, (1 << 19) - 1, 3 << 20, 0x7FFFFF, 0x555555])
    bits = (powers[:, None] + mantissas).clamp(0, 0x7FC00000).flatten()
    bits = torch.cat([bits, torch.tensor([0, 0x7F800000, 0x7F800001])]).int()
    return torch.cat([bits, bits | -(2**31)]).view(torch.float32)


def positive_values(dtype: torch.dtype) -> Tensor:
    """The finite non-negative values of a format in float64; the value at index i is byte i."""
    _, mantissa_bits, bias, largest = FORMATS[dtype]
    byte = torch.arange(128)
    exponent, mantissa = byte >> mantissa_bits, (byte & ((1 << mantissa_bits) - 1)).double() / (1 << mantissa_bits)
    values = torch.where(
        exponent > 0, (1 + mantissa) * torch.exp2(exponent.double() - bias), mantissa * 2.0 ** (1 - bias)
    )
    return values[values <= largest]


def cast_by_search(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Finds the nearest representable value by a plain, slow search in float64. A tie goes to the even byte."""
    table = positive_values(dtype)
    magnitude = x.double().abs().clamp(max=table[-1])
    above = torch.searchsorted(table, magnitude).clamp(max=len(table) - 1)
    below = (above - 1).clamp(min=0)
    up, down = table[above] - magnitude, magnitude - table[below]
    byte = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    has_negative_zero = dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    byte = torch.where(x.signbit() & ((byte > 0) | has_negative_zero), byte | 0x80, byte)
    return byte.masked_fill(x.isnan(), 0x7F if has_negative_zero else 0x80).to(torch.uint8).view(dtype)


def blocks_of_every_exponent(dtype: torch.dtype) -> Tensor:
    """Rows of bfloat16 or float16 values: row e holds every mantissa and sign of the 24 exponents up to e."""
    mantissa_bits, exponents = {torch.bfloat16: (7, 255), torch.float16: (10, 31)}[dtype]
    top = torch.arange(exponents)[:, None, None]
    exponent = (top - torch.arange(24)[:, None]).clamp(min=0)
    bits = (exponent << mantissa_bits) + torch.arange(1 << mantissa_bits)
    bits = bits.reshape(exponents, -1)
    return torch.cat([bits, bits | 0x8000], dim=1).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=short)
def test_formats_decode_as_defined(dtype):
    table = positive_values(dtype)
    decoded = torch.arange(len(table), dtype=torch.uint8).view(dtype).double()
    assert torch.equal(decoded, table)
    assert table[-1] == FP8_MAX[dtype] == torch.finfo(dtype).max


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=short)
def test_reference_cast_rounds_to_nearest_even(dtype, device):
    table = positive_values(dtype).float()
    ties = (table[1:] + table[:-1]) / 2
    edges = torch.cat([table, ties])
    edges = torch.cat([edges, edges.nextafter(torch.tensor(torch.inf)), edges.nextafter(torch.tensor(-torch.inf))])
    for x in (
        torch.cat([edges, -edges]),
        all_bits16(torch.bfloat16).float(),
        all_bits16(torch.float16).float(),
        float32_boundaries(),
    ):
        got = cast_fp8(x.to(device), dtype).cpu()
        assert_same_tensor(got, cast_by_search(x, dtype), f"cast to {short(dtype)}")


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=short)
def test_reference_cast_equals_torch_in_range(dtype, device):
    x = all_bits16(torch.bfloat16).float().to(device)
    x = x[x.abs() <= FP8_MAX[dtype]]
    assert_same_tensor(cast_fp8(x, dtype), x.to(dtype), f"cast to {short(dtype)}")


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=short)
def test_multiplier_equals_torchao(dtype):
    """torchao divides in float64, with the floor of 1e-12 in float64, and rounds to float32 at the end."""
    finite = torch.arange(0, 0x7F800000, 1021, dtype=torch.int32).view(torch.float32)
    amax = torch.cat([finite, float32_boundaries().abs().nan_to_num(0, 0)])
    m, _ = float_scale(amax, dtype, "exact")
    torchao = (torch.finfo(dtype).max / amax.double().clamp(min=1e-12)).float()
    assert_same_tensor(m, torchao, "m")
    m_pow2, _ = float_scale(amax, dtype, "pow2")
    assert_same_tensor(m_pow2, torch.exp2(torchao.double().log2().floor()).float(), "m, power of two")


@pytest.mark.parametrize("rounding", ["exact", "pow2"])
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=short)
def test_scale_is_the_inverse_of_the_multiplier(dtype, rounding):
    amax = float32_boundaries().abs()
    m, scale = float_scale(amax, dtype, rounding)
    finite = amax.isfinite()
    exact = 1 / m[finite].double()
    # RN32: within half a unit in the last place, 2^-24 relative, of the exact quotient; exact for a power of two.
    assert ((scale[finite].double() - exact).abs() <= (0 if rounding == "pow2" else 2.0**-24) * exact).all()
    assert (scale[~finite].view(torch.int32) == 0x7FC00000).all()
    assert (scale[finite].isfinite() & (scale[finite] >= torch.finfo(torch.float32).tiny)).all()
    # No finite element of a block saturates by more than the rounding of x * m.
    assert (amax[finite].double() * m[finite].double() <= FP8_MAX[dtype] * (1 + 2.0**-23)).all()


@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=short)
def test_e8m0_scale_is_the_definition(fp8):
    """Compares with a search among all powers of two, for amaxes around every power of two of float32."""
    amax = float32_boundaries().abs()
    powers = torch.exp2(torch.arange(255).double() - 127)
    ratio = (amax * torch.tensor(1 / FORMATS[fp8][3], dtype=torch.float32)).double()
    up = torch.searchsorted(powers, ratio).clamp(max=254)  # the smallest power that is not below the ratio
    largest = torch.exp2(torch.tensor(FORMATS[fp8][3]).log2().floor()).double()
    # The largest power that is not above the ratio.
    down = (torch.searchsorted(powers, amax.double() / largest, right=True) - 1).clamp(min=0)
    for rounding, want in (("rceil", up), ("floor", down)):
        factor, e = e8m0_scale(amax, fp8, rounding)
        want = want.masked_fill(~amax.isfinite(), E8M0_NAN)
        assert_same_tensor(e.view(torch.uint8), want.to(torch.uint8), rounding)
        finite = amax.isfinite()
        assert torch.equal(factor[finite].double(), torch.exp2(127 - want[finite].double()))
        assert factor[~finite].isnan().all()
    # With "rceil" nothing saturates by more than the roundings of the reciprocal and of the product.
    factor, _ = e8m0_scale(amax, fp8, "rceil")
    assert (amax[finite].double() * factor[finite].double() <= FORMATS[fp8][3] * (1 + 2.0**-22)).all()


@pytest.mark.parametrize("byte", [0, 1, 127, 253, 254])
def test_e8m0_bytes_are_powers_of_two(byte):
    value = torch.tensor([byte], dtype=torch.uint8).view(torch.float8_e8m0fnu).double()
    assert value.item() == 2.0 ** (byte - 127)


# Through the ops. A scaled value does not depend on where value and scale lie, so one format with float scales and one
# with E8M0 scales stand for all formats.


PLAIN_RULES = [rule for rule in RULES if rule[0] in ("rowwise", "mxfp8_rowmajor")]


def check_rows(x: Tensor, rule: tuple[str, str], fp8: torch.dtype, what: str) -> None:
    kwargs = {"dtype": fp8, "rounding": rule[1]}
    assert_same(ops.quantize_rows(x, rule[0], **kwargs), reference.quantize_rows(x, rule[0], **kwargs), what)


@pytest.mark.parametrize("rule", PLAIN_RULES, ids=short)
@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=short)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
def test_every_16_bit_value_as_a_block_of_one(dtype, fp8, rule, device):
    x = all_bits16(dtype).to(device)
    check_rows(x[:, None], rule, fp8, "rows")
    if rule[0] == "rowwise":
        kwargs = {"dtype": fp8, "rounding": rule[1]}
        one = torch.ones(1, dtype=torch.int32, device=device)
        got = ops.quantize_tokens(x[None], "rowwise", offs=one, **kwargs)
        assert_same(got, reference.quantize_tokens(x[None], "rowwise", offs=one, **kwargs), "tokens")
        got = ops.quantize_weight(x[None, None], "rowwise", **kwargs)
        assert_same(got, reference.quantize_weight(x[None, None], "rowwise", **kwargs), "weight")


@pytest.mark.parametrize("rule", PLAIN_RULES, ids=short)
@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=short)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
def test_every_mantissa_below_every_amax(dtype, fp8, rule, device):
    check_rows(blocks_of_every_exponent(dtype).to(device), rule, fp8, "rows")


@pytest.mark.parametrize("rule", RULES, ids=short)
@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=short)
def test_float32_exponent_boundaries(fp8, rule, device):
    """Each number is alone in a block, is the amax of a block, and has ever smaller neighbours, in every direction."""
    x = float32_boundaries().to(device)
    check_rows(x[:, None], rule, fp8, "alone")
    finite = x[x.isfinite()]
    top = finite.abs().sort().values[:: len(finite) // 300]
    blocks = torch.where(finite.abs() <= top[:, None], finite, torch.zeros_like(finite))
    check_rows(torch.cat([top[:, None], blocks], dim=1), rule, fp8, "in blocks")
    rows = torch.nn.functional.pad(x, (0, -len(x) % 32)).view(-1, 32)
    falling, kwargs = rows * torch.exp2(-torch.arange(32.0, device=device)), {"dtype": fp8, "rounding": rule[1]}
    one = torch.tensor([len(rows)], dtype=torch.int32, device=device)
    for blocks in (rows, falling):
        for w in (blocks, blocks.t().contiguous()):
            got = ops.quantize_weight(w[None], rule[0], **kwargs)
            assert_same(got, reference.quantize_weight(w[None], rule[0], **kwargs), "weight")
        got = ops.quantize_both(blocks, rule[0], offs=one, **kwargs)
        assert_same(got, reference.quantize_both(blocks, rule[0], offs=one, **kwargs), "both")


@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=short)
def test_ties_and_saturation_reach_the_cast_unscaled(fp8, device):
    """With amax = FP8_MAX and "pow2" the multiplier is 1. So every tie of the dtype reaches the cast unchanged."""
    table = positive_values(fp8).float()
    ties = (table[1:] + table[:-1]) / 2
    edges = torch.cat([table, ties])
    edges = torch.cat([edges, edges.nextafter(torch.tensor(torch.inf)), edges.nextafter(torch.tensor(-torch.inf))])
    edges = edges[edges <= table[-1]]
    x = torch.cat([edges, -edges])
    q, scale = ops.quantize_rows(x[None].to(device), "rowwise", dtype=fp8, rounding="pow2")
    assert scale.item() == 1.0
    assert_same_tensor(q[0].cpu(), cast_by_search(x, fp8), "q")


def special_blocks(dtype: torch.dtype) -> Tensor:
    """Blocks of 32, one a row: zeros of both signs, NaNs, infinities, the largest values, subnormals, and mixtures."""
    info, mixed = torch.finfo(dtype), torch.linspace(-1, 1, 32)
    tiny = float(info.smallest_normal)
    rows = [torch.full((32,), v) for v in (0.0, -0.0, torch.nan, torch.inf, -torch.inf, info.max, info.min, tiny)]
    rows += [mixed * scale for scale in (tiny, tiny / 4, tiny * 2**-5, info.max, 448, 57344, 240, 1e-38, 1e-30)]
    for position, value in ((0, torch.nan), (31, torch.inf), (16, -torch.inf)):
        rows.append(mixed.clone())
        rows[-1][position] = value
    return torch.stack(rows).double().to(dtype)


@pytest.mark.parametrize(*pairs(cast=CASTS, rule=RULES), ids=short)
def test_special_blocks_in_every_direction(cast, rule, device):
    x = special_blocks(cast[0]).to(device)
    for blocks in (x, x.repeat(3, 1), x.t().contiguous(), x.t().repeat(5, 2).contiguous()):
        offs = torch.tensor([len(blocks)], dtype=torch.int32, device=device)
        check_activation(blocks, rule[0], offs, dtype=cast[1], rounding=rule[1])
        check_weight(blocks[None], rule[0], dtype=cast[1], rounding=rule[1])


@pytest.mark.parametrize("rule", RULES, ids=short)
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
def test_flushed_subnormals_change_nothing(dtype, rule):
    x = torch.cat([special_blocks(d).float() for d in INPUT_DTYPES]).to(dtype)
    offs = torch.tensor([len(x)], dtype=torch.int32)
    for fp8 in FP8_DTYPES:
        kwargs = {"dtype": fp8, "rounding": rule[1]}
        want = reference.quantize_both(x, rule[0], offs=offs, **kwargs)
        of_weight = reference.quantize_weight(x[None], rule[0], **kwargs)
        with flushed_subnormals():
            got = ops.quantize_both(x, rule[0], offs=offs, **kwargs)
            got_weight = ops.quantize_weight(x[None], rule[0], **kwargs)
        assert_same((*got, *got_weight), (*want, *of_weight))
