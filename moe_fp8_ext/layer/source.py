"""Where the rows of a layer come from, and where its results go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from moe_fp8_ext.matmul.bf16 import clamped
from moe_fp8_ext.matmul.engine import Groups
from moe_fp8_ext.quantization.casting import row_major
from moe_fp8_ext.quantization.prepare import Operand

_sort_tokens = torch.ops.moe_fp8.sort_tokens.default


class Chunk(NamedTuple):
    """Tokens that are computed together."""

    tokens: Operand
    scores: Tensor | None  # float32: of slots [T, top_k], or of rows [P, 1] if groups have no indices
    groups: Groups


class Source:
    """Provides the tokens of a layer, and takes back results and gradients.

    A subclass defines `chunks`. The other methods are for tokens that are all here, as one chunk. The source of
    `ExpertParallel` exchanges tokens with other ranks, chunk by chunk.
    """

    def chunks(self, x: Tensor, scores: Tensor | None) -> Iterable[Chunk]:
        """Returns the tokens of forward, chunk by chunk."""
        raise NotImplementedError

    def gradient_chunks(self, dout: Tensor) -> Iterable[Operand]:
        """Returns the gradient of the output for the tokens of each chunk."""
        return [Operand(row_major(dout))]

    def give_back(self, rows: Tensor) -> object:
        """Starts to return a chunk's results, or the gradients of its tokens. Returns a handle for `collect`."""
        return rows

    def collect(self, given_back: Sequence[object]) -> Tensor:
        """Waits for the rows of all chunks. Returns one row for each token, the sum over the ranks that had it."""
        (rows,) = given_back
        return rows

    def completed(self) -> AbstractContextManager:
        """A context for `gradient_chunks`, `give_back` and `collect`. It sees their errors, and those in between."""
        return nullcontext()

    def tensors(self) -> list[Tensor]:
        """Returns the tensors that backward needs for `gradient_chunks`, `give_back` and `collect`."""
        return []

    def static(self) -> Source:
        """Returns this source without its tensors, to be kept between forward and backward."""
        return Source()

    def restored(self, tensors: Sequence[Tensor]) -> Source:
        """Returns this source, which `static` made, with the saved tensors."""
        return self


class RoutedTokens(Source):
    """Tokens with the ids of their experts. given: their operand, if the caller has quantized them."""

    def __init__(self, ids: Tensor, num_experts: int, given: Operand | None = None) -> None:
        self.ids, self.num_experts, self.given = ids, num_experts, given

    def chunks(self, x: Tensor, scores: Tensor | None) -> Iterable[Chunk]:
        permutation, offs, inverse = _sort_tokens(self.ids, self.num_experts)
        return [Chunk(self.given or Operand(x), scores, Groups(offs, permutation, inverse.shape[1], inverse))]


class SortedRows(Source):
    """Rows that a dispatcher has sorted by expert already. given: as in `RoutedTokens`."""

    def __init__(self, offs: Tensor, given: Operand | None = None) -> None:
        self.offs, self.given = offs, given

    def chunks(self, x: Tensor, scores: Tensor | None) -> Iterable[Chunk]:
        offs, inverse = clamped(self.offs, x.shape[0]), None
        if scores is not None:  # `combine` multiplies by scores; each row is the only slot of a token
            row = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
            inverse = torch.where(row < offs[-1], row, -1)[:, None]
        return [Chunk(self.given or Operand(x), scores, Groups(offs, inverse=inverse))]
