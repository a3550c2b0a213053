"""The transport over NIXL: one-sided reads of host and CUDA memory, between processes and hosts.

NIXL is not assumed to be thread-safe: one thread, the *ferryman*, owns the agent and makes every call to it.
Callers only put things in line. Each peer has a line of its own; lines are served in turn, a slice at a time,
so that neither a caller nor another peer waits for a slow post.

What was posted cannot be called back: releasing a handle or removing an agent ends nothing, and bytes still
arrive. So handles are released only after the fabric reported their end, a failed read ends only when all its
posted slices have, and a forgotten peer is removed only when nothing is under way with it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
import threading
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from kvferry.core.manifest import Region
from kvferry.core.runs import Runs, place
from kvferry.errors import TransportError
from kvferry.transport.base import Cost, End
from kvferry.transport.cuda import Cuda
from kvferry.transport.places import Addresses, Places, checked
from kvferry.transport.slices import Limit, slices

T = TypeVar("T")
A = TypeVar("A")

log = logging.getLogger(__name__)

INSTALL = (
    'install it with: pip install "kvferry[nixl]". Its wheels ask for a CUDA build of torch, which kvferry'
    " does not need; without it: pip install --no-deps nixl nixl-cu12"
)

HOST_COST = Cost(seconds_per_run=2.3e-6, seconds_per_byte=1 / 6e9)
"""Two processes of one host, host memory (CMA), NIXL 1.5.1, two cores of a Xeon: 32,768 scattered runs of
16 KiB in 165 ms, the same bytes in one run in 88 ms (benchmarks/transport.py)."""
CUDA_COST = Cost(seconds_per_run=8e-6, seconds_per_byte=1 / 1.4e12)
"""Two processes, one H200, cuda_ipc, NIXL 1.5.1: 32,768 scattered runs of 16 KiB in 226 to 284 ms, 512 MiB in
one run at 1.4 to 1.8 TB/s (benchmarks/transport.py cuda:0)."""

HOST_SLICE = Limit(num_runs=1024, num_bytes=32 << 20)
"""A post of host memory copies before it returns: some milliseconds per slice."""
CUDA_SLICE = Limit(num_runs=1024, num_bytes=512 << 20)
"""A post of device memory takes time per run, hardly per byte."""
MAX_POSTED = 8
"""Slices under way per peer: enough to keep a fabric busy, few enough to be done soon after a failure."""

PROGRESS_WAKE_US = 100_000
"""How long NIXL's own progress thread sleeps if no event wakes it. NIXL's Python wrapper fixes 0 here, which
keeps a core busy for ever; with events the thread costs nothing while idle and reads are as fast."""

SHORTEST_NAP, LONGEST_NAP = 20e-6, 1e-3
"""Seconds between two looks at the transfers under way; doubled while nothing happens."""

CARD = struct.Struct(">8sIHI")
CARD_MAGIC = b"kvfnixl1"
METADATA_HEAD = b"nixlSerDes|Agent"
"""What NIXL 1.x puts before the name of the agent."""

WARM_REGIONS, WARM_BYTES = 64, 4096
"""What the first read touches: it sets up connections and device mappings, and is about ten times slower."""


class Kind(NamedTuple):
    """A kind of memory, as NIXL tells them apart, and the device."""

    name: str
    device_index: int

    @classmethod
    def of(cls, region: Region) -> Kind:
        """The kind of a region, from its device ('cpu', 'cuda:0').

        >>> Kind.of(Region("kv", 64, device="cuda:1"))
        Kind(name='VRAM', device_index=1)
        """
        name, _, index = region.device.partition(":")
        if name == "cpu" and not index:
            return cls("DRAM", 0)
        if name == "cuda" and (not index or index.isdecimal()):
            return cls("VRAM", int(index or 0))
        raise TransportError(
            "bad-device", f"region {region.name!r} is on {region.device!r}: not cpu or cuda:N"
        )


class Memory:
    """The regions of one rank, for lists of descriptors."""

    def __init__(self, whose: str, regions: Sequence[Region]) -> None:
        self.places = Places(whose, regions)
        self.kinds = tuple(Kind.of(region) for region in regions)
        self.names = np.array([kind.name for kind in self.kinds])
        self._device_of = np.array([kind.device_index for kind in self.kinds], np.uint64)

    def descriptors(self, places: NDArray[np.int64], num_bytes: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Address, length and device of each run, the form NIXL takes."""
        table = np.empty((len(places), 3), np.uint64)
        table[:, 0] = self.places.addresses(places)
        table[:, 1] = num_bytes
        table[:, 2] = self._device_of[Places.split(places)[0]]
        return table

    def whole(self) -> NDArray[np.uint64]:
        """A descriptor of each region."""
        regions = self.places.regions
        starts = np.array([place(i, 0) for i in range(len(regions))])
        return self.descriptors(starts, np.array([region.num_bytes for region in regions]))


class Part(NamedTuple):
    """A slice that can be posted: both sides' descriptors, each side of one kind of memory."""

    src_kind: str
    dst_kind: str
    src: NDArray[np.uint64]
    dst: NDArray[np.uint64]


def parts(runs: Runs, src: Memory, dst: Memory) -> Iterator[Part]:
    """A read as slices; a list of descriptors is of one kind of memory, so mixed reads are sorted first."""
    src_names, dst_names = (
        memory.names[Places.split(places)[0]] for memory, places in ((src, runs.src), (dst, runs.dst))
    )
    for src_kind in dict.fromkeys(src.names.tolist()):
        for dst_kind in dict.fromkeys(dst.names.tolist()):
            at = (src_names == src_kind) & (dst_names == dst_kind)
            some = runs if at.all() else Runs(runs.src[at], runs.dst[at], runs.num_bytes[at])
            limit = HOST_SLICE if "DRAM" in (src_kind, dst_kind) else CUDA_SLICE
            for part in slices(some, limit):
                yield Part(
                    src_kind,
                    dst_kind,
                    src.descriptors(part.src, part.num_bytes),
                    dst.descriptors(part.dst, part.num_bytes),
                )


class Agent:
    """NIXL's agent: the calls that a ferryman makes, and where NIXL's errors become ours."""

    def __init__(self, name: str) -> None:
        nixl = _import_nixl()
        config = nixl.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.pthrDelay = PROGRESS_WAKE_US
        config.syncMode = nixl.NIXL_THREAD_SYNC_NONE
        self.name = name
        self._nixl = nixl
        self._kinds = {"DRAM": nixl.DRAM_SEG, "VRAM": nixl.VRAM_SEG}
        with _translated("cannot make an agent"):
            self._agent = nixl.nixlAgent(name, config)
            self._backends = [self._agent.createBackend("UCX", {})]

    def register(self, kind: str, table: NDArray[np.uint64]) -> Any:
        """Make memory known; what comes back is for ``deregister``."""
        descriptors = self._nixl.nixlRegDList(self._kinds[kind], table)
        with _translated("cannot register memory"):
            self._agent.registerMem(descriptors, self._backends)
        return descriptors

    def deregister(self, registered: Any) -> None:
        with _translated("cannot deregister memory"):
            self._agent.deregisterMem(registered, self._backends)

    def metadata(self) -> bytes:
        with _translated("cannot get metadata"):
            return bytes(self._agent.getLocalMD())

    def add(self, remote: str, metadata: bytes) -> None:
        """Make a remote agent known, and start connecting to it.

        NIXL 1.5 keeps half of metadata that it could not load whole, and cannot be told to drop it: no card
        of that agent is accepted afterwards. Cards have a checksum, so that takes intent; others are safe.
        """
        if (named := name_in(metadata)) != remote:
            raise TransportError("bad-card", f"a card of {remote!r} with metadata of {named!r}")
        with _translated("cannot add the remote agent"):
            self._agent.loadRemoteMD(metadata)
        try:
            with _translated("cannot connect to the remote agent"):
                self._agent.makeConnection(remote, self._backends)
        except TransportError:
            _quietly(self.remove, remote)
            raise

    def remove(self, remote: str) -> None:
        with _translated("cannot remove the remote agent"):
            self._agent.invalidateRemoteMD(remote)

    def prepare(self, part: Part, remote: str) -> int:
        """A handle for a read."""
        dst = self._nixl.nixlXferDList(self._kinds[part.dst_kind], part.dst)
        src = self._nixl.nixlXferDList(self._kinds[part.src_kind], part.src)
        with _translated("cannot prepare the read"):
            return int(self._agent.createXferReq(self._nixl.NIXL_READ, dst, src, remote, b"", self._backends))

    def post(self, handle: int) -> bool:
        """Start; whether it is done already."""
        with _translated("the read failed when posted"):
            return self._is_done(self._agent.postXferReq(handle, b""))

    def check(self, handle: int) -> bool:
        """Whether it is done; raises if it failed."""
        with _translated("the read failed"):
            return self._is_done(self._agent.getXferStatus(handle))

    def release(self, handle: int) -> None:
        with _translated("cannot release a handle"):
            self._agent.releaseXferReq(handle)

    def _is_done(self, status: Any) -> bool:
        if status == self._nixl.NIXL_SUCCESS:
            return True
        if status == self._nixl.NIXL_IN_PROG:
            return False
        raise TransportError("nixl", str(status))


class _translated:  # noqa: N801  # reads as a phrase
    """Turns whatever NIXL raises into a TransportError."""

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, TransportError):
            reason = str(error) or type(error).__name__
            raise TransportError("nixl", f"{self._what}: {reason}") from error


def check_installed() -> None:
    """Raise a TransportError that says how to install NIXL, if it cannot be imported."""
    _import_nixl()


def _import_nixl() -> Any:
    try:
        from nixl import _bindings
    except ImportError as error:
        raise TransportError("not-installed", f"NIXL cannot be imported ({error}); {INSTALL}") from error
    return _bindings


def pack_card(agent: str, metadata: bytes) -> bytes:
    """A card: the agent's name and its metadata, with a checksum."""
    name = agent.encode()
    return CARD.pack(CARD_MAGIC, zlib.crc32(name + metadata), len(name), len(metadata)) + name + metadata


def name_in(metadata: bytes) -> str:
    """The name of the agent that metadata is of, as NIXL will read it; empty if it is none.

    >>> name_in(METADATA_HEAD + bytes([3, 0, 0, 0, 0, 0, 0, 0]) + b"src" + b"keys")
    'src'
    """
    if not metadata.startswith(METADATA_HEAD):
        return ""
    start = len(METADATA_HEAD) + 8
    stop = start + int.from_bytes(metadata[len(METADATA_HEAD) : start], "little")
    return metadata[start:stop].decode(errors="replace")


def unpack_card(card: bytes) -> tuple[str, bytes]:
    """The agent's name and its metadata.

    >>> unpack_card(pack_card("a", b"keys"))
    ('a', b'keys')
    >>> unpack_card(pack_card("a", b"keys")[:-1])
    Traceback (most recent call last):
    kvferry.errors.TransportError: bad-card: 22 bytes that are no card of this transport
    """
    if len(card) >= CARD.size:
        magic, checksum, num_name, num_metadata = CARD.unpack_from(card)
        body = card[CARD.size :]
        is_whole = magic == CARD_MAGIC and len(body) == num_name + num_metadata
        if is_whole and checksum == zlib.crc32(body):
            return body[:num_name].decode(errors="replace"), body[num_name:]
    raise TransportError("bad-card", f"{len(card)} bytes that are no card of this transport")


# ------------------------------------------------------------------------------------- the ferryman


@dataclass(eq=False, slots=True)
class Peer:
    """All that is known of one connected peer."""

    name: str
    agent: str
    memory: Memory
    line: deque[Read] = field(default_factory=deque)
    """Reads with slices that are not posted yet; first come, first served."""
    num_posted: int = 0
    """Slices under way."""
    is_forgotten: bool = False

    @property
    def can_post(self) -> bool:
        return bool(self.line) and self.num_posted < MAX_POSTED


@dataclass(eq=False, slots=True)
class Read:
    """A read that has not ended."""

    peer: Peer
    runs: Runs
    dst: Memory
    report: Callable[[str], None]
    """Called once, when it has ended, with the error or an empty text."""
    unposted: Iterator[Part] | None = None
    is_in_line: bool = False
    num_posted: int = 0
    error: str = ""

    def next_part(self) -> Part | None:
        if self.unposted is None:
            self.unposted = parts(self.runs, self.peer.memory, self.dst)
        return next(self.unposted, None)


class Ferryman:
    """Owns an agent, in a thread of its own."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self.memory = Memory("ours", regions)
        self.cuda = _cuda_of(self.memory.kinds)
        self.card = b""
        self._scratch = Scratch(self.cuda, regions[0].device)
        self._wake = threading.Condition()
        self._asked: deque[Callable[[], None]] = deque()
        self._is_closing = self._is_over = False
        self._peers: list[Peer] = []
        self._posted: list[tuple[int, Read]] = []
        self._references: Counter[str] = Counter()
        """Peers per remote agent."""
        self._cards: dict[str, bytes] = {}
        """By remote agent."""
        self._registered: list[Any] = []
        self._agent: Agent
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._main, args=(started,), name="kvferry-nixl", daemon=True)
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
        nap = SHORTEST_NAP
        while not self._sleep(nap):
            for job in self._take_asked():
                job()
            if self._is_closing:
                for peer in [*self._peers]:
                    self._give_up(peer, "the transport was closed")
            has_moved = self._post_round()
            has_moved |= self._check_posted()
            nap = SHORTEST_NAP if has_moved else min(2 * nap, LONGEST_NAP)
        self._stop()

    def _start(self) -> None:
        if self.cuda:
            # Without this, reads of device memory on one host go through TCP: 0.5 GB/s instead of 1,300.
            os.environ.setdefault("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "y")
            self.cuda.bind_thread()
        self._agent = Agent(f"kvferry-{uuid4().hex}")
        for memory in (self.memory, self._scratch.memory):
            for kind in dict.fromkeys(memory.names.tolist()):
                self._registered.append(self._agent.register(kind, memory.whole()[memory.names == kind]))
        self.card = pack_card(self._agent.name, self._agent.metadata())

    def _stop(self) -> None:
        if hasattr(self, "_agent"):
            for remote in self._references:
                _quietly(self._agent.remove, remote)
            for registered in self._registered:
                _quietly(self._agent.deregister, registered)
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
            elif not has_work:
                self._wake.wait(nap if self._posted else None)
            return self._is_over

    def _take_asked(self) -> Iterable[Callable[[], None]]:
        with self._wake:
            asked, self._asked = self._asked, deque()
        return asked

    # ---- in the thread: peers

    def add(self, name: str, card: bytes, memory: Memory, report: Callable[[str], None]) -> Peer:
        """Connect a peer, and read a little from it: ``report`` hears how that went."""
        agent, metadata = unpack_card(card)
        if agent == self._agent.name:
            raise TransportError("bad-card", f"{name}: this is our own card")
        if self._cards.get(agent, card) != card:
            # NIXL would take the new metadata for the old agent, and its reads with it.
            raise TransportError("bad-card", f"{name}: a second card of {agent!r}, which is connected")
        if self._is_closing:
            raise TransportError("closed", "this transport was closed")
        if agent not in self._cards:
            self._agent.add(agent, metadata)
            self._cards[agent] = card
        self._references[agent] += 1
        peer = Peer(name, agent, memory)
        self._peers.append(peer)
        self._line_up(Read(peer, _first_bytes(memory.places.regions), self._scratch.memory, report))
        return peer

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
        self._references[peer.agent] -= 1
        if not self._references[peer.agent]:
            del self._references[peer.agent], self._cards[peer.agent]
            _quietly(self._agent.remove, peer.agent)

    # ---- in the thread: reads

    def _line_up(self, read: Read) -> None:
        if read.peer.is_forgotten:
            read.error = f"peer {read.peer.name!r} was forgotten"
        if read.error or not len(read.runs):
            read.report(read.error)
            return
        read.is_in_line = True
        read.peer.line.append(read)

    def _leave_line(self, read: Read) -> None:
        """Nothing more of a read will be posted."""
        if read.is_in_line:
            read.peer.line.remove(read)
            read.is_in_line = False
        self._end_if_quiet(read)

    def _end_if_quiet(self, read: Read) -> None:
        """Report a read of which nothing is under way, and nothing will be."""
        if not read.num_posted and not read.is_in_line:
            read.report(read.error)
            self._remove_if_quiet(read.peer)

    def _post_round(self) -> bool:
        """Post one slice for every peer that has one and has room."""
        waiting = [peer for peer in self._peers if peer.can_post]
        for peer in waiting:
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
            handle = self._agent.prepare(part, read.peer.agent)
        except TransportError as error:
            read.error = read.error or str(error)
            return
        read.num_posted += 1
        read.peer.num_posted += 1
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
        _quietly(self._agent.release, handle)
        read.num_posted -= 1
        read.peer.num_posted -= 1


def _first_bytes(regions: Sequence[Region]) -> Runs:
    """The beginning of each region, to a place of no meaning."""
    regions = regions[:WARM_REGIONS]
    starts = [place(i, 0) for i in range(len(regions))]
    num_bytes = [min(WARM_BYTES, region.num_bytes) for region in regions]
    return Runs(np.array(starts), np.arange(len(regions)) * WARM_BYTES, np.array(num_bytes))


class Scratch:
    """Memory that warm-up reads may overwrite, on the device that real reads go to."""

    def __init__(self, cuda: Cuda | None, device: str) -> None:
        num_bytes = WARM_REGIONS * WARM_BYTES
        self._cuda = cuda if device != "cpu" else None
        self._buffer = np.zeros(0 if self._cuda else num_bytes, np.uint8)
        address = self._cuda.allocate(num_bytes) if self._cuda else self._buffer.ctypes.data
        self.memory = Memory("scratch", [Region("scratch", num_bytes, address, device)])

    def free(self) -> None:
        if self._cuda:
            self._cuda.free(self.memory.places.regions[0].address)


def _cuda_of(kinds: Iterable[Kind]) -> Cuda | None:
    """The one CUDA device of a rank, if it has one."""
    devices = sorted({kind.device_index for kind in kinds if kind.name == "VRAM"})
    if len(devices) > 1:
        raise TransportError("bad-device", f"a rank has one CUDA device, got {devices}")
    return Cuda(devices[0]) if devices else None


def _quietly(work: Callable[[A], None], argument: A) -> None:
    """Tidy up: what goes wrong is worth a line, not a dead thread."""
    try:
        work(argument)
    except TransportError as error:
        log.warning("%s", error)


# ------------------------------------------------------------------------------------ the transport


class NixlTransport:
    """Reads over NIXL. Its own calls take a lock or a queue, never the fabric; see the module."""

    kind = "nixl"

    def __init__(self, *, connect_timeout_s: float = 30.0, close_timeout_s: float = 30.0) -> None:
        self._connect_timeout_s, self._close_timeout_s = connect_timeout_s, close_timeout_s
        self._lock = threading.Lock()
        self._ferryman: Ferryman | None = None
        self._peers: dict[str, Peer] = {}
        self._under_way: set[int] = set()
        """Transfers whose end was not collected yet."""
        self._ends: deque[End] = deque()
        self._wake: Callable[[], None] = lambda: None
        self._is_closed = False

    @property
    def cost(self) -> Cost:
        """What a run and a byte cost, by the memory that was registered."""
        return CUDA_COST if self._ferryman and self._ferryman.cuda else HOST_COST

    def register(self, regions: Sequence[Region]) -> None:
        """Make this rank's own memory known, once; who made it keeps it alive until ``close``."""
        self._check_open()
        if self._ferryman:
            raise TransportError("registered", "memory is registered once")
        if not regions:
            raise TransportError("no-regions", "a rank has memory")
        self._ferryman = Ferryman(regions)

    def card(self) -> bytes:
        """Agent name and metadata. It carries the keys to the memory: whoever has it can read it all."""
        return self._running().card

    def connect(self, peer: str, card: bytes, regions: Sequence[Region]) -> None:
        """Add a peer, and read a little from it, so that the first real read is as fast as the next."""
        ferryman, memory, warm = self._running(), Memory(peer, regions), Future[str]()
        self._check_new(peer)
        deadline = monotonic() + self._connect_timeout_s
        added = ferryman.ask(partial(ferryman.add, peer, card, memory, warm.set_result)).result()
        try:
            error = warm.result(deadline - monotonic())
        except TimeoutError:
            error = f"no answer within {self._connect_timeout_s:g} s"
        try:
            if error:
                raise TransportError("no-connection", f"{peer}: {error}")
            with self._lock:
                self._check_new(peer)
                self._peers[peer] = added
        except TransportError:
            ferryman.ask(partial(ferryman.forget, added))
            raise

    def read(self, transfer: int, peer: str, runs: Runs) -> None:
        """Check the runs and put them in the peer's line."""
        ferryman = self._running()
        with self._lock:
            if peer not in self._peers:
                raise TransportError("unknown-peer", f"{peer!r} is not connected")
            to = self._peers[peer]
        runs = checked(runs, to.memory.places, ferryman.memory.places)
        with self._lock:
            if transfer in self._under_way:
                raise TransportError("under-way", f"transfer {transfer} has not ended yet")
            self._under_way.add(transfer)
        report = partial(self._report, transfer)
        try:
            ferryman.submit(Read(to, runs, ferryman.memory, report))
        except TransportError:
            self._under_way.discard(transfer)
            raise

    def clear(self, runs: Runs) -> None:
        """Fill the destination places of ``runs`` with zeros, on the host or on the device."""
        ferryman = self._running()
        memory = ferryman.memory
        memory.places.check(runs.dst, runs.num_bytes)
        addresses = memory.places.addresses(runs.dst)
        on_device = memory.names[Places.split(runs.dst)[0]] == "VRAM"
        for address, num_bytes in _spans(addresses, runs.num_bytes, ~on_device):
            ctypes.memset(address, 0, num_bytes)
        if ferryman.cuda and on_device.any():
            ferryman.cuda.clear(_spans(addresses, runs.num_bytes, on_device))

    def poll(self) -> list[End]:
        """The transfers that ended since the last call."""
        ends = [self._ends.popleft() for _ in range(len(self._ends))]
        with self._lock:
            self._under_way.difference_update(end.transfer for end in ends)
        return ends

    def on_end(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` from the ferryman's thread whenever a read has ended; it must be quick."""
        self._wake = wake

    def forget(self, peer: str) -> None:
        """Drop a peer: what is posted ends as the fabric says, what is not ends with an error."""
        with self._lock:
            gone = self._peers.pop(peer, None)
        if gone and self._ferryman:
            self._ferryman.ask(partial(self._ferryman.forget, gone))

    def close(self) -> None:
        """Post nothing more, wait for what is posted, then give memory and peers up."""
        self._is_closed = True
        with self._lock:
            self._peers.clear()
        if self._ferryman and not self._ferryman.close(self._close_timeout_s):
            raise TransportError(
                "still-under-way",
                f"reads did not end within {self._close_timeout_s:g} s: their memory must stay",
            )

    def _report(self, transfer: int, error: str) -> None:
        self._ends.append(End(transfer, error))
        self._wake()

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransportError("closed", "this transport was closed")

    def _check_new(self, peer: str) -> None:
        if peer in self._peers:
            raise TransportError("known-peer", f"{peer!r} is connected already")

    def _running(self) -> Ferryman:
        self._check_open()
        if self._ferryman is None:
            raise TransportError("not-registered", "register this rank's memory first")
        return self._ferryman


def _spans(
    addresses: Addresses, num_bytes: NDArray[np.int64], which: NDArray[np.bool_]
) -> Iterator[tuple[int, int]]:
    return zip(addresses[which].tolist(), num_bytes[which].tolist(), strict=True)
