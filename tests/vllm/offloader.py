"""A connector that stands beside ours in vLLM's MultiConnector, as offloading does, which needs a GPU.

It keeps the blocks of each finished request for a few steps, as if it saved them, and never has anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)

NUM_STEPS = 4
"""A save takes so long."""


@dataclass
class Saves(KVConnectorMetadata):  # type: ignore[misc]
    """What is to be saved from this step on."""

    request_ids: list[str] = field(default_factory=list)


class Offloader(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The scheduler's side and a worker's in one: each process uses a part of it."""

    num_saved = 0
    """Of all of them, in this process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._finished: list[str] = []
        self._pinned: set[str] = set()
        self._under_way: dict[str, int] = {}

    # -- scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert num_external_tokens == 0, "somebody else loads"

    def build_connector_meta(self, scheduler_output: Any) -> Saves:
        saves, self._finished = Saves(self._finished), []
        return saves

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        self._finished.append(request.request_id)
        self._pinned.add(request.request_id)
        return True, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return self.request_finished(request, [])

    def has_pending_push_work(self) -> bool:
        return bool(self._pinned)

    def update_connector_output(self, connector_output: Any) -> None:
        self._pinned -= connector_output.finished_sending or set()

    # -- worker

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        saves = self._get_connector_metadata()
        assert isinstance(saves, Saves)
        self._under_way |= dict.fromkeys(saves.request_ids, NUM_STEPS)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return None

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        return None

    def wait_for_save(self) -> None:
        return None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self._under_way = {request_id: left - 1 for request_id, left in self._under_way.items()}
        saved = {request_id for request_id, left in self._under_way.items() if left <= 0}
        for request_id in saved:
            del self._under_way[request_id]
        Offloader.num_saved += len(saved)
        return KVConnectorTransferResults(
            finished_sending=saved, finished_recving=set(), failed_recving=set()
        )
