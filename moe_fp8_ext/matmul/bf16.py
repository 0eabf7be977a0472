"""torch._grouped_mm in bfloat16 for any sizes, strides and offsets, with defined tail rows, and its gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8_ext.ops.checks import require
from moe_fp8_ext.ops.dispatch import below_autograd, differentiable_once
from moe_fp8_ext.quantization.format import MAX_EXPERTS, round_up

_pad_token_groups_to = torch.ops.moe_fp8.pad_token_groups_to.default


def row_major(x: Tensor) -> Tensor:
    """x itself if its rows lie one after the other, each in one piece; expanded and transposed ones are copied."""
    *_, row, element = x.stride()
    return x if element == 1 and row >= x.shape[-1] else x.contiguous()


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    # Not x.to(dtype) alone: where that returns x itself, torch.compile of torch 2.11 loses the Function's gradients.
    return x if x.dtype == dtype else x.to(dtype)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of products where torch.autocast is on for x; it knows no meta tensors."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else None


def most_experts(x: Tensor) -> int:
    """Of a product in bfloat16, on the device of x."""
    return 1023 if x.is_cuda else MAX_EXPERTS  # of torch's kernel


def check_experts(A: Tensor, offs: Tensor, recipe: str) -> None:
    e, limit = offs.shape[0], most_experts(A)
    require(e <= limit, f"grouped_mm: offs must have at most {limit} entries with {recipe}, got {e}")


class Bf16GroupedMm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, A, B_t, offs, main_grad, needs_dA, needs_dB):
        _, k, n = B_t.shape
        check_experts(A, offs, recipe='recipe "bf16"')
        ctx.main_grad = main_grad
        ctx.sizes, ctx.dtypes, ctx.needs = (k, n), (A.dtype, B_t.dtype), (needs_dA, needs_dB)
        with below_autograd():
            offs = clamped(offs, A.shape[0])
            a = _tma_operand(cast(A, torch.bfloat16), _tma_size(k))
            b_t = _tma_operand(cast(B_t, torch.bfloat16), _tma_size(n), _tma_size(k))
            out = cast(_rows(a, b_t, offs, n), A.dtype)
        ctx.save_for_backward(offs, a if needs_dB else None, b_t if needs_dA else None)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx, dY):
        offs, a, b_t = ctx.saved_tensors
        needs_dA, needs_dB = ctx.needs
        (k, n), (a_dtype, b_dtype) = ctx.sizes, ctx.dtypes
        dA = dB_t = None
        with below_autograd():
            if needs_dA:
                dA = cast(_rows(_gradient(dY, n), b_t.transpose(-2, -1), offs, k), a_dtype)
            if needs_dB:
                dW = _wgrad(dY, a, offs, n, k, ctx.main_grad)
                dB_t = None if dW is None else cast(dW.mT, b_dtype)
        return dA, dB_t, None, None, None, None


def clamped(offs: Tensor, rows: int) -> Tensor:
    """As products take offs, which torch's kernel trusts; those of `sort_tokens` are so already."""
    return offs.clamp(0, rows).cummax(0).values


def bf16_product(a: Tensor, b_t: Tensor, offs: Tensor) -> Tensor:
    """a [M, K] @ b_t [E, K, N] in bfloat16, of any sizes."""
    _, k, n = b_t.shape
    b_t = _tma_operand(b_t, _tma_size(n), _tma_size(k))
    return _rows(_tma_operand(a, _tma_size(k)), b_t, offs, n)


def bf16_wgrad(dY: Tensor, a: Tensor, offs: Tensor, main_grad: Tensor | None = None) -> Tensor | None:
    """dY^T @ a of each group, [E, N, K] in bfloat16; none where it is added to main_grad, of that shape."""
    n, k = dY.shape[1], a.shape[1]
    return _wgrad(dY, _tma_operand(a, _tma_size(k)), offs, n, k, main_grad)


def _gradient(dY: Tensor, n: int) -> Tensor:
    return _tma_operand(cast(dY, torch.bfloat16), _tma_size(n))


def _wgrad(dY: Tensor, a: Tensor, offs: Tensor, n: int, k: int, main_grad: Tensor | None) -> Tensor | None:
    """Of a that is an operand of k columns or more."""
    dy = _gradient(dY, n)
    dW = _product(dy.t(), a, offs) if offs.shape[0] else a.new_zeros(0, dy.shape[1], a.shape[1])
    dW = dW[:, :n, :k]
    if main_grad is None:
        return dW
    main_grad.add_(dW)
    return None


def _rows(a: Tensor, b_t: Tensor, offs: Tensor, columns: int) -> Tensor:
    """The first columns of the product, rows of no group zero."""
    if offs.shape[0] == 0:  # torch divides by the number of groups
        return a.new_zeros(a.shape[0], columns)
    out = _product(a, b_t, offs)
    return out if columns == out.shape[1] else out[:, :columns].contiguous()


def _product(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    if a.device.type == "cpu":
        return _cpu_grouped_mm(a, b, offs)
    return _zero_tail(torch._grouped_mm(a, b, offs=offs), b, offs)


@torch.library.custom_op("moe_fp8_ext::cpu_grouped_mm", mutates_args=())
def _cpu_grouped_mm(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """torch._grouped_mm by way of float32: on a CPU without instructions for bfloat16 that is tens of times faster.

    An op of its own, because torch's fake of its op knows bfloat16 only.
    """
    return _zero_tail(torch._grouped_mm(a.float(), b.float(), offs=offs).bfloat16(), b, offs)


@_cpu_grouped_mm.register_fake
def _(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    groups = offs.shape if b.dim() == 2 else ()
    return a.new_empty(*groups, a.shape[0], b.shape[-1])


def _zero_tail(out: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    if b.dim() == 2:
        return out
    # Groups copied to where they are: two ops, where a mask of rows takes seven.
    return _pad_token_groups_to(out, offs, torch.nn.functional.pad(offs, (1, -1)), out.shape[0])


def _tma_size(size: int) -> int:
    """The next size whose rows of bfloat16 start at multiples of 16 bytes, as TMA loads them; at least one such row."""
    return round_up(size, 8) or 8


def _tma_operand(x: Tensor, columns: int, rows: int | None = None) -> Tensor:
    """x with zeros up to those sizes in its last dimensions: more terms of the sum, or results that are cut off again.

    Copied only where its sizes, strides or base pointer are not as TMA needs them.
    """
    pad = (0, columns - x.shape[-1], 0, 0 if rows is None else rows - x.shape[-2])
    if any(pad):
        return torch.nn.functional.pad(x, pad)
    lines = x if x.dim() == 2 or x.stride(-1) == 1 else x.transpose(-2, -1)
    one_piece = lines.stride(-1) == 1 and lines.stride(-2) >= lines.shape[-1]
    starts_aligned = all(step % 8 == 0 for step in lines.stride()[:-1])
    # A graph knows no offset; inductor copies an argument that is less aligned than the one it was compiled for.
    if one_piece and starts_aligned and (torch.compiler.is_compiling() or x.storage_offset() % 8 == 0):
        return x
    return x.clone(memory_format=torch.contiguous_format)
