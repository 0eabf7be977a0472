"""Trains a GPT of Megatron-Core with the layer sizes of Qwen3-30B-A3B, cut in layers and to bytes, with Megatron's
SequentialMLP in BF16 and with this package's experts. Prints tokens per second, peak memory and losses.

    python bench/mcore.py                                       # on all GPUs of this machine, expert parallel over them
    python bench/mcore.py --gpus 1 --dispatcher allgather --kinds bf16,rowwise

Each kind of experts trains in processes of its own, so that none finds memory of another. A micro-batch is of 4
sequences of 4,096 tokens for each GPU. An expert then sees as many rows as with one such sequence for each GPU and four
times as many GPUs. A step has 65,536 tokens for each GPU, as a batch of 4 million tokens has on 64 GPUs.

It needs megatron-core 0.16.1, and neither TransformerEngine nor APEX. Then a part of Megatron is slower than where they
are installed, for all kinds alike: rotary embeddings and AdamW. Two parts are replaced, for all kinds alike too.
torch's attention is in place of Megatron's unfused one. With dispatcher "alltoall", `mcore_permute.py` is in place of
TransformerEngine's fused permutations, which `moe_permute_fusion` turns on. Gradients go through Megatron's DDP with
overlapped reduction and its distributed optimizer.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory

import device_time
import mcore_permute
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from tabulate import tabulate
from torch import Tensor, nn
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, start_processes
from torch.nn.functional import scaled_dot_product_attention, silu

from moe_fp8_ext import reuse_weights
from moe_fp8_ext.integrations.megatron import convert

# Recipes with "+" quantize the weights once for all micro-batches of a step, by `reuse_weights`.
KINDS = ("sequential", "bf16", "rowwise", "rowwise+", "blockwise")
WARM_STEPS = 10
DISPATCHERS = ("alltoall", "allgather")
FUSED = ("alltoall",)  # dispatchers whose permutations are fused
# Kind of work: what names of its ops begin with. The first that fits counts.
WORK = {
    "products of FP8 experts": ("moe_fp8::scaled_grouped_mm", "moe_fp8::add_scaled_grouped_mm"),
    "casts of weights": ("moe_fp8::quantize_weight", "moe_fp8::transpose_weight"),
    "permutations": (
        *("moe_fp8::permute_pad", "moe_fp8::unpermute", "moe_fp8::combine", "moe_fp8::sort_tokens"),
        *("aten::index", "aten::gather", "aten::scatter", "aten::masked", "aten::split", "aten::cat", "aten::topk"),
    ),
    "activations and casts of tokens": ("moe_fp8::",),
    "attention": ("aten::_scaled_dot_product", "aten::_flash", "aten::_cudnn", "aten::_efficient"),
    "products of experts in BF16": ("aten::_grouped_mm", "aten::bmm", "aten::baddbmm"),
    "products of linear layers": ("aten::mm", "aten::addmm", "aten::linear", "aten::matmul"),
    "messages between ranks": ("nccl:", "c10d::", "record_param_comms"),
    "optimizer": ("aten::_foreach", "aten::_fused", "aten::_amp", "aten::_local_scalar"),
}
OTHER = "other"  # work of no kind
VOCABULARY = 256
QWEN3_30B_A3B = dict(
    hidden_size=2048,
    num_attention_heads=32,
    num_query_groups=4,
    kv_channels=128,
    num_moe_experts=128,
    moe_ffn_hidden_size=768,
    moe_router_topk=8,
)
TINY = dict(hidden_size=64, num_attention_heads=4, num_moe_experts=8, moe_ffn_hidden_size=32, moe_router_topk=2)


class TorchAttention(nn.Module):
    """Causal attention by torch, in place of Megatron's unfused one. Takes and returns [length, sequences, ...]."""

    def __init__(self, **_: object) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
        heads_first = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        out = scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


def layer_spec(kind: str, experts: int) -> object:
    spec = get_gpt_layer_local_spec(num_experts=experts, normalization="RMSNorm", qk_layernorm=True)
    attention = spec.submodules.self_attention
    attention = replace(attention, submodules=replace(attention.submodules, core_attention=TorchAttention))
    spec = replace(spec, submodules=replace(spec.submodules, self_attention=attention))
    return spec if kind == "sequential" else convert(spec, kind.rstrip("+"), main_grad=True)


class Run:
    """A model in training. `on_cpu` surrounds what Megatron makes on a GPU untold, for tests. `config` replaces options
    of Megatron's config."""

    def __init__(
        self,
        kind: str,
        sizes: dict[str, int],
        layers: int,
        context: int,
        gpu: bool,
        dispatcher: str = "alltoall",
        on_cpu: Callable[[], AbstractContextManager] = nullcontext,
        config: dict[str, object] | None = None,
    ):
        self.on_cpu, self.reuse = on_cpu, reuse_weights if kind.endswith("+") else nullcontext
        mcore_permute.provide()
        options = dict(
            num_layers=layers,
            **sizes,
            ffn_hidden_size=sizes["moe_ffn_hidden_size"],
            moe_router_load_balancing_type="aux_loss",
            moe_aux_loss_coeff=1e-3,
            moe_token_dispatcher_type=dispatcher,
            moe_permute_fusion=dispatcher in FUSED,
            expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
            add_bias_linear=False,
            gated_linear_unit=True,
            activation_func=silu,
            bias_activation_fusion=gpu,  # Megatron compiles it, for its own experts
            normalization="RMSNorm",
            hidden_dropout=0.0,
            attention_dropout=0.0,
            transformer_impl="local",
            use_cpu_initialization=not gpu,
            gradient_accumulation_fusion=False,
            bf16=True,
            params_dtype=torch.bfloat16,
        )
        config = TransformerConfig(**{**options, **(config or {})})
        torch.manual_seed(0)
        if gpu:
            model_parallel_cuda_manual_seed(
                0, use_cudagraphable_rng=config.cuda_graph_impl != "none", force_reset_rng=True
            )
        places = dict(position_embedding_type="rope", rotary_base=1_000_000)
        spec = layer_spec(kind, config.num_moe_experts)
        with self.on_cpu():
            model = GPTModel(config, spec, VOCABULARY, context, **places)
        model = Float16Module(config, model.cuda() if gpu else model)  # norms in BF16 too, as Megatron trains them
        of_ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=True, use_distributed_optimizer=True
        )
        self.ddp = DistributedDataParallel(config, of_ddp, model)
        self.ddp.broadcast_params()
        of_adam = dict(optimizer="adam", lr=3e-4, bf16=True, use_distributed_optimizer=True, clip_grad=1.0)
        with self.on_cpu():
            self.optimizer = get_megatron_optimizer(OptimizerConfig(**of_adam), [self.ddp])

    def step(self, micro_batches: Tensor) -> tuple[Tensor, float]:
        """Trains on micro-batches [number, sequences, context + 1]. Returns the loss, and the seconds without the
        optimizer."""
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        places = torch.arange(micro_batches.shape[2] - 1, device=micro_batches.device)
        losses, began = [], now()
        with self.reuse():
            for i, tokens in enumerate(micro_batches):
                is_last = i == len(micro_batches) - 1
                sync: AbstractContextManager = nullcontext() if is_last else self.ddp.no_sync()
                with sync:
                    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
                    out = self.ddp(inputs, places.expand_as(inputs), None, labels=labels)
                    loss = out.float().mean() / len(micro_batches)
                    loss.backward()
                losses.append(loss.detach())
        self.ddp.finish_grad_sync()
        seconds = now() - began
        with self.on_cpu():
            self.optimizer.step()
        return torch.stack(losses).sum(), seconds


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def batches_of(steps: int, micro_batches: int, sequences: int, context: int, device: torch.device) -> Tensor:
    """Returns bytes of Python's standard library, [steps, micro-batches, sequences, context + 1], of this rank."""
    source = b"".join(file.read_bytes() for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(dist.get_rank())
    starts = torch.randint(len(text) - context, (steps, micro_batches, sequences), generator=generator)
    return text[starts[..., None] + torch.arange(context + 1)].long().to(device)


def measure(
    kind: str,
    batches: Tensor,
    sizes: dict[str, int],
    layers: int,
    warm: int,
    profiled: bool = False,
    **options: object,
) -> dict:
    run = Run(kind, sizes, layers, batches.shape[3] - 1, batches.is_cuda, **options)
    losses, steps, backwards = [], [], []
    for i, batch in enumerate(batches):
        if i == warm and batch.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        began = now()
        loss, seconds = run.step(batch)
        steps.append(now() - began)
        backwards.append(seconds)
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
    tokens = batches[0].shape.numel() // batches.shape[3] * (batches.shape[3] - 1) * dist.get_world_size()
    result = {
        "kind": kind,
        "losses": losses,
        "tokens_per_second": tokens / median(steps[warm:]),
        "tokens_per_second_without_optimizer": tokens / median(backwards[warm:]),
        "peak_bytes": torch.cuda.max_memory_allocated() if batches.is_cuda else None,
        "allocator_retries": torch.cuda.memory_stats().get("num_alloc_retries", 0) if batches.is_cuda else None,
    }
    if profiled:
        result.update(profile_of(run, batches[-1], median(steps[warm:])))
    return result


def profile_of(run: Run, batch: Tensor, seconds: float) -> dict:
    """Milliseconds of a step by kind of work, and the ops with the most time: name, number, milliseconds."""
    found = device_time.profiled(lambda: run.step(batch), batch.device)
    of_kinds = device_time.by_kind(found, {op: work_of(op.name) for op in found.ops}, OTHER)
    of_ops: dict[str, list[float]] = {}
    for op, us in device_time.time_of_ops(found)[0].items():
        if us:
            of_ops.setdefault(op.name, []).append(us / 1000)
    ops = [(name, len(times), round(sum(times), 3)) for name, times in of_ops.items()]
    return {"profile_ms": device_time.of_step(of_kinds, seconds), "ops": sorted(ops, key=lambda op: -op[2])[:30]}


def work_of(op: str) -> str:
    return next((kind for kind, starts in WORK.items() if op.startswith(starts)), OTHER)


def table(runs: list[dict]) -> str:
    """One line a run, and how many times as fast as SequentialMLP and as this package in BF16 it is."""
    speeds = {run["kind"]: run["tokens_per_second"] for run in runs}
    body = []
    for run in runs:
        speed = speeds[run["kind"]]
        beside = (f"{speed / speeds[kind]:.2f}" if kind in speeds else "" for kind in ("sequential", "bf16"))
        losses = f"{run['losses'][0]:.4f}", f"{fmean(run['losses'][-10:]):.4f}"
        peak = "" if run["peak_bytes"] is None else f"{run['peak_bytes'] / 2**30:.1f}"
        without = f"{run['tokens_per_second_without_optimizer']:,.0f}"
        body.append((run["kind"], *losses, f"{speed:,.0f}", *beside, without, peak))
    headings = ("experts", "first loss", "last 10", "tokens/s", "x sequential", "x bf16", "without optimizer", "GiB")
    return tabulate(body, headings, disable_numparse=True)


def profile_table(runs: list[dict]) -> str:
    """Milliseconds of a step: a line for each kind of work, a column for each run."""
    runs = [run for run in runs if "profile_ms" in run]
    kinds = *WORK, OTHER, device_time.IDLE
    body = [(kind, *(f"{run['profile_ms'].get(kind, 0):.1f}" for run in runs)) for kind in kinds]
    return tabulate(body, ("ms of a step", *(run["kind"] for run in runs)), disable_numparse=True)


def train(rank: int, args: argparse.Namespace, kind: str, folder: Path) -> None:
    """Measures a kind in the processes of one group, one for each GPU. The first one writes the result.

    Processes of all kinds start at once, because imports take long. Each waits for its turn before it uses a GPU.
    """
    while not (folder / "turn").exists():
        time.sleep(0.1)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("nccl", rendezvous, rank=rank, world_size=args.gpus, device_id=device)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=args.gpus)
    batches = batches_of(args.steps, *map(int, args.step.split(",")), device)
    options = dict(dispatcher=args.dispatcher, profiled=args.profile)
    result = measure(kind, batches, QWEN3_30B_A3B, args.layers, WARM_STEPS, **options)
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    from run import environment  # here, because the processes that train need none of what it imports

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS), metavar="K,K", help=f"of {', '.join(KINDS)}, mxfp8, auto")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count(), metavar="N", help="all, by default")
    parser.add_argument("--dispatcher", choices=DISPATCHERS, default=DISPATCHERS[0], help="Megatron's token dispatcher")
    parser.add_argument("--steps", type=int, default=50, metavar="N", help=f"more than {WARM_STEPS}, untimed ones")
    parser.add_argument("--layers", type=int, default=2, metavar="N")
    parser.add_argument("--step", default="4,4,4096", metavar="M,S,C", help="micro-batches, sequences, tokens of each")
    parser.add_argument("--profile", action="store_true", help="say how the time of one more step is spent")
    parser.add_argument("--out", type=Path, metavar="FILE", help="add the results to this JSON file")
    args = parser.parse_args()
    if args.steps <= WARM_STEPS:
        parser.error(f"--steps must be over {WARM_STEPS}, got {args.steps}")
    if not 0 < args.gpus <= torch.cuda.device_count():
        parser.error(f"--gpus must be from 1 to the {torch.cuda.device_count()} GPUs of this machine, got {args.gpus}")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    of_all = environment(torch.device("cuda")) | dict(
        device_time.COUNTED,
        megatron_core=version("megatron-core"),
        layers=args.layers,
        ranks=args.gpus,
        dispatcher=args.dispatcher,
        permutations="fused" if args.dispatcher in FUSED else "unfused",
        step=args.step,
    )
    earlier = json.loads(args.out.read_text()) if args.out and args.out.exists() else []
    runs: list[dict] = []
    with TemporaryDirectory() as folder:
        places = {kind: Path(folder) / kind for kind in args.kinds.split(",")}
        for place in places.values():
            place.mkdir()
        options = dict(nprocs=args.gpus, join=False, daemon=True)
        started = {kind: start_processes(train, (args, kind, place), **options) for kind, place in places.items()}
        for kind, place in places.items():
            (place / "turn").touch()
            try:
                while not started[kind].join():
                    pass
            except (ProcessExitedException, ProcessRaisedException) as error:  # other kinds may have enough memory
                print(f"{kind}: {error}", flush=True)
                continue
            runs.append(json.loads((place / "result.json").read_text()))
            print(table(runs), flush=True)
            if args.profile:
                print(profile_table(runs), flush=True)
            if args.out:
                args.out.write_text(json.dumps([*earlier, of_all | {"runs": runs}], indent=1) + "\n")


if __name__ == "__main__":
    main()
