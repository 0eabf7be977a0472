"""`Quantized`, an operand with its scales, and functions that make and multiply such operands."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from moe_fp8_ext import ops
from moe_fp8_ext._C import validates
from moe_fp8_ext.distributed.dtensor import is_dtensor
from moe_fp8_ext.ops.checks import FP8_DTYPES, check_format, check_one_of, dtype_name, fail, has_values, require
from moe_fp8_ext.ops.dispatch import refuse_derivatives_of
from moe_fp8_ext.quantization.casting import lies_transposed, row_major
from moe_fp8_ext.quantization.format import FORMATS, padded_extent


@dataclass(frozen=True, eq=False)
class Quantized:
    """An fp8 operand with its scales. `grouped_mm`, `experts` and `scaled_grouped_mm` take it in place of a tensor.

    `quantize_rows`, `quantize_tokens`, `quantize_both` and `quantize_weight` return one, and `from_parts` makes one
    from a checkpoint's tensors. Operands compare by identity. `pickle` and `torch.save` can store an operand. Once this
    package is imported, `torch.load` loads it, also with weights_only=True. To have it in a state dict, use
    `FrozenWeight`.

    Attributes:
        q: fp8 values. Along rows: [M, K], or a weight [E, N, K] or its transpose [E, K, N]; "rowwise" takes any
            [..., K]. Along tokens: [K, P].
        scale: as `ops.quantize_rows`, `ops.quantize_tokens` or `ops.quantize_weight` returns it.
        format: "rowwise", "blockwise", "mxfp8" or "mxfp8_rowmajor".
        along: "rows" or "tokens", the dimension that scaling blocks run along.
        offs: [E] int32, exclusive ends of groups. Along tokens, groups are padded, and ends are positions in [0, P].
            Along rows, groups are groups of rows; None if the operand was quantized without groups.
        align: the multiple that groups were padded to along tokens; 1 along rows.
        transposed: whether q is the transpose [E, K, N] of weights [E, N, K], the operand of dgrad.
        rounding: how the quantizer rounded scales; None if it is not known. On sm_100, products of "blockwise"
            operands run in FP8 only if both have "pow2".
    """

    q: Tensor
    scale: Tensor
    format: str
    along: str = "rows"
    offs: Tensor | None = None
    align: int = 1
    transposed: bool = False
    rounding: str | None = None

    def dequantize(self, out_dtype: torch.dtype | None = None) -> Tensor:
        """Returns q * scale in float32, rounded to `out_dtype` (default bfloat16); q's shape. See `ops.dequantize`."""
        return ops.dequantize(self.q, self.scale, self.format, along=self.along, offs=self.offs, out_dtype=out_dtype)

    @classmethod
    def from_parts(cls, q: Tensor, scale: Tensor, format: str, *, transposed: bool = False) -> Quantized:
        """Makes a weight from tensors that are quantized already, such as an FP8 checkpoint. No value is cast.

        Args:
            q: [E, N, K] fp8 values of any strides. In format "blockwise" the transposed view of a contiguous
                [E, K, N], such as `w.mT` of GPT-OSS's layout, is not copied. Other formats copy it once.
            scale: dequantization factors, shaped as `quantize_weight` returns them: [E, N] for "rowwise",
                [E, ceil(N / 128), ceil(K / 128)] for "blockwise". If the format has float32 scales, powers of two may
                also be float8_e8m0fnu. They are converted to float32, which is exact.
            format: "rowwise", "blockwise", "mxfp8" or "mxfp8_rowmajor".
            transposed: whether q is the transpose [E, K, N] of weights [E, N, K], the second of a pair.

        q and scale may both be DTensors, sharded along dimension 0. The result has this rank's experts.

        Raises:
            RuntimeError: q or scale are not as above; the text names the argument and the expected value.
        """
        op = "Quantized.from_parts"
        f = check_format(op, format)
        for name, t in (("q", q), ("scale", scale)):
            require(isinstance(t, Tensor), f"{op}: {name} must be a tensor, got {type(t).__name__}")
        if is_dtensor(q) or is_dtensor(scale):
            q, scale = _shards(op, q, scale)
        if q.dtype not in FP8_DTYPES:
            cause = "view bytes as an fp8 dtype" if q.dtype in (torch.uint8, torch.int8) else "see `quantize_weight`"
            fail(op, f"q must be fp8, got {q.dtype}; {cause}")
        require(q.dim() == 3, f"{op}: q must have 3 dimensions, [E, N, K], got {q.dim()}; stack the experts")
        require(scale.device == q.device, f"{op}: scale must be on the device of q, {q.device}, got {scale.device}")
        shape, got = f.scale_of_weight(*q.shape).shape, tuple(scale.shape)
        if got != shape:
            flipped = f.has_square_blocks and got == (shape[0], *shape[:0:-1])
            cause = "; it has the shape of q.mT: pass scale.mT" if flipped else ""
            if len(got) < 2:
                cause = "; a scale of a whole matrix is expanded to the shape of a format first"
            fail(op, f"scale must have shape {shape} for q {tuple(q.shape)} in format {format!r}, got {got}{cause}")
        rounding = None
        if scale.dtype == torch.float8_e8m0fnu and f.scale_dtype == torch.float32:
            scale, rounding = scale.float(), "pow2"
        if scale.dtype != f.scale_dtype:
            also = " or float8_e8m0fnu" if f.scale_dtype == torch.float32 else ""
            fail(op, f"scale must be {dtype_name(f.scale_dtype)}{also} in format {format!r}, got {scale.dtype}")
        if not f.has_square_blocks:
            scale = scale.contiguous()
        is_view = f.has_square_blocks and q.stride(-2) == 1
        return cls(q if is_view else row_major(q), scale, format, transposed=transposed, rounding=rounding)

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> Quantized:
        """Returns the operand on a device, or itself if it is already on that device. Values are never cast."""
        if isinstance(device, (torch.dtype, Tensor)):
            fail("Quantized.to", f"device must be a device, because fp8 values are not cast, got {device!r}")
        moved = {name: t.to(device, non_blocking=non_blocking) for name, t in self._tensors().items()}
        return self if all(t is getattr(self, name) for name, t in moved.items()) else replace(self, **moved)

    def copy_(self, other: Quantized) -> Quantized:
        """Copies the values and scales of `other` in place, so that a captured CUDA graph reads them. Returns self.

        Raises:
            RuntimeError: other has another kind, shape or dtype.
        """
        if not isinstance(other, Quantized):
            fail("Quantized.copy_", f"other must be a Quantized, got {type(other).__name__}")
        for name in ("format", "along", "align", "transposed"):
            wanted, got = getattr(self, name), getattr(other, name)
            require(wanted == got, f"Quantized.copy_: {name} of other must be {wanted!r}, got {got!r}")
        if self.rounding == "pow2":  # a graph may have captured a product that needs powers of two
            text = f"Quantized.copy_: rounding of other must be 'pow2', got {other.rounding!r}"
            require(other.rounding == "pow2", text)
        own, given = self._tensors(), other._tensors()
        if own.keys() != given.keys():
            text = "other must have offs if and only if the operand has them"
            fail("Quantized.copy_", f"{text}, got {sorted(given)} for {sorted(own)}")
        for name, to in own.items():
            wanted, got = (to.dtype, tuple(to.shape)), (given[name].dtype, tuple(given[name].shape))
            require(wanted == got, f"Quantized.copy_: {name} of other must be {wanted}, got {got}")
        with torch.no_grad():
            for name, to in own.items():
                to.copy_(given[name])
        return self

    def _tensors(self) -> dict[str, Tensor]:
        return {f.name: t for f in fields(self) if isinstance(t := getattr(self, f.name), Tensor)}

    def __getstate__(self) -> dict[str, object]:
        """Returns the fields, with fp8 tensors as uint8, because `pickle` alone cannot load torch's fp8 tensors."""
        narrow = {name: t for name, t in self._tensors().items() if t.itemsize == 1}
        state = self.__dict__ | {name: t.view(torch.uint8) for name, t in narrow.items()}
        return state | {"dtypes": {name: dtype_name(t.dtype) for name, t in narrow.items()}}

    def __setstate__(self, state: dict[str, object]) -> None:
        dtypes = state["dtypes"]
        typed = {name: state[name].view(getattr(torch, dtype)) for name, dtype in dtypes.items()}
        self.__dict__.update({name: value for name, value in (state | typed).items() if name != "dtypes"})


torch.serialization.add_safe_globals([Quantized])  # for torch.load(weights_only=True)


# Two directions of one tensor. The first is along rows. The second is along tokens or, for a weight, its transpose.
Pair = tuple[Quantized, Quantized]
# What `given` returns: a pair, its first alone, or None twice for a tensor.
Given = tuple[Quantized | None, Quantized | None]
# The ways out, for errors about a weight in one direction.
ONE_DIRECTION = "pass both of the pair, or a weight in format 'blockwise', which serves both directions alone"
_OP = "scaled_grouped_mm"


def quantize_rows(
    x: Tensor,
    format: str,
    *,
    offs: Tensor | None = None,
    indices: Tensor | None = None,
    top_k: int | None = None,
    dtype: torch.dtype | None = None,
    rounding: str | None = None,
) -> Quantized:
    """Quantizes along rows: the left operand of the forward product. `ops.quantize_rows` describes the arguments."""
    q, scale = ops.quantize_rows(x, format, offs=offs, indices=indices, top_k=top_k, dtype=dtype, rounding=rounding)
    return Quantized(q, scale, format, "rows", offs, rounding=_rounding(format, rounding))


def quantize_tokens(
    x: Tensor,
    format: str,
    *,
    offs: Tensor,
    indices: Tensor | None = None,
    top_k: int | None = None,
    align: int | None = None,
    dtype: torch.dtype | None = None,
    rounding: str | None = None,
    amax: str = "group",
) -> Quantized:
    """Quantizes along the tokens of groups: an operand of wgrad. `ops.quantize_tokens` describes the arguments."""
    q_t, scale_t, padded_offs = ops.quantize_tokens(
        x, format, offs=offs, indices=indices, top_k=top_k, align=align, dtype=dtype, rounding=rounding, amax=amax
    )
    return _along_tokens(q_t, scale_t, format, padded_offs, align, rounding)


def quantize_both(
    x: Tensor,
    format: str,
    *,
    offs: Tensor,
    indices: Tensor | None = None,
    top_k: int | None = None,
    align: int | None = None,
    dtype: torch.dtype | None = None,
    rounding: str | None = None,
    amax: str = "group",
) -> tuple[Quantized, Quantized]:
    """Quantizes along rows and along tokens, from one read of x. `ops.quantize_both` describes the arguments.

    amax "batch" with indices raises, because the op would then return rows of x, and not rows of the groups.
    """
    if amax == "batch" and indices is not None:
        raise RuntimeError("quantize_both: amax must not be 'batch' with indices, got 'batch'")
    q, scale, q_t, scale_t, padded_offs = ops.quantize_both(
        x, format, offs=offs, indices=indices, top_k=top_k, align=align, dtype=dtype, rounding=rounding, amax=amax
    )
    rows = Quantized(q, scale, format, "rows", offs, rounding=_rounding(format, rounding))
    return rows, _along_tokens(q_t, scale_t, format, padded_offs, align, rounding)


def quantize_weight(
    w: Tensor, format: str, *, dtype: torch.dtype | None = None, rounding: str | None = None
) -> tuple[Quantized, Quantized]:
    """Quantizes w [E, N, K] and its transpose [E, K, N]. See `ops.quantize_weight` for details.

    w may have any strides. The transposed view of a contiguous [E, K, N] is not copied.

    Returns:
        the operand of the forward product, and the operand of dgrad. In format "blockwise" the first operand is enough:
        if you drop the second to save a byte per element, backward transposes the first.
    """
    if isinstance(w, Tensor) and w.dim() == 3 and lies_transposed(w):
        q_t, scale_t, q, scale = ops.quantize_weight(row_major(w.mT), format, dtype=dtype, rounding=rounding)
    else:
        w = row_major(w) if isinstance(w, Tensor) and w.dim() == 3 else w  # the op refuses all else
        q, scale, q_t, scale_t = ops.quantize_weight(w, format, dtype=dtype, rounding=rounding)
    rounding = _rounding(format, rounding)
    first = Quantized(q, scale, format, rounding=rounding)
    return first, Quantized(q_t, scale_t, format, transposed=True, rounding=rounding)


def scaled_grouped_mm(
    a: Quantized,
    b: Quantized,
    offs: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = True,
) -> Tensor:
    """Multiplies two quantized operands, group by group. The sum runs along the last dimension of both.

        a [M, K] along rows,   b [E, N, K] a weight:       out[r] = a[r] @ b[e]^T for the rows r of group e
        a [N, P] along tokens, b [K, P] along tokens:      out[e] = a[:, p] @ b[:, p]^T over the positions p of group e

    Rows that are in no group, and the product of an empty group, are zero. See `ops.scaled_grouped_mm` for details.

    Args:
        a, b: operands of the same format. Along tokens, both must have the same groups, padded to the same multiple.
        offs: [E] int32, exclusive ends of the groups of rows; None if a has offs.
        out_dtype: bfloat16 (default) or float32.
        use_fast_accum: let a GEMM of "rowwise" accumulate whole sums in the tensor cores' own precision.

    Returns:
        out [M, N], or [E, N, K], contiguous.

    Raises:
        RuntimeError: the operands do not fit together; the text names the argument.
    """
    for arg, x in (("a", a), ("b", b)):
        if not isinstance(x, Quantized):
            fail(_OP, f"{arg} must be a Quantized, got {type(x).__name__}")
        _check_tensors(_OP, arg, x)
    check_format(_OP, a.format)
    check_one_of(_OP, "along of a", a.along, ("rows", "tokens"))
    if b.format != a.format:
        fail(_OP, f"b must have the format of a, '{a.format}', got '{b.format}'")
    if b.along != a.along:
        fail(_OP, f"b must be quantized along {a.along} as a is, got along {b.along}")
    if b.align != a.align:
        fail(_OP, f"b must be padded to {a.align} as a is, got {b.align}")
    if a.along == "rows" and b.q.dim() != 3:
        fail(_OP, f"b must be a weight of 3 dimensions, got {b.q.dim()}")
    if a.along == "tokens":
        _validate_groups(a, b)
    if offs is None:
        offs = a.offs
    elif a.offs is not None and a.offs is not offs:
        fail(_OP, "offs must be None where a has its own, got another tensor")
    if offs is None:
        fail(_OP, "offs must be given where a has none, got None")
    scale_b = FORMATS[b.format].transposed_scale(b.scale)
    rounding = common_rounding(a.rounding, b)
    options = dict(align=a.align, out_dtype=out_dtype, use_fast_accum=use_fast_accum, rounding=rounding)
    return ops.scaled_grouped_mm(a.q, b.q.mT, a.scale, scale_b, a.format, offs, **options)


def given(op: str, arg: str, x: object, format: str | None, weight: bool = False) -> Given:
    """Checks an operand that a caller may have quantized already, for a recipe with `format`."""
    if isinstance(x, Tensor):
        return None, None
    pair = x if isinstance(x, (tuple, list)) else (x, None)
    if len(pair) != 2 or not isinstance(pair[0], Quantized) or not isinstance(pair[1], (Quantized, type(None))):
        cause = "; pass its operand()" if hasattr(x, "operand") else ""
        fail(op, f"{arg} must be a tensor, a Quantized or a pair of them, got {type(x).__name__}{cause}")
    directions = ("rows", False), ("rows", True) if weight else ("tokens", False)
    for quantized, (along, transposed) in zip(pair, directions, strict=True):
        if quantized is None:
            continue
        _check_tensors(op, arg, quantized)
        refuse_derivatives_of(op, arg, quantized.q, quantized.scale)
        if format is None:
            fail(op, f"{arg} must be a tensor with recipe 'bf16', got '{quantized.format}'")
        if quantized.format != format:
            fail(op, f"{arg} must be of the recipe's format '{format}', got '{quantized.format}'")
        if quantized.along != along:
            fail(op, f"{arg} must be quantized along {along}, got {quantized.along}")
        if quantized.transposed != transposed:
            which = "second" if transposed else "first"
            fail(op, f"{arg} must have what quantize_weight returns {which} there, got the other one")
    first, second = pair
    if second is not None:
        _check_pair(op, arg, first, second, weight)
    return first, second


def _shards(op: str, q: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Returns this rank's parts of DTensors."""
    from torch.distributed.tensor import Shard  # imported here, because it takes long to load

    for name, t in (("q", q), ("scale", scale)):
        if not is_dtensor(t):
            fail(op, f"{name} must be a DTensor where the other is one, got a tensor")
        if tuple(t.placements) != (Shard(0),):
            fail(op, f"{name} must be sharded by expert, (Shard(dim=0),), got {t.placements}")
    if q.device_mesh != scale.device_mesh:
        fail(op, f"scale must be on the mesh of q, {q.device_mesh}, got {scale.device_mesh}")
    return q.to_local(), scale.to_local()


def _check_pair(op: str, arg: str, first: Quantized, second: Quantized, weight: bool) -> None:
    """Checks that both are of one tensor, as far as shapes tell."""
    got = tuple(second.q.shape)
    if first.q.dim() != (3 if weight else 2):
        return  # the caller raises an error about the dimensions
    if weight:
        wanted = (*first.q.shape[:-2], first.q.shape[-1], first.q.shape[-2])
    elif second.offs is not None and isinstance(first.q.shape[0], int):
        wanted = first.q.shape[-1], padded_extent(first.q.shape[0], second.offs.shape[0], second.align)
    else:
        wanted = first.q.shape[-1], got[-1]
    if got != wanted:
        fail(op, f"{arg} must be two of one tensor, the second of shape {wanted}, got {got}")


def _check_tensors(op: str, arg: str, x: Quantized) -> None:
    for name, got in (("q", x.q), ("scale", x.scale)):
        if not isinstance(got, Tensor):
            fail(op, f"{name} of {arg} must be a tensor, got {type(got).__name__}")


def _validate_groups(a: Quantized, b: Quantized) -> None:
    """With MOE_FP8_VALIDATE=1, checks that both have the same groups."""
    if torch.compiler.is_compiling() or not validates() or a.offs is None or b.offs is None:
        return
    if has_values(a.offs) and has_values(b.offs) and a.offs.tolist() != b.offs.tolist():
        fail(_OP, f"b must be of the groups of a, which end at {a.offs.tolist()}, got {b.offs.tolist()}")


def common_rounding(rounding: str | None, *operands: Quantized | None) -> str | None:
    """Returns the rounding if the scales of all given operands have it, otherwise None."""
    for x in operands:
        if x is not None and x.rounding != rounding:
            return None
    return rounding


def _rounding(format: str, rounding: str | None) -> str:
    return FORMATS[format].roundings[0] if rounding is None else rounding


def _along_tokens(
    q_t: Tensor, scale_t: Tensor, format: str, padded_offs: Tensor, align: int | None, rounding: str | None
) -> Quantized:
    align = FORMATS[format].align if align is None else align
    return Quantized(q_t, scale_t, format, "tokens", padded_offs, align, rounding=_rounding(format, rounding))
