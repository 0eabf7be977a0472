"""quantize_mx_1x32, quantize_mx_32x1, quantize_mx_1x32_32x1 and quantize_mx_weight."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import (
    CORRECTNESS_MKE,
    FP8_DTYPES,
    INPUT_DTYPES,
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
    error_of,
    flushed_subnormals,
    group_offs,
    misaligned,
    on,
    short,
    strided_2d,
    wide,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_fp8_ext import (
    quantize_mx_1x32,
    quantize_mx_1x32_32x1,
    quantize_mx_32x1,
    quantize_mx_weight,
    reference,
    swizzle_scales_2d,
    swizzle_scales_3d,
    swizzle_scales_k_groups,
    swizzle_scales_m_groups,
)

SCALINGS, SCALE_LAYOUTS = ("rceil", "floor"), ("rowmajor", "blocked")
E8M0 = torch.float8_e8m0fnu


def check_rows(x: Tensor, offs: Tensor | None = None, scaling: str = "rceil", fp8: torch.dtype | None = None) -> None:
    for args in ((x, scaling), (x, scaling, "blocked"), *([] if offs is None else [(x, scaling, "blocked", offs)])):
        args = *args, *("rowmajor", None)[len(args) - 2 :], fp8
        assert_same(quantize_mx_1x32(*args), reference.quantize_mx_1x32(*args), f"rows of {short(x.shape)} {args[1:3]}")


def check_columns(x: Tensor, offs: Tensor, *args: object) -> None:
    what = f"{short(x.dtype)} {short(x.shape)} offs {offs.tolist()[:20]} {args}"
    want = reference.quantize_mx_1x32_32x1(x, offs, *args)
    assert_same(quantize_mx_1x32_32x1(x, offs, *args), want, f"both of {what}")
    assert_same(quantize_mx_32x1(x, offs, *args), want[2:], f"columns of {what}")


def check_weight(w: Tensor, *args: object) -> None:
    want = reference.quantize_mx_weight(w, *args)
    assert_same(quantize_mx_weight(w, *args), want, f"weight {short(w.dtype)} {short(w.shape)} {args}")


def check_all(x: Tensor, offs: Tensor, scaling: str = "rceil", fp8: torch.dtype | None = None, align: int = 32) -> None:
    check_rows(x, offs, scaling, fp8)
    for layout in SCALE_LAYOUTS:
        check_columns(x, offs, scaling, layout, align, fp8)
    check_weight(x[None], scaling, fp8)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=short)
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
def test_formats(dtype, fp8, scaling, device):
    for k in (67, 136):
        check_all(wide(140, k, dtype=dtype, device=device), group_offs("zipf", 140, 3, device), scaling, fp8)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("align", [32, 64, 128])
def test_group_layouts(align, layout, device):
    for m, k, e in ((1, 1, 1), (37, 33, 3), (301, 272, 5), (1000, 128, 2)):
        check_all(wide(m, k, device=device), group_offs(layout, m, e, device), align=align)


def test_block_sizes(device):
    sizes = torch.tensor([31, 32, 33, 0, 96, 127, 128, 129, 1, 160], device=device)
    x = wide(int(sizes.sum()) + 5, 136, device=device)
    for align in (32, 64, 128):
        check_all(x, sizes.cumsum(0).int(), align=align)


@pytest.mark.parametrize("shape", CORRECTNESS_MKE + [[0, 0, 0], [0, 5, 3], [5, 0, 2], [3, 1, 0], [5, 3, 2]], ids=short)
def test_sizes(shape, device):
    m, k, e = shape
    check_all(wide(m, k, device=device), group_offs("uniform", m, e, device))


@pytest.mark.parametrize("k", [1, 7, 8, 31, 32, 33, 63, 127, 128, 129, 255, 257, 1023, 1024, 1025, 2880, 9001])
def test_widths(k, device):
    for dtype in (torch.bfloat16, torch.float32):
        check_all(wide(37, k, dtype=dtype, device=device), group_offs("zipf", 37, 2, device))


@pytest.mark.parametrize("m", [1, 2, 31, 32, 33, 127, 128, 129, 300])
def test_every_byte_of_blocked_padding_is_zero(m, device):
    """Outputs are full of 0xFF before the op: equality with the reference, whose padding is zero, shows it."""
    for k in (1, 130, 1100):
        x = wide(m, k, device=device)
        for e in (1, 3, 100):
            check_all(x, group_offs("uniform", m, e, device))


def test_many_groups(device):
    check_all(wide(700, 24, device=device), group_offs("zipf", 700, 1024, device), align=128)
    for offs in corrupt_offs(200, device):
        check_all(wide(200, 50, device=device), offs)


@pytest.mark.parametrize(
    "shape", [(0, 4, 4), (2, 0, 5), (2, 5, 0), (3, 128, 128), (2, 129, 257), (1024, 3, 5), (2, 2880, 24)], ids=short
)
def test_experts(shape, device):
    check_weight(wide(*shape, device=device))


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
def test_strides_and_alignment(dtype, device):
    x, offs = wide(70, 256, dtype=dtype, device=device), group_offs("tail_rows", 70, 2, device)
    for _, view in strided_2d(x):
        check_all(view, offs)
    for elements in range(1, 9):
        check_all(misaligned(x, elements), offs)
    w = wide(3, 150, 272, dtype=dtype, device=device)
    for view in (w[:, ::2], w[::2, 3:, 8:], w.transpose(0, 1), w[:1].expand(4, 150, 272), w[:, :1].expand(3, 7, 272)):
        check_weight(view)


def test_both_equal_the_two_single_ops(device):
    x, offs = wide(500, 200, device=device), group_offs("tail_rows", 500, 6, device)
    rows = {"rowmajor": quantize_mx_1x32(x), "blocked": quantize_mx_1x32(x, "rceil", "blocked", offs)}
    for layout in SCALE_LAYOUTS:
        want = *rows[layout], *quantize_mx_32x1(x, offs, "rceil", layout)
        assert_same(quantize_mx_1x32_32x1(x, offs, "rceil", layout), want)


def test_columns_are_1x32_of_each_transposed_group(device):
    x, offs = wide(100, 40, device=device), torch.tensor([33, 100], dtype=torch.int32, device=device)
    q_t, scale_t, padded_offs = quantize_mx_32x1(x, offs, "rceil", "rowmajor")
    assert padded_offs.tolist() == [64, 160]
    for start, end, at in ((0, 33, 0), (33, 100, 64)):
        q, scale = quantize_mx_1x32(x[start:end].t().contiguous())
        assert_same(q_t[:, at : at + end - start].contiguous(), q)
        assert_same(scale_t[:, at // 32 : at // 32 + scale.shape[1]].contiguous(), scale)


def test_blocked_scales_are_swizzled_row_major_ones(device):
    x, offs = wide(500, 200, device=device), group_offs("zipf", 500, 6, device)
    scale = quantize_mx_1x32(x)[1]
    assert_same(quantize_mx_1x32(x, "rceil", "blocked")[1], swizzle_scales_2d(scale))
    _, of_rows, _, of_columns, padded_offs = quantize_mx_1x32_32x1(x, offs)
    assert_same(of_rows, swizzle_scales_m_groups(scale, offs)[0])
    scale_t = quantize_mx_32x1(x, offs, "rceil", "rowmajor")[1]
    assert_same(of_columns, swizzle_scales_k_groups(scale_t, padded_offs // 32)[0])
    w = wide(3, 70, 200, device=device)
    q, scale, q_t, scale_t = quantize_mx_weight(w)
    for got, of_w, scales in ((q, w, scale), (q_t, w.transpose(1, 2).contiguous(), scale_t)):
        rows = [quantize_mx_1x32(of_expert) for of_expert in of_w]
        assert_same(got, torch.stack([q.view(torch.uint8) for q, _ in rows]).view(got.dtype))
        assert_same(scales, swizzle_scales_3d(torch.stack([s.view(torch.uint8) for _, s in rows]).view(E8M0)))


# Numbers


def special_blocks(dtype: torch.dtype) -> Tensor:
    """Blocks of 32, a row each: zeros of both signs, NaNs, infinities, the largest values, subnormals, and mixtures."""
    info, mixed = torch.finfo(dtype), torch.linspace(-1, 1, 32)
    tiny = float(info.smallest_normal)
    rows = [torch.full((32,), v) for v in (0.0, -0.0, torch.nan, torch.inf, -torch.inf, info.max, info.min, tiny)]
    rows += [mixed * scale for scale in (tiny, tiny / 4, tiny * 2**-5, info.max, 448, 57344, 240, 1e-38, 1e-30)]
    for position, value in ((0, torch.nan), (31, torch.inf), (16, -torch.inf)):
        rows.append(mixed.clone())
        rows[-1][position] = value
    return torch.stack(rows).double().to(dtype)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=short)
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
def test_special_blocks_in_both_directions(dtype, fp8, scaling, device):
    x = special_blocks(dtype).to(device)
    for blocks in (x, x.repeat(3, 1), x.t().contiguous(), x.t().repeat(5, 2).contiguous()):
        check_all(blocks, torch.tensor([len(blocks)], dtype=torch.int32, device=device), scaling, fp8)


def test_special_bytes(device):
    """A block of zeros has the byte 0, one that is not finite 255 and NaNs, and no neighbour is touched."""
    x = torch.zeros(4, 96, dtype=torch.bfloat16, device=device)
    x[1], x[2, 40], x[3, 95] = 448.0, torch.nan, torch.inf
    q, scale = quantize_mx_1x32(x)
    assert scale.view(torch.uint8).tolist() == [[0, 0, 0], [127, 127, 127], [0, 255, 0], [0, 0, 255]]
    poisoned = torch.zeros(4, 96, dtype=torch.bool, device=device)
    poisoned[2, 32:64] = poisoned[3, 64:] = True
    assert torch.equal(q.float().isnan(), poisoned)
    assert (q[1].float() == 448).all()


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=short)
def test_flushed_subnormals_change_nothing(fp8, scaling):
    x = torch.cat([special_blocks(dtype).float() for dtype in INPUT_DTYPES])
    for dtype in INPUT_DTYPES:
        rows, offs = x.to(dtype), torch.tensor([len(x)], dtype=torch.int32)
        want = reference.quantize_mx_1x32(rows, scaling, dtype=fp8)
        want_t = reference.quantize_mx_32x1(rows, offs, scaling, dtype=fp8)
        with flushed_subnormals():
            got, got_t = quantize_mx_1x32(rows, scaling, dtype=fp8), quantize_mx_32x1(rows, offs, scaling, dtype=fp8)
        assert_same((*got, *got_t), (*want, *want_t))


# Any shape


@given(
    shape=st.tuples(st.integers(0, 3), st.integers(0, 300), st.integers(0, 300)),
    dtype=st.sampled_from(INPUT_DTYPES),
    fp8=st.sampled_from(FP8_DTYPES),
    scaling=st.sampled_from(SCALINGS),
)
def test_any_shape(shape, dtype, fp8, scaling, device):
    w = wide(*shape, dtype=dtype, device=device)
    check_weight(w, scaling, fp8)
    check_rows(w.flatten(0, 1), None, scaling, fp8)


@given(
    m=st.integers(0, 400),
    k=st.integers(0, 150),
    offs=st.lists(st.one_of(st.integers(0, 400), st.integers(-(2**31), 2**31 - 1)), max_size=9),
    sort=st.booleans(),
    align=st.sampled_from([32, 64, 128]),
    dtype=st.sampled_from(INPUT_DTYPES),
)
def test_any_groups(m, k, offs, sort, align, dtype, device):
    offs = torch.tensor(sorted(offs) if sort else offs, dtype=torch.int32, device=device)
    check_all(wide(m, k, dtype=dtype, device=device), offs, "rceil", torch.float8_e4m3fn, align)


@pytest.mark.large
def test_more_than_2_31_elements(big_gpu):
    m, k, e = 524_400, 4_104, 7
    x = torch.randn(m, k, dtype=torch.bfloat16, device=big_gpu)
    assert x.numel() > 2**31
    offs = group_offs("uniform", m, e, big_gpu)
    q, scale, q_t, scale_t, padded_offs = quantize_mx_1x32_32x1(x, offs, "rceil", "rowmajor")
    rows = slice(m - 1000, m)
    assert_same((q[rows], scale[rows]), reference.quantize_mx_1x32(x[rows]))
    for columns in (slice(0, 128), slice(4_096, None)):
        want = reference.quantize_mx_32x1(x[:, columns].contiguous(), offs, "rceil", "rowmajor")
        assert_same((q_t[columns], scale_t[columns], padded_offs), want)
    blocked = quantize_mx_1x32_32x1(x, offs)
    assert_same(blocked[1], swizzle_scales_m_groups(scale, offs)[0])
    assert_same(blocked[3], swizzle_scales_k_groups(scale_t, padded_offs // 32)[0])
    assert_same(quantize_mx_1x32(x, "rceil", "blocked", offs), blocked[:2])
    assert_same(quantize_mx_1x32(x), (q, scale))


# House-keeping

OPS: dict[Callable[..., tuple[Tensor, ...]], tuple[int, ...]] = {
    quantize_mx_1x32: (300, 512),
    quantize_mx_32x1: (300, 512),
    quantize_mx_1x32_32x1: (300, 512),
    quantize_mx_weight: (3, 150, 512),
}


def arguments(fn: Callable, device: str, rows: int | None = None, seed: int = 0) -> list[object]:
    first, *others = OPS[fn]
    x = wide(rows or first, *others, device=device, seed=seed)
    offs = group_offs("zipf", x.shape[0], 4, device)
    return {quantize_mx_1x32: [x, "rceil", "blocked", offs], quantize_mx_weight: [x]}.get(fn, [x, offs])


@pytest.mark.parametrize("fn", OPS)
def test_house_keeping(fn, device):
    args = arguments(fn, device)
    check_opcheck(fn.__name__, args)
    check_deterministic(fn, args)
    if fn is not quantize_mx_weight:

        def compiled(x: Tensor, offs: Tensor) -> tuple[Tensor, ...]:
            return fn(x, "floor", "blocked", offs) if fn is quantize_mx_1x32 else fn(x, offs)

        calls = [[wide(m, 48, device=device), group_offs("zipf", m, 4, device)] for m in (2, 64, 131)]
        check_compiled(compiled, calls, device)
    else:
        check_compiled(fn, [[wide(n, 30, 48, device=device)] for n in (2, 64, 131)], device)
    with torch.autocast(device, dtype=torch.bfloat16):
        args[0] = args[0].float()
        assert_same(fn(*args), getattr(reference, fn.__name__)(*args))


@pytest.mark.parametrize("fn", OPS)
def test_streams_and_graphs(fn, gpu):
    calls = [arguments(fn, gpu, seed=seed) for seed in range(4)]
    check_cuda_graph(fn, *calls[:2])
    check_two_streams(fn, calls[:2])
    check_stream_order(fn, calls)


@pytest.mark.parametrize("fn", OPS)
def test_second_gpu(fn, second_gpu):
    check_second_gpu(fn, arguments(fn, "cpu"), second_gpu)


X, OFFS = torch.zeros(6, 4), torch.tensor([2, 6], dtype=torch.int32)


@pytest.mark.parametrize("op", ["quantize_mx_1x32", "quantize_mx_32x1", "quantize_mx_1x32_32x1", "quantize_mx_weight"])
def test_errors_of_all(op, device):
    args = on(device, {"quantize_mx_1x32": [X], "quantize_mx_weight": [X[None]]}.get(op, [X, OFFS]))
    name = "w" if op == "quantize_mx_weight" else "x"
    check_error(op, [args[0].double(), *args[1:]], name, "float64")
    check_error(op, [args[0][0], *args[1:]], name, "1" if op != "quantize_mx_weight" else "2")
    check_error(op, [torch.zeros(*args[0].shape[:-1], 8, device=device)[..., ::2], *args[1:]], name, "stride 2")
    check_error(op, [*args, "ceil"], "scaling", "'ceil'")


@pytest.mark.parametrize(
    ("op", "args", "argument", "got"),
    [
        ("quantize_mx_1x32", [X, "rceil", "row"], "layout", "'row'"),
        ("quantize_mx_1x32", [X, "rceil", "rowmajor", OFFS], "offs", "tensor"),
        ("quantize_mx_1x32", [X, "rceil", "blocked", OFFS.long()], "offs", "int64"),
        ("quantize_mx_1x32", [X, "rceil", "blocked", None, torch.uint8], "dtype", "uint8"),
        ("quantize_mx_32x1", [X, OFFS[None]], "offs", "2"),
        ("quantize_mx_32x1", [X, OFFS[0]], "offs", "0"),
        ("quantize_mx_1x32", [X, "rceil", "blocked", OFFS[0]], "offs", "0"),
        ("quantize_mx_32x1", [X, OFFS, "rceil", "blocked", 16], "align", "16"),
        ("quantize_mx_32x1", [X, OFFS, "rceil", "blocked", 256], "align", "256"),
        ("quantize_mx_1x32_32x1", [X, OFFS, "rceil", "col"], "layout", "'col'"),
        ("quantize_mx_1x32_32x1", [X, OFFS.repeat(513)], "offs", "1026"),
        ("quantize_mx_1x32_32x1", [torch.empty(2**31 - 256, 0), OFFS], "x", "2147483"),
        ("quantize_mx_weight", [torch.zeros(1025, 1, 1)], "w", "1025"),
        ("quantize_mx_weight", [X[None], "rceil", torch.float16], "dtype", "float16"),
    ],
)
def test_errors(op, args, argument, got, device):
    check_error(op, on(device, args), argument, got)


@pytest.mark.parametrize("fn", [quantize_mx_1x32, quantize_mx_32x1, quantize_mx_1x32_32x1])
def test_validation_of_offs(fn, monkeypatch, device):
    monkeypatch.setenv("MOE_FP8_VALIDATE", "1")
    x = torch.zeros(6, 4, device=device)
    for ends, got in (([4, 2], "2"), ([2, 7], "7"), ([-1, 2], "-1")):
        offs = torch.tensor(ends, dtype=torch.int32, device=device)
        args = (x, "rceil", "blocked", offs) if fn is quantize_mx_1x32 else (x, offs)
        message = error_of(fn, args)
        assert message.startswith(f"{fn.__name__}: offs ") and got in message.split("got", 1)[1]


@pytest.mark.parametrize("fn", OPS)
def test_gradient_is_not_lost_silently(fn, device):
    args = arguments(fn, device)
    args[0] = args[0].requires_grad_()
    with pytest.raises(RuntimeError, match=f"^{fn.__name__}: . must not ask for a gradient.*got"):
        fn(*args)
    with torch.no_grad():
        fn(*args)
