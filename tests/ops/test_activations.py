"""activate and activate_backward: byte equality with the reference, and gradients against float64."""

from __future__ import annotations

import math
import re

import pytest
import torch
from activation_checks import ACTIVATIONS, CLAMPED, GATED, check_dscores, da_for, h_for, scored, scores_for
from derivatives import SPELLINGS, check_no_second_derivative, check_no_tangent
from helpers import (
    FP8_DTYPES,
    INPUT_DTYPES,
    assert_same,
    check_compiled,
    check_cuda_graph,
    check_deterministic,
    check_error,
    check_opcheck,
    check_second_gpu,
    check_stream_order,
    check_two_streams,
    flushed_subnormals,
    misaligned,
    on,
    pairs,
    short,
    strided_2d,
    wide,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_fp8_ext import clamped_swiglu, ops, reference
from moe_fp8_ext.ops import activate, activate_backward, quantize_rows
from moe_fp8_ext.reference.numerics import FORMATS

every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


def check_backward(h: Tensor, da: Tensor, activation: str, scores: Tensor | None = None, **how: object) -> None:
    got = activate_backward(da, h, activation, scores=scores, **how)
    want = reference.activate_backward(da, h, activation, scores=scores, **how)
    what = f"{activation} {short(h.dtype)} {short(h.shape)} {how.get('format', '')}"
    assert_same(got[:2], want[:2], what)
    check_dscores(got[2], want[2], h, da, activation, **how)


def check(h: Tensor, activation: str, da: Tensor | None = None, scores: Tensor | None = None) -> None:
    """Checks both ops against the reference, with both layouts of gates and ups."""
    da = da_for(h, activation) if da is None else da
    for interleaved in (False, True):
        want = reference.activate(h, activation, interleaved=interleaved)
        assert_same(
            activate(h, activation, interleaved=interleaved), want, f"{activation} {short(h.dtype)} {short(h.shape)}"
        )
        check_backward(h, da, activation, scores, interleaved=interleaved)


def quantized(x: Tensor, format: str, fp8: torch.dtype | None = None) -> dict[str, object]:
    q, scale = reference.quantize_rows(x, format, dtype=fp8 or torch.float8_e4m3fn)
    return {"h": q, "h_scale": scale, "format": format}


@pytest.mark.parametrize(
    *pairs(activation=ACTIVATIONS, dtype=INPUT_DTYPES, f=[1, 3, 8, 70, 200, 1032, 2056], with_scores=[False, True]),
    ids=short,
)
def test_dtypes(activation, dtype, f, with_scores, device):
    h = h_for(activation, 37, f, dtype, device)
    check(h, activation, scores=scores_for(h) if with_scores else None)


@pytest.mark.parametrize(
    *pairs(activation=ACTIVATIONS, format=list(FORMATS), fp8=FP8_DTYPES, dtype=INPUT_DTYPES, f=[1, 19, 72, 136, 520]),
    ids=short,
)
def test_fp8(activation, format, fp8, dtype, f, device):
    x = h_for(activation, 131, f, device=device)
    for interleaved in (False, True):
        args = quantized(x, format, fp8) | {"activation": activation, "interleaved": interleaved}
        check_backward(da=da_for(x, activation, dtype), scores=scores_for(x), **args)


@pytest.mark.parametrize("format", FORMATS)
def test_fp8_as_the_quantizer_leaves_it(format, device):
    x = h_for("swiglu", 150, 256, device=device)
    q, scale = quantize_rows(x, format)
    check_backward(q, da_for(x, "swiglu"), "swiglu", None, h_scale=scale, format=format)
    wider = torch.zeros(150, 640, dtype=torch.uint8, device=device)
    for first in (3, 8, 64):
        view = wider[:, first : first + 512]
        view.copy_(q.view(torch.uint8))
        view = view.view(q.dtype)
        check_backward(view, da_for(x, "swiglu"), "swiglu", scores_for(x), h_scale=scale, format=format)


@every_activation
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
def test_every_value(activation, dtype, device):
    """Gates take every value while ups are 1. Then ups take every value while gates are 1."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(128, 512).to(device)
    ones = torch.ones_like(values)
    for h in (torch.cat([values, ones], 1), torch.cat([ones, values], 1)) if activation in GATED else (values,):
        check(h, activation, da=ones)


def every_exponent(device: str) -> Tensor:
    """float32 numbers of all exponents with many significands, and numbers near every point where a rule changes."""
    exponents = torch.arange(1, 255).repeat_interleave(128) << 23
    words = exponents + torch.randint(0, 2**23, exponents.shape, generator=torch.Generator().manual_seed(0))
    x = words.int().view(torch.float32)
    x = torch.cat([x, torch.linspace(0, 104, 20_000), torch.linspace(7 - 1e-5, 7 + 1e-5, 1_000)])
    steps = (torch.arange(1, 128) - 0.5) * math.log(2)  # the power of two in the sigmoid changes here
    x = torch.cat([x, *(steps * (1 + i * 2.0**-23) for i in range(-4, 5)), torch.tensor([0.0, 1e-40, 2.0**-23])])
    return torch.cat([x, -x]).to(device)


@every_activation
def test_every_exponent(activation, device):
    x = every_exponent(device)
    h = torch.stack([x, x.flip(0)], 1) if activation in GATED else x[:, None]
    check(h, activation)


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu2", "swiglu_oai"])
def test_is_the_function(activation):
    """Values are within 1e-6 of float64, and within 2^-120 below e^-87, where the sigmoid leaves its power out.

    z of gelu has four roundings, 4 * 2^-24 of z; z of GPT-OSS has two. They are relative errors of the tail of e^z. A
    slope is a sum, and each of its terms has the same error.
    """
    x = every_exponent("cpu")
    x = x[x.abs() < 1e18]  # squares and cubes of these are finite
    d = x.double().clamp(max=7) if activation == "swiglu_oai" else x.double()
    linear, alpha = 2 * math.sqrt(2 / math.pi), 1.702 if activation == "swiglu_oai" else 1.0
    z = linear * (d + 0.044715 * d**3) if activation == "gelu" else alpha * d
    slope_of_z = linear * (1 + 3 * 0.044715 * d**2) if activation == "gelu" else torch.full_like(d, alpha)
    s, c = torch.sigmoid(z), torch.sigmoid(-z)
    value, terms = d * s, (s, d * s * c * slope_of_z)
    if activation == "swiglu_oai":
        terms = tuple(torch.where(x > 7, 0.0, term) for term in terms)
    if activation == "relu2":
        value, terms = d.clamp(min=0) ** 2, (2 * d.clamp(min=0), 0 * d)
    near = 1e-6 + (2.0**-22 * z.abs() if activation in ("gelu", "swiglu_oai") else 0)
    h = torch.stack([x, torch.zeros_like(x)], 1) if activation in GATED else x[:, None]
    dh, a, _ = activate_backward(torch.ones_like(x)[:, None], h, activation)
    assert ((a[:, 0].double() - value).abs() <= near * value.abs() + 2.0**-120).all()
    size = terms[0].abs() + terms[1].abs()
    assert ((dh[:, 0].double() - sum(terms)).abs() <= near * size + 2.0**-110).all()


CLAMPS = {"swiglu_oai": (1.702, 7, 1), CLAMPED: (0.75, 1.5, -0.25)}  # alpha, limit, offset


def plain(h: Tensor, activation: str, interleaved: bool) -> Tensor:
    """Computes the activation with torch's own functions."""
    if activation not in GATED:
        silu, gelu = torch.nn.functional.silu, torch.nn.functional.gelu
        return {"silu": silu, "gelu": lambda x: gelu(x, approximate="tanh"), "relu2": lambda x: x.relu() ** 2}[
            activation
        ](h)
    gate, up = (h[:, ::2], h[:, 1::2]) if interleaved else h.chunk(2, 1)
    if activation in CLAMPS:
        alpha, limit, offset = CLAMPS[activation]
        # Not clamp, whose gradient at the limits is 1 in torch 2.13 and 0 in 2.14.
        gate = torch.where(gate > limit, limit, gate)
        up = torch.where(up > limit, limit, torch.where(up < -limit, -limit, up))
        return gate * torch.sigmoid(gate * alpha) * (up + offset)
    return plain(gate, {"swiglu": "silu", "geglu": "gelu"}[activation], False) * up


@every_activation
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
@pytest.mark.parametrize("spelling", SPELLINGS, ids=SPELLINGS.get)
def test_gradients(activation, interleaved, dtype, spelling, device):
    """Compares with autograd of torch's functions in float64, at the clamps too."""
    h = torch.randn(60, 64, device=device) * 4
    h[:20] = h[:20].round()
    h[0], h[1], h[2], h[3], h[4] = 7, -7, 0, 1.5, -1.5
    h = h.to(dtype)
    da = torch.randn(60, 32 if activation in GATED else 64, device=device).to(dtype)
    double = h.double().requires_grad_()
    want = plain(double, activation, interleaved)
    (want_h,) = torch.autograd.grad(want, double, da.double())
    h.requires_grad_()
    got = spelling.activate(h, activation, interleaved=interleaved)
    (got_h,) = torch.autograd.grad(got, h, da)
    # Results are rounded to the dtype once. Before that they are off by 2e-6 of gate and factor, each below 1 + max
    # |h|, and of da.
    unit, near = torch.finfo(dtype).eps, 2e-6 * (1 + h.detach().double().abs().max()) ** 2
    assert ((got.double() - want).abs() <= unit * want.abs() + near).all()
    assert ((got_h.double() - want_h).abs() <= unit * want_h.abs() + near * da.double().abs().max()).all()
    (expanded,) = torch.autograd.grad(
        spelling.activate(h, activation, interleaved=interleaved), h, da[:1].expand_as(da)
    )
    assert_same(expanded, activate_backward(da[:1].expand_as(da), h.detach(), activation, interleaved=interleaved)[0])


def test_scores(device):
    """Compares the gradients of scores * a with torch's autograd in float64."""
    h, scores = torch.randn(50, 96, device=device), torch.rand(50, device=device)
    da = torch.randn(50, 48, device=device)
    double = [t.double().requires_grad_() for t in (h, scores)]
    want_a = double[1][:, None] * plain(double[0], "swiglu", False)
    want_h, want_scores = torch.autograd.grad(want_a, double, da.double())
    dh, a, dscores = activate_backward(da, h, "swiglu", scores=scores)
    for got, want in ((dh, want_h), (a, want_a), (dscores, want_scores)):
        # Values are below 10, and each is within 1e-6 of itself. dscores adds up 48 such products.
        assert ((got.double() - want).abs() <= 48 * 10 * 1e-6).all()


@every_activation
@pytest.mark.parametrize("shape", [(0, 8), (5, 0), (0, 0), (1, 1), (1, 256), (300, 1)], ids=short)
def test_sizes(activation, shape, device):
    h = h_for(activation, *shape, device=device)
    for scores in (None, scores_for(h)):
        check(h, activation, scores=scores)
    of_none = h.new_zeros(0, dtype=torch.float32), h.new_zeros(len(h), dtype=torch.int32)
    check_backward(h, da_for(h, activation), activation, **scored(h, "slots"))
    check_backward(h, da_for(h, activation), activation, of_none[0], indices=of_none[1])
    for format in FORMATS:
        check_backward(da=da_for(h, activation), activation=activation, **quantized(h, format))


def test_strides_and_alignment(device):
    h = h_for("swiglu", 50, 128, device=device)
    da, scores = da_for(h, "swiglu"), scores_for(h)
    for (_, h_view), (_, da_view) in zip(strided_2d(h), strided_2d(da), strict=True):
        check(h_view, "swiglu", da, scores)
        check(h, "swiglu", da_view, scores)
    for elements in (1, 2, 4, 8):
        check(misaligned(h, elements), "swiglu", da, misaligned(scores))
    check(h[:1].expand(50, 256), "swiglu", da[:1].expand(50, 128), scores)


@every_activation
@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=short)
def test_non_finite_values(activation, dtype, device):
    """Every NaN becomes the same NaN. Values beyond the range become Inf."""
    largest = torch.finfo(dtype).max
    values = [math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, largest, -largest, 1.0, -1.0]
    first, second = torch.cartesian_prod(*[torch.tensor(values, device=device).to(dtype)] * 2).T
    h = torch.stack([first, second], 1)
    for value in (1.0, -1.0, math.inf, math.nan, 0.0):
        da = torch.full((100, 1 if activation in GATED else 2), value, dtype=dtype, device=device)
        check(h, activation, da)
    check(h, activation, da=torch.ones_like(da), scores=torch.tensor(values, device=device).repeat(10))


def test_limits(device):
    """No finite gate gives NaN. Gates far below zero become zero; gates far above zero stay as they are."""
    h = torch.tensor([[-1e30], [-3e38], [1e30], [3e38]], device=device)
    ones = torch.ones_like(h)
    for activation in ("silu", "gelu"):
        dh, a, _ = activate_backward(ones, h, activation)
        assert a.flatten().tolist() == [0, 0, *h[2:].flatten().tolist()]
        assert dh.flatten().tolist() == [0, 0, 1, 1]
    assert activate(torch.tensor([[-math.inf, math.inf]], device=device), "silu").isnan().tolist() == [[True, False]]


@every_activation
def test_flushed_subnormals(activation, device):
    h = every_exponent(device)[:, None].repeat(1, 2)
    want = activate(h, activation)
    with flushed_subnormals():
        assert_same(activate(h, activation), want)


def test_every_reciprocal(gpu):
    """1 + e^-|x| takes every number from 1 to 2. A GPU refines its own reciprocal by one step and gives the CPU's
    bytes."""
    powers = torch.arange(1, 2**23 + 1, dtype=torch.float64) * 2.0**-23
    h = powers.log().float().view(-1, 256)
    assert_same(activate(h.to(gpu), "silu").cpu(), activate(h, "silu"))


@given(
    p=st.integers(0, 40),
    f=st.integers(0, 80),
    activation=st.sampled_from(ACTIVATIONS),
    dtype=st.sampled_from(INPUT_DTYPES),
    format=st.sampled_from([None, *FORMATS]),
)
def test_any_shape(p, f, activation, dtype, format, device):
    h = h_for(activation, p, f, dtype, device)
    if format is None:
        check(h, activation, scores=scores_for(h))
    else:
        check_backward(da=da_for(h, activation), activation=activation, **quantized(h, format))


@pytest.mark.parametrize("spelling", SPELLINGS, ids=SPELLINGS.get)
def test_derivatives_that_there_are_not(spelling):
    """Second and forward-mode derivatives raise; they are never a silent zero."""
    h = torch.randn(10, 8)
    check_no_tangent(lambda h: spelling.activate(h, "swiglu"), h)
    check_no_tangent(lambda h: spelling.activate_backward(torch.randn(10, 4), h, "swiglu"), h)
    check_no_second_derivative(spelling.activate(h.requires_grad_(), "swiglu"), h)


def test_opcheck(device):
    for activation in ("swiglu", "relu2"):  # shapes and checks depend only on whether there are ups
        h = h_for(activation, 37, 33, device=device)
        check_opcheck("activate", [h.clone().requires_grad_(), activation])
        check_opcheck("activate", [h, activation], interleaved=True)
        check_opcheck("activate_backward", [da_for(h, activation), h, activation])
        check_opcheck("activate_backward", [da_for(h, activation), h, activation, scores_for(h)], interleaved=True)
        check_opcheck("activate_backward", [da_for(h, activation), h, activation], **scored(h, "slots"))
        for format in FORMATS:
            args = quantized(h, format) | {"scores": scores_for(h)}
            check_opcheck("activate_backward", [da_for(h, activation), args.pop("h"), activation], **args)


def both(h: Tensor, scores: Tensor) -> tuple[Tensor, ...]:
    a = activate(h, "swiglu")
    q, scale = quantize_rows(h, "blockwise")
    of_fp8 = activate_backward(a, q, "swiglu", scores=scores, h_scale=scale, format="blockwise")
    by_slot = activate_backward(a, h, "swiglu", scores=scores, indices=scores.argsort().int())
    return a, *activate_backward(a, h, "swiglu", scores=scores), *by_slot, *of_fp8


def arguments(p: int, f: int, device: str = "cpu", seed: int = 0) -> list[Tensor]:
    h = wide(p, 2 * f, device=device, seed=seed)
    return [h, scores_for(h)]


def test_deterministic(device):
    check_deterministic(both, arguments(500, 303, device))


def test_compiles_with_dynamic_rows(device):
    calls = [arguments(p, 48, device) for p in (50, 64, 131)]
    check_compiled(both, calls, device, (0, 1))

    def gradient(h: Tensor) -> tuple[Tensor, Tensor]:
        a = activate(h, "geglu")
        return a, *torch.autograd.grad(a.square().sum(), h)

    for h, _ in calls:
        compiled = torch.compile(activate, fullgraph=True, backend="aot_eager", dynamic=True)
        want = gradient(h.requires_grad_())
        a = compiled(h, "geglu")
        assert_same((a, *torch.autograd.grad(a.square().sum(), h)), want)


def test_cuda_graph(gpu):
    check_cuda_graph(both, *(arguments(700, 512, gpu, seed) for seed in (0, 1)))


def test_two_streams(gpu):
    check_two_streams(both, [arguments(4000, 1024, gpu, seed) for seed in (0, 1)])


def test_stream_order(gpu):
    check_stream_order(both, [arguments(4000, 1024, gpu, seed) for seed in range(4)])


def test_second_gpu(second_gpu):
    check_second_gpu(both, arguments(700, 512), second_gpu)


@pytest.mark.large
def test_more_than_2_31_elements(big_gpu):
    h = torch.randn(600_012, 8_192, dtype=torch.bfloat16, device=big_gpu)
    scores = torch.rand(600_012, device=big_gpu)
    a = activate(h, "swiglu")
    dh, scaled, dscores = activate_backward(a, h, "swiglu", scores=scores)
    for rows in (slice(0, 50), slice(599_962, 600_012)):
        assert_same(a[rows], reference.activate(h[rows], "swiglu"))
        want = reference.activate_backward(a[rows], h[rows], "swiglu", scores=scores[rows])
        assert_same((dh[rows], scaled[rows]), want[:2])
        check_dscores(dscores[rows], want[2], h[rows], a[rows], "swiglu")


H, DA, SCORES = torch.zeros(6, 8), torch.zeros(6, 4), torch.zeros(6)
Q, SCALE = torch.zeros(6, 8, dtype=torch.float8_e4m3fn), torch.ones(6)
OF_Q, SLOTS = {"h_scale": SCALE, "format": "rowwise"}, torch.arange(6, dtype=torch.int32)


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "argument", "got"),
    [
        ("activate", [H.double(), "swiglu"], {}, "h", "float64"),
        ("activate", [Q, "swiglu"], {}, "h", "float8_e4m3fn"),
        ("activate", [H[0], "swiglu"], {}, "h", "1"),
        ("activate", [H.t(), "silu"], {}, "h", "stride 8"),
        ("activate", [H[:, :7], "swiglu"], {}, "h", "7"),
        ("activate", [H, "relu"], {}, "activation", "relu"),
        ("activate_backward", [DA, H.double(), "swiglu"], {}, "h", "float64"),
        ("activate_backward", [DA, H, "swiglu"], OF_Q, "h", "float32"),
        ("activate_backward", [DA, Q, "swiglu"], {}, "h", "float8_e4m3fn"),
        ("activate_backward", [DA, H[:, :5], "geglu"], {}, "h", "5"),
        ("activate_backward", [DA.half(), H, "swiglu"], {}, "grad", "float16"),
        ("activate_backward", [DA.double(), H, "swiglu"], {}, "grad", "float64"),
        ("activate_backward", [DA.to(Q.dtype), Q, "swiglu"], OF_Q, "grad", "float8_e4m3fn"),
        ("activate_backward", [DA, H, "silu"], {}, "grad", "4"),
        ("activate_backward", [DA[:5], H, "swiglu"], {}, "grad", "5"),
        ("activate_backward", [DA.t().contiguous().t(), H, "swiglu"], {}, "grad", "stride 6"),
        ("activate_backward", [DA, H, ""], {}, "activation", ""),
        ("activate_backward", [DA, H, "swiglu", SCORES.half()], {}, "scores", "float16"),
        ("activate_backward", [DA, H, "swiglu", SCORES[:5]], {}, "scores", "5"),
        ("activate_backward", [DA, H, "swiglu", SCORES[:, None]], {}, "scores", "2"),
        ("activate_backward", [DA, H, "swiglu", torch.zeros(12)[::2]], {}, "scores", "stride 2"),
        ("activate_backward", [DA, H, "swiglu"], {"indices": SLOTS}, "scores", "None"),
        ("activate_backward", [DA, H, "swiglu", SCORES], {"indices": SLOTS[:5]}, "indices", "5"),
        ("activate_backward", [DA, H, "swiglu", SCORES], {"indices": SLOTS.long()}, "indices", "int64"),
        ("activate_backward", [DA, H, "swiglu", SCORES], {"indices": SLOTS[:, None]}, "indices", "2"),
        ("activate_backward", [DA, H, "swiglu", SCORES], {"indices": SLOTS.repeat(2)[::2]}, "indices", "stride 2"),
        ("activate_backward", [DA, H, "swiglu", SCORES[:, None]], {"indices": SLOTS}, "scores", "2"),
        ("activate_backward", [DA, H, "swiglu"], {"format": "rowwise"}, "h_scale", "None"),
        ("activate_backward", [DA, Q, "swiglu"], {"h_scale": SCALE}, "format", "None"),
        ("activate_backward", [DA, Q, "swiglu"], OF_Q | {"format": "fp4"}, "format", "fp4"),
        ("activate_backward", [DA, Q, "swiglu"], OF_Q | {"format": "mxfp8"}, "h_scale", "float32"),
        ("activate_backward", [DA, Q, "swiglu"], OF_Q | {"h_scale": SCALE[:5]}, "h_scale", "5"),
        ("activate_backward", [DA, Q, "swiglu"], OF_Q | {"h_scale": SCALE[:, None]}, "h_scale", "2"),
    ],
)
def test_errors(op, args, kwargs, argument, got, device):
    check_error(op, on(device, args), argument, got, **on(device, kwargs))


@pytest.mark.parametrize("argument", ["grad", "scores", "h_scale", "indices"])
def test_error_on_another_device(argument, device):
    other = "cpu" if device == "cuda" else "meta"
    there = {"grad": DA, "h": Q, "scores": SCORES, "h_scale": SCALE, "indices": SLOTS}
    there = {name: t.to(other if name == argument else device) for name, t in there.items()}
    with pytest.raises(RuntimeError, match=f": {argument} must be on the device of h, .*got {other}"):
        activate_backward(**there, activation="swiglu", format="rowwise")


def test_names_of_clamped_swiglu():
    """A name is the call that makes it."""
    assert clamped_swiglu(7, 1.702, 1) == "swiglu_oai"
    name = clamped_swiglu(limit=10, alpha=0.1)
    assert name == "clamped_swiglu(10.0, 0.1, 0.0)"
    h = torch.randn(5, 16) * 10
    assert_same(ops.activate(h, name), ops.activate(h, "clamped_swiglu(10, 1e-1, 0)"))
    assert_same(ops.activate(h, "clamped_swiglu(7, 1.702, 1)"), ops.activate(h, "swiglu_oai"))
    assert_same(ops.activate(h, clamped_swiglu(1e30)), ops.activate(h, "swiglu"))


@pytest.mark.parametrize(
    ("limit", "options", "message"),
    [
        (0, {}, "limit must be positive, got 0"),
        (-1.0, {}, "limit must be positive, got -1.0"),
        (math.inf, {}, "limit must be a finite number, got inf"),
        (1, dict(alpha=1e39), r"alpha must be finite in float32, got 1e\+39"),
        (1, dict(offset=math.nan), "offset must be a finite number, got nan"),
    ],
)
def test_errors_of_clamped_swiglu(limit, options, message):
    with pytest.raises(RuntimeError, match=f"^clamped_swiglu: {message}$"):
        clamped_swiglu(limit, **options)


@pytest.mark.parametrize(
    "name",
    [
        *("clamped", "clamped_swiglu(1, 2)", "clamped_swiglu(1, 2, x)", "clamped_swiglu(1, 2, 3)x"),
        *(
            "clamped_swiglu(1, 2, 3)x)",
            "clamped_swiglu(0, 1, 1)",
            "clamped_swiglu(1, 2, inf)",
            "clamped_swiglu(1, 1e39, 1)",
        ),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_names_that_are_no_activation(name, device):
    text = f"activate: activation must be 'swiglu', .* or 'relu2', got '{re.escape(name)}'"
    with pytest.raises(RuntimeError, match=text):
        ops.activate(torch.zeros(2, 4, device=device), name)
