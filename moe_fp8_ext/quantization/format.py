"""The table of formats of quantized operands, read from the compiled module, and the shapes that follow from it.

Sizes may be `int` or `torch.SymInt`. So no function here calls `min`, branches on a size or converts one: each of these
would specialise a dynamic dimension under `torch.compile`.

Dims: M tokens, K input features, N output features, E experts, P padded tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moe_fp8_ext import _C

_LIMITS = _C.TABLES["limits"]
MAX_ROWS: int = _LIMITS["MAX_ROWS"]  # offsets are int32, and the last tile may extend past the last row
MAX_EXPERTS: int = _LIMITS["MAX_EXPERTS"]  # groups in one call
MAX_COUNTS: int = _LIMITS["MAX_COUNTS"]  # ranks times local experts
MAX_ALIGN: int = _LIMITS["MAX_ALIGN"]
SCALE_ROWS: int = _LIMITS["SCALE_ROWS"]  # rows and columns of the scale atom that Blackwell's tensor cores read
SCALE_COLUMNS: int = _LIMITS["SCALE_COLUMNS"]
COLUMN_ALIGN: int = _LIMITS["COLUMN_ALIGN"]  # alignment of a message's columns, in bytes
ROW_ALIGN: int = _LIMITS["ROW_ALIGN"]  # alignment of a message's rows, in bytes
GROUP_SCALES: int = _LIMITS["BLOCK"]  # rows or tokens by which the room for a group's scales is counted

Shape = tuple[int, ...]


def ceil_div(size: int, divisor: int) -> int:
    return (size + divisor - 1) // divisor


def round_up(size: int, multiple: int) -> int:
    """Rounds size up to a multiple of `multiple`."""
    return (size + multiple - 1) // multiple * multiple


def padded_extent(m: int, e: int, align: int) -> int:
    """P, the token extent of a group-padded operand.

    Padding a group to `align` adds fewer than `align` tokens. So this bound holds for all group sizes, and no shape
    depends on the contents of `offs`.
    """
    return round_up(m, align) + e * align


def blocked_shape(rows: int, columns: int, groups: str | None = None, e: int | None = None) -> Shape:
    """The shape of scales [rows, columns] in the blocked layout.

    Args:
        groups: "rows" or "columns" if `e` groups of these are blocked matrices of their own; "experts" if each of `e`
            experts is one, with shape [E, bytes of an expert]; None for one matrix.
    """
    if groups == "rows":
        return rows + SCALE_ROWS * e, round_up(columns, SCALE_COLUMNS)
    if groups == "columns":
        return round_up(rows, SCALE_ROWS), columns + SCALE_COLUMNS * e
    blocked_rows, blocked_columns = round_up(rows, SCALE_ROWS), round_up(columns, SCALE_COLUMNS)
    return (e, blocked_rows * blocked_columns) if groups == "experts" else (blocked_rows, blocked_columns)


class Layout(NamedTuple):
    """Shape and strides of a tensor of scales. Without strides it is contiguous."""

    shape: Shape
    strides: Shape | None = None

    def empty(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        if self.strides is None:
            return like.new_empty(self.shape, dtype=dtype)
        return like.new_empty_strided(self.shape, self.strides, dtype=dtype)


@dataclass(frozen=True)
class Format:
    """An entry of the table in csrc/numerics/format.h, which explains the fields."""

    name: str
    block: int
    weight_rows: int
    scale_dtype: torch.dtype
    order: str
    min_align: int
    max_align: int
    align: int
    roundings: tuple[str, ...]
    amaxes: tuple[str, ...]

    @property
    def has_square_blocks(self) -> bool:
        """Whether weights have the same bytes in both directions, transposed."""
        return self.block > 0 and self.block == self.weight_rows

    def blocks(self, elements: int) -> int:
        """The number of scaling blocks in a row of `elements`."""
        return ceil_div(elements, self.block) if self.block else 1

    def token_blocks(self, m: int, e: int, align: int) -> int:
        """The number of scaling blocks along the tokens of a group-padded operand. A block never straddles groups."""
        return padded_extent(m, e, max(align, self.block)) // self.block if self.block else 1

    def _matrix_layout(self, rows: int, blocks: int, groups: str | None, e: int | None) -> Layout:
        if self.order == "blocked":
            return Layout(blocked_shape(rows, blocks, groups, e))
        return Layout((rows, blocks), (1, round_up(rows, 4)) if self.order == "column_major" else None)

    def scale_of_rows(self, shape: Sequence[int], e: int | None = None) -> Layout:
        """The scales of an operand [..., K] quantized along rows, with `e` groups of rows if it has any."""
        *leading, k = shape
        if self.order == "row_major":
            return Layout((*leading, self.blocks(k)) if self.block else tuple(leading))
        (rows,) = leading
        return self._matrix_layout(rows, self.blocks(k), None if e is None else "rows", e)

    def scale_of_operand(self, shape: Sequence[int], along_tokens: bool, e: int | None) -> Layout:
        """The scales of [K, P] along tokens or, along rows, of [..., K] or a weight [E, rows, K]."""
        if along_tokens:
            return self.scale_of_tokens(shape[0], self.blocks(shape[1]), e)
        return self.scale_of_weight(*shape) if len(shape) == 3 else self.scale_of_rows(shape, e)

    def empty_rows(
        self, like: Tensor, shape: Sequence[int], dtype: torch.dtype, e: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """An operand [..., K] along rows and its scales, without values, on the device of `like`."""
        return like.new_empty(shape, dtype=dtype), self.scale_of_rows(shape, e).empty(like, self.scale_dtype)

    def squares(self, k: int) -> int:
        """The number of 128 x 128 squares across k features, with amax "square"."""
        return ceil_div(k, self.weight_rows)

    def scale_of_tokens(self, k: int, blocks: int, e: int, amax: str = "group") -> Layout:
        """The scales of an operand [K, P] quantized along tokens, with `blocks` scaling blocks along P."""
        rows = self.squares(k) if amax == "square" else k
        return self._matrix_layout(rows, blocks, "columns", e) if self.block else Layout((e, k))

    def empty_tokens(
        self, like: Tensor, m: int, k: int, dtype: torch.dtype, e: int, align: int, amax: str = "group"
    ) -> tuple[Tensor, Tensor]:
        """[M, K] along tokens, [K, P], and its scales, without values, on the device of `like`."""
        scale = self.scale_of_tokens(k, self.token_blocks(m, e, align), e, amax)
        return like.new_empty((k, padded_extent(m, e, align)), dtype=dtype), scale.empty(like, self.scale_dtype)

    def scale_of_weight(self, e: int, rows: int, k: int) -> Layout:
        """The scales of a weight operand [E, rows, K]."""
        if not self.block:
            return Layout((e, rows))
        if self.order == "blocked":
            return Layout(blocked_shape(rows, self.blocks(k), "experts", e))
        return Layout((e, ceil_div(rows, self.weight_rows), self.blocks(k)))

    def bytes_of_tokens(self, m: int, k: int, e: int, align: int, amax: str = "group") -> int:
        """The bytes of [M, K] quantized along tokens: fp8 values and their scales."""
        scale = self.scale_of_tokens(k, self.token_blocks(m, e, align), e, amax)
        if scale.strides is None:
            rows, columns = scale.shape
        else:
            rows, columns = scale.strides[1], scale.shape[1]
        return k * padded_extent(m, e, align) + rows * columns * self.scale_dtype.itemsize

    def transposed_scale(self, scale: Tensor) -> Tensor:
        """The scale that `scaled_grouped_mm` takes with the transposed view of an operand."""
        return scale.mT if self.order == "column_major" else scale


def _read(entry: dict[str, object]) -> Format:
    choices = {field: tuple(entry[field]) for field in ("roundings", "amaxes")}
    return Format(**{**entry, "scale_dtype": getattr(torch, entry["scale_dtype"]), **choices})


FORMATS: dict[str, Format] = {entry["name"]: _read(entry) for entry in _C.TABLES["formats"]}
