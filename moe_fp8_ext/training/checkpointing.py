"""Selective activation checkpointing: the ops whose outputs are worth keeping."""

import torch

from moe_fp8_ext import _torch
from moe_fp8_ext.matmul import bf16  # noqa: F401  registers the CPU's product


def save_ops() -> list[_torch.OpOverload]:
    """Returns the ops that selective activation checkpointing should save: the products of experts, and sorting.

        saved = [torch.ops.aten.mm.default, *moe_fp8_ext.save_ops()]
        contexts = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, saved)
        y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=contexts)

    Backward then recomputes casts, moves and activations, but no product of experts. A checkpoint keeps these outputs:

    - the products in bfloat16: [M, N] of a `grouped_mm`; [P, 2F] and [P, D] of `experts`,
    - the order of slots: two integers per slot and one per expert.

    The list contains `torch._grouped_mm` too, because recipe "bf16" multiplies with it.

    Returns:
        A new list of op overloads.

    Source: the documentation of `torch.utils.checkpoint`.
    """
    ours = torch.ops.moe_fp8
    bf16_products = [*_torch.grouped_mm_ops, torch.ops.moe_fp8_ext.cpu_grouped_mm.default]
    return [ours.scaled_grouped_mm.default, ours.sort_tokens.default, *bf16_products]
