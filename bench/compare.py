"""Compares two results files of bench/run.py, before and after a change. Prints rows whose time differs, the slower
ones first.

Times of two runs differ by a few percent, because chips, clocks and temperatures do. So take both on one GPU, in
turns.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tabulate import tabulate

Key = tuple[str, str, str]


def times(result: dict) -> dict[Key, float]:
    """Microseconds by op, shape and groups, of rows that were timed."""
    return {(row["op"], row["shape"], row.get("groups") or ""): row["us"] for row in result["rows"] if "us" in row}


def differing(before: dict, after: dict, percent: float) -> list[tuple]:
    """For rows of both files whose times differ by more than `percent`: key, both times in microseconds, and their
    ratio."""
    old, new = times(before), times(after)
    rows = [(*key, old[key], new[key], new[key] / old[key]) for key in old if key in new]
    limit = 1 + percent / 100
    return sorted((row for row in rows if not 1 / limit <= row[-1] <= limit), key=lambda row: -row[-1])


def report(before: dict, after: dict, percent: float) -> str:
    old, new = times(before), times(after)
    sources = [
        f"{r['device']} at {(r['commit'] or 'unknown')[:7]}{' (dirty)' * bool(r['dirty'])}" for r in (before, after)
    ]
    rows = differing(before, after, percent)
    slower = sum(row[-1] > 1 for row in rows)
    lines = [
        f"before: {sources[0]}; after: {sources[1]}",
        f"{len(old.keys() & new.keys())} rows in both, {len(old.keys() - new.keys())} before alone, "
        f"{len(new.keys() - old.keys())} after alone; by more than {percent:g}%: {slower} slower, "
        f"{len(rows) - slower} faster",
    ]
    if rows:
        lines += ["", tabulate(rows, ("op", "shape", "groups", "before us", "after us", "x"), floatfmt=".4g")]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--percent", type=float, default=2.0, help="what differs by less is not listed (%(default)s)")
    args = parser.parse_args()
    print(report(*(json.loads(path.read_text()) for path in (args.before, args.after)), args.percent))


if __name__ == "__main__":
    main()
