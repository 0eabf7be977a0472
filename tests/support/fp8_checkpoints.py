"""Folders with tiny checkpoints as models are published in FP8, and how a machine with a GPU loads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers_models import transformers

from moe_fp8_ext.ops import quantize_weight

D, F, E, TOP_K, LAYERS, VOCABULARY = 256, 128, 4, 2, 2, 64
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate"]
EXPERTS = [f"model.layers.{i}.mlp.experts" for i in range(LAYERS)]


def config(**sizes: object) -> object:
    of_model = dict(hidden_size=D, moe_intermediate_size=F, num_experts=E, num_experts_per_tok=TOP_K)
    of_attention = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=64)
    of_text = dict(vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, pad_token_id=0, num_hidden_layers=LAYERS)
    return transformers.AutoConfig.for_model("qwen3_moe", **{**of_model, **of_attention, **of_text, **sizes})


def write(
    folder: Path,
    *,
    e8m0: bool = False,
    linear: tuple[str, ...] = (),
    quantization: dict[str, object] | None = None,
    keep: Callable[[str], bool] = lambda name: True,
    **sizes: object,
) -> Path:
    """Writes an FP8 checkpoint: experts in FP8, other layers in bfloat16, and config.json.

    Args:
        e8m0: scales are powers of two, one byte each.
        linear: linear layers that are in FP8 too. Kernels for GPUs, which Transformers downloads, multiply them.
        quantization: entries of quantization_config to add or to replace.
        keep: which tensors to write.
    """
    torch.manual_seed(0)
    made = config(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    tensors: dict[str, Tensor] = {}
    for name, w in model.state_dict().items():
        base, _, last = name.rpartition(".")
        layer = base.rpartition(".")[2]
        if layer not in ("experts", *linear):
            tensors[name] = w.contiguous()
            continue
        halves = w.chunk(2, 1) if last == "gate_up_proj" else [w if w.dim() == 3 else w[None]]
        for proj, half in zip(("gate_proj", "up_proj") if last == "gate_up_proj" else (last,), halves, strict=True):
            q, scale, _, _ = quantize_weight(half.contiguous(), "blockwise", rounding="pow2" if e8m0 else "exact")
            scale = scale.to(torch.float8_e8m0fnu) if e8m0 else scale
            for e in range(len(q)):
                there = base if layer in linear else f"{base}.{e}.{proj}"
                tensors |= {f"{there}.weight": q[e], f"{there}.weight_scale_inv": scale[e]}
    folder.mkdir(exist_ok=True)
    save_file({name: t.clone() for name, t in tensors.items() if keep(name)}, folder / "model.safetensors")
    of_fp8 = dict(quant_method="fp8", activation_scheme="dynamic", weight_block_size=[128, 128], fmt="e4m3")
    of_fp8 |= dict(modules_to_not_convert=["lm_head", *(name for name in LINEAR if name not in linear)])
    of_fp8 |= dict(scale_fmt="ue8m0") if e8m0 else {}
    text = {**made.to_dict(), "quantization_config": {**of_fp8, **(quantization or {})}}
    (folder / "config.json").write_text(json.dumps(text))
    return folder


@contextmanager
def as_with_gpu() -> Iterator[None]:
    """Tells Transformers that the machine has a GPU that multiplies FP8."""
    capability = mock.patch("torch.cuda.get_device_capability", return_value=(9, 0))
    with mock.patch("torch.cuda.is_available", return_value=True), capability:
        yield


def loss(model: nn.Module) -> Tensor:
    tokens = torch.randint(3, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(1))
    tokens = tokens.to(next(model.parameters()).device)
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def load(folder: Path, implementation: str | None = None, **options: object) -> torch.nn.Module:
    """Loads a model as on a machine with a GPU, where experts stay in FP8, onto the CPU."""
    options = dict(dtype=torch.bfloat16, device_map={"": "cpu"}) | options
    if implementation is not None:
        options["experts_implementation"] = implementation
    with as_with_gpu():
        return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def load_dequantized(folder: Path, **options: object) -> torch.nn.Module:
    """Loads a model as on a machine without a GPU, where Transformers dequantizes FP8."""
    with mock.patch("torch.cuda.is_available", return_value=False):
        return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def write_mxfp4(folder: Path, *, spread: int = 3, keep: Callable[[str], bool] = lambda name: True) -> Path:
    """Writes GPT-OSS as it is published: experts in MXFP4, with scales of `spread` neighbouring powers of two."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=160, intermediate_size=96, num_local_experts=E, num_experts_per_tok=TOP_K)
    of_attention = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=64)
    of_text = dict(vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, pad_token_id=0, num_hidden_layers=LAYERS)
    made = transformers.AutoConfig.for_model("gpt_oss", **sizes, **of_attention, **of_text)
    model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    tensors: dict[str, Tensor] = {}
    for name, w in model.state_dict().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = w.contiguous()
            continue
        e, k, n = w.shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (e, n, k // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(120 - spread, 120, (e, n, k // 32), dtype=torch.uint8)
    folder.mkdir(exist_ok=True)
    save_file({name: t.clone() for name, t in tensors.items() if keep(name)}, folder / "model.safetensors")
    text = {**made.to_dict(), "quantization_config": dict(quant_method="mxfp4")}
    (folder / "config.json").write_text(json.dumps(text))
    return folder
