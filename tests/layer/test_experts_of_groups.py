"""`experts_of_groups`, whose rows a dispatcher has sorted by expert, equals `experts` of the same slots."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from helpers import assert_same, check_cuda_graph
from torch import Tensor

from moe_fp8_ext import experts, experts_of_groups, quantize_weight

E, D, F = 4, 64, 48
RECIPES = ("bf16", "rowwise", "blockwise", "mxfp8")
SIZES = (37, 0, 5, 20)
P = sum(SIZES) + 3  # the last rows belong to no expert


def problem(device: str, activation: str = "swiglu", bias: bool = False) -> dict[str, Tensor | None]:
    g = torch.Generator().manual_seed(0)
    rows = 2 * F if activation.startswith("swiglu") else F

    def leaf(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(size, generator=g).to(device, dtype).requires_grad_()

    return {
        "x": leaf(P, D),
        "offs": torch.tensor(SIZES).cumsum(0).int().to(device),
        "scores": leaf(P, dtype=torch.float32),
        "w_gate_up": leaf(E, rows, D),
        "w_down": leaf(E, D, F),
        "b_gate_up": leaf(E, rows) if bias else None,
        "b_down": leaf(E, D) if bias else None,
    }


def leaves(of: dict[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: t for name, t in of.items() if isinstance(t, Tensor) and t.requires_grad}


def results(call, of: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """Returns the output and every gradient."""
    out = call(**of)
    # Computed, so that a graph contains it.
    dout = torch.arange(out.numel(), device=out.device).sin().view(out.shape).to(out.dtype)
    found = leaves(of)
    grads = torch.autograd.grad(out, list(found.values()), dout)
    return {"out": out.detach(), **dict(zip(found, grads, strict=True))}


def by_slots(offs: Tensor, x: Tensor, scores: Tensor | None, **rest: object) -> Tensor:
    """Calls `experts` with one slot a token. Rows behind the last group have no expert."""
    ids = torch.bucketize(torch.arange(P, device=x.device, dtype=torch.int32), offs, right=True)
    ids = torch.where(ids < E, ids, -1)[:, None]
    return experts(x, ids, x.new_ones(P, 1) if scores is None else scores[:, None], **rest)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "options",
    [{}, {"keep": "bf16"}, {"activation": "swiglu_oai", "interleaved": True, "bias": True}, {"activation": "relu2"}],
    ids=["plain", "keep", "bias", "relu2"],
)
def test_is_experts_of_one_slot_a_token(recipe, options, device):
    """With one slot a token, `experts` scales by groups and its sort keeps the order, so all bytes are equal."""
    options = dict(options)
    of = problem(device, options.get("activation", "swiglu"), options.pop("bias", False))
    got = results(partial(experts_of_groups, recipe=recipe, **options), of)
    want = results(partial(by_slots, recipe=recipe, **options), of)
    for name, value in want.items():
        assert_same(got[name], value, name)


@pytest.mark.parametrize("recipe", RECIPES)
def test_without_scores_they_are_ones(recipe, device):
    of = problem(device) | {"scores": None}
    got, want = (results(partial(call, recipe=recipe), of) for call in (experts_of_groups, by_slots))
    for name, value in want.items():
        assert_same(got[name], value, name)


def test_high_precision_wgrad(device):
    from moe_fp8_ext import Recipe

    recipe = Recipe("rowwise", wgrad_high_precision=True)
    got, want = (results(partial(call, recipe=recipe), problem(device)) for call in (experts_of_groups, by_slots))
    for name, value in want.items():
        assert_same(got[name], value, name)


@pytest.mark.parametrize("scored", [True, False])
def test_rows_of_no_expert_are_zero(scored, device):
    of = problem(device)
    of = of | {"scores": of["scores"] if scored else None}
    of["x"].data[sum(SIZES) :] = torch.nan
    if scored:
        of["scores"].data[sum(SIZES) :] = torch.inf
    got = results(experts_of_groups, of)
    assert not got["out"][sum(SIZES) :].any() and got["out"].isfinite().all()
    assert not got["x"][sum(SIZES) :].any()
    assert all(grad.isfinite().all() for grad in got.values())


@pytest.mark.usefixtures("unchecked")
def test_corrupt_offs_stay_in_bounds(device):
    of = problem(device)
    of["offs"] = torch.tensor([-5, 2**31 - 1, 3, P + 9], dtype=torch.int32, device=device)
    safe = of | {"offs": torch.tensor([0, P, P, P], dtype=torch.int32, device=device)}
    for got, want in zip(
        results(experts_of_groups, of).values(), results(experts_of_groups, safe).values(), strict=True
    ):
        assert_same(got, want)


def test_main_grads_and_quantized_weights(device):
    of = problem(device)
    want = results(experts_of_groups, of)
    totals = {name: torch.zeros_like(of[f"w_{name}"], dtype=torch.float32) for name in ("gate_up", "down")}
    pairs = {f"w_{name}": quantize_weight(of[f"w_{name}"].detach(), "rowwise", rounding="pow2") for name in totals}
    call = partial(experts_of_groups, **{f"main_grad_{name}": total for name, total in totals.items()})
    got = results(call, of | pairs)
    assert_same(got["out"], want["out"])
    for name, total in totals.items():
        assert_same(total.bfloat16(), want[f"w_{name}"], name)


@pytest.mark.parametrize("recipe", ["rowwise", "bf16"])
def test_compiles(recipe, device):
    of = problem(device, bias=True)
    want = results(partial(experts_of_groups, recipe=recipe), of)
    torch._dynamo.reset()
    compiled = torch.compile(
        partial(experts_of_groups, recipe=recipe), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for name, value in results(compiled, of).items():
        assert_same(value, want[name], name)


def test_cuda_graph(gpu):
    of = problem(gpu)
    weights = {name: of[name] for name in ("w_gate_up", "w_down")}

    def step(x: Tensor, scores: Tensor) -> tuple[Tensor, ...]:
        leaves = {"x": x.detach().requires_grad_(), "scores": scores.detach().requires_grad_()}
        return tuple(results(experts_of_groups, of | weights | leaves).values())

    other = torch.randn_like(of["x"].detach()), torch.randn_like(of["scores"].detach())
    check_cuda_graph(step, [of["x"].detach(), of["scores"].detach()], list(other))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"offs": torch.tensor([37, 5, 20])}, "offs must be int32, got torch.int64"),
        ({"offs": torch.tensor([37, 5, 20], dtype=torch.int32)}, "offs must have size 4 in dimension 0, got 3"),
        ({"scores": torch.rand(P - 1)}, f"scores must have size {P} in dimension 0 .the rows of x., got {P - 1}"),
        ({"scores": torch.rand(P, 2)}, "scores must have 1 dimension"),
        (
            {"x": torch.rand(P, D + 1)},
            f"x must have size|w_gate_up must have size {D + 1}|w_down must have size {D + 1}",
        ),
        ({"w_down": torch.rand(E, D, F + 1)}, "w_gate_up must have size"),
    ],
)
def test_errors_name_the_argument(change, text):
    with pytest.raises(RuntimeError, match=f"^experts_of_groups: ({text})"):
        experts_of_groups(**problem("cpu") | change)


def test_counts_for_offs_are_seen_with_validation(monkeypatch):
    """Sizes of groups in place of their ends are the usual mistake. Validation reports it."""
    monkeypatch.setenv("MOE_FP8_VALIDATE", "1")
    with pytest.raises(RuntimeError, match="^experts_of_groups: offs must"):
        experts_of_groups(**problem("cpu") | {"offs": torch.tensor(SIZES, dtype=torch.int32)})
