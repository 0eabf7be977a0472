"""Operands of scaled_grouped_mm of every format whose product is exact, and the comparison of results."""

from __future__ import annotations

import torch
from helpers import assert_same, on
from torch import Tensor

from moe_fp8_ext import reference
from moe_fp8_ext.ops import scaled_grouped_mm
from moe_fp8_ext.quantization import format as formats
from moe_fp8_ext.reference.numerics import round_up

FORMATS = tuple(formats.FORMATS)
UNIT = {name: max(16, f.min_align) for name, f in formats.FORMATS.items()}  # multiple of offs for torch's GEMMs
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def ternary(*shape: int, dtype: torch.dtype = E4M3) -> Tensor:
    """Values in {-1, 0, 1}. With scales that are powers of two near 1, float32 accumulators and bfloat16 hold the sum
    of thousands of products exactly, so out is rounded once."""
    return torch.randint(-1, 2, shape).float().to(dtype)


def scales(fmt: str, *shape: int) -> Tensor:
    exponents = torch.randint(-2, 3, shape)
    is_e8m0 = formats.FORMATS[fmt].scale_dtype == E8M0
    return (exponents + 127).byte().view(E8M0) if is_e8m0 else torch.exp2(exponents.float())


def kind(fmt: str) -> str:
    """The memory order of scales, or "whole" if a row has one scale."""
    return formats.FORMATS[fmt].order if formats.FORMATS[fmt].block else "whole"


def exact_2d3d(
    fmt: str, m: int, k: int, n: int, offs: Tensor, device: str = "cpu", dtypes: tuple = (E4M3, E4M3)
) -> list[object]:
    """a [M, K], b [E, K, N], scale_a, scale_b, format, offs."""
    e, blocks = len(offs), -(-k // max(formats.FORMATS[fmt].block, 1))
    a, b = ternary(m, k, dtype=dtypes[0]), ternary(e, n, k, dtype=dtypes[1]).mT
    scale_a, scale_b = {
        "whole": lambda: (scales(fmt, m), scales(fmt, e, n)),
        "column_major": lambda: (scales(fmt, blocks, m).t(), scales(fmt, e, -(-n // 128), blocks).mT),
        "blocked": lambda: (
            scales(fmt, m + 128 * e, round_up(blocks, 4)),
            scales(fmt, e, round_up(n, 128) * round_up(blocks, 4)),
        ),
        "row_major": lambda: (scales(fmt, m, blocks), scales(fmt, e, n, blocks)),
    }[kind(fmt)]()
    return on(device, [a, b, scale_a, scale_b, fmt, offs])


def exact_2d2d(
    fmt: str, p: int, k: int, n: int, offs: Tensor, device: str = "cpu", dtypes: tuple = (E4M3, E4M3)
) -> list[object]:
    """a [N, P], b [P, K], scale_a, scale_b, format, offs."""
    e, blocks = len(offs), -(-p // max(formats.FORMATS[fmt].block, 1))
    a_t, x_t = ternary(n, p, dtype=dtypes[0]), ternary(k, p, dtype=dtypes[1])
    scale_a, scale_b = {
        "whole": lambda: (scales(fmt, e, n), scales(fmt, e, k)),
        "column_major": lambda: (scales(fmt, blocks + e, n).t(), scales(fmt, blocks + e, k)),
        "blocked": lambda: tuple(scales(fmt, round_up(rows, 128), blocks + 4 * e) for rows in (n, k)),
        "row_major": lambda: (scales(fmt, n, blocks), scales(fmt, k, blocks)),
    }[kind(fmt)]()
    return on(device, [a_t, x_t.t(), scale_a, scale_b, fmt, offs])


def check_exact(args: list[object], **kwargs: object) -> Tensor:
    """Compares the product with the reference, byte for byte, and returns it."""
    got = scaled_grouped_mm(*args, **kwargs)
    assert_same(got + 0.0, reference.scaled_grouped_mm(*args, **kwargs) + 0.0)  # -0 becomes +0
    return got
