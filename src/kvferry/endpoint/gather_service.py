"""A source rank that gathers for its readers: its own socket, its ring, and the thread that serves them.

The thread waits for nobody: not for a reader that does not give a chunk back (it is taken away in time), and
not for one that asks for much (tickets are served in turn). What it gathers is checked first, by a
``TicketGuard``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol

import numpy as np

from kvferry.channel import ContactChange, Received
from kvferry.core.view import Ints
from kvferry.endpoint.edges import ControlChannel
from kvferry.errors import KVFerryError, SpecError, TransportError
from kvferry.log import log_of
from kvferry.runtime.ticket_guard import Admitted, GatherRefusal, Refusal
from kvferry.transport.pack import TermSide, pack
from kvferry.transport.places import Places
from kvferry.transport.staging_ring import LentChunks, StagingRing
from kvferry.wire.bad_input import printable
from kvferry.wire.gather import (
    Gather,
    Gathered,
    GiveBack,
    GivenBack,
    NotGathered,
    decode_to_rank,
    encode_rank_message,
)

log = log_of(__name__)

MAX_WAITING = 64
"""Asks of one ticket that wait for a chunk."""
MAX_AT_ONCE = 100
"""Messages that are looked at before the next chunk is gathered."""
MANY = 1_000
"""Messages in the inbox, from which on more are dropped."""
PATIENCE_S = 2.0
"""How long a reader may keep a chunk that others wait for."""


class Guard(Protocol):
    """Who says what may be gathered (``TicketGuard``)."""

    @property
    def refused(self) -> Mapping[str, int]:
        """How often, by why."""
        ...

    def begin(self, generation: int) -> None:
        """The engine has started anew."""
        ...

    def end(self, ticket_id: int) -> None:
        """A ticket has ended."""
        ...

    def admit(self, permit: bytes) -> Admitted | Refusal:
        """The ticket of a permit, if it may be gathered for."""
        ...

    def check(self, admitted: Admitted, terms: Sequence[tuple[Ints, Ints, Ints]]) -> Refusal | None:
        """Why bytes are not gathered for a ticket."""
        ...

    def refuse(self, code: GatherRefusal, detail: str) -> Refusal:
        """Count a refusal."""
        ...


class _Waiting(NamedTuple):
    reply_to: str
    nonce: int
    admitted: Admitted
    sides: list[TermSide]


class GatherService:
    """Gathers what readers ask for, if the guard lets it."""

    def __init__(
        self,
        memory: Places,
        ring: StagingRing,
        guard: Guard,
        channel: ControlChannel,
        clock: Callable[[], float],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._memory, self._ring, self._channel, self._clock = memory, ring, channel, clock
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # The thread's alone:
        self._guard = guard
        self._chunks = LentChunks(ring.size.num_chunks, patience_s)
        self._waiting: deque[tuple[int, deque[_Waiting]]] = deque()
        """By ticket; the first one's turn is next."""
        self._num_gathered = 0
        self._thread = threading.Thread(target=self._run, name="kvferry-gather", daemon=True)
        self._thread.start()
        channel.start("kvferry-gather-channel", self._receive, lambda: self._inbox.qsize() > MANY)

    # -- from any thread ---------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Where readers ask."""
        return self._channel.address

    def begin(self, generation: int) -> None:
        """The engine has started anew."""
        self._inbox.put(partial(self._guard.begin, generation))

    def revoke(self, ticket_id: int, then: Callable[[], None]) -> None:
        """Gather nothing of a ticket any more; ``then`` is called when nothing of it is being gathered."""
        self._inbox.put(partial(self._revoke, ticket_id, then))

    def status(self) -> dict[str, object]:
        """What a person wants to know."""
        return {
            "gathered": self._num_gathered,
            "lent": self._chunks.num_lent,
            "taken_away": self._chunks.num_taken_away,
            "refused": dict(self._guard.refused),
        }

    def close(self) -> None:
        """Gather nothing more."""
        self._channel.close()
        self._inbox.put(None)
        self._thread.join()

    def _receive(self, received: Received | ContactChange) -> None:
        if isinstance(received, Received):
            message = decode_to_rank(received.data)  # raises for junk, which the channel counts
            self._inbox.put(partial(self._take, received.reply_to, message))

    # -- in the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        """Look at what has come, gather one chunk, and so on: who gives back or revokes waits for one."""
        is_open = True
        while is_open:
            events, is_open = self._events()
            for event in events:
                self._guarded(event)
            self._guarded(self._serve_one)

    def _events(self) -> tuple[list[Callable[[], None]], bool]:
        """What has come; and whether more may come."""
        events: list[Callable[[], None]] = []
        try:
            event = self._inbox.get(timeout=self._wait_seconds())
            while event is not None:
                events.append(event)
                if len(events) == MAX_AT_ONCE:
                    return events, True
                event = self._inbox.get_nowait()
        except Empty:
            return events, True
        return events, False

    @staticmethod
    def _guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except SpecError as error:
            log.warning("refused to gather: %s", printable(str(error)))
        except Exception:  # no ask may end the thread
            log.exception("the thread that gathers goes on after an unexpected error")

    def _wait_seconds(self) -> float | None:
        if not self._waiting:
            return None
        if self._chunks.has_free:
            return 0.0
        return max(0.0, self._chunks.next_deadline() - self._clock())

    def _take(self, reply_to: str, message: Gather | GiveBack) -> None:
        match message:
            case Gather():
                self._ask(reply_to, message)
            case GiveBack(nonce, chunk, generation):
                is_valid = self._chunks.give_back(chunk, generation)
                self._send(reply_to, GivenBack(nonce, is_valid))

    def _ask(self, reply_to: str, ask: Gather) -> None:
        match self._guard.admit(ask.permit):
            case Refusal() as refusal:
                self._refuse(reply_to, ask.nonce, refusal)
            case Admitted() as admitted:
                queue = next((each for number, each in self._waiting if number == admitted.ticket_id), None)
                if queue is None:
                    queue = deque()
                    self._waiting.append((admitted.ticket_id, queue))
                if len(queue) >= MAX_WAITING:
                    detail = f"{MAX_WAITING} asks of this ticket wait already"
                    self._refuse(reply_to, ask.nonce, self._guard.refuse(GatherRefusal.TOO_MUCH, detail))
                else:
                    queue.append(_Waiting(reply_to, ask.nonce, admitted, _sides(ask)))

    def _serve_one(self) -> None:
        """Gather for the ticket whose turn it is."""
        if not self._waiting:
            return
        ticket_id, queue = self._waiting.popleft()
        if queue:
            lent = self._chunks.take(ticket_id, self._clock())
            if lent is None:
                self._waiting.appendleft((ticket_id, queue))
                return
            self._gather(queue.popleft(), *lent)
        if queue:
            self._waiting.append((ticket_id, queue))

    def _gather(self, ask: _Waiting, chunk: int, generation: int) -> None:
        address = self._ring.address(chunk)
        refusal = self._guard.check(ask.admitted, [(s.places, s.num_bytes, s.steps) for s in ask.sides])
        if refusal is None:
            try:
                pack(self._memory, ask.sides, address, self._ring.size.chunk_bytes)
            except TransportError as error:
                code = GatherRefusal.TOO_MUCH if error.code == "too-much" else GatherRefusal.NOT_ITS_BYTES
                refusal = self._guard.refuse(code, str(error))
        if refusal is not None:
            self._chunks.give_back(chunk, generation)
            self._refuse(ask.reply_to, ask.nonce, refusal)
            return
        self._num_gathered += 1
        self._send(ask.reply_to, Gathered(ask.nonce, address, chunk, generation))

    def _revoke(self, ticket_id: int, then: Callable[[], None]) -> None:
        self._guard.end(ticket_id)
        self._chunks.take_all_from(ticket_id)
        then()

    def _refuse(self, reply_to: str, nonce: int, refusal: Refusal) -> None:
        number = sum(self._guard.refused.values())
        if number.bit_count() == 1:  # each 1st, 2nd, 4th, 8th …: they must not fill the log
            log.warning("refused to gather, number %d: %s: %s", number, refusal.code, refusal.detail)
        self._send(reply_to, NotGathered(nonce, refusal.code.value, printable(refusal.detail)))

    def _send(self, reply_to: str, message: Gathered | NotGathered | GivenBack) -> None:
        try:
            self._channel.send(reply_to, encode_rank_message(message))
        except KVFerryError as error:
            log.warning("an answer to %s could not be sent: %s", reply_to, error)


def _sides(ask: Gather) -> list[TermSide]:
    """What is asked for, as arrays; raises SpecError if it makes none."""
    sides = []
    for columns in ask.terms:
        if any(len(column) % 8 or not column for column in columns):
            raise SpecError("gather: a column has whole numbers of 8 bytes, and one at least")
        places, num_bytes, steps = (np.frombuffer(column, "<i8") for column in columns)
        if len(num_bytes) not in (1, len(places)):
            raise SpecError(f"gather: {len(num_bytes)} lengths of {len(places)} runs")
        sides.append(TermSide(places, np.broadcast_to(num_bytes, places.shape), steps))
    return sides
