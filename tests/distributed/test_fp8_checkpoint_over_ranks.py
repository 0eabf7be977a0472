"""Adapters over an FP8 checkpoint on several processes: FSDP2, and Trainer with FSDP2 or DDP."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from fp8_checkpoints import load, loss, write
from helpers import NO_SECOND_GPU, assert_same, blocks
from processes import BACKENDS, device, in_processes
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers_models import transformers

from moe_fp8_ext import convert_
from moe_fp8_ext.integrations.transformers import register

peft = pytest.importorskip("peft", reason="PEFT is not installed")

PROCESSES, STEPS = 2, 6


def adapted(folder: Path) -> nn.Module:
    register()
    model = load(folder, "moe_fp8_blockwise", device_map={"": device()})
    names = ["experts.gate_up_proj", "experts.down_proj"]
    torch.manual_seed(0)
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj"], target_parameters=names)
    model = peft.get_peft_model(model, config)
    convert_(model, "blockwise")
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    loss(model).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}


def check_fsdp(rank: int, folders: list[Path]) -> None:
    """The example of docs/finetuning.md: the gradients of one process, from shards of FP8 bytes."""
    shards, _ = blocks("docs/finetuning.md", "Several GPUs")
    for folder in folders:
        model, whole = adapted(folder), adapted(folder)
        exec(shards, {"model": model})
        assert {p.dtype for p in model.parameters()} >= {torch.float8_e4m3fn, torch.bfloat16, torch.float32}
        assert all(isinstance(p, DTensor) for p in model.parameters())
        for _ in range(2):
            got, want = gradients(model), gradients(whole)
            assert got.keys() == want.keys() and len(got) == 12
            assert_same(list(got.values()), list(want.values()))


def check_refused(rank: int, folders: list[Path]) -> None:
    model = adapted(folders[0])
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="or param_dtype of fully_shard, loses the scales: load the model again"):
        loss(model)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fsdp(backend: str, tmp_path: Path) -> None:
    """Scales are float32 or E8M0."""
    folders = [write(tmp_path / str(e8m0), e8m0=e8m0) for e8m0 in (False, True)]
    for check in (check_fsdp, check_refused):
        in_processes(PROCESSES, check, folders, backend=backend)


def check_trainer(rank: int, folder: Path, fsdp: bool) -> None:
    """Trains, then resumes in the middle."""
    _, casts_scales = blocks("docs/finetuning.md", "Several GPUs")
    env = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=PROCESSES, MASTER_ADDR="localhost", MASTER_PORT=0)
    with patch.dict(os.environ, {name: str(value) for name, value in env.items()}):
        config = dict(transformer_layer_cls_to_wrap=["Qwen3MoeDecoderLayer"], auto_wrap_policy="TRANSFORMER_BASED_WRAP")
        options = transformers.TrainingArguments(
            **dict(output_dir=str(folder / "out"), max_steps=STEPS, per_device_train_batch_size=2, learning_rate=1e-2),
            **dict(save_steps=STEPS // 2, report_to="none", logging_steps=1, disable_tqdm=True),
            **(dict(fsdp=True, fsdp_config=config) if fsdp else {}),
        )
        tokens = torch.randint(3, 64, (64, 16), generator=torch.Generator().manual_seed(0))
        losses = []
        for resumed in (None, str(folder / "out" / f"checkpoint-{STEPS // 2}")):
            dataset = [{"input_ids": t, "labels": t} for t in tokens[:4].repeat(16, 1)]
            model = adapted(folder)
            exec(casts_scales, {"model": model, "torch": torch})
            trainer = transformers.Trainer(model, options, train_dataset=dataset)
            trainer.train(resume_from_checkpoint=resumed)
            losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
            kinds = {type(p) for p in trainer.model.parameters() if p.requires_grad}
            assert kinds == ({DTensor} if fsdp else {nn.Parameter})
        whole, again = losses
        assert whole == again and whole[-1] < whole[0] - 0.1, losses
        of_ranks = [None] * PROCESSES
        dist.all_gather_object(of_ranks, whole)
        assert of_ranks == [whole] * PROCESSES


@NO_SECOND_GPU
@pytest.mark.parametrize("e8m0", [False, True])
@pytest.mark.parametrize("fsdp", [False, True])
def test_trainer(fsdp: bool, e8m0: bool, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    write(tmp_path, e8m0=e8m0)
    in_processes(PROCESSES, check_trainer, tmp_path, fsdp, backend="nccl")
