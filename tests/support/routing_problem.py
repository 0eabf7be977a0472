"""Logits and expert ids for tests of routers and sorting."""

from __future__ import annotations

import torch
from torch import Tensor

ID_DTYPES = (torch.int32, torch.int64)


def random_ids(*shape: int, experts: int, dtype: torch.dtype = torch.int64, device: str = "cpu") -> Tensor:
    """Ids of all experts, and the two ids next to them that are no experts."""
    return torch.randint(-1, experts + 1, shape, dtype=dtype).to(device)


def logits_of(t: int, e: int, device: str = "cpu") -> Tensor:
    """Rows of various magnitudes; some have many equal values, and one has only equal values."""
    logits = torch.randn(t, e) * torch.exp2(torch.randint(-3, 6, (t, 1)).float())
    logits[3::5] = logits[3::5].round()
    logits[4:5] = 0
    return logits.to(device)
