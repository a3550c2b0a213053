"""Threads that wait for the device: for the end of a copy, and for the event behind which a read is held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from time import sleep

from kvferry.errors import TransportError
from kvferry.host.threads import JobThread, quietly
from kvferry.log import log_of
from kvferry.transport.base import DeviceEvent
from kvferry.transport.copy_kernel import CopyKernel, CopyQueue, Repeated
from kvferry.transport.cuda import Cuda, Event
from kvferry.transport.reads import Share

log = log_of(__name__)

SURE_BYTES_PER_SECOND = 4e12
"""No device copies faster: for so long a thread need not look whether a copy is done."""
AFTER_NAP_SECONDS = 200e-6
"""How often is looked whether the device has come to the event that a copy waits for."""
NAP_SECONDS = 150e-6
"""What a nap may take longer than it should."""


@dataclass(eq=False)
class Copy:
    """What the kernel is to copy, or to clear."""

    terms: Sequence[Repeated]
    after: DeviceEvent | None
    """Nothing is written before the device has come to this mark of the engine's."""

    @cached_property
    def num_bytes(self) -> int:
        return sum(term.num_bytes for term in self.terms)


class CopyLane:
    """A queue for one copy at a time, and a thread that waits for the device.

    Whoever starts a copy queues it on the device; the thread only waits for its end. That saves the time in
    which a second thread wakes up, in which the device copies a hundred megabytes.
    """

    def __init__(
        self, cuda: Cuda, kernel: CopyKernel, on_end: Callable[[CopyLane, Share, str], None]
    ) -> None:
        self._cuda, self._on_end = cuda, on_end
        self._queue = CopyQueue(cuda, kernel)
        self._thread = JobThread("kvferry-copy", cuda.bind_thread)

    def start(self, share: Share) -> None:
        """Queue a copy on the device; in any thread, one at a time."""
        error, copy = "", share.work
        try:
            with self._cuda.current_for_launches():
                self._queue.put(copy.terms, copy.num_bytes, copy.after)
        except TransportError as failure:
            error = str(failure)
        except Exception as failure:
            log.exception("unexpected error: a copy was not started")
            error = f"unexpected: {failure!r}"
        self._thread.put(partial(self._wait, share, error))

    def _wait(self, share: Share, error: str) -> None:
        try:
            # Also after an error: some of the copy may have been queued.
            self._queue.wait(partial(self._sleep, share.work))
        except TransportError as failure:
            error = error or str(failure)
        except Exception as failure:
            log.exception("unexpected error: a copy failed")
            error = error or f"unexpected: {failure!r}"
        self._on_end(self, share, error)

    def _sleep(self, copy: Copy) -> None:
        """Sleep while the copy surely still runs."""
        while copy.after is not None and not self._cuda.has_come_to(copy.after):
            sleep(AFTER_NAP_SECONDS)
        nap = copy.num_bytes / SURE_BYTES_PER_SECOND - NAP_SECONDS
        if nap > 0:
            sleep(nap)

    def close(self) -> None:
        """End the thread. Nothing may be under way."""
        self._thread.put(self._queue.close)
        self._thread.close()
        self._thread.join()


class EventWait:
    """For reads that the host, or another process, writes: nothing of them is asked for before their event.

    Calls somebody when the device has come to an event, in the order of asking.

    The events of an engine are marks in one stream, which come in that order anyway. Their owner may give one
    up as soon as whatever it was for has ended, and that may be a cancelled read. So this thread waits for a
    mark of its own, which follows the event in a stream of its own.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        with cuda.current():
            self._stream = cuda.make_stream()
        self._thread = JobThread("kvferry-event-wait", cuda.bind_thread)

    def follow(self, event: DeviceEvent) -> Event:
        """A mark behind an event, which is not needed any more then; never blocks."""
        with self._cuda.current(), ExitStack() as undo:
            mark = self._cuda.make_event()
            undo.callback(self._cuda.free_event, mark)
            try:
                self._cuda.wait_in_stream(self._stream, event)
            except TransportError:
                raise
            except Exception as error:  # a thing that is no event, perhaps
                raise TransportError("cuda", f"cannot wait for {event!r:.80}: {error!r}") from error
            self._cuda.record(mark, self._stream)
            undo.pop_all()
        return mark

    def submit(self, mark: Event, then: Callable[[str], None]) -> None:
        """Have ``then`` called with an empty text, or with the error if the device failed; never blocks."""
        self._thread.put(partial(self._wait, mark, then))

    def close(self) -> None:
        """End after what was submitted."""
        self._thread.put(partial(self._cuda.free_stream, self._stream))
        self._thread.close()

    def _wait(self, mark: Event, then: Callable[[str], None]) -> None:
        error = ""
        try:
            self._cuda.wait_event(mark)
        except TransportError as failure:
            error = str(failure)
        quietly(self._cuda.free_event, mark)
        then(error)
