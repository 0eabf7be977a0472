"""Tokens that arrive quantized. They are multiplied as they are, and a stand-in gets their gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from helpers import assert_same, check_cuda_graph
from torch import Tensor, nn

from moe_fp8_ext import Quantized, Recipe, experts, experts_of_groups, quantize_rows, stats
from moe_fp8_ext.distributed import ExpertParallel

E, D, F, TOP_K = 4, 160, 48, 2
SIZES = (37, 0, 5, 20)
LAST = sum(SIZES)
P = LAST + 3  # the last rows belong to no expert
# With these, the casts of dequantized values give the same values: every scale is a power of two.
POW2 = (
    Recipe("rowwise"),
    Recipe("rowwise", wgrad_high_precision=True),
    Recipe("blockwise", rounding="pow2"),
    Recipe("mxfp8"),
)
OF_GROUPS, BY_INDEX = "groups", "index"
BOTH = pytest.mark.parametrize("way", [OF_GROUPS, BY_INDEX])


def leaf(g: torch.Generator, *size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(size, generator=g).to(dtype)


def problem(device: str) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    tensors = dict(x=leaf(g, P, D), w_gate_up=leaf(g, E, 2 * F, D), w_down=leaf(g, E, D, F))
    return {name: t.to(device) for name, t in tensors.items()}


@functools.cache  # a captured graph must not copy from the host
def routing(way: str, device: str) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    if way == OF_GROUPS:
        return torch.tensor(SIZES).cumsum(0).int().to(device), torch.rand(P, generator=g).to(device)
    ids = torch.rand(P, E, generator=g).topk(TOP_K).indices
    ids[:2] = -1
    return ids.to(device), torch.rand(P, TOP_K, generator=g).to(device)


def rows_of(x: Tensor, way: str, recipe: Recipe) -> Quantized:
    offs = routing(way, x.device)[0] if way == OF_GROUPS else None
    return quantize_rows(x, recipe.format, offs=offs, rounding=recipe.rounding)


def run(way: str, x: Tensor | Quantized, recipe: Recipe, of: dict[str, Tensor], **options: object) -> dict[str, Tensor]:
    """Returns the output and all gradients. A quantized x gets its gradient by a stand-in of one element."""
    device = of["w_down"].device
    place, scores = routing(way, device)
    one = torch.full((), torch.nan, dtype=torch.bfloat16, device=device)
    tokens = x.clone() if isinstance(x, Tensor) else one.expand(x.q.shape)
    leaves = {
        "x": tokens,
        "scores": scores.clone(),
        "w_gate_up": of["w_gate_up"].clone(),
        "w_down": of["w_down"].clone(),
    }
    tokens, scores, *weights = (t.requires_grad_() for t in leaves.values())
    named = {} if isinstance(x, Tensor) else {"stand_in": tokens}
    call = experts_of_groups if way == OF_GROUPS else experts
    with torch.enable_grad():
        out = call(tokens if isinstance(x, Tensor) else x, place, scores, *weights, recipe=recipe, **named, **options)
    dout = torch.arange(out.numel(), device=device).sin().view(out.shape).to(out.dtype)
    return {
        "out": out.detach(),
        **dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), dout), strict=True)),
    }


def by_groups(recipe: Recipe) -> Recipe:
    """The recipe for quantized tokens, whose scales belong to rows and groups, never to the batch."""
    return replace(recipe, amax="group") if recipe.amax == "batch" else recipe


@BOTH
@pytest.mark.parametrize("recipe", POW2, ids=str)
@pytest.mark.parametrize("keep", ["fp8", "bf16"])
def test_equals_tensors_of_the_same_values(way, recipe, keep, device):
    of = problem(device)
    rows = rows_of(of["x"], way, recipe)
    values = rows.dequantize()
    assert values.isfinite().all() and not values.equal(of["x"])
    got, want = (run(way, x, by_groups(recipe), of, keep=keep) for x in (rows, values))
    for name, value in want.items():
        assert_same(got[name], value, name)
        assert value.any()


@BOTH
@pytest.mark.parametrize("recipe", [Recipe("rowwise", rounding="exact"), Recipe("blockwise"), Recipe("mxfp8")], ids=str)
def test_equals_the_tensor_before_its_cast(way, recipe, device):
    """With any rounding of scales, everything but the gradient of w_gate_up equals the result for the tensor before the
    sender's cast. That gradient reads values that were cast twice: the second cast adds 2^-4 of a value at most."""
    of, recipe = problem(device), by_groups(recipe)
    got, want = run(way, rows_of(of["x"], way, recipe), recipe, of), run(way, of["x"], recipe, of)
    for name in ("out", "x", "scores", "w_down"):
        assert_same(got[name], want[name], name)
    assert (got["w_gate_up"] - want["w_gate_up"]).float().norm() < 2**-4 * want["w_gate_up"].float().norm()


@BOTH
def test_equals_expert_parallelism(way, world_of_one):
    """Tokens that travelled through `ExpertParallel` are cast for the gradient of weights in the same way."""
    of, recipe = problem("cpu"), Recipe("blockwise")
    place, scores = routing(way, "cpu")
    ids = place if way == BY_INDEX else (torch.arange(P)[:, None] >= place).sum(1, keepdim=True)
    ids, scores = torch.where(ids < E, ids, -1), scores.view(ids.shape)
    leaves = {n: t.clone().requires_grad_() for n, t in (of | {"scores": scores}).items()}
    ep = ExpertParallel(dist.group.WORLD, E, ids.shape[1], recipe=recipe)
    out = ep.experts(leaves["x"], ids, leaves["scores"], leaves["w_gate_up"], leaves["w_down"])
    out.backward(torch.arange(out.numel()).sin().view(out.shape).to(out.dtype))
    got = run(way, rows_of(of["x"], way, recipe), recipe, of)
    assert_same(got.pop("out"), out.detach(), "out")
    for name, value in got.items():
        assert_same(value, leaves[name].grad.view(value.shape), name)


@BOTH
def test_scales_of_mxfp8_may_be_row_major(way, device):
    """A message has the scales of a row side by side."""
    of, recipe = problem(device), Recipe("mxfp8")
    sent = quantize_rows(of["x"], "mxfp8_rowmajor")
    got, want = (run(way, rows, recipe, of) for rows in (sent, rows_of(of["x"], way, recipe)))
    for name, value in want.items():
        assert_same(got[name], value, name)


@BOTH
def test_scales_of_blocks_may_lie_in_any_way(way, device):
    """DeepEP's received scales are [N, D / 128] and contiguous. `quantize_rows` aligns columns; a clone does not."""
    of, recipe = problem(device), Recipe("blockwise")
    rows = rows_of(of["x"], way, recipe)
    assert not rows.scale.is_contiguous()
    want = run(way, rows, recipe, of)
    for scale in (rows.scale.contiguous(), rows.scale.mT.contiguous().mT):
        got = run(way, replace(rows, scale=scale, offs=None, rounding=None), recipe, of)
        for name, value in want.items():
            assert_same(got[name], value, name)


@pytest.mark.parametrize("recipe", POW2, ids=str)
def test_rows_of_no_expert_are_not_read(recipe, device):
    of = problem(device)
    rows = quantize_rows(of["x"], "mxfp8_rowmajor" if recipe.format == "mxfp8" else recipe.format)
    want = run(OF_GROUPS, rows, recipe, of)
    rows.q.view(torch.uint8)[LAST:] = 0x7F  # NaN
    of_bytes = rows.scale.dtype == torch.float8_e8m0fnu
    (rows.scale.view(torch.uint8) if of_bytes else rows.scale)[LAST:] = 0xFF if of_bytes else torch.nan
    for name, value in run(OF_GROUPS, rows, recipe, of).items():
        assert_same(value, want[name], name)
    assert not want["out"][LAST:].any() and not want["x"][LAST:].any()


@pytest.mark.parametrize("recipe", POW2[:2], ids=str)
def test_adapters(recipe, device):
    of = problem(device)
    g = torch.Generator().manual_seed(2)
    A, B = (leaf(g, E, *size).to(device) for size in ((8, D), (2 * F, 8)))
    rows, found = rows_of(of["x"], OF_GROUPS, recipe), []
    for x in (rows, rows.dequantize()):
        factors = [t.clone().requires_grad_() for t in (A, B)]
        stand_in = torch.zeros(P, D, dtype=torch.bfloat16, device=device).requires_grad_()
        offs, scores = routing(OF_GROUPS, device)
        named = dict(stand_in=stand_in) if isinstance(x, Quantized) else {}
        x = x if isinstance(x, Quantized) else x.clone().requires_grad_()
        how = dict(recipe=recipe, lora_gate_up=(*factors, 0.5))
        out = experts_of_groups(x, offs, scores, of["w_gate_up"], of["w_down"], **how, **named)
        got = torch.autograd.grad(out.float().square().sum(), [*factors, named.get("stand_in", x)])
        found.append([out.detach(), *got])
    assert_same(*found)
    assert all(t.any() for t in found[0])


@pytest.mark.parametrize("name", ["lora_gate_up", "lora_down"])
def test_adapters_of_gate_up_multiply_rounded_tokens(name, world_of_one):
    """In BF16 they would multiply tokens before the cast. With `wgrad_high_precision`, tokens travel in BF16."""
    of, recipe, g = problem("cpu"), Recipe("blockwise"), torch.Generator().manual_seed(2)
    n, k = (2 * F, D) if name == "lora_gate_up" else (D, F)
    adapter = {name: (leaf(g, E, 4, k), leaf(g, E, n, 4), 1.0)}
    rows = rows_of(of["x"], BY_INDEX, recipe)
    got, want = (run(BY_INDEX, x, recipe, of, **adapter)["out"] for x in (rows, of["x"]))
    assert got.equal(want) == (name == "lora_down")
    for high in (False, True):
        ep = ExpertParallel(dist.group.WORLD, E, TOP_K, recipe=replace(recipe, wgrad_high_precision=high))
        out = ep.experts(of["x"], *routing(BY_INDEX, "cpu"), of["w_gate_up"], of["w_down"], **adapter)
        assert out.equal(want) == (high or name == "lora_down")


def test_gradient_goes_where_a_dispatcher_wants_it(device):
    """The Function of a dispatcher returns received rows and a stand-in, and gets the gradient of the stand-in."""
    of, sent_back = problem(device), []

    class Dispatch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            rows = quantize_rows(x, "rowwise", rounding="pow2")
            ctx.mark_non_differentiable(rows.q, rows.scale)
            return rows.q, rows.scale, x.new_empty(()).expand(x.shape)

        @staticmethod
        def backward(ctx, dq: None, dscale: None, drows: Tensor) -> Tensor:
            sent_back.append(drows)
            return drows

    x = of["x"].float().requires_grad_()
    offs, scores = routing(OF_GROUPS, device)
    q, scale, stand_in = Dispatch.apply(x)
    rows = Quantized(q, scale, "rowwise", rounding="pow2")
    out = experts_of_groups(rows, offs, scores, of["w_gate_up"], of["w_down"], stand_in=stand_in)
    assert out.dtype == torch.float32  # of the stand-in
    dout = torch.arange(out.numel(), device=device).sin().view(out.shape)
    out.backward(dout)
    y = x.detach().requires_grad_()
    experts_of_groups(y, offs, scores, of["w_gate_up"], of["w_down"]).backward(dout)
    assert_same(x.grad, y.grad)
    assert len(sent_back) == 1


def test_without_a_stand_in(device):
    """x needs no gradient, and out is bfloat16. A frozen layer builds no graph."""
    of = problem(device)
    offs, scores = routing(OF_GROUPS, device)
    rows, weights = rows_of(of["x"], OF_GROUPS, POW2[0]), [of["w_gate_up"], of["w_down"]]
    want = experts_of_groups(of["x"], offs, scores, *weights)
    assert_same(experts_of_groups(rows, offs, scores, *weights), want)
    trained = [w.clone().requires_grad_() for w in weights]
    experts_of_groups(rows, offs, scores, *trained).sum().backward()
    assert all(w.grad.any() for w in trained)


def test_auto_keeps_its_format(device):
    of = problem(device)
    recipe = Recipe("rowwise")
    got = run(OF_GROUPS, rows_of(of["x"], OF_GROUPS, recipe), Recipe("auto"), of)
    want = run(OF_GROUPS, rows_of(of["x"], OF_GROUPS, recipe), recipe, of)
    assert_same([*got.values()], [*want.values()])


def test_autocast_leaves_the_stand_in(device):
    of = problem(device)
    rows = rows_of(of["x"], OF_GROUPS, POW2[0])
    want = run(OF_GROUPS, rows, POW2[0], of)
    with torch.autocast(device, torch.bfloat16):
        got = run(OF_GROUPS, rows, POW2[0], {n: t.float() for n, t in of.items()})
    assert_same(got["out"], want["out"])


def test_statistics_leave_out_what_is_not_known():
    of, recipe = problem("cpu"), POW2[0]
    weights = nn.ParameterDict({name: nn.Parameter(of[name]) for name in ("w_gate_up", "w_down")})
    offs, scores = routing(OF_GROUPS, "cpu")
    found = []
    for x in (of["x"], rows_of(of["x"], OF_GROUPS, recipe)):
        with stats(weights) as sampled:
            experts_of_groups(x, offs, scores, weights["w_gate_up"], weights["w_down"]).float().sum().backward()
        found.append(sampled.to_dict()["layers"])
    want, got = found
    assert "tokens" in want["w_gate_up"] and "tokens" not in got["w_gate_up"]
    for statistic in ("weights", "tokens_per_expert"):
        assert got["w_gate_up"][statistic] == want["w_gate_up"][statistic]
    assert got["w_down"] == want["w_down"]


def test_compiles(device):
    of, recipe = problem(device), POW2[0]
    rows, (offs, scores) = rows_of(of["x"], OF_GROUPS, recipe), routing(OF_GROUPS, device)

    def step(q: Tensor, scale: Tensor, stand_in: Tensor, *weights: Tensor) -> Tensor:
        x = Quantized(q, scale, "rowwise", rounding="pow2")
        return experts_of_groups(x, offs, scores, *weights, recipe=recipe, stand_in=stand_in)

    def results(step: Callable) -> list[Tensor]:
        stand_in = torch.zeros(P, D, dtype=torch.bfloat16, device=device)
        leaves = [t.clone().requires_grad_() for t in (stand_in, of["w_gate_up"], of["w_down"])]
        out = step(rows.q, rows.scale, *leaves)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]

    torch._dynamo.reset()
    assert_same(results(torch.compile(step, fullgraph=True, backend="aot_eager")), results(step))


@BOTH
def test_cuda_graph(way, gpu):
    of, recipe = problem(gpu), by_groups(POW2[2])

    def step(q: Tensor, scale: Tensor) -> list[Tensor]:
        return [*run(way, Quantized(q, scale, "blockwise", rounding="pow2"), recipe, of).values()]

    first, later = (rows_of(x, way, recipe) for x in (of["x"], -2 * of["x"].flip(0)))
    check_cuda_graph(step, [first.q, first.scale], [later.q, later.scale])


def changed(rows: Quantized, **fields: object) -> Quantized:
    return replace(rows, **fields)


@pytest.mark.parametrize(
    ("recipe", "change", "options", "text"),
    [
        ("bf16", {}, {}, r"x must be a tensor with recipe 'bf16', got a Quantized; pass x.dequantize\(\)"),
        ("blockwise", {}, {}, "x must be of the recipe's format 'blockwise', got 'rowwise'"),
        ("rowwise", {"along": "tokens"}, {}, "x must be quantized along rows, got tokens"),
        ("rowwise", {"q": torch.zeros(2, P, D).to(torch.float8_e4m3fn)}, {}, "q of x must have 2 dimensions, got 3"),
        ("rowwise", {"q": torch.zeros(P, D).byte()}, {}, "q of x must be float8_e4m3fn.*, got torch.uint8"),
        ("rowwise", {"scale": torch.zeros(P, 2)}, {}, "scale of x must have"),
        ("rowwise", {"scale": torch.zeros(P - 1)}, {}, f"scale of x must have .*{P}.*, got .*{P - 1}"),
        ("rowwise", {"scale": torch.zeros(P).double()}, {}, "scale of x must be float32, got torch.float64"),
        ("rowwise", {"scale": torch.zeros(P, device="meta")}, {}, "scale of x must be on the device of its q, cpu"),
        ("rowwise", {"offs": torch.tensor([P] * 4)}, {}, r"x must be quantized for offs, with groups that end at \[37"),
        ("rowwise", {}, {"stand_in": torch.zeros(P, D + 1)}, r"stand_in must have the shape of x, \[65, 160\], got"),
        ("rowwise", {}, {"stand_in": torch.zeros(P, D).long()}, "stand_in must be bfloat16, float16 or float32, got"),
        ("rowwise", {}, {"stand_in": torch.zeros(P, D, device="meta")}, "stand_in must be on the device of x, cpu"),
    ],
)
def test_errors_name_the_argument(recipe, change, options, text):
    of = problem("cpu")
    rows = changed(quantize_rows(of["x"], "rowwise"), **change)
    with pytest.raises(RuntimeError, match=f"^experts_of_groups: {text}"):
        weights = of["w_gate_up"], of["w_down"]
        experts_of_groups(rows, *routing(OF_GROUPS, "cpu"), *weights, recipe=recipe, **options)


def test_a_tensor_has_no_stand_in():
    of = problem("cpu")
    with pytest.raises(RuntimeError, match="^experts: stand_in must be None where x is a tensor"):
        experts(of["x"], *routing(BY_INDEX, "cpu"), of["w_gate_up"], of["w_down"], stand_in=of["x"])


@pytest.mark.parametrize(
    ("call", "offs", "text"),
    [
        (
            experts_of_groups,
            False,
            "x must be quantized for offs, by whose groups its scales are blocked, got one without",
        ),
        (experts, True, "x must be quantized without offs, got one with offs"),
    ],
)
def test_blocked_scales_of_other_groups(call, offs, text):
    of = problem("cpu")
    way = OF_GROUPS if call is experts_of_groups else BY_INDEX
    rows = quantize_rows(of["x"], "mxfp8", offs=routing(OF_GROUPS, "cpu")[0] if offs else None)
    with pytest.raises(RuntimeError, match=text):
        call(rows, *routing(way, "cpu"), of["w_gate_up"], of["w_down"], recipe="mxfp8")


def test_expert_parallelism_quantizes_itself(world_of_one):
    of = problem("cpu")
    ep = ExpertParallel(dist.group.WORLD, E, TOP_K)
    with pytest.raises(RuntimeError, match="x must be a tensor, got Quantized"):
        ep.experts(quantize_rows(of["x"], "rowwise"), *routing(BY_INDEX, "cpu"), of["w_gate_up"], of["w_down"])
