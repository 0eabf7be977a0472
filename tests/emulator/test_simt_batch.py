"""The kernels for columns with one scale for the whole batch, without a GPU; see test_simt.py."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from helpers import (
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
from simt_checks import ON_LINUX, WAVES
from simt_kernels import Waves
from torch import Tensor

pytestmark = ON_LINUX


def check(kernels: Waves, x: Tensor, offs: Tensor, **how: object) -> None:
    """Checks quantize_both and, for bfloat16, quantize_tokens. Other dtypes use the same kernels for both ops."""
    for op in ("quantize_tokens", "quantize_both") if x.dtype == torch.bfloat16 else ("quantize_both",):
        kernels.check(op, x, "rowwise", offs=offs, amax="batch", **{"dtype": torch.float8_e4m3fn, **how})


def by_index(m: int, p: int, top_k: int = 2) -> dict[str, object]:
    return {"indices": slot_indices(m, top_k, p), "top_k": top_k}


@pytest.mark.parametrize(*pairs(dtype=INPUT_DTYPES, fp8=FP8_DTYPES, rounding=["exact", "pow2"], k=[67, 136]), ids=short)
def test_dtypes(kernels, dtype, fp8, rounding, k):
    x = wide(140, k, dtype=dtype)
    check(kernels, x, group_offs("zipf", 140, 3), dtype=fp8, rounding=rounding)
    check(kernels, x, group_offs("tail_rows", 300, 3), dtype=fp8, rounding=rounding, **by_index(140, 300))


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
@pytest.mark.parametrize("shape", [(3, 4096), (5, 8192), (1, 9001), (3000, 40), (700, 264), (9, 1)], ids=short)
def test_shapes(kernels, shape, dtype):
    m, k = shape
    check(kernels, wide(m, k, dtype=dtype), group_offs("zipf", 2 * m, 4), **by_index(m, 2 * m))


@pytest.mark.parametrize("shape", [(0, 0, 0), (0, 0, 3), (5, 0, 2), (0, 5, 2), (5, 3, 0), (1, 1, 1)], ids=short)
def test_zero_sizes(kernels, shape):
    m, k, e = shape
    check(kernels, wide(m, k), group_offs("uniform", m, e))
    for p in (0, 7):
        check(kernels, wide(m, k), group_offs("uniform", p, e), **by_index(m, p))


@pytest.mark.parametrize("align", [1, 8, 16, 32, 256])
def test_groups(kernels, align):
    """Groups have every layout, and sizes around every tile size."""
    for layout in LAYOUTS:
        check(kernels, wide(90, 40), group_offs(layout, 301, 5), align=align, **by_index(90, 301, 4))
    sizes = torch.tensor([1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129, 0, 255, 257])
    check(kernels, wide(int(sizes.sum()) + 3, 72), sizes.cumsum(0).int(), align=align)


def test_max_experts(kernels):
    for m in (0, 700):
        check(kernels, wide(m, 24), group_offs("zipf", m, 1024))


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
def test_strides_and_alignment(kernels, dtype):
    x, offs = wide(70, 136, dtype=dtype), group_offs("zipf", 90, 3)
    views = [*strided_2d(x), *((n, misaligned(x, n)) for n in (2, 4, 8)), ("row 0", x[:1].expand(70, 136))]
    for _, view in views:
        check(kernels, view, offs, **by_index(70, 90))


def test_corrupt_offsets_and_indices(kernels):
    indices = torch.tensor([-1, 2**31 - 1, -(2**31), 40, 39, 0, 39, -40, 80, 7, 7, 7] * 4, dtype=torch.int32)
    for offs in corrupt_offs(48):
        check(kernels, wide(40, 56), offs, indices=indices, top_k=2)


@pytest.mark.parametrize(*pairs(dtype=INPUT_DTYPES, fp8=FP8_DTYPES, k=[40, 43]), ids=short)
def test_non_finite_values(kernels, dtype, fp8, k):
    """Each value that is not finite becomes one NaN, whether its row is routed or not. A column may have no finite
    value."""
    x = wide(60, k, dtype=dtype)
    x[5, 3], x[17, 4], x[59, 5], x[:, 7], x[::2, 8] = torch.nan, -torch.inf, torch.inf, torch.nan, -torch.nan
    x[:, 9], x[:, 10] = -0.0, 1e-30
    check(kernels, x, group_offs("tail_rows", 80, 4), dtype=fp8, **by_index(60, 80))
    check(kernels, x, group_offs("tail_rows", 60, 4), dtype=fp8)


@pytest.mark.parametrize("wave", WAVES)
def test_another_number_of_multiprocessors(wave, libraries, tmp_path, monkeypatch):
    monkeypatch.setenv("SIMT_MULTIPROCESSORS", "7")
    kernels = Waves(Path(shutil.copy(libraries[wave], tmp_path)))
    for k in (304, 303):
        check(kernels, wide(300, k), group_offs("zipf", 500, 5), **by_index(300, 500))
