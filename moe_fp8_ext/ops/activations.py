import torch
from torch import Tensor

from moe_fp8_ext import _C
from moe_fp8_ext.ops.checks import (
    FP8_DTYPES,
    INPUT_DTYPES,
    check,
    check_amax,
    check_format,
    check_groups,
    check_one_of,
    check_rounding,
    check_scale,
    check_shape,
    dtype_name,
    either,
    fp8_dtype,
    require,
)
from moe_fp8_ext.ops.dispatch import differentiable_once, refuse_derivatives, register_gradient, unit_stride
from moe_fp8_ext.quantization.format import Format, padded_extent

_activate = torch.ops.moe_fp8.activate.default
_quantize_activated = torch.ops.moe_fp8.quantize_activated.default
_activate_backward = torch.ops.moe_fp8.activate_backward.default
_quantize_activated_backward = torch.ops.moe_fp8.quantize_activated_backward.default
# Whether gates and ups are the columns of h.
GATED = {rule["name"]: rule["gated"] for rule in _C.activations()}


def activate(h: Tensor, activation: str, *, interleaved: bool = False) -> Tensor:
    """The activation of experts between their two products, in float32, rounded once.

        "swiglu"      silu(gate) * up
        "geglu"       gelu(gate) * up
        "swiglu_oai"  gate * sigmoid(1.702 * gate) * (up + 1), gate at most 7, up clamped into [-7, 7], as in GPT-OSS
        "silu", "gelu", "relu2"  silu(h), gelu(h), max(h, 0)^2

    gelu is the one by tanh. Where a gate is NaN or -inf the result is NaN, as PyTorch's is; every NaN is the quiet one
    without a sign. Differentiable in h, once. Never waits for the device.

    Args:
        h: [P, 2F] of gates and ups for the first three, else [P, F]; bfloat16, float16 or float32; stride 1 along its
            rows, row stride free.
        activation: one of the names above.
        interleaved: gates are the even columns of h and ups the odd ones, in place of its first and its second half.
            Without gates it changes nothing.

    Returns:
        a [P, F] of h's dtype, contiguous.

    Raises:
        RuntimeError: activation, dtype, dimensions, sizes or strides are not as above; the text names the argument.

    Source: DESIGN.md section 3, bit by bit.
    """
    return _activate(h, activation, interleaved)


def quantize_activated(
    h: Tensor,
    activation: str,
    format: str,
    *,
    offs: Tensor | None = None,
    interleaved: bool = False,
    keep_h: bool = True,
    dtype: torch.dtype | None = None,
    rounding: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The operand of the product behind an activation, and h as backward keeps it.

        q, scale = quantize_rows(activate(h, activation), format, offs=offs)
        h_q, h_scale = quantize_rows(h, format)

    byte for byte. Of bfloat16 on a GPU, in a dtype that the GPU casts to, from one read of h: activations are never
    written. That is so for rows that begin at multiples of 16 bytes and have a multiple of 8 features, at most 8192
    ("rowwise"), or of 128 (formats with blocks). Not differentiable. Never waits for the device.

    Args:
        h, activation, interleaved: as in `activate`.
        format, dtype, rounding: as in `quantize_rows`.
        offs: likewise, of the rows of h; scales of "mxfp8" are then blocked group by group, those of h as one matrix.
        keep_h: whether h is quantized, of which no rows are otherwise.

    Returns:
        q [P, F] and its scale, h_q as h, or [0, 2F] or [0, F], and its scale: as `quantize_rows` returns them.

    Raises:
        RuntimeError: as `activate` and `quantize_rows` do, or h asks for a derivative, which this has none of; the
            text names the argument.

    Source: DESIGN.md section 3.
    """
    return _quantize_activated(h, activation, format, offs, interleaved, keep_h, dtype, rounding)


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
    """The gradients of scores * activate(h), and that product itself, which the next product's wgrad takes.

        grad_h = the gradient of h where that of scores * activate(h) is grad
        a = scores * activate(h);  grad_scores[p] = grad[p] . activate(h)[p]

    With indices scores are those of slots: row p has scores[indices[p]], or 0 where its index is no slot, and
    grad_scores[indices[p]] is its gradient, 0 of a slot without a row. From one read of h and grad. In float32; grad_h
    and a are rounded once, grad_scores is summed in an order that depends on the device and on nothing else. Not
    differentiable. Never waits for the device.

    Args:
        grad: [P, F] of h's dtype, with h_scale bfloat16, float16 or float32, on the same device; stride 1 along its
            rows, row stride free.
        h: as in `activate`; or, with h_scale, an fp8 operand along rows, as `quantize_rows` returns it without offs,
            which stands for q * h_scale in float32.
        activation: as in `activate`.
        scores: [P] float32 on h's device, of stride 1, with indices [S]; None: ones.
        h_scale: the scales of h: float32, or float8_e8m0fnu of the MX formats; of any strides in format "blockwise",
            contiguous in the others.
        format: "rowwise", "blockwise", "mxfp8" (blocked as one matrix) or "mxfp8_rowmajor"; with h_scale alone.
        indices: [P] int32 on h's device: the slots of the rows, as `sort_tokens` permutes them, with scores alone. Of
            rows with the same slot one tells its gradient; MOE_FP8_VALIDATE=1 refuses them, and indices out of range
            but -1.
        interleaved: as in `activate`; grad_h lies as h does.

    Returns:
        grad_h, shaped as h, and a [P, F], both of grad's dtype; grad_scores float32, as many as scores. All contiguous.

    Raises:
        RuntimeError: activation, format, dtype, dimensions, sizes, strides or device are not as above, or an argument
            asks for a derivative, which this has none of; the text names the argument.

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
) -> tuple[Tensor, ...]:
    """All that backward takes between the two products of experts, as operands of the next ones.

        grad_h, a, grad_scores = activate_backward(grad, h, activation, scores=scores, ...)
        q, scale, q_t, scale_t, padded_offs = quantize_both(grad_h, format, offs=offs, dtype=grad_dtype, ...)
        a_q_t, a_scale_t, _ = quantize_tokens(a, format, offs=offs, amax=amax, ...)

    byte for byte. On a GPU gradients are never written: in formats with blocks they come from one read of h and grad,
    in "rowwise" from two. That is so for an h in E4M3 and a grad in bfloat16, whose rows begin at multiples of 8 bytes,
    16 where interleaved, and of 16; dtypes that the GPU casts to, of a E4M3; groups that `align` pads to multiples of
    16. With blocks features are a multiple of 128, and the GPU has 227 KB of shared memory a multiprocessor, as H200
    and B200 do; else they are a multiple of 8, at most 2048. Not differentiable. Never waits for the device.

    Args:
        grad, h, activation, scores, indices, interleaved: as in `activate_backward`.
        h_scale: likewise, of the same format as the results.
        format, align, rounding: as in `quantize_both`.
        offs: likewise, of the rows of h.
        dtype: of a, as in `quantize_tokens`.
        grad_dtype: of grad_h; None is `dtype`.
        amax: of a, as in `quantize_tokens`.

    Returns:
        q as h, its scale, q_t, scale_t, a_q_t, a_scale_t, padded_offs: as `quantize_both` of grad_h and
        `quantize_tokens` of a return them, which have the same padded_offs; grad_scores as `activate_backward` does.

    Raises:
        RuntimeError: as of `activate_backward` and `quantize_both`; the text names the argument.

    Source: `activate_backward`, `quantize_both` and `quantize_tokens`.
    """
    how = scores, h_scale, indices, interleaved, align, dtype, grad_dtype, rounding, amax
    return _quantize_activated_backward(grad, h, activation, format, offs, *how)


def _save(ctx, inputs, output):
    h, ctx.activation, *interleaved = inputs
    ctx.interleaved = bool(interleaved and interleaved[0])
    ctx.save_for_backward(h)


@differentiable_once
def _backward(ctx, grad):
    (h,) = ctx.saved_tensors
    return _activate_backward(unit_stride(grad), h, ctx.activation, None, None, None, None, ctx.interleaved)[:1]


register_gradient(_activate, _save, _backward)
refuse_derivatives(_quantize_activated)
refuse_derivatives(_activate_backward)
refuse_derivatives(_quantize_activated_backward)


def _features(op: str, h: Tensor, activation: str) -> int:
    check_one_of(op, "activation", activation, list(GATED))
    columns = h.shape[1]
    if not GATED[activation]:
        return columns
    text = f"{op}: h must have an even number of columns with activation '{activation}', got {columns}"
    require(columns % 2 == 0, text)
    return columns // 2


@torch.library.register_fake("moe_fp8::activate")
def _(h, activation, interleaved=False):
    check("activate", "h", h)
    return h.new_empty((h.shape[0], _features("activate", h, activation)))


@torch.library.register_fake("moe_fp8::quantize_activated")
def _(h, activation, format, offs=None, interleaved=False, keep_h=True, dtype=None, rounding=None):
    op = "quantize_activated"
    check(op, "h", h)
    rows, columns = h.shape
    shape = rows, _features(op, h, activation)
    format = check_format(op, format)
    check_rounding(op, format, rounding)
    groups = None
    if offs is not None:
        check(op, "offs", offs, h)
        if format.order == "blocked":
            groups = offs.shape[0]
            check_groups(op, groups, "h", rows, format, None)
    dtype = fp8_dtype(op, dtype, h)
    kept = rows if keep_h else 0, columns
    return (
        h.new_empty(shape, dtype=dtype),
        format.scale_of_rows(shape, groups).empty(h, format.scale_dtype),
        h.new_empty(kept, dtype=dtype),
        format.scale_of_rows(kept).empty(h, format.scale_dtype),
    )


def _check_gradients(
    op: str,
    grad: Tensor,
    h: Tensor,
    activation: str,
    scores: Tensor | None,
    h_scale: Tensor | None,
    indices: Tensor | None,
) -> tuple[tuple[int, int], Tensor]:
    """The shape of a, and grad_scores."""
    dtypes = INPUT_DTYPES if h_scale is None else FP8_DTYPES
    got = getattr(h, "dtype", None)  # of None, which check() refuses
    require(got is None or got in dtypes, f"{op}: h must be {either(map(dtype_name, dtypes))}, got {got}")
    check(op, "h", h)
    check(op, "grad", grad, h)
    require(h_scale is not None or grad.dtype == h.dtype, f"{op}: grad must be, like h, {h.dtype}, got {grad.dtype}")
    shape = h.shape[0], _features(op, h, activation)
    check_shape(op, "grad", grad, shape)
    if scores is not None:
        check(op, "scores", scores, h)
        if indices is None:
            check_shape(op, "scores", scores, shape[:1])
    if indices is not None:
        require(scores is not None, f"{op}: scores must be given with indices, got None")
        check(op, "indices", indices, h)
        check_shape(op, "indices", indices, shape[:1])
    if h_scale is not None:
        check(op, "h_scale", h_scale, h)
    slots = shape[:1] if indices is None else scores.shape
    return shape, h.new_empty(slots, dtype=torch.float32)


def _check_h_scale(op: str, h: Tensor, h_scale: Tensor, format: Format) -> None:
    check_scale(op, "h_scale", h_scale, format, format.scale_of_rows(h.shape).shape)


@torch.library.register_fake("moe_fp8::activate_backward")
def _(grad, h, activation, scores=None, h_scale=None, format=None, indices=None, interleaved=False):
    op = "activate_backward"
    shape, grad_scores = _check_gradients(op, grad, h, activation, scores, h_scale, indices)
    if h_scale is None:
        require(format is None, f"{op}: h_scale must be given with format, got None")
    else:
        require(format is not None, f"{op}: format must be given with h_scale, got None")
        _check_h_scale(op, h, h_scale, check_format(op, format))
    return grad.new_empty(h.shape), grad.new_empty(shape), grad_scores


@torch.library.register_fake("moe_fp8::quantize_activated_backward")
def _(
    grad,
    h,
    activation,
    format,
    offs,
    scores=None,
    h_scale=None,
    indices=None,
    interleaved=False,
    align=None,
    dtype=None,
    grad_dtype=None,
    rounding=None,
    amax="group",
):
    op = "quantize_activated_backward"
    (rows, features), grad_scores = _check_gradients(op, grad, h, activation, scores, h_scale, indices)
    format = check_format(op, format)
    if h_scale is not None:
        _check_h_scale(op, h, h_scale, format)
    check_rounding(op, format, rounding)
    check_amax(op, format, amax)
    check(op, "offs", offs, h)
    e = offs.shape[0]
    align = check_groups(op, e, "h", rows, format, align)
    dtype = fp8_dtype(op, dtype, h)
    grad_dtype = dtype if grad_dtype is None else fp8_dtype(op, grad_dtype, h, "grad_dtype")
    positions, blocks = padded_extent(rows, e, align), format.token_blocks(rows, e, align)

    def along_tokens(columns, dtype, amax="group"):
        scale_t = format.scale_of_tokens(columns, blocks, e, amax).empty(h, format.scale_dtype)
        return h.new_empty((columns, positions), dtype=dtype), scale_t

    scale = format.scale_of_rows(h.shape, e).empty(h, format.scale_dtype)
    of_grad = h.new_empty(h.shape, dtype=grad_dtype), scale, *along_tokens(h.shape[1], grad_dtype)
    return *of_grad, *along_tokens(features, dtype, amax), h.new_empty((e,), dtype=torch.int32), grad_scores
