"""Problems for tests of the expert layer, the layer in plain PyTorch, and how closely the two must agree."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from helpers import assert_same_tensor, on
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from moe_fp8_ext import experts

# A cast to E4M3 of values whose octaves fall anywhere has a noise of 0.544 / 768 of the signal, 31.5 dB: see
# grouped_problem.py. This noise is the unit below. A cast operand has 1 unit. A product has the sum of its operands'
# noises, the same for all of its values. The noise of h's own cast is proportional to |h|, so it is largest where silu'
# is.
#
#   h       x, W_up                                                            2; kept in FP8 one more, of its own cast
#   a       h through both factors of silu(g) u:
#           of products 1 + E[silu'^2] / E[silu^2] = 2.07, its own 1 + E[g^2 silu'^2] / E[silu^2] = 2.45
#   out     a of h, a's own cast, W_down                                       2 * 2.07 + 2
#   da      dy, W_down                                                         2
#   dh      da, and h as kept through u silu'(g) and silu(g), over E[silu'^2] + E[silu^2]:
#           of products 2 E[silu'^2] + E[silu''^2] = 1.23 of that,
#           its own E[silu'^2] + E[g^2 silu''^2] + E[g^2 silu'^2] = 1.28       2 + 2 * 1.23 + 1.28
#   dx      dh, its cast, W_up                                                 2 + 2 * 1.23 + 1.28 + 2; so dW_up, of x
#   dW_down dy, a of h as kept, a's cast                                       1 + 2 * 2.07 + 2.45 + 1
#   dscores da and a of h as kept                                              2 + 2 * 2.07 + 2.45
#
# For normal g, E[silu^2] = 0.356, E[silu'^2] = 0.379, E[silu''^2] = 0.144, E[g^2 silu'^2] = 0.517 and E[g^2 silu''^2] =
# 0.047 are integrated numerically. Other activations have at most 0.14 dB more, 0.23 dB with h in BF16, both in
# b_gate_up: dh of geglu has 1.35 in place of 1.23, a of relu2 has 4/3 and 4 in place of 2.07 and 2.45. These values do
# not reach the limit of swiglu_oai. A bias adds to the signal alone.
#
# The spread of draws is three deviations for 450 slots of 96 features. Sums of n squares of normal values, of signal
# and noise, vary by 4.34 sqrt(4 / n) dB: 0.41 dB for 450 scores. All results share the squares of a and of scores,
# whose fourth moments are 22 and 1.8 times the squares of their second moments. They vary by 4.34 sqrt(22 * 1.8 / (450
# * 96)) = 0.13 dB, as measured over 16 seeds. One more cast of `out`, such as one of y, would be 0.66 dB, more than
# this spread.
OF_OPERAND, SPREAD_DB, SPREAD_OF_MANY_DB = 0.544 / 768, 1.3, 0.45
NOISE = {
    keep: {
        "out": 2 * 2.07 + 2,
        "x": 4 + 2 * 1.23 + casts_of_h * 1.28,
        "scores": 2 + 2 * 2.07 + casts_of_h * 2.45,
        "w_gate_up": 4 + 2 * 1.23 + casts_of_h * 1.28,
        "w_down": 2 + 2 * 2.07 + casts_of_h * 2.45,
        "b_gate_up": 2 + 2 * 1.23 + casts_of_h * 1.28,
    }
    for keep, casts_of_h in (("fp8", 1), ("bf16", 0))
}
FEW = "scores", "b_gate_up"
# A rounding to bfloat16 has 52.9 dB. A path has at most as many of them as it has casts above and products.
BF16_DB = 40.0


@dataclass
class Layer:
    """The tensors of a call and the gradient of its output."""

    x: Tensor
    ids: Tensor
    scores: Tensor
    w_gate_up: Tensor
    w_down: Tensor
    grad: Tensor
    b_gate_up: Tensor | None = None
    b_down: Tensor | None = None

    def at(self, device: str) -> Layer:
        names = [f.name for f in fields(self)]
        return Layer(**dict(zip(names, on(device, [getattr(self, name) for name in names]), strict=True)))


def layer(
    t: int = 150,
    d: int = 128,
    f: int = 96,
    e: int = 8,
    top_k: int = 3,
    rows: int = 2,
    bias: bool = False,
    seed: int = 0,
) -> Layer:
    """A problem in bfloat16 whose values keep their variance through the layer. h has `rows` rows for each row of a."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int, terms: int = 1) -> Tensor:
        return (torch.randn(shape, generator=g) * terms**-0.5).bfloat16()

    ids = torch.rand(t, e, generator=g).topk(top_k).indices if e else torch.zeros(t, top_k, dtype=torch.int64)
    biases = {"b_gate_up": normal(e, rows * f, terms=9), "b_down": normal(e, d, terms=9)} if bias else {}
    scores = torch.rand(t, top_k, generator=g)
    weights = normal(e, rows * f, d, terms=d), normal(e, d, f, terms=f)
    return Layer(normal(t, d), ids, scores, *weights, normal(t, d), **biases)


def swiglu_oai(g: Tensor, u: Tensor) -> Tensor:
    g, u = g.clamp(max=7), u.clamp(-7, 7)
    return g * torch.sigmoid(1.702 * g) * (u + 1)


GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu": lambda g, u: silu(g) * u,
    "geglu": lambda g, u: gelu(g, approximate="tanh") * u,
    "swiglu_oai": swiglu_oai,
}
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "relu2": lambda h: relu(h).square(),
    "silu": silu,
    "gelu": partial(gelu, approximate="tanh"),
}


def activated(h: Tensor, activation: str, interleaved: bool) -> Tensor:
    if activation in PLAIN:
        return PLAIN[activation](h)
    g, u = (h[:, ::2], h[:, 1::2]) if interleaved else h.chunk(2, -1)
    return GATED[activation](g, u)


def exact(
    x: Tensor,
    ids: Tensor,
    scores: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    *,
    activation: str = "swiglu",
    interleaved: bool = False,
    b_gate_up: Tensor | None = None,
    b_down: Tensor | None = None,
) -> Tensor:
    """The layer in plain PyTorch, expert by expert."""
    out = torch.zeros_like(x)
    for e in range(len(w_down)):
        tokens, j = (ids == e).nonzero(as_tuple=True)
        h = x[tokens] @ w_gate_up[e].t()
        a = activated(h if b_gate_up is None else h + b_gate_up[e], activation, interleaved)
        y = a @ w_down[e].t()
        out = out.index_add(0, tokens, (y if b_down is None else y + b_down[e]) * scores[tokens, j, None])
    return out


LEAVES = ("x", "scores", "w_gate_up", "w_down", "b_gate_up", "b_down")


def run(problem: Layer, fn: Callable = experts, frozen: tuple[str, ...] = (), **options: object) -> dict[str, Tensor]:
    """The output and the gradients of all leaves that are not frozen, by name."""
    leaves = {n: getattr(problem, n).detach() for n in LEAVES if getattr(problem, n) is not None}
    leaves = {n: t.clone().requires_grad_(n not in frozen) for n, t in leaves.items()}
    biases = {n: t for n, t in leaves.items() if n[0] == "b"}
    weights = leaves["w_gate_up"], leaves["w_down"]
    out = fn(leaves["x"], problem.ids, leaves["scores"], *weights, **biases, **options)
    if out.requires_grad:
        out.backward(problem.grad.to(out.dtype))
    return {"out": out.detach()} | {n: t.grad for n, t in leaves.items() if t.grad is not None}


def run_exact(problem: Layer, **options: object) -> dict[str, Tensor]:
    tensors = {n: getattr(problem, n) for n in (*LEAVES, "grad")}
    in_float64 = {n: t if t is None else t.double() for n, t in tensors.items()}
    return run(replace(problem, **in_float64), exact, **options)


def min_db(name: str, recipe: str, keep: str = "fp8") -> float:
    # The gradient of the down product's bias is not computed from FP8.
    if recipe == "bf16" or name == "b_down":
        return BF16_DB
    return -10 * math.log10(NOISE[keep][name] * OF_OPERAND) - (SPREAD_DB if name in FEW else SPREAD_OF_MANY_DB)


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert_same_tensor(got[name], want[name], name)


# main_grad

WEIGHTS = ("w_gate_up", "w_down")
ARGUMENT = {"w_gate_up": "main_grad_gate_up", "w_down": "main_grad_down"}


def main_grads(problem: Layer, dtype: torch.dtype = torch.float32, fill: float = 0) -> dict[str, Tensor]:
    """The arguments main_grad_gate_up and main_grad_down, filled with a value."""
    return {ARGUMENT[n]: torch.full_like(getattr(problem, n), fill, dtype=dtype) for n in WEIGHTS}


def but(results: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    """Returns the results whose names are not in `names`."""
    return {n: t for n, t in results.items() if n not in names}
