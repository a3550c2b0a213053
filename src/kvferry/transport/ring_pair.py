"""The two rings of a rank, with who copies between each and the rank's memory; on the host or on a device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from kvferry.errors import TransportError
from kvferry.transport.chunk_copier import ChunkCopier, HostChunkCopier
from kvferry.transport.copy_kernel import CopyKernel, CopyLimits
from kvferry.transport.cuda import Cuda
from kvferry.transport.descriptors import RegionTable
from kvferry.transport.device import RankDevice
from kvferry.transport.device_chunks import DEVICE_RING, DeviceChunkCopier, DeviceStagingRing
from kvferry.transport.event_wait import EventWait
from kvferry.transport.places import Places
from kvferry.transport.ring_window import SharedRings
from kvferry.transport.staging import SETTING, PackedReads
from kvferry.transport.staging_ring import StagingRing, StagingSize

MIXED = f"some of this rank's memory is the host's, some a device's: {SETTING} is for one of them"


@dataclass(frozen=True, eq=False, slots=True)
class CopiedRing:
    """A ring, and who copies between it and the rank's memory; a thread of its own may use it."""

    ring: StagingRing
    copier: ChunkCopier

    def close(self) -> None:
        """Give both back; nothing may be under way."""
        self.copier.close()
        self.ring.close()


@dataclass(frozen=True, eq=False, slots=True)
class RingPair:
    """Each role has its own."""

    source: CopiedRing
    """Gathered into."""
    reader: CopiedRing
    """Read into, and scattered from."""
    events: EventWait | None = None
    """Who waits for the device that they are on; None on the host."""

    def close(self) -> None:
        """Give everything back; nothing may be under way."""
        self.source.close()
        self.reader.close()
        if self.events:
            self.events.close()


def host_rings(memory: Places, size: StagingSize, shared: SharedRings) -> RingPair:
    """Rings in the host's memory."""
    source, reader = (
        CopiedRing(ring, HostChunkCopier(memory, size.chunk_bytes))
        for ring in (shared.ring(size), StagingRing(size))
    )
    return RingPair(source, reader)


def device_rings(memory: Places, size: StagingSize, cuda: Cuda, limits: CopyLimits) -> RingPair:
    """Rings on the device where the memory is; raises TransportError, with nothing left, without room."""
    kernel = CopyKernel(cuda, limits)
    with ExitStack() as undo:
        source, reader = (_device_ring(memory, size, cuda, kernel, undo.callback) for _ in range(2))
        pair = RingPair(source, reader, EventWait(cuda))
        undo.pop_all()
    return pair


def _device_ring(
    memory: Places,
    size: StagingSize,
    cuda: Cuda,
    kernel: CopyKernel,
    undo: Callable[[Callable[[], None]], object],
) -> CopiedRing:
    ring = DeviceStagingRing(cuda, memory.regions[0].device, size)
    undo(ring.close)
    copier = DeviceChunkCopier(cuda, kernel, memory, ring)
    undo(copier.close)
    return CopiedRing(ring, copier)


def rings_for(
    memory: RegionTable,
    device: RankDevice | None,
    packed_reads: PackedReads,
    size: StagingSize | None,
    shared: SharedRings,
) -> RingPair | None:
    """The rings of a rank with this memory; None if it neither gathers nor has others gather for it."""
    if packed_reads is PackedReads.NEVER:
        return None
    if device is None:
        return host_rings(memory.places, size or StagingSize(), shared)
    if packed_reads is PackedReads.AUTO:  # there is no stream for it, and where the fabric reads, it does
        return None
    if device.is_mixed:
        raise TransportError("bad-device", MIXED)
    return device_rings(memory.places, size or DEVICE_RING, device.cuda, device.limits)
