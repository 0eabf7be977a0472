"""The experts of an MoE layer as one differentiable operation.

Between products there are quantizers, moves of FP8 bytes and sums over slots; docs/layer.md says what adds passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from moe_fp8_ext._C import validates
from moe_fp8_ext.layer.bias import plus_bias, rows_of_bias, sum_of_groups
from moe_fp8_ext.matmul.bf16 import autocast_dtype, cast, most_experts, row_major
from moe_fp8_ext.matmul.engine import NOTHING, Activated, Operand, Slots, Wanted, operands_of
from moe_fp8_ext.ops.activations import GATED
from moe_fp8_ext.ops.checks import (
    INPUT_DTYPES,
    check_bool,
    check_dense,
    check_main_grad,
    check_one_of,
    dtype_name,
    either,
    has_values,
    require,
    validate_ids,
)
from moe_fp8_ext.ops.dispatch import asks_for_gradient, below_autograd, differentiable_once
from moe_fp8_ext.quantization.format import MAX_EXPERTS
from moe_fp8_ext.quantization.recipe import Recipe, get_recipe
from moe_fp8_ext.quantization.tensor import Pair, Quantized, given

_OP = "experts"
_WEIGHTS = "w_gate_up", "w_down"
KEEP = ("fp8", "bf16")
_BF16 = torch.bfloat16

_sort_tokens = torch.ops.moe_fp8.sort_tokens.default
_combine = torch.ops.moe_fp8.combine.default
_combine_backward = torch.ops.moe_fp8.combine_backward.default


def experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_scores: Tensor,
    w_gate_up: Tensor | Quantized | Pair,
    w_down: Tensor | Quantized | Pair,
    *,
    recipe: str | Recipe = "rowwise",
    activation: str = "swiglu",
    interleaved: bool = False,
    b_gate_up: Tensor | None = None,
    b_down: Tensor | None = None,
    keep: str = "fp8",
    main_grad_gate_up: Tensor | None = None,
    main_grad_down: Tensor | None = None,
) -> Tensor:
    """Every token through its experts, weighted by the router's scores:

        h[t, j] = w_gate_up[e] @ x[t] + b_gate_up[e]                        e = topk_ids[t, j]
        out[t]  = sum_j topk_scores[t, j] * (w_down[e] @ activation(h[t, j]) + b_down[e])

    Slots are sorted by expert, groups have any sizes. A token is quantized along its row once, forward and backward,
    and products take it by index; with `Recipe.amax` "batch" it is quantized once along tokens too, and its bytes are
    moved to its slots. Outputs of experts are not kept: a score's gradient is the dot product of an activation and its
    gradient. What a frozen input would need is not computed, but for the second direction of weights with blocks.
    Nothing waits for the device; two runs give the same bytes. Traces under torch.compile(fullgraph=True), can be
    captured in a CUDA graph, honours torch.autocast and `reuse_weights`. Differentiable once.

    Kept for backward are x, a reference, or its copy where autocast casts it, and for P = T * top_k slots, H =
    w_gate_up.shape[1]:

        h                                 P * H bytes and its scales, those of `quantize_rows`; in bfloat16 2 P * H
        order of the slots, scores        12 P + 4 E bytes

    and of each weight, where backward multiplies by it, its fp8 copy transposed, or none after `gather_in_fp8_`; with
    recipe "bf16" the weight itself, of which a copy in bfloat16 where it is of another dtype.

    Args:
        x: [T, D] bfloat16, float16 or float32.
        topk_ids: [T, top_k] int32 or int64: experts of each token. Ids out of [0, E) drop their slots, which count for
            nothing; MOE_FP8_VALIDATE=1 refuses all of them but -1.
        topk_scores: [T, top_k] bfloat16, float16 or float32, taken as float32.
        w_gate_up: [E, 2 F, D], or [E, F, D] with an activation that is not gated; E at most 1024, on a GPU 1023 with
            "bf16", wgrad_high_precision or biases that need a gradient. Of any strides; a contiguous one or its
            transposed view is not copied.
        w_down: [E, D, F], likewise. Either may be a weight that `gather_in_fp8_` has gathered. Or the pair that
            `quantize_weight` returns for the weights, in the recipe's format: a constant, or, with its main_grad, a
            weight that is trained and was quantized once for many calls of a graph. Its first alone where x, and for
            w_down scores and w_gate_up, need no gradient.
        recipe: as in `grouped_mm`, but that "auto" is "bf16" for 350 slots an expert and fewer: casts of weights alone
            are more than what a layer in bfloat16 does.
        activation: "swiglu", "geglu" or "swiglu_oai", which are gated, "relu2", "silu" or "gelu"; see `ops.activate`.
        interleaved: gate and up alternate along 2 F, where they are halves otherwise. Without gates it changes nothing.
        b_gate_up: [E, 2 F] or [E, F], added in bfloat16.
        b_down: [E, D], likewise.
        keep: h for backward as "fp8", quantized along rows in the recipe's format, or as it is, "bf16". It always is
            as it is with recipe "bf16" and with wgrad_high_precision.
        main_grad_gate_up, main_grad_down: float32 or bfloat16, contiguous, shaped as w_gate_up and w_down, each with or
            without the other. Every backward adds the gradient of that weight to it and gives autograd none, all as
            with main_grad of `grouped_mm`. Of quantized weights, where anything else asks for a gradient.

    Returns:
        out [T, D] of x's dtype.

    Raises:
        RuntimeError: dtype, shape, strides, device or names are not as above; the text names the argument.
        ValueError, TypeError: no recipe of that name exists, or it is neither a name nor a `Recipe`.

    Source: DESIGN.md section 6.
    """
    weights = w_gate_up, w_down, b_gate_up, b_down
    options = recipe, activation, interleaved, keep, main_grad_gate_up, main_grad_down
    inputs = arguments(x, topk_ids, topk_scores, weights, *options)
    if not torch.compiler.is_compiling() and validates() and has_values(topk_ids):
        validate_ids(_OP, topk_ids, inputs[-1].experts)
    return _Experts.apply(*inputs)


def arguments(
    x: Tensor,
    topk_ids: Tensor,
    topk_scores: Tensor,
    weights: tuple[Tensor | Quantized | Pair, Tensor | Quantized | Pair, Tensor | None, Tensor | None],
    recipe: str | Recipe,
    activation: str,
    interleaved: bool,
    keep: str,
    main_grad_gate_up: Tensor | None,
    main_grad_down: Tensor | None,
) -> tuple[object, ...]:
    """Of the Function, for a checked call of `experts`."""
    recipe = get_recipe(recipe, _OP)
    check_one_of(_OP, "activation", activation, list(GATED))
    check_one_of(_OP, "keep", keep, KEEP)
    check_bool(_OP, "interleaved", interleaved)
    up, down = (given(_OP, name, w, recipe.format, weight=True) for name, w in zip(_WEIGHTS, weights[:2], strict=True))
    quantized = up[0] is not None, down[0] is not None
    w_gate_up, w_down = (of[0].q if of[0] else w for w, of in zip(weights[:2], (up, down), strict=True))
    _check(x, topk_ids, topk_scores, w_gate_up, w_down, *weights[2:], GATED[activation], quantized)
    if main_grad_gate_up is not None:
        check_main_grad(_OP, "main_grad_gate_up", main_grad_gate_up, "w_gate_up", w_gate_up)
    if main_grad_down is not None:
        check_main_grad(_OP, "main_grad_down", main_grad_down, "w_down", w_down)
    e, hidden, d = w_gate_up.shape
    if not any(quantized):
        recipe = recipe.at(topk_ids.numel() * hidden * d, e * hidden * d, e)
    needs = _needs((x, topk_scores, *weights), (up, down), (main_grad_gate_up, main_grad_down))
    weights = *(None if fp8 else w for w, fp8 in zip(weights[:2], quantized, strict=True)), *weights[2:]
    if what := _in_bf16(recipe, needs):
        limit = most_experts(x)
        require(e <= limit, f"{_OP}: w_down must have at most {limit} experts with {what}, got {e}")
    dtype = autocast_dtype(x)
    x, scores = cast(x, dtype or x.dtype), cast(topk_scores, torch.float32).contiguous()
    call = Call(recipe, activation, interleaved, keep == "fp8", dtype, e, w_down.shape[2], needs, up, down)
    return x, scores, *weights, topk_ids.contiguous(), main_grad_gate_up, main_grad_down, call


class Needs(NamedTuple):
    """Which inputs ask for a gradient."""

    x: bool
    scores: bool
    w_gate_up: bool
    w_down: bool
    b_gate_up: bool
    b_down: bool

    @property
    def dh(self) -> bool:
        return self.x or self.w_gate_up or self.b_gate_up

    @property
    def da(self) -> bool:
        return self.dh or self.scores

    @property
    def h(self) -> bool:
        return self.da or self.w_down


def _needs(
    inputs: Sequence[object],
    quantized: Sequence[tuple[Quantized | None, Quantized | None]],
    main_grads: Sequence[Tensor | None],
) -> Needs:
    """A quantized weight whose gradient goes to main_grad needs one wherever there is a backward."""
    asks = [asks_for_gradient(t) for t in inputs]
    backward = any(asks)
    for i, (name, (rows, _), main_grad) in enumerate(zip(_WEIGHTS, quantized, main_grads, strict=True)):
        if rows is None or main_grad is None:
            continue
        if torch.is_grad_enabled() and not backward:
            _fail(f"x, or another, must ask for a gradient where main_grad is that of a quantized {name}, got none")
        asks[2 + i] = backward
    needs = Needs(*asks)
    for name, (rows, other_way), multiplied in zip(_WEIGHTS, quantized, (needs.x, needs.da), strict=True):
        if rows is not None and other_way is None and multiplied:
            _fail(f"{name} must be the pair of quantize_weight where backward multiplies by it, got its first alone")
    return needs


class Call(NamedTuple):
    recipe: Recipe
    activation: str
    interleaved: bool
    keep_fp8: bool
    dtype: torch.dtype | None  # of autocast
    experts: int
    features: int  # of an activation
    needs: Needs
    up: tuple[Quantized | None, Quantized | None]  # of weights that are quantized already
    down: tuple[Quantized | None, Quantized | None]


class Weights(NamedTuple):
    """As products take them, in forward and, transposed, in backward."""

    up: Operand
    up_t: Operand
    down: Operand
    down_t: Operand
    b_gate_up: Tensor | None
    b_down: Tensor | None

    @classmethod
    def of(cls, weights: Sequence[Tensor | None], call: Call) -> Weights:
        w_gate_up, w_down, *biases = weights
        up = _operands(w_gate_up, call.up, call, backward=call.needs.x)
        return cls(*up, *_operands(w_down, call.down, call, backward=call.needs.da), *biases)


def _operands(
    w: Tensor | None, quantized: tuple[Quantized | None, Quantized | None], call: Call, backward: bool
) -> tuple[Operand, Operand]:
    rows, other_way = quantized
    if rows is None:
        return operands_of(call.recipe).weight(w, call.dtype or w.dtype, backward)
    return Operand(rows.q, rows.scale), Operand(other_way.q, other_way.scale) if backward else NOTHING


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, scores, w_gate_up, w_down, b_gate_up, b_down, topk_ids, main_grad_gate_up, main_grad_down, call
    ):
        weights = w_gate_up, w_down, b_gate_up, b_down
        with below_autograd():
            slots = Slots(*_sort_tokens(topk_ids, call.experts))
            out, kept = forward(Operand(x), scores, slots, Weights.of(weights, call), call)
        ctx.save_for_backward(*kept)
        # Not saved tensors: every backward writes to them.
        ctx.main_grads = main_grad_gate_up, main_grad_down
        ctx.call, ctx.dtypes = call, dtypes_of(x, scores, *weights)
        return cast(out, x.dtype)

    @staticmethod
    @differentiable_once
    def backward(ctx, dout):
        kept = ctx.saved_tensors  # outside: `checkpoint` computes forward again here, with gradients
        with below_autograd():
            grads = backward(Operand(row_major(dout)), kept, ctx.main_grads, ctx.call)
        return *cast_all(grads, ctx.dtypes), None, None, None, None


def forward(
    x: Operand, scores: Tensor, slots: Slots, weights: Weights, call: Call
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """out [T, D] in bfloat16 for tokens at their slots, and what `backward` needs."""
    up, up_t, down, down_t, b_gate_up, b_down = weights
    needs, operands = call.needs, operands_of(call.recipe)
    rows, _ = operands.at_slots(x, slots, rows=True)
    h = operands.product(rows, up, slots, by_slot=True)
    if b_gate_up is not None:
        h = plus_bias(h, b_gate_up, slots.offs)
    rows, h = operands.activated(h, slots, call.activation, call.interleaved, call.keep_fp8 and needs.h)
    y = operands.product(rows, down, slots)
    if b_down is not None:
        y = plus_bias(y, b_down, slots.offs)
    out = _combine(y, slots.inverse, scores)
    x, h = x if needs.w_gate_up else NOTHING, h if needs.h else NOTHING
    return out, (scores, b_down, *slots, *x, *up_t, *down_t, *h)


def backward(
    dout: Operand,
    kept: Sequence[Tensor | None],
    main_grads: Sequence[Tensor | None],
    call: Call,
    home: Callable[[Tensor], object] = lambda gradient: gradient,
) -> list[object]:
    """Gradients of what `Needs` lists, those of x and weights in bfloat16; of x and scores what home makes of them.

    home: called as soon as they are known.
    """
    scores, b_down, permutation, offs, inverse, *kept = kept
    x, up_t, down_t, h = map(Operand, kept[::3], kept[1::3], kept[2::3])  # values, scales, ends
    needs, slots, p = call.needs, Slots(permutation, offs, inverse), permutation.shape[0]
    operands = operands_of(call.recipe)
    dx = dscores = dw_gate_up = dw_down = db_gate_up = db_down = None
    dy, dy_t = operands.at_slots(dout, slots, rows=needs.da, tokens=needs.w_down, gradient=True)
    if needs.h:
        # Zeros where dW_down alone is wanted, and so of the next op's results a alone.
        if needs.da:
            da = operands.product(dy, down_t, slots, by_slot=True)
        else:
            da = scores.new_zeros(p, call.features, dtype=_BF16)
        of = Activated(h, scores.view(-1), call.activation, call.interleaved)
        wanted = Wanted(rows=needs.x, tokens=needs.w_gate_up, a=needs.w_down, dh=needs.b_gate_up)
        dh, dh_t, a_t, values, dscores = operands.gradients(da, of, slots, wanted)
        dscores = dscores.view(inverse.shape)
    if needs.w_down:
        dw_down = operands.wgrad(dy_t, a_t, slots, main_grads[1])
    if b_down is not None and (needs.scores or needs.b_down):
        # To `combine` a bias is what the product is, a part of y.
        grad = operands.values(dout)
        y = rows_of_bias(b_down, offs, p, grad.dtype) if needs.scores else None
        dy, of_bias = _combine_backward(grad, y, scores, inverse, p)
        dscores = dscores + of_bias if needs.scores else None
        db_down = sum_of_groups(dy, offs) if needs.b_down else None
    if needs.scores:
        dscores = home(dscores)
    if needs.b_gate_up:
        db_gate_up = sum_of_groups(values, offs)
    if needs.x:
        dx = home(_combine(operands.product(dh, up_t, slots), inverse, None))
    if needs.w_gate_up:
        _, x_t = operands.at_slots(x, slots, tokens=True)
        dw_gate_up = operands.wgrad(dh_t, x_t, slots, main_grads[0])
    return [dx, dscores if needs.scores else None, dw_gate_up, dw_down, db_gate_up, db_down]


def dtypes_of(*inputs: Tensor | None) -> list[torch.dtype | None]:
    return [None if t is None else t.dtype for t in inputs]


def cast_all(grads: Sequence[Tensor | None], dtypes: Sequence[torch.dtype | None]) -> list[Tensor | None]:
    return [None if g is None else cast(g, dtype) for g, dtype in zip(grads, dtypes, strict=True)]


def _in_bf16(recipe: Recipe, needs: Needs) -> str | None:
    """What has a product in bfloat16, if anything has."""
    if recipe.format is None:
        return 'recipe "bf16"'
    if recipe.wgrad_high_precision and (needs.w_gate_up or needs.w_down):
        return "wgrad_high_precision"
    return "biases that need a gradient" if needs.b_gate_up or needs.b_down else None


def _fail(text: str) -> NoReturn:
    raise RuntimeError(f"{_OP}: {text}")


def _check(
    x: Tensor,
    topk_ids: Tensor,
    topk_scores: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    b_gate_up: Tensor | None,
    b_down: Tensor | None,
    gated: bool,
    quantized: tuple[bool, bool],
) -> None:
    check_dense(_OP, "x", x, 2)
    check_dense(_OP, "topk_ids", topk_ids, 2)
    check_dense(_OP, "w_down", w_down, 3)
    (tokens, d), top_k, (e, _, f) = x.shape, topk_ids.shape[1], w_down.shape
    if top_k < 1:
        _fail("topk_ids must have at least 1 column, got 0")
    if not 1 <= e <= MAX_EXPERTS:
        _fail(f"w_down must have from 1 to {MAX_EXPERTS} experts, got {e}")
    rows = 2 * f if gated else f
    _check_tensor("x", x, (tokens, d), x)
    _check_tensor("topk_ids", topk_ids, (tokens, top_k), x, (torch.int32, torch.int64))
    _check_tensor("topk_scores", topk_scores, (tokens, top_k), x)
    for name, w, shape, is_fp8 in zip(_WEIGHTS, (w_gate_up, w_down), ((e, rows, d), (e, d, f)), quantized, strict=True):
        _check_tensor(name, w, shape, x, (w.dtype,) if is_fp8 else INPUT_DTYPES)
    for name, bias, shape in (("b_gate_up", b_gate_up, (e, rows)), ("b_down", b_down, (e, d))):
        if bias is not None:
            _check_tensor(name, bias, shape, x)


def _check_tensor(
    name: str, t: Tensor, shape: tuple[int, ...], x: Tensor, dtypes: tuple[torch.dtype, ...] = INPUT_DTYPES
) -> None:
    check_dense(_OP, name, t, len(shape))
    if t.dtype not in dtypes:
        _fail(f"{name} must be {either([dtype_name(dtype) for dtype in dtypes])}, got {t.dtype}")
    if t.device != x.device:
        _fail(f"{name} must be on the device of x, {x.device}, got {t.device}")
    for dim, (size, got) in enumerate(zip(shape, t.shape, strict=True)):
        if got != size:
            _fail(f"{name} must have size {size} in dimension {dim}, got {got}")
