"""Slow work: in order for each key, and no key waits for another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from queue import Empty, SimpleQueue

from kvferry.log import log_of

log = log_of(__name__)

Work = Callable[[], object]

IDLE_SECONDS = 2.0
"""How long a thread waits for more work of its key: to start one takes as long as a short job."""

_Queue = SimpleQueue[Work | None]
"""Jobs; None says that there will be no more. No lock is held while one waits: a hand-over is what a short
load spends its time on."""


class WorkerThreads:
    """A queue per key, each served by a thread that lasts a little longer than its work.

    A fixed number of threads would not do: so many peers that do not answer would hold up all others.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._queues: dict[Hashable, _Queue] = {}
        self._threads: set[threading.Thread] = set()
        self._is_closed = False

    def submit(self, key: Hashable, job: Work) -> None:
        """Have a job done after all that was submitted under the same key."""
        with self._lock:  # its thread leaves only while it holds this, with nothing in the queue
            if self._is_closed:
                return
            queue = self._queues.get(key)
            if queue is None:
                queue = self._queues[key] = SimpleQueue()
                thread = threading.Thread(target=self._serve, args=(key, queue), name=self._name, daemon=True)
                self._threads.add(thread)
                thread.start()
            queue.put(job)

    def close(self, seconds: float) -> bool:
        """Start nothing more, and wait for what was started; whether all of it ended in time."""
        deadline = time.monotonic() + seconds
        with self._lock:
            self._is_closed = True
            for queue in self._queues.values():
                queue.put(None)
            threads = [*self._threads]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _serve(self, key: Hashable, queue: _Queue) -> None:
        while (job := self._next(key, queue)) is not None:
            try:
                job()
            except Exception:
                log.exception("a worker goes on after an unexpected error")
            del job  # what it holds may be large
            time.sleep(0)  # a caller may be waiting for the interpreter: let it in between two jobs

    def _next(self, key: Hashable, queue: _Queue) -> Work | None:
        try:
            job = queue.get(timeout=IDLE_SECONDS)
        except Empty:
            job = None
        if job is not None and not self._is_closed:
            return job
        with self._lock:
            if not self._is_closed and not queue.empty():  # it came between the wait and the lock
                return queue.get()
            del self._queues[key]
            self._threads.discard(threading.current_thread())
            return None
