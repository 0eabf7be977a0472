"""Casts and copies that are skipped where the tensor already is as it must be."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

_NOTHING = nullcontext()


def row_major(x: Tensor) -> Tensor:
    """Returns x itself if its rows are contiguous and do not overlap, else a copy (of expanded or transposed ones)."""
    *_, row, element = x.stride()
    return x if element == 1 and row >= x.shape[-1] else x.contiguous()


def lies_transposed(w: Tensor) -> bool:
    """Returns whether w [E, N, K] is the transposed view of a tensor [E, K, N] with rows along memory."""
    return w.stride(-2) == 1 and w.stride(-1) != 1


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    # Compares first: where x.to(dtype) returns x itself, torch.compile of torch 2.11 loses a Function's gradients.
    return x if x.dtype == dtype else x.to(dtype)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts x like `cast`, for results that code compiled by inductor reads.

    Inductor computes in float32 and drops casts between the ops that it fuses: its numbers would differ from eager's.
    An opaque op keeps the rounding.
    """
    if x.dtype == dtype or not torch.compiler.is_compiling():
        return cast(x, dtype)
    return _rounded(x, dtype)


@torch.library.custom_op("moe_fp8_ext::rounded", mutates_args=())
def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype, copy=True)


def _keep_dtype(ctx, inputs: tuple[Tensor, torch.dtype], output: Tensor) -> None:
    ctx.dtype = inputs[0].dtype


_rounded.register_fake(lambda x, dtype: torch.empty_like(x, dtype=dtype))
_rounded.register_autograd(lambda ctx, grad: (grad.to(ctx.dtype), None), setup_context=_keep_dtype)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Returns torch.autocast's dtype if it is on for the device of x, else None. It does not know the meta device."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else None


def without_autocast(x: Tensor) -> AbstractContextManager:
    """A context for products that have a dtype of their own: torch.autocast would cast their operands to its own."""
    if autocast_dtype(x) is None:
        return _NOTHING
    # Where the backward of a Function first reads strides, Dynamo starts to trace it again. It does not leave a context
    # that it has entered before, and then fails. So strides are read here.
    x.stride()
    return torch.autocast(x.device.type, enabled=False)
