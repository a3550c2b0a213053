"""Slow work for many peers: in order for each of them, and no peer waits for another."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable

Work = Callable[[], None]


class Lines:
    """One line of work per peer, each served by a thread that lasts as long as its line.

    A fixed number of threads would not do: so many peers that do not answer would hold up all others.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._lines: dict[Hashable, deque[Work]] = {}
        self._threads: set[threading.Thread] = set()
        self._is_closed = False

    def submit(self, peer: Hashable, work: Work) -> None:
        """Have ``work``, which must not raise, done after all that was submitted for this peer."""
        with self._lock:
            if self._is_closed:
                return
            line = self._lines.setdefault(peer, deque())
            line.append(work)
            if len(line) == 1:
                thread = threading.Thread(target=self._serve, args=(peer, line), name=self._name, daemon=True)
                self._threads.add(thread)
                thread.start()

    def close(self) -> None:
        """Start nothing more, and wait for what was started."""
        with self._lock:
            self._is_closed = True
            threads = [*self._threads]
        for thread in threads:
            thread.join()

    def _serve(self, peer: Hashable, line: deque[Work]) -> None:
        while self._has_more(peer, line):
            line[0]()
            with self._lock:
                line.popleft()

    def _has_more(self, peer: Hashable, line: deque[Work]) -> bool:
        with self._lock:
            if line and not self._is_closed:
                return True
            self._lines.pop(peer, None)
            self._threads.discard(threading.current_thread())
            return False
