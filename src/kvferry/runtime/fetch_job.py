"""One fetch in progress, and the deadlines of its phases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvferry.core.manifest import Manifest
from kvferry.core.span import Span, Spans, intersect, normal, subtract
from kvferry.core.state import Addressing, Tail
from kvferry.runtime.failure import Failure
from kvferry.runtime.values import Fetch, Peer, Record, Timing
from kvferry.wire.messages import Outcome
from kvferry.wire.ticket import Ticket

PART_TOKENS = 256
"""Parts of a load start at multiples of this: no cell of a group that is read in parts crosses one."""


def groups_in_parts(manifest: Manifest, rank: int) -> frozenset[str]:
    """The groups that can be read in parts: they keep all tokens, and parts share no cell."""
    uneven = {
        view.group
        for view in manifest.rank(rank).views
        if (state := manifest.state_by_name[view.state]).tail is Tail.PARTIAL
        and PART_TOKENS % state.tokens_per_cell
    }
    tables = [group for group in manifest.groups if group.addressing is Addressing.TABLE]
    return frozenset(group.name for group in tables if not group.window and group.name not in uneven)


class Phase(StrEnum):
    LEASING = "leasing"
    MEETING = "meeting"
    HOLDING = "holding"
    """Leased and met; waiting for destination blocks, or for more tokens to read."""
    SELECTING = "selecting"
    READING = "reading"
    CHECKING = "checking"
    """All bytes are in; comparing digests with the source."""
    CONFIRMING = "confirming"
    """All bytes are in; waiting for the authority to confirm the lease."""
    FAILING = "failing"
    """Failed or aborted; waiting for posted reads to end."""
    QUARANTINED = "quarantined"


_LEASED = (Phase.MEETING, Phase.HOLDING, Phase.SELECTING, Phase.READING, Phase.CHECKING)
"""Phases that need a lease."""


@dataclass(slots=True, eq=False)
class FetchJob:
    handle: int
    ticket: Ticket
    fetch: Fetch | None
    """None while the ticket is only held."""
    peer: Peer
    attempt: int
    """Unique per fetch: late messages must not affect a later fetch of the same ticket."""
    fingerprint: bytes
    """Of its ticket."""
    token: bytes
    """Identifies this rank to the authority."""
    started: float
    met_at: float
    posted_at: float
    ended_at: float
    phase: Phase = Phase.LEASING
    step_at: float = float("-inf")
    """When selecting or reading began."""
    covered_until: float = float("-inf")
    """End of the lease by our clock; no read is posted later."""
    asked_at: float = float("-inf")
    """When the last acquire or renewal was sent."""
    is_asking: bool = False
    """Whether that is unanswered."""
    clear: int = 0
    """Transfer number of the zeroing of its slack; 0 before its reads are posted."""
    in_flight: set[int] = field(default_factory=set)
    """Transfers that may still write to its blocks."""
    checked_at: float = float("-inf")
    """When its digest was compared."""
    digest: str = ""
    proofs: Mapping[int, bytes] = field(default_factory=dict)
    """From the grant, for packed reads."""
    is_early: bool = False
    """Granted before all source ranks had joined: some proofs are missing."""
    board: str = ""
    """From the grant: the lease board, if it has one."""
    mark: bytes = b""
    """The mark of the lease on it."""
    is_open: bool = False
    """Whether more tokens may be added."""
    todo: Spans = ()
    """Unread tokens of groups that are read in parts."""
    reading: Spans = ()
    done: Spans = ()
    is_cut: bool = False
    """Whether the part being read ends where the source's prefill is."""
    finished_at: float = float("-inf")
    """When ``finish`` was called."""
    can_part: bool = True
    """Whether parts of it can be read while its lease grows."""
    watch: int = 0
    """Nonce of the unanswered ``Watch``; 0: none."""
    watched_at: float = float("-inf")
    grown_at: float = float("-inf")
    is_settled: bool = False
    """The authority is being told how it ended, or holds nothing for it."""
    failure: Failure | None = None
    plan_seconds: float = 0.0
    num_bytes: int = 0
    early_bytes: int = 0
    num_runs: int = 0
    num_sources: int = 0
    way: str = ""

    def __post_init__(self) -> None:
        if self.fetch is not None:
            self.supply(self.fetch)

    @property
    def is_growing(self) -> bool:
        """Whether the source still computes the prompt, and the destination blocks are known."""
        return self.ticket.is_growing and self.fetch is not None

    def supply(self, fetch: Fetch) -> None:
        self.fetch, self.todo, self.is_open = fetch, fetch.tokens, fetch.is_open

    def next_part(self) -> Fetch | None:
        """The next part that can be read now; None if there is none."""
        if self.fetch is None:
            return None
        written = max(0, min(self.ticket.num_complete, self.fetch.early_stop)) // PART_TOKENS * PART_TOKENS
        tokens = intersect(self.todo, (Span(0, written),)) if self.ticket.is_growing else self.todo
        part, is_cut = self.fetch.part(tokens), tokens != self.todo
        if not tokens or (is_cut and not (self.can_part and any(part.need.values()))):
            return None
        self.reading, self.is_cut = tokens, is_cut
        return part

    def take_in(self) -> None:
        self.todo, self.done = subtract(self.todo, self.reading), normal((*self.done, *self.reading))

    @property
    def key(self) -> tuple[Peer, bytes]:
        """Identifies the ticket; its number alone does not, since a forged ticket may repeat it."""
        return self.peer, self.fingerprint

    @property
    def has_posted(self) -> bool:
        return self.clear > 0

    @property
    def is_leased(self) -> bool:
        return self.phase in _LEASED

    @property
    def is_waiting(self) -> bool:
        """Whether it is before a read."""
        return self.phase in (Phase.LEASING, Phase.MEETING, Phase.HOLDING, Phase.SELECTING)

    @property
    def is_using_peer(self) -> bool:
        """Whether its peer must not be dropped; a quarantined read does not prevent that."""
        return self.phase is Phase.SELECTING or (bool(self.in_flight) and self.phase is not Phase.QUARANTINED)

    def patience(self, timing: Timing) -> float:
        """How long to repeat a message: the ticket's lease, bounded."""
        return min(self.ticket.lease_ms / 1000, timing.read)

    def ask_at(self, timing: Timing) -> float:
        """When to renew the lease; earlier if the last renewal was not answered."""
        if not self.is_leased:
            return float("inf")
        third = self.ticket.lease_ms / 3000
        return self.asked_at + (min(third, timing.retry) if self.is_asking else third)

    def watch_at(self, timing: Timing) -> float:
        """When to ask, or ask again, whether the lease has grown."""
        is_watched = self.is_growing and self.is_leased and not self.is_early
        return self.watched_at + timing.retry if is_watched else float("inf")

    def give_up_at(self, timing: Timing) -> float:
        """When its phase times out; a held request never does."""
        match self.phase:
            case Phase.LEASING | Phase.MEETING:
                return self.started + timing.meet  # or later, if the meeting makes progress
            case Phase.SELECTING:
                return self.step_at + timing.meet
            case Phase.READING | Phase.FAILING:
                return self.step_at + timing.read
            case Phase.CHECKING:
                return self.whole_at + timing.read
            case Phase.CONFIRMING:
                return self.confirming_from + self.patience(timing)
            case Phase.HOLDING if self.is_growing:
                return self.grown_at + timing.read
            case Phase.HOLDING | Phase.QUARANTINED:
                return float("inf")

    @property
    def whole_at(self) -> float:
        """When the last byte was in."""
        return max(self.ended_at, self.finished_at)

    @property
    def confirming_from(self) -> float:
        """When confirming began."""
        return max(self.whole_at, self.checked_at)

    def record(self, now: float, outcome: Outcome) -> Record:
        return Record(
            request_id=self.ticket.request_id,
            engine=self.peer.engine,
            address=self.peer.authority,
            num_bytes=self.num_bytes,
            early_bytes=self.early_bytes,
            num_runs=self.num_runs,
            num_sources=self.num_sources,
            meet_seconds=self.met_at - self.started,
            plan_seconds=self.plan_seconds,
            post_seconds=self.posted_at - self.met_at if self.has_posted else 0.0,
            move_seconds=self.ended_at - self.posted_at,
            digest_seconds=max(0.0, self.checked_at - self.whole_at),
            digest=self.digest,
            confirm_seconds=now - self.confirming_from if self.phase is Phase.CONFIRMING else 0.0,
            total_seconds=now - self.started,
            way=self.way,
            outcome=(self.failure.code if self.failure else outcome).value,
            detail=self.failure.detail if self.failure else "",
        )


# The number of unanswered acquires per authority is bounded: repeats must not overload a busy source, nor
# delay messages of other loads. The newest ticket goes first: the oldest will probably time out anyway.


@dataclass(slots=True)
class _Asked:
    job: FetchJob
    wait: float
    again_at: float


class AcquireQueue:
    """Fetches without a lease, by authority. They leave once they have a lease or have failed."""

    MAX_UNANSWERED = 128
    """Per authority."""
    MAX_WAIT = 4
    """Maximum backoff of repeats, as a multiple of ``Timing.retry``."""

    def __init__(self, timing: Timing) -> None:
        self._retry = timing.retry
        self._asked: dict[str, dict[int, _Asked]] = {}
        self._waiting: dict[str, list[FetchJob]] = {}

    def add(self, job: FetchJob) -> None:
        self._waiting.setdefault(job.peer.authority, []).append(job)

    def due(self, now: float, address: str) -> list[FetchJob]:
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
        """The fetches to send an acquire for now."""
        for address, jobs in self._waiting.items():
            self._waiting[address] = [job for job in jobs if _is_wanted(job)]
        return [job for address in {**self._asked, **self._waiting} for job in self.due(now, address)]

    def next_deadline(self) -> float:
        return min(
            (e.again_at for asked in self._asked.values() for e in asked.values() if _is_wanted(e.job)),
            default=float("inf"),
        )


def _is_wanted(job: FetchJob) -> bool:
    return job.phase is Phase.LEASING
