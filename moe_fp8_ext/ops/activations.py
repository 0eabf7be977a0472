"""Activation functions of experts, their gradients, and both fused with quantization."""

import torch
from torch import Tensor

from moe_fp8_ext import _C
from moe_fp8_ext.ops.checks import (
    FP8_DTYPES,
    INPUT_DTYPES,
    check_amax,
    check_both_or_none,
    check_dtype,
    check_format,
    check_groups,
    check_number,
    check_one_of,
    check_optional_indices,
    check_scale,
    check_shape,
    check_size,
    fp8_dtype,
    require,
)
from moe_fp8_ext.ops.dispatch import differentiable_once, fake, register_gradient, unit_stride
from moe_fp8_ext.quantization.format import padded_extent

_activate = torch.ops.moe_fp8.activate.default
_quantize_activated = torch.ops.moe_fp8.quantize_activated.default
_add_bias = torch.ops.moe_fp8.add_bias.default
_sum_groups = torch.ops.moe_fp8.sum_groups.default
_activate_backward = torch.ops.moe_fp8.activate_backward.default
_quantize_activated_backward = torch.ops.moe_fp8.quantize_activated_backward.default
_quantize_activated_backward_rows = torch.ops.moe_fp8.quantize_activated_backward_rows.default
_GATED = {rule["name"]: rule["gated"] for rule in _C.TABLES["activations"]}
_CLAMPED = "clamped_swiglu("
_MAX_FLOAT32 = torch.finfo(torch.float32).max
_ROWS_OF_PARTIAL_SUM = 64  # kRowsOfPartial of csrc/activations/backward/sum_groups.h


def clamped_swiglu(limit: float, alpha: float = 1.0, offset: float = 0.0) -> str:
    """Returns the name of a clamped SwiGLU, for the argument `activation` of layers and ops.

        a = g * sigmoid(alpha * g) * (u + offset),    g = min(gate, limit),    u = clamp(up, -limit, limit)

    DeepSeek-V4's experts have alpha 1 and offset 0. With the constants of GPT-OSS the name is "swiglu_oai". Ops round
    the numbers to float32.

    Args:
        limit: positive.
        alpha, offset: any finite numbers.

    Raises:
        TypeError, RuntimeError: a number is not as above.

    Source: DESIGN.md section 3; the gates of GPT-OSS and DeepSeek-V4.
    """
    if not torch.compiler.is_compiling():  # numbers may be symbolic
        for name, value in dict(limit=limit, alpha=alpha, offset=offset).items():
            check_number("clamped_swiglu", name, value)
            require(abs(value) <= _MAX_FLOAT32, f"clamped_swiglu: {name} must be finite in float32, got {value}")
        require(limit > 0, f"clamped_swiglu: limit must be positive, got {limit}")
    if (limit, alpha, offset) == (7, 1.702, 1):
        return "swiglu_oai"
    return f"{_CLAMPED}{float(limit)}, {float(alpha)}, {float(offset)})"


def is_gated(op: str, activation: str) -> bool:
    """Checks an activation, and returns whether the columns of h are gates and ups."""
    if isinstance(activation, str) and _is_clamped(activation):
        return True
    check_one_of(op, "activation", activation, list(_GATED))
    return _GATED[activation]


def _is_clamped(activation: str) -> bool:
    """Whether `clamped_swiglu` can have returned this name."""
    if not (activation.startswith(_CLAMPED) and activation.endswith(")")):
        return False
    numbers = activation[len(_CLAMPED) : -1].split(",")
    try:
        return len(numbers) == 3 and all(abs(float(n)) <= _MAX_FLOAT32 for n in numbers) and float(numbers[0]) > 0
    except ValueError:
        return False


def activate(h: Tensor, activation: str, *, interleaved: bool = False) -> Tensor:
    """Applies the activation function between an expert's two products, in float32, and rounds the result once.

        "swiglu"      a = silu(gate) * up
        "geglu"       a = gelu(gate) * up
        "swiglu_oai"  a = g * sigmoid(1.702 * g) * (u + 1), g = min(gate, 7), u = clamp(up, -7, 7), as in GPT-OSS
        `clamped_swiglu(limit, alpha, offset)`      the same with other constants
        "silu"        a = silu(h)
        "gelu"        a = gelu(h)
        "relu2"       a = max(h, 0)^2

    gelu is the tanh approximation. A gate (or an h without gates) of NaN or -inf gives NaN, as in PyTorch; relu2 of
    -inf is 0. Every NaN of the result is the quiet NaN without a sign. The op is differentiable in h, once.

    Args:
        h: [P, 2F] of gates and ups for the first four activations, [P, F] for the others. bfloat16, float16 or
            float32; stride 1 along a row, any row stride.
        activation: one of the names above.
        interleaved: True: the even columns of h are gates and the odd ones ups. False: the first half of the columns
            are gates and the second half ups. Activations without gates ignore this.

    Returns:
        a [P, F] of h's dtype, contiguous.

    Source: DESIGN.md section 3, bit by bit.
    """
    return _activate(h, activation, interleaved)


def add_bias(x: Tensor, bias: Tensor, offs: Tensor) -> Tensor:
    """Adds the bias of its group to every row.

        out[p] = x[p] + bias[e]        offs[e-1] <= p < offs[e]

    Rows behind the last group get no bias. Sums are computed in float32 and rounded once. Every NaN of the result is
    the quiet NaN without a sign. The op has no derivative.

    Args:
        x: [P, N] bfloat16, float16 or float32; stride 1 along a row, any row stride.
        bias: [E, N] of x's dtype, contiguous, on the same device.
        offs: [E] int32, the exclusive end row of each group.

    Returns:
        out [P, N] of x's dtype, contiguous.
    """
    return _add_bias(x, bias, offs)


def sum_groups(
    x: Tensor,
    offs: Tensor,
    *,
    scores: Tensor | None = None,
    indices: Tensor | None = None,
    top_k: int | None = None,
) -> Tensor:
    """Sums the rows of each group, which is the gradient of a bias that `add_bias` adds.

        out[e] = the sum of scores[p] * x[p]        offs[e-1] <= p < offs[e]

    With indices, row p is `scores[i] * x[i // top_k]`, where i is `indices[p]`. It is zero if i is no slot.

    Products are rounded to float32. Sums are in float32, in one order on every device: see DESIGN.md, section 3. Every
    NaN of the result is the quiet NaN without a sign. The op has no derivative.

    Args:
        x: [P, N], or [M, N] with indices; bfloat16, float16 or float32; stride 1 along a row, any row stride.
        offs: [E] int32, the exclusive end row of each group.
        scores: float32 on x's device, stride 1: [P], or [M * top_k] with indices. None: all scores are 1.
        indices: [P] int32 on x's device: slots, as in the permutation of `sort_tokens`.
        top_k: slots per row of x, given with indices and only then.

    Returns:
        out [E, N] float32, contiguous: zeros for an empty group.

    Source: DESIGN.md section 3, bit by bit.
    """
    return _sum_groups(x, offs, scores, indices, top_k)


def quantize_activated(
    h: Tensor,
    activation: str,
    format: str,
    *,
    bias: Tensor | None = None,
    offs: Tensor | None = None,
    interleaved: bool = False,
    keep_h: bool = True,
    dtype: torch.dtype | None = None,
    rounding: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantizes the activations along rows for the next product, and h along rows for backward.

        q, scale = quantize_rows(activate(h, activation), format, offs=offs)
        h_q, h_scale = quantize_rows(h, format)

    With bias, h stands for `add_bias(h, bias, offs)` in both.

    The results have the bytes of these two calls. On a GPU one kernel reads h once and never writes the activations to
    memory, if all of these hold:

    - h is bfloat16 and its rows begin at multiples of 16 bytes;
    - the GPU casts to `dtype` in hardware;
    - F is a multiple of 8 and, in "rowwise", at most 8192;
    - no scaling block of an MX format has both gates and ups: F is a multiple of 32, or they alternate.

    Args:
        h, activation, interleaved: as in `activate`.
        bias: as in `add_bias`, of h's dtype, with as many columns as h. It needs offs.
        format, dtype, rounding: as in `quantize_rows`.
        offs: as in `quantize_rows`, for the rows of h. With offs, "mxfp8" scales of the activations are blocked group
            by group. Scales of h are always blocked as one matrix.
        keep_h: whether to quantize h. False: h_q and h_scale have no rows.

    Returns:
        q [P, F] and its scale; h_q, shaped as h ([0, 2F] or [0, F] without keep_h), and its scale. All have the dtypes
        and layouts that `quantize_rows` returns.

    Source: DESIGN.md section 3.
    """
    return _quantize_activated(h, activation, format, bias, offs, interleaved, keep_h, dtype, rounding)


def activate_backward(
    grad: Tensor,
    h: Tensor,
    activation: str,
    *,
    scores: Tensor | None = None,
    h_scale: Tensor | None = None,
    format: str | None = None,
    indices: Tensor | None = None,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes a = scores * activate(h), which is an operand of the next wgrad, and the gradients of a.

        a              = scores * activate(h)
        grad_h         = the gradient of h, if grad is the gradient of a
        grad_scores[p] = grad[p] . activate(h)[p]

    With indices, scores belong to slots: row p has the score scores[indices[p]], or 0 where indices[p] is no slot. Then
    grad_scores[indices[p]] is the gradient of that score, and a slot without a row gets 0.

    The op reads h and grad once and computes in float32. It rounds grad_h and a once. grad_scores is summed in an order
    that depends on the device and on nothing else.

    Args:
        grad: [P, F] on h's device, of h's dtype; with h_scale bfloat16, float16 or float32. Stride 1 along a row, any
            row stride.
        h: as in `activate`. With h_scale: an fp8 operand along rows, as `quantize_rows` returns it without offs, which
            stands for q * h_scale in float32.
        activation: as in `activate`.
        scores: [P] float32 on h's device, stride 1; [S], one per slot, with indices. None: all scores are 1.
        h_scale: scales of h: float32, or float8_e8m0fnu for the MX formats. Any strides in format "blockwise",
            contiguous in the others. None: h is not quantized.
        format: format of h, given with h_scale and only then: "rowwise", "blockwise", "mxfp8" (scales blocked as one
            matrix) or "mxfp8_rowmajor".
        indices: [P] int32 on h's device, given only with scores: the slot of each row, as in the permutation of
            `sort_tokens`. If several rows have the same slot, one of them determines its gradient. With
            MOE_FP8_VALIDATE=1 the op raises for such rows, and for an index that is neither a slot nor -1.
        interleaved: as in `activate`; grad_h has the layout of h.

    Returns:
        grad_h, shaped as h, and a [P, F], both of grad's dtype; grad_scores float32, shaped as scores ([P] without
        scores). All contiguous.

    Source: DESIGN.md section 3, bit by bit.
    """
    return _activate_backward(grad, h, activation, scores, h_scale, format, indices, interleaved)


def quantize_activated_backward(
    grad: Tensor,
    h: Tensor,
    activation: str,
    format: str,
    *,
    offs: Tensor,
    scores: Tensor | None = None,
    h_scale: Tensor | None = None,
    indices: Tensor | None = None,
    interleaved: bool = False,
    align: int | None = None,
    dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
    rounding: str | None = None,
    amax: str = "group",
    sum_grad_h: bool = False,
) -> tuple[Tensor, ...]:
    """Computes all operands that backward needs between the two products of experts, already quantized.

        grad_h, a, grad_scores = activate_backward(grad, h, activation, scores=scores, ...)
        q, scale, q_t, scale_t, padded_offs = quantize_both(grad_h, format, offs=offs, dtype=grad_dtype, ...)
        a_q_t, a_scale_t, _ = quantize_tokens(a, format, offs=offs, amax=amax, ...)
        grad_bias = sum_groups(grad_h, offs)

    The results have the bytes of these calls. On a GPU fused kernels never write grad_h and a to memory. They
    read h and grad once in formats with blocks, twice in "rowwise". The fused kernels need all of these; otherwise the
    op takes the steps one by one:

    - h is quantized to the E4M3 dtype of the GPU, and its rows begin at multiples of 8 bytes, of 16 if interleaved;
    - grad is bfloat16 and its rows begin at multiples of 16 bytes;
    - the GPU casts to `dtype` and `grad_dtype` in hardware, and `dtype` is E4M3;
    - `align` pads groups to multiples of 16, and `amax` is not "batch";
    - F is a multiple of 8;
    - "rowwise": F is at most 2048 or, on GPUs with thread block clusters (Hopper, Blackwell), 16384;
    - formats with blocks: a multiprocessor has 227 KB of shared memory, as in H200 and B200. If the halves of h are
      gates and ups, F is a multiple of 128, so that no scaling block has both.

    Args:
        grad, h, activation, scores, indices, interleaved: as in `activate_backward`.
        h_scale: as in `activate_backward`; the format of h is `format`.
        format, align, rounding: as in `quantize_both`.
        offs: as in `quantize_both`, for the rows of h.
        dtype: FP8 dtype of a_q_t, as in `quantize_tokens`.
        grad_dtype: FP8 dtype of q and q_t; None: `dtype`.
        amax: granularity of the scales of a, as in `quantize_tokens`.
        sum_grad_h: whether to sum grad_h by groups. False: grad_bias has no groups.

    Returns:
        q, shaped as h, its scale, q_t, scale_t, a_q_t, a_scale_t, padded_offs: as `quantize_both` of grad_h and
        `quantize_tokens` of a return them; both have the same padded_offs. Then grad_scores, as of `activate_backward`.
        Then grad_bias float32 [E, 2F] or [E, F], with as many columns as h: the gradient of a bias of h.

    Raises:
        RuntimeError: as `activate_backward` and `quantize_both` do.

    Source: `activate_backward`, `quantize_both` and `quantize_tokens`.
    """
    options = scores, h_scale, indices, interleaved, align, dtype, grad_dtype, rounding, amax, sum_grad_h
    return _quantize_activated_backward(grad, h, activation, format, offs, *options)


def quantize_activated_backward_rows(
    grad: Tensor,
    h: Tensor,
    activation: str,
    format: str,
    *,
    offs: Tensor,
    scores: Tensor | None = None,
    h_scale: Tensor | None = None,
    indices: Tensor | None = None,
    interleaved: bool = False,
    keep_grad_h: bool = False,
    keep_a: bool = False,
    dtype: torch.dtype | None = None,
    rounding: str | None = None,
) -> tuple[Tensor, ...]:
    """Computes the operands that backward needs between the two products of experts with frozen weights.

        grad_h, a, grad_scores = activate_backward(grad, h, activation, scores=scores, ...)
        q, scale = quantize_rows(grad_h, format, offs=offs, dtype=dtype, rounding=rounding)

    The results have the bytes of these two calls. On a GPU one pass reads h and grad, under the conditions of
    `quantize_activated_backward`. The conditions on `align`, `amax` and shared memory do not apply.

    Args:
        grad, h, activation, scores, indices, interleaved: as in `activate_backward`.
        h_scale: as in `activate_backward`; the format of h is `format`.
        format, dtype, rounding: as in `quantize_rows`.
        offs: as in `quantize_rows`, for the rows of h.
        keep_grad_h, keep_a: whether to return grad_h, or a, in grad's dtype: adapters take them. False: it has no rows.

    Returns:
        q, shaped as h, and its scale; grad_h, shaped as h, or [0, 2F] or [0, F] unless kept; a [P, F], or [0, F] unless
        kept; grad_scores, as of `activate_backward`.
    """
    options = scores, h_scale, indices, interleaved, keep_grad_h, keep_a, dtype, rounding
    return _quantize_activated_backward_rows(grad, h, activation, format, offs, *options)


def _save(ctx, inputs, output):
    h, ctx.activation, *interleaved = inputs
    ctx.interleaved = bool(interleaved and interleaved[0])
    ctx.save_for_backward(h)


@differentiable_once
def _backward(ctx, grad):
    (h,) = ctx.saved_tensors
    return _activate_backward(unit_stride(grad), h, ctx.activation, None, None, None, None, ctx.interleaved)[:1]


register_gradient(_activate, _save, _backward)


def _features(op: str, h: Tensor, activation: str) -> int:
    """F, the number of columns of a; checks the activation and the columns of h."""
    columns = h.shape[1]
    if not is_gated(op, activation):
        return columns
    text = f"{op}: h must have an even number of columns with activation '{activation}', got {columns}"
    require(columns % 2 == 0, text)
    return columns // 2


@fake(_activate)
def _(op, h, activation, interleaved):
    return h.new_empty((h.shape[0], _features(op, h, activation)))


def _check_bias(op: str, bias: Tensor, like: str, x: Tensor, offs: Tensor) -> None:
    require(bias.dtype == x.dtype, f"{op}: bias must be, like {like}, {x.dtype}, got {bias.dtype}")
    check_shape(op, "bias", bias, (offs.shape[0], x.shape[1]))


@fake(_add_bias)
def _(op, x, bias, offs):
    _check_bias(op, bias, "x", x, offs)
    return x.new_empty(x.shape)


@fake(_sum_groups)
def _(op, x, offs, scores, indices, top_k):
    check_optional_indices(op, x.shape[0], indices, top_k)
    if scores is not None:
        check_shape(op, "scores", scores, (x.shape[0] if top_k is None else x.shape[0] * top_k,))
    rows = x.shape[0] if indices is None else indices.shape[0]
    check_size(op, "x", padded_extent(rows, offs.shape[0], _ROWS_OF_PARTIAL_SUM), "rows with padding")
    return x.new_empty((offs.shape[0], x.shape[1]), dtype=torch.float32)


@fake(_quantize_activated)
def _(op, h, activation, format, bias, offs, interleaved, keep_h, dtype, rounding):
    rows, columns = h.shape
    shape = rows, _features(op, h, activation)
    format = check_format(op, format, rounding)
    groups = None
    if offs is not None and format.order == "blocked":
        groups = offs.shape[0]
        check_groups(op, groups, "h", rows, format, None)
    if bias is not None:
        require(offs is not None, f"{op}: offs must be given with bias, got None")
        _check_bias(op, bias, "h", h, offs)
    dtype, h_q_shape = fp8_dtype(op, dtype, h), (rows if keep_h else 0, columns)
    return *format.empty_rows(h, shape, dtype, groups), *format.empty_rows(h, h_q_shape, dtype)


def _check_gradients(
    op, grad, h, activation, scores, h_scale, format, indices, interleaved
) -> tuple[tuple[int, int], Tensor]:
    """Checks the arguments that all gradient ops take, with the format of h if h_scale is given.

    Returns the shape of a and an empty grad_scores.
    """
    check_dtype(op, "h", h.dtype, *(INPUT_DTYPES if h_scale is None else FP8_DTYPES))
    require(h_scale is not None or grad.dtype == h.dtype, f"{op}: grad must be, like h, {h.dtype}, got {grad.dtype}")
    shape = h.shape[0], _features(op, h, activation)
    check_shape(op, "grad", grad, shape)
    if scores is not None and indices is None:
        check_shape(op, "scores", scores, shape[:1])
    if indices is not None:
        require(scores is not None, f"{op}: scores must be given with indices, got None")
        check_shape(op, "indices", indices, shape[:1])
    if h_scale is not None:
        format = check_format(op, format)
        check_scale(op, "h_scale", h_scale, format, format.scale_of_rows(h.shape).shape)
    slots = shape[:1] if indices is None else scores.shape
    return shape, h.new_empty(slots, dtype=torch.float32)


@fake(_activate_backward)
def _(op, grad, h, h_scale, format, **others):
    check_both_or_none(op, h_scale=h_scale, format=format)
    shape, grad_scores = _check_gradients(op, grad, h, h_scale=h_scale, format=format, **others)
    return grad.new_empty(h.shape), grad.new_empty(shape), grad_scores


@fake(_quantize_activated_backward)
def _(op, h, format, offs, align, dtype, grad_dtype, rounding, amax, sum_grad_h, **others):
    (rows, features), grad_scores = _check_gradients(op, h=h, format=format, **others)
    format = check_format(op, format, rounding)
    check_amax(op, format, amax)
    e = offs.shape[0]
    align = check_groups(op, e, "h", rows, format, align)
    dtype = fp8_dtype(op, dtype, h)
    grad_dtype = dtype if grad_dtype is None else fp8_dtype(op, grad_dtype, h, "grad_dtype")
    outputs = format.empty_rows(h, h.shape, grad_dtype, e)
    outputs += format.empty_tokens(h, rows, h.shape[1], grad_dtype, e, align)
    outputs += format.empty_tokens(h, rows, features, dtype, e, align, amax)
    grad_bias = h.new_empty((e if sum_grad_h else 0, h.shape[1]), dtype=torch.float32)
    return *outputs, h.new_empty((e,), dtype=torch.int32), grad_scores, grad_bias


@fake(_quantize_activated_backward_rows)
def _(op, grad, h, format, offs, keep_grad_h, keep_a, dtype, rounding, **others):
    (rows, features), grad_scores = _check_gradients(op, grad, h, format=format, **others)
    format = check_format(op, format, rounding)
    dtype, e = fp8_dtype(op, dtype, h), offs.shape[0]
    if format.order == "blocked":
        check_groups(op, e, "h", rows, format, None)
    grad_h = grad.new_empty((rows if keep_grad_h else 0, h.shape[1]))
    a = grad.new_empty((rows if keep_a else 0, features))
    return *format.empty_rows(h, h.shape, dtype, e), grad_h, a, grad_scores
