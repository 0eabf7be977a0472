"""The differentiable grouped matmul of MoE layers: a drop-in for `torch._grouped_mm` that computes in fp8."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from moe_fp8_ext._C import validates
from moe_fp8_ext.bf16 import Bf16GroupedMm, bf16_wgrad, cast, check_experts, row_major
from moe_fp8_ext.formats import FORMATS, MAX_EXPERTS
from moe_fp8_ext.ops import permute_pad
from moe_fp8_ext.ops.checks import (
    INPUT_DTYPES,
    validate_indices,
    validate_offs,
)
from moe_fp8_ext.ops.dispatch import asks_for_gradient, below_autograd, differentiable_once
from moe_fp8_ext.quantized import Quantized
from moe_fp8_ext.recipes import Recipe, get_recipe
from moe_fp8_ext.weight_cache import reused

_OP = "grouped_mm"
Pair = tuple[Quantized, Quantized]
# As ops return an operand both ways: q, scale, q_t, scale_t. A Quantized costs as much as an allocation.
Both = tuple[Tensor, Tensor, Tensor | None, Tensor | None]

_quantize_rows = torch.ops.moe_fp8.quantize_rows.default
_quantize_tokens = torch.ops.moe_fp8.quantize_tokens.default
_quantize_both = torch.ops.moe_fp8.quantize_both.default
_quantize_weight = torch.ops.moe_fp8.quantize_weight.default
_scaled_grouped_mm = torch.ops.moe_fp8.scaled_grouped_mm.default
_permute_pad = torch.ops.moe_fp8.permute_pad.default
_unpermute = torch.ops.moe_fp8.unpermute.default


def grouped_mm(
    A: Tensor | Quantized | Pair,
    B_t: Tensor | Quantized | Pair,
    offs: Tensor,
    *,
    recipe: str | Recipe = "rowwise",
    indices: Tensor | None = None,
    top_k: int | None = None,
) -> Tensor:
    """out[r] = A[r] @ B_t[e] for every row r of group e; rows from offs[-1] on are zero.

    With `indices`, row r is A[indices[r] // top_k] instead, as `permute_pad` takes it: the quantizer gathers the rows,
    so that the permuted and padded tokens never exist in 16 bits, but for what a product dequantizes (see
    `ops.scaled_grouped_mm`).

    With a quantized recipe, A, B_t and the output gradient are quantized to fp8 on the way into each of the three
    matmuls. dA is zero in tail rows, the gradient of an empty group's weights is zero. Any sizes work, the caller never
    pads; nothing here waits for the device, and two runs give the same bytes. Traces under
    torch.compile(fullgraph=True), can be captured in a CUDA graph, honours torch.autocast. Differentiable once.

    Kept for backward is the transposed fp8 copy of B_t, where A needs a gradient, and, where B_t does, the smaller of

        A itself                                 rows of A * K * bytes of an element
        its fp8 copy along tokens, with scales   K * P + scales,  P = round_up(M, align) + E * align
                                                 scales: 4 E K ("rowwise"), 4 round_up(K, 4) * B ("blockwise"), or
                                                 round_up(K, 128) * (P / 32 + 4 E) ("mxfp8")

    with M rows of out, B = (round_up(M, 128) + 128 E) / 128. A itself is a reference to what the caller has, no copy,
    and is quantized along tokens in backward, to the same bytes. In a graph for any number of tokens it is always the
    fp8 copy. With the recipe's wgrad_high_precision it is A in bfloat16.

    What differs from `torch._grouped_mm`: offs are required, there is no bias and no out_dtype, A is always [M, K] and
    B_t [E, K, N].

    Args:
        A: [M, K] tokens sorted by group, or, with `indices`, in any order; bfloat16, float16 or float32. Or already
            quantized: what `quantize_rows` returns for offs, or, where B_t needs a gradient, the pair of
            `quantize_both`. No gradient flows into a Quantized: it counts as a constant.
        B_t: [E, K, N] weights, the transposed view of [E, N, K] or contiguous itself (both without a copy), of A's
            dtype. Or the pair that `quantize_weight` returns for the weights [E, N, K], a constant too; its first alone
            will do where A needs no gradient.
        offs: [E] int32 on A's device, exclusive end row of each group, non-decreasing, at most 1024.
        recipe: "rowwise" (fp8, one scale a row), "blockwise" (fp8, one scale for 128 elements, 128 x 128 of a weight),
            "mxfp8" (fp8, a power of two for 32 elements), "bf16" (no quantization: `torch._grouped_mm`, which on a GPU
            takes at most 1023 experts), or a `Recipe`.
        indices: [P] int32 on A's device, of `permute_indices` (with its padded_offs as offs), or the permutation of
            `sort_tokens` with its top_k; distinct, any other value than a slot of A stands for a row of zeros.
        top_k: slots of a row of A, given with indices and only then.

    Returns:
        out [M, N], with `indices` [P, N], of A's dtype, B_t's where A is quantized, bfloat16 where both are. The matmul
        itself rounds to bfloat16.

    Raises:
        RuntimeError: dtype, shape, stride, device or format are not as above; the text names op and argument.
        ValueError, TypeError: no recipe of that name exists, or it is neither a name nor a `Recipe`.

    Source: DESIGN.md section 6; the signature of `torch._grouped_mm`.
    """
    recipe = get_recipe(recipe)
    a, w = _given("A", A, recipe), _given("B_t", B_t, recipe)
    A, B_t = A if isinstance(A, Tensor) else None, B_t if isinstance(B_t, Tensor) else None
    _check(A, B_t, a, w, offs, indices, top_k)
    a_dtype, b_dtype = _dtypes(A, B_t)
    if A is not None and B_t is not None and a_dtype != b_dtype:
        _fail(f"B_t must have the dtype of A, {a_dtype}, got {b_dtype}")
    A = None if A is None else cast(A, a_dtype)
    needs = asks_for_gradient(A), asks_for_gradient(B_t)
    if recipe.format is None:
        if indices is not None:
            A = permute_pad(row_major(A), indices, top_k)
        return Bf16GroupedMm.apply(A, cast(B_t, b_dtype), offs, *needs)
    _check_gradients(a, w, recipe, *needs)
    # B_t as it is: weights that are reused are not cast. One argument for all that are no tensors: torch looks at each.
    return _QuantizedGroupedMm.apply(A, B_t, offs, indices, (recipe, a, w, top_k, a_dtype, b_dtype, *needs))


def _fail(text: str) -> NoReturn:
    raise RuntimeError(f"{_OP}: {text}")


def _given(arg: str, x: Tensor | Quantized | Pair, recipe: Recipe) -> tuple[Quantized | None, Quantized | None]:
    """What there is already of an operand: along rows, and the other way."""
    if isinstance(x, Tensor):
        return None, None
    pair = x if isinstance(x, (tuple, list)) else (x, None)
    if len(pair) != 2 or not isinstance(pair[0], Quantized) or not isinstance(pair[1], (Quantized, type(None))):
        _fail(f"{arg} must be a tensor, a Quantized or a pair of them, got {type(x).__name__}")
    for quantized, along in zip(pair, ("rows", "tokens" if arg == "A" else "rows"), strict=True):
        if quantized is None:
            continue
        if recipe.format is None:
            _fail(f"{arg} must be a tensor with recipe 'bf16', got '{quantized.format}'")
        if quantized.format != recipe.format:
            _fail(f"{arg} must be of the recipe's format '{recipe.format}', got '{quantized.format}'")
        if quantized.along != along:
            _fail(f"{arg} must be quantized along {along}, got {quantized.along}")
    return pair


def _check(
    A: Tensor | None,
    B_t: Tensor | None,
    a: tuple[Quantized | None, Quantized | None],
    w: tuple[Quantized | None, Quantized | None],
    offs: Tensor,
    indices: Tensor | None,
    top_k: int | None,
) -> None:
    tokens, weight = a[0].q if A is None else A, w[0].q if B_t is None else B_t
    if tokens.dtype not in INPUT_DTYPES and A is not None:
        _fail(f"A must be bfloat16, float16 or float32, got {A.dtype}")
    if weight.dtype not in INPUT_DTYPES and B_t is not None:
        _fail(f"B_t must be bfloat16, float16 or float32, got {B_t.dtype}")
    _check_dense("A", tokens, 2)
    _check_dense("B_t", weight, 3)
    _check_device("B_t", weight, tokens)
    k, of_a = weight.shape[2 if B_t is None else 1], tokens.shape[1]
    if k != of_a:
        _fail(f"B_t must have size {of_a} in dimension 1 (the last of A), got {k}")
    _check_vector("offs", offs, tokens)
    e, got = weight.shape[0], offs.shape[0]
    if got > MAX_EXPERTS:
        _fail(f"offs must have at most {MAX_EXPERTS} entries, got {got}")
    if got != e:
        _fail(f"offs must have {e} entries, one for each expert of B_t, got {got}")
    if (indices is None) != (top_k is None):
        given, missing = ("top_k", "indices") if indices is None else ("indices", "top_k")
        _fail(f"{missing} must be given with {given}, got None")
    if indices is not None:
        if A is None:
            _fail("indices must be None where A is quantized, got a tensor")
        _check_vector("indices", indices, tokens)
        if not isinstance(top_k, int):
            _fail(f"top_k must be an int, got {type(top_k).__name__}")
        if top_k < 1:
            _fail(f"top_k must be at least 1, got {top_k}")
    if not torch.compiler.is_compiling() and validates() and tokens.device.type != "meta":
        rows = tokens.shape[0] if indices is None else indices.shape[0]
        validate_offs(_OP, offs, "rows of A" if indices is None else "indices", rows)
        if indices is not None:
            validate_indices(_OP, indices, tokens.shape[0] * top_k)


def _check_dense(arg: str, x: Tensor, dims: int) -> None:
    if not isinstance(x, Tensor):
        _fail(f"{arg} must be a tensor, got {type(x).__name__}")
    if x.layout != torch.strided:
        _fail(f"{arg} must be a dense tensor, got {x.layout}")
    if x.dim() != dims:
        _fail(f"{arg} must have {dims} dimensions, got {x.dim()}")


def _check_device(arg: str, x: Tensor, A: Tensor) -> None:
    if x.device != A.device:
        _fail(f"{arg} must be on the device of A, {A.device}, got {x.device}")


def _check_vector(arg: str, x: Tensor, A: Tensor) -> None:
    _check_dense(arg, x, 1)
    if x.dtype != torch.int32:
        _fail(f"{arg} must be int32, got {x.dtype}")
    if x.stride(0) != 1 and x.shape[0] > 1:
        _fail(f"{arg} must have stride 1, got stride {x.stride(0)}")
    _check_device(arg, x, A)


def _check_gradients(
    a: tuple[Quantized | None, Quantized | None],
    w: tuple[Quantized | None, Quantized | None],
    recipe: Recipe,
    needs_dA: bool,
    needs_dB: bool,
) -> None:
    if needs_dB and a[0] is not None:
        if recipe.wgrad_high_precision:
            _fail("A must be a tensor where B_t needs a gradient in high precision, got a Quantized")
        if a[1] is None:
            _fail("A must be the pair of quantize_both where B_t needs a gradient, got a Quantized along rows")
    if needs_dA and w[0] is not None and w[1] is None:
        _fail("B_t must be the pair of quantize_weight where A needs a gradient, got its first alone")


def _dtypes(A: Tensor | None, B_t: Tensor | None) -> tuple[torch.dtype | None, torch.dtype | None]:
    """Of A and B_t as they are multiplied; torch.autocast decides."""
    x = B_t if A is None else A
    device = "meta" if x is None else x.device.type
    dtype = None if device == "meta" or not torch.is_autocast_enabled(device) else torch.get_autocast_dtype(device)
    return tuple(None if x is None else dtype or x.dtype for x in (A, B_t))


class _QuantizedGroupedMm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, A, B_t, offs, indices, call):
        recipe, a, w, top_k, a_dtype, b_dtype, needs_dA, needs_dB = call
        align, rows, leaf_dtype, kept = recipe.align, None, None, None
        with below_autograd():
            if A is None:
                q, scale, q_t, scale_t = _tensors(a)
                align = align if a[1] is None else a[1].align
            else:
                rows = A.shape[0]
                (q, scale, q_t, scale_t), kept = _quantize_tokens_of(A, offs, indices, top_k, recipe, needs_dB)
            if B_t is None:
                w, w_scale, w_t, w_scale_t = _tensors(w)
            else:
                leaf_dtype = B_t.dtype
                rule = b_dtype, recipe.format, recipe.dtype, recipe.rounding
                both = reused(_quantize_weights, B_t, *rule) or _quantize_weights(B_t, *rule, needs_dA)
                w, w_scale, w_t, w_scale_t = both
            out = cast(_product(q, scale, w, w_scale, offs, recipe), a_dtype or b_dtype or torch.bfloat16)
        if not needs_dB:
            q_t = scale_t = None
        if not needs_dA:
            w_t = w_scale_t = None
        ctx.save_for_backward(offs, indices, kept, q_t, scale_t, w_t, w_scale_t)
        ctx.call = recipe, top_k, align, rows, a_dtype, b_dtype, leaf_dtype, needs_dA, needs_dB
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx, dY):
        offs, indices, kept, q_t, scale_t, w_t, w_scale_t = ctx.saved_tensors
        recipe, top_k, align, rows, a_dtype, b_dtype, leaf_dtype, needs_dA, needs_dB = ctx.call
        dtype, rounding = recipe.grad_dtype or recipe.dtype, recipe.rounding
        dA = dB_t = None
        with below_autograd():
            dY = row_major(dY)
            if needs_dB and recipe.wgrad_high_precision:
                a = kept if indices is None else _permute_pad(kept, indices, top_k)
                dB_t, needs_dB = cast(bf16_wgrad(dY, a, offs), b_dtype), False
            if needs_dB:
                quantize = _quantize_both if needs_dA else _quantize_tokens
                *dy, dy_t, dy_scale_t, ends = quantize(dY, recipe.format, offs, None, None, align, dtype, rounding)
            elif needs_dA:
                dy = _quantize_rows(dY, recipe.format, offs, None, None, dtype, rounding)
            if needs_dA:
                dA = _product(*dy, w_t, w_scale_t, offs, recipe)
                dA = cast(dA if indices is None else _unpermute(dA, indices, rows, top_k), a_dtype)
            if needs_dB:
                if kept is not None:
                    options = offs, indices, top_k, align, recipe.dtype, rounding
                    q_t, scale_t, _ = _quantize_tokens(row_major(kept), recipe.format, *options)
                dW = _product(dy_t, dy_scale_t, q_t, scale_t, ends, recipe, align)
                dB_t = cast(dW, b_dtype).transpose(-2, -1)
            if dB_t is not None:
                dB_t = cast(dB_t, leaf_dtype)
        return dA, dB_t, None, None, None


def _tensors(pair: tuple[Quantized, Quantized | None]) -> Both:
    return tuple(t for x in pair for t in ((None, None) if x is None else (x.q, x.scale)))


def _product(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offs: Tensor, recipe: Recipe, align: int = 1
) -> Tensor:
    """a @ b^T of each group; align: as in `ops.scaled_grouped_mm`."""
    scale_b = FORMATS[recipe.format].transposed_scale(scale_b)
    return _scaled_grouped_mm(a, b.mT, scale_a, scale_b, offs, recipe.format, align, None, recipe.use_fast_accum)


def _quantize_tokens_of(
    A: Tensor, offs: Tensor, indices: Tensor | None, top_k: int | None, recipe: Recipe, needs_dB: bool
) -> tuple[Both, Tensor | None]:
    """A along rows and, where its gradient of B_t is computed from that, along tokens; or what to keep instead."""
    kept = None
    if needs_dB and recipe.wgrad_high_precision:
        check_experts(A, offs, recipe="wgrad_high_precision")
        kept = cast(row_major(A), torch.bfloat16)
    elif needs_dB and _is_smaller(A, offs, indices, recipe):
        kept = A
    source, dtype, rounding = (row_major(A), recipe.format, offs, indices, top_k), recipe.dtype, recipe.rounding
    if needs_dB and kept is None:
        *both, _ = _quantize_both(*source, recipe.align, dtype, rounding)
        return both, None
    return (*_quantize_rows(*source, dtype, rounding), None, None), kept


def _is_smaller(A: Tensor, offs: Tensor, indices: Tensor | None, recipe: Recipe) -> bool:
    """Whether A takes less memory than its copy along tokens; where sizes are symbols, whether it does for all."""
    m = A.shape[0] if indices is None else indices.shape[0]
    copy = FORMATS[recipe.format].bytes_of_tokens(m, A.shape[1], offs.shape[0], recipe.align)
    smaller = A.numel() * A.dtype.itemsize < copy
    if not torch.compiler.is_compiling():
        return smaller
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # here alone: it takes a second to load

    return statically_known_true(smaller)


def _quantize_weights(
    B_t: Tensor, b_dtype: torch.dtype, format: str, dtype: torch.dtype | None, rounding: str, needs_dA: bool = True
) -> Both:
    """B_t as weights [E, N, K], and transposed, which formats with blocks get at no cost."""
    B_t = cast(B_t, b_dtype)
    if B_t.stride(-1) == 1 and B_t.stride(-2) != 1:  # contiguous [E, K, N]: the same op, its directions swapped
        q_t, scale_t, q, scale = _quantize_weight(B_t, format, dtype, rounding)
        return q, scale, q_t, scale_t
    w = row_major(B_t.transpose(-2, -1))
    if needs_dA or FORMATS[format].block:
        return _quantize_weight(w, format, dtype, rounding)
    return *_quantize_rows(w, format, None, None, None, dtype, rounding), None, None
