"""What a quantized operand is, as the compiled module has it, and the shapes that follow.

Sizes may be `int` or `torch.SymInt`, so there is no `min`, no `if` on a size and no conversion here: any of them would
specialise a dynamic dimension under `torch.compile`.

Dims: M tokens, K input features, N output features, E experts, P padded tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moe_fp8_ext import _C

_LIMITS = _C.limits()
MAX_ROWS: int = _LIMITS["MAX_ROWS"]  # int32 offsets, and tiles that reach beyond the last one
MAX_DIMS: int = _LIMITS["MAX_DIMS"]
MAX_EXPERTS: int = _LIMITS["MAX_EXPERTS"]  # groups in one call
MAX_COUNTS: int = _LIMITS["MAX_COUNTS"]  # ranks times local experts
MAX_ALIGN: int = _LIMITS["MAX_ALIGN"]
SCALE_ROWS: int = _LIMITS["SCALE_ROWS"]  # of a block of scales as Blackwell's tensor cores read them
SCALE_COLUMNS: int = _LIMITS["SCALE_COLUMNS"]
COLUMN_ALIGN: int = _LIMITS["COLUMN_ALIGN"]  # bytes, of the columns of a message
ROW_ALIGN: int = _LIMITS["ROW_ALIGN"]  # and of its rows
GROUP_SCALES: int = _LIMITS["BLOCK"]  # rows or tokens for which the scales of a group may have room at once

Shape = tuple[int, ...]


def ceil_div(size: int, divisor: int) -> int:
    return (size + divisor - 1) // divisor


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `size`."""
    return ceil_div(size, multiple) * multiple


def padded_extent(m: int, e: int, align: int) -> int:
    """P, the token extent of a group-padded operand.

    Padding every group to `align` adds fewer than `align` tokens a group, so the bound holds for all group sizes and
    no shape depends on the contents of `offs`.
    """
    return round_up(m, align) + e * align


def blocked_shape(rows: int, columns: int, groups: str | None = None, e: int | None = None) -> Shape:
    """Of scales [rows, columns] in the blocked layout: as one matrix, by `e` groups, or [E, bytes] of experts."""
    if groups == "rows":
        return rows + SCALE_ROWS * e, round_up(columns, SCALE_COLUMNS)
    if groups == "columns":
        return round_up(rows, SCALE_ROWS), columns + SCALE_COLUMNS * e
    of_matrix = round_up(rows, SCALE_ROWS), round_up(columns, SCALE_COLUMNS)
    return (e, of_matrix[0] * of_matrix[1]) if groups == "experts" else of_matrix


class Layout(NamedTuple):
    """Of a tensor of scales; without strides it is contiguous."""

    shape: Shape
    strides: Shape | None = None

    def empty(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        if self.strides is None:
            return like.new_empty(self.shape, dtype=dtype)
        return like.new_empty_strided(self.shape, self.strides, dtype=dtype)


@dataclass(frozen=True)
class Format:
    """An entry of the table in csrc/numerics/format.h, which says what its fields are."""

    name: str
    block: int
    weight_rows: int
    scale_dtype: torch.dtype
    order: str
    least_align: int
    most_align: int
    align: int
    roundings: tuple[str, ...]
    amaxes: tuple[str, ...]

    def blocks(self, elements: int) -> int:
        """Scaling blocks of so many elements in a row."""
        return ceil_div(elements, self.block) if self.block else 1

    def token_blocks(self, m: int, e: int, align: int) -> int:
        """Scaling blocks along the tokens of a group-padded operand: every group begins with a new one."""
        return padded_extent(m, e, max(align, self.block)) // self.block if self.block else 1

    def _of_matrix(self, rows: int, blocks: int, groups: str | None, e: int | None) -> Layout:
        if self.order == "blocked":
            return Layout(blocked_shape(rows, blocks, groups, e))
        return Layout((rows, blocks), (1, round_up(rows, 4)) if self.order == "column_major" else None)

    def scale_of_rows(self, shape: Sequence[int], e: int | None = None) -> Layout:
        """Of an operand [..., K] along rows; `e` counts groups of rows."""
        *leading, k = shape
        if self.order == "row_major":
            return Layout((*leading, self.blocks(k)) if self.block else tuple(leading))
        (rows,) = leading
        return self._of_matrix(rows, self.blocks(k), None if e is None else "rows", e)

    def squares(self, k: int) -> int:
        """Those that k features are in, with amax "square"."""
        return ceil_div(k, self.weight_rows)

    def scale_of_tokens(self, k: int, blocks: int, e: int, amax: str = "group") -> Layout:
        """Of an operand [K, P] along tokens, of so many scaling blocks."""
        rows = self.squares(k) if amax == "square" else k
        return self._of_matrix(rows, blocks, "columns", e) if self.block else Layout((e, k))

    def scale_of_weight(self, e: int, rows: int, k: int) -> Layout:
        """Of an operand [E, rows, K]."""
        if not self.block:
            return Layout((e, rows))
        if self.order == "blocked":
            return Layout(blocked_shape(rows, self.blocks(k), "experts", e))
        return Layout((e, ceil_div(rows, self.weight_rows), self.blocks(k)))

    def bytes_of_tokens(self, m: int, k: int, e: int, align: int, amax: str = "group") -> int:
        """What [M, K] takes along tokens: fp8 values and their scales."""
        scale = self.scale_of_tokens(k, self.token_blocks(m, e, align), e, amax)
        if scale.strides is None:
            rows, columns = scale.shape
        else:
            rows, columns = scale.strides[1], scale.shape[1]
        return k * padded_extent(m, e, align) + rows * columns * self.scale_dtype.itemsize

    def transposed_scale(self, scale: Tensor) -> Tensor:
        """What `scaled_grouped_mm` takes beside the transposed view of an operand."""
        return scale.mT if self.order == "column_major" else scale


def _read(entry: dict[str, object]) -> Format:
    choices = {field: tuple(entry[field]) for field in ("roundings", "amaxes")}
    return Format(**{**entry, "scale_dtype": getattr(torch, entry["scale_dtype"]), **choices})


FORMATS: dict[str, Format] = {entry["name"]: _read(entry) for entry in _C.formats()}
