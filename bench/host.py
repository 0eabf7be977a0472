"""Prints what calls cost the host: microseconds of forward and backward, at sizes where the host takes the time.

    python bench/host.py

On a GPU, calls are launched without waiting for their results, so the time is the host's. On a CPU it includes the
products, which are tiny.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import moe_fp8_ext

CALLS, REPEATS = 50, 20
TOP_K = 2
RANK = 16  # of adapters
SIZES = {"cuda": (64, 256, 128, 8), "cpu": (8, 16, 16, 2)}  # tokens, hidden size, intermediate size, experts


def host_us(call: Callable[[], object], device: str) -> float:
    """The best of several repeats: other work on the host can only add to it."""
    found = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        found.append((time.perf_counter() - start) / CALLS * 1e6)
        if device == "cuda":
            torch.cuda.synchronize()
    return min(found[1:])


def calls_of_python(call: Callable[[], object]) -> int:
    """How many functions of Python a call runs, with the ones of its backward."""
    count = 0

    def see(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(see)
        try:
            call()
        finally:
            sys.setprofile(None)
    return count


def ops_of(call: Callable[[], object]) -> int:
    """How many ops a call dispatches, with the ones of its backward, and without views."""
    count = 0

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            nonlocal count
            count += not op.is_view
            return op(*args, **(kwargs or {}))

    with torch.autograd.set_multithreading_enabled(False), Counter():
        call()
    return count


class Empty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def cases(device: str) -> dict[str, Callable[[], object]]:
    torch.manual_seed(0)
    tokens, hidden, intermediate, experts = SIZES[device]
    sizes = experts, hidden, intermediate
    layer = moe_fp8_ext.Experts(*sizes, device=device, dtype=torch.bfloat16)
    x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16).requires_grad_()
    ids = torch.rand(tokens, experts, device=device).topk(TOP_K).indices
    scores = torch.rand(tokens, TOP_K, device=device).requires_grad_()
    offs = torch.arange(1, experts + 1, device=device, dtype=torch.int32) * (tokens // experts)
    w, weights = layer.gate_up_proj, [layer.gate_up_proj, layer.down_proj]

    def both(forward: Callable[..., Tensor], *args: Tensor, wanted: list[Tensor]) -> Callable[[], object]:
        grad = torch.ones_like(forward(*args))
        return lambda: torch.autograd.grad(forward(*args), wanted, grad, allow_unused=True)

    call = x, ids, scores
    how = dict(recipe="blockwise", device=device, dtype=torch.bfloat16)
    frozen = moe_fp8_ext.Experts(*sizes, **how).freeze_()
    adapted = moe_fp8_ext.Experts(*sizes, **how, lora_rank=RANK, lora_scaling=2.0).freeze_()
    factors = list(adapted.parameters())
    for factor in factors:
        factor.data = factor.data.float()  # as PEFT makes them
    router = moe_fp8_ext.Router(experts, hidden, TOP_K, device=device, dtype=torch.bfloat16)
    moe = moe_fp8_ext.MoE(router, layer)
    found = {
        "torch.relu, forward alone": lambda: torch.relu(offs),
        "an empty Function": both(Empty.apply, x, w, wanted=[x]),
        "grouped_mm": both(lambda x, w: moe_fp8_ext.grouped_mm(x, w.mT, offs), x, w, wanted=[x, w]),
        "experts": both(layer, *call, wanted=[x, scores, *weights]),
        "experts, frozen in FP8": both(frozen, *call, wanted=[x, scores]),
        "the same with LoRA": both(adapted, *call, wanted=[x, scores, *factors]),
        "the same under checkpoint": both(
            lambda *call: checkpoint(adapted, *call, use_reentrant=False), *call, wanted=[x, scores, *factors]
        ),
        "MoE": both(lambda x: moe(x)[0], x, wanted=[x, router.weight, *weights]),
    }
    if device == "cuda":
        found["experts, graphed"] = both(moe_fp8_ext.graphed(layer, *call), *call, wanted=[x, scores, *weights])
    return found


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    print(f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, torch {torch.__version__}")
    print("microseconds of the host; the same with backward in the calling thread; calls of Python functions; ops")
    for name, call in cases(device).items():
        us = host_us(call, device)
        with torch.autograd.set_multithreading_enabled(False):
            us_of_one_thread = host_us(call, device)
        print(f"{name:28} {us:8.1f} {us_of_one_thread:8.1f} {calls_of_python(call):6} {ops_of(call):6}")


if __name__ == "__main__":
    main()
