"""Chunks of a rank whose memory is a device's: the copy kernel fills and empties them.

The bytes of a chunk lie as ``pack`` says, whoever copies them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvferry.core.view import Ints
from kvferry.transport.chunk_copier import HostBytes
from kvferry.transport.copy_kernel import CopyKernel, Prepared, Repeated
from kvferry.transport.copy_queue import CopyQueue
from kvferry.transport.cuda import Cuda
from kvferry.transport.lengths import told_once
from kvferry.transport.pack import TermSide, check_room
from kvferry.transport.places import Places

ANY_ROOM = (1 << 63) - 1
"""Of a chunk, for whose room others look."""


class DeviceChunkCopier:
    """By the copy kernel, in a stream of its own, from and to chunks that the device reaches."""

    def __init__(self, cuda: Cuda, kernel: CopyKernel, memory: Places, chunk_bytes: int) -> None:
        self.memory, self.chunk_bytes, self._cuda = memory, chunk_bytes, cuda
        self._queue = CopyQueue(cuda, kernel)

    def gather(self, sides: Sequence[TermSide], chunk: int) -> None:
        """As ``ChunkCopier`` says."""
        check_room(sides, self.chunk_bytes)
        self._copy(chunk_terms(sides, self.memory, is_gather=True), chunk, is_gather=True)

    def scatterer(self, sides: Sequence[TermSide]) -> Callable[[int], None]:
        """As ``ChunkCopier`` says."""
        check_room(sides, self.chunk_bytes)
        return partial(self._copy, chunk_terms(sides, self.memory, is_gather=False), is_gather=False)

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

    def _copy(self, terms: Sequence[Repeated], chunk: int, *, is_gather: bool) -> None:
        """Copy, and wait for the end, which the device reports."""
        there = [at_chunk(term, chunk, is_gather=is_gather) for term in terms]
        with self._cuda.current():
            try:
                self._queue.put(there, sum(term.num_bytes for term in there))
            finally:  # after an error, too: some of it may have been queued
                self._queue.wait()


def chunk_terms(sides: Sequence[TermSide], memory: Places, *, is_gather: bool) -> list[Repeated]:
    """Copies between what these name and a chunk at address 0; each of runs of one length.

    They have room in the chunk (``check_room``), so no run is too long for the kernel. Raises TransportError
    if one leaves its region.

    >>> from kvferry.core.manifest import Region
    >>> memory = Places("ours", [Region("kv", 2000, address=4096)])
    >>> side = TermSide(np.array([0, 500]), np.array([8, 4]), np.array([0, 1000]))
    >>> for term in chunk_terms([side], memory, is_gather=True):
    ...     print(term.prepared.num_bytes, term.prepared.addresses.tolist(), term.steps.tolist())
    4 [4596, 16] [[0, 1000], [0, 4]]
    8 [4096, 0] [[0, 1000], [0, 8]]
    """
    terms, done = [], 0
    for side in sides:
        num_pairs, lowest = len(side.steps), side.lowest
        ours, room = memory.located(side.lowest_places, side.num_bytes)
        for length, which, starts in _by_length(side.num_bytes, num_pairs):
            here, there = (ours[which], room), (starts + np.uint64(done), ANY_ROOM)
            steps = np.empty((2, num_pairs), np.int64)
            steps[1 - is_gather] = side.steps - lowest if lowest else side.steps
            steps[int(is_gather)] = np.arange(0, num_pairs * length, length)
            both = (here, there) if is_gather else (there, here)
            terms.append(Repeated(Prepared.of(both, length), steps))
        done += side.total_bytes
    return terms


def at_chunk(term: Repeated, chunk: int, *, is_gather: bool) -> Repeated:
    """A copy from or to a chunk at another address than 0."""
    steps = term.steps.copy()
    steps[int(is_gather)] += chunk
    return Repeated(term.prepared, steps)


def _by_length(num_bytes: Ints, num_pairs: int) -> Iterator[tuple[int, Ints | slice, NDArray[np.uint64]]]:
    """Runs of each length: which they are, and where they begin if all lie side by side, pair after pair."""
    if (told_once(num_bytes) == (length := int(num_bytes[0]))).all():  # as usual
        if each := length * num_pairs:
            yield length, slice(None), each * np.arange(len(num_bytes), dtype=np.uint64)
        return
    starts = (np.cumsum(num_bytes) - num_bytes).astype(np.uint64) * np.uint64(num_pairs)
    for length in filter(None, np.unique(num_bytes).tolist()):
        which = np.flatnonzero(num_bytes == length)
        yield length, which, starts[which]
