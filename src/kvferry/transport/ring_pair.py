"""The two rings of a rank, with who copies between each and the rank's memory; on the host or on a device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from kvferry.errors import TransportError
from kvferry.transport.chunk_copier import ChunkCopier, HostChunkCopier
from kvferry.transport.copy_kernel import CopyKernel, CopyLimits
from kvferry.transport.cuda import Cuda
from kvferry.transport.descriptors import RegionTable
from kvferry.transport.device import RankDevice
from kvferry.transport.device_chunks import (
    DEVICE_RING,
    DeviceChunkCopier,
    DeviceStagingRing,
    PinnedStagingRing,
)
from kvferry.transport.device_windows import window_of_device
from kvferry.transport.event_wait import EventWait
from kvferry.transport.places import Places
from kvferry.transport.quietly import quietly
from kvferry.transport.ring_options import RingMemory, RingOptions
from kvferry.transport.ring_window import RingWindow, SharedRings
from kvferry.transport.staging import SETTING, PackedReads, Staging
from kvferry.transport.staging_ring import StagingRing, StagingSize

MIXED = f"some of this rank's memory is the host's, some a device's: {SETTING} is for one of them"


@dataclass(frozen=True, eq=False, slots=True)
class CopiedRing:
    """A ring, and who copies between it and the rank's memory; a thread of its own may use it."""

    ring: StagingRing
    copier: ChunkCopier

    def close(self) -> None:
        """Give both back; nothing may be under way."""
        quietly(self.copier.close)
        self.ring.close()


@dataclass(frozen=True, eq=False, slots=True)
class RingPair:
    """Each role has its own, and so has each role over streams, which need no ring."""

    source: CopiedRing
    """Gathered into."""
    reader: CopiedRing
    """Read into, and scattered from."""
    sender: ChunkCopier
    """Gathers what is sent over streams."""
    receiver: ChunkCopier
    """Scatters what comes over streams."""
    open_window: Callable[[Staging], RingWindow]
    """To the ring of another process; raises OSError or TransportError if it cannot be seen from here."""
    events: EventWait | None = None
    """Who waits for the device that the memory is on; None on the host."""

    def close(self) -> None:
        """Give everything back; nothing may be under way."""
        for each in (self.source, self.reader, self.sender, self.receiver, self.events):
            if each:
                quietly(each.close)


def host_rings(memory: Places, options: RingOptions) -> RingPair:
    """For memory of the host, where one copier serves everybody."""
    size = options.size or StagingSize()
    copier = HostChunkCopier(memory, size.chunk_bytes)
    source, reader = StagingRing(size, options.shared.memory(size)), StagingRing(size)
    return RingPair(CopiedRing(source, copier), CopiedRing(reader, copier), copier, copier, RingWindow)


def device_rings(
    memory: Places, options: RingOptions, cuda: Cuda, limits: CopyLimits, *, are_on_host: bool = False
) -> RingPair:
    """For memory of a device; raises TransportError, with nothing left, without room.

    ``are_on_host``: whether the rings are; else they are on the device.
    """
    size = options.size or (StagingSize() if are_on_host else DEVICE_RING)
    kernel, is_shared = CopyKernel(cuda, limits), options.shared is SharedRings.ON
    with ExitStack() as undo:

        def copier() -> ChunkCopier:
            made = DeviceChunkCopier(cuda, kernel, memory, size.chunk_bytes)
            undo.callback(made.close)
            return made

        def copied(*, is_source: bool) -> CopiedRing:
            ring: StagingRing
            if are_on_host:
                ring = PinnedStagingRing(cuda, size, options.shared.memory(size) if is_source else None)
            else:
                device = memory.regions[0].device
                ring = DeviceStagingRing(cuda, device, size, is_shared=is_source and is_shared)
            undo.callback(ring.close)
            return CopiedRing(ring, copier())

        rings = copied(is_source=True), copied(is_source=False)
        pair = RingPair(*rings, copier(), copier(), partial(window_of_device, cuda), EventWait(cuda))
        undo.pop_all()
    return pair


def rings_for(
    memory: RegionTable,
    device: RankDevice | None,
    packed_reads: PackedReads,
    options: RingOptions,
) -> RingPair | None:
    """The rings of a rank with this memory; None if it neither gathers nor has others gather for it."""
    if packed_reads is PackedReads.NEVER:
        return None
    if device is None:
        return host_rings(memory.places, options)
    if device.is_mixed and packed_reads is PackedReads.AUTO:
        return None
    if device.is_mixed:
        raise TransportError("bad-device", MIXED)
    are_on_host = packed_reads is PackedReads.AUTO or options.memory is RingMemory.HOST
    return device_rings(memory.places, options, device.cuda, device.limits, are_on_host=are_on_host)
