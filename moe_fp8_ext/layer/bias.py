"""Biases of experts: added to rows by group, and their gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8_ext.matmul.bf16 import bf16_wgrad
from moe_fp8_ext.quantization.casting import rounded

_add_bias = torch.ops.moe_fp8.add_bias.default


def rows_of_bias(bias: Tensor, offs: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Returns [rows, N]: from bias [E, N], the bias of each row's expert; zeros for rows without an expert."""
    of_rows = torch.bucketize(torch.arange(rows, device=offs.device, dtype=offs.dtype), offs, right=True)
    return torch.nn.functional.pad(rounded(bias, dtype), (0, 0, 0, 1))[of_rows]


def plus_bias(x: Tensor, bias: Tensor, offs: Tensor) -> Tensor:
    """Adds the bias of each row's expert to x [P, N], into a new tensor: a policy of `save_ops` may keep x."""
    return rows_of_bias(bias, offs, x.shape[0], x.dtype).add_(x)


def added(x: Tensor, bias: Tensor, offs: Tensor) -> Tensor:
    """Returns the bytes of `plus_bias` in one pass, where autograd does not look."""
    return _add_bias(x, rounded(bias, x.dtype).contiguous(), offs)


def sum_of_groups(x: Tensor, offs: Tensor) -> Tensor:
    """Sums the rows of each group, [P, N] -> [E, N]: the gradient of a bias, which is a weight whose input is 1."""
    ones = x.new_ones(x.shape[0], 1, dtype=torch.bfloat16)
    return bf16_wgrad(x, ones, offs).squeeze(2)
