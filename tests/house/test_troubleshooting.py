"""docs/troubleshooting.md: its blocks run in order, and every error that it quotes is raised by the block before it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from helpers import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)
IMPORT = "ImportError: "


def quoted(after: str) -> str | None:
    """The error that follows a block, if one does."""
    found = re.match(r"\s*```text\n(.*?)^```", after, re.M | re.S)
    return found[1].strip() if found else None


def check(code: str, error: str | None, names: dict[str, object]) -> None:
    if error is None:
        exec(code, names)
        return
    with pytest.raises(Exception) as raised:
        exec(code, names)
    assert f"{raised.type.__name__}: {raised.value}".startswith(error), code


def test_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOE_FP8_VALIDATE", raising=False)
    names: dict[str, object] = {}
    count = 0
    for block in BLOCK.finditer(PAGE):
        if block[1] == "python":
            error = quoted(PAGE[block.end() :])
            check(block[2], error, names)
            count += error is not None
    texts = [block[2] for block in BLOCK.finditer(PAGE) if block[1] == "text"]
    assert count == len(texts) - 1  # the error of an import is the next test's
    assert len(re.findall(r"^### ", PAGE, re.M)) >= 20


def test_a_wrong_quote_is_found() -> None:
    with pytest.raises(AssertionError):
        check("int('x')", "ValueError: another text", {})
    with pytest.raises(pytest.fail.Exception):
        check("int('1')", "ValueError: invalid literal", {})
    assert quoted("\n\n```text\nValueError: x\n```\n") == "ValueError: x" and quoted("\nText.\n") is None


def test_import_without_the_extension() -> None:
    (error,) = re.findall(rf"^{IMPORT}.*$", PAGE, re.M)
    code = "import pathlib; pathlib.Path.with_name = lambda path, name: path.parent / 'none.so'; import moe_fp8_ext"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode and error in run.stderr, run.stderr
