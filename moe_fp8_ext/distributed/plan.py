"""The plan of an exchange: the ranks that each token is sent to, and the number of rows and slots on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from moe_fp8_ext.ops.checks import fail

OP = "ExpertParallel"
RAISED = -1  # the word of a rank that raised an error and sends nothing
# The messages of a call, in the order in which they travel. A header has the number of the call and of the message.
MESSAGES = TOKENS, OUTPUTS, GRADIENT, DSCORES, DX = "tokens", "outputs", "gradients of outputs", "dscores", "dx"
NEVER = 1 << 40  # larger than every number in a header
CALLS = 16  # words contain the number of a call modulo CALLS, so that only few different words are ever sent

_sort_tokens = torch.ops.moe_fp8.sort_tokens.default
_tokens_by_rank = torch.ops.moe_fp8.tokens_by_rank.default


class Ranks(NamedTuple):
    """The ranks that experts are spread over, and this one."""

    group: dist.ProcessGroup
    rank: int
    size: int
    num_local_experts: int
    device: torch.device


class Transfer(NamedTuple):
    """Rows that are being exchanged. The current stream continues meanwhile."""

    rows: Tensor
    work: dist.Work

    def wait(self) -> Tensor:
        """Returns the rows when they have arrived."""
        self.work.wait()
        return self.rows


class Route(NamedTuple):
    """Moves rows from the ranks that have the tokens to the ranks that have their experts, and back."""

    indices: Tensor  # [S] int32: row s holds token indices[s] // ranks; -1: it holds no token
    inverse: Tensor  # [T, ranks] int32: the row that a token has for a rank; -1: no row
    sent: list[int] | None  # rows for each rank; None: the same number for every rank
    received: list[int] | None
    slots: int  # the number of slots that arrive; in a static exchange, the maximum number
    group: dist.ProcessGroup

    def send(self, rows: Tensor) -> Transfer:
        """Sends rows [S, ...]; the transfer returns rows [N, ...]. Rows behind the last token are not sent."""
        return self._exchange(rows[: self.indices.shape[0]], self.sent, self.received)

    def send_back(self, rows: Tensor) -> Transfer:
        """Sends rows [N, ...] back; the transfer returns rows [S, ...]."""
        return self._exchange(rows, self.received, self.sent)

    def _exchange(self, rows: Tensor, sent: list[int] | None, received: list[int] | None) -> Transfer:
        count = rows.shape[0] if received is None else sum(received)
        out = rows.new_empty(count, *rows.shape[1:])
        output, input = out.view(torch.uint8), rows.view(torch.uint8)
        return Transfer(out, dist.all_to_all_single(output, input, received, sent, self.group, async_op=True))


class Placement(NamedTuple):
    """The part of a route that is computed on the device."""

    indices: Tensor
    inverse: Tensor
    counts: Tensor  # [ranks, 2] int64: rows and slots for every rank


class Agreement(NamedTuple):
    """The values that all ranks must share: the number of the call, its sizes, and the inputs that need a gradient."""

    signature: int
    call: int

    def word(self) -> int:
        return self.signature * CALLS + self.call % CALLS


class ExactPlanner:
    """Sends exactly the rows that experts need. The host waits for their numbers, which travel on a side stream."""

    def __init__(self, ranks: Ranks, chunks: int) -> None:
        self.ranks, self.chunks = ranks, chunks
        # High priority, because small kernels exchange the numbers and must not wait for all blocks of a cast to start.
        self.side = torch.cuda.Stream(ranks.device, priority=-1) if ranks.device.type == "cuda" else None
        self._columns: dict[int, Tensor] = {}  # [ranks, 1], for each word that was ever sent

    def placement(self, ids: Tensor) -> Placement:
        """Returns the placement for ids [T, top_k]. Ids out of [0, num_experts) belong to no expert.

        A placement has rows for the largest possible routing. Rows without a token come last. So the message can be
        written before the host knows the number of rows to send.
        """
        permutation, _, inverse, counts = _by_rank(ids, self.ranks)
        return Placement(permutation[: ids.shape[0] * min(ids.shape[1], self.ranks.size)], inverse, counts)

    def routes(
        self, placements: Sequence[Placement], computed: torch.cuda.Event | None, agreement: Agreement
    ) -> list[Route]:
        """Waits for the numbers of all ranks. Returns routes. computed: an event of `now` after the placements.

        Raises:
            RuntimeError: on every rank, if any rank has an error or another agreement.
        """
        with self._after(computed):
            sizes = self._exchange_sizes([placement.counts for placement in placements], agreement)
        return [
            Route(placement.indices[: sum(sent)], placement.inverse, sent, received, sum(slots), self.ranks.group)
            for placement, (sent, received, slots) in zip(placements, sizes, strict=True)
        ]

    def agree(self, agreement: Agreement | None) -> None:
        """Raises on all ranks unless all ranks have the same agreement.

        None tells the other ranks, which wait for this rank, that it raised an error and sends nothing.
        """
        with self._after(self.now()):
            nothing = torch.zeros(self.ranks.size, 2, dtype=torch.int64, device=self.ranks.device)
            self._exchange_sizes([nothing] * self.chunks, agreement)

    def now(self) -> torch.cuda.Event | None:
        """Returns an event at the end of the current stream."""
        return None if self.side is None else torch.cuda.current_stream(self.ranks.device).record_event()

    def _after(self, event: torch.cuda.Event | None) -> AbstractContextManager:
        """A context on the side stream. The side stream waits for the event only."""
        if self.side is None:
            return nullcontext()
        self.side.wait_event(event)
        return torch.cuda.stream(self.side)

    def _exchange_sizes(
        self, counts: list[Tensor], agreement: Agreement | None
    ) -> list[tuple[list[int], list[int], list[int]]]:
        """Exchanges the counts [ranks, 2] of each chunk.

        Returns:
            for each chunk: the number of rows to send to each rank, and of rows and slots that each rank sends here.
        """
        group, ranks = self.ranks.group, self.ranks.size
        word = RAISED if agreement is None else agreement.word()
        if word not in self._columns:
            self._columns[word] = counts[0].new_full((ranks, 1), word)
        both = counts[0].new_empty(2, ranks, 2 * self.chunks + 1)  # sent and received: one copy brings both to the host
        torch.cat([*counts, self._columns[word]], 1, out=both[0])
        dist.all_to_all_single(both[1], both[0], group=group)
        sent, received = both.mT.tolist()
        *received, words = received
        if agreement is not None:
            _check_words(words, agreement, group)
        return list(zip(sent[:-1:2], received[::2], received[1::2], strict=True))


def _check_words(words: list[int], agreement: Agreement, group: dist.ProcessGroup) -> None:
    if raised := [rank for rank, word in enumerate(words) if word == RAISED]:
        text = f"every rank must be able to send, but an error was raised on {named(raised, group)}: see there"
        raise KnownError(f"{OP}: {text}")
    if unlike := [rank for rank, word in enumerate(words) if word // CALLS != agreement.signature]:
        where = named(unlike, group)
        raise KnownError(f"{OP}: x, and what asks for a gradient, must be alike on all ranks, but differ on {where}")
    if other := [rank for rank, word in enumerate(words) if word % CALLS != agreement.call % CALLS]:
        text = f"this one is in call {agreement.call}, but not {named(other, group)}"
        raise KnownError(f"{OP}: all ranks must be in the same call, {text}")


class StaticPlanner:
    """Sends the same number of rows to every rank: first tokens, as many as fit, then rows without a token.

    In both directions, the last row for each rank is a header. It holds the number of the message instead of a token.
    """

    def __init__(self, ranks: Ranks, capacity: float, top_k: int) -> None:
        self.ranks, self.capacity, self.top_k = ranks, capacity, top_k
        with torch.inference_mode(False):  # calls outside of inference mode write to both
            self.left_out = torch.zeros(2, dtype=torch.int64, device=ranks.device)  # tokens, slots
            # For each sending rank: 0, or NEVER minus the number of the message that was expected when another arrived.
            # If there are several, the message of the earliest call counts.
            self.mixed_up = torch.zeros(ranks.size, dtype=torch.int64, device=ranks.device)

    def placement(self, ids: Tensor) -> Placement:
        permutation, offs, inverse, counts = _by_rank(ids, self.ranks)
        (tokens, top_k), ranks = ids.shape, self.ranks.size
        room = min(tokens, math.ceil(self.capacity * tokens * min(1, top_k / ranks)))
        rows = counts[:, 0].int()
        starts = offs - rows
        place = torch.arange(room + 1, dtype=torch.int32, device=ids.device)
        permutation = torch.nn.functional.pad(permutation, (0, 1))  # without tokens it is empty
        found = permutation[(starts[:, None] + place).clamp(max=permutation.shape[0] - 1)]
        indices = found.masked_fill_((place >= rows[:, None]) | (place == room), -1).flatten()
        place = inverse - starts
        first = torch.arange(ranks, dtype=torch.int32, device=ids.device) * (room + 1)
        inverse = (place + first).masked_fill_((inverse < 0) | (place >= room), -1)
        return Placement(indices, inverse, counts)

    def routes(self, placements: Sequence[Placement]) -> list[Route]:
        for placement in placements:  # counted here, because a call that raises before it sends drops nothing
            room = placement.indices.shape[0] // self.ranks.size - 1
            self.left_out[0].add_((placement.counts[:, 0] - room).clamp(min=0).sum())
        slots = [math.ceil(self.capacity * placement.inverse.shape[0] * self.top_k) for placement in placements]
        parts = zip(placements, slots, strict=True)
        return [Route(part.indices, part.inverse, None, None, count, self.ranks.group) for part, count in parts]

    def write_headers(self, rows: Tensor, call: int, message: str, raised: bool = False) -> None:
        """Writes the number of a message into the headers of its rows [S, ...]. It is negative if this rank raised."""
        if (headers := self._headers(rows)) is None:
            return
        number = -number_of(call, message) if raised else number_of(call, message)
        if _is_int32(headers):
            headers.view(torch.int32).fill_(number)
        else:
            numbers = torch.full((len(headers), 1), number, dtype=torch.int32, device=rows.device)
            headers.copy_(numbers.view(torch.uint8))

    def check_headers(self, rows: Tensor, call: int, message: str) -> None:
        """Checks that the expected message arrived from every rank. A mismatch raises on a CPU.

        On a GPU the host would have to wait, so the device only records the mismatch.
        """
        if (headers := self._headers(rows)) is None:
            return
        number = number_of(call, message)
        numbers = (headers if _is_int32(headers) else headers.clone()).view(torch.int32)[:, 0]
        if rows.is_cuda:
            torch.maximum(self.mixed_up, (numbers != number) * (NEVER - number), out=self.mixed_up)
        elif (others := numbers.tolist()) != [number] * len(others):
            raise CallMismatch(call, message, others, self.ranks.group)

    def _headers(self, rows: Tensor) -> Tensor | None:
        """Returns the bytes of the numbers in the headers, a view [ranks, 4]; None if a row is too narrow for one."""
        rows = rows.view(torch.uint8)
        if rows.shape[1] < 4:
            return None
        return rows.view(self.ranks.size, -1, rows.shape[1])[:, -1, :4]

    def read_left_out(self) -> list[int]:
        """Returns how many tokens and slots all ranks left out since the last read."""
        left_out = self.left_out.clone()
        self.left_out.zero_()
        dist.all_reduce(left_out, group=self.ranks.group)
        return left_out.tolist()

    def read_mixed_up(self, calls: int) -> tuple[str, int, int]:
        """Compares calls over all ranks.

        Args:
            calls: the number of calls that this rank has counted.

        Returns:
            the name of an expected message in whose place another arrived, on any rank since the last read, or "";
            then the maximum and the minimum of the ranks' numbers of calls.
        """
        found = torch.cat([self.mixed_up.amax(0, keepdim=True), self.mixed_up.new_tensor([calls, -calls])])
        self.mixed_up.zero_()
        dist.all_reduce(found, dist.ReduceOp.MAX, self.ranks.group)
        earliest, most, fewest = found.tolist()
        return worded(NEVER - earliest) if earliest else "", most, -fewest


def _is_int32(headers: Tensor) -> bool:
    """Whether torch has a view of these bytes as int32. It has none if rows are an odd number of bfloat16 values."""
    return (headers.stride(0) | headers.storage_offset()) % 4 == 0


class KnownError(RuntimeError):
    """An error that every rank raises, so that no rank needs to report it."""


class CallMismatch(KnownError):
    """Another message than the expected one arrived. Every rank raises this, because all ranks exchange messages.

    Attributes:
        latest: the number of the latest call of any rank that this rank knows of.
    """

    def __init__(self, call: int, message: str, others: list[int], group: dist.ProcessGroup) -> None:
        self.latest = max(call, *(abs(number) // len(MESSAGES) for number in others))
        if raised := [rank for rank, number in enumerate(others) if number < 0]:
            text = f"every rank must complete call {call}, but an error was raised on {named(raised, group)}: see there"
        else:
            got = ", ".join(worded(number) for number in sorted(set(others) - {number_of(call, message)}))
            text = f"this one waits for the {message} of call {call} and got the {got}"
            text = f"all ranks must be in the same call, {text}; a rank probably raised an error, and went on"
        super().__init__(f"{OP}: {text}")


def number_of(call: int, message: str) -> int:
    return call * len(MESSAGES) + MESSAGES.index(message)


def worded(number: int) -> str:
    return f"{MESSAGES[number % len(MESSAGES)]} of call {number // len(MESSAGES)}"


def _by_rank(ids: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sorts tokens by the ranks that have any of their experts.

    Returns:
        permutation, offs and inverse of `sort_tokens`, and the counts of `tokens_by_rank`.
    """
    by_rank, counts = _tokens_by_rank(ids, ranks.size * ranks.num_local_experts, ranks.size)
    return *_sort_tokens(by_rank, ranks.size), counts


def named(ranks: list[int], group: dist.ProcessGroup) -> str:
    """Names ranks of a group by their global numbers, which are the same in all processes."""
    numbers = (str(dist.get_global_rank(group, rank)) for rank in ranks)
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(numbers)}"


def refuse(text: str) -> NoReturn:
    fail(OP, text)
