"""Scales along tokens of squares, 128 tokens by 128 features: their values, and products with them. Their bytes are
checked together with other "blockwise" scales, in `check_activation` and test_simt.py."""

from __future__ import annotations

import math

import pytest
import torch
from gemm_problem import check_exact, exact_2d2d, scales
from grouped_problem import gradients, problem
from helpers import (
    FP8_DTYPES,
    assert_same,
    check_compiled,
    check_cuda_graph,
    check_deterministic,
    check_error,
    check_opcheck,
    check_two_streams,
    group_offs,
    on,
    short,
    sqnr_db,
    wide,
)
from quantizers import caller, tensors

import moe_fp8_ext
from moe_fp8_ext import Recipe, grouped_mm, ops, quantize_both, quantize_tokens, scaled_grouped_mm
from moe_fp8_ext.reference.numerics import FP8_MAX

SQUARE = 128
both = caller("quantize_both", "blockwise", amax="square")


def squares(k: int) -> int:
    return -(-k // SQUARE)


@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=short)
def test_a_scale_is_of_the_largest_of_its_square(fp8, device):
    """Computes scales by hand. Every group begins new blocks."""
    sizes, k = [130, 0, 256, 5], 300
    x, offs = wide(sum(sizes) + 9, k, device=device), torch.tensor(sizes, device=device).cumsum(0).int()
    _, scale, _ = ops.quantize_tokens(x, "blockwise", offs=offs, amax="square", dtype=fp8)
    assert scale.shape[0] == squares(k)
    block, start = 0, 0
    for size in sizes:
        for first in range(start, start + size, SQUARE):
            rows = x[first : min(first + SQUARE, start + size)].float().abs()
            want = [rows[:, c : c + SQUARE].max() for c in range(0, k, SQUARE)]
            amax = torch.stack(want)
            assert torch.equal(scale[:, block], (torch.full_like(amax, FP8_MAX[fp8]) / amax).reciprocal())
            block += 1
        start += size
    assert not scale[:, block:].any()


def test_what_is_not_finite_poisons_its_square(device):
    x, offs = wide(300, 300, device=device), torch.tensor([140, 300], device=device).int()
    x[150, 200], x[7, 299] = float("nan"), float("inf")
    tokens = quantize_tokens(x, "blockwise", offs=offs, amax="square")
    values = tokens.dequantize(torch.float32)
    want = torch.zeros(values.shape, dtype=torch.bool, device=device)
    second = int(tokens.offs[0])
    want[256:, :SQUARE] = want[SQUARE : 2 * SQUARE, second : second + SQUARE] = True
    assert torch.equal(values.isnan(), want)


@pytest.mark.parametrize("fp8", FP8_DTYPES[:2], ids=short)
def test_products(fp8, device):
    """b has squares, which Hopper's kernels take. Then a, or both, have squares, which only other GEMMs take."""
    for p, k, n, sizes in ((1000, 400, 272, [96, 0, 512, 352]), (320, 16, 144, [320]), (70, 130, 33, [3, 60])):
        offs = torch.tensor(sizes).cumsum(0).int()
        a, b, scale_a, scale_b, *rest = exact_2d2d("blockwise", p, k, n, offs, device, (fp8, torch.float8_e4m3fn))
        of_a, of_b = (scales("blockwise", scale_a.shape[1], squares(size)).to(device) for size in (n, k))
        for of_operands in ((scale_a, of_b), (of_a.t(), scale_b), (of_a.t(), of_b)):
            for align in (1, 32):
                if align == 1 or all(end % 32 == 0 for end in offs.tolist()):
                    check_exact([a, b, *of_operands, *rest], align=align, out_dtype=torch.float32)


def test_objects(device):
    """A given pair has the bytes that the recipe makes. scaled_grouped_mm reads the kind of scales from its
    operands."""
    a, b_t, offs, g = problem(300, 200, 144, group_offs("zipf", 300, 3), device)
    recipe = Recipe("blockwise")
    assert recipe.amax == "square"
    how = {"offs": offs, "rounding": recipe.rounding}
    pair = quantize_both(a.detach(), "blockwise", amax="square", **how)
    _, _, want = gradients(lambda a, b: grouped_mm(a, b, offs, recipe=recipe), a, b_t, g)
    got = b_t.detach().requires_grad_()
    grouped_mm(pair, got, offs, recipe=recipe).backward(g)
    assert_same(got.grad, want)
    of_slots = {"indices": torch.arange(300, dtype=torch.int32, device=device), "top_k": 1}
    with pytest.raises(RuntimeError, match="quantize_both: amax must not be 'batch' with indices, got 'batch'"):
        quantize_both(a.detach(), "rowwise", offs=offs, amax="batch", **of_slots)
    dy = quantize_tokens(g, "blockwise", **how)
    assert_same(scaled_grouped_mm(dy, pair[1]), want.mT)


# Two operands have the noise 2 * 0.544 / 768, see grouped_problem.py. Numbers below the normal ones of E4M3 are rounded
# to steps of 2^-9 scales, which is a noise of step^2 / 12 for an element of x. Powers of signal and noise of 16 columns
# of dW, 3072 numbers, have a spread of sqrt(2 / 3072) = 2.6% each. Five times both is 18%, 0.7 dB.
ALIKE, SPREAD_DB = 16, 0.7


@pytest.mark.parametrize("rounding", ["exact", "pow2"])
@pytest.mark.parametrize("octaves", [0, 8])
def test_accuracy_of_wgrad(octaves, rounding, device):
    """Every 16 features of dW are as accurate as with their own scales. Features are equally loud, or differ by up to
    2^8."""
    m, k, n = 1000, 256, 192
    generator = torch.Generator().manual_seed(octaves)
    loudness = torch.exp2(-octaves * torch.rand(k // ALIKE, generator=generator)).repeat_interleave(ALIKE)
    x = (torch.randn(m, k, generator=generator) * loudness).bfloat16().to(device)
    dy = torch.randn(m, n, generator=generator).bfloat16().to(device)
    how = {"offs": torch.tensor([m], dtype=torch.int32, device=device), "rounding": rounding}
    how["dtype"] = torch.float8_e4m3fn
    want = dy.double().t() @ x.double()
    dy_t = quantize_tokens(dy, "blockwise", **how)
    for amax in ("group", "square"):
        x_t = quantize_tokens(x, "blockwise", amax=amax, **how)
        got = scaled_grouped_mm(dy_t, x_t, out_dtype=torch.float32)[0]
        for c in range(0, k, ALIKE):
            of, rows = (
                slice(c, c + ALIKE),
                slice(c // SQUARE, c // SQUARE + 1) if amax == "square" else slice(c, c + ALIKE),
            )
            below = (x_t.scale[rows].double().max() * 2**-9) ** 2 / 12 / x[:, of].double().square().mean()
            least = -10 * math.log10(2 * 0.544 / 768 + below.item()) - SPREAD_DB
            assert sqnr_db(got[:, of], want[:, of]) >= least > 27.7, (amax, c)


def test_the_layer(device):
    """With recipe "blockwise" the activations in both weight gradients have squares, and no other result changes."""
    generator = torch.Generator().manual_seed(0)
    sizes = (200, 160), (3, 256, 160), (3, 160, 128)
    x, gate_up, down = (torch.randn(s, generator=generator).bfloat16().to(device) for s in sizes)
    ids = torch.rand(200, 3, generator=generator).topk(2).indices.to(device)
    scores = torch.rand(200, 2, generator=generator).to(device)
    found = {}
    for amax in ("square", "group"):
        leaves = [t.clone().requires_grad_() for t in (x, scores, gate_up, down)]
        tokens, of_slots, *weights = leaves
        out = moe_fp8_ext.experts(tokens, ids, of_slots, *weights, recipe=Recipe("blockwise", amax=amax))
        found[amax] = out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)
    (*square, square_up, square_down), (*group, group_up, group_down) = found["square"], found["group"]
    assert_same(square, group)
    for mine, other in ((square_up, group_up), (square_down, group_down)):
        assert not torch.equal(mine, other)
        # Each result has the noise of one operand against the other, twice 0.544 / 768, and of bfloat16. That is 28.4
        # dB.
        assert sqnr_db(mine, other) > 27.5


def test_opcheck(device):
    how = {"offs": group_offs("zipf", 137, 3, device), "align": 64, "amax": "square"}
    for op in ("quantize_tokens", "quantize_both"):
        check_opcheck(op, [wide(137, 133, device=device), "blockwise"], **how)


def test_compiles_with_dynamic_sizes(device):
    call = caller("quantize_tokens", "blockwise", amax="square")
    check_compiled(call, [tensors("quantize_tokens", m, 148, device) for m in (50, 64, 331)], device)


def test_deterministic(device):
    for k in (303, 304):
        check_deterministic(both, tensors("quantize_both", 601, k, device))


def test_on_a_gpu(gpu):
    first, later = (
        tensors("quantize_both", 4000, 1024, gpu, seed, layout) for seed, layout in enumerate(("zipf", "one_giant"))
    )
    check_cuda_graph(both, first, later)
    check_two_streams(both, [first, tensors("quantize_both", 4000, 1024, gpu, 1)])


def test_errors(device):
    x, offs = on(device, [torch.zeros(6, 300), torch.tensor([2, 6], dtype=torch.int32)])
    for op in ("quantize_tokens", "quantize_both"):
        for format in ("rowwise", "mxfp8", "mxfp8_rowmajor"):
            check_error(op, [x, format], "amax", "'square'", offs=offs, amax="square")
    q_t, scale_t, ends = ops.quantize_tokens(x, "blockwise", offs=offs, amax="square")
    for scale in (scale_t[:2], torch.cat([scale_t, scale_t])):
        got = str(len(scale))
        check_error("dequantize", [q_t, scale, "blockwise"], "scale", got, along="tokens", offs=ends)
        check_error(
            "scaled_grouped_mm", [q_t, q_t.t(), scale_t, scale.t(), "blockwise", ends], "scale_b", got, align=32
        )
