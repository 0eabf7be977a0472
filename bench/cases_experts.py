"""The benchmark cases of a whole layer: forward and backward of `experts`, compared with torch's BF16 products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from case import RECIPES, Case, Rule, Shape, Target, always, even_and_uneven, is_, normal, shares
from torch import Tensor

import moe_fp8_ext as moe
from moe_fp8_ext.report.models import sizes_of

# Tokens, D, F, experts, experts of a token.
SIZES = {
    "fine_grained": (24576, 1536, 256, 128, 8),
    "qwen3_30b": (32768, *sizes_of("Qwen3-30B-A3B")),
    "gpt_oss_20b": (32768, *sizes_of("GPT-OSS-20B")),
    "d4096_f1024": (32768, 4096, 1024, 128, 8),
    "qwen3_235b_ep8": (32768, *sizes_of("Qwen3-235B-A22B", experts=16)),
    "mixtral_8x7b": (16384, *sizes_of("Mixtral-8x7B")),
    "dsv3": (16384, *sizes_of("DeepSeek-V3", experts=32)),
}


def _layers(cpu: bool) -> list[Shape]:
    sizes = {"small": (300, 96, 64, 5, 2)} if cpu else SIZES
    return even_and_uneven(Shape(label, dict(zip("tdfek", size, strict=True))) for label, size in sizes.items())


def routed(device: torch.device, groups: str, t: int, e: int, k: int) -> tuple[Tensor, Tensor]:
    """Random ids and scores. `groups` gives the experts' shares. A token's experts are distinct, and its scores add up
    to 1."""
    ids = torch.multinomial(shares(groups, e).float().to(device).expand(t, e), k)
    return ids, torch.rand(t, k, device=device).softmax(-1).requires_grad_()


def _layer(device: torch.device, groups: str, *, t: int, d: int, f: int, e: int, k: int) -> tuple[Tensor, ...]:
    w_gate_up, w_down = (normal(device, *size, grad=True) for size in ((e, 2 * f, d), (e, d, f)))
    return normal(device, t, d, grad=True), *routed(device, groups, t, e, k), w_gate_up, w_down, normal(device, t, d)


def _composed(x: Tensor, ids: Tensor, scores: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """Computes the layer in BF16 with torch's own ops."""
    flat, permutation = ids.flatten().sort(stable=True)
    counts = torch.zeros(len(w_down), dtype=torch.int32, device=x.device)
    offs = counts.scatter_add(0, flat, torch.ones_like(flat, dtype=torch.int32)).cumsum(0, dtype=torch.int32)
    h = torch._grouped_mm(x[permutation // ids.shape[1]], w_gate_up.mT, offs=offs)
    gate, up = h.chunk(2, -1)
    y = torch._grouped_mm(torch.nn.functional.silu(gate) * up, w_down.mT, offs=offs)
    inverse = torch.empty_like(permutation).scatter(0, permutation, torch.arange(len(y), device=x.device))
    return (y[inverse].view(*ids.shape, -1) * scores.to(y.dtype)[..., None]).sum(1)


def _forward_backward(layer: Callable[..., Tensor]) -> Callable[..., object]:
    def call(*inputs: Tensor) -> object:
        x, ids, scores, w_gate_up, w_down, grad = inputs
        return torch.autograd.grad(layer(x, ids, scores, w_gate_up, w_down), (x, scores, w_gate_up, w_down), grad)

    return call


def _bytes_kept(layer: Callable[..., Tensor], *inputs: Tensor) -> float:
    """Bytes that forward keeps, without arguments and quantized weights, per element of gates and ups."""
    *arguments, _ = inputs
    _, ids, _, w_gate_up, _ = arguments
    given = {t.untyped_storage().data_ptr() for t in arguments}
    storages: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in given and t.dim() < 3:
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        out = layer(*arguments)
    del out
    return sum(storages.values()) / (ids.numel() * w_gate_up.shape[1])


def expert_flops(*, t: int, d: int, f: int, k: int, **_: int) -> int:
    return 3 * 3 * 2 * t * k * d * f


# With h in BF16, as the best BF16 layers keep it, this would be 2.
_KEPT: Rule = (always, Target("kept", "<=", 1.1))
_SPEEDUP: Rule = (is_("qwen3_30b"), Target("ratio", ">=", 1.5))
_RULES: dict[str, tuple[Rule, ...]] = {  # other recipes have no target: Hopper has no instruction for mxfp8's scales
    "rowwise": (_SPEEDUP, _KEPT),
    "blockwise": (_SPEEDUP, _KEPT),
    "bf16": (),
}


def _experts(recipe: str) -> Case:
    layer = partial(moe.experts, recipe=recipe)
    return Case(
        "experts",
        _layers,
        _layer,
        _forward_backward(layer),
        _RULES.get(recipe, (_KEPT,)),
        recipe,
        flops=expert_flops,
        baseline=_forward_backward(_composed),
        kept=partial(_bytes_kept, layer),
    )


EXPERTS_CASES: tuple[Case, ...] = tuple(map(_experts, (*RECIPES, "bf16")))
