"""Mistakes of callers that would give wrong numbers, or an error that leads nowhere: each raises and says its cause."""

from __future__ import annotations

import importlib
import re
import threading
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import moe_fp8_ext as moe
from moe_fp8_ext import _C
from moe_fp8_ext.quantization.recipe import RECIPES

SIZES = "sizes are given as Router(num_experts, hidden_size, top_k)"
CUMSUM = "group sizes become offs by sizes.cumsum(0, dtype=torch.int32)"
VALIDATE = "to check contents, call it inside moe_fp8_ext.validate()"
DESCENDING = "offs must be non-decreasing from 0, got offs[2] = 2 after 20"


def int32(*numbers: int, device: str = "cpu") -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def ones(*shape: int, device: str = "cpu") -> Tensor:
    return torch.ones(shape, dtype=torch.bfloat16, device=device)


def check_refused(text: str, call: Callable[[], object], error: type[Exception] = RuntimeError) -> None:
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        call()


X, W, UP, DOWN = ones(32, 16), ones(3, 8, 16), ones(3, 64, 16), ones(3, 16, 32)
product = partial(moe.grouped_mm, X, W.mT)
layer = partial(moe.experts, X)
groups = partial(moe.experts_of_groups, X)


@pytest.mark.parametrize("recipe", RECIPES)
def test_sizes_of_groups_in_place_of_offs(recipe):
    cause = f"{DESCENDING}; they add up to 32: {CUMSUM}"
    check_refused(f"grouped_mm: {cause}", lambda: product(int32(10, 20, 2), recipe=recipe))
    check_refused(f"experts_of_groups: {cause}", lambda: groups(int32(10, 20, 2), None, UP, DOWN, recipe=recipe))
    product(int32(10, 20, 22), recipe=recipe)


def test_sizes_in_another_dtype():
    text = f"grouped_mm: offs must be int32, got torch.int64; {CUMSUM}; {VALIDATE}"
    check_refused(text, lambda: product(torch.tensor([10, 20, 2])))
    text = f"grouped_mm: offs must have 3 entries, one for each expert of B_t, got 2; {VALIDATE}"
    check_refused(text, lambda: product(int32(10, 20)))


def test_offs_past_the_rows():
    check_refused(
        "grouped_mm: offs must not exceed the 32 rows of A, got offs[2] = 40", lambda: product(int32(1, 2, 40))
    )
    text = "experts_of_groups: offs must not exceed the 32 rows of x, got offs[0] = 33"
    check_refused(text, lambda: groups(int32(33, 33, 33), None, UP, DOWN))


def test_ids_and_indices_out_of_range():
    ids, scores = torch.full((32, 1), -1), torch.ones(32, 1)
    layer(ids, scores, UP, DOWN)
    ids[7] = 3
    check_refused("experts: topk_ids must be -1 or from 0 to 2, got 3 in slot 7", lambda: layer(ids, scores, UP, DOWN))
    call = partial(product, int32(1, 2, 2), top_k=1)
    call(indices=int32(-1, 31))
    text = "grouped_mm: indices must be"
    check_refused(f"{text} -1 or one of the 32 slots, got 32 in place 1", lambda: call(indices=int32(0, 32)))
    check_refused(f"{text} distinct, got 4 twice", lambda: call(indices=int32(4, 4)))


def test_ops_still_clamp():
    """Only the functions for users raise: the contract of ops is to clamp (DESIGN.md section 4)."""
    clamped, given = (moe.ops.quantize_tokens(X, "rowwise", offs=o) for o in (int32(10, 20, 20), int32(10, 20, 2)))
    for want, got in zip(clamped, given, strict=True):
        assert torch.equal(want.view(torch.uint8), got.view(torch.uint8))


def test_weights_that_are_not_transposed():
    text = (
        "grouped_mm: B_t must have size 16 in dimension 1 (the last of A), got 8; weights [E, N, K] are passed as w.mT"
    )
    check_refused(text, lambda: moe.grouped_mm(X, W, int32(1, 2, 3)))
    call = partial(layer, torch.zeros(32, 1).long(), torch.ones(32, 1))
    text = "experts: w_down must have size 16 in dimension 1, got 32; it is [E, D, F], not [E, F, D]"
    check_refused(text, lambda: call(UP, DOWN.mT.contiguous()))
    text = "experts: w_gate_up must have size 16 in dimension 2, got 64; it is [E, 2 F, D], not [E, D, 2 F]"
    check_refused(text, lambda: call(UP.mT.contiguous(), DOWN))
    text = "experts: w_gate_up must have size 16 in dimension 2, got 32; it is [E, F, D], not [E, D, F]"
    check_refused(text, lambda: call(UP[:, :32].mT, DOWN, activation="relu2"))


def test_square_weights():
    """Shapes cannot tell. The debug mode warns of the layout that a weight in nn.Linear's orientation has."""
    square, offs = ones(3, 16, 16), int32(1, 2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moe.grouped_mm(X, square, offs)
        with moe.validate():
            moe.grouped_mm(X, square.mT, offs)
            with pytest.raises(UserWarning, match=r"B_t \[3, 16, 16\] is contiguous and read as \[E, K, N\]"):
                moe.grouped_mm(X, square, offs)


@pytest.mark.parametrize("recipe", RECIPES)
def test_arguments_of_torch(recipe):
    call = partial(product, int32(1, 2, 32), recipe=recipe)
    assert torch.equal(call(bias=None, out_dtype=None), call(out_dtype=torch.bfloat16))
    text = "grouped_mm: bias must be None, because products add none, got Tensor; `experts` adds biases"
    check_refused(text, lambda: call(bias=X))
    result = "grouped_mm: out_dtype must be None or the result's"
    check_refused(
        f"{result}, torch.bfloat16, got torch.float32; cast the result", lambda: call(out_dtype=torch.float32)
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        full = partial(moe.grouped_mm, X.float(), W.float().mT, int32(1, 2, 32), recipe=recipe)
        assert full(out_dtype=torch.bfloat16).dtype == torch.bfloat16
        check_refused(
            f"{result}, torch.bfloat16, got torch.float32; cast the result", lambda: full(out_dtype=torch.float32)
        )


def test_recipes():
    assert moe.Recipe() == moe.Recipe("rowwise") and moe.Recipe(align=64) == moe.Recipe("rowwise", align=64)
    names = "'bf16', 'auto', 'rowwise', 'blockwise', 'mxfp8' or 'mxfp8_rowmajor', or come with a format"
    text = f"Recipe: name must be {names}, got 'tensorwise'"
    check_refused(text, lambda: moe.Recipe("tensorwise"), ValueError)
    text = "grouped_mm: recipe must be 'bf16', 'rowwise', 'blockwise', 'mxfp8', 'auto' or a Recipe, got 'tensorwise'"
    check_refused(text, lambda: product(int32(1, 2, 3), recipe="tensorwise"), ValueError)


def test_router_with_swapped_sizes():
    text = f"Router: num_experts must be from 1 to 1024, got 2048; {SIZES}"
    check_refused(text, lambda: moe.Router(2048, 64, 8))
    swapped = moe.Router(16, 8, 2)
    check_refused(f"Router: x must have size 8 in dimension 1, got 16; {SIZES}", lambda: swapped(torch.ones(4, 16)))
    check_refused("Router: x must have size 8 in dimension 1, got 9", lambda: swapped(torch.ones(4, 9)))
    text = "MoE: experts must be as many as router chooses among, 16, got 8"
    check_refused(f"{text}; {SIZES}", lambda: moe.MoE(swapped, moe.Experts(8, 16, 32)))


# ---- validate() ------------------------------------------------------------------------------------------------------


def quantize_wrong() -> None:
    moe.ops.quantize_rows(X, "mxfp8", offs=int32(10, 20, 2))


def test_validate_covers_its_block_and_nests(monkeypatch):
    monkeypatch.delenv("MOE_FP8_VALIDATE", raising=False)
    quantize_wrong()
    with pytest.raises(RuntimeError, match="^quantize_rows: offs must be"):
        with moe.validate():
            with moe.validate():
                pass
            quantize_wrong()
    quantize_wrong()
    with pytest.raises(RuntimeError, match="^quantize_rows: offs must be"):
        moe.validate()(quantize_wrong)()
    assert not _C.validates()


def test_validate_reaches_other_threads():
    """As backward needs, which runs in threads of autograd."""
    seen = []
    with moe.validate():
        thread = threading.Thread(target=lambda: seen.append(_C.validates()))
        thread.start(), thread.join()
    assert seen == [True]


def test_validate_around_a_compiled_function():
    compiled = torch.compile(lambda o: product(o, recipe="mxfp8"), backend="eager", fullgraph=True)
    compiled(int32(10, 20, 2))
    with moe.validate(), pytest.raises(RuntimeError, match="offs must be non-decreasing"):
        compiled(int32(10, 20, 2))


# ---- A build for the CPU ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cuda", "gpus"), [("13.0", 1), ("13.0", 0), (None, 1)])
def test_a_build_for_the_cpu_on_a_machine_with_a_gpu(monkeypatch, cuda, gpus):
    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as found:
        patch.setattr(torch.version, "cuda", cuda)
        patch.setattr(torch.version, "hip", None)
        patch.setattr(torch.cuda, "device_count", lambda: gpus)
        patch.setattr(_C, "build_info", lambda info=_C.build_info: {**info(), "backend": "cpu"})
        warnings.simplefilter("always")
        importlib.reload(moe)
    importlib.reload(moe)  # with its own build_info again
    said = [str(warning.message) for warning in found if "this build is for the CPU" in str(warning.message)]
    assert len(said) == (cuda is not None and gpus > 0) and all("no nvcc" in text for text in said)
