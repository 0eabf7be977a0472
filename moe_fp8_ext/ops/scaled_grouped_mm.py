import torch
from torch import Tensor

from moe_fp8_ext import shapes
from moe_fp8_ext.ops.checks import (
    check_contiguous,
    check_dim,
    check_fp8,
    check_offs,
    check_same_device,
    check_size,
    check_unit_stride,
    require,
)

_OP = "scaled_grouped_mm"
_op = torch.ops.moe_fp8.scaled_grouped_mm.default


def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = True,
    block_size: int | None = None,
) -> Tensor:
    """Grouped matmul of fp8 operands with scales: float32, one a row or one a block of 128, or E8M0, one a block of 32.

    2D x 3D (forward, dgrad): rows of group e times expert e; rows of `out` from offs[-1] on are zero.

        out[m, n]    = scale_a[m] * scale_b[e, n] * sum_k a[m, k] * b[e, k, n]

    2D x 2D (wgrad): group e owns the columns [offs[e-1], offs[e]) of `a` and rows of `b`; an empty group gives zeros.

        out[e, n, k] = scale_a[e, n] * scale_b[e, k] * sum_{p in e} a[n, p] * b[p, k]

    With `block_size=128` every factor carries the scale of its block: a[m, k] that of scale_a[m, k // 128], b[e, k, n]
    that of scale_b[e, k // 128, n // 128]; in the 2D x 2D form a[n, p] that of scale_a[n, block(p)] and b[p, k] that of
    scale_b[block(p), k], where blocks begin anew with every group, as `quantize_128x1` numbers them: of B blocks, at
    least the sum of ceil(size / 128) over the groups.

    With `block_size=32`, MXFP8, it carries that of its 32 elements along the sum: E8M0 bytes in the blocked layout that
    Blackwell's tensor cores read, as the MX quantizers write it. Blocks begin anew with every group of a sum.

    On CUDA sm90 and sm100 this is torch's fp8 grouped GEMM, for float8_e4m3fn operands whose sizes and strides are
    multiples of 16, fewer than 1024 groups and bfloat16 output. Everything else on a GPU takes a portable kernel that
    dequantizes and multiplies in float32, slower but for any sizes; the CPU does the same per group. Blocks have no
    GEMM of their own yet: on sm90 and sm100 operands of any fp8 format are dequantized to bfloat16, each value rounded
    once, for torch's grouped GEMM of those, under the same conditions with multiples of 8 for N and for offs; all else
    takes the portable kernel, which does not round operands. Blocks of 32 have torch's own GEMM on sm100, if torch was
    built with it, under the conditions of float8_e4m3fn above with K (2D x 2D: P and offs) multiples of 32: a path that
    has been compiled but not run yet. Without it, and on sm90, they go the way of blocks of 128.
    `build_info()` says which paths a build has. Never waits for the device.

    Args:
        a: [M, K] or [N, P], fp8, stride 1 in its last dimension.
        b: [E, K, N] or [P, K], fp8, stride 1 in dimension -2, as the transposed view of a row-major tensor has.
        scale_a: [M], or [E, N]; float32, contiguous. With blocks [M, ceil(K / 128)], or [N, B], of any strides. With
            blocks of 32 float8_e8m0fnu, contiguous: [M + 128 E, round_up(ceil(K / 32), 4)] by groups of rows, as
            `swizzle_scales_m_groups` has them, or [round_up(N, 128), S], S = ceil(P / 32) + 4 E, by groups of columns,
            as `swizzle_scales_k_groups`.
        scale_b: [E, N], or [E, K]; float32, contiguous. With blocks [E, ceil(K / 128), ceil(N / 128)], or [B, K], of
            any strides: in the orientation of `b`. With blocks of 32 float8_e8m0fnu, contiguous, in the orientation of
            `b.mT`: [E, round_up(N, 128) * round_up(ceil(K / 32), 4)], or [round_up(K, 128), S].
        offs: [E] int32, exclusive ends of the groups, non-decreasing, at most 1024: rows of `a` in the 2D x 3D form; in
            the 2D x 2D form the `padded_offs` of the quantizer, for the native path multiples of 16. Contents are
            clamped and made monotonic; MOE_FP8_VALIDATE=1 checks them, which waits for the device.
        out_dtype: bfloat16 (default) or float32.
        use_fast_accum: let the native GEMM accumulate in the tensor cores' own precision; ignored elsewhere.
        block_size: None, 128 or 32.

    Returns:
        out [M, N] or [E, N, K], contiguous.

    Raises:
        RuntimeError: dtype, shape, stride or device are not as above; the text names the argument.

    Source: the equations above; `torch._scaled_grouped_mm` for the native path.
    """
    return _op(a, b, scale_a, scale_b, offs, out_dtype, use_fast_accum, block_size)


def _check_scale(
    arg: str,
    scale: Tensor,
    shape: tuple[int, ...],
    a: Tensor,
    any_strides: bool = False,
    dtype: torch.dtype = torch.float32,
) -> None:
    require(scale.dtype == dtype, f"{_OP}: {arg} must be {str(dtype)[6:]}, got {scale.dtype}")
    check_dim(_OP, arg, scale, len(shape))
    for i, size in enumerate(shape):
        require(scale.shape[i] == size, f"{_OP}: {arg} must have size {size} in dimension {i}, got {scale.shape[i]}")
    if not any_strides:
        check_contiguous(_OP, arg, scale)
    check_same_device(_OP, arg, scale, "a", a)


def _check_block_scales(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, e: int) -> None:
    (m, k), n = a.shape, b.shape[-1]
    blocks, across = (shapes.round_up(size, shapes.BLOCK) // shapes.BLOCK for size in (k, n))
    if b.dim() == 3:
        _check_scale("scale_a", scale_a, (m, blocks), a, any_strides=True)
        _check_scale("scale_b", scale_b, (e, blocks, across), a, any_strides=True)
        return
    check_dim(_OP, "scale_a", scale_a, 2)
    made = scale_a.shape[1]  # at least as many as there are positions for; the quantizer knows how many more
    require(made >= blocks, f"{_OP}: scale_a must have at least {blocks} blocks in dimension 1, got {made}")
    check_size(_OP, "scale_a", made, "blocks")
    check_size(_OP, "a", shapes.padded_extent(k, e, shapes.BLOCK), "columns with padding")
    _check_scale("scale_a", scale_a, (m, made), a, any_strides=True)
    _check_scale("scale_b", scale_b, (made, n), a, any_strides=True)


def _check_mx_scales(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, e: int) -> None:
    (m, k), n = a.shape, b.shape[-1]
    blocks, grouped_rows = shapes.round_up(k, shapes.MX_BLOCK) // shapes.MX_BLOCK, b.dim() == 3
    if grouped_rows:
        of_a, of_b = shapes.swizzle_scales_m_groups((m, blocks), e), shapes.swizzle_scales_3d((e, n, blocks))
    else:
        of_a, of_b = (shapes.swizzle_scales_k_groups((rows, blocks), e) for rows in (m, n))
    _check_scale("scale_a", scale_a, of_a, a, dtype=torch.float8_e8m0fnu)
    _check_scale("scale_b", scale_b, of_b, a, dtype=torch.float8_e8m0fnu)
    padded = shapes.padded_extent(m if grouped_rows else k, e, shapes.BLOCK)
    check_size(_OP, "a", padded, "rows with padding" if grouped_rows else "columns with padding")


@torch.library.register_fake("moe_fp8::scaled_grouped_mm")
def _(a, b, scale_a, scale_b, offs, out_dtype=None, use_fast_accum=True, block_size=None):
    require(
        block_size in (None, shapes.MX_BLOCK, shapes.BLOCK),
        f"{_OP}: block_size must be None, {shapes.MX_BLOCK} or {shapes.BLOCK}, got {block_size}",
    )
    check_fp8(_OP, "a", a.dtype)
    check_fp8(_OP, "b", b.dtype)
    check_dim(_OP, "a", a, 2)
    require(b.dim() in (2, 3), f"{_OP}: b must have 2 or 3 dimensions, got {b.dim()}")
    check_unit_stride(_OP, "a", a, 1)
    check_unit_stride(_OP, "b", b, -2)
    check_same_device(_OP, "b", b, "a", a)
    (m, k), n = a.shape, b.shape[-1]
    require(
        b.shape[-2] == k,
        f"{_OP}: b must have size {k} in dimension {b.dim() - 2} (the last of a), got {b.shape[-2]}",
    )
    check_size(_OP, "a", m, "rows")
    check_size(_OP, "a", k, "columns")
    check_offs(_OP, offs, "a", a)
    e = offs.shape[0]
    if b.dim() == 3:
        require(
            b.shape[0] == e,
            f"{_OP}: b must hold one expert for each of the {e} entries of offs, got {b.shape[0]}",
        )
    if block_size == shapes.MX_BLOCK:
        _check_mx_scales(a, b, scale_a, scale_b, e)
    elif block_size is not None:
        _check_block_scales(a, b, scale_a, scale_b, e)
    else:
        _check_scale("scale_a", scale_a, (m,) if b.dim() == 3 else (e, m), a)
        _check_scale("scale_b", scale_b, (e, n), a)
    out_dtype = out_dtype or torch.bfloat16
    require(
        out_dtype in (torch.bfloat16, torch.float32), f"{_OP}: out_dtype must be bfloat16 or float32, got {out_dtype}"
    )
    return a.new_empty(shapes.scaled_grouped_mm(a.shape, b.shape, e), dtype=out_dtype)
