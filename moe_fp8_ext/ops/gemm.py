import torch
from torch import Tensor

from moe_fp8_ext.ops.checks import (
    check,
    check_format,
    check_indices,
    check_scale,
    check_scale_of_tokens,
    check_shape,
    check_size,
    require,
)
from moe_fp8_ext.ops.dispatch import count_writes, refuse_derivatives
from moe_fp8_ext.quantization.format import GROUP_SCALES, MAX_ALIGN, Format, padded_extent

_op = torch.ops.moe_fp8.scaled_grouped_mm.default
_add = torch.ops.moe_fp8.add_scaled_grouped_mm.default


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
) -> Tensor:
    """Grouped matmul of fp8 operands with scales of one format.

    2D x 3D (forward, dgrad): rows of group e times expert e; rows of `out` from offs[-1] on are zero.

        out[m, n]    = sum_k (a[m, k] * scale of a[m, k]) * (b[e, k, n] * scale of b[e, k, n])

    2D x 2D (wgrad): group e owns the columns [offs[e-1], offs[e]) of `a` and rows of `b`; an empty group gives zeros.

        out[e, n, k] = sum_{p in e} (a[n, p] * scale of a[n, p]) * (b[p, k] * scale of b[p, k])

    Which element has which scale is what the quantizers of the format say. In the 2D x 2D form blocks begin anew with
    every group, as `quantize_tokens` numbers them: of B blocks of 128, at least the sum of ceil(size / 128).

    Which GEMM multiplies depends on device, build, format and sizes; `build_info()` lists them in the order in which
    they are tried; the last takes all operands, on a CPU in float32. "blockwise" and the MX formats may be dequantized
    to bfloat16, each value rounded once. Never waits for the device.

    Args:
        a: [M, K] or [N, P], fp8, stride 1 in its last dimension.
        b: [E, K, N] or [P, K], fp8, stride 1 in dimension -2, as the transposed view of a row-major tensor has.
        scale_a, scale_b: of the operands as their quantizers return them, b's of b.mT; of "blockwise" b's are in the
            orientation of b, [E, ceil(K / 128), ceil(N / 128)] or [B, K], the transposed view of what the quantizer
            returns. Of any strides in "blockwise", contiguous in the others. Scales of "mxfp8" are blocked, those of a
            [M, K] by groups of rows.
        format: "rowwise", "blockwise", "mxfp8" or "mxfp8_rowmajor".
        offs: [E] int32, exclusive ends of the groups, non-decreasing, at most 1024: rows of `a` in the 2D x 3D form, in
            the 2D x 2D form the `padded_offs` of the quantizer. Contents are clamped and made monotonic;
            MOE_FP8_VALIDATE=1 checks them, which waits for the device.
        indices: [P] int32 on a's device, of the 2D x 3D form: multiplies `permute_quantized(a, scale_a, format,
            indices, top_k, offs=offs)` instead, byte for byte; offs are those of the indices, and scale_a is that of
            rows without groups. Hopper's fast sums of rows are of the rows where they lie, up to as many columns as
            that is the faster way; otherwise rows are moved first.
        top_k: slots of a row of a, given with indices and only then: index i stands for row i // top_k.
        align: of the 2D x 2D form, a power of two from 1 to 256 of which all of offs are multiples, as the caller
            knows: what the quantizer padded groups to. GEMMs of tensor cores need 32, torch's of "rowwise"
            16, of dequantized operands 8. A promise that offs break gives wrong numbers and no access out of bounds.
        out_dtype: bfloat16 (default) or float32.
        use_fast_accum: let a GEMM of "rowwise" accumulate whole sums in the tensor cores' own precision, which keeps 14
            bits on Hopper; otherwise sums of 128 products there are added in float32.

    Returns:
        out [M, N], or [P, N] with indices, or [E, N, K], contiguous.

    Raises:
        RuntimeError: dtype, shape, stride or device are not as above, or an argument asks for a derivative, which this
            has none of; the text names the argument.

    Source: the equations above; `torch._scaled_grouped_mm` for the GEMMs that are torch's.
    """
    options = indices, top_k, align, out_dtype, use_fast_accum
    return _op(a, b, scale_a, scale_b, format, offs, *options)


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
) -> None:
    """Adds the 2D x 2D product of `scaled_grouped_mm` to `total`, in place: gradients that accumulate over batches.

        total[e] = RN(RN32(float32(total[e]) + product32[e]))

    product32 is the float32 that `scaled_grouped_mm` would round to its out_dtype; RN rounds to the dtype of `total`.
    GEMMs of torch's have their product in bfloat16 alone, which is then what is added. What an empty group has in
    `total` stays as it is. Hopper's kernels add fast sums of "rowwise", and "blockwise" with b of squares; other
    products of theirs are made in float32, 4 E N K bytes while it runs, and torch's in bfloat16, before they are added.

    Args:
        total: [E, N, K], bfloat16 or float32, contiguous; it shares no memory with the operands. GEMMs of tensor cores
            need it to begin at a multiple of 16 bytes; elsewhere it is slower.
        a, b, scale_a, scale_b, format, offs, align, use_fast_accum: as in the 2D x 2D form of `scaled_grouped_mm`.

    Returns:
        Nothing; `total` is written.

    Raises:
        RuntimeError: dtype, shape, stride or device are not as above, or an argument asks for a derivative, which this
            has none of; the text names the argument.

    Source: the equation above.
    """
    _add(total, a, b, scale_a, scale_b, format, offs, align, use_fast_accum)


refuse_derivatives(_op)
refuse_derivatives(_add)
count_writes(_add)


def _check_scales(
    op: str, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, format: Format, e: int, indices: Tensor | None
) -> None:
    (m, k), n = a.shape, b.shape[-1]
    if b.dim() == 2:
        check_scale_of_tokens(op, "scale_a", scale_a, format, m, k, e)
        check_scale_of_tokens(op, "scale_b", scale_b, format, n, k, e, transposed=True)
        if format.order == "column_major":
            blocks, got = scale_a.shape[1], scale_b.shape[0]
            require(got == blocks, f"{op}: scale_b must have size {blocks} in dimension 0, got {got}")
        return
    check_scale(op, "scale_a", scale_a, format, format.scale_of_rows((m, k), e if indices is None else None).shape)
    of_b = format.scale_of_weight(e, n, k).shape
    if format.order == "column_major":
        of_b = of_b[0], of_b[2], of_b[1]
    check_scale(op, "scale_b", scale_b, format, of_b)


def _checked_shape(
    op: str,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    format: str,
    offs: Tensor,
    align: int,
    indices: Tensor | None = None,
    top_k: int | None = None,
) -> tuple[int, ...]:
    """That of the product."""
    format = check_format(op, format)
    check(op, "a", a)
    check(op, "b", b, a)
    (m, k), n, grouped_rows = a.shape, b.shape[-1], b.dim() == 3
    require(
        b.shape[-2] == k,
        f"{op}: b must have size {k} in dimension {b.dim() - 2} (the last of a), got {b.shape[-2]}",
    )
    require(indices is None or top_k is not None, f"{op}: top_k must be given with indices, got None")
    require(top_k is None or indices is not None, f"{op}: indices must be given with top_k, got None")
    arg = "a"
    if indices is not None:
        require(grouped_rows, f"{op}: indices must be None with b of 2 dimensions, got a tensor")
        check_indices(op, indices, a, m, top_k)
        arg, m = "indices", indices.shape[0]
    check(op, "offs", offs, a)
    e = offs.shape[0]
    if grouped_rows:
        text = f"{op}: b must hold one expert for each of the {e} entries of offs, got {b.shape[0]}"
        require(b.shape[0] == e, text)
    ok = 1 <= align <= MAX_ALIGN and align & (align - 1) == 0
    require(ok, f"{op}: align must be a power of two from 1 to {MAX_ALIGN}, got {align}")
    if format.block:
        padded = padded_extent(m if grouped_rows else k, e, GROUP_SCALES)
        check_size(op, arg, padded, "rows with padding" if grouped_rows else "columns with padding")
    check(op, "scale_a", scale_a, a)
    check(op, "scale_b", scale_b, a)
    _check_scales(op, a, b, scale_a, scale_b, format, e, indices)
    return (m, n) if grouped_rows else (e, m, n)


@torch.library.register_fake("moe_fp8::scaled_grouped_mm")
def _(
    a,
    b,
    scale_a,
    scale_b,
    format,
    offs,
    indices=None,
    top_k=None,
    align=1,
    out_dtype=None,
    use_fast_accum=True,
):
    op = "scaled_grouped_mm"
    shape = _checked_shape(op, a, b, scale_a, scale_b, format, offs, align, indices, top_k)
    out_dtype = out_dtype or torch.bfloat16
    ok = out_dtype in (torch.bfloat16, torch.float32)
    require(ok, f"{op}: out_dtype must be bfloat16 or float32, got {out_dtype}")
    return a.new_empty(shape, dtype=out_dtype)


@torch.library.register_fake("moe_fp8::add_scaled_grouped_mm")
def _(total, a, b, scale_a, scale_b, format, offs, align=1, use_fast_accum=True):
    op = "add_scaled_grouped_mm"
    shape = _checked_shape(op, a, b, scale_a, scale_b, format, offs, align)
    check(op, "total", total, a)
    check_shape(op, "total", total, shape)
