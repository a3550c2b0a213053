"""Soft offers of finished requests in vLLM's prefix cache, and claims that pin their remaining blocks.

An offer pins nothing. A claim uses vLLM's own lookup to find how many of the request's first tokens every
group still has, and pins their blocks. vLLM registers blocks when it schedules the step that fills them, so a
claim is granted only after every step in flight at its lookup has ended.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import lcm
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.v1.request import Request

from kvferry.endpoint import SourceEngine
from kvferry.errors import SpecError
from kvferry.integrations.vllm.scheduler.tables import Adapters, Groups, digest_parts_of, is_identified
from kvferry.integrations.vllm.shared.groups import is_prefix_cached
from kvferry.log import log_of
from kvferry.runtime.values import Wanted
from kvferry.wire.ticket import PART_BYTES, PART_TOKENS, Ticket, part_at

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

log = log_of(__name__)

MAX_HASHES = 1 << 20
"""Maximum number of block hashes of all offers: 100 MB if vLLM no longer holds them (large blocks: 230)."""
YOUNG_SECONDS = 10.0
"""How long an idle engine keeps stepping after its last offer: claims are served only in steps."""
MAX_PER_STEP = 8
"""Maximum number of claims to look up per step, so that they do not delay decoding."""
MAX_SHARE = 4
"""Claims pin at most 1/MAX_SHARE of the blocks without a request; running requests need the rest."""
ENTRY_HASHES = 8
"""The fixed cost of a history entry, in hashes."""


@dataclass(frozen=True, slots=True)
class _Finished:
    """A finished request, with the hashes of its blocks and the digests of its tokens."""

    ticket_id: int
    block_hashes: Sequence[Any]
    parts: bytes


class _History:
    """The most recently finished requests, within ``MAX_HASHES``."""

    def __init__(self) -> None:
        self._finished: OrderedDict[str, _Finished] = OrderedDict()
        self._num_hashes = 0

    def add(self, request_id: str, finished: _Finished) -> None:
        self._forget(self._finished.pop(request_id, None))
        self._finished[request_id] = finished
        self._num_hashes += ENTRY_HASHES + len(finished.block_hashes)
        while self._num_hashes > MAX_HASHES:
            self._forget(self._finished.popitem(last=False)[1])

    def find(self, ticket: Ticket) -> _Finished | None:
        found = self._finished.get(ticket.request_id)
        return found if found and found.ticket_id == ticket.ticket_id else None

    def _forget(self, finished: _Finished | None) -> None:
        self._num_hashes -= ENTRY_HASHES + len(finished.block_hashes) if finished else 0


@dataclass(frozen=True, slots=True)
class _Pinned:
    wanted: Wanted
    blocks: tuple[list[Any], ...]
    block_hashes: list[Any]
    """At the lookup: a block whose hash has changed since holds other tokens."""
    num_tokens: int
    digest: bytes
    step: int


@dataclass(slots=True)
class _Granted:
    blocks: tuple[list[Any], ...]
    num_workers: int
    """Workers that may still send these blocks."""


def _whole_hit(manager: KVCacheManager, finished: _Finished, most: int) -> tuple[tuple[list[Any], ...], int]:
    """The cached blocks of a request's first ``most`` tokens: whole blocks of every group.

    vLLM's lookup also returns partly registered blocks, and vLLM goes on to write into those.
    """
    coordinator = manager.coordinator
    unit = lcm(*(group.block_size for group in coordinator.single_type_managers))
    blocks, num_tokens, _ = coordinator.find_longest_cache_hit(finished.block_hashes, most)
    if num_tokens % unit:
        most = num_tokens // unit * unit
        blocks, num_tokens, _ = coordinator.find_longest_cache_hit(finished.block_hashes, most)
    return blocks, 0 if num_tokens % unit else num_tokens


def _num_own(blocks: tuple[list[Any], ...]) -> int:
    """The number of blocks that a claim pins, without the null blocks of tokens outside a window."""
    return sum(not block.is_null for block in chain(*blocks))


class SoftOffers:
    """The soft offers of one engine. Only vLLM's scheduler may call it, because it uses the block pool."""

    def __init__(self, groups: Groups, adapters: Adapters, vllm_config: VllmConfig) -> None:
        self._groups, self._adapters = groups, adapters
        self._max_in_flight = vllm_config.max_concurrent_batches
        self._manager: KVCacheManager | None = None
        self._history = _History()
        self._pinned: deque[_Pinned] = deque()
        """Claims that are not granted yet, oldest first."""
        self._granted: dict[str, _Granted] = {}
        """By the name of the claim's offer."""
        self._step, self._young_until = 0, float("-inf")

    def bind(self, manager: KVCacheManager) -> None:
        """Use vLLM's prefix cache if it keeps blocks of every group: only then can it supply a prefix."""
        groups = manager.kv_cache_config.kv_cache_groups
        if manager.enable_caching and all(is_prefix_cached(group.kv_cache_spec) for group in groups):
            self._manager = manager

    @property
    def must_step(self) -> bool:
        """Whether a claim may arrive or end, which only a step can process."""
        return bool(self._pinned or self._granted) or time.monotonic() < self._young_until

    @property
    def is_hurried(self) -> bool:
        return bool(self._pinned)

    def offer(self, source: SourceEngine, request: Request) -> Ticket | None:
        """A ticket for what a finished request leaves in the prefix cache; None if that is nothing."""
        num_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        if self._manager is None or not is_identified(request) or num_tokens < PART_TOKENS:
            return None
        if not request.block_hashes:
            return None
        parts = digest_parts_of(request, num_tokens, self._adapters)
        ticket = source.offer_soft(request.request_id, len(parts) // PART_BYTES * PART_TOKENS, parts)
        self._history.add(request.request_id, _Finished(ticket.ticket_id, tuple(request.block_hashes), parts))
        self._young_until = time.monotonic() + YOUNG_SECONDS
        return ticket

    def serve(self, source: SourceEngine) -> None:
        """Once per step: pin the blocks of new claims, and grant claims whose blocks are written."""
        self._step += 1
        for wanted in source.claims(MAX_PER_STEP):
            self._pin(source, wanted)
        while self._pinned and self._step - self._pinned[0].step > self._max_in_flight:
            self._grant(source, self._pinned.popleft())

    def _pin(self, source: SourceEngine, wanted: Wanted) -> None:
        finished = self._history.find(wanted.ticket)
        if self._manager is None or finished is None:
            source.deny(wanted, "the request finished too long ago")
            return
        blocks, num_tokens = _whole_hit(self._manager, finished, wanted.num_tokens)
        if not num_tokens:
            source.deny(wanted, "its blocks were evicted")
            return
        found, pool = [*chain(*blocks)], self._manager.block_pool
        num_pinned = self._num_pinned
        if num_pinned + _num_own(blocks) > (pool.get_num_free_blocks() + num_pinned) // MAX_SHARE:
            source.deny(wanted, "too many blocks are claimed")
            return
        pool.touch(found)
        digest, hashes = part_at(finished.parts, wanted.num_tokens), [block.block_hash for block in found]
        self._pinned.append(_Pinned(wanted, blocks, hashes, num_tokens, digest, self._step))

    @property
    def _num_pinned(self) -> int:
        claims = [
            *(claim.blocks for claim in self._pinned),
            *(each.blocks for each in self._granted.values()),
        ]
        return sum(map(_num_own, claims))

    def _grant(self, source: SourceEngine, pinned: _Pinned) -> None:
        name = f"claim {pinned.wanted.number} of {pinned.wanted.ticket.request_id}"[:200]
        try:
            if [block.block_hash for block in chain(*pinned.blocks)] != pinned.block_hashes:
                raise SpecError("vLLM reused its blocks before the grant")
            tables = self._groups.tables(
                [[block.block_id for block in group] for group in pinned.blocks], pinned.num_tokens
            )
            held_from = self._groups.held_from(tables, pinned.num_tokens)
            ticket = source.offer(name, tables, pinned.num_tokens, digest=pinned.digest, held_from=held_from)
        except SpecError as refusal:
            log.warning("%s: claim denied: %s", name, refusal)
            self._free(pinned.blocks)
            source.deny(pinned.wanted, str(refusal))
            return
        self._granted[name] = _Granted(pinned.blocks, source.num_ranks)
        source.grant(pinned.wanted, ticket)

    def is_claim(self, name: str) -> bool:
        """Whether an ended offer was a claim: the workers report when they no longer send its blocks."""
        return name in self._granted

    def freed(self, claims: Mapping[str, int]) -> None:
        """Count the workers that no longer send each claim's blocks; the last one frees them."""
        for name, num_workers in claims.items():
            if name not in self._granted:
                continue  # a growing lease: its blocks belong to its request
            self._granted[name].num_workers -= num_workers
            if not self._granted[name].num_workers:
                self._free(self._granted.pop(name).blocks)

    def _free(self, blocks: tuple[list[Any], ...]) -> None:
        if self._manager is not None:
            for group in blocks:
                self._manager.block_pool.free_blocks(reversed(group))
