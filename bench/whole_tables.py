"""Texts on whole models, from the results of whole_models.py: speed and memory, the parts of a step, and ceilings."""

from __future__ import annotations

import textwrap
from math import prod
from statistics import median

import device_time
import tables
from tabulate import tabulate

from moe_fp8_ext.report.models import share_name

IDLE = "idle"  # the GPU waits for the host
PARTS = (
    "experts",
    "attention",
    "router",
    "dense MLPs",
    "norms and residuals",
    "embeddings and loss",
    "optimizer",
    "rest",
)
OPS = 3  # of the experts, that a table names
PARTS_OF_LAYERS = *PARTS[:5], IDLE
NAMES = {"moe_fp8_rowwise": "rowwise", "moe_fp8_blockwise": "blockwise"}  # of implementations, in tables


def label(row: dict) -> str:
    """The model of a row, with its share of experts."""
    return share_name(row["model"], row["sizes"][2])


def measured(result: dict | None) -> list[dict]:
    return [row for row in result["rows"] if "seconds" in row] if result else []


def baseline_of(row: dict) -> str:
    return next(iter(row["seconds"]))


def gain(row: dict, implementation: str) -> float:
    """How many times as fast as the baseline a model is."""
    return median(row["seconds"][baseline_of(row)]) / median(row["seconds"][implementation])


def memory(row: dict, implementation: str) -> float:
    """Peak memory over the baseline's."""
    return row["peak_bytes"][implementation] / row["peak_bytes"][baseline_of(row)]


def place(result: dict) -> str:
    return f"{result['device']} at {(result['commit'] or 'unknown')[:7]}"


def same_commit(at: str, whole: dict) -> bool:
    """Whether figures of another program, which are from `at`, "a GPU at a commit", have this GPU and commit."""
    return at == place(whole)


def steps_of(rows: list[dict]) -> str:
    return " or ".join(dict.fromkeys(f"{row['step'][0]} x {row['step'][1]:,}" for row in rows))


def cut(row: dict) -> str:
    return f"{label(row)}, {row['layers']} of {row['of_layers']} layers"


def parts(row: dict, implementation: str) -> dict[str, float]:
    """Milliseconds of every part of a step. Idle is what the kernels of a profiled step leave of a step without the
    profiler. It is negative if they take longer."""
    us = row["us"][implementation]
    idle = median(row["seconds"][implementation]) * 1e6 - sum(us.values())
    return {part: time / 1e3 for part, time in (*us.items(), (IDLE, idle))}


def at_all_layers(row: dict, implementation: str) -> float:
    """Milliseconds of a step of a model with all its layers, if each took the time that it takes in the cut."""
    times, times_layers = parts(row, implementation), row["of_layers"] / row["layers"]
    in_layers = sum(times.get(part, 0) for part in PARTS_OF_LAYERS)
    others = sum(times.values()) - in_layers - times["optimizer"]
    grown = (row["parameters"] + (times_layers - 1) * row["parameters_in_layers"]) / row["parameters"]
    return in_layers * times_layers + others + times["optimizer"] * grown


def text(result: dict | None, layer_gains: dict[tuple[int, ...], float], picture: str) -> str:
    """`layer_gains`: the speed of a layer over torch's BF16 ops, by D, F, E and top_k."""
    rows = measured(result)
    if not rows:
        return f"Not measured yet: `python bench/whole_models.py --out bench/results/{tables.WHOLE}` fills this part."
    made = [_speeds(result, rows), _ceilings(rows, layer_gains), picture, _waterfalls(result, rows)]
    made += [_ops_of_experts(rows), _attention(rows)]
    missing = [f"{cut(row)}: {row['out_of_memory']}" for row in result["rows"] if "out_of_memory" in row]
    return "\n\n".join(filter(None, [*made, *missing]))


def _table(body: list[list[str]], headings: list[str], left: int) -> str:
    align = ["left"] * left + ["right"] * (len(headings) - left)
    return tabulate(body, headings, tablefmt="github", colalign=align, disable_numparse=True)


def _speeds(result: dict, rows: list[dict]) -> str:
    said = (
        f"Tokens per second of training, and peak memory in GB (10^9 bytes), on {place(result)}, with torch "
        f"{result['torch']} and Transformers {result['transformers']}. A step is {steps_of(rows)} tokens: forward, "
        f"backward and AdamW.{tables.loads_text(rows)} The first column of speeds is Transformers' own `grouped_mm` in "
        "BF16. The percentage is the spread of three repeats, taken in turns:"
    )
    ours = [name for name in rows[0]["seconds"] if name != baseline_of(rows[0])]
    body = []
    for row in rows:
        cells = [cut(row)]
        for name in (baseline_of(row), *ours):
            seconds = row["seconds"][name]
            times = f"{gain(row, name):.2f} x, " if name in ours else ""
            spread = (max(seconds) - min(seconds)) / median(seconds)
            cells.append(f"{prod(row['step']) / median(seconds):,.0f} ({times}{spread:.1%})")
        for name in (baseline_of(row), *ours):
            of_baseline = f" ({memory(row, name):.2f})" if name in ours else ""
            cells.append(f"{row['peak_bytes'][name] / 1e9:.1f}{of_baseline}" if name in row["peak_bytes"] else "-")
        body.append(cells)
    names = [NAMES[name] for name in ours]
    headings = ["model", f"`{baseline_of(rows[0])}`", *names, "GB", *(f"GB, {name}" for name in names)]
    return f"{textwrap.fill(said, 120)}\n\n{_table(body, headings, 1)}"


def _ceilings(rows: list[dict], layer_gains: dict[tuple[int, ...], float]) -> str:
    said = (
        "What can be gained, by Amdahl's law: the share of the experts in the step with `grouped_mm`; the speed if "
        "experts took no time; the speed if they gained what the layer alone gains over torch's ops in BF16; the speed "
        "that was measured. All four are of the cut. The last column is calculated from the parts of a step, for a "
        "model with all its layers:"
    )
    body = []
    for row in rows:
        before, ours = parts(row, baseline_of(row)), "moe_fp8_rowwise"
        share = before["experts"] / sum(before.values())
        of_layer = layer_gains.get(tuple(row["sizes"]))
        with_layer = f"{1 / (1 - share + share / of_layer):.2f} x ({of_layer:.2f} x)" if of_layer else "-"
        body.append(
            [
                cut(row),
                f"{share:.0%}",
                f"{1 / (1 - share):.2f} x",
                with_layer,
                f"{gain(row, ours):.2f} x ({before['experts'] / parts(row, ours)['experts']:.2f} x)",
                f"{at_all_layers(row, baseline_of(row)) / at_all_layers(row, ours):.2f} x",
            ]
        )
    headings = [
        "model",
        "share of experts",
        "experts at no time",
        "at the layer's gain (the gain)",
        "measured, rowwise (its experts)",
        "all layers, calculated",
    ]
    return f"{textwrap.fill(said, 120)}\n\n{_table(body, headings, 1)}"


def _waterfalls(result: dict, rows: list[dict]) -> str:
    said = (
        "Milliseconds of the kernels of one step by part of the model, by `torch.profiler`. Idle is the rest of a step "
        "that was timed without the profiler, in which the GPU waits for the host. It is negative if the kernels took "
        f"longer in the profiled step. {device_time.said(result)}"
    )
    found = {part for row in rows for us in row["us"].values() for part in us}
    order = [*(part for part in PARTS if part in found), IDLE]
    body = []
    for row in rows:
        for name in row["us"]:
            ms = parts(row, name)
            cells = [f"{ms[part]:.1f}" if part in ms else "-" for part in order]
            step = f"{median(row['seconds'][name]) * 1e3:.1f}"
            body.append([label(row), NAMES.get(name, f"`{name}`"), step, *cells])
    return f"{textwrap.fill(said, 120)}\n\n{_table(body, ['model', 'experts by', 'step', *order], 2)}"


def _attention(rows: list[dict]) -> str:
    """The kernels of attention that torch chose, by model."""
    names: dict[str, list[str]] = {}
    for row in rows:
        ops = row.get("us_of_ops", {}).get(baseline_of(row), {}).get("attention", {})
        for op in (op for op, us in ops.items() if us and "attention" in op and op.endswith("backward")):
            names.setdefault(op.removeprefix("aten::"), []).append(row["model"])
    said = "; ".join(f"`{op}` in {', '.join(models)}" for op, models in names.items())
    return textwrap.fill(f"The backward of attention is {said}.", 120) if names else ""


def _ops_of_experts(rows: list[dict]) -> str:
    """The ops that take most of the experts' time, by model and implementation."""
    body = []
    for row in rows:
        for name, of_parts in row.get("us_of_ops", {}).items():
            ops = sorted(of_parts.get("experts", {}).items(), key=lambda op: -op[1])[:OPS]
            if ops:
                listed = ", ".join(f"{us / 1e3:.1f} `{op}`" for op, us in ops)
                body.append([label(row), NAMES.get(name, f"`{name}`"), listed])
    said = "Milliseconds of the ops that take most of the experts' time:"
    return f"{said}\n\n{_table(body, ['model', 'experts by', 'ops'], 3)}" if body else ""
