"""Where the time of a training step goes, by part of the model.

Hooks of modules mark the forward of every part in a profile. An op of backward belongs to the part whose forward made
its node of the graph: `torch.profiler` gives both the same sequence number. A kernel belongs to the op that launched
it, and `device_time` says how long it ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import device_time
from device_time import Profile
from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import record_function

EXPERTS, ATTENTION, ROUTER, DENSE = "experts", "attention", "router", "dense MLPs"
NORMS, ENDS, OPTIMIZER, REST = "norms and residuals", "embeddings and loss", "optimizer", "rest"
PARTS = (EXPERTS, ATTENTION, ROUTER, DENSE, NORMS, ENDS, OPTIMIZER, REST)
_MARK = "part of a step: "
_BACKWARD = "autograd::engine::evaluate_function"


def parts_of(model: nn.Module) -> dict[nn.Module, str]:
    """Names the parts of a causal language model of Transformers. A module that is not named belongs to its parent's
    part."""
    found: dict[nn.Module, str] = {model: ENDS, model.base_model: NORMS, model.get_input_embeddings(): ENDS}
    for module in model.modules():
        kind, children = type(module).__name__, [*module.children()]
        if hasattr(module, "is_transposed"):  # the mark of Transformers' `use_experts_implementation`
            found[module] = EXPERTS
        elif any(hasattr(child, "is_transposed") for child in children):
            found[module] = ROUTER
        elif kind.endswith("MLP"):
            found[module] = DENSE
        elif kind.endswith(("Attention", "RotaryEmbedding")):
            found[module] = ATTENTION
    for module in model.modules():
        if module not in found and any(found.get(child) == ATTENTION for child in module.children()):
            found[module] = NORMS  # a layer: the rest of it
    return found


@contextmanager
def marked(parts: dict[nn.Module, str]) -> Iterator[None]:
    """Marks the forward of modules in profiles."""
    opened: list[record_function] = []

    def enter(part: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            opened.append(mark(part))
            opened[-1].__enter__()

        return hook

    def leave(*_: object) -> None:
        opened.pop().__exit__(None, None, None)

    hooks = [
        handle
        for module, part in parts.items()
        for handle in (
            module.register_forward_pre_hook(enter(part)),
            module.register_forward_hook(leave, always_call=True),
        )
    ]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


def mark(part: str) -> record_function:
    """A context whose ops belong to a part that is not a module: the optimizer."""
    return record_function(_MARK + part)


def microseconds(found: Profile) -> dict[str, float]:
    """Microseconds of each part. They add up to the time in which the device worked."""
    return _summed(found, assigned(found.ops), PARTS)


def ops_of(found: Profile, number: int) -> dict[str, dict[str, float]]:
    """Microseconds of the ops that take most of each part."""
    return device_time.longest_ops(found, assigned(found.ops), REST, number)


def assigned(ops: list[FunctionEvent]) -> dict[FunctionEvent, str | None]:
    """The part of every op."""
    of_forward, of_node = {}, {}
    for event in ops:
        of_forward[event] = _marked_as(event) or of_forward.get(event.cpu_parent)
        # Of all ops with one number, the last one that began made the node: an op that makes none has the next number.
        if event.sequence_nr >= 0 and not _in_backward(event):
            of_node[event.sequence_nr] = of_forward[event]
    found: dict[FunctionEvent, str | None] = {}
    part = None
    for event in ops:
        if event.name.startswith(_BACKWARD):
            # The gradient of a parameter is added to it without a number: it belongs to the node before.
            part = of_node.get(event.sequence_nr, part)
            found[event] = part
        else:
            found[event] = _marked_as(event) or found.get(event.cpu_parent)
    return found


def by_op(found: Profile, kinds: dict[str, tuple[str, ...]]) -> dict[str, float]:
    """Microseconds of each kind of work, for graphs of `torch.compile`, which hooks do not mark. A kind has beginnings
    of the names of ops and of marks. Of the ops around a kernel, the innermost that has a kind counts."""
    kind_of: dict[FunctionEvent, str | None] = {}
    for op in found.ops:
        name = op.name.removeprefix(_MARK)
        own = next((kind for kind, starts in kinds.items() if name.startswith(starts)), None)
        kind_of[op] = own or kind_of.get(op.cpu_parent)
    return _summed(found, kind_of, (*kinds, REST))


def _summed(found: Profile, kind_of: dict[FunctionEvent, str | None], order: tuple[str, ...]) -> dict[str, float]:
    us = device_time.by_kind(found, kind_of, REST)
    return {kind: us[kind] for kind in order if us[kind]}


def _marked_as(event: FunctionEvent) -> str | None:
    return event.name.removeprefix(_MARK) if event.name.startswith(_MARK) else None


def _in_backward(event: FunctionEvent | None) -> bool:
    while event is not None:
        if event.name.startswith(_BACKWARD):
            return True
        event = event.cpu_parent
    return False
