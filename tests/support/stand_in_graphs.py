"""A stand-in for CUDA graphs on a CPU.

It keeps one set of tensors and writes them in every replay, as a graph does, so that all rules about memory show.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from moe_fp8_ext.training import cuda_graph


class StandIn:
    """`Capture` without CUDA graphs: a replay runs the function again, and writes the results where the first are."""

    def __init__(self, device: torch.device, shares: bool = False) -> None:
        assert device.type == "cpu"

    is_active = staticmethod(lambda: False)
    warm_up = staticmethod(nullcontext)
    wait_for_other_streams = staticmethod(lambda: None)
    random_state = staticmethod(torch.get_rng_state)

    def __call__(self, run: Callable[[], list[Tensor | None]]) -> tuple[Callable[[], None], list[Tensor | None]]:
        results, enabled = run(), torch.is_grad_enabled()
        autocast = dict(dtype=torch.get_autocast_dtype("cpu"), enabled=torch.is_autocast_enabled("cpu"))

        def replay() -> None:
            with torch.set_grad_enabled(enabled), torch.autocast("cpu", **autocast):
                again = run()
            for to, value in zip(results, again, strict=True):
                if to is not None:
                    to.detach().copy_(value.detach())

        return replay, results


def stand_in_for_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "Capture", StandIn)
    monkeypatch.setattr(cuda_graph, "_check_samples", lambda sample_args: None)
    monkeypatch.setattr(cuda_graph.SharedMemory, "_of_device", {})


def replays_of_graphs(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Returns a list that grows by one with every replay of a forward."""
    found: list[object] = []

    def counted(forward: Callable) -> Callable:
        return lambda *args: found.append(0) or forward(*args)

    for kind in (cuda_graph.Graphed, cuda_graph.Recomputed):
        monkeypatch.setattr(kind, "forward", counted(kind.forward))
    return found
