"""Makes tables and pictures from bench results, and parts of the documents from these.

`python bench/report.py` reads bench/results/*.json and the table of GEMMs (matrix.py). It writes
bench/results/README.md, the pictures beside it, and the marked parts of README.md and of docs/. With --check it only
tells whether the texts are current.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections import Counter
from pathlib import Path
from statistics import fmean, median

import matrix
import tables
from case import commits_of, training_rows
from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
LOSSES = "losses.json"  # from examples/train_moe_lm.py --losses; files not named here are from bench/run.py

# Column: heading, key of the row, format. A column that no row fills is left out.
COLUMNS = (
    ("op", "op", "s"),
    ("shape", "shape", "s"),
    ("groups", "groups", "s"),
    ("us", "us", ",.1f"),
    ("GB/s", "gbps", ",.4g"),
    ("of copy", "of_copy", ".3f"),
    ("of even", "of_even", ".2f"),
    ("TFLOPS", "tflops", ",.4g"),
    ("x baseline", "ratio", ".2f"),
    ("x torch FP8", "over_torch_fp8", ".2f"),
    ("B kept", "kept", ".2f"),
    ("host us", "host_us", ".1f"),
    ("x relu", "host_relu", ".2f"),
)
HEADING = {key: heading for heading, key, _ in COLUMNS}
LEGEND = """\
- groups: sizes of the groups of tokens, all the same (even), falling as 1 / rank (zipf) or as 1 / rank ** p (zipf p),
  or 0.9 of all tokens in one (one).
- of copy: bytes read once and written once, padding included, over the bandwidth of a large `copy_` in the same run.
- of even: speed relative to even groups, in the same run.
- x baseline: speed relative to dense FP8 `torch._scaled_mm` of the same size with scales of rows (scaled_grouped_mm),
  to `permute_quantized` and the product of what that moves (scaled_grouped_mm by index),
  to `scaled_grouped_mm` to float32 (add_scaled_grouped_mm), to BF16 `torch._grouped_mm`, forward and backward
  (grouped_mm), to a layer of torch's own ops in BF16 around that (experts), to Transformers' own `grouped_mm`
  (transformers_experts, transformers_step), to torch's stable argsort, histc and cumsum (sort_tokens), or to torch's
  own ops in float32 (choose_experts; router, forward and backward).
- x torch FP8: speed relative to `torch._scaled_grouped_mm`, in turns.
- weights reused: within `reuse_weights`, a weight that is quantized already.
- B kept: bytes kept for the gradient of the weights, scales and padding included, an element of the activation.
- host us: CPU time to issue one eager call; x relu: the same over that of an eager `torch.relu` in the same run.
- torchao, DeepGEMM, torch FP8, torch BF16: microseconds of the same work elsewhere, `-` where it was not installed,
  does not run on this GPU or was not timed. torchao pads nothing and, but for rowwise, knows no groups; DeepGEMM takes
  groups of whole tiles, and is told the group of every row.
- Sizes are those of bench/shapes.json; those of `grouped_mm` are [M, K, N, E]."""
# Hardware for which every change is compiled, by its name in a results file.
HARDWARE = (
    *(("A100", "sm_80"), ("L40S", "sm_89"), ("H200", "sm_90a"), ("B200", "sm_100a"), ("RTX PRO", "sm_120")),
    *(("MI300", "gfx942"), ("MI355", "gfx950")),
)


GROUPS = (("even", "with even groups"), ("zipf", "with uneven ones"))
PICTURES = {
    "losses": "Training loss of a small MoE language model by recipe",
    "speed": "Speed of grouped_mm over BF16 by model and recipe",
    "casts": "Fraction of copy bandwidth by family of ops",
}


def image(name: str, folder: Path = Path()) -> str:
    return f"![{PICTURES[name]}]({folder / name}.png)"


def drawn(name: str) -> bool:
    return (RESULTS / f"{name}.png").exists()


def target_text(row: dict) -> str:
    return ", ".join(f"{HEADING[target['metric']]} {target['sense']} {target['bound']:g}" for target in row["targets"])


def verdict(row: dict) -> str:
    if "error" in row:
        return row["error"]
    missed = [HEADING[target["metric"]] for target in row["targets"] if not target["met"]]
    return f"FAIL: {', '.join(missed)}" if missed else "pass" if row["targets"] else ""


def table(rows: list[dict], style: str = "simple") -> str:
    peers = ["torchao", *sorted({name for row in rows for name in row.get("peers", {})} - {"torchao"})]
    flat = [{**row, **{f"{name} us": us for name, us in row.get("peers", {}).items()}} for row in rows]
    columns = [column for column in COLUMNS if any(row.get(column[1]) is not None for row in flat)]
    columns += [(f"{name} us", f"{name} us", ",.1f") for name in peers]
    body = [
        [
            format(row[key], spec) if row.get(key) is not None else "-" if key not in HEADING else ""
            for _, key, spec in columns
        ]
        + [target_text(row), verdict(row)]
        for row in flat
    ]
    headings = [heading for heading, _, _ in columns] + ["target", "result"]
    align = ["left" if spec == "s" else "right" for _, _, spec in columns] + ["left", "left"]
    return tabulate(body, headings, tablefmt=style, colalign=align, disable_numparse=True)


def summary(result: dict) -> str:
    bounded = [row for row in result["rows"] if row["targets"]]
    return f"{sum(verdict(row) == 'pass' for row in bounded)} of {len(bounded)} rows meet their targets"


def commit_of(result: dict) -> str:
    return (result["commit"] or "unknown")[:12] + (" with local changes" if result["dirty"] else "")


def origin(result: dict) -> str:
    """One sentence on where and when the figures come from."""
    known = [
        f"{label} {result[key]}" if label else result[key]
        for label, key in (("", "device"), ("torch", "torch"), ("", "toolkit"), ("driver", "driver"), ("", "date"))
        if result.get(key)
    ]
    text = f"{', '.join(known)}, commit {commit_of(result)}. A large copy_ moved {result['copy_gbps']:,.0f} GB/s."
    if relu := [row["relu_host_us"] for row in result["rows"] if "relu_host_us" in row]:
        text += f" An eager torch.relu, one output and one launch, took {median(relu):.1f} us of the host."
    again = Counter(row["commit"][:12] for row in result["rows"] if row.get("commit"))
    return text + "".join(f" {count} rows are of {commit}." for commit, count in again.items())


def renewed(result: dict, later: dict) -> dict:
    """A result whose rows are replaced by rows of a later run. Each row names its commit."""
    key = lambda row: (row["op"], row["shape"], row["groups"])  # noqa: E731
    rows = {key(row): row for row in result["rows"]}
    rows |= {key(row): row | {"commit": later["commit"]} for row in later["rows"]}
    return result | {"rows": [*rows.values()]}


def save(result: dict, folder: Path) -> Path:
    forced = f"-{result['gemm']}" if "gemm" in result else ""
    name = re.sub(r"[^A-Za-z0-9.-]+", "_", f"{result['device']}-{result['torch']}{forced}")
    path = folder / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def recorded() -> dict[str, dict]:
    """The results, by the stem of their file."""
    others = LOSSES, tables.TITAN, tables.PARALLEL, tables.PARALLEL_LOSSES, tables.SONICMOE, tables.AUTO
    return {p.stem: json.loads(p.read_text()) for p in sorted(RESULTS.glob("*.json")) if p.name not in others}


def recorded_alone(name: str) -> dict | None:
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else None


def results_page(results: dict[str, dict]) -> str:
    parts = ["# Results", "Written by `make bench`, or `python bench/report.py`, from the JSON files beside it."]
    for result in results.values():
        training = [row for row in result["rows"] if row["op"].startswith("grouped_mm")]
        training = [row | {"shape": f"{row['shape']} {[*row['dims'].values()]}"} for row in training]
        others = [row for row in result["rows"] if not row["op"].startswith("grouped_mm")]
        parts += [
            f"## {result['device']}" + (f", every product by `{result['gemm']}`" if "gemm" in result else ""),
            textwrap.fill(f"{origin(result)} {summary(result)}.", 120),
            *(("Forward and backward of `grouped_mm`, by recipe:", table(training, "github")) if training else ()),
            *(("Every op:", table(others, "github")) if others else ()),
        ]
    pictures = [image(name) for name in PICTURES if drawn(name)]
    devices = " ".join(result["device"] for result in results.values())
    status = [(name, arch, "measured" if name in devices else "compiled, not run") for name, arch in HARDWARE]
    parts += [*pictures, "## What the columns say", LEGEND]
    parts += ["## Hardware", tabulate(status, ("hardware", "built for", "status"), tablefmt="github")]
    return "\n\n".join(parts) + "\n"


def speeds(rows: list[dict]) -> str:
    """Speeds by recipe, relative to the baseline of the rows."""
    by_recipe = []
    for op in dict.fromkeys(row["op"] for row in rows):
        found = {name: [r["ratio"] for r in rows if (r["op"], r["groups"]) == (op, key)] for key, name in GROUPS}
        ranges = [f"{min(ratios):.2f} to {max(ratios):.2f} {name}" for name, ratios in found.items() if ratios]
        by_recipe.append(f"`{op.split()[1]}` {', '.join(ranges)}")
    return "; ".join(by_recipe)


def sentences_of(losses: dict) -> str:
    """The final difference of each recipe from BF16, and where each was trained."""
    runs, trained = {run["recipe"]: run for run in losses["runs"]}, {}
    for recipe, run in runs.items():
        trained.setdefault(f"{run['device']} at {(run['commit'] or 'unknown')[:7]}, {run['date']}", []).append(recipe)
    held_out = {recipe: run["held_out"] for recipe, run in runs.items()}
    last = {recipe: fmean(run["losses"][-100:]) for recipe, run in runs.items()}
    differences = [
        ", ".join(f"`{recipe}` {of[recipe] / of['bf16'] - 1:+.2%}" for recipe in runs if recipe != "bf16")
        for of in (held_out, last)
    ]
    places = "; ".join(f"{', '.join(f'`{r}`' for r in recipes)} on {place}" for place, recipes in trained.items())
    return (
        f"Held-out loss against BF16's {held_out['bf16']:.3f}, after {losses['steps']} steps of one seed: "
        f"{differences[0]}; training loss of the last 100 steps against {last['bf16']:.3f}: {differences[1]}. {places}."
    )


def first_screen(results: dict[str, dict]) -> str:
    """The two pictures of README.md, and the sentences that state their numbers."""
    parts = ["\n".join(image(name, RESULTS.relative_to(ROOT)) for name in ("losses", "speed") if drawn(name))]
    if losses := recorded_alone(LOSSES):
        parts.append(sentences_of(losses))
    for result in results.values():
        rows = training_rows(result)
        if rows:
            parts.append(
                f"Speed of forward and backward over BF16 `torch._grouped_mm` on {result['device']} at "
                f"{commits_of(rows, result)}, by layer: {speeds(rows)}. "
                "[Every figure](bench/results/README.md)."
            )
        layers = [row for row in result["rows"] if row["op"].startswith("experts ") and row.get("ratio")]
        if layers:
            parts.append(
                f"Speed of a whole MoE layer on {result['device']} at {commits_of(layers, result)}, `experts`, over "
                f"torch's own ops in BF16 around `torch._grouped_mm`: {speeds(layers)}."
            )
        slow = [r for r in rows if r["op"] == "grouped_mm rowwise" and round(r["ratio"], 2) < 1]
        listed = [f"{r['shape']} {[*r['dims'].values()]} {dict(GROUPS)[r['groups']]} {r['ratio']:.2f}" for r in slow]
        if slow:
            parts.append(f"Slower than BF16 with `rowwise`, at [M, K, N, E]: {', '.join(listed)}.")
    return "\n\n".join(textwrap.fill(part, 120) if "![" not in part else part for part in parts if part)


def replaced(document: str, name: str, text: str) -> str:
    """The document with a new text in the part of this name."""
    begin, end = f"<!-- {name}: begin (python bench/report.py) -->", f"<!-- {name}: end -->"
    if document.count(begin) != 1 or document.count(end) != 1:
        raise ValueError(f"a document must hold these two lines once each: {begin} and {end}")
    head, rest = document.split(begin)
    return f"{head}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}"


def documents() -> dict[Path, str]:
    """Every text that is made from results or from the table of GEMMs."""
    results, readme = recorded(), ROOT / "README.md"
    pages = "ops", "layer", "adoption", "expert-parallel"
    ops, layer, adoption, parallel = (ROOT / "docs" / f"{page}.md" for page in pages)
    with_figures = replaced(readme.read_text(), "figures", first_screen(results))
    with_recipes = replaced(adoption.read_text(), "recipes", tables.recipe_table(results))
    with_models = replaced(with_recipes, "transformers", tables.adoption_tables(results))
    return {
        RESULTS / "README.md": results_page(results),
        readme: replaced(with_figures, "matrix", matrix.markdown(results)),
        ops: replaced(ops.read_text(), "generic", tables.generic_table(results)),
        layer: replaced(layer.read_text(), "layer", tables.layer_table(results, recorded_alone(tables.SONICMOE))),
        adoption: replaced(with_models, "torchtitan", tables.titan_text(recorded_alone(tables.TITAN))),
        parallel: replaced(
            parallel.read_text(),
            "expert parallelism",
            tables.parallel_text(recorded_alone(tables.PARALLEL), recorded_alone(tables.PARALLEL_LOSSES)),
        ),
    }


def outdated() -> list[str]:
    """Documents whose text differs from the text that `write` would make."""
    return [
        str(path.relative_to(ROOT))
        for path, text in documents().items()
        if not path.exists() or path.read_text() != text
    ]


def write() -> None:
    import figures

    figures.draw(recorded(), recorded_alone(LOSSES), RESULTS)
    for path, text in documents().items():
        path.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a text is out of date")
    if not parser.parse_args().check:
        write()
    elif old := outdated():
        sys.exit(f"out of date: {', '.join(old)}; run: python bench/report.py")


if __name__ == "__main__":
    main()
