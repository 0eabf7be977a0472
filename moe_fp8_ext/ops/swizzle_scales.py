from collections.abc import Sequence

import torch
from torch import Tensor

from moe_fp8_ext import shapes
from moe_fp8_ext.ops.checks import (
    check_contiguous,
    check_count,
    check_dim,
    check_matrix,
    check_offs,
    check_size,
    check_unit_stride,
    require,
)
from moe_fp8_ext.ops.gradients import wants_grad

_ops = torch.ops.moe_fp8


def swizzle_scales_2d(scale: Tensor) -> Tensor:
    """Moves scales of one byte into the blocked layout that Blackwell's tensor cores read.

    128 rows by 4 columns become 512 neighbouring bytes, blocks follow one another along a row of blocks:

        block (r // 128, c // 4), byte 16 * (r % 32) + 4 * (r // 32 % 4) + c % 4

    Never waits for the device.

    Args:
        scale: [R, C], any dtype of one byte; stride 1 along C, row stride free.

    Returns:
        blocked [round_up(R, 128), round_up(C, 4)] of scale's dtype, contiguous; padding is zero bytes. Its shape only
        counts bytes: they lie in the order of blocks.

    Raises:
        RuntimeError: dtype, dimensions or strides are not as above, or scale asks for a gradient.

    Source: NVIDIA cuBLAS, "1D block scaling factors layout".
    """
    _check_no_gradient("swizzle_scales_2d", "scale", scale)
    return _ops.swizzle_scales_2d.default(scale)


def swizzle_scales_m_groups(scale: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
    """Moves the scales of groups of rows into the blocked layout, each group a blocked matrix of its own.

        rows starts[e] to starts[e] + round_up(size of e, 128) of blocked = swizzle_scales_2d(rows of group e)

    Never waits for the device.

    Args:
        scale: [R, C], any dtype of one byte; stride 1 along C, row stride free.
        offs: [E] int32 on scale's device, exclusive end row of each group, non-decreasing, at most 1024. Contents are
            clamped into [0, R] and made monotonic; MOE_FP8_VALIDATE=1 checks them, which waits for the device.

    Returns:
        blocked [R + 128 * E, round_up(C, 4)] of scale's dtype, zero bytes where no group lies; starts [E] int32, the
        first row of each group in it. Both contiguous.

    Raises:
        RuntimeError: dtype, dimensions, strides or device are not as above, or scale asks for a gradient.

    Source: the equation above.
    """
    _check_no_gradient("swizzle_scales_m_groups", "scale", scale)
    return _ops.swizzle_scales_m_groups.default(scale, offs)


def swizzle_scales_k_groups(scale: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
    """Moves the scales of groups of columns into the blocked layout, each group a blocked matrix of its own.

        bytes of blocked from starts[e] * round_up(R, 128) on = swizzle_scales_2d(columns of group e)

    Never waits for the device.

    Args:
        scale: [R, C], any dtype of one byte; stride 1 along C, row stride free.
        offs: [E] int32 on scale's device, exclusive end column of each group, non-decreasing, at most 1024. A column
            stands for a block of tokens: these are not ends of tokens. Contents are clamped into [0, C] and made
            monotonic; MOE_FP8_VALIDATE=1 checks them, which waits for the device.

    Returns:
        blocked [round_up(R, 128), C + 4 * E] of scale's dtype, zero bytes where no group lies; starts [E] int32, the
        columns of all groups before, each rounded up to 4. Both contiguous.

    Raises:
        RuntimeError: dtype, dimensions, strides or device are not as above, or scale asks for a gradient.

    Source: the equation above.
    """
    _check_no_gradient("swizzle_scales_k_groups", "scale", scale)
    return _ops.swizzle_scales_k_groups.default(scale, offs)


def swizzle_scales_3d(scale: Tensor) -> Tensor:
    """Moves the scales of every expert's weight into the blocked layout.

        blocked[e] = swizzle_scales_2d(scale[e]), flat

    Never waits for the device.

    Args:
        scale: [E, R, C], any dtype of one byte; stride 1 along C, other strides free.

    Returns:
        blocked [E, round_up(R, 128) * round_up(C, 4)] of scale's dtype, contiguous; padding is zero bytes.

    Raises:
        RuntimeError: dtype, dimensions or strides are not as above, or scale asks for a gradient.

    Source: the equation above.
    """
    _check_no_gradient("swizzle_scales_3d", "scale", scale)
    return _ops.swizzle_scales_3d.default(scale)


def unswizzle_scales_2d(blocked: Tensor, rows: int, cols: int) -> Tensor:
    """Moves scales out of the blocked layout: undoes `swizzle_scales_2d`. Never waits for the device.

    Args:
        blocked: [round_up(rows, 128), round_up(cols, 4)], any dtype of one byte, contiguous.
        rows, cols: the size of the result.

    Returns:
        scale [rows, cols] of blocked's dtype, contiguous.

    Raises:
        RuntimeError: dtype, shape or strides are not as above, or blocked asks for a gradient.

    Source: the layout of `swizzle_scales_2d`.
    """
    _check_no_gradient("unswizzle_scales_2d", "blocked", blocked)
    return _ops.unswizzle_scales_2d.default(blocked, rows, cols)


def unswizzle_scales_m_groups(blocked: Tensor, offs: Tensor, rows: int, cols: int) -> Tensor:
    """Moves the scales of groups of rows out of the blocked layout: undoes `swizzle_scales_m_groups`.

    Rows from `offs[-1]` on are zero bytes. Never waits for the device.

    Args:
        blocked: [rows + 128 * E, round_up(cols, 4)], any dtype of one byte, contiguous.
        offs: [E] int32 on blocked's device, exclusive end row of each group in the result, as in
            `swizzle_scales_m_groups`.
        rows, cols: the size of the result.

    Returns:
        scale [rows, cols] of blocked's dtype, contiguous.

    Raises:
        RuntimeError: dtype, shape, strides or device are not as above, or blocked asks for a gradient.

    Source: the layout of `swizzle_scales_m_groups`.
    """
    _check_no_gradient("unswizzle_scales_m_groups", "blocked", blocked)
    return _ops.unswizzle_scales_m_groups.default(blocked, offs, rows, cols)


def unswizzle_scales_k_groups(blocked: Tensor, offs: Tensor, rows: int, cols: int) -> Tensor:
    """Moves the scales of groups of columns out of the blocked layout: undoes `swizzle_scales_k_groups`.

    Columns from `offs[-1]` on are zero bytes. Never waits for the device.

    Args:
        blocked: [round_up(rows, 128), cols + 4 * E], any dtype of one byte, contiguous.
        offs: [E] int32 on blocked's device, exclusive end column of each group in the result, as in
            `swizzle_scales_k_groups`.
        rows, cols: the size of the result.

    Returns:
        scale [rows, cols] of blocked's dtype, contiguous.

    Raises:
        RuntimeError: dtype, shape, strides or device are not as above, or blocked asks for a gradient.

    Source: the layout of `swizzle_scales_k_groups`.
    """
    _check_no_gradient("unswizzle_scales_k_groups", "blocked", blocked)
    return _ops.unswizzle_scales_k_groups.default(blocked, offs, rows, cols)


def unswizzle_scales_3d(blocked: Tensor, rows: int, cols: int) -> Tensor:
    """Moves the scales of every expert out of the blocked layout: undoes `swizzle_scales_3d`.

    Never waits for the device.

    Args:
        blocked: [E, round_up(rows, 128) * round_up(cols, 4)], any dtype of one byte, contiguous.
        rows, cols: the size of an expert's matrix.

    Returns:
        scale [E, rows, cols] of blocked's dtype, contiguous.

    Raises:
        RuntimeError: dtype, shape or strides are not as above, or blocked asks for a gradient.

    Source: the layout of `swizzle_scales_2d`.
    """
    _check_no_gradient("unswizzle_scales_3d", "blocked", blocked)
    return _ops.unswizzle_scales_3d.default(blocked, rows, cols)


def _check_no_gradient(op: str, arg: str, x: Tensor) -> None:
    if wants_grad(x):
        raise RuntimeError(f"{op}: {arg} must not ask for a gradient, got requires_grad=True")


def _check_byte(op: str, arg: str, x: Tensor) -> None:
    require(x.dtype.itemsize == 1, f"{op}: {arg} must have a dtype of 1 byte, got {x.dtype}")


def _check_blocked(op: str, blocked: Tensor, sizes: Sequence[int]) -> None:
    _check_byte(op, "blocked", blocked)
    check_dim(op, "blocked", blocked, len(sizes))
    for i, size in enumerate(sizes):
        got = blocked.shape[i]
        require(got == size, f"{op}: blocked must have size {size} in dimension {i}, got {got}")
    check_contiguous(op, "blocked", blocked)


def _check_counts(op: str, rows: int, cols: int) -> None:
    check_count(op, "rows", rows)
    check_count(op, "cols", cols)


def _check_scales(op: str, scale: Tensor) -> None:
    _check_byte(op, "scale", scale)
    check_matrix(op, "scale", scale)


@torch.library.register_fake("moe_fp8::swizzle_scales_2d")
def _(scale):
    _check_scales("swizzle_scales_2d", scale)
    return scale.new_empty(shapes.swizzle_scales_2d(scale.shape))


@torch.library.register_fake("moe_fp8::swizzle_scales_m_groups")
def _(scale, offs):
    op = "swizzle_scales_m_groups"
    _check_scales(op, scale)
    check_offs(op, offs, "scale", scale)
    blocked = shapes.swizzle_scales_m_groups(scale.shape, offs.shape[0])
    check_size(op, "scale", blocked[0], "rows with padding")
    return scale.new_empty(blocked), offs.new_empty(offs.shape)


@torch.library.register_fake("moe_fp8::swizzle_scales_k_groups")
def _(scale, offs):
    op = "swizzle_scales_k_groups"
    _check_scales(op, scale)
    check_offs(op, offs, "scale", scale)
    blocked = shapes.swizzle_scales_k_groups(scale.shape, offs.shape[0])
    check_size(op, "scale", blocked[1], "columns with padding")
    return scale.new_empty(blocked), offs.new_empty(offs.shape)


@torch.library.register_fake("moe_fp8::swizzle_scales_3d")
def _(scale):
    op = "swizzle_scales_3d"
    _check_byte(op, "scale", scale)
    check_dim(op, "scale", scale, 3)
    check_unit_stride(op, "scale", scale, -1)
    check_size(op, "scale", scale.shape[1], "rows an expert")
    check_size(op, "scale", scale.shape[2], "columns")
    return scale.new_empty(shapes.swizzle_scales_3d(scale.shape))


@torch.library.register_fake("moe_fp8::unswizzle_scales_2d")
def _(blocked, rows, cols):
    op = "unswizzle_scales_2d"
    _check_counts(op, rows, cols)
    _check_blocked(op, blocked, shapes.swizzle_scales_2d((rows, cols)))
    return blocked.new_empty(shapes.unswizzle_scales_2d(rows, cols))


@torch.library.register_fake("moe_fp8::unswizzle_scales_m_groups")
def _(blocked, offs, rows, cols):
    op = "unswizzle_scales_m_groups"
    _check_counts(op, rows, cols)
    check_offs(op, offs, "blocked", blocked)
    want = shapes.swizzle_scales_m_groups((rows, cols), offs.shape[0])
    check_size(op, "blocked", want[0], "rows with padding")
    _check_blocked(op, blocked, want)
    return blocked.new_empty(shapes.unswizzle_scales_2d(rows, cols))


@torch.library.register_fake("moe_fp8::unswizzle_scales_k_groups")
def _(blocked, offs, rows, cols):
    op = "unswizzle_scales_k_groups"
    _check_counts(op, rows, cols)
    check_offs(op, offs, "blocked", blocked)
    want = shapes.swizzle_scales_k_groups((rows, cols), offs.shape[0])
    check_size(op, "blocked", want[1], "columns with padding")
    _check_blocked(op, blocked, want)
    return blocked.new_empty(shapes.unswizzle_scales_2d(rows, cols))


@torch.library.register_fake("moe_fp8::unswizzle_scales_3d")
def _(blocked, rows, cols):
    op = "unswizzle_scales_3d"
    _check_counts(op, rows, cols)
    check_dim(op, "blocked", blocked, 2)
    _check_blocked(op, blocked, shapes.swizzle_scales_3d((blocked.shape[0], rows, cols)))
    return blocked.new_empty(shapes.unswizzle_scales_3d(blocked.shape, rows, cols))
