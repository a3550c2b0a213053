"""The packed way, as one rank has it: who sends its bytes to readers, and who asks others for theirs.

The source's rank checks ticket, lease and bytes, gathers, and sends them over a stream; the reader scatters
them. Nothing of either process is open to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvferry.core.manifest import Region
from kvferry.core.view import Ints
from kvferry.errors import TransportError
from kvferry.transport.base import quietly
from kvferry.transport.cards import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, Card, GatherPoint, digest_of
from kvferry.transport.copy_kernel import CopyKernel, CopyQueue, Prepared, Repeated
from kvferry.transport.cuda import Cuda
from kvferry.transport.mapped import RankDevice
from kvferry.transport.pack import ChunkCopier, HostBytes, HostChunkCopier, TermSide, check_room
from kvferry.transport.places import Places, told_once
from kvferry.transport.stream_frames import GatherLine
from kvferry.transport.stream_reader import StreamLink, StreamMover

ANY_ROOM = (1 << 63) - 1
"""Of a chunk, for whose room others look."""


# Chunks of a rank whose memory is a device's: the copy kernel fills and empties them.
#
# The bytes of a chunk lie as ``pack`` says, whoever copies them.


class DeviceChunkCopier:
    """By the copy kernel, in a stream of its own, from and to chunks that the device reaches."""

    def __init__(self, cuda: Cuda, kernel: CopyKernel, memory: Places, chunk_bytes: int) -> None:
        self.memory, self.chunk_bytes, self._cuda = memory, chunk_bytes, cuda
        self._queue = CopyQueue(cuda, kernel)

    def gather(self, sides: Sequence[TermSide], chunk: int) -> None:
        check_room(sides, self.chunk_bytes)
        self._copy(chunk_terms(sides, self.memory, is_gather=True), chunk, is_gather=True)

    def scatterer(self, sides: Sequence[TermSide]) -> Callable[[int], None]:
        check_room(sides, self.chunk_bytes)
        return partial(self._copy, chunk_terms(sides, self.memory, is_gather=False), is_gather=False)

    def views(self, sides: Sequence[TermSide]) -> list[memoryview]:
        """The host touches none of it."""
        return []

    def new_chunk(self) -> HostBytes:
        """Pinned: the device reads and writes it by itself."""
        return self._cuda.pinned_array(self._cuda.allocate_pinned(self.chunk_bytes), self.chunk_bytes)

    def free_chunk(self, chunk: HostBytes) -> None:
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


CHUNK_BYTES = 4 << 20
"""What is asked for, gathered and sent at once."""


@dataclass(frozen=True, eq=False, slots=True)
class Copiers:
    """Who copies between a rank's memory and chunks; each is for one thread."""

    sender: ChunkCopier
    receiver: ChunkCopier

    def close(self) -> None:
        """Nothing may be under way."""
        for each in (self.sender, self.receiver):
            quietly(each.close)


def copiers_for(memory: Places, device: RankDevice | None, chunk_bytes: int = CHUNK_BYTES) -> Copiers:
    """For memory of the host, or of a device; raises TransportError, with nothing left, without room."""
    if not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES:
        raise TransportError("bad-chunk", f"{chunk_bytes} bytes: {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES}")
    if device is None:
        copier = HostChunkCopier(memory, chunk_bytes)
        return Copiers(copier, copier)
    kernel = CopyKernel(device.cuda, device.limits)
    with ExitStack() as undo:
        sender = DeviceChunkCopier(device.cuda, kernel, memory, chunk_bytes)
        undo.callback(sender.close)
        receiver = DeviceChunkCopier(device.cuda, kernel, memory, chunk_bytes)
        undo.pop_all()
    return Copiers(sender, receiver)


class PackedWay:
    """Of one rank."""

    def __init__(self, copiers: Copiers) -> None:
        self._copiers = copiers
        self.gather_point = b""
        """For the card; empty while nobody sends for this rank."""
        self.mover: StreamMover | None = None
        self._line: GatherLine | None = None

    @property
    def sender(self) -> ChunkCopier:
        return self._copiers.sender

    def advertise(self, address: str) -> None:
        """This rank is asked there for bytes."""
        copier = self._copiers.sender
        point = GatherPoint(address, copier.chunk_bytes, digest_of(copier.memory.regions))
        self.gather_point = point.to_bytes()

    def open(self, line: GatherLine) -> None:
        """Source ranks are asked by this line from now on."""
        if self.mover:
            raise TransportError("registered", "there is one line to the ranks that send")
        self._line = line
        self.mover = StreamMover(self._copiers.receiver, line)
        line.listen(self.mover)

    def link(self, peer: str, card: Card, regions: Sequence[Region]) -> StreamLink:
        """Read a peer by what it sends; its stream is opened by the first read. Raises TransportError."""
        if not card.gather:
            raise TransportError("not-packed", f"{peer}: its rank sends nothing to readers")
        point = GatherPoint.from_bytes(card.gather)
        if self.mover is None:
            raise TransportError("not-packed", f"{peer}: this rank has no line to ask others for bytes")
        if point.regions_digest != digest_of(regions):
            detail = "its regions are not those that this rank was told of"
            raise TransportError("no-connection", f"{peer}: {detail}")
        return StreamLink(self.mover, peer, point, Places(peer, regions))

    def close(self) -> None:
        """Nothing may be under way."""
        if self._line:
            self._line.close()
            self._line = None
        self._copiers.close()
