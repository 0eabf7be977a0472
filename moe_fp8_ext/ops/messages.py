"""Messages to other ranks: values, scales, expert ids and scores of a token in one row of bytes."""

import torch
from torch import Tensor

from moe_fp8_ext.ops.checks import (
    check_count,
    check_dim,
    check_format,
    check_indices,
    fp8_dtype,
)
from moe_fp8_ext.ops.dispatch import fake
from moe_fp8_ext.quantization.format import COLUMN_ALIGN, ROW_ALIGN, round_up

_pack_tokens = torch.ops.moe_fp8.pack_tokens.default
_quantize_and_pack = torch.ops.moe_fp8.quantize_and_pack.default


def pack_tokens(
    x: Tensor,
    topk_ids: Tensor | None,
    topk_scores: Tensor | None,
    scale: Tensor | None,
    indices: Tensor,
    top_k: int,
    num_experts: int,
) -> Tensor:
    """Gathers tokens by index and packs each token's values, scale, ids and scores into one row of a message.

        rows[p] = x[t] | scale[t] | topk_ids[t] + 1 | topk_scores[t],   t = indices[p] // top_k

    Columns that are None are left out. Each column begins at a multiple of 32 bytes and each row at a multiple of 64;
    zeros fill the gaps. A row whose index is no slot is zeros. Ids are written as int32, `id + 1`, or 0 for an id that
    is not in [0, num_experts).

    Args:
        x: [M, K], any dtype of 1, 2 or 4 bytes; stride 1 along K, any row stride.
        topk_ids: [M, N] int32 or int64 on x's device; stride 1 along N, any row stride. None: no such column. With
            MOE_FP8_VALIDATE=1 the op raises for an id that is neither an expert nor -1.
        topk_scores: [M, N] on x's device, any dtype of 1, 2 or 4 bytes; strides as for topk_ids. None: no such column.
        scale: [M] or [M, B] on x's device, any dtype of 1, 2 or 4 bytes, any strides. None: no such column.
        indices: [P] int32 on x's device, as in `permute_pad`.
        top_k: slots per token: index i stands for token i // top_k. For indices of `sort_tokens(by_rank)`, the number
            of ranks.
        num_experts: number of experts that ids count; 0 is enough without topk_ids.

    Returns:
        rows [P, bytes] uint8, contiguous.

    Source: DeepSeek-V3 technical report, section 3.2 (a token once to a rank, in fp8); DESIGN.md section 6.
    """
    return _pack_tokens(x, topk_ids, topk_scores, scale, indices, top_k, num_experts)


def quantize_and_pack(
    x: Tensor,
    topk_ids: Tensor | None,
    topk_scores: Tensor | None,
    format: str,
    indices: Tensor,
    inverse: Tensor,
    num_experts: int,
    *,
    dtype: torch.dtype | None = None,
    rounding: str | None = None,
) -> Tensor:
    """Quantizes tokens along rows and packs each, with its scales, ids and scores, into the messages it goes into.

        q, scale = quantize_rows(x, format)
        rows     = pack_tokens(q, topk_ids, topk_scores, scale, indices, N, num_experts)

    The results have the bytes of these two calls. In every format, the scales of a token lie side by side. Row p is
    zeros unless inverse.flatten()[indices[p]] == p.

    On a GPU one kernel reads x once and writes q only into messages, if all of these hold:

    - x is bfloat16 and its rows begin at multiples of 16 bytes;
    - the GPU casts to `dtype` in hardware;
    - K is a multiple of 16 and at most 16,384;
    - N is at most 256.

    Args:
        x: [M, K], bfloat16, float16 or float32; stride 1 along K, any row stride.
        topk_ids, topk_scores, num_experts: as in `pack_tokens`.
        format: as in `quantize_rows`; "mxfp8" and "mxfp8_rowmajor" give the same messages.
        indices: [P] int32 on x's device: the slot of each row, as the permutation of `sort_tokens` over
            `tokens_by_rank`. An index that is out of range stands for no slot. With MOE_FP8_VALIDATE=1 the op raises
            for an index that is neither in range nor -1, and if indices and inverse do not invert each other.
        inverse: [M, N] int32 on x's device, contiguous: the row of each slot, as the inverse of the same `sort_tokens`.
            A value that is out of range stands for no row. With MOE_FP8_VALIDATE=1 the op raises as for indices.
        dtype, rounding: as in `quantize_rows`.

    Returns:
        rows [P, bytes] uint8, contiguous.

    Source: DeepSeek-V3 technical report, section 3.2 (a token once to a rank, in fp8); DESIGN.md section 6.
    """
    return _quantize_and_pack(x, topk_ids, topk_scores, format, indices, inverse, num_experts, dtype, rounding)


def _width(op: str, x: Tensor, **columns: Tensor | None) -> int:
    """Checks the columns beside x; returns the bytes that they add to a row."""
    width = 0
    for name, t in columns.items():
        if t is None:
            continue
        check_dim(op, name, t, 0, x.shape[0])
        size = torch.int32.itemsize if name == "topk_ids" else t.dtype.itemsize
        width += round_up((t.shape[1] if t.dim() == 2 else 1) * size, COLUMN_ALIGN)
    return width


@fake(_pack_tokens)
def _(op, x, topk_ids, topk_scores, scale, indices, top_k, num_experts):
    width = round_up(x.shape[1] * x.dtype.itemsize, COLUMN_ALIGN)
    width += _width(op, x, scale=scale, topk_ids=topk_ids, topk_scores=topk_scores)
    check_count(op, "num_experts", num_experts)
    check_indices(op, x.shape[0], top_k)
    return x.new_empty((indices.shape[0], round_up(width, ROW_ALIGN)), dtype=torch.uint8)


@fake(_quantize_and_pack)
def _(op, x, topk_ids, topk_scores, format, indices, inverse, num_experts, dtype, rounding):
    format = check_format(op, format, rounding)
    check_dim(op, "inverse", inverse, 0, x.shape[0])
    check_indices(op, x.shape[0], max(inverse.shape[1], 1))
    fp8_dtype(op, dtype, x)
    width = round_up(x.shape[1], COLUMN_ALIGN)
    width += round_up(format.blocks(x.shape[1]) * format.scale_dtype.itemsize, COLUMN_ALIGN)
    width += _width(op, x, topk_ids=topk_ids, topk_scores=topk_scores)
    check_count(op, "num_experts", num_experts)
    return x.new_empty((indices.shape[0], round_up(width, ROW_ALIGN)), dtype=torch.uint8)
