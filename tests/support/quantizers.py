"""Inputs for tests of the quantizers, and the comparison of all directions with the reference."""

from __future__ import annotations

import torch
from helpers import FP8_DTYPES, INPUT_DTYPES, assert_same, group_offs, misaligned, short, slot_indices, wide
from torch import Tensor

from moe_fp8_ext import ops, reference
from moe_fp8_ext.reference.numerics import E8M0, FORMATS, Format

ACTIVATIONS = ("quantize_rows", "quantize_tokens", "quantize_both")
QUANTIZERS = (*ACTIVATIONS, "quantize_weight")
RULES = [(name, rounding) for name, f in FORMATS.items() for rounding in f.roundings]
CASTS = [(dtype, fp8) for dtype in INPUT_DTYPES for fp8 in FP8_DTYPES]
ALIGNS = [(name, 2**i) for name, f in FORMATS.items() for i in range(9) if f.aligns[0] <= 2**i <= f.aligns[1]]


def odd_rows(x: Tensor) -> Tensor:
    """x without its last columns: rows of odd length, an odd number of elements apart."""
    return x[..., :-3].contiguous()


def narrow_rows(x: Tensor) -> Tensor:
    return x[..., :67]


GENERIC = [misaligned, odd_rows, narrow_rows]  # views whose rows do not begin at multiples of 16 bytes: generic kernels


def check_activation(x: Tensor, format: str, offs: Tensor, align: int | None = None, **kwargs: object) -> None:
    """Compares rows, tokens and both with the reference, for every amax but "batch".

    kwargs are dtype, rounding, indices and top_k.
    """
    what = f"{format} of {short(x.dtype)} {short(x.shape)} offs {offs.tolist()[:20]} align {align} {short(kwargs)}"
    for amax in (amax for amax in FORMATS[format].amaxes if amax != "batch"):
        options = dict(offs=offs, align=align, amax=amax, **kwargs)
        want = reference.quantize_both(x, format, **options)
        assert_same(ops.quantize_both(x, format, **options), want, f"both of {what} {amax}")
        assert_same(ops.quantize_tokens(x, format, **options), want[2:], f"tokens of {what} {amax}")
    assert_same(ops.quantize_rows(x, format, offs=offs, **kwargs), want[:2], f"rows in groups of {what}")
    if FORMATS[format].order == "blocked":  # scales go by groups
        want = reference.quantize_rows(x, format, **kwargs)
    assert_same(ops.quantize_rows(x, format, **kwargs), want[:2], f"rows of {what}")


def check_weight(w: Tensor, format: str, **kwargs: object) -> None:
    """Compares both directions with the reference, then either direction alone."""
    want = reference.quantize_weight(w, format, **kwargs)
    what = f"{format} of {short(w.dtype)} {short(w.shape)} {short(kwargs)}"
    assert_same(ops.quantize_weight(w, format, **kwargs), want, what)
    for directions, alone in one_direction(want).items():
        assert_same(ops.quantize_weight(w, format, directions=directions, **kwargs), alone, f"{directions} of {what}")


def one_direction(both: tuple[Tensor, ...]) -> dict[str, list[Tensor]]:
    """Results for each single direction, made from the results for both: the other direction has no experts."""
    return {
        "rows": [*both[:2], *(t[:0] for t in both[2:])],
        "transposed": [*(t[:0] for t in both[:2]), *both[2:]],
    }


def caller(op: str, format: str, **kwargs: object):
    """The op as a function of x, offs and indices; quantize_weight takes the weight alone."""
    fn = getattr(ops, op)
    if op == "quantize_weight":
        return lambda w: fn(w, format, **kwargs)

    def call(x: Tensor, offs: Tensor, indices: Tensor | None = None) -> tuple[Tensor, ...]:
        gathered = {} if indices is None else {"indices": indices, "top_k": 2}
        return fn(x, format, offs=offs, **gathered, **kwargs)

    return call


def tensors(op: str, m: int, k: int, device: str, seed: int = 0, layout: str = "zipf", gather: bool = False):
    """The arguments of a `caller`."""
    if op == "quantize_weight":
        return [wide(3, m, k, device=device, seed=seed)]
    p = m * 5 // 4 if gather else m
    indices = [slot_indices(m, 2, p, device, seed)] if gather else []
    return [wide(m, k, device=device, seed=seed), group_offs(layout, p, 9, device), *indices]


def line_blocks(f: Format, n: int) -> list[slice]:
    """The scaling blocks of a line of n elements."""
    size = f.block or max(n, 1)
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def count_nans(scale: Tensor) -> int:
    return int((scale.view(torch.uint8) == 255).sum() if scale.dtype == E8M0 else scale.isnan().sum())
