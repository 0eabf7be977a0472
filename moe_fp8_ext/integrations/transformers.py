"""FP8 experts for models of Hugging Face Transformers.

`experts_implementation="moe_fp8"` makes experts compute in FP8. `ep_implementation="moe_fp8"` makes their tokens travel
to other ranks in FP8.
"""

from __future__ import annotations

import inspect
import re
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_fp8_ext import _torch
from moe_fp8_ext._C import validates
from moe_fp8_ext.integrations import fp8_checkpoint, peft
from moe_fp8_ext.layer.adapter import LoRA
from moe_fp8_ext.layer.bias import plus_bias
from moe_fp8_ext.layer.experts import experts, recipe_of_module
from moe_fp8_ext.matmul.grouped_mm import grouped_mm
from moe_fp8_ext.ops import combine, sort_tokens
from moe_fp8_ext.ops.activations import clamped_swiglu
from moe_fp8_ext.ops.checks import INPUT_DTYPES, check_dtype, fail, require
from moe_fp8_ext.ops.dispatch import reshaped
from moe_fp8_ext.quantization.casting import autocast_dtype
from moe_fp8_ext.quantization.recipe import RECIPES, Recipe, get_recipe
from moe_fp8_ext.quantization.tensor import Quantized
from moe_fp8_ext.report.machine import TESTED

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

*_OLDER, _NEWEST = TESTED["transformers"]
_KNOWN = f"{__name__}: transformers {', '.join(_OLDER)} and {_NEWEST} are known to work, found"
_OLDEST, _NEXT_MAJOR = (5, 17), (6, 0)
# The flags of `use_experts_implementation` that describe a layout of experts: in 5.17, and added since.
_LAYOUT = {"is_concatenated", "is_transposed", "has_bias", "has_gate"}
_NEWER_LAYOUT = {"has_post_expert_norm"}
# The names of activations in `experts`, by the class of act_fn in one of these modules. _GATED has the names for
# activations with Transformers' own gate.
_ACTIVATION_MODULES = "torch.nn.modules.activation", "transformers.activations"
_ACTIVATIONS = {
    **dict.fromkeys(("SiLU", "SiLUActivation"), "silu"),
    **dict.fromkeys(("GELUTanh", "NewGELUActivation"), "gelu"),
    "ReLUSquaredActivation": "relu2",
}
_GATED = {"silu": "swiglu", "gelu": "geglu"}
# Models whose gate is a clamped SwiGLU: the attributes that hold its limit and its alpha. With an alpha, 1 is added to
# up. Without one, the gate is SiLU, which only DeepSeek-V4 takes from act_fn.
_CLAMPED_GATES = {
    "gpt_oss": ("limit", "alpha"),
    "minimax_m3_vl": ("swiglu_limit", "swiglu_alpha"),
    "openai_privacy_filter": ("limit", "alpha"),
    "deepseek_v4": ("limit", None),
    **dict.fromkeys(("glm5_next", "hy_v4", "hy_v4_vl"), ("swiglu_limit", None)),
}
_DEFAULT_GATES_IN_FLOAT32 = {"beam"}  # as `experts` computes them
_EP_RECIPE = "_moe_fp8_ext_ep_recipe"


def register(recipe: str | Recipe = "rowwise") -> None:
    """Adds `moe_fp8`, and `moe_fp8_<recipe>` for every recipe, to the experts implementations of Transformers.

        register()
        model = AutoModelForCausalLM.from_pretrained(path, dtype="bfloat16", experts_implementation="moe_fp8")
        model.set_experts_implementation("moe_fp8_blockwise")

    Parameters and their names do not change.

    Every layout that Transformers' `use_experts_implementation` declares is supported. Slots with ids of no local
    expert are dropped. If `experts` knows the activation of a module, the whole module becomes one call of `experts`.
    Otherwise the model's own code runs between two calls of `grouped_mm`.

    Since 5.23.0, Transformers has expert parallelism by a plan. `register` adds the same names there. With
    `DistributedConfig(..., ep_implementation="moe_fp8")`, `ExpertParallel` sends tokens in the format of the recipe.
    This supports modules that become one call of `experts`, and every recipe except "auto".

    Experts of FP8 checkpoints, with blocks of 128 x 128, multiply the bytes of the checkpoint. They are frozen, and
    need recipe "blockwise". For these experts `moe_fp8` means `recipe` if its format is "blockwise", and otherwise the
    recipe "blockwise". If a checkpoint cannot be multiplied, `from_pretrained` with such a name raises a RuntimeError.
    After `set_experts_implementation`, the first forward raises the error.

    A second call replaces the names of the first call.

    Args:
        recipe: the recipe of the name `moe_fp8`, as in `grouped_mm`.

    Raises:
        ImportError: Transformers is missing, its version is not known, or it has layouts that this module lacks.
        ValueError, TypeError: no recipe of that name exists, or recipe is neither a name nor a `Recipe`.
    """
    named = {"": get_recipe(recipe, "register"), **{f"_{name}": known for name, known in RECIPES.items()}}
    interface = _transformers_moe().ALL_EXPERTS_FUNCTIONS
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface as ep_interface
    except ImportError:  # versions before 5.23.0
        ep_interface = None
    for suffix, value in named.items():
        interface.register(f"moe_fp8{suffix}", partial(_experts_forward, value))
        if ep_interface is not None:
            ep_interface.register(f"moe_fp8{suffix}", partial(_ExpertParallelForward, value))
    from moe_fp8_ext.integrations import fp8_loading  # imported here, because it imports transformers

    if named[""].format != "blockwise":
        named[""] = RECIPES["blockwise"]
    fp8_loading.register({f"moe_fp8{suffix}": partial(_experts_forward, value) for suffix, value in named.items()})


def replacement(module: torch.nn.Module, recipe: Recipe) -> tuple[str, object]:
    """Returns the attribute that `convert_` replaces on experts marked by `use_experts_implementation`, and its value.

    Raises:
        ImportError: as in `register`.
        RuntimeError: a weight is missing, or has an unknown dtype, for example because it is already quantized.
    """
    _transformers_moe()
    for name in fp8_checkpoint.names_of(module):
        require(isinstance(getattr(module, name, None), Tensor), f"moe_fp8: {name} must be a tensor, got none")
    _check(module, recipe)
    fp8_checkpoint.warn_of_second_rounding(module, recipe)
    return "forward", partial(_experts_forward, recipe, module)


def implementation_of(module: torch.nn.Module) -> str | None:
    """Returns the `experts_implementation` that the config of a model, or of experts, names."""
    return getattr(getattr(module, "config", None), "_experts_implementation", None)


def runs(module: torch.nn.Module) -> tuple[Recipe | None, str]:
    """Returns the recipe by which experts compute, and a note; or None, and the reason why they have no recipe."""
    forward = vars(module).get("forward")
    if _EP_RECIPE in vars(module):
        return vars(module)[_EP_RECIPE], "tokens travel to other ranks"
    why = "another forward took the place of its class's"
    if forward is None:
        name = implementation_of(module)
        forward, why = _implementations(module).get(name), f"experts_implementation is {name!r}"
    if not isinstance(forward, partial) or forward.func is not _experts_forward:
        return None, why
    _check(module, forward.args[0])
    return forward.args[0], "" if _experts_arguments(module) else "the model's own code between the two products"


def _implementations(module: torch.nn.Module) -> dict[str, object]:
    """Returns the interface of Transformers in which the class of a module looks up its experts implementation."""
    moe = _transformers_moe()
    if not fp8_checkpoint.is_quantized(module):
        return moe.ALL_EXPERTS_FUNCTIONS
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS  # imported here: it takes long

    return ALL_FP8_EXPERTS_FUNCTIONS


def _transformers_moe() -> ModuleType:
    """Imports transformers.integrations.moe, and checks its version and its layouts of experts."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ImportError(f"{_KNOWN} none") from error
    found = transformers.__version__
    version = re.match(r"(\d+)\.(\d+)", found)
    if version is None or not _OLDEST <= tuple(map(int, version.groups())) < _NEXT_MAJOR:
        raise ImportError(f"{_KNOWN} {found}")
    from transformers.integrations import moe

    declared = set(inspect.signature(moe.use_experts_implementation).parameters)
    declared -= {"experts_class", "experts_interface"}
    if strange := (declared - _NEWER_LAYOUT) ^ _LAYOUT:
        raise ImportError(f"{_KNOWN} {found}, whose experts differ in {', '.join(sorted(strange))}")
    return moe


def _experts_forward(
    recipe: Recipe, module: torch.nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The forward of a module of experts. Transformers defines the arguments and the attributes of the module."""
    _check(module, recipe)
    ids = top_k_index.contiguous()
    # A slot of no local expert has an id out of range. Checks of contents accept -1 alone.
    if ids.is_cpu or torch.compiler.is_compiling() or validates():
        ids = torch.where(ids < module.num_experts, ids, -1)
    x, scores = _inputs(module, hidden_states, top_k_weights)
    arguments = _experts_arguments(module)
    w_down = peft.stored(module, "down_proj")
    recipe = recipe_of_module(module, recipe, ids, w_down.mT if module.is_transposed else w_down, module.has_gate)
    if arguments:
        out = experts(x, ids, scores, recipe=recipe, **arguments)
    else:
        out = _composed_experts(recipe, module, x, ids, scores)
    return out.to(hidden_states.dtype)


class _ExpertParallelForward:
    """Calls the experts of a module with the batch of this rank, as an `EPImplementation` of Transformers.

    Args:
        ep_mesh: the ranks that share the experts.
        tp_mesh: the ranks that have the same batch; each of them sends a part of it.
    """

    def __init__(self, recipe: Recipe, module: torch.nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        name = type(module).__name__
        text = f"moe_fp8: {name} must be one operation of moe_fp8_ext for ep_implementation, got other code of its own"
        require(_experts_arguments(module) is not None, text)
        _check(module, recipe)
        self.recipe, self.module, self.ep_mesh, self.tp_mesh = recipe, module, ep_mesh, tp_mesh
        setattr(module, _EP_RECIPE, recipe)
        self.ep = None  # made by the first call, which knows top_k

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        from moe_fp8_ext.distributed import ExpertParallel  # imported here, because it takes long to load

        if self.ep is None:
            num_experts = self.module.num_experts * self.ep_mesh.size()
            self.ep = ExpertParallel(self.ep_mesh.get_group(), num_experts, top_k_index.shape[-1], recipe=self.recipe)
        with self.ep.errors_on_all_ranks():
            x, ids, scores = map(self._split, (hidden_states, top_k_index, top_k_weights))
            x, scores = _inputs(self.module, x, scores)
            arguments = _experts_arguments(self.module)
        return self._gather(self.ep.experts(x, ids, scores, **arguments), hidden_states.shape)

    def _split(self, t: Tensor) -> Tensor:
        """Returns this rank's part of rows that every rank of tp_mesh has."""
        if self.tp_mesh.size() == 1:
            return t
        from torch.distributed.tensor import DTensor, Replicate, Shard

        replicated = DTensor.from_local(t, self.tp_mesh, [Replicate()], run_check=False)
        return replicated.redistribute(placements=[Shard(0)]).to_local()

    def _gather(self, part: Tensor, shape: torch.Size) -> Tensor:
        """Undoes `_split`: returns the rows of all parts."""
        if self.tp_mesh.size() == 1:
            return part
        from torch.distributed.tensor import DTensor, Shard

        sizes = dict(shape=shape, stride=(shape[1], 1))
        whole = DTensor.from_local(part, self.tp_mesh, [Shard(0)], run_check=False, **sizes).full_tensor()
        return reshaped(whole, shape)  # full_tensor returns a view


def _inputs(module: torch.nn.Module, hidden_states: Tensor, top_k_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x and scores as `experts` takes them."""
    x, scores = hidden_states, top_k_weights.float().contiguous()
    dtype = peft.stored(module, fp8_checkpoint.names_of(module)[0]).dtype
    if dtype in INPUT_DTYPES and autocast_dtype(x) is None:  # autocast casts x and the weights
        x = x.to(dtype)
    return x, scores


def _experts_arguments(module: torch.nn.Module) -> dict[str, object] | None:
    """Returns further arguments for `experts`, or None if `experts` cannot compute everything that a module does."""
    activation = _activation(module)
    if activation is None or getattr(module, "has_post_expert_norm", False):
        return None
    names = dict(zip(("gate_up", "down"), fp8_checkpoint.names_of(module), strict=True))
    weights = {f"w_{argument}": _weight(module, name) for argument, name in names.items()}
    biases = {f"b_{argument}": getattr(module, f"{name}_bias") for argument, name in names.items() if module.has_bias}
    adapters = {f"lora_{argument}": peft.adapter(module, name) for argument, name in names.items()}
    return {**weights, **biases, **adapters, **activation}


def _activation(module: torch.nn.Module) -> dict[str, object] | None:
    """Returns the arguments of `experts` for a module's activation. None if it is unknown or was replaced."""
    known = _act_fn(getattr(module, "act_fn", None))
    if not module.has_gate:
        return dict(activation=known) if known else None
    gate = type(module)._apply_gate
    if "_apply_gate" in vars(module) or hasattr(gate, "__wrapped__"):
        return None
    if gate.__module__.endswith(".finegrained_fp8"):
        return _fp8_activation(module, known)
    # Looks at the gate and not at the module's class, because FSDP2 and parametrizations replace the class.
    model = gate.__module__.rpartition(".modeling_")[2]
    is_default = gate.__name__ == "_default_apply_gate" and gate.__module__.startswith("transformers.")
    if is_default or model in _DEFAULT_GATES_IN_FLOAT32:
        return dict(activation=_GATED[known]) if known in _GATED else None
    if model not in _CLAMPED_GATES or model == "deepseek_v4" and known != "silu":
        return None
    limit, alpha = (name and getattr(module, name) for name in _CLAMPED_GATES[model])
    return dict(activation=_clamped(limit, alpha), interleaved=not module.is_concatenated)


def _clamped(limit: float, alpha: float | None) -> str:
    return clamped_swiglu(limit) if alpha is None else clamped_swiglu(limit, alpha, offset=1.0)


def _fp8_activation(module: torch.nn.Module, known: str | None) -> dict[str, object] | None:
    """Returns the same for experts of an FP8 checkpoint. One class serves all models; attributes select its gate."""
    if getattr(module, "gate_softcap", None) is not None:
        return None
    if module.swiglu_alpha is not None:
        return dict(activation=_clamped(module.swiglu_limit, module.swiglu_alpha))
    if module.limit is not None:
        return dict(activation=_clamped(module.limit, None)) if known == "silu" else None
    return dict(activation=_GATED[known]) if known in _GATED else None


def _act_fn(act: object) -> str | None:
    """Returns the name that `experts` has for an act_fn, or None."""
    if act is torch.nn.functional.silu:
        return "silu"
    kind = type(act)
    is_known = kind.__module__ in _ACTIVATION_MODULES and kind.forward.__module__ == kind.__module__
    if not is_known or hasattr(kind.forward, "__wrapped__") or "forward" in vars(act) or not _torch.has_no_hooks(act):
        return None
    return _ACTIVATIONS.get(kind.__name__)


def _composed_experts(recipe: Recipe, module: torch.nn.Module, x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
    """Computes the experts with the model's own code between the two products."""
    up, down = fp8_checkpoint.names_of(module)
    permutation, offs, inverse = sort_tokens(ids, module.num_experts)
    h = _linear(recipe, module, up, x, offs, indices=permutation, top_k=ids.shape[1])
    h = module._apply_gate(h) if module.has_gate else module.act_fn(h)
    y = _linear(recipe, module, down, h, offs)
    if getattr(module, "has_post_expert_norm", False):
        y = module.post_expert_norm(y)
    return combine(y, inverse, scores)


def _linear(recipe: Recipe, module: torch.nn.Module, name: str, x: Tensor, offs: Tensor, **gathered: object) -> Tensor:
    weight = _weight(module, name)
    if isinstance(weight, Tensor):
        weight = weight.transpose(-2, -1)
        if autocast_dtype(x) is None:
            x = x.to(weight.dtype)
    out = grouped_mm(x, weight, offs, recipe=recipe, **gathered)
    adapter = peft.adapter(module, name)
    if adapter is not None:
        out = out + _low_rank(adapter, x, offs, **gathered)
    return plus_bias(out, getattr(module, f"{name}_bias"), offs) if module.has_bias else out


def _low_rank(adapter: LoRA, x: Tensor, offs: Tensor, **gathered: object) -> Tensor:
    """Computes scaling * B (A x), by two products of the adapter's rank."""
    a, b = (factor.to(x.dtype).transpose(-2, -1) for factor in (adapter.A, adapter.B))
    return adapter.scaling * grouped_mm(grouped_mm(x, a, offs, recipe="bf16", **gathered), b, offs, recipe="bf16")


def _check(module: torch.nn.Module, recipe: Recipe) -> None:
    """Checks weights of a module by name. The checks of `experts` and `grouped_mm` would not name the weight."""
    if fp8_checkpoint.is_quantized(module):
        fp8_checkpoint.check_experts(module, recipe)
        return
    for name in fp8_checkpoint.names_of(module):
        dtype, scale = peft.stored(module, name).dtype, f"{name}_scale_inv"
        check_dtype("moe_fp8", name, dtype, *INPUT_DTYPES)
        if isinstance(getattr(module, scale, None), Tensor):
            text = f"{name} must be float8_e4m3fn beside {scale}, got {dtype}"
            cast = "a cast such as model.bfloat16(), or param_dtype of fully_shard, loses the scales"
            fail("moe_fp8", f"{text}; {cast}: load the model again")


def _weight(module: torch.nn.Module, name: str) -> Tensor | Quantized:
    """Returns a weight as `experts` takes it: as [E, N, K], or in FP8 as it is stored."""
    weight = peft.weight(module, name)
    if weight.dtype not in INPUT_DTYPES:
        fp8_checkpoint.check_frozen(module, name, weight)
        return fp8_checkpoint.frozen(weight, getattr(module, f"{name}_scale_inv"))
    return weight.transpose(-2, -1) if module.is_transposed else weight
