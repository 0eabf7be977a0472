"""The checks that fake implementations and grouped_mm share; csrc/ops/common.h words its errors alike."""

import os

import torch
from torch import Tensor

from moe_fp8_ext import shapes
from moe_fp8_ext.ops.gradients import wants_grad
from moe_fp8_ext.recipes import default_fp8_dtype

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_ALIGN = 256
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def require(ok: bool | torch.SymBool, message: str) -> None:
    if isinstance(ok, torch.SymBool):  # of sizes that only the run knows: a graph keeps the condition for then
        torch._check(ok, lambda: message)
    elif not ok:
        raise RuntimeError(message)


def check_input(op: str, arg: str, x: Tensor, dim: int | None = None) -> None:
    check_dtype(op, arg, x)
    if dim is None:
        require(1 <= x.dim() <= 7, f"{op}: {arg} must have 1 to 7 dimensions, got {x.dim()}")
    else:
        check_dim(op, arg, x, dim)
    check_unit_stride(op, arg, x, -1)
    check_size(op, arg, x.shape[-1], "columns")


def check_dtype(op: str, arg: str, x: Tensor) -> None:
    require(x.dtype in INPUT_DTYPES, f"{op}: {arg} must be bfloat16, float16 or float32, got {x.dtype}")


def check_dim(op: str, arg: str, x: Tensor, dim: int) -> None:
    require(x.dim() == dim, f"{op}: {arg} must have {dim} dimensions, got {x.dim()}")


def check_unit_stride(op: str, arg: str, x: Tensor, dim: int) -> None:
    # The size may be symbolic: asked last, so that it is not specialised where the stride already answers.
    where = "its last dimension" if dim == -1 else f"dimension {dim % x.dim()} (the summed one)"
    if x.stride(dim) != 1 and x.shape[dim] > 1 and x.numel() != 0:
        raise RuntimeError(f"{op}: {arg} must have stride 1 in {where}, got stride {x.stride(dim)}")


def check_contiguous(op: str, arg: str, x: Tensor) -> None:
    stride = 1
    for dim in reversed(range(x.dim())):
        if x.stride(dim) != stride and x.shape[dim] > 1 and x.numel() != 0:
            raise RuntimeError(f"{op}: {arg} must be contiguous, got stride {x.stride(dim)} in dimension {dim}")
        stride *= x.shape[dim]


def check_matrix(op: str, arg: str, x: Tensor) -> None:
    check_dim(op, arg, x, 2)
    check_unit_stride(op, arg, x, -1)
    check_size(op, arg, x.shape[0], "rows")
    check_size(op, arg, x.shape[1], "columns")


def check_rows(op: str, arg: str, x: Tensor) -> None:
    require(x.dtype.itemsize in (1, 2, 4), f"{op}: {arg} must have a dtype of 1, 2 or 4 bytes, got {x.dtype}")
    check_matrix(op, arg, x)


def check_tokens(op: str, arg: str, x: Tensor) -> None:
    check_dtype(op, arg, x)
    check_matrix(op, arg, x)


def check_index(op: str, arg: str, t: Tensor, like: str, x: Tensor) -> None:
    check_dim(op, arg, t, 1)
    require(t.dtype == torch.int32, f"{op}: {arg} must be int32, got {t.dtype}")
    if t.stride(0) != 1 and t.shape[0] > 1:
        raise RuntimeError(f"{op}: {arg} must have stride 1, got stride {t.stride(0)}")
    check_same_device(op, arg, t, like, x)


def check_count(op: str, arg: str, rows: int) -> None:
    if isinstance(rows, int):
        require(0 <= rows <= shapes.MAX_ROWS, f"{op}: {arg} must be from 0 to {shapes.MAX_ROWS}, got {rows}")


def check_offs(op: str, offs: Tensor, like: str, x: Tensor) -> None:
    check_index(op, "offs", offs, like, x)
    e = offs.shape[0]
    require(e <= shapes.MAX_EXPERTS, f"{op}: offs must have at most {shapes.MAX_EXPERTS} entries, got {e}")


def validate_offs(op: str, offs: Tensor, like: str, rows: int) -> None:
    """With MOE_FP8_VALIDATE=1 in the environment: the contents of offs, which waits for the device."""
    if os.environ.get("MOE_FP8_VALIDATE", "0") in ("", "0"):
        return
    previous = 0
    for e, end in enumerate(offs.tolist()):
        require(end >= previous, f"{op}: offs must be non-decreasing from 0, got offs[{e}] = {end} after {previous}")
        require(end <= rows, f"{op}: offs must not exceed the {rows} rows of {like}, got offs[{e}] = {end}")
        previous = end


def check_same_device(op: str, arg: str, t: Tensor, like: str, x: Tensor) -> None:
    require(t.device == x.device, f"{op}: {arg} must be on the device of {like}, {x.device}, got {t.device}")


def check_size(op: str, arg: str, size: int, what: str) -> None:
    # A symbolic size is left to the run: a graph for any size needs no guard against one beyond every memory.
    if isinstance(size, int):
        require(size <= shapes.MAX_ROWS, f"{op}: {arg} must have at most {shapes.MAX_ROWS} {what}, got {size}")


def check_align(op: str, align: int, arg: str, rows: int, experts: int) -> None:
    require(
        1 <= align <= MAX_ALIGN and align & (align - 1) == 0,
        f"{op}: align must be a power of two from 1 to {MAX_ALIGN}, got {align}",
    )
    check_size(op, arg, shapes.padded_extent(rows, experts, align), "rows with padding")


def check_no_gradient(op: str, arg: str, x: Tensor) -> None:
    # A gradient would be lost without a word otherwise.
    if wants_grad(x):
        raise RuntimeError(
            f"{op}: {arg} must not ask for a gradient, which quantizing has none of (detach it, or call grouped_mm), "
            "got requires_grad=True"
        )


def check_fp8(op: str, arg: str, dtype: torch.dtype) -> None:
    require(
        dtype in FP8_DTYPES,
        f"{op}: {arg} must be float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz, got {dtype}",
    )


def out_dtype(op: str, dtype: torch.dtype | None, x: Tensor) -> torch.dtype:
    if dtype is None:
        return default_fp8_dtype(x.device)
    check_fp8(op, "dtype", dtype)
    return dtype
