"""Every op in plain PyTorch: the second, independent definition of the numbers, written from DESIGN.md.

The compiled ops must return the same bytes. The reference is written to be read. It runs on CPU and CUDA tensors, reads
group sizes on the host, and makes no attempt to be fast. Its functions take the arguments of torch.ops.moe_fp8 and
return plain tensors.

Dims: M tokens, K input features, N output features, E experts, P padded tokens. `scale` is always the dequantization
factor: x ~ q * scale.
"""

from moe_fp8_ext.ops import __all__ as _OPS

from .activations import (
    activate,
    activate_backward,
    add_bias,
    quantize_activated,
    quantize_activated_backward,
    quantize_activated_backward_rows,
    sum_groups,
)
from .dequantization import dequantize, exact_values
from .factors import cast_factor
from .gemm import add_scaled_grouped_mm, grouped_mm, scaled_grouped_mm
from .low_rank import narrow_tokens, outer_tokens
from .messages import pack_tokens, quantize_and_pack
from .numerics import group_bounds
from .quantize import (
    permute_quantized,
    quantize_both,
    quantize_rows,
    quantize_tokens,
    quantize_weight,
    transpose_weight,
)
from .router import choose_experts, choose_experts_backward
from .scales import expand_scales, swizzle_scales, unswizzle_scales
from .tokens import (
    combine,
    combine_backward,
    pad_token_groups,
    pad_token_groups_to,
    permute_indices,
    permute_pad,
    sort_tokens,
    tokens_by_rank,
    unpad_token_groups,
    unpermute,
)

# Every op, and what tests call beside the ops.
__all__ = sorted([*_OPS, "exact_values", "group_bounds", "grouped_mm"])
