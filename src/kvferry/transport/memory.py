"""The embedded transport: every rank lives in this process, and a read is a copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvferry.core.manifest import Rank
from kvferry.core.plan import Plan
from kvferry.core.runs import REGION_SHIFT, Runs
from kvferry.core.select import Selection
from kvferry.core.view import Ints
from kvferry.errors import SpecError
from kvferry.transport.base import Memory

Regions = Sequence[NDArray[np.uint8]]
"""A rank's memory in the order of its regions: a place names a region by its index."""


class MemoryTransport:
    """Copies between numpy buffers.

    >>> from kvferry import Region
    >>> transport = MemoryTransport()
    >>> transport.register("src", Rank(0, (Region("kv", 64),), ()), {"kv": np.zeros(48, np.uint8)})
    Traceback (most recent call last):
    kvferry.errors.SpecError: src rank 0: region kv has 64 bytes, the memory given for it has 48
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[str, int], Regions] = {}

    def register(self, engine: str, rank: Rank, memory: Memory) -> None:
        """Make the regions of one rank of an engine known."""
        where = f"{engine} rank {rank.rank}"
        if (engine, rank.rank) in self._memory:
            raise SpecError(f"{where} is registered twice: engines need names of their own")
        for region in rank.regions:
            given = len(memory[region.name]) if region.name in memory else 0
            if given != region.num_bytes:
                raise SpecError(
                    f"{where}: region {region.name} has {region.num_bytes} bytes,"
                    f" the memory given for it has {given}"
                )
        self._memory[engine, rank.rank] = [memory[region.name] for region in rank.regions]

    def apply(self, plan: Plan, selection: Selection) -> None:
        """Read every run into the plan's destination rank and fill its zeros; return when all is in."""
        dst = self._regions(plan.dst.engine, plan.dst_rank)
        sources = {rank: self._regions(plan.src.engine, rank) for rank in selection.reads}
        _check_bounds(dst, selection.zeros.dst, selection.zeros.num_bytes)
        for src_rank, runs in selection.reads.items():
            _check_bounds(sources[src_rank], runs.src, runs.num_bytes)
            _check_bounds(dst, runs.dst, runs.num_bytes)
        for src_rank, runs in selection.reads.items():
            _copy(sources[src_rank], dst, runs)
        _fill(dst, selection.zeros)

    def _regions(self, engine: str, rank: int) -> Regions:
        if (engine, rank) not in self._memory:
            raise SpecError(f"{engine} rank {rank} is not registered with this transport")
        return self._memory[engine, rank]


def _check_bounds(regions: Regions, places: Ints, num_bytes: Ints) -> None:
    """Refuse, before a byte moves, runs that reach past the end of their region."""
    lengths = np.array([len(region) for region in regions], np.int64)
    index = places >> REGION_SHIFT
    stops = (places & ((1 << REGION_SHIFT) - 1)) + num_bytes
    outside = (index < 0) | (index >= len(lengths))
    outside[~outside] = stops[~outside] > lengths[index[~outside]]
    if outside.any():
        first = int(np.flatnonzero(outside)[0])
        raise SpecError(f"a run of {int(num_bytes[first])} bytes reaches past region {int(index[first])}")


def _copy(src: Regions, dst: Regions, runs: Runs) -> None:
    for src_region, src_offset, dst_region, dst_offset, num_bytes in runs:
        source = src[src_region][src_offset : src_offset + num_bytes]
        dst[dst_region][dst_offset : dst_offset + num_bytes] = source


def _fill(dst: Regions, zeros: Runs) -> None:
    for _, _, dst_region, dst_offset, num_bytes in zeros:
        dst[dst_region][dst_offset : dst_offset + num_bytes] = 0
