"""Models of Hugging Face Transformers with published sizes and random weights. It needs transformers."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

from moe_fp8_ext.report.models import Sizes, sizes_of

BASELINE = "grouped_mm"  # the implementation of experts that is Transformers' own
STD = 0.02  # of every weight that has no entry below
STD_OF = {"embed_tokens.weight": 1.0, "o_proj.weight": 2e-4}  # see `fill`
BLOCK = [128, 128]  # of weights in FP8
FP8_STD = 64.0  # of the values of a weight in FP8; 448 is the largest, 7 times as much
# By model type: what Transformers calls the four sizes of a layer of experts.
FIELDS = {
    "qwen3_moe": ("hidden_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok"),
    "gpt_oss": ("hidden_size", "intermediate_size", "num_local_experts", "num_experts_per_tok"),
    "deepseek_v3": ("hidden_size", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"),
    "mixtral": ("hidden_size", "intermediate_size", "num_local_experts", "num_experts_per_tok"),
    "glm4_moe": ("hidden_size", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"),
}
# The rest of config.json of each model on the Hugging Face Hub: type, layers, and others.
_QWEN3 = dict(num_key_value_heads=4, head_dim=128, vocab_size=151936, norm_topk_prob=True)
CONFIGS = {
    "Qwen3-30B-A3B": ("qwen3_moe", 48, dict(num_attention_heads=32, intermediate_size=6144, **_QWEN3)),
    "Qwen3-235B-A22B": ("qwen3_moe", 94, dict(num_attention_heads=64, intermediate_size=12288, **_QWEN3)),
    "GPT-OSS-20B": (
        "gpt_oss",
        24,
        dict(num_attention_heads=64, num_key_value_heads=8, head_dim=64, vocab_size=201088, attention_bias=True),
    ),
    "DeepSeek-V3": (
        "deepseek_v3",
        61,
        dict(
            **dict(num_attention_heads=128, num_key_value_heads=128, q_lora_rank=1536, kv_lora_rank=512),
            **dict(qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, intermediate_size=18432),
            **dict(n_shared_experts=1, n_group=8, topk_group=4, routed_scaling_factor=2.5, vocab_size=129280),
            first_k_dense_replace=3,
        ),
    ),
    "Mixtral-8x7B": ("mixtral", 32, dict(num_attention_heads=32, num_key_value_heads=8, vocab_size=32000)),
    # Attention has 0.8 parameters for each one of the experts of a token; Qwen3-30B-A3B has 0.5.
    "GLM-4.5-Air": (
        "glm4_moe",
        46,
        dict(
            **dict(num_attention_heads=96, num_key_value_heads=8, head_dim=128, vocab_size=151552),
            **dict(n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1, norm_topk_prob=True),
            **dict(intermediate_size=10944, attention_bias=True),
        ),
    ),
}
_TINY = Sizes(128, 128, 4, 2)
_TINY_OTHERS = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=64, vocab_size=256)
_TINY_DEEPSEEK = dict(
    **dict(num_attention_heads=2, num_key_value_heads=2, q_lora_rank=64, kv_lora_rank=64, vocab_size=256),
    **dict(qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=64, n_group=2, topk_group=1),
)


def sized(model_type: str, sizes: Sizes | tuple[int, ...], layers: int, **others: object) -> object:
    """Returns a config whose experts have these sizes."""
    named = dict(zip(FIELDS[model_type], sizes, strict=True))
    return transformers.AutoConfig.for_model(model_type, num_hidden_layers=layers, use_cache=False, **named, **others)


def config_of(name: str, layers: int | None = None, experts: int | None = None, **others: object) -> object:
    """Returns the config of a model, cut to its first layers, or to some of the experts of each layer."""
    model_type, of_layers, known = CONFIGS[name]
    return sized(model_type, sizes_of(name, experts), layers or of_layers, **{**known, **others})


def tiny_config(name: str, layers: int, **others: object) -> object:
    """Returns a config of the same type as the model's, so small that a CPU trains it in moments."""
    model_type = CONFIGS[name][0]
    known = _TINY_DEEPSEEK if model_type == "deepseek_v3" else _TINY_OTHERS
    return sized(model_type, _TINY, layers, **{**known, **others})


def on_meta(config: object, implementation: str, **others: object) -> nn.Module:
    options = dict(dtype=torch.bfloat16, experts_implementation=implementation, **others)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, **options)


def with_fp8_experts(model: nn.Module) -> nn.Module:
    """Gives a model on the meta device experts as an FP8 checkpoint has them. Its linear layers stay as they are."""
    kept = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    sizes = dict(weight_block_size=BLOCK, modules_to_not_convert=kept)
    model.config.quantization_config = transformers.FineGrainedFP8Config(**sizes)
    replace_with_fp8_linear(model, kept, model.config.quantization_config, pre_quantized=True)
    return model


def materialize(model: nn.Module, device: torch.device) -> nn.Module:
    """Gives a model on the meta device random weights on a device, always the same ones."""
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            fill(name, tensor, generator)
        for module in model.modules():
            if hasattr(module, "inv_freq"):  # a buffer that no checkpoint has
                with device:
                    module.inv_freq.copy_(type(module)(module.config).inv_freq)
    return model


def fill(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Gives a weight random values.

    Attention adds the mean of many tokens to each token. If all weights had one deviation, this mean would outgrow the
    token itself within a few layers. Then all tokens choose the same experts: 8 of 128 got 80% of the slots in the
    fourth layer of Qwen3-30B-A3B. So embeddings are large, and attention adds little.
    """
    if tensor.dtype == torch.float8_e4m3fn:
        for part in tensor:
            values = torch.randn(part.shape, device=part.device, dtype=torch.bfloat16, generator=generator)
            part.copy_((values * FP8_STD).clamp(-448, 448))
    elif name.endswith("_scale_inv"):
        tensor.fill_(STD / FP8_STD)
    elif tensor.dim() == 1:
        tensor.fill_(1 if name.endswith("norm.weight") else 0)
    else:
        tensor.normal_(std=STD_OF.get(".".join(name.split(".")[-2:]), STD), generator=generator)


# ---- Attention with sinks --------------------------------------------------------------------------------------------

SINKS = "causal_with_sinks"


def register_sinks() -> None:
    """Adds causal attention with sinks to Transformers' attention functions. GPT-OSS has sinks, and Transformers has
    them in eager attention, and in kernels that are packages of their own."""
    transformers.AttentionInterface.register(SINKS, _attention_with_sinks)


def _attention_with_sinks(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    s_aux: Tensor,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention whose softmax has one more term in each head, exp(s_aux).

    The term is a key in front of all others, with a value of zero. One more feature holds s_aux in queries and 1 in
    that key. Seven further features keep the number of features a multiple of eight. The first query is not used.
    """
    if attention_mask is not None or module.sliding_window is not None:
        raise NotImplementedError("attention with sinks is causal, without a mask or a window")
    features = query.shape[-1]
    query, key, value = (pad(x, (0, 8, 1, 0)) for x in (query, key, value))
    sink = (s_aux / scaling).to(query.dtype)[:, None]
    query = torch.cat(
        (query[..., :features], sink.expand(*query.shape[:-1])[..., None], query[..., features + 1 :]), -1
    )
    key[:, :, 0, features] = 1
    out = scaled_dot_product_attention(query, key, value, scale=scaling, is_causal=True, enable_gqa=True)
    return out[:, :, 1:, :features].transpose(1, 2).contiguous(), None
