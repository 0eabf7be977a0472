"""narrow_tokens and outer_tokens: byte equality with the reference on integers, and a bound of float32 sums."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from derivatives import SPELLINGS, check_no_tangent
from helpers import (
    FP8_DTYPES,
    INT32_MAX,
    INT32_MIN,
    LAYOUTS,
    assert_same,
    check_compiled,
    check_cuda_graph,
    check_deterministic,
    check_error,
    check_opcheck,
    check_second_gpu,
    corrupt_offs,
    group_offs,
    misaligned,
    on,
    pairs,
    short,
    slot_indices,
    strided_2d,
)
from torch import Tensor

from moe_fp8_ext import reference
from moe_fp8_ext.ops import dequantize, narrow_tokens, outer_tokens, quantize_rows

BF16, DTYPES = torch.bfloat16, (torch.bfloat16, torch.float32)


def ternary(*shape: int, device: str = "cpu", seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    """-1, 0 or 1: every sum of products is exact in float32."""
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def scores_for(slots: int, device: str = "cpu") -> Tensor:
    """Powers of two and 0, with which products stay exact."""
    return torch.tensor([1.0, 0.5, 2.0, 0.0, -1.0], device=device).repeat(slots // 5 + 1)[:slots].contiguous()


def strided_3d(m: Tensor) -> Iterator[Tensor]:
    """Views equal to m [E, R, W] with unusual strides or addresses."""
    e, r, w = m.shape
    yield misaligned(m)
    yield m.transpose(0, 1).contiguous().transpose(0, 1)
    room = m.new_zeros(e + 1, r + 2, w + 5)
    room[1:, 1 : r + 1, 3 : w + 3] = m
    yield room[1:, 1 : r + 1, 3 : w + 3]
    aligned = m.new_zeros(e, r + 1, -(-w // 64) * 64 + 64)
    aligned[:, :r, :w] = m
    yield aligned[:, :r, :w]


def check(
    x: Tensor,
    m: Tensor,
    u: Tensor,
    offs: Tensor,
    indices: Tensor | None = None,
    top_k: int | None = None,
    scores: Tensor | None = None,
) -> None:
    what = f"{short(x.shape)} {short(m.shape)} top_k {top_k}"
    rows = {"indices": indices, "top_k": top_k}
    assert_same(narrow_tokens(x, m, offs, **rows), reference.narrow_tokens(x, m, offs, **rows), what)
    for each, dtype in ((None, None), *((scores, dtype) for dtype in DTYPES)):
        how = rows | {"scores": each, "out_dtype": dtype}
        assert_same(outer_tokens(u, x, offs, **how), reference.outer_tokens(u, x, offs, **how), what)


@pytest.mark.parametrize(
    *pairs(
        t=[0, 1, 31, 200],
        top_k=[None, 1, 3, 9],
        e=[0, 1, 5, 40],
        r=[0, 1, 3, 8, 16, 40, 64, 100],
        w=[0, 1, 7, 16, 72, 130, 257, 1032],
        layout=LAYOUTS,
    ),
    ids=short,
)
def test_pairs(t, top_k, e, r, w, layout, device):
    p = t if top_k is None else t * top_k * 4 // 3
    x, m, u = ternary(t, w, device=device), ternary(e, r, w, device=device, seed=1), ternary(p, r, device=device)
    offs = group_offs(layout, p, e, device) if e else torch.zeros(0, dtype=torch.int32, device=device)
    indices = None if top_k is None else slot_indices(t, top_k, p, device)
    check(x, m, u, offs, indices, top_k, scores_for(t * (top_k or 1), device))


@pytest.mark.parametrize("w", [64, 71])
@pytest.mark.parametrize("r", [8, 16, 19])
def test_strides(r, w, device):
    x, m, u = ternary(30, w, device=device), ternary(5, r, w, device=device, seed=1), ternary(90, r, device=device)
    offs, indices, scores = group_offs("zipf", 90, 5, device), slot_indices(30, 3, 90, device), scores_for(90, device)
    for (_, x_view), (_, u_view), m_view in zip(strided_2d(x), strided_2d(u), strided_3d(m), strict=True):
        check(x_view, m_view, u_view, offs, indices, 3, scores.view(30, 3))
        check(x_view, m_view, u_view[:30], group_offs("tail_rows", 30, 5, device), scores=scores[:30])
    for elements in (1, 2, 4, 8):
        check(misaligned(x, elements), misaligned(m, elements), misaligned(u, elements), offs, indices, 3, scores)
    same = ternary(1, w, device=device).expand(30, w)  # stride 0
    check(same, m[:1].expand(5, r, w), u[:1].expand(90, r), offs, indices, 3, scores)
    check(x, m[:, :1].expand(5, r, w), u, offs, indices, 3, misaligned(scores))


def test_corrupt_offs_and_indices(device):
    x, u, scores = ternary(20, 40, device=device), ternary(60, 16, device=device), scores_for(60, device)
    rows = [-1, 60, INT32_MAX, INT32_MIN, 3, 3, *range(54)]
    corrupt = torch.tensor(rows, dtype=torch.int32, device=device)
    for offs in corrupt_offs(60, device):
        m = ternary(len(offs), 16, 40, device=device, seed=1)
        check(x, m, u, offs, corrupt, 3, scores)
    for offs in corrupt_offs(20, device):
        m = ternary(len(offs), 16, 40, device=device, seed=1)
        check(x, m, u[:20], offs, None, None, scores[:20])
    nowhere = torch.full((60,), -1, dtype=torch.int32, device=device)
    check(x, m, u, group_offs("uniform", 60, len(m), device), nowhere, 3, scores)


@pytest.mark.parametrize("w", [48, 50])
def test_what_is_not_read_may_be_nan(w, device):
    """Tokens without a row in a group, factors of empty groups, and rows and scores without a token."""
    x, u = ternary(6, w, device=device), ternary(12, 16, device=device)
    m, scores = ternary(4, 16, w, device=device, seed=1), scores_for(12, device)
    indices = torch.tensor([0, 2, -1, 5, 5, 12, INT32_MIN, 8, 9, 10, 11, 1], dtype=torch.int32, device=device)
    offs = torch.tensor([3, 3, 7, 7], dtype=torch.int32, device=device)
    narrow = reference.narrow_tokens(x, m, offs, None, None, indices, 2)
    outer = reference.outer_tokens(u, x, offs, scores, None, None, indices, 2)
    x[3:], m[1], m[3] = torch.nan, torch.nan, torch.nan  # slots 0 to 5 are of tokens 0, 1 and 2
    u[[2, 5, 6]], u[7:], scores[6:] = torch.nan, torch.nan, torch.nan
    check_equal(narrow_tokens(x, m, offs, indices=indices, top_k=2), narrow)
    check_equal(outer_tokens(u, x, offs, scores=scores, indices=indices, top_k=2), outer)
    x, u, scores = ternary(9, w, device=device), ternary(9, 16, device=device), scores_for(9, device)
    m, narrow = m.nan_to_num(0), reference.narrow_tokens(x, m.nan_to_num(0), offs)
    outer = reference.outer_tokens(u, x, offs, scores)
    x[7:], u[7:], scores[7:], m[1], m[3] = (torch.nan,) * 5
    check_equal(narrow_tokens(x, m, offs), narrow)
    check_equal(outer_tokens(u, x, offs, scores=scores), outer)


def check_equal(got: Tensor, want: Tensor) -> None:
    assert got.isfinite().all()
    assert_same(got, want)


def sums_of_one_term(w: int, r: int, device: str) -> tuple[Tensor, Tensor]:
    """m [4, r, w] and u [4, r] with a single 1 in each row, so that results are elements of x, in any order of sums."""
    column = torch.randint(w, (4, r), generator=torch.Generator().manual_seed(0))
    m = torch.zeros(4, r, w).scatter_(2, column[:, :, None], 1)
    return m.bfloat16().to(device), torch.ones(4, r, dtype=BF16, device=device)


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=short)
@pytest.mark.parametrize("format", ["rowwise", "blockwise"])
@pytest.mark.parametrize(("w", "r"), [(16, 8), (130, 24), (272, 16), (400, 40)])
def test_quantized_tokens_are_the_dequantized_ones(w, r, format, dtype, device):
    """Also with scales that are no powers of two, whose products with x are rounded to bfloat16."""
    x = torch.randn(4, w, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    x[1, 5], x[2, 0], x[3] = torch.nan, 2.0**-120, 0
    m, u = sums_of_one_term(w, r, device)
    offs = torch.arange(1, 5, dtype=torch.int32, device=device)  # a row in each group
    for rounding in ("exact", "pow2"):
        q, scale = quantize_rows(x, format, dtype=dtype, rounding=rounding)
        values, of_x = dequantize(q, scale, format), {"x_scale": scale, "format": format}
        finite = values.nan_to_num(0)
        got = narrow_tokens(q, m, offs, **of_x)
        want = narrow_tokens(finite, m, offs)
        rows = torch.tensor([0, 2, 3], device=device)
        assert_same(got[rows], want[rows])
        assert got[1].isnan().all()
        for out_dtype in DTYPES:
            how = {"scores": torch.ones(4, device=device), "out_dtype": out_dtype}
            assert_same(outer_tokens(u, q, offs, **of_x, **how), outer_tokens(u, values, offs, **how))


@pytest.mark.parametrize("format", ["rowwise", "blockwise"])
def test_sums_of_quantized_tokens(format, device):
    make = torch.Generator().manual_seed(0)
    x, m, u = (torch.randn(s, generator=make).bfloat16().to(device) for s in ((150, 528), (5, 16, 528), (450, 16)))
    offs, indices = group_offs("zipf", 450, 5, device), slot_indices(150, 3, 450, device)
    q, scale = quantize_rows(x, format)
    rows, how = (
        reference.permute_pad(dequantize(q, scale, format), indices, 3).double(),
        {"indices": indices, "top_k": 3},
    )
    got = narrow_tokens(q, m, offs, x_scale=scale, format=format, **how)
    out = outer_tokens(u, q, offs, x_scale=scale, format=format, **how)
    for e, (start, end) in enumerate(reference.group_bounds(offs, 450)):
        a, b, factor = rows[start:end], u[start:end].double(), m[e].double()
        close(got[start:end], a @ factor.mT, a.abs() @ factor.abs().mT, 528)
        close(out[e], b.mT @ a, b.abs().mT @ a.abs(), end - start)


def test_strides_of_quantized_tokens(device):
    """Rows with room behind them, at odd addresses, or repeated, and scales of any strides."""
    x, m, u = (
        ternary(30, 144, device=device),
        ternary(5, 16, 144, device=device, seed=1),
        ternary(30, 16, device=device),
    )
    offs = group_offs("zipf", 30, 5, device)
    q, scale = quantize_rows(x * 3, "blockwise", rounding="pow2")
    narrow, outer = narrow_tokens(x * 3, m, offs), outer_tokens(u, x * 3, offs)
    wide = torch.zeros(30, 400, dtype=torch.uint8, device=device).view(q.dtype)
    spaced = torch.zeros(30, 6, device=device)
    for first in (0, 1, 16, 200):
        wide[:, first : first + 144] = q
        spaced[:, 1::3] = scale
        for each in (scale, scale.contiguous(), spaced[:, 1::3]):
            how = {"x_scale": each, "format": "blockwise"}
            assert_same(narrow_tokens(wide[:, first : first + 144], m, offs, **how), narrow)
            assert_same(outer_tokens(u, wide[:, first : first + 144], offs, **how), outer)
    how = {"x_scale": scale[:1].expand(30, 2), "format": "blockwise"}
    assert_same(
        narrow_tokens(q[:1].expand(30, 144), m, offs, **how), narrow_tokens((x[:1] * 3).expand(30, 144), m, offs)
    )


def test_nan_stays_in_its_row_and_group(device):
    x, m, u = ternary(9, 40, device=device), ternary(2, 8, 40, device=device), ternary(9, 8, device=device)
    offs = torch.tensor([4, 8], dtype=torch.int32, device=device)
    x[1, 3] = torch.nan
    narrow, outer = narrow_tokens(x, m, offs).isnan(), outer_tokens(u, x, offs).isnan()
    assert narrow[1].all() and narrow.sum() == 8
    assert outer[0, :, 3].all() and outer.sum() == 8


def close(got: Tensor, exact: Tensor, terms: Tensor, n: int) -> None:
    """A sum of n products is within n rounding errors of float32 of all terms, and one rounding of the result."""
    unit = torch.finfo(got.dtype).eps / 2
    bound = 1.01 * (n * 2.0**-24 * terms + unit * exact.abs()) + 1e-38
    worst = ((got.double() - exact).abs() / bound).max().item() if got.numel() else 0
    assert worst <= 1, worst


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e15])
@pytest.mark.parametrize(("r", "w"), [(16, 512), (3, 333), (64, 1000)])
def test_random_floats(r, w, scale, device):
    make = torch.Generator().manual_seed(0)
    x, m, u = (torch.randn(s, generator=make).bfloat16().to(device) for s in ((150, w), (5, r, w), (450, r)))
    x, scores = x * scale, torch.rand(150, 3, generator=make).to(device)
    offs, indices = group_offs("zipf", 450, 5, device), slot_indices(150, 3, 450, device)
    rows = reference.permute_pad(x, indices, 3).double()
    got = narrow_tokens(x, m, offs, indices=indices, top_k=3)
    slots = reference.permute_pad(scores.view(-1, 1), indices, 1)
    scored = (slots * u.float()).bfloat16().double()
    for dtype in DTYPES:
        out = outer_tokens(u, x, offs, scores=scores, indices=indices, top_k=3, out_dtype=dtype)
        for e, (start, end) in enumerate(reference.group_bounds(offs, 450)):
            a, b, factor = rows[start:end], scored[start:end], m[e].double()
            close(got[start:end], a @ factor.mT, a.abs() @ factor.abs().mT, w)
            close(out[e], b.mT @ a, b.abs().mT @ a.abs(), end - start)


def test_scores_are_rounded_with_u(device):
    """A score times u is rounded to bfloat16 before it is multiplied, as in two ops."""
    u = torch.full((1, 8), 1 + 2.0**-7, dtype=BF16, device=device)
    x, offs = torch.full((1, 8), 1.0, dtype=BF16, device=device), torch.ones(1, dtype=torch.int32, device=device)
    scores = torch.full((1,), 1 + 2.0**-7, device=device)
    got = outer_tokens(u, x, offs, scores=scores, out_dtype=torch.float32)
    assert (got == (u.float() * scores).bfloat16().float()[0, 0]).all()
    assert (got != u.float()[0, 0] * scores).all()


def test_tokens_by_index_are_the_tokens_in_order(device):
    x, m, u = ternary(50, 70, device=device), ternary(4, 16, 70, device=device), ternary(200, 16, device=device)
    indices, offs = slot_indices(50, 4, 200, device), group_offs("tail_rows", 200, 4, device)
    rows, scores = reference.permute_pad(x, indices, 4), scores_for(200, device)
    row_scores = reference.permute_pad(scores[:, None], indices, 1)[:, 0]
    by_index = {"indices": indices, "top_k": 4}
    assert_same(narrow_tokens(x, m, offs, **by_index), narrow_tokens(rows, m, offs))
    assert_same(
        outer_tokens(u, x, offs, scores=scores, **by_index), outer_tokens(u, rows, offs, scores=row_scores.contiguous())
    )


@pytest.mark.parametrize("shape", [(60,), (20, 3), (3, 4, 5), (1, 60, 1)])
def test_scores_of_any_shape(shape, device):
    x, u, scores = ternary(20, 16, device=device), ternary(60, 8, device=device), scores_for(60, device)
    indices, offs = slot_indices(20, 3, 60, device), group_offs("uniform", 60, 3, device)
    how = {"indices": indices, "top_k": 3}
    assert_same(
        outer_tokens(u, x, offs, scores=scores.view(shape), **how),
        outer_tokens(u, x, offs, scores=scores, **how),
    )


def both(x: Tensor, m: Tensor, u: Tensor, offs: Tensor, indices: Tensor, scores: Tensor) -> list[Tensor]:
    rows = {"indices": indices, "top_k": 3}
    narrow = [narrow_tokens(x, m, offs, **rows), narrow_tokens(x, m, offs)]
    outer = [outer_tokens(u, x, offs, scores=scores, out_dtype=dtype, **rows) for dtype in DTYPES]
    return [*narrow, *outer, outer_tokens(u[: x.shape[0]], x, offs)]


def arguments(t: int, device: str = "cpu", seed: int = 0) -> list[Tensor]:
    make = torch.Generator().manual_seed(seed)
    x, m, u = (torch.randn(s, generator=make).bfloat16().to(device) for s in ((t, 80), (5, 16, 80), (3 * t, 16)))
    scores = torch.rand(t, 3, generator=make).to(device)
    return [x, m, u, group_offs("zipf", 3 * t, 5, device), slot_indices(t, 3, 3 * t, device, seed), scores]


def test_deterministic(device):
    check_deterministic(both, arguments(3000, device))


def test_compiles_with_dynamic_rows(device):
    check_compiled(both, [arguments(t, device) for t in (50, 66, 131)], device, dynamic=(0, 2, 4, 5))


def test_exports(device):
    class Both(torch.nn.Module):
        def forward(self, *args):
            return both(*args)

    t = torch.export.Dim("t", min=2, max=4096)
    shapes = (({0: t}, None, {0: 3 * t}, None, {0: 3 * t}, {0: t}),)
    exported = torch.export.export(Both(), tuple(arguments(50, device)), dynamic_shapes=shapes).module()
    assert_same(exported(*arguments(70, device)), both(*arguments(70, device)))


def test_cuda_graph(gpu):
    check_cuda_graph(both, *(arguments(700, gpu, seed) for seed in (0, 1)))


def test_second_gpu(second_gpu):
    check_second_gpu(both, arguments(700), second_gpu)


def test_opcheck(device):
    x, m, u, offs, indices, scores = arguments(37, device)
    check_opcheck("narrow_tokens", [x, m, offs])
    check_opcheck("narrow_tokens", [x, m, offs, None, None, indices, 3])
    check_opcheck("outer_tokens", [u[:37], x, offs])
    check_opcheck("outer_tokens", [u, x, offs, scores, None, None, indices, 3, torch.float32])
    q, scale = quantize_rows(x, "blockwise")
    check_opcheck("narrow_tokens", [q, m, offs, scale, "blockwise", indices, 3])
    check_opcheck("outer_tokens", [u, q, offs, scores, scale, "blockwise", indices, 3])


@pytest.mark.parametrize("spelling", SPELLINGS, ids=SPELLINGS.get)
def test_derivatives_that_there_are_not(spelling):
    x, m, u, offs, indices, scores = arguments(10)
    rows = {"indices": indices, "top_k": 3}
    check_no_tangent(lambda x: spelling.narrow_tokens(x, m, offs), x)
    check_no_tangent(lambda m: spelling.narrow_tokens(x, m, offs), m)
    check_no_tangent(lambda u: spelling.outer_tokens(u, x, offs, **rows), u)
    check_no_tangent(lambda x: spelling.outer_tokens(u, x, offs, **rows), x)
    check_no_tangent(lambda scores: spelling.outer_tokens(u, x, offs, scores=scores, **rows), scores)
    for name, args in (("x", (x.requires_grad_(), m, offs)), ("m", (x.detach(), m.requires_grad_(), offs))):
        with pytest.raises(RuntimeError, match=f"^narrow_tokens: {name} must not ask for a gradient"):
            spelling.narrow_tokens(*args)


X, M, U = torch.zeros(3, 8, dtype=BF16), torch.zeros(2, 4, 8, dtype=BF16), torch.zeros(6, 4, dtype=BF16)
Q, SCALE, BF16_X = X.to(torch.float8_e4m3fn), torch.ones(3, 1), (None, None)  # x_scale and format of X
OFFS, INDICES, SCORES = torch.zeros(2, dtype=torch.int32), torch.zeros(6, dtype=torch.int32), torch.zeros(3, 2)


@pytest.mark.parametrize(
    ("op", "args", "argument", "got"),
    [
        ("narrow_tokens", [X.half(), M, OFFS], "x", "float16"),
        ("narrow_tokens", [X.t(), M, OFFS], "x", "stride 8"),
        ("narrow_tokens", [X[0], M, OFFS], "x", "1"),
        ("narrow_tokens", [X[:, :7], M, OFFS], "x", "7"),
        ("narrow_tokens", [X, M.float(), OFFS], "m", "float32"),
        ("narrow_tokens", [X, M.mT.contiguous().mT, OFFS], "m", "stride 4"),
        ("narrow_tokens", [X, M[0], OFFS], "m", "2"),
        ("narrow_tokens", [X, M, OFFS[:1]], "offs", "1"),
        ("narrow_tokens", [X, M, OFFS.long()], "offs", "int64"),
        ("narrow_tokens", [X, M, OFFS, *BF16_X, INDICES.long(), 2], "indices", "int64"),
        ("narrow_tokens", [X, M, OFFS, *BF16_X, INDICES], "top_k", "None"),
        ("narrow_tokens", [X, M, OFFS, *BF16_X, None, 2], "indices", "None"),
        ("narrow_tokens", [X, M, OFFS, *BF16_X, INDICES, 0], "top_k", "0"),
        ("narrow_tokens", [Q, M, OFFS], "x", "float8_e4m3fn"),
        ("narrow_tokens", [X, M, OFFS, SCALE, "blockwise"], "x", "bfloat16"),
        ("narrow_tokens", [Q, M, OFFS, SCALE], "format", "None"),
        ("narrow_tokens", [X, M, OFFS, None, "rowwise"], "x_scale", "None"),
        ("narrow_tokens", [Q, M, OFFS, SCALE, "mxfp8"], "format", "'mxfp8'"),
        ("narrow_tokens", [Q, M, OFFS, SCALE.half(), "blockwise"], "x_scale", "float16"),
        ("narrow_tokens", [Q, M, OFFS, SCALE[:2], "blockwise"], "x_scale", "2"),
        ("narrow_tokens", [Q, M, OFFS, SCALE, "rowwise"], "x_scale", "2"),
        ("outer_tokens", [U.float(), X, OFFS, None, *BF16_X, INDICES, 2], "u", "float32"),
        ("outer_tokens", [U, X.float(), OFFS, None, *BF16_X, INDICES, 2], "x", "float32"),
        ("outer_tokens", [U, Q, OFFS, None, *BF16_X, INDICES, 2], "x", "float8_e4m3fn"),
        ("outer_tokens", [U, Q, OFFS, None, SCALE[:, :0], "blockwise", INDICES, 2], "x_scale", "0"),
        ("outer_tokens", [U, Q, OFFS, None, SCALE, "mxfp8_rowmajor", INDICES, 2], "format", "'mxfp8_rowmajor'"),
        ("outer_tokens", [U.t(), X, OFFS, None, *BF16_X, INDICES, 2], "u", "stride 4"),
        ("outer_tokens", [U, X.t(), OFFS, None, *BF16_X, INDICES, 2], "x", "stride 8"),
        ("outer_tokens", [U, X, OFFS], "u", "6"),
        ("outer_tokens", [U[:5], X, OFFS, None, *BF16_X, INDICES, 2], "u", "5"),
        ("outer_tokens", [U, X, OFFS.long(), None, *BF16_X, INDICES, 2], "offs", "int64"),
        ("outer_tokens", [U, X, OFFS, SCORES.half(), *BF16_X, INDICES, 2], "scores", "float16"),
        ("outer_tokens", [U, X, OFFS, SCORES.t(), *BF16_X, INDICES, 2], "scores", "stride"),
        ("outer_tokens", [U, X, OFFS, SCORES[:2], *BF16_X, INDICES, 2], "scores", "4"),
        ("outer_tokens", [U[:3], X, OFFS, SCORES], "scores", "6"),
        ("outer_tokens", [U, X, OFFS, SCORES, *BF16_X, INDICES], "top_k", "None"),
        ("outer_tokens", [U, X, OFFS, None, *BF16_X, None, 2], "indices", "None"),
        ("outer_tokens", [U, X, OFFS, SCORES, *BF16_X, INDICES, 2, torch.float16], "out_dtype", "float16"),
    ],
)
def test_errors(op, args, argument, got, device):
    check_error(op, on(device, args), argument, got)
