"""Calls the emulated kernels with the arguments of the ops and of the reference.

Outputs have the shapes, dtypes and strides of the reference's outputs. They are in guarded memory, filled with 0xFF.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from guarded import GuardedMemory
from helpers import assert_same
from simt_scales import FP8_TYPES, Scales
from simt_token_kernels import IN_TYPES, TokenKernels, columns_of
from torch import Tensor

from moe_fp8_ext import reference
from moe_fp8_ext.reference.numerics import FORMATS

ROUNDINGS = ("exact", "pow2", "rceil", "floor")  # Rounding
AMAXES = ("group", "batch", "square")  # Amax
GROUPS = (None, "rows", "columns")  # Groups
ACTIVATIONS = ("swiglu", "geglu", "swiglu_oai", "silu", "gelu", "relu2")  # Activation
BOTH = ("q", "scale", "q_t", "scale_t", "padded_offs")
SCRATCH = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int64)
QUANTIZED = {"quantize_rows": BOTH[:2], "quantize_tokens": BOTH[2:], "quantize_both": BOTH, "quantize_weight": BOTH[:4]}


class Waves:
    """The kernels on all emulated chips. The reference is slower than they are, so it runs once for all of them."""

    def __init__(self, *libraries: Path) -> None:
        self._each = [SimtKernels(library) for library in libraries]

    def __iter__(self) -> Iterator[SimtKernels]:
        return iter(self._each)

    def check(self, op: str, *args: object, **kwargs: object) -> None:
        """Checks that every byte of the outputs equals the reference's."""
        want = getattr(reference, op)(*args, **kwargs)
        self.check_as(want if isinstance(want, tuple) else (want,), op, *args, **kwargs)

    def check_as(self, want: tuple[Tensor, ...], op: str, *args: object, **kwargs: object) -> None:
        """Checks that every byte of the outputs equals `want`, and that bytes between columns are zero."""
        words = [op, *(str(a) for a in (*args, *kwargs.values()) if isinstance(a, (str, int)))]
        for kernels in self:
            got, what = kernels.run(op, want, *args, **kwargs), " ".join([*words, f"on {kernels.chip}"])
            assert_same(got, want, what)
            assert_zeros_between_columns(got, what)


def assert_zeros_between_columns(got: Iterable[Tensor], what: str) -> None:
    for t in got:
        if t.ndim == 2 and t.stride(0) == 1 < t.stride(1):
            columns = t.as_strided((t.shape[1], t.stride(1)), (t.stride(1), 1))
            assert not columns[:, t.shape[0] :].any(), what


class SimtKernels(TokenKernels):
    """The kernels on one emulated chip."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self.wave: int = self._library.simt_wave()
        self._library.simt_chip.restype = ctypes.c_char_p
        self.chip: str = self._library.simt_chip().decode().partition(":")[0]

    def native_fnuz(self) -> bool:
        return bool(self._library.simt_native_fnuz())

    def run(self, op: str, want: tuple[Tensor, ...], *args: object, **kwargs: object) -> tuple[Tensor, ...]:
        """Returns the outputs that the kernels write, shaped like `want`. Raises RuntimeError if a launch fails."""
        memory = GuardedMemory()
        args = [memory.copy(a) if isinstance(a, Tensor) else a for a in args]
        kwargs = {name: memory.copy(a) if isinstance(a, Tensor) else a for name, a in kwargs.items()}
        out = tuple(map(memory.like, want))
        if op in QUANTIZED:
            self._quantize(memory, dict(zip(QUANTIZED[op], out, strict=True)), *args, **kwargs)
        else:
            getattr(self, f"_{op}")(memory, *out, *args, **kwargs)
        memory.assert_untouched_around()
        return out

    def _call(self, function: str, *arguments: object) -> None:
        entry = getattr(self._library, f"simt_{function}")
        entry.restype = ctypes.c_char_p
        error = entry(*map(_as_c, arguments))
        if error is not None:
            raise RuntimeError(f"{function} on {self.chip}: {error.decode()}")

    # Quantizers

    def _quantize(
        self,
        memory: GuardedMemory,
        out: dict[str, Tensor],
        x: Tensor,
        format: str,
        *,
        dtype: torch.dtype,
        offs: Tensor | None = None,
        indices: Tensor | None = None,
        top_k: int | None = None,
        align: int | None = None,
        rounding: str | None = None,
        amax: str = "group",
        directions: str = "both",
    ) -> None:
        f = FORMATS[format]
        along_rows, along_tokens = "q" in out and directions != "transposed", "q_t" in out and directions != "rows"
        blocked = f.order == "blocked"
        whole_rows = not along_tokens and f.block is None and indices is None
        weight = whole_rows or x.ndim == 3
        offs = offs if along_tokens or blocked else None
        if weight:
            x = x if x.ndim == 3 else x[None]
            (e, rows, _), group_stride = x.shape, x.stride(0)
        else:
            rows, group_stride = x.shape[0] if indices is None else indices.shape[0], 0
            offs, e = self._groups(memory, offs)
        scratch = SCRATCH(lambda words: memory.empty((words,), torch.int32).data_ptr())
        positions = out["q_t"].shape[-1] if along_tokens else 0
        where = x, IN_TYPES.index(x.dtype), x.stride(-2), group_stride, indices, x.shape[-2], top_k or 1
        how = list(FORMATS).index(format), ROUNDINGS.index(rounding or f.roundings[0]), FP8_TYPES.index(dtype)
        results = along_rows, along_tokens, *map(out.get, BOTH), positions, align or f.align, scratch
        self._call("quantize", *where, offs, e, rows, x.shape[-1], weight, *how, *results, AMAXES.index(amax))

    @staticmethod
    def _groups(memory: GuardedMemory, offs: Tensor | None) -> tuple[Tensor | None, int]:
        """Returns offs and their number. For zero groups, offs point to memory: null would mean no groups at all."""
        e = 0 if offs is None else len(offs)
        return offs if offs is None or e else memory.empty((1,), torch.int32), e

    def _quantize_and_pack(
        self,
        memory: GuardedMemory,
        rows: Tensor,
        x: Tensor,
        topk_ids: Tensor | None,
        topk_scores: Tensor | None,
        format: str,
        indices: Tensor,
        inverse: Tensor,
        num_experts: int,
        *,
        dtype: torch.dtype,
        rounding: str,
    ) -> None:
        f, (m, k), top_k = FORMATS[format], x.shape, inverse.shape[1]
        blocks, size = f.blocks(k), f.scale_dtype.itemsize
        # Values and scales have no tensor.
        columns = [(0, 1, k, 1, k, 0), (0, size, blocks, 1, blocks, 0), *columns_of(None, None, topk_ids, topk_scores)]
        how = list(FORMATS).index(format), ROUNDINGS.index(rounding), FP8_TYPES.index(dtype)
        what = x, IN_TYPES.index(x.dtype), m, k, x.stride(0), *how, inverse, top_k
        of_rows = indices, rows, len(rows), num_experts, torch.tensor(columns), len(columns)
        self._call("quantize_and_pack", *what, *of_rows)

    # Activations

    def _activate(
        self, memory: GuardedMemory, a: Tensor, h: Tensor, activation: str, *, interleaved: bool = False
    ) -> None:
        how = IN_TYPES.index(h.dtype), ACTIVATIONS.index(activation), interleaved
        self._call("activate", h, a, *a.shape, h.stride(0), *how)

    def _add_bias(self, memory: GuardedMemory, out: Tensor, x: Tensor, bias: Tensor, offs: Tensor) -> None:
        self._call("add_bias", x, bias, offs, len(offs), *x.shape, x.stride(0), IN_TYPES.index(x.dtype), out)

    def _sum_groups(
        self,
        memory: GuardedMemory,
        out: Tensor,
        x: Tensor,
        offs: Tensor,
        *,
        scores: Tensor | None = None,
        indices: Tensor | None = None,
        top_k: int | None = None,
    ) -> None:
        scratch = SCRATCH(lambda words: memory.empty((words,), torch.int32).data_ptr())
        rows = len(x if indices is None else indices)
        sizes = len(offs), rows, x.shape[1], x.stride(0), IN_TYPES.index(x.dtype)
        self._call("sum_groups", x, offs, *sizes, scores, indices, len(x), top_k or 1, out, scratch)

    def _quantize_activated(
        self,
        memory: GuardedMemory,
        *given: object,
        dtype: torch.dtype,
        rounding: str,
        bias: Tensor | None = None,
        offs: Tensor | None = None,
        interleaved: bool = False,
        keep_h: bool = True,
    ) -> None:
        q, scale, h_q, h_scale, h, activation, format = given
        how = ACTIVATIONS.index(activation), interleaved, list(FORMATS).index(format), ROUNDINGS.index(rounding)
        what = h, *q.shape, h.shape[1], h.stride(0), *how, FP8_TYPES.index(dtype)
        scratch = SCRATCH(lambda words: memory.empty((words,), torch.int32).data_ptr())
        groups = self._groups(memory, offs)
        self._call("quantize_activated", *what, q, scale, len(h_q), h_q, h_scale, *groups, scratch, bias)

    def _activate_backward(
        self,
        memory: GuardedMemory,
        grad_h: Tensor,
        a: Tensor,
        grad_scores: Tensor,
        grad: Tensor,
        h: Tensor,
        activation: str,
        *,
        scores: Tensor | None = None,
        h_scale: Tensor | None = None,
        format: str | None = None,
        indices: Tensor | None = None,
        interleaved: bool = False,
    ) -> None:
        fp8 = 0 if h_scale is None else FP8_TYPES.index(h.dtype)
        scale = None if h_scale is None else ctypes.byref(Scales.of(h, h_scale, format))
        sizes = *a.shape, h.stride(0), grad.stride(0)
        how = IN_TYPES.index(grad.dtype), fp8, scale, ACTIVATIONS.index(activation), interleaved
        of_slots = indices, -1 if indices is None else len(grad_scores), scores
        self._call("activate_backward", h, grad, *of_slots, grad_h, a, grad_scores, *sizes, *how)

    def _quantize_activated_backward(
        self,
        memory: GuardedMemory,
        *given: object,
        offs: Tensor,
        dtype: torch.dtype,
        grad_dtype: torch.dtype,
        rounding: str,
        align: int = 32,
        scores: Tensor | None = None,
        h_scale: Tensor | None = None,
        indices: Tensor | None = None,
        interleaved: bool = False,
        amax: str = "group",
        sum_grad_h: bool = False,
    ) -> None:
        *out, grad_bias, grad, h, activation, format = given
        fp8 = 0 if h_scale is None else FP8_TYPES.index(h.dtype)
        scale = None if h_scale is None else ctypes.byref(Scales.of(h, h_scale, format))
        sizes = *grad.shape, h.shape[1], h.stride(0), grad.stride(0)
        of_h = fp8, scale, ACTIVATIONS.index(activation), interleaved
        of_groups = offs, offs.shape[0], out[2].shape[1], align
        how = list(FORMATS).index(format), ROUNDINGS.index(rounding), FP8_TYPES.index(dtype)
        how += FP8_TYPES.index(grad_dtype), AMAXES.index(amax)
        scratch = SCRATCH(lambda words: memory.empty((words,), torch.int32).data_ptr())
        of_slots = indices, -1 if indices is None else len(out[-1]), scores
        what = h, grad, *of_slots, *sizes, *of_h, *of_groups, *how, *out, grad_bias if sum_grad_h else None, scratch
        self._call("quantize_activated_backward", *what)

    def _transpose_weight(self, memory: GuardedMemory, q_t: Tensor, q: Tensor) -> None:
        self._call("transpose_weight", q, q_t, *q.shape, *q.stride()[:2])

    def _quantize_activated_backward_rows(
        self,
        memory: GuardedMemory,
        *given: object,
        offs: Tensor,
        dtype: torch.dtype,
        rounding: str,
        scores: Tensor | None = None,
        h_scale: Tensor,
        indices: Tensor | None = None,
        interleaved: bool = False,
        keep_grad_h: bool = False,
        keep_a: bool = False,
    ) -> None:
        *out, grad, h, activation, format = given
        sizes = *grad.shape, h.shape[1], h.stride(0), grad.stride(0)
        scale = ctypes.byref(Scales.of(h, h_scale, format))
        of_h = FP8_TYPES.index(h.dtype), scale, ACTIVATIONS.index(activation), interleaved
        groups = self._groups(memory, offs if FORMATS[format].order == "blocked" else None)
        how = list(FORMATS).index(format), ROUNDINGS.index(rounding), FP8_TYPES.index(dtype)
        scratch = SCRATCH(lambda words: memory.empty((words,), torch.int32).data_ptr())
        of_slots = indices, -1 if indices is None else len(out[-1]), scores
        self._call("quantize_activated_backward_rows", h, grad, *of_slots, *sizes, *of_h, *groups, *how, *out, scratch)

    # Scales

    def _dequantize(
        self,
        memory: GuardedMemory,
        out: Tensor,
        q: Tensor,
        scale: Tensor,
        format: str,
        *,
        along: str = "rows",
        offs: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        of_groups = "columns" if along == "tokens" else "rows" if FORMATS[format].order == "blocked" else None
        groups = GROUPS.index(of_groups if offs is not None else None)
        scales = Scales.of(q, scale, format, along)
        *outer, rows, k = q.shape
        strides = q.stride()[:2] if outer else (0, q.stride(0))
        what = q, FP8_TYPES.index(q.dtype), *(outer or [1]), rows, k, *strides, ctypes.byref(scales)
        how = offs if groups else None, offs.shape[0] if groups else 0, groups, IN_TYPES.index(out.dtype)
        self._call("dequantize", *what, *how, out)

    def _expand_scales(
        self,
        memory: GuardedMemory,
        out: Tensor,
        q: Tensor,
        scale: Tensor,
        *,
        along: str = "rows",
        offs: Tensor | None = None,
    ) -> None:
        groups = 0 if offs is None else GROUPS.index("columns" if along == "tokens" else "rows")
        scales = Scales.of(q, scale, "blockwise", along)
        e = offs.shape[0] if groups else q.shape[0] if q.ndim == 3 else 1
        self._call("expand_scales", e, *q.shape[-2:], ctypes.byref(scales), offs, groups, out)

    def _swizzle_scales(
        self,
        memory: GuardedMemory,
        blocked: Tensor,
        starts: Tensor,
        scale: Tensor,
        *,
        groups: str | None = None,
        offs: Tensor | None = None,
    ) -> None:
        self._scales(False, scale, blocked, scale, groups, offs, starts if groups in GROUPS[1:] else None)

    def _unswizzle_scales(
        self,
        memory: GuardedMemory,
        scale: Tensor,
        blocked: Tensor,
        rows: int,
        cols: int,
        *,
        groups: str | None = None,
        offs: Tensor | None = None,
    ) -> None:
        self._scales(True, blocked, scale, scale, groups, offs, None)

    def _scales(
        self,
        back: bool,
        source: Tensor,
        out: Tensor,
        plain: Tensor,
        groups: str | None,
        offs: Tensor | None,
        starts: Tensor | None,
    ) -> None:
        *experts, r, c = plain.shape
        e, stride = (experts[0], plain.stride(0)) if experts else (1 if offs is None else offs.shape[0], 0)
        how = GROUPS.index(groups if offs is not None else None)
        self._call("swizzle_scales", back, source, out, offs, starts, e, r, c, plain.stride(-2), stride, how)

    # Products

    def _scaled_grouped_mm(
        self,
        memory: GuardedMemory,
        out: Tensor,
        a: Tensor,
        b: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        format: str,
        offs: Tensor,
        *,
        indices: Tensor | None = None,
        top_k: int | None = None,
        out_dtype: torch.dtype | None = None,
        use_fast_accum: bool = True,
        out_transposed: bool = False,
        low_rank_a: Tensor | None = None,
        low_rank_b: Tensor | None = None,
        adds: bool = False,
        counter: bool = False,
    ) -> None:
        of_sum = b.ndim == 2
        along = "tokens" if of_sum and FORMATS[format].block else "rows"  # whole rows have one scale per group
        of_a = Scales.of(a, scale_a, format, along)
        of_b = Scales.of(b.mT, scale_b.mT if FORMATS[format].order == "column_major" else scale_b, format, along)
        rows = a.shape[0] if indices is None else indices.shape[0]
        what_a = a, FP8_TYPES.index(a.dtype), rows, a.shape[1], a.stride(0)
        what_b = b, FP8_TYPES.index(b.dtype), b.shape[-1], b.stride(-1), 0 if of_sum else b.stride(0)
        scales = ctypes.byref(of_a), ctypes.byref(of_b)
        how = of_sum, *scales, offs, offs.shape[0], adds, out_transposed, out.dtype == torch.float32
        low_rank = low_rank_a, low_rank_b, 0 if low_rank_a is None else low_rank_a.shape[1]  # both contiguous along R
        what_rows = indices, a.shape[0], top_k or 1, counter, *low_rank
        scratch = SCRATCH(lambda words: memory.empty((words,), torch.int32).fill_(9).data_ptr())
        self._call("scaled_grouped_mm", *what_a, *what_b, *how, out, use_fast_accum, *what_rows, scratch)

    def _add_scaled_grouped_mm(
        self, memory: GuardedMemory, out: Tensor, total: Tensor, *product: object, **how: object
    ) -> None:
        self._scaled_grouped_mm(memory, total, *product, **how, adds=True)
        out.copy_(total)

    def add_low_rank(self, out: Tensor, a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        """a [M, R] and b [E, N, R] are contiguous."""
        memory = GuardedMemory()
        out, a, b, offs = map(memory.copy, (out, a, b, offs))
        self._call("add_low_rank", out, out.dtype == torch.float32, *out.shape, a, b, a.shape[1], offs, offs.shape[0])
        memory.assert_untouched_around()
        return out

    def add_groups(self, total: Tensor, product: Tensor, ends: Tensor) -> Tensor:
        memory = GuardedMemory()
        total, product, ends = memory.copy(total), memory.copy(product), memory.copy(ends)
        total_float32, product_float32 = (t.dtype == torch.float32 for t in (total, product))
        sizes = len(product), product[0].numel()
        self._call("add_groups", total, total_float32, product, product_float32, ends, *sizes)
        memory.assert_untouched_around()
        return total

    def prepare_offs(self, offs: Tensor, limit: int, multiple: int) -> Tensor:
        memory = GuardedMemory()
        safe = memory.empty((offs.shape[0] + 1,), torch.int32)
        self._call("prepare_offs", memory.copy(offs), safe, offs.shape[0], limit, multiple)
        memory.assert_untouched_around()
        return safe

    def zero_rows(self, out: Tensor, first: int) -> Tensor:
        memory = GuardedMemory()
        out, first_row = memory.copy(out), memory.copy(torch.tensor([first], dtype=torch.int32))
        self._call("zero_rows", out, first_row, out.shape[0], out.shape[1] * out.element_size())
        memory.assert_untouched_around()
        return out

    def zero_empty_groups(self, out: Tensor, ends: Tensor) -> Tensor:
        memory = GuardedMemory()
        out, ends = memory.copy(out), memory.copy(ends)
        self._call("zero_empty_groups", out, ends, out.shape[0], out[0].numel() * out.element_size())
        memory.assert_untouched_around()
        return out


def _as_c(value: object) -> object:
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr() if value.numel() else None)
    if value is None:
        return ctypes.c_void_p(None)
    if not isinstance(value, (bool, int, float)):  # a structure, passed by reference
        return value
    if isinstance(value, float):
        return ctypes.c_double(value)
    return ctypes.c_bool(value) if isinstance(value, bool) else ctypes.c_int64(value)
