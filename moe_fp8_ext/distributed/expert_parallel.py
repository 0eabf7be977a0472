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

from moe_fp8_ext._C import validates
from moe_fp8_ext.distributed.dtensor import is_dtensor
from moe_fp8_ext.distributed.message import Casts, Message
from moe_fp8_ext.distributed.node import Dispatched, OverRanks, Sent
from moe_fp8_ext.distributed.plan import OP, Exact, Peers, Static, Way, fail, named
from moe_fp8_ext.layer.experts import Call, arguments
from moe_fp8_ext.matmul.engine import Operand, Slots, operands_of
from moe_fp8_ext.ops.checks import check_int, check_one_of
from moe_fp8_ext.ops.dispatch import below_autograd
from moe_fp8_ext.quantization.format import FORMATS, MAX_EXPERTS
from moe_fp8_ext.quantization.recipe import RECIPES, Recipe, get_recipe
from moe_fp8_ext.quantization.tensor import Pair, Quantized

_sort_tokens = torch.ops.moe_fp8.sort_tokens.default
_swizzle = torch.ops.moe_fp8.swizzle_scales.default


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
            fail("group must be one of torch.distributed, which is not initialized")
        self.mesh = group if isinstance(group, DeviceMesh) else None
        wanted = "group must be a ProcessGroup or a DeviceMesh of one dimension, got"
        if self.mesh is not None:
            if group.ndim != 1:
                fail(f"{wanted} one of {group.ndim}")
            group = group.get_group()
        if not isinstance(group, dist.ProcessGroup):
            fail(f"{wanted} {type(group).__name__}")
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
        # Buffers hold rows of no token, and a rank has other tokens than one process has: no scale is of all of them.
        self._of_groups = replace(self.recipe, amax=self.recipe.amax_of_groups)
        self._in_fp8 = self.recipe.format is not None and not self.recipe.wgrad_high_precision
        self._check_arguments(ranks, capacity)
        device = torch.device("cpu")
        if "nccl" in dist.get_backend_config(group):
            device = torch.device("cuda", torch.cuda.current_device())
        self.peers = Peers(group, rank, ranks, num_experts // ranks, device)
        self._local_of = self._table_of_ids()
        self._exact = Exact(self.peers, chunks)
        self._static = Static(self.peers, self.capacity, top_k) if mode == "static" else None
        self._agreed: int | None = None  # of the first call of "static"
        self.overflow, self.has_ended_step = overflow, False

    def _table_of_ids(self) -> Tensor:
        """[num_experts + 1] int32: experts of this rank by ids as they are sent; -1: of none, or of another rank."""
        count, device = self.peers.num_local_experts, self.peers.device  # not torch.device("meta"), say
        table = torch.full((self.num_experts + 1,), -1, dtype=torch.int32, device=device)
        table[1:].view(-1, count)[self.peers.rank] = torch.arange(count, device=device)
        return table

    def _check_arguments(self, ranks: int, capacity: float | None) -> None:
        if ranks > MAX_EXPERTS:
            fail(f"group must have at most {MAX_EXPERTS} ranks, got {ranks}")
        if self.num_experts < 1 or self.num_experts % ranks:
            fail(f"num_experts must be a multiple of the {ranks} ranks, got {self.num_experts}")
        if self.num_experts > ranks * MAX_EXPERTS:
            fail(f"num_experts must be at most {MAX_EXPERTS} a rank, got {self.num_experts} for {ranks}")
        if self.top_k < 1:
            fail(f"top_k must be at least 1, got {self.top_k}")
        if self.chunks < 1:
            fail(f"chunks must be at least 1, got {self.chunks}")
        if self.recipe.bf16_where_faster:
            fail(f'recipe must be the same for all sizes, got {self.recipe.name!r}, which is "bf16" for some')
        if self.gradients == "fp8" and not self._in_fp8:
            fail("gradients must be 'bf16' with recipe \"bf16\" and with wgrad_high_precision, got 'fp8'")
        fits = isinstance(capacity, Real) and self.mode == "static" and 0 < capacity <= ranks
        if capacity is not None and not fits:
            fail(f"capacity must be None, or with mode 'static' from 0 to the {ranks} ranks, got {capacity!r}")

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
        captured = self._exact.side is not None and torch.cuda.is_current_stream_capturing()
        if captured:
            self._check_waits_for_nobody()
        else:
            self._check_last_step()
        with self.errors_told():
            weights = w_gate_up, w_down, b_gate_up, b_down
            for t in (x, topk_ids, topk_scores, *weights):
                if is_dtensor(t):
                    fail(f"tensors must be those of the rank, got a DTensor of {list(t.shape)}")
            options = activation, interleaved, keep, main_grad_gate_up, main_grad_down
            inputs = arguments(x, topk_ids, topk_scores, weights, self._of_groups, *options)
            signature, ids = self._signature(x, topk_ids, inputs[-1]), topk_ids.contiguous()
        with torch.no_grad(), below_autograd():
            sent = self.dispatch(inputs[0], ids, inputs[1], signature)
        if not any(inputs[-1].needs):
            self.has_ended_step = True
        shared = None if shared_experts is None else shared_experts(x)
        out = OverRanks.apply(self, sent, *inputs)
        return out if shared is None else out + shared

    @contextmanager
    def errors_told(self) -> Iterator[None]:
        """Of an error in here, before a call could send anything, the other ranks hear too, which wait for it."""
        try:
            yield
        except Exception:
            if self._agreed is None:
                self._exact.refuse()
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
        tokens, slots = self._static.read_left_out() if self._static else (0, 0)
        if tokens or slots:
            text = f"{tokens} tokens and {slots} slots were left out"
            fail(f"capacity must be enough for every routing, got {self.capacity}: {text}")

    def _check_last_step(self) -> None:
        """At the same call on all ranks: not in backward, where a checkpoint computes again."""
        if not self._static or self.overflow == "count" or not self.has_ended_step:
            return
        if torch._C._current_graph_task_id() == -1:
            self.has_ended_step = False
            self.check()

    def _check_waits_for_nobody(self) -> None:
        """As calls must that are captured."""
        if self._static is None:
            fail("mode must be 'static' where a CUDA graph is captured, got 'exact'")
        if self._agreed is None:
            fail("the first call must come before a CUDA graph is captured, for it waits for the other ranks")

    def _signature(self, x: Tensor, topk_ids: Tensor, call: Call) -> int:
        """Of a call that fits this group: what must be alike on all ranks."""
        if x.device != self.peers.device:
            fail(f"x must be on the device of the group's messages, {self.peers.device}, got {x.device}")
        if topk_ids.shape[1] != self.top_k:
            fail(f"topk_ids must have {self.top_k} columns, got {topk_ids.shape[1]}")
        if call.experts != self.peers.num_local_experts:
            fail(f"w_down must have the {self.peers.num_local_experts} experts of a rank, got {call.experts}")
        if validates() and len(others := topk_ids[(topk_ids < -1) | (topk_ids >= self.num_experts)]):
            fail(f"topk_ids must be -1 or from 0 to {self.num_experts - 1}, got {others[0]}")
        tokens = x.shape[0] if self._static else 0
        sizes, needs = tokens << 20 | x.shape[1], sum(need << i for i, need in enumerate(call.needs))
        if self._agreed is not None and self._agreed >> len(call.needs) != sizes:
            fail(f"x must be shaped as in the first call with mode 'static', got {list(x.shape)}")
        return sizes << len(call.needs) | needs

    def _casts(self, gradient: bool) -> Casts | None:
        """Of tokens, or of their gradients, as they are sent."""
        if not (self.gradients == "fp8" if gradient else self._in_fp8):
            return None
        return Casts(*operands_of(self.recipe).rule(gradient))

    def _operand(self, values: Tensor, scale: Tensor | None = None) -> Operand:
        """Of columns as they came."""
        if scale is None:
            return Operand(values)
        format = FORMATS[self.recipe.format]
        if format.order == "blocked":
            return Operand(values, _swizzle(scale)[0])
        if format.order == "column_major":
            return Operand(values, scale)
        return Operand(values, (scale if format.block else scale.squeeze(1)).contiguous())

    def dispatch(self, x: Tensor, ids: Tensor, scores: Tensor, signature: int) -> list[Sent]:
        """Tokens x [T, D] with ids and scores [T, top_k] to the ranks of their experts, chunk by chunk. signature: what
        must be alike on all ranks."""
        finder = self._static or self._exact
        with self.errors_told():
            message = Message(x, ids, scores, self._casts(gradient=False))
            parts, columns = message.split(self.chunks), message.columns()
            places = finder.places([part.ids for part in parts])
            rows = [part.rows(self.num_experts, to.indices, to.inverse) for part, to in zip(parts, places, strict=True)]
        if self._static and self._agreed is None:
            self._exact.agree(signature)
            self._agreed = signature
        ways = finder.ways(places, signature)
        return [Sent(way.there(part), columns, way) for part, way in zip(rows, ways, strict=True)]

    def received(self, sent: Sent) -> Dispatched:
        """What all ranks sent of those that have an expert here, and where they go."""
        *tokens, ids, scores = sent.arrived()
        return Dispatched(self._operand(*tokens), scores.contiguous(), self._slots(ids, sent.way.slots))

    def dispatch_gradient(self, dout: Tensor, way: Way) -> Sent:
        """Gradients [T, D] of what came back by that way, to where it came from."""
        message = Message(dout, None, None, self._casts(gradient=True))
        return Sent(way.there(message.rows(0, way.indices, way.inverse)), message.columns(), way)

    def received_gradient(self, sent: Sent) -> Operand:
        return self._operand(*sent.arrived())

    def _slots(self, ids: Tensor, most: int) -> Slots:
        """Of rows that came with ids of all ranks: those of experts here, sorted by them, and not more than `most`."""
        permutation, offs, inverse = _sort_tokens(self._local_of[ids], self.peers.num_local_experts)
        if self._static and most < permutation.shape[0]:
            self._static.left_out[1].add_((offs[-1] - most).clamp(min=0))
            offs, inverse = offs.clamp(max=most), inverse.masked_fill(inverse >= most, -1)
        return Slots(permutation[:most], offs, inverse)


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
                fail(f"{name} must be the same on all ranks, got {value} on {here} and {there}")
