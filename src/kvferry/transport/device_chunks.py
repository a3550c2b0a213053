"""Rings of a rank whose memory is a device's, there or on the host, and who copies: the copy kernel.

The bytes of a chunk lie as ``pack`` says, whoever copies them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from kvferry.core.manifest import Region
from kvferry.core.product import Product, Term
from kvferry.core.runs import Runs
from kvferry.host.shared_memory import SharedMemory
from kvferry.transport.chunk_copier import HostBytes
from kvferry.transport.copy_kernel import CopyKernel, prepare, repeated
from kvferry.transport.copy_queue import CopyQueue
from kvferry.transport.cuda import Cuda
from kvferry.transport.exports import PROBE_BYTES, Exporter
from kvferry.transport.pack import TermSide, check_room
from kvferry.transport.places import Places
from kvferry.transport.staging_ring import StagingRing, StagingSize, new_ring_id

DEVICE_RING = StagingSize(num_chunks=4, chunk_bytes=16 << 20)
"""Long chunks: a device copies megabytes in the time that a message takes."""


class DeviceStagingRing(StagingRing):
    """A ring in device memory: an allocation of its own, which can be registered whatever the pool is."""

    def __init__(self, cuda: Cuda, device: str, size: StagingSize, *, is_shared: bool = False) -> None:
        """``is_shared``: whether others of this host are to look at it."""
        self.size, self._cuda, self.ring_id = size, cuda, new_ring_id()
        # With the probe in it: no other memory is opened by whoever looks at the ring.
        address = cuda.allocate(size.num_bytes + PROBE_BYTES)
        self.region = Region("ring", size.num_bytes, address, device)
        self._exporter = Exporter(cuda, [self.region], address + size.num_bytes) if is_shared else None
        if self._exporter and not self._exporter.export.refusal:
            self.place = self._exporter.export.to_bytes().decode()

    def close(self) -> None:
        """Give the memory back; nothing may be under way."""
        if self._exporter:
            self._exporter.close()
            self._exporter = None
        address, self.region = self.region.address, Region("ring", self.size.num_bytes)
        if address:
            self._cuda.free(address)


class PinnedStagingRing(StagingRing):
    """A ring in the host's memory, which a device reaches, too."""

    def __init__(self, cuda: Cuda, size: StagingSize, shared: SharedMemory | None = None) -> None:
        super().__init__(size, shared)
        self._cuda, self._is_pinned = cuda, False
        try:
            cuda.pin(self.region.address, size.num_bytes)
        except BaseException:
            super().close()
            raise
        self._is_pinned = True

    def close(self) -> None:
        """Give the memory back; nothing may be under way."""
        if self._is_pinned:
            self._is_pinned = False
            self._cuda.unpin(self.region.address)
        super().close()


class DeviceChunkCopier:
    """By the copy kernel, in a stream of its own, from and to chunks that the device reaches."""

    def __init__(self, cuda: Cuda, kernel: CopyKernel, memory: Places, chunk_bytes: int) -> None:
        self.memory, self.chunk_bytes, self._cuda = memory, chunk_bytes, cuda
        self._queue = CopyQueue(cuda, kernel)

    def gather(self, sides: Sequence[TermSide], chunk: int) -> None:
        """As ``ChunkCopier`` says."""
        room = self._room(sides, chunk)
        self._copy(terms_to_chunk(sides), self.memory, room)

    def scatter(self, sides: Sequence[TermSide], chunk: int) -> None:
        """As ``ChunkCopier`` says."""
        room = self._room(sides, chunk)
        self._copy(map(_turned, terms_to_chunk(sides)), room, self.memory)

    def views(self, sides: Sequence[TermSide]) -> list[memoryview]:
        """The host touches none of it."""
        return []

    def new_chunk(self) -> HostBytes:
        """Pinned: the device reads and writes it by itself."""
        return self._cuda.pinned_array(self._cuda.allocate_pinned(self.chunk_bytes), self.chunk_bytes)

    def free_chunk(self, chunk: HostBytes) -> None:
        """As ``ChunkCopier`` says."""
        self._cuda.free_pinned(int(chunk.ctypes.data))

    def close(self) -> None:
        """Give the stream and its table up; nothing may be under way."""
        self._queue.close()

    def _room(self, sides: Sequence[TermSide], chunk: int) -> Places:
        """So much of a chunk as these take."""
        check_room(sides, self.chunk_bytes)
        num_bytes = max(1, sum(side.total_bytes for side in sides))  # runs may be empty, a region is not
        return Places("a chunk", [Region("chunk", num_bytes, chunk)])

    def _copy(self, terms: Iterable[Term], src: Places, dst: Places) -> None:
        """Copy, and wait for the end, which the device reports."""
        checked = repeated(Product(tuple(terms)), lambda pattern: prepare(pattern, src, dst))
        with self._cuda.current():
            try:
                self._queue.put(checked, sum(term.num_bytes for term in checked))
            finally:  # after an error, too: some of it may have been queued
                self._queue.wait()


def terms_to_chunk(sides: Sequence[TermSide]) -> Iterator[Term]:
    """From where these name to a chunk; the runs of a term have one length.

    >>> side = TermSide(np.array([0, 500]), np.array([8, 4]), np.array([0, 1000]))
    >>> for term in terms_to_chunk([side]):
    ...     print([(src, dst, num_bytes) for _, src, _, dst, num_bytes in term.runs()])
    [(500, 16, 4), (1500, 20, 4)]
    [(0, 0, 8), (1000, 8, 8)]
    """
    at = 0
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
