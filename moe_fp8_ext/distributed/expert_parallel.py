"""Experts over the ranks of a group: tokens travel to them as the operand that their products want."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from numbers import Integral, Real

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moe_fp8_ext import _torch
from moe_fp8_ext._C import validates
from moe_fp8_ext.distributed.dtensor import is_dtensor
from moe_fp8_ext.distributed.exchange import CallMismatch, Exchange
from moe_fp8_ext.distributed.plan import OP, Agreement, Ranks, StaticPlanner, named, refuse
from moe_fp8_ext.layer.experts import Projection, layer_call
from moe_fp8_ext.layer.node import Call, LayerFunction
from moe_fp8_ext.ops.checks import check_int, check_one_of
from moe_fp8_ext.quantization.format import MAX_EXPERTS
from moe_fp8_ext.quantization.recipe import RECIPES, Recipe, get_recipe
from moe_fp8_ext.quantization.tensor import Pair, Quantized


class ExpertParallel:
    """Experts [rank * L, (rank + 1) * L) of every layer live on a rank; L = num_experts / ranks.

        ep = ExpertParallel(group, num_experts, top_k, recipe="rowwise")
        out = ep.experts(x, topk_ids, topk_scores, w_gate_up, w_down)

    A token travels once to each rank that has any of its experts, quantized where it comes from, with its scales, ids
    and scores in one message. Nothing is cast where it arrives: its bytes are the operand of the product. What experts
    of one rank make of a token is added up there and travels back in bfloat16, as does its gradient.

    Args:
        group: of ranks among which experts are spread, or a DeviceMesh of one dimension.
        num_experts: of all ranks together, a multiple of their number.
        top_k: columns of topk_ids.
        recipe: as in `moe_fp8_ext.experts`, but "auto". Tokens travel in bfloat16 with "bf16" and with
            wgrad_high_precision, else in the recipe's format. The gradient of weights then has its tokens, or its
            gradients where those travel in fp8, from that: rounded twice, or with scales that are powers of two once,
            but for underflow.
        gradients: what gradients of the output travel as, "bf16", or "fp8" in the recipe's format and grad_dtype, from
            which b_down and its part of the scores then have theirs.
        mode: "exact" sends what there is: the host waits, once a call, for the sizes, which are asked for as soon as
            the routing is known. "static" sends buffers of a fixed size, of equal numbers of tokens on all ranks; only
            the first call waits, and later ones may be captured in CUDA graphs.
        capacity: of the buffers of "static", over what even routing fills; None: the number of ranks, which every
            routing fits into. What does not fit is left out as if its id were -1, the last tokens of a rank and the
            slots of a rank's last experts, and counted.
        chunks: parts of a rank's tokens that travel one after another, each while experts compute the one before. Of
            tokens, output and gradients are the same. Gradients of weights are sums of what parts have, rounded to
            bfloat16 after each. Buffers of "static" are those of a part.
        overflow: "raise" has the first call after a backward, or after one that asks for no gradient, `check`: a wait
            once a step, though not in graphs. After the last one, and with "count", it is for you to call.

    Every rank of the group constructs it, and calls it, with the same arguments and in the same order.

    Raises:
        RuntimeError: torch.distributed is not initialized, num_experts is not a multiple of the ranks, an argument is
            not as above or not that of the other ranks; the text names it.
        ValueError, TypeError: no recipe of that name exists, or it is neither a name nor a `Recipe`.

    Source: DeepSeek-V3 technical report, section 3.2 (a token once to a rank, in fp8); DESIGN.md section 6.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh,
        num_experts: int,
        top_k: int,
        *,
        recipe: str | Recipe = "rowwise",
        gradients: str = "bf16",
        mode: str = "exact",
        capacity: float | None = None,
        overflow: str = "raise",
        chunks: int = 1,
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            refuse("group must be one of torch.distributed, which is not initialized")
        self.mesh = group if isinstance(group, DeviceMesh) else None
        wanted = "group must be a ProcessGroup or a DeviceMesh of one dimension, got"
        if self.mesh is not None:
            if group.ndim != 1:
                refuse(f"{wanted} one of {group.ndim}")
            group = group.get_group()
        if not isinstance(group, dist.ProcessGroup):
            refuse(f"{wanted} {type(group).__name__}")
        options = dict(gradients=gradients, mode=mode, capacity=capacity, overflow=overflow, chunks=chunks)
        _agree(group, num_experts=num_experts, top_k=top_k, recipe=recipe, **options)
        for name, count in dict(num_experts=num_experts, top_k=top_k, chunks=chunks).items():
            check_int(OP, name, count)
        check_one_of(OP, "gradients", gradients, ("bf16", "fp8"))
        check_one_of(OP, "mode", mode, ("exact", "static"))
        check_one_of(OP, "overflow", overflow, ("raise", "count"))
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self.num_experts, self.top_k, self.recipe = num_experts, top_k, get_recipe(recipe, OP)
        self.gradients, self.mode, self.capacity = gradients, mode, ranks if capacity is None else capacity
        self.chunks = chunks
        self.overflow = overflow
        self._fp8_tokens = self.recipe.format is not None and not self.recipe.wgrad_high_precision
        self._check_arguments(ranks, capacity)
        device = torch.device("cpu")
        if "nccl" in dist.get_backend_config(group):
            device = torch.device("cuda", torch.cuda.current_device())
        self.ranks = Ranks(group, rank, ranks, num_experts // ranks, device)
        # Buffers hold rows of no token, and a rank has other tokens than one process has: no scale is of all of them.
        self._recipe_of_groups = replace(self.recipe, amax=self.recipe.amax_of_groups)
        self._exchange = Exchange(
            self.ranks,
            self.recipe,
            fp8_tokens=self._fp8_tokens,
            fp8_gradients=gradients == "fp8",
            chunks=chunks,
            static=StaticPlanner(self.ranks, self.capacity, top_k) if mode == "static" else None,
        )
        self._call, self._is_inside = 0, False  # how many calls there were, and whether one is under way

    def _check_arguments(self, ranks: int, capacity: float | None) -> None:
        if ranks > MAX_EXPERTS:
            refuse(f"group must have at most {MAX_EXPERTS} ranks, got {ranks}")
        if self.num_experts < 1 or self.num_experts % ranks:
            refuse(f"num_experts must be a multiple of the {ranks} ranks, got {self.num_experts}")
        if self.num_experts > ranks * MAX_EXPERTS:
            refuse(f"num_experts must be at most {MAX_EXPERTS} a rank, got {self.num_experts} for {ranks}")
        if self.top_k < 1:
            refuse(f"top_k must be at least 1, got {self.top_k}")
        if self.chunks < 1:
            refuse(f"chunks must be at least 1, got {self.chunks}")
        if self.recipe.bf16_where_faster:
            refuse(f'recipe must be the same for all sizes, got {self.recipe.name!r}, which is "bf16" for some')
        if self.gradients == "fp8" and not self._fp8_tokens:
            refuse("gradients must be 'bf16' with recipe \"bf16\" and with wgrad_high_precision, got 'fp8'")
        fits = isinstance(capacity, Real) and self.mode == "static" and 0 < capacity <= ranks
        if capacity is not None and not fits:
            refuse(f"capacity must be None, or with mode 'static' from 0 to the {ranks} ranks, got {capacity!r}")

    @torch.compiler.disable(reason="ExpertParallel exchanges tokens, eagerly: compile without fullgraph=True")
    def experts(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_scores: Tensor,
        w_gate_up: Tensor | Quantized | Pair,
        w_down: Tensor | Quantized | Pair,
        *,
        activation: str = "swiglu",
        interleaved: bool = False,
        b_gate_up: Tensor | None = None,
        b_down: Tensor | None = None,
        keep: str = "fp8",
        main_grad_gate_up: Tensor | None = None,
        main_grad_down: Tensor | None = None,
        shared_experts: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """`moe_fp8_ext.experts` of this rank's tokens and of the experts of all ranks, differentiable once.

        Args:
            x, topk_ids, topk_scores: tokens of this rank, any number of them, and ids in [0, num_experts).
            w_gate_up, w_down, b_gate_up, b_down, main_grad_gate_up, main_grad_down: of this rank's experts.
            activation, interleaved, keep: as in `moe_fp8_ext.experts`.
            shared_experts: of x to what is added to out, such as a module; called while tokens travel.

        Returns:
            out [T, D] of x's dtype. What a rank's experts make of a token is rounded to bfloat16 before ranks add up,
            in float32, in the order of the ranks.

        Raises:
            RuntimeError: as `moe_fp8_ext.experts`; and on every other rank, where one of them raises before it sends
                its tokens, or differs in the width of x or in what asks for a gradient. With mode "static" that is so
                in the first call alone: later ones wait for nobody. An error that nobody is told of leaves the other
                ranks waiting: there, and where memory for what arrives, shared_experts or backward fails. With overflow
                "raise", as `check`. While a CUDA graph is captured, with mode "exact" and in a first call.
        """
        exchange = self._exchange
        if exchange.exact.side is not None and torch.cuda.is_current_stream_capturing():
            self._check_capture()
        else:
            self._check_last_step()
        with self._counted(), self.errors_told():
            for t in (x, topk_ids, topk_scores, w_gate_up, w_down, b_gate_up, b_down):
                if is_dtensor(t):
                    refuse(f"tensors must be those of the rank, got a DTensor of {list(t.shape)}")
            up = Projection(w_gate_up, b_gate_up, main_grad_gate_up)
            down = Projection(w_down, b_down, main_grad_down)
            options = up, down, self._recipe_of_groups, activation, interleaved, keep
            call, *inputs = layer_call(OP, x, topk_ids, topk_scores, *options)
            agreement = Agreement(self._signature(x, topk_ids, call), self._call)
            messages = exchange.prepare(inputs[0], topk_ids.contiguous(), inputs[1])
        source = exchange.send(messages, agreement)
        del messages
        if not any(call.needs):
            exchange.has_ended_step = True
        shared = None if shared_experts is None else shared_experts(x)
        try:
            out = LayerFunction.apply(call, source, *inputs)
        except CallMismatch as error:
            self._call = error.latest  # on all ranks alike, so that the next call is one again
            raise
        return out if shared is None else out + shared

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """One call more, also where it raises."""
        self._call, self._is_inside = self._call + 1, True
        try:
            yield
        finally:
            self._is_inside = False

    @contextmanager
    def errors_told(self) -> Iterator[None]:
        """An error in here, before a call could send anything, is raised on the other ranks too, which wait for it.

        In the later calls of mode "static" nobody waits. There the call is counted, so that the next one is told apart.
        """
        try:
            yield
        except Exception:
            if not self._is_inside:
                self._call += 1
            if self._exchange.agreed is None:
                self._exchange.exact.refuse()
            raise

    def __deepcopy__(self, memo: dict[int, object]) -> ExpertParallel:
        """Itself: the same processes call a module and its copies."""
        return self

    def check(self) -> None:
        """Waits for all calls so far, and raises on every rank if the capacity of "static" left anything out on any.

        On every rank, once a step, where calls do not do it themselves. What was left out is counted from the last call
        on: for every rank that a token was not sent to, and again in a forward that a checkpoint computes again.

        Raises:
            RuntimeError: how many tokens and slots of all ranks were left out.
        """
        static = self._exchange.static
        tokens, slots = static.read_left_out() if static else (0, 0)
        if tokens or slots:
            text = f"{tokens} tokens and {slots} slots were left out"
            refuse(f"capacity must be enough for every routing, got {self.capacity}: {text}")
        if static:
            mixed_up, most, fewest = static.read_mixed_up(self._call)
            self._call = most  # on all ranks alike, so that the next call is one again
            if mixed_up or most != fewest:
                got = f"call {mixed_up} met another one" if mixed_up else f"they have made {fewest} to {most} calls"
                cause = "a rank probably raised before it sent its tokens, and went on"
                refuse(f"all ranks must be in the same call, but {got}; {cause}")

    def _check_last_step(self) -> None:
        """Calls `check` at the same call on all ranks: not in backward, where a checkpoint computes again."""
        if self._exchange.static is None or self.overflow == "count" or not self._exchange.has_ended_step:
            return
        if not _torch.in_backward():
            self._exchange.has_ended_step = False
            self.check()

    def _check_capture(self) -> None:
        """Calls that a CUDA graph captures may wait for nobody."""
        if self._exchange.static is None:
            refuse("mode must be 'static' where a CUDA graph is captured, got 'exact'")
        if self._exchange.agreed is None:
            refuse("the first call must come before a CUDA graph is captured, for it waits for the other ranks")

    def _signature(self, x: Tensor, topk_ids: Tensor, call: Call) -> int:
        """What must be alike on all ranks, of a call that fits this group."""
        if x.device != self.ranks.device:
            refuse(f"x must be on the device of the group's messages, {self.ranks.device}, got {x.device}")
        if topk_ids.shape[1] != self.top_k:
            refuse(f"topk_ids must have {self.top_k} columns, got {topk_ids.shape[1]}")
        if call.experts != self.ranks.num_local_experts:
            refuse(f"w_down must have the {self.ranks.num_local_experts} experts of a rank, got {call.experts}")
        if validates() and len(others := topk_ids[(topk_ids < -1) | (topk_ids >= self.num_experts)]):
            refuse(f"topk_ids must be -1 or from 0 to {self.num_experts - 1}, got {others[0]}")
        tokens = 0 if self._exchange.static is None else x.shape[0]
        sizes, needs = tokens << 20 | x.shape[1], sum(need << i for i, need in enumerate(call.needs))
        agreed = self._exchange.agreed
        if agreed is not None and agreed.signature >> len(call.needs) != sizes:
            refuse(f"x must be shaped as in the first call with mode 'static', got {list(x.shape)}")
        return sizes << len(call.needs) | needs


def _said(name: str, value: object) -> str:
    """The same of what every rank takes for the same: a recipe and its name, integers of numpy, capacities."""
    if name == "recipe" and isinstance(value, str):
        value = RECIPES.get(value, value)
    elif isinstance(value, Integral) and not isinstance(value, bool):
        value = int(value)
    if name == "capacity" and type(value) is int and abs(value) < 1 << 53:
        value = float(value)
    return repr(value)


def _agree(group: dist.ProcessGroup, **given: object) -> None:
    """Before anything else looks at them: what is wrong with arguments is then so on all ranks, and none waits."""
    mine = {name: _said(name, value) for name, value in given.items()}
    of_ranks = [mine] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, mine, group)
    here = named([dist.get_rank(group)], group)
    for rank, theirs in enumerate(of_ranks):
        for name, value in mine.items():
            if theirs[name] != value:
                there = f"{theirs[name]} on {named([rank], group)}"
                refuse(f"{name} must be the same on all ranks, got {value} on {here} and {there}")
