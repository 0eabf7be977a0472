"""Trains torchtitan's Qwen3-30B-A3B, cut to a few layers and to bytes, on one GPU, with torchtitan's experts in BF16
and with this package's. Prints the losses of both, tokens per second and where the time of a step goes.

It needs torchtitan 0.3.0. On a CPU it uses torchtitan's debug model, and compiles nothing. The runs take turns, step by
step. Weights are float32 under autocast to BF16, and attention is torch's own. Every layer is compiled, as torchtitan
compiles it.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median

import device_time
import tables
import torch
import waterfall
from run import environment
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.nn.functional import cross_entropy

# torchtitan imports this for several GPUs, and torch 2.11 lacks it.
vars(fsdp).setdefault("DataParallelMeshDims", object)

from torchtitan.config.override import OverrideConfig, apply_overrides  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.qwen3 import model_registry  # noqa: E402

OVERRIDE = "moe_fp8_ext.integrations.torchtitan.moe_fp8"
RECIPES = ("bf16", "rowwise")  # the first stands for torchtitan's own experts
SIZES = {"cuda": ("30B-A3B", 4, 8, 4096), "cpu": ("debugmodel_moe", 1, 2, 32)}  # flavor, layers, sequences, context
WARM_STEPS = 10
VOCABULARY = 256
# Kinds of work in the profile: beginnings of the names of ops and of marks.
KINDS = {
    "products of experts": ("aten::_grouped_mm", "moe_fp8::scaled_grouped_mm", "moe_fp8::add_scaled_grouped_mm"),
    "casts to FP8": ("moe_fp8::",),
    "attention": ("aten::scaled_dot_product", "aten::_scaled_dot_product", "aten::_flash_attention"),
    "other products": ("aten::mm", "aten::addmm", "aten::bmm"),
    "compiled kernels": ("triton_",),
    "copies": ("aten::copy_", "aten::_to_copy", "aten::clone"),
    "optimizer": ("optimizer",),
}


def build(flavor: str, layers: int, recipe: str, device: torch.device, compiled: bool) -> nn.Module:
    config = model_registry(flavor).model
    config.layers = config.layers[:layers]
    config.vocab_size = config.tok_embeddings.num_embeddings = config.lm_head.out_features = VOCABULARY
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    if recipe != "bf16":
        apply_overrides(OverrideConfig(imports=[(OVERRIDE, {"recipe": recipe})]), config)
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device=device)
    torch.manual_seed(0)
    model.init_states(buffer_device=device)
    if compiled:
        torch._dynamo.config.capture_scalar_outputs = True
        for layer in model.layers.values():
            layer.compile(fullgraph=True)
    return model


def losses_of(model: nn.Module, batches: Tensor) -> Iterator[float]:
    """Yields the loss of a step for each batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for batch in batches:
        positions = torch.arange(batch.shape[1] - 1, device=batch.device).expand(len(batch), -1)
        with torch.autocast(batch.device.type, torch.bfloat16):
            logits = model(batch[:, :-1], positions)
        loss = cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        with waterfall.mark("optimizer"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        yield loss.item()


def measure(steps: int, device: torch.device, compiled: bool = False) -> dict:
    flavor, layers, sequences, context = SIZES[device.type]
    source = b"".join(file.read_bytes() for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    size, generator = (steps + 1, sequences), torch.Generator().manual_seed(0)  # the last step is for the profile
    starts = torch.randint(len(text) - context, size, generator=generator)
    batches = text[starts[..., None] + torch.arange(context + 1)].long().to(device)
    runs = [losses_of(build(flavor, layers, recipe, device, compiled), batches) for recipe in RECIPES]
    losses, seconds = ([[] for _ in runs] for _ in range(2))
    for _ in range(steps):
        for run, run_losses, run_seconds in zip(runs, losses, seconds, strict=True):
            began = time.perf_counter()
            run_losses.append(next(run))
            run_seconds.append(time.perf_counter() - began)
    us = [waterfall.by_op(device_time.profiled(partial(next, run), device), KINDS) for run in runs]
    timed = [of_run[WARM_STEPS:] for of_run in seconds]
    speeds = [sequences * context / median(of_run) for of_run in timed]
    titan = {"torchtitan": version("torchtitan"), "model": flavor, "layers": layers, "step": [sequences, context]}
    keys = "recipe", "losses", "tokens_per_second", "seconds", "us"
    of_recipes = [dict(zip(keys, run, strict=True)) for run in zip(RECIPES, losses, speeds, timed, us, strict=True)]
    return environment(device) | device_time.COUNTED | titan | {"compiled": compiled, "runs": of_recipes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50, metavar="N", help=f"more than {WARM_STEPS}, untimed ones")
    parser.add_argument("--eager", action="store_true", help="compile nothing; on a CPU nothing is compiled")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"JSON file, such as bench/results/{tables.TITAN}")
    args = parser.parse_args()
    if args.steps <= WARM_STEPS:
        parser.error(f"--steps must be over {WARM_STEPS}, got {args.steps}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = measure(args.steps, device, compiled=device.type == "cuda" and not args.eager)
    print(tables.titan_table(result))
    if args.out:
        args.out.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
