"""One rank of a destination engine: meets peers, leases tickets, posts reads, settles.

The life of a fetch::

    LEASING ──▶ MEETING ──▶ SELECTING ──▶ READING ──▶ COVERING ──▶ reported, once
       └──────────┴───────────┴─────────────┴────────────┴──▶ failed: reported when nothing is in flight

* A lease is asked for at once, and kept alive from then on, also while the peer is still being met.
* A read counts only if a lease provably covered it: the grant lasts from the moment of asking, by our clock.
* Nothing is reported before the transport has reported the end of every posted read. A read that does not end
  in time is *quarantined*: counted and shown, its blocks kept; never reported as done.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count

from kvferry.core.select import Selection
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


class Phase(StrEnum):
    """Where a fetch is."""

    LEASING = "leasing"
    MEETING = "meeting"
    SELECTING = "selecting"
    READING = "reading"
    COVERING = "covering"
    """All bytes are in; waiting for the answer that proves the lease covered them."""
    FAILING = "failing"
    """Failed or aborted; waiting for posted reads to end."""
    QUARANTINED = "quarantined"


_LEASED = (Phase.MEETING, Phase.SELECTING, Phase.READING, Phase.COVERING)
"""Phases in which a lease is held and wanted."""


@dataclass(slots=True)
class _Job:
    """A fetch under way."""

    handle: int
    fetch: Fetch
    peer: Peer
    started: float
    phase: Phase = Phase.LEASING
    covered_until: float = float("-inf")
    """The lease provably lasts until then."""
    asked_at: float = float("-inf")
    """When the last acquire or renewal that may still be answered was sent."""
    in_flight: set[int] = field(default_factory=set)
    has_posted: bool = False
    failure: Failure | None = None
    met_at: float = 0.0
    posted_at: float = 0.0
    ended_at: float = 0.0
    num_bytes: int = 0
    num_runs: int = 0
    num_sources: int = 0


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
class _Settling:
    """A settle message that was not noted yet."""

    to: str
    message: Settle
    until: float
    sent_at: float


class Reader:
    """The fetches of one destination rank. Call it with events and ``now``; carry out what it returns."""

    MAX_PEERS = 1024

    def __init__(self, reader: str, rank: int, num_ranks: int, timing: Timing | None = None) -> None:
        self.reader, self.rank, self.num_ranks = reader, rank, num_ranks
        self._timing = timing or Timing()
        self._jobs: dict[int, _Job] = {}
        self._by_ticket: dict[tuple[str, int], int] = {}
        self._transfers: dict[int, int] = {}
        self._peers: dict[Peer, _Met] = {}
        self._asks: dict[int, tuple[float, tuple[int, ...]]] = {}
        """Nonce of an acquire or renewal → when it was sent, and for which handles."""
        self._settling: dict[tuple[str, int], _Settling] = {}
        self._numbers = count(1)

    # -- what the engine asks for ------------------------------------------------------------------

    def fetch(self, now: float, handle: int, fetch: Fetch) -> list[Effect]:
        """Start a fetch under a handle of the caller's; its one report comes later."""
        ticket = fetch.ticket
        peer = Peer(ticket.engine, ticket.generation, ticket.authority)
        job = _Job(handle, fetch, peer, started=now)
        key = (ticket.authority, ticket.ticket_id)
        self._jobs[handle] = job
        if key in self._by_ticket:
            return self._fail(now, job, Failure("spent", "this ticket is being read already"))
        self._by_ticket[key] = handle
        if peer not in self._peers and len(self._peers) >= self.MAX_PEERS:
            return self._fail(now, job, Failure("too-many-peers", f"{self.MAX_PEERS} engines are known"))
        return [*self._ask(now, job), *self._meet(now, peer)]

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
                return self._granted(now, message.nonce, message.lease_ms)
            case Denial():
                failure = Failure(message.code, message.detail)
                return [e for job in self._answered(message.nonce) for e in self._fail(now, job, failure)]
            case Renewal():
                return self._renewed(now, message)
            case Noted():
                self._settling.pop((route, message.ticket_id), None)
                return []
            case _:
                return []

    # -- what the edge did -------------------------------------------------------------------------

    def built(self, now: float, peer: Peer) -> list[Effect]:
        """The peer is planned, proved, lowered and connected."""
        met = self._peers.get(peer)
        if met is None:
            return [Drop(peer)]
        met.is_built, met.is_building = True, False
        return [e for job in self._jobs_of(peer) for e in self._advance(now, job)]

    def not_built(self, now: float, peer: Peer, failure: Failure) -> list[Effect]:
        """The peer cannot be served: everybody who waits for it is told."""
        return self._lose(now, peer, failure)

    def selected(self, now: float, handle: int, selection: Selection) -> list[Effect]:
        """The runs of a fetch are known: post them."""
        job = self._jobs.get(handle)
        if job is None or job.phase is not Phase.SELECTING:
            return []
        job.phase, job.posted_at = Phase.READING, now
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
        job = self._jobs.get(self._transfers.pop(transfer, 0))
        if job is None:
            return []
        job.in_flight.discard(transfer)
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
            if not met.is_built and now >= met.since + self._timing.meet:
                failure = Failure("no-answer", f"{peer.engine} was not met within {self._timing.meet:g} s")
                effects += self._lose(now, peer, failure)
            elif not met.is_built and not met.is_building and now >= met.hello_at + self._timing.retry:
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
        self._asks = {n: ask for n, ask in self._asks.items() if now < ask[0] + self._timing.lease}
        return effects

    def next_deadline(self) -> float:
        """When ``tick`` should be called again at the latest."""
        is_idle = not (self._jobs or self._settling)
        return float("inf") if is_idle else self._timing.retry

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
        if met.is_broken and not self._is_used(peer):
            # A read from it failed: meet it anew, from scratch.
            self._peers[peer] = _Met(peer, since=now)
            return [Drop(peer), *self._hello(now, self._peers[peer])]
        return []

    def _is_used(self, peer: Peer) -> bool:
        return any(job.in_flight for job in self._jobs_of(peer))

    def _hello(self, now: float, met: _Met) -> list[Effect]:
        met.hello_at = now
        return [Send(met.peer.authority, Hello(PROTOCOL, self.reader))]

    def _welcomed(self, now: float, route: str, welcome: Welcome) -> list[Effect]:
        effects: list[Effect] = []
        for peer, met in list(self._peers.items()):
            if peer.authority != route or met.is_built or met.is_building:
                continue
            if (welcome.engine, welcome.generation) != (peer.engine, peer.generation):
                detail = f"{route} is now {welcome.engine}, generation {welcome.generation}"
                effects += self._lose(now, peer, Failure("restarted", detail))
            else:
                met.is_building = True
                effects.append(Build(peer, welcome.manifest, welcome.cards, welcome.transport))
        return effects

    def _turned_away(self, now: float, route: str, sorry: Sorry) -> list[Effect]:
        if sorry.code == "not-ready":
            return []  # the hello is repeated until the deadline of the meeting
        waiting = [p for p, met in self._peers.items() if p.authority == route and not met.is_built]
        failure = Failure(sorry.code, sorry.detail)
        return [effect for peer in waiting for effect in self._lose(now, peer, failure)]

    def _lose(self, now: float, peer: Peer, failure: Failure) -> list[Effect]:
        """Forget a peer whole, and tell everybody who waited for it."""
        self._peers.pop(peer, None)
        failing = [job for job in self._jobs_of(peer) if not job.has_posted]
        return [Drop(peer), *(effect for job in failing for effect in self._fail(now, job, failure))]

    def _jobs_of(self, peer: Peer) -> list[_Job]:
        return [job for job in self._jobs.values() if job.peer == peer]

    # -- leases ------------------------------------------------------------------------------------

    def _ask(self, now: float, job: _Job) -> list[Effect]:
        nonce = next(self._numbers)
        self._asks[nonce] = (now, (job.handle,))
        job.asked_at = now
        ticket = job.fetch.ticket
        return [
            Send(ticket.authority, Acquire(nonce, ticket, self.reader, self.rank, self.num_ranks)),
        ]

    def _answered(self, nonce: int) -> Iterable[_Job]:
        _, handles = self._asks.pop(nonce, (0.0, ()))
        return [self._jobs[handle] for handle in handles if handle in self._jobs]

    def _granted(self, now: float, nonce: int, lease_ms: int) -> list[Effect]:
        asked_at = self._asks[nonce][0] if nonce in self._asks else float("-inf")
        effects: list[Effect] = []
        for job in self._answered(nonce):
            job.covered_until = max(job.covered_until, asked_at + lease_ms / 1000)
            effects += self._advance(now, job)
        return effects

    def _renewals(self, now: float) -> list[Effect]:
        """One renewal per authority for every lease that is a third gone."""
        unanswered: list[_Job] = []
        due: dict[str, list[_Job]] = defaultdict(list)
        for job in self._jobs.values():
            if job.phase is Phase.LEASING and now >= job.asked_at + self._timing.retry:
                unanswered.append(job)
            elif job.phase in _LEASED and now >= job.asked_at + job.fetch.ticket.lease_ms / 3000:
                due[job.peer.authority].append(job)
        effects = [effect for job in unanswered for effect in self._ask(now, job)]
        for authority, jobs in due.items():
            for at in range(0, len(jobs), MAX_BATCH):
                effects.append(self._renew(now, authority, jobs[at : at + MAX_BATCH]))
        return effects

    def _renew(self, now: float, authority: str, jobs: list[_Job]) -> Send:
        nonce = next(self._numbers)
        self._asks[nonce] = (now, tuple(job.handle for job in jobs))
        for job in jobs:
            job.asked_at = now
        return Send(authority, Renew(nonce, self.reader, tuple(j.fetch.ticket.ticket_id for j in jobs)))

    def _renewed(self, now: float, renewal: Renewal) -> list[Effect]:
        asked_at = self._asks[renewal.nonce][0] if renewal.nonce in self._asks else float("-inf")
        effects: list[Effect] = []
        kept = frozenset(renewal.kept)
        for job in self._answered(renewal.nonce):
            if job.fetch.ticket.ticket_id in kept:
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
            job.phase, job.met_at = Phase.SELECTING, now
            return [Select(job.handle, job.peer, job.fetch)]
        if job.phase is Phase.READING and not job.in_flight:
            job.phase, job.ended_at = Phase.COVERING, now
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

    def _overdue(self, now: float, job: _Job) -> list[Effect]:
        if job.phase is Phase.LEASING and now >= job.started + self._timing.meet:
            return self._fail(now, job, Failure("no-answer", "no lease was granted in time"))
        is_late = job.in_flight and now >= job.posted_at + self._timing.read
        if is_late and job.phase in (Phase.READING, Phase.FAILING):
            detail = f"{len(job.in_flight)} reads did not end within {self._timing.read:g} s"
            job.failure = job.failure or Failure("overdue", detail)
            job.phase = Phase.QUARANTINED
        if job.phase is Phase.COVERING and now >= job.ended_at + job.fetch.ticket.lease_ms / 1000:
            return self._fail(now, job, Failure("lease-lapsed", "no lease provably covered the read"))
        return []

    def _report(self, now: float, job: _Job, outcome: Outcome) -> list[Effect]:
        """The one report; and the authority is told, until it notes it."""
        ticket = job.fetch.ticket
        del self._jobs[job.handle]
        key = (ticket.authority, ticket.ticket_id)
        effects: list[Effect] = []
        if self._by_ticket.get(key) == job.handle:
            del self._by_ticket[key]
            settle = Settle(ticket.ticket_id, self.reader, self.rank, outcome)
            until = now + ticket.lease_ms / 1000
            self._settling[key] = _Settling(ticket.authority, settle, until, sent_at=now)
            effects.append(Send(ticket.authority, settle))
        record = Record(
            request_id=ticket.request_id,
            engine=ticket.engine,
            num_bytes=job.num_bytes,
            num_runs=job.num_runs,
            num_sources=job.num_sources,
            meet_seconds=max(0.0, job.met_at - job.started),
            move_seconds=max(0.0, job.ended_at - job.posted_at) if job.posted_at else 0.0,
            total_seconds=now - job.started,
            outcome=str(job.failure or outcome.value),
        )
        return [*effects, Report(job.handle, job.failure, record)]
