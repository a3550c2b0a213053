"""One rank of a destination engine: meets peers, leases tickets, posts reads, settles.

The life of a fetch::

    LEASING ──▶ MEETING ──▶ SELECTING ──▶ READING ──▶ COVERING ──▶ reported, once
       └──────────┴───────────┴─────────────┴────────────┴──▶ failed: reported when nothing is in flight

* A lease is asked for at once, and kept alive from then on, also while the peer is still being met. A ticket
  whose blocks are not known yet can be *held* until they are: HOLDING comes before SELECTING then.
* A read counts only if a lease provably covered it: the grant lasts from the moment of asking, by our clock.
* Nothing is reported before the transport has reported the end of every posted read. A read that does not end
  in time is *quarantined*: counted and shown, its blocks kept; never reported as done.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count

from kvferry.core.select import Selection
from kvferry.errors import SpecError
from kvferry.runtime.values import (
    Build,
    Clear,
    Drop,
    Effect,
    Failure,
    Fetch,
    Peer,
    Post,
    Record,
    Report,
    Select,
    Send,
    Timing,
)
from kvferry.wire.messages import (
    MAX_BATCH,
    PROTOCOL,
    Acquire,
    Denial,
    FromAuthority,
    Grant,
    Hello,
    Noted,
    Outcome,
    Renew,
    Renewal,
    Settle,
    Sorry,
    Welcome,
)
from kvferry.wire.ticket import Ticket


class Phase(StrEnum):
    """Where a fetch is."""

    LEASING = "leasing"
    MEETING = "meeting"
    HOLDING = "holding"
    """Leased and met, and not yet told where the bytes go."""
    SELECTING = "selecting"
    READING = "reading"
    COVERING = "covering"
    """All bytes are in; waiting for the answer that proves the lease covered them."""
    FAILING = "failing"
    """Failed or aborted; waiting for posted reads to end."""
    QUARANTINED = "quarantined"


_LEASED = (Phase.MEETING, Phase.HOLDING, Phase.SELECTING, Phase.READING, Phase.COVERING)
"""Phases in which a lease is held and wanted."""


@dataclass(slots=True)
class _Job:
    """A fetch under way."""

    handle: int
    ticket: Ticket
    fetch: Fetch | None
    """None while the ticket is only held."""
    peer: Peer
    attempt: int
    """Which fetch of this rank: what it says late must not count for a later fetch of the same ticket."""
    started: float
    met_at: float
    posted_at: float
    ended_at: float
    phase: Phase = Phase.LEASING
    covered_until: float = float("-inf")
    """The lease provably lasts until then."""
    asked_at: float = float("-inf")
    """When the last acquire or renewal was sent."""
    is_asking: bool = False
    """Whether that was not answered yet."""
    in_flight: set[int] = field(default_factory=set)
    has_posted: bool = False
    is_denied: bool = False
    """The authority refused it and holds nothing for it: there is nothing to settle."""
    failure: Failure | None = None
    plan_seconds: float = 0.0
    num_bytes: int = 0
    num_runs: int = 0
    num_sources: int = 0

    @property
    def lease_seconds(self) -> float:
        return self.ticket.lease_ms / 1000

    @property
    def key(self) -> tuple[Peer, int]:
        return self.peer, self.ticket.ticket_id


@dataclass(slots=True)
class _Met:
    """What is known of a peer: a meeting under way, or a peer built whole."""

    peer: Peer
    since: float
    is_built: bool = False
    is_building: bool = False
    is_broken: bool = False
    hello_at: float = float("-inf")


@dataclass(slots=True)
class _Ask:
    """An acquire or a renewal that may still be answered."""

    at: float
    authority: str
    jobs: tuple[_Job, ...]


@dataclass(slots=True)
class _Settling:
    """A settle message that was not noted yet."""

    to: str
    message: Settle
    until: float
    sent_at: float


class Reader:
    """The fetches of one destination rank. Call it with events and ``now``; carry out what it returns.

    ``reader`` names one *start* of the destination engine, the same on all its ranks and another one after
    a restart: what an earlier start still has under way must not count for this one.
    """

    MAX_PEERS = 1024

    def __init__(self, reader: str, rank: int, num_ranks: int, timing: Timing | None = None) -> None:
        if not reader or not 0 <= rank < num_ranks:
            raise SpecError(f"a reader has a name and a rank, got {reader!r}, rank {rank} of {num_ranks}")
        self.reader, self.rank, self.num_ranks = reader, rank, num_ranks
        self._timing = timing or Timing()
        self._jobs: dict[int, _Job] = {}
        self._by_ticket: dict[tuple[Peer, int], int] = {}
        self._transfers: dict[int, int] = {}
        self._peers: dict[Peer, _Met] = {}
        self._asks: dict[int, _Ask] = {}
        """By nonce, the oldest first."""
        self._settling: dict[int, _Settling] = {}
        """By attempt."""
        self._numbers = count(1)

    # -- what the engine asks for ------------------------------------------------------------------

    def fetch(self, now: float, handle: int, fetch: Fetch) -> list[Effect]:
        """Start a fetch under a handle of the caller's; its one report comes later."""
        return self._start(now, handle, fetch.ticket, fetch)

    def hold(self, now: float, handle: int, ticket: Ticket) -> list[Effect]:
        """Lease a ticket and meet its engine, before it is known where the bytes go.

        The handle's one report comes after ``supply`` or ``abort``, or when the lease is lost.
        """
        return self._start(now, handle, ticket, None)

    def supply(self, now: float, handle: int, fetch: Fetch) -> list[Effect]:
        """Fetch what is held. If it failed meanwhile, its report is under way, and nothing is started."""
        job = self._jobs.get(handle)
        if job is None or job.fetch is not None or job.phase is Phase.FAILING:
            return []
        if fetch.ticket != job.ticket:
            return self._fail(now, job, Failure("ticket", "another ticket was held under this handle"))
        job.fetch, job.started, job.met_at = fetch, now, now
        if job.phase is Phase.HOLDING:
            job.phase = Phase.MEETING
        return [*self._meet(now, job.peer), *self._advance(now, job)]

    def _start(self, now: float, handle: int, ticket: Ticket, fetch: Fetch | None) -> list[Effect]:
        if handle in self._jobs:
            raise SpecError(f"a fetch with the handle {handle} is under way")
        peer = Peer(ticket.engine, ticket.generation, ticket.authority)
        attempt = next(self._numbers)
        job = _Job(handle, ticket, fetch, peer, attempt, started=now, met_at=now, posted_at=now, ended_at=now)
        self._jobs[handle] = job
        if job.key in self._by_ticket:
            return self._fail(now, job, Failure("spent", "this ticket is being read already"))
        self._by_ticket[job.key] = handle
        room = self._make_room(peer)
        if peer not in self._peers and len(self._peers) >= self.MAX_PEERS:
            return self._fail(now, job, Failure("too-many-peers", f"{self.MAX_PEERS} engines are in use"))
        return [*room, *self._ask(now, job), *self._meet(now, peer)]

    def abort(self, now: float, handle: int) -> list[Effect]:
        """Give a fetch up. It is reported as aborted once nothing of it is in flight."""
        job = self._jobs.get(handle)
        return [] if job is None else self._fail(now, job, Failure("aborted"))

    # -- what the authority answers ----------------------------------------------------------------

    def receive(self, now: float, route: str, message: FromAuthority) -> list[Effect]:
        """A message from the authority at ``route``."""
        match message:
            case Welcome():
                return self._welcomed(now, route, message)
            case Sorry():
                return self._turned_away(now, route, message)
            case Grant():
                return self._granted(now, route, message)
            case Denial():
                return self._denied(now, route, message)
            case Renewal():
                return self._renewed(now, route, message)
            case Noted():
                return self._noted(route, message)
            case _:
                return []

    # -- what the edge did -------------------------------------------------------------------------

    def built(self, now: float, peer: Peer, plan_seconds: float = 0.0) -> list[Effect]:
        """The peer is planned, proved and lowered, which took so long; and connected."""
        met = self._peers.get(peer)
        if met is None:
            return [Drop(peer)]
        met.is_built, met.is_building = True, False
        for job in self._jobs_of(peer):
            job.plan_seconds = plan_seconds
        return [e for job in self._jobs_of(peer) for e in self._advance(now, job)]

    def not_built(self, now: float, peer: Peer, failure: Failure) -> list[Effect]:
        """The peer cannot be served: everybody who waits for it is told."""
        return self._lose(now, peer, failure)

    def selected(self, now: float, handle: int, selection: Selection) -> list[Effect]:
        """The runs of a fetch are known: post them."""
        job = self._jobs.get(handle)
        if job is None or job.phase is not Phase.SELECTING:
            return []
        if job.covered_until <= now:
            return self._fail(now, job, Failure("lease-lapsed", "the source did not renew it in time"))
        job.phase, job.posted_at, job.ended_at = Phase.READING, now, now
        job.num_bytes, job.num_runs = selection.total_bytes, selection.num_runs
        job.num_sources = len(selection.reads)
        effects: list[Effect] = [Clear(handle, selection)] if len(selection.zeros) else []
        for src_rank, runs in selection.reads.items():
            transfer = next(self._numbers)
            job.in_flight.add(transfer)
            job.has_posted = True
            self._transfers[transfer] = handle
            effects.append(Post(transfer, job.peer, src_rank, runs))
        return [*effects, *self._advance(now, job)]

    def not_selected(self, now: float, handle: int, failure: Failure) -> list[Effect]:
        """The request does not fit: it fails alone."""
        job = self._jobs.get(handle)
        return [] if job is None else self._fail(now, job, failure)

    def ended(self, now: float, transfer: int, error: str) -> list[Effect]:
        """The transport reports the end of a read."""
        if transfer not in self._transfers:
            return []
        job = self._jobs[self._transfers.pop(transfer)]
        job.in_flight.discard(transfer)
        job.ended_at = now
        effects: list[Effect] = []
        if error:
            if met := self._peers.get(job.peer):
                met.is_broken = True
            effects += self._fail(now, job, Failure("transport", error))
        if job.handle in self._jobs:
            effects += self._advance(now, job)
        return effects

    # -- time --------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Effect]:
        """Time has passed: renew, repeat, give up, quarantine."""
        effects: list[Effect] = []
        for peer, met in list(self._peers.items()):
            if met.is_built or met.is_building:
                continue  # a build that takes too long fails its fetches, and still serves later ones
            if now >= met.since + self._timing.meet:
                effects += self._lose(now, peer, self._not_met(peer))
            elif now >= met.hello_at + self._timing.retry:
                effects += self._hello(now, met)
        effects += self._renewals(now)
        for job in list(self._jobs.values()):
            effects += self._overdue(now, job)
        for key, settling in list(self._settling.items()):
            if now >= settling.until:
                del self._settling[key]
            elif now >= settling.sent_at + self._timing.retry:
                settling.sent_at = now
                effects.append(Send(settling.to, settling.message))
        while self._asks and now >= self._oldest_ask().at + self._timing.lease:
            del self._asks[next(iter(self._asks))]
        return effects

    def next_deadline(self) -> float:
        """When ``tick`` has something to do at the latest."""
        retry, meet = self._timing.retry, self._timing.meet
        unmet = [met for met in self._peers.values() if not (met.is_built or met.is_building)]
        deadlines = [min(met.since + meet, met.hello_at + retry) for met in unmet]
        deadlines += [min(self._ask_at(job), self._give_up_at(job)) for job in self._jobs.values()]
        deadlines += [min(s.until, s.sent_at + retry) for s in self._settling.values()]
        deadlines += [self._oldest_ask().at + self._timing.lease] if self._asks else []
        return min(deadlines, default=float("inf"))

    def _oldest_ask(self) -> _Ask:
        return next(iter(self._asks.values()))

    def status(self) -> dict[str, object]:
        """What a person wants to know."""
        phases: dict[str, int] = defaultdict(int)
        for job in self._jobs.values():
            phases[job.phase.value] += 1
        return {
            "reader": self.reader,
            "rank": self.rank,
            "peers": [f"{p.engine}#{p.generation}" for p, met in self._peers.items() if met.is_built],
            "fetches": dict(phases),
            "in_flight": len(self._transfers),
            "settling": len(self._settling),
        }

    @property
    def num_in_flight(self) -> int:
        """Posted reads whose end was not reported yet."""
        return len(self._transfers)

    @property
    def num_quarantined(self) -> int:
        return sum(1 for job in self._jobs.values() if job.phase is Phase.QUARANTINED)

    # -- meeting -----------------------------------------------------------------------------------

    def _meet(self, now: float, peer: Peer) -> list[Effect]:
        met = self._peers.get(peer)
        if met is None:
            met = self._peers[peer] = _Met(peer, since=now)
            return self._hello(now, met)
        self._peers[peer] = self._peers.pop(peer)  # the last used come last
        if met.is_broken and not self._is_used(peer):
            # A read from it failed: meet it anew, from scratch.
            self._peers[peer] = _Met(peer, since=now)
            return [Drop(peer), *self._hello(now, self._peers[peer])]
        return []

    def _is_used(self, peer: Peer) -> bool:
        """Whether something needs the peer as it is. A quarantined read does not: it would forever."""
        return any(
            job.phase is Phase.SELECTING or (job.in_flight and job.phase is not Phase.QUARANTINED)
            for job in self._jobs_of(peer)
        )

    def _make_room(self, peer: Peer) -> list[Effect]:
        """Forget the peer that was not used for the longest time, if there are too many for another."""
        if peer in self._peers or len(self._peers) < self.MAX_PEERS:
            return []
        busy = {job.peer for job in self._jobs.values()}
        idle = (p for p, met in self._peers.items() if p not in busy and not met.is_building)
        oldest = next(idle, None)
        if oldest is None:
            return []
        del self._peers[oldest]
        return [Drop(oldest)]

    def _hello(self, now: float, met: _Met) -> list[Effect]:
        met.hello_at = now
        return [Send(met.peer.authority, Hello(PROTOCOL, self.reader))]

    def _welcomed(self, now: float, route: str, welcome: Welcome) -> list[Effect]:
        effects: list[Effect] = []
        for peer, met in list(self._peers.items()):
            if peer.authority != route or met.is_built or met.is_building:
                continue
            if welcome.protocol != PROTOCOL:
                detail = f"this reader speaks {PROTOCOL}, the engine {welcome.protocol}"
                effects += self._lose(now, peer, Failure("protocol", detail))
            elif (welcome.engine, welcome.generation) != (peer.engine, peer.generation):
                detail = f"{route} is now {welcome.engine}, generation {welcome.generation}"
                effects += self._lose(now, peer, Failure("restarted", detail))
            else:
                met.is_building = True
                effects.append(Build(peer, welcome.manifest, welcome.cards, welcome.transport))
        return effects

    def _turned_away(self, now: float, route: str, sorry: Sorry) -> list[Effect]:
        if sorry.code == "not-ready":
            return []  # the hello is repeated until the deadline of the meeting
        failure = Failure(sorry.code, sorry.detail)
        waiting = [met for met in self._peers.values() if not (met.is_built or met.is_building)]
        losing = [met.peer for met in waiting if met.peer.authority == route]
        return [effect for peer in losing for effect in self._lose(now, peer, failure)]

    def _not_met(self, peer: Peer) -> Failure:
        return Failure("no-answer", f"{peer.engine} was not met within {self._timing.meet:g} s")

    def _lose(self, now: float, peer: Peer, failure: Failure) -> list[Effect]:
        """Forget a peer whole, and tell everybody who waited for it."""
        self._peers.pop(peer, None)
        failing = [job for job in self._jobs_of(peer) if not job.has_posted]
        return [Drop(peer), *(effect for job in failing for effect in self._fail(now, job, failure))]

    def _jobs_of(self, peer: Peer) -> list[_Job]:
        return [job for job in self._jobs.values() if job.peer == peer]

    # -- leases ------------------------------------------------------------------------------------

    def _ask(self, now: float, job: _Job) -> list[Effect]:
        nonce = self._nonce(now, job.peer, [job])
        ask = Acquire(nonce, job.ticket, self.reader, self.rank, self.num_ranks, job.attempt)
        return [Send(job.peer.authority, ask)]

    def _nonce(self, now: float, peer: Peer, jobs: list[_Job]) -> int:
        """The number of an ask for these fetches, under which its answer comes."""
        nonce = next(self._numbers)
        self._asks[nonce] = _Ask(now, peer.authority, tuple(jobs))
        for job in jobs:
            job.asked_at, job.is_asking = now, True
        return nonce

    def _answered(self, route: str, nonce: int) -> tuple[float, list[_Job]]:
        """When was asked what this answers, and for which fetches; only who was asked can answer."""
        ask = self._asks.get(nonce)
        if ask is None or ask.authority != route:
            return float("-inf"), []
        del self._asks[nonce]
        jobs = [job for job in ask.jobs if self._jobs.get(job.handle) is job]
        for job in jobs:
            job.is_asking = False
        return ask.at, jobs

    def _granted(self, now: float, route: str, grant: Grant) -> list[Effect]:
        asked_at, jobs = self._answered(route, grant.nonce)
        effects: list[Effect] = []
        for job in jobs:
            if job.ticket.ticket_id == grant.ticket_id:
                job.covered_until = max(job.covered_until, asked_at + grant.lease_ms / 1000)
                effects += self._advance(now, job)
        return effects

    def _denied(self, now: float, route: str, denial: Denial) -> list[Effect]:
        failure = Failure(denial.code, denial.detail)
        effects: list[Effect] = []
        for job in self._answered(route, denial.nonce)[1]:
            job.is_denied = job.covered_until == float("-inf")
            effects += self._fail(now, job, failure)
            met = self._peers.get(job.peer)
            if denial.code == "restarted" and met is not None and not met.is_building:
                effects += self._lose(now, job.peer, failure)  # that start of the engine is gone for good
        return effects

    def _renewals(self, now: float) -> list[Effect]:
        """One renewal per peer for every lease that is a third gone."""
        effects: list[Effect] = []
        due: dict[Peer, list[_Job]] = defaultdict(list)
        for job in self._jobs.values():
            if now < self._ask_at(job):
                continue
            if job.phase is Phase.LEASING:
                effects += self._ask(now, job)
            else:
                due[job.peer].append(job)
        for peer, jobs in due.items():
            for at in range(0, len(jobs), MAX_BATCH):
                effects.append(self._renew(now, peer, jobs[at : at + MAX_BATCH]))
        return effects

    def _ask_at(self, job: _Job) -> float:
        """When the authority is to be asked again: soon, if it has not answered; a message may be lost."""
        if job.phase is Phase.LEASING:
            return job.asked_at + self._timing.retry
        if job.phase not in _LEASED:
            return float("inf")
        third = job.lease_seconds / 3
        return job.asked_at + (min(third, self._timing.retry) if job.is_asking else third)

    def _renew(self, now: float, peer: Peer, jobs: list[_Job]) -> Send:
        nonce = self._nonce(now, peer, jobs)
        ticket_ids = tuple(job.ticket.ticket_id for job in jobs)
        return Send(peer.authority, Renew(nonce, peer.generation, self.reader, ticket_ids))

    def _renewed(self, now: float, route: str, renewal: Renewal) -> list[Effect]:
        asked_at, jobs = self._answered(route, renewal.nonce)
        effects: list[Effect] = []
        kept = frozenset(renewal.kept)
        for job in jobs:
            if job.ticket.ticket_id in kept:
                job.covered_until = max(job.covered_until, asked_at + renewal.lease_ms / 1000)
                effects += self._advance(now, job)
            else:
                effects += self._fail(now, job, Failure("lease-ended", "the source did not renew it"))
        return effects

    # -- one step on, or the end -------------------------------------------------------------------

    def _advance(self, now: float, job: _Job) -> list[Effect]:
        """Take every step that is possible now."""
        if job.phase is Phase.LEASING and job.covered_until > now:
            job.phase = Phase.MEETING
        met = self._peers.get(job.peer)
        if job.phase is Phase.MEETING and met is not None and met.is_built:
            job.met_at = now
            if job.fetch is None:
                job.phase = Phase.HOLDING
            else:
                job.phase = Phase.SELECTING
                return [Select(job.handle, job.peer, job.fetch)]
        if job.phase is Phase.READING and not job.in_flight:
            job.phase = Phase.COVERING
        if job.phase is Phase.COVERING and job.covered_until > job.ended_at:
            return self._report(now, job, Outcome.READ)
        if job.phase in (Phase.FAILING, Phase.QUARANTINED) and not job.in_flight:
            return self._report(now, job, Outcome.FAILED if job.has_posted else Outcome.UNREAD)
        return []

    def _fail(self, now: float, job: _Job, failure: Failure) -> list[Effect]:
        """Remember the first reason; report it when nothing is in flight."""
        job.failure = job.failure or failure
        if job.phase is not Phase.QUARANTINED:
            job.phase = Phase.FAILING
        return self._advance(now, job)

    def _give_up_at(self, job: _Job) -> float:
        """Every wait has a deadline."""
        match job.phase:
            case Phase.LEASING | Phase.MEETING:
                return job.started + self._timing.meet
            case Phase.SELECTING:
                return job.met_at + self._timing.meet
            case Phase.READING | Phase.FAILING:
                return job.posted_at + self._timing.read
            case Phase.COVERING:
                return job.ended_at + self._patience(job)
            case Phase.HOLDING | Phase.QUARANTINED:
                return float(
                    "inf"
                )  # the engine decides how long a request waits; the lease is kept meanwhile

    def _patience(self, job: _Job) -> float:
        """How long the authority is asked or told something: a lease, but not whatever a ticket says."""
        return min(job.lease_seconds, self._timing.read)

    def _overdue(self, now: float, job: _Job) -> list[Effect]:
        if now < self._give_up_at(job):
            return []
        match job.phase:
            case Phase.LEASING:
                return self._fail(now, job, Failure("no-answer", "no lease was granted in time"))
            case Phase.MEETING:
                return self._fail(now, job, self._not_met(job.peer))
            case Phase.SELECTING:
                return self._fail(now, job, Failure("overdue", "its runs were not selected in time"))
            case Phase.COVERING:
                return self._fail(now, job, Failure("lease-lapsed", "no lease provably covered the read"))
            case _:
                detail = f"{len(job.in_flight)} reads did not end within {self._timing.read:g} s"
                job.failure = job.failure or Failure("overdue", detail)
                job.phase = Phase.QUARANTINED
                return []

    def _report(self, now: float, job: _Job, outcome: Outcome) -> list[Effect]:
        """The one report; and the authority is told, until it notes it."""
        del self._jobs[job.handle]
        effects: list[Effect] = []
        if self._by_ticket.get(job.key) == job.handle:
            del self._by_ticket[job.key]
            effects += [] if job.is_denied else self._settle(now, job, outcome)
        record = Record(
            request_id=job.ticket.request_id,
            engine=job.peer.engine,
            num_bytes=job.num_bytes,
            num_runs=job.num_runs,
            num_sources=job.num_sources,
            meet_seconds=job.met_at - job.started,
            plan_seconds=job.plan_seconds,
            post_seconds=job.posted_at - job.met_at if job.has_posted else 0.0,
            move_seconds=job.ended_at - job.posted_at,
            total_seconds=now - job.started,
            outcome=str(job.failure or outcome.value),
        )
        return [*effects, Report(job.handle, job.failure, record)]

    def _settle(self, now: float, job: _Job, outcome: Outcome) -> list[Effect]:
        ticket_id, to = job.ticket.ticket_id, job.peer.authority
        settle = Settle(job.peer.generation, ticket_id, self.reader, self.rank, job.attempt, outcome)
        self._settling[job.attempt] = _Settling(to, settle, now + self._patience(job), sent_at=now)
        return [Send(to, settle)]

    def _noted(self, route: str, noted: Noted) -> list[Effect]:
        settling = self._settling.get(noted.attempt)
        if settling is not None and settling.to == route:
            del self._settling[noted.attempt]
        return []
