"""The pictures of the documents. A colour is a format, and grey is BF16, in all of them."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import headline
import losses
import whole_tables
from case import RECIPES, is_uneven, training_rows
from matplotlib.backends.backend_agg import FigureCanvasAgg  # draws without a display
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matrix import is_emulated
from models import product_name

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
# Parts of a step of training, in the order of the bars.
PART_COLORS = {
    "experts": "#1f6fb4",
    "attention": "#e08214",
    "router": "#8fbbdc",
    "dense MLPs": "#9467bd",
    "norms and residuals": "#c7a76c",
    "embeddings and loss": "#2b8c57",
    "optimizer": "#7a7a7a",
    "rest": "#bbbbbb",
    whole_tables.IDLE: "#e9e9e9",
}
LEAST_BYTES = 50e6  # smaller casts end before the GPU's memory reaches full speed


def save(figure: Figure, path: Path) -> None:
    # The file names no software version, because a new version would change the bytes of an equal picture.
    FigureCanvasAgg(figure).print_png(path, metadata={"Software": None})


def draw(results: dict[str, dict], runs: list[dict], sonicmoe: dict | None, whole: dict | None, folder: Path) -> None:
    """Draws what there are figures for: of results, the first file that has any."""
    folder.mkdir(exist_ok=True)
    draw_layer_speed(results, sonicmoe, whole, folder / "layer_speed.png")
    if sonicmoe:
        draw_layer_memory(sonicmoe, folder / "layer_memory.png")
    for drawer, name in ((draw_products, "products"), (draw_casts, "casts")):
        any(drawer(result, folder / f"{name}.png") for result in results.values())
    if runs:
        draw_losses(runs, folder / "losses.png")
    if rows := whole_tables.measured(whole):
        draw_waterfalls(rows, folder / "waterfall.png")


def bars_by_model(
    values: dict[str, dict[str, float]], colors: dict[str, str], form: str, title: str, path: Path
) -> None:
    """Horizontal bars with their numbers: a group for each model, a bar for each kind. A kind may lack models."""
    kinds, models = [*values], [*dict.fromkeys(model for found in values.values() for model in found)]
    height = 0.8 / len(kinds)
    figure = Figure(figsize=(6.4, 0.9 + 0.62 * len(models)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for i, kind in enumerate(kinds):
        for model, value in values[kind].items():
            y = models.index(model) + (i - (len(kinds) - 1) / 2) * height
            axes.barh(y, value, height * 0.9, color=colors[kind])
            axes.annotate(form.format(value), (value, y), (3, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(models)), [model.replace(" (", "\n(") for model in models], fontsize=10)
    axes.invert_yaxis()
    axes.margins(x=0.14)
    axes.set_xlim(left=0)
    axes.xaxis.set_visible(False)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    if form.endswith(" x"):
        axes.axvline(1, color=COLORS["bf16"], linewidth=1)
    axes.set_title(title, fontsize=11)
    keys = [Patch(color=colors[kind], label=kind) for kind in kinds]
    figure.legend(handles=keys, loc="outside lower center", ncols=len(kinds), fontsize=10, frameon=False)
    save(figure, path)


def draw_layer_speed(results: dict[str, dict], sonicmoe: dict | None, whole: dict | None, path: Path) -> None:
    torch_speed, torch_at = headline.over_torch(results, whole)
    sonic, sonic_at = headline.over_sonicmoe(sonicmoe)
    models = headline.models_of([*torch_speed])
    if not models:
        return
    gpu, sonic_gpu = (at.removeprefix("NVIDIA ").split(" ")[0] for at in (torch_at, sonic_at))
    values = {f"over torch, BF16 ({gpu})": {model: torch_speed[layer] for model, layer in models.items()}}
    if found := {model: sonic[layer][0] for model, layer in models.items() if layer in sonic}:
        values[f"over SonicMoE, BF16 ({sonic_gpu})"] = found
    colors = dict(zip(values, (COLORS["rowwise"], "#8fbbdc"), strict=False))
    title = f"Speed of an MoE layer, forward and backward, recipe {headline.RECIPE}"
    bars_by_model(values, colors, "{:.2f} x", title, path)


def draw_layer_memory(sonicmoe: dict, path: Path) -> None:
    rows = {tuple(row["dims"]): row["kept_mib"] for row in sonicmoe["rows"]}
    models = headline.models_of([*rows])
    kinds = {"SonicMoE, BF16": "SonicMoE", f"moe_fp8_ext, {headline.RECIPE}": headline.RECIPE}
    values = {text: {model: rows[layer][name] for model, layer in models.items()} for text, name in kinds.items()}
    colors = dict(zip(values, (COLORS["bf16"], COLORS["rowwise"]), strict=True))
    bars_by_model(values, colors, "{:,.0f} MiB", "Activations that an MoE layer keeps for backward", path)


def draw_waterfalls(rows: list[dict], path: Path) -> None:
    """For each model, a bar for each implementation, made of the parts of a step."""
    figure = Figure(figsize=(7.2, 0.6 + 1.15 * len(rows)), dpi=150, layout="constrained")
    drawn: dict[str, None] = {}
    for axes, row in zip(figure.subplots(len(rows), 1, squeeze=False).flat, rows, strict=True):
        names = [*row["us"]]
        for y, name in enumerate(names):
            found, left, longest = whole_tables.parts(row, name), 0.0, 0.0
            for part in (part for part in PART_COLORS if found.get(part)):
                hatch = "////" if found[part] < 0 else None  # idle, if the profiled kernels took longer than the step
                axes.barh(y, found[part], 0.8, left, color=PART_COLORS[part], hatch=hatch)
                left, drawn[part] = left + found[part], None
                longest = max(longest, left)
            gain = "" if name == names[0] else f" ({whole_tables.gain(row, name):.2f} x)"
            axes.annotate(
                f"{left:,.0f} ms{gain}", (longest, y), (3, 0), textcoords="offset points", va="center", fontsize=8
            )
        axes.set_yticks(range(len(names)), [whole_tables.NAMES.get(name, name) for name in names], fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.22)
        axes.set_xlim(left=0)
        axes.xaxis.set_visible(False)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.set_title(whole_tables.cut(row), fontsize=9, loc="left")
    keys = [Patch(color=color, label=part) for part, color in PART_COLORS.items() if part in drawn]
    figure.legend(handles=keys, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    save(figure, path)


def draw_products(result: dict, path: Path) -> bool:
    """A bar for each recipe and product, even groups; a dot for uneven ones. Emulated recipes are left out."""
    rows = [row for row in training_rows(result) if not is_emulated(row["op"].split()[1], result["device"])]
    names = {tuple(row["dims"][name] for name in "mkne"): None for row in rows}
    recipes = [*dict.fromkeys(row["op"].split()[1] for row in rows)]
    if not rows:
        return False
    for m, k, n, e in names:
        name = (product_name(k, n, e) or f"{k} to {n}, {e} experts").replace(" experts)", ")")
        names[m, k, n, e] = f"{name}; {m:,} tokens"
    figure = Figure(figsize=(7.2, 1 + 0.4 * len(names)), dpi=150, layout="constrained")
    axes = figure.add_subplot(xlabel="speed over BF16 torch._grouped_mm")
    height = 0.8 / len(recipes)
    for row in rows:
        recipe = row["op"].split()[1]
        y = [*names].index(tuple(row["dims"][name] for name in "mkne"))
        y += (recipes.index(recipe) - (len(recipes) - 1) / 2) * height
        if is_uneven(row["groups"]):
            axes.plot(row["ratio"], y, "o", color="black", markersize=3.5)
        else:
            axes.barh(y, row["ratio"], height * 0.92, color=COLORS[recipe])
    axes.axvline(1, color=COLORS["bf16"], linewidth=1)
    axes.set_yticks(range(len(names)), names.values(), fontsize=8)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"grouped_mm, forward and backward, {result['device']}", fontsize=10)
    keys = [Patch(color=COLORS[recipe], label=recipe) for recipe in recipes]
    if any(is_uneven(row["groups"]) for row in rows):
        keys.append(Line2D([], [], color="black", marker="o", linestyle="", markersize=3.5, label="uneven groups"))
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), fontsize=8, frameon=False)
    save(figure, path)
    return True


def family_of(op: str) -> str | None:
    """The family of a label. Variants for the generic kernels belong to no family."""
    first, *others = op.split()
    if "unaligned" in others or any(word.startswith("float8") for word in others):
        return None
    by_index = "by index" in op
    found = (name for name, (start, *more) in FAMILIES.items() if ("by index" in more) == by_index)
    return next((name for name in found if first in FAMILIES[name] or first == f"{FAMILIES[name][0]}_to"), None)


def draw_casts(result: dict, path: Path) -> bool:
    """Median and range over sizes, of each family and format, even groups beside uneven ones."""
    found: dict[tuple[str, str, bool], list[float]] = {}
    for row in result["rows"]:
        family = family_of(row["op"])
        if family and row.get("of_copy") and row["gbps"] * row["us"] * 1e3 >= LEAST_BYTES:
            format = next((name for name in RECIPES if name in row["op"]), "")
            found.setdefault((family, format, is_uneven(row["groups"])), []).append(row["of_copy"])
    families = [name for name in FAMILIES if any(key[0] == name for key in found)]
    if not found:
        return False
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
    return True


def draw_losses(runs: list[dict], path: Path) -> None:
    """Draws held-out losses over the band of BF16, and below them the differences from BF16's mean."""
    band, found = losses.band(runs), losses.curves(runs)
    tokens = [at for at in band if at]  # an untrained model tells nothing
    at = [count / 1e6 for count in tokens]
    figure = Figure(figsize=(7.2, 5.4), dpi=100, layout="constrained")
    loss, difference = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for axes, part in ((loss, lambda x, _: x), (difference, lambda x, mean: 100 * (x / mean - 1))):
        edges = [[part(band[t][0] + sign * band[t][1], band[t][0]) for t in tokens] for sign in (-1, 1)]
        axes.fill_between(at, *edges, color=COLORS["bf16"], alpha=0.3, linewidth=0)
        for run, curve in zip(runs, found, strict=True):
            style = dict(color=COLORS[run["recipe"]["name"]], linewidth=0.8 if losses.is_bf16(run) else 1.3)
            style["linestyle"] = "--" if len(run["recipe"]) > 1 else "-"
            axes.plot(at, [part(curve[t], band[t][0]) for t in tokens], **style)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    loss.set_ylabel("held-out loss, nats a byte")
    difference.set_ylabel("from BF16's mean, %")
    difference.set_xlabel("tokens, M")
    reach = max(
        *(abs(curve[t] / band[t][0] - 1) for curve in found for t in tokens[len(tokens) // 3 :]),
        *(band[t][1] / band[t][0] for t in tokens[len(tokens) // 3 :]),
    )
    difference.set_ylim(-120 * reach, 120 * reach)  # the first third may leave the picture
    devices = " and ".join(dict.fromkeys(run["device"] for run in runs))
    figure.suptitle(f"{runs[0]['parameters'] / 1e9:.2f} B parameters trained on {devices}", fontsize=10)
    keys = [Line2D([], [], color=COLORS["bf16"], linewidth=0.8, label="bf16, seeds")]
    keys.append(Patch(color=COLORS["bf16"], alpha=0.3, label="band of bf16"))
    for run in runs:
        if not losses.is_bf16(run):
            style = dict(color=COLORS[run["recipe"]["name"]], linestyle="--" if len(run["recipe"]) > 1 else "-")
            keys.append(Line2D([], [], label=losses.label(run), **style))
    figure.legend(handles=keys, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    save(figure, path)
