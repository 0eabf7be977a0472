"""StatsCallback in the Trainer of Transformers, and the statistics of Transformers' experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import assert_same, blocks
from transformers_models import EXPERTS, SIZES, TOP_K, gradients, tiny_model, transformers

import moe_fp8_ext

pytestmark = pytest.mark.usefixtures("registered")
STEPS, EVERY, BATCH, CONTEXT = 5, 2, 2, 16


class Writer:
    def __init__(self) -> None:
        self.steps: dict[str, list[int]] = {}

    def add_scalar(self, name: str, number: float, step: int) -> None:
        self.steps.setdefault(name, []).append(step)


def test_callback(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Transformers' Trainer needs accelerate")
    from moe_fp8_ext.integrations.trainer import StatsCallback

    model = tiny_model("qwen3_moe", "moe_fp8")
    tokens = torch.randint(3, SIZES["vocab_size"], (STEPS * BATCH * 2, CONTEXT))
    options = transformers.TrainingArguments(
        **dict(output_dir=str(tmp_path), max_steps=STEPS, per_device_train_batch_size=BATCH, use_cpu=True),
        **dict(gradient_accumulation_steps=2, save_strategy="no", report_to="none", logging_steps=100),
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model, options, train_dataset=[{"input_ids": t, "labels": t} for t in tokens])
    writer = Writer()
    callback = StatsCallback(trainer, every=EVERY, writer=writer)
    trainer.add_callback(callback)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "fp8/load" in entry]
    assert [entry["step"] for entry in logged] == [1, 3, 5]  # of which 0, 2 and 4 steps were done before
    layers = callback.stats.to_dict()["layers"]
    assert set(layers) == {f"model.layers.{i}.mlp.experts.{w}_proj" for i in range(2) for w in ("gate_up", "down")}
    assert {sum(layer["tokens_per_expert"]) for layer in layers.values()} == {BATCH * CONTEXT * TOP_K}
    last = logged[-1]
    for operand, statistic, choose in (("gradients", "ratio", max), ("tokens", "sqnr", min), ("weights", "amax", max)):
        assert last[f"fp8/{operand}/{statistic}"] == choose(layer[operand][statistic] for layer in layers.values())
    assert last["fp8/product_sqnr"] == min(layer["product_sqnr"] for layer in layers.values())
    assert all(steps == [1, 3, 5] for steps in writer.steps.values())
    assert len(writer.steps) == 4 * len(set(last) - {"epoch", "step"})
    with moe_fp8_ext.stats(model) as stats:  # the callback has stopped its own
        gradients(model)
    assert callback.stats.sampled == 4 and stats.sampled == 0


def test_resuming_as_documented(tmp_path: Path) -> None:
    """A run that resumes as docs/transformers.md says ends with the parameters of a run that was not interrupted."""
    pytest.importorskip("accelerate", reason="Transformers' Trainer needs accelerate")
    (block,) = blocks("docs/transformers.md", "Checkpoints of Trainer")
    tokens = torch.randint(3, SIZES["vocab_size"], (16, CONTEXT), generator=torch.Generator().manual_seed(0))
    options = transformers.TrainingArguments(
        **dict(output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=BATCH, use_cpu=True, save_steps=2),
        **dict(gradient_accumulation_steps=2, learning_rate=1e-2, report_to="none", disable_tqdm=True),
    )
    dataset = [{"input_ids": t, "labels": t} for t in tokens]
    names = dict(args=options, dataset=dataset, checkpoint=tmp_path / "checkpoint-2")
    whole = transformers.Trainer(tiny_model("qwen3_moe", "moe_fp8"), options, train_dataset=dataset)
    whole.train()
    exec(block, names)
    assert names["trainer"].state.global_step == 4 and names["model"] is not whole.model
    assert_same(list(names["model"].parameters()), list(whole.model.parameters()))


def test_speed(tmp_path: Path) -> None:
    """Tokens, operations and memory of steps after the first; `compute_loss` is the Trainer's own again afterwards."""
    pytest.importorskip("accelerate", reason="Transformers' Trainer needs accelerate")
    from torch.utils.flop_counter import FlopCounterMode

    from moe_fp8_ext.integrations.trainer import SpeedCallback

    model = tiny_model("qwen3_moe", "moe_fp8")
    options = transformers.TrainingArguments(
        **dict(output_dir=str(tmp_path), max_steps=STEPS, per_device_train_batch_size=BATCH, use_cpu=True),
        **dict(gradient_accumulation_steps=2, save_strategy="no", report_to="none", disable_tqdm=True),
    )
    tokens = torch.randint(3, SIZES["vocab_size"], (STEPS * BATCH * 2, CONTEXT))
    trainer = transformers.Trainer(model, options, train_dataset=[{"input_ids": t, "labels": t} for t in tokens])
    callback = SpeedCallback(trainer, every=EVERY, peak_flops=1e12)
    trainer.add_callback(callback)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "speed/mfu" in entry]
    assert [entry["step"] for entry in logged] == [3, 5] and "compute_loss" not in vars(trainer)
    batch = tokens[:BATCH]
    with FlopCounterMode(display=False) as counter:
        model(input_ids=batch, labels=batch).loss.backward()
    assert callback.flops_per_token == counter.get_total_flops() / batch.numel() > 0
    for entry in logged:
        flops = entry["speed/flops_per_second"]
        assert (
            flops == callback.flops_per_token * entry["speed/tokens_per_second"] and entry["speed/mfu"] == flops / 1e12
        )


@pytest.mark.parametrize("names", [["StatsCallback"], ["SpeedCallback"], ["StatsCallback", "SpeedCallback"]])
def test_losses_are_logged_as_without_callbacks(names: list[str], tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Transformers' Trainer needs accelerate")
    from moe_fp8_ext.integrations import trainer as callbacks

    tokens = torch.randint(3, SIZES["vocab_size"], (STEPS * BATCH, CONTEXT))
    data = [{"input_ids": t, "labels": t} for t in tokens]
    losses = []
    for chosen in ([], names):
        options = transformers.TrainingArguments(
            **dict(output_dir=str(tmp_path), max_steps=STEPS, per_device_train_batch_size=BATCH, use_cpu=True),
            **dict(save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=1),
        )
        torch.manual_seed(0)
        trainer = transformers.Trainer(tiny_model("qwen3_moe", "moe_fp8"), options, train_dataset=data)
        for name in chosen:
            trainer.add_callback(getattr(callbacks, name)(trainer, every=EVERY))
        trainer.train()
        losses.append({entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry})
    assert losses[0] == losses[1] and list(losses[0]) == list(range(1, STEPS + 1))


def trainer_of(tmp_path: Path, data: list[dict], **options: object) -> transformers.Trainer:
    pytest.importorskip("accelerate", reason="Transformers' Trainer needs accelerate")
    arguments = transformers.TrainingArguments(
        **dict(output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=BATCH, use_cpu=True),
        **dict(save_strategy="no", report_to="none", disable_tqdm=True) | options,
    )
    return transformers.Trainer(tiny_model("qwen3_moe", "moe_fp8"), arguments, train_dataset=data)


def examples(steps: int = 2) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(3, SIZES["vocab_size"], (steps * BATCH, CONTEXT))
    return [{"input_ids": t, "labels": t} for t in tokens]


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer", "second micro-batch"])
def test_speed_after_a_training_that_raised(where: str, tmp_path: Path) -> None:
    """Nothing stays counted or replaced; afterwards each token is counted once, and no step before the second timed."""
    trainer = trainer_of(tmp_path, examples(4), gradient_accumulation_steps=2)
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    from moe_fp8_ext.integrations.trainer import SpeedCallback

    callback = SpeedCallback(trainer, every=1)
    trainer.add_callback(callback)
    counted, model, calls = [], trainer.model, []
    stop = {
        "forward": lambda: model.register_forward_hook(lambda *_: 1 / 0),
        "backward": lambda: model.lm_head.weight.register_hook(lambda _: 1 / 0),
        "optimizer": lambda: trainer.create_optimizer().register_step_pre_hook(lambda *_: 1 / 0),
        "second micro-batch": lambda: model.register_forward_hook(lambda *_: calls.append(1 / (1 - len(calls)))),
    }[where]()
    speeds = callback._speeds
    callback._speeds = lambda: (counted.append(callback._tokens), speeds())[1]
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert not {"compute_loss", "training_step"} & set(vars(trainer)) and _get_current_dispatch_mode() is None
    assert callback.flops_per_token is None
    stop.remove()
    for _ in range(2):
        trainer.train()
    assert counted == 2 * [2 * BATCH * CONTEXT]
    assert not {"compute_loss", "training_step"} & set(vars(trainer)) and _get_current_dispatch_mode() is None


def test_statistics_after_a_training_that_raised(tmp_path: Path) -> None:
    """The statistics of the training that raised are off. They would take the samples of the next callback."""
    trainer = trainer_of(tmp_path, examples())
    from moe_fp8_ext.integrations.trainer import StatsCallback

    trainer.add_callback(StatsCallback(trainer))
    stop = trainer.model.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    stop.remove()
    trainer.remove_callback(StatsCallback)
    callback = StatsCallback(trainer)
    trainer.add_callback(callback)
    trainer.train()
    assert callback.stats.sampled == 0
    assert not {"compute_loss", "training_step"} & set(vars(trainer))


def test_speed_keeps_what_the_trainer_has(tmp_path: Path) -> None:
    """Two callbacks, and functions that a user gave the Trainer, are called in turn and put back."""
    trainer = trainer_of(tmp_path, examples())
    from moe_fp8_ext.integrations.trainer import SpeedCallback

    calls, before = [], {name: getattr(trainer, name) for name in ("compute_loss", "training_step")}

    def recorded(name: str) -> object:
        return lambda *args, **kwargs: (calls.append(name), before[name](*args, **kwargs))[1]

    given = {name: recorded(name) for name in before}
    vars(trainer).update(given)
    callbacks = [SpeedCallback(trainer, every=1) for _ in range(2)]
    for callback in callbacks:
        trainer.add_callback(callback)
    trainer.train()
    assert calls == 2 * ["training_step", "compute_loss"]
    assert all(vars(trainer)[name] is function for name, function in given.items())
    assert callbacks[0].flops_per_token == callbacks[1].flops_per_token > 0


def test_speed_without_input_ids(tmp_path: Path) -> None:
    """Tokens of inputs_embeds count, as tokens of input_ids do; labels count where a batch has neither."""
    embeds = torch.randn(2 * BATCH, CONTEXT, SIZES["hidden_size"], dtype=torch.bfloat16)
    data = [{"inputs_embeds": e, "labels": example["labels"]} for e, example in zip(embeds, examples(), strict=True)]
    trainer = trainer_of(tmp_path, data)
    from moe_fp8_ext.integrations.trainer import SpeedCallback, _count_tokens

    callback, counted = SpeedCallback(trainer, every=1), []
    trainer.add_callback(callback)
    speeds = callback._speeds
    callback._speeds = lambda: (counted.append(callback._tokens), speeds())[1]
    trainer.train()
    assert counted == [BATCH * CONTEXT]
    ids, text = torch.zeros(2, 3), "a batch must have a tensor input_ids, inputs_embeds or labels to count tokens of"
    assert _count_tokens({"input_ids": None, "labels": ids}) == 6
    assert _count_tokens({"inputs_embeds": torch.zeros(2, 5, 7), "labels": ids}) == 10
    for batch, got in (({"pixels": ids}, "one with pixels"), ({}, "one with nothing"), ([ids], "list")):
        with pytest.raises(ValueError, match=f"^SpeedCallback: {text}, got {got}; batches without tokens"):
            _count_tokens(batch)


@pytest.mark.parametrize("name", ["StatsCallback", "SpeedCallback"])
def test_errors_of_arguments(name: str, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, [])
    from moe_fp8_ext.integrations import trainer as callbacks

    make = getattr(callbacks, name)
    for every, text in ((1.5, "an int, got float"), ("5", "an int, got str"), (True, "an int, got bool")):
        with pytest.raises(RuntimeError, match=f"^{name}: every must be {text}$"):
            make(trainer, every=every)
    with pytest.raises(RuntimeError, match=f"^{name}: every must be at least 1, got 0; it counts optimizer steps$"):
        make(trainer, every=0)
    text = "trainer must be a Trainer of Transformers, got Qwen3MoeForCausalLM; the trainer has the model"
    with pytest.raises(TypeError, match=f"^{name}: {text}$"):
        make(trainer.model)


def test_errors_of_peak_flops_and_writer(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, [])
    from moe_fp8_ext.integrations.trainer import SpeedCallback, StatsCallback

    for peak_flops, text in (
        (0, "over 0, got 0; without it, no speed/mfu is logged"),
        (-1e12, "over 0, got -1000000000000.0; without it, no speed/mfu is logged"),
        (float("nan"), "a finite number, got nan"),
        ("989e12", "a finite number, got '989e12'"),
    ):
        with pytest.raises(RuntimeError, match=f"^SpeedCallback: peak_flops must be {text}$"):
            SpeedCallback(trainer, peak_flops=peak_flops)
    with pytest.raises(TypeError, match=r"^StatsCallback: writer must be an object with add_scalar\(.*, got str$"):
        StatsCallback(trainer, writer="runs")


def test_a_dense_model_warns(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Transformers' Trainer needs accelerate")
    from moe_fp8_ext.integrations.trainer import SpeedCallback

    sizes = {name: size for name, size in SIZES.items() if name != "num_experts_per_tok"}
    config = transformers.AutoConfig.for_model("qwen3", **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="moe_fp8")
    options = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    callback = SpeedCallback(transformers.Trainer(model, options))
    text = "experts_implementation='moe_fp8' has no effect on Qwen3ForCausalLM: no experts were found"
    with pytest.warns(UserWarning, match=text):
        callback.on_train_begin(options, None, None)


@pytest.mark.parametrize(
    ("name", "up"), [("gpt_oss", "gate_up_proj"), ("nemotron_h", "up_proj"), ("deepseek_v3", "gate_up_proj")]
)
def test_layouts_of_transformers(name: str, up: str) -> None:
    """Weights are found under their names: transposed ones of gpt_oss, and ones without a gate of nemotron_h."""
    model = tiny_model(name, "moe_fp8")
    with moe_fp8_ext.stats(model) as stats:
        gradients(model)
    layers = stats.to_dict()["layers"]
    of_model = {n for n, p in model.named_parameters() if p.dim() == 3 and p.shape[0] == EXPERTS}
    assert set(layers) == of_model and {n.rpartition(".")[2] for n in layers} == {up, "down_proj"}
    for layer in layers.values():
        assert 20 < layer["product_sqnr"] < 40 and {"tokens", "weights", "gradients"} <= set(layer)
