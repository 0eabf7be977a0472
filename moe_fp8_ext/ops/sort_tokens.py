import torch
from torch import Tensor

from moe_fp8_ext.formats import MAX_EXPERTS
from moe_fp8_ext.ops.checks import check, require

_sort = torch.ops.moe_fp8.sort_tokens.default


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


@torch.library.register_fake("moe_fp8::sort_tokens")
def _(topk_ids, num_experts):
    op = "sort_tokens"
    check(op, "topk_ids", topk_ids)
    require(1 <= num_experts <= MAX_EXPERTS, f"{op}: num_experts must be from 1 to {MAX_EXPERTS}, got {num_experts}")
    slots = topk_ids.shape[0] if topk_ids.dim() == 1 else topk_ids.shape[0] * topk_ids.shape[1]
    shapes = (slots,), (num_experts,), topk_ids.shape
    return tuple(topk_ids.new_empty(shape, dtype=torch.int32) for shape in shapes)
