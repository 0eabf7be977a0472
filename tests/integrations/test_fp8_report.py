"""fp8_report: what computes by a recipe, what does not and why, for every way in."""

from __future__ import annotations

import pytest
import torch
from fp8_checkpoints import EXPERTS, load, write
from torch import nn
from transformers_models import tiny_model

from moe_fp8_ext import Experts, Recipe, convert_, fp8_report
from moe_fp8_ext.integrations.transformers import register

MARKED = [f"model.layers.{i}.mlp.experts" for i in range(2)]


@pytest.fixture(autouse=True)
def registered() -> None:
    register()


class Foreign(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 32, 32))


def test_modules_of_this_package():
    model = nn.Sequential(Experts(4, 32, 48, recipe="blockwise"), Foreign(), nn.Linear(32, 32))
    report = fp8_report(model)
    assert report.running == (("0", "moe_fp8_ext", Recipe("blockwise"), ""),)
    assert report.others == (("1", "the forward of Foreign is not known"),)
    assert fp8_report(model[0]).running[0].name == ""


def test_ways_into_transformers():
    """The implementation of the config; another one; `convert_`, whatever the config says; and a replaced forward."""
    model = tiny_model("qwen3_moe", "moe_fp8_blockwise")
    assert fp8_report(model) == ((*((name, "transformers", Recipe("blockwise"), "") for name in MARKED),), ())
    model.set_experts_implementation("grouped_mm")
    report = fp8_report(model)
    assert report == ((), tuple((name, "experts_implementation is 'grouped_mm'") for name in MARKED))
    assert "no recipe: experts_implementation is 'grouped_mm'" in str(report)
    convert_(model, "mxfp8", filter=lambda name, module: ".0." in name)
    report = fp8_report(model)
    assert report.running == ((MARKED[0], "transformers", Recipe("mxfp8"), ""),)
    assert [other.name for other in report.others] == MARKED[1:]
    model.get_submodule(MARKED[1]).forward = lambda *args: args[0]
    assert fp8_report(model).others == ((MARKED[1], "another forward took the place of its class's"),)


def test_experts_with_a_gate_of_their_own():
    """They say that only products are of this package."""
    model = tiny_model("qwen3_moe", "moe_fp8")
    for name in MARKED:
        model.get_submodule(name).act_fn = nn.Tanh()
    report = fp8_report(model)
    assert [row.note for row in report.running] == ["the model's own code between the two products"] * 2
    assert "Recipe('rowwise'), the model's own code between the two products" in str(report)


def test_weights_that_are_quantized_already():
    model = tiny_model("qwen3_moe", "moe_fp8")
    experts = model.get_submodule(MARKED[0])
    experts.down_proj = nn.Parameter(experts.down_proj.detach().to(torch.float8_e4m3fn), requires_grad=False)
    (left,) = fp8_report(model).others
    assert left.name == MARKED[0]
    assert left.why.startswith("moe_fp8: gate_up_proj must be float8_e4m3fn in an FP8 checkpoint, got bfloat16")


def test_an_fp8_checkpoint(tmp_path):
    report = fp8_report(load(write(tmp_path), "moe_fp8"))
    assert report.running == tuple((name, "FP8 checkpoint", Recipe("blockwise"), "") for name in EXPERTS)


def test_a_dense_model():
    assert str(fp8_report(nn.Linear(3, 3))) == "no experts were found: nothing of this model computes by a recipe"
    with pytest.raises(TypeError, match="^fp8_report: model must be a torch.nn.Module, got int$"):
        fp8_report(3)
