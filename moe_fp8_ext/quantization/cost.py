"""How long a call takes with a recipe, from sizes alone: the model behind recipe "auto".

    gpu = 2 * multiplications / rate + (weight_bytes * weights + row_bytes * rows) / bandwidth + fixed
    time = max(gpu, host)

A multiplication is two floating-point operations. Backward has two more products of the size of forward's. The host
launches the kernels: at small sizes the GPU waits for it, and BF16 takes the host longer than FP8.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

BYTES_PER_US = 4.27e6  # bandwidth of a large copy_ on an H200
MANY_ROWS = 1 << 20  # stands for a symbolic number of rows


class Work(NamedTuple):
    """The sizes that time depends on. They may be `torch.SymInt` under torch.compile."""

    multiplications: int  # of the products, including the ones of backward
    weights: int  # elements of the weights
    rows: int  # elements of rows: the inputs and outputs of products


class Cost(NamedTuple):
    """The constants of one recipe."""

    tflops: float  # rate of the products
    weight_bytes: float  # moved for each element of weights: read, cast, and with backward the gradient written
    row_bytes: float  # moved for each element of rows, beside the products
    fixed_us: float  # starts of kernels and gaps between them, for any sizes
    host_us: float  # of the host, which works while the GPU does, for any sizes

    def gpu_us(self, work: Work) -> float:
        """Microseconds of the GPU."""
        moved = self.weight_bytes * work.weights + self.row_bytes * work.rows
        return 2e-6 / self.tflops * work.multiplications + moved / BYTES_PER_US + self.fixed_us

    def us(self, work: Work) -> float:
        """Microseconds of the GPU or of the host, whichever takes longer."""
        gpu_us = self.gpu_us(work)
        return self.host_us if gpu_us < self.host_us else gpu_us


# Fitted by bench/fit_auto.py to bench/results/auto.json and auto_forward.json, which were measured on H200s. With a
# backward, a recipe has one rate and one weight_bytes for both ops. A layer in BF16 moves more bytes of rows than one
# in FP8, whose casts also move tokens.
COSTS: dict[str, dict[str, Cost]] = {
    "layer": {
        "bf16": Cost(tflops=697, weight_bytes=5.9, row_bytes=23.1, fixed_us=286, host_us=1814),
        "rowwise": Cost(tflops=1627, weight_bytes=11.5, row_bytes=13.3, fixed_us=68.9, host_us=1360),
        "blockwise": Cost(tflops=1367, weight_bytes=8.33, row_bytes=14.9, fixed_us=286, host_us=1258),
    },
    "grouped_mm": {
        "bf16": Cost(tflops=697, weight_bytes=5.9, row_bytes=7.81, fixed_us=11, host_us=1014),
        "rowwise": Cost(tflops=1627, weight_bytes=11.5, row_bytes=11, fixed_us=23.1, host_us=947),
        "blockwise": Cost(tflops=1367, weight_bytes=8.33, row_bytes=4.44, fixed_us=200, host_us=832),
    },
    "layer forward": {
        "bf16": Cost(tflops=700, weight_bytes=1.273, row_bytes=7.674, fixed_us=174, host_us=505),
        "rowwise": Cost(tflops=1308, weight_bytes=4.182, row_bytes=2.571, fixed_us=145, host_us=413),
        "blockwise": Cost(tflops=1411, weight_bytes=3.506, row_bytes=5.751, fixed_us=123, host_us=445),
    },
}


def grouped_mm_work(rows: int, k: int, n: int, experts: int) -> Work:
    """The work of `grouped_mm`, forward and backward."""
    rows = _number(rows)
    return Work(3 * rows * k * n, experts * k * n, rows * (k + n))


def layer_work(slots: int, hidden: int, intermediate: int, experts: int, gated: bool, backward: bool = True) -> Work:
    """The work of `experts`. Its products have D and, in sum, 3 F features if gated: 2 F of gates and ups, and F."""
    slots, features, products = _number(slots), (3 if gated else 2) * intermediate, 3 if backward else 1
    return Work(products * slots * hidden * features, experts * hidden * features, slots * (hidden + features))


def _number(rows: int) -> int:
    """Returns the number of rows, or MANY_ROWS if torch.export has made it symbolic.

    A program of torch.export computes any number of rows with one recipe. With strict=True, Dynamo hides symbols: torch
    then raises "Constraints violated" if the choice changes within the range.
    """
    return MANY_ROWS if isinstance(rows, torch.SymInt) and torch.compiler.is_exporting() else rows


def fastest(costs: dict[str, Cost], work: Work, recipes: Iterable[str]) -> str:
    """Returns the recipe that takes the least time, the first if several do.

    Formats that were not measured are taken for "rowwise".
    """
    best, best_us = None, None
    for name in recipes:
        us = costs.get(name, costs["rowwise"]).us(work)
        if best is None or us < best_us:
            best, best_us = name, us
    return best
