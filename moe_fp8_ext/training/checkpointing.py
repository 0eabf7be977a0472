"""Selective activation checkpointing: what is not worth computing again."""

import torch

from moe_fp8_ext import _torch
from moe_fp8_ext.matmul import bf16  # noqa: F401  registers the product of a CPU


def save_ops() -> list[_torch.OpOverload]:
    """The ops that a policy of selective activation checkpointing saves: products of experts and the order of slots.

    For the list of `torch.utils.checkpoint.create_selective_checkpoint_contexts`, beside those of other layers.
    Backward then computes casts, moves and activations again, and no product. What is kept is the products' outputs,
    bfloat16: [M, N] of a `grouped_mm`, [P, 2F] and [P, D] of `experts`; and of the order, two integers a slot and one
    an expert. Products of recipe "bf16" are `torch._grouped_mm`'s, which is in the list too.

    Returns:
        Overloads of ops, a new list.

    Source: the documentation of `torch.utils.checkpoint`.
    """
    ours = torch.ops.moe_fp8
    in_bf16 = [*_torch.grouped_mm_ops, torch.ops.moe_fp8_ext.cpu_grouped_mm.default]
    return [ours.scaled_grouped_mm.default, ours.sort_tokens.default, *in_bf16]
