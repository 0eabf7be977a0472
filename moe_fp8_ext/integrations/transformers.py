"""Hugging Face Transformers: the experts of a model in FP8, chosen by `experts_implementation="moe_fp8"`."""

from __future__ import annotations

import inspect
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from moe_fp8_ext.grouped_mm import grouped_mm
from moe_fp8_ext.ops import combine, sort_tokens
from moe_fp8_ext.ops.checks import INPUT_DTYPES, require
from moe_fp8_ext.recipes import RECIPES, Recipe, get_recipe

_KNOWN = "moe_fp8_ext.integrations.transformers: transformers 5.17.0 and 5.23.0 are known to work, found"
_OLDEST, _NEXT_MAJOR = (5, 17), (6, 0)
# What tells layouts of experts apart; those of 5.17, and what has come since.
_LAYOUT = {"is_concatenated", "is_transposed", "has_bias", "has_gate"}
_NEWER_LAYOUT = {"has_post_expert_norm"}


def register(recipe: str | Recipe = "rowwise") -> None:
    """Adds `moe_fp8` and `moe_fp8_<recipe>` of every recipe to the experts implementations of Transformers.

    A model then takes one where it takes "grouped_mm": `from_pretrained(..., experts_implementation="moe_fp8")`,
    `from_config`, `model.set_experts_implementation("moe_fp8_blockwise")`. Parameters stay what and where they are.
    Every layout that Transformers' `use_experts_implementation` declares is taken; ids of no local expert count for
    nothing. What stands between the products is the model's own code.

    Called again, it replaces what it has registered.

    Args:
        recipe: what `moe_fp8` stands for, as `grouped_mm` takes it.

    Raises:
        ImportError: Transformers is missing, is not of a version that is known, or knows layouts that this does not.
        ValueError, TypeError: no recipe of that name exists, or it is neither a name nor a `Recipe`.
    """
    named = {"": get_recipe(recipe), **{f"_{name}": known for name, known in RECIPES.items()}}
    interface = _transformers_moe().ALL_EXPERTS_FUNCTIONS
    for suffix, of_name in named.items():
        interface.register(f"moe_fp8{suffix}", partial(_experts_forward, of_name))


def _transformers_moe() -> ModuleType:
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ImportError(f"{_KNOWN} none") from error
    found = transformers.__version__
    if not _OLDEST <= tuple(map(int, found.split(".")[:2])) < _NEXT_MAJOR:
        raise ImportError(f"{_KNOWN} {found}")
    from transformers.integrations import moe

    declared = set(inspect.signature(moe.use_experts_implementation).parameters)
    declared -= {"experts_class", "experts_interface"}
    if strange := (declared - _NEWER_LAYOUT) ^ _LAYOUT:
        raise ImportError(f"{_KNOWN} {found}, whose experts differ in {', '.join(sorted(strange))}")
    return moe


def _experts_forward(
    recipe: Recipe, experts: torch.nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The forward of a module of experts; names of arguments and attributes are those of Transformers' contract."""
    # -1 is how an id says that it is of no expert here, to MOE_FP8_VALIDATE=1 too.
    ids = torch.where(top_k_index < experts.num_experts, top_k_index, -1).contiguous()
    permutation, offs, inverse = sort_tokens(ids, experts.num_experts)
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    h = _linear(recipe, experts, name, hidden_states, offs, indices=permutation, top_k=ids.shape[1])
    h = experts._apply_gate(h) if experts.has_gate else experts.act_fn(h)
    y = _linear(recipe, experts, "down_proj", h, offs)
    if getattr(experts, "has_post_expert_norm", False):
        y = experts.post_expert_norm(y)
    return combine(y, inverse, top_k_weights.float().contiguous()).to(hidden_states.dtype)


def _linear(recipe: Recipe, experts: torch.nn.Module, name: str, x: Tensor, offs: Tensor, **gathered: object) -> Tensor:
    weight = getattr(experts, name)
    require(weight.dtype in INPUT_DTYPES, f"moe_fp8: {name} must be bfloat16, float16 or float32, got {weight.dtype}")
    if not torch.is_autocast_enabled(x.device.type):  # which casts both
        x = x.to(weight.dtype)
    weight = weight if experts.is_transposed else weight.transpose(-2, -1)
    out = grouped_mm(x, weight, offs, recipe=recipe, **gathered)
    return out.add_(_bias_of_rows(getattr(experts, f"{name}_bias"), offs, out)) if experts.has_bias else out


def _bias_of_rows(bias: Tensor, offs: Tensor, out: Tensor) -> Tensor:
    rows = torch.arange(out.shape[0], device=out.device, dtype=offs.dtype)
    experts = torch.bucketize(rows, offs, right=True)
    return torch.nn.functional.pad(bias, (0, 0, 0, 1))[experts]  # zeros for rows of no expert
