"""Tiny models of Megatron-Core that train with gloo on a CPU, and stand-ins for what it asks of a GPU untold."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from queue import Queue
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

EXPERTS, HIDDEN, FFN, VOCABULARY, LENGTH, SEQUENCES = 8, 64, 32, 128, 32, 4
_TYPES = {torch.float32: "torch.cuda.FloatTensor", torch.bfloat16: "torch.cuda.BFloat16Tensor"}


class _NoStream:
    def __init__(self, *_: object, **__: object) -> None: ...
    def wait_stream(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self) -> _NoStream:
        return self


class OnCpu(TorchFunctionMode):
    """Gives tensors that are made with device="cuda" to the CPU, and calls its tensors CUDA's where a type is asked."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")) == "cuda":
            kwargs["device"] = "cpu"
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return _TYPES.get(args[0].dtype) or func(*args)
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*args, **kwargs)


def _with_plain_sizes(all_to_all):
    """gloo takes no tensors of one element as sizes, as NCCL does."""

    @functools.wraps(all_to_all)
    def call(out, sent, output_split_sizes=None, input_split_sizes=None, **rest):
        sizes = [None if s is None else [int(i) for i in s] for s in (output_split_sizes, input_split_sizes)]
        return all_to_all(out, sent, *sizes, **rest)

    return call


def _keeping_step(set_states):
    """Without APEX, torch's Adam counts steps in a tensor of each state. Megatron restores one for all, and does not
    pass it here."""

    def call(optimizer, model_param, tensors):
        group, order = optimizer.model_param_group_index_map[model_param]
        state = optimizer.optimizer.state[optimizer.optimizer.param_groups[group]["params"][order]]
        state["step"] = state["step"].clone()
        return set_states(optimizer, model_param, {"step": state["step"], **tensors})

    return call


@contextmanager
def megatron_on_cpu(expert_parallel: int = 1, expert_tensor_parallel: int = 1, seconds: float = 120) -> Iterator[None]:
    """Within it, Megatron runs without a GPU, over all processes. Ranks wait for one another for some seconds."""
    stand_ins = dict(
        current_device=lambda: "cpu",
        synchronize=lambda *_: None,
        empty_cache=lambda: None,
        Stream=_NoStream,
        current_stream=lambda *_, **__: _NoStream(),
        default_stream=lambda *_, **__: _NoStream(),
        stream=lambda _: nullcontext(),
    )
    sizes = dict(expert_model_parallel_size=expert_parallel, expert_tensor_parallel_size=expert_tensor_parallel)
    with ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            stack.enter_context(patch.object(torch.cuda, name, stand_in))
        stack.enter_context(patch.object(CudaRNGStatesTracker, "fork", lambda *_: nullcontext()))
        for name in ("_get_cuda_rng_state", "_set_cuda_rng_state"):
            stack.enter_context(patch.object(random, name, lambda *_, **__: None))
        stack.enter_context(patch.object(dist, "all_to_all_single", _with_plain_sizes(dist.all_to_all_single)))
        # 0.16.1 reads this name before it looks whether TransformerEngine is there.
        stack.enter_context(patch.object(moe_utils, "te_general_gemm", None, create=True))
        name = "_set_main_param_and_optimizer_states"
        stand_in = _keeping_step(getattr(DistributedOptimizer, name))
        stack.enter_context(patch.object(DistributedOptimizer, name, stand_in))
        # A queue of a process of its own is needed where saving goes on in the background only.
        stack.enter_context(patch.object(filesystem_async, "_get_write_results_queue", Queue))
        parallel_state.initialize_model_parallel(1, 1, **sizes, distributed_timeout_minutes=seconds / 60)
        stack.callback(parallel_state.destroy_model_parallel)
        yield


def config_of(**options: object) -> TransformerConfig:
    expert_parallel = parallel_state.get_expert_model_parallel_world_size()
    expert_tensor_parallel = parallel_state.get_expert_tensor_parallel_world_size()
    plain = dict(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        ffn_hidden_size=2 * FFN,
        num_moe_experts=EXPERTS,
        moe_ffn_hidden_size=FFN,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=expert_parallel,
        expert_tensor_parallel_size=expert_tensor_parallel,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=functional.silu,
        bias_activation_fusion=False,  # torch.compile would make it
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        transformer_impl="local",
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,  # Megatron's own layers need APEX for it
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    return TransformerConfig(**{**plain, **options})


def local_spec() -> object:
    """The spec of a layer with SequentialMLP."""
    return get_gpt_layer_local_spec(num_experts=EXPERTS, normalization="RMSNorm")


class Trained:
    """A GPT under Megatron's DDP with Megatron's distributed optimizer. Every model starts from the same values."""

    def __init__(
        self,
        layer_spec: object,
        *,
        overlap: bool = True,
        distributed: bool = True,
        delayed: bool = False,
        **options: object,
    ) -> None:
        torch.manual_seed(0)
        sizes = dict(vocab_size=VOCABULARY, max_sequence_length=LENGTH, position_embedding_type="rope")
        config = config_of(**options)
        config.delay_wgrad_compute = delayed
        self.model = GPTModel(config, layer_spec, **sizes)
        of_ddp = dict(overlap_grad_reduce=overlap, overlap_param_gather=overlap and distributed)
        of_ddp.update(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True, delay_wgrad_compute=delayed)
        self.ddp = DistributedDataParallel(self.model.config, DistributedDataParallelConfig(**of_ddp), self.model)
        self.ddp.broadcast_params()
        of_adam = dict(optimizer="adam", lr=3e-3, bf16=True, use_distributed_optimizer=distributed, clip_grad=1.0)
        with OnCpu():
            of_adam["overlap_param_gather"] = of_ddp["overlap_param_gather"]
            self.optimizer = get_megatron_optimizer(OptimizerConfig(**of_adam), [self.ddp])

    def loss(self, batch: int) -> Tensor:
        """The loss of the sequences of a batch. Each counts on by a step of its own."""
        g = torch.Generator().manual_seed(batch)
        first, step = (
            torch.randint(0, VOCABULARY, (SEQUENCES, 1), generator=g),
            torch.randint(1, 4, (SEQUENCES, 1), generator=g),
        )
        tokens = (first + step * torch.arange(LENGTH + 1)) % VOCABULARY
        places = torch.arange(LENGTH).expand(SEQUENCES, -1)
        mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
        return self.ddp(tokens[:, :-1].contiguous(), places, mask, labels=tokens[:, 1:].contiguous()).float().mean()

    def step(self, number: int, of_all: int) -> float:
        """Trains on `of_all` batches, which ranks share. Returns the mean loss of all ranks."""
        ranks = dist.get_world_size()
        mine = range(number * of_all + dist.get_rank(), (number + 1) * of_all, ranks)
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for batch in mine:
            with nullcontext() if batch == mine[-1] else self.ddp.no_sync():
                loss = self.loss(batch) / len(mine)
                loss.backward()
            total += loss.detach()
        self.ddp.finish_grad_sync()
        with OnCpu():
            self.optimizer.step()
        dist.all_reduce(total)
        return total.item() / ranks

    def train(self, steps: int, of_all: int = 4, first: int = 0) -> list[float]:
        return [self.step(first + i, of_all) for i in range(steps)]

    def sharded(self) -> dict[str, object]:
        """The entries of a checkpoint of `dist_checkpointing`: of the model and of its optimizer."""
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        model = self.model.sharded_state_dict(metadata=metadata)
        with OnCpu():
            optimizer = self.optimizer.sharded_state_dict(model, metadata=metadata)
        return {"model": model, "optimizer": optimizer}

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        """With overlap, parameters are otherwise gathered by the next forward."""
        if self.ddp.use_forward_hook:
            self.ddp.disable_forward_pre_hook()
        yield
        if self.ddp.use_forward_hook:
            self.ddp.enable_forward_pre_hook()

    def save(self, folder: Path) -> None:
        with self._gathered():
            dist_checkpointing.save(self.sharded(), str(folder))

    def load(self, folder: Path) -> None:
        """Loads the model and its optimizer, which must have made a step: torch's Adam has no state before."""
        with self._gathered():
            loaded = dist_checkpointing.load(self.sharded(), str(folder))
            self.model.load_state_dict(loaded["model"])
            with OnCpu():
                self.optimizer.load_state_dict(loaded["optimizer"])
