"""grouped_mm of rows taken by index."""

from __future__ import annotations

import pytest
import torch
from grouped_problem import gradients, problem, run
from helpers import assert_same, check_compiled, group_offs, saved_tensors, slot_indices
from torch import Tensor

from moe_fp8_ext import grouped_mm, permute_pad, unpermute

NAMES = ("bf16", "rowwise", "blockwise", "mxfp8")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("recipe", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("top_k", [1, 3])
def test_rows_taken_by_index(top_k, dtype, recipe, device):
    """Forward and backward have the bytes of permuted rows, and no recipe makes permuted rows."""
    a, b_t, _, _ = problem(70, 64, 48, group_offs("uniform", 70, 3), device, dtype)
    indices, offs = slot_indices(70, top_k, 110, device), group_offs("tail_rows", 110, 3, device)
    g = torch.randn(110, 48, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
    got = gradients(lambda a, b: grouped_mm(a, b, offs, recipe=recipe, indices=indices, top_k=top_k), a, b_t, g)
    rows = permute_pad(a.detach(), indices, top_k).requires_grad_()
    out, d_rows, d_b = run(rows, b_t, offs, g, recipe)
    assert_same((got[0], got[2]), (out, d_b))
    # The fused path rounds the sum of a token's slots from bfloat16 to bfloat16 once, then casts.
    slots = d_rows if recipe == "bf16" else d_rows.bfloat16()
    assert_same(got[1], unpermute(slots, indices, top_k, 70).to(dtype))


@pytest.mark.usefixtures("unchecked")
def test_rows_taken_by_index_keep_one_byte_an_element(device):
    """No 16-bit copy of the tokens is saved, permuted or not."""
    a, b_t, _, _ = problem(256, 128, 32, group_offs("uniform", 256, 2), device)
    indices, offs = slot_indices(256, 1, 256, device), group_offs("uniform", 256, 2, device)
    with saved_tensors() as saved:
        grouped_mm(a, b_t, offs, indices=indices, top_k=1)
    assert saved and not [t for t in saved if t.dtype.itemsize == 2]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("recipe", NAMES)
def test_rows_taken_by_index_compile(recipe, device):
    a, b_t, offs, _ = problem(70, 64, 48, group_offs("uniform", 70, 3), device)

    def call(a: Tensor, indices: Tensor) -> Tensor:
        return grouped_mm(a, b_t.detach(), offs, recipe=recipe, indices=indices, top_k=2)

    calls = [[a.detach()[:m], slot_indices(m, 2, 100 + m, device)] for m in (40, 50, 70)]
    check_compiled(call, calls, device, dynamic=(0, 1))


@pytest.mark.parametrize("recipe", NAMES)
def test_bad_indices(recipe, device):
    a, b_t, offs, _ = problem(50, 32, 16, group_offs("uniform", 50, 2), device)
    for indices, top_k, text in (
        (offs.long(), 1, "indices must be int32, got .*int64"),
        (offs[None], 1, "indices must have 1 dimensions, got 2"),
        (offs.repeat(2)[::2], 1, "indices must have stride 1.*, got stride 2"),
        ([0, 1], 1, "indices must be .*got list"),
        (None, 2, "indices must be given with top_k, got None"),
        (None, 1, "indices must be given with top_k, got None"),
        (offs, None, "top_k must be given with indices, got None"),
        (offs, 0, "top_k must be at least 1, got 0"),
        (offs, "2", "top_k must be an int, got str"),
        (offs, True, "top_k must be an int, got bool"),
        (offs, torch.tensor(1), "top_k must be an int, got Tensor"),
    ):
        with pytest.raises(RuntimeError, match=f"^grouped_mm: {text}"):
            grouped_mm(a, b_t, offs, recipe=recipe, indices=indices, top_k=top_k)


@pytest.mark.usefixtures("unchecked")
def test_slots_of_numpy():
    numpy = pytest.importorskip("numpy", reason="torch runs without it")
    a, b_t, _, _ = problem(70, 64, 48, group_offs("uniform", 70, 3), "cpu")
    indices, offs = slot_indices(70, 2, 110, "cpu"), group_offs("uniform", 110, 3)
    got, want = (grouped_mm(a, b_t, offs, indices=indices, top_k=top_k) for top_k in (numpy.int64(2), 2))
    assert_same(got, want)
