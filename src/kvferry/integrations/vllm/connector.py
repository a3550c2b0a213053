"""The connector class: each hook forwards to the scheduler side or the worker side."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_ip
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvferry.errors import KVFerryError, SpecError
from kvferry.integrations.known_vllm import unread_settings
from kvferry.integrations.vllm.contract import LOADED_GROUPS, check_contract
from kvferry.integrations.vllm.scheduler.side import SchedulerSide
from kvferry.integrations.vllm.shared.groups import check_one_group
from kvferry.integrations.vllm.shared.options import Options, check_transfer_config, is_through_host
from kvferry.integrations.vllm.shared.stats import LoadMetrics, LoadStats
from kvferry.integrations.vllm.shared.step import StepMetadata, StepNews
from kvferry.integrations.vllm.worker.side import WorkerSide
from kvferry.log import log_of
from kvferry.wire.messages import Join, decode_to_authority, encode

if TYPE_CHECKING:
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # vLLM 0.31 has no sources
    CacheHitSource = None

log = log_of(__name__)


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """A worker's join message to its scheduler. It contains the worker's secrets and is never printed."""

    join: bytes = field(repr=False)


class KVFerryConnector(KVConnectorBase_V1, SupportsHMA):
    """Fetches the KV cache of prefilled requests from other engines, with proved plans."""

    _cache_hit_source = CacheHitSource and CacheHitSource.P2P
    """The label of loaded tokens in ``vllm:prompt_tokens_cached_by_source``."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_with_vllm()
        if vllm_config.model_config.enable_sleep_mode:
            raise SpecError(
                "vLLM's sleep mode frees memory that kvferry has registered for transfers: start vLLM without"
                " sleep mode, or without this connector"
            )
        transfer = vllm_config.kv_transfer_config
        check_transfer_config(transfer, current_platform.device_type)
        options = Options.of(
            transfer.kv_connector_extra_config or {},
            host=get_ip(),
            is_through_host=is_through_host(transfer, current_platform.device_type),
        )
        bases = (KVConnectorBase_V1, SupportsHMA)
        check_contract(
            vllm.__version__, KVFerryConnector, bases, must_be_tested=options.must_version_be_tested
        )
        if not hasattr(KVConnectorBase_V1, LOADED_GROUPS):
            check_one_group(kv_cache_config, vllm.__version__)
        self._side: SchedulerSide | WorkerSide
        if role is KVConnectorRole.SCHEDULER:
            if unread := unread_settings(os.environ):
                log.warning("%s", unread)
            self._side = SchedulerSide(vllm_config, kv_cache_config, options)
        else:
            self._side = WorkerSide(vllm_config, kv_cache_config, options)

    @property
    def _scheduler(self) -> SchedulerSide:
        if not isinstance(self._side, SchedulerSide):
            raise KVFerryError("a scheduler hook was called in a worker")
        return self._side

    @property
    def _worker(self) -> WorkerSide:
        if not isinstance(self._side, WorkerSide):
            raise KVFerryError("a worker hook was called in the scheduler")
        return self._side

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Head-major, so that a rank's heads form long runs.

        MultiConnector compares the strings: the alias "HND" would not start beside an OffloadingConnector.
        """
        return "LBHNC"

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        return False

    # -- worker ------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        join = self._worker.join
        return Handshake(encode(join)) if join else None

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, StepMetadata) and isinstance(self._side, WorkerSide):
            self._side.mark(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        if isinstance(metadata, StepMetadata):
            self._worker.start(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return None

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return None

    def wait_for_save(self) -> None:
        self._worker.finish_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._worker.results()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.news()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self._side.stats()

    # -- scheduler ---------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.bind(kv_cache_manager)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        joins: list[Join] = []
        for shake in metadata.values():
            message = decode_to_authority(shake.join) if isinstance(shake, Handshake) else None
            if isinstance(message, Join):
                joins.append(message)
        self._scheduler.admit(joins)

    def on_new_request(self, request: Request) -> None:
        self._scheduler.new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.incoming.matched(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return self._kv_cache_config.transfer_group_ids

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduler.incoming.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        news, outgoing = connector_output.kv_connector_worker_meta, self._scheduler.outgoing
        outgoing.freed(connector_output.finished_sending or ())
        if isinstance(news, StepNews):
            outgoing.soft.freed(news.num_workers)
            outgoing.growing.computed(news.number)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request, block_ids)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """A state is always loaded, so a prefix hit may be deeper than the local states.

        False for models with windows or several groups: vLLM reports the blocks of one group only.
        """
        return isinstance(self._side, SchedulerSide) and self._side.groups.has_one_table

    def reset_cache(self) -> bool | None:
        self._scheduler.incoming.reset()
        return True

    def has_pending_push_work(self) -> bool:
        return isinstance(self._side, SchedulerSide) and self._side.must_step

    # -- both --------------------------------------------------------------------------------------

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return LoadStats(data) if data is not None else LoadStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return LoadMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        self._side.close()


def _log_with_vllm() -> None:
    """Send kvferry's log lines to vLLM's handlers, at vLLM's level."""
    ours, theirs = logging.getLogger("kvferry"), init_logger("vllm")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False
