"""The differentiable grouped matmul of MoE layers: a drop-in for `torch._grouped_mm` that computes in fp8."""

import torch
from torch import Tensor

from moe_fp8_ext import shapes
from moe_fp8_ext.operands import OPERANDS, Operand
from moe_fp8_ext.ops import permute_pad, scaled_grouped_mm, unpermute
from moe_fp8_ext.ops.checks import check_dim, check_dtype, check_offs, check_same_device, require, validate_offs
from moe_fp8_ext.ops.permute import check_indices
from moe_fp8_ext.recipes import Recipe, get_recipe

_OP = "grouped_mm"


def grouped_mm(
    A: Tensor,
    B_t: Tensor,
    offs: Tensor,
    *,
    recipe: str | Recipe = "rowwise",
    indices: Tensor | None = None,
    top_k: int = 1,
) -> Tensor:
    """out[r] = A[r] @ B_t[e] for every row r of group e; rows from offs[-1] on are zero.

    With `indices`, row r is A[indices[r] // top_k] instead, as `permute_pad` takes it: the quantizer gathers the rows,
    so that the permuted and padded tokens never exist in 16 bits, but for what a product dequantizes (see
    `scaled_grouped_mm`).

    With a quantized recipe, A, B_t and the output gradient are quantized to fp8 on the way into each of the three
    matmuls. The forward pass keeps the transposed fp8 copies of A (one byte an element, and scales) and B_t for
    backward, nothing in 16 bits unless the recipe has wgrad_high_precision. dA is zero in tail rows, the gradient of
    an empty group's weights is zero. Any sizes work, the caller never pads; nothing here waits for the device, and two
    runs give the same bytes. Traces under torch.compile(fullgraph=True), can be captured in a CUDA graph, honours
    torch.autocast. Differentiable once.

    Args:
        A: [M, K] tokens sorted by group, or, with `indices`, in any order; bfloat16, float16 or float32.
        B_t: [E, K, N] weights, the transposed view of [E, N, K] or contiguous itself (both without a copy), same dtype.
        offs: [E] int32 on A's device, exclusive end row of each group, non-decreasing, at most 1024.
        recipe: "rowwise" (fp8, one scale a row), "blockwise" (fp8, one scale for 128 elements, 128 x 128 of a weight),
            "mxfp8" (fp8, a power of two for 32 elements), "bf16" (no quantization: `torch._grouped_mm`, which on a GPU
            takes at most 1023 experts), or a `Recipe`.
        indices: [P] int32 on A's device, of `permute_indices` (with its padded_offs as offs), or the permutation of
            `sort_tokens` with its top_k; distinct, any other value than a slot of A stands for a row of zeros.
        top_k: slots of a row of A.

    Returns:
        out [M, N], with `indices` [P, N], of A's dtype. The matmul itself rounds to bfloat16.

    Raises:
        RuntimeError: dtype, shape, stride or device are not as above; the text names op and argument.
        ValueError, TypeError: see `get_recipe`.

    Source: DESIGN.md section 6; the signature of `torch._grouped_mm`.
    """
    recipe = get_recipe(recipe)
    _check(A, B_t, offs, indices, top_k)
    if A.device.type != "meta" and torch.is_autocast_enabled(A.device.type):
        compute = torch.get_autocast_dtype(A.device.type)
        A, B_t = A.to(compute), B_t.to(compute)
    require(A.dtype == B_t.dtype, f"{_OP}: B_t must have the dtype of A, {A.dtype}, got {B_t.dtype}")
    if indices is not None and not recipe.quantized:
        A, indices = permute_pad(_row_major(A), indices, top_k), None
    if not recipe.quantized and not torch.compiler.is_compiling() and A.device.type != "meta":
        validate_offs(_OP, offs, "A", A.shape[0])  # the ops of the other recipes do so themselves
    grad = torch.is_grad_enabled()
    needs = grad and A.requires_grad, grad and B_t.requires_grad
    if not recipe.quantized:
        return _Bf16GroupedMm.apply(A, B_t, offs, *needs)
    return _QuantizedGroupedMm.apply(A, B_t, offs, indices, top_k, recipe, *needs)


def _check(A: Tensor, B_t: Tensor, offs: Tensor, indices: Tensor | None, top_k: int) -> None:
    for arg, x, dim in (("A", A, 2), ("B_t", B_t, 3)):
        check_dtype(_OP, arg, x)
        check_dim(_OP, arg, x, dim)
    check_same_device(_OP, "B_t", B_t, "A", A)
    (e, k, _), of_a = B_t.shape, A.shape[1]
    require(k == of_a, f"{_OP}: B_t must have size {of_a} in dimension 1 (the last of A), got {k}")
    check_offs(_OP, offs, "A", A)
    require(offs.shape[0] == e, f"{_OP}: offs must have {e} entries, one for each expert of B_t, got {offs.shape[0]}")
    require(indices is not None or top_k == 1, f"{_OP}: top_k must be 1 without indices, got {top_k}")
    if indices is not None and not torch.compiler.is_compiling():  # tracing, a text with a size in it would fix it
        check_indices(_OP, indices, "A", A, A.shape[0], top_k)


def _row_major(x: Tensor) -> Tensor:
    """x itself if its rows lie one after the other, each in one piece; expanded and transposed ones are copied."""
    return x if x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1] else x.contiguous()


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    # Not x.to(dtype) alone: where that returns x itself, torch.compile of torch 2.11 loses the Function's gradients.
    return x if x.dtype == dtype else x.to(dtype)


class _QuantizedGroupedMm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, A, B_t, offs, indices, top_k, recipe, needs_dA, needs_dB):
        ctx.recipe, ctx.dtypes, ctx.needs = recipe, (A.dtype, B_t.dtype), (needs_dA, needs_dB)
        ctx.sizes, ctx.top_k = (*A.shape, B_t.shape[2]), top_k
        A, rule, of = _row_major(A), recipe.rule(recipe.dtype), OPERANDS[recipe.scaling]
        a_t = a_scale_t = padded_offs = kept = None
        if needs_dB and recipe.wgrad_high_precision:
            _check_experts_of_torch(A, offs, recipe="wgrad_high_precision")
            kept, needs_dB = _cast(A, torch.bfloat16), False
        if needs_dB and indices is not None:
            *a, a_t, a_scale_t, padded_offs = of.permuted_both(A, indices, offs, top_k, recipe.align, *rule)
        elif needs_dB:
            *a, a_t, a_scale_t, padded_offs = of.both(A, offs, recipe.align, *rule)
        elif indices is not None:
            a = of.permuted_rows(A, indices, offs, top_k, *rule)
        else:
            a = of.rows(A, offs, *rule)
        if B_t.stride(-1) == 1 and B_t.stride(-2) != 1:  # contiguous [E, K, N]: the same op, its directions swapped
            w_t, w = of.weight(B_t, rule, True)
        else:
            w, w_t = of.weight(_row_major(B_t.transpose(-2, -1)), rule, needs_dA)
        if not needs_dA:
            w_t = None, None
        ctx.save_for_backward(offs, indices, kept, a_t, a_scale_t, padded_offs, *w_t)
        return _cast(_product(a, w, offs, recipe), A.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dY):
        offs, indices, kept, a_t, a_scale_t, padded_offs, *w_t = ctx.saved_tensors
        needs_dA, needs_dB = ctx.needs
        recipe, (a_dtype, b_dtype), (rows, k, n) = ctx.recipe, ctx.dtypes, ctx.sizes
        rule, of = recipe.rule(recipe.grad_dtype or recipe.dtype), OPERANDS[recipe.scaling]
        dY, dA, dB_t = _row_major(dY), None, None
        if needs_dB and recipe.wgrad_high_precision:
            a = kept if indices is None else permute_pad(kept, indices, ctx.top_k)
            ends = offs.clamp(0, a.shape[0]).cummax(0).values
            dB_t, needs_dB = _cast(_bf16_wgrad(dY, _tma_operand(a, _tma_size(k)), ends, n, k), b_dtype), False
        if needs_dA and needs_dB:
            *dy, dy_t, dy_scale_t, _ = of.both(dY, offs, recipe.align, *rule)
        elif needs_dA:
            dy = of.rows(dY, offs, *rule)
        elif needs_dB:
            dy_t, dy_scale_t, _ = of.columns(dY, offs, recipe.align, *rule)
        if needs_dA:
            dA = _product(dy, w_t, offs, recipe)
            if indices is not None:
                dA = unpermute(dA, indices, rows, ctx.top_k)
            dA = _cast(dA, a_dtype)
        if needs_dB:
            dW = _product((dy_t, dy_scale_t), of.second_of_wgrad(a_t, a_scale_t), padded_offs, recipe)
            dB_t = _cast(dW, b_dtype).transpose(-2, -1)
        return dA, dB_t, None, None, None, None, None, None


def _product(a: Operand, b: Operand, offs: Tensor, recipe: Recipe) -> Tensor:
    block_size = OPERANDS[recipe.scaling].block_size
    return scaled_grouped_mm(a[0], b[0], a[1], b[1], offs, None, recipe.use_fast_accum, block_size)


class _Bf16GroupedMm(torch.autograd.Function):
    """torch._grouped_mm for any sizes, strides and offsets, with defined tail rows."""

    @staticmethod
    def forward(ctx, A, B_t, offs, needs_dA, needs_dB):
        _, k, n = B_t.shape
        _check_experts_of_torch(A, offs, recipe='recipe "bf16"')
        ctx.sizes, ctx.dtypes, ctx.needs = (k, n), (A.dtype, B_t.dtype), (needs_dA, needs_dB)
        offs = offs.clamp(0, A.shape[0]).cummax(0).values
        a = _tma_operand(_cast(A, torch.bfloat16), _tma_size(k))
        b_t = _tma_operand(_cast(B_t, torch.bfloat16), _tma_size(n), _tma_size(k))
        ctx.save_for_backward(offs, a if needs_dB else None, b_t if needs_dA else None)
        return _cast(_bf16_rows(a, b_t, offs, n), A.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dY):
        offs, a, b_t = ctx.saved_tensors
        needs_dA, needs_dB = ctx.needs
        (k, n), (a_dtype, b_dtype) = ctx.sizes, ctx.dtypes
        dA = dB_t = None
        if needs_dA:
            dA = _cast(_bf16_rows(_bf16_grad(dY, n), b_t.transpose(-2, -1), offs, k), a_dtype)
        if needs_dB:
            dB_t = _cast(_bf16_wgrad(dY, a, offs, n, k), b_dtype)
        return dA, dB_t, None, None, None


def _check_experts_of_torch(A: Tensor, offs: Tensor, recipe: str) -> None:
    e, limit = offs.shape[0], 1023 if A.is_cuda else shapes.MAX_EXPERTS  # of torch's kernel
    require(e <= limit, f"{_OP}: offs must have at most {limit} entries with {recipe}, got {e}")


def _bf16_grad(dY: Tensor, n: int) -> Tensor:
    return _tma_operand(_cast(dY, torch.bfloat16), _tma_size(n))


def _bf16_wgrad(dY: Tensor, a: Tensor, offs: Tensor, n: int, k: int) -> Tensor:
    """The gradient of B_t [E, k, n] from dY [M, n] and a, an operand of k columns or more."""
    dy = _bf16_grad(dY, n)
    dW = _bf16_product(dy.t(), a, offs) if offs.shape[0] else a.new_zeros(0, dy.shape[1], a.shape[1])
    return dW[:, :n, :k].transpose(-2, -1)


def _bf16_rows(a: Tensor, b_t: Tensor, offs: Tensor, columns: int) -> Tensor:
    """The first columns of the product, rows of no group zero."""
    if offs.shape[0] == 0:  # torch divides by the number of groups
        return a.new_zeros(a.shape[0], columns)
    out = _bf16_product(a, b_t, offs)
    return out if columns == out.shape[1] else out[:, :columns].contiguous()


def _bf16_product(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    if a.device.type == "cpu":
        return _cpu_grouped_mm(a, b, offs)
    return _zero_tail(torch._grouped_mm(a, b, offs=offs), b, offs)


@torch.library.custom_op("moe_fp8_ext::cpu_grouped_mm", mutates_args=())
def _cpu_grouped_mm(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """torch._grouped_mm by way of float32: on a CPU without instructions for bfloat16 that is tens of times faster.

    An op of its own, because torch's fake of its op knows bfloat16 only.
    """
    return _zero_tail(torch._grouped_mm(a.float(), b.float(), offs=offs).bfloat16(), b, offs)


@_cpu_grouped_mm.register_fake
def _(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    groups = offs.shape if b.dim() == 2 else ()
    return a.new_empty(*groups, a.shape[0], b.shape[-1])


def _zero_tail(out: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    if b.dim() == 2:
        return out
    # Not arange: its size would be a guard on a number of rows that only the run knows.
    row = torch.ones_like(out[:, 0], dtype=torch.int32).cumsum(0)
    return out.masked_fill((row > offs[-1])[:, None], 0)


def _tma_size(size: int) -> int:
    """The next size whose rows of bfloat16 start at multiples of 16 bytes, as TMA loads them; at least one such row."""
    return shapes.round_up(size, 8) or 8


def _tma_operand(x: Tensor, columns: int, rows: int | None = None) -> Tensor:
    """x with zeros up to those sizes in its last dimensions: more terms of the sum, or results that are cut off again.

    Copied only where its sizes, strides or base pointer are not as TMA needs them.
    """
    pad = (0, columns - x.shape[-1], 0, 0 if rows is None else rows - x.shape[-2])
    if any(pad):
        return torch.nn.functional.pad(x, pad)
    lines = x if x.dim() == 2 or x.stride(-1) == 1 else x.transpose(-2, -1)
    one_piece = lines.stride(-1) == 1 and lines.stride(-2) >= lines.shape[-1]
    starts_aligned = all(step % 8 == 0 for step in lines.stride()[:-1])
    # A graph knows no offset; inductor copies an argument that is less aligned than the one it was compiled for.
    if one_piece and starts_aligned and (torch.compiler.is_compiling() or x.storage_offset() % 8 == 0):
        return x
    return x.clone(memory_format=torch.contiguous_format)
