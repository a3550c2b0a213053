"""The parts of vLLM that the connector depends on, checked against the installed vLLM at start.

Without the check, a renamed hook or changed parameters would fail in the middle of a request, or silently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from importlib import import_module
from inspect import isfunction, signature

from kvferry.errors import SpecError
from kvferry.integrations.known_vllm import Standing, standing_of, supported_text
from kvferry.log import log_of

log = log_of(__name__)

PROPERTY = "a property"
LOADED_GROUPS = "get_loaded_kv_cache_group_ids"
OPTIONAL = frozenset({LOADED_GROUPS, "supports_sleep_mode"})
"""Hooks that some versions lack: without the first, only models with one full-attention group work."""
_HOOKS = """
bind_connector_metadata bind_gpu_block_pool bind_kv_cache_manager build_connector_meta
build_connector_worker_meta build_kv_connector_stats build_prom_metrics clear_connector_metadata
finish_forward get_block_ids_with_load_errors get_external_cache_hit_sources get_finished
get_finished_count get_handshake_metadata get_kv_connector_kv_cache_events get_kv_connector_stats
get_loaded_kv_cache_group_ids get_mem_pool_context get_num_new_matched_tokens get_required_kvcache_layout
get_transfer_results handle_preemptions has_connector_metadata has_pending_block_frees
has_pending_push_work on_new_request register_finished_partial_tail register_kv_caches request_finished
request_finished_all_groups requires_kv_delivery requires_piecewise_for_cudagraph reset_cache
reset_capture_state restore_kv_caches role save_kv_layer set_host_xfer_buffer_ops
set_xfer_handshake_metadata set_xfer_handshake_metadata_pp_aware shutdown start_load_kv
supports_divergent_local_hybrid_hits supports_sleep_mode take_events unregister_kv_caches
update_connector_output update_state_after_alloc wait_for_layer_load wait_for_save
"""
KNOWN_HOOKS = frozenset(_HOOKS.split())
"""Hooks that the connector overrides, or whose defaults suit it. A new hook may need an override."""

_INTERFACE = "vllm.v1.kv_cache_interface"
_PAGES = (
    "block_size dtype kv_quant_mode num_kv_heads head_size head_size_v state_content_bytes num_head_slots"
)
FIELDS = {
    "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorTransferResults": (
        "finished_sending finished_recving failed_recving"
    ),
    "vllm.v1.outputs.KVConnectorOutput": "finished_sending kv_connector_worker_meta",
    f"{_INTERFACE}.KVCacheConfig": "num_blocks kv_cache_groups transfer_group_ids",
    f"{_INTERFACE}.KVCacheGroupSpec": "layer_names kv_cache_spec host_resident",
    f"{_INTERFACE}.FullAttentionSpec": f"{_PAGES} tokens_per_state max_tp_shards dcp_sharded has_layer_views",
    f"{_INTERFACE}.SlidingWindowSpec": f"{_PAGES} tokens_per_state max_tp_shards sliding_window",
    f"{_INTERFACE}.MLAAttentionSpec": f"{_PAGES} tokens_per_state max_tp_shards",
    f"{_INTERFACE}.MambaSpec": (
        "block_size shapes dtypes mamba_cache_mode num_speculative_blocks tp_replicated"
    ),
    f"{_INTERFACE}.ChunkedLocalAttentionSpec": "attention_chunk_size",
    f"{_INTERFACE}.UniformTypeKVCacheSpecs": "kv_cache_specs first_spec",
    "vllm.v1.core.sched.output.SchedulerOutput": (
        "num_scheduled_tokens preempted_req_ids scheduled_new_reqs scheduled_cached_reqs"
    ),
    "vllm.v1.core.sched.output.NewRequestData": "req_id num_computed_tokens",
    "vllm.v1.core.sched.output.CachedRequestData": "req_ids num_computed_tokens",
    "vllm.v1.core.kv_cache_manager.KVCacheManager": "get_block_ids",
    "vllm.v1.request.RequestStatus": "FINISHED_LENGTH_CAPPED FINISHED_STOPPED",
}
"""By class: the attributes and arguments that the connector uses."""


def check_contract(version: str, ours: type, bases: tuple[type, ...], *, must_be_tested: bool) -> None:
    """Raise SpecError if the connector cannot work with this vLLM; warn about anything new or untested."""
    standing = standing_of(version)
    if must_be_tested and standing is not Standing.TESTED:
        raise SpecError(
            f"vLLM {version} was not tested with this kvferry (tested: {supported_text()}), and vllm_version"
            " is 'tested'"
        )
    if broken := [*_broken_hooks(ours, hooks(*bases)), *_missing_fields(FIELDS)]:
        raise SpecError(
            f"vLLM {version} differs from what kvferry's connector needs: {'; '.join(broken)}. Tested"
            f" versions: {supported_text()}"
        )
    if standing is not Standing.TESTED:
        tested = supported_text()
        log.warning("vLLM %s is %s (%s); all required hooks are present", version, standing.value, tested)
    if new := sorted(set(hooks(*bases)) - KNOWN_HOOKS - {"__init__"}):
        log.warning("vLLM %s has hooks that kvferry does not know: %s", version, ", ".join(new))


def hooks(*classes: type) -> dict[str, str]:
    """Name -> parameters of the hooks that the classes themselves define."""
    found = {}
    for cls in classes:
        for name, hook in vars(cls).items():
            value = getattr(hook, "__func__", hook)  # of a class method
            if name.startswith("_") and name != "__init__":
                continue
            if isinstance(value, property):
                found[name] = PROPERTY
            elif isfunction(value):
                found[name] = ", ".join(signature(value).parameters)
    return found


def _broken_hooks(ours: type, theirs: Mapping[str, str]) -> Iterator[str]:
    for name, parameters in hooks(ours).items():
        if name not in theirs:
            if name not in OPTIONAL:
                yield f"the hook {name} is missing"
        elif theirs[name] != parameters:
            yield f"{name} takes ({theirs[name]}), expected ({parameters})"


def _missing_fields(expected: Mapping[str, str]) -> Iterator[str]:
    for path, names in expected.items():
        module, _, name = path.rpartition(".")
        cls = getattr(import_module(module), name, None)
        if cls is None:
            yield f"{path} is missing"
            continue
        fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
        if missing := [each for each in names.split() if each not in fields and not hasattr(cls, each)]:
            yield f"{name} has no {', '.join(missing)}"
