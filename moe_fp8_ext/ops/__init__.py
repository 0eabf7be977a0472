"""Typed wrappers of torch.ops.moe_fp8.*, one module an op family: docstring and fake implementation."""

from moe_fp8_ext.ops.quantize_colwise import quantize_colwise
from moe_fp8_ext.ops.quantize_rowcol import quantize_rowcol
from moe_fp8_ext.ops.quantize_rowwise import quantize_rowwise
from moe_fp8_ext.ops.quantize_weight import quantize_weight
from moe_fp8_ext.ops.scaled_grouped_mm import scaled_grouped_mm
from moe_fp8_ext.ops.token_groups import pad_token_groups, pad_token_groups_to, unpad_token_groups

__all__ = [
    "pad_token_groups",
    "pad_token_groups_to",
    "quantize_colwise",
    "quantize_rowcol",
    "quantize_rowwise",
    "quantize_weight",
    "scaled_grouped_mm",
    "unpad_token_groups",
]
