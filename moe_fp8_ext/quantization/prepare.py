"""Turns weights and quantized pairs into operands of products, so that products need not know the kinds of weights.

A weight is one of these: a plain tensor; a tensor whose fp8 copies `reuse_weights` keeps; a pair that the caller
quantized before, or its first alone; or a `DeferredWeight`, such as a parameter that FSDP2 gathers in fp8.

Forward makes the operand of its product. Backward multiplies by the other direction. For that, forward keeps

- the operand of the other direction, if the weight is trained;
- otherwise, a reference to the weight or pair, from which backward gets that operand.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from moe_fp8_ext.quantization.casting import cast, lies_transposed, row_major
from moe_fp8_ext.quantization.format import FORMATS
from moe_fp8_ext.quantization.recipe import Rule
from moe_fp8_ext.quantization.tensor import Quantized
from moe_fp8_ext.training.weight_cache import reused

_quantize_weight = torch.ops.moe_fp8.quantize_weight.default
_swizzle_scales = torch.ops.moe_fp8.swizzle_scales.default
_transpose_weight = torch.ops.moe_fp8.transpose_weight.default


class Operand(NamedTuple):
    """An input of a product: plain values, or fp8 values and their scales."""

    values: Tensor | None
    scale: Tensor | None = None  # for fp8 values
    ends: Tensor | None = None  # padded group ends, for fp8 values along tokens


NOTHING = Operand(None)

# q, scale, q_t, scale_t as ops return them. A `Quantized` would cost as much host time as an allocation.
Copies = tuple[Tensor, Tensor, Tensor, Tensor]

_OF_TRANSPOSED = {"both": "both", "rows": "transposed", "transposed": "rows"}  # directions of w -> of w.mT


class DeferredWeight(Tensor):
    """A weight [E, N, K] without values, which provides its operands on demand.

    Backward keeps the `DeferredWeight` and not its fp8 copies, so that their owner may free them after forward.
    """

    @abstractmethod
    def operand(self, dtype: torch.dtype, rule: Rule) -> Operand:
        """Returns the operand of a product that sums over K, of the weight cast to dtype."""

    @abstractmethod
    def transposed_operand(self) -> Operand:
        """Returns the operand of a product that sums over N, quantized by the rule of the last `operand`."""


def fp8_weight(
    w: Tensor, dtype: torch.dtype, rule: Rule, transposed: bool, frozen: bool = False
) -> tuple[Operand, Operand]:
    """Makes what `Bf16Engine.weight` describes in fp8."""
    if isinstance(w, DeferredWeight):
        return w.operand(dtype, rule), Operand(w) if transposed else NOTHING
    # Autograd refuses to save an inference tensor. A compiled graph has none.
    by_reference = transposed and frozen and (torch.compiler.is_compiling() or not w.is_inference())
    directions = "both" if transposed and not by_reference else "rows"
    q, scale, q_t, scale_t = reused(_quantize, w, dtype, *rule) or _quantize(w, dtype, *rule, directions)
    kept = Operand(w) if by_reference else Operand(q_t, scale_t)
    return Operand(q, scale), kept if transposed else NOTHING


def second_fp8_weight(kept: Operand, dtype: torch.dtype, rule: Rule, gradient: Tensor) -> Operand:
    """Makes what `Bf16Engine.second_weight` describes in fp8, by the rule of forward."""
    w, scale, _ = kept
    if isinstance(w, DeferredWeight):
        return w.transposed_operand()
    if scale is not None and (not FORMATS[rule.format].has_square_blocks or _has_rows_along_memory(w)):
        return kept
    if torch.compiler.is_compiling():
        return Operand(*_second_of_graph(w, scale, gradient, dtype, *rule))
    copies = None if scale is not None else reused(_quantize, w, dtype, *rule)
    return Operand(*(_second(w, scale, gradient, dtype, *rule) if copies is None else copies[2:]))


def _second(
    w: Tensor,
    scale: Tensor | None,
    gradient: Tensor,
    w_dtype: torch.dtype,
    format: str,
    dtype: torch.dtype | None,
    rounding: str,
) -> tuple[Tensor, Tensor]:
    """Returns the second direction of a weight [E, N, K], or of the transposed view [E, K, N] of its first direction,
    which has scales.

    Without the gradient, which it does not read, a compiled graph would call it in forward, and keep the result for
    backward. As an op of that graph it runs eagerly, so it must not ask `reused`: graphs read the weight in every call.
    """
    if scale is not None:
        return transposed_squares(row_major(w.mT), scale.mT)
    return _quantize(w, w_dtype, format, dtype, rounding, "transposed")[2:]


_second_of_graph = torch.library.custom_op("moe_fp8_ext::second_weight", _second, mutates_args=())
_second_of_graph.register_fake(_second)


def operands_of(pair: tuple[Quantized, Quantized | None], second: bool = True) -> tuple[Operand, Operand]:
    """Makes the first operand of a pair that the caller has quantized. With `second`, also the operand that is kept for
    the other direction.

    A weight in square blocks needs no second: its transposed view is kept, and copied for the product.
    """
    first, other = pair
    operand, is_whole = Operand(first.q, first.scale), first.q.dim() == 3 and FORMATS[first.format].has_square_blocks
    if is_whole and not _has_rows_along_memory(first.q):  # a transposed view, which products do not take
        operand = Operand(*transposed_squares(row_major(first.q.mT), first.scale.mT))
    if second and other is not None:
        return operand, Operand(other.q, other.scale)
    return operand, Operand(first.q.mT, first.scale.mT) if second and is_whole else NOTHING


def operand_of_rows(q: Tensor, scale: Tensor, format: str, offs: Tensor | None = None) -> Operand:
    """Makes the operand of tokens [M, K] from scales [M], [M, 1] or [M, blocks] that lie row by row, as in messages.

    offs: the groups of the tokens; None if products take tokens by index.
    """
    if FORMATS[format].order == "blocked":
        return Operand(q, _swizzle_scales(scale, None if offs is None else "rows", offs)[0])
    if FORMATS[format].order == "column_major":
        return Operand(q, scale)
    return Operand(q, (scale if FORMATS[format].block else scale.view(-1)).contiguous())


def transposed_squares(q: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the operand of the other direction, for a weight [E, N, K] in square blocks with contiguous rows.

    Both tensors are new, because an op of torch.compile must not return its input. So scales are cloned, even if they
    have one block along N or K and their transpose is contiguous.
    """
    return _transpose_weight(q), scale.mT.clone(memory_format=torch.contiguous_format)


def _has_rows_along_memory(q: Tensor) -> bool:
    return q.stride(-1) == 1 or q.shape[-1] == 1


def _quantize(
    w: Tensor, w_dtype: torch.dtype, format: str, dtype: torch.dtype | None, rounding: str, directions: str = "both"
) -> Copies:
    """Quantizes w along K ("rows"), along N ("transposed") or along both."""
    w = cast(w, w_dtype)
    if lies_transposed(w):  # quantize the tensor [E, K, N] and swap the directions
        q_t, scale_t, q, scale = _quantize_weight(w.mT, format, dtype, rounding, _OF_TRANSPOSED[directions])
        return q, scale, q_t, scale_t
    return _quantize_weight(row_major(w), format, dtype, rounding, directions)
