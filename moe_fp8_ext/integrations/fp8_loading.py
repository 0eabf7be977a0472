"""Hooks into Transformers' loading of FP8 checkpoints, which `transformers.register` installs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from safetensors import safe_open
from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.quantizers import auto
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from moe_fp8_ext.integrations import fp8_checkpoint
from moe_fp8_ext.ops.checks import require
from moe_fp8_ext.quantization.recipe import Recipe

# How names of scales end: weight_scale_inv, scale, qscale_weight of a linear layer, or of a parameter.
_SCALES = re.compile(r"(\.weight)?[._]q?scale\w*$")
_METHODS = "fp8", "mxfp8"  # the quantization methods of Transformers whose experts are FP8Experts


def register(forwards: dict[str, Callable[..., Tensor]]) -> None:
    """Adds implementations of the experts of FP8 checkpoints, and the checks of such checkpoints.

    Args:
        forwards: each is a partial whose first argument is its recipe.
    """
    for name, forward in forwards.items():
        ALL_FP8_EXPERTS_FUNCTIONS.register(name, forward)
    for method in _METHODS:
        if auto.AUTO_QUANTIZER_MAPPING.get(method) is FineGrainedFP8HfQuantizer:
            auto.AUTO_QUANTIZER_MAPPING[method] = FP8Quantizer


class FP8Quantizer(FineGrainedFP8HfQuantizer):
    """Transformers' quantizer of FP8 checkpoints. It also refuses experts that this package cannot multiply.

    A model whose experts implementation is not of this package is loaded as before.
    """

    def _process_model_before_weight_loading(self, model, **kwargs):
        super()._process_model_before_weight_loading(model, **kwargs)
        ours = False
        for module in model.modules():
            recipe = _recipe(module, ALL_FP8_EXPERTS_FUNCTIONS) if isinstance(module, FP8Experts) else None
            if recipe is not None:
                fp8_checkpoint.check_experts(module, recipe)
                ours = True
        if ours and self.pre_quantized:
            _check_scales(kwargs.get("checkpoint_files") or ())

    def _process_model_after_weight_loading(self, model, **kwargs):
        super()._process_model_after_weight_loading(model, **kwargs)
        config = self.quantization_config
        for module in filter(fp8_checkpoint.is_marked, model.modules()):
            if isinstance(module, FP8Experts) and _recipe(module, ALL_FP8_EXPERTS_FUNCTIONS) is not None:
                fp8_checkpoint.freeze(module)  # Transformers lets float8 parameters ask for gradients
            elif config.dequantize and config.scale_fmt == "ue8m0":
                fp8_checkpoint.mark_as_dequantized(module)
        check_rounding(model)
        return model


def check_rounding(model: nn.Module) -> None:
    """Warns if the implementation of a model rounds its dequantized weights a second time."""
    for module in filter(fp8_checkpoint.is_marked, model.modules()):
        recipe = _recipe(module, ALL_EXPERTS_FUNCTIONS)
        if recipe is not None:
            fp8_checkpoint.warn_of_second_rounding(module, recipe)
            return


def _recipe(experts: nn.Module, interface: dict[str, object]) -> Recipe | None:
    """Returns the recipe of the implementation that experts have, or None if it is not of this package."""
    name = getattr(experts.config, "_experts_implementation", None)
    forward = interface.get(name) if name in interface else None
    is_ours = isinstance(forward, partial) and forward.args and isinstance(forward.args[0], Recipe)
    return forward.args[0] if is_ours else None


def _check_scales(files: Iterable[str]) -> None:
    """Raises if an FP8 weight of experts has no scales in a checkpoint. Reads only names.

    Transformers would load such a checkpoint with uninitialized scales.
    """
    dtypes = dtypes_of(files)
    weights = {name for name, dtype in dtypes.items() if dtype == "F8_E4M3" and ".experts." in name}
    scaled = {_SCALES.sub("", name) for name in dtypes if _SCALES.search(name)}
    refuse_without_scales(sorted(name for name in weights if name.removesuffix(".weight") not in scaled))


def dtypes_of(files: Iterable[str]) -> dict[str, str]:
    """Returns the names of all tensors of files of safetensors, and the names of their dtypes."""
    found = {}
    for file in files:
        if Path(file).suffix == ".safetensors":
            with safe_open(file, "pt") as tensors:
                found |= {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
    return found


def refuse_without_scales(weights: list[str]) -> None:
    """Raises if any weights have no scales."""
    text = "moe_fp8: every quantized weight of experts must have scales in the checkpoint, got none for"
    require(not weights, f"{text} {', '.join(weights[:3])}{' and others' if weights[3:] else ''}; download it again")
