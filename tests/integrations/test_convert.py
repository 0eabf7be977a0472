"""convert_ and revert_ on modules of this package, and the errors of both."""

from __future__ import annotations

import copy
import importlib
import io
import pickle
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from helpers import assert_same, full
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from moe_fp8_ext import Experts, Recipe, convert_, revert_

E, D, F = 4, 32, 48


class Foreign(nn.Module):
    """Experts of no known kind."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, D, D))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (Experts(E, D, F, dtype=torch.bfloat16, bias=True) for _ in range(2))
        self.again, self.conv, self.linear = self.first, nn.Conv1d(3, 3, 3), nn.Linear(D, D)

    def forward(self, x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        for experts in (self.first, self.second, self.again):
            x = x + experts(x, ids, scores)
        return x


def call() -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(20, D, generator=g).bfloat16(), torch.arange(40).view(20, 2) % E, torch.rand(20, 2, generator=g)


def results(model: nn.Module, fn: Callable | None = None) -> list[Tensor]:
    """Returns the output and the gradients."""
    model.zero_grad()
    out = (model if fn is None else fn)(*call())
    out.float().square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def expected(recipe: str | Recipe) -> list[Tensor]:
    model = Model()
    for experts in (model.first, model.second):
        experts.options["recipe"] = Recipe(recipe) if isinstance(recipe, str) else recipe
    return results(model)


def state_of(model: nn.Module) -> list[dict[str, object]]:
    return [dict(vars(module)) for module in model.modules()]


@pytest.mark.parametrize("recipe", ["blockwise", Recipe("mine", "mxfp8", rounding="floor")])
def test_converts_and_reverts(recipe):
    model = Model()
    before = state_of(model)
    report = convert_(model, recipe)
    wanted = recipe if isinstance(recipe, Recipe) else Recipe(recipe)
    assert report.converted == tuple((name, "moe_fp8_ext", wanted) for name in ("first", "second")) and not report.left
    assert_same(results(model), expected(recipe))
    revert_(model)
    assert state_of(model) == before
    assert_same(results(model), expected("rowwise"))
    revert_(model)
    assert state_of(model) == before


def test_the_last_recipe_counts():
    model = Model()
    before = state_of(model)
    for recipe in ("mxfp8", "bf16", "blockwise"):
        report = convert_(model, recipe)
    assert {recipe for _, _, recipe in report.converted} == {Recipe("blockwise")}
    assert_same(results(model), expected("blockwise"))
    revert_(model)
    assert state_of(model) == before


def test_report():
    model = nn.ModuleDict({"experts": Experts(E, D, F), "router": Foreign(), "model": Model()})
    asked = []

    def filter(name: str, module: nn.Module) -> bool:
        asked.append((name, module))
        return name != "model.second"

    report = convert_(model, Recipe("mxfp8", rounding="floor"), filter)
    assert asked == [(name, model.get_submodule(name)) for name in ("experts", "model.first", "model.second")]
    assert str(report).splitlines() == [
        "module        kind         recipe",
        "experts       moe_fp8_ext  Recipe('mxfp8', rounding='floor')",
        "model.first   moe_fp8_ext  Recipe('mxfp8', rounding='floor')",
        "router                     not converted: the forward of Foreign is not known",
        "model.second               not converted: filter said no",
    ]
    assert "(model)  moe_fp8_ext  Recipe('bf16')" in str(convert_(model.experts, "bf16"))
    # The report is enough to convert the model again.
    names = {name for name, _, _ in report.converted}
    again = Recipe.from_json(report.converted[0].recipe.to_json())
    assert convert_(model, again, lambda name, _: name in names) == report


def test_frozen_weights_keep_their_format():
    model = Model()
    model.first.freeze_()
    report = convert_(model, "mxfp8")
    assert [name for name, *_ in report.converted] == ["second"]
    text = "the recipe must have the format of weights that freeze_ has quantized, 'rowwise', got recipe 'mxfp8'"
    assert report.left == (("first", f"Experts: {text}"),)
    results(model)


def test_parameters_hooks_and_classes_stay():
    model, seen = Model(), []
    model.first.register_forward_hook(lambda *_: seen.append("hook"))
    before, classes = model.state_dict(keep_vars=True), [type(module) for module in model.modules()]
    convert_(model, "blockwise")
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    assert [type(module) for module in model.modules()] == classes and model.again is model.first
    model(*call())
    assert seen == ["hook", "hook"]
    other = Model()
    nn.init.zeros_(other.first.down_proj)
    other.load_state_dict(model.state_dict())
    convert_(other, "blockwise")
    assert_same(results(other), expected("blockwise"))


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m)), "torch.save": saved_and_loaded}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copies(copied):
    """Copies are converted too, and can be reverted without the original."""
    model = Model()
    convert_(model, "blockwise")
    other = copied(model)
    assert_same(results(other), expected("blockwise"))
    with torch.no_grad():
        other.first.down_proj.zero_()
    assert_same(results(model), expected("blockwise"))
    revert_(other)
    assert other.first.options == Model().first.options
    assert_same(results(model), expected("blockwise"))


def test_compiles():
    """A converted model compiles to one graph. A model that was compiled before `convert_` sees the new recipe."""
    model = Model()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same(results(model, compiled), expected("rowwise"))
    convert_(model, "blockwise")
    assert_same(results(model, compiled), expected("blockwise"))
    revert_(model)
    assert_same(results(model, compiled), expected("rowwise"))


def test_checkpointing():
    model = Model()
    convert_(model, "blockwise")
    assert_same(results(model, lambda *call: checkpoint(model, *call, use_reentrant=False)), expected("blockwise"))


def shard(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (1,))
    for experts in (model.first, model.second):
        fully_shard(experts, mesh=mesh)
    fully_shard(model, mesh=mesh)


def convert(model: nn.Module) -> None:
    convert_(model, "blockwise")


@pytest.mark.parametrize("steps", [(shard, convert), (convert, shard)], ids=["shard first", "convert first"])
def test_fsdp(steps, world_of_one):
    """fully_shard replaces classes, before or after `convert_`."""
    model = Model()
    for step in steps:
        step(model)
    names = [type(module).__name__ for module in model.modules()]
    assert names[:3] == ["FSDPModel", "FSDPExperts", "FSDPExperts"]
    assert_same(list(map(full, results(model))), expected("blockwise"))
    revert_(model)
    assert_same(list(map(full, results(model))), expected("rowwise"))


def test_subclasses():
    """`convert_` changes instances and not classes, and only if they have a known forward."""

    class Same(Experts):
        pass

    class Other(Same):
        def forward(self, *call: Tensor) -> Tensor:
            return 2 * super().forward(*call)

    convert_(Same(E, D, F), "blockwise")
    assert Same(E, D, F).options["recipe"] == Recipe("rowwise")
    with pytest.raises(ValueError, match="the forward of Other is not known"):
        convert_(Other(E, D, F))


def test_replaced_since():
    model = Model()
    convert_(model, "blockwise")
    model.first.options = dict(model.first.options, keep="bf16")
    before = state_of(model)
    text = "options of Experts must be what convert_ put there, got another"
    with pytest.raises(RuntimeError, match=f"^{text}$"):
        revert_(model)
    assert state_of(model) == before
    report = convert_(model, "mxfp8")
    assert report.left == (("first", text),) and [name for name, _, _ in report.converted] == ["second"]


NOTHING = "convert_: model must have experts that can be converted, got none"
RECIPES = "'bf16', 'rowwise', 'blockwise', 'mxfp8', 'auto' or a Recipe"


@pytest.mark.parametrize(
    ("model", "arguments", "error", "text"),
    [
        (Model, ("fp7",), ValueError, f"convert_: recipe must be {RECIPES}, got 'fp7'"),
        (Model, (8,), TypeError, "convert_: recipe must be a str or a Recipe, got int"),
        (Model, ("rowwise", "first"), TypeError, "convert_: filter must be callable, got str"),
        (
            Model,
            ("rowwise", lambda name: True),
            TypeError,
            r"convert_: filter must take a name and a module, got .*\(name\)",
        ),
        (Model, ("rowwise", lambda *_: False), ValueError, rf"{NOTHING}\nmodule .*\nfirst .*filter said no\nsecond.*"),
        (Model, ("rowwise", lambda name, _: [True][name != "first"]), IndexError, ".*"),
        (lambda: nn.Linear(D, D), (), ValueError, NOTHING),
        (Foreign, (), ValueError, rf"{NOTHING}\nmodule .*\n\(model\) .*the forward of Foreign is not known"),
        (list, (), TypeError, "convert_: model must be a torch.nn.Module, got list"),
    ],
)
def test_errors(model, arguments, error, text):
    """An error is raised before anything changes."""
    model = model()
    before = state_of(model) if model else None
    with pytest.raises(error, match=f"^{text}$"):
        convert_(model, *arguments)
    assert before is None or state_of(model) == before


def test_revert_takes_modules_alone():
    with pytest.raises(TypeError, match=re.escape("revert_: model must be a torch.nn.Module, got NoneType")):
        revert_(None)


def test_torchtitan_is_missing(monkeypatch):
    """The reason is the error of its override. test_convert_transformers.py tests the one of Transformers."""
    of_override = "moe_fp8_ext.integrations.torchtitan"
    for name in ("torchtitan", *(name for name in sys.modules if name.startswith("torchtitan."))):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, of_override, raising=False)
    known = "torchtitan must have overrides and GroupedExperts, as 0.3.0 has, or GroupedLinear"
    with pytest.raises(ImportError, match=f"^{of_override}: {known}, got no torchtitan: .*torchtitan"):
        importlib.import_module(of_override)


IMPORTED = """
import sys
import torch
import moe_fp8_ext
model = torch.nn.Sequential(moe_fp8_ext.Experts(2, 16, 16), torch.nn.Linear(2, 2), torch.nn.Conv1d(2, 2, 2))
moe_fp8_ext.convert_(model)
names = ("transformers", "torchtitan", "moe_fp8_ext.integrations.t", "torch.distributed.tensor")
assert not [name for name in sys.modules if name.startswith(names)]
"""


def test_nothing_is_imported_unasked():
    subprocess.run([sys.executable, "-c", IMPORTED], check=True)
