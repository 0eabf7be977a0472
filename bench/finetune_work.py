"""Where the time of a step of bench/finetune.py goes, by kind of work.

Hooks mark the modules of the model, as `waterfall` does, and the modules of PEFT. The ops of experts and of attention
are told apart by their names.
"""

from __future__ import annotations

from collections.abc import Callable

import device_time
import torch
import waterfall
from torch import nn
from torch.autograd.profiler_util import FunctionEvent

PRODUCTS, ADAPTERS, OTHERS = "products of experts", "adapters of experts", "casts and other ops of experts"
LINEAR, ADAPTERS_OF_LINEAR = "linear layers", "adapters of linear layers"
ATTENTION, ROTARY = "attention", "rotary embeddings and copies for attention"
COMPILED = "linear layers, adapters, norms and rotary embeddings of attention, compiled"
COMPILED_LAYERS = "linear layers, adapters, norms and routers of layers, compiled"
OPS = 6  # of each kind, the ops with the most time
# By implementation: kinds of work in experts, and what names of their ops begin with. Other ops there are OTHERS.
_ADAPTERS = "moe_fp8::narrow_tokens", "moe_fp8::outer_tokens", "moe_fp8::cast_factor"
EXPERTS = {
    "ours": {
        PRODUCTS: ("moe_fp8::scaled_grouped_mm", "moe_fp8::add_scaled_grouped_mm"),
        ADAPTERS: (*_ADAPTERS, "aten::", "moe_fp8_ext::"),
        OTHERS: ("moe_fp8::",),
    },
    "stock": {PRODUCTS: ("aten::_grouped_mm",), ADAPTERS: ("aten::baddbmm", "aten::bmm")},
}
_ATTENTION = {ATTENTION: ("aten::_scaled_dot_product", "aten::_flash", "aten::_cudnn", "aten::_efficient")}
_OTHERS_OF = {waterfall.EXPERTS: OTHERS, waterfall.ATTENTION: ROTARY}


def profile_of(step: Callable[[], object], model: nn.Module, impl: str, device: torch.device, seconds: float) -> dict:
    """Milliseconds of a step by kind of work, and the ops with the most time of each kind. `seconds` is the time of a
    step without the profiler."""
    with waterfall.marked(parts_of(model)):
        found = device_time.profiled(step, device)
    kinds = kinds_of(found.ops, impl)
    ms = device_time.of_step(device_time.by_kind(found, kinds, waterfall.REST), seconds)
    longest = device_time.longest_ops(found, kinds, waterfall.REST, OPS)
    ops = {kind: {op: round(us / 1000, 3) for op, us in of.items()} for kind, of in longest.items()}
    return device_time.COUNTED | {"profile_ms": ms, "profile_ops": {kind: ops[kind] for kind in ms if kind in ops}}


def parts_of(model: nn.Module) -> dict[nn.Module, str]:
    """The parts of `waterfall`, and adapters and linear layers. model is one of PEFT."""
    base = model.get_base_model()
    found = waterfall.parts_of(base)
    for module in base.modules():
        children = [*module.children()]
        if isinstance(module, nn.Linear):
            found[module] = LINEAR
        elif type(module).__name__.endswith("Norm"):
            found[module] = waterfall.NORMS
        elif any(map(_has_experts, children)):
            found[module] = waterfall.ROUTER
    for module in filter(_is_adapted, base.modules()):
        found[module] = ADAPTERS if _has_experts(module) else ADAPTERS_OF_LINEAR
        for factor in (*module.lora_A.values(), *module.lora_B.values()):
            found.pop(factor, None)
    found[base.get_output_embeddings()] = waterfall.ENDS
    layers = dict.fromkeys(base.model.layers, COMPILED_LAYERS)
    of_attention = {module: COMPILED for module, part in found.items() if part == waterfall.ATTENTION}
    for module, part in (layers | of_attention).items():
        if "forward" in vars(module):
            for inner in module.modules():
                found.pop(inner, None)  # its hooks would be compiled too
            found[module] = part
    return found


def kinds_of(ops: list[FunctionEvent], impl: str) -> dict[FunctionEvent, str | None]:
    """The kind of work of each op. Of the ops around a kernel, the outermost of the part that has a kind counts."""
    names_of = {waterfall.EXPERTS: EXPERTS[impl], waterfall.ATTENTION: _ATTENTION, COMPILED: _ATTENTION}
    names_of[COMPILED_LAYERS] = {
        **EXPERTS[impl],
        ADAPTERS: ("moe_fp8_ext::", "aten::bmm", "aten::_grouped"),
        **_ATTENTION,
    }
    parts, named = waterfall.assigned(ops), {}
    for op, part in parts.items():
        around = named.get(op.cpu_parent) if parts.get(op.cpu_parent) == part else None
        names = names_of.get(part, {})
        named[op] = around or next((kind for kind, starts in names.items() if op.name.startswith(starts)), None)
    return {op: named[op] or _OTHERS_OF.get(part, part) for op, part in parts.items()}


def _is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "lora_A")


def _has_experts(module: nn.Module) -> bool:
    """Whether a module is experts, or PEFT's wrapper of a parameter of experts."""
    return hasattr(module, "is_transposed") or type(module).__name__ == "ParamWrapper"
