"""The implementations that bench/beside.py compares with ours.

A rival takes the inputs of one row and gives its variants by name. A variant is made when it is first needed, so that
one that fails does not take the others along.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module, metadata

import torch
from case import EVEN, group_ends, shares
from cases_experts import composed, routed
from torch import Tensor, nn

import moe_fp8_ext

RECIPES = "bf16", "rowwise", "blockwise"
REUSED = ", weights reused"
PACKAGES = (
    *("torch", "triton", "transformer-engine", "torchao", "deep_gemm", "sonicmoe", "quack-kernels"),
    *("nvidia-cutlass-dsl", "transformers"),
)
# Logits of this deviation around the logarithms of shares choose experts about as often as the shares say.
GUMBEL_DEVIATION = 1.28


@dataclass(frozen=True)
class Given:
    """Inputs of one row. `sizes` are the sizes of the groups on the host, which a training step would have to wait for.
    Layers have `ids` and `scores`, products have `offs`. `weights` are shared by all variants."""

    x: Tensor
    grad: Tensor
    weights: list[Tensor]
    groups: str
    sizes: list[int]
    offs: Tensor | None = None
    ids: Tensor | None = None
    scores: Tensor | None = None
    top_k: int = 0


@dataclass(frozen=True)
class Variant:
    """`forward` gives the output. A step clears the gradients of `leaves` and calls backward, `within` the context."""

    forward: Callable[[], Tensor]
    leaves: list[Tensor]
    within: Callable[[], AbstractContextManager] = nullcontext


Makers = dict[str, Callable[[], Variant]]
Rival = Callable[[Given], Makers]


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    found = {package: version for package in PACKAGES if (version := version_of(package))}
    for name in ("libcublasLt.so.13", "libcublasLt.so.12"):  # the one that torch loaded
        try:
            found["cuBLASLt"] = str(ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW).cublasLtGetVersion())
        except OSError:
            continue
    return found


# Inputs


def product_inputs(device: str, groups: str, m: int, k: int, n: int, e: int) -> Given:
    offs = group_ends(groups, m, e, torch.device(device))
    if groups == EVEN and m % e == 0:  # group_ends rounds shares, which may be one row off
        offs = torch.arange(1, e + 1, dtype=torch.int32, device=device) * (m // e)
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(m, n, device=device, dtype=torch.bfloat16)
    w = (torch.randn(e, n, k, device=device, dtype=torch.bfloat16) * k**-0.5).requires_grad_()
    return Given(x, grad, [w], groups, torch.diff(offs, prepend=offs.new_zeros(1)).tolist(), offs=offs)


def _expert_weights(device: str, d: int, f: int, e: int) -> list[Tensor]:
    sizes = (e, 2 * f, d), (e, d, f)
    return [(torch.randn(size, device=device, dtype=torch.bfloat16) * 0.02).requires_grad_() for size in sizes]


def layer_inputs(device: str, groups: str, t: int, d: int, f: int, e: int, k: int) -> Given:
    x = torch.randn(t, d, device=device, dtype=torch.bfloat16, requires_grad=True)
    if groups == EVEN:  # in whole blocks of rows, the best case of those that pad
        ids = (torch.arange(t, device=device)[:, None] * k + torch.arange(k, device=device)) % e
        ids = ids[torch.randperm(t, device=device)]
        scores = torch.rand(t, k, device=device).softmax(-1).requires_grad_()
    else:
        ids, scores = routed(torch.device(device), groups, t, e, k)
    sizes = torch.bincount(ids.flatten(), minlength=e).tolist()
    return Given(
        x, torch.randn_like(x), _expert_weights(device, d, f, e), groups, sizes, ids=ids, scores=scores, top_k=k
    )


def routed_layer_inputs(device: str, groups: str, t: int, d: int, f: int, e: int, k: int) -> Given:
    """The last weight is the router's. For uneven groups, the first feature of every token is 1, and the router's
    weights for it are the logarithms of the experts' shares."""
    x = torch.randn(t, d, device=device, dtype=torch.bfloat16)
    router = torch.randn(e, d, device=device, dtype=torch.bfloat16) * (GUMBEL_DEVIATION * d**-0.5)
    if groups != EVEN:
        x[:, 0] = 1
        router[:, 0] = shares(groups, e).log().to(router)
    weights = [*_expert_weights(device, d, f, e), router.requires_grad_()]
    return Given(x.requires_grad_(), torch.randn_like(x), weights, groups, [], top_k=k)


# Ours


def our_products(given: Given) -> Makers:
    (w,) = given.weights

    def make(recipe: str) -> Variant:
        forward = lambda: moe_fp8_ext.grouped_mm(given.x, w.mT, given.offs, recipe=recipe)  # noqa: E731
        return Variant(forward, [given.x, w])

    return {recipe: partial(make, recipe) for recipe in RECIPES}


def our_layers(given: Given) -> Makers:
    arguments = given.x, given.ids, given.scores, *given.weights

    def make(recipe: str) -> Variant:
        leaves = [tensor for tensor in arguments if tensor.requires_grad]
        return Variant(lambda: moe_fp8_ext.experts(*arguments, recipe=recipe), leaves)

    return {recipe: partial(make, recipe) for recipe in RECIPES}


def our_routed_layers(given: Given) -> Makers:
    """Gates and ups are interleaved, as SonicMoE has them."""
    w_gate_up, w_down, router_weight = given.weights
    e, d, f = w_down.shape

    def make(recipe: str, within: Callable[[], AbstractContextManager] = nullcontext) -> Variant:
        router = moe_fp8_ext.Router(e, d, given.top_k, device=given.x.device, dtype=torch.bfloat16)
        router.weight = nn.Parameter(router_weight.detach())
        experts = moe_fp8_ext.Experts(e, d, f, recipe=recipe, interleaved=True, device="meta")
        experts.gate_up_proj, experts.down_proj = (nn.Parameter(w.detach()) for w in (w_gate_up, w_down))
        moe = moe_fp8_ext.MoE(router, experts)
        return Variant(lambda: moe(given.x)[0], [given.x, *moe.parameters()], within)

    reused = {f"rowwise{REUSED}": partial(make, "rowwise", moe_fp8_ext.reuse_weights)}
    return {recipe: partial(make, recipe) for recipe in RECIPES} | reused


# torch and Transformers


def torch_products(given: Given) -> Makers:
    (w,) = given.weights
    return {"torch BF16": lambda: Variant(lambda: torch._grouped_mm(given.x, w.mT, offs=given.offs), [given.x, w])}


def torch_layers(given: Given) -> Makers:
    arguments = given.x, given.ids, given.scores, *given.weights
    leaves = [tensor for tensor in arguments if tensor.requires_grad]
    return {"torch BF16": lambda: Variant(lambda: composed(*arguments), leaves)}


def transformers_layers(given: Given) -> Makers:
    """The experts of Qwen3-MoE with each implementation of Transformers. Its kernel `sonicmoe` is downloaded at the
    first call."""
    e, d, f = given.weights[1].shape
    sizes = dict(hidden_size=d, moe_intermediate_size=f, num_experts=e, num_experts_per_tok=given.top_k)

    def make(implementation: str) -> Variant:
        from transformers import AutoConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        config = AutoConfig.for_model("qwen3_moe", **sizes)
        config._experts_implementation = implementation
        with torch.device("meta"):
            experts = Qwen3MoeExperts(config)
        experts.gate_up_proj, experts.down_proj = (nn.Parameter(w.detach()) for w in given.weights)
        scores = given.scores.detach().to(torch.bfloat16).requires_grad_()
        leaves = [given.x, scores, *experts.parameters()]
        return Variant(lambda: experts(given.x, given.ids, scores), leaves)

    return {f"Transformers {name}, BF16": partial(make, name) for name in ("grouped_mm", "sonicmoe")}


# torchao


def torchao_products(given: Given) -> Makers:
    (w,) = given.weights

    def rowwise() -> Variant:
        from torchao.prototype.moe_training.fp8_grouped_mm import _to_fp8_rowwise_then_scaled_grouped_mm as multiply

        # It takes groups of whole 16 rows, and its own padding raises that it does not exist yet.
        pads = any(size % 16 for size in given.sizes)
        forward = lambda: multiply(given.x, w.mT, given.offs, pad_token_groups_for_grouped_mm=pads)  # noqa: E731
        return Variant(forward, [given.x, w])

    def blockwise() -> Variant:
        import_module("deep_gemm")  # raises if it is absent; torchao would emulate its products
        from torchao.prototype.moe_training.blockwise_fp8 import grouped_mm

        multiply, pads = grouped_mm._to_fp8_blockwise_then_scaled_grouped_mm, any(size % 128 for size in given.sizes)
        forward = lambda: multiply(given.x, w.mT, given.offs, pad_token_groups_for_grouped_mm=pads)  # noqa: E731
        return Variant(forward, [given.x, w])

    return {"torchao rowwise": rowwise, "torchao blockwise over DeepGEMM": blockwise}


# TransformerEngine


def _te_recipes() -> dict[str, object]:
    from transformer_engine.common.recipe import Float8BlockScaling, Float8CurrentScaling

    return {"TE BF16": None, "TE blocks": Float8BlockScaling(), "TE per tensor": Float8CurrentScaling()}


def _te_linear(w: Tensor, grouped: bool) -> nn.Module:
    """TransformerEngine's grouped linear layer on views of our weights."""
    import transformer_engine.pytorch as te

    e, n, k = w.shape
    options = dict(bias=False, params_dtype=torch.bfloat16, device=w.device.type, use_grouped_tensor=grouped)
    linear = te.GroupedLinear(e, k, n, **options)
    for i, expert in enumerate(w.detach()):
        getattr(linear, f"weight{i}").data = expert
    return linear


def _require_grouped_tensors(recipe: object) -> None:
    """TransformerEngine would quietly take its other way instead."""
    from transformer_engine.pytorch.module.grouped_linear import is_module_grouped_tensor_path_supported

    if not is_module_grouped_tensor_path_supported(recipe, torch.bfloat16):
        raise RuntimeError(
            "on Hopper this way needs cuBLASLt 13.4, with scales of tensors 13.5, with blocks 13.6; here is "
            f"{versions().get('cuBLASLt', 'an unknown one')}"
        )


class _Te:
    """Grouped linear layers of TransformerEngine with one recipe. FP8 pads groups by TransformerEngine's own modules.
    In its way for grouped tensors, sizes stay on the device."""

    def __init__(self, given: Given, recipe: object, grouped: bool) -> None:
        import transformer_engine.pytorch as te

        if grouped:
            _require_grouped_tensors(recipe)
        self.recipe, self.sizes, self.autocast = recipe, given.sizes, te.autocast
        self.linears = [_te_linear(w, grouped) for w in given.weights]
        device = given.x.device if grouped else "cpu"
        self.counts = torch.tensor(given.sizes, dtype=torch.int64, device=device)
        self.pad = recipe is not None and not grouped and any(size % 16 for size in given.sizes)
        if grouped and any(size % 128 for size in given.sizes):
            raise ValueError("its way for grouped tensors is timed with groups of whole blocks of 128 rows only")
        if self.pad:
            self.padding, self.unpadding = te.Fp8Padding(len(given.sizes)), te.Fp8Unpadding(len(given.sizes))

    def parameters(self) -> list[Tensor]:
        return [parameter for linear in self.linears for parameter in linear.parameters()]

    def __call__(self, x: Tensor, between: Callable[[Tensor], Tensor] = lambda h: h) -> Tensor:
        with self.autocast(enabled=True, recipe=self.recipe) if self.recipe else nullcontext():
            counts = self.counts
            if self.pad:
                x, padded = self.padding(x, self.sizes)
                counts = torch.tensor(padded, dtype=torch.int64)
            for i, linear in enumerate(self.linears):
                out = linear(x if i == 0 else between(x), counts)
                x = out[0] if isinstance(out, tuple) else out
            return self.unpadding(x, self.sizes) if self.pad else x


def _te_variants(given: Given, make: Callable[[object, bool], Variant]) -> Makers:
    ways = {"": False, ", grouped tensors": True}
    return {
        f"{name}{way}": partial(make, recipe, grouped)
        for way, grouped in ways.items()
        for name, recipe in _te_recipes().items()
    }


def te_products(given: Given) -> Makers:
    def make(recipe: object, grouped: bool) -> Variant:
        multiply = _Te(given, recipe, grouped)
        return Variant(lambda: multiply(given.x), [given.x, *multiply.parameters()])

    return _te_variants(given, make)


def _swiglu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return nn.functional.silu(gate) * up


def te_layers(given: Given) -> Makers:
    import transformer_engine.pytorch as te

    activate = torch.compile(_swiglu, dynamic=True)
    ids = given.ids.int()

    def make(recipe: object, grouped: bool) -> Variant:
        multiply = _Te(given, recipe, grouped)

        def forward() -> Tensor:
            x, order = te.moe_permute(given.x, ids, num_out_tokens=ids.numel(), map_type="index")
            return te.moe_unpermute(multiply(x, activate), order, given.scores, map_type="index")

        return Variant(forward, [given.x, given.scores, *multiply.parameters()])

    return _te_variants(given, make)


# SonicMoE


def sonicmoe_layers(given: Given) -> Makers:
    from sonicmoe import MoE
    from sonicmoe.enums import ActivationType

    w_gate_up, w_down, router = given.weights
    e, d, f = w_down.shape

    def make() -> Variant:
        sizes = dict(num_experts=e, num_experts_per_tok=given.top_k, hidden_size=d, intermediate_size=f)
        with torch.device("meta"):
            moe = MoE(**sizes, activation_function=ActivationType.SWIGLU, add_bias=False, std=0.02)
        moe.c_fc.weight, moe.c_proj.weight, moe.router.weight = (
            nn.Parameter(w.detach()) for w in (w_gate_up, w_down, router)
        )
        return Variant(lambda: moe(given.x)[0], [given.x, *moe.parameters()])

    return {"SonicMoE BF16": make}


def forget_tuning() -> None:
    """Lets Triton's kernels tune themselves again: what they found while other processes used the GPU is not fair."""
    from triton.runtime import Autotuner

    for tuner in [held for held in gc.get_objects() if isinstance(held, Autotuner)]:
        tuner.cache.clear()


# Kind of row: inputs, ours, and the rivals by name
KINDS: dict[str, tuple[Callable[..., Given], Rival, dict[str, Rival]]] = {
    "product": (
        product_inputs,
        our_products,
        {"torch": torch_products, "TransformerEngine": te_products, "torchao": torchao_products},
    ),
    "experts": (
        layer_inputs,
        our_layers,
        {"torch": lambda given: torch_layers(given) | transformers_layers(given), "TransformerEngine": te_layers},
    ),
    "moe": (routed_layer_inputs, our_routed_layers, {"SonicMoE": sonicmoe_layers}),
}
# Rivals that compile for a minute before they can be timed: sizes compile at the same time, and take turns on the GPU.
COMPILES = {"SonicMoE"}
