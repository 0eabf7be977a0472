"""Main gradients of weights, by the protocol of Megatron-Core's DDP.

Megatron's DDP has a hook for each parameter. It runs after autograd has the gradient, and reads these attributes of the
parameter:

- `main_grad`: the buffer that gradients are summed in and reduced from.
- `grad_added_to_main_grad`: DDP sets it to False. A backward that adds to main_grad itself sets it to True. The hook
  then ignores the gradient of autograd. With overlapped reduction the hook needs such a gradient all the same, so
  backward returns a placeholder.
- `zero_out_wgrad`: whether the hook adds the placeholder nevertheless. The placeholder must then be zero.
- `overwrite_main_grad`: whether a backward replaces main_grad rather than adding to it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from moe_fp8_ext import _torch
from moe_fp8_ext.ops.checks import has_values

_ADDED = "grad_added_to_main_grad"


def parameter_of_ddp(weight: Tensor) -> Tensor | None:
    """Returns the parameter of a weight (the weight itself or its base) if DDP has marked the parameter; else None.

    A graph of torch.compile cannot write attributes in backward. So under torch.compile no parameter counts as marked.
    """
    if torch.compiler.is_compiling():
        return None
    for tensor in (weight, _torch.base_of(weight)):
        if hasattr(tensor, _ADDED):
            return tensor
    return None


def start(main_grad: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    """Returns the main gradient that a backward adds to. Call it once per backward, before computing the gradient.

    Args:
        main_grad: the main gradient that forward was given, or None.
        parameter: the result of `parameter_of_ddp` for the weight.
    """
    if main_grad is not None and getattr(parameter, "overwrite_main_grad", False):
        main_grad.zero_()
    return main_grad


def finish(main_grad: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    """Tells DDP that the gradient is in main_grad. Returns the gradient for autograd.

    With DDP that is a contiguous placeholder in main_grad's shape. Without DDP it is None.
    """
    if main_grad is None or parameter is None:
        return None
    setattr(parameter, _ADDED, True)
    if not has_values(main_grad):  # a fake tensor must not outlive its mode in the cache, nor a real one enter it
        return torch.zeros_like(main_grad, dtype=parameter.dtype)
    kept = _placeholder(main_grad.shape, parameter.dtype, parameter.device)
    if getattr(parameter, "zero_out_wgrad", False):
        kept.zero_()  # autograd may have added to it
    return kept.detach()  # a new tensor object, which autograd stores without a copy


@functools.cache
def _placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tensor that all parameters of a shape share. Autograd would copy an expanded scalar."""
    return torch.zeros(shape, dtype=dtype, device=device)
