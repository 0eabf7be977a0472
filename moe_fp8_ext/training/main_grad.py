"""Main gradients of weights, and what the DDP of Megatron-Core expects of a backward that adds to them.

Megatron's DDP reads attributes of a parameter in a hook that runs after autograd has its gradient:

- `main_grad`: the buffer that gradients are summed in and reduced from.
- `grad_added_to_main_grad`: DDP sets it to False. A backward that adds to main_grad itself sets it to True. The hook
  then ignores the gradient of autograd, but with overlapped reduction it needs one: that is the placeholder.
- `zero_out_wgrad`: whether the hook adds the placeholder nevertheless. The placeholder must then be zero.
- `overwrite_main_grad`: whether a backward replaces main_grad rather than adding to it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from moe_fp8_ext import _torch

_ADDED = "grad_added_to_main_grad"


def parameter_of_ddp(weight: Tensor) -> Tensor | None:
    """Returns the parameter that weight is, or is a view of, if DDP has marked it; else None.

    A graph of torch.compile cannot write attributes in backward. There, no parameter is treated as marked.
    """
    if torch.compiler.is_compiling():
        return None
    for tensor in (weight, _torch.base_of(weight)):
        if hasattr(tensor, _ADDED):
            return tensor
    return None


def start(main_grad: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    """Returns the main gradient that a backward adds to. Call it once in a backward, before the gradient is computed.

    Args:
        main_grad: the main gradient that forward was given, or None.
        parameter: what `parameter_of_ddp` returned for its weight.
    """
    if main_grad is not None and getattr(parameter, "overwrite_main_grad", False):
        main_grad.zero_()
    return main_grad


def finish(main_grad: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    """Tells DDP that the gradient is in main_grad. Returns the gradient for autograd: a contiguous placeholder, shaped
    as main_grad, or None without DDP."""
    if main_grad is None or parameter is None:
        return None
    setattr(parameter, _ADDED, True)
    kept = _placeholder(main_grad.shape, parameter.dtype, parameter.device)
    if getattr(parameter, "zero_out_wgrad", False):
        kept.zero_()  # autograd may have added to it
    return kept.detach()  # autograd takes a tensor that nothing else refers to as it is, and would copy another one


@functools.cache
def _placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tensor that all parameters of a shape share. Autograd would copy an expanded scalar."""
    return torch.zeros(shape, dtype=dtype, device=device)
