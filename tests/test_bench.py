"""The bench's own tools."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT


def result(commit: str, **microseconds: float) -> dict:
    rows = [{"op": op, "shape": "[8, 8]", "groups": None, "us": us} for op, us in microseconds.items()]
    return {
        "device": "a GPU",
        "commit": commit,
        "dirty": False,
        "rows": [*rows, {"op": "skipped", "shape": "", "groups": None}],
    }


def test_compare(tmp_path: Path) -> None:
    pytest.importorskip("tabulate", reason="the bench's dependencies are not installed")
    files = []
    for commit, times in (
        ("before", dict(same=10.0, nearly=10.0, slower=10.0, slowest=10.0, faster=10.0, gone=1.0)),
        ("after", dict(same=10.0, nearly=10.19, slower=10.21, slowest=12.0, faster=9.0, new=1.0)),
    ):
        files.append(tmp_path / f"{commit}.json")
        files[-1].write_text(json.dumps(result(commit, **times)))
    run = subprocess.run([sys.executable, ROOT / "bench" / "compare.py", *files], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    head, counts, _, _, _, *rows = run.stdout.splitlines()
    assert head == "before: a GPU at before; after: a GPU at after"
    assert counts == "5 rows in both, 1 before alone, 1 after alone; by more than 2%: 2 slower, 1 faster"
    assert [row.split()[0] for row in rows] == ["slowest", "slower", "faster"]
    assert rows[0].split()[-3:] == ["10", "12", "1.2"]
