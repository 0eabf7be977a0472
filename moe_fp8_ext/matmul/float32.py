"""Matrix products with float32 accuracy on tensor cores that multiply bfloat16.

Each float32 number is split into a sum of up to three bfloat16 numbers, its parts. A product of two matrices is then a
sum of products of parts, which tensor cores accumulate in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8_ext.quantization.casting import cast

_PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}  # bfloat16 parts whose sum is exact
_16_BIT = torch.bfloat16, torch.float16
# From this many elements on, and up to this many experts, the gradient of a leaves cuBLAS in bfloat16. That needs one
# rounding: if cuBLAS split the sum over experts (split-K), it might round partial sums to bfloat16 before adding them.
# With a tile of the product for every multiprocessor and sums of two parts an expert, cuBLAS 13.0 on an H200 split no
# sums of layers of 128 experts. test_a_large_gradient_is_rounded_once holds products to one rounding.
_BF16_OUTPUT_MIN_ELEMENTS, _BF16_OUTPUT_MAX_EXPERTS = 2**23, 256


def float32_mm(a: Tensor, b: Tensor, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """a [M, K] @ b [K, N] with products and sums in float32, then rounded to out_dtype.

    On CUDA the product is computed from parts if a, b or out_dtype has 16 bits. That is several times as fast; an
    infinity, or a value that bfloat16 rounds to one, may come out as NaN. If out_dtype is bfloat16, whose rounding is
    up to 2^-8, products of parts below 2^-16 of the first parts' product are left out.
    """
    splits = a.dtype in _PARTS and b.dtype in _PARTS
    splits = splits and (a.dtype in _16_BIT or b.dtype in _16_BIT or out_dtype in _16_BIT)
    if not splits or not _has_out_dtype(a):
        return cast(a.float() @ b.float(), out_dtype)
    by_parts = mm_by_parts if torch.compiler.is_compiling() else _mm_by_parts
    return cast(by_parts(a, b, 2 if out_dtype == torch.bfloat16 else 3), out_dtype)


def float32_mm_backward(
    grad: Tensor, a: Tensor, b: Tensor, needs_a: bool, needs_b: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of a [M, K] and b [N, K], in their dtypes, from grad [M, N], the gradient of float32_mm(a, b^T).

    Args:
        grad: if `takes_parts`, it may also be the two parts [M, 2, N] that `parts` makes of it.
    """
    if takes_parts(a, b, needs_a, needs_b):
        by_parts = gradients_by_parts if torch.compiler.is_compiling() else _gradients_by_parts
        return by_parts(grad, a, b)  # compiled autograd traces backward too
    grad_a = float32_mm(grad, b, a.dtype) if needs_a else None
    return grad_a, float32_mm(grad.t(), a, b.dtype) if needs_b else None


def takes_parts(a: Tensor, b: Tensor, needs_a: bool, needs_b: bool) -> bool:
    """Whether `float32_mm_backward` splits the gradient into two parts once, for both products."""
    return needs_a and needs_b and a.dtype == b.dtype == torch.bfloat16 and _has_out_dtype(a)


def _mm_by_parts(a: Tensor, b: Tensor, order: int = 3) -> Tensor:
    """a @ b in float32, from parts. Leaves out products of parts below 2^(-8 order) of the first parts' product."""
    count_a, count_b = (min(_PARTS[t.dtype], order) for t in (a, b))
    if count_a == 1:
        return _mm(a, parts(b, count_b, 1)).unflatten(1, (count_b, -1)).sum(1) if count_b > 1 else _mm(a, b)
    if count_b == 1 and a.shape[0] <= a.shape[1]:
        return _mm(parts(a, count_a, 0), b).unflatten(0, (count_a, -1)).sum(0)
    if count_b == 1:
        return _mm(parts(a, count_a, 1), b.repeat(count_a, 1))
    pairs = [(i, j) for i in range(count_a) for j in range(count_b) if i + j < order]
    parts_a, parts_b = parts(a, count_a, 1).chunk(count_a, 1), parts(b, count_b, 0).chunk(count_b)
    return _mm(torch.cat([parts_a[i] for i, _ in pairs], 1), torch.cat([parts_b[j] for _, j in pairs]))


# torch.compile sees opaque custom ops here, because not every torch version compiles mm with another out_dtype.
mm_by_parts = torch.library.custom_op("moe_fp8_ext::mm_by_parts", _mm_by_parts, mutates_args=())
mm_by_parts.register_fake(lambda a, b, order=3: a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32))


def _gradients_by_parts(grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """mm_by_parts(grad, b, 2) and mm_by_parts(grad^T, a, 2), in bfloat16 as a and b are.

    Splits grad [M, N] once for both products, or takes its two parts [M, 2, N]. The product itself rounds a large first
    gradient, because a pass over a large float32 product would take longer than the product.
    """
    grad_parts, b_twice = parts(grad, 2, 1) if grad.ndim == 2 else grad.flatten(1), b.repeat(2, 1)
    if a.numel() >= _BF16_OUTPUT_MIN_ELEMENTS and b.shape[0] <= _BF16_OUTPUT_MAX_EXPERTS:
        grad_a = torch.mm(grad_parts, b_twice)
    else:
        grad_a = cast(_mm(grad_parts, b_twice), a.dtype)
    first, second = _mm(grad_parts.t(), a).chunk(2)
    return grad_a, torch.add(first, second, out=b.new_empty(b.shape))  # one launch: added in float32, rounded once


gradients_by_parts = torch.library.custom_op("moe_fp8_ext::gradients_by_parts", _gradients_by_parts, mutates_args=())
gradients_by_parts.register_fake(lambda grad, a, b: (a.new_empty(a.shape), b.new_empty(b.shape)))


def parts(x: Tensor, count: int, dim: int) -> Tensor:
    """Splits x [M, K] into `count` parts in bfloat16, the largest first, side by side along dim.

    The sum of as many parts as `_PARTS` has for the dtype is exact, unless a part underflows. The remainder after n
    parts is at most 2^(-8 n) of x.
    """
    if count == 1:
        return cast(x, torch.bfloat16)
    if x.stride(0) < x.stride(1):  # with the memory layout of x, the result is written contiguously
        return parts(x.t(), count, 1 - dim).t()
    out = x.new_empty((*x.shape[:dim], count, *x.shape[dim:]), dtype=torch.bfloat16)
    *first, last = out.unbind(dim)
    for part in first:
        part.copy_(x)
        x = x - part if part is not first[-1] else torch.sub(x, part, out=last)
    return out.flatten(dim, dim + 1)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out_dtype=torch.float32) if _has_out_dtype(a) else a.float() @ b.float()


def _has_out_dtype(x: Tensor) -> bool:
    """Whether torch.mm on x's device multiplies bfloat16 into float32. A product that leaves in bfloat16 would not do:
    if it is small, cuBLAS may add partial sums that were rounded to bfloat16."""
    return x.is_cuda and torch.version.hip is None
