"""A source rank that gathers for its readers: its own socket, its ring, and the thread that serves them.

It waits for nobody: not for a reader that does not give a chunk back (it is taken away in time), and
not for one that asks for much (tickets are served in turn). What it gathers is checked first, by a
``TicketGuard``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from kvferry.channel import ContactChange, Received
from kvferry.core.view import Ints
from kvferry.endpoint.edges import ControlChannel
from kvferry.endpoint.listening import advertised
from kvferry.endpoint.owner import Event, Owner
from kvferry.errors import SpecError, TransportError
from kvferry.log import is_worth_a_line, log_of
from kvferry.runtime.ticket_guard import Admitted, GatherRefusal, Refusal, TicketGuard
from kvferry.transport.gather_line import GatherMemory
from kvferry.transport.pack import TermSide, check_room
from kvferry.transport.staging_ring import LentChunks
from kvferry.transport.stream_frames import StreamOffer
from kvferry.transport.stream_sender import StreamSender
from kvferry.wire.bad_input import printable
from kvferry.wire.gather import (
    Gather,
    Gathered,
    GiveBack,
    GivenBack,
    NotGathered,
    OpenStream,
    StreamOffered,
    decode_to_rank,
    encode_rank_message,
)

log = log_of(__name__)

MAX_WAITING = 64
"""Asks of one ticket that wait for a chunk."""
LOOPBACK = "127.0.0.1"
REFUSED_FOR = {
    "too-much": GatherRefusal.TOO_MUCH,
    "out-of-bounds": GatherRefusal.NOT_ITS_BYTES,
    "unknown-region": GatherRefusal.NOT_ITS_BYTES,
}
"""What a transport says of bytes that cannot be gathered; all else is the device's, or a bug."""
PATIENCE_S = 2.0
"""How long a reader may keep a chunk that others wait for."""


class _Waiting(NamedTuple):
    to: str
    nonce: int
    admitted: Admitted
    sides: list[TermSide]

    @property
    def borrower(self) -> tuple[str, int]:
        """Who alone gives the chunk back."""
        return self.to, self.nonce


class _Answer(NamedTuple):
    to: str
    message: Gathered | NotGathered | GivenBack | StreamOffered


class GatherService:
    """Gathers what readers ask for, if the guard lets it."""

    def __init__(
        self,
        memory: GatherMemory,
        guard: TicketGuard,
        channel: ControlChannel,
        clock: Callable[[], float],
        patience_s: float = PATIENCE_S,
        *,
        advertise: str = "",
        are_streams_proved: bool = False,
    ) -> None:
        """``advertise``: the host that readers call, if it is another one than we listen at."""
        self._copier, self._ring, self._channel = memory.copier, memory.ring, channel
        host = channel.address.removeprefix("tcp://").rpartition(":")[0].strip("[]") or LOOPBACK
        self._streams = StreamSender(memory.sender, host, is_proved=are_streams_proved)
        self._stream_address = advertised(f"tcp://{host}:{self._streams.port}", advertise)
        # The owner's alone:
        self._guard = guard
        self._chunks = LentChunks(self._ring.size.num_chunks, patience_s)
        self._waiting: deque[tuple[tuple[int, int], deque[_Waiting]]] = deque()
        """By start of the engine and ticket; the first one's turn is next."""
        self._num_gathered = 0
        self._owner: Owner[_Answer] = Owner("kvferry-gather", self._carry_out, self._tick, clock)
        # It rides on the channel's thread: an answer that has to be handed over waits while we gather on.
        channel.start("kvferry-gather", self._receive, lambda: self._owner.is_behind, self._owner.turn)

    # -- from any thread ---------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Where readers ask."""
        return self._channel.address

    def begin(self, generation: int) -> None:
        """The engine has started anew."""
        self._put(lambda _: self._begin(generation))

    def revoke(self, generation: int, ticket_id: int, then: Callable[[], None]) -> None:
        """Gather nothing of a ticket any more; ``then`` is called when nothing of it is being gathered.

        ``generation``: the start of the engine that the ticket is of.
        """
        self._put(lambda _: self._revoke(generation, ticket_id, then))

    def when_revoked(self, then: Callable[[], None]) -> None:
        """Call ``then`` once nothing is gathered of what was revoked so far."""
        self._put(lambda _: self._when_quiet(then))

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
        self._channel.close()  # after a last turn
        self._streams.close()

    def _put(self, event: Event[_Answer]) -> None:
        self._owner.put(event)
        self._channel.wake()

    def _receive(self, received: Received | ContactChange) -> None:
        if isinstance(received, ContactChange):
            return
        to = received.reply_to
        match decode_to_rank(received.data):  # raises for junk, which the channel counts; so does _sides
            case Gather() as ask:
                sides = _sides(ask)
                self._owner.put(lambda _: self._ask(to, ask, sides))
            case GiveBack() as given:
                self._owner.put(lambda _: self._given_back(to, given))
            case OpenStream() as question:
                self._owner.put(lambda _: self._open_stream(to, question))

    # -- the owner's -------------------------------------------------------------------------------

    def _carry_out(self, answers: Iterable[_Answer]) -> None:
        for answer in answers:
            self._channel.send(answer.to, encode_rank_message(answer.message))

    def _tick(self, now: float) -> float:
        """Gather one chunk, for the ticket whose turn it is: who gives back or revokes waits for one."""
        if self._waiting:
            ticket, asks = self._waiting[0]
            if lent := self._chunks.take(ticket, asks[0].borrower, now):
                self._waiting.popleft()
                ask = asks.popleft()
                if asks:
                    self._waiting.append((ticket, asks))
                self._carry_out([self._gather(ask, *lent)])
        if not self._waiting:
            return float("inf")
        return now if self._chunks.has_free else self._chunks.next_deadline()

    def _begin(self, generation: int) -> list[_Answer]:
        self._guard.begin(generation)
        return []

    def _revoke(self, generation: int, ticket_id: int, then: Callable[[], None]) -> list[_Answer]:
        self._guard.begin(generation)  # first: a new start forgets what has ended
        self._guard.end(ticket_id)
        self._chunks.take_all_from((generation, ticket_id))
        self._streams.revoke(ticket_id)
        return self._when_quiet(then)

    def _when_quiet(self, then: Callable[[], None]) -> list[_Answer]:
        """What is gathered into the ring is gathered by this thread; streams have one of their own."""
        self._streams.put(then)
        return []

    def _given_back(self, to: str, given: GiveBack) -> list[_Answer]:
        is_valid = self._chunks.give_back(given.chunk, given.generation, (to, given.nonce))
        return [_Answer(to, GivenBack(given.nonce, is_valid))] if given.is_asking else []

    def _ask(self, to: str, ask: Gather, sides: list[TermSide]) -> list[_Answer]:
        admitted = self._guard.admit(ask.permit)
        if isinstance(admitted, Refusal):
            return [self._refuse(to, ask.nonce, admitted)]
        if ask.into != self._ring.ring_id:
            return self._send(to, ask, admitted, sides)
        ticket = admitted.generation, admitted.ticket_id
        asks = next((each for known, each in self._waiting if known == ticket), None)
        if asks is None:
            asks = deque()
            self._waiting.append((ticket, asks))
        if len(asks) >= MAX_WAITING:
            detail = f"{MAX_WAITING} asks of this ticket wait already"
            return [self._refuse(to, ask.nonce, self._guard.refuse(GatherRefusal.TOO_MUCH, detail))]
        asks.append(_Waiting(to, ask.nonce, admitted, sides))
        return []

    def _open_stream(self, to: str, question: OpenStream) -> list[_Answer]:
        nonce, regions = question.nonce, self._copier.memory.regions
        ours = tuple((each.address, each.num_bytes) for each in regions)
        if question.regions != ours:
            detail = "its regions are not those that the reader was told of"
            return [self._refuse(to, nonce, self._guard.refuse(GatherRefusal.NOT_ITS_BYTES, detail))]

        def offered(offer: StreamOffer | None) -> list[_Answer]:
            if offer:
                return [_Answer(to, StreamOffered(nonce, offer.address, offer.stream_id, offer.key))]
            return [self._refuse(to, nonce, self._guard.refuse(GatherRefusal.TOO_MUCH, "too many streams"))]

        self._streams.open(self._stream_address, lambda offer: self._put(lambda _: offered(offer)))
        return []

    def _send(self, to: str, ask: Gather, admitted: Admitted, sides: list[TermSide]) -> list[_Answer]:
        """Have bytes sent over a stream; whatever of it was revoked meanwhile is not."""
        refusal = self._refusal(admitted, sides)
        if refusal is not None:
            return [self._refuse(to, ask.nonce, refusal)]
        self._num_gathered += 1

        def refuse(why: str | TransportError) -> None:
            if isinstance(why, TransportError):
                self._put(lambda _: [self._refuse(to, ask.nonce, self._refuse_for(why))])
            else:
                self._put(lambda _: [_Answer(to, NotGathered(ask.nonce, GatherRefusal.ENDED.value, why))])

        self._streams.send(ask.into, admitted.ticket_id, ask.nonce, sides, refuse)
        return []

    def _refusal(self, admitted: Admitted, sides: list[TermSide]) -> Refusal | None:
        """Why bytes are not sent; whoever sends them has nobody to tell."""
        refusal = self._guard.check(admitted, _terms(sides))
        if refusal is None:
            try:
                check_room(sides, self._ring.size.chunk_bytes)
                for side in sides:
                    side.check(self._copier.memory)
            except TransportError as error:
                refusal = self._refuse_for(error)
        return refusal

    def _refuse_for(self, error: TransportError) -> Refusal:
        return self._guard.refuse(REFUSED_FOR.get(error.code, GatherRefusal.CANNOT), str(error))

    def _gather(self, ask: _Waiting, chunk: int, generation: int) -> _Answer:
        address = self._ring.address(chunk)
        refusal = self._guard.check(ask.admitted, _terms(ask.sides))
        if refusal is None:
            try:
                self._copier.gather(ask.sides, address)
            except TransportError as error:
                refusal = self._refuse_for(error)
            except Exception as error:
                log.exception("bytes could not be gathered")
                refusal = self._guard.refuse(GatherRefusal.CANNOT, f"unexpected: {error!r}")
        if refusal is not None:
            self._chunks.give_back(chunk, generation, ask.borrower)
            return self._refuse(ask.to, ask.nonce, refusal)
        self._num_gathered += 1
        lent_ms = int(1000 * self._chunks.patience_s)
        return _Answer(ask.to, Gathered(ask.nonce, address, chunk, generation, lent_ms))

    def _refuse(self, to: str, nonce: int, refusal: Refusal) -> _Answer:
        number = sum(self._guard.refused.values())
        if is_worth_a_line(number):
            log.warning("refused to gather, number %d: %s: %s", number, refusal.code, refusal.detail)
        return _Answer(to, NotGathered(nonce, refusal.code.value, printable(refusal.detail)))


def _terms(sides: list[TermSide]) -> list[tuple[Ints, Ints, Ints]]:
    """As the guard wants them."""
    return [(side.places, side.num_bytes, side.steps) for side in sides]


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
