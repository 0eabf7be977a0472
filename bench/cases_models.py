"""The benchmark cases of Hugging Face Transformers, if it is installed. They compare forward and backward with
Transformers' own `grouped_mm` in BF16, for the experts of two models. whole_models.py has whole models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from case import EVEN, Case, Shape, Target, always, normal
from cases_experts import expert_flops, routed
from torch import Tensor, nn

from moe_fp8_ext.integrations.transformers import register
from moe_fp8_ext.report.models import sizes_of

try:
    import hf_models

    register()
except ImportError:  # Transformers is not installed, or this version is not known
    hf_models = None

_IMPLEMENTATIONS = ("moe_fp8", "moe_fp8_blockwise")
# By model type: label, sizes as in cases_experts, least speed over the baseline.
_EXPERTS = {
    "qwen3_moe": ("qwen3_30b_a3b", (32768, *sizes_of("Qwen3-30B-A3B")), 1.5),
    "mixtral": ("mixtral_8x7b", (16384, *sizes_of("Mixtral-8x7B")), 1.4),
}
# The dtype of each router's scores. Transformers' baseline multiplies all outputs of experts by the scores.
_SCORES = {"qwen3_moe": torch.bfloat16, "mixtral": torch.float32}


def _experts_inputs(
    model: str, device: torch.device, groups: str, *, t: int, d: int, f: int, e: int, k: int
) -> tuple[object, ...]:
    whole = hf_models.on_meta(hf_models.sized(model, (d, f, e, k), layers=1), hf_models.BASELINE)
    experts = next(module for module in whole.modules() if hasattr(module, "is_transposed")).to_empty(device=device)
    for weight in experts.parameters():
        nn.init.normal_(weight)
    ids, scores = routed(device, groups, t, e, k)
    scores = scores.detach().to(_SCORES[model]).requires_grad_()
    return experts, normal(device, t, d, grad=True), ids, scores, normal(device, t, d)


def _experts_call(implementation: str) -> Callable[..., object]:
    def call(experts: nn.Module, x: Tensor, ids: Tensor, scores: Tensor, grad: Tensor) -> object:
        experts.config._experts_implementation = implementation
        return torch.autograd.grad(experts(x, ids, scores), (x, scores, *experts.parameters()), grad)

    return call


def _experts_shapes(label: str, sizes: tuple[int, ...], cpu: bool) -> list[Shape]:
    return [Shape(label, dict(zip("tdfek", (300, 96, 64, 5, 2) if cpu else sizes, strict=True)), EVEN)]


def _experts(model: str, implementation: str) -> Case:
    label, sizes, bound = _EXPERTS[model]
    return Case(
        "transformers_experts",
        partial(_experts_shapes, label, sizes),
        partial(_experts_inputs, model),
        _experts_call(implementation),
        ((always, Target("ratio", ">=", bound)),) if implementation == "moe_fp8" else (),
        implementation,
        model,
        flops=expert_flops,
        baseline=_experts_call(hf_models.BASELINE),
    )


MODEL_CASES = tuple(
    _experts(model, implementation) for model in (_EXPERTS if hf_models else ()) for implementation in _IMPLEMENTATIONS
)
