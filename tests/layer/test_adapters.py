"""experts() with adapters, against the formula in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from derivatives import check_no_second_derivative, check_no_tangent
from experts_problem import BF16_DB, OF_OPERAND, SPREAD_DB, Layer, activated, assert_equal, but, layer
from grouped_problem import Calls
from helpers import assert_same_tensor, check_cuda_graph, counted_backend, kept_bytes, misaligned, sqnr_db
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from moe_fp8_ext import (
    Experts,
    LoRA,
    MoE,
    Recipe,
    Router,
    _torch,
    experts,
    experts_of_groups,
    gather_in_fp8_,
    quantize_rows,
    quantize_weight,
    save_ops,
    sort_tokens,
)
from moe_fp8_ext.distributed import ExpertParallel
from moe_fp8_ext.layer import adapter as layer_adapter
from moe_fp8_ext.matmul import engine, low_rank
from moe_fp8_ext.matmul.engine import Groups
from moe_fp8_ext.ops.factors import order_of

SCALING = {"gate_up": 0.5, "down": 1.5}
FACTORS = "A_gate_up", "B_gate_up", "A_down", "B_down"
FP8 = "rowwise", "blockwise", "mxfp8"


def factors(of: Layer, rank: int = 5, shared: str = "", dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Factors of adapters that add as much to h and to y as the weights do. shared: letters of shared factors."""
    g, made = torch.Generator().manual_seed(1), {}
    for name, w in (("gate_up", of.w_gate_up), ("down", of.w_down)):
        e, n, k = w.shape
        for letter, size, terms in (("A", (rank, k), k), ("B", (n, rank), rank)):
            size = size if letter in shared else (e, *size)
            made[f"{letter}_{name}"] = (torch.randn(size, generator=g) * terms**-0.5).to(w.device, dtype)
    return made


def loras(of: dict[str, Tensor], dropout: float = 0.0) -> dict[str, LoRA]:
    return {f"lora_{n}": LoRA(of[f"A_{n}"], of[f"B_{n}"], s, dropout) for n, s in SCALING.items() if f"A_{n}" in of}


def run(
    problem: Layer, of: dict[str, Tensor], fn: Callable, trained: tuple[str, ...] | None = None, **options: object
) -> dict[str, Tensor]:
    """The output, and the gradients of all tensors or of the given ones, by name."""
    names = "x", "scores", "w_gate_up", "w_down", "b_gate_up", "b_down"
    leaves = {n: getattr(problem, n) for n in names if getattr(problem, n) is not None} | of
    leaves = {n: t.detach().clone().requires_grad_(trained is None or n in trained) for n, t in leaves.items()}
    out = fn(problem.ids, leaves, **options)
    if out.requires_grad:
        out.backward(problem.grad.to(out.dtype))
    return {"out": out.detach()} | {n: t.grad for n, t in leaves.items() if t.grad is not None}


def ours(ids: Tensor, of: dict[str, Tensor], fn: Callable = experts, dropout: float = 0.0, **options: object) -> Tensor:
    weights = {n: t for n, t in of.items() if n[0] in "wb"} | options
    return fn(of["x"], ids, of["scores"], **loras(of, dropout), **weights)


def exact(
    ids: Tensor,
    of: dict[str, Tensor],
    activation: str = "swiglu",
    interleaved: bool = False,
    masks: tuple[Tensor | float, Tensor | float] = (1, 1),
) -> Tensor:
    """The formula in plain PyTorch, expert by expert. masks: of dropout, [T, D] and [P, F], divided by 1 - p."""
    out, x, first = torch.zeros_like(of["x"]), of["x"], 0
    of_x, of_a = masks

    def projected(name: str, x: Tensor, dropped: Tensor, e: int) -> Tensor:
        y = x @ of[f"w_{name}"][e].t()
        y = y + of[f"b_{name}"][e] if f"b_{name}" in of else y
        if f"A_{name}" not in of:
            return y
        A, B = (m if m.dim() == 2 else m[e] for m in (of[f"A_{name}"], of[f"B_{name}"]))
        return y + SCALING[name] * (dropped @ A.t()) @ B.t()

    for e in range(len(of["w_down"])):
        tokens, j = (ids == e).nonzero(as_tuple=True)
        last = first + len(tokens)
        a = activated(projected("gate_up", x[tokens], (x * of_x)[tokens], e), activation, interleaved)
        dropped = a * (of_a if isinstance(of_a, (int, float)) else of_a[first:last])
        y = projected("down", a, dropped, e)
        out, first = out.index_add(0, tokens, y * of["scores"][tokens, j, None]), last
    return out


def run_exact(
    problem: Layer, of: dict[str, Tensor], trained: tuple[str, ...] | None = None, **options: object
) -> dict[str, Tensor]:
    doubled = {n: t.double() if t is not None and t.is_floating_point() else t for n, t in vars(problem).items()}
    return run(Layer(**doubled), {n: t.double() for n, t in of.items()}, exact, trained, **options)


def noise(name: str, casts_of_h: int, of_weight: int) -> float:
    """The noise of a result in units of `experts_problem`.

    of_weight: 1 if weights are rounded to FP8, 0 if they are FP8 values. An adapter adds to the signal of h, y and da,
    and no noise of its own: its operands are BF16, or already have the noise counted here. x reaches dA of gate_up
    unrounded, as dout reaches dB of down.
    """
    product = 1 + of_weight
    dh = product + product * 1.23 + casts_of_h * 1.28
    return {
        "out": product * 2.07 + product,
        "x": dh + product,
        "scores": product + product * 2.07 + casts_of_h * 2.45,
        "w_gate_up": dh + 2,
        "w_down": 1 + product * 2.07 + casts_of_h * 2.45 + 1,
        "A_gate_up": dh,
        "B_gate_up": dh,
        "A_down": product * 2.07 + casts_of_h * 2.45,
        "B_down": product * 2.07 + 1,
    }[name]


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], recipe: str, casts_of_h: int, of_weight: int) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].shape == want[name].shape
        least = BF16_DB
        if recipe != "bf16" and name != "b_down":
            unit = OF_OPERAND * noise("B_gate_up" if name == "b_gate_up" else name, casts_of_h, of_weight)
            least = -10 * math.log10(unit) - SPREAD_DB
        found = sqnr_db(got[name], want[name])
        assert found >= least, f"{name}: {found:.1f} dB, want {least:.1f}"


def frozen(w: Tensor, recipe: Recipe) -> tuple[object, Tensor]:
    """A quantized weight and its values."""
    pair = quantize_weight(w, recipe.format, dtype=recipe.dtype, rounding=recipe.rounding)
    return pair, pair[0].dequantize(torch.float32)


@pytest.fixture(params=["by kernels", "by copies"])
def way(request, monkeypatch) -> None:
    """Both ways to multiply tokens by the factors of each expert."""
    if request.param == "by copies":
        monkeypatch.setattr(low_rank, "MAX_RANK_OF_KERNELS", 0)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("shared", ["", "A", "B", "AB"])
@pytest.mark.parametrize("name", ["bf16", "rowwise"])
def test_trained_weights(name, shared, device):
    """Base and adapter are trained together."""
    problem = layer(bias=True).at(device)
    of = factors(problem, shared=shared)
    assert_close(run(problem, of, ours, recipe=name), run_exact(problem, of), name, 1, 1)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("keep", ["fp8", "bf16"])
@pytest.mark.parametrize("name", FP8)
def test_frozen_in_fp8(name, keep, device):
    """The reference has the values of the quantized weights, so that their rounding is no error."""
    problem, recipe = layer().at(device), Recipe(name)
    pairs, values = zip(*(frozen(w, recipe) for w in (problem.w_gate_up, problem.w_down)), strict=True)
    of, trained = factors(problem, dtype=torch.float32), ("x", "scores", *FACTORS)
    weights = dict(zip(("w_gate_up", "w_down"), pairs, strict=True))
    got = run(problem, of, partial(ours, **weights), trained, recipe=recipe, keep=keep)
    problem.w_gate_up, problem.w_down = values
    assert all(got[n].dtype == torch.float32 for n in FACTORS)
    assert_close(got, run_exact(problem, of, trained), name, int(keep == "fp8"), 0)


OPTIONS = [
    dict(activation="swiglu_oai", interleaved=True),
    dict(activation="relu2"),
    dict(recipe=Recipe("rowwise", wgrad_high_precision=True)),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options, device):
    problem = layer(rows=1 if options.get("activation") == "relu2" else 2, bias=True).at(device)
    of = factors(problem, rank=8)
    of_exact = {n: v for n, v in options.items() if n != "recipe"}
    want, recipe = run_exact(problem, of, **of_exact), options.get("recipe", "bf16")
    got = run(problem, of, ours, **{"recipe": "bf16"} | options)
    assert_close(got, want, recipe if recipe == "bf16" else "rowwise", 0, 1)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("rank", [1, 8, 256])
def test_ranks(rank, device):
    problem = layer(t=60, d=40, f=24).at(device)
    of = factors(problem, rank)
    assert_close(run(problem, of, ours, recipe="bf16"), run_exact(problem, of), "bf16", 0, 1)


@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_one_projection(name, device):
    problem = layer(t=60, d=64, f=48).at(device)
    of = {n: t for n, t in factors(problem).items() if n.endswith(name)}
    assert_close(run(problem, of, ours, recipe="bf16"), run_exact(problem, of), "bf16", 0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(dtype, device):
    problem = layer(t=60, d=64, f=48).at(device)
    of = factors(problem, dtype=dtype)
    wide = Layer(**vars(problem) | {n: getattr(problem, n).to(dtype) for n in ("x", "w_gate_up", "w_down")})
    got = run(wide, of, ours, recipe="bf16")
    assert all(got[n].dtype == dtype for n in ("out", "x", *FACTORS))
    assert_close(got, run_exact(problem, of), "bf16", 0, 1)


def test_strides(device):
    """Factors of PEFT are views of [E * r, K] and [N, r * E]. Sizes are no multiples of 8."""
    problem = layer(t=60, d=20, f=13).at(device)
    of = factors(problem, 3)
    views = {n: t if n[0] == "A" else t.permute(1, 2, 0).contiguous().permute(2, 0, 1) for n, t in of.items()}
    views["A_down"] = of["A_down"].mT.contiguous().mT
    got = run(problem, of, lambda ids, leaves, **o: ours(ids, leaves | views, **o), recipe="bf16")
    assert_same_tensor(got["out"], run(problem, of, ours, recipe="bf16")["out"], "out")
    # Gradients have the strides of their leaves, whichever these are.
    leaves = {n: t.requires_grad_() for n, t in views.items()}
    out = ours(problem.ids, {**{n: getattr(problem, n) for n in ("x", "scores", "w_gate_up", "w_down")}, **leaves})
    out.backward(problem.grad)
    want = run(problem, of, ours)
    for n in FACTORS:
        assert_same_tensor(leaves[n].grad.contiguous(), want[n].contiguous(), n)


@pytest.mark.usefixtures("way")
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("shared", ["", "AB"])
@pytest.mark.parametrize("name", ["bf16", "rowwise"])
def test_routings(name, shared, device):
    """Experts have no tokens, tokens have no expert or one expert twice. What has no expert may be NaN."""
    problem = layer(t=60, d=64, f=48).at(device)
    problem.ids = problem.ids % 8 // 3
    problem.ids[0] = -1
    problem.ids[7, 1] = 99
    of = factors(problem, shared=shared)
    want = run_exact(problem, of)
    problem.x[0] = problem.scores[0] = torch.nan
    got = run(problem, of, ours, recipe=name)
    assert got["out"][0].eq(0).all() and got["x"][0].eq(0).all()
    for n in FACTORS:
        # So few slots may have any noise, but a rounding to E4M3 is at most 2^-4 of a value.
        least = BF16_DB if name == "bf16" else -10 * math.log10(noise(n, 1, 1) * 2**-8)
        assert sqnr_db(got[n], want[n]) >= least, n
        assert not got[n][want[n] == 0].any(), n


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("t", [0, 1])
@pytest.mark.parametrize("shared", ["", "AB"])
def test_few_tokens(t, shared, device):
    problem = layer(t=t, d=64, f=48).at(device)
    of = factors(problem, shared=shared)
    got, want = run(problem, of, ours, recipe="rowwise"), run_exact(problem, of)
    assert got.keys() == want.keys()
    for n in FACTORS:
        assert got[n].shape == want[n].shape and not got[n][want[n] == 0].any()


@pytest.mark.usefixtures("way")
def test_one_expert(device):
    problem = layer(20, 32, 24, 1, 1).at(device)
    problem.ids[3] = -1
    of = factors(problem)
    assert_close(run(problem, of, ours, recipe="bf16"), run_exact(problem, of), "bf16", 0, 1)


@pytest.mark.parametrize("name", ["bf16", *FP8])
def test_zero_b_is_no_adapter(name, device):
    """What B = 0 adds is zero, so every byte of the rest is as without an adapter."""
    problem = layer(t=60, d=64, f=48, bias=True).at(device)
    of = factors(problem)
    of |= {n: torch.zeros_like(t) for n, t in of.items() if n[0] == "B"}
    got = run(problem, of, ours, recipe=name)
    assert not got["A_down"].any() and not got["A_gate_up"].any() and got["B_down"].any() and got["B_gate_up"].any()
    assert_equal(but(got, *FACTORS), run(problem, {}, ours, recipe=name))


@pytest.mark.parametrize(
    ("name", "rank", "shared", "dropout", "terms"),
    [
        ("blockwise", 5, "", 0.0, 4),  # of h, out, da and dx
        ("blockwise", 64, "", 0.0, 4),
        ("blockwise", 72, "", 0.0, 0),
        ("blockwise", 5, "A", 0.0, 2),  # of B: h and out
        ("blockwise", 5, "AB", 0.0, 0),
        ("blockwise", 5, "", 0.5, 2),  # dropout masks the terms of da and dx
        ("rowwise", 5, "", 0.0, 0),
    ],
)
def test_products_that_add_the_term(name, rank, shared, dropout, terms):
    problem = layer(t=20, d=32, f=48)
    with Calls() as calls:
        run(problem, factors(problem, rank, shared), ours, recipe=name, dropout=dropout)
    assert calls.terms == terms


TENSORS = "x", "scores", "w_gate_up", "w_down", "b_gate_up", "b_down", *FACTORS


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", ["bf16", "rowwise"])
@pytest.mark.parametrize("shared", ["", "AB"])
def test_what_is_frozen_changes_nothing(name, shared, device):
    """The gradient of any one tensor, and of adapters alone, has the bytes that it has if all are trained."""
    problem = layer(t=40, d=32, f=24, bias=True).at(device)
    of = factors(problem, shared=shared)
    want = run(problem, of, ours, recipe=name)
    for trained in (FACTORS, *((n,) for n in TENSORS)):
        assert_equal(
            run(problem, of, ours, trained, recipe=name), {n: want[n] for n in ("out", *sorted_as(want, trained))}
        )


def sorted_as(of: dict[str, Tensor], names: tuple[str, ...]) -> list[str]:
    return [n for n in of if n in names]


@pytest.mark.usefixtures("way")
def test_rows_without_a_group_are_zero(device):
    ids = torch.tensor([[0, 1], [-1, 2], [1, -1]], device=device)
    permutation, offs, inverse = sort_tokens(ids, 4)
    x, m = torch.randn(3, 16, device=device).bfloat16(), torch.randn(4, 8, 16, device=device).bfloat16()
    slots = low_rank.Slots(Groups(offs, permutation, 2, inverse))
    got, expert = low_rank.Tokens(x, slots).narrow(low_rank.Factor(m)), ids.flatten()[permutation.clamp(min=0)]
    want = torch.einsum("pk,prk->pr", x.double()[permutation.clamp(min=0) // 2], m.double()[expert])
    assert not got[4:].any() and sqnr_db(got[:4], want[:4]) > BF16_DB


def test_rows_behind_the_groups_are_covered(device):
    """They are multiplied by zeros, because a grouped product leaves rows without a group unwritten."""
    u, m = torch.ones(5, 8, device=device).bfloat16(), torch.ones(2, 8, 16, device=device).bfloat16()
    slots = low_rank.Slots(Groups(torch.tensor([1, 3], dtype=torch.int32, device=device)))
    got = low_rank.add_to_rows(torch.ones_like(m[0, :5]), u, low_rank.Factor(m), slots)
    assert got[:3].eq(9).all() and got[3:].eq(1).all()
    assert slots.covered(5).tolist() == [1, 3, 5]


@pytest.mark.parametrize("shape", [(3, 5, 16), (3, 8, 16), (5, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaling", [1.0, 0.3])
def test_factor(shape, dtype, scaling, device):
    m = torch.randn(shape, device=device).to(dtype)
    for view in (m, m.mT.contiguous().mT, torch.stack([m, m], -1)[..., 0]):
        want = torch.zeros(*[4] * (m.dim() - 2), 8, 16, device=device).bfloat16()
        factor = low_rank.Factor(view, scaling)
        of_experts = want[:3] if m.dim() == 3 else want
        of_experts[..., : shape[-2], :] = m * scaling
        got = factor.by_expert()
        assert 1 in got.stride()[-2:] and factor.by_expert() is got
        assert_same_tensor(got.contiguous(), want, "by expert")
        if m.dim() == 3:
            for made in (factor.by_row(), factor.by_column()):
                assert_same_tensor(made.contiguous(), of_experts, "of experts")
            assert factor.by_row().is_contiguous() and factor.by_column().mT.is_contiguous()
        gradient = factor.gradient(torch.ones(of_experts.shape, device=device))
        assert gradient.dtype == dtype and gradient.shape == shape and gradient.eq(1).all()
        assert order_of(gradient) == order_of(view)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", ["bf16", "blockwise"])
def test_a_nan_stays_with_its_token_and_its_expert(name, device):
    """A NaN in a token reaches the factors of its experts. A NaN in a factor reaches the tokens of its expert."""
    problem = layer(t=60).at(device)
    of, used = factors(problem), problem.ids[7][problem.ids[7] >= 0]
    problem.x[7] = torch.nan
    got = run(problem, of, ours, FACTORS, recipe=name)
    others = [e for e in range(len(problem.w_down)) if e not in used]
    assert len(others) > 1 and all(got[n][others].isfinite().all() for n in FACTORS)
    assert got["A_gate_up"][used].isnan().all() and got["out"].isnan().any(1).nonzero().tolist() == [[7]]

    problem, of = layer(t=60).at(device), factors(problem)
    of["B_down"][3] = torch.nan
    without = ~(problem.ids == 3).any(1)
    got = run(problem, of, ours, ("x",), recipe=name)
    assert without.any() and not without.all()
    assert all(t[without].isfinite().all() and t[~without].isnan().any() for t in (got["out"], got["x"]))


@pytest.mark.parametrize(
    ("recipe", "f", "rank", "dropout", "count"),
    [
        ("blockwise", 48, 8, 0.0, 0),
        ("rowwise", 48, 8, 0.0, 0),
        ("mxfp8", 48, 8, 0.0, 1),  # scales of rows depend on the groups
        ("rowwise", 40, 8, 0.0, 1),  # kernels take FP8 in 16 columns
        ("blockwise", 48, 40, 0.0, 1),  # above the ranks of the kernels
        ("blockwise", 48, 8, 0.1, 1),  # dropout takes bfloat16
    ],
)
def test_forward_dequantizes_only_where_kernels_take_no_fp8(recipe, f, rank, dropout, count, device, monkeypatch):
    problem, seen = layer(t=60, d=64, f=f).at(device), []
    dequantize = engine._dequantize
    monkeypatch.setattr(engine, "_dequantize", lambda *args: seen.append(args) or dequantize(*args))
    run(problem, factors(problem, rank), ours, trained=(), dropout=dropout, recipe=recipe)
    assert len(seen) == count


@pytest.mark.parametrize("format", ["rowwise", "blockwise"])
def test_tokens_that_are_quantized_are_not_dequantized(format, monkeypatch):
    """On a CPU, FP8 tokens and their dequantized copies give the same bytes, forward and backward."""
    problem, seen, results = layer(t=60, d=64, f=48), [], []
    dequantize, multiplies = engine._dequantize, low_rank.Factor.multiplies_fp8
    monkeypatch.setattr(engine, "_dequantize", lambda *args: seen.append(args) or dequantize(*args))
    x = quantize_rows(problem.x, format)
    weights = [quantize_weight(w, format) for w in (problem.w_gate_up, problem.w_down)]
    for takes_fp8 in (True, False):
        monkeypatch.setattr(low_rank.Factor, "multiplies_fp8", multiplies if takes_fp8 else lambda *_: False)
        leaves = {name: m.clone().requires_grad_() for name, m in factors(problem, 8).items()}
        out = experts(x, problem.ids, problem.scores, *weights, recipe=format, **loras(leaves))
        out.backward(problem.grad.to(out.dtype))
        assert len(seen) == (0 if takes_fp8 else 3)  # tokens in forward and in backward, activations in forward
        results.append([out.detach(), *(m.grad for m in leaves.values())])
    for name, got, want in zip(("out", *leaves), *results, strict=True):
        assert_same_tensor(got, want, name)


def test_kernels_get_aligned_rows(device, monkeypatch):
    """The fast kernels load 16 bytes at a time. Views into larger buffers are copied, as grouped products copy them."""
    problem, seen = layer(t=60, d=64, f=48).at(device), []

    def watched(op: Callable) -> Callable:
        def call(a: Tensor, b: Tensor, *more: object, **options: object) -> Tensor:
            seen.extend(s % 8 for t in (a, b) for s in (t.data_ptr() // 2, *t.stride()[:-1]))
            return op(a, b, *more, **options)

        return call

    for name in ("_narrow", "_outer"):
        monkeypatch.setattr(low_rank, name, watched(getattr(low_rank, name)))
    of = factors(problem, 8)
    want = run(problem, of, ours, recipe="bf16")
    plain, seen[:] = len(seen), []
    leaves = {n: misaligned(t).requires_grad_() for n, t in of.items()}
    x = torch.nn.functional.pad(problem.x, (1, 2))[:, 1:-2].requires_grad_()
    out = experts(x, problem.ids, problem.scores, problem.w_gate_up, problem.w_down, recipe="bf16", **loras(leaves))
    out.backward(torch.nn.functional.pad(problem.grad, (1, 2))[:, 1:-2].to(out.dtype))
    assert len(seen) == plain and not any(seen)
    for name, t in leaves.items():
        assert_same_tensor(t.grad, want[name], name)


def test_gradients_of_float32_are_not_rounded_to_bfloat16(device):
    """Kernels return their sums in float32, for factors in float32."""
    problem = layer(t=60, d=64, f=48).at(device)
    got = run(problem, factors(problem, 8, dtype=torch.float32), ours, recipe="bf16")
    for name in FACTORS:
        assert not torch.equal(got[name], got[name].bfloat16().float()), name


# ---- Dropout ----


@pytest.mark.parametrize("width", [64, 13])
def test_mask_is_kept_as_bits(width, device):
    x = torch.randn(50, width, device=device).bfloat16()
    got, mask = low_rank.dropped(x, 0.25)
    assert mask.dtype == torch.uint8 and mask.shape == (50, -(-width // 8))
    assert_same_tensor(low_rank.kept(x, mask, 0.25), got, "kept")
    share = (got == 0).double().mean().item()
    assert abs(share - 0.25) < 5 * math.sqrt(0.25 * 0.75 / x.numel())
    assert_same_tensor(got[got != 0], (x * (1 / 0.75))[got != 0], "scaled")


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("shared", ["", "AB"])
def test_dropout(shared, device, monkeypatch):
    problem, masks = layer(t=60, d=64, f=48).at(device), []
    of = factors(problem, shared=shared)

    def recorded(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
        dropped, mask = low_rank.dropped(x, p)
        masks.append(low_rank.kept(torch.ones_like(x), mask, p).double())
        return dropped, mask

    monkeypatch.setattr(layer_adapter, "dropped", recorded)
    got = run(problem, of, ours, recipe="bf16", dropout=0.3)
    masks = [torch.where(mask == 0, 0, 1 / 0.7) for mask in masks]
    assert [mask.shape for mask in masks] == [(60, 64), (180, 48)] and all((mask == 0).any() for mask in masks)
    assert_close(got, run_exact(problem, of, masks=masks), "bf16", 0, 1)


def test_dropout_draws_by_the_generator(device):
    problem = layer(t=60, d=64, f=48).at(device)
    of = factors(problem)

    def checkpointed(ids: Tensor, leaves: dict[str, Tensor], **options: object) -> Tensor:
        return checkpoint(partial(ours, **options), ids, leaves, use_reentrant=False)

    results = []
    for seed, fn in ((1, ours), (1, checkpointed), (2, ours)):
        torch.manual_seed(seed)
        results.append(run(problem, of, fn, dropout=0.3))
    assert_equal(results[1], results[0])
    assert (results[2]["out"] != results[0]["out"]).any()


# ---- In torch ----


def test_checkpointing(device):
    problem = layer(t=60, d=64, f=48, bias=True).at(device)
    of = factors(problem)
    want = run(problem, of, ours)
    for options in ({}, {"context_fn": partial(create_selective_checkpoint_contexts, save_ops())}):
        fn = lambda ids, leaves: checkpoint(ours, ids, leaves, use_reentrant=False, **options)  # noqa: B023, E731
        assert_equal(run(problem, of, fn), want)


@pytest.mark.parametrize(
    ("rank", "limit"), [(5, low_rank.MAX_RANK_OF_KERNELS), (8, 0)], ids=["by kernels", "by copies"]
)
def test_compiles_with_dynamic_tokens(rank, limit, device, monkeypatch):
    monkeypatch.setattr(low_rank, "MAX_RANK_OF_KERNELS", limit)
    frames = counted_backend(device)
    compiled = torch.compile(experts, fullgraph=True, backend=frames)
    dropout = 0.3 if device == "cpu" else 0.0  # inductor draws other numbers than eager calls

    def call(x: Tensor, ids: Tensor, scores: Tensor, **rest: object) -> Tensor:
        for t in (x, ids, scores):
            torch._dynamo.mark_dynamic(t, 0)
        return compiled(x, ids, scores, **rest)

    for t in (60, 44):
        problem, results = layer(t, 64, 48).at(device), []
        of = factors(problem, rank, shared="A")
        for fn in (call, experts):
            torch.manual_seed(t)
            results.append(run(problem, of, partial(ours, fn=fn), dropout=dropout))
        assert_equal(*results)
    assert frames.frame_count == 1


@pytest.mark.parametrize("shared", ["", "AB"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype, shared, device):
    """Casts x and weights. Products of adapters stay in bfloat16, in backward within the context too."""
    problem, names = layer(t=60, d=64, f=48).at(device), ("x", "w_gate_up", "w_down")
    of = factors(problem, shared=shared, dtype=torch.float32)
    wide, narrow = ({n: getattr(problem, n).to(to) for n in names} for to in (torch.float32, dtype))
    with torch.autocast(device, dtype):
        got = run(Layer(**vars(problem) | wide), of, ours)
    want = run(Layer(**vars(problem) | narrow), of, ours)
    assert all(got[n].dtype == torch.float32 for n in FACTORS)
    for n in (*FACTORS, "out", "scores"):
        assert_same_tensor(got[n], want[n], n)


def test_other_derivatives_raise(device):
    problem = layer(t=9, d=32, f=16).at(device)
    of = {n: getattr(problem, n) for n in ("x", "scores", "w_gate_up", "w_down")} | factors(problem)
    check_no_tangent(lambda A: ours(problem.ids, of | {"A_down": A}), of["A_down"])
    leaves = [of[n].requires_grad_() for n in FACTORS]
    check_no_second_derivative(ours(problem.ids, of), *leaves)


def test_used_twice(device):
    problem = layer(t=40, d=32, f=24).at(device)
    of = factors(problem)
    want = run(problem, of, ours)
    got = run(problem, of, lambda ids, leaves: ours(ids, leaves) + ours(ids, leaves))
    for n in FACTORS:
        assert_same_tensor(got[n], 2 * want[n], n)


def test_what_is_kept(device):
    """Beside what the layer keeps: R values a slot of each adapter, and a bit of each element that dropout may drop."""
    problem = layer(t=60, d=64, f=48).at(device)
    of, slots, rank = factors(problem, 5), 180, 8

    def kept(**options: object) -> int:
        tensors = {n: getattr(problem, n) for n in ("x", "scores", "w_gate_up", "w_down")} | of
        tensors["x"].requires_grad_()
        leaves = {n: t.requires_grad_() if n in of else t for n, t in tensors.items()}
        return kept_bytes(lambda: ours(problem.ids, leaves, **options), *leaves.values())

    adapted, dropping = kept(), kept(dropout=0.5)
    of = {}
    assert adapted - kept() == 2 * 2 * slots * rank
    assert dropping - adapted == 60 * 64 // 8 + slots * 48 // 8


def test_cuda_graph(gpu):
    problem = layer(t=60, d=64, f=48).at(gpu)
    of = factors(problem)

    def step(x: Tensor, A: Tensor) -> tuple[Tensor, ...]:
        leaves = {n: t.detach().requires_grad_() for n, t in (of | {"x": x, "A_down": A}).items()}
        rest = {n: getattr(problem, n) for n in ("scores", "w_gate_up", "w_down")}
        out = ours(problem.ids, rest | leaves)
        return out.detach(), *torch.autograd.grad(out, [leaves[n] for n in ("x", *FACTORS)], problem.grad)

    args = [problem.x, of["A_down"]]
    check_cuda_graph(step, args, [torch.randn_like(t) for t in args])


# ---- Other ways in ----


@pytest.mark.parametrize("name", ["bf16", "blockwise"])
@pytest.mark.parametrize("shared", ["", "A", "B", "AB"])
@pytest.mark.parametrize("scored", [False, True])
def test_of_groups(name, shared, scored, device):
    """With one slot a token, `experts` gives the same. Rows of no expert, and experts without rows, may hold NaN."""
    problem = layer(t=80, d=64, f=48, top_k=1).at(device)
    order = problem.ids.flatten().sort().values
    order[order == 7], order[-7:] = 6, 8  # 8 is no expert
    offs = torch.bincount(order, minlength=9)[:8].cumsum(0).int()
    of = factors(problem, shared=shared)
    problem.ids = torch.where(order < 8, order, -1)[:, None]
    if not scored:
        problem.scores = torch.ones_like(problem.scores)
    want = run(problem, of, ours, recipe=name)
    problem.x[-7:] = problem.scores[-7:] = problem.grad[-7:] = torch.nan
    for factor in of.values():
        if factor.dim() == 3:
            factor[-1] = torch.nan

    def groups(x: Tensor, ids: Tensor, scores: Tensor, **rest: object) -> Tensor:
        return experts_of_groups(x, offs, scores.squeeze(1) if scored else None, **rest)

    got = run(problem, of, partial(ours, fn=groups), recipe=name)
    for n in got:
        if shared:  # what shared factors add is rounded once with tokens, and summed in another order
            assert sqnr_db(got[n], want[n]) >= BF16_DB, n
        else:
            assert_same_tensor(got[n], want[n], n)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", ["bf16", "rowwise"])
@pytest.mark.parametrize(("chunks", "mode"), [(1, "static"), (3, "exact")])
def test_over_ranks(name, chunks, mode, world_of_one):
    """Gradients of factors are added up over chunks in float32."""
    problem = layer(t=60, d=64, f=48)
    of = factors(problem, dtype=torch.float32)
    ep = ExpertParallel(dist.group.WORLD, 8, 3, recipe=name, chunks=chunks, mode=mode)
    got = run(problem, of, partial(ours, fn=ep.experts))
    want = run_exact(problem, of)
    # Tokens, and gradients of weights, travel in FP8: x has its noise in A_gate_up too.
    for n in ("out", "x", *FACTORS):
        least = BF16_DB
        if name != "bf16":
            least = -10 * math.log10(OF_OPERAND * (noise(n, 1, 1) + (n == "A_gate_up"))) - SPREAD_DB
        assert sqnr_db(got[n], want[n]) >= least, n
    with pytest.raises(RuntimeError, match="^ExpertParallel: A of lora_down must have size 8 in dimension 0, got 4$"):
        run(problem, of | {"A_down": of["A_down"][:4]}, partial(ours, fn=ep.experts))
    with pytest.raises(RuntimeError, match="^ExpertParallel: lora_down must be a LoRA or a tuple"):
        ep.experts(problem.x, problem.ids, problem.scores, problem.w_gate_up, problem.w_down, lora_down=of["A_down"])


def test_module_over_a_mesh(world_of_one):
    mesh = dist.init_device_mesh("cpu", (1,))
    module = Experts(4, 32, 24, lora_rank=3, ep=ExpertParallel(mesh, 4, 2))
    problem = layer(20, 32, 24, 4, 2)
    out = module(problem.x.float(), problem.ids, problem.scores)
    out.sum().backward()
    assert module.down_proj_lora_B.placements and module.down_proj_lora_B.grad.full_tensor().any()
    assert module.down_proj.grad is None and not module.down_proj_lora_A.grad.full_tensor().any()


@pytest.mark.skipif(_torch.wrapper_subclass is None, reason="private names of torch are switched off")
def test_weights_that_fsdp_gathers(world_of_one):
    """FSDP2 gathers the weights in FP8, and factors as they are."""
    of = dict(lora_rank=4, dtype=torch.bfloat16)
    sharded, plain = Experts(4, 32, 16, **of), Experts(4, 32, 16, **of)
    plain.load_state_dict(sharded.state_dict())
    fully_shard(sharded, mesh=dist.init_device_mesh("cpu", (1,)))
    gather_in_fp8_(sharded, "rowwise")
    x, ids = torch.randn(9, 32, dtype=torch.bfloat16, requires_grad=True), torch.arange(9)[:, None] % 4
    for module in (sharded, plain):
        module(x, ids, torch.ones(9, 1)).sum().backward()
    for name, want in plain.named_parameters():
        if "lora_" in name:
            assert_same_tensor(sharded.get_parameter(name).grad.to_local(), want.grad, name)


def test_modules(device):
    torch.manual_seed(1)
    sizes = dict(num_experts=4, hidden_size=32, intermediate_size=24)
    frozen = Experts(**sizes, bias=True, lora_rank=3, lora_scaling=2.0, lora_dropout=0.5, device=device)
    moe = MoE(Router(4, 32, 2, device=device), frozen)
    trained = {n for n, p in moe.experts.named_parameters() if p.requires_grad}
    assert trained == {f"{n}_lora_{letter}" for n in ("gate_up_proj", "down_proj") for letter in "AB"}
    assert not frozen.down_proj_lora_B.any() and frozen.down_proj_lora_A.any()
    assert frozen.gate_up_proj_lora_A.shape == (4, 3, 32) and frozen.down_proj_lora_B.shape == (4, 32, 3)
    x = torch.randn(50, 32, device=device)
    plain = Experts(**sizes, bias=True, device=device)
    plain.load_state_dict(frozen.state_dict(), strict=False)
    routing = moe.gate(x)
    call = x, routing.topk_ids, routing.topk_scores.detach()
    assert_same_tensor(frozen(*call).detach(), plain(*call).detach(), "B of zeros")
    target, losses = torch.randn_like(x), []
    optimizer = torch.optim.Adam([p for p in frozen.parameters() if p.requires_grad], lr=0.02)
    for _ in range(10):
        optimizer.zero_grad()
        loss = (moe(x)[0] - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert min(losses[-3:]) < losses[0]
    assert (frozen(*call) != frozen(*call)).any()  # dropout
    frozen.eval()
    assert_same_tensor(frozen(*call).detach(), frozen(*call).detach(), "eval")
    arguments = {
        f"b_{n}": getattr(frozen, f"{p}_bias") for n, p in (("gate_up", "gate_up_proj"), ("down", "down_proj"))
    }
    for n, p in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
        arguments[f"lora_{n}"] = getattr(frozen, f"{p}_lora_A"), getattr(frozen, f"{p}_lora_B"), 2.0
    assert_same_tensor(
        frozen(*call).detach(), experts(*call, frozen.gate_up_proj, frozen.down_proj, **arguments).detach(), "function"
    )


# ---- Errors ----

PROBLEM = layer(t=10, d=32, f=24)
OF = factors(PROBLEM, 4)


@pytest.mark.parametrize(
    ("lora", "text"),
    [
        (OF["A_down"], r"lora_down must be a LoRA or a tuple \(A, B, scaling\), got Tensor"),
        ((OF["A_down"],), r"lora_down must be a LoRA or a tuple \(A, B, scaling\), got 1 values"),
        ((None, OF["B_down"], 1.0), "A of lora_down must be a tensor, got NoneType"),
        ((OF["A_down"][0, 0], OF["B_down"], 1.0), "A of lora_down must have 2 or 3 dimensions, got 1"),
        ((OF["A_down"][:, :0], OF["B_down"][..., :0], 1.0), "A of lora_down must have a rank from 1 to 256, got 0"),
        ((torch.zeros(257, 24), torch.zeros(32, 257), 1.0), "A of lora_down must have a rank from 1 to 256, got 257"),
        ((OF["A_down"].mT, OF["B_down"], 1.0), "A of lora_down must have size 24 in dimension 2, got 4; it is .*"),
        ((OF["A_down"], OF["B_down"].mT, 1.0), "B of lora_down must have size 32 in dimension 1, got 4; it is .*"),
        ((OF["A_down"], OF["B_down"][..., :3], 1.0), "B of lora_down must have size 4 in dimension 2, got 3"),
        ((OF["A_down"][:2], OF["B_down"], 1.0), "A of lora_down must have size 8 in dimension 0, got 2"),
        (
            (OF["A_down"], OF["B_down"].int(), 1.0),
            "B of lora_down must be bfloat16, float16 or float32, got torch.int32",
        ),
        ((OF["A_down"].to("meta"), OF["B_down"], 1.0), "A of lora_down must be on the device of x, cpu, got meta"),
        ((OF["A_down"], OF["B_down"], torch.ones(1)), "scaling of lora_down must be a finite number, got .*"),
        ((OF["A_down"], OF["B_down"], math.nan), "scaling of lora_down must be a finite number, got nan"),
        (LoRA(OF["A_down"], OF["B_down"], 1.0, 1.0), "dropout of lora_down must be from 0 to less than 1, got 1.0"),
    ],
)
def test_errors(lora, text):
    with pytest.raises(RuntimeError, match=f"^experts: {text}$"):
        experts(PROBLEM.x, PROBLEM.ids, PROBLEM.scores, PROBLEM.w_gate_up, PROBLEM.w_down, lora_down=lora)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(lora_rank=0), "lora_rank must be None or from 1 to 256, got 0"),
        (dict(lora_rank=4.0), "lora_rank must be an int, got float"),
        (dict(lora_rank=4, lora_dropout=1), "lora_dropout must be from 0 to less than 1, got 1"),
        (dict(lora_rank=4, lora_scaling=None), "lora_scaling must be a finite number, got None"),
    ],
)
def test_errors_of_modules(options, text):
    with pytest.raises(RuntimeError, match=f"^Experts: {text}$"):
        Experts(4, 32, 24, **options)
