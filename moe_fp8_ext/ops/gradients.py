"""What ops with a gradient share."""

import torch
from torch import Tensor


def wants_grad(x: Tensor | None) -> bool:
    return x is not None and x.requires_grad and torch.is_grad_enabled()


def unit_stride(grad: Tensor) -> Tensor:
    """grad itself if its rows lie in one piece each; a copy of expanded and transposed ones."""
    return grad if grad.stride(-1) == 1 else grad.contiguous()
