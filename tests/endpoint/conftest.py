"""Two engines of one rank each, in this process, over the memory transport."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from kvferry.core.identity import Identity
from kvferry.core.sample import sample_request
from kvferry.core.span import Span
from kvferry.endpoint import Destination, SourceEngine, SourceRank
from kvferry.models import Topology, describe
from kvferry.pattern import check_rank, fill_rank
from kvferry.runtime import Report
from kvferry.testing.small import small
from kvferry.transport.memory import Hub, MemoryTransport, placed
from kvferry.wire.secret import Trust

IDENTITY = Identity.of({"weights": "cells numbered by these tests"})


def with_memory(manifest):
    memory = {r.name: np.zeros(r.num_bytes, np.uint8) for r in manifest.ranks[0].regions}
    regions = placed(manifest.ranks[0], memory)
    rank = replace(manifest.ranks[0], regions=regions)
    return replace(manifest, ranks=(rank,), identity=IDENTITY), memory


class Engines:
    """The memory of a source engine, filled, and of a destination, empty; and a request of 20 tokens."""

    def __init__(self):
        src = describe(small("gqa"), Topology(block=8, blocks=9), "prefill")
        dst = describe(small("gqa"), Topology(block=12, blocks=9), "decode")
        self.src, self.src_memory = with_memory(src)
        self.dst, self.dst_memory = with_memory(dst)
        self.request = sample_request(src, dst, 20)
        tokens = {group.name: (Span(0, 20),) for group in src.groups}
        fill_rank(self.src_memory, self.src, 0, self.request.src, tokens)

    def check(self):
        """How many cells of the destination were looked at, and how many are wrong."""
        names = {state.name: state.name for state in self.dst.states}
        request = self.request
        found = check_rank(self.dst_memory, self.dst, 0, request.dst, request.need, names)
        return found.num_cells, found.num_wrong


class Pair(Engines):
    """A source engine, and a destination that fetches from it."""

    def __init__(
        self,
        *,
        transport=MemoryTransport,
        hub=None,
        rank_timing=None,
        source_timing=None,
        source_metrics=None,
        source_edges=None,
        engine_trust=None,
        **kwargs,
    ):
        super().__init__()
        self.hub = hub or Hub()
        trust = engine_trust or Trust()
        self.engine = SourceEngine(
            "prefill", 1, trust=trust, timing=source_timing, metrics=source_metrics, edges=source_edges
        )
        self.rank = SourceRank(
            self.engine.invitation, self.src, MemoryTransport(self.hub), timing=rank_timing, trust=trust
        )
        self.destination = Destination(self.dst, 0, transport(self.hub), **kwargs)
        self._names = count(1)

    def offer(self):
        return self.engine.offer(f"request-{next(self._names)}", self.request.src, 20)

    def fetch(self, ticket=None, **kwargs):
        return self.destination.fetch(ticket or self.offer(), self.request.dst, self.request.need, **kwargs)

    def reports(self, num=1, seconds=20.0):
        """The reports of so many fetches, by handle."""
        reports: dict[int, Report] = {}
        deadline = time.monotonic() + seconds
        while len(reports) < num:
            assert time.monotonic() < deadline, reports
            reports |= {report.handle: report for report in self.destination.poll()}
            time.sleep(0.002)
        return reports

    def close(self):
        self.destination.close()
        self.rank.close()
        self.engine.close()


@pytest.fixture
def engines():
    return Engines()


@pytest.fixture
def pair_of():
    """Makes pairs, and closes them in the end."""
    pairs = []

    def make(**kwargs):
        pairs.append(Pair(**kwargs))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()
