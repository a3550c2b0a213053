"""The only thread that calls a state machine; it carries out the returned effects in order.

Other threads put *events* into its inbox: calls, messages, ends of reads, results of slow work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Generic, TypeVar

from kvferry.errors import KVFerryError
from kvferry.host.threads import InboxThread
from kvferry.log import log_of

log = log_of(__name__)

E = TypeVar("E")
T = TypeVar("T")

Event = Callable[[float], Iterable[E]]
"""Calls the machine with the current time, and returns its effects."""

MAX_AT_ONCE = 1000
"""Events per step."""
MANY = 1_000
"""Events in the inbox beyond which messages wait in the channel, or are dropped there."""
MANY_BYTES = 4 << 20
"""The same for the bytes of encoded messages."""
ANSWER_SECONDS = 10.0


class Owner(Generic[E]):
    """Owns a state machine. ``tick`` is called after each batch of events, and at the time that it returns.

    Exceptions of events, effects and ticks are logged and do not end the thread.
    """

    def __init__(
        self,
        name: str,
        carry_out: Callable[[Iterable[E]], None],
        tick: Callable[[float], float],
        clock: Callable[[], float],
    ) -> None:
        self._carry_out, self._tick, self._clock = carry_out, tick, clock
        self._inbox: InboxThread[tuple[Event[E], int]] = InboxThread(name, self._take_step, MAX_AT_ONCE)
        self._bytes_put = self._bytes_taken = 0
        """Of messages; written by the channel's thread and by the owner, respectively."""

    # -- from any thread ---------------------------------------------------------------------------

    def put(self, event: Event[E], num_bytes: int = 0) -> None:
        """Add an event. ``num_bytes``: of its message; only one thread may pass it.

        Never blocks, nor releases the interpreter lock: an engine's step loop could otherwise lose
        milliseconds to other threads.
        """
        if num_bytes:
            self._bytes_put += num_bytes
        self._inbox.put((event, num_bytes))

    @property
    def has_more(self) -> bool:
        return self._inbox.num_waiting > 0

    @property
    def is_behind(self) -> bool:
        """Whether messages should wait in the channel."""
        return self._inbox.num_waiting > MANY or self._bytes_put - self._bytes_taken > MANY_BYTES

    def ask(self, question: Callable[[], T]) -> T:
        """Run a question in the owner thread and return its answer; raises KVFerryError after a timeout."""
        answer: Future[T] = Future()

        def event(_: float) -> Iterable[E]:
            try:
                answer.set_result(question())
            except Exception as error:
                answer.set_exception(error)
            return ()

        thread = self._inbox.thread
        if not thread.is_alive():
            return question()  # not started, or ended
        self.put(event)
        try:
            return answer.result(ANSWER_SECONDS)
        except TimeoutError:
            if not thread.is_alive():
                return question()
            raise KVFerryError(f"{thread.name} did not answer within {ANSWER_SECONDS:g} s") from None

    def start(self) -> None:
        self._inbox.thread.start()

    def close(self) -> None:
        """Process the events so far, and end the thread."""
        self._inbox.close()
        self._inbox.join(ANSWER_SECONDS)

    # -- in the thread -----------------------------------------------------------------------------

    def _take_step(self, taken: list[tuple[Event[E], int]]) -> float:
        self._bytes_taken += sum(num_bytes for _, num_bytes in taken)
        until = self.step([event for event, _ in taken], self._clock())
        return until - self._clock()

    def take(self, seconds: float) -> tuple[list[Event[E]], bool]:
        """The events in the inbox, after at most ``seconds``; and whether more may follow."""
        taken, is_open = self._inbox.take(seconds)
        self._bytes_taken += sum(num_bytes for _, num_bytes in taken)
        return [event for event, _ in taken], is_open

    def step(self, events: Iterable[Event[E]], now: float) -> float:
        """Process events and tick; returns the time of the next step."""
        for event in events:
            self._guarded(lambda event=event: self._carry_out(event(now)))  # type: ignore[misc]
        until = self._guarded(lambda: self._tick(now))
        return now + 1.0 if until is None else until

    @staticmethod
    def _guarded(work: Callable[[], T]) -> T | None:
        try:
            return work()
        except Exception:
            log.exception("unexpected error; the state machine continues")
        return None
