"""What a reader and a source rank say to each other: send me these bytes.

A rank's own socket takes these messages and no others. Each ask carries its permit, so nothing has to be
remembered between two of them. Nothing is repeated: a lost message fails its read, by a deadline.
"""

from __future__ import annotations

import msgspec

from kvferry.wire.messages import decoded
from kvferry.wire.reading import Name, Words

Column = bytes
"""Whole numbers of 64 bits, signed, the lowest byte first."""


class Gather(msgspec.Struct, frozen=True, tag=True):
    """Reader → source rank: send these bytes, side by side, as one frame of a stream."""

    nonce: int
    """The reader's own number of this ask."""
    permit: bytes
    """That the bytes may be had (``wire.permit``)."""
    terms: tuple[tuple[Column, Column, Column], ...]
    """Patterns over blocks: places in block 0; lengths, or one that is the length of all; how far each block
    is from block 0. Run by run of the pattern, the bytes of all blocks follow each other."""
    stream_id: bytes
    """The stream to send them over, by its name."""


class OpenStream(msgspec.Struct, frozen=True, tag=True):
    """Reader → source rank: what you gather for me, send me over a connection of its own."""

    nonce: int
    permit: bytes
    """That some bytes may be had: others get no stream."""
    regions: tuple[tuple[int, int], ...]
    """Address and bytes of each region, as the reader knows them from the rank's manifest."""


class StreamOffered(msgspec.Struct, frozen=True, tag=True):
    """Source rank → reader: call there, and say this name."""

    nonce: int
    address: Name
    stream_id: bytes
    key: bytes
    """What its frames are sealed with; empty: with nothing."""


class NotGathered(msgspec.Struct, frozen=True, tag=True):
    """Source rank → reader: no, and why."""

    nonce: int
    code: Name
    detail: Words = ""


ToRank = Gather | OpenStream
FromRank = NotGathered | StreamOffered

_encoder = msgspec.msgpack.Encoder()
_to_rank = msgspec.msgpack.Decoder(ToRank)
_from_rank = msgspec.msgpack.Decoder(FromRank)


def encode_rank_message(message: ToRank | FromRank) -> bytes:
    """A message as bytes."""
    return _encoder.encode(message)


def decode_to_rank(data: bytes) -> ToRank:
    """A message that a rank may get; anything else raises SpecError."""
    message: ToRank = decoded(_to_rank.decode, data)
    return message


def decode_from_rank(data: bytes) -> FromRank:
    """A message that a rank may send; anything else raises SpecError."""
    message: FromRank = decoded(_from_rank.decode, data)
    return message
