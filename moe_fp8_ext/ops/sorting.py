"""The slots of a router's choice, sorted by expert; its tokens, by rank."""

import torch
from torch import Tensor

from moe_fp8_ext.ops.checks import check, check_size, require
from moe_fp8_ext.quantization.format import MAX_EXPERTS, MAX_ROWS

_sort = torch.ops.moe_fp8.sort_tokens.default
_by_rank = torch.ops.moe_fp8.tokens_by_rank.default


def sort_tokens(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts the slots of a router's choice by expert, stably: the layout that grouped matmuls want.

        permutation = slots in the order of (expert, slot);  permutation[inverse[slot]] = slot

    A slot is an element of `topk_ids`, counted row by row: slot t * top_k + j is choice j of token t. A slot whose id
    is none of the experts is dropped: it is in no group. Never waits for the device; the same bytes every time.

    Args:
        topk_ids: [T] or [T, top_k], int32 or int64; stride 1 along the last dimension, row stride free. Ids out of
            [0, num_experts) drop their slots; MOE_FP8_VALIDATE=1 refuses all of them but -1, and waits for the device.
        num_experts: from 1 to 1024.

    Returns:
        permutation [T * top_k] int32, the slots sorted by expert, -1 from `offs[-1]` on; offs [num_experts] int32, the
        exclusive end of every expert's slots in it; inverse int32, shaped as `topk_ids`, the place of every slot in
        it, -1 for a dropped one. All contiguous.

    Raises:
        RuntimeError: dtype, dimensions, strides or `num_experts` are not as above; the text names the argument.

    Source: stable counting sort; DESIGN.md section 4 for offs.
    """
    return _sort(topk_ids, num_experts)


def tokens_by_rank(topk_ids: Tensor, num_experts: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Which ranks the tokens of a router's choice go to, and how much that is for each of them.

    With L = num_experts / num_ranks, expert e lives on rank e // L. `sort_tokens(by_rank, num_ranks)` sorts the copies
    of tokens for ranks, one for each rank that has any of a token's experts. Never waits for the device; the same bytes
    every time.

    Args:
        topk_ids: [T, top_k], int32 or int64; stride 1 along the last dimension, row stride free. Ids out of
            [0, num_experts) are of no rank; MOE_FP8_VALIDATE=1 refuses all of them but -1, and waits for the device.
        num_experts: of all ranks together, a multiple of num_ranks, at most 1024 a rank.
        num_ranks: from 1 to 1024.

    Returns:
        by_rank [T, num_ranks] int32, by_rank[t, r] = r where token t has any expert of rank r, else -1; counts
        [num_ranks, 2] int64, of every rank the tokens that have any of its experts, and their slots there. Contiguous.

    Raises:
        RuntimeError: dtype, dimensions, strides, `num_experts` or `num_ranks` are not as above; the text names the
            argument.

    Source: the definition above.
    """
    return _by_rank(topk_ids, num_experts, num_ranks)


@torch.library.register_fake("moe_fp8::sort_tokens")
def _(topk_ids, num_experts):
    op = "sort_tokens"
    check(op, "topk_ids", topk_ids)
    require(1 <= num_experts <= MAX_EXPERTS, f"{op}: num_experts must be from 1 to {MAX_EXPERTS}, got {num_experts}")
    slots = topk_ids.shape[0] if topk_ids.dim() == 1 else topk_ids.shape[0] * topk_ids.shape[1]
    shapes = (slots,), (num_experts,), topk_ids.shape
    return tuple(topk_ids.new_empty(shape, dtype=torch.int32) for shape in shapes)


@torch.library.register_fake("moe_fp8::tokens_by_rank")
def _(topk_ids, num_experts, num_ranks):
    op, most = "tokens_by_rank", num_ranks * MAX_EXPERTS
    check(op, "topk_ids", topk_ids)
    require(1 <= num_ranks <= MAX_EXPERTS, f"{op}: num_ranks must be from 1 to {MAX_EXPERTS}, got {num_ranks}")
    check_size(op, "topk_ids", topk_ids.shape[0], f"tokens for {num_ranks} ranks", MAX_ROWS // num_ranks)
    text = f"{op}: num_experts must be a multiple of the {num_ranks} ranks, at most {most}, got {num_experts}"
    require(num_ranks <= num_experts <= most and num_experts % num_ranks == 0, text)
    by_rank = topk_ids.new_empty((topk_ids.shape[0], num_ranks), dtype=torch.int32)
    return by_rank, topk_ids.new_empty((num_ranks, 2), dtype=torch.int64)
