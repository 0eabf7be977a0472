"""experts: the layer as one operation, against plain PyTorch in float64 and against the separate ops."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from experts_problem import GATED, LEAVES, OF_OPERAND, PLAIN, Layer, assert_equal, layer, min_db, run, run_exact
from grouped_problem import Calls
from helpers import assert_same_tensor, sqnr_db
from torch import Tensor

import moe_fp8_ext
from moe_fp8_ext import Recipe, ops
from moe_fp8_ext.quantization.format import FORMATS

FP8 = tuple(FORMATS)
RECIPES = ("bf16", *FP8)
# A draw of few values may have any noise. But a rounding to E4M3 is at most 2^-4 of a value, so 2^-8 of the signal.
FEW_DB = 10 * math.log10(2**-8 / OF_OPERAND)


def assert_close(
    got: dict[str, Tensor], want: dict[str, Tensor], recipe: str, keep: str = "fp8", few: bool = False
) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].shape == want[name].shape
        found, least = sqnr_db(got[name], want[name]), min_db(name, recipe, keep)
        least -= FEW_DB if few and recipe != "bf16" else 0
        assert found >= least, f"{name}: {found:.1f} dB, want {least:.1f}"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("keep", ["fp8", "bf16"])
@pytest.mark.parametrize("name", RECIPES)
def test_accuracy(name, keep, bias, device):
    problem = layer(300, 256, 192, bias=bias).at(device)
    assert_close(run(problem, recipe=Recipe(name), keep=keep), run_exact(problem), name, keep)


@pytest.mark.parametrize(
    ("activation", "interleaved"), [*((a, i) for a in GATED for i in (False, True)), *((a, False) for a in PLAIN)]
)
def test_activations(activation, interleaved, device):
    problem = layer(rows=2 if activation in GATED else 1).at(device)
    options = dict(activation=activation, interleaved=interleaved)
    for name in ("rowwise", "bf16"):
        assert_close(run(problem, recipe=name, **options), run_exact(problem, **options), name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["rowwise", "bf16"])
def test_other_dtypes(name, dtype, device):
    problem = layer(bias=True).at(device)
    wide = replace(problem, **{n: getattr(problem, n).to(dtype) for n in LEAVES if n != "scores"})
    got = run(wide, recipe=name)
    assert all(t.dtype == (torch.float32 if n == "scores" else dtype) for n, t in got.items())
    assert_close(got, run_exact(problem), name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_another_dtype(dtype, device):
    problem = layer().at(device)
    got = run(replace(problem, scores=problem.scores.to(dtype)))
    assert got["scores"].dtype == dtype
    want = run(replace(problem, scores=problem.scores.to(dtype).float()))
    assert_same_tensor(got["out"], want["out"], "out")


def test_strides(device):
    """Weights are transposed views, and tokens have longer rows."""
    problem = layer(bias=True).at(device)
    other = replace(problem, **{n: getattr(problem, n).mT.contiguous().mT for n in ("w_gate_up", "w_down")})
    other.x = torch.nn.functional.pad(problem.x, (3, 5))[:, 3:-5]
    other.ids = problem.ids.int().t().contiguous().t()
    for name in RECIPES:
        got, want = (run(p, recipe=Recipe(name)) for p in (other, problem))
        # Gradients have the strides of their leaves.
        assert_equal({n: t.contiguous() for n, t in got.items()}, want)


ROUTINGS = {
    "empty experts": lambda ids: ids % 8 // 3,
    "one expert": lambda ids: torch.full_like(ids, 5),
    "no expert": lambda ids: torch.full_like(ids, -1),
    "dropped": lambda ids: torch.where(torch.arange(len(ids), device=ids.device)[:, None] % 3 == 0, 8 + ids, ids - 2),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("name", ["bf16", "rowwise", "blockwise", "mxfp8"])
def test_routings(name, routing, bias, device):
    """A token may choose an expert twice. The gradient of an expert without tokens is zero."""
    problem = layer(bias=bias).at(device)
    problem = replace(problem, ids=ROUTINGS[routing](problem.ids))
    got, want = run(problem, recipe=name), run_exact(problem)
    for which in want:
        assert bool((want[which] == 0).all()) or sqnr_db(got[which], want[which]) >= min_db(which, name), which
        assert not got[which][want[which] == 0].any(), which


@pytest.mark.parametrize("name", RECIPES)
def test_every_expert_of_every_token(name, device):
    problem = layer(e=4, top_k=4, t=200).at(device)
    assert_close(run(problem, recipe=Recipe(name)), run_exact(problem), name)


@pytest.mark.parametrize("t", [0, 1])
@pytest.mark.parametrize("name", RECIPES)
def test_few_tokens(name, t, device):
    problem = layer(t=t, bias=True).at(device)
    got, want = run(problem, recipe=Recipe(name)), run_exact(problem)
    assert_close(got, want, name, few=True)
    assert not any(got[which][want[which] == 0].any() for which in want)
    assert_by_hand(layer(t=t).at(device), Recipe(name))


@pytest.mark.parametrize("sizes", [(40, 24), (70, 33), (5, 3), (1, 1)])
@pytest.mark.parametrize("name", RECIPES)
def test_sizes_of_no_multiple(name, sizes, device):
    """Scaling blocks are cut short, and only one GEMM takes the sizes. The bytes equal the separate ops."""
    problem = layer(t=53, d=sizes[0], f=sizes[1], bias=True).at(device)
    got = run(problem, recipe=Recipe(name))
    assert_close(got, run_exact(problem), name, few=True)
    assert_same_tensor(got["out"], run(problem, fn=by_hand, recipe=Recipe(name), frozen=LEAVES)["out"], "out")
    assert_by_hand(replace(problem, b_gate_up=None, b_down=None), Recipe(name))


EXACT = Recipe("rowwise", rounding="exact")  # its bytes show every scale; powers of two only shift exponents


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("recipe", [*map(Recipe, RECIPES), EXACT], ids=repr)
def test_nan_in_one_token(recipe, bias, value, device):
    """NaN stays in its token and in the token's experts. A zero in its place does not change the scales of the
    column."""
    problem, token = layer(bias=bias).at(device), 17
    problem.x[token, 5] = 0
    want = run(problem, recipe=recipe)
    problem.x[token, 5] = value
    got = run(problem, recipe=recipe)
    touched = problem.ids[token].unique()
    others = {n: torch.ones(len(t), dtype=torch.bool, device=device) for n, t in got.items()}
    for n in others:
        others[n][touched if n[:2] in ("w_", "b_") else token] = False
    for n in got:
        # The bias of the down product adds up only gradients and scores.
        assert got[n][~others[n]].isnan().any() or n == "b_down", n
        assert_same_tensor(got[n][others[n]], want[n][others[n]], n)


@pytest.mark.parametrize("recipe", [Recipe("rowwise"), EXACT, replace(EXACT, amax="group")], ids=repr)
@pytest.mark.parametrize("which", ["x", "grad"])
def test_what_no_expert_has_leaves_no_trace(which, recipe, device):
    problem = layer(bias=True).at(device)
    problem.ids[17] = -1
    want = run(problem, recipe=recipe)
    for value in (math.nan, 1e30, 0):
        getattr(problem, which)[17] = value
        assert_equal(run(problem, recipe=recipe), want)


FROZEN = [(), ("x",), ("scores",), ("w_gate_up", "b_gate_up"), ("w_down",), *((n,) for n in ("b_gate_up", "b_down"))]
FROZEN += [tuple(n for n in LEAVES if n != alone) for alone in LEAVES]
FROZEN += [("x", "w_gate_up", "b_gate_up"), ("x", "scores", "w_gate_up", "b_gate_up"), LEAVES]


@pytest.mark.parametrize("frozen", FROZEN, ids="+".join)
@pytest.mark.parametrize("name", ["bf16", "rowwise", "blockwise"])
def test_frozen_inputs(name, frozen, device):
    """Frozen inputs do not change the other results."""
    problem = layer(t=60, d=64, f=48, bias=True).at(device)
    want = run(problem, recipe=name)
    got = run(problem, recipe=name, frozen=frozen)
    assert_equal(got, {n: t for n, t in want.items() if n not in frozen})


@pytest.mark.parametrize(
    ("frozen", "products"),
    [
        ((), 6),
        (("x",), 5),
        (("w_gate_up",), 5),
        (("x", "w_gate_up"), 4),
        (("x", "w_gate_up", "scores"), 3),
        (("w_down",), 5),
        (LEAVES, 2),
    ],
)
def test_what_frozen_inputs_would_need_is_not_computed(frozen, products):
    with Calls() as called:
        run(layer(t=20, d=64, f=32), frozen=frozen)
    assert called.names.count("scaled_grouped_mm") == products


def moved(v: Tensor, index: Tensor) -> Tensor:
    """Takes rows of v [n] by index; they are zero where there is none."""
    return ops.permute_pad(v.view(-1, 1), index.view(-1), 1).view(index.shape)


def by_hand(x, ids, scores, w_gate_up, w_down, *, recipe, grad=None, b_gate_up=None, b_down=None):
    """Computes the layer with ops and objects, as a user would write it. Returns out or, with grad, all gradients
    too."""
    f, how = recipe.format, dict(rounding=recipe.rounding) if recipe.format else {}
    permutation, offs, inverse = ops.sort_tokens(ids, len(w_down))
    gathered, groups = dict(indices=permutation, top_k=ids.shape[1]), dict(offs=offs)
    # Arguments for x, for tensors of slots, and for gradients, which never have squares.
    of_x = dict(amax=recipe.amax if ids.shape[1] > 1 else recipe.amax_of_groups)
    of_slots_too, of_grad = dict(amax=recipe.amax_of_groups), of_x if recipe.amax == "batch" else {}

    def with_bias(h, bias):
        expert = torch.bucketize(torch.arange(len(h), device=x.device, dtype=torch.int32), offs, right=True)
        return h if bias is None else h + torch.cat([bias, torch.zeros_like(bias[:1])])[expert]

    if f is None:
        h = with_bias(moe_fp8_ext.grouped_mm(x, w_gate_up.mT, offs, recipe="bf16", **gathered), b_gate_up)
        y = moe_fp8_ext.grouped_mm(ops.activate(h, "swiglu"), w_down.mT, offs, recipe="bf16")
        return ops.combine(with_bias(y, b_down), inverse, scores)
    up, up_t = moe_fp8_ext.quantize_weight(w_gate_up, f, **how)
    down, down_t = moe_fp8_ext.quantize_weight(w_down, f, **how)

    def rows(v, **gathered):
        return moe_fp8_ext.quantize_rows(v, f, **groups, **gathered, **how)

    def tokens(v, **gathered):
        return moe_fp8_ext.quantize_tokens(v, f, **groups, **gathered, **how)

    mm = moe_fp8_ext.scaled_grouped_mm
    h = with_bias(mm(rows(x, **gathered), up), b_gate_up)
    y = with_bias(mm(rows(ops.activate(h, "swiglu")), down), b_down)
    out = ops.combine(y, inverse, scores)
    if grad is None:
        return out
    da = mm(rows(grad, **gathered), down_t)
    q, scale = ops.quantize_rows(h, f, **how)
    of_slots = moved(scores.flatten(), permutation)
    dh, a, dscores = ops.activate_backward(da, q, "swiglu", scores=of_slots, h_scale=scale, format=f)
    return {
        "out": out,
        "x": ops.combine(mm(rows(dh), up_t), inverse),
        "scores": moved(dscores, inverse),
        "w_gate_up": mm(tokens(dh), tokens(x, **gathered, **of_x)),
        "w_down": mm(tokens(grad, **gathered, **of_grad), tokens(a, **of_slots_too)),
    }


def assert_by_hand(problem: Layer, recipe: Recipe) -> None:
    """out and, in FP8, all gradients have the bytes of the separate ops."""
    call = problem.x, problem.ids, problem.scores, problem.w_gate_up, problem.w_down
    want, got = by_hand(*call, recipe=recipe, grad=problem.grad), run(problem, recipe=recipe)
    if recipe.format is None:
        assert_same_tensor(got["out"], want, "out")
    else:
        assert_equal(got, want)


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("recipe", [*map(Recipe, FP8), EXACT, replace(EXACT, amax="group")], ids=repr)
def test_bytes_are_those_of_the_ops_one_by_one(recipe, top_k, device):
    problem = layer(top_k=top_k).at(device)
    problem.ids[::7, -1] = -1
    assert_by_hand(problem, recipe)


def test_scales_of_the_batch_cost_no_accuracy(device):
    """Powers of two only shift exponents, so gradients of weights differ only where values underflow.

    In one operand the difference is within 2^-9 steps of 1/224 of the largest number, 5e-5 of the others in the root
    mean square. It turns one of 80 roundings to bfloat16, of 2^-8, which is 2^-11 in all. With other multipliers every
    value is rounded anew.
    """
    problem = layer(300, 256, 192).at(device)
    batch, group = (run(problem, recipe=Recipe("rowwise", amax=amax)) for amax in ("batch", "group"))
    for n in ("w_gate_up", "w_down"):
        one, other = batch.pop(n).double(), group.pop(n).double()
        assert (one - other).norm() <= 2**-10 * other.norm()
    assert_equal(batch, group)
    batch, group = (run(problem, recipe=r) for r in (EXACT, replace(EXACT, amax="group")))
    assert all(torch.equal(batch[n], group[n]) == (n[:2] != "w_") for n in batch)


def test_options_of_recipes(device):
    """grad_dtype and wgrad_high_precision change only the gradients that they are for."""
    problem = layer().at(device)
    want = run(problem)
    e5m2 = run(problem, recipe=Recipe("rowwise", grad_dtype=torch.float8_e5m2))
    assert_same_tensor(e5m2["out"], want["out"], "out")
    assert not torch.equal(e5m2["x"], want["x"]) and not torch.equal(e5m2["w_down"], want["w_down"])
    high, bf16 = (run(problem, recipe=r) for r in (Recipe("rowwise", wgrad_high_precision=True), "bf16"))
    assert_same_tensor(high["out"], want["out"], "out")
    wide = run_exact(problem)
    # Two casts of the noise of h remain, and three of dh. No operand of wgrad is cast itself.
    for n, noise in (("w_down", 2 * 2.07), ("w_gate_up", 2 + 2 * 1.23)):
        assert sqnr_db(high[n], wide[n]) > -10 * math.log10(noise * 0.544 / 768) - 1.2
        assert sqnr_db(bf16[n], wide[n]) > sqnr_db(high[n], wide[n]) > sqnr_db(want[n], wide[n])
