"""Reads that wait for the device: nothing of them is asked for before it has come to their event.

The mapped way needs none of this, since its copies wait in a stream of the device. The others write from
the host, or from another process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

from kvferry.errors import TransportError
from kvferry.log import log_of
from kvferry.transport.base import CANCELLED, DeviceEvent, Link, OnEnd, Start, quietly
from kvferry.transport.cuda import Cuda, Event

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


@dataclass(frozen=True, eq=False, slots=True)
class _Held:
    link: Link
    start: Start
    on_end: OnEnd


class HeldReads:
    """The reads of one transport that are held. Each is started, or ended, exactly once; for any thread."""

    def __init__(self, cuda: Cuda) -> None:
        self._events = EventWait(cuda)
        self._lock = threading.RLock()
        """Also held while a read is started: what cancels it comes before that, or after it."""
        self._held: dict[int, _Held] = {}

    def hold(self, transfer: int, link: Link, start: Start, on_end: OnEnd, after: DeviceEvent) -> None:
        """Start a read when the device has come to an event, unless it is ended before; never blocks."""
        mark, held = self._events.follow(after), _Held(link, start, on_end)
        with self._lock:
            self._held[transfer] = held
        self._events.submit(mark, partial(self._let_go, transfer, held))

    def cancel(self, transfer: int) -> bool:
        """End a read that is held, at once; whether it was."""
        with self._lock:
            held = self._held.pop(transfer, None)
        if held:
            held.on_end(CANCELLED)
        return held is not None

    def end_all(self, error: str, link: Link | None = None) -> None:
        """End all that are held, or those of one link."""
        with self._lock:
            ended = [number for number, held in self._held.items() if link in (None, held.link)]
            reads = [self._held.pop(number) for number in ended]
        for held in reads:
            held.on_end(error)

    def close(self) -> None:
        """End the thread; nothing may be held."""
        self._events.close()

    def _let_go(self, transfer: int, held: _Held, error: str) -> None:
        with self._lock:
            if self._held.get(transfer) is not held:
                return  # it has ended; another may have its number by now
            del self._held[transfer]
            if not error:
                try:
                    held.start(transfer, held.on_end)
                except TransportError as failure:
                    error = str(failure)
        if error:
            held.on_end(error)
