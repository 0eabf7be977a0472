"""What happens while Transformers loads an FP8 checkpoint, once this package is registered."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.quantizers import auto
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from moe_fp8_ext.integrations import fp8_checkpoint
from moe_fp8_ext.ops.checks import require
from moe_fp8_ext.quantization.recipe import Recipe

# How names of scales end: weight_scale_inv, scale, qscale_weight of a linear layer, or those of a parameter.
_SCALES = re.compile(r"(\.weight)?[._]q?scale\w*$")
_METHODS = "fp8", "mxfp8"  # the quantization methods of Transformers whose experts are FP8Experts


def register(forwards: dict[str, Callable[..., torch.Tensor]]) -> None:
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
        marked = [module for module in model.modules() if hasattr(module, "is_transposed")]  # an attribute of the mark
        for module in marked:
            if isinstance(module, FP8Experts) and _recipe(module, ALL_FP8_EXPERTS_FUNCTIONS) is not None:
                module.requires_grad_(False)  # Transformers lets float8 parameters ask for gradients
            elif config.dequantize and config.scale_fmt == "ue8m0":
                fp8_checkpoint.mark_as_dequantized(module)
        if marked and (recipe := _recipe(marked[0], ALL_EXPERTS_FUNCTIONS)) is not None:
            fp8_checkpoint.warn_of_second_rounding(marked[0], recipe)
        return model


def _recipe(experts: torch.nn.Module, interface: dict[str, object]) -> Recipe | None:
    """Returns the recipe of the implementation that experts have, or None if it is not of this package."""
    name = getattr(experts.config, "_experts_implementation", None)
    forward = interface.get(name) if name in interface else None
    is_ours = isinstance(forward, partial) and forward.args and isinstance(forward.args[0], Recipe)
    return forward.args[0] if is_ours else None


def _check_scales(files: Iterable[str]) -> None:
    """Refuses a checkpoint in which an FP8 weight of experts has no scales. Reads the names in safetensors alone.

    Transformers would load such a checkpoint, with scales of any content.
    """
    weights, names = set(), set()
    for file in files:
        if Path(file).suffix != ".safetensors":
            continue
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                names.add(name)
                if ".experts." in name and "scale" not in name and tensors.get_slice(name).get_dtype() == "F8_E4M3":
                    weights.add(name)
    scaled = {_SCALES.sub("", name) for name in names if _SCALES.search(name)}
    missing = sorted(name for name in weights if name.removesuffix(".weight") not in scaled)
    text = "moe_fp8: every FP8 weight of experts must have scales in the checkpoint, got none for"
    require(not missing, f"{text} {', '.join(missing[:3])}{' and others' if missing[3:] else ''}; download it again")
