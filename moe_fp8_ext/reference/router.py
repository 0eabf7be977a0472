"""A router's choice and its gradient: section 3 of DESIGN.md."""

from __future__ import annotations

import torch
from torch import Tensor

from .activations import exponential, float32, sigmoids
from .numerics import round_to


def total(x: Tensor) -> Tensor:
    """[T, E] -> [T, 1]: fours of neighbours, then halves of the fours; a zero is +0."""
    fours = 1
    while 4 * fours < x.shape[1]:
        fours *= 2
    x = torch.cat([x, x.new_zeros(len(x), 4 * fours - x.shape[1])], 1)
    x = (x[:, 0::4] + x[:, 1::4]) + (x[:, 2::4] + x[:, 3::4])
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x + 0.0


def scores_of(logits: Tensor, scoring: str) -> tuple[Tensor, Tensor]:
    """[T, E] -> scores, and the derivatives of those that are sigmoids."""
    if scoring == "sigmoid":
        of_x, of_minus_x = sigmoids(logits)
        isnan = logits.isnan()
        return torch.where(isnan, torch.nan, of_x), torch.where(isnan, torch.nan, of_x * of_minus_x)
    below = logits.amax(1, keepdim=True) - logits  # NaN where anything is
    terms = torch.where(below.isnan(), torch.nan, exponential(-torch.where(below < 88, below, 88.0)))
    scores = terms * (torch.ones_like(terms) / total(terms))
    return scores, torch.ones_like(scores)


def descending(x: Tensor) -> tuple[Tensor, Tensor]:
    """Values and places; of equal ones the first comes first, and NaN before all."""
    return torch.where(x.isnan(), torch.nan, x).sort(dim=1, descending=True, stable=True)


def members(ids: Tensor, size: int) -> Tensor:
    """[T, n] -> [T, size]: whether a number is one of ids."""
    none = torch.zeros(len(ids), size, dtype=torch.bool, device=ids.device)
    return none.scatter(1, ids, True)


def choose_experts(
    logits: Tensor,
    top_k: int,
    bias: Tensor | None = None,
    scoring: str = "softmax",
    normalize: bool = True,
    scaling_factor: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """logits [T, E], bias [E] -> topk_ids [T, top_k], topk_scores [T, top_k], topk_logits [T, top_k]."""
    if not len(logits):
        none = logits.new_empty(0, top_k)
        return none.long(), none, none.clone()
    scores, _ = scores_of(logits, scoring)
    choice = scores if bias is None else scores + bias
    size = logits.shape[1] // num_groups
    best = descending(choice.reshape(-1, size))[0].view(len(logits), num_groups, size)
    of_groups = best[:, :, 0] if size == 1 else best[:, :, 0] + best[:, :, 1]
    may = members(descending(of_groups)[1][:, :top_groups], num_groups).repeat_interleave(size, 1)
    order = descending(choice)[1]
    those_that_may = (~may.gather(1, order)).int().sort(dim=1, stable=True).indices
    ids = order.gather(1, those_that_may)[:, :top_k].clone(memory_format=torch.contiguous_format)
    chosen = scores.gather(1, ids)
    if normalize:
        chosen = chosen / (total(torch.where(members(ids, len(choice[0])), scores, 0.0)) + 1e-20)
    chosen = round_to(chosen * float32(scaling_factor), torch.float32)
    return ids, chosen, round_to(logits.gather(1, ids) + 0 * chosen, torch.float32)


def choose_experts_backward(
    grad: Tensor,
    logits: Tensor,
    topk_ids: Tensor,
    num_experts: int | None = None,
    scoring: str = "softmax",
    normalize: bool = True,
    scaling_factor: float = 1.0,
    parts: int = 1,
) -> Tensor:
    """grad [T, top_k], logits [T, E], topk_ids [T, top_k] -> grad_logits [T, E]; of num_experts, from logits
    [T, top_k]; of 2 parts -> [T, 2, E]."""
    if parts == 2:
        grad_logits = choose_experts_backward(grad, logits, topk_ids, num_experts, scoring, normalize, scaling_factor)
        rounded = round_to(grad_logits, torch.bfloat16)
        return torch.stack([rounded, round_to(grad_logits - rounded.float(), torch.bfloat16)], 1)
    if num_experts is not None:
        there = (topk_ids >= 0) & (topk_ids < num_experts)
        logits = torch.where(there, logits, -torch.inf)
        slots = torch.where(there, torch.arange(topk_ids.shape[1], device=logits.device), -1)
        of_slots = choose_experts_backward(grad, logits, slots, None, scoring, normalize, scaling_factor)
        grad_logits = logits.new_zeros(len(logits), num_experts)
        tokens, slot = (there & ~logits.isneginf()).nonzero(as_tuple=True)
        grad_logits[tokens, topk_ids[tokens, slot].long()] = of_slots[tokens, slot]
        return grad_logits
    if not logits.numel():
        return torch.empty(logits.shape, device=logits.device)
    scores, slopes = scores_of(logits, scoring)
    w, chosen = torch.zeros_like(scores), torch.zeros_like(scores, dtype=torch.bool)
    for slot in range(grad.shape[1]):
        ids = topk_ids[:, slot].long()
        tokens = ((ids >= 0) & (ids < logits.shape[1])).nonzero()[:, 0]
        w[tokens, ids[tokens]] = grad[tokens, slot] * float32(scaling_factor)
        chosen[tokens, ids[tokens]] = True

    def total_of_chosen(x: Tensor) -> Tensor:
        return total(torch.where(chosen, x, 0.0))

    if normalize:
        n = total_of_chosen(scores) + 1e-20
        w = torch.where(chosen, (w - total_of_chosen(w * (scores / n))) / n, 0.0)
    if scoring == "sigmoid":
        return round_to(torch.where(chosen, w * slopes, 0.0), torch.float32)
    return round_to(scores * (w - total_of_chosen(w * scores)), torch.float32)
