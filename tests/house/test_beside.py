"""The comparison with other implementations. Stand-ins with the interfaces of TransformerEngine and SonicMoE compute in
BF16."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers import ROOT
from torch import Tensor, nn

import moe_fp8_ext

ALIGNED = 16


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "bench")
    return importlib.import_module("beside")


class GroupedLinear(nn.Module):
    def __init__(self, e: int, k: int, n: int, *, use_grouped_tensor: bool, **options: object) -> None:
        super().__init__()
        assert not options["bias"] and not use_grouped_tensor
        for i in range(e):
            setattr(self, f"weight{i}", nn.Parameter(torch.zeros(n, k, dtype=options["params_dtype"])))

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        assert sizes.dtype == torch.int64 and sizes.sum() == len(x)
        assert AUTOCAST[-1] is None or not (sizes % ALIGNED).any(), "groups in FP8 must be padded"
        parts = x.split(sizes.tolist())
        return torch.cat([part @ weight.mT for part, weight in zip(parts, self.parameters(), strict=True)])


AUTOCAST: list[object] = [None]


class Autocast:
    def __init__(self, enabled: bool, recipe: object) -> None:
        assert enabled
        self.recipe = recipe

    def __enter__(self) -> None:
        AUTOCAST.append(self.recipe)

    def __exit__(self, *_: object) -> None:
        AUTOCAST.pop()


class Fp8Padding(nn.Module):
    def __init__(self, groups: int) -> None:
        super().__init__()
        PADDED.append(groups)

    def forward(self, x: Tensor, sizes: list[int]) -> tuple[Tensor, list[int]]:
        padded = [-(-size // ALIGNED) * ALIGNED for size in sizes]
        parts = zip(x.split(sizes), padded, strict=True)
        return torch.cat([nn.functional.pad(part, (0, 0, 0, size - len(part))) for part, size in parts]), padded


class Fp8Unpadding(nn.Module):
    def __init__(self, groups: int) -> None:
        super().__init__()

    def forward(self, x: Tensor, sizes: list[int]) -> Tensor:
        padded = [-(-size // ALIGNED) * ALIGNED for size in sizes]
        return torch.cat([part[:size] for part, size in zip(x.split(padded), sizes, strict=True)])


PADDED: list[int] = []


def moe_permute(x: Tensor, ids: Tensor, num_out_tokens: int, map_type: str) -> tuple[Tensor, Tensor]:
    assert ids.dtype == torch.int32 and num_out_tokens == ids.numel() and map_type == "index"
    order = ids.flatten().sort(stable=True).indices
    return x[order // ids.shape[1]], order


def moe_unpermute(y: Tensor, order: Tensor, scores: Tensor, map_type: str) -> Tensor:
    found = torch.empty_like(y).index_copy(0, order, y).view(*scores.shape, -1)
    return (found * scores.to(y)[..., None]).sum(1)


def install(monkeypatch: pytest.MonkeyPatch, modules: dict[str, dict[str, object]]) -> None:
    for name, members in modules.items():
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            monkeypatch.setattr(sys.modules[parent], child, module, raising=False)


@pytest.fixture
def transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    PADDED.clear()
    recipes = {name: type(name, (), {}) for name in ("Float8BlockScaling", "Float8CurrentScaling")}
    members = GroupedLinear, Fp8Padding, Fp8Unpadding, moe_permute, moe_unpermute
    supported = {"is_module_grouped_tensor_path_supported": lambda recipe, dtype: False}
    install(
        monkeypatch,
        {
            "transformer_engine": {},
            "transformer_engine.common": {},
            "transformer_engine.common.recipe": recipes,
            "transformer_engine.pytorch": {member.__name__: member for member in members} | {"autocast": Autocast},
            "transformer_engine.pytorch.module": {},
            "transformer_engine.pytorch.module.grouped_linear": supported,
        },
    )
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


@pytest.mark.parametrize("kind", ["product", "experts"])
@pytest.mark.parametrize("groups", ["even", "zipf"])
def test_transformer_engine(beside: ModuleType, transformer_engine: None, kind: str, groups: str) -> None:
    """Groups in FP8 are padded only if they need it, and what its newer way needs is said."""
    dims = {"product": [256, 32, 48, 4], "experts": [128, 32, 16, 8, 2]}[kind]
    given = beside.KINDS[kind][0]("cpu", groups, *dims)
    variants, differences, not_run = beside.made(kind, "TransformerEngine", given)
    names = "TE BF16", "TE blocks", "TE per tensor"
    assert [*variants] == ["bf16", "rowwise", "blockwise", *names]
    assert {*not_run} == {f"{name}, grouped tensors" for name in names}
    assert all("needs cuBLASLt 13.4" in why for why in not_run.values())
    assert max(differences[name] for name in names) < 0.01  # the stand-ins compute in BF16
    assert PADDED == ([dims[3]] * 2 if groups == "zipf" else [])  # by both recipes in FP8


class SonicMoe(nn.Module):
    def __init__(
        self, num_experts: int, num_experts_per_tok: int, hidden_size: int, intermediate_size: int, **_: object
    ):
        super().__init__()
        self.top_k, self.router = num_experts_per_tok, nn.Linear(hidden_size, num_experts, bias=False)
        self.c_fc, self.c_proj = (SimpleNamespace(), SimpleNamespace())

    def parameters(self, recurse: bool = True) -> list[nn.Parameter]:
        return [self.router.weight, self.c_fc.weight, self.c_proj.weight]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        ids, scores, _ = moe_fp8_ext.ops.choose_experts(self.router(x).float(), self.top_k)
        weights = self.c_fc.weight, self.c_proj.weight
        return moe_fp8_ext.experts(x, ids, scores, *weights, recipe="bf16", interleaved=True), None


@pytest.mark.parametrize("groups", ["even", "zipf"])
def test_sonicmoe(beside: ModuleType, monkeypatch: pytest.MonkeyPatch, groups: str) -> None:
    activations = {"ActivationType": SimpleNamespace(SWIGLU=None)}
    install(monkeypatch, {"sonicmoe": {"MoE": SonicMoe}, "sonicmoe.enums": activations})
    given = beside.KINDS["moe"][0]("cpu", groups, 128, 32, 16, 8, 2)
    variants, differences, not_run = beside.made("moe", "SonicMoE", given)
    assert [*variants] == ["bf16", "rowwise", "blockwise", "rowwise, weights reused", "SonicMoE BF16"]
    assert not not_run and differences["SonicMoE BF16"] < 0.01  # it rounds scores at another place
    ids = moe_fp8_ext.ops.choose_experts((given.x @ given.weights[2].mT).float(), 2)[0]
    sizes = torch.bincount(ids.flatten(), minlength=8)
    assert (sizes[0] > 3 * sizes[-1]) == (groups == "zipf")


def test_what_disagrees_is_not_timed(beside: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, ours, _ = beside.KINDS["product"]

    def wrong(given: object) -> dict[str, object]:
        usual = ours(given)["bf16"]()
        return {"twice": lambda: type(usual)(lambda: 2 * usual.forward(), usual.leaves, nullcontext)}

    monkeypatch.setitem(beside.KINDS, "product", (kind, ours, {"other": wrong}))
    given = kind("cpu", "even", 64, 32, 16, 2)
    variants, differences, not_run = beside.made("product", "other", given)
    assert "twice" not in variants and differences["twice"] == pytest.approx(1, abs=1e-3)
    assert not_run == {"twice": "AssertionError: its result differs from ours by 1"}


def test_rows_of_processes_that_die(beside: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that dies costs the row that it was at. Another goes on with the next row."""
    asked = []

    def run(command: list[str], timeout: float) -> SimpleNamespace:
        rows = [place.split(":") for place in command[command.index("--child") + 1 :]]
        asked.append(len(rows))
        held = [{"kind": "product", "rival": "torch", "sizes": s, "groups": g, "us": {}} for s, g in rows]
        done = {4: held[:1], 3: [], 2: held}[len(rows)]
        if done:
            Path(command[command.index("--out") + 1]).write_text(json.dumps(done))
        return SimpleNamespace(returncode=-11)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(beside, "sizes_of", lambda kind: {"a": [1], "b": [2]})
    args = SimpleNamespace(out=tmp_path / "out.json", groups=["even", "zipf"], limit=60, fast=False)
    rows = beside.run_children(args, "product", "torch", None, ["a", "b"])
    assert asked == [4, 3, 2] and len(rows) == 4
    assert [row.get("error") for row in rows] == [None, "the process ended with -11", None, None]
    beside.save(rows, args.out)
    without_figures = {name: held for name, held in rows[2].items() if name != "us"}
    beside.save([rows[0] | {"us": {"new": [1.0]}}, without_figures], args.out)
    saved = json.loads(args.out.read_text())["rows"]
    assert saved == [rows[0] | {"us": {"new": [1.0]}}, *rows[1:]]


def test_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ratios are within a process. Only scales as fine as ours count for a product. Memory is without FP8 copies."""
    pytest.importorskip("tabulate", reason="the bench's dependencies are not installed")
    monkeypatch.syspath_prepend(ROOT / "bench")
    tables = importlib.import_module("beside_tables")
    place = {"device": "a GPU", "commit": "c" * 40, "date": "2026-11-27", "sizes": "s", "groups": "even"}
    product = place | {"kind": "product", "dims": [8, 16, 32, 2], "host_us": {}, "kept_mib": {}, "not_run": {}}
    us = {"rowwise": [2.0, 2.2, 1.8], "blockwise": [4.0], "TE per tensor": [1.0], "TE blocks": [3.0]}
    slow = {"rowwise": [3.0], "blockwise": [4.0], "torchao rowwise": [6.0]}
    failed = {name: product[name] for name in ("kind", "dims", "sizes")} | {
        "rival": "other",
        "groups": "zipf",
        "error": "`no`",
    }
    rows = [product | {"rival": "TE", "us": us}, product | {"rival": "torchao", "us": slow}, failed]
    moe = place | {"kind": "moe", "rival": "SonicMoE", "dims": [8, 16, 4, 2, 1], "weights_mib": 3.0, "host_us": {}}
    moe |= {"us": {"rowwise": [2.0], "blockwise": [1.0], "SonicMoE BF16": [3.0]}, "not_run": {}}
    moe["kept_mib"] = {"rowwise": 5.0, "blockwise": 6.0, "SonicMoE BF16": 4.0}
    text = tables.text({"rows": [*rows, moe]})
    cells = next(line for line in text.splitlines() if line.startswith("| [8, 16, 32, 2]")).split("|")[2:-1]
    assert [cell.strip() for cell in cells] == ["2", "4", "1 (0.50 x)", "3 (1.50 x)", "6 (2.00 x)", "1.50 x"]
    assert "rounds that differ by up to 20%" in text and "- other, [8, 16, 32, 2], uneven: `'no'`" in text
    assert "Faster than ours:\n\n- TE per tensor: [8, 16, 32, 2] (0.50 x); it has one scale" in text
    assert text.count("Not measured yet") == 1
    found = tables.sonicmoe({"rows": [*rows, moe]})
    assert found["rows"] == [
        {
            "dims": [8, 16, 4, 2, 1],
            "us": {"rowwise": 2.0, "blockwise": 1.0, "SonicMoE": 3.0},
            "kept_mib": {"rowwise": 2.0, "blockwise": 3.0, "SonicMoE": 4.0},
        }
    ]
    assert tables.sonicmoe(None) is None and "Not measured yet" in tables.text(None)
