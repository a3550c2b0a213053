"""The lease authority: the one place of a source engine that grants leases and ends them.

A lease is the promise to keep a ticket's blocks untouched until a deadline. It is granted from the moment a
reader *asked*, so that a reader can prove by its own clock alone that a read was covered. Deadlines only move
away, never nearer; a ticket that is being read ends when its reader is through, or when its deadline passes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice

from kvferry.core.request import BlockTable
from kvferry.errors import KVFerryError, SpecError
from kvferry.runtime.values import Send, Timing
from kvferry.wire.messages import (
    MAX_BATCH,
    PROTOCOL,
    Acquire,
    Denial,
    Ended,
    Grant,
    Heard,
    Hello,
    Join,
    Joined,
    Noted,
    Outcome,
    Renew,
    Renewal,
    Settle,
    Sorry,
    ToAuthority,
    Welcome,
)
from kvferry.wire.ticket import Ticket, is_proved, sign, tables_to_wire


@dataclass(frozen=True, slots=True)
class Released:
    """Effect for the engine: a request's blocks are its own again."""

    request_id: str
    reason: str


@dataclass(slots=True)
class _Lease:
    ticket: Ticket
    deadline: float
    reader: str = ""
    reader_ranks: int = 0
    attempts: dict[int, int] = field(default_factory=dict)
    """The latest attempt that is known of each of the reader's ranks."""
    settled: dict[int, Outcome] = field(default_factory=dict)
    is_withdrawn: bool = False
    left_by: str = ""
    """The last reader that gave it up unread, and its attempts: a late copy of theirs binds nothing."""
    left_attempts: dict[int, int] = field(default_factory=dict)

    def is_stale(self, reader: str, rank: int, attempt: int) -> bool:
        """Whether this is a late message of an attempt that the reader's rank has left behind."""
        is_left = reader == self.left_by and attempt <= self.left_attempts.get(rank, -1)
        return is_left or attempt < self.attempts.get(rank, attempt)

    def is_spent(self, rank: int, attempt: int) -> bool:
        """Whether a rank of the reader is through with the ticket; one that read nothing may try anew."""
        is_retry = self.settled.get(rank) is Outcome.UNREAD and attempt > self.attempts[rank]
        return rank in self.settled and not is_retry

    def bind(self, ask: Acquire) -> None:
        """This reader's from now on."""
        self.reader, self.reader_ranks = ask.reader, ask.reader_ranks
        self.attempts[ask.reader_rank] = ask.attempt
        self.settled.pop(ask.reader_rank, None)

    def leave(self) -> None:
        """Free for another reader."""
        self.left_by, self.left_attempts = self.reader, self.attempts
        self.reader, self.reader_ranks, self.attempts, self.settled = "", 0, {}, {}


@dataclass(slots=True)
class _Rank:
    """One rank of this engine that joined."""

    route: str
    transport: str
    manifest: bytes
    card: bytes


@dataclass(slots=True)
class _Notices:
    """What one rank of this engine must hear; collected from the start, also before it joins."""

    unheard: deque[tuple[str, str]] = field(default_factory=deque)
    first: int = 1
    """The number of the first notice in ``unheard``."""
    last_sent: int = 0
    sent_at: float = float("-inf")


Merge = Callable[[Mapping[int, bytes]], bytes]
"""Makes the engine's manifest of its ranks' manifests."""


class Authority:
    """Keeps the leases of one start of one source engine."""

    MAX_LEASES = 100_000
    MAX_UNHEARD = 100_000
    """Notices that one rank may leave unheard before nothing more is offered."""

    def __init__(
        self,
        engine: str,
        generation: int,
        key: bytes,
        address: str,
        num_ranks: int,
        merge: Merge,
        timing: Timing | None = None,
    ) -> None:
        self.engine, self.generation, self.address = engine, generation, address
        self._key, self._num_ranks, self._merge = key, num_ranks, merge
        self._timing = timing or Timing()
        self._leases: dict[int, _Lease] = {}
        self._by_request: dict[str, int] = {}
        self._by_deadline: list[tuple[float, int]] = []
        """A heap of deadlines, each no later than its lease's own: leases only move away."""
        self._ranks: dict[int, _Rank] = {}
        self._notices = {rank: _Notices() for rank in range(num_ranks)}
        self._welcome: Welcome | None = None
        self._next_ticket = 1

    # -- the engine's own calls --------------------------------------------------------------------

    def offer(
        self,
        now: float,
        request_id: str,
        tables: Mapping[str, BlockTable],
        num_tokens: int,
        digest: bytes = b"",
    ) -> Ticket:
        """Pin a request's blocks and hand out the ticket for them."""
        if request_id in self._by_request:
            raise SpecError(f"request {request_id!r} is offered already")
        if len(self._leases) >= self.MAX_LEASES:
            raise SpecError(f"{self.MAX_LEASES} requests are on offer; withdraw some, or shorten the lease")
        if deaf := [rank for rank, n in self._notices.items() if len(n.unheard) >= self.MAX_UNHEARD]:
            raise SpecError(f"rank {deaf[0]} has left {self.MAX_UNHEARD} notices unheard")
        ticket = Ticket(
            self.engine,
            self.generation,
            self._next_ticket,
            request_id,
            self.address,
            num_tokens,
            tables_to_wire(tables),
            int(self._timing.lease * 1000),
            digest,
        )
        self._next_ticket += 1
        lease = self._leases[ticket.ticket_id] = _Lease(ticket, now + self._timing.lease)
        heappush(self._by_deadline, (lease.deadline, ticket.ticket_id))
        self._by_request[request_id] = ticket.ticket_id
        return sign(ticket, self._key)

    def withdraw(self, now: float, request_id: str) -> list[Send | Released]:
        """Take an offer back: at once if nobody reads it, else when its reader is through."""
        lease = self._leases.get(self._by_request.get(request_id, 0))
        if lease is None:
            return []
        lease.is_withdrawn = True
        return [] if lease.reader else self._end(now, lease, "withdrawn")

    def is_own(self, ticket: Ticket) -> bool:
        """Whether this start of this engine made a ticket, as it is."""
        is_named = (ticket.engine, ticket.generation) == (self.engine, self.generation)
        return is_named and is_proved(ticket, self._key)

    @property
    def num_leases(self) -> int:
        """How many requests are pinned."""
        return len(self._leases)

    @property
    def is_whole(self) -> bool:
        """Whether every rank has joined, so that readers can be welcomed."""
        return self._welcome is not None

    def status(self) -> dict[str, object]:
        """What a person wants to know."""
        read = sum(1 for lease in self._leases.values() if lease.reader)
        return {
            "engine": self.engine,
            "generation": self.generation,
            "ranks": f"{len(self._ranks)}/{self._num_ranks}",
            "offered": len(self._leases) - read,
            "being_read": read,
            "unheard": sum(len(notices.unheard) for notices in self._notices.values()),
        }

    # -- events ------------------------------------------------------------------------------------

    def receive(self, now: float, route: str, message: ToAuthority) -> list[Send | Released]:
        """A message came by ``route``; an answer goes back by it."""
        match message:
            case Hello():
                return [Send(route, self._greet(message))]
            case Acquire():
                return [Send(route, self._acquire(now, message))]
            case Renew():
                return [Send(route, self._renew(now, message))]
            case Settle():
                noted = Send(route, Noted(message.ticket_id, message.reader_rank, message.attempt))
                return [noted, *self._settle(now, message)]
            case Join():
                return self._join(now, route, message)
            case Heard():
                return self._heard(now, message)

    def tick(self, now: float) -> list[Send | Released]:
        """Time has passed: end what is over, repeat what was not heard."""
        effects: list[Send | Released] = []
        while self._by_deadline and self._by_deadline[0][0] <= now:
            _, ticket_id = heappop(self._by_deadline)
            lease = self._leases.get(ticket_id)
            if lease is None:
                continue
            if lease.deadline <= now:
                effects += self._end(now, lease, "expired")
            else:  # renewed since it was queued
                heappush(self._by_deadline, (lease.deadline, ticket_id))
        for rank, notices in self._notices.items():
            if notices.unheard and now >= notices.sent_at + self._timing.retry:
                effects += self._notify(now, rank)
        return effects

    def next_deadline(self) -> float:
        """When ``tick`` has something to do at the latest."""
        deadlines = [self._by_deadline[0][0]] if self._by_deadline else []
        pending = [self._notices[rank] for rank in self._ranks if self._notices[rank].unheard]
        deadlines += [notices.sent_at + self._timing.retry for notices in pending]
        return min(deadlines, default=float("inf"))

    # -- readers -----------------------------------------------------------------------------------

    def _greet(self, hello: Hello) -> Welcome | Sorry:
        if hello.protocol != PROTOCOL:
            return Sorry("protocol", f"this engine speaks {PROTOCOL}, the reader {hello.protocol}")
        if self._welcome is None:
            return Sorry("not-ready", f"{len(self._ranks)} of {self._num_ranks} ranks have joined")
        return self._welcome

    def _acquire(self, now: float, ask: Acquire) -> Grant | Denial:
        def no(code: str, detail: str = "") -> Denial:
            return Denial(ask.nonce, ask.ticket.ticket_id, code, detail)

        ticket = ask.ticket
        if ticket.engine != self.engine or ticket.generation != self.generation:
            return no("restarted", f"this is {self.engine}, generation {self.generation}")
        if not is_proved(ticket, self._key):
            return no("forged", "the ticket is not what this engine handed out")
        lease = self._leases.get(ticket.ticket_id)
        if lease is None:
            return no("ended", "the ticket was read, withdrawn, or its lease is over")
        if lease.deadline <= now:
            return no("ended", "its lease is over")
        if not ask.reader or not 0 <= ask.reader_rank < ask.reader_ranks:
            return no("reader", f"rank {ask.reader_rank} of {ask.reader_ranks} of {ask.reader!r}")
        if lease.reader not in ("", ask.reader):
            return no("taken", "another engine reads it")
        if lease.reader_ranks not in (0, ask.reader_ranks):
            return no("reader", f"{ask.reader_ranks} ranks, but {lease.reader_ranks} before")
        rank, attempt = ask.reader_rank, ask.attempt
        if lease.is_stale(ask.reader, rank, attempt) or lease.is_spent(rank, attempt):
            return no("spent", "this rank is through with it")
        lease.bind(ask)
        self._extend(now, lease)
        return Grant(ask.nonce, ticket.ticket_id, int(self._timing.lease * 1000))

    def _renew(self, now: float, ask: Renew) -> Renewal:
        kept, ended = [], []
        for ticket_id in ask.ticket_ids[:MAX_BATCH]:
            lease = self._read_by(ask.reader, ask.generation, ticket_id)
            if lease is None or lease.deadline <= now:
                ended.append(ticket_id)
            else:
                self._extend(now, lease)
                kept.append(ticket_id)
        return Renewal(ask.nonce, int(self._timing.lease * 1000), tuple(kept), tuple(ended))

    def _read_by(self, reader: str, generation: int, ticket_id: int) -> _Lease | None:
        """The lease that a reader names, if it is that reader's: of this start, and bound to it."""
        lease = self._leases.get(ticket_id) if generation == self.generation else None
        return lease if lease is not None and lease.reader and lease.reader == reader else None

    def _extend(self, now: float, lease: _Lease) -> None:
        lease.deadline = max(lease.deadline, now + self._timing.lease)

    def _settle(self, now: float, message: Settle) -> list[Send | Released]:
        rank, attempt = message.reader_rank, message.attempt
        lease = self._read_by(message.reader, message.generation, message.ticket_id)
        if lease is None or not 0 <= rank < lease.reader_ranks:
            return []
        is_granted = lease.attempts.get(rank, attempt) == attempt
        if not is_granted or lease.is_stale(message.reader, rank, attempt):
            return []  # only the attempt that was granted can settle it; another may be of a forged ticket
        lease.attempts[rank] = attempt
        lease.settled.setdefault(rank, message.outcome)
        if len(lease.settled) < lease.reader_ranks:
            return []
        outcomes = set(lease.settled.values())
        if outcomes != {Outcome.UNREAD}:
            return self._end(now, lease, "read" if outcomes == {Outcome.READ} else "failed")
        if lease.is_withdrawn:
            return self._end(now, lease, "withdrawn")
        lease.leave()
        return []

    # -- this engine's ranks -----------------------------------------------------------------------

    def _join(self, now: float, route: str, join: Join) -> list[Send | Released]:
        is_ours = join.engine == self.engine and 0 <= join.rank < self._num_ranks
        if join.protocol != PROTOCOL or not is_ours:
            ours = f"{self._num_ranks} ranks of {self.engine} that speak protocol {PROTOCOL} belong here"
            return [Send(route, Sorry("join", ours))]
        known = self._ranks.get(join.rank)
        if known is None:
            self._ranks[join.rank] = _Rank(route, join.transport, join.manifest, join.card)
        elif (known.transport, known.manifest, known.card) != (join.transport, join.manifest, join.card):
            return [Send(route, Sorry("join", f"rank {join.rank} joined already, with other memory"))]
        else:
            known.route = route
        if self._welcome is None and len(self._ranks) == self._num_ranks:
            try:
                self._welcome = self._whole()
            except KVFerryError as error:
                del self._ranks[join.rank]
                return [Send(route, Sorry("join", str(error)))]
        return [Send(route, Joined(self.engine, self.generation)), *self._notify(now, join.rank)]

    def _whole(self) -> Welcome:
        transports = {rank.transport for rank in self._ranks.values()}
        if len(transports) > 1:
            raise SpecError(f"ranks with different transports: {sorted(transports)}")
        manifest = self._merge({number: rank.manifest for number, rank in self._ranks.items()})
        cards = {number: rank.card for number, rank in self._ranks.items()}
        return Welcome(PROTOCOL, self.engine, self.generation, transports.pop(), manifest, cards)

    def _heard(self, now: float, heard: Heard) -> list[Send | Released]:
        notices = self._notices.get(heard.rank)
        if notices is None or heard.generation != self.generation:
            return []
        number = min(heard.number, notices.last_sent)  # nobody has heard what was not said
        if number < notices.first:
            return []  # a copy: the answer to it is under way
        while notices.first <= number:
            notices.unheard.popleft()
            notices.first += 1
        return self._notify(now, heard.rank)

    # -- the end of a lease ------------------------------------------------------------------------

    def _end(self, now: float, lease: _Lease, reason: str) -> list[Send | Released]:
        """One release: to the engine, and to every rank, read from or not."""
        request_id = lease.ticket.request_id
        del self._leases[lease.ticket.ticket_id]
        del self._by_request[request_id]
        effects: list[Send | Released] = [Released(request_id, reason)]
        for rank, notices in self._notices.items():
            notices.unheard.append((request_id, reason))
            if len(notices.unheard) == 1:  # else the next notice goes when this one was heard
                effects += self._notify(now, rank)
        return effects

    def _notify(self, now: float, rank: int) -> list[Send | Released]:
        """Everything that a rank has not yet heard, in one message; once it has joined."""
        notices = self._notices[rank]
        if not notices.unheard or rank not in self._ranks:
            return []
        batch = tuple(islice(notices.unheard, MAX_BATCH))
        notices.sent_at = now
        notices.last_sent = max(notices.last_sent, notices.first + len(batch) - 1)
        return [Send(self._ranks[rank].route, Ended(self.generation, notices.first, batch))]
