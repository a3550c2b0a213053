"""The nine laws of DESIGN, watched from outside: by what is written, sent, released and reported.

Nothing here looks into a machine. Whoever changes how the machines work changes nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from kvferry.core.span import Spans
from kvferry.errors import SpecError
from kvferry.runtime import Failure, FailureCode, Released, Report
from kvferry.wire.messages import Grant, Renewal, decode_from_authority
from kvferry.wire.ticket import Ticket
from tests.support.simulation.cells import WORD_BYTES, Content, Indices, NamedMemory, Placed
from tests.support.simulation.fabric import OUT_OF_ORDER, SimulatedRead
from tests.support.simulation.process import SimulatedProcess
from tests.support.simulation.timeline import SimulatedClock, Timeline
from tests.support.simulation.trace import Trace

LAW_BROKEN = "LAW BROKEN"
"""Who is said to have done it, in a trace."""
MAX_FINDINGS = 20
"""What is found after so many is not told any more."""


class Law(StrEnum):
    """Which promise was broken; the numbers are DESIGN's."""

    TILING = "1 tiling"
    OWNERSHIP = "2 ownership"
    COVERAGE = "3 coverage"
    REFUSAL = "4 refusal"
    FAIL_CLOSED = "5 fail closed"
    QUIESCENCE = "6 quiescence"
    FENCING = "7 fencing"
    LIVENESS = "8 liveness"
    ACCOUNT = "9 account"


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken promise."""

    law: Law
    when: float
    text: str

    def __str__(self) -> str:
        return f"law {self.law.value}, at {self.when:.4f} s: {self.text}"


@dataclass(eq=False)
class SimulatedRequest:
    """A request of a source engine, from its offer to its release."""

    number: int
    request_id: str
    content: Content
    generation: int
    ticket: Ticket
    placed: Placed
    is_trusted: bool
    """Whether its source tells the truth: only then can a load of it be expected to be right."""
    fits: bool
    """Whether its source runs the model that the destinations run."""
    source: Sequence[SimulatedProcess]
    """The processes that it was offered by."""
    is_pinned: bool = True
    """Whether its blocks are its source's again when it is released: not while they are written to."""
    is_revoked: bool = False
    """Whether its blocks were taken away without asking its readers."""
    promised_until: float = float("-inf")
    """The latest deadline that its authority has granted, by the authority's clock."""
    over_at: float = float("inf")
    """When its blocks were given away: it was released, or its source started anew."""
    releases: list[str] = field(default_factory=list)
    loads: list[SimulatedLoad] = field(default_factory=list)
    winners: set[str] = field(default_factory=set)
    """The starts of engines that have loaded it."""

    @property
    def is_served(self) -> bool:
        """Whether all that it needs of its source is there, as it was when it was offered."""
        return self.is_trusted and all(process.is_alive for process in self.source)


@dataclass(eq=False)
class SimulatedLoad:
    """One engine's attempt to load a request."""

    request: SimulatedRequest
    ticket: Ticket
    reader: str
    """Which start of which engine."""
    is_held: bool
    """Whether its ticket is held while it waits for blocks."""
    is_forged: bool
    must_succeed: bool
    """Whether nothing is in its way: both engines are healthy, and nobody changes his mind."""
    began_at: float
    placed: Placed | None = None
    need: dict[str, Spans] = field(default_factory=dict)
    kept: dict[str, Spans] = field(default_factory=dict)
    ranks: list[RankLoad] = field(default_factory=list)
    after: Callable[[SimulatedLoad], None] = lambda load: None
    """What its engine does when it is over."""

    @property
    def is_over(self) -> bool:
        """Whether every rank has reported."""
        return all(rank.report is not None for rank in self.ranks)


@dataclass(eq=False)
class RankLoad:
    """One rank's part of a load."""

    number: int
    """The owner of its blocks."""
    load: SimulatedLoad
    rank: int
    process: SimulatedProcess
    memory: NamedMemory
    handle: int | None = None
    is_supplied: bool = False
    report: Report | None = None
    reads: list[SimulatedRead] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.load.request.request_id} at {self.process.name}"


class Laws:
    """Sees everything, and notes what must not be."""

    def __init__(self, timeline: Timeline, trace: Trace) -> None:
        self._timeline, self._trace = timeline, trace
        self.violations: list[Violation] = []
        self.by_owner: dict[int, RankLoad] = {}
        self.num_good = 0
        self.num_failed = 0
        self.num_early = 0
        """Good loads of which a part was read before their prompts were computed."""
        self.num_cells = 0
        """Cells that were looked at."""

    def broken(self, law: Law, text: str) -> None:
        """Note a broken promise."""
        if len(self.violations) < MAX_FINDINGS:
            self.violations.append(Violation(law, self._timeline.now, text))
            self._trace.add(LAW_BROKEN, law.value, text)

    # -- the fabric --------------------------------------------------------------------------------

    def submitted(self, read: SimulatedRead) -> None:
        """A rank hands a read to the fabric."""
        if not len(read.dst_words):
            return
        rank_load = self.by_owner.get(read.load)
        if rank_load is None:
            self.broken(Law.OWNERSHIP, f"{read.reader.process.name} reads into blocks that are nobody's")
            return
        rank_load.reads.append(read)
        if (read.reader.memory.owners[read.dst_words] != read.load).any():
            self.broken(Law.OWNERSHIP, f"a read of {rank_load} is aimed at blocks of others")
        if not rank_load.load.request.fits:
            self.broken(Law.REFUSAL, f"{rank_load} reads from an engine that it cannot be served by")

    def writes(self, read: SimulatedRead, dst_words: Indices) -> None:
        """Words of a read arrive."""
        if (read.reader.memory.owners[dst_words] != read.load).any():
            whose = self.by_owner.get(read.load)
            text = f"bytes of {whose} arrive after its blocks were handed back"
            self.broken(Law.QUIESCENCE, text)

    # -- source engines ----------------------------------------------------------------------------

    def promised(self, requests: dict[int, SimulatedRequest], clock: SimulatedClock, data: bytes) -> None:
        """An authority sends something: remember for how long it promises what."""
        try:
            message = decode_from_authority(data)
        except SpecError:
            return
        match message:
            case Grant():
                ticket_ids: tuple[int, ...] = (message.ticket_id,)
            case Renewal():
                ticket_ids = message.kept
            case _:
                return
        until = clock.read() + message.lease_ms / 1000
        for ticket_id in ticket_ids:
            if request := requests.get(ticket_id):
                request.promised_until = max(request.promised_until, until)

    def released(self, who: str, request: SimulatedRequest | None, released: Released, now: float) -> bool:
        """An authority gives blocks back; whether they are a request's of its own."""
        if request is None or request.releases:
            why = "never offered" if request is None else "released before"
            self.broken(Law.QUIESCENCE, f"{who} releases {released.request_id!r}, which was {why}")
            return False
        request.releases.append(released.reason)
        if not request.is_pinned and not request.is_revoked:
            return True  # it is still being computed
        request.over_at = min(request.over_at, self._timeline.now)
        if released.reason == "expired":
            if now < request.promised_until - 1e-6:
                left = request.promised_until - now
                text = f"{who} ends the lease of {request.request_id} {left:.3f} s before its deadline"
                self.broken(Law.FENCING, text)
            return True
        for load in [] if request.is_revoked else request.loads:
            for rank in load.ranks:
                if rank.process.is_alive and any(not read.has_ended for read in rank.reads):
                    text = f"{who} releases {request.request_id} ({released.reason}) in the middle of a read"
                    self.broken(Law.QUIESCENCE, text)
                    return True
        return True

    # -- destination engines -----------------------------------------------------------------------

    def reported(self, rank_load: RankLoad, report: Report) -> None:
        """A rank says that a load is over."""
        if rank_load.report is not None:
            self.broken(Law.FAIL_CLOSED, f"{rank_load} is reported twice")
            return
        rank_load.report = report
        if any(not read.has_ended for read in rank_load.reads):
            self.broken(Law.QUIESCENCE, f"{rank_load} is reported while a read of it is under way")
        self._check_record(rank_load, report)
        if report.failure is None:
            self.num_good += 1
            self.num_early += report.record.early_bytes > 0
            self._check_success(rank_load, report)
        else:
            self.num_failed += 1
            self._check_failure(rank_load, report.failure)

    def _check_failure(self, rank_load: RankLoad, failure: Failure) -> None:
        load = rank_load.load
        if load.must_succeed:
            self.broken(Law.LIVENESS, f"{rank_load} fails between two healthy engines: {failure}")
        if failure.code is FailureCode.DIGEST_DIFFERS and self._is_whole(rank_load):
            self.broken(Law.LIVENESS, f"{rank_load} fails by a false alarm: {failure}")
        is_ours = any(text in failure.detail for text in OUT_OF_ORDER)
        if is_ours and not load.is_forged and load.request.is_served:
            self.broken(Law.LIVENESS, f"{rank_load} fails, though its source is there: {failure}")

    def _is_whole(self, rank_load: RankLoad) -> bool:
        """Whether it has the bytes that its source still holds."""
        request = rank_load.load.request
        is_held = request.is_trusted and request.over_at > self._timeline.now
        return is_held and not any(read.is_wrong for read in rank_load.reads)

    def _check_record(self, rank_load: RankLoad, report: Report) -> None:
        record, failure = report.record, report.failure
        named = (record.request_id, record.engine)
        if named != (rank_load.load.ticket.request_id, rank_load.load.ticket.engine):
            self.broken(Law.ACCOUNT, f"the record of {rank_load} is that of {named}")
        parts = (record.meet_seconds, record.post_seconds, record.move_seconds)
        if min(parts) < 0 or sum(parts) > record.total_seconds + 1e-6:
            self.broken(Law.ACCOUNT, f"the times of {rank_load} do not add up: {record}")
        if not 0 <= record.early_bytes <= record.num_bytes:
            self.broken(Law.ACCOUNT, f"more of {rank_load} was read early than in all: {record}")
        if record.outcome != ("read" if failure is None else failure.code.value):
            self.broken(Law.ACCOUNT, f"the record of {rank_load} says {record.outcome}, its report {failure}")
        if failure is not None and failure.code is FailureCode.UNEXPECTED:
            self.broken(Law.FAIL_CLOSED, f"{rank_load} fails with no reason that anybody foresaw: {failure}")

    def _check_success(self, rank_load: RankLoad, report: Report) -> None:
        load, request = rank_load.load, rank_load.load.request
        if load.is_forged or load.placed is None or not rank_load.is_supplied:
            self.broken(Law.FAIL_CLOSED, f"{rank_load} is loaded, by a forged ticket or without blocks")
            return
        if not request.fits:
            self.broken(Law.REFUSAL, f"{rank_load} is loaded from an engine of another model")
            return
        self._check_tiling(rank_load, report)
        if not request.is_trusted:
            return
        memory, placed = rank_load.memory, load.placed
        num_wrong = memory.num_wrong(placed, request.content, load.need)
        if num_wrong:
            text = f"{rank_load} is reported as good with {num_wrong} wrong cells"
            was_over = any(request.over_at < read.ended_at for read in rank_load.reads)
            self.broken(Law.FENCING if was_over else Law.COVERAGE, text)
        request.winners.add(load.reader)
        if len(request.winners) > 1:
            self.broken(Law.FENCING, f"{request.request_id} is loaded by {sorted(request.winners)}")

    def _check_tiling(self, rank_load: RankLoad, report: Report) -> None:
        load, memory = rank_load.load, rank_load.memory
        assert load.placed is not None
        written = np.concatenate([np.zeros(0, np.int64), *(read.dst_words for read in rank_load.reads)])
        self.num_cells += len(written)
        if len(np.unique(written)) != len(written):
            self.broken(Law.TILING, f"{rank_load}: a cell is written twice")
        if any(read.num_moved != len(read.dst_words) for read in rank_load.reads):
            self.broken(Law.COVERAGE, f"{rank_load} is loaded, though not every word of it arrived")
        kept = Content(-load.request.number, load.request.content.num_tokens)
        if memory.num_wrong(load.placed, kept, load.kept):
            self.broken(Law.TILING, f"{rank_load}: cells that were there already are written")
        if num_stale := memory.num_stale(load.placed):
            self.broken(Law.TILING, f"{rank_load}: {num_stale} cells of its blocks are left stale")
        num_bytes = sum(len(read.dst_words) for read in rank_load.reads if read.source) * WORD_BYTES
        if report.record.num_bytes != num_bytes:
            text = f"the record of {rank_load} has {report.record.num_bytes} bytes, the fabric {num_bytes}"
            self.broken(Law.ACCOUNT, text)
