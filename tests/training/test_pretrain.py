"""The bench's pretraining: its corpus, and a run that stops and goes on."""

from __future__ import annotations

import importlib
import itertools
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers import ROOT
from torch import Tensor

for package in ("matplotlib", "tabulate", "tqdm"):
    pytest.importorskip(package)

OPTIONS = "--tokens 320 --batch 2 --context 16 --layers 2 --dim 32 --heads 2 --experts 4 --top-k 2 --hidden 32".split()
OPTIONS += "--every 3 --recipe rowwise --lr 0.01".split()  # ten steps
STEPS = 10


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(97, 123, (700,), generator=generator, dtype=torch.uint8)
    path = tmp_path_factory.mktemp("corpus") / "corpus.pt"
    torch.save({"train": text[:500], "held_out": text[500:].clone(), "files": 1, "hash": "h"}, path)
    return path


@pytest.fixture
def pretrain(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "bench")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module = importlib.import_module("pretrain")
    monkeypatch.setattr(importlib.import_module("train_moe_lm"), "EVAL_BATCHES", 2)
    monkeypatch.setattr(module, "WINDOW", 2)
    return module


def flat(value: object, name: str = "") -> dict[str, object]:
    """All leaves of nested dicts, lists and tuples, by path. A tensor is a leaf, as its bytes."""
    if isinstance(value, Tensor):
        return {name: (value.dtype, value.shape, value.numpy().tobytes())}
    if isinstance(value, dict):
        return {k: v for key, held in value.items() for k, v in flat(held, f"{name}/{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for i, held in enumerate(value) for k, v in flat(held, f"{name}/{i}").items()}
    return {name: value}


def ends_after(pretrain: ModuleType, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Makes time pass by one second in each step, so that --seconds are steps."""
    counts = itertools.count(-1)
    train = pretrain.Training._train
    passed = [0]

    def one_second(training: object) -> None:
        train(training)
        passed[0] = next(counts) + 2

    monkeypatch.setattr(pretrain.Training, "_train", one_second)
    monkeypatch.setattr(pretrain, "clock", lambda: passed[0])


@pytest.mark.parametrize("stop", [3, 4, 9])
def test_a_resumed_run_has_the_same_bytes(pretrain, monkeypatch, corpus, tmp_path, stop):
    """Weights, the optimizer's state, curves and statistics, whether the run stops between two evaluations, at one that
    is due, or before the last step."""
    states = []
    with monkeypatch.context() as patch:
        write = pretrain.Training.result
        patch.setattr(pretrain.Training, "result", lambda self: states.append(self.state()) or write(self))
        common = [*OPTIONS, "--corpus", str(corpus)]
        pretrain.main([*common, "--out", str(tmp_path / "whole.json")])
        straight = flat(states[-1])
        resumable = [*common, "--out", str(tmp_path / "parts.json"), "--checkpoint", str(tmp_path / "state.pt")]
        with monkeypatch.context() as of_time:
            ends_after(pretrain, of_time, stop)
            pretrain.main([*resumable, "--seconds", str(stop)])
        kept = torch.load(tmp_path / "state.pt")
        assert kept["step"] == stop and kept["losses"].isnan().sum() == STEPS - stop
        torch.manual_seed(123)  # as in another process
        pretrain.main(resumable)
    resumed = flat(states[-1])
    for name in ("/timed_seconds", "/timed_steps"):
        straight.pop(name), resumed.pop(name)
    assert straight == resumed
    whole, parts = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("whole", "parts"))
    for result in (whole, parts):
        result.pop("tokens_per_second")
    assert whole == parts and whole["seen"] == 320
    assert [at for at, _ in whole["held_out_losses"]] == [0, 96, 192, 288, 320]
    assert len(whole["train_losses"]) == len(whole["gradient_norms"]) == STEPS // 2
    assert [sample["step"] for sample in whole["stats"]] == [0, 3, 6, 9]
    assert all("gradients/wgrad_underflow" in sample for sample in whole["stats"])


def test_a_checkpoint_of_another_run_is_refused(pretrain, corpus, tmp_path):
    args = pretrain.parse([*OPTIONS, "--corpus", str(corpus), "--out", str(tmp_path / "out.json")])
    state = pretrain.Training(args, torch.load(corpus)).state()
    args.lr = 0.02
    with pytest.raises(ValueError, match="the checkpoint is of another run"):
        pretrain.Training(args, torch.load(corpus)).resume(state)


def test_order_of_the_data(pretrain):
    """Sequences do not overlap, none comes twice in an epoch, and a seed is an order."""
    text = torch.arange(101)
    starts = pretrain.starts_of(text, 10, 25, seed=0)
    assert sorted(starts[:10].tolist()) == sorted(starts[10:20].tolist()) == [*range(0, 100, 10)]
    assert starts[:10].tolist() != starts[10:20].tolist() and len(starts) == 25
    assert torch.equal(starts, pretrain.starts_of(text, 10, 25, seed=0))
    assert not torch.equal(starts, pretrain.starts_of(text, 10, 25, seed=1))
    assert pretrain.starts_of(text[:100], 10, 9, seed=0).max() + 11 <= 100  # the last target is in the text


def test_corpus(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "bench")
    corpus = importlib.import_module("corpus")
    texts = {f"{i}.py": f"text {i}\n" for i in range(300)}
    for folder in ("one", "other/below", "one/__pycache__", "one/site-packages"):
        (tmp_path / folder).mkdir(parents=True)
    for name, text in texts.items():
        (tmp_path / "one" / name).write_text(text)
    others = {"other/below/again.txt": "text 7\n", "one/binary.md": "\0", "one/code.c": "int x;", "one/empty.rst": ""}
    others |= {"one/__pycache__/a.py": "cached", "one/site-packages/b.py": "found by its own entry"}
    for name, text in others.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "one" / "large.txt").write_bytes(b"x" * (corpus.LARGEST + 1))
    found = corpus.collect([tmp_path / "one", tmp_path / "other"])
    parts = [bytes(found[name].numpy()).split(corpus.SEPARATOR)[:-1] for name in ("train", "held_out")]
    assert sorted(t.decode() for part in parts for t in part) == sorted(texts.values()) and found["files"] == 300
    assert not {*parts[0]} & {*parts[1]} and 1 <= len(parts[1]) <= 20  # of 6 expected
    (tmp_path / "one").rename(tmp_path / "moved")
    assert corpus.collect([tmp_path / "other", tmp_path / "moved"])["hash"] == found["hash"]
    limited = corpus.collect([tmp_path / "moved"], limit=1000)
    assert 900 < sum(limited[name].numel() for name in limited if name in ("train", "held_out")) < 1000
