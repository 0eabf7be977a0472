"""Models that accelerate places or offloads, before and after `convert_` and `set_experts_implementation`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fp8_checkpoints import EXPERTS, load, write
from torch import Tensor, nn
from transformers_models import assert_same, calls, experts_of, results, tiny_model

from moe_fp8_ext import Experts, convert_, export_fp8, revert_
from moe_fp8_ext.integrations.fp8_checkpoint import master_weights_
from moe_fp8_ext.integrations.transformers import register

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
hooks = pytest.importorskip("accelerate.hooks")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

TOKENS = torch.arange(3, 35)[None]


class Counts(hooks.ModelHook):
    """Counts the calls that go through it."""

    calls = 0

    def pre_forward(self, module: nn.Module, *args: object, **kwargs: object) -> tuple[object, object]:
        self.calls += 1
        return args, kwargs


def hook(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "is_transposed"):
            hooks.add_hook_to_module(module, Counts())


def offload(model: nn.Module) -> None:
    accelerate.cpu_offload(model, execution_device="cpu")


def dispatch(model: nn.Module) -> None:
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits


@pytest.fixture(scope="module")
def want() -> dict[str, Tensor]:
    register()
    return {name: logits(tiny_model("qwen3_moe", name)) for name in ("eager", "moe_fp8_blockwise")}


def convert(model: nn.Module) -> None:
    convert_(model, "blockwise")


def implement(model: nn.Module) -> None:
    model.set_experts_implementation("moe_fp8_blockwise")


@pytest.mark.parametrize("place", [hook, offload, dispatch])
@pytest.mark.parametrize("convert", [convert, implement])
@pytest.mark.parametrize("placed_first", [True, False])
def test_any_order(want: dict[str, Tensor], place: Callable, convert: Callable, placed_first: bool) -> None:
    model = tiny_model("qwen3_moe", "eager")
    for step in (place, convert) if placed_first else (convert, place):
        step(model)
    assert torch.equal(logits(model), want["moe_fp8_blockwise"])
    assert not torch.equal(want["moe_fp8_blockwise"], want["eager"])


@pytest.mark.parametrize("convert_first", [True, False])
@pytest.mark.parametrize("revert_first", [True, False])
def test_revert(convert_first: bool, revert_first: bool) -> None:
    """Every order of convert_, revert_, and of accelerate's hook, on and off, ends with the forward of the class."""
    experts, call = experts_of("qwen3_moe"), calls()
    stock, counts = results(experts, *call), Counts()
    steps = [lambda: convert_(experts, "blockwise"), lambda: hooks.add_hook_to_module(experts, counts)]
    for step in steps if convert_first else reversed(steps):
        step()
    converted = results(experts, *call)
    assert not torch.equal(converted["out"], stock["out"]) and counts.calls == 1
    if revert_first:
        revert_(experts)
        assert_same(results(experts, *call), stock)
        assert counts.calls == 2
        hooks.remove_hook_from_module(experts)
    else:
        hooks.remove_hook_from_module(experts)
        assert_same(results(experts, *call), converted)
        revert_(experts)
    assert_same(results(experts, *call), stock)
    assert counts.calls == 1 + revert_first and not hasattr(experts, "_hf_hook")
    convert_(experts, "blockwise")  # accelerate has left the forward of the class on the module itself
    assert_same(results(experts, *call), converted)


def test_copies() -> None:
    """A copy of hooked and converted experts computes with its own weights."""
    experts, call = experts_of("qwen3_moe"), calls()
    hooks.add_hook_to_module(experts, Counts())
    convert_(experts, "blockwise")
    other = copy.deepcopy(experts)
    with torch.no_grad():
        experts.down_proj.zero_()
    assert not experts(*call).any() and other(*call).any()
    revert_(other)
    assert other._old_forward.__self__ is other


def test_fp8_checkpoints_of_which_two_are_loaded(tmp_path: Path) -> None:
    """Each loading gives the class of the experts another forward. Hooks of the first model hold the earlier one."""
    folder = write(tmp_path)
    first, want = load(folder, "moe_fp8_blockwise"), load(folder, "moe_fp8_blockwise")
    experts = first.model.layers[0].mlp.experts
    hooks.add_hook_to_module(experts, Counts())
    load(folder, "moe_fp8_blockwise")
    assert experts._old_forward.__func__ is not type(experts).forward
    assert {layer.name for layer in convert_(first, "blockwise").converted} == set(EXPERTS)
    assert torch.equal(logits(first), logits(want))
    assert experts._hf_hook.calls == 1
    revert_(first)
    assert torch.equal(logits(first), logits(want))


def test_offloaded_weights_are_not_read(tmp_path: Path) -> None:
    """They are on the meta device. What is made of them would be lost, so nothing is changed."""
    register()
    model = load(write(tmp_path), "moe_fp8_blockwise")
    before = logits(model)
    offload(model)
    with pytest.raises(RuntimeError, match="^master_weights_: .*gate_up_proj must have values, .* before they are off"):
        master_weights_(model)
    with pytest.raises(RuntimeError, match="^export_fp8: .* must have values, .* before they are offloaded"):
        export_fp8(model, tmp_path / "out")
    experts = Experts(2, 128, 128, recipe="blockwise")
    offload(experts)
    with pytest.raises(RuntimeError, match="^Experts.freeze_: gate_up_proj must have values, .* before they are off"):
        experts.freeze_()
    assert torch.equal(logits(model), before)


def test_hook_around_a_forward_that_is_not_known() -> None:
    """Such a forward is refused, with what to do, as without a hook."""
    experts = experts_of("qwen3_moe")
    original = experts.forward
    experts.forward = lambda *call: original(*call)
    hooks.add_hook_to_module(experts, Counts())
    before = dict(vars(experts))
    with pytest.raises(ValueError, match="got another that the module itself has; let convert_ run first, or use"):
        convert_(experts)
    assert vars(experts) == before
