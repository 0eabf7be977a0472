"""Delayed gradients of weights: the bytes of a backward that computes them itself, in every way to run a backward."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable

import pytest
import torch
from helpers import assert_same, assert_same_tensor
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from moe_fp8_ext import (
    DelayedWgrads,
    Experts,
    MoE,
    Recipe,
    Router,
    _torch,
    experts,
    experts_of_groups,
    gather_in_fp8_,
    ops,
    quantize_weight,
    reuse_weights,
)
from moe_fp8_ext.layer.experts import layer_call
from moe_fp8_ext.layer.node import LayerFunction
from moe_fp8_ext.layer.source import Chunk, RoutedTokens
from moe_fp8_ext.quantization.prepare import Operand

E, D, F, T, TOP_K = 4, 32, 24, 30, 2
RECIPES = pytest.mark.parametrize(
    "recipe", [*map(Recipe, ("bf16", "rowwise", "blockwise", "mxfp8")), Recipe(wgrad_high_precision=True)], ids=str
)


def weights(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    sizes = dict(w_gate_up=(E, 2 * F, D), w_down=(E, D, F), b_gate_up=(E, 2 * F), b_down=(E, D))
    return {name: torch.randn(*size, generator=g).to(dtype).requires_grad_() for name, size in sizes.items()}


def of_experts(step: int, of: dict[str, Tensor], **options: object) -> list[Tensor]:
    """A forward and a backward. Returns the output and the gradients of tokens and scores."""
    g = torch.Generator().manual_seed(1 + step)
    x, grad = (torch.randn(T, D, generator=g).bfloat16() for _ in range(2))
    scores = torch.rand(T, TOP_K, generator=g).requires_grad_()
    ids = torch.rand(T, E - 1, generator=g).topk(TOP_K).indices  # the last expert has no tokens
    out = experts(x.requires_grad_(), ids, scores, **of, **options)
    out.backward(grad)
    return [out.detach(), x.grad, scores.grad]


def of_groups(step: int, of: dict[str, Tensor], **options: object) -> list[Tensor]:
    g = torch.Generator().manual_seed(1 + step)
    x, grad = (torch.randn(T, D, generator=g).bfloat16() for _ in range(2))
    offs = torch.tensor([9 + step, 9 + step, 28, 28], dtype=torch.int32)
    out = experts_of_groups(x.requires_grad_(), offs, None, **of, **options)
    out.backward(grad)
    return [out.detach(), x.grad]


@RECIPES
@pytest.mark.parametrize("call", [of_experts, of_groups])
@pytest.mark.parametrize("main_grad", [False, True])
def test_the_same_bytes(call, main_grad, recipe):
    """Two backwards wait. Each `backward_dw` computes the older one."""
    found = []
    for delayed in (None, DelayedWgrads()):
        of = weights()
        names = ("w_gate_up", "w_down")
        sums = {f"main_grad_{n[2:]}": torch.zeros(of[n].shape) for n in names} if main_grad else {}
        seen = []
        for step in range(2):
            seen += call(step, of, recipe=recipe, delay_wgrad=delayed, **sums)
            if delayed is None:
                seen += [t.clone() for t in sums.values()] or [of[n].grad.clone() for n in names]
        if delayed is not None:
            assert delayed.waiting == 2
            assert not any(t.any() for t in sums.values()) and all(of[n].grad is None for n in names)
            later = []
            for _ in range(2):
                delayed.backward_dw()
                later += [t.clone() for t in sums.values()] or [of[n].grad.clone() for n in names]
            half = len(seen) // 2
            seen = seen[:half] + later[:2] + seen[half:] + later[2:]
            assert delayed.waiting == delayed.nbytes == 0
            assert main_grad or all(of[n].grad.is_contiguous() for n in names)
        found.append([*seen, of["b_gate_up"].grad, of["b_down"].grad])
    assert_same(found[1], found[0])


def test_one_is_frozen_and_the_other_transposed():
    found = []
    for delayed in (None, DelayedWgrads()):
        of = weights(torch.float32)
        of["w_gate_up"].requires_grad_(False)
        leaf = of["w_down"] = of["w_down"].detach().mT.contiguous().mT.requires_grad_()
        of_experts(0, of, delay_wgrad=delayed)
        if delayed is not None:
            delayed.backward_dw()
        assert leaf.grad.stride() == leaf.stride() and leaf.grad.dtype == torch.float32
        assert of["w_gate_up"].grad is None
        found.append(leaf.grad)
    assert_same_tensor(found[1], found[0], "w_down")


def test_memory_of_what_waits():
    """Of dy, a, dh and x along tokens: values, scales, and the ends of groups, which pairs of them may share."""
    delayed = DelayedWgrads()
    assert repr(delayed) == "DelayedWgrads(waiting=0, nbytes=0)"
    of_groups(0, weights(), recipe="rowwise", delay_wgrad=delayed)
    offs = torch.tensor([9, 9, 28, 28], dtype=torch.int32)
    made = [ops.quantize_tokens(torch.zeros(T, width).bfloat16(), "rowwise", offs=offs) for width in (D, F, 2 * F, D)]
    most, one = sum(t.nbytes for operand in made for t in operand), delayed.nbytes
    assert most - 3 * made[0][2].nbytes <= one <= most
    of_groups(0, weights(), recipe="rowwise", delay_wgrad=delayed)
    assert repr(delayed) == f"DelayedWgrads(waiting=2, nbytes={2 * one})"


class Halves(RoutedTokens):
    """Tokens in two chunks, as `ExpertParallel` has them."""

    def chunks(self, x: Tensor, scores: Tensor) -> Iterable[Chunk]:
        halves = zip(self.ids.chunk(2), x.chunk(2), scores.chunk(2), strict=True)
        return [RoutedTokens(ids, E).chunks(x, scores)[0] for ids, x, scores in halves]

    def gradient_chunks(self, dout: Tensor) -> Iterable[Operand]:
        return [Operand(half.contiguous()) for half in dout.chunk(2)]

    def collect(self, given_back: list[Tensor]) -> Tensor:
        return torch.cat(given_back)

    def static(self) -> Halves:
        return self


@pytest.mark.parametrize("main_grad", [False, True])
def test_chunks_are_one_backward(main_grad):
    found = []
    for delayed in (None, DelayedWgrads()):
        of = weights()
        names = "w_gate_up", "w_down"
        totals = {name.replace("w_", "main_grad_"): torch.full(of[name].shape, 3.0) for name in names if main_grad}
        g = torch.Generator().manual_seed(1)
        x, scores = torch.randn(T, D, generator=g).bfloat16().requires_grad_(), torch.rand(T, TOP_K, generator=g)
        ids = torch.rand(T, E, generator=g).topk(TOP_K).indices
        call, *inputs = layer_call("experts", x, ids, scores, **of, **totals, recipe="rowwise", delay_wgrad=delayed)
        LayerFunction.apply(call, Halves(ids, E), None, *inputs).float().square().sum().backward()
        if delayed is not None:
            assert delayed.waiting == 1
            delayed.backward_dw()
        found.append([*totals.values()] if main_grad else [of[name].grad for name in names])
    assert_same(found[1], found[0])
    assert all(t.any() for t in found[0])


def test_checkpoints_and_reused_weights():
    found = []
    for delayed in (None, DelayedWgrads()):
        of = weights()
        x = torch.randn(T, D, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        ids, scores = torch.arange(T)[:, None] % E, torch.ones(T, 1)
        with reuse_weights():
            out = checkpoint(experts, x, ids, scores, **of, delay_wgrad=delayed, use_reentrant=False)
            out.sum().backward()
        if delayed is not None:
            delayed.backward_dw()
        found.append([out.detach(), x.grad, *(t.grad for t in of.values())])
    assert_same(found[1], found[0])


def test_quantized_weights_with_main_gradients():
    found = []
    for delayed in (None, DelayedWgrads()):
        of = weights()
        sums = {f"main_grad_{n[2:]}": torch.zeros(of[n].shape) for n in ("w_gate_up", "w_down")}
        of.update({n: quantize_weight(of[n].detach(), "rowwise", rounding="pow2") for n in ("w_gate_up", "w_down")})
        of_experts(0, of, delay_wgrad=delayed, **sums)
        if delayed is not None:
            assert not any(t.any() for t in sums.values())
            delayed.backward_dw()
        found.append(list(sums.values()))
    assert_same(found[1], found[0])


# Pipelines of torch that run a backward for inputs, and one for weights


def layer(**options: object) -> MoE:
    torch.manual_seed(0)
    made = MoE(Router(E, D, TOP_K, dtype=torch.bfloat16), Experts(E, D, F, dtype=torch.bfloat16, **options))
    for p in (made.experts.gate_up_proj, made.experts.down_proj):
        p.main_grad = torch.zeros(p.shape)
    return made


def micro_batch(number: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(number)
    x, grad = (torch.randn(T, D, generator=g).bfloat16() for _ in range(2))
    return x.requires_grad_(), grad


@pytest.mark.parametrize("main_grad", [False, True])
def test_zero_bubble_pipelines(main_grad):
    """As PipelineStage does with dw_builder=lambda: experts.backward_dw: inputs of both micro-batches first."""
    if torch.__version__ < "2.12":
        pytest.skip("torch 2.11 cannot compute gradients of weights behind a Python autograd.Function")
    backward = pytest.importorskip("torch.distributed.pipelining._backward")
    plain, made = layer(main_grad=main_grad), layer(main_grad=main_grad, delay_wgrad=True)
    want = []
    for number in range(2):
        x, grad = micro_batch(number)
        plain(x)[0].backward(grad)
        want.append(x.grad)
    got, groups = [], []
    for number in range(2):
        x, grad = micro_batch(number)
        out = made(x)[0].clone()  # torch detaches it in place, which it refuses for a view
        groups.append(backward.stage_backward_input([out], [grad], [x], made.parameters())[1])
        got.append(x.grad)
    assert made.experts.delayed.waiting == 2
    for of_one in groups:
        backward.stage_backward_weight(made.parameters(), of_one)
        made.experts.backward_dw()
    assert_same(got, want)
    for (name, p), q in zip(made.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None) == (main_grad and "experts" in name), name
        if main_grad and "experts" in name:
            assert_same_tensor(p.main_grad, q.main_grad, name)
        else:
            assert_same_tensor(p.grad, q.grad, name)


def test_ddp_is_told():
    """Megatron's hook needs a gradient in overlapped reduction. It runs after the gradient is in main_grad."""
    made = layer(main_grad=True, delay_wgrad=True).experts
    made.gate_up_proj.grad_added_to_main_grad = made.down_proj.grad_added_to_main_grad = False
    x, grad = micro_batch(0)
    made(x, torch.zeros(T, 1, dtype=torch.int64), torch.ones(T, 1)).backward(grad)
    assert not made.down_proj.grad_added_to_main_grad and made.down_proj.grad is None
    made.backward_dw()
    for p in made.parameters():
        assert p.grad_added_to_main_grad and p.main_grad.any() and not p.grad.any()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_wait_for_nothing(copied):
    """pickle alone cannot store FP8 operands, and a saved model has no use for them."""
    module = Experts(E, D, F, delay_wgrad=True)
    x, ids = torch.ones(3, D, requires_grad=True), torch.zeros(3, 1, dtype=torch.int64)
    module(x, ids, torch.ones(3, 1)).sum().backward()
    assert copied(module).delayed.waiting == 0 and module.delayed.waiting == 1


# Mistakes


def mistake(call: Callable[[], object], text: str) -> None:
    with pytest.raises(RuntimeError) as info:
        call()
    assert str(info.value) == text


def test_mistakes():
    of, delayed = weights(), DelayedWgrads()
    mistake(delayed.backward_dw, "DelayedWgrads: backward_dw must follow a backward that waits, got none")
    text = "experts: delay_wgrad must be a DelayedWgrads or None, got bool"
    mistake(lambda: of_experts(0, of, delay_wgrad=True), text)
    changed = of | {"w_down": of["w_down"] * 1}
    text = "experts: w_down must be a parameter, or have a main_grad, with delay_wgrad, got a result of autograd"
    mistake(lambda: of_experts(0, changed, delay_wgrad=delayed), text)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(of["w_gate_up"], torch.ones_like(of["w_gate_up"]))
        text = "experts: w_gate_up must have no tangent with delay_wgrad, got one"
        options = dict(delay_wgrad=delayed, main_grad_gate_up=torch.zeros(E, 2 * F, D))
        mistake(lambda: of_experts(0, of | {"w_gate_up": dual}, **options), text)
    x, ids, scores = torch.zeros(3, D).bfloat16(), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    trained = {n: of[n] for n in ("w_gate_up", "w_down")}
    why = "because autograd does not see a delayed w_gate_up and would run no backward"
    text = f"experts: x or another input must require a gradient, {why}, got none that does"
    mistake(lambda: experts(x, ids, scores, **trained, delay_wgrad=delayed), text)
    with torch.no_grad():
        experts(x, ids, scores, **trained, delay_wgrad=delayed)
    Experts(E, D, F).backward_dw()  # does nothing
    text = "Experts: delay_wgrad must be a bool, got int"
    mistake(lambda: Experts(E, D, F, delay_wgrad=1), text)


@pytest.mark.skipif(_torch.state_of is None, reason="private names of torch are switched off")
@pytest.mark.parametrize("written", [0, 1])
@pytest.mark.parametrize("recipe", [Recipe("bf16"), Recipe(wgrad_high_precision=True)], ids=str)
def test_written_operands(recipe, written):
    """x and the gradient of rows that are sorted already are operands themselves, which autograd no longer guards."""
    x, grad = torch.ones(5, D, dtype=torch.bfloat16, requires_grad=True), torch.ones(5, D, dtype=torch.bfloat16)
    of, delayed = weights(), DelayedWgrads()
    offs = torch.full((E,), 5, dtype=torch.int32)
    experts_of_groups(x, offs, None, **of, recipe=recipe, delay_wgrad=delayed).backward(grad)
    with torch.no_grad():
        (x, grad)[written].zero_()
    text = "DelayedWgrads: x and the gradient of the output must not be written before backward_dw, got a write"
    mistake(delayed.backward_dw, f"{text}; FP8 recipes without wgrad_high_precision keep copies")
    assert delayed.waiting == 1


@pytest.mark.skipif(_torch.wrapper_subclass is None, reason="private names of torch are switched off")
def test_fully_shard_is_refused(world_of_one):
    """It reduces gradients in backward, when there are none yet."""
    module, gathered = (Experts(E, D, F, delay_wgrad=True) for _ in range(2))
    for experts_module in (module, gathered):
        fully_shard(experts_module)
    call = torch.ones(3, D, requires_grad=True), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    module(*call).sum().backward()
    cause = "fully_shard frees weights that it gathers, and needs gradients in backward"
    text = f"DelayedWgrads: w_gate_up must have its memory until backward_dw, got none; {cause}"
    for _ in range(2):
        mistake(module.backward_dw, text)
    gather_in_fp8_(gathered, "rowwise")
    got = "got one that fully_shard gathers"
    text = f"experts: w_gate_up must be a parameter, or have a main_grad, with delay_wgrad, {got}"
    mistake(lambda: gathered(*call), text)


def test_graphs_refuse_it(monkeypatch):
    """torch.compile then calls the function eagerly, or fails with fullgraph=True."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    text = "experts: delay_wgrad must be None under torch.compile, because a graph has no backward for later, got one"
    mistake(lambda: of_experts(0, weights(), delay_wgrad=DelayedWgrads()), text)
