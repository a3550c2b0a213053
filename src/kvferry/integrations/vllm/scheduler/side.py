"""The connector's scheduler side: selects which requests are offered, and which are fetched."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from kvferry.endpoint.claiming import Claimant
from kvferry.endpoint.metric_table import Changes
from kvferry.integrations.vllm.scheduler.incoming import Incoming, PrefixCache, cannot_keep_out
from kvferry.integrations.vllm.scheduler.outgoing import Outgoing
from kvferry.integrations.vllm.scheduler.tables import Adapters, BlockIds, Groups
from kvferry.integrations.vllm.shared.dump import dump_engine
from kvferry.integrations.vllm.shared.options import Options
from kvferry.integrations.vllm.shared.stats import LoadStats
from kvferry.integrations.vllm.shared.step import StepMetadata
from kvferry.log import log_of
from kvferry.wire.messages import Join

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

log = log_of(__name__)

IDLE_SECONDS, HURRIED_SECONDS = 0.005, 0.0005


class SchedulerSide:
    def __init__(self, vllm_config: VllmConfig, config: KVCacheConfig, options: Options) -> None:
        transfer = vllm_config.kv_transfer_config
        engine = transfer.engine_id or secrets.token_hex(8)
        self._is_producer, self._is_consumer = transfer.is_kv_producer, transfer.is_kv_consumer
        self._options, self._changes = options, Changes()
        self._is_alone = vllm_config.parallel_config.data_parallel_size == 1
        """Whether no other data-parallel engine waits for this one's steps."""
        self.groups = Groups(vllm_config, config)
        is_reused = bool(vllm_config.cache_config.enable_prefix_caching and self.groups.windows)
        self._must_bind, self._is_bound = self._is_consumer and is_reused, False
        if self._must_bind:
            self.groups.check_reuse()
        adapters = Adapters(is_unchecked=options.is_identity_unchecked)
        self.outgoing = Outgoing(vllm_config, self.groups, options, engine, adapters)
        can_claim = self._is_producer and self._is_consumer and options.is_reading_back
        # An optional read must not fail a request.
        can_claim = can_claim and transfer.kv_load_failure_policy == "recompute"
        self.incoming = Incoming(
            self.groups,
            adapters,
            self.outgoing.take_back,
            options.trust,
            partial(Claimant, engine, trust=options.trust),
            is_reading_back=can_claim,
        )

    def bind(self, manager: KVCacheManager) -> None:
        if self._is_consumer:
            self.incoming.bind(PrefixCache.of(manager, self.groups.windows))
        if self._is_consumer and self._is_producer and self._options.is_reading_back:
            self.outgoing.soft.bind(manager)
        if self._is_producer:
            self.outgoing.growing.bind(manager)
        self._is_bound = True

    def admit(self, joins: Sequence[Join]) -> None:
        if self._must_bind and not self._is_bound:
            raise cannot_keep_out("call of the hook bind_kv_cache_manager")
        if self._options.dump:
            dump_engine(self._options.dump, joins)
        if self._is_producer:
            self.outgoing.admit(joins)

    def new_request(self, request: Request) -> None:
        if not isinstance(request.kv_transfer_params or {}, dict):  # a client can send it in vllm_xargs
            kind = type(request.kv_transfer_params).__name__
            log.warning("%s: kv_transfer_params are ignored: not an object, but %s", request.request_id, kind)
            request.kv_transfer_params = None
        if self._is_producer:
            self.outgoing.new_request(request)
        if self._is_consumer:
            self.incoming.new_request(request)

    def finished(self, request: Request, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        loaded_from = self.incoming.take_held_from(request.request_id)
        self.incoming.finished(request)
        return self.outgoing.finished(request, block_ids, loaded_from)

    @property
    def must_step(self) -> bool:
        return self.outgoing.has_pinned or self.incoming.has_news or self.incoming.is_claiming

    def step(self, output: SchedulerOutput) -> StepMetadata:
        """Metadata for the workers: events since the last step, and properties of the next one."""
        scheduled = output.num_scheduled_tokens.keys()
        self.incoming.take_claims()
        is_idle = self.outgoing.has_pinned or self.incoming.is_claiming
        if self._is_alone and not scheduled and is_idle and not self.incoming.has_news:
            # Such a step only polls for events.
            time.sleep(HURRIED_SECONDS if self.outgoing.soft.is_hurried else IDLE_SECONDS)
        step = self.incoming.step()
        self.outgoing.tell(step, output)
        step.invitation, step.generation = self.outgoing.take_invitation(), self.outgoing.generation
        # Claims are granted after this step, its draft model included.
        step.is_for_others = self.outgoing.is_prefilling(scheduled) or self.outgoing.soft.is_hurried
        return step

    def stats(self) -> LoadStats | None:
        stats = LoadStats()
        stats.change(self._changes.since({**self.outgoing.figures, **self.incoming.figures}))
        return None if stats.is_empty() else stats

    def close(self) -> None:
        self.incoming.close()
        self.outgoing.close()
