"""Models of Transformers whose layers are on two GPUs, as `device_map="auto"` places them, and the Trainer on GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fp8_checkpoints import VOCABULARY, write
from helpers import NO_SECOND_GPU, assert_same
from torch import Tensor, nn
from transformers_models import SIZES, tiny_model, transformers

import moe_fp8_ext
from moe_fp8_ext import convert_

pytestmark = [pytest.mark.usefixtures("registered"), NO_SECOND_GPU]
pytest.importorskip("accelerate", reason="accelerate places layers")

PLACES = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "model.norm": 1, "lm_head": 1}
PLACES |= {"model.rotary_emb": 0}
RECIPES = ["rowwise", "blockwise", "mxfp8", "auto"]


def loaded(folder: Path, recipe: str, places: dict[str, int]) -> nn.Module:
    options = dict(dtype=torch.bfloat16, experts_implementation=f"moe_fp8_{recipe}", device_map=places)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def adapted(model: nn.Module) -> nn.Module:
    """The model with adapters on its experts, whose B is not zero."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    names = ["experts.gate_up_proj", "experts.down_proj"]
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj"], target_parameters=names)
    torch.manual_seed(0)
    model = peft.get_peft_model(model, config)
    convert_(model, "blockwise")
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.randn(p.shape, generator=g) * 0.1)
            elif "lora_A" in name:
                p.copy_(torch.randn(p.shape, generator=g) * p.shape[-1] ** -0.5)
    return model


def results(model: nn.Module, checkpointing: bool = False) -> list[Tensor]:
    """Logits and gradients of two steps."""
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    found = []
    for step in range(2):
        tokens = torch.randint(3, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(step)).cuda()
        out = model(input_ids=tokens, labels=tokens, use_cache=False)
        out.loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert grads
        found += [out.logits.detach().cpu(), *[g.cpu() for g in grads]]
        for p in model.parameters():
            p.grad = None
    return found


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_on_two_gpus(recipe: str, checkpointing: bool, tmp_path: Path) -> None:
    tiny_model("qwen3_moe", "eager").save_pretrained(tmp_path)
    two, one = (loaded(tmp_path, recipe, places) for places in (PLACES, {"": 0}))
    assert {p.device.index for p in two.parameters()} == {0, 1}
    assert_same(results(two, checkpointing), results(one, checkpointing))


@pytest.mark.parametrize("adapts", [False, True])
def test_fp8_checkpoint_on_two_gpus(adapts: bool, tmp_path: Path) -> None:
    folder = write(tmp_path)
    two, one = (loaded(folder, "blockwise", places) for places in (PLACES, {"": 0}))
    if adapts:
        two, one = adapted(two), adapted(one)
    assert_same(results(two), results(one))


def test_frozen_weights_with_adapters_on_two_gpus(tmp_path: Path) -> None:
    tiny_model("qwen3_moe", "eager").save_pretrained(tmp_path)
    two, one = (adapted(loaded(tmp_path, "blockwise", places)) for places in (PLACES, {"": 0}))
    assert_same(results(two), results(one))


@pytest.mark.parametrize("current", [0, 1])
def test_generation_on_two_gpus(current: int, tmp_path: Path) -> None:
    """The current GPU need not be the one of a layer."""
    tiny_model("qwen3_moe", "eager").save_pretrained(tmp_path)
    two, one = (loaded(tmp_path, "auto", places).eval() for places in (PLACES, {"": 0}))
    tokens = torch.arange(3, 11)[None].cuda(0)
    want = one.generate(tokens, max_new_tokens=12, do_sample=False)
    with torch.cuda.device(current):
        assert torch.equal(two.generate(tokens, max_new_tokens=12, do_sample=False), want)


@pytest.mark.parametrize("recipe", RECIPES)
def test_data_parallel(recipe: str) -> None:
    """torch's DataParallel runs replicas in threads, one for each GPU."""
    model = tiny_model("qwen3_moe", f"moe_fp8_{recipe}").cuda()
    tokens = torch.randint(3, SIZES["vocab_size"], (4, 24)).cuda()
    want = []
    for half in tokens.chunk(2):
        logits = model(input_ids=half, use_cache=False).logits
        logits.square().mean().backward()
        want.append(logits.detach())
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    logits = nn.DataParallel(model)(input_ids=tokens, use_cache=False).logits
    sum(half.square().mean() for half in logits.chunk(2)).backward()
    assert torch.equal(logits.detach(), torch.cat(want))
    assert_same([p.grad for p in model.parameters()], grads)  # each is a sum of two terms, which is rounded once


class Layer(nn.Module):
    """Experts alone, as DataParallel takes them: it gathers one output."""

    def __init__(self, frozen: bool, **options: object) -> None:
        super().__init__()
        experts = moe_fp8_ext.Experts(8, 256, 128, recipe="blockwise", **options)
        self.moe = moe_fp8_ext.MoE(moe_fp8_ext.Router(8, 256, 2), experts.freeze_() if frozen else experts)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x)[0]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("rank", [None, 8])
def test_data_parallel_of_a_layer(frozen: bool, rank: int | None) -> None:
    layer, x = Layer(frozen, lora_rank=rank).cuda().bfloat16(), torch.randn(64, 256).cuda().bfloat16()
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if "lora_B" in name:
                p.normal_()
    want = []
    for half in x.chunk(2):
        want.append(layer(half))
        want[-1].float().square().mean().backward()
    trained = [p for p in layer.parameters() if p.grad is not None]
    grads = [p.grad for p in trained]
    layer.zero_grad()
    out = nn.DataParallel(layer)(x)
    sum(half.float().square().mean() for half in out.chunk(2)).backward()
    assert torch.equal(out, torch.cat(want))
    assert_same([p.grad for p in trained], grads)


def test_data_parallel_of_converted_experts() -> None:
    model = tiny_model("qwen3_moe", "eager").cuda()
    convert_(model, "rowwise")
    tokens = torch.randint(3, SIZES["vocab_size"], (4, 24)).cuda()
    text = "w_gate_up must be on the device of x, cuda:1, got cuda:0; give every GPU its own process if this is Data"
    with pytest.raises(RuntimeError, match=text):
        nn.DataParallel(model)(input_ids=tokens, use_cache=False)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "float32"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer(precision: str, checkpointing: bool, tmp_path: Path) -> None:
    """The Trainer uses all GPUs that it sees, by DataParallel. The loss of one batch must fall."""
    model = tiny_model("qwen3_moe", "moe_fp8").float()
    options = transformers.TrainingArguments(
        **dict(output_dir=str(tmp_path), max_steps=8, per_device_train_batch_size=2, learning_rate=1e-2),
        **dict(save_strategy="no", report_to="none", logging_steps=1, disable_tqdm=True),
        **dict(gradient_checkpointing=checkpointing, gradient_checkpointing_kwargs={"use_reentrant": False}),
        **({} if precision == "float32" else {precision: True}),
    )
    tokens = torch.arange(3, 35)
    trainer = transformers.Trainer(model, options, train_dataset=[{"input_ids": tokens, "labels": tokens}] * 64)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert trainer.args.n_gpu == torch.cuda.device_count() and losses[-1] < losses[0] / 2, losses
