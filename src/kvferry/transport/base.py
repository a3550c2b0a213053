"""The seam between the plan and the fabric: what a transport is asked to do.

A transport belongs to one rank. It knows that rank's own regions, and the regions of the peers it was
connected to. A read is *submitted* (which never blocks), and later its *end* is collected. The only end of a
transfer is the one that the fabric reports: forgetting a peer or closing a handle ends nothing.

Every transport passes the laws in ``kvferry.testing.transport_laws``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry.core.choices import Way
from kvferry.core.manifest import Region
from kvferry.core.product import Product
from kvferry.core.runs import Runs

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
        """The kind of transport; both sides must use the same."""
        ...

    def register(self, regions: Sequence[Region]) -> None:
        """Register this rank's memory, once. Regions need real addresses.

        The memory must stay until ``close`` has returned.
        """
        ...

    def card(self) -> bytes:
        """The connection data for readers. Confidential: a holder can read the exposed memory."""
        ...

    def connect(self, peer: str, card: bytes, regions: Sequence[Region]) -> Connected:
        """Connect to a peer, called ``peer`` from now on; this fixes the transfer mode.

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
        """Stop posting a transfer; never blocks.

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
        raises is logged and ignored. A transport whose reads advance in ``poll`` only never calls it.
        """
        ...

    def forget(self, peer: str) -> None:
        """Drop a peer, if it is known. Transfers in flight still end and are still reported.

        Those that still wait for their turn may end with an error.
        """
        ...

    def close(self) -> None:
        """Release all memory and peers. Blocks until no transfer is in flight, or raises after a deadline.

        Transfers that still wait for their turn may end with an error. Ends that were not collected yet can
        be collected afterwards. Closing again, also from another thread, does nothing more; after a
        deadline, it waits again.
        """
        ...
