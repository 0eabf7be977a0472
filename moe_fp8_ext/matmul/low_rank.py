"""Products with the factors of adapters, in bfloat16, for a low rank R.

A factor m is [E, R, W], one of each expert, or [R, W] if all experts share it. W is the width of a weight's rows or
columns. `Rows` and `Tokens` are what a factor multiplies. Both narrow W columns to R, and sum the gradient of a factor.
`add_to_rows` and `add_to_tokens` widen R columns to W and add them to what the frozen weight gave.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_fp8_ext.matmul.bf16 import bf16_product, bf16_wgrad, zero_tail
from moe_fp8_ext.matmul.engine import Groups
from moe_fp8_ext.quantization.casting import cast, row_major
from moe_fp8_ext.quantization.format import round_up

_combine = torch.ops.moe_fp8.combine.default
_permute_pad = torch.ops.moe_fp8.permute_pad.default


def factor(m: Tensor) -> Tensor:
    """Returns m [E, r, W] or [r, W] in bfloat16, with rows of zeros up to a rank R that is a multiple of 8."""
    m, missing = cast(m, torch.bfloat16), round_up(m.shape[-2], 8) - m.shape[-2]
    if missing:
        return pad(m, (0, 0, 0, missing))
    return m if 1 in m.stride()[-2:] else m.contiguous()


class Rows:
    """Rows x [P, W] that are sorted by expert: h, activations, or their gradients. Rows without a group are zero."""

    def __init__(self, x: Tensor, groups: Groups) -> None:
        self.x, self.groups = row_major(cast(x, torch.bfloat16)), groups

    def narrow(self, m: Tensor) -> Tensor:
        """Computes x @ m^T of each group, [P, R]. Rows without a group are zero."""
        return self.x @ m.mT if m.dim() == 2 else bf16_product(self.x, m.mT, self.groups.offs)

    def outer(self, u: Tensor, shared: bool) -> Tensor:
        """Computes u^T @ x of each group for u [P, R], [E, R, W], or their sum [R, W] if experts share the factor."""
        return u.mT @ self.x if shared else bf16_wgrad(u, self.x, self.groups.offs)


class Tokens(Rows):
    """Tokens x [T, W], which groups take by index if they have indices: the input of a layer, or dout.

    rows: x in the order of the groups, if it is in memory already.
    """

    def __init__(self, x: Tensor, groups: Groups, rows: Tensor | None = None) -> None:
        super().__init__(x, groups)
        self._rows = self.x if groups.indices is None else rows

    def rows(self) -> Tensor:
        if self._rows is None:
            self._rows = _permute_pad(self.x, self.groups.indices, self.groups.top_k)
        return self._rows

    def narrow(self, m: Tensor) -> Tensor:
        groups = self.groups
        if m.dim() == 3:
            return bf16_product(self.rows(), m.mT, groups.offs)
        u = self.x @ m.mT  # once a token, not once a slot
        u = u if groups.indices is None else _permute_pad(u, groups.indices, groups.top_k)
        return zero_tail(u, groups.offs)

    def outer(self, u: Tensor, shared: bool) -> Tensor:
        groups = self.groups
        if not shared:
            return bf16_wgrad(u, self.rows(), groups.offs)
        if groups.indices is None:  # rows behind the last group may hold anything, and a dense product reads them
            return bf16_wgrad(u, self.x, groups.offs).float().sum(0)
        has_slot = (groups.inverse >= 0).any(1)  # a token without a slot may hold anything, too
        return _combine(u, groups.inverse, None).mT @ torch.where(has_slot[:, None], self.x, 0)


def scored(u: Tensor, scores: Tensor | None, groups: Groups) -> Tensor:
    """Returns u [P, R] with each row multiplied by its score."""
    if scores is None:
        return u
    of_rows = scores.reshape(-1)
    if groups.indices is not None:
        of_rows = of_rows[groups.indices.clamp(min=0)]
    return (u * of_rows[:, None]).to(u.dtype)


def add_to_rows(y: Tensor, u: Tensor, m: Tensor, groups: Groups, mask: Tensor | None = None, p: float = 0) -> Tensor:
    """Computes y + u @ m of each group, [P, W], for u [P, R]. mask: that of `dropped`, for u @ m."""
    return _add_low_rank(y, u, m, groups.offs, mask, p)


def add_to_tokens(
    out: Tensor,
    u: Tensor,
    m: Tensor,
    groups: Groups,
    scores: Tensor | None = None,
    mask: Tensor | None = None,
    p: float = 0,
) -> Tensor:
    """Computes out [T, W] plus the sum over a token's slots of scores * (u @ m), for u [P, R].

    If groups have no `inverse`, out has their rows.
    """
    if groups.inverse is None:
        return add_to_rows(out, u, m, groups, mask, p)
    if m.dim() == 2:
        return _add_low_rank(out, _combine(u, groups.inverse, scores), m, groups.offs, mask, p)
    wide = _combine(_widened(u, m, groups.offs), groups.inverse, scores)
    return out + (wide if mask is None else kept(wide, mask, p))


@torch.library.custom_op("moe_fp8_ext::add_low_rank", mutates_args=())
def _add_low_rank(y: Tensor, u: Tensor, m: Tensor, offs: Tensor, mask: Tensor | None, p: float) -> Tensor:
    """y + u @ m. One op, so that a policy of selective checkpointing that saves products does not save u @ m too."""
    wide = _widened(u, m, offs)
    return (wide if mask is None else kept(wide, mask, p)).add_(y)


@_add_low_rank.register_fake
def _(y: Tensor, u: Tensor, m: Tensor, offs: Tensor, mask: Tensor | None, p: float) -> Tensor:
    return y.new_empty(y.shape)


def _widened(u: Tensor, m: Tensor, offs: Tensor) -> Tensor:
    """Computes u @ m of each group, [P, W]. Rows behind the last group are zero, because those of u are.

    Those rows count as the last group's: to zero them afterwards would take a pass over [P, W].
    """
    if m.dim() == 2:
        return u @ m
    offs = torch.cat([offs[:-1], offs.new_full((1,), u.shape[0])])
    return bf16_product(u, m, offs, covered=True)


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
