"""Unanswered messages of a reader to authorities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.runtime.fetch_job import FetchJob
from kvferry.runtime.values import Effect, Send, Timing
from kvferry.wire.messages import Settle, SettleAck


@dataclass(frozen=True, slots=True)
class _Question:
    asked_at: float
    authority: str
    jobs: tuple[FetchJob, ...]


class Questions:
    """Unanswered acquires and renewals. A lease counts from the moment of asking."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._by_nonce: dict[int, _Question] = {}
        """The oldest first."""
        self.num_repeated = 0
        """Questions for fetches whose earlier question was not answered."""

    def __len__(self) -> int:
        return len(self._by_nonce)

    def ask(self, now: float, nonce: int, authority: str, jobs: Sequence[FetchJob]) -> None:
        self._by_nonce[nonce] = _Question(now, authority, tuple(jobs))
        self.num_repeated += any(job.is_asking for job in jobs)
        for job in jobs:
            job.asked_at, job.is_asking = now, True

    def answered(
        self, address: str, nonce: int, is_current: Callable[[FetchJob], bool]
    ) -> tuple[float, list[FetchJob]]:
        """When the question was asked, and for which fetches; only the asked address can answer."""
        question = self._by_nonce.get(nonce)
        if question is None or question.authority != address:
            return float("-inf"), []
        del self._by_nonce[nonce]
        jobs = [job for job in question.jobs if is_current(job)]
        for job in jobs:
            job.is_asking = False
        return question.asked_at, jobs

    def tick(self, now: float) -> None:
        """Forget questions whose answer would be too late."""
        while now >= self.next_deadline():
            del self._by_nonce[next(iter(self._by_nonce))]

    def next_deadline(self) -> float:
        oldest = next(iter(self._by_nonce.values()), None)
        return float("inf") if oldest is None else oldest.asked_at + self._timing.lease


@dataclass(slots=True)
class Settlement:
    handle: int
    to: str
    message: Settle
    until: float
    sent_at: float


class Settlements:
    """Unacknowledged settle messages, repeated while they can matter."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._by_attempt: dict[int, Settlement] = {}
        self.num_repeated = 0

    def __len__(self) -> int:
        return len(self._by_attempt)

    @property
    def addresses(self) -> set[str]:
        return {settlement.to for settlement in self._by_attempt.values()}

    def settle(self, now: float, job: FetchJob, message: Settle, seconds: float) -> list[Effect]:
        """Tell the authority that a fetch is over, for ``seconds`` or until acknowledged."""
        to = job.peer.authority
        self._by_attempt[job.attempt] = Settlement(job.handle, to, message, now + seconds, now)
        return [Send(to, message)]

    def acknowledged(self, address: str, ack: SettleAck) -> Settlement | None:
        """Remove and return what an authority acknowledges."""
        settlement = self._by_attempt.get(ack.attempt)
        if settlement is None or settlement.to != address:
            return None
        if (settlement.message.ticket_id, settlement.message.reader_rank) != (ack.ticket_id, ack.reader_rank):
            return None
        return self._by_attempt.pop(ack.attempt)

    def tick(self, now: float, is_gone: Callable[[str], object]) -> list[Effect]:
        """Repeat messages to reachable authorities, and drop expired ones."""
        self._by_attempt = {a: s for a, s in self._by_attempt.items() if now < s.until}
        effects: list[Effect] = []
        for settlement in self._by_attempt.values():
            if now >= settlement.sent_at + self._timing.retry:
                settlement.sent_at = now
                if not is_gone(settlement.to):
                    effects.append(Send(settlement.to, settlement.message))
                    self.num_repeated += 1
        return effects

    def next_deadline(self) -> float:
        retry = self._timing.retry
        return min((min(s.until, s.sent_at + retry) for s in self._by_attempt.values()), default=float("inf"))
