"""The activations of experts and their gradients: section 3 of DESIGN.md.

Names and constants follow DESIGN.md: a gate function has a value f and a slope f'.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .dequantization import dequantize
from .numerics import group_bounds, round_to
from .quantize import quantize_both, quantize_rows, quantize_tokens
from .signature import of_op
from .tokens import permute_pad

# Activations with gates and ups, and their gate functions. The others are their own gate functions.
GATED = {"swiglu": "silu", "geglu": "gelu"}


def float32(value: float) -> float:
    """value, rounded to float32."""
    return torch.tensor(value, dtype=torch.float32).item()


LN2 = float32(math.log(2))
LN2_REST = -float.fromhex("0x1.05c61p-29")  # RN32(ln 2 - LN2)
LOG2_E = float32(1 / math.log(2))
SHIFT = 1.5 * 2**23 + 127  # C of DESIGN.md: adding it rounds to a whole number
POWER = [1.0, 1.0, *map(float.fromhex, ("0x1.fffdfcp-2", "0x1.5557aep-3", "0x1.572a08p-5", "0x1.10627cp-7"))]
GELU_LINEAR = float32(2 * math.sqrt(2 / math.pi))
GELU_CUBIC = float32(0.044715 * 2 * math.sqrt(2 / math.pi))
GELU_CUBIC_SLOPE = float32(3 * GELU_CUBIC)
CLAMP_OF_GPT_OSS = 7.0, float32(1.702), 1.0  # limit, alpha and offset of "swiglu_oai"


def fma(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """a * b + c in float32, rounded once.

    The product of two float32 is exact in float64. The sum in float64 is rounded to odd: if it is inexact, the
    neighbour with an odd last bit is taken. Rounding an odd value to float32 then gives the correctly rounded result,
    because the odd bit breaks every false tie.
    """
    product = a.double() * (b.double() if isinstance(b, Tensor) else b)
    c = torch.as_tensor(c).to(a.device).double()
    total = product + c
    rounded_c = total - product
    error = (product - (total - rounded_c)) + (c - rounded_c)  # two-sum: product + c = total + error, exactly
    bits = total.view(torch.int64)
    make_odd = total.isfinite() & (error != 0) & (bits % 2 == 0)
    towards_zero = (error > 0) != (total > 0)
    bits = torch.where(make_odd, torch.where(towards_zero, bits - 1, bits + 1), bits)
    return bits.view(torch.float64).float()


def exponential(y: Tensor) -> Tensor:
    """e^y, for y from -88 to 0."""
    n = fma(y, LOG2_E, SHIFT) - SHIFT
    r = fma(n, -LN2_REST, fma(n, -LN2, y))
    power = torch.full_like(r, POWER[-1])
    for coefficient in POWER[-2::-1]:
        power = fma(power, r, coefficient)
    return power * ((n.int() + 127) << 23).view(torch.float32)  # * 2^n, and zero for n = -127


def sigmoids(x: Tensor) -> tuple[Tensor, Tensor]:
    """sigmoid(x) and sigmoid(-x), from one power and one division."""
    power = exponential(-torch.where(x.abs() < 88, x.abs(), 88.0))
    larger = torch.ones_like(power) / (1 + power)
    smaller = power * larger
    return torch.where(x < 0, smaller, larger), torch.where(x < 0, larger, smaller)


def clamp_of(activation: str) -> tuple[float, float, float] | None:
    """limit, alpha and offset of a clamped SwiGLU: "swiglu_oai", or "clamped_swiglu(limit, alpha, offset)"."""
    if activation.startswith("clamped_swiglu("):
        return tuple(float32(float(number)) for number in activation[len("clamped_swiglu(") : -1].split(","))
    return CLAMP_OF_GPT_OSS if activation == "swiglu_oai" else None


def is_gated(activation: str) -> bool:
    return activation in GATED or clamp_of(activation) is not None


def gate_function(activation: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """The value f and the slope f' of the gate function of an activation at x."""
    name = GATED.get(activation, activation)
    if name == "relu2":
        positive = torch.where(x < 0, 0.0, x)
        return positive * positive, positive + positive
    clamp = clamp_of(activation)
    limit, alpha, _ = clamp or (math.inf, 1.0, 0.0)
    unclamped = ~(x > limit)
    x = torch.where(unclamped, x, limit)
    z, z_slope = x, torch.ones_like(x)
    if name == "gelu":
        square = torch.where(x * x < 128, x * x, 128.0)
        z = x * fma(square, GELU_CUBIC, GELU_LINEAR)
        z_slope = fma(square, GELU_CUBIC_SLOPE, GELU_LINEAR)
    elif clamp is not None:
        z, z_slope = x * alpha, torch.full_like(x, alpha)
    sigmoid_z, sigmoid_minus_z = sigmoids(z)
    value = x * sigmoid_z
    return value, torch.where(unclamped, fma(value, sigmoid_minus_z * z_slope, sigmoid_z), 0.0)


def gates_and_ups(h: Tensor, activation: str, interleaved: bool) -> tuple[Tensor, Tensor]:
    """h -> gates and ups in float32; activations without ups get ones."""
    if not is_gated(activation):
        return h.float(), torch.ones_like(h, dtype=torch.float32)
    features = h.shape[1] // 2
    gate, up = (h[:, 0::2], h[:, 1::2]) if interleaved else (h[:, :features], h[:, features:])
    return gate.float(), up.float()


def up_factor(up: Tensor, activation: str) -> Tensor:
    """The factor of f: up, or clamp(up, -limit, limit) + offset."""
    if (clamp := clamp_of(activation)) is None:
        return up
    limit, _, offset = clamp
    return torch.where(up > limit, limit, torch.where(up < -limit, -limit, up)) + offset


@of_op
def activate(h, activation, interleaved):
    """h [P, 2F], or [P, F] for activations without ups -> a [P, F]."""
    gate, up = gates_and_ups(h, activation, interleaved)
    value, _ = gate_function(activation, gate)
    return round_to(value * up_factor(up, activation), h.dtype)


@of_op
def add_bias(x, bias, offs):
    """x [P, N] plus the bias [E, N] of each row's group; rows without a group get zeros."""
    ends = offs.clamp(0, len(x)).cummax(0).values if len(offs) else offs
    groups = (torch.arange(len(x), device=x.device)[:, None] >= ends[None]).sum(1)
    rows = torch.cat([bias.float(), bias.new_zeros(1, x.shape[1], dtype=torch.float32)])[groups]
    return round_to(x.float() + rows, x.dtype)


def scores_of_rows(scores: Tensor, indices: Tensor) -> Tensor:
    """scores of slots, indices [P] -> the scores of rows, [P]; zero where the index is no slot."""
    return permute_pad(scores[:, None], indices, 1)[:, 0]


@of_op
def sum_groups(x, offs, scores, indices, top_k):
    """x [P, N] -> the sum of scores * x over the rows of each group, [E, N] in float32, in the order of the page.

    With indices [P], x [M, N] holds tokens, and scores belong to slots.
    """
    if indices is not None:
        x, scores = permute_pad(x, indices, top_k), None if scores is None else scores_of_rows(scores, indices)
    x = x.float() if scores is None else x.float() * scores[:, None]
    sums = torch.zeros(len(offs), x.shape[1], device=x.device)
    for e, (begin, end) in enumerate(group_bounds(offs, len(x))):
        parts = torch.nn.functional.pad(x[begin:end], (0, 0, 0, -(end - begin) % 256))
        for _ in range(4):  # 4, 16, 64 and 256 rows
            a, b, c, d = parts.unflatten(0, (len(parts) // 4, 4)).unbind(1)
            parts = (a + b) + (c + d)
        for part in parts:
            sums[e] += part
    return round_to(sums, torch.float32)


@of_op
def quantize_activated(h, activation, format, bias, offs, interleaved, keep_h, dtype, rounding):
    """h plus bias -> quantize_rows of the activations, by groups, and quantize_rows of h itself, without groups."""
    h = h if bias is None else add_bias(h, bias, offs)
    options = {"dtype": dtype, "rounding": rounding}
    a = activate(h, activation, interleaved=interleaved)
    return *quantize_rows(a, format, offs=offs, **options), *quantize_rows(h if keep_h else h[:0], format, **options)


@of_op
def activate_backward(grad, h, activation, scores, h_scale, format, indices, interleaved):
    """grad [P, F], h, scores [P] -> grad_h, shaped as h; scores * a [P, F]; grad_scores [P], exact sums rounded once.

    With indices [P], scores and grad_scores belong to slots.
    """
    if indices is not None:
        of_rows = scores_of_rows(scores, indices), h_scale, format, None, interleaved
        grad_h, a, grad_row_scores = activate_backward(grad, h, activation, *of_rows)
        is_slot = (indices >= 0) & (indices < len(scores))
        return grad_h, a, torch.zeros_like(scores).index_copy(0, indices[is_slot].long(), grad_row_scores[is_slot])
    if h_scale is not None:
        h = dequantize(h, h_scale, format, out_dtype=torch.float32)
    gate, up = gates_and_ups(h, activation, interleaved)
    scores = torch.ones(len(h), device=h.device) if scores is None else scores
    value, slope = gate_function(activation, gate)
    factor = up_factor(up, activation)
    a, w = value * factor, grad.float() * scores[:, None]
    grads = [(w * factor) * slope]
    if is_gated(activation):
        clamp = clamp_of(activation)
        grads.append(w * value if clamp is None else torch.where(up.abs() > clamp[0], 0.0, w * value))
    grad_h = torch.stack(grads, 2).flatten(1) if interleaved else torch.cat(grads, 1)
    grad_scores = (grad.double() * a.double()).sum(1)
    return round_to(grad_h, grad.dtype), round_to(a * scores[:, None], grad.dtype), round_to(grad_scores, torch.float32)


@of_op
def quantize_activated_backward(grad, h, activation, format, offs, scores, h_scale, indices, interleaved, *options):
    """quantize_both of grad_h, the first two outputs of quantize_tokens of scores * a, padded_offs, grad_scores.

    Then the sums of grad_h, without groups unless they are asked for.
    """
    align, dtype, grad_dtype, rounding, amax, sum_grad_h = options
    grad_h, a, grad_scores = activate_backward(grad, h, activation, scores, h_scale, format, indices, interleaved)
    how = {"offs": offs, "align": align, "rounding": rounding}
    q, scale, q_t, scale_t, padded_offs = quantize_both(grad_h, format, dtype=grad_dtype or dtype, **how)
    a_q_t, a_scale_t, _ = quantize_tokens(a, format, dtype=dtype, amax=amax, **how)
    grad_bias = sum_groups(grad_h, offs if sum_grad_h else offs[:0])
    return q, scale, q_t, scale_t, a_q_t, a_scale_t, padded_offs, grad_scores, grad_bias


@of_op
def quantize_activated_backward_rows(
    grad, h, activation, format, offs, scores, h_scale, indices, interleaved, keep_grad_h, keep_a, dtype, rounding
):
    """quantize_rows of grad_h, by groups; grad_h and scores * a, without rows unless they are kept; grad_scores."""
    grad_h, a, grad_scores = activate_backward(grad, h, activation, scores, h_scale, format, indices, interleaved)
    q, scale = quantize_rows(grad_h, format, offs=offs, dtype=dtype, rounding=rounding)
    return q, scale, grad_h if keep_grad_h else grad_h[:0], a if keep_a else a[:0], grad_scores
