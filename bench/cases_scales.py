"""The benchmark cases of scales in the blocked layout."""

from __future__ import annotations

from collections.abc import Callable

import torch
from case import TABLE, Case, Rule, Shape, Target, always, group_ends, is_
from torch import Tensor

import moe_fp8_ext as moe

Inputs = Callable[..., tuple[object, ...]]


def _matrices(cpu: bool) -> list[Shape]:
    """Of activations [M, 7168], one scale for 32 features."""
    sizes = [(300, 44)] if cpu else [(8192, 224), (131072, 224)]
    return [Shape(f"[{r}, {c}]", {"r": r, "c": c}) for r, c in sizes]


def _experts(cpu: bool) -> list[Shape]:
    sizes = [(3, 300, 44)] if cpu else TABLE["scales_3d_ERC"]
    return [Shape(f"[{e}, {r}, {c}]", {"e": e, "r": r, "c": c}) for e, r, c in sizes]


def _grouped(r: int, c: int, e: int) -> Callable[[bool], list[Shape]]:
    def shapes(cpu: bool) -> list[Shape]:
        rows, columns = (300, 67) if cpu else (r, c)
        return [Shape(f"[{rows}, {columns}] E={e}", {"r": rows, "c": columns, "e": e})]

    return shapes


def _bytes(device: torch.device, layout: str, **dims: int) -> tuple[Tensor, ...]:
    return (torch.randint(0, 256, tuple(dims.values()), dtype=torch.uint8, device=device),)


def _of_groups(dim: int) -> Inputs:
    """With groups of rows (dim 0) or of columns (dim 1)."""

    def inputs(device: torch.device, layout: str, *, r: int, c: int, e: int) -> tuple[object, ...]:
        return *_bytes(device, layout, r=r, c=c), group_ends(layout, (r, c)[dim], e, device)

    return inputs


def _swizzled(swizzle: Callable[..., object], inputs: Inputs) -> Inputs:
    """What the way back takes."""

    def blocked(device: torch.device, layout: str, **dims: int) -> tuple[object, ...]:
        scale, *offs = inputs(device, layout, **dims)
        out = swizzle(scale, *offs)
        return out[0] if offs else out, *offs, *scale.shape[-2:]

    return blocked


_3D: tuple[Rule, ...] = (
    (is_("[16, 8192, 160]"), Target("gbps", ">=", 2500)),
    (is_("[16, 5120, 256]"), Target("gbps", ">=", 2500)),
    (is_("[1, 8192, 160]"), Target("us", "<=", 2.5)),
)
_GROUPS: tuple[Rule, ...] = ((always, Target("us", "<=", 20)),)
_M_GROUPS, _K_GROUPS = _grouped(131072, 224, 8), _grouped(7168, 4096, 8)  # 13.8 us at the speed of a copy

_FORTH = (
    Case("swizzle_scales_2d", _matrices, _bytes, moe.swizzle_scales_2d),
    Case("swizzle_scales_3d", _experts, _bytes, moe.swizzle_scales_3d, _3D),
    Case("swizzle_scales_m_groups", _M_GROUPS, _of_groups(0), moe.swizzle_scales_m_groups, _GROUPS),
    Case("swizzle_scales_k_groups", _K_GROUPS, _of_groups(1), moe.swizzle_scales_k_groups, _GROUPS),
)
SCALE_CASES = (
    *_FORTH,
    *(Case(f"un{c.op}", c.shapes, _swizzled(c.call, c.inputs), getattr(moe, f"un{c.op}")) for c in _FORTH),
)
