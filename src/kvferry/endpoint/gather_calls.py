"""How a destination rank asks source ranks to gather: a channel of its own, from which answers come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvferry.channel import Contact, ContactChange, Received
from kvferry.core.manifest import Region
from kvferry.core.product import Term
from kvferry.core.view import Ints
from kvferry.endpoint.edges import ControlChannel
from kvferry.transport.base import Transport
from kvferry.transport.stream_frames import GatherAnswers, GatheringTransport, StreamOffer
from kvferry.wire.gather import (
    Gather,
    NotGathered,
    OpenStream,
    StreamOffered,
    decode_from_rank,
    encode_rank_message,
)


class GatherCalls:
    """Asks, and hands the answers over."""

    def __init__(self, channel: ControlChannel, name: str) -> None:
        self._channel, self._name = channel, name
        self._answers: GatherAnswers | None = None

    def listen(self, answers: GatherAnswers) -> None:
        """Begin."""
        self._answers = answers
        self._channel.start(self._name, self._receive, lambda: False)

    def ask(self, to: str, nonce: int, permit: bytes, terms: Sequence[Term], stream_id: bytes) -> None:
        """Ask for the source side of these terms."""
        ask = Gather(nonce, permit, tuple(map(_columns, terms)), stream_id)
        self._channel.send(to, encode_rank_message(ask))

    def open_stream(self, to: str, nonce: int, permit: bytes, regions: Sequence[Region]) -> None:
        """Ask for a stream."""
        known = tuple((region.address, region.num_bytes) for region in regions)
        self._channel.send(to, encode_rank_message(OpenStream(nonce, permit, known)))

    def hang_up(self, address: str) -> None:
        """Keep no connection to an address."""
        self._channel.hang_up(address)

    def close(self) -> None:
        """Send what was said, and stop."""
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


def ask_to_gather(transport: Transport, open_channel: Callable[[], ControlChannel]) -> None:
    """Have a transport that is registered ask source ranks to gather, if that is its way."""
    if isinstance(transport, GatheringTransport) and transport.is_gathering:
        transport.ask_by(GatherCalls(open_channel(), "kvferry-gather-calls"))


def _columns(term: Term) -> tuple[bytes, bytes, bytes]:
    runs = term.pattern
    lengths = runs.num_bytes[:1] if runs.each_bytes else runs.num_bytes
    return _column(runs.src), _column(lengths), _column(term.steps[0])


def _column(numbers: Ints) -> bytes:
    return np.ascontiguousarray(numbers, "<i8").tobytes()
