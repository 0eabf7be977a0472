"""Compares a whole MoE layer, including the router, with SonicMoE's in BF16 (github.com/Dao-AILab/sonic-moe). The
layers take turns and have the same weights. In BF16 both must agree. SonicMoE tunes itself for every size, which takes
a minute."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from cases_experts import SIZES
from run import environment
from sonicmoe import MoE
from sonicmoe.enums import ActivationType
from torch import Tensor

import moe_fp8_ext

SECONDS, TURNS = 0.4, 2
AGREE = 0.01  # two layers in BF16 differ by a few roundings of 2^-9 each
MIB = 2**20


def sustained_us(step: Callable[[], object]) -> float:
    """Warms up for as long as it measures, because the chip's power is limited."""
    step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    count = max(3, round(SECONDS / (time.perf_counter() - began)))
    for _ in range(2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            step()
        end.record()
        end.synchronize()
    return begin.elapsed_time(end) * 1e3 / count


def kept_mib(layer: Callable[[], Tensor]) -> float:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = layer()
    return (torch.cuda.memory_allocated() - before - out.nbytes) / MIB


def measure(t: int, d: int, f: int, e: int, k: int) -> dict[str, object]:
    torch.manual_seed(0)
    x = torch.randn(t, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)
    sizes = dict(num_experts=e, num_experts_per_tok=k, hidden_size=d, intermediate_size=f)
    options = dict(activation_function=ActivationType.SWIGLU, add_bias=False, std=0.02)
    peer = MoE(**sizes, **options).to("cuda", torch.bfloat16)
    weights = [torch.nn.Parameter(w.detach().clone()) for w in (peer.c_fc.weight, peer.c_proj.weight)]
    router = moe_fp8_ext.Router(e, d, k, device="cuda", dtype=torch.bfloat16)
    router.weight.data.copy_(peer.router.weight)

    def layer(recipe: str) -> Callable[[], Tensor]:
        experts = moe_fp8_ext.Experts(e, d, f, recipe=recipe, interleaved=True, device="meta")
        experts.gate_up_proj, experts.down_proj = weights
        moe = moe_fp8_ext.MoE(router, experts)
        return lambda: moe(x)[0]

    layers = {"SonicMoE": lambda: peer(x)[0], **{name: layer(name) for name in ("rowwise", "blockwise")}}
    logits = (x @ router.weight.t()).float()  # in BF16, like SonicMoE's
    ids, scores, _ = moe_fp8_ext.ops.choose_experts(logits, k)
    theirs = layers["SonicMoE"]().float()
    ours = moe_fp8_ext.experts(x, ids, scores, *weights, recipe="bf16", interleaved=True).float()
    difference = ((theirs - ours).norm() / theirs.norm()).item()
    if difference > AGREE:
        raise AssertionError(f"the layers must agree within {AGREE}, got {difference:.4f} at T={t}, D={d}")
    del theirs, ours
    leaves = [x, router.weight, *weights, *peer.parameters()]

    def step(name: str) -> None:
        for leaf in leaves:
            leaf.grad = None
        layers[name]().backward(grad)

    us: dict[str, list[float]] = {}
    for _ in range(TURNS):
        for name in layers:
            us.setdefault(name, []).append(sustained_us(partial(step, name)))
        with moe_fp8_ext.reuse_weights():
            us.setdefault("rowwise, weights reused", []).append(sustained_us(partial(step, "rowwise")))
    for leaf in leaves:
        leaf.grad = None
    # Our backward multiplies by FP8 copies of the weights, which do not count as activations.
    copies = sum(w.numel() for w in weights) / MIB
    kept = {name: kept_mib(call) - (name != "SonicMoE") * copies for name, call in layers.items()}
    return {"us": {name: sum(found) / TURNS for name, found in us.items()}, "kept_mib": kept, "difference": difference}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default=",".join(SIZES), help=f"out of {', '.join(SIZES)}")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON file for the figures")
    args = parser.parse_args()
    result = environment(torch.device("cuda")) | {"router": "ours a `MoE`", "rows": []}
    for name in args.sizes.split(","):
        row = {"sizes": name, "dims": SIZES[name]} | measure(*SIZES[name])
        torch.cuda.empty_cache()
        print(json.dumps(row), flush=True)
        result["rows"].append(row)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
