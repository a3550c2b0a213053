"""Packed reads of one rank: it sends bytes to readers, and requests those of other ranks.

The source rank checks ticket, lease and request, gathers the bytes, and sends them over a stream; the reader
scatters them. Neither process exposes memory to the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from kvferry.core.manifest import Region
from kvferry.core.view import Ints
from kvferry.errors import TransportError
from kvferry.host.threads import quietly
from kvferry.transport.cards import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, Card, GatherPoint, digest_of
from kvferry.transport.copy_kernel import CopyQueue, Prepared, Repeated, TableKernel
from kvferry.transport.cuda import Cuda
from kvferry.transport.mapped import RankDevice
from kvferry.transport.pack import ChunkCopier, HostBytes, TermSide, check_room
from kvferry.transport.places import Places, told_once
from kvferry.transport.stream_reader import GatherLine, StreamLink, StreamMover
from kvferry.transport.transfers import Transfers

ANY_ROOM = (1 << 63) - 1
"""Of a chunk, whose room ``check_room`` has checked."""


class DeviceChunkCopier(ChunkCopier):
    """Copies by the copy kernel, in a stream of its own, between device memory and pinned chunks."""

    def __init__(self, cuda: Cuda, kernel: TableKernel, memory: Places, chunk_bytes: int) -> None:
        super().__init__(memory, chunk_bytes)
        self._cuda = cuda
        self._queue = CopyQueue(cuda, kernel)

    def gather(self, sides: Sequence[TermSide], chunk: int) -> None:
        self._copy(sides, chunk, is_gather=True)

    def scatter(self, sides: Sequence[TermSide], chunk: int) -> None:
        self._copy(sides, chunk, is_gather=False)

    def views(self, sides: Sequence[TermSide]) -> list[memoryview]:
        """None: the host cannot touch device memory."""
        return []

    def new_chunk(self) -> HostBytes:
        """Pinned: the device reads and writes it."""
        return self._cuda.pinned_array(self._cuda.allocate_pinned(self.chunk_bytes), self.chunk_bytes)

    def free_chunk(self, chunk: HostBytes) -> None:
        self._cuda.free_pinned(int(chunk.ctypes.data))

    def close(self) -> None:
        self._queue.close()

    def _copy(self, sides: Sequence[TermSide], chunk: int, *, is_gather: bool) -> None:
        check_room(sides, self.chunk_bytes)
        terms = chunk_terms(sides, self.memory, chunk, is_gather=is_gather)
        with self._cuda.current():
            try:
                self._queue.put(terms, sum(term.num_bytes for term in terms))
            finally:  # after an error, too: some of it may have been queued
                self._queue.wait()


def chunk_terms(sides: Sequence[TermSide], memory: Places, chunk: int, *, is_gather: bool) -> list[Repeated]:
    """Copies of runs of one length, with the address of a chunk; raises TransportError like ``located``.

    ``check_room`` was called, so no run is too long for the kernel.

    >>> from kvferry.core.manifest import Region
    >>> memory = Places("ours", [Region("kv", 2000, address=4096)])
    >>> side = TermSide(np.array([0, 500]), np.array([8, 4]), np.array([0, 1000]))
    >>> for term in chunk_terms([side], memory, 1 << 20, is_gather=True):
    ...     print(term.prepared.num_bytes, term.prepared.addresses.tolist(), term.steps.tolist())
    4 [4596, 16] [[0, 1000], [1048576, 1048580]]
    8 [4096, 0] [[0, 1000], [1048576, 1048584]]
    """
    terms, done = [], 0
    for side in sides:
        num_pairs, lowest = len(side.steps), side.lowest
        ours, room = memory.located(side.lowest_places, side.num_bytes)
        for length, which, starts in _by_length(side.num_bytes, num_pairs):
            here, there = (ours[which], room), (starts + np.uint64(done), ANY_ROOM)
            steps = np.empty((2, num_pairs), np.int64)
            steps[1 - is_gather] = side.steps - lowest if lowest else side.steps
            steps[int(is_gather)] = chunk + np.arange(0, num_pairs * length, length)
            both = (here, there) if is_gather else (there, here)
            terms.append(Repeated(Prepared.of(both, length), steps))
        done += side.total_bytes
    return terms


def _by_length(num_bytes: Ints, num_pairs: int) -> Iterator[tuple[int, Ints | slice, NDArray[np.uint64]]]:
    """Runs of each length: their indices, and their offsets in a chunk."""
    if (told_once(num_bytes) == (length := int(num_bytes[0]))).all():  # as usual
        if each := length * num_pairs:
            yield length, slice(None), each * np.arange(len(num_bytes), dtype=np.uint64)
        return
    starts = (np.cumsum(num_bytes) - num_bytes).astype(np.uint64) * np.uint64(num_pairs)
    for length in filter(None, np.unique(num_bytes).tolist()):
        which = np.flatnonzero(num_bytes == length)
        yield length, which, starts[which]


CHUNK_BYTES = 4 << 20
"""Requested, gathered and sent at once."""


class PackedWay:
    def __init__(
        self, transfers: Transfers, memory: Places, device: RankDevice | None, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        if not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES:
            limits = f"{MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES} bytes"
            raise TransportError("bad-chunk", f"a chunk has {limits}, got {chunk_bytes}")
        self._transfers = transfers
        # A copier is for one thread, but the host's has no state.
        self.sender: ChunkCopier
        self.receiver: ChunkCopier
        if device is None:
            self.sender = self.receiver = ChunkCopier(memory, chunk_bytes)
        else:
            kernel = TableKernel(device.cuda, device.limits)
            with ExitStack() as undo:
                self.sender = DeviceChunkCopier(device.cuda, kernel, memory, chunk_bytes)
                undo.callback(self.sender.close)
                self.receiver = DeviceChunkCopier(device.cuda, kernel, memory, chunk_bytes)
                undo.pop_all()
        self.gather_point = b""
        """For the card; empty until ``advertise``."""
        self.mover: StreamMover | None = None

    def advertise(self, address: str) -> None:
        """Accept requests at this address."""
        point = GatherPoint(address, self.sender.chunk_bytes, digest_of(self.sender.memory.regions))
        self.gather_point = point.to_bytes()

    def open(self, line: GatherLine) -> None:
        """Send requests over this line."""
        if self.mover:
            raise TransportError("registered", "the control channel to source ranks is already set")
        self.mover = StreamMover(self._transfers, self.receiver, line)
        line.listen(self.mover)

    def link(self, peer: str, card: Card, regions: Sequence[Region]) -> StreamLink:
        """Raises TransportError. The first read opens the stream."""
        if not card.gather:
            raise TransportError("not-packed", f"{peer}: packed reads are disabled on the source rank")
        point = GatherPoint.from_bytes(card.gather)
        if self.mover is None:
            raise TransportError("not-packed", f"{peer}: this rank has no control channel to source ranks")
        if point.regions_digest != digest_of(regions):
            detail = f"{peer}: the regions in its card differ from those in its manifest"
            raise TransportError("no-connection", detail)
        return StreamLink(self.mover, peer, point, Places(peer, regions))

    def close(self) -> None:
        if self.mover:
            self.mover.line.close()
        for copier in (self.sender, self.receiver):
            quietly(copier.close)
