import torch
from torch import Tensor

from moe_fp8_ext import shapes
from moe_fp8_ext.ops.checks import check_input, check_no_gradient, check_size, out_dtype, require

_op = torch.ops.moe_fp8.quantize_weight.default


def quantize_weight(
    w: Tensor, dtype: torch.dtype | None = None, pow2_scale: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantizes the weights of all experts to fp8 in both directions, for the forward pass and for dgrad.

        q[e, n, k]   = cast(w[e, n, k] * m[e, n])     from amax over k
        q_t[e, k, n] = cast(w[e, n, k] * m_t[e, k])   from amax over n

    with m and scales from amax as in `quantize_rowwise`.
    A NaN or an Inf poisons its own row and column. Never waits for the device.

    Args:
        w: [E, N, K], at most 1024 experts, bfloat16, float16 or float32; stride 1 along K, other strides free.
        dtype: float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz; None is the device's own.
        pow2_scale: round multipliers down to powers of two.

    Returns:
        q [E, N, K] of `dtype`, scale [E, N] float32, q_t [E, K, N] of `dtype`, scale_t [E, K] float32, all contiguous.

    Raises:
        RuntimeError: dtype, dimensions or strides are not as above, or w asks for a gradient, which
            quantizing has none of; the text names the argument.

    Source: float scales of DESIGN.md section 3.
    """
    check_no_gradient("quantize_weight", "w", w)
    return _op(w, dtype, pow2_scale)


@torch.library.register_fake("moe_fp8::quantize_weight")
def _(w, dtype=None, pow2_scale=False):
    check_input("quantize_weight", "w", w, dim=3)
    limit = shapes.MAX_EXPERTS
    require(w.shape[0] <= limit, f"quantize_weight: w must hold at most {limit} experts, got {w.shape[0]}")
    check_size("quantize_weight", "w", w.shape[1], "rows an expert")
    dtype = out_dtype("quantize_weight", dtype, w)
    dtypes = (dtype, torch.float32, dtype, torch.float32)
    return tuple(w.new_empty(size, dtype=t) for size, t in zip(shapes.quantize_weight(w.shape), dtypes, strict=True))
