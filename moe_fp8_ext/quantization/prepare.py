"""Turns weights and quantized pairs into operands of products, so that products need not know the kinds of weights.

A weight is one of these: a plain tensor; a tensor whose fp8 copies `reuse_weights` keeps; a pair that the caller
quantized before; or a `DeferredWeight`, such as a parameter that FSDP2 gathers in fp8.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from moe_fp8_ext.quantization.casting import cast, rounded, row_major
from moe_fp8_ext.quantization.format import FORMATS
from moe_fp8_ext.quantization.tensor import Quantized
from moe_fp8_ext.training.weight_cache import reused

_quantize_rows = torch.ops.moe_fp8.quantize_rows.default
_quantize_weight = torch.ops.moe_fp8.quantize_weight.default


class Operand(NamedTuple):
    """What a product reads: plain values, or fp8 values and their scales."""

    values: Tensor | None
    scale: Tensor | None = None  # for fp8 values
    ends: Tensor | None = None  # padded group ends, for fp8 values along tokens


NOTHING = Operand(None)

# q, scale, q_t, scale_t as ops return them. A `Quantized` would cost as much host time as an allocation.
Copies = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


class Rule(NamedTuple):
    """How values are quantized."""

    format: str
    dtype: torch.dtype | None
    rounding: str


class DeferredWeight(Tensor):
    """A weight [E, N, K] that has no values itself and provides its operands when a product asks for them.

    Backward keeps the `DeferredWeight` rather than its copies, so that their owner may free them after forward.
    """

    @abstractmethod
    def operand(self, dtype: torch.dtype, rule: Rule) -> Operand:
        """Returns the operand of a product that sums over K, of the weight cast to dtype."""

    @abstractmethod
    def transposed_operand(self) -> Operand:
        """Returns the operand of a product that sums over N, quantized by the rule of the last `operand`."""


def fp8_weight(w: Tensor, dtype: torch.dtype, rule: Rule, transposed: bool) -> tuple[Operand, Operand]:
    """Makes the operands of w [E, N, K] in fp8.

    Args:
        dtype: what w is cast to before it is quantized: torch.autocast's dtype if it is on, else the weight's.
        transposed: whether the gradient of the input needs the second operand.

    Returns:
        the operand of a product that sums over K, and of one that sums over N or, without `transposed`, NOTHING.
    """
    if isinstance(w, DeferredWeight):
        return w.operand(dtype, rule), Operand(w) if transposed else NOTHING
    q, scale, q_t, scale_t = reused(_quantize, w, dtype, *rule) or _quantize(w, dtype, *rule, transposed)
    return Operand(q, scale), Operand(q_t, scale_t) if transposed else NOTHING


def bf16_weight(w: Tensor, dtype: torch.dtype, transposed: bool) -> tuple[Operand, Operand]:
    """Makes the same operands in bfloat16."""
    w = cast(w if dtype == torch.bfloat16 else rounded(w, dtype), torch.bfloat16)
    return Operand(w), Operand(w.mT) if transposed else NOTHING


def operands_of(pair: tuple[Quantized, Quantized | None], second: bool = True) -> tuple[Operand, Operand]:
    """Makes the operands of a pair that the caller quantized before; of the second, if the pair has it and if asked."""
    first, other = pair
    return Operand(first.q, first.scale), Operand(other.q, other.scale) if second and other is not None else NOTHING


def ready(kept: Operand) -> Operand:
    """Returns an operand that forward kept for a product over N, with its values if a `DeferredWeight` has them."""
    return kept.values.transposed_operand() if isinstance(kept.values, DeferredWeight) else kept


def _quantize(
    w: Tensor, w_dtype: torch.dtype, format: str, dtype: torch.dtype | None, rounding: str, transposed: bool = True
) -> Copies:
    """Quantizes w along K and, if `transposed`, along N.

    In formats with blocks one op writes both copies, so a frozen input pays a byte an element for an unused one.
    """
    w = cast(w, w_dtype)
    if w.stride(-2) == 1 and w.stride(-1) != 1:  # contiguous as [E, K, N]: quantize that and swap the directions
        q_t, scale_t, q, scale = _quantize_weight(w.mT, format, dtype, rounding)
        return q, scale, q_t, scale_t
    w = row_major(w)
    if transposed or FORMATS[format].block:
        return _quantize_weight(w, format, dtype, rounding)
    return *_quantize_rows(w, format, None, None, None, dtype, rounding), None, None
