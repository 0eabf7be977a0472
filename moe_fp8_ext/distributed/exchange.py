"""The exchange of tokens, results and gradients between ranks, as a source of `layer/node.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from moe_fp8_ext.distributed.message import Column, Message, rule_of_tokens
from moe_fp8_ext.distributed.plan import (
    DSCORES,
    DX,
    GRADIENT,
    OUTPUTS,
    TOKENS,
    Agreement,
    ExactPlanner,
    Placement,
    Ranks,
    Route,
    StaticPlanner,
    Transfer,
)
from moe_fp8_ext.layer.source import Chunk, Source
from moe_fp8_ext.matmul.engine import Groups
from moe_fp8_ext.ops.dispatch import below_autograd
from moe_fp8_ext.quantization.casting import row_major
from moe_fp8_ext.quantization.prepare import Operand, operand_of_rows
from moe_fp8_ext.quantization.recipe import Recipe, Rule

_combine = torch.ops.moe_fp8.combine.default
_sort_tokens = torch.ops.moe_fp8.sort_tokens.default


class PendingMessage(NamedTuple):
    """A message that is on its way, here and to every other rank."""

    transfer: Transfer
    call: int
    message: str
    static: StaticPlanner | None

    def receive(self) -> Tensor:
        """Waits for the rows that all ranks sent here."""
        rows = self.transfer.wait()
        if self.static is not None:
            self.static.check_headers(rows, self.call, self.message)
        return rows


def read(rows: Tensor, columns: list[Column]) -> list[Tensor]:
    """Returns the tensors of received rows, as views."""
    return [column.read(rows) for column in columns]


class Exchange:
    """Writes, sends and receives the messages of an `ExpertParallel`."""

    def __init__(
        self,
        ranks: Ranks,
        recipe: Recipe,
        gradient_casts: Rule | None,
        chunks: int,
        static: StaticPlanner | None,
    ) -> None:
        self.ranks, self.recipe, self.chunks = ranks, recipe, chunks
        self.num_experts = ranks.size * ranks.num_local_experts
        self.exact, self.static = ExactPlanner(ranks, chunks), static
        self._casts, self._gradient_casts = rule_of_tokens(recipe), gradient_casts
        self._local_of = self._local_experts()
        self.agreed: Agreement | None = None  # set by the first call of a static exchange; later calls do not ask ranks
        self.has_ended_step = False  # whether a step has ended since `ExpertParallel` called its `check` itself

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

    def send(self, messages: PreparedMessages, agreement: Agreement, needs: tuple[bool, bool]) -> ExchangedTokens:
        """Sends the messages.

        Args:
            agreement: the values that all ranks must share.
            needs: whether scores and x need a gradient.
        """
        with torch.no_grad(), below_autograd():
            if self.static is None:
                routes = self.exact.routes(messages.placements, messages.computed, agreement)
            else:
                if self.agreed is None:
                    self.exact.agree(agreement)
                    self.agreed = agreement
                routes = self.static.routes(messages.placements)
            tokens = ExchangedTokens(self, routes, agreement.call, needs, messages.columns)
            tokens.start(messages.rows)
        return tokens

    def gradient(self, dout: Tensor) -> Message:
        """Makes the message of the gradients [T, D] of results, to the ranks that computed them."""
        return Message(dout, None, None, self._gradient_casts)

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
    """A source of tokens that were sent to the ranks of their experts. Results and gradients return the same way.

    All ranks exchange the same messages in the same order.

    Attributes:
        due: the messages of this call that this rank still has to send, each with its chunk.
        arriving: the tokens of the chunks that `chunks` has not received yet.
    """

    def __init__(
        self, exchange: Exchange, routes: list[Route], call: int, needs: tuple[bool, bool], columns: list[Column]
    ) -> None:
        self.exchange, self.routes, self.call, self.needs, self.columns = exchange, routes, call, needs, columns
        self.due: list[tuple[str, int]] = []
        self.arriving: list[PendingMessage] = []
        self._width = columns[0].width

    def start(self, rows: Sequence[Tensor]) -> None:
        """Sends the rows of each chunk's tokens."""
        chunks = range(len(self.routes))
        self.due = [(message, chunk) for message in (TOKENS, OUTPUTS) for chunk in chunks]
        self.arriving = [self._send(of_chunk) for of_chunk in rows]

    def chunks(self, x: Tensor, scores: Tensor | None) -> Iterable[Chunk]:
        for route in self.routes:
            rows = self.arriving.pop(0).receive()  # popped, so that a message is freed with its chunk
            *tokens, ids, scores = read(rows, self.columns)
            yield Chunk(self.exchange.operand(*tokens), scores.contiguous(), self.exchange.groups(ids, route.slots))

    def gradient_chunks(self, dout: Tensor) -> Iterable[Operand]:
        self.exchange.has_ended_step = True
        chunks = range(len(self.routes))
        back = [message for message, needed in zip((DSCORES, DX), self.needs, strict=True) if needed]
        self.due = [(GRADIENT, i) for i in chunks] + [(message, i) for i in chunks for message in back]
        pending = []
        for part, route in zip(row_major(dout).tensor_split(len(self.routes)), self.routes, strict=True):
            message = self.exchange.gradient(part)
            pending.append((self._send(message.rows(0, route.indices, route.inverse)), message.columns()))
        return (self.exchange.operand(*read(of_chunk.receive(), columns)) for of_chunk, columns in pending)

    def give_back(self, rows: Tensor) -> PendingMessage:
        return self._send(rows)

    def collect(self, given_back: Sequence[PendingMessage]) -> Tensor:
        both = zip(given_back, self.routes, strict=True)
        parts = [_combine(pending.receive(), route.inverse, None) for pending, route in both]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _send(self, rows: Tensor, raised: bool = False) -> PendingMessage:
        """Sends the rows of the message that is due next."""
        (message, chunk), static = self.due.pop(0), self.exchange.static
        if static is not None:
            static.write_headers(rows, self.call, message, raised)
        send = self.routes[chunk].send if message in (TOKENS, GRADIENT) else self.routes[chunk].send_back
        return PendingMessage(send(rows), self.call, message, static)

    @contextmanager
    def completed(self) -> Iterator[None]:
        """A context that handles an error: it sends the messages that other ranks wait for, so that they raise too.

        A mark in these messages makes the other ranks raise. In exact mode messages have no mark, so nothing is sent.
        """
        try:
            yield
        except Exception:
            with torch.no_grad():
                while self.due and self.exchange.static is not None:
                    self._send(self._empty(*self.due[0]), raised=True)
            raise

    def _empty(self, message: str, chunk: int) -> Tensor:
        """Returns rows with the sizes of a message. Their contents do not matter."""
        route, device = self.routes[chunk], self.exchange.ranks.device
        if message == GRADIENT:
            dout = torch.zeros(route.inverse.shape[0], self._width, dtype=torch.bfloat16, device=device)
            return self.exchange.gradient(dout).rows(0, route.indices, route.inverse)
        width, dtype = (self.columns[-1].width, torch.float32) if message == DSCORES else (self._width, torch.bfloat16)
        return torch.zeros(route.indices.shape[0], width, dtype=dtype, device=device)

    def tensors(self) -> list[Tensor]:
        return [t for route in self.routes for t in (route.indices, route.inverse)]

    def static(self) -> ExchangedTokens:
        return self._with([route._replace(indices=None, inverse=None) for route in self.routes])

    def restored(self, tensors: Sequence[Tensor]) -> ExchangedTokens:
        pairs = zip(self.routes, tensors[::2], tensors[1::2], strict=True)
        return self._with([route._replace(indices=indices, inverse=inverse) for route, indices, inverse in pairs])

    def _with(self, routes: list[Route]) -> ExchangedTokens:
        return ExchangedTokens(self.exchange, routes, self.call, self.needs, self.columns)
