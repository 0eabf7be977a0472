"""The benchmark cases of ops that move tokens: to experts, into padded groups, and back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from case import (
    HOST,
    RECIPES,
    Case,
    Rule,
    Shape,
    Target,
    always,
    even_and_uneven,
    exchanged_shapes,
    group_ends,
    grouped_shapes,
    is_,
    normal,
    of_copy,
    shares,
    small_sizes,
)
from torch import Tensor

from moe_fp8_ext import ops


def padded_shapes(cpu: bool) -> list[Shape]:
    return grouped_shapes(small_sizes() if cpu else [(131072, 7168, 8), (131072, 2048, 64), (16640, 5120, 64)])


def _routings(cpu: bool) -> list[Shape]:
    t, top_k, e = (4096, 8, 64) if cpu else (131072, 8, 256)
    return even_and_uneven([Shape(f"[{t}, {top_k}] E={e}", {"t": t, "top_k": top_k, "e": e})])


def _slot_rows(cpu: bool) -> list[Shape]:
    t, top_k, k = (300, 4, 512) if cpu else (16384, 8, 7168)
    return [Shape(f"[{t}, {top_k}] K={k}", {"t": t, "top_k": top_k, "k": k})]


def _grouped(device: torch.device, groups: str, *, m: int, k: int, e: int) -> tuple[Tensor, Tensor]:
    return normal(device, m, k), group_ends(groups, m, e, device)


def _placed(device: torch.device, groups: str, **dims: int) -> tuple[object, ...]:
    x, offs = _grouped(device, groups, **dims)
    padded, starts, _ = ops.pad_token_groups(x, offs)
    return x, offs, starts, padded.shape[0]


def _padded(device: torch.device, groups: str, **dims: int) -> tuple[object, ...]:
    x, offs = _grouped(device, groups, **dims)
    padded, starts, _ = ops.pad_token_groups(x, offs)
    return padded, offs, starts, x.shape[0]


def exchanged_counts(device: torch.device, groups: str, m: int, r: int, e: int) -> Tensor:
    """Every rank sends the same number of tokens. `groups` gives the experts' shares."""
    of_rank = group_ends(groups, m // r, e, device).diff(prepend=torch.zeros(1, dtype=torch.int32, device=device))
    return of_rank.repeat(r)


def _sent(device: torch.device, groups: str, *, m: int, k: int, r: int, e: int) -> tuple[object, ...]:
    return exchanged_counts(device, groups, m, r, e), e, r, m


def _indexed(device: torch.device, groups: str, *, m: int, k: int, r: int, e: int) -> tuple[object, ...]:
    return normal(device, m, k), ops.permute_indices(*_sent(device, groups, m=m, k=k, r=r, e=e))[0], 1


def _permuted(device: torch.device, groups: str, **dims: int) -> tuple[object, ...]:
    x, indices, top_k = _indexed(device, groups, **dims)
    return ops.permute_pad(x, indices, top_k), indices, top_k, x.shape[0]


def _tokens_only(args: tuple, out: Tensor) -> int:
    """The op does not read the padding of its argument, so it reads as many bytes as it writes."""
    return 2 * out.nbytes


def _routed(device: torch.device, groups: str, *, t: int, top_k: int, e: int) -> tuple[object, ...]:
    ids = torch.multinomial(shares(groups, e).float().to(device), t * top_k, replacement=True)
    return ids.view(t, top_k), e


def _routings_of_ranks(cpu: bool) -> list[Shape]:
    t, top_k, e, r = (512, 8, 64, 8) if cpu else (16384, 8, 64, 8)
    return even_and_uneven([Shape(f"[{t}, {top_k}] E={e} R={r}", {"t": t, "top_k": top_k, "e": e, "r": r})])


def _routed_to_ranks(device: torch.device, groups: str, *, r: int, **dims: int) -> tuple[object, ...]:
    return *_routed(device, groups, **dims), r


def _torch_sort(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Today's MoE layers make only an order and offsets from topk, and no inverse."""
    ids = topk_ids.flatten()
    counts = torch.histc(ids.float(), num_experts, 0, num_experts - 1)
    return ids.argsort(stable=True), counts.cumsum(0)


def _slots(device: torch.device, groups: None, *, t: int, top_k: int, k: int) -> tuple[Tensor, ...]:
    inverse = torch.randperm(t * top_k, device=device).int().view(t, top_k)
    return normal(device, t * top_k, k), inverse, torch.rand(t, top_k, device=device)


def _slot_gradients(device: torch.device, groups: None, *, t: int, top_k: int, k: int) -> tuple[object, ...]:
    y, inverse, scores = _slots(device, groups, t=t, top_k=top_k, k=k)
    return normal(device, t, k), y, scores, inverse, y.shape[0]


def _tokens_to_slots(cpu: bool) -> list[Shape]:
    t, top_k, k, e = (300, 4, 512, 9) if cpu else (16384, 8, 7168, 256)
    return [Shape(f"[{t}, {top_k}] K={k} E={e}", {"t": t, "top_k": top_k, "k": k, "e": e})]


def _tokens_to_ranks(cpu: bool) -> list[Shape]:
    t, top_k, k, e = (300, 4, 512, 8) if cpu else (16384, 8, 7168, 64)
    return [Shape(f"[{t}, {top_k}] K={k} E={e}", {"t": t, "top_k": top_k, "k": k, "e": e})]


def _quantized(format: str) -> Callable[..., tuple[object, ...]]:
    def inputs(device: torch.device, groups: None, *, t: int, top_k: int, k: int, e: int) -> tuple[object, ...]:
        permutation, offs, _ = ops.sort_tokens(torch.randint(e, (t, top_k), device=device), e)
        return *ops.quantize_rows(normal(device, t, k), format), format, permutation, top_k, offs

    return inputs


def _permute_quantized(*args: object) -> tuple[Tensor, Tensor]:
    *most, offs = args
    return ops.permute_quantized(*most, offs=offs)


def _known_of_tokens(format: str) -> Callable[..., tuple[object, ...]]:
    """Tokens for the two ranks of their experts, as `ExpertParallel` sends them."""

    def inputs(device: torch.device, groups: None, *, t: int, top_k: int, k: int, e: int) -> tuple[object, ...]:
        ids, scores = torch.randint(e, (t, top_k), device=device), torch.rand(t, top_k, device=device)
        permutation, _, _ = ops.sort_tokens(ops.tokens_by_rank(ids, e, 2)[0], 2)
        q, scale = ops.quantize_rows(normal(device, t, k), format)
        return q, ids, scores, scale, permutation, 2, e

    return inputs


def _tokens_of_ranks(format: str) -> Callable[..., tuple[object, ...]]:
    """The same tokens before they are quantized."""

    def inputs(device: torch.device, groups: None, *, t: int, top_k: int, k: int, e: int) -> tuple[object, ...]:
        ids, scores = torch.randint(e, (t, top_k), device=device), torch.rand(t, top_k, device=device)
        indices, _, inverse = ops.sort_tokens(ops.tokens_by_rank(ids, e, 2)[0], 2)
        return normal(device, t, k), ids, scores, format, indices, inverse, e

    return inputs


def _slots_only(args: tuple, out: tuple[Tensor, Tensor]) -> int:
    """A token is read once for each of its slots."""
    return 2 * sum(t.nbytes for t in out)


def _many_tokens(shape: Shape) -> bool:
    return shape.dims["m"] >= 131072


_PADDING: tuple[Rule, ...] = (
    (_many_tokens, of_copy(0.92)),
    (is_("[16640, 5120] E=64"), Target("us", "<=", 100)),
)
_PERMUTING: tuple[Rule, ...] = ((is_("[131072, 7168] R=8 E=8"), of_copy(0.90)), HOST)
_SORT: tuple[Rule, ...] = ((always, Target("ratio", ">=", 3)),)

TOKEN_CASES: tuple[Case, ...] = (
    Case("pad_token_groups", padded_shapes, _grouped, ops.pad_token_groups, _PADDING),
    Case("pad_token_groups_to", padded_shapes, _placed, ops.pad_token_groups_to, (*_PADDING, HOST)),
    Case("unpad_token_groups", padded_shapes, _padded, ops.unpad_token_groups, (*_PADDING, HOST), moved=_tokens_only),
    Case("permute_indices", exchanged_shapes, _sent, ops.permute_indices),
    Case("permute_pad", exchanged_shapes, _indexed, ops.permute_pad, _PERMUTING),
    *(
        Case("permute_quantized", _tokens_to_slots, _quantized(f), _permute_quantized, format=f, moved=_slots_only)
        for f in RECIPES
    ),
    *(
        Case("pack_tokens", _tokens_to_ranks, _known_of_tokens(f), ops.pack_tokens, (HOST,), format=f)
        for f in ("rowwise", "blockwise")
    ),
    *(
        Case("quantize_and_pack", _tokens_to_ranks, _tokens_of_ranks(f), ops.quantize_and_pack, (HOST,), format=f)
        for f in ("rowwise", "blockwise")
    ),
    Case("unpermute", exchanged_shapes, _permuted, ops.unpermute, (HOST,), moved=_tokens_only),
    Case("sort_tokens", _routings, _routed, ops.sort_tokens, _SORT, baseline=_torch_sort),
    Case("tokens_by_rank", _routings_of_ranks, _routed_to_ranks, ops.tokens_by_rank),
    Case("combine", _slot_rows, _slots, ops.combine, (HOST,)),
    Case("combine_backward", _slot_rows, _slot_gradients, ops.combine_backward),
)
