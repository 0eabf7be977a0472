"""Fits the cost model of recipe "auto" (moe_fp8_ext/quantization/cost.py) to measured times, and shows its choices.

    python bench/fit_auto.py                 the points of auto.json and auto_forward.json by the constants in cost.py
    python bench/fit_auto.py --fit           constants fitted to these points, to paste into cost.py
    python bench/fit_auto.py --held-out      what "auto" loses at shapes that its constants were not fitted to

Each point has an op ("layer", "grouped_mm" or "layer forward"), its sizes as `for_layer` and `for_grouped_mm` take them
(layers are gated), and the microseconds by recipe: of forward alone for "layer forward", else of forward and backward.
bench/auto_sweep.py measures such points. "earlier" are points of another run, on another host.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import numpy
from tabulate import tabulate

from moe_fp8_ext.quantization.cost import COSTS, Cost, Work, fastest, grouped_mm_work, layer_work
from moe_fp8_ext.quantization.recipe import RECIPES

POINTS = [Path(__file__).parent / "results" / name for name in ("auto.json", "auto_forward.json")]
CHOICES = "bf16", "rowwise", "blockwise"
# By op: the arguments of `for_layer` beside sizes, None for `grouped_mm`. Layers have a gate.
HOW = {"layer": dict(gated=True, backward=True), "grouped_mm": None, "layer forward": dict(gated=True, backward=False)}
PREDICTS = 0.1  # weight of predicted times against lost time: keeps rates near the GPU's
SOFTNESS = 0.02  # times that differ by less count as equal


def work_of(point: dict) -> Work:
    sizes, how = point["sizes"], HOW[point["op"]]
    return grouped_mm_work(**sizes) if how is None else layer_work(**sizes, **how)


def chosen(point: dict) -> str:
    auto, sizes, how = RECIPES["auto"], point["sizes"], HOW[point["op"]]
    return (auto.for_grouped_mm(**sizes) if how is None else auto.for_layer(**sizes, **how)).name


def loss(point: dict) -> float:
    """How much longer the choice of "auto" takes than the fastest recipe, 0 if it is the fastest."""
    return point["us"][chosen(point)] / min(point["us"].values()) - 1


def fit(points: list[dict], steps: int = 6000) -> dict[str, dict[str, Cost]]:
    """Returns constants that lose little time and predict times well. A recipe has one rate and one weight_bytes for
    all ops with a backward.

    A random search from the constants in cost.py minimizes the mean over points of

        sum over recipes of p * (us / us of the fastest - 1) + PREDICTS * log(model / us)^2

    p is a softmax of -log(model) / SOFTNESS: nearly 1 for the recipe that "auto" chooses.
    """
    ops = [(op, [point for point in points if point["op"] == op]) for op in COSTS]
    measured = {op: numpy.array([[point["us"][r] for r in CHOICES] for point in of_op], float) for op, of_op in ops}
    works = {op: [Work(*map(float, work_of(point))) for point in of_op] for op, of_op in ops}
    columns = {op: Work(*map(numpy.array, zip(*of_op, strict=True))) for op, of_op in works.items() if of_op}

    def objective(costs: dict[str, dict[str, Cost]]) -> float:
        losses = []
        for op, work in columns.items():
            model = numpy.stack([numpy.maximum(c.gpu_us(work), c.host_us) for c in map(costs[op].get, CHOICES)], 1)
            share = (model.min(1, keepdims=True) / model) ** (1 / SOFTNESS)
            lost = measured[op] / measured[op].min(1, keepdims=True) - 1
            missed = numpy.log(model / measured[op]) ** 2
            losses.append((share / share.sum(1, keepdims=True) * lost + PREDICTS * missed).sum(1))
        return numpy.concatenate(losses).mean()

    random = numpy.random.default_rng(0)
    best, width = COSTS, 0.1
    least = objective(best)
    for _ in range(steps):
        width *= 0.5 ** (6 / steps)
        shared = {(r, backward): some(random, 2) for r in CHOICES for backward in (True, False)}
        trial = {
            op: {r: moved(best[op][r], [*shared[r, has_backward(op)], *some(random, 3)], width) for r in CHOICES}
            for op in COSTS
        }
        if (value := objective(trial)) < least:
            best, least = trial, value
    return best


def some(random: numpy.random.Generator, count: int) -> numpy.ndarray:
    """Draws logarithms of factors. Three of four are zero."""
    return random.normal(size=count) * (random.random(count) < 0.25)


def has_backward(op: str) -> bool:
    return HOW[op] is None or HOW[op]["backward"]


def moved(cost: Cost, logs: list[float], width: float) -> Cost:
    """Returns the constants times factors near 1, whose logarithms are `logs` times width."""
    return Cost(*(float(f"{value:.4g}") for value in numpy.array(cost) * numpy.exp(width * numpy.array(logs))))


def held_out(points: list[dict]) -> list[float]:
    """Returns the losses at each quarter of the shapes, with constants fitted to the other three quarters."""
    shape = lambda point: (point["op"], *list(point["sizes"].values())[1:])  # noqa: E731
    shapes = sorted({shape(point) for point in points})
    losses = []
    for quarter in range(4):
        left_out = [shapes.index(shape(point)) % 4 == quarter for point in points]
        costs = fit([point for point, out in zip(points, left_out, strict=True) if not out], 3000)
        for point in itertools.compress(points, left_out):
            name = fastest(costs[point["op"]], work_of(point), CHOICES)
            losses.append(point["us"][name] / min(point["us"].values()) - 1)
    return losses


def summary(losses: list[float]) -> str:
    over = sum(value > 0.03 for value in losses)
    mean = sum(losses) / len(losses)
    return f"{len(losses)} points: mean loss {mean:.2%}, largest {max(losses):.1%}, {over} above 3%"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=Path, nargs="+", default=POINTS)
    parser.add_argument("--fit", action="store_true", help="print fitted constants")
    parser.add_argument("--held-out", action="store_true", help="fit to three quarters of the shapes, try the fourth")
    arguments = parser.parse_args()
    files = {path: json.loads(path.read_text()) for path in arguments.points}
    points = [point for file in files.values() for point in file["points"] + file.get("earlier", [])]
    if arguments.fit:
        for op, costs in fit(points).items():
            print(op, *(f"    {recipe}: {cost}" for recipe, cost in costs.items()), sep="\n")
        return
    if arguments.held_out:
        print(summary(held_out(points)))
        return
    body = []
    for point in points:
        costs, work = COSTS[point["op"]], work_of(point)
        cells = (f"{us:,.0f} ({costs[recipe].us(work) / us - 1:+.0%})" for recipe, us in point["us"].items())
        body.append((point["op"], [*point["sizes"].values()], *cells, chosen(point), f"{loss(point):.1%}"))
    print(tabulate(body, ("op", "sizes", *(f"{name}, us (model)" for name in CHOICES), "auto", "loss")))
    for path, name in itertools.product(files, ("points", "earlier")):
        if found := files[path].get(name):
            print(f"{path.name}, {name}:", summary([loss(point) for point in found]))


if __name__ == "__main__":
    main()
