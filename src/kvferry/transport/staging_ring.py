"""Rings: memory of our own, cut into chunks, that gathered bytes pass through.

Each role has a ring of its own: what a rank reads into is never what others wait for it to gather into.
"""

from __future__ import annotations

import ctypes
import mmap
import secrets
from dataclasses import dataclass

from kvferry.core.manifest import Region
from kvferry.errors import TransportError
from kvferry.host.shared_memory import SharedMemory

MAX_RING_BYTES, MIN_CHUNK_BYTES = 64 << 20, 64
RING_ID_BYTES = 16


def new_ring_id() -> bytes:
    """A name for a ring."""
    return secrets.token_bytes(RING_ID_BYTES)


@dataclass(frozen=True, slots=True)
class StagingSize:
    """How long a ring is."""

    num_chunks: int = 8
    chunk_bytes: int = 4 << 20

    def __post_init__(self) -> None:
        if (
            self.num_chunks < 1
            or not MIN_CHUNK_BYTES <= self.chunk_bytes <= MAX_RING_BYTES // self.num_chunks
        ):
            sizes = f"chunks of {MIN_CHUNK_BYTES} bytes or more, at most {MAX_RING_BYTES} bytes in all"
            raise TransportError("bad-ring", f"a ring has {sizes}, got {self}")

    @property
    def num_bytes(self) -> int:
        return self.num_chunks * self.chunk_bytes


class StagingRing:
    """The memory of a ring. Pages that nobody uses cost nothing."""

    place = ""
    """Where other processes of this host can look at it; empty if they cannot."""
    ring_id: bytes
    """Its name, at random: no other ring ever has it."""

    def __init__(self, size: StagingSize, shared: SharedMemory | None = None) -> None:
        """``shared``: the memory to use, if others of this host are to look at it."""
        self.size, self._shared, self.ring_id = size, shared, new_ring_id()
        self._memory = shared.memory if shared else mmap.mmap(-1, size.num_bytes)
        self.place = shared.place if shared else ""
        self._held = ctypes.c_char.from_buffer(self._memory)
        self.region = Region("ring", size.num_bytes, ctypes.addressof(self._held))

    def address(self, chunk: int) -> int:
        """Where a chunk begins."""
        return self.region.address + chunk * self.size.chunk_bytes

    def close(self) -> None:
        """Give the memory back; nothing may be under way."""
        if hasattr(self, "_held"):
            del self._held
            (self._shared or self._memory).close()


@dataclass(frozen=True, slots=True)
class _Lent:
    owner: object
    borrower: object
    generation: int
    since: float


class LentChunks:
    """The chunks of a source's ring, and who was told to read which. For one thread; time is an argument.

    A chunk is lent until its borrower gives it back, nobody else, or its owner loses the right to it. Nobody
    has to wait for a reader that does neither: a chunk that was lent for as long as our patience lasts may be
    taken from it. The reader learns that if it asks when it gives the chunk back: what it has read does not
    count then.

    >>> chunks = LentChunks(num_chunks=1, patience_s=1.0)
    >>> chunk, generation = chunks.take("ticket A", "reader A", now=0.0)
    >>> chunks.give_back(chunk, generation, "reader B")
    False
    >>> chunks.take("ticket B", "reader B", now=0.5), chunks.next_deadline()
    (None, 1.0)
    >>> chunks.take("ticket B", "reader B", now=1.0), chunks.give_back(chunk, generation, "reader A")
    ((0, 2), False)
    >>> chunks.give_back(0, 2, "reader B")
    True
    """

    def __init__(self, num_chunks: int, patience_s: float) -> None:
        self._free = [*range(num_chunks)]
        self._generations = [0] * num_chunks
        self._lent: dict[int, _Lent] = {}
        """The one that was lent first comes first."""
        self.patience_s = patience_s
        self.num_taken_away = 0

    @property
    def num_lent(self) -> int:
        return len(self._lent)

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    def take(self, owner: object, borrower: object, now: float) -> tuple[int, int] | None:
        """A chunk and its generation, lent from now on; None if there is none yet.

        ``owner``: in whose right; ``borrower``: who asked, and gives it back.
        """
        if not self._free and self.next_deadline() <= now:
            del self._lent[chunk := next(iter(self._lent))]
            self._free.append(chunk)
            self.num_taken_away += 1
        if not self._free:
            return None
        chunk = self._free.pop()
        self._generations[chunk] += 1
        self._lent[chunk] = _Lent(owner, borrower, self._generations[chunk], now)
        return chunk, self._generations[chunk]

    def give_back(self, chunk: int, generation: int, borrower: object) -> bool:
        """Whether it was lent to this borrower, under this generation, until now; it is free from now on."""
        lent = self._lent.get(chunk)
        if lent is None or (lent.generation, lent.borrower) != (generation, borrower):
            return False
        del self._lent[chunk]
        self._free.append(chunk)
        return True

    def take_all_from(self, owner: object) -> None:
        """An owner has lost its right to them."""
        for chunk in [chunk for chunk, lent in self._lent.items() if lent.owner == owner]:
            del self._lent[chunk]
            self._free.append(chunk)

    def next_deadline(self) -> float:
        """When one can be taken away from who has it, if none is given back before."""
        return next((lent.since + self.patience_s for lent in self._lent.values()), float("inf"))
