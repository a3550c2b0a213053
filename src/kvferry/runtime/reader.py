"""One rank of a destination engine: meets peers, leases tickets, posts reads, settles.

Events that concern several parts have a method here; others go to the part itself: ends and digests to
``fetches``, found ranks to ``meetings``, the state of connections to ``connections``.

* A lease is requested at once and kept alive from then on, also during the first contact.
* Names can be guessed, so a token, unique per ticket, identifies a rank to the authority.
"""

from __future__ import annotations

import hmac
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import count, islice

from kvferry.core.select import Selection
from kvferry.core.span import Spans, normal
from kvferry.errors import SpecError
from kvferry.runtime.active_fetches import ActiveFetches
from kvferry.runtime.connections import Connections
from kvferry.runtime.failure import Failure, FailureCode, denied
from kvferry.runtime.fetch_job import AcquireQueue, FetchJob, Phase
from kvferry.runtime.figures import Figures, by_label
from kvferry.runtime.meetings import AT_WORK, Lost, Meeting, Meetings
from kvferry.runtime.questions import Questions
from kvferry.runtime.values import MAX_SHOWN, Drop, Effect, Fetch, HangUp, Peer, Send, Timing
from kvferry.wire.messages import (
    MAX_BATCH,
    TOKEN_BYTES,
    Acquire,
    Denial,
    DigestAnswer,
    FromAuthority,
    Grant,
    Grown,
    RankDescriptions,
    Rejected,
    Renew,
    Renewal,
    SettleAck,
    Watch,
    Welcome,
)
from kvferry.wire.reading import check_name
from kvferry.wire.ticket import Ticket


class Reader:
    """The fetches of one destination rank. Call it with events and ``now``; carry out what it returns.

    ``reader`` names one *start* of the destination engine: the same on all its ranks, new after a restart.
    ``key``: secret bytes from which tokens are made.
    """

    MAX_PEERS = 1024
    MAX_UNMET = 256
    """Peers in first contact at once; tickets may name any number of engines."""
    MAX_UNMET_HERE = 16
    """The same without a secret: any local process can make tickets that name ports of this host."""
    MAX_WAITING = 4096
    """Fetches that wait for a first contact."""

    def __init__(
        self,
        reader: str,
        rank: int,
        num_ranks: int,
        timing: Timing | None = None,
        *,
        key: bytes,
        digest_every: int = 0,
        max_unmet: int = MAX_UNMET,
    ) -> None:
        if not reader or not 0 <= rank < num_ranks:
            raise SpecError(f"a reader needs a name and a rank, got {reader!r}, rank {rank} of {num_ranks}")
        check_name("the name of a reader", reader)
        if len(key) < TOKEN_BYTES:
            raise SpecError(f"a reader's key needs at least {TOKEN_BYTES} bytes, got {len(key)}")
        self.reader, self.rank, self.num_ranks, self._key = reader, rank, num_ranks, key
        self._max_unmet = max_unmet
        self._timing = timing or Timing()
        self.meetings = Meetings(reader, self._timing)
        self._questions = Questions(self._timing)
        self._acquires = AcquireQueue(self._timing)
        self.connections = Connections(self._timing)
        self._numbers = count(1)
        self.fetches = ActiveFetches(
            reader,
            rank,
            num_ranks,
            self._timing,
            self.meetings,
            self.connections,
            self._numbers,
            digest_every,
        )
        self._called: set[str] = set()
        """Addresses with a connection that is still needed."""

    # -- what the engine asks for ------------------------------------------------------------------

    def fetch(self, now: float, handle: int, fetch: Fetch) -> list[Effect]:
        """Start a fetch under a handle of the caller's; its one report comes later."""
        return self._start(now, handle, fetch.ticket, fetch)

    def hold(self, now: float, handle: int, ticket: Ticket) -> list[Effect]:
        """Lease a ticket and meet its engine before the destination blocks are known.

        The handle's one report comes after ``supply`` or ``abort``, or when the lease is lost.
        """
        return self._start(now, handle, ticket, None)

    def supply(self, now: float, handle: int, fetch: Fetch) -> list[Effect]:
        """Fetch a held ticket. If it failed meanwhile, its report follows, and nothing is started."""
        job = self.fetches.get(handle)
        if job is None or job.fetch is not None or job.phase is Phase.FAILING:
            return []
        if fetch.ticket != job.ticket:
            failure = Failure(FailureCode.TICKET, "another ticket was held under this handle")
            return self.fetches.fail(now, job, failure)
        job.supply(fetch)
        job.started = job.met_at = now
        if job.phase is Phase.HOLDING:
            job.phase = Phase.MEETING
        asked = self._watch(now, job)
        return [*asked, *self._meet(now, job.peer), *self.fetches.advance(now, job)]

    def _start(self, now: float, handle: int, ticket: Ticket, fetch: Fetch | None) -> list[Effect]:
        if self.fetches.get(handle) is not None:
            raise SpecError(f"a fetch with the handle {handle} is in progress")
        job = self._job(now, handle, ticket, fetch)
        peer = job.peer
        if not self.fetches.begin(job):
            failure = Failure(FailureCode.SPENT, "this ticket is already being read")
            return self.fetches.fail(now, job, failure)
        if self.connections.is_gone(peer):
            job.is_settled = True  # no message was sent
            return self.fetches.fail(now, job, self.fetches.source_gone(peer))
        room = [*self._call_anew(peer.authority), *self._make_room(peer)]
        if overload := self._overload(peer):
            job.is_settled = True  # no message was sent
            return [*room, *self.fetches.fail(now, job, Failure(FailureCode.TOO_MANY_PEERS, overload))]
        self._called.add(peer.authority)
        self._acquires.add(job)
        return [*room, *self._acquire(now, self._acquires.due(now, peer.authority)), *self._meet(now, peer)]

    def _job(self, now: float, handle: int, ticket: Ticket, fetch: Fetch | None) -> FetchJob:
        peer = Peer(ticket.engine, ticket.generation, ticket.authority)
        attempt, fingerprint = next(self._numbers), ticket.fingerprint
        known_by = fingerprint, self._token(peer, fingerprint)
        return FetchJob(
            handle, ticket, fetch, peer, attempt, *known_by, now, met_at=now, posted_at=now, ended_at=now
        )

    def _overload(self, peer: Peer) -> str:
        """Why a fetch from a peer cannot begin now; empty if it can. A met peer always has room."""
        if self.meetings.is_met(peer):
            return ""
        is_new, unmet = peer not in self.meetings, self.meetings.unmet
        if is_new and len(self.meetings) >= self.MAX_PEERS:
            return f"{self.MAX_PEERS} source engines are in use, the limit"
        if is_new and len(unmet) >= self._max_unmet:
            return f"{self._max_unmet} source engines are in first contact, the limit"
        if sum(self.fetches.num_of(each) for each in unmet) >= self.MAX_WAITING:
            return f"{self.MAX_WAITING} fetches are waiting for a first contact, the limit"
        return ""

    def _token(self, peer: Peer, fingerprint: bytes) -> bytes:
        """The token that identifies this rank to a ticket's authority, and to no other."""
        named = f"\0{peer.generation}\0{peer.authority}\0{peer.engine}".encode()
        return hmac.digest(self._key, fingerprint + named, "sha256")[:TOKEN_BYTES]

    def give(self, now: float, handle: int, tokens: Spans) -> list[Effect]:
        """Add tokens to an open fetch."""
        job = self.fetches.get(handle)
        if job is None or not job.is_open:
            return []
        job.todo = normal((*job.todo, *tokens))
        return self.fetches.go_on(now, job)

    def finish(self, now: float, handle: int) -> list[Effect]:
        """Close an open fetch: it is confirmed when all of its tokens are in."""
        job = self.fetches.get(handle)
        if job is None or not job.is_open:
            return []
        job.is_open, job.finished_at = False, now
        return self.fetches.go_on(now, job)

    def abort(self, now: float, handle: int) -> list[Effect]:
        """Abort a fetch; reported once nothing of it is in flight.

        If nothing was posted, the lease ends as declined.
        """
        job = self.fetches.get(handle)
        return [] if job is None else self.fetches.fail(now, job, Failure(FailureCode.ABORTED))

    def decline(self, now: float, handle: int, ticket: Ticket) -> list[Effect]:
        """End the lease of a ticket that this engine does not need; nothing is reported.

        Use ``abort`` for a ticket that is held or being read.
        """
        job = self._job(now, handle, ticket, None)
        if job.key in self.fetches.by_ticket:
            return []
        self._called.add(job.peer.authority)
        return self.fetches.decline(now, job)

    # -- what the authority answers ----------------------------------------------------------------

    def receive(self, now: float, reply_to: str, message: FromAuthority) -> list[Effect]:
        match message:
            case Welcome():
                effects, lost = self.meetings.welcomed(now, reply_to, message)
                return [*effects, *self._lose(now, lost)]
            case RankDescriptions():
                effects, lost = self.meetings.described(now, reply_to, message)
                return [*effects, *self._lose(now, lost)]
            case Rejected():
                return self._lose(now, self.meetings.rejected(reply_to, message))
            case Grant():
                return self._granted(now, reply_to, message)
            case Denial():
                return self._denied(now, reply_to, message)
            case Renewal():
                return self._renewed(now, reply_to, message)
            case SettleAck():
                return self.fetches.acknowledged(now, reply_to, message)
            case DigestAnswer():
                return self.fetches.digest_answered(now, reply_to, message)
            case Grown():
                return self._grown(now, reply_to, message)
            case _:
                pass  # for ranks of a source engine
        return []

    # -- what the edge did -------------------------------------------------------------------------

    def built(self, now: float, peer: Peer, plan_seconds: float = 0.0) -> list[Effect]:
        """The peer is planned, proved, lowered and connected."""
        if not self.meetings.built(peer):
            return [Drop(peer)]
        jobs = self.fetches.of(peer)
        for job in jobs:
            job.plan_seconds = plan_seconds
            if job.is_early and job.phase is Phase.MEETING:  # all of its ranks have joined now
                job.phase = Phase.LEASING
                self._acquires.add(job)
        asked = self._acquire(now, self._acquires.due(now, peer.authority))
        leased = [job for job in jobs if job.phase is not Phase.LEASING]
        return [*asked, *(effect for job in leased for effect in self.fetches.advance(now, job))]

    def not_built(self, now: float, peer: Peer, failure: Failure) -> list[Effect]:
        """The peer cannot be read from: fail the fetches that wait for it."""
        return self._lose(now, [(peer, failure)])

    def selected(
        self,
        now: float,
        handle: int,
        selection: Selection,
        num_runs: int | None = None,
        way: str = "",
    ) -> list[Effect]:
        """The runs of a fetch are known: post them."""
        job = self.fetches.get(handle)
        if job is None or job.phase is not Phase.SELECTING:
            return []
        if job.covered_until <= now:
            failure = Failure(FailureCode.LEASE_LAPSED, "the source did not renew the lease in time")
            return self.fetches.fail(now, job, failure)
        return self.fetches.post(now, job, selection, num_runs, way)

    def not_selected(self, now: float, handle: int, failure: Failure) -> list[Effect]:
        job = self.fetches.get(handle)
        return [] if job is None else self.fetches.not_selected(now, job, failure)

    # -- time ---------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Effect]:
        """Detect gone peers, renew leases, repeat messages, time out, quarantine."""
        gone = self.connections.tick(now)
        effects: list[Effect] = [effect for address in gone for effect in self._lose_sight(now, address)]
        asked, lost = self.meetings.tick(now)
        effects += [*asked, *self._lose(now, lost)]
        effects += self._renewals(now)
        effects += [effect for job in self.fetches for effect in self._watch(now, job)]
        effects += self.fetches.tick(now)
        effects += self._acquire(now, self._acquires.tick(now))  # after timeouts made room
        self._questions.tick(now)
        return [*effects, *self._forget_the_gone(), *self._hang_up()]

    def _forget_the_gone(self) -> list[Effect]:
        """Drop gone peers that no read uses, and with them the mappings of their memory."""
        gone = [peer for peer in self.connections.gone_peers if self.meetings.is_met(peer)]
        unused = [peer for peer in gone if not any(job.is_using_peer for job in self.fetches.of(peer))]
        return [effect for peer in unused for effect in self.meetings.forget(peer)]

    def _hang_up(self) -> list[Effect]:
        """Close unneeded connections: an address in a ticket may be of anything."""
        busy = {job.peer.authority for job in self.fetches} if self._called else set()
        idle = self._called - busy - self.meetings.addresses - self.fetches.settlements.addresses
        idle = {address for address in idle if not self.connections.is_awaited(address)}
        self._called -= idle
        for address in idle:
            self.connections.closed(address)
        return [HangUp(address) for address in sorted(idle)]

    def next_deadline(self) -> float:
        timing = self._timing
        told = self.fetches.settlements, self.fetches.checks
        parts = (self.connections, self.meetings, *told, self._questions, self._acquires)
        deadlines = [part.next_deadline() for part in parts]
        deadlines += [min(job.ask_at(timing), self.fetches.give_up_at(job)) for job in self.fetches]
        deadlines += [job.watch_at(timing) for job in self.fetches]
        return min(deadlines)

    def status(self) -> dict[str, object]:
        met = [peer for peer in self.meetings.known if self.meetings.is_met(peer)]
        return {
            "reader": self.reader,
            "rank": self.rank,
            "peers": [f"{peer.engine}#{peer.generation}" for peer in met],
            "fetches": dict(Counter(job.phase.value for job in self.fetches)),
            "in_flight": self.num_in_flight,
            "quarantined": self.num_quarantined,
            "settling": len(self.fetches.settlements),
        }

    def sources(self) -> dict[Peer, tuple[str, str]]:
        """Each source engine that is known: how it stands with it, and why it is gone if it is."""
        known = {peer: (state.value, "") for peer, state in self.meetings.known.items()}
        return known | {peer: ("gone", why) for peer, why in self.connections.gone_peers.items()}

    def shown_loads(self, now: float) -> list[dict[str, object]]:
        return [
            {
                "request_id": job.ticket.request_id,
                "engine": job.peer.engine,
                "address": job.peer.authority,
                "phase": job.phase.value,
                "way": job.way,
                "seconds": round(now - job.started, 1),
            }
            for job in islice(self.fetches, MAX_SHOWN)
        ]

    def figures(self) -> Figures:
        phases = Counter(job.phase.value for job in self.fetches)
        num_quarantined = phases.pop(Phase.QUARANTINED.value, 0)
        peers = Counter(state.value for state in self.meetings.known.values())
        peers.update("gone" for _ in self.connections.gone_addresses)
        retries = {
            "hello": self.meetings.num_repeated,
            "lease": self._questions.num_repeated,
            "settle": self.fetches.settlements.num_repeated,
        }
        return {
            ("kvferry_quarantined",): num_quarantined,
            ("kvferry_reads_in_flight",): self.num_in_flight,
            **by_label("kvferry_loads_under_way", phases),
            **by_label("kvferry_peers", peers),
            **by_label("kvferry_retries", retries),
        }

    @property
    def num_in_flight(self) -> int:
        return len(self.fetches.transfers)

    @property
    def num_quarantined(self) -> int:
        return sum(1 for job in self.fetches if job.phase is Phase.QUARANTINED)

    # -- peers -------------------------------------------------------------------------------------

    def _meet(self, now: float, peer: Peer) -> list[Effect]:
        is_broken = self.meetings.state(peer) is Meeting.BROKEN
        is_used = is_broken and any(job.is_using_peer for job in self.fetches.of(peer))
        return self.meetings.meet(now, peer, is_used=is_used)

    def _make_room(self, peer: Peer) -> list[Effect]:
        if peer in self.meetings or len(self.meetings) < self.MAX_PEERS:
            return []
        return self.meetings.make_room({job.peer for job in self.fetches})

    def _lose(self, now: float, lost: Lost) -> list[Effect]:
        """Drop peers, and fail the fetches that wait for them."""
        effects: list[Effect] = []
        for peer, failure in lost:
            effects += self.meetings.forget(peer)
            for job in self.fetches.of(peer):
                effects += self.fetches.fail(now, job, failure) if job.is_waiting else []
        return effects

    def _lose_sight(self, now: float, address: str) -> list[Effect]:
        """The peers at an address are gone: fail waiting fetches; reads in flight end by themselves."""
        effects: list[Effect] = []
        jobs = self.fetches.at(address)
        self.connections.lost(address, {*self.meetings.at(address), *(job.peer for job in jobs)})
        for job in jobs:
            if job.is_waiting or job.phase in (Phase.CHECKING, Phase.CONFIRMING):
                job.is_settled = job.is_settled or not self.connections.has_answered(address)
                effects += self.fetches.fail(now, job, self.fetches.source_gone(job.peer))
        for peer in self.meetings.at(address):
            if any(job.is_using_peer for job in self.fetches.of(peer)):
                self.meetings.break_off(peer)
            elif self.meetings.state(peer) not in AT_WORK:
                effects += self.meetings.forget(peer)
        return effects

    def _call_anew(self, address: str) -> list[Effect]:
        """A new start of an engine has issued a ticket: call its address again."""
        if not self.connections.gone(address):
            return []
        self.connections.forget(address)
        return [HangUp(address)]

    # -- growing leases ----------------------------------------------------------------------------

    def _watch(self, now: float, job: FetchJob) -> list[Effect]:
        """Ask whether a lease has grown; the answer comes when it has. Repeated periodically."""
        if now < job.watch_at(self._timing):
            return []
        job.watch, job.watched_at = job.watch or next(self._numbers), now
        job.grown_at = max(job.grown_at, job.started)
        ticket, who = job.ticket, (self.reader, self.rank, job.token)
        watch = Watch(job.watch, ticket.generation, ticket.ticket_id, *who, ticket.num_complete)
        return [Send(job.peer.authority, watch)]

    def _watching(self, reply_to: str, nonce: int) -> FetchJob | None:
        """The fetch whose ``Watch`` is answered; only the asked address can answer."""
        found = (job for job in self.fetches.at(reply_to) if nonce and job.watch == nonce)
        return next(found, None)

    def _grown(self, now: float, reply_to: str, grown: Grown) -> list[Effect]:
        """More tokens are written: read them."""
        job = self._watching(reply_to, grown.nonce)
        if job is None or job.fetch is None or not grown.ticket.is_later_than(job.ticket):
            return []
        job.watch, job.watched_at = 0, float("-inf")
        if not job.is_leased:
            return []  # asked again later, or over
        job.grown_at = now
        job.ticket, job.fetch = grown.ticket, replace(job.fetch, ticket=grown.ticket)
        job.proofs = grown.proofs
        return [*self._watch(now, job), *self.fetches.go_on(now, job)]

    # -- leases ------------------------------------------------------------------------------------

    def _acquire(self, now: float, jobs: list[FetchJob]) -> list[Effect]:
        effects: list[Effect] = []
        for job in jobs:
            nonce, authority = next(self._numbers), job.peer.authority
            self._questions.ask(now, nonce, authority, [job])
            who = self.reader, self.rank, self.num_ranks
            effects.append(Send(authority, Acquire(nonce, job.ticket, *who, job.attempt, job.token)))
        return effects

    def _answered(self, reply_to: str, nonce: int) -> tuple[float, list[FetchJob]]:
        return self._questions.answered(reply_to, nonce, lambda job: self.fetches.get(job.handle) is job)

    def _granted(self, now: float, reply_to: str, grant: Grant) -> list[Effect]:
        asked_at, jobs = self._answered(reply_to, grant.nonce)
        effects: list[Effect] = []
        for job in jobs:
            if job.ticket.ticket_id == grant.ticket_id:
                job.covered_until = max(job.covered_until, asked_at + grant.lease_ms / 1000)
                job.board, job.mark = grant.board, grant.mark
                if job.ticket.fingerprint == job.fingerprint:  # else later proofs have come
                    job.proofs = grant.proofs
                # A met peer has all of its ranks, so the grant has every proof.
                job.is_early = not grant.is_whole and not self.meetings.is_met(job.peer)
                effects += self.fetches.advance(now, job)
                effects += self._watch(now, job)  # now that it is leased
        return [*effects, *self._acquire(now, self._acquires.due(now, reply_to))]

    def _denied(self, now: float, reply_to: str, denial: Denial) -> list[Effect]:
        failure = denied(denial.code, denial.detail)
        effects: list[Effect] = []
        watching = [job] if (job := self._watching(reply_to, denial.nonce)) else []
        for job in watching or self._answered(reply_to, denial.nonce)[1]:
            if job.phase is Phase.CONFIRMING:
                continue  # a late answer to the acquire; only the answer to the settlement counts
            job.is_settled = job.is_settled or job.covered_until == float("-inf")
            effects += self.fetches.fail(now, job, failure)
            state = self.meetings.state(job.peer)
            if failure.code is FailureCode.RESTARTED and state not in (None, *AT_WORK):
                effects += self._lose(now, [(job.peer, failure)])  # that start is gone for good
        return [*effects, *self._acquire(now, self._acquires.due(now, reply_to))]

    def _renewals(self, now: float) -> list[Effect]:
        """Renewals of leases that have used a third of their time, batched by peer."""
        due: dict[Peer, list[FetchJob]] = defaultdict(list)
        for job in self.fetches:
            if now >= job.ask_at(self._timing):
                due[job.peer].append(job)
        return [
            self._renew(now, peer, jobs[at : at + MAX_BATCH])
            for peer, jobs in due.items()
            for at in range(0, len(jobs), MAX_BATCH)
        ]

    def _renew(self, now: float, peer: Peer, jobs: list[FetchJob]) -> Send:
        nonce = next(self._numbers)
        self._questions.ask(now, nonce, peer.authority, jobs)
        tickets = tuple((job.ticket.ticket_id, job.token) for job in jobs)
        return Send(peer.authority, Renew(nonce, peer.generation, self.reader, self.rank, tickets))

    def _renewed(self, now: float, reply_to: str, renewal: Renewal) -> list[Effect]:
        asked_at, jobs = self._answered(reply_to, renewal.nonce)
        effects: list[Effect] = []
        kept = frozenset(renewal.kept)
        for job in jobs:
            if job.ticket.ticket_id in kept:
                job.covered_until = max(job.covered_until, asked_at + renewal.lease_ms / 1000)
                effects += self.fetches.advance(now, job)
            elif job.phase is not Phase.CONFIRMING:  # else our settlement ended it
                failure = Failure(FailureCode.LEASE_ENDED, "the source did not renew it")
                effects += self.fetches.fail(now, job, failure)
        return effects
