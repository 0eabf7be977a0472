"""Products with the factors of adapters, in bfloat16, for a low rank R.

A `Factor` m is [E, R, W], one of each expert, or [R, W] if all experts share it. W is the width of a weight's rows or
columns. `Rows` and `Tokens` are what a factor multiplies. Both narrow W columns to R, and sum the gradient of a factor.
A product of the frozen weight adds what a factor widens, where `adds_to_product` says so: then R columns are widened to
W in its epilogue, and no tensor [P, W] is written. Elsewhere `add_to_rows` and `add_to_tokens` add it to the result.

Tokens that groups take by index are multiplied in one of two ways. By slot: the tokens are copied into the order of
experts, [P, W], for grouped products. By token: one dense product multiplies each token by the factors of all experts.
It computes E / top_k times too much, but reads and writes [T, W] and [T, E R] alone. `DENSE` decides. A dense product
multiplies zeros by what other tokens and experts hold: a NaN or an infinity there reaches all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_fp8_ext.matmul.bf16 import bf16_product, bf16_wgrad, zero_tail
from moe_fp8_ext.matmul.engine import Groups
from moe_fp8_ext.ops.dispatch import python_op
from moe_fp8_ext.quantization.casting import cast, rounded, row_major

_combine = torch.ops.moe_fp8.combine.default
_permute_pad = torch.ops.moe_fp8.permute_pad.default
_spread = torch.ops.moe_fp8.spread_expert_columns.default
_take = torch.ops.moe_fp8.take_expert_columns.default

# Products are dense up to this many columns E R for each of the top_k slots of a token. For a token and a column of W,
# a dense product does 2 E R operations. Grouped products move 2 (2 top_k + 1) bytes. An H200 does 700e12 operations and
# moves 4e12 bytes a second, so both take equally long at E R = 350 top_k + 175. A layer with adapters took 9% less time
# by dense products at E R = 256 top_k, and 4% less at 128 top_k (H200). The limit itself is not measured.
DENSE = 350


# Ranks up to which the product of the frozen weight adds what a factor widens. A layer of Qwen3-30B-A3B's sizes took
# 4.35 ms instead of 4.68 at rank 64, and 5.62 instead of 5.36 at rank 128 (H200).
MAX_RANK_IN_PRODUCT = 64


class Factor:
    """scaling * m in bfloat16, for m [E, r, W] or [r, W], with rows of zeros up to a rank R that is a multiple of 8.

    It is made when a product asks for it, as that product takes it.

    Attributes:
        shape: [E, R, W] or, if all experts share the factor, [R, W].
        is_shared: whether they do.
    """

    def __init__(self, m: Tensor, scaling: float = 1.0) -> None:
        *experts, r, width = m.shape
        self.m, self.scaling, self.shape, self.is_shared = m, scaling, (*experts, r + -r % 8, width), not experts
        self._by_expert, self._side_by_side, self._by_column = None, None, None

    def by_expert(self) -> Tensor:
        """Returns [E + 1, R, W], for grouped products, or the shared [R, W]. Strides are as of m.

        The last expert of E + 1 is zero. Rows without a group count as its rows. They must not meet the factor of
        another expert, because zero times NaN is NaN.
        """
        if self._by_expert is None:
            by_column = self.m.stride(-2) == 1 and self.m.stride(-1) != 1
            self._by_expert = self._made(by_column, 0 if self.is_shared else 1)
        return self._by_expert

    def side_by_side(self) -> Tensor:
        """Returns the factors of all experts as one, [E R, W], for a dense product."""
        if self._side_by_side is None:
            self._side_by_side = self._made(by_column=False, more_experts=0).flatten(0, 1)
        return self._side_by_side

    def by_column(self) -> Tensor:
        """Returns [E, R, W] with adjacent elements along R, for the low-rank term of `scaled_grouped_mm`."""
        if self._by_column is None:
            self._by_column = self._made(by_column=True, more_experts=0)
        return self._by_column

    def _made(self, by_column: bool, more_experts: int) -> Tensor:
        m, (*experts, rank, width) = self.m, self.shape
        missing = rank - m.shape[-2]
        if torch.compiler.is_compiling():  # Dynamo refuses an out= that is transposed
            padding = 0, 0, 0, missing, *(0, more_experts) * len(experts)
            out = rounded(pad(m, padding) * self.scaling, torch.bfloat16)
            return out.mT.contiguous().mT if by_column else out.contiguous()
        if self.scaling == 1 and not more_experts and not missing and m.dtype == torch.bfloat16:
            if (m.mT if by_column else m).is_contiguous():
                return m
        sizes = *(e + more_experts for e in experts), *((width, rank) if by_column else (rank, width))
        out = (m.new_zeros if missing else m.new_empty)(sizes, dtype=torch.bfloat16)
        out = out.mT if by_column else out
        given = out[:-1] if more_experts else out
        if more_experts and not missing:
            out[-1].zero_()
        torch.mul(m, self.scaling, out=given[..., : m.shape[-2], :] if missing else given)  # rounds once
        return out


class Slots:
    """The rows of the groups of a call. Tokens have rows [T, E R] where each expert has R columns."""

    def __init__(self, groups: Groups) -> None:
        self.groups, self._covered, self._unused, self._spread = groups, None, None, (None, None)

    def is_dense(self, m: Factor) -> bool:
        """Whether tokens are multiplied by the factors of all experts at once."""
        e, top_k = m.shape[0], self.groups.top_k
        return not m.is_shared and top_k is not None and top_k <= e and e * m.shape[1] <= DENSE * top_k

    def covered(self, rows: int) -> Tensor:
        """Returns offs for a product of all rows with a factor of each expert: rows behind the last group, which are
        zero, are rows of the expert of zeros.

        A grouped product leaves rows without a group unwritten, and zeroing them takes a pass over the result.
        """
        if self._covered is None:
            offs = self.groups.offs
            self._covered = torch.cat([offs, offs.new_full((1,), rows)])
        return self._covered

    def used(self, x: Tensor) -> Tensor:
        """Returns tokens x [T, W] with zeros in place of each token that has no slot."""
        if self._unused is None:
            self._unused = self.groups.inverse.amax(1, keepdim=True) < 0
        return torch.where(self._unused, 0, x)

    def taken(self, x: Tensor) -> Tensor:
        """Returns the columns of each row's expert in x [T, E R], [P, R]. Rows without a group are zero."""
        return _take(x, self.groups.offs, self.groups.indices, self.groups.top_k)

    def spread(self, u: Tensor, scores: Tensor | None = None) -> Tensor:
        """Puts rows u [P, R], multiplied by scores, into the columns of their experts, [T, E R]. Others are zero."""
        if scores is not None:
            return _spread(u, self.groups.offs, self.groups.inverse, scores)
        if self._spread[0] is not u:  # the gradients of tokens and of a factor are made of the same rows
            self._spread = u, _spread(u, self.groups.offs, self.groups.inverse)
        return self._spread[1]

    def row_scores(self, scores: Tensor) -> Tensor:
        """Returns the score of each row, [P], or 0 for a row without a group. Scores of no slot may be NaN."""
        indices, inverse = self.groups.indices, self.groups.inverse
        if indices is not None:
            return _permute_pad(scores.reshape(-1, 1), indices, 1).view(-1)
        return torch.where(inverse >= 0, scores.view(inverse.shape), 0).view(-1)

    def scored(self, u: Tensor, scores: Tensor | None) -> Tensor:
        """Returns u [P, R] with each row multiplied by its score, or by 0 if it has no group."""
        if scores is None:
            return u
        return torch.mul(u, self.row_scores(scores)[:, None], out=torch.empty_like(u))  # rounds once


class Rows:
    """Rows x [P, W] that are sorted by expert: h, activations, or their gradients. Rows without a group are zero."""

    def __init__(self, x: Tensor, slots: Slots) -> None:
        self.x, self.slots, self.groups = row_major(cast(x, torch.bfloat16)), slots, slots.groups

    def narrow(self, m: Factor) -> Tensor:
        """Computes x @ m^T of each group, [P, R]. Rows without a group are zero."""
        return _product(self.x, m.by_expert().mT, self.slots)

    def outer(self, u: Tensor, m: Factor, scores: Tensor | None = None) -> Tensor:
        """Computes the gradient of a factor m, [E, R, W] or [R, W]: u^T @ x of each group for u [P, R]. scores multiply
        u."""
        u = self.slots.scored(u, scores)
        return _mm(u.mT, self.x) if m.is_shared else bf16_wgrad(u, self.x, self.groups.offs)


class Tokens(Rows):
    """Tokens x [T, W], which groups take by index if they have indices: the input of a layer, or dout.

    rows: x in the order of the groups, if it is in memory already.
    """

    def __init__(self, x: Tensor, slots: Slots, rows: Tensor | None = None) -> None:
        super().__init__(x, slots)
        self._rows = self.x if self.groups.indices is None else rows

    def rows(self) -> Tensor:
        if self._rows is None:
            self._rows = _permute_pad(self.x, self.groups.indices, self.groups.top_k)
        return self._rows

    def narrow(self, m: Factor) -> Tensor:
        groups = self.groups
        if self.slots.is_dense(m):
            return self.slots.taken(_mm(self.x, m.side_by_side().mT))
        m_t = m.by_expert().mT
        if groups.indices is None:  # rows behind the last group may hold anything
            offs = groups.offs
            return zero_tail(_mm(self.x, m_t), offs) if m.is_shared else bf16_product(self.x, m_t[:-1], offs)
        if not m.is_shared:
            return _product(self.rows(), m_t, self.slots)
        return _permute_pad(_mm(self.x, m_t), groups.indices, groups.top_k)  # multiplied once a token, not once a slot

    def outer(self, u: Tensor, m: Factor, scores: Tensor | None = None) -> Tensor:
        groups, is_dense = self.groups, self.slots.is_dense(m)
        if is_dense or (groups.indices is not None and m.is_shared):
            u = self.slots.spread(u, scores) if is_dense else _combine(u, groups.inverse, scores)
            return _mm(u.mT, self.slots.used(self.x)).view(m.shape)  # a token without a slot may hold anything
        sums = bf16_wgrad(self.slots.scored(u, scores), self.rows(), groups.offs)
        # Rows behind the last group may hold anything, and a dense product would read them.
        return sums.float().sum(0) if m.is_shared else sums


def adds_to_product(m: Factor) -> bool:
    """Whether a product of FP8 operands adds u @ m itself. A shared factor widens tokens, which are fewer than rows."""
    return not m.is_shared and m.shape[-2] <= MAX_RANK_IN_PRODUCT


def add_to_rows(y: Tensor, u: Tensor, m: Factor, slots: Slots, mask: Tensor | None = None, p: float = 0) -> Tensor:
    """Computes y + u @ m of each group, [P, W], for u [P, R]. mask: the mask of `dropped`, applied to u @ m."""
    return _add_low_rank(y, u, m.by_expert(), slots.covered(u.shape[0]), mask, p)


def add_to_tokens(
    out: Tensor,
    u: Tensor,
    m: Factor,
    slots: Slots,
    scores: Tensor | None = None,
    mask: Tensor | None = None,
    p: float = 0,
) -> Tensor:
    """Computes out [T, W] plus the sum over a token's slots of scores * (u @ m), for u [P, R]. It may write to out.

    If groups have no `inverse`, out has their rows.
    """
    groups = slots.groups
    if groups.inverse is None:
        return add_to_rows(out, u, m, slots, mask, p)
    if slots.is_dense(m):
        u, m = slots.spread(u, scores), m.side_by_side()
    elif m.is_shared:
        u, m = _combine(u, groups.inverse, scores), m.by_expert()
    else:
        wide = _combine(_product(u, m.by_expert(), slots), groups.inverse, scores)
        return _plus(out, wide if mask is None else kept(wide, mask, p))
    if mask is not None:
        return _plus(out, kept(_mm(u, m), mask, p))
    if out.device.type == "cpu":
        return torch.addmm(out.float(), u.float(), m.float()).bfloat16()
    return _addmm(out, u, m) if torch.compiler.is_compiling() else out.addmm_(u, m)


def _plus(out: Tensor, x: Tensor) -> Tensor:
    """out + x, in out. A graph gets a new tensor: torch 2.11 loses the gradients of a Function that wrote its result in
    place."""
    return out + x if torch.compiler.is_compiling() else out.add_(x)


@python_op("moe_fp8_ext::addmm", lambda out, u, m: torch.empty_like(out))
def _addmm(out: Tensor, u: Tensor, m: Tensor) -> Tensor:
    """out + u @ m, rounded once. Inductor splits torch's own op into a product and a sum, and rounds both."""
    return torch.addmm(out, u, m)


@python_op("moe_fp8_ext::add_low_rank", lambda y, *_: y.new_empty(y.shape))
def _add_low_rank(y: Tensor, u: Tensor, m: Tensor, covered: Tensor, mask: Tensor | None, p: float) -> Tensor:
    """y + u @ m. One op, so that a policy of selective checkpointing that saves products does not save u @ m too."""
    wide = _mm(u, m) if m.dim() == 2 else bf16_product(u, m, covered, covered=True)
    return (wide if mask is None else kept(wide, mask, p)).add_(y)


def _product(x: Tensor, m: Tensor, slots: Slots) -> Tensor:
    """Computes x @ m of each group, [P, N], for rows x [P, K] that are zero behind the last group, as the result is."""
    return _mm(x, m) if m.dim() == 2 else bf16_product(x, m, slots.covered(x.shape[0]), covered=True)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """Computes a @ b in bfloat16. On a CPU in float32, for the reason that `_cpu_grouped_mm` gives."""
    return a @ b if a.device.type != "cpu" else (a.float() @ b.float()).bfloat16()


# ---- dropout ----


def dropped(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Applies dropout to x [M, W]. Returns the result, and the mask as bits, [M, ceil(W / 8)] bytes."""
    rows, columns = x.shape
    bits = torch.empty(rows, -(-columns // 8), 8, dtype=torch.bool, device=x.device).bernoulli_(1 - p)
    mask = (bits * _powers(x)).sum(2, dtype=torch.uint8)
    return kept(x, mask, p), mask


def kept(x: Tensor, mask: Tensor, p: float) -> Tensor:
    """Applies the mask of `dropped` to x [M, W] again."""
    bits = (mask[:, :, None] & _powers(x)) != 0
    return torch.where(bits.view(x.shape[0], 8 * mask.shape[1])[:, : x.shape[1]], x * (1 / (1 - p)), 0)


def _powers(x: Tensor) -> Tensor:
    return 1 << torch.arange(8, dtype=torch.uint8, device=x.device)
