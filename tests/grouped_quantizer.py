"""Tests that quantize_colwise and quantize_rowcol share: both take x [M, K] and the offsets of E groups of rows."""

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
    group_offs,
    misaligned,
    on,
    short,
    strided_2d,
    wide,
)
from torch import Tensor

import moe_fp8_ext
from moe_fp8_ext import reference, shapes


def offsets(*ends: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(ends, dtype=dtype)


X, OFFS = torch.zeros(6, 4, dtype=torch.bfloat16), offsets(2, 6)


class GroupedQuantizerTests:
    """Subclassed once per op; `op` is its name."""

    op: str

    @property
    def fn(self) -> Callable[..., tuple[Tensor, ...]]:
        return getattr(moe_fp8_ext, self.op)

    def check(self, x: Tensor, offs: Tensor, *args: object) -> tuple[Tensor, ...]:
        got = self.fn(x, offs, *args)
        assert_same(got, getattr(reference, self.op)(x, offs, *args), f"{short(x.shape)} offs {offs.tolist()[:20]}")
        return got

    @pytest.mark.parametrize("pow2_scale", [False, True])
    @pytest.mark.parametrize("fp8", FP8_DTYPES, ids=short)
    @pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
    def test_formats(self, dtype, fp8, pow2_scale, device):
        x = wide(131, 67, dtype=dtype, device=device)
        self.check(x, group_offs("zipf", 131, 5, device), 16, fp8, pow2_scale)

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("shape", CORRECTNESS_MKE, ids=short)
    def test_group_layouts(self, shape, layout, device):
        m, k, e = shape
        self.check(wide(m, k, device=device), group_offs(layout, m, e, device))

    @pytest.mark.parametrize("align", [1, 2, 4, 8, 16, 32, 64, 128, 256])
    def test_align(self, align, device):
        for layout in LAYOUTS:
            self.check(wide(301, 40, device=device), group_offs(layout, 301, 6, device), align)

    @pytest.mark.parametrize("shape", [(0, 0, 0), (0, 0, 3), (5, 0, 2), (0, 5, 2), (5, 3, 0), (1, 1, 1)], ids=short)
    def test_zero_sizes(self, shape, device):
        m, k, e = shape
        self.check(wide(m, k, device=device), group_offs("uniform", m, e, device))

    @pytest.mark.parametrize("k", [1, 2, 7, 8, 15, 16, 17, 31, 33, 63, 65, 127, 129, 255, 257, 1025])
    def test_widths(self, k, device):
        self.check(wide(83, k, device=device), group_offs("zipf", 83, 3, device))
        self.check(wide(83, k, dtype=torch.float32, device=device), group_offs("zipf", 83, 3, device))

    def test_group_sizes_around_every_tile(self, device):
        sizes = [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257]
        offs = torch.tensor(sizes, device=device).cumsum(0).int()
        self.check(wide(sum(sizes), 72, device=device), offs)

    def test_one_long_group(self, device):
        self.check(wide(9001, 40, device=device), torch.tensor([9001], dtype=torch.int32, device=device))

    def test_most_experts(self, device):
        e = shapes.MAX_EXPERTS
        for m in (0, 700, 5000):
            self.check(wide(m, 24, device=device), group_offs("zipf", m, e, device))

    @pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
    def test_strides_and_alignment(self, dtype, device):
        x, offs = wide(70, 128, dtype=dtype, device=device), group_offs("zipf", 70, 3, device)
        for name, view in strided_2d(x):
            assert_same(self.fn(view, offs), self.fn(x, offs), name)
        for elements in range(1, 9):
            self.check(misaligned(x, elements), offs)
        self.check(x[:1].expand(70, 128), offs)
        self.check(x, misaligned(offs))

    def test_corrupt_offsets(self, device):
        for m in (1, 37, 200):
            for offs in corrupt_offs(m, device):
                self.check(wide(m, 50, device=device), offs)

    def test_non_finite_poisons_its_group_and_column_only(self, device):
        x, offs = wide(90, 30, device=device), group_offs("tail_rows", 90, 4, device)
        clean = getattr(reference, self.op)(x, offs)
        (_, end, *_), tail = offs.tolist(), int(offs[-1])
        x[end - 1, 3], x[end, 5], x[tail, 8] = float("nan"), float("-inf"), float("inf")
        for fp8 in FP8_DTYPES:
            self.check(x, offs, 16, fp8)
            self.check(x, offs, 16, fp8, True)
        q_t, scale_t, padded_offs = self.fn(x, offs)[-3:]
        assert scale_t.isnan().nonzero().tolist() == [[1, 3], [2, 5]]
        kept = [k for k in range(30) if k not in (3, 5)]
        assert_same((q_t[kept], scale_t[:, kept]), (clean[-3][kept], clean[-2][:, kept]))
        assert not q_t[:, int(padded_offs[-1]) :].view(torch.uint8).any()

    def test_opcheck(self, device):
        args = [wide(37, 33, device=device), group_offs("zipf", 37, 3, device), 32, torch.float8_e5m2, True]
        check_opcheck(self.op, args)

    def test_autocast_changes_nothing(self, device):
        args = wide(37, 33, dtype=torch.float32, device=device), group_offs("zipf", 37, 3, device)
        with torch.autocast(device, dtype=torch.bfloat16):
            self.check(*args)

    def test_deterministic(self, device):
        check_deterministic(self.fn, [wide(1000, 303, device=device), group_offs("zipf", 1000, 7, device)])

    def test_compiles_with_dynamic_rows(self, device):
        calls = [[wide(m, 48, device=device), group_offs("zipf", m, 4, device)] for m in (50, 64, 131)]
        check_compiled(self.fn, calls, device)

    def test_cuda_graph(self, gpu):
        first, later = (
            [wide(700, 512, device=gpu, seed=seed), group_offs(layout, 700, 9, gpu)]
            for seed, layout in enumerate(("zipf", "one_giant"))
        )
        check_cuda_graph(self.fn, first, later)

    def test_two_streams(self, gpu):
        check_two_streams(
            self.fn, [[wide(4000, 1024, device=gpu, seed=s), group_offs("zipf", 4000, 9, gpu)] for s in (0, 1)]
        )

    def test_stream_order(self, gpu):
        for k in (64, 1024, 5120):
            calls = [[wide(4000, k, device=gpu, seed=s), group_offs("zipf", 4000, 9, gpu)] for s in range(4)]
            check_stream_order(self.fn, calls)

    def test_second_gpu(self, second_gpu):
        check_second_gpu(self.fn, [wide(700, 512), group_offs("zipf", 700, 9)], second_gpu)

    @pytest.mark.large
    def test_more_than_2_31_elements(self, big_gpu):
        m, k, e = 600_011, 4_096, 7
        x = torch.randn(m, k, dtype=torch.bfloat16, device=big_gpu)
        assert x.numel() > 2**31
        offs = group_offs("uniform", m, e, big_gpu)
        *row_outputs, q_t, scale_t, padded_offs = self.fn(x, offs)
        start = padded_start = 0
        for i, (end, padded_end) in enumerate(zip(offs.tolist(), padded_offs.tolist(), strict=True)):
            one = torch.tensor([end - start], dtype=torch.int32, device=big_gpu)
            want_q_t, want_scale_t, want_end = reference.quantize_colwise(x[start:end], one)
            assert padded_end - padded_start == int(want_end)
            got = q_t[:, padded_start:padded_end].contiguous(), scale_t[i : i + 1]
            assert_same(got, (want_q_t[:, : int(want_end)].contiguous(), want_scale_t), f"group {i}")
            if row_outputs:
                want_rows = reference.quantize_rowwise(x[start:end])
                assert_same([t[start:end] for t in row_outputs], want_rows, f"rows of group {i}")
            start, padded_start = end, padded_end
        assert not q_t[:, padded_start:].view(torch.uint8).any()

    @pytest.mark.parametrize(
        ("args", "argument", "got"),
        [
            ([X.double(), OFFS], "x", "float64"),
            ([X.to(torch.float8_e4m3fn), OFFS], "x", "float8_e4m3fn"),
            ([X[0], OFFS], "x", "1"),
            ([X[None], OFFS], "x", "3"),
            ([X.t(), OFFS], "x", "stride 4"),
            ([torch.empty(0, 2**31, dtype=torch.bfloat16), OFFS], "x", "2147483648"),
            ([X, OFFS.long()], "offs", "int64"),
            ([X, OFFS.float()], "offs", "float32"),
            ([X, OFFS[None]], "offs", "2"),
            ([X, OFFS[0]], "offs", "0"),
            ([X, offsets(1, 2, 3, 4)[::2]], "offs", "stride 2"),
            ([X, torch.zeros(shapes.MAX_EXPERTS + 1, dtype=torch.int32)], "offs", "1025"),
            ([X, OFFS, 0], "align", "0"),
            ([X, OFFS, -16], "align", "-16"),
            ([X, OFFS, 24], "align", "24"),
            ([X, OFFS, 512], "align", "512"),
            ([X, OFFS, 16, torch.float16], "dtype", "float16"),
        ],
    )
    def test_errors(self, args, argument, got, device):
        check_error(self.op, on(device, args), argument, got)

    def test_gradient_is_not_lost_silently(self, device):
        x, offs = (t.to(device) for t in (X, OFFS))
        with pytest.raises(RuntimeError, match=f"^{self.op}: x must not ask for a gradient.*got"):
            self.fn(x.float().requires_grad_(), offs)
        with torch.no_grad():
            self.fn(x.float().requires_grad_(), offs)

    def test_error_offs_on_another_device(self, device):
        other = "cpu" if device == "cuda" else "meta"
        check_error(self.op, [X.to(device), OFFS.to(other)], "offs", other)
