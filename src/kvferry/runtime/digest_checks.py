"""Digest comparisons in progress, on the reader's side and in the authority."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count

from kvferry.core.digest import TakenDigest
from kvferry.runtime.failure import Failure, FailureCode
from kvferry.runtime.fetch_job import FetchJob
from kvferry.runtime.lease import Lease
from kvferry.runtime.values import Effect, Send, SourceEffect, Timing
from kvferry.wire.messages import DigestAnswer, DigestRequest, DigestResult, DigestTask


@dataclass(slots=True)
class _Check:
    job: FetchJob
    requests: dict[int, DigestRequest]
    """Unanswered requests, by source rank."""
    sent_at: float
    sums: dict[int, bytes] = field(default_factory=dict)
    """Answers, by source rank."""
    ours: TakenDigest | None = None


class DigestChecks:
    """The checks of fetches in progress. Requests are repeated until they are answered."""

    def __init__(self, every: int, timing: Timing) -> None:
        """``every``: check every n-th fetch; 0: none."""
        self._every, self._timing = every, timing
        self._num_fetches = 0
        self._checks: dict[int, _Check] = {}

    def is_due(self) -> bool:
        """Count a fetch; whether to check it."""
        self._num_fetches += 1
        return self._every > 0 and self._num_fetches % self._every == 0

    def ask(self, now: float, job: FetchJob, requests: Mapping[int, DigestRequest]) -> list[Effect]:
        """Ask each source rank of a fetch, through its authority."""
        self._checks[job.handle] = _Check(job, dict(requests), now)
        return [Send(job.peer.authority, request) for request in requests.values()]

    def taken(self, handle: int, ours: TakenDigest) -> None:
        if handle in self._checks:
            self._checks[handle].ours = ours

    def answered(self, address: str, answer: DigestAnswer) -> tuple[FetchJob, Failure | None] | None:
        """The fetch that an answer belongs to, and its failure; only the asked address can answer."""
        for check in self._checks.values():
            if check.job.peer.authority != address:
                continue
            for src_rank, request in check.requests.items():
                if request.nonce == answer.nonce:
                    del check.requests[src_rank]
                    check.sums[src_rank] = answer.sums
                    return check.job, _missing(check.job, src_rank, answer.detail) if answer.detail else None
        return None

    def is_complete(self, handle: int) -> bool:
        check = self._checks.get(handle)
        return check is not None and check.ours is not None and not check.requests

    def compare(self, handle: int) -> Failure | None:
        """The failure of a fetch; None if both sides have the same bytes."""
        check = self._checks.pop(handle)
        for src_rank, sums in check.sums.items():
            found = check.ours.difference(src_rank, sums) if check.ours else None
            if found is not None:
                detail = (
                    f"{found}: the bytes differ from those of rank {src_rank} of {check.job.peer.engine}."
                    " The load is discarded. If it recurs, check the fabric and the copy kernels"
                )
                return Failure(FailureCode.DIGEST_DIFFERS, detail)
        return None

    def overdue(self, job: FetchJob) -> Failure:
        """The failure of a check that timed out; it names the side that did not answer."""
        check = self._checks.get(job.handle)
        silent = ", ".join(str(rank) for rank in sorted(check.requests)) if check else ""
        who = f"rank {silent} of {job.peer.engine}" if silent else "this rank"
        return Failure(FailureCode.NO_DIGEST, f"{who} computed no digest within {self._timing.read:g} s")

    def drop(self, handle: int) -> None:
        self._checks.pop(handle, None)

    def tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for check in self._checks.values():
            if check.requests and now >= check.sent_at + self._timing.retry:
                check.sent_at = now
                effects += [Send(check.job.peer.authority, request) for request in check.requests.values()]
        return effects

    def next_deadline(self) -> float:
        retry = self._timing.retry
        unanswered = (check.sent_at + retry for check in self._checks.values() if check.requests)
        return min(unanswered, default=float("inf"))


def _missing(job: FetchJob, src_rank: int, why: str) -> Failure:
    return Failure(FailureCode.NO_DIGEST, f"rank {src_rank} of {job.peer.engine} returned no digest: {why}")


@dataclass(frozen=True, slots=True)
class _Passed:
    number: int
    rank_at: str
    """The address of the rank."""


class DigestRelay:
    """Passes readers' digest requests to ranks. A repeated request keeps its number."""

    MAX_WAITING = 1024
    """Unanswered requests; the oldest is forgotten first, and the reader repeats it."""

    def __init__(self, generation: int) -> None:
        self._generation = generation
        self._numbers = count(1)
        self._waiting: dict[tuple[str, int], _Passed] = {}
        """By the reader's address and nonce; the oldest first."""

    def __len__(self) -> int:
        return len(self._waiting)

    def ask(
        self, reply_to: str, ask: DigestRequest, lease: Lease | None, ranks: Mapping[int, str]
    ) -> list[SourceEffect]:
        """A reader asks; ``ranks``: the address of each rank."""
        reading = lease.reading if lease is not None and ask.generation == self._generation else None
        is_held = reading is not None and reading.is_held(ask.reader, ask.reader_rank, ask.token)
        if lease is None or not is_held:
            return [Send(reply_to, DigestAnswer(ask.nonce, detail="the source holds no lease for this read"))]
        if ask.src_rank not in ranks:
            return [Send(reply_to, DigestAnswer(ask.nonce, detail="the source no longer has this rank"))]
        key = reply_to, ask.nonce
        known = self._waiting.pop(key, None)
        passed = _Passed(known.number if known else next(self._numbers), ranks[ask.src_rank])
        while len(self._waiting) >= self.MAX_WAITING:
            del self._waiting[next(iter(self._waiting))]
        self._waiting[key] = passed
        task = DigestTask(self._generation, passed.number, lease.ticket.tables, ask.question, ask.ticket_id)
        return [Send(passed.rank_at, task)]

    def answer(self, reply_to: str, result: DigestResult) -> list[SourceEffect]:
        """A rank answers; only the asked one can."""
        for (reader_at, nonce), passed in self._waiting.items():
            if (passed.number, passed.rank_at) == (result.number, reply_to):
                if result.generation != self._generation:
                    break
                del self._waiting[reader_at, nonce]
                return [Send(reader_at, DigestAnswer(nonce, result.sums, result.detail))]
        return []
