"""The demonstration in memory: plan, move and check requests between two engines in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

import kvferry
from kvferry.cli.demo.pairs import Pair, check_memory
from kvferry.cli.demo.result import MemoryResult
from kvferry.cli.demo.samples import Sample, some_samples
from kvferry.core.manifest import Manifest
from kvferry.core.request import Request
from kvferry.core.sample import Placement, sample_request
from kvferry.core.span import Span
from kvferry.testing.pattern import KEPT, STALE, check_rank, fill_rank
from kvferry.transport.memory import Hub, MemoryTransport, placed

Memories = Mapping[int, dict[str, NDArray[np.uint8]]]


def demonstrate_in_memory(
    pair: Pair, num_requests: int, num_tokens: int, step: Callable[[str], None]
) -> MemoryResult:
    """Plan every destination rank once, then move and check each request; ``step`` is called after each."""
    src, dst = (pair.manifest(side, num_tokens, num_requests=2) for side in ("src", "dst"))
    check_memory(src, dst)
    result = MemoryResult(pair.model, pair.src, pair.dst)
    src_memory, dst_memory = _memories(src), _memories(dst)
    transports = _transports(src, src_memory, dst, dst_memory)
    routes = [_route(result, src, dst, rank.rank) for rank in dst.ranks]
    for number, sample in enumerate(some_samples(dst, num_requests, num_tokens)):
        placement = Placement.CONSECUTIVE if number % 2 else Placement.SCATTERED
        request = sample_request(src, dst, sample.num_tokens, num_kept=sample.num_kept, placement=placement)
        _lay_out(src, dst, src_memory, dst_memory, request)
        for route in routes:
            if _move(result, sample, transports[route.plan.dst_rank], route, request):
                _check(result, sample, route.plan, dst_memory, request)
        result.num_requests += 1
        step("")
    return result


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


def _route(result: MemoryResult, src: Manifest, dst: Manifest, dst_rank: int) -> kvferry.Route:
    started = perf_counter()
    route = kvferry.lower(kvferry.prove(kvferry.plan(src, dst, dst_rank)))
    result.plan_ms += 1e3 * (perf_counter() - started)
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


def _move(
    result: MemoryResult, sample: Sample, transport: MemoryTransport, route: kvferry.Route, request: Request
) -> bool:
    """Copy what one destination rank needs; whether that went well."""
    started = perf_counter()
    selection = kvferry.select(route, request)
    selected = perf_counter()
    for src_rank, product in selection.products.items():
        transport.read(src_rank, str(src_rank), product)
    transport.clear(max(selection.products, default=0) + 1, selection.blank)
    failed = [end for end in transport.poll() if end.error]
    result.select_ms += 1e3 * (selected - started)
    result.copy_ms += 1e3 * (perf_counter() - selected)
    result.num_runs += selection.num_runs
    result.total_bytes += selection.total_bytes
    for end in failed:
        result.fail(sample, route.plan.dst_rank, f"reading from source rank {end.transfer}: {end.error}")
    return not failed


def _check(
    result: MemoryResult, sample: Sample, plan: kvferry.Plan, memories: Memories, request: Request
) -> None:
    """Read what was needed and what was kept back by name, through the destination's views."""
    memory, rank = memories[plan.dst_rank], plan.dst_rank
    names = {state: plan.src_name(state) for state in plan.states}
    moved = check_rank(memory, plan.dst, rank, request.dst, request.need, names)
    kept = check_rank(memory, plan.dst, rank, request.dst, request.kept, {n: n for n in names}, KEPT)
    result.count(sample, "", rank, moved)
    result.count(sample, "kept ", rank, kept)
