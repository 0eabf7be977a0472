"""Properties of every quantizer except its bytes: errors, graphs and streams, and the cost of a call."""

from __future__ import annotations

import ctypes
import gc
import resource
import time
from collections.abc import Callable

import pytest
import torch
from helpers import (
    check_compiled,
    check_cuda_graph,
    check_deterministic,
    check_error,
    check_opcheck,
    check_second_gpu,
    check_stream_order,
    check_two_streams,
    error_of,
    group_offs,
    on,
    pairs,
    short,
    slot_indices,
    wide,
)
from quantizers import ACTIVATIONS, QUANTIZERS, caller, check_activation, check_weight, tensors
from torch import Tensor

from moe_fp8_ext import ops
from moe_fp8_ext.reference.numerics import FORMATS

every_op = pytest.mark.parametrize("op", QUANTIZERS)
every_format = pytest.mark.parametrize("format", FORMATS)
X, OFFS = torch.zeros(6, 4), torch.tensor([2, 6], dtype=torch.int32)
INDICES = torch.zeros(9, dtype=torch.int32)


def keywords(op: str, device: str) -> dict[str, object]:
    """Every keyword of the op except dtype and rounding, for 37 rows."""
    if op == "quantize_weight":
        return {"directions": "transposed"}
    gathered = {"indices": slot_indices(37, 2, 50, device), "top_k": 2}
    align = {} if op == "quantize_rows" else {"align": 64}
    return {"offs": group_offs("zipf", 50, 3, device), **gathered, **align}


def some_input(op: str, *shape: int, **kwargs: object) -> Tensor:
    return wide(*([2] if op == "quantize_weight" else []), *shape, **kwargs)


# Registration, graphs and streams


@every_format
@every_op
def test_opcheck(op, format, device):
    x = some_input(op, 37, 33, device=device)
    check_opcheck(
        op, [x, format], dtype=torch.float8_e5m2, rounding=FORMATS[format].roundings[1], **keywords(op, device)
    )


@every_format
@every_op
def test_opcheck_of_defaults(op, format, device):
    required = {"offs": group_offs("zipf", 37, 3, device)} if op in ("quantize_tokens", "quantize_both") else {}
    check_opcheck(op, [some_input(op, 37, 33, device=device), format], **required)


@every_op
def test_compiles_with_dynamic_sizes(op, device):
    """Numbers of rows, indices and experts vary. One graph holds all formats."""

    def call(*args: Tensor) -> tuple[Tensor, ...]:
        return sum((tuple(caller(op, format)(*args)) for format in FORMATS), ())

    if op == "quantize_weight":
        check_compiled(call, [[wide(e, 48, 40, device=device)] for e in (2, 3, 5)], device)
        return
    for gather in (False, True):
        calls = [tensors(op, m, 48, device, gather=gather) for m in (50, 64, 131)]
        check_compiled(call, calls, device, dynamic=(0, 2) if gather else (0,))


@every_format
@every_op
def test_deterministic(op, format, device):
    for gather in (False, True) if op in ACTIVATIONS else (False,):
        check_deterministic(caller(op, format), tensors(op, 601, 303, device, gather=gather))


@every_format
def test_autocast_changes_nothing(format, device):
    x = wide(37, 33, dtype=torch.float32, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        check_activation(x, format, group_offs("zipf", 37, 3, device))
        check_weight(x[None], format)


ON_GPU = pairs(op=list(QUANTIZERS), format=list(FORMATS), gather=[False, True])
ON_GPU = ON_GPU[0], [row for row in ON_GPU[1] if row[0] in ACTIVATIONS or not row[2]]


@pytest.mark.parametrize(*ON_GPU)
def test_cuda_graph(op, format, gather, gpu):
    first, later = (
        tensors(op, 4000, 1024, gpu, seed, layout, gather) for seed, layout in enumerate(("zipf", "one_giant"))
    )
    check_cuda_graph(caller(op, format), first, later)


@pytest.mark.parametrize(*ON_GPU)
def test_two_streams(op, format, gather, gpu):
    check_two_streams(caller(op, format), [tensors(op, 4000, 1024, gpu, seed, gather=gather) for seed in (0, 1)])


@pytest.mark.parametrize(*ON_GPU)
def test_stream_order(op, format, gather, gpu):
    for m, k in ((4000, 64), (4000, 1024), (4000, 2048), (1000, 5120), (1000, 7168)):
        check_stream_order(caller(op, format), [tensors(op, m, k, gpu, seed, gather=gather) for seed in range(4)])


@pytest.mark.parametrize(*ON_GPU)
def test_second_gpu(op, format, gather, second_gpu):
    check_second_gpu(caller(op, format), tensors(op, 700, 512, "cpu", gather=gather), second_gpu)


# Errors

X_ERRORS = [
    (X.double(), "x", "float64"),
    (X.to(torch.int8), "x", "int8"),
    (X.to(torch.float8_e4m3fn), "x", "float8_e4m3fn"),
    (X[0], "x", "1"),
    (X[None], "x", "3"),
    (X.t(), "x", "stride 4"),
    (torch.zeros(6, 8)[:, ::2], "x", "stride 2"),
    (torch.empty(0, 2**31), "x", "2147483648"),
]
KEYWORD_ERRORS = [
    ({"offs": OFFS.long()}, "offs", "int64"),
    ({"offs": OFFS.float()}, "offs", "float32"),
    ({"offs": OFFS[None]}, "offs", "2"),
    ({"offs": OFFS[0]}, "offs", "0"),
    ({"offs": OFFS.repeat(2)[::2]}, "offs", "stride 2"),
    ({"offs": torch.zeros(1025, dtype=torch.int32)}, "offs", "1025"),
    ({"offs": OFFS.to("meta")}, "offs", "meta"),
    ({"indices": INDICES.long(), "top_k": 1}, "indices", "int64"),
    ({"indices": INDICES[None], "top_k": 1}, "indices", "2"),
    ({"indices": INDICES.repeat(2)[::2], "top_k": 1}, "indices", "stride 2"),
    ({"indices": INDICES.to("meta"), "top_k": 1}, "indices", "meta"),
    ({"indices": INDICES, "top_k": 0}, "top_k", "0"),
    ({"indices": INDICES, "top_k": -3}, "top_k", "-3"),
    ({"indices": INDICES, "top_k": 2**31}, "top_k", "2147483648"),
    ({"indices": INDICES, "top_k": 2**62}, "top_k", str(2**62)),
    ({"indices": INDICES}, "top_k", "None"),
    ({"top_k": 2}, "indices", "None"),
    ({"dtype": torch.float16}, "dtype", "float16"),
    ({"dtype": torch.uint8}, "dtype", "uint8"),
    ({"rounding": "rceil"}, "rounding", "'rceil'"),
    ({"rounding": "up"}, "rounding", "'up'"),
]


@pytest.mark.parametrize("op", ACTIVATIONS)
@pytest.mark.parametrize(("x", "argument", "got"), X_ERRORS)
def test_errors_of_x(op, x, argument, got, device):
    check_error(op, [*on(device, [x]), "blockwise"], argument, got, offs=OFFS.to(device))


@pytest.mark.parametrize("op", ACTIVATIONS)
@pytest.mark.parametrize(("kwargs", "argument", "got"), KEYWORD_ERRORS)
def test_errors_of_keywords(op, kwargs, argument, got, device):
    if device == "cuda":
        kwargs = {k: v if isinstance(v, Tensor) and v.is_meta else on(device, [v])[0] for k, v in kwargs.items()}
    check_error(op, [X.to(device), "rowwise"], argument, got, **{"offs": OFFS.to(device), **kwargs})


@pytest.mark.parametrize("op", ["quantize_tokens", "quantize_both"])
@pytest.mark.parametrize(
    ("format", "align"),
    [*(("rowwise", align) for align in (0, -16, 24, 512)), ("blockwise", 512), ("mxfp8", 16), ("mxfp8_rowmajor", 256)],
)
def test_errors_of_align(op, format, align, device):
    check_error(op, on(device, [X]) + [format], "align", str(align), offs=OFFS.to(device), align=align)


@pytest.mark.parametrize(
    ("op", "args", "argument", "got"),
    [
        ("quantize_rows", [torch.zeros(()), "rowwise"], "x", "0"),
        ("quantize_rows", [torch.zeros([1] * 8), "rowwise"], "x", "8"),
        ("quantize_rows", [X, "colwise"], "format", "'colwise'"),
        ("quantize_rows", [X, ""], "format", "''"),
        ("quantize_weight", [X[None].double(), "rowwise"], "w", "float64"),
        ("quantize_weight", [X[None].to(torch.int8), "blockwise"], "w", "int8"),
        ("quantize_weight", [X, "rowwise"], "w", "2"),
        ("quantize_weight", [X[None, None], "mxfp8"], "w", "4"),
        ("quantize_weight", [X[None].mT, "rowwise"], "w", "stride 4"),
        ("quantize_weight", [torch.zeros(1, 6, 8)[..., ::2], "mxfp8"], "w", "stride 2"),
        ("quantize_weight", [torch.zeros(1025, 1, 1), "blockwise"], "w", "1025"),
        ("quantize_weight", [torch.empty(0, 128, 2**38), "rowwise"], "w", "274877906944"),
        ("quantize_weight", [torch.empty(0, 2**38, 128), "blockwise"], "w", "274877906944"),
        ("quantize_weight", [X[None], "rowcol"], "format", "'rowcol'"),
    ],
)
def test_errors_of_one_op(op, args, argument, got, device):
    check_error(op, on(device, args), argument, got)


def test_other_errors(device):
    x, w, offs = X.to(device), X[None].to(device), OFFS.to(device)
    check_error("quantize_weight", [w, "rowwise"], "dtype", "bfloat16", dtype=torch.bfloat16)
    check_error("quantize_weight", [w, "mxfp8"], "rounding", "'pow2'", rounding="pow2")
    check_error("quantize_weight", [w, "mxfp8"], "directions", "'tokens'", directions="tokens")
    for op in ACTIVATIONS:
        check_error(op, [x, "fp8"], "format", "'fp8'", offs=offs)
    check_error("quantize_rows", [x[0], "rowwise"], "x", "1", indices=INDICES.to(device), top_k=1)
    for op in ("quantize_tokens", "quantize_both"):
        most = torch.empty(2**31 - 256, 0, device=device)
        check_error(op, [most, "mxfp8"], "x", "2147483", offs=offs)


@every_format
@pytest.mark.parametrize("op", ACTIVATIONS)
def test_validation_of_contents(op, format, monkeypatch, device):
    monkeypatch.setenv("MOE_FP8_VALIDATE", "1")
    x = X.to(device)
    for ends, got in (([4, 2], "2"), ([2, 7], "7"), ([-1, 2], "-1")):
        offs = torch.tensor(ends, dtype=torch.int32, device=device)
        message = error_of(getattr(ops, op), [x, format], {"offs": offs})
        assert message.startswith(f"{op}: offs ") and got in message.split("got", 1)[1]
    for bad in (-2, 12):
        indices = torch.tensor([0, bad], dtype=torch.int32, device=device)
        message = error_of(getattr(ops, op), [x, format], {"offs": OFFS[:1].to(device), "indices": indices, "top_k": 2})
        assert message.startswith(f"{op}: indices ") and str(bad) in message.split("got", 1)[1]


# The cost of a call


def allocated() -> int:
    """Bytes that malloc has handed out."""

    class Mallinfo(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in ("arena", *"abcdef", "uordblks", "fordblks", "keepcost")]

    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("this C library does not count what is allocated")
    libc.mallinfo2.restype = Mallinfo
    gc.collect()
    return libc.mallinfo2().uordblks


def refused(call: Callable) -> None:
    try:
        call()
    except RuntimeError:
        return
    raise AssertionError("went through")


@every_op
@pytest.mark.parametrize("long", [False, True])
def test_strings_do_not_leak(op, long):
    """A C++ string takes 32 bytes, and more for a text of over 15 characters. Calls with long strings raise."""
    x, kwargs, fn = some_input(op, 2, 4), {}, getattr(torch.ops.moe_fp8, op)
    if op in ("quantize_tokens", "quantize_both"):
        kwargs["offs"] = torch.tensor([2], dtype=torch.int32)

    def call() -> None:
        if not long:
            return fn(x, "mxfp8", rounding="floor", **kwargs)
        refused(lambda: fn(x, "x" * 1000, **kwargs))
        refused(lambda: fn(x, "mxfp8", rounding="x" * 1000, **kwargs))

    calls = 250 if long else 1000
    for _ in range(100):
        call()
    before = allocated()
    for _ in range(calls):
        call()
    assert allocated() - before < calls * 16


ROWS = 2**31 - 256


@pytest.mark.parametrize(
    ("op", "shape", "formats"),
    [
        ("quantize_rows", (2**27, 0), ("blockwise", "mxfp8", "mxfp8_rowmajor")),
        ("quantize_rows", (ROWS, 0), ("blockwise", "mxfp8", "mxfp8_rowmajor")),
        ("quantize_rows", (0, ROWS), tuple(FORMATS)),
        ("quantize_rows", (0, 2**40, 5), ("rowwise",)),
        ("quantize_tokens", (2**27, 0), tuple(FORMATS)),
        ("quantize_both", (2**27, 0), ("blockwise", "mxfp8", "mxfp8_rowmajor")),
        ("quantize_weight", (1024, ROWS, 0), ("blockwise", "mxfp8", "mxfp8_rowmajor")),
        ("quantize_weight", (0, ROWS, ROWS), tuple(FORMATS)),
    ],
    ids=short,
)
def test_tensors_without_elements_cost_nothing(op, shape, formats, device):
    x, offs = torch.empty(shape, device=device), torch.tensor([1, 5], dtype=torch.int32, device=device)
    for format in formats:
        offs_too = [{"offs": offs}] if op in ("quantize_tokens", "quantize_both") else [{}]
        offs_too += [{"offs": offs}] if op == "quantize_rows" and shape == (2**27, 0) else []
        for kwargs in offs_too:
            peak, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
            outputs = getattr(ops, op)(x, format, **kwargs)
            assert time.monotonic() - start < 5  # a loop over the extent takes minutes
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 100_000  # kB
            assert outputs[0].numel() == 0 and outputs[1].numel() == 0
