"""Messages to other ranks: all that is known of a token in a row of bytes."""

import torch
from torch import Tensor

from moe_fp8_ext.ops.checks import (
    check,
    check_count,
    check_format,
    check_indices,
    check_rounding,
    fp8_dtype,
    require,
)
from moe_fp8_ext.ops.dispatch import refuse_derivatives
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
    """Takes tokens by index, all that is known of each side by side in a row of bytes: messages to other ranks.

    Row p is of token `indices[p] // top_k`: its values, scales, ids and scores, those of them that there are. Each
    column begins at a multiple of 32 bytes, each row at one of 64. Zeros fill what is between them, and rows whose
    index is no slot. Ids come as int32 from 1 on, `id + 1`, and 0 for one that is not in [0, num_experts). Not
    differentiable. Never waits for the device.

    Args:
        x: [M, K], any dtype of 1, 2 or 4 bytes; stride 1 along K, row stride free.
        topk_ids: [M, N] int32 or int64 on x's device, stride 1 along N, row stride free; None: no such column.
            MOE_FP8_VALIDATE=1 raises for an id that is neither of an expert nor -1, which waits for the device.
        topk_scores: [M, N] on x's device, any dtype of 1, 2 or 4 bytes, strides as of topk_ids; None: no such column.
        scale: [M] or [M, B] on x's device, any dtype of 1, 2 or 4 bytes, any strides; None: no such column.
        indices: [P] int32 on x's device, as in `permute_pad`.
        top_k: slots of a token: index i stands for token i // top_k. Of `sort_tokens(by_rank)`, the number of ranks.
        num_experts: of which ids are; 0 is enough where there are none.

    Returns:
        rows [P, bytes] uint8, contiguous.

    Raises:
        RuntimeError: dtype, dimensions, strides, device or sizes are not as above, or an argument asks for a
            derivative, which this has none of; the text names the argument.

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
    """Quantizes tokens along rows and puts each, with all else that is known of it, into its rows of messages.

    Row p has the bytes that `pack_tokens` makes of `quantize_rows(x, format)`, of N slots a token; a token's scales lie
    side by side, whatever the format's order is. A row whose slot has another row in inverse is zeros. A GPU reads x of
    bfloat16 once, and has q nowhere but in messages, where it casts to dtype itself, K is a multiple of 16 up to
    16,384, N at most 256 and rows of x begin at multiples of 16 bytes. Not differentiable. Never waits for the device.

    Args:
        x: [M, K], bfloat16, float16 or float32; stride 1 along K, row stride free.
        topk_ids, topk_scores, num_experts: as in `pack_tokens`.
        format: as in `quantize_rows`; of "mxfp8" and "mxfp8_rowmajor" messages are the same.
        indices, inverse: [P] and [M, N] int32 on x's device, contiguous: the slot of a row and the row of a slot, as
            `sort_tokens` returns both of `tokens_by_rank`; what is out of range is none. MOE_FP8_VALIDATE=1 raises for
            what is neither in range nor -1, and where one is not the inverse of the other; it waits for the device.
        dtype, rounding: as in `quantize_rows`.

    Returns:
        rows [P, bytes] uint8, contiguous.

    Raises:
        RuntimeError: dtype, dimensions, strides, device, sizes, format or rounding are not as above, or an argument
            asks for a derivative, which this has none of; the text names the argument.

    Source: DeepSeek-V3 technical report, section 3.2 (a token once to a rank, in fp8); DESIGN.md section 6.
    """
    return _quantize_and_pack(x, topk_ids, topk_scores, format, indices, inverse, num_experts, dtype, rounding)


refuse_derivatives(_pack_tokens)
refuse_derivatives(_quantize_and_pack)


def _width(op: str, x: Tensor, **columns: Tensor | None) -> int:
    """Bytes of what is known beside the values of x."""
    width = 0
    for name, t in columns.items():
        if t is None:
            continue
        check(op, name, t, x)
        rows, got = x.shape[0], t.shape[0]
        require(got == rows, f"{op}: {name} must have size {rows} in dimension 0, got {got}")
        size = torch.int32.itemsize if name == "topk_ids" else t.dtype.itemsize
        width += round_up((t.shape[1] if t.dim() == 2 else 1) * size, COLUMN_ALIGN)
    return width


@torch.library.register_fake("moe_fp8::pack_tokens")
def _(x, topk_ids, topk_scores, scale, indices, top_k, num_experts):
    op = "pack_tokens"
    check(op, "x", x)
    width = round_up(x.shape[1] * x.dtype.itemsize, COLUMN_ALIGN)
    width += _width(op, x, scale=scale, topk_ids=topk_ids, topk_scores=topk_scores)
    check_count(op, "num_experts", num_experts)
    check_indices(op, indices, x, x.shape[0], top_k)
    return x.new_empty((indices.shape[0], round_up(width, ROW_ALIGN)), dtype=torch.uint8)


@torch.library.register_fake("moe_fp8::quantize_and_pack")
def _(x, topk_ids, topk_scores, format, indices, inverse, num_experts, dtype=None, rounding=None):
    op = "quantize_and_pack"
    check(op, "x", x)
    format = check_format(op, format)
    check_rounding(op, format, rounding)
    check(op, "inverse", inverse, x)
    m, got = x.shape[0], inverse.shape[0]
    require(got == m, f"{op}: inverse must have size {m} in dimension 0, got {got}")
    check_indices(op, indices, x, m, max(inverse.shape[1], 1))
    fp8_dtype(op, dtype, x)
    width = round_up(x.shape[1], COLUMN_ALIGN)
    width += round_up(format.blocks(x.shape[1]) * format.scale_dtype.itemsize, COLUMN_ALIGN)
    width += _width(op, x, topk_ids=topk_ids, topk_scores=topk_scores)
    check_count(op, "num_experts", num_experts)
    return x.new_empty((indices.shape[0], round_up(width, ROW_ALIGN)), dtype=torch.uint8)
