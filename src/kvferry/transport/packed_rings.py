"""The rings of one rank, and who reads through them: all that its transport has for the packed way."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from time import monotonic

from kvferry.core.manifest import Region
from kvferry.errors import TransportError
from kvferry.transport.agent_team import AgentTeam
from kvferry.transport.cards import staging_in, unpack_card
from kvferry.transport.descriptors import RegionTable
from kvferry.transport.expose import SETTING as EXPOSE_SETTING
from kvferry.transport.expose import Expose
from kvferry.transport.gather_line import GatherLine
from kvferry.transport.link import Link
from kvferry.transport.packed import PackedMover
from kvferry.transport.places import Places
from kvferry.transport.staging import SETTING, PackedReads, Staging, digest_of
from kvferry.transport.staging_ring import StagingRing, StagingSize
from kvferry.transport.stream_reader import StreamMover

HAVE_GATHERED = (
    f"this rank has nobody gather for it: set {SETTING}={PackedReads.AUTO.value} here, too (for host memory,"
    " so far)"
)


class PackedRings:
    """A ring that this rank gathers into, and one that it reads into."""

    def __init__(self, size: StagingSize, expose: Expose = Expose.POOL) -> None:
        self._expose = expose
        self.source, self._reader = StagingRing(size), StagingRing(size)
        self.table = RegionTable("rings", [self.source.region, self._reader.region])
        self._reader_table = RegionTable("our ring", [self._reader.region])
        self.staging = b""
        """What readers must know; empty while nobody gathers here."""
        self.mover: PackedMover | None = None
        self.streams: StreamMover | None = None
        self._line: GatherLine | None = None

    def advertise(self, address: str, memory: Places) -> None:
        """This rank is asked there to gather from that memory."""
        size, digest = self.source.size, digest_of(memory.regions)
        ring_address = 0 if self._expose is Expose.NOTHING else self.source.region.address
        told = Staging(address, ring_address, size.num_bytes, size.chunk_bytes, self._expose, digest)
        self.staging = told.to_bytes()

    def open_mover(self, memory: Places, line: GatherLine) -> None:
        """Source ranks are asked by this line from now on."""
        if self.mover:
            raise TransportError("registered", "there is one line to the ranks that gather")
        self._line, nonces = line, count(1)
        self.mover = PackedMover(memory, self._reader, line, nonces)
        self.streams = StreamMover(memory, line, nonces)
        line.listen(_Answers(self.mover, self.streams))

    def _movers_for(
        self, peer: str, card: bytes, regions: Sequence[Region]
    ) -> tuple[PackedMover, StreamMover, Staging]:
        """Who reads a peer, and what it must know; raises TransportError if the peer does not gather."""
        staging = staging_of(card)
        if staging is None:
            detail = f"{peer}: its rank does not gather; set {SETTING} to the same on both sides"
            raise TransportError("not-packed", detail)
        if self.mover is None or self.streams is None:
            raise TransportError("not-packed", f"{peer}: this rank has no line to ask others to gather")
        if staging.regions_digest != digest_of(regions):
            detail = "its regions are not those that this rank was told of"
            raise TransportError("no-connection", f"{peer}: {detail}")
        if staging.chunk_bytes > self._reader.size.chunk_bytes:
            theirs, ours = staging.chunk_bytes, self._reader.size.chunk_bytes
            detail = f"its chunks have {theirs} bytes, ours {ours}: set the same on both sides"
            raise TransportError("bad-ring", f"{peer}: {detail}")
        return self.mover, self.streams, staging

    def link(
        self, peer: str, card: bytes, regions: Sequence[Region], team: AgentTeam | None, deadline: float
    ) -> Link:
        """Have a peer gather, and ``team`` read its ring; or have it sent, where nobody can read that."""
        mover, _, staging = self._movers_for(peer, card, regions)
        if team and staging.expose is not Expose.NOTHING:
            try:
                seconds = max(0.0, deadline - monotonic())
                ring = team.connect_ring(peer, card, staging.region, self._reader_table, seconds)
                return mover.link(peer, staging, Places(peer, regions), ring)
            except TransportError as error:
                if error.code != "not-direct":
                    raise
        return self.open_stream(peer, card, regions, deadline - monotonic())

    def open_stream(self, peer: str, card: bytes, regions: Sequence[Region], timeout_s: float) -> Link:
        """Have a peer send what it gathers; raises TransportError, or TimeoutError if it does not answer."""
        _, streams, staging = self._movers_for(peer, card, regions)
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


def staging_of(card: bytes) -> Staging | None:
    """What a card says of a rank that gathers; None if it does not. Raises TransportError if it is none."""
    unpack_card(card)
    told = staging_in(card)
    return Staging.from_bytes(told) if told else None


def why_hidden(staging: Staging | None, ours: Expose) -> str:
    """Why the fabric cannot bring the pool of a peer into ours; empty if neither is hidden."""
    if staging and staging.hides_pool:
        return f"its pool is not open to the fabric ({EXPOSE_SETTING}={staging.expose.value} there)"
    if ours.hides_pool:
        return f"this rank's pool is not open to the fabric ({EXPOSE_SETTING}={ours.value})"
    return ""


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
