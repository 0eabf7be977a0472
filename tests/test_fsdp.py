"""grouped_mm in a module that FSDP2 shards over two processes: the bytes of one that is whole, checkpoints, resumed."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from processes import NEEDS_GLOO, in_processes
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import moe_fp8_ext

PROCESSES, EXPERTS, DIM, HIDDEN, TOKENS, STEPS = 2, 4, 64, 96, 160, 3


class Experts(nn.Module):
    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.recipe = recipe
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM) * DIM**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN) * HIDDEN**-0.5)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        h = moe_fp8_ext.grouped_mm(x, self.up.mT, offs, recipe=self.recipe)
        return moe_fp8_ext.grouped_mm(nn.functional.silu(h), self.down.mT, offs, recipe=self.recipe)


def experts(recipe: str) -> Experts:
    torch.manual_seed(0)
    return Experts(recipe)


def sharded(recipe: str) -> Experts:
    return fully_shard(experts(recipe), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(2 * step + rank)
    cuts = torch.randint(0, TOKENS - 8, (EXPERTS,), generator=g).sort().values
    return torch.randn(TOKENS, DIM, generator=g, dtype=torch.bfloat16), cuts.int()


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


def check_first_step(recipe: str, rank: int) -> None:
    model, whole = sharded(recipe), experts(recipe)
    out, loss = loss_of(model, 0, rank)
    loss.backward()
    of_ranks = []
    for r in range(PROCESSES):
        of_rank = experts(recipe).bfloat16()
        want, loss = loss_of(of_rank, 0, r)
        loss.backward()
        of_ranks.append([p.grad.float() for p in of_rank.parameters()])
        if r == rank:
            assert torch.equal(out, want)
    for p, q, *grads in zip(model.parameters(), whole.parameters(), *of_ranks, strict=True):
        assert torch.equal(p.full_tensor(), q)
        # Gradients are bfloat16 until they are reduced in float32: the mean of two, one rounding at most.
        torch.testing.assert_close(p.grad.full_tensor(), sum(grads) / PROCESSES, rtol=2**-23, atol=0)


def check_resuming(recipe: str, rank: int, folder: Path) -> None:
    model = sharded(recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(STEPS), rank)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
    want = train(model, optimizer, range(STEPS, 2 * STEPS), rank)

    model = sharded(recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    assert train(model, optimizer, range(STEPS, 2 * STEPS), rank) == want


def check(rank: int, recipes: list[str], folder: Path) -> None:
    for recipe in recipes:
        check_first_step(recipe, rank)
        check_resuming(recipe, rank, folder / recipe)


@NEEDS_GLOO
def test_two_processes(tmp_path):
    in_processes(PROCESSES, check, ["rowwise", "blockwise", "mxfp8"], tmp_path)
