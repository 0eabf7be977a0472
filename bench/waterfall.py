"""Where the time of a training step goes, by part of the model.

Hooks of modules mark the forward of every part in a profile. An op of backward belongs to the part whose forward made
its node of the graph: `torch.profiler` gives both the same sequence number. A kernel belongs to the op that launched
it. On a CPU, which has no kernels, the time is the time of ops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

EXPERTS, ATTENTION, ROUTER, DENSE = "experts", "attention", "router", "dense MLPs"
NORMS, ENDS, OPTIMIZER, REST = "norms and residuals", "embeddings and loss", "optimizer", "rest"
PARTS = (EXPERTS, ATTENTION, ROUTER, DENSE, NORMS, ENDS, OPTIMIZER, REST)
# The profiler's own work. It comes with kernels of the ops around it, which would count twice.
_OVERHEAD = {"Activity Buffer Request", "Buffer Flush", "Command Buffer Full", "Instrumentation", "Resource"}
_MARK = "part of a step: "
_BACKWARD = "autograd::engine::evaluate_function"
_USER_SCOPE = 7  # the scope of `record_function`


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


def events_of(step: Callable[[], object], device: torch.device) -> list[FunctionEvent]:
    """The events of one step."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as found:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    return [*found.events()]


def microseconds(events: list[FunctionEvent]) -> dict[str, float]:
    """Microseconds of each part. They add up to `total`, but for the resolution of the profiler."""
    return _summed(events, assigned(events), PARTS)


def ops_of(events: list[FunctionEvent], number: int) -> dict[str, dict[str, float]]:
    """Microseconds of the ops that take most of each part."""
    found = assigned(events)
    on_gpu = any(event.kernels for event in found)
    us: dict[str, Counter[str]] = {part: Counter() for part in PARTS}
    for event, part in found.items():
        us[part or REST][event.name] += _own(event, on_gpu)
    return {part: dict(ops.most_common(number)) for part, ops in us.items()}


def assigned(events: list[FunctionEvent]) -> dict[FunctionEvent, str | None]:
    """The part of every op."""
    ops, of_forward, of_node = _ops(events), {}, {}
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


def by_op(events: list[FunctionEvent], kinds: dict[str, tuple[str, ...]]) -> dict[str, float]:
    """Microseconds of each kind of work, for graphs of `torch.compile`, which hooks do not mark. A kind has beginnings
    of the names of ops and of marks. Of the ops around a kernel, the innermost that has a kind counts."""
    kind_of: dict[FunctionEvent, str | None] = {}
    for event in _ops(events):
        name = event.name.removeprefix(_MARK)
        own = next((kind for kind, starts in kinds.items() if name.startswith(starts)), None)
        kind_of[event] = own or kind_of.get(event.cpu_parent)
    return _summed(events, kind_of, (*kinds, REST))


def total(events: list[FunctionEvent]) -> float:
    """Microseconds of all kernels or, without kernels, of all ops."""
    marks = {event.name for event in events if _is_op(event) and event.scope == _USER_SCOPE}
    kernels = [e for e in events if e.device_type != DeviceType.CPU and e.name not in marks]  # marks are there again
    if kernels:
        return sum(event.time_range.elapsed_us() for event in kernels)
    return sum(event.cpu_time_total for event in events if _is_op(event) and event.cpu_parent is None)


def _summed(
    events: list[FunctionEvent], kind_of: dict[FunctionEvent, str | None], order: tuple[str, ...]
) -> dict[str, float]:
    on_gpu, us = any(event.kernels for event in kind_of), Counter()
    for event, kind in kind_of.items():
        us[kind or REST] += _own(event, on_gpu)
    # Kernels that no op launched. On an H200, the times of ops add up to as much as 0.03% more than the device's total.
    us[REST] += max(0.0, total(events) - us.total())
    return {kind: us[kind] for kind in order if us[kind]}


def _ops(events: list[FunctionEvent]) -> list[FunctionEvent]:
    """The ops, in the order in which they began. Of two that began together, the one that ends first is within the
    other."""
    return sorted(filter(_is_op, events), key=lambda event: (event.time_range.start, -event.time_range.end))


def _is_op(event: FunctionEvent) -> bool:
    return event.device_type == DeviceType.CPU and not event.is_async and event.name not in _OVERHEAD


def _own(event: FunctionEvent, on_gpu: bool) -> float:
    if on_gpu:
        return sum(kernel.duration for kernel in event.kernels if kernel.name != event.name)
    return event.self_cpu_time_total


def _marked_as(event: FunctionEvent) -> str | None:
    return event.name.removeprefix(_MARK) if event.name.startswith(_MARK) else None


def _in_backward(event: FunctionEvent | None) -> bool:
    while event is not None:
        if event.name.startswith(_BACKWARD):
            return True
        event = event.cpu_parent
    return False
