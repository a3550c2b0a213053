"""One trip of the demonstration: plan, move and verify a few requests between two engines in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

import kvferry
from kvferry.core.manifest import Manifest
from kvferry.core.request import Request
from kvferry.core.sample import Placement, sample_request
from kvferry.core.span import Span
from kvferry.models import Model
from kvferry.testing.pattern import check_rank, fill_rank
from kvferry.transport.memory import Hub, MemoryTransport, placed

STALE = 0xA5
"""What all memory holds before a request."""
KEPT = "kept"
"""Salt of the pattern that stands for tokens which the destination has already."""

Memories = Mapping[int, dict[str, NDArray[np.uint8]]]


@dataclass
class Trip:
    """The account of all requests that were moved between two engines."""

    model: str
    src: str
    dst: str
    num_requests: int = 0
    num_runs: int = 0
    total_bytes: int = 0
    plan_ms: float = 0.0
    select_ms: float = 0.0
    copy_ms: float = 0.0
    num_cells: int = 0
    """Cells looked at in the destination, by name."""
    num_wrong: int = 0
    first_wrong: str = ""

    @property
    def gigabytes_per_second(self) -> float:
        return self.total_bytes / self.copy_ms / 1e6 if self.copy_ms else 0.0


def shortened(model: Model, num_layers: int) -> Model:
    """The model with about so many layers: the first ones of each kind, in their order.

    >>> from kvferry.models import model_named
    >>> [layer.name for layer in shortened(model_named("kimi-linear-48b"), 4).layers]
    ['layers.0', 'layers.1', 'layers.3', 'layers.7']
    """
    kinds = {layer.caches for layer in model.layers if layer.caches}
    each = -(-num_layers // max(1, len(kinds)))
    seen: Counter[object] = Counter()
    kept = []
    for layer in model.layers:
        seen[layer.caches] += 1
        if layer.caches and seen[layer.caches] <= each:
            kept.append(layer)
    return replace(model, layers=tuple(kept))


def travel(
    trip: Trip, src: Manifest, dst: Manifest, requests: list[Request], step: Callable[[str], None]
) -> None:
    """Plan every destination rank once, then move and verify each request; ``step`` is told after each."""
    src_memory, dst_memory = _memories(src), _memories(dst)
    transports = _transports(src, src_memory, dst, dst_memory)
    routes = [_route(trip, src, dst, rank.rank) for rank in dst.ranks]
    for request in requests:
        _lay_out(src, dst, src_memory, dst_memory, request)
        for route in routes:
            _move(trip, transports[route.plan.dst_rank], route, request)
            _verify(trip, route.plan, dst_memory, request)
        trip.num_requests += 1
        step("")


def some_requests(src: Manifest, dst: Manifest, num_requests: int, num_tokens: int) -> Iterator[Request]:
    """Requests of many lengths, scattered and in a row, every third with a prefix that is there already."""
    whole_blocks = max(group.tokens_per_block for group in dst.groups)
    for i in range(num_requests):
        tokens = max(1, num_tokens - 37 * i * num_tokens // (37 * num_requests + 1))
        kept = tokens // 2 // whole_blocks * whole_blocks if i % 3 == 1 else 0
        placement = Placement.CONSECUTIVE if i % 2 else Placement.SCATTERED
        yield sample_request(src, dst, tokens, num_kept=kept, placement=placement)


def _memories(manifest: Manifest) -> Memories:
    """Memory for every rank."""
    return {
        rank.rank: {region.name: np.empty(region.num_bytes, np.uint8) for region in rank.regions}
        for rank in manifest.ranks
    }


def _transports(
    src: Manifest, src_memory: Memories, dst: Manifest, dst_memory: Memories
) -> dict[int, MemoryTransport]:
    """A transport for every destination rank, connected to every source rank (a peer is its rank)."""
    hub = Hub()
    sources = []
    for rank in src.ranks:
        regions = placed(rank, src_memory[rank.rank])
        source = MemoryTransport(hub)
        source.register(regions)
        sources.append((str(rank.rank), source.card(), regions))
    transports = {}
    for rank in dst.ranks:
        transports[rank.rank] = MemoryTransport(hub)
        transports[rank.rank].register(placed(rank, dst_memory[rank.rank]))
        for peer, card, regions in sources:
            transports[rank.rank].connect(peer, card, regions)
    return transports


def _route(trip: Trip, src: Manifest, dst: Manifest, dst_rank: int) -> kvferry.Route:
    started = perf_counter()
    route = kvferry.lower(kvferry.prove(kvferry.plan(src, dst, dst_rank)))
    trip.plan_ms += 1e3 * (perf_counter() - started)
    return route


def _lay_out(
    src: Manifest, dst: Manifest, src_memory: Memories, dst_memory: Memories, request: Request
) -> None:
    """Stale bytes everywhere; then the request at the source, and at the destination what it kept."""
    for memory in (*src_memory.values(), *dst_memory.values()):
        for region in memory.values():
            region.fill(STALE)
    last = max((span.stop for spans in request.need.values() for span in spans), default=0)
    all_tokens = {group.name: (Span(0, last),) for group in src.groups}
    for rank, memory in src_memory.items():
        fill_rank(memory, src, rank, request.src, all_tokens)
    for rank, memory in dst_memory.items():
        fill_rank(memory, dst, rank, request.dst, request.kept, KEPT)


def _move(trip: Trip, transport: MemoryTransport, route: kvferry.Route, request: Request) -> None:
    started = perf_counter()
    selection = kvferry.select(route, request)
    selected = perf_counter()
    for src_rank, runs in selection.reads.items():
        transport.read(src_rank, str(src_rank), runs)
    transport.clear(selection.zeros)
    for end in transport.poll():
        if end.error:
            raise kvferry.KVFerryError(f"reading from source rank {end.transfer}: {end.error}")
    trip.select_ms += 1e3 * (selected - started)
    trip.copy_ms += 1e3 * (perf_counter() - selected)
    trip.num_runs += selection.num_runs
    trip.total_bytes += selection.total_bytes


def _verify(trip: Trip, plan: kvferry.Plan, memories: Memories, request: Request) -> None:
    """Read what was needed and what was kept back by name, through the destination's views."""
    memory, rank = memories[plan.dst_rank], plan.dst_rank
    names = {state: plan.src_name(state) for state in plan.states}
    moved = check_rank(memory, plan.dst, rank, request.dst, request.need, names)
    kept = check_rank(memory, plan.dst, rank, request.dst, request.kept, {n: n for n in names}, KEPT)
    for what, checked in (("", moved), ("kept ", kept)):
        trip.num_cells += checked.num_cells
        trip.num_wrong += checked.num_wrong
        if checked.first and not trip.first_wrong:
            trip.first_wrong = f"{trip.model}: dst rank {rank}: {what}{checked.first}"
