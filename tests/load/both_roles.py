"""Two engines in this process that prefill and decode for each other, all the time, and check each cell."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace

import numpy as np

from kvferry import BlockTable, Identity, Manifest, Span
from kvferry.cli.demo.engines import BlockPool
from kvferry.core.request import need_of
from kvferry.core.span import Spans
from kvferry.endpoint import Destination, SourceEngine, SourceRank
from kvferry.pattern import check_rank, fill_rank
from kvferry.runtime import Timing
from kvferry.transport import Transport
from kvferry.transport.memory import placed
from kvferry.wire.ticket import Ticket

TIMING = Timing(lease=90, meet=90, read=180, retry=0.2)
"""Longer than any pause of the machine."""
HANG_SECONDS = 600.0


@dataclass
class Loading:
    """A request on its way in."""

    tables: dict[str, BlockTable]
    num_tokens: int
    waiting: set[int]
    codes: list[str] = field(default_factory=list)


class Engine:
    """Both roles over one memory and one pool of blocks, as vLLM's ``kv_both`` has them."""

    def __init__(self, manifest: Manifest, stack: ExitStack, make_transport: Callable[[], Transport]) -> None:
        self.memory = {
            rank.rank: {region.name: np.full(region.num_bytes, 0xA5, np.uint8) for region in rank.regions}
            for rank in manifest.ranks
        }
        ranks = (replace(rank, regions=placed(rank, self.memory[rank.rank])) for rank in manifest.ranks)
        identity = Identity.of({"weights": "cells numbered by kvferry.testing"})
        self.manifest = replace(manifest, ranks=tuple(ranks), identity=identity)
        self.pool = BlockPool(manifest, seed=1)
        self.outcomes: Counter[str] = Counter()
        self.digests: Counter[str] = Counter()
        self.ways: set[str] = set()
        self.num_wrong = self.num_checked = 0
        num_ranks = len(manifest.ranks)
        self.source = stack.enter_context(closing(SourceEngine(manifest.engine, num_ranks, timing=TIMING)))
        self.destinations: dict[int, Destination] = {}
        self.ranks: list[SourceRank] = []
        for rank in self.manifest.ranks:
            own = replace(self.manifest, ranks=(rank,))
            source_rank = SourceRank(self.source.invitation, own, make_transport(), timing=TIMING)
            self.ranks.append(stack.enter_context(closing(source_rank)))
            destination = Destination(
                self.manifest,
                rank.rank,
                make_transport(),
                reader=f"{manifest.engine}#1",
                num_ranks=num_ranks,
                timing=TIMING,
                digest_every=1,
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

    def _need(self, num_tokens: int) -> dict[str, Spans]:
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
                self.digests[report.record.digest] += 1
                self.ways.add(report.record.way)
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
        """Requests that are offered from here, or loaded to here."""
        return len(self._loading) + len(self._offered)

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is left of what has ended: no lease, no load, no block."""
        loads = [destination.status() for destination in self.destinations.values()]
        return (
            not self.source.num_leases
            and not self.source.status()["unheard"]
            and not any(status["settling"] or status["quarantined"] for status in loads)
            and self.pool.num_missing == 0
        )


def drive(
    engines: tuple[Engine, Engine], num_requests: int, num_in_flight: int, sizes: tuple[int, ...]
) -> int:
    """Prompts go both ways at once, so many in flight; the most that were. All is over in the end."""
    chance = random.Random(3)
    waiting: list[tuple[Engine, Ticket]] = []
    num_started = most = 0
    deadline = time.monotonic() + HANG_SECONDS + num_requests
    while num_started < num_requests or waiting or any(engine.num_open for engine in engines):
        assert time.monotonic() < deadline, [(engine.num_open, engine.outcomes) for engine in engines]
        num_open = sum(len(engine._offered) for engine in engines)
        most = max(most, num_open)
        here, there = engines if num_started % 2 else engines[::-1]
        if num_started < num_requests and num_open < num_in_flight:
            ticket = here.prefill(f"req-{num_started}", chance.choice(sizes))
            if ticket is not None:
                num_started += 1
                waiting.append((there, ticket))
                if num_open + 1 < num_in_flight and num_started < num_requests:
                    continue  # fill up first, so that they really are in flight at once
        waiting = [(engine, ticket) for engine, ticket in waiting if not engine.decode(ticket)]
        for engine in engines:
            engine.poll()
        time.sleep(0.001)
    while not all(engine.is_at_rest for engine in engines):
        assert time.monotonic() < deadline, [engine.source.status() for engine in engines]
        for engine in engines:
            engine.poll()
        time.sleep(0.01)
    return most
