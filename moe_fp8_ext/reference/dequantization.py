"""Dequantization: the operand of any quantizer times its scales."""

from __future__ import annotations

import torch
from torch import Tensor

from .numerics import FORMATS, Format, group_bounds, int32, round_to, scale_values
from .scales import unswizzle_scales
from .signature import of_op


def expand_blocks(scale: Tensor, format: Format, n: int) -> Tensor:
    """scale [..., blocks] -> [..., n]: the scale of every element, from its block."""
    return scale[..., : format.blocks(n)].repeat_interleave(format.block or n, -1)[..., :n]


def scales_along_rows(q: Tensor, scale: Tensor, f: Format, offs: Tensor | None) -> Tensor:
    """The scales of the elements of q [..., K]; with groups, only up to the end of the last group."""
    k = q.shape[-1]
    if f.block is None:
        return expand_blocks(scale_values(scale)[..., None], f, k)
    if f.order == "blocked":
        groups = "experts" if q.ndim == 3 else None if offs is None else "rows"
        scale = unswizzle_scales(scale, q.shape[-2], f.blocks(k), groups=groups, offs=offs)
        if groups == "rows":
            scale = scale[: max([0, *(end for _, end in group_bounds(offs, len(q)))])]
    if q.ndim == 3 and f.weight_rows > 1:
        scale = scale.repeat_interleave(f.weight_rows, 1)[:, : q.shape[1]]
    return expand_blocks(scale_values(scale), f, k)


def scales_along_tokens(q: Tensor, scale: Tensor, f: Format, offs: Tensor) -> Tensor:
    """The scales of the elements of q_t [K, P], up to the end of the last group."""
    bounds = group_bounds(offs, q.shape[1])
    if f.order == "blocked":
        ends = int32([f.blocks(end - start) for start, end in bounds], q.device).cumsum(0).int()
        scale = unswizzle_scales(scale, len(q), int(ends[-1]) if bounds else 0, groups="columns", offs=ends)
    if f.weight_rows > 1 and len(scale) < len(q):  # a scale per square of amax "square"
        scale = scale.repeat_interleave(f.weight_rows, 0)[: len(q)]
    values, parts, block = scale_values(scale.t() if f.block is None else scale), [], 0
    for start, end in bounds:
        parts.append(expand_blocks(values[:, block:], f, end - start))
        block += f.blocks(end - start)
    return torch.cat(parts, 1) if parts else values[:, :0]


@of_op
def dequantize(q, scale, format, along, offs, out_dtype):
    """q and its scales -> RN(RN32(q * scale)); 0 outside of groups.

    q is [M, K], [..., K] if scales are row-major, or a weight [E, N, K]. Along tokens it is q_t [K, P], and offs are
    the padded_offs.
    """
    return round_to(exact_values(q, scale, format, along=along, offs=offs).float(), out_dtype or torch.bfloat16)


def exact_values(q: Tensor, scale: Tensor, format: str, *, along: str = "rows", offs: Tensor | None = None) -> Tensor:
    """q * scale in float64, which is exact; 0 outside of groups."""
    scales_along = scales_along_tokens if along == "tokens" else scales_along_rows
    scales = scales_along(q, scale, FORMATS[format], offs)  # shaped as q without the part that belongs to no group
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    inside = tuple(map(slice, scales.shape))
    out[inside] = q.double()[inside] * scales
    return out
