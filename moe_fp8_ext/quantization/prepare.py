"""How a weight becomes an operand of products. Each kind of weight has its home here; products know none of them.

Kinds: a plain tensor, one whose copies `reuse_weights` keeps, a pair that was quantized before, and one that exists
only as fp8 copies (`DeferredWeight`), such as a parameter that FSDP2 gathers in fp8.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from moe_fp8_ext.quantization.casting import cast, rounded, row_major
from moe_fp8_ext.quantization.format import FORMATS
from moe_fp8_ext.quantization.recipe import Recipe
from moe_fp8_ext.quantization.tensor import Quantized
from moe_fp8_ext.training.weight_cache import reused

_quantize_rows = torch.ops.moe_fp8.quantize_rows.default
_quantize_weight = torch.ops.moe_fp8.quantize_weight.default


class Operand(NamedTuple):
    """What a product reads: plain values, or fp8 values and their scales."""

    values: Tensor | None
    scale: Tensor | None = None  # of fp8
    ends: Tensor | None = None  # padded group ends, of fp8 along tokens


NOTHING = Operand(None)

# q, scale, q_t, scale_t as ops return them. A `Quantized` costs as much host time as an allocation.
Copies = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


class Rule(NamedTuple):
    """How a weight is quantized."""

    multiplied_as: torch.dtype  # the dtype that torch.autocast asks for, else the weight's own
    format: str
    dtype: torch.dtype | None
    rounding: str


class DeferredWeight(Tensor):
    """A weight [E, N, K] without values: it offers its operands when a product asks for them.

    It is kept for backward itself, so that whoever owns the copies may free them in between.
    """

    @abstractmethod
    def operand(self, rule: Rule) -> Operand:
        """The operand of a product over K."""

    @abstractmethod
    def transposed_operand(self) -> Operand:
        """The operand of a product over N, by the rule of the last `operand`."""


def fp8_weight(w: Tensor, dtype: torch.dtype, recipe: Recipe, transposed: bool) -> tuple[Operand, Operand]:
    """Operands of w [E, N, K]: over K and, if `transposed`, over N for the gradient of the input.

    dtype: the dtype that w is multiplied as, before it is quantized.
    """
    rule = Rule(dtype, recipe.format, recipe.dtype, recipe.rounding)
    if isinstance(w, DeferredWeight):
        return w.operand(rule), Operand(w) if transposed else NOTHING
    q, scale, q_t, scale_t = reused(_quantize, w, *rule) or _quantize(w, *rule, transposed)
    return Operand(q, scale), Operand(q_t, scale_t) if transposed else NOTHING


def bf16_weight(w: Tensor, dtype: torch.dtype, transposed: bool) -> tuple[Operand, Operand]:
    """The same in bfloat16."""
    w = cast(w if dtype == torch.bfloat16 else rounded(w, dtype), torch.bfloat16)
    return Operand(w), Operand(w.mT) if transposed else NOTHING


def quantized_weight(pair: tuple[Quantized, Quantized | None], transposed: bool) -> tuple[Operand, Operand]:
    """The same of a weight that was quantized before."""
    first, second = pair
    return Operand(first.q, first.scale), Operand(second.q, second.scale) if transposed else NOTHING


def quantized_tokens(pair: tuple[Quantized, Quantized | None]) -> tuple[Operand, Operand]:
    """Tokens that were quantized before, along rows and along tokens."""
    first, second = pair
    return Operand(first.q, first.scale), NOTHING if second is None else Operand(second.q, second.scale)


def ready(kept: Operand) -> Operand:
    """An operand over N that was kept for backward, as products take it."""
    return kept.values.transposed_operand() if isinstance(kept.values, DeferredWeight) else kept


def _quantize(
    w: Tensor, w_dtype: torch.dtype, format: str, dtype: torch.dtype | None, rounding: str, transposed: bool = True
) -> Copies:
    """In formats with blocks one op writes both copies, a byte an element more than a frozen input has use for."""
    w = cast(w, w_dtype)
    if w.stride(-2) == 1 and w.stride(-1) != 1:  # contiguous [E, K, N]: the same op, its directions swapped
        q_t, scale_t, q, scale = _quantize_weight(w.mT, format, dtype, rounding)
        return q, scale, q_t, scale_t
    w = row_major(w)
    if transposed or FORMATS[format].block:
        return _quantize_weight(w, format, dtype, rounding)
    return *_quantize_rows(w, format, None, None, None, dtype, rounding), None, None
