"""The cost of low-rank adapters: the time of forward and backward of one layer of experts over weights that are frozen
in FP8, without adapters and with adapters of both projections.

    python bench/adapters.py --out bench/results/adapters.json

Kinds take turns in a rotating order, after the GPU has computed for a second. On a CPU the layers are small, and show
nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import tables
import torch
from run import environment
from torch import Tensor

from moe_fp8_ext import LoRA, Quantized, experts, quantize_weight
from moe_fp8_ext.report.models import Sizes, sizes_of

TOKENS = {"cuda": 16384, "cpu": 64}
MODELS = "Qwen3-30B-A3B", "GPT-OSS-20B", "GLM-4.5-Air"
RECIPES = "blockwise", "rowwise"
# Rank of the adapters, 0 for none, and whether all experts share A of gate_up and B of down.
KINDS = {"without": (0, False), "rank 16": (16, False), "rank 16, shared": (16, True), "rank 64": (64, False)}
STEPS, ROUNDS, WARM_SECONDS = {"cuda": 20, "cpu": 1}, {"cuda": 4, "cpu": 2}, {"cuda": 1.0, "cpu": 0.0}


def frozen(shape: tuple[int, ...], recipe: str, device: str) -> Quantized | tuple[Quantized, Quantized]:
    """A random weight in FP8: one byte a value where backward can transpose it, both directions otherwise."""
    w = torch.randn(shape, device=device, dtype=torch.bfloat16) * shape[-1] ** -0.5
    pair = quantize_weight(w, recipe)
    return pair[0] if recipe == "blockwise" else pair


def steps(sizes: Sizes, recipe: str, device: str) -> dict[str, Callable[[], None]]:
    """Forward and backward of a layer, by kind of adapters. Factors are float32 parameters, as PEFT makes them."""
    (d, f, e, top_k), tokens = sizes, TOKENS[device]
    weights = frozen((e, 2 * f, d), recipe, device), frozen((e, d, f), recipe, device)
    scores, ids = torch.randn(tokens, e, device=device).softmax(-1).topk(top_k)
    x, dout = (torch.randn(tokens, d, device=device, dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()

    def factor(*shape: int) -> Tensor:
        return (torch.randn(shape, device=device) * shape[-1] ** -0.5).requires_grad_()

    def step_of(rank: int, shared: bool) -> Callable[[], None]:
        made, of_all = {}, () if shared else (e,)
        if rank:
            made["lora_gate_up"] = LoRA(factor(*of_all, rank, d), factor(e, 2 * f, rank), 2.0)
            made["lora_down"] = LoRA(factor(e, rank, f), factor(*of_all, d, rank), 2.0)
        leaves = [x, *(m for adapter in made.values() for m in (adapter.A, adapter.B))]

        def step() -> None:
            experts(x, ids, scores, *weights, recipe=recipe, **made).backward(dout)
            for leaf in leaves:
                leaf.grad = None

        return step

    return {name: step_of(*kind) for name, kind in KINDS.items()}


def seconds_per_step(step: Callable[[], None], device: str) -> float:
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    step()
    wait()
    began = time.perf_counter()
    for _ in range(STEPS[device]):
        step()
    wait()
    return (time.perf_counter() - began) / STEPS[device]


def measure(sizes: Sizes, recipe: str, device: str) -> dict[str, list[float]]:
    """Seconds of a step of each kind, a value for each round."""
    of_kind, began = steps(sizes, recipe, device), time.perf_counter()
    while time.perf_counter() - began < WARM_SECONDS[device]:
        for step in of_kind.values():
            seconds_per_step(step, device)
    seconds: dict[str, list[float]] = {name: [] for name in of_kind}
    names = list(of_kind)
    for turn in range(ROUNDS[device]):
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            seconds[name].append(seconds_per_step(of_kind[name], device))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = f"JSON file, such as bench/results/{tables.ADAPTERS}"
    parser.add_argument("--out", type=Path, metavar="FILE", help=text)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result = environment(torch.device(device)) | {"tokens": TOKENS[device], "rows": []}
    for name in MODELS:
        sizes = sizes_of(name) if device == "cuda" else Sizes(128, 128, 4, 2)
        for recipe in RECIPES:
            row = {"model": name, "sizes": sizes, "recipe": recipe, "seconds": measure(sizes, recipe, device)}
            result["rows"].append(row)
            ms = {kind: f"{1e3 * median(seconds):.3f}" for kind, seconds in row["seconds"].items()}
            print(f"{name}, {recipe}, ms: {ms}", flush=True)
            if args.out:  # row by row, so that an interrupted run keeps its rows
                args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
