"""Who copies between a rank's memory and the chunks of a ring: the host's processor, or a device's kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvferry.transport.pack import TermSide, pack, unpack
from kvferry.transport.places import Places


class ChunkCopier(Protocol):
    """For one thread. A copy is over when its call returns, also if it raises."""

    @property
    def memory(self) -> Places:
        """The rank's own."""
        ...

    @property
    def is_on_host(self) -> bool:
        """Whether that is the host's memory, which anybody in the process can touch."""
        ...

    def gather(self, sides: Sequence[TermSide], chunk: int) -> None:
        """Copy what these name to a chunk, an address; raises TransportError if they leave either."""
        ...

    def scatter(self, sides: Sequence[TermSide], chunk: int) -> None:
        """Copy the bytes from a chunk, an address, to where these name."""
        ...

    def close(self) -> None:
        """Give up what it has; nothing may be under way."""
        ...


class HostChunkCopier:
    """By compiled code, or by numpy where there is none."""

    is_on_host = True

    def __init__(self, memory: Places, chunk_bytes: int) -> None:
        self.memory, self._chunk_bytes = memory, chunk_bytes

    def gather(self, sides: Sequence[TermSide], chunk: int) -> None:
        """As ``ChunkCopier`` says."""
        pack(self.memory, sides, chunk, self._chunk_bytes)

    def scatter(self, sides: Sequence[TermSide], chunk: int) -> None:
        """As ``ChunkCopier`` says."""
        unpack(self.memory, sides, chunk)

    def close(self) -> None:
        """It has nothing."""
