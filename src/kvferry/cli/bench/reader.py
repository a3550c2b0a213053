"""The process that reads: every rival in it, and what each has written is looked at."""

from __future__ import annotations

import logging
from typing import Any

from kvferry.cli.bench.calls import CallTimes, time_calls
from kvferry.cli.bench.checks import Stretch, contents, expected_pages, expected_whole
from kvferry.cli.bench.grid import BenchCase, CacheShape
from kvferry.cli.bench.memory import BenchMemory, BenchSetup
from kvferry.cli.bench.rivals import (
    Contender,
    Fetches,
    OwnWorker,
    PlainCopy,
    RawList,
    RawOneRun,
    Rival,
    TransportReads,
    Turn,
)
from kvferry.testing.fleet.measure import RankCard, RawNixl
from kvferry.testing.packed import AskingTransport
from kvferry.transport.nixl import NixlTransport
from kvferry.transport.settings import Expose, WayChoice

SCRATCH_BYTES = 64


class BenchReader:
    """Memory that all rivals read into, one after the other."""

    def __init__(self, setup: BenchSetup, source: RankCard) -> None:
        logging.disable(logging.WARNING)  # the report says which way was taken
        self._setup, self._source = setup, source
        self._memory = BenchMemory(setup.device, setup.num_bytes)
        self._contents = contents(setup.num_bytes)
        self._raw: RawNixl | None = None
        self._expected: dict[tuple[BenchCase, bool], list[Stretch]] = {}
        """Of the case at hand."""
        self._contenders: dict[Rival, Contender] = {}

    def add(self, rival: Rival, gathering: RankCard | None) -> None:
        """Have a rival take part."""
        self._contenders[rival] = self.make(rival, gathering)

    def make(self, rival: Rival, gathering: RankCard | None) -> Contender:
        """A rival, ready to read but for the shape of the caches."""
        match rival:
            case Rival.DIRECT:
                transport = NixlTransport(way=WayChoice.DIRECT, expose=Expose.FABRIC)
                return TransportReads(self._memory, self._source, transport)
            case Rival.MAPPED:
                transport = NixlTransport(way=WayChoice.MAPPED, expose=Expose.HOST)
                return TransportReads(self._memory, self._source, transport)
            case Rival.PACKED:
                assert gathering is not None
                asking = AskingTransport(way=WayChoice.PACKED, expose=Expose.NOTHING)
                return TransportReads(self._memory, gathering, asking)
            case Rival.FETCH:
                return Fetches(self._memory)
            case Rival.NIXL:
                return RawList(self._opened())
            case Rival.ONE_RUN:
                return RawOneRun(self._opened())
            case Rival.COPY:
                return PlainCopy(self._memory, self._contents)
            case Rival.VLLM:
                return OwnWorker(self._memory, self._setup.folder)

    def _opened(self) -> RawNixl:
        if self._raw is None:
            self._raw = RawNixl([self._memory.region], {"src": self._source}, SCRATCH_BYTES)
        return self._raw

    def lay_out(self, rival: Rival, shape: CacheShape) -> None:
        """Get a rival ready for caches of this shape."""
        self._contenders[rival].lay_out(shape)

    def turn(self, rival: Rival, case: BenchCase, offer: Any) -> Turn:
        """One read into memory that was wiped."""
        contender = self._contenders[rival]
        self._memory.wipe(self._wanted(contender, case))
        seconds = contender.read(case, offer)
        return Turn(seconds, contender.way, contender.num_runs(case))

    def first_wrong(self, rival: Rival, case: BenchCase) -> str:
        """The first cell that a rival's last read left wrong; empty if all are right."""
        return self._memory.first_wrong(self._wanted(self._contenders[rival], case))

    def _wanted(self, contender: Contender, case: BenchCase) -> list[Stretch]:
        key = case, contender.is_whole
        if key not in self._expected:
            self._expected = {known: one for known, one in self._expected.items() if known[0] == case}
            expected = expected_whole if contender.is_whole else expected_pages
            self._expected[key] = expected(case, self._contents)
        return self._expected[key]

    def call_times(self, medium: str, case: BenchCase) -> CallTimes:
        """What calls of a transport cost while reads of a case are under way."""
        return time_calls(medium, self._memory.region, self._source, case)

    def drop(self, rival: Rival) -> None:
        """Do without a rival from now on."""
        if contender := self._contenders.pop(rival, None):
            contender.close()

    def close(self) -> None:
        for contender in self._contenders.values():
            contender.close()
        if self._raw:
            self._raw.close()
        self._memory.close()
