"""The tables of docs/beside.md, from the file of bench/beside.py."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from statistics import median

from case import EVEN, is_uneven
from models import layer_name, named, product_name
from tabulate import tabulate

BESIDE = "beside.json"  # from bench/beside.py
OURS = "rowwise", "blockwise"  # the better of these is compared
SONICMOE = "SonicMoE BF16"
# Variants in FP8 whose scales are as fine as ours, a row or a block each.
AS_FINE = "TE blocks", "TE blocks, grouped tensors", "torchao rowwise", "torchao blockwise over DeepGEMM"
GOALS = {"product": 1.2, "experts": 1.4, "moe": 1.4}
HEADINGS = {"product": "M, K, N, E", "experts": "T, D, F, E, top_k", "moe": "T, D, F, E, top_k"}
TITLES = {
    "product": "### Products: forward and backward of a grouped linear layer",
    "experts": "### Layers, for given ids and scores",
    "moe": "### Layers with their router",
}
WHY = {
    "TE per tensor": "it has one scale for a whole tensor, so its casts look for no amax of a row or a block, and its "
    "products multiply by a scale once, at their end",
    "torchao rowwise": "it rounds scales to powers of two and has them per group and column, like ours; its products "
    "are torch's",
}
NOT_MEASURED = f"Not measured yet: `python bench/beside.py --out bench/results/{BESIDE}` on a GPU fills this part."

Row = dict


def of_kind(result: dict | None, kind: str) -> list[Row]:
    return [row for row in result["rows"] if row["kind"] == kind] if result else []


def medians(row: Row) -> dict[str, float]:
    return {name: median(rounds) for name, rounds in row["us"].items()}


def ratios(row: Row) -> dict[str, float]:
    """How many times as long as the better of ours each variant took in turns with ours."""
    us = medians(row)
    best = min(us[name] for name in OURS)
    return {name: time / best for name, time in us.items() if name not in OURS}


def places(rows: Iterable[Row]) -> list[tuple[str, str]]:
    """Sizes and groups that have figures."""
    return [*dict.fromkeys((row["sizes"], row["groups"]) for row in rows if "us" in row)]


def size_of(row: Row) -> str:
    dims = row["dims"]
    name = product_name(*dims[1:]) if row["kind"] == "product" else layer_name(*dims[1:])
    return f"{named(name, dims)}{', uneven' if is_uneven(row['groups']) else ''}"


def where(rows: Iterable[Row]) -> str:
    found = dict.fromkeys(f"{row['device']} at {(row['commit'] or 'unknown')[:7]}" for row in rows if "us" in row)
    return " and ".join(found)


def markdown(headings: list[str], body: list[list[str]]) -> str:
    align = ["left", *["right"] * (len(headings) - 1)]
    return tabulate(body, headings, tablefmt="github", colalign=align, disable_numparse=True)


def variants_of(rows: list[Row]) -> tuple[list[str], list[str]]:
    """Names of ours and of the others, as far as one row has figures."""
    names = [*dict.fromkeys(name for row in rows for name in row.get("us", {}))]
    ours = [name for name in names if name == "bf16" or name.split(",")[0] in OURS]
    return ours, [name for name in names if name not in ours]


def times_table(rows: list[Row]) -> str:
    kind = rows[0]["kind"]
    ours, others = variants_of(rows)
    body = []
    for place in places(rows):
        same = [row for row in rows if (row["sizes"], row["groups"]) == place and "us" in row]
        us, over = [medians(row) for row in same], {}
        for row in same:
            over |= {name: (medians(row)[name], ratio) for name, ratio in ratios(row).items()}
        found = {name: [times[name] for times in us if name in times] for name in ours}
        cells = [f"{median(times):,.0f}" if times else "-" for times in found.values()]
        cells += ["{:,.0f} ({:.2f} x)".format(*over[name]) if name in over else "-" for name in others]
        counted = [over[name][1] for name in others if name in over and (kind != "product" or name in AS_FINE)]
        cells.append(f"{min(counted):.2f} x" if counted else "-")
        body.append([size_of(same[0]), *cells])
    goal = f"best {'as fine' if kind == 'product' else 'other'} over ours (goal: {GOALS[kind]:g} x)"
    return markdown([HEADINGS[kind], *ours, *others, goal], body)


def said_of_spread(rows: list[Row]) -> str:
    found = [rounds for row in rows for rounds in row.get("us", {}).values() if len(rounds) > 1]
    if not found:
        return ""
    spread = max((max(rounds) - min(rounds)) / median(rounds) for rounds in found)
    return f" A figure is the median of rounds that differ by up to {spread:.0%}."


def host_table(rows: list[Row]) -> str:
    """Host time of a call with few tokens, and memory kept for backward, with even groups."""
    ours, others = variants_of(rows)
    body = []
    for place in places(row for row in rows if row["groups"] == EVEN):
        same = [row for row in rows if (row["sizes"], row["groups"]) == place and "us" in row]
        cells = []
        for name in (*ours, *others):
            host = [row["host_us"][name] for row in same if name in row["host_us"]]
            kept = [row["kept_mib"][name] for row in same if name in row["kept_mib"]]
            both = [f"{median(found):,.0f}" if found else "-" for found in (host, kept)]
            cells.append(" / ".join(both))
        body.append([size_of(same[0]), *cells])
    return markdown([HEADINGS[rows[0]["kind"]], *ours, *others], body)


def not_run(rows: list[Row]) -> list[str]:
    """What has no figures, and why, with the sizes."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        failed = {row["rival"]: row["error"]} if "error" in row else row.get("not_run", {})
        for name, why in failed.items():
            found.setdefault((name, why.replace("`", "'")), []).append(size_of(row))
    every = len({(row["sizes"], row["groups"]) for row in rows})
    lines = [
        f"- {name}, {'all sizes' if len(sizes) == every else '; '.join(sizes)}: `{why}`"
        for (name, why), sizes in found.items()
    ]
    return [textwrap.fill(line, 120, subsequent_indent="  ", break_on_hyphens=False) for line in lines]


def faster(rows: list[Row]) -> list[str]:
    """Where another took less time than ours, and why."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for name, ratio in ratios(row).items() if "us" in row else ():
            if ratio < 1 and variants_of([row])[1].count(name):
                found.setdefault(name, []).append(f"{size_of(row)} ({ratio:.2f} x)")
    return [f"- {name}: {'; '.join(at)}{'; ' + WHY[name] if name in WHY else ''}." for name, at in found.items()]


def versions_of(rows: list[Row]) -> str:
    found: dict[str, set[str]] = {}
    for row in rows:
        for package, version in row.get("versions", {}).items() if "us" in row else ():
            found.setdefault(package, set()).add(version)
    return ", ".join(f"{package} {' and '.join(sorted(held))}" for package, held in sorted(found.items()))


def text(result: dict | None) -> str:
    parts = []
    for kind, title in TITLES.items():
        rows = of_kind(result, kind)
        if not places(rows):
            parts += [title, NOT_MEASURED, *(["\n".join(not_run(rows))] if rows else [])]
            continue
        said = (
            f"Microseconds on {where(rows)}. In brackets: the time over the better of `rowwise` and `blockwise` in the "
            f"same process, in turns.{said_of_spread(rows)}"
        )
        parts += [title, textwrap.fill(said, 120), times_table(rows)]
        said = "Microseconds of the host with few tokens / MiB kept for backward, FP8 copies of weights included."
        parts += [f"{said} Groups are even:", host_table(rows)]
        for heading, lines in (("Faster than ours:", faster(rows)), ("Not run:", not_run(rows))):
            parts += [heading, "\n".join(lines)] if lines else []
        parts += [textwrap.fill(f"Versions: {versions_of(rows)}.", 120)] if versions_of(rows) else []
    return "\n\n".join(parts)


def sonicmoe(result: dict | None) -> dict | None:
    """Figures of a layer and of SonicMoE's, with memory kept without our copies of the weights in FP8."""
    rows = [row for row in of_kind(result, "moe") if row["groups"] == EVEN and SONICMOE in row.get("us", {})]
    if not rows:
        return None
    found = []
    for row in rows:
        kept = {name: kept - row["weights_mib"] * (name in OURS) for name, kept in row["kept_mib"].items()}
        us, kept = ({name.removesuffix(" BF16"): held for name, held in of.items()} for of in (medians(row), kept))
        found.append({"dims": row["dims"], "us": us, "kept_mib": kept})
    newest = max(rows, key=lambda row: row["date"])
    return {"device": newest["device"], "commit": newest["commit"], "date": newest["date"], "rows": found}
