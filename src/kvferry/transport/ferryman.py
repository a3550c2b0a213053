"""The ferryman: the thread that owns a NIXL agent, and makes every call to it.

NIXL is not assumed to be thread-safe. Callers only put things in line. Each peer has a line of its own; lines
are served in turn, a slice at a time, so that neither a caller nor another peer waits for a slow post.

What was posted cannot be called back: releasing a handle or removing an agent ends nothing, and bytes still
arrive. So handles are released only after the fabric reported their end, a failed read ends only when all its
posted slices have, and a forgotten peer is removed only when nothing is under way with it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from kvferry.core.manifest import Region
from kvferry.core.runs import Runs, place
from kvferry.errors import TransportError
from kvferry.transport.base import CANCELLED
from kvferry.transport.cards import pack_card, segment_in, unpack_card
from kvferry.transport.cuda import Cuda
from kvferry.transport.descriptors import Kind, Memory, Pace, Part, parts
from kvferry.transport.emulation import Segments, Way

if TYPE_CHECKING:
    from kvferry.transport.nixl import Agent

T = TypeVar("T")
A = TypeVar("A")

log = logging.getLogger(__name__)

SHORTEST_NAP, LONGEST_NAP = 20e-6, 1e-3
"""Seconds between two looks at the transfers under way; doubled while nothing happens."""
EAGER_S = 300e-6
"""How long there is no nap on the careful way, where nothing is posted before the last run has ended: over
loopback a run of 8 KiB takes about 30 µs, one of 255 KiB about 130, and a nap of 20 µs about 80."""

WARM_REGIONS, WARM_BYTES = 64, 4096
"""What the first read touches: it sets up connections and device mappings, and is about ten times slower."""


@dataclass(eq=False, slots=True)
class Connection:
    """To one remote agent, for all peers that are met there."""

    agent: str
    card: bytes
    pace: Pace
    num_peers: int = 0
    num_posted: int = 0
    """Slices under way."""


@dataclass(eq=False, slots=True)
class Peer:
    """All that is known of one connected peer."""

    name: str
    connection: Connection
    memory: Memory
    line: deque[Read] = field(default_factory=deque)
    """Reads with slices that are not posted yet; first come, first served."""
    num_posted: int = 0
    """Slices under way."""
    is_forgotten: bool = False

    @property
    def can_post(self) -> bool:
        return bool(self.line) and self.connection.num_posted < self.connection.pace.num_posted


@dataclass(eq=False, slots=True)
class Read:
    """A read that has not ended."""

    peer: Peer
    runs: Runs
    dst: Memory
    report: Callable[[str], None]
    """Called once, when it has ended, with the error or an empty text."""
    has_ended: bool = False
    unposted: Iterator[Part] | None = None
    is_in_line: bool = False
    num_posted: int = 0
    was_posted: bool = False
    """Whether the fabric was asked for any of it."""
    error: str = ""

    def next_part(self) -> Part | None:
        if self.unposted is None:
            self.unposted = parts(self.runs, self.peer.memory, self.dst, self.peer.connection.pace)
        return next(self.unposted, None)


class Ferryman:
    """Owns an agent, in a thread of its own, and reads every peer in the same way."""

    def __init__(self, regions: Sequence[Region], way: Way, make_agent: Callable[[str, Way], Agent]) -> None:
        self.way = way
        self.memory = Memory("ours", regions)
        self.cuda = _cuda_of(self.memory.kinds)
        self.card = b""
        self._make_agent = make_agent
        self._scratch = Scratch(self.cuda, [region.device for region in regions])
        self._wake = threading.Condition()
        self._asked: deque[Callable[[], None]] = deque()
        self._is_closing = self._is_over = False
        self._peers: deque[Peer] = deque()
        self._posted: list[tuple[int, Read]] = []
        self._connections: dict[str, Connection] = {}
        """By remote agent."""
        self._registered: list[Any] = []
        self._agent: Agent
        started: Future[None] = Future()
        name = f"kvferry-nixl-{way.value}"
        self._thread = threading.Thread(target=self._main, args=(started,), name=name, daemon=True)
        self._thread.start()
        started.result()

    # ---- from any thread

    def ask(self, work: Callable[[], T]) -> Future[T]:
        """Have something done by the thread."""
        future: Future[T] = Future()

        def job() -> None:
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

        self._put(job)
        return future

    def submit(self, read: Read) -> None:
        """Put a read in line."""
        self._put(partial(self._line_up, read))

    def cancel(self, read: Read) -> None:
        """Post nothing more of a read."""
        self._put(partial(self._cancel, read))

    def close(self, timeout_s: float) -> bool:
        """Post nothing more; whether everything under way ended in time. Can be tried again."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _put(self, job: Callable[[], None]) -> None:
        with self._wake:
            if self._is_over:
                raise TransportError("closed", "this transport was closed")
            self._asked.append(job)
            self._wake.notify()

    # ---- in the thread: the loop

    def _main(self, started: Future[None]) -> None:
        try:
            self._start()
        except BaseException as error:
            self._stop()
            started.set_exception(error)
            return
        started.set_result(None)
        nap, moved_at = SHORTEST_NAP, monotonic()
        while not self._sleep(nap):
            for job in self._take_asked():
                job()
            if self._is_closing:
                for peer in [*self._peers]:
                    self._give_up(peer, "the transport was closed")
            has_moved = self._post_round()
            has_moved |= self._check_posted()
            if has_moved:
                moved_at = monotonic()
            if self.way is Way.CAREFUL and monotonic() < moved_at + EAGER_S:
                nap = 0.0
            else:
                nap = SHORTEST_NAP if has_moved else min(max(2 * nap, SHORTEST_NAP), LONGEST_NAP)
        self._stop()

    def _start(self) -> None:
        if self.cuda:
            # Without this, reads of device memory on one host go through TCP: 0.5 GB/s instead of 1,300.
            os.environ.setdefault("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "y")
            self.cuda.bind_thread()
        self._agent = self._make_agent(f"kvferry-{uuid4().hex}", self.way)
        for memory in (self.memory, self._scratch.memory):
            for kind in dict.fromkeys(memory.names.tolist()):
                self._registered.append(self._agent.register(kind, memory.whole()[memory.names == kind]))
        self.card = pack_card(self._agent.name, self._agent.metadata(), Segments.from_environment().sent)

    def _stop(self) -> None:
        if hasattr(self, "_agent"):
            for remote in self._connections:
                quietly(self._agent.remove, remote)
            for registered in self._registered:
                quietly(self._agent.deregister, registered)
            del self._agent
        self._scratch.free()
        if self.cuda:
            self.cuda.close()

    def _sleep(self, nap: float) -> bool:
        """Wait for something to do, at most a nap while slices are under way; whether all is over."""
        with self._wake:
            has_work = bool(self._asked) or any(peer.can_post for peer in self._peers)
            if not has_work and self._is_closing and not self._posted:
                self._is_over = True
            elif not has_work and (nap or not self._posted):
                self._wake.wait(nap if self._posted else None)
        if not nap:
            os.sched_yield()  # to the source, perhaps, and to whoever waits for the interpreter
        return self._is_over

    def _take_asked(self) -> Iterable[Callable[[], None]]:
        with self._wake:
            asked, self._asked = self._asked, deque()
        return asked

    # ---- in the thread: peers

    def add(self, name: str, card: bytes, memory: Memory, report: Callable[[str], None]) -> Read:
        """Connect a peer, and read a little from it: ``report`` hears how that went."""
        agent, metadata = unpack_card(card)
        if agent == self._agent.name:
            raise TransportError("bad-card", f"{name}: this is our own card")
        if self._is_closing:
            raise TransportError("closed", "this transport was closed")
        connection = self._connections.get(agent) or Connection(agent, card, self.way.pace(segment_in(card)))
        if connection.card != card:
            # NIXL would take the new metadata for the old agent, and its reads with it.
            raise TransportError("bad-card", f"{name}: a second card of {agent!r}, which is connected")
        if agent not in self._connections:
            self._agent.add(agent, metadata)
            self._connections[agent] = connection
        connection.num_peers += 1
        peer = Peer(name, connection, memory)
        self._peers.append(peer)
        warm_up = Read(peer, self._scratch.first_bytes(memory.places.regions), self._scratch.memory, report)
        self._line_up(warm_up)
        return warm_up

    def forget(self, peer: Peer) -> None:
        """Post nothing more for a peer, and remove it once nothing is under way with it."""
        peer.is_forgotten = True
        self._give_up(peer, f"peer {peer.name!r} was forgotten")
        self._remove_if_quiet(peer)

    def _give_up(self, peer: Peer, reason: str) -> None:
        """Post nothing that stands in a peer's line any more."""
        for read in [*peer.line]:
            read.error = read.error or reason
            self._leave_line(read)

    def _remove_if_quiet(self, peer: Peer) -> None:
        if not peer.is_forgotten or peer.num_posted or peer not in self._peers:
            return
        self._peers.remove(peer)
        connection = peer.connection
        connection.num_peers -= 1
        if not connection.num_peers:
            del self._connections[connection.agent]
            quietly(self._agent.remove, connection.agent)

    # ---- in the thread: reads

    def _line_up(self, read: Read) -> None:
        if read.peer.is_forgotten:
            read.error = f"peer {read.peer.name!r} was forgotten"
        if read.error or not len(read.runs):
            self._end_if_quiet(read)
            return
        read.is_in_line = True
        read.peer.line.append(read)

    def _cancel(self, read: Read) -> None:
        if not read.has_ended:
            read.error = read.error or CANCELLED
            self._leave_line(read)

    def _leave_line(self, read: Read) -> None:
        """Nothing more of a read will be posted."""
        if read.is_in_line:
            read.peer.line.remove(read)
            read.is_in_line = False
        self._end_if_quiet(read)

    def _end_if_quiet(self, read: Read) -> None:
        """Report a read of which nothing is under way, and nothing will be."""
        if not read.num_posted and not read.is_in_line:
            read.has_ended = True
            read.report(read.error)
            self._remove_if_quiet(read.peer)

    def _post_round(self) -> bool:
        """Post one slice for every peer that has one, where its connection has room."""
        waiting = [peer for peer in self._peers if peer.can_post]
        self._peers.rotate(-1)
        for peer in waiting:
            if not peer.can_post:  # another peer of the same connection was first
                continue
            read, part = peer.line[0], None
            try:
                part = read.next_part()
            except Exception as error:  # this thread serves everybody: no read may end it
                log.exception("a read could not be cut into slices")
                read.error = f"it could not be cut into slices: {error!r}"
            if part is not None:
                self._post(read, part)
            if part is None or read.error:
                self._leave_line(read)
        return bool(waiting)

    def _post(self, read: Read, part: Part) -> None:
        try:
            handle = self._agent.prepare(part, read.peer.connection.agent)
        except TransportError as error:
            read.error = read.error or str(error)
            return
        read.was_posted = True
        self._count(read, 1)
        try:
            if self._agent.post(handle):
                self._end_slice(handle, read)
                return
        except TransportError as error:
            # Some of its runs may be on their way: only a look at its state says that none is any more.
            read.error = read.error or str(error)
        self._posted.append((handle, read))

    def _check_posted(self) -> bool:
        """Look at every slice under way; whether one ended."""
        posted, self._posted = self._posted, []
        for handle, read in posted:
            try:
                is_done = self._agent.check(handle)
            except TransportError as error:
                read.error = read.error or str(error)
                is_done = True
            if not is_done:
                self._posted.append((handle, read))
                continue
            self._end_slice(handle, read)
            if read.error:
                self._leave_line(read)
            else:
                self._end_if_quiet(read)
        return len(self._posted) < len(posted)

    def _end_slice(self, handle: int, read: Read) -> None:
        quietly(self._agent.release, handle)
        self._count(read, -1)

    @staticmethod
    def _count(read: Read, num_slices: int) -> None:
        for counted in (read, read.peer, read.peer.connection):
            counted.num_posted += num_slices


class Scratch:
    """Memory that warm-up reads may overwrite, on each device that real reads go to."""

    def __init__(self, cuda: Cuda | None, devices: Iterable[str]) -> None:
        self._cuda = cuda
        self._buffers: list[NDArray[np.uint8]] = []
        self.memory = Memory("scratch", [self._region(device) for device in dict.fromkeys(devices)])

    def _region(self, device: str) -> Region:
        num_bytes = WARM_REGIONS * WARM_BYTES
        if self._cuda and device != "cpu":
            return Region("scratch", num_bytes, self._cuda.allocate(num_bytes), device)
        self._buffers.append(np.zeros(num_bytes, np.uint8))
        return Region("scratch", num_bytes, self._buffers[-1].ctypes.data, device)

    def first_bytes(self, regions: Sequence[Region]) -> Runs:
        """The beginning of each region, to each device: whatever kinds of memory a real read will meet."""
        regions = regions[:WARM_REGIONS]
        src = np.array([place(i, 0) for i in range(len(regions))])
        num_bytes = np.array([min(WARM_BYTES, region.num_bytes) for region in regions])
        num_devices = len(self.memory.kinds)
        dst = [place(i, 0) + np.arange(len(regions)) * WARM_BYTES for i in range(num_devices)]
        return Runs(np.tile(src, num_devices), np.concatenate(dst), np.tile(num_bytes, num_devices))

    def free(self) -> None:
        for region in self.memory.places.regions:
            if self._cuda and region.device != "cpu":
                self._cuda.free(region.address)


def _cuda_of(kinds: Iterable[Kind]) -> Cuda | None:
    """The one CUDA device of a rank, if it has one."""
    devices = sorted({kind.device_index for kind in kinds if kind.name == "VRAM"})
    if len(devices) > 1:
        raise TransportError("bad-device", f"a rank has one CUDA device, got {devices}")
    return Cuda(devices[0]) if devices else None


def quietly(work: Callable[[A], None], argument: A) -> None:
    """Tidy up: what goes wrong is worth a line, not a dead thread."""
    try:
        work(argument)
    except TransportError as error:
        log.warning("%s", error)
