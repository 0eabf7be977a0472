"""Grouped products in bfloat16 by `torch._grouped_mm`, for any sizes and strides, with defined tail rows."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8_ext import _torch
from moe_fp8_ext.ops.dispatch import python_op
from moe_fp8_ext.quantization.casting import cast
from moe_fp8_ext.quantization.format import MAX_EXPERTS

_pad_token_groups_to = torch.ops.moe_fp8.pad_token_groups_to.default


def max_experts(x: Tensor, has_factors: bool = False) -> int:
    """Returns the maximum number of experts of a product in bfloat16 on the device of x.

    has_factors: whether factors of adapters are multiplied, which have one more expert, of zeros.
    """
    return (1023 if x.is_cuda else MAX_EXPERTS) - has_factors  # torch's kernel refuses 1024


def clamped(offs: Tensor, rows: int) -> Tensor:
    """Makes offs safe for torch's kernel: within [0, rows] and monotonic. `sort_tokens` returns offs that are safe."""
    return offs.clamp(0, rows).cummax(0).values


def bf16_product(a: Tensor, b_t: Tensor, offs: Tensor, covered: bool = False) -> Tensor:
    """Computes a [M, K] @ b_t [E, K, N] of each group in bfloat16, for any sizes. Rows without a group are zero.

    covered: whether every row has a group.
    """
    n = b_t.shape[2]
    if offs.shape[0] == 0:  # torch divides by the number of groups
        return a.new_zeros(a.shape[0], n)
    out = _product(_tma_operand(a), _tma_operand(b_t), offs, covered)
    return out if n == out.shape[1] else out[:, :n].contiguous()


def bf16_wgrad(
    dY: Tensor, a: Tensor, offs: Tensor, main_grad: Tensor | None = None, transposed: bool = False
) -> Tensor | None:
    """Computes dY^T @ a of each group, [E, N, K] in bfloat16. With main_grad, adds it there and returns None.

    transposed: whether the result lies as [E, K, N] in memory. The product then has its operands swapped.
    """
    if transposed and main_grad is None:
        return bf16_wgrad(a, dY, offs).mT
    n, k = dY.shape[1], a.shape[1]
    dy, a = _tma_operand(cast(dY, torch.bfloat16)), _tma_operand(a)
    dW = _product(dy.t(), a, offs) if offs.shape[0] else a.new_zeros(0, dy.shape[1], a.shape[1])
    dW = dW if dW.shape[1:] == (n, k) else dW[:, :n, :k]
    if main_grad is None:
        return dW
    main_grad.add_(dW)
    return None


def _product(a: Tensor, b: Tensor, offs: Tensor, covered: bool = False) -> Tensor:
    if a.device.type == "cpu":
        return _cpu_grouped_mm(a, b, offs)
    out = _torch.grouped_mm(a, b, offs=offs)
    return out if b.dim() == 2 or covered else zero_tail(out, offs)


def _fake_grouped_mm(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    groups = offs.shape if b.dim() == 2 else ()
    return a.new_empty(*groups, a.shape[0], b.shape[-1])


@python_op("moe_fp8_ext::cpu_grouped_mm", _fake_grouped_mm)
def _cpu_grouped_mm(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """torch._grouped_mm in float32, which is tens of times faster on a CPU without instructions for bfloat16.

    It is a separate op, because the fake implementation of torch's op accepts bfloat16 only.
    """
    out = _torch.grouped_mm(a.float(), b.float(), offs=offs).bfloat16()
    return out if b.dim() == 2 else zero_tail(out, offs)


def zero_tail(out: Tensor, offs: Tensor) -> Tensor:
    """Returns out [M, N] with zeros in the rows behind the last group."""
    # Copying every group to its own place zeroes the rest. It takes two ops; a mask of rows would take seven.
    return _pad_token_groups_to(out, offs, torch.constant_pad_nd(offs, (1, -1)), out.shape[0])


def _tma_operand(x: Tensor) -> Tensor:
    """Pads the columns of x [M, K], or rows and columns of each matrix of x [E, K, N], with zeros.

    Sizes become multiples of 8, at least 8, because TMA loads rows of bfloat16 that start at multiples of 16 bytes. The
    zeros add zero terms to products, or results that are cut off again. Copies x only if its sizes, strides or base
    pointer are not as TMA needs them.
    """
    *outer, height, width = x.shape
    missing_columns = -width % 8 if width else 8
    missing_rows = 0 if len(outer) == 0 else -height % 8 if height else 8  # torch 2.11 traces no `not outer`
    if missing_columns or missing_rows:
        return torch.nn.functional.pad(x, (0, missing_columns, 0, missing_rows))
    *outer, line, element = x.stride()
    if outer and element != 1:  # a matrix of three dimensions may be transposed
        line, element, width = element, line, height
    is_aligned = line % 8 == 0 and (len(outer) == 0 or outer[0] % 8 == 0)
    # A graph does not know offsets. inductor copies an argument that is less aligned than the example it compiled for.
    is_aligned = is_aligned and (torch.compiler.is_compiling() or x.storage_offset() % 8 == 0)
    return x if element == 1 and line >= width and is_aligned else x.clone(memory_format=torch.contiguous_format)
