"""Bench results as a table, a JSON file and a plot, and the results section of the README.

`python bench/report.py` writes that section from bench/results/*.json; with --check it only says whether it is current.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "bench" / "results"
BEGIN, END = "<!-- results: begin (make bench, then python bench/report.py) -->", "<!-- results: end -->"

# Column: heading, key of the row, format. A column that no row fills is left out.
COLUMNS = (
    ("op", "op", "s"),
    ("shape", "shape", "s"),
    ("us", "us", ",.1f"),
    ("GB/s", "gbps", ",.4g"),
    ("of copy", "of_copy", ".3f"),
    ("TFLOPS", "tflops", ",.4g"),
    ("x baseline", "ratio", ".2f"),
    ("B kept", "kept", ".2f"),
    ("host us", "host_us", ".1f"),
)
HEADING = {key: heading for heading, key, _ in COLUMNS}
LEGEND = (
    "of copy: bytes read once and written once, padding included, over the bandwidth of a large `copy_` in the same "
    "run. x baseline: speed relative to dense FP8 `torch._scaled_mm` of the same size (scaled_grouped_mm), to BF16 "
    "`torch._grouped_mm`, forward and backward (grouped_mm), or to torch's stable argsort, histc and cumsum "
    "(sort_tokens). B kept: bytes saved for backward per element of the "
    "activation. host us: CPU time to issue one eager call. Shapes are those of bench/shapes.json."
)
# Hardware that every change is compiled for, by the name that a results file would carry.
HARDWARE = (("H200", "sm_90a"), ("B200", "sm_100a"), ("MI300", "gfx942"), ("MI355", "gfx950"))


def target_text(row: dict) -> str:
    return ", ".join(f"{HEADING[target['metric']]} {target['sense']} {target['bound']:g}" for target in row["targets"])


def verdict(row: dict) -> str:
    if "error" in row:
        return row["error"]
    missed = [HEADING[target["metric"]] for target in row["targets"] if not target["met"]]
    return f"FAIL: {', '.join(missed)}" if missed else "pass" if row["targets"] else ""


def table(rows: list[dict], style: str = "simple") -> str:
    peers = sorted({name for row in rows for name in row.get("peers", {})})
    flat = [{**row, **{f"{name} us": us for name, us in row.get("peers", {}).items()}} for row in rows]
    columns = [*COLUMNS, *((f"{name} us", f"{name} us", ",.1f") for name in peers)]
    columns = [column for column in columns if any(row.get(column[1]) is not None for row in flat)]
    body = [
        [format(row[key], spec) if row.get(key) is not None else "" for _, key, spec in columns]
        + [target_text(row), verdict(row)]
        for row in flat
    ]
    headings = [heading for heading, _, _ in columns] + ["target", "result"]
    align = ["left" if spec == "s" else "right" for _, _, spec in columns] + ["left", "left"]
    return tabulate(body, headings, tablefmt=style, colalign=align, disable_numparse=True)


def summary(result: dict) -> str:
    bounded = [row for row in result["rows"] if row["targets"]]
    return f"{sum(verdict(row) == 'pass' for row in bounded)} of {len(bounded)} rows meet their targets"


def stem(result: dict) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "_", f"{result['device']}-{result['torch']}")


def save(result: dict, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem(result)}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    plot(result, path.with_suffix(".png"))
    return path


def plot(result: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [("of_copy", "fraction of copy bandwidth"), ("ratio", "speed relative to baseline")]
    rows = {metric: [row for row in result["rows"] if row.get(metric) is not None] for metric, _ in panels}
    height = 1.5 + 0.24 * max(len(found) for found in rows.values())
    figure, axes = pyplot.subplots(1, len(panels), figsize=(14, height), layout="constrained")
    for axis, (metric, title) in zip(axes, panels, strict=True):
        ops = list(dict.fromkeys(row["op"] for row in rows[metric]))
        for y, row in enumerate(rows[metric]):
            axis.barh(y, row[metric], color=f"C{ops.index(row['op'])}")
            for target in row["targets"]:
                if target["metric"] == metric:
                    axis.plot(target["bound"], y, "k|", markersize=10)
        axis.set_yticks(range(len(rows[metric])), [f"{row['op']} {row['shape']}" for row in rows[metric]], fontsize=8)
        axis.axvline(1, color="gray", linewidth=0.8)
        axis.set_xlabel(f"{title} (black mark: target)")
        axis.invert_yaxis()
    figure.suptitle(f"{result['device']}, torch {result['torch']}")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def origin(result: dict) -> str:
    """One sentence on where and when the figures come from."""
    known = [
        f"{label} {result[key]}" if label else result[key]
        for label, key in (("", "device"), ("torch", "torch"), ("", "toolkit"), ("driver", "driver"), ("", "date"))
        if result.get(key)
    ]
    commit = (result["commit"] or "unknown")[:12] + (" with local changes" if result["dirty"] else "")
    text = f"{', '.join(known)}, commit {commit}. A large copy_ moved {result['copy_gbps']:,.0f} GB/s."
    if "relu_host_us" in result:
        text += f" An eager torch.relu, one output and one launch, took {result['relu_host_us']:.1f} us of the host."
    return text


def readme_section(results: dict[str, dict]) -> str:
    parts = []
    for name, result in results.items():
        training = [row for row in result["rows"] if row["op"] == "grouped_mm"]
        sizes = [{**row, "shape": row["shape"] + " " + str([*row["dims"].values()])} for row in training]
        parts += [
            f"{origin(result)} {summary(result)}.",
            "`grouped_mm`, recipe `rowwise`, forward and backward; sizes are [M, K, N, E]:",
            table(sizes, "github"),
            f"<details><summary>Every op</summary>\n\n{table(result['rows'], 'github')}\n\n</details>",
            f"![Fraction of copy bandwidth and speed relative to the baselines](bench/results/{name}.png)",
        ]
    parts.append(LEGEND if results else "No results are recorded yet: `make bench` on a GPU makes them.")
    devices = " ".join(result["device"] for result in results.values())
    status = [(name, arch, "measured" if name in devices else "compiled, not run") for name, arch in HARDWARE]
    parts.append(tabulate(status, ("hardware", "built for", "status"), tablefmt="github"))
    return "\n\n".join(parts)


def current_readme() -> str:
    """The README with its results section made anew."""
    results = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    text = README.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"README.md must hold these two lines once each: {BEGIN} and {END}")
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n\n{readme_section(results)}\n\n{END}{rest.split(END)[1]}"


def readme_is_current() -> bool:
    return README.read_text() == current_readme()


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the results section of README.md from bench/results/*.json.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the section is out of date")
    if not parser.parse_args().check:
        README.write_text(current_readme())
    elif not readme_is_current():
        sys.exit("README.md: the results section is out of date, run: python bench/report.py")


if __name__ == "__main__":
    main()
