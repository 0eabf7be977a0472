"""The distribution of work units over workers in Hopper's products, without a GPU; see test_simt.py."""

from __future__ import annotations

import ctypes
import heapq

import pytest
import torch
from cache import CSRC
from simt_checks import ON_LINUX
from simt_library import RUNTIME, SIMT, compile_cxx
from torch import Tensor

pytestmark = ON_LINUX
Units = list[list[tuple[int, int]]]  # for each worker: (group, index of the unit in the group)

WORKERS = pytest.mark.parametrize("workers", [1, 3, 66, 96])
SIZES = [
    [1024] * 8,
    [30 * 32 // (i + 1) * 32 for i in range(40)],
    [0, 32, 90_016, 0, 64],
    [(7 * i) % 13 * 32 for i in range(200)],
    [0] * 1023 + [4096],
]
LONG = [31_457_280, 27_262_976, 23_068_672, 18_874_368, 2_883_584]  # exact costs would overflow the division


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    shared_object = tmp_path_factory.mktemp("tile_scheduler") / "tile_scheduler.so"
    flags = "-DSIMT_HOPPER", "-DUSE_ROCM", "-D__HIP__", f"-I{CSRC}", "-shared"
    compile_cxx(*flags, SIMT / "tile_scheduler.cpp", RUNTIME, "-ldl", "-o", shared_object, wave=32)
    library = ctypes.CDLL(str(shared_object))
    library.simt_schedule_units.restype = ctypes.c_char_p
    return library


def schedule(
    library: ctypes.CDLL,
    sizes: list[int],
    *problem: int,
    workers: int,
    max_units: int,
    counter: Tensor | None = None,
) -> Units:
    """Returns the units of every worker in order. problem: M, N, K, whether it is K-grouped, and whether scales are of
    blocks."""
    offs = torch.tensor(sizes).cumsum(0).int()
    out = torch.full((workers, max_units, 2), -2, dtype=torch.int32)
    offs_at, counter_at, out_at = (ctypes.c_void_p(None if t is None else t.data_ptr()) for t in (offs, counter, out))
    error = library.simt_schedule_units(offs_at, len(sizes), *problem, counter_at, workers, out_at, max_units)
    assert error is None
    units = [list(map(tuple, worker)) for worker in out.tolist()]
    return [worker[: worker.index((-1, 0))] for worker in units]


def count_units(rows: int, columns: int, blocks: bool) -> int:
    """Number of units of a group: pairs of 128 x 256 tiles or, with block scales, of 256 x 128 tiles."""
    multicast_a, width, rest = -(-columns // (256 if blocks else 512)), -(-columns // 256), rows % 256
    if blocks:
        return -(-rows // 256) * multicast_a
    return (rows // 256 + (rest > 128)) * width + (multicast_a if 0 < rest <= 128 else 0)


def unit_cost(size: int) -> int:
    """Cost of a unit: steps along K, and 14 for storing a tile, rounded to five bits."""
    cost, step = size // 32 + 14, 1
    while cost // 32 >= step:
        step *= 2
    return (cost + step // 2) // step * step


@WORKERS
@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=len)
def test_longest_first_is_a_queue_of_workers(library, sizes, squares, workers):
    m, n = 520, 700
    by_size = sorted(range(len(sizes)), key=lambda e: -sizes[e])
    queue, want = [(0, w) for w in range(workers)], [[] for _ in range(workers)]
    for e in by_size:
        for index in range(count_units(m, n, squares)):
            free_at, worker = heapq.heappop(queue)
            want[worker].append((e, index))
            heapq.heappush(queue, (free_at + unit_cost(sizes[e]), worker))
    max_units = max(map(len, want)) + 1
    assert schedule(library, sizes, m, n, sum(sizes), True, squares, workers=workers, max_units=max_units) == want


@pytest.mark.parametrize("n", [700, 2000, 60_000])
@pytest.mark.parametrize("sizes", [[2**20, 2**18, 2**18 + 96, 5 * 2**15, 32], LONG], ids=["million", "long"])
def test_longest_first_with_coarse_costs(library, sizes, n):
    """Every unit is computed once. No worker has more than the mean cost and the cost of one unit."""
    workers, units = 66, count_units(520, n, False)
    got = schedule(library, sizes, 520, n, sum(sizes), True, False, workers=workers, max_units=5 * units + 1)
    assert sorted(u for worker in got for u in worker) == [(e, i) for e in range(5) for i in range(units)]
    costs = [sum(unit_cost(sizes[e]) for e, _ in worker) for worker in got]
    assert max(costs) <= 1.01 * sum(costs) / workers + max(sizes) // 32 + 14


M_GROUPED = pytest.mark.parametrize("sizes", [*SIZES, [128, 129, 64, 65, 255, 256, 257, 1, 385, 0] * 9], ids=len)


@WORKERS
@pytest.mark.parametrize("blocks", [False, True])
@M_GROUPED
def test_static_rounds(library, sizes, blocks, workers):
    counts = [count_units(size, 2000, blocks) for size in sizes]
    max_units = sum(counts) // workers + 2
    got = schedule(library, sizes, sum(sizes), 2000, 256, False, blocks, workers=workers, max_units=max_units)
    everything = [(e, i) for e, count in enumerate(counts) for i in range(count)]
    assert sorted(u for worker in got for u in worker) == everything
    assert max(map(len, got)) - min(map(len, got)) <= 1
    assert all(sorted(worker) == worker for worker in got)


@WORKERS
@pytest.mark.parametrize("blocks", [False, True])
@M_GROUPED
def test_dynamic_units(library, sizes, blocks, workers):
    """The counter ends at the number of units. A worker does not draw its first unit, but draws once in vain at the
    end."""
    counter = torch.zeros(1, dtype=torch.int32)
    everything = [(e, i) for e, size in enumerate(sizes) for i in range(count_units(size, 2000, blocks))]
    options = {"workers": workers, "max_units": len(everything) + 1, "counter": counter}
    got = schedule(library, sizes, sum(sizes), 2000, 256, False, blocks, **options)
    assert sorted(u for worker in got for u in worker) == everything
    assert [worker[0] for worker in got if worker] == everything[:workers]
    assert all(sorted(worker) == worker for worker in got)
    assert counter.item() == len(everything)
