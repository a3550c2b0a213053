"""The mapped way: another process's device memory, opened here and copied by one kernel of ours.

A copy takes a *lane*: a stream of the device, room for the table that the kernel reads, and a thread that
waits for the end. There are a few lanes, so that a copy whose destination the engine still writes to holds up
no other.

The only end of a copy is the one that the device reports. A source that dies meanwhile changes nothing for
the copy: its memory stays while it is mapped here, and whether the bytes count is the lease's to say. So a
remote rank is unmapped as soon as it is forgotten and nothing reads it any more: until then, the dead
engine's device memory stays taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from weakref import WeakKeyDictionary

from kvferry.core.choices import Way
from kvferry.core.manifest import Region
from kvferry.core.product import Product
from kvferry.core.runs import Runs
from kvferry.errors import TransportError
from kvferry.log import log_of
from kvferry.transport.base import Connected, DeviceEvent
from kvferry.transport.copy_kernel import (
    CopyKernel,
    CopyLimits,
    Prepared,
    Repeated,
    prepare,
    repeated,
)
from kvferry.transport.cuda import Cuda
from kvferry.transport.device_wait import Copy, CopyLane
from kvferry.transport.exports import Export, Exporter, Opened
from kvferry.transport.places import Places, RegionTable
from kvferry.transport.reads import PostRoom, ReadCarrier, ReadQueue, Share, Work
from kvferry.transport.transfers import Transfers

log = log_of(__name__)

NUM_LANES = 4
Patterns = WeakKeyDictionary[Runs, tuple[Prepared, ...]]
"""Patterns as addresses. A route keeps its patterns, and goes with its peer."""


class MappedLink:
    """A remote rank whose memory is open here."""

    connected, is_ordered = Connected(Way.MAPPED), True

    def __init__(self, opened: Opened, name: str, ours: Places, queue: ReadQueue) -> None:
        self.opened, self.queue, self.queues = opened, queue, [queue]
        self._terms = partial(_terms, WeakKeyDictionary(), Places(name, opened.regions), ours)

    def prepare(self, product: Product, after: DeviceEvent | None, permit: bytes = b"") -> Work:
        """Check that all runs are inside of their regions."""
        return [(self.queue, Copy(self._terms(product), after))]


def _terms(known: Patterns, src: Places | None, dst: Places, product: Product) -> list[Repeated]:
    """What the kernel is to copy; raises TransportError if a run would leave its region."""

    def prepared(pattern: Runs) -> tuple[Prepared, ...]:
        found = known.get(pattern)
        if found is None:
            found = known[pattern] = prepare(pattern, src, dst)
        return found

    return repeated(product, prepared)


class DeviceCopier(ReadCarrier):
    """Copies from every remote rank that could be opened, into this rank's own device memory."""

    def __init__(
        self, transfers: Transfers, cuda: Cuda, ours: Places, limits: CopyLimits | None = None
    ) -> None:
        self._transfers, self._cuda, self._ours = transfers, cuda, ours
        kernel = CopyKernel(cuda, limits or CopyLimits())
        self._links: dict[ReadQueue, MappedLink] = {}
        self._lanes: list[CopyLane] = []
        try:
            while len(self._lanes) < NUM_LANES:
                self._lanes.append(CopyLane(cuda, kernel, self._ended))
        except BaseException:
            for lane in self._lanes:
                lane.close()
            raise
        self._free = list(self._lanes)
        """As many as there is room, or more: who counts as posted has one."""
        self._clearing = transfers.add(ReadQueue("ours", self, PostRoom(NUM_LANES)))
        """All copies wait in one line, first come, first served."""
        self._clear_terms = partial(_terms, WeakKeyDictionary(), None, ours)

    def connect(self, name: str, exported: bytes, regions: Sequence[Region]) -> MappedLink:
        """Map a remote rank's memory; raises TransportError, with nothing left mapped, if it is not right."""
        export = Export.from_bytes(exported)
        if any(region.is_on_host for region in regions):
            raise TransportError("not-mapped", "part of its memory is on the host")
        return self.link(name, Opened.open(self._cuda, export, regions))

    def link(self, name: str, opened: Opened) -> MappedLink:
        """Read memory that is open; raises TransportError, having closed it, if no more can be read."""
        queue = ReadQueue(name, self, self._clearing.room, waiting=self._clearing.waiting)
        link = self._links[queue] = MappedLink(opened, name, self._ours, queue)
        try:
            self._transfers.add(queue)
        except TransportError:
            self.release(queue)
            raise
        return link

    def clear(self, product: Product, after: DeviceEvent | None) -> Work:
        """Fill the destination places of a product with zeros."""
        return [(self._clearing, Copy(self._clear_terms(product), after))]

    def wake(self) -> None:
        """Start what waits while lanes are free; never waits for the device."""
        while share := self._transfers.post(self._clearing, is_last=True):
            self._free.pop().start(share)

    def release(self, queue: ReadQueue) -> None:
        """Unmap a remote rank: its last copy has ended."""
        if link := self._links.pop(queue, None):
            try:
                link.opened.close()
            except Exception as error:  # whatever it is, the copies that have ended are still to be reported
                log.warning("the memory of %s could not be unmapped: %s", queue.name, error)

    def close(self, timeout_s: float) -> bool:
        """Wait for what was started, then end the lanes; whether it ended in time. Nothing more may come."""
        if not self._transfers.wait_until_ended(timeout_s):
            return False
        for lane in self._lanes:
            lane.close()
        return True

    def _ended(self, lane: CopyLane, share: Share, error: str) -> None:
        self._free.append(lane)
        self._transfers.ended(share, error)


class RankDevice:
    """One device, made when a rank's memory is registered; everything slow about it is done here."""

    def __init__(
        self,
        index: int,
        transfers: Transfers,
        memory: RegionTable,
        limits: CopyLimits | None = None,
        *,
        is_open: bool = True,
    ) -> None:
        """``is_open``: whether readers of this host may open its memory."""
        self.cuda, self.limits = Cuda(index), limits or CopyLimits()
        self.is_mixed = "DRAM" in memory.names
        """Whether some of the rank's memory is the host's, which a kernel does not copy."""
        self.copier: DeviceCopier | None = None
        self._why_not = ""
        self._exporter: Exporter | None = None
        if self.is_mixed:
            self._why_not = "part of this rank's memory is on the host"
        else:
            try:
                self._make_copier(transfers, memory)
                if is_open:
                    self._exporter = Exporter(self.cuda, memory.regions)
            except BaseException:
                self.close()
                raise
            if self._exporter and (refusal := self._exporter.export.refusal):
                log.warning("readers on this host cannot open this rank's memory: %s", refusal)

    def _make_copier(self, transfers: Transfers, memory: RegionTable) -> None:
        try:
            self.copier = DeviceCopier(transfers, self.cuda, memory, self.limits)
        except TransportError as error:
            self._why_not = f"the copy kernel cannot be made: {error}"
            log.warning("%s", self._why_not)

    @property
    def card_part(self) -> bytes:
        """What readers of this host need, for the card."""
        return self._exporter.export.to_bytes() if self._exporter else b""

    def connect(self, name: str, exported: bytes, regions: Sequence[Region]) -> MappedLink:
        """Open a remote rank's memory, or raise TransportError."""
        if self.copier is None:
            raise TransportError("not-mapped", self._why_not)
        return self.copier.connect(name, exported, regions)

    def close(self) -> None:
        """Give everything back; nothing may be under way."""
        if self.copier:
            self.copier.close(0)
        if self._exporter:
            self._exporter.close()
        self.cuda.close()


def device_of(
    transfers: Transfers, memory: RegionTable, limits: CopyLimits | None, *, is_open: bool
) -> RankDevice | None:
    """The one CUDA device of a rank, if it has one; ``is_open``: whether readers may open its memory."""
    devices = sorted({kind.device_index for kind in memory.kinds if kind.name == "VRAM"})
    if len(devices) > 1:
        raise TransportError("bad-device", f"a rank has one CUDA device, got {devices}")
    return RankDevice(devices[0], transfers, memory, limits, is_open=is_open) if devices else None
