"""A thread that waits for the device, so that nobody else has to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from queue import SimpleQueue

from kvferry.errors import TransportError
from kvferry.log import log_of
from kvferry.transport.base import DeviceEvent
from kvferry.transport.cuda import Cuda, Event
from kvferry.transport.quietly import quietly

log = log_of(__name__)


class EventWait:
    """Calls somebody when the device has come to an event, in the order of asking.

    The events of an engine are marks in one stream, which come in that order anyway. Their owner may give one
    up as soon as whatever it was for has ended, and that may be a cancelled read. So this thread waits for a
    mark of its own, which follows the event in a stream of its own.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        with cuda.current():
            self._stream = cuda.make_stream()
        self._inbox: SimpleQueue[tuple[Event, Callable[[str], None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvferry-event-wait", daemon=True)
        self._thread.start()

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
        self._inbox.put((mark, then))

    def close(self) -> None:
        """End after what was submitted."""
        self._inbox.put(None)

    def _run(self) -> None:
        quietly(self._cuda.bind_thread)
        while waited := self._inbox.get():
            mark, then = waited
            error = ""
            try:
                self._cuda.wait_event(mark)
            except TransportError as failure:
                error = str(failure)
            quietly(self._cuda.free_event, mark)
            try:
                then(error)
            except Exception:
                log.exception("what was to follow an event of the device failed")
        quietly(self._cuda.free_stream, self._stream)
