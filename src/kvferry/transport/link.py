"""The joint between a transport and its ways to move bytes: who reads a remote rank.

A *mover* is one way to move, with whatever it owns: NIXL's agent and its thread (``agent_thread``) is one. A
*link* is a remote rank that a mover has connected. A transport has one link for each remote rank, made by
whichever mover it chose when it was asked to connect, and knows nothing else of how its bytes come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvferry.core.product import Product
from kvferry.transport.base import Connected, DeviceEvent


class Link(Protocol):
    """One connected remote rank. Every call may come from any thread, and none blocks."""

    @property
    def connected(self) -> Connected:
        """By which way it is read, and why not by a better one."""
        ...

    def read(
        self,
        transfer: int,
        product: Product,
        report: Callable[[str], None],
        after: DeviceEvent | None,
        permit: bytes = b"",
    ) -> None:
        """Check runs and submit them. ``report`` is called once, when all has ended, from whatever thread.

        It gets the error, or an empty text. Raises TransportError if nothing was submitted, and no report
        comes then. No byte is written before the device has come to ``after``. ``permit``: what the remote
        rank wants to see, where it has to help.
        """
        ...

    def cancel(self, transfer: int) -> None:
        """Ask the fabric for nothing more of a transfer, if it has not ended."""
        ...

    def forget(self) -> None:
        """Ask the fabric for nothing more. What it was asked for ends as it says, and is reported."""
        ...
