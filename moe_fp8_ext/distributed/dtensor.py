"""DTensors: experts of which a rank has a part, its parameters, what it computes and what that is to the other ranks;
and a router that every rank has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_fp8_ext import _torch
from moe_fp8_ext.ops.checks import require

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def is_dtensor(x: object) -> bool:
    return hasattr(x, "placements")  # to ask for its class is to import torch.distributed.tensor, half a second


def of_rank(name: str, parameter: Tensor | None) -> Tensor | None:
    """What this rank has of a parameter, which alone it gives a gradient."""
    if not is_dtensor(parameter):
        return parameter
    from torch.distributed.tensor import Shard

    if parameter.placements != (Shard(0),):  # not `require`: torch 2.14 compiles no text of placements
        got = parameter.placements
        raise RuntimeError(f"Experts: {name} must be sharded by expert, (Shard(dim=0),), got {got}")
    e, ranks = parameter.shape[0], parameter.device_mesh.size()
    # All ranks raise: the others would wait for one that alone did.
    ok = e > _most(parameter) * (ranks - 1)
    require(ok, f"Experts: {name} must have experts for each of {ranks} ranks, as Shard cuts, got {e}")
    return parameter.to_local()


def of_all(parameter: Tensor, mesh: DeviceMesh) -> Tensor:
    """What every rank has a part of, this one `parameter`."""
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(parameter, mesh, [Shard(0)], run_check=False)


@torch.no_grad()
def draw_in_turn(parameter: Tensor, first: int, num_experts: int, draw: Callable[[Tensor], object]) -> None:
    """Draws every expert of all ranks, so that a seed gives the same on any number of ranks, and keeps those from
    `first` on that are here. DTensors know which those are."""
    here, within = parameter, ...
    if is_dtensor(parameter):
        offsets, here = _torch.offsets_of(parameter), parameter.to_local()
        first += offsets[0]
        within = tuple(slice(o, o + n) for o, n in zip(offsets[1:], here.shape[1:], strict=True))
    expert = torch.empty(parameter.shape[1:], dtype=here.dtype, device=here.device)
    for i in range(num_experts):
        draw(expert)
        if first <= i < first + len(here):
            here[i - first] = expert[within]


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
        if is_dtensor(t) and t.device_mesh == mesh and t.placements == (Replicate(),):
            continue
        got = f"{t.placements} on {t.device_mesh}" if is_dtensor(t) else "no DTensor"
        text = f"Experts: {name} must be (Replicate(),) on the mesh of the parameters, {mesh}, got {got}"
        raise RuntimeError(text)
    most = _most(weight)
    ids = topk_ids.to_local() - most * mesh.get_local_rank()
    ids = torch.where((ids >= 0) & (ids < most), ids, -1)
    x, scores = (t.to_local(grad_placements=[Partial()]) for t in (x, topk_scores))
    return DTensor.from_local(experts(x, ids, scores), mesh, [Partial()], run_check=False)


def on_every_rank(op: str, fn: Callable[..., Sequence[Tensor]], *args: object) -> list[Tensor]:
    """fn of what every rank has, DTensors among it; so are its results, and the gradients that it gives."""
    from torch.distributed.tensor import DTensor, Replicate

    dtensors = [t for t in args if is_dtensor(t)]
    mesh = dtensors[0].device_mesh
    everywhere = (Replicate(),) * mesh.ndim
    for t in dtensors:
        if t.device_mesh != mesh or t.placements != everywhere:
            raise RuntimeError(f"{op}: tensors must be {everywhere} on {mesh}, got {t.placements} on {t.device_mesh}")
    results = fn(*(t.to_local() if is_dtensor(t) else t for t in args))
    return [DTensor.from_local(t, mesh, everywhere, run_check=False) for t in results]
