"""Problems for tests of grouped_mm, their gradients, and bounds of the accuracy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from helpers import on
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_fp8_ext import Recipe, grouped_mm, reference

# E4M3 has 3 mantissa bits, so rounding is uniform within a step of 2^-3 of the value's octave. If every value lies at
# the bottom of its octave, the noise is 2^-6 / 12 = 1/768 of the signal; otherwise it is less. A product of two
# operands has the sum of both noises, 2/768, and sums of independent products keep this ratio: 25.8 dB. 0.8 dB of it
# are for the spread of draws and for values below the smallest normal of their block.
# bfloat16 operands and their products are exact in a float32 sum. Rounding out to 8 bits is uniform within a step of
# 2^-7: 2^-14 / 12, or 52.9 dB.
# With scales of any value, the octaves of Gaussian values fall anywhere. The noise is proportional to the mean of
# 4^octave, which is at most 0.544 of the mean square for every scale (integrated numerically). So two operands give
# 2 * 0.544 / 768, or 28.5 dB. Rounding dequantized operands and the product to bfloat16, three times 52.9 dB, takes
# 0.02 dB. The rest of the 2.5 dB is for the spread of draws.
# MX scales are powers of two for 32 elements, whatever these are: no scale has more noise than that.
MIN_SQNR_DB = {"bf16": 52.0, "rowwise": 25.0, "blockwise": 26.0, "mxfp8": 26.0}
# A single product has no average. Two roundings to E4M3 give (1 + 2^-4)^2 - 1, and each rounding to bfloat16 a factor
# 1 + 2^-8: one of the product and, with blocks, two of dequantized operands.
MIN_SINGLE_DB = {"bf16": 48.1, "rowwise": 17.5, "blockwise": 16.9, "mxfp8": 16.9}
# Each float32 operand that the recipe casts to bfloat16 is rounded once more: three such noises are 4.8 dB.
CAST_DB = 4.8


def problem(
    m: int, k: int, n: int, offs: Tensor, device: str = "cpu", dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A, B_t (the transposed view of [E, N, K]), offs and the gradient of out."""
    generator = torch.Generator().manual_seed(seed)
    a, b, g = (torch.randn(s, generator=generator).to(dtype) for s in ((m, k), (len(offs), n, k), (m, n)))
    a, b, offs, g = on(device, [a, b, offs, g])
    return a.requires_grad_(), b.transpose(1, 2).requires_grad_(), offs, g


def gradients(fn, a: Tensor, b_t: Tensor, g: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """out, dA and dB_t of fn(a, b_t) on fresh leaves; an operand that needs no gradient gets None."""
    a, b_t = (t.detach().requires_grad_(t.requires_grad) for t in (a, b_t))
    out = fn(a, b_t)
    out.backward(torch.ones_like(out) if g is None else g)
    return out.detach(), a.grad, b_t.grad


def run(
    a: Tensor, b_t: Tensor, offs: Tensor, g: Tensor, recipe: str | Recipe
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return gradients(lambda a, b: grouped_mm(a, b, offs, recipe=recipe), a, b_t, g)


def exact(a: Tensor, b_t: Tensor, offs: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return gradients(lambda a, b: reference.grouped_mm(a, b, offs), a.double(), b_t.double(), g.double())


class Calls(TorchDispatchMode):
    """Records the names of our ops in the order of their calls, the directions of quantized weights, and how many
    products add a low-rank term."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.directions: list[str] = []
        self.terms = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "moe_fp8":
            self.names.append(func._opname)
        if func is torch.ops.moe_fp8.quantize_weight.default:
            self.directions.append(args[4] if len(args) > 4 else "both")
        if func is torch.ops.moe_fp8.scaled_grouped_mm.default:
            self.terms += len(args) > 13 and args[13] is not None
        return func(*args, **(kwargs or {}))


def quantizations(fn: Callable[[], object]) -> int:
    """How often fn quantizes a weight, in one direction or in both."""
    with Calls() as calls:
        fn()
    return calls.names.count("quantize_weight")
