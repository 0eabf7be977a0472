"""The bench's program that trains whole models, on a CPU with tiny models: what it measures, and where it puts time."""

from __future__ import annotations

import importlib
import json
import sys
from types import ModuleType

import pytest
import torch
from helpers import ROOT
from torch import nn
from torch.autograd.profiler_util import FunctionEvent

pytest.importorskip("transformers")
pytest.importorskip("tabulate", reason="the bench's dependencies are not installed")
pytest.importorskip("tqdm", reason="the bench's dependencies are not installed")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
CPU = torch.device("cpu")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "bench")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    whole_models = importlib.import_module("whole_models")
    monkeypatch.setattr(whole_models, "REPEATS", 2)
    monkeypatch.setattr(whole_models, "WARM", 1)
    monkeypatch.setattr(whole_models, "CUTS", dict.fromkeys(whole_models.CUTS, whole_models.Cut(1)))
    return whole_models


def test_every_model_trains_with_every_implementation(bench, tmp_path, monkeypatch):
    """GPT-OSS and DeepSeek-V3 have the most ways of their own: sinks, biases, groups of experts, a shared expert."""
    monkeypatch.setattr(sys, "argv", ["", "--models", "GPT-OSS-20B,DeepSeek-V3", "--out", str(tmp_path / "out.json")])
    bench.main()
    result = json.loads((tmp_path / "out.json").read_text())
    assert [row["model"] for row in result["rows"]] == ["GPT-OSS-20B", "DeepSeek-V3"] and result["transformers"]
    for row in result["rows"]:
        assert all([*row[key]] == [*bench.IMPLEMENTATIONS] for key in ("losses", "seconds", "us", "us_of_ops"))
        assert all(len(seconds) == 2 for seconds in row["seconds"].values())
        # Logits of an untrained model are near zero, so every token is nearly as likely as another.
        assert all(abs(loss - torch.tensor(256.0).log().item()) < 0.2 for loss in row["losses"].values())
        assert len({*row["losses"].values()}) == 3
        assert all(1 <= load < 2.5 for load in row["busiest_expert"])
        assert row["sizes"][2] == {"GPT-OSS-20B": 32, "DeepSeek-V3": 256}[row["model"]]


def test_tokens_of_random_models_choose_all_experts(bench):
    """The busiest expert has 1.3 times the mean if tokens choose at random, and 16 times if all choose the same two."""
    hf_models, routing = map(importlib.import_module, ("hf_models", "routing"))
    others = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=64, vocab_size=256)
    config = hf_models.sized("qwen3_moe", (128, 128, 32, 2), 24, **others)
    model = hf_models.materialize(hf_models.on_meta(config, hf_models.BASELINE), CPU)
    tokens = torch.randint(256, (4, 128), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), routing.counted(model) as ratio:
        model.base_model(input_ids=tokens)
    assert ratio() < 2.5  # some of these tokens are the same word. Weights of one deviation gave 4.9


def test_a_step_must_run_what_it_was_asked_to(bench, monkeypatch):
    trainer = tiny_trainer(bench, "Mixtral-8x7B")
    monkeypatch.setattr(trainer, "step", lambda implementation: None)
    with pytest.raises(RuntimeError, match="moe_fp8_rowwise ran no products of this package"):
        bench.profiled(trainer, "moe_fp8_rowwise", CPU)


def tiny_trainer(bench: ModuleType, name: str) -> object:
    bench.register()
    model = bench.model_of(name, bench.Cut(1), CPU)
    return bench.Trainer(model, torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(0)))


def outermost(ops: list[FunctionEvent]) -> float:
    """Microseconds of the ops that no other op calls."""
    return sum(op.cpu_time_total for op in ops if op.cpu_parent is None)


@pytest.mark.parametrize("implementation", ["grouped_mm", "moe_fp8_rowwise"])
def test_parts_of_a_step(bench, implementation):
    """Forward and backward of every part are found, and the start of backward alone is left over."""
    waterfall, device_time = map(importlib.import_module, ("waterfall", "device_time"))
    trainer = tiny_trainer(bench, "DeepSeek-V3")
    with waterfall.marked(waterfall.parts_of(trainer.model)):
        profile = device_time.profiled(lambda: trainer.step(implementation), CPU)
    us = waterfall.microseconds(profile)
    assert sum(us.values()) == pytest.approx(outermost(profile.ops))
    assert [*us] == [*waterfall.PARTS]
    found: dict[str, set[str | None]] = {}
    parts = waterfall.assigned(profile.ops)
    for event, part in parts.items():
        found.setdefault(event.name, set()).add(part)
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    want = {
        attention: "attention",
        f"{attention}_backward": "attention",
        "aten::embedding": "embeddings and loss",
        "aten::embedding_dense_backward": "embeddings and loss",
        "aten::nll_loss_backward": "embeddings and loss",
        "aten::sigmoid_backward": "router",
    }
    want |= {name: "experts" for name in found if name.startswith("moe_fp8::")}
    assert any(name.startswith("moe_fp8::") for name in found) == (implementation != "grouped_mm")
    for name, part in want.items():
        assert found[name] == {part}, name
    assert found["aten::rsqrt"] == {"norms and residuals", "attention"}
    assert found["aten::silu"] >= {"dense MLPs"} and found["aten::silu_backward"] >= {"dense MLPs"}
    assert found["aten::addcdiv_"] == {"optimizer"}  # of AdamW
    rest = {event.name for event, part in parts.items() if part is None and event.cpu_parent is None}
    assert rest == {"aten::ones_like"}  # the gradient of the loss


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return grad.sinh() * 2


class First(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        y.argmax()  # makes no node: it has the number of the next one, which the second module makes
        return y


class Second(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(x)


def test_backward_belongs_to_the_module_that_made_the_node(bench):
    waterfall, device_time = map(importlib.import_module, ("waterfall", "device_time"))
    first, second = First(), Second()
    x = torch.randn(4, requires_grad=True)
    with waterfall.marked({first: "first", second: "second"}):
        profile = device_time.profiled(lambda: second(first(x)).sum().backward(), CPU)
    part_of = {op.name: part for op, part in waterfall.assigned(profile.ops).items()}
    assert part_of["aten::argmax"] == "first" and part_of["ExpBackward0"] == "first"
    assert part_of["aten::sinh"] == part_of["DoubledBackward"] == "second"
    assert part_of["SumBackward0"] is None


def test_ops_by_kind(bench):
    """The innermost op that has a kind counts, and the kinds add up."""
    waterfall, device_time = map(importlib.import_module, ("waterfall", "device_time"))
    w = torch.randn(8, 8)

    def step() -> None:
        with waterfall.mark("optimizer"):
            w @ w
            w.exp()
        w.sin()

    profile = device_time.profiled(step, CPU)
    us = waterfall.by_op(profile, {"products": ("aten::mm",), "optimizer": ("optimizer",)})
    assert [*us] == ["products", "optimizer", "rest"]
    assert sum(us.values()) == pytest.approx(outermost(profile.ops))


def test_attention_with_sinks(bench):
    """Values and gradients equal Transformers' eager attention of GPT-OSS, in float32."""
    hf_models = importlib.import_module("hf_models")
    eager = importlib.import_module("transformers.models.gpt_oss.modeling_gpt_oss").eager_attention_forward
    torch.manual_seed(0)
    module = nn.Module()
    module.num_key_value_groups, module.sliding_window = 2, None
    module.sinks = nn.Parameter(torch.randn(4))
    query, key, value = (torch.randn(2, heads, 9, 16, requires_grad=True) for heads in (4, 2, 2))
    mask = torch.full((9, 9), float("-inf")).triu(1)
    want, _ = eager(module, query, key, value, mask, scaling=0.25)
    got, _ = hf_models._attention_with_sinks(module, query, key, value, None, scaling=0.25, s_aux=module.sinks)
    torch.testing.assert_close(got, want)
    grad = torch.randn_like(want)
    gradients = [torch.autograd.grad(out, (query, key, value, module.sinks), grad) for out in (got, want)]
    torch.testing.assert_close(*gradients)
