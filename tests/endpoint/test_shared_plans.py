"""One plan for all source engines of equal geometry."""

import gc
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from kvferry.core.sample import sample_request
from kvferry.core.span import Span
from kvferry.endpoint import Destination, SourceEngine, SourceRank
from kvferry.endpoint.meeting import MadeOnce
from kvferry.models import Topology, describe
from kvferry.pattern import check_rank, fill_rank
from kvferry.runtime import FailureCode
from kvferry.testing.small import small
from kvferry.transport.memory import Hub, MemoryTransport, placed
from tests.endpoint.conftest import IDENTITY


class Value:
    """Something that can be kept weakly."""


def test_what_is_made_once_lasts_as_long_as_somebody_has_it():
    made = MadeOnce[Value]()
    first = made.get(b"a", Value)
    assert made.get(b"a", Value) is first
    assert made.get(b"b", Value) is not first
    gc.collect()
    assert len(made) == 1
    del first
    gc.collect()
    assert len(made) == 0


def test_who_asks_for_what_is_being_made_waits_and_others_do_not():
    made, start, go_on = MadeOnce[Value](), threading.Event(), threading.Event()
    values, num_made = [], []

    def make():
        num_made.append(1)
        start.set()
        assert go_on.wait(20)
        return Value()

    threads = [threading.Thread(target=lambda: values.append(made.get(b"a", make))) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert start.wait(20)
    assert made.get(b"b", Value) is not None  # another key waits for nobody
    go_on.set()
    for thread in threads:
        thread.join(20)
    assert (len(num_made), len(values), len(set(map(id, values)))) == (1, 8, 1)


def test_what_cannot_be_made_is_tried_anew_by_the_next():
    made = MadeOnce[Value]()

    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        made.get(b"a", fail)
    assert made.get(b"a", Value) is not None


class Source:
    """An engine of two ranks, filled with a pattern of its own request."""

    def __init__(self, hub, name, topology="tp=2,block=8,blocks=9", model="gqa"):
        self.manifest = replace(describe(small(model), Topology.parse(topology), name), identity=IDENTITY)
        self.engine = SourceEngine(name, len(self.manifest.ranks))
        self.ranks, self.memory = [], []
        for rank in self.manifest.ranks:
            memory = {region.name: np.zeros(region.num_bytes, np.uint8) for region in rank.regions}
            own = replace(rank, regions=placed(rank, memory))
            self.memory.append(memory)
            manifest = replace(self.manifest, ranks=(own,))
            self.ranks.append(SourceRank(self.engine.invitation, manifest, MemoryTransport(hub)))

    def fill(self, request, num_tokens):
        tokens = {group.name: (Span(0, num_tokens),) for group in self.manifest.groups}
        for number, memory in enumerate(self.memory):
            fill_rank(memory, self.manifest, number, request.src, tokens)

    def close(self):
        for rank in self.ranks:
            rank.close()
        self.engine.close()


class Reader:
    """A destination of one rank."""

    def __init__(self, hub, **kwargs):
        described = describe(small("gqa"), Topology(block=12, blocks=9), "decode")
        self.manifest = replace(described, identity=IDENTITY)
        rank = self.manifest.ranks[0]
        self.memory = {region.name: np.zeros(region.num_bytes, np.uint8) for region in rank.regions}
        own = replace(self.manifest, ranks=(replace(rank, regions=placed(rank, self.memory)),))
        self.destination = Destination(own, 0, MemoryTransport(hub), **kwargs)

    def fetch(self, source, until, name="request"):
        """Fetch 20 tokens of a source; how it went."""
        request = sample_request(source.manifest, self.manifest, 20)
        source.fill(request, 20)
        for memory in self.memory.values():
            memory[:] = 0
        self.destination.fetch(source.engine.offer(name, request.src, 20), request.dst, request.need)
        (report,) = until(self.destination.poll)
        if report.failure is None:
            names = {state.name: state.name for state in self.manifest.states}
            found = check_rank(self.memory, self.manifest, 0, request.dst, request.need, names)
            assert found.num_cells > 0
            assert found.num_wrong == 0
        return report


@pytest.fixture
def until():
    """Waits for something to be so."""

    def wait(is_so, seconds=20.0):
        deadline = time.monotonic() + seconds
        while not (so := is_so()):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return so

    return wait


@pytest.fixture
def hub():
    return Hub()


@pytest.fixture
def source_of(hub):
    made = []

    def make(*args, **kwargs):
        made.append(Source(hub, *args, **kwargs))
        return made[-1]

    yield make
    for source in made:
        source.close()


@pytest.fixture
def reader_of(hub):
    made = []

    def make(**kwargs):
        made.append(Reader(hub, **kwargs))
        return made[-1]

    yield make
    for reader in made:
        reader.destination.close()


def test_engines_of_equal_geometry_share_one_plan_and_keep_their_own_memory(source_of, reader_of, until):
    reader = reader_of()
    sources = [source_of(f"prefill-{number}") for number in range(3)]
    for source in sources:
        report = reader.fetch(source, until)
        assert (report.failure, report.record.engine) == (None, source.engine._offers.engine)
    status = reader.destination.status()
    assert (len(status["peers"]), status["plans"]) == (3, 1)
    routes = {id(met.route) for met in reader.destination._met.values()}
    assert len(routes) == 1
    other = source_of("other", "tp=2,block=4,blocks=9")
    assert reader.fetch(other, until).failure is None
    assert reader.destination.status()["plans"] == 2


def test_a_plan_goes_with_the_last_peer_that_needs_it(source_of, reader_of, until, monkeypatch):
    monkeypatch.setattr("kvferry.runtime.reader.Reader.MAX_PEERS", 1)
    reader = reader_of()
    assert reader.fetch(source_of("a"), until).failure is None
    assert reader.fetch(source_of("b", "tp=2,block=4,blocks=9"), until).failure is None

    def plans():
        gc.collect()
        return reader.destination.status()["plans"] == 1

    assert until(plans)


def test_whoever_is_refused_is_told_so_by_its_own_name(source_of, reader_of, until):
    """And people get the whole manifest of each, with the ranks that nothing would be read from."""
    refused = []
    reader = reader_of(on_refusal=lambda source, failure: refused.append((source, failure)))
    for name in ("one", "other"):
        report = reader.fetch(source_of(name, "tp=2,block=8,blocks=9,dtype=fp8_e4m3"), until)
        assert report.failure.code is FailureCode.REFUSED
    until(lambda: len(refused) == 2)
    assert [source.engine for source, _ in refused] == ["one", "other"]
    assert [len(source.ranks) for source, _ in refused] == [2, 2]
    assert all("dtype" in failure.detail for _, failure in refused)
