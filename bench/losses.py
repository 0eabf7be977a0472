"""Compares the held-out losses of the runs of bench/pretrain.py. Three runs in BF16 differ in their seeds alone, and so
give a band. Every recipe starts from the weights of the first seed, and reads its data."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from statistics import fmean

from tabulate import tabulate

FOLDER = "losses"  # of results: one file for each run
ORDER = "bf16", "rowwise", "blockwise", "mxfp8"
Curve = dict[int, float]  # held-out loss by tokens


def recorded(results: Path) -> list[dict]:
    """The runs: BF16 first, then by recipe. Without two runs in BF16 there is no band, and the list is empty."""
    runs = [json.loads(path.read_text()) for path in sorted((results / FOLDER).glob("*.json"))]
    runs.sort(key=lambda run: (ORDER.index(run["recipe"]["name"]), len(run["recipe"]), run["seed"]))
    return runs if sum(map(is_bf16, runs)) > 1 else []


def is_bf16(run: dict) -> bool:
    return run["recipe"]["name"] == "bf16"


def label(run: dict) -> str:
    options = "".join(f", {name}={value.split('_')[-1]}" for name, value in run["recipe"].items() if name != "name")
    return f"{run['recipe']['name']}{options}"


def curves(runs: list[dict]) -> list[Curve]:
    """The held-out losses of each run, at the numbers of tokens that all runs have reached."""
    found = [dict(map(tuple, run["held_out_losses"])) for run in runs]
    return [{at: curve[at] for at in curve if all(at in other for other in found)} for curve in found]


def band(runs: list[dict]) -> dict[int, tuple[float, float]]:
    """Mean and spread of the seeds of BF16 by tokens. The spread is the largest minus the smallest loss."""
    of_seeds = [curve for run, curve in zip(runs, curves(runs), strict=True) if is_bf16(run)]
    losses = {at: [curve[at] for curve in of_seeds] for at in of_seeds[0]}
    return {at: (fmean(found), max(found) - min(found)) for at, found in losses.items()}


def compared(runs: list[dict]) -> dict[str, dict]:
    """Of each recipe after the last common token: its loss, the difference from BF16's mean and from BF16 of the same
    seed, and whether the first is at most the spread of BF16."""
    whole, of_all = band(runs), curves(runs)
    last = max(whole)
    mean, spread = whole[last]
    same_seed = {run["seed"]: curve[last] for run, curve in zip(runs, of_all, strict=True) if is_bf16(run)}
    result = {}
    for run, curve in zip(runs, of_all, strict=True):
        if not is_bf16(run):
            difference = curve[last] - mean
            of_seed = curve[last] - same_seed[run["seed"]] if run["seed"] in same_seed else None
            found = dict(loss=curve[last], difference=difference, of_seed=of_seed)
            result[label(run)] = found | dict(within=abs(difference) <= spread)
    return result


def verdict(runs: list[dict]) -> str:
    """One sentence: which recipes are within the band, and which are not."""
    parts = []
    for within, text in ((True, "within"), (False, "outside")):
        if names := [f"`{name}`" for name, found in compared(runs).items() if found["within"] is within]:
            joined = " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
            parts.append(f"{joined} {'are' if names[1:] else 'is'} {text} the band")
    return f"{'; '.join(parts)}."


def beside_same_seed(runs: list[dict]) -> str:
    """One sentence: how far recipes end from BF16 with their seed, or nothing if BF16 has no such seed."""
    found = [x["of_seed"] / (x["loss"] - x["of_seed"]) for x in compared(runs).values() if x["of_seed"] is not None]
    return f"Recipes end {min(found):+.2%} to {max(found):+.2%} from BF16 with the same seed." if found else ""


def words(runs: list[dict]) -> str:
    """What was trained, on which text, where, and how the recipes end."""
    first, (mean, spread) = runs[0], band(runs)[(last := max(band(runs)))]
    text, seeds = first["corpus"], sum(map(is_bf16, runs))
    planned = "" if last == first["tokens"] else f" of {first['tokens'] / 1e6:,.0f} M planned ones"
    places = dict.fromkeys(
        f"{run['device']} at {(run['commit'] or 'unknown')[:7]}, torch {run['torch']}, {run['date']}" for run in runs
    )
    sizes = (
        f"{first['parameters'] / 1e9:.2f} B parameters, {first['active'] / 1e9:.2f} B of them active: "
        f"{first['layers']} layers of width {first['dim']:,}, {first['experts']} experts of width {first['hidden']}, "
        f"{first['top_k']} for each token"
    )
    return (
        f"`bench/pretrain.py` trains a model of {sizes}. Each run reads {last / 1e6:,.1f} M tokens{planned} in steps "
        f"of {first['batch']} x {first['context']:,}, of the Python sources and documentation of installed packages. A "
        f"token is a byte. The {text['train'] / 1e6:,.0f} MB of training text contain no text twice, and nothing of "
        f"the {text['held_out'] / 1e6:,.1f} MB that are held out. The learning rate warms up to {first['lr']:g} and "
        f"decays to a tenth of it. {'; '.join(places)}.\n\n"
        f"BF16 ran with {seeds} seeds, which decide the first weights and the order of the data. Its held-out losses "
        f"end at {mean:.4f} on average, with a spread of {spread:.4f} ({spread / mean:.2%}) from the smallest to the "
        f"largest. A recipe is within the band if it ends no further from the average than this spread. "
        f"{verdict(runs)} {beside_same_seed(runs)}"
    )


def table(runs: list[dict]) -> str:
    """A row for each run: how it ended, and the worst layer of its last sample."""
    found, of_all = compared(runs), curves(runs)
    mean = band(runs)[last := max(of_all[0])][0]
    body = []
    for run, curve in zip(runs, of_all, strict=True):
        of_seed = found.get(label(run), {}).get("of_seed")
        norms = [norm for at, norm, _ in run["gradient_norms"] if last / 2 < at <= last]
        sample = run["stats"][-1]
        cells = [f"`{label(run)}`, seed {run['seed']}", f"{curve[last]:.4f}", f"{curve[last] / mean - 1:+.2%}"]
        cells.append(f"{of_seed / (curve[last] - of_seed):+.2%}" if of_seed is not None else "")
        cells.append(f"{fmean(norms):.3f}" if norms else "")
        for name in ("gradients/underflow", "gradients/wgrad_underflow", "tokens/wgrad_underflow"):
            cells.append(f"{sample[name]:.2%}" if name in sample else "")
        cells.append(f"{sample['product_sqnr']:.1f} dB" if "product_sqnr" in sample else "")
        body.append([*cells, f"{run['tokens_per_second']:,}" if run["tokens_per_second"] else ""])
    headings = "recipe", "held-out loss", "from BF16's mean", "from the same seed", "gradient norm"
    headings += "gradients that underflow", "in wgrad", "tokens, in wgrad", "SQNR of a product", "tokens/s"
    align = ["left"] + ["right"] * (len(headings) - 1)
    return tabulate(body, headings, tablefmt="github", colalign=align, disable_numparse=True)


def text(runs: list[dict]) -> str:
    note = (
        "The gradient norm is a mean over the second half of the run, before clipping to 1. Underflow and SQNR are of "
        "the worst layer in the last sample ([statistics](stats.md))."
    )
    parts = [textwrap.fill(part, 120) for part in words(runs).split("\n\n")]
    return "\n\n".join([*parts, table(runs), textwrap.fill(note, 120)])
