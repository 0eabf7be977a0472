"""FP8 training of Mixture-of-Experts layers: quantized operands, grouped matmuls and a drop-in `grouped_mm`.

This module has the public API. `moe_fp8_ext.ops` has a thin wrapper for every op of torch.ops.moe_fp8.
"""

from moe_fp8_ext import _torch
from moe_fp8_ext._C import build_info
from moe_fp8_ext.distributed.fsdp import gather_in_fp8_
from moe_fp8_ext.integrations.convert import convert_, fp8_report, revert_
from moe_fp8_ext.integrations.export import export_fp8, fp8_state
from moe_fp8_ext.layer.adapter import LoRA
from moe_fp8_ext.layer.experts import experts, experts_of_groups
from moe_fp8_ext.layer.frozen import FrozenWeight
from moe_fp8_ext.layer.modules import Experts, MoE
from moe_fp8_ext.layer.router import Router
from moe_fp8_ext.layer.weight_gradients import DelayedWgrads
from moe_fp8_ext.matmul.grouped_mm import grouped_mm
from moe_fp8_ext.ops import (
    combine,
    permute_indices,
    permute_pad,
    sort_tokens,
    swizzle_scales,
    unpermute,
    unswizzle_scales,
)
from moe_fp8_ext.ops.activations import clamped_swiglu
from moe_fp8_ext.quantization.recipe import Recipe
from moe_fp8_ext.quantization.tensor import (
    Quantized,
    quantize_both,
    quantize_rows,
    quantize_tokens,
    quantize_weight,
    scaled_grouped_mm,
)
from moe_fp8_ext.training.checkpointing import save_ops
from moe_fp8_ext.training.cuda_graph import graphed
from moe_fp8_ext.training.flops import register_when_imported as _register_flops
from moe_fp8_ext.training.stats import stats
from moe_fp8_ext.training.weight_cache import reuse_weights
from moe_fp8_ext.validation import validate

__version__ = build_info()["version"]

__all__ = [
    "DelayedWgrads",
    "Experts",
    "FrozenWeight",
    "LoRA",
    "MoE",
    "Quantized",
    "Recipe",
    "Router",
    "build_info",
    "clamped_swiglu",
    "combine",
    "convert_",
    "experts",
    "experts_of_groups",
    "export_fp8",
    "fp8_report",
    "fp8_state",
    "gather_in_fp8_",
    "graphed",
    "grouped_mm",
    "permute_indices",
    "permute_pad",
    "quantize_both",
    "quantize_rows",
    "quantize_tokens",
    "quantize_weight",
    "reuse_weights",
    "revert_",
    "save_ops",
    "scaled_grouped_mm",
    "sort_tokens",
    "stats",
    "swizzle_scales",
    "unpermute",
    "unswizzle_scales",
    "validate",
]


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "ops", "reference"])


_register_flops()
if build_info()["backend"] == "cpu":
    _torch.warn_of_unused_gpus()
