"""A message: rows of bytes, in which all that is known of a token has its columns."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_fp8_ext.formats import COLUMN_ALIGN, round_up


class Column(NamedTuple):
    """Of a row: where a tensor [T, width] lies."""

    offset: int
    width: int
    dtype: torch.dtype

    def read(self, rows: Tensor) -> Tensor:
        """A view of rows that were sent."""
        return rows[:, self.offset : self.offset + self.width * self.dtype.itemsize].view(self.dtype)


class Message(NamedTuple):
    """What is sent of tokens, as `pack_tokens` takes it."""

    values: Tensor
    scale: Tensor | None = None
    ids: Tensor | None = None
    scores: Tensor | None = None

    def split(self, chunks: int) -> list[Message]:
        parts = [[None] * chunks if t is None else t.tensor_split(chunks) for t in self]
        return [Message(*part) for part in zip(*parts, strict=True)]

    def columns(self) -> list[Column]:
        """Of what there is, in this order."""
        columns, offset = [], 0
        for t in self:
            if t is not None:
                column = Column(offset, t.shape[1] if t.ndim == 2 else 1, torch.int32 if t is self.ids else t.dtype)
                columns.append(column)
                offset += round_up(column.width * column.dtype.itemsize, COLUMN_ALIGN)
        return columns
