"""What holds for every op alike: derivatives that are not there raise, wrong kinds of arguments and extents beyond all
memory get a sentence, and no call leaks."""

from __future__ import annotations

import random
import resource
import time

import pytest
import torch
from calls import OPS, schema
from derivatives import SPELLINGS, check_no_tangent
from torch import Tensor

from moe_fp8_ext import ops
from moe_fp8_ext.formats import MAX_ROWS

DIFFERENTIABLE = {
    "activate",
    "choose_experts",
    "permute_pad",
    "unpermute",
    "combine",
    "pad_token_groups",
    "pad_token_groups_to",
    "unpad_token_groups",
}
OF_INTEGERS = {"sort_tokens", "tokens_by_rank", "permute_indices"}
HUGE = 2**40
NO_GROUPS = torch.zeros(0, dtype=torch.int32)


def is_float(t: object) -> bool:
    return isinstance(t, Tensor) and t.is_floating_point()


def valid(name: str) -> tuple[list[object], dict[str, object]]:
    """A call of the op with some rows in every tensor, one of which is of floats where the op takes them."""
    r = random.Random(name)
    while True:
        args, kwargs = OPS[name](r)
        some_rows = all(t.numel() for t in (*args, *kwargs.values()) if isinstance(t, Tensor))
        if some_rows and (name in OF_INTEGERS or any(map(is_float, args))):
            return args, kwargs


def floats(name: str) -> list[tuple[int, str]]:
    """Places and names of the arguments of the op's valid call that could have a gradient."""
    args, _ = valid(name)
    return [(i, schema(name).arguments[i].name) for i, t in enumerate(args) if is_float(t)]


def test_calls_are_there_for_every_op():
    assert set(OPS) == set(ops.__all__)


@pytest.mark.parametrize("name", sorted(set(OPS) - DIFFERENTIABLE - OF_INTEGERS))
@pytest.mark.parametrize("spelling", SPELLINGS, ids=SPELLINGS.get)
def test_gradients_that_there_are_not(spelling, name):
    for i, argument in floats(name):
        args, kwargs = valid(name)
        args[i] = args[i].detach().requires_grad_()
        with pytest.raises(
            RuntimeError, match=f"^{name}: {argument} must not ask for a gradient.*got requires_grad=True"
        ):
            getattr(spelling, name)(*args, **kwargs)
        with torch.no_grad():
            getattr(spelling, name)(*args, **kwargs)


@pytest.mark.parametrize("name", sorted(set(OPS) - OF_INTEGERS))
@pytest.mark.parametrize("spelling", SPELLINGS, ids=SPELLINGS.get)
def test_forward_mode_raises(spelling, name):
    """No derivative is a silent zero."""
    for i, _ in floats(name):
        args, kwargs = valid(name)

        def call(x, i=i, args=args, kwargs=kwargs):
            return getattr(spelling, name)(*args[:i], x, *args[i + 1 :], **kwargs)

        check_no_tangent(call, args[i])


@pytest.mark.parametrize("name", sorted(OPS))
def test_wrong_kinds_of_tensors(name):
    """None and a sparse tensor get the sentence that every other error gets; a list is no tensor to torch itself."""
    args, kwargs = valid(name)
    for i, argument in enumerate(schema(name).arguments[: len(args)]):
        if not isinstance(args[i], Tensor):
            continue
        if str(argument.type) == "Tensor":
            with pytest.raises(RuntimeError, match=f"^{name}: {argument.name} must be a tensor, got None$"):
                getattr(ops, name)(*args[:i], None, *args[i + 1 :], **kwargs)
        for wrong in (args[i].to_sparse() if args[i].dtype.itemsize > 1 else None, args[i].tolist(), "x", 3):
            if wrong is None:
                continue
            with pytest.raises((RuntimeError, TypeError), match=argument.name if isinstance(wrong, Tensor) else None):
                getattr(ops, name)(*args[:i], wrong, *args[i + 1 :], **kwargs)


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("swizzle_scales", [torch.zeros(HUGE, 0, 5, dtype=torch.uint8)], {"groups": "experts"}),
        ("swizzle_scales", [torch.zeros(HUGE, 0, dtype=torch.uint8)], {}),
        ("quantize_weight", [torch.zeros(1024, 2**31 - 256, 0), "blockwise"], {}),
        ("quantize_weight", [torch.zeros(0, 2**31 - 256, 2**31 - 256), "mxfp8"], {}),
        ("quantize_rows", [torch.zeros(HUGE, 0), "mxfp8"], {}),
        ("quantize_rows", [torch.zeros(HUGE, 0, 3), "rowwise"], {}),
        ("quantize_tokens", [torch.zeros(0, HUGE), "rowwise"], {"offs": torch.zeros(0, dtype=torch.int32)}),
        ("unswizzle_scales", [torch.zeros(HUGE, 0, dtype=torch.uint8), 0, 5], {"groups": "experts"}),
        ("choose_experts", [torch.zeros(HUGE, 0), 1], {}),
        ("choose_experts", [torch.zeros(0, HUGE), 1], {}),
        ("choose_experts_backward", [torch.zeros(HUGE, 0), torch.zeros(HUGE, 0), torch.zeros(HUGE, 0).int()], {}),
        ("sort_tokens", [torch.zeros(HUGE, 0, dtype=torch.int64), 4], {}),
        ("tokens_by_rank", [torch.zeros(HUGE, 0, dtype=torch.int64), 4, 2], {}),
        ("permute_pad", [torch.zeros(HUGE, 0), torch.zeros(0, dtype=torch.int32), 1], {}),
        ("activate", [torch.zeros(HUGE, 0), "silu"], {}),
        ("activate", [torch.zeros(2**31 - 256, 0), "swiglu"], {}),
        ("quantize_activated", [torch.zeros(2**31 - 256, 0), "relu2", "blockwise"], {}),
        ("activate_backward", [torch.zeros(0, HUGE), torch.zeros(0, HUGE // 2), "swiglu"], {}),
        ("combine", [torch.zeros(0, HUGE), torch.zeros(0, 2, dtype=torch.int32)], {}),
        ("pad_token_groups", [torch.zeros(0, HUGE), torch.zeros(0, dtype=torch.int32)], {}),
        ("activate", [torch.zeros(MAX_ROWS, 0), "silu"], {}),
        ("quantize_activated", [torch.zeros(MAX_ROWS, 0), "swiglu", "mxfp8_rowmajor"], {}),
        ("pad_token_groups", [torch.zeros(MAX_ROWS - 256, 0), torch.tensor([MAX_ROWS - 256], dtype=torch.int32)], {}),
        ("pad_token_groups_to", [torch.zeros(0, 0), NO_GROUPS, NO_GROUPS, MAX_ROWS], {}),
        ("unpad_token_groups", [torch.zeros(0, 0), NO_GROUPS, NO_GROUPS, MAX_ROWS], {}),
        ("unpermute", [torch.zeros(0, 0), NO_GROUPS, MAX_ROWS, 1], {}),
    ],
)
def test_extents_beyond_all_memory(name, args, kwargs):
    """Of tensors with no elements, beyond what an op takes and as far as it goes: an error or an empty result, at once
    and without memory."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    try:
        getattr(ops, name)(*args, **kwargs)
    except RuntimeError as error:
        assert str(error).startswith(f"{name}: "), error
    assert time.perf_counter() - start < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10  # in KiB


def test_sizes_that_overflow():
    """Of a product without terms: sizes whose products leave 64 bits."""
    a, b = torch.zeros(5, 0, dtype=torch.float8_e4m3fn), torch.zeros(1, 0, 2**31, dtype=torch.float8_e4m3fn)
    for n in (2**31 - 257, 2**31, 2**62, 2**63 - 1):
        wide = b.as_strided((1, 0, n), (1, 1, 1))
        with pytest.raises(RuntimeError, match="^scaled_grouped_mm: "):
            offs = torch.tensor([5], dtype=torch.int32)
            ops.scaled_grouped_mm(a, wide, torch.ones(5), torch.ones(1, 1), offs, "rowwise")


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def test_strings_do_not_leak():
    """torch's own conversion of a string argument never deletes it: 200 calls of a megabyte would show."""
    x, scale = torch.zeros(2, 32, dtype=torch.bfloat16), torch.zeros(2, 3, dtype=torch.uint8)
    long = "m" * (1 << 20)

    def call_all() -> None:
        for call in (
            lambda: torch.ops.moe_fp8.quantize_rows(x, long),
            lambda: torch.ops.moe_fp8.quantize_rows(x, "mxfp8", rounding=long),
            lambda: torch.ops.moe_fp8.swizzle_scales(scale, groups=long),
        ):
            with pytest.raises(RuntimeError, match="must be"):
                call()

    call_all()
    before = resident_bytes()
    for _ in range(70):
        call_all()
    assert resident_bytes() - before < 50 << 20


def test_calls_do_not_leak():
    """Of strings that are good, tensors and results: 0.6 kB a step was a leak once."""
    x, offs = torch.zeros(2, 32, dtype=torch.bfloat16), torch.tensor([2], dtype=torch.int32)

    def steps(n: int) -> None:
        for _ in range(n):
            ops.quantize_both(x, "mxfp8_rowmajor", offs=offs, rounding="rceil")

    steps(2000)
    before = resident_bytes()
    steps(20_000)
    assert resident_bytes() - before < 1 << 20
