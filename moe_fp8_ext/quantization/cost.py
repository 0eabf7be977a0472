"""How long forward and backward take with a recipe, from sizes alone: the model behind recipe "auto".

    time = 6 * multiplications / rate + (weight_bytes * weights + row_bytes * rows) / bandwidth + fixed

A multiplication of forward is two floating-point operations, and backward has two more products of the same size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

BYTES_PER_US = 4.27e6  # bandwidth of a large copy_ on an H200


class Work(NamedTuple):
    """The sizes that time depends on. They may be `torch.SymInt`."""

    multiplications: int  # of the forward products; backward has twice as many
    weights: int  # elements of the weights
    rows: int  # elements of rows: the inputs and outputs of products


class Cost(NamedTuple):
    """The constants of one recipe."""

    tflops: float  # rate of the products
    weight_bytes: float  # moved for each element of weights: read, cast, and the gradient written
    row_bytes: float  # moved for each element of rows, beside the products
    fixed_us: float  # launches and gaps between kernels, for any sizes

    def us(self, work: Work) -> float:
        """Microseconds of forward and backward."""
        moved = self.weight_bytes * work.weights + self.row_bytes * work.rows
        return 6e-6 / self.tflops * work.multiplications + moved / BYTES_PER_US + self.fixed_us


# Fitted by bench/fit_auto.py to bench/results/auto.json, which was measured on an H200. A recipe has one rate and one
# weight_bytes for both ops. A layer in BF16 moves more bytes of rows than one in FP8, whose casts also move tokens.
COSTS: dict[str, dict[str, Cost]] = {
    "layer": {
        "bf16": Cost(tflops=680, weight_bytes=5.14, row_bytes=16.4, fixed_us=481),
        "rowwise": Cost(tflops=1294, weight_bytes=9.29, row_bytes=10.4, fixed_us=269),
        "blockwise": Cost(tflops=1203, weight_bytes=7.83, row_bytes=11.7, fixed_us=379),
    },
    "grouped_mm": {
        "bf16": Cost(tflops=680, weight_bytes=5.14, row_bytes=3.67, fixed_us=21.7),
        "rowwise": Cost(tflops=1294, weight_bytes=9.29, row_bytes=8.75, fixed_us=53.4),
        "blockwise": Cost(tflops=1203, weight_bytes=7.83, row_bytes=6.23, fixed_us=94),
    },
}


def grouped_mm_work(rows: int, k: int, n: int, experts: int) -> Work:
    return Work(rows * k * n, experts * k * n, rows * (k + n))


def layer_work(slots: int, hidden: int, intermediate: int, experts: int, gated: bool) -> Work:
    """The work of `experts`. Its products have D and, in sum, 3 F features if gated: 2 F of gates and ups, and F."""
    features = (3 if gated else 2) * intermediate
    return Work(slots * hidden * features, experts * hidden * features, slots * (hidden + features))


def fastest(op: str, work: Work, recipes: Iterable[str]) -> str:
    """Returns the recipe that takes the least time, the first if several do.

    Formats that were not measured are taken for "rowwise".
    """
    costs = COSTS[op]
    best, best_us = None, None
    for name in recipes:
        us = costs.get(name, costs["rowwise"]).us(work)
        if best is None or us < best_us:
            best, best_us = name, us
    return best
