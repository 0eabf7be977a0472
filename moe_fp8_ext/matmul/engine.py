"""How a layer multiplies: its operands in fp8 or in bfloat16, at the slots of its tokens, and their products."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_fp8_ext.matmul.bf16 import bf16_product, bf16_wgrad, cast, row_major
from moe_fp8_ext.matmul.fp8 import fp8_product, fp8_weight, fp8_wgrad
from moe_fp8_ext.quantization.recipe import Recipe

_activate = torch.ops.moe_fp8.activate.default
_quantize_activated = torch.ops.moe_fp8.quantize_activated.default
_activate_backward = torch.ops.moe_fp8.activate_backward.default
_quantize_activated_backward = torch.ops.moe_fp8.quantize_activated_backward.default
_dequantize = torch.ops.moe_fp8.dequantize.default
_quantize_rows = torch.ops.moe_fp8.quantize_rows.default
_quantize_tokens = torch.ops.moe_fp8.quantize_tokens.default
_quantize_both = torch.ops.moe_fp8.quantize_both.default
_permute_pad = torch.ops.moe_fp8.permute_pad.default


class Operand(NamedTuple):
    values: Tensor | None
    scale: Tensor | None = None  # of fp8
    ends: Tensor | None = None  # of the groups, along tokens in fp8


NOTHING = Operand(None)


class Slots(NamedTuple):
    """As `sort_tokens` returns them for ids [T, top_k]."""

    permutation: Tensor
    offs: Tensor
    inverse: Tensor

    @property
    def indices(self) -> tuple[Tensor, int]:
        """What `permute_pad` takes beside tokens."""
        return self.permutation, self.inverse.shape[1]


class Activated(NamedTuple):
    """What forward had between its products, for `gradients`."""

    h: Operand  # as `activated` kept it
    scores: Tensor  # of slots, [T * top_k]
    activation: str
    interleaved: bool


class Wanted(NamedTuple):
    """Which results of `gradients`, beside dscores."""

    rows: bool
    tokens: bool
    a: bool
    dh: bool


class Gradients(NamedTuple):
    rows: Operand  # dh
    tokens: Operand  # likewise
    a: Operand  # scores * a along tokens
    dh: Tensor | None  # in bfloat16
    dscores: Tensor  # of slots


class Bf16Operands:
    """Tensors in bfloat16; what is said of the methods holds for Fp8Operands too.

    Tokens are an operand of no scale, as they came, or in Fp8Operands already quantized along rows.
    """

    def weight(self, w: Tensor, dtype: torch.dtype, backward: bool) -> tuple[Operand, Operand]:
        """w [E, N, K], multiplied as `dtype`: for a product over K and, for backward, for one over N."""
        w = cast(cast(w, dtype), torch.bfloat16)
        return Operand(w.mT), Operand(w) if backward else NOTHING

    def values(self, x: Operand) -> Tensor:
        """Tokens x [T, K], quantized or not, as numbers."""
        return x.values

    def at_slots(
        self, x: Operand, slots: Slots, rows: bool = False, tokens: bool = False, gradient: bool = False
    ) -> tuple[Operand, Operand]:
        """Tokens x along rows, for a product with weights that is `by_slot`, and along tokens where they go, for
        `wgrad`."""
        if not rows and not tokens:
            return NOTHING, NOTHING
        x = _permute_pad(row_major(cast(x.values, torch.bfloat16)), *slots.indices)
        return self.of_slots(x, slots, rows, tokens, gradient)

    def of_slots(
        self, x: Tensor, slots: Slots, rows: bool = False, tokens: bool = False, gradient: bool = False
    ) -> tuple[Operand, Operand]:
        """The same of x [P, K] in bfloat16, which is there already."""
        return Operand(x), Operand(x)

    def activated(
        self, h: Tensor, slots: Slots, activation: str, interleaved: bool, keep_fp8: bool
    ) -> tuple[Operand, Operand]:
        """Activations of h [P, 2F] along rows, and h as it is kept for backward, quantized where `keep_fp8`."""
        return Operand(_activate(h, activation, interleaved)), Operand(h)

    def gradients(self, da: Tensor, of: Activated, slots: Slots, wanted: Wanted) -> Gradients:
        """Of what is between the products, from the gradient da [P, F] of activations without scores."""
        return _gradients(self, da, of, slots, wanted)

    def product(self, a: Operand, w: Operand, slots: Slots, by_slot: bool = False) -> Tensor:
        """a @ w^T in bfloat16; rows of no group are zero. by_slot: a is of tokens, as `at_slots` returns them."""
        return bf16_product(a.values, w.values, slots.offs)

    def wgrad(self, dy: Operand, a: Operand, slots: Slots, main_grad: Tensor | None) -> Tensor | None:
        """dy^T @ a of every group, [E, N, K] in bfloat16; none where it is added to main_grad, of that shape."""
        return bf16_wgrad(dy.values, a.values, slots.offs, main_grad)


class Fp8Operands:
    """Quantized tensors. A token that has several slots is quantized along its row once: products take it by index.
    Along tokens too, unless groups have scales of their own or it came in fp8: its bytes are moved."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def weight(self, w: Tensor, dtype: torch.dtype, backward: bool) -> tuple[Operand, Operand]:
        q, scale, q_t, scale_t = fp8_weight(w, dtype, self.recipe, backward)
        return Operand(q, scale), Operand(q_t, scale_t) if backward else NOTHING

    def values(self, x: Operand) -> Tensor:
        if x.scale is None:
            return x.values
        return _dequantize(x.values, x.scale, self.recipe.format, "rows", None, torch.bfloat16)

    def at_slots(
        self, x: Operand, slots: Slots, rows: bool = False, tokens: bool = False, gradient: bool = False
    ) -> tuple[Operand, Operand]:
        format, dtype, rounding = self.rule(gradient)
        along_rows = along_tokens = NOTHING
        amax = self.recipe.amax if x.scale is None and slots.indices[1] > 1 else self.recipe.amax_of_groups
        amax = "group" if amax == "square" and gradient else amax
        how = self.recipe.align, dtype, rounding, amax
        if rows and tokens and amax == "batch":
            return _both_ways(*_quantize_both(row_major(x.values), format, slots.offs, *slots.indices, *how))
        if rows:
            along_rows = x
        if rows and x.scale is None:
            along_rows = Operand(*_quantize_rows(row_major(x.values), format, None, None, None, dtype, rounding))
        if tokens:
            values = row_major(self.values(x))
            along_tokens = Operand(*_quantize_tokens(values, format, slots.offs, *slots.indices, *how))
        return along_rows, along_tokens

    def of_slots(
        self, x: Tensor, slots: Slots, rows: bool = False, tokens: bool = False, gradient: bool = False
    ) -> tuple[Operand, Operand]:
        format, dtype, rounding = self.rule(gradient)
        of_groups = x, format, slots.offs, None, None
        if not tokens:
            return Operand(*_quantize_rows(*of_groups, dtype, rounding)) if rows else NOTHING, NOTHING
        how = self.recipe.align, dtype, rounding, "group" if gradient else self.recipe.amax_of_groups
        if not rows:
            return NOTHING, Operand(*_quantize_tokens(*of_groups, *how))
        return _both_ways(*_quantize_both(*of_groups, *how))

    def activated(
        self, h: Tensor, slots: Slots, activation: str, interleaved: bool, keep_fp8: bool
    ) -> tuple[Operand, Operand]:
        format, dtype, rounding = self.rule(gradient=False)
        how = interleaved, keep_fp8, dtype, rounding
        q, scale, h_q, h_scale = _quantize_activated(h, activation, format, slots.offs, *how)
        return Operand(q, scale), Operand(h_q, h_scale) if keep_fp8 else Operand(h)

    def gradients(self, da: Tensor, of: Activated, slots: Slots, wanted: Wanted) -> Gradients:
        if wanted != Wanted(rows=True, tokens=True, a=True, dh=False):
            return _gradients(self, da, of, slots, wanted, self.recipe.format)
        h, scores, activation, interleaved = of
        format, dtype, rounding = self.rule(gradient=False)
        dtypes = dtype, self.rule(gradient=True)[1]
        how = self.recipe.align, *dtypes, rounding, self.recipe.amax_of_groups
        q, scale, q_t, scale_t, a_q_t, a_scale_t, ends, dscores = _quantize_activated_backward(
            da, h.values, activation, format, slots.offs, scores, h.scale, slots.permutation, interleaved, *how
        )
        rows, tokens, of_a = Operand(q, scale), Operand(q_t, scale_t, ends), Operand(a_q_t, a_scale_t, ends)
        return Gradients(rows, tokens, of_a, None, dscores)

    def product(self, a: Operand, w: Operand, slots: Slots, by_slot: bool = False) -> Tensor:
        by_index = slots.indices if by_slot else ()
        return fp8_product(a.values, a.scale, w.values, w.scale, slots.offs, self.recipe, *by_index)

    def wgrad(self, dy: Operand, a: Operand, slots: Slots, main_grad: Tensor | None) -> Tensor | None:
        how = self.recipe, self.recipe.align, main_grad
        return fp8_wgrad(dy.values, dy.scale, a.values, a.scale, dy.ends, *how)

    def rule(self, gradient: bool) -> tuple[str, torch.dtype | None, str]:
        """Format, dtype and rounding of tokens, or of their gradients."""
        recipe = self.recipe
        return recipe.format, (recipe.grad_dtype if gradient else None) or recipe.dtype, recipe.rounding


class HighPrecisionWgrad(Fp8Operands):
    """Along tokens, and so in `wgrad`, tensors are in bfloat16."""

    def at_slots(
        self, x: Operand, slots: Slots, rows: bool = False, tokens: bool = False, gradient: bool = False
    ) -> tuple[Operand, Operand]:
        return super().at_slots(x, slots, rows, False, gradient)[0], _BF16.at_slots(x, slots, tokens=tokens)[1]

    def of_slots(
        self, x: Tensor, slots: Slots, rows: bool = False, tokens: bool = False, gradient: bool = False
    ) -> tuple[Operand, Operand]:
        return super().of_slots(x, slots, rows, False, gradient)[0], Operand(x)

    def activated(
        self, h: Tensor, slots: Slots, activation: str, interleaved: bool, keep_fp8: bool
    ) -> tuple[Operand, Operand]:
        return super().activated(h, slots, activation, interleaved, keep_fp8=False)

    def gradients(self, da: Tensor, of: Activated, slots: Slots, wanted: Wanted) -> Gradients:
        return _gradients(self, da, of, slots, wanted)

    def wgrad(self, dy: Operand, a: Operand, slots: Slots, main_grad: Tensor | None) -> Tensor | None:
        return _BF16.wgrad(dy, a, slots, main_grad)


def _both_ways(q: Tensor, scale: Tensor, q_t: Tensor, scale_t: Tensor, ends: Tensor) -> tuple[Operand, Operand]:
    """What `quantize_both` returns, along rows and along tokens."""
    return Operand(q, scale), Operand(q_t, scale_t, ends)


def _gradients(
    operands: Bf16Operands | Fp8Operands,
    da: Tensor,
    of: Activated,
    slots: Slots,
    wanted: Wanted,
    format: str | None = None,
) -> Gradients:
    """Of an h in this format, if it is quantized."""
    h, scores, activation, interleaved = of
    format = None if h.scale is None else format
    how = scores, h.scale, format, slots.permutation, interleaved
    dh, a, dscores = _activate_backward(da, h.values, activation, *how)
    _, of_a = operands.of_slots(a, slots, tokens=wanted.a)
    del a  # in the way of what dh takes
    rows, tokens = operands.of_slots(dh, slots, wanted.rows, wanted.tokens, gradient=True)
    return Gradients(rows, tokens, of_a, dh if wanted.dh else None, dscores)


_BF16 = Bf16Operands()


def operands_of(recipe: Recipe) -> Bf16Operands | Fp8Operands:
    if recipe.format is None:
        return _BF16
    return HighPrecisionWgrad(recipe) if recipe.wgrad_high_precision else Fp8Operands(recipe)
