"""The example that fine-tunes a model of Transformers, run on a tiny model with a tokenizer of bytes."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import fp8_checkpoints
import pytest
import torch
from helpers import ROOT, blocks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
tokenizers = pytest.importorskip("tokenizers")

STEPS = 10
OPTIONS = f"--steps {STEPS} --batch 4 --context 32 --lr 3e-3".split()
SIZES = dict(
    **dict(hidden_size=64, intermediate_size=48, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=2),
    **dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=256),
)
SENTENCES = (
    "A router sends each token to a few experts.",
    "An expert multiplies its tokens by two weights.",
    "Weights are quantized once, and tokens in every step.",
    "A scale covers a row, or a block of 128 values.",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    of_bytes = tokenizers.Tokenizer(model)
    of_bytes.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=of_bytes).save_pretrained(path)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("qwen3_moe", **SIZES)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text whose loss falls in a few steps. It is no page of the project, because losses depend on the text."""
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(" ".join(SENTENCES * 40))
    return path


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("finetune", ROOT / "examples" / "finetune_transformers.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def finetune(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs the example on a CPU and returns its output."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["finetune_transformers.py", *map(str, arguments)])
        example.main()
        return capsys.readouterr().out

    return run


def ends(printed: str) -> tuple[float, float]:
    """Returns the losses of the first step and of the last."""
    return tuple(map(float, re.search(r"^loss (\S+) in the first step, (\S+) in the last", printed, re.M).groups()))


def test_loop(finetune, folder, corpus, tmp_path):
    by_name, steps = {}, {}
    for name in ("grouped_mm", "moe_fp8"):
        printed = finetune(folder, corpus, "--out", tmp_path, "--loop", "--implementation", name, *OPTIONS)
        steps[name] = re.findall(r"^step \d+: loss (\S+)", printed, re.M)
        assert len(steps[name]) == STEPS
        by_name[name] = ends(printed)
    assert by_name["moe_fp8"] == pytest.approx(by_name["grouped_mm"], rel=0.01)
    assert steps["moe_fp8"] != steps["grouped_mm"]
    assert by_name["moe_fp8"][1] < 0.9 * by_name["moe_fp8"][0]


def test_documented_command(finetune, folder, corpus, tmp_path):
    """Uses Trainer if accelerate is installed. The result is a model folder again."""
    (block,) = blocks("docs/transformers.md", "Fine-tuning", "bash")
    command = block.removeprefix("python examples/finetune_transformers.py ").split()
    places = {"path/to/model": folder, "text.txt": corpus, "path/to/finetuned": tmp_path}
    assert places.keys() < set(command)
    first, last = ends(finetune(*(places.get(word, word) for word in command), *OPTIONS))
    assert last < 0.9 * first
    assert "moe_fp8" not in (tmp_path / "config.json").read_text()
    again, _ = ends(finetune(tmp_path, corpus, "--out", tmp_path / "again", *OPTIONS))
    assert again < 0.9 * first


def test_adapters(finetune, folder, corpus, tmp_path):
    """The documented command trains adapters alone, as PEFT's own product does, and saves what PEFT loads."""
    peft = pytest.importorskip("peft")
    (block,) = blocks("docs/finetuning.md", None, "bash")
    places = {"path/to/model": folder, "text.txt": corpus}
    command = [places.get(word, word) for word in block.split()[2:]]
    assert {*places.values()} < {*command} and command[-1] == "path/to/adapter"
    by_name = {}
    for name in ("grouped_mm", "moe_fp8"):
        out = tmp_path / name
        options = "--loop", "--implementation", name, "--rank", "4", *OPTIONS, "--lr", "0.03"
        printed = finetune(*command[:-1], out, *options)
        assert re.search(r"^trainable params: [\d,]+ ", printed, re.M)
        by_name[name] = ends(printed)
        assert not (out / "model.safetensors").exists()
    assert by_name["moe_fp8"] == pytest.approx(by_name["grouped_mm"], rel=0.02)
    # Embeddings stay random, so adapters learn little more than which bytes are frequent.
    assert by_name["moe_fp8"][1] < 0.97 * by_name["moe_fp8"][0] and by_name["moe_fp8"] != by_name["grouped_mm"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    names = {name for name, _ in peft.PeftModel.from_pretrained(model, out).named_parameters() if "lora_" in name}
    assert len(names) == 2 * 2 * (4 + 2)  # A and B of 4 weights of attention and 2 of experts, in 2 layers


def test_adapters_of_an_fp8_checkpoint(example, finetune, folder, corpus, tmp_path, monkeypatch):
    """Experts stay in FP8, as on a GPU; only recipe "blockwise" has their blocks."""
    pytest.importorskip("peft")
    checkpoint = fp8_checkpoints.write(tmp_path / "fp8", vocab_size=256)
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(checkpoint)
    as_on_a_gpu = SimpleNamespace(from_pretrained=fp8_checkpoints.load)
    monkeypatch.setattr(example, "AutoModelForCausalLM", as_on_a_gpu)
    options = "--lora", "--loop", *OPTIONS, "--lr", "0.03", "--out", tmp_path / "adapter"
    blockwise = "--implementation", "moe_fp8_blockwise", *options
    first, last = ends(finetune(checkpoint, corpus, *blockwise, "--fp8-checkpoint", tmp_path / "merged"))
    assert last < 0.9 * first
    again, _ = ends(finetune(tmp_path / "merged", corpus, *blockwise))
    assert again < 0.95 * first
    with pytest.raises(SystemExit, match='the recipe must be "blockwise" for an FP8 checkpoint'):
        finetune(checkpoint, corpus, "--implementation", "moe_fp8_rowwise", *options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--implementation", "moe_fp8_fp9"), "moe_fp8_fp9"),
        (("--fp8-checkpoint", "unwritten"), "must have sizes that are multiples of 128, got 48 and 64"),
        (("--batch", 5000), r"the text must fill a batch of 5000 x 32 tokens, got \d+ sequences"),
    ],
)
def test_what_cannot_be_trained(finetune, folder, corpus, tmp_path, options, text):
    with pytest.raises(SystemExit, match=text):
        finetune(folder, corpus, "--out", tmp_path, *OPTIONS, *options)


def test_model_without_experts(finetune, folder, corpus, tmp_path):
    dense = {name: size for name, size in SIZES.items() if "expert" not in name and "moe" not in name}
    config = transformers.AutoConfig.for_model("qwen3", **dense)
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match="must have experts that Transformers lets others multiply"):
        finetune(tmp_path, corpus, "--out", tmp_path, *OPTIONS)


@pytest.mark.parametrize(
    ("options", "text"),
    [(("--steps", "0"), "--steps must be positive, got 0"), (("--lr", "nan"), "--lr must be positive, got nan")],
)
def test_bad_options(finetune, folder, tmp_path, capsys, options, text):
    with pytest.raises(SystemExit):
        finetune(folder, corpus, "--out", tmp_path, *options)
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("used", ["out", "earlier"])
def test_folder_of_an_fp8_checkpoint_in_use(finetune, folder, corpus, tmp_path, capsys, used):
    """The example says so before it trains, not when it writes."""
    (tmp_path / "earlier").mkdir()
    (tmp_path / "earlier" / "config.json").touch()
    with pytest.raises(SystemExit):
        finetune(folder, corpus, "--out", tmp_path / "out", "--fp8-checkpoint", tmp_path / used, *OPTIONS)
    text = f"--fp8-checkpoint must be a new or empty folder, and not --out, got {tmp_path / used}"
    assert text in capsys.readouterr().err


def test_folder_without_a_model(finetune, tmp_path, capsys):
    with pytest.raises(SystemExit):
        finetune(tmp_path, corpus, "--out", tmp_path)
    assert "config.json is no file; model must be a folder as save_pretrained writes it" in capsys.readouterr().err
