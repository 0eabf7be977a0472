"""Calls every op at random. Run as a program: python fuzz.py SEED valid=CALLS junk=CALLS.

valid: the results must equal the reference's, with the shapes of the fake. junk: an argument may be anything, and a
call must return or raise a Python exception, as its fake does. Each call is printed before it is made, so that its name
is known after a crash.
"""

from __future__ import annotations

import os
import random
import re
import sys
from functools import cache

os.environ["MOE_FP8_POISON"] = "1"

import torch
from calls import OPS, is_written, schema
from helpers import assert_same
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_fp8_ext import reference
from moe_fp8_ext.quantization.format import FORMATS

NUMBERS = (*(0, 1, 2, 3, 7, 16, 24, 32, 128, 256, 512, 1023, 1025), *(2**31 + d for d in (-257, -256, -255, -1, 0)))
NUMBERS = (*NUMBERS, 2**32, 2**40, 2**62, 2**63 - 1, -1, -2, -16, -(2**31), -(2**63))
WORDS = (*FORMATS, "rows", "tokens", "columns", "experts", "pow2", "floor")
WORDS = (*WORDS, "", "ROWWISE", "mxfp8 ", "m" * 5000, "rowwise\0", "\u00e9", "%s%n")
SIZES = (0, 0, 1, 1, 2, 3, 5, 16, 33, 128, 130)
DTYPES = [v for v in vars(torch).values() if isinstance(v, torch.dtype)]
DTYPES = [v for v in DTYPES if not re.search(r"\.(q|bits|u?int[1-7]$)", str(v))]  # torch hardly supports those
MEMORY, ROWS = 2**36, 2**28  # a call that needs more bytes or rows is meant to fail
OTHER = (None, True, 3, 2.5, "rowwise", [1, 2], (), {}, torch.float32, object())


def any_tensor(r: random.Random) -> Tensor:
    shape = [r.choice(SIZES) for _ in range(r.randint(0, 3))] + [3] * (r.random() < 0.1)
    kind = r.randrange(12)
    if kind == 0 and shape:  # an extent beyond all memory
        shape[r.randrange(len(shape))] = r.choice((2**31 - 1, 2**31, 2**40))
        return torch.zeros(()).to(r.choice((torch.float32, torch.uint8, torch.int32))).expand(shape)
    if kind == 1:
        return torch.empty(shape, device="meta")
    if kind == 2:
        return torch.zeros(shape).to_sparse()
    dtype = (
        r.choice(DTYPES) if r.random() < 0.5 else r.choice((torch.bfloat16, torch.float32, torch.int32, torch.uint8))
    )
    numel = torch.Size(shape).numel()
    x = torch.randint(256, (numel * max(dtype.itemsize, 1),), dtype=torch.uint8)
    if dtype == torch.bool:
        x = x & 1
    x = x.view(dtype).view(shape) if numel else torch.empty(shape, dtype=dtype)
    if x.dim() > 1 and r.random() < 0.2:
        x = x.transpose(0, -1)
    if x.dim() and r.random() < 0.1:
        x = x[..., ::2]
    if x.is_floating_point() and dtype.itemsize > 1 and r.random() < 0.1:
        x = x.requires_grad_()
    return x


def junk(r: random.Random, kind: str) -> object:
    if r.random() < 0.1:
        return r.choice(OTHER)
    kind = kind.removeprefix("Optional[").removesuffix("]")
    if "Tensor" in kind:
        return any_tensor(r)
    choices = {"str": WORDS, "bool": (False, True), "ScalarType": DTYPES, "int": NUMBERS, "SymInt": NUMBERS}
    return r.choice(choices.get(kind, NUMBERS))


def spoilt(r: random.Random, name: str, args: list[object], kwargs: dict[str, object]) -> None:
    """Replaces some arguments, sometimes all of them, and leaves some out."""
    arguments = schema(name).arguments
    share = r.choice((0.15, 0.3, 1.0))
    for i, argument in enumerate(arguments):
        if r.random() >= share:
            continue
        if i < len(args):
            args[i] = junk(r, str(argument.type))
        elif r.random() < 0.8:
            kwargs[argument.name] = junk(r, str(argument.type))
        else:
            kwargs.pop(argument.name, None)
    if r.random() < 0.02:
        args.pop()


def attempt(
    name: str, args: list[object], kwargs: dict[str, object], namespace: object = torch.ops.moe_fp8
) -> tuple[list[Tensor] | None, str]:
    """Returns the call's results, or the tensors that it writes, or the first line of its error."""
    try:
        out = getattr(namespace, name)(*args, **kwargs)
    except Exception as error:
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if out is None:
        return [t for t, written in zip(args, is_written(name), strict=False) if written], ""
    return [out] if isinstance(out, Tensor) else list(out), ""


@cache
def fake_mode() -> FakeTensorMode:
    """One mode for all calls: it remembers the fakes of tensors that live on."""
    return FakeTensorMode(allow_non_fake_inputs=False)


def compare_with_fake(
    name: str, args: list[object], kwargs: dict[str, object], got: list[Tensor] | None, error: str
) -> None:
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    if any(t.layout != torch.strided for t in tensors) or "memory" in error or "alloc" in error:
        return
    with fake_mode() as mode:
        args = [mode.from_tensor(t) if isinstance(t, Tensor) else t for t in args]
        kwargs = {k: mode.from_tensor(t) if isinstance(t, Tensor) else t for k, t in kwargs.items()}
        fake, fake_error = attempt(name, args, kwargs)
    if "as printed above" in error and fake is not None:  # torch before 2.13 hides the text of the error
        numbers = [v for v in (*args, *kwargs.values()) if type(v) is int]
        if sum(t.nbytes for t in fake) > MEMORY or max(numbers, default=0) > ROWS:  # results or scratch are too large
            return
    assert (got is None) == (fake is None), f"{error or 'returned'}; its fake: {fake_error or 'returned'}"
    if got is None:
        # C++ has no name for a dtype that is newer than the torch that the extension is built for.
        error, newer, _ = error.partition("another dtype")
        same = fake_error.startswith(error) if newer else fake_error.split("\0")[0] == error.split("\0")[0]
        assert not error.startswith(f"RuntimeError: {name}: ") or same, f"{error}; its fake: {fake_error}"
        return
    shapes = [[(t.shape, t.stride(), t.dtype, t.device) for t in results] for results in (got, fake)]
    assert shapes[0] == shapes[1], f"{shapes[0]}; its fake: {shapes[1]}"


def compare_with_reference(name: str, args: list[object], kwargs: dict[str, object], got: list[Tensor]) -> None:
    want, error = attempt(name, args, kwargs, reference)
    assert want is not None, error
    if name.endswith("scaled_grouped_mm"):  # -0 becomes +0
        got, want = [got[0] + 0.0], [want[0] + 0.0]
    assert_same(got, want, name)


def described(value: object) -> str:
    if not isinstance(value, Tensor):
        return repr(value)[:60]
    if value.layout != torch.strided:
        return f"{value.dtype}{list(value.shape)} {value.layout}"
    listed = value.dtype == torch.int32 and not value.is_meta and 0 < value.numel() < 50
    return f"{value.dtype}{list(value.shape)} stride {value.stride()} {value.tolist() if listed else ''}"


def call_at_random(mode: str, seed: int, count: int) -> None:
    r = random.Random(f"{mode} {seed}")
    for i in range(count):
        name = r.choice(list(OPS))
        args, kwargs = OPS[name](r)
        if mode == "junk":
            spoilt(r, name, args, kwargs)
        text = ", ".join([*map(described, args), *(f"{k}={described(v)}" for k, v in kwargs.items())])
        print(f"{mode} call {i}: {name}({text})", file=sys.stderr)
        if mode == "valid":
            before = [t.clone() if written else t for t, written in zip(args, is_written(name), strict=False)]
        got, error = attempt(name, args, kwargs)
        if mode == "valid":
            assert got is not None, error
            compare_with_reference(name, before, kwargs, got)
        compare_with_fake(name, args, kwargs, got, error)


def main() -> None:
    for word in sys.argv[2:]:
        mode, count = word.split("=")
        call_at_random(mode, int(sys.argv[1]), int(count))
        print("done", word)


if __name__ == "__main__":
    main()
