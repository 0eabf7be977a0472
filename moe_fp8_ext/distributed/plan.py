"""Where the rows of a call go: which ranks a token is sent to, and how many rows and slots that makes everywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

OP = "ExpertParallel"
RAISED = -1  # what a rank says that cannot send

_sort_tokens = torch.ops.moe_fp8.sort_tokens.default
_tokens_by_rank = torch.ops.moe_fp8.tokens_by_rank.default


class Peers(NamedTuple):
    """The ranks among which experts are spread, and this one."""

    group: dist.ProcessGroup
    rank: int
    ranks: int
    num_local_experts: int
    device: torch.device


class Travelling(NamedTuple):
    """Rows on their way; what the current stream does meanwhile does not wait for them."""

    rows: Tensor
    work: dist.Work

    def arrived(self) -> Tensor:
        self.work.wait()
        return self.rows


class Way(NamedTuple):
    """Of rows from the ranks whose tokens they are to those whose experts they go to, and back."""

    indices: Tensor  # [S] int32: row s is that of token indices[s] // ranks; -1: of none
    inverse: Tensor  # [T, ranks] int32: the row of a token for a rank; -1: none
    sent: list[int] | None  # rows for every rank; None: as many for each
    received: list[int] | None
    slots: int  # at its end, or the room for them
    group: dist.ProcessGroup

    def there(self, rows: Tensor) -> Travelling:
        """[S, ...], of which those behind the last token stay, -> [N, ...]"""
        return self._exchanged(rows[: self.indices.shape[0]], self.sent, self.received)

    def back(self, rows: Tensor) -> Travelling:
        """[N, ...] -> [S, ...]"""
        return self._exchanged(rows, self.received, self.sent)

    def _exchanged(self, rows: Tensor, sent: list[int] | None, received: list[int] | None) -> Travelling:
        count = rows.shape[0] if received is None else sum(received)
        out = rows.new_empty(count, *rows.shape[1:])
        to, of = out.view(torch.uint8), rows.view(torch.uint8)
        return Travelling(out, dist.all_to_all_single(to, of, received, sent, self.group, async_op=True))


class Places(NamedTuple):
    """What the device knows of a way."""

    indices: Tensor
    inverse: Tensor
    counts: Tensor  # [ranks, 2] int64: rows and slots for every rank
    found: torch.cuda.Event | None = None  # by when that is so


class Exact:
    """Rows as there are. The host waits for their numbers, which are told on a stream of their own."""

    def __init__(self, peers: Peers, chunks: int) -> None:
        self.peers, self.chunks = peers, chunks
        # Of high priority: sizes are told by small kernels, which would wait until a cast has no blocks left to start.
        self.side = torch.cuda.Stream(peers.device, priority=-1) if peers.device.type == "cuda" else None
        self._columns: dict[int, Tensor] = {}  # of signatures, [ranks, 1]

    def places(self, parts: Sequence[Tensor]) -> list[Places]:
        """Of ids [T, top_k] of each part, in [0, num_experts); others are none.

        There are as many rows as any routing has, those of no token last: they can be filled before the host knows
        how many are sent.
        """
        places = [self._places(ids) for ids in parts]
        found = self._now()
        return [to._replace(found=found) for to in places]

    def _places(self, ids: Tensor) -> Places:
        permutation, _, inverse, counts = _by_rank(ids, self.peers)
        return Places(permutation[: ids.shape[0] * min(ids.shape[1], self.peers.ranks)], inverse, counts)

    def ways(self, places: Sequence[Places], signature: int) -> list[Way]:
        """signature: what must be alike on all ranks."""
        with self._behind(places[-1].found):
            sizes = self._told([to.counts for to in places], signature)
        return [
            Way(to.indices[: sum(sent)], to.inverse, sent, received, sum(slots), self.peers.group)
            for to, (sent, received, slots) in zip(places, sizes, strict=True)
        ]

    def refuse(self) -> None:
        """Tells the other ranks, which wait for this one, that it has nothing to send but an error."""
        self.agree(RAISED)

    def agree(self, signature: int) -> None:
        """Raises on all ranks unless all have the same."""
        with self._behind(self._now()):
            nothing = torch.zeros(self.peers.ranks, 2, dtype=torch.int64, device=self.peers.device)
            self._told([nothing] * self.chunks, signature)

    def _now(self) -> torch.cuda.Event | None:
        """Where the current stream is."""
        return None if self.side is None else torch.cuda.current_stream(self.peers.device).record_event()

    def _behind(self, event: torch.cuda.Event | None) -> AbstractContextManager:
        """On the other stream, which waits for no more than the event."""
        if self.side is None:
            return nullcontext()
        self.side.wait_event(event)
        return torch.cuda.stream(self.side)

    def _told(self, counts: list[Tensor], signature: int) -> list[tuple[list[int], list[int], list[int]]]:
        """Of counts [ranks, 2] that go there, by chunks: rows for ranks, rows from them, slots of those."""
        group, ranks = self.peers.group, self.peers.ranks
        if signature not in self._columns:
            self._columns[signature] = counts[0].new_full((ranks, 1), signature)
        both = counts[0].new_empty(2, ranks, 2 * self.chunks + 1)  # what is told and heard: one copy to the host
        torch.cat([*counts, self._columns[signature]], 1, out=both[0])
        dist.all_to_all_single(both[1], both[0], group=group)
        told, heard = both.mT.tolist()
        *heard, signatures = heard
        if signature != RAISED:
            if raised := [rank for rank, other in enumerate(signatures) if other == RAISED]:
                fail(f"every rank must be able to send, but an error was raised on {named(raised, group)}: see there")
            if unlike := [rank for rank, other in enumerate(signatures) if other != signature]:
                where = named(unlike, group)
                fail(f"x, and what asks for a gradient, must be alike on all ranks, but differ on {where}")
        return list(zip(told[:-1:2], heard[::2], heard[1::2], strict=True))


class Static:
    """As many rows for every rank: those that there is room for, and rows of no token."""

    def __init__(self, peers: Peers, capacity: float, top_k: int) -> None:
        self.peers, self.capacity, self.top_k = peers, capacity, top_k
        self.left_out = torch.zeros(2, dtype=torch.int64, device=peers.device)  # tokens, slots

    def places(self, parts: Sequence[Tensor]) -> list[Places]:
        return [self._places(ids) for ids in parts]

    def _places(self, ids: Tensor) -> Places:
        permutation, offs, inverse, counts = _by_rank(ids, self.peers)
        (tokens, top_k), ranks = ids.shape, self.peers.ranks
        room = min(tokens, math.ceil(self.capacity * tokens * min(1, top_k / ranks)))
        rows = counts[:, 0].int()
        starts = offs - rows
        place = torch.arange(room, dtype=torch.int32, device=ids.device)
        found = permutation[(starts[:, None] + place).clamp(max=max(permutation.shape[0] - 1, 0))]
        indices = found.masked_fill_(place >= rows[:, None], -1).flatten()
        place = inverse - starts
        first = torch.arange(ranks, dtype=torch.int32, device=ids.device) * room
        inverse = (place + first).masked_fill_((inverse < 0) | (place >= room), -1)
        return Places(indices, inverse, counts)

    def ways(self, places: Sequence[Places], signature: int) -> list[Way]:
        for to in places:  # not as they are made: a call that raises before it sends leaves nothing out
            rows = to.indices.shape[0] // self.peers.ranks
            self.left_out[0].add_((to.counts[:, 0] - rows).clamp(min=0).sum())
        room = [math.ceil(self.capacity * to.inverse.shape[0] * self.top_k) for to in places]
        parts = zip(places, room, strict=True)
        return [Way(to.indices, to.inverse, None, None, slots, self.peers.group) for to, slots in parts]

    def read_left_out(self) -> list[int]:
        """Tokens and slots of all ranks since it was last read."""
        left_out = self.left_out.clone()
        self.left_out.zero_()
        dist.all_reduce(left_out, group=self.peers.group)
        return left_out.tolist()


def _by_rank(ids: Tensor, peers: Peers) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `sort_tokens` returns for the ranks that a token has any expert of, and counts of `tokens_by_rank`."""
    by_rank, counts = _tokens_by_rank(ids, peers.ranks * peers.num_local_experts, peers.ranks)
    return *_sort_tokens(by_rank, peers.ranks), counts


def named(ranks: list[int], group: dist.ProcessGroup) -> str:
    """Ranks of a group, as logs of all processes count them."""
    numbers = (str(dist.get_global_rank(group, rank)) for rank in ranks)
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(numbers)}"


def fail(text: str) -> NoReturn:
    raise RuntimeError(f"{OP}: {text}")
