"""The benchmark cases of adapters: products of tokens with factors of a low rank, and casts of factors."""

from __future__ import annotations

import torch
from case import HOST, Case, Shape, even_and_uneven, group_ends, normal
from torch import Tensor

from moe_fp8_ext import ops
from moe_fp8_ext.matmul.bf16 import bf16_product, bf16_wgrad


def _adapters(cpu: bool) -> list[Shape]:
    """Tokens of Qwen3-30B-A3B and their experts, with adapters of rank 16, and the widths of both of its products."""
    t, top_k, e, widths = (300, 4, 9, (64,)) if cpu else (16384, 8, 128, (768, 2048))
    dims = {"t": t, "top_k": top_k, "r": 16, "e": e}
    shapes = [Shape(f"[{t}, {w}] top_k={top_k} R=16 E={e}", dims | {"w": w}) for w in widths]
    return even_and_uneven(shapes)


def _rows(device: torch.device, groups: str, *, t: int, top_k: int, e: int) -> tuple[Tensor, Tensor]:
    """Slots in any order, and the ends of groups."""
    return group_ends(groups, t * top_k, e, device), torch.randperm(t * top_k, device=device).int()


def _narrowed(device: torch.device, groups: str, *, w: int, r: int, **dims: int) -> tuple[object, ...]:
    offs, indices = _rows(device, groups, **dims)
    return normal(device, dims["t"], w), normal(device, dims["e"], r, w), offs, indices, dims["top_k"]


def _summed(device: torch.device, groups: str, *, w: int, r: int, **dims: int) -> tuple[object, ...]:
    offs, indices = _rows(device, groups, **dims)
    t, top_k = dims["t"], dims["top_k"]
    scores = torch.rand(t, top_k, device=device)
    return normal(device, t * top_k, r), normal(device, t, w), offs, scores, indices, top_k


def _narrow_tokens(x: Tensor, m: Tensor, offs: Tensor, indices: Tensor, top_k: int) -> Tensor:
    return ops.narrow_tokens(x, m, offs, indices=indices, top_k=top_k)


def _outer_tokens(u: Tensor, x: Tensor, offs: Tensor, scores: Tensor, indices: Tensor, top_k: int) -> Tensor:
    return ops.outer_tokens(u, x, offs, scores=scores, indices=indices, top_k=top_k)


def _narrowed_by_torch(x: Tensor, m: Tensor, offs: Tensor, indices: Tensor, top_k: int) -> Tensor:
    """A copy of the tokens in the order of experts, and a grouped product."""
    return bf16_product(ops.permute_pad(x, indices, top_k), m.mT, offs)


def _summed_by_torch(u: Tensor, x: Tensor, offs: Tensor, scores: Tensor, indices: Tensor, top_k: int) -> Tensor:
    scored = (u * ops.permute_pad(scores.view(-1, 1), indices, 1)).bfloat16()
    return bf16_wgrad(scored, ops.permute_pad(x, indices, top_k), offs)


def _factors(cpu: bool) -> list[Shape]:
    """Factors of LoRA in float32, as adapters of PEFT have them: those of the inputs, and those of the outputs."""
    sizes = [(5, 16, 96)] if cpu else [(128, 16, 2048), (128, 16, 768)]
    return [
        Shape(f"[{e}, {r}, {c}] {order}", {"e": e, "r": r, "c": c, "order": order})
        for e, r, c in sizes
        for order in ("erc", "rce")
    ]


def _factor(device: torch.device, groups: None, *, e: int, r: int, c: int, order: str) -> tuple[object, ...]:
    m = normal(device, e, r, c) if order == "erc" else normal(device, r, c, e).permute(2, 0, 1)
    return m.float(), r, c, "ecr", torch.bfloat16, None, 0.5


LOW_RANK_CASES: tuple[Case, ...] = (
    Case("narrow_tokens", _adapters, _narrowed, _narrow_tokens, (HOST,), baseline=_narrowed_by_torch),
    Case("outer_tokens", _adapters, _summed, _outer_tokens, (HOST,), baseline=_summed_by_torch),
    Case("cast_factor", _factors, _factor, ops.cast_factor, (HOST,)),
)
