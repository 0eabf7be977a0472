"""Products in float32 on tensor cores, which multiply bfloat16: a number of float32 is the sum of three of bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8_ext.matmul.bf16 import cast

_PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
_HALVES = torch.bfloat16, torch.float16
# Elements of a product, and experts, from and to which it leaves cuBLAS in bfloat16. With a tile of it for every
# multiprocessor and sums of two parts an expert, cuBLAS 13.0 on an H200 split no sums of layers of 128 experts, whose
# parts it might round before it adds them; a test holds products to one rounding.
_MANY, _FEW_EXPERTS = 2**23, 256


def float32_mm(a: Tensor, b: Tensor, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """a [M, K] @ b [K, N] with products and sums in float32, then rounded to out_dtype.

    On CUDA, where one of the three is of 16 bits, by parts: several times as fast, and an infinity, or what bfloat16
    rounds to one, may come out as NaN. For bfloat16, which rounds by up to 2^-8, what is below 2^-16 of every product
    is left out.
    """
    known = a.dtype in _PARTS and b.dtype in _PARTS and any(t in _HALVES for t in (a.dtype, b.dtype, out_dtype))
    if not known or not _has_out_dtype(a):
        return cast(a.float() @ b.float(), out_dtype)
    by_parts = mm_by_parts if torch.compiler.is_compiling() else _mm_by_parts
    return cast(by_parts(a, b, 2 if out_dtype == torch.bfloat16 else 3), out_dtype)


def float32_mm_backward(
    grad: Tensor, a: Tensor, b: Tensor, needs_a: bool, needs_b: bool, onto: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of a [M, K] and b [N, K], in their dtypes, where grad [M, N] is that of float32_mm(a, b^T).

    Where it `takes_parts`, of grad or of its two, [M, 2, N] as `parts` makes them. onto: a gradient of a from
    elsewhere, in its dtype, that nobody else holds: what there is of a's is added to it, in place.
    """
    if takes_parts(a, b, needs_a, needs_b):
        if not torch.compiler.is_compiling():
            return _gradients_onto(onto, grad, a, b)
        of_a, of_b = gradients_by_parts(grad, a, b)  # a graph of backward too, by compiled autograd
        return of_a if onto is None else onto.add_(of_a), of_b
    of_a = float32_mm(grad, b, a.dtype) if needs_a else None
    of_a = of_a if onto is None else onto.add_(of_a)
    return of_a, float32_mm(grad.t(), a, b.dtype) if needs_b else None


def takes_parts(a: Tensor, b: Tensor, needs_a: bool, needs_b: bool) -> bool:
    return needs_a and needs_b and a.dtype == b.dtype == torch.bfloat16 and _has_out_dtype(a)


def _mm_by_parts(a: Tensor, b: Tensor, order: int = 3) -> Tensor:
    """In float32. Leaves out products of parts that are less than 2^(-8 order) of those of the first parts."""
    of_a, of_b = (min(_PARTS[t.dtype], order) for t in (a, b))
    if of_a == 1:
        return _mm(a, parts(b, of_b, 1)).unflatten(1, (of_b, -1)).sum(1) if of_b > 1 else _mm(a, b)
    if of_b == 1 and a.shape[0] <= a.shape[1]:
        return _mm(parts(a, of_a, 0), b).unflatten(0, (of_a, -1)).sum(0)
    if of_b == 1:
        return _mm(parts(a, of_a, 1), b.repeat(of_a, 1))
    pairs = [(i, j) for i in range(of_a) for j in range(of_b) if i + j < order]
    of_a, of_b = parts(a, of_a, 1).chunk(of_a, 1), parts(b, of_b, 0).chunk(of_b)
    return _mm(torch.cat([of_a[i] for i, _ in pairs], 1), torch.cat([of_b[j] for _, j in pairs]))


# Ops of their own for torch.compile, because not every torch compiles mm to another dtype.
mm_by_parts = torch.library.custom_op("moe_fp8_ext::mm_by_parts", _mm_by_parts, mutates_args=())


@mm_by_parts.register_fake
def _(a: Tensor, b: Tensor, order: int = 3) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)


def _gradients_onto(onto: Tensor | None, grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """mm_by_parts(grad, b, 2) and mm_by_parts(grad^T, a, 2) in bfloat16, of a and b in bfloat16, from parts that are
    made once, or are there: grad is [M, 2, N] then. A pass over a large product in float32 would take longer than the
    product itself. The first is added to `onto`, if that is there, and rounded with it where it is large."""
    of_grad, wide = parts(grad, 2, 1) if grad.ndim == 2 else grad.flatten(1), b.repeat(2, 1)
    if a.numel() >= _MANY and b.shape[0] <= _FEW_EXPERTS:
        of_a = torch.mm(of_grad, wide) if onto is None else onto.addmm_(of_grad, wide)
    else:
        of_a = cast(_mm(of_grad, wide), a.dtype)
        of_a = of_a if onto is None else onto.add_(of_a)
    of_first, of_second = _mm(of_grad.t(), a).chunk(2)
    return of_a, torch.add(of_first, of_second, out=b.new_empty(b.shape))  # in float32, rounded once, in one launch


def _gradients_by_parts(grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return _gradients_onto(None, grad, a, b)


gradients_by_parts = torch.library.custom_op("moe_fp8_ext::gradients_by_parts", _gradients_by_parts, mutates_args=())


@gradients_by_parts.register_fake
def _(grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.shape), b.new_empty(b.shape)


def parts(x: Tensor, count: int, dim: int) -> Tensor:
    """So many parts of x [M, K] in bfloat16, the largest first, beside one another along dim.

    As many as its dtype has add up to x, but for what underflows; the rest behind n of them is at most 2^(-8 n) of x.
    """
    if count == 1:
        return cast(x, torch.bfloat16)
    if x.stride(0) < x.stride(1):  # a result that lies as x does is written from one end to the other
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
    """Whether torch.mm has it there. A small result of bfloat16 could be a sum of sums that were rounded to it."""
    return x.is_cuda and torch.version.hip is None
