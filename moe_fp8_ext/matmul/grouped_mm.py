"""The differentiable grouped matmul of MoE layers: a drop-in for `torch._grouped_mm` that computes in fp8."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, NoReturn
from warnings import warn

import torch
from torch import Tensor

from moe_fp8_ext._C import validates
from moe_fp8_ext.matmul.bf16 import max_experts
from moe_fp8_ext.matmul.engine import Groups, engine_of
from moe_fp8_ext.ops import permute_pad
from moe_fp8_ext.ops.checks import (
    CUMSUM,
    INPUT_DTYPES,
    VALIDATE,
    check_both_or_none,
    check_dense,
    check_int,
    check_main_grad,
    contents,
    fail,
    require,
    validate_indices,
    validate_offs,
)
from moe_fp8_ext.ops.dispatch import below_autograd, differentiable_once, needs_gradient
from moe_fp8_ext.quantization.casting import autocast_dtype, cast, lies_transposed, row_major
from moe_fp8_ext.quantization.format import FORMATS, MAX_EXPERTS, MAX_ROWS, round_up
from moe_fp8_ext.quantization.prepare import NOTHING, Operand, operands_of
from moe_fp8_ext.quantization.recipe import Recipe, get_recipe
from moe_fp8_ext.quantization.tensor import ONE_DIRECTION, Given, Pair, Quantized, common_rounding, given
from moe_fp8_ext.training.main_grad import finish, parameter_of_ddp, start
from moe_fp8_ext.training.watch import MatmulWatch, watched

_OP = "grouped_mm"

_unpermute = torch.ops.moe_fp8.unpermute.default


def grouped_mm(
    A: Tensor | Quantized | Pair,
    B_t: Tensor | Quantized | Pair,
    offs: Tensor,
    *,
    recipe: str | Recipe = "rowwise",
    indices: Tensor | None = None,
    top_k: int | None = None,
    main_grad: Tensor | None = None,
    bias: None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiplies the rows of each group by the weights of the group: a drop-in for `torch._grouped_mm`.

        out[r] = A[r] @ B_t[e]                                              r: offs[e-1] <= r < offs[e]

    Rows from offs[-1] on are zero in out and in the gradient of A. The gradient of an empty group's weights is zero.
    With an fp8 recipe, A, B_t and the gradient of out are quantized for each of the three products.

    - Any sizes work, and the caller never pads. Nothing waits for the device. Two runs give the same bytes.
    - torch.compile(fullgraph=True) traces it, a CUDA graph can capture it. torch.autocast and `reuse_weights` apply.
    - It is differentiable once.

    With `indices`, row r of A is A[indices[r] // top_k], as in `permute_pad`. The quantizer or the product gathers the
    row. So the permuted and padded tokens never exist in 16 bits, unless a product dequantizes them (see
    `ops.scaled_grouped_mm`).

    If A and B_t need gradients, backward keeps the transposed fp8 copy of B_t. A B_t without a gradient is kept by
    reference, and backward quantizes it again, to the same bytes. If B_t needs a gradient, backward also keeps the
    smaller of

        A itself                                 rows of A * K * bytes of an element
        its fp8 copy along tokens, with scales   K * P + scales,  P = round_up(M, align) + E * align
                                                 scales: 4 E K ("rowwise"), 4 round_up(S, 4) * B ("blockwise"), or
                                                 round_up(K, 128) * (P / 32 + 4 E) ("mxfp8")

    with M rows of out, B = (round_up(M, 128) + 128 E) / 128, S = ceil(K / 128), or S = K with amax "group". A itself is
    a reference to the caller's tensor, not a copy. Backward quantizes it along tokens, to the same bytes. A compiled
    graph with a dynamic token count always keeps the fp8 copy. With the recipe's wgrad_high_precision, backward keeps A
    in bfloat16.

    It takes the arguments of `torch.nn.functional.grouped_mm`, with these limits: offs are required, A is [M, K], B_t
    is [E, K, N], bias is None, and out_dtype is the dtype of the result. On a CPU, contents of offs and indices are
    always checked. On a GPU they are checked inside `moe_fp8_ext.validate()`.

    Args:
        A: [M, K] tokens sorted by group, or, with `indices`, in any order; bfloat16, float16 or float32. A may already
            be quantized: by `quantize_rows` for offs or, if B_t needs a gradient, as the pair of `quantize_both`. It is
            then a constant: no gradient flows to it. The amax of the pair decides the scales for the gradient of B_t:
            with the recipe's `amax_of_groups`, the bytes and the speed are the same as without a pair. If A was
            quantized for other groups, numbers are wrong, and a check of contents refuses it.
        B_t: [E, K, N] weights of A's dtype, the transposed view of [E, N, K] or contiguous (both without a copy). Or
            the view of a weight that `gather_in_fp8_` has gathered. Or the pair that `quantize_weight` returns for the
            weights [E, N, K], a constant too. The first of the pair is enough in format "blockwise", whose bytes
            backward transposes, or if A needs no gradient.
        offs: [E] int32 on A's device, exclusive end row of each group, non-decreasing, at most 1024.
        recipe: "rowwise" (fp8, one scale a row), "blockwise" (fp8, one scale for 128 elements, 128 x 128 of a weight),
            "mxfp8" (fp8, a power of two for 32 elements), "bf16" (no quantization: `torch._grouped_mm`, which on a GPU
            takes at most 1023 experts), "auto" (the fastest of "bf16", "rowwise" and "blockwise", chosen from sizes
            alone by a model with an H200's constants; "rowwise" if A or B_t is quantized already), or a `Recipe`.
        indices: [P] int32 on A's device, from `permute_indices` (with its padded_offs as offs), or the permutation of
            `sort_tokens` with its top_k. Slots are distinct; a value that is no slot of A stands for a row of zeros.
        top_k: slots of a row of A; given if and only if indices are.
        main_grad: [E, K, N], float32 or bfloat16, the transposed view of a contiguous [E, N, K], as B_t usually is.
            Every backward adds the gradient of B_t to it, in float32, before that gradient is rounded to bfloat16.
            `ops.add_scaled_grouped_mm` says when that takes a float32 product in memory. Autograd gets no gradient:
            B_t.grad does not change. Hooks of Megatron's DDP run: see `training/main_grad.py`. If B_t needs no
            gradient, main_grad is not written. torch does not say whether a backward is for A alone, so such a backward
            adds to main_grad too. A pipeline that runs one backward for A and one for B_t therefore adds twice. With a
            quantized B_t and an A that needs a gradient, main_grad gets the gradient of the weights from which B_t was
            quantized. Use this for trained weights that are quantized once for many calls of a graph.
        bias: None. `experts` adds biases.
        out_dtype: None or the dtype of the result.

    Returns:
        out [M, N], with `indices` [P, N]. Its dtype is A's, or B_t's if A is quantized, or bfloat16 if both are. Values
        are rounded to bfloat16 in any case.

    Raises:
        RuntimeError: dtype, shape, stride, device or format are not as above; the text names op and argument.
        ValueError, TypeError: no recipe of that name exists, or it is neither a name nor a `Recipe`.

    Source: DESIGN.md section 6; the signature of `torch._grouped_mm`.
    """
    recipe = get_recipe(recipe, _OP)
    a, w = given(_OP, "A", A, recipe.format), given(_OP, "B_t", B_t, recipe.format, weight=True)
    A, B_t = A if isinstance(A, Tensor) else None, B_t if isinstance(B_t, Tensor) else None
    _check(A, B_t, a, w, offs, indices, top_k)
    if main_grad is not None:
        check_main_grad(_OP, "main_grad", main_grad, "B_t", w[0].q.mT if B_t is None else B_t, transposed=True)
        main_grad = main_grad.mT
    # Products are in the dtype of torch.autocast if it is on, else in the dtype of the tensors.
    plain = B_t if A is None else A
    dtype = None if plain is None else autocast_dtype(plain)
    a_dtype, b_dtype = (None if x is None else dtype or x.dtype for x in (A, B_t))
    if bias is not None:
        _fail(f"bias must be None, because products add none, got {type(bias).__name__}; `experts` adds biases")
    result = a_dtype or b_dtype or torch.bfloat16
    if out_dtype not in (None, result):
        _fail(f"out_dtype must be None or the result's, {result}, got {out_dtype}; cast the result")
    if A is not None and B_t is not None and a_dtype != b_dtype:
        _fail(f"B_t must have the dtype of A, {a_dtype}, got {b_dtype}")
    A = None if A is None else cast(A, a_dtype)
    needs = Needs(needs_gradient(A), needs_gradient(B_t))
    if B_t is None and main_grad is not None:
        if torch.is_grad_enabled() and not needs.A:
            got = "a Quantized" if A is None else "requires_grad=False"
            _fail(f"A must ask for a gradient where main_grad belongs to a quantized B_t, got {got}")
        needs = Needs(needs.A, needs.A)
    if A is not None and B_t is not None:
        (experts, k, n), rows = B_t.shape, (A if indices is None else indices).shape[0]
        recipe = recipe.for_grouped_mm(rows, k, n, experts)
    _check_gradients(a, w, recipe, needs)
    if recipe.format is None or (recipe.wgrad_high_precision and needs.B_t):
        what = 'recipe "bf16"' if recipe.format is None else "wgrad_high_precision"
        e, limit = offs.shape[0], max_experts(offs)
        require(e <= limit, f"{_OP}: offs must have at most {limit} entries with {what}, got {e}")
    if recipe.format is None and indices is not None:
        A, indices, top_k = permute_pad(row_major(A), indices, top_k), None, None
    if a[1] is not None and a[1].align != recipe.align:
        recipe = replace(recipe, align=a[1].align)
    parameter = parameter_of_ddp(B_t) if main_grad is not None and B_t is not None and needs.B_t else None
    call = Call(recipe, common_rounding(recipe.rounding, *a, *w), a, w, a_dtype, b_dtype, needs, parameter)
    # B_t is passed without a cast, because `reuse_weights` finds its copies by the original tensor.
    return GroupedMm.apply(call, Groups(offs, indices, top_k), main_grad, A, B_t)


class Needs(NamedTuple):
    """Which operands need a gradient."""

    A: bool
    B_t: bool


class Call(NamedTuple):
    """The arguments of the Function that autograd does not see."""

    recipe: Recipe
    rounding: str | None  # of the scales of all operands, None if it is not known
    a: Given  # an A that is quantized already
    w: Given
    a_dtype: torch.dtype | None  # the dtype in which A is multiplied
    b_dtype: torch.dtype | None
    needs: Needs
    parameter: Tensor | None  # whose attributes tell Megatron's DDP that main_grad has the gradient


class Saved(NamedTuple):
    """The tensors that backward reads."""

    offs: Tensor
    indices: Tensor | None
    a: Tensor | None  # A quantized along tokens, or A itself
    a_scale: Tensor | None
    w: Tensor | None  # for a product over N
    w_scale: Tensor | None


class GroupedMm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, groups, main_grad, A, B_t):
        engine, needs = engine_of(call.recipe, call.rounding), call.needs
        B = None if B_t is None else B_t.mT  # not below autograd, where torch forgets the base of a view
        with below_autograd():
            rows = call.a[0].q if A is None else groups.indices if groups.indices is not None else A
            groups = groups._replace(offs=engine.safe_offs(groups.offs, rows.shape[0], needs.B_t))
            if A is None:
                a, kept = operands_of(call.a)
            else:
                a, kept = engine.left(A, groups, needs.B_t)
            if B is None:
                w, w_t = operands_of(call.w, needs.A)
            else:
                w, w_t = engine.weight(B, call.b_dtype, needs.A, frozen=not needs.B_t)
            watches = watched(engine, B)
            ctx.watch = None if watches is None else MatmulWatch(*watches, groups, rows.shape[0])
            if watches is not None:
                ctx.watch.forward(A, kept, B, call.b_dtype)
            out = engine.product(a, w, groups, by_index=groups.indices is not None and kept.scale is None)
            out = cast(out, call.a_dtype or call.b_dtype or torch.bfloat16)
        kept = kept if needs.B_t else NOTHING
        ctx.save_for_backward(*Saved(groups.offs, groups.indices, kept.values, kept.scale, w_t.values, w_t.scale))
        ctx.main_grad = main_grad  # not saved: every backward writes to it
        ctx.call = call._replace(a=None, w=None)
        ctx.top_k, ctx.rows_of_A = groups.top_k, None if A is None else A.shape[0]
        ctx.leaf_dtype = None if B_t is None else B_t.dtype
        ctx.transposed = B is not None and lies_transposed(B)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx, dY):
        saved, (recipe, rounding, _, _, a_dtype, b_dtype, needs, parameter) = Saved(*ctx.saved_tensors), ctx.call
        engine, groups = engine_of(recipe, rounding), Groups(saved.offs, saved.indices, ctx.top_k)
        dA = dB_t = None
        with below_autograd():
            dy, dy_t = engine.rows(row_major(dY), groups.in_place, rows=needs.A, tokens=needs.B_t, gradient=True)
            if ctx.watch is not None:
                ctx.watch.gradients(dY, dy_t)
            if needs.A:
                kept = Operand(saved.w, saved.w_scale)
                w_t = engine.second_weight(kept, b_dtype or kept.values.dtype, not needs.B_t, dY)
                dA = engine.product(dy, w_t, groups)
                del w_t  # frees memory for the operands of the gradient of weights
                if groups.indices is not None:
                    dA = _unpermute(dA, groups.indices, groups.top_k, ctx.rows_of_A)
                dA = cast(dA, a_dtype)
            if needs.B_t:
                a_t = engine.kept_tokens(Operand(saved.a, saved.a_scale), groups)
                if ctx.watch is not None and saved.a_scale is None:
                    ctx.watch.tokens(saved.a, a_t)
                dW = engine.wgrad(dy_t, a_t, groups, start(ctx.main_grad, parameter), ctx.transposed)
                dW = finish(ctx.main_grad, parameter) if dW is None else dW
                dB_t = None if dW is None else cast(cast(dW.mT, b_dtype or dW.dtype), ctx.leaf_dtype or dW.dtype)
        return None, None, None, dA, dB_t


def _fail(text: str) -> NoReturn:
    fail(_OP, text)


def _check(
    A: Tensor | None, B_t: Tensor | None, a: Given, w: Given, offs: Tensor, indices: Tensor | None, top_k: int | None
) -> None:
    tokens, weight = a[0].q if A is None else A, w[0].q if B_t is None else B_t
    if tokens.dtype not in INPUT_DTYPES and A is not None:
        _fail(f"A must be bfloat16, float16 or float32, got {A.dtype}")
    if weight.dtype not in INPUT_DTYPES and B_t is not None:
        _fail(f"B_t must be bfloat16, float16 or float32, got {B_t.dtype}")
    check_dense(_OP, "A", tokens, 2)
    check_dense(_OP, "B_t", weight, 3)
    _check_device("B_t", weight, tokens)
    k, columns = weight.shape[2 if B_t is None else 1], tokens.shape[1]
    if k != columns:
        cause = "; weights [E, N, K] are passed as w.mT" if B_t is not None and weight.shape[2] == columns else ""
        _fail(f"B_t must have size {columns} in dimension 1 (the last of A), got {k}{cause}")
    _check_vector("offs", offs, tokens)
    e, got = weight.shape[0], offs.shape[0]
    if got > MAX_EXPERTS:
        _fail(f"offs must have at most {MAX_EXPERTS} entries, got {got}")
    if got != e:
        _fail(f"offs must have {e} entries, one for each expert of B_t, got {got}; {VALIDATE}")
    if (indices is None) != (top_k is None):
        check_both_or_none(_OP, indices=indices, top_k=top_k)
    if a[0] is not None and a[0].offs is None and FORMATS[a[0].format].order == "blocked":
        _fail("A must be quantized for offs, by whose groups its scales are blocked, got one without")
    if indices is not None:
        if A is None:
            _fail("indices must be None where A is quantized, got a tensor")
        _check_vector("indices", indices, tokens)
        check_int(_OP, "top_k", top_k)
        if top_k < 1:
            _fail(f"top_k must be at least 1, got {top_k}")
        if isinstance(rows := tokens.shape[0], int) and rows * top_k > MAX_ROWS:
            _fail(f"top_k must give at most {MAX_ROWS} slots to {rows} rows, got {top_k}")
    rows = tokens.shape[0] if indices is None else indices.shape[0]
    validate_offs(_OP, offs, "rows of A" if indices is None else "indices", rows)
    _validate_groups(a, offs)
    if indices is not None:
        validate_indices(_OP, indices, tokens.shape[0] * top_k)
    if not torch.compiler.is_compiling() and B_t is not None and validates():
        _warn_of_square(B_t)


def _validate_groups(a: Given, offs: Tensor) -> None:
    for quantized in a:
        if quantized is None or quantized.offs is None or contents(offs) is None:
            continue
        sizes = offs.diff(prepend=offs.new_zeros(1))
        wanted = (round_up(sizes, quantized.align).cumsum(0)).tolist()
        got = quantized.offs.tolist()
        if got != wanted:
            _fail(f"A must be quantized along {quantized.along} for offs, with groups that end at {wanted}, got {got}")


def _warn_of_square(B_t: Tensor) -> None:
    """Square weights fit with their transpose and without. Strides say how they lie, not what the caller means."""
    if B_t.shape[1] == B_t.shape[2] and B_t.is_contiguous():
        text = f"B_t {list(B_t.shape)} is contiguous and read as [E, K, N]; weights [E, N, K] are passed as w.mT"
        warn(f"{_OP}: {text}", stacklevel=4)


def _check_device(arg: str, x: Tensor, A: Tensor) -> None:
    if x.device != A.device:
        _fail(f"{arg} must be on the device of A, {A.device}, got {x.device}")


def _check_vector(arg: str, x: Tensor, A: Tensor) -> None:
    check_dense(_OP, arg, x, 1)
    if x.dtype != torch.int32:
        cause = f"{CUMSUM}; {VALIDATE}" if arg == "offs" else VALIDATE
        _fail(f"{arg} must be int32, got {x.dtype}; {cause}")
    if x.stride(0) != 1 and x.shape[0] > 1:
        _fail(f"{arg} must have stride 1, got stride {x.stride(0)}")
    _check_device(arg, x, A)


def _check_gradients(a: Given, w: Given, recipe: Recipe, needs: Needs) -> None:
    if needs.B_t and a[0] is not None:
        if recipe.wgrad_high_precision:
            _fail("A must be a tensor where B_t needs a gradient in high precision, got a Quantized")
        if a[1] is None:
            _fail("A must be the pair of quantize_both where B_t needs a gradient, got a Quantized along rows")
    if needs.A and w[0] is not None and w[1] is None and not FORMATS[w[0].format].has_square_blocks:
        _fail(f"B_t must be the pair of quantize_weight where A needs a gradient, got its first alone; {ONE_DIRECTION}")
