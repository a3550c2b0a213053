"""Cards: the connection data that a rank gives to its readers."""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.core.manifest import Region
from kvferry.errors import TransportError

SEAL = struct.Struct(">8sI")
LENGTHS = struct.Struct(">HIII")
MAGIC = b"kvfcard8"
"""Changes with the format, so that older readers reject the card."""
METADATA_HEAD = b"nixlSerDes|Agent"
"""Precedes the name of the agent in NIXL 1.x."""
DIGEST_BYTES = 16
POINT = struct.Struct(f">I{DIGEST_BYTES}s")
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 64, 64 << 20


@dataclass(frozen=True, slots=True)
class Card:
    """Each part is for one mode, and empty where that mode is unavailable.

    >>> card = Card("a", b"keys", export=b"handles")
    >>> Card.from_bytes(card.to_bytes()) == card
    True
    >>> Card.from_bytes(card.to_bytes()[:-1])
    Traceback (most recent call last):
    kvferry.errors.TransportError: bad-card: 37 bytes are not a card of this transport and version
    """

    agent: str = ""
    metadata: bytes = b""
    export: bytes = b""
    """Handles of device memory, for processes of the same host: an ``Export``."""
    gather: bytes = b""
    """Where to request packed reads: a ``GatherPoint``."""

    def to_bytes(self) -> bytes:
        parts = self.agent.encode(), self.metadata, self.export, self.gather
        sealed = LENGTHS.pack(*map(len, parts)) + b"".join(parts)
        return SEAL.pack(MAGIC, zlib.crc32(sealed)) + sealed

    @classmethod
    def from_bytes(cls, data: bytes) -> Card:
        """Raises TransportError unless it is a card with a correct checksum."""
        sealed = data[SEAL.size :]
        if len(sealed) >= LENGTHS.size and SEAL.unpack_from(data) == (MAGIC, zlib.crc32(sealed)):
            lengths, at, parts = LENGTHS.unpack_from(sealed), LENGTHS.size, []
            for length in lengths:
                parts.append(sealed[at : at + length])
                at += length
            if at == len(sealed):
                return cls(parts[0].decode(errors="replace"), *parts[1:])
        raise TransportError("bad-card", f"{len(data)} bytes are not a card of this transport and version")


@dataclass(frozen=True, slots=True)
class GatherPoint:
    """Where to request packed reads of a rank, and how many bytes at once.

    >>> point = GatherPoint("tcp://127.0.0.1:5555", 1 << 20, digest_of([]))
    >>> GatherPoint.from_bytes(point.to_bytes()) == point
    True
    >>> GatherPoint.from_bytes(b"junk")
    Traceback (most recent call last):
    kvferry.errors.TransportError: bad-card: its address for packed reads is malformed
    """

    address: str
    chunk_bytes: int
    regions_digest: bytes
    """Of the rank's regions: readers compare it with the manifest."""

    def to_bytes(self) -> bytes:
        return POINT.pack(self.chunk_bytes, self.regions_digest) + self.address.encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> GatherPoint:
        """Raises TransportError if it is malformed."""
        if len(data) > POINT.size:
            chunk_bytes, digest = POINT.unpack_from(data)
            if MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES:
                return cls(data[POINT.size :].decode(errors="replace"), chunk_bytes, digest)
        raise TransportError("bad-card", "its address for packed reads is malformed")


def digest_of(regions: Sequence[Region]) -> bytes:
    numbers = [number for region in regions for number in (region.address, region.num_bytes)]
    return hashlib.sha256(struct.pack(f">{len(numbers)}Q", *numbers)).digest()[:DIGEST_BYTES]


def name_in(metadata: bytes) -> str:
    """The name of the agent in NIXL's metadata, as NIXL reads it; empty if there is none.

    >>> name_in(METADATA_HEAD + bytes([3, 0, 0, 0, 0, 0, 0, 0]) + b"src" + b"keys")
    'src'
    """
    if not metadata.startswith(METADATA_HEAD):
        return ""
    start = len(METADATA_HEAD) + 8
    stop = start + int.from_bytes(metadata[len(METADATA_HEAD) : start], "little")
    return metadata[start:stop].decode(errors="replace")
