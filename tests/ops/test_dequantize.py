"""dequantize: byte equality with the reference, for the operands of every quantizer."""

from __future__ import annotations

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
    pairs,
    short,
    strided_2d,
    wide,
)
from quantized import E4M3, GROUPED, OPERANDS, operand
from torch import Tensor

from moe_fp8_ext import ops, reference
from moe_fp8_ext.reference.numerics import E8M0, FORMATS
from moe_fp8_ext.reference.quantize import quantize_lines
from moe_fp8_ext.reference.scales import blocked_shape

NO_GROUPS = torch.zeros(0, dtype=torch.int32)
every_kind = pytest.mark.parametrize("kind", OPERANDS)


def check(operand: dict[str, object], out_dtype: torch.dtype | None = None) -> Tensor:
    got = ops.dequantize(**operand, out_dtype=out_dtype)
    what = {k: short(v.shape) if isinstance(v, Tensor) else v for k, v in operand.items()}
    assert_same(got, reference.dequantize(**operand, out_dtype=out_dtype), str(what))
    return got


def some_bytes(*shape: int, least: int = 0, most: int = 126, dtype: torch.dtype = E4M3, device: str = "cpu") -> Tensor:
    return torch.randint(least, most, shape, dtype=torch.uint8, device=device).view(dtype)


@pytest.mark.parametrize(
    *pairs(kind=OPERANDS, fp8=FP8_DTYPES, out_dtype=[None, *INPUT_DTYPES], shape=[(70, 136), (67, 301)]), ids=short
)
def test_dtypes(kind, fp8, out_dtype, shape, device):
    check(operand(kind, wide(*shape, device=device), group_offs("zipf", shape[0], 3, device), fp8), out_dtype)


@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_group_layouts(kind, layout, device):
    for m, k, e in CORRECTNESS_MKE:
        if m <= 300:
            for align in (32, 128, *([1, 256] if kind.startswith(("rowwise", "blockwise")) else [64])):
                check(operand(kind, wide(m, k, device=device), group_offs(layout, m, e, device), align=align))


@every_kind
def test_odd_sizes(kind, device):
    for m, k in ((0, 0), (0, 5), (5, 0), (1, 1), (1, 33), (33, 1), (129, 127), (3, 1025), (260, 31), (300, 520)):
        x = wide(m, k, device=device)
        for offs in (NO_GROUPS.to(device), *(group_offs("tail_rows", m, e, device) for e in (1, 4))):
            check(operand(kind, x, offs))


@every_kind
def test_gives_back_what_was_quantized(kind, device):
    """The error is at most 1/16 of a value, or 2^-10 of the largest value where values are subnormal."""
    x, offs = wide(300, 256, device=device), group_offs("tail_rows", 300, 3, device)
    args = operand(kind, x, offs)
    got, rows = check(args, torch.float32), int(offs[-1]) if kind in GROUPED else 300
    if kind.endswith("tokens"):
        sizes = torch.diff(offs, prepend=offs[:1] * 0).tolist()
        starts = [0, *args["offs"].tolist()[:-1]]
        got = torch.cat([got[:, s : s + n] for s, n in zip(starts, sizes, strict=True)], 1).t()
    else:
        got = got.reshape(-1, *x.shape)[0]
    want = x[:rows].float()
    assert ((got[:rows] - want).abs() <= want.abs() / 16 + want.abs().max() * 2.0**-10).all()


@pytest.mark.parametrize("kind", [f"{f} {what}" for f in FORMATS for what in ("tokens", "weight")])
def test_both_directions_of_the_ops_come_back(kind, device):
    """Takes the operands that the quantizers return, transposed operands of weights included."""
    format, what = kind.split()
    x, offs = wide(200, 96, device=device), group_offs("zipf", 200, 3, device)
    if what == "tokens":
        q, scale, q_t, scale_t, padded_offs = ops.quantize_both(x, format, offs=offs)
        check({"q": q, "scale": scale, "format": format, "offs": offs})
        check({"q": q_t, "scale": scale_t, "format": format, "along": "tokens", "offs": padded_offs})
    else:
        q, scale, q_t, scale_t = ops.quantize_weight(torch.stack([x, -2 * x]), format)
        check({"q": q, "scale": scale, "format": format})
        check({"q": q_t, "scale": scale_t, "format": format})


@pytest.mark.parametrize("format", ["rowwise", "mxfp8_rowmajor"])
def test_leading_dimensions(format, device):
    def quantized(x: Tensor) -> dict[str, object]:
        q, scale = quantize_lines(x, FORMATS[format], E4M3, None)
        return {"q": q, "scale": scale.squeeze(-1) if format == "rowwise" else scale, "format": format}

    x = wide(6, 5, 4, 72, device=device)
    for view in (x, x[0, 0, 0], x[:, :0], x[0], x[None, :, None]):
        check(quantized(view))
    args = quantized(x)
    for order in ((1, 0, 2), (2, 0, 1)):
        scale = args["scale"].permute(*order, *range(3, args["scale"].ndim)).contiguous()
        check({**args, "q": args["q"].permute(*order, 3), "scale": scale})


@every_kind
def test_strides_and_alignment(kind, device):
    args = operand(kind, wide(37, 64, device=device), group_offs("zipf", 37, 3, device))
    q, scale = args["q"], args["scale"]
    for elements in (1, 2, 4, 8):
        check({**args, "q": misaligned(q, elements), "scale": misaligned(scale.contiguous(), elements)})
    if q.ndim == 2:
        for _, view in strided_2d(q.view(torch.uint8)):
            check({**args, "q": view.view(q.dtype)})
    else:
        wide_rows = torch.zeros(*q.shape[:2], q.shape[2] + 16, dtype=torch.uint8, device=device).view(q.dtype)
        wide_rows[..., : q.shape[2]] = q
        check({**args, "q": wide_rows[..., : q.shape[2]]})
    if kind.startswith("blockwise"):
        check({**args, "scale": scale.contiguous()})
        check({**args, "scale": scale.repeat_interleave(2, -1)[..., ::2]})


def test_transposed_squares(device):
    _, scale, q_t, _ = reference.quantize_weight(wide(2, 200, 300, device=device), "blockwise")
    check({"q": q_t, "scale": scale.mT, "format": "blockwise"})


@pytest.mark.parametrize(*pairs(out_dtype=INPUT_DTYPES, fp8=FP8_DTYPES), ids=short)
def test_every_scale_byte_of_every_code(out_dtype, fp8, device):
    """2^-127 is subnormal, 2^127 overflows most codes, and 255 is NaN. Scales are row-major and blocked, rows aligned
    or not."""
    q = torch.arange(256, dtype=torch.uint8, device=device).view(fp8).expand(256, 256)
    scale = torch.arange(256, dtype=torch.uint8, device=device)[:, None].expand(256, 8).contiguous().view(E8M0)
    got = check({"q": q, "scale": scale, "format": "mxfp8_rowmajor"}, out_dtype)
    assert got[255].isnan().all()
    blocked, _ = reference.swizzle_scales(scale)
    assert_same(check({"q": q, "scale": blocked, "format": "mxfp8"}, out_dtype), got)
    assert_same(check({"q": misaligned(q), "scale": scale, "format": "mxfp8_rowmajor"}, out_dtype), got)


@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=short)
def test_flushed_subnormals_change_nothing(fp8):
    q = torch.arange(256, dtype=torch.uint8).view(fp8).expand(40, 256)
    scale = torch.arange(40, dtype=torch.uint8)[:, None].expand(40, 8).contiguous().view(E8M0)
    for out_dtype in INPUT_DTYPES:
        want = reference.dequantize(q, scale, "mxfp8_rowmajor", out_dtype=out_dtype)
        with flushed_subnormals():
            got = ops.dequantize(q, scale, "mxfp8_rowmajor", out_dtype=out_dtype)
        assert_same(got, want)


@every_kind
def test_nan_stays_in_its_block(kind, device):
    x, offs = wide(200, 256, device=device), group_offs("uniform", 200, 2, device)
    x[3, 5], x[150, 200] = torch.nan, torch.inf
    assert check(operand(kind, x, offs)).isnan().any()


# Groups


@pytest.mark.parametrize("kind", GROUPED)
def test_nothing_of_the_tail_is_read(kind, device):
    args = operand(kind, wide(96, 64, device=device), group_offs("tail_rows", 96, 3, device))
    end, dim = int(args["offs"][-1]), 1 if kind.endswith("tokens") else 0
    args["q"].movedim(dim, 0)[end:].view(torch.uint8).fill_(0x7F)
    assert not check(args).movedim(dim, 0)[end:].any()


def test_offs_mean_nothing_to_rows_without_groups(device):
    """Formats without groups of rows ignore offs."""
    x, offs = wide(96, 64, device=device), group_offs("tail_rows", 96, 3, device)
    for format in ("rowwise", "blockwise", "mxfp8_rowmajor"):
        args = operand(f"{format} rows", x, offs)
        assert_same(ops.dequantize(**{**args, "offs": offs}), ops.dequantize(**args))


def random_operands(p: int, offs: Tensor, device: str) -> list[dict[str, object]]:
    """Operands of groups that end anywhere, with room for every scale."""
    e, q = len(offs), some_bytes(45, p, device=device)
    along_tokens = {"q": q, "along": "tokens", "offs": offs}
    of_columns = blocked_shape(45, 4)[0], -(-p // 32) + 4 * e
    of_rows = p + 128 * e, 4
    scales = {"rowwise": torch.rand(e, 45, device=device), "blockwise": torch.rand(45, p // 128 + 1 + e, device=device)}
    scales["mxfp8"] = some_bytes(*of_columns, most=255, dtype=E8M0, device=device)
    rows = some_bytes(*of_rows, most=255, dtype=E8M0, device=device)
    return [{**along_tokens, "scale": scale, "format": format} for format, scale in scales.items()] + [
        {"q": q.t().contiguous(), "scale": rows, "format": "mxfp8", "offs": offs}
    ]


def test_corrupt_offsets_stay_in_bounds(device):
    for p in (80, 160):
        for offs in corrupt_offs(p, device):
            for args in random_operands(p, offs, device):
                check(args)
            q = some_bytes(45, p, device=device)
            for format, scale in (
                ("blockwise", torch.rand(45, p // 128 + 1, device=device)),  # has too few blocks, with random scales
                ("mxfp8_rowmajor", some_bytes(45, -(-p // 32), most=255, dtype=E8M0, device=device)),
            ):
                ops.dequantize(q, scale, format, along="tokens", offs=offs)


def test_groups_of_any_size(device):
    """Groups are not padded, so one vector may contain rows of several groups."""
    offs = torch.tensor([3, 4, 4, 37, 100, 103], dtype=torch.int32, device=device)
    for args in random_operands(128, offs, device):
        check(args)


@pytest.mark.parametrize("kind", GROUPED)
def test_most_groups(kind, device):
    check(operand(kind, wide(1500, 24, device=device), group_offs("zipf", 1500, 1024, device)))


@pytest.mark.large
def test_more_than_2_31_elements(big_gpu):
    m, k = 524_400, 4_096
    q = some_bytes(m, k, device=big_gpu)
    scale = torch.rand(m, k // 128, device=big_gpu)
    out = ops.dequantize(q, scale, "blockwise")
    for start in range(0, m, 65_536):
        rows = slice(start, start + 65_536)
        assert_same(out[rows], reference.dequantize(q[rows], scale[rows], "blockwise"), f"rows from {start}")


# Everything about a call except its bytes


def some_calls(device: str, m: int = 96, k: int = 72, seed: int = 0) -> list[dict[str, object]]:
    x, offs = wide(m, k, device=device, seed=seed), group_offs("zipf", m, 3, device)
    return [operand(kind, x, offs) for kind in OPERANDS]


def as_call(operand: dict[str, object]) -> tuple:
    """Returns a function of the operand's tensors that returns a list, and the tensors."""
    names = [name for name, value in operand.items() if isinstance(value, Tensor)]
    others = {name: value for name, value in operand.items() if name not in names}
    return lambda *args: [ops.dequantize(**dict(zip(names, args, strict=True)), **others)], [
        operand[name] for name in names
    ]


def test_opcheck(device):
    for args in some_calls(device):
        q, scale, format = (args.pop(name) for name in ("q", "scale", "format"))
        check_opcheck("dequantize", [q, scale, format], **args, out_dtype=torch.float32)


def test_autocast_changes_nothing(device):
    with torch.autocast(device, dtype=torch.bfloat16):
        for args in some_calls(device):
            check(args, torch.float32)


def test_deterministic(device):
    for args in some_calls(device, 301):
        check_deterministic(*as_call(args))


@pytest.mark.parametrize("kind", ["rowwise rows", "blockwise rows", "mxfp8_rowmajor rows", "mxfp8 groups"])
def test_compiles_with_dynamic_rows(kind, device):
    format, what = kind.split()

    def call(q: Tensor, scale: Tensor, offs: Tensor) -> Tensor:
        return ops.dequantize(q, scale, format, offs=offs if what == "groups" else None)

    calls = []
    for m in (50, 64, 131):
        offs = group_offs("zipf", m, 3, device)
        args = operand(kind, wide(m, 64, device=device), offs)
        calls.append([args["q"], args["scale"].contiguous(), offs])
    check_compiled(call, calls, device, dynamic=(0, 1))


def test_cuda_graph(gpu):
    for first, later in zip(some_calls(gpu), some_calls(gpu, seed=1), strict=True):
        fn, args = as_call(first)
        check_cuda_graph(fn, args, as_call(later)[1])


@every_kind
def test_two_streams(kind, gpu):
    offs = group_offs("zipf", 2000, 3, gpu)
    first, second = (operand(kind, wide(2000, 512, device=gpu, seed=seed), offs) for seed in (0, 1))
    check_two_streams(as_call(first)[0], [as_call(first)[1], as_call(second)[1]])


@every_kind
def test_stream_order(kind, gpu):
    offs = group_offs("zipf", 2000, 3, gpu)
    operands = [operand(kind, wide(2000, 512, device=gpu, seed=seed), offs) for seed in range(4)]
    check_stream_order(as_call(operands[0])[0], [as_call(args)[1] for args in operands])


def test_second_gpu(second_gpu):
    for args in some_calls("cpu"):
        check_second_gpu(*as_call(args), second_gpu)


OFFS = torch.tensor([2, 4], dtype=torch.int32)
TOKENS, ENDS = {"along": "tokens", "offs": OFFS}, {"offs": OFFS}
Q = torch.zeros(4, 40, dtype=E4M3)
Q3 = torch.zeros(2, 4, 40, dtype=E4M3)


def e8m0(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(E8M0)


@pytest.mark.parametrize(
    ("args", "argument", "got", "kwargs"),
    [
        ([Q, torch.ones(4), "columnwise"], "format", "'columnwise'", {}),
        ([Q, torch.ones(4), "rowwise"], "along", "'columns'", {"along": "columns"}),
        ([Q.float(), torch.ones(4), "rowwise"], "q", "float32", {}),
        ([Q3.new_zeros([1] * 8), torch.ones([1] * 7), "rowwise"], "q", "8", {}),
        ([Q[0], torch.ones(4, 1), "blockwise"], "q", "1", {}),
        ([Q[0], e8m0(128, 4), "mxfp8"], "q", "1", {}),
        ([Q3, torch.ones(2, 4), "rowwise"], "q", "3", TOKENS),
        ([Q3, torch.ones(4, 1), "blockwise"], "q", "3", TOKENS),
        ([Q[:, ::2], torch.ones(4), "rowwise"], "q", "stride 2", {}),
        ([Q, torch.ones(4).half(), "rowwise"], "scale", "float16", {}),
        ([Q, torch.ones(4, 2), "mxfp8_rowmajor"], "scale", "float32", {}),
        ([Q, e8m0(4), "rowwise"], "scale", "float8_e8m0fnu", {}),
        ([Q, torch.ones(4, 1), "rowwise"], "scale", "2", {}),
        ([Q3, torch.ones(4, 1), "blockwise"], "scale", "2", {}),
        ([Q, torch.ones(3), "rowwise"], "scale", "3", {}),
        ([Q, torch.ones(8)[::2], "rowwise"], "scale", "stride 2", {}),
        ([Q, torch.ones(4, 2), "blockwise"], "scale", "2", {}),
        ([Q, torch.ones(2, 5), "rowwise"], "scale", "5", TOKENS),
        ([Q, torch.ones(4, 0), "blockwise"], "scale", "0", TOKENS),
        ([Q3, torch.ones(2, 1, 2), "blockwise"], "scale", "2", {}),
        ([Q, e8m0(4, 1), "mxfp8_rowmajor"], "scale", "1", {}),
        ([Q, e8m0(128, 2), "mxfp8"], "scale", "2", {}),
        ([Q, e8m0(128, 4), "mxfp8"], "scale", "128", ENDS),
        ([Q3, e8m0(2, 511), "mxfp8"], "scale", "511", {}),
        ([Q, e8m0(128, 4), "mxfp8"], "scale", "4", TOKENS),
        ([Q, e8m0(4, 128).t(), "mxfp8"], "scale", "stride 1", {}),
        ([Q, torch.ones(2, 4), "rowwise"], "offs", "None", {"along": "tokens"}),
        ([Q, torch.ones(2, 4), "rowwise"], "offs", "int64", {"along": "tokens", "offs": OFFS.long()}),
        ([Q, torch.ones(4), "rowwise"], "offs", "float32", {"offs": OFFS.float()}),
        ([Q, torch.ones(2, 4), "rowwise"], "scale", "meta", TOKENS),
        ([Q, torch.ones(2, 4), "rowwise"], "offs", "meta", TOKENS),
        ([Q, torch.ones(4), "rowwise"], "out_dtype", "float64", {"out_dtype": torch.float64}),
    ],
)
def test_errors(args, argument, got, kwargs, device):
    args, kwargs = on(device, args), on(device, kwargs)
    if got == "meta":
        args[1] = args[1].to("meta") if argument == "scale" else args[1]
        kwargs["offs"] = kwargs["offs"].to("meta") if argument == "offs" else kwargs["offs"]
    check_error("dequantize", args, argument, got, **kwargs)


def test_validation_of_contents(monkeypatch, device):
    monkeypatch.setenv("MOE_FP8_VALIDATE", "1")
    for ends, got in (([4, 2], "2"), ([2, 41], "41"), ([-1, 2], "-1")):
        offs = torch.tensor(ends, dtype=torch.int32, device=device)
        args = on(device, [Q, torch.ones(2, 4), "rowwise"])
        message = error_of(ops.dequantize, args, {"along": "tokens", "offs": offs})
        assert message.startswith("dequantize: offs ") and got in message.split("got", 1)[1]
