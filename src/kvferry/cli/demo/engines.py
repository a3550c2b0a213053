"""The engines of a demonstration: manifests, requests, blocks, and the processes of ranks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from kvferry import BlockTable, Group, Identity, Manifest, Span, SpecError
from kvferry.cli.engines import chosen_model, described_to_fit
from kvferry.cli.options import at
from kvferry.core.identity import STATED
from kvferry.core.sample import table_extent
from kvferry.core.span import Spans
from kvferry.endpoint import Destination, Invitation, SourceRank
from kvferry.models import Model
from kvferry.pattern import STALE, Checked, check_rank, fill_rank
from kvferry.runtime import Timing
from kvferry.transport.base import Transport
from kvferry.transport.process import ProcessTransport
from kvferry.transport.region_memory import RegionMemory
from kvferry.wire.secret import Trust

NUMBERED_CELLS = Identity.of({STATED: "cells numbered by kvferry.pattern"})
"""The model identity of these engines, whatever model they imitate."""
NUM_LAYERS = 4


@dataclass(frozen=True, slots=True)
class Pair:
    """Two engines of one model, shortened to about ``num_layers``; each side is a topology."""

    model: str
    src: str = "tp=2"
    dst: str = "tp=4,layout=NHD"
    num_layers: int = NUM_LAYERS

    def with_options(self, src: str | None, dst: str | None, layers: int | None) -> Pair:
        return Pair(self.model, src or self.src, dst or self.dst, layers or self.num_layers)

    def manifest(self, side: str, num_tokens: int, num_requests: int) -> Manifest:
        """The engine of a side (``src`` or ``dst``), with room for these requests."""
        topology = self.src if side == "src" else self.dst
        model = shortened(chosen_model(self.model, None), self.num_layers)
        with at(f"--{side} {topology}"):
            manifest = described_to_fit(model, topology, side, num_tokens, num_requests)
        return replace(manifest, identity=NUMBERED_CELLS)


DEFAULT_PAIR = Pair("kimi-linear-48b", "tp=4,block=512", "tp=2,block=960,layout=cross-layer")


def shortened(model: Model, num_layers: int) -> Model:
    """The model with about ``num_layers``: the first ones of each kind.

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


@dataclass(frozen=True, slots=True)
class Sample:
    request_id: str
    num_tokens: int
    num_kept: int = 0
    """First tokens that the destination already has."""


def some_samples(dst: Manifest, num_requests: int, num_tokens: int) -> list[Sample]:
    """Requests of many lengths, the last one the longest; every third one has a cached prefix."""
    whole_blocks = max(group.tokens_per_block for group in dst.groups)
    samples = []
    for number in range(1, num_requests):
        tokens = max(1, num_tokens - 37 * number * num_tokens // (37 * num_requests + 1))
        kept = tokens // 2 // whole_blocks * whole_blocks if number % 3 == 1 else 0
        samples.append(Sample(f"request-{number}", tokens, kept))
    return [*samples, Sample(f"request-{num_requests}", num_tokens)]


class BlockPool:
    """Block tables for requests, scattered over the pool."""

    def __init__(self, manifest: Manifest, seed: int = 0) -> None:
        self._groups = manifest.groups
        self._random = random.Random(seed)
        self._free = {group.pool: set(range(group.num_blocks)) for group in manifest.groups}
        self._total = self.num_free

    @property
    def num_free(self) -> int:
        return sum(map(len, self._free.values()))

    @property
    def num_missing(self) -> int:
        """Blocks that requests have."""
        return self._total - self.num_free

    def take(self, num_tokens: int) -> dict[str, BlockTable] | None:
        """The tables of a request; None if the pool has too few blocks now."""
        wanted: Counter[str] = Counter()
        for group in self._groups:
            wanted[group.pool] += table_extent(group, num_tokens)[1]
        if any(count > len(self._free[pool]) for pool, count in wanted.items()):
            return None
        return {group.name: self._table(group, num_tokens) for group in self._groups}

    def _table(self, group: Group, num_tokens: int) -> BlockTable:
        """Random blocks, which depend on the free ones, not on the order of their return."""
        first_token, num_blocks = table_extent(group, num_tokens)
        taken = self._random.sample(sorted(self._free[group.pool]), num_blocks)
        self._free[group.pool].difference_update(taken)
        return BlockTable.of(taken, first_token)

    def give_back(self, tables: Mapping[str, BlockTable]) -> None:
        for group in self._groups:
            ids = set(tables[group.name].block_ids.tolist()) if group.name in tables else set()
            if ids & self._free[group.pool]:
                raise SpecError(f"blocks of group {group.name} are returned twice")
            self._free[group.pool] |= ids


# -- ranks -----------------------------------------------------------------------------------------


class RankCells:
    """The memory of one rank, stale at first, with cells written and checked by name."""

    def __init__(self, manifest: Manifest, rank: int, device: str = "cpu") -> None:
        self.rank, self.memory = rank, RegionMemory(device)
        described = manifest.rank(rank)
        for region in described.regions:
            self.memory.add(region.name, np.full(region.num_bytes, STALE, np.uint8))
        self.placed = replace(described, regions=self.memory.regions)
        ranks = tuple(self.placed if one.rank == rank else one for one in manifest.ranks)
        self.manifest = replace(manifest, ranks=ranks)

    def fill(self, tables: Mapping[str, BlockTable], tokens: Mapping[str, Spans], salt: str = "") -> None:
        """Write the pattern of these tokens, by group, without transfers in flight."""
        arrays = self.memory.arrays()
        fill_rank(self._named(arrays), self.manifest, self.rank, tables, tokens, salt)
        self.memory.store(arrays)

    def fill_all(self, tables: Mapping[str, BlockTable], num_tokens: int, salt: str = "") -> None:
        self.fill(tables, {group.name: (Span(0, num_tokens),) for group in self.manifest.groups}, salt)

    def check(
        self,
        tables: Mapping[str, BlockTable],
        tokens: Mapping[str, Spans],
        names: Mapping[str, str],
        salt: str = "",
    ) -> Checked:
        """Compare these tokens with the pattern written under these names."""
        arrays = self._named(self.memory.arrays())
        return check_rank(arrays, self.manifest, self.rank, tables, tokens, names, salt)

    def _named(self, arrays: list[np.ndarray]) -> dict[str, np.ndarray]:
        return {region.name: array for region, array in zip(self.memory.regions, arrays, strict=True)}


class SourceProcess(SourceRank):
    """A source rank with memory to fill, for a process of its own."""

    def __init__(
        self, manifest: Manifest, rank: int, invitation: Invitation, device: str, trust: Trust | None = None
    ) -> None:
        cells = RankCells(manifest, rank, device)
        self.fill = cells.fill_all
        own = replace(manifest, ranks=(cells.placed,))
        super().__init__(invitation, own, ProcessTransport(), trust=trust or Trust())


class DestinationProcess(Destination):
    """A destination rank with memory to fill and check, for a process of its own."""

    def __init__(
        self,
        manifest: Manifest,
        rank: int,
        reader: str,
        timing: Timing,
        device: str,
        trust: Trust | None = None,
        transport: Transport | None = None,
    ) -> None:
        cells = RankCells(manifest, rank, device)
        self.memory, self.fill, self.check = cells.memory, cells.fill, cells.check
        transport, trust = transport or ProcessTransport(), trust or Trust()
        super().__init__(cells.manifest, rank, transport, reader=reader, trust=trust, timing=timing)
