"""The demonstrations: requests move in this process, or between engines of processes, and are checked.

Between processes requests go in waves: all of a wave are offered, fetched at once, and checked. The last
request goes alone, several times, which gives the speeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

import kvferry
from kvferry.cli.demo.engines import DEMO_TIMING, LEASES, DemoDestination, DemoSource
from kvferry.cli.demo.pairs import (
    MAX_MEMORY,
    BlockPool,
    Pair,
    Sample,
    check_memory,
    memory_bytes,
    some_samples,
)
from kvferry.cli.demo.report import MemoryResult, ProcessResult, Speed
from kvferry.cli.processes import call_all
from kvferry.core.manifest import Manifest
from kvferry.core.request import BlockTable, Request, need_of
from kvferry.core.sample import Placement, sample_request
from kvferry.core.span import Span, Spans
from kvferry.core.words import counted
from kvferry.errors import KVFerryError, SpecError
from kvferry.pattern import KEPT, STALE, check_rank, fill_rank
from kvferry.runtime import Report
from kvferry.transport.cuda import has_cuda
from kvferry.transport.memory import Hub, MemoryTransport, placed
from kvferry.transport.settings import CUDA_ENVIRONMENT

Memories = Mapping[int, dict[str, NDArray[np.uint8]]]
Step = Callable[[str], None]
"""Told what is done next, once per request and once when the engines are up."""


def demonstrate_in_memory(pair: Pair, num_requests: int, num_tokens: int, step: Step) -> MemoryResult:
    """Plan every destination rank once, then move and check each request; ``step`` is called after each."""
    src, dst = (pair.manifest(side, num_tokens, num_requests=2) for side in ("src", "dst"))
    check_memory(src, dst)
    result = MemoryResult(pair.model, pair.src, pair.dst)
    src_memory, dst_memory = _memories(src), _memories(dst)
    transports = _transports(src, src_memory, dst, dst_memory)
    routes = [_route(result, src, dst, rank.rank) for rank in dst.ranks]
    for number, sample in enumerate(some_samples(dst, num_requests, num_tokens)):
        placement = Placement.CONSECUTIVE if number % 2 else Placement.SCATTERED
        request = sample_request(src, dst, sample.num_tokens, num_kept=sample.num_kept, placement=placement)
        _lay_out(src, dst, src_memory, dst_memory, request)
        for route in routes:
            if _move(result, sample, transports[route.plan.dst_rank], route, request):
                _check(result, sample, route.plan, dst_memory, request)
        result.num_requests += 1
        step("")
    return result


def _memories(manifest: Manifest) -> Memories:
    """Memory for every rank."""
    return {
        rank.rank: {region.name: np.empty(region.num_bytes, np.uint8) for region in rank.regions}
        for rank in manifest.ranks
    }


def _transports(
    src: Manifest, src_memory: Memories, dst: Manifest, dst_memory: Memories
) -> dict[int, MemoryTransport]:
    """A transport for every destination rank, connected to every source rank (a peer is its rank)."""
    hub = Hub()
    sources = []
    for rank in src.ranks:
        regions = placed(rank, src_memory[rank.rank])
        source = MemoryTransport(hub)
        source.register(regions)
        sources.append((str(rank.rank), source.card(), regions))
    transports = {}
    for rank in dst.ranks:
        transports[rank.rank] = MemoryTransport(hub)
        transports[rank.rank].register(placed(rank, dst_memory[rank.rank]))
        for peer, card, regions in sources:
            transports[rank.rank].connect(peer, card, regions)
    return transports


def _route(result: MemoryResult, src: Manifest, dst: Manifest, dst_rank: int) -> kvferry.Route:
    started = time.perf_counter()
    route = kvferry.lower(kvferry.prove(kvferry.plan(src, dst, dst_rank)))
    result.plan_ms += 1e3 * (time.perf_counter() - started)
    return route


def _lay_out(
    src: Manifest, dst: Manifest, src_memory: Memories, dst_memory: Memories, request: Request
) -> None:
    """Stale bytes everywhere; then the request at the source, and at the destination what it kept."""
    for memory in (*src_memory.values(), *dst_memory.values()):
        for region in memory.values():
            region.fill(STALE)
    last = max((span.stop for spans in request.need.values() for span in spans), default=0)
    all_tokens = {group.name: (Span(0, last),) for group in src.groups}
    for rank, memory in src_memory.items():
        fill_rank(memory, src, rank, request.src, all_tokens)
    for rank, memory in dst_memory.items():
        fill_rank(memory, dst, rank, request.dst, request.kept, KEPT)


def _move(
    result: MemoryResult, sample: Sample, transport: MemoryTransport, route: kvferry.Route, request: Request
) -> bool:
    """Copy what one destination rank needs; whether that went well."""
    started = time.perf_counter()
    selection = kvferry.select(route, request)
    selected = time.perf_counter()
    for src_rank, product in selection.products.items():
        transport.read(src_rank, str(src_rank), product)
    transport.clear(max(selection.products, default=0) + 1, selection.blank)
    failed = [end for end in transport.poll() if end.error]
    result.select_ms += 1e3 * (selected - started)
    result.copy_ms += 1e3 * (time.perf_counter() - selected)
    result.num_runs += selection.num_runs
    result.total_bytes += selection.total_bytes
    for end in failed:
        result.fail(sample, route.plan.dst_rank, f"reading from source rank {end.transfer}: {end.error}")
    return not failed


def _check(
    result: MemoryResult, sample: Sample, plan: kvferry.Plan, memories: Memories, request: Request
) -> None:
    """Read what was needed and what was kept back by name, through the destination's views."""
    memory, rank = memories[plan.dst_rank], plan.dst_rank
    names = {state: plan.src_name(state) for state in plan.states}
    moved = check_rank(memory, plan.dst, rank, request.dst, request.need, names)
    kept = check_rank(memory, plan.dst, rank, request.dst, request.kept, {n: n for n in names}, KEPT)
    result.count(sample, "", rank, moved)
    result.count(sample, "kept ", rank, kept)


# -- between processes -----------------------------------------------------------------------------

WAVE = 3
"""Requests that are fetched together."""
TURNS = 7
"""How often the last request is moved; speeds are medians."""
SETTLED_SECONDS = 10.0
"""How long leases and releases may take to settle when all is done."""
MAX_PROCESSES = 64
DEFAULT_TOKENS = 8000


def demonstrate_between_processes(
    pair: Pair, num_requests: int, num_tokens: int | None, device: str, step: Step
) -> ProcessResult:
    """Start both engines, move and check everything, and stop them."""
    src, dst, num_tokens = _engines(pair, num_requests, num_tokens)
    if device == "cuda" and not has_cuda():
        raise SpecError("--device cuda: this machine has no CUDA driver, or no device that it can use")
    env = {**CUDA_ENVIRONMENT} if device == "cuda" else {}
    samples = some_samples(dst, num_requests, num_tokens)
    _check_room(src, min(num_requests, 2 * WAVE), num_tokens)
    _check_room(dst, min(num_requests, WAVE), num_tokens)
    result = ProcessResult(pair.model, pair.src, pair.dst, device=device)
    src_names = _planned(result, src, dst)
    with (
        closing(DemoSource(src, device, env)) as source,
        closing(DemoDestination(dst, device, env)) as destination,
    ):
        result.num_processes = 1 + len(source.ranks) + len(destination.ranks)
        try:
            source.wait_ready()
            for rank in destination.ranks:
                rank.wait_ready()
            step("moving and checking")
            mover = _Mover(result, source, destination, src_names, step)
            for first in range(0, len(samples) - 1, WAVE):
                mover.move(samples[:-1][first : first + WAVE])
            mover.measure(samples[-1])
            mover.settle()
        except KVFerryError as error:
            result.failures.append(str(error))
    return result


def _engines(pair: Pair, num_requests: int, tokens: int | None) -> tuple[Manifest, Manifest, int]:
    """Both engines with room for two waves and for one, and the tokens of the longest request."""
    num_tokens = tokens or DEFAULT_TOKENS
    while True:
        src = pair.manifest("src", num_tokens, min(num_requests, 2 * WAVE) + 1)
        dst = pair.manifest("dst", num_tokens, min(num_requests, WAVE) + 1)
        if tokens is not None or num_tokens == 1 or memory_bytes(src, dst) <= MAX_MEMORY:
            break
        num_tokens //= 2  # nobody asked for so many
    check_memory(src, dst)
    if len(src.ranks) + len(dst.ranks) >= MAX_PROCESSES:
        raise SpecError(f"each rank is a process; at most {MAX_PROCESSES} are started")
    return src, dst, num_tokens


def _check_room(manifest: Manifest, num_requests: int, num_tokens: int) -> None:
    pool = BlockPool(manifest)
    if not all(pool.take(num_tokens) for _ in range(num_requests)):
        wanted = f"{counted(num_requests, 'request')} of {num_tokens} tokens"
        raise SpecError(f"--{manifest.engine}: the pool has no room for {wanted}: blocks=N makes it larger")


def _planned(result: ProcessResult, src: Manifest, dst: Manifest) -> dict[str, str]:
    """Plan for every rank, as the ranks will, so that a refusal starts no process; the source's names."""
    if found := kvferry.compare(src, dst):
        raise kvferry.Refused(*found)
    names: dict[str, str] = {}
    started = time.perf_counter()
    for rank in dst.ranks:
        plan = kvferry.plan(src, dst, rank.rank)
        kvferry.lower(kvferry.prove(plan))
        names |= {state: plan.src_name(state) for state in plan.states}
    result.plan_ms = 1e3 * (time.perf_counter() - started)
    return names


@dataclass(frozen=True)
class _Load:
    """A request on its way: its blocks on both sides, and which tokens the destination needs and has."""

    src: Mapping[str, BlockTable]
    dst: Mapping[str, BlockTable]
    need: Mapping[str, Spans]
    kept: Mapping[str, Spans]


class _Mover:
    """Moves requests from one engine to the other, and notes what came of it."""

    def __init__(
        self,
        result: ProcessResult,
        source: DemoSource,
        destination: DemoDestination,
        src_names: Mapping[str, str],
        step: Step,
    ) -> None:
        self._result, self._step = result, step
        self._source, self._destination, self._src_names = source, destination, src_names

    def move(self, wave: Sequence[Sample]) -> None:
        """Offer a wave, fetch it, all at once, and check each of its requests when it is in."""
        loads = [self._prepared(sample) for sample in wave]
        handles = [
            self._started(sample.request_id, sample, load) for sample, load in zip(wave, loads, strict=True)
        ]
        for sample, load, some in zip(wave, loads, handles, strict=True):
            if self._note(sample, self._destination.wait(some, DEMO_TIMING.read)):
                self._check(sample, load)
            self._destination.pool.give_back(load.dst)
            self._step("")

    def _prepared(self, sample: Sample) -> _Load:
        """Take blocks, and write the request at the source, and at the destination what it has already."""
        src = self._source.prefill(sample.request_id, sample.num_tokens, SETTLED_SECONDS)
        dst = self._destination.pool.take(sample.num_tokens)
        if dst is None:
            raise KVFerryError(f"the destination has no blocks for {sample.num_tokens} tokens")
        groups, num_kept = self._destination.groups, sample.num_kept
        need = {group.name: need_of(group, sample.num_tokens, num_kept) for group in groups}
        paged = [group.name for group in groups if group.addressing is kvferry.Addressing.TABLE]
        kept = {name: (Span(0, num_kept),) for name in paged} if num_kept else {}
        if kept:
            call_all(self._destination.ranks, "fill", dst, kept, KEPT)
        return _Load(src, dst, need, kept)

    def _started(self, name: str, sample: Sample, load: _Load, *, is_last: bool = True) -> list[int]:
        """Offer a request and start to fetch it; a handle of each rank."""
        ticket = self._source.offer(name, load.src, sample.num_tokens, is_last=is_last)
        return call_all(self._destination.ranks, "fetch", ticket, load.dst, load.need, load.kept)

    def _note(self, sample: Sample, reports: Sequence[Report]) -> bool:
        """Add the reports of one request, one per rank, to the result; whether all are good."""
        result = self._result
        result.num_requests += 1
        result.total_bytes += sum(report.record.num_bytes for report in reports)
        result.num_runs += sum(report.record.num_runs for report in reports)
        if result.num_requests == 1:
            result.meet_ms = max(1e3 * report.record.meet_seconds for report in reports)
            result.ways = sorted({report.record.way for report in reports})
        return self._all_good(sample, reports)

    def _all_good(self, sample: Sample, reports: Sequence[Report]) -> bool:
        """Whether no rank reported a failure; those that did are noted."""
        for rank, report in enumerate(reports):
            if report.failure:
                self._result.fail(sample, rank, report.failure)
        return not any(report.failure for report in reports)

    def _check(self, sample: Sample, load: _Load) -> None:
        """Every needed cell, and every cell that was there already, by name, on every rank."""
        own_names = {name: name for name in self._src_names}
        for what, tokens, names, salt in (
            ("", load.need, self._src_names, sample.request_id),
            ("kept ", load.kept, own_names, KEPT),
        ):
            checked = call_all(self._destination.ranks, "check", load.dst, tokens, names, salt)
            for rank, one in enumerate(checked):
                self._result.count(sample, what, rank, one)

    def measure(self, sample: Sample) -> None:
        """Move one request several times, always from and to the same blocks."""
        load = self._prepared(sample)
        turns = [self._turn(sample, 0, load)]
        is_good = self._note(sample, turns[0])
        while is_good and len(turns) <= TURNS:
            turns.append(self._turn(sample, len(turns), load))
            is_good = self._all_good(sample, turns[-1])
        if is_good:
            self._check(sample, load)
            self._result.speeds = [_speed(rank, turns[1:]) for rank in range(len(turns[0]))]
        self._source.pool.give_back(load.src)
        self._destination.pool.give_back(load.dst)
        self._step("")

    def _turn(self, sample: Sample, number: int, load: _Load) -> list[Report]:
        """Move it once; a report of each rank."""
        handles = self._started(f"{sample.request_id}, turn {number}", sample, load, is_last=False)
        return self._destination.wait(handles, DEMO_TIMING.read)

    def settle(self) -> None:
        """Wait until everything came back; what did not is a leak."""
        deadline = time.monotonic() + SETTLED_SECONDS
        while True:
            left = self._source.left() | self._destination.left()
            self._result.num_leases = left[LEASES]
            self._result.leaks = [f"{count} {what}" for what, count in left.items() if count]
            if not self._result.leaks or time.monotonic() > deadline:
                return
            time.sleep(0.05)


def _speed(rank: int, turns: Sequence[Sequence[Report]]) -> Speed:
    record = turns[0][rank].record
    move_ms = 1e3 * median(reports[rank].record.move_seconds for reports in turns)
    return Speed(rank, record.num_bytes, record.num_runs, record.num_sources, move_ms)
