"""The quantized operands of the three products of `grouped_mm`, by how a recipe scales them.

A product is `scaled_grouped_mm(a, b, scale_a, scale_b, offs)`, with b and its scale in their transposed view. Each
class below quantizes tokens along their features (`rows`), along the tokens of each group (`columns`) or both, and a
weight for both of its uses. `rule` is (dtype, pow2_scale).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8_ext.ops import (
    permute_pad_quantize_1x128,
    permute_pad_quantize_1x128_128x1,
    permute_pad_quantize_rowcol,
    permute_pad_quantize_rowwise,
    quantize_1x128,
    quantize_1x128_128x1,
    quantize_128x1,
    quantize_128x128,
    quantize_colwise,
    quantize_rowcol,
    quantize_rowwise,
    quantize_weight,
)

Rule = tuple[torch.dtype | None, bool]
Operand = tuple[Tensor, Tensor]


class Rowwise:
    """One scale for each row, and one for each column of a group."""

    block_size = None
    rows = staticmethod(quantize_rowwise)
    columns = staticmethod(quantize_colwise)
    both = staticmethod(quantize_rowcol)
    permuted_rows = staticmethod(permute_pad_quantize_rowwise)
    permuted_both = staticmethod(permute_pad_quantize_rowcol)

    @staticmethod
    def weight(w: Tensor, rule: Rule, transposed_too: bool) -> tuple[Operand, Operand | None]:
        """w [E, N, K] -> b and scale_b of A @ w^T, and those of dY @ w."""
        if not transposed_too:
            q, scale = quantize_rowwise(w, *rule)
            return (q.mT, scale), None
        q, scale, q_t, scale_t = quantize_weight(w, *rule)
        return (q.mT, scale), (q_t.mT, scale_t)

    @staticmethod
    def second_of_wgrad(a_t: Tensor, scale_t: Tensor) -> Operand:
        """a_t [K, P] as b of dY^T @ A."""
        return a_t.t(), scale_t


class Blockwise:
    """One scale for each 128 elements of a row, 128 tokens of a column and 128 x 128 of a weight."""

    block_size = 128
    rows = staticmethod(quantize_1x128)
    columns = staticmethod(quantize_128x1)
    both = staticmethod(quantize_1x128_128x1)
    permuted_rows = staticmethod(permute_pad_quantize_1x128)
    permuted_both = staticmethod(permute_pad_quantize_1x128_128x1)

    @staticmethod
    def weight(w: Tensor, rule: Rule, transposed_too: bool) -> tuple[Operand, Operand | None]:
        """w [E, N, K] -> b and scale_b of A @ w^T, and those of dY @ w."""
        q, q_t, scale = quantize_128x128(w, *rule)  # writes both: there is no op for one
        return (q.mT, scale.mT), (q_t.mT, scale) if transposed_too else None

    @staticmethod
    def second_of_wgrad(a_t: Tensor, scale_t: Tensor) -> Operand:
        """a_t [K, P] as b of dY^T @ A."""
        return a_t.t(), scale_t.t()


OPERANDS = {"rowwise": Rowwise, "blockwise": Blockwise}
