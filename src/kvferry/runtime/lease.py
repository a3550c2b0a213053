"""The parts of a lease authority: offers, leases, readings, ranks and held releases."""

from __future__ import annotations

import hmac
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import Any

from kvferry.core.request import BlockTable
from kvferry.core.span import MAX_STOP
from kvferry.core.state import check_range
from kvferry.errors import SpecError
from kvferry.runtime.failure import FailureCode
from kvferry.runtime.values import Released
from kvferry.wire.messages import MARK_BYTES, TOKEN_BYTES, Acquire, Join, Outcome, Settle
from kvferry.wire.reading import MAX_REQUEST_ID, check_name
from kvferry.wire.ticket import NOT_SAID, NotSaid, TableDoc, Ticket, is_proved, seal, sign, tables_to_wire

MAX_READER_RANKS = 1 << 16
"""Ranks of one destination engine."""


@dataclass(slots=True)
class _RankGrant:
    attempt: int
    """The latest known attempt."""
    token: bytes
    """Known only to the rank."""
    outcome: Outcome | None = None
    """None while it may still read."""
    is_declined: bool = False
    """Whether its engine does not need the ticket."""

    def is_shown(self, token: bytes) -> bool:
        return hmac.compare_digest(self.token, token)


@dataclass(slots=True)
class Reading:
    """One destination engine's reading of a ticket."""

    reader: str
    num_ranks: int
    grants: dict[int, _RankGrant] = field(default_factory=dict)

    @property
    def outcomes(self) -> set[Outcome]:
        """The outcomes of all ranks; empty until every rank has settled."""
        outcomes = {grant.outcome for grant in self.grants.values()}
        if len(self.grants) < self.num_ranks or None in outcomes:
            return set()
        return {outcome for outcome in outcomes if outcome is not None}

    @property
    def is_declined(self) -> bool:
        """Whether any rank declined the ticket, for the whole engine."""
        return any(grant.is_declined for grant in self.grants.values())

    def _of(self, reader: str, rank: int, token: bytes) -> _RankGrant | None:
        grant = self.grants.get(rank)
        is_shown = grant is not None and reader == self.reader and grant.is_shown(token)
        return grant if is_shown else None

    def is_held(self, reader: str, rank: int, token: bytes) -> bool:
        """Whether the rank with this token was granted the ticket and has not settled."""
        grant = self._of(reader, rank, token)
        return grant is not None and grant.outcome is None

    def settle(self, message: Settle) -> bool:
        """Settle a rank's granted attempt; False if it is another one, or already has another outcome."""
        grant = self._of(message.reader, message.reader_rank, message.token)
        if grant is None or grant.attempt != message.attempt:
            return False
        grant.outcome = grant.outcome or message.outcome
        is_said = grant.outcome is message.outcome
        grant.is_declined |= is_said and message.declined is not None
        return is_said

    def is_settled(self, message: Settle) -> bool:
        grant = self._of(message.reader, message.reader_rank, message.token)
        return grant is not None and (grant.attempt, grant.outcome) == (message.attempt, message.outcome)


@dataclass(slots=True)
class Lease:
    """The promise to keep a ticket's blocks; made once per ticket."""

    ticket: Ticket
    deadline: float
    ends_by: float
    """It is not renewed beyond this time."""
    reading: Reading | None = None
    left: Reading | None = None
    """The last reading that ended unread: late copies of its messages must not bind the ticket again."""
    is_withdrawn: bool = False
    transfer: str = ""
    """The router's name of the prefill, if the lease is or was growing."""
    watchers: dict[int, tuple[str, int]] = field(default_factory=dict)
    """By rank of the reader: address and nonce of its unanswered ``Watch``."""

    def bind(self, ask: Acquire) -> tuple[FailureCode, str] | None:
        """Grant the ticket to a rank until it settles; or return why not."""
        refusal = self._refusal(ask)
        if refusal is None:
            if self.reading is None:
                self.reading = Reading(ask.reader, ask.reader_ranks)
            self.reading.grants[ask.reader_rank] = _RankGrant(ask.attempt, ask.token)
        return refusal

    def is_held_by(self, rank: int) -> bool:
        return self.reading is not None and rank in self.reading.grants

    def _refusal(self, ask: Acquire) -> tuple[FailureCode, str] | None:
        if not ask.reader or not 0 <= ask.reader_rank < ask.reader_ranks <= MAX_READER_RANKS:
            detail = f"rank {ask.reader_rank} of {ask.reader_ranks} of {ask.reader!r}"
            return FailureCode.READER, detail
        if len(ask.token) != TOKEN_BYTES:
            return FailureCode.READER, f"a token has {TOKEN_BYTES} bytes, got {len(ask.token)}"
        if self.reading is None:
            return self._left_refusal(ask)
        if self.reading.reader != ask.reader:
            return FailureCode.TAKEN, "another engine reads it"
        if self.reading.num_ranks != ask.reader_ranks:
            return (
                FailureCode.READER,
                f"its number of ranks changed from {self.reading.num_ranks} to {ask.reader_ranks}",
            )
        return self._rank_refusal(self.reading, ask)

    def _left_refusal(self, ask: Acquire) -> tuple[FailureCode, str] | None:
        left = self.left
        grant = left.grants.get(ask.reader_rank) if left and left.reader == ask.reader else None
        is_left = grant is not None and ask.attempt <= grant.attempt
        return (FailureCode.SPENT, "this rank has aborted it") if is_left else None

    def _rank_refusal(self, reading: Reading, ask: Acquire) -> tuple[FailureCode, str] | None:
        grant = reading.grants.get(ask.reader_rank)
        if grant is None:
            return self._left_refusal(ask)
        if not grant.is_shown(ask.token):
            return FailureCode.TAKEN, "another process reads it under this name"
        is_retry = grant.outcome is Outcome.UNREAD and ask.attempt > grant.attempt
        if ask.attempt < grant.attempt or (grant.outcome is not None and not is_retry):
            return FailureCode.SPENT, "this rank has finished reading it"
        return None


class EndedReadings:
    """Ended readings, kept while a reader may repeat its settlement."""

    MAX_READINGS = 100_000
    """The oldest is forgotten first; a repeated settlement then fails."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._by_ticket: dict[int, tuple[float, Reading]] = {}
        """With the time to forget each; the oldest first."""

    def __len__(self) -> int:
        return len(self._by_ticket)

    def remember(self, now: float, ticket_id: int, reading: Reading) -> None:
        if len(self._by_ticket) >= self.MAX_READINGS:
            del self._by_ticket[next(iter(self._by_ticket))]
        self._by_ticket[ticket_id] = now + self._seconds, reading

    def find(self, ticket_id: int) -> Reading | None:
        known = self._by_ticket.get(ticket_id)
        return None if known is None else known[1]

    def tick(self, now: float) -> None:
        while self.next_deadline() <= now:
            del self._by_ticket[next(iter(self._by_ticket))]

    def next_deadline(self) -> float:
        return next((until for until, _ in self._by_ticket.values()), float("inf"))


class Offers:
    """Makes, numbers and signs the tickets of one start of one source engine.

    Tickets are made in the calling thread, without waiting for the owner of the leases; the lease reaches the
    owner before any reader can have seen the ticket. Thread-safe: each method changes one dictionary at once.
    """

    MAX_OPEN = 100_000

    def __init__(
        self,
        engine: str,
        generation: int,
        key: bytes,
        address: str,
        lease_ms: int,
        host: str = "",
        fleet_key: bytes = b"",
    ) -> None:
        """``key``: of this start; ``fleet_key``: of all engines that share a secret."""
        check_name("the name of an engine", engine)
        self.engine, self.generation, self.address, self.lease_ms = engine, generation, address, lease_ms
        self._host, self._key, self.fleet_key = host, key, fleet_key
        self._open: dict[str, int] = {}
        """The ticket of each request on offer."""
        self._numbers = count(1), count(-1, -1)
        """Of leases, and of soft offers."""
        self.refusal = ""
        """Why nothing can be offered now; set by the owner of the leases."""

    def __len__(self) -> int:
        """Requests on offer, or released and not yet polled."""
        return len(self._open)

    def make(
        self,
        request_id: str,
        tables: Mapping[str, BlockTable],
        num_tokens: int,
        digest: bytes = b"",
        held_from: int | NotSaid = NOT_SAID,
        complete: int | NotSaid = NOT_SAID,
    ) -> Ticket:
        """The ticket for a request's blocks; raises SpecError if it cannot be offered."""
        if self.refusal:
            raise SpecError(self.refusal)
        if len(self._open) >= self.MAX_OPEN:
            detail = "on offer, or released and not polled: call poll, withdraw some, or shorten the lease"
            raise SpecError(f"{self.MAX_OPEN} requests are {detail}")
        _check_offer(request_id, num_tokens, digest, held_from, complete)
        ticket_id = next(self._numbers[0])
        about = {"digest": digest, "held_from": held_from, "complete": complete}
        wire = tables_to_wire(tables)
        ticket = self._signed(ticket_id, request_id, num_tokens, wire, self.lease_ms, **about)
        if self._open.setdefault(request_id, ticket_id) != ticket_id:
            raise SpecError(f"request {request_id!r} is already offered")
        return ticket

    def make_soft(self, request_id: str, num_tokens: int, parts: bytes) -> Ticket:
        """A note of what this engine may still have of a request later. Nothing is kept for it."""
        _check_offer(request_id, num_tokens, parts)
        return self._signed(next(self._numbers[1]), request_id, num_tokens, {}, lease_ms=0, parts=parts)

    def _signed(
        self,
        ticket_id: int,
        request_id: str,
        num_tokens: int,
        tables: dict[str, TableDoc],
        lease_ms: int,
        **about: Any,
    ) -> Ticket:
        names = self.engine, self.generation, ticket_id, request_id, self.address
        ticket = Ticket(*names, num_tokens, tables, lease_ms, host=self._host, **about)
        return seal(sign(ticket, self._key), self.fleet_key)

    def stage(
        self,
        ticket: Ticket,
        tables: Mapping[str, BlockTable],
        complete: int | NotSaid = NOT_SAID,
        held_from: int | NotSaid = NOT_SAID,
    ) -> Ticket:
        """A later stage of a growing lease's ticket; the last one if ``complete`` is missing."""
        if not ticket.is_growing:
            raise SpecError(f"the offer of request {ticket.request_id!r} is closed")
        _check_offer(ticket.request_id, ticket.num_tokens, b"", held_from, complete)
        wire = tables_to_wire(tables)
        for name, before in ticket.tables.items():
            now, size = wire.get(name, TableDoc(())), len(before.block_ids)
            if (now.first_token, now.block_ids[:size]) != (before.first_token, before.block_ids):
                raise SpecError(
                    f"offered table of group {name}: a growing table keeps the blocks that it has"
                )
        stage = ticket.stage(wire, complete, held_from)
        return seal(sign(stage, self._key), self.fleet_key)

    def forget(self, request_id: str) -> None:
        """The engine has polled the release: the name can be offered again."""
        self._open.pop(request_id, None)

    def mark(self, ticket_id: int) -> bytes:
        """The board mark of a ticket's lease: unique and unguessable."""
        return hmac.digest(self._key, b"board\0%d" % ticket_id, "sha256")[:MARK_BYTES]

    def is_own(self, ticket: Ticket) -> bool:
        """Whether this start of this engine made a ticket, as it is."""
        is_named = (ticket.engine, ticket.generation) == (self.engine, self.generation)
        return is_named and is_proved(ticket, self._key)


def _check_offer(
    request_id: str,
    num_tokens: int,
    content: bytes,
    held_from: int | NotSaid = NOT_SAID,
    complete: int | NotSaid = NOT_SAID,
) -> None:
    """Raise if readers would reject the ticket: it would be found out at the other end only."""
    check_name("the name of a request", request_id, MAX_REQUEST_ID)
    check_range("num_tokens", num_tokens, 0, MAX_STOP)
    if not isinstance(content, bytes):
        raise SpecError(f"the digest of a request is bytes, got {content!r:.80}")
    if not isinstance(held_from, NotSaid):
        check_range("held_from", held_from, 0, MAX_STOP)
    if not isinstance(complete, NotSaid):
        check_range("num_complete", complete, 0, num_tokens)


class Assembly(StrEnum):
    GATHERING = "gathering"
    """Not every rank has joined."""
    MERGING = "merging"
    """All have; their descriptions are being merged into the engine's outline."""
    WHOLE = "whole"
    """Readers are welcome."""


@dataclass(slots=True)
class JoinedRank:
    reply_to: str
    join: Join

    def is_same(self, join: Join) -> bool:
        ours, theirs = ((each.transport, each.manifest, each.description) for each in (self.join, join))
        return ours == theirs


class HeldReleases:
    """Releases that wait for ranks to acknowledge them, in order, each for ``patience`` seconds at most."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._held: deque[tuple[float, Released]] = deque()
        """Each with its latest time to report it."""
        self._num_told = 0

    def add(self, now: float, released: Released) -> None:
        self._held.append((now + self._patience, released))

    def pop(self, now: float, num_heard: float) -> list[Released]:
        """The releases to report now: ranks that gather have acknowledged the first ``num_heard``."""
        told: list[Released] = []
        while self._held and (self._num_told < num_heard or now >= self._held[0][0]):
            told.append(self._held.popleft()[1])
            self._num_told += 1
        return told

    def next_deadline(self) -> float:
        return self._held[0][0] if self._held else float("inf")
