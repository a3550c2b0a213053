"""What the demonstrations show: which engines, which requests, and which blocks these get."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvferry.cli.bad_input import at
from kvferry.cli.engines import chosen_model, described_to_fit
from kvferry.cli.output import num_bytes
from kvferry.core.manifest import Manifest
from kvferry.core.request import BlockTable
from kvferry.core.sample import table_extent
from kvferry.core.state import Group
from kvferry.errors import SpecError
from kvferry.models import Model

MAX_MEMORY = 4 << 30
"""Bytes that the two engines may take together."""
NUM_LAYERS = 4
DEFAULT_SRC, DEFAULT_DST = "tp=2", "tp=4,layout=NHD"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two engines of one model, shortened to about so many layers; each side is a topology."""

    model: str
    src: str
    dst: str
    num_layers: int = NUM_LAYERS

    def manifest(self, side: str, num_tokens: int, num_requests: int) -> Manifest:
        """The engine of one side (``src`` or ``dst``), with room for so many requests."""
        topology = self.src if side == "src" else self.dst
        model = shortened(chosen_model(self.model, None), self.num_layers)
        with at(f"--{side} {topology}"):
            return described_to_fit(model, topology, side, num_tokens, num_requests)


OF_PROCESSES = Pair("kimi-linear-48b", "tp=4,block=512", "tp=2,block=960,layout=cross-layer")
"""What is shown between processes where nothing else is asked for."""
IN_MEMORY = (
    Pair("kimi-linear-48b", "tp=4,block=256", "tp=8,block=96,layout=cross-layer"),
    Pair("deepseek-v3.2", "tp=3,block=64", "tp=5,block=128,layout=cross-layer"),
    Pair("llama-3.1-70b", "tp=4,block=16,layout=HND", "tp=6,block=24,layout=NHD"),
)
"""What is shown in memory where nothing else is asked for."""


def pair_of_processes(model: str, src: str | None, dst: str | None, layers: int | None) -> Pair:
    """The pair that was asked for; what was left open is the default's, if it is of that model."""
    known = OF_PROCESSES if model in ("", OF_PROCESSES.model) else Pair(model, DEFAULT_SRC, DEFAULT_DST)
    return Pair(known.model, src or known.src, dst or known.dst, layers or NUM_LAYERS)


def pairs_in_memory(model: str, src: str | None, dst: str | None, layers: int | None) -> tuple[Pair, ...]:
    """The pair that was asked for, or all that are shown by default."""
    if model:
        return (Pair(model, src or DEFAULT_SRC, dst or DEFAULT_DST, layers or NUM_LAYERS),)
    if src or dst or layers:
        raise SpecError("--src, --dst and --layers belong to a --model: name one of `kvferry models`")
    return IN_MEMORY


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


def memory_bytes(*manifests: Manifest) -> int:
    """What these engines take."""
    return sum(region.num_bytes for each in manifests for rank in each.ranks for region in rank.regions)


def check_memory(*manifests: Manifest) -> None:
    """Refuse engines that would take too much."""
    total = memory_bytes(*manifests)
    if total > MAX_MEMORY:
        raise SpecError(
            f"the two engines would take {num_bytes(total)} of memory, more than {num_bytes(MAX_MEMORY)}:"
            " fewer --tokens, --layers or ranks take less"
        )


@dataclass(frozen=True, slots=True)
class Sample:
    """One request that is to be moved."""

    request_id: str
    num_tokens: int
    num_kept: int = 0
    """How many first tokens the destination has already."""


def some_samples(dst: Manifest, num_requests: int, num_tokens: int) -> list[Sample]:
    """Requests of many lengths, the last one the longest.

    Every third, the first among them, has a prefix that is there already.
    """
    whole_blocks = max(group.tokens_per_block for group in dst.groups)
    samples = []
    for number in range(1, num_requests):
        tokens = max(1, num_tokens - 37 * number * num_tokens // (37 * num_requests + 1))
        kept = tokens // 2 // whole_blocks * whole_blocks if number % 3 == 1 else 0
        samples.append(Sample(f"request-{number}", tokens, kept))
    return [*samples, Sample(f"request-{num_requests}", num_tokens)]


class BlockPool:
    """Hands out block tables for requests, scattered over the pool, and takes them back."""

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
        """Blocks that are out; 0 when every request gave its own back."""
        return self._total - self.num_free

    def take(self, num_tokens: int) -> dict[str, BlockTable] | None:
        """Tables for a request of so many tokens; None if the pool cannot hold it now."""
        wanted: Counter[str] = Counter()
        for group in self._groups:
            wanted[group.pool] += table_extent(group, num_tokens)[1]
        if any(count > len(self._free[pool]) for pool, count in wanted.items()):
            return None
        return {group.name: self._table(group, num_tokens) for group in self._groups}

    def _table(self, group: Group, num_tokens: int) -> BlockTable:
        """Blocks at random: which ones depends on what is free, not on the order in which it came back."""
        first_token, num_blocks = table_extent(group, num_tokens)
        taken = self._random.sample(sorted(self._free[group.pool]), num_blocks)
        self._free[group.pool].difference_update(taken)
        return BlockTable.of(taken, first_token)

    def give_back(self, tables: Mapping[str, BlockTable]) -> None:
        """The request's blocks are free again."""
        for group in self._groups:
            ids = set(tables[group.name].block_ids.tolist()) if group.name in tables else set()
            if ids & self._free[group.pool]:
                raise SpecError(f"blocks of group {group.name} are given back twice")
            self._free[group.pool] |= ids
