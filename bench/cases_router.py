"""The benchmark cases of a router, compared with torch's own ops: the choice and its gradient alone, and forward and
backward of a `Router`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from case import Case, Rule, Shape, Target, always, normal
from cases_experts import SIZES
from torch import Tensor, nn

import moe_fp8_ext as moe
from moe_fp8_ext import ops

_GROUPS = {"scoring": "sigmoid", "scaling_factor": 2.5, "num_groups": 8, "top_groups": 4}
# The sizes of all layers and of DeepSeek-V3's router: tokens, width, experts, experts per token. Eight
# experts are left out: a choice in groups adds the best two of each group.
_ROUTERS = {
    **{name: (t, d, e, k) for name, (t, d, _, e, k) in SIZES.items() if name != "dsv3" and e > 8},
    "dsv3": (16384, 7168, 256, 8),
}


def _choices(cpu: bool) -> list[Shape]:
    sizes = {(300, 64, 4)} if cpu else {(t, e, k): None for t, _, e, k in _ROUTERS.values()}
    return [Shape(f"[{t}, {e}] top_k={k}", {"t": t, "e": e, "k": k}) for t, e, k in sizes]


def _routers(cpu: bool) -> list[Shape]:
    sizes = {"small": (300, 96, 64, 4)} if cpu else _ROUTERS
    return [Shape(label, dict(zip("tdek", size, strict=True))) for label, size in sizes.items()]


def _logits(device: torch.device, groups: None, *, t: int, e: int, k: int) -> tuple[Tensor, int, Tensor]:
    return torch.randn(t, e, device=device), k, torch.randn(e, device=device) / 10


def _gradients(device: torch.device, groups: None, *, t: int, e: int, k: int) -> tuple[Tensor, ...]:
    logits = torch.randn(t, e, device=device)
    return torch.randn(t, k, device=device), logits, ops.choose_experts(logits, k)[0]


def _gradients_of_chosen(device: torch.device, groups: None, *, t: int, e: int, k: int) -> tuple[object, ...]:
    ids, scores, topk_logits = ops.choose_experts(torch.randn(t, e, device=device), k)
    return torch.randn_like(scores), topk_logits, ids, e


def _choose(logits: Tensor, k: int, bias: Tensor, **how: object) -> tuple[Tensor, Tensor, Tensor]:
    return ops.choose_experts(logits, k, bias if how else None, **how)


def _torch_choice(logits: Tensor, k: int, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    scores, ids = logits.softmax(-1).topk(k)
    return ids, scores / scores.sum(-1, keepdim=True)


def _torch_choice_in_groups(logits: Tensor, k: int, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    choice = (scores + bias).unflatten(1, (_GROUPS["num_groups"], -1))
    best = choice.topk(2).values.sum(-1).topk(_GROUPS["top_groups"]).indices
    kept = torch.zeros_like(choice[..., 0], dtype=torch.bool).scatter(1, best, True)
    ids = choice.masked_fill(~kept[..., None], float("-inf")).flatten(1).topk(k).indices
    chosen = scores.gather(1, ids)
    return ids, chosen / chosen.sum(-1, keepdim=True) * _GROUPS["scaling_factor"]


def _router(device: torch.device, groups: None, *, t: int, d: int, e: int, k: int) -> tuple[object, ...]:
    made = moe.Router(e, d, k, device=device, dtype=torch.bfloat16)
    return made, normal(device, t, d, grad=True), torch.randn(t, k, device=device)


def _step(score: Callable[[moe.Router, Tensor], Tensor]) -> Callable[..., object]:
    def call(router: moe.Router, x: Tensor, grad: Tensor) -> object:
        return torch.autograd.grad(score(router, x), (x, router.weight), grad)

    return call


def _torch_router(router: moe.Router, x: Tensor) -> Tensor:
    """Computes in float32, like the models of Transformers."""
    return _torch_choice(nn.functional.linear(x.float(), router.weight.float()), router.top_k)[1]


def _flops(*, t: int, d: int, e: int, k: int) -> int:
    return 3 * 2 * t * d * e


_FASTER: tuple[Rule, ...] = ((always, Target("ratio", ">=", 5)),)

ROUTER_CASES: tuple[Case, ...] = (
    Case("choose_experts", _choices, _logits, _choose, _FASTER, baseline=_torch_choice),
    Case(
        "choose_experts",
        _choices,
        _logits,
        partial(_choose, **_GROUPS),
        _FASTER,
        variant="groups",
        baseline=_torch_choice_in_groups,
    ),
    Case("choose_experts_backward", _choices, _gradients, ops.choose_experts_backward),
    Case("choose_experts_backward", _choices, _gradients_of_chosen, ops.choose_experts_backward, variant="of chosen"),
    Case(
        "choose_experts_backward",
        _choices,
        _gradients_of_chosen,
        partial(ops.choose_experts_backward, parts=2),
        variant="of chosen in parts",
    ),
    Case(
        "router",
        _routers,
        _router,
        _step(lambda router, x: router(x).topk_scores),
        flops=_flops,
        baseline=_step(_torch_router),
    ),
)
