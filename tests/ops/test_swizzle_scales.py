"""swizzle_scales and unswizzle_scales: scales between rows and the tensor cores' blocked layout, byte for byte."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    FP8_DTYPES,
    LAYOUTS,
    assert_same,
    check_compiled,
    check_cuda_graph,
    check_deterministic,
    check_error,
    check_opcheck,
    check_second_gpu,
    check_stream_order,
    check_two_streams,
    corrupt_offs,
    group_offs,
    misaligned,
    on,
    short,
    strided_2d,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_fp8_ext import reference
from moe_fp8_ext.ops import swizzle_scales, unswizzle_scales
from moe_fp8_ext.reference.numerics import group_bounds

GROUPS = ("rows", "columns")  # by dimension
DTYPES = (torch.uint8, torch.int8, torch.bool, torch.float8_e8m0fnu, *FP8_DTYPES)
SIZES = [(0, 0), (0, 5), (5, 0), (1, 1), (3, 16), (31, 7), (128, 4), (129, 64), (127, 90), (300, 67), (513, 44)]
# Too many bytes for one thread of the CPU loops, and more tiles than the blocks of a grid.
LARGE = (5000, 160)


def scales(*shape: int, dtype: torch.dtype = torch.uint8, device: str = "cpu", seed: int = 0) -> Tensor:
    """Random bytes of any dtype, none of them zero. So padding that is not written shows, and so does a lost scale."""
    generator = torch.Generator().manual_seed(seed)
    low, high = (1, 2) if dtype == torch.bool else (1, 256)
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator).to(device).view(dtype)


def owned(t: Tensor, end: int, dim: int) -> Tensor:
    """Returns t with zeros from `end` on along `dim`."""
    out = t.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    out.narrow(dim, end, t.shape[dim] - end).zero_()
    return out.view(t.dtype)


def check_matrix(scale: Tensor) -> None:
    """Compares both directions with the reference, with the scale as one matrix and as an expert."""
    check_round_trip(scale, owned(scale, scale.shape[0], 0))
    check_experts(scale[None])


def check_experts(scale: Tensor) -> None:
    check_round_trip(scale, scale.clone(memory_format=torch.contiguous_format), groups="experts")


def check_groups(scale: Tensor, offs: Tensor, dim: int) -> None:
    """Compares both directions with the reference, for groups of rows (dim 0) or of columns (dim 1)."""
    end = group_bounds(offs, scale.shape[dim])[-1][1] if len(offs) else 0
    check_round_trip(scale, owned(scale, end, dim), groups=GROUPS[dim], offs=offs)


def check_round_trip(scale: Tensor, want: Tensor, **how: object) -> None:
    what = f"{short(scale.dtype)} {short(scale.shape)} {how}"
    blocked, starts = swizzle_scales(scale, **how)
    assert_same((blocked, starts), reference.swizzle_scales(scale, **how), what)
    back = unswizzle_scales(blocked, *scale.shape[-2:], **how)
    assert_same(back, want, what)
    assert_same(reference.unswizzle_scales(blocked, *scale.shape[-2:], **how), back, what)


def check_both(scale: Tensor, layout: str, e: int) -> None:
    for dim in (0, 1):
        check_groups(scale, group_offs(layout, scale.shape[dim], e, str(scale.device)), dim)


def test_the_layout(device):
    """The reference puts every scale where the formula of the layout says."""
    for rows, columns in SIZES:
        scale = scales(rows, columns, device=device)
        padded_rows, padded_columns = -(-rows // 128) * 128, -(-columns // 4) * 4
        want = torch.zeros(padded_rows * padded_columns, dtype=torch.uint8)
        for r in range(rows):
            for c in range(columns):
                block = r // 128 * (padded_columns // 4) + c // 4
                want[512 * block + 16 * (r % 32) + 4 * (r // 32 % 4) + c % 4] = scale[r, c]
        want = want.view(padded_rows, padded_columns).to(device)
        assert_same(reference.swizzle_scales(scale)[0], want)
        assert torch.equal(reference.unswizzle_scales(want, rows, columns), scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_dtypes(dtype, device):
    scale = scales(140, 21, dtype=dtype, device=device)
    check_matrix(scale)
    check_both(scale, "tail_rows", 3)
    check_experts(scales(3, 129, 6, dtype=dtype, device=device))


@pytest.mark.parametrize("shape", [*SIZES, LARGE], ids=short)
def test_sizes(shape, device):
    check_matrix(scales(*shape, device=device))
    for e in (0, 3):
        check_experts(scales(e, *shape, device=device))
        check_both(scales(*shape, device=device), "uniform", e)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_group_layouts(layout, device):
    for shape in ((300, 67), (1000, 264), (129, 96)):
        for e in (1, 5, 40):
            check_both(scales(*shape, device=device), layout, e)


def test_groups_of_whole_blocks(device):
    """Groups of tokens are multiples of 128, so their columns begin at multiples of 4, but not of 16."""
    sizes = torch.tensor([4, 0, 12, 16, 20, 64, 8, 100])
    offs = sizes.cumsum(0).int().to(device)
    check_groups(scales(260, int(sizes.sum()), device=device), offs, 1)
    check_groups(scales(260, int(sizes.sum()) + 3, device=device), offs, 1)
    check_groups(scales(32 * int(sizes.sum()), 20, device=device), 32 * offs, 0)


def test_max_experts(device):
    for size in (0, 700, 5000):
        check_groups(scales(size, 6, device=device), group_offs("zipf", size, 1024, device), 0)
        check_groups(scales(130, size, device=device), group_offs("zipf", size, 1024, device), 1)
        check_groups(scales(130, size, device=device), group_offs("uniform", size, 1024, device), 1)
    check_experts(scales(1500, 3, 5, device=device))


def test_strides_and_alignment(device):
    scale = scales(150, 96, device=device)
    views = [view for _, view in strided_2d(scale)] + [misaligned(scale, n) for n in range(1, 16)]
    for view in [*views, scale[:1].expand(150, 96), scale[:, 3:50], scale[::2, 1:]]:
        check_matrix(view)
        check_both(view, "zipf", 3)
    check_groups(scale, misaligned(group_offs("zipf", 150, 3, device)), 0)
    experts = scales(6, 40, 64, device=device)
    for view in (experts[::2, 1::3, :41], experts.transpose(0, 1), experts[:1].expand(4, 40, 64), experts[:, :, 5:]):
        check_experts(view)


def test_misaligned_blocked(device):
    scale, offs = scales(150, 90, device=device), group_offs("zipf", 150, 3, device)
    for how in ({}, {"groups": "rows", "offs": offs}):
        blocked, _ = swizzle_scales(scale, **how)
        for n in range(1, 16):
            assert_same(unswizzle_scales(misaligned(blocked, n), 150, 90, **how), scale)


def test_corrupt_offsets(device):
    for size in (1, 37, 200):
        for offs in corrupt_offs(size, device):
            check_groups(scales(size, 50, device=device), offs, 0)
            check_groups(scales(140, size, device=device), offs, 1)


@given(
    shape=st.tuples(st.integers(0, 300), st.integers(0, 90)),
    offs=st.lists(st.integers(0, 300), max_size=9),
    dtype=st.sampled_from(DTYPES),
    skip=st.integers(0, 17),
)
def test_round_trip(shape, offs, dtype, skip, device):
    """Scales come back unchanged, for all sizes, row strides and alignments."""
    rows, columns = shape
    scale = scales(rows, columns + skip, dtype=dtype, device=device)[:, skip:]
    check_matrix(scale)
    for dim in (0, 1):
        ends = sorted(min(end, shape[dim]) for end in offs)
        check_groups(scale, torch.tensor(ends, dtype=torch.int32, device=device), dim)


def every_way(scale: Tensor, offs: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    """Swizzles and unswizzles a matrix, experts, groups of rows and groups of columns."""
    results = []
    for x, how in ways(scale, offs, ends):
        blocked, starts = swizzle_scales(x, **how)
        results += [blocked, starts, unswizzle_scales(blocked, *x.shape[-2:], **how)]
    return tuple(results)


def ways(scale: Tensor, offs: Tensor, ends: Tensor) -> list[tuple[Tensor, dict[str, object]]]:
    of_rows, of_columns = {"groups": "rows", "offs": offs}, {"groups": "columns", "offs": ends}
    halves = scale.view(2, -1, scale.shape[1])
    return [(scale, {}), (halves, {"groups": "experts"}), (scale, of_rows), (scale, of_columns)]


def inputs(rows: int, columns: int, device: str, seed: int = 0, layout: str = "zipf") -> list[Tensor]:
    groups = (group_offs(layout, size, 5, device) for size in (rows, columns))
    return [scales(rows, columns, device=device, seed=seed), *groups]


def test_opcheck(device):
    for x, how in ways(*inputs(138, 33, device)):
        check_opcheck("swizzle_scales", [x], **how)
        check_opcheck("unswizzle_scales", [swizzle_scales(x, **how)[0], *x.shape[-2:]], **how)


def test_deterministic(device):
    check_deterministic(every_way, inputs(3000, 160, device))


def test_compiles_with_dynamic_rows(device):
    check_compiled(every_way, [inputs(rows, 48, device) for rows in (50, 64, 132)], device)


def test_cuda_graph(gpu):
    check_cuda_graph(every_way, inputs(700, 512, gpu), inputs(700, 512, gpu, 1, "one_giant"))


def test_two_streams(gpu):
    check_two_streams(every_way, [inputs(8192, 160, gpu, seed) for seed in (0, 1)])


def test_stream_order(gpu):
    check_stream_order(every_way, [inputs(8192, 160, gpu, seed) for seed in range(4)], 255)


def test_second_gpu(second_gpu):
    check_second_gpu(every_way, inputs(700, 512, "cpu"), second_gpu)


@pytest.mark.large
@pytest.mark.parametrize("shape", [(600_010, 4_096), (2_048, 1_200_010)], ids=short)
def test_more_than_2_31_elements(shape, big_gpu):
    """Offsets exceed 2^31 along rows and columns. The reference's layout of each group and the round trip are
    compared."""
    scale = torch.randint(1, 256, shape, dtype=torch.uint8, device=big_gpu)
    for dim, groups in enumerate(GROUPS):
        offs = group_offs("tail_rows", shape[dim], 7, big_gpu)
        blocked, starts = swizzle_scales(scale, groups=groups, offs=offs)
        unit = blocked.shape[1] if dim == 0 else blocked.shape[0]
        for (start, end), place in zip(group_bounds(offs, shape[dim]), starts.tolist(), strict=True):
            want = reference.swizzle_scales(scale.narrow(dim, start, end - start))[0].view(-1)
            assert torch.equal(blocked.view(-1)[place * unit :][: want.numel()], want)
            tail = place * unit + want.numel()
        assert not blocked.view(-1)[tail:].any()
        back, end = unswizzle_scales(blocked, *shape, groups=groups, offs=offs), int(offs[-1])
        assert torch.equal(back.narrow(dim, 0, end), scale.narrow(dim, 0, end))
        assert not back.narrow(dim, end, shape[dim] - end).any()
        del blocked, back
    halves = scale.view(2, shape[0] // 2, shape[1])
    blocked, _ = swizzle_scales(halves, groups="experts")
    assert torch.equal(blocked[1], reference.swizzle_scales(halves[1])[0].view(-1))
    assert torch.equal(unswizzle_scales(blocked, *halves.shape[1:], groups="experts"), halves)


def byte_zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


S, OFFS, MOST = byte_zeros(6, 5), torch.tensor([2, 5], dtype=torch.int32), torch.zeros(1025, dtype=torch.int32)
B, B_M, B_K, B_3 = byte_zeros(128, 8), byte_zeros(262, 8), byte_zeros(128, 13), byte_zeros(3, 1024)


@pytest.mark.parametrize(
    ("groups", "args", "argument", "got"),
    [
        (None, [S.float()], "scale", "float32"),
        (None, [S.to(torch.bfloat16)], "scale", "bfloat16"),
        (None, [S[0]], "scale", "1"),
        (None, [S.t()], "scale", "stride 5"),
        (None, [S, OFFS], "offs", "a tensor"),
        ("experts", [S], "scale", "2"),
        ("experts", [S[None].int()], "scale", "int32"),
        ("experts", [S.t()[None]], "scale", "stride 5"),
        ("experts", [S[None], OFFS], "offs", "a tensor"),
        ("rows", [S.half(), OFFS], "scale", "float16"),
        ("rows", [S], "offs", "None"),
        ("rows", [S, OFFS.long()], "offs", "int64"),
        ("rows", [S, MOST], "offs", "1025"),
        ("rows", [S, torch.tensor(2, dtype=torch.int32)], "offs", "0"),
        ("columns", [S[None], OFFS], "scale", "3"),
        ("columns", [S, OFFS[None]], "offs", "2"),
        ("columns", [S, OFFS.repeat(2)[::2]], "offs", "stride 2"),
        ("columns", [S], "offs", "None"),
        ("m", [S, OFFS], "groups", "'m'"),
        ("", [S, OFFS], "groups", "''"),
    ],
)
def test_errors(groups, args, argument, got, device):
    scale, offs, *_ = *on(device, args), None
    check_error("swizzle_scales", [scale], argument, got, groups=groups, offs=offs)


@pytest.mark.parametrize(
    ("groups", "args", "argument", "got"),
    [
        (None, [B.short(), 6, 5], "blocked", "int16"),
        (None, [B, 129, 5], "blocked", "128"),
        (None, [B, 6, 4], "blocked", "8"),
        (None, [B.view(-1), 6, 5], "blocked", "1"),
        (None, [B.view(8, 128).t(), 6, 5], "blocked", "stride 128"),
        (None, [B, -6, 5], "rows", "-6"),
        (None, [B, 6, 2**31], "cols", "2147483648"),
        (None, [B, 6, 5, OFFS], "offs", "a tensor"),
        ("experts", [B_3[None], 6, 5], "blocked", "3"),
        ("experts", [B_3, 6, 9], "blocked", "1024"),
        ("experts", [B_3, 6, -1], "cols", "-1"),
        ("rows", [B_M, 7, 5, OFFS], "blocked", "262"),
        ("rows", [B_M, 6, 5, OFFS[:1]], "blocked", "262"),
        ("rows", [B_M, 6, 5, OFFS.short()], "offs", "int16"),
        ("rows", [B_M, 6, 5], "offs", "None"),
        ("columns", [B_K, 6, 6, OFFS], "blocked", "13"),
        ("columns", [B_K, 6, 5, MOST], "offs", "1025"),
        ("columns", [B_K, 2**31, 5, OFFS], "rows", "2147483648"),
        ("k", [B_K, 6, 5, OFFS], "groups", "'k'"),
    ],
)
def test_errors_of_the_way_back(groups, args, argument, got, device):
    blocked, rows, cols, offs, *_ = *on(device, args), None
    check_error("unswizzle_scales", [blocked, rows, cols], argument, got, groups=groups, offs=offs)


GROUPED = [
    (op, args, groups)
    for groups, blocked in (("rows", B_M), ("columns", B_K))
    for op, args in ((swizzle_scales, [S]), (unswizzle_scales, [blocked, 6, 5]))
]


@pytest.mark.parametrize(("op", "args", "groups"), GROUPED)
def test_contents_of_offs_are_checked_on_demand(op, args, groups, device, monkeypatch):
    monkeypatch.setenv("MOE_FP8_VALIDATE", "1")
    args = on(device, args)
    op(*args, groups=groups, offs=OFFS.to(device))
    for bad, text in ((3, "non-decreasing from 0, got offs"), (7, f"not exceed the [56] {groups} of")):
        with pytest.raises(RuntimeError, match=f"^{op.__name__}: offs must .*{text}"):
            op(*args, groups=groups, offs=torch.tensor([bad, 2 if bad == 3 else bad], dtype=torch.int32, device=device))


@pytest.mark.parametrize(("op", "args", "groups"), GROUPED)
def test_error_on_another_device(op, args, groups, device):
    offs, arg = OFFS.to("cpu" if device == "cuda" else "meta"), "scale" if op is swizzle_scales else "blocked"
    with pytest.raises(
        RuntimeError, match=f"^{op.__name__}: offs must be on the device of {arg}, {device}.*got {offs.device}"
    ):
        op(*on(device, args), groups=groups, offs=offs)


def test_error_for_a_gradient(device):
    scale, blocked = (t.to(device, torch.float8_e4m3fn).requires_grad_() for t in (S, B))
    for arg, call in (
        ("scale", lambda: swizzle_scales(scale)),
        ("scale", lambda: swizzle_scales(scale[None], groups="experts")),
        ("scale", lambda: swizzle_scales(scale, groups="rows", offs=OFFS.to(device))),
        ("scale", lambda: swizzle_scales(scale, groups="columns", offs=OFFS.to(device))),
        ("blocked", lambda: unswizzle_scales(blocked, 6, 5)),
    ):
        with pytest.raises(RuntimeError, match=f"{arg} must not ask for a gradient.*got requires_grad=True"):
            call()
    with torch.no_grad():
        assert not swizzle_scales(scale)[0].view(torch.uint8).any()
