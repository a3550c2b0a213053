"""The transfers of one transport, from ``read`` until their end is collected: each ends once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from kvferry.errors import TransportError
from kvferry.log import log_of
from kvferry.transport.base import ReadEnd

T = TypeVar("T")

log = log_of(__name__)


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
        """Transfers that have not ended."""
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
        """Note the end of a transfer."""
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
