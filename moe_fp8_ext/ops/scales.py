"""The blocked layout of scales, in which Blackwell's tensor cores read them."""

import torch
from torch import Tensor

from moe_fp8_ext.ops.checks import check, check_count, check_dims, check_shape, check_size, require
from moe_fp8_ext.ops.dispatch import refuse_derivatives
from moe_fp8_ext.quantization.format import blocked_shape

_swizzle = torch.ops.moe_fp8.swizzle_scales.default
_unswizzle = torch.ops.moe_fp8.unswizzle_scales.default


def swizzle_scales(scale: Tensor, *, groups: str | None = None, offs: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Moves scales of one byte into the blocked layout that Blackwell's tensor cores read.

    128 rows by 4 columns become 512 neighbouring bytes, blocks follow one another along a row of blocks:

        block (r // 128, c // 4), byte 16 * (r % 32) + 4 * (r // 32 % 4) + c % 4

    With groups every group is a blocked matrix of its own, one behind the other:

        None        one matrix
        "rows"      rows starts[e] to starts[e] + round_up(size of e, 128) of blocked are group e, its rows blocked
        "columns"   bytes of blocked from starts[e] * round_up(R, 128) on are group e, its columns blocked
        "experts"   blocked[e] is scale[e] blocked, flat

    Never waits for the device.

    Args:
        scale: [R, C], of "experts" [E, R, C], any dtype of one byte; stride 1 along C, other strides free.
        groups: as above.
        offs: [E] int32 on scale's device, given for "rows" and "columns" and only then: exclusive end of each group,
            non-decreasing, at most 1024. A column stands for a block of tokens: offs of columns are not ends of tokens.
            Contents are clamped into [0, R] or [0, C] and made monotonic; MOE_FP8_VALIDATE=1 checks them, which waits
            for the device.

    Returns:
        blocked of scale's dtype, contiguous: [round_up(R, 128), round_up(C, 4)]; of "rows" [R + 128 * E, round_up(C,
        4)]; of "columns" [round_up(R, 128), C + 4 * E]; of "experts" [E, round_up(R, 128) * round_up(C, 4)]. Padding
        and what belongs to no group is zero bytes. Its shape only counts bytes: they lie in the order of blocks.
        starts [E] int32, of "rows" the first row of each group in blocked, of "columns" the columns of all groups
        before, each rounded up to 4; [0] otherwise.

    Raises:
        RuntimeError: dtype, dimensions, strides, device or groups are not as above, or scale asks for a derivative.

    Source: NVIDIA cuBLAS, "1D block scaling factors layout".
    """
    return _swizzle(scale, groups, offs)


def unswizzle_scales(
    blocked: Tensor, rows: int, cols: int, *, groups: str | None = None, offs: Tensor | None = None
) -> Tensor:
    """Moves scales out of the blocked layout: undoes `swizzle_scales`. Never waits for the device.

    Args:
        blocked: as `swizzle_scales` returns it for scales of these sizes, any dtype of one byte, contiguous.
        rows, cols: the size of the result, of "experts" of one of its matrices.
        groups, offs: as in `swizzle_scales`.

    Returns:
        scale [rows, cols], of "experts" [E, rows, cols], of blocked's dtype, contiguous; zero bytes from `offs[-1]` on.

    Raises:
        RuntimeError: dtype, shape, strides, device or groups are not as above, or blocked asks for a derivative.

    Source: the layout of `swizzle_scales`.
    """
    return _unswizzle(blocked, rows, cols, groups, offs)


refuse_derivatives(_swizzle)
refuse_derivatives(_unswizzle)


def _check_groups(op: str, groups: str | None, offs: Tensor | None) -> None:
    text = f"{op}: groups must be None, 'rows', 'columns' or 'experts', got '{groups}'"
    require(groups in (None, "rows", "columns", "experts"), text)
    by_offs = groups in ("rows", "columns")
    require(offs is not None or not by_offs, f"{op}: offs must be given with groups '{groups}', got None")
    require(offs is None or by_offs, f"{op}: offs must be None with groups {groups}, got a tensor")


def _blocked_shape(
    op: str, arg: str, x: Tensor, rows: int, cols: int, groups: str | None, offs: Tensor | None
) -> tuple[int, ...]:
    if offs is None:
        return blocked_shape(rows, cols, groups, x.shape[0])
    check(op, "offs", offs, x)
    shape = blocked_shape(rows, cols, groups, offs.shape[0])
    check_size(op, arg, shape[0 if groups == "rows" else 1], f"{groups} with padding")
    return shape


@torch.library.register_fake("moe_fp8::swizzle_scales")
def _(scale, groups=None, offs=None):
    op = "swizzle_scales"
    check(op, "scale", scale)
    _check_groups(op, groups, offs)
    dims = 3 if groups == "experts" else 2
    check_dims(op, "scale", scale, dims, dims)
    shape = _blocked_shape(op, "scale", scale, *scale.shape[-2:], groups, offs)
    starts = (0,) if offs is None else offs.shape
    return scale.new_empty(shape), scale.new_empty(starts, dtype=torch.int32)


@torch.library.register_fake("moe_fp8::unswizzle_scales")
def _(blocked, rows, cols, groups=None, offs=None):
    op = "unswizzle_scales"
    check(op, "blocked", blocked)
    _check_groups(op, groups, offs)
    check_count(op, "rows", rows)
    check_count(op, "cols", cols)
    check_shape(op, "blocked", blocked, _blocked_shape(op, "blocked", blocked, rows, cols, groups, offs))
    return blocked.new_empty((blocked.shape[0], rows, cols) if groups == "experts" else (rows, cols))
