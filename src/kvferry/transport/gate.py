"""The way into a transport: open until it is closed, with the count of the calls that are inside."""

from __future__ import annotations

import threading

from kvferry.errors import TransportError


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
        """Let nobody in any more."""
        with self._changed:
            self._is_shut = True

    def wait_until_empty(self, timeout_s: float | None) -> bool:
        """Whether every call that was inside has left in time; the gate is shut."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_inside, timeout_s)
