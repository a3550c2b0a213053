"""Requests of readers to a source rank: bytes to send, and digests of the bytes it sent.

A rank's own socket accepts only requests for bytes. Each carries its permit, so the rank keeps no state
between them. Messages are not repeated: a lost one fails its read by a deadline. Requests for digests come
through the authority (``wire.messages``); ``QuestionDoc`` is their content.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import msgspec

from kvferry.core.box import Box
from kvferry.core.digest import DigestPart
from kvferry.core.span import Span, Spans, count, normal
from kvferry.core.state import check_range
from kvferry.errors import SpecError
from kvferry.wire.messages import decoded
from kvferry.wire.reading import Name, SpanDoc, Words, read_msgpack, span_docs

Column = bytes
"""Signed 64-bit integers, little-endian."""


class Gather(msgspec.Struct, frozen=True, tag=True):
    """Reader → source rank: send these bytes, side by side, as one frame of a stream."""

    nonce: int
    """The reader's number of this request."""
    permit: bytes
    """Authorises the read (``wire.ticket``)."""
    terms: tuple[tuple[Column, Column, Column], ...]
    """Patterns over blocks: places in block 0; their lengths, or one common length; the distance of each
    block from block 0. For each run of the pattern, the bytes of all blocks follow each other."""
    stream_id: bytes


class OpenStream(msgspec.Struct, frozen=True, tag=True):
    """Reader → source rank: open a connection for gathered bytes."""

    nonce: int
    permit: bytes
    """Authorises the stream."""
    regions: tuple[tuple[int, int], ...]
    """Address and bytes of each region, from the rank's manifest."""


class StreamOffered(msgspec.Struct, frozen=True, tag=True):
    """Source rank → reader: connect to this address with this stream id."""

    nonce: int
    address: Name
    stream_id: bytes
    key: bytes
    """The encryption key of its frames; empty: not encrypted."""


class NotGathered(msgspec.Struct, frozen=True, tag=True):
    """Source rank → reader: the request failed."""

    nonce: int
    code: Name
    detail: Words = ""


ToRank = Gather | OpenStream
FromRank = NotGathered | StreamOffered

_encoder = msgspec.msgpack.Encoder()
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


def encode_rank_message(message: ToRank | FromRank) -> bytes:
    return _encoder.encode(message)


def decode_to_rank(data: bytes) -> ToRank:
    return decoded(_to_rank.decode, data)


def decode_from_rank(data: bytes) -> FromRank:
    return decoded(_from_rank.decode, data)


MAX_COORDINATE = 1 << 40
MAX_SPANS = 1 << 16
"""Spans of one axis of a box, or of cells."""


class StatesDoc(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """States with the same box and cells."""

    states: tuple[Name, ...]
    axes: dict[Name, tuple[SpanDoc, ...]]
    period: int
    cells: tuple[SpanDoc, ...]


class QuestionDoc(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that one source rank shall digest for one request."""

    seed: int
    parts: tuple[StatesDoc, ...]


def question_to_msgpack(seed: int, parts: Sequence[DigestPart]) -> bytes:
    """Write a question; the answer has the sums in the order of the parts."""
    alike = groupby(parts, key=lambda part: (id(part.box), part.cells))
    docs = (_states_doc(list(group)) for _, group in alike)
    return msgspec.msgpack.encode(QuestionDoc(seed, tuple(docs)))


def question_from_msgpack(data: bytes) -> tuple[int, list[DigestPart]]:
    """Read a question; raises SpecError if it is invalid."""
    doc = read_msgpack(data, QuestionDoc)
    check_range("digest: seed", doc.seed, 0, (1 << 64) - 1)
    boxes: dict[Box, Box] = {}
    cells: dict[Spans, Spans] = {}
    return doc.seed, [part for states in doc.parts for part in _parts(states, boxes, cells)]


def _states_doc(parts: Sequence[DigestPart]) -> StatesDoc:
    box = parts[0].box
    axes = {name: span_docs(spans) for name, spans in box.axes}
    return StatesDoc(tuple(part.src_state for part in parts), axes, box.period, span_docs(parts[0].cells))


def _parts(doc: StatesDoc, boxes: dict[Box, Box], known: dict[Spans, Spans]) -> list[DigestPart]:
    """The parts; equal boxes and cells become one object, so that a digest processes each once."""
    check_range("digest: period", doc.period, 1, MAX_COORDINATE)
    box = Box(tuple(sorted((name, _spans(spans)) for name, spans in doc.axes.items())), doc.period)
    cells = _spans(doc.cells)
    box, cells = boxes.setdefault(box, box), known.setdefault(cells, cells)
    return [DigestPart(state, state, box, cells) for state in doc.states]


def _spans(docs: tuple[SpanDoc, ...]) -> Spans:
    if len(docs) > MAX_SPANS or any(stop > MAX_COORDINATE for _, stop in docs):
        raise SpecError(f"digest: at most {MAX_SPANS} intervals, up to {MAX_COORDINATE}, are allowed")
    spans = normal([Span(start, stop) for start, stop in docs])
    if count(spans) != sum(stop - start for start, stop in docs):
        raise SpecError("digest: intervals overlap")
    return spans
