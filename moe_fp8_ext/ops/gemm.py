"""Grouped matmuls of quantized operands."""

import torch
from torch import Tensor

from moe_fp8_ext.ops.checks import (
    check_both_or_none,
    check_dim,
    check_dtype,
    check_format,
    check_indices,
    check_padded,
    check_scale,
    check_scale_of_tokens,
    check_shape,
    require,
)
from moe_fp8_ext.ops.dispatch import count_writes, fake
from moe_fp8_ext.quantization.format import MAX_ALIGN

_scaled_grouped_mm = torch.ops.moe_fp8.scaled_grouped_mm.default
_add_scaled_grouped_mm = torch.ops.moe_fp8.add_scaled_grouped_mm.default


def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    format: str,
    offs: Tensor,
    *,
    indices: Tensor | None = None,
    top_k: int | None = None,
    align: int = 1,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = True,
    rounding: str | None = None,
    out_transposed: bool = False,
    low_rank_a: Tensor | None = None,
    low_rank_b: Tensor | None = None,
) -> Tensor:
    """Multiplies the groups of two FP8 operands with scales of one format.

    2D x 3D (forward, dgrad): the rows of group e times expert e. Rows of `out` from offs[-1] on are zero.

        out[m, n]    = sum_k (a[m, k] * scale of a[m, k]) * (b[e, k, n] * scale of b[e, k, n])

    2D x 2D (wgrad): group e is the columns [offs[e-1], offs[e]) of `a` and the same rows of `b`. An empty group gives
    zeros.

        out[e, n, k] = sum_{p in e} (a[n, p] * scale of a[n, p]) * (b[p, k] * scale of b[p, k])

    The quantizers of the format define which element has which scale. In the 2D x 2D form every group begins with a new
    scaling block, numbered as `quantize_tokens` numbers them. With blocks of 128, the number of blocks B is at least
    the sum of ceil(size / 128) over the groups.

    The device, the build, the format and the sizes decide which GEMM runs. `build_info()` lists the GEMMs in the order
    in which they are tried; the last one takes all operands, on a CPU in float32. A GEMM of "blockwise" or of an MX
    format may dequantize operands to bfloat16, rounding each value once.

    Args:
        a: [M, K] or [N, P], FP8; stride 1 in the last dimension.
        b: [E, K, N] or [P, K], FP8; stride 1 in dimension -2, as in the transposed view of a row-major tensor.
        scale_a: scales of a, as its quantizer returns them. Any strides in "blockwise", contiguous in the others.
            Scales of "mxfp8" are blocked; of a [M, K] they are blocked by groups of rows.
        scale_b: scales of b.mT, as its quantizer returns them; in "blockwise" the transposed view of these, so that
            they lie as b does: [E, ceil(K / 128), ceil(N / 128)] or [B, K]. Strides as for scale_a.
        format: "rowwise", "blockwise", "mxfp8" or "mxfp8_rowmajor".
        offs: [E], as in `moe_fp8_ext.ops`. In the 2D x 3D form offs counts rows of `a`; in the 2D x 2D form it is the
            `padded_offs` of the quantizer.
        indices: [P] int32 on a's device, only in the 2D x 3D form. The op then multiplies `permute_quantized(a,
            scale_a, format, indices, top_k, offs=offs)`, byte for byte. offs counts indices, and scale_a belongs
            to rows without groups. On Hopper the GEMM of "rowwise" with use_fast_accum gathers the rows itself if N is
            small enough for that to be faster. In all other cases the op moves the rows first.
        top_k: slots per row of a, given with indices and only then: index i stands for row i // top_k.
        align: only in the 2D x 2D form: a power of two from 1 to 256 that divides all of offs, such as the quantizer's
            align. GEMMs on tensor cores need 32; torch's GEMMs need 16 in "rowwise" and 8 for dequantized operands. The
            op trusts align: if offs are no multiples of it, the numbers are wrong, but no access is out of bounds.
        out_dtype: bfloat16 (default) or float32.
        use_fast_accum: True: a GEMM of "rowwise" may accumulate whole sums in the precision of the tensor cores, which
            keep 14 bits on Hopper. False: on Hopper, sums of 128 products are added in float32.
        rounding: the rounding of all scales, one of the format's; None if it is not known. The op trusts it. With
            "pow2", each scale of "blockwise" equals four scales of "mxfp8" (`expand_scales`), so a GEMM of "mxfp8" may
            multiply the operands. On sm_100 torch's does. There a scale that is no power of two makes its block NaN.
        out_transposed: only in the 2D x 2D form: out is the transposed view of a contiguous [E, K, N], with the same
            values, bit for bit. Use it for gradients of weights with this layout. torch's GEMMs, and Hopper's in
            float32, first write a contiguous product, which the op then copies.
        low_rank_a: [M, R] bfloat16, or [P, R] with indices, of any rank R; only in the 2D x 3D form, with low_rank_b.
            Stride 1 in the last dimension. The op then adds a low-rank term, as an adapter of the weights does, to the
            rows of every group:

                out[m, n] += sum_r low_rank_a[m, r] * low_rank_b[e, r, n]

            Hopper's GEMM of "blockwise" and the CPU's add it to the float32 sum, and round once. Hopper's takes ranks
            that are multiples of 4. After other GEMMs a pass adds it to out, in float32, and rounds again.
        low_rank_b: [E, R, N] bfloat16; stride 1 in dimension -2, as in the transposed view of a contiguous [E, N, R].

    Returns:
        out [M, N], or [P, N] with indices, or [E, N, K]. It is contiguous, unless out_transposed is set.

    Source: the equations above; `torch._scaled_grouped_mm` for the GEMMs that are torch's.
    """
    options = indices, top_k, align, out_dtype, use_fast_accum, rounding, out_transposed, low_rank_a, low_rank_b
    return _scaled_grouped_mm(a, b, scale_a, scale_b, format, offs, *options)


def add_scaled_grouped_mm(
    total: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    format: str,
    offs: Tensor,
    *,
    align: int = 1,
    use_fast_accum: bool = True,
    rounding: str | None = None,
) -> None:
    """Adds the 2D x 2D product of `scaled_grouped_mm` to `total` in place: gradient accumulation over batches.

        total[e] = RN(RN32(float32(total[e]) + product32[e]))

    product32 is the float32 value that `scaled_grouped_mm` would round to its out_dtype. RN rounds to the dtype of
    `total`. torch's GEMMs return products only in bfloat16, so the op then adds the bfloat16 product. An empty group
    leaves its part of `total` as it is.

    Hopper's GEMMs of "rowwise" with `use_fast_accum`, and of "blockwise" with b in square blocks, add to `total`
    directly. For other products Hopper's GEMMs first write a float32 product, which takes 4 E N K bytes while the op
    runs. torch's GEMMs first write a bfloat16 product.

    Args:
        total: [E, N, K], bfloat16 or float32, contiguous. It must not share memory with the operands. GEMMs on tensor
            cores need it to begin at a multiple of 16 bytes; otherwise the op is slower.
        a, b, scale_a, scale_b, format, offs, align, use_fast_accum, rounding: as in the 2D x 2D form of
            `scaled_grouped_mm`.

    Returns:
        None; `total` is written.
    """
    _add_scaled_grouped_mm(total, a, b, scale_a, scale_b, format, offs, align, use_fast_accum, rounding)


count_writes(_add_scaled_grouped_mm)


def _check_scales(op, a, b, scale_a, scale_b, format, e, indices) -> None:
    (m, k), n = a.shape, b.shape[-1]
    if b.dim() == 2:
        check_scale_of_tokens(op, "scale_a", scale_a, format, m, k, e)
        check_scale_of_tokens(op, "scale_b", scale_b, format, n, k, e, transposed=True)
        if format.order == "column_major":
            check_dim(op, "scale_b", scale_b, 0, scale_a.shape[1])
        return
    check_scale(op, "scale_a", scale_a, format, format.scale_of_rows((m, k), e if indices is None else None).shape)
    shape_of_b = format.scale_of_weight(e, n, k).shape
    if format.order == "column_major":
        shape_of_b = shape_of_b[0], shape_of_b[2], shape_of_b[1]
    check_scale(op, "scale_b", scale_b, format, shape_of_b)


def _checked_shape(
    op, a, b, scale_a, scale_b, format, offs, align, use_fast_accum, rounding, indices=None, top_k=None
) -> tuple:
    """Checks the operands of either op; returns the shape of the product."""
    format = check_format(op, format, rounding)
    (m, k), n, grouped_rows = a.shape, b.shape[-1], b.dim() == 3
    check_both_or_none(op, indices=indices, top_k=top_k)
    arg = "a"
    if indices is not None:
        require(grouped_rows, f"{op}: indices must be None with b of 2 dimensions, got a tensor")
        check_indices(op, m, top_k)
        arg, m = "indices", indices.shape[0]
    text = f"{op}: b must have size {k} in dimension {b.dim() - 2} (the last of a), got {b.shape[-2]}"
    require(b.shape[-2] == k, text)
    e = offs.shape[0]
    if grouped_rows:
        text = f"{op}: b must hold one expert for each of the {e} entries of offs, got {b.shape[0]}"
        require(b.shape[0] == e, text)
    ok = 1 <= align <= MAX_ALIGN and align & (align - 1) == 0
    require(ok, f"{op}: align must be a power of two from 1 to {MAX_ALIGN}, got {align}")
    if format.block:
        check_padded(op, arg, m if grouped_rows else k, e, along_tokens=not grouped_rows)
    _check_scales(op, a, b, scale_a, scale_b, format, e, indices)
    return (m, n) if grouped_rows else (e, m, n)


@fake(_scaled_grouped_mm)
def _(op, a, b, out_dtype, out_transposed, low_rank_a, low_rank_b, **operands):
    shape = _checked_shape(op, a, b, **operands)
    out_dtype = out_dtype or torch.bfloat16
    check_dtype(op, "out_dtype", out_dtype, torch.bfloat16, torch.float32)
    ok = b.dim() == 2 or not out_transposed
    require(ok, f"{op}: out_transposed must be False with b of 3 dimensions, got True")
    check_both_or_none(op, low_rank_a=low_rank_a, low_rank_b=low_rank_b)
    if low_rank_a is not None:
        require(b.dim() == 3, f"{op}: low_rank_a must be None with b of 2 dimensions, got a tensor")
        check_dim(op, "low_rank_a", low_rank_a, 0, shape[0])
        check_shape(op, "low_rank_b", low_rank_b, (b.shape[0], low_rank_a.shape[1], shape[1]))
    if not out_transposed:
        return a.new_empty(shape, dtype=out_dtype)
    e, n, k = shape
    return a.new_empty((e, k, n), dtype=out_dtype).mT


@fake(_add_scaled_grouped_mm)
def _(op, total, **operands):
    check_shape(op, "total", total, _checked_shape(op, **operands))
