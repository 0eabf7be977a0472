import torch
from torch import Tensor

from moe_fp8_ext import shapes
from moe_fp8_ext.ops.checks import (
    check_align,
    check_input,
    check_no_gradient,
    check_offs,
    check_size,
    check_tokens,
    out_dtype,
    require,
)

_1x128 = torch.ops.moe_fp8.quantize_1x128.default
_128x1 = torch.ops.moe_fp8.quantize_128x1.default
_both = torch.ops.moe_fp8.quantize_1x128_128x1.default
_128x128 = torch.ops.moe_fp8.quantize_128x128.default


def quantize_1x128(x: Tensor, dtype: torch.dtype | None = None, pow2_scale: bool = False) -> tuple[Tensor, Tensor]:
    """Quantizes every 128 neighbouring elements of a row to fp8 with a scale of their own.

        amax[r, b]  = max |x[r, 128 b : 128 (b + 1)]|
        q[r, k]     = cast(x[r, k] * m[r, k // 128])

    with m and scale from amax as in `quantize_rowwise`; the last block of a row may be short. A NaN or an Inf poisons
    its own block. Never waits for the device.

    Args:
        x: [M, K], bfloat16, float16 or float32; stride 1 along K, row stride free.
        dtype: float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz; None is the device's own.
        pow2_scale: round multipliers down to powers of two.

    Returns:
        q [M, K] of `dtype`, contiguous; scale [M, ceil(K / 128)] float32, column-major with stride
        (1, round_up(M, 4)): what `torch.nn.functional.scaled_mm` takes where M is a multiple of 4, and a tensor map in
        any case. The memory between columns is zero.

    Raises:
        RuntimeError: dtype, dimensions or strides are not as above, or x asks for a gradient, which quantizing has none
            of; the text names the argument.

    Source: float scales of DESIGN.md section 3; DeepSeek-V3 technical report, section 3.3.2; torchao's formulas.
    """
    check_no_gradient("quantize_1x128", "x", x)
    return _1x128(x, dtype, pow2_scale)


def quantize_128x1(
    x: Tensor,
    offs: Tensor,
    align: int = 128,
    dtype: torch.dtype | None = None,
    pow2_scale: bool = False,
    transpose: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizes every 128 tokens of a group, column by column, to fp8, transposed and group-padded: wgrad's operand.

        amax[k, b]     = max over the rows r of block b of |x[r, k]|
        q_t[k, pos(r)] = cast(x[r, k] * m[k, block(r)]),  pos(r) = padded start of the group + r - start of the group

    Blocks begin anew with every group, of any size, and never cross its end: block(r) is the group's first block plus
    (r - start of the group) // 128, and every group begins with the first block behind those of the groups before it,
    whose sizes count as rounded up to `align` and to 128. All bytes of `q_t` that belong to no row are zero, and so are
    scales of blocks without rows. Rows from `offs[-1]` on belong to no group. Never waits for the device.

    Args:
        x: [M, K], bfloat16, float16 or float32; stride 1 along K, row stride free.
        offs: [E] int32 on x's device, exclusive end row of each group, non-decreasing, at most 1024. Contents are
            clamped into [0, M] and made monotonic; MOE_FP8_VALIDATE=1 checks them, which waits for the device.
        align: each group is padded to a multiple of it inside `q_t`; a power of two from 1 to 256. From 128 on, block b
            is that of the positions [128 b, 128 (b + 1)).
        dtype: float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz; None is the device's own.
        pow2_scale: round multipliers down to powers of two.
        transpose: False leaves tokens as rows: q [P, K] and scale [B, K], for a GEMM that takes such operands.

    Returns:
        q_t [K, P] of `dtype`, contiguous, P = round_up(M, align) + E * align; scale_t [K, B] float32, column-major with
        stride (1, round_up(K, 4)), B = (round_up(M, a) + E * a) / 128 with a = max(align, 128); padded_offs [E] int32,
        the exclusive end of each group among the P positions.

    Raises:
        RuntimeError: dtype, dimensions, strides, device or `align` are not as above, or x asks for a gradient, which
            quantizing has none of; the text names the argument.

    Source: float scales of DESIGN.md section 3, padded layout of section 4; DeepSeek-V3 technical report, section
        3.3.2.
    """
    check_no_gradient("quantize_128x1", "x", x)
    return _128x1(x, offs, align, dtype, pow2_scale, transpose)


def quantize_1x128_128x1(
    x: Tensor,
    offs: Tensor,
    align: int = 128,
    dtype: torch.dtype | None = None,
    pow2_scale: bool = False,
    transpose: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`quantize_1x128` and `quantize_128x1` of one tensor, byte for byte, from one read of it.

    Never waits for the device.

    Args:
        x: [M, K], bfloat16, float16 or float32; stride 1 along K, row stride free.
        offs: [E] int32 on x's device, as in `quantize_128x1`.
        align: each group is padded to a multiple of it inside `q_t`; a power of two from 1 to 256.
        dtype: float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz; None is the device's own.
        pow2_scale: round multipliers down to powers of two.
        transpose: False leaves the tokens of `q_t` as rows, as in `quantize_128x1`.

    Returns:
        q [M, K], scale [M, ceil(K / 128)], q_t [K, P], scale_t [K, B], padded_offs [E], as the two ops return them.
        Tail rows, from `offs[-1]` on, are in q and scale like any other and not in q_t.

    Raises:
        RuntimeError: dtype, dimensions, strides, device or `align` are not as above, or x asks for a gradient, which
            quantizing has none of; the text names the argument.

    Source: `quantize_1x128` and `quantize_128x1`.
    """
    check_no_gradient("quantize_1x128_128x1", "x", x)
    return _both(x, offs, align, dtype, pow2_scale, transpose)


def quantize_128x128(
    w: Tensor, dtype: torch.dtype | None = None, pow2_scale: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizes every square of 128 x 128 of every expert's weight to fp8, as it is and transposed, from one read.

        amax[e, a, b] = max |w[e, 128 a : 128 (a + 1), 128 b : 128 (b + 1)]|
        q[e, n, k]    = q_t[e, k, n] = cast(w[e, n, k] * m[e, n // 128, k // 128])

    with m and scale from amax as in `quantize_rowwise`; squares at an edge may be smaller. Never waits for the device.

    Args:
        w: [E, N, K], bfloat16, float16 or float32, at most 1024 experts; stride 1 along K, other strides free.
        dtype: float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz; None is the device's own.
        pow2_scale: round multipliers down to powers of two.

    Returns:
        q [E, N, K] and q_t [E, K, N] of `dtype`, scale [E, ceil(N / 128), ceil(K / 128)] float32 of both, contiguous.

    Raises:
        RuntimeError: dtype, dimensions or strides are not as above, or w asks for a gradient, which quantizing has none
            of; the text names the argument.

    Source: float scales of DESIGN.md section 3; DeepSeek-V3 technical report, section 3.3.2.
    """
    check_no_gradient("quantize_128x128", "w", w)
    return _128x128(w, dtype, pow2_scale)


def new_rows(x: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Empty q and scale of rows in blocks of 128."""
    q, scale, stride = shapes.quantize_1x128(shape)
    return x.new_empty(q, dtype=dtype), x.new_empty_strided(scale, stride, dtype=torch.float32)


def new_columns(
    x: Tensor, shape: tuple[int, int], e: int, align: int, dtype: torch.dtype, transpose: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty q_t, scale_t and padded_offs of columns in blocks of 128."""
    q_t, scale_t, stride, padded_offs = shapes.quantize_128x1(shape, e, align, transpose)
    return (
        x.new_empty(q_t, dtype=dtype),
        x.new_empty_strided(scale_t, stride, dtype=torch.float32),
        x.new_empty(padded_offs, dtype=torch.int32),
    )


def check_blocks(op: str, align: int, arg: str, rows: int, experts: int) -> None:
    check_align(op, align, arg, rows, experts)
    check_align(op, max(align, shapes.BLOCK), arg, rows, experts)


def _check_groups(op: str, x: Tensor, offs: Tensor, align: int) -> None:
    check_tokens(op, "x", x)
    check_offs(op, offs, "x", x)
    check_blocks(op, align, "x", x.shape[0], offs.shape[0])


@torch.library.register_fake("moe_fp8::quantize_1x128")
def _(x, dtype=None, pow2_scale=False):
    check_tokens("quantize_1x128", "x", x)
    return new_rows(x, x.shape, out_dtype("quantize_1x128", dtype, x))


@torch.library.register_fake("moe_fp8::quantize_128x1")
def _(x, offs, align=128, dtype=None, pow2_scale=False, transpose=True):
    _check_groups("quantize_128x1", x, offs, align)
    dtype = out_dtype("quantize_128x1", dtype, x)
    return new_columns(x, x.shape, offs.shape[0], align, dtype, transpose)


@torch.library.register_fake("moe_fp8::quantize_1x128_128x1")
def _(x, offs, align=128, dtype=None, pow2_scale=False, transpose=True):
    _check_groups("quantize_1x128_128x1", x, offs, align)
    dtype = out_dtype("quantize_1x128_128x1", dtype, x)
    return *new_rows(x, x.shape, dtype), *new_columns(x, x.shape, offs.shape[0], align, dtype, transpose)


@torch.library.register_fake("moe_fp8::quantize_128x128")
def _(w, dtype=None, pow2_scale=False):
    op = "quantize_128x128"
    check_input(op, "w", w, dim=3)
    limit = shapes.MAX_EXPERTS
    require(w.shape[0] <= limit, f"{op}: w must hold at most {limit} experts, got {w.shape[0]}")
    check_size(op, "w", w.shape[1], "rows an expert")
    dtype = out_dtype(op, dtype, w)
    q, q_t, scale = shapes.quantize_128x128(w.shape)
    return w.new_empty(q, dtype=dtype), w.new_empty(q_t, dtype=dtype), w.new_empty(scale, dtype=torch.float32)
