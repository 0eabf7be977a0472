"""FP8 training of Mixture-of-Experts layers: quantized operands, grouped matmuls and a drop-in `grouped_mm`."""

import torch  # first: the extension resolves its symbols against the libraries that this loads

try:
    from moe_fp8_ext._C import build_info, set_torch_has_mx_gemm
except ImportError as error:
    raise ImportError(
        "moe_fp8_ext: the compiled extension could not be loaded; build it with `pip install .` against this torch, "
        "or, to import it from its source tree, with `make build`"
    ) from error

from moe_fp8_ext.grouped_mm import grouped_mm
from moe_fp8_ext.ops import (
    combine,
    combine_backward,
    dequantize,
    pad_token_groups,
    pad_token_groups_to,
    permute_indices,
    permute_pad,
    permute_pad_quantize_1x128,
    permute_pad_quantize_1x128_128x1,
    permute_pad_quantize_mx_1x32,
    permute_pad_quantize_mx_1x32_32x1,
    permute_pad_quantize_rowcol,
    permute_pad_quantize_rowwise,
    quantize_1x128,
    quantize_1x128_128x1,
    quantize_128x1,
    quantize_128x128,
    quantize_colwise,
    quantize_mx_1x32,
    quantize_mx_1x32_32x1,
    quantize_mx_32x1,
    quantize_mx_weight,
    quantize_rowcol,
    quantize_rowwise,
    quantize_weight,
    scaled_grouped_mm,
    sort_tokens,
    swizzle_scales_2d,
    swizzle_scales_3d,
    swizzle_scales_k_groups,
    swizzle_scales_m_groups,
    unpad_token_groups,
    unpermute,
    unswizzle_scales_2d,
    unswizzle_scales_3d,
    unswizzle_scales_k_groups,
    unswizzle_scales_m_groups,
)
from moe_fp8_ext.recipes import RECIPES, Recipe, default_fp8_dtype, get_recipe, group_alignment

# An option of torch's build, under two names so far. Known from the start, no call need try it and fail.
set_torch_has_mx_gemm(any(option in torch.__config__.show() for option in ("USE_MSLK", "USE_FBGEMM_GENAI")))

__version__ = build_info()["version"]

__all__ = [
    "RECIPES",
    "Recipe",
    "build_info",
    "combine",
    "combine_backward",
    "default_fp8_dtype",
    "dequantize",
    "get_recipe",
    "group_alignment",
    "grouped_mm",
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
