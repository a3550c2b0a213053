"""The one thread that calls a machine, and carries out what it returns, in that order.

Everybody else leaves an *event* in its inbox: the engine's calls, messages, ends of reads, results of slow
work.
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
"""Tells the machine something, now; the effects are the machine's."""

MAX_AT_ONCE = 1000
"""Events that are taken before time is looked at again."""
MANY = 1_000
"""Events in the inbox, from which on messages wait in the channel, or are dropped there."""
MANY_BYTES = 4 << 20
"""Of messages in the inbox; decoded they have several times as many."""
ANSWER_SECONDS = 10.0


class Owner(Generic[E]):
    """Owns a machine. ``tick`` is called after each batch of events, and when the time comes that it names.

    Nothing that an event, an effect or a tick raises ends the thread.
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
        """Of messages; the first is the channel's thread's, the second the owner's."""

    # -- from any thread ---------------------------------------------------------------------------

    def put(self, event: Event[E], num_bytes: int = 0) -> None:
        """Leave an event; never blocks. ``num_bytes``: of the message that it is; only one thread says so.

        Whoever lets go of the interpreter, for a lock or a socket, may get it back milliseconds later while
        other threads compute. An engine's step loop must not be there: this is all that its calls do.
        """
        if num_bytes:
            self._bytes_put += num_bytes
        self._inbox.put((event, num_bytes))

    @property
    def has_more(self) -> bool:
        """Whether something is in the inbox."""
        return self._inbox.num_waiting > 0

    @property
    def is_behind(self) -> bool:
        """Whether messages had better wait where they are."""
        return self._inbox.num_waiting > MANY or self._bytes_put - self._bytes_taken > MANY_BYTES

    def ask(self, question: Callable[[], T]) -> T:
        """Have the owner ask its machine; waits for the answer, and raises if there is none in time."""
        answer: Future[T] = Future()

        def event(_: float) -> Iterable[E]:
            try:
                answer.set_result(question())
            except Exception as error:
                answer.set_exception(error)
            return ()

        thread = self._inbox.thread
        if not thread.is_alive():
            return question()  # it has not begun, or it is over: nobody else is there
        self.put(event)
        try:
            return answer.result(ANSWER_SECONDS)
        except TimeoutError:
            if not thread.is_alive():
                return question()
            raise KVFerryError(f"{thread.name} did not answer within {ANSWER_SECONDS:g} s") from None

    def start(self) -> None:
        """Begin, in a thread of its own."""
        self._inbox.thread.start()

    def close(self) -> None:
        """Do what was asked for so far; after that, whatever comes stays where it is."""
        self._inbox.close()
        self._inbox.join(ANSWER_SECONDS)

    # -- in the thread -----------------------------------------------------------------------------

    def _take_step(self, taken: list[tuple[Event[E], int]]) -> float:
        self._bytes_taken += sum(num_bytes for _, num_bytes in taken)
        until = self.step([event for event, _ in taken], self._clock())
        return until - self._clock()

    def take(self, seconds: float) -> tuple[list[Event[E]], bool]:
        """What is in the inbox, after at most so long; and whether there may be more."""
        taken, is_open = self._inbox.take(seconds)
        self._bytes_taken += sum(num_bytes for _, num_bytes in taken)
        return [event for event, _ in taken], is_open

    def step(self, events: Iterable[Event[E]], now: float) -> float:
        """Tell the machine, carry out what it wants; when to come again at the latest."""
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
