"""Makes tables and pictures from bench results, and parts of the documents from these.

`python bench/report.py` writes bench/results/README.md, docs/pictures and the marked parts of README.md and of docs/
from bench/results/*.json and from the table of GEMMs (matrix.py); with --check it only says whether the texts are
current.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import textwrap
from collections import Counter
from pathlib import Path
from statistics import median

import beside_tables
import headline
import losses
import matrix
import tables
import whole_tables
from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
DRAWN = ROOT / "docs" / "pictures"

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
  to `permute_quantized` and the product of the moved rows (scaled_grouped_mm by index),
  to `scaled_grouped_mm` to float32 (add_scaled_grouped_mm), to BF16 `torch._grouped_mm`, forward and backward
  (grouped_mm), to a layer of torch's own ops in BF16 around that (experts), to Transformers' own `grouped_mm`
  (transformers_experts), to torch's stable argsort, histc and cumsum (sort_tokens), or to torch's own ops in float32
  (choose_experts; router, forward and backward).
- x torch FP8: speed relative to `torch._scaled_grouped_mm`, in turns.
- weights reused: within `reuse_weights`, a weight that is quantized already.
- B kept: bytes kept for the gradient of the weights, for each element of the activation, scales and padding included.
- host us: CPU time to issue one eager call; x relu: the same over the time of an eager `torch.relu` in the same run.
- torchao, DeepGEMM, torch FP8, torch BF16: microseconds of the same work elsewhere, `-` where it was not installed,
  does not run on this GPU or was not timed. torchao pads nothing and, but for rowwise, knows no groups; DeepGEMM takes
  groups of whole tiles, and is told the group of every row.
- Sizes come from bench/shapes.json; for `grouped_mm` they are [M, K, N, E]."""
FORCED = """\
`MOE_FP8_GEMM={gemm}` forced every product of this run into the GEMM for all GPUs. Tests use that variable. A Hopper GPU
takes this GEMM by itself only for sizes and types that its own kernels do not take."""
# Hardware for which every change is compiled, by its name in a results file.
HARDWARE = (
    *(("A100", "sm_80"), ("L40S", "sm_89"), ("H200", "sm_90a"), ("B200", "sm_100a"), ("RTX PRO", "sm_120")),
    *(("MI300", "gfx942"), ("MI355", "gfx950")),
)


PICTURES = {
    "layer_speed": "Speed of an MoE layer over BF16, by model",
    "layer_memory": "Activations that a layer keeps for backward, by model",
    "waterfall": "Where a step of training goes, by model",
    "products": "Speed of grouped_mm over BF16, by model and recipe",
    "casts": "Fraction of copy bandwidth by family of ops",
    "losses": "Held-out loss of a MoE language model by recipe",
}
# What a page of results shows first, second and so on: a heading, and what the ops of its rows begin with.
PARTS = {
    "The layer: forward and backward of `experts`, by recipe": ("experts ",),
    "Experts of Transformers": ("transformers_",),
    "Forward and backward of `grouped_mm`, by recipe": ("grouped_mm",),
    "Products": ("scaled_grouped_mm", "add_scaled_grouped_mm"),
    "All other ops": ("",),
}


def picture(name: str, page: Path) -> str:
    """A line that shows a picture on a page, or nothing before the picture was drawn."""
    path = DRAWN / f"{name}.png"
    return f"![{PICTURES[name]}]({Path(os.path.relpath(path, page.parent)).as_posix()})" if path.exists() else ""


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
    """The results, by the stem of their file. Results of a forced GEMM, which no GPU takes by itself, come last."""
    others = beside_tables.BESIDE, tables.TITAN, tables.PARALLEL, tables.PARALLEL_LOSSES, tables.AUTO
    others += tables.PROFILE, tables.FINETUNE, tables.FINETUNE_LOSSES, tables.MEGATRON, tables.WHOLE, tables.STATS
    others += tables.DECODE, tables.AUTO_FORWARD, tables.ADAPTERS, tables.SHARED
    found = {p.stem: json.loads(p.read_text()) for p in sorted(RESULTS.glob("*.json")) if p.name not in others}
    return dict(sorted(found.items(), key=lambda item: "gemm" in item[1]))


def usual(results: dict[str, dict]) -> dict[str, dict]:
    """The results without results of a forced GEMM."""
    return {stem: result for stem, result in results.items() if "gemm" not in result}


def recorded_alone(name: str) -> dict | None:
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else None


def parts_of(rows: list[dict]) -> dict[str, list[dict]]:
    """The rows under the headings of PARTS; each row is under the first heading that takes it."""
    found: dict[str, list[dict]] = {heading: [] for heading in PARTS}
    for row in rows:
        found[next(heading for heading, starts in PARTS.items() if row["op"].startswith(starts))].append(row)
    return {heading: held for heading, held in found.items() if held}


def title_of(result: dict) -> str:
    if "gemm" not in result:
        return f"## {result['device']}"
    return f"## The fallback `{result['gemm']}` on {result['device']}"


def results_page(results: dict[str, dict]) -> str:
    page = RESULTS / "README.md"
    parts = ["# Results", "Written by `make bench`, or `python bench/report.py`, from the JSON files beside it."]
    parts += filter(None, (picture(name, page) for name in PICTURES))
    for result in results.values():
        parts.append(title_of(result))
        if "gemm" in result:
            parts.append(FORCED.format(gemm=result["gemm"]))
        parts.append(textwrap.fill(f"{origin(result)} {summary(result)}.", 120))
        for heading, rows in parts_of(result["rows"]).items():
            shown = [row | {"shape": f"{row['shape']} {[*row['dims'].values()]}"} for row in rows]
            parts += [f"### {heading}", table(rows if heading == [*PARTS][-1] else shown, "github")]
    devices = " ".join(result["device"] for result in results.values())
    status = [(name, arch, "measured" if name in devices else "compiled, not run") for name, arch in HARDWARE]
    parts += ["## What the columns say", LEGEND]
    parts += ["## Hardware", tabulate(status, ("hardware", "built for", "status"), tablefmt="github")]
    return "\n\n".join(parts) + "\n"


def losses_text(page: Path) -> str:
    runs = losses.recorded(RESULTS)
    return "\n\n".join(filter(None, (picture("losses", page), runs and losses.text(runs))))


def replaced(document: str, name: str, text: str) -> str:
    """The document with a new text in the part of this name."""
    begin, end = f"<!-- {name}: begin (python bench/report.py) -->", f"<!-- {name}: end -->"
    if document.count(begin) != 1 or document.count(end) != 1:
        raise ValueError(f"a document must hold these two lines once each: {begin} and {end}")
    head, rest = document.split(begin)
    return f"{head}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}"


def documents() -> dict[Path, str]:
    """Every text that is made from results or from the table of GEMMs."""
    everything, beside = recorded(), recorded_alone(beside_tables.BESIDE)
    results, docs = usual(everything), ROOT / "docs"
    parallel = recorded_alone(tables.PARALLEL), recorded_alone(tables.PARALLEL_LOSSES)
    finetuned = recorded_alone(tables.FINETUNE), recorded_alone(tables.FINETUNE_LOSSES)
    whole, waterfall = recorded_alone(tables.WHOLE), picture("waterfall", docs / "performance.md")
    layer_gains = {layer[1:]: gain for layer, gain in headline.over_torch(results, whole)[0].items()}
    made: dict[Path, dict[str, str]] = {  # page: its marked parts
        ROOT / "README.md": {"figures": headline.text(results, beside_tables.sonicmoe(beside), whole, finetuned[0])},
        docs / "performance.md": {
            "layer": tables.layer_table(results),
            "whole models": whole_tables.text(whole, layer_gains, waterfall),
            "profile": tables.profile_text(recorded_alone(tables.PROFILE)),
        },
        docs / "beside.md": {"beside": beside_tables.text(beside)},
        docs / "recipes.md": {
            "recipes": "\n\n".join(
                filter(None, (picture("products", docs / "recipes.md"), tables.recipe_table(results)))
            ),
            "losses": losses_text(docs / "recipes.md"),
        },
        docs / "gpus.md": {"matrix": matrix.markdown(results), "forced": matrix.forced(everything)},
        docs / "stats.md": {"stats": tables.stats_text(recorded_alone(tables.STATS))},
        docs / "layer.md": {
            "adapters": tables.adapters_text(recorded_alone(tables.ADAPTERS)),
            "shared experts": tables.shared_text(recorded_alone(tables.SHARED)),
        },
        docs / "ops.md": {"generic": tables.generic_table(results)},
        docs / "transformers.md": {
            "transformers": tables.adoption_table(results),
            "decode": tables.decode_text(recorded_alone(tables.DECODE)),
        },
        docs / "finetuning.md": {"fine-tuning": tables.finetune_text(*finetuned)},
        docs / "megatron.md": {"speed": tables.megatron_text(recorded_alone(tables.MEGATRON))},
        docs / "torchtitan.md": {"torchtitan": tables.titan_text(recorded_alone(tables.TITAN))},
        docs / "expert-parallel.md": {"expert parallelism": tables.parallel_text(*parallel)},
    }
    texts = {RESULTS / "README.md": results_page(everything)}
    for page, parts in made.items():
        texts[page] = page.read_text()
        for name, text in parts.items():
            texts[page] = replaced(texts[page], name, text)
    return texts


def outdated() -> list[str]:
    """Documents whose text differs from the text that `write` would make."""
    return [
        str(path.relative_to(ROOT))
        for path, text in documents().items()
        if not path.exists() or path.read_text() != text
    ]


def write() -> None:
    import figures

    sonicmoe = beside_tables.sonicmoe(recorded_alone(beside_tables.BESIDE))
    figures.draw(usual(recorded()), losses.recorded(RESULTS), sonicmoe, recorded_alone(tables.WHOLE), DRAWN)
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
