"""Sizes of the expert layers of models, for every part of the project that names a model."""

from __future__ import annotations

from typing import NamedTuple


class Sizes(NamedTuple):
    """Features of a token, features of an expert, experts of a layer, experts of a token."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int


# `config.json` of each model on the Hugging Face Hub.
MODELS = {
    "Qwen3-30B-A3B": Sizes(2048, 768, 128, 8),
    "Qwen3-235B-A22B": Sizes(4096, 1536, 128, 8),
    "GPT-OSS-20B": Sizes(2880, 2880, 32, 4),
    "DeepSeek-V3": Sizes(7168, 2048, 256, 8),
    "Mixtral-8x7B": Sizes(4096, 14336, 8, 2),
    "DeepSeek-MoE-16B": Sizes(2048, 1408, 64, 6),
    "Llama-4-Scout": Sizes(5120, 8192, 16, 1),
    "Granite-3.0-3B-A800M": Sizes(1536, 512, 40, 8),
    "GLM-4.5-Air": Sizes(4096, 1408, 128, 8),
}


def sizes_of(name: str, experts: int | None = None) -> Sizes:
    """Returns the sizes of a model's layer, on a GPU that holds `experts` of its experts or all of them."""
    sizes = MODELS[name]
    return sizes if experts is None else sizes._replace(experts=experts)


def share_name(name: str, experts: int) -> str:
    """Returns the name of a layer for a GPU that holds `experts` of its experts."""
    total = MODELS[name].experts
    return name if experts == total else f"{name} ({experts} of {total} experts)"
