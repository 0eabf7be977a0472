"""A message: rows of bytes, in which every tensor has its columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_fp8_ext.formats import round_up

_ALIGN = 16  # bytes: what kernels load at once


class Column(NamedTuple):
    """Of a row: where a tensor [T, width] lies."""

    offset: int
    width: int
    dtype: torch.dtype

    @classmethod
    def all_of(cls, tensors: Sequence[Tensor]) -> list[Column]:
        columns, offset = [], 0
        for t in tensors:
            columns.append(cls(offset, t.shape[1], t.dtype))
            offset += round_up(t.shape[1] * t.dtype.itemsize, _ALIGN)
        return columns

    def read(self, rows: Tensor) -> Tensor:
        """A view of rows that were sent."""
        return rows[:, self.offset : self.offset + self.width * self.dtype.itemsize].view(self.dtype)


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """[T, width] of each, side by side: bytes [T, B]."""
    parts = [_flat(t).view(torch.uint8).view(t.shape[0], t.shape[1] * t.dtype.itemsize) for t in tensors]
    # torch copies what it pads by nothing.
    parts = [torch.nn.functional.pad(part, (0, more)) if (more := -part.shape[1] % _ALIGN) else part for part in parts]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _flat(t: Tensor) -> Tensor:
    """Of one dimension, in one piece. What has one row or column may count as contiguous whatever its strides."""
    flat = t.reshape(-1)
    return flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)
