"""DTensors: experts that are sharded over ranks, and a router that every rank has."""

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
    return hasattr(x, "placements")  # isinstance would import torch.distributed.tensor, which takes half a second


def of_rank(name: str, parameter: Tensor | None) -> Tensor | None:
    """Returns this rank's part of a parameter. Only that part gets a gradient from this rank."""
    if not is_dtensor(parameter):
        return parameter
    from torch.distributed.tensor import Shard

    if parameter.placements != (Shard(0),):  # not `require`: torch 2.14 compiles no text of placements
        got = parameter.placements
        raise RuntimeError(f"Experts: {name} must be sharded by expert, (Shard(dim=0),), got {got}")
    e, ranks = parameter.shape[0], parameter.device_mesh.size()
    # All ranks raise together: if one rank raised alone, the others would wait for it.
    ok = e > _most(e, ranks) * (ranks - 1)
    require(ok, f"Experts: {name} must have experts for each of {ranks} ranks, as Shard cuts, got {e}")
    return parameter.to_local()


def of_all(parameter: Tensor, mesh: DeviceMesh, num_experts: int | None = None) -> Tensor:
    """Returns the DTensor of which `parameter` is this rank's part.

    num_experts: of all ranks. None: every rank has the same number.
    """
    from torch.distributed.tensor import DTensor, Shard

    whole = {}
    if num_experts is not None:
        shape = num_experts, *parameter.shape[1:]
        whole = dict(shape=torch.Size(shape), stride=torch.empty(shape, device="meta").stride())
    return DTensor.from_local(parameter, mesh, [Shard(0)], run_check=False, **whole)


def part_of_rank(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns this rank's part of the tensor of all experts, as `Shard(0)` cuts it."""
    most = _most(len(whole), mesh.size())
    return whole[most * mesh.get_local_rank() :][:most]


@torch.no_grad()
def draw_in_turn(parameter: Tensor, first: int, num_experts: int, draw: Callable[[Tensor], object]) -> None:
    """Draws every expert of all ranks and keeps this rank's experts. A seed gives the same experts on any ranks.

    Args:
        parameter: the experts of this rank (for a router: their rows), or a DTensor of all experts, which knows where
            its part begins.
        first: the number of this rank's first expert; 0 for a DTensor.
        num_experts: the number of experts of all ranks.
        draw: fills one expert in place.
    """
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


def _most(num_experts: int, ranks: int) -> int:
    """The number of experts of every rank except the last, which may have fewer."""
    return -(-num_experts // ranks)


def sum_of_ranks(
    experts: Callable[[Tensor, Tensor, Tensor], Tensor],
    mesh: DeviceMesh | None,
    num_experts: int,
    x: Tensor,
    topk_ids: Tensor,
    topk_scores: Tensor,
) -> Tensor:
    """Computes tokens that every rank has with the experts of this rank.

    The result and the gradients of x and topk_scores are `Partial()`: their sum over ranks is pending.

    Args:
        experts: computes x, ids and scores with this rank's experts.
        mesh: the ranks over which experts are sharded, or None.
        num_experts: the number of experts of all ranks.
        x, topk_ids, topk_scores: DTensors, `Replicate()` over that mesh, with ids of all experts.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    for name, t in (("x", x), ("topk_ids", topk_ids), ("topk_scores", topk_scores)):
        if is_dtensor(t) and t.device_mesh == mesh and t.placements == (Replicate(),):
            continue
        got = f"{t.placements} on {t.device_mesh}" if is_dtensor(t) else "no DTensor"
        text = f"Experts: {name} must be (Replicate(),) on the mesh of the parameters, {mesh}, got {got}"
        raise RuntimeError(text)
    most = _most(num_experts, mesh.size())
    ids = topk_ids.to_local() - most * mesh.get_local_rank()
    ids = torch.where((ids >= 0) & (ids < most), ids, -1)
    x, scores = (t.to_local(grad_placements=[Partial()]) for t in (x, topk_scores))
    return DTensor.from_local(experts(x, ids, scores), mesh, [Partial()], run_check=False)


def on_every_rank(fn: Callable[..., Sequence[Tensor]], *args: object) -> list[Tensor]:
    """Calls fn on every rank with replicated arguments. DTensors among them are passed as tensors of the rank.

    Results and gradients are replicated DTensors too.
    """
    from torch.distributed.tensor import DTensor, Replicate

    dtensors = [t for t in args if is_dtensor(t)]
    mesh = dtensors[0].device_mesh
    everywhere = (Replicate(),) * mesh.ndim
    for t in dtensors:
        if t.device_mesh != mesh or t.placements != everywhere:
            raise RuntimeError(f"Router: tensors must be {everywhere} on {mesh}, got {t.placements} on {t.device_mesh}")
    results = fn(*(t.to_local() if is_dtensor(t) else t for t in args))
    return [DTensor.from_local(t, mesh, everywhere, run_check=False) for t in results]
