"""Measures `experts` and `grouped_mm` in BF16 and in FP8, for the cost model of recipe "auto": forward and backward of
both, and forward of `experts` without a backward.

    python bench/auto_sweep.py --out bench/results/auto.json       all sizes below with a backward, in minutes
    python bench/auto_sweep.py --out bench/results/auto_forward.json --op "layer forward"
    python bench/auto_sweep.py --out FILE --op grouped_mm          the sizes of one op

At each size the recipes take turns, with CUDA events around each call (bench/timing.py). A time is the mean over even
and uneven groups. Points of other sizes that the file has stay there. bench/fit_auto.py reads the file.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import timing
import torch
from case import EVEN, ZIPF, group_ends, normal
from cases_experts import routed
from run import environment
from tqdm import tqdm

import moe_fp8_ext as moe

CHOICES = "bf16", "rowwise", "blockwise"
REPEATS = 50
LAYERS = [  # hidden_size, intermediate_size, experts, top_k
    *[(1536, 256, 128, 8), (2048, 768, 128, 8), (4096, 1024, 128, 8), (4096, 1536, 64, 8), (2880, 2880, 32, 4)],
    *[(7168, 2048, 32, 8), (4096, 1536, 16, 8), (2048, 1408, 64, 6), (1024, 512, 8, 2), (4096, 14336, 8, 2)],
]
PRODUCTS = [  # K, N, experts
    *[(2048, 1536, 128), (768, 2048, 128), (1536, 512, 128), (4096, 3072, 64), (1536, 4096, 64), (2880, 5760, 32)],
    *[(7168, 4096, 32), (2048, 7168, 32), (1536, 1024, 40), (512, 1536, 40), (2048, 1408, 8), (5120, 8192, 16)],
]
FEW_TOKENS = 1, 8, 32  # as `generate` has them
LAYER_SLOTS = 16, 64, 96, 128, 192, 256, 384, 512, 2048  # for each expert
PRODUCT_ROWS = 32, 64, 128, 256, 512, 1024, 4096
LARGEST = 300_000  # slots or rows of all experts
Calls = dict[str, Callable[[], object]]


def layer_calls(device: torch.device, groups: str, hidden: int, intermediate: int, e: int, top_k: int, t: int) -> Calls:
    x, dout = normal(device, t, hidden, grad=True), normal(device, t, hidden)
    w_gate_up = normal(device, e, 2 * intermediate, hidden, grad=True)
    w_down = normal(device, e, hidden, intermediate, grad=True)
    ids, scores = routed(device, groups, t, e, top_k)

    def step(recipe: str) -> object:
        out = moe.experts(x, ids, scores, w_gate_up, w_down, recipe=recipe)
        return torch.autograd.grad(out, (x, scores, w_gate_up, w_down), dout)

    return {recipe: lambda recipe=recipe: step(recipe) for recipe in CHOICES}


def forward_calls(
    device: torch.device, groups: str, hidden: int, intermediate: int, e: int, top_k: int, t: int
) -> Calls:
    x, ids, scores = normal(device, t, hidden), *routed(device, groups, t, e, top_k)
    weights = normal(device, e, 2 * intermediate, hidden), normal(device, e, hidden, intermediate)
    call = x, ids, scores.detach(), *weights
    return {recipe: lambda recipe=recipe: moe.experts(*call, recipe=recipe) for recipe in CHOICES}


def product_calls(device: torch.device, groups: str, k: int, n: int, e: int, rows: int) -> Calls:
    a, w = normal(device, rows, k, grad=True), normal(device, e, n, k, grad=True)
    offs, dout = group_ends(groups, rows, e, device), normal(device, rows, n)

    def step(recipe: str) -> object:
        return torch.autograd.grad(moe.grouped_mm(a, w.mT, offs, recipe=recipe), (a, w), dout)

    return {recipe: lambda recipe=recipe: step(recipe) for recipe in CHOICES}


LAYER_CALLS = {"layer": layer_calls, "layer forward": forward_calls}


def plan() -> Iterator[tuple[str, dict[str, int], Callable[[torch.device, str], Calls]]]:
    """The op of each point, its sizes as `Recipe.for_layer` and `Recipe.for_grouped_mm` take them, and its calls."""
    for (op, calls), (hidden, intermediate, e, top_k) in itertools.product(LAYER_CALLS.items(), LAYERS):
        few = () if op == "layer" else FEW_TOKENS
        for tokens in (*few, *(per_expert * e // top_k for per_expert in LAYER_SLOTS)):
            sizes = dict(slots=tokens * top_k, hidden=hidden, intermediate=intermediate, experts=e)
            dims = hidden, intermediate, e, top_k, tokens
            if sizes["slots"] <= LARGEST:
                yield op, sizes, lambda *where, calls=calls, dims=dims: calls(*where, *dims)
    for k, n, e in PRODUCTS:
        for rows in (per_expert * e for per_expert in PRODUCT_ROWS):
            if rows <= LARGEST:
                sizes = dict(rows=rows, k=k, n=n, experts=e)
                yield "grouped_mm", sizes, lambda *where, dims=(k, n, e, rows): product_calls(*where, *dims)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--op", choices=(*LAYER_CALLS, "grouped_mm"), help="by default both ops with a backward")
    arguments = parser.parse_args()
    device = torch.device("cuda")
    head = json.dumps(environment(device))
    kept = json.loads(arguments.out.read_text())["points"] if arguments.out.exists() else []
    points = {(point["op"], *point["sizes"].values()): point for point in kept}
    wanted = [arguments.op] if arguments.op else ["layer", "grouped_mm"]
    for op, sizes, calls_of in tqdm([entry for entry in plan() if entry[0] in wanted]):
        measured = [timing.eager_us(calls_of(device, groups), REPEATS, device) for groups in (EVEN, ZIPF)]
        us = {recipe: round(sum(times[recipe] for times in measured) / len(measured)) for recipe in CHOICES}
        points[(op, *sizes.values())] = {"op": op, "sizes": sizes, "us": us}
        lines = ",\n".join(f"  {json.dumps(point)}" for point in points.values())
        arguments.out.write_text(f'{head[:-1]},\n "points": [\n{lines}\n ]}}\n')


if __name__ == "__main__":
    main()
