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

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from queue import SimpleQueue
from time import sleep
from weakref import WeakKeyDictionary

from kvferry.core.choices import Way
from kvferry.core.manifest import Region
from kvferry.core.product import Product
from kvferry.core.runs import Runs
from kvferry.errors import TransportError
from kvferry.log import log_of
from kvferry.transport.agent import RegionTable
from kvferry.transport.base import CANCELLED, Connected, DeviceEvent, OnEnd, Start, quietly
from kvferry.transport.cards import Card
from kvferry.transport.copy_kernel import (
    CopyKernel,
    CopyLimits,
    CopyQueue,
    Prepared,
    Repeated,
    prepare,
    repeated,
)
from kvferry.transport.cuda import Cuda
from kvferry.transport.exports import Export, Exporter, Opened
from kvferry.transport.places import Places

log = log_of(__name__)

NUM_LANES = 4
SURE_BYTES_PER_SECOND = 4e12
"""No device copies faster: for so long a thread need not look whether a copy is done."""
AFTER_NAP_SECONDS = 200e-6
"""How often is looked whether the device has come to the event that a copy waits for."""
NAP_SECONDS = 150e-6
"""What a nap may take longer than it should."""


Patterns = WeakKeyDictionary[Runs, tuple[Prepared, ...]]
"""Patterns as addresses. A route keeps its patterns, and goes with its peer."""


@dataclass(eq=False)
class MappedRank:
    """A remote rank whose memory is open here."""

    name: str
    opened: Opened
    places: Places
    num_copies: int = 0
    """Copies that have not ended."""
    is_forgotten: bool = False
    prepared: Patterns = field(default_factory=WeakKeyDictionary)


@dataclass(eq=False)
class Copy:
    """A read, or a clearing, that has not ended."""

    rank: MappedRank | None
    """None: fill with zeros."""
    terms: Sequence[Repeated]
    """What the kernel is to copy."""
    on_end: OnEnd
    after: DeviceEvent | None
    """Nothing is written before the device has come to this mark of the engine's."""

    @cached_property
    def num_bytes(self) -> int:
        return sum(term.num_bytes for term in self.terms)


class DeviceCopier:
    """Copies from every remote rank that could be opened, into this rank's own device memory."""

    def __init__(self, cuda: Cuda, ours: Places, limits: CopyLimits | None = None) -> None:
        self._cuda, self._ours = cuda, ours
        kernel = CopyKernel(cuda, limits or CopyLimits())
        self._clearing: Patterns = WeakKeyDictionary()
        self._lock = threading.Condition()
        self._ranks: set[MappedRank] = set()
        self._waiting: deque[Copy] = deque()
        """Copies for which no lane is free; first come, first served."""
        self._lanes: list[CopyLane] = []
        try:
            while len(self._lanes) < NUM_LANES:
                self._lanes.append(CopyLane(cuda, kernel, self._next))
        except BaseException:
            for lane in self._lanes:
                lane.close()
            raise
        self._free = list(self._lanes)
        self._is_closed = False

    def connect(self, name: str, card: Card, regions: Sequence[Region], timeout_s: float) -> MappedLink:
        """Map a remote rank's memory; raises TransportError, with nothing left mapped, if it is not right."""
        export = Export.from_bytes(card.export)
        if any(region.is_on_host for region in regions):
            raise TransportError("not-mapped", "some of its memory is the host's")
        opened = Opened.open(self._cuda, export, regions)
        rank = MappedRank(name, opened, Places(name, opened.regions))
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._ranks.add(rank)
        if is_closed:  # whoever closed has unmapped all that was there, and does not come again
            opened.close()
            raise TransportError("closed", "this transport was closed")
        return MappedLink(self, rank)

    def clear(self, product: Product, on_end: OnEnd, after: DeviceEvent | None) -> None:
        """Fill the destination places of a product with zeros."""
        self.submit(Copy(None, self.terms(None, product), on_end, after))

    def submit(self, copy: Copy) -> None:
        """Start a copy, or put it in line; never waits for the device.

        Raises TransportError, with nothing written and no end to come.
        """
        with self._lock:
            if self._is_closed:
                raise TransportError("closed", "this transport was closed")
            if copy.rank:
                if copy.rank.is_forgotten:
                    raise TransportError("unknown-peer", f"{copy.rank.name!r} was forgotten")
                copy.rank.num_copies += 1
            lane = self._free.pop() if self._free else None
            if lane is None:
                self._waiting.append(copy)
        if lane:
            lane.start(copy)

    def cancel(self, copy: Copy) -> None:
        """Do not start a copy that waits; one that was started ends soon by itself."""
        with self._lock:
            if copy not in self._waiting:
                return
            self._waiting.remove(copy)
        self._end(copy, CANCELLED)

    def forget(self, rank: MappedRank) -> None:
        """Unmap a remote rank, now or when its last copy has ended."""
        with self._lock:
            rank.is_forgotten = True
            waiting = [copy for copy in self._waiting if copy.rank is rank]
        for copy in waiting:
            self.cancel(copy)
        self._unmap_if_quiet(rank)

    def close(self, timeout_s: float) -> bool:
        """Start nothing more, wait for what was started, unmap everything; whether it ended in time."""
        with self._lock:
            self._is_closed = True
            waiting, self._waiting = self._waiting, deque()
        for copy in waiting:
            self._end(copy, "the transport was closed")
        with self._lock:  # whoever took a lane before may not have started its copy yet
            if not self._lock.wait_for(lambda: len(self._free) == len(self._lanes), timeout_s):
                return False
        for lane in self._lanes:
            lane.close()
        for rank in list(self._ranks):
            self.forget(rank)
        return True

    def terms(self, rank: MappedRank | None, product: Product) -> list[Repeated]:
        """What the kernel is to copy; raises TransportError if a run would leave its region."""
        known, src = (rank.prepared, rank.places) if rank else (self._clearing, None)

        def prepared(pattern: Runs) -> tuple[Prepared, ...]:
            found = known.get(pattern)
            if found is None:
                found = known[pattern] = prepare(pattern, src, self._ours)
            return found

        return repeated(product, prepared)

    def _next(self, lane: CopyLane, ended: Copy, error: str) -> None:
        with self._lock:
            following = self._waiting.popleft() if self._waiting else None
        if following:
            lane.start(following)
        try:
            self._end(ended, error)
        finally:
            if following is None:
                with self._lock:
                    self._free.append(lane)
                    self._lock.notify_all()
                self._start_waiting()

    def _start_waiting(self) -> None:
        """A copy may have come while a lane was on its way to being free."""
        with self._lock:
            if not self._waiting or not self._free:
                return
            lane, copy = self._free.pop(), self._waiting.popleft()
        lane.start(copy)

    def _end(self, copy: Copy, error: str) -> None:
        if copy.rank:
            with self._lock:
                copy.rank.num_copies -= 1
            self._unmap_if_quiet(copy.rank)
        copy.on_end(error)

    def _unmap_if_quiet(self, rank: MappedRank) -> None:
        with self._lock:
            if not rank.is_forgotten or rank.num_copies or rank not in self._ranks:
                return
            self._ranks.discard(rank)
        try:
            rank.opened.close()
        except Exception as error:  # whatever it is, the copies that have ended are still to be reported
            log.warning("the memory of %s could not be unmapped: %s", rank.name, error)


class MappedLink:
    connected = Connected(Way.MAPPED)
    is_ordered = True

    def __init__(self, copier: DeviceCopier, rank: MappedRank) -> None:
        self._copier, self._rank = copier, rank
        self._copies: dict[int, Copy] = {}
        """By transfer, those that have not ended."""

    def prepare(self, product: Product, after: DeviceEvent | None, permit: bytes = b"") -> Start:
        """Check that all runs are inside of their regions."""
        return partial(self._start, self._copier.terms(self._rank, product), after)

    def _start(
        self, terms: Sequence[Repeated], after: DeviceEvent | None, transfer: int, on_end: OnEnd
    ) -> None:
        """Start a copy, or have it wait for a lane."""

        def end(error: str) -> None:
            self._copies.pop(transfer, None)
            on_end(error)

        copy = self._copies[transfer] = Copy(self._rank, terms, end, after)
        try:
            self._copier.submit(copy)
        except BaseException:
            del self._copies[transfer]
            raise

    def cancel(self, transfer: int) -> None:
        if copy := self._copies.get(transfer):
            self._copier.cancel(copy)

    def forget(self) -> None:
        """Unmap the rank's memory once nothing reads it."""
        self._copier.forget(self._rank)


class CopyLane:
    """A queue for one copy at a time, and a thread that waits for the device.

    Whoever starts a copy queues it on the device; the thread only waits for its end. That saves the time in
    which a second thread wakes up, in which the device copies a hundred megabytes.
    """

    def __init__(self, cuda: Cuda, kernel: CopyKernel, on_end: Callable[[CopyLane, Copy, str], None]) -> None:
        self._cuda, self._on_end = cuda, on_end
        self._started: SimpleQueue[tuple[Copy, str] | None] = SimpleQueue()
        self._queue = CopyQueue(cuda, kernel)
        self._thread = threading.Thread(target=self._run, name="kvferry-copy", daemon=True)
        self._thread.start()

    def start(self, copy: Copy) -> None:
        """Queue a copy on the device; in any thread, one at a time."""
        error = ""
        try:
            with self._cuda.current_for_launches():
                self._queue.put(copy.terms, copy.num_bytes, copy.after)
        except TransportError as failure:
            error = str(failure)
        except Exception as failure:
            log.exception("a copy could not be started, for an unexpected reason")
            error = f"unexpected: {failure!r}"
        self._started.put((copy, error))

    def _run(self) -> None:
        self._cuda.bind_thread()
        while started := self._started.get():
            copy, error = started
            try:
                # Also after an error: some of the copy may have been queued.
                self._queue.wait(partial(self._sleep, copy))
            except TransportError as failure:
                error = error or str(failure)
            except Exception as failure:  # this thread serves everybody: no copy may end it
                log.exception("a copy failed in an unexpected way")
                error = error or f"unexpected: {failure!r}"
            try:
                self._on_end(self, copy, error)
            except Exception:
                log.exception("the end of a copy could not be reported")
        quietly(self._queue.close)

    def _sleep(self, copy: Copy) -> None:
        """Sleep while the copy surely still runs."""
        while copy.after is not None and not self._cuda.has_come_to(copy.after):
            sleep(AFTER_NAP_SECONDS)
        nap = copy.num_bytes / SURE_BYTES_PER_SECOND - NAP_SECONDS
        if nap > 0:
            sleep(nap)

    def close(self) -> None:
        """End the thread. Nothing may be under way."""
        if self._thread.is_alive():
            self._started.put(None)
            self._thread.join()


class RankDevice:
    """One device, made when a rank's memory is registered; everything slow about it is done here."""

    def __init__(
        self,
        index: int,
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
            self._why_not = "some of this rank's memory is the host's"
        else:
            try:
                self._make_copier(memory)
                if is_open:
                    self._exporter = Exporter(self.cuda, memory.places.regions)
            except BaseException:
                self.close()
                raise
            if self._exporter and (refusal := self._exporter.export.refusal):
                log.warning("readers on this host cannot open this rank's memory: %s", refusal)

    def _make_copier(self, memory: RegionTable) -> None:
        try:
            self.copier = DeviceCopier(self.cuda, memory.places, self.limits)
        except TransportError as error:
            self._why_not = f"the copy kernel cannot be made: {error}"
            log.warning("%s", self._why_not)

    @property
    def card_part(self) -> bytes:
        """What readers of this host need, for the card."""
        return self._exporter.export.to_bytes() if self._exporter else b""

    def connect(self, name: str, card: Card, regions: Sequence[Region], timeout_s: float) -> MappedLink:
        """Open a remote rank's memory, or raise TransportError."""
        if self.copier is None:
            raise TransportError("not-mapped", self._why_not)
        return self.copier.connect(name, card, regions, timeout_s)

    def close(self) -> None:
        """Give everything back; nothing may be under way."""
        if self.copier:
            self.copier.close(0)
        if self._exporter:
            self._exporter.close()
        self.cuda.close()


def device_of(memory: RegionTable, limits: CopyLimits | None, *, is_open: bool) -> RankDevice | None:
    """The one CUDA device of a rank, if it has one; ``is_open``: whether readers may open its memory."""
    devices = sorted({kind.device_index for kind in memory.kinds if kind.name == "VRAM"})
    if len(devices) > 1:
        raise TransportError("bad-device", f"a rank has one CUDA device, got {devices}")
    return RankDevice(devices[0], memory, limits, is_open=is_open) if devices else None
