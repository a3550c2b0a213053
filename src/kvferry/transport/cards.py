"""Cards: what a rank gives to those who may read its memory."""

from __future__ import annotations

import struct
import zlib

from kvferry.errors import TransportError

SEAL = struct.Struct(">8sI")
CARD = struct.Struct(">HIIII")
CARD_MAGIC = b"kvfnixl7"
"""Changed whenever a reader that does not know of the change must stay away.

2: the source may send segments that a reader of before has no room for, which ends the source's process.
3: what readers of the same host need to open device memory.
4: where the rank gathers for its readers.
5: what the rank opens to the fabric; a reader of before would look for a pool that is not there.
6: where the ring of a rank that gathers can be looked at.
7: whether that ring is on the host or on the rank's device.
"""
METADATA_HEAD = b"nixlSerDes|Agent"
"""What NIXL 1.x puts before the name of the agent."""


def pack_card(
    agent: str, metadata: bytes, segment_bytes: int = 0, export: bytes = b"", staging: bytes = b""
) -> bytes:
    """A card: the agent's name, its metadata, the TCP segments it sends, its export; with a checksum.

    ``segment_bytes`` is 0 if the agent leaves them as UCX has them; ``export`` is for readers of this host,
    ``staging`` for those that have the rank gather.
    """
    name = agent.encode()
    head = CARD.pack(len(name), len(metadata), segment_bytes, len(export), len(staging))
    sealed = head + name + metadata + export + staging
    return SEAL.pack(CARD_MAGIC, zlib.crc32(sealed)) + sealed


def unpack_card(card: bytes) -> tuple[str, bytes]:
    """The agent's name and its metadata.

    >>> unpack_card(pack_card("a", b"keys"))
    ('a', b'keys')
    >>> unpack_card(pack_card("a", b"keys")[:-1])
    Traceback (most recent call last):
    kvferry.errors.TransportError: bad-card: 34 bytes that are no card of this transport
    """
    sealed = card[SEAL.size :]
    if len(sealed) >= CARD.size and SEAL.unpack_from(card) == (CARD_MAGIC, zlib.crc32(sealed)):
        num_name, num_metadata, _, num_export, num_staging = CARD.unpack_from(sealed)
        body = sealed[CARD.size :]
        if len(body) == num_name + num_metadata + num_export + num_staging:
            return body[:num_name].decode(errors="replace"), body[num_name : num_name + num_metadata]
    raise TransportError("bad-card", f"{len(card)} bytes that are no card of this transport")


def segment_in(card: bytes) -> int:
    """The bytes of a TCP segment, from a card that was unpacked before.

    >>> segment_in(pack_card("a", b"keys", 65536))
    65536
    """
    return int(CARD.unpack_from(card, SEAL.size)[2])


def export_in(card: bytes) -> bytes:
    """What readers of the same host need to open device memory, from a card that was unpacked before.

    >>> export_in(pack_card("a", b"keys", export=b"handles")), export_in(pack_card("a", b"keys"))
    (b'handles', b'')
    """
    *_, num_export, num_staging = CARD.unpack_from(card, SEAL.size)
    stop = len(card) - num_staging
    return card[stop - num_export : stop]


def staging_in(card: bytes) -> bytes:
    """What readers need to have the rank gather, from a card that was unpacked before; empty if it does not.

    >>> staging_in(pack_card("a", b"keys", staging=b"ring")), staging_in(pack_card("a", b"", export=b"x"))
    (b'ring', b'')
    """
    *_, num_staging = CARD.unpack_from(card, SEAL.size)
    return card[len(card) - num_staging :]


def with_staging(card: bytes, staging: bytes) -> bytes:
    """A card that has none, with what readers need to have the rank gather."""
    agent, metadata = unpack_card(card)
    return pack_card(agent, metadata, segment_in(card), export_in(card), staging)


def name_in(metadata: bytes) -> str:
    """The name of the agent that metadata is of, as NIXL will read it; empty if it is none.

    >>> name_in(METADATA_HEAD + bytes([3, 0, 0, 0, 0, 0, 0, 0]) + b"src" + b"keys")
    'src'
    """
    if not metadata.startswith(METADATA_HEAD):
        return ""
    start = len(METADATA_HEAD) + 8
    stop = start + int.from_bytes(metadata[len(METADATA_HEAD) : start], "little")
    return metadata[start:stop].decode(errors="replace")
