import torch
from torch import Tensor

from moe_fp8_ext import shapes
from moe_fp8_ext.ops.checks import check_input, check_no_gradient, out_dtype

_op = torch.ops.moe_fp8.quantize_rowwise.default


def quantize_rowwise(x: Tensor, dtype: torch.dtype | None = None, pow2_scale: bool = False) -> tuple[Tensor, Tensor]:
    """Quantizes every row to fp8 with a scale of its own.

        amax  = max_k |x[..., k]|
        m     = RN32(FP8_MAX / max(amax, 1e-12)), its mantissa cleared when `pow2_scale`
        q     = cast(x * m), round to nearest even, saturating
        scale = RN32(1 / m), so that x ~ q * scale

    A row with a NaN or an Inf gets a NaN scale and NaN bytes; no other row is touched. Never waits for the device.

    Args:
        x: [..., K], 1 to 7 dimensions, bfloat16, float16 or float32; stride 1 along K, other strides free.
        dtype: float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz; None is the device's own.
        pow2_scale: round multipliers down to powers of two.

    Returns:
        q [..., K] of `dtype` and scale [...] float32, both contiguous.

    Raises:
        RuntimeError: dtype, dimensions or strides are not as above, or x asks for a gradient, which
            quantizing has none of; the text names the argument.

    Source: float scales of DESIGN.md section 3; the formulas of torchao's rowwise float8 recipe.
    """
    check_no_gradient("quantize_rowwise", "x", x)
    return _op(x, dtype, pow2_scale)


@torch.library.register_fake("moe_fp8::quantize_rowwise")
def _(x, dtype=None, pow2_scale=False):
    check_input("quantize_rowwise", "x", x)
    q, scale = shapes.quantize_rowwise(x.shape)
    return x.new_empty(q, dtype=out_dtype("quantize_rowwise", dtype, x)), x.new_empty(scale, dtype=torch.float32)
