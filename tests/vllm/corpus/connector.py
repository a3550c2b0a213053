"""A connector that writes what each worker's cache looks like, and moves nothing."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from kvferry.integrations.vllm.worker.describe import WorkerRank, describe
from kvferry.wire import manifest_to_json


class DumpConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM has no types here
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = vllm_config

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str:
        return "HND"

    def register_kv_caches(self, kv_caches: Any) -> None:
        tp, pp = get_tp_group(), get_pp_group()
        rank = pp.rank_in_group * tp.world_size + tp.rank_in_group
        place = WorkerRank("engine", rank, tp.rank_in_group, tp.world_size)
        config = self._config.model_config
        manifest = replace(
            describe(self._config, self._kv_cache_config, kv_caches, place), model=config.model
        )
        ranks = tuple(
            replace(r, regions=tuple(replace(region, address=0) for region in r.regions))
            for r in manifest.ranks
        )
        path = Path(os.environ["KVFERRY_DUMP"]) / f"{rank}.json"
        path.write_bytes(manifest_to_json(replace(manifest, ranks=ranks)))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return None

    def wait_for_layer_load(self, layer_name: str) -> None:
        return None

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return None

    def wait_for_save(self) -> None:
        return None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        return None

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None
