"""Measures the operands of a sampled call, for `stats`. Forward chooses rows, and backward measures the same rows.

A call keeps its `Watch` on its autograd node, because torch may run backward in another thread. For an operand along
rows, the measured rows are quantized a second time, to the same bytes. A sampled step computes sums on the device, with
few ops. The statistics are computed from the sums when somebody reads them.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_fp8_ext.matmul.bf16 import clamped
from moe_fp8_ext.matmul.engine import Activated, Engine, Fp8Engine, Groups
from moe_fp8_ext.quantization.casting import cast, without_autocast
from moe_fp8_ext.quantization.prepare import DeferredWeight, Operand
from moe_fp8_ext.training.stats import Statistics, Stats, sampling

if TYPE_CHECKING:
    from moe_fp8_ext.layer.node import Call

_activate = torch.ops.moe_fp8.activate.default
_activate_backward = torch.ops.moe_fp8.activate_backward.default
_dequantize = torch.ops.moe_fp8.dequantize.default

ROWS = 512  # rows of tokens and gradients that a call measures
TILE = 128  # rows of a weight; "blockwise" scales 128 of them together


def watched(engine: Engine, *weights: Tensor | None) -> list[Watch] | None:
    """Returns a `Watch` for each weight of a call, or None if the call is not measured."""
    if torch.compiler.is_compiling():  # asked first, so that no graph depends on whether statistics are on
        return None
    for stats in sampling():
        names = [stats.name_of(weight) for weight in weights]
        if None not in names:
            return [Watch(stats, name, engine) for name in names]
    return None


class Rows:
    """The rows of a product that are measured: up to ROWS of the rows in groups, evenly spaced."""

    def __init__(self, groups: Groups, rows: int) -> None:
        self.groups, self.offs = groups, clamped(groups.offs, rows).long()
        count, total = min(ROWS, rows), self.offs[-1:]
        at = torch.arange(count, device=total.device) * total.clamp(min=count) // max(count, 1)
        self.exists, self.at = at < total, at.clamp(max=rows - 1)  # if groups have fewer rows than ROWS, each row once
        self.expert = torch.searchsorted(self.offs, self.at, right=True).clamp(max=self.offs.shape[0] - 1)
        self.starts = pad(self.offs, (1, -1))

    @functools.cached_property
    def within(self) -> Tensor:
        """The places of these rows within their groups."""
        return self.at - self.starts[self.expert]

    @functools.cached_property
    def slots(self) -> Tensor:
        """The slots of these rows. Slot s is of token s // top_k."""
        return self.groups.indices.index_select(0, self.at)

    def of(self, x: Tensor) -> Tensor:
        """Returns these rows of x [P, K], zero where a row does not exist."""
        return torch.where(self.exists[:, None], x.index_select(0, self.at), 0)

    def of_tokens(self, x: Tensor) -> Tensor:
        """Returns the tokens x [T, K] of these rows."""
        if self.groups.indices is None:
            return self.of(x)
        tokens = self.slots // self.groups.top_k
        inside = tokens.clamp(0, x.shape[0] - 1)
        return torch.where((self.exists & (tokens == inside))[:, None], x.index_select(0, inside), 0)

    def of_operand(self, operand: Operand) -> Tensor:
        """Returns the fp8 values of these rows in an operand along tokens, as float32."""
        at = self.within + pad(operand.ends, (1, -1))[self.expert]
        q = operand.values.view(torch.uint8).index_select(1, at.clamp(0, operand.values.shape[1] - 1))
        return q.view(operand.values.dtype).float().mT


class Watch:
    """Measures the operands of one weight."""

    def __init__(self, stats: Stats, name: str, engine: Engine) -> None:
        self.stats, self.name, self.engine = stats, name, engine
        self.recipe = engine.recipe.name if isinstance(engine, Fp8Engine) else "bf16"

    def put(self, operand: str | None, statistics: Statistics, sums: Tensor) -> None:
        self.stats.put(self.name, self.recipe, operand, statistics, sums)

    def along_rows(self, operand: str, x: Tensor, q: Operand | None = None) -> Tensor | None:
        """Measures rows x that are quantized as an operand along rows. Returns the values of their fp8 numbers."""
        if q is None:
            q, _ = self.engine.rows(x, Groups(None), rows=True, gradient=operand == "gradients")
        if q.scale is None or x.shape[0] == 0:
            return None
        sums, dequantized = _sums(x.float(), q, self.engine.recipe.format)
        self.put(operand, _along_rows(q.values.dtype), sums)
        return dequantized

    def along_tokens(self, operand: str, x: Tensor, q: Operand, rows: Rows) -> None:
        """Measures the same rows x within an operand along tokens."""
        if q.scale is not None:
            self.put(operand, _along_tokens, _counts(torch.stack((x.float(), rows.of_operand(q)))))

    def product(self, x: Tensor | None, x8: Tensor | None, w: Tensor, dtype: torch.dtype | None, rows: Rows) -> None:
        """Measures a weight [E, N, K] and, if the fp8 values x8 of tokens x are known, its product with them."""
        counts = rows.offs - rows.starts
        self.put(None, _load, counts)
        if isinstance(w, DeferredWeight):
            return
        busiest = counts.argmax()[None]
        first = TILE * (self.stats.steps // self.stats.every % -(-w.shape[1] // TILE))
        tile = cast(w.detach()[:, first : first + TILE].index_select(0, busiest), dtype or w.dtype)
        w8 = self.along_rows("weights", tile, self.engine.weight(tile, tile.dtype, False)[0])
        if x8 is not None and w8 is not None:
            with without_autocast(x):
                y, y8 = x.float() @ tile[0].float().mT, x8 @ w8[0].mT
            of_busiest = torch.where((rows.expert == busiest)[:, None], torch.stack((y, y - y8)), 0)
            self.put(None, _product, _norms(of_busiest))


class MatmulWatch:
    """Measures a call of `grouped_mm`."""

    def __init__(self, watch: Watch, groups: Groups, rows: int) -> None:
        self.watch, self.rows = watch, Rows(groups, rows)

    def forward(self, a: Tensor | None, kept: Operand, w: Tensor, dtype: torch.dtype | None) -> None:
        """Measures tokens a and the weight. a is None if the caller quantized the tokens."""
        x = None if a is None else self.rows.of_tokens(a)
        x8 = None if a is None else self.watch.along_rows("tokens", x)
        self.watch.product(x, x8, w, dtype, self.rows)
        if a is not None:
            self.watch.along_tokens("tokens", x, kept, self.rows)

    def tokens(self, a: Tensor, a_t: Operand) -> None:
        """Measures tokens a that backward quantized along tokens."""
        self.watch.along_tokens("tokens", self.rows.of_tokens(a), a_t, self.rows)

    def gradients(self, dy: Tensor, dy_t: Operand) -> None:
        dy = self.rows.of(dy)
        self.watch.along_rows("gradients", dy)
        self.watch.along_tokens("gradients", dy, dy_t, self.rows)


class LayerWatch:
    """Measures a call of a layer: its first chunk of tokens.

    sent: the tokens of this rank before they travel; in backward, the gradients of the output. If rows travel in fp8,
        received rows have no original values to compare with, so `sent` is measured instead. If the caller quantized
        the tokens, `sent` is None, because only the caller has the original values.
    """

    def __init__(self, up: Watch, down: Watch, call: Call, sent: Tensor | None) -> None:
        self.up, self.down, self.engine, self.call, self.sent = up, down, up.engine, call, sent

    def _arrived(self, watch: Watch, operand: str, x: Operand) -> tuple[Tensor | None, Tensor | None]:
        """Measures x along rows. Returns its rows and the values of their fp8 numbers, unless x arrived in fp8."""
        sent, self.sent = self.sent, None
        if x.scale is not None and sent is None:
            return None, None
        if x.scale is not None:
            watch.along_rows(operand, sent[:: -(-sent.shape[0] // ROWS) or 1])
            return None, None
        rows = self.rows.of_tokens(x.values)
        return rows, watch.along_rows(operand, rows)

    def forward(self, x: Operand, h: Tensor, groups: Groups, w_up: Tensor, w_down: Tensor) -> None:
        call, self.rows = self.call, Rows(groups, h.shape[0])
        self.up.product(*self._arrived(self.up, "tokens", x), w_up, call.dtype, self.rows)
        h = self.rows.of(h)
        q, self.h = self.engine.activated(h, Groups(None), call.activation, call.interleaved, call.keep_fp8)
        a = _activate(h, call.activation, call.interleaved)
        self.down.product(a, self.down.along_rows("tokens", a, q), w_down, call.dtype, self.rows)

    def gradients(self, dout: Operand, dy_t: Operand) -> None:
        """Measures the gradient of the layer's output."""
        dy, _ = self._arrived(self.down, "gradients", dout)
        if dy is not None:
            self.down.along_tokens("gradients", dy, dy_t, self.rows)

    def between(self, da: Tensor, of: Activated, dh_t: Operand, a_t: Operand) -> None:
        """Measures the gradients between the products, and activations along tokens."""
        scores = of.scores
        if scores is not None:
            slots = self.rows.at if self.rows.groups.indices is None else self.rows.slots
            scores = scores.index_select(0, slots.clamp(0, scores.shape[0] - 1))
        format = None if self.h.scale is None else self.engine.recipe.format
        how = scores, self.h.scale, format, None, of.interleaved
        dh, a, _ = _activate_backward(self.rows.of(da), self.h.values, of.activation, *how)
        self.up.along_rows("gradients", dh)
        self.up.along_tokens("gradients", dh, dh_t, self.rows)
        self.down.along_tokens("tokens", a, a_t, self.rows)

    def tokens(self, x: Operand, x_t: Operand) -> None:
        """Measures the tokens x in the operand x_t, which is quantized along tokens."""
        if x.scale is None:
            self.up.along_tokens("tokens", self.rows.of_tokens(x.values), x_t, self.rows)


# ---- sums, on the device ----


def _sums(x: Tensor, q: Operand, format: str) -> tuple[Tensor, Tensor]:
    """Returns the arguments of `_along_rows` for x, which is quantized to q, and the values of q."""
    scale = _dequantize(torch.ones_like(q.values), q.scale, format, "rows", None, torch.float32)
    values, magnitude = q.values.float(), x.abs()
    dequantized, scaled = values * scale, magnitude / scale
    found = torch.stack((x, x - dequantized, values))
    saturated = (scaled > _tie(q.values.dtype)).sum(dtype=torch.float32)
    smallest = scaled.masked_fill(x == 0, torch.inf).amin()
    return torch.hstack((_counts(found[::2]), _norms(found[:2]), saturated, magnitude.amax(), smallest)), dequantized


def _counts(x: Tensor) -> Tensor:
    """How many elements of each of x [n, ...] are not zero, [n] in float32. Up to 2^24 it is exact."""
    return torch.linalg.vector_norm(x.flatten(1), 0, 1)


def _norms(x: Tensor) -> Tensor:
    """The root of the sum of squares of each of x [n, ...], [n]."""
    return torch.linalg.vector_norm(x.flatten(1), 2, 1)


def _tie(dtype: torch.dtype) -> float:
    """The greatest number that still rounds to the largest of an fp8 type."""
    largest = torch.finfo(dtype).max
    return largest + 2.0 ** (math.floor(math.log2(largest)) - _mantissa_bits(dtype) - 1)


def _mantissa_bits(dtype: torch.dtype) -> int:
    return 3 if "e4m3" in str(dtype) else 2


# ---- statistics, from sums that were read ----


@functools.cache  # one function for each type: `Stats.put` replaces what has the same function
def _along_rows(dtype: torch.dtype) -> Statistics:
    largest = torch.finfo(dtype).max
    underflows_below = torch.finfo(dtype).smallest_normal * 2.0 ** -(_mantissa_bits(dtype) + 1)  # half the smallest

    def statistics(
        nonzero: float, kept: float, signal: float, noise: float, saturated: float, amax: float, smallest: float
    ) -> dict[str, object]:
        return {
            "underflow": _share(nonzero - kept, nonzero),
            "saturated": _share(saturated, nonzero),
            "amax": amax,
            "ratio": largest / smallest if smallest else math.inf,
            "limit": largest / underflows_below,
            "sqnr": _decibels(signal, noise),
        }

    return statistics


def _along_tokens(nonzero: float, kept: float) -> dict[str, object]:
    return {"wgrad_underflow": _share(nonzero - kept, nonzero)}


def _product(signal: float, noise: float) -> dict[str, object]:
    return {"product_sqnr": _decibels(signal, noise)}


def _load(*counts: float) -> dict[str, object]:
    return {"tokens_per_expert": [int(count) for count in counts]}


def _share(part: float, of: float) -> float:
    return part / of if of else math.nan


def _decibels(signal: float, noise: float) -> float:
    """10 log10(signal^2 / noise^2)."""
    ratio = signal / noise if noise else math.inf if signal else math.nan
    return 20 * math.log10(ratio) if ratio else -math.inf  # 0 also if the noise is infinite
