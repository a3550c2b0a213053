"""The thread that owns a NIXL agent and makes every call to it: NIXL is not assumed to be thread-safe.

It posts reads slice by slice. Each remote rank has a queue, and queues take turns, so that a slow post
delays no other rank for long.

Any call to the agent may raise anything. Then:

=========== ============================================================================================
prepare     nothing was posted: the read fails
post        some of it may be under way: the read fails, but ends only when a check says so
check       a TransportError is the fabric's report of a failure, an end. After any other exception the
            transfer is still under way and is checked again
release     the transfer has ended; a handle may be lost
remove      nothing is under way; the agent may keep what it knew
=========== ============================================================================================

If the thread has to stop nevertheless, it fails everything that waits or comes later. Reads of which
something was posted are then never reported, since their end cannot be known any more.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic, sleep
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from kvferry.core.manifest import Region
from kvferry.core.product import Product
from kvferry.core.runs import Runs, place
from kvferry.errors import TransportError
from kvferry.host.threads import quietly
from kvferry.log import is_worth_a_line, log_of
from kvferry.transport.cards import Card
from kvferry.transport.cuda import Cuda
from kvferry.transport.nixl_agent import Agent, SlicePair, slice_pairs
from kvferry.transport.places import RegionTable, checked
from kvferry.transport.reads import PostRoom, Read, ReadCarrier, ReadQueue, Share
from kvferry.transport.settings import CUDA_ENVIRONMENT, UcxSettings
from kvferry.transport.transfers import Transfers

log = log_of(__name__)

WARM_REGIONS, WARM_BYTES = 64, 4096
"""Extent of the first, small read. A rank's first read is about ten times slower than the next."""


class Scratch:
    """Memory that warm-up reads overwrite, on each device that reads write to."""

    def __init__(self, cuda: Cuda | None, devices: Iterable[str]) -> None:
        self._cuda = cuda
        self._buffers: list[NDArray[np.uint8]] = []
        self.memory = RegionTable("scratch", [self._region(device) for device in dict.fromkeys(devices)])

    def _region(self, device: str) -> Region:
        num_bytes = WARM_REGIONS * WARM_BYTES
        if self._cuda and device != "cpu":
            return Region("scratch", num_bytes, self._cuda.allocate(num_bytes), device)
        self._buffers.append(np.zeros(num_bytes, np.uint8))
        return Region("scratch", num_bytes, self._buffers[-1].ctypes.data, device)

    def first_bytes(self, regions: Sequence[Region]) -> Runs:
        """The beginning of each region, to each device: all pairs of memory kinds."""
        regions = regions[:WARM_REGIONS]
        src = np.array([place(i, 0) for i in range(len(regions))])
        num_bytes = np.array([min(WARM_BYTES, region.num_bytes) for region in regions])
        num_devices = len(self.memory.kinds)
        dst = [place(i, 0) + np.arange(len(regions)) * WARM_BYTES for i in range(num_devices)]
        return Runs(np.tile(src, num_devices), np.concatenate(dst), np.tile(num_bytes, num_devices))

    def free(self) -> None:
        for region in self.memory.regions:
            if self._cuda and region.device != "cpu":
                self._cuda.free(region.address)


class RegisteredAgent:
    def __init__(self, memory: RegionTable, cuda: Cuda | None, make_agent: Callable[[], Agent]) -> None:
        if cuda:
            for setting, value in CUDA_ENVIRONMENT.items():
                os.environ.setdefault(setting, value)
            cuda.bind_thread()
        self.scratch = Scratch(cuda, [region.device for region in memory.regions])
        self._registered: list[Any] = []
        try:
            self.agent = make_agent()
            for table in (memory, self.scratch.memory):
                for kind in dict.fromkeys(table.names.tolist()):
                    self._registered.append(self.agent.register(kind, table.whole()[table.names == kind]))
            self.metadata = self.agent.metadata()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for registered in self._registered:
            quietly(self.agent.deregister, registered)
        self.__dict__.pop("agent", None)  # NIXL ends its own threads with the last reference
        quietly(self.scratch.free)


T = TypeVar("T")


MAX_POSTED = 8
"""Slices under way per peer: enough to keep a fabric busy, few enough to be done soon after a failure."""
SHORTEST_NAP, LONGEST_NAP = 5e-6, 1e-3
"""Seconds between two checks of the transfers under way."""
NAP_SHARE = 0.02
"""Length of a nap, as a share of the time since something happened: the added latency."""
PAUSE_S = 0.05
"""Pause after an unexpected error, which might repeat at full speed."""


@dataclass(eq=False, slots=True)
class Connection:
    """To one remote agent, shared by the remote ranks behind it."""

    card: Card
    room: PostRoom = field(default_factory=lambda: PostRoom(MAX_POSTED))


@dataclass(eq=False, slots=True)
class RemoteRank:
    connection: Connection
    memory: RegionTable
    dst: RegionTable
    """The reader's own memory."""
    queue: ReadQueue
    has_fabric_failed: bool = False
    """Whether NIXL itself reported the first error of a read of this rank."""

    def checked(self, product: Product) -> Runs:
        """The runs to read; raises TransportError if one leaves its region."""
        return checked(product.runs, self.memory, self.dst)

    @property
    def copies_on_host(self) -> bool:
        return any("DRAM" in memory.names for memory in (self.memory, self.dst))

    def work(self, runs: Runs) -> tuple[ReadQueue, Iterator[SlicePair]]:
        return self.queue, slice_pairs(runs, self.memory, self.dst)


@dataclass(eq=False, slots=True)
class PostedSlice:
    handle: int
    rank: RemoteRank
    share: Share
    num_failed_checks: int = 0
    """Checks that left its state unknown."""

    def fabric_failed(self, error: TransportError) -> str:
        """Note that NIXL itself reported the error; returns the error of the read."""
        self.rank.has_fabric_failed |= not self.share.read.error
        return str(error)


class AgentThread(ReadCarrier):
    def __init__(
        self,
        transfers: Transfers,
        memory: RegionTable,
        cuda: Cuda | None,
        settings: UcxSettings,
        make_agent: Callable[[str, str], Agent],
    ) -> None:
        """``make_agent`` takes a name and settings for NIXL's UCX engine."""
        self._transfers, self._memory = transfers, memory
        self._changed = threading.Condition()
        self._inbox: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._is_closing = False
        self._refusal: TransportError | None = None
        """Set when the thread accepts no more work."""
        # Used by the thread only:
        self._agent: Agent
        self._ranks: deque[RemoteRank] = deque()
        self._posted: list[PostedSlice] = []
        self._connections: dict[str, Connection] = {}
        name, made = f"kvferry-{uuid4().hex}", Future[RegisteredAgent]()
        make = partial(RegisteredAgent, memory, cuda, partial(make_agent, name, settings.engine_config))
        self._thread = threading.Thread(
            target=self._main, args=(make, made), name="kvferry-nixl", daemon=True
        )
        self._thread.start()
        self._scratch = made.result().scratch
        self.card = Card(name, made.result().metadata)

    # ---- from any thread

    def connect(self, name: str, card: Card, regions: Sequence[Region], timeout_s: float) -> RemoteRank:
        """Connect a remote rank, and verify that by a small read; raises TransportError or TimeoutError."""
        memory, deadline = RegionTable(name, regions), monotonic() + timeout_s
        warm: Future[str] = Future()
        added = self._ask(partial(self._add, name, card, memory, warm.set_result))
        try:
            rank = added.result(_until(deadline))
            if error := warm.result(_until(deadline)):
                # UCX does not tell a dead peer from one that it cannot read directly.
                detail = f"{name}: {error}"
                raise TransportError("not-direct" if rank.has_fabric_failed else "no-connection", detail)
        except (TimeoutError, TransportError):
            added.add_done_callback(self._forget_added)
            raise
        return rank

    def wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def release(self, queue: ReadQueue) -> None:
        with suppress(TransportError):
            self._ask(partial(self._remove, queue))

    def close(self, timeout_s: float) -> bool:
        """Stop posting; returns whether everything under way ended in time. Can be repeated."""
        self._is_closing = True
        self.wake()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _ask(self, work: Callable[[], T]) -> Future[T]:
        """Run something in the thread; raises TransportError if the thread has ended."""
        future: Future[T] = Future()
        with self._changed:
            if self._refusal:
                raise TransportError(self._refusal.code, self._refusal.detail)
            self._inbox.append((future, work))
            self._changed.notify()
        return future

    def _forget_added(self, added: Future[RemoteRank]) -> None:
        if not added.exception():
            self._transfers.forget([added.result().queue])

    # ---- in the thread

    def _main(self, make: Callable[[], RegisteredAgent], made: Future[RegisteredAgent]) -> None:
        try:
            registered = make()
        except BaseException as error:
            made.set_exception(_ours(error))
            return
        self._agent = registered.agent
        made.set_result(registered)
        try:
            self._serve()
        except BaseException as error:
            log.critical("the thread of a NIXL agent stops after repeated errors", exc_info=error)
            reason = f"{type(error).__name__}: {error}"
            self._refuse_all(TransportError("broken", f"the thread of the NIXL agent has stopped: {reason}"))
            if self._posted:
                self._thread.name = "kvferry-broken-agent"
                threading.Event().wait()  # for ever: the agent must outlive what is under way
        for agent in self._connections:
            quietly(self._agent.remove, agent)
        del self._agent
        registered.close()

    def _serve(self) -> None:
        nap, moved_at, num_errors = SHORTEST_NAP, monotonic(), 0
        while not self._is_over(nap):
            try:
                has_moved = self._take_a_turn()
            except Exception:
                has_moved = False
                num_errors += 1
                if is_worth_a_line(num_errors):
                    log.exception("unexpected error number %d; the thread continues", num_errors)
                sleep(PAUSE_S)
            now = monotonic()
            moved_at = now if has_moved else moved_at
            nap = next_nap(now - moved_at)

    def _is_over(self, nap: float) -> bool:
        """Wait for work, at most a nap while slices are under way; returns whether to end the thread."""
        with self._changed:
            has_work = bool(self._inbox) or any(rank.queue.can_post for rank in self._ranks)
            if not has_work and self._is_closing and not self._posted:
                self._refusal = TransportError("closed", "this transport was closed")
                return True
            if not has_work:
                self._changed.wait(nap if self._posted else None)
        return False

    def _take_a_turn(self) -> bool:
        """Returns whether anything moved."""
        for _ in range(len(self._inbox)):
            _do(*self._inbox.popleft())
        has_moved = self._post_round()
        return self._check_posted() or has_moved

    def _refuse_all(self, refusal: TransportError) -> None:
        """Fail all work that waits or comes later."""
        with self._changed:
            self._refusal = refusal
        for future, _ in self._inbox:
            future.set_exception(refusal)
        for rank in self._ranks:
            quietly(self._transfers.refuse, rank.queue, refusal, str(refusal))

    # ---- in the thread: remote ranks

    def _add(self, name: str, card: Card, memory: RegionTable, on_end: Callable[[str], None]) -> RemoteRank:
        if card.agent == self._agent.name:
            raise TransportError("bad-card", f"{name}: the card belongs to this rank itself")
        connection = self._connections.get(card.agent) or Connection(card)
        if connection.card != card:
            # NIXL would apply the new metadata to the reads of the old agent.
            raise TransportError("bad-card", f"{name}: {card.agent!r} is connected with a different card")
        queue = self._transfers.add(ReadQueue(name, self, connection.room))
        try:
            if card.agent not in self._connections:
                self._agent.add(card.agent, card.metadata)
                self._connections[card.agent] = connection
        except BaseException:
            self._transfers.forget([queue])
            raise
        rank = RemoteRank(connection, memory, self._memory, queue)
        self._ranks.append(rank)
        warm_up = slice_pairs(self._scratch.first_bytes(memory.regions), memory, self._scratch.memory)
        self._transfers.submit(Read([(queue, warm_up)], on_end))
        return rank

    def _remove(self, queue: ReadQueue) -> None:
        for rank in [rank for rank in self._ranks if rank.queue is queue]:
            self._ranks.remove(rank)
            if not any(other.connection is rank.connection for other in self._ranks):
                del self._connections[rank.connection.card.agent]
                quietly(self._agent.remove, rank.connection.card.agent)

    # ---- in the thread: slices

    def _post_round(self) -> bool:
        """Post one slice for every rank whose connection has room; returns whether anything moved."""
        ranks, has_moved = [*self._ranks], False
        self._ranks.rotate(-1)
        for rank in ranks:
            if share := self._transfers.post(rank.queue):
                self._post_next(rank, share)
                has_moved = True
        return has_moved

    def _post_next(self, rank: RemoteRank, share: Share) -> None:
        try:
            pair = next(share.work, None)
            handle = None if pair is None else self._agent.prepare(pair, rank.connection.card.agent)
        except Exception as error:
            self._transfers.ended(share, _reason("the read could not be prepared", error))
            return
        if handle is None:
            self._transfers.ended(share, is_last=True)
            return
        posted = PostedSlice(handle, rank, share)
        self._posted.append(posted)
        try:
            is_done = self._agent.post(handle)
        except Exception as error:
            # Some of its runs may be under way: only a check of its state can end it.
            if isinstance(error, TransportError):
                rank.has_fabric_failed |= not share.read.error
            self._transfers.fail(share.read, _reason("the read could not be posted", error))
            return
        if is_done:
            self._end(posted)

    def _check_posted(self) -> bool:
        """Check every slice under way; returns whether one ended."""
        looked = [(posted, self._state(posted)) for posted in self._posted]
        ended = [(posted, error) for posted, error in looked if error is not None]
        for posted, error in ended:
            self._end(posted, error)
        return bool(ended)

    def _state(self, posted: PostedSlice) -> str | None:
        """The error of a slice that has ended, or an empty text; None if it is under way."""
        try:
            return "" if self._agent.check(posted.handle) else None
        except TransportError as error:
            return posted.fabric_failed(error)
        except Exception:
            posted.num_failed_checks += 1
            if is_worth_a_line(posted.num_failed_checks):
                times = posted.num_failed_checks
                log.exception("NIXL did not report the state of a read in %d checks; checking again", times)
            return None

    def _end(self, posted: PostedSlice, error: str = "") -> None:
        self._posted.remove(posted)
        quietly(self._agent.release, posted.handle)
        self._transfers.ended(posted.share, error)


def _do(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, TransportError):
            log.exception("unexpected error in the thread of a NIXL agent")
        future.set_exception(_ours(error))
        if not isinstance(error, Exception):
            raise


def _reason(what: str, error: Exception) -> str:
    if isinstance(error, TransportError):
        return str(error)
    log.error("%s", what, exc_info=error)
    return f"{what}: {error!r}"


def next_nap(waited: float) -> float:
    """Seconds until the next check of the transfers under way, ``waited`` seconds after the last event.

    >>> [f"{next_nap(waited):.6f}" for waited in (0, 0.001, 0.02, 10)]
    ['0.000005', '0.000020', '0.000400', '0.001000']
    """
    return min(max(NAP_SHARE * waited, SHORTEST_NAP), LONGEST_NAP)


def _until(deadline: float) -> float:
    return max(0.0, deadline - monotonic())


def _ours(error: BaseException) -> TransportError:
    if isinstance(error, TransportError):
        return error
    ours = TransportError("unexpected", f"{type(error).__name__}: {error}")
    ours.__cause__ = error
    return ours
