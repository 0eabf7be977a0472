"""The kernels of scales in the blocked layout without a GPU: see test_simt.py."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from helpers import LAYOUTS, corrupt_offs, group_offs, misaligned, short, strided_2d
from simt_checks import ON_LINUX, WAVES, check
from simt_kernels import SimtKernels
from torch import Tensor

from moe_fp8_ext import reference, shapes

pytestmark = ON_LINUX


def scales(*shape: int) -> Tensor:
    return torch.randint(1, 256, shape, dtype=torch.uint8)


def check_experts(kernels: SimtKernels, scale: Tensor) -> None:
    check(kernels, "swizzle_scales_3d", scale)
    check(kernels, "unswizzle_scales_3d", reference.swizzle_scales_3d(scale), *scale.shape[1:])


def check_matrix(kernels: SimtKernels, scale: Tensor) -> None:
    check(kernels, "swizzle_scales_2d", scale)
    check(kernels, "unswizzle_scales_2d", reference.swizzle_scales_2d(scale), *scale.shape)
    check_experts(kernels, scale[None])


def check_groups(kernels: SimtKernels, scale: Tensor, offs: Tensor, dim: int) -> None:
    """What nobody owns comes from bytes that the way back must not look at."""
    name = ("m", "k")[dim]
    check(kernels, f"swizzle_scales_{name}_groups", scale, offs)
    blocked, _ = getattr(reference, f"swizzle_scales_{name}_groups")(scale, offs)
    blocked = blocked.masked_fill(blocked == 0, 77)
    check(kernels, f"unswizzle_scales_{name}_groups", blocked, offs, *scale.shape)


def check_both(kernels: SimtKernels, scale: Tensor, layout: str, e: int) -> None:
    for dim in (0, 1):
        check_groups(kernels, scale, group_offs(layout, scale.shape[dim], e), dim)


SIZES = [(0, 0), (0, 5), (5, 0), (1, 1), (31, 7), (128, 16), (129, 64), (127, 90), (300, 67), (385, 200)]


@pytest.mark.parametrize("shape", SIZES, ids=short)
def test_sizes(kernels, shape):
    check_matrix(kernels, scales(*shape))
    check_both(kernels, scales(*shape), "zipf", 0)
    check_both(kernels, scales(*shape), "tail_rows", 3)
    for e in (0, 3):
        check_experts(kernels, scales(e, *shape))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_group_layouts(kernels, layout):
    for shape, e in (((300, 67), 5), ((129, 96), 40), ((520, 264), 4)):
        check_both(kernels, scales(*shape), layout, e)


def test_groups_of_whole_blocks(kernels):
    sizes = torch.tensor([4, 0, 12, 16, 20, 64, 8, 100])
    for more in (0, 3):
        check_groups(kernels, scales(140, int(sizes.sum()) + more), sizes.cumsum(0).int(), 1)


def test_most_experts(kernels):
    for size in (0, 700):
        check_both(kernels, scales(size, 6), "zipf", shapes.MAX_EXPERTS)
        check_groups(kernels, scales(6, size), group_offs("zipf", size, shapes.MAX_EXPERTS), 1)
        check_groups(kernels, scales(6, 4 * size), group_offs("uniform", 4 * size, shapes.MAX_EXPERTS), 1)


def test_strides_and_alignment(kernels):
    scale = scales(150, 96)
    views = [view for _, view in strided_2d(scale)] + [misaligned(scale, n) for n in range(1, 16)]
    for view in [*views, scale[:1].expand(150, 96), scale[:, 3:50], scale[::2, 1:]]:
        check_matrix(kernels, view)
        check_both(kernels, view, "zipf", 3)
    experts = scales(6, 40, 64)
    for view in (experts[::2, 1::3, :41], experts.transpose(0, 1), experts[:, :, 5:]):
        check_experts(kernels, view)
    offs = group_offs("zipf", 150, 3)
    blocked, (of_groups, _) = reference.swizzle_scales_2d(scale), reference.swizzle_scales_m_groups(scale, offs)
    for n in range(1, 16):
        check(kernels, "unswizzle_scales_2d", misaligned(blocked, n), 150, 96)
        check(kernels, "unswizzle_scales_m_groups", misaligned(of_groups, n), offs, 150, 96)


def test_corrupt_offsets(kernels):
    for size in (1, 37, 200):
        for offs in corrupt_offs(size):
            check_groups(kernels, scales(size, 50), offs, 0)
            check_groups(kernels, scales(140, size), offs, 1)


@pytest.mark.parametrize("wave", WAVES)
def test_fewer_blocks_than_tiles(wave, libraries, tmp_path, monkeypatch):
    """One multiprocessor: blocks of groups take tile after tile. Read once a library, hence a copy of it."""
    monkeypatch.setenv("SIMT_MULTIPROCESSORS", "1")
    kernels = SimtKernels(Path(shutil.copy(libraries[wave], tmp_path)))
    for layout in ("uniform", "tail_rows"):
        check_both(kernels, scales(1300, 300), layout, 7)
