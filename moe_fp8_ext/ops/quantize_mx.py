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

_1x32 = torch.ops.moe_fp8.quantize_mx_1x32.default
_32x1 = torch.ops.moe_fp8.quantize_mx_32x1.default
_both = torch.ops.moe_fp8.quantize_mx_1x32_32x1.default
_weight = torch.ops.moe_fp8.quantize_mx_weight.default


def quantize_mx_1x32(
    x: Tensor,
    scaling: str = "rceil",
    layout: str = "rowmajor",
    offs: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantizes every 32 neighbouring elements of a row to fp8 with an E8M0 scale, a power of two, of their own.

        amax[r, b] = max |x[r, 32 b : 32 (b + 1)]|
        rceil:  2^(e - 127) = amax * RN32(1 / FP8_MAX), rounded to float32 and then up to a power of two
        floor:  2^(e - 127) = 2^(floor(log2 amax) - floor(log2 FP8_MAX)); what is then too large saturates
        scale[r, b] = e, from 0 on,  q[r, k] = cast(x[r, k] * 2^(127 - e[r, k // 32]))

    The last block of a row may be short. A NaN or an Inf makes its own block NaN, with the scale 255. Never waits for
    the device.

    Args:
        x: [M, K], bfloat16, float16 or float32; stride 1 along K, row stride free.
        scaling: "rceil", with which nothing saturates, or "floor", the rule of the OCP specification.
        layout: of the scales: "rowmajor", or "blocked", in which Blackwell's tensor cores read them (see
            `swizzle_scales_2d`).
        offs: [E] int32 on x's device, exclusive end row of each group, non-decreasing, at most 1024: blocked scales of
            every group begin with 128 rows of their own (see `swizzle_scales_m_groups`). Contents are clamped into
            [0, M] and made monotonic; MOE_FP8_VALIDATE=1 checks them, which waits for the device.
        dtype: float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz; None is the device's own.

    Returns:
        q [M, K] of `dtype`; scale float8_e8m0fnu [M, KB], KB = ceil(K / 32), blocked [round_up(M, 128), round_up(KB,
        4)], by groups [M + 128 E, round_up(KB, 4)]. Both contiguous. Scales of blocked padding are the byte 0; rows
        from `offs[-1]` on are in q, and have no scale.

    Raises:
        RuntimeError: dtype, dimensions, strides, device, `scaling` or `layout` are not as above, offs come with
            layout "rowmajor", or x asks for a gradient, which quantizing has none of; the text names the argument.

    Source: OCP Microscaling Formats specification 1.0, section 6.3 (floor); NVIDIA cuBLAS, "1D block scaling" (rceil,
        blocked layout); E8M0 scales of DESIGN.md section 3.
    """
    check_no_gradient("quantize_mx_1x32", "x", x)
    return _1x32(x, scaling, layout, offs, dtype)


def quantize_mx_32x1(
    x: Tensor,
    offs: Tensor,
    scaling: str = "rceil",
    layout: str = "blocked",
    align: int = 32,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizes every 32 tokens of a group, column by column, to MXFP8, transposed and group-padded: wgrad's operand.

        q_t[k, pos(r)] = cast(x[r, k] * 2^(127 - e[k, pos(r) // 32])),  pos(r) = padded start of the group + r - start

    with e from the amax of the rows of a block as in `quantize_mx_1x32`. Blocks never cross the end of a group. All
    bytes of `q_t` that belong to no row are zero, and so are scales of blocks without rows. Rows from `offs[-1]` on
    belong to no group. Never waits for the device.

    Args:
        x: [M, K], bfloat16, float16 or float32; stride 1 along K, row stride free.
        offs: [E] int32 on x's device, exclusive end row of each group, non-decreasing, at most 1024. Contents are
            clamped into [0, M] and made monotonic; MOE_FP8_VALIDATE=1 checks them, which waits for the device.
        scaling: "rceil" or "floor".
        layout: of the scales: "blocked", every group a matrix of its own, padded to 4 columns (see
            `swizzle_scales_k_groups`), or "rowmajor".
        align: each group is padded to a multiple of it inside `q_t`: 32, 64 or 128.
        dtype: float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz; None is the device's own.

    Returns:
        q_t [K, P] of `dtype`, P = round_up(M, align) + E * align; scale_t float8_e8m0fnu [K, P / 32], blocked
        [round_up(K, 128), P / 32 + 4 E]; padded_offs [E] int32, the exclusive end of each group among the P positions.
        All contiguous.

    Raises:
        RuntimeError: dtype, dimensions, strides, device, `scaling`, `layout` or `align` are not as above, or x asks
            for a gradient, which quantizing has none of; the text names the argument.

    Source: `quantize_mx_1x32`; padded layout of DESIGN.md section 4.
    """
    check_no_gradient("quantize_mx_32x1", "x", x)
    return _32x1(x, offs, scaling, layout, align, dtype)


def quantize_mx_1x32_32x1(
    x: Tensor,
    offs: Tensor,
    scaling: str = "rceil",
    layout: str = "blocked",
    align: int = 32,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`quantize_mx_1x32` and `quantize_mx_32x1` of one tensor, byte for byte, from one read of it.

    Never waits for the device.

    Args:
        x: [M, K], bfloat16, float16 or float32; stride 1 along K, row stride free.
        offs: [E] int32 on x's device, as in `quantize_mx_32x1`.
        scaling: "rceil" or "floor".
        layout: of both scales: "blocked", those of rows by groups too, or "rowmajor".
        align: each group is padded to a multiple of it inside `q_t`: 32, 64 or 128.
        dtype: float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz; None is the device's own.

    Returns:
        q, scale, as `quantize_mx_1x32` returns them for offs if blocked, and q_t, scale_t, padded_offs.

    Raises:
        RuntimeError: as of the two ops.

    Source: `quantize_mx_1x32` and `quantize_mx_32x1`.
    """
    check_no_gradient("quantize_mx_1x32_32x1", "x", x)
    return _both(x, offs, scaling, layout, align, dtype)


def quantize_mx_weight(
    w: Tensor, scaling: str = "rceil", dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantizes every expert's weight to MXFP8 along both of its dimensions, from one read.

    Never waits for the device.

    Args:
        w: [E, N, K], bfloat16, float16 or float32, at most 1024 experts; stride 1 along K, other strides free.
        scaling: "rceil" or "floor".
        dtype: float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz; None is the device's own.

    Returns:
        q [E, N, K] of `dtype` with blocks of 32 along K, and scale float8_e8m0fnu [E, round_up(N, 128) *
        round_up(ceil(K / 32), 4)], blocked expert by expert (see `swizzle_scales_3d`); q_t [E, K, N] with blocks along
        N, and scale_t [E, round_up(K, 128) * round_up(ceil(N / 32), 4)]. All contiguous.

    Raises:
        RuntimeError: dtype, dimensions, strides or `scaling` are not as above, or w asks for a gradient, which
            quantizing has none of; the text names the argument.

    Source: `quantize_mx_1x32`, of each expert and of its transpose.
    """
    check_no_gradient("quantize_mx_weight", "w", w)
    return _weight(w, scaling, dtype)


def check_scaling(op: str, scaling: str) -> None:
    require(scaling in ("rceil", "floor"), f"{op}: scaling must be 'rceil' or 'floor', got '{scaling}'")


def check_layout(op: str, layout: str) -> bool:
    """Whether it is the blocked one."""
    require(layout in ("rowmajor", "blocked"), f"{op}: layout must be 'rowmajor' or 'blocked', got '{layout}'")
    return layout == "blocked"


def check_groups(op: str, x: Tensor, offs: Tensor, align: int, arg: str, rows: int) -> None:
    require(align in (32, 64, 128), f"{op}: align must be 32, 64 or 128, got {align}")
    check_offs(op, offs, "x", x)
    check_align(op, align, arg, rows, offs.shape[0])
    check_align(op, shapes.SCALE_ROWS, arg, rows, offs.shape[0])


def new_rows(
    op: str,
    x: Tensor,
    shape: tuple[int, int],
    scaling: str,
    layout: str,
    offs: Tensor | None,
    arg: str,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Empty q and scale of rows, of arguments that are checked on the way; `arg` has the rows, of this shape."""
    check_scaling(op, scaling)
    blocked = check_layout(op, layout)
    require(
        blocked or offs is None, f"{op}: offs must be None with layout 'rowmajor', which knows no groups, got a tensor"
    )
    if offs is not None:
        check_groups(op, x, offs, shapes.MX_BLOCK, arg, shape[0])
    q, scale = shapes.quantize_mx_1x32(shape, blocked, None if offs is None else offs.shape[0])
    dtype = out_dtype(op, dtype, x)
    return x.new_empty(q, dtype=dtype), x.new_empty(scale, dtype=torch.float8_e8m0fnu)


def new_both(
    op: str,
    x: Tensor,
    shape: tuple[int, int],
    offs: Tensor,
    scaling: str,
    layout: str,
    align: int,
    arg: str,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Empty outputs of both directions likewise."""
    check_scaling(op, scaling)
    blocked = check_layout(op, layout)
    check_groups(op, x, offs, align, arg, shape[0])
    e = offs.shape[0]
    sizes = (
        *shapes.quantize_mx_1x32(shape, blocked, e),
        *shapes.quantize_mx_32x1(shape, e, align, blocked),
    )
    dtype = out_dtype(op, dtype, x)
    dtypes = dtype, torch.float8_e8m0fnu, dtype, torch.float8_e8m0fnu, torch.int32
    return tuple(x.new_empty(size, dtype=t) for size, t in zip(sizes, dtypes, strict=True))


@torch.library.register_fake("moe_fp8::quantize_mx_1x32")
def _(x, scaling="rceil", layout="rowmajor", offs=None, dtype=None):
    check_tokens("quantize_mx_1x32", "x", x)
    return new_rows("quantize_mx_1x32", x, x.shape, scaling, layout, offs, "x", dtype)


@torch.library.register_fake("moe_fp8::quantize_mx_32x1")
def _(x, offs, scaling="rceil", layout="blocked", align=32, dtype=None):
    check_tokens("quantize_mx_32x1", "x", x)
    return new_both("quantize_mx_32x1", x, x.shape, offs, scaling, layout, align, "x", dtype)[2:]


@torch.library.register_fake("moe_fp8::quantize_mx_1x32_32x1")
def _(x, offs, scaling="rceil", layout="blocked", align=32, dtype=None):
    check_tokens("quantize_mx_1x32_32x1", "x", x)
    return new_both("quantize_mx_1x32_32x1", x, x.shape, offs, scaling, layout, align, "x", dtype)


@torch.library.register_fake("moe_fp8::quantize_mx_weight")
def _(w, scaling="rceil", dtype=None):
    op = "quantize_mx_weight"
    check_input(op, "w", w, dim=3)
    limit = shapes.MAX_EXPERTS
    require(w.shape[0] <= limit, f"{op}: w must hold at most {limit} experts, got {w.shape[0]}")
    check_size(op, "w", w.shape[1], "rows an expert")
    check_scaling(op, scaling)
    dtype = out_dtype(op, dtype, w)
    dtypes = dtype, torch.float8_e8m0fnu, dtype, torch.float8_e8m0fnu
    return tuple(w.new_empty(size, dtype=t) for size, t in zip(shapes.quantize_mx_weight(w.shape), dtypes, strict=True))
