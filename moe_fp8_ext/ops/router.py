"""A router's choice of experts, and the gradient of their scores."""

import torch
from torch import Tensor

from moe_fp8_ext.ops.checks import check_dim, check_int, check_one_of, check_shape, require
from moe_fp8_ext.ops.dispatch import differentiable_once, fake, register_gradient, unit_stride
from moe_fp8_ext.quantization.format import MAX_EXPERTS

SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus")
GROUP_SCORES = ("top2_sum", "max")

_choose_experts = torch.ops.moe_fp8.choose_experts.default
_choose_experts_backward = torch.ops.moe_fp8.choose_experts_backward.default


def choose_experts(
    logits: Tensor,
    top_k: int,
    bias: Tensor | None = None,
    scoring: str = "softmax",
    normalize: bool = True,
    scaling_factor: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score: str = "top2_sum",
    given_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Chooses the top_k experts of each token and computes their scores.

        s           = scoring(logits)
        topk_ids    = the top_k largest of s + bias
        topk_scores = s[topk_ids] / (their sum + 1e-20 if normalize, else 1) * scaling_factor

    Of equal values the smaller id comes first. NaN counts as the largest value, so a token with a NaN logit shows it in
    all of its scores; with "sigmoid" or "sqrtsoftplus" and without normalize, only in the score of that logit.
    topk_scores is differentiable in logits, once; bias has no gradient. Every device gives the same bytes.

    Args:
        logits: [T, E] float32, E at most 1024; stride 1 along E, any row stride.
        top_k: experts per token.
        bias: [E] float32 on the same device. It changes the choice and no score. None: zero.
        scoring: "softmax" over the experts, or of each logit "sigmoid" or "sqrtsoftplus", sqrt(log(1 + e^logit)).
        normalize: whether the scores of a token add up to scaling_factor.
        scaling_factor: factor of the scores.
        num_groups, top_groups: the experts form num_groups groups of neighbours. A token chooses from the top_groups
            groups with the largest value; of equal values, the first.
        group_score: the value of a group. "top2_sum": the sum of its two largest s + bias. "max": the largest one.
        given_ids: [T, top_k] int32 or int64 on the same device; stride 1 along top_k, any row stride. They take the
            place of the choice, in their order, so bias and groups have no effect. With topk_ids of an earlier call and
            equal logits, scores have equal bytes. A slot whose id is no expert gets the id -1, and score and logit 0. A
            token may have an expert in one slot at most. If several slots have the same expert, each gets the score,
            and only the gradient of the last slot counts. With MOE_FP8_VALIDATE=1 the op raises for an id that is
            neither an expert nor -1. None: the op chooses.

    Returns:
        topk_ids [T, top_k] int64, the largest s + bias first, or given_ids.

        topk_scores [T, top_k] float32.

        topk_logits [T, top_k] float32, logits[topk_ids] + 0 * topk_scores, an input of `choose_experts_backward`. It is
        a constant to autograd. It is NaN where topk_scores is, even if the NaN comes from a logit that was not chosen.

        All are contiguous.

    Source: DESIGN.md section 3, bit by bit; DeepSeek-V3 technical report, section 2.1.2 (sigmoid, bias, groups);
        DeepSeek-V2, section 2.1.2 (groups by their best expert).
    """
    groups = num_groups, top_groups, group_score
    return _choose_experts(logits, top_k, bias, scoring, normalize, scaling_factor, *groups, given_ids)


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
    """Computes the gradient of `choose_experts` in logits, for callers that write their own backward.

        grad_logits[t, i] = sum_j grad[t, j] * d topk_scores[t, j] / d logits[t, i]

    The choice is a constant: only scores have a gradient. If several slots of a token have the same id, the last one
    counts; a slot whose id is no expert does not count. Every device gives the same bytes.

    Args:
        grad: [T, top_k] float32, the gradient of topk_scores; stride 1 along top_k, any row stride.
        logits: [T, E] float32 on the same device, as in `choose_experts`. With num_experts: [T, top_k], the topk_logits
            of `choose_experts`. These are enough with normalize, where the scores depend on no other logit; a logit of
            -Inf then has the gradient 0.
        topk_ids: [T, top_k] int32 or int64 on the same device, as `choose_experts` returns them; stride 1 along top_k,
            any row stride. With MOE_FP8_VALIDATE=1 the op raises for an id that is neither an expert nor -1.
        num_experts: E, at most 1024, if logits has only the chosen experts. A token may then have an expert in one slot
            at most. If several slots have the same expert, the gradient of any one counts. None: logits has all
            experts.
        scoring, normalize, scaling_factor: as in `choose_experts`; normalize must be True with num_experts.
        parts: 1, or 2 for the gradient as the sum of two bfloat16 values, which tensor cores can multiply.

    Returns:
        grad_logits [T, E] float32. With parts = 2: [T, 2, E] bfloat16, grad_logits rounded, then the rounded remainder.
        Contiguous.

    Source: DESIGN.md section 3, bit by bit.
    """
    return _choose_experts_backward(grad, logits, topk_ids, num_experts, scoring, normalize, scaling_factor, parts)


def check_choice(op: str, num_experts: int, top_k: int, num_groups: int, top_groups: int) -> None:
    """Checks that top_k experts can be chosen from the top_groups of num_groups groups."""
    for name, count in (("top_k", top_k), ("num_groups", num_groups), ("top_groups", top_groups)):
        check_int(op, name, count)
    divides = num_groups >= 1 and num_experts % num_groups == 0
    require(divides, f"{op}: num_groups must divide the {num_experts} experts, got {num_groups}")
    require(1 <= top_groups <= num_groups, f"{op}: top_groups must be from 1 to {num_groups}, got {top_groups}")
    max_top_k = num_experts // num_groups * top_groups
    require(1 <= top_k <= max_top_k, f"{op}: top_k must be from 1 to the {max_top_k} experts of a choice, got {top_k}")


def _save(ctx, inputs, output):
    defaults = (None, "softmax", True, 1.0)
    logits, _, *rest = inputs
    _, *ctx.options = (*rest[:4], *defaults[len(rest) :])
    ctx.set_materialize_grads(False)  # otherwise autograd allocates zeros as the gradients of topk_ids and topk_logits
    ctx.mark_non_differentiable(output[0], output[2])
    ctx.save_for_backward(logits, output[0])


@differentiable_once
def _backward(ctx, _, grad, __):
    logits, ids = ctx.saved_tensors
    return (None if grad is None else _choose_experts_backward(unit_stride(grad), logits, ids, None, *ctx.options, 1),)


register_gradient(_choose_experts, _save, _backward, without=("bias",))


@fake(_choose_experts)
def _(op, logits, top_k, bias, scoring, normalize, scaling_factor, num_groups, top_groups, group_score, given_ids):
    e = logits.shape[1]
    if bias is not None:
        check_shape(op, "bias", bias, (e,))
    check_one_of(op, "scoring", scoring, SCORINGS)
    check_one_of(op, "group_score", group_score, GROUP_SCORES)
    check_choice(op, e, top_k, num_groups, top_groups)
    shape = logits.shape[0], top_k
    if given_ids is not None:
        check_shape(op, "given_ids", given_ids, shape)
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape), logits.new_empty(shape)


@fake(_choose_experts_backward)
def _(op, grad, logits, topk_ids, num_experts, scoring, normalize, scaling_factor, parts):
    t = logits.shape[0]
    check_dim(op, "grad", grad, 0, t)
    check_shape(op, "topk_ids", topk_ids, grad.shape)
    e = logits.shape[1] if num_experts is None else num_experts
    if num_experts is not None:
        require(1 <= e <= MAX_EXPERTS, f"{op}: num_experts must be None or from 1 to {MAX_EXPERTS}, got {e}")
        require(normalize, f"{op}: normalize must be True with num_experts, got False")
        check_shape(op, "logits", logits, grad.shape)
    check_one_of(op, "scoring", scoring, SCORINGS)
    require(parts in (1, 2), f"{op}: parts must be 1 or 2, got {parts}")
    return logits.new_empty(t, e) if parts == 1 else logits.new_empty(t, parts, e, dtype=torch.bfloat16)
