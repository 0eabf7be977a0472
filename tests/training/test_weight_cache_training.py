"""reuse_weights around training steps, checkpoints and graphs: the same bytes as without it, and less work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from grouped_problem import Calls, quantizations
from helpers import assert_same, check_cuda_graph, group_offs
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from weight_problem import OFFS, A, G, call, parameter

from moe_fp8_ext import experts, grouped_mm, reuse_weights

QUANTIZED = ("rowwise", "blockwise", "mxfp8")


class Experts(torch.nn.Module):
    """Two layers. If their weights are float32, autocast may cast them."""

    def __init__(self, device: str, dtype: torch.dtype, recipe: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in (("up", (3, 64, 32)), ("down", (3, 32, 64))):
            values = torch.randn(shape, generator=generator) / 8
            self.register_parameter(name, Parameter(values.to(device, dtype)))
        self.recipe = recipe

    def layers(self, x: Tensor, offs: Tensor) -> Tensor:
        h = torch.relu(grouped_mm(x, self.up.transpose(-2, -1), offs, recipe=self.recipe))
        return grouped_mm(h, self.down.transpose(-2, -1), offs, recipe=self.recipe)

    def forward(self, x: Tensor, offs: Tensor, again: str | None = None) -> Tensor:
        how = {"use_reentrant": again == "reentrant"}
        if again == "selective":
            how["context_fn"] = lambda: create_selective_checkpoint_contexts([torch.ops.aten.relu.default])
        return checkpoint(self.layers, x, offs, **how) if again else self.layers(x, offs)


def train(
    device: str,
    optimizer: Callable,
    recipe: str = "rowwise",
    dtype: torch.dtype = torch.bfloat16,
    autocast: torch.dtype | None = None,
    micro_batches: Callable = contextlib.nullcontext,
    whole: Callable = contextlib.nullcontext,
) -> tuple[list[Tensor], int]:
    """Returns outputs and gradients of three steps of two micro-batches, and how often weights were quantized."""
    experts = Experts(device, dtype, recipe)
    step = optimizer(experts.parameters())
    offs = group_offs("zipf", 60, 3, device)
    found = []
    with whole(), Calls() as calls:
        for seed in range(3):
            with micro_batches(), torch.autocast(device, dtype=autocast, enabled=autocast is not None):
                for i in range(2):
                    generator = torch.Generator().manual_seed(2 * seed + i)
                    x = torch.randn(60, 32, generator=generator).to(device, dtype).requires_grad_()
                    out = experts(x, offs)
                    out.float().square().mean().backward()
                    found += [out.detach(), x.grad, *(w.grad.clone() for w in experts.parameters())]
            step.step()
            step.zero_grad()
    return found, calls.names.count("quantize_weight")


def through_data(parameters: Iterator[Parameter]) -> torch.optim.Optimizer:
    class OldStyle(torch.optim.SGD):
        def step(self) -> None:
            for w in self.param_groups[0]["params"]:
                w.data.sub_(w.grad, alpha=0.1)

    return OldStyle(parameters, lr=0.1)


def fused(parameters: Iterator[Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, fused=True)


def foreach(parameters: Iterator[Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, foreach=True)


@pytest.mark.parametrize("where", ["micro_batches", "whole"])
@pytest.mark.parametrize("optimizer", [foreach, fused, through_data])
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_gradient_accumulation(recipe, optimizer, where, device):
    want, without = train(device, optimizer, recipe)
    got, times = train(device, optimizer, recipe, **{where: reuse_weights})
    assert_same(got, want)
    assert (without, times) == (2 * 3 * 2, 2 * 3), "two weights, once a step"


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_a_layer_that_adds_to_main_grads(recipe, device):
    """Three steps of four micro-batches have the same losses with and without, and quantize a weight once a step."""

    def losses(micro_batches: Callable) -> tuple[list[Tensor], int]:
        generator = torch.Generator().manual_seed(0)
        x, *weights = (torch.randn(s, generator=generator) / 8 for s in ((4, 40, 64), (3, 64, 64), (3, 64, 32)))
        up, down = (Parameter(w.to(device, torch.bfloat16)) for w in weights)
        ids, scores = torch.arange(80).view(40, 2).to(device) % 3, torch.full((40, 2), 0.5, device=device)
        optimizer, found = torch.optim.AdamW([up, down], lr=0.01), []
        with Calls() as calls:
            for _ in range(3):
                main_grads = [torch.zeros_like(w, dtype=torch.float32) for w in (up, down)]
                added = dict(zip(("main_grad_gate_up", "main_grad_down"), main_grads, strict=True))
                with micro_batches():
                    for tokens in x.to(device, torch.bfloat16):
                        out = experts(tokens.clone().requires_grad_(), ids, scores, up, down, recipe=recipe, **added)
                        found.append(out.float().square().mean())
                        found[-1].backward()
                up.grad, down.grad = (g.bfloat16() for g in main_grads)
                optimizer.step()
        return [loss.detach() for loss in found], calls.names.count("quantize_weight")

    (want, without), (got, times) = losses(contextlib.nullcontext), losses(reuse_weights)
    assert_same(got, want)
    assert want[-1] < want[3] and (without, times) == (2 * 3 * 4, 2 * 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_of_float32_weights(dtype, device):
    how = {"optimizer": foreach, "dtype": torch.float32, "autocast": dtype}
    want, _ = train(device, **how)
    got, times = train(device, **how, micro_batches=reuse_weights)
    assert_same(got, want)
    assert times == 2 * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_what_casts_give(dtype, device):
    a, w = A.detach().float().to(device).requires_grad_(), parameter(device, dtype=torch.float32)
    offs, g = OFFS.to(device), G.to(device, dtype)
    with reuse_weights(), torch.autocast(device, dtype=dtype):
        cast = grouped_mm(a.to(dtype), w.to(dtype).mT, offs)
        want = cast.detach(), *torch.autograd.grad(cast, (a, w), g)
        for _ in range(2):
            out = grouped_mm(a, w.mT, offs)
            assert_same((out.detach(), *torch.autograd.grad(out, (a, w), g)), want)


def test_bf16_has_nothing_to_reuse(device):
    want, _ = train(device, foreach, "bf16")
    got, _ = train(device, foreach, "bf16", micro_batches=reuse_weights)
    assert_same(got, want)


@pytest.mark.parametrize("again", ["reentrant", "non-reentrant", "selective"])
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_activation_checkpointing(recipe, again, device):
    offs = group_offs("zipf", 60, 3, device)
    results, times = [], []
    for context in (contextlib.nullcontext, reuse_weights):
        experts = Experts(device, torch.bfloat16, recipe)
        x = torch.randn(60, 32, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16).requires_grad_()

        def step(x=x, experts=experts, context=context) -> None:
            with context():
                out = experts(x, offs, again)
                out.sum().backward()
            results.append([out.detach(), x.grad, experts.up.grad, experts.down.grad])

        times.append(quantizations(step))
    assert_same(results[1], results[0])
    assert times == [4, 2]


def test_compiled_calls_read_the_weight(device):
    """Compiled calls quantize every time, so they see writes that a cache could not."""
    torch._dynamo.reset()
    w = parameter(device)
    x, offs = A.detach().to(device), OFFS.to(device)

    def product(x: Tensor, w: Tensor) -> Tensor:
        return grouped_mm(x, w.transpose(-2, -1), offs)

    def inside(x: Tensor, w: Tensor) -> Tensor:
        with reuse_weights():
            return product(x, w)

    backend = "inductor" if device == "cuda" else "aot_eager"
    for fn in (product, inside):
        compiled = torch.compile(fn, fullgraph=True, backend=backend)
        with reuse_weights():
            for _ in range(2):
                call(w)
                w.data.mul_(-3)
                leaves = [t.detach().clone().requires_grad_() for t in (x, w)]
                want = torch.autograd.grad(product(*leaves).sum(), leaves)
                a = x.clone().requires_grad_()
                assert_same(torch.autograd.grad(compiled(a, w).sum(), (a, w)), want)


def test_compiled_backwards_read_frozen_weights(device):
    """Backward of a graph quantizes a frozen weight in an op, which runs outside of the compiler."""
    torch._dynamo.reset()
    weights = [Parameter(torch.randn(3, 64, 64, device=device), requires_grad=False) for _ in range(2)]
    x, ids, scores = torch.randn(40, 64, device=device), torch.arange(40)[:, None] % 3, torch.ones(40, 1)

    def gradient(layer: Callable, *weights: Tensor) -> Tensor:
        a = x.clone().requires_grad_()
        return torch.autograd.grad(layer(a, *weights).sum(), a)[0]

    def layer(x: Tensor, *weights: Tensor) -> Tensor:
        return experts(x, ids.to(device), scores.to(device), *weights, activation="silu")

    compiled = torch.compile(layer, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    with reuse_weights():
        gradient(layer, *weights)
        for w in weights:
            w.data.mul_(-3)  # no cache can see it
        assert_same(gradient(compiled, *weights), gradient(layer, *(w.clone() for w in weights)))


def test_traced_calls_read_the_weight(device):
    w = parameter(device)
    x, offs = A.detach().to(device), OFFS.to(device)
    with reuse_weights(), torch.no_grad():
        call(w)
        graph = make_fx(lambda x: grouped_mm(x, w.mT, offs))(x)
        w.data.mul_(-3)
        assert_same(graph(x), grouped_mm(x, w.detach().clone().mT, offs))


def test_cuda_graph(gpu):
    """A replayed graph quantizes the current weights. Once the context is left, eager calls read the weights that the
    graph wrote."""
    w = parameter(gpu)
    values = [A.detach().to(gpu), w.detach(), OFFS.to(gpu), G.to(gpu)]

    def step(a: Tensor, w: Tensor, offs: Tensor, g: Tensor) -> list[Tensor]:
        out = grouped_mm(a, w.transpose(-2, -1), offs)
        return [out.detach(), *torch.autograd.grad(out, (a, w), g)]

    args, later = ([t.mul(f).requires_grad_() for t in values[:2]] + values[2:] for f in (1, -3))
    with reuse_weights():
        check_cuda_graph(step, args, later)


def test_streams_have_copies_of_their_own(gpu):
    w = parameter(gpu)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with reuse_weights():
        call(w)
        with torch.cuda.stream(side):
            assert quantizations(lambda: (call(w), call(w))) == 1
        assert quantizations(lambda: call(w)) == 0
    torch.cuda.synchronize()
