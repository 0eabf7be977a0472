"""Dequantization: the values of any quantized operand."""

import torch
from torch import Tensor

from moe_fp8_ext.ops.checks import (
    INPUT_DTYPES,
    check_dims,
    check_dtype,
    check_format,
    check_one_of,
    check_padded,
    check_scale_of_operand,
    check_size,
    require,
)
from moe_fp8_ext.ops.dispatch import fake

_dequantize = torch.ops.moe_fp8.dequantize.default


def dequantize(
    q: Tensor,
    scale: Tensor,
    format: str,
    *,
    along: str = "rows",
    offs: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Converts a quantized operand and its scales back to values.

        out = RN(RN32(q * scale of q's block))     the product is rounded to float32, then to `out_dtype`

    The operand is any output of a quantizer, with scales as that quantizer returned them:

        along="rows"     q [M, K] of `quantize_rows`, in "rowwise" and "mxfp8_rowmajor" also [..., K];
                         q [E, N, K] of `quantize_weight`, or its q_t [E, K, N] with scale_t
        along="tokens"   q_t [K, P] of `quantize_tokens`, with offs = padded_offs

    If scales go by groups, rows (or positions) behind the last group are zero, whatever q holds there. Every NaN is the
    quiet NaN without a sign.

    Args:
        q: float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz; stride 1 in the last dimension, any other
            strides.
        scale: float32, or float8_e8m0fnu for the MX formats (byte e stands for 2^(e - 127), 255 for NaN). Any strides
            in format "blockwise", contiguous in the others.
        format: "rowwise", "blockwise", "mxfp8" or "mxfp8_rowmajor".
        along: "rows" or "tokens".
        offs: [E], as in `moe_fp8_ext.ops`. Along tokens, offs is required and counts positions. Along rows, give it if
            "mxfp8" scales are blocked by groups of rows; the layout of other formats does not depend on it.
        out_dtype: bfloat16 (default), float16 or float32.

    Returns:
        out, shaped as q, contiguous.

    Source: the scales of DESIGN.md section 3, the layouts of sections 4 and 5.
    """
    return _dequantize(q, scale, format, along, offs, out_dtype)


@fake(_dequantize)
def _(op, q, scale, format, along, offs, out_dtype):
    format = check_format(op, format)
    check_one_of(op, "along", along, ("rows", "tokens"))
    along_tokens = along == "tokens"
    takes_any_dims = not along_tokens and format.order == "row_major"
    if not takes_any_dims:
        check_dims(op, "q", q, 2, 2 if along_tokens else 3)
        check_size(op, "q", q.shape[-2], "rows")
    require(not along_tokens or offs is not None, f"{op}: offs must be given along tokens, got None")
    out_dtype = out_dtype or torch.bfloat16
    check_dtype(op, "out_dtype", out_dtype, *INPUT_DTYPES)
    e = None
    if offs is not None:
        e = offs.shape[0]
        if format.block and (along_tokens or (format.order == "blocked" and q.dim() == 2)):
            check_padded(op, "q", q.shape[1 if along_tokens else 0], e, along_tokens)
    check_scale_of_operand(op, q, scale, format, along_tokens, e)
    return torch.empty(q.shape, dtype=out_dtype, device=q.device)
