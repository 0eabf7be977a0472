"""Test configuration. Every output is filled with 0xFF before its kernel runs; device tests run on CPU and GPU."""

from __future__ import annotations

import gc
import os

os.environ["MOE_FP8_POISON"] = "1"  # the extension fills outputs with 0xFF, so a byte that no kernel writes shows
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # idle threads must not spin on cores that the emulation needs
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a pool of compilers would import torch once more

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
import torch.distributed as dist
from helpers import GPUS, NO_GPU, NO_SECOND_GPU, seed_generators
from simt_checks import WAVES
from simt_kernels import Waves
from simt_library import build

hypothesis.settings.register_profile(
    "moe_fp8",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=30,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("moe_fp8")

LEFT_OUT = pytest.StashKey[int]()  # how many tests need a GPU that this machine lacks


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "large: tensors of more than 2^31 elements, on a GPU with the memory for them")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects tests that need a missing GPU: to skip thousands of them one by one takes minutes."""
    missing = [mark.mark for mark in (NO_GPU, NO_SECOND_GPU) if mark.args[0]]
    kept: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        kept[all(mark not in missing for mark in item.iter_markers("skipif"))].append(item)
    config.hook.pytest_deselected(items=kept[False])
    config.stash[LEFT_OUT] = len(kept[False])
    items[:] = kept[True]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # a process of pytest-xdist; all of them leave out the same tests
        session.config.workeroutput["left out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left out", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if count := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(f"{count} tests left out, which need {'two GPUs' if GPUS else 'a GPU'}")


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # modules and tests live to the end: the garbage collector can ignore them


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NO_GPU)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[pytest.param("cuda", marks=NO_GPU)])
def gpu(request: pytest.FixtureRequest) -> str:
    """For tests of streams, graphs and large memory, which only a GPU has."""
    return request.param


@pytest.fixture(params=[pytest.param("cuda:1", marks=NO_SECOND_GPU)])
def second_gpu(request: pytest.FixtureRequest) -> str:
    """A GPU that is not the current one."""
    return request.param


@pytest.fixture
def big_gpu(gpu: str) -> str:
    """A GPU with memory for a tensor of more than 2^31 elements, its results and the reference's temporaries."""
    needed = 64 << 30
    free = torch.cuda.mem_get_info()[0]
    if free < needed:
        pytest.skip(f"{free >> 30} GiB of GPU memory free, {needed >> 30} GiB needed")
    yield gpu
    torch.cuda.empty_cache()


@pytest.fixture
def where(device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device of a layer that can be captured: a GPU, or a CPU with a stand-in for CUDA graphs."""
    from stand_in_graphs import stand_in_for_graphs  # imported here, because it loads the package

    if device == "cpu":
        stand_in_for_graphs(monkeypatch)
    return device


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows by one with every call that replays the graph of a layer's forward."""
    from stand_in_graphs import replays_of_graphs  # imported here, because it loads the package

    return replays_of_graphs(monkeypatch)


@pytest.fixture
def world_of_one() -> Iterator[None]:
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch has no gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """More threads spend their time on being woken, for models as small as those of tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def registered(one_thread: None) -> None:
    """The implementations of experts for models of Transformers."""
    from moe_fp8_ext.integrations.transformers import register  # imported here, because it loads the package

    register()


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contents of offs, indices and ids are not checked on a CPU either, so that it shows what a GPU does."""
    monkeypatch.setattr("moe_fp8_ext.ops.checks.contents", lambda x: None)


@pytest.fixture(autouse=True)
def seed() -> None:
    seed_generators(0)


@pytest.fixture(scope="session")
def libraries() -> dict[int, Path]:
    """The kernels, built for the emulation at each wave size."""
    return {wave: build(chip) for wave, chip in zip(WAVES, ("gfx1201", "gfx942"), strict=True)}


@pytest.fixture
def kernels(libraries: dict[int, Path]) -> Waves:
    return Waves(*libraries.values())


@pytest.fixture(scope="session")
def gemm_with_scales() -> Path:
    """The GEMM, built for the emulation of gfx950, whose MFMA takes scales."""
    return build("gfx950")


@pytest.fixture(scope="session")
def gemm_of_hopper() -> Path:
    """The GEMM for Hopper, built for its emulation."""
    return build("sm_90a")


@pytest.fixture
def gemms(libraries: dict[int, Path], gemm_with_scales: Path) -> Waves:
    return Waves(*libraries.values(), gemm_with_scales)
