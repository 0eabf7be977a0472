"""Transposes of quantized weights."""

import torch
from torch import Tensor

from moe_fp8_ext.ops.dispatch import fake

_transpose_weight = torch.ops.moe_fp8.transpose_weight.default


def transpose_weight(q: Tensor) -> Tensor:
    """Transposes the values of a quantized weight:

        q_t[e, k, n] = q[e, n, k]

    In format "blockwise" a scale belongs to a square of 128 x 128 values. So q_t and the transposed scales equal the
    other direction that `quantize_weight` returns. In other formats the directions have different values.

    Args:
        q: [E, N, K], float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz; stride 1 in the last dimension,
            any other strides.

    Returns:
        q_t [E, K, N] of q's dtype, contiguous.

    Source: the tiles of weights in DESIGN.md section 5.
    """
    return _transpose_weight(q)


@fake(_transpose_weight)
def _(op, q):
    e, n, k = q.shape
    return q.new_empty((e, k, n))
