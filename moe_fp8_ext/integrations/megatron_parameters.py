"""Parameters of Megatron's experts: initial values, names in state dicts, shards in checkpoints."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from torch import Tensor, nn

from moe_fp8_ext.ops.checks import require


class Ranks(NamedTuple):
    """The position of this rank in Megatron's groups for experts."""

    expert: int
    experts: int  # size of expert parallelism
    tensor: int
    tensors: int  # size of expert tensor parallelism
    replica: int  # among the ranks with the same parameters


class Keys(NamedTuple):
    """The names of a layer's experts in a checkpoint of `dist_checkpointing`."""

    prefix: str  # up to "experts."
    offsets: tuple[tuple[int, int, int], ...]  # of the layers above: axis, position, number
    single: bool  # whether each expert has its own keys; otherwise tensors have a leading axis of experts

    def of_expert(self, key: str, expert: int, total: int) -> tuple[str, tuple]:
        """Returns the key of an expert, and the offsets of the expert."""
        if self.single:
            return key.replace(self.prefix, f"{self.prefix}{expert}."), self.offsets
        return key, (*self.offsets, (len(self.offsets), expert, total))


class GroupedLinear(nn.Module):
    """The parameters of one projection of this rank's experts.

    A state dict has TEGroupedMLP's names: weight0, weight1, ..., bias0, ...

    Attributes:
        weight: [E, N, K], for y = x @ weight[e]^T. Expert tensor parallelism splits N or K.
        bias: [E, N] or None.

    Args:
        sizes: N and K of all ranks.
        axis: which size expert tensor parallelism splits: 0 for N, 1 for K.
        parts: 2 if N consists of gates and ups, otherwise 1.
    """

    def __init__(self, sizes: tuple[int, int], axis: int, parts: int, ranks: Ranks, config: TransformerConfig) -> None:
        super().__init__()
        self.sizes, self.axis, self.parts, self.ranks = sizes, axis, parts, ranks
        self.num_experts = config.num_moe_experts // ranks.experts
        self.shared_by_all = config.expert_model_parallel_size == 1
        n, k = (size // ranks.tensors if i == axis else size for i, size in enumerate(sizes))
        self.weight = self._parameter(config, n, k)
        self.register_parameter("bias", self._parameter(config, n) if config.add_bias_linear else None)
        self.register_state_dict_post_hook(_split_experts)
        self.register_load_state_dict_pre_hook(_stack_experts)

    def _parameter(self, config: TransformerConfig, *sizes: int) -> nn.Parameter:
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        made = nn.Parameter(torch.empty(self.num_experts, *sizes, dtype=config.params_dtype, device=device))
        made.allreduce = self.shared_by_all  # if False, DDP reduces among the ranks with the same experts
        made.tensor_model_parallel = True  # if False, the norm of gradients counts the parameter on one rank only
        made.partition_dim, made.partition_stride = 1 + self.axis, self.parts
        return made

    @torch.no_grad()
    def draw(self, expert: int, init: Callable[[Tensor], object], on_cpu: bool) -> None:
        """Draws the initial values of an expert. The same seed gives the values of SequentialMLP."""
        if self.bias is not None:
            self.bias[expert].zero_()
        if on_cpu:
            whole = torch.empty(self.sizes)
            init(whole)
            pieces = whole.chunk(self.parts * self.ranks.tensors, self.axis)[self.ranks.tensor :: self.ranks.tensors]
            self.weight[expert].copy_(torch.cat(pieces, self.axis))
        else:
            with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                init(self.weight[expert])

    def forward(self) -> tuple[Tensor, Tensor | None]:
        """Returns weight and bias. The call runs Megatron's hooks, which wait until the parameters are gathered."""
        return self.weight, self.bias

    def sharded(self, prefix: str, name: str, keys: Keys) -> dict[str, object]:
        """Returns the entries of `sharded_state_dict`.

        A parameter is one entry, so that Megatron finds its optimizer states. The entry saves each expert separately.
        """
        entries: dict[str, object] = {}
        for own, parameter in self.named_parameters():
            split = self.axis == 0 or own == "weight"  # the bias of the second projection is on all tensor ranks
            place = (self.ranks.tensor, self.ranks.tensors) if split else (0, 1)
            replica = (0, 0 if split else self.ranks.tensor, self.ranks.replica)
            build = functools.partial(self._shards, keys=keys, place=place)
            key = f"{keys.prefix}{name}.{own}"
            entries[f"{prefix}{name}.{own}"] = ShardedTensorFactory(key, parameter, build, self._whole, replica)
        for i, expert in enumerate(self._global_experts()):  # Megatron's own experts save and expect an empty state
            key, offsets = keys.of_expert(f"{keys.prefix}{name}._extra_state", expert, self._total)
            replica = (0, self.ranks.tensor, self.ranks.replica)
            state = make_sharded_object_for_checkpoint(None, key, offsets, replica)
            entries[f"{prefix}{name}._extra_state{i}"] = state
        return entries

    @property
    def _total(self) -> int:
        return self.num_experts * self.ranks.experts

    def _global_experts(self) -> range:
        first = self.num_experts * self.ranks.expert
        return range(first, first + self.num_experts)

    @torch.no_grad()
    def _shards(
        self,
        key: str,
        values: Tensor,
        replica_id: tuple[int, int, int],
        flattened_range: slice | None,
        *,
        keys: Keys,
        place: tuple[int, int],
    ) -> list[ShardedTensor]:
        """Splits a parameter, or an optimizer state of its shape, into experts, and each expert into gates and ups."""
        require(flattened_range is None, f"{key} must be whole to be split into experts, got a flattened range")
        rank, size = place
        shards = []
        for expert, tensor in zip(self._global_experts(), values, strict=True):
            expert_key, offsets = keys.of_expert(key, expert, self._total)
            axis = len(offsets) + (self.axis if tensor.dim() == 2 else 0)
            for part, piece in enumerate(tensor.chunk(self.parts)):
                if keys.single and self.parts == 2:
                    at, part_key = (axis, rank, size), f"{expert_key}_{'wv'[part]}"
                else:
                    at, part_key = (axis, part * size + rank, self.parts * size), expert_key
                options = dict(replica_id=replica_id, prepend_axis_num=len(offsets))
                shards.append(ShardedTensor.from_rank_offsets(part_key, piece, *offsets, at, **options))
        return shards

    @torch.no_grad()
    def _whole(self, shards: Sequence[Tensor]) -> Tensor:
        starts = range(0, len(shards), self.parts)
        return torch.stack([torch.cat(list(shards[start : start + self.parts])) for start in starts])


def _split_experts(of: GroupedLinear, state_dict: dict, prefix: str, *_: object) -> None:
    for name, _ in of.named_parameters():
        for i, tensor in enumerate(state_dict.pop(prefix + name)):
            state_dict[f"{prefix}{name}{i}"] = tensor


def _stack_experts(of: GroupedLinear, state_dict: dict, prefix: str, *_: object) -> None:
    for name, _ in of.named_parameters():
        keys = [f"{prefix}{name}{i}" for i in range(of.num_experts)]
        if all(key in state_dict for key in keys):  # `dist_checkpointing` loads the whole parameter
            state_dict[prefix + name] = torch.stack([state_dict.pop(key) for key in keys])
    for key in [key for key in state_dict if key.startswith(f"{prefix}_extra_state")]:
        state_dict.pop(key)  # state of TransformerEngine's own FP8, which these experts do not use
