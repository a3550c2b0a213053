"""An engine's blocks: who has them, and whether all came back."""

from __future__ import annotations

import random
from collections.abc import Mapping

from kvferry.core.manifest import Manifest
from kvferry.core.request import BlockTable
from kvferry.core.sample import table_extent


class BlockPool:
    """Hands out block tables for requests, scattered over the pool, and takes them back."""

    def __init__(self, manifest: Manifest, seed: int = 0) -> None:
        self._groups = manifest.groups
        self._random = random.Random(seed)
        self._free = {group.pool: list(range(group.num_blocks)) for group in manifest.groups}
        self._pool_of = {group.name: group.pool for group in manifest.groups}
        for ids in self._free.values():
            self._random.shuffle(ids)
        self._total = self.num_free

    @property
    def num_free(self) -> int:
        return sum(len(ids) for ids in self._free.values())

    @property
    def num_missing(self) -> int:
        """Blocks that are out; 0 when every request gave its own back."""
        return self._total - self.num_free

    def take(self, num_tokens: int) -> dict[str, BlockTable] | None:
        """Tables for a request of so many tokens; None if the pool cannot hold it now."""
        extents = {group.name: table_extent(group, num_tokens) for group in self._groups}
        for pool, ids in self._free.items():
            wanted = sum(n for name, (_, n) in extents.items() if self._pool_of[name] == pool)
            if wanted > len(ids):
                return None
        tables = {}
        for name, (first, num_blocks) in extents.items():
            ids = self._free[self._pool_of[name]]
            taken = [ids.pop() for _ in range(num_blocks)]
            tables[name] = BlockTable.of(taken, first)
        return tables

    def give_back(self, tables: Mapping[str, BlockTable]) -> None:
        """The request's blocks are free again, to be handed out in another order."""
        for name, table in tables.items():
            ids = self._free[self._pool_of[name]]
            ids.extend(table.block_ids.tolist())
            at = self._random.randrange(len(ids)) if ids else 0
            ids[at:], ids[:at] = ids[:at], ids[at:]
