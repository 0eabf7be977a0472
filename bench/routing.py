"""How evenly the routers of a model of Transformers spread tokens over experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def counted(model: nn.Module) -> Iterator[Callable[[], float]]:
    """Counts the slots of every expert in the calls of the context.

    Yields a function that returns the slots of a layer's busiest expert over the mean of its experts, as a mean over
    layers and calls. It is little more than 1 if tokens choose experts at random.
    """
    ratios: list[Tensor] = []

    def count(experts: nn.Module, args: tuple[Tensor, ...]) -> None:
        _, ids, _ = args
        counts = ids.flatten().bincount(minlength=experts.num_experts).float()
        ratios.append(counts.max() / counts.mean())

    # `is_transposed` is the mark of Transformers' `use_experts_implementation`.
    hooks = [m.register_forward_pre_hook(count) for m in model.modules() if "is_transposed" in vars(m)]
    try:
        yield lambda: round(torch.stack(ratios).mean().item(), 2)
    finally:
        for hook in hooks:
            hook.remove()
