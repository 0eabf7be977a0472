"""Hopper's own GEMMs, with groups and sizes at the edges of their scheduler and of their pipeline stages."""

from __future__ import annotations

import random

import pytest
import torch
from gemm_accuracy import bf16_gemm_db, fp8_gemm_db
from helpers import assert_same, corrupt_offs, sqnr_db, wide
from torch import Tensor

from moe_fp8_ext import build_info, reference
from moe_fp8_ext.ops import (
    add_scaled_grouped_mm,
    permute_quantized,
    quantize_rows,
    quantize_tokens,
    quantize_weight,
    scaled_grouped_mm,
)

FORMATS = ("rowwise", "blockwise", "mxfp8")
# Format, amax of the right operand along tokens, whether the tensor cores accumulate whole sums, and type of the left
# operand.
OF_SUMS = [("rowwise", "group", True), ("rowwise", "group", False), ("blockwise", "group", True)]
OF_SUMS.append(("blockwise", "square", True))
SCALES = [("rowwise", "group"), ("blockwise", "group"), ("blockwise", "square"), ("mxfp8", "group")]
E4M3_KINDS = [(*kind, torch.float8_e4m3fn) for kind in (*OF_SUMS, ("mxfp8", "group", True))]
KINDS = E4M3_KINDS + [(*kind, torch.float8_e5m2) for kind in OF_SUMS]


@pytest.fixture
def hopper(gpu: str) -> str:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    assert [b["name"] for b in build_info()["scaled_grouped_mm"]][:2] == ["sm90", "sm90_mxfp8"]
    return gpu


def products(
    fmt: str, m: int, n: int, k: int, offs: Tensor, amax: str = "group", dtype: torch.dtype = torch.float8_e4m3fn
) -> list[tuple[list[object], int, dict[str, int]]]:
    """2D x 3D and 2D x 2D products. For each: arguments, number of products in a sum, keywords."""
    x, dy, w = wide(m, k, device=offs.device), wide(m, n, device=offs.device, seed=1), wide(len(offs), n, k, seed=2)
    q, scale = quantize_rows(x, fmt, offs=offs, dtype=dtype)
    x_t, scale_t, padded = quantize_tokens(x, fmt, offs=offs, amax=amax)
    b, scale_b, *_ = quantize_weight(w.to(offs.device), fmt)
    dy_t, scale_dy, _ = quantize_tokens(dy, fmt, offs=offs, dtype=dtype)
    if fmt == "blockwise":
        scale_b, scale_t = scale_b.mT, scale_t.t()
    return [
        ([q, b.mT, scale, scale_b, fmt, offs], k, {}),
        ([dy_t, x_t.t(), scale_dy, scale_t, fmt, padded], m, {"align": 32}),
    ]


def check(
    kind: tuple[str, str, bool, torch.dtype],
    m: int,
    n: int,
    k: int,
    offs: Tensor,
    out_dtype: torch.dtype = torch.float32,
) -> None:
    fmt, amax, fast, dtype = kind
    for args, terms, how in products(fmt, m, n, k, offs, amax, dtype):
        how = {"out_dtype": out_dtype, "use_fast_accum": fast, **how}
        got = scaled_grouped_mm(*args, **how)
        want = reference.scaled_grouped_mm(*args, out_dtype=torch.float64)
        ends = args[5].tolist()
        if got.dim() == 2:
            assert (got[ends[-1] :] == 0).all()
        else:
            assert all((got[i] == 0).all() for i, end in enumerate(ends) if end == (ends[i - 1] if i else 0))
        promoted = fmt == "blockwise" or not fast  # after every 128 products
        least_db = bf16_gemm_db if fmt == "mxfp8" else fp8_gemm_db
        assert sqnr_db(got, want) >= least_db(128 if promoted else terms, out_dtype)
        assert_same(scaled_grouped_mm(*args, **how), got, "again")
        if got.dim() == 3:
            check_added(args, fast)


def check_added(args: list[object], fast: bool) -> None:
    """The plain float32 product is added and rounded, byte for byte. Totals of empty groups do not change."""
    how = {"align": 32, "use_fast_accum": fast}
    product = scaled_grouped_mm(*args, out_dtype=torch.float32, **how)
    sizes = torch.diff(args[5], prepend=args[5].new_zeros(1))
    for dtype in (torch.float32, torch.bfloat16):
        total = wide(*product.shape, dtype=dtype, device=product.device, seed=3)
        want = (total.float() + product).to(dtype)
        want[sizes == 0] = total[sizes == 0] = -0.0
        add_scaled_grouped_mm(total, *args, **how)
        assert_same(total, want, "added")


def ends(sizes: list[int], device: str) -> Tensor:
    return torch.tensor(sizes, device=device).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_round_and_rest(kind, hopper):
    """Sums have 1 to 11 stages, and end with 1 to 4 steps of an instruction. So stages are full, empty or cut short."""
    sizes = [32 * i for i in range(1, 45)]
    check(kind, sum(sizes), 144, 272, ends(sizes, hopper))


@pytest.mark.parametrize("k", [16, 128, 144, 512, 528, 1040])
@pytest.mark.parametrize("kind", E4M3_KINDS, ids=str)
def test_sizes_of_tiles(kind, k, hopper):
    """Groups have about one or two tiles of rows. Columns are about half a tile or one tile."""
    sizes = [0, 1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 384, 385]
    for n in (16, 128, 144, 256, 272, 640):
        check(kind, sum(sizes) + 100, n, k, ends(sizes, hopper))


# With K = 4096 and 4096 columns there are enough tiles for the dynamic scheduler.
LONG = [5000, 0, 1, 7777, 129, 7000]


# Squares equal blocks in groups of rows; MXFP8 is scheduled statically.
@pytest.mark.parametrize("kind", E4M3_KINDS[:3], ids=str)
def test_tiles_by_a_counter(kind, hopper):
    check(kind, sum(LONG) + 100, 4096, 4096, ends(LONG, hopper))


def test_rows_by_index_of_long_sums(hopper):
    """Rows by index always use the static scheduler, because the warp that would read the counter copies rows."""
    (args, *_), _ = products("rowwise", sum(LONG), 2048, 4096, ends(LONG, hopper))
    indices = torch.randperm(sum(LONG), device=hopper).int()
    a, scale = permute_quantized(args[0], args[2], "rowwise", indices, 1)
    want = scaled_grouped_mm(a, args[1], scale, *args[3:])
    assert_same(scaled_grouped_mm(*args, indices=indices, top_k=1), want, "by index")


@pytest.mark.parametrize("kind", E4M3_KINDS, ids=str)
def test_many_groups(kind, hopper):
    check(kind, 1536, 32, 48, ends([0, 3, 1, 2] * 256, hopper))
    check(kind, 3000, 256, 128, ends([0] * 500 + [2900] + [0] * 500, hopper))


@pytest.mark.parametrize("seed", range(100))
def test_random_problems(seed, hopper):
    r = random.Random(seed)
    m, n, k, e = r.randrange(1, 4000), 16 * r.randrange(1, 60), 16 * r.randrange(1, 70), r.randrange(1, 40)
    cuts = sorted(r.randrange(m + 1) for _ in range(e))
    check(r.choice(KINDS), m, n, k, ends([cuts[0], *(b - a for a, b in zip(cuts, cuts[1:], strict=False))], hopper))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_are_hoppers_own(kind, hopper):
    """The other tests of this file measure this kernel, and not the next one in the backend table."""
    fmt, amax, fast, dtype = kind
    for args, _, how in products(fmt, 700, 272, 400, ends([300, 0, 129, 200], hopper), amax, dtype):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            out = scaled_grouped_mm(*args, use_fast_accum=fast, **how)
            if how:
                add_scaled_grouped_mm(out, *args, use_fast_accum=fast, **how)
        found = [event.count for event in profile.key_averages() if "sm90::grouped_gemm_kernel" in event.key]
        assert sum(found) == 1 + bool(how)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_bfloat16(kind, hopper):
    check(kind, 700, 272, 400, ends([300, 0, 129, 200], hopper), torch.bfloat16)


@pytest.mark.parametrize(("fmt", "amax"), SCALES)
def test_offsets_are_not_trusted(fmt, amax, hopper):
    offs = ends([300, 0, 129, 200], hopper)
    for args, _, how in products(fmt, 700, 272, 400, offs, amax):
        for wrong in corrupt_offs(args[0].shape[0 if args[1].ndim == 3 else 1], hopper):
            if len(wrong) == len(offs):
                out = scaled_grouped_mm(*args[:4], fmt, wrong, **how)
                if how:
                    add_scaled_grouped_mm(out, *args[:4], fmt, wrong, **how)
    torch.cuda.synchronize()


@pytest.mark.parametrize("fmt", FORMATS)
def test_graph_follows_the_offsets(fmt, hopper):
    offs = ends([300, 0, 129, 200], hopper)
    (args, *_), _ = products(fmt, 700, 272, 400, offs)
    scaled_grouped_mm(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = scaled_grouped_mm(*args)
    for sizes in ([1, 2, 3, 4], [0, 700, 0, 0], [300, 0, 129, 200]):
        offs.copy_(ends(sizes, hopper))
        graph.replay()
        assert_same(out, scaled_grouped_mm(*args), f"groups of {sizes}")


@pytest.mark.parametrize("fmt", FORMATS[:2])
def test_graph_begins_the_counter_anew(fmt, hopper):
    (args, *_), _ = products(fmt, sum(LONG), 4096, 4096, ends(LONG, hopper))
    want = scaled_grouped_mm(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = scaled_grouped_mm(*args)
    for _ in range(3):
        out.fill_(-1)
        graph.replay()
        assert_same(out, want, "replayed")


@pytest.mark.parametrize(("fmt", "amax"), SCALES)
def test_graph_adds_at_every_replay(fmt, amax, hopper):
    _, (args, _, how) = products(fmt, 700, 272, 400, ends([300, 0, 129, 200], hopper), amax)
    product = scaled_grouped_mm(*args, out_dtype=torch.float32, **how)
    total = torch.zeros_like(product)
    add_scaled_grouped_mm(total, *args, **how)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_scaled_grouped_mm(total, *args, **how)
        add_scaled_grouped_mm(total, *args, **how)
    want = total.clone()
    for _ in range(3):
        graph.replay()
        want = want + product + product
        assert_same(total, want, "replayed")


def test_strides_of_dimensions_of_one(hopper):
    """Strides of dimensions of one have no meaning, so they give the same result."""
    offs = torch.tensor([7, 60, 200], dtype=torch.int32, device=hopper)
    (a, b, scale_a, scale_b, *rest), *_ = products("blockwise", 200, 128, 128, offs)[0]
    want = scaled_grouped_mm(a, b, scale_a, scale_b, *rest)
    free = scale_b.as_strided(scale_b.shape, (1, 5, 7))
    assert torch.equal(free, scale_b)
    assert_same(scaled_grouped_mm(a, b, scale_a, free, *rest), want, "free strides")


def test_mxfp8_of_no_number(hopper):
    """NaN values and scales give NaN in every sum that contains them, and change no other result."""
    sizes, none = [70, 0, 130], torch.tensor([0x7F, 0xFF], dtype=torch.uint8, device=hopper)
    for args, terms, how in products("mxfp8", sum(sizes), 144, 160, ends(sizes, hopper)):
        a, b, scale_a = args[:3]
        a.view(torch.uint8)[3, 5], b.view(torch.uint8)[..., 7, 9] = none
        scale_a.view(torch.uint8).view(-1)[16 * 40] = 255
        got = scaled_grouped_mm(*args, out_dtype=torch.float32, **how)
        want = reference.scaled_grouped_mm(*args, out_dtype=torch.float64)
        assert_same(got.isnan(), want.isnan(), "positions of NaN")
        assert 0 < got.isnan().sum() < got.numel() / 2
        assert sqnr_db(got.nan_to_num(), want.nan_to_num()) >= bf16_gemm_db(terms, torch.float32)
