"""How a reader asks source ranks for bytes, as far as a transport knows: an endpoint brings the channel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from kvferry.core.manifest import Region
from kvferry.core.product import Term
from kvferry.transport.chunk_copier import ChunkCopier
from kvferry.transport.stream_frames import StreamOffer


class GatherLine(Protocol):
    """How source ranks are asked for bytes. Every call may come from any thread, and none blocks."""

    def listen(self, answers: GatherAnswers) -> None:
        """Begin: answers go there, in the line's thread."""
        ...

    def ask(self, to: str, nonce: int, permit: bytes, terms: Sequence[Term], stream_id: bytes) -> None:
        """Ask the rank at an address to send the source side of these terms over a stream."""
        ...

    def open_stream(self, to: str, nonce: int, permit: bytes, regions: Sequence[Region]) -> None:
        """Ask the rank at an address for a stream; these are its regions, as far as we know."""
        ...

    def hang_up(self, address: str) -> None:
        """Keep no connection to an address."""
        ...

    def close(self) -> None:
        """Send what was said, and stop."""
        ...


class GatherAnswers(Protocol):
    """Who wants to hear what source ranks answer."""

    def not_gathered(self, sender: str, nonce: int, error: str) -> None:
        """The rank refused."""
        ...

    def stream_offered(self, sender: str, nonce: int, offer: StreamOffer) -> None:
        """The rank can be called there."""
        ...

    def lost(self, sender: str) -> None:
        """The connection to a rank broke."""
        ...


@runtime_checkable
class GatheringTransport(Protocol):
    """What an endpoint asks of a transport that has the packed way, beside all else."""

    @property
    def is_gathering(self) -> bool:
        """Whether the packed way is open; known once memory is registered."""
        ...

    def sender(self) -> ChunkCopier:
        """For whoever sends this rank's bytes to its readers."""
        ...

    def gather_at(self, address: str) -> None:
        """From now on readers are told where this rank is asked for bytes."""
        ...

    def ask_by(self, line: GatherLine) -> None:
        """How other ranks are asked for bytes."""
        ...
