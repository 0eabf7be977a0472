"""Names of models for sizes of expert layers. A table or a picture names a model only if the sizes are that model's."""

from __future__ import annotations

# D, F, experts, experts of a token: `config.json` of each model on the Hugging Face Hub.
MODELS = {
    "Qwen3-30B-A3B": (2048, 768, 128, 8),
    "Qwen3-235B-A22B": (4096, 1536, 128, 8),
    "GPT-OSS-20B": (2880, 2880, 32, 4),
    "DeepSeek-V3": (7168, 2048, 256, 8),
    "Mixtral-8x7B": (4096, 14336, 8, 2),
    "DeepSeek-MoE-16B": (2048, 1408, 64, 6),
    "Llama-4-Scout": (5120, 8192, 16, 1),
    "Granite-3.0-3B-A800M": (1536, 512, 40, 8),
}


def _share(name: str, experts: int, total: int) -> str:
    """The name for a rank that holds some of the experts."""
    return name if experts == total else f"{name} ({experts} of {total} experts)"


def layer_name(d: int, f: int, e: int, k: int) -> str | None:
    """The model whose layer has these sizes: tokens of D features, F features in each of E experts, k per token."""
    for name, (dim, hidden, experts, top_k) in MODELS.items():
        if (d, f, k) == (dim, hidden, top_k) and experts % e == 0:
            return _share(name, e, experts)
    return None


def product_name(k: int, n: int, e: int) -> str | None:
    """The model, and its projection, that multiply K inputs to N outputs with E experts."""
    for name, (dim, hidden, experts, _) in MODELS.items():
        projections = {(dim, 2 * hidden): "gate and up", (hidden, dim): "down", (dim, hidden): "gate or up"}
        if (k, n) in projections and experts % e == 0:
            return f"{_share(name, e, experts)}, {projections[k, n]}"
    return None


def named(name: str | None, sizes: list[int]) -> str:
    """A cell of a table: the model, if these are the sizes of one, and the sizes."""
    return f"{name} {sizes}" if name else str(sizes)
