"""The thread that drives a control channel: its sockets belong to one thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping

from kvferry.channel import Channel, ContactChange, Received
from kvferry.errors import KVFerryError
from kvferry.log import is_worth_a_line, log_of
from kvferry.wire.reading import printable

log = log_of(__name__)

Receive = Callable[[Received | ContactChange], None]
"""Takes what arrives, and what happens to the connections to those who are called."""

Turn = Callable[[], float]
"""Does what is to be done, and says for how many seconds it may be left alone."""

WAIT_SECONDS = 1.0
BEHIND_SECONDS = 0.005
"""After how long to see whether whoever takes the messages has caught up."""
MAX_OUTBOX_BYTES = 16 << 20
"""Of messages that wait for the thread to send them."""
CLOSE_SECONDS = 10.0
MAX_LAST_TURNS = 1000
"""At the end: what is left is done, but not for ever."""


class ChannelThread:
    """Hands over what arrives, and sends what it is given.

    No message, however malformed, ends the thread: what cannot be read is counted and dropped.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._outbox: deque[tuple[str, bytes | None]] = deque()
        """What is to be sent, and where to; None: hang up."""
        self._outbox_bytes = 0
        self._wake_lock = threading.Lock()
        self._is_closing = False
        self.refused: Mapping[str, int] = {}
        """Messages that could not be read, by why. Never changed, but replaced: anybody may look at it."""
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        """Where it listens; empty if it does not."""
        return self._channel.address

    @property
    def dropped(self) -> Mapping[str, int]:
        """Messages that could not be sent or taken, by why."""
        return self._channel.dropped

    def start(
        self, name: str, receive: Receive, is_behind: Callable[[], bool], turn: Turn = lambda: WAIT_SECONDS
    ) -> None:
        """Begin: ``receive`` is called in the thread. While it ``is_behind``, messages wait in the channel.

        ``turn`` is called in the thread after whatever has arrived, when it is woken, when its time has come,
        and at the end until nothing is left.
        """
        work = (receive, is_behind, turn)
        self._thread = threading.Thread(target=self._run, args=work, name=name, daemon=True)
        self._thread.start()

    def send(self, to: str, data: bytes) -> None:
        """Have a message sent soon; from any thread. Answers are dropped where too much waits."""
        with self._wake_lock:
            is_full = self._outbox_bytes > MAX_OUTBOX_BYTES and self._channel.is_answer(to)
            self._outbox_bytes += 0 if is_full else len(data)
        if is_full:
            self._refuse("unread")
            return
        self._outbox.append((to, data))
        if threading.current_thread() is self._thread:
            self._flush()
        else:
            self.wake()

    def hang_up(self, address: str) -> None:
        """Keep no connection to an address, once what was handed over for it is sent; from any thread."""
        self._outbox.append((address, None))
        self.wake()

    def close(self) -> None:
        """Send what was handed over, then close the channel."""
        self._is_closing = True
        if self._thread is None:
            self._channel.close()
            return
        self.wake()
        self._thread.join(CLOSE_SECONDS)

    def wake(self) -> None:
        """Have the thread take a turn soon; from any thread."""
        with self._wake_lock:
            if self._thread is not None and self._thread.is_alive():
                self._channel.wake()

    # -- in the thread -----------------------------------------------------------------------------

    def _run(self, receive: Receive, is_behind: Callable[[], bool], turn: Turn) -> None:
        seconds = 0.0
        while not self._is_closing:
            for received in self._taken(seconds, is_behind=is_behind()):
                self._guarded(lambda received=received: receive(received))  # type: ignore[misc]
            seconds = self._take(turn)
            self._flush()
        for _ in range(MAX_LAST_TURNS):
            if self._take(turn):
                break
        self._flush()
        with self._wake_lock:
            self._channel.close()

    def _taken(self, seconds: float, *, is_behind: bool) -> list[Received | ContactChange]:
        most = BEHIND_SECONDS if is_behind else WAIT_SECONDS
        try:
            return self._channel.wait(0.0 if self._outbox else min(most, seconds), is_behind=is_behind)
        except Exception:  # this thread serves everybody
            self._refuse("unexpected")
            log.exception("the control channel goes on after an unexpected error")
            return []

    @staticmethod
    def _take(turn: Turn) -> float:
        try:
            return turn()
        except Exception:  # this thread serves everybody
            log.exception("the control channel goes on after an unexpected error")
            return WAIT_SECONDS

    def _flush(self) -> None:
        while self._outbox:
            to, data = self._outbox.popleft()
            if data is None:
                self._guarded(lambda to=to: self._channel.hang_up(to))  # type: ignore[misc]
            else:
                with self._wake_lock:
                    self._outbox_bytes -= len(data)
                self._guarded(lambda to=to, data=data: self._channel.send(to, data))  # type: ignore[misc]

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except KVFerryError as error:
            number = self._refuse(type(error).__name__)
            if is_worth_a_line(number):
                log.warning(
                    "refused message number %d on the control channel: %s", number, printable(str(error))
                )
        except Exception:
            self._refuse("unexpected")
            log.exception("the control channel goes on after an unexpected error")

    def _refuse(self, why: str) -> int:
        with self._wake_lock:
            number = self.refused.get(why, 0) + 1
            self.refused = {**self.refused, why: number}
        return number
