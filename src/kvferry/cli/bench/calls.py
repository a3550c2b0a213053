"""What a read costs the thread that asks for it, however much is under way, and what idling costs."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import numpy as np

from kvferry.cli.bench.grid import BenchCase
from kvferry.core.manifest import Region
from kvferry.core.runs import Runs
from kvferry.errors import TransportError
from kvferry.testing.fleet.measure import RankCard
from kvferry.transport.nixl import NixlTransport
from kvferry.transport.settings import Expose, WayChoice

NUM_BIG, NUM_ROUNDS = 2, 3
SMALL_RUNS = 64
PAUSE_SECONDS = 1e-3
IDLE_SECONDS = 1.0
READ_SECONDS = 120.0


@dataclass(frozen=True)
class CallTimes:
    """Of one transport."""

    medium: str
    first_read_s: float
    """From the call to its end, right after connecting."""
    second_read_s: float
    num_calls: int
    """Small reads, asked for while large ones were under way: how long those calls took their caller."""
    call_p50_s: float
    call_p99_s: float
    call_max_s: float
    idle_cores: float
    """Processor time per second of a process whose transport has nothing to do."""

    def as_object(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def time_calls(medium: str, region: Region, source: RankCard, case: BenchCase) -> CallTimes:
    """Connect a transport of its own; large reads are those of ``case``."""
    transport = NixlTransport(way=WayChoice.DIRECT, expose=Expose.FABRIC)
    transport.register([region])
    try:
        transport.connect("src", source.card, source.regions)
        single = Runs(*(np.array([number]) for number in (0, 0, 64)))
        first, second = (_read_seconds(transport, single) for _ in range(2))
        calls = [seconds for _ in range(NUM_ROUNDS) for seconds in _busy(transport, case)]
        before = time.process_time()
        time.sleep(IDLE_SECONDS)
        idle = (time.process_time() - before) / IDLE_SECONDS
    finally:
        transport.close()
    p50, p99 = (float(np.percentile(calls, percent)) for percent in (50, 99))
    return CallTimes(medium, first, second, len(calls), p50, p99, max(calls), idle)


def _read_seconds(transport: NixlTransport, runs: Runs) -> float:
    ended = threading.Event()
    transport.on_end(ended.set)
    started = time.perf_counter()
    transport.read(0, "src", runs)
    ended.wait(READ_SECONDS)
    seconds = time.perf_counter() - started
    _collect(transport, {0})
    return seconds


def _busy(transport: NixlTransport, case: BenchCase) -> list[float]:
    """How long the calls of small reads take while large reads are under way."""
    runs = case.product().runs
    small = Runs(runs.src[:SMALL_RUNS], runs.dst[:SMALL_RUNS], runs.num_bytes[:SMALL_RUNS])
    big = set(range(NUM_BIG))
    for transfer in big:
        transport.read(transfer, "src", case.product())
    under_way, numbers, calls = set(big), count(NUM_BIG), []
    while big & under_way:
        transfer = next(numbers)
        started = time.perf_counter()
        transport.read(transfer, "src", small)
        calls.append(time.perf_counter() - started)
        under_way.add(transfer)
        time.sleep(PAUSE_SECONDS)
        _look(transport, under_way)
    _collect(transport, under_way)
    return calls


def _collect(transport: NixlTransport, under_way: set[int]) -> None:
    deadline = time.monotonic() + READ_SECONDS
    while under_way:
        _look(transport, under_way)
        if time.monotonic() > deadline:
            raise TransportError("late", f"{len(under_way)} reads did not end within {READ_SECONDS:g} s")
        time.sleep(PAUSE_SECONDS)


def _look(transport: NixlTransport, under_way: set[int]) -> None:
    for end in transport.poll():
        if end.error:
            raise TransportError("failed", end.error)
        under_way.discard(end.transfer)
