"""R002-15 without a GPU: DeepSeek-V4-like caches under load, between two engines that prefill and decode.

Blocks of 256 tokens, a cell for every 4 or 128 tokens, fp8 rows with scales, an indexer of its own size (fp8
or fp4), windows and compressor states in blocks of theirs; prompts shorter than a block among longer ones.
"""

import random
import time
from collections import Counter
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from kvferry import BlockTable, Manifest, Span, compare
from kvferry.core.request import need_of
from kvferry.endpoint import Destination, SourceEngine, SourceRank
from kvferry.layout.pages import values_then_scales
from kvferry.models import Model, Topology, describe
from kvferry.runtime import Timing
from kvferry.testing.fleet.pool import BlockPool
from kvferry.testing.pattern import check_rank, fill_rank
from kvferry.testing.small import small
from kvferry.transport.memory import placed
from kvferry.transport.nixl import NixlTransport
from kvferry.wire.ticket import Ticket

pytest.importorskip("nixl", exc_type=ImportError)

BLOCK = 256
SIZES = (1, 5, 100, 255, 256, 300, 700)
"""Tokens of a prompt."""
NUM_IN_FLIGHT = 12
TIMING = Timing(lease=20, meet=60, read=60, retry=0.2)


def fp4_indexer(model: Model) -> Model:
    """Two numbers in a byte: rows of another size than with fp8, and of another encoding."""

    def packed(cache):
        if cache.name != "indexer":
            return cache
        rows = values_then_scales(1, 1, "fp4 rows, ue8m0 scales")
        return replace(cache, page=replace(rows, tokens_per_cell=cache.page.tokens_per_cell))

    layers = (replace(layer, caches=tuple(map(packed, layer.caches))) for layer in model.layers)
    return replace(model, layers=tuple(layers))


MODELS = {"fp8 indexer": small("compressed"), "fp4 indexer": fp4_indexer(small("compressed"))}


@dataclass
class Loading:
    """A request on its way in."""

    tables: dict[str, BlockTable]
    num_tokens: int
    waiting: set[int]
    codes: list[str] = field(default_factory=list)


class Engine:
    """Both roles over one memory and one pool of blocks, as vLLM's ``kv_both`` has them."""

    def __init__(self, manifest: Manifest, stack: ExitStack) -> None:
        self.memory = {
            rank.rank: {region.name: np.full(region.num_bytes, 0xA5, np.uint8) for region in rank.regions}
            for rank in manifest.ranks
        }
        ranks = (replace(rank, regions=placed(rank, self.memory[rank.rank])) for rank in manifest.ranks)
        self.manifest = replace(manifest, ranks=tuple(ranks))
        self.pool = BlockPool(manifest, seed=1)
        self.outcomes: Counter[str] = Counter()
        self.num_wrong = self.num_checked = 0
        num_ranks = len(manifest.ranks)
        self.source = stack.enter_context(closing(SourceEngine(manifest.engine, num_ranks, timing=TIMING)))
        self.destinations = {}
        for rank in self.manifest.ranks:
            own = replace(self.manifest, ranks=(rank,))
            stack.enter_context(closing(SourceRank(self.source.invitation, own, NixlTransport())))
            destination = Destination(
                self.manifest,
                rank.rank,
                NixlTransport(),
                reader=f"{manifest.engine}#1",
                num_ranks=num_ranks,
                timing=TIMING,
            )
            self.destinations[rank.rank] = stack.enter_context(closing(destination))
        self._offered: dict[str, dict[str, BlockTable]] = {}
        self._loading: dict[str, Loading] = {}

    def prefill(self, request_id: str, num_tokens: int) -> Ticket | None:
        """Compute a prompt, and offer it; None while there is no room."""
        tables = self.pool.take(num_tokens)
        if tables is None:
            return None
        tokens = {group.name: (Span(0, num_tokens),) for group in self.manifest.groups}
        for rank, memory in self.memory.items():
            fill_rank(memory, self.manifest, rank, tables, tokens, salt=request_id)
        self._offered[request_id] = tables
        return self.source.offer(request_id, tables, num_tokens)

    def decode(self, ticket: Ticket) -> bool:
        """Start to load a prompt; false while there is no room."""
        tables = self.pool.take(ticket.num_tokens)
        if tables is None:
            return False
        self._loading[ticket.request_id] = Loading(tables, ticket.num_tokens, set(self.destinations))
        for destination in self.destinations.values():
            destination.fetch(ticket, tables, self._need(ticket.num_tokens))
        return True

    def _need(self, num_tokens: int):
        return {group.name: need_of(group, num_tokens) for group in self.manifest.groups}

    def poll(self) -> None:
        """Take in what ended on either side."""
        for released in self.source.poll():
            self.outcomes[f"source: {released.reason}"] += 1
            self.pool.give_back(self._offered.pop(released.request_id))
        for rank, destination in self.destinations.items():
            for report in destination.poll():
                load = self._loading[report.record.request_id]
                load.waiting.remove(rank)
                load.codes.append(str(report.failure or "read"))
                if not load.waiting:
                    self._check(report.record.request_id, self._loading.pop(report.record.request_id))

    def _check(self, request_id: str, load: Loading) -> None:
        self.outcomes.update(load.codes)
        names = {state.name: state.name for state in self.manifest.states}
        for rank, memory in self.memory.items():
            need = self._need(load.num_tokens)
            seen = check_rank(memory, self.manifest, rank, load.tables, need, names, salt=request_id)
            self.num_wrong += seen.num_wrong
            self.num_checked += seen.num_cells
        self.pool.give_back(load.tables)

    @property
    def num_open(self) -> int:
        return len(self._loading) + len(self._offered)


def drive(engines: tuple[Engine, Engine], num_requests: int) -> None:
    """Prompts go both ways at once, some of each engine's in flight all the time."""
    chance = random.Random(3)
    waiting: list[tuple[Engine, Ticket]] = []
    num_started = 0
    deadline = time.monotonic() + 60 + num_requests / 4
    while num_started < num_requests or waiting or any(engine.num_open for engine in engines):
        assert time.monotonic() < deadline, [(engine.num_open, engine.outcomes) for engine in engines]
        here, there = engines if num_started % 2 else engines[::-1]
        if num_started < num_requests and here.num_open < NUM_IN_FLIGHT:
            ticket = here.prefill(f"req-{num_started}", chance.choice(SIZES))
            if ticket is not None:
                num_started += 1
                waiting.append((there, ticket))
        waiting = [(engine, ticket) for engine, ticket in waiting if not engine.decode(ticket)]
        for engine in engines:
            engine.poll()
        time.sleep(0.001)


@pytest.mark.parametrize("num_requests", [40, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
def test_compressed_caches_both_ways(name, num_requests):
    """R002-15, RA-6: every load ends well, every cell is the right one, every block comes back, both ways."""
    with ExitStack() as stack:
        one, other = (
            Engine(describe(MODELS[name], Topology.parse(f"block={BLOCK},blocks=600,{cut}"), cut), stack)
            for cut in ("tp=2,dtype=fp8", "tp=1,dtype=fp8")
        )
        drive((one, other), num_requests)
        for engine, num_ranks in ((one, 2), (other, 1)):
            assert engine.outcomes == {
                "read": num_requests // 2 * num_ranks,
                "source: read": num_requests // 2,
            }
            assert engine.num_wrong == 0
            assert engine.num_checked > num_requests
            assert engine.pool.num_missing == 0


def test_the_two_indexers_do_not_understand_each_other():
    """R002-15: fp8 and fp4 are named as what differs."""
    src, dst = (describe(model, Topology.parse("block=256,blocks=8"), name) for name, model in MODELS.items())
    assert {finding.field for finding in compare(src, dst)} >= {"encoding", "item_bytes"}
    assert {finding.state.rpartition("/")[0] for finding in compare(src, dst)} == {"layers.1.indexer"}
