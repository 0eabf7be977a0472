"""Hopper's GEMM with a third epilogue policy: it activates, and finds the amax of every 128 columns of a row. See
docs/kernels/gemm.md. Main loops, producers and schedulers are the package's own, unchanged."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from cache import CSRC
from helpers import group_offs
from hipified import hipify
from simt_checks import ON_LINUX, exact_fp8, exact_scales
from simt_library import RUNTIME, SIMT, compile_cxx
from torch import Tensor

from moe_fp8_ext import reference

pytestmark = ON_LINUX


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("epilogue")
    source, hip = folder / "csrc", folder / "hip"
    shutil.copytree(CSRC, source)
    shutil.copy(SIMT / "epilogue.cpp", source / "epilogue.cu")  # the headers that it includes must be hipified
    hipify(source, hip)
    flags = "-DSIMT_HOPPER", "-D__sm_90a__", "-DUSE_ROCM", "-D__HIP__", f"-I{hip}", "-shared", "-x", "c++"
    compile_cxx(*flags, hip / "epilogue.hip", RUNTIME, "-ldl", "-o", folder / "epilogue.so", wave=32)
    library = ctypes.CDLL(str(folder / "epilogue.so"))
    library.simt_relu_amax.restype = ctypes.c_char_p
    return library


def relu_amax(
    library: ctypes.CDLL, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns relu of the product with row scales, and amax [..., M, ceil(N / 128)]."""
    (m, k), n, k_grouped = a.shape, b.shape[-1], b.ndim == 2
    rows = (len(offs), m) if k_grouped else (m,)
    out, amax = torch.full((*rows, n), torch.nan), torch.zeros(*rows, -(-n // 128))
    b = b.mT.contiguous()
    tensors = (a, b, scale_a, scale_b, offs, out, amax)
    a_at, b_at, scale_a_at, scale_b_at, offs_at, out_at, amax_at = (ctypes.c_void_p(t.data_ptr()) for t in tensors)
    m, k, n, e = (ctypes.c_int64(size) for size in (m, k, n, len(offs)))
    what = a_at, m, k, b_at, n, k_grouped, scale_a_at, scale_b_at, offs_at, e
    error = library.simt_relu_amax(*what, out_at, amax_at)
    assert error is None, error
    return out, amax


@pytest.mark.parametrize("k_grouped", [False, True])
def test_relu_and_amax(library, k_grouped):
    m, k, n, e = 330, 288, 400, 3
    if k_grouped:
        offs = torch.tensor([96, 96, 288], dtype=torch.int32)
        args = exact_fp8(m, k), exact_fp8(n, k).mT, exact_scales(e, m), exact_scales(e, n), offs
    else:
        offs = group_offs("tail_rows", m, e)
        args = exact_fp8(m, k), exact_fp8(e, n, k).mT, exact_scales(m), exact_scales(e, n), offs
    want = reference.scaled_grouped_mm(*args[:4], "rowwise", offs, out_dtype=torch.float32).relu()
    with patch.dict(os.environ, SIMT_MULTIPROCESSORS="6"):
        out, amax = relu_amax(library, *args)
    assert torch.equal(out, want)
    assert torch.equal(amax, torch.stack([block.amax(-1) for block in want.split(128, -1)], -1))
