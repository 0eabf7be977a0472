"""Expert parallelism over the all-to-all of torch's symmetric memory (NVSHMEM). The host never waits.

exchange = AllToAll(group, tokens=4096, top_k=8, num_experts=256, recipe="blockwise")
out = exchange.experts(x, topk_ids, topk_scores, w_gate_up, w_down)
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from moe_fp8_ext.distributed.message import Message, rule_of_tokens
from moe_fp8_ext.distributed.symmetric import SymmetricRows
from moe_fp8_ext.layer.experts import call_with_options
from moe_fp8_ext.layer.node import LayerFunction
from moe_fp8_ext.layer.source import RoutedTokens
from moe_fp8_ext.ops import combine, permute_pad, sort_tokens
from moe_fp8_ext.ops.checks import check_sizes, fail, validate_ids
from moe_fp8_ext.quantization.casting import cast, row_major
from moe_fp8_ext.quantization.prepare import operand_of_rows
from moe_fp8_ext.quantization.recipe import Recipe, get_recipe

_OP = "symm_mem.AllToAll"


class AllToAll:
    """Spreads experts over the ranks of a group, and moves tokens by torch's symmetric memory.

    With L = num_experts / ranks, a rank has experts [rank * L, (rank + 1) * L). A token travels once to each of its
    experts. Outputs and gradients travel in BF16. Buffers have room for every routing: experts compute
    ranks * tokens * top_k rows, and most of these may hold no token. All ranks must construct it, and make the same
    calls.

    Args:
        tokens: the largest number of tokens of a rank.
        top_k: columns of topk_ids.
        recipe: tokens travel in BF16 with "bf16" and with wgrad_high_precision, otherwise in the recipe's format.

    Raises:
        RuntimeError: torch has no symmetric memory, or its backend is not NVSHMEM; or another argument is wrong.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        tokens: int,
        top_k: int,
        num_experts: int,
        recipe: str | Recipe = "blockwise",
        device: torch.device | str = "cuda",
    ) -> None:
        if not hasattr(group, "group_name"):
            fail(
                _OP, f"group must be a ProcessGroup, such as torch.distributed.group.WORLD, got {type(group).__name__}"
            )
        self.recipe, self.num_experts = get_recipe(recipe, _OP), num_experts
        check_sizes(_OP, num_experts, tokens=tokens, top_k=top_k)
        self.sizes = top_k, num_experts // group.size()
        if num_experts % group.size():
            fail(_OP, f"num_experts must be a multiple of the {group.size()} ranks, got {num_experts}")
        if self.recipe.bf16_where_faster:
            fail(_OP, f"recipe must be the same for all sizes, got {self.recipe.name!r}")
        self.rule = rule_of_tokens(self.recipe)
        self.rows = SymmetricRows(group, tokens * top_k, num_experts, device)

    def experts(
        self, x: Tensor, topk_ids: Tensor, topk_scores: Tensor, w_gate_up: Tensor, w_down: Tensor, **options: object
    ) -> Tensor:
        """Computes `moe_fp8_ext.experts` for this rank's tokens with the experts of all ranks. Differentiable once.

        ids count the experts of all ranks. The weights belong to this rank's experts. options are as in
        `moe_fp8_ext.experts`.
        """
        # Scores stay with their tokens, so the layer's node does not see them.
        seen = topk_scores.detach() if isinstance(topk_scores, Tensor) else topk_scores
        given = x, topk_ids, seen, w_gate_up, w_down
        call, x, _, *rest = call_with_options(_OP, *given, self.recipe, **options)
        scores = cast(topk_scores, torch.float32).contiguous()
        validate_ids(_OP, topk_ids, self.num_experts)
        if (got := (topk_ids.shape[1], call.experts)) != self.sizes:
            fail(_OP, f"top_k and the experts of w_down must be {self.sizes}, got {got}")
        if topk_ids.numel() > self.rows.slots:
            fail(_OP, f"x must have at most {self.rows.slots // got[0]} tokens, got {x.shape[0]}")
        permutation, offs, inverse = sort_tokens(topk_ids.contiguous(), self.num_experts)
        counts = offs.diff(prepend=offs.new_zeros(1)).long()
        rows, ids, places, operand = _Dispatch.apply(self.rows, self.rule, permutation, inverse, counts, x)
        call = call._replace(x_is_quantized=operand is not None)
        source, ones = RoutedTokens(ids, call.experts, operand), scores.new_ones(ids.shape)
        y = _Combine.apply(self.rows, places, counts, LayerFunction.apply(call, source, None, rows, ones, *rest))
        return cast(combine(y, inverse, scores), x.dtype)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, all_to_all: SymmetricRows, rule, permutation: Tensor, inverse: Tensor, counts: Tensor, x: Tensor):
        message, operand = Message(x, None, None, rule), None
        if rule is None:
            sent = permute_pad(row_major(cast(x, torch.bfloat16)), permutation, inverse.shape[1])
        else:
            sent = message.rows(0, permutation, inverse)
        rows, places = all_to_all.to_experts(sent, counts)
        if rule is not None:  # a stand-in gets the gradient
            operand = operand_of_rows(*(column.read(rows) for column in message.columns()), rule.format)
            rows = x.new_empty((), dtype=torch.bfloat16).expand(operand.values.shape)
        ids = all_to_all.experts_of(places, rows.shape[0])[:, None]
        ctx.mark_non_differentiable(ids, places)
        ctx.save_for_backward(inverse, places)
        ctx.all_to_all, ctx.dtype = all_to_all, x.dtype
        return rows, ids, places, operand

    @staticmethod
    def backward(ctx, drows: Tensor, *_: None):
        inverse, places = ctx.saved_tensors
        return *[None] * 5, cast(combine(ctx.all_to_all.to_tokens(drows, places), inverse), ctx.dtype)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, all_to_all: SymmetricRows, places: Tensor, counts: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(counts)
        ctx.all_to_all = all_to_all
        return all_to_all.to_tokens(rows, places)

    @staticmethod
    def backward(ctx, dy: Tensor):
        return None, None, None, ctx.all_to_all.to_experts(dy, *ctx.saved_tensors)[0]
