"""Products of groups: of quantized operands, and of unquantized ones."""

from __future__ import annotations

import torch
from torch import Tensor

from .dequantization import exact_values
from .numerics import FORMATS, group_bounds
from .quantize import permute_quantized


def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    format: str,
    offs: Tensor,
    *,
    indices: Tensor | None = None,
    top_k: int | None = None,
    align: int = 1,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = True,
) -> Tensor:
    """Matmul per group of dequantized operands, in float64 and rounded once: the op is within float32 error of this.

    2D x 3D: a [M, K], b [E, K, N], groups are rows of a; out [M, N], zero in tail rows. With indices, groups are of
    those, and row i is row i // top_k of a.
    2D x 2D: a [N, P], b [P, K], groups are slices of P; out [E, N, K]. offs are multiples of `align`.

    scale_a is that of a. Float scales of blocks lie as their operand does, so that scale_b is that of b.mT transposed;
    those of whole rows, and E8M0 ones, are the scales of b.mT as they are.
    """
    f, of_rows = FORMATS[format], b.ndim == 3
    if indices is not None:
        a, scale_a = permute_quantized(a, scale_a, format, indices, top_k, offs=offs)
    if f.block:
        scale_b = scale_b.mT if f.order == "column_major" else scale_b
        along = "rows" if of_rows else "tokens"
        a = exact_values(a, scale_a, format, along=along, offs=offs)
        b = exact_values(b.mT, scale_b, format, along=along, offs=None if of_rows else offs).mT
    a, b = a.double(), b.double()
    shape = (a.shape[0], b.shape[2]) if of_rows else (len(offs), a.shape[0], b.shape[1])
    out = torch.zeros(shape, dtype=torch.float64, device=a.device)
    for e, (start, end) in enumerate(group_bounds(offs, a.shape[0 if of_rows else 1])):
        if start == end:  # an empty group is zero whatever its scales are
            continue
        group = slice(start, end)
        product = a[group] @ b[e] if of_rows else a[:, group] @ b[group]
        if not f.block:
            product = product * scale_a[group if of_rows else e].double()[:, None] * scale_b[e].double()
        out[group if of_rows else e] = product
    return out.to(out_dtype or torch.bfloat16)


def add_scaled_grouped_mm(
    total: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    format: str,
    offs: Tensor,
    *,
    align: int = 1,
    use_fast_accum: bool = True,
) -> None:
    """Adds the 2D x 2D product, rounded to float32, to total [E, N, K] in float32, which is rounded to its dtype."""
    product = scaled_grouped_mm(a, b, scale_a, scale_b, format, offs, out_dtype=torch.float32)
    for e, (start, end) in enumerate(group_bounds(offs, a.shape[1])):
        if start < end:
            total[e] = total[e].float() + product[e]


def grouped_mm(A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
    """A [M, K], B_t [E, K, N] -> out [M, N] in the dtype of A: the unquantized product, differentiable by autograd."""
    bounds = group_bounds(offs, len(A))
    tail = len(A) - (bounds[-1][1] if bounds else 0)
    groups = [A[start:end] @ B_t[e] for e, (start, end) in enumerate(bounds)]
    return torch.cat([*groups, A.new_zeros(tail, B_t.shape[2])])
