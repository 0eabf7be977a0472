"""The first screen of README.md: two pictures side by side, and a table of five models."""

from __future__ import annotations

import textwrap
from operator import itemgetter

import whole_tables
from case import commits_of
from models import MODELS, layer_name
from tabulate import tabulate

RECIPE = "rowwise"  # the default
IMPLEMENTATION = f"moe_fp8_{RECIPE}"  # of Transformers' experts
ROWS = 5
PICTURES = """\
<p align="center">
<img src="docs/pictures/layer_speed.png" width="49%" alt="Speed of an MoE layer over BF16, by model">
<img src="docs/pictures/layer_memory.png" width="49%" alt="Activations that a layer keeps for backward"></p>"""

Layer = tuple[int, ...]  # T, D, F, E, top_k


def label(layer: Layer) -> str:
    _, d, f, e, k = layer
    return layer_name(d, f, e, k) or f"D {d}, F {f}, {e} experts"


def over_torch(results: dict[str, dict], whole: dict | None) -> tuple[dict[Layer, float], str]:
    """Speed over torch's BF16 ops, the worse of even and uneven groups, and where it was measured. Results of the GPU
    and commit of the whole models come first."""
    measured: dict[str, dict[Layer, float]] = {}
    for result in results.values():
        rows = [row for row in result["rows"] if row["op"] == f"experts {RECIPE}" and row.get("ratio")]
        found: dict[Layer, float] = {}
        for row in rows:
            layer = tuple(row["dims"][name] for name in "tdfek")
            found[layer] = min(row["ratio"], found.get(layer, row["ratio"]))
        if found:
            measured.setdefault(f"{result['device']} at {commits_of(rows, result)}", found)
    if not measured:
        return {}, ""
    first = [at for at in measured if whole and whole_tables.same_commit(at, whole)]
    at = next(iter([*first, *measured]))
    return measured[at], at


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


def text(
    results: dict[str, dict], sonicmoe: dict | None, whole: dict | None, finetuned: list[dict] | None = None
) -> str:
    torch_speed, at = over_torch(results, whole)
    if not torch_speed:
        return "Not measured yet: `make bench` on a GPU fills this part."
    shown = [*models_of([*torch_speed]).values()]
    shown = [*shown, *(layer for layer in torch_speed if label(layer) not in map(label, shown))][:ROWS]
    models = {whole_tables.label(row): row for row in whole_tables.measured(whole)}
    body = []
    for layer in shown:
        row = models.get(label(layer))
        cells = ("-", "-")
        if row:
            peak = f"{whole_tables.memory(row, IMPLEMENTATION):.2f}" if row["peak_bytes"] else "-"
            cells = f"{whole_tables.gain(row, IMPLEMENTATION):.2f} x", peak
        body.append((label(layer), f"{torch_speed[layer]:.2f} x", *cells))
    headings = (
        "model",
        "MoE layer: speed over torch in BF16",
        "training step: speed over Transformers in BF16",
        "training step: peak memory over BF16",
    )
    lines = tabulate(body, headings, tablefmt="github", colalign=["left", *["right"] * 3], disable_numparse=True)
    speeds = [cells[1:3] for cells in body]
    claims = textwrap.fill(claim(at, whole, speeds) + finetuning(finetuned or [], at.split(" at ")[0]), 120)
    return "\n\n".join((claims, PICTURES, lines, textwrap.fill(said(at, sonicmoe, whole), 120)))


def finetuning(runs: list[dict], gpu: str) -> str:
    """A sentence about the fastest run of a whole model beside the fastest of Transformers, with the same step.

    Runs with a limit of memory do not count.

    gpu: the one that the sentences before are about.
    """
    speed_of = itemgetter("tokens_per_second")
    runs = [run for run in runs if "tokens_per_second" in run and not run.get("memory")]
    whole = [run for run in runs if run["layers"] == run["of_layers"]]
    ours = max((run for run in whole if run["impl"] == "ours" and run["sequences"] > 1), key=speed_of, default=None)
    step = "device", "commit", "model", "context", "sequences", "rank", "adapters", "attention_only"
    same = [run for run in whole if run["impl"] == "stock" and ours and all(run[n] == ours[n] for n in step)]
    if not same:
        return ""
    stock = max(same, key=speed_of)
    gain, memory = speed_of(ours) / speed_of(stock), ours["peak_bytes"] / stock["peak_bytes"]
    times = f"[{gain:.2f} times](docs/finetuning.md)"
    how = ", both as CUDA graphs" if ours.get("graphs") and stock.get("graphs") else ""
    others = f"Transformers and PEFT in BF16{how}, in {memory:.2f} of the memory"
    where = "" if ours["device"] == gpu else f"On {ours['device']}, "
    return f" {where}LoRA of {ours['model']} is {times} as fast as {others}."


def claim(at: str, whole: dict | None, speeds: list[tuple[str, str]]) -> str:
    """What the table says: the least and the greatest speed of layers, and of steps."""
    of_layers, of_steps = ([cell for cell in column if cell != "-"] for column in zip(*speeds, strict=True))
    gpu = at.split(" at ")[0]
    found = f"On {gpu}, an MoE layer is {between(of_layers)} times as fast as with torch in BF16"
    if of_steps:
        where = "" if whole["device"] == gpu else f" on {whole['device']}"
        found += f". A whole training step{where} is {between(of_steps)} times as fast as with Transformers in BF16"
    return f"{found}."


def between(cells: list[str]) -> str:
    """The range of cells such as "1.15 x"."""
    least, most = (choose((cell.removesuffix(" x") for cell in cells), key=float) for choose in (min, max))
    return least if least == most else f"{least} to {most}"


def said(at: str, sonicmoe: dict | None, whole: dict | None) -> str:
    """Where the figures of the table and of the pictures come from."""
    parts = [
        f"Recipe `{RECIPE}`. Layers: `experts`, forward and backward, on {at}, with even or uneven routing, whichever "
        "is slower."
    ]
    rows = whole_tables.measured(whole)
    if not rows:
        parts.append("Whole models are not measured yet.")
    else:
        least, most = (choose(row["layers"] for row in rows) for choose in (min, max))
        layers = f"{least}" if least == most else f"{least} to {most}"
        same = whole_tables.same_commit(at, whole)
        place = (
            "on the same GPU and commit" if same else f"on {whole_tables.place(whole)}, so the columns do not compare"
        )
        means = f"with AdamW and Transformers {whole['transformers']}"
        parts.append(f"Training: steps {means} of models cut to {layers} layers, {place}.")
    _, sonic_at = over_sonicmoe(sonicmoe)
    if sonic_at:
        parts.append(f"The pictures also show SonicMoE, measured on {sonic_at}.")
        parts.append("Memory in the pictures does not count FP8 copies of weights ([with them](docs/beside.md)).")
    return " ".join([*parts, "[Sizes, methods, other recipes](docs/performance.md)."])
