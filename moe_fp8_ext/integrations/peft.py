"""Reads the factors A and B of LoRA adapters of Hugging Face PEFT on weights of experts (`target_parameters`).

During a call, PEFT puts a parametrization on the module, which turns W into W + scaling * B A. `adapter` reads A and B
from that parametrization. But PEFT still computes W + B A once per call, to check the parametrization. For several
adapters, and for weights in FP8, a parametrization has no factors. So `convert_` replaces the forward of PEFT's
wrapper. The new forward passes the factors without a parametrization. PEFT is not imported: attributes identify its
objects.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from moe_fp8_ext.layer.adapter import MAX_RANK, LoRA
from moe_fp8_ext.ops.checks import fail, require

_HANDED = "_moe_fp8_ext_adapters"


def _key(name: str) -> tuple[int | None, str]:
    """The key of the adapter of a weight, among the adapters that experts have during a call.

    Threads may call the same experts at once. Traced calls share a key, because Dynamo does not trace the number of a
    thread.
    """
    return None if torch.compiler.is_compiling() else threading.get_ident(), name


def _keys(handed: dict[tuple[int | None, str], LoRA], name: str) -> list[tuple[int | None, str]]:
    """The keys under which a call of experts finds an adapter.

    A graph may end between a wrapper and its experts, for example at a hook. Then only one of the two is traced.
    """
    if not torch.compiler.is_compiling():
        return [_key(name), (None, name)]
    of_threads = [key for key in handed if key[1] == name and key[0] is not None]
    return [(None, name), *(of_threads if len(of_threads) == 1 else [])]  # of several threads, it may be any


def _handed_to(module: nn.Module) -> dict[tuple[int | None, str], LoRA] | None:
    """The adapters that experts have during a call. Dynamo of torch 2.11 traces getattr, which takes longer in eager
    calls."""
    return getattr(module, _HANDED, None) if torch.compiler.is_compiling() else vars(module).get(_HANDED)


def adapter(module: nn.Module, name: str) -> LoRA | None:
    """Returns the adapter that PEFT adds to a weight of experts in this call. `weight` returns the bare weight."""
    handed = _handed_to(module)
    if handed:
        for key in _keys(handed, name):
            if key in handed:
                return handed.pop(key)
    changes = _changes(module, name)
    if not _are_factors(changes):
        return None
    lhs, rhs, scaling = changes[0].lhs, changes[0].rhs, changes[0].scaling
    a, b = (lhs.mT, rhs.mT) if module.is_transposed else (rhs, lhs)
    return LoRA(a, b, scaling)


def weight(module: nn.Module, name: str) -> Tensor:
    """Returns a weight of experts without the adapter of `adapter`.

    If `adapter` cannot return the adapters as factors, this returns the weight that PEFT computes, and warns.

    Raises:
        RuntimeError: PEFT would add adapters to FP8 values without their scales.
    """
    changes = _changes(module, name)
    of_peft = [change for change in changes if _is_of_peft(change)]
    if not of_peft:
        return getattr(module, name)
    original = stored(module, name)
    text = f"call moe_fp8_ext.convert_(model, recipe) after get_peft_model, with at most {MAX_RANK} ranks together"
    is_fp8 = original.dtype.itemsize == 1
    require(not is_fp8, f"moe_fp8: adapters of {name} in FP8 must be handed over as factors: {text}")
    if _are_factors(changes):
        # To torch, every call of PEFT writes the weight. `data` has its own version, so backward may read it later.
        return original if original.requires_grad else original.data
    _warn_of_merged(type(of_peft[0]).__name__ if len(changes) == 1 else "several parametrizations")
    return getattr(module, name)


def stored(module: nn.Module, name: str) -> Tensor | None:
    """Returns a parameter of a module without its parametrizations, or None if the module has no such parameter."""
    return module.parametrizations[name].original if _changes(module, name) else getattr(module, name, None)


def wrapped(module: nn.Module) -> nn.Module | None:
    """Returns the experts inside a wrapper of PEFT, or None. Wrappers are nested, one for each parameter."""
    return module.get_base_layer() if type(module).__name__ == "ParamWrapper" and _is_of_peft(module) else None


def replacement(wrapper: nn.Module) -> tuple[str, object]:
    """Returns the attribute that `convert_` replaces on a wrapper, and its value."""
    return "forward", functools.partial(_forward, wrapper)


def can_merge(module: nn.Module) -> bool:
    """Whether a module is PEFT's model around another, which merges adapters."""
    return _is_of_peft(module) and hasattr(type(module), "_check_merge_allowed")


def merge_check(tuner: nn.Module) -> tuple[str, object]:
    """Returns the attribute that `convert_` replaces on PEFT's model, and its value.

    `merge_adapter` and `merge_and_unload` call it before they merge anything. PEFT itself raises at the first weight in
    FP8, when it has merged adapters of other modules.
    """
    return "_check_merge_allowed", functools.partial(_check_merge, tuner)


def _check_merge(tuner: nn.Module) -> None:
    for wrapper in tuner.modules():
        experts = wrapped(wrapper)
        if experts is not None and wrapper.lora_A and stored(experts, wrapper.parameter_name).dtype.itemsize == 1:
            got = f"got {wrapper.parameter_name}, to which PEFT would add B A without its scales"
            way_out = "load the checkpoint dequantized to merge, or call export_fp8(model, folder, merge_adapters=True)"
            fail("moe_fp8", f"adapters must not be merged into weights in FP8, {got}; {way_out}")
    type(tuner)._check_merge_allowed(tuner)


def _forward(wrapper: nn.Module, *args: object, **kwargs: object) -> object:
    """The forward of PEFT's wrapper. If possible, it passes the adapters to the experts as factors."""
    lora = None if "adapter_names" in kwargs else _active(wrapper)
    if lora is None:
        return type(wrapper).forward(wrapper, *args, **kwargs)
    with _handed_over(wrapper.get_base_layer(), wrapper.parameter_name, lora):
        return wrapper.base_layer(*args, **kwargs)


def _active(wrapper: nn.Module) -> LoRA | None:
    """Returns the active adapters of a wrapper as one. None if PEFT's own forward has to run."""
    if wrapper.disable_adapters or wrapper.merged or wrapper.num_experts == 1:
        return None
    names = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
    if not names or not all(_is_plain(wrapper, name) for name in names):
        return None
    adapters = [LoRA(*_factors(wrapper, name), wrapper.scaling[name]) for name in names]
    if sum(adapter.A.shape[1] for adapter in adapters) > MAX_RANK:
        return None
    if len(adapters) == 1:
        return adapters[0]
    a = torch.cat([adapter.A for adapter in adapters], dim=1)
    return LoRA(a, torch.cat([adapter.B * adapter.scaling for adapter in adapters], dim=2), 1.0)


def _is_plain(wrapper: nn.Module, name: str) -> bool:
    """Whether an adapter is plain LoRA, B A. On a parameter, PEFT 0.21 has no other kind."""
    has_more = wrapper.lora_variant.get(name) is not None or wrapper.lora_bias.get(name, False)
    return not has_more and type(wrapper.lora_dropout[name]) is nn.Identity


def _factors(wrapper: nn.Module, name: str) -> tuple[Tensor, Tensor]:
    """Returns views A [E, r, K] and B [E, N, r] of an adapter, which PEFT stores as [E * r, K] and [N, r * E]."""
    a, b, e = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, wrapper.num_experts
    return a.view(e, -1, a.shape[1]), b.view(b.shape[0], -1, e).permute(2, 0, 1)


@contextmanager
def _handed_over(experts: nn.Module, name: str, lora: LoRA) -> Iterator[None]:
    handed, key = _handed_to(experts), _key(name)
    if handed is None:
        handed = {}
        if torch.compiler.is_compiling():
            setattr(experts, _HANDED, handed)
        else:
            handed = vars(experts).setdefault(_HANDED, handed)  # in one step, because threads may call at once
    handed[key] = lora
    try:
        yield
        if key in handed:
            text = f"{type(experts).__name__} must take the adapter of {name}, got a forward that is not moe_fp8_ext's"
            fail("moe_fp8", f"{text}; call convert_ or revert_ on the whole model")
    finally:
        handed.pop(key, None)


def _changes(module: nn.Module, name: str) -> list[nn.Module]:
    """Returns the parametrizations of a parameter."""
    # Not by getattr, which takes four times as long in a module without parametrizations.
    parametrizations = dict(module.named_children()).get("parametrizations", ())
    return list(parametrizations[name]) if name in parametrizations else []


def _are_factors(changes: list[nn.Module]) -> bool:
    """Whether parametrizations are one adapter, scaling * lhs @ rhs, of a rank that `experts` takes."""
    is_one = len(changes) == 1 and all(hasattr(changes[0], name) for name in ("lhs", "rhs", "scaling"))
    return is_one and changes[0].rhs.dim() == 3 and changes[0].rhs.shape[1] <= MAX_RANK


def _is_of_peft(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "peft"


@functools.cache
def _warn_of_merged(kind: str) -> None:
    text = f"moe_fp8: adapters of experts by {kind} are computed as PEFT does, by W + B A and its whole gradient"
    cure = f"moe_fp8_ext.convert_(model, recipe) after get_peft_model avoids it up to {MAX_RANK} ranks together"
    warnings.warn(f"{text}; {cure}", stacklevel=2)
