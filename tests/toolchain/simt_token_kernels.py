"""A base class of SimtKernels: calls of the emulated kernels that choose experts and move tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from guarded import GuardedMemory
from simt_scales import FP8_TYPES, Scales
from torch import Tensor

from moe_fp8_ext.reference.numerics import FORMATS

IN_TYPES = (torch.bfloat16, torch.float16, torch.float32)  # enum class InType
SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus")  # Scoring
GROUP_SCORES = ("top2_sum", "max")  # GroupScore


def columns_of(*tensors: Tensor | None) -> list[tuple[int, ...]]:
    """Describes x, scale, topk_ids and topk_scores in the fields of struct ColumnSource."""
    matrices = [t if t is None or t.ndim == 2 else t[:, None] for t in tensors]
    return [
        (t.data_ptr(), t.element_size(), *t.stride(), t.shape[1], i == 2)
        for i, t in enumerate(matrices)
        if t is not None
    ]


def types_of_tokens(x: Tensor, scale: Tensor | None, format: str | None) -> tuple[int, object]:
    """The type and the scales of tokens, for struct TokenRows."""
    if scale is None:
        return 0, None
    return FP8_TYPES.index(x.dtype), ctypes.byref(Scales.of(x, scale, format))


class TokenKernels:
    _library: ctypes.CDLL
    _call: Callable[..., None]

    def _choose_experts(
        self,
        memory: GuardedMemory,
        ids: Tensor,
        scores: Tensor,
        topk_logits: Tensor,
        logits: Tensor,
        top_k: int,
        bias: Tensor | None = None,
        scoring: str = "softmax",
        normalize: bool = True,
        scaling_factor: float = 1.0,
        num_groups: int = 1,
        top_groups: int = 1,
        group_score: str = "top2_sum",
        given_ids: Tensor | None = None,
    ) -> None:
        sizes = len(logits), logits.stride(0), logits.shape[1], top_k, num_groups, top_groups
        given: tuple[object, ...] = None, 0, False
        if given_ids is not None:
            given = given_ids, given_ids.stride(0), given_ids.dtype == torch.int64
        how = SCORINGS.index(scoring), normalize, float(scaling_factor)
        rest = GROUP_SCORES.index(group_score), *given, *how
        self._call("choose_experts", logits, bias, ids, scores, topk_logits, *sizes, *rest)

    def _choose_experts_backward(
        self,
        memory: GuardedMemory,
        grad_logits: Tensor,
        grad: Tensor,
        logits: Tensor,
        topk_ids: Tensor,
        num_experts: int | None = None,
        scoring: str = "softmax",
        normalize: bool = True,
        scaling_factor: float = 1.0,
        parts: int = 1,
    ) -> None:
        what = grad, logits, topk_ids, topk_ids.dtype == torch.int64, grad_logits
        sizes = *grad.shape, grad_logits.shape[-1], grad.stride(0), logits.stride(0), topk_ids.stride(0)
        how = SCORINGS.index(scoring), normalize, float(scaling_factor), num_experts is not None, parts
        self._call("choose_experts_backward", *what, *sizes, *how)

    def _copy_rows(self, x: Tensor, out: Tensor, index: Tensor, top_k: int) -> None:
        size = x.element_size()
        what = x, x.shape[0], x.stride(0) * size, out, out.shape[0], out.shape[1] * size
        self._call("copy_rows", *what, index, top_k)

    def _permute_pad(self, memory: GuardedMemory, out: Tensor, x: Tensor, indices: Tensor, top_k: int) -> None:
        self._copy_rows(x, out, indices, top_k)

    def _pack_tokens(
        self,
        memory: GuardedMemory,
        rows: Tensor,
        x: Tensor,
        topk_ids: Tensor | None,
        topk_scores: Tensor | None,
        scale: Tensor | None,
        indices: Tensor,
        top_k: int,
        num_experts: int,
    ) -> None:
        columns = columns_of(x, scale, topk_ids, topk_scores)
        what = rows, len(indices), len(x), indices, top_k, num_experts
        self._call("pack_tokens", *what, torch.tensor(columns), len(columns))

    def _permute_quantized(
        self,
        memory: GuardedMemory,
        out: Tensor,
        out_scale: Tensor,
        q: Tensor,
        scale: Tensor,
        format: str,
        indices: Tensor,
        top_k: int,
        offs: Tensor | None = None,
    ) -> None:
        order, blocked = FORMATS[format].order, FORMATS[format].order == "blocked"
        if order == "row_major":
            self._copy_rows(q, out, indices, top_k)
            return self._copy_rows(*(s.unsqueeze(1) if s.ndim == 1 else s for s in (scale, out_scale)), indices, top_k)
        offs, strides = offs if blocked else None, (0, 0) if blocked else scale.stride()
        groups = offs, 0 if offs is None else len(offs)
        words = scale.shape[1] // 4 if blocked else scale.shape[1]
        where = q, q.stride(0), out, q.shape[1], scale, out_scale, indices, len(q), top_k
        self._call("permute_quantized", *where, *groups, len(indices), words, blocked, *strides)

    def _pad_token_groups(
        self,
        memory: GuardedMemory,
        out: Tensor,
        padded_starts: Tensor,
        padded_offs: Tensor,
        x: Tensor,
        offs: Tensor,
        align: int = 16,
    ) -> None:
        source = memory.empty((out.shape[0],), torch.int32) if x.shape[1] else None
        sizes = offs.shape[0], x.shape[0], out.shape[0], align
        self._call("token_groups", True, offs, None, padded_starts, padded_offs, source, *sizes)
        if source is not None:
            self._copy_rows(x, out, source, 1)

    def _pad_token_groups_to(
        self, memory: GuardedMemory, out: Tensor, x: Tensor, offs: Tensor, padded_starts: Tensor, num_padded: int
    ) -> None:
        source = memory.empty((num_padded,), torch.int32)
        sizes = offs.shape[0], x.shape[0], num_padded, 1
        self._call("token_groups", True, offs, padded_starts, None, None, source, *sizes)
        self._copy_rows(x, out, source, 1)

    def _unpad_token_groups(
        self, memory: GuardedMemory, out: Tensor, y: Tensor, offs: Tensor, padded_starts: Tensor, num_tokens: int
    ) -> None:
        source = memory.empty((num_tokens,), torch.int32)
        sizes = offs.shape[0], num_tokens, y.shape[0], 1
        self._call("token_groups", False, offs, padded_starts, None, None, source, *sizes)
        self._copy_rows(y, out, source, 1)

    def _permute_indices(
        self,
        memory: GuardedMemory,
        indices: Tensor,
        padded_offs: Tensor,
        tokens_per_expert: Tensor,
        counts: Tensor,
        num_local_experts: int,
        num_ranks: int,
        num_tokens: int,
        align: int = 16,
        align_empty: bool = False,
    ) -> None:
        sizes = num_ranks, num_local_experts, num_tokens, indices.shape[0], align, align if align_empty else 0
        outputs = indices, padded_offs, tokens_per_expert
        self._call("permute_indices", counts, counts.dtype == torch.int64, *outputs, *sizes)

    def invert_indices(self, indices: Tensor, size: int) -> Tensor:
        memory = GuardedMemory()
        inverse = memory.empty((size,), torch.int32)
        self._call("invert_indices", memory.copy(indices), indices.numel(), inverse, size)
        memory.assert_untouched_around()
        return inverse

    def _sort_tokens(self, memory: GuardedMemory, *given: object) -> None:
        *outputs, topk_ids, num_experts = given
        n, top_k = topk_ids.numel(), topk_ids.shape[-1]
        row_stride = top_k if topk_ids.ndim == 1 else topk_ids.stride(0)
        blocks = self._library.simt_sort_tokens_blocks(ctypes.c_int64(n))
        counts = memory.empty((blocks, num_experts), torch.int32)
        what = topk_ids, topk_ids.dtype == torch.int64, n, top_k, row_stride, num_experts
        self._call("sort_tokens", *what, *outputs, counts)

    def _tokens_by_rank(
        self, memory: GuardedMemory, by_rank: Tensor, counts: Tensor, topk_ids: Tensor, num_experts: int, num_ranks: int
    ) -> None:
        what = *topk_ids.shape, topk_ids.stride(0), num_ranks, num_experts // num_ranks
        self._call("tokens_by_rank", topk_ids, topk_ids.dtype == torch.int64, *what, by_rank, counts)

    def _combine(
        self, memory: GuardedMemory, out: Tensor, y: Tensor, inverse: Tensor, topk_scores: Tensor | None = None
    ) -> None:
        is_float32 = topk_scores is not None and topk_scores.dtype == torch.float32
        what = *inverse.shape, *y.shape, y.stride(0), IN_TYPES.index(y.dtype), is_float32
        self._call("combine", y, inverse, topk_scores, out, *what)

    def _narrow_tokens(
        self,
        memory: GuardedMemory,
        out: Tensor,
        x: Tensor,
        m: Tensor,
        offs: Tensor,
        indices: Tensor | None = None,
        top_k: int | None = None,
        x_scale: Tensor | None = None,
        format: str | None = None,
    ) -> None:
        of_x = x, len(x), x.stride(0), *types_of_tokens(x, x_scale, format)
        of_m = m, *m.shape, *m.stride()[:2]
        self._call("narrow_tokens", *of_x, *of_m, offs, indices, top_k or 0, out, len(out))

    def _outer_tokens(
        self,
        memory: GuardedMemory,
        out: Tensor,
        u: Tensor,
        x: Tensor,
        offs: Tensor,
        scores: Tensor | None = None,
        indices: Tensor | None = None,
        top_k: int | None = None,
        out_dtype: torch.dtype | None = None,
        x_scale: Tensor | None = None,
        format: str | None = None,
    ) -> None:
        of_u, of_x = (u, *u.shape, u.stride(0)), (x, *x.shape, x.stride(0), *types_of_tokens(x, x_scale, format))
        rows = scores, indices, top_k or 0
        self._call("outer_tokens", *of_u, *of_x, offs, len(offs), *rows, out, out_dtype == torch.float32)

    def _cast_factor(
        self,
        memory: GuardedMemory,
        out: Tensor,
        m: Tensor,
        rows: int,
        cols: int,
        order: str,
        dtype: torch.dtype,
        num_experts: int | None = None,
        scaling: float = 1.0,
    ) -> None:
        dims = ["erc"[-m.dim() :].index(name) for name in reversed(order)]
        of_dims = [(out.shape[d], min(out.shape[d], m.shape[d]), m.stride(d)) for d in dims]
        of_dims += [(1, 1, 0)] * (3 - len(dims))
        numbers = torch.tensor(of_dims, dtype=torch.int64)
        types = IN_TYPES.index(m.dtype), IN_TYPES.index(dtype)
        self._call("cast_factor", m, out, numbers, float(scaling), *types)

    def _combine_backward(
        self,
        memory: GuardedMemory,
        grad_y: Tensor,
        grad_scores: Tensor,
        grad: Tensor,
        y: Tensor | None,
        topk_scores: Tensor | None,
        inverse: Tensor,
        num_rows: int,
        keep_grad_y: bool = True,
    ) -> None:
        slot_of = memory.empty((num_rows,), torch.int32) if keep_grad_y else None
        of_y = grad_y if keep_grad_y else None
        tensors = grad, y, inverse, topk_scores, slot_of, of_y, None if y is None else grad_scores
        strides = grad.stride(0), 0 if y is None else y.stride(0)
        what = *inverse.shape, num_rows, grad.shape[1], *strides, IN_TYPES.index(grad.dtype)
        self._call("combine_backward", *tensors, *what, grad_scores.dtype == torch.float32)
