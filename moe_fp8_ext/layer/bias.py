"""Biases of experts: added to rows by group, and their gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8_ext.matmul.bf16 import bf16_wgrad, cast


def rows_of_bias(bias: Tensor, offs: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """bias [E, N] of the expert of each of so many rows [rows, N]; zeros for rows of no expert."""
    of_rows = torch.bucketize(torch.arange(rows, device=offs.device, dtype=offs.dtype), offs, right=True)
    return torch.nn.functional.pad(cast(bias, dtype), (0, 0, 0, 1))[of_rows]


def plus_bias(x: Tensor, bias: Tensor, offs: Tensor) -> Tensor:
    """x [P, N] and the bias of each row's expert. Not in x, which a policy with `save_ops` may have for backward."""
    return rows_of_bias(bias, offs, x.shape[0], x.dtype).add_(x)


def sum_of_groups(x: Tensor, offs: Tensor) -> Tensor:
    """[P, N] -> [E, N]: the gradient of a bias, which is a weight whose input is 1."""
    ones = x.new_ones(x.shape[0], 1, dtype=torch.bfloat16)
    return bf16_wgrad(x, ones, offs).squeeze(2)
