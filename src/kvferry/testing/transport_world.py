"""The environment of the laws of transports: memory, sources, and concurrent threads."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from kvferry.core.manifest import Region
from kvferry.core.runs import Runs, place
from kvferry.errors import TransportError
from kvferry.transport.base import ReadEnd, Transport
from kvferry.transport.region_memory import RegionMemory

REGION_BYTES = (24 << 20, (1 << 20) + 13)
STALE = 0xA5
"""The initial content of the reader's memory."""
PATIENCE_S = 20.0


@dataclass(frozen=True)
class Source:
    """A source rank, and the content of its memory."""

    card: bytes
    regions: tuple[Region, ...]
    contents: tuple[NDArray[np.uint8], ...]


def contents(source_index: int, region_index: int, num_bytes: int) -> NDArray[np.uint8]:
    """The content of a region: reproducible random bytes."""
    return np.random.default_rng([source_index, region_index]).integers(0, 256, num_bytes, np.uint8)


@dataclass(frozen=True)
class World:
    make: Callable[[], Transport]
    holder: RegionMemory
    """The reader's memory, of ``REGION_BYTES``."""
    sources: Sequence[Source]
    stopped: Callable[[], AbstractContextManager[object]] | None = None
    """A context in which posted reads do not end, if the world supports that."""

    @contextmanager
    def reader(self, *source_indices: int) -> Iterator[Transport]:
        """A transport over the reader's memory, connected to sources as peers '0', '1', …"""
        transport = self.make()
        try:
            transport.register(self.holder.regions)
            for i in source_indices:
                transport.connect(str(i), self.sources[i].card, self.sources[i].regions)
            yield transport
        finally:
            transport.close()


def stale_memory(device: str = "cpu") -> RegionMemory:
    holder = RegionMemory(device)
    for i, num_bytes in enumerate(REGION_BYTES):
        holder.add(f"region{i}", np.full(num_bytes, STALE, np.uint8))
    return holder


def run(src: tuple[int, int], dst: tuple[int, int], num_bytes: int) -> Runs:
    """One run, from (region, offset) to (region, offset)."""
    return Runs(np.array([place(*src)]), np.array([place(*dst)]), np.array([num_bytes]))


WHOLE = run((0, 0), (0, 0), REGION_BYTES[0])


def scattered(num_runs: int, cell_bytes: int, seed: int, num_bytes: int | None = None) -> Runs:
    """Unordered runs from random places of both source regions to distinct cells of both regions."""
    rng = np.random.default_rng(seed)
    cells = [n // cell_bytes for n in REGION_BYTES]
    src, dst = (
        np.concatenate([place(i, 0) + np.arange(n) * cell_bytes for i, n in enumerate(cells)])
        for _ in range(2)
    )
    lengths = np.full(num_runs, num_bytes) if num_bytes else rng.integers(1, cell_bytes + 1, num_runs)
    return Runs(rng.permutation(src)[:num_runs], rng.permutation(dst)[:num_runs], lengths)


def after(memory: list[NDArray[np.uint8]], runs: Runs, source: Source) -> None:
    """Apply a read to memory, slowly."""
    for src_region, src_offset, dst_region, dst_offset, num_bytes in runs:
        data = source.contents[src_region][src_offset : src_offset + num_bytes]
        memory[dst_region][dst_offset : dst_offset + num_bytes] = data


def wait(transport: Transport, num_ends: int) -> list[ReadEnd]:
    """Wait for ends; sorted by number."""
    ends, deadline = transport.poll(), time.monotonic() + PATIENCE_S
    while len(ends) < num_ends and time.monotonic() < deadline:
        time.sleep(5e-4)
        ends += transport.poll()
    return sorted(ends, key=lambda end: end.transfer)


def refused(work: Callable[[], object]) -> str:
    """The error code of a rejected call."""
    try:
        work()
    except TransportError as error:
        return error.code
    raise AssertionError("it was not refused")


def check(world: World, expected: list[NDArray[np.uint8]]) -> None:
    for got, want in zip(world.holder.load(), expected, strict=True):
        wrong = np.flatnonzero(got != want)
        assert not len(wrong), f"{len(wrong)} bytes are wrong, the first at {wrong[0]}"


def check_read(world: World, source_index: int, runs: Runs) -> None:
    """All bytes of a read arrive, and no others change."""
    expected = world.holder.load()
    with world.reader(source_index) as reader:
        reader.read(0, str(source_index), runs)
        assert wait(reader, 1) == [ReadEnd(0)]
    after(expected, runs, world.sources[source_index])
    check(world, expected)


def check_storm(world: World, storm: Storm) -> None:
    """Reads without an error have all bytes; failed runs have all or none."""
    memory, source = world.holder.load(), world.sources[0]
    for end in storm.read_ends:
        for src_region, src_offset, dst_region, dst_offset, num_bytes in runs_of(end.transfer):
            got = memory[dst_region][dst_offset : dst_offset + num_bytes]
            arrived = (got == source.contents[src_region][src_offset : src_offset + num_bytes]).all()
            assert arrived or (end.error and (got == STALE).all()), end


def grew(before: tuple[int, int], now: tuple[int, int]) -> bool:
    return now[0] > before[0] or now[1] > before[1]


def threads_and_files() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


# -- many threads at once ------------------------------------------------------------------------

CELL_BYTES = 96
"""Bytes of a read, in two runs, to a cell of its own in the first region."""


class Storm:
    """Threads that concurrently read, collect, cancel, clear, connect and forget.

    Reads are from the permanent peer '0'; other peers come and go, and two threads may use one name.
    """

    def __init__(self, transport: Transport, sources: Sequence[Source], max_reads: int) -> None:
        self.accepted: list[int] = []
        """Transfers accepted by ``read``."""
        self.ends: list[ReadEnd] = []
        self.wrong: list[BaseException] = []
        """Exceptions other than TransportError."""
        self._transport, self._sources, self._max_reads = transport, sources, max_reads
        self._numbers, self._visits, self._clears = count(), count(), count(max_reads)
        self._is_over = threading.Event()

    @contextmanager
    def blowing(self) -> Iterator[None]:
        """Run the threads until the block ends."""
        work = [self._read, self._read, self._read, self._poll, self._poll, self._poll, self._cancel]
        work += [self._clear, self._come_and_go, self._come_and_go]
        threads = [threading.Thread(target=self._repeat, args=(one,)) for one in work]
        switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            for thread in threads:
                thread.join()
            sys.setswitchinterval(switch_interval)

    def wait_for_reads(self, seconds: float) -> None:
        """Wait until all cells are used, or for ``seconds``."""
        deadline = time.monotonic() + seconds
        while len(self.accepted) < self._max_reads and time.monotonic() < deadline:
            time.sleep(1e-3)

    def collect(self, seconds: float) -> None:
        """Collect the remaining ends."""
        deadline = time.monotonic() + seconds
        while len(self.ends) < len(self.accepted) and time.monotonic() < deadline:
            self.ends += self._transport.poll()
            time.sleep(1e-3)

    def check(self) -> None:
        """No unexpected exception was raised, and each accepted read ended once."""
        assert not self.wrong, self.wrong
        assert self.accepted
        assert Counter(end.transfer for end in self.ends) == Counter(self.accepted)

    @property
    def read_ends(self) -> list[ReadEnd]:
        """The ends of reads: clearings are numbered after them."""
        return [end for end in self.ends if end.transfer < self._max_reads]

    def _repeat(self, work: Callable[[], None]) -> None:
        while not self._is_over.is_set():
            try:
                work()
            except TransportError as error:
                if error.code == "closed" and work != self._poll:
                    return
            except BaseException as error:
                self.wrong.append(error)
                return
            time.sleep(0)

    def _read(self) -> None:
        transfer = next(self._numbers)
        if transfer >= self._max_reads:
            time.sleep(1e-3)
            return
        self._transport.read(transfer, "0", runs_of(transfer))
        self.accepted.append(transfer)

    def _poll(self) -> None:
        self.ends.extend(self._transport.poll())

    def _cancel(self) -> None:
        for transfer in self.accepted[-3:]:
            self._transport.cancel(transfer)
        time.sleep(1e-3)

    def _clear(self) -> None:
        transfer = next(self._clears)
        self._transport.clear(transfer, Runs(np.array([0]), np.array([1 << 48]), np.array([CELL_BYTES])))
        self.accepted.append(transfer)
        time.sleep(1e-3)

    def _come_and_go(self) -> None:
        name = f"1/{next(self._visits) % 3}"
        source = self._sources[1]
        try:
            self._transport.connect(name, source.card, source.regions)
        finally:
            self._transport.forget(name)


def runs_of(transfer: int) -> Runs:
    """Two runs to the cell of a transfer."""
    dst = CELL_BYTES * transfer + np.array([0, CELL_BYTES // 2])
    return Runs(dst[::-1] + 1000, dst, np.full(2, CELL_BYTES // 2))
