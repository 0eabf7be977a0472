"""The tools of the bench: cases, tables, reports and comparisons."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers import ROOT
from torch import Tensor

from moe_fp8_ext import ops


def result(commit: str, **microseconds: float) -> dict:
    rows = [{"op": op, "shape": "[8, 8]", "groups": None, "us": us} for op, us in microseconds.items()]
    return {
        "device": "a GPU",
        "commit": commit,
        "dirty": False,
        "rows": [*rows, {"op": "skipped", "shape": "", "groups": None}],
    }


def test_every_grouped_op_has_even_and_uneven_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every op that takes or computes offs is timed with even and uneven groups, as no router sends even ones."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    cases = importlib.import_module("cases").CASES.values()
    schemas = {name: getattr(torch.ops.moe_fp8, name).default._schema for name in ops.__all__}
    grouped = {op for op, schema in schemas.items() if any(str(a) == "Tensor offs" for a in schema.arguments)}
    grouped |= {"grouped_mm", "experts", "sort_tokens", "tokens_by_rank", "permute_indices"}
    assert grouped <= {case.op for case in cases}
    for case in cases:
        for cpu in (True, False) if case.op in grouped else ():
            shapes = [shape for shape in case.shapes(cpu) if shape.dims.get("e") != 1]  # one group is even
            even = {shape.label for shape in shapes if shape.groups in (None, "even")}
            assert even == {shape.label for shape in shapes if shape.groups == "zipf"}, case.label


def pretrained(recipe: dict, seed: int, losses: dict[int, float]) -> dict:
    """A file of bench/pretrain.py, in short."""
    sizes = dict(parameters=4e8, active=1e8, layers=2, dim=64, experts=8, hidden=32, top_k=2, batch=2, context=10)
    corpus = {"train": 3_000_000, "held_out": 100_000}
    where = dict(device="a GPU", torch="2", commit="c" * 40, date="today")
    sample = {} if recipe["name"] == "bf16" else {"gradients/underflow": 0.25, "product_sqnr": 28.0}
    return dict(
        **sizes,
        **where,
        **dict(recipe=recipe, seed=seed, corpus=corpus, lr=0.1, tokens=400, tokens_per_second=1234, stats=[sample]),
        **dict(held_out_losses=[*map(list, losses.items())], gradient_norms=[[100, 9.0, 9.0], [300, 2.0, 3.0]]),
    )


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[ModuleType, list[dict]]:
    """bench/losses.py and some runs. BF16 of two seeds ends at 2.0 and 2.2: 2.1 on average, with a spread of 0.2."""
    pytest.importorskip("tabulate", reason="the bench's dependencies are not installed")
    monkeypatch.syspath_prepend(ROOT / "bench")
    runs = [
        pretrained({"name": "mxfp8"}, 0, {0: 5.0, 300: 2.29, 400: 1.0}),
        pretrained({"name": "rowwise", "grad_dtype": "float8_e5m2"}, 0, {0: 5.0, 300: 1.89}),
        pretrained({"name": "rowwise"}, 0, {0: 5.0, 300: 2.31}),
        pretrained({"name": "bf16"}, 0, {0: 5.0, 300: 2.0}),
        pretrained({"name": "bf16"}, 1, {0: 5.5, 200: 3.0, 300: 2.2}),
    ]
    (tmp_path / "losses").mkdir()
    for i, run in enumerate(runs):
        (tmp_path / "losses" / f"{i}.json").write_text(json.dumps(run))
    module = importlib.import_module("losses")
    return module, module.recorded(tmp_path)


def test_losses_are_compared_with_the_band_of_seeds(losses: tuple[ModuleType, list[dict]]) -> None:
    module, runs = losses
    names = ["bf16", "bf16", "rowwise", "rowwise, grad_dtype=e5m2", "mxfp8"]
    assert [module.label(run) for run in runs] == names
    assert [curve.keys() for curve in module.curves(runs)] == [{0, 300}] * 5  # what all of them have reached
    assert module.band(runs) == {0: (5.25, 0.5), 300: (pytest.approx(2.1), pytest.approx(0.2))}
    found = module.compared(runs)
    assert {name: held["within"] for name, held in found.items()} == {names[2]: False, names[3]: False, names[4]: True}
    assert found["mxfp8"]["difference"] == pytest.approx(0.19) and found["mxfp8"]["of_seed"] == pytest.approx(0.29)
    assert module.verdict(runs) == (
        "`mxfp8` is within the band; `rowwise` and `rowwise, grad_dtype=e5m2` are outside the band."
    )


def test_losses_are_told(losses: tuple[ModuleType, list[dict]], tmp_path: Path) -> None:
    module, runs = losses
    text = " ".join(module.text(runs).split())
    assert "0.40 B parameters, 0.10 B of them active: 2 layers of width 64, 8 experts of width 32, 2 for" in text
    assert "reads 0.0 M tokens of 0 M planned ones" in text and "a GPU at ccccccc, torch 2, today." in text
    assert "average, with a spread of 0.2000 (9.52%) from" in text and module.verdict(runs) in text
    assert "Recipes end -5.50% to +15.50% from BF16 with the same seed." in text
    rows = [[c.strip() for c in row.split("|")[1:-1]] for row in module.table(runs).splitlines()[2:]]
    assert rows[0] == ["`bf16`, seed 0", "2.0000", "-4.76%", "", "2.000", "", "", "", "", "1,234"]
    assert rows[4][:6] == ["`mxfp8`, seed 0", "2.2900", "+9.05%", "+14.50%", "2.000", "25.00%"]
    assert rows[4][6:] == ["", "", "28.0 dB", "1,234"]
    assert module.recorded(tmp_path / "nowhere") == []
    pytest.importorskip("matplotlib")
    importlib.import_module("figures").draw_losses(runs, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").stat().st_size > 10_000


def test_tables_hold_even_and_uneven_rows_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tabulate", reason="the bench's dependencies are not installed")
    monkeypatch.syspath_prepend(ROOT / "bench")
    row = {"op": "experts rowwise", "shape": "wide", "dims": {"t": 8}, "us": 2.0, "ratio": 2.0, "baseline_us": 4.0}
    rows = [row | {"groups": "even"}, row | {"groups": "zipf", "us": 3.0}]
    results = {"": {"device": "a GPU", "commit": "c", "rows": rows}}
    lines = importlib.import_module("tables").layer_table(results).splitlines()
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[-2:]] == [
        ["[8]", "4", "2 (2.00 x)"],
        ["[8], uneven", "4", "3 (2.00 x)"],
    ]


@pytest.mark.parametrize(
    ("groups", "sizes"),
    [
        ("even", [250, 250, 250, 250]),
        ("zipf", [480, 240, 160, 120]),
        ("zipf 2", [702, 176, 78, 44]),
        ("one", [33, 33, 900, 34]),
    ],
)
def test_sizes_of_groups(groups: str, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    ends = importlib.import_module("case").group_ends(groups, 1000, 4, torch.device("cpu"))
    got = ends.diff(prepend=ends.new_zeros(1)).tolist()
    assert got == pytest.approx(sizes, abs=1) and sum(got) == 1000


def test_rows_measured_again_say_their_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    pytest.importorskip("tabulate", reason="the bench's dependencies are not installed")
    report = importlib.import_module("report")
    row = {"op": "a", "shape": "[8]", "groups": None, "us": 2.0}
    whole = {"device": "a GPU", "commit": "1" * 40, "dirty": False, "copy_gbps": 1.0}
    later = whole | {"commit": "2" * 40, "rows": [row | {"us": 1.0}, row | {"groups": "even"}]}
    found = report.renewed(whole | {"rows": [row, row | {"op": "b"}]}, later)
    assert [(r["op"], r["groups"], r["us"], r.get("commit", "")[:1]) for r in found["rows"]] == [
        ("a", None, 1.0, "2"),
        ("b", None, 2.0, ""),
        ("a", "even", 2.0, "2"),
    ]
    assert "commit 111111111111." in report.origin(found)
    assert "2 rows are of 222222222222." in report.origin(found)
    case = importlib.import_module("case")
    assert case.commits_of(found["rows"], found) == "1111111 and 2222222"


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


def test_operands_of_deepgemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with the interface of DeepGEMM's documents computes the product of our operands."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    peers, cases = importlib.import_module("peers"), importlib.import_module("cases_gemm")
    label, shape = "scaled_grouped_mm blockwise", "dsv3_up 2Dx3D"
    assert "DeepGEMM" not in peers.peers_of(label, shape, True, False)

    def multiply(of_rows: tuple[Tensor, Tensor], of_groups: tuple[Tensor, Tensor], out: Tensor, groups: Tensor) -> None:
        (a, scale), (b, scale_b) = of_rows, of_groups
        assert a.is_contiguous() and b.is_contiguous() and scale_b.is_contiguous() and groups.dtype == torch.int32
        assert scale.shape == (384, 2) and scale_b.shape == (3, 3, 2)
        a = a.double() * scale.repeat_interleave(128, 1)
        b = b.double() * scale_b.repeat_interleave(128, 1).repeat_interleave(128, 2)
        out.copy_(torch.einsum("mk,mnk->mn", a, b[groups.long()]))

    module = ModuleType("deep_gemm")
    module.__spec__, module.m_grouped_fp8_gemm_nt_contiguous = ModuleSpec("deep_gemm", None), multiply
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    peer = peers.peers_of(label, shape, True, False)["DeepGEMM"]
    sizes = dict(k=256, n=384, e=3, wgrad=0, format="blockwise")
    operands = cases._operands(torch.device("cpu"), "even", m=384, **sizes)
    got, want = peer(*operands)().double(), cases._scaled(*operands).double()
    assert (got - want).norm() <= 2**-8 * want.norm()
    with pytest.raises(ValueError, match="multiples of 128 rows"):
        peer(*cases._operands(torch.device("cpu"), "even", m=390, **sizes))
    assert "DeepGEMM" not in peers.peers_of(label, shape.replace("3D", "2D"), True, False)
    assert "DeepGEMM" not in peers.peers_of(label, shape, False, False)


def test_which_recipe_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worse of even and uneven groups counts. A recipe with only one of them is not compared. BF16 is 1."""
    pytest.importorskip("tabulate", reason="the bench's dependencies are not installed")
    monkeypatch.syspath_prepend(ROOT / "bench")
    tables = importlib.import_module("tables")

    def rows(dims: tuple[int, ...], **ratios: tuple[float, ...]) -> list[dict]:
        return [
            {
                "op": f"grouped_mm {recipe}",
                "dims": dict(zip("mkne", dims, strict=True)),
                "groups": groups,
                "ratio": ratio,
            }
            for recipe, of_groups in ratios.items()
            for groups, ratio in zip(("even", "zipf"), of_groups, strict=False)
        ]

    large = rows((4096, 1024, 1024, 1), rowwise=(1.5, 1.1), blockwise=(1.2, 1.3), mxfp8=(2.0,))
    small = rows((64, 64, 128, 1), rowwise=(0.9, 1.2), blockwise=(0.8, 0.8))
    text = tables.recipe_table({"a": {"device": "a GPU", "commit": None, "rows": small + large}})
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[-2:]]
    assert cells[0] == ["[4096, 1024, 1024, 1]", "1 / 455", "1.50 / 1.10", "1.20 / 1.30", "-", "blockwise"]
    assert cells[1] == ["[64, 64, 128, 1]", "1 / 26", "0.90 / 1.20", "0.80 / 0.80", "-", "bf16"]
    assert tables.recipe_table({}) == tables.NOT_MEASURED


def test_names_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer or a product has a model's name only with the model's sizes; a share of its experts is said."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    models = importlib.import_module("models")
    assert models.layer_name(2048, 768, 128, 8) == "Qwen3-30B-A3B"
    assert models.layer_name(7168, 2048, 32, 8) == "DeepSeek-V3 (32 of 256 experts)"
    assert models.layer_name(7168, 2048, 33, 8) is None and models.layer_name(4096, 1024, 128, 8) is None
    assert models.product_name(1536, 1024, 40) == "Granite-3.0-3B-A800M, gate and up"
    assert models.product_name(2048, 7168, 8) == "DeepSeek-V3 (8 of 256 experts), down"
    assert models.product_name(5120, 8192, 16) == "Llama-4-Scout, gate or up"
    assert models.product_name(64, 64, 4) is None


def whole_models(commit: str) -> dict:
    """Results of a model whose experts take half of a step, and half of that with this package."""
    kinds = "experts", "embeddings and loss", "optimizer"
    us = {name: dict(zip(kinds, times, strict=True)) for name, times in STEPS.items()}
    row = {"model": "Qwen3-30B-A3B", "layers": 4, "of_layers": 48, "sizes": [2048, 768, 128, 8], "step": [2, 1000]}
    row |= {"parameters": 3_000_000, "parameters_in_layers": 2_000_000, "us": us}
    row["seconds"] = {"grouped_mm": [0.2, 0.21, 0.2], "moe_fp8_rowwise": [0.15, 0.15, 0.153]}
    row["peak_bytes"] = {"grouped_mm": 4e9, "moe_fp8_rowwise": 3e9}
    of_attention = {"aten::mm": 9.0, "aten::_flash_attention_backward": 5.0, "aten::_x_attention_backward": 0.0}
    of_experts = {"aten::mul": 10e3, "aten::_grouped_mm": 60e3, "aten::sum": 9e3, "aten::cat": 1e3}
    row["us_of_ops"] = {"grouped_mm": {"attention": of_attention, "experts": of_experts}}
    versions = {"torch": "2", "transformers": "5", "dirty": False, "date": "today"}
    return {"device": "a GPU", "commit": commit, "rows": [row], **versions}


STEPS = {"grouped_mm": (100e3, 60e3, 30e3), "moe_fp8_rowwise": (50e3, 60e3, 30e3)}


FINETUNED = dict(
    **dict(device="a GPU", commit="a" * 40, model="a model", context=8, rank=4, adapters="autocast"),
    attention_only=False,
)


@pytest.mark.parametrize("commit", ["a" * 40, "c" * 40])
def test_first_screen(monkeypatch: pytest.MonkeyPatch, commit: str) -> None:
    """The worse of even and uneven groups counts. Models come first. A layer may lack the figures of a model. Layers
    of the GPU and commit of the whole models count, if there are any. Else the text says that these differ."""
    pytest.importorskip("tabulate", reason="the bench's dependencies are not installed")
    monkeypatch.syspath_prepend(ROOT / "bench")
    headline = importlib.import_module("headline")
    layers = {(8, 64, 64, 4, 2): (3.0, 2.5), (8, 2048, 768, 128, 8): (2.0, 2.25)}
    rows = [
        {"op": "experts rowwise", "dims": dict(zip("tdfek", layer, strict=True)), "ratio": ratio}
        for layer, ratios in layers.items()
        for ratio in ratios
    ]
    faster = [row | {"ratio": 9.0} for row in rows]
    others = {"another": {"device": "another GPU", "commit": "a" * 40, "rows": faster}} if commit[0] == "a" else {}
    results = others | {"": {"device": "a GPU", "commit": "a" * 40, "rows": rows}}
    sonicmoe = {"device": "a GPU", "commit": "b" * 40, "rows": []}
    text = headline.text(results, sonicmoe, whole_models(commit))
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    assert cells[1:] == [
        ["Qwen3-30B-A3B", "2.00 x", "1.33 x", "0.75"],
        ["D 64, F 64, 4 experts", "2.50 x", "-", "-"],
    ]
    text = " ".join(text.split())
    claim = "On a GPU, an MoE layer is 2.00 to 2.50 times as fast as with torch in BF16. A whole training step is 1.33 "
    assert text.startswith(claim)
    assert "on a GPU at aaaaaaa" in text and "at bbbbbbb" in text
    assert ("do not compare" in text) == (commit[0] == "c") == ("at ccccccc" in text)
    runs = [
        dict(impl=impl, layers=2, of_layers=2, sequences=2, tokens_per_second=speed, peak_bytes=peak, **FINETUNED)
        for impl, speed, peak in (("ours", 3.0, 5), ("stock", 1.5, 9), ("stock", 2.0, 10), ("ours", 1.0, 1))
    ]
    runs += [runs[0] | dict(tokens_per_second=9.0, layers=1), runs[0] | dict(tokens_per_second=9.0, sequences=1)]
    text = " ".join(headline.text(results, sonicmoe, whole_models(commit), runs).split())
    assert "in BF16. LoRA of a model is [1.50 times](docs/finetuning.md) as fast as Transformers" in text
    assert "BF16, in 0.50 of the memory." in text
    elsewhere = [run | dict(device="another GPU") for run in runs]
    text = " ".join(headline.text(results, sonicmoe, whole_models(commit), elsewhere).split())
    assert "On another GPU, LoRA of a model is [1.50 times]" in text
    graphed = [run | dict(graphs=True) for run in runs]
    text = " ".join(headline.text(results, sonicmoe, whole_models(commit), graphed).split())
    assert "BF16, both as CUDA graphs, in 0.50 of the memory." in text
    assert "LoRA" not in headline.text(results, sonicmoe, whole_models(commit), [runs[0]])
    renewed = dict(device="a GPU", commit="d" * 40, rows=[row | {"commit": commit} for row in faster])
    text = headline.text({"renewed": renewed, **results}, sonicmoe, whole_models(commit))
    assert "9.00 x" in text and "do not compare" not in text  # rows that were measured again name their commit
    assert "Whole models are not measured yet" in headline.text(results, None, None)
    assert "Not measured" in headline.text({}, sonicmoe, None)


def test_tables_of_whole_models(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tabulate", reason="the bench's dependencies are not installed")
    monkeypatch.syspath_prepend(ROOT / "bench")
    whole_tables = importlib.import_module("whole_tables")
    text = whole_tables.text(whole_models("a" * 40), {(2048, 768, 128, 8): 4.0}, "")
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| Qwen")
    ]
    name = "Qwen3-30B-A3B, 4 of 48 layers"
    assert cells[0] == [name, "10,000 (5.0%)", "13,333 (1.33 x, 2.0%)", "4.0", "3.0 (0.75)"]
    # Of 200 ms, 100 are the experts'. With all layers, experts and idle time are 12 times as long, the loss is the
    # same, and the optimizer is 25 / 3 times as long: (12 * 110 + 60 + 250) / (12 * 60 + 60 + 250).
    assert cells[1] == [name, "50%", "2.00 x", "1.60 x (4.00 x)", "1.33 x (2.00 x)", "1.58 x"]
    assert cells[2] == ["Qwen3-30B-A3B", "`grouped_mm`", "200.0", "100.0", "60.0", "30.0", "10.0"]
    ops = "60.0 `aten::_grouped_mm`, 10.0 `aten::mul`, 9.0 `aten::sum`"
    assert cells[4] == ["Qwen3-30B-A3B", "`grouped_mm`", ops]
    assert text.endswith("The backward of attention is `_flash_attention_backward` in Qwen3-30B-A3B.")
    assert cells[3] == ["Qwen3-30B-A3B", "rowwise", "150.0", "50.0", "60.0", "30.0", "10.0"]


def test_picture_of_whole_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the bench's dependencies are not installed")
    monkeypatch.syspath_prepend(ROOT / "bench")
    figures, whole_tables = importlib.import_module("figures"), importlib.import_module("whole_tables")
    assert [*figures.PART_COLORS] == [*whole_tables.PARTS, whole_tables.IDLE]
    figures.draw_waterfalls(whole_models("a" * 40)["rows"], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_table_of_statistics(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The bench writes what the table reads. Kinds of steps take turns in a rotating order."""
    pytest.importorskip("tabulate", reason="the bench's dependencies are not installed")
    monkeypatch.syspath_prepend(ROOT / "bench")
    stats, tables = importlib.import_module("stats"), importlib.import_module("tables")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(stats.ROUNDS, "cpu", 3)
    monkeypatch.setattr(sys, "argv", ["", "--out", str(tmp_path / "stats.json")])
    timed = []

    def seconds(layer: object, call: object, grad: Tensor, kind: str) -> float:
        timed.append(kind)
        return {"off": 0.010, "one in 100": 0.011, "every step": 0.02}[kind]

    monkeypatch.setattr(stats, "seconds_per_step", seconds)
    stats.main()
    assert timed[:9] == [stats.KINDS[(turn + i) % 3] for turn in range(3) for i in range(3)]
    text = tables.stats_text(json.loads((tmp_path / "stats.json").read_text()))
    cells = [cell.strip() for cell in text.splitlines()[-1].split("|")[1:-1]]
    assert cells == ["small, `blockwise`", "10.00 (0.0%)", "11.00 (+10.0%)", "20.00 (+100.0%)"]


def test_table_of_adapters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The bench runs every kind, and writes what the table reads."""
    pytest.importorskip("tabulate", reason="the bench's dependencies are not installed")
    monkeypatch.syspath_prepend(ROOT / "bench")
    adapters, tables = importlib.import_module("adapters"), importlib.import_module("tables")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["", "--out", str(tmp_path / "adapters.json")])

    def seconds(step: Callable[[], None], device: str) -> float:
        step()
        timed.append(step)
        return 0.010 + 0.001 * timed.index(step)

    timed: list[Callable[[], None]] = []
    monkeypatch.setattr(adapters, "MODELS", adapters.MODELS[:1])
    monkeypatch.setattr(adapters, "seconds_per_step", seconds)
    adapters.main()
    first, last = adapters.RECIPES
    text = tables.adapters_text(json.loads((tmp_path / "adapters.json").read_text()))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[-2:]]
    assert [row[1] for row in rows] == [f"`{first}`", f"`{last}`"]
    assert rows[0][2:] == ["10.00", "11.00 (1.10)", "12.00 (1.20)", "13.00 (1.30)"]


def test_table_of_shared_experts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The bench runs every kind, and writes what the table reads."""
    pytest.importorskip("tabulate", reason="the bench's dependencies are not installed")
    monkeypatch.syspath_prepend(ROOT / "bench")
    shared, tables = importlib.import_module("shared_experts"), importlib.import_module("tables")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["", "--out", str(tmp_path / "shared.json")])

    def us(calls: dict[str, Callable[[], None]], repeats: int, device: torch.device) -> dict[str, float]:
        for call in calls.values():
            call()
        return {name: 1000.0 + 100 * i for i, name in enumerate(calls)}

    monkeypatch.setattr(shared, "eager_us", us)
    shared.main()
    text = tables.shared_text(json.loads((tmp_path / "shared.json").read_text()))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[-4:]]
    assert [row[1] for row in rows] == [f"`{recipe}`" for recipe in shared.RECIPES] * 2
    assert all(row[2:] == ["1,000", "1,100 (+100)", "1,200 (+200)"] for row in rows)


def test_results_begin_with_layers_and_end_with_a_forced_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tabulate", reason="the bench's dependencies are not installed")
    monkeypatch.syspath_prepend(ROOT / "bench")
    report = importlib.import_module("report")
    ops = "quantize_rows rowwise", "scaled_grouped_mm rowwise", "grouped_mm rowwise", "experts rowwise"
    assert [rows[0]["op"] for rows in report.parts_of([{"op": op} for op in ops]).values()] == [*reversed(ops)]
    found = report.recorded()
    forced = ["gemm" in result for result in found.values()]
    assert forced == sorted(forced)
    assert not any("gemm" in result for result in report.usual(found).values())


def test_profile_table(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tabulate", reason="the bench's dependencies are not installed")
    monkeypatch.syspath_prepend(ROOT / "bench")
    row = {"recipe": "rowwise", "dims": [8, 2048, 768, 128, 8], "us": {"products": 300.0, "rest": 100.0}}
    text = importlib.import_module("tables").profile_text({"device": "a GPU", "commit": None, "rows": [row]})
    cells = [cell.strip() for cell in text.splitlines()[-1].split("|")[1:-1]]
    assert cells == ["Qwen3-30B-A3B [8, 2048, 768, 128, 8]", "rowwise", "400", "75%", "25%"]


def test_profile_knows_its_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tabulate", reason="the bench's dependencies are not installed")
    pytest.importorskip("tqdm", reason="the bench's dependencies are not installed")
    monkeypatch.syspath_prepend(ROOT / "bench")
    work = importlib.import_module("profile_layer").WORK
    assert {op for names in work.values() for op in names} <= set(ops.__all__)


def test_host_times_every_call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    host = importlib.import_module("host")
    monkeypatch.setattr(sys, "argv", ["host.py"])
    monkeypatch.setattr(host, "CALLS", 1)
    monkeypatch.setattr(host, "REPEATS", 1)
    threads = torch.get_num_threads()
    try:
        host.main()
    finally:
        torch.set_num_threads(threads)
    lines = capsys.readouterr().out.splitlines()
    counts = {line[:28].strip(): [int(count) for count in line.split()[-2:]] for line in lines[2:]}
    calls, ops_of = ({name: count[i] for name, count in counts.items()} for i in (0, 1))
    assert calls["experts"] > calls["grouped_mm"] > calls["an empty Function"] > calls["torch.relu, forward alone"]
    assert ops_of["the same under checkpoint"] > ops_of["the same with LoRA"] > ops_of["experts"]
    assert (ops_of["torch.relu, forward alone"], ops_of["an empty Function"]) == (1, 0)
    monkeypatch.setattr(sys, "argv", ["host.py", "--help"])
    with pytest.raises(SystemExit, match="^0$"):
        host.main()
    assert capsys.readouterr().out.startswith("usage: host.py [-h]\n")


def test_decode_times_every_implementation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Times on a CPU have no graphs; the table takes both times of a GPU."""
    pytest.importorskip("transformers", reason="bench/decode.py times its experts")
    pytest.importorskip("tabulate", reason="the bench's dependencies are not installed")
    monkeypatch.syspath_prepend(ROOT / "bench")
    decode = importlib.import_module("decode")
    monkeypatch.setattr(decode, "MODELS", decode.MODELS[:1])
    monkeypatch.setattr(sys, "argv", ["", "--out", str(tmp_path / "decode.json")])
    decode.main()
    result = json.loads((tmp_path / "decode.json").read_text())
    assert [row["tokens"] for row in result["rows"]] == [*decode.TOKENS]
    for row in result["rows"]:
        assert [*row["eager_us"]] == [*decode.IMPLEMENTATIONS] and all(min(us) > 0 for us in row["eager_us"].values())
        row["eager_us"] = {kind: [1.0, 3.0, 20.0] for kind in row["eager_us"]}
        row["graph_us"] = dict.fromkeys(row["eager_us"], 2.5)
    lines = importlib.import_module("tables").decode_text(result).splitlines()
    assert lines[-1].count("3 / 2.5") == len(decode.IMPLEMENTATIONS)
