"""Grouped matmuls of quantized and of unquantized operands."""

from __future__ import annotations

import torch
from torch import Tensor

from .dequantization import exact_values
from .numerics import FORMATS, group_bounds
from .quantize import permute_quantized
from .signature import of_op


@of_op
def scaled_grouped_mm(
    a,
    b,
    scale_a,
    scale_b,
    format,
    offs,
    indices,
    top_k,
    align,
    out_dtype,
    use_fast_accum,
    rounding,
    out_transposed,
    low_rank_a,
    low_rank_b,
):
    """Matmul of dequantized operands group by group, in float64, rounded once. The op is within float32 error of this.

    - 2D x 3D: a [M, K], b [E, K, N]; groups are rows of a; out [M, N] is zero in tail rows. With indices, row i of out
      belongs to row indices[i] // top_k of a, and groups are ranges of indices. With low_rank_a [M, R] and low_rank_b
      [E, R, N], low_rank_a @ low_rank_b of each group is added.
    - 2D x 2D: a [N, P], b [P, K]; groups are ranges of P; out [E, N, K]. offs are multiples of `align`. With
      out_transposed, out is the transposed view of a contiguous [E, K, N].

    scale_a are the scales of a. scale_b are the scales of b.mT; in column-major formats their transpose, so that they
    lie as b does.
    """
    f, grouped_rows = FORMATS[format], b.ndim == 3
    if indices is not None:
        a, scale_a = permute_quantized(a, scale_a, format, indices, top_k, offs=offs)
    if f.block:
        scale_b = scale_b.mT if f.order == "column_major" else scale_b
        along = "rows" if grouped_rows else "tokens"
        a = exact_values(a, scale_a, format, along=along, offs=offs)
        b = exact_values(b.mT, scale_b, format, along=along, offs=None if grouped_rows else offs).mT
    a, b = a.double(), b.double()
    shape = (a.shape[0], b.shape[2]) if grouped_rows else (len(offs), a.shape[0], b.shape[1])
    out = torch.zeros(shape, dtype=torch.float64, device=a.device)
    for e, (start, end) in enumerate(group_bounds(offs, a.shape[0 if grouped_rows else 1])):
        if start == end:  # an empty group gives zeros, even if its scales are NaN
            continue
        group = slice(start, end)
        product = a[group] @ b[e] if grouped_rows else a[:, group] @ b[group]
        if not f.block:  # scales of whole lines are factors of the whole sum
            product = product * scale_a[group if grouped_rows else e].double()[:, None] * scale_b[e].double()
        if low_rank_a is not None:
            product = product + low_rank_a[group].double() @ low_rank_b[e].double()
        out[group if grouped_rows else e] = product
    out = out.to(out_dtype or torch.bfloat16)
    return out.mT.clone(memory_format=torch.contiguous_format).mT if out_transposed else out


@of_op
def add_scaled_grouped_mm(total, a, b, scale_a, scale_b, format, offs, align, use_fast_accum, rounding):
    """total [E, N, K] += the 2D x 2D product, in place.

    The product is rounded to float32 and added in float32; the sum is rounded to the dtype of total. An empty group
    adds nothing.
    """
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
