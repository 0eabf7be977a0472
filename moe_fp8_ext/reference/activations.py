"""The activations of experts and their gradients: section 3 of DESIGN.md."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .dequantization import dequantize
from .numerics import round_to
from .quantize import quantize_both, quantize_rows, quantize_tokens

GATED = {"swiglu": "silu", "geglu": "gelu", "swiglu_oai": "clamped_silu"}  # and how the gate is bent


def float32(value: float) -> float:
    """The nearest float32."""
    return torch.tensor(value, dtype=torch.float32).item()


LN2 = float32(math.log(2))
LN2_REST = -float.fromhex("0x1.05c61p-29")  # of the real logarithm
LOG2_E = float32(1 / math.log(2))
SHIFT = 1.5 * 2**23 + 127
POWER = [1.0, 1.0, *map(float.fromhex, ("0x1.fffdfcp-2", "0x1.5557aep-3", "0x1.572a08p-5", "0x1.10627cp-7"))]
GELU_LINEAR = float32(2 * math.sqrt(2 / math.pi))
GELU_CUBIC = float32(0.044715 * 2 * math.sqrt(2 / math.pi))
GELU_CUBIC_SLOPE = float32(3 * GELU_CUBIC)
ALPHA, LIMIT = float32(1.702), 7.0


def fma(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """a * b + c of float32, rounded once.

    A product is exact in float64. The sum is rounded to odd there: of the two neighbours of what it should be, the one
    with an odd last bit, which the rounding to float32 then takes to the right side of every tie.
    """
    product, c = a.double() * (b.double() if isinstance(b, Tensor) else b), torch.as_tensor(c).to(a.device).double()
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)  # what the sum lost
    bits = total.view(torch.int64)
    inexact = total.isfinite() & (error != 0) & (bits % 2 == 0)
    towards_zero = (error > 0) != (total > 0)
    bits = torch.where(inexact, torch.where(towards_zero, bits - 1, bits + 1), bits)
    return bits.view(torch.float64).float()


def exponential(y: Tensor) -> Tensor:
    """e^y of a y from -88 to 0."""
    n = fma(y, LOG2_E, SHIFT) - SHIFT
    r = fma(n, -LN2_REST, fma(n, -LN2, y))
    power = torch.full_like(r, POWER[-1])
    for coefficient in POWER[-2::-1]:
        power = fma(power, r, coefficient)
    return power * ((n.int() + 127) << 23).view(torch.float32)


def sigmoids(x: Tensor) -> tuple[Tensor, Tensor]:
    """sigmoid(x) and sigmoid(-x)."""
    power = exponential(-torch.where(x.abs() < 88, x.abs(), 88.0))
    large = torch.ones_like(power) / (1 + power)
    small = power * large
    return torch.where(x < 0, small, large), torch.where(x < 0, large, small)


def bend(curve: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """The value and the slope of a curve at x."""
    if curve == "relu2":
        positive = torch.where(x < 0, 0.0, x)
        return positive * positive, positive + positive
    inside = ~(x > LIMIT) if curve == "clamped_silu" else torch.ones_like(x, dtype=torch.bool)
    x = torch.where(inside, x, LIMIT)
    z, slope_of_z = x, torch.ones_like(x)
    if curve == "gelu":
        square = torch.where(x * x < 128, x * x, 128.0)
        z = x * fma(square, GELU_CUBIC, GELU_LINEAR)
        slope_of_z = fma(square, GELU_CUBIC_SLOPE, GELU_LINEAR)
    elif curve == "clamped_silu":
        z, slope_of_z = x * ALPHA, torch.full_like(x, ALPHA)
    of_z, of_minus_z = sigmoids(z)
    value = x * of_z
    return value, torch.where(inside, fma(value, of_minus_z * slope_of_z, of_z), 0.0)


def split(h: Tensor, activation: str, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Gates and ups in float32; ones in place of ups that there are not."""
    if activation not in GATED:
        return h.float(), torch.ones_like(h, dtype=torch.float32)
    features = h.shape[1] // 2
    halves = (h[:, 0::2], h[:, 1::2]) if interleaved else (h[:, :features], h[:, features:])
    return halves[0].float(), halves[1].float()


def factor_of(up: Tensor, activation: str) -> Tensor:
    if activation != "swiglu_oai":
        return up
    return torch.where(up > LIMIT, LIMIT, torch.where(up < -LIMIT, -LIMIT, up)) + 1


def activate(h: Tensor, activation: str, *, interleaved: bool = False) -> Tensor:
    """h [P, 2F], or [P, F] of activations without ups -> a [P, F]."""
    gate, up = split(h, activation, interleaved)
    return round_to(bend(GATED.get(activation, activation), gate)[0] * factor_of(up, activation), h.dtype)


def quantize_activated(
    h: Tensor,
    activation: str,
    format: str,
    *,
    offs: Tensor | None = None,
    interleaved: bool = False,
    keep_h: bool = True,
    dtype: torch.dtype | None = None,
    rounding: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h [P, 2F] or [P, F] -> quantize_rows of its activations [P, F] in groups, and of itself without groups."""
    how = {"dtype": dtype, "rounding": rounding}
    of_a = quantize_rows(activate(h, activation, interleaved=interleaved), format, offs=offs, **how)
    return *of_a, *quantize_rows(h if keep_h else h[:0], format, **how)


def activate_backward(
    grad: Tensor,
    h: Tensor,
    activation: str,
    *,
    scores: Tensor | None = None,
    h_scale: Tensor | None = None,
    format: str | None = None,
    indices: Tensor | None = None,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """grad [P, F], h, scores [P] -> grad_h as h, scores * a [P, F], grad_scores [P]: exact sums, rounded once. With
    indices [P] scores and their gradients are those of slots."""
    if indices is not None:
        rows = ((indices >= 0) & (indices < len(scores))).nonzero().flatten()
        slots, of_rows = indices[rows].long(), scores.new_zeros(len(h))
        of_rows[rows] = scores[slots]
        of_h = {"h_scale": h_scale, "format": format, "interleaved": interleaved}
        grad_h, a, of_rows = activate_backward(grad, h, activation, scores=of_rows, **of_h)
        return grad_h, a, torch.zeros_like(scores).index_copy(0, slots, of_rows[rows])
    if h_scale is not None:
        h = dequantize(h, h_scale, format, out_dtype=torch.float32)
    gate, up = split(h, activation, interleaved)
    scores = torch.ones(len(h), device=h.device) if scores is None else scores
    value, slope = bend(GATED.get(activation, activation), gate)
    factor = factor_of(up, activation)
    a, w = value * factor, grad.float() * scores[:, None]
    parts = [(w * factor) * slope]
    if activation in GATED:
        clamped = (up.abs() > LIMIT) & (activation == "swiglu_oai")
        parts.append(torch.where(clamped, 0.0, w * value))
    grad_h = torch.stack(parts, 2).flatten(1) if interleaved else torch.cat(parts, 1)
    grad_scores = (grad.double() * a.double()).sum(1)
    return round_to(grad_h, grad.dtype), round_to(a * scores[:, None], grad.dtype), round_to(grad_scores, torch.float32)


def quantize_activated_backward(
    grad: Tensor,
    h: Tensor,
    activation: str,
    format: str,
    *,
    offs: Tensor,
    scores: Tensor | None = None,
    h_scale: Tensor | None = None,
    indices: Tensor | None = None,
    interleaved: bool = False,
    align: int | None = None,
    dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
    rounding: str | None = None,
    amax: str = "group",
) -> tuple[Tensor, ...]:
    """quantize_both of grad_h, quantize_tokens of scores * a, but for its padded_offs, and grad_scores."""
    of_h = {"h_scale": h_scale, "format": None if h_scale is None else format, "interleaved": interleaved}
    grad_h, a, grad_scores = activate_backward(grad, h, activation, scores=scores, indices=indices, **of_h)
    how = {"offs": offs, "align": align, "rounding": rounding}
    *of_grad, padded_offs = quantize_both(grad_h, format, dtype=grad_dtype or dtype, **how)
    of_a = quantize_tokens(a, format, dtype=dtype, amax=amax, **how)[:2]
    return *of_grad, *of_a, padded_offs, grad_scores
