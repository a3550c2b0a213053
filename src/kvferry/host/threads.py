"""The loops of this package's threads, except those of ZeroMQ sockets and NIXL agents.

No exception of a job, an event, a socket or a turn ends a thread.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Generic, ParamSpec, TypeVar

from kvferry.errors import KVFerryError
from kvferry.log import log_of

log = log_of(__name__)

LONGEST_WAIT_S = 3600.0
EVENTS_AT_ONCE = 64
"""Events of the inbox between two polls of the sockets."""

P = ParamSpec("P")
T = TypeVar("T")


def quietly(work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call ``work``, and log its errors."""
    try:
        work(*args, **kwargs)
    except KVFerryError as error:
        log.warning("%s", error)
    except Exception:
        log.exception("unexpected error; the thread continues")


class InboxThread(Generic[T]):
    """Passes the items of its inbox to a function, in order. ``SimpleQueue`` keeps the hand-over fast."""

    def __init__(self, name: str, step: Callable[[list[T]], float | None], most_at_once: int = 1) -> None:
        """``step`` gets new items, and returns its timeout in seconds, or None to end the thread."""
        self._inbox: SimpleQueue[T | None] = SimpleQueue()
        self._step, self._most_at_once = step, most_at_once
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def put(self, item: T) -> None:
        """Never blocks."""
        self._inbox.put(item)

    @property
    def num_waiting(self) -> int:
        return self._inbox.qsize()

    def close(self) -> None:
        """End the thread after the items that are in the inbox now."""
        self._inbox.put(None)

    def join(self, timeout_s: float | None = None) -> bool:
        """Whether the thread has ended in time, or never started."""
        if self.thread.is_alive():
            self.thread.join(timeout_s)
        return not self.thread.is_alive()

    def take(self, seconds: float) -> tuple[list[T], bool]:
        """The items in the inbox, after at most ``seconds``, and whether the inbox is open."""
        items: list[T] = []
        try:
            taken = self._inbox.get(timeout=min(max(0.0, seconds), LONGEST_WAIT_S))
            while taken is not None:
                items.append(taken)
                if len(items) == self._most_at_once:
                    return items, True
                taken = self._inbox.get_nowait()
        except Empty:
            return items, True
        return items, False

    def _run(self) -> None:
        seconds: float | None = 0.0
        is_open = True
        while is_open and seconds is not None:
            items, is_open = self.take(seconds)
            seconds = self._step(items)


Job = Callable[[], object]


class JobThread(InboxThread[Job]):
    """Runs jobs one after another."""

    def __init__(
        self,
        name: str,
        first: Job,
        idle_s: float = LONGEST_WAIT_S,
        may_leave: Callable[[], bool] = lambda: False,
    ) -> None:
        """After ``idle_s`` without a job, the thread ends if ``may_leave()``."""
        super().__init__(name, self._do)
        self._idle_s, self._may_leave = idle_s, may_leave
        self.put(first)
        self.thread.start()

    def _do(self, jobs: list[Job]) -> float | None:
        if not jobs:
            return None if self._may_leave() else self._idle_s
        try:
            jobs.pop()()
        except Exception:
            log.exception("unexpected error; %s continues", self.thread.name)
        time.sleep(0)  # release the GIL between two jobs
        return self._idle_s


class SocketLoop:
    """Owns plain sockets: waits for all of them, and for events in its inbox."""

    def __init__(self, name: str, turn: Callable[[float], float]) -> None:
        """``turn`` is called with the time after each batch of events, and returns when to call it next."""
        self._turn = turn
        self._inbox: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        """Guards ``_woken``, which the thread closes at its end."""
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Used by the thread only:
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, self._wake_up)
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # ---- from any thread

    def start(self) -> None:
        self._thread.start()

    def put(self, event: Callable[[], None]) -> None:
        """Call ``event`` in the thread; never blocks."""
        self._inbox.append(event)
        if threading.current_thread() is self._thread:
            return  # the loop checks its inbox before it waits
        with self._lock:
            if self._woken >= 0:
                os.eventfd_write(self._woken, 1)

    @property
    def num_waiting(self) -> int:
        return len(self._inbox)

    def join(self, timeout_s: float | None = None) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ---- in the thread

    def stop(self) -> None:
        """End the thread after the events in its inbox, which close its sockets."""
        self._is_open = False

    def watch(self, which: socket.socket, ready: Callable[[], None], *, for_room: bool = False) -> None:
        """Call ``ready`` when the socket is readable, or writable if ``for_room``."""
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
        while self._inbox:
            quietly(self._inbox.popleft())
        with self._lock:
            self._selector.close()
            os.close(self._woken)
            self._woken = -1

    def _round(self, wait_s: float) -> float:
        for key, _ in self._selector.select(max(0.0, wait_s)):
            quietly(key.data)
        for _ in range(min(len(self._inbox), EVENTS_AT_ONCE)):
            quietly(self._inbox.popleft())
        try:
            until = self._turn(monotonic())
            return 0.0 if self._inbox else until
        except Exception:
            log.exception("unexpected error; the thread continues")
            return monotonic() + 1.0

    def _wake_up(self) -> None:
        os.eventfd_read(self._woken)
