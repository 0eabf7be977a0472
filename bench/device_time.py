"""The time that a device works for each op, from a profile of `torch.profiler`.

Kernels of several streams run at once. Each instant is divided equally among the kernels that run in it, so the times
of all ops add up to the time in which any kernel ran. On a CPU, which has no kernels, the time of an op is the op's
own, without the ops that it calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

# The profiler's own work. Its events have numbers that are also numbers of ops.
_OVERHEAD = {"Activity Buffer Request", "Buffer Flush", "Command Buffer Full", "Instrumentation", "Resource"}
_USER_SCOPE = 7  # the scope of `record_function`
IDLE = "no kernel"
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


def by_kind(found: Profile, kind_of: Mapping[FunctionEvent, str | None], rest: str) -> Counter[str]:
    """Microseconds of each kind of work. Ops without a kind, and kernels that no op launched, are the `rest`."""
    us_of, others = time_of_ops(found)
    us = Counter({rest: others})
    for op, time in us_of.items():
        us[kind_of[op] or rest] += time
    return us


def longest_ops(
    found: Profile, kind_of: Mapping[FunctionEvent, str | None], rest: str, number: int
) -> dict[str, dict[str, float]]:
    """Microseconds of the ops that take most of each kind of work."""
    us: dict[str, Counter[str]] = {}
    for op, time in time_of_ops(found)[0].items():
        us.setdefault(kind_of[op] or rest, Counter())[op.name] += time
    return {kind: dict(ops.most_common(number)) for kind, ops in us.items()}


def of_step(us: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Milliseconds of a step by kind of work, the longest first.

    Without a kernel is the GPU for the rest of `seconds`, the time of a step without the profiler, which slows down the
    host. This rest is negative if the kernels of the profiled step took longer than the other steps.
    """
    ms = Counter({kind: time / 1000 for kind, time in us.items()})
    ms[IDLE] = seconds * 1000 - ms.total()
    return {kind: round(time, 2) for kind, time in ms.most_common()}


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
