"""The cost of a shared expert: the time of forward and backward of a MoE layer without one, with one as a dense module
in BF16, and with one in the products of the other experts (`num_fused_shared=1`).

    python bench/shared_experts.py --out bench/results/shared_experts.json

On a CPU the layers are small, and show nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import tables
import torch
from run import environment
from timing import eager_us
from torch import Tensor, nn

from moe_fp8_ext import Experts, MoE, Router
from moe_fp8_ext.report.models import Sizes, share_name, sizes_of

TOKENS = {"cuda": 16384, "cpu": 64}
REPEATS = 40
MODELS = {"DeepSeek-V3": 32, "GLM-4.5-Air": None}  # experts of one GPU, None for all; each model has one shared expert
RECIPES = "rowwise", "blockwise"


class Dense(nn.Module):
    """A dense SwiGLU layer, as models have it for a shared expert."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden, 2 * intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * up)


def steps(sizes: Sizes, recipe: str, device: str) -> dict[str, Callable[[], None]]:
    """Forward and backward of a layer whose weights are trained, by the kind of its shared expert."""
    d, f, e, top_k = sizes
    x, dout = (torch.randn(TOKENS[device], d, device=device, dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()

    def step_of(shared: nn.Module | None, fused: int) -> Callable[[], None]:
        router, experts = Router(e, d, top_k), Experts(e + fused, d, f, recipe=recipe)
        layer = MoE(router, experts, shared, num_fused_shared=fused).to(device, torch.bfloat16)

        def step() -> None:
            layer(x)[0].backward(dout)
            layer.zero_grad()
            x.grad = None

        return step

    with torch.device(device):
        return {
            "no shared expert": step_of(None, 0),
            "dense, BF16": step_of(Dense(d, f), 0),
            "in the same products": step_of(None, 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = f"JSON file, such as bench/results/{tables.SHARED}"
    parser.add_argument("--out", type=Path, metavar="FILE", help=text)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = environment(device) | {"tokens": TOKENS[device.type], "rows": []}
    for model, held in MODELS.items():
        sizes = sizes_of(model, held) if device.type == "cuda" else Sizes(128, 128, 4, 2)
        for recipe in RECIPES:
            us = eager_us(steps(sizes, recipe, device.type), REPEATS, device)
            name = share_name(model, sizes.experts) if device.type == "cuda" else model
            result["rows"].append({"model": name, "sizes": sizes, "recipe": recipe, "us": us})
            print(f"{name}, {recipe}, us: { ({kind: round(value, 1) for kind, value in us.items()}) }", flush=True)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
