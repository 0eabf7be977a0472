"""The kernels of adapters without a GPU, see test_simt.py. Sums of products of integers are exact."""

from __future__ import annotations

import pytest
import torch
from helpers import FP8_DTYPES, INPUT_DTYPES, corrupt_offs, group_offs, misaligned, pairs, short, slot_indices, wide
from simt_checks import ON_LINUX
from simt_kernels import Waves
from torch import Tensor

from moe_fp8_ext.ops import quantize_rows

pytestmark = ON_LINUX

BF16 = torch.bfloat16
LAYOUTS_OF_FACTORS = ("erc", "ecr", "rec", "rce", "cer", "cre")


def ternary(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def check(kernels: Waves, x: Tensor, m: Tensor, u: Tensor, offs: Tensor, **rows: object) -> None:
    """Checks both ops. Without indices, u has as many rows as x."""
    kernels.check("narrow_tokens", x, m, offs, **rows)
    scores = torch.randint(-2, 3, (len(x), rows.get("top_k", 1)), generator=torch.Generator().manual_seed(2)).float()
    kernels.check("outer_tokens", u, x, offs, **rows)
    kernels.check("outer_tokens", u, x, offs, scores=scores.view(-1), **rows, out_dtype=torch.float32)
    kernels.check("outer_tokens", u, x, offs, scores=scores, **rows, out_dtype=BF16)


@pytest.mark.parametrize("w", [0, 1, 24, 71, 264])
@pytest.mark.parametrize("r", [0, 1, 3, 8, 16, 24, 40, 100])
def test_sizes(kernels, r, w):
    """Widths of whole vectors and others, several steps along W, and ranks of one tile, of part of one, and of two."""
    for t, top_k, e in ((23, 3, 5), (9, 1, 12)):
        p = t * top_k * 4 // 3
        x, m, u = ternary(t, w), ternary(e, r, w, seed=1), ternary(p, r)
        check(kernels, x, m, u, group_offs("zipf", p, e), indices=slot_indices(t, top_k, p), top_k=top_k)
        check(kernels, x, m, u[:t], group_offs("tail_rows", t, e))


@pytest.mark.parametrize(
    *pairs(format=["rowwise", "blockwise"], dtype=FP8_DTYPES, w=[16, 37, 144, 272], r=[8, 24]), ids=short
)
def test_quantized_tokens(kernels, format, dtype, w, r):
    """Types that the GPU converts and others; widths of one scaling block and several."""
    x, m, u = ternary(23, w) * 3, ternary(5, r, w, seed=1), ternary(92, r)
    q, scale = quantize_rows(x, format, dtype=dtype, rounding="pow2")
    of_x = {"x_scale": scale, "format": format}
    check(kernels, q, m, u, group_offs("zipf", 92, 5), indices=slot_indices(23, 3, 92), top_k=3, **of_x)
    check(kernels, q, m, u[:23], group_offs("tail_rows", 23, 5), **of_x)


@pytest.mark.parametrize("w", [40, 43])
def test_groups(kernels, w):
    """A group spans several tiles of rows, a tile spans several groups, groups are empty, or there are none."""
    t, top_k = 150, 2
    x, u, indices = ternary(t, w), ternary(300, 16), slot_indices(t, top_k, 300)
    for layout, e in (("uniform", 2), ("zipf", 40), ("one_giant", 5), ("all_empty", 3), ("empty_first", 3)):
        m = ternary(e, 16, w, seed=1)
        check(kernels, x, m, u, group_offs(layout, 300, e), indices=indices, top_k=top_k)
    no_groups = torch.zeros(0, dtype=torch.int32)
    check(kernels, x, m[:0], u, no_groups, indices=indices, top_k=top_k)
    check(kernels, x[:0], m, u[:0], torch.zeros(3, dtype=torch.int32), indices=indices[:0], top_k=1)


def test_corrupt_offs_and_indices(kernels):
    x, u = ternary(20, 40), ternary(60, 16)
    corrupt = torch.tensor([-1, 60, 2**31 - 1, -(2**31), 3, 3, *range(54)], dtype=torch.int32)
    for offs in corrupt_offs(60):
        check(kernels, x, ternary(len(offs), 16, 40, seed=1), u, offs, indices=corrupt, top_k=3)
    for offs in corrupt_offs(20):
        check(kernels, x, ternary(len(offs), 16, 40, seed=1), u[:20], offs)


def test_strides(kernels):
    """Rows with room behind them, at odd addresses, repeated, or in another order of dimensions."""
    t, e, r, w = 20, 3, 16, 48
    offs, by_slot = group_offs("zipf", 60, e), {"indices": slot_indices(t, 3, 60), "top_k": 3}
    for room in (0, 1, 4, 8):
        x, m, u = (ternary(*s) for s in ((t, w + room), (e, r, w + room), (60, r + room)))
        check(kernels, x[:, room:], m[..., room:], u[:, room:], offs, **by_slot)
        check(kernels, x[:, :w], m[..., :w].transpose(0, 1).contiguous().transpose(0, 1), u[:, :r], offs, **by_slot)
    check(kernels, *map(misaligned, (x[:, :w], m[..., :w], u[:, :r])), offs, **by_slot)
    check(kernels, x[:1, :w].expand(t, w), m[:1, :, :w].expand(e, r, w), u[:1, :r].expand(60, r), offs, **by_slot)


@pytest.mark.parametrize("w", [48, 50])
def test_what_is_not_read_may_be_nan(kernels, w):
    """Tokens without a row in a group, factors of empty groups, and rows without a token."""
    x, u, m = ternary(6, w), ternary(12, 16), ternary(4, 16, w, seed=1)
    indices = torch.tensor([0, 2, -1, 5, 5, 12, -9, 8, 9, 10, 11, 1], dtype=torch.int32)
    x[3:], u[[2, 5, 6]], u[7:], m[1], m[3] = (torch.nan,) * 5
    offs = torch.tensor([3, 3, 7, 7], dtype=torch.int32)
    check(kernels, x, m, u, offs, indices=indices, top_k=2)


@pytest.mark.parametrize(*pairs(dtype=INPUT_DTYPES, out=INPUT_DTYPES, layout=LAYOUTS_OF_FACTORS), ids=short)
def test_cast_factor(kernels, dtype, out, layout):
    """Tiles are full, partial and of every shape. Dimensions are joined or not. Rows have whole vectors or odd sizes,
    and odd addresses."""
    for e, r, c in ((3, 16, 200), (70, 12, 67), (2, 130, 8), (1, 1, 9), (40, 3, 1), (5, 72, 300)):
        m = wide(*((e, r, c)["erc".index(d)] for d in layout)).to(dtype).permute([layout.index(d) for d in "erc"])
        for order in LAYOUTS_OF_FACTORS:
            kernels.check("cast_factor", m, r + -r % 8, c, order, out, e + 1, -0.3)
        kernels.check("cast_factor", m, r, c, "erc", out, e, 1.0)
        kernels.check("cast_factor", m, r, c, "ecr", out, e, 1.0)
        kernels.check("cast_factor", m[:, 1:], max(r - 2, 0), c - 1, layout, out, e, 1.0)
        kernels.check("cast_factor", m[:1].expand(4, r, c), r, c, "ecr", out, 4, 2.0)
    kernels.check("cast_factor", misaligned(wide(6, 16, 64).to(dtype)), 16, 64, "erc", out, 7, 0.5)
    kernels.check("cast_factor", wide(12, 64).to(dtype), 16, 64, "cr", out)
    kernels.check("cast_factor", wide(0, 3, 64).to(dtype), 16, 64, "ecr", out, 2)
    kernels.check("cast_factor", wide(2, 3, 64).to(dtype), 0, 64, "ecr", out)
