"""The demonstration over NIXL: two engines of real processes, and requests on their way between them.

Requests go in waves. While one wave is fetched, all of its requests at once, and checked, the next one is
written at the source. The last request goes alone, several times, in turns with NIXL itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from statistics import median

import kvferry
from kvferry.core.manifest import Manifest
from kvferry.core.request import BlockTable, need_of
from kvferry.core.span import Span, Spans
from kvferry.core.state import Addressing
from kvferry.errors import KVFerryError, SpecError
from kvferry.runtime import Report, Timing
from kvferry.testing.fleet import BlockPool, DestinationFleet, SourceFleet, WorkerDied, call_all
from kvferry.testing.fleet.measure import MeasuredDestination, Took
from kvferry.testing.pattern import Checked
from kvferry.wire.ticket import Ticket

WAVE = 3
"""Requests that are fetched together."""
TURNS = 7
"""How often the last request is moved, by kvferry and by NIXL alone; speeds are medians."""
TIMING = Timing(lease=30, meet=20, read=60, retry=0.2)
SETTLED_SECONDS = 10.0
"""How long leases and releases may take to settle when all is done."""
KEPT = "kept"
"""Salt of the pattern that stands for tokens which the destination has already."""

Step = Callable[[str], None]
"""Moves the progress bar on, and says what is done next."""
Tables = Mapping[str, BlockTable]


@dataclass(frozen=True)
class Passage:
    """One request that is to be moved."""

    request_id: str
    num_tokens: int
    num_kept: int = 0
    """How many first tokens the destination has already."""


@dataclass
class Speed:
    """How fast the last request went to one destination rank; times are medians of the turns."""

    dst_rank: int
    total_bytes: int
    num_runs: int
    num_sources: int
    post_ms: float
    """The engine's own time until all reads were submitted."""
    move_ms: float
    raw_post_ms: float
    """By NIXL alone, the same runs, until the posts returned."""
    raw_move_ms: float
    one_run_move_ms: float
    """By NIXL alone, the same bytes in one run per source rank."""

    def gigabytes_per_second(self, milliseconds: float) -> float:
        return self.total_bytes / milliseconds / 1e6 if milliseconds else 0.0


@dataclass
class Crossing:
    """The account of a demonstration."""

    model: str
    src: str
    dst: str
    device: str
    num_processes: int = 0
    num_requests: int = 0
    total_bytes: int = 0
    num_runs: int = 0
    plan_ms: float = 0.0
    """To plan, prove and lower, for all destination ranks."""
    meet_ms: float = 0.0
    """From the first call to a connected and planned peer, on the slowest rank."""
    speeds: list[Speed] = field(default_factory=list)
    num_cells: int = 0
    num_wrong: int = 0
    first_wrong: str = ""
    num_leases: int = 0
    """Leases that are outstanding at the end."""
    leaks: list[str] = field(default_factory=list)
    """Whatever did not come back."""
    failures: list[str] = field(default_factory=list)
    """Requests that were reported as failed, or what ended the demonstration."""

    @property
    def verdict(self) -> str:
        if self.num_wrong:
            return "wrong"
        return "failed" if self.failures else "leaked" if self.leaks else "verified"

    def count(self, passage: Passage, what: str, checked: Sequence[Checked]) -> None:
        """Add what was found at each destination rank."""
        for rank, one in enumerate(checked):
            self.num_cells += one.num_cells
            self.num_wrong += one.num_wrong
            if one.first and not self.first_wrong:
                self.first_wrong = f"{passage.request_id}: dst rank {rank}: {what}{one.first}"


def some_passages(dst: Manifest, num_requests: int, num_tokens: int) -> list[Passage]:
    """Requests of many lengths, every third with a prefix that is there already; the last one the longest."""
    whole_blocks = max(group.tokens_per_block for group in dst.groups)
    passages = []
    for number in range(1, num_requests):
        tokens = max(1, num_tokens - 37 * number * num_tokens // (37 * num_requests + 1))
        kept = tokens // 2 // whole_blocks * whole_blocks if number % 3 == 2 else 0
        passages.append(Passage(f"request-{number}", tokens, kept))
    return [*passages, Passage(f"request-{num_requests}", num_tokens)]


def room_for(passages: Sequence[Passage], num_waves: int) -> int:
    """How many requests of the greatest length so many waves take."""
    return min(len(passages), WAVE * num_waves)


def cross(
    crossing: Crossing,
    src: Manifest,
    dst: Manifest,
    passages: Sequence[Passage],
    env: Mapping[str, str],
    step: Step,
) -> None:
    """Start both engines, move and check everything, and stop them."""
    names = _planned(crossing, src, dst)
    _check_room(src, room_for(passages, 2), passages[-1].num_tokens)
    _check_room(dst, room_for(passages, 1), passages[-1].num_tokens)
    fleet = partial(DestinationFleet, actor=MeasuredDestination)
    with (
        closing(SourceFleet(src, timing=TIMING, device=crossing.device, env=env)) as source,
        closing(fleet(dst, timing=TIMING, device=crossing.device, env=env)) as destination,
    ):
        crossing.num_processes = len(source.workers()) + len(destination.workers())
        try:
            source.wait_whole()
            destination.wait_ready()
            step("moving and checking")
            ferry = _Ferry(crossing, source, destination, names, step)
            ferry.move(passages[:-1])
            ferry.measure(passages[-1])
            ferry.settle()
        except KVFerryError as error:
            crossing.failures.append(str(error))


def _planned(crossing: Crossing, src: Manifest, dst: Manifest) -> dict[str, str]:
    """Plan for every rank, as the ranks will, so that a refusal starts no process; the source's names."""
    if found := kvferry.compare(src, dst):
        raise kvferry.Refused(*found)
    names: dict[str, str] = {}
    started = time.perf_counter()
    for rank in dst.ranks:
        plan = kvferry.plan(src, dst, rank.rank)
        kvferry.lower(kvferry.prove(plan))
        names |= {state: plan.src_name(state) for state in plan.states}
    crossing.plan_ms = 1e3 * (time.perf_counter() - started)
    return names


def _check_room(manifest: Manifest, num_requests: int, num_tokens: int) -> None:
    pool = BlockPool(manifest)
    if not all(pool.take(num_tokens) for _ in range(num_requests)):
        raise SpecError(
            f"--{manifest.engine}: the pool has no room for {num_requests} requests of {num_tokens} tokens:"
            " blocks=N makes it larger"
        )


class _Ferry:
    """Moves requests between two engines, and keeps the account of it."""

    def __init__(
        self,
        crossing: Crossing,
        source: SourceFleet,
        destination: DestinationFleet,
        names: Mapping[str, str],
        step: Step,
    ) -> None:
        self._crossing, self._source, self._destination = crossing, source, destination
        self._names, self._step = names, step
        self._src_pool, self._dst_pool = BlockPool(source.manifest), BlockPool(destination.manifest, seed=1)
        self._out: dict[str, Tables] = {}
        """Source blocks of every request that was written and not given back, in that order."""
        self._released: set[str] = set()
        self._num_heard = [0] * len(source.ranks)
        self._num_offers = 0

    def move(self, passages: Sequence[Passage]) -> None:
        """Wave by wave; the next one is written while one is fetched and checked."""
        waves = list(_waves(passages))
        with ThreadPoolExecutor(1) as prefill:
            upcoming = [prefill.submit(self._prefill, wave) for wave in waves[:1]]
            for number, wave in enumerate(waves, 1):
                tickets = upcoming.pop().result()
                upcoming = [prefill.submit(self._prefill, after) for after in waves[number : number + 1]]
                self._serve(wave, tickets)

    # -- the source engine -------------------------------------------------------------------------

    def _prefill(self, wave: Sequence[Passage]) -> list[Ticket]:
        """Write a wave at the source, and offer it."""
        tickets = []
        for passage in wave:
            tables = self._blocks(passage)
            call_all(self._source.ranks, "fill", tables, passage.num_tokens, passage.request_id)
            tickets.append(self._offer(passage.request_id, tables, passage))
        return tickets

    def _offer(self, request_id: str, tables: Tables, passage: Passage) -> Ticket:
        self._num_offers += 1
        return self._source.offer(request_id, tables, passage.num_tokens)

    def _blocks(self, passage: Passage) -> Tables:
        """Blocks of the source, once there are some."""
        deadline = time.monotonic() + SETTLED_SECONDS
        while (tables := self._src_pool.take(passage.num_tokens)) is None:
            if time.monotonic() > deadline:
                raise WorkerDied(f"no blocks came back to the source within {SETTLED_SECONDS:g} s")
            self._take_back()
            time.sleep(0.01)
        self._out[passage.request_id] = tables
        return tables

    def _take_back(self) -> None:
        """The blocks of released requests, in the order in which they were written."""
        self._released |= {one.request_id for one in self._source.poll()}
        for request_id in [*self._out]:
            if request_id not in self._released:
                return
            self._src_pool.give_back(self._out.pop(request_id))

    # -- the destination engine --------------------------------------------------------------------

    def _serve(self, wave: Sequence[Passage], tickets: Sequence[Ticket]) -> None:
        """Fetch a wave, all at once; check each of its requests when it is in."""
        places = [self._place(passage) for passage in wave]
        fetches = [
            self._destination.fetch(ticket, tables, need, kept=kept)
            for ticket, (tables, need, kept) in zip(tickets, places, strict=True)
        ]
        for passage, place, handles in zip(wave, places, fetches, strict=True):
            reports = self._destination.wait(handles)
            if self._note(passage, reports):
                self._check(passage, *place)
            self._dst_pool.give_back(place[0])
            self._step("")

    def _place(self, passage: Passage) -> tuple[Tables, dict[str, Spans], dict[str, Spans]]:
        """Blocks, what is needed of the request, and what is there already, written now."""
        groups = self._destination.manifest.groups
        tables = self._dst_pool.take(passage.num_tokens)
        if tables is None:
            raise WorkerDied("the destination has no blocks left")
        need = {group.name: need_of(group, passage.num_tokens, passage.num_kept) for group in groups}
        kept: dict[str, Spans] = {
            group.name: (Span(0, passage.num_kept),)
            for group in groups
            if passage.num_kept and group.addressing is Addressing.TABLE
        }
        if kept:
            call_all(self._destination.ranks, "fill", tables, kept, KEPT)
        return tables, need, kept

    def _note(self, passage: Passage, reports: Sequence[Report]) -> bool:
        """Add the reports of one request, one per rank, to the account; whether all are good."""
        crossing = self._crossing
        crossing.num_requests += 1
        crossing.total_bytes += sum(report.record.num_bytes for report in reports)
        crossing.num_runs += sum(report.record.num_runs for report in reports)
        if crossing.num_requests == 1:
            crossing.meet_ms = max(1e3 * report.record.meet_seconds for report in reports)
        return not self._failures(passage, reports)

    def _failures(self, passage: Passage, reports: Sequence[Report]) -> list[str]:
        """Note the failures among the reports of one request."""
        failures = [
            f"{passage.request_id}: dst rank {rank}: {report.failure}"
            for rank, report in enumerate(reports)
            if report.failure
        ]
        self._crossing.failures += failures
        return failures

    def _check(
        self, passage: Passage, tables: Tables, need: Mapping[str, Spans], kept: Mapping[str, Spans]
    ) -> None:
        """Every needed cell, and every cell that was there already, by name, on every rank."""
        moved = self._destination.check(tables, need, self._names, passage.request_id)
        self._crossing.count(passage, "", moved)
        if kept:
            own = {name: name for name in self._names}
            self._crossing.count(passage, "kept ", self._destination.check(tables, kept, own, KEPT))

    # -- in turns with NIXL itself -----------------------------------------------------------------

    def measure(self, passage: Passage) -> None:
        """Move one request several times: by kvferry, by NIXL with the same runs, by NIXL in one run."""
        tables, place = self._blocks(passage), self._place(passage)
        call_all(self._source.ranks, "fill", tables, passage.num_tokens, passage.request_id)
        turns = [self._turn(passage, 0, tables, *place)]
        is_good = self._note(passage, turns[0].reports)
        while is_good and len(turns) <= TURNS:
            turns.append(self._turn(passage, len(turns), tables, *place))
            is_good = not self._failures(passage, turns[-1].reports)
        if is_good:
            self._check(passage, *place)
            self._crossing.speeds = _speeds(turns[1:])  # the first one set up what NIXL alone needs
        self._released.add(passage.request_id)  # it was offered under the names of its turns
        self._dst_pool.give_back(place[0])
        self._step("")

    def _turn(
        self,
        passage: Passage,
        number: int,
        tables: Tables,
        into: Tables,
        need: Mapping[str, Spans],
        kept: Mapping[str, Spans],
    ) -> _Turn:
        ranks = self._destination.ranks
        call_all(ranks, "start_watch")
        ticket = self._offer(f"{passage.request_id}, turn {number}", tables, passage)
        reports = self._destination.wait(self._destination.fetch(ticket, into, need, kept=kept), pause=0.02)
        if any(report.failure for report in reports):
            return _Turn(reports)
        return _Turn(
            reports,
            call_all(ranks, "post_seconds"),
            call_all(ranks, "raw_same_runs"),
            call_all(ranks, "raw_one_run"),
        )

    # -- the end -----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until everything came back; what did not is a leak."""
        deadline = time.monotonic() + SETTLED_SECONDS
        while (leaks := self._left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        self._crossing.leaks = leaks

    def _left(self) -> list[str]:
        self._take_back()
        for rank, released in enumerate(call_all(self._source.ranks, "poll")):
            self._num_heard[rank] += len(released)
        status = self._source.authority.call("status")
        self._crossing.num_leases = int(status["offered"]) + int(status["being_read"])
        counts = {
            "leases outstanding": self._crossing.num_leases,
            "source blocks not given back": self._src_pool.num_missing,
            "destination blocks not given back": self._dst_pool.num_missing,
        }
        for rank, num_heard in enumerate(self._num_heard):
            counts[f"releases that src rank {rank} did not hear of"] = self._num_offers - num_heard
        for rank, status in enumerate(call_all(self._destination.ranks, "status")):
            for what in ("in_flight", "quarantined"):
                counts[f"reads {what.replace('_', ' ')} at dst rank {rank}"] = int(status[what])
        return [f"{count} {what}" for what, count in counts.items() if count]


@dataclass(frozen=True)
class _Turn:
    """One turn of a measurement; every list has one entry per destination rank."""

    reports: Sequence[Report]
    post_seconds: Sequence[float] = ()
    same_runs: Sequence[Took] = ()
    one_run: Sequence[Took] = ()


def _speeds(turns: Sequence[_Turn]) -> list[Speed]:
    return [_speed(rank, turns) for rank in range(len(turns[0].reports))]


def _speed(rank: int, turns: Sequence[_Turn]) -> Speed:
    record = turns[0].reports[rank].record
    return Speed(
        rank,
        record.num_bytes,
        record.num_runs,
        record.num_sources,
        post_ms=1e3 * median(turn.post_seconds[rank] for turn in turns),
        move_ms=1e3 * median(turn.reports[rank].record.move_seconds for turn in turns),
        raw_post_ms=1e3 * median(turn.same_runs[rank].post_seconds for turn in turns),
        raw_move_ms=1e3 * median(turn.same_runs[rank].seconds for turn in turns),
        one_run_move_ms=1e3 * median(turn.one_run[rank].seconds for turn in turns),
    )


def _waves(passages: Sequence[Passage]) -> Iterator[list[Passage]]:
    rest = iter(passages)
    while wave := list(islice(rest, WAVE)):
        yield wave
