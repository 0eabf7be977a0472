"""The bench's programs that fine-tune models, on a CPU: they run, and say what they did."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from helpers import ROOT
from stand_in_graphs import stand_in_for_graphs

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("accelerate")
pytest.importorskip("tabulate", reason="the bench's dependencies are not installed")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
SDPA = "aten::_scaled_dot_product_flash_attention_for_cpu"
FEW_STEPS = "--model tiny --layers 1 --context 16 --sequences 1 --rank 2 --warm 1 --steps 1".split()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a program of the bench on a CPU and returns its output."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        importlib.import_module(name).main()
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("impl", ["ours", "stock"])
def test_finetune_with_graphs(bench, impl, monkeypatch, replays):
    """The losses of a run with graphs are the losses without."""
    stand_in_for_graphs(monkeypatch)
    losses = []
    for options in ([], ["--graphs"]):
        torch.manual_seed(0)  # for adapters
        found = json.loads(bench("finetune", *FEW_STEPS, "--steps", 2, "--impl", impl, *options))
        assert found["graphs"] == bool(options) and ("graphs" in found["seconds"]) == bool(options)
        losses.append(found["losses"])
        before, after = found["busiest_expert"]
        assert 1 <= before < 2 and (after is None) == bool(options)
    assert losses[0] == losses[1] and len(replays) == 3
    with pytest.raises(SystemExit):
        bench("finetune", "--impl", impl, "--graphs", "--compile", "layers")


def test_finetune_of_a_large_model_needs_a_gpu(bench, capsys):
    with pytest.raises(SystemExit):
        bench("finetune", "--impl", "ours")
    assert "--model Qwen3-30B-A3B needs a GPU; a CPU trains --model tiny" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    ["--impl stock --profile", "--impl ours --profile", "--impl ours --checkpoint", "--impl ours --adapters float32"],
)
def test_finetune(bench, tmp_path, options, monkeypatch):
    work, words = importlib.import_module("finetune_work"), options.split()
    monkeypatch.setattr(work, "OPS", 1000)
    words += [tmp_path / "model"] if words[-1] == "--checkpoint" else []
    found = json.loads(bench("finetune", *FEW_STEPS, *words, "--out", tmp_path / "out.json"))
    assert json.loads((tmp_path / "out.json").read_text()) == [found]
    # of q, k, v and o with 128, 64, 64 and 128 features; of 4 experts' gate and up, and down
    of_attention = 2 * (128 + 128 + 128 + 64 + 128 + 64 + 128 + 128)
    assert found["trained_parameters"] == of_attention + 4 * 2 * (128 + 256 + 128 + 128)
    # Logits of an untrained model are near zero, so every byte is nearly as likely as another.
    assert all(abs(loss - torch.tensor(256.0).log().item()) < 0.2 for loss in found["losses"])
    assert found["tokens_per_second"] == pytest.approx(16 / found["step_seconds"][0], rel=1e-3)
    assert found["from_checkpoint"] == (tmp_path / "model" / "config.json").exists()
    assert {"warm", "steps", "adapters"} < found["seconds"].keys()
    assert len(found["losses"]) == 2 + ("--profile" in words)
    if "--profile" in words:
        check_profile(found, work)


def check_profile(found: dict, work: ModuleType) -> None:
    """Each op has the kind of work of its part of the model, and the kinds add up to a step."""
    ms, products = found["profile_ms"], "moe_fp8::scaled_grouped_mm" if found["impl"] == "ours" else "aten::_grouped_mm"
    assert sum(ms.values()) == pytest.approx(1000 * found["step_seconds"][0], abs=0.005 * len(ms))
    kinds_of: dict[str, set[str]] = {}
    for kind, ops in found["profile_ops"].items():
        for op in ops:
            kinds_of.setdefault(op, set()).add(kind)
    want = {products: {work.PRODUCTS}, SDPA: {work.ATTENTION}, f"{SDPA}_backward": {work.ATTENTION}}
    want |= {"aten::rsqrt": {"norms and residuals"}, "aten::topk": {"router"}, "aten::cos": {work.ROTARY}}
    want |= {"aten::nll_loss_backward": {"embeddings and loss"}, "aten::addcdiv_": {"optimizer"}}
    if found["impl"] == "ours":
        want |= {"moe_fp8::quantize_rows": {work.OTHERS}, "moe_fp8::sort_tokens": {work.OTHERS}}
        want |= {f"moe_fp8::{op}": {work.ADAPTERS} for op in ("narrow_tokens", "outer_tokens", "cast_factor")}
    else:
        want |= {"aten::baddbmm": {work.ADAPTERS}, "aten::bmm": {work.ADAPTERS}, "aten::silu": {work.OTHERS}}
    assert {op: kinds_of[op] for op in want} == want
    by_factors_and_weights = {work.LINEAR, work.ADAPTERS_OF_LINEAR, "router", "embeddings and loss"}
    assert by_factors_and_weights <= kinds_of["aten::mm"]


@pytest.mark.parametrize("adapters", ["autocast", "float32", "bfloat16"])
def test_dtype_of_adapters(bench, monkeypatch, adapters):
    """Under autocast, no product of an adapter is in float32, in forward or where a checkpoint computes it again."""
    program, seen, parameters = importlib.import_module("finetune"), [], []

    def with_adapters(*args: object) -> object:
        model = with_adapters_of_the_bench(*args)
        parameters.extend(parameter.dtype for parameter in model.parameters() if parameter.requires_grad)
        for name, module in model.named_modules():
            if name.endswith(("q_proj.lora_A.default", "q_proj.lora_B.default")):
                module.register_forward_hook(lambda module, args, out: seen.append((args[0].dtype, out.dtype)))
        return model

    with_adapters_of_the_bench = program.with_adapters
    monkeypatch.setattr(program, "with_adapters", with_adapters)
    bench("finetune", *FEW_STEPS, "--impl", "ours", "--adapters", adapters)
    assert {*parameters} == {torch.bfloat16 if adapters == "bfloat16" else torch.float32}
    product = torch.float32 if adapters == "float32" else torch.bfloat16
    passes = 2 * 2 + 1  # two of each step, and one to count the slots of experts
    assert seen == [(product, product)] * len(seen) and len(seen) == 2 * passes  # of A and of B


def test_attention_is_compiled(bench, monkeypatch):
    """One graph serves all layers, forward and again under checkpoint, and its ops have kinds of work."""
    work = importlib.import_module("finetune_work")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(work, "OPS", 1000)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    options = (*FEW_STEPS, "--impl", "ours", "--layers", 3)
    compiled = "--compile", "attention", "--profile"
    found, eager = (json.loads(bench("finetune", *options, *more)) for more in (compiled, ()))
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]  # attention and a norm
    assert found["losses"][:2] == pytest.approx(eager["losses"], rel=1e-3)
    of_attention = found["profile_ops"][work.ATTENTION]
    assert {op for op in of_attention if op.startswith("aten::_scaled")} == {SDPA, f"{SDPA}_backward"}
    assert "aten::mm" in found["profile_ops"][work.COMPILED] and work.LINEAR not in found["profile_ms"]
    torch._dynamo.reset()


def test_layers_are_compiled(bench, monkeypatch):
    """A layer with adapters as factors is one graph, within its checkpoint. Every op has a kind of work."""
    work, program = importlib.import_module("finetune_work"), importlib.import_module("finetune")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(work, "OPS", 1000)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    checkpoint, calls = program.checkpoint, []

    def counted(*args: object, **options: object) -> object:
        calls.append(options)
        return checkpoint(*args, **options)

    monkeypatch.setattr(program, "checkpoint", counted)
    options = (*FEW_STEPS, "--impl", "ours")
    found = json.loads(bench("finetune", *options, "--compile", "layers", "--profile"))
    assert counters["stats"]["unique_graphs"] >= 1 and not counters["graph_break"]
    assert len(calls) == 2 * len(found["losses"])  # the layer and the logits, in each step
    eager = json.loads(bench("finetune", *options))
    assert found["losses"][:2] == pytest.approx(eager["losses"], rel=1e-3)
    ops = found["profile_ops"]
    assert "moe_fp8::scaled_grouped_mm" in ops[work.PRODUCTS] and "aten::mm" in ops[work.COMPILED_LAYERS]
    assert {op for op in ops[work.ATTENTION] if op.startswith("aten::_scaled")} == {SDPA, f"{SDPA}_backward"}
    torch._dynamo.reset()


def test_finetune_refuses_options_that_do_not_apply(bench, tmp_path):
    with pytest.raises(SystemExit):
        bench("finetune", "--impl", "stock", "--checkpoint", tmp_path)
    with pytest.raises(SystemExit):
        bench("finetune", "--impl", "ours", "--model", "tiny", "--memory", 80)


def test_finetune_losses(bench, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    program = importlib.import_module("finetune_losses")
    monkeypatch.setattr(program, "SEEDS", (0,))
    steps = "--tiny --steps 2 --pretraining 1 --sequences 1 --context 16".split()
    text, found = bench("finetune_losses", *steps, "--out", tmp_path / "out.json").strip().rsplit("\n", 1)
    assert [line.split()[:2] for line in text.splitlines()[1:]] == [["bf16", "0"], ["fp8", "0"]]
    found, runs = json.loads(found), json.loads((tmp_path / "out.json").read_text())["runs"]
    assert found["held_out"]["bf16"] == runs[0]["held_out"] and len(runs[1]["losses"]) == 2
    assert runs[1]["losses"] != runs[0]["losses"]
    assert found["held_out"]["fp8"] == pytest.approx(runs[0]["held_out"], rel=0.01)


def test_table(monkeypatch):
    """A run is compared with stock on its own GPU, if stock had the memory."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    same = dict(model="M", layers=3, of_layers=4, rank=16, context=4096, sequences=2, adapters="float32")
    same |= dict(attention_only=False, commit="abcdefgh")
    runs = [
        dict(**same, impl="ours", device="large", tokens_per_second=2600.0, peak_bytes=50e9),
        dict(**same, impl="stock", device="large", tokens_per_second=1000.0, peak_bytes=100e9),
        dict(**same, impl="ours", device="small", tokens_per_second=2500.0, peak_bytes=51e9),
        dict(**same, impl="stock", device="small", out_of_memory="CUDA out of memory", peak_bytes=79e9),
        dict(**same, impl="ours", device="large", memory=80, tokens_per_second=2400.0, peak_bytes=50e9),
    ]
    losses = dict(fp8=1.01, bf16=1.0, difference=0.01, spread_of_bf16=0.02, difference_of_seeds=[0.01, 0.0, 0.02])
    losses = dict(steps=300, device="large", commit="abcdefgh", held_out=losses)
    text = importlib.import_module("tables").finetune_text(runs, losses)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| M")]
    assert [line[0] for line in lines] == [f"M, 3 of 4 layers{more}" for more in ("", "", ", in 80 GB", "", "")]
    assert [line[4:] for line in lines] == [
        ["2,600", "2.60", "50.0", "0.50"],
        ["1,000", "1.00", "100.0", "1.00"],
        ["2,400", "", "50.0", ""],
        ["2,500", "", "51.0", ""],
        ["out of memory", "", "", ""],
    ]
    assert "1.0100 over FP8 and 1.0000 over BF16, means of 3 seeds" in " ".join(text.split())
    assert "by kind of work" not in text and "Routing" not in text
    runs[0] |= dict(profile_ms={"attention": 1200.0, "no kernel": -0.1}, overlap="divided", busiest_expert=[1.21, None])
    runs[1] |= dict(profile_ms={"attention": 1300.0, "router": 2.0}, overlap="divided")
    text = importlib.import_module("tables").finetune_text(runs)
    assert "the busiest expert has 1.2 to 1.2 times as many slots as the mean" in " ".join(text.split())
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    assert ["work", "M, large, moe_fp8_ext, FP8", "M, large, Transformers + PEFT, BF16"] in lines
    assert lines[-3:] == [["attention", "1,200.0", "1,300.0"], ["router", "0.0", "2.0"], ["no kernel", "-0.1", "0.0"]]
    assert "Not measured yet" in importlib.import_module("tables").finetune_text(None)


@pytest.mark.parametrize(("fp8", "within"), [((1.1, 2.1), True), ((2.0, 3.5), False)])
def test_losses_are_compared_with_the_spread_of_seeds(monkeypatch, fp8, within):
    monkeypatch.syspath_prepend(ROOT / "bench")
    losses = {"bf16": (1.0, 2.0), "fp8": fp8}
    runs = [dict(arm=arm, training=x, held_out=x) for arm in losses for x in losses[arm]]
    found = importlib.import_module("finetune_losses").compared(runs)["held_out"]
    assert (found["spread_of_bf16"], found["within"]) == (1.0, within)
    assert found["difference_of_seeds"] == pytest.approx([a - b for a, b in zip(fp8, losses["bf16"], strict=True)])
