"""Clocks: CUDA-graph replays for kernels, CUDA events for GEMMs, the host's own time, and plain loops on a CPU."""

from __future__ import annotations

import itertools
import math
import time
import timeit
from collections.abc import Callable, Sequence
from statistics import median

import torch

Call = Callable[[], object]

WARM_SECONDS = 0.1  # an idle GPU lowers its clocks
ROTATE_BYTES = 1 << 30  # several times the L2 of any GPU so far
TURNS_SECONDS = 0.6  # total time of calls that take turns; longer ones are still repeated LEAST_TURNS times
LEAST_TURNS = 7
HOST_BATCHES, HOST_BATCH_US = 7, 20_000


def input_sets(bytes_per_call: int) -> int:
    """The number of input sets to rotate through, so that no call finds its data in the L2."""
    return max(2, math.ceil(ROTATE_BYTES / bytes_per_call))


def graph_us(calls: Sequence[Call], replays: int) -> float:
    """Microseconds of one call. A graph holds one call per set of inputs and is replayed back to back; the median
    counts."""
    for _ in range(3):  # loads modules, and lets a peer compile and tune itself
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [call() for call in calls]  # kept alive; otherwise every call would write to the same block
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    warm = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < warm:
        graph.replay()
        torch.cuda.synchronize()
    for mark in marks[:-1]:
        mark.record()
        graph.replay()
    marks[-1].record()
    torch.cuda.synchronize()
    del outputs
    return median(a.elapsed_time(b) for a, b in itertools.pairwise(marks)) * 1e3 / len(calls)


def eager_us(calls: dict[str, Call], repeats: int, device: torch.device) -> dict[str, float]:
    """Median microseconds of each call. The calls take turns, so that clocks and heat are the same for all."""
    for call in [*calls.values()] * 2:
        call()
    clock = _events if device.type == "cuda" else _wall
    one_turn = sum(read() for read in [clock(call) for call in calls.values()])
    repeats = min(repeats, max(LEAST_TURNS, int(TURNS_SECONDS * 1e6 / one_turn)))
    samples = [{name: clock(call) for name, call in calls.items()} for _ in range(repeats)]
    return {name: median(sample[name]() for sample in samples) for name in calls}


def _events(call: Call) -> Callable[[], float]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()

    def read() -> float:  # called later: waiting here would leave the GPU idle between calls
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    return read


def _wall(call: Call) -> Callable[[], float]:
    start = time.perf_counter()
    call()
    elapsed = (time.perf_counter() - start) * 1e6
    return lambda: elapsed


def host_us(call: Call, device_us: float, device: torch.device) -> tuple[float, float]:
    """Microseconds that the CPU spends to issue one eager call, and one torch.relu, which has one output and one
    launch, the least of any torch op. Batches of both take turns, because a CPU's speed changes. Batches are so short
    that the launch queue never fills, because a full queue would make the CPU wait for the GPU."""
    x = torch.empty(1 << 20, device=device)
    calls = int(min(200, max(10, HOST_BATCH_US / device_us)))  # fewer calls would be slow, like the first ones
    timers = [timeit.Timer(c, setup=torch.cuda.synchronize) for c in (call, lambda: torch.relu(x))]
    batches = [[timer.timeit(calls) for timer in timers] for _ in range(HOST_BATCHES)]
    torch.cuda.synchronize()
    of_call, of_relu = (median(times) / calls * 1e6 for times in zip(*batches, strict=True))
    return of_call, of_relu


def copy_gbps(device: torch.device, repeats: int) -> float:
    """Bandwidth of a large eager copy_, bytes read plus bytes written. Memory-bound ops are compared with it."""
    size = min(4 << 30, torch.cuda.mem_get_info()[0] // 4) if device.type == "cuda" else 256 << 20
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    us = eager_us({"copy": lambda: target.copy_(source)}, repeats, device)["copy"]
    return 2 * source.nbytes / us / 1e3
