"""How a reader asks source ranks to gather, as far as a transport knows: an endpoint brings the channel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from kvferry.core.manifest import Region
from kvferry.core.product import Term
from kvferry.transport.chunk_copier import ChunkCopier
from kvferry.transport.staging_ring import StagingRing
from kvferry.transport.stream_frames import StreamOffer

Turn = Callable[[], float]


class GatherLine(Protocol):
    """How source ranks are asked to gather. Every call may come from any thread, and none blocks."""

    def listen(self, answers: GatherAnswers, turn: Turn = ...) -> None:
        """Begin: answers go there, in the line's thread.

        ``turn`` is called there after that, and when it is woken; it says for how many seconds it may be left
        alone. What is asked for in a turn goes out without a hand-over.
        """
        ...

    def wake(self) -> None:
        """Have a turn taken soon."""
        ...

    def ask(self, to: str, nonce: int, permit: bytes, terms: Sequence[Term], into: bytes) -> None:
        """Ask the rank at an address for the source side of these terms: into a ring, or over a stream."""
        ...

    def open_stream(self, to: str, nonce: int, regions: Sequence[Region]) -> None:
        """Ask the rank at an address for a stream; these are its regions, as far as we know."""
        ...

    def give_back(self, to: str, nonce: int, chunk: int, generation: int, *, is_asking: bool) -> None:
        """Nothing of a chunk is read any more; ``is_asking``: was it untouched until now?"""
        ...

    def hang_up(self, address: str) -> None:
        """Keep no connection to an address."""
        ...

    def close(self) -> None:
        """Send what was said, and stop."""
        ...


class GatheredChunk(NamedTuple):
    """Where a rank has put what it was asked for."""

    address: int
    chunk: int
    generation: int
    lent_s: float = 0.0
    """For how long after the ask nobody takes it away, while the lease stands."""


class GatherMemory(NamedTuple):
    """What a rank gathers with; each copier is for one thread."""

    copier: ChunkCopier
    ring: StagingRing
    sender: ChunkCopier
    """For what is sent over streams."""


@runtime_checkable
class GatheringTransport(Protocol):
    """What an endpoint asks of a transport that has the packed way, beside all else."""

    @property
    def is_gathering(self) -> bool:
        """Whether the packed way is open, as the setting says; known once memory is registered."""
        ...

    def gather_memory(self) -> GatherMemory:
        """For whoever gathers for this rank's readers: who copies, and what into."""
        ...

    def gather_at(self, address: str) -> None:
        """From now on readers are told where this rank is asked to gather."""
        ...

    def ask_by(self, line: GatherLine) -> None:
        """How other ranks are asked to gather."""
        ...


class GatherAnswers(Protocol):
    """Who wants to hear what source ranks answer."""

    def gathered(self, sender: str, nonce: int, told: GatheredChunk) -> None:
        """The bytes are in a chunk."""
        ...

    def not_gathered(self, sender: str, nonce: int, error: str) -> None:
        """The rank refused."""
        ...

    def given_back(self, sender: str, nonce: int, *, is_valid: bool) -> None:
        """Whether the chunk was untouched until it was given back."""
        ...

    def stream_offered(self, sender: str, nonce: int, offer: StreamOffer) -> None:
        """The rank can be called there."""
        ...

    def lost(self, sender: str) -> None:
        """The connection to a rank broke."""
        ...
