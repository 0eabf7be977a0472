"""Weights that lie as [E, K, N] in memory, such as GPT-OSS's: gradients lie likewise, so that autograd copies none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import assert_same_tensor, short
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_fp8_ext import DelayedWgrads, Recipe, experts, grouped_mm

RECIPES = {name: Recipe(name) for name in ("rowwise", "blockwise", "mxfp8", "bf16")}
RECIPES["wgrad_high_precision"] = Recipe("rowwise", wgrad_high_precision=True)
D, F, E, TOP_K = 64, 48, 5, 2


class CopiesOfShapes(TorchDispatchMode):
    """Lists the ops that copy a tensor of one of the shapes."""

    def __init__(self, *shapes: torch.Size) -> None:
        super().__init__()
        self.shapes, self.found = {frozenset(shape) for shape in shapes}, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        is_copy = func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten.clone, torch.ops.aten._to_copy)
        if is_copy and frozenset(out.shape) in self.shapes:
            self.found.append((str(func), out.dtype))
        return out


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def leaves(device: str, transposed: bool, dtype: torch.dtype = torch.bfloat16) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters of a layer, as they lie in memory, and as the views [E, N, K] that it takes."""
    weights = [w.to(device, dtype) for w in (drawn(E, 2 * F, D), drawn(E, D, F))]
    if not transposed:
        parameters = [w.requires_grad_() for w in weights]
        return parameters, parameters
    parameters = [w.mT.contiguous().requires_grad_() for w in weights]
    return parameters, [w.mT for w in parameters]


def of_layer(device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, ids and scores; expert 3 has no token."""
    ids = torch.rand(70, E - 1, generator=torch.Generator().manual_seed(0)).topk(TOP_K).indices
    scores = drawn(70, TOP_K).float().sigmoid()
    return tuple(t.to(device) for t in (drawn(70, D), ids + (ids >= 3), scores))


def gradients(parameters: list[Tensor], out: Tensor) -> list[tuple[str, torch.dtype]]:
    """Runs backward; returns the copies of gradients."""
    with CopiesOfShapes(*(p.shape for p in parameters)) as copies:
        out.backward(torch.ones_like(out))
    for p in parameters:
        assert p.grad.stride() == p.stride()
    return copies.found


def check(device: str, run: Callable[..., Tensor], dtype: torch.dtype = torch.bfloat16) -> None:
    (plain, plain_views), (params, views) = (leaves(device, transposed, dtype) for transposed in (False, True))
    want, got = gradients(plain, run(*plain_views)), gradients(params, run(*views))
    if device == "cpu":  # on a GPU, casts of weights copy what they pad
        assert got == want == ([] if dtype == torch.bfloat16 else [("aten._to_copy.default", dtype)] * 2)
    for p, of_plain in zip(params, plain, strict=True):
        assert of_plain.grad.any()
        assert_same_tensor(p.grad.mT.contiguous(), of_plain.grad, "gradient")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=short)
@pytest.mark.parametrize("name", RECIPES)
def test_layer(name, dtype, device):
    x, ids, scores = of_layer(device)
    check(device, lambda *w: experts(x.to(dtype), ids, scores, *w, recipe=RECIPES[name]), dtype)


@pytest.mark.parametrize("name", RECIPES)
def test_grouped_mm(name, device):
    a, offs = drawn(70, D).to(device), torch.tensor([20, 20, 33, 60, 66], dtype=torch.int32, device=device)

    def run(up: Tensor, down: Tensor) -> Tensor:
        return grouped_mm(grouped_mm(a, up.mT, offs, recipe=RECIPES[name])[:, :F], down.mT, offs, recipe=RECIPES[name])

    check(device, run)


def test_delayed_gradients(device):
    x, ids, scores = of_layer(device)
    (plain, plain_views), (params, views) = (leaves(device, transposed) for transposed in (False, True))
    views = [w.detach().requires_grad_() for w in views]  # as parameters: they have no base that autograd knows
    for of in (plain_views, views):
        delayed = DelayedWgrads()
        experts(x.requires_grad_(), ids, scores, *of, delay_wgrad=delayed).sum().backward()
        with CopiesOfShapes(*(p.shape for p in of)) as copies:
            delayed.backward_dw()
        assert not copies.found
    for p, of_plain in zip(views, plain, strict=True):
        assert p.grad.stride() == p.stride()
        assert_same_tensor(p.grad.contiguous(), of_plain.grad, "gradient")


def test_the_gradient_is_the_tensor_that_backward_returned():
    x, ids, scores = of_layer("cpu")
    params, views = leaves("cpu", transposed=True)
    returned = []
    for view in views:
        view.register_hook(lambda grad: returned.append(grad.data_ptr()))
    experts(x, ids, scores, *views).sum().backward()
    assert {p.grad.data_ptr() for p in params} == set(returned) and len(returned) == 2


def test_compiled(device):
    """Strides of fakes are right: a compiled layer has the same gradients, without a copy."""
    x, ids, scores = of_layer(device)
    torch._dynamo.reset()
    compiled = torch.compile(experts, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    check(device, lambda *w: compiled(x, ids, scores, *w))


def test_gpt_oss_of_transformers():
    from transformers_models import tiny_model

    from moe_fp8_ext.integrations.transformers import register

    register()
    model = tiny_model("gpt_oss", "moe_fp8")
    params = {n: p for n, p in model.named_parameters() if n.endswith(("experts.gate_up_proj", "experts.down_proj"))}
    assert len(params) == 4
    ids = torch.arange(32)[None]
    loss = model(input_ids=ids, labels=ids).loss
    with CopiesOfShapes(*(p.shape for p in params.values())) as copies:
        loss.backward()
    assert not copies.found
    assert all(p.grad.any() and p.grad.stride() == p.stride() for p in params.values())
