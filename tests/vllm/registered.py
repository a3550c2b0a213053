"""What an engine has in its prefix cache: whatever another request can hit there must be right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.vllm.engine import NULL_BLOCK, Engine, ToyWorker, _Cells
from tests.vllm.toy import Attention, Layer, Text, _cells


@dataclass(frozen=True)
class Entry:
    """A block that vLLM's hash table gives to every request that starts with these tokens."""

    group: int
    block_id: int
    tokens: tuple[int, ...]


class Registered:
    """Notes for which tokens an engine registers each hash, by vLLM's own calls, and looks at the cells."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._pool = engine, engine.core.scheduler.kv_cache_manager.block_pool
        self._tokens: dict[Any, tuple[int, tuple[int, ...]]] = {}
        """Hash -> its group and tokens."""
        self.num_entries = 0
        """How many were looked at."""
        self._registering: Any = None
        assert not self._pool.cached_block_hash_to_block._cache or engine.core.reset_prefix_cache()
        self._insert = self._pool._insert_block_hash
        self._wrapped = {
            "cache_full_blocks": self._noting(self._pool.cache_full_blocks),
            "cache_partial_block": self._noting(self._pool.cache_partial_block),
            "_insert_block_hash": self._note,
        }
        vars(self._pool).update(self._wrapped)

    def stop(self) -> None:
        """Note nothing more: the engine is used again."""
        for name in self._wrapped:
            del vars(self._pool)[name]

    def _noting(self, register: Any) -> Any:
        def noting(*, request: Any, kv_cache_group_id: int, **others: Any) -> Any:
            self._registering = request, kv_cache_group_id
            return register(request=request, kv_cache_group_id=kv_cache_group_id, **others)

        return noting

    def _note(self, key: Any, block: Any, *, num_tokens: int, **others: Any) -> Any:
        request, group = self._registering
        self._tokens[key] = group, tuple(request.all_token_ids[:num_tokens])
        return self._insert(key, block, num_tokens=num_tokens, **others)

    def entries(self) -> Iterator[Entry]:
        """All that is in vLLM's hash table now."""
        for key, found in self._pool.cached_block_hash_to_block._cache.items():
            for block in found.values() if isinstance(found, dict) else (found,):
                group, tokens = self._tokens[key]
                yield Entry(group, block.block_id, tokens)

    def wrong(self) -> list[str]:
        """Blocks with a cell that is not of the tokens they are registered for. Call it between two steps."""
        texts: dict[tuple[int, ...], Text] = {}
        found = []
        for entry in self.entries():
            self.num_entries += 1
            text = texts.setdefault(entry.tokens, Text(list(entry.tokens)))
            found += [
                f"group {entry.group}, block {entry.block_id}, up to token {len(entry.tokens)}: {layer.name}"
                for worker in self._engine.workers
                for layer in worker.layers
                if layer.name in worker._groups[entry.group].layer_names
                and not _is_right(worker, layer, entry, text)
            ]
        return found


def _is_right(worker: ToyWorker, layer: Layer, entry: Entry, text: Text) -> bool:
    stop, block = len(entry.tokens), worker._groups[entry.group].kv_cache_spec.block_size
    start = (stop - 1) // block * block
    ids = [NULL_BLOCK] * (start // block) + [entry.block_id]
    cells = _Cells(worker, tuple(ids if i == entry.group else [] for i in range(len(worker._groups))))
    first = start if isinstance(layer, Attention) else stop - 1
    return np.array_equal(cells.read(layer, first, stop), _cells(layer, text, first, stop))
