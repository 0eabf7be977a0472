"""Who takes which units of Hopper's products, without a GPU: see test_simt.py."""

from __future__ import annotations

import ctypes
import heapq

import pytest
import torch
from cache import CSRC
from simt_checks import ON_LINUX
from simt_library import SIMT, compile_cxx
from torch import Tensor

pytestmark = ON_LINUX
Taken = list[list[tuple[int, int]]]  # of every worker: groups, and numbers in them

WORKERS = pytest.mark.parametrize("workers", [1, 3, 66, 96])
SIZES = [
    [1024] * 8,
    [30 * 32 // (i + 1) * 32 for i in range(40)],
    [0, 32, 90_016, 0, 64],
    [(7 * i) % 13 * 32 for i in range(200)],
    [0] * 1023 + [4096],
]
LONG = [31_457_280, 27_262_976, 23_068_672, 18_874_368, 2_883_584]  # where exact costs would not be divided exactly


@pytest.fixture(scope="module")
def deal(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("deal") / "deal.so"
    how = "-DSIMT_HOPPER", "-DUSE_ROCM", "-D__HIP__", f"-I{CSRC}", "-shared"
    compile_cxx(*how, SIMT / "deal.cpp", "-ldl", "-o", library, wave=32)
    loaded = ctypes.CDLL(str(library))
    loaded.simt_deal.restype = ctypes.c_char_p
    return loaded


def taken(
    deal: ctypes.CDLL, sizes: list[int], *how: int, workers: int, most: int, counter: Tensor | None = None
) -> Taken:
    """how: M, N, K, whether groups are of the sum, and whether scales are of blocks."""
    offs = torch.tensor(sizes).cumsum(0).int()
    out = torch.full((workers, most, 2), -2, dtype=torch.int32)
    pointers = (ctypes.c_void_p(None if t is None else t.data_ptr()) for t in (offs, counter, out))
    of_offs, of_counter, of_out = pointers
    assert deal.simt_deal(of_offs, len(sizes), *how, of_counter, workers, of_out, most) is None
    units = [list(map(tuple, of_worker)) for of_worker in out.tolist()]
    return [of_worker[: of_worker.index((-1, 0))] for of_worker in units]


def units_of(rows: int, columns: int, blocks: bool) -> int:
    """Of a group: pairs of tiles of 128 x 256, or of blocks of 256 x 128."""
    beside, across, left = -(-columns // (256 if blocks else 512)), -(-columns // 256), rows % 256
    if blocks:
        return -(-rows // 256) * beside
    return (rows // 256 + (left > 128)) * across + (beside if 0 < left <= 128 else 0)


def cost_of(size: int) -> int:
    """Steps of the sum and 14 for storing a tile, to five bits."""
    cost, step = size // 32 + 14, 1
    while cost // 32 >= step:
        step *= 2
    return (cost + step // 2) // step * step


@WORKERS
@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=len)
def test_units_of_sums_go_to_who_is_done_first(deal, sizes, squares, workers):
    """As a queue of workers would have it."""
    m, n = 520, 700
    by_size = sorted(range(len(sizes)), key=lambda e: -sizes[e])
    done, want = [(0, w) for w in range(workers)], [[] for _ in range(workers)]
    for e in by_size:
        for number in range(units_of(m, n, squares)):
            load, worker = heapq.heappop(done)
            want[worker].append((e, number))
            heapq.heappush(done, (load + cost_of(sizes[e]), worker))
    most = max(map(len, want)) + 1
    assert taken(deal, sizes, m, n, sum(sizes), True, squares, workers=workers, most=most) == want


@pytest.mark.parametrize("n", [700, 2000, 60_000])
@pytest.mark.parametrize("sizes", [[2**20, 2**18, 2**18 + 96, 5 * 2**15, 32], LONG], ids=["million", "long"])
def test_units_of_long_sums(deal, sizes, n):
    """Costs are coarser: every unit is taken once, and nobody does more than the mean and the last unit."""
    workers, units = 66, units_of(520, n, False)
    got = taken(deal, sizes, 520, n, sum(sizes), True, False, workers=workers, most=5 * units + 1)
    assert sorted(u for of_worker in got for u in of_worker) == [(e, i) for e in range(5) for i in range(units)]
    costs = [sum(cost_of(sizes[e]) for e, _ in of_worker) for of_worker in got]
    assert max(costs) <= 1.01 * sum(costs) / workers + max(sizes) // 32 + 14


OF_ROWS = pytest.mark.parametrize("sizes", [*SIZES, [128, 129, 64, 65, 255, 256, 257, 1, 385, 0] * 9], ids=len)


@WORKERS
@pytest.mark.parametrize("blocks", [False, True])
@OF_ROWS
def test_units_of_rows_go_round(deal, sizes, blocks, workers):
    of_groups = [units_of(size, 2000, blocks) for size in sizes]
    most = sum(of_groups) // workers + 2
    got = taken(deal, sizes, sum(sizes), 2000, 256, False, blocks, workers=workers, most=most)
    everything = [(e, i) for e, count in enumerate(of_groups) for i in range(count)]
    assert sorted(u for of_worker in got for u in of_worker) == everything
    assert max(map(len, got)) - min(map(len, got)) <= 1
    assert all(sorted(of_worker) == of_worker for of_worker in got)


@WORKERS
@pytest.mark.parametrize("blocks", [False, True])
@OF_ROWS
def test_units_of_rows_by_a_counter(deal, sizes, blocks, workers):
    """In the end it is the number of units: each worker's first one was not drawn, but one behind the last was."""
    counter = torch.zeros(1, dtype=torch.int32)
    everything = [(e, i) for e, size in enumerate(sizes) for i in range(units_of(size, 2000, blocks))]
    how = {"workers": workers, "most": len(everything) + 1, "counter": counter}
    got = taken(deal, sizes, sum(sizes), 2000, 256, False, blocks, **how)
    assert sorted(u for of_worker in got for u in of_worker) == everything
    assert [of_worker[0] for of_worker in got if of_worker] == everything[:workers]
    assert all(sorted(of_worker) == of_worker for of_worker in got)
    assert counter.item() == len(everything)
