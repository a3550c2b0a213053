"""The demonstration between processes: two engines, and requests on their way between them.

Requests go in waves. While one wave is fetched, all of its requests at once, and checked, the next one is
written at the source. The last request goes alone, several times, which gives the speeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from statistics import median

import kvferry
from kvferry.cli.demo.pairs import MAX_MEMORY, Pair, check_memory, memory_bytes
from kvferry.cli.demo.result import ProcessResult, Speed
from kvferry.cli.demo.samples import Sample, some_samples
from kvferry.core.manifest import Manifest
from kvferry.core.words import counted
from kvferry.errors import KVFerryError, SpecError
from kvferry.runtime import Report, Timing
from kvferry.testing.fleet import (
    BlockPool,
    DestinationAccount,
    DestinationFleet,
    SourceAccount,
    SourceFleet,
    TrackedLoad,
)
from kvferry.testing.fleet.accounts import LEASES
from kvferry.transport.cuda import has_cuda
from kvferry.transport.ucx import CUDA_ENVIRONMENT
from kvferry.wire.ticket import Ticket

WAVE = 3
"""Requests that are fetched together."""
TURNS = 7
"""How often the last request is moved; speeds are medians."""
TIMING = Timing(lease=30, meet=20, read=60, retry=0.2)
SETTLED_SECONDS = 10.0
"""How long leases and releases may take to settle when all is done."""
MAX_PROCESSES = 64
DEFAULT_TOKENS = 8000

Step = Callable[[str], None]
"""Told what is done next, once per request and once when the engines are up."""


def demonstrate_between_processes(
    pair: Pair, num_requests: int, num_tokens: int | None, device: str, step: Step
) -> ProcessResult:
    """Start both engines, move and check everything, and stop them."""
    src, dst, num_tokens = _engines(pair, num_requests, num_tokens)
    env = _check_machine(device)
    samples = some_samples(dst, num_requests, num_tokens)
    _check_room(src, min(num_requests, 2 * WAVE), num_tokens)
    _check_room(dst, min(num_requests, WAVE), num_tokens)
    result = ProcessResult(pair.model, pair.src, pair.dst, device=device)
    src_names = _planned(result, src, dst)
    with (
        closing(SourceFleet(src, timing=TIMING, device=device, env=env)) as source,
        closing(DestinationFleet(dst, timing=TIMING, device=device, env=env)) as destination,
    ):
        result.num_processes = len(source.workers()) + len(destination.workers())
        try:
            source.wait_whole()
            destination.wait_ready()
            step("moving and checking")
            mover = _Mover(result, SourceAccount(source), DestinationAccount(destination, src_names), step)
            mover.move(samples[:-1])
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


def _check_machine(device: str) -> dict[str, str]:
    """What the demonstration needs of this machine is there; the environment of its processes."""
    if device == "cpu":
        return {}
    if not has_cuda():
        raise SpecError("--device cuda: this machine has no CUDA driver, or no device that it can use")
    return {**CUDA_ENVIRONMENT}


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


class _Mover:
    """Moves requests from one engine to the other, and notes what came of it."""

    def __init__(
        self, result: ProcessResult, source: SourceAccount, destination: DestinationAccount, step: Step
    ) -> None:
        self._result, self._step = result, step
        self._source, self._destination = source, destination

    def move(self, samples: Sequence[Sample]) -> None:
        """Wave by wave; the next one is written while one is fetched and checked."""
        waves = list(_waves(samples))
        with ThreadPoolExecutor(1) as prefill:
            upcoming = [prefill.submit(self._prefill, wave) for wave in waves[:1]]
            for number, wave in enumerate(waves, 1):
                tickets = upcoming.pop().result()
                upcoming = [prefill.submit(self._prefill, after) for after in waves[number : number + 1]]
                self._fetch(wave, tickets)

    def _prefill(self, wave: Sequence[Sample]) -> list[Ticket]:
        """Write a wave at the source, and offer it."""
        tickets = []
        for sample in wave:
            self._source.prefill(sample.request_id, sample.num_tokens, wait_seconds=SETTLED_SECONDS)
            tickets.append(self._source.offer(sample.request_id, sample.num_tokens))
        return tickets

    def _fetch(self, wave: Sequence[Sample], tickets: Sequence[Ticket]) -> None:
        """Fetch a wave, all at once; check each of its requests when it is in."""
        loads = [self._prepared(sample) for sample in wave]
        for load, ticket in zip(loads, tickets, strict=True):
            self._destination.start(load, ticket)
        for sample, load in zip(wave, loads, strict=True):
            self._destination.wait(load, TIMING.read)
            if self._note(sample, [report for _, report in sorted(load.reports.items())]):
                self._check(sample, load)
            self._step("")

    def _prepared(self, sample: Sample) -> TrackedLoad:
        return self._destination.prepare(sample.request_id, sample.num_tokens, sample.num_kept)

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

    def _check(self, sample: Sample, load: TrackedLoad) -> None:
        """Every needed cell, and every cell that was there already, by name, on every rank."""
        for what, checked in (
            ("", self._destination.check(load)),
            ("kept ", self._destination.check_kept(load)),
        ):
            for rank, one in enumerate(checked):
                self._result.count(sample, what, rank, one)

    # -- the speeds --------------------------------------------------------------------------------

    def measure(self, sample: Sample) -> None:
        """Move one request several times."""
        self._source.prefill(sample.request_id, sample.num_tokens, wait_seconds=SETTLED_SECONDS)
        load = self._prepared(sample)
        turns = [self._turn(sample, 0, load)]
        is_good = self._note(sample, turns[0])
        while is_good and len(turns) <= TURNS:
            turns.append(self._turn(sample, len(turns), load))
            is_good = self._all_good(sample, turns[-1])
        if is_good:
            self._check(sample, load)
            self._result.speeds = [_speed(rank, turns[1:]) for rank in range(len(turns[0]))]
        self._source.give_back(sample.request_id)
        self._destination.pool.give_back(load.tables)
        self._step("")

    def _turn(self, sample: Sample, number: int, load: TrackedLoad) -> list[Report]:
        """Move it once, always from and to the same blocks; a report of each rank."""
        fleet = self._destination.fleet
        name = f"{sample.request_id}, turn {number}"
        ticket = self._source.offer_again(name, sample.request_id, sample.num_tokens)
        return fleet.wait(fleet.fetch(ticket, load.tables, load.need, kept=load.kept), pause=0.02)

    # -- the end -----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until everything came back; what did not is a leak."""
        deadline = time.monotonic() + SETTLED_SECONDS
        while True:
            left = self._source.left()
            self._result.num_leases = left[LEASES]
            left |= self._destination.left()
            self._result.leaks = [f"{count} {what}" for what, count in left.items() if count]
            if not self._result.leaks or time.monotonic() > deadline:
                return
            time.sleep(0.05)


def _speed(rank: int, turns: Sequence[Sequence[Report]]) -> Speed:
    record = turns[0][rank].record
    move_ms = 1e3 * median(reports[rank].record.move_seconds for reports in turns)
    return Speed(rank, record.num_bytes, record.num_runs, record.num_sources, move_ms)


def _waves(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    rest = iter(samples)
    while wave := list(islice(rest, WAVE)):
        yield wave
