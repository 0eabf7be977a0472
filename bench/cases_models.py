"""The benchmark cases of Hugging Face Transformers, if it is installed. They compare forward and backward with
Transformers' own `grouped_mm` in BF16, for the experts of two models and for a model of four layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from case import EVEN, Case, Shape, Target, always, normal
from cases_experts import expert_flops, routed
from torch import Tensor, nn

from moe_fp8_ext.integrations.transformers import register

_BASELINE = "grouped_mm"
_IMPLEMENTATIONS = ("moe_fp8", "moe_fp8_blockwise")
# By model type: the config's names for the width and the number of experts.
_NAMES = {
    "qwen3_moe": ("moe_intermediate_size", "num_experts"),
    "mixtral": ("intermediate_size", "num_local_experts"),
}
# Label, sizes as in cases_experts, least speed over the baseline.
_EXPERTS = {
    "qwen3_moe": ("qwen3_30b_a3b", (32768, 2048, 768, 128, 8), 1.5),
    "mixtral": ("mixtral_8x7b", (16384, 4096, 14336, 8, 2), 1.4),
}
# The dtype of each router's scores. Transformers' baseline multiplies all outputs of experts by the scores.
_SCORES = {"qwen3_moe": torch.bfloat16, "mixtral": torch.float32}
_HEADS, _KV_HEADS, _HEAD_DIM = 32, 4, 128  # Qwen3-30B-A3B's


def _config(model: str, d: int, f: int, e: int, k: int, **others: object) -> object:
    from transformers import AutoConfig

    width, number = _NAMES[model]
    return AutoConfig.for_model(model, hidden_size=d, num_experts_per_tok=k, **{width: f, number: e}, **others)


def _model(config: object, device: str | torch.device) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def _experts_inputs(
    model: str, device: torch.device, groups: str, *, t: int, d: int, f: int, e: int, k: int
) -> tuple[object, ...]:
    whole = _model(_config(model, d, f, e, k, num_hidden_layers=1), "meta")
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


def _step_inputs(
    device: torch.device, groups: None, *, t: int, s: int, layers: int, v: int, d: int, f: int, e: int, k: int
) -> tuple[object, ...]:
    heads = dict(num_attention_heads=_HEADS, num_key_value_heads=_KV_HEADS, head_dim=_HEAD_DIM)
    config = _config("qwen3_moe", d, f, e, k, num_hidden_layers=layers, vocab_size=v, norm_topk_prob=True, **heads)
    return _model(config, device).train(), torch.randint(v, (t // s, s), device=device)


def _step_call(implementation: str) -> Callable[..., object]:
    def call(model: nn.Module, tokens: Tensor) -> object:
        model.config._experts_implementation = implementation
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return torch.autograd.grad(loss, tuple(model.parameters()))

    return call


def _step_flops(*, t: int, s: int, layers: int, v: int, d: int, f: int, e: int, k: int) -> int:
    # A token attends to half of its sequence on average, and multiplies by keys and by values.
    attention = 2 * (_HEADS + _KV_HEADS) * _HEAD_DIM * d + _HEADS * _HEAD_DIM * s
    return 3 * 2 * t * (layers * (attention + e * d) + v * d) + layers * expert_flops(t=t, d=d, f=f, k=k)


def _experts_shapes(label: str, sizes: tuple[int, ...], cpu: bool) -> list[Shape]:
    return [Shape(label, dict(zip("tdfek", (300, 96, 64, 5, 2) if cpu else sizes, strict=True)), EVEN)]


def _step_shapes(cpu: bool) -> list[Shape]:
    """The sizes of Qwen3-30B-A3B, except the numbers of layers and of the vocabulary, which are 48 and 151,936
    there."""
    sizes = (64, 32, 1, 128, 96, 64, 5, 2) if cpu else (32768, 4096, 4, 4096, 2048, 768, 128, 8)
    return [Shape("qwen3_30b_a3b", dict(zip(("t", "s", "layers", *"vdfek"), sizes, strict=True)))]


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
        baseline=_experts_call(_BASELINE),
    )


def _step(implementation: str) -> Case:
    return Case(
        "transformers_step",
        _step_shapes,
        _step_inputs,
        _step_call(implementation),
        format=implementation,
        flops=_step_flops,
        baseline=_step_call(_BASELINE),
    )


def _cases() -> tuple[Case, ...]:
    try:
        register()
    except ImportError:
        return ()
    experts = (_experts(model, implementation) for model in _EXPERTS for implementation in _IMPLEMENTATIONS)
    return *experts, *map(_step, _IMPLEMENTATIONS)


MODEL_CASES = _cases()
