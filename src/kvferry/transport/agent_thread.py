"""The thread that owns a NIXL agent, and makes every call to it: NIXL is not assumed to be thread-safe.

Callers only leave jobs in its inbox. No exception of a job or of the agent ends the thread. Should it have to
give up all the same, its callers are told: what waits is refused, and so is whatever comes later. Reads of
which something was posted are then never reported, since nobody can know any more that they have ended.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from time import monotonic, sleep
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from kvferry.core.choices import Way
from kvferry.core.manifest import Region
from kvferry.core.product import Product
from kvferry.core.runs import Runs, place
from kvferry.errors import TransportError
from kvferry.log import is_worth_a_line, log_of
from kvferry.transport.agent import FabricAgent, RegionTable
from kvferry.transport.base import Connected, OnEnd, quietly
from kvferry.transport.cards import Card
from kvferry.transport.cuda import Cuda
from kvferry.transport.places import checked
from kvferry.transport.reads import Read, Reads, RemoteRank
from kvferry.transport.settings import UcxSettings, prepare_for_cuda

log = log_of(__name__)

WARM_REGIONS, WARM_BYTES = 64, 4096
"""What the first read touches: it is about ten times slower than the next."""


class Scratch:
    """Memory that warm-up reads may overwrite, on each device that real reads go to."""

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


class RegisteredAgent:
    """For one thread, the one that makes it."""

    def __init__(self, memory: RegionTable, cuda: Cuda | None, make_agent: Callable[[], FabricAgent]) -> None:
        if cuda:
            prepare_for_cuda(os.environ)
            cuda.bind_thread()
        self.scratch = Scratch(cuda, [region.device for region in memory.places.regions])
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
        """Give memory and agent up; nothing may be under way."""
        for registered in self._registered:
            quietly(self.agent.deregister, registered)
        self.__dict__.pop("agent", None)  # NIXL ends its own threads when nobody knows it any more
        quietly(self.scratch.free)


T = TypeVar("T")


SHORTEST_NAP, LONGEST_NAP = 5e-6, 1e-3
"""Seconds between two looks at the transfers under way."""
NAP_SHARE = 0.02
"""How long a nap is, of the time in which nothing has happened: an end is seen so much later."""
PAUSE_S = 0.05
"""How long the thread pauses after an error that nothing foresaw, lest it repeat it at full speed."""


class AgentJob(NamedTuple):
    do: Callable[[], None]
    refuse: Callable[[TransportError], None]
    """Tells the caller that it will not be done."""


class AgentThread:
    """Owns an agent, and reads every remote rank in the same way."""

    def __init__(
        self,
        memory: RegionTable,
        cuda: Cuda | None,
        settings: UcxSettings,
        make_agent: Callable[[str, str], FabricAgent],
    ) -> None:
        """``make_agent`` takes a name and settings for NIXL's UCX engine."""
        self._memory, self._cuda = memory, cuda
        self._changed = threading.Condition()
        self._inbox: deque[AgentJob] = deque()
        self._is_closing = False
        self._refusal: TransportError | None = None
        """Why nothing is taken in any more."""
        name, made = f"kvferry-{uuid4().hex}", Future[RegisteredAgent]()
        make = partial(RegisteredAgent, memory, cuda, partial(make_agent, name, settings.engine_config))
        self._reads: Reads
        self._thread = threading.Thread(
            target=self._main, args=(make, made), name="kvferry-nixl", daemon=True
        )
        self._thread.start()
        registered = made.result()
        self._scratch = registered.scratch
        self.card = Card(name, registered.metadata)

    # ---- from any thread

    def connect(
        self,
        name: str,
        card: Card,
        regions: Sequence[Region],
        timeout_s: float,
    ) -> AgentLink:
        """Connect a remote rank, and read a little from it.

        Raises TransportError, with the code ``not-direct`` if the fabric cannot read it by itself or the peer
        is dead, and TimeoutError.
        """
        memory, deadline = RegionTable(name, regions), monotonic() + timeout_s
        warm: Future[str] = Future()
        added = self._ask(partial(self._add, name, card, memory, warm.set_result))
        try:
            warm_up = added.result(_until(deadline))
            error = warm.result(_until(deadline))
        except TimeoutError:
            added.add_done_callback(self._forget_added)
            raise
        if not error:
            return AgentLink(self, warm_up.rank, self._memory)
        added.add_done_callback(self._forget_added)
        # UCX says the same of a peer that is dead and of one that cannot be read directly.
        detail = f"{name}: {error}"
        raise TransportError("not-direct" if warm_up.has_fabric_failed else "no-connection", detail)

    def submit(self, read: Read) -> None:
        self._put(AgentJob(partial(self._reads.submit, read), partial(self._reads.refuse, read)))

    def tell(self, do: Callable[[Reads], None]) -> None:
        """Have something done, unless the thread has ended."""
        with suppress(TransportError):
            self._put(AgentJob(lambda: do(self._reads), lambda _: None))

    def close(self, timeout_s: float) -> bool:
        """Post nothing more; whether everything under way ended in time. Can be tried again."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _ask(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def do() -> None:
            try:
                future.set_result(work())
            except TransportError as error:
                future.set_exception(error)
            except Exception as error:
                log.exception("a job of the thread that owns a NIXL agent failed")
                future.set_exception(_ours(error))
            except BaseException as error:
                future.set_exception(_ours(error))
                raise

        self._put(AgentJob(do, future.set_exception))
        return future

    def _put(self, job: AgentJob) -> None:
        with self._changed:
            if self._refusal:
                raise TransportError(self._refusal.code, self._refusal.detail)
            self._inbox.append(job)
            self._changed.notify()

    def _forget_added(self, added: Future[Read]) -> None:
        if not added.exception():
            self.tell(lambda reads: reads.forget(added.result().rank))

    # ---- in the thread

    def _main(self, make: Callable[[], RegisteredAgent], made: Future[RegisteredAgent]) -> None:
        try:
            registered = make()
            self._reads = Reads(registered.agent)
        except BaseException as error:
            made.set_exception(_ours(error))
            return
        made.set_result(registered)
        try:
            self._serve()
        except BaseException as error:
            log.critical("the thread that owns a NIXL agent gives up", exc_info=error)
            reason = f"{type(error).__name__}: {error}"
            self._refuse_all(TransportError("broken", f"the thread of the NIXL agent gave up: {reason}"))
            if self._reads.num_posted:
                self._thread.name = "kvferry-broken-agent"  # for whoever looks at the threads
                threading.Event().wait()  # for ever: the agent must outlive what is under way
        self._reads.close()
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
                    log.exception("unexpected (%d times by now); the thread goes on", num_errors)
                sleep(PAUSE_S)
            now = monotonic()
            moved_at = now if has_moved else moved_at
            nap = next_nap(now - moved_at)

    def _is_over(self, nap: float) -> bool:
        """Wait for something to do, at most a nap while slices are under way; whether all is over."""
        with self._changed:
            has_work, num_posted = bool(self._inbox) or self._reads.can_post, self._reads.num_posted
            if not has_work and self._is_closing and not num_posted:
                self._refusal = TransportError("closed", "this transport was closed")
                return True
            if not has_work:
                self._changed.wait(nap if num_posted else None)
        return False

    def _take_a_turn(self) -> bool:
        """Do what was asked for, post, and look at what is posted; whether anything moved."""
        for _ in range(len(self._inbox)):
            self._do(self._inbox.popleft())
        if self._is_closing:
            self._reads.give_up("the transport was closed")
        has_moved = self._reads.post_round()
        return self._reads.check_posted() or has_moved

    def _do(self, job: AgentJob) -> None:
        try:
            job.do()
        except Exception as error:
            log.exception("a job of the thread that owns a NIXL agent failed")
            quietly(job.refuse, _ours(error))

    def _add(self, name: str, card: Card, memory: RegionTable, on_end: OnEnd) -> Read:
        if self._is_closing:
            raise TransportError("closed", "this transport was closed")
        runs = self._scratch.first_bytes(memory.places.regions)
        warm_up = Read(self._reads.connect(name, card, memory), runs, self._scratch.memory, on_end)
        self._reads.submit(warm_up)
        return warm_up

    def _refuse_all(self, refusal: TransportError) -> None:
        """Take nothing in any more, and tell those who wait."""
        with self._changed:
            self._refusal = refusal
        for job in self._inbox:
            quietly(job.refuse, refusal)
        quietly(self._reads.give_up, str(refusal))


class AgentLink:
    def __init__(self, thread: AgentThread, rank: RemoteRank, dst: RegionTable) -> None:
        self._thread, self._rank, self._dst = thread, rank, dst

    @property
    def connected(self) -> Connected:
        return Connected(Way.DIRECT)

    def checked(self, product: Product) -> Runs:
        """What there is to read, as a list; raises TransportError if a run leaves its region."""
        return checked(product.runs, self._rank.memory.places, self._dst.places)

    @property
    def copies_on_host(self) -> bool:
        """Whether some of what is read is in host memory, on either side."""
        return any("DRAM" in memory.names for memory in (self._rank.memory, self._dst))

    def submit(self, transfer: int, runs: Runs, on_end: OnEnd) -> None:
        """Have runs that were checked wait for their turn."""
        self._thread.submit(Read(self._rank, runs, self._dst, on_end, transfer))

    def cancel(self, transfer: int) -> None:
        self._thread.tell(lambda reads: reads.cancel(transfer))

    def forget(self) -> None:
        """Post nothing more; the agent forgets the rank once nothing is under way with it."""
        self._thread.tell(lambda reads: reads.forget(self._rank))


def next_nap(waited: float) -> float:
    """How long not to look at what is under way, after so many seconds in which nothing happened.

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
