"""The quantized operands of the three products of `grouped_mm`, by how a recipe scales them.

A product is `scaled_grouped_mm(a, b, scale_a, scale_b, offs)`, with b and its scale in their transposed view. Each
class below quantizes tokens along their features (`rows`), along the tokens of each group (`columns`) or both, and a
weight for both of its uses. `rule` is the format and what the scales' rule leaves open: (dtype, pow2_scale), or, of
MXFP8, (dtype, scaling).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8_ext.ops import (
    permute_pad_quantize_1x128,
    permute_pad_quantize_1x128_128x1,
    permute_pad_quantize_mx_1x32,
    permute_pad_quantize_mx_1x32_32x1,
    permute_pad_quantize_rowcol,
    permute_pad_quantize_rowwise,
    quantize_1x128,
    quantize_1x128_128x1,
    quantize_128x1,
    quantize_128x128,
    quantize_colwise,
    quantize_mx_1x32,
    quantize_mx_1x32_32x1,
    quantize_mx_32x1,
    quantize_mx_weight,
    quantize_rowcol,
    quantize_rowwise,
    quantize_weight,
)

Rule = tuple[torch.dtype | None, bool | str]
Operand = tuple[Tensor, Tensor]


class Rowwise:
    """One scale for each row, and one for each column of a group."""

    block_size = None
    columns = staticmethod(quantize_colwise)
    both = staticmethod(quantize_rowcol)
    permuted_both = staticmethod(permute_pad_quantize_rowcol)

    @staticmethod
    def rows(x: Tensor, offs: Tensor, *rule: object) -> Operand:
        return quantize_rowwise(x, *rule)

    @staticmethod
    def permuted_rows(x: Tensor, indices: Tensor, offs: Tensor, top_k: int, *rule: object) -> Operand:
        return permute_pad_quantize_rowwise(x, indices, top_k, *rule)

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
    columns = staticmethod(quantize_128x1)
    both = staticmethod(quantize_1x128_128x1)
    permuted_both = staticmethod(permute_pad_quantize_1x128_128x1)

    @staticmethod
    def rows(x: Tensor, offs: Tensor, *rule: object) -> Operand:
        return quantize_1x128(x, *rule)

    @staticmethod
    def permuted_rows(x: Tensor, indices: Tensor, offs: Tensor, top_k: int, *rule: object) -> Operand:
        return permute_pad_quantize_1x128(x, indices, top_k, *rule)

    @staticmethod
    def weight(w: Tensor, rule: Rule, transposed_too: bool) -> tuple[Operand, Operand | None]:
        """w [E, N, K] -> b and scale_b of A @ w^T, and those of dY @ w."""
        q, q_t, scale = quantize_128x128(w, *rule)  # writes both: there is no op for one
        return (q.mT, scale.mT), (q_t.mT, scale) if transposed_too else None

    @staticmethod
    def second_of_wgrad(a_t: Tensor, scale_t: Tensor) -> Operand:
        """a_t [K, P] as b of dY^T @ A."""
        return a_t.t(), scale_t.t()


class Mx:
    """One E8M0 scale for each 32 elements of a row, 32 tokens of a column and 32 elements of a weight either way; in
    the blocked layout that Blackwell's tensor cores read, of tokens group by group."""

    block_size = 32

    @staticmethod
    def rows(x: Tensor, offs: Tensor, dtype: torch.dtype | None, scaling: str) -> Operand:
        return quantize_mx_1x32(x, scaling, "blocked", offs, dtype)

    @staticmethod
    def columns(x: Tensor, offs: Tensor, align: int, dtype: torch.dtype | None, scaling: str) -> tuple[Tensor, ...]:
        return quantize_mx_32x1(x, offs, scaling, "blocked", align, dtype)

    @staticmethod
    def both(x: Tensor, offs: Tensor, align: int, dtype: torch.dtype | None, scaling: str) -> tuple[Tensor, ...]:
        return quantize_mx_1x32_32x1(x, offs, scaling, "blocked", align, dtype)

    @staticmethod
    def permuted_rows(
        x: Tensor, indices: Tensor, offs: Tensor, top_k: int, dtype: torch.dtype | None, scaling: str
    ) -> Operand:
        return permute_pad_quantize_mx_1x32(x, indices, offs, top_k, scaling, "blocked", dtype)

    @staticmethod
    def permuted_both(
        x: Tensor, indices: Tensor, offs: Tensor, top_k: int, align: int, dtype: torch.dtype | None, scaling: str
    ) -> tuple[Tensor, ...]:
        return permute_pad_quantize_mx_1x32_32x1(x, indices, offs, top_k, scaling, "blocked", align, dtype)

    @staticmethod
    def weight(w: Tensor, rule: Rule, transposed_too: bool) -> tuple[Operand, Operand | None]:
        """w [E, N, K] -> b and scale_b of A @ w^T, and those of dY @ w."""
        dtype, scaling = rule
        q, scale, q_t, scale_t = quantize_mx_weight(w, scaling, dtype)  # writes both: there is no op for one
        return (q.mT, scale), (q_t.mT, scale_t) if transposed_too else None

    @staticmethod
    def second_of_wgrad(a_t: Tensor, scale_t: Tensor) -> Operand:
        """a_t [K, P] as b of dY^T @ A."""
        return a_t.t(), scale_t


OPERANDS = {"rowwise": Rowwise, "blockwise": Blockwise, "mxfp8": Mx}
