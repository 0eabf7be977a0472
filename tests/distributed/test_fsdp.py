"""Modules that FSDP2 shards over two processes: the bytes of one whole module, checkpoints, resumed training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import short
from processes import BACKENDS, device, in_processes
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import moe_fp8_ext

PROCESSES, EXPERTS, DIM, HIDDEN, TOKENS, STEPS = 2, 4, 64, 96, 160, 3


class Layers(nn.Module):
    """Uses both ways in which weights of experts are multiplied."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.recipe = recipe
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM) * DIM**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN) * HIDDEN**-0.5)
        self.experts = moe_fp8_ext.Experts(EXPERTS, DIM, HIDDEN, bias=True, recipe=recipe)

    def forward(self, x: Tensor, offs: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        h = moe_fp8_ext.grouped_mm(x, self.up.mT, offs, recipe=self.recipe)
        x = x + moe_fp8_ext.grouped_mm(nn.functional.silu(h), self.down.mT, offs, recipe=self.recipe)
        return x + self.experts(x, ids, scores)


def layers(recipe: str, dtype: torch.dtype) -> Layers:
    torch.manual_seed(0)
    return Layers(recipe).to(device(), dtype)


def sharded(recipe: str, dtype: torch.dtype) -> Layers:
    return fully_shard(layers(recipe, dtype), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(2 * step + rank)
    cuts = torch.randint(0, TOKENS - 8, (EXPERTS,), generator=g).sort().values
    scores, ids = torch.rand(TOKENS, EXPERTS, generator=g).topk(2)
    x = torch.randn(TOKENS, DIM, generator=g, dtype=torch.bfloat16)
    # FSDP2 would otherwise cast scores to bfloat16.
    return x.to(device()), cuts.int().to(device()), ids.to(device()), scores.bfloat16().to(device())


def loss_of(model: nn.Module, step: int, rank: int) -> tuple[Tensor, Tensor]:
    out = model(*batch(step, rank))
    return out, out.float().square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, step, rank)[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_first_step(recipe: str, dtype: torch.dtype, rank: int) -> None:
    model, whole = sharded(recipe, dtype), layers(recipe, dtype)
    out, loss = loss_of(model, 0, rank)
    loss.backward()
    of_ranks = []
    for r in range(PROCESSES):
        of_rank = layers(recipe, torch.bfloat16)
        want, loss = loss_of(of_rank, 0, r)
        loss.backward()
        of_ranks.append([p.grad.float() for p in of_rank.parameters()])
        if r == rank:
            assert torch.equal(out, want)
    for p, q, *grads in zip(model.parameters(), whole.parameters(), *of_ranks, strict=True):
        assert torch.equal(p.full_tensor(), q)
        # Gradients are bfloat16 until they are reduced in float32. The mean of two has at most one rounding, and the
        # cast to the dtype of the parameter one more.
        want, rtol = (sum(grads) / PROCESSES).to(dtype), torch.finfo(dtype).eps
        torch.testing.assert_close(p.grad.full_tensor(), want, rtol=rtol, atol=0)


def check_resuming(recipe: str, dtype: torch.dtype, rank: int, folder: Path) -> None:
    model = sharded(recipe, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(STEPS), rank)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
    want = train(model, optimizer, range(STEPS, 2 * STEPS), rank)

    model = sharded(recipe, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    assert train(model, optimizer, range(STEPS, 2 * STEPS), rank) == want


def check(rank: int, dtype: torch.dtype, folder: Path) -> None:
    for recipe in ("rowwise", "blockwise", "mxfp8"):
        check_first_step(recipe, dtype, rank)
        check_resuming(recipe, dtype, rank, folder / recipe)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
def test_two_processes(dtype, backend, tmp_path):
    """Parameters are bfloat16 or float32."""
    in_processes(PROCESSES, check, dtype, tmp_path, backend=backend)


def check_drawn_router(rank: int) -> None:
    with torch.device("meta"):
        router = fully_shard(moe_fp8_ext.Router(EXPERTS, DIM, 2))
    torch.manual_seed(0)
    router.to_empty(device=device())
    router.reset_parameters()
    torch.manual_seed(0)
    assert torch.equal(router.weight.full_tensor(), moe_fp8_ext.Router(EXPERTS, DIM, 2, device=device()).weight)


@pytest.mark.parametrize("backend", BACKENDS)
def test_router_that_is_drawn_after_sharding(backend):
    """The weight equals an unsharded router's. torch draws the same rows on every rank of a CPU, so that two experts
    would have the same logits."""
    in_processes(PROCESSES, check_drawn_router, backend=backend)


def check_written_output(rank: int) -> None:
    for shape in [(TOKENS, DIM), (2, TOKENS // 2, DIM), (DIM,)]:
        torch.manual_seed(rank)
        x, router = torch.randn(shape).to(device()), moe_fp8_ext.Router(EXPERTS, DIM, 2)
        layer = fully_shard(moe_fp8_ext.MoE(router, moe_fp8_ext.Experts(EXPERTS, DIM, HIDDEN)).to(device()))
        grads = []
        for is_written in (False, True):
            out = layer(x)[0]
            if is_written:
                out += x
            else:
                out = out + x
            out.square().mean().backward()
            grads.append([p.grad.full_tensor() for p in layer.parameters()])
            layer.zero_grad()
        for want, got in zip(*grads, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_output_that_the_caller_writes_to(backend):
    """FSDP2 loses all gradients if the caller writes to an output that is a view."""
    in_processes(PROCESSES, check_written_output, backend=backend)
