"""Hopper's own GEMMs without a GPU. Copies arrive when they are issued, and products are computed when they are waited
for, so a pipeline stage that is released or filled at the wrong time shows. See test_simt.py; test_sm90_gemm.py tests
more on a GPU."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from cache import CSRC
from helpers import FP8_DTYPES, LAYOUTS, corrupt_offs, group_offs, pairs, short, slot_indices, wide
from simt_checks import ON_LINUX, exact_fp8, exact_scales
from simt_kernels import SimtKernels, Waves
from simt_library import RUNTIME, SIMT, compile_cxx
from simt_products import products
from torch import Tensor

from moe_fp8_ext import reference

pytestmark = ON_LINUX
OUT_DTYPES = [torch.float32, torch.bfloat16]
# Format, whether the tensor cores accumulate whole sums, and the amax of b along tokens.
KINDS = [("rowwise", True, "group"), ("rowwise", False, "group"), ("blockwise", True, "group")]
KINDS.append(("mxfp8", True, "group"))
SQUARES = "blockwise", True, "square"
KINDS.append(SQUARES)
ADDING = KINDS[0], SQUARES  # kinds with kernels that add
OF_KIND = pytest.mark.parametrize("kind", KINDS, ids=short)


@pytest.fixture
def hopper(gemm_of_hopper: Path) -> Waves:
    with patch.dict(os.environ, SIMT_MULTIPROCESSORS="6"):  # three clusters; the library asks once
        kernels = Waves(gemm_of_hopper)
        assert [(k.chip, k.wave, k.native_fnuz()) for k in kernels] == [("sm_90a", 32, False)]
    return kernels


def can_count(format: str, product: Tensor) -> bool:
    """Whether the dynamic scheduler can run: MXFP8, by index and K-grouped products always use another one."""
    return product.ndim == 2 and format != "mxfp8"


def check(
    hopper: Waves,
    args: tuple[object, ...],
    fast: bool,
    out_dtype: torch.dtype,
    *,
    counter: bool = False,
    **options: object,
) -> None:
    """Sums are exact, so bytes equal the reference's for every schedule. `counter` is whether the dynamic scheduler may
    run."""
    want = reference.scaled_grouped_mm(*args, **options, out_dtype=out_dtype)
    how = {"use_fast_accum": fast, "out_dtype": out_dtype, "counter": counter and can_count(args[4], want)}
    hopper.check_as((want,), "scaled_grouped_mm", *args, **options, **how)


def check_added(hopper: Waves, args: tuple[object, ...], fast: bool, dtype: torch.dtype) -> None:
    """Totals of empty groups do not change."""
    total = wide(args[5].shape[0], args[0].shape[0], args[1].shape[1], dtype=dtype)
    total[:, 0] = -0.0
    want = total.clone()
    reference.add_scaled_grouped_mm(want, *args)
    hopper.check_as((want,), "add_scaled_grouped_mm", total, *args, use_fast_accum=fast)


def types(format: str, fp8: torch.dtype) -> tuple[torch.dtype, bool]:
    """The dtype of a, and whether b is E4M3. fp8 is the dtype of the operand that may be E5M2: b for MXFP8, otherwise
    a."""
    return (FP8_DTYPES[0], fp8 == FP8_DTYPES[0]) if format == "mxfp8" else (fp8, True)


def ends(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).int()


PROBLEMS = pairs(
    layout=LAYOUTS,
    kind=KINDS,
    shape=[
        *((1, 16, 16, 4), (70, 144, 272, 2), (600, 128, 96, 4), (300, 656, 144, 2), (513, 32, 400, 5)),
        *((70, 144, 272, 3), (90, 48, 16, 1), (130, 272, 128, 5)),
    ],
    fp8=FP8_DTYPES[:2],
    out_dtype=OUT_DTYPES,
)


@pytest.mark.parametrize(*PROBLEMS, ids=short)
def test_products(hopper, layout, kind, shape, fp8, out_dtype):
    (format, fast, amax), (m, k, n, e) = kind, shape
    for operands in products(format, group_offs(layout, m, e), m, k, n, *types(format, fp8), amax=amax):
        check(hopper, operands, fast, out_dtype)
    if kind in ADDING:
        check_added(hopper, operands, fast, out_dtype)


@pytest.mark.parametrize("fp8", FP8_DTYPES[:2], ids=short)
@pytest.mark.parametrize("rank", [4, 16, 40])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_low_rank_term(hopper, layout, rank, fp8):
    """Tiles have one or two halves of rows, and all or some columns. Factors behind the last group are NaN."""
    for i, (m, k, n, e) in enumerate(((70, 144, 272, 2), (600, 128, 96, 3), (300, 656, 144, 2))):
        offs = group_offs(layout, m, e)
        args = products("blockwise", offs, m, k, n, *types("blockwise", fp8))[0]
        of = {"low_rank_a": exact_fp8(m, rank).bfloat16(), "low_rank_b": exact_fp8(e, n, rank).bfloat16().mT}
        of["low_rank_a"][int(offs[-1]) :] = float("nan")
        check(hopper, args, True, OUT_DTYPES[i % 2], counter=i == 1, **of)


@OF_KIND
def test_every_round_and_rest(hopper, kind):
    """Sums have 1 to 6 stages, or 8 stages, which are two whole rounds. They end with 1 to 4 steps of an instruction,
    so stages are full, empty or cut short. MXFP8 has half as long stages, so its sums take up to two rounds, and
    more."""
    format, fast, amax = kind
    sizes = [32 * i for i in (*range(1, 18), 20, 21, 29)]
    operands = products(format, ends(sizes), sum(sizes), 144, 144, FP8_DTYPES[0], amax=amax)[1]
    check(hopper, operands, fast, torch.bfloat16)
    if kind in ADDING:
        check_added(hopper, operands, fast, torch.float32)


@pytest.mark.parametrize("fp8", FP8_DTYPES[:2], ids=short)
@OF_KIND
def test_transposed_out(hopper, kind, fp8):
    """Tiles are whole, or cut at any multiple of 16 rows and columns. One group is empty."""
    format, fast, amax = kind
    for n, k in ((16, 368), (272, 16), (400, 144)):
        operands = products(format, ends([130, 0, 40]), 170, k, n, *types(format, fp8), amax=amax)[1]
        check(hopper, operands, fast, torch.bfloat16, out_transposed=True)


@pytest.mark.parametrize("k", [16, 144, 256, 272])
def test_sums_of_half_a_round(hopper, k):
    """With short sums, tiles and their scales are planned two ahead of the stored tile. One sum is longer."""
    operands = products("rowwise", ends([300, 70, 513]), 890, k, 560, FP8_DTYPES[0])[0]
    check(hopper, operands, True, torch.bfloat16)


@pytest.mark.parametrize("amax", ["group", "square"])
def test_long_sums(hopper, amax):
    """Scales of squares are loaded 32 at a time. Groups have 33 stages or more than 64. Scales begin at any address
    and, along the sum, have any stride."""
    offs = ends([32, 33 * 128, 0, 66 * 128 + 32])
    backward = products("blockwise", offs, int(offs[-1]), 144, 16, FP8_DTYPES[0], amax=amax)[1]
    if amax == "square":
        a, b, scale_a, scale_b, *rest = backward
        odd = scale_b.new_empty(5 * len(scale_b) + 1).as_strided(scale_b.shape, (5, 1), 1).copy_(scale_b)
        backward = a, b, scale_a, odd, *rest
    check(hopper, backward, True, torch.float32)
    k, rows = 66 * 128 + 16, ends([20, 40])
    a, b, scale_a, scale_b, *rest = products("blockwise", rows, 40, k, 144, FP8_DTYPES[0])[0]
    odd = scale_b.new_empty(scale_b.numel() + 1).as_strided(scale_b.shape, scale_b.stride(), 1).copy_(scale_b)
    check(hopper, (a, b, scale_a, odd, *rest), True, torch.float32)


@OF_KIND
def test_sizes_of_tiles(hopper, kind):
    """Groups have about half a tile, one tile or two tiles. Columns are about half a tile or one tile."""
    format, fast, amax = kind
    sizes = [0, 1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 385]
    for n in (16, 128, 144, 272):
        operands = products(format, ends(sizes), sum(sizes) + 100, 144, n, FP8_DTYPES[0], amax=amax)[amax == "square"]
        check(hopper, operands, fast, torch.float32, counter=n % 144 > 0)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not SQUARES and kind[0] != "mxfp8"], ids=short)
def test_clusters_that_draw_at_once(hopper, kind):
    """All clusters draw units from one counter. Groups are uneven or there is one, and there are fewer units than
    clusters, as many, or one more. Sums fill a round of stages or do not."""
    format, fast, _ = kind
    problems = [
        *(([700, 0, 1, 0, 385, 130], 1300, 144, 400), ([1500], 1500, 144, 272), ([0, 0], 9, 144, 16)),
        *(([20], 23, 656, 16), ([256] * 3, 768, 656, 16), ([256, 0, 768], 1024, 656, 16)),
    ]
    with patch.dict(os.environ, SIMT_THREADS="6"):
        for sizes, m, k, n in problems:
            operands = products(format, ends(sizes), m, k, n, FP8_DTYPES[0])[0]
            want = reference.scaled_grouped_mm(*operands)
            hopper.check_as((want,), "scaled_grouped_mm", *operands, use_fast_accum=fast, counter=True)


@OF_KIND
def test_many_groups(hopper, kind):
    format, fast, amax = kind
    stage = 128 if kind == KINDS[0] else 32  # the reference takes long for operands of 1,000 groups
    for sizes, m, k, n in (
        (([0] * 29 + [3, 1, 2]) * 32, 200, 48, 32),
        ([0] * 500 + [300] + [0] * 499, 310, stage, 144),
    ):
        operands = products(format, ends(sizes), m, k, n, FP8_DTYPES[0], amax=amax)[amax == "square"]
        check(hopper, operands, fast, torch.bfloat16, counter=n == 144)


@OF_KIND
def test_corrupt_offsets(hopper, kind):
    """Offsets of a K-grouped product are rounded down to the length of an instruction's sum."""
    (format, fast, amax), of_problem = kind, torch.tensor([10, 20, 64], dtype=torch.int32)
    for offs in corrupt_offs(64):
        forward, backward = products(format, of_problem, 64, 48, 400, FP8_DTYPES[0], amax=amax)
        whole = offs.div(32, rounding_mode="floor").int() * 32
        for (*operands, _), of_groups in ((forward, offs[:3]), (backward, whole[:3])):
            want = reference.scaled_grouped_mm(*operands, of_groups, out_dtype=torch.float32)
            how = {"use_fast_accum": fast, "out_dtype": torch.float32}
            for counter in {False, can_count(format, want)}:
                hopper.check_as((want,), "scaled_grouped_mm", *operands, offs[:3], **how, counter=counter)
    # Groups have more blocks than there are scales; results are wrong, but use only existing scales.
    if format == "blockwise":
        a, b, scale_a, scale_b, *_ = products(format, of_problem, 64, 48, 400, FP8_DTYPES[0], amax=amax)[1]
        for kernels in hopper:
            args = a, b, scale_a[:, :2], scale_b[:2], format, ends([32, 32, 96])
            kernels.run("scaled_grouped_mm", (torch.zeros(3, 400, 48),), *args)


def test_mxfp8_of_no_number(hopper):
    """Elements and scales of either operand are NaN, and some scales are 2^-127, a subnormal."""
    offs = ends([40, 0, 64])
    for a, b, scale_a, scale_b, *rest in products("mxfp8", offs, 120, 144, 48, FP8_DTYPES[0]):
        a.view(torch.uint8)[3, 70] = b.mT.view(torch.uint8)[..., 7, 33] = 0x7F
        for scale in (scale_a, scale_b):
            scale.view(torch.uint8).view(-1)[[16 * 9, 16 * 20]] = torch.tensor([255, 0], dtype=torch.uint8)
        args = a, b, scale_a, scale_b, *rest
        want = reference.scaled_grouped_mm(*args, out_dtype=torch.float32)
        assert 0 < want.isnan().sum() < want.numel() / 2
        for kernels in hopper:
            (got,) = kernels.run("scaled_grouped_mm", (want,), *args, use_fast_accum=True, out_dtype=torch.float32)
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=short)
def test_rows_by_index(hopper, out_dtype):
    """Each slot appears at most once, and some indices name no row."""
    for t, top_k, p, k, n in ((40, 3, 150, 144, 272), (300, 1, 280, 640, 48), (7, 2, 20, 16, 16)):
        a, b = exact_fp8(t, k), exact_fp8(3, n, k)
        scales = exact_scales(t), exact_scales(3, n)
        args = a, b.mT, *scales, "rowwise", group_offs("tail_rows", p, 3)
        check(hopper, args, True, out_dtype, indices=slot_indices(t, top_k, p), top_k=top_k)


@pytest.mark.parametrize("format", ["rowwise", "blockwise", "mxfp8"])
def test_experts_apart(hopper, format):
    """b has gaps of whole rows between experts."""
    offs = group_offs("tail_rows", 150, 3)
    a, b, *rest = products(format, offs, 150, 144, 272, FP8_DTYPES[0])[0]
    wider = exact_fp8(3, 400, 144)
    wider[:, 100:372] = b.mT
    check(hopper, (a, wider[:, 100:372].mT, *rest), True, torch.bfloat16)
    if format == "mxfp8":  # b is copied, so gaps may have any size
        apart = exact_fp8(3, 272 * 144 + 16)[:, 16:].unflatten(1, (272, 144))
        apart.copy_(b.mT)
        check(hopper, (a, apart.mT, *rest), True, torch.bfloat16)


def test_what_others_take(hopper):
    """The kernels refuse calls that other GEMMs serve: odd strides of scales, a with squares, MXFP8 with a in E5M2, and
    some kinds of totals. They refuse a transposed float32 out, which the op copies."""
    offs = torch.tensor([40], dtype=torch.int32)
    of_kinds = [(kind, products(kind[0], offs, 40, 64, 32, FP8_DTYPES[0], amax=kind[2])[1]) for kind in KINDS]
    a, b, scale_a, scale_b, _, ends = of_kinds[-1][1]
    forward, wide_rows = products("rowwise", offs, 40, 64, 32, FP8_DTYPES[0])[0], exact_fp8(2, 32, 80)
    apart = wide_rows.as_strided((2, 32, 64), (33 * 64 + 16, 64, 1))  # the gap between experts is no multiple of a row
    refused = [
        ("scaled_grouped_mm", forward[0], apart.mT, forward[2], exact_scales(2, 32), "rowwise", offs.repeat(2)),
        *(
            ("scaled_grouped_mm", *products(format, offs, 40, 64, 32, fp8)[0])
            for format, fp8 in zip(("mxfp8_rowmajor", "mxfp8"), FP8_DTYPES, strict=False)
        ),
        ("scaled_grouped_mm", b.mT, a.mT, scale_b.mT, scale_a.mT, "blockwise", ends),
    ]
    factors = {"low_rank_a": torch.zeros(40, 8).bfloat16(), "low_rank_b": torch.zeros(1, 32, 8).bfloat16().mT}
    for (_, fast, _), args in (of for of in of_kinds if of[0] not in ADDING):
        refused.append(("add_scaled_grouped_mm", torch.zeros(1, 32, 64), *args, fast))
    for kernels in hopper:
        assert isinstance(kernels, SimtKernels)
        for op, *args in refused:
            how = {"use_fast_accum": args.pop()} if isinstance(args[-1], bool) else {}
            with pytest.raises(RuntimeError, match="not for these kernels"):
                kernels.run(op, (torch.zeros(1, 64, 64),), *args, **how)
        for args in (forward, of_kinds[-1][1]):
            with pytest.raises(RuntimeError, match="not for these kernels"):
                kernels.run("scaled_grouped_mm", (torch.zeros(40, 32),), *args, **factors)
        with pytest.raises(RuntimeError, match="not for these kernels"):
            kernels.run("scaled_grouped_mm", (torch.zeros(1, 32, 64).mT,), *of_kinds[0][1], out_transposed=True)


# ---- the emulation ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("faults") / "faults"
    how = "-DSIMT_HOPPER", "-DUSE_ROCM", "-D__HIP__", f"-I{CSRC}"
    compile_cxx(*how, SIMT / "faults_hopper.cpp", RUNTIME, "-ldl", "-o", program, wave=32)
    return program


@pytest.mark.parametrize(
    ("case", "outcome"),
    [
        ("product", "ok 20"),
        ("operand that is filled again too early", "error 719: an operand that changed while it was multiplied"),
        ("operand that is filled too late", "error 719: an operand that changed while it was multiplied"),
        ("operand between two patterns", "error 719: an operand that does not begin with 8 swizzled rows"),
        ("product without a fence", r"error 719: wgmma at faults_hopper.cpp:\d+ without a fence since the wait before"),
        ("product of registers", "ok 80"),
        ("registers that change too early", "error 719: registers of an operand that changed while they were"),
        ("registers that change in time", "ok 2"),
        (
            "operand beside registers that is filled again too early",
            "error 719: an operand that changed while it was multiplied",
        ),
        (
            "product of registers without a fence",
            r"error 719: wgmma_bf16 at faults_hopper.cpp:\d+ without a fence since the wait before",
        ),
        ("product of registers of one warp", "error 719: warps of a warpgroup did not act as one"),
        ("matrices of rows of 64 bytes", "ok 80"),
        ("matrix beside shared memory", "error 719: access beyond the 25600 bytes of dynamic shared memory"),
        ("product of one warp", "error 719: warps of a warpgroup did not act as one"),
        ("products of other operands", "error 719: warps of a warpgroup did not act as one"),
        ("sum that is read too early", "ok 0"),
        ("copy to the other block", "ok 40404040"),
        ("word to the other block", "ok 7"),
        ("chunk that is waited for", "ok 38383838"),
        ("chunk that is not", "ok cdcdcdcd"),
        ("fewer bytes than announced", "error 719: no end in sight"),
        ("too many arrivals", "error 719: more arrivals at a barrier than it is made for"),
        ("block that is not there", "error 719: no such block in the cluster"),
        ("wait in another block", "error 719: an address of the cluster where one of the block belongs"),
        ("block that has ended", "error 719: a block of the cluster that has not begun or has ended"),
        ("copy beyond shared memory", "error 719: access beyond the 25600 bytes of dynamic shared memory"),
        ("copy to no chunk", "error 719: misaligned address in shared memory"),
        ("copy of no chunk", "error 719: a copy of no chunks of 16 bytes"),
    ],
)
def test_emulation(faults, case, outcome):
    environment = {**os.environ, "SIMT_TIMEOUT": "1" if "fewer" in case else "60"}
    done = subprocess.run([faults, case], capture_output=True, text=True, timeout=120, env=environment)
    assert re.match(outcome, done.stdout), done
