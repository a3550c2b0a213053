"""Which leases are asked for now: to one authority, only so many questions are open at a time.

A source that is asked for more than it can answer must not be asked for the same again and again, nor may
what it is told of good loads wait behind. So the rest waits here, where it costs nobody anything. The newest
ticket goes first: whoever waits longest has the least time left, and may be given up before an answer comes.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.runtime.fetch_job import FetchJob, Phase
from kvferry.runtime.values import Timing


@dataclass(slots=True)
class _Asked:
    job: FetchJob
    wait: float
    again_at: float


class AcquireQueue:
    """Fetches without a lease, by authority. One that has its lease, or has failed, leaves by itself."""

    MAX_UNANSWERED = 128
    """Per authority: enough that it is never idle, and answered within a fraction of a second."""
    MAX_WAIT = 4
    """A question is repeated after the time that lost messages are repeated after, then after twice as long,
    up to this many times as long: who does not answer is busy, rather than deaf."""

    def __init__(self, timing: Timing) -> None:
        self._retry = timing.retry
        self._asked: dict[str, dict[int, _Asked]] = {}
        self._waiting: dict[str, list[FetchJob]] = {}

    def add(self, job: FetchJob) -> None:
        """It wants a lease."""
        self._waiting.setdefault(job.peer.authority, []).append(job)

    def due(self, now: float, address: str) -> list[FetchJob]:
        """For whom the authority at an address is to be asked now."""
        asked = {h: each for h, each in self._asked.pop(address, {}).items() if _is_wanted(each.job)}
        waiting = self._waiting.pop(address, [])
        due = [self._again(now, each) for each in asked.values() if now >= each.again_at]
        while waiting and len(asked) < self.MAX_UNANSWERED:
            if _is_wanted(job := waiting.pop()):
                asked[job.handle] = _Asked(job, self._retry, now + self._retry)
                due.append(job)
        if asked:
            self._asked[address] = asked
        if waiting:
            self._waiting[address] = waiting
        return due

    def _again(self, now: float, asked: _Asked) -> FetchJob:
        asked.wait = min(2 * asked.wait, self.MAX_WAIT * self._retry)
        asked.again_at = now + asked.wait
        return asked.job

    def tick(self, now: float) -> list[FetchJob]:
        """For whom somebody is to be asked now; those who want no lease any more are forgotten."""
        for address, jobs in self._waiting.items():
            self._waiting[address] = [job for job in jobs if _is_wanted(job)]
        return [job for address in {**self._asked, **self._waiting} for job in self.due(now, address)]

    def next_deadline(self) -> float:
        """When ``tick`` has something to do at the latest."""
        return min(
            (e.again_at for asked in self._asked.values() for e in asked.values() if _is_wanted(e.job)),
            default=float("inf"),
        )


def _is_wanted(job: FetchJob) -> bool:
    return job.phase is Phase.LEASING
