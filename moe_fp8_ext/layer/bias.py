"""Biases of experts: added to rows by group, and their gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8_ext.matmul.engine import Groups
from moe_fp8_ext.quantization.casting import rounded, row_major

_add_bias = torch.ops.moe_fp8.add_bias.default
_sum_groups = torch.ops.moe_fp8.sum_groups.default
_combine_backward = torch.ops.moe_fp8.combine_backward.default


def plus_bias(x: Tensor, bias: Tensor, offs: Tensor) -> Tensor:
    """Adds the bias of each row's expert to x [P, N], into a new tensor: a policy of `save_ops` may keep x."""
    experts = torch.bucketize(torch.arange(x.shape[0], device=offs.device, dtype=offs.dtype), offs, right=True)
    # A row without an expert has the number E, and gets the zeros that are padded here.
    return torch.nn.functional.pad(rounded(bias, x.dtype), (0, 0, 0, 1))[experts].add_(x)


def added(x: Tensor, bias: Tensor, offs: Tensor) -> Tensor:
    """Returns the bytes of `plus_bias` in one pass, where autograd does not look."""
    return _add_bias(x, rounded(bias, x.dtype).contiguous(), offs)


def gradient_of_weighted(grad: Tensor, scores: Tensor | None, groups: Groups) -> Tensor:
    """Returns the gradient of a bias [E, N] of rows that `combine` weights by scores, for grad of its output."""
    scores = None if scores is None else scores.view(-1)
    return _sum_groups(row_major(grad), groups.offs, scores, groups.indices, groups.top_k)


def part_of_dscores(grad: Tensor, bias: Tensor, scores: Tensor, groups: Groups) -> Tensor:
    """Returns the part of a bias [E, N] in the gradient of scores: the dot product of grad and the slot's bias."""
    experts = torch.bucketize(groups.inverse, groups.offs, out_int32=True, right=True)
    experts = torch.where(groups.inverse < 0, -1, experts)  # E, or -1: a slot of no expert
    bias = rounded(bias, grad.dtype).contiguous()
    return _combine_backward(row_major(grad), bias, scores, experts, bias.shape[0], False)[1]
