import torch
from torch import Tensor

from moe_fp8_ext import shapes
from moe_fp8_ext.ops.checks import (
    check_align,
    check_contiguous,
    check_count,
    check_index,
    check_rows,
    check_same_device,
    check_size,
    check_tokens,
    require,
)
from moe_fp8_ext.ops.gradients import unit_stride, wants_grad

_permute_indices = torch.ops.moe_fp8.permute_indices.default
_permute_pad = torch.ops.moe_fp8.permute_pad.default
_unpermute = torch.ops.moe_fp8.unpermute.default


def permute_indices(
    tokens_per_rank_expert: Tensor,
    num_ranks: int,
    num_local_experts: int,
    num_tokens: int,
    align: int = 16,
    align_empty: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Where tokens go that arrived rank by rank, so that those of every local expert lie together and padded.

    An all-to-all hands over the tokens of rank 0, expert by expert, then those of rank 1, and so on. Position p of the
    expert-major layout holds token `indices[p]`; within an expert tokens keep their order. Never waits for the device.

    Args:
        tokens_per_rank_expert: [num_ranks * num_local_experts] or [num_ranks, num_local_experts], int32 or int64,
            contiguous: how many tokens each rank sent for each expert, at most 4096 counts. A negative count is taken
            as 0, and what the counts have beyond num_tokens is left out; MOE_FP8_VALIDATE=1 raises for either, which
            waits for the device.
        num_ranks: ranks that sent tokens.
        num_local_experts: experts here, from 1 to 1024.
        num_tokens: rows of the tokens, M.
        align: each group is padded to a multiple of it; a power of two from 1 to 256. See `group_alignment`.
        align_empty: give an expert without tokens `align` rows of padding instead of none.

    Returns:
        indices [P] int32, P = round_up(M, align) + E * align, -1 for padding and behind the last group; padded_offs
        [E] int32, the exclusive end of each padded group; tokens_per_expert [E] int32, without padding.

    Raises:
        RuntimeError: dtype, dimensions, sizes or `align` are not as above; the text names the argument.

    Source: the order of torch.distributed.all_to_all_single; padded layout of DESIGN.md section 4.
    """
    sizes = num_ranks, num_local_experts, num_tokens
    return _permute_indices(tokens_per_rank_expert, *sizes, align, align_empty)


def permute_pad(
    x: Tensor, indices: Tensor, top_k: int = 1, scale: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Takes rows by index, rows of zeros for padding: `out[p] = x[indices[p] // top_k]`.

    Differentiable in x; the gradient is `unpermute`. Never waits for the device.

    Args:
        x: [M, K], any dtype of 1, 2 or 4 bytes; stride 1 along K, row stride free.
        indices: [P] int32 on x's device, of `permute_indices`, or the permutation of `sort_tokens` with its top_k. One
            that is not in [0, M * top_k) gives a row of zeros. They should be distinct; the gradient counts only the
            last of equal ones. MOE_FP8_VALIDATE=1 raises for one that is neither in range nor -1.
        top_k: slots of a row of x: index i stands for row i // top_k.
        scale: [M] or [M, blocks], any dtype of 1, 2 or 4 bytes, stride 1 along blocks, no gradient: the scales of x,
            when x was quantized before the tokens were exchanged. They take the same way, in a launch of their own;
            padding has zero bytes.

    Returns:
        out [P, K] of x's dtype, contiguous; with `scale` also the scales, [P] or [P, blocks].

    Raises:
        RuntimeError: dtype, dimensions, strides, device or sizes are not as above; the text names the argument.

    Source: the equation above.
    """
    if scale is not None:
        check_scale("permute_pad", scale, x)
    out = _Permute.apply(x, indices, top_k) if wants_grad(x) else _permute_pad(x, indices, top_k)
    if scale is None:
        return out
    if scale.dim() == 1:
        return out, _permute_pad(scale.unsqueeze(-1), indices, top_k).squeeze(-1)
    return out, _permute_pad(scale, indices, top_k)


def unpermute(y: Tensor, indices: Tensor, num_tokens: int, top_k: int = 1) -> Tensor:
    """Puts rows back where `permute_pad` took them from: `out[indices[p] // top_k] += y[p]`, from zeros.

    With top_k 1 it is a copy and undoes `permute_pad`; with more, the rows of a token's slots are added in float32, in
    the order of the slots. Differentiable in y; the gradient is `permute_pad`. Never waits for the device.

    Args:
        y: [P, K], stride 1 along K, row stride free; any dtype of 1, 2 or 4 bytes, with top_k > 1 bfloat16, float16 or
            float32.
        indices: [P] int32 on y's device, as in `permute_pad`. One that is not in [0, num_tokens * top_k) is skipped.
            They should be distinct: of equal ones the last counts, while the gradient goes to all of them.
            MOE_FP8_VALIDATE=1 raises for an index that is neither in range nor -1 and for equal ones.
        num_tokens: rows of the result.
        top_k: slots of a row of the result.

    Returns:
        out [num_tokens, K] of y's dtype, contiguous; zero where no index points.

    Raises:
        RuntimeError: dtype, dimensions, strides, device or sizes are not as above; the text names the argument.

    Source: the equation above.
    """
    if wants_grad(y):
        return _Unpermute.apply(y, indices, num_tokens, top_k)
    return _unpermute(y, indices, num_tokens, top_k)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, indices, top_k):
        ctx.save_for_backward(indices)
        ctx.rows, ctx.top_k = x.shape[0], top_k
        return _permute_pad(x, indices, top_k)

    @staticmethod
    def backward(ctx, grad):
        return unpermute(unit_stride(grad), *ctx.saved_tensors, ctx.rows, ctx.top_k), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, indices, num_tokens, top_k):
        ctx.save_for_backward(indices)
        ctx.top_k = top_k
        return _unpermute(y, indices, num_tokens, top_k)

    @staticmethod
    def backward(ctx, grad):
        return permute_pad(unit_stride(grad), *ctx.saved_tensors, ctx.top_k), None, None, None


def check_scale(op: str, scale: Tensor, x: Tensor) -> None:
    require(scale.dim() in (1, 2), f"{op}: scale must have 1 or 2 dimensions, got {scale.dim()}")
    require(not wants_grad(scale), f"{op}: scale must not ask for a gradient, got requires_grad=True")
    if torch.compiler.is_compiling():  # tracing, a text with a size in it would fix it
        return torch._check(scale.shape[0] == x.shape[0])
    check_rows(op, "scale", scale if scale.dim() == 2 else scale.unsqueeze(-1))
    check_same_device(op, "scale", scale, "x", x)
    m, got = x.shape[0], scale.shape[0]
    require(got == m, f"{op}: scale must have {m} rows, one a row of x, got {got}")


def check_indices(op: str, indices: Tensor, like: str, x: Tensor, rows: int, top_k: int) -> None:
    check_index(op, "indices", indices, like, x)
    check_size(op, "indices", indices.shape[0], "entries")
    require(top_k >= 1, f"{op}: top_k must be at least 1, got {top_k}")
    if isinstance(rows, int):
        require(
            rows * top_k <= shapes.MAX_ROWS and top_k <= shapes.MAX_ROWS,
            f"{op}: top_k must give at most {shapes.MAX_ROWS} slots to {rows} rows, got {top_k}",
        )


@torch.library.register_fake("moe_fp8::permute_indices")
def _(tokens_per_rank_expert, num_ranks, num_local_experts, num_tokens, align=16, align_empty=False):
    op, arg, counts = "permute_indices", "tokens_per_rank_expert", tokens_per_rank_expert
    require(counts.dtype in (torch.int32, torch.int64), f"{op}: {arg} must be int32 or int64, got {counts.dtype}")
    require(counts.dim() in (1, 2), f"{op}: {arg} must have 1 or 2 dimensions, got {counts.dim()}")
    check_contiguous(op, arg, counts)
    most, e = shapes.MAX_COUNTS, num_local_experts
    require(1 <= num_ranks <= most, f"{op}: num_ranks must be from 1 to {most}, got {num_ranks}")
    require(1 <= e <= shapes.MAX_EXPERTS, f"{op}: num_local_experts must be from 1 to {shapes.MAX_EXPERTS}, got {e}")
    n = num_ranks * e
    require(n <= most, f"{op}: num_ranks must be at most {most // e} with {e} experts, got {num_ranks}")
    if counts.dim() == 2:
        sizes = list(counts.shape)
        require(sizes == [num_ranks, e], f"{op}: {arg} must be [{num_ranks}, {e}], ranks by local experts, got {sizes}")
    got = counts.numel()
    require(got == n, f"{op}: {arg} must have {n} entries, one a rank and local expert, got {got}")
    check_count(op, "num_tokens", num_tokens)
    check_align(op, align, "num_tokens", num_tokens, e)
    return tuple(counts.new_empty(s, dtype=torch.int32) for s in shapes.permute_indices(num_tokens, e, align))


@torch.library.register_fake("moe_fp8::permute_pad")
def _(x, indices, top_k=1):
    check_rows("permute_pad", "x", x)
    check_indices("permute_pad", indices, "x", x, x.shape[0], top_k)
    return x.new_empty(shapes.permute_pad(x.shape, indices.shape[0]))


@torch.library.register_fake("moe_fp8::unpermute")
def _(y, indices, num_tokens, top_k=1):
    op = "unpermute"
    (check_tokens if top_k > 1 else check_rows)(op, "y", y)
    check_count(op, "num_tokens", num_tokens)
    check_indices(op, indices, "y", y, num_tokens, top_k)
    p, got = y.shape[0], indices.shape[0]
    require(got == p, f"{op}: indices must have {p} entries, one a row of y, got {got}")
    return y.new_empty(shapes.unpermute(y.shape, num_tokens))
