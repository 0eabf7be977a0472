"""The cost of `moe_fp8_ext.stats`: the time of a step of one layer, forward and backward, without statistics, with one
sampled step in 100, and with every step sampled. A CPU takes three steps in place of 100.

    python bench/stats.py

On a GPU the layers have the sizes of models; on a CPU they are small, and show nothing about a GPU.
"""

from __future__ import annotations

import time
from statistics import median

import torch
from torch import nn

import moe_fp8_ext

# tokens, hidden size, intermediate size, experts, top_k
SIZES = {
    "cuda": {
        "Qwen3-30B-A3B": (16384, 2048, 768, 128, 8),
        "GPT-OSS-20B": (16384, 2880, 2880, 32, 4),
        "DeepSeek-V3, 32 of 256 experts": (16384, 7168, 2048, 32, 8),
    },
    "cpu": {"small": (256, 128, 128, 8, 2)},
}
RECIPES = "rowwise", "blockwise", "mxfp8"
STEPS, ROUNDS = {"cuda": 100, "cpu": 3}, {"cuda": 5, "cpu": 1}


def seconds_per_step(layer: nn.Module, call: tuple[torch.Tensor, ...], grad: torch.Tensor, every: int | None) -> float:
    """Times STEPS steps, of which one in `every` is sampled. None: statistics are off."""
    device = grad.device.type
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


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, torch {torch.__version__}")
    print(f"ms a step: without statistics, one step in {STEPS[device]} sampled, every step sampled")
    for name, (tokens, hidden, intermediate, experts, top_k) in SIZES[device].items():
        for recipe in RECIPES:
            options = dict(device=device, dtype=torch.bfloat16)
            layer = moe_fp8_ext.Experts(experts, hidden, intermediate, recipe=recipe, **options)
            scores, ids = torch.randn(tokens, experts, device=device).softmax(-1).topk(top_k)
            call = torch.randn(tokens, hidden, requires_grad=True, **options), ids, scores
            grad = torch.randn(tokens, hidden, **options)
            kinds = None, STEPS[device], 1
            rounds = [
                [seconds_per_step(layer, call, grad, every) for every in kinds] for _ in range(ROUNDS[device] + 1)
            ][1:]
            off, *on = (1e3 * median(times) for times in zip(*rounds, strict=True))
            costs = ", ".join(f"{ms:.3f} ({100 * (ms / off - 1):+.1f}%)" for ms in on)
            print(f"{name}, {recipe}: {off:.3f}, {costs}", flush=True)


if __name__ == "__main__":
    main()
