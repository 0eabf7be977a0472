"""`graph_layers_`: models of Transformers train as with gradient checkpointing, byte for byte, and misuse raises."""

from __future__ import annotations

import copy

import fp8_checkpoints
import pytest
import torch
from helpers import assert_same, blocks
from torch import Tensor, nn
from transformers_models import MODELS, tiny_model, transformers

import moe_fp8_ext
from moe_fp8_ext.integrations.layer_graphs import graph_layers_

pytestmark = [
    pytest.mark.usefixtures("registered"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
CHECKPOINTS = dict(use_reentrant=False)


def batch(where: str, seed: int = 0, length: int = 12) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 60, (2, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, length - 1 - seed :] = 0
    return {name: t.to(where) for name, t in dict(input_ids=ids, attention_mask=mask, labels=ids).items()}


def tiny(name: str, where: str) -> nn.Module:
    model = tiny_model(name, "moe_fp8").to(where).train()
    model.config.use_cache = False
    return model


def trained(model: nn.Module, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    """Losses and gradients, which add up."""
    losses = []
    for inputs in batches:
        loss = model(**inputs).loss
        loss.backward()
        losses.append(loss.detach())
    return losses + [p.grad for p in model.parameters() if p.grad is not None]


# The tiny deepseek_v3 is for its experts alone: its attention has heads that do not fit.
@pytest.mark.parametrize("name", [name for name in MODELS if name != "deepseek_v3"])
def test_models_train_as_with_gradient_checkpointing(name: str, where: str, replays: list[object]) -> None:
    model = tiny(name, where)
    eager = copy.deepcopy(model)
    layers = graph_layers_(model, **batch(where))
    assert len(layers) == 2 and not replays
    eager.gradient_checkpointing_enable(CHECKPOINTS)
    batches = [batch(where, seed) for seed in range(3)]
    assert_same(trained(model, batches), trained(eager, batches))
    assert len(replays) == 6
    batches = [batch(where, length=7)]  # has no graph
    assert_same(trained(model, batches), trained(eager, batches))
    assert len(replays) == 6
    graph_layers_(model, **batches[0])
    for more in (batch(where, length=7), batch(where, length=12)):
        assert_same(trained(model, [more]), trained(eager, [more]))
    assert len(replays) == 10
    for layer in layers:
        del layer.forward
    assert_same(trained(model, batches), trained(eager, batches))


@pytest.mark.parametrize("autocasts", [False, True])
def test_adapters_over_an_fp8_checkpoint(autocasts: bool, where: str, replays: list[object], tmp_path) -> None:
    """Embeddings are frozen, so the first layer's input needs no gradient."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from peft.helpers import disable_input_dtype_casting

    folder = fp8_checkpoints.write(tmp_path)
    parameters = dict(
        target_modules=["q_proj", "v_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
    )
    made = []
    for is_captured in (True, False):
        with fp8_checkpoints.as_with_gpu():
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.bfloat16, experts_implementation="moe_fp8_blockwise", use_cache=False
            )
        torch.manual_seed(0)
        model = peft.get_peft_model(
            model.to(where), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], target_parameters=parameters)
        ).train()
        moe_fp8_ext.convert_(model, "blockwise")
        with disable_input_dtype_casting(model, active=autocasts):
            autocast = torch.autocast(where, dtype=torch.bfloat16, enabled=autocasts)
            if is_captured:
                with autocast:
                    graph_layers_(model, **batch(where))
            else:
                model.gradient_checkpointing_enable(CHECKPOINTS)
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
            losses = []
            for seed in range(3):
                with autocast:
                    loss = model(**batch(where, seed)).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        made.append([*losses, *(p for p in model.parameters() if p.requires_grad)])
    assert_same(*made)
    assert len(replays) == 6
    model.gradient_checkpointing_disable()
    del loss  # its autograd graph belongs to another stream than the capture
    graph_layers_(model, **batch(where))
    with pytest.raises(RuntimeError, match="must be as at the capture"), model.disable_adapter():
        model(**batch(where))


def test_page(where: str, replays: list[object]) -> None:
    _, code = blocks("docs/cuda-graphs.md")
    model = tiny("qwen3_moe", where)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exec(code, dict(model=model, optimizer=optimizer, batch=batch(where), batches=[batch(where, 1), batch(where, 2)]))
    assert len(replays) == 4 and not any("forward" in vars(layer) for layer in model.model.layers)


def test_mistakes(where: str) -> None:
    inputs = batch(where)
    model = tiny("qwen3_moe", where)
    forward = model.model.layers[0].forward

    def refused(text: str, error: type[Exception] = RuntimeError, of: object = model) -> None:
        with pytest.raises(error, match=f"graph_layers_: {text}"):
            graph_layers_(of, **inputs)
        assert model.model.layers[0].forward == forward

    model.config.use_cache = True
    refused("model.layers.0 must get no cache, because .* set model.config.use_cache = False")
    model.config.use_cache = False
    refused("model must be a torch.nn.Module, got str", TypeError, of="model")
    refused("model must have layers of Transformers, got Linear without any", of=nn.Linear(2, 2))
    model.eval()
    refused(r"model must be in training mode, got eval mode; call model.train\(\) first")
    model.train().gradient_checkpointing_enable(CHECKPOINTS)
    refused("gradient checkpointing must be off, .* got it on in model.layers.0")
    model.gradient_checkpointing_disable()
    model.config.output_router_logits = True
    refused("output_router_logits must be False, because graphs do not return them, got True")
    model.config.output_router_logits = False
    model.model.layers[1].forward = model.model.layers[1].forward
    refused("forward of model.layers.1 must be its class's own, got another")
    del model.model.layers[1].forward
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))  # the config has two layers
    refused("model.layers.2 must run in a call with the given inputs, got no run")
    del model.model.layers[2]
    model.model.layers[1].self_attn.attention_dropout = 0.5
    with pytest.raises(RuntimeError, match="graphed: layer must draw no random numbers with checkpoint"):
        graph_layers_(model, **inputs)
    assert model.model.layers[0].forward == forward


def test_trainer(where: str, replays: list[object], tmp_path) -> None:
    """The Trainer passes a number of items to the model, which hands it to its layers."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    data = [{name: t[0].cpu() for name, t in batch(where, seed).items()} for seed in range(8)]
    results = []
    for is_captured in (True, False):
        model = tiny("qwen3_moe", where)
        options = dict(per_device_train_batch_size=2, max_steps=3, use_cpu=where == "cpu", report_to=[], seed=0)
        options |= dict(save_strategy="no", output_dir=str(tmp_path), disable_tqdm=True)
        if is_captured:
            graph_layers_(model, **{name: torch.stack([t, t]).to(where) for name, t in data[0].items()})
        else:
            options |= dict(gradient_checkpointing=True)
        trainer = transformers.Trainer(model, transformers.TrainingArguments(**options), train_dataset=data)
        trainer.train()
        results.append([*model.parameters()])
    assert_same(*results)
    assert len(replays) == 6
