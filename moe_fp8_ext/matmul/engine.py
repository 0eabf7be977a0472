"""The one engine that multiplies, for `grouped_mm` and for the layer: in bfloat16, in fp8, or in both.

An engine makes operands of tokens and multiplies operands. `quantization/prepare.py` makes fp8 operands of weights.
`product` takes a along rows and w [E, N, K], and computes a @ w^T of each group. `wgrad` takes both along tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_fp8_ext.matmul.bf16 import bf16_product, bf16_wgrad, clamped
from moe_fp8_ext.quantization.casting import cast, rounded, row_major
from moe_fp8_ext.quantization.format import FORMATS
from moe_fp8_ext.quantization.prepare import NOTHING, Operand, fp8_weight, second_fp8_weight
from moe_fp8_ext.quantization.recipe import Recipe

_activate = torch.ops.moe_fp8.activate.default
_quantize_activated = torch.ops.moe_fp8.quantize_activated.default
_add_bias = torch.ops.moe_fp8.add_bias.default
_sum_groups = torch.ops.moe_fp8.sum_groups.default
_activate_backward = torch.ops.moe_fp8.activate_backward.default
_quantize_activated_backward = torch.ops.moe_fp8.quantize_activated_backward.default
_quantize_activated_backward_rows = torch.ops.moe_fp8.quantize_activated_backward_rows.default
_dequantize = torch.ops.moe_fp8.dequantize.default
_quantize_rows = torch.ops.moe_fp8.quantize_rows.default
_quantize_tokens = torch.ops.moe_fp8.quantize_tokens.default
_quantize_both = torch.ops.moe_fp8.quantize_both.default
_permute_pad = torch.ops.moe_fp8.permute_pad.default
_scaled_grouped_mm = torch.ops.moe_fp8.scaled_grouped_mm.default
_add_scaled_grouped_mm = torch.ops.moe_fp8.add_scaled_grouped_mm.default


def _is_hopper(gpu: int) -> bool:
    properties = torch.cuda.get_device_properties(gpu)  # Dynamo knows it as a constant
    return torch.version.hip is None and (properties.major, properties.minor) == (9, 0)


class Groups(NamedTuple):
    """The rows of a product. Group e has rows [offs[e-1], offs[e]). With indices, row p is token indices[p] // top_k;
    without, it is row p of the tensor."""

    offs: Tensor
    indices: Tensor | None = None
    top_k: int | None = None
    inverse: Tensor | None = None  # [T, top_k]: the row of every slot, if a layer adds rows up

    @property
    def of_tokens(self) -> Tensor | None:
        """Returns the ends of the groups that tokens lie in; None if products take tokens by index."""
        return self.offs if self.indices is None else None

    @property
    def in_place(self) -> Groups:
        """Returns the same groups for a tensor that has their rows in order."""
        return Groups(self.offs)


class Activated(NamedTuple):
    """The values of forward between its products, which `gradients` reads."""

    h: Operand  # as `activated` kept it
    scores: Tensor | None  # [P], of slots if the groups have indices, else of rows
    activation: str
    interleaved: bool


class Wanted(NamedTuple):
    """Which results of `gradients` are wanted besides dscores."""

    rows: bool
    tokens: bool
    a: bool
    dh: bool
    a_values: bool = False
    db: bool = False


class Gradients(NamedTuple):
    rows: Operand  # dh along rows
    tokens: Operand  # dh along tokens
    a: Operand  # scores * a along tokens
    dh: Tensor | None  # in bfloat16
    dscores: Tensor  # [P], as scores
    a_values: Tensor | None = None  # scores * a in bfloat16
    db: Tensor | None = None  # sums of dh by group, [E, 2F] or [E, F] in float32


class Bf16Engine:
    """Multiplies in bfloat16. The docstrings of its methods hold for every engine.

    Tokens are an operand without scales, the caller's tensor. `Fp8Engine` also accepts tokens quantized along rows. If
    their scales are blocked, they are blocked by the groups or, where products take tokens by index, as one matrix.
    """

    format: str | None = None  # of operands

    def weight(self, w: Tensor, dtype: torch.dtype, transposed: bool, frozen: bool = False) -> tuple[Operand, Operand]:
        """Makes the operand of w [E, N, K] for products over K.

        Args:
            dtype: w is first cast to it: torch.autocast's dtype if that is on, otherwise w's dtype.
            transposed: whether backward multiplies by w.
            frozen: whether w needs no gradient. Then w itself is kept, and backward makes its second operand.

        Returns:
            the operand, and the first argument of `second_weight`: NOTHING without `transposed`.
        """
        values = cast(w if dtype == torch.bfloat16 else rounded(w, dtype), torch.bfloat16)
        return Operand(values), Operand(w if frozen else values) if transposed else NOTHING

    def second_weight(self, kept: Operand, dtype: torch.dtype, frozen: bool, gradient: Tensor) -> Operand:
        """Makes the operand for products over N, in backward, with the dtype and `frozen` of forward. gradient: any
        tensor that depends on the gradient of the output."""
        w = self.weight(kept.values, dtype, transposed=False)[0] if frozen else kept
        return Operand(w.values.mT)

    def safe_offs(self, offs: Tensor, rows: int, wgrad: bool) -> Tensor:
        """Returns offs as products take them. wgrad: whether `wgrad` will be called with them."""
        return clamped(offs, rows)

    def values(self, x: Operand, offs: Tensor | None = None) -> Tensor:
        """Returns tokens x [T, K], or with offs rows of groups, quantized or not, as numbers."""
        return x.values

    # ---- operands of tokens ----

    def tokens(
        self, x: Operand, groups: Groups, rows: bool = False, tokens: bool = False, gradient: bool = False
    ) -> tuple[Operand, Operand]:
        """Makes operands of tokens x [T, K].

        Along rows they are for a `product` with `by_index`; along tokens, in the order of the groups, for `wgrad`. A
        token that several rows take is quantized once.
        """
        if not rows and not tokens:
            return NOTHING, NOTHING
        values = row_major(cast(x.values, torch.bfloat16))
        if groups.indices is not None:
            values = _permute_pad(values, groups.indices, groups.top_k)
        return self.rows(values, groups.in_place, rows, tokens, gradient)

    def rows(
        self, x: Tensor, groups: Groups, rows: bool = False, tokens: bool = False, gradient: bool = False
    ) -> tuple[Operand, Operand]:
        """Makes operands of rows x [P, K], or of the rows that the groups' indices take from x. Each row is quantized
        separately, also if several rows are the same token."""
        x = Operand(cast(x, torch.bfloat16))
        return x, x

    def left(self, x: Tensor, groups: Groups, wgrad: bool) -> tuple[Operand, Operand]:
        """Makes the operand of tokens x along rows, and the operand to keep for `kept_tokens` if there is a wgrad. The
        product is by index unless the second operand has scales already."""
        x = Operand(row_major(cast(x, torch.bfloat16)))
        return x, x if wgrad else NOTHING

    def kept_tokens(self, kept: Operand, groups: Groups) -> Operand:
        """Returns the operand along tokens of an operand that `left` kept."""
        return kept

    # ---- products ----

    def product(
        self,
        a: Operand,
        w: Operand,
        groups: Groups,
        by_index: bool = False,
        low_rank: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Computes a @ w^T of each group in bfloat16. Rows without a group are zero.

        by_index: whether a holds tokens, as `tokens` makes them, and not rows.
        low_rank: u [P, R] and m [E, R, N], where `adds_low_rank` holds. u @ m of each group is added.
        """
        return bf16_product(a.values, w.values.mT, groups.offs)

    def adds_low_rank(self, device: torch.device) -> bool:
        """Whether `product` should be given low-rank terms on this device."""
        return False

    def wgrad(
        self, dy: Operand, a: Operand, groups: Groups, main_grad: Tensor | None, transposed: bool
    ) -> Tensor | None:
        """Computes dy^T @ a of each group, [E, N, K] in bfloat16. With main_grad, adds it there and returns None.

        transposed: whether the result lies as [E, K, N] in memory, as `lies_transposed` says of its weight.
        """
        return bf16_wgrad(dy.values, a.values, groups.offs, main_grad, transposed)

    # ---- between the products of a layer ----

    def activated(
        self, h: Tensor, groups: Groups, activation: str, interleaved: bool, keep_fp8: bool, bias: Tensor | None = None
    ) -> tuple[Operand, Operand]:
        """Returns activations of h [P, 2F] plus the bias [E, 2F] of its group, along rows. Also returns h with the bias
        as backward keeps it, quantized if `keep_fp8` and the engine's backward takes it so."""
        h = h if bias is None else _add_bias(h, bias, groups.offs)
        return Operand(_activate(h, activation, interleaved)), Operand(h)

    def gradients(self, da: Tensor, activated: Activated, groups: Groups, wanted: Wanted) -> Gradients:
        """Returns gradients of the values between the products. Here dh and a are in memory, in bfloat16.

        da [P, F] is the gradient of activations, without scores.
        """
        h, scores, activation, interleaved = activated
        how = scores, h.scale, None if h.scale is None else self.format, groups.indices, interleaved
        dh, a, dscores = _activate_backward(da, h.values, activation, *how)
        _, a_t = self.rows(a, groups.in_place, tokens=wanted.a)
        a = a if wanted.a_values else None  # frees memory for the operands of dh
        rows, tokens = self.rows(dh, groups.in_place, wanted.rows, wanted.tokens, gradient=True)
        db = _sum_groups(dh, groups.offs, None, None, None) if wanted.db else None
        return Gradients(rows, tokens, a_t, dh if wanted.dh else None, dscores, a, db)


class Fp8Engine(Bf16Engine):
    """Multiplies quantized operands.

    rounding: of the scales of all operands, which products are promised; None if it is not known. It is the recipe's
    where the recipe quantizes every operand.
    """

    keeps_fp8 = True  # whether `activated` may keep h quantized

    def __init__(self, recipe: Recipe, rounding: str | None = None) -> None:
        self.recipe, self.format, self.rule, self.rounding = recipe, recipe.format, recipe.rule, rounding

    def weight(self, w: Tensor, dtype: torch.dtype, transposed: bool, frozen: bool = False) -> tuple[Operand, Operand]:
        return fp8_weight(w, dtype, self.rule(gradient=False), transposed, frozen)

    def second_weight(self, kept: Operand, dtype: torch.dtype, frozen: bool, gradient: Tensor) -> Operand:
        return second_fp8_weight(kept, dtype, self.rule(gradient=False), gradient)

    def safe_offs(self, offs: Tensor, rows: int, wgrad: bool) -> Tensor:
        return offs  # this package's ops clamp offs themselves

    def values(self, x: Operand, offs: Tensor | None = None) -> Tensor:
        if x.scale is None:
            return x.values
        return _dequantize(x.values, x.scale, self.format, "rows", offs, torch.bfloat16)

    def tokens(
        self, x: Operand, groups: Groups, rows: bool = False, tokens: bool = False, gradient: bool = False
    ) -> tuple[Operand, Operand]:
        if groups.indices is None and x.scale is None:
            return self.rows(row_major(x.values), groups, rows, tokens, gradient)
        by_index = groups.offs, groups.indices, groups.top_k
        format, dtype, rounding = self.rule(gradient)
        along_rows = along_tokens = NOTHING
        amax = self.recipe.amax if x.scale is None and groups.top_k > 1 else self.recipe.amax_of_groups
        amax = "group" if amax == "square" and gradient else amax
        how = self.recipe.align, dtype, rounding, amax
        if rows and tokens and amax == "batch":
            return _both(*_quantize_both(row_major(x.values), format, *by_index, *how))
        if rows and x.scale is None:
            along_rows = Operand(*_quantize_rows(row_major(x.values), format, None, None, None, dtype, rounding))
        elif rows:
            along_rows = x
        if tokens:
            values = row_major(self.values(x, groups.of_tokens))
            along_tokens = Operand(*_quantize_tokens(values, format, *by_index, *how))
        return along_rows, along_tokens

    def rows(
        self, x: Tensor, groups: Groups, rows: bool = False, tokens: bool = False, gradient: bool = False
    ) -> tuple[Operand, Operand]:
        format, dtype, rounding = self.rule(gradient)
        by_index = groups.offs, groups.indices, groups.top_k
        how = self.recipe.align, dtype, rounding, "group" if gradient else self.recipe.amax_of_groups
        if rows and tokens:
            return _both(*_quantize_both(x, format, *by_index, *how))
        if tokens:
            return NOTHING, Operand(*_quantize_tokens(x, format, *by_index, *how))
        return Operand(*_quantize_rows(x, format, *by_index, dtype, rounding)) if rows else NOTHING, NOTHING

    def left(self, x: Tensor, groups: Groups, wgrad: bool) -> tuple[Operand, Operand]:
        if wgrad and not self._is_smaller(x, groups):
            return self.rows(row_major(x), groups, rows=True, tokens=True)
        format, dtype, rounding = self.rule(gradient=False)
        # Rows that a product takes by index are quantized where they lie, in no group.
        offs = None if groups.indices is not None else groups.offs
        rows = _quantize_rows(row_major(x), format, offs, None, None, dtype, rounding)
        return Operand(*rows), Operand(x) if wgrad else NOTHING

    def kept_tokens(self, kept: Operand, groups: Groups) -> Operand:
        return self.rows(row_major(kept.values), groups, tokens=True)[1] if kept.scale is None else kept

    def product(
        self,
        a: Operand,
        w: Operand,
        groups: Groups,
        by_index: bool = False,
        low_rank: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        indices = (groups.indices, groups.top_k) if by_index else (None, None)
        how = self.format, groups.offs, *indices, 1, None, self.recipe.use_fast_accum, self.rounding
        if low_rank is not None:
            how = *how, False, *low_rank
        scale_w = FORMATS[self.format].transposed_scale(w.scale)
        return _scaled_grouped_mm(a.values, w.values.mT, a.scale, scale_w, *how)

    def adds_low_rank(self, device: torch.device) -> bool:
        # Other GEMMs add the term by a pass over out, which is slower than torch's grouped product and a sum.
        return self.format == "blockwise" and (device.type == "cpu" or _is_hopper(device.index))

    def wgrad(
        self, dy: Operand, a: Operand, groups: Groups, main_grad: Tensor | None, transposed: bool
    ) -> Tensor | None:
        values, scales = (dy.values, a.values.mT), (dy.scale, FORMATS[self.format].transposed_scale(a.scale))
        align, use_fast_accum = self.recipe.align, self.recipe.use_fast_accum
        if main_grad is None:
            how = None, None, align, None, use_fast_accum, self.rounding, transposed
            return _scaled_grouped_mm(*values, *scales, self.format, dy.ends, *how)
        how = self.format, dy.ends, align, use_fast_accum
        if dy.scale.dtype == torch.float8_e8m0fnu and torch.compiler.is_compiling():
            _add_by_bytes(main_grad, *values, *(scale.view(torch.uint8) for scale in scales), *how)
        else:
            _add_scaled_grouped_mm(main_grad, *values, *scales, *how, self.rounding)
        return None

    def activated(
        self, h: Tensor, groups: Groups, activation: str, interleaved: bool, keep_fp8: bool, bias: Tensor | None = None
    ) -> tuple[Operand, Operand]:
        format, dtype, rounding = self.rule(gradient=False)
        keep_fp8 = keep_fp8 and self.keeps_fp8
        how = interleaved, keep_fp8, dtype, rounding
        if bias is not None and not keep_fp8:  # backward keeps h with the bias in bfloat16
            h, bias = _add_bias(h, bias, groups.offs), None
        q, scale, h_q, h_scale = _quantize_activated(h, activation, format, bias, groups.offs, *how)
        return Operand(q, scale), Operand(h_q, h_scale) if keep_fp8 else Operand(h)

    def gradients(self, da: Tensor, activated: Activated, groups: Groups, wanted: Wanted) -> Gradients:
        if wanted.rows and not wanted.tokens:
            return self._gradients_along_rows(da, activated, groups, wanted)
        if wanted != Wanted(rows=True, tokens=True, a=True, dh=False, db=wanted.db):
            return super().gradients(da, activated, groups, wanted)
        h, scores, activation, interleaved = activated
        format, dtype, rounding = self.rule(gradient=False)
        dtypes = dtype, self.rule(gradient=True)[1]
        how = self.recipe.align, *dtypes, rounding, self.recipe.amax_of_groups, wanted.db
        q, scale, q_t, scale_t, a_q_t, a_scale_t, ends, dscores, db = _quantize_activated_backward(
            da, h.values, activation, format, groups.offs, scores, h.scale, groups.indices, interleaved, *how
        )
        rows, tokens, a_t = Operand(q, scale), Operand(q_t, scale_t, ends), Operand(a_q_t, a_scale_t, ends)
        return Gradients(rows, tokens, a_t, None, dscores, db=db if wanted.db else None)

    def _gradients_along_rows(self, da: Tensor, activated: Activated, groups: Groups, wanted: Wanted) -> Gradients:
        """Computes `gradients` for a weight without a gradient. dh and a, if wanted too, are returned in bfloat16."""
        h, scores, activation, interleaved = activated
        format, dtype, rounding = self.rule(gradient=True)
        how = interleaved, wanted.dh or wanted.db, wanted.a or wanted.a_values, dtype, rounding
        q, scale, dh, a, dscores = _quantize_activated_backward_rows(
            da, h.values, activation, format, groups.offs, scores, h.scale, groups.indices, *how
        )
        _, a_t = self.rows(a, groups.in_place, tokens=wanted.a)
        db = _sum_groups(dh, groups.offs, None, None, None) if wanted.db else None
        dh, a = dh if wanted.dh else None, a if wanted.a_values else None
        return Gradients(Operand(q, scale), NOTHING, a_t, dh, dscores, a, db)

    def _is_smaller(self, x: Tensor, groups: Groups) -> bool:
        """Returns whether x takes less memory than its copy along tokens. Symbolic sizes: whether for all values."""
        m, recipe = (x if groups.indices is None else groups.indices).shape[0], self.recipe
        sizes = m, x.shape[1], groups.offs.shape[0], recipe.align, recipe.amax_of_groups
        smaller = x.numel() * x.dtype.itemsize < FORMATS[self.format].bytes_of_tokens(*sizes)
        if not torch.compiler.is_compiling():
            return smaller
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # loads for a second

        return statically_known_true(smaller)


class HighPrecisionWgrad(Fp8Engine):
    """Quantizes operands along rows. Operands along tokens, which `wgrad` takes, stay in bfloat16."""

    keeps_fp8 = False

    def safe_offs(self, offs: Tensor, rows: int, wgrad: bool) -> Tensor:
        return clamped(offs, rows) if wgrad else offs

    def tokens(
        self, x: Operand, groups: Groups, rows: bool = False, tokens: bool = False, gradient: bool = False
    ) -> tuple[Operand, Operand]:
        along_rows, _ = super().tokens(x, groups, rows, False, gradient)
        if tokens and x.scale is not None:
            x = Operand(self.values(x, groups.of_tokens))
        return along_rows, _BF16.tokens(x, groups, tokens=tokens)[1]

    def rows(
        self, x: Tensor, groups: Groups, rows: bool = False, tokens: bool = False, gradient: bool = False
    ) -> tuple[Operand, Operand]:
        return super().rows(x, groups, rows, False, gradient)[0], Operand(x)

    def left(self, x: Tensor, groups: Groups, wgrad: bool) -> tuple[Operand, Operand]:
        kept = Operand(cast(row_major(x), torch.bfloat16)) if wgrad else NOTHING
        return super().left(x, groups, wgrad=False)[0], kept

    def kept_tokens(self, kept: Operand, groups: Groups) -> Operand:
        return _BF16.tokens(kept, groups, tokens=True)[1]

    gradients, wgrad = Bf16Engine.gradients, Bf16Engine.wgrad


Engine = Bf16Engine
_BF16 = Bf16Engine()


def engine_of(recipe: Recipe, rounding: str | None = None) -> Engine:
    """Returns the engine of a recipe. rounding: as in `Fp8Engine`."""
    if recipe.format is None:
        return _BF16
    return (HighPrecisionWgrad if recipe.wgrad_high_precision else Fp8Engine)(recipe, rounding)


def _both(q: Tensor, scale: Tensor, q_t: Tensor, scale_t: Tensor, ends: Tensor) -> tuple[Operand, Operand]:
    """Makes operands along rows and along tokens from the results of `quantize_both`."""
    return Operand(q, scale), Operand(q_t, scale_t, ends)


@torch.library.custom_op("moe_fp8_ext::add_by_bytes", mutates_args=("total",))
def _add_by_bytes(
    total: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    format: str,
    offs: Tensor,
    align: int,
    use_fast_accum: bool,
) -> None:
    """`ops.add_scaled_grouped_mm` with scales as bytes.

    inductor fails on ops that write an argument and take float8_e8m0fnu (pytorch issue 189522).
    """
    scales = scale_a.view(torch.float8_e8m0fnu), scale_b.view(torch.float8_e8m0fnu)
    _add_scaled_grouped_mm(total, a, b, *scales, format, offs, align, use_fast_accum)
