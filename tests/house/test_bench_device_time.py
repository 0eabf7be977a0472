"""How the bench divides the time of a GPU among ops and parts of a model, with invented events."""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace

import pytest
from helpers import ROOT
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

# Microseconds of kernels: the op that launched each, its begin and its end. Rows of a weight are cast next to columns,
# from 10 to 20. The product starts before the cast of columns ends. Op 9 is none of the profile.
KERNELS = [(1, 10, 20), (1, 10, 22), (2, 21, 31), (3, 40, 41), (9, 50, 52)]


@pytest.fixture
def device_time(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "bench")
    return importlib.import_module("device_time")


def op(number: int, name: str, start: float, end: float, **options: object) -> FunctionEvent:
    return FunctionEvent(id=number, name=name, thread=1, start_us=start, end_us=end, **options)


def recorded(op: int, start: float, end: float, name: str = "kernel", device: DeviceType = DeviceType.CUDA) -> object:
    """An event as the profiler records it."""
    values = dict(name=name, device_type=device, linked_correlation_id=op, start_ns=start * 1000, end_ns=end * 1000)
    return SimpleNamespace(**{key: lambda value=value: value for key, value in values.items()})


@pytest.fixture
def profile(device_time: ModuleType, monkeypatch: pytest.MonkeyPatch) -> object:
    """A step of experts and of an optimizer, whose marks are there on the GPU too."""
    mark = op(10, "part of a step: experts", 0, 5, scope=7)
    ops = [mark, op(1, "moe_fp8::quantize_weight", 1, 2), op(1, "cudaLaunchKernel", 1.2, 1.4)]
    ops += [op(2, "moe_fp8::scaled_grouped_mm", 3, 4), op(3, "aten::add_", 6, 7)]
    for parent, child in ((0, 1), (1, 2), (0, 3)):
        ops[child].cpu_parent = ops[parent]
    for launched in (ops[1], ops[1], ops[3], ops[4]):
        launched.append_kernel("kernel", 0, 1)
    events = [recorded(*kernel) for kernel in KERNELS]
    events += [recorded(10, 10, 31, mark.name), recorded(0, 1, 2, "moe_fp8::quantize_weight", DeviceType.CPU)]
    return device_time.Profile(ops, device_time.kernels_of(events, ops))


def test_kernels_that_run_at_once_divide_the_time(device_time):
    """The shares are those of a count of every instant. They add up to the union of the intervals."""
    intervals = [(5, 9), (0, 4), (0, 4), (2, 4), (6, 7), (7, 7), (0, 1)]
    want = [0.0] * len(intervals)
    for instant in range(10):
        running = [i for i, (start, end) in enumerate(intervals) if start <= instant < end]
        for i in running:
            want[i] += 1 / len(running)
    assert device_time.divided(intervals) == pytest.approx(want)
    assert sum(want) == pytest.approx(4 + 4)
    assert device_time.divided([]) == []


def test_time_of_ops(device_time, profile):
    us, others = device_time.time_of_ops(profile)
    # Two kernels for 10, the second one alone for 1, and for 1 next to the product.
    want = {"moe_fp8::quantize_weight": 11.5, "moe_fp8::scaled_grouped_mm": 9.5, "aten::add_": 1}
    assert {op.name: time for op, time in us.items() if time} == pytest.approx(want)
    assert others == 2  # of op 9


def test_parts_add_up_to_the_time_in_which_a_kernel_runs(profile):
    waterfall = importlib.import_module("waterfall")
    us = waterfall.microseconds(profile)
    assert us == pytest.approx({"experts": 21, "rest": 3})
    assert sum(us.values()) == pytest.approx(21 + 1 + 2)
    of_experts = waterfall.ops_of(profile, 2)["experts"]
    assert of_experts == pytest.approx({"moe_fp8::quantize_weight": 11.5, "moe_fp8::scaled_grouped_mm": 9.5})
    kinds = {"casts": ("moe_fp8::quantize",), "experts": ("experts",)}
    assert waterfall.by_op(profile, kinds) == pytest.approx({"casts": 11.5, "experts": 9.5, "rest": 3})


def test_milliseconds_of_a_step(device_time, profile):
    """Kernels that no op launched are in the rest. The time of a step without the profiler says how long none ran."""
    kinds = {op: "products" if "scaled" in op.name else None for op in profile.ops}
    us = device_time.by_kind(profile, kinds, "rest")
    assert us == pytest.approx({"products": 9.5, "rest": 11.5 + 1 + 2})
    us = {"products": 3000, "rest": 500}
    assert device_time.of_step(us, 0.007) == {"no kernel": 3.5, "products": 3, "rest": 0.5}
    assert device_time.of_step(us, 0.003)["no kernel"] == -0.5
    longest = device_time.longest_ops(profile, kinds, "rest", 1)
    assert longest == {"products": {"moe_fp8::scaled_grouped_mm": 9.5}, "rest": {"moe_fp8::quantize_weight": 11.5}}


def test_ops_on_a_cpu(device_time, profile):
    """Without kernels, an op counts without the ops that it calls."""
    outer, inner = profile.ops[0], profile.ops[1]
    outer.append_cpu_child(inner)
    us, others = device_time.time_of_ops(device_time.Profile([outer, inner], []))
    assert us == {outer: 4, inner: 1} and others == 0


def test_idle_time_is_what_is_left_even_if_negative(device_time):
    pytest.importorskip("tabulate", reason="the bench's dependencies are not installed")
    whole_tables = importlib.import_module("whole_tables")
    row = {"us": {"ours": {"experts": 3000.0, "rest": 500.0}}, "seconds": {"ours": [0.003, 0.0031, 0.002]}}
    assert whole_tables.parts(row, "ours") == {"experts": 3, "rest": 0.5, "idle": -0.5}


def test_results_say_how_they_count(device_time):
    """Results of before count kernels that ran at once twice."""
    assert "divided equally" in device_time.said({"commit": "a"} | device_time.COUNTED)
    assert "more than the step" in " ".join(device_time.said({"commit": "a"}).split())
