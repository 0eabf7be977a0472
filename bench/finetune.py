"""Fine-tunes a model of published sizes with LoRA on one GPU: tokens per second and peak memory, as JSON.

`--impl ours` has the experts of an FP8 checkpoint, multiplied as they are, with adapters as factors. `--impl stock` is
Transformers with PEFT in BF16, with experts by "grouped_mm". Weights are random, and so are tokens. `busiest_expert` of
the result is the load of a layer's busiest expert over the mean, before and after training: 1 is even routing. Adapters
are on the linear layers of attention and on the weights of experts. Every layer is computed again in backward. Both
implementations have the same attention, optimizer and loss. No step waits for the device: losses are read after the
last one. `--profile` says where the time of one more step goes.

It needs transformers, peft and accelerate. Each implementation runs in a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median

import finetune_work
import hf_models
import peft
import routing
import tables
import torch
import transformers
import waterfall
from peft.helpers import disable_input_dtype_casting
from run import environment
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import moe_fp8_ext
from moe_fp8_ext.integrations.layer_graphs import graph_layers_
from moe_fp8_ext.integrations.transformers import register

MODELS = "Qwen3-30B-A3B", "GLM-4.5-Air", "tiny"
IMPLEMENTATIONS = {"ours": "moe_fp8_blockwise", "stock": "grouped_mm"}
# Names of adapters that have a dtype: PEFT's default is float32. "autocast" is float32 too, with torch.autocast to
# bfloat16, as Transformers' Trainer has it with bf16=True, and without PEFT's casts of inputs to float32 before it.
ADAPTERS = {"autocast": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}
TINY_LAYERS = 2
LOSS_TOKENS = 1024  # logits are computed for so many tokens at a time


class Phases:
    """Seconds of every phase of a run, and the memory that it leaves allocated."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds, self.allocated = device, {}, {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            self.allocated[name] = torch.cuda.memory_allocated()
        self.seconds[name] = round(time.perf_counter() - began, 2)
        print(f"{name}: {self.seconds[name]} s", file=sys.stderr, flush=True)


def config_of(args: argparse.Namespace) -> transformers.PretrainedConfig:
    if args.model == "tiny":
        return hf_models.tiny_config("Qwen3-30B-A3B", args.layers or layers_of(args.model))
    return hf_models.config_of(args.model, args.layers)


def layers_of(model: str) -> int:
    return TINY_LAYERS if model == "tiny" else hf_models.CONFIGS[model][1]


def random_model(config: transformers.PretrainedConfig, impl: str, device: torch.device) -> nn.Module:
    """Makes a model with random weights on the device, for `ours` with experts as an FP8 checkpoint has them."""
    model = hf_models.on_meta(config, IMPLEMENTATIONS["stock"])
    return hf_models.materialize(hf_models.with_fp8_experts(model) if impl == "ours" else model, device)


def loaded(folder: Path, impl: str, device: torch.device) -> nn.Module:
    options = dict(dtype=torch.bfloat16, experts_implementation=IMPLEMENTATIONS[impl], device_map={"": str(device)})
    return transformers.AutoModelForCausalLM.from_pretrained(folder, use_cache=False, **options)


def with_adapters(model: nn.Module, args: argparse.Namespace, device: torch.device) -> nn.Module:
    config = peft.LoraConfig(
        r=args.rank,
        lora_alpha=2 * args.rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=[] if args.attention_only else ["experts.gate_up_proj", "experts.down_proj"],
    )
    with device:
        model = peft.get_peft_model(model, config)
    for parameter in model.parameters():
        if parameter.requires_grad:  # PEFT makes adapters float32, whatever the weights are
            parameter.data = parameter.data.to(ADAPTERS[args.adapters])
    if args.impl == "ours":
        moe_fp8_ext.convert_(model, "blockwise")
    base = model.get_base_model()
    if args.compile == "layers":
        for layer in base.model.layers:
            layer.forward = compiled_in_checkpoint(layer)
        return model.train()
    if not args.graphs:
        base.gradient_checkpointing_enable(dict(use_reentrant=False))
    for layer in base.model.layers if args.compile else ():
        for module in (layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm):
            module.forward = torch.compile(module.forward)  # and not the module, whose hooks would be compiled too
    return model.train()


def compiled_in_checkpoint(layer: nn.Module) -> Callable[..., Tensor]:
    """Returns the compiled forward of a layer within a checkpoint. The class's own `forward` already has a checkpoint
    around the function that is compiled here."""
    compiled = torch.compile(partial(type(layer).forward.__wrapped__, layer))

    def forward(*args: object, **kwargs: object) -> Tensor:
        return checkpoint(partial(compiled, **kwargs), *args, use_reentrant=False)

    return forward


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean cross entropy. Logits of all tokens at once would be the largest tensors of the step."""
    base = model.get_base_model()
    hidden = base.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    targets = tokens[:, 1:].flatten()

    def part(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(base.lm_head(x).float(), y, reduction="sum")

    parts = zip(hidden.split(LOSS_TOKENS), targets.split(LOSS_TOKENS), strict=True)
    return sum(checkpoint(part, x, y, use_reentrant=False) for x, y in parts) / len(targets)


def seconds_of_steps(step: Callable[[Tensor], None], batches: list[Tensor], device: torch.device) -> list[float]:
    """Runs steps, and returns the seconds of each one. No step waits for the device: the host may be ahead of it."""
    on_gpu = device.type == "cuda"

    def mark() -> float | torch.cuda.Event:
        if not on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    marks = [mark()]
    for tokens in batches:
        step(tokens)
        marks.append(mark())
    if on_gpu:
        torch.cuda.synchronize()
    pairs = itertools.pairwise(marks)
    return [began.elapsed_time(ended) / 1e3 if on_gpu else ended - began for began, ended in pairs]


def train(model: nn.Module, args: argparse.Namespace, device: torch.device, phases: Phases) -> dict:
    vocabulary = model.get_base_model().config.vocab_size
    generator = torch.Generator().manual_seed(1)
    size = args.sequences, args.context
    number = args.warm + args.steps + args.profile
    batches = [torch.randint(vocabulary, size, generator=generator) for _ in range(number)]
    batches = [batch.to(device) for batch in batches]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=device.type == "cuda")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses: list[Tensor] = []
    is_autocast = args.adapters == "autocast"

    def step(tokens: Tensor) -> None:
        with waterfall.mark(waterfall.ENDS), torch.autocast(device.type, torch.bfloat16, enabled=is_autocast):
            loss = loss_of(model, tokens)
        loss.backward()
        with waterfall.mark(waterfall.OPTIMIZER):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())

    if args.graphs:
        with phases("graphs"), torch.autocast(device.type, torch.bfloat16, enabled=is_autocast):
            graph_layers_(model.get_base_model().model, input_ids=batches[0], use_cache=False)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
    with phases("warm"):
        seconds_of_steps(step, batches[: args.warm], device)
    with phases("steps"):
        timed = seconds_of_steps(step, batches[args.warm : args.warm + args.steps], device)
    peak = torch.cuda.max_memory_allocated() + bytes_of_graphs() if device.type == "cuda" else None
    busiest = None
    if not args.graphs and args.compile != "layers":  # these call no hooks of experts
        with routing.counted(model) as ratio, torch.autocast(device.type, torch.bfloat16, enabled=is_autocast):
            loss_of(model, batches[-1])
        busiest = ratio()
    profile = {}
    if args.profile:
        with phases("profile"):
            call = partial(step, batches[-1])
            profile = finetune_work.profile_of(call, model, args.impl, device, median(timed))
        table = tabulate(profile["profile_ms"].items(), ("ms of a step", args.impl), floatfmt=".1f")
        print(table, file=sys.stderr, flush=True)
    losses = [loss.item() for loss in losses]
    assert all(map(math.isfinite, losses)), losses
    return profile | dict(
        tokens_per_second=args.sequences * args.context * args.steps / sum(timed),
        step_seconds=[round(s, 6) for s in timed],
        losses=[round(loss, 4) for loss in losses],
        busiest_expert=busiest,
        trained_parameters=sum(p.numel() for p in trained),
        peak_bytes=peak,
    )


def bytes_of_graphs() -> int:
    """The memory pools of CUDA graphs. What their replays write there does not count as allocated."""
    segments = torch.cuda.memory_snapshot()
    return sum(s["total_size"] - s["allocated_size"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0))


def measure(args: argparse.Namespace, device: torch.device) -> dict:
    phases = Phases(device)
    config = config_of(args)
    known = "model impl rank context sequences adapters attention_only compile graphs memory".split()
    result = environment(device) | {name: getattr(args, name) for name in known}
    if args.memory:
        torch.cuda.set_per_process_memory_fraction(args.memory * 1e9 / torch.cuda.get_device_properties(0).total_memory)
    result |= dict(layers=config.num_hidden_layers, of_layers=layers_of(args.model))
    result |= {name: version(name) for name in ("transformers", "peft")}
    result["from_checkpoint"] = bool(args.checkpoint)
    try:
        result |= run(args, config, device, phases)
    except torch.cuda.OutOfMemoryError as error:
        result |= dict(out_of_memory=str(error).splitlines()[0], peak_bytes=torch.cuda.max_memory_allocated())
    return result | dict(seconds=phases.seconds, allocated_bytes=phases.allocated)


def run(args: argparse.Namespace, config: object, device: torch.device, phases: Phases) -> dict:
    register()
    if not args.checkpoint or not args.checkpoint.exists():
        with phases("build"):
            model = random_model(config, args.impl, device)
    if args.checkpoint:
        if not args.checkpoint.exists():
            with phases("write"):
                moe_fp8_ext.export_fp8(model, args.checkpoint)
            del model
            gc.collect()
        with phases("load"):
            model = loaded(args.checkpoint, args.impl, device)
    model.config._experts_implementation = IMPLEMENTATIONS[args.impl]
    tokens = torch.randint(config.vocab_size, (1, args.context), generator=torch.Generator().manual_seed(2))
    with torch.no_grad(), routing.counted(model) as ratio:
        model.base_model(input_ids=tokens.to(device), use_cache=False)
    before = ratio()
    with phases("adapters"):
        model = with_adapters(model, args, device)
    with disable_input_dtype_casting(model, active=args.adapters == "autocast"):
        result = train(model, args, device, phases)
    return result | dict(busiest_expert=[before, result["busiest_expert"]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--impl", choices=IMPLEMENTATIONS, required=True)
    parser.add_argument("--model", choices=MODELS, default="Qwen3-30B-A3B")
    parser.add_argument("--layers", type=int, metavar="N", help="the first N layers alone")
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="of ours: write the model there unless the "
                        "folder exists, and load it; without it, weights are made on the GPU")  # fmt: skip
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--sequences", type=int, default=2, help="sequences of a step")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", choices=ADAPTERS, default="autocast", help="dtype of A and B: float32 with "
                        "products in BF16 by torch.autocast, float32 or bfloat16; by default %(default)s")  # fmt: skip
    parser.add_argument("--compile", choices=("attention", "layers"), help="compile, by torch.compile, attention and "
                        "norms of every layer, or the whole layer")  # fmt: skip
    parser.add_argument("--graphs", action="store_true", help="run every layer as CUDA graphs, by `graph_layers_`, "
                        "in place of gradient checkpointing")  # fmt: skip
    parser.add_argument("--attention-only", action="store_true", help="no adapters on experts")
    parser.add_argument("--memory", type=int, metavar="GB", help="allocate at most so many GB (10^9 bytes), as on a "
                        "GPU that has no more")  # fmt: skip
    parser.add_argument("--warm", type=int, default=3, metavar="N", help="steps before those that are timed")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="steps that are timed")
    parser.add_argument("--profile", action="store_true", help="say how the time of one more step is spent")
    parser.add_argument("--out", type=Path, metavar="FILE", help="add the result to this JSON file, such as "
                        f"bench/results/{tables.FINETUNE}")  # fmt: skip
    args = parser.parse_args()
    if args.graphs and args.compile == "layers":
        parser.error("--graphs captures layers, and --compile layers replaces them: choose one")
    if args.model != "tiny" and not torch.cuda.is_available():
        parser.error(f"--model {args.model} needs a GPU; a CPU trains --model tiny")
    if args.memory and not torch.cuda.is_available():
        parser.error("--memory limits the memory of a GPU, and there is none")
    if args.checkpoint and args.impl == "stock":
        parser.error("--checkpoint is for --impl ours: the checkpoint is one in FP8")
    result = measure(args, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    print(json.dumps(result))
    if args.out:
        results = json.loads(args.out.read_text()) if args.out.exists() else []
        args.out.write_text(json.dumps([*results, result], indent=1) + "\n")


if __name__ == "__main__":
    main()
