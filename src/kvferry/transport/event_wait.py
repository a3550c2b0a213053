"""A thread that waits for the device, so that nobody else has to."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from kvferry.errors import TransportError
from kvferry.transport.base import DeviceEvent
from kvferry.transport.cuda import Cuda

log = logging.getLogger(__name__)


class EventWait:
    """Calls somebody when the device has come to an event, in the order of asking.

    The events of an engine are marks in one stream, which come in that order anyway.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._inbox: SimpleQueue[tuple[DeviceEvent, Callable[[str], None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvferry-event-wait", daemon=True)
        self._thread.start()

    def submit(self, event: DeviceEvent, then: Callable[[str], None]) -> None:
        """Have ``then`` called with an empty text, or with the error if the device failed; never blocks."""
        self._inbox.put((event, then))

    def close(self) -> None:
        """End after what was submitted."""
        self._inbox.put(None)

    def _run(self) -> None:
        self._cuda.bind_thread()
        while waited := self._inbox.get():
            event, then = waited
            error = ""
            try:
                self._cuda.wait_event(event)
            except TransportError as failure:
                error = str(failure)
            except Exception as failure:  # a thing that is no event, perhaps
                error = f"cannot wait for {event!r:.80}: {failure!r}"
            try:
                then(error)
            except Exception:
                log.exception("what was to follow an event of the device failed")
