"""Grouped products of quantized operands."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8_ext.quantization.format import FORMATS
from moe_fp8_ext.quantization.recipe import Recipe

_scaled_grouped_mm = torch.ops.moe_fp8.scaled_grouped_mm.default
_add_scaled_grouped_mm = torch.ops.moe_fp8.add_scaled_grouped_mm.default


def fp8_product(
    a: Tensor,
    scale_a: Tensor,
    w: Tensor,
    scale_w: Tensor,
    offs: Tensor,
    recipe: Recipe,
    indices: Tensor | None = None,
    top_k: int | None = None,
) -> Tensor:
    """Computes a @ w^T of each group. With indices, gathers the rows of a by them."""
    scale_w = FORMATS[recipe.format].transposed_scale(scale_w)
    how = indices, top_k, 1, None, recipe.use_fast_accum
    return _scaled_grouped_mm(a, w.mT, scale_a, scale_w, recipe.format, offs, *how)


def fp8_wgrad(
    dy: Tensor,
    scale_dy: Tensor,
    a: Tensor,
    scale_a: Tensor,
    offs: Tensor,
    recipe: Recipe,
    align: int,
    main_grad: Tensor | None,
) -> Tensor | None:
    """Computes dy @ a^T of each group, [E, N, K] in bfloat16. With main_grad, adds it there and returns None.

    align: as in `ops.scaled_grouped_mm`.
    """
    scale_a = FORMATS[recipe.format].transposed_scale(scale_a)
    operands = dy, a.mT, scale_dy, scale_a, recipe.format, offs
    if main_grad is None:
        return _scaled_grouped_mm(*operands, None, None, align, None, recipe.use_fast_accum)
    if scale_dy.dtype == torch.float8_e8m0fnu and torch.compiler.is_compiling():
        operands = dy, a.mT, scale_dy.view(torch.uint8), scale_a.view(torch.uint8), recipe.format, offs
        _add_by_bytes(main_grad, *operands, align, recipe.use_fast_accum)
    else:
        _add_scaled_grouped_mm(main_grad, *operands, align, recipe.use_fast_accum)
    return None


@torch.library.custom_op("moe_fp8_ext::add_by_bytes", mutates_args=("total",))
def _add_by_bytes(
    total: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    format: str,
    offs: Tensor,
    align: int,
    use_fast_accum: bool,
) -> None:
    """`ops.add_scaled_grouped_mm` with scales as bytes.

    inductor fails on ops that write an argument and take float8_e8m0fnu (pytorch issue 189522).
    """
    scales = scale_a.view(torch.float8_e8m0fnu), scale_b.view(torch.float8_e8m0fnu)
    _add_scaled_grouped_mm(total, a, b, *scales, format, offs, align, use_fast_accum)
