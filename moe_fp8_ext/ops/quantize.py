"""The quantizers: to fp8 along rows, along the tokens of each group, both ways from one read, or as weights."""

import torch
from torch import Tensor

from moe_fp8_ext.ops.checks import (
    check,
    check_amax,
    check_dims,
    check_format,
    check_groups,
    check_indices,
    check_rounding,
    check_size,
    fp8_dtype,
    require,
)
from moe_fp8_ext.ops.dispatch import refuse_derivatives
from moe_fp8_ext.quantization.format import padded_extent

_rows = torch.ops.moe_fp8.quantize_rows.default
_tokens = torch.ops.moe_fp8.quantize_tokens.default
_both = torch.ops.moe_fp8.quantize_both.default
_weight = torch.ops.moe_fp8.quantize_weight.default


def quantize_rows(
    x: Tensor,
    format: str,
    *,
    offs: Tensor | None = None,
    indices: Tensor | None = None,
    top_k: int | None = None,
    dtype: torch.dtype | None = None,
    rounding: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantizes every scaling block of every row to fp8, along its features.

        amax of a block = max |x| over its elements; m and scale follow from it by the format's rule
        q[r, k] = cast(x[r, k] * m[r, block of k]), to nearest even, saturating;  x ~ q * scale

    | format | a block | scale | roundings, the usual one first |
    | --- | --- | --- | --- |
    | "rowwise" | a row | float32 [...] | "exact", "pow2" |
    | "blockwise" | 128 features | float32 [M, ceil(K / 128)], column-major | "exact", "pow2" |
    | "mxfp8" | 32 features | float8_e8m0fnu, blocked | "rceil", "floor" |
    | "mxfp8_rowmajor" | 32 features | float8_e8m0fnu [M, ceil(K / 32)] | "rceil", "floor" |

    Float scales: m = RN32(FP8_MAX / max(amax, 1e-12)), its mantissa cleared by "pow2", and scale = RN32(1 / m). E8M0
    scales are powers of two, the byte e is 2^(e - 127): "rceil" rounds amax / FP8_MAX up, so that nothing saturates;
    "floor" is 2^(floor(log2 amax) - floor(log2 FP8_MAX)), the rule of the OCP specification. The last block of a row
    may be short. A NaN or an Inf poisons its own block and no other. Never waits for the device.

    Args:
        x: [M, K], bfloat16, float16 or float32; stride 1 along K, other strides free. Format "rowwise" takes 1 to 7
            dimensions [..., K] where indices are None.
        format: as above.
        offs: [E] int32 on x's device, exclusive end row of each group, non-decreasing, at most 1024. Scales of "mxfp8"
            are then blocked group by group; other formats look the same with and without. Contents are clamped into
            [0, M] and made monotonic; MOE_FP8_VALIDATE=1 checks them, which waits for the device.
        indices: [P] int32 on x's device: quantizes `permute_pad(x, indices, top_k)` instead, byte for byte, whose rows
            never exist. One that is not in [0, M * top_k) gives a row of zeros.
        top_k: slots of a row of x, given with indices and only then: index i stands for row i // top_k.
        dtype: float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz; None is the device's own.
        rounding: one of those that the format knows; None is its usual one.

    Returns:
        q of `dtype`, shaped as x, with indices [P, K], contiguous; scale as above, with P in place of M. Column-major
        scales have the stride (1, round_up(M, 4)), zeros between the columns. Blocked ones are [round_up(M, 128),
        round_up(KB, 4)], KB = ceil(K / 32), with offs [M + 128 E, round_up(KB, 4)], as `swizzle_scales` makes them;
        padding is the byte 0, and rows from `offs[-1]` on are in q and have no scale.

    Raises:
        RuntimeError: dtype, dimensions, strides, device, format or rounding are not as above, or x asks for a
            derivative, which quantizing has none of; the text names the argument.

    Source: DESIGN.md section 3; torchao's rowwise float8 recipe ("rowwise"); DeepSeek-V3 technical report, section
        3.3.2 ("blockwise"); OCP Microscaling Formats specification 1.0, section 6.3, and NVIDIA cuBLAS, "1D block
        scaling" ("mxfp8").
    """
    return _rows(x, format, offs, indices, top_k, dtype, rounding)


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizes along the tokens of each group, transposed and group-padded: the operand of wgrad.

        q_t[k, pos(r)] = cast(x[r, k] * m[k, block of r]),  pos(r) = padded start of the group + r - start of the group

    with m and scale_t from the amax of a block as in `quantize_rows`. A block is a column of a group ("rowwise"), 128
    ("blockwise") or 32 ("mxfp8", "mxfp8_rowmajor") tokens of one. Blocks begin anew with every group and never cross
    its end; those of 128 count every group as rounded up to `align` and to 128. All bytes of `q_t` that belong to no
    row are zero, and so are scales of blocks without rows; "rowwise" gives an empty group the scale of amax 0. Rows
    from `offs[-1]` on belong to no group. Never waits for the device.

    With amax "batch" a column has one scale for all groups, which is that of the rows of all of them: a row of x is
    then cast once, however many indices stand for it, and its bytes are moved. The amax is over finite values; one that
    is not finite becomes the NaN of the dtype and touches no other. A GPU needs M * K bytes and 4 for every position
    while it runs.

    With amax "square" a block is of 128 tokens and 128 neighbouring columns, from a multiple of 128 on, which have one
    scale: `scaled_grouped_mm` then scales whole tiles. A value loses nothing by it that is above 1 / 28,672 of its
    square's largest (E4M3; twice that with "pow2").

    Args:
        x: [M, K], bfloat16, float16 or float32; stride 1 along K, row stride free.
        format: "rowwise", "blockwise", "mxfp8" or "mxfp8_rowmajor".
        offs: [E] int32 on x's device, exclusive end row of each group, non-decreasing, at most 1024; with indices, end
            index. Contents are clamped and made monotonic; MOE_FP8_VALIDATE=1 checks them, which waits for the device.
        indices, top_k: as in `quantize_rows`; M is then the number of indices.
        align: each group is padded to a multiple of it inside `q_t`; a power of two from 1 to 256, of the MX formats
            from 32 to 128. None is the format's usual one, 32: what the GEMMs of tensor cores sum at once.
        dtype, rounding: as in `quantize_rows`.
        amax: of what a column's largest value is: its "group", in blocks if the format has such; with "rowwise" the
            "batch", too, the rows of all groups; with "blockwise" the "square".

    Returns:
        q_t [K, P] of `dtype`, P = round_up(M, align) + E * align, contiguous; scale_t; padded_offs [E] int32, the
        exclusive end of each group among the P positions. scale_t is
        [E, K] float32 ("rowwise");
        [K, B] float32, stride (1, round_up(K, 4)), B = (round_up(M, a) + E * a) / 128, a = max(align, 128)
        ("blockwise"); with amax "square" ceil(K / 128) in place of K;
        [round_up(K, 128), P / 32 + 4 E] float8_e8m0fnu, every group a blocked matrix of its own ("mxfp8");
        [K, P / 32] float8_e8m0fnu ("mxfp8_rowmajor").

    Raises:
        RuntimeError: as of `quantize_rows`, and for `align` and `amax`.

    Source: `quantize_rows`; padded layout of DESIGN.md section 4.
    """
    return _tokens(x, format, offs, indices, top_k, align, dtype, rounding, amax)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`quantize_rows` and `quantize_tokens` of one tensor, byte for byte, from one read of it.

    Never waits for the device.

    Args:
        x, format, offs, indices, top_k, align, dtype, rounding, amax: as in `quantize_tokens`. With amax "batch" rows
            are those of x, once each, whatever indices there are; x is then read twice, and cast twice.

    Returns:
        q, scale, as `quantize_rows` returns them for offs, with amax "batch" those of x alone, [M, K] and [M]; and q_t,
        scale_t, padded_offs. Tail rows, from `offs[-1]` on, are in q like any other and not in q_t.

    Raises:
        RuntimeError: as of `quantize_tokens`.

    Source: `quantize_rows` and `quantize_tokens`.
    """
    return _both(x, format, offs, indices, top_k, align, dtype, rounding, amax)


def quantize_weight(
    w: Tensor, format: str, *, dtype: torch.dtype | None = None, rounding: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantizes every expert's weight along both of its dimensions, from one read, for the forward pass and for dgrad.

        q[e, n, k]   = cast(w[e, n, k] * m[e, block of (n, k)])     blocks along k
        q_t[e, k, n] = cast(w[e, n, k] * m_t[e, block of (k, n)])   blocks along n

    with m and scales from the amax of a block as in `quantize_rows`. A block of "blockwise" is a square of 128 x 128,
    the same both ways; those of other formats are as in `quantize_rows`. Never waits for the device.

    Args:
        w: [E, N, K], at most 1024 experts, bfloat16, float16 or float32; stride 1 along K, other strides free.
        format, dtype, rounding: as in `quantize_rows`.

    Returns:
        q [E, N, K] and q_t [E, K, N] of `dtype`. scale and scale_t are
        [E, N] and [E, K] float32 ("rowwise");
        [E, ceil(N / 128), ceil(K / 128)] float32 and its transpose ("blockwise");
        [E, round_up(N, 128) * round_up(ceil(K / 32), 4)] float8_e8m0fnu, blocked expert by expert, and the same with K
        and N exchanged ("mxfp8");
        [E, N, ceil(K / 32)] and [E, K, ceil(N / 32)] float8_e8m0fnu ("mxfp8_rowmajor").
        In the order q, scale, q_t, scale_t, all contiguous.

    Raises:
        RuntimeError: dtype, dimensions, strides, format or rounding are not as above, or w asks for a derivative, which
            quantizing has none of; the text names the argument.

    Source: `quantize_rows`, of each expert and of its transpose.
    """
    return _weight(w, format, dtype, rounding)


for _op in (_rows, _tokens, _both, _weight):
    refuse_derivatives(_op)


def _rows_of(op: str, x: Tensor, indices: Tensor | None, top_k: int | None) -> tuple[str, int]:
    """The argument that has the rows, and their number."""
    check_dims(op, "x", x, 2, 2)
    check_size(op, "x", x.shape[0], "rows")
    if indices is None:
        return "x", x.shape[0]
    check_indices(op, indices, x, x.shape[0], top_k)
    return "indices", indices.shape[0]


def _fake(op, x, format, offs, indices, top_k, align, dtype, rounding, along_rows, along_tokens, amax="group"):
    check(op, "x", x)
    format = check_format(op, format)
    check_rounding(op, format, rounding)
    check_amax(op, format, amax)
    require(indices is None or top_k is not None, f"{op}: top_k must be given with indices, got None")
    require(top_k is None or indices is not None, f"{op}: indices must be given with top_k, got None")
    if format.block or along_tokens or indices is not None:
        arg, rows = _rows_of(op, x, indices, top_k)
        shape = rows, x.shape[1]
    else:
        arg, shape = "x", tuple(x.shape)
    e, k = None, x.shape[-1]
    if along_tokens or offs is not None:
        check(op, "offs", offs, x)
        e = offs.shape[0]
    if e is not None and (along_tokens or format.order == "blocked"):
        align = check_groups(op, e, arg, rows, format, align)
    dtype = fp8_dtype(op, dtype, x)
    outputs = []
    if along_rows:
        of_rows = tuple(x.shape) if amax == "batch" else shape
        scale = format.scale_of_rows(of_rows, e).empty(x, format.scale_dtype)
        outputs += [x.new_empty(of_rows, dtype=dtype), scale]
    if along_tokens:
        of_tokens = format.scale_of_tokens(k, format.token_blocks(rows, e, align), e, amax)
        scale_t = of_tokens.empty(x, format.scale_dtype)
        q_t = x.new_empty((k, padded_extent(rows, e, align)), dtype=dtype)
        outputs += [q_t, scale_t, x.new_empty((e,), dtype=torch.int32)]
    return tuple(outputs)


@torch.library.register_fake("moe_fp8::quantize_rows")
def _(x, format, offs=None, indices=None, top_k=None, dtype=None, rounding=None):
    return _fake("quantize_rows", x, format, offs, indices, top_k, None, dtype, rounding, True, False)


@torch.library.register_fake("moe_fp8::quantize_tokens")
def _(x, format, offs, indices=None, top_k=None, align=None, dtype=None, rounding=None, amax="group"):
    return _fake("quantize_tokens", x, format, offs, indices, top_k, align, dtype, rounding, False, True, amax)


@torch.library.register_fake("moe_fp8::quantize_both")
def _(x, format, offs, indices=None, top_k=None, align=None, dtype=None, rounding=None, amax="group"):
    return _fake("quantize_both", x, format, offs, indices, top_k, align, dtype, rounding, True, True, amax)


@torch.library.register_fake("moe_fp8::quantize_weight")
def _(w, format, dtype=None, rounding=None):
    op = "quantize_weight"
    check(op, "w", w)
    format = check_format(op, format)
    check_rounding(op, format, rounding)
    dtype = fp8_dtype(op, dtype, w)
    e, n, k = w.shape
    return (
        w.new_empty((e, n, k), dtype=dtype),
        format.scale_of_weight(e, n, k).empty(w, format.scale_dtype),
        w.new_empty((e, k, n), dtype=dtype),
        format.scale_of_weight(e, k, n).empty(w, format.scale_dtype),
    )
