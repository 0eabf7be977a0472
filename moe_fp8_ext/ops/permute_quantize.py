import torch
from torch import Tensor

from moe_fp8_ext import shapes
from moe_fp8_ext.ops.checks import check_align, check_no_gradient, check_offs, check_tokens, out_dtype
from moe_fp8_ext.ops.permute import check_indices
from moe_fp8_ext.ops.quantize_blockwise import check_blocks, new_columns, new_rows
from moe_fp8_ext.ops.quantize_mx import new_both as new_mx_both
from moe_fp8_ext.ops.quantize_mx import new_rows as new_mx_rows

_rowwise = torch.ops.moe_fp8.permute_pad_quantize_rowwise.default
_rowcol = torch.ops.moe_fp8.permute_pad_quantize_rowcol.default
_1x128 = torch.ops.moe_fp8.permute_pad_quantize_1x128.default
_1x128_128x1 = torch.ops.moe_fp8.permute_pad_quantize_1x128_128x1.default
_mx_1x32 = torch.ops.moe_fp8.permute_pad_quantize_mx_1x32.default
_mx_1x32_32x1 = torch.ops.moe_fp8.permute_pad_quantize_mx_1x32_32x1.default


def permute_pad_quantize_rowwise(
    x: Tensor, indices: Tensor, top_k: int = 1, dtype: torch.dtype | None = None, pow2_scale: bool = False
) -> tuple[Tensor, Tensor]:
    """`quantize_rowwise` of `permute_pad(x, indices, top_k)`, byte for byte, without those rows in memory.

    Never waits for the device.

    Args:
        x: [M, K], bfloat16, float16 or float32; stride 1 along K, row stride free.
        indices: [P] int32 on x's device, as in `permute_pad`: one that is not in [0, M * top_k) gives a row of zeros.
        top_k: slots of a row of x: index i stands for row i // top_k.
        dtype: float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz; None is the device's own.
        pow2_scale: round multipliers down to powers of two.

    Returns:
        q [P, K] of `dtype` and scale [P] float32, both contiguous. A row of zeros has the scale of amax 0.

    Raises:
        RuntimeError: dtype, dimensions, strides, device or sizes are not as above, or x asks for a gradient, which
            quantizing has none of (see `grouped_mm`); the text names the argument.

    Source: `permute_pad` and `quantize_rowwise`.
    """
    check_no_gradient("permute_pad_quantize_rowwise", "x", x)
    return _rowwise(x, indices, top_k, dtype, pow2_scale)


def permute_pad_quantize_rowcol(
    x: Tensor,
    indices: Tensor,
    offs: Tensor,
    top_k: int = 1,
    align: int = 16,
    dtype: torch.dtype | None = None,
    pow2_scale: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`quantize_rowcol` of `permute_pad(x, indices, top_k)`, byte for byte, without those rows in memory.

    Never waits for the device.

    Args:
        x: [M, K], bfloat16, float16 or float32; stride 1 along K, row stride free.
        indices: [P] int32 on x's device, as in `permute_pad`: one that is not in [0, M * top_k) gives a row of zeros.
        offs: [E] int32 on the same device, exclusive ends of the groups among the P rows: padded_offs of
            `permute_indices`, or offs of `sort_tokens`. As in `quantize_rowcol`.
        top_k: slots of a row of x: index i stands for row i // top_k.
        align: each group is padded to a multiple of it inside `q_t`; a power of two from 1 to 256.
        dtype: float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz; None is the device's own.
        pow2_scale: round multipliers down to powers of two.

    Returns:
        q, scale, q_t, scale_t, padded_offs, as `quantize_rowcol` returns them for [P, K].

    Raises:
        RuntimeError: dtype, dimensions, strides, device, sizes or `align` are not as above, or x asks for a gradient,
            which quantizing has none of (see `grouped_mm`); the text names the argument.

    Source: `permute_pad` and `quantize_rowcol`.
    """
    check_no_gradient("permute_pad_quantize_rowcol", "x", x)
    return _rowcol(x, indices, offs, top_k, align, dtype, pow2_scale)


def permute_pad_quantize_1x128(
    x: Tensor, indices: Tensor, top_k: int = 1, dtype: torch.dtype | None = None, pow2_scale: bool = False
) -> tuple[Tensor, Tensor]:
    """`quantize_1x128` of `permute_pad(x, indices, top_k)`, byte for byte, without those rows in memory.

    Never waits for the device.

    Args:
        x: [M, K], bfloat16, float16 or float32; stride 1 along K, row stride free.
        indices: [P] int32 on x's device, as in `permute_pad`: one that is not in [0, M * top_k) gives a row of zeros.
        top_k: slots of a row of x: index i stands for row i // top_k.
        dtype: float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz; None is the device's own.
        pow2_scale: round multipliers down to powers of two.

    Returns:
        q [P, K] and scale [P, ceil(K / 128)], as `quantize_1x128` returns them.

    Raises:
        RuntimeError: dtype, dimensions, strides, device or sizes are not as above, or x asks for a gradient, which
            quantizing has none of (see `grouped_mm`); the text names the argument.

    Source: `permute_pad` and `quantize_1x128`.
    """
    check_no_gradient("permute_pad_quantize_1x128", "x", x)
    return _1x128(x, indices, top_k, dtype, pow2_scale)


def permute_pad_quantize_1x128_128x1(
    x: Tensor,
    indices: Tensor,
    offs: Tensor,
    top_k: int = 1,
    align: int = 128,
    dtype: torch.dtype | None = None,
    pow2_scale: bool = False,
    transpose: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`quantize_1x128_128x1` of `permute_pad(x, indices, top_k)`, byte for byte, from one read of x.

    Never waits for the device.

    Args:
        x: [M, K], bfloat16, float16 or float32; stride 1 along K, row stride free.
        indices: [P] int32 on x's device, as in `permute_pad`: one that is not in [0, M * top_k) gives a row of zeros.
        offs: [E] int32 on the same device, exclusive ends of the groups among the P rows: padded_offs of
            `permute_indices`, or offs of `sort_tokens`. As in `quantize_128x1`.
        top_k: slots of a row of x: index i stands for row i // top_k.
        align: each group is padded to a multiple of it inside `q_t`; a power of two from 1 to 256.
        dtype: float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz; None is the device's own.
        pow2_scale: round multipliers down to powers of two.
        transpose: False leaves the tokens of `q_t` as rows, as in `quantize_128x1`.

    Returns:
        q, scale, q_t, scale_t, padded_offs, as `quantize_1x128_128x1` returns them for [P, K].

    Raises:
        RuntimeError: dtype, dimensions, strides, device, sizes or `align` are not as above, or x asks for a gradient,
            which quantizing has none of (see `grouped_mm`); the text names the argument.

    Source: `permute_pad` and `quantize_1x128_128x1`.
    """
    check_no_gradient("permute_pad_quantize_1x128_128x1", "x", x)
    return _1x128_128x1(x, indices, offs, top_k, align, dtype, pow2_scale, transpose)


def permute_pad_quantize_mx_1x32(
    x: Tensor,
    indices: Tensor,
    offs: Tensor | None = None,
    top_k: int = 1,
    scaling: str = "rceil",
    layout: str = "rowmajor",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """`quantize_mx_1x32` of `permute_pad(x, indices, top_k)`, byte for byte, without those rows in memory.

    Never waits for the device.

    Args:
        x: [M, K], bfloat16, float16 or float32; stride 1 along K, row stride free.
        indices: [P] int32 on x's device, as in `permute_pad`: one that is not in [0, M * top_k) gives a row of zeros.
        offs: None, or [E] int32 on the same device, exclusive ends of the groups among the P rows, as in
            `quantize_mx_1x32`.
        top_k: slots of a row of x: index i stands for row i // top_k.
        scaling: "rceil" or "floor".
        layout: of the scales, "rowmajor" or "blocked".
        dtype: float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz; None is the device's own.

    Returns:
        q, scale, as `quantize_mx_1x32` returns them for [P, K].

    Raises:
        RuntimeError: dtype, dimensions, strides, device, sizes, `scaling` or `layout` are not as above, or x asks for a
            gradient, which quantizing has none of (see `grouped_mm`); the text names the argument.

    Source: `permute_pad` and `quantize_mx_1x32`.
    """
    check_no_gradient("permute_pad_quantize_mx_1x32", "x", x)
    return _mx_1x32(x, indices, offs, top_k, scaling, layout, dtype)


def permute_pad_quantize_mx_1x32_32x1(
    x: Tensor,
    indices: Tensor,
    offs: Tensor,
    top_k: int = 1,
    scaling: str = "rceil",
    layout: str = "blocked",
    align: int = 32,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`quantize_mx_1x32_32x1` of `permute_pad(x, indices, top_k)`, byte for byte, from one read of x.

    Never waits for the device.

    Args:
        x: [M, K], bfloat16, float16 or float32; stride 1 along K, row stride free.
        indices: [P] int32 on x's device, as in `permute_pad`: one that is not in [0, M * top_k) gives a row of zeros.
        offs: [E] int32 on the same device, exclusive ends of the groups among the P rows: padded_offs of
            `permute_indices`, or offs of `sort_tokens`. As in `quantize_mx_32x1`.
        top_k: slots of a row of x: index i stands for row i // top_k.
        scaling: "rceil" or "floor".
        layout: of both scales, "blocked" or "rowmajor".
        align: each group is padded to a multiple of it inside `q_t`: 32, 64 or 128.
        dtype: float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz; None is the device's own.

    Returns:
        q, scale, q_t, scale_t, padded_offs, as `quantize_mx_1x32_32x1` returns them for [P, K].

    Raises:
        RuntimeError: dtype, dimensions, strides, device, sizes, `scaling`, `layout` or `align` are not as above, or x
            asks for a gradient, which quantizing has none of (see `grouped_mm`); the text names the argument.

    Source: `permute_pad` and `quantize_mx_1x32_32x1`.
    """
    check_no_gradient("permute_pad_quantize_mx_1x32_32x1", "x", x)
    return _mx_1x32_32x1(x, indices, offs, top_k, scaling, layout, align, dtype)


def _check(op: str, x: Tensor, indices: Tensor, top_k: int) -> None:
    check_tokens(op, "x", x)
    check_indices(op, indices, "x", x, x.shape[0], top_k)


@torch.library.register_fake("moe_fp8::permute_pad_quantize_rowwise")
def _(x, indices, top_k=1, dtype=None, pow2_scale=False):
    op = "permute_pad_quantize_rowwise"
    _check(op, x, indices, top_k)
    q, scale = shapes.permute_pad_quantize_rowwise(x.shape, indices.shape[0])
    return x.new_empty(q, dtype=out_dtype(op, dtype, x)), x.new_empty(scale, dtype=torch.float32)


@torch.library.register_fake("moe_fp8::permute_pad_quantize_rowcol")
def _(x, indices, offs, top_k=1, align=16, dtype=None, pow2_scale=False):
    op = "permute_pad_quantize_rowcol"
    _check(op, x, indices, top_k)
    check_offs(op, offs, "x", x)
    check_align(op, align, "indices", indices.shape[0], offs.shape[0])
    dtype = out_dtype(op, dtype, x)
    dtypes = (dtype, torch.float32, dtype, torch.float32, torch.int32)
    sizes = shapes.permute_pad_quantize_rowcol(x.shape, indices.shape[0], offs.shape[0], align)
    return tuple(x.new_empty(size, dtype=t) for size, t in zip(sizes, dtypes, strict=True))


@torch.library.register_fake("moe_fp8::permute_pad_quantize_1x128")
def _(x, indices, top_k=1, dtype=None, pow2_scale=False):
    op = "permute_pad_quantize_1x128"
    _check(op, x, indices, top_k)
    return new_rows(x, shapes.permute_pad(x.shape, indices.shape[0]), out_dtype(op, dtype, x))


@torch.library.register_fake("moe_fp8::permute_pad_quantize_1x128_128x1")
def _(x, indices, offs, top_k=1, align=128, dtype=None, pow2_scale=False, transpose=True):
    op = "permute_pad_quantize_1x128_128x1"
    _check(op, x, indices, top_k)
    check_offs(op, offs, "x", x)
    check_blocks(op, align, "indices", indices.shape[0], offs.shape[0])
    dtype, permuted = out_dtype(op, dtype, x), shapes.permute_pad(x.shape, indices.shape[0])
    return *new_rows(x, permuted, dtype), *new_columns(x, permuted, offs.shape[0], align, dtype, transpose)


@torch.library.register_fake("moe_fp8::permute_pad_quantize_mx_1x32")
def _(x, indices, offs=None, top_k=1, scaling="rceil", layout="rowmajor", dtype=None):
    op = "permute_pad_quantize_mx_1x32"
    _check(op, x, indices, top_k)
    permuted = shapes.permute_pad(x.shape, indices.shape[0])
    return new_mx_rows(op, x, permuted, scaling, layout, offs, "indices", dtype)


@torch.library.register_fake("moe_fp8::permute_pad_quantize_mx_1x32_32x1")
def _(x, indices, offs, top_k=1, scaling="rceil", layout="blocked", align=32, dtype=None):
    op = "permute_pad_quantize_mx_1x32_32x1"
    _check(op, x, indices, top_k)
    permuted = shapes.permute_pad(x.shape, indices.shape[0])
    return new_mx_both(op, x, permuted, offs, scaling, layout, align, "indices", dtype)
