"""The connector's part in each vLLM worker: memory is registered, loads are fetched, results reported."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvferry.endpoint import Destination
from kvferry.integrations.vllm.describe import Place, describe
from kvferry.integrations.vllm.options import Options
from kvferry.integrations.vllm.scheduler import StepMetadata
from kvferry.transport.nixl import NixlTransport
from kvferry.wire import manifest_to_msgpack
from kvferry.wire.messages import PROTOCOL, Join

log = logging.getLogger("kvferry")


class WorkerSide:
    """One worker's memory, and the loads under way into it."""

    def __init__(self, vllm_config: VllmConfig, config: KVCacheConfig, options: Options) -> None:
        self._vllm_config, self._config, self._options = vllm_config, config, options
        self._destination: Destination | None = None
        self._join: Join | None = None
        self._requests: dict[int, str] = {}
        self._failed: set[str] = set()
        self._sent: set[str] = set()

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Describe the caches, and make their memory known to the transport."""
        tp, pp = get_tp_group(), get_pp_group()
        engine = self._vllm_config.kv_transfer_config.engine_id or "vllm"
        rank = pp.rank_in_group * tp.world_size + tp.rank_in_group
        place = Place(engine, rank, tp.rank_in_group, tp.world_size)
        manifest = describe(self._vllm_config, self._config, caches, place)
        transport = NixlTransport()
        self._destination = Destination(
            manifest,
            rank,
            transport,
            reader=f"{engine}#{self._vllm_config.instance_id}",
            num_ranks=tp.world_size * pp.world_size,
            secret=self._options.secret,
            timing=self._options.timing,
        )
        self._join = Join(
            PROTOCOL, engine, rank, transport.kind, manifest_to_msgpack(manifest), transport.card()
        )

    @property
    def join(self) -> Join | None:
        """What the lease authority must know of this worker."""
        return self._join

    def start(self, step: StepMetadata) -> None:
        """Start the step's loads; remember what was released."""
        self._sent.update(step.released)
        for load in step.loads:
            if load.ticket is None or self._destination is None:
                log.error("cannot load %s: %s", load.request_id, load.reason)
                self._failed.add(load.request_id)
                continue
            handle = self._destination.fetch(load.ticket, load.tables, load.need, kept=load.kept)
            self._requests[handle] = load.request_id

    def results(self) -> KVConnectorTransferResults:
        """What ended since the last step. A failed load is reported as failed, never as good."""
        done: set[str] = set()
        failed, self._failed = self._failed, set()
        for report in self._destination.poll() if self._destination else ():
            request_id = self._requests.pop(report.handle, None)
            if request_id is None:
                continue
            done.add(request_id)
            if report.failure is not None:
                log.error("load of %s failed: %s", request_id, report.failure)
                failed.add(request_id)
        sent, self._sent = self._sent, set()
        return KVConnectorTransferResults(
            finished_sending=sent, finished_recving=done | failed, failed_recving=failed
        )

    def close(self) -> None:
        """Give the memory back."""
        if self._destination is not None:
            self._destination.close()
