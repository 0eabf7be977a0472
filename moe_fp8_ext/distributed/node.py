"""The node of autograd behind `ExpertParallel`: its ways there and back, forward and backward, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from moe_fp8_ext.distributed.message import Column
from moe_fp8_ext.distributed.plan import Travelling, Way
from moe_fp8_ext.layer.experts import Weights, backward, cast_all, dtypes_of, forward
from moe_fp8_ext.matmul.bf16 import cast, row_major
from moe_fp8_ext.matmul.engine import Operand, Slots
from moe_fp8_ext.ops.dispatch import below_autograd, differentiable_once

_combine = torch.ops.moe_fp8.combine.default


class Sent(NamedTuple):
    """Tokens, or gradients of them, on their way."""

    rows: Travelling
    columns: list[Column]
    way: Way

    def arrived(self) -> list[Tensor]:
        rows = self.rows.arrived()
        return [column.read(rows) for column in self.columns]


class Dispatched(NamedTuple):
    tokens: Operand
    scores: Tensor
    slots: Slots


class OverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ep, sent, x, scores, *rest):
        *weights, _, main_grad_gate_up, main_grad_down, call = rest
        ways, home, kept = [part.way for part in sent], [], []
        with below_autograd():
            operands = Weights.of(weights, call)  # while tokens travel
            for part in sent:
                out, of_part = forward(*ep.received(part), operands, call)
                home.append(part.way.back(out))
                kept += part.way.indices, part.way.inverse, *of_part
            out = _of_tokens(home, ways)
        ctx.save_for_backward(*kept)
        ctx.ep, ctx.call, ctx.sizes = ep, call, [way[2:] for way in ways]
        ctx.main_grads = main_grad_gate_up, main_grad_down
        ctx.dtypes = dtypes_of(x, scores, *weights)
        return cast(out, x.dtype)

    @staticmethod
    @differentiable_once
    def backward(ctx, dout):
        kept, chunks, found = ctx.saved_tensors, len(ctx.sizes), []
        kept = [kept[i * len(kept) // chunks : (i + 1) * len(kept) // chunks] for i in range(chunks)]
        ways = [Way(*of_part[:2], *sizes) for of_part, sizes in zip(kept, ctx.sizes, strict=True)]
        ctx.ep.has_ended_step = True
        with below_autograd():
            parts = zip(row_major(dout).tensor_split(chunks), ways, strict=True)
            sent = [ctx.ep.dispatch_gradient(part, way) for part, way in parts]
            totals = ctx.main_grads
            for part, of_part in zip(sent, kept, strict=True):
                gradient = ctx.ep.received_gradient(part)
                found.append(backward(gradient, of_part[2:], totals, ctx.call, part.way.back))
                # What there is of a weight's gradient is where the next part's is added.
                totals = [old if new is None else new for old, new in zip(totals, found[-1][2:4], strict=True)]
            dx, dscores, *of_weights = zip(*found, strict=True)
            grads = [_of_tokens(dx, ways), _of_tokens(dscores, ways), *map(_sum, of_weights)]
        return None, None, *cast_all(grads, ctx.dtypes), None, None, None, None


def _of_tokens(home: Sequence[Travelling | None], ways: Sequence[Way]) -> Tensor | None:
    """What came home, added up over ranks."""
    if home[0] is None:
        return None
    parts = [_combine(rows.arrived(), way.inverse, None) for rows, way in zip(home, ways, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _sum(parts: Sequence[Tensor | None]) -> Tensor | None:
    return reduce(torch.add, [part for part in parts if part is not None] or [None])
