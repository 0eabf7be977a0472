"""Casts of adapters' factors."""

import math

import torch
from torch import Tensor

from moe_fp8_ext.ops.checks import INPUT_DTYPES, check_count, check_dtype, check_one_of, check_size, require
from moe_fp8_ext.ops.dispatch import fake

_cast_factor = torch.ops.moe_fp8.cast_factor.default

ORDERS = {2: ("rc", "cr"), 3: ("erc", "ecr", "rec", "rce", "cer", "cre")}
_MAX_BYTES = 2**63 - 1


def order_of(m: Tensor) -> str:
    """Returns the order of m's dimensions in memory, as `cast_factor` takes it: "rce" for strides (1, C * E, E)."""
    dims: list[int] = []
    for dim in range(m.dim()):  # Dynamo does not sort by symbolic strides, but compares them
        place = 0
        while place < len(dims) and m.stride(dims[place]) >= m.stride(dim):
            place += 1
        dims.insert(place, dim)
    return "".join("erc"[-m.dim() :][dim] for dim in dims)


def cast_factor(
    m: Tensor,
    rows: int,
    cols: int,
    order: str,
    dtype: torch.dtype,
    num_experts: int | None = None,
    scaling: float = 1.0,
) -> Tensor:
    """Casts a factor of adapters, or its gradient, to another type, another order of dimensions and other sizes.

        out[e, r, c] = RN(RN32(scaling * m[e, r, c]))        0 where m has no such element

    The product is rounded to float32, then to `dtype`. If a size of out is larger than that of m, zeros follow m. If it
    is smaller, m is cropped. The op is not differentiable.

    Args:
        m: [E, R, C], or [R, C] for a factor that all experts share; bfloat16, float16 or float32; any strides.
        rows: size of out in place of R.
        cols: size of out in place of C.
        order: the dimensions of out in memory, the outermost first: "erc" is contiguous, "ecr" is the transposed view
            of a contiguous [E, C, R]. Without experts "rc" or "cr". `order_of(m)` is the order of m.
        dtype: bfloat16, float16 or float32.
        num_experts: size of out in place of E. None: E. It must be None if m has no experts.
        scaling: a factor, rounded to float32.

    Returns:
        out [num_experts, rows, cols] or [rows, cols], dense, with strides in the given order.
    """
    return _cast_factor(m, rows, cols, order, dtype, num_experts, scaling)


@fake(_cast_factor)
def _(op, m, rows, cols, order, dtype, num_experts, scaling):
    check_one_of(op, "order", order, ORDERS[m.dim()])
    check_count(op, "rows", rows)
    check_count(op, "cols", cols)
    sizes = {"r": rows, "c": cols}
    if m.dim() == 2:
        require(num_experts is None, f"{op}: num_experts must be None with m of 2 dimensions, got {num_experts}")
    else:
        check_size(op, "m", m.shape[0], "experts")
        sizes["e"] = m.shape[0] if num_experts is None else num_experts
        check_count(op, "num_experts", sizes["e"])
    check_dtype(op, "dtype", dtype, *INPUT_DTYPES)
    ordered = [sizes[dim] for dim in order]
    if all(isinstance(size, int) for size in ordered):
        what = f"{ordered} of {dtype.itemsize} bytes each"
        fits = math.prod(ordered) * dtype.itemsize <= _MAX_BYTES
        require(fits, f"{op}: a result must have at most {_MAX_BYTES} bytes, got {what}")
    return m.new_empty(ordered, dtype=dtype).permute([order.index(dim) for dim in "erc"[-m.dim() :]])
