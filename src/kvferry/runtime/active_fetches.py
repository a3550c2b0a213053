"""The fetches in progress of one destination rank.

The life of a fetch::

    LEASING ──▶ MEETING ──▶ SELECTING ──▶ READING ──▶ CONFIRMING ──▶ reported, once
                                              └─CHECKING─┘
       └──────────┴───────────┴─────────────┴────────────┴──▶ failed: reported when nothing is in flight

* A fetch is read in parts if its lease is *growing* (the prompt is still being computed) or if a load has
  several sources. Each part is SELECTED and READ; in between, the fetch is HOLDING. One confirmation at the
  end covers all parts.
* A ticket can be *held* before its destination blocks are known; it is then HOLDING before SELECTING.
* A read counts only if the source's authority still held the lease after the last byte. The authority
  confirms that by message, or by its board on the same host; clocks do not matter. The question is repeated
  for the duration of a lease; then the fetch fails.
* A fetch whose digest is compared is CHECKING in between: both sides digest the bytes in their own memory,
  under the lease. If the digests differ or are missing, the fetch fails.
* A fetch is reported after the transport has reported the end of every posted read. If a read does not end in
  time, the fetch is *quarantined*: its blocks stay reserved, and it is never reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from kvferry.core.digest import TakenDigest
from kvferry.core.select import Selection
from kvferry.runtime.connections import Connections
from kvferry.runtime.digest_checks import DigestChecks
from kvferry.runtime.failure import NO_LAST_TOKEN, Failure, FailureCode, denied
from kvferry.runtime.fetch_job import FetchJob, Phase
from kvferry.runtime.meetings import Meetings
from kvferry.runtime.questions import Settlements
from kvferry.runtime.values import (
    FAR,
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
    """All fetches until they are reported. ``numbers`` are unique over transfers, attempts and questions."""

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
        """The fetch of each transfer in flight."""
        self._num_of: Counter[Peer] = Counter()
        self._by_address: dict[str, dict[int, FetchJob]] = {}

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
        """Add a fetch; False if another fetch has the ticket."""
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
        """The transport reports the end of a read or of a zeroing."""
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
        """Start reading the next part of a leased fetch, if one is ready."""
        if job.phase is not Phase.HOLDING or job.fetch is None:
            return []
        if not job.todo:
            is_over = not job.is_open
            return self._check(now, job, job.fetch) if is_over else [AllRead(job.handle, job.done)]
        part = job.next_part()
        if part is None:
            return []
        if job.reading[-1].stop == FAR and job.ticket.num_tokens not in part.full:
            return self.fail(now, job, NO_LAST_TOKEN)
        if not self._meetings.is_met(job.peer):
            detail = f"the connection to {job.peer.engine} broke before all parts were read"
            return self.fail(now, job, Failure(FailureCode.TRANSPORT, detail))
        job.phase, job.step_at = Phase.SELECTING, now
        return [Select(job.handle, job.peer, part)]

    def _check(self, now: float, job: FetchJob, fetch: Fetch) -> list[Effect]:
        """All bytes are in: compare digests if due, and confirm."""
        if job.num_bytes and self.checks.is_due():
            job.phase = Phase.CHECKING
            return [TakeDigest(job.handle, job.peer, fetch.part(job.done))]
        return self._confirm(now, job)

    def not_selected(self, now: float, job: FetchJob, failure: Failure) -> list[Effect]:
        """The request does not fit and fails; if only a part did not fit, wait for the rest."""
        if not job.is_cut or job.phase is not Phase.SELECTING:
            return self.fail(now, job, failure)
        job.can_part, job.phase = False, Phase.HOLDING
        return self.go_on(now, job)

    def _confirm(self, now: float, job: FetchJob) -> list[Effect]:
        """All bytes are in: ask the authority, or its board, whether the lease still stands."""
        job.phase = Phase.CONFIRMING
        told = self._settle(now, job, Outcome.READ)
        if self._connections.gone(job.peer.authority):
            return [*told, *self.fail(now, job, self.source_gone(job.peer))]
        # Look first: the lease ends when the authority receives the settlement.
        look = [LookUp(job.handle, job.ticket.ticket_id, job.board, job.mark)] if job.board else []
        return [*look, *told]

    def stood(self, now: float, handle: int) -> list[Effect]:
        """The board showed the lease after the last byte."""
        job = self.get(handle)
        if job is None or job.phase is not Phase.CONFIRMING:
            return []
        return self._report(now, job, Outcome.READ)

    # -- digests -----------------------------------------------------------------------------------

    def digest_asked(self, now: float, handle: int, questions: Mapping[int, bytes]) -> list[Effect]:
        """Ask each source rank for its digest; our own comes later."""
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
        """Compare both digests once they are there."""
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
        """The authority acknowledges how a fetch ended, and whether its read counts."""
        told = self.settlements.acknowledged(reply_to, ack)
        job = None if told is None else self.get(told.handle)
        if job is None or job.attempt != ack.attempt or job.phase is not Phase.CONFIRMING:
            return []
        if ack.code:
            return self.fail(now, job, denied(ack.code, ack.detail))
        return self._report(now, job, Outcome.READ)

    def fail(self, now: float, job: FetchJob, failure: Failure) -> list[Effect]:
        """Fail a fetch; the first reason is reported when nothing is in flight."""
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
        """Time out, quarantine, and repeat unanswered messages."""
        effects: list[Effect] = []
        for job in list(self):
            if now >= self.give_up_at(job):
                effects += self._give_up(now, job)
        return [*effects, *self.settlements.tick(now, self._connections.gone), *self.checks.tick(now)]

    def give_up_at(self, job: FetchJob) -> float:
        """When its phase times out; a meeting that makes progress extends it."""
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
        """Tell the authority how a fetch ended; repeated until acknowledged."""
        if job.is_settled or self.by_ticket.get(job.key) != job.handle:
            return []
        job.is_settled = True
        if job.failure is not None and job.failure.code is FailureCode.ABORTED:
            return self.decline(now, job, outcome)
        who = *self._who, job.attempt, job.token
        settle = Settle(job.peer.generation, job.ticket.ticket_id, *who, outcome)
        if not self._is_heard(job):
            return [Send(job.peer.authority, settle)]  # not repeated: the address may be made up
        return self.settlements.settle(now, job, settle, job.patience(self._timing))

    def _is_heard(self, job: FetchJob) -> bool:
        return job.covered_until > float("-inf") or self._meetings.is_met(job.peer)

    def decline(self, now: float, job: FetchJob, outcome: Outcome = Outcome.UNREAD) -> list[Effect]:
        """End the lease of a ticket that this engine does not need, whether granted or not."""
        ticket, who = job.ticket, (*self._who, job.attempt, job.token)
        settle = Settle(ticket.generation, ticket.ticket_id, *who, outcome, self._num_ranks, declined=ticket)
        seconds = job.patience(self._timing)
        if not self._is_heard(job):  # the address may be made up
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
