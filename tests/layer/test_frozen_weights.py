"""Weights that need no gradient: what backward keeps, and that results equal the results of trained weights."""

from __future__ import annotations

import io
import pickle
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from experts_problem import WEIGHTS, Layer, assert_equal, but, layer, run
from grouped_problem import Calls, problem, quantizations
from helpers import assert_same, group_offs, kept_bytes
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from moe_fp8_ext import (
    Experts,
    FrozenWeight,
    Quantized,
    Recipe,
    _torch,
    experts,
    experts_of_groups,
    grouped_mm,
    quantize_weight,
    reuse_weights,
    save_ops,
)
from moe_fp8_ext.distributed import ExpertParallel
from moe_fp8_ext.quantization.format import FORMATS

SIZES = dict(t=60, d=64, f=48)
NAMES = ("rowwise", "blockwise", "mxfp8")
RECIPES = ["bf16", *NAMES, Recipe("rowwise", wgrad_high_precision=True)]
OF_ALL_RECIPES = pytest.mark.parametrize("recipe", RECIPES, ids=str)
OF_FORMATS = pytest.mark.parametrize("format", NAMES)
OF_REUSE = pytest.mark.skipif(_torch.state_of is None, reason="reuse_weights takes private names of torch")


def in_blocks(w: Tensor, way: str) -> Quantized | tuple[Quantized, Quantized]:
    """The weight in format "blockwise", held in one of several ways."""
    first, second = quantize_weight(w.detach(), "blockwise", rounding=Recipe("blockwise").rounding)
    if way == "pair":
        return first, second
    if way == "first":
        return first
    # The bytes lie as [E, K, N], so backward takes them as they are, and forward transposes.
    return Quantized.from_parts(second.q.mT, second.scale.mT, "blockwise")


# ---- by reference ----------------------------------------------------------------------------------------------------


@OF_ALL_RECIPES
@pytest.mark.parametrize("names", [WEIGHTS, *((n,) for n in WEIGHTS)], ids="+".join)
def test_the_same_bytes_as_trained(recipe, names, device):
    problem = layer(**SIZES, bias=True).at(device)
    want = run(problem, recipe=recipe)
    assert_equal(run(problem, recipe=recipe, frozen=names), but(want, *names))


@OF_ALL_RECIPES
def test_autocast_casts_again_in_backward(recipe, device):
    problem = layer(**SIZES).at(device)
    for n in WEIGHTS:
        setattr(problem, n, getattr(problem, n).float() * 1.01)
    with torch.autocast(device, torch.bfloat16):
        want = run(problem, recipe=recipe)
        assert_equal(run(problem, recipe=recipe, frozen=WEIGHTS), but(want, *WEIGHTS))


@OF_FORMATS
@pytest.mark.parametrize("transposed", [False, True], ids=["[E, N, K]", "[E, K, N]"])
def test_only_the_direction_of_a_product_is_quantized(format, transposed, device):
    """An op reads two bytes a weight and writes one. Of a weight that lies as [E, K, N] the op takes the transpose."""
    of = layer(**SIZES).at(device)
    weights = [getattr(of, n).mT.contiguous().mT if transposed else getattr(of, n) for n in WEIGHTS]
    first, second = ("transposed", "rows") if transposed else ("rows", "transposed")
    x = of.x.clone().requires_grad_()
    with Calls() as forward:
        out = experts(x, of.ids, of.scores, *weights, recipe=format)
    with Calls() as backward:
        out.backward(of.grad)
    assert (forward.directions, backward.directions) == ([first] * 2, [second] * 2)
    trained = [w.clone(memory_format=torch.preserve_format).requires_grad_() for w in weights]
    for grad, want in ((False, first), (True, "both")):
        with torch.set_grad_enabled(grad), Calls() as calls:
            experts(x, of.ids, of.scores, *trained, recipe=format)
        assert calls.directions == [want] * 2


@OF_ALL_RECIPES
def test_what_is_kept(recipe, device):
    """At most 0.06 bytes a weight besides the weights, all of it for 12 slots. A trained weight adds its FP8 copy."""
    problem = layer(t=4, d=256, f=256).at(device)
    weights = [getattr(problem, n) for n in WEIGHTS]
    count = sum(w.numel() for w in weights)
    x = problem.x.clone().requires_grad_()
    for all_weights in (weights, [w.mT.contiguous().mT for w in weights], [w.float() for w in weights]):
        tokens = x.to(all_weights[0].dtype)
        call = lambda tokens, ws: experts(tokens, problem.ids, problem.scores, *ws, recipe=recipe)  # noqa: E731
        assert kept_bytes(partial(call, tokens, all_weights), tokens, *all_weights) <= 0.06 * count
    trained = [w.clone().requires_grad_() for w in weights]
    assert kept_bytes(partial(call, x, trained), x, *trained) >= (0 if recipe == "bf16" else count)


@pytest.mark.parametrize("way", ["first", "pair", "as [E, K, N]"])
def test_what_is_kept_of_frozen_fp8(way, device):
    problem = layer(t=4, d=256, f=256).at(device)
    weights = [in_blocks(getattr(problem, n), way) for n in WEIGHTS]
    held = [t for w in weights for part in (w if way == "pair" else [w]) for t in (part.q, part.scale)]
    x = problem.x.clone().requires_grad_()
    kept = kept_bytes(lambda: experts(x, problem.ids, problem.scores, *weights, recipe="blockwise"), x, *held)
    assert kept <= 0.06 * sum(getattr(problem, n).numel() for n in WEIGHTS)


def test_a_write_between_forward_and_backward(device):
    problem = layer(**SIZES).at(device)
    x = problem.x.clone().requires_grad_()
    out = experts(x, problem.ids, problem.scores, problem.w_gate_up, problem.w_down)
    problem.w_down.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_weight_of_inference_mode(device):
    """Autograd saves no such tensor, so its FP8 copy is kept as a trained weight's is."""
    problem = layer(**SIZES).at(device)
    want = run(problem, frozen=WEIGHTS)
    with torch.inference_mode():
        made = {n: getattr(problem, n).clone() for n in WEIGHTS}
    call = lambda x, ids, scores, *_, **how: experts(x, ids, scores, **made, **how)  # noqa: E731
    assert_equal(run(problem, call, frozen=WEIGHTS), want)


@pytest.mark.parametrize("sizes", [dict(d=128, f=256), dict(d=256, f=128)])
def test_compiled_with_one_block(sizes, device):
    """The transpose of scales with one block along a dimension is contiguous, so it must be copied all the same."""
    torch._dynamo.reset()
    of = layer(t=4, **sizes).at(device)
    weights, found = [in_blocks(getattr(of, n), "first") for n in WEIGHTS], []
    for fn in (experts, torch.compile(experts, fullgraph=True, backend="aot_eager")):
        x = of.x.clone().requires_grad_()
        out = fn(x, of.ids, of.scores, *weights, recipe="blockwise")
        out.backward(of.grad)
        found.append((out.detach(), x.grad))
    assert_same(*found)


@pytest.mark.parametrize(("recipe", "way"), [("rowwise", "tensor"), ("blockwise", "tensor"), ("blockwise", "first")])
def test_compiled(recipe, way, device):
    """torch moves to forward whatever depends on weights alone, and keeps it for backward. It must not move casts."""
    torch._dynamo.reset()
    of = layer(t=4, d=256, f=256).at(device)
    weights = [in_blocks(getattr(of, n), way) if way == "first" else getattr(of, n) for n in WEIGHTS]
    held = [t for w in weights for t in ((w.q, w.scale) if way == "first" else (w,))]
    found = []
    for fn in (experts, torch.compile(experts, fullgraph=True, backend="aot_eager")):
        x, outs = of.x.clone().requires_grad_(), []
        call = partial(fn, x, of.ids, of.scores, *weights, recipe=recipe)
        kept = kept_bytes(lambda: outs.append(call()), x, *held)  # noqa: B023
        assert kept <= 0.06 * sum(getattr(of, n).numel() for n in WEIGHTS)
        outs[0].backward(of.grad)
        found.append((outs[0].detach(), x.grad))
    assert_same(*found)


@OF_FORMATS
@pytest.mark.parametrize("saves_products", [False, True])
def test_checkpointed(format, saves_products, device):
    problem = layer(**SIZES).at(device)
    want = run(problem, recipe=format, frozen=WEIGHTS)
    how = {"context_fn": partial(create_selective_checkpoint_contexts, save_ops())} if saves_products else {}
    call = lambda *args, **more: checkpoint(experts, *args, **more, use_reentrant=False, **how)  # noqa: E731
    assert_equal(run(problem, call, recipe=format, frozen=WEIGHTS), want)


@OF_FORMATS
def test_grouped_mm(format, device):
    a, b_t, offs, g = problem(90, 64, 48, group_offs("zipf", 90, 3), device)
    found = []
    for requires_grad in (True, False):
        x, w = a.detach().requires_grad_(), b_t.detach().requires_grad_(requires_grad)
        out = grouped_mm(x, w, offs, recipe=format)
        out.backward(g)
        found.append((out.detach(), x.grad))
    assert_same(*found)


# ---- one direction of square blocks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["first", "as [E, K, N]"])
def test_one_direction_is_a_whole_weight(way, device):
    of = layer(t=50, d=136, f=144).at(device)
    want = run(of, recipe="blockwise", frozen=WEIGHTS)
    weights = [in_blocks(getattr(of, n), way) for n in WEIGHTS]
    call = lambda x, ids, scores, *_, **how: experts(x, ids, scores, *weights, **how)  # noqa: E731
    with Calls() as calls:
        assert_equal(run(of, call, recipe="blockwise", frozen=WEIGHTS), want)
    assert calls.names.count("transpose_weight") == 2 and "quantize_weight" not in calls.names


@pytest.mark.parametrize("way", ["first", "as [E, K, N]"])
def test_one_direction_of_grouped_mm_and_of_groups(way, device):
    a, b_t, offs, g = problem(90, 136, 144, group_offs("zipf", 90, 3), device)
    w = in_blocks(b_t.mT, way)
    found = []
    for weight in (b_t.detach(), w):
        x = a.detach().requires_grad_()
        out = grouped_mm(x, weight, offs, recipe="blockwise")
        out.backward(g)
        found.append((out.detach(), x.grad))
    assert_same(*found)
    of = layer(t=90, d=136, f=144, e=3).at(device)
    found = []
    for weights in ((of.w_gate_up, of.w_down), (in_blocks(of.w_gate_up, way), in_blocks(of.w_down, way))):
        x = of.x.clone().requires_grad_()
        out = experts_of_groups(x, offs, of.scores[:, 0].contiguous(), *weights, recipe="blockwise")
        out.backward(of.grad)
        found.append((out.detach(), x.grad))
    assert_same(*found)


@pytest.mark.parametrize("mode", ["exact", "static"])
@pytest.mark.parametrize("way", ["tensor", "first"])
def test_over_ranks(mode, way, world_of_one):
    """Chunks share one operand a direction, so backward casts or transposes a weight once."""
    of = layer(t=40, d=136, f=144)
    ep = ExpertParallel(dist.group.WORLD, 8, 3, recipe="blockwise", mode=mode, chunks=2)
    over_ranks = lambda *args, recipe, **how: ep.experts(*args, **how)  # noqa: E731
    want = but(run(of, over_ranks, recipe=None), *WEIGHTS)
    weights = [in_blocks(getattr(of, n), way) if way == "first" else getattr(of, n) for n in WEIGHTS]
    with Calls() as calls:
        got = run(of, lambda x, ids, scores, *_, **how: ep.experts(x, ids, scores, *weights), frozen=WEIGHTS)
    assert_equal(got, want)
    assert calls.names.count("quantize_weight") == (0 if way == "first" else 4)
    assert calls.names.count("transpose_weight") == (2 if way == "first" else 0)


def test_other_formats_need_the_pair(device):
    of = layer(**SIZES).at(device)
    x = of.x.clone().requires_grad_()
    first = [quantize_weight(getattr(of, n), "rowwise")[0] for n in WEIGHTS]
    with pytest.raises(RuntimeError, match="^experts: w_gate_up must be the pair .*; pass both of the pair, or .*"):
        experts(x, of.ids, of.scores, *first)


# ---- reuse_weights ---------------------------------------------------------------------------------------------------


def frozen_and_trained(of: Layer) -> tuple[Parameter, Parameter]:
    return Parameter(of.w_gate_up.clone(), requires_grad=False), Parameter(of.w_down.clone())


@OF_REUSE
@OF_FORMATS
def test_reuse_serves_both_directions(format, device):
    of = layer(**SIZES).at(device)
    want = run(of, recipe=format, frozen=WEIGHTS)
    weights = [Parameter(getattr(of, n).clone(), requires_grad=False) for n in WEIGHTS]
    call = lambda x, ids, scores, *_, **how: experts(x, ids, scores, *weights, **how)  # noqa: E731
    with reuse_weights():
        assert quantizations(lambda: assert_equal(run(of, call, recipe=format, frozen=WEIGHTS), want)) == 2
        assert quantizations(lambda: run(of, call, recipe=format, frozen=WEIGHTS)) == 0


@OF_REUSE
@pytest.mark.parametrize("is_laid_out_by_input", [False, True])
def test_reuse_of_views(is_laid_out_by_input, device):
    """The parameter is [E, N, K], or [E, K, N] as in GPT-OSS. Backward finds it by the view that forward kept."""
    a, b_t, offs, g = problem(90, 64, 48, group_offs("zipf", 90, 3), device)
    w = Parameter((b_t if is_laid_out_by_input else b_t.mT).detach().contiguous(), requires_grad=False)

    def step() -> None:
        x = a.detach().requires_grad_()
        grouped_mm(x, w if is_laid_out_by_input else w.mT, offs).backward(g)

    with reuse_weights():
        assert quantizations(lambda: (step(), step())) == 1


@OF_REUSE
def test_frozen_weights_live_across_steps(device):
    of = layer(**SIZES).at(device)
    w_gate_up, w_down = frozen_and_trained(of)
    optimizer = torch.optim.SGD([w_down], lr=0.1)

    def step() -> None:
        experts(of.x, of.ids, of.scores, w_gate_up, w_down).sum().backward()
        optimizer.step()

    with reuse_weights():
        assert quantizations(step) == 2
        assert quantizations(step) == 1  # w_down alone
        with torch.no_grad():
            w_gate_up.mul_(2)
        assert quantizations(step) == 2


def test_a_frozen_weight_that_an_optimizer_owns(device):
    """Some optimizers write to all of their parameters, also to a parameter whose gradient is switched off."""
    of = layer(**SIZES).at(device)
    w_gate_up, w_down = frozen_and_trained(of)
    optimizer = torch.optim.SGD([w_down, w_gate_up], lr=0.1)
    with reuse_weights():
        call = lambda: experts(of.x, of.ids, of.scores, w_gate_up, w_down)  # noqa: E731
        assert quantizations(call) == 2
        optimizer.step()
        assert quantizations(call) == 2


# ---- modules ---------------------------------------------------------------------------------------------------------


def module_of(recipe: str, **how: object) -> Experts:
    torch.manual_seed(0)
    return Experts(4, 128, 64, recipe=recipe, dtype=torch.bfloat16, **how)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    of = layer(t=20, d=128, f=64, e=4, top_k=2)
    return of.x, of.ids, of.scores


@OF_FORMATS
@pytest.mark.parametrize("both", [False, True])
def test_freeze(format, both):
    """Same bytes, no cast, no parameter. The state dict has the values."""
    trained, module = module_of(format, bias=True), module_of(format, bias=True).freeze_(both=both)
    found, (x, ids, scores) = [], inputs()
    for m in (trained, module):
        tokens = x.clone().requires_grad_()
        with Calls() as calls:
            out = m(tokens, ids, scores)
            out.sum().backward()
        found.append((out.detach(), tokens.grad, m.gate_up_proj_bias.grad))
    assert_same(*found)
    assert "quantize_weight" not in calls.names
    assert {n for n, _ in module.named_parameters()} == {"gate_up_proj_bias", "down_proj_bias"}
    assert ("gate_up_proj.q_t_bytes" in module.state_dict()) == (both or format != "blockwise")
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = Experts(4, 128, 64, recipe=format, dtype=torch.bfloat16, bias=True).freeze_(both=both)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert_same(other(x, ids, scores), module(x, ids, scores))
    assert module.freeze_() is module and "FrozenWeight" in repr(module)


def test_casts_leave_frozen_values_alone():
    module = module_of("blockwise").freeze_()
    want = module(*inputs())
    module.bfloat16().half().to(torch.float32)
    assert module.down_proj.q.dtype == torch.float8_e4m3fn and module.down_proj.scale.dtype == torch.float32
    assert_same(module(*inputs()), want)


def test_scales_of_another_format_are_refused():
    """With K = N = 128, the scales of "mxfp8" and of "rowwise" have the same number of bytes."""
    w = torch.ones(2, 128, 128)
    of = {format: FrozenWeight(quantize_weight(w, format)) for format in ("mxfp8", "rowwise")}
    assert of["mxfp8"].scale_bytes.numel() == of["rowwise"].scale_bytes.numel()
    state = {n: t for n, t in of["mxfp8"].state_dict().items() if n != "_extra_state"}
    with pytest.raises(RuntimeError, match="size mismatch for scale_bytes"):
        of["rowwise"].load_state_dict(state)


FROZEN = Recipe("rowwise"), Recipe("rowwise", dtype=torch.float8_e5m2), Recipe("mxfp8"), Recipe("mxfp8_rowmajor")


@pytest.mark.parametrize("given", FROZEN, ids=str)
@pytest.mark.parametrize("wanted", FROZEN, ids=str)
def test_bytes_of_another_format_or_dtype_are_refused(wanted, given):
    """With these sizes, the scales of both layouts of "mxfp8" have the same shape."""
    module, state = module_of(wanted).freeze_(), module_of(given).freeze_().state_dict()
    before = {n: t.clone() for n, t in module.state_dict().items()}
    if wanted is given:
        module.load_state_dict(state)
        return
    wider = {n: t.int() for n, t in state.items()}  # as other code may widen integers
    text = f"^FrozenWeight: the state dict must have .* for gate_up_proj, got {given.format} in .*; freeze the module"
    for state_dict in (state, wider):
        with pytest.raises(RuntimeError, match=text):
            module.load_state_dict(state_dict, strict=False)
    for n, t in module.state_dict().items():
        assert_same(t, before[n], n)


def test_state_dicts_without_the_format_are_loaded():
    """State dicts of earlier versions have bytes alone. A state dict without values cannot be compared."""
    module, other = module_of("rowwise").freeze_(), module_of("rowwise").freeze_()
    state = {n: t for n, t in module.state_dict().items() if not n.endswith("_extra_state")}
    with torch.no_grad():
        other.down_proj.q_bytes.zero_()
    other.load_state_dict(state)
    for n, t in other.state_dict().items():
        assert_same(t, module.state_dict()[n], n)
    other.load_state_dict({n: t.to("meta") for n, t in module.state_dict().items()}, assign=True)


def test_a_state_dict_that_is_frozen_where_the_module_is_not():
    trained, frozen, both = module_of("blockwise"), module_of("blockwise").freeze_(), module_of("blockwise")
    both.freeze_(both=True)
    for module, other, text in (
        (trained, frozen, r"gate_up_proj of .* must be trained as the module's, got a frozen weight; call freeze_\(\)"),
        (frozen, trained, r"gate_up_proj of .* must be frozen as the module's, got a trained weight; .*freeze_\(\)"),
        (both, frozen, "must have both directions of gate_up_proj, got one; .* without both=True"),
    ):
        for strict in (True, False):
            with pytest.raises(RuntimeError, match=text):
                module.load_state_dict(other.state_dict(), strict=strict)
    frozen.load_state_dict(both.state_dict(), strict=False)


def test_a_frozen_weight_is_no_operand():
    of, w = layer(t=4, d=128, f=128), FrozenWeight(quantize_weight(torch.ones(3, 256, 128), "blockwise")[0])
    text = "w_gate_up must be a tensor, a Quantized or a pair of them, got FrozenWeight; pass its operand()"
    with pytest.raises(RuntimeError, match=re.escape(text)):
        experts(of.x, of.ids, of.scores, w, of.w_down, recipe="blockwise")


def test_reset_of_a_frozen_module():
    """Adapters are drawn again; frozen weights stay."""
    module = module_of("blockwise", lora_rank=2).freeze_()
    before = {n: t.clone() for n, t in module.state_dict().items()}
    module.reset_parameters()
    changed = {n for n, t in module.state_dict().items() if not torch.equal(t, before[n])}
    assert changed == {"gate_up_proj_lora_A", "down_proj_lora_A"}


def test_freeze_needs_a_format():
    for recipe in ("bf16", "auto"):
        module = module_of(recipe)
        with pytest.raises(
            RuntimeError, match="^Experts.freeze_: recipe must be one that always multiplies in fp8, got"
        ):
            module.freeze_()
        assert isinstance(module.down_proj, nn.Parameter)
    for wrong, got in ((None, "NoneType"), (quantize_weight(torch.ones(1, 8, 8), "rowwise")[::-1], "the other one")):
        with pytest.raises(RuntimeError, match=f"^FrozenWeight: weight must .*got {got}$"):
            FrozenWeight(wrong)


def test_freeze_needs_values():
    """Values on the meta device would stay there for good, also after accelerate brought the weights back."""
    module = Experts(4, 128, 64, recipe="blockwise", device="meta")
    with pytest.raises(
        RuntimeError, match="^Experts.freeze_: gate_up_proj must have values, got .*; call Experts.freeze_"
    ):
        module.freeze_()
    assert isinstance(module.gate_up_proj, nn.Parameter)


@OF_REUSE
def test_casts_of_generated_tokens():
    """One for each weight and token; one for each weight inside `reuse_weights`; none with frozen values."""
    module, (x, ids, scores) = module_of("blockwise").eval(), inputs()

    def generate() -> None:
        with torch.no_grad():
            for token in range(4):
                rows = slice(token, token + 1)
                module(x[rows], ids[rows], scores[rows])

    assert quantizations(generate) == 8
    with reuse_weights():
        assert quantizations(generate) == 2
    module.freeze_()
    assert quantizations(generate) == 0


# ---- Quantized -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_parts(format):
    of = layer(t=1, d=256, f=128)
    pair = quantize_weight(of.w_down, format)
    for part in pair:
        made = Quantized.from_parts(part.q, part.scale, format, transposed=part.transposed)
        assert made.transposed == part.transposed and made.q is part.q
        assert_same((made.q, made.scale), (part.q, part.scale))
        for copy in (pickle.loads(pickle.dumps(part)), saved(part)):
            assert copy.transposed == part.transposed and copy.format == format
            assert_same((copy.q, copy.scale), (part.q, part.scale))
    view = pair[0].q.mT.contiguous().mT
    made = Quantized.from_parts(view, pair[0].scale, format)
    assert_same((made.q.contiguous(), made.scale), (pair[0].q, pair[0].scale))
    assert (made.q is view) == (format == "blockwise")


def saved(x: Quantized) -> Quantized:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_quantize_weight_takes_any_strides():
    w = layer(t=1, d=136, f=72).w_gate_up
    for format in FORMATS:
        want = quantize_weight(w, format)
        for view in (w.mT.contiguous().mT, w.permute(2, 0, 1).contiguous().permute(1, 2, 0)):
            for got, part in zip(quantize_weight(view, format), want, strict=True):
                assert got.transposed == part.transposed
                assert_same((got.q, got.scale), (part.q, part.scale))


def test_parts_with_powers_of_two():
    w = layer(t=1, d=256, f=128).w_down
    first, _ = quantize_weight(w, "blockwise", rounding="pow2")
    made = Quantized.from_parts(first.q, first.scale.to(torch.float8_e8m0fnu), "blockwise")
    assert_same(made.scale, first.scale)
    every = torch.arange(255, dtype=torch.uint8).view(255, 1, 1).view(torch.float8_e8m0fnu)
    scale = Quantized.from_parts(torch.zeros(255, 8, 8).to(torch.float8_e4m3fn), every, "blockwise").scale
    assert scale.double().flatten().tolist() == [2.0**e for e in range(-127, 128)]


Q, S = torch.zeros(2, 256, 128).to(torch.float8_e4m3fn), torch.ones(2, 2, 1)


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ((Q, S, "int8"), "format must be 'rowwise'.*got 'int8'"),
        ((None, S, "blockwise"), "q must be a tensor, got NoneType"),
        ((Q, 1.0, "blockwise"), "scale must be a tensor, got float"),
        ((Q.view(torch.uint8), S, "blockwise"), "q must be fp8, got torch.uint8; view bytes as an fp8 dtype"),
        ((Q[0], S, "blockwise"), r"q must have 3 dimensions, \[E, N, K\], got 2; stack the experts"),
        ((Q, S.mT, "blockwise"), r"scale must have shape \(2, 2, 1\) .*; it has the shape of q.mT: pass scale.mT"),
        ((Q, torch.ones(2), "blockwise"), r"scale must have shape .*got \(2,\); a scale of a whole matrix .*"),
        ((Q, S.bfloat16(), "blockwise"), "scale must be float32 or float8_e8m0fnu .*, got torch.bfloat16"),
        ((Q, S.to("meta"), "blockwise"), "scale must be on the device of q, cpu, got meta"),
    ],
)
def test_parts_that_do_not_fit(parts, text):
    with pytest.raises(RuntimeError, match=f"^Quantized.from_parts: {text}$"):
        Quantized.from_parts(*parts)


def test_parts_of_a_mesh(world_of_one):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    q, scale = (distribute_tensor(t.view(torch.uint8) if t is Q else t, mesh, [Shard(0)]) for t in (Q, S))
    made = Quantized.from_parts(q.view(torch.float8_e4m3fn), scale, "blockwise")
    assert_same((made.q, made.scale), (Q, S))
    with pytest.raises(RuntimeError, match="scale must be a DTensor where the other is one, got a tensor"):
        Quantized.from_parts(q, S, "blockwise")
    with pytest.raises(RuntimeError, match="scale must be sharded by expert"):
        Quantized.from_parts(q, scale.redistribute(mesh, [Replicate()]), "blockwise")


def test_freezes_a_module_over_a_mesh(world_of_one):
    """It still takes tokens that every rank has."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh, problem = init_device_mesh("cpu", (1,)), layer(t=20, d=64, f=48)
    module = Experts(8, 64, 48, recipe="blockwise")
    for name, weight in list(module.named_parameters()):
        module.register_parameter(name, Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)])))
    call = [DTensor.from_local(t.detach(), mesh, [Replicate()]) for t in (problem.x, problem.ids, problem.scores)]
    want = module(*call).full_tensor()
    assert_same((module.freeze_()(*call).full_tensor(),), (want,))


def test_moves_and_copies():
    w = layer(t=1, d=256, f=128).w_down
    first, second = quantize_weight(w, "blockwise")
    assert first.to("cpu") is first
    moved = first.to("meta")
    assert moved.q.device.type == moved.scale.device.type == "meta" and moved.format == "blockwise"
    with pytest.raises(RuntimeError, match="^Quantized.to: device must be a device.*got torch.bfloat16$"):
        first.to(torch.bfloat16)
    at = first.q.data_ptr()
    other, _ = quantize_weight(w * 3, "blockwise")
    assert first.copy_(other) is first and first.q.data_ptr() == at
    assert_same((first.q, first.scale), (other.q, other.scale))
    for wrong, text in (
        (w, "other must be a Quantized, got Tensor"),
        (second, "transposed of other must be False, got True"),
        (quantize_weight(w, "rowwise")[0], "format of other must be 'blockwise', got 'rowwise'"),
        (quantize_weight(w[:1], "blockwise")[0], "q of other must be .*, got .*"),
    ):
        with pytest.raises(RuntimeError, match=f"^Quantized.copy_: {text}$"):
            first.copy_(wrong)


def test_parametrized_weights_are_not_frozen():
    experts = Experts(4, 64, 32)
    torch.nn.utils.parametrize.register_parametrization(experts, "down_proj", torch.nn.Identity())
    text = "^Experts.freeze_: down_proj must be a parameter of the module, got one that is computed; call torch.nn"
    with pytest.raises(RuntimeError, match=text):
        experts.freeze_()
    assert isinstance(experts.gate_up_proj, torch.nn.Parameter)
