"""Products with the factors of adapters, in bfloat16, for a low rank R.

A `Factor` m is [E, R, W], one of each expert, or [R, W] if all experts share it. W is the width of a weight's rows or
columns. `Rows` and `Tokens` are what a factor multiplies. Both narrow W columns to R, and sum the gradient of a factor.
A product of the frozen weight adds what a factor widens, where `adds_to_product` says so: then R columns are widened to
W in its epilogue, and no tensor [P, W] is written. Elsewhere `add_to_rows` and `add_to_tokens` add it to the result.

Factors of each expert are multiplied in one of two ways. Up to `MAX_RANK_OF_KERNELS`, `narrow_tokens` and
`outer_tokens` read each token where it lies. At higher ranks, and on AMD's GPUs, tokens are copied into the order of
experts, [P, W], for grouped products of torch. A factor that all experts share is multiplied by tokens, not by slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8_ext.matmul.bf16 import bf16_product, bf16_wgrad, zero_tail
from moe_fp8_ext.matmul.engine import Groups
from moe_fp8_ext.ops.dispatch import python_op
from moe_fp8_ext.ops.factors import order_of
from moe_fp8_ext.ops.low_rank import FORMATS_OF_TOKENS
from moe_fp8_ext.quantization.casting import cast, row_major

_cast_factor = torch.ops.moe_fp8.cast_factor.default
_combine = torch.ops.moe_fp8.combine.default
_narrow = torch.ops.moe_fp8.narrow_tokens.default
_outer = torch.ops.moe_fp8.outer_tokens.default
_permute_pad = torch.ops.moe_fp8.permute_pad.default

# Ranks up to which this package's kernels multiply tokens by the factors of their experts. On an H200, with 16,384
# tokens of 2,048 columns, 128 experts and 8 slots a token, the product of rank 16 takes 143 us, and the gradient 211.
# The copies take 174 us, and grouped products of torch 182 and 195. At rank 64 the kernels take 354 and 539 us.
MAX_RANK_OF_KERNELS = 32

_FP8 = torch.float8_e4m3fn, torch.float8_e5m2  # that the kernels of tensor cores take

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
        self._made: dict[tuple[bool, int], Tensor] = {}

    @property
    def has_kernels(self) -> bool:
        """Whether this package's kernels multiply tokens by it."""
        fits = not self.is_shared and self.shape[1] <= MAX_RANK_OF_KERNELS and self.shape[2] % 8 == 0
        return fits and torch.version.hip is None

    def multiplies_fp8(self, dtype: torch.dtype, format: str | None) -> bool:
        """Whether the kernels multiply tokens in this FP8 dtype and format of scales by it, without a copy in BF16."""
        return self.has_kernels and self.shape[2] % 16 == 0 and format in FORMATS_OF_TOKENS and dtype in _FP8

    def by_row(self) -> Tensor:
        """Returns [E, R, W] with adjacent elements along W, for this package's kernels."""
        return self._cast(by_column=False)

    def by_column(self) -> Tensor:
        """Returns [E, R, W] with adjacent elements along R, for the low-rank term of `scaled_grouped_mm`."""
        return self._cast(by_column=True)

    def by_expert(self) -> Tensor:
        """Returns [E + 1, R, W], for grouped products of torch, or the shared [R, W]. Strides are as of m.

        The last expert of E + 1 is zero. Rows without a group count as its rows. They must not meet the factor of
        another expert, because zero times NaN is NaN.
        """
        by_column = self.m.stride(-2) == 1 and self.m.stride(-1) != 1
        return self._cast(by_column, more_experts=0 if self.is_shared else 1)

    def gradient(self, sums: Tensor) -> Tensor:
        """Returns sums [.., R, W] as the gradient of m: of its sizes, dtype and order of dimensions."""
        m = self.m
        if sums.dtype == m.dtype and sums.shape == m.shape and m.is_contiguous() and sums.is_contiguous():
            return sums
        return _cast_factor(sums, *m.shape[-2:], order_of(m), m.dtype)

    def _cast(self, by_column: bool, more_experts: int = 0) -> Tensor:
        made = self._made.get((by_column, more_experts))
        if made is None:
            made = self._made[by_column, more_experts] = self._new(by_column, more_experts)
        return made

    def _new(self, by_column: bool, more_experts: int) -> Tensor:
        m, (*experts, rank, width) = self.m, self.shape
        if self.scaling == 1 and not more_experts and m.shape[-2] == rank and m.dtype == torch.bfloat16:
            if (m.mT if by_column else m).is_contiguous() and _begins_aligned(m):
                return m
        order = "e" * len(experts) + ("cr" if by_column else "rc")
        num_experts = experts[0] + more_experts if more_experts else None
        return _cast_factor(m, rank, width, order, torch.bfloat16, num_experts, self.scaling)


class Slots:
    """The rows of the groups of a call."""

    def __init__(self, groups: Groups) -> None:
        self.groups, self._covered = groups, None

    def covered(self, rows: int) -> Tensor:
        """Returns offs for a product of all rows with a factor of each expert: rows behind the last group, which are
        zero, are rows of the expert of zeros.

        A grouped product leaves rows without a group unwritten, and zeroing them takes a pass over the result.
        """
        if self._covered is None:
            offs = self.groups.offs
            self._covered = torch.cat([offs, offs.new_full((1,), rows)])
        return self._covered

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
    """Rows x [P, W] that are sorted by expert: h, activations, or their gradients. Rows without a group are zero.

    scale, format: of x in FP8, as `quantize_rows` returns it, for a factor that `multiplies_fp8`.
    """

    def __init__(self, x: Tensor, slots: Slots, scale: Tensor | None = None, format: str | None = None) -> None:
        self.x = row_major(cast(x, torch.bfloat16) if scale is None else x)
        self.slots, self.groups = slots, slots.groups
        self._scales = scale, format
        self._by_index: tuple[Tensor | None, int | None] = None, None  # indices and top_k, if tokens are taken by index

    def narrow(self, m: Factor) -> Tensor:
        """Computes x @ m^T of each group, [P, R]. Rows without a group are zero."""
        if not m.has_kernels:
            return self._narrow_by_torch(m)
        return _narrow(self._aligned(), m.by_row(), self.groups.offs, *self._scales, *self._by_index)

    def outer(self, u: Tensor, m: Factor, scores: Tensor | None = None) -> Tensor:
        """Computes the gradient of a factor m: u^T @ x of each group for u [P, R]. scores, of slots, multiply u."""
        if not m.has_kernels:
            return m.gradient(self._outer_by_torch(u, m, scores))
        # Sums are rounded once: to float32, unless the gradient is in bfloat16.
        dtype = torch.bfloat16 if m.m.dtype == torch.bfloat16 else torch.float32
        how = scores, *self._scales, *self._by_index, dtype
        return m.gradient(_outer(u, self._aligned(), self.groups.offs, *how))

    def _narrow_by_torch(self, m: Factor) -> Tensor:
        return _product(self.x, m.by_expert().mT, self.slots)

    def _outer_by_torch(self, u: Tensor, m: Factor, scores: Tensor | None) -> Tensor:
        u = self.slots.scored(u, scores)
        return _mm(u.mT, self.x) if m.is_shared else bf16_wgrad(u, self.x, self.groups.offs)

    def _aligned(self) -> Tensor:
        """Returns x with rows at multiples of 16 bytes, as the kernels that use tensor cores need them.

        Copies other rows once. The bytes of a row must be a multiple of 16.
        """
        if self.x.stride(0) * self.x.itemsize % 16 != 0 or not _begins_aligned(self.x):
            self.x = self.x.clone(memory_format=torch.contiguous_format)
        return self.x


class Tokens(Rows):
    """Tokens x [T, W], which groups take by index if they have indices: the input of a layer, or dout.

    rows: x in the order of the groups, if it is in memory already.
    """

    def __init__(
        self,
        x: Tensor,
        slots: Slots,
        scale: Tensor | None = None,
        format: str | None = None,
        rows: Tensor | None = None,
    ) -> None:
        super().__init__(x, slots, scale, format)
        groups = self.groups
        self._by_index = groups.indices, groups.top_k
        self._rows = self.x if groups.indices is None else rows

    def rows(self) -> Tensor:
        if self._rows is None:
            self._rows = _permute_pad(self.x, *self._by_index)
        return self._rows

    def _narrow_by_torch(self, m: Factor) -> Tensor:
        groups, m_t = self.groups, m.by_expert().mT
        if groups.indices is None:  # rows behind the last group may hold anything
            offs = groups.offs
            return zero_tail(_mm(self.x, m_t), offs) if m.is_shared else bf16_product(self.x, m_t[:-1], offs)
        if not m.is_shared:
            return _product(self.rows(), m_t, self.slots)
        return _permute_pad(_mm(self.x, m_t), *self._by_index)  # multiplied once a token, not once a slot

    def _outer_by_torch(self, u: Tensor, m: Factor, scores: Tensor | None) -> Tensor:
        groups = self.groups
        if groups.indices is not None and m.is_shared:
            return _mm(_combine(u, groups.inverse, scores).mT, _used(self.x, groups))
        sums = bf16_wgrad(self.slots.scored(u, scores), self.rows(), groups.offs)
        # Rows behind the last group may hold anything, and a dense product would read them.
        return sums.float().sum(0) if m.is_shared else sums


def _begins_aligned(x: Tensor) -> bool:
    """Whether x begins at a multiple of 16 bytes.

    A graph does not know offsets. inductor copies an argument that is less aligned than the example it compiled for.
    """
    return torch.compiler.is_compiling() or x.storage_offset() * x.itemsize % 16 == 0


def _used(x: Tensor, groups: Groups) -> Tensor:
    """Returns tokens x [T, W] with zeros in place of each token that has no slot, which may hold anything."""
    return torch.where(groups.inverse.amax(1, keepdim=True) < 0, 0, x)


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
    if not m.is_shared:
        wide = _combine(_product(u, m.by_expert(), slots), groups.inverse, scores)
        return _plus(out, wide if mask is None else kept(wide, mask, p))
    u, m = _combine(u, groups.inverse, scores), m.by_expert()
    if mask is not None:
        return _plus(out, kept(_mm(u, m), mask, p))
    if out.device.type == "cpu":
        return torch.addmm(out.float(), u.float(), m.float()).bfloat16()
    # Not addmm_, which FlopCounterMode does not count.
    return _addmm(out, u, m) if torch.compiler.is_compiling() else torch.addmm(out, u, m, out=out)


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
