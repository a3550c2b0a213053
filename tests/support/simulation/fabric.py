"""The fabric of the simulated world: reads that take their time, come in parts, fail, hang, or arrive late.

A read copies words from the source's memory as it is at that moment, whoever owns it by then: a block that
was given away too early shows at the other end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from random import Random
from typing import Protocol

import numpy as np

from kvferry.core.choices import Way
from kvferry.core.manifest import Region
from kvferry.core.product import Product, listed
from kvferry.core.runs import Runs
from kvferry.errors import TransportError
from kvferry.transport.base import CANCELLED, Connected, DeviceEvent, ReadEnd
from kvferry.transport.places import Places, checked
from tests.support.simulation.cells import Indices, NamedMemory
from tests.support.simulation.process import SimulatedProcess
from tests.support.simulation.timeline import Timeline

OUT_OF_ORDER = ("is not connected", "is connected already")
"""What the transport says to whom it is called by in the wrong order."""
CARD = b"kvferry/simulated/"


@dataclass(frozen=True, slots=True)
class ReadQuality:
    """What becomes of reads; shares are of 1. Between two healthy hosts none of it happens."""

    errors: float = 0.0
    hangs: float = 0.0
    slow: float = 0.0
    """How many take seconds."""
    wrong: float = 0.0
    """How many end well with a bit of one word changed."""
    hangs_from_the_dead: float = 0.3
    """How many of those whose source has died are never heard of, instead of failing."""


class FabricWatcher(Protocol):
    """Whoever sees what the fabric does."""

    def submitted(self, read: SimulatedRead) -> None:
        """A rank hands a read to the fabric."""
        ...

    def writes(self, read: SimulatedRead, dst_words: Indices) -> None:
        """Words of a read are about to arrive."""
        ...


class SimulatedFabric:
    """Moves the bytes of all transports, and knows who is there."""

    def __init__(
        self,
        timeline: Timeline,
        chance: Random,
        watcher: FabricWatcher,
        quality: ReadQuality,
        way: Way = Way.MEMORY,
    ) -> None:
        """``way``: how its reads are called."""
        self.timeline, self.chance, self.watcher, self.quality = timeline, chance, watcher, quality
        self.way = way
        self._transports: dict[bytes, SimulatedTransport] = {}
        self._numbers = count(1)
        self.hung: list[SimulatedRead] = []
        """Reads that neither end nor fail."""

    def enter(self, transport: SimulatedTransport) -> bytes:
        """The card of a transport that is there now."""
        card = CARD + str(next(self._numbers)).encode()
        self._transports[card] = transport
        return card

    def find(self, card: bytes) -> SimulatedTransport | None:
        """Whose card this is."""
        return self._transports.get(card)

    def let_hung_reads_end(self) -> None:
        """What hung arrives after all, late."""
        hung, self.hung = self.hung, []
        for read in hung:
            self.timeline.after(self.chance.uniform(0.0, 1.0), partial(read.move, len(read.dst_words)))


@dataclass(slots=True, eq=False)
class SimulatedRead:
    """One read, from the hand-over to its end; a clearing is one without a source."""

    transfer: int
    reader: SimulatedTransport
    source: SimulatedTransport | None
    src_words: Indices
    dst_words: Indices
    load: int
    """Whose blocks it writes to, by their owner at the hand-over."""
    num_moved: int = 0
    is_posted: bool = False
    is_cancelled: bool = False
    has_hung: bool = False
    is_wrong: bool = False
    """Whether a bit of it changes on its way."""
    has_ended: bool = False
    ended_at: float = float("inf")

    @property
    def is_healthy(self) -> bool:
        """Whether nothing may go wrong with it."""
        source = self.source or self.reader
        return self.reader.process.host.is_healthy and source.process.host.is_healthy

    def post(self) -> None:
        """The fabric begins; what is cancelled by now moves nothing."""
        if self.has_ended:
            return
        if self.is_cancelled:
            self.end(CANCELLED)
            return
        self.is_posted = True
        fabric, chance = self.reader.fabric, self.reader.fabric.chance
        quality = ReadQuality() if self.is_healthy else fabric.quality
        seconds = chance.uniform(0.5, 15.0) if chance.random() < quality.slow else chance.uniform(0.0, 0.2)
        num_words, fate = len(self.dst_words), chance.random()
        if quality.wrong and self.source is not None:
            self.is_wrong = chance.random() < quality.wrong
        part = chance.randint(0, num_words) if chance.random() < 0.3 else num_words
        if part < num_words or fate < quality.errors + quality.hangs:
            fabric.timeline.after(seconds / 2, partial(self.move_part, part))
        if fate < quality.errors:
            fabric.timeline.after(seconds, partial(self.end, "the fabric reports an error"))
        elif fate < quality.errors + quality.hangs:
            self.hang()
        else:
            fabric.timeline.after(seconds, partial(self.move, num_words))

    def hang(self) -> None:
        """Neither end nor fail, until the world has come to rest."""
        self.has_hung = True
        self.reader.fabric.hung.append(self)

    def move_part(self, stop: int) -> None:
        """Words up to ``stop`` arrive, unless the source is gone."""
        source = self.source
        if self.has_ended or not self.reader.process.is_alive or stop <= self.num_moved:
            return
        dst = self.dst_words[self.num_moved : stop]
        self.reader.fabric.watcher.writes(self, dst)
        if source is None:
            self.reader.memory.words[dst] = 0
        elif source.process.is_alive:
            self.reader.memory.words[dst] = source.memory.words[self.src_words[self.num_moved : stop]]
        else:
            return
        self.num_moved = stop

    def move(self, stop: int) -> None:
        """The rest arrives, and the read ends; from a source that is gone it ends in an error, or hangs."""
        if self.has_ended:
            return
        source = self.source
        if source is not None and not source.process.is_alive:
            fabric = self.reader.fabric
            if not self.has_hung and fabric.chance.random() < fabric.quality.hangs_from_the_dead:
                self.hang()
            else:
                self.end("the peer is gone")
            return
        self.move_part(stop)
        if self.is_wrong and self.reader.process.is_alive and len(self.dst_words):
            self.reader.memory.words[self.reader.fabric.chance.choice(self.dst_words)] ^= np.uint32(1 << 20)
        self.end(CANCELLED if self.is_cancelled else "")

    def end(self, error: str = "") -> None:
        """From now on nothing of it arrives."""
        if not self.has_ended:
            self.has_ended, self.ended_at = True, self.reader.fabric.timeline.now
            self.reader.ended(self, error)


class SimulatedTransport:
    """The transport of one rank: hands reads to the fabric, and collects their ends."""

    kind = "simulated"

    def __init__(self, fabric: SimulatedFabric, process: SimulatedProcess, memory: NamedMemory) -> None:
        self.fabric, self.process, self.memory = fabric, process, memory
        self._ours: Places | None = None
        self._card = b""
        self._peers: dict[str, tuple[SimulatedTransport, Places]] = {}
        self.under_way: dict[int, SimulatedRead] = {}
        self._ends: list[ReadEnd] = []
        self._wake: Callable[[], None] = lambda: None

    @property
    def connected(self) -> tuple[str, ...]:
        """The remote ranks that can be read from."""
        return tuple(self._peers)

    def register(self, regions: Sequence[Region]) -> None:
        """Make this rank's memory known."""
        self._ours = Places("ours", regions)
        self._card = self.fabric.enter(self)

    def card(self) -> bytes:
        """What a peer needs to read from here."""
        return self._card

    def connect(self, peer: str, card: bytes, regions: Sequence[Region]) -> Connected:
        """Get ready to read from another rank."""
        source = self.fabric.find(card)
        if source is None or not source.process.is_alive:
            raise TransportError("bad-card", f"{peer}: nobody has this card")
        if peer in self._peers:
            raise TransportError("known-peer", f"{peer!r} {OUT_OF_ORDER[1]}")
        theirs = source.memory.manifest.ranks[0].regions
        if [(r.address, r.num_bytes) for r in regions] != [(r.address, r.num_bytes) for r in theirs]:
            raise TransportError("no-connection", f"{peer}: it did not register these regions")
        self._peers[peer] = (source, Places(peer, regions))
        return Connected(self.fabric.way)

    def read(
        self,
        transfer: int,
        peer: str,
        runs: Runs | Product,
        *,
        after: DeviceEvent | None = None,
        permit: bytes = b"",
    ) -> None:
        """Hand a read to the fabric."""
        if peer not in self._peers:
            raise TransportError("unknown-peer", f"{peer!r} {OUT_OF_ORDER[0]}")
        source, places = self._peers[peer]
        moved = checked(listed(runs), places, self._own_places())
        src_words = source.memory.indices(moved.src, moved.num_bytes)
        self._begin(transfer, source, src_words, self.memory.indices(moved.dst, moved.num_bytes))

    def clear(self, transfer: int, runs: Runs | Product, *, after: DeviceEvent | None = None) -> None:
        """Hand the zeroing of some words to the fabric."""
        blank = listed(runs)
        self._own_places().check(blank.dst, blank.num_bytes)
        words = self.memory.indices(blank.dst, blank.num_bytes)
        self._begin(transfer, None, words, words)

    def _begin(
        self, transfer: int, source: SimulatedTransport | None, src_words: Indices, dst_words: Indices
    ) -> None:
        if transfer in self.under_way:
            raise TransportError("under-way", f"transfer {transfer} is in use: poll its result first")
        load = int(self.memory.owners[dst_words[0]]) if len(dst_words) else 0
        read = SimulatedRead(transfer, self, source, src_words, dst_words, load)
        self.under_way[transfer] = read
        self.fabric.watcher.submitted(read)
        self.fabric.timeline.after(self.fabric.chance.uniform(0.0, 0.02), read.post)

    def cancel(self, transfer: int) -> None:
        """Post nothing more of a read."""
        if read := self.under_way.get(transfer):
            read.is_cancelled = True

    def ended(self, read: SimulatedRead, error: str) -> None:
        """The fabric reports an end."""
        del self.under_way[read.transfer]
        self._ends.append(ReadEnd(read.transfer, error))
        self.process.do(self._wake)

    def poll(self) -> list[ReadEnd]:
        """The ends since the last call."""
        ends, self._ends = self._ends, []
        return ends

    def on_end(self, wake: Callable[[], None]) -> None:
        """Whom to call when there is an end to collect; once at once, so that nobody polls for ends."""
        self._wake = wake
        wake()

    def forget(self, peer: str) -> None:
        """Drop a peer. Its reads go on."""
        self._peers.pop(peer, None)

    def close(self) -> None:
        """Give up the peers."""
        self._peers.clear()

    def _own_places(self) -> Places:
        if self._ours is None:
            raise TransportError("not-registered", "register this rank's memory first")
        return self._ours
