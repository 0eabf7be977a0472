"""Fits the cost model of recipe "auto" (moe_fp8_ext/quantization/cost.py) to measured times, and shows what it chooses.

    python bench/fit_auto.py                 the points of bench/results/auto.json by the constants in cost.py
    python bench/fit_auto.py --fit           constants fitted to these points, to paste into cost.py

Each point has an op ("layer" or "grouped_mm"), its sizes as `for_layer` and `for_grouped_mm` take them (layers are
gated), and the microseconds of forward and backward by recipe. bench/auto_sweep.py measures such points.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy
from tabulate import tabulate

from moe_fp8_ext.quantization.cost import BYTES_PER_US, COSTS, Cost, Work, grouped_mm_work, layer_work
from moe_fp8_ext.quantization.recipe import RECIPES

POINTS = Path(__file__).parent / "results" / "auto.json"
CHOICES = "bf16", "rowwise", "blockwise"


def work_of(point: dict) -> Work:
    return layer_work(**point["sizes"], gated=True) if point["op"] == "layer" else grouped_mm_work(**point["sizes"])


def chosen(point: dict) -> str:
    auto, sizes = RECIPES["auto"], point["sizes"]
    return (auto.for_layer(**sizes, gated=True) if point["op"] == "layer" else auto.for_grouped_mm(**sizes)).name


def loss(point: dict) -> float:
    """How much longer the choice of "auto" takes than the fastest recipe, 0 if it is the fastest."""
    return point["us"][chosen(point)] / min(point["us"].values()) - 1


def fit(points: list[dict]) -> dict[str, dict[str, Cost]]:
    """Non-negative least squares of relative errors. A recipe has one rate and one weight_bytes for both ops."""
    columns: dict[tuple[str, ...], int] = {}
    column = lambda *key: columns.setdefault(key, len(columns))  # noqa: E731
    equations = []  # sum of coefficients * unknowns = 1
    for point in points:
        op, work = point["op"], work_of(point)
        for recipe, us in point["us"].items():
            terms = {
                column("us of a multiplication", recipe): 6e-6 * work.multiplications,
                column("weight_bytes", recipe): work.weights / BYTES_PER_US,
                column("row_bytes", op, recipe): work.rows / BYTES_PER_US,
                column("fixed_us", op, recipe): 1.0,
            }
            equations.append({i: value / us for i, value in terms.items()})
    matrix = numpy.zeros((len(equations), len(columns)))
    for row, terms in zip(matrix, equations, strict=True):
        row[list(terms)] = list(terms.values())
    scale = numpy.linalg.norm(matrix, axis=0)
    matrix /= scale
    gram, right, x = matrix.T @ matrix, matrix.sum(0), numpy.zeros(len(columns))
    for _ in range(20_000):  # coordinate descent
        for i in range(len(x)):
            x[i] = max(0.0, x[i] + (right[i] - gram[i] @ x) / gram[i, i])
    found = dict(zip(columns, (float(f"{value:.3g}") for value in x / scale), strict=True))
    return {
        op: {
            recipe: Cost(
                round(1 / found["us of a multiplication", recipe]),
                found["weight_bytes", recipe],
                found["row_bytes", op, recipe],
                found["fixed_us", op, recipe],
            )
            for recipe in CHOICES
        }
        for op in COSTS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=Path, default=POINTS)
    parser.add_argument("--fit", action="store_true", help="print fitted constants")
    arguments = parser.parse_args()
    points = json.loads(arguments.points.read_text())["points"]
    if arguments.fit:
        for op, costs in fit(points).items():
            print(op, *(f"    {recipe}: {cost}" for recipe, cost in costs.items()), sep="\n")
        return
    body = []
    for point in points:
        costs, work = COSTS[point["op"]], work_of(point)
        cells = (f"{us:,.0f} ({costs[recipe].us(work) / us - 1:+.0%})" for recipe, us in point["us"].items())
        body.append((point["op"], [*point["sizes"].values()], *cells, chosen(point), f"{loss(point):.1%}"))
    print(tabulate(body, ("op", "sizes", *(f"{name}, us (model)" for name in CHOICES), "auto", "loss")))
    print(f"largest loss {max(map(loss, points)):.1%}")


if __name__ == "__main__":
    main()
