"""A router's choice of experts and its gradient: section 3 of DESIGN.md."""

from __future__ import annotations

import torch
from torch import Tensor

from .activations import exponential, float32, fma, sigmoids
from .numerics import round_to
from .signature import of_op

LOG_SERIES = [1 / ((2 * k + 1) * 4**k) for k in range(1, 8)]  # of atanh, in the square of p / (1 + p / 2)


def sum_over_experts(x: Tensor) -> Tensor:
    """[T, E] -> [T, 1]: the sum in the order of the contract.

    Fours of neighbours are summed first. Then the number of fours, padded with zeros to a power of two, is halved until
    one is left. A zero sum is +0.
    """
    fours = 1
    while 4 * fours < x.shape[1]:
        fours *= 2
    x = torch.cat([x, x.new_zeros(len(x), 4 * fours - x.shape[1])], 1)
    x = (x[:, 0::4] + x[:, 1::4]) + (x[:, 2::4] + x[:, 3::4])
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x + 0.0  # -0 becomes +0


def log_one_plus(p: Tensor) -> Tensor:
    """log(1 + p), for p from 0 to 1."""
    u = p * (torch.ones_like(p) / (1 + 0.5 * p))
    w = u * u
    tail = torch.full_like(w, float32(LOG_SERIES[-1]))
    for coefficient in LOG_SERIES[-2::-1]:
        tail = fma(tail, w, float32(coefficient))
    return fma(u, tail * w, u)


def scores_of(logits: Tensor, scoring: str) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> scores s and the derivatives of s in their own logit (ones for softmax)."""
    if scoring in ("sigmoid", "sqrtsoftplus"):
        sigmoid_x, sigmoid_minus_x = sigmoids(logits)
        scores, slopes = sigmoid_x, sigmoid_x * sigmoid_minus_x
        if scoring == "sqrtsoftplus":
            power = exponential(-torch.where(logits.abs() < 88, logits.abs(), 88.0))
            softplus = log_one_plus(power) + torch.where(logits > 0, logits, 0.0)
            scores = softplus.double().sqrt().float()  # correctly rounded, which torch's float32 root is not everywhere
            slopes = torch.where(scores > 0, 0.5 * (sigmoid_x * (torch.ones_like(scores) / scores)), 0.0)
        isnan = logits.isnan()
        return torch.where(isnan, torch.nan, scores), torch.where(isnan, torch.nan, slopes)
    below_max = logits.amax(1, keepdim=True) - logits  # NaN for the whole token if any of its logits is NaN
    terms = torch.where(below_max.isnan(), torch.nan, exponential(-torch.where(below_max < 88, below_max, 88.0)))
    scores = terms * (torch.ones_like(terms) / sum_over_experts(terms))
    return scores, torch.ones_like(scores)


def sort_descending(x: Tensor) -> tuple[Tensor, Tensor]:
    """Values and positions of each row, largest first; NaN before all, and the first of equal values first."""
    return torch.where(x.isnan(), torch.nan, x).sort(dim=1, descending=True, stable=True)


def is_member(ids: Tensor, size: int) -> Tensor:
    """ids [T, n], each from -1 -> [T, size]: whether each number below size is one of the ids."""
    none = torch.zeros(len(ids), 1 + size, dtype=torch.bool, device=ids.device)
    return none.scatter(1, 1 + ids, True)[:, 1:]


@of_op
def choose_experts(
    logits, top_k, bias, scoring, normalize, scaling_factor, num_groups, top_groups, group_score, given_ids
):
    """logits [T, E], bias [E], given_ids [T, top_k] -> topk_ids, topk_scores and topk_logits, each [T, top_k]."""
    if not len(logits):
        none = logits.new_empty(0, top_k)
        return none.long(), none, none.clone()
    scores, _ = scores_of(logits, scoring)
    choice = scores if bias is None else scores + bias
    size = logits.shape[1] // num_groups  # experts per group
    best = sort_descending(choice.reshape(-1, size))[0].view(len(logits), num_groups, size)
    group_values = best[:, :, 0] if size == 1 or group_score == "max" else best[:, :, 0] + best[:, :, 1]
    chosen_groups = sort_descending(group_values)[1][:, :top_groups]
    is_allowed = is_member(chosen_groups, num_groups).repeat_interleave(size, 1)
    order = sort_descending(choice)[1]  # experts, the best first; experts of chosen groups move to the front next
    allowed_first = (~is_allowed.gather(1, order)).int().sort(dim=1, stable=True).indices
    ids = order.gather(1, allowed_first)[:, :top_k].clone(memory_format=torch.contiguous_format)
    if given_ids is not None:
        ids = given_ids.long()
        ids = torch.where((ids >= 0) & (ids < logits.shape[1]), ids, -1)
    topk_scores = scores.gather(1, ids.clamp(min=0))
    if normalize:
        is_chosen = is_member(ids, logits.shape[1])
        topk_scores = topk_scores / (sum_over_experts(torch.where(is_chosen, scores, 0.0)) + 1e-20)
    topk_scores = round_to(torch.where(ids < 0, 0.0, topk_scores * float32(scaling_factor)), torch.float32)
    topk_logits = torch.where(ids < 0, 0.0, logits.gather(1, ids.clamp(min=0)) + 0 * topk_scores)
    return ids, topk_scores, round_to(topk_logits, torch.float32)


@of_op
def choose_experts_backward(grad, logits, topk_ids, num_experts, scoring, normalize, scaling_factor, parts):
    """grad [T, top_k], logits [T, E], topk_ids [T, top_k] -> grad_logits [T, E]; with parts = 2, [T, 2, E].

    With num_experts, logits are [T, top_k], of the chosen experts alone.
    """
    if parts == 2:
        grad_logits = choose_experts_backward(grad, logits, topk_ids, num_experts, scoring, normalize, scaling_factor)
        rounded = round_to(grad_logits, torch.bfloat16)
        return torch.stack([rounded, round_to(grad_logits - rounded.float(), torch.bfloat16)], 1)
    if num_experts is not None:  # the slots of a token take the place of the experts, and all of them are chosen
        valid = (topk_ids >= 0) & (topk_ids < num_experts)
        logits = torch.where(valid, logits, -torch.inf)
        slots = torch.where(valid, torch.arange(topk_ids.shape[1], device=logits.device), -1)
        grad_slots = choose_experts_backward(grad, logits, slots, None, scoring, normalize, scaling_factor)
        grad_logits = logits.new_zeros(len(logits), num_experts)
        tokens, slot = (valid & ~logits.isneginf()).nonzero(as_tuple=True)
        grad_logits[tokens, topk_ids[tokens, slot].long()] = grad_slots[tokens, slot]
        return grad_logits
    if not logits.numel():
        return torch.empty(logits.shape, device=logits.device)
    scores, slopes = scores_of(logits, scoring)
    w, chosen = torch.zeros_like(scores), torch.zeros_like(scores, dtype=torch.bool)  # w is h of the page, then w
    for slot in range(grad.shape[1]):
        ids = topk_ids[:, slot].long()
        tokens = ((ids >= 0) & (ids < logits.shape[1])).nonzero()[:, 0]
        w[tokens, ids[tokens]] = grad[tokens, slot] * float32(scaling_factor)
        chosen[tokens, ids[tokens]] = True

    def sum_over_chosen(x: Tensor) -> Tensor:
        return sum_over_experts(torch.where(chosen, x, 0.0))

    if normalize:
        n = sum_over_chosen(scores) + 1e-20
        w = torch.where(chosen, (w - sum_over_chosen(w * (scores / n))) / n, 0.0)
    if scoring != "softmax":
        return round_to(torch.where(chosen, w * slopes, 0.0), torch.float32)
    return round_to(scores * (w - sum_over_chosen(w * scores)), torch.float32)
