"""The embedded transport: all ranks are in this process, and a read is a copy.

It has no threads and no clock: reads advance when the reader polls. A test's hub can delay, stall or fail
them (``FaultyHub`` in ``tests.support.faults``).
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from kvferry.core.choices import Way
from kvferry.core.manifest import Rank, Region
from kvferry.core.product import Product, listed
from kvferry.core.runs import Runs
from kvferry.errors import SpecError, TransportError
from kvferry.transport.base import Connected, DeviceEvent, ReadEnd
from kvferry.transport.places import Places, checked
from kvferry.transport.reads import PostRoom, Read, ReadCarrier, ReadQueue
from kvferry.transport.transfers import Gate, Transfers

CARD = b"kvferry/memory/"


class Hub:
    """Connects the embedded transports of one process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._regions: dict[str, tuple[Region, ...]] = {}
        self._num_copying: Counter[str] = Counter()
        """Threads that copy from each one's memory."""
        self._numbers = count()

    def enter(self, regions: Sequence[Region]) -> str:
        """Add a transport with that memory; returns its name."""
        name = f"{next(self._numbers)}"
        with self._changed:
            self._regions[name] = tuple(regions)
        return name

    def leave(self, name: str) -> None:
        """Later reads from it fail; waits for current copies."""
        with self._changed:
            self._regions.pop(name, None)
            self._changed.wait_for(lambda: not self._num_copying[name])

    def knows(self, name: str) -> bool:
        return name in self._regions

    def has(self, name: str, region: Region) -> bool:
        stop = region.address + region.num_bytes
        known = self._regions.get(name, ())
        return any(r.address <= region.address and stop <= r.address + r.num_bytes for r in known)

    @contextmanager
    def copying(self, name: str) -> Iterator[bool]:
        """Keeps a transport's memory meanwhile; yields whether it is there."""
        with self._changed:
            is_there = self.knows(name)
            self._num_copying[name] += is_there
        try:
            yield is_there
        finally:
            with self._changed:
                self._num_copying[name] -= is_there
                self._changed.notify_all()

    def step(self, copies: Copies, read: Read) -> str:
        """Advance a read when it is polled; returns an error that ends it, or an empty text."""
        copies.move(read)
        return ""


@dataclass(frozen=True, slots=True)
class _RemoteRank:
    hub_name: str
    places: Places


@dataclass(slots=True)
class Copies:
    transfer: int
    peer: _RemoteRank
    src: list[int]
    dst: list[int]
    num_bytes: list[int]
    num_done: int = 0
    is_posted: bool = False
    """Whether all of it was posted, so that a cancel comes too late for its bytes."""

    def move(self, read: Read, num_runs: int | None = None) -> None:
        """Copy so many more runs, or all that are left."""
        stop = len(self.src) if num_runs is None else min(len(self.src), self.num_done + num_runs)
        while self.num_done < stop and (self.is_posted or not read.error):
            i = self.num_done
            ctypes.memmove(self.dst[i], self.src[i], self.num_bytes[i])
            self.num_done += 1


class MemoryTransport:
    """Copies within this process, in the thread that polls.

    >>> src, dst = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    >>> hub = Hub()
    >>> with_src, with_dst = MemoryTransport(hub), MemoryTransport(hub)
    >>> with_src.register([Region("kv", 64, src.ctypes.data)])
    >>> with_dst.register([Region("kv", 64, dst.ctypes.data)])
    >>> str(with_dst.connect("src", with_src.card(), [Region("kv", 64, src.ctypes.data)]))
    'memory'
    >>> with_dst.read(1, "src", Runs(np.array([8]), np.array([0]), np.array([3])))
    >>> with_dst.poll(), dst[:4].tolist()
    ([ReadEnd(transfer=1, error='')], [8, 9, 10, 0])
    """

    kind = "memory"

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._hub_name = ""
        self._places: Places | None = None
        self._gate = Gate()
        self._transfers = Transfers()
        self._queue = self._transfers.add(ReadQueue("all peers", ReadCarrier(), PostRoom(limit=1 << 62)))
        self._lock = threading.Lock()
        """Guards this rank's places and its peers."""
        self._moving = threading.Lock()
        """Held by the one thread that advances reads."""
        self._peers: dict[str, _RemoteRank] = {}

    def register(self, regions: Sequence[Region]) -> None:
        with self._gate, self._lock:
            if self._places is not None:
                raise TransportError("registered", "memory is already registered")
            for region in regions:
                if region.device != "cpu":
                    detail = f"region {region.name!r} is on {region.device!r}, not on 'cpu'"
                    raise TransportError("bad-device", detail)
            self._places = Places("ours", regions)
            self._hub_name = self._hub.enter(regions)

    def card(self) -> bytes:
        with self._gate:
            self._ours()
            return CARD + self._hub_name.encode()

    def connect(self, peer: str, card: bytes, regions: Sequence[Region]) -> Connected:
        with self._gate, self._lock:
            self._ours()
            hub_name = card.removeprefix(CARD).decode(errors="replace")
            if not card.startswith(CARD) or not self._hub.knows(hub_name):
                raise TransportError("bad-card", f"{peer}: {card!r:.60} is unknown in this hub")
            if peer in self._peers:
                raise TransportError("known-peer", f"{peer!r} is connected already")
            places = Places(peer, regions)
            for region in regions:
                if not self._hub.has(hub_name, region):
                    raise TransportError("no-connection", f"{peer} did not register {region.name!r}")
            self._peers[peer] = _RemoteRank(hub_name, places)
        return Connected(Way.MEMORY)

    def read(
        self,
        transfer: int,
        peer: str,
        runs: Runs | Product,
        *,
        after: DeviceEvent | None = None,
        permit: bytes = b"",
    ) -> None:
        with self._gate:
            ours = self._ours()
            with self._lock:
                known = self._peers.get(peer)
            if known is None:
                raise TransportError("unknown-peer", f"{peer!r} is not connected")
            moved = checked(listed(runs), known.places, ours)
            columns = known.places.addresses(moved.src), ours.addresses(moved.dst), moved.num_bytes
            copies = Copies(transfer, known, *(column.tolist() for column in columns))
            self._transfers.begin(transfer, [(self._queue, copies)])

    def cancel(self, transfer: int) -> None:
        self._transfers.cancel(transfer)

    def clear(self, transfer: int, runs: Runs | Product, *, after: DeviceEvent | None = None) -> None:
        with self._gate:
            ours, blank = self._ours(), listed(runs)
            ours.check(blank.dst, blank.num_bytes)
            clearing = self._transfers.begin(transfer, [], is_held=True, can_cancel=False)
            columns = ours.addresses(blank.dst).tolist(), blank.num_bytes.tolist()
            for address, num_bytes in zip(*columns, strict=True):
                ctypes.memset(address, 0, num_bytes)
            self._transfers.come(clearing)

    def poll(self) -> list[ReadEnd]:
        """Advance every read, unless another thread does so."""
        if self._moving.acquire(blocking=False):
            try:
                self._advance()
            finally:
                self._moving.release()
        return self._transfers.collect()

    def on_end(self, wake: Callable[[], None]) -> None:
        """Never called: reads end in ``poll``."""

    def forget(self, peer: str) -> None:
        """Drop a peer. Its reads go on."""
        with self._lock:
            self._peers.pop(peer, None)

    def close(self) -> None:
        """Advance every read, then leave the hub; raises, and can be repeated, if one has not ended."""
        self._gate.shut()
        self._gate.wait_until_empty(timeout_s=None)
        with self._moving:
            self._advance()
        if num_left := len(self._queue.shares):
            raise TransportError("still-under-way", f"{num_left} reads have not ended")
        self._transfers.wait_until_ended(timeout_s=None)  # another thread may be about to report it
        with self._lock:
            self._peers.clear()
        self._hub.leave(self._hub_name)

    def _advance(self) -> None:
        for share in [*self._queue.shares]:
            copies: Copies = share.work
            if not copies.is_posted and not self._transfers.post_share(share):
                continue  # it was cancelled
            with self._hub.copying(copies.peer.hub_name) as is_there:
                gone = f"{copies.peer.places.whose} is gone"
                error = self._hub.step(copies, share.read) if is_there else gone
            is_done = copies.num_done == len(copies.src)
            if is_done or error or not copies.is_posted:
                self._transfers.ended(share, error, is_last=is_done)

    def _ours(self) -> Places:
        if self._places is None:
            raise TransportError("not-registered", "register this rank's memory first")
        return self._places


def placed(rank: Rank, memory: Mapping[str, NDArray[np.uint8]]) -> tuple[Region, ...]:
    """The regions of a rank at the addresses of real buffers.

    >>> placed(Rank(0, (Region("kv", 64),), ()), {"kv": np.zeros(48, np.uint8)})
    Traceback (most recent call last):
    kvferry.errors.SpecError: rank 0: region kv has 64 bytes, the memory given for it has 48
    """
    for region in rank.regions:
        given = memory[region.name].nbytes if region.name in memory else 0
        if given != region.num_bytes:
            raise SpecError(
                f"rank {rank.rank}: region {region.name} has {region.num_bytes} bytes,"
                f" the memory given for it has {given}"
            )
    return tuple(replace(region, address=memory[region.name].ctypes.data) for region in rank.regions)
