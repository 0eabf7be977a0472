"""The benchmark cases of the experts' activations and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from case import EVEN, HOST, RECIPES, Case, Rule, Shape, always, even_and_uneven, group_ends, normal, of_copy
from torch import Tensor

from moe_fp8_ext import ops
from moe_fp8_ext.quantization.recipe import get_recipe

GATED = ("swiglu", "geglu", "swiglu_oai")
PLAIN = ("silu", "gelu", "relu2")


def _slots(cpu: bool) -> list[Shape]:
    """The slots of all tokens, with small and large numbers of features per expert."""
    sizes = [(300, 256)] if cpu else [(196608, 256), (262144, 768), (131072, 2048)]
    return [Shape(f"[{p}, {f}]", {"p": p, "f": f}) for p, f in sizes]


def _slots_of_experts(cpu: bool) -> list[Shape]:
    return even_and_uneven(_slots(cpu))


def _h(device: torch.device, activation: str, p: int, f: int) -> Tensor:
    return normal(device, p, 2 * f if activation in GATED else f)


def _inputs(activation: str, *format: str) -> Callable[..., tuple[object, ...]]:
    return lambda device, groups, *, p, f: (_h(device, activation, p, f), activation, *format)


def _biased(device: torch.device, groups: None, *, p: int, f: int) -> tuple[Tensor, Tensor, Tensor]:
    return normal(device, p, 2 * f), normal(device, 128, 2 * f), group_ends(EVEN, p, 128, device)


def _summed(device: torch.device, groups: str, *, p: int, f: int) -> tuple[Tensor, Tensor]:
    return normal(device, p, 2 * f), group_ends(groups, p, 128, device)


def _gradients(activation: str, format: str | None = None) -> Callable[..., tuple[object, ...]]:
    def inputs(device: torch.device, groups: None, *, p: int, f: int) -> tuple[object, ...]:
        h, scale = _h(device, activation, p, f), None
        if format:
            h, scale = ops.quantize_rows(h, format)
        return normal(device, p, f), h, activation, torch.rand(p, device=device), scale, format

    return inputs


def _backward(interleaved: bool) -> Callable[..., tuple[Tensor, ...]]:
    def call(grad, h, activation, scores, scale, format):
        how = {"h_scale": scale, "format": format, "interleaved": interleaved}
        return ops.activate_backward(grad, h, activation, scores=scores, **how)

    return call


def _operands(format: str) -> Callable[..., tuple[object, ...]]:
    """Operands for the slots of 128 experts."""

    def inputs(device: torch.device, groups: str, *, p: int, f: int) -> tuple[object, ...]:
        grad, h, activation, scores, scale, _ = _gradients("swiglu", format)(device, None, p=p, f=f)
        indices = torch.randperm(p, device=device, dtype=torch.int32)
        return grad, h, activation, format, group_ends(groups, p, 128, device), scores, scale, indices

    return inputs


def _backward_operands(grad, h, activation, format, offs, scores, scale, indices):
    """Calls the op as the layer does."""
    how = {"offs": offs, "scores": scores, "h_scale": scale, "indices": indices}
    how["amax"] = get_recipe(format).amax_of_groups
    return ops.quantize_activated_backward(grad, h, activation, format, **how)


def _backward_rows(grad, h, activation, format, offs, scores, scale, indices):
    how = {"offs": offs, "scores": scores, "h_scale": scale, "indices": indices}
    return ops.quantize_activated_backward_rows(grad, h, activation, format, **how)


_SPEED: Rule = (always, of_copy(0.85))
# The required speed. "rowwise" reads grad and h twice, because columns have no scales before all rows are read. That
# limits it to 9 / 13 of a copy, plus what remains in the L2. Formats with blocks are limited by arithmetic: three
# results and five casts per feature.
_BACKWARD: Rule = (always, of_copy(0.75))

_INTERLEAVED = "swiglu interleaved"

ACTIVATION_CASES: tuple[Case, ...] = (
    *(Case("activate", _slots, _inputs(a), ops.activate, (_SPEED, HOST), variant=a) for a in (*GATED, *PLAIN)),
    Case("activate", _slots, _inputs("swiglu"), partial(ops.activate, interleaved=True), variant=_INTERLEAVED),
    *(
        Case("quantize_activated", _slots, _inputs("swiglu", f), ops.quantize_activated, (_SPEED,), f, "swiglu")
        for f in RECIPES
    ),
    Case("add_bias", _slots, _biased, ops.add_bias, (_SPEED,)),
    Case("sum_groups", _slots_of_experts, _summed, ops.sum_groups, (_SPEED,)),
    *(
        Case("activate_backward", _slots, _gradients(a), _backward(False), (_SPEED,), variant=a)
        for a in (*GATED, *PLAIN)
    ),
    *(
        Case("activate_backward", _slots, _gradients("swiglu", f), _backward(False), (_SPEED,), f, "swiglu")
        for f in RECIPES
    ),
    Case("activate_backward", _slots, _gradients("swiglu"), _backward(True), variant=_INTERLEAVED),
    *(
        Case(
            *("quantize_activated_backward", _slots_of_experts, _operands(f), _backward_operands),
            *((_BACKWARD,), f, "swiglu"),
        )
        for f in RECIPES
    ),
    *(
        Case(
            *("quantize_activated_backward_rows", _slots_of_experts, _operands(f), _backward_rows),
            *((_BACKWARD,), f, "swiglu"),
        )
        for f in RECIPES
    ),
)
