"""Fused permutations for Megatron's dispatcher "alltoall" where TransformerEngine is not installed, by ops of this
package. `provide` gives them to Megatron, which calls them with `moe_permute_fusion`.

They move rows as Megatron's unfused permutations do, to the same bytes. But they neither wait for the device nor add
rows by atomics.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from megatron.core.transformer.moe import moe_utils
from torch import Tensor

from moe_fp8_ext.ops import combine, permute_pad, sort_tokens


class RowMap(NamedTuple):
    """Which slot each row holds, and the row of each slot."""

    permutation: Tensor
    inverse: Tensor


def provide() -> None:
    """Puts the functions where Megatron looks for TransformerEngine's, unless that is installed."""
    if moe_utils.HAVE_TE:
        return
    names = dict(
        HAVE_TE=True,
        te_general_gemm=None,  # 0.16.1 reads it without TransformerEngine too
        fused_permute=fused_permute_with_probs,  # only looked for: the dispatcher always has probabilities
        fused_permute_with_probs=fused_permute_with_probs,
        fused_sort_chunks_by_index=lambda rows, sizes, order: fused_sort_chunks(rows, None, sizes, order)[0],
        fused_sort_chunks_by_index_with_probs=fused_sort_chunks,
        fused_unpermute=fused_unpermute,
    )
    vars(moe_utils).update(names)


def fused_permute_with_probs(
    tokens: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int
) -> tuple[Tensor, Tensor, RowMap]:
    """Sorts the rows of tokens by expert. Every token has the same number of experts."""
    top_k = num_out_tokens // len(tokens)
    ids = routing_map.half().topk(top_k, dim=1).indices
    permutation, _, inverse = sort_tokens(ids, routing_map.shape[1])
    of_slots = probs.gather(1, ids).view(-1)
    rows = permute_pad(tokens, permutation, top_k)
    return rows, of_slots.index_select(0, permutation), RowMap(permutation, inverse)


def fused_unpermute(
    rows: Tensor, row_map: RowMap, merging_probs: Tensor | None = None, restore_shape: torch.Size | None = None
) -> Tensor:
    """Sums the rows of each token."""
    return combine(rows, row_map.inverse)


def fused_sort_chunks(rows: Tensor, probs: Tensor | None, sizes: Tensor, order: Tensor) -> tuple[Tensor, Tensor | None]:
    """Puts chunks of rows, of sizes on the device, into an order."""
    starts, moved = sizes.cumsum(0) - sizes, sizes[order]
    shift = starts[order] - (moved.cumsum(0) - moved)
    places = torch.arange(len(rows), device=rows.device)
    source = places + shift.repeat_interleave(moved, output_size=len(rows))
    permuted = permute_pad(rows, source.to(torch.int32), 1)
    return permuted, None if probs is None else probs.index_select(0, source)
