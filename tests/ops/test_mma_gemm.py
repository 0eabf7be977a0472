"""The GEMM for every GPU, with sizes, types and groups at the edges of its tiles.

On GPUs where other GEMMs come first, these tests run in a process of their own, in which this GEMM is the only one.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
import torch
from gemm_accuracy import real_operands
from gemm_problem import FORMATS, UNIT, check_exact, exact_2d2d, exact_2d3d
from helpers import FP8_DTYPES, assert_same, corrupt_offs, group_offs, misaligned, wide
from torch import Tensor

from moe_fp8_ext import build_info, reference
from moe_fp8_ext.ops import add_scaled_grouped_mm, scaled_grouped_mm

VARIABLE = "MOE_FP8_GEMM"
DTYPES = torch.bfloat16, torch.float32


@pytest.fixture
def mma(gpu: str) -> str:
    if build_info()["scaled_grouped_mm"][0]["name"] != "mma":
        pytest.skip("other GEMMs come first: see test_in_a_process_of_its_own")
    return gpu


def test_in_a_process_of_its_own(gpu):
    if build_info()["scaled_grouped_mm"][0]["name"] == "mma":
        pytest.skip("this is one")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "mma", __file__]
    run = subprocess.run(command, env=os.environ | {VARIABLE: "mma"}, capture_output=True, text=True)
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-3000:]


def test_unknown_name():
    command = [sys.executable, "-c", "import torch, moe_fp8_ext"]
    run = subprocess.run(command, env=os.environ | {VARIABLE: "fast"}, capture_output=True, text=True)
    assert run.returncode != 0 and f"{VARIABLE} must name a GEMM of this build, got fast" in run.stderr


def ends(r: random.Random, rows: int, groups: int, unit: int) -> Tensor:
    cuts = sorted(r.randrange(rows // unit + 1) * unit for _ in range(groups))
    return torch.tensor(cuts, dtype=torch.int32)


@pytest.mark.parametrize("seed", range(200))
def test_random_problems(seed, mma):
    """Sums are exact, so bytes equal the reference's, for all types and addresses."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    fmt, dtypes = r.choice(FORMATS), (r.choice(FP8_DTYPES), r.choice(FP8_DTYPES))
    if r.random() < 0.5:
        dtypes = r.choice(FP8_DTYPES[:2]), FP8_DTYPES[0]
    m, n, k, e = r.randrange(1, 600), r.randrange(1, 400), r.randrange(1, 500), r.randrange(1, 30)
    if r.random() < 0.5:
        m, n, k = m * 2, n // 16 * 16 + 16, k // 16 * 16 + 16
    of_sum = r.random() < 0.5
    unit = UNIT[fmt] if of_sum and fmt == "mxfp8_rowmajor" else 1
    make = exact_2d2d if of_sum else exact_2d3d
    a, b, *rest = make(fmt, m, k, n, ends(r, m, e, unit), mma, dtypes)
    if r.random() < 0.3:
        a, b = misaligned(a, r.randrange(1, 16)), misaligned(b.mT, r.randrange(1, 16)).mT
    check_exact([a, b, *rest], out_dtype=r.choice(DTYPES))


@pytest.mark.parametrize("fmt", FORMATS)
def test_adds_exactly(fmt, mma):
    for out_dtype in DTYPES:
        args = exact_2d2d(fmt, 800, 70, 150, torch.tensor([96, 96, 352, 800], dtype=torch.int32), mma)
        total = wide(4, 150, 70, dtype=out_dtype, device=mma)
        want = total.clone()
        reference.add_scaled_grouped_mm(want, *args)
        add_scaled_grouped_mm(total, *args)
        assert_same(total, want)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("sizes", [(700, 400, 272, 4), (1500, 1040, 130, 7), (129, 129, 130, 2)], ids=str)
def test_real_values(sizes, fmt, fast, mma):
    """Each term adds at most 2^-23 of the sum of magnitudes to the error. Other roundings count as 8 more terms.

    16-bit floats hold every value exactly, and float32 holds every product. Each step truncates its terms and the sum
    so far to 24 bits of the largest of them, which is at most the sum of magnitudes. Scales and promoted sums are
    rounded a few times more. FP8 tensor cores may keep fewer bits of all sums, except rowwise ones without fast
    accumulation.
    """
    major, minor = torch.cuda.get_device_capability()
    if (fast or fmt != "rowwise") and (major, minor) not in ((8, 0), (8, 6), (8, 7), (9, 0), (10, 0), (10, 3)):
        pytest.skip("how many bits this GPU keeps of sums of fp8 is not known")
    for args, terms, how in real_operands(fmt, *sizes, mma):
        a, b, *rest = args
        got = scaled_grouped_mm(*args, out_dtype=torch.float32, use_fast_accum=fast, **how)
        want = reference.scaled_grouped_mm(*args, out_dtype=torch.float64)
        magnitude = reference.scaled_grouped_mm(a.float().abs(), b.float().abs(), *rest, out_dtype=torch.float64)
        assert ((got.double() - want).abs() <= (terms + 8) * 2.0**-23 * magnitude).all()
        assert_same(scaled_grouped_mm(*args, out_dtype=torch.float32, use_fast_accum=fast, **how), got, "again")


@pytest.mark.parametrize("fmt", FORMATS)
def test_max_experts(fmt, mma):
    for layout in ("uniform", "one_giant", "all_empty", "tail_rows"):
        offs = group_offs(layout, 2048, 1024)
        check_exact(exact_2d3d(fmt, 2048, 64, 40, offs, mma))
        if fmt != "mxfp8_rowmajor":
            check_exact(exact_2d2d(fmt, 2048, 24, 40, offs, mma))


@pytest.mark.parametrize("fmt", FORMATS)
def test_offsets_are_not_trusted(fmt, mma):
    offs = torch.tensor([96, 160, 320], dtype=torch.int32)
    for make in (exact_2d3d, exact_2d2d):
        a, b, scale_a, scale_b, _, good = make(fmt, 320, 200, 136, offs, mma)
        for wrong in corrupt_offs(320, mma):
            if len(wrong) == len(good):
                scaled_grouped_mm(a, b, scale_a, scale_b, fmt, wrong)
    torch.cuda.synchronize()


@pytest.mark.parametrize("fmt", FORMATS)
def test_graph_follows_the_offsets(fmt, mma):
    *args, offs = exact_2d3d(fmt, 500, 96, 130, torch.tensor([100, 200, 400], dtype=torch.int32), mma)
    scaled_grouped_mm(*args, offs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = scaled_grouped_mm(*args, offs)
    for cuts in ([0, 500, 500], [1, 2, 3], [100, 200, 400]):
        offs.copy_(torch.tensor(cuts))
        graph.replay()
        assert_same(out, scaled_grouped_mm(*args, offs), f"groups that end at {cuts}")
