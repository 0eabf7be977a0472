"""Sorting of the slots of a router's choice by expert, and of its tokens by rank."""

import torch
from torch import Tensor

from moe_fp8_ext.ops.checks import check_size, require
from moe_fp8_ext.ops.dispatch import fake
from moe_fp8_ext.quantization.format import MAX_EXPERTS, MAX_ROWS

_sort_tokens = torch.ops.moe_fp8.sort_tokens.default
_tokens_by_rank = torch.ops.moe_fp8.tokens_by_rank.default


def sort_tokens(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts the slots of a router's choice by expert, stably: the layout of grouped matmuls.

        permutation = the slots in the order of (expert, slot)
        permutation[inverse[slot]] = slot

    A slot is an element of `topk_ids`, counted row by row: slot t * top_k + j is choice j of token t. A slot whose id
    is no expert is dropped: it is in no group. The op returns the same bytes every time.

    Args:
        topk_ids: [T] or [T, top_k], int32 or int64; stride 1 along the last dimension, any row stride. Slots whose id
            is not in [0, num_experts) are dropped. With MOE_FP8_VALIDATE=1 the op raises for such an id unless it is
            -1.
        num_experts: from 1 to 1024.

    Returns:
        permutation [T * top_k] int32, the slots sorted by expert, -1 from `offs[-1]` on; offs [num_experts] int32, the
        exclusive end of each expert's slots in permutation; inverse int32, shaped as `topk_ids`, the position of each
        slot in permutation, -1 for a dropped slot. All contiguous.

    Source: stable counting sort; DESIGN.md section 4 for offs.
    """
    return _sort_tokens(topk_ids, num_experts)


def tokens_by_rank(topk_ids: Tensor, num_experts: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Lists the ranks that each token goes to, and counts the tokens and slots of each rank.

        by_rank[t, r] = r if token t has an expert of rank r, else -1
        expert e is of rank e // (num_experts / num_ranks)

    `sort_tokens(by_rank, num_ranks)` then sorts the copies of tokens by rank: a token has one copy for each rank that
    has any of its experts. The op returns the same bytes every time.

    Args:
        topk_ids: [T, top_k], int32 or int64; stride 1 along the last dimension, any row stride. Ids that are not in [0,
            num_experts) belong to no rank. With MOE_FP8_VALIDATE=1 the op raises for such an id unless it is -1.
        num_experts: experts of all ranks together: a multiple of num_ranks, at most 1024 per rank.
        num_ranks: from 1 to 1024.

    Returns:
        by_rank [T, num_ranks] int32; counts [num_ranks, 2] int64, for each rank the number of tokens that have any of
        its experts and the number of their slots there. Both contiguous.
    """
    return _tokens_by_rank(topk_ids, num_experts, num_ranks)


@fake(_sort_tokens)
def _(op, topk_ids, num_experts):
    require(1 <= num_experts <= MAX_EXPERTS, f"{op}: num_experts must be from 1 to {MAX_EXPERTS}, got {num_experts}")
    slots = topk_ids.shape[0] if topk_ids.dim() == 1 else topk_ids.shape[0] * topk_ids.shape[1]
    shapes = (slots,), (num_experts,), topk_ids.shape
    return tuple(topk_ids.new_empty(shape, dtype=torch.int32) for shape in shapes)


@fake(_tokens_by_rank)
def _(op, topk_ids, num_experts, num_ranks):
    max_experts = num_ranks * MAX_EXPERTS
    require(1 <= num_ranks <= MAX_EXPERTS, f"{op}: num_ranks must be from 1 to {MAX_EXPERTS}, got {num_ranks}")
    check_size(op, "topk_ids", topk_ids.shape[0], f"tokens for {num_ranks} ranks", MAX_ROWS // num_ranks)
    text = f"{op}: num_experts must be a multiple of the {num_ranks} ranks, at most {max_experts}, got {num_experts}"
    require(num_ranks <= num_experts <= max_experts and num_experts % num_ranks == 0, text)
    by_rank = topk_ids.new_empty((topk_ids.shape[0], num_ranks), dtype=torch.int32)
    return by_rank, topk_ids.new_empty((num_ranks, 2), dtype=torch.int64)
