"""Lets the routed experts of Megatron-Core compute by `experts_of_groups`.

    layer_spec = convert(get_gpt_layer_with_transformer_engine_spec(num_experts=128), "rowwise")
    submodules = MoESubmodules(experts=spec("rowwise"))
    pretrain_gpt.py --spec moe_fp8_ext.integrations.megatron rowwise

Routers, dispatchers and shared experts stay Megatron's own. Checkpoints have the names and shapes of SequentialMLP and
TEGroupedMLP. All three load each other's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional

from moe_fp8_ext.layer.experts import KEEP, experts_of_groups
from moe_fp8_ext.layer.weight_gradients import DelayedWgrads
from moe_fp8_ext.ops.checks import check_bool, check_one_of, require
from moe_fp8_ext.ops.dispatch import needs_gradient
from moe_fp8_ext.quantization.recipe import Recipe, get_recipe

_HERE = "moe_fp8_ext.integrations.megatron"


def _found() -> str:
    try:
        return "no megatron-core" if find_spec("megatron") is None else f"megatron-core {version('megatron-core')}"
    except PackageNotFoundError:
        return "megatron-core of unknown version"


try:
    from megatron.core.activations import fast_gelu, quick_gelu, squared_relu
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe.moe_layer import MoESubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import BaseTransformerLayer, get_transformer_layer_offset
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
    from megatron.core.utils import get_pg_rank, get_pg_size

    from moe_fp8_ext.integrations.megatron_parameters import GroupedLinear, Keys, Ranks
except ImportError as error:
    text = f"megatron-core must have the modules of 0.16.1, which tests run with, got {_found()}: {error}"
    raise ImportError(f"{_HERE}: {text}") from error

# By activation_func, gated_linear_unit, glu_linear_offset and activation_func_clamp_value of a config. "gelu" and
# "geglu" use the tanh approximation, as the fused kernels of Megatron and TransformerEngine do.
_ACTIVATIONS = {
    (functional.silu, True, 0.0, None): "swiglu",
    (functional.gelu, True, 0.0, None): "geglu",
    (fast_gelu, True, 0.0, None): "geglu",
    (quick_gelu, True, 1.0, 7.0): "swiglu_oai",
    (functional.silu, False, 0.0, None): "silu",
    (functional.gelu, False, 0.0, None): "gelu",
    (fast_gelu, False, 0.0, None): "gelu",
    (squared_relu, False, 0.0, None): "relu2",
}


def spec(recipe: str | Recipe = "rowwise", *, keep: str = "fp8", main_grad: bool | None = None) -> ModuleSpec:
    """Returns the spec of experts, for `MoESubmodules(experts=...)`.

    Args:
        recipe, keep: as in `experts_of_groups`.
        main_grad: whether backward adds gradients of weights to the main gradients of Megatron's DDP, in float32. None:
            if config.gradient_accumulation_fusion is on. That option needs APEX or TransformerEngine; True needs none.

    Raises:
        ValueError, TypeError: no recipe of that name exists, or it is neither a name nor a `Recipe`.
        RuntimeError: keep is neither "fp8" nor "bf16", or main_grad is neither a bool nor None.
    """
    get_recipe(recipe, _HERE)
    check_one_of(_HERE, "keep", keep, KEEP)
    if main_grad is not None:
        check_bool(_HERE, "main_grad", main_grad)
    return ModuleSpec(module=MoeFp8GroupedMLP, params={"recipe": recipe, "keep": keep, "main_grad": main_grad})


def convert(layer_spec: object, recipe: str | Recipe = "rowwise", **options: object) -> object:
    """Returns a copy of a spec whose MoE layers have the experts of `spec(recipe, **options)`.

    Args:
        layer_spec: the spec of a layer or of a block, or a list of specs. One of them must be of an MoE layer. Or a
            function that returns one, as NeMo and Megatron Bridge take it: then the result is such a function too.

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
        RuntimeError: the config asks for something that these experts do not do. The text says what to change.
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
        activation = _check(config, ranks)
        self.num_local_experts = num_local_experts
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
        return f"num_local_experts={self.num_local_experts}, recipe={recipe!r}, activation={activation!r}"

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Computes the rows of a dispatcher.

        Args:
            permuted_local_hidden_states: [P, D], sorted by expert.
            tokens_per_expert: [E] of an integer dtype, on the host or on the device. Nothing waits for it.
            permuted_probs: [P].

        Returns:
            out [P, D], and None: biases are added already.
        """
        x, scores = permuted_local_hidden_states, permuted_probs
        if self.config.moe_apply_probs_on_input:
            x, scores = (scores[:, None] * x).to(x.dtype), None
        offs = tokens_per_expert.to(x.device, non_blocking=True).cumsum(0, dtype=torch.int32)
        (w_gate_up, b_gate_up), (w_down, b_down) = self.linear_fc1(), self.linear_fc2()
        rest = dict(b_gate_up=b_gate_up, b_down=b_down, delay_wgrad=self.delayed, **self.options)
        rest.update(main_grad_gate_up=self._main_grad(w_gate_up), main_grad_down=self._main_grad(w_down))
        return experts_of_groups(x, offs, scores, w_gate_up, w_down, **rest), None

    def _main_grad(self, weight: Tensor) -> Tensor | None:
        return getattr(weight, "main_grad", None) if self.adds_to_main_grad and needs_gradient(weight) else None

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], object]) -> None:
        """Megatron's DDP registers a hook for each weight here if gradients are delayed."""
        self.hooks_of_ddp.append(hook)

    def backward_dw(self) -> None:
        """Computes delayed gradients of weights of the oldest backward that waits. Else does nothing.

        Raises:
            RuntimeError: no backward waits, or DDP does not know that gradients are delayed.
        """
        if self.delayed is None:
            return
        if not self.hooks_of_ddp and hasattr(self.linear_fc1.weight, "main_grad"):
            text = "delay_wgrad_compute must be True in DistributedDataParallelConfig too, got False"
            require(False, f"{_HERE}: {text}; DDP would wait for gradients that come later")
        self.delayed.backward_dw()
        for hook in self.hooks_of_ddp:
            hook()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, object]:
        single = ensure_metadata_has_dp_cp_group(metadata).get("singleton_local_shards", False)
        keys = Keys(f"{prefix}experts.", tuple(sharded_offsets), single)
        linears = (
            self.linear_fc1.sharded(prefix, "linear_fc1", keys),
            self.linear_fc2.sharded(prefix, "linear_fc2", keys),
        )
        return {**linears[0], **linears[1]}


def _check(config: TransformerConfig, ranks: Ranks) -> str:
    """Refuses what these experts do not do. Returns the name of the activation."""
    for name in ("fp8", "fp4"):
        got = getattr(config, name)
        text = f"config.{name} must be None, because these experts quantize by their own recipe, got {got!r}"
        require(not got, f"{_HERE}: {text}; leave out --{name}-format, or use Megatron's own experts")
    modules = set(config.offload_modules or ()) & {"expert_fc1", "moe_act"}
    if config.fine_grained_activation_offloading and modules:
        text = f"config.offload_modules must have no module inside of the experts, got {', '.join(sorted(modules))}"
        require(False, f"{_HERE}: {text}; what they keep for backward is in FP8 already")
    text = "config.moe_router_topk must be 1 with moe_apply_probs_on_input, got "
    require(
        config.moe_router_topk == 1 or not config.moe_apply_probs_on_input, f"{_HERE}: {text}{config.moe_router_topk}"
    )
    sizes = config.moe_ffn_hidden_size, ranks.tensors
    text = "config.moe_ffn_hidden_size must be divisible by the size of expert tensor parallelism, got {} and {}"
    require(sizes[0] % sizes[1] == 0, f"{_HERE}: {text.format(*sizes)}")
    gate = bool(config.gated_linear_unit), config.glu_linear_offset, config.activation_func_clamp_value
    known = _ACTIVATIONS.get((config.activation_func, *gate))
    if known is None:
        name = getattr(config.activation_func, "__name__", config.activation_func)
        got = f"{name} with gated_linear_unit={gate[0]}, glu_linear_offset={gate[1]}, clamp={gate[2]}"
        names = ", ".join(sorted({activation.__name__ for activation, *_ in _ACTIVATIONS}))
        require(False, f"{_HERE}: config.activation_func must be one of {names} as ops.activate defines it, got {got}")
    return known


def _rename_sequential(_module: MegatronModule, state_dict: dict, prefix: str, *_: object) -> None:
    """Gives the entries of a SequentialMLP's state dict the names of TEGroupedMLP."""
    first = f"{prefix}local_experts."
    for key in [key for key in state_dict if key.startswith(first)]:
        expert, linear, name = key[len(first) :].split(".")
        state_dict[f"{prefix}{linear}.{name}{expert}"] = state_dict.pop(key)


class _Layer(BaseTransformerLayer):
    """Builds the layer that Megatron builds without `--spec`, with experts of this package.

    `--spec` names an object of a module, so this one has to ask the config for what it is otherwise told.
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
