"""What a lease authority keeps: offers, leases, the ranks that were told, and releases that wait for them."""

from __future__ import annotations

import hmac
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count

from kvferry.core.request import BlockTable
from kvferry.errors import SpecError
from kvferry.runtime.failure import FailureCode
from kvferry.runtime.values import Released
from kvferry.wire.messages import MARK_BYTES, TOKEN_BYTES, Acquire, Join, Outcome, Settle
from kvferry.wire.reading import MAX_REQUEST_ID, check_name
from kvferry.wire.ticket import NOT_SAID, NotSaid, Ticket, is_proved, seal, sign, tables_to_wire

MAX_READER_RANKS = 1 << 16
"""Ranks of one destination engine: each that asks is remembered."""


@dataclass(slots=True)
class _RankGrant:
    attempt: int
    """The latest attempt that is known of it."""
    token: bytes
    """Only the rank knows it: who shows it is the rank."""
    outcome: Outcome | None = None
    """None while it may still read."""
    is_declined: bool = False
    """Whether its engine does not need the ticket."""

    def is_shown(self, token: bytes) -> bool:
        """Whether this is the rank's token; how long the answer takes says nothing about the token."""
        return hmac.compare_digest(self.token, token)


@dataclass(slots=True)
class Reading:
    """A ticket in the hands of one start of one destination engine."""

    reader: str
    num_ranks: int
    grants: dict[int, _RankGrant] = field(default_factory=dict)

    @property
    def outcomes(self) -> set[Outcome]:
        """What the ranks that are through with it said; nothing while one is not."""
        outcomes = {grant.outcome for grant in self.grants.values()}
        if len(self.grants) < self.num_ranks or None in outcomes:
            return set()
        return {outcome for outcome in outcomes if outcome is not None}

    @property
    def is_declined(self) -> bool:
        """Whether a rank said that its engine does not need the ticket: one speaks for all of them."""
        return any(grant.is_declined for grant in self.grants.values())

    def _of(self, reader: str, rank: int, token: bytes) -> _RankGrant | None:
        grant = self.grants.get(rank)
        is_shown = grant is not None and reader == self.reader and grant.is_shown(token)
        return grant if is_shown else None

    def is_held(self, reader: str, rank: int, token: bytes) -> bool:
        """Whether a rank that shows this token was granted the ticket, and may still read it."""
        grant = self._of(reader, rank, token)
        return grant is not None and grant.outcome is None

    def settle(self, message: Settle) -> bool:
        """A rank is through with it; whether it is the one that was granted it, and has not said otherwise.

        Only the attempt that was granted can be settled, and only with the token of its rank.
        """
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
    """The promise to keep a ticket's blocks. It is made once, and never again once it has ended."""

    ticket: Ticket
    deadline: float
    ends_by: float
    """It is not renewed beyond that, whoever asks."""
    reading: Reading | None = None
    left: Reading | None = None
    """The last reading that was given up before it began: a late copy of what it said binds nothing."""
    is_withdrawn: bool = False
    transfer: str = ""
    """The router's name of a prefill, if the lease grew, or grows, with it."""
    watchers: dict[int, tuple[str, int]] = field(default_factory=dict)
    """By rank of the reader: where an answer goes when it has grown, and to which question."""

    def bind(self, ask: Acquire) -> tuple[FailureCode, str] | None:
        """This rank's from now on, until it settles; or why it cannot have it."""
        refusal = self._refusal(ask)
        if refusal is None:
            if self.reading is None:
                self.reading = Reading(ask.reader, ask.reader_ranks)
            self.reading.grants[ask.reader_rank] = _RankGrant(ask.attempt, ask.token)
        return refusal

    def is_held_by(self, rank: int) -> bool:
        """Whether this rank of its reader was granted it already: an ask that is repeated grants nothing."""
        return self.reading is not None and rank in self.reading.grants

    def _refusal(self, ask: Acquire) -> tuple[FailureCode, str] | None:
        if not ask.reader or not 0 <= ask.reader_rank < ask.reader_ranks <= MAX_READER_RANKS:
            detail = f"rank {ask.reader_rank} of {ask.reader_ranks} of {ask.reader!r}"
            return FailureCode.READER, detail
        if len(ask.token) != TOKEN_BYTES:
            return FailureCode.READER, f"a token has {TOKEN_BYTES} bytes, got {len(ask.token)}"
        if self.reading is None:
            return (FailureCode.SPENT, "this rank has aborted it") if self._is_left(ask) else None
        if self.reading.reader != ask.reader:
            return FailureCode.TAKEN, "another engine reads it"
        if self.reading.num_ranks != ask.reader_ranks:
            return (
                FailureCode.READER,
                f"its number of ranks was {self.reading.num_ranks}, and is {ask.reader_ranks} now",
            )
        return self._rank_refusal(self.reading, ask)

    def _is_left(self, ask: Acquire) -> bool:
        if self.left is None or self.left.reader != ask.reader:
            return False
        grant = self.left.grants.get(ask.reader_rank)
        return grant is not None and ask.attempt <= grant.attempt

    def _rank_refusal(self, reading: Reading, ask: Acquire) -> tuple[FailureCode, str] | None:
        grant = reading.grants.get(ask.reader_rank)
        if grant is None:
            return (FailureCode.SPENT, "this rank has aborted it") if self._is_left(ask) else None
        if not grant.is_shown(ask.token):
            return FailureCode.TAKEN, "another process reads it under this name"
        is_retry = grant.outcome is Outcome.UNREAD and ask.attempt > grant.attempt
        if ask.attempt < grant.attempt or (grant.outcome is not None and not is_retry):
            return FailureCode.SPENT, "this rank has finished reading it"
        return None

    def leave(self) -> None:
        self.left, self.reading = self.reading, None


class EndedReadings:
    """The readings that have ended, for as long as a reader may ask again how its own ended."""

    MAX_READINGS = 100_000
    """The oldest is forgotten first; whoever asks for it then is told that its read does not count."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._by_ticket: dict[int, tuple[float, Reading]] = {}
        """Until when each is remembered; the oldest first."""

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
        """Forget what nobody asks for any more."""
        while self.next_deadline() <= now:
            del self._by_ticket[next(iter(self._by_ticket))]

    def next_deadline(self) -> float:
        return next((until for until, _ in self._by_ticket.values()), float("inf"))


class Offers:
    """Makes, numbers and signs the tickets of one start of one source engine.

    An engine wants a ticket at once, and cannot wait for the thread that owns the leases. So tickets are made
    here, in the engine's own thread, and the lease follows: it reaches its owner before any reader can have
    seen the ticket. Every method may be called from any thread: each changes one dictionary in one step.
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
        """``key`` is this start's own, ``fleet_key`` that of all engines that share a secret."""
        check_name("the name of an engine", engine)
        self.engine, self.generation, self.address, self.lease_ms = engine, generation, address, lease_ms
        self._host, self._key, self.fleet_key = host, key, fleet_key
        self._open: dict[str, int] = {}
        """The ticket of each request on offer."""
        self._numbers = count(1), count(-1, -1)
        """Of leases, which all end, in about their order; and of soft offers, which do not."""
        self.refusal = ""
        """Why nothing can be offered now; whoever owns the leases says so."""

    def __len__(self) -> int:
        """How many requests are on offer, or were released without the engine having heard of it yet."""
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
        check_name("the name of a request", request_id, MAX_REQUEST_ID)
        ticket_id = next(self._numbers[0])
        ticket = Ticket(
            self.engine,
            self.generation,
            ticket_id,
            request_id,
            self.address,
            num_tokens,
            tables_to_wire(tables),
            self.lease_ms,
            digest,
            held_from=held_from,
            complete=complete,
            host=self._host,
        )
        signed = seal(sign(ticket, self._key), self.fleet_key)
        if self._open.setdefault(request_id, ticket_id) != ticket_id:
            raise SpecError(f"request {request_id!r} is already offered")
        return signed

    def make_soft(self, request_id: str, num_tokens: int, parts: bytes) -> Ticket:
        """A note of what this engine may still have of a request later. Nothing is kept for it."""
        check_name("the name of a request", request_id, MAX_REQUEST_ID)
        ticket = Ticket(
            self.engine,
            self.generation,
            next(self._numbers[1]),
            request_id,
            self.address,
            num_tokens,
            tables={},
            lease_ms=0,
            host=self._host,
            parts=parts,
        )
        return seal(sign(ticket, self._key), self.fleet_key)

    def stage(
        self,
        ticket: Ticket,
        tables: Mapping[str, BlockTable],
        complete: int | NotSaid = NOT_SAID,
        held_from: int | NotSaid = NOT_SAID,
    ) -> Ticket:
        """A later stage of a growing lease's ticket; without ``complete`` the last one."""
        stage = ticket.stage(tables_to_wire(tables), complete, held_from)
        return seal(sign(stage, self._key), self.fleet_key)

    def forget(self, request_id: str) -> None:
        """The engine has heard that the request is released: its name may come again."""
        self._open.pop(request_id, None)

    def mark(self, ticket_id: int) -> bytes:
        """What shows that the lease of a ticket stands: another one for each, that nobody can guess."""
        return hmac.digest(self._key, b"board\0%d" % ticket_id, "sha256")[:MARK_BYTES]

    def is_own(self, ticket: Ticket) -> bool:
        """Whether this start of this engine made a ticket, as it is."""
        is_named = (ticket.engine, ticket.generation) == (self.engine, self.generation)
        return is_named and is_proved(ticket, self._key)


class Assembly(StrEnum):
    """How much of this engine is there."""

    GATHERING = "gathering"
    """Not every rank has joined."""
    MERGING = "merging"
    """All have; the engine's outline is being made of what they say."""
    WHOLE = "whole"
    """Readers are welcome."""


@dataclass(slots=True)
class JoinedRank:
    reply_to: str
    join: Join

    def is_same(self, join: Join) -> bool:
        ours, theirs = ((each.transport, each.manifest, each.description) for each in (self.join, join))
        return ours == theirs


@dataclass(frozen=True, slots=True)
class _Held:
    number: int
    released: Released
    tell_by: float


class HeldReleases:
    """What has ended, in order. A rank that says nothing holds a release up for so many seconds at most: its
    process is gone, or stands still with the memory that it would gather from.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._held: deque[_Held] = deque()
        self._num_ended = 0

    def add(self, now: float, released: Released) -> None:
        """A request is released; ranks hear of it under the next number."""
        self._num_ended += 1
        self._held.append(_Held(self._num_ended, released, now + self._patience))

    def pop(self, now: float, num_heard: float) -> list[Released]:
        """What the engine may be told, once: ``num_heard`` releases were heard by every rank that gathers."""
        told: list[Released] = []
        while self._held and (self._held[0].number <= num_heard or now >= self._held[0].tell_by):
            told.append(self._held.popleft().released)
        return told

    def next_deadline(self) -> float:
        return self._held[0].tell_by if self._held else float("inf")
