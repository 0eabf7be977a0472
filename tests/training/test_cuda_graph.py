"""`graphed`: outputs, gradients and buffers are the layer's own, byte for byte, and misuse raises.

On a CPU a stand-in takes the place of CUDA graphs. The same tests capture real graphs on a GPU.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import pytest
import torch
from helpers import assert_same, blocks, saved_tensors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from moe_fp8_ext import Experts, MoE, Router, graphed, reuse_weights, stats, validate
from moe_fp8_ext.matmul import engine

E, D, F, TOP_K, TOKENS = 4, 64, 32, 2, 48


def moe(device: str, recipe: str = "rowwise", **options: object) -> MoE:
    torch.manual_seed(0)
    experts = Experts(E, D, F, recipe=recipe, dtype=torch.bfloat16, **options)
    return MoE(Router(E, D, TOP_K, bias_rate=0.01, balance_loss=0.1), experts).to(device)


def tokens(device: str, seed: int, t: int = TOKENS) -> Tensor:
    """Tokens whose routing depends on the seed."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(t, D, generator=g) + 2 * torch.randn(D, generator=g)
    return x.bfloat16().to(device).requires_grad_()


def backward(layer: Callable, x: Tensor) -> tuple[Tensor, ...]:
    """Returns the outputs and the gradient of the tokens. Gradients of parameters are added up."""
    out, loss = layer(x)
    (out.float() * torch.linspace(-1, 1, D, device=x.device)).sum().add(loss).backward()
    return out.detach(), loss.detach(), x.grad


def gradients(layer: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]


@torch.no_grad()
def descend(layer: nn.Module) -> None:
    """A step of an optimizer, in place."""
    for parameter in layer.parameters():
        parameter -= 0.1 * parameter.grad


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "bf16"])
def test_training_is_the_layers_own(recipe: str, checkpoints: bool, where: str, replays: list[object]) -> None:
    """Over several routings, gradient accumulation, and writes of an optimizer in place."""
    layer, eager = moe(where, recipe), moe(where, recipe)
    step = graphed(layer, tokens(where, 9), checkpoint=checkpoints)
    assert step.layer is layer and not gradients(layer)
    assert_same(layer.gate.tokens_per_expert, eager.gate.tokens_per_expert, "counts after the capture")
    kept, routings = [], set()
    for seed in range(6):
        kept += zip(backward(step, tokens(where, seed)), backward(eager, tokens(where, seed)), strict=True)
        assert_same(gradients(layer), gradients(eager), f"gradients of parameters after call {seed}")
        assert_same(layer.gate.tokens_per_expert, eager.gate.tokens_per_expert, "counts")
        routings.add(tuple(layer.gate.tokens_per_expert.tolist()))
        if seed % 3 == 2:
            for module in (layer, eager):
                descend(module)
                module.zero_grad(set_to_none=seed == 2)
                module.gate.update_bias()
    assert len(replays) == 6 and len(routings) > 3
    for got, want in kept:  # no later call has overwritten them
        assert_same(got, want)


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_main_grad(dtype: torch.dtype, checkpoints: bool, where: str, replays: list[object]) -> None:
    made = []
    for captures in (True, False):
        layer = moe(where, main_grad=True, bias=True)  # with biases, activations of zeros are not zero
        for weight in (layer.experts.gate_up_proj, layer.experts.down_proj):
            weight.main_grad = torch.ones_like(weight, dtype=dtype)
        run = graphed(layer, tokens(where, 9), checkpoint=checkpoints) if captures else layer
        results = [t for seed in (0, 1) for t in backward(run, tokens(where, seed))]
        assert layer.experts.down_proj.grad is None
        made.append([*results, *(getattr(layer.experts, n).main_grad for n in ("gate_up_proj", "down_proj"))])
    assert len(replays) == 2
    assert_same(*made)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_experts_take_ids_and_scores(checkpoints: bool, where: str, replays: list[object]) -> None:
    """As the forward of the module itself, with frozen weights and adapters, whose parameters alone are trained."""
    torch.manual_seed(0)
    layer = Experts(E, D, F, recipe="blockwise", lora_rank=8, dtype=torch.bfloat16).to(where).freeze_()
    nn.init.normal_(layer.down_proj_lora_B)
    eager = copy.deepcopy(layer)
    calls = [
        (tokens(where, seed), torch.rand(TOKENS, E).topk(TOP_K).indices.to(where), torch.rand(TOKENS, TOP_K).to(where))
        for seed in range(3)
    ]
    names = [*layer.state_dict()]
    layer.forward = graphed(layer, *calls[0], checkpoint=checkpoints)
    assert [*layer.state_dict()] == names
    for x, ids, scores in calls:
        got, want = layer(x, ids, scores), eager(x, ids, scores)
        got.sum().backward()
        grad, x.grad = x.grad, None
        want.sum().backward()
        assert_same([got, grad, *gradients(layer)], [want, x.grad, *gradients(eager)])
    assert len(replays) == 3
    del got, want  # torch captures no backward of parameters that outputs made outside of the graph still hold
    layer.forward = graphed(layer, *calls[0], checkpoint=checkpoints)  # captures the module again, and not its graph
    assert_same(layer(*calls[1]), eager(*calls[1]))
    del layer.forward
    assert_same(layer(*calls[1]), eager(*calls[1]))
    assert len(replays) == 4


def test_page(where: str, replays: list[object]) -> None:
    code, _ = blocks("docs/cuda-graphs.md")
    names: dict[str, object] = {"device": where}
    exec(code, names)
    assert len(replays) == 6 and names["router"].e_score_correction_bias.any()
    names["layer"](names["x"])
    assert len(replays) == 6


def test_no_call_waits_for_the_device(gpu: str) -> None:
    layer = moe(gpu)
    step, x = graphed(layer, tokens(gpu, 9)), tokens(gpu, 0)
    scale = torch.linspace(-1, 1, D, device=gpu)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            out, loss = step(x)
            (out.float() * scale).sum().add(loss).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("checkpoints", [False, True])
def test_autocast_is_captured(checkpoints: bool, where: str, replays: list[object]) -> None:
    """A graph has the autocast of its capture, and casts of parameters within."""
    made = []
    for captures in (True, False):
        torch.manual_seed(0)
        layer = MoE(Router(E, D, TOP_K), Experts(E, D, F), nn.Linear(D, D)).to(where)
        sample = tokens(where, 9).detach().float().requires_grad_()
        with torch.autocast(where, dtype=torch.bfloat16):
            run, results = graphed(layer, sample, checkpoint=checkpoints) if captures else layer, []
        for seed in (0, 1):
            x = tokens(where, seed).detach().float().requires_grad_()
            with torch.autocast(where, dtype=torch.bfloat16):
                out, _ = run(x)
            out.sum().backward()
            results += [out.detach(), x.grad]
            descend(layer)
        made.append([*results, *layer.parameters()])
        run(x)  # without autocast
    assert len(replays) == 2
    assert_same(*made)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_without_gradients(checkpoints: bool, where: str, replays: list[object]) -> None:
    """Captured under no_grad, a graph has a forward alone. Calls with gradients are the layer's own."""
    layer = moe(where).eval()
    with torch.no_grad():
        step = graphed(layer, tokens(where, 9), checkpoint=checkpoints)
        for seed in (0, 1):
            assert_same(step(tokens(where, seed)), layer(tokens(where, seed)))
    assert len(replays) == 2
    assert step(tokens(where, 0))[0].requires_grad
    assert len(replays) == 2


@pytest.mark.parametrize("checkpoints", [False, True])
def test_calls_that_are_the_layers_own(checkpoints: bool, where: str, replays: list[object]) -> None:
    layer, eager = moe(where), moe(where)
    step = graphed(layer, tokens(where, 9), checkpoint=checkpoints)

    def check(context: object = None, t: int = TOKENS) -> None:
        with context or nullcontext():
            assert_same(step(tokens(where, 0, t)), eager(tokens(where, 0, t)))

    check(t=TOKENS - 1)
    check(t=2 * TOKENS)
    check(torch.no_grad())
    check(torch.autocast(where, dtype=torch.bfloat16))
    check(validate())
    counter = FlopCounterMode(display=False)
    check(counter)
    assert counter.get_total_flops() > 0
    with stats(layer) as measured:
        check()
        measured.step()
    assert measured.to_dict()["layers"]
    layer.eval()
    eager.eval()
    check()
    assert not replays
    layer.train()
    check()
    check(reuse_weights())
    assert len(replays) == 2


def test_a_compiled_layer_is_the_layers_own(where: str, replays: list[object]) -> None:
    layer, eager = moe(where), moe(where)
    layer.forward = graphed(layer, tokens(where, 9))
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert_same(compiled(tokens(where, 0)), eager(tokens(where, 0)))
    assert not replays


def test_a_call_in_another_graph_is_the_layers_own(gpu: str, replays: list[object]) -> None:
    layer, eager, x, outer = moe(gpu), moe(gpu), tokens(gpu, 0), torch.cuda.CUDAGraph()
    step = graphed(layer, tokens(gpu, 9))
    with torch.cuda.graph(outer):
        out, _ = step(x)
    outer.replay()
    assert_same(out, eager(x)[0])
    assert not replays


class Block(nn.Module):
    """A layer as a transformer has it, with tensors and constants as keywords, some of them in tuples."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.dropout = nn.Linear(D, D), nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros(()))

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        scale: tuple[Tensor, Tensor] | None = None,
        cache: list | None = None,
        power: int = 1,
    ) -> Tensor:
        self.calls += 1
        x = self.dropout(self.linear(x)).tanh() ** power
        x = x if mask is None else torch.where(mask, x, x.new_full((), float("nan")))
        return x if scale is None else x * scale[0] + scale[1]


def block_call(where: str, seed: int) -> tuple[Tensor, dict[str, object]]:
    x = tokens(where, seed).detach().float().requires_grad_()
    mask = torch.ones(TOKENS, 1, dtype=torch.bool, device=where)
    return x, dict(mask=mask, scale=(torch.full_like(mask, seed, dtype=torch.float32), torch.ones_like(x)), power=2)


def test_checkpoint_has_many_calls_in_flight(where: str, replays: list[object]) -> None:
    """Layers that share memory, in any order: a chain of two, for three micro-batches, each backward once or twice."""
    layers = [Block().to(where) for _ in range(2)]
    layers[1].linear.weight.data *= -2
    eager = copy.deepcopy(layers)
    x, rest = block_call(where, 9)
    for layer in layers:
        layer.forward = graphed(layer, x, checkpoint=True, **rest)
    results = []
    for first, second in (layers, eager):
        calls = [block_call(where, seed) for seed in range(3)]
        outputs = [second(first(x, **rest), **rest) for x, rest in calls]
        outputs[0].sum().backward(retain_graph=True)
        for out in reversed(outputs):
            out.square().sum().backward()
        gradients = [p.grad for layer in (first, second) for p in layer.parameters()]
        results.append([*(x.grad for x, _ in calls), *gradients, *outputs, first.calls, second.calls])
    assert_same(*results)
    assert len(replays) == 6


def test_constants_and_keywords(where: str, replays: list[object]) -> None:
    """A call with other constants, or without a tensor, is the layer's own."""
    for checkpoints in (False, True):
        layer, eager = Block().to(where), Block().to(where)
        x, rest = block_call(where, 9)
        layer.forward = graphed(layer, x, checkpoint=checkpoints, **rest)
        x, rest = block_call(where, 1)
        before = len(replays)
        assert_same(layer(x, **dict(reversed(rest.items()))), eager(x, **rest))
        assert len(replays) == before + 1
        for other in (dict(power=3), dict(mask=None), dict(scale=[*rest["scale"]]), dict(cache=[1])):
            with pytest.warns(match="a call has other arguments") if checkpoints else nullcontext():
                assert_same(layer(x, **{**rest, **other}), eager(x, **{**rest, **other}))
        assert_same(layer(x), eager(x))
        assert len(replays) == before + 1
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            layer()


def test_checkpoint_holds_between_the_calls_that_have_no_graph(where: str) -> None:
    """A call of other sizes keeps its arguments alone, too."""
    layer = Block().to(where)
    x, rest = block_call(where, 9)
    step = graphed(layer, x, checkpoint=True, **rest)
    with saved_tensors() as saved:
        step(x, **rest)
    assert all(any(t is given for given in (x, rest["mask"], *rest["scale"])) for t in saved) and len(saved) == 4
    calls = layer.calls.clone()
    step(x[1:], power=2).sum().backward()
    assert layer.calls == calls + 2


class Square(torch.autograd.Function):
    """A node that keeps a tensor behind autograd's back."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.x = x
        return x.square()

    @staticmethod
    def backward(ctx, dout: Tensor) -> Tensor:
        return 2 * ctx.x * dout


def square_of_cpu(y: Tensor) -> Tensor:
    """Saves a tensor where hooks around the layer do not see it."""
    with torch.autograd.graph.save_on_cpu():
        return y.square()


def weighted_by_hook(y: Tensor) -> Tensor:
    """A gradient depends on a value that autograd did not save."""
    size = y.detach().float().abs().mean()
    y = y + 0
    if y.requires_grad:
        y.register_hook(lambda grad: (grad * size).to(grad.dtype))
    return y


def masked_by_hook(y: Tensor) -> Tensor:
    """As `weighted_by_hook`, by a mask that no NaN passes."""
    mask = y.detach() > 0
    y = y + 0
    if y.requires_grad:
        y.register_hook(lambda grad: torch.where(mask, grad, 0))
    return y


class Residual(nn.Module):
    """Experts within a layer of a transformer, with a step of the layer behind them."""

    def __init__(self, behind: Callable[[Tensor], Tensor], times: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.moe = MoE(Router(E, D, TOP_K), Experts(E, D, F, dtype=torch.bfloat16))
        self.behind, self.times = behind, times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = x + self.behind(self.moe(x)[0])
        return x


@pytest.mark.parametrize(
    ("behind", "times", "products"),
    [
        (lambda y: y, 1, 7),  # up, down; up; 4 gradients
        (lambda y: 2 * y.float(), 1, 7),
        (lambda y: y.add_(1), 1, 7),
        (torch.square, 1, 8),  # up, down; up, down; 4 gradients
        (Square.apply, 1, 8),
        (square_of_cpu, 1, 8),
        (weighted_by_hook, 1, 8),
        (masked_by_hook, 1, 8),
        (lambda y: y, 2, 15),  # only the last product of the last experts is not needed
    ],
    ids=[
        "sum",
        "scaled sum",
        "in place",
        "square",
        "square of a user",
        "square on the CPU",
        "hook",
        "mask of a hook",
        "twice",
    ],
)
def test_checkpoint_leaves_out_the_last_product(
    behind: Callable[[Tensor], Tensor], times: int, products: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients do not need it, unless a step behind the experts keeps what it read."""
    if behind is square_of_cpu and where != "cpu":
        pytest.skip("a CUDA graph cannot copy to pageable memory of the CPU")
    layer = Residual(behind, times).to(where)
    eager, sample = copy.deepcopy(layer), tokens(where, 9)
    step = graphed(layer, sample, checkpoint=True)
    x, calls, product = tokens(where, 0), [], engine._scaled_grouped_mm
    monkeypatch.setattr(engine, "_scaled_grouped_mm", lambda *args: calls.append(0) or product(*args))
    step(x).sum().backward()
    assert len(calls) == (products if where == "cpu" else 0)  # a real graph calls no Python
    grad, x.grad = x.grad, None
    eager(x).sum().backward()
    assert_same([grad, *gradients(layer)], [x.grad, *gradients(eager)])


class Function(nn.Module):
    """A layer that is one function of its linear layer and its arguments."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.function = nn.Linear(D, D), function

    def forward(self, *args: object) -> object:
        return self.function(self.linear, *args)


class Two(NamedTuple):
    x: Tensor
    scale: float


@pytest.mark.parametrize("checkpoints", [False, True])
def test_gradients_that_a_graph_would_lose(checkpoints: bool, where: str) -> None:
    """Of tensors that are no arguments; arguments in a NamedTuple have theirs. A write to an argument would be lost."""
    outside = nn.Linear(D, D, device=where)
    sample = tokens(where, 9).detach().float()
    how = dict(checkpoint=checkpoints)
    with pytest.raises(RuntimeError, match="graphed: layer must have gradients for its arguments and parameters alone"):
        graphed(Function(lambda linear, x: linear(x) + outside(x)).to(where), sample, **how)
    with pytest.raises(RuntimeError, match="graphed: layer must not write to its arguments"):
        graphed(Function(lambda linear, x: linear(x.add_(1))).to(where), sample, **how)
    with pytest.raises(RuntimeError, match="graphed: layer must have gradients for its arguments and parameters alone"):
        graphed(Function(lambda linear, x: (linear(x), outside.weight)).to(where), sample, **how)
    layer = Function(lambda linear, two: two.scale * linear(two.x)).to(where)
    step = graphed(layer, Two(sample.clone().requires_grad_(), 2.0), **how)
    for scale in (2.0, 3.0):
        x, y = (tokens(where, 1).detach().float().requires_grad_() for _ in range(2))
        assert_same(step(Two(x, scale)), layer(Two(y, scale)))
        step(Two(x, scale)).sum().backward()
        layer(Two(y, scale)).sum().backward()
        assert_same(x.grad, y.grad)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_parameter_that_is_replaced(checkpoints: bool, where: str) -> None:
    """Over the same memory, too: autograd would give gradients to the object of the capture."""
    layer, x = Block().to(where), tokens(where, 9).detach().float()
    step = graphed(layer, x, checkpoint=checkpoints)
    layer.linear.weight = nn.Parameter(layer.linear.weight.data)
    with pytest.raises(RuntimeError, match="graphed: weight must be as at the capture"):
        step(x)
    with pytest.raises(TypeError, match="graphed: a captured layer cannot be copied or pickled"):
        copy.deepcopy(step)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_backward_has_no_autocast(checkpoints: bool, where: str) -> None:
    """A product outside of autocast has gradients outside of autocast, though the capture was inside."""

    def product(linear: nn.Linear, x: Tensor) -> Tensor:
        with torch.autocast(where, enabled=False):
            return nn.functional.linear(x.float(), linear.weight)

    layer = Function(product).to(where)
    x, autocast = tokens(where, 1).detach().float(), torch.autocast(where, dtype=torch.bfloat16)
    with autocast:
        step = graphed(layer, x, checkpoint=checkpoints)
        outputs = [step(x), layer(x)]
    assert_same(*(torch.autograd.grad(out.sin().sum(), layer.linear.weight)[0] for out in outputs))


def test_gradients_in_main_grad_may_need_the_last_product(where: str) -> None:
    """Where no other gradient is wanted, main_grad alone shows that something reads the output of experts."""
    made = []
    for captures in (True, False):
        layer = Residual(masked_by_hook).to(where).requires_grad_(False)
        experts = layer.moe.experts
        experts.adds_to_main_grad = True
        for weight in (experts.gate_up_proj, experts.down_proj):
            weight.requires_grad_().main_grad = torch.zeros_like(weight, dtype=torch.float32)
        x = tokens(where, 9).detach()
        step = graphed(layer, x, checkpoint=True) if captures else layer
        step(x).sum().backward()
        made.append([experts.gate_up_proj.main_grad, experts.down_proj.main_grad])
        assert made[-1][1].any()
    assert_same(*made)


def test_checkpoint_and_mistakes(where: str) -> None:
    """A capture that fails, or meets NaN, changes nothing. Calls that differ from the sample run without a graph."""
    layer = moe(where, main_grad=True)
    for weight in (layer.experts.gate_up_proj, layer.experts.down_proj):
        weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
    forward, x = layer.forward, tokens(where, 9)
    layer.forward = lambda x: forward(x / x.norm(dim=-1, keepdim=True))  # 0 / 0 in the capture
    step = graphed(layer, x, checkpoint=True)
    assert all((w.main_grad == 1).all() for w in (layer.experts.gate_up_proj, layer.experts.down_proj))
    step(x)[0].sum().backward()
    assert layer.experts.down_proj.main_grad.isfinite().all() and x.grad.isfinite().all()
    block = Block().to(where)
    x = tokens(where, 9).detach().float()
    with torch.inference_mode(), pytest.raises(RuntimeError, match="graphed: checkpoint must be False in torch.infere"):
        graphed(block, x, checkpoint=True)
    step = graphed(block, x, power=1, checkpoint=True)
    with pytest.raises(RuntimeError, match="dtype"):  # the layer's own error
        step(x.double(), power=1)
    assert step(x.clone().requires_grad_(), power=1).requires_grad
    assert_same(step(x, power=True), block(x))
    block.register_buffer("expanded", torch.zeros(1, device=where).expand(5))
    step = graphed(block, x, cache=(array := np.zeros(3)), checkpoint=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(step(x, cache=array), block(x))  # a constant of any type, by identity
        step(x[1:], cache=array)
    with pytest.warns(match="a call has other arguments"):
        step(x, cache=np.zeros(3))


def test_checkpoint_draws_no_random_numbers(where: str) -> None:
    x, rest = block_call(where, 9)
    layer = Block(dropout=0.5).to(where)
    with pytest.raises(RuntimeError, match="graphed: layer must draw no random numbers with checkpoint"):
        graphed(layer, x, checkpoint=True, **rest)
    assert layer.calls == 0
    graphed(layer.eval(), x, checkpoint=True, **rest)
    with pytest.raises(RuntimeError, match="graphed: checkpoint must be a bool, got int"):
        graphed(layer, x, checkpoint=1)


def test_backward_belongs_to_the_last_call(where: str) -> None:
    step = graphed(moe(where), tokens(where, 9))
    (first, _), (last, _) = step(tokens(where, 0)), step(tokens(where, 1))
    with pytest.raises(RuntimeError, match="graphed: backward must come once for a call, and before the next call"):
        first.sum().backward()
    last.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="graphed: backward must come once for a call"):
        last.sum().backward()
    x = tokens(where, 0)
    out = checkpoint(lambda x: step(x)[0].square(), x, use_reentrant=False)
    with pytest.raises(RuntimeError, match="for several calls in flight use one `graphed` each, or checkpoint=True"):
        out.sum().backward()
    out, _ = step(x)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_mistakes_of_a_call(where: str) -> None:
    layer = moe(where)
    x = tokens(where, 0)
    step = graphed(layer, x.detach())
    for args, text in [
        ((x,), "argument 0 must not ask for a gradient, because its sample did not, got requires_grad=True"),
        (
            (x.detach().float(),),
            "argument 0 must be as its sample, torch.bfloat16 of 2 dimensions on .*, got torch.float32",
        ),
        ((x.detach()[None],), "argument 0 must be as its sample, .* got torch.bfloat16 of 3 dimensions"),
    ]:
        with pytest.raises(RuntimeError, match=f"graphed: {text}"):
            step(*args)
    layer.gate.requires_grad_(False)
    with pytest.raises(RuntimeError, match="graphed: weight must be as at the capture, with its memory"):
        step(x.detach())
    layer.gate.requires_grad_(True)
    step(x.detach())
    layer.experts.down_proj.data = layer.experts.down_proj.data.clone()
    with pytest.raises(RuntimeError, match="graphed: down_proj must be as at the capture, .*; capture again"):
        step(x.detach())


def test_main_grad_that_is_replaced(where: str) -> None:
    layer = moe(where, main_grad=True)
    for weight in (layer.experts.gate_up_proj, layer.experts.down_proj):
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    step, x = graphed(layer, tokens(where, 9)), tokens(where, 0)
    step(x)
    layer.experts.down_proj.main_grad = torch.zeros_like(layer.experts.down_proj, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="graphed: main_grad must be as at the capture"):
        step(x)


class Strange(nn.Module):
    def forward(self, x: Tensor) -> Sequence[object]:
        return [x, None]


def test_layers_that_are_refused(where: str) -> None:
    x = tokens(where, 0)
    refused = [
        (moe(where, lora_rank=8, lora_dropout=0.5), "lora_dropout of experts must be 0 in training"),
        (moe(where, delay_wgrad=True), "delay_wgrad of experts must be False"),
        (moe("meta"), f"gate.weight must be on the device of the samples, {x.device}, got meta"),
        (Strange(), "layer must return a tensor or a tuple of tensors, got list"),
    ]
    of_ddp = moe(where)
    of_ddp.experts.down_proj.grad_added_to_main_grad = False
    of_ep = moe(where)
    of_ep.experts.ep = object()
    refused += [(of_ddp, "experts.down_proj must have no buffer of Megatron's DDP")]
    refused += [(of_ep, "ep of experts must be None, because ranks may wait for each other, got one")]
    for layer, text in refused:
        with pytest.raises(RuntimeError, match=f"graphed: {text}"):
            graphed(layer, x)
    graphed(moe(where, lora_rank=8, lora_dropout=0.5).eval(), x)
    with pytest.raises(TypeError, match="graphed: layer must be a torch.nn.Module, got function"):
        graphed(lambda x: x, x)
    layer = moe(where)
    with stats(layer), pytest.raises(RuntimeError, match="graphed: stats must be off"):
        graphed(layer, x)
    with validate(), pytest.raises(RuntimeError, match=r"graphed: validate\(\) must be off"):
        graphed(layer, x)


def test_samples_that_are_refused() -> None:
    layer, x = moe("cpu"), tokens("cpu", 0)
    for args, text in [
        ((), "sample_args must have tensors, got none"),
        ((x,), "sample_args must be on a GPU, because a CPU has no CUDA graphs, got cpu"),
        ((None,), "sample_args must have tensors, got none"),
    ]:
        with pytest.raises(RuntimeError, match=f"graphed: {text}"):
            graphed(layer, *args)
