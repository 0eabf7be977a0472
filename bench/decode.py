"""The time of one layer of experts for a few tokens, as `generate` of Transformers calls it for each token.

    python bench/decode.py --out bench/results/decode.json

Transformers' own `grouped_mm` and `batched_mm` compute in BF16. This package computes with the weights of an FP8
checkpoint, and with BF16 weights by recipe "auto". Eager calls take turns, many of one kind in a row, and are timed
until their results are there. In a CUDA graph, as `torch.compile(mode="reduce-overhead")` makes them, they cost the
host almost nothing.

It needs transformers. On a CPU the layer is small, and shows nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import hf_models
import tables
import torch
import transformers
from run import environment
from timing import graph_us
from torch import Tensor, nn

from moe_fp8_ext.integrations.transformers import register

# Name: experts_implementation, whether weights are those of an FP8 checkpoint.
IMPLEMENTATIONS = {
    hf_models.BASELINE: (hf_models.BASELINE, False),
    "batched_mm": ("batched_mm", False),
    "moe_fp8_ext, FP8 checkpoint": ("moe_fp8_blockwise", True),
    "moe_fp8_ext, BF16 weights": ("moe_fp8_auto", False),
}
MODELS = "Qwen3-30B-A3B", "DeepSeek-V3", "Mixtral-8x7B"
HELD = {"DeepSeek-V3": 32}  # experts of one GPU, where the GPU does not hold all
TOKENS = 1, 8
SETS = 8  # of tokens, which take turns: a step of `generate` does not find the weights of its layers in the L2
CALLS, ROUNDS, REPLAYS = {"cuda": 50, "cpu": 2}, {"cuda": 20, "cpu": 2}, 50


def experts_of(name: str, is_fp8: bool, device: torch.device) -> nn.Module:
    """The experts of a layer of a model, with random weights."""
    others = dict(first_k_dense_replace=0) if name == "DeepSeek-V3" else {}  # whose first layers have no experts
    if device.type == "cuda":
        config = hf_models.config_of(name, 1, HELD.get(name), **others)
    else:
        config = hf_models.tiny_config(name, 1, **others)
    model = hf_models.on_meta(config, hf_models.BASELINE)
    model = hf_models.with_fp8_experts(model) if is_fp8 else model
    experts = next(module for module in model.modules() if hasattr(module, "is_transposed"))
    return hf_models.materialize(experts, device).eval().requires_grad_(False)


def inputs(experts: nn.Module, tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    config, device = experts.config, experts.down_proj.device
    generator = torch.Generator(device).manual_seed(seed)
    scores = torch.rand(tokens, experts.num_experts, device=device, generator=generator)
    scores, ids = scores.topk(config.num_experts_per_tok)
    x = torch.randn(tokens, config.hidden_size, device=device, dtype=torch.bfloat16, generator=generator)
    return x, ids, scores.to(torch.bfloat16)


def called(implementation: str, experts: nn.Module, *arguments: Tensor) -> Tensor:
    experts.config._experts_implementation = implementation
    return experts(*arguments)


def eager_us(calls: dict[str, list[Callable[[], Tensor]]], device: torch.device) -> dict[str, list[float]]:
    """Microseconds of a call of each kind: for each round, the time of many calls in a row, until their results are
    there, over their number."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS[device.type] + 1):
        for name, sets in calls.items():
            wait()
            began = time.perf_counter()
            for i in range(CALLS[device.type]):
                sets[i % len(sets)]()
            wait()
            if turn:  # the first round warms
                found[name].append((time.perf_counter() - began) / CALLS[device.type] * 1e6)
    return found


def rows_of(name: str, device: torch.device) -> list[dict]:
    made = {is_fp8: experts_of(name, is_fp8, device) for is_fp8 in (False, True)}
    rows = []
    for tokens in TOKENS:
        sets = [inputs(made[False], tokens, seed) for seed in range(SETS)]
        calls = {
            kind: [partial(called, implementation, made[is_fp8], *arguments) for arguments in sets]
            for kind, (implementation, is_fp8) in IMPLEMENTATIONS.items()
        }
        row = dict(model=name, experts=made[False].num_experts, tokens=tokens, eager_us=eager_us(calls, device))
        if device.type == "cuda":
            row["graph_us"] = {kind: graph_us(of_kind, REPLAYS) for kind, of_kind in calls.items()}
        rows.append(row)
    return rows


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = f"JSON file, such as bench/results/{tables.DECODE}"
    parser.add_argument("--out", type=Path, metavar="FILE", help=text)
    args = parser.parse_args()
    register()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = environment(device) | {"transformers": transformers.__version__, "rows": []}
    print(f"{result['device']}, torch {result['torch']}, microseconds: eager, as a CUDA graph")
    for name in MODELS:
        for row in rows_of(name, device):
            result["rows"].append(row)
            for kind, us in row["eager_us"].items():
                graphed = f"{row['graph_us'][kind]:.1f}" if "graph_us" in row else "-"
                print(f"{name}, {row['tokens']} tokens, {kind}: {median(us):.1f}, {graphed}", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
