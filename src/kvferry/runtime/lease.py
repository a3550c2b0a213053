"""One lease: the ticket whose blocks it keeps, who reads them, and what became of each rank that does."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field

from kvferry.runtime.failure import FailureCode
from kvferry.wire.messages import TOKEN_BYTES, Acquire, Outcome, Settle
from kvferry.wire.ticket import Ticket

MAX_READER_RANKS = 1 << 16
"""Ranks of one destination engine: each that asks is remembered."""


@dataclass(slots=True)
class _RankGrant:
    """What one rank of a reader was granted."""

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
        """Whether exactly this was said before."""
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
            return (FailureCode.SPENT, "this rank gave it up") if self._is_left(ask) else None
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
            return (FailureCode.SPENT, "this rank gave it up") if self._is_left(ask) else None
        if not grant.is_shown(ask.token):
            return FailureCode.TAKEN, "another process reads it under this name"
        is_retry = grant.outcome is Outcome.UNREAD and ask.attempt > grant.attempt
        if ask.attempt < grant.attempt or (grant.outcome is not None and not is_retry):
            return FailureCode.SPENT, "this rank is through with it"
        return None

    def leave(self) -> None:
        """Free for another reader."""
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
        """A lease has ended."""
        if len(self._by_ticket) >= self.MAX_READINGS:
            del self._by_ticket[next(iter(self._by_ticket))]
        self._by_ticket[ticket_id] = now + self._seconds, reading

    def find(self, ticket_id: int) -> Reading | None:
        """How a ticket was read, if that is remembered."""
        known = self._by_ticket.get(ticket_id)
        return None if known is None else known[1]

    def tick(self, now: float) -> None:
        """Forget what nobody asks for any more."""
        while self.next_deadline() <= now:
            del self._by_ticket[next(iter(self._by_ticket))]

    def next_deadline(self) -> float:
        """When the oldest is forgotten."""
        return next((until for until, _ in self._by_ticket.values()), float("inf"))
