"""Where the time of a layer goes: time of the GPU in one forward and backward of `experts`, by kind of work."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from functools import partial
from pathlib import Path

import device_time
import torch
from case import EVEN, RECIPES
from cases_experts import SIZES, _forward_backward, _layer
from matrix import is_emulated
from run import environment

import moe_fp8_ext

STEPS = 10
# Kind of work: the ops that do it. Kernels of all other ops, such as torch's own, are "rest".
WORK = {
    "products": ("scaled_grouped_mm", "add_scaled_grouped_mm"),
    "casts of weights": ("quantize_weight",),
    "casts of tokens": ("quantize_rows", "quantize_tokens", "quantize_both", "permute_quantized"),
    "activations": ("quantize_activated", "quantize_activated_backward", "activate", "activate_backward"),
    "sums over slots": ("combine", "unpermute", "combine_backward"),
    "sorting": ("sort_tokens",),
}
KIND = {f"moe_fp8::{op}": kind for kind, ops in WORK.items() for op in ops}


def measure(recipe: str, sizes: tuple[int, ...]) -> dict[str, float]:
    """Microseconds per step of every kind of work, the longest first in the order of WORK."""
    inputs = _layer(torch.device("cuda"), EVEN, **dict(zip("tdfek", sizes, strict=True)))
    step = partial(_forward_backward(partial(moe_fp8_ext.experts, recipe=recipe)), *inputs)
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    found = device_time.profiled(lambda: [step() for _ in range(STEPS)], torch.device("cuda"))
    us_of, others = device_time.time_of_ops(found)
    us = Counter({"rest": others / STEPS})
    for op, time in us_of.items():
        us[KIND.get(op.name, "rest")] += time / STEPS
    return {kind: round(us[kind], 1) for kind in (*WORK, "rest")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="qwen3_30b,gpt_oss_20b,dsv3", help=f"out of {', '.join(SIZES)}")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON file for the figures")
    args = parser.parse_args()
    result = environment(torch.device("cuda")) | device_time.COUNTED | {"rows": []}
    recipes = [recipe for recipe in RECIPES if not is_emulated(recipe, result["device"])]
    for name in args.sizes.split(","):
        for recipe in recipes:
            row = {"recipe": recipe, "dims": SIZES[name], "us": measure(recipe, SIZES[name])}
            torch.cuda.empty_cache()
            print(json.dumps(row), flush=True)
            result["rows"].append(row)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
