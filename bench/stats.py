"""The cost of `moe_fp8_ext.stats`: the time of a step of one layer, forward and backward, without statistics, with one
sampled step in 100, and with every step sampled. A CPU takes three steps in place of 100.

    python bench/stats.py --out bench/results/stats.json

The GPU computes for two seconds before it is timed, and the three kinds of steps take turns in a rotating order. On a
GPU the layers have the sizes of models; on a CPU they are small, and show nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median

import tables
import torch
from run import environment
from torch import nn

import moe_fp8_ext
from moe_fp8_ext.report.models import Sizes, share_name, sizes_of

TOKENS = {"cuda": 16384, "cpu": 256}
_HELD = {"Qwen3-30B-A3B": 128, "GPT-OSS-20B": 32, "DeepSeek-V3": 32}  # experts of one GPU
LAYERS = {
    "cuda": {share_name(name, experts): sizes_of(name, experts) for name, experts in _HELD.items()},
    "cpu": {"small": Sizes(128, 128, 8, 2)},
}
RECIPES = "rowwise", "blockwise"
STEPS, ROUNDS, WARM_SECONDS = {"cuda": 100, "cpu": 3}, {"cuda": 3, "cpu": 1}, {"cuda": 2.0, "cpu": 0.0}
KINDS = "off", "one in 100", "every step"


def seconds_per_step(layer: nn.Module, call: tuple[torch.Tensor, ...], grad: torch.Tensor, kind: str) -> float:
    """Times STEPS steps of one kind."""
    device = grad.device.type
    every = {"off": None, "one in 100": STEPS[device], "every step": 1}[kind]
    stats = moe_fp8_ext.stats(layer, every or 1)
    if every is not None:
        stats.start()
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(STEPS[device]):
        layer(*call).backward(grad)
        stats.step()
    wait()
    seconds = time.perf_counter() - start
    stats.stop()
    return seconds / STEPS[device]


def warm(layer: nn.Module, call: tuple[torch.Tensor, ...], grad: torch.Tensor) -> None:
    """Computes until clocks and heat are as they stay, and samples once, which initializes what samples need."""
    device = grad.device.type
    began = time.perf_counter()
    stats = moe_fp8_ext.stats(layer, 1)
    stats.start()
    layer(*call).backward(grad)
    stats.step()
    stats.stop()
    while time.perf_counter() - began < WARM_SECONDS[device]:
        layer(*call).backward(grad)
        if device == "cuda":
            torch.cuda.synchronize()


def measure(sizes: Sizes, recipe: str, device: str) -> dict[str, list[float]]:
    """Seconds of a step of each kind, a value for each round."""
    hidden, intermediate, experts, top_k = sizes
    options = dict(device=device, dtype=torch.bfloat16)
    layer = moe_fp8_ext.Experts(experts, hidden, intermediate, recipe=recipe, **options)
    scores, ids = torch.randn(TOKENS[device], experts, device=device).softmax(-1).topk(top_k)
    call = torch.randn(TOKENS[device], hidden, requires_grad=True, **options), ids, scores
    grad = torch.randn(TOKENS[device], hidden, **options)
    warm(layer, call, grad)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(ROUNDS[device]):
        for i in range(len(KINDS)):
            kind = KINDS[(turn + i) % len(KINDS)]
            seconds[kind].append(seconds_per_step(layer, call, grad, kind))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = f"JSON file, such as bench/results/{tables.STATS}"
    parser.add_argument("--out", type=Path, metavar="FILE", help=text)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result = environment(torch.device(device)) | {"tokens": TOKENS[device], "steps": STEPS[device], "rows": []}
    print(f"{result['device']}, torch {result['torch']}")
    print(f"ms a step: without statistics, one step in {STEPS[device]} sampled, every step sampled")
    for name, sizes in LAYERS[device].items():
        for recipe in RECIPES:
            row = {"layer": name, "recipe": recipe, "seconds": measure(sizes, recipe, device)}
            result["rows"].append(row)
            off, *on = (1e3 * median(row["seconds"][kind]) for kind in KINDS)
            costs = ", ".join(f"{ms:.3f} ({100 * (ms / off - 1):+.1f}%)" for ms in on)
            print(f"{name}, {recipe}: {off:.3f}, {costs}", flush=True)
            if args.out:  # row by row, so that an interrupted run keeps its rows
                args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
