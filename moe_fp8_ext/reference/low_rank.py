"""Products of tokens with factors of a low rank, in float64, rounded once. The ops are within float32 error of them."""

from __future__ import annotations

import torch

from .activations import scores_of_rows
from .dequantization import dequantize
from .numerics import group_bounds, round_to
from .signature import of_op
from .tokens import permute_pad


@of_op
def narrow_tokens(x, m, offs, x_scale, format, indices, top_k):
    """x [T, W], m [E, R, W] -> [P, R]: rows of group e, x or x by index, times the factor of e; zeros for the rest."""
    rows, is_row = _rows(_values(x, x_scale, format), indices, top_k)
    out = torch.zeros(len(rows), m.shape[1], dtype=torch.float64, device=x.device)
    for e, (start, end) in enumerate(group_bounds(offs, len(rows))):
        used = is_row[start:end].nonzero()[:, 0] + start
        out[used] += rows[used].double() @ m[e].double().mT  # a sum with +0, so that no result is -0
    return round_to(out, torch.bfloat16)


@of_op
def outer_tokens(u, x, offs, scores, x_scale, format, indices, top_k, out_dtype):
    """u [P, R], x [T, W] -> [E, R, W]: the sum of RN(score * u) times x over the rows of each group."""
    rows, is_row = _rows(_values(x, x_scale, format), indices, top_k)
    if scores is not None:
        row_scores = scores.flatten() if indices is None else scores_of_rows(scores.flatten(), indices)
        u = round_to(row_scores[:, None] * u.float(), torch.bfloat16)
    out = torch.zeros(len(offs), u.shape[1], x.shape[1], dtype=torch.float64, device=x.device)
    for e, (start, end) in enumerate(group_bounds(offs, len(rows))):
        used = is_row[start:end].nonzero()[:, 0] + start
        out[e] += u[used].double().mT @ rows[used].double()
    return round_to(out, out_dtype or torch.bfloat16)


def _values(x, x_scale, format):
    """The tokens in bfloat16."""
    return x if x_scale is None else dequantize(x, x_scale, format)


def _rows(x, indices, top_k):
    """The tokens of rows, [P, W], and whether each row has a token."""
    if indices is None:
        return x, torch.ones(len(x), dtype=torch.bool, device=x.device)
    return permute_pad(x, indices, top_k), (indices >= 0) & (indices < len(x) * top_k)
