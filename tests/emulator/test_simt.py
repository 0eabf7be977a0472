"""The quantizers' kernels without a GPU: hipified, run on the CPU at wave sizes 32 and 64, and compared byte for byte.

Outputs start as 0xFF between inaccessible pages. A call fails if some threads miss a barrier, an access is out of
bounds, a vector access is misaligned, or a launch never ends (tests/toolchain/simt). With a wave of 64 the emulated
chip casts to the FNUZ formats, with a wave of 32 to the other formats. So fast kernels write every format on one chip,
and generic kernels on the other.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from helpers import (
    CORRECTNESS_MKE,
    FP8_DTYPES,
    INPUT_DTYPES,
    LAYOUTS,
    corrupt_offs,
    group_offs,
    misaligned,
    pairs,
    short,
    slot_indices,
    strided_2d,
    wide,
)
from quantizers import one_direction
from simt_checks import ON_LINUX, WAVES
from simt_kernels import FORMATS, Waves
from torch import Tensor

from moe_fp8_ext import reference
from moe_fp8_ext.reference.numerics import FP8_MAX

pytestmark = ON_LINUX
OF_ALL_FORMATS = pytest.mark.parametrize("format", FORMATS)
BY_SIZE = [torch.bfloat16, torch.float32]  # dtypes of equal size take the same path
OF_WHOLE_ROWS = pytest.mark.parametrize("format", ["rowwise"])
MOST_EXPERTS = 1024
ALIGNS = (1, 8, 16, 32, 64, 128, 256)


def check(kernels: Waves, x: Tensor, format: str, offs: Tensor, align: int | None = None, **how: object) -> None:
    """Checks every quantizer of tokens. quantize_both has the outputs of the other two, so it stands for them."""
    how = {"dtype": torch.float8_e4m3fn, **how}
    for amax in (amax for amax in FORMATS[format].amaxes if amax != "batch"):
        of_tokens = dict(offs=offs, align=align, amax=amax, **how)
        want = reference.quantize_both(x, format, **of_tokens)
        kernels.check_as(want, "quantize_both", x, format, **of_tokens)
        kernels.check_as(want[2:], "quantize_tokens", x, format, **of_tokens)
    kernels.check_as(want[:2], "quantize_rows", x, format, offs=offs, **how)
    if FORMATS[format].order == "blocked":
        kernels.check("quantize_rows", x, format, **how)


def check_weight(kernels: Waves, w: Tensor, format: str, **how: object) -> None:
    how = {"dtype": torch.float8_e4m3fn, **how}
    want = reference.quantize_weight(w, format, **how)
    kernels.check_as(want, "quantize_weight", w, format, **how)
    for directions, alone in one_direction(want).items():
        kernels.check_as(alone, "quantize_weight", w, format, directions=directions, **how)


@OF_ALL_FORMATS
@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=short)
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
def test_dtypes(kernels, format, dtype, fp8):
    for k, rounding in zip((67, 136), FORMATS[format].roundings, strict=True):
        x, offs = wide(140, k, dtype=dtype), group_offs("zipf", 140, 3)
        check(kernels, x, format, offs, dtype=fp8, rounding=rounding)
        check_weight(kernels, x[:138].view(2, 69, k), format, dtype=fp8, rounding=rounding)


@OF_ALL_FORMATS
@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=short)
def test_roundings(kernels, format, fp8):
    for k, rounding in zip((136, 67), FORMATS[format].roundings, strict=True):
        check(kernels, wide(140, k), format, group_offs("zipf", 140, 2), dtype=fp8, rounding=rounding)
        check_weight(kernels, wide(1, 140, k), format, dtype=fp8, rounding=rounding)


@OF_ALL_FORMATS
@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=short)
def test_every_bfloat16_value_is_cast(kernels, format, fp8):
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    values = values[values.abs() < FP8_MAX[fp8]]
    block = FORMATS[format].block or 256
    rows = torch.nn.functional.pad(values, (0, -len(values) % (block - 1))).view(-1, block - 1)
    x = torch.nn.functional.pad(rows, (0, 1), value=FP8_MAX[fp8])  # every block has multiplier 1
    for view in (x, misaligned(x)):
        kernels.check("quantize_rows", view, format, dtype=fp8)


@OF_ALL_FORMATS
@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=short)
def test_ties_and_their_neighbours_are_cast(kernels, format, fp8):
    codes = torch.arange(256, dtype=torch.uint8).view(fp8).float()
    codes = codes[codes.isfinite()].sort().values
    ties = (codes[1:] + codes[:-1]) / 2
    values = torch.cat([ties, torch.nextafter(ties, codes[:-1]), torch.nextafter(ties, codes[1:])])
    block = FORMATS[format].block or 256
    rows = torch.nn.functional.pad(values, (0, -len(values) % (block - 1))).view(-1, block - 1)
    x = torch.nn.functional.pad(rows, (0, 1), value=FP8_MAX[fp8])
    for view in (x, misaligned(x)):
        kernels.check("quantize_rows", view, format, dtype=fp8)


@OF_ALL_FORMATS
def test_every_exponent(kernels, format):
    """float32 values of every exponent, subnormals included, are quantized alone and as the amax of a block."""
    x = torch.cat([1 << torch.arange(23), torch.arange(1, 255) << 23]).int()[:, None] + torch.tensor([-1, 0, 1])
    x = x.flatten().view(torch.float32)[:, None]
    for rounding in FORMATS[format].roundings:
        for fp8 in FP8_DTYPES:
            kernels.check("quantize_rows", x, format, dtype=fp8, rounding=rounding)


@OF_ALL_FORMATS
@pytest.mark.parametrize("shape", CORRECTNESS_MKE, ids=short)
def test_shapes(kernels, format, shape):
    """More rows or more experts would only add equal tiles. Other tests cover long groups of whole rows."""
    m, k, e = min(shape[0], 150), *shape[1:]
    check(kernels, wide(m, k), format, group_offs("zipf", m, e))
    check_weight(kernels, wide(min(e, 3), m, k), format, dtype=torch.float8_e5m2)


@OF_ALL_FORMATS
@pytest.mark.parametrize("shape", [(0, 0, 0), (0, 0, 3), (5, 0, 2), (0, 5, 2), (5, 3, 0), (1, 1, 1)], ids=short)
def test_zero_sizes(kernels, format, shape):
    m, k, e = shape
    check(kernels, wide(m, k), format, group_offs("uniform", m, e))
    check_weight(kernels, wide(e, m, k), format)


@OF_WHOLE_ROWS
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
@pytest.mark.parametrize("k", [8, 4096, 9001, 33000])
def test_rows_of_more_than_registers_hold(kernels, format, k, dtype):
    kernels.check("quantize_rows", wide(3, k, dtype=dtype), format, dtype=torch.float8_e4m3fn)


@OF_WHOLE_ROWS
@pytest.mark.parametrize("dtype", BY_SIZE, ids=short)
def test_rows_that_run_beside_columns(kernels, format, dtype):
    """Rows have 2048 to 6544 or 23232 bytes, which are the emulated chips' limits for rows beside columns. Neighbouring
    sizes run after the columns."""
    shortest, *longest = (n // dtype.itemsize for n in (2048, 6544, 23232))
    for k in (shortest - 8, shortest, shortest + 8, shortest + 9, *longest, *(n + 8 for n in longest)):
        x = wide(21, k, dtype=dtype)
        x[4, 5], x[20, 7] = float("nan"), float("inf")
        offs = group_offs("tail_rows", 21, 3)
        kernels.check("quantize_both", x, format, offs=offs, dtype=torch.float8_e4m3fn)
        check_weight(kernels, x.view(3, 7, k)[::2, 1:], format)


def test_rows_in_step_with_columns(kernels):
    """Groups have on average a third of the emulated L2, and x is six times as large as it. Kernels run one after
    another, so the columns get no messages from the rows, and the rows then see that the columns have ended."""
    groups, rows, k = 19, 1024, 512
    x = wide(groups * rows, k)
    offs = group_offs("zipf", len(x), groups)
    kernels.check("quantize_both", x, "rowwise", offs=offs, dtype=torch.float8_e4m3fn)
    check_weight(kernels, x.view(groups, rows, k), "rowwise")


@OF_WHOLE_ROWS
@pytest.mark.parametrize("dtype", BY_SIZE, ids=short)
def test_group_longer_than_shared_memory_holds(kernels, format, dtype):
    check(kernels, wide(2500, 40, dtype=dtype), format, group_offs("one_giant", 2500, 3))
    among_others = torch.tensor([0, 1, 5, 1900, 0, 130, 17]).cumsum(0).int()
    for k, align in ((72, 32), (67, 8)):
        check(kernels, wide(2060, k, dtype=dtype), format, among_others, align)


@OF_WHOLE_ROWS
@pytest.mark.parametrize("dtype", BY_SIZE, ids=short)
@pytest.mark.parametrize("wave", [32, 64])
def test_blocks_that_share_a_strip_and_do_not_run_at_once(wave, format, dtype, libraries, tmp_path, monkeypatch):
    """Seven blocks share the strips of long groups and run one after another. The first block recomputes the results of
    blocks that have not begun, and the last one receives every message. Only fast kernels share strips."""
    monkeypatch.setenv("SIMT_MULTIPROCESSORS", "7")
    monkeypatch.setenv("SIMT_THREADS", "1")
    kernels = Waves(Path(shutil.copy(libraries[wave], tmp_path)))
    fp8 = {"dtype": torch.float8_e4m3fnuz if wave == 64 else torch.float8_e4m3fn}
    offs = torch.tensor([4100, 0, 3, 2300, 11000]).cumsum(0).int()
    m, k = int(offs[-1]) + 200, 72
    x = wide(m, k, dtype=dtype)
    x[4099, 3], x[9000, 70] = float("nan"), float("-inf")
    check(kernels, x, format, offs, **fp8)
    check(kernels, x, format, offs + 30, indices=slot_indices(m, 1, m + 30), top_k=1, **fp8)
    check_weight(kernels, wide(2, 2900, k, dtype=dtype), format, **fp8)
    as_long = torch.tensor([1400] * 6).cumsum(0).int()  # with waves of 64 these take over half of the blocks, hence all
    check(kernels, x[:8400], format, as_long, **fp8)
    among_short = torch.tensor([40] * 20 + [1900] + [40] * 20).cumsum(0).int()  # small blocks
    check(kernels, x[:3600], format, among_short, **fp8)
    check(kernels, x[:3600], format, among_short, indices=slot_indices(3600, 1, 3600), top_k=1, **fp8)


def test_long_groups_without_columns(kernels):
    """There are no columns and so no mailboxes, though groups are long enough to share. Runs both types that a chip
    casts to."""
    offs, x = torch.tensor([30, 4900, 5000]).int(), torch.empty(5000, 8, dtype=torch.bfloat16)[:, :0]
    for fp8 in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        check(kernels, x, "rowwise", offs, dtype=fp8)


@OF_ALL_FORMATS
def test_group_layouts(kernels, format):
    for layout in LAYOUTS:
        check(kernels, wide(301, 40), format, group_offs(layout, 301, 5))


@pytest.mark.parametrize(
    ("format", "align"),
    [(f, n) for f, about in FORMATS.items() for n in ALIGNS if about.aligns[0] <= n <= about.aligns[1]],
)
def test_group_sizes_around_every_tile(kernels, format, align):
    sizes = torch.tensor([1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 0, 255, 257])
    check(kernels, wide(int(sizes.sum()) + 3, 72), format, sizes.cumsum(0).int(), align)


@OF_ALL_FORMATS
def test_max_experts(kernels, format):
    for m in (0, 700):
        check(kernels, wide(m, 24), format, group_offs("zipf", m, MOST_EXPERTS))


@OF_ALL_FORMATS
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
def test_strides_and_alignment(kernels, format, dtype):
    x, offs = wide(130, 136, dtype=dtype), group_offs("zipf", 130, 3)
    for _, view in [
        *strided_2d(x),
        *((f"misaligned {n}", misaligned(x, n)) for n in (2, 3, 4, 8)),
        ("row 0", x[:1].expand(130, 136)),
    ]:
        check(kernels, view, format, offs)
        check_weight(kernels, view[None] if view.stride(0) != 136 else view.view(2, 65, 136), format)
    check_weight(kernels, wide(6, 150, 72, dtype=dtype)[::2, 1::3, 8:48], format)


@OF_ALL_FORMATS
def test_corrupt_offsets(kernels, format):
    for m in (1, 37, 200):
        for offs in corrupt_offs(m):
            check(kernels, wide(m, 56), format, offs)


@OF_ALL_FORMATS
@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=short)
def test_non_finite_values(kernels, format, fp8):
    """Group sizes have every remainder modulo 4. Padding is zero even beside the NaN bytes of a poisoned column."""
    offs = torch.tensor([1, 2, 3, 4, 13, 15, 0, 30]).cumsum(0).int()
    for k, rounding in zip((40, 43), FORMATS[format].roundings, strict=True):
        x = wide(160, k)
        x[(offs - 1).long(), 3], x[offs[4], 5], x[89, 8], x[96:128] = float("nan"), float("-inf"), float("inf"), 0
        check(kernels, x, format, offs, dtype=fp8, rounding=rounding)
        check_weight(kernels, x.view(2, 80, k), format, dtype=fp8, rounding=rounding)


INDEXED = pairs(
    format=list(FORMATS),
    dtype=INPUT_DTYPES,
    shape=[(100, 136, 3, 2), (53, 70, 3, 2), (200, 1048, 4, 1), (3000, 40, 2, 2)],
)


@pytest.mark.parametrize(*INDEXED, ids=short)
def test_by_index(kernels, format, dtype, shape):
    """Rows are aligned or not, beside columns or not. Groups fit into shared memory, except one."""
    m, k, e, top_k = shape
    x, indices, offs = wide(m, k, dtype=dtype), slot_indices(m, 2, m + 40), group_offs("zipf", m + 30, e)
    check(kernels, x, format, offs, indices=indices, top_k=top_k)


@OF_ALL_FORMATS
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
def test_by_index_of_views(kernels, format, dtype):
    x, one, three = wide(8, 1025, dtype=dtype)[:, :1024], *(torch.tensor([i], dtype=torch.int32) for i in (1, 3))
    check(kernels, x, format, one, indices=three, top_k=1)
    for (_, view), fp8 in zip(strided_2d(wide(50, 64, dtype=dtype)), FP8_DTYPES, strict=True):
        check(kernels, view, format, group_offs("zipf", 60, 3), indices=slot_indices(50, 1, 60), top_k=1, dtype=fp8)


@OF_ALL_FORMATS
@pytest.mark.parametrize("wave", WAVES)
def test_another_number_of_multiprocessors(wave, format, libraries, tmp_path, monkeypatch):
    """Another grid distributes the work differently. Device attributes are read once, so the library is copied."""
    monkeypatch.setenv("SIMT_MULTIPROCESSORS", "7")
    kernels = Waves(Path(shutil.copy(libraries[wave], tmp_path)))
    check(kernels, wide(300, 304), format, group_offs("zipf", 300, 5))
    check(kernels, wide(300, 303), format, group_offs("zipf", 300, 5))
