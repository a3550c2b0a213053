"""The interface of a transport.

A transport belongs to one rank. A read is *submitted*, which never blocks; later its *end* is collected. Only
the fabric ends a transfer: forgetting a peer or closing a handle does not.

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
"""The driver's event, or its address as a number."""


@dataclass(frozen=True, slots=True)
class Connected:
    """How a remote rank is read from now on."""

    way: Way
    reason: str = ""
    """Why no faster mode is available; empty for the fastest."""

    def __str__(self) -> str:
        return f"{self.way.value} ({self.reason})" if self.reason else self.way.value


CANCELLED = "cancelled"
"""The error of a cancelled transfer that had none before."""


@dataclass(frozen=True, slots=True)
class ReadEnd:
    """The end of a transfer: all bytes have arrived, or ``error`` says why not. Nothing arrives later."""

    transfer: int
    error: str = ""


class Transport(Protocol):
    """Reads bytes of peers into this rank's own regions.

    **Threads.** Any thread may make any call at any time.

    **Order.** ``register`` comes first, once; before it, ``card``, ``connect``, ``read`` and ``clear`` raise.
    ``cancel`` and ``forget`` apply to reads whose ``read`` had returned.

    **Blocking.** ``card``, ``read``, ``cancel``, ``poll``, ``forget`` and ``on_end`` never wait for a peer or
    the fabric. ``register``, ``connect``, ``clear`` and ``close`` may be slow.

    **Ends.** An accepted read (``read`` returned) ends exactly once, in one result of ``poll``; a rejected
    one never. A transfer whose end cannot be determined is not reported: its memory must stay.

    **Closing.** Once ``close`` is called, ``register``, ``card``, ``connect``, ``read`` and ``clear`` raise
    the code ``closed``. All other calls stay allowed: ``poll`` returns the remaining ends.

    **Errors.** TransportError, and nothing else.
    """

    @property
    def kind(self) -> str:
        """Both sides must use the same kind."""
        ...

    def register(self, regions: Sequence[Region]) -> None:
        """Register this rank's memory, once; it must stay until ``close`` has returned."""
        ...

    def card(self) -> bytes:
        """The connection data for readers. Confidential: a holder can read the exposed memory."""
        ...

    def connect(self, peer: str, card: bytes, regions: Sequence[Region]) -> Connected:
        """Connect to a peer, called ``peer`` from now on; this fixes the transfer mode.

        May be slow, but ends by a deadline. If it raises, the peer is not known. Of two threads that connect
        one name, one fails. Meanwhile, ``forget`` does not know the peer yet.
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
        """Submit a read of runs from a peer; never blocks. ``transfer`` is the caller's own number.

        No byte is written before the device event ``after``. Raises TransportError, with nothing moved and no
        end to come, if the peer is unknown, a run leaves its region, or the end of an earlier transfer of
        that number was not collected. ``permit``: shown to a remote rank that sends the bytes itself.
        """
        ...

    def cancel(self, transfer: int) -> None:
        """Stop posting a transfer, if it is known; it ends with an error once all posted parts have ended."""
        ...

    def clear(self, transfer: int, runs: Runs | Product, *, after: DeviceEvent | None = None) -> None:
        """Submit a transfer that fills the destination places of ``runs`` with zeros.

        It does not wait for reads: clear no byte that a read under way writes. It cannot be cancelled.
        """
        ...

    def poll(self) -> list[ReadEnd]:
        """The transfers that ended since the last call, from any thread; never blocks."""
        ...

    def on_end(self, wake: Callable[[], None]) -> None:
        """Call ``wake``, from any thread, as soon as there is an end to collect.

        It must be quick, and may call ``poll``, ``read``, ``cancel`` and ``forget``. Its exceptions are
        logged and ignored. A transport whose reads advance only in ``poll`` never calls it.
        """
        ...

    def forget(self, peer: str) -> None:
        """Drop a peer, if it is known. Posted transfers still end and are reported; others may fail."""
        ...

    def close(self) -> None:
        """Release all memory and peers. Blocks until no transfer is in flight, or raises after a deadline.

        Transfers that are not posted yet may fail. Ends can still be collected afterwards. Closing again does
        nothing more; after a deadline, it waits again.
        """
        ...
