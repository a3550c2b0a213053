"""The fetches of one destination rank that are under way: how each goes on, and how it ends.

The life of a fetch::

    LEASING ──▶ MEETING ──▶ SELECTING ──▶ READING ──▶ CONFIRMING ──▶ reported, once
                                              └─CHECKING─┘
       └──────────┴───────────┴─────────────┴────────────┴──▶ failed: reported when nothing is in flight

* A fetch may be read in parts: of a *growing* lease, whose prompt is still being computed, each part that is
  written; of a load from several sources, each interval of tokens that is given to this one. Each part is
  SELECTED and READ, and in between the fetch is HOLDING again. All of it is confirmed at once in the end.

* A ticket whose blocks are not known yet can be *held* until they are: HOLDING comes before SELECTING then.
* A read counts only if the source's authority held the lease after its end: it says so when it is told of the
  end, or, on one host, its board shows it. No clock has a say in that. An authority that does not answer is
  told again, for as long as a lease; then the fetch has failed.
* A fetch whose digest is asked for is CHECKING in between: both sides digest the bytes in their own memory,
  under the lease. What differs, or could not be compared, has failed.
* Nothing is reported before the transport has reported the end of every posted read. A read that does not end
  in time is *quarantined*: counted and shown, its blocks kept; never reported as done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from kvferry.core.digest import TakenDigest
from kvferry.core.select import Selection
from kvferry.runtime.connections import Connections
from kvferry.runtime.digest_checks import DigestChecks
from kvferry.runtime.failure import Failure, FailureCode, denied
from kvferry.runtime.fetch_job import FetchJob, Phase
from kvferry.runtime.meetings import Meetings
from kvferry.runtime.questions import Settlements
from kvferry.runtime.values import (
    AllRead,
    Cancel,
    Effect,
    Fetch,
    LookUp,
    Peer,
    PostReads,
    Report,
    Select,
    Send,
    TakeDigest,
    Timing,
)
from kvferry.wire.messages import DigestAnswer, DigestRequest, Outcome, Settle, SettleAck
from kvferry.wire.ticket import permits_for


class ActiveFetches:
    """Every fetch, from when it begins until it is reported.

    ``numbers``: the reader's own; no two transfers, attempts or questions have the same.
    """

    def __init__(
        self,
        reader: str,
        rank: int,
        num_ranks: int,
        timing: Timing,
        meetings: Meetings,
        connections: Connections,
        numbers: Iterator[int],
        digest_every: int = 0,
    ) -> None:
        self._who, self._num_ranks, self._timing, self._numbers = (reader, rank), num_ranks, timing, numbers
        self._meetings, self._connections = meetings, connections
        self.settlements = Settlements(timing)
        self.checks = DigestChecks(digest_every, timing)
        self.by_handle: dict[int, FetchJob] = {}
        self.by_ticket: dict[tuple[Peer, bytes], int] = {}
        self.transfers: dict[int, int] = {}
        """Whose each transfer is that has not ended yet."""
        self._num_of: Counter[Peer] = Counter()
        self._by_address: dict[str, dict[int, FetchJob]] = {}
        """By whom they read from: nobody who loses a peer looks at those of all others."""

    def __iter__(self) -> Iterator[FetchJob]:
        return iter(self.by_handle.values())

    def get(self, handle: int) -> FetchJob | None:
        return self.by_handle.get(handle)

    def of(self, peer: Peer) -> list[FetchJob]:
        return [job for job in self.at(peer.authority) if job.peer == peer]

    def at(self, address: str) -> list[FetchJob]:
        return list(self._by_address.get(address, {}).values())

    def num_of(self, peer: Peer) -> int:
        return self._num_of[peer]

    def begin(self, job: FetchJob) -> bool:
        """Whether its ticket is free; if so, it is this fetch's from now on."""
        self.by_handle[job.handle] = job
        self._num_of[job.peer] += 1
        self._by_address.setdefault(job.peer.authority, {})[job.handle] = job
        return self.by_ticket.setdefault(job.key, job.handle) == job.handle

    def post(
        self,
        now: float,
        job: FetchJob,
        selection: Selection,
        num_runs: int | None,
        way: str,
    ) -> list[Effect]:
        if not job.has_posted:
            job.posted_at = now
        job.phase, job.step_at, job.ended_at = Phase.READING, now, now
        products = selection.products
        job.num_sources, job.way = max(job.num_sources, len(products)), way or job.way
        job.num_bytes += selection.total_bytes
        job.num_runs += selection.num_runs if num_runs is None else num_runs
        if job.ticket.is_growing:
            job.early_bytes = job.num_bytes
        job.clear = next(self._numbers)
        reads = {next(self._numbers): read for read in products.items()}
        job.in_flight = {job.clear, *reads}
        self.transfers |= dict.fromkeys(job.in_flight, job.handle)
        after = job.fetch.after if job.fetch else None
        permits = permits_for(job.ticket, job.proofs, products)
        return [PostReads(job.peer, job.clear, selection.blank, reads, after, permits)]

    def ended(self, now: float, transfer: int, error: str) -> list[Effect]:
        """The transport reports the end of a read; or the slack of a fetch is zeroed."""
        if transfer not in self.transfers:
            return []
        job = self.by_handle[self.transfers.pop(transfer)]
        job.in_flight.discard(transfer)
        job.ended_at = now
        if not error:
            return self.advance(now, job)
        if transfer != job.clear and job.failure is None:  # else it may have ended because we gave it up
            self._meetings.break_off(job.peer)
        return self.fail(now, job, Failure(FailureCode.TRANSPORT, error))

    def advance(self, now: float, job: FetchJob) -> list[Effect]:
        is_met = self._meetings.is_met(job.peer)
        if job.phase is Phase.LEASING and job.covered_until > now and not (job.is_early and is_met):
            job.phase = Phase.MEETING
        if job.phase is Phase.MEETING and is_met:
            job.met_at, job.phase = now, Phase.HOLDING
            return self.go_on(now, job)
        if job.phase is Phase.READING and not job.in_flight:
            job.take_in()
            job.phase = Phase.HOLDING
            if (job.todo or job.is_open) and self._connections.gone(job.peer.authority):
                return self.fail(now, job, self.source_gone(job.peer))
            return self.go_on(now, job)
        if job.phase in (Phase.FAILING, Phase.QUARANTINED) and not job.in_flight:
            outcome = Outcome.FAILED if job.has_posted else Outcome.UNREAD
            return [*self._settle(now, job, outcome), *self._report(now, job, outcome)]
        return []

    def go_on(self, now: float, job: FetchJob) -> list[Effect]:
        """Read what can be read now of a fetch that is leased, if anything."""
        if job.phase is not Phase.HOLDING or job.fetch is None:
            return []
        if not job.todo:
            is_over = not job.is_open
            return self._check(now, job, job.fetch) if is_over else [AllRead(job.handle, job.done)]
        part = job.next_part()
        if part is None:
            return []
        if not self._meetings.is_met(job.peer):
            detail = f"the connection to {job.peer.engine} broke before all parts were read"
            return self.fail(now, job, Failure(FailureCode.TRANSPORT, detail))
        job.phase, job.step_at = Phase.SELECTING, now
        return [Select(job.handle, job.peer, part)]

    def _check(self, now: float, job: FetchJob, fetch: Fetch) -> list[Effect]:
        """All is in: compare digests, if that is due, and have it confirmed."""
        if job.num_bytes and self.checks.is_due():
            job.phase = Phase.CHECKING
            return [TakeDigest(job.handle, job.peer, fetch.part(job.done))]
        return self._confirm(now, job)

    def not_selected(self, now: float, job: FetchJob, failure: Failure) -> list[Effect]:
        """The request does not fit: it fails alone. A part of it may only come too early."""
        if not job.is_cut or job.phase is not Phase.SELECTING:
            return self.fail(now, job, failure)
        job.can_part, job.phase = False, Phase.HOLDING
        return self.go_on(now, job)

    def _confirm(self, now: float, job: FetchJob) -> list[Effect]:
        """All bytes are in: have the authority say that they count, or see that it stands by its lease."""
        job.phase = Phase.CONFIRMING
        told = self._settle(now, job, Outcome.READ)
        if self._connections.gone(job.peer.authority):
            return [*told, *self.fail(now, job, self.source_gone(job.peer))]
        # First look: once the authority has heard that the read is over, its lease ends.
        look = [LookUp(job.handle, job.ticket.ticket_id, job.board, job.mark)] if job.board else []
        return [*look, *told]

    def stood(self, now: float, handle: int) -> list[Effect]:
        """The lease of a fetch was seen to stand, after its last byte."""
        job = self.get(handle)
        if job is None or job.phase is not Phase.CONFIRMING:
            return []
        return self._report(now, job, Outcome.READ)

    # -- digests -----------------------------------------------------------------------------------

    def digest_asked(self, now: float, handle: int, questions: Mapping[int, bytes]) -> list[Effect]:
        """What each source rank of a fetch is to be asked; our own digest comes later."""
        job = self._checking(handle)
        if job is None:
            return []
        ticket, who = job.ticket, (*self._who, job.token)
        requests = {
            src_rank: DigestRequest(
                next(self._numbers), ticket.generation, ticket.ticket_id, *who, src_rank, question
            )
            for src_rank, question in questions.items()
        }
        return self.checks.ask(now, job, requests)

    def digest_taken(self, now: float, handle: int, ours: TakenDigest) -> list[Effect]:
        self.checks.taken(handle, ours)
        return self._compare(now, self._checking(handle))

    def not_digested(self, now: float, handle: int, failure: Failure) -> list[Effect]:
        job = self._checking(handle)
        return [] if job is None else self._not_equal(now, job, failure)

    def digest_answered(self, now: float, reply_to: str, answer: DigestAnswer) -> list[Effect]:
        found = self.checks.answered(reply_to, answer)
        if found is None:
            return []
        job, failure = found
        return self._compare(now, job) if failure is None else self._not_equal(now, job, failure)

    def _checking(self, handle: int) -> FetchJob | None:
        job = self.get(handle)
        return job if job is not None and job.phase is Phase.CHECKING else None

    def _compare(self, now: float, job: FetchJob | None) -> list[Effect]:
        """Go on once both sides' digests are there, if they are equal."""
        if job is None or not self.checks.is_complete(job.handle):
            return []
        if failure := self.checks.compare(job.handle):
            return self._not_equal(now, job, failure)
        job.digest, job.checked_at = "equal", now
        return self._confirm(now, job)

    def _not_equal(self, now: float, job: FetchJob, failure: Failure) -> list[Effect]:
        is_other = failure.code is FailureCode.DIGEST_DIFFERS
        job.digest, job.checked_at = "differs" if is_other else "missing", now
        return self.fail(now, job, failure)

    # -- the end -----------------------------------------------------------------------------------

    def source_gone(self, peer: Peer) -> Failure:
        reason = self._connections.gone(peer.authority)
        return Failure(FailureCode.SOURCE_GONE, f"{peer.engine} at {peer.authority} is gone: {reason}")

    def acknowledged(self, now: float, reply_to: str, ack: SettleAck) -> list[Effect]:
        """The authority knows how a fetch ended; a read that it confirms counts."""
        told = self.settlements.acknowledged(reply_to, ack)
        job = None if told is None else self.get(told.handle)
        if job is None or job.attempt != ack.attempt or job.phase is not Phase.CONFIRMING:
            return []
        if ack.code:
            return self.fail(now, job, denied(ack.code, ack.detail))
        return self._report(now, job, Outcome.READ)

    def fail(self, now: float, job: FetchJob, failure: Failure) -> list[Effect]:
        """Remember the first reason; report it when nothing is in flight."""
        cancels = self._cancels(job)
        job.failure = job.failure or failure
        if job.phase is not Phase.QUARANTINED:
            job.phase = Phase.FAILING
        return [*cancels, *self.advance(now, job)]

    def _cancels(self, job: FetchJob) -> list[Effect]:
        if job.failure is not None:
            return []
        return [Cancel(transfer) for transfer in sorted(job.in_flight) if transfer != job.clear]

    def tick(self, now: float) -> list[Effect]:
        """Time has passed: give up, quarantine, and tell authorities again what they do not know yet."""
        effects: list[Effect] = []
        for job in list(self):
            if now >= self.give_up_at(job):
                effects += self._give_up(now, job)
        return [*effects, *self.settlements.tick(now, self._connections.gone), *self.checks.tick(now)]

    def give_up_at(self, job: FetchJob) -> float:
        """When its phase has lasted too long; not while the meeting with its peer gets on."""
        if job.phase in (Phase.LEASING, Phase.MEETING):
            return max(job.started, self._meetings.since(job.peer)) + self._timing.meet
        return job.give_up_at(self._timing)

    def _give_up(self, now: float, job: FetchJob) -> list[Effect]:
        match job.phase:
            case Phase.LEASING:
                failure = Failure(FailureCode.NO_ANSWER, "no lease was granted in time")
            case Phase.MEETING:
                failure = self._meetings.no_answer(job.peer)
            case Phase.SELECTING:
                failure = Failure(FailureCode.OVERDUE, "selecting the byte ranges took too long")
            case Phase.HOLDING:
                detail = f"{job.peer.engine} made no progress within {self._timing.read:g} s"
                failure = Failure(FailureCode.OVERDUE, detail)
            case Phase.CHECKING:
                return self._not_equal(now, job, self.checks.overdue(job))
            case Phase.CONFIRMING:
                seconds = job.patience(self._timing)
                detail = f"{job.peer.engine} did not confirm the read within {seconds:g} s"
                failure = Failure(FailureCode.UNCONFIRMED, detail)
            case _:
                return self._quarantine(job)
        return self.fail(now, job, failure)

    def _quarantine(self, job: FetchJob) -> list[Effect]:
        cancels = self._cancels(job)
        num_reads = len(job.in_flight)
        detail = f"{num_reads} reads did not end within {self._timing.read:g} s"
        job.failure = job.failure or Failure(FailureCode.OVERDUE, detail)
        job.phase = Phase.QUARANTINED
        return cancels

    def _settle(self, now: float, job: FetchJob, outcome: Outcome) -> list[Effect]:
        """Tell the authority how a fetch ended, once; that is repeated until it knows."""
        if job.is_settled or self.by_ticket.get(job.key) != job.handle:
            return []
        job.is_settled = True
        if job.failure is not None and job.failure.code is FailureCode.ABORTED:
            return self.decline(now, job, outcome)
        who = *self._who, job.attempt, job.token
        settle = Settle(job.peer.generation, job.ticket.ticket_id, *who, outcome)
        if not self._is_heard(job):
            return [Send(job.peer.authority, settle)]  # once: perhaps nobody like that has ever been there
        return self.settlements.settle(now, job, settle, job.patience(self._timing))

    def _is_heard(self, job: FetchJob) -> bool:
        return job.covered_until > float("-inf") or self._meetings.is_met(job.peer)

    def decline(self, now: float, job: FetchJob, outcome: Outcome = Outcome.UNREAD) -> list[Effect]:
        """Have the lease of a ticket ended that this engine does not need, granted to it or not."""
        ticket, who = job.ticket, (*self._who, job.attempt, job.token)
        settle = Settle(ticket.generation, ticket.ticket_id, *who, outcome, self._num_ranks, declined=ticket)
        seconds = job.patience(self._timing)
        if not self._is_heard(job):  # perhaps nobody like that has ever been there
            seconds = min(seconds, self._timing.meet)
        return self.settlements.settle(now, job, settle, seconds)

    def _report(self, now: float, job: FetchJob, outcome: Outcome) -> list[Effect]:
        self.checks.drop(job.handle)
        del self.by_handle[job.handle]
        self._num_of[job.peer] -= 1
        if not self._num_of[job.peer]:
            del self._num_of[job.peer]
        there = self._by_address[job.peer.authority]
        del there[job.handle]
        if not there:
            del self._by_address[job.peer.authority]
        if self.by_ticket.get(job.key) == job.handle:
            del self.by_ticket[job.key]
        return [Report(job.handle, job.failure, job.record(now, outcome))]
