"""The time that a device works for each op, from a profile of `torch.profiler`.

Kernels of several streams run at once. Each instant is divided equally among the kernels that run in it, so the times
of all ops add up to the time in which any kernel ran. On a CPU, which has no kernels, the time of an op is the op's
own, without the ops that it calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

# The profiler's own work. Its events have numbers that are also numbers of ops.
_OVERHEAD = {"Activity Buffer Request", "Buffer Flush", "Command Buffer Full", "Instrumentation", "Resource"}
_USER_SCOPE = 7  # the scope of `record_function`
COUNTED = {"overlap": "divided"}  # in results whose times were counted as this module does


class Kernel(NamedTuple):
    """What a device ran: a kernel, a copy or a fill."""

    op: int  # the id of the op that launched it
    start: float  # microseconds
    end: float


class Profile(NamedTuple):
    """Ops in the order in which they began, and kernels."""

    ops: list[FunctionEvent]
    kernels: list[Kernel]


def profiled(call: Callable[[], object], device: torch.device) -> Profile:
    """A profile of a call."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as found:
        call()
        if on_gpu:
            torch.cuda.synchronize()
    # Of two ops that began together, the one that ends first is within the other.
    ops = sorted(filter(_is_op, found.events()), key=lambda event: (event.time_range.start, -event.time_range.end))
    return Profile(ops, kernels_of(found.profiler.kineto_results.events(), ops))


def kernels_of(events: Iterable[object], ops: list[FunctionEvent]) -> list[Kernel]:
    """The kernels among the events that the profiler recorded. It shows marks on the device too, from the first to the
    last kernel of a mark."""
    marks = {op.name for op in ops if op.scope == _USER_SCOPE}
    return [
        Kernel(event.linked_correlation_id(), event.start_ns() / 1e3, event.end_ns() / 1e3)
        for event in events
        if event.device_type() != DeviceType.CPU and event.name() not in marks
    ]


def time_of_ops(found: Profile) -> tuple[dict[FunctionEvent, float], float]:
    """Microseconds of each op, and of the kernels that no op launched."""
    if not found.kernels:
        return {op: op.self_cpu_time_total for op in found.ops}, 0.0
    us, others = dict.fromkeys(found.ops, 0.0), 0.0
    # Calls of the CUDA runtime are among the ops, and have numbers of their own. The profiler gives them no kernels.
    by_id = {op.id: op for op in found.ops if op.kernels}
    for kernel, time in zip(found.kernels, divided([kernel[1:] for kernel in found.kernels]), strict=True):
        if op := by_id.get(kernel.op):
            us[op] += time
        else:
            others += time
    return us, others


def divided(intervals: list[tuple[float, float]]) -> list[float]:
    """The share of each interval in their union: each instant is divided equally among the intervals that hold it."""
    shares, running, before = [0.0] * len(intervals), set(), 0.0
    bounds = sorted((time, i) for i, interval in enumerate(intervals) for time in interval)
    for time, i in bounds:
        for other in running:
            shares[other] += (time - before) / len(running)
        running ^= {i}
        before = time
    return shares


def said(result: dict) -> str:
    """How the times of a result count kernels that ran at once. Older results have no `COUNTED`."""
    if COUNTED.items() <= result.items():
        return "Where several kernels run at once, each instant is divided equally among them."
    return (
        "Kernels of several streams that ran at once are counted with all of their time each, so the parts can be more "
        "than the step."
    )


def _is_op(event: FunctionEvent) -> bool:
    return event.device_type == DeviceType.CPU and not event.is_async and event.name not in _OVERHEAD
