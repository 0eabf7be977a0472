"""Token movement: padding of groups, sorting by expert, permutation, and its weighted inverse."""

from __future__ import annotations

import torch

from .numerics import BITS, group_bounds, int32, padded_extent, round_to, round_up
from .signature import of_op


@of_op
def pad_token_groups(x, offs, align):
    """x [M, K] -> x_padded [P, K], padded_starts [E], padded_offs [E]: groups begin at multiples of `align`."""
    padded_starts, padded_offs, row = [], [], 0
    for start, end in group_bounds(offs, len(x)):
        padded_starts.append(row)
        row += round_up(end - start, align)
        padded_offs.append(row)
    padded_starts, padded_offs = int32(padded_starts, x.device), int32(padded_offs, x.device)
    x_padded = pad_token_groups_to(x, offs, padded_starts, padded_extent(len(x), len(offs), align))
    return x_padded, padded_starts, padded_offs


@of_op
def pad_token_groups_to(x, offs, padded_starts, num_padded):
    """x [M, K] -> x_padded [num_padded, K]: group e begins at padded_starts[e].

    Rows of a group that do not fit before the start of the next group are left out.
    """
    rows = torch.full((num_padded,), -1, device=x.device)
    starts = [start for _, start in group_bounds(padded_starts, num_padded)] + [num_padded]
    for (start, end), padded_start, next_start in zip(group_bounds(offs, len(x)), starts, starts[1:], strict=False):
        size = min(end - start, next_start - padded_start)
        rows[padded_start : padded_start + size] = torch.arange(start, start + size)
    return permute_pad(x, rows, 1)


@of_op
def unpad_token_groups(y, offs, padded_starts, num_tokens):
    """y [P, K] -> x [num_tokens, K]: row i of group e is y[padded_starts[e] + i], or zeros if y has no such row."""
    rows = torch.full((num_tokens,), -1, device=y.device)
    for (start, end), padded_start in zip(group_bounds(offs, num_tokens), padded_starts.tolist(), strict=True):
        rows[start:end] = torch.arange(padded_start, padded_start + end - start)
    return permute_pad(y, rows, 1)


@of_op
def sort_tokens(topk_ids, num_experts):
    """topk_ids [T] or [T, top_k] -> permutation [T * top_k], offs [E], inverse, shaped as topk_ids.

    The permutation lists the slots sorted by expert, stably.
    """
    ids = topk_ids.reshape(-1)
    valid = ((ids >= 0) & (ids < num_experts)).nonzero()[:, 0]
    slots = valid[ids[valid].argsort(stable=True)]
    offs = ids[valid].bincount(minlength=num_experts).cumsum(0).int()
    permutation, inverse = (torch.full(ids.shape, -1, dtype=torch.int32, device=ids.device) for _ in range(2))
    permutation[: len(slots)] = slots.int()
    inverse[slots] = torch.arange(len(slots), dtype=torch.int32, device=ids.device)
    return permutation, offs, inverse.view(topk_ids.shape)


@of_op
def tokens_by_rank(topk_ids, num_experts, num_ranks):
    """topk_ids [T, top_k] -> by_rank [T, R], which is r if a token has an expert of rank r, else -1; counts [R, 2]."""
    local_experts = num_experts // num_ranks
    starts = range(0, num_experts, local_experts)
    slots = torch.stack([((topk_ids >= start) & (topk_ids < start + local_experts)).sum(1) for start in starts], 1)
    by_rank = torch.where(slots > 0, torch.arange(num_ranks, device=slots.device), -1).int()
    return by_rank, torch.stack([(slots > 0).sum(0), slots.sum(0)], 1)


@of_op
def permute_indices(tokens_per_rank_expert, num_local_experts, num_ranks, num_tokens, align, align_empty):
    """counts [R, E] -> indices [P], padded_offs [E], tokens_per_expert [E]: from rank-major to expert-major order."""
    tokens_of: list[list[int]] = [[] for _ in range(num_local_experts)]
    token = 0
    for i, count in enumerate(tokens_per_rank_expert.flatten().tolist()):
        end = min(token + max(count, 0), num_tokens)
        tokens_of[i % num_local_experts] += range(token, end)
        token = end
    assert i + 1 == num_ranks * num_local_experts
    indices, padded_offs = [], []
    for tokens in tokens_of:
        indices += tokens
        size = max(len(tokens), 1 if align_empty else 0)
        indices += [-1] * (round_up(size, align) - len(tokens))
        padded_offs.append(len(indices))
    indices += [-1] * (padded_extent(num_tokens, num_local_experts, align) - len(indices))
    lists = indices, padded_offs, [len(tokens) for tokens in tokens_of]
    return tuple(int32(values, tokens_per_rank_expert.device) for values in lists)


@of_op
def permute_pad(x, indices, top_k):
    """x [M, K], indices [P] -> [P, K]: row p is x[indices[p] // top_k], or zeros if the index is out of range."""
    out = x.new_zeros(len(indices), x.shape[1], dtype=BITS[x.element_size()])
    valid = (indices >= 0) & (indices < len(x) * top_k)
    out[valid] = x.contiguous().view(out.dtype)[indices[valid].long() // top_k]
    return out.view(x.dtype)


@of_op
def unpermute(y, indices, top_k, num_tokens):
    """y [P, K], indices [P] -> [num_tokens, K]: y[p] goes to token indices[p] // top_k.

    The rows of a token are summed in float32. Of several rows with the same index, the last counts.
    """
    inverse = indices.new_full((num_tokens * top_k,), -1)
    for p, slot in enumerate(indices.tolist()):
        if 0 <= slot < len(inverse):
            inverse[slot] = p
    return combine(y, inverse.view(num_tokens, top_k)) if top_k > 1 else permute_pad(y, inverse, 1)


@of_op
def combine(y, inverse, topk_scores):
    """y [P, K], inverse and topk_scores [T, top_k] -> out [T, K]: summed in float32 slot by slot, rounded once."""
    out = torch.zeros(len(inverse), y.shape[1], device=y.device)
    for j in range(inverse.shape[1]):
        row = inverse[:, j].long()
        tokens = ((row >= 0) & (row < len(y))).nonzero()[:, 0]
        term = y[row[tokens]].float()
        if topk_scores is not None:
            term = term * topk_scores[tokens, j].float()[:, None]
        out[tokens] = out[tokens] + term
    return round_to(out, y.dtype)


@of_op
def combine_backward(grad, y, topk_scores, inverse, num_rows, keep_grad_y):
    """grad [T, K], y [P, K], topk_scores and inverse [T, top_k] -> grad_y [num_rows, K], grad_scores [T, top_k].

    A row of y belongs to the largest slot that has it. Dot products are taken in float64 and rounded once; the op is
    within float32 error of them. Without y, grad_scores is [0]. Without keep_grad_y, slots share rows, and grad_y has
    none.
    """
    row_of_slot = inverse.reshape(-1).long()
    slots = ((row_of_slot >= 0) & (row_of_slot < num_rows)).nonzero()[:, 0]
    if keep_grad_y:
        slot_of_row = slots.new_full((num_rows,), -1).scatter_reduce(0, row_of_slot[slots], slots, "amax")
        slots = slot_of_row[slot_of_row >= 0]
    rows, row_grads = row_of_slot[slots], grad[slots // max(inverse.shape[1], 1)]
    grad_y = torch.zeros(num_rows if keep_grad_y else 0, grad.shape[1], device=grad.device)
    if keep_grad_y:
        grad_y[rows] = row_grads.float()
        if topk_scores is not None:
            grad_y[rows] *= topk_scores.reshape(-1)[slots].float()[:, None]
    grad_scores = torch.zeros(0 if y is None else inverse.shape, dtype=torch.float64, device=grad.device)
    if y is not None:
        grad_scores.view(-1)[slots] = (row_grads.double() * y[rows].double()).sum(1)
    scores_dtype = torch.float32 if topk_scores is None else topk_scores.dtype
    return round_to(grad_y, grad.dtype), round_to(grad_scores, scores_dtype)
