"""Times a layer of experts in the sizes of a few models, in each recipe, and compares it with BF16."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from moe_fp8_ext.layer.experts import experts
from moe_fp8_ext.quantization.recipe import RECIPES
from moe_fp8_ext.report.models import Sizes, share_name, sizes_of

TOKENS = 8192
_HELD = {"Qwen3-30B-A3B": 128, "GPT-OSS-20B": 32, "DeepSeek-V3": 32}  # experts of one GPU
LAYERS = {share_name(name, experts): (TOKENS, sizes_of(name, experts)) for name, experts in _HELD.items()}
TIMED = [name for name in RECIPES if name != "auto"]
REPEATS = 10


def speed() -> dict[str, dict[str, object]]:
    """Times forward and backward of each model's layer on the current GPU, in milliseconds."""
    return {model: _times(*layer) for model, layer in LAYERS.items()}


def _times(tokens: int, sizes: Sizes) -> dict[str, object]:
    hidden, intermediate, num_experts, top_k = sizes
    try:
        make = torch.Generator("cuda").manual_seed(0)
        x, up, down = (
            torch.randn(shape, generator=make, device="cuda", dtype=torch.bfloat16).requires_grad_()
            for shape in (
                (tokens, hidden),
                (num_experts, 2 * intermediate, hidden),
                (num_experts, hidden, intermediate),
            )
        )
        scores, ids = torch.rand(tokens, num_experts, generator=make, device="cuda").topk(top_k)

        def step(recipe: str) -> None:
            out = experts(x, ids, scores, up, down, recipe=recipe)
            torch.autograd.grad(out, (x, up, down), x)

        ms = {recipe: _ms(lambda recipe=recipe: step(recipe)) for recipe in TIMED}
    except torch.OutOfMemoryError:
        return {"error": "this GPU has too little free memory for these sizes"}
    return {"ms": ms, "of_bf16": {r: ms["bf16"] / t for r, t in ms.items()}, "fastest": min(ms, key=ms.get)}


def _ms(call: Callable[[], None]) -> float:
    for _ in range(3):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False))


def text(found: dict[str, dict]) -> list[str]:
    """Returns the lines that show what `speed` found."""
    lines = []
    for model, times in found.items():
        if "error" in times:
            lines.append(f"{model}: {times['error']}")
            continue
        each = (f"{recipe} {ms:.2f} ms, {times['of_bf16'][recipe]:.2f} x" for recipe, ms in times["ms"].items())
        lines.append(f'{model}: {"; ".join(each)}; take recipe="{times["fastest"]}"')
    return lines
