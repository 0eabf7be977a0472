"""moe_fp8_ext.stats: each number by hand, the operands of real calls, and that a step neither waits nor changes."""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from experts_problem import layer
from grouped_problem import Calls
from helpers import ROOT, blocks, counted_backend
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import moe_fp8_ext
from moe_fp8_ext import Experts, Recipe, grouped_mm, ops
from moe_fp8_ext.training import watch

FORMATS = "rowwise", "blockwise", "mxfp8"
UP, DOWN = "gate_up_proj", "down_proj"


class Product(nn.Module):
    """One grouped matmul."""

    def __init__(self, w: Tensor, recipe: str | Recipe = "rowwise") -> None:
        super().__init__()
        self.w, self.recipe = nn.Parameter(w), recipe

    def forward(self, x: Tensor, offs: Tensor, **gathered: object) -> Tensor:
        return grouped_mm(x, self.w.mT, offs, recipe=self.recipe, **gathered)


class Chain(nn.Sequential):
    """A module that passes all arguments on."""

    def forward(self, *call: object) -> Tensor:
        return self[0](*call)


def offs_of(*ends: int) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32)


def measured(model: nn.Module, *call: object, grad: Tensor | None = None, **options: object) -> dict[str, dict]:
    """The statistics of one forward and backward."""
    with moe_fp8_ext.stats(model) as stats:
        out = model(*call, **options)
        if grad is not None:
            out.backward(grad)
    return stats.to_dict()["layers"]


def problem(name: str | Recipe = "rowwise", **sizes: int) -> tuple[Experts, tuple[Tensor, Tensor, Tensor], Tensor]:
    """Experts, the arguments of a call, and the gradient of its output. The magnitudes of tokens span 24 octaves."""
    p = layer(**sizes)
    (e, n, d), f = p.w_gate_up.shape, p.w_down.shape[2]
    assert n == 2 * f
    experts = Experts(e, d, f, recipe=name, dtype=torch.bfloat16)
    with torch.no_grad():
        experts.gate_up_proj.copy_(p.w_gate_up)
        experts.down_proj.copy_(p.w_down)
    spread = torch.exp2(-24 * torch.rand(p.x.shape[0], 1)).bfloat16()
    return experts, (p.x.requires_grad_(), p.ids, p.scores), p.grad * spread


# ---- Every statistic by hand -----------------------------------------------------------------------------------------


def test_every_statistic_by_hand() -> None:
    """The multiplier of an amax of 448 is 1, of 2 it is 2^7, of 1 it is 2^8; E4M3 has multiples of 2^-9 near zero."""
    w = torch.tensor([[[1.0, 0, 0, 0], [0, 0, 1, 1]]])
    x = torch.tensor([[448, 1, 2**-11, 0], [2, 3 * 2**-18, 0, 0], [math.nan] * 4], requires_grad=True)
    grad = torch.tensor([[448, 2**-11], [2**-12, 1], [5, 5]])
    found = measured(Product(w), x, offs_of(2), grad=grad)["w"]
    tokens, weights, gradients = found["tokens"], found["weights"], found["gradients"]
    assert found["recipe"] == "rowwise" and found["tokens_per_expert"] == [2]
    # 2^-11 of the first row becomes 0; 3 * 2^-18 * 2^7 = 1.5 * 2^-10 becomes 2^-9, which stands for 2^-16.
    signal, noise = 448**2 + 1 + 2**-22 + 4 + 9 * 2**-36, 2**-22 + 2**-36
    assert tokens["underflow"] == pytest.approx(1 / 5) and tokens["saturated"] == 0
    assert tokens["amax"] == 448 and tokens["ratio"] == 448 * 2**11 and tokens["limit"] == 448 * 2**10
    assert tokens["sqnr"] == pytest.approx(10 * math.log10(signal / noise), abs=1e-4)
    # Along tokens the amaxes are 448, 1 and 2^-11: nothing underflows.
    assert tokens["wgrad_underflow"] == 0
    assert weights == dict(underflow=0, saturated=0, amax=1, ratio=448 / 256, limit=448 * 2**10, sqnr=math.inf)
    # Along rows 2^-11 beside 448 becomes 0, along tokens 2^-12 above 448.
    assert gradients["underflow"] == gradients["wgrad_underflow"] == pytest.approx(1 / 4)
    # y is [448, 2^-11] and [2, 0]; of the fp8 values, [448, 0] and [2, 0].
    assert found["product_sqnr"] == pytest.approx(10 * math.log10((448**2 + 4 + 2**-22) / 2**-22), abs=1e-4)


def test_saturation_by_hand() -> None:
    """With rounding "floor" amaxes in [448, 512) have the scale 1. 460 rounds to 448; 500 would round to 512."""
    x = torch.ones(1, 32)
    x[0, :4] = torch.tensor([500.0, 460, -511, 0])
    w = torch.ones(1, 32, 32)
    assert measured(Product(w, Recipe("mxfp8", rounding="floor")), x, offs_of(1))["w"]["tokens"][
        "saturated"
    ] == pytest.approx(2 / 31)
    assert measured(Product(w, "mxfp8"), x, offs_of(1))["w"]["tokens"]["saturated"] == 0


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [
        (torch.float8_e4m3fn, 448 * 2.0**10),
        (torch.float8_e5m2, 57344 * 2.0**17),
        (torch.float8_e4m3fnuz, 240 * 2.0**11),
        (torch.float8_e5m2fnuz, 57344 * 2.0**18),
    ],
)
def test_an_element_underflows_from_the_limit_on(dtype: torch.dtype, limit: float) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([[largest, largest / limit, 1], [largest, largest / limit * 1.01, 1]])
    found = measured(Product(torch.ones(1, 4, 3), Recipe("rowwise", dtype=dtype)), x, offs_of(2))["w"]["tokens"]
    assert found["limit"] == found["ratio"] == limit and found["underflow"] == pytest.approx(1 / 6)


@pytest.mark.parametrize(
    ("signal", "noise", "decibels"),
    [
        (10.0, 1.0, 20.0),
        (1.0, 0.0, math.inf),
        (0.0, 1.0, -math.inf),
        (1.0, math.inf, -math.inf),
        (math.inf, 1.0, math.inf),
    ],
)
def test_decibels_of_what_overflows(signal: float, noise: float, decibels: float) -> None:
    assert watch._product(signal, noise) == {"product_sqnr": decibels}
    for undefined in ((0.0, 0.0), (math.nan, math.nan), (math.inf, math.inf)):
        assert math.isnan(watch._product(*undefined)["product_sqnr"])


def test_no_number_without_a_value() -> None:
    found = measured(
        Product(torch.ones(2, 4, 4)), torch.zeros(3, 4, requires_grad=True), offs_of(0, 0), grad=torch.zeros(3, 4)
    )["w"]
    assert found["tokens_per_expert"] == [0, 0] and found["product_sqnr"] is None
    assert found["tokens"] | {"limit": None} == {
        **dict.fromkeys(("underflow", "saturated", "limit", "sqnr", "wgrad_underflow")),
        **dict(amax=0, ratio=0),
    }


# ---- The operands of real calls --------------------------------------------------------------------------------------


def check_along_rows(got: dict[str, float], x: Tensor, q: Tensor) -> None:
    """x: the source; q: the same, quantized and dequantized."""
    x, q = x.double(), q.double()
    noise = (x - q).square().sum()
    assert got["underflow"] == pytest.approx(float(((x != 0) & (q == 0)).sum() / (x != 0).sum()))
    assert got["amax"] == float(x.abs().max()) and got["saturated"] == 0
    assert got["sqnr"] == pytest.approx(float(10 * torch.log10(x.square().sum() / noise)), abs=1e-3)


def lost(x: Tensor, q: Tensor) -> float:
    """The share of nonzero elements of x that are zero in q, without knowing which are which."""
    return 1 - float((q.float() != 0).sum() / (x != 0).sum())


class Kept(TorchDispatchMode):
    """Keeps arguments and results of the last call of each of our ops with more than `rows` rows."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple[tuple, tuple]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls[func._opname] = args, out
        return out


@pytest.mark.parametrize("name", FORMATS)
def test_operands_of_a_layer(name: str) -> None:
    """All 450 slots are measured. The products read the same bytes."""
    experts, call, grad = problem(name)
    x, ids, _ = call
    with Kept() as kept:  # nothing is measured: these are the calls of a step
        experts(*call).backward(grad)
    da, h, activation, format, offs, scores, h_scale, indices, interleaved, align, *how = kept.calls[
        "quantize_activated_backward"
    ][0]
    _, _, dh_t, _, a_t, *_ = kept.calls["quantize_activated_backward"][1]
    found = measured(experts, *call, grad=grad)
    up, down = found[UP], found[DOWN]

    permutation, offs, _ = moe_fp8_ext.sort_tokens(ids, 8)
    assert up["tokens_per_expert"] == offs.diff(prepend=offs.new_zeros(1)).tolist() == down["tokens_per_expert"]
    slots = permutation.long() // ids.shape[1]
    rounding, amax = experts.options["recipe"].rounding, experts.options["recipe"].amax
    for got, t, gradient in ((up["tokens"], x.detach(), False), (down["gradients"], grad, True)):
        rows = moe_fp8_ext.quantize_rows(t, name, rounding=rounding)
        check_along_rows(got, t[slots], rows.dequantize(torch.float32)[slots])
        of_groups = "group" if amax == "square" and gradient else amax
        if amax == "batch":
            along = ops.quantize_both(
                t, name, offs=offs, indices=permutation, top_k=3, rounding=rounding, amax="batch"
            )[2]
        else:
            along = moe_fp8_ext.quantize_tokens(
                t, name, offs=offs, indices=permutation, top_k=3, rounding=rounding, amax=of_groups
            ).q
        assert got["wgrad_underflow"] == pytest.approx(lost(t[slots], along), abs=1e-6)
    dh, a, _ = ops.activate_backward(
        da, h, activation, scores=scores, h_scale=h_scale, format=format, indices=indices, interleaved=interleaved
    )
    assert up["gradients"]["wgrad_underflow"] == pytest.approx(lost(dh, dh_t), abs=1e-6)
    assert down["tokens"]["wgrad_underflow"] == pytest.approx(lost(a, a_t), abs=1e-6)
    assert up["gradients"]["wgrad_underflow"] > 0.1  # or the comparison says nothing
    check_along_rows(
        up["gradients"], dh, moe_fp8_ext.quantize_rows(dh, name, rounding=rounding).dequantize(torch.float32)
    )

    w = experts.gate_up_proj.detach()
    busiest = up["tokens_per_expert"].index(max(up["tokens_per_expert"]))
    w8 = moe_fp8_ext.quantize_weight(w, name, rounding=rounding)[0].dequantize(torch.float32)
    check_along_rows(up["weights"], w[busiest, :128], w8[busiest, :128])
    mine = slots[0 if busiest == 0 else offs[busiest - 1] : offs[busiest]]
    x8 = moe_fp8_ext.quantize_rows(x.detach(), name, rounding=rounding).dequantize(torch.float32)
    y, y8 = (t[mine].double() @ of[busiest, :128].double().mT for t, of in ((x.detach(), w), (x8, w8)))
    assert up["product_sqnr"] == pytest.approx(
        float(10 * torch.log10(y.square().sum() / (y - y8).square().sum())), abs=1e-3
    )


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("by_index", [False, True])
def test_operands_of_a_product(by_index: bool, name: str) -> None:
    x = torch.randn(96, 160) * torch.exp2(-20 * torch.rand(96, 1))
    offs = offs_of(10, 10, 70)
    gathered = dict(indices=torch.cat([torch.randperm(192)[:70], torch.full((20,), -1)]).int(), top_k=2)
    gathered = gathered if by_index else {}
    rows = ops.permute_pad(x, **gathered)[:70] if by_index else x[:70]
    model, grad = Product(torch.randn(3, 64, 160), name), torch.randn(90 if by_index else 96, 64) ** 9
    found = measured(model, x.clone().requires_grad_(), offs, grad=grad, **gathered)["w"]
    how = dict(rounding=Recipe(name).rounding)
    amax = Recipe(name).amax_of_groups
    along = moe_fp8_ext.quantize_tokens(rows, name, offs=offs, amax=amax, **how).q
    assert found["tokens"]["wgrad_underflow"] == pytest.approx(lost(rows, along), abs=1e-6) and lost(rows, along) > 0
    along = moe_fp8_ext.quantize_tokens(grad, name, offs=offs, **how).q
    assert found["gradients"]["wgrad_underflow"] == pytest.approx(lost(grad[:70], along), abs=1e-6)
    for got, t in ((found["tokens"], rows), (found["gradients"], grad[:70])):
        check_along_rows(got, t, moe_fp8_ext.quantize_rows(t, name, **how).dequantize(torch.float32))
    assert found["tokens_per_expert"] == [10, 0, 60]


def test_rows_are_spread_over_all_groups() -> None:
    rows = watch.Rows(watch.Groups(offs_of(1000, 1000, 4096)), 5000)
    assert rows.at.tolist() == list(range(0, 4096, 8)) and rows.exists.all()
    assert rows.expert.tolist() == [0] * 125 + [2] * 387


@pytest.mark.parametrize(
    ("recipe", "statistics"),
    [("bf16", set()), (Recipe("rowwise", wgrad_high_precision=True), {"tokens", "weights", "gradients"})],
)
def test_what_stays_in_bfloat16_is_not_measured(recipe: str | Recipe, statistics: set[str]) -> None:
    experts, call, grad = problem(recipe)
    for found in measured(experts, *call, grad=grad).values():
        assert statistics <= set(found) and all("wgrad_underflow" not in found[operand] for operand in statistics)
        assert len(found["tokens_per_expert"]) == 8 and ("tokens" in found) == bool(statistics)


@pytest.mark.parametrize("name", FORMATS)
def test_over_ranks_tokens_are_measured_before_they_travel(name: str, world_of_one: None) -> None:
    from moe_fp8_ext.distributed import ExpertParallel

    experts, call, grad = problem(name)
    want = measured(experts, *call, grad=grad)
    recipe = Recipe(name, amax="group")  # scales of the batch do not exist over ranks
    experts.options["recipe"] = recipe
    experts.ep = ExpertParallel(torch.distributed.group.WORLD, 8, 3, recipe=recipe, gradients="fp8")
    found = measured(experts, *call, grad=grad)
    assert "wgrad_underflow" not in found[UP]["tokens"] and "product_sqnr" not in found[UP]
    assert found[UP]["weights"] == want[UP]["weights"] and found[DOWN]["product_sqnr"] == want[DOWN]["product_sqnr"]
    for got, of in ((found[UP]["tokens"], want[UP]["tokens"]), (found[DOWN]["gradients"], want[DOWN]["gradients"])):
        shares = "underflow", "saturated", "amax", "ratio", "sqnr"  # of each token once, and not once a slot
        assert [got[key] for key in shares] == pytest.approx([of[key] for key in shares], rel=1e-4)


# ---- Steps -----------------------------------------------------------------------------------------------------------


class NoWait(TorchDispatchMode):
    """Refuses what waits for a device: reading a number, and results whose size depends on values."""

    WAITS = "_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "bincount"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func._opname not in self.WAITS, func
        if func._opname == "index":
            assert all(i is None or i.dtype != torch.bool for i in args[1]), "an index by a mask"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", FORMATS)
def test_a_sampled_step_waits_for_nothing(name: str) -> None:
    experts, call, grad = problem(name)
    product = Product(torch.randn(3, 64, 160), name)
    with NoWait(), moe_fp8_ext.stats(nn.ModuleList([experts, product])) as stats:
        experts(*call).backward(grad)
        product(torch.randn(64, 160, requires_grad=True), offs_of(10, 20, 64)).sum().backward()
    assert set(stats.to_dict()["layers"]) == {f"0.{UP}", f"0.{DOWN}", "1.w"}
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoWait():
        grad.sum().item()


def test_a_sampled_step_waits_for_no_gpu(gpu: str) -> None:
    experts, call, grad = problem()
    experts, call, grad = experts.to(gpu), [t.detach().to(gpu) for t in call], grad.to(gpu)
    with moe_fp8_ext.stats(experts) as stats:
        torch.cuda.set_sync_debug_mode("error")
        try:
            experts(call[0].requires_grad_(), *call[1:]).backward(grad)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert stats.to_dict()["layers"][UP]["gradients"]["wgrad_underflow"] > 0


def test_a_cuda_graph_measures_in_every_replay(gpu: str) -> None:
    model = Product(torch.randn(2, 64, 64)).to(gpu)
    x, offs = torch.ones(64, 64, device=gpu), offs_of(20, 64).to(gpu)
    with moe_fp8_ext.stats(model):  # a capture cannot initialize cuBLAS, which multiplies the sample
        model(x, offs)
    graph = torch.cuda.CUDAGraph()
    with moe_fp8_ext.stats(model) as stats, torch.cuda.graph(graph):
        model(x, offs)
    for largest in (3.0, 7.0):
        x[5, 5] = largest
        graph.replay()
        assert stats.to_dict()["layers"]["w"]["tokens"]["amax"] == largest


def names_of_calls(run: Callable[[], object]) -> list[str]:
    with Calls() as calls:
        run()
    return calls.names


def test_off_and_between_samples_nothing_is_called() -> None:
    experts, call, grad = problem()

    def run() -> None:
        experts(*call).backward(grad)

    off = names_of_calls(run)
    with moe_fp8_ext.stats(experts, every=2) as stats:
        sampled = names_of_calls(run)
        stats.step()
        assert names_of_calls(run) == off
    assert len(sampled) > len(off) and names_of_calls(run) == off


def test_results_do_not_change() -> None:
    experts, call, grad = problem()
    found = []
    for on in (contextlib.nullcontext(), moe_fp8_ext.stats(experts)):
        experts.zero_grad()
        call[0].grad = None
        with on:
            out = experts(*call)
            out.backward(grad)
        found.append([out.detach(), call[0].grad, *(p.grad for p in experts.parameters())])
    assert on.sampled == 0
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_backward_may_run_in_another_thread() -> None:
    experts, call, grad = problem()
    want = measured(experts, *call, grad=grad)
    with moe_fp8_ext.stats(experts) as stats:
        thread = threading.Thread(target=experts(*call).backward, args=(grad,))
        thread.start()
        thread.join()
    assert stats.to_dict()["layers"] == want


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_changes_nothing(use_reentrant: bool) -> None:
    experts, call, grad = problem()
    want = measured(experts, *call, grad=grad)
    with moe_fp8_ext.stats(experts) as stats:
        checkpoint(experts, *call, use_reentrant=use_reentrant).backward(grad)
    assert stats.to_dict()["layers"] == want


def test_samples() -> None:
    """A sample has the values of its last call alone, and weights are other rows each time."""
    w = torch.zeros(1, 192, 32)
    w[:, :128], w[:, 128:] = 1, 2
    model = Product(w)
    with moe_fp8_ext.stats(model, every=3) as stats:
        for step in range(5):
            for micro_batch in (1, 2):
                model(torch.full((4, 32), step * 10.0 + micro_batch), offs_of(4))
            found = stats.to_dict()
            sampled = step // 3 * 3
            assert found["step"] == stats.sampled == sampled
            assert found["layers"]["w"]["tokens"]["amax"] == sampled * 10 + 2
            assert found["layers"]["w"]["weights"]["amax"] == 1 + sampled // 3
            stats.step()


def test_which_calls_are_measured() -> None:
    one, other = (Product(torch.randn(2, 32, 32)) for _ in range(2))
    call = torch.randn(8, 32), offs_of(3, 8)
    with moe_fp8_ext.stats(nn.Sequential(one)) as of_one, moe_fp8_ext.stats(other) as of_other:
        one(*call)
        assert set(of_one.to_dict()["layers"]) == {"0.w"} and of_other.to_dict() == {"step": None, "layers": {}}
        other(*call)
        grouped_mm(call[0], torch.randn(2, 32, 32), call[1])
        assert set(of_one.to_dict()["layers"]) == {"0.w"} and set(of_other.to_dict()["layers"]) == {"w"}
    one(torch.zeros(8, 32), call[1])
    assert of_one.to_dict()["layers"]["0.w"]["tokens"]["amax"] > 0


def test_weights_that_fsdp_gathers(world_of_one: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    for gather in (False, True):
        model = fully_shard(Chain(Product(torch.randn(2, 32, 32))), mesh=mesh)
        if gather:
            moe_fp8_ext.gather_in_fp8_(model, "rowwise")
        found = measured(model, torch.randn(8, 32, requires_grad=True), offs_of(3, 8), grad=torch.ones(8, 32))
        assert ("weights" in found["0.w"], "product_sqnr" in found["0.w"]) == (not gather, not gather)
        assert {"tokens", "gradients"} <= set(found["0.w"])


def test_compiled_calls_are_not_measured() -> None:
    """There is one graph, whether statistics are on or off. Eager calls of the same model are measured."""
    model, frames = Product(torch.randn(2, 32, 32)), counted_backend("cpu")
    compiled = torch.compile(model, fullgraph=True, backend=frames)
    call = torch.randn(8, 32), offs_of(3, 8)
    for _ in range(2):
        compiled(*call)
        with moe_fp8_ext.stats(model) as stats:
            compiled(*call)
            assert stats.to_dict()["layers"] == {}
            with torch.compiler.set_stance("force_eager"):
                compiled(*call)
            assert set(stats.to_dict()["layers"]) == {"w"}
    assert frames.frame_count == 1


# ---- Reading ---------------------------------------------------------------------------------------------------------


class Writer:
    def __init__(self) -> None:
        self.found: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, number: float, step: int) -> None:
        self.found.append((name, number, step))


def test_write_and_print() -> None:
    experts, call, grad = problem()
    writer = Writer()
    with moe_fp8_ext.stats(nn.ModuleDict({"moe": experts}), every=2) as stats:
        for step in range(4):
            experts(*call).backward(grad)
            stats.step()
            stats.write(writer, step)
            stats.write(writer, step)
    found = stats.to_dict()["layers"]
    sizes = found[f"moe.{UP}"]["tokens_per_expert"]
    numbers = {name: (number, step) for name, number, step in writer.found}
    assert len(writer.found) == 2 * len(numbers) and {step for *_, step in writer.found} == {0, 2}
    assert numbers[f"fp8/moe.{UP}/load"] == (max(sizes) / (sum(sizes) / len(sizes)), 2)
    assert numbers[f"fp8/moe.{DOWN}/gradients/underflow"][0] == found[f"moe.{DOWN}"]["gradients"]["underflow"]
    lines = str(stats).splitlines()
    assert lines[0] == "fp8 statistics of step 2"
    assert lines[2] == f"moe.{UP}: rowwise, {min(sizes)} to {max(sizes)} tokens an expert"
    assert [line.split()[0] for line in lines[3:7]] == ["tokens", "weights", "gradients", "product"]
    assert len(lines) == 12 and lines[3].split()[5:7] == [
        f"2^{math.log2(found[f'moe.{UP}']['tokens']['ratio']):.1f}",
        "2^18.8",
    ]


def test_nothing_measured() -> None:
    with moe_fp8_ext.stats(nn.Linear(2, 2)) as stats:
        stats.step()
    assert str(stats).startswith("fp8 statistics: nothing was measured; no step was sampled yet, no experts")


def test_frozen_weights_are_not_measured() -> None:
    experts, call, _ = problem()
    with moe_fp8_ext.stats(experts.freeze_()) as stats:
        experts(*call)
    assert "or their weights were quantized already, as freeze_" in str(stats)


def test_reading_is_one_copy() -> None:
    experts, call, grad = problem()
    with moe_fp8_ext.stats(experts) as stats:
        experts(*call).backward(grad)

    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func._opname in ("_local_scalar_dense", "cat")
            return func(*args, **(kwargs or {}))

    with Reads() as reads:
        stats.to_dict()
    assert reads.count == 1


def test_errors() -> None:
    with pytest.raises(TypeError, match="stats: model must be a torch.nn.Module, got int"):
        moe_fp8_ext.stats(3)
    for every, got in ((0, "at least 1, got 0"), (1.5, "an int, got float"), (True, "an int, got bool")):
        with pytest.raises(RuntimeError, match=f"stats: every must be {got}"):
            moe_fp8_ext.stats(nn.Identity(), every)


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The page shows what its example prints, up to the numbers, which random values of torch decide."""
    (block,) = blocks("docs/stats.md")
    exec(block, {})
    printed = capsys.readouterr().out
    shown = blocks("docs/stats.md", language="")[0]
    assert [line.split()[0] for line in printed.splitlines()] == [line.split()[0] for line in shown.splitlines()]


@pytest.mark.parametrize("name", ["stats", "underflow"])
def test_bench(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The programs of the page run to the end, on less."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    program, picture = importlib.import_module(name), tmp_path / "picture.png"
    if name == "underflow":
        pytest.importorskip("matplotlib", reason="the bench's dependencies are not installed")
        monkeypatch.setattr(program, "STEPS", 2)
        monkeypatch.setattr(program, "EVERY", 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *(["--out", str(picture)] if name == "underflow" else [])])
    program.main()
    assert picture.exists() or "small, rowwise: " in capsys.readouterr().out
