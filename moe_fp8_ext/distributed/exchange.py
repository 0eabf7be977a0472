"""The exchange of tokens, results and gradients between ranks, as a source of `layer/node.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_fp8_ext.distributed.message import Column, Message
from moe_fp8_ext.distributed.plan import Agreement, ExactPlanner, Placement, Ranks, Route, StaticPlanner, Transfer
from moe_fp8_ext.layer.source import Chunk, Source
from moe_fp8_ext.matmul.engine import Groups, engine_of
from moe_fp8_ext.ops.dispatch import below_autograd
from moe_fp8_ext.quantization.casting import row_major
from moe_fp8_ext.quantization.prepare import Operand, operand_of_rows
from moe_fp8_ext.quantization.recipe import Recipe

_combine = torch.ops.moe_fp8.combine.default
_sort_tokens = torch.ops.moe_fp8.sort_tokens.default


class Send(NamedTuple):
    """A message of tokens, or of their gradients, that is on its way."""

    transfer: Transfer
    columns: list[Column]
    route: Route
    call: int

    def receive(self, static: StaticPlanner | None) -> list[Tensor]:
        """Waits for the rows that all ranks sent here, and returns their columns."""
        rows = self.transfer.wait()
        if static is not None:
            if others := set(static.check_headers(rows, self.call)) - {self.call}:
                raise CallMismatch(self.call, sorted(others))
        return [column.read(rows) for column in self.columns]


class Exchange:
    """Writes, sends and receives the messages of an `ExpertParallel`."""

    def __init__(
        self,
        ranks: Ranks,
        recipe: Recipe,
        *,
        fp8_tokens: bool,
        fp8_gradients: bool,
        chunks: int,
        static: StaticPlanner | None,
    ) -> None:
        self.ranks, self.recipe, self.chunks = ranks, recipe, chunks
        self.num_experts = ranks.size * ranks.num_local_experts
        self.exact, self.static = ExactPlanner(ranks, chunks), static
        rule = engine_of(recipe).rule if fp8_tokens or fp8_gradients else None
        self._casts = rule(gradient=False) if fp8_tokens else None
        self._gradient_casts = rule(gradient=True) if fp8_gradients else None
        self._local_of = self._local_experts()
        self.agreed: Agreement | None = None  # of a static exchange's first call; later calls do not ask the ranks
        self.has_ended_step = False  # since `ExpertParallel` last called its `check` itself

    def _local_experts(self) -> Tensor:
        """Returns a table [num_experts + 1] int32 from ids in messages to experts of this rank; -1 for all others."""
        # The device is named, because the caller may have set a default device such as "meta".
        count, device = self.ranks.num_local_experts, self.ranks.device
        table = torch.full((self.num_experts + 1,), -1, dtype=torch.int32, device=device)
        table[1:].view(-1, count)[self.ranks.rank] = torch.arange(count, device=device)
        return table

    def prepare(self, x: Tensor, ids: Tensor, scores: Tensor) -> PreparedMessages:
        """Writes the messages of tokens x [T, D] with ids and scores [T, top_k], chunk by chunk. Sends nothing yet."""
        planner = self.static or self.exact
        with torch.no_grad(), below_autograd():
            message = Message(x, ids, scores, self._casts)
            parts, columns = message.split(self.chunks), message.columns()
            placements = [planner.placement(part.ids) for part in parts]
            computed = None if self.static else self.exact.now()
            both = zip(parts, placements, strict=True)
            rows = [part.rows(self.num_experts, to.indices, to.inverse) for part, to in both]
        return PreparedMessages(rows, columns, placements, computed)

    def send(self, messages: PreparedMessages, agreement: Agreement) -> ExchangedTokens:
        """Sends the messages. agreement: what must be the same on all ranks."""
        with torch.no_grad(), below_autograd():
            if self.static is None:
                routes = self.exact.routes(messages.placements, messages.computed, agreement)
            else:
                if self.agreed is None:
                    self.exact.agree(agreement)
                    self.agreed = agreement
                routes = self.static.routes(messages.placements)
            parts = zip(messages.rows, routes, strict=True)
            sends = [self._send(*part, messages.columns, agreement.call) for part in parts]
        return ExchangedTokens(self, routes, agreement.call, sends)

    def _send(self, rows: Tensor, route: Route, columns: list[Column], call: int) -> Send:
        if self.static is not None:
            self.static.write_headers(rows, call)
        return Send(route.send(rows), columns, route, call)

    def send_gradient(self, dout: Tensor, route: Route, call: int) -> Send:
        """Sends the gradients [T, D] of a chunk's results along its route, to the ranks that computed them."""
        message = Message(dout, None, None, self._gradient_casts)
        return self._send(message.rows(0, route.indices, route.inverse), route, message.columns(), call)

    def operand(self, values: Tensor, scale: Tensor | None = None) -> Operand:
        """Makes the operand of a product from columns of a message."""
        return Operand(values) if scale is None else operand_of_rows(values, scale, self.recipe.format)

    def groups(self, ids: Tensor, max_slots: int) -> Groups:
        """Sorts received rows by the experts of this rank, and keeps at most max_slots slots.

        ids count all experts.
        """
        permutation, offs, inverse = _sort_tokens(self._local_of[ids], self.ranks.num_local_experts)
        if self.static is not None and max_slots < permutation.shape[0]:
            self.static.left_out[1].add_((offs[-1] - max_slots).clamp(min=0))
            offs, inverse = offs.clamp(max=max_slots), inverse.masked_fill(inverse >= max_slots, -1)
        return Groups(offs, permutation[:max_slots], ids.shape[1], inverse)


class PreparedMessages(NamedTuple):
    rows: list[Tensor]  # bytes [S, B] of each chunk
    columns: list[Column]
    placements: list[Placement]
    computed: torch.cuda.Event | None  # recorded when the stream had computed the placements


class ExchangedTokens(Source):
    """A source of tokens that were sent to the ranks of their experts. Results and gradients return the same way."""

    def __init__(self, exchange: Exchange, routes: list[Route], call: int, sends: Sequence[Send] = ()) -> None:
        self.exchange, self.routes, self.call = exchange, routes, call
        self._sends = list(sends)

    def chunks(self, x: Tensor, scores: Tensor | None) -> Iterable[Chunk]:
        while self._sends:  # popped, so that a message is freed with its chunk
            send = self._sends.pop(0)
            *tokens, ids, scores = send.receive(self.exchange.static)
            groups = self.exchange.groups(ids, send.route.slots)
            yield Chunk(self.exchange.operand(*tokens), scores.contiguous(), groups)

    def gradient_chunks(self, dout: Tensor) -> Iterable[Operand]:
        self.exchange.has_ended_step = True
        parts = zip(row_major(dout).tensor_split(len(self.routes)), self.routes, strict=True)
        sends = [self.exchange.send_gradient(part, route, self.call) for part, route in parts]
        for send in sends:
            yield self.exchange.operand(*send.receive(self.exchange.static))

    def give_back(self, chunk: int, rows: Tensor) -> Transfer:
        return self.routes[chunk].send_back(rows)

    def collect(self, given_back: Sequence[Transfer]) -> Tensor:
        transfers = zip(given_back, self.routes, strict=True)
        parts = [_combine(transfer.wait(), route.inverse, None) for transfer, route in transfers]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def tensors(self) -> list[Tensor]:
        return [t for route in self.routes for t in (route.indices, route.inverse)]

    def static(self) -> ExchangedTokens:
        routes = [route._replace(indices=None, inverse=None) for route in self.routes]
        return ExchangedTokens(self.exchange, routes, self.call)

    def restored(self, tensors: Sequence[Tensor]) -> ExchangedTokens:
        pairs = zip(self.routes, tensors[::2], tensors[1::2], strict=True)
        routes = [route._replace(indices=indices, inverse=inverse) for route, indices, inverse in pairs]
        return ExchangedTokens(self.exchange, routes, self.call)


class CallMismatch(RuntimeError):
    """Messages of another call arrived. Every rank raises this, because every rank receives from every other rank."""

    def __init__(self, call: int, others: list[int]) -> None:
        self.latest = max(call, *others)
        text = f"all ranks must be in the same call, this one is in call {call} and got messages of call"
        cause = "a rank probably raised before it sent its tokens, and went on"
        super().__init__(f"ExpertParallel: {text} {', '.join(map(str, others))}; {cause}")
