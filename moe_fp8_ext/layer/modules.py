"""An MoE layer as modules. State dicts have the names and layouts of Transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moe_fp8_ext.distributed.dtensor import draw_in_turn, is_dtensor, of_all, of_rank, sum_of_ranks
from moe_fp8_ext.layer.adapter import MAX_RANK, LoRA, check_adapter_numbers
from moe_fp8_ext.layer.experts import KEEP, experts, recipe_of_module
from moe_fp8_ext.layer.frozen import FrozenWeight
from moe_fp8_ext.layer.router import Router, Routing
from moe_fp8_ext.layer.weight_gradients import DelayedWgrads
from moe_fp8_ext.ops.activations import is_gated
from moe_fp8_ext.ops.checks import (
    check_bool,
    check_dense,
    check_has_forward,
    check_int,
    check_not_meta,
    check_one_of,
    check_output,
    check_parameter_dtype,
    check_sizes,
    fail,
    require,
)
from moe_fp8_ext.ops.dispatch import needs_gradient, reshaped
from moe_fp8_ext.quantization.format import FORMATS
from moe_fp8_ext.quantization.recipe import Recipe, get_recipe
from moe_fp8_ext.quantization.tensor import quantize_weight

if TYPE_CHECKING:
    from moe_fp8_ext.distributed import ExpertParallel


def _fixed(name: str, read: Callable[[nn.Module], object], instead: str = "construct another module") -> property:
    """An argument of a constructor as an attribute that can be read alone: forward would not see an assigned value."""

    def refuse(module: nn.Module, value: object) -> None:
        raise AttributeError(f"{type(module).__name__}: {name} must not be assigned, got {value!r}; {instead}")

    return property(read, refuse, doc=f"The argument {name} of the constructor.")


_SHARD = 'call fully_shard(layer.experts, mesh=mesh["dp"]) first, over ranks that have the same experts'


def _option(name: str, **how: str) -> property:
    return _fixed(name, lambda module: module.options[name], **how)


class Experts(nn.Module):
    """The routed experts: `experts` with its own parameters.

        experts = Experts(num_experts, hidden_size, intermediate_size)
        out = experts(x, topk_ids, topk_scores)

    Parameters may be DTensors, sharded by expert (`Shard(0)`) over a mesh of one dimension. If x is a tensor of the
    rank, ids count the rank's experts. If x is a DTensor that every rank has (`Replicate()`), ids count all experts.
    The result is then a `Partial()` DTensor, whose sum over ranks is the output.

    With ep, the parameters are the weights of this rank's experts, [num_experts / ranks, ...]. If ep was made from a
    DeviceMesh, they are DTensors, sharded by expert over it. x has the tokens of this rank, and ids count all experts.

    Attributes:
        gate_up_proj: [E, 2 F, D]. An activation that is not gated has up_proj [E, F, D] instead.
        gate_up_proj_bias: [E, 2 F], with bias. An activation that is not gated has up_proj_bias [E, F] instead.
        down_proj: [E, D, F]. After `freeze_` both weights are `FrozenWeight` modules.
        down_proj_bias: [E, D], with bias.
        gate_up_proj_lora_A, gate_up_proj_lora_B: [E, r, D] and [E, 2 F, r], with lora_rank; likewise of down_proj, or
            of up_proj.
        num_experts, hidden_size, intermediate_size, recipe, activation, interleaved, keep, main_grad,
        delay_wgrad, lora_rank: as constructed. Assigning one raises; `convert_` changes the recipe.

    Args:
        num_experts, hidden_size, intermediate_size: E, of all ranks together, D and F.
        bias: whether experts have biases.
        recipe, activation, interleaved, keep: as in `experts`.
        main_grad: whether backward adds the gradient of each trained weight to the weight's attribute `main_grad`,
            as in `experts`. The trainer sets the attribute before forward. Biases get their gradients from autograd, as
            usual.
        delay_wgrad: whether backward leaves the gradients of weights to `backward_dw`, see `DelayedWgrads`.
        lora_rank: the rank r of adapters of both projections, or None for no adapters. With adapters, weights and
            biases are frozen; set their requires_grad to train them too. B starts as zeros.
        lora_scaling, lora_dropout: scaling and dropout of `LoRA`; dropout only in training mode.
        ep: spreads the experts over its ranks, by `ExpertParallel.experts`. Copies of the module share it.
        device, dtype: of the parameters.

    Raises:
        RuntimeError: num_experts or the recipe differs from ep's. In forward: a weight that needs a gradient has
            no main_grad; otherwise as in `experts`, or as in `ExpertParallel.experts`.
    """

    recipe = _option("recipe", instead="call moe_fp8_ext.convert_(module, recipe)")
    activation, interleaved, keep = map(_option, ("activation", "interleaved", "keep"))
    num_experts = _fixed("num_experts", lambda module: module._num_experts)
    hidden_size = _fixed("hidden_size", lambda module: module.down_proj.shape[1])
    intermediate_size = _fixed("intermediate_size", lambda module: module.down_proj.shape[2])
    main_grad = _fixed("main_grad", lambda module: module.adds_to_main_grad)
    delay_wgrad = _fixed("delay_wgrad", lambda module: module.delayed is not None)
    lora_rank = _fixed("lora_rank", lambda module: module._lora_rank)

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        recipe: str | Recipe = "rowwise",
        activation: str = "swiglu",
        interleaved: bool = False,
        bias: bool = False,
        keep: str = "fp8",
        main_grad: bool = False,
        delay_wgrad: bool = False,
        lora_rank: int | None = None,
        lora_scaling: float = 1.0,
        lora_dropout: float = 0.0,
        ep: ExpertParallel | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        flags = dict(interleaved=interleaved, bias=bias, main_grad=main_grad, delay_wgrad=delay_wgrad)
        for name, value in flags.items():
            check_bool("Experts", name, value)
        self.delayed = DelayedWgrads() if delay_wgrad else None
        self._num_experts, self.ep, self.adds_to_main_grad = num_experts, ep, main_grad
        recipe = get_recipe(recipe, "Experts")
        self.options = dict(recipe=recipe, activation=activation, interleaved=interleaved, keep=keep)
        check_fits(ep, num_experts, recipe)
        self._is_gated = is_gated("Experts", activation)
        check_one_of("Experts", "keep", keep, KEEP)
        check_sizes("Experts", num_experts, hidden_size=hidden_size, intermediate_size=intermediate_size)
        check_parameter_dtype("Experts", dtype)
        check_adapter_numbers("Experts", "lora_scaling", "lora_dropout", lora_scaling, lora_dropout)
        self._lora_rank, self.lora_scaling, self.lora_dropout = lora_rank, lora_scaling, lora_dropout
        if lora_rank is not None:
            check_int("Experts", "lora_rank", lora_rank)
            in_range = 1 <= lora_rank <= MAX_RANK
            require(in_range, f"Experts: lora_rank must be None or from 1 to {MAX_RANK}, got {lora_rank}")
        self.up = "gate_up_proj" if self._is_gated else "up_proj"
        rows = intermediate_size * (2 if self._is_gated else 1)
        sizes = {self.up: (rows, hidden_size), "down_proj": (hidden_size, intermediate_size)}
        for name, (n, k) in sizes.items():
            self.register_parameter(name, self._parameter(n, k, device=device, dtype=dtype))
            self.register_parameter(f"{name}_bias", self._parameter(n, device=device, dtype=dtype) if bias else None)
        if lora_rank is not None:
            self.requires_grad_(False)
            for name, (n, k) in sizes.items():
                for letter, size in (("A", (lora_rank, k)), ("B", (n, lora_rank))):
                    self.register_parameter(f"{name}_lora_{letter}", self._parameter(*size, device=device, dtype=dtype))
        self.register_load_state_dict_pre_hook(_check_frozen)
        self.reset_parameters()

    @torch.no_grad()
    def freeze_(self, *, both: bool = False) -> Experts:
        """Replaces the weights by their FP8 values, so that no call quantizes them any more. Returns the module.

        Each weight becomes a `FrozenWeight`, quantized as the module's recipe quantizes it. So outputs and the
        gradients of tokens and scores stay the same, byte for byte. Weights get no gradient from then on. Biases stay
        parameters. State dicts have the quantized values: freeze a module before it loads one.

        Args:
            both: whether a weight in square blocks ("blockwise") also holds its transpose. This takes one more byte an
                element, and saves the transpose in backward. Other formats always hold both directions.

        Raises:
            RuntimeError: the recipe does not always multiply in FP8, such as "bf16" and "auto"; a weight is no
                parameter, because it is parametrized; or it is on the meta device. Nothing is changed.
        """
        check_bool("Experts.freeze_", "both", both)
        recipe, names = self.options["recipe"], (self.up, "down_proj")
        is_fp8 = recipe.format is not None and not recipe.bf16_where_faster
        text = f"Experts.freeze_: recipe must be one that always multiplies in fp8, got {recipe.name!r}"
        require(is_fp8, f"{text}; give Experts a recipe such as 'blockwise'")
        stored = {name for name, _ in (*self.named_parameters(recurse=False), *self.named_children())}
        for name in names:
            text = f"Experts.freeze_: {name} must be a parameter of the module, got one that is computed"
            require(name in stored, f"{text}; call torch.nn.utils.parametrize.remove_parametrizations first")
            if isinstance(weight := getattr(self, name), Tensor):
                check_not_meta("Experts.freeze_", name, weight)
        alone = FORMATS[recipe.format].has_square_blocks and not both
        how = dict(dtype=recipe.dtype, rounding=recipe.rounding)
        for name in names:
            weight = getattr(self, name)
            if isinstance(weight, FrozenWeight):
                continue
            pair = quantize_weight(of_rank(name, weight).detach(), recipe.format, **how)
            delattr(self, name)  # the place of a parameter cannot hold a module
            setattr(self, name, FrozenWeight(pair[0] if alone else pair, weight))
        return self

    def __setattr__(self, name: str, value: object) -> None:
        """Sees a parameter that `fully_shard` has sharded. Experts of an ep differ, but FSDP2 would mix them."""
        if is_dtensor(value) and self.ep is not None and self.ep.mesh is None:
            if self.ep.has_others_of(value.device_mesh.mesh.flatten().tolist()):
                self.ep.refuse_to_keep_equal("fully_shard", _SHARD)
        super().__setattr__(name, value)

    def _parameter(self, *size: int, **options: object) -> nn.Parameter:
        count = self.num_experts if self.ep is None else self.ep.ranks.num_local_experts
        local, mesh = torch.empty(count, *size, **options), getattr(self.ep, "mesh", None)
        return nn.Parameter(local if mesh is None else of_all(local, mesh))

    def reset_parameters(self) -> None:
        """Draws parameters as nn.Linear does: uniform, up to 1 / sqrt(inputs).

        A seed gives the same parameters on any number of ranks. B of an adapter becomes zero. Weights that `freeze_`
        has quantized stay.
        """
        first = 0  # the number of this rank's first expert, unless parameters are DTensors, which know it themselves
        if self.ep is not None and self.ep.mesh is None:
            first = self.ep.ranks.rank * self.ep.ranks.num_local_experts
        for name in (self.up, "down_proj"):
            weight, bias = getattr(self, name), getattr(self, f"{name}_bias")
            bound, drawn = weight.shape[2] ** -0.5, [t for t in (weight, bias) if isinstance(t, Tensor)]
            if self.lora_rank is not None:
                drawn.append(getattr(self, f"{name}_lora_A"))
                nn.init.zeros_(getattr(self, f"{name}_lora_B"))
            for parameter in drawn:
                draw_in_turn(parameter, first, self.num_experts, partial(nn.init.uniform_, a=-bound, b=bound))

    def extra_repr(self) -> str:
        hidden, intermediate = self.down_proj.shape[1:]
        sizes = f"{self.num_experts}, hidden_size={hidden}, intermediate_size={intermediate}"
        return f"num_experts={sizes}, recipe={self.options['recipe'].name!r}, activation={self.options['activation']!r}"

    def forward(
        self, x: Tensor, topk_ids: Tensor, topk_scores: Tensor, shared_experts: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """x [T, D], topk_ids and topk_scores [T, top_k] -> [T, D]. shared_experts: as in `ExpertParallel.experts`."""
        call = x, topk_ids, topk_scores
        if self.ep is not None:
            return self._over_ranks(*call, shared_experts)
        require(shared_experts is None, "Experts: shared_experts must be None without ep, got one")
        if not is_dtensor(x):
            return self._of_rank(*call)
        mesh = getattr(self.down_proj, "device_mesh", None)
        return sum_of_ranks(self._of_rank, mesh, self.num_experts, *call)

    def _of_rank(self, x: Tensor, topk_ids: Tensor, topk_scores: Tensor) -> Tensor:
        rest = self._arguments()
        recipe = recipe_of_module(self, self.options["recipe"], topk_ids, rest["w_down"], self._is_gated)
        return experts(x, topk_ids, topk_scores, **rest, **{**self.options, "recipe": recipe})

    def _over_ranks(
        self, x: Tensor, topk_ids: Tensor, topk_scores: Tensor, shared_experts: Callable[[Tensor], Tensor] | None
    ) -> Tensor:
        with self.ep.errors_on_all_ranks():
            rest = self._arguments()
        options = {name: value for name, value in self.options.items() if name != "recipe"}  # ep has the recipe
        return self.ep.experts(x, topk_ids, topk_scores, shared_experts=shared_experts, **rest, **options)

    def _arguments(self) -> dict[str, Tensor | LoRA | DelayedWgrads | None]:
        """Returns the arguments of `experts` that the module holds, such as this rank's parameters and main_grads."""
        rest: dict[str, Tensor | LoRA | DelayedWgrads | None] = {"delay_wgrad": self.delayed}
        for argument, name in (("gate_up", self.up), ("down", "down_proj")):
            weight = getattr(self, name)
            is_frozen = isinstance(weight, FrozenWeight)
            rest[f"w_{argument}"] = weight.operand() if is_frozen else of_rank(name, weight)
            rest[f"b_{argument}"] = of_rank(f"{name}_bias", getattr(self, f"{name}_bias"))
            rest[f"main_grad_{argument}"] = of_rank(f"main_grad of {name}", self._main_grad(name))
            if self.lora_rank is not None:
                A = of_rank(f"{name}_lora_A", getattr(self, f"{name}_lora_A"))
                B = of_rank(f"{name}_lora_B", getattr(self, f"{name}_lora_B"))
                rest[f"lora_{argument}"] = LoRA(A, B, self.lora_scaling, self.lora_dropout if self.training else 0.0)
        return rest

    def backward_dw(self) -> None:
        """Computes the gradients of weights of the oldest waiting backward. Without `delay_wgrad` it does nothing.

        Raises:
            RuntimeError: no backward waits.
        """
        if self.delayed is not None:
            self.delayed.backward_dw()

    def _main_grad(self, name: str) -> Tensor | None:
        if not self.adds_to_main_grad:
            return None
        weight = getattr(self, name)
        if isinstance(weight, FrozenWeight) or not needs_gradient(weight):
            return None
        main_grad = getattr(weight, "main_grad", None)
        require(main_grad is not None, f"Experts: {name} must have a main_grad with main_grad=True, got none")
        return main_grad


def _check_frozen(experts: Experts, state_dict: dict[str, object], prefix: str, *_: object) -> None:
    """Runs before a state dict is loaded. Raises if a weight is frozen in the module and not there, or the reverse.

    Also with strict=False, as for sizes that differ.
    """
    for name in (experts.up, "down_proj"):
        is_frozen = isinstance(getattr(experts, name), FrozenWeight)
        if is_frozen and f"{prefix}{name}" in state_dict:
            text = f"{prefix}{name} of the state dict must be frozen as the module's, got a trained weight"
            fail("Experts", f"{text}; load the state dict first, and then call freeze_()")
        if not is_frozen and f"{prefix}{name}.q_bytes" in state_dict:
            text = f"{prefix}{name} of the state dict must be trained as the module's, got a frozen weight"
            fail("Experts", f"{text}; call freeze_() first, of a module with the recipe of the state dict")


def _tokens_of(x: Tensor) -> Tensor:
    check_dense("MoE", "x", x, max(x.dim(), 1) if isinstance(x, Tensor) else 2)
    # torch.export takes numel() for a constant, so this is math.prod. -1 is ambiguous if the last size is 0.
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def check_fits(ep: ExpertParallel | None, num_experts: int, recipe: Recipe) -> None:
    is_one = ep is None or hasattr(ep, "ranks")  # isinstance would import torch.distributed
    require(is_one, f"Experts: ep must be an ExpertParallel, got {type(ep).__name__}")
    for name, got in (("num_experts", num_experts), ("recipe", recipe)):
        wanted = getattr(ep, name, got)
        require(got == wanted, f"Experts: {name} must equal ep's, {wanted}, got {got}")


def _check_forwards(router: nn.Module, experts: nn.Module) -> None:
    """Refuses modules whose forward is known, and cannot be what MoE calls. Any other module may be one."""
    others = MoE.forward, nn.Linear.forward
    is_swapped = isinstance(router, Experts) or isinstance(experts, Router)
    cause = "; modules are given as MoE(router, experts)" if is_swapped else ""
    if type(router).forward in (Experts.forward, *others):
        got = type(router).__name__
        raise TypeError(f"MoE: router must be a Router, or a module that returns a Routing, got {got}{cause}")
    if type(experts).forward in (Router.forward, *others):
        raise TypeError(f"MoE: experts must be a module such as Experts, got {type(experts).__name__}{cause}")


class MoE(nn.Module):
    """A router, the experts that it chooses from, and optional experts that every token uses.

    Attributes:
        gate: the router. State dicts have these three names. Assigning `router` raises.
        experts: the experts.
        shared_experts: the experts that every token uses, or None.

    Args:
        router: a module whose forward is [T, D] -> `Routing`, such as a `Router`.
        experts: a module such as `Experts`, whose forward is (x [T, D], topk_ids, topk_scores) -> [T, D].
        shared_experts: any module [..., D] -> [..., D], such as a dense feed-forward layer. If experts have an ep, it
            is called while tokens travel to them.
        num_fused_shared: number of shared experts that run in the same products and the same recipe as routed ones.
            They are the last of `experts`: every real token uses them with the score 1, and the router chooses among
            the others. A dense SwiGLU layer of width n F is the sum of n experts of width F. Not with ep.

    Raises:
        RuntimeError: a `Router` chooses among more or fewer experts than `Experts` has, or for tokens of another size;
            or num_fused_shared is not as above.
        TypeError: an argument is no module, or one that cannot be meant, such as `Experts` for the router or a
            ModuleList, which has no forward. In forward, a RuntimeError: router returns no `Routing`, experts no tensor
            [T, D], or shared_experts no tensor shaped as x.
    """

    def __init__(
        self,
        router: nn.Module,
        experts: nn.Module,
        shared_experts: nn.Module | None = None,
        *,
        num_fused_shared: int = 0,
    ) -> None:
        super().__init__()
        check_has_forward("MoE", "router", router)
        check_has_forward("MoE", "experts", experts)
        _check_forwards(router, experts)
        if shared_experts is not None:
            check_has_forward("MoE", "shared_experts", shared_experts)
        check_int("MoE", "num_fused_shared", num_fused_shared)
        require(num_fused_shared >= 0, f"MoE: num_fused_shared must be at least 0, got {num_fused_shared}")
        knows = not num_fused_shared or isinstance(experts, Experts)
        require(knows, f"MoE: experts must be an Experts with num_fused_shared, got {type(experts).__name__}")
        has_ep = num_fused_shared and getattr(experts, "ep", None) is not None  # every token would go to one rank
        require(not has_ep, f"MoE: num_fused_shared must be 0 for experts with an ep, got {num_fused_shared}")
        if isinstance(router, Router) and isinstance(experts, Experts):  # else some ids would be dropped silently
            chosen, has = router.weight.shape[0], experts.num_experts - num_fused_shared
            size, takes = router.weight.shape[1], experts.down_proj.shape[1]
            is_swapped = chosen != has and (chosen, size) == (takes, has)
            cause = "; sizes are given as Router(num_experts, hidden_size, top_k)" if is_swapped else ""
            fused = f" and {num_fused_shared} fused ones" if num_fused_shared else ""
            text = f"MoE: experts must be as many as router chooses among, {chosen}, got {has}{fused}{cause}"
            require(chosen == has, text)
            require(size == takes, f"MoE: experts must have the hidden_size of router, {size}, got {takes}")
        self.gate, self.experts, self.shared_experts = router, experts, shared_experts
        self.num_fused_shared = num_fused_shared

    def __setattr__(self, name: str, value: object) -> None:
        if name == "router":  # a property would not do: torch registers a module without a look at the class
            raise AttributeError("MoE: router must not be assigned; the attribute of the router is gate")
        super().__setattr__(name, value)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, topk_ids: Tensor | None = None, topk_scores: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns out, shaped as x [..., D], and the router's loss, which the caller adds to the model's loss.

        Args:
            mask, topk_ids, topk_scores: as in `Router.forward`, with the leading sizes of x: [...] and [..., top_k].
                The router gets the ones that are not None. A padding token uses shared_experts alone.
        """
        ep, options = getattr(self.experts, "ep", None), {}
        with nullcontext() if ep is None else ep.errors_on_all_ranks():
            tokens = _tokens_of(x)
            routing = self._route(x, tokens, mask, topk_ids, topk_scores)
        if ep is not None and self.shared_experts is not None:
            options["shared_experts"] = lambda t: self._shared(t.view(x.shape)).reshape(t.shape)
        out = self._routed(x, tokens, routing, **options)
        if self.shared_experts is not None and not options:
            out = out + self._shared(x)
        return out, routing.loss

    def _routed(self, x: Tensor, tokens: Tensor, routing: Routing, **options: Callable[[Tensor], Tensor]) -> Tensor:
        out = self.experts(tokens, routing.topk_ids, routing.topk_scores, **options)
        return reshaped(check_output("MoE", "experts", out, tokens).contiguous(), x.shape)

    def _shared(self, x: Tensor) -> Tensor:
        return check_output("MoE", "shared_experts", self.shared_experts(x), x)

    def _route(self, x: Tensor, tokens: Tensor, mask: Tensor | None, *given_slots: Tensor | None) -> Routing:
        given = {} if mask is None else {"mask": mask}
        given |= {name: t for name, t in zip(("topk_ids", "topk_scores"), given_slots, strict=True) if t is not None}
        for name, t in given.items():
            require(isinstance(t, Tensor), f"MoE: {name} must be a tensor, got {type(t).__name__}")
            slots = () if name == "mask" else t.shape[-1:]
            if t.shape != (*x.shape[:-1], *slots):
                wanted = [*x.shape[:-1], *(["top_k"] if name != "mask" else [])]
                fail("MoE", f"{name} must have shape [{', '.join(map(str, wanted))}], got {list(t.shape)}")
            given[name] = t.reshape(tokens.shape[0], *slots)
        routing = self.gate(tokens, **given)
        text = "MoE: router must return a Routing (topk_ids, topk_scores, loss), got"
        require(all(hasattr(routing, field) for field in Routing._fields), f"{text} {type(routing).__name__}")
        return self._with_fused(routing, given.get("mask")) if self.num_fused_shared else routing

    def _with_fused(self, routing: Routing, mask: Tensor | None) -> Routing:
        """Appends the slots of fused shared experts, which padding tokens do not use."""
        (tokens, _), first = routing.topk_ids.shape, self.experts.num_experts - self.num_fused_shared
        how = dict(device=routing.topk_ids.device, dtype=routing.topk_ids.dtype)
        ids = torch.arange(first, self.experts.num_experts, **how).expand(tokens, -1)
        if mask is not None:
            ids = ids.masked_fill(~mask[:, None], -1)
        scores = routing.topk_scores.new_ones(tokens, self.num_fused_shared)
        all_ids, all_scores = torch.cat([routing.topk_ids, ids], 1), torch.cat([routing.topk_scores, scores], 1)
        return Routing(all_ids, all_scores, routing.loss)
