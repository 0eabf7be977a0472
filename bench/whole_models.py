"""Trains models of published sizes, cut in layers, on one GPU: tokens per second, peak memory, and where a step goes.

A step is forward, backward and AdamW on 4 sequences of 4,096 random tokens. All numbers are BF16: parameters, gradients
and the optimizer's moments. The experts take turns in one model, in one process: Transformers' own `grouped_mm` in
BF16, and `moe_fp8` in two recipes. Weights are random. `busiest_expert` of a row is the load of a layer's busiest
expert over the mean, before the first step and after the last one: 1 is even routing.

Some cuts have a share of the experts, as one GPU of several has; all experts of a token are among these. GPT-OSS has
causal attention in every layer here. In the model, every other layer sees 128 tokens alone.

It needs transformers. On a CPU the models are tiny, and show nothing about a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import device_time
import hf_models
import routing
import tables
import torch
import waterfall
from run import environment
from torch import Tensor, nn

from moe_fp8_ext.integrations.transformers import register
from moe_fp8_ext.report.models import sizes_of

IMPLEMENTATIONS = (hf_models.BASELINE, "moe_fp8_rowwise", "moe_fp8_blockwise")


class Cut(NamedTuple):
    """The layers and the experts that are left of a model."""

    layers: int
    experts: int | None = None


CUTS = {
    "Qwen3-30B-A3B": Cut(8),
    "Qwen3-235B-A22B": Cut(6, experts=16),
    "GPT-OSS-20B": Cut(6),
    "DeepSeek-V3": Cut(3, experts=32),
    "Mixtral-8x7B": Cut(4),
}
SEQUENCES, CONTEXT = {"cuda": 4, "cpu": 2}, {"cuda": 4096, "cpu": 32}
OPS = 10  # of each part, that the results name
WARM, REPEATS, STEPS = 2, 3, {"cuda": 3, "cpu": 1}  # steps before the first repeat; repeats; steps of a repeat


class Trainer:
    """A model and its optimizer. A step trains with the experts of one implementation."""

    def __init__(self, model: nn.Module, batch: Tensor) -> None:
        on_gpu = batch.device.type == "cuda"
        self.model, self.batch = model, batch
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=on_gpu)

    def loss(self, implementation: str) -> Tensor:
        self.model.config._experts_implementation = implementation
        return self.model(input_ids=self.batch, labels=self.batch, use_cache=False).loss

    def step(self, implementation: str) -> None:
        self.loss(implementation).backward()
        with waterfall.mark(waterfall.OPTIMIZER):
            self.optimizer.step()
            self.optimizer.zero_grad()


def model_of(name: str, cut: Cut, device: torch.device) -> nn.Module:
    """A model with random weights; on a CPU a tiny model of the same type."""
    others: dict[str, object] = {}
    attention = "sdpa"
    model_type = hf_models.CONFIGS[name][0]
    if model_type == "gpt_oss":
        attention = hf_models.SINKS
        others["layer_types"] = ["full_attention"] * cut.layers
    elif model_type == "deepseek_v3":
        others["first_k_dense_replace"] = 0  # the first layers of the model have no experts
    if device.type == "cuda":
        config = hf_models.config_of(name, *cut, **others)
    else:
        config = hf_models.tiny_config(name, cut.layers, **others)
    model = hf_models.on_meta(config, IMPLEMENTATIONS[0], attn_implementation=attention)
    return hf_models.materialize(model, device).train()


def seconds_of(step: Callable[[], None], steps: int, device: torch.device) -> float:
    """Seconds of one of several steps."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    return (time.perf_counter() - began) / steps


def profiled(trainer: Trainer, implementation: str, device: torch.device) -> dict[str, dict]:
    """Microseconds of each part of a step, and of the ops that take most of each part. Raises if the step did not run
    the experts that it was asked to."""
    with waterfall.marked(waterfall.parts_of(trainer.model)):
        found = device_time.profiled(partial(trainer.step, implementation), device)
    ours = any(op.name.startswith("moe_fp8::scaled_grouped_mm") for op in found.ops)
    if ours != (implementation != hf_models.BASELINE):
        raise RuntimeError(f"{implementation} ran {'' if ours else 'no '}products of this package")
    us, of_ops = waterfall.microseconds(found), waterfall.ops_of(found, OPS)
    return {"us": rounded(us), "us_of_ops": {part: rounded(ops) for part, ops in of_ops.items()}}


def rounded(us: dict[str, float]) -> dict[str, float]:
    return {name: round(time, 1) for name, time in us.items()}


@torch.no_grad()
def losses_and_load(trainer: Trainer) -> tuple[dict[str, float], float]:
    """Returns the loss of each implementation, and the load of the busiest expert over the mean."""
    with routing.counted(trainer.model) as ratio:
        losses = {implementation: trainer.loss(implementation).item() for implementation in IMPLEMENTATIONS}
    return losses, ratio()


def measure(name: str, cut: Cut, sequences: int, device: torch.device) -> dict:
    model = model_of(name, cut, device)
    generator, size = torch.Generator().manual_seed(1), (sequences, CONTEXT[device.type])
    trainer = Trainer(model, torch.randint(model.config.vocab_size, size, generator=generator).to(device))
    losses, before = losses_and_load(trainer)
    assert all(map(math.isfinite, losses.values())), losses
    peaks: dict[str, int] = {}
    seconds: dict[str, list[float]] = {implementation: [] for implementation in IMPLEMENTATIONS}
    for repeat in range(REPEATS):
        for i in range(len(IMPLEMENTATIONS)):
            implementation = IMPLEMENTATIONS[(repeat + i) % len(IMPLEMENTATIONS)]
            step = partial(trainer.step, implementation)
            for _ in range(1 if repeat else WARM):
                step()
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            seconds[implementation].append(seconds_of(step, STEPS[device.type], device))
            if device.type == "cuda":
                peaks[implementation] = max(peaks.get(implementation, 0), torch.cuda.max_memory_allocated())
    profiles = {implementation: profiled(trainer, implementation, device) for implementation in IMPLEMENTATIONS}
    _, after = losses_and_load(trainer)
    in_layers = sum(p.numel() for p in model.base_model.layers.parameters())
    return dict(
        step=[*size],
        parameters=sum(p.numel() for p in model.parameters()),
        parameters_in_layers=in_layers,
        losses=losses,
        busiest_expert=[before, after],
        seconds=seconds,
        peak_bytes=peaks,
        **{key: {name: profiles[name][key] for name in IMPLEMENTATIONS} for key in ("us", "us_of_ops")},
    )


def row_of(name: str, sequences: int, device: torch.device) -> dict:
    cut, sizes = CUTS[name], sizes_of(name, CUTS[name].experts)
    row = dict(model=name, layers=cut.layers, of_layers=hf_models.CONFIGS[name][1], sizes=[*sizes])
    try:
        return row | measure(name, cut, sequences, device)
    except torch.OutOfMemoryError as error:
        return row | dict(out_of_memory=str(error).splitlines()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CUTS), help=f"out of {', '.join(CUTS)}")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"JSON file, such as bench/results/{tables.WHOLE}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text = "of a step, by default %(default)s on this machine"
    parser.add_argument("--sequences", type=int, default=SEQUENCES[device.type], metavar="N", help=text)
    args = parser.parse_args()
    register()
    hf_models.register_sinks()
    result = environment(device) | device_time.COUNTED | {"rows": []}
    for name in args.models.split(","):
        began = time.perf_counter()
        result["rows"].append(row_of(name, args.sequences, device))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        print(json.dumps(result["rows"][-1] | {"took": round(time.perf_counter() - began, 1)}), flush=True)
        if args.out:  # model by model, so that an interrupted run keeps its rows
            args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
