"""Control messages of packed reads: a reader requests bytes, and the source rank checks and sends them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvferry.channel import Contact, ContactChange, Received
from kvferry.core.manifest import Manifest, Region
from kvferry.core.owned import BlockBytes
from kvferry.core.product import Term
from kvferry.core.view import Ints
from kvferry.endpoint.edges import ChannelThread, Edges
from kvferry.endpoint.invitation import advertised, check_listen
from kvferry.endpoint.owner import MANY, MANY_BYTES
from kvferry.errors import SpecError, TransportError
from kvferry.log import is_worth_a_line, log_of
from kvferry.runtime.ticket_guard import Admitted, GatherRefusal, Refusal, TicketGuard
from kvferry.transport.base import Transport
from kvferry.transport.pack import ChunkCopier, TermSide, check_room
from kvferry.transport.process import ProcessTransport
from kvferry.transport.stream_frames import StreamOffer
from kvferry.transport.stream_reader import StreamMover
from kvferry.transport.stream_sender import StreamSender, TicketKey
from kvferry.wire.rank_asks import (
    Gather,
    NotGathered,
    OpenStream,
    StreamOffered,
    decode_from_rank,
    decode_to_rank,
    encode_rank_message,
)
from kvferry.wire.reading import printable
from kvferry.wire.secret import Trust
from kvferry.wire.ticket import RANK_KEY_BYTES

log = log_of(__name__)

LOOPBACK = "127.0.0.1"
REFUSED_FOR = {
    "too-much": GatherRefusal.TOO_MUCH,
    "out-of-bounds": GatherRefusal.NOT_ITS_BYTES,
    "unknown-region": GatherRefusal.NOT_ITS_BYTES,
}
"""The refusals for a transport's error codes; by default CANNOT."""


class GatherService:
    """Serves packed reads of a source rank over streams.

    The thread of the streams checks each request with a ``TicketGuard`` and sends the bytes; bytes that it
    has not begun to send when their ticket is released are not sent.
    """

    def __init__(
        self,
        copier: ChunkCopier,
        guard: TicketGuard,
        channel: ChannelThread,
        *,
        advertise: str = "",
        is_sealed: bool = False,
    ) -> None:
        """``advertise``: the host that readers call, if not the listening one.

        ``is_sealed``: whether streams are encrypted.
        """
        self._copier, self._channel = copier, channel
        host = channel.address.removeprefix("tcp://").rpartition(":")[0].strip("[]") or LOOPBACK
        self._streams = StreamSender(copier, host, is_sealed=is_sealed)
        self._stream_address = advertised(f"tcp://{host}:{self._streams.port}", advertise)
        self._bytes_received = 0
        """Of messages; used by the channel's thread only."""
        # Used by the streams' thread only:
        self._bytes_heard = 0
        self._guard = guard
        self._num_gathered = 0
        channel.start("kvferry-gather", self._receive, self._is_behind)

    # -- from any thread ---------------------------------------------------------------------------

    @property
    def address(self) -> str:
        return self._channel.address

    def begin(self, generation: int) -> None:
        """The engine has restarted: offers of earlier generations are over."""
        self._streams.put(partial(self._begin, generation))

    def revoke(self, generation: int, ticket_id: int, then: Callable[[], None]) -> None:
        """Stop sending bytes of a ticket; ``then`` is called when none of them is being sent."""
        self._streams.put(partial(self._revoke, TicketKey(generation, ticket_id), then))

    def when_revoked(self, then: Callable[[], None]) -> None:
        """Call ``then`` once all earlier revocations are done."""
        self._streams.put(then)

    def status(self) -> dict[str, object]:
        return {"gathered": self._num_gathered, "refused": dict(self._guard.refused)}

    def close(self) -> None:
        self._channel.close()
        self._streams.close()

    def _receive(self, received: Received | ContactChange) -> None:
        if isinstance(received, ContactChange):
            return
        to, num_bytes = received.reply_to, len(received.data)
        message = decode_to_rank(received.data)  # raises for malformed messages, like _sides
        hear = (
            partial(self._ask, to, message, _sides(message))
            if isinstance(message, Gather)
            else partial(self._open_stream, to, message)
        )
        self._bytes_received += num_bytes
        self._streams.put(partial(self._hear, num_bytes, hear))

    def _is_behind(self) -> bool:
        return self._streams.num_waiting > MANY or self._bytes_received - self._bytes_heard > MANY_BYTES

    # -- in the thread of the streams --------------------------------------------------------------

    def _hear(self, num_bytes: int, hear: Callable[[], None]) -> None:
        self._bytes_heard += num_bytes
        hear()

    def _begin(self, generation: int) -> None:
        self._guard.begin(generation)
        self._streams.revoke(lambda ticket: ticket.generation != generation)

    def _revoke(self, ended: TicketKey, then: Callable[[], None]) -> None:
        self._begin(ended.generation)  # first, since a new generation resets the ended tickets
        self._guard.end(ended.ticket_id)
        self._streams.revoke(lambda ticket: ticket == ended)
        then()

    def _open_stream(self, to: str, question: OpenStream) -> None:
        nonce, regions = question.nonce, self._copier.memory.regions
        admitted = self._guard.admit(question.permit)
        if isinstance(admitted, Refusal):
            self._refuse(to, nonce, admitted)
        elif question.regions != tuple((each.address, each.num_bytes) for each in regions):
            detail = "its regions differ from those described to the reader"
            self._refuse(to, nonce, self._guard.refuse(GatherRefusal.NOT_ITS_BYTES, detail))
        elif offer := self._streams.open(self._stream_address):
            self._say(to, StreamOffered(nonce, offer.address, offer.stream_id, offer.key))
        else:
            self._refuse(to, nonce, self._guard.refuse(GatherRefusal.TOO_MUCH, "too many streams"))

    def _ask(self, to: str, ask: Gather, sides: list[TermSide]) -> None:
        """Check a request and queue its bytes."""
        admitted = self._guard.admit(ask.permit)
        if isinstance(admitted, Refusal):
            self._refuse(to, ask.nonce, admitted)
            return
        if refusal := self._refusal(admitted, sides):
            self._refuse(to, ask.nonce, refusal)
            return
        self._num_gathered += 1

        def refuse(why: str | TransportError) -> None:
            if isinstance(why, TransportError):
                self._refuse(to, ask.nonce, self._refuse_for(why))
            else:
                self._say(to, NotGathered(ask.nonce, GatherRefusal.ENDED.value, why))

        ticket = TicketKey(admitted.generation, admitted.ticket_id)
        self._streams.send(ask.stream_id, ticket, ask.nonce, sides, refuse)

    def _refusal(self, admitted: Admitted, sides: list[TermSide]) -> Refusal | None:
        """Why bytes must not be sent; checked here, since the sender cannot report errors."""
        refusal = self._guard.check(admitted, [(side.places, side.num_bytes, side.steps) for side in sides])
        if refusal is None:
            try:
                check_room(sides, self._copier.chunk_bytes)
                for side in sides:
                    side.check(self._copier.memory)
            except TransportError as error:
                refusal = self._refuse_for(error)
        return refusal

    def _refuse_for(self, error: TransportError) -> Refusal:
        return self._guard.refuse(REFUSED_FOR.get(error.code, GatherRefusal.CANNOT), str(error))

    def _refuse(self, to: str, nonce: int, refusal: Refusal) -> None:
        number = sum(self._guard.refused.values())
        if is_worth_a_line(number):
            log.warning("packed read number %d rejected: %s: %s", number, refusal.code, refusal.detail)
        self._say(to, NotGathered(nonce, refusal.code.value, printable(refusal.detail)))

    def _say(self, to: str, message: NotGathered | StreamOffered) -> None:
        self._channel.send(to, encode_rank_message(message))


def _sides(ask: Gather) -> list[TermSide]:
    """The requested bytes as arrays; raises SpecError if they are malformed."""
    sides = []
    for columns in ask.terms:
        if any(len(column) % 8 or not column for column in columns):
            raise SpecError("gather: a column must have one or more integers of 8 bytes")
        places, num_bytes, steps = (np.frombuffer(column, "<i8") for column in columns)
        if len(num_bytes) not in (1, len(places)):
            raise SpecError(f"gather: {len(num_bytes)} lengths of {len(places)} runs")
        sides.append(TermSide(places, np.broadcast_to(num_bytes, places.shape), steps))
    return sides


@dataclass(frozen=True, eq=False, slots=True)
class RankGathering:
    address: str
    """Where readers send requests."""
    service: GatherService
    rank_key: bytes = field(repr=False)
    """For the rank's authority only."""


def open_gathering(
    manifest: Manifest,
    transport: Transport,
    *,
    listen: str,
    advertise: str = "",
    trust: Trust = Trust(),  # noqa: B008  (it is frozen)
    edges: Edges | None = None,
) -> RankGathering | None:
    """Serve packed reads of the manifest's only rank; None if its registered transport has none.

    ``listen``: the address for readers' requests; ``advertise``: the host that they call, if another one. The
    transport's card contains both.
    """
    packed = transport.packed if isinstance(transport, ProcessTransport) else None
    if packed is None:
        return None
    check_listen(listen, advertise, trust)
    edges, (rank,) = edges or Edges(), manifest.ranks
    rank_key = edges.random_bytes(RANK_KEY_BYTES)
    guard = TicketGuard(rank_key, BlockBytes(manifest, rank))
    channel = edges.open_channel(listen, trust.secret)
    is_sealed = trust.secret is not None
    service = GatherService(packed.sender, guard, channel, advertise=advertise, is_sealed=is_sealed)
    address = advertised(channel.address, advertise)
    packed.advertise(address)
    return RankGathering(address, service, rank_key)


class GatherCalls:
    def __init__(self, channel: ChannelThread, name: str) -> None:
        self._channel, self._name = channel, name
        self._answers: StreamMover | None = None

    def listen(self, answers: StreamMover) -> None:
        self._answers = answers
        self._channel.start(self._name, self._receive, lambda: False)

    def ask(self, to: str, nonce: int, permit: bytes, terms: Sequence[Term], stream_id: bytes) -> None:
        ask = Gather(nonce, permit, tuple(map(_columns, terms)), stream_id)
        self._channel.send(to, encode_rank_message(ask))

    def open_stream(self, to: str, nonce: int, permit: bytes, regions: Sequence[Region]) -> None:
        known = tuple((region.address, region.num_bytes) for region in regions)
        self._channel.send(to, encode_rank_message(OpenStream(nonce, permit, known)))

    def hang_up(self, address: str) -> None:
        self._channel.hang_up(address)

    def close(self) -> None:
        self._channel.close()

    def _receive(self, received: Received | ContactChange) -> None:
        answers = self._answers
        if answers is None:
            return
        if isinstance(received, ContactChange):
            if received.contact is Contact.BROKEN:
                answers.lost(received.address)
            return
        sender = received.reply_to
        match decode_from_rank(received.data):
            case NotGathered(nonce, code, detail):
                answers.not_gathered(sender, nonce, f"{code}: {detail}")
            case StreamOffered(nonce, address, stream_id, key):
                answers.stream_offered(sender, nonce, StreamOffer(address, stream_id, key))


def ask_to_gather(transport: Transport, open_channel: Callable[[], ChannelThread]) -> None:
    """Let a registered transport request packed reads, if it supports them."""
    if isinstance(transport, ProcessTransport) and transport.packed:
        transport.packed.open(GatherCalls(open_channel(), "kvferry-gather-calls"))


def _columns(term: Term) -> tuple[bytes, bytes, bytes]:
    runs = term.pattern
    lengths = runs.num_bytes[:1] if runs.each_bytes else runs.num_bytes
    return _column(runs.src), _column(lengths), _column(term.steps[0])


def _column(numbers: Ints) -> bytes:
    return np.ascontiguousarray(numbers, "<i8").tobytes()
