"""Finished requests in vLLM's prefix cache: soft offers name them, and claims pin what is left of them.

An offer pins nothing. A claim asks vLLM's own lookup how much of the request's first tokens every group can
still supply, and pins that. vLLM registers blocks when it schedules the step that fills them; so what was
found is granted only after every step that was in flight then has ended.
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
from kvferry.log import log_of
from kvferry.runtime.values import Wanted
from kvferry.wire.ticket import PART_BYTES, PART_TOKENS, Ticket, part_at

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

log = log_of(__name__)

MAX_HASHES = 1 << 20
"""Hashes of blocks that are remembered, over all offers: some 100 MB if vLLM has forgotten all of them."""
YOUNG_SECONDS = 10.0
"""How long an idle engine keeps stepping after its last offer: a claim is served only in a step."""
MAX_PER_STEP = 8
"""Claims that are looked up in one step: decoding goes on."""
MAX_SHARE = 4
"""Claims pin at most one in so many of the blocks that no request uses: running requests keep theirs."""
ENTRY_HASHES = 8
"""What an entry of the history counts for, besides its hashes."""


@dataclass(frozen=True, slots=True)
class _Finished:
    """A request that ended: by what its blocks are found, and its tokens compared."""

    ticket_id: int
    block_hashes: Sequence[Any]
    parts: bytes


class _History:
    """The requests that ended last, as many as there is room for."""

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
    """Of all of them: a block whose hash has changed meanwhile holds something else."""
    num_tokens: int
    digest: bytes
    step: int


@dataclass(slots=True)
class _Granted:
    blocks: tuple[list[Any], ...]
    num_workers: int
    """Which may still send some of it."""


def _whole_hit(manager: KVCacheManager, finished: _Finished, most: int) -> tuple[tuple[list[Any], ...], int]:
    """What the prefix cache has of a request's first tokens, ``most`` at most: whole blocks of every group.

    vLLM also finds what it has registered of a block in part, and goes on to write into that block.
    """
    coordinator = manager.coordinator
    unit = lcm(*(group.block_size for group in coordinator.single_type_managers))
    blocks, num_tokens, _ = coordinator.find_longest_cache_hit(finished.block_hashes, most)
    if num_tokens % unit:
        most = num_tokens // unit * unit
        blocks, num_tokens, _ = coordinator.find_longest_cache_hit(finished.block_hashes, most)
    return blocks, 0 if num_tokens % unit else num_tokens


def _num_own(blocks: tuple[list[Any], ...]) -> int:
    """The number of blocks that a claim pins; vLLM's null block stands for those that a window has left."""
    return sum(not block.is_null for block in chain(*blocks))


class SoftOffers:
    """Of one engine. Called by vLLM's scheduler only, as its block pool wants it."""

    def __init__(self, groups: Groups, adapters: Adapters, vllm_config: VllmConfig) -> None:
        self._groups, self._adapters = groups, adapters
        self._max_in_flight = vllm_config.max_concurrent_batches
        self._manager: KVCacheManager | None = None
        self._history = _History()
        self._pinned: deque[_Pinned] = deque()
        """Found, and not granted yet; the oldest first."""
        self._granted: dict[str, _Granted] = {}
        """By the name under which it is offered."""
        self._step, self._young_until = 0, float("-inf")

    def bind(self, manager: KVCacheManager) -> None:
        """vLLM has made its prefix cache. It can supply a prefix only if it keeps blocks of every group."""
        groups = manager.kv_cache_config.kv_cache_groups
        if manager.enable_caching and all(group.kv_cache_spec.prefix_cacheable for group in groups):
            self._manager = manager

    @property
    def must_step(self) -> bool:
        """Whether a claim may come, or end, that only a step can answer."""
        return bool(self._pinned or self._granted) or time.monotonic() < self._young_until

    @property
    def is_hurried(self) -> bool:
        return bool(self._pinned)

    def offer(self, source: SourceEngine, request: Request) -> Ticket | None:
        """A ticket without blocks for what a finished request leaves in the prefix cache; None if nothing."""
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
        """Once per step: pin what is claimed, grant what is written."""
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
                raise SpecError("vLLM has changed its blocks meanwhile")
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
        """Whether an offer that is over was a claim: the workers report when they send nothing of it."""
        return name in self._granted

    def freed(self, claims: Mapping[str, int]) -> None:
        """So many workers send nothing of these claims any more; after the last, their blocks are vLLM's."""
        for name, num_workers in claims.items():
            if name not in self._granted:
                continue  # of a growing lease: its blocks are its request's
            self._granted[name].num_workers -= num_workers
            if not self._granted[name].num_workers:
                self._free(self._granted.pop(name).blocks)

    def _free(self, blocks: tuple[list[Any], ...]) -> None:
        if self._manager is not None:
            for group in blocks:
                self._manager.block_pool.free_blocks(reversed(group))
