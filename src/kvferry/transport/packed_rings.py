"""The rings of one rank, and who reads through them: all that its transport has for the packed way."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from kvferry.core.manifest import Region
from kvferry.errors import TransportError
from kvferry.transport.agent_team import AgentTeam
from kvferry.transport.cards import staging_in, unpack_card
from kvferry.transport.descriptors import RegionTable
from kvferry.transport.gather_line import GatherLine
from kvferry.transport.link import Link
from kvferry.transport.packed import PackedMover
from kvferry.transport.places import Places
from kvferry.transport.staging import SETTING, Staging
from kvferry.transport.staging_ring import StagingRing, StagingSize
from kvferry.transport.stream_reader import StreamMover


class PackedRings:
    """A ring that this rank gathers into, and one that it reads into."""

    def __init__(self, size: StagingSize) -> None:
        self.source, self._reader = StagingRing(size), StagingRing(size)
        self.table = RegionTable("rings", [self.source.region, self._reader.region])
        self._reader_table = RegionTable("our ring", [self._reader.region])
        self.staging = b""
        """What readers must know; empty while nobody gathers here."""
        self.mover: PackedMover | None = None
        self.streams: StreamMover | None = None
        self._line: GatherLine | None = None

    def advertise(self, address: str) -> None:
        """This rank is asked to gather there."""
        ring = self.source
        told = Staging(address, ring.region.address, ring.size.num_bytes, ring.size.chunk_bytes)
        self.staging = told.to_bytes()

    def open_mover(self, memory: Places, line: GatherLine) -> None:
        """Source ranks are asked by this line from now on."""
        if self.mover:
            raise TransportError("registered", "there is one line to the ranks that gather")
        self._line, nonces = line, count(1)
        self.mover = PackedMover(memory, self._reader, line, nonces)
        self.streams = StreamMover(memory, line, nonces)
        line.listen(_Answers(self.mover, self.streams))

    def movers_for(self, peer: str, card: bytes) -> tuple[PackedMover, StreamMover, Staging]:
        """Who reads a peer, and what it must know; raises TransportError if the peer does not gather."""
        unpack_card(card)
        told = staging_in(card)
        if not told:
            detail = f"{peer}: its rank does not gather; set {SETTING} to the same on both sides"
            raise TransportError("not-packed", detail)
        if self.mover is None or self.streams is None:
            raise TransportError("not-packed", f"{peer}: this rank has no line to ask others to gather")
        staging = Staging.from_bytes(told)
        if staging.chunk_bytes > self._reader.size.chunk_bytes:
            theirs, ours = staging.chunk_bytes, self._reader.size.chunk_bytes
            detail = f"its chunks have {theirs} bytes, ours {ours}: set the same on both sides"
            raise TransportError("bad-ring", f"{peer}: {detail}")
        return self.mover, self.streams, staging

    def connect(
        self,
        peer: str,
        card: bytes,
        regions: Sequence[Region],
        staging: Staging,
        team: AgentTeam,
        timeout_s: float,
    ) -> Link:
        """Connect a peer's ring, to be read into ours."""
        return team.connect_ring(peer, card, regions, staging.region, self._reader_table, timeout_s)

    def open_stream(self, peer: str, card: bytes, regions: Sequence[Region], timeout_s: float) -> Link:
        """Have a peer send what it gathers; raises TransportError, or TimeoutError if it does not answer."""
        _, streams, staging = self.movers_for(peer, card)
        stream = streams.link(peer, staging, Places(peer, regions))
        try:
            stream.open(max(0.0, timeout_s))
        except BaseException:
            stream.forget()
            raise
        return stream

    def close(self) -> None:
        """Give the memory back; nothing may be under way."""
        if self._line:
            self._line.close()
            self._line = None
        self.source.close()
        self._reader.close()


class _Answers:
    """What ranks answer goes to who asked: numbers of asks are never the same."""

    def __init__(self, rings: PackedMover, streams: StreamMover) -> None:
        self._rings, self._streams = rings, streams
        self.gathered, self.given_back = rings.gathered, rings.given_back
        self.stream_offered = streams.stream_offered

    def not_gathered(self, sender: str, nonce: int, error: str) -> None:
        self._rings.not_gathered(sender, nonce, error)
        self._streams.not_gathered(sender, nonce, error)

    def lost(self, sender: str) -> None:
        self._rings.lost(sender)
        self._streams.lost(sender)
