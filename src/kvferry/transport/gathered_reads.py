"""Reads whose bytes the source's rank gathers: what they are, however these bytes come.

Two ways bring them: through rings and the fabric (``packed``), or over a stream (``stream_reader``).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from kvferry.core.product import Product, Term
from kvferry.core.way import Way
from kvferry.errors import TransportError
from kvferry.transport.base import CANCELLED, Connected, DeviceEvent
from kvferry.transport.chunk_copier import ChunkCopier
from kvferry.transport.event_wait import EventWait
from kvferry.transport.gather_line import GatherLine
from kvferry.transport.pack import check_term, pieces
from kvferry.transport.places import Places
from kvferry.transport.quietly import quietly
from kvferry.transport.staging import Staging

ANSWER_S = 20.0
"""How long a rank that was asked for something may say, or send, nothing."""

L = TypeVar("L", bound="GatheredLink[Any]")
A = TypeVar("A")


@dataclass(eq=False, slots=True)
class GatheredRead(Generic[L, A]):
    """A read that has not ended; it is asked for piece by piece."""

    link: L
    transfer: int
    permit: bytes
    pieces: Iterator[tuple[Term, ...]]
    report: Callable[[str], None]
    asks: dict[int, A] = field(default_factory=dict)
    """By nonce: those under way."""
    is_held: bool = False
    """Whether it waits for the device: nothing may be written before."""
    is_all_asked: bool = False
    error: str = ""

    @property
    def has_ended(self) -> bool:
        return not self.asks and (bool(self.error) or self.is_all_asked)


R = TypeVar("R", bound=GatheredRead[Any, Any])


class GatheredLink(Generic[R]):
    """A remote rank that gathers for us."""

    def __init__(self, mover: GatherMover[Any, R], name: str, staging: Staging, src: Places) -> None:
        self._mover, self.name, self.staging, self.src = mover, name, staging, src
        self.chunk_bytes = min(staging.chunk_bytes, mover.copier.chunk_bytes)
        """What is asked for at once: as much as both sides have room for."""
        # The mover's thread's alone:
        self.waiting: deque[R] = deque()
        self.reads: dict[int, R] = {}
        self.is_forgotten = False

    @property
    def connected(self) -> Connected:
        return Connected(Way.PACKED)

    def read(
        self,
        transfer: int,
        product: Product,
        report: Callable[[str], None],
        after: DeviceEvent | None,
        permit: bytes = b"",
    ) -> None:
        """Check that all runs are inside of their regions, and have them gathered, after the event."""
        for term in product.terms:
            check_term(term, self.src, self._mover.copier.memory)
        parts = pieces(product, self.chunk_bytes)
        self._mover.submit(self._mover.new_read(self, transfer, permit, parts, report), after)

    def cancel(self, transfer: int) -> None:
        """Ask for nothing more of a read; nothing of it is written any more when it ends."""
        self._mover.put(lambda: self._mover.give_up(self.reads.get(transfer), CANCELLED))

    def forget(self) -> None:
        """Ask for nothing more."""
        self._mover.put(lambda: self._mover.forget(self))


class GatherMover(Generic[L, R]):
    """Owns the reads of all ranks that gather for us, in a thread of its own."""

    new_read: Callable[..., R]

    def __init__(
        self, copier: ChunkCopier, line: GatherLine, nonces: Iterator[int], events: EventWait | None = None
    ) -> None:
        """``events``: who waits for the device that the memory is on; None if it is the host's."""
        self.copier, self._line, self._nonces, self._event_wait = copier, line, nonces, events
        self._lock = threading.Lock()
        """Guards ``_is_closing``: what is submitted before that is ended by the thread."""
        self._is_closing = False
        # The thread's alone:
        self._links: deque[L] = deque()

    # ---- from any thread

    def put(self, event: Callable[[], None]) -> None:
        """Have something done by the thread."""
        raise NotImplementedError

    def submit(self, read: R, after: DeviceEvent | None) -> None:
        """Have a read wait for its turn, and for the device before that."""
        with self._lock:
            if self._is_closing:
                raise TransportError("closed", "this transport was closed")
            if after is None:
                self.put(partial(self._begin, read))
                return
            if self._event_wait is None:
                raise TransportError("no-device", "no device to wait for: this rank's memory is the host's")
            mark = self._event_wait.follow(after)
            read.is_held = True
            self.put(partial(self._begin, read))
            self._event_wait.submit(mark, lambda error: self.put(partial(self._let_begin, read, error)))

    # ---- in the thread

    def _begin(self, read: R) -> None:
        link = read.link
        link.reads[read.transfer] = read
        if link not in self._links:
            self._links.append(link)
        if link.is_forgotten:
            self.give_up(read, f"peer {link.name!r} was forgotten")
        elif not read.is_held:
            link.waiting.append(read)

    def _let_begin(self, read: R, error: str) -> None:
        """The device has come to the event that a read waits for; or it failed."""
        read.is_held = False
        if error:
            self.give_up(read, error)
        elif not read.error:
            read.link.waiting.append(read)

    def give_up(self, read: R | None, error: str) -> None:
        """Ask for nothing more of a read. It ends when nothing of it is written any more."""
        if read is None:
            return
        read.error = read.error or error
        self._stop_asks_of(read)
        if read in read.link.waiting:
            read.link.waiting.remove(read)
        self._end_if_over(read)

    def _stop_asks_of(self, read: R) -> None:
        """Drop what was asked for, and is not being written."""
        raise NotImplementedError

    def give_up_all_of(self, link: L, error: str) -> None:
        """All reads from a rank."""
        for read in [*link.reads.values()]:
            self.give_up(read, error)

    def forget(self, link: L) -> None:
        """Ask a rank for nothing more."""
        link.is_forgotten = True
        self._lose(link, f"peer {link.name!r} was forgotten")
        self._let_go(link)

    def _lost(self, sender: str) -> None:
        for link in [*self._links]:
            if link.staging.address == sender:
                self._lose(link, f"the connection to the rank of {link.name} that gathers is lost")

    def _lose(self, link: L, error: str) -> None:
        """Nothing more comes from a rank for what was asked so far."""
        self.give_up_all_of(link, error)

    def _end_if_over(self, read: R) -> None:
        if read.has_ended and read.link.reads.get(read.transfer) is read:
            del read.link.reads[read.transfer]
            quietly(read.report, read.error)
            self._let_go(read.link)

    def _let_go(self, link: L) -> None:
        """A forgotten rank, once nothing is under way with it."""
        if not link.is_forgotten or link.reads:
            return
        if link in self._links:
            self._links.remove(link)
        self._has_let_go(link)
        address = link.staging.address
        if all(other.staging.address != address for other in self._links):
            self._line.hang_up(address)

    def _has_let_go(self, link: L) -> None:
        """Nothing is under way with a forgotten rank."""
