"""vLLM's prefix cache, as far as a load must keep blocks out of it. No other file touches vLLM's managers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvferry.errors import SpecError

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

FIELD = "num_cached_block"
"""Of the manager of a group: request id -> the index of the first block that vLLM has yet to register."""


class PrefixCache:
    """Keeps blocks out of vLLM's prefix cache.

    The field is private to vLLM. There is no other way: vLLM registers the blocks of a load inside
    ``schedule``, where another request can hit them before any hook of a connector runs.
    """

    def __init__(self, num_cached: Mapping[int, dict[str, int]]) -> None:
        """``num_cached``: the fields of the groups that are covered; none where nothing is registered."""
        self._num_cached = num_cached

    @classmethod
    def of(cls, manager: KVCacheManager, tokens_per_block: Mapping[int, int]) -> PrefixCache:
        """Covers these groups, by the number of tokens in their blocks.

        Raises SpecError if prefix caching is on and this vLLM has no such field.
        """
        if not tokens_per_block or not manager.enable_caching:
            return cls({})
        groups = getattr(getattr(manager, "coordinator", None), "single_type_managers", ())
        found: dict[int, dict[str, int]] = {}
        for index, num_tokens in tokens_per_block.items():
            group = groups[index] if index < len(groups) else None
            num_cached = getattr(group, FIELD, None)
            if type(num_cached) is not dict or getattr(group, "block_size", None) != num_tokens:
                raise cannot_keep_out(f"{type(group).__name__}.{FIELD} of KV cache group {index}")
            found[index] = num_cached
        return cls(found)

    @property
    def is_on(self) -> bool:
        """Whether vLLM may register a block that a load fills in part."""
        return bool(self._num_cached)

    def keep_out(self, request_id: str, num_blocks: Mapping[int, int]) -> None:
        """Never register a request's blocks before this index, by group.

        Call it before the load starts. It holds until vLLM frees the request's blocks.
        """
        for index, first in num_blocks.items():
            if (num_cached := self._num_cached.get(index)) is not None:
                num_cached[request_id] = max(first, num_cached.get(request_id, 0))


def cannot_keep_out(what: str) -> SpecError:
    """Why an engine with windows and prefix caching does not start."""
    return SpecError(
        f"this vLLM has no {what}, by which kvferry keeps partly loaded blocks of sliding windows out of the"
        " prefix cache: use a vLLM version that kvferry supports, or --no-enable-prefix-caching"
    )
