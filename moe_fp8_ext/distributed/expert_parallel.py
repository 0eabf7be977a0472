"""Experts spread over the ranks of a group. Tokens travel to their experts as the operand of the first product."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from numbers import Integral, Real
from typing import NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moe_fp8_ext import _torch
from moe_fp8_ext.distributed.dtensor import is_dtensor
from moe_fp8_ext.distributed.exchange import Exchange
from moe_fp8_ext.distributed.message import rule_of_tokens
from moe_fp8_ext.distributed.plan import OP, Agreement, CallMismatch, KnownError, Ranks, StaticPlanner, named, refuse
from moe_fp8_ext.layer.experts import call_with_options
from moe_fp8_ext.layer.node import Call, LayerFunction
from moe_fp8_ext.ops.checks import check_int, check_one_of, check_output, validate_ids
from moe_fp8_ext.quantization.format import MAX_EXPERTS
from moe_fp8_ext.quantization.recipe import RECIPES, Recipe, get_recipe
from moe_fp8_ext.quantization.tensor import Pair, Quantized

_IGNORE = (
    "wrap the model after DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names), with the"
    " names of the experts' parameters and buffers"
)


class ExpertParallel:
    """Spreads the experts of every layer over the ranks of a group. Tokens travel to their experts in FP8.

        ep = ExpertParallel(group, num_experts, top_k, recipe="rowwise")
        out = ep.experts(x, topk_ids, topk_scores, w_gate_up, w_down)

    With L = num_experts / ranks, a rank has experts [rank * L, (rank + 1) * L). A token is sent once to each rank that
    has any of its experts. The token's own rank quantizes it, and sends it in one message with its scales, ids and
    scores. The first product multiplies the received bytes without another cast. Each rank sums the results of its
    experts for a token, and sends the sum back in bfloat16. Gradients return in the same way.

    All ranks of the group must construct the object with the same arguments, and call it in the same order.

    Args:
        group: the ranks over which experts are spread, or a DeviceMesh of one dimension. Only with a mesh does
            `torch.distributed.checkpoint` save the experts of all ranks.
        num_experts: the number of experts of all ranks together, a multiple of the number of ranks.
        top_k: columns of topk_ids.
        recipe: as in `moe_fp8_ext.experts`, except "auto". With "bf16" and with wgrad_high_precision tokens travel in
            bfloat16, otherwise in the recipe's format. With wgrad_high_precision, float32 and float16 tokens are
            therefore rounded to bfloat16 before they are quantized. For the gradient of weights, tokens and gradients
            that travelled in fp8 are cast a second time, which rounds them twice. If scales are powers of two, only
            underflow differs from rounding once.
        gradients: how gradients of the output travel: "bf16", or "fp8" in the recipe's format and grad_dtype. With
            "fp8", the gradient of b_down and its part of the scores' gradient are computed from the fp8 values.
        mode: "exact" sends exactly the rows that experts need. The host waits once in each call for sizes, which are
            requested as soon as the routing is known. "static" sends buffers of a fixed size; all ranks must have the
            same number of tokens. Only the first call waits, and CUDA graphs may capture later calls.
        capacity: the size of the buffers of "static", as a multiple of even routing. None: the number of ranks, with
            which every routing fits. If buffers are too small, the last tokens of a rank and the slots of a rank's last
            experts are left out, as if their id were -1. `check` counts them.
        chunks: the number of parts of a rank's tokens. Each part travels while experts compute the previous part. The
            output and the gradients of tokens stay the same. Gradients of weights are sums over parts, rounded to
            bfloat16 after each part. Buffers of "static" have the size of a part.
        overflow: with "raise", the first call after a backward, or after a call that asks for no gradient, calls
            `check`: one wait in a step, but none in graphs. Call `check` yourself after the last step. With "count",
            always call `check` yourself.

    Raises:
        RuntimeError: torch.distributed is not initialized, num_experts is not a multiple of the ranks, or an argument
            is not as above or differs between ranks; the text names the argument.
        ValueError, TypeError: no recipe of that name exists, or recipe is neither a name nor a `Recipe`.

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
            got, group = group.mesh.tolist(), group.get_group()
            order = dist.get_process_group_ranks(group)
            if got != order:  # DTensors would number the experts in another order
                refuse(f"group must be a mesh in the order of its ProcessGroup, {order}, got {got}")
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            refuse("group must have this rank, got what new_group returns on ranks that the group lacks")
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
        self.chunks, self.overflow = chunks, overflow
        self._check_arguments(ranks, capacity)
        device = torch.device("cpu")
        if "nccl" in dist.get_backend_config(group):
            device = torch.device("cuda", torch.cuda.current_device())
        self.ranks = Ranks(group, rank, ranks, num_experts // ranks, device)
        # Buffers hold rows without a token, and a rank has only some of the tokens: no scale can cover the whole batch.
        self._recipe_of_groups = replace(self.recipe, amax=self.recipe.amax_of_groups)
        self._exchange = Exchange(
            self.ranks,
            self.recipe,
            self.recipe.rule(gradient=True) if gradients == "fp8" else None,
            chunks,
            StaticPlanner(self.ranks, self.capacity, top_k) if mode == "static" else None,
        )
        self._call = 0  # the number of calls so far
        self._checked: WeakKeyDictionary[torch.nn.Module, set[int]] = WeakKeyDictionary()  # addresses, for a DDP
        self._has_reported: bool | None = None  # an error, within `errors_on_all_ranks`; None outside of it

    def has_others_of(self, ranks: Iterable[int]) -> bool:
        """Whether other ranks of the group are among the global numbers `ranks`."""
        return len({*dist.get_process_group_ranks(self.ranks.group)} & {*ranks}) > 1

    def refuse_to_keep_equal(self, who: str, cure: str) -> NoReturn:
        """Raises. who: what keeps parameters equal on its ranks."""
        refuse(f"experts must differ between the ranks of the group, but {who} keeps them equal there; {cure}")

    def _check_ddp(self, weights: Iterable[object]) -> None:
        """Raises if the DDP whose forward calls would keep weights equal on ranks of the group. Looks once a weight."""
        ddp = _torch.running_ddp()
        if ddp is None:
            return
        addresses, checked = {_address_of(t) for t in weights} - {None}, self._checked.setdefault(ddp, set())
        if addresses <= checked or not self.has_others_of(dist.get_process_group_ranks(ddp.process_group)):
            return
        for name, t in (*ddp.module.named_parameters(), *ddp.module.named_buffers()):
            if name not in ddp.parameters_to_ignore and _address_of(t) in addresses:
                self.refuse_to_keep_equal(f"DistributedDataParallel of {name}", _IGNORE)
        checked |= addresses

    def _check_arguments(self, ranks: int, capacity: float | None) -> None:
        if ranks > MAX_EXPERTS:
            refuse(f"group must have at most {MAX_EXPERTS} ranks, got {ranks}")
        if self.num_experts < 1 or self.num_experts % ranks:
            refuse(f"num_experts must be a multiple of the {ranks} ranks, got {self.num_experts}")
        if self.num_experts > ranks * MAX_EXPERTS:
            refuse(f"num_experts must be at most {MAX_EXPERTS} a rank, got {self.num_experts} for {ranks}")
        for name, count in (("top_k", self.top_k), ("chunks", self.chunks)):
            if count < 1:
                refuse(f"{name} must be at least 1, got {count}")
        if self.recipe.bf16_where_faster:
            refuse(f'recipe must be the same for all sizes, got {self.recipe.name!r}, which is "bf16" for some')
        if self.gradients == "fp8" and rule_of_tokens(self.recipe) is None:
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
        shared_experts: Callable[[Tensor], Tensor] | None = None,
        **options: object,
    ) -> Tensor:
        """Computes `moe_fp8_ext.experts` for this rank's tokens with the experts of all ranks. Differentiable once.

        Args:
            x, topk_ids, topk_scores: any number of tokens of this rank; ids count the experts of all ranks. An id out
                of [0, num_experts) drops its slot, or raises where it does in `moe_fp8_ext.experts`.
            w_gate_up, w_down: weights of this rank's experts, as in `moe_fp8_ext.experts`.
            shared_experts: a function of x, such as a module, whose result is added to out. It is called while tokens
                travel.
            options: other arguments of `moe_fp8_ext.experts`, except recipe and stand_in. Biases, main gradients and
                adapters are of this rank's experts. A factor of an adapter that all experts of a rank share belongs to
                the rank: its gradient is the sum over this rank's experts.

        Returns:
            out [T, D] of x's dtype. Each rank rounds its experts' result for a token to bfloat16. These results are
            added in float32, in the order of the ranks.

        Raises:
            RuntimeError: as `moe_fp8_ext.experts` and, with overflow "raise", as `check`. Also if a CUDA graph captures
                a call in mode "exact", or a first call.

        If a call fails on one rank only, the mode decides whether the other ranks raise too:

        - One rank raises before it sends its tokens, or the width of x or the inputs that ask for a gradient differ
          between ranks. In mode "exact", and in the first call of mode "static", all ranks raise. In later calls of
          mode "static" the other ranks wait. If the failed rank goes on, all ranks raise when its next messages
          arrive (on GPUs at the next `check`).
        - On one rank memory for received rows, shared_experts or backward fails. In mode "static" all ranks raise (on
          GPUs at the next `check`). In mode "exact" the other ranks wait.
        """
        exchange = self._exchange
        if exchange.exact.side is not None and torch.cuda.is_current_stream_capturing():
            self._check_capture()
        else:
            self._check_last_step()
        with self.errors_on_all_ranks():
            given = x, topk_ids, topk_scores, w_gate_up, w_down
            values = (v if isinstance(v, (tuple, list)) else (v,) for v in (*given, *options.values()))
            tensors = list(chain.from_iterable(values))  # adapters are tuples
            for t in tensors:
                if is_dtensor(t):
                    refuse(f"tensors must be the rank's own, got a DTensor of {list(t.shape)}")
            self._check_ddp(tensors[3:])
            call, *inputs = call_with_options(OP, *given, self._recipe_of_groups, **options)
            agreement = Agreement(self._signature(x, topk_ids, call), self._call + 1)
            messages = exchange.prepare(inputs[0], topk_ids.contiguous(), inputs[1])
        self._call += 1
        source = exchange.send(messages, agreement, (call.needs_scores, call.needs_x))
        del messages
        if not any(call.needs):
            exchange.has_ended_step = True
        try:
            with source.completed():
                shared = None if shared_experts is None else check_output(OP, "shared_experts", shared_experts(x), x)
                out = LayerFunction.apply(call, source, None, *inputs)
        except CallMismatch as error:
            self._call = error.latest  # the same on all ranks, so that their next calls match
            raise
        return out if shared is None else out + shared

    @contextmanager
    def errors_on_all_ranks(self) -> Iterator[None]:
        """A context for code that precedes `experts`, such as a router. If the code raises, the other ranks raise too.

        In later calls of mode "static" ranks do not wait for each other. The failed call is then counted as a call, so
        that the other ranks recognize that this rank's next message belongs to another call. Contexts may be nested.
        """
        is_outermost = self._has_reported is None
        if is_outermost:
            self._has_reported = False
        try:
            yield
        except Exception as error:
            if not self._has_reported and not isinstance(error, KnownError):
                self._has_reported = True  # an outer context does not report it again
                self._call += 1
                if self._exchange.agreed is None:
                    self._exchange.exact.agree(None)
            raise
        finally:
            if is_outermost:
                self._has_reported = None

    def __deepcopy__(self, memo: dict[int, object]) -> ExpertParallel:
        """Returns itself, because a module and its copies communicate with the same processes."""
        return self

    def check(self) -> None:
        """Waits for all calls so far. Raises on every rank if mode "static" left out tokens or mixed up calls anywhere.

        Call it on every rank, once a step, unless overflow "raise" does so. The error counts tokens and slots since the
        last `check`. A token counts once for every rank that it was not sent to, and again if a checkpoint recomputes
        forward.

        Raises:
            RuntimeError: tokens or slots of any rank were left out; on GPUs, a rank received a message of another call;
                or ranks have made different numbers of calls.
        """
        static = self._exchange.static
        tokens, slots = static.read_left_out() if static else (0, 0)
        if tokens or slots:
            text = f"{tokens} tokens and {slots} slots were left out"
            refuse(f"capacity must be enough for every routing, got {self.capacity}: {text}")
        if static:
            mixed_up, most, fewest = static.read_mixed_up(self._call)
            self._call = most  # the same on all ranks, so that their next calls match
            if mixed_up or most != fewest:
                made = f"they have made {fewest} to {most} calls"
                got = f"another message arrived in place of the {mixed_up}" if mixed_up else made
                cause = "a rank probably raised an error, and went on"
                refuse(f"all ranks must be in the same call, but {got}; {cause}")

    def _check_last_step(self) -> None:
        """Calls `check` in the same call on all ranks, but not when a checkpoint recomputes forward in backward."""
        if self._exchange.static is None or self.overflow == "count" or not self._exchange.has_ended_step:
            return
        if not _torch.in_backward():
            self._exchange.has_ended_step = False
            self.check()

    def _check_capture(self) -> None:
        """Raises if a call that a CUDA graph captures would have to wait for other ranks."""
        if self._exchange.static is None:
            refuse("mode must be 'static' where a CUDA graph is captured, got 'exact'")
        if self._exchange.agreed is None:
            refuse("the first call must come before a CUDA graph is captured, for it waits for the other ranks")

    def _signature(self, x: Tensor, topk_ids: Tensor, call: Call) -> int:
        """Checks that a call fits this group. Returns one number from all values that must be equal on all ranks."""
        if x.device != self.ranks.device:
            refuse(f"x must be on the device of the group's messages, {self.ranks.device}, got {x.device}")
        if topk_ids.shape[1] != self.top_k:
            refuse(f"topk_ids must have {self.top_k} columns, got {topk_ids.shape[1]}")
        if call.experts != self.ranks.num_local_experts:
            refuse(f"w_down must have the {self.ranks.num_local_experts} experts of a rank, got {call.experts}")
        validate_ids(OP, topk_ids, self.num_experts)
        tokens = 0 if self._exchange.static is None else x.shape[0]
        sizes, needs = tokens << 20 | x.shape[1], sum(need << i for i, need in enumerate(call.needs))
        agreed = self._exchange.agreed
        if agreed is not None and (first := agreed.signature >> len(call.needs)) != sizes:
            want = [first >> 20, first & (1 << 20) - 1]
            refuse(f"x must be shaped as in the first call with mode 'static', {want}, got {list(x.shape)}")
        return sizes << len(call.needs) | needs


def _address_of(t: object) -> int | None:
    """Returns the address of a tensor's values; None if it has none, or is no plain tensor."""
    t = t.q if isinstance(t, Quantized) else t
    is_plain = type(t) in (Tensor, torch.nn.Parameter) and t.layout == torch.strided and not t.is_meta
    return t.data_ptr() or None if is_plain else None


def _said(name: str, value: object) -> str:
    """Returns the text of an argument. Equal arguments have equal texts, such as a recipe and its name."""
    if name == "recipe" and isinstance(value, str):
        value = RECIPES.get(value, value)
    elif isinstance(value, Integral) and not isinstance(value, bool):
        value = int(value)
    if name == "capacity" and type(value) is int and abs(value) < 1 << 53:
        value = float(value)
    return repr(value)


def _agree(group: dist.ProcessGroup, **given: object) -> None:
    """Raises on all ranks if arguments differ. Call it before other checks: they then raise on all ranks too."""
    texts = {name: _said(name, value) for name, value in given.items()}
    of_ranks = [texts] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, texts, group)
    this_rank = named([dist.get_rank(group)], group)
    for rank, of_rank in enumerate(of_ranks):
        for name, text in texts.items():
            if of_rank[name] != text:
                other = f"{of_rank[name]} on {named([rank], group)}"
                refuse(f"{name} must be the same on all ranks, got {text} on {this_rank} and {other}")
