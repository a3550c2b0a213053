"""What an authority passes on between readers that ask for a digest and the ranks that take it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count

from kvferry.runtime.lease import Lease
from kvferry.runtime.values import Send, SourceEffect
from kvferry.wire.messages import DigestAnswer, DigestRequest, DigestResult, DigestTask


@dataclass(frozen=True, slots=True)
class _Passed:
    number: int
    rank_at: str
    """Where the rank is that was asked."""


class DigestRelay:
    """Who waits for which rank's digest. A question that is repeated is passed on again under its number."""

    MAX_WAITING = 1024
    """Questions that were passed on and not answered; the oldest is forgotten first, and asked again."""

    def __init__(self, generation: int) -> None:
        self._generation = generation
        self._numbers = count(1)
        self._waiting: dict[tuple[str, int], _Passed] = {}
        """By where the answer goes, and the nonce of the question; the oldest first."""

    def __len__(self) -> int:
        return len(self._waiting)

    def ask(
        self, reply_to: str, ask: DigestRequest, lease: Lease | None, ranks: Mapping[int, str]
    ) -> list[SourceEffect]:
        """A reader asks; ``ranks`` says where each rank of this engine is."""
        reading = lease.reading if lease is not None and ask.generation == self._generation else None
        is_held = reading is not None and reading.is_held(ask.reader, ask.reader_rank, ask.token)
        if lease is None or not is_held:
            return [Send(reply_to, DigestAnswer(ask.nonce, detail="the source holds no lease for this read"))]
        if ask.src_rank not in ranks:
            return [Send(reply_to, DigestAnswer(ask.nonce, detail="the source has no such rank now"))]
        key = reply_to, ask.nonce
        known = self._waiting.pop(key, None)
        passed = _Passed(known.number if known else next(self._numbers), ranks[ask.src_rank])
        while len(self._waiting) >= self.MAX_WAITING:
            del self._waiting[next(iter(self._waiting))]
        self._waiting[key] = passed
        task = DigestTask(self._generation, passed.number, lease.ticket.tables, ask.question, ask.ticket_id)
        return [Send(passed.rank_at, task)]

    def answer(self, reply_to: str, result: DigestResult) -> list[SourceEffect]:
        """A rank answers; only the one that was asked can."""
        for (reader_at, nonce), passed in self._waiting.items():
            if (passed.number, passed.rank_at) == (result.number, reply_to):
                if result.generation != self._generation:
                    break
                del self._waiting[reader_at, nonce]
                return [Send(reader_at, DigestAnswer(nonce, result.sums, result.detail))]
        return []
