"""The demonstrations: requests move in this process, or between engines of processes, and are checked.

Between processes requests go in waves: all of a wave are offered, fetched at once, and checked. The last
request goes alone, several times, which gives the speeds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from statistics import median

import kvferry
from kvferry import BlockTable, KVFerryError, Manifest, Span, SpecError
from kvferry.cli.demo.engines import (
    BlockPool,
    DestinationProcess,
    Pair,
    RankCells,
    Sample,
    SourceProcess,
    some_samples,
)
from kvferry.cli.demo.report import DemoResult, Speed
from kvferry.cli.output import Step, num_bytes
from kvferry.cli.processes import Worker, call_all, until
from kvferry.core.sample import Placement, sample_request
from kvferry.core.words import counted
from kvferry.endpoint import SourceEngine
from kvferry.pattern import KEPT
from kvferry.runtime import Report, Timing
from kvferry.transport.cuda import has_cuda
from kvferry.transport.settings import CUDA_ENVIRONMENT
from kvferry.wire.ticket import Ticket

MAX_MEMORY = 4 << 30
"""Bytes that the two engines may take together."""


def _memory_bytes(*manifests: Manifest) -> int:
    return sum(region.num_bytes for each in manifests for rank in each.ranks for region in rank.regions)


def _check_memory(*manifests: Manifest) -> None:
    total = _memory_bytes(*manifests)
    if total > MAX_MEMORY:
        raise SpecError(
            f"the two engines would take {num_bytes(total)} of memory, more than {num_bytes(MAX_MEMORY)}:"
            " fewer --tokens, --layers or ranks take less"
        )


def _routes(result: DemoResult, src: Manifest, dst: Manifest) -> list[kvferry.Route]:
    """Plan for every destination rank, as the ranks themselves do."""
    if found := kvferry.compare(src, dst):
        raise kvferry.Refused(*found)
    started = time.perf_counter()
    routes = [kvferry.lower(kvferry.prove(kvferry.plan(src, dst, rank.rank))) for rank in dst.ranks]
    result.plan_ms = 1e3 * (time.perf_counter() - started)
    return routes


def _src_names(plan: kvferry.Plan) -> dict[str, str]:
    return {state: plan.src_name(state) for state in plan.states}


# -- in memory -------------------------------------------------------------------------------------


def demonstrate_in_memory(pair: Pair, num_requests: int, num_tokens: int, step: Step) -> DemoResult:
    """Plan every destination rank once, then move and check each request."""
    src, dst = (pair.manifest(side, num_tokens, num_requests=2) for side in ("src", "dst"))
    _check_memory(src, dst)
    result = DemoResult(pair.model, pair.src, pair.dst)
    routes = _routes(result, src, dst)
    for number, sample in enumerate(some_samples(dst, num_requests, num_tokens)):
        placement = Placement.CONSECUTIVE if number % 2 else Placement.SCATTERED
        request = sample_request(src, dst, sample.num_tokens, num_kept=sample.num_kept, placement=placement)
        sources = {rank.rank: RankCells(src, rank.rank) for rank in src.ranks}
        for source in sources.values():
            source.fill_all(request.src, sample.num_tokens)
        for route in routes:
            cells = RankCells(dst, route.plan.dst_rank)
            cells.fill(request.dst, request.kept, KEPT)
            _move(result, route, request, sources, cells)
            names = _src_names(route.plan)
            result.count(sample, "", cells.rank, cells.check(request.dst, request.need, names))
            kept = cells.check(request.dst, request.kept, {name: name for name in names}, KEPT)
            result.count(sample, "kept ", cells.rank, kept)
        result.num_requests += 1
        step("")
    return result


def _move(
    result: DemoResult,
    route: kvferry.Route,
    request: kvferry.Request,
    sources: Mapping[int, RankCells],
    cells: RankCells,
) -> None:
    started = time.perf_counter()
    selection = kvferry.select(route, request)
    selected = time.perf_counter()
    dst = cells.memory
    for src_rank, runs in selection.reads.items():
        src = sources[src_rank].memory
        for src_region, src_start, dst_region, dst_start, length in runs:
            dst.read(dst_start, length, dst_region)[:] = src.read(src_start, length, src_region)
    for _, _, region, start, length in selection.zeros:
        dst.clear(start, length, region)
    result.select_ms += 1e3 * (selected - started)
    result.copy_ms += 1e3 * (time.perf_counter() - selected)
    result.num_runs += selection.num_runs
    result.total_bytes += selection.total_bytes


# -- between processes -----------------------------------------------------------------------------

WAVE = 3
"""Requests that are fetched together."""
TURNS = 7
"""How often the last request is moved; speeds are medians."""
SETTLED_SECONDS = 10.0
"""How long leases and releases may take to settle when all is done."""
MAX_PROCESSES = 64
DEFAULT_TOKENS = 8000
DEMO_TIMING = Timing(lease=30, meet=20, read=60, retry=0.2)
LEASES = "leases outstanding"


def demonstrate_between_processes(
    pair: Pair, num_requests: int, num_tokens: int | None, device: str, step: Step
) -> DemoResult:
    src, dst, num_tokens = _engines(pair, num_requests, num_tokens)
    if device == "cuda" and not has_cuda():
        raise SpecError("--device cuda: this machine has no CUDA driver, or no device that it can use")
    result = DemoResult(pair.model, pair.src, pair.dst, device=device)
    names: dict[str, str] = {}
    for route in _routes(result, src, dst):  # a refusal starts no process
        names |= _src_names(route.plan)
    samples = some_samples(dst, num_requests, num_tokens)
    with closing(DemoTransfers(result, src, dst, names, step)) as transfers:
        try:
            transfers.wait_ready()
            step("moving and checking")
            for first in range(0, len(samples) - 1, WAVE):
                transfers.move(samples[:-1][first : first + WAVE])
            transfers.measure(samples[-1])
            transfers.settle()
        except KVFerryError as error:
            result.failures.append(str(error))
    return result


def _engines(pair: Pair, num_requests: int, tokens: int | None) -> tuple[Manifest, Manifest, int]:
    """Both engines with room for two waves and for one, and the tokens of the longest request."""
    room = {"src": min(num_requests, 2 * WAVE), "dst": min(num_requests, WAVE)}
    num_tokens = tokens or DEFAULT_TOKENS
    while True:
        src, dst = (pair.manifest(side, num_tokens, number + 1) for side, number in room.items())
        if tokens is not None or num_tokens == 1 or _memory_bytes(src, dst) <= MAX_MEMORY:
            break
        num_tokens //= 2  # the default is too long for this model
    _check_memory(src, dst)
    if len(src.ranks) + len(dst.ranks) >= MAX_PROCESSES:
        raise SpecError(f"each rank is a process; at most {MAX_PROCESSES} are started")
    for manifest in (src, dst):
        pool, number = BlockPool(manifest), room[manifest.engine]
        if not all(pool.take(num_tokens) for _ in range(number)):
            wanted = f"room for {counted(number, 'request')} of {num_tokens} tokens"
            raise SpecError(f"--{manifest.engine}: the pool has no {wanted}: blocks=N makes it larger")
    return src, dst, num_tokens


class DemoTransfers:
    """Two engines, each rank a process; moves requests from one to the other, and notes the results."""

    def __init__(
        self, result: DemoResult, src: Manifest, dst: Manifest, src_names: Mapping[str, str], step: Step
    ) -> None:
        self._result, self._src_names, self._step, self._groups = result, src_names, step, dst.groups
        self._src_pool, self._dst_pool = BlockPool(src), BlockPool(dst, seed=1)
        self._out: dict[str, Mapping[str, BlockTable]] = {}
        """The source blocks of requests that are to be released."""
        self._engine = SourceEngine(src.engine, len(src.ranks), timing=DEMO_TIMING)
        device, env = result.device, CUDA_ENVIRONMENT if result.device == "cuda" else {}
        invitation, reader = self._engine.invitation, f"{dst.engine}#{time.time_ns()}"
        self.sources = [
            Worker(f"src-{one.rank}", SourceProcess, src, one.rank, invitation, device, env=env)
            for one in src.ranks
        ]
        self._destinations = [
            Worker(f"dst-{one.rank}", DestinationProcess, dst, one.rank, reader, DEMO_TIMING, device, env=env)
            for one in dst.ranks
        ]
        result.num_processes = 1 + len(src.ranks) + len(dst.ranks)

    def wait_ready(self) -> None:
        """Until every rank is up, and the source's have joined it."""
        for rank in (*self.sources, *self._destinations):
            rank.wait_ready()
        until(lambda: self._engine.is_whole, "all ranks of the source join it", 60)

    def move(self, wave: Sequence[Sample]) -> None:
        """Fetch all requests of a wave at once, and check each of them."""
        requests = [self._prepared(sample) for sample in wave]
        self._out |= {sample.request_id: request.src for sample, request in zip(wave, requests, strict=True)}
        handles = [
            self._started(sample.request_id, sample, request)
            for sample, request in zip(wave, requests, strict=True)
        ]
        for sample, request, reports in zip(wave, requests, self._reports(handles), strict=True):
            if self._are_good(sample, reports):
                self._check(sample, request)
            self._finish(request, reports)

    def measure(self, sample: Sample) -> None:
        """Move one request several times, always from and to the same blocks."""
        request = self._prepared(sample)
        turns: list[list[Report]] = []
        while len(turns) <= TURNS:
            handles = self._started(f"{sample.request_id}, turn {len(turns)}", sample, request)
            turns += self._reports([handles])
            if not self._are_good(sample, turns[-1]):
                break
        else:
            self._check(sample, request)
            self._result.speeds = [_speed(rank, turns[1:]) for rank in range(len(turns[0]))]
        self._src_pool.give_back(request.src)
        self._finish(request, turns[0])

    def _prepared(self, sample: Sample) -> kvferry.Request:
        """Take blocks; write the request at the source, and the prefix that the destination has already."""
        src, dst = (self._taken(pool, sample.num_tokens) for pool in (self._src_pool, self._dst_pool))
        call_all(self.sources, "fill", src, sample.num_tokens, sample.request_id)
        need = {one.name: kvferry.need_of(one, sample.num_tokens, sample.num_kept) for one in self._groups}
        paged = [one.name for one in self._groups if one.addressing is kvferry.Addressing.TABLE]
        kept = {name: (Span(0, sample.num_kept),) for name in paged} if sample.num_kept else {}
        if kept:
            call_all(self._destinations, "fill", dst, kept, KEPT)
        return kvferry.Request(src, dst, need, kept)

    def _taken(self, pool: BlockPool, num_tokens: int) -> dict[str, BlockTable]:
        """Blocks for a request, once enough of them are free."""
        tables: dict[str, BlockTable] = {}

        def is_taken() -> bool:
            self._take_back()
            tables.update(pool.take(num_tokens) or {})
            return bool(tables)

        until(is_taken, f"a pool has blocks for {num_tokens} tokens", SETTLED_SECONDS)
        return tables

    def _take_back(self) -> None:
        """Free the source blocks of released requests."""
        for released in self._engine.poll():
            self._src_pool.give_back(self._out.pop(released.request_id, {}))

    def offer(self, request_id: str, tables: Mapping[str, BlockTable], num_tokens: int) -> Ticket:
        return self._engine.offer(request_id, tables, num_tokens)

    def _started(self, request_id: str, sample: Sample, request: kvferry.Request) -> list[int]:
        """Offer a request and start to fetch it; a handle of each rank."""
        ticket = self.offer(request_id, request.src, sample.num_tokens)
        return call_all(self._destinations, "fetch", ticket, request.dst, request.need, kept=request.kept)

    def _reports(self, handles: Sequence[Sequence[int]]) -> list[list[Report]]:
        """Wait for requests, given by a handle of each rank; their reports in the same order."""
        found: dict[tuple[int, int], Report] = {}

        def are_in() -> bool:
            for rank, reports in enumerate(call_all(self._destinations, "poll")):
                found.update({(rank, report.handle): report for report in reports})
            return len(found) == sum(map(len, handles))

        until(are_in, "every rank of the destination reports its loads", DEMO_TIMING.read)
        return [[found[key] for key in enumerate(some)] for some in handles]

    def _are_good(self, sample: Sample, reports: Sequence[Report]) -> bool:
        """Whether no rank reported a failure; failures are noted."""
        failed = [(rank, report.failure) for rank, report in enumerate(reports) if report.failure]
        self._result.failures += [f"{sample.request_id}: dst rank {rank}: {why}" for rank, why in failed]
        return not failed

    def _check(self, sample: Sample, request: kvferry.Request) -> None:
        """Every needed cell, and every cell that was there already, by name, on every rank."""
        own_names = {name: name for name in self._src_names}
        for what, tokens, names, salt in (
            ("", request.need, self._src_names, sample.request_id),
            ("kept ", request.kept, own_names, KEPT),
        ):
            checked = call_all(self._destinations, "check", request.dst, tokens, names, salt)
            for rank, one in enumerate(checked):
                self._result.count(sample, what, rank, one)

    def _finish(self, request: kvferry.Request, reports: Sequence[Report]) -> None:
        """Free the destination's blocks, and add the reports, one per rank, to the result."""
        self._dst_pool.give_back(request.dst)
        result, records = self._result, [report.record for report in reports]
        result.num_requests += 1
        result.total_bytes += sum(record.num_bytes for record in records)
        result.num_runs += sum(record.num_runs for record in records)
        if result.num_requests == 1:
            result.meet_ms = max(1e3 * record.meet_seconds for record in records)
            result.ways = sorted({record.way for record in records})
        self._step("")

    def settle(self) -> None:
        """Wait until everything came back; what did not is a leak."""
        deadline = time.monotonic() + SETTLED_SECONDS
        while any((left := self._left()).values()) and time.monotonic() < deadline:
            time.sleep(0.05)
        self._result.num_leases = left[LEASES]
        self._result.leaks = [f"{count} {what}" for what, count in left.items() if count]

    def _left(self) -> dict[str, int]:
        self._take_back()
        status: dict[str, int] = self._engine.status()  # type: ignore[assignment]
        are_alive = all(rank.is_alive for rank in self.sources)
        left = {
            LEASES: status["offered"] + status["being_read"],
            "source blocks not given back": self._src_pool.num_missing,
            "releases not confirmed by every rank": status["unheard"] if are_alive else 0,
            "destination blocks not given back": self._dst_pool.num_missing,
        }
        for rank in self._destinations:
            shown = rank.call("status")
            left[f"fetches at {rank.name}"] = sum(shown["fetches"].values())
            for what in ("in_flight", "settling", "quarantined"):
                left[f"reads {what.replace('_', ' ')} at {rank.name}"] = int(shown[what])
        return left

    def close(self) -> None:
        for rank in (*self.sources, *self._destinations):
            rank.close()
        self._engine.close()


def _speed(rank: int, turns: Sequence[Sequence[Report]]) -> Speed:
    record = turns[0][rank].record
    move_ms = 1e3 * median(reports[rank].record.move_seconds for reports in turns)
    return Speed(rank, record.num_bytes, record.num_runs, record.num_sources, move_ms)
