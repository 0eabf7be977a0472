"""Messages: values, scales, ids and scores of a token in one row of bytes."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from .numerics import FORMATS, round_up
from .quantize import quantize_lines
from .signature import of_op
from .tokens import permute_pad


@of_op
def pack_tokens(x, topk_ids, topk_scores, scale, indices, top_k, num_experts):
    """x [M, K] and other columns, indices [P] -> bytes [P, B].

    Columns are padded to 32 bytes and rows to 64. An id is written as id + 1, and as 0 if it is no expert.
    """
    if topk_ids is not None:
        topk_ids = torch.where((topk_ids >= 0) & (topk_ids < num_experts), topk_ids, -1).int() + 1
    columns = []
    for t in (x, scale, topk_ids, topk_scores):
        if t is not None:
            width = (t.shape[1] if t.ndim == 2 else 1) * t.element_size()
            column = torch.zeros(len(x), round_up(width, 32), dtype=torch.uint8, device=x.device)
            if t.numel():
                values = t.clone(memory_format=torch.contiguous_format).view(-1)
                column[:, :width] = values.view(torch.uint8).view(-1, width)
            columns.append(column)
    row = torch.cat(columns, 1)
    return permute_pad(pad(row, (0, round_up(row.shape[1], 64) - row.shape[1])), indices, top_k)


@of_op
def quantize_and_pack(x, topk_ids, topk_scores, format, indices, inverse, num_experts, dtype, rounding):
    """x [M, K], indices [P], inverse [M, N] -> bytes [P, B].

    Row p is token indices[p] // N if that slot has row p in inverse, else zeros.
    """
    q, scale = quantize_lines(x, FORMATS[format], dtype, rounding)
    row_of_slot = inverse.flatten().tolist()
    indices = [
        slot if 0 <= slot < len(row_of_slot) and row_of_slot[slot] == p else -1
        for p, slot in enumerate(indices.tolist())
    ]
    indices = torch.tensor(indices, dtype=torch.int32, device=x.device)
    return pack_tokens(q, topk_ids, topk_scores, scale, indices, max(inverse.shape[1], 1), num_experts)
