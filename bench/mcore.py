"""Trains a GPT of Megatron-Core with the layer sizes of Qwen3-30B-A3B, cut in layers and to bytes, with Megatron's
SequentialMLP in BF16 and with this package's experts. Prints tokens per second and losses.

    python bench/mcore.py
    NCCL_NVLS_ENABLE=0 torchrun --nproc-per-node 2 bench/mcore.py        # expert parallel over two GPUs

It needs megatron-core 0.16.1, and neither TransformerEngine nor APEX. Then a part of Megatron is slower than where they
are installed, for all rows alike: permutations, norms and AdamW. Attention is torch's own, so that no row waits for
Megatron's unfused one. Gradients go through Megatron's DDP with overlapped reduction and its distributed optimizer.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sysconfig
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from run import environment
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from moe_fp8_ext import reuse_weights
from moe_fp8_ext.integrations.megatron import convert

# Recipes with "+" quantize the weights once for all micro-batches of a step, by `reuse_weights`.
KINDS = ("sequential", "bf16", "rowwise", "rowwise+", "blockwise")
WARM_STEPS = 10
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
    """A model in training. `on_cpu` surrounds what Megatron's optimizer does, for tests."""

    def __init__(self, kind: str, sizes: dict[str, int], layers: int, context: int, gpu: bool, on_cpu=nullcontext):
        self.on_cpu, self.reuse = on_cpu, reuse_weights if kind.endswith("+") else nullcontext
        config = TransformerConfig(
            num_layers=layers,
            **sizes,
            ffn_hidden_size=sizes["moe_ffn_hidden_size"],
            moe_router_load_balancing_type="aux_loss",
            moe_aux_loss_coeff=1e-3,
            moe_token_dispatcher_type="alltoall",
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
        torch.manual_seed(0)
        if gpu:
            model_parallel_cuda_manual_seed(0)
        places = dict(position_embedding_type="rope", rotary_base=1_000_000)
        spec = layer_spec(kind, config.num_moe_experts)
        model = GPTModel(config, spec, VOCABULARY, context, **places)
        model = model.cuda() if gpu else model
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


def measure(kind: str, batches: Tensor, sizes: dict[str, int], layers: int, warm: int, **options: object) -> dict:
    run = Run(kind, sizes, layers, batches.shape[3] - 1, batches.is_cuda, **options)
    losses, steps, backwards = [], [], []
    for batch in batches:
        began = now()
        loss, seconds = run.step(batch)
        steps.append(now() - began)
        backwards.append(seconds)
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
    tokens = batches[0].shape.numel() // batches.shape[3] * (batches.shape[3] - 1) * dist.get_world_size()
    return {
        "kind": kind,
        "losses": losses,
        "tokens_per_second": tokens / median(steps[warm:]),
        "tokens_per_second_without_optimizer": tokens / median(backwards[warm:]),
    }


def table(runs: list[dict]) -> str:
    """One line a run, and how many times as fast as SequentialMLP and as this package in BF16 it is, without the
    optimizer, which is the same for all."""
    speeds = {run["kind"]: run["tokens_per_second_without_optimizer"] for run in runs}
    body = []
    for run in runs:
        speed = speeds[run["kind"]]
        beside = (f"{speed / speeds[kind]:.2f}" if kind in speeds else "" for kind in ("sequential", "bf16"))
        losses = f"{run['losses'][0]:.4f}", f"{fmean(run['losses'][-10:]):.4f}"
        body.append((run["kind"], *losses, f"{run['tokens_per_second']:,.0f}", f"{speed:,.0f}", *beside))
    headings = ("experts", "first loss", "last 10", "tokens/s", "without optimizer", "x sequential", "x bf16")
    return tabulate(body, headings, disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS), metavar="K,K", help=f"of {', '.join(KINDS)}, mxfp8, auto")
    parser.add_argument("--steps", type=int, default=50, metavar="N", help=f"more than {WARM_STEPS}, untimed ones")
    parser.add_argument("--layers", type=int, default=2, metavar="N")
    parser.add_argument("--step", default="4,2,4096", metavar="M,S,C", help="micro-batches, sequences, tokens of each")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON file for the results")
    args = parser.parse_args()
    if args.steps <= WARM_STEPS:
        parser.error(f"--steps must be over {WARM_STEPS}, got {args.steps}")
    for name, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500").items():
        os.environ.setdefault(name, value)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
    vars(moe_utils).setdefault("te_general_gemm", None)  # 0.16.1 reads it without TransformerEngine too
    batches = batches_of(args.steps, *map(int, args.step.split(",")), device)
    runs = []
    for kind in args.kinds.split(","):
        runs.append(measure(kind, batches, QWEN3_30B_A3B, args.layers, WARM_STEPS))
        gc.collect()
        torch.cuda.empty_cache()
        if dist.get_rank() == 0:
            print(table(runs), flush=True)
    if args.out and dist.get_rank() == 0:
        of_all = dict(megatron_core=version("megatron-core"), layers=args.layers, ranks=dist.get_world_size())
        args.out.write_text(json.dumps(environment(device) | of_all | {"step": args.step, "runs": runs}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
