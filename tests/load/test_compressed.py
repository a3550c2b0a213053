"""R002-15 without a GPU: every kind of cache under load, by each way that a host has, digests compared.

DeepSeek-V4-like caches among them: blocks of 256 tokens, a cell for every 4 or 128 tokens, fp8 rows with
scales, an indexer of its own size (fp8 or fp4), windows and compressor states in blocks of theirs; prompts
shorter than a block among longer ones.
"""

import gc
import os
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace

import pytest

from kvferry import compare
from kvferry.cli.processes import FABRICS
from kvferry.layout.pages import values_then_scales
from kvferry.models import Model, Topology, describe
from kvferry.testing.small import small
from kvferry.transport.memory import Hub, MemoryTransport
from kvferry.transport.process import ProcessTransport
from kvferry.transport.settings import Expose, UcxSettings, WayChoice
from tests.load.both_roles import Engine, drive

pytest.importorskip("nixl", exc_type=ImportError)


def fp4_indexer(model: Model) -> Model:
    """Two numbers in a byte: rows of another size than with fp8, and of another encoding."""

    def packed(cache):
        if cache.name != "indexer":
            return cache
        rows = values_then_scales(1, 1, "fp4 rows, ue8m0 scales")
        return replace(cache, page=replace(rows, tokens_per_cell=cache.page.tokens_per_cell))

    layers = (replace(layer, caches=tuple(map(packed, layer.caches))) for layer in model.layers)
    return replace(model, layers=tuple(layers))


@dataclass(frozen=True)
class Caches:
    """A model, and how two engines that serve it are set up."""

    model: Model
    topologies: tuple[str, str]
    sizes: tuple[int, ...] = (1, 7, 29, 64, 150)
    """Tokens of a prompt."""


SMALL_BLOCKS = ("tp=2,block=8,blocks=2500", "tp=1,block=12,blocks=1700,layout=NHD")
BIG_BLOCKS = ("tp=2,dtype=fp8,block=256,blocks=4000", "tp=1,dtype=fp8,block=256,blocks=4000")
"""Room for 64 prompts on offer and 64 that are loaded, on each side: whoever has too little waits for ever,
for blocks that prompts hold which wait for blocks."""
SHORT_AND_LONG = (1, 5, 100, 255, 256, 300, 700)
CACHES = {
    "gqa": Caches(small("gqa"), SMALL_BLOCKS),
    "window": Caches(small("window"), SMALL_BLOCKS),
    "state": Caches(small("mamba2-gqa"), SMALL_BLOCKS),
    "fp8 indexer": Caches(small("compressed"), BIG_BLOCKS, SHORT_AND_LONG),
    "fp4 indexer": Caches(fp4_indexer(small("compressed")), BIG_BLOCKS, SHORT_AND_LONG),
}
CHUNK_BYTES = 1 << 18


def transports(way):
    """Makes the transports of one world."""
    if way == "memory":
        hub = Hub()
        return lambda: MemoryTransport(hub)
    if way == "packed":
        return lambda: ProcessTransport(way=WayChoice.PACKED, chunk_bytes=CHUNK_BYTES)
    return lambda: ProcessTransport(
        way=WayChoice.DIRECT,
        expose=Expose.FABRIC,
        settings=UcxSettings.from_environment(FABRICS["cma"]),
    )


def loaded(caches, way, num_requests, num_in_flight):
    """Two engines of both roles serve so many requests; everything about them is right in the end."""
    with ExitStack() as stack:
        make = transports(way)
        one, other = (
            Engine(describe(caches.model, Topology.parse(text), f"engine-{i}"), stack, make)
            for i, text in enumerate(caches.topologies)
        )
        most = drive((one, other), num_requests, num_in_flight, caches.sizes)
        for engine, num_ranks in ((one, 2), (other, 1)):
            num_loads = num_requests // 2 * num_ranks
            assert engine.outcomes == {"read": num_loads, "source: read": num_requests // 2}
            assert engine.digests == {"equal": num_loads}
            assert engine.ways == {way}
            assert engine.num_wrong == 0
            assert engine.num_checked > num_requests
    assert most >= min(num_in_flight, num_requests)


def left_behind():
    """What a process keeps: threads, and open files."""
    gc.collect()
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("num_requests", "num_in_flight"),
    [(16, 8), pytest.param(2000, 64, marks=pytest.mark.slow)],
    ids=["short", "long"],
)
@pytest.mark.parametrize("way", ["direct", "packed", "memory"])
@pytest.mark.parametrize("name", CACHES)
def test_caches_both_ways(name, way, num_requests, num_in_flight):
    """R002-15, RA-6: every load ends well, both sides have the same digest, every cell is the right one.

    Every lease, chunk and block comes back. Closed, two engines leave no thread and no file.
    """
    loaded(CACHES[name], way, 4, 4)  # what a process makes once is there then
    before = left_behind()
    started = time.monotonic()
    loaded(CACHES[name], way, num_requests, num_in_flight)
    print(f"{name}, {way}: {num_requests} requests in {time.monotonic() - started:.1f} s")
    after = left_behind()
    assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)


def test_the_two_indexers_do_not_understand_each_other():
    """R002-15: fp8 and fp4 are named as what differs."""
    src, dst = (
        describe(CACHES[name].model, Topology.parse("block=256,blocks=8"), name)
        for name in ("fp8 indexer", "fp4 indexer")
    )
    assert {finding.field for finding in compare(src, dst)} >= {"encoding", "item_bytes"}
    assert {finding.state.rpartition("/")[0] for finding in compare(src, dst)} == {"layers.1.indexer"}
