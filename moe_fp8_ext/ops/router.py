"""A router's choice of experts, and the gradient of their scores."""

import torch
from torch import Tensor

from moe_fp8_ext.ops.checks import check, check_int, check_one_of, check_shape, require
from moe_fp8_ext.ops.dispatch import differentiable_once, refuse_derivatives, register_gradient, unit_stride
from moe_fp8_ext.quantization.format import MAX_EXPERTS

SCORINGS = ("softmax", "sigmoid")

_choose = torch.ops.moe_fp8.choose_experts.default
_choose_backward = torch.ops.moe_fp8.choose_experts_backward.default


def choose_experts(
    logits: Tensor,
    top_k: int,
    bias: Tensor | None = None,
    scoring: str = "softmax",
    normalize: bool = True,
    scaling_factor: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """The experts of the largest scores, token by token, and these scores.

        s = scoring(logits);  topk_ids = the top_k of s + bias;  topk_scores = s of those

    divided by their sum + 1e-20 if normalize, times scaling_factor. Of equal ones the smaller id comes first. NaN
    counts as the largest, so a token with one shows it: in all of its scores, but for those of "sigmoid" without
    normalize. topk_scores are differentiable in logits, once; bias has no gradient. Never waits for the device; the
    same bytes on every one.

    Args:
        logits: [T, E] float32, E at most 1024; stride 1 along E, row stride free.
        top_k: experts a token.
        bias: [E] float32 on the same device, which moves the choice and no score; None: zero.
        scoring: "softmax" over the experts or "sigmoid" of each.
        normalize: whether scores of a token add up to scaling_factor.
        scaling_factor: of the scores.
        num_groups, top_groups: experts are num_groups groups of neighbours, of which a token chooses from those
            top_groups whose two largest s + bias add up to most, of equal ones the first.

    Returns:
        topk_ids [T, top_k] int64, the largest s + bias first; topk_scores [T, top_k] float32; topk_logits [T, top_k]
        float32, logits of topk_ids + 0 * topk_scores, for `choose_experts_backward`: a constant to autograd, NaN where
        topk_scores are, which may come of a logit that was not chosen. All contiguous.

    Raises:
        RuntimeError: scoring, top_k, groups, dtype, dimensions, sizes, strides or device are not as above, or bias asks
            for a gradient; the text names the argument.

    Source: DESIGN.md section 3, bit by bit; DeepSeek-V3 technical report, section 2.1.2 (sigmoid, bias, groups).
    """
    return _choose(logits, top_k, bias, scoring, normalize, scaling_factor, num_groups, top_groups)


def choose_experts_backward(
    grad: Tensor,
    logits: Tensor,
    topk_ids: Tensor,
    num_experts: int | None = None,
    scoring: str = "softmax",
    normalize: bool = True,
    scaling_factor: float = 1.0,
    parts: int = 1,
) -> Tensor:
    """The gradient of `choose_experts`, for those who write their own backward.

    The choice is taken as it is: only scores have a gradient. Of the slots of a token with the same id the last counts,
    and one whose id is no expert does not. Not differentiable. Never waits for the device; the same bytes on every one.

    Args:
        grad: [T, top_k] float32, the gradient of topk_scores; stride 1 along top_k, row stride free.
        logits: [T, E] float32, as in `choose_experts`, on the same device. With num_experts [T, top_k], the
            topk_logits of it: with normalize, shares of the chosen depend on no other. -Inf has the gradient 0 then.
        topk_ids: [T, top_k] int32 or int64 on the same device, as `choose_experts` returns them; stride 1 along top_k,
            row stride free. MOE_FP8_VALIDATE=1 raises for ids that are neither experts nor -1.
        num_experts: E, where logits are those of the chosen; an expert stands at one slot of a token at most, or the
            gradient of any of them is taken. None: logits are of all experts.
        scoring, normalize, scaling_factor: as in `choose_experts`; normalize must be True with num_experts.
        parts: 1, or 2: the gradient as the sum of two numbers of bfloat16, which tensor cores multiply.

    Returns:
        grad_logits [T, E] float32; of 2 parts [T, 2, E] bfloat16, grad_logits rounded and, behind that, what this
        leaves of it, rounded. Contiguous.

    Raises:
        RuntimeError: scoring, normalize, num_experts (from 1 to 1024), parts, dtype, dimensions, sizes, strides or
            device are not as above, or an argument asks for a derivative, which this has none of; the text names the
            argument.

    Source: DESIGN.md section 3, bit by bit.
    """
    return _choose_backward(grad, logits, topk_ids, num_experts, scoring, normalize, scaling_factor, parts)


def check_choice(op: str, num_experts: int, top_k: int, num_groups: int, top_groups: int) -> None:
    for name, count in (("top_k", top_k), ("num_groups", num_groups), ("top_groups", top_groups)):
        check_int(op, name, count)
    divides = num_groups >= 1 and num_experts % num_groups == 0
    require(divides, f"{op}: num_groups must divide the {num_experts} experts, got {num_groups}")
    require(1 <= top_groups <= num_groups, f"{op}: top_groups must be from 1 to {num_groups}, got {top_groups}")
    most = num_experts // num_groups * top_groups
    require(1 <= top_k <= most, f"{op}: top_k must be from 1 to the {most} experts of a choice, got {top_k}")


def _save(ctx, inputs, output):
    defaults = (None, "softmax", True, 1.0)
    logits, _, *rest = inputs
    _, *ctx.how = (*rest[:4], *defaults[len(rest) :])
    ctx.set_materialize_grads(False)  # else ids have one, of zeros
    ctx.mark_non_differentiable(output[0], output[2])
    ctx.save_for_backward(logits, output[0])


@differentiable_once
def _backward(ctx, _, grad, __):
    logits, ids = ctx.saved_tensors
    return (None if grad is None else _choose_backward(unit_stride(grad), logits, ids, None, *ctx.how, 1),)


register_gradient(_choose, _save, _backward, without=("bias",))
refuse_derivatives(_choose_backward)


@torch.library.register_fake("moe_fp8::choose_experts")
def _(logits, top_k, bias=None, scoring="softmax", normalize=True, scaling_factor=1.0, num_groups=1, top_groups=1):
    op = "choose_experts"
    check(op, "logits", logits)
    e = logits.shape[1]
    if bias is not None:
        check(op, "bias", bias, logits)
        check_shape(op, "bias", bias, (e,))
    check_one_of(op, "scoring", scoring, SCORINGS)
    check_choice(op, e, top_k, num_groups, top_groups)
    shape = logits.shape[0], top_k
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape), logits.new_empty(shape)


@torch.library.register_fake("moe_fp8::choose_experts_backward")
def _(grad, logits, topk_ids, num_experts=None, scoring="softmax", normalize=True, scaling_factor=1.0, parts=1):
    op = "choose_experts_backward"
    check(op, "grad", grad)
    check(op, "logits", logits, grad)
    check(op, "topk_ids", topk_ids, grad)
    t, got = logits.shape[0], grad.shape[0]
    require(got == t, f"{op}: grad must have size {t} in dimension 0, got {got}")
    check_shape(op, "topk_ids", topk_ids, grad.shape)
    e = logits.shape[1] if num_experts is None else num_experts
    if num_experts is not None:
        require(1 <= e <= MAX_EXPERTS, f"{op}: num_experts must be None or from 1 to {MAX_EXPERTS}, got {e}")
        require(normalize, f"{op}: normalize must be True with num_experts, got False")
        check_shape(op, "logits", logits, grad.shape)
    check_one_of(op, "scoring", scoring, SCORINGS)
    require(parts in (1, 2), f"{op}: parts must be 1 or 2, got {parts}")
    return logits.new_empty(t, e) if parts == 1 else logits.new_empty(t, parts, e, dtype=torch.bfloat16)
