"""The process that is read from."""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing
from typing import Any

from kvferry.cli.bench.checks import contents
from kvferry.cli.bench.engine import BENCH_TIMING, GROUP, cache_manifest
from kvferry.cli.bench.grid import TOKENS_PER_BLOCK, BenchCase, CacheShape
from kvferry.cli.bench.memory import BenchMemory, BenchSetup
from kvferry.cli.bench.rivals import Rival, worker_caches
from kvferry.core.request import BlockTable
from kvferry.endpoint import SourceEngine, SourceRank
from kvferry.testing.fleet import until
from kvferry.testing.fleet.measure import RankCard
from kvferry.testing.packed import gather_openly
from kvferry.transport.nixl import NixlTransport
from kvferry.transport.settings import Expose, WayChoice
from kvferry.wire.ticket import Ticket


class BenchSource:
    """Memory with known contents, and whoever hands it out."""

    def __init__(self, setup: BenchSetup) -> None:
        logging.disable(logging.WARNING)  # the report says which way was taken
        self._setup = setup
        self._memory = BenchMemory(setup.device, setup.num_bytes)
        self._memory.write(contents(setup.num_bytes))
        self._transport = NixlTransport()
        self._transport.register([self._memory.region])
        self._gathering = ExitStack()
        self._num_offers = 0
        self._offering: dict[Rival, Any] = {}

    def card(self) -> RankCard:
        """What the reader's transports are told."""
        return RankCard(self._transport.card(), (self._memory.region,))

    def gathering_card(self) -> RankCard:
        """The same memory, by a transport that sends to whoever asks."""
        transport = NixlTransport(way=WayChoice.PACKED, expose=Expose.NOTHING)
        self._gathering.enter_context(closing(transport))
        transport.register([self._memory.region])
        self._gathering.enter_context(closing(gather_openly(transport)))
        return RankCard(transport.card(), (self._memory.region,))

    def lay_out(self, rival: Rival, shape: CacheShape) -> None:
        """Get ready to offer requests of caches of this shape to a rival."""
        if before := self._offering.pop(rival, None):
            before.close()
        make = _OfferingEngine if rival is Rival.FETCH else _OfferingWorker
        self._offering[rival] = make(shape, self._memory, self._setup)

    def offer(self, rival: Rival, case: BenchCase) -> Any:
        """What the reader must be told of one request."""
        self._num_offers += 1
        return self._offering[rival].offer(f"bench-{self._num_offers}", case)

    def close(self) -> None:
        for offering in self._offering.values():
            offering.close()
        self._gathering.close()
        self._transport.close()
        self._memory.close()


class _OfferingEngine:
    """A source engine of kvferry's."""

    def __init__(self, shape: CacheShape, memory: BenchMemory, setup: BenchSetup) -> None:
        manifest = cache_manifest("src", shape, memory.region)
        self._engine = SourceEngine("src", 1, timing=BENCH_TIMING)
        self._rank = SourceRank(self._engine.invitation, manifest, NixlTransport())
        until(lambda: self._rank.is_joined and self._engine.is_whole, "the source rank joins its engine")

    def offer(self, request_id: str, case: BenchCase) -> Ticket:
        self._engine.poll()
        self._rank.poll()
        tables = {GROUP: BlockTable.of(case.block_ids()[0])}
        return self._engine.offer(request_id, tables, case.num_blocks * TOKENS_PER_BLOCK)

    def close(self) -> None:
        self._rank.close()
        self._engine.close()


class _OfferingWorker:
    """The worker and the listener of vLLM's own connector."""

    def __init__(self, shape: CacheShape, memory: BenchMemory, setup: BenchSetup) -> None:
        from kvferry.testing.vllm.nixl_worker import NixlSource

        self._worker = NixlSource(worker_caches(shape, setup.folder), memory.region, memory.host)

    def offer(self, request_id: str, case: BenchCase) -> Any:
        return self._worker.offer(request_id, case.block_ids()[0].tolist())

    def close(self) -> None:
        self._worker.close()
