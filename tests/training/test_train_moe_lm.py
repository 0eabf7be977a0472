"""The demo, with a tiny model and a few steps."""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType

import pytest
import torch
from processes import NEEDS_GLOO, start

from moe_fp8_ext.quantization.recipe import RECIPES

for package in ("matplotlib", "tabulate", "tqdm"):
    pytest.importorskip(package)

DEMO = Path(__file__).resolve().parents[2] / "examples" / "train_moe_lm.py"
TINY = "--device cpu --steps 16 --batch 4 --context 32 --layers 1 --dim 32 --heads 2 --experts 4 --hidden 32".split()
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@contextmanager
def here(folder: Path, *options: str) -> Iterator[tuple[StringIO, StringIO]]:
    """Runs the demo in this process, because importing its dependencies takes longer than its few steps."""
    out, err, threads = StringIO(), StringIO(), torch.get_num_threads()
    torch.set_num_threads(1)
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", [DEMO.name, *options])
        try:
            yield out, err
        finally:
            torch.set_num_threads(threads)


def run(folder: Path, *options: str) -> tuple[str, str]:
    with here(folder, *options) as (out, err):
        status = runpy.run_path(str(DEMO))["main"]()
    assert status == 0, err.getvalue()
    return out.getvalue(), err.getvalue()


def run_as_rank(rank: int, port: int, folder: Path, *options: str) -> None:
    """Runs the demo with the environment that torchrun sets, and writes its output to a file of the rank."""
    of_group = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.environ.update({name: str(value) for name, value in of_group.items()})
    printed = run(folder, *options)
    (folder / f"{rank}.json").write_text(json.dumps(printed))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def table(stdout: str) -> dict[str, dict[str, str]]:
    """Parses the printed table: rows by recipe, cells by column."""
    rows = [re.split(r" {2,}", line.strip()) for line in stdout.splitlines()]
    first = next(i for i, row in enumerate(rows) if row[0] == "recipe")
    body = (row for row in rows[first + 2 :] if row[0] in RECIPES)
    return {row[0]: dict(zip(rows[first], row, strict=True)) for row in body}


def losses(stdout: str) -> list[float]:
    return [float(cell) for row in table(stdout).values() for name, cell in row.items() if name.endswith("loss")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def output(folder: Path) -> tuple[str, str]:
    return run(folder, *TINY, "--plot", "curves.png")


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, one_thread: None) -> ModuleType:
    """The demo as a module, in an empty working directory."""
    monkeypatch.syspath_prepend(DEMO.parent)
    monkeypatch.chdir(tmp_path)
    module = __import__(DEMO.stem)
    monkeypatch.setattr(module, "EVAL_BATCHES", 2)
    return module


def call(demo: ModuleType, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    """Returns the exit status of the demo's main()."""
    monkeypatch.setattr(sys, "argv", [DEMO.name, *options])
    try:
        return demo.main()
    except SystemExit as end:
        return end.code


def test_table(output: tuple[str, str]) -> None:
    rows = table(output[0])
    assert list(rows) == ["bf16", "rowwise"]
    for row in rows.values():
        first, last, held_out = (float(row[name]) for name in ("first loss", "last loss", "held-out loss"))
        assert all(map(math.isfinite, (first, last, held_out)))
        assert last < first and held_out < first
        assert float(row["tokens/s"].replace(",", "")) > 0
    assert rows["bf16"]["vs bf16"] == "-" and re.fullmatch(r"[+-]\d+\.\d\d%", rows["rowwise"]["vs bf16"])


def test_picture(output: tuple[str, str], folder: Path) -> None:
    assert (folder / "curves.png").read_bytes().startswith(PNG_SIGNATURE)
    assert "curves.png" in output[0]


def test_progress_bar(output: tuple[str, str]) -> None:
    assert "bf16: 100%" in output[1] and "rowwise: 100%" in output[1] and "16/16" in output[1]


@NEEDS_GLOO
def test_experts_over_two_processes(output: tuple[str, str], tmp_path: Path) -> None:
    """Two processes give the losses of one. The first process alone prints and draws."""
    start(2, run_as_rank, free_port(), tmp_path, *TINY, "--ep", "--losses", "losses.json")
    (stdout, stderr), silent = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert losses(stdout) == [pytest.approx(loss, rel=0.01) for loss in losses(output[0])]
    assert "Loss curves" in stdout and "A CPU emulates FP8" in stdout and "bf16: 100%" in stderr and silent == ["", ""]
    assert sorted(os.listdir(tmp_path)) == ["0.json", "1.json", "losses.json", "train_moe_lm.png"]


def test_what_does_not_divide_among_processes(demo, monkeypatch, capsys) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    for options, sentence in (
        (["--batch", "3"], "--experts: expected a multiple of the 3 processes of --ep, got 4"),
        (["--experts", "6"], "--batch: expected a multiple of the 3 processes of --ep, got 4"),
    ):
        assert call(demo, monkeypatch, *TINY, "--ep", *options) == 2
        assert f"argument {sentence}" in capsys.readouterr().err


def test_numbers_follow_from_the_seed(demo, monkeypatch, capsys) -> None:
    found = []
    for seed in "001":
        assert call(demo, monkeypatch, *TINY, "--steps", "3", "--seed", seed) == 0
        found.append(losses(capsys.readouterr().out))
    assert found[0] == found[1] != found[2]


def test_fp8_saves_half_the_bytes(demo, monkeypatch, capsys) -> None:
    """FP8 keeps one byte an element instead of two, and scales. Tokens are kept as they are."""
    assert call(demo, monkeypatch, *TINY, "--steps", "1", "--batch", "64", "--hidden", "128") == 0
    saved = {name: row["saved for backward"].split() for name, row in table(capsys.readouterr().out).items()}
    assert all(unit == "MiB" for _, unit in saved.values())
    assert 0.5 <= float(saved["rowwise"][0]) / float(saved["bf16"][0]) < 0.6


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_other_recipes(demo, monkeypatch, capsys, recipe: str) -> None:
    assert call(demo, monkeypatch, *TINY, "--steps", "3", "--recipes", f"bf16,{recipe}", "--check") == 0
    assert list(table(capsys.readouterr().out)) == ["bf16", recipe]


def test_options_of_recipes(demo, monkeypatch, capsys) -> None:
    """Both options change the loss."""
    rows = []
    for options in ([], ["--rounding", "floor"], ["--wgrad-high-precision"]):
        assert call(demo, monkeypatch, *TINY, "--steps", "3", "--recipes", "mxfp8", *options) == 0
        rows.append(table(capsys.readouterr().out)["mxfp8"])
    assert len({(row["last loss"], row["held-out loss"]) for row in rows}) == 3


@pytest.mark.parametrize(("tolerance", "status"), [(-1.0, 1), (1.0, 0)])
def test_check(demo, monkeypatch, capsys, tolerance: float, status: int) -> None:
    """--check trains all recipes, unless --recipes names some."""
    monkeypatch.setattr(demo, "TOLERANCE", tolerance)
    assert call(demo, monkeypatch, *TINY, "--steps", "1", "--check") == status
    printed = capsys.readouterr()
    assert list(table(printed.out)) == [*demo.RECIPES]
    assert ("The held-out loss of rowwise, blockwise, mxfp8 is not within" in printed.err) == bool(status)
    assert call(demo, monkeypatch, *TINY, "--steps", "1", "--check", "--recipes", "mxfp8,bf16") == status
    assert list(table(capsys.readouterr().out)) == ["mxfp8", "bf16"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--recipes bf16,fp4", "--recipes: expected names from bf16, rowwise, blockwise, mxfp8, got 'fp4'"),
        ("--recipes bf16 --check", "--recipes: expected bf16 and another for --check, got bf16"),
        ("--device abacus", "--device: invalid choice: 'abacus'"),
        ("--steps 0", "--steps: expected a number from 1 to 1048576, got 0"),
        ("--batch -3", "--batch: expected a number from 1 to 1048576, got -3"),
        ("--hidden many", "--hidden: invalid int value: 'many'"),
        ("--top-k 5 --experts 4", "--top-k: expected at most --experts = 4, got 5"),
        ("--experts 1025", "--experts: expected at most 1024, got 1025"),
        ("--dim 36 --heads 8", "--dim: expected a multiple of 2 x --heads = 16, got 36"),
        ("--lr nan", "--lr: expected a positive number, got nan"),
        ("--ep", "--ep: expected processes that torchrun starts, got another"),
        ("--seed -1", "--seed: expected a number from 0 to 2^63 - 1, got -1"),
        ("--plot nowhere/curves.png", "--plot: expected a file that can be written, got nowhere/curves.png"),
        ("--plot .", "--plot: expected a file that can be written, got ."),
    ],
)
def test_bad_argument_gets_one_sentence(demo, monkeypatch, capsys, options: str, sentence: str) -> None:
    assert call(demo, monkeypatch, "--device", "cpu", *options.split()) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"{DEMO.name}: argument {sentence}") and printed.err.count("\n") == 1
    assert printed.out == "" and not os.listdir()


@pytest.mark.parametrize(
    ("error", "ours"),
    [(MemoryError(), True), (RuntimeError("can't allocate memory"), True), (RuntimeError("another"), False)],
)
def test_out_of_memory_gets_one_sentence(demo, monkeypatch, error: Exception, ours: bool) -> None:
    def train(*_: object) -> None:
        raise error

    monkeypatch.setattr(demo, "train", train)
    monkeypatch.setattr(sys, "argv", [DEMO.name, *TINY])
    with pytest.raises(SystemExit if ours else RuntimeError, match="out of memory; try" if ours else "another"):
        demo.main()


def test_more_context_than_text(demo, monkeypatch, capsys) -> None:
    monkeypatch.setattr(demo, "STDLIB", Path.cwd())  # as if Python kept its library in a zip file
    assert call(demo, monkeypatch, "--device", "cpu") == 2
    assert "argument --context: expected less than the 0 bytes of text in" in capsys.readouterr().err


def test_help(demo, monkeypatch, capsys) -> None:
    assert call(demo, monkeypatch, "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    for option in (
        "--recipes",
        "--device",
        "--lr",
        "--seed",
        "--plot",
        "--check",
        "--ep",
        *(f"--{name}" for name in demo.SIZES),
    ):
        assert option in text
    assert "(default: bf16,rowwise, with --check all of them)" in text
    assert "on a CPU" in text and "1% off bf16's" in text


def test_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, zero_grad = [], torch.optim.AdamW.zero_grad

    def interrupted(optimizer: torch.optim.AdamW) -> None:
        zero_grad(optimizer)
        steps.append(optimizer)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(torch.optim.AdamW, "zero_grad", interrupted)
    # In a shell's background job, tests inherit that SIGINT is ignored.
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with here(tmp_path, *TINY) as (out, err), pytest.raises(SystemExit) as left:
            runpy.run_path(str(DEMO), run_name="__main__")
    finally:
        signal.signal(signal.SIGINT, ignored)
    assert left.value.code == 130 and len(steps) == 3
    assert out.getvalue() == "" and err.getvalue().endswith("Interrupted.\n")
