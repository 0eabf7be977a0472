"""Typed wrappers of torch.ops.moe_fp8, with the argument lists of the ops.

Each op family is one module. For each op the module holds a wrapper with a docstring, a fake implementation for
`torch.compile`, and its gradient if it has one. This holds for every op:

- The op never waits for the device. With MOE_FP8_VALIDATE=1 it checks the contents of offs, indices, counts and ids,
  which waits.
- The op is not differentiable, unless its docstring says so. An argument that has no gradient must not require one.
- If an argument is not as the docstring says, the op raises a RuntimeError, which names the op and the argument. That
  holds for dtype, dimensions, sizes, strides and device of tensors, and for the values of other arguments.
- offs are [E] int32 on the device of the other tensors, E at most 1024: the exclusive end of each group,
  non-decreasing. The op clamps the contents into the range of what they count, and makes them monotonic.
"""

import torch as _torch

from moe_fp8_ext.ops.activations import (
    activate,
    activate_backward,
    add_bias,
    quantize_activated,
    quantize_activated_backward,
    quantize_activated_backward_rows,
    sum_groups,
)
from moe_fp8_ext.ops.dequantization import dequantize
from moe_fp8_ext.ops.dispatch import bind as _bind
from moe_fp8_ext.ops.dispatch import refuse_derivatives as _refuse_derivatives
from moe_fp8_ext.ops.dispatch import refuse_none as _refuse_none
from moe_fp8_ext.ops.factors import cast_factor
from moe_fp8_ext.ops.gemm import add_scaled_grouped_mm, scaled_grouped_mm
from moe_fp8_ext.ops.low_rank import narrow_tokens, outer_tokens
from moe_fp8_ext.ops.messages import pack_tokens, quantize_and_pack
from moe_fp8_ext.ops.permute import permute_indices, permute_pad, permute_quantized, unpermute
from moe_fp8_ext.ops.quantize import quantize_both, quantize_rows, quantize_tokens, quantize_weight
from moe_fp8_ext.ops.router import choose_experts, choose_experts_backward
from moe_fp8_ext.ops.scales import expand_scales, swizzle_scales, unswizzle_scales
from moe_fp8_ext.ops.slots import combine, combine_backward
from moe_fp8_ext.ops.sorting import sort_tokens, tokens_by_rank
from moe_fp8_ext.ops.token_groups import pad_token_groups, pad_token_groups_to, unpad_token_groups
from moe_fp8_ext.ops.transpose import transpose_weight

__all__ = [
    "activate",
    "activate_backward",
    "add_bias",
    "add_scaled_grouped_mm",
    "cast_factor",
    "choose_experts",
    "choose_experts_backward",
    "combine",
    "combine_backward",
    "dequantize",
    "expand_scales",
    "narrow_tokens",
    "outer_tokens",
    "pack_tokens",
    "pad_token_groups",
    "pad_token_groups_to",
    "permute_indices",
    "permute_pad",
    "permute_quantized",
    "quantize_activated",
    "quantize_activated_backward",
    "quantize_activated_backward_rows",
    "quantize_and_pack",
    "quantize_both",
    "quantize_rows",
    "quantize_tokens",
    "quantize_weight",
    "scaled_grouped_mm",
    "sort_tokens",
    "sum_groups",
    "swizzle_scales",
    "tokens_by_rank",
    "transpose_weight",
    "unpad_token_groups",
    "unpermute",
    "unswizzle_scales",
]

for _name in __all__:
    _op = getattr(_torch.ops.moe_fp8, _name).default
    _refuse_none(_op)
    _refuse_derivatives(_op)
    _bind(globals()[_name], _op)
