"""The grouped matmul of quantized operands and its gradients: the ops of a forward and of a backward."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8_ext.distributed.fsdp import GatheredWeight
from moe_fp8_ext.matmul.bf16 import bf16_wgrad, cast, check_experts, clamped, row_major
from moe_fp8_ext.ops.dispatch import below_autograd, differentiable_once
from moe_fp8_ext.quantization.format import FORMATS
from moe_fp8_ext.quantization.recipe import Recipe
from moe_fp8_ext.quantization.tensor import Quantized
from moe_fp8_ext.training.weight_cache import reused

# As ops return an operand both ways: q, scale, q_t, scale_t. A Quantized costs as much as an allocation.
Both = tuple[Tensor, Tensor, Tensor | None, Tensor | None]

_quantize_rows = torch.ops.moe_fp8.quantize_rows.default
_quantize_tokens = torch.ops.moe_fp8.quantize_tokens.default
_quantize_both = torch.ops.moe_fp8.quantize_both.default
_quantize_weight = torch.ops.moe_fp8.quantize_weight.default
_scaled_grouped_mm = torch.ops.moe_fp8.scaled_grouped_mm.default
_add_scaled_grouped_mm = torch.ops.moe_fp8.add_scaled_grouped_mm.default
_permute_pad = torch.ops.moe_fp8.permute_pad.default
_unpermute = torch.ops.moe_fp8.unpermute.default


class Fp8GroupedMm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, A, B_t, offs, indices, main_grad, call):
        recipe, a, w, top_k, a_dtype, b_dtype, needs_dA, needs_dB = call
        align, rows, leaf_dtype, kept, by_index = recipe.align, None, None, None, ()
        B = None if B_t is None else B_t.mT  # not below autograd, where torch forgets whose view it is
        with below_autograd():
            if A is None:
                q, scale, q_t, scale_t = _tensors(a)
                align = align if a[1] is None else a[1].align
            else:
                rows = A.shape[0]
                (q, scale, q_t, scale_t), kept = _quantize_tokens_of(A, offs, indices, top_k, recipe, needs_dB)
                by_index = (indices, top_k) if q_t is None else ()
            if B_t is None:
                w, w_scale, w_t, w_scale_t = _tensors(w)
            else:
                leaf_dtype = B_t.dtype
                w, w_scale, w_t, w_scale_t = fp8_weight(B, b_dtype, recipe, needs_dA)
            out = fp8_product(q, scale, w, w_scale, offs, recipe, *by_index)
            out = cast(out, a_dtype or b_dtype or torch.bfloat16)
        if not needs_dB:
            q_t = scale_t = None
        if not needs_dA:
            w_t = w_scale_t = None
        ctx.save_for_backward(offs, indices, kept, q_t, scale_t, w_t, w_scale_t)
        ctx.main_grad = main_grad  # not saved: every backward writes to it
        ctx.call = recipe, top_k, align, rows, a_dtype, b_dtype, leaf_dtype, needs_dA, needs_dB
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx, dY):
        offs, indices, kept, q_t, scale_t, w_t, w_scale_t = ctx.saved_tensors
        recipe, top_k, align, rows, a_dtype, b_dtype, leaf_dtype, needs_dA, needs_dB = ctx.call
        dtype, rounding = recipe.grad_dtype or recipe.dtype, recipe.rounding
        dA = dW = dB_t = None
        with below_autograd():
            dY = row_major(dY)
            if needs_dB and recipe.wgrad_high_precision:
                a = kept if indices is None else _permute_pad(kept, indices, top_k)
                dW, needs_dB = bf16_wgrad(dY, a, clamped(offs, a.shape[0]), ctx.main_grad), False
            if needs_dB:
                quantize = _quantize_both if needs_dA else _quantize_tokens
                *dy, dy_t, dy_scale_t, ends = quantize(dY, recipe.format, offs, None, None, align, dtype, rounding)
            elif needs_dA:
                dy = _quantize_rows(dY, recipe.format, offs, None, None, dtype, rounding)
            if needs_dA:
                dA = fp8_product(*dy, w_t, w_scale_t, offs, recipe)
                dA = cast(dA if indices is None else _unpermute(dA, indices, top_k, rows), a_dtype)
            if needs_dB:
                if kept is not None:
                    options = offs, indices, top_k, align, recipe.dtype, rounding
                    q_t, scale_t, _ = _quantize_tokens(row_major(kept), recipe.format, *options, recipe.amax_of_groups)
                dW = fp8_wgrad(dy_t, dy_scale_t, q_t, scale_t, ends, recipe, align, ctx.main_grad)
            if dW is not None:
                dB_t = cast(cast(dW.mT, b_dtype), leaf_dtype)
        return dA, dB_t, None, None, None, None


def _tensors(pair: tuple[Quantized, Quantized | None]) -> Both:
    return tuple(t for x in pair for t in ((None, None) if x is None else (x.q, x.scale)))


def fp8_product(
    a: Tensor,
    scale_a: Tensor,
    w: Tensor,
    scale_w: Tensor | None,
    offs: Tensor,
    recipe: Recipe,
    indices: Tensor | None = None,
    top_k: int | None = None,
) -> Tensor:
    """a @ w^T of each group, of a GatheredWeight a @ w; of rows of a by index, if one is given."""
    if isinstance(w, GatheredWeight):
        w, scale_w = w.transposed_operand()
    scale_w = FORMATS[recipe.format].transposed_scale(scale_w)
    how = indices, top_k, 1, None, recipe.use_fast_accum
    return _scaled_grouped_mm(a, w.mT, scale_a, scale_w, recipe.format, offs, *how)


def fp8_wgrad(
    dy: Tensor,
    scale_dy: Tensor,
    a: Tensor,
    scale_a: Tensor,
    offs: Tensor,
    recipe: Recipe,
    align: int,
    main_grad: Tensor | None,
) -> Tensor | None:
    """dy @ a^T of each group, [E, N, K] in bfloat16; none where it is added to main_grad, of that shape.

    align: as in `ops.scaled_grouped_mm`.
    """
    scale_a = FORMATS[recipe.format].transposed_scale(scale_a)
    operands = dy, a.mT, scale_dy, scale_a, recipe.format, offs
    if main_grad is None:
        return _scaled_grouped_mm(*operands, None, None, align, None, recipe.use_fast_accum)
    if scale_dy.dtype == torch.float8_e8m0fnu and torch.compiler.is_compiling():
        operands = dy, a.mT, scale_dy.view(torch.uint8), scale_a.view(torch.uint8), recipe.format, offs
        _add_by_bytes(main_grad, *operands, align, recipe.use_fast_accum)
    else:
        _add_scaled_grouped_mm(main_grad, *operands, align, recipe.use_fast_accum)
    return None


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
    """`ops.add_scaled_grouped_mm` of scales as bytes: inductor stops at writes beside float8_e8m0fnu (pytorch issue
    189522)."""
    scales = scale_a.view(torch.float8_e8m0fnu), scale_b.view(torch.float8_e8m0fnu)
    _add_scaled_grouped_mm(total, a, b, *scales, format, offs, align, use_fast_accum)


def _quantize_tokens_of(
    A: Tensor, offs: Tensor, indices: Tensor | None, top_k: int | None, recipe: Recipe, needs_dB: bool
) -> tuple[Both, Tensor | None]:
    """A along rows and, where its gradient of B_t is computed from that, along tokens; or what to keep instead. With an
    index, rows alone are those of A, once each."""
    kept = None
    if needs_dB and recipe.wgrad_high_precision:
        check_experts(A, offs, recipe="wgrad_high_precision")
        kept = cast(row_major(A), torch.bfloat16)
    elif needs_dB and _is_smaller(A, offs, indices, recipe):
        kept = A
    A, format, dtype, rounding = row_major(A), recipe.format, recipe.dtype, recipe.rounding
    if needs_dB and kept is None:
        how = recipe.align, dtype, rounding, recipe.amax_of_groups
        *both, _ = _quantize_both(A, format, offs, indices, top_k, *how)
        return both, None
    of_rows = None if indices is not None else offs  # whose groups are not those of rows by index
    return (*_quantize_rows(A, format, of_rows, None, None, dtype, rounding), None, None), kept


def _is_smaller(A: Tensor, offs: Tensor, indices: Tensor | None, recipe: Recipe) -> bool:
    """Whether A takes less memory than its copy along tokens; where sizes are symbols, whether it does for all."""
    m = A.shape[0] if indices is None else indices.shape[0]
    copy = FORMATS[recipe.format].bytes_of_tokens(m, A.shape[1], offs.shape[0], recipe.align, recipe.amax_of_groups)
    smaller = A.numel() * A.dtype.itemsize < copy
    if not torch.compiler.is_compiling():
        return smaller
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # here alone: it takes a second to load

    return statically_known_true(smaller)


def fp8_weight(w: Tensor, w_dtype: torch.dtype, recipe: Recipe, needs_dA: bool) -> Both:
    """Weights [E, N, K], and transposed at least where dA is needed: those that are reused, or new ones.

    A GatheredWeight itself is what is kept of it for dA.
    """
    rule = w_dtype, recipe.format, recipe.dtype, recipe.rounding
    if isinstance(w, GatheredWeight):
        return *w.operand(*rule), w, None
    return reused(_quantize_weights, w, *rule) or _quantize_weights(w, *rule, needs_dA)


def _quantize_weights(
    w: Tensor, w_dtype: torch.dtype, format: str, dtype: torch.dtype | None, rounding: str, needs_dA: bool = True
) -> Both:
    """In formats with blocks one op writes both, a byte an element more than a frozen input has use for."""
    w = cast(w, w_dtype)
    if w.stride(-2) == 1 and w.stride(-1) != 1:  # contiguous [E, K, N]: the same op, its directions swapped
        q_t, scale_t, q, scale = _quantize_weight(w.mT, format, dtype, rounding)
        return q, scale, q_t, scale_t
    w = row_major(w)
    if needs_dA or FORMATS[format].block:
        return _quantize_weight(w, format, dtype, rounding)
    return *_quantize_rows(w, format, None, None, None, dtype, rounding), None, None
