"""Names of models for sizes of expert layers. A table or a picture names a model only if the sizes are that model's."""

from __future__ import annotations

from moe_fp8_ext.report.models import MODELS, share_name


def layer_name(d: int, f: int, e: int, k: int) -> str | None:
    """The model whose layer has these sizes: tokens of D features, F features in each of E experts, k per token."""
    for name, (dim, hidden, experts, top_k) in MODELS.items():
        if (d, f, k) == (dim, hidden, top_k) and experts % e == 0:
            return share_name(name, e)
    return None


def product_name(k: int, n: int, e: int) -> str | None:
    """The model, and its projection, that multiply K inputs to N outputs with E experts."""
    for name, (dim, hidden, experts, _) in MODELS.items():
        projections = {(dim, 2 * hidden): "gate and up", (hidden, dim): "down", (dim, hidden): "gate or up"}
        if (k, n) in projections and experts % e == 0:
            return f"{share_name(name, e)}, {projections[k, n]}"
    return None


def named(name: str | None, sizes: list[int]) -> str:
    """A cell of a table: the model, if these are the sizes of one, and the sizes."""
    return f"{name} {sizes}" if name else str(sizes)
