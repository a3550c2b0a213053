"""Engines of many ranks, and many engines, over the real control channel."""

import logging
import time
from dataclasses import replace

import pytest

from kvferry.endpoint import Destination, SourceEngine
from kvferry.endpoint import meeting as shared_plans
from kvferry.models import Topology, describe, model_named
from kvferry.transport.memory import Hub, MemoryTransport
from kvferry.wire.outline import join_of
from tests.endpoint.conftest import IDENTITY


def placed(manifest, first=1 << 32):
    """Regions at addresses of their own, which nobody reads."""
    ranks = []
    for rank in manifest.ranks:
        regions = []
        for region in rank.regions:
            regions.append(replace(region, address=first))
            first += region.num_bytes
        ranks.append(replace(rank, regions=tuple(regions)))
    return replace(manifest, ranks=tuple(ranks), identity=IDENTITY)


def until(is_so, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not (so := is_so()):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return so


@pytest.fixture
def hub():
    return Hub()


@pytest.fixture
def engine_of(hub):
    made = []

    def make(manifest):
        engine = SourceEngine(manifest.engine, len(manifest.ranks))
        made.append(engine)
        for rank in manifest.ranks:
            transport = MemoryTransport(hub)
            transport.register(rank.regions)
            engine.admit(join_of(replace(manifest, ranks=(rank,)), transport.kind, transport.card()))
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def destination_of(hub):
    made = []

    def make(manifest):
        made.append(Destination(manifest, 0, MemoryTransport(hub), reader="decode"))
        return made[-1]

    yield make
    for destination in made:
        destination.close()


@pytest.mark.timed
def test_an_engine_of_1024_ranks_is_met_within_two_seconds(engine_of, destination_of, caplog):
    """Once its manifest had 10 MB, more than a message may have. Of the two seconds those count in which this
    process computes, both sides of it: other tests may share the machine."""
    caplog.set_level(logging.INFO, "kvferry")
    model = model_named("deepseek-v3")
    engine = engine_of(placed(describe(model, Topology(tp=1024, blocks=64), "prefill")))
    destination = destination_of(placed(describe(model, Topology(blocks=64), "decode"), 1 << 46))
    started = time.process_time()
    destination.hold(engine.offer("request", {}, 16))
    until(lambda: any(record.getMessage().startswith("kvferry: met ") for record in caplog.records))
    took = time.process_time() - started
    print(f"1,024 ranks met in {1e3 * took:.0f} ms of computing")
    assert took < 2.0
    assert len(destination.status()["ways"]) == 61, "one rank for each layer, so that they share the work"


def test_engines_of_equal_geometry_that_are_met_at_once_make_one_plan(engine_of, destination_of, monkeypatch):
    made = []

    def counted(function):
        def call(*args, **kwargs):
            made.append(function.__name__)
            return function(*args, **kwargs)

        return call

    for name in ("plan", "prove", "lower"):
        monkeypatch.setattr(shared_plans, name, counted(getattr(shared_plans, name)))
    model = model_named("llama-3.1-8b")
    manifests = (describe(model, Topology(tp=2, blocks=64), f"prefill-{i}") for i in range(16))
    engines = [engine_of(placed(manifest)) for manifest in manifests]
    destination = destination_of(placed(describe(model, Topology(tp=4, blocks=64), "decode"), 1 << 46))
    for engine in engines:
        destination.hold(engine.offer("request", {}, 16))
    until(lambda: len(destination.status()["peers"]) == 16)
    assert (made, destination.status()["plans"]) == (["plan", "prove", "lower"], 1)
