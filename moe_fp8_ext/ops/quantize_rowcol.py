import torch
from torch import Tensor

from moe_fp8_ext import shapes
from moe_fp8_ext.ops.checks import check_align, check_input, check_no_gradient, check_offs, out_dtype

_op = torch.ops.moe_fp8.quantize_rowcol.default


def quantize_rowcol(
    x: Tensor, offs: Tensor, align: int = 16, dtype: torch.dtype | None = None, pow2_scale: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`quantize_rowwise` and `quantize_colwise` of one tensor, byte for byte.

    On Hopper and later the two run side by side and share what either has read, through the L2 cache. Never waits for
    the device.

    Args:
        x: [M, K], bfloat16, float16 or float32; stride 1 along K, row stride free.
        offs: [E] int32 on x's device, exclusive end row of each group, non-decreasing, at most 1024. Contents are
            clamped into [0, M] and made monotonic; MOE_FP8_VALIDATE=1 checks them, which waits for the device.
        align: each group is padded to a multiple of it inside `q_t`; a power of two from 1 to 256. Fast from 16 on,
            which is also what torch's fp8 grouped GEMM needs.
        dtype: float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz; None is the device's own.
        pow2_scale: round multipliers down to powers of two.

    Returns:
        q [M, K] of `dtype`, scale [M] float32, q_t [K, P] of `dtype`, scale_t [E, K] float32, padded_offs [E] int32,
        all contiguous; P = round_up(M, align) + E * align. Tail rows, from `offs[-1]` on, are in q and scale like any
        row and in no column of q_t.

    Raises:
        RuntimeError: dtype, dimensions, strides, device or `align` are not as above, or x asks for a gradient, which
            quantizing has none of; the text names the argument.

    Source: float scales of DESIGN.md section 3, padded layout of section 4.
    """
    check_no_gradient("quantize_rowcol", "x", x)
    return _op(x, offs, align, dtype, pow2_scale)


@torch.library.register_fake("moe_fp8::quantize_rowcol")
def _(x, offs, align=16, dtype=None, pow2_scale=False):
    check_input("quantize_rowcol", "x", x, dim=2)
    check_offs("quantize_rowcol", offs, "x", x)
    check_align("quantize_rowcol", align, "x", x.shape[0], offs.shape[0])
    dtype = out_dtype("quantize_rowcol", dtype, x)
    dtypes = (dtype, torch.float32, dtype, torch.float32, torch.int32)
    sizes = shapes.quantize_rowcol(x.shape, offs.shape[0], align)
    return tuple(x.new_empty(size, dtype=t) for size, t in zip(sizes, dtypes, strict=True))
