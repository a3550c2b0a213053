"""A thread that owns plain sockets: it waits for all of them at once, and for what is in its inbox."""

from __future__ import annotations

import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic

from kvferry.log import log_of
from kvferry.transport.base import quietly

log = log_of(__name__)

LONGEST_WAIT_S = 3600.0


class SocketLoop:
    """``turn`` is called after each batch of events, and when the time comes that it named last.

    Nothing that an event, a socket or a turn raises ends the thread.
    """

    def __init__(self, name: str, turn: Callable[[float], float]) -> None:
        """``turn`` gets the time, and says when to come again at the latest."""
        self._turn = turn
        self._inbox: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        """Guards ``_woken``, which is closed by the thread when it ends."""
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # The thread's alone:
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, self._wake_up)
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # ---- from any thread

    def start(self) -> None:
        self._thread.start()

    def put(self, event: Callable[[], None]) -> None:
        """Have something done by the thread; never blocks."""
        self._inbox.append(event)
        with self._lock:
            if self._woken >= 0:
                os.eventfd_write(self._woken, 1)

    def join(self, timeout_s: float | None = None) -> bool:
        """Whether the thread has ended in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ---- in the thread

    def stop(self) -> None:
        """End the thread after what is in its inbox; its sockets are closed by then."""
        self._is_open = False

    def watch(self, which: socket.socket, ready: Callable[[], None], *, for_room: bool = False) -> None:
        """Call ``ready`` when there is something to receive, or room to send."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if for_room else 0)
        if which in self._selector.get_map():
            self._selector.modify(which, events, ready)
        else:
            self._selector.register(which, events, ready)

    def ignore(self, which: socket.socket) -> None:
        if which.fileno() >= 0 and which in self._selector.get_map():
            self._selector.unregister(which)

    def _run(self) -> None:
        until = 0.0
        while self._is_open:
            until = self._round(min(until - monotonic(), LONGEST_WAIT_S))
        with self._lock:
            self._selector.close()
            os.close(self._woken)
            self._woken = -1

    def _round(self, wait_s: float) -> float:
        for key, _ in self._selector.select(max(0.0, wait_s)):
            quietly(key.data)
        while self._inbox:
            quietly(self._inbox.popleft())
        try:
            return self._turn(monotonic())
        except Exception:  # this thread serves everybody
            log.exception("unexpected; the thread goes on")
            return monotonic() + 1.0

    def _wake_up(self) -> None:
        os.eventfd_read(self._woken)
