"""Experts whose parameters are DTensors, sharded by expert: what a rank computes, and what it is to the other ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_fp8_ext.ops.checks import require


def is_dtensor(x: object) -> bool:
    return hasattr(x, "placements")  # to ask for its class is to import torch.distributed.tensor, half a second


def of_rank(name: str, parameter: Tensor | None) -> Tensor | None:
    """What this rank has of a parameter, which alone it gives a gradient."""
    if not is_dtensor(parameter):
        return parameter
    from torch.distributed.tensor import Shard

    got = parameter.placements
    require(got == (Shard(0),), f"Experts: {name} must be sharded by expert, (Shard(dim=0),), got {got}")
    e, ranks = parameter.shape[0], parameter.device_mesh.size()
    # All ranks raise: the others would wait for one that alone did.
    ok = e > _most(parameter) * (ranks - 1)
    require(ok, f"Experts: {name} must have experts for each of {ranks} ranks, as Shard cuts, got {e}")
    return parameter.to_local()


def _most(parameter: Tensor) -> int:
    """Experts of a rank, but for the last, which may have fewer."""
    return -(-parameter.shape[0] // parameter.device_mesh.size())


def sum_of_ranks(
    experts: Callable[[Tensor, Tensor, Tensor], Tensor],
    weight: Tensor,
    x: Tensor,
    topk_ids: Tensor,
    topk_scores: Tensor,
) -> Tensor:
    """What all experts make of tokens that every rank has; `experts` are those of this rank, `weight` is one of theirs.

    The sum over ranks is left to be taken, in the result and in the gradients of x and topk_scores.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh = getattr(weight, "device_mesh", None)
    for name, t in (("x", x), ("topk_ids", topk_ids), ("topk_scores", topk_scores)):
        ok = is_dtensor(t) and t.device_mesh == mesh and t.placements == (Replicate(),)
        got = f"{t.placements} on {t.device_mesh}" if is_dtensor(t) else "no DTensor"
        require(ok, f"Experts: {name} must be (Replicate(),) on the mesh of the parameters, {mesh}, got {got}")
    most = _most(weight)
    ids = topk_ids.to_local() - most * mesh.get_local_rank()
    ids = torch.where((ids >= 0) & (ids < most), ids, -1)
    x, scores = (t.to_local(grad_placements=[Partial()]) for t in (x, topk_scores))
    return DTensor.from_local(experts(x, ids, scores), mesh, [Partial()], run_check=False)
