"""The rings of one rank, and who reads through them: all that its transport has for the packed way."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import count
from time import monotonic

from kvferry.core.cost import Traffic
from kvferry.core.link_profile import HOST_CMA, HOST_PACKED
from kvferry.core.manifest import Region
from kvferry.errors import TransportError
from kvferry.log import log_of
from kvferry.transport.agent_team import AgentTeam
from kvferry.transport.cards import staging_in, unpack_card
from kvferry.transport.descriptors import RegionTable
from kvferry.transport.expose import SETTING as EXPOSE_SETTING
from kvferry.transport.expose import Expose
from kvferry.transport.gather_line import GatherLine, GatherMemory
from kvferry.transport.link import Link
from kvferry.transport.packed import PackedMover
from kvferry.transport.places import Places
from kvferry.transport.ring_pair import RingPair
from kvferry.transport.ring_window import RingWindows, SharedRings
from kvferry.transport.staging import SETTING, PackedReads, Staging, digest_of
from kvferry.transport.stream_reader import StreamMover

log = log_of(__name__)

HAVE_GATHERED = f"this rank has nobody gather for it: set {SETTING}={PackedReads.AUTO.value} here, too"
WORTH_IT = 0.8
"""Gathering takes both sides' processors: it has to gain something."""


class PackedRings:
    """A ring that this rank gathers into, one that it reads into, and who asks others to gather."""

    def __init__(
        self, pair: RingPair, expose: Expose = Expose.POOL, shared: SharedRings = SharedRings.ON
    ) -> None:
        self._pair, self._expose, self._windows = pair, expose, RingWindows(shared, pair.open_window)
        self._reader = pair.reader.ring
        self.table = RegionTable("rings", [pair.source.ring.region, self._reader.region])
        self._reader_table = RegionTable("our ring", [self._reader.region])
        self.staging = b""
        """What readers must know; empty while nobody gathers here."""
        self.mover: PackedMover | None = None
        self.streams: StreamMover | None = None
        self._line: GatherLine | None = None

    @property
    def source(self) -> GatherMemory:
        """What this rank gathers into, and by whom."""
        copied = self._pair.source
        return GatherMemory(copied.copier, copied.ring, self._pair.sender)

    def advertise(self, address: str) -> None:
        """This rank is asked there to gather."""
        ring, digest = self.source.ring, digest_of(self.source.copier.memory.regions)
        is_open = self._expose is not Expose.NOTHING
        ring_address, place = (ring.region.address, ring.place) if is_open else (0, "")
        sizes = ring.size.num_bytes, ring.size.chunk_bytes
        is_on_host = ring.region.is_on_host
        told = Staging(address, ring_address, *sizes, self._expose, digest, ring.ring_id, place, is_on_host)
        self.staging = told.to_bytes()

    def open_mover(self, line: GatherLine) -> None:
        """Source ranks are asked by this line from now on."""
        if self.mover:
            raise TransportError("registered", "there is one line to the ranks that gather")
        self._line, nonces, pair = line, count(1), self._pair
        self.mover = PackedMover(pair.reader.copier, self._reader, line, nonces, pair.events)
        self.streams = StreamMover(pair.receiver, line, nonces, pair.events)
        line.listen(_Answers(self.mover, self.streams), self.mover.turn)

    @property
    def movers(self) -> list[PackedMover | StreamMover]:
        """Those that are open."""
        return [mover for mover in (self.mover, self.streams) if mover]

    def _mover_for(self, peer: str, card: bytes, regions: Sequence[Region]) -> tuple[PackedMover, Staging]:
        """Who reads a peer, and what it must know; raises TransportError if the peer does not gather."""
        staging = staging_of(card)
        if staging is None:
            detail = f"{peer}: its rank does not gather; set {SETTING} to the same on both sides"
            raise TransportError("not-packed", detail)
        if self.mover is None:
            raise TransportError("not-packed", f"{peer}: this rank has no line to ask others to gather")
        if staging.regions_digest != digest_of(regions):
            detail = "its regions are not those that this rank was told of"
            raise TransportError("no-connection", f"{peer}: {detail}")
        return self.mover, staging

    def link(
        self, peer: str, card: bytes, regions: Sequence[Region], team: AgentTeam | None, deadline: float
    ) -> Link:
        """Have a peer gather; look at its ring, or have ``team`` read it, or else have it sent."""
        mover, staging = self._mover_for(peer, card, regions)
        if link := self._seen(mover, peer, staging, Places(peer, regions)):
            return link
        is_alike = staging.is_on_host == self._reader.region.is_on_host
        if team and is_alike and staging.expose is not Expose.NOTHING:
            try:
                seconds = max(0.0, deadline - monotonic())
                ring = staging.ring_on(regions[0].device)
                read = team.connect_ring(peer, card, ring, self._reader_table, seconds)
                return mover.link(peer, staging, Places(peer, regions), read, read.forget)
            except TransportError as error:
                if error.code != "not-direct":
                    raise
        return self.open_stream(peer, card, regions, deadline - monotonic())

    def quicker_link(self, peer: str, card: bytes, regions: Sequence[Region], usual: Traffic) -> Link | None:
        """Have a peer of this host gather, if it can, and usual loads are quicker so than by the fabric."""
        packed, direct = (profile.cost.of(usual).seconds for profile in (HOST_PACKED, HOST_CMA))
        if packed > WORTH_IT * direct:
            return None
        try:
            mover, staging = self._mover_for(peer, card, regions)
        except TransportError as error:  # the fabric has its own say
            log.debug("%s is not asked to gather: %s", peer, error)
            return None
        return self._seen(mover, peer, staging, Places(peer, regions))

    def _seen(self, mover: PackedMover, peer: str, staging: Staging, src: Places) -> Link | None:
        """Look at a peer's ring, if it can be seen from here."""
        if window := self._windows.open(peer, staging):
            return mover.link(peer, staging, src, window, partial(self._windows.close_one, window))
        return None

    def open_stream(self, peer: str, card: bytes, regions: Sequence[Region], timeout_s: float) -> Link:
        """Have a peer send what it gathers; raises TransportError, or TimeoutError if it does not answer."""
        _, staging = self._mover_for(peer, card, regions)
        if self.streams is None:
            raise TransportError("not-packed", f"{peer}: this rank has no line to ask others to send")
        stream = self.streams.link(peer, staging, Places(peer, regions))
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
        self._windows.close()
        self._pair.close()


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
        self._movers: list[PackedMover | StreamMover] = [rings, streams]
        self.gathered, self.given_back = rings.gathered, rings.given_back
        self.stream_offered = streams.stream_offered

    def not_gathered(self, sender: str, nonce: int, error: str) -> None:
        for mover in self._movers:
            mover.not_gathered(sender, nonce, error)

    def lost(self, sender: str) -> None:
        for mover in self._movers:
            mover.lost(sender)
