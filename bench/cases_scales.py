"""The benchmark cases of scales in the blocked layout, and of operands that are dequantized to values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from case import (
    HOST,
    RECIPES,
    TABLE,
    Case,
    Rule,
    Shape,
    Target,
    activations,
    always,
    even_and_uneven,
    group_ends,
    is_,
    normal,
)
from cases_tokens import padded_shapes
from torch import Tensor

from moe_fp8_ext import ops


def _matrices(cpu: bool) -> list[Shape]:
    """Scales of activations [M, 7168], one for 32 features."""
    sizes = [(300, 44)] if cpu else [(8192, 224), (131072, 224)]
    return [Shape(f"[{r}, {c}]", {"r": r, "c": c}) for r, c in sizes]


def _experts(cpu: bool) -> list[Shape]:
    sizes = [(3, 300, 44)] if cpu else TABLE["scales_3d_ERC"]
    return [Shape(f"[{e}, {r}, {c}]", {"e": e, "r": r, "c": c}) for e, r, c in sizes]


def _grouped(r: int, c: int, e: int) -> Callable[[bool], list[Shape]]:
    def shapes(cpu: bool) -> list[Shape]:
        rows, columns = (300, 67) if cpu else (r, c)
        return even_and_uneven([Shape(f"[{rows}, {columns}] E={e}", {"r": rows, "c": columns, "e": e})])

    return shapes


_3D: tuple[Rule, ...] = (
    (is_("[16, 8192, 160]"), Target("gbps", ">=", 2500)),
    (is_("[16, 5120, 256]"), Target("gbps", ">=", 2500)),
    (is_("[1, 8192, 160]"), Target("us", "<=", 2.5)),
)
_GROUPS: tuple[Rule, ...] = ((always, Target("us", "<=", 20)),)  # a copy's speed would give 13.8 us
_SHAPES = {
    None: (_matrices, ()),
    "experts": (_experts, _3D),
    "rows": (_grouped(131072, 224, 8), _GROUPS),
    "columns": (_grouped(7168, 4096, 8), _GROUPS),
}


def _scale(of: str | None) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def inputs(device: torch.device, groups: str | None, **dims: int) -> tuple[Tensor, Tensor | None]:
        e = dims.pop("e") if groups else 0
        scale = torch.randint(0, 256, tuple(dims.values()), dtype=torch.uint8, device=device)
        return scale, group_ends(groups, dims["r" if of == "rows" else "c"], e, device) if groups else None

    return inputs


def _blocked(of: str | None) -> Callable[..., tuple[object, ...]]:
    def inputs(device: torch.device, groups: str | None, **dims: int) -> tuple[object, ...]:
        scale, offs = _scale(of)(device, groups, **dims)
        blocked, _ = ops.swizzle_scales(scale, groups=of, offs=offs)
        return blocked, *scale.shape[-2:], offs

    return inputs


def _swizzle(of: str | None) -> Case:
    def call(scale: Tensor, offs: Tensor | None) -> object:
        return ops.swizzle_scales(scale, groups=of, offs=offs)

    shapes, rules = _SHAPES[of]
    return Case("swizzle_scales", shapes, _scale(of), call, rules, variant=of or "")


def _unswizzle(of: str | None) -> Case:
    def call(blocked: Tensor, rows: int, cols: int, offs: Tensor | None) -> object:
        return ops.unswizzle_scales(blocked, rows, cols, groups=of, offs=offs)

    return Case("unswizzle_scales", _SHAPES[of][0], _blocked(of), call, (HOST,), variant=of or "")


def _dequantize_rows(format: str) -> Case:
    def shapes(cpu: bool) -> list[Shape]:
        return activations(cpu) if format == "blockwise" else activations(cpu)[-1:]

    def inputs(device: torch.device, groups: None, *, m: int, k: int) -> tuple[Tensor, Tensor]:
        return ops.quantize_rows(normal(device, m, k), format)

    def call(q: Tensor, scale: Tensor) -> Tensor:
        return ops.dequantize(q, scale, format)

    return Case("dequantize", shapes, inputs, call, (HOST,), format)


def _dequantize_tokens(format: str) -> Case:
    def inputs(device: torch.device, groups: str, *, m: int, k: int, e: int) -> tuple[Tensor, ...]:
        return ops.quantize_tokens(normal(device, m, k), format, offs=group_ends(groups, m, e, device))

    def call(q_t: Tensor, scale_t: Tensor, padded_offs: Tensor) -> Tensor:
        return ops.dequantize(q_t, scale_t, format, along="tokens", offs=padded_offs)

    return Case("dequantize", lambda cpu: padded_shapes(cpu)[:2], inputs, call, (HOST,), format, "tokens")


def _dequantize_weight(format: str) -> Case:
    """On Hopper, MXFP8's products dequantize the right operand, in another order of elements."""

    def shapes(cpu: bool) -> list[Shape]:
        sizes = [(3, 96, 64)] if cpu else [(8, 4096, 7168), (32, 4096, 7168), (128, 1536, 2048)]
        return [Shape(f"[{e}, {n}, {k}]", {"e": e, "n": n, "k": k}) for e, n, k in sizes]

    def inputs(device: torch.device, groups: None, *, e: int, n: int, k: int) -> tuple[Tensor, ...]:
        return ops.quantize_weight(normal(device, e, n, k), format)[:2]

    def call(q: Tensor, scale: Tensor) -> Tensor:
        return ops.dequantize(q, scale, format)

    return Case("dequantize", shapes, inputs, call, (HOST,), format, "weights")


def _expand_scales(along: str) -> Case:
    """What a B200 pays before a product of "blockwise" with powers of two; along tokens, of squares."""

    def inputs(device: torch.device, groups: str, *, m: int, k: int, e: int) -> tuple[object, ...]:
        x, offs = normal(device, m, k), group_ends(groups, m, e, device)
        if along == "rows":
            return *ops.quantize_rows(x, "blockwise", rounding="pow2"), offs
        return ops.quantize_tokens(x, "blockwise", offs=offs, rounding="pow2", amax="square")

    def call(q: Tensor, scale: Tensor, offs: Tensor) -> Tensor:
        return ops.expand_scales(q, scale, along=along, offs=offs)

    return Case("expand_scales", lambda cpu: padded_shapes(cpu)[:2], inputs, call, (HOST,), "blockwise", along)


def _transpose_weight() -> Case:
    """Weights of layers, whose transpose backward makes when one direction is held."""

    def shapes(cpu: bool) -> list[Shape]:
        sizes = [(3, 96, 64)] if cpu else [(128, 1536, 2048), (128, 2048, 768), (32, 5760, 2880), (128, 2816, 4096)]
        return [Shape(f"[{e}, {n}, {k}]", {"e": e, "n": n, "k": k}) for e, n, k in sizes]

    def inputs(device: torch.device, groups: None, *, e: int, n: int, k: int) -> tuple[Tensor, ...]:
        return ops.quantize_weight(normal(device, e, n, k), "blockwise")[:1]

    return Case("transpose_weight", shapes, inputs, ops.transpose_weight, (HOST,), "blockwise")


SCALE_CASES: tuple[Case, ...] = (
    *(make(format) for format in RECIPES for make in (_dequantize_rows, _dequantize_tokens)),
    _dequantize_weight("mxfp8"),
    _transpose_weight(),
    *map(_expand_scales, ("rows", "tokens")),
    *(make(of) for make in (_swizzle, _unswizzle) for of in _SHAPES),
)
