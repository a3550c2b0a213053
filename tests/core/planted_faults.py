"""Faults that a transfer may have, planted into memory that arrived well; and what they really changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvferry import Manifest, Plan, Request, Selection, lower, plan, prove, select
from kvferry.core.addresses import needed_cells
from kvferry.core.digest import DigestSide, differences, digest_parts
from kvferry.core.digest_cells import Words
from kvferry.core.sample import Placement, sample_request
from kvferry.models import Topology, describe
from kvferry.pattern import Site, site
from kvferry.testing.small import small

Memory = dict[str, np.ndarray]
Random = np.random.Generator

PAIRS = (
    ("gqa", "tp=2,layout=NHD", "tp=3,layout=HND,block=8", 70),
    ("gqa", "tp=1,layout=cpu-vec,block=16", "tp=4,layout=HND-halves,block=24", 100),
    ("mqa", "tp=4,layout=HND", "tp=2,layout=NHD", 50),
    ("window", "tp=4,layout=NHD-halves,block=8", "tp=2,cp=2,layout=HND,block=12", 90),
    ("mla", "tp=2,block=8", "tp=1,cp=2,block=16", 80),
    ("mla-indexer", "tp=4,block=16", "tp=2,block=8", 60),
    ("kda-mla", "tp=2,conv=SD", "tp=3,conv=DS", 50),
    ("gdn-gqa", "tp=4,conv=DS", "tp=2,conv=SD", 40),
    ("mamba2", "tp=3", "tp=2", 33),
    ("compressed", "tp=1,block=128", "tp=1,block=256", 500),
    ("gqa", "tp=1,layout=opaque,block=16", "tp=1,layout=opaque,block=16", 90),
)
"""Family, source, destination, number of tokens."""


def memory_of(manifest: Manifest, rank: int, random: Random, high: int = 256) -> Memory:
    """Random bytes for every region of a rank."""
    regions = manifest.rank(rank).regions
    return {region.name: random.integers(0, high, region.num_bytes, np.uint8) for region in regions}


def carry_out(planned: Plan, selection: Selection, sources: Mapping[int, Memory], memory: Memory) -> None:
    """Move the runs, one by one."""
    dst_regions = planned.dst.rank(planned.dst_rank).regions
    for src_rank, runs in selection.reads.items():
        src_regions = planned.src.rank(src_rank).regions
        for src_region, src_at, dst_region, dst_at, size in runs:
            source = sources[src_rank][src_regions[src_region].name]
            memory[dst_regions[dst_region].name][dst_at : dst_at + size] = source[src_at : src_at + size]


def src_side(planned: Plan, rank: int, request: Request, memory: Memory) -> DigestSide:
    return DigestSide(planned.src, planned.src.rank(rank), request.src, memory, "src")


def dst_side(planned: Plan, request: Request, memory: Memory) -> DigestSide:
    return DigestSide(planned.dst, planned.dst.rank(planned.dst_rank), request.dst, memory, "dst")


@dataclass(frozen=True, eq=False)
class Loaded:
    """A request that arrived well at one destination rank."""

    planned: Plan
    request: Request
    selection: Selection
    sources: Mapping[int, Memory]
    stale: Memory
    """The destination's memory before."""
    memory: Memory
    """And after."""

    @classmethod
    def of(cls, pair: tuple[str, str, str, int], random: Random) -> Loaded:
        family, src_text, dst_text, num_tokens = pair
        src, dst = (
            describe(small(family), Topology.parse(f"blocks=64,{text}"), name)
            for text, name in ((src_text, "src"), (dst_text, "dst"))
        )
        planned = plan(src, dst, int(random.integers(len(dst.ranks))))
        request = sample_request(src, dst, num_tokens, placement=Placement.SCATTERED)
        selection = select(lower(prove(planned)), request)
        high = int(random.choice([2, 256]))  # also values that are nearly all alike
        ranks = {piece.src_rank for piece in planned.pieces}
        sources = {rank: memory_of(src, rank, random, high) for rank in ranks}
        stale = memory_of(dst, planned.dst_rank, random, high)
        memory = {name: values.copy() for name, values in stale.items()}
        carry_out(planned, selection, sources, memory)
        return cls(planned, request, selection, sources, stale, memory)

    @cached_property
    def sites(self) -> dict[str, tuple[str, Site]]:
        """Of each state: its region, and where every needed item sits."""
        dst, found = self.planned.dst, {}
        for view in dst.rank(self.planned.dst_rank).views:
            need = needed_cells(self.request.need, view.group, dst.state_by_name[view.state])
            cells = np.concatenate([np.arange(start, stop) for start, stop in need])
            where = site(dst, view, self.request.dst[view.group], cells)
            if where.offsets.size:
                found[view.state] = view.region, where
        return found

    @cached_property
    def theirs(self) -> dict[int, list[Words]]:
        parts = digest_parts(self.planned, self.request)
        return {
            rank: src_side(self.planned, rank, self.request, self.sources[rank]).sums(some)
            for rank, some in parts.items()
        }

    def told(self, memory: Memory) -> set[tuple[str, int]]:
        """What the digest says of a memory: the states that are not as the source has them, and where."""
        side = dst_side(self.planned, self.request, memory)
        return {
            (found.state, found.tokens.start)
            for rank, some in digest_parts(self.planned, self.request).items()
            for found in differences(self.planned.dst, some, side.sums(some), self.theirs[rank])
        }

    def changed(self, memory: Memory) -> set[str]:
        """The states of which a needed byte is not what it was."""
        return {
            name
            for name, (region, where) in self.sites.items()
            if (_items(memory[region], where) != _items(self.memory[region], where)).any()
        }


def _items(memory: np.ndarray, where: Site) -> np.ndarray:
    return memory[_bytes_of(where)]


def _bytes_of(where: Site) -> np.ndarray:
    return np.add.outer(where.offsets, np.arange(where.state.item_bytes))


Plant = Callable[[Loaded, Memory, Random], None]


def _some_site(loaded: Loaded, random: Random) -> tuple[str, Site]:
    states = list(loaded.sites)
    return loaded.sites[states[random.integers(len(states))]]


def single_bit(loaded: Loaded, memory: Memory, random: Random) -> None:
    region, where = _some_site(loaded, random)
    at = random.choice(_bytes_of(where).ravel())
    memory[region][at] ^= 1 << int(random.integers(8))


def _swap(memory: np.ndarray, where: Site, axis: int, random: Random) -> None:
    if where.offsets.shape[axis] < 2:
        return
    a, b = random.choice(where.offsets.shape[axis], 2, replace=False)
    one, other = (np.take(_bytes_of(where), i, axis) for i in (a, b))
    memory[one], memory[other] = memory[other], memory[one]


def swapped_tokens(loaded: Loaded, memory: Memory, random: Random) -> None:
    region, where = _some_site(loaded, random)
    _swap(memory[region], where, 0, random)


def swapped_heads(loaded: Loaded, memory: Memory, random: Random) -> None:
    """Of a state without heads: two channels, or whatever it has."""
    region, where = _some_site(loaded, random)
    names = [name for name, _ in where.axes]
    if len(names) > 1:
        axis = names.index("head") if "head" in names else int(random.integers(1, len(names)))
        _swap(memory[region], where, axis, random)


def shifted_stride(loaded: Loaded, memory: Memory, random: Random) -> None:
    """Every item from some coordinate on holds its neighbour's bytes."""
    region, where = _some_site(loaded, random)
    axis = int(random.integers(where.offsets.ndim))
    first = int(random.integers(where.offsets.shape[axis]))
    at = np.take(_bytes_of(where), range(first, where.offsets.shape[axis]), axis)
    memory[region][at] = memory[region][np.roll(at, 1, axis)]


def shifted_run(loaded: Loaded, memory: Memory, random: Random) -> None:
    """One run reads a little beside its source. Where that only spoils slack, nothing is to be told."""
    src_rank = random.choice(list(loaded.selection.reads))
    runs = list(loaded.selection.reads[src_rank])
    src_region, src_at, dst_region, dst_at, size = runs[random.integers(len(runs))]
    regions = loaded.planned.src.rank(src_rank).regions
    source = loaded.sources[src_rank][regions[src_region].name]
    src_at = int(np.clip(src_at + random.choice([-4, -2, -1, 1, 2, 4]), 0, len(source) - size))
    target = memory[loaded.planned.dst.rank(loaded.planned.dst_rank).regions[dst_region].name]
    target[dst_at : dst_at + size] = source[src_at : src_at + size]


def stale_block(loaded: Loaded, memory: Memory, random: Random) -> None:
    """What was in a destination block before the load is still there."""
    views = loaded.planned.dst.rank(loaded.planned.dst_rank).views
    view = views[random.integers(len(views))]
    block = int(random.choice(loaded.request.dst[view.group].block_ids))
    start = view.offset + block * view.block_stride
    where = slice(start, start + view.block_stride)
    memory[view.region][where] = loaded.stale[view.region][where]


def zeroed_state(loaded: Loaded, memory: Memory, random: Random) -> None:
    region, where = _some_site(loaded, random)
    memory[region][_bytes_of(where)] = 0


FAULTS: tuple[Plant, ...] = (
    single_bit,
    swapped_heads,
    swapped_tokens,
    shifted_stride,
    shifted_run,
    stale_block,
    zeroed_state,
)
