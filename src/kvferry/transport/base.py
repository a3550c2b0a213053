"""The seam between the plan and the fabric: what a transport is asked to do.

A transport belongs to one rank. It knows that rank's own regions, and the regions of the peers it was
connected to. A read is *submitted* (which never blocks), and later its *end* is collected. The only end of a
transfer is the one that the fabric reports: forgetting a peer or closing a handle ends nothing.

Every transport passes the laws in ``kvferry.testing.transport_laws``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, ParamSpec, Protocol, TypeVar

from kvferry.core.choices import Way
from kvferry.core.manifest import Region
from kvferry.core.product import Product
from kvferry.core.runs import Runs
from kvferry.errors import TransportError
from kvferry.log import log_of

log = log_of(__name__)

DeviceEvent = object
"""A mark in a stream of the device: the driver's own event, or its address as a number."""


@dataclass(frozen=True, slots=True)
class Connected:
    """By which way a remote rank is read from now on, and why not by a better one."""

    way: Way
    reason: str = ""
    """Why a better way is closed; empty if this is the best that there is."""

    def __str__(self) -> str:
        return f"{self.way.value} ({self.reason})" if self.reason else self.way.value


CANCELLED = "cancelled"
"""The error with which a cancelled transfer ends, if it had none before."""


@dataclass(frozen=True, slots=True)
class ReadEnd:
    """A transfer that ended: every byte is in, or ``error`` says why not. Nothing arrives after this."""

    transfer: int
    error: str = ""


class Transport(Protocol):
    """Reads bytes of peers into this rank's own regions.

    **Threads.** Every call may come from any thread, and any number of calls may be under way at once.

    **Order.** ``register`` comes first, once; before it, ``card``, ``connect``, ``read`` and ``clear`` raise.
    A ``cancel`` or ``forget`` holds for the reads whose ``read`` had returned. What two threads do at the
    same moment happens in one order or the other.

    **Blocking.** ``card``, ``read``, ``cancel``, ``poll``, ``forget`` and ``on_end`` wait for no peer, no
    fabric and no byte. ``register``, ``connect``, ``clear`` and ``close`` may be slow.

    **Ends.** A read that was accepted (``read`` returned) ends exactly once, in one answer of ``poll``. One
    that was refused (``read`` raised) never does. A transfer of which nobody can know whether it ended is not
    reported: its memory must stay.

    **Closing.** As soon as ``close`` is called, ``register``, ``card``, ``connect``, ``read`` and ``clear``
    are refused with the code ``closed``; those that are under way are waited for, or raise. ``poll``,
    ``cancel``, ``forget``, ``on_end`` and ``close`` are allowed for ever: ``poll`` hands out the ends that
    are left, the others do nothing when there is nothing left to do.

    **Errors.** TransportError, and nothing else.
    """

    @property
    def kind(self) -> str:
        """What it is, for people and for the check that both sides use the same one."""
        ...

    def register(self, regions: Sequence[Region]) -> None:
        """Make this rank's own memory known, once. Region addresses must be real.

        The memory must stay until ``close`` has returned.
        """
        ...

    def card(self) -> bytes:
        """What a peer needs in order to read from this rank. Whoever has it can."""
        ...

    def connect(self, peer: str, card: bytes, regions: Sequence[Region]) -> Connected:
        """Get ready to read from a peer, called ``peer`` from now on; by which way is fixed here.

        May be slow, but ends by a deadline. If it raises, the peer is not known. Of two threads that connect
        one name, one is refused. ``forget`` and ``close`` may come meanwhile: ``forget`` knows nothing of a
        peer that is not connected yet.
        """
        ...

    def read(
        self,
        transfer: int,
        peer: str,
        runs: Runs | Product,
        *,
        after: DeviceEvent | None = None,
        permit: bytes = b"",
    ) -> None:
        """Submit the reading of runs from a peer; never blocks. ``transfer`` is the caller's own number.

        No byte is written before the device has come to ``after``, if that is given. Raises TransportError,
        with nothing moved and no end to come, if the peer is unknown, a run leaves its region, or the end of
        a transfer of that number was not collected yet. ``permit``: what the remote rank wants to see
        where it has to help; other ways need none.
        """
        ...

    def cancel(self, transfer: int) -> None:
        """Ask the fabric for nothing more of a transfer; never blocks.

        It still ends exactly once, with an error: at once if the fabric was asked for nothing of it, else
        when all that it was asked for has ended. A transfer that is unknown, or has ended, is left alone.
        """
        ...

    def clear(self, transfer: int, runs: Runs | Product, *, after: DeviceEvent | None = None) -> None:
        """Submit the filling of the destination places of ``runs`` with zeros: a transfer like a read.

        It does not wait for reads: clear no byte that a read under way writes. Once submitted, it is not
        cancelled.
        """
        ...

    def poll(self) -> list[ReadEnd]:
        """The transfers that ended since the last call, whoever made it; never blocks."""
        ...

    def on_end(self, wake: Callable[[], None]) -> None:
        """Call ``wake``, from whatever thread, as soon as there is an end to collect.

        It must be quick, and may call ``poll``, ``read``, ``cancel`` and ``forget``, nothing slow. What it
        raises is logged and ignored. A transport whose reads advance in ``poll`` only has nobody to call it.
        """
        ...

    def forget(self, peer: str) -> None:
        """Drop a peer, if it is known. Transfers under way still end, and their ends are still reported.

        Those that still wait for their turn may end with an error.
        """
        ...

    def close(self) -> None:
        """Give up all memory and peers. Blocks until nothing is under way, or raises after a deadline.

        Transfers that still wait for their turn may end with an error. Ends that were not collected yet can
        be collected afterwards. Closing again, also from another thread, does nothing more; after a
        deadline, it waits again.
        """
        ...


OnEnd = Callable[[str], None]
"""Called once, when all of a read has ended, from whatever thread: with the error, or an empty text."""
Start = Callable[[int, OnEnd], None]
"""Submits a read that was prepared, under the caller's number. Raises TransportError if nothing was
submitted; no report comes then."""


class Link(Protocol):
    """One connected remote rank, read by one way. Every call may come from any thread, and none blocks."""

    @property
    def connected(self) -> Connected:
        """By which way it is read, and why not by a better one."""
        ...

    @property
    def is_ordered(self) -> bool:
        """Whether the device itself has reads wait for ``after``; else they are held before (``held``)."""
        ...

    def prepare(self, product: Product, after: DeviceEvent | None, permit: bytes) -> Start:
        """Check runs; raises TransportError. ``permit``: for a remote rank that has to help."""
        ...

    def cancel(self, transfer: int) -> None:
        """Ask the fabric for nothing more of a transfer, if it has not ended."""
        ...

    def forget(self) -> None:
        """Ask the fabric for nothing more. What it was asked for ends as it says, and is reported."""
        ...


P = ParamSpec("P")


def quietly(work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Do it; what goes wrong is worth a line, not a dead thread."""
    try:
        work(*args, **kwargs)
    except TransportError as error:
        log.warning("%s", error)
    except Exception:
        log.exception("unexpected; the thread goes on")


class Gate:
    """Lets calls in until it is shut; whoever shut it can wait for those inside. For any number of threads.

    >>> gate = Gate()
    >>> with gate:
    ...     gate.shut()
    ...     gate.wait_until_empty(timeout_s=0)
    False
    >>> gate.wait_until_empty(timeout_s=0)
    True
    >>> with gate:
    ...     pass
    Traceback (most recent call last):
    kvferry.errors.TransportError: closed: this transport was closed
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_inside = 0
        self._is_shut = False

    def __enter__(self) -> None:
        """A call comes in; raises TransportError if the gate is shut."""
        with self._changed:
            if self._is_shut:
                raise TransportError("closed", "this transport was closed")
            self._num_inside += 1

    def __exit__(self, *raised: object) -> None:
        with self._changed:
            self._num_inside -= 1
            if self._is_shut:
                self._changed.notify_all()

    def shut(self) -> None:
        with self._changed:
            self._is_shut = True

    def wait_until_empty(self, timeout_s: float | None) -> bool:
        """Whether every call that was inside has left in time; the gate is shut."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_inside, timeout_s)


T = TypeVar("T")


class Transfers(Generic[T]):
    """What is under way and what has ended, by the caller's numbers. For any number of threads.

    >>> transfers = Transfers()
    >>> transfers.begin(7, "what belongs to it")
    >>> transfers.find(7), transfers.num_under_way
    ('what belongs to it', 1)
    >>> transfers.end(7, "cable cut")
    >>> transfers.begin(7, "another")
    Traceback (most recent call last):
    kvferry.errors.TransportError: under-way: the end of transfer 7 was not collected yet
    >>> transfers.collect(), transfers.collect()
    ([ReadEnd(transfer=7, error='cable cut')], [])
    """

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        """Called, outside of any lock, when there is an end to collect."""
        self._lock = threading.Lock()
        self._under_way: dict[int, T] = {}
        self._ends: dict[int, ReadEnd] = {}

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    def begin(self, transfer: int, what: T) -> None:
        """Take a number; raises TransportError if it is taken."""
        with self._lock:
            if transfer in self._under_way or transfer in self._ends:
                raise TransportError("under-way", f"the end of transfer {transfer} was not collected yet")
            self._under_way[transfer] = what

    def drop(self, transfer: int) -> None:
        """Give a number back: the transfer could not be submitted, and has no end."""
        with self._lock:
            del self._under_way[transfer]

    def find(self, transfer: int) -> T | None:
        """What belongs to a transfer that has not ended."""
        with self._lock:
            return self._under_way.get(transfer)

    def all_under_way(self) -> list[T]:
        """What belongs to every transfer that has not ended, in the order of their begin."""
        with self._lock:
            return [*self._under_way.values()]

    def end(self, transfer: int, error: str = "") -> None:
        with self._lock:
            del self._under_way[transfer]
            self._ends[transfer] = ReadEnd(transfer, error)
        try:
            self.wake()
        except Exception:  # the caller's code, in a thread that serves others too
            log.exception("the call that says that a transfer has ended raised an exception; it is ignored")

    def collect(self) -> list[ReadEnd]:
        """The ends since the last call."""
        with self._lock:
            ends, self._ends = self._ends, {}
        return [*ends.values()]
