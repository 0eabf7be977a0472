"""Typed wrappers of torch.ops.moe_fp8.*, one module an op family: docstring and fake implementation."""

from moe_fp8_ext.ops.combine import combine, combine_backward
from moe_fp8_ext.ops.dequantize import dequantize
from moe_fp8_ext.ops.permute import permute_indices, permute_pad, unpermute
from moe_fp8_ext.ops.permute_quantize import (
    permute_pad_quantize_1x128,
    permute_pad_quantize_1x128_128x1,
    permute_pad_quantize_mx_1x32,
    permute_pad_quantize_mx_1x32_32x1,
    permute_pad_quantize_rowcol,
    permute_pad_quantize_rowwise,
)
from moe_fp8_ext.ops.quantize_blockwise import quantize_1x128, quantize_1x128_128x1, quantize_128x1, quantize_128x128
from moe_fp8_ext.ops.quantize_colwise import quantize_colwise
from moe_fp8_ext.ops.quantize_mx import (
    quantize_mx_1x32,
    quantize_mx_1x32_32x1,
    quantize_mx_32x1,
    quantize_mx_weight,
)
from moe_fp8_ext.ops.quantize_rowcol import quantize_rowcol
from moe_fp8_ext.ops.quantize_rowwise import quantize_rowwise
from moe_fp8_ext.ops.quantize_weight import quantize_weight
from moe_fp8_ext.ops.scaled_grouped_mm import scaled_grouped_mm
from moe_fp8_ext.ops.sort_tokens import sort_tokens
from moe_fp8_ext.ops.swizzle_scales import (
    swizzle_scales_2d,
    swizzle_scales_3d,
    swizzle_scales_k_groups,
    swizzle_scales_m_groups,
    unswizzle_scales_2d,
    unswizzle_scales_3d,
    unswizzle_scales_k_groups,
    unswizzle_scales_m_groups,
)
from moe_fp8_ext.ops.token_groups import pad_token_groups, pad_token_groups_to, unpad_token_groups

__all__ = [
    "combine",
    "combine_backward",
    "dequantize",
    "pad_token_groups",
    "pad_token_groups_to",
    "permute_indices",
    "permute_pad",
    "permute_pad_quantize_1x128",
    "permute_pad_quantize_1x128_128x1",
    "permute_pad_quantize_mx_1x32",
    "permute_pad_quantize_mx_1x32_32x1",
    "permute_pad_quantize_rowcol",
    "permute_pad_quantize_rowwise",
    "quantize_1x128",
    "quantize_1x128_128x1",
    "quantize_128x1",
    "quantize_128x128",
    "quantize_colwise",
    "quantize_mx_1x32",
    "quantize_mx_1x32_32x1",
    "quantize_mx_32x1",
    "quantize_mx_weight",
    "quantize_rowcol",
    "quantize_rowwise",
    "quantize_weight",
    "scaled_grouped_mm",
    "sort_tokens",
    "swizzle_scales_2d",
    "swizzle_scales_3d",
    "swizzle_scales_k_groups",
    "swizzle_scales_m_groups",
    "unpad_token_groups",
    "unpermute",
    "unswizzle_scales_2d",
    "unswizzle_scales_3d",
    "unswizzle_scales_k_groups",
    "unswizzle_scales_m_groups",
]
