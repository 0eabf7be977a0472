"""`Quantized`, an operand with its scales, and functions that make and multiply such operands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from moe_fp8_ext import ops
from moe_fp8_ext._C import validates
from moe_fp8_ext.ops.checks import check_format, check_one_of, fail, has_values
from moe_fp8_ext.ops.dispatch import refuse_derivatives_of
from moe_fp8_ext.quantization.format import FORMATS, padded_extent


@dataclass(frozen=True, eq=False)
class Quantized:
    """An fp8 operand with its scales, as a quantizer returned them. Compared by identity.

    Attributes:
        q: fp8 values. Along rows: [M, K], or a weight [E, N, K] or its transpose [E, K, N]; "rowwise" takes any
            [..., K]. Along tokens: [K, P].
        scale: as `ops.quantize_rows`, `ops.quantize_tokens` or `ops.quantize_weight` returns it.
        format: "rowwise", "blockwise", "mxfp8" or "mxfp8_rowmajor".
        along: "rows" or "tokens", the dimension that scaling blocks run along.
        offs: [E] int32, exclusive ends of groups. Along tokens: of the padded groups, as positions among P. Along rows:
            of the groups of rows, or None if the operand was quantized without groups.
        align: the multiple that groups were padded to along tokens; 1 along rows.
        transposed: whether q is the transpose [E, K, N] of weights [E, N, K], the operand of dgrad.
    """

    q: Tensor
    scale: Tensor
    format: str
    along: str = "rows"
    offs: Tensor | None = None
    align: int = 1
    transposed: bool = False

    def dequantize(self, out_dtype: torch.dtype | None = None) -> Tensor:
        """q * scale in float32, rounded to `out_dtype`, bfloat16 by default; shaped as q. See `ops.dequantize`."""
        return ops.dequantize(self.q, self.scale, self.format, along=self.along, offs=self.offs, out_dtype=out_dtype)


# Two directions of one tensor: along rows, then along tokens or, of a weight, along rows of its transpose.
Pair = tuple[Quantized, Quantized]
_OP = "scaled_grouped_mm"


def quantize_rows(
    x: Tensor,
    format: str,
    *,
    offs: Tensor | None = None,
    indices: Tensor | None = None,
    top_k: int | None = None,
    dtype: torch.dtype | None = None,
    rounding: str | None = None,
) -> Quantized:
    """Quantizes along rows, for the left operand of the forward product. See `ops.quantize_rows` for details."""
    q, scale = ops.quantize_rows(x, format, offs=offs, indices=indices, top_k=top_k, dtype=dtype, rounding=rounding)
    return Quantized(q, scale, format, "rows", offs)


def quantize_tokens(
    x: Tensor,
    format: str,
    *,
    offs: Tensor,
    indices: Tensor | None = None,
    top_k: int | None = None,
    align: int | None = None,
    dtype: torch.dtype | None = None,
    rounding: str | None = None,
    amax: str = "group",
) -> Quantized:
    """Quantizes along the tokens of groups, for an operand of wgrad. See `ops.quantize_tokens` for details."""
    q_t, scale_t, padded_offs = ops.quantize_tokens(
        x, format, offs=offs, indices=indices, top_k=top_k, align=align, dtype=dtype, rounding=rounding, amax=amax
    )
    return Quantized(q_t, scale_t, format, "tokens", padded_offs, _align(format, align))


def quantize_both(
    x: Tensor,
    format: str,
    *,
    offs: Tensor,
    indices: Tensor | None = None,
    top_k: int | None = None,
    align: int | None = None,
    dtype: torch.dtype | None = None,
    rounding: str | None = None,
    amax: str = "group",
) -> tuple[Quantized, Quantized]:
    """Quantizes as `quantize_rows` and `quantize_tokens` do, from one read of x. See `ops.quantize_both` for details.

    amax "batch" with indices raises, because the rows would then be rows of x, and not of the groups.
    """
    if amax == "batch" and indices is not None:
        raise RuntimeError("quantize_both: amax must not be 'batch' with indices, got 'batch'")
    q, scale, q_t, scale_t, padded_offs = ops.quantize_both(
        x, format, offs=offs, indices=indices, top_k=top_k, align=align, dtype=dtype, rounding=rounding, amax=amax
    )
    tokens = Quantized(q_t, scale_t, format, "tokens", padded_offs, _align(format, align))
    return Quantized(q, scale, format, "rows", offs), tokens


def quantize_weight(
    w: Tensor, format: str, *, dtype: torch.dtype | None = None, rounding: str | None = None
) -> tuple[Quantized, Quantized]:
    """Quantizes w [E, N, K] and its transpose [E, K, N]. See `ops.quantize_weight` for details.

    Returns:
        the operand of the forward product, and the operand of dgrad.
    """
    q, scale, q_t, scale_t = ops.quantize_weight(w, format, dtype=dtype, rounding=rounding)
    return Quantized(q, scale, format), Quantized(q_t, scale_t, format, transposed=True)


def scaled_grouped_mm(
    a: Quantized,
    b: Quantized,
    offs: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = True,
) -> Tensor:
    """Multiplies two quantized operands, group by group. The sum runs along the last dimension of both.

        a [M, K] along rows,   b [E, N, K] a weight:       out[r] = a[r] @ b[e]^T for the rows r of group e
        a [N, P] along tokens, b [K, P] along tokens:      out[e] = a[:, p] @ b[:, p]^T over the positions p of group e

    Rows that are in no group, and the product of an empty group, are zero. See `ops.scaled_grouped_mm` for details.

    Args:
        a, b: both of one format; if along tokens, both of the same groups, padded to the same multiple.
        offs: [E] int32, exclusive ends of the groups of rows; None if a has offs.
        out_dtype: bfloat16 (default) or float32.
        use_fast_accum: let a GEMM of "rowwise" accumulate whole sums in the tensor cores' own precision.

    Returns:
        out [M, N], or [E, N, K], contiguous.

    Raises:
        RuntimeError: the operands do not fit each other; the text names the argument.
    """
    _check_quantized("a", a)
    _check_quantized("b", b)
    check_format(_OP, a.format)
    check_one_of(_OP, "along of a", a.along, ("rows", "tokens"))
    if b.format != a.format:
        _fail(f"b must have the format of a, '{a.format}', got '{b.format}'")
    if b.along != a.along:
        _fail(f"b must be quantized along {a.along} as a is, got along {b.along}")
    if b.align != a.align:
        _fail(f"b must be padded to {a.align} as a is, got {b.align}")
    if a.along == "rows" and b.q.dim() != 3:
        _fail(f"b must be a weight of 3 dimensions, got {b.q.dim()}")
    if a.along == "tokens":
        _validate_groups(a, b)
    if offs is None:
        offs = a.offs
    elif a.offs is not None and a.offs is not offs:
        _fail("offs must be None where a has its own, got another tensor")
    if offs is None:
        _fail("offs must be given where a has none, got None")
    scale_b = FORMATS[b.format].transposed_scale(b.scale)
    return ops.scaled_grouped_mm(
        a.q,
        b.q.mT,
        a.scale,
        scale_b,
        a.format,
        offs,
        align=a.align,
        out_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
    )


def given(
    op: str, arg: str, x: object, format: str | None, weight: bool = False
) -> tuple[Quantized | None, Quantized | None]:
    """Checks an operand that a caller may have quantized already, for a recipe with `format`.

    Returns:
        its two directions, as in `Pair`; the second is None if the caller did not give it. None twice for a tensor.
    """
    if isinstance(x, Tensor):
        return None, None
    pair = x if isinstance(x, (tuple, list)) else (x, None)
    if len(pair) != 2 or not isinstance(pair[0], Quantized) or not isinstance(pair[1], (Quantized, type(None))):
        raise RuntimeError(f"{op}: {arg} must be a tensor, a Quantized or a pair of them, got {type(x).__name__}")
    directions = ("rows", False), ("rows", True) if weight else ("tokens", False)
    for quantized, (along, transposed) in zip(pair, directions, strict=True):
        if quantized is None:
            continue
        _check_tensors(op, arg, quantized)
        refuse_derivatives_of(op, arg, quantized.q, quantized.scale)
        if format is None:
            raise RuntimeError(f"{op}: {arg} must be a tensor with recipe 'bf16', got '{quantized.format}'")
        if quantized.format != format:
            raise RuntimeError(f"{op}: {arg} must be of the recipe's format '{format}', got '{quantized.format}'")
        if quantized.along != along:
            raise RuntimeError(f"{op}: {arg} must be quantized along {along}, got {quantized.along}")
        if quantized.transposed != transposed:
            which = "second" if transposed else "first"
            raise RuntimeError(f"{op}: {arg} must have what quantize_weight returns {which} there, got the other one")
    first, second = pair
    if second is not None:
        _check_pair(op, arg, first, second, weight)
    return first, second


def _check_pair(op: str, arg: str, first: Quantized, second: Quantized, weight: bool) -> None:
    """Checks that both are of one tensor, as far as shapes tell."""
    got = tuple(second.q.shape)
    if first.q.dim() != (3 if weight else 2):
        return  # the caller raises an error about the dimensions
    if weight:
        wanted = (*first.q.shape[:-2], first.q.shape[-1], first.q.shape[-2])
    elif second.offs is not None and isinstance(first.q.shape[0], int):
        wanted = first.q.shape[-1], padded_extent(first.q.shape[0], second.offs.shape[0], second.align)
    else:
        wanted = first.q.shape[-1], got[-1]
    if got != wanted:
        raise RuntimeError(f"{op}: {arg} must be two of one tensor, the second of shape {wanted}, got {got}")


def _check_quantized(arg: str, x: object) -> None:
    if not isinstance(x, Quantized):
        _fail(f"{arg} must be a Quantized, got {type(x).__name__}")
    _check_tensors(_OP, arg, x)


def _check_tensors(op: str, arg: str, x: Quantized) -> None:
    for name, got in (("q", x.q), ("scale", x.scale)):
        if not isinstance(got, Tensor):
            raise RuntimeError(f"{op}: {name} of {arg} must be a tensor, got {type(got).__name__}")


def _validate_groups(a: Quantized, b: Quantized) -> None:
    """With MOE_FP8_VALIDATE=1, checks that both have the same groups."""
    if torch.compiler.is_compiling() or not validates() or a.offs is None or b.offs is None:
        return
    if has_values(a.offs) and has_values(b.offs) and a.offs.tolist() != b.offs.tolist():
        _fail(f"b must be of the groups of a, which end at {a.offs.tolist()}, got {b.offs.tolist()}")


def _fail(text: str) -> NoReturn:
    fail(_OP, text)


def _align(format: str, align: int | None) -> int:
    return FORMATS[format].align if align is None else align
