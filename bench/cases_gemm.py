"""The benchmark cases of products: one GEMM on quantized operands, and forward and backward of `grouped_mm`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from case import (
    RECIPES,
    TABLE,
    Case,
    Rule,
    Shape,
    Target,
    always,
    even_and_uneven,
    group_ends,
    is_,
    normal,
    small_sizes,
)
from cases_experts import SIZES
from torch import Tensor

import moe_fp8_ext as moe
from moe_fp8_ext import ops
from moe_fp8_ext.quantization.format import FORMATS


def _gemms(cpu: bool) -> list[Shape]:
    sizes = {f"[{m}, {k}] E={e}": (m, k, k, e) for m, k, e in small_sizes()[:1]} if cpu else TABLE["grouped_gemm_MKNE"]
    return even_and_uneven(Shape(label, dict(zip("mkne", size, strict=True))) for label, size in sizes.items())


def _both_products(cpu: bool) -> list[Shape]:
    return [
        Shape(f"{shape.label} {name}", {**shape.dims, "wgrad": wgrad}, shape.groups)
        for shape in _gemms(cpu)
        for name, wgrad in (("2Dx3D", 0), ("2Dx2D", 1))
    ]


def _gradients_of_weights(cpu: bool) -> list[Shape]:
    return [shape for shape in _both_products(cpu) if shape.dims["wgrad"]]


def _operands(
    device: torch.device,
    groups: str,
    *,
    m: int,
    k: int,
    n: int,
    e: int,
    wgrad: int,
    format: str = "rowwise",
    amax: str = "group",
) -> tuple[object, ...]:
    """a, b, scale_a, scale_b, format, offs and the multiple of all offs. amax is the amax of b along tokens."""
    offs, f = group_ends(groups, m, e, device), FORMATS[format]
    if wgrad:
        a, scale_a, padded_offs = ops.quantize_tokens(normal(device, m, n), format, offs=offs)
        b, scale_b, _ = ops.quantize_tokens(normal(device, m, k), format, offs=offs, amax=amax)
        return a, b.t(), scale_a, f.transposed_scale(scale_b), format, padded_offs, f.align
    a, scale_a = ops.quantize_rows(normal(device, m, k), format, offs=offs)
    b, scale_b, _, _ = ops.quantize_weight(normal(device, e, n, k), format)
    return a, b.mT, scale_a, f.transposed_scale(scale_b), format, offs, 1


def _scaled(*operands: object) -> Tensor:
    return ops.scaled_grouped_mm(*operands[:-1], align=operands[-1])


def _total_and_operands(device: torch.device, groups: str, *, m: int, k: int, n: int, e: int) -> tuple[object, ...]:
    """A float32 main gradient, and the operands whose product is added to it."""
    return torch.zeros(e, n, k, device=device), *_operands(device, groups, m=m, k=k, n=n, e=e, wgrad=1)


def _added(total: Tensor, *operands: object) -> Tensor:
    ops.add_scaled_grouped_mm(total, *operands[:-1], align=operands[-1])
    return total


def _plain(total: Tensor, *operands: object) -> Tensor:
    return ops.scaled_grouped_mm(*operands[:-1], align=operands[-1], out_dtype=torch.float32)


@cache
def _ones(*size: int, device: torch.device) -> Tensor:
    return torch.ones(size, device=device)


def _dense(a: Tensor, b: Tensor, *_: object) -> Tensor:
    """The GEMM of the same size with one group, and with scales of rows for every format. In 2D x 2D it includes the
    padding, at most E * 32 of the tokens."""
    b = b if b.ndim == 2 else b[0]
    scale_a, scale_b = _ones(a.shape[0], 1, device=a.device), _ones(1, b.shape[1], device=a.device)
    return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=True)


def _training(device: torch.device, groups: str, *, m: int, k: int, n: int, e: int) -> tuple[Tensor, ...]:
    a, w = normal(device, m, k, grad=True), normal(device, e, n, k, grad=True)
    return a, w, group_ends(groups, m, e, device), normal(device, m, n)


def forward_backward(grouped_mm: Callable[..., Tensor]) -> Callable[..., object]:
    def call(a: Tensor, w: Tensor, offs: Tensor, grad: Tensor) -> object:
        return torch.autograd.grad(grouped_mm(a, w.mT, offs=offs), (a, w), grad)

    return call


def _bytes_kept(recipe: str, a: Tensor, w: Tensor, offs: Tensor, grad: Tensor) -> float:
    """Bytes that forward keeps for the gradient of the weights, with scales and padding, per element of `a`."""
    storages: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        out = moe.grouped_mm(a.detach(), w.mT, offs, recipe=recipe)
    del out
    return sum(storages.values()) / a.numel()


def _flops(*, m: int, k: int, n: int, **_: int) -> int:
    return 2 * m * k * n


def _flops_of_training(**dims: int) -> int:
    return 3 * _flops(**dims)


def _many_tokens(shape: Shape) -> bool:
    return shape.dims["m"] >= 1024 * shape.dims["e"]


_OVER_BF16 = {
    "rowwise": {"dsv3_up": 1.7, "dsv3_down": 1.6, "llama4": 1.68, "dsmoe16b": 1.48},
    "blockwise": {"dsv3_up": 1.5, "dsv3_down": 1.4, "llama4": 1.5, "dsmoe16b": 1.25},
    "mxfp8": {"dsv3_up": 1.0},
}


def _rules(metric: str, bounds: dict[str, float]) -> tuple[Rule, ...]:
    return tuple((is_(name), Target(metric, ">=", bound)) for name, bound in bounds.items())


# BF16 keeps 2. If experts have few tokens, padding doubles the bytes.
_KEPT: tuple[Rule, ...] = ((_many_tokens, Target("kept", "<=", 1.1)), (always, Target("kept", "<=", 2)))


def _is_sum(shape: Shape) -> bool:
    return bool(shape.dims["wgrad"])


def _sums_much(shape: Shape) -> bool:
    return shape.dims["k"] >= 5120 and not _is_sum(shape)


_OF_EVEN: Rule = (always, Target("of_even", ">=", 0.93))
_OVER_TORCH = {"qwen3_up 2Dx3D": 1.18, "qwen3_down 2Dx3D": 1.18}
_OF_PRODUCTS: dict[str, tuple[Rule, ...]] = {
    "rowwise": (
        (_sums_much, Target("ratio", ">=", 0.95)),
        *_rules("over_torch_fp8", _OVER_TORCH),
        (_is_sum, Target("over_torch_fp8", ">=", 1.08)),
        (always, Target("over_torch_fp8", ">=", 1.12)),
        _OF_EVEN,
    ),
    "blockwise": (*_rules("tflops", {"dsv3_up 2Dx3D": 1200, "dsv3_down 2Dx3D": 1120}), _OF_EVEN),
}


def _scaled_grouped_mm(format: str) -> Case:
    rules, operands = _OF_PRODUCTS.get(format, ()), partial(_operands, format=format)
    return Case("scaled_grouped_mm", _both_products, operands, _scaled, rules, format, flops=_flops, baseline=_dense)


# Scales of squares: recipe "blockwise" multiplies such activations for the gradients of weights.
_OF_SQUARES = Case(
    "scaled_grouped_mm",
    _gradients_of_weights,
    partial(_operands, format="blockwise", amax="square"),
    _scaled,
    (*_rules("tflops", {"dsv3_up 2Dx2D": 1000, "dsv3_down 2Dx2D": 1000}), _OF_EVEN),
    "blockwise",
    "squares",
    flops=_flops,
    baseline=_dense,
)


# Compared with the product that is only written, this shows the cost of reading the total.
_ADDED = Case(
    "add_scaled_grouped_mm", _gemms, _total_and_operands, _added, format="rowwise", flops=_flops, baseline=_plain
)


def _of_tokens(cpu: bool) -> list[Shape]:
    """Up-projections of layers."""
    sizes = {"small": (300, 96, 64, 5, 2)} if cpu else SIZES
    return [Shape(f"layer {name}", dict(zip("tdfek", dims, strict=True))) for name, dims in sizes.items()]


def _tokens(device: torch.device, groups: None, *, t: int, d: int, f: int, e: int, k: int) -> tuple[object, ...]:
    indices, offs, _ = ops.sort_tokens(torch.randn(t, e, device=device).topk(k, -1).indices, e)
    a, scale_a = ops.quantize_rows(normal(device, t, d), "rowwise")
    b, scale_b, _, _ = ops.quantize_weight(normal(device, e, 2 * f, d), "rowwise")
    return a, b.mT, scale_a, scale_b, "rowwise", offs, indices, k


def _by_index(*operands: object) -> Tensor:
    *most, indices, k = operands
    return ops.scaled_grouped_mm(*most, indices=indices, top_k=k)


def _moved(a: Tensor, b: Tensor, scale_a: Tensor, *rest: object) -> Tensor:
    scale_b, format, offs, indices, k = rest
    a, scale_a = ops.permute_quantized(a, scale_a, format, indices, k)
    return ops.scaled_grouped_mm(a, b, scale_a, scale_b, format, offs)


def _flops_of_tokens(*, t: int, d: int, f: int, k: int, **_: int) -> int:
    return _flops(m=t * k, k=d, n=2 * f)


_OF_TOKENS = Case(
    "scaled_grouped_mm", _of_tokens, _tokens, _by_index, (), "rowwise", "by index", _flops_of_tokens, _moved
)


def _trained(cpu: bool) -> list[Shape]:
    """Small experts also have less uneven groups, like most routers'."""
    shapes, small = _gemms(cpu), ("qwen3", "granite")
    return shapes + [Shape(s.label, s.dims, "zipf 0.8") for s in shapes if s.uneven and s.label.startswith(small)]


def _grouped_mm(recipe: str) -> Case:
    return Case(
        "grouped_mm",
        _trained,
        _training,
        forward_backward(partial(moe.grouped_mm, recipe=recipe)),
        (*_rules("ratio", _OVER_BF16.get(recipe, {})), *_KEPT),
        recipe,
        flops=_flops_of_training,
        baseline=forward_backward(torch._grouped_mm),
        kept=partial(_bytes_kept, recipe),
    )


# Weights are quantized once for many calls, as in gradient accumulation.
_REUSED = Case(
    "grouped_mm",
    _gemms,
    _training,
    forward_backward(partial(moe.grouped_mm, recipe="rowwise")),
    (),
    "rowwise",
    "weights reused",
    flops=_flops_of_training,
    baseline=forward_backward(torch._grouped_mm),
    within=moe.reuse_weights,
)

GEMM_CASES: tuple[Case, ...] = (
    *map(_scaled_grouped_mm, RECIPES),
    _OF_SQUARES,
    _OF_TOKENS,
    _ADDED,
    *map(_grouped_mm, RECIPES),
    _REUSED,
)
