"""Where the laws of transports are tried: a reader's memory, sources, and what a test asks of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.core.runs import Runs, place
from kvferry.errors import TransportError
from kvferry.testing.sources import Holder, Source
from kvferry.testing.transport_storm import Storm, runs_of
from kvferry.transport.base import ReadEnd, Transport

REGION_BYTES = (24 << 20, (1 << 20) + 13)
STALE = 0xA5
"""What the reader's memory holds at first."""
PATIENCE_S = 20.0


@dataclass(frozen=True)
class World:
    """Where the laws are tried."""

    make: Callable[[], Transport]
    holder: Holder
    """The reader's memory, of ``REGION_BYTES``."""
    sources: Sequence[Source]
    stopped: Callable[[], AbstractContextManager[object]] | None = None
    """While it is entered, no read that the fabric was asked for ends; afterwards they all go on."""

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


def stale_memory(device: str = "cpu") -> Holder:
    """A reader's memory."""
    holder = Holder(device)
    for i, num_bytes in enumerate(REGION_BYTES):
        holder.add(f"region{i}", np.full(num_bytes, STALE, np.uint8))
    return holder


def run(src: tuple[int, int], dst: tuple[int, int], num_bytes: int) -> Runs:
    """One run, from (region, offset) to (region, offset)."""
    return Runs(np.array([place(*src)]), np.array([place(*dst)]), np.array([num_bytes]))


WHOLE = run((0, 0), (0, 0), REGION_BYTES[0])


def scattered(num_runs: int, cell_bytes: int, seed: int, num_bytes: int | None = None) -> Runs:
    """Runs in no order from random places of both source regions to distinct cells of both regions."""
    rng = np.random.default_rng(seed)
    cells = [n // cell_bytes for n in REGION_BYTES]
    src, dst = (
        np.concatenate([place(i, 0) + np.arange(n) * cell_bytes for i, n in enumerate(cells)])
        for _ in range(2)
    )
    lengths = np.full(num_runs, num_bytes) if num_bytes else rng.integers(1, cell_bytes + 1, num_runs)
    return Runs(rng.permutation(src)[:num_runs], rng.permutation(dst)[:num_runs], lengths)


def after(memory: list[NDArray[np.uint8]], runs: Runs, source: Source) -> None:
    """What a read leaves, by the slow way."""
    for src_region, src_offset, dst_region, dst_offset, num_bytes in runs:
        data = source.contents[src_region][src_offset : src_offset + num_bytes]
        memory[dst_region][dst_offset : dst_offset + num_bytes] = data


def wait(transport: Transport, num_ends: int) -> list[ReadEnd]:
    """So many ends, in the order of their numbers."""
    ends, deadline = transport.poll(), time.monotonic() + PATIENCE_S
    while len(ends) < num_ends and time.monotonic() < deadline:
        time.sleep(5e-4)
        ends += transport.poll()
    return sorted(ends, key=lambda end: end.transfer)


def refused(work: Callable[[], object]) -> str:
    """The code with which something is refused."""
    try:
        work()
    except TransportError as error:
        return error.code
    raise AssertionError("it was not refused")


def check(world: World, expected: list[NDArray[np.uint8]]) -> None:
    """The reader's memory holds exactly this."""
    for got, want in zip(world.holder.load(), expected, strict=True):
        wrong = np.flatnonzero(got != want)
        assert not len(wrong), f"{len(wrong)} bytes are wrong, the first at {wrong[0]}"


def check_storm(world: World, storm: Storm) -> None:
    """Reads that ended without an error brought all of their bytes, the others some or none."""
    memory, source = world.holder.load(), world.sources[0]
    for end in storm.read_ends:
        for src_region, src_offset, dst_region, dst_offset, num_bytes in runs_of(end.transfer):
            got = memory[dst_region][dst_offset : dst_offset + num_bytes]
            arrived = (got == source.contents[src_region][src_offset : src_offset + num_bytes]).all()
            assert arrived or (end.error and (got == STALE).all()), end


def grew(before: tuple[int, int], now: tuple[int, int]) -> bool:
    """Whether there are more threads or files than before."""
    return now[0] > before[0] or now[1] > before[1]


def threads_and_files() -> tuple[int, int]:
    """Threads and open files of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
