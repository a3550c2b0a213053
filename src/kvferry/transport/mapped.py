"""Mapped reads: another process's device memory is opened here, and copied by the copy kernel.

A copy takes a *lane*: a stream, a table, and a thread that waits for the end. There are a few, so that a copy
that waits for the engine delays no other.

Only the device ends a copy. If the source dies, its memory stays while it is mapped here, and the lease
decides whether the bytes count. So a remote rank is unmapped after ``forget``, once its last read has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from time import sleep
from weakref import WeakKeyDictionary

from kvferry.core.choices import Way
from kvferry.core.manifest import Region
from kvferry.core.product import Product
from kvferry.core.runs import Runs
from kvferry.errors import TransportError
from kvferry.host.threads import JobThread, quietly
from kvferry.log import log_of
from kvferry.transport.base import Connected, DeviceEvent
from kvferry.transport.copy_kernel import (
    CopyLimits,
    CopyQueue,
    Prepared,
    Repeated,
    TableKernel,
    prepare,
    repeated,
)
from kvferry.transport.cuda import Cuda, Event
from kvferry.transport.exports import Export, Exporter, Opened
from kvferry.transport.places import Places, RegionTable
from kvferry.transport.reads import PostRoom, ReadCarrier, ReadQueue, Share, Work
from kvferry.transport.transfers import Transfers

log = log_of(__name__)

SURE_BYTES_PER_SECOND = 4e12
"""No device copies faster, so a thread can sleep for so long."""
AFTER_NAP_SECONDS = 200e-6
"""Interval of checks of the event that a copy waits for."""
NAP_SECONDS = 150e-6
"""How much longer a nap may take."""


@dataclass(eq=False)
class Copy:
    terms: Sequence[Repeated]
    after: DeviceEvent | None
    """Nothing is written before this event of the engine."""

    @cached_property
    def num_bytes(self) -> int:
        return sum(term.num_bytes for term in self.terms)


class CopyLane:
    """Queues one copy at a time, in the calling thread: to wake another takes as long as copying 100 MB."""

    def __init__(
        self, cuda: Cuda, kernel: TableKernel, on_end: Callable[[CopyLane, Share, str], None]
    ) -> None:
        self._cuda, self._on_end = cuda, on_end
        self._queue = CopyQueue(cuda, kernel)
        self._thread = JobThread("kvferry-copy", cuda.bind_thread)

    def start(self, share: Share) -> None:
        """Queue a copy on the device; from any thread, one at a time."""
        error, copy = "", share.work
        try:
            with self._cuda.current_for_launches():
                self._queue.put(copy.terms, copy.num_bytes, copy.after)
        except TransportError as failure:
            error = str(failure)
        except Exception as failure:
            log.exception("unexpected error: a copy was not started")
            error = f"unexpected: {failure!r}"
        self._thread.put(partial(self._wait, share, error))

    def _wait(self, share: Share, error: str) -> None:
        try:
            # After an error, too: some of the copy may have been queued.
            self._queue.wait(partial(self._sleep, share.work))
        except TransportError as failure:
            error = error or str(failure)
        except Exception as failure:
            log.exception("unexpected error: a copy failed")
            error = error or f"unexpected: {failure!r}"
        self._on_end(self, share, error)

    def _sleep(self, copy: Copy) -> None:
        """Sleep while the copy certainly runs."""
        while copy.after is not None and not self._cuda.has_come_to(copy.after):
            sleep(AFTER_NAP_SECONDS)
        nap = copy.num_bytes / SURE_BYTES_PER_SECOND - NAP_SECONDS
        if nap > 0:
            sleep(nap)

    def close(self) -> None:
        self._thread.put(self._queue.close)
        self._thread.close()
        self._thread.join()


NUM_LANES = 4
Patterns = WeakKeyDictionary[Runs, tuple[Prepared, ...]]
"""Patterns as addresses, as long as a route keeps its patterns."""


class MappedLink:
    connected, is_ordered = Connected(Way.MAPPED), True

    def __init__(self, opened: Opened, name: str, ours: Places, queue: ReadQueue) -> None:
        self.opened, self.queue, self.queues = opened, queue, [queue]
        self._terms = partial(_terms, WeakKeyDictionary(), Places(name, opened.regions), ours)

    def prepare(self, product: Product, after: DeviceEvent | None, permit: bytes = b"") -> Work:
        """Raises TransportError if a run leaves its region."""
        return [(self.queue, Copy(self._terms(product), after))]


def _terms(known: Patterns, src: Places | None, dst: Places, product: Product) -> list[Repeated]:
    def prepared(pattern: Runs) -> tuple[Prepared, ...]:
        found = known.get(pattern)
        if found is None:
            found = known[pattern] = prepare(pattern, src, dst)
        return found

    return repeated(product, prepared)


class DeviceCopier(ReadCarrier):
    def __init__(self, transfers: Transfers, cuda: Cuda, ours: Places, limits: CopyLimits) -> None:
        self._transfers, self._cuda, self._ours = transfers, cuda, ours
        kernel = TableKernel(cuda, limits)
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
        """At least as many as the room has left."""
        self._clearing = transfers.add(ReadQueue("ours", self, PostRoom(NUM_LANES)))
        """All queues share its room and its list of waiting copies."""
        self._clear_terms = partial(_terms, WeakKeyDictionary(), None, ours)

    def connect(self, name: str, exported: bytes, regions: Sequence[Region]) -> MappedLink:
        """Map a remote rank's memory; raises TransportError, with nothing mapped."""
        export = Export.from_bytes(exported)
        if any(region.is_on_host for region in regions):
            raise TransportError("not-mapped", "part of its memory is on the host")
        return self.link(name, Opened.open(self._cuda, export, regions))

    def link(self, name: str, opened: Opened) -> MappedLink:
        """Raises TransportError, and unmaps the memory, after ``close``."""
        queue = ReadQueue(name, self, self._clearing.room, waiting=self._clearing.waiting)
        link = self._links[queue] = MappedLink(opened, name, self._ours, queue)
        try:
            self._transfers.add(queue)
        except TransportError:
            self.release(queue)
            raise
        return link

    def clear(self, product: Product, after: DeviceEvent | None) -> Work:
        return [(self._clearing, Copy(self._clear_terms(product), after))]

    def wake(self) -> None:
        """Start waiting copies while lanes are free; never waits for the device."""
        while share := self._transfers.post(self._clearing, is_last=True):
            self._free.pop().start(share)

    def release(self, queue: ReadQueue) -> None:
        """Unmap a remote rank: its last copy has ended."""
        if link := self._links.pop(queue, None):
            try:
                link.opened.close()
            except Exception as error:  # the ends of copies must still be reported
                log.warning("the memory of %s could not be unmapped: %s", queue.name, error)

    def close(self, timeout_s: float) -> bool:
        """Wait for all copies, then end the lanes; returns whether they ended in time."""
        if not self._transfers.wait_until_ended(timeout_s):
            return False
        for lane in self._lanes:
            lane.close()
        return True

    def _ended(self, lane: CopyLane, share: Share, error: str) -> None:
        self._free.append(lane)
        self._transfers.ended(share, error)


class EventWait:
    """Holds direct and packed reads until their device event; calls back in order.

    The engine may free an event as soon as its read has ended, perhaps cancelled. So this thread waits for an
    event of its own, which follows the engine's in a stream of its own.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        with cuda.current():
            self._stream = cuda.make_stream()
        self._thread = JobThread("kvferry-event-wait", cuda.bind_thread)

    def follow(self, event: DeviceEvent) -> Event:
        """An event behind another one, which is not needed any more; never blocks."""
        with self._cuda.current(), ExitStack() as undo:
            mark = self._cuda.make_event()
            undo.callback(self._cuda.free_event, mark)
            try:
                self._cuda.wait_in_stream(self._stream, event)
            except TransportError:
                raise
            except Exception as error:  # perhaps it is not an event
                raise TransportError("cuda", f"cannot wait for {event!r:.80}: {error!r}") from error
            self._cuda.record(mark, self._stream)
            undo.pop_all()
        return mark

    def submit(self, mark: Event, then: Callable[[str], None]) -> None:
        """Call ``then`` after a mark, with the device's error or an empty text; never blocks."""
        self._thread.put(partial(self._wait, mark, then))

    def close(self) -> None:
        """End after what was submitted."""
        self._thread.put(partial(self._cuda.free_stream, self._stream))
        self._thread.close()

    def _wait(self, mark: Event, then: Callable[[str], None]) -> None:
        error = ""
        try:
            self._cuda.wait_event(mark)
        except TransportError as failure:
            error = str(failure)
        quietly(self._cuda.free_event, mark)
        then(error)


class RankDevice:
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
        """Whether some of the rank's memory is on the host."""
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
            self._why_not = f"the copy kernel is unavailable: {error}"
            log.warning("%s", self._why_not)

    @property
    def card_part(self) -> bytes:
        """The export for readers of this host."""
        return self._exporter.export.to_bytes() if self._exporter else b""

    def connect(self, name: str, exported: bytes, regions: Sequence[Region]) -> MappedLink:
        if self.copier is None:
            raise TransportError("not-mapped", self._why_not)
        return self.copier.connect(name, exported, regions)

    def close(self) -> None:
        if self.copier:
            self.copier.close(0)
        if self._exporter:
            self._exporter.close()
        self.cuda.close()


def device_of(
    transfers: Transfers, memory: RegionTable, limits: CopyLimits | None, *, is_open: bool
) -> RankDevice | None:
    """The CUDA device of a rank, if it has one."""
    devices = sorted({kind.device_index for kind in memory.kinds if kind.name == "VRAM"})
    if len(devices) > 1:
        raise TransportError("bad-device", f"a rank can use one CUDA device, got {devices}")
    return RankDevice(devices[0], transfers, memory, limits, is_open=is_open) if devices else None
