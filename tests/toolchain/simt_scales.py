"""FP8 types and scales of operands, as the emulated kernels take them."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from moe_fp8_ext.reference.numerics import FORMATS, round_up

FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)  # Fp8Type


class Scales(ctypes.Structure):
    """struct Scales of shim.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("group_stride", "row_stride", "block_stride", "blocks", "block_size")),
        *((name, ctypes.c_int64) for name in ("rows_log2", "layout")),
    )

    @classmethod
    def of(cls, q: Tensor, scale: Tensor, format: str, along: str = "rows") -> Scales:
        """The scales of an operand q [..., rows, K]."""
        f, rows, strides, weight = FORMATS[format], q.shape[-2], scale.stride(), q.ndim == 3
        if f.block is None:
            of_groups = (0, 1, rows, scale.shape[0]) if along == "tokens" else (*(0, *strides)[-2:], 0, 1)
            return cls(scale.data_ptr(), *of_groups, 0, 0, 0)
        blocks = f.blocks(q.shape[-1])
        if f.order == "blocked":
            of_column = round_up(rows, 128) if along == "tokens" else 0
            return cls(scale.data_ptr(), strides[0] if weight else 0, 0, of_column, blocks, f.block, 0, 2)
        blocks = scale.shape[-1] if along == "tokens" else blocks
        of_squares = weight or scale.shape[-2] < rows
        squares, layout = f.weight_rows.bit_length() - 1 if of_squares else 0, int(f.scale_dtype != torch.float32)
        return cls(scale.data_ptr(), *(strides if weight else (0, *strides)), blocks, f.block, squares, layout)
