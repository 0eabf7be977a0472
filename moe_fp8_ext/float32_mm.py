"""Products in float32 on tensor cores, which multiply bfloat16: a number of float32 is the sum of three of bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8_ext.bf16 import cast

_PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}


def float32_mm(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] @ b [K, N] with products and sums in float32.

    On CUDA, where one of them is of 16 bits, by parts: several times as fast, and an infinity, or what bfloat16 rounds
    to one, may come out as NaN.
    """
    known = a.dtype in _PARTS and b.dtype in _PARTS and not a.dtype == b.dtype == torch.float32
    return mm_by_parts(a, b) if known and _has_out_dtype(a) else a.float() @ b.float()


# An op of its own, because not every torch compiles mm to another dtype.
@torch.library.custom_op("moe_fp8_ext::mm_by_parts", mutates_args=())
def mm_by_parts(a: Tensor, b: Tensor) -> Tensor:
    """Leaves out products of parts that are less than 2^-24 of those of the first parts."""
    of_a, of_b = parts(a), parts(b)
    if len(of_a) == len(of_b) == 1:
        return _mm(a, b)
    if len(of_a) == 1:
        return _mm(a, torch.cat(of_b, 1)).unflatten(1, (len(of_b), -1)).sum(1)
    if len(of_b) == 1 and a.shape[0] <= a.shape[1]:
        return _mm(torch.cat(of_a), b).unflatten(0, (len(of_a), -1)).sum(0)
    pairs = [(i, j) for i in range(len(of_a)) for j in range(len(of_b)) if i + j < 3]
    return _mm(torch.cat([of_a[i] for i, _ in pairs], 1), torch.cat([of_b[j] for _, j in pairs]))


@mm_by_parts.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)


def parts(x: Tensor) -> list[Tensor]:
    """Of bfloat16, the largest first; their sum is x, but for what underflows."""
    count, found = _PARTS[x.dtype], [cast(x, torch.bfloat16)]
    while len(found) < count:
        x = x.float() - found[-1].float()
        found.append(x.bfloat16())
    return found


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out_dtype=torch.float32) if _has_out_dtype(a) else a.float() @ b.float()


def _has_out_dtype(x: Tensor) -> bool:
    """Whether torch.mm has it there. A result of bfloat16 could be a sum of sums that were rounded to it."""
    return x.is_cuda and torch.version.hip is None
