"""The two processes of a benchmark: memory that is read, and whoever reads it into the other process."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from benchmarks.rival_cases import (
    GROUP,
    TOKENS_PER_BLOCK,
    BenchCase,
    CacheShape,
    RankCard,
    Stretch,
    cache_manifest,
    expected_pages,
    expected_whole,
    first_wrong_in,
    wipe,
)
from kvferry.cli.processes import AskingTransport, gather_openly, until
from kvferry.cli.reads import cache_memory, contents, timed_read
from kvferry.core.request import BlockTable
from kvferry.core.span import Span
from kvferry.endpoint import Destination, SourceEngine, SourceRank
from kvferry.errors import TransportError
from kvferry.runtime import Timing
from kvferry.transport.process import ProcessTransport
from kvferry.transport.region_memory import Bytes, RegionMemory
from kvferry.transport.settings import Expose, WayChoice
from kvferry.wire.ticket import Ticket

READ_SECONDS = 120.0
POLL_SECONDS = 10e-6
BENCH_TIMING = Timing(lease=300, meet=60, read=300)
"""A slow fabric may take minutes; nobody is to give up meanwhile."""


class Rival(StrEnum):
    DIRECT = "direct"
    """kvferry's transport over NIXL: list made, posted in slices, ended."""
    MAPPED = "mapped"
    """kvferry's copy kernel over the source's device memory."""
    PACKED = "packed"
    """kvferry's transport: the source gathers and sends, the reader scatters."""
    FETCH = "fetch"
    """kvferry's whole fetch, by the way that it chooses itself; ticket held and peer met."""
    COPY = "copy"
    """As many bytes copied in a row within the reader's process."""


OURS = (Rival.DIRECT, Rival.MAPPED, Rival.PACKED, Rival.FETCH)


@dataclass(frozen=True)
class Turn:
    """One read of one rival."""

    seconds: float
    way: str
    """What moved the bytes."""
    num_runs: int


class BenchSource:
    """Memory with known contents, and whoever hands it out."""

    def __init__(self, device: str, num_bytes: int) -> None:
        logging.disable(logging.WARNING)  # the report says which way was taken
        self._memory = cache_memory(device, contents(num_bytes))
        self._open = ExitStack()
        self._num_offers = 0
        self._offering: dict[str, Any] = {}
        self._card = self._served(ProcessTransport())

    def _served(self, transport: ProcessTransport) -> RankCard:
        self._open.enter_context(closing(transport))
        transport.register(self._memory.regions)
        return RankCard(transport.card(), self._memory.regions)

    def card(self, rival: str) -> RankCard:
        """What a reader is told; for packed reads of a transport that sends to whoever asks."""
        if rival != Rival.PACKED:
            return self._card
        transport = ProcessTransport(way=WayChoice.PACKED, expose=Expose.NOTHING)
        served = self._served(transport)
        self._open.enter_context(closing(gather_openly(transport)))
        return RankCard(transport.card(), served.regions)

    def lay_out(self, rival: str, shape: CacheShape) -> None:
        if before := self._offering.pop(rival, None):
            before.close()
        if offering := self.offering(rival, shape):
            self._offering[rival] = offering

    def offering(self, rival: str, shape: CacheShape) -> Any:
        """What tells a rival of every request; None if nothing does."""
        return _OfferingEngine(shape, self._memory) if rival == Rival.FETCH else None

    def offer(self, rival: str, case: BenchCase) -> Any:
        """What the reader must be told of one request."""
        self._num_offers += 1
        offering = self._offering.get(rival)
        return offering.offer(f"bench-{self._num_offers}", case) if offering else None

    def close(self) -> None:
        for offering in self._offering.values():
            offering.close()
        self._open.close()
        self._memory.free()


class _OfferingEngine:
    """A source engine of kvferry's."""

    def __init__(self, shape: CacheShape, memory: RegionMemory) -> None:
        manifest = cache_manifest("src", shape, memory.regions[0])
        self._engine = SourceEngine("src", 1, timing=BENCH_TIMING)
        self._rank = SourceRank(self._engine.invitation, manifest, ProcessTransport())
        until(lambda: self._rank.is_joined and self._engine.is_whole, "the source rank joins its engine")

    def offer(self, request_id: str, case: BenchCase) -> Ticket:
        self._engine.poll()
        self._rank.poll()
        tables = {GROUP: BlockTable.of(case.block_ids()[0])}
        return self._engine.offer(request_id, tables, case.num_blocks * TOKENS_PER_BLOCK)

    def close(self) -> None:
        self._rank.close()
        self._engine.close()


class Contender:
    """A rival in the reader's process."""

    way = ""
    is_whole = False
    """Whether it moves as many bytes in a row instead of the case's blocks."""

    def lay_out(self, shape: CacheShape) -> None:
        """Get ready for caches of another shape."""

    def read(self, case: BenchCase, offer: Any) -> float:
        """Move a case's bytes; seconds from asking to knowing that all is in."""
        raise NotImplementedError

    def num_runs(self, case: BenchCase) -> int:
        return 1 if self.is_whole else len(case.product().runs)

    def close(self) -> None:
        """Give everything up."""


class TransportReads(Contender):
    """One ``read`` of kvferry's transport."""

    def __init__(self, memory: RegionMemory, source: RankCard, transport: ProcessTransport) -> None:
        self._transport = transport
        self._transport.register(memory.regions)
        self.way = self._transport.connect("src", source.card, source.regions).way.value

    def read(self, case: BenchCase, offer: Any) -> float:
        return timed_read(self._transport, case.product(), READ_SECONDS)

    def close(self) -> None:
        self._transport.close()


class Fetches(Contender):
    _destination: Destination | None = None

    def __init__(self, memory: RegionMemory) -> None:
        self._memory = memory

    def lay_out(self, shape: CacheShape) -> None:
        self.close()
        manifest = cache_manifest("dst", shape, self._memory.regions[0])
        self._destination = Destination(manifest, 0, ProcessTransport(), timing=BENCH_TIMING)

    def read(self, case: BenchCase, offer: Any) -> float:
        assert self._destination is not None
        tables = {GROUP: BlockTable.of(case.block_ids()[1])}
        need = {GROUP: (Span(0, case.num_blocks * TOKENS_PER_BLOCK),)}
        held = self._destination.hold(offer)
        time.sleep(0.005)  # so that the lease is granted: a request waits for its blocks meanwhile
        started = time.perf_counter()
        self._destination.fetch(offer, tables, need, held=held)
        while not (reports := self._destination.poll()):
            time.sleep(POLL_SECONDS)
        seconds = time.perf_counter() - started
        if reports[0].failure is not None:
            raise TransportError("failed", str(reports[0].failure))
        self.way = reports[0].record.way
        return seconds

    def close(self) -> None:
        if self._destination is not None:
            self._destination.close()


class PlainCopy(Contender):
    """What memory allows, within one process."""

    way = "copy"
    is_whole = True

    def __init__(self, memory: RegionMemory, source: Bytes) -> None:
        self._memory = memory
        self._original = cache_memory(memory.device, source)

    def read(self, case: BenchCase, offer: Any) -> float:
        src, dst, num_bytes = self._original, self._memory, case.total_bytes
        started = time.perf_counter()
        if dst.cuda:
            dst.cuda.copy(src.regions[0].address, dst.regions[0].address, num_bytes)
        else:
            np.copyto(dst.read(0, num_bytes), src.read(0, num_bytes))
        return time.perf_counter() - started

    def close(self) -> None:
        self._original.free()


class BenchReader:
    """Memory that all rivals read into, one after the other; what each has written is looked at."""

    def __init__(self, device: str, num_bytes: int) -> None:
        logging.disable(logging.WARNING)  # the report says which way was taken
        self._memory = cache_memory(device, np.zeros(num_bytes, np.uint8))
        self._contents = contents(num_bytes)
        self._expected: dict[tuple[BenchCase, bool], list[Stretch]] = {}
        """Of the case at hand."""
        self._contenders: dict[str, Contender] = {}

    def add(self, rival: str, source: RankCard) -> None:
        self._contenders[rival] = self.make(rival, source)

    def make(self, rival: str, source: RankCard) -> Contender:
        """A rival, ready to read but for the shape of the caches."""
        if rival == Rival.FETCH:
            return Fetches(self._memory)
        if rival == Rival.COPY:
            return PlainCopy(self._memory, self._contents)
        kind, expose = {
            Rival.DIRECT: (ProcessTransport, Expose.FABRIC),
            Rival.MAPPED: (ProcessTransport, Expose.HOST),
            Rival.PACKED: (AskingTransport, Expose.NOTHING),
        }[Rival(rival)]
        return TransportReads(self._memory, source, kind(way=WayChoice(rival), expose=expose))

    def lay_out(self, rival: str, shape: CacheShape) -> None:
        self._contenders[rival].lay_out(shape)

    def turn(self, rival: str, case: BenchCase, offer: Any) -> Turn:
        """One read into memory that was wiped."""
        contender = self._contenders[rival]
        wipe(self._memory, self._wanted(contender, case))
        seconds = contender.read(case, offer)
        return Turn(seconds, contender.way, contender.num_runs(case))

    def first_wrong(self, rival: str, case: BenchCase) -> str:
        """The first cell that a rival's last read left wrong; empty if all are right."""
        return first_wrong_in(self._memory, self._wanted(self._contenders[rival], case))

    def _wanted(self, contender: Contender, case: BenchCase) -> list[Stretch]:
        key = case, contender.is_whole
        if key not in self._expected:
            self._expected = {known: one for known, one in self._expected.items() if known[0] == case}
            expected = expected_whole if contender.is_whole else expected_pages
            self._expected[key] = expected(case, self._contents)
        return self._expected[key]

    def drop(self, rival: str) -> None:
        if contender := self._contenders.pop(rival, None):
            contender.close()

    def close(self) -> None:
        for contender in self._contenders.values():
            contender.close()
        self._memory.free()
