"""The three pictures of the documents. In all of them, each format has one colour, and BF16 is grey."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, median

from case import RECIPES, is_uneven, training_rows
from matplotlib.backends.backend_agg import FigureCanvasAgg  # draws without a display
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

COLORS = {"bf16": "#7a7a7a", "rowwise": "#1f6fb4", "blockwise": "#e08214", "mxfp8": "#2b8c57", "": "#444444"}
# Family: the ops of one row of the picture of casts, as prefixes of their labels.
FAMILIES = {
    "quantize_rows": ("quantize_rows",),
    "quantize_tokens": ("quantize_tokens",),
    "quantize_both": ("quantize_both",),
    "quantize_weight": ("quantize_weight",),
    "rows by index": ("quantize_rows", "by index"),
    "both by index": ("quantize_both", "by index"),
    "dequantize": ("dequantize",),
    "pad, unpad": ("pad_token_groups", "unpad_token_groups"),
    "permute, unpermute": ("permute_pad", "unpermute"),
    "combine": ("combine",),
    "swizzle, unswizzle": ("swizzle_scales", "unswizzle_scales"),
}
LEAST_BYTES = 50e6  # smaller casts end before the GPU's memory reaches full speed


def save(figure: Figure, path: Path) -> None:
    # The file names no software version, because a new version would change the bytes of an equal picture.
    FigureCanvasAgg(figure).print_png(path, metadata={"Software": None})


def draw(results: dict[str, dict], losses: dict | None, folder: Path) -> None:
    """Draws every picture for which there are figures: the last file with results, and the losses of the demo."""
    for result in results.values():
        draw_speed(result, folder / "speed.png")
        draw_casts(result, folder / "casts.png")
    if losses:
        draw_losses(losses, folder / "losses.png")


def draw_speed(result: dict, path: Path) -> None:
    """Draws a bar with even groups for each recipe and model, and a dot with uneven groups."""
    rows = training_rows(result)
    models, recipes = ([*dict.fromkeys(r)] for r in ((r["shape"] for r in rows), (r["op"].split()[1] for r in rows)))
    if not rows:
        return
    figure = Figure(figsize=(7.2, 3), dpi=100, layout="constrained")
    axes = figure.add_subplot(ylabel="speed over BF16", title=f"grouped_mm, forward and backward, {result['device']}")
    width = 0.8 / len(recipes)
    for row in rows:
        recipe = row["op"].split()[1]
        x = models.index(row["shape"]) + (recipes.index(recipe) - (len(recipes) - 1) / 2) * width
        if is_uneven(row["groups"]):
            axes.plot(x, row["ratio"], "o", color="black", markersize=3.5)
        else:
            axes.bar(x, row["ratio"], width * 0.92, color=COLORS[recipe])
    axes.axhline(1, color=COLORS["bf16"], linewidth=1)
    axes.set_xticks(range(len(models)), models, fontsize=8, rotation=20)
    axes.spines[["top", "right"]].set_visible(False)
    keys = [Patch(color=COLORS[recipe], label=recipe) for recipe in recipes]
    if any(is_uneven(row["groups"]) for row in rows):
        keys.append(Line2D([], [], color="black", marker="o", linestyle="", markersize=3.5, label="uneven groups"))
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), fontsize=8, frameon=False)
    save(figure, path)


def family_of(op: str) -> str | None:
    """The family of a label. Variants for the generic kernels belong to no family."""
    first, *others = op.split()
    if "unaligned" in others or any(word.startswith("float8") for word in others):
        return None
    by_index = "by index" in op
    found = (name for name, (start, *more) in FAMILIES.items() if ("by index" in more) == by_index)
    return next((name for name in found if first in FAMILIES[name] or first == f"{FAMILIES[name][0]}_to"), None)


def draw_casts(result: dict, path: Path) -> None:
    """Draws the median and range over sizes of each family and format, with even groups beside uneven ones."""
    found: dict[tuple[str, str, bool], list[float]] = {}
    for row in result["rows"]:
        family = family_of(row["op"])
        if family and row.get("of_copy") and row["gbps"] * row["us"] * 1e3 >= LEAST_BYTES:
            format = next((name for name in RECIPES if name in row["op"]), "")
            found.setdefault((family, format, is_uneven(row["groups"])), []).append(row["of_copy"])
    families = [name for name in FAMILIES if any(key[0] == name for key in found)]
    if not found:
        return
    figure = Figure(figsize=(7.2, 1 + 0.42 * len(families)), dpi=100, layout="constrained")
    axes = figure.add_subplot(xlabel="fraction of the bandwidth of a copy: median and range over sizes")
    for y, family in enumerate(families):
        lines = [key for key in found if key[0] == family]
        lines.sort(key=lambda key: ([*RECIPES, ""].index(key[1]), key[2]))
        for i, key in enumerate(lines):
            at, values, uneven = y + (i - (len(lines) - 1) / 2) * 0.13, found[key], key[2]
            axes.plot([min(values), max(values)], [at, at], color=COLORS[key[1]], linewidth=1.4, alpha=0.7)
            inside = "white" if uneven else COLORS[key[1]]
            axes.plot(median(values), at, "o", color=COLORS[key[1]], markerfacecolor=inside, markersize=4.5)
    axes.axvline(1, color=COLORS["bf16"], linewidth=1)
    axes.set_yticks(range(len(families)), families, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{result['device']}, a copy at {result['copy_gbps']:,.0f} GB/s", fontsize=10)
    keys = [Patch(color=COLORS[name], label=name or "no format") for name in (*RECIPES, "")]
    for uneven, inside in ((False, COLORS[""]), (True, "white")):
        if any(key[2] == uneven for key in found):
            style = {"color": COLORS[""], "markerfacecolor": inside, "marker": "o", "linestyle": "", "markersize": 4.5}
            keys.append(Line2D([], [], label="uneven groups" if uneven else "even or no groups", **style))
    figure.legend(handles=keys, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    save(figure, path)


def draw_losses(losses: dict, path: Path) -> None:
    """Draws running means of the training loss, and the difference of each recipe from BF16."""
    smooth = {run["recipe"]: running_mean(run["losses"]) for run in losses["runs"]}
    figure = Figure(figsize=(7.2, 3), dpi=100, layout="constrained")
    loss, difference = figure.subplots(1, 2)
    reach = 1.0
    for recipe, curve in smooth.items():
        percent = [100 * (a / b - 1) for a, b in zip(curve, smooth["bf16"], strict=True)]
        reach = max(reach, *map(abs, percent))
        style = {"color": COLORS[recipe], "linewidth": 3 if recipe == "bf16" else 1}  # the curves overlap
        loss.plot(curve, label=recipe, **style)
        difference.plot(percent, **style)
    loss.set_ylabel("training loss, nats a byte")
    difference.set_ylabel("difference from BF16, %")
    difference.set_ylim(-1.1 * reach, 1.1 * reach)
    for axes in (loss, difference):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    devices = " and ".join(dict.fromkeys(run["device"] for run in losses["runs"]))
    title = f"MoE language model trained on {devices}, every recipe on the same bytes"
    figure.suptitle(title, fontsize=10)
    figure.legend(loc="outside lower center", ncols=len(smooth), fontsize=8, frameon=False)
    save(figure, path)


def running_mean(values: list[float], reach: int = 10) -> list[float]:
    return [fmean(values[max(0, at - reach) : at + reach + 1]) for at in range(len(values))]
