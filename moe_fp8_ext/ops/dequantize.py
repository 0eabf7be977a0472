import torch
from torch import Tensor

from moe_fp8_ext import shapes
from moe_fp8_ext.ops.checks import (
    INPUT_DTYPES,
    check_contiguous,
    check_dim,
    check_fp8,
    check_no_gradient,
    check_offs,
    check_same_device,
    check_size,
    check_unit_stride,
    require,
)

_OP = "dequantize"
_op = torch.ops.moe_fp8.dequantize.default

_FLOAT = ("rowwise", "colwise", "1x128", "128x1", "128x128")
_E8M0 = ("1x32", "1x32_blocked", "32x1_blocked")
_ANY_STRIDES = ("1x128", "128x1", "128x128")  # of scales
_ANY_DIM = ("rowwise", "1x32")
_ALONG_COLUMNS = ("colwise", "128x1", "32x1_blocked")  # groups


def dequantize(
    q: Tensor, scale: Tensor, layout: str, offs: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Turns a quantized operand and its scales back into values: out = q * scale in float32, rounded to `out_dtype`.

    `layout` names the quantizer whose output this is; blocks are numbered as it numbers them:

        rowwise        q [..., K], scale [...]; either direction of `quantize_weight` too
        colwise        q_t [K, P], scale_t [E, K], offs = padded_offs
        1x128          q [M, K], scale [M, ceil(K / 128)]
        128x1          q_t [K, P], scale_t [K, B], offs = padded_offs; blocks begin anew with every group
        128x128        q [E, N, K], scale [E, ceil(N / 128), ceil(K / 128)]; for q_t pass scale.mT
        1x32           q [..., K], scale [..., ceil(K / 32)] E8M0; the row-major scales of q_t too
        1x32_blocked   q [M, K], scale as `swizzle_scales_2d` has it, or with offs, groups of rows, as
                       `swizzle_scales_m_groups`; q [E, N, K], scale as `swizzle_scales_3d`
        32x1_blocked   q_t [K, P], scale_t [round_up(K, 128), ceil(P / 32) + 4 E], offs = padded_offs; groups of columns
                       as `swizzle_scales_k_groups` has them

    What a quantizer leaves in place (`transpose=False`) has no layout here. Rows, or positions, past the last group are
    zero, whatever q holds there. Every NaN is the quiet one without a sign.
    Never waits for the device.

    Args:
        q: float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz; stride 1 in its last dimension, other strides
            free. [...] are 1 to 7 dimensions with the last.
        scale: float32, or float8_e8m0fnu in the layouts of blocks of 32: byte e is 2^(e - 127), 255 NaN. Of any strides
            in 1x128, 128x1 and 128x128, contiguous in the others.
        layout: as above.
        offs: [E] int32 on q's device, exclusive ends of groups, non-decreasing, at most 1024; of positions or, in
            1x32_blocked, of rows. Contents are clamped and made monotonic; MOE_FP8_VALIDATE=1 checks them, which waits
            for the device.
        out_dtype: bfloat16 (default), float16 or float32.

    Returns:
        out, shaped as q, contiguous.

    Raises:
        RuntimeError: layout, dtype, shape, strides or device are not as above, or an argument asks for a gradient,
            which this has none of; the text names the argument.

    Source: the scales of DESIGN.md section 3, the layouts of sections 4 and 5.
    """
    check_no_gradient(_OP, "q", q)
    check_no_gradient(_OP, "scale", scale)
    return _op(q, scale, layout, offs, out_dtype)


def _scale_sizes(q: Tensor, layout: str, e: int | None) -> tuple[int, ...]:
    *leading, k = q.shape
    block = shapes.MX_BLOCK if layout in _E8M0 else shapes.BLOCK
    blocks = shapes.round_up(k, block) // block
    if layout == "rowwise":
        return tuple(leading)
    if layout == "colwise":
        return e, leading[0]
    if layout == "128x128":
        return leading[0], shapes.round_up(leading[1], block) // block, blocks
    if layout == "32x1_blocked":
        return shapes.swizzle_scales_k_groups((leading[0], blocks), e)
    if layout != "1x32_blocked":
        return *leading, blocks
    if len(leading) == 2:
        return shapes.swizzle_scales_3d((*leading, blocks))
    of_rows = leading[0], blocks
    return shapes.swizzle_scales_2d(of_rows) if e is None else shapes.swizzle_scales_m_groups(of_rows, e)


def _check_scale(q: Tensor, scale: Tensor, layout: str, e: int | None) -> None:
    dtype = torch.float8_e8m0fnu if layout in _E8M0 else torch.float32
    require(scale.dtype == dtype, f"{_OP}: scale must be {str(dtype)[6:]}, got {scale.dtype}")
    sizes = _scale_sizes(q, layout, e)
    check_dim(_OP, "scale", scale, len(sizes))
    for i, size in enumerate(sizes):
        if layout == "128x1" and i == 1:  # the quantizer knows how many more it made room for
            made = scale.shape[1]
            require(made >= size, f"{_OP}: scale must have at least {size} blocks in dimension 1, got {made}")
            check_size(_OP, "scale", made, "blocks")
        else:
            require(
                scale.shape[i] == size, f"{_OP}: scale must have size {size} in dimension {i}, got {scale.shape[i]}"
            )
    if layout not in _ANY_STRIDES:
        check_contiguous(_OP, "scale", scale)
    check_same_device(_OP, "scale", scale, "q", q)


@torch.library.register_fake("moe_fp8::dequantize")
def _(q, scale, layout, offs=None, out_dtype=None):
    require(
        layout in _FLOAT + _E8M0,
        f"{_OP}: layout must be rowwise, colwise, 1x128, 128x1, 128x128, 1x32, 1x32_blocked or 32x1_blocked, "
        f"got {layout}",
    )
    check_fp8(_OP, "q", q.dtype)
    if layout in _ANY_DIM:
        require(1 <= q.dim() <= 7, f"{_OP}: q must have 1 to 7 dimensions, got {q.dim()}")
    elif layout == "1x32_blocked":
        require(q.dim() in (2, 3), f"{_OP}: q must have 2 or 3 dimensions, got {q.dim()}")
    else:
        check_dim(_OP, "q", q, 3 if layout == "128x128" else 2)
    check_unit_stride(_OP, "q", q, -1)
    check_size(_OP, "q", q.shape[-1], "columns")
    if layout not in _ANY_DIM:
        check_size(_OP, "q", q.shape[-2], "rows")
    along_columns = layout in _ALONG_COLUMNS
    require(not along_columns or offs is not None, f"{_OP}: offs must be given for layout {layout}, got None")
    require(
        offs is None or along_columns or (layout == "1x32_blocked" and q.dim() == 2),
        f"{_OP}: offs must be None for layout {layout} of {q.dim()} dimensions, got a tensor",
    )
    e = None
    if offs is not None:
        check_offs(_OP, offs, "q", q)
        e = offs.shape[0]
        padded = shapes.padded_extent(q.shape[1 if along_columns else 0], e, shapes.BLOCK)
        check_size(_OP, "q", padded, "columns with padding" if along_columns else "rows with padding")
    _check_scale(q, scale, layout, e)
    out_dtype = out_dtype or torch.bfloat16
    require(out_dtype in INPUT_DTYPES, f"{_OP}: out_dtype must be bfloat16, float16 or float32, got {out_dtype}")
    return torch.empty(q.shape, dtype=out_dtype, device=q.device)
