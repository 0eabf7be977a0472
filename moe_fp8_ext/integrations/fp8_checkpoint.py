"""Experts of FP8 checkpoints of Hugging Face Transformers: the checkpoint's bytes are the operands of products.

Such checkpoints hold float8_e4m3fn weights [E, N, K] and, for blocks of 128 x 128, scales [E, N/128, K/128] in float32
or E8M0, named `weight_scale_inv`. This is the layout of format "blockwise".
"""

from __future__ import annotations

from warnings import warn

import torch
from torch import Tensor, nn

from moe_fp8_ext.integrations import peft
from moe_fp8_ext.ops.checks import FP8_DTYPES, dtype_name, require
from moe_fp8_ext.quantization.format import FORMATS
from moe_fp8_ext.quantization.recipe import Recipe
from moe_fp8_ext.quantization.tensor import Pair, Quantized

_FORMAT = "blockwise"
_BLOCK = FORMATS[_FORMAT].block
_INSTEAD = "load the model with quantization_config=FineGrainedFP8Config(dequantize=True)"


def names_of(module: nn.Module) -> tuple[str, str]:
    """Returns the names of the weights of experts that Transformers marks."""
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def is_quantized(module: nn.Module) -> bool:
    """Whether experts hold the weights of an FP8 checkpoint, or of its variant with packed FP4."""
    dtypes = *FP8_DTYPES, torch.int8
    return any(getattr(peft.stored(module, name), "dtype", None) in dtypes for name in names_of(module))


def frozen_weight(module: nn.Module, name: str) -> Quantized | Pair:
    """Returns a weight of experts of an FP8 checkpoint as an operand. Its bytes are not copied."""
    q, scale = peft.weight(module, name).detach(), getattr(module, f"{name}_scale_inv").detach()
    return _with_transpose(Quantized(q, scale.float(), _FORMAT))


def _with_transpose(weight: Quantized) -> Quantized | Pair:
    """Adds the operand of the gradient of the input. Blocks are square, so its bytes and scales are transposed ones."""
    if not torch.is_grad_enabled():
        return weight
    q, scale = weight.q.mT.contiguous(), weight.scale.mT.contiguous()
    return weight, Quantized(q, scale, _FORMAT, transposed=True)


def check_experts(module: nn.Module, recipe: Recipe) -> None:
    """Checks that a recipe can multiply the experts of an FP8 checkpoint. Their weights may be on the meta device.

    Raises:
        RuntimeError: it cannot; the text says what to do.
    """
    names = names_of(module)
    require(
        recipe.format == _FORMAT,
        f'moe_fp8: the recipe must be "{_FORMAT}" for an FP8 checkpoint, whose bytes have its blocks, got '
        f'"{recipe.name}"; choose "moe_fp8_{_FORMAT}" or convert_(model, "{_FORMAT}")',
    )
    for name in names:
        weight = peft.stored(module, name)
        _require(weight.dtype == torch.float8_e4m3fn, f"{name} must be float8_e4m3fn", dtype_name(weight.dtype))
        _require(weight.dim() == 3, f"{name} must have 3 dimensions", weight.dim())
    block = getattr(module, "block_size", None)
    is_square = block is not None and tuple(block) == (_BLOCK, _BLOCK)
    got = "one scale for a whole weight" if block is None else f"blocks of {' x '.join(map(str, block))}"
    _require(is_square, f"scales must be of blocks of {_BLOCK} x {_BLOCK}", got)
    scheme = getattr(module, "activation_scheme", "dynamic")
    _require(scheme == "dynamic", "activations must be quantized dynamically", f'activation_scheme="{scheme}"')
    features = peft.stored(module, names[0]).shape[1] // 2
    fits = not module.has_gate or features % _BLOCK == 0
    _require(fits, f"F, the width of gate and of up, must be a multiple of {_BLOCK}", features)
    for name in names:
        weight, scale = peft.stored(module, name), getattr(module, f"{name}_scale_inv", None)
        _require(isinstance(scale, Tensor), f"{name} must come with {name}_scale_inv", "none")
        wanted = FORMATS[_FORMAT].scale_of_weight(*weight.shape).shape
        fits = tuple(scale.shape) == wanted
        _require(fits, f"{name}_scale_inv must have shape {list(wanted)}", list(scale.shape))
        dtypes = torch.float32, torch.float8_e8m0fnu
        _require(scale.dtype in dtypes, f"{name}_scale_inv must be float32 or float8_e8m0fnu", dtype_name(scale.dtype))


def _require(ok: bool, text: str, got: object) -> None:
    require(ok, f"moe_fp8: {text} in an FP8 checkpoint, got {got}; {_INSTEAD}")


_FROM_E8M0 = "_moe_fp8_ext_from_e8m0"


def mark_as_dequantized(module: nn.Module) -> None:
    """Marks experts whose weights were dequantized, with scales that are powers of two."""
    setattr(module, _FROM_E8M0, True)


def warn_of_second_rounding(module: nn.Module, recipe: Recipe) -> None:
    """Warns if a recipe rounds marked weights to other fp8 values than the checkpoint has."""
    if getattr(module, _FROM_E8M0, False) and recipe.format == _FORMAT and recipe.rounding == "exact":
        warn(
            f'moe_fp8: scales of the checkpoint are powers of two, so recipe "{recipe.name}" rounds its dequantized '
            f'weights a second time; Recipe("{_FORMAT}", rounding="pow2") gives the bytes of the checkpoint',
            stacklevel=2,
        )
