"""The first screen of README.md: two pictures side by side, and a table of five layers."""

from __future__ import annotations

import textwrap

from case import commits_of
from models import MODELS, layer_name
from tabulate import tabulate

RECIPE = "rowwise"  # the default
ROWS = 5
PICTURES = """\
<p align="center">
<img src="docs/pictures/layer_speed.png" width="49%" alt="Speed of an MoE layer over BF16, by model">
<img src="docs/pictures/layer_memory.png" width="49%" alt="Memory that a layer keeps for backward, by model">
</p>"""

Layer = tuple[int, ...]  # T, D, F, E, top_k


def label(layer: Layer) -> str:
    _, d, f, e, k = layer
    return layer_name(d, f, e, k) or f"D {d}, F {f}, {e} experts"


def over_torch(results: dict[str, dict]) -> tuple[dict[Layer, float], str]:
    """Speed over torch's BF16 ops, the worse of even and uneven groups, and where it was measured."""
    for result in results.values():
        rows = [row for row in result["rows"] if row["op"] == f"experts {RECIPE}" and row.get("ratio")]
        found: dict[Layer, float] = {}
        for row in rows:
            layer = tuple(row["dims"][name] for name in "tdfek")
            found[layer] = min(row["ratio"], found.get(layer, row["ratio"]))
        if found:
            return found, f"{result['device']} at {commits_of(rows, result)}"
    return {}, ""


def over_sonicmoe(sonicmoe: dict | None) -> tuple[dict[Layer, tuple[float, float]], str]:
    """Speed and memory over SonicMoE's, and where they were measured."""
    if not sonicmoe:
        return {}, ""
    found = {
        tuple(row["dims"]): (
            row["us"]["SonicMoE"] / row["us"][RECIPE],
            row["kept_mib"][RECIPE] / row["kept_mib"]["SonicMoE"],
        )
        for row in sonicmoe["rows"]
    }
    return found, f"{sonicmoe['device']} at {(sonicmoe['commit'] or 'unknown')[:7]}"


def models_of(layers: list[Layer]) -> dict[str, Layer]:
    """The layers of models, in the order of MODELS. A whole layer stands for its model where some ranks share one."""
    found: dict[str, Layer] = {}
    for model in MODELS:
        same = [layer for layer in layers if label(layer).split(" (")[0] == model]
        for layer in sorted(same, key=lambda layer: label(layer) != model)[:1]:
            found[label(layer)] = layer
    return found


def text(results: dict[str, dict], sonicmoe: dict | None) -> str:
    torch_speed, at = over_torch(results)
    if not torch_speed:
        return "Not measured yet: `make bench` on a GPU fills this part."
    sonic, sonic_at = over_sonicmoe(sonicmoe)
    shown = [*models_of([*torch_speed]).values()]
    shown = [*shown, *(layer for layer in torch_speed if label(layer) not in map(label, shown))][:ROWS]
    body = []
    for layer in shown:
        times, kept = (f"{sonic[layer][0]:.2f} x", f"{sonic[layer][1]:.2f}") if layer in sonic else ("-", "-")
        body.append((label(layer), f"{torch_speed[layer]:.2f} x", times, kept))
    headings = ("MoE layer, forward and backward", "over torch, BF16", "over SonicMoE, BF16", "memory, of SonicMoE's")
    lines = tabulate(body, headings, tablefmt="github", colalign=["left", *["right"] * 3], disable_numparse=True)
    said = f"Recipe `{RECIPE}`. Over torch: `experts` on {at}, the worse of even and uneven routing."
    if sonic:
        newest = max(result.get("date", "") for result in results.values())
        older = ", an older commit" if sonicmoe.get("date", "") < newest else ""
        said += (
            f" Over SonicMoE: `MoE` on {sonic_at}{older}. Memory: activations kept "
            "for backward, without the FP8 copies of the weights."
        )
    said += " [Sizes, methods, other recipes](docs/performance.md)."
    return "\n\n".join((PICTURES, lines, textwrap.fill(said, 120)))
