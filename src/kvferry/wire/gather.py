"""What a reader and a source rank say to each other: gather these bytes, I have read them.

A rank's own socket takes these messages and no others. Each ask carries its permit, so nothing has to be
remembered between two of them. Nothing is repeated: a lost message fails its read, by a deadline.
"""

from __future__ import annotations

from typing import get_args

import msgspec

from kvferry.wire.limits import Name, Words
from kvferry.wire.messages import decoded

Column = bytes
"""Whole numbers of 64 bits, signed, the lowest byte first."""


class Gather(msgspec.Struct, frozen=True, tag=True):
    """Reader → source rank: put these bytes side by side into a chunk of your ring; or send them."""

    nonce: int
    """The reader's own number of this ask."""
    permit: bytes
    """That the bytes may be had (``wire.permit``)."""
    terms: tuple[tuple[Column, Column, Column], ...]
    """Patterns over blocks: places in block 0; lengths, or one that is the length of all; how far each block
    is from block 0. Run by run of the pattern, the bytes of all blocks follow each other."""
    into: bytes
    """The ring to put them into, or the stream to send them over, by its name. One of an earlier start of the
    rank is not there any more: nobody may look for bytes where they are not."""


class OpenStream(msgspec.Struct, frozen=True, tag=True):
    """Reader → source rank: what you gather for me, send me over a connection of its own."""

    nonce: int
    regions: tuple[tuple[int, int], ...]
    """Address and bytes of each region, as the reader knows them from the rank's manifest."""


class Gathered(msgspec.Struct, frozen=True, tag=True):
    """Source rank → reader: they are there, until you give the chunk back or keep it for too long."""

    nonce: int
    address: int
    """Where in the rank's memory."""
    chunk: int
    generation: int
    """How often the chunk was used: another one means other bytes."""
    lent_ms: int
    """For how long after the ask nobody takes it away, while the lease stands."""


class StreamOffered(msgspec.Struct, frozen=True, tag=True):
    """Source rank → reader: call there, and say this name."""

    nonce: int
    address: Name
    stream_id: bytes
    key: bytes
    """What its frames are proved with; empty: with nothing."""


class NotGathered(msgspec.Struct, frozen=True, tag=True):
    """Source rank → reader: no, and why."""

    nonce: int
    code: Name
    detail: Words = ""


class GiveBack(msgspec.Struct, frozen=True, tag=True):
    """Reader → source rank: nothing of this chunk is read any more."""

    nonce: int
    chunk: int
    generation: int
    is_asking: bool
    """Whether the reader took so long that it has to know if the chunk was taken away before."""


class GivenBack(msgspec.Struct, frozen=True, tag=True):
    """Source rank → reader: whether the chunk held your bytes until now; what you have read counts then."""

    nonce: int
    is_valid: bool


ToRank = Gather | GiveBack | OpenStream
FromRank = Gathered | NotGathered | GivenBack | StreamOffered

_encoder = msgspec.msgpack.Encoder()
_to_rank = msgspec.msgpack.Decoder(ToRank)
_from_rank = msgspec.msgpack.Decoder(FromRank)
KINDS = (*get_args(ToRank), *get_args(FromRank))


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
