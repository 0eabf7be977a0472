"""Checks of arguments, for the fake implementations of ops and for the functions above them.

csrc/ops/checks.h has the same checks with the same messages. Python and C++ both read one table of requirements for
single tensor arguments, csrc/ops/arguments.h.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from types import MethodType
from typing import NoReturn

import torch
from torch import Tensor

from moe_fp8_ext import _C, _torch
from moe_fp8_ext.quantization.format import (
    FORMATS,
    GROUP_SCALES,
    MAX_ALIGN,
    MAX_EXPERTS,
    MAX_ROWS,
    Format,
    padded_extent,
)

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def fail(op: str, text: str) -> NoReturn:
    """Raises the RuntimeError of a call of `op`; `text` names the argument, what it must be and what it is."""
    raise RuntimeError(f"{op}: {text}")


def require(ok: bool | torch.SymBool, message: str | Callable[[], str]) -> None:
    """Raises `message`, which begins with the op, unless ok.

    message: a function where torch.compile traces a check of sizes, because a size in a text becomes a constant.
    """
    if isinstance(ok, torch.SymBool):  # a condition on symbolic sizes: the graph keeps it and checks it at run time
        _torch.check_symbolic(ok, message if callable(message) else lambda: message)
    elif not ok:
        raise RuntimeError(message() if callable(message) else message)


def either(names: Sequence[object]) -> str:
    """The names joined as in "a, b or c"."""
    *others, last = map(str, names)
    return f"{', '.join(others)} or {last}" if others else last


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Argument:
    """A row of the table of tensor arguments; csrc/ops/arguments.h documents the fields."""

    op: str
    name: str
    like: str | None
    dtypes: list[str]
    dtype_bytes: list[int]
    dtype_of_like: bool
    dtype_of_format: bool
    min_dims: int
    max_dims: int
    strides: str
    limits: list[dict]

    def check(self, x: Tensor, like: Tensor | None = None) -> None:
        """Checks x against the table, and that it is on the device of `like`, the argument that the table names."""
        text = f"{self.op}: {self.name} must be"
        require(x is not None, f"{text} a tensor, got None")
        self._check_dtype(x)
        check_dims(self.op, self.name, x, self.min_dims, self.max_dims)
        if self.strides == "contiguous":
            check_contiguous(self.op, self.name, x)
        elif self.strides != "any":
            check_unit_stride(self.op, self.name, x, -1 if self.strides == "inner" else -2)
        for limit in self.limits:
            size = x.numel() if limit["dim"] is None else x.shape[limit["dim"]]
            check_size(self.op, self.name, size, limit["what"], limit["max"])
        if self.like is None:
            return
        if self.dtype_of_like:
            ok = dtype_name(x.dtype) in (*self.dtypes, dtype_name(like.dtype))
            require(ok, f"{text} {either(self.dtypes)} or, like {self.like}, {like.dtype}, got {x.dtype}")
        require(x.device == like.device, f"{text} on the device of {self.like}, {like.device}, got {x.device}")

    def _check_dtype(self, x: Tensor) -> None:
        text = f"{self.op}: {self.name} must"
        if self.dtype_bytes:
            sizes = f"{either(self.dtype_bytes)} byte{'s' if self.dtype_bytes != [1] else ''}"
            require(x.dtype.itemsize in self.dtype_bytes, f"{text} have a dtype of {sizes}, got {x.dtype}")
        elif not self.dtype_of_like and not self.dtype_of_format:
            require(dtype_name(x.dtype) in self.dtypes, f"{text} be {either(self.dtypes)}, got {x.dtype}")


_ARGUMENTS: dict[str, list[Argument]] = {}  # of each op, an argument after the one that it is `like`
for _row in sorted(_C.TABLES["arguments"], key=lambda row: row["like"] is not None):
    _ARGUMENTS.setdefault(_row["op"], []).append(Argument(**_row))


def check_tensors(op: str, given: dict[str, object], required: Sequence[str]) -> None:
    """Checks every tensor among the arguments of a call against the table. One that is not required may be None."""
    for argument in _ARGUMENTS[op]:
        if given[argument.name] is not None or argument.name in required:
            argument.check(given[argument.name], given.get(argument.like))


def takes_integers(op: str, name: str) -> bool:
    """Whether the argument is a tensor of integers.

    A tensor of floats in its place is an error of the dtype, whether or not it requires a gradient.
    """
    rows = [row for row in _ARGUMENTS[op] if row.name == name and row.dtypes]
    return bool(rows) and all(dtype.startswith("int") for dtype in rows[0].dtypes)


def is_int(value: object) -> bool:
    """Whether value is an int of Python, an int of numpy or a symbolic size.

    A bool is not an int here, nor is an array of one int, although both have `__index__`.
    """
    kind = type(value)
    return hasattr(kind, "__index__") and not hasattr(kind, "__len__") and kind is not bool


def check_int(op: str, arg: str, value: object) -> None:
    if not is_int(value):
        fail(op, f"{arg} must be an int, got {type(value).__name__}")


def check_bool(op: str, arg: str, value: object) -> None:
    if not isinstance(value, bool):
        fail(op, f"{arg} must be a bool, got {type(value).__name__}")


def check_number(op: str, arg: str, value: object) -> None:
    if not isinstance(value, (float, Real)) or not math.isfinite(value):  # asking Real takes ten times as long
        fail(op, f"{arg} must be a finite number, got {value!r}")


def check_parameter_dtype(op: str, dtype: torch.dtype | None) -> None:
    if dtype is not None:
        check_dtype(op, "dtype", dtype, *INPUT_DTYPES)


def check_module(op: str, arg: str, value: object) -> None:
    if not isinstance(value, torch.nn.Module):
        raise TypeError(f"{op}: {arg} must be a torch.nn.Module, got {type(value).__name__}")


def check_has_forward(op: str, arg: str, module: torch.nn.Module) -> None:
    """Checks that a value is a module that can be called. Containers such as a ModuleList cannot."""
    check_module(op, arg, module)
    has_own_call = type(module).__call__ is not torch.nn.Module.__call__
    if not has_own_call and module.forward == MethodType(torch.nn.Module.forward, module):
        cause = "; call its modules in the forward of another one" if len(list(module.children())) else ""
        raise TypeError(f"{op}: {arg} must be a module with a forward, got {type(module).__name__}{cause}")


def check_filter(op: str, filter: Callable[[str, torch.nn.Module], bool] | None) -> None:
    """Checks a function of a name and a module, before its first call."""
    if filter is None:
        return
    if not callable(filter):
        raise TypeError(f"{op}: filter must be callable, got {type(filter).__name__}")
    try:
        signature = inspect.signature(filter)
    except ValueError:  # some functions in C have none
        return
    try:
        signature.bind("", None)
    except TypeError:
        raise TypeError(f"{op}: filter must take a name and a module, got one that takes {signature}") from None


def check_sizes(op: str, num_experts: int, **sizes: int) -> None:
    """Checks the sizes of a module with num_experts experts."""
    for name, size in dict(num_experts=num_experts, **sizes).items():
        check_int(op, name, size)
    in_range = 1 <= num_experts <= MAX_EXPERTS
    require(in_range, f"{op}: num_experts must be from 1 to {MAX_EXPERTS}, got {num_experts}")
    for name, size in sizes.items():
        require(size >= 1, f"{op}: {name} must be at least 1, got {size}")


def check_dtype(op: str, arg: str, dtype: torch.dtype, *known: torch.dtype) -> None:
    if dtype not in known:
        fail(op, f"{arg} must be {either(map(dtype_name, known))}, got {dtype}")


def check_dense(op: str, arg: str, x: object, dims: int, max_dims: int | None = None) -> None:
    """Checks that x is a dense tensor of `dims` dimensions, or of `max_dims`."""
    if not isinstance(x, Tensor):
        fail(op, f"{arg} must be a tensor, got {type(x).__name__}")
    if x.layout != torch.strided or x.is_nested:
        fail(op, f"{arg} must be a dense tensor, got {'a nested one' if x.is_nested else x.layout}")
    if x.dim() not in (dims, max_dims):
        check_dims(op, arg, x, dims, max_dims or dims)


def check_dims(op: str, arg: str, x: Tensor, min_dims: int, max_dims: int) -> None:
    dims = str(min_dims)
    if min_dims != max_dims:
        dims += f" {'or' if max_dims == min_dims + 1 else 'to'} {max_dims}"
    require(min_dims <= x.dim() <= max_dims, f"{op}: {arg} must have {dims} dimensions, got {x.dim()}")


def check_output(op: str, arg: str, out: object, x: Tensor) -> Tensor:
    """Checks that `out`, the output of the module `arg` for x, is a tensor like x, and returns it.

    Another shape would broadcast in a sum, or be reshaped, silently.
    """
    if not isinstance(out, Tensor):
        fail(op, f"{arg} must return a tensor, got {type(out).__name__}")
    if out.shape != x.shape:
        is_transposed = out.dim() == 2 and tuple(out.shape) == tuple(reversed(x.shape))
        cause = "; the output seems to be transposed" if is_transposed else ""
        fail(op, f"{arg} must return the shape of x, {list(x.shape)}, got {list(out.shape)}{cause}")
    if not out.is_floating_point():
        fail(op, f"{arg} must return floating-point numbers as x, {x.dtype}, got {out.dtype}")
    if out.device != x.device:
        fail(op, f"{arg} must return a tensor on the device of x, {x.device}, got {out.device}")
    return out


def check_unit_stride(op: str, arg: str, x: Tensor, dim: int) -> None:
    # The size may be symbolic. Testing the stride first avoids a guard on the size where the stride is enough.
    if x.stride(dim) != 1 and x.shape[dim] > 1 and x.numel() != 0:
        where = "its last dimension" if dim == -1 else f"dimension {dim % x.dim()} (the summed one)"
        fail(op, f"{arg} must have stride 1 in {where}, got stride {x.stride(dim)}")


def check_contiguous(op: str, arg: str, x: Tensor) -> None:
    stride = 1
    for dim in reversed(range(x.dim())):
        if x.stride(dim) != stride and x.shape[dim] > 1 and x.numel() != 0:
            fail(op, f"{arg} must be contiguous, got stride {x.stride(dim)} in dimension {dim}")
        stride *= x.shape[dim]


def check_dim(op: str, arg: str, x: Tensor, dim: int, size: int) -> None:
    got = x.shape[dim]
    require(got == size, lambda: f"{op}: {arg} must have size {size} in dimension {dim}, got {got}")


def check_shape(op: str, arg: str, x: Tensor, shape: Sequence[int]) -> None:
    check_dims(op, arg, x, len(shape), len(shape))
    for i, size in enumerate(shape):
        check_dim(op, arg, x, i, size)


def check_size(op: str, arg: str, size: int, what: str, max_size: int = MAX_ROWS) -> None:
    # A symbolic size is checked when the op runs: a graph for any size needs no guard against impossible ones.
    if isinstance(size, int):
        require(size <= max_size, f"{op}: {arg} must have at most {max_size} {what}, got {size}")


def check_count(op: str, arg: str, rows: int) -> None:
    if isinstance(rows, int):
        require(0 <= rows <= MAX_ROWS, f"{op}: {arg} must be from 0 to {MAX_ROWS}, got {rows}")


def check_main_grad(op: str, arg: str, main_grad: Tensor, of: str, weight: Tensor, transposed: bool = False) -> None:
    """Checks `arg`, the tensor that the gradient of `weight`, the argument `of`, is added to.

    transposed: the weight is the transposed view of [E, N, K], and main_grad must be one too.
    """
    check_dense(op, arg, main_grad, 3)
    check_dtype(op, arg, main_grad.dtype, torch.bfloat16, torch.float32)
    if main_grad.shape != weight.shape:
        fail(op, f"{arg} must have the shape of {of}, {tuple(weight.shape)}, got {tuple(main_grad.shape)}")
    if main_grad.device != weight.device:
        fail(op, f"{arg} must be on the device of {of}, {weight.device}, got {main_grad.device}")
    if not (main_grad.mT if transposed else main_grad).is_contiguous():
        layout = "the transposed view of a contiguous tensor" if transposed else "contiguous"
        fail(op, f"{arg} must be {layout}, got strides {main_grad.stride()}")
    if main_grad.requires_grad:
        fail(op, f"{arg} must not ask for a gradient, got requires_grad=True")


def check_one_of(op: str, arg: str, value: str, names: Sequence[str], where: str = "") -> None:
    if value not in names:
        quoted = [f"'{name}'" for name in names]
        fail(op, f"{arg} must be {either(quoted)}{where}, got '{value}'")


def check_format(op: str, format: str, rounding: str | None = None) -> Format:
    check_one_of(op, "format", format, list(FORMATS))
    if rounding is not None:
        check_one_of(op, "rounding", rounding, FORMATS[format].roundings, f" with format '{format}'")
    return FORMATS[format]


def check_amax(op: str, format: Format, amax: str) -> None:
    check_one_of(op, "amax", amax, format.amaxes, f" with format '{format.name}'")


def check_scale(op: str, arg: str, scale: Tensor, format: Format, shape: Sequence[int]) -> None:
    check_dtype(op, arg, scale.dtype, format.scale_dtype)
    check_shape(op, arg, scale, shape)
    if format.order != "column_major":
        check_contiguous(op, arg, scale)


def check_scale_of_tokens(
    op: str, arg: str, scale: Tensor, format: Format, k: int, positions: int, e: int, transposed: bool = False
) -> None:
    """Checks the scales of an operand [K, positions] along tokens.

    Column-major scales may hold more blocks than `positions` needs, because only the quantizer knew the groups. They
    have a row for each of the K features, or for each square of amax "square".
    """
    blocks = format.blocks(positions)
    if format.order != "column_major":
        return check_scale(op, arg, scale, format, format.scale_of_tokens(k, blocks, e).shape)
    check_dtype(op, arg, scale.dtype, format.scale_dtype)
    check_dims(op, arg, scale, 2, 2)
    row_dim, block_dim = (1, 0) if transposed else (0, 1)
    got_rows, got_blocks = scale.shape[row_dim], scale.shape[block_dim]
    squares = format.squares(k)
    text = f"{op}: {arg} must have size {k}, or {squares} of squares, in dimension {row_dim}, got {got_rows}"
    require(got_rows in (k, squares), text)
    enough = got_blocks >= blocks
    if isinstance(enough, bool):  # a symbolic number is checked when the op runs: no solver proves it for all sizes
        require(enough, f"{op}: {arg} must have at least {blocks} blocks in dimension {block_dim}, got {got_blocks}")
    check_size(op, arg, got_blocks, "blocks")


def check_scale_of_operand(
    op: str, q: Tensor, scale: Tensor, format: Format, along_tokens: bool, e: int | None
) -> None:
    """Checks the argument `scale`, the scales of an operand q with e groups."""
    if along_tokens:
        check_scale_of_tokens(op, "scale", scale, format, *q.shape, e)
    else:
        check_scale(op, "scale", scale, format, format.scale_of_operand(q.shape, False, e).shape)


def check_padded(op: str, arg: str, size: int, e: int, along_tokens: bool) -> None:
    """Checks the room for the scales of e groups of `size` rows, or of positions along tokens."""
    what = "columns with padding" if along_tokens else "rows with padding"
    check_size(op, arg, padded_extent(size, e, GROUP_SCALES), what)


def check_align(
    op: str, align: int, arg: str, rows: int, experts: int, min_align: int = 1, max_align: int = MAX_ALIGN
) -> None:
    ok = min_align <= align <= max_align and align & (align - 1) == 0
    require(ok, f"{op}: align must be a power of two from {min_align} to {max_align}, got {align}")
    check_size(op, arg, padded_extent(rows, experts, align), "rows with padding")


def check_groups(op: str, e: int, arg: str, rows: int, format: Format, align: int | None) -> int:
    """Checks e groups of the rows of `arg` along tokens; returns the multiple that each is padded to."""
    align = format.align if align is None else align
    check_align(op, align, arg, rows, e, format.min_align, format.max_align)
    if format.block:
        check_align(op, max(align, GROUP_SCALES), arg, rows, e)
    return align


def check_both_or_none(op: str, **arguments: object) -> None:
    """Checks that two arguments are given together, or neither."""
    (first, a), (second, b) = arguments.items()
    require(a is None or b is not None, f"{op}: {second} must be given with {first}, got None")
    require(b is None or a is not None, f"{op}: {first} must be given with {second}, got None")


def check_optional_indices(op: str, rows: int, indices: Tensor | None, top_k: int | None) -> None:
    """Checks that indices and top_k are both given, and how many there are, or neither."""
    check_both_or_none(op, indices=indices, top_k=top_k)
    if top_k is not None:
        check_indices(op, rows, top_k)


def check_indices(op: str, rows: int, top_k: int) -> None:
    """Checks how many indices there are: top_k slots for each of `rows` rows."""
    require(top_k >= 1, f"{op}: top_k must be at least 1, got {top_k}")
    if isinstance(rows, int):
        text = f"{op}: top_k must give at most {MAX_ROWS} slots to {rows} rows, got {top_k}"
        require(rows * top_k <= MAX_ROWS and top_k <= MAX_ROWS, text)


def default_fp8_dtype(device: torch.device | str) -> torch.dtype:
    """float8_e4m3fnuz if the FP8 instructions of the device are FNUZ (gfx942), else float8_e4m3fn."""
    device = torch.device(device)
    if device.type == "cuda" and torch.version.hip:
        if torch.cuda.get_device_properties(device).gcnArchName.startswith("gfx94"):
            return torch.float8_e4m3fnuz
    return torch.float8_e4m3fn


def fp8_dtype(op: str, dtype: torch.dtype | None, x: Tensor, arg: str = "dtype") -> torch.dtype:
    """Checks `dtype`; None becomes the default of x's device."""
    if dtype is None:
        return default_fp8_dtype(x.device)
    check_dtype(op, arg, dtype, *FP8_DTYPES)
    return dtype


VALIDATE = "to check contents, call it inside moe_fp8_ext.validate()"
CUMSUM = "group sizes become offs by sizes.cumsum(0, dtype=torch.int32)"


def has_values(x: Tensor) -> bool:
    """Whether x has contents that can be read: it is neither a meta nor a fake tensor."""
    return not x.is_meta and (type(x) is Tensor or not _torch.is_fake(x))


def check_not_meta(op: str, name: str, x: Tensor) -> None:
    """Refuses a weight on the meta device, where a result would be lost."""
    text = f"{op}: {name} must have values, got a weight on the meta device, where accelerate leaves offloaded weights"
    require(not x.is_meta, f"{text}; call {op} after weights are loaded and before they are offloaded")


def contents(x: Tensor) -> list[int] | None:
    """Returns the integers of x if they are to be checked, else None.

    Contents of a CPU tensor are always checked, because reading them costs no wait. Contents of a GPU tensor are
    checked if calls are validated.
    """
    if torch.compiler.is_compiling() or not (x.is_cpu or _C.validates()) or not has_values(x):
        return None
    try:
        return x.flatten().tolist()
    except RuntimeError:  # a tensor that a transform of torch wraps
        return None


def validate_offs(op: str, offs: Tensor, of: str, rows: int) -> None:
    """Checks `contents` of offs against `rows`, which the message calls `of`."""
    previous, ends = 0, contents(offs) or []
    cause = f"; they add up to {rows}: {CUMSUM}" if sum(ends) == rows else f"; {CUMSUM}"
    for e, end in enumerate(ends):
        if end < previous:
            fail(op, f"offs must be non-decreasing from 0, got offs[{e}] = {end} after {previous}{cause}")
        if end > rows:
            fail(op, f"offs must not exceed the {rows} {of}, got offs[{e}] = {end}")
        previous = end


def validate_indices(op: str, indices: Tensor, slots: int) -> None:
    """Checks `contents` of indices."""
    all = contents(indices)
    if not all:
        return
    if min(all) < -1 or max(all) >= slots:
        p, index = next((p, i) for p, i in enumerate(all) if not -1 <= i < slots)
        fail(op, f"indices must be -1 or one of the {slots} slots, got {index} in place {p}")
    given = sorted(index for index in all if index >= 0)
    for first, second in zip(given, given[1:], strict=False):
        if first == second:
            fail(op, f"indices must be distinct, got {first} twice")


def validate_ids(op: str, topk_ids: Tensor, experts: int) -> None:
    """Checks `contents` of topk_ids."""
    ids = contents(topk_ids)
    if ids and (min(ids) < -1 or max(ids) >= experts):
        slot, id = next((slot, id) for slot, id in enumerate(ids) if not -1 <= id < experts)
        fail(op, f"topk_ids must be -1 or from 0 to {experts - 1}, got {id} in slot {slot}")
