"""Who copies between a rank's memory and chunks: the host's processor, or a device's kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.transport.memory_views import MemoryViews, are_long
from kvferry.transport.pack import TermSide, pack, unpacker
from kvferry.transport.places import Places

HostBytes = NDArray[np.uint8]


class ChunkCopier(Protocol):
    """For one thread. A copy is over when its call returns, also if it raises."""

    @property
    def memory(self) -> Places:
        """The rank's own."""
        ...

    @property
    def chunk_bytes(self) -> int:
        """The most that it copies at once."""
        ...

    def gather(self, sides: Sequence[TermSide], chunk: int) -> None:
        """Copy what these name to a chunk, an address; raises TransportError if they leave either."""
        ...

    def scatterer(self, sides: Sequence[TermSide]) -> Callable[[int], None]:
        """Who copies the bytes from a chunk, its address, to where these name; raises TransportError.

        It can be made while the chunk is waited for.
        """
        ...

    def views(self, sides: Sequence[TermSide]) -> list[memoryview]:
        """What these name, where it lies, if the host had better touch it there; all of it was checked."""
        ...

    def new_chunk(self) -> HostBytes:
        """A chunk in host memory, to be gathered into and scattered from."""
        ...

    def free_chunk(self, chunk: HostBytes) -> None:
        """Give such memory back; nothing may be under way."""
        ...

    def close(self) -> None:
        """Give up what it has; nothing may be under way."""
        ...


class HostChunkCopier:
    """By numpy; in any thread."""

    def __init__(self, memory: Places, chunk_bytes: int) -> None:
        self.memory, self.chunk_bytes = memory, chunk_bytes
        self._views = MemoryViews(memory)

    def gather(self, sides: Sequence[TermSide], chunk: int) -> None:
        """As ``ChunkCopier`` says."""
        pack(self.memory, sides, chunk, self.chunk_bytes)

    def scatterer(self, sides: Sequence[TermSide]) -> Callable[[int], None]:
        """As ``ChunkCopier`` says."""
        return unpacker(self.memory, sides)

    def views(self, sides: Sequence[TermSide]) -> list[memoryview]:
        """Long runs need no chunk."""
        return self._views.of(sides) if are_long(sides) else []

    def new_chunk(self) -> HostBytes:
        """Any memory will do."""
        return np.empty(self.chunk_bytes, np.uint8)

    def free_chunk(self, chunk: HostBytes) -> None:
        """Python does."""

    def close(self) -> None:
        """It has nothing."""
