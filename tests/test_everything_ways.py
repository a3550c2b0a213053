"""The law of the house over each way to move: what a proved plan says is what really arrives.

``test_everything`` shows that the runs of any case are right. Here the same cases travel between two
processes, as products, by every way there is; afterwards every byte of the destination's memory is what the
runs say, and both sides' digests are equal.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvferry import Product, Runs, Term, lower, plan, prove, select
from kvferry.cli.processes import FABRICS
from kvferry.core.choices import Way
from kvferry.core.digest import DigestSide, differences, digest_parts
from kvferry.core.digest_cells import Bytes
from kvferry.core.manifest import Rank
from kvferry.core.runs import REGION_SHIFT
from kvferry.testing.strategies import cases, engines, requests
from kvferry.testing.transport_world import Source, wait
from kvferry.transport import Transport, agent_team
from kvferry.transport.cuda import has_cuda
from kvferry.transport.memory import Hub, MemoryTransport
from kvferry.transport.region_memory import RegionMemory
from kvferry.transport.settings import UcxSettings
from tests.support.sources import serving

NUM_EXAMPLES = int(os.environ.get("KVFERRY_LAW_EXAMPLES", "2000")) // 20
NUM_BYTES = 8 << 20
"""Of the one region on each side, which all regions of a case's rank are put into."""
OFFSET = (1 << REGION_SHIFT) - 1


@dataclass
class Track:
    """Two processes, or what stands for them, and one way between them."""

    reader: Transport
    source: Source
    holder: RegionMemory
    number: int = 0

    def check(self, reads: Product, blank: Product) -> Bytes:
        """Move, clear, and look at every byte; what is there then."""
        expected = self.holder.load()[0]
        for _, src, _, dst, num_bytes in reads.runs:
            expected[dst : dst + num_bytes] = self.source.contents[0][src : src + num_bytes]
        for _, _, _, dst, num_bytes in blank.runs:
            expected[dst : dst + num_bytes] = 0
        self.number += 2
        self.reader.read(self.number, "src", reads)
        self.reader.clear(self.number + 1, blank)
        assert [end.error for end in wait(self.reader, 2)] == ["", ""]
        assert np.array_equal(self.holder.load()[0], expected)
        return expected


def starts(rank: Rank) -> NDArray[np.int64]:
    """Where each region of a rank begins in the one region, aligned as its own memory would be."""
    sizes = [-(-region.num_bytes // 64) * 64 for region in rank.regions]
    assume(sum(sizes) <= NUM_BYTES)
    return np.array([0, *accumulate(sizes)])


def moved(product: Product, src: Rank, dst: Rank) -> Product:
    """The same between the two regions that hold all others."""
    src_starts, dst_starts = starts(src), starts(dst)

    def pattern(runs: Runs) -> Runs:
        return Runs(
            src_starts[runs.src >> REGION_SHIFT] + (runs.src & OFFSET),
            dst_starts[runs.dst >> REGION_SHIFT] + (runs.dst & OFFSET),
            runs.num_bytes,
        )

    return Product(tuple(Term(pattern(term.pattern), term.steps, term.block_bytes) for term in product.terms))


def memory_of(rank: Rank, whole: Bytes) -> dict[str, Bytes]:
    """The regions of a rank, out of the one that holds them all."""
    return {
        region.name: whole[start : start + region.num_bytes]
        for region, start in zip(rank.regions, starts(rank).tolist(), strict=False)
    }


def check_way(track: Track) -> None:
    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        case = data.draw(cases())
        src, dst = engines(case)
        request = data.draw(requests(src, dst, case.num_tokens, case.num_kept))
        planned = plan(src, dst, case.dst_rank)
        route = lower(prove(planned), max_runs_per_block=1 << 20)
        selection, parts = select(route, request, slack=case.slack), digest_parts(planned, request)
        ours = dst.rank(case.dst_rank)
        blank = moved(selection.blank, ours, ours)
        for src_rank, product in selection.products.items():
            theirs = src.rank(src_rank)
            arrived = track.check(moved(product, theirs, ours), blank)
            sides = (
                DigestSide(src, theirs, request.src, memory_of(theirs, track.source.contents[0]), "src"),
                DigestSide(dst, ours, request.dst, memory_of(ours, arrived), "dst"),
            )
            wanted, held = (side.sums(parts[src_rank], seed=case.num_tokens) for side in sides)
            assert list(differences(dst, parts[src_rank], held, wanted)) == [], "a false alarm"

    check()


def between_processes(
    device: str,
    env: dict[str, str],
    way: Way,
    kind: str = "transport.process:ProcessTransport",
    **options: object,
) -> Iterator[Track]:
    pytest.importorskip("nixl", exc_type=ImportError)
    module, name = kind.split(":")
    make = getattr(importlib.import_module(f"kvferry.{module}"), name)
    with serving(1, [NUM_BYTES], device, env) as served, pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        patch.setattr(agent_team, "SHARE_RUNS", 2)
        patch.setattr(agent_team, "SHARE_HOST_BYTES", 4096)
        holder, source = RegionMemory(device), served.sources[0]
        holder.add("all", np.full(NUM_BYTES, 0xEE, np.uint8))
        reader = make(**options)
        reader.register(holder.regions)
        assert reader.connect("src", source.card, source.regions).way is way
        yield Track(reader, source, holder)
        reader.close()
        holder.free()


def within_memory() -> Iterator[Track]:
    hub, holders = Hub(), [RegionMemory("cpu") for _ in range(2)]
    contents = np.random.default_rng(1).integers(1, 255, NUM_BYTES, np.uint8)
    holders[0].add("all", contents)
    holders[1].add("all", np.full(NUM_BYTES, 0xEE, np.uint8))
    source, reader = MemoryTransport(hub), MemoryTransport(hub)
    for transport, holder in zip((source, reader), holders, strict=True):
        transport.register(holder.regions)
    served = Source(source.card(), holders[0].regions, (contents,))
    reader.connect("src", served.card, served.regions)
    yield Track(reader, served, holders[1])


needs_gpu = pytest.mark.skipif(not has_cuda(), reason="no CUDA device: nothing can be mapped")

CMA = FABRICS["cma"]
TEAM = replace(UcxSettings.from_environment(CMA), num_agents=3)
WAYS = {
    "memory": within_memory,
    "direct": partial(between_processes, "cpu", CMA, Way.DIRECT),
    "direct, by a team": partial(between_processes, "cpu", CMA, Way.DIRECT, settings=TEAM),
    "packed": partial(between_processes, "cpu", {}, Way.PACKED, kind="cli.processes:AskingTransport"),
    "mapped": partial(between_processes, "cuda:0", {}, Way.MAPPED),
    "direct, on a device": partial(between_processes, "cuda:0", CMA, Way.DIRECT),
}


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=needs_gpu if "cuda:0" in getattr(make, "args", ()) else ())
        for way, make in WAYS.items()
    ],
)
def test_everything_arrives_by_every_way(way: str) -> None:
    tracks = WAYS[way]()  # type: ignore[operator]
    track = next(tracks)
    try:
        check_way(track)
    finally:
        for _ in tracks:
            pass
