"""Tokens that arrive quantized, as from a dispatcher: the operand of the first product, without another cast."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8_ext.ops.checks import (
    FP8_DTYPES,
    INPUT_DTYPES,
    check_dense,
    check_dtype,
    check_scale,
    contents,
    fail,
)
from moe_fp8_ext.quantization.casting import row_major
from moe_fp8_ext.quantization.format import FORMATS
from moe_fp8_ext.quantization.prepare import Operand, operand_of_rows
from moe_fp8_ext.quantization.recipe import Recipe, get_recipe
from moe_fp8_ext.quantization.tensor import Quantized, given


def arrived(
    op: str, x: Tensor | Quantized, stand_in: Tensor | None, recipe: str | Recipe
) -> tuple[Tensor, Quantized | None]:
    """Checks tokens x that may be quantized. Returns the tensor that autograd sees, and x if it is quantized."""
    if not isinstance(x, Quantized):
        if stand_in is not None:
            fail(op, "stand_in must be None where x is a tensor, which gets the gradient itself, got one")
        return x, None
    format = get_recipe(recipe, op).format
    if format is None:
        fail(op, "x must be a tensor with recipe 'bf16', got a Quantized; pass x.dequantize(), which has its values")
    is_row_major = format == "mxfp8" and x.format == "mxfp8_rowmajor"
    given(op, "x", x, x.format if is_row_major else format)
    check_dense(op, "q of x", x.q, 2)
    check_dense(op, "scale of x", x.scale, x.scale.dim())
    check_dtype(op, "q of x", x.q.dtype, *FP8_DTYPES)
    if x.scale.device != x.q.device:
        fail(op, f"scale of x must be on the device of its q, {x.q.device}, got {x.scale.device}")
    if stand_in is None:
        return x.q.new_empty((), dtype=torch.bfloat16).expand(x.q.shape), x
    check_dense(op, "stand_in", stand_in, 2)
    check_dtype(op, "stand_in", stand_in.dtype, *INPUT_DTYPES)
    if stand_in.shape != x.q.shape:
        fail(op, f"stand_in must have the shape of x, {list(x.q.shape)}, got {list(stand_in.shape)}")
    if stand_in.device != x.q.device:
        fail(op, f"stand_in must be on the device of x, {x.q.device}, got {stand_in.device}")
    return stand_in, x


def operand_of(op: str, x: Quantized, recipe: Recipe, offs: Tensor | None = None) -> Operand:
    """Makes the operand of tokens that `arrived` accepted. offs: the groups that they lie in, else None."""
    format, groups = FORMATS[x.format], None
    if format.order == "blocked":
        groups = None if offs is None else offs.shape[0]
        if (x.offs is None) != (offs is None):
            wanted = "for offs, by whose groups its scales are blocked" if x.offs is None else "without offs"
            fail(op, f"x must be quantized {wanted}, got one {'without' if x.offs is None else 'with offs'}")
    check_scale(op, "scale of x", x.scale, format, format.scale_of_rows(x.q.shape, groups).shape)
    if None not in (offs, x.offs) and None not in (contents(offs), contents(x.offs)) and not offs.equal(x.offs):
        fail(op, f"x must be quantized for offs, with groups that end at {offs.tolist()}, got {x.offs.tolist()}")
    if x.format == recipe.format and format.order == "blocked":
        return Operand(row_major(x.q), x.scale)
    by_column = x.scale.stride(0) == 1 and x.scale.stride(-1) % 4 == 0
    if format.order == "column_major" and offs is not None and not by_column:
        # Hopper's products read scales by column, unless they take rows by index. TMA needs columns of whole 16 bytes.
        columns = format.scale_of_rows(x.q.shape).empty(x.scale, x.scale.dtype)
        return Operand(row_major(x.q), columns.copy_(x.scale))
    return operand_of_rows(row_major(x.q), x.scale, recipe.format, offs)
