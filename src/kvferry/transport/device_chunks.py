"""Rings in a device's memory, and who copies between them and the rank's own memory there: the copy kernel.

The bytes of a chunk lie as ``pack`` says, whoever copies them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from kvferry.core.manifest import Region
from kvferry.core.product import Product, Term
from kvferry.core.runs import Runs
from kvferry.transport.copy_kernel import CopyKernel, prepare, repeated
from kvferry.transport.copy_queue import CopyQueue
from kvferry.transport.cuda import Cuda
from kvferry.transport.pack import TermSide, check_room
from kvferry.transport.places import Places
from kvferry.transport.staging_ring import StagingRing, StagingSize, new_ring_id

DEVICE_RING = StagingSize(num_chunks=8, chunk_bytes=8 << 20)
"""Long chunks: a device copies megabytes in the time that a message takes."""


class DeviceStagingRing(StagingRing):
    """A ring in device memory: an allocation of its own, which can be registered whatever the pool is."""

    def __init__(self, cuda: Cuda, device: str, size: StagingSize) -> None:
        self.size, self._cuda, self.ring_id = size, cuda, new_ring_id()
        self.region = Region("ring", size.num_bytes, cuda.allocate(size.num_bytes), device)

    def close(self) -> None:
        """Give the memory back; nothing may be under way."""
        address, self.region = self.region.address, Region("ring", self.size.num_bytes)
        if address:
            self._cuda.free(address)


class DeviceChunkCopier:
    """By the copy kernel, in a stream of its own."""

    is_on_host = False

    def __init__(self, cuda: Cuda, kernel: CopyKernel, memory: Places, ring: StagingRing) -> None:
        self.memory, self._cuda = memory, cuda
        self._ring, self._chunk_bytes = Places("ring", [ring.region]), ring.size.chunk_bytes
        self._queue = CopyQueue(cuda, kernel)

    def gather(self, sides: Sequence[TermSide], chunk: int) -> None:
        """As ``ChunkCopier`` says."""
        check_room(sides, self._chunk_bytes)
        self._copy(self._terms(sides, chunk), self.memory, self._ring)

    def scatter(self, sides: Sequence[TermSide], chunk: int) -> None:
        """As ``ChunkCopier`` says."""
        check_room(sides, self._chunk_bytes)
        self._copy(map(_turned, self._terms(sides, chunk)), self._ring, self.memory)

    def close(self) -> None:
        """Give the stream and its table up; nothing may be under way."""
        self._queue.close()

    def _terms(self, sides: Sequence[TermSide], chunk: int) -> Iterator[Term]:
        return terms_to_chunk(sides, chunk - self._ring.regions[0].address)

    def _copy(self, terms: Iterable[Term], src: Places, dst: Places) -> None:
        """Copy, and wait for the end, which the device reports."""
        checked = repeated(Product(tuple(terms)), lambda pattern: prepare(pattern, src, dst))
        with self._cuda.current():
            try:
                self._queue.put(checked, sum(term.num_bytes for term in checked))
            finally:  # after an error, too: some of it may have been queued
                self._queue.wait()


def terms_to_chunk(sides: Sequence[TermSide], at: int) -> Iterator[Term]:
    """From where these name to a chunk at a place of its ring; the runs of a term have one length.

    >>> side = TermSide(np.array([0, 500]), np.array([8, 4]), np.array([0, 1000]))
    >>> for term in terms_to_chunk([side], 64):
    ...     print([(src, dst, num_bytes) for _, src, _, dst, num_bytes in term.runs()])
    [(500, 80, 4), (1500, 84, 4)]
    [(0, 64, 8), (1000, 72, 8)]
    """
    for side in sides:
        num_pairs, lowest = len(side.steps), int(side.steps.min())
        starts = at + num_pairs * (np.cumsum(side.num_bytes) - side.num_bytes)
        runs = Runs(side.places + lowest, starts, side.num_bytes)
        for length in [runs.each_bytes] if runs.each_bytes else np.unique(side.num_bytes).tolist():
            alike = runs.where(side.num_bytes == length)
            yield Term(alike, np.stack([side.steps - lowest, length * np.arange(num_pairs)]))
        at += side.total_bytes


def _turned(term: Term) -> Term:
    pattern = term.pattern
    return Term(Runs(pattern.dst, pattern.src, pattern.num_bytes), term.steps[::-1])
