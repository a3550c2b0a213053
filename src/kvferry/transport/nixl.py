"""The transport over NIXL: one-sided reads of host and CUDA memory, between processes and hosts.

A rank has one NIXL agent, owned by a thread of its own (see ``ferryman``); a second one is made when a peer
is met that the first cannot read by itself (see ``emulation``). Foreign code comes in here, and only here.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.core.manifest import Region
from kvferry.core.runs import Runs
from kvferry.errors import TransportError
from kvferry.transport.base import Cost, End
from kvferry.transport.cards import name_in, pack_card, unpack_card
from kvferry.transport.descriptors import Memory, Part
from kvferry.transport.emulation import SETTING, UCX_EMULATES, EmulatedReads, Way
from kvferry.transport.ferryman import Ferryman, Peer, Read, quietly
from kvferry.transport.places import Addresses, Places, checked

__all__ = ["Agent", "Memory", "NixlTransport", "Part", "check_installed", "pack_card", "unpack_card"]

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

PROGRESS_WAKE_US = 100_000
"""How long NIXL's own progress thread sleeps if no event wakes it. NIXL's Python wrapper fixes 0 here, which
keeps a core busy for ever; with events the thread costs nothing while idle and reads are as fast."""


class Agent:
    """NIXL's agent: the calls that a ferryman makes, and where NIXL's errors become ours."""

    def __init__(self, name: str, way: Way = Way.FAST) -> None:
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
            self._backends = [self._agent.createBackend("UCX", {"engine_config": way.engine_config})]

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
            quietly(self.remove, remote)
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


REFUSED = (
    "if it lives, nothing on the way can read its memory without its help, and that is refused"
    f" ({SETTING}, {UCX_EMULATES}). Let UCX use RDMA, CUDA IPC or, within one host and PID namespace, CMA"
    f" (see UCX_TLS), or set {SETTING}={EmulatedReads.CAREFUL.value}"
)


class Link(NamedTuple):
    """A connected peer, and who reads it."""

    ferryman: Ferryman
    peer: Peer


class Submitted(NamedTuple):
    """A read, and who carries it out."""

    ferryman: Ferryman
    read: Read


class NixlTransport:
    """Reads over NIXL. Its own calls take a lock or a queue, never the fabric."""

    kind = "nixl"

    def __init__(self, *, connect_timeout_s: float = 30.0, close_timeout_s: float = 30.0) -> None:
        self._connect_timeout_s, self._close_timeout_s = connect_timeout_s, close_timeout_s
        self._emulated_reads = EmulatedReads.from_environment()
        self._lock = threading.Lock()
        self._ferryman: Ferryman | None = None
        self._careful_ferryman: Ferryman | None = None
        """For peers that the other one cannot read; made when the first of them is met."""
        self._making = threading.Lock()
        self._links: dict[str, Link] = {}
        self._under_way: dict[int, Submitted] = {}
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
        way = Way.FAST if self._emulated_reads is EmulatedReads.FAST else Way.DIRECT
        self._ferryman = Ferryman(regions, way, Agent)

    def card(self) -> bytes:
        """Agent name and metadata. It carries the keys to the memory: whoever has it can read it all."""
        return self._running().card

    def connect(self, peer: str, card: bytes, regions: Sequence[Region]) -> None:
        """Add a peer, and read a little from it, so that the first real read is as fast as the next."""
        memory, deadline = Memory(peer, regions), monotonic() + self._connect_timeout_s
        self._check_new(peer)
        link = self._link(self._running(), peer, card, memory, deadline)
        try:
            with self._lock:
                self._check_new(peer)
                self._links[peer] = link
        except TransportError:
            link.ferryman.ask(partial(link.ferryman.forget, link.peer))
            raise

    def _link(self, ferryman: Ferryman, peer: str, card: bytes, memory: Memory, deadline: float) -> Link:
        """A peer that a ferryman, or the careful one, has read a little from."""
        warm: Future[str] = Future()
        warm_up = ferryman.ask(partial(ferryman.add, peer, card, memory, warm.set_result)).result()
        try:
            error, is_in_time = warm.result(max(0, deadline - monotonic())), True
        except TimeoutError:
            error, is_in_time = f"no answer within {self._connect_timeout_s:g} s", False
        if not error:
            return Link(ferryman, warm_up.peer)
        ferryman.ask(partial(ferryman.forget, warm_up.peer))
        # UCX says the same of a peer that is dead and of one that cannot be read directly.
        if ferryman.way is Way.DIRECT and warm_up.was_posted and is_in_time:
            if self._emulated_reads is EmulatedReads.REFUSE:
                raise TransportError("not-direct", f"{peer}: {error}; {REFUSED}")
            link = self._link(self._careful(), peer, card, memory, deadline)
            log.warning("%s cannot be read directly: UCX emulates its reads, and they are slow", peer)
            return link
        raise TransportError("no-connection", f"{peer}: {error}")

    def _careful(self) -> Ferryman:
        """Who reads the peers that can only be read with their own help."""
        with self._making:
            regions = self._running().memory.places.regions
            self._careful_ferryman = self._careful_ferryman or Ferryman(regions, Way.CAREFUL, Agent)
            return self._careful_ferryman

    def read(self, transfer: int, peer: str, runs: Runs) -> None:
        """Check the runs and put them in the peer's line."""
        self._running()
        with self._lock:
            if peer not in self._links:
                raise TransportError("unknown-peer", f"{peer!r} is not connected")
            ferryman, to = self._links[peer]
        runs = checked(runs, to.memory.places, ferryman.memory.places)
        read = Read(to, runs, ferryman.memory, partial(self._report, transfer))
        with self._lock:
            if transfer in self._under_way:
                raise TransportError("under-way", f"transfer {transfer} has not ended yet")
            self._under_way[transfer] = Submitted(ferryman, read)
            try:
                ferryman.submit(read)
            except TransportError:
                del self._under_way[transfer]
                raise

    def cancel(self, transfer: int) -> None:
        """Post nothing more of a read; what is posted ends as the fabric says."""
        with self._lock, suppress(TransportError):  # closed: all has ended, or is given up
            if submitted := self._under_way.get(transfer):
                submitted.ferryman.cancel(submitted.read)

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
            for end in ends:
                del self._under_way[end.transfer]
        return ends

    def on_end(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` from the ferryman's thread whenever a read has ended; it must be quick."""
        self._wake = wake

    def forget(self, peer: str) -> None:
        """Drop a peer: what is posted ends as the fabric says, what is not ends with an error."""
        with self._lock:
            gone = self._links.pop(peer, None)
        if gone:
            gone.ferryman.ask(partial(gone.ferryman.forget, gone.peer))

    def close(self) -> None:
        """Post nothing more, wait for what is posted, then give memory and peers up."""
        deadline = monotonic() + self._close_timeout_s
        with self._making:
            self._is_closed = True
        with self._lock:
            self._links.clear()
        are_over = [
            ferryman.close(max(0, deadline - monotonic()))
            for ferryman in (self._ferryman, self._careful_ferryman)
            if ferryman
        ]
        if not all(are_over):
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
        if peer in self._links:
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
