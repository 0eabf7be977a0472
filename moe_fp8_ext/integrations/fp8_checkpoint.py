"""Experts of FP8 checkpoints of Hugging Face Transformers: the checkpoint's bytes are the operands of products.

Such checkpoints hold float8_e4m3fn weights [E, N, K] and, for blocks of 128 x 128, scales [E, N/128, K/128] in float32
or E8M0, named `weight_scale_inv`. This is the layout of format "blockwise".
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn
from warnings import warn

import torch
from torch import Tensor, nn

from moe_fp8_ext.integrations import peft
from moe_fp8_ext.ops import dequantize
from moe_fp8_ext.ops.checks import (
    FP8_DTYPES,
    INPUT_DTYPES,
    check_filter,
    check_module,
    check_not_meta,
    dtype_name,
    either,
    fail,
    require,
)
from moe_fp8_ext.ops.dispatch import needs_gradient
from moe_fp8_ext.quantization.format import FORMATS
from moe_fp8_ext.quantization.recipe import Recipe
from moe_fp8_ext.quantization.tensor import Quantized

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FORMAT = "blockwise"
_BLOCK = FORMATS[_FORMAT].block
_INSTEAD = "load the model with quantization_config=FineGrainedFP8Config(dequantize=True)"


def is_marked(module: nn.Module) -> bool:
    """Whether Transformers marks the module's class as experts, by `use_experts_implementation`."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate")


def names_of(module: nn.Module) -> tuple[str, str]:
    """Returns the names of the weights in experts that `use_experts_implementation` has marked."""
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def is_quantized(module: nn.Module) -> bool:
    """Whether experts hold the weights of an FP8 checkpoint, or of its variant with packed FP4."""
    dtypes = *FP8_DTYPES, torch.int8
    return any(getattr(peft.stored(module, name), "dtype", None) in dtypes for name in names_of(module))


def scale_shape(q: Tensor) -> tuple[int, ...]:
    """The shape of the scales of a weight [N, K] or [E, N, K]."""
    return *q.shape[:-2], *(-(-size // _BLOCK) for size in q.shape[-2:])


def frozen(q: Tensor, scale: Tensor) -> Quantized:
    """Returns a weight of an FP8 checkpoint with its scales as an operand. Its bytes are not copied."""
    rounding = "pow2" if scale.dtype == torch.float8_e8m0fnu else None
    return Quantized(q.detach(), scale.detach().float(), _FORMAT, rounding=rounding)


def dequantized(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the values of a weight [N, K] or [E, N, K]."""
    experts = q.detach() if q.dim() == 3 else q.detach()[None]
    scale = scale.detach().float().view(len(experts), *scale.shape[-2:])
    return dequantize(experts, scale, _FORMAT, out_dtype=dtype).view(q.shape)


def check_experts(module: nn.Module, recipe: Recipe) -> None:
    """Checks that a recipe can multiply the experts of an FP8 checkpoint. Weights may be on the meta device.

    Raises:
        RuntimeError: the recipe cannot multiply them; the text says what to do.
    """
    names = names_of(module)
    if recipe.format != _FORMAT:
        text = f'the recipe must be "{_FORMAT}" for an FP8 checkpoint, whose bytes have its blocks, got "{recipe.name}"'
        fail("moe_fp8", f'{text}; choose "moe_fp8_{_FORMAT}" or convert_(model, "{_FORMAT}")')
    weights = [peft.stored(module, name) for name in names]
    for name, weight in zip(names, weights, strict=True):
        if weight.dtype != torch.float8_e4m3fn:
            _refuse(f"{name} must be float8_e4m3fn", dtype_name(weight.dtype))
        if weight.dim() != 3:
            _refuse(f"{name} must have 3 dimensions", weight.dim())
    block = getattr(module, "block_size", None)
    if block is None or tuple(block) != (_BLOCK, _BLOCK):
        got = "one scale for a whole weight" if block is None else f"blocks of {' x '.join(map(str, block))}"
        _refuse(f"scales must be of blocks of {_BLOCK} x {_BLOCK}", got)
    scheme = getattr(module, "activation_scheme", "dynamic")
    if scheme != "dynamic":
        _refuse("activations must be quantized dynamically", f'activation_scheme="{scheme}"')
    features = weights[0].shape[1] // 2
    has_halves = module.has_gate and module.is_concatenated  # each of them with scales of its own
    if has_halves and features % _BLOCK:
        _refuse(f"F, the width of gate and of up, must be a multiple of {_BLOCK}", features)
    for name, weight in zip(names, weights, strict=True):
        scale, wanted = getattr(module, f"{name}_scale_inv", None), scale_shape(weight)
        if not isinstance(scale, Tensor):
            _refuse(f"{name} must come with {name}_scale_inv", "none")
        if scale.shape != wanted:
            _refuse(f"{name}_scale_inv must have shape {list(wanted)}", list(scale.shape))
        if scale.dtype not in (torch.float32, torch.float8_e8m0fnu):
            _refuse(f"{name}_scale_inv must be float32 or float8_e8m0fnu", dtype_name(scale.dtype))


def _refuse(text: str, got: object) -> NoReturn:
    fail("moe_fp8", f"{text} in an FP8 checkpoint, got {got}; {_INSTEAD}")


_FROZEN = "_moe_fp8_ext_frozen"


def freeze(module: nn.Module, *names: str) -> None:
    """Freezes all parameters of experts, or the given ones, while they are loaded, and marks the experts."""
    for parameter in (getattr(module, name) for name in names) if names else module.parameters():
        parameter.requires_grad_(False)
    setattr(module, _FROZEN, True)


def check_frozen(module: nn.Module, name: str, weight: Tensor) -> None:
    """Raises if a weight of marked experts asks for a gradient again, for example after `model.requires_grad_()`.

    Experts without the mark were loaded for another implementation. All of their parameters ask for gradients, although
    nobody asked Transformers for that.
    """
    if needs_gradient(weight) and getattr(module, _FROZEN, False):
        text = f"{name} must not ask for a gradient, because FP8 weights of a checkpoint are frozen"
        way_out = "call requires_grad_(False) of the experts, or master_weights_(model) to train them"
        fail("moe_fp8", f"{text}, got requires_grad=True; {way_out}")


_FROM_E8M0 = "_moe_fp8_ext_from_e8m0"


def mark_as_dequantized(module: nn.Module) -> None:
    """Marks experts whose weights were dequantized from scales that are powers of two."""
    setattr(module, _FROM_E8M0, True)


def warn_of_second_rounding(module: nn.Module, recipe: Recipe) -> None:
    """Warns if a recipe rounds marked weights to fp8 values that differ from the checkpoint's."""
    if getattr(module, _FROM_E8M0, False) and recipe.format == _FORMAT and recipe.rounding == "exact":
        warn(
            f'moe_fp8: scales of the checkpoint are powers of two, so recipe "{recipe.name}" rounds its dequantized '
            f'weights a second time; Recipe("{_FORMAT}", rounding="pow2") gives the bytes of the checkpoint',
            stacklevel=2,
        )


# Master weights


def master_weights_(
    model: PreTrainedModel,
    dtype: torch.dtype | None = None,
    filter: Callable[[str, nn.Module], bool] | None = None,
) -> None:
    """Replaces the FP8 weights of a loaded model by weights that can be trained, in place.

        model = AutoModelForCausalLM.from_pretrained(path, dtype="float32", device_map=device)
        master_weights_(model)
        model.set_experts_implementation("moe_fp8_blockwise")

    Use it to train all weights of an FP8 checkpoint, or, with `filter`, only the weights outside of its experts. A
    module with FP8 weights becomes the module of the same model without quantization, so every implementation of
    experts runs. Values are the checkpoint's, rounded to `dtype`. Weights are replaced one after the other, and FP8
    copies are freed. So memory never holds more than the result and one weight.

    In general, a BF16 weight rounds the product of an FP8 value and its scale. If scales are powers of two, it is
    exact, and `Recipe("blockwise", rounding="pow2")` then multiplies the bytes of the checkpoint. If the model's
    implementation has another rounding, a warning says so.

    Args:
        model: a model that `from_pretrained` has loaded from an FP8 checkpoint. Hooks on replaced modules are lost, so
            call it before anything wraps the model.
        dtype: bfloat16, float16 or float32. None means the dtype of `from_pretrained`, which other weights have.
        filter: a function of a qualified name and a module that returns whether to replace the module's weights. None
            replaces all.

    Raises:
        RuntimeError: the model has no FP8 weights, a weight has an unknown layout or is offloaded, something wraps the
            model, or dtype is not as above. Nothing has changed then.
        TypeError: model is no module, or filter is not callable.
    """
    from transformers import PreTrainedModel

    from moe_fp8_ext.integrations import fp8_loading  # imported here, because it imports transformers

    op = "master_weights_"
    check_module(op, "model", model)
    is_pretrained = isinstance(model, PreTrainedModel)
    require(is_pretrained, f"{op}: model must be what from_pretrained returned, got {type(model).__name__}")
    check_filter(op, filter)
    dtype = model.config.dtype if dtype is None else dtype
    require(dtype in INPUT_DTYPES, f"{op}: dtype must be {either(map(dtype_name, INPUT_DTYPES))}, got {dtype!r}")
    found = {name: module for name, module in model.named_modules() if _scales(module)}
    chosen = [name for name in found if filter is None or filter(name, found[name])]
    require(bool(chosen), f"{op}: model must have FP8 weights to replace, got none")
    with torch.device("meta"):
        plain = type(model)(copy.copy(model.config))
    for name in chosen:
        _check_plain(op, name, found[name], plain.get_submodule(name))
    was_e8m0 = any(scale.dtype == torch.float8_e8m0fnu for name in chosen for scale in _scales(found[name]).values())
    for name in chosen:
        new = plain.get_submodule(name).train(found[name].training)
        _move_weights(found.pop(name), new, dtype)
        model.set_submodule(name, new)
        if was_e8m0 and is_marked(new):
            mark_as_dequantized(new)
    fp8_loading.check_rounding(model)
    if not found:
        model.hf_quantizer.remove_quantization_config(model)


def _scales(module: nn.Module) -> dict[str, Tensor]:
    """Returns the scales of a module's FP8 weights, by the names of the weights."""
    parameters = dict(module.named_parameters(recurse=False))
    return {name: parameters[f"{name}_scale_inv"] for name in parameters if f"{name}_scale_inv" in parameters}


def _check_plain(op: str, name: str, old: nn.Module, new: nn.Module) -> None:
    """Checks that a module's weights fit into the corresponding module of the model without quantization."""
    for weight, scale in _scales(old).items():
        q, replacement = getattr(old, weight), getattr(new, weight, None)
        is_square = scale.shape[-2:] == scale_shape(q)[-2:] and q.dtype == torch.float8_e4m3fn
        text = f"{op}: {name}.{weight} must be float8_e4m3fn with scales of blocks of {_BLOCK} x {_BLOCK}"
        require(is_square, f"{text}, got {dtype_name(q.dtype)} with scales {list(scale.shape)}; {_INSTEAD}")
        for part in (weight, f"{weight}_scale_inv"):
            check_not_meta(op, f"{name}.{part}", getattr(old, part))
        fits = replacement is not None and replacement.shape == q.shape
        got = None if replacement is None else list(replacement.shape)
        require(fits, f"{op}: {name}.{weight} must have the shape of the checkpoint, {list(q.shape)}, got {got}")
    for flag in ("is_transposed", "is_concatenated"):
        wanted, got = (getattr(module, flag, None) for module in (old, new))
        require(wanted == got, f"{op}: {name} must have {flag}={wanted} without quantization, got {got}; {_INSTEAD}")


def _move_weights(old: nn.Module, new: nn.Module, dtype: torch.dtype) -> None:
    """Moves all parameters of a module to another module. Converts FP8 weights to a dtype, and frees each of them."""
    if hasattr(old, "config"):
        new.config = old.config
    scales = _scales(old)
    for name, _ in list(new.named_parameters(recurse=False)):
        parameter = getattr(old, name)
        if name in scales:
            parameter = nn.Parameter(dequantized(parameter, scales.pop(name), dtype))
            delattr(old, f"{name}_scale_inv")
        delattr(old, name)
        setattr(new, name, parameter)
