"""The packed way, as one rank has it: who sends its bytes to readers, and who asks others for theirs.

The source's rank checks ticket, lease and bytes, gathers, and sends them over a stream; the reader scatters
them. Nothing of either process is open to the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from kvferry.core.manifest import Region
from kvferry.errors import TransportError
from kvferry.transport.cards import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, Card, GatherPoint, digest_of
from kvferry.transport.chunk_copier import ChunkCopier, HostChunkCopier
from kvferry.transport.copy_kernel import CopyKernel
from kvferry.transport.device import RankDevice
from kvferry.transport.device_chunks import DeviceChunkCopier
from kvferry.transport.event_wait import EventWait
from kvferry.transport.gather_line import GatherLine
from kvferry.transport.places import Places
from kvferry.transport.quietly import quietly
from kvferry.transport.stream_reader import StreamLink, StreamMover

CHUNK_BYTES = 4 << 20
"""What is asked for, gathered and sent at once."""


@dataclass(frozen=True, eq=False, slots=True)
class Copiers:
    """Who copies between a rank's memory and chunks; each is for one thread."""

    sender: ChunkCopier
    receiver: ChunkCopier
    events: EventWait | None = None
    """Who waits for the device that the memory is on; None on the host."""

    def close(self) -> None:
        """Nothing may be under way."""
        for each in (self.sender, self.receiver, self.events):
            if each:
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
        undo.callback(receiver.close)
        made = Copiers(sender, receiver, EventWait(device.cuda))
        undo.pop_all()
    return made


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
        """Who gathers what this rank sends."""
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
        self.mover = StreamMover(self._copiers.receiver, line, self._copiers.events)
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
