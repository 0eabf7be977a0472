"""What the same work costs elsewhere: torchao where it is installed, and the plain formula through torch.compile."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Peer = Callable[..., object]


def peers(compiled: bool) -> dict[str, dict[str, Peer]]:
    """Peers by op and name. Each takes the arguments of the op's benchmark case."""
    found: dict[str, dict[str, Peer]] = {}
    for name, calls in (("torchao", _torchao()), ("compiled", _compiled() if compiled else {})):
        for op, call in calls.items():
            found.setdefault(op, {})[name] = call
    return found


def _torchao() -> dict[str, Peer]:
    """torchao's scales are factors to multiply by, in another layout, and it pads nothing: less work than ours."""
    try:
        from torchao.prototype.moe_training import kernels as ao
        from torchao.prototype.moe_training.fp8_grouped_mm import _to_fp8_rowwise_then_scaled_grouped_mm as grouped_mm

        rowwise, colwise = ao.triton_fp8_rowwise_2d_scale_and_cast, ao.triton_fp8_per_group_colwise_scales
        weight, weight_t = ao.triton_fp8_colwise_3d_scale_and_cast, ao.triton_fp8_rowwise_3d_transpose_rhs
    except Exception:  # not installed, not made for this torch, or a version with other names
        return {}

    def train(a: Tensor, w: Tensor, offs: Tensor, grad: Tensor) -> object:
        out = grouped_mm(a, w.transpose(-2, -1), offs, pad_token_groups_for_grouped_mm=False)
        return torch.autograd.grad(out, (a, w), grad)

    return {
        "quantize_rowwise": lambda x: rowwise(x),
        "quantize_colwise": lambda x, offs: colwise(x, offs),
        "quantize_rowcol": lambda x, offs: (rowwise(x), colwise(x, offs)),
        "quantize_weight": lambda w: (weight(w.transpose(-2, -1)), weight_t(w.transpose(-2, -1))),
        "grouped_mm": train,
    }


def _formula(x: Tensor) -> tuple[Tensor, Tensor]:
    limit = torch.finfo(torch.float8_e4m3fn).max
    m = limit / x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12)
    return (x.float() * m).clamp(-limit, limit).to(torch.float8_e4m3fn), m.reciprocal().squeeze(-1)


def _compiled() -> dict[str, Peer]:
    """Only the ops whose formula has no groups: torch.compile has no way to say the others without a host sync."""
    weight = torch.compile(lambda w: (_formula(w), _formula(w.transpose(-2, -1).contiguous())), dynamic=False)
    return {"quantize_rowwise": torch.compile(_formula, dynamic=False), "quantize_weight": weight}
