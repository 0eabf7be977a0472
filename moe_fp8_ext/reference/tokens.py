"""Token movement: padding of groups, sorting by expert, permutation and its weighted inverse."""

from __future__ import annotations

import torch
from torch import Tensor

from .numerics import BITS, group_bounds, int32, padded_extent, round_to, round_up


def pad_token_groups(x: Tensor, offs: Tensor, align: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, K] -> x_padded [P, K], padded_starts [E], padded_offs [E]: groups begin at multiples of `align`."""
    starts, ends, at = [], [], 0
    for start, end in group_bounds(offs, len(x)):
        starts.append(at)
        at += round_up(end - start, align)
        ends.append(at)
    starts, ends = int32(starts, x.device), int32(ends, x.device)
    return pad_token_groups_to(x, offs, starts, padded_extent(len(x), len(offs), align)), starts, ends


def pad_token_groups_to(x: Tensor, offs: Tensor, padded_starts: Tensor, num_padded: int) -> Tensor:
    """x [M, K] -> x_padded [num_padded, K]: group e from padded_starts[e] on, at most to the next one's start."""
    out = x.new_zeros(num_padded, x.shape[1], dtype=BITS[x.element_size()])
    places = [start for _, start in group_bounds(padded_starts, num_padded)] + [num_padded]
    for (start, end), place, limit in zip(group_bounds(offs, len(x)), places, places[1:], strict=False):
        size = min(end - start, limit - place)
        out[place : place + size] = x[start : start + size].contiguous().view(out.dtype)
    return out.view(x.dtype)


def unpad_token_groups(y: Tensor, offs: Tensor, padded_starts: Tensor, num_tokens: int) -> Tensor:
    """y [P, K] -> x [num_tokens, K]: row i of group e is row padded_starts[e] + i of y, zero if there is none."""
    out = y.new_zeros(num_tokens, y.shape[1], dtype=BITS[y.element_size()])
    bits = y.contiguous().view(out.dtype)
    for (start, end), place in zip(group_bounds(offs, num_tokens), padded_starts.tolist(), strict=True):
        for row in range(start, end):
            if 0 <= place + row - start < len(y):
                out[row] = bits[place + row - start]
    return out.view(y.dtype)


def sort_tokens(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """topk_ids [T] or [T, top_k] -> permutation [T * top_k], offs [E], inverse as topk_ids: slots sorted by expert."""
    ids = topk_ids.reshape(-1)
    kept = ((ids >= 0) & (ids < num_experts)).nonzero()[:, 0]
    slots = kept[ids[kept].argsort(stable=True)]
    offs = ids[kept].bincount(minlength=num_experts).cumsum(0).int()
    permutation, inverse = (torch.full(ids.shape, -1, dtype=torch.int32, device=ids.device) for _ in range(2))
    permutation[: len(slots)] = slots.int()
    inverse[slots] = torch.arange(len(slots), dtype=torch.int32, device=ids.device)
    return permutation, offs, inverse.view(topk_ids.shape)


def tokens_by_rank(topk_ids: Tensor, num_experts: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """topk_ids [T, top_k] -> by_rank [T, R]: r where a token has any expert of rank r, else -1; counts [R, 2]."""
    of_rank = num_experts // num_ranks
    starts = range(0, num_experts, of_rank)
    slots = torch.stack([((topk_ids >= start) & (topk_ids < start + of_rank)).sum(1) for start in starts], 1)
    by_rank = torch.where(slots > 0, torch.arange(num_ranks, device=slots.device), -1).int()
    return by_rank, torch.stack([(slots > 0).sum(0), slots.sum(0)], 1)


def permute_indices(
    tokens_per_rank_expert: Tensor,
    num_local_experts: int,
    num_ranks: int,
    num_tokens: int,
    align: int = 16,
    align_empty: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """counts [R, E] -> indices [P], padded_offs [E], tokens_per_expert [E]: from rank-major to expert-major tokens."""
    rows: list[list[int]] = [[] for _ in range(num_local_experts)]
    token = 0
    for i, count in enumerate(tokens_per_rank_expert.flatten().tolist()):
        end = min(token + max(count, 0), num_tokens)
        rows[i % num_local_experts] += range(token, end)
        token = end
    assert i + 1 == num_ranks * num_local_experts
    indices, padded_offs = [], []
    for of_expert in rows:
        indices += of_expert
        size = max(len(of_expert), 1 if align_empty else 0)
        indices += [-1] * (round_up(size, align) - len(of_expert))
        padded_offs.append(len(indices))
    indices += [-1] * (padded_extent(num_tokens, num_local_experts, align) - len(indices))
    lists = indices, padded_offs, [len(of_expert) for of_expert in rows]
    return tuple(int32(values, tokens_per_rank_expert.device) for values in lists)


def source_rows(indices: Tensor, m: int, top_k: int) -> tuple[Tensor, Tensor]:
    """The row of [m, ...] that each index stands for, and whether there is one (row 0 if not)."""
    there = (indices >= 0) & (indices < m * top_k)
    return torch.where(there, indices, 0).long() // top_k, there


def permute_pad(x: Tensor, indices: Tensor, top_k: int) -> Tensor:
    """x [M, K], indices [P] -> [P, K]: row p is x[indices[p] // top_k], zeros where the index is out of range."""
    out = x.new_zeros(len(indices), x.shape[1], dtype=BITS[x.element_size()])
    rows, there = source_rows(indices, len(x), top_k)
    out[there] = x.contiguous().view(out.dtype)[rows[there]]
    return out.view(x.dtype)


def unpermute(y: Tensor, indices: Tensor, top_k: int, num_tokens: int) -> Tensor:
    """y [P, K], indices [P] -> [num_tokens, K]: y[p] where indices[p] is the token; with top_k > 1 their float32 sum.

    Of several rows with the same index, the last counts.
    """
    inverse = indices.new_full((num_tokens * top_k,), -1)
    for p, i in enumerate(indices.tolist()):
        if 0 <= i < len(inverse):
            inverse[i] = p
    return combine(y, inverse.view(num_tokens, top_k)) if top_k > 1 else permute_pad(y, inverse, 1)


def combine(y: Tensor, inverse: Tensor, topk_scores: Tensor | None = None) -> Tensor:
    """y [P, K], inverse [T, top_k], topk_scores [T, top_k] -> out [T, K]: in float32, slot by slot, rounded once."""
    out = torch.zeros(len(inverse), y.shape[1], device=y.device)
    for j in range(inverse.shape[1]):
        row = inverse[:, j].long()
        tokens = ((row >= 0) & (row < len(y))).nonzero()[:, 0]
        term = y[row[tokens]].float()
        if topk_scores is not None:
            term = term * topk_scores[tokens, j].float()[:, None]
        out[tokens] = out[tokens] + term
    return round_to(out, y.dtype)


def combine_backward(
    grad: Tensor, y: Tensor | None, topk_scores: Tensor | None, inverse: Tensor, num_rows: int
) -> tuple[Tensor, Tensor]:
    """grad [T, K], y [P, K], topk_scores and inverse [T, top_k] -> grad_y [num_rows, K], grad_scores [T, top_k].

    A row of y belongs to the largest slot that names it. Dot products are taken in float64 and rounded once: the op is
    within float32 error of them. Without y there are no gradients of scores: [0].
    """
    places, slots = inverse.reshape(-1).long(), torch.arange(inverse.numel(), device=grad.device)
    slot_of = torch.full((num_rows,), -1, device=grad.device)
    kept = (places >= 0) & (places < num_rows)
    slot_of.scatter_reduce_(0, places[kept], slots[kept], "amax")
    rows = (slot_of >= 0).nonzero()[:, 0]
    slots = slot_of[rows]
    of_rows = grad[slots // max(inverse.shape[1], 1)]
    term = of_rows.float()
    if topk_scores is not None:
        term = term * topk_scores.reshape(-1)[slots].float()[:, None]
    grad_y = torch.zeros(num_rows, grad.shape[1], device=grad.device)
    grad_y[rows] = term
    grad_scores = torch.zeros(0 if y is None else inverse.shape, dtype=torch.float64, device=grad.device)
    if y is not None:
        grad_scores.view(-1)[slots] = (of_rows.double() * y[rows].double()).sum(1)
    scores_dtype = torch.float32 if topk_scores is None else topk_scores.dtype
    return round_to(grad_y, grad.dtype), round_to(grad_scores, scores_dtype)
