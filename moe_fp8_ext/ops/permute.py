"""Permutation of rows, plain or quantized: from rank-major to expert-major order, and back."""

import torch
from torch import Tensor

from moe_fp8_ext.ops.checks import (
    INPUT_DTYPES,
    check_align,
    check_count,
    check_format,
    check_indices,
    check_padded,
    check_scale,
    require,
)
from moe_fp8_ext.ops.dispatch import fake, register_gradient, unit_stride
from moe_fp8_ext.quantization.format import MAX_COUNTS, MAX_EXPERTS, padded_extent

_permute_indices = torch.ops.moe_fp8.permute_indices.default
_permute_pad = torch.ops.moe_fp8.permute_pad.default
_permute_quantized = torch.ops.moe_fp8.permute_quantized.default
_unpermute = torch.ops.moe_fp8.unpermute.default


def permute_indices(
    tokens_per_rank_expert: Tensor,
    num_local_experts: int,
    num_ranks: int,
    num_tokens: int,
    align: int = 16,
    align_empty: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the permutation from rank-major to expert-major order, with the tokens of each expert padded to `align`.

    After an all-to-all, the tokens of rank 0 come first, expert by expert, then the tokens of rank 1, and so on.
    Position p of the expert-major layout holds token `indices[p]`:

        indices = for each expert: its tokens in rank-major order, then -1 up to a multiple of align

    The order of tokens within an expert is kept.

    Args:
        tokens_per_rank_expert: [num_ranks * num_local_experts] or [num_ranks, num_local_experts], int32 or int64,
            contiguous: how many tokens each rank sent for each expert; at most 4096 counts. A negative count means 0,
            and tokens beyond num_tokens are left out. With MOE_FP8_VALIDATE=1 the op raises for both.
        num_local_experts: experts of this rank, from 1 to 1024.
        num_ranks: ranks that sent tokens.
        num_tokens: M, the number of rows of tokens.
        align: each group is padded to a multiple of this; a power of two from 1 to 256. `grouped_mm` needs no padding:
            see `Recipe`.
        align_empty: whether an expert without tokens gets `align` rows of padding instead of none.

    Returns:
        indices [P] int32, P = round_up(M, align) + E * align, -1 for padding and behind the last group; padded_offs [E]
        int32, the exclusive end of each padded group; tokens_per_expert [E] int32, without padding.

    Source: the order of torch.distributed.all_to_all_single; padded layout of DESIGN.md section 4.
    """
    return _permute_indices(tokens_per_rank_expert, num_local_experts, num_ranks, num_tokens, align, align_empty)


def permute_pad(x: Tensor, indices: Tensor, top_k: int) -> Tensor:
    """Gathers rows by index; padding becomes rows of zeros.

        out[p] = x[indices[p] // top_k]

    The op is differentiable in x; the gradient is `unpermute`.

    Args:
        x: [M, K], any dtype of 1, 2 or 4 bytes; stride 1 along K, any row stride.
        indices: [P] int32 on x's device: of `permute_indices`, or the permutation of `sort_tokens` with its top_k. An
            index that is not in [0, M * top_k) gives a row of zeros. Indices should be distinct: if an index is
            repeated, the gradient counts only its last row. With MOE_FP8_VALIDATE=1 the op raises for an index that is
            neither in range nor -1, and backward raises for a repeated index.
        top_k: slots per row of x: index i stands for row i // top_k.

    Returns:
        out [P, K] of x's dtype, contiguous.
    """
    return _permute_pad(x, indices, top_k)


def permute_quantized(
    q: Tensor, scale: Tensor, format: str, indices: Tensor, top_k: int, *, offs: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gathers quantized rows, values and scales, by index. Nothing is cast.

        q_out[p] = q[indices[p] // top_k], and likewise for the scales of the row

    For `q, scale = quantize_rows(x, format)`, a row whose index is a slot has the bytes of `quantize_rows(x, format,
    indices=indices, top_k=top_k, offs=offs)`. Other rows have zero bytes as values and scales. So a token with several
    slots is quantized once.

    Args:
        q: [M, K] float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz; stride 1 along K, any row stride.
        scale: as `quantize_rows` returns it without offs; any strides in "blockwise", contiguous in the other formats.
        format: "rowwise", "blockwise", "mxfp8" or "mxfp8_rowmajor".
        indices: [P] int32 on q's device, as in `permute_pad`.
        top_k: slots per row of q: index i stands for row i // top_k.
        offs: [E] ends of groups of indices, as in `moe_fp8_ext.ops`. With offs, "mxfp8" scales are blocked group by
            group; the layout of other formats does not depend on it.

    Returns:
        q [P, K] of q's dtype, contiguous; scale as `quantize_rows` returns it for P rows and offs.

    Source: `permute_pad` and the layouts of DESIGN.md section 4.
    """
    return _permute_quantized(q, scale, format, indices, top_k, offs)


def unpermute(y: Tensor, indices: Tensor, top_k: int, num_tokens: int) -> Tensor:
    """Scatters rows back to the tokens from which `permute_pad` took them, and sums the rows of each token.

        out[indices[p] // top_k] += y[p],   starting from zeros

    With top_k = 1 the op copies, and inverts `permute_pad`. With a larger top_k it adds the rows of a token's slots in
    float32, in the order of the slots. The op is differentiable in y; the gradient is `permute_pad`.

    Args:
        y: [P, K], stride 1 along K, any row stride. Any dtype of 1, 2 or 4 bytes; with top_k > 1 bfloat16, float16 or
            float32.
        indices: [P] int32 on y's device, as in `permute_pad`. An index that is not in [0, num_tokens * top_k) is
            skipped. Indices should be distinct: if an index is repeated, only its last row counts, but all of its rows
            get the gradient. With MOE_FP8_VALIDATE=1 the op raises for an index that is neither in range nor -1, and
            for a repeated index.
        top_k: slots per row of the result.
        num_tokens: rows of the result.

    Returns:
        out [num_tokens, K] of y's dtype, contiguous; zero where no index points.
    """
    return _unpermute(y, indices, top_k, num_tokens)


def _save(ctx, inputs, output):
    x, indices, ctx.top_k, *_ = inputs
    ctx.rows = x.shape[0]
    ctx.save_for_backward(indices)


def _permute_pad_backward(ctx, grad):
    return (unpermute(unit_stride(grad), *ctx.saved_tensors, ctx.top_k, ctx.rows),)


def _unpermute_backward(ctx, grad):
    return (permute_pad(unit_stride(grad), *ctx.saved_tensors, ctx.top_k),)


register_gradient(_permute_pad, _save, _permute_pad_backward)
register_gradient(_unpermute, _save, _unpermute_backward)


@fake(_permute_indices)
def _(op, tokens_per_rank_expert, num_local_experts, num_ranks, num_tokens, align, align_empty):
    arg, counts = "tokens_per_rank_expert", tokens_per_rank_expert
    e = num_local_experts
    require(1 <= num_ranks <= MAX_COUNTS, f"{op}: num_ranks must be from 1 to {MAX_COUNTS}, got {num_ranks}")
    require(1 <= e <= MAX_EXPERTS, f"{op}: num_local_experts must be from 1 to {MAX_EXPERTS}, got {e}")
    n = num_ranks * e
    require(n <= MAX_COUNTS, f"{op}: num_ranks must be at most {MAX_COUNTS // e} with {e} experts, got {num_ranks}")
    if counts.dim() == 2:
        sizes = list(counts.shape)
        require(sizes == [num_ranks, e], f"{op}: {arg} must be [{num_ranks}, {e}], ranks by local experts, got {sizes}")
    got = counts.numel()
    require(got == n, f"{op}: {arg} must have {n} entries, one a rank and local expert, got {got}")
    check_count(op, "num_tokens", num_tokens)
    check_align(op, align, "num_tokens", num_tokens, e)
    shapes = (padded_extent(num_tokens, e, align),), (e,), (e,)
    return tuple(counts.new_empty(shape, dtype=torch.int32) for shape in shapes)


@fake(_permute_pad)
def _(op, x, indices, top_k):
    check_indices(op, x.shape[0], top_k)
    return x.new_empty((indices.shape[0], x.shape[1]))


@fake(_permute_quantized)
def _(op, q, scale, format, indices, top_k, offs):
    format = check_format(op, format)
    check_indices(op, q.shape[0], top_k)
    check_scale(op, "scale", scale, format, format.scale_of_rows(q.shape).shape)
    shape, e = (indices.shape[0], q.shape[1]), None
    if offs is not None:
        e = offs.shape[0]
        if format.order == "blocked":
            check_padded(op, "indices", shape[0], e, along_tokens=False)
    return format.empty_rows(q, shape, q.dtype, e)


@fake(_unpermute)
def _(op, y, indices, top_k, num_tokens):
    if top_k > 1:
        text = f"{op}: y must be bfloat16, float16 or float32 with top_k {top_k}, got {y.dtype}"
        require(y.dtype in INPUT_DTYPES, text)
    check_count(op, "num_tokens", num_tokens)
    check_indices(op, num_tokens, top_k)
    p, got = y.shape[0], indices.shape[0]
    require(got == p, f"{op}: indices must have {p} entries, one a row of y, got {got}")
    return y.new_empty((num_tokens, y.shape[1]))
