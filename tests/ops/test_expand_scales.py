"""expand_scales: scales of "blockwise" with rounding "pow2" equal scales of "mxfp8" for the same values, byte for byte.

No sm_100 has run the product that takes them, so what that product reads is compared with what the quantizers of
"mxfp8" write.
"""

from __future__ import annotations

import pytest
import torch
from helpers import (
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
    strided_2d,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_fp8_ext import Recipe, experts, grouped_mm, ops, quantize_weight, reference
from moe_fp8_ext.ops import expand_scales
from moe_fp8_ext.quantization.tensor import Quantized
from moe_fp8_ext.reference.numerics import FORMATS, group_bounds

E4M3 = torch.float8_e4m3fn
POW2 = Recipe("blockwise", rounding="pow2")
RULE = {"dtype": E4M3, "rounding": "pow2"}
SIZES = [(0, 0), (0, 5), (5, 0), (1, 1), (31, 33), (128, 128), (129, 96), (127, 520), (300, 2050), (513, 160)]


def powers(*shape: int, device: str = "cpu", seed: int = 0) -> Tensor:
    """Powers of two whose bytes are neither 0 nor NaN's, so that a lost scale and unwritten padding show."""
    generator = torch.Generator().manual_seed(seed)
    return torch.ldexp(torch.ones(shape), torch.randint(-126, 128, shape, generator=generator)).to(device)


def fp8(*shape: int, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8, device=device).view(E4M3)


def check(q: Tensor, scale: Tensor, **how: object) -> None:
    what = f"{short(q.shape)} {short(scale.shape)} {how}"
    assert_same(expand_scales(q, scale, **how), reference.expand_scales(q, scale, **how), what)


def check_rows(rows: int, k: int, offs: Tensor, device: str) -> None:
    """Compares scales of rows with and without groups, and of a weight."""
    q, scale = fp8(rows, k, device=device), powers(rows, -(-k // 128), device=device)
    check(q, scale)
    check(q, scale, offs=offs)
    for e in (0, 2):
        check(fp8(e, rows, k, device=device), powers(e, -(-rows // 128), -(-k // 128), device=device))


def check_tokens(k: int, p: int, offs: Tensor, device: str) -> None:
    """Compares scales along tokens, of features and of squares."""
    blocks = max(-(-p // 128), sum(-(-(end - start) // 128) for start, end in group_bounds(offs, p)))
    for rows in (k, -(-k // 128)):
        check(fp8(k, p, device=device), powers(rows, blocks, device=device), along="tokens", offs=offs)


@pytest.mark.parametrize("shape", SIZES, ids=short)
def test_sizes(shape, device):
    for e in (0, 3):
        check_rows(*shape, group_offs("tail_rows", shape[0], e, device), device)
        check_tokens(*shape, group_offs("tail_rows", shape[1], e, device), device)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_group_layouts(layout, device):
    for rows, k in ((300, 272), (1000, 129)):
        for e in (1, 5, 40):
            check_rows(rows, k, group_offs(layout, rows, e, device), device)
            check_tokens(k, rows, group_offs(layout, rows, e, device), device)


def test_max_experts(device):
    for rows in (0, 700):
        check_rows(rows, 40, group_offs("zipf", rows, 1024, device), device)
        check_tokens(40, rows, group_offs("zipf", rows, 1024, device), device)


def test_more_atoms_than_threads(device):
    check_rows(5000, 5000, group_offs("zipf", 5000, 7, device), device)
    check_tokens(5000, 5000, group_offs("zipf", 5000, 7, device), device)


def test_strides(device):
    offs = group_offs("zipf", 150, 3, device)
    for _, scale in strided_2d(powers(150, 8, device=device)):
        check(fp8(150, 1000, device=device), scale, offs=offs)
        check(fp8(150, 1000, device=device), scale, along="tokens", offs=group_offs("zipf", 1000, 1, device))
    check(fp8(150, 1000, device=device), misaligned(powers(150, 8, device=device)), offs=misaligned(offs))
    check(fp8(2, 300, 1000, device=device), powers(2, 8, 3, device=device).mT)
    check(fp8(150, 2000, device=device)[:, 5:1005], powers(150, 8, device=device))


def test_corrupt_offsets(device):
    for size in (1, 37, 200):
        for offs in corrupt_offs(size, device):
            check_rows(size, 50, offs, device)
            check_tokens(50, size, offs, device)


@given(rows=st.integers(0, 300), k=st.integers(0, 600), offs=st.lists(st.integers(0, 300), max_size=9))
def test_any_sizes_and_groups(rows, k, offs, device):
    of_rows = torch.tensor(sorted(min(end, rows) for end in offs), dtype=torch.int32, device=device)
    check_rows(rows, k, of_rows, device)
    check_tokens(k, rows, of_rows, device)


def test_every_number(device):
    """All powers of two that a byte holds are exact. Their neighbours and all other numbers are NaN."""
    exact = [2.0**n for n in range(-127, 128)]
    infinity = float("inf")
    others = [0.0, -0.0, infinity, -infinity, float("nan"), 2.0**-128, 2.0**-149, 3.0, 1 / 448, -1.0, -(2.0**-127)]
    scale = torch.tensor([*exact, *others], dtype=torch.float64).float()[:, None].to(device)
    around = [torch.nextafter(scale[:255], scale.new_tensor(to)) for to in (-infinity, infinity)]
    scale = torch.cat([scale, *around])
    got = ops.unswizzle_scales(expand_scales(fp8(len(scale), 128, device=device), scale), len(scale), 4)
    want = torch.full((len(scale), 4), 255, dtype=torch.uint8)
    want[:255] = torch.arange(255)[:, None]
    assert torch.equal(got.view(torch.uint8).cpu(), want)
    assert torch.equal(got[:255].float(), scale[:255].expand(255, 4))
    check(fp8(len(scale), 128, device=device), scale)


# ---- Operands: what the quantizers of "mxfp8" write for the same values ----------------------------------------------


def alike(rows: int, k: int, offs: Tensor, along: str, squares: bool, device: str) -> Tensor:
    """Values of which all four blocks of 32 in a block of 128 have one amax, so that both formats have its scale. A
    block is 128 features of a row, 128 tokens of a group in a column, or a square of both."""
    torch.manual_seed(3)
    x = 0.4 * torch.rand(rows, k)
    row_of = torch.cat([torch.arange(end - start) for start, end in group_bounds(offs, rows)] + [torch.zeros(0)]).long()
    row_of = torch.cat([row_of, torch.arange(rows - len(row_of))])
    at_row, at_column = row_of[:, None] % 32, torch.arange(k) % 32
    if squares:
        x[(at_row + at_column) % 32 == 0] = 1
    else:
        x[(at_column if along == "rows" else at_row).expand(rows, k) == 0] = 1
    group = torch.searchsorted(offs.cpu().long(), torch.arange(rows), right=True)
    row_block = 8 * group + row_of // 128 if along == "tokens" or squares else torch.arange(rows)
    column_block = torch.arange(k) // 128 if along == "rows" or squares else torch.arange(k)
    key = row_block[:, None] * 7919 + column_block
    return (x * torch.ldexp(torch.ones(rows, k), key * 37 % 61 - 30) * (1 + key % 5 / 8)).to(device)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operands_are_those_of_mxfp8(layout, device):
    """Values and scales are equal, byte for byte: along rows, along tokens with both kinds of amax, and of weights."""
    rows, k = 640, 416
    offs = group_offs(layout, rows // 32, 4, device) * 32
    x = alike(rows, k, offs, "rows", False, device)
    for groups in (offs, None):
        q, scale = ops.quantize_rows(x, "blockwise", offs=groups, **RULE)
        assert_same((q, expand_scales(q, scale, offs=groups)), ops.quantize_rows(x, "mxfp8", offs=groups, dtype=E4M3))
    for amax in ("group", "square"):
        x = alike(rows, k, offs, "tokens", amax == "square", device)
        q_t, scale_t, ends = ops.quantize_tokens(x, "blockwise", offs=offs, amax=amax, **RULE)
        got = q_t, expand_scales(q_t, scale_t, along="tokens", offs=ends), ends
        assert_same(got, ops.quantize_tokens(x, "mxfp8", offs=offs, dtype=E4M3))
    one = torch.tensor([rows], dtype=torch.int32)
    w = torch.stack([alike(rows, k, one, "rows", True, device), -2 * alike(rows, k, one, "rows", True, device)])
    q, scale, q_t, scale_t = ops.quantize_weight(w, "blockwise", **RULE)
    got = q, expand_scales(q, scale), q_t, expand_scales(q_t, scale_t)
    assert_same(got, ops.quantize_weight(w, "mxfp8", dtype=E4M3))


def wild(*shape: int, device: str = "cpu") -> Tensor:
    """Values of all magnitudes, zeros, an infinity and a NaN. Blocks of 32 have scales of their own."""
    torch.manual_seed(5)
    x = torch.randn(shape) * torch.exp2(torch.randint(-40, 40, shape))
    x.view(-1)[::7] = 0
    x.view(-1)[5], x.view(-1)[-3] = float("inf"), float("nan")
    return x.to(device)


def test_values_are_the_same(device):
    """Any operand stands for the same values in both formats, byte for byte, whatever its blocks of 32 are."""
    x, offs = wild(333, 401, device=device), torch.tensor([0, 70, 299], dtype=torch.int32, device=device)
    how = {"out_dtype": torch.float32}
    q, scale = ops.quantize_rows(x, "blockwise", **RULE)
    assert_same(
        ops.dequantize(q, expand_scales(q, scale), "mxfp8", **how), ops.dequantize(q, scale, "blockwise", **how)
    )
    got = ops.dequantize(q, expand_scales(q, scale, offs=offs), "mxfp8", offs=offs, **how)
    assert_same(got[:299], ops.dequantize(q, scale, "blockwise", **how)[:299])
    for amax in ("group", "square"):
        q_t, scale_t, ends = ops.quantize_tokens(x, "blockwise", offs=offs, amax=amax, **RULE)
        along = {"along": "tokens", "offs": ends}
        expanded = expand_scales(q_t, scale_t, **along)
        want = ops.dequantize(q_t, scale_t, "blockwise", **along, **how)
        assert_same(ops.dequantize(q_t, expanded, "mxfp8", **along, **how), want)
    q, scale, q_t, scale_t = ops.quantize_weight(wild(2, 333, 401, device=device), "blockwise", **RULE)
    for values, of in ((q, scale), (q_t, scale_t)):
        want = ops.dequantize(values, of, "blockwise", **how)
        assert_same(ops.dequantize(values, expand_scales(values, of), "mxfp8", **how), want)


# ---- Products --------------------------------------------------------------------------------------------------------


class Products(TorchDispatchMode):
    """Collects the promised roundings. Compares every product on the CPU with the product of expanded scales."""

    def __init__(self, compares: bool) -> None:
        super().__init__()
        self.compares, self.roundings = compares, []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        moe = torch.ops.moe_fp8
        adds = op is moe.add_scaled_grouped_mm.default
        if not adds and op is not moe.scaled_grouped_mm.default:
            return op(*args, **kwargs or {})
        names = [argument.name for argument in op._schema.arguments]
        call = {argument.name: argument.default_value for argument in op._schema.arguments[6 + adds :]}
        call |= dict(zip(names, args, strict=False)) | (kwargs or {})
        self.roundings.append(call["rounding"])
        if not self.compares:
            return op(**call)
        mx = call | {"format": "mxfp8", "rounding": None} | self.expanded(**call)
        if adds:
            mx["total"] = call["total"].clone()
        out, same = op(**call), op(**mx)
        assert_same(call["total"], mx["total"]) if adds else assert_same(out, same)
        return out

    def expanded(self, a, b, scale_a, scale_b, offs, indices=None, **_: object) -> dict[str, Tensor]:
        if b.dim() == 3:  # rows by index have no groups yet
            of_a = expand_scales(a, scale_a, offs=None if indices is not None else offs)
            return {"scale_a": of_a, "scale_b": expand_scales(b.mT, scale_b.mT)}
        along = {"along": "tokens", "offs": offs}
        return {"scale_a": expand_scales(a, scale_a, **along), "scale_b": expand_scales(b.t(), scale_b.t(), **along)}


def problem() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(210, 160, dtype=torch.bfloat16).requires_grad_()
    w = torch.randn(3, 288, 160, dtype=torch.bfloat16).requires_grad_()
    return x, w, torch.tensor([70, 70, 203], dtype=torch.int32)


def test_a_matmul_multiplies_what_mxfp8_would():
    """All products of `grouped_mm` have the bytes of "mxfp8" products with expanded scales, also into main_grad."""
    for indices in (None, torch.randperm(420)[:210].int()):
        for into in (None, torch.zeros(3, 288, 160)):
            x, w, offs = problem()
            how = {} if indices is None else {"indices": indices, "top_k": 2}
            how |= {} if into is None else {"main_grad": into.mT}
            with Products(compares=True) as products:
                grouped_mm(x, w.mT, offs, recipe=POW2, **how).sum().backward()
            assert products.roundings == ["pow2"] * 3


def test_a_layer_multiplies_what_mxfp8_would():
    torch.manual_seed(2)
    x = torch.randn(90, 160, dtype=torch.bfloat16).requires_grad_()
    up, down = (torch.randn(4, *s, dtype=torch.bfloat16).div(12).requires_grad_() for s in ((256, 160), (160, 128)))
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(90)])
    with Products(compares=True) as products:
        experts(x, ids, torch.rand(90, 2), up, down, recipe=POW2).sum().backward()
    assert products.roundings == ["pow2"] * 6


def roundings(recipe: Recipe | str, quantized: tuple[Quantized, Quantized] | None) -> list[str | None]:
    x, w, offs = problem()
    with Products(compares=False) as products:
        grouped_mm(x, w.mT if quantized is None else quantized, offs, recipe=recipe).sum().backward()
    return products.roundings


def test_the_rounding_is_promised_only_if_all_operands_have_it():
    w = problem()[1].detach()
    assert roundings("blockwise", None) == ["exact"] * 3
    exact, pow2 = (quantize_weight(w, "blockwise", rounding=rounding) for rounding in ("exact", "pow2"))
    assert roundings(POW2, exact) == [None] * 2
    assert roundings(POW2, pow2) == ["pow2"] * 2
    first = pow2[0]
    for scale, rounding in ((first.scale, None), (first.scale.to(torch.float8_e8m0fnu), "pow2")):
        weight = Quantized.from_parts(first.q, scale, "blockwise")
        assert weight.rounding == rounding and torch.equal(weight.scale, first.scale)
        assert roundings(POW2, weight) == [rounding] * 2
    first.copy_(Quantized.from_parts(first.q, first.scale.to(torch.float8_e8m0fnu), "blockwise"))
    with pytest.raises(RuntimeError, match=r"^Quantized.copy_: rounding of other must be 'pow2', got 'exact'$"):
        first.copy_(exact[0])


@pytest.mark.parametrize("format", FORMATS)
def test_a_promise_must_be_a_rounding_of_the_format(format, device):
    x, offs = torch.ones(64, 64, device=device), torch.tensor([64], dtype=torch.int32, device=device)
    q, scale = ops.quantize_rows(x, format, offs=offs)
    b, scale_b, *_ = ops.quantize_weight(x[None], format)
    args = [q, b.mT, scale, scale_b.mT if format == "blockwise" else scale_b, format, offs]
    check_error("scaled_grouped_mm", args, "rounding", "'up'", rounding="up")
    q_t, scale_t, ends = ops.quantize_tokens(x, format, offs=offs)
    args = [q_t, q_t.t(), scale_t, scale_t.t() if format == "blockwise" else scale_t, format, ends]
    check_error("add_scaled_grouped_mm", [x.new_zeros(1, 64, 64), *args], "rounding", "'up'", rounding="up")


# ---- Rules of every op -----------------------------------------------------------------------------------------------


def every_way(of_rows: Tensor, of_tokens: Tensor, of_weight: Tensor, offs: Tensor) -> tuple[Tensor, ...]:
    return tuple(expand_scales(q, scale, **how) for q, scale, how in ways(of_rows, of_tokens, of_weight, offs))


def ways(of_rows: Tensor, of_tokens: Tensor, of_weight: Tensor, offs: Tensor) -> list[tuple]:
    rows, blocks = of_rows.shape
    q, along = torch.empty(rows, 128 * blocks, dtype=E4M3, device=of_rows.device), {"along": "tokens", "offs": offs}
    of_all = torch.empty(2, 128 * of_weight.shape[1], 128 * of_weight.shape[2], dtype=E4M3, device=of_rows.device)
    q_t = torch.empty(128 * blocks, rows, dtype=E4M3, device=of_rows.device)
    return [(q, of_rows, {}), (q, of_rows, {"offs": offs}), (q_t, of_tokens, along), (of_all, of_weight, {})]


def inputs(rows: int, device: str, seed: int = 0, layout: str = "zipf") -> list[Tensor]:
    of_tokens = powers(256, rows // 128 + 5, device=device, seed=seed)
    offs = group_offs(layout, rows, 5, device)
    return [powers(rows, 2, device=device, seed=seed), of_tokens, powers(2, 3, 2, device=device, seed=seed), offs]


def test_opcheck(device):
    for q, scale, how in ways(*inputs(138, device)):
        check_opcheck("expand_scales", [q, scale], **how)


def test_deterministic(device):
    check_deterministic(every_way, inputs(3000, device))


def test_compiles_with_dynamic_rows(device):
    check_compiled(every_way, [inputs(rows, device) for rows in (150, 164, 232)], device)


def test_cuda_graph(gpu):
    check_cuda_graph(every_way, inputs(700, gpu), inputs(700, gpu, 1, "one_giant"))


def test_two_streams(gpu):
    check_two_streams(every_way, [inputs(8192, gpu, seed) for seed in (0, 1)])


def test_stream_order(gpu):
    check_stream_order(every_way, [inputs(8192, gpu, seed) for seed in range(4)], 255)


def test_second_gpu(second_gpu):
    check_second_gpu(every_way, inputs(700, "cpu"), second_gpu)


Q, S, OFFS = fp8(6, 260), torch.ones(6, 3), torch.tensor([2, 5], dtype=torch.int32)
T_OFFS, W = torch.tensor([2, 260], dtype=torch.int32), fp8(2, 130, 260)


@pytest.mark.parametrize(
    ("args", "how", "argument", "got"),
    [
        ([Q.float(), S], {}, "q", "float32"),
        ([Q[0], S], {}, "q", "1"),
        ([Q.t(), S], {}, "q", "stride 260"),
        ([Q, S.double()], {}, "scale", "float64"),
        ([Q, S.to(torch.float8_e8m0fnu)], {}, "scale", "float8_e8m0fnu"),
        ([Q, S[:, :2]], {}, "scale", "2"),
        ([Q, S[:5]], {"offs": OFFS}, "scale", "5"),
        ([Q, S], {"along": "columns"}, "along", "'columns'"),
        ([Q, S], {"along": "tokens"}, "offs", "None"),
        ([W, torch.ones(2, 2, 3)], {"offs": OFFS}, "offs", "a tensor"),
        ([W, torch.ones(2, 130, 3)], {}, "scale", "130"),
        ([W, torch.ones(2, 2, 3)], {"along": "tokens", "offs": OFFS}, "q", "3"),
        ([Q, S], {"offs": OFFS.long()}, "offs", "int64"),
        ([Q, torch.ones(5, 4)], {"along": "tokens", "offs": T_OFFS}, "scale", "5"),
        ([Q, torch.ones(6, 2)], {"along": "tokens", "offs": T_OFFS}, "scale", "2"),
    ],
)
def test_errors(args, how, argument, got, device):
    how = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in how.items()}
    check_error("expand_scales", on(device, args), argument, got, **how)
