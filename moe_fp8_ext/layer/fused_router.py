"""A router and its experts as one node of autograd, so that the gradient that the router has of its tokens is added to
that of the experts by the product that computes it: three passes over a gradient of tokens less."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from moe_fp8_ext._C import validates
from moe_fp8_ext.distributed.dtensor import is_dtensor
from moe_fp8_ext.layer.experts import Weights, arguments, backward, cast_all, dtypes_of, forward
from moe_fp8_ext.layer.router import Rule, choice, choice_backward
from moe_fp8_ext.matmul.bf16 import autocast_dtype, cast, row_major
from moe_fp8_ext.matmul.engine import Operand, Slots
from moe_fp8_ext.ops.dispatch import asks_for_gradient, below_autograd, differentiable_once, is_transformed

_sort_tokens = torch.ops.moe_fp8.sort_tokens.default
_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"


def is_plain(module: nn.Module, forward: Callable[..., object]) -> bool:
    """Whether a call of the module is one of this function, and nothing sees what goes in and out."""
    own = type(module).forward is forward and "forward" not in vars(module) and module._compiled_call_impl is None
    return own and not any(getattr(module, hooks) for hooks in _HOOKS)


def takes(x: Tensor, w_router: Tensor, *parameters: Tensor) -> bool:
    """Whether `run` is, but for time, a call of the two modules: training, of plain tensors, without a graph."""
    if torch.compiler.is_compiling() or is_transformed() or _has_any_global_hook() or validates():
        return False
    tensors = x, w_router
    plain = autocast_dtype(x) is None and not any(map(is_dtensor, (*tensors, *parameters)))
    return plain and all(map(asks_for_gradient, tensors))


def run(
    x: Tensor, w_router: Tensor, rule: Rule, rest: dict[str, Tensor | None], options: dict[str, object]
) -> tuple[Tensor, Tensor, Tensor]:
    """out of the experts that are chosen for x [T, D], and the choice's logits and ids.

    rest, options: what `experts` takes beside x, ids and scores.
    """
    with torch.no_grad():
        logits, ids, scores, of_chosen = choice(x, w_router, rule)
    scores.requires_grad_()  # as they do that come from a router
    weights = tuple(rest[name] for name in ("w_gate_up", "w_down", "b_gate_up", "b_down"))
    how = (options[name] for name in ("recipe", "activation", "interleaved", "keep"))
    inputs = arguments(x, ids, scores, weights, *how, rest["main_grad_gate_up"], rest["main_grad_down"])
    out, logits = _Layer.apply(w_router, rule, logits, of_chosen, *inputs)
    return out, logits, ids


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w_router, rule, logits, of_chosen, x, scores, *rest):
        *weights, ids, main_grad_gate_up, main_grad_down, call = rest
        with below_autograd():
            slots = Slots(*_sort_tokens(ids, call.experts))
            out, kept = forward(Operand(x), scores, slots, Weights.of(weights, call), call)
        ctx.save_for_backward(x, w_router, of_chosen, ids, *kept)
        ctx.main_grads = main_grad_gate_up, main_grad_down  # every backward writes to them
        ctx.rule, ctx.call, ctx.dtypes = rule, call, dtypes_of(x, scores, *weights)
        ctx.set_materialize_grads(False)
        return cast(out, x.dtype), logits

    @staticmethod
    @differentiable_once
    def backward(ctx, dout, of_logits):
        # Outside: `checkpoint` computes forward again here, with gradients.
        kept = ctx.saved_tensors
        of_router, of_experts = kept[:4], kept[4:]
        dx = dscores = None
        of_weights = [None] * 4
        with below_autograd():
            if dout is not None:
                grads = backward(Operand(row_major(dout)), of_experts, ctx.main_grads, ctx.call)
                dx, dscores, *of_weights = cast_all(grads, ctx.dtypes)
            dx, dw_router = choice_backward(of_logits, dscores, of_router, ctx.rule, (True, True), dx)
        return dw_router, None, None, None, dx, None, *of_weights, None, None, None, None
