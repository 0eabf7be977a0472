"""The experts of an MoE layer as one differentiable operation.

`experts` takes routed tokens. `experts_of_groups` takes rows that are sorted by expert already.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

from moe_fp8_ext.distributed.dtensor import is_dtensor
from moe_fp8_ext.layer.adapter import MAX_RANK, Adapter, LoRA, check_adapter_numbers
from moe_fp8_ext.layer.arrived import arrived, operand_of
from moe_fp8_ext.layer.linear import ExpertLinear
from moe_fp8_ext.layer.node import Call, computed
from moe_fp8_ext.layer.source import RoutedTokens, SortedRows
from moe_fp8_ext.layer.weight_gradients import DelayedWgrads
from moe_fp8_ext.matmul.bf16 import max_experts
from moe_fp8_ext.ops.activations import is_gated
from moe_fp8_ext.ops.checks import (
    INPUT_DTYPES,
    check_bool,
    check_dense,
    check_main_grad,
    check_one_of,
    dtype_name,
    either,
    fail,
    require,
    validate_ids,
    validate_offs,
)
from moe_fp8_ext.ops.dispatch import needs_gradient, refuse_tangents_of
from moe_fp8_ext.quantization.casting import autocast_dtype, cast, lies_transposed
from moe_fp8_ext.quantization.format import FORMATS, MAX_EXPERTS
from moe_fp8_ext.quantization.prepare import DeferredWeight
from moe_fp8_ext.quantization.recipe import Recipe, get_recipe
from moe_fp8_ext.quantization.tensor import ONE_DIRECTION, Pair, Quantized, common_rounding, given
from moe_fp8_ext.training import main_grad

_OP = "experts"
_UP, _DOWN = "w_gate_up", "w_down"  # the names of weights in errors
KEEP = ("fp8", "bf16")
_PLAIN = Tensor, torch.nn.Parameter


def experts(
    x: Tensor | Quantized,
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
    lora_gate_up: LoRA | tuple[Tensor, Tensor, float] | None = None,
    lora_down: LoRA | tuple[Tensor, Tensor, float] | None = None,
    delay_wgrad: DelayedWgrads | None = None,
    stand_in: Tensor | None = None,
) -> Tensor:
    """Computes the experts of every token, and their sum weighted by the router's scores.

        h[t, j] = w_gate_up[e] @ x[t] + b_gate_up[e]                        e = topk_ids[t, j]
        out[t]  = sum_j topk_scores[t, j] * (w_down[e] @ activation(h[t, j]) + b_down[e])

    - Groups may have any sizes, and need no padding. Nothing waits for the device. Two runs give the same bytes.
    - torch.compile(fullgraph=True) traces it, a CUDA graph can capture it. torch.autocast and `reuse_weights` apply.
    - It is differentiable once.

    Forward and backward each quantize a token once along its row, and products take the row by index. With
    `Recipe.amax` "batch" a token is also quantized once along tokens, and its bytes are moved to its slots. The outputs
    of experts are not kept, because the gradient of a score is the dot product of an activation and its gradient. If an
    input is frozen, its gradient is not computed. But weights in blocks are quantized in both directions.

    For P = T * top_k slots and H = w_gate_up.shape[1], backward keeps

        x                                 a reference, or a copy if autocast casts x
        h                                 P * H bytes, and scales as in `quantize_rows`; in bfloat16 2 P * H bytes
        order of the slots, scores        12 P + 4 E bytes
        a trained weight                  its transposed fp8 copy, if backward multiplies by it; none after
                                          `gather_in_fp8_`. With recipe "bf16" the weight, or its copy in bfloat16
        a weight without a gradient       a reference. Backward quantizes it again, one projection at a time, to the
                                          same bytes

    Args:
        x: [T, D] bfloat16, float16 or float32. Or a `Quantized` along rows in the recipe's format, as `quantize_rows`
            returns it without offs, such as rows that a dispatcher received in FP8. The first product then multiplies
            these values. For the gradient of w_gate_up they are cast again, along tokens. With recipe "mxfp8", scales
            may also be row-major, in format "mxfp8_rowmajor".
        topk_ids: [T, top_k] int32 or int64: experts of each token. An id out of [0, E) drops its slot;
            on a CPU, and inside `moe_fp8_ext.validate()`, all such ids except -1 raise.
        topk_scores: [T, top_k] bfloat16, float16 or float32, taken as float32.
        w_gate_up: [E, 2 F, D], or [E, F, D] with an activation that is not gated; E at most 1024, and 1023 with
            adapters. On a GPU E is at most 1023 with "bf16", wgrad_high_precision or biases that need a gradient, and
            1022 with adapters. Of any strides; a contiguous one or its transposed view is not copied.
        w_down: [E, D, F], of any strides as w_gate_up. Either weight may also be one that `gather_in_fp8_` has
            gathered, or the pair that `quantize_weight` returns for it, in the recipe's format. A pair is a constant.
            With its main_grad, a pair is a trained weight that was quantized once for many calls of a graph. The first
            of the pair is enough in format "blockwise": backward transposes its bytes, one projection at a time. The
            first is also enough if x and, for w_down, scores and w_gate_up need no gradient.
        recipe: as in `grouped_mm`. "auto" uses the layer's own constants of the model in `quantization/cost.py`, and
            counts T * top_k slots.
        activation: "swiglu", "geglu", "swiglu_oai" or a `clamped_swiglu(...)`, which are gated, or "relu2", "silu" or
            "gelu"; see `ops.activate`.
        interleaved: gates and ups alternate along 2 F; otherwise they are halves. No effect on activations without
            gates.
        b_gate_up: [E, 2 F] or [E, F], added in bfloat16.
        b_down: [E, D], added in bfloat16.
        keep: how h is kept for backward: "fp8", quantized along rows in the recipe's format, or unchanged, "bf16".
            Recipe "bf16" and wgrad_high_precision always keep it unchanged.
        main_grad_gate_up, main_grad_down: float32 or bfloat16, contiguous, shaped as w_gate_up and w_down. Each may be
            given alone. Every backward adds the gradient of the weight to its main_grad and gives autograd none, as
            in `grouped_mm`. For a quantized weight, another input must require a gradient.
        lora_gate_up, lora_down: adapters, which add scaling * B (A x) to h and scaling * B (A a) to y: a `LoRA`, or a
            tuple (A, B, scaling). A [E, r, D] and B [E, 2 F, r] of lora_gate_up, A [E, r, F] and B [E, D, r] of
            lora_down, with E left out if all experts share the factor. Weights may be frozen, quantized or trained.
            Backward keeps 2 bytes a slot and rank, rounded up to a multiple of 8, and a bit for each element that
            dropout may zero.
        delay_wgrad: a `DelayedWgrads` that computes the gradients of both weights after backward. Then x, or another
            input that is no weight, must require a gradient.
        stand_in: [T, D] bfloat16, float16 or float32, only with a quantized x, which autograd does not see. The
            stand_in gets the gradient of x, and out has its dtype. Its contents are never read, so one element that is
            expanded to [T, D] is enough. Without a stand_in, x gets no gradient, and out is bfloat16.

    Returns:
        out [T, D] of the dtype of x, or of stand_in.

    Raises:
        RuntimeError: dtype, shape, strides, device or names are not as above; the text names the argument.
        ValueError, TypeError: no recipe of that name exists, or it is neither a name nor a `Recipe`.

    Source: DESIGN.md section 6.
    """
    x, quantized = arrived(_OP, x, stand_in, recipe)
    options = recipe, activation, interleaved, b_gate_up, b_down, keep, main_grad_gate_up, main_grad_down
    more = lora_gate_up, lora_down, delay_wgrad, quantized
    call, *inputs = layer_call(_OP, x, topk_ids, topk_scores, w_gate_up, w_down, *options, *more)
    validate_ids(_OP, topk_ids, call.experts)
    tokens = None if quantized is None else operand_of(_OP, quantized, call.recipe)
    return computed(call, RoutedTokens(topk_ids.contiguous(), call.experts, tokens), *inputs)


def experts_of_groups(
    x: Tensor | Quantized,
    offs: Tensor,
    scores: Tensor | None,
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
    lora_gate_up: LoRA | tuple[Tensor, Tensor, float] | None = None,
    lora_down: LoRA | tuple[Tensor, Tensor, float] | None = None,
    delay_wgrad: DelayedWgrads | None = None,
    stand_in: Tensor | None = None,
) -> Tensor:
    """Computes `experts` for rows that a dispatcher has sorted by expert already.

        h[p]   = w_gate_up[e] @ x[p] + b_gate_up[e]                        e: offs[e-1] <= p < offs[e]
        out[p] = scores[p] * (w_down[e] @ activation(h[p]) + b_down[e])

    It does not sort, and does not sum over slots: rows of out have the order of x. The dispatcher, such as Megatron's,
    DeepEP's or torchtitan's, moves them to their tokens. Rows from offs[-1] on are zero, and so are their gradients.
    Groups may have any sizes, and need no padding. Nothing waits for the device. It is differentiable once.

    Args:
        x: [P, D] bfloat16, float16 or float32, sorted by expert. Or a `Quantized`, as in `experts`. Blocked scales of
            "mxfp8" must have the layout that `quantize_rows` with offs returns.
        offs: [E] int32 on x's device, exclusive end row of each expert, non-decreasing. Contents are clamped and made
            monotonic. On a CPU, and inside `moe_fp8_ext.validate()`, wrong ones raise.
        scores: [P] bfloat16, float16 or float32, taken as float32; None means 1.
        w_gate_up, w_down, b_gate_up, b_down, lora_gate_up, lora_down: as in `experts`.
        recipe, activation, interleaved, keep, main_grad_gate_up, main_grad_down, delay_wgrad: as in `experts`. Recipe
            "auto" counts P rows.
        stand_in: [P, D], as in `experts`.

    Returns:
        out [P, D] of the dtype of x, or of stand_in.

    Raises:
        RuntimeError: dtype, shape, strides, device or names are not as above; the text names the argument.
        ValueError, TypeError: no recipe of that name exists, or it is neither a name nor a `Recipe`.

    Source: DESIGN.md section 6.
    """
    op = "experts_of_groups"
    x, quantized = arrived(op, x, stand_in, recipe)
    if scores is not None:
        check_dense(op, "scores", scores, 1)
        scores = scores[:, None]
    options = recipe, activation, interleaved, b_gate_up, b_down, keep, main_grad_gate_up, main_grad_down
    more = lora_gate_up, lora_down, delay_wgrad, quantized
    call, *inputs = layer_call(op, x, None, scores, w_gate_up, w_down, *options, *more)
    _check_tensor(op, "offs", offs, (call.experts,), x, (torch.int32,))
    validate_offs(op, offs, "rows of x", x.shape[0])
    rows = None if quantized is None else operand_of(op, quantized, call.recipe, offs)
    return computed(call, SortedRows(offs, rows), *inputs)


_OPTIONS = {name for name, p in inspect.signature(experts).parameters.items() if p.kind is p.KEYWORD_ONLY}
_OPTIONS -= {"recipe", "stand_in"}


def call_with_options(op: str, *arguments: object, **options: object) -> tuple[object, ...]:
    """`layer_call` for dispatchers that take the options of `experts`, except recipe and stand_in."""
    if unknown := options.keys() - _OPTIONS:
        raise TypeError(f"{op}: options must be {', '.join(sorted(_OPTIONS))}, got {', '.join(sorted(unknown))}")
    return layer_call(op, *arguments, **options)


def layer_call(
    op: str,
    x: Tensor,
    topk_ids: Tensor | None,
    topk_scores: Tensor | None,
    w_gate_up: Tensor | Quantized | Pair,
    w_down: Tensor | Quantized | Pair,
    recipe: str | Recipe,
    activation: str = "swiglu",
    interleaved: bool = False,
    b_gate_up: Tensor | None = None,
    b_down: Tensor | None = None,
    keep: str = "fp8",
    main_grad_gate_up: Tensor | None = None,
    main_grad_down: Tensor | None = None,
    lora_gate_up: LoRA | tuple[Tensor, Tensor, float] | None = None,
    lora_down: LoRA | tuple[Tensor, Tensor, float] | None = None,
    delay_wgrad: DelayedWgrads | None = None,
    quantized: Quantized | None = None,
) -> tuple[object, ...]:
    """Checks arguments of `experts` and returns the arguments of `LayerFunction`: the call and its `Inputs`.

    Args:
        topk_ids: None if rows are sorted already.
        quantized: the tokens if they are quantized. x is then the tensor that autograd sees.
    """
    recipe = get_recipe(recipe, op)
    gated = is_gated(op, activation)
    check_one_of(op, "keep", keep, KEEP)
    check_bool(op, "interleaved", interleaved)
    up = _linear(op, _UP, w_gate_up, b_gate_up, main_grad_gate_up, recipe.format)
    down = _linear(op, _DOWN, w_down, b_down, main_grad_down, recipe.format)
    if delay_wgrad is not None:
        up, down = _delayed(op, _UP, up, delay_wgrad), _delayed(op, _DOWN, down, delay_wgrad)
    _check(op, x, topk_ids, topk_scores, up, down, gated)
    up, *up_factors = _adapted(op, x, "lora_gate_up", lora_gate_up, up)
    down, *down_factors = _adapted(op, x, "lora_down", lora_down, down)
    e, d, f = down.values.shape
    if quantized is up.quantized is down.quantized is None:
        slots = x.shape[0] if topk_ids is None else topk_ids.numel()
        recipe = recipe.for_layer(slots, d, f, e, gated)
    dtype, needs = autocast_dtype(x), (needs_gradient(x), needs_gradient(topk_scores))
    backward = any(needs) or up.has_gradient or down.has_gradient
    x = cast(x, dtype or x.dtype) if quantized is None else x
    scores = None if topk_scores is None else cast(topk_scores, torch.float32).contiguous()
    weights = up.weight if up.delayed is None else None, down.weight if down.delayed is None else None
    inputs = x, scores, *weights, up.bias, down.bias, *up_factors, *down_factors
    up, down = _of_call(op, _UP, up, backward), _of_call(op, _DOWN, down, backward)
    rounding = common_rounding(recipe.rounding, quantized, *(up.quantized or ()), *(down.quantized or ()))
    options = recipe, rounding, activation, interleaved, keep == "fp8", dtype, e, f, quantized is not None
    call = Call(*options, *needs, up, down, delay_wgrad)
    for name, linear, transposed in ((_UP, up, call.needs_x), (_DOWN, down, call.needs_da)):
        if not transposed or linear.quantized is None or linear.quantized[1] is not None:
            continue
        if not FORMATS[linear.quantized[0].format].has_square_blocks:
            text = "must be the pair of quantize_weight where backward multiplies by it, got its first alone"
            fail(op, f"{name} {text}; {ONE_DIRECTION}")
    if what := _in_bf16(call):
        limit = max_experts(x, call.is_adapted)
        require(e <= limit, f"{op}: w_down must have at most {limit} experts with {what}, got {e}")
    return call, *inputs


def recipe_of_module(
    module: torch.nn.Module, recipe: Recipe, topk_ids: Tensor, w_down: Tensor | Quantized | Pair, gated: bool
) -> Recipe:
    """Returns the recipe of a module's call. In eval mode without gradients, "auto" chooses by forward alone.

    Only a module knows this: a checkpoint may compute forward without gradients first, and with them in backward.

    Args:
        w_down: [E, D, F]. A quantized weight keeps the recipe.
    """
    if not recipe.bf16_where_faster or module.training or torch.is_grad_enabled():
        return recipe
    is_plain = isinstance(w_down, Tensor) and w_down.dtype in INPUT_DTYPES
    if not is_plain or not isinstance(topk_ids, Tensor):  # `experts` refuses ids that are no tensor
        return recipe
    e, d, f = w_down.shape
    return recipe.for_layer(topk_ids.numel(), d, f, e, gated, backward=False)


def _linear(
    op: str, name: str, weight: Tensor | Quantized | Pair, bias: Tensor | None, total: Tensor | None, format: str | None
) -> ExpertLinear:
    """Makes a projection. total: the main_grad of its weight."""
    quantized = given(op, name, weight, format, weight=True)
    weight, quantized = (weight, None) if quantized[0] is None else (None, quantized)
    needs_weight = needs_gradient(weight)
    parameter = main_grad.parameter_of_ddp(weight) if total is not None and needs_weight else None
    return ExpertLinear(weight, bias, quantized, total, parameter, needs_weight, needs_gradient(bias))


def _delayed(op: str, name: str, linear: ExpertLinear, delay_wgrad: DelayedWgrads) -> ExpertLinear:
    """Returns the projection of a weight that autograd does not see."""
    if not isinstance(delay_wgrad, DelayedWgrads):
        fail(op, f"delay_wgrad must be a DelayedWgrads or None, got {type(delay_wgrad).__name__}")
    if torch.compiler.is_compiling():
        fail(op, "delay_wgrad must be None under torch.compile, because a graph has no backward for later, got one")
    if not linear.needs_weight:  # autograd does not see a quantized weight anyway
        return linear
    if linear.main_grad is None and isinstance(linear.weight, DeferredWeight):
        fail(op, f"{name} must be a parameter, or have a main_grad, with delay_wgrad, got one that fully_shard gathers")
    if linear.main_grad is None and not linear.weight.is_leaf:
        fail(op, f"{name} must be a parameter, or have a main_grad, with delay_wgrad, got a result of autograd")
    refuse_tangents_of(op, f"{name} must have no tangent with delay_wgrad", linear.weight)
    return linear._replace(delayed=linear.weight)


def _of_call(op: str, name: str, linear: ExpertLinear, backward: bool) -> ExpertLinear:
    """Returns the projection without the tensors that autograd sees.

    A quantized weight whose gradient goes to main_grad needs one whenever there is a backward.
    """
    is_trained = linear.quantized is not None and linear.main_grad is not None
    if not backward and (linear.delayed is not None or (is_trained and torch.is_grad_enabled())):
        why = f"main_grad belongs to a quantized {name}, which autograd does not see"
        if linear.delayed is not None:
            why = f"autograd does not see a delayed {name} and would run no backward"
        fail(op, f"x or another input must require a gradient, because {why}, got none that does")
    needs_weight = backward if is_trained else linear.needs_weight
    transposed = linear.quantized is None and lies_transposed(linear.weight)
    return linear._replace(weight=None, bias=None, needs_weight=needs_weight, transposed=transposed)


def _in_bf16(call: Call) -> str | None:
    """Names the part of a call that has a product in bfloat16, if any has."""
    if call.is_adapted:
        return "adapters"
    if call.recipe.format is None:
        return 'recipe "bf16"'
    if call.recipe.wgrad_high_precision and (call.up.needs_weight or call.down.needs_weight):
        return "wgrad_high_precision"
    return "biases that need a gradient" if call.up.needs_bias or call.down.needs_bias else None


def _adapted(
    op: str, x: Tensor, name: str, lora: LoRA | tuple[Tensor, Tensor, float] | None, linear: ExpertLinear
) -> tuple[ExpertLinear, Tensor | None, Tensor | None]:
    """Checks the adapter of a projection, if it has one. Returns the projection with it, and the tensors A and B."""
    if lora is None:
        return linear, None, None
    if not isinstance(lora, (tuple, list)):
        fail(op, f"{name} must be a LoRA or a tuple (A, B, scaling), got {type(lora).__name__}")
    if len(lora) not in (3, len(LoRA._fields)):
        fail(op, f"{name} must be a LoRA or a tuple (A, B, scaling), got {len(lora)} values")
    A, B, scaling, dropout = LoRA(*lora)
    check_adapter_numbers(op, f"scaling of {name}", f"dropout of {name}", scaling, dropout)
    check_dense(op, f"A of {name}", A, 2, 3)
    check_dense(op, f"B of {name}", B, 2, 3)
    (e, n, k), rank = linear.values.shape, A.shape[-2]
    if A.shape[-1] != k and rank == k:
        fail(op, f"A of {name} must have size {k} in dimension {A.dim() - 1}, got {A.shape[-1]}; it is [E, r, K]")
    if not 1 <= rank <= MAX_RANK:
        fail(op, f"A of {name} must have a rank from 1 to {MAX_RANK}, got {rank}")
    if B.shape[-2:] == (rank, n) and rank != n:
        fail(op, f"B of {name} must have size {n} in dimension {B.dim() - 2}, got {rank}; it is [E, N, r]")
    _check_like(op, f"A of {name}", A, (e, rank, k)[3 - A.dim() :], x)
    _check_like(op, f"B of {name}", B, (e, n, rank)[3 - B.dim() :], x)
    needs_A, needs_B = needs_gradient(A), needs_gradient(B)
    adapter = Adapter(None, None, scaling, dropout, needs_A, needs_B)
    return linear._replace(adapter=adapter, needs_A=needs_A, needs_B=needs_B), A, B


def _check(
    op: str,
    x: Tensor,
    topk_ids: Tensor | None,
    scores: Tensor | None,
    up: ExpertLinear,
    down: ExpertLinear,
    gated: bool,
) -> None:
    check_dense(op, "x", x, 2)
    if topk_ids is not None:
        check_dense(op, "topk_ids", topk_ids, 2)
    w_up, w_down = up.values, down.values
    check_dense(op, "w_down", w_down, 3)
    (tokens, d), (e, _, f) = x.shape, w_down.shape
    if topk_ids is not None and topk_ids.shape[1] < 1:
        fail(op, "topk_ids must have at least 1 column, got 0")
    if not 1 <= e <= MAX_EXPERTS:
        fail(op, f"w_down must have from 1 to {MAX_EXPERTS} experts, got {e}")
    rows = 2 * f if gated else f
    if f == d != w_down.shape[1] and down.quantized is None:
        got = w_down.shape[1]
        fail(op, f"w_down must have size {d} in dimension 1, got {got}; it is [E, D, F], not [E, F, D]")
    if w_up.shape != (e, rows, d) and w_up.shape == (e, d, rows) and up.quantized is None:
        layouts = "[E, 2 F, D], not [E, D, 2 F]" if gated else "[E, F, D], not [E, D, F]"
        fail(op, f"w_gate_up must have size {d} in dimension 2, got {rows}; it is {layouts}")
    _check_like(op, "x", x, (tokens, d), x)
    if topk_ids is not None:
        slots, meaning = (tokens, topk_ids.shape[1]), ("the rows of x", "the columns of topk_ids")
        _check_like(op, "topk_ids", topk_ids, slots, x, (torch.int32, torch.int64), meaning)
        _check_tensor(op, "topk_scores", scores, slots, x, meaning=meaning)
    elif scores is not None:
        _check_tensor(op, "scores", scores, (tokens, 1), x, meaning=("the rows of x", ""))
    meaning, dtypes = ("the experts of w_down", "", "the columns of x"), (w_up.dtype,)
    _check_tensor(op, "w_gate_up", w_up, (e, rows, d), x, INPUT_DTYPES if up.quantized is None else dtypes, meaning)
    meaning, dtypes = ("", "the columns of x", ""), (w_down.dtype,)
    _check_like(op, "w_down", w_down, (e, d, f), x, INPUT_DTYPES if down.quantized is None else dtypes, meaning)
    for name, linear, width in (("gate_up", up, rows), ("down", down, d)):
        if linear.bias is not None:
            _check_tensor(op, f"b_{name}", linear.bias, (e, width), x)
        if linear.main_grad is not None:
            check_main_grad(op, f"main_grad_{name}", linear.main_grad, f"w_{name}", linear.values)


def _check_tensor(op: str, name: str, t: object, shape: tuple[int, ...], *like: object, **options: object) -> None:
    """Checks that t is a dense tensor, and then what `_check_like` checks."""
    check_dense(op, name, t, len(shape))
    _check_like(op, name, t, shape, *like, **options)


def _check_like(
    op: str,
    name: str,
    t: Tensor,
    shape: tuple[int, ...],
    x: Tensor,
    dtypes: tuple[torch.dtype, ...] = INPUT_DTYPES,
    meaning: tuple[str, ...] = (),
) -> None:
    """Checks a dense tensor of len(shape) dimensions.

    meaning: where each size comes from, or "". The error names it, because the other argument may be the wrong one.
    """
    if type(t) not in _PLAIN and is_dtensor(t):
        text = f"{name} must be a tensor of the rank, got a DTensor"
        fail(op, f"{text}; pass its to_local(), or use Experts, whose parameters may be DTensors")
    if t.dtype not in dtypes:
        fail(op, f"{name} must be {either([dtype_name(dtype) for dtype in dtypes])}, got {t.dtype}")
    if t.device != x.device:
        hint = "" if x.device.type != t.device.type else "; give every GPU its own process if this is DataParallel"
        fail(op, f"{name} must be on the device of x, {x.device}, got {t.device}{hint}")
    if t.shape != shape:
        dim, size, got = next((d, n, m) for d, (n, m) in enumerate(zip(shape, t.shape, strict=True)) if n != m)
        of = f" ({meaning[dim]})" if meaning and meaning[dim] else ""
        fail(op, f"{name} must have size {size} in dimension {dim}{of}, got {got}")
