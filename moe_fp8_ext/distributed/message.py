"""Messages between ranks: one row of bytes per token, with its values, scale, ids and scores as columns."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_fp8_ext.ops.checks import default_fp8_dtype
from moe_fp8_ext.quantization.casting import cast, row_major
from moe_fp8_ext.quantization.format import COLUMN_ALIGN, FORMATS, round_up
from moe_fp8_ext.quantization.recipe import Recipe, Rule

_pack_tokens = torch.ops.moe_fp8.pack_tokens.default
_quantize_and_pack = torch.ops.moe_fp8.quantize_and_pack.default


def rule_of_tokens(recipe: Recipe) -> Rule | None:
    """Returns the rule by which tokens are quantized before they travel. None: they travel in bfloat16."""
    return None if recipe.format is None or recipe.wgrad_high_precision else recipe.rule(gradient=False)


class Column(NamedTuple):
    """The place of a tensor [T, width] within the rows of a message."""

    offset: int  # in bytes
    width: int  # in elements
    dtype: torch.dtype

    def read(self, rows: Tensor) -> Tensor:
        """Returns the tensor as a view of received rows."""
        return rows[:, self.offset : self.offset + self.width * self.dtype.itemsize].view(self.dtype)


class Message(NamedTuple):
    """The tensors to send for T tokens. `casts` is the rule by which x is quantized; None sends x in bfloat16."""

    x: Tensor
    ids: Tensor | None
    scores: Tensor | None
    casts: Rule | None

    def split(self, chunks: int) -> list[Message]:
        parts = [[None] * chunks if t is None else t.tensor_split(chunks) for t in self[:3]]
        return [Message(*part, self.casts) for part in zip(*parts, strict=True)]

    def columns(self) -> list[Column]:
        """Returns the columns of values, scales, ids and scores, in this order. Absent tensors have no column."""
        width, casts = self.x.shape[1], self.casts
        if casts is None:
            found = [(width, torch.bfloat16)]
        else:
            format = FORMATS[casts.format]
            found = [(width, casts.dtype or default_fp8_dtype(self.x.device))]
            found.append((format.blocks(width), format.scale_dtype))
        if self.ids is not None:
            found.append((self.ids.shape[1], torch.int32))
        if self.scores is not None:
            found.append((self.scores.shape[1], self.scores.dtype))
        columns, offset = [], 0
        for width, dtype in found:
            columns.append(Column(offset, width, dtype))
            offset += round_up(width * dtype.itemsize, COLUMN_ALIGN)
        return columns

    def rows(self, num_experts: int, indices: Tensor, inverse: Tensor) -> Tensor:
        """Returns the bytes [S, ...] of the rows to send.

        `tokens_by_rank` returns the ranks of each token. indices and inverse are the results of `sort_tokens` for them.
        """
        if self.casts is None:
            x = row_major(cast(self.x, torch.bfloat16))
            return _pack_tokens(x, self.ids, self.scores, None, indices, inverse.shape[1], num_experts)
        format, *how = self.casts
        tensors = row_major(self.x), self.ids, self.scores
        return _quantize_and_pack(*tensors, format, indices, inverse, num_experts, *how)
