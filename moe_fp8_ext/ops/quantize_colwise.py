import torch
from torch import Tensor

from moe_fp8_ext import shapes
from moe_fp8_ext.ops.checks import check_align, check_input, check_no_gradient, check_offs, out_dtype

_op = torch.ops.moe_fp8.quantize_colwise.default


def quantize_colwise(
    x: Tensor, offs: Tensor, align: int = 16, dtype: torch.dtype | None = None, pow2_scale: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizes every column of every token group to fp8, transposed and group-padded: the operand of wgrad.

        amax[e, k]     = max over rows r of group e of |x[r, k]|
        q_t[k, pos(r)] = cast(x[r, k] * m[e, k]),  pos(r) = padded start of the group + r - start of the group

    with m and scale_t from amax as in `quantize_rowwise`. Groups may have any size. All bytes of `q_t` that belong to
    no row are zero, `scale_t` of an empty group is that of amax 0, and rows from `offs[-1]` on belong to no group. A
    NaN or an Inf poisons its own column of its own group. Never waits for the device.

    Args:
        x: [M, K], bfloat16, float16 or float32; stride 1 along K, row stride free.
        offs: [E] int32 on x's device, exclusive end row of each group, non-decreasing, at most 1024. Contents are
            clamped into [0, M] and made monotonic; MOE_FP8_VALIDATE=1 checks them, which waits for the device.
        align: each group is padded to a multiple of it inside `q_t`; a power of two from 1 to 256. Fast from 16 on,
            which is also what torch's fp8 grouped GEMM needs.
        dtype: float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz; None is the device's own.
        pow2_scale: round multipliers down to powers of two.

    Returns:
        q_t [K, P] of `dtype`, P = round_up(M, align) + E * align; scale_t [E, K] float32; padded_offs [E] int32, the
        exclusive end of each group among the P positions. All contiguous.

    Raises:
        RuntimeError: dtype, dimensions, strides, device or `align` are not as above, or x asks for a gradient, which
            quantizing has none of; the text names the argument.

    Source: float scales of DESIGN.md section 3, padded layout of section 4.
    """
    check_no_gradient("quantize_colwise", "x", x)
    return _op(x, offs, align, dtype, pow2_scale)


@torch.library.register_fake("moe_fp8::quantize_colwise")
def _(x, offs, align=16, dtype=None, pow2_scale=False):
    check_input("quantize_colwise", "x", x, dim=2)
    check_offs("quantize_colwise", offs, "x", x)
    check_align("quantize_colwise", align, "x", x.shape[0], offs.shape[0])
    q_t, scale_t, padded_offs = shapes.quantize_colwise(x.shape, offs.shape[0], align)
    return (
        x.new_empty(q_t, dtype=out_dtype("quantize_colwise", dtype, x)),
        x.new_empty(scale_t, dtype=torch.float32),
        x.new_empty(padded_offs, dtype=torch.int32),
    )
