"""The quantizers: along rows, along the tokens of each group, along both from one read, and of weights."""

from functools import partial

import torch
from torch import Tensor

from moe_fp8_ext.ops.checks import (
    check_amax,
    check_both_or_none,
    check_dims,
    check_format,
    check_groups,
    check_indices,
    check_one_of,
    check_size,
    fp8_dtype,
)
from moe_fp8_ext.ops.dispatch import fake

_quantize_rows = torch.ops.moe_fp8.quantize_rows.default
_quantize_tokens = torch.ops.moe_fp8.quantize_tokens.default
_quantize_both = torch.ops.moe_fp8.quantize_both.default
_quantize_weight = torch.ops.moe_fp8.quantize_weight.default


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
    """Quantizes every scaling block of every row to FP8, along the features.

        amax     = max |x| over the block;  m and scale follow from amax by the rule of the format
        q[r, k]  = cast(x[r, k] * m[r, block of k])     to nearest even, saturating;  x ~ q * scale

    - "rowwise": a row shares a scale, float32 [...]; roundings "exact" (default) and "pow2";
    - "blockwise": 128 features, float32 [M, ceil(K / 128)], column-major; the same roundings;
    - "mxfp8": 32 features, float8_e8m0fnu, blocked; roundings "rceil" (default) and "floor";
    - "mxfp8_rowmajor": 32 features, float8_e8m0fnu [M, ceil(K / 32)]; the same roundings.

    Float scales: m = RN32(FP8_MAX / max(amax, 1e-12)) and scale = RN32(1 / m); "pow2" clears the mantissa of m.

    E8M0 scales are powers of two: byte e stands for 2^(e - 127). "rceil" rounds amax / FP8_MAX up, so nothing
    saturates. "floor" gives 2^(floor(log2 amax) - floor(log2 FP8_MAX)), the rule of the OCP specification.

    The last block of a row may be short. A NaN or an Inf poisons its own block and no other.

    Args:
        x: [M, K], bfloat16, float16 or float32; stride 1 along K, any other strides. Format "rowwise" without indices
            takes 1 to 7 dimensions [..., K].
        format: one of the formats above.
        offs: [E] ends of groups of rows, as in `moe_fp8_ext.ops`. With offs, "mxfp8" scales are blocked group by group;
            the layout of other formats does not depend on it.
        indices: [P] int32 on x's device. The op then quantizes `permute_pad(x, indices, top_k)`, byte for byte, without
            storing its rows. An index that is not in [0, M * top_k) gives a row of zeros.
        top_k: slots per row of x, required with indices, otherwise None: index i stands for row i // top_k.
        dtype: float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz; None: the default of the device.
        rounding: one of the format's roundings; None: its default.

    Returns:
        q of `dtype`, shaped as x ([P, K] with indices), contiguous.

        scale, shaped as above, with P in place of M if there are indices. Column-major scales have the strides (1,
        round_up(M, 4)), with zeros between the columns. Blocked scales have the shape
        [round_up(M, 128), round_up(KB, 4)], KB = ceil(K / 32), or [M + 128 E, round_up(KB, 4)] with offs, as
        `swizzle_scales` makes them. Their padding is the byte 0; rows from `offs[-1]` on are in q but have no scale.

    Source: DESIGN.md section 3; torchao's rowwise float8 recipe ("rowwise"); DeepSeek-V3 technical report,
        section 3.3.2 ("blockwise"); OCP Microscaling Formats specification 1.0, section 6.3, and NVIDIA cuBLAS, "1D
        block scaling" ("mxfp8").
    """
    return _quantize_rows(x, format, offs, indices, top_k, dtype, rounding)


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
    """Quantizes along the tokens of each group, transposed and group-padded: an operand of wgrad.

        q_t[k, pos(r)] = cast(x[r, k] * m[k, block of r]),   pos(r) = padded start of r's group + r - start of r's group

    m and scale_t follow from the amax of a block as in `quantize_rows`. A block is a column of a group ("rowwise"), or
    128 ("blockwise") or 32 ("mxfp8", "mxfp8_rowmajor") tokens of a column of a group. Every group begins with a new
    block, and no block crosses the end of its group. Blocks of 128 are numbered as if every group were padded to
    `align` and to 128.

    Bytes of `q_t` that belong to no row are zero, and so are scales of blocks without rows; "rowwise" gives an empty
    group the scale of amax 0. Rows from `offs[-1]` on belong to no group.

    amax="batch" gives a column one scale for all groups, from the rows of all groups. If several indices stand for a
    row of x, the row is cast once, and its bytes are copied. Only finite values count for the amax. A value that is not
    finite becomes the NaN of the dtype and changes no other value. A GPU needs M * K bytes, plus 4 bytes per position,
    while the op runs.

    amax="square" makes a block of 128 tokens by 128 neighbouring columns, from a multiple of 128 on.
    `scaled_grouped_mm` then scales whole tiles. In E4M3, a value above 1 / 28,672 of the largest of its square keeps
    its precision; with "pow2", a value above twice that.

    Args:
        x: [M, K], bfloat16, float16 or float32; stride 1 along K, any row stride.
        format: "rowwise", "blockwise", "mxfp8" or "mxfp8_rowmajor".
        offs: [E] ends of groups of rows, or of indices if there are any, as in `moe_fp8_ext.ops`.
        indices, top_k: as in `quantize_rows`; M is then the number of indices.
        align: each group is padded to a multiple of this inside `q_t`; a power of two, from 1 to 256, in MX formats
            from 32 to 128. None: the format's default, 32, because GEMMs on tensor cores sum 32 tokens at once.
        dtype, rounding: as in `quantize_rows`.
        amax: granularity of the scales along tokens: "group" (default); with format "rowwise" also "batch"; with format
            "blockwise" also "square".

    Returns:
        q_t [K, P] of `dtype`, P = round_up(M, align) + E * align, contiguous.

        scale_t:

        - "rowwise": [E, K] float32;
        - "blockwise": [K, B] float32 with strides (1, round_up(K, 4)), where B = (round_up(M, a) + E * a) / 128 and a =
          max(align, 128); with amax "square" ceil(K / 128) in place of K;
        - "mxfp8": [round_up(K, 128), P / 32 + 4 E] float8_e8m0fnu, each group a separate blocked matrix;
        - "mxfp8_rowmajor": [K, P / 32] float8_e8m0fnu.

        padded_offs [E] int32, the exclusive end of each group among the P positions.

    Raises:
        RuntimeError: as `quantize_rows` does, and for `align` and `amax`.

    Source: `quantize_rows`; padded layout of DESIGN.md section 4.
    """
    return _quantize_tokens(x, format, offs, indices, top_k, align, dtype, rounding, amax)


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
    """Quantizes along rows and along tokens, from one read of x.

        q, scale                  = quantize_rows(x, format, offs=offs, ...)
        q_t, scale_t, padded_offs = quantize_tokens(x, format, offs=offs, ...)

    The results have the bytes of these two calls.

    Args:
        x, format, offs, indices, top_k, align, dtype, rounding, amax: as in `quantize_tokens`. With amax "batch", q
            has each row of x once, for any indices, and the op reads and casts x twice.

    Returns:
        q and scale, as `quantize_rows` returns them for offs; with amax "batch" for the rows of x, [M, K] and [M].
        Then q_t, scale_t and padded_offs. Tail rows, from `offs[-1]` on, are in q, and not in q_t.
    """
    return _quantize_both(x, format, offs, indices, top_k, align, dtype, rounding, amax)


def quantize_weight(
    w: Tensor,
    format: str,
    *,
    dtype: torch.dtype | None = None,
    rounding: str | None = None,
    directions: str = "both",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantizes the weight of every expert along one or both of its dimensions, for forward and dgrad.

        q[e, n, k]   = cast(w[e, n, k] * m[e, block of (n, k)])       blocks along k
        q_t[e, k, n] = cast(w[e, n, k] * m_t[e, block of (k, n)])     blocks along n

    m, m_t and the scales follow from the amax of a block as in `quantize_rows`. A block of "blockwise" is a square of
    128 x 128, the same for both dimensions; blocks of other formats are as in `quantize_rows`.

    Args:
        w: [E, N, K], E at most 1024, bfloat16, float16 or float32; stride 1 along K, any other strides.
        format, dtype, rounding: as in `quantize_rows`.
        directions: "both" (default), from one read of w; "rows": only q and scale; "transposed": only q_t and scale_t.
            The bytes of a direction do not depend on this argument.

    Returns:
        q [E, N, K], scale, q_t [E, K, N], scale_t, all contiguous; q and q_t of `dtype`. Results of a direction that is
        left out have the shapes of no experts, E = 0. scale and scale_t are

        - "rowwise": [E, N] and [E, K] float32;
        - "blockwise": [E, ceil(N / 128), ceil(K / 128)] float32 and its transpose;
        - "mxfp8": [E, round_up(N, 128) * round_up(ceil(K / 32), 4)] float8_e8m0fnu, blocked expert by expert, and the
          same with K and N exchanged;
        - "mxfp8_rowmajor": [E, N, ceil(K / 32)] and [E, K, ceil(N / 32)] float8_e8m0fnu.
    """
    return _quantize_weight(w, format, dtype, rounding, directions)


def _outputs(along_rows, along_tokens, op, x, format, offs, indices, top_k, dtype, rounding, align=None, amax="group"):
    format = check_format(op, format, rounding)
    check_amax(op, format, amax)
    check_both_or_none(op, indices=indices, top_k=top_k)
    arg, shape = "x", tuple(x.shape)
    if format.block or along_tokens or indices is not None:
        check_dims(op, "x", x, 2, 2)
        check_size(op, "x", x.shape[0], "rows")
    if indices is not None:
        check_indices(op, x.shape[0], top_k)
        arg, shape = "indices", (indices.shape[0], x.shape[1])
    e, rows = None, shape[0]
    if along_tokens or offs is not None:
        e = offs.shape[0]
    if e is not None and (along_tokens or format.order == "blocked"):
        align = check_groups(op, e, arg, rows, format, align)
    dtype = fp8_dtype(op, dtype, x)
    outputs = []
    if along_rows:
        q_shape = tuple(x.shape) if amax == "batch" else shape
        outputs += format.empty_rows(x, q_shape, dtype, e)
    if along_tokens:
        outputs += format.empty_tokens(x, *shape, dtype, e, align, amax)
        outputs.append(x.new_empty((e,), dtype=torch.int32))
    return tuple(outputs)


fake(_quantize_rows)(partial(_outputs, True, False))
fake(_quantize_tokens)(partial(_outputs, False, True))
fake(_quantize_both)(partial(_outputs, True, True))


@fake(_quantize_weight)
def _(op, w, format, dtype, rounding, directions):
    format = check_format(op, format, rounding)
    check_one_of(op, "directions", directions, ("both", "rows", "transposed"))
    dtype = fp8_dtype(op, dtype, w)
    outputs = []
    for left_out, (e, *lines) in (("transposed", w.shape), ("rows", w.mT.shape)):
        shape = 0 if directions == left_out else e, *lines
        scale = format.scale_of_weight(*shape).empty(w, format.scale_dtype)
        outputs += [w.new_empty(shape, dtype=dtype), scale]
    return tuple(outputs)
