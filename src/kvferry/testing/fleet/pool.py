"""An engine's blocks: who has them, and whether all came back."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

from kvferry.core.manifest import Manifest
from kvferry.core.request import BlockTable
from kvferry.core.sample import table_extent
from kvferry.core.state import Group
from kvferry.errors import SpecError


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
