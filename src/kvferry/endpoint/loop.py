"""The thread that owns a control channel and keeps a state machine going."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable

from kvferry.channel import Channel, Received
from kvferry.errors import KVFerryError
from kvferry.wire.messages import Message, encode

log = logging.getLogger("kvferry")


class Loop:
    """Receives, ticks and sends in a thread of its own; anybody may ask it to send.

    ``on_message`` and ``on_tick`` are called in the thread. What they raise is logged and counted, and never
    ends the thread: no message, however malformed, may do that.
    """

    def __init__(
        self,
        name: str,
        channel: Channel,
        on_message: Callable[[Received], None],
        on_tick: Callable[[], float],
    ) -> None:
        self.channel = channel
        self._on_message, self._on_tick = on_message, on_tick
        self._outbox: deque[tuple[str, Message]] = deque()
        self._wake_lock = threading.Lock()
        self._is_closing = threading.Event()
        self.refused: Counter[str] = Counter()
        """Messages that were dropped, by why."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, to: str, message: Message) -> None:
        """Have a message sent soon; callable from any thread."""
        self._outbox.append((to, message))
        self.wake()

    def wake(self) -> None:
        """Let the thread look around now; callable from any thread."""
        if threading.current_thread() is not self._thread:
            with self._wake_lock:
                if not self._is_closing.is_set():
                    self.channel.wake()

    def close(self) -> None:
        """Stop the thread and close the channel."""
        self.wake()
        self._is_closing.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        pause = 0.0
        while not self._is_closing.is_set():
            for received in self.channel.wait(min(pause, 0.5)):
                self._guarded(lambda received=received: self._on_message(received))  # type: ignore[misc]
            pause = 0.5
            result = self._guarded(self._on_tick)
            if isinstance(result, float):
                pause = result
            self._flush()
        self._flush()
        with self._wake_lock:
            self.channel.close()

    def _flush(self) -> None:
        while self._outbox:
            to, message = self._outbox.popleft()
            self._guarded(lambda to=to, message=message: self.channel.send(to, encode(message)))  # type: ignore[misc]

    def _guarded(self, work: Callable[[], object]) -> object:
        try:
            return work()
        except KVFerryError as error:
            name = type(error).__name__
            self.refused[name] += 1
            if self.refused[name].bit_count() == 1:  # each 1st, 2nd, 4th, 8th …: junk must not fill the log
                log.warning("refused message number %d: %s", self.refused[name], error)
        except Exception:
            self.refused["unexpected"] += 1
            log.exception("the control thread goes on after an unexpected error")
        return None


def clock() -> float:
    """The clock of all durations."""
    return time.monotonic()
