"""Casts of adapters' factors."""

from __future__ import annotations

import torch

from .numerics import round_to
from .signature import of_op


@of_op
def cast_factor(m, rows, cols, order, dtype, num_experts, scaling):
    """m [E, R, C] or [R, C] -> scaling * m, padded with zeros or cropped; dimensions lie in memory as `order` says."""
    names, shape = "erc"[-m.dim() :], (rows, cols)
    if m.dim() == 3:
        shape = m.shape[0] if num_experts is None else num_experts, *shape
    out = m.new_zeros([shape[names.index(name)] for name in order], dtype=dtype)
    out = out.permute([order.index(name) for name in names])
    given = tuple(slice(min(sizes)) for sizes in zip(shape, m.shape, strict=True))
    out[given] = round_to(m[given].float() * torch.tensor(scaling, dtype=torch.float32, device=m.device), dtype)
    return out
