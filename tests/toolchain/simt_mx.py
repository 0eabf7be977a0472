"""The emulated kernels of the MXFP8 recipe, called like the functions of the reference."""

from __future__ import annotations

import torch
from guarded import GuardedMemory
from torch import Tensor

from moe_fp8_ext import shapes

IN_TYPES = (torch.bfloat16, torch.float16, torch.float32)  # enum class InType
FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)  # Fp8Type
NAMES = "q", "scale", "q_t", "scale_t", "padded_offs"
DIRECTIONS = ("rows", "columns", "rows and columns", "weight")  # of simt_quantize_mx


class MxKernels:
    """For a class with `_call`; every output lies in guarded memory, full of 0xFF."""

    def _mx(
        self,
        x: Tensor,
        directions: str,
        scaling: str,
        layout: str,
        fp8: torch.dtype,
        offs: Tensor | None = None,
        align: int = 32,
        indices: Tensor | None = None,
        top_k: int = 1,
    ) -> tuple[Tensor, ...]:
        """`directions`: one of DIRECTIONS."""
        memory, blocked = GuardedMemory(), layout == "blocked"
        x, indices, offs = (None if t is None else memory.copy(t) for t in (x, indices, offs))
        e, *_, k = (0, *x.shape) if offs is None else (offs.shape[0], *x.shape)
        sizes, positions, strides, places = {}, 0, (0, x.stride(0)), None
        if directions == "weight":
            e, rows, k = x.shape
            strides, positions = x.stride()[:2], rows
            sizes = dict(zip(NAMES, shapes.quantize_mx_weight(x.shape), strict=False))
        else:
            rows = x.shape[0] if indices is None else indices.shape[0]
            if "rows" in directions:
                of_groups = None if offs is None else e
                sizes |= zip(NAMES[:2], shapes.quantize_mx_1x32((rows, k), blocked, of_groups), strict=True)
            if "columns" in directions:
                sizes |= zip(NAMES[2:], shapes.quantize_mx_32x1((rows, k), e, align, blocked), strict=True)
                positions = shapes.padded_extent(rows, e, align)
            elif offs is not None:
                places = memory.empty((rows,), torch.int32)
        dtypes = dict(zip(NAMES, (fp8, torch.float8_e8m0fnu, fp8, torch.float8_e8m0fnu, torch.int32), strict=True))
        out = {name: memory.empty(size, dtypes[name]) for name, size in sizes.items()}
        what = x, IN_TYPES.index(x.dtype), e, rows, k, *strides, indices, x.shape[0], top_k, offs, align, positions
        by_groups = blocked and offs is not None
        how = blocked, scaling == "floor", FP8_TYPES.index(fp8), by_groups, places
        self._call("quantize_mx", memory, DIRECTIONS.index(directions), *what, *how, *map(out.get, NAMES))
        return tuple(out.values())

    def quantize_mx_1x32(
        self, x: Tensor, scaling: str, layout: str, offs: Tensor | None, fp8: torch.dtype
    ) -> tuple[Tensor, ...]:
        return self._mx(x, "rows", scaling, layout, fp8, offs)

    def quantize_mx_32x1(
        self, x: Tensor, offs: Tensor, scaling: str, layout: str, align: int, fp8: torch.dtype
    ) -> tuple[Tensor, ...]:
        return self._mx(x, "columns", scaling, layout, fp8, offs, align)

    def quantize_mx_1x32_32x1(
        self, x: Tensor, offs: Tensor, scaling: str, layout: str, align: int, fp8: torch.dtype
    ) -> tuple[Tensor, ...]:
        return self._mx(x, "rows and columns", scaling, layout, fp8, offs, align)

    def quantize_mx_weight(self, w: Tensor, scaling: str, fp8: torch.dtype) -> tuple[Tensor, ...]:
        return self._mx(w, "weight", scaling, "blocked", fp8)

    def permute_pad_quantize_mx_1x32(
        self, x: Tensor, indices: Tensor, offs: Tensor | None, top_k: int, scaling: str, layout: str, fp8: torch.dtype
    ) -> tuple[Tensor, ...]:
        return self._mx(x, "rows", scaling, layout, fp8, offs, 32, indices, top_k)

    def permute_pad_quantize_mx_1x32_32x1(
        self,
        x: Tensor,
        indices: Tensor,
        offs: Tensor,
        top_k: int,
        scaling: str,
        layout: str,
        align: int,
        fp8: torch.dtype,
    ) -> tuple[Tensor, ...]:
        return self._mx(x, "rows and columns", scaling, layout, fp8, offs, align, indices, top_k)
