"""What a reader must know of a rank that gathers: where it is asked, and where its ring is."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from kvferry.core.manifest import Region
from kvferry.errors import TransportError

SETTING = "KVFERRY_PACKED_READS"
NUMBERS = struct.Struct(">QQI")


class PackedReads(Enum):
    """Whether source ranks gather for their readers: the setting, as users write it."""

    NEVER = "never"
    """Nobody gathers, and nobody is asked to."""
    AUTO = "auto"
    """This rank gathers for its readers. It has others gather for it where the fabric cannot read them by
    itself; where it can, it is faster, but for the shortest of runs."""
    REQUIRE = "require"
    """This rank gathers for its readers, and reads nobody who does not gather for it."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> PackedReads:
        """The setting; raises TransportError if it is none."""
        value = environ.get(SETTING, cls.NEVER.value)
        try:
            return cls(value)
        except ValueError:
            choices = ", ".join(choice.value for choice in cls)
            raise TransportError("bad-setting", f"{SETTING}={value!r}: one of {choices}") from None


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
    ring_bytes: int
    chunk_bytes: int

    @property
    def region(self) -> Region:
        """The ring, to be read."""
        return Region("ring", self.ring_bytes, self.ring_address)

    def to_bytes(self) -> bytes:
        """For a card."""
        return NUMBERS.pack(self.ring_address, self.ring_bytes, self.chunk_bytes) + self.address.encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Staging:
        """From a card; raises TransportError if it makes no sense."""
        if len(data) > NUMBERS.size:
            numbers = NUMBERS.unpack_from(data)
            ring_address, ring_bytes, chunk_bytes = numbers
            if 0 < chunk_bytes <= ring_bytes <= 1 << 40 and ring_address:
                return cls(data[NUMBERS.size :].decode(errors="replace"), *numbers)
        raise TransportError("bad-card", "it does not say where its rank gathers")
