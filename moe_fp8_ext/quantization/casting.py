"""Casts and copies that happen only where they must."""

from __future__ import annotations

import torch
from torch import Tensor


def row_major(x: Tensor) -> Tensor:
    """x itself if its rows lie one after the other, each in one piece. Expanded and transposed ones are copied."""
    *_, row, element = x.stride()
    return x if element == 1 and row >= x.shape[-1] else x.contiguous()


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    # Not x.to(dtype) alone: where that returns x itself, torch.compile of torch 2.11 loses the Function's gradients.
    return x if x.dtype == dtype else x.to(dtype)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """cast(x, dtype) where code that inductor compiles reads the result.

    Inductor computes in float32 and drops casts between ops that it fuses, so that its numbers would not be eager's.
    """
    if x.dtype == dtype or not torch.compiler.is_compiling():
        return cast(x, dtype)
    return _rounded(x, dtype)


@torch.library.custom_op("moe_fp8_ext::rounded", mutates_args=())
def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype, copy=True)


@_rounded.register_fake
def _(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


def _keep_dtype(ctx, inputs: tuple[Tensor, torch.dtype], output: Tensor) -> None:
    ctx.dtype = inputs[0].dtype


_rounded.register_autograd(lambda ctx, grad: (grad.to(ctx.dtype), None), setup_context=_keep_dtype)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of products where torch.autocast is on for x. It knows no meta tensors."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else None
