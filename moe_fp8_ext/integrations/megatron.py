"""Routed experts for Megatron-Core that compute by `experts_of_groups`.

    layer_spec = convert(get_gpt_layer_with_transformer_engine_spec(num_experts=128), "rowwise")
    submodules = MoESubmodules(experts=spec("rowwise"))
    pretrain_gpt.py --spec moe_fp8_ext.integrations.megatron rowwise

Megatron's own routers, dispatchers and shared experts stay in use. Checkpoints have the names and shapes of
SequentialMLP and TEGroupedMLP. Each of the three classes loads checkpoints of the other two.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from moe_fp8_ext.layer.experts import KEEP, experts_of_groups
from moe_fp8_ext.layer.node import node_of
from moe_fp8_ext.layer.weight_gradients import DelayedWgrads
from moe_fp8_ext.ops.checks import check_bool, check_one_of, require
from moe_fp8_ext.ops.dispatch import needs_gradient
from moe_fp8_ext.quantization.recipe import Recipe, get_recipe
from moe_fp8_ext.report.machine import installed

_HERE = "moe_fp8_ext.integrations.megatron"


try:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer, MoESubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import BaseTransformerLayer, get_transformer_layer_offset
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
    from megatron.core.utils import get_pg_rank, get_pg_size

    from moe_fp8_ext.integrations.megatron_config import checked
    from moe_fp8_ext.integrations.megatron_parameters import GroupedLinear, Keys, Ranks
except ImportError as error:
    text = f"{_HERE}: megatron-core must have the modules of 0.16.1, which tests run with"
    raise ImportError(f"{text}, got {installed('megatron-core')}: {error}") from error


def spec(recipe: str | Recipe = "rowwise", *, keep: str = "fp8", main_grad: bool | None = None) -> ModuleSpec:
    """Returns the spec of experts, for `MoESubmodules(experts=...)`.

    Args:
        recipe, keep: as in `experts_of_groups`.
        main_grad: whether backward adds gradients of weights to the main gradients of Megatron's DDP, in float32. None
            follows config.gradient_accumulation_fusion, an option that needs APEX or TransformerEngine. True needs
            neither package.

    Raises:
        ValueError, TypeError: no recipe of that name exists, or recipe is neither a name nor a `Recipe`.
        RuntimeError: keep is neither "fp8" nor "bf16", or main_grad is neither a bool nor None.
    """
    get_recipe(recipe, _HERE)
    check_one_of(_HERE, "keep", keep, KEEP)
    if main_grad is not None:
        check_bool(_HERE, "main_grad", main_grad)
    return ModuleSpec(module=MoeFp8GroupedMLP, params={"recipe": recipe, "keep": keep, "main_grad": main_grad})


def convert(layer_spec: object, recipe: str | Recipe = "rowwise", **options: object) -> object:
    """Returns a copy of a spec in which MoE layers have the experts of `spec(recipe, **options)`.

    Args:
        layer_spec: the spec of a layer or of a block, or a list of specs. At least one layer must be an MoE layer. For
            NeMo and Megatron Bridge, layer_spec may also be a function that returns such a spec. The result is then a
            function too.
        recipe, options: as in `spec`.

    Raises:
        TypeError: no MoE layer was found.
    """
    experts = spec(recipe, **options)
    if callable(layer_spec) and not is_dataclass(layer_spec):

        @functools.wraps(layer_spec)  # callers look at its arguments
        def converting(*args: object, **kwargs: object) -> object:
            return convert(layer_spec(*args, **kwargs), recipe, **options)

        return converting
    found: list[MoESubmodules] = []
    converted = _converted(layer_spec, experts, found)
    if not found:
        text = f"layer_spec must have an MoE layer, whose spec has a MoESubmodules, got a {type(layer_spec).__name__}"
        raise TypeError(f"{_HERE}: {text} without one; was it made with num_experts?")
    return converted


def _converted(part: object, experts: ModuleSpec, found: list[MoESubmodules]) -> object:
    if isinstance(part, MoESubmodules):
        found.append(part)
        return replace(part, experts=experts)
    if isinstance(part, (list, tuple)):
        return type(part)(_converted(item, experts, found) for item in part)
    if not is_dataclass(part) or isinstance(part, type):
        return part
    values = {field.name: getattr(part, field.name) for field in fields(part) if field.init}
    return replace(part, **{name: _converted(value, experts, found) for name, value in values.items()})


class MoeFp8GroupedMLP(MegatronModule):
    """The routed experts of this rank, in place of TEGroupedMLP or SequentialMLP. `spec` makes it.

    Raises:
        RuntimeError: the config has an option that these experts do not support. The text says what to change.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: object = None,
        pg_collection: ProcessGroupCollection | None = None,
        recipe: str | Recipe = "rowwise",
        keep: str = "fp8",
        main_grad: bool | None = None,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["ep", "expt_tp", "expt_dp"])
        rank_and_size = [f(group) for group in (groups.ep, groups.expt_tp) for f in (get_pg_rank, get_pg_size)]
        ranks = Ranks(*rank_and_size, get_pg_rank(groups.expt_dp))
        activation = checked(config, ranks)
        self.num_local_experts, self.first_expert = num_local_experts, num_local_experts * ranks.expert
        self.adds_to_main_grad = config.gradient_accumulation_fusion if main_grad is None else main_grad
        self.options = dict(recipe=get_recipe(recipe, _HERE), keep=keep, activation=activation)
        hidden, ffn = config.moe_latent_size or config.hidden_size, config.moe_ffn_hidden_size
        gates = 2 if config.gated_linear_unit else 1
        self.linear_fc1 = GroupedLinear((gates * ffn, hidden), 0, gates, ranks, config)
        self.linear_fc2 = GroupedLinear((hidden, ffn), 1, 1, ranks, config)
        if config.perform_initialization:
            for expert in range(num_local_experts):
                self.linear_fc1.draw(expert, config.init_method, config.use_cpu_initialization)
                self.linear_fc2.draw(expert, config.output_layer_init_method, config.use_cpu_initialization)
        self.register_load_state_dict_pre_hook(_rename_sequential)
        self.delayed = DelayedWgrads() if config.delay_wgrad_compute else None
        self.hooks_of_ddp: list[Callable[[], object]] = []
        if self.delayed is not None:
            for linear in (self.linear_fc1, self.linear_fc2):
                linear.weight.skip_backward_post_hook = True  # DDP then registers its hooks here

    def extra_repr(self) -> str:
        recipe, activation = self.options["recipe"].name, self.options["activation"]
        delayed = "" if self.delayed is None else f", delayed={self.delayed!r}"
        return f"num_local_experts={self.num_local_experts}, recipe={recipe!r}, activation={activation!r}{delayed}"

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Computes the rows of a dispatcher.

        Args:
            permuted_local_hidden_states: [P, D], sorted by expert.
            tokens_per_expert: [E] of an integer dtype, on the host or on the device. The host does not wait for it.
            permuted_probs: [P].

        Returns:
            out [P, D] with biases added, and None.

        Errors of forward and backward get a note that names the layer, the rank and its experts.
        """
        x, scores = permuted_local_hidden_states, permuted_probs
        if self.config.moe_apply_probs_on_input:
            x, scores = (scores[:, None] * x).to(x.dtype), None
        (w_gate_up, b_gate_up), (w_down, b_down) = self.linear_fc1(), self.linear_fc2()
        rest = dict(b_gate_up=b_gate_up, b_down=b_down, delay_wgrad=self.delayed, **self.options)
        rest.update(main_grad_gate_up=self._main_grad(w_gate_up), main_grad_down=self._main_grad(w_down))
        with self._named("forward"):
            offs = group_ends(tokens_per_expert, x.device, x.is_cuda and torch.cuda.is_current_stream_capturing())
            out = experts_of_groups(x, offs, scores, w_gate_up, w_down, **rest)
        if (node := node_of(out)) is not None:
            node.failed = functools.partial(self._note, "backward")
        return out, None

    @contextmanager
    def _named(self, call: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._note(call, error)
            raise

    def _note(self, call: str, error: Exception) -> None:
        """Adds the layer and the rank to an error. Experts do not know their layer, so this searches for the layer."""
        every = (thing for thing in gc.get_objects() if issubclass(type(thing), BaseMoELayer))
        number = next((layer.layer_number for layer in every if layer.experts is self), None)
        layer = "a layer without a number" if number is None else f"layer {number}"
        experts = f"experts {self.first_expert} to {self.first_expert + self.num_local_experts - 1} of {layer}"
        text = f"{_HERE}: {call} of {experts} failed on rank {dist.get_rank()} of {dist.get_world_size()}"
        if self.num_local_experts < self.config.num_moe_experts:
            text = f"{text}; the other ranks of its expert parallel group wait for it until the timeout of that group"
        if sys.version_info >= (3, 11):
            error.add_note(text)
        else:
            error.args = (f"{error}\n{text}",)

    def _main_grad(self, weight: Tensor) -> Tensor | None:
        return getattr(weight, "main_grad", None) if self.adds_to_main_grad and needs_gradient(weight) else None

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], object]) -> None:
        """Registers a hook of a weight. Megatron's DDP calls this if gradients are delayed."""
        self.hooks_of_ddp.append(hook)

    def backward_dw(self) -> None:
        """Computes the delayed weight gradients of the oldest waiting backward. Without delays it does nothing.

        Raises:
            RuntimeError: no backward waits, or delay_wgrad_compute of DDP's config is False.
        """
        if self.delayed is None:
            return
        if not self.hooks_of_ddp and hasattr(self.linear_fc1.weight, "main_grad"):
            text = "delay_wgrad_compute must be True in DistributedDataParallelConfig too, got False"
            require(False, f"{_HERE}: {text}; DDP would wait for gradients that come later")
        with self._named("backward_dw"):
            self.delayed.backward_dw()
        for hook in self.hooks_of_ddp:
            hook()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, object]:
        single = ensure_metadata_has_dp_cp_group(metadata).get("singleton_local_shards", False)
        keys = Keys(f"{prefix}experts.", tuple(sharded_offsets), single)
        first = self.linear_fc1.sharded(prefix, "linear_fc1", keys)
        return first | self.linear_fc2.sharded(prefix, "linear_fc2", keys)


def group_ends(counts: Tensor, device: torch.device, capturing: bool) -> Tensor:
    """Returns the ends of groups on the device: [E] int32.

    Args:
        counts: rows of each group, on the host or on the device.
        capturing: whether a CUDA graph is captured. A replay would read counts on the host again, from memory that has
            been freed. So counts on the host must be constants: all equal, as with a capacity.
    """
    if not capturing or counts.is_cuda:
        return counts.to(device, non_blocking=True).cumsum(0, dtype=torch.int32)
    first, *others = counts.tolist()
    text = "tokens_per_expert on the host must be equal for all experts in a CUDA graph, got"
    require(others.count(first) == len(others), f"{_HERE}: {text} {min(first, *others)} to {max(first, *others)}")
    return first * torch.arange(1, len(counts) + 1, dtype=torch.int32, device=device)


def _rename_sequential(_module: MegatronModule, state_dict: dict, prefix: str, *_: object) -> None:
    """Gives the entries of a SequentialMLP's state dict the names of TEGroupedMLP."""
    first = f"{prefix}local_experts."
    for key in [key for key in state_dict if key.startswith(first)]:
        expert, linear, name = key[len(first) :].split(".")
        state_dict[f"{prefix}{linear}.{name}{expert}"] = state_dict.pop(key)


class _Layer(BaseTransformerLayer):
    """Builds the layer that Megatron builds without `--spec`, with experts of this package.

    `--spec` passes no arguments to the object that it names. So this class builds the layer's spec from the config.
    """

    def __new__(cls, config, layer_number=1, pg_collection=None, vp_stage=None, recipe="rowwise", **rest):
        has_te = config.transformer_impl == "transformer_engine"
        specs = get_gpt_decoder_layer_specs(config, has_te, config.normalization, config.qk_l2_norm)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["pp"])
        offset = get_transformer_layer_offset(config, vp_stage, get_pg_rank(groups.pp))
        layer = convert(specs, recipe)[offset + layer_number - 1]
        rest.update(layer_number=layer_number, pg_collection=pg_collection, vp_stage=vp_stage)
        return build_module(layer, config=config, **rest)


# For `--spec moe_fp8_ext.integrations.megatron NAME`.
bf16 = ModuleSpec(module=_Layer, params={"recipe": "bf16"})
rowwise = ModuleSpec(module=_Layer, params={"recipe": "rowwise"})
blockwise = ModuleSpec(module=_Layer, params={"recipe": "blockwise"})
mxfp8 = ModuleSpec(module=_Layer, params={"recipe": "mxfp8"})
auto = ModuleSpec(module=_Layer, params={"recipe": "auto"})
