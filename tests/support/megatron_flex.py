"""Stand-ins for DeepEP's dispatch and combine, as Megatron's `MoEFlexTokenDispatcher` calls them, over gloo.

A rank receives each token that has an expert there once, in the order of ranks and tokens, with the ids of its local
experts, and -1 in place of the others. DeepEP's `Buffer` hands over the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor


class _Gather(torch.autograd.Function):
    """The rows of all ranks. Backward sums the gradients of all ranks."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _own_sum(grad, ctx.group), None


class _SumOfOwn(torch.autograd.Function):
    """The sum over ranks of the rows of this rank. Backward is the reverse."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _own_sum(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _gathered(grad, ctx.group), None


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def _own_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.float().contiguous()
    dist.all_reduce(total, group=group)
    return total.to(x.dtype).chunk(group.size())[group.rank()]


def _dispatch(x: Tensor, ids: Tensor, probs: Tensor, num_experts: int, group: dist.ProcessGroup, **_: bool) -> tuple:
    local = num_experts // group.size()
    ids = _gathered(ids, group) - local * group.rank()
    is_here = (ids >= 0) & (ids < local)
    rows = is_here.any(1).nonzero().view(-1)
    of_rows = torch.where(is_here, ids, -1)[rows]
    probs = torch.where(is_here, _Gather.apply(probs, group), 0)[rows]
    counts = torch.bincount(of_rows[of_rows >= 0], minlength=local)
    return _Gather.apply(x, group)[rows], of_rows, probs, counts, (rows, len(ids))


def _combine(x: Tensor, group: dist.ProcessGroup, handle: tuple[Tensor, int], **_: bool) -> tuple[Tensor, None]:
    rows, total = handle
    everywhere = x.new_zeros(total, x.shape[1]).index_copy(0, rows, x)
    return _SumOfOwn.apply(everywhere, group), None


@contextmanager
def deepep_by_gloo() -> Iterator[None]:
    """Within it, dispatcher "flex" runs on CPUs. Megatron compiles a part of it, which stays eager here."""
    stand_ins = dict(fused_dispatch=_dispatch, fused_combine=_combine, set_deepep_num_sms=lambda _: None)
    with patch.multiple(token_dispatcher, **stand_ins), torch.compiler.set_stance("force_eager"):
        yield
