"""What the connector takes for granted of vLLM 0.32. Whatever changes there fails here, by name."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("nixl", reason="NIXL is not installed")

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvferry.integrations.vllm import KVFerryConnector
from tests.vllm.conftest import Docks
from tests.vllm.pairs import FAMILIES

HOOKS = {
    "__init__": "self vllm_config role kv_cache_config",
    "bind_connector_metadata": "self connector_metadata",
    "bind_gpu_block_pool": "self gpu_block_pool",
    "bind_kv_cache_manager": "self kv_cache_manager",
    "build_connector_meta": "self scheduler_output",
    "build_connector_worker_meta": "self",
    "build_kv_connector_stats": "cls data",
    "build_prom_metrics": "cls vllm_config metric_types labelnames per_engine_labelvalues",
    "clear_connector_metadata": "self",
    "finish_forward": "self",
    "get_block_ids_with_load_errors": "self",
    "get_external_cache_hit_sources": "self request num_external_tokens",
    "get_finished": "self finished_req_ids",
    "get_finished_count": "self",
    "get_handshake_metadata": "self",
    "get_kv_connector_kv_cache_events": "self",
    "get_kv_connector_stats": "self",
    "get_loaded_kv_cache_group_ids": "self request",
    "get_mem_pool_context": "self",
    "get_num_new_matched_tokens": "self request num_computed_tokens",
    "get_required_kvcache_layout": "cls vllm_config",
    "get_transfer_results": "self finished_req_ids",
    "handle_preemptions": "self kv_connector_metadata",
    "has_connector_metadata": "self",
    "has_pending_block_frees": "self",
    "has_pending_push_work": "self",
    "on_new_request": "self request",
    "register_finished_partial_tail": "self request block_ids partial_tail_offloads",
    "register_kv_caches": "self kv_caches",
    "request_finished": "self request block_ids",
    "request_finished_all_groups": "self request block_ids",
    "requires_kv_delivery": "property",
    "requires_piecewise_for_cudagraph": "cls extra_config",
    "reset_cache": "self",
    "reset_capture_state": "self",
    "role": "property",
    "save_kv_layer": "self layer_name kv_layer attn_metadata kwargs",
    "set_host_xfer_buffer_ops": "self copy_operation",
    "set_xfer_handshake_metadata": "self metadata",
    "set_xfer_handshake_metadata_pp_aware": "self metadata",
    "shutdown": "self",
    "start_load_kv": "self forward_context kwargs",
    "supports_divergent_local_hybrid_hits": "property",
    "take_events": "self",
    "update_connector_output": "self connector_output",
    "update_state_after_alloc": "self request blocks num_external_tokens",
    "wait_for_layer_load": "self layer_name",
    "wait_for_save": "self",
}
"""Every hook of 0.32: a new one may be one that a connector must answer."""

_SPEC = "block_size dcp_sharded block_stride_alignment"
_ATTENTION = (
    f"{_SPEC} max_tp_shards num_kv_heads head_size dtype head_size_v kv_quant_mode page_size_padded"
    " num_head_slots state_content_bytes tokens_per_state"
)
_FULL = f"{_ATTENTION} sliding_window attention_chunk_size non_causal"
FIELDS: dict[type, str] = {
    KVConnectorTransferResults: "finished_sending finished_recving failed_recving",
    KVConnectorOutput: "finished_sending finished_recving kv_connector_stats kv_cache_events"
    " kv_connector_worker_meta invalid_block_ids failed_recving expected_finished_count",
    interface.KVCacheConfig: "num_blocks kv_cache_tensors kv_cache_groups prefix_cache_retention_interval"
    " kv_cache_layout hash_block_size cache_hit_alignment_tokens hisparse_host_num_blocks"
    " hisparse_host_block_stride hisparse_shared_host_pool kv_tp_replicas",
    interface.KVCacheGroupSpec: "layer_names kv_cache_spec is_eagle_group host_resident enable_kv_transfer"
    " role",
    interface.KVCacheTensor: "size layers layer_stride block_stride offset host_resident",
    interface.FullAttentionSpec: _FULL,
    interface.SlidingWindowSpec: f"{_ATTENTION} sliding_window extra_retained_tokens",
    interface.MLAAttentionSpec: f"{_FULL} cache_dtype_str alignment model_version cache_role"
    " is_index_group_leader non_causal_multi_token_decode",
    interface.MambaSpec: f"{_SPEC} shapes dtypes page_size_padded mamba_type mamba_cache_mode"
    " num_speculative_blocks num_prefill_checkpoint_blocks prefill_checkpoint_alignment num_heads"
    " tokens_per_state tp_replicated",
    interface.UniformTypeKVCacheSpecs: f"{_SPEC} kv_cache_specs",
}
STATUSES = (
    "WAITING WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR WAITING_FOR_REMOTE_KVS WAITING_FOR_STREAMING_REQ RUNNING"
    " PREEMPTED FINISHED_STOPPED FINISHED_LENGTH_CAPPED FINISHED_ABORTED FINISHED_IGNORED FINISHED_ERROR"
    " FINISHED_REPETITION"
)
REQUEST = (
    "request_id prompt_token_ids _all_token_ids num_prompt_tokens num_computed_tokens max_tokens status"
    " kv_transfer_params mm_features lora_request prompt_embeds cache_salt num_preemptions"
)


def _hooks(*classes: type) -> dict[str, str]:
    """Name -> parameters of what a class offers its connectors."""
    found = {}
    for cls in classes:
        for name, hook in vars(cls).items():
            value = getattr(hook, "__func__", hook)  # of a class method
            if name.startswith("_") and name != "__init__":
                continue
            if isinstance(value, property):
                found[name] = "property"
            elif inspect.isfunction(value):
                found[name] = " ".join(inspect.signature(value).parameters)
    return found


def test_hooks():
    assert _hooks(KVConnectorBase_V1, SupportsHMA) == HOOKS


def test_our_hooks_take_what_vllm_gives():
    ours = _hooks(KVFerryConnector)
    assert {name: ours[name] for name in ours if name in HOOKS} == {
        name: HOOKS[name] for name in ours if name in HOOKS
    }
    assert set(ours) <= set(HOOKS), "a hook that vLLM never calls"


@pytest.mark.parametrize("cls", FIELDS, ids=lambda cls: cls.__name__)
def test_fields(cls: Any):
    assert " ".join(field.name for field in dataclasses.fields(cls)) == FIELDS[cls]


def test_the_cache_configuration_says_what_is_transferred():
    for name in ("transfer_group_ids", "has_mamba_layers", "needs_kv_cache_zeroing"):
        assert hasattr(interface.KVCacheConfig, name), name


def test_statuses():
    assert " ".join(status.name for status in RequestStatus) == STATUSES


def test_a_request_has(docks: Docks):
    engine = docks.shared("src", FAMILIES["llama"])
    asked = engine.ask([1, 2, 3])
    request: Request = engine.core.scheduler.requests[asked.request_id]
    assert [name for name in REQUEST.split() if not hasattr(request, name)] == []
    engine.finish(asked)


# -- what kills an engine core: the bed must die of it too, or its tests mean nothing


@pytest.mark.parametrize(
    ("results", "error"),
    [
        ({"finished_recving": {"nobody"}}, AssertionError),
        ({"finished_sending": {"nobody"}}, AssertionError),
        ({"finished_recving": {"running"}}, AssertionError),
        ({"finished_sending": {"running"}}, AssertionError),
    ],
    ids=str,
)
def test_a_report_that_kills_the_core(docks: Docks, results: dict[str, set[str]], error: type[Exception]):
    engine = docks.own(FAMILIES["llama"])
    engine.ask([1, 2, 3], 50, request_id="running")
    engine.step()
    worker = engine.workers[0].connector
    with (
        patch.object(worker, "get_transfer_results", return_value=KVConnectorTransferResults(**results)),
        pytest.raises(error),
    ):
        engine.step()


def test_a_report_of_blocks_kills_a_core_with_several_groups(docks: Docks):
    engine = docks.own(FAMILIES["gemma3"])
    engine.ask([1, 2, 3], 50)
    engine.step()
    worker = engine.workers[0].connector
    with (
        patch.object(worker, "get_block_ids_with_load_errors", return_value={1}),
        pytest.raises(RuntimeError),
    ):
        engine.step()
