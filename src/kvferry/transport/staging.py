"""What a reader must know of a rank that gathers: where it is asked, and where its ring is."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from kvferry.core.manifest import Region
from kvferry.errors import TransportError
from kvferry.transport.expose import SETTING as EXPOSE_SETTING
from kvferry.transport.expose import Expose
from kvferry.transport.setting import chosen
from kvferry.transport.staging_ring import MIN_CHUNK_BYTES, RING_ID_BYTES

SETTING = "KVFERRY_PACKED_READS"
DIGEST_BYTES = 16
FIELDS = struct.Struct(f">B?QQI{DIGEST_BYTES}s{RING_ID_BYTES}s")
EXPOSED = tuple(Expose)
"""By the number that stands for each in a card."""


class PackedReads(Enum):
    """Whether source ranks gather for their readers: the setting, as users write it."""

    NEVER = "never"
    """Nobody gathers, and nobody is asked to."""
    AUTO = "auto"
    """This rank gathers for its readers. It has others gather for it where the fabric cannot read them by
    itself, and those of its own host whose usual loads are of short runs."""
    REQUIRE = "require"
    """This rank gathers for its readers, and reads nobody who does not gather for it."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], expose: Expose = Expose.POOL) -> PackedReads:
        """The setting; raises TransportError if it is none. A rank that hides its pool has to gather."""
        return chosen(SETTING, environ, cls.REQUIRE if expose.hides_pool else cls.NEVER)

    def check(self, expose: Expose) -> None:
        """Refuse a rank that nobody could read from.

        >>> PackedReads.NEVER.check(Expose.STAGING)
        Traceback (most recent call last):
        kvferry.errors.TransportError: bad-setting: KVFERRY_EXPOSE='staging' needs ranks that gather...
        """
        if expose.hides_pool and self is PackedReads.NEVER:
            others = " or ".join(f"{SETTING}={choice.value}" for choice in (self.AUTO, self.REQUIRE))
            detail = f"{EXPOSE_SETTING}={expose.value!r} needs ranks that gather"
            raise TransportError("bad-setting", f"{detail}: set {others}, or leave it unset")


@dataclass(frozen=True, slots=True)
class Staging:
    """A rank's ring, and the address of the socket where it is asked to gather.

    >>> staging = Staging("tcp://127.0.0.1:5555", 1 << 40, 1 << 20, 1 << 16)
    >>> Staging.from_bytes(staging.to_bytes()) == staging
    True
    >>> Staging.from_bytes(b"junk")
    Traceback (most recent call last):
    kvferry.errors.TransportError: bad-card: it does not say where its rank gathers
    """

    address: str
    ring_address: int
    """0 where there is no ring to be read."""
    ring_bytes: int
    chunk_bytes: int
    expose: Expose = Expose.POOL
    regions_digest: bytes = bytes(DIGEST_BYTES)
    """Of the rank's regions: a pool that is hidden cannot be tried."""
    ring_id: bytes = bytes(RING_ID_BYTES)
    """The name of its ring; a rank that is asked for another one refuses."""
    place: str = ""
    """Where processes of the rank's own host can look at its ring; empty if they cannot."""
    is_on_host: bool = True
    """Whether its ring is in the host's memory; else on the rank's device."""

    @property
    def hides_pool(self) -> bool:
        """Whether nothing but what the rank gathers can be read."""
        return self.expose.hides_pool

    def ring_on(self, device: str) -> Region:
        """The ring, to be read; ``device``: of the rank's memory."""
        return Region("ring", self.ring_bytes, self.ring_address, "cpu" if self.is_on_host else device)

    def to_bytes(self) -> bytes:
        """For a card."""
        kinds = EXPOSED.index(self.expose), self.is_on_host
        numbers = *kinds, self.ring_address, self.ring_bytes, self.chunk_bytes
        return (
            FIELDS.pack(*numbers, self.regions_digest, self.ring_id)
            + f"{self.address}\n{self.place}".encode()
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Staging:
        """From a card; raises TransportError if it makes no sense."""
        if len(data) > FIELDS.size:
            number, is_on_host, *sizes, digest, ring_id = FIELDS.unpack_from(data)
            ring_address, ring_bytes, chunk_bytes = sizes
            expose = EXPOSED[number] if number < len(EXPOSED) else None
            has_ring = expose is Expose.NOTHING or ring_address
            if expose and has_ring and MIN_CHUNK_BYTES <= chunk_bytes <= ring_bytes <= 1 << 40:
                address, _, place = data[FIELDS.size :].decode(errors="replace").partition("\n")
                rest = expose, digest, ring_id, place, is_on_host
                return cls(address, ring_address, ring_bytes, chunk_bytes, *rest)
        raise TransportError("bad-card", "it does not say where its rank gathers")


def digest_of(regions: Sequence[Region]) -> bytes:
    """By which a reader knows the regions that it was told of."""
    numbers = [number for region in regions for number in (region.address, region.num_bytes)]
    return hashlib.sha256(struct.pack(f">{len(numbers)}Q", *numbers)).digest()[:DIGEST_BYTES]
