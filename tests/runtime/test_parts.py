"""The parts of a fetch and its rest write what the whole would: each cell once, and none is left stale."""

from functools import lru_cache

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.core.lower import lower
from kvferry.core.plan import plan
from kvferry.core.product import listed
from kvferry.core.prove import prove
from kvferry.core.select import select
from kvferry.core.span import Span
from kvferry.runtime import fetch_job
from kvferry.runtime.fetch_job import FetchJob
from kvferry.runtime.values import Fetch, Peer
from kvferry.wire.ticket import Ticket
from tests.support.simulation.cells import (
    DST_STALE,
    SRC_STALE,
    Content,
    FreeBlocks,
    NamedMemory,
    described,
    held_tokens,
    keeps_all,
    wanted_tokens,
)

MAX_TOKENS = 24
TOPOLOGIES = ("tp=1,block=4,blocks=24", "tp=1,block=6,blocks=16,layout=NHD", "tp=1,block=8,blocks=12")
tokens = st.integers(0, MAX_TOKENS)


@pytest.fixture(autouse=True)
def short_parts(monkeypatch):
    monkeypatch.setattr(fetch_job, "PART_TOKENS", 4)


@lru_cache
def route(shape, src, dst):
    return lower(prove(plan(described(shape, src), described(shape, dst), 0)))


def taken(manifest, num_tokens):
    return FreeBlocks(manifest).take(num_tokens)


class Load:
    """One load of a prompt that is being computed, into real memory."""

    def __init__(self, shape, src, dst, num_tokens, num_kept, num_wanted):
        self.route = route(shape, src, dst)
        self.src, self.dst = described(shape, src), described(shape, dst)
        self.content, self.kept = Content(7, num_tokens), Content(-7, num_tokens)
        num_here = max(num_kept + 1, num_wanted) if shape == "one group" else num_tokens
        self.src_placed, self.dst_placed = taken(self.src, num_tokens), taken(self.dst, num_here)
        self.src_memory = NamedMemory(shape, src, 0, SRC_STALE, engine="src")
        self.memory = NamedMemory(shape, dst, 0, DST_STALE, engine="dst")
        need, kept = wanted_tokens(self.dst, num_here, num_kept)
        self.memory.own(self.dst_placed, 1)
        self.memory.write(self.dst_placed, self.kept, kept)
        early = frozenset(group.name for group in self.dst.groups if keeps_all(group))
        ticket = Ticket("prefill", 7, 1, "r", "src", num_tokens, {}, 30_000, complete=0)
        fetch = Fetch(ticket, self.dst_placed.tables, need, kept, early=early)
        self.need, self.kept_tokens, self.early = need, kept, early
        self.job = FetchJob(1, ticket, None, Peer("prefill", 7, "src"), 1, b"", b"", 0, 0, 0, 0)
        self.job.supply(fetch)
        self.written = []

    def write(self, spans):
        self.src_memory.write(self.src_placed, self.content, spans)

    def grow(self, num_complete):
        """The source has written more; what can be read of it is read."""
        self.write({group.name: (Span(0, num_complete),) for group in self.src.groups if keeps_all(group)})
        self.job.ticket = Ticket("prefill", 7, 1, "r", "src", 1 << 62, {}, 30_000, complete=num_complete)
        self.read(stage={group.name for group in self.src.groups if keeps_all(group)})

    def close(self):
        self.write(held_tokens(self.src, self.content.num_tokens))
        self.job.ticket = Ticket("prefill", 7, 1, "r", "src", self.content.num_tokens, {}, 30_000)
        self.read(stage={group.name for group in self.src.groups})
        assert not self.job.todo

    def read(self, stage):
        part = self.job.next_part()
        if part is None:
            return
        self.job.take_in()
        request = part.request()
        tables = {name: self.src_placed.tables[name] for name in stage}
        request = type(request)(tables, request.dst, request.need, request.kept)
        selection = select(self.route, request)
        blank = listed(selection.blank)
        zeroed = self.memory.indices(blank.dst, blank.num_bytes)
        self.memory.words[zeroed] = 0
        self.written.append(zeroed)
        for product in selection.products.values():
            runs = listed(product)
            to = self.memory.indices(runs.dst, runs.num_bytes)
            self.memory.words[to] = self.src_memory.words[self.src_memory.indices(runs.src, runs.num_bytes)]
            self.written.append(to)


@example("one group", TOPOLOGIES[1], TOPOLOGIES[1], 24, 0, 8, [8, 12])  # it ends with a part, inside a block
@example("one group", TOPOLOGIES[1], TOPOLOGIES[2], 24, 5, 24, [3, 8, 9, 23])
@given(
    st.sampled_from(["one group", "window", "state"]),
    st.sampled_from(TOPOLOGIES),
    st.sampled_from(TOPOLOGIES),
    st.integers(2, MAX_TOKENS),
    tokens,
    tokens,
    st.lists(tokens, max_size=5),
)
def test_parts_and_the_rest_are_the_whole(shape, src, dst, num_tokens, num_kept, num_wanted, watermarks):
    load = Load(shape, src, dst, num_tokens, min(num_kept, num_tokens - 1), min(num_wanted, num_tokens))
    for num_complete in sorted(watermarks):
        if num_complete < num_tokens:
            load.grow(num_complete)
    load.close()
    written = np.concatenate(load.written)
    assert len(np.unique(written)) == len(written), "written twice"
    assert load.memory.num_wrong(load.dst_placed, load.content, load.need) == 0
    assert load.memory.num_wrong(load.dst_placed, load.kept, load.kept_tokens) == 0
    assert load.memory.num_stale(load.dst_placed) == 0


def test_slack_behind_the_last_token_is_cleared_whatever_is_read_last():
    """A need that ended with a part left the slack of its last block as it was: the rest was empty."""
    load = Load("one group", TOPOLOGIES[1], TOPOLOGIES[1], 24, 0, 8)
    load.grow(8)
    load.grow(12)
    load.close()
    assert load.memory.num_stale(load.dst_placed) == 0


def test_a_state_that_is_not_named_is_no_part():
    """A slot is needed unless it is said otherwise; a part of the tokens has none yet."""
    load = Load("state", TOPOLOGIES[0], TOPOLOGIES[0], 24, 0, 24)
    (slot,) = (group.name for group in load.dst.groups if not keeps_all(group))
    need = {name: spans for name, spans in load.need.items() if name != slot}
    load.job.supply(Fetch(load.job.ticket, load.dst_placed.tables, need, early=load.early))
    load.grow(8)
    load.close()
    assert load.memory.num_wrong(load.dst_placed, load.content, load.need) == 0


@pytest.mark.parametrize("complete", [-1, -(1 << 60), (1 << 63) - 1])
def test_a_senseless_watermark_does_no_harm(complete):
    load = Load("one group", TOPOLOGIES[0], TOPOLOGIES[0], 24, 0, 24)
    load.job.ticket = Ticket("prefill", 7, 1, "r", "src", 1 << 62, {}, 30_000, complete=complete)
    part = load.job.next_part()
    assert part is None or part.need == {"full": (Span(0, 20),)}
