"""Where the rows of a layer come from, and where its results go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_fp8_ext.matmul.bf16 import clamped
from moe_fp8_ext.matmul.engine import Groups
from moe_fp8_ext.quantization.casting import row_major
from moe_fp8_ext.quantization.prepare import Operand

_sort_tokens = torch.ops.moe_fp8.sort_tokens.default


class Chunk(NamedTuple):
    """Tokens that are computed at once."""

    tokens: Operand
    scores: Tensor | None  # float32, by slot [T, top_k], or by row [P, 1] where groups have no indices
    groups: Groups


class Source:
    """Brings tokens, and takes back results and gradients. This one has all tokens here, as one chunk.

    `ExpertParallel` has one that exchanges them with other ranks, chunk by chunk.
    """

    def chunks(self, x: Tensor, scores: Tensor | None) -> Iterable[Chunk]:
        """The tokens of forward."""
        raise NotImplementedError

    def gradient_chunks(self, dout: Tensor) -> Iterable[Operand]:
        """The gradient of the output, to the tokens of the same chunks."""
        return [Operand(row_major(dout))]

    def give_back(self, chunk: int, rows: Tensor) -> object:
        """Begins the way back of a chunk's results, or of their gradients."""
        return rows

    def collect(self, given_back: Sequence[object]) -> Tensor:
        """Ends it: the rows of all chunks, each added up over where it was."""
        (rows,) = given_back
        return rows

    def tensors(self) -> list[Tensor]:
        """What must be saved for `gradient_chunks`, `give_back` and `collect` in backward."""
        return []

    def static(self) -> Source:
        """This source without tensors, for the time between forward and backward."""
        return Source()

    def restored(self, tensors: Sequence[Tensor]) -> Source:
        """What `static` returned, with the tensors that were saved."""
        return self


class RoutedTokens(Source):
    """Tokens with the ids of their experts."""

    def __init__(self, ids: Tensor, num_experts: int) -> None:
        self.ids, self.num_experts = ids, num_experts

    def chunks(self, x: Tensor, scores: Tensor | None) -> Iterable[Chunk]:
        permutation, offs, inverse = _sort_tokens(self.ids, self.num_experts)
        return [Chunk(Operand(x), scores, Groups(offs, permutation, inverse.shape[1], inverse))]


class SortedRows(Source):
    """Rows that lie sorted by expert already, as a dispatcher hands them over."""

    def __init__(self, offs: Tensor) -> None:
        self.offs = offs

    def chunks(self, x: Tensor, scores: Tensor | None) -> Iterable[Chunk]:
        offs, inverse = clamped(self.offs, x.shape[0]), None
        if scores is not None:  # `combine` multiplies by scores: each row is the only slot of its token
            row = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
            inverse = torch.where(row < offs[-1], row, -1)[:, None]
        return [Chunk(Operand(x), scores, Groups(offs, inverse=inverse))]
