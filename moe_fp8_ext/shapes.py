"""Output shapes of every op, as plain integer arithmetic.

Shared by the fake implementations and the reference. Sizes may be `int` or `torch.SymInt`, so there is no `min`, no
`if` on a size and no conversion here: any of them would specialise a dynamic dimension under `torch.compile`.

Dims: M tokens, K input features, N output features, E experts, P padded tokens. Every output is contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_EXPERTS = 1024  # groups in one call
MAX_COUNTS = 4096  # ranks times local experts
BLOCK = 128  # elements of a scaling block of the blockwise recipe, along either dimension
MX_BLOCK = 32  # elements of a scaling block of the MX formats
SCALE_ROWS, SCALE_COLUMNS = 128, 4  # a block of scales as Blackwell's tensor cores read them
MAX_ROWS = (1 << 31) - 256  # int32 offsets, and tiles that reach beyond the last one

Shape = tuple[int, ...]


def round_up(size: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is not below `size`."""
    return (size + multiple - 1) // multiple * multiple


def padded_extent(m: int, e: int, align: int) -> int:
    """Returns P, the token extent of a group-padded operand.

    Padding every group to `align` adds fewer than `align` tokens a group, so the bound holds for all group sizes and
    no shape depends on the contents of `offs`.
    """
    return round_up(m, align) + e * align


def quantize_rowwise(x: Sequence[int]) -> tuple[Shape, Shape]:
    """x [..., K] -> q [..., K], scale [...]."""
    return tuple(x), tuple(x[:-1])


def quantize_colwise(x: Sequence[int], e: int, align: int) -> tuple[Shape, Shape, Shape]:
    """x [M, K] -> q_t [K, P], scale_t [E, K], padded_offs [E]."""
    m, k = x
    return (k, padded_extent(m, e, align)), (e, k), (e,)


def quantize_rowcol(x: Sequence[int], e: int, align: int) -> tuple[Shape, Shape, Shape, Shape, Shape]:
    """x [M, K] -> q [M, K], scale [M], q_t [K, P], scale_t [E, K], padded_offs [E]."""
    return *quantize_rowwise(x), *quantize_colwise(x, e, align)


def quantize_weight(w: Sequence[int]) -> tuple[Shape, Shape, Shape, Shape]:
    """w [E, N, K] -> q [E, N, K], scale [E, N], q_t [E, K, N], scale_t [E, K]."""
    e, n, k = w
    return (e, n, k), (e, n), (e, k, n), (e, k)


def quantize_1x128(x: Sequence[int]) -> tuple[Shape, Shape, Shape]:
    """x [M, K] -> q [M, K], scale [M, ceil(K / 128)] and its stride: column-major, columns at multiples of 16 bytes."""
    m, k = x
    return (m, k), (m, round_up(k, BLOCK) // BLOCK), (1, round_up(m, 4))


def blocks_extent(m: int, e: int, align: int) -> int:
    """Returns B, the scaling blocks along the tokens of a group-padded operand: every group begins with a new one."""
    return padded_extent(m, e, max(align, BLOCK)) // BLOCK


def quantize_128x1(x: Sequence[int], e: int, align: int, transpose: bool) -> tuple[Shape, Shape, Shape, Shape]:
    """x [M, K] -> q_t [K, P], scale_t [K, B] and its stride, padded_offs [E]; [P, K] and [B, K] if not transposed."""
    m, k = x
    p, b, stride = padded_extent(m, e, align), blocks_extent(m, e, align), round_up(k, 4)
    return ((k, p), (k, b), (1, stride), (e,)) if transpose else ((p, k), (b, k), (stride, 1), (e,))


def quantize_128x128(w: Sequence[int]) -> tuple[Shape, Shape, Shape]:
    """w [E, N, K] -> q [E, N, K], q_t [E, K, N], scale [E, ceil(N / 128), ceil(K / 128)]."""
    e, n, k = w
    return (e, n, k), (e, k, n), (e, round_up(n, BLOCK) // BLOCK, round_up(k, BLOCK) // BLOCK)


def swizzle_scales_2d(scale: Sequence[int]) -> Shape:
    """scale [R, C] -> blocked [round_up(R, 128), round_up(C, 4)]."""
    rows, columns = scale
    return round_up(rows, SCALE_ROWS), round_up(columns, SCALE_COLUMNS)


def swizzle_scales_m_groups(scale: Sequence[int], e: int) -> Shape:
    """scale [R, C] -> blocked [R + 128 E, round_up(C, 4)]: room for groups of rows, each padded to 128."""
    rows, columns = scale
    return rows + SCALE_ROWS * e, round_up(columns, SCALE_COLUMNS)


def swizzle_scales_k_groups(scale: Sequence[int], e: int) -> Shape:
    """scale [R, C] -> blocked [round_up(R, 128), C + 4 E]: room for groups of columns, each padded to 4."""
    rows, columns = scale
    return round_up(rows, SCALE_ROWS), columns + SCALE_COLUMNS * e


def swizzle_scales_3d(scale: Sequence[int]) -> Shape:
    """scale [E, R, C] -> blocked [E, round_up(R, 128) * round_up(C, 4)]."""
    e, *of_expert = scale
    rows, columns = swizzle_scales_2d(of_expert)
    return e, rows * columns


def unswizzle_scales_2d(rows: int, cols: int) -> Shape:
    """blocked -> scale [rows, cols]; the ops with groups give the same shape."""
    return rows, cols


def unswizzle_scales_3d(blocked: Sequence[int], rows: int, cols: int) -> Shape:
    """blocked [E, bytes of an expert] -> scale [E, rows, cols]."""
    return blocked[0], rows, cols


def quantize_mx_1x32(x: Sequence[int], blocked: bool, e: int | None = None) -> tuple[Shape, Shape]:
    """x [M, K] -> q [M, K], scale [M, ceil(K / 32)]; blocked as a matrix or, with E groups, by groups of rows."""
    m, k = x
    scale = m, round_up(k, MX_BLOCK) // MX_BLOCK
    if blocked:
        scale = swizzle_scales_2d(scale) if e is None else swizzle_scales_m_groups(scale, e)
    return (m, k), scale


def quantize_mx_32x1(x: Sequence[int], e: int, align: int, blocked: bool) -> tuple[Shape, Shape, Shape]:
    """x [M, K] -> q_t [K, P], scale_t [K, P / 32], blocked by groups of columns, padded_offs [E]."""
    m, k = x
    p = padded_extent(m, e, align)
    scale_t = k, p // MX_BLOCK
    return (k, p), swizzle_scales_k_groups(scale_t, e) if blocked else scale_t, (e,)


def quantize_mx_weight(w: Sequence[int]) -> tuple[Shape, Shape, Shape, Shape]:
    """w [E, N, K] -> q [E, N, K], its scales by expert, q_t [E, K, N], its scales by expert."""
    e, n, k = w
    scale, scale_t = ((e, rows, round_up(size, MX_BLOCK) // MX_BLOCK) for rows, size in ((n, k), (k, n)))
    return (e, n, k), swizzle_scales_3d(scale), (e, k, n), swizzle_scales_3d(scale_t)


def scaled_grouped_mm(a: Sequence[int], b: Sequence[int], e: int) -> Shape:
    """a [M, K], b [E, K, N] -> out [M, N]; a [N, P], b [P, K] -> out [E, N, K]."""
    rows, columns = a[0], b[-1]
    return (rows, columns) if len(b) == 3 else (e, rows, columns)


def pad_token_groups(x: Sequence[int], e: int, align: int) -> tuple[Shape, Shape, Shape]:
    """x [M, K] -> x_padded [P, K], padded_starts [E], padded_offs [E]."""
    m, k = x
    return (padded_extent(m, e, align), k), (e,), (e,)


def pad_token_groups_to(x: Sequence[int], num_padded: int) -> Shape:
    """x [M, K] -> x_padded [num_padded, K]."""
    return num_padded, x[1]


def unpad_token_groups(y: Sequence[int], num_tokens: int) -> Shape:
    """y [P, K] -> x [num_tokens, K]."""
    return num_tokens, y[1]


def sort_tokens(topk_ids: Sequence[int], num_experts: int) -> tuple[Shape, Shape, Shape]:
    """topk_ids [T] or [T, top_k] -> permutation [T * top_k], offs [num_experts], inverse as topk_ids."""
    slots = topk_ids[0] if len(topk_ids) == 1 else topk_ids[0] * topk_ids[1]
    return (slots,), (num_experts,), tuple(topk_ids)


def permute_indices(num_tokens: int, e: int, align: int) -> tuple[Shape, Shape, Shape]:
    """-> indices [P], padded_offs [E], tokens_per_expert [E]."""
    return (padded_extent(num_tokens, e, align),), (e,), (e,)


def permute_pad(x: Sequence[int], p: int) -> Shape:
    """x [M, K], indices [P] -> out [P, K]."""
    return p, x[1]


def unpermute(y: Sequence[int], num_tokens: int) -> Shape:
    """y [P, K] -> out [num_tokens, K]."""
    return num_tokens, y[1]


def permute_pad_quantize_rowwise(x: Sequence[int], p: int) -> tuple[Shape, Shape]:
    """x [M, K], indices [P] -> q [P, K], scale [P]."""
    return quantize_rowwise((p, x[1]))


def permute_pad_quantize_rowcol(
    x: Sequence[int], p: int, e: int, align: int
) -> tuple[Shape, Shape, Shape, Shape, Shape]:
    """x [M, K], indices [P] -> the outputs of `quantize_rowcol` for [P, K]."""
    return quantize_rowcol((p, x[1]), e, align)


def combine(y: Sequence[int], inverse: Sequence[int]) -> Shape:
    """y [P, K], inverse [T, top_k] -> out [T, K]."""
    return inverse[0], y[1]


def combine_backward(
    grad: Sequence[int], inverse: Sequence[int], num_rows: int, of_scores: bool
) -> tuple[Shape, Shape]:
    """grad [T, K], inverse [T, top_k] -> grad_y [num_rows, K], grad_scores [T, top_k], or [0] if not wanted."""
    return (num_rows, grad[1]), tuple(inverse) if of_scores else (0,)
