"""Describes a vLLM worker's cache as a manifest.

Addresses, strides and sizes come from the tensors. A layer's kind comes from its own specification,
unwrapped where a group combines several. The order inside a block or a recurrent slot comes from
``layouts``.

A pipeline stage's worker describes only its own layers. Layer names and group numbers are those of the whole
model on every stage, so the stages' manifests merge into the engine's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    CircularBufferSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)

from kvferry.core.manifest import Manifest, Rank
from kvferry.errors import SpecError
from kvferry.integrations.vllm.shared.groups import describe_group, group_name
from kvferry.integrations.vllm.worker.described_layer import DescribedLayer, regions_of
from kvferry.integrations.vllm.worker.layout_check import LayoutCheck
from kvferry.integrations.vllm.worker.layouts import (
    CacheTensor,
    Contents,
    known_attention,
    known_state,
    opaque,
)


@dataclass(frozen=True)
class WorkerRank:
    engine: str
    rank: int
    tp_rank: int
    tp_size: int


def describe(
    vllm_config: VllmConfig,
    config: KVCacheConfig,
    caches: Mapping[str, torch.Tensor],
    worker: WorkerRank,
    check: LayoutCheck | None = None,
) -> Manifest:
    """The manifest of one worker. ``check`` verifies known layouts; without it they are trusted."""
    parallel = vllm_config.parallel_config
    if parallel.prefill_context_parallel_size > 1:
        raise SpecError("prefill_context_parallel_size > 1 is not supported by kvferry: set it to 1")
    dcp_size = parallel.decode_context_parallel_size
    layers = list(described_layers(vllm_config, config, caches, worker))
    if check is not None:
        layers = check.settle(layers)
    regions = regions_of({layer.name: layer.cache.tensor for layer in layers})
    return Manifest(
        engine=worker.engine,
        model=vllm_config.model_config.model,
        states=tuple(state for layer in layers for state in layer.states),
        groups=tuple(describe_group(config, i, dcp_size) for i in config.transfer_group_ids),
        ranks=(
            Rank(
                worker.rank,
                tuple(regions.values()),
                tuple(view for layer in layers for view in layer.views(regions)),
            ),
        ),
    )


# -- layers --------------------------------------------------------------------------------------------


def described_layers(
    vllm_config: VllmConfig, config: KVCacheConfig, caches: Mapping[str, torch.Tensor], worker: WorkerRank
) -> Iterator[DescribedLayer]:
    """The layers that own a cache; layers that share it become aliases."""
    parallel = vllm_config.parallel_config
    layer_objects = vllm_config.compilation_config.static_forward_context
    owners = {name: _owner_of(layer_objects.get(name)) for name in caches}
    named = [
        (index, name)
        for index in config.transfer_group_ids
        for name in config.kv_cache_groups[index].layer_names
        if name in caches and not owners[name]
    ]
    for index, name in named:
        spec = _spec_of(config.kv_cache_groups[index].kv_cache_spec, name)
        cache = CacheTensor(
            name,
            spec,
            layer_objects.get(name),
            caches[name],
            worker.tp_size,
            _total_heads(vllm_config, spec, worker.tp_size),
            config.num_blocks,
            parallel.decode_context_parallel_size if spec.dcp_sharded else 1,
            parallel.cp_kv_cache_interleave_size,
        )
        aliases = tuple(other for other, owner in owners.items() if owner == name)
        yield DescribedLayer(cache, _contents(cache), group_name(index), worker.tp_rank, aliases)


def _owner_of(layer: Any) -> str:
    return getattr(layer, "kv_sharing_target_layer_name", None) or ""


def _spec_of(spec: KVCacheSpec, layer: str) -> KVCacheSpec:
    """A layer's own specification, unwrapped if its group combines several."""
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _contents(cache: CacheTensor) -> Contents:
    found = None
    if isinstance(cache.spec, MambaSpec):
        found = known_state(cache)
    elif isinstance(cache.spec, AttentionSpec) and not isinstance(cache.spec, CircularBufferSpec):
        found = known_attention(cache)
    return found or opaque(cache)


# -- heads ---------------------------------------------------------------------------------------------


def _total_heads(vllm_config: VllmConfig, spec: KVCacheSpec, tp_size: int) -> int:
    """KV heads over all ranks. A layer knows only its share, and ranks may hold replicas of a head.

    If several counts give this share, the largest is used. Too large a count makes unequal engines reject
    each other; too small a count would treat distinct heads as replicas.
    """
    share = int(getattr(spec, "num_kv_heads", 1))
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    counts: set[int] = set()
    models: tuple[Any, ...] = (vllm_config.model_config, draft)
    for model in models:
        if (config := getattr(model, "hf_text_config", None)) is not None:
            kinds = _counts_by_width(config.to_dict())
            of_this_width = kinds.get(getattr(spec, "head_size", None), set())
            if len(kinds) > 1 and len(of_this_width) == 1:
                return min(of_this_width)
            counts |= {int(model.get_total_num_kv_heads()), *_head_counts(config)}
    return max((count for count in counts if share == max(1, count // tp_size)), default=share * tp_size)


def _counts_by_width(config: Mapping[str, Any]) -> dict[int | None, set[int]]:
    """KV head counts by head width. Gemma-4's full-attention layers have fewer, wider heads: its
    configuration lists them per layer, or in ``global_*`` keys before transformers 5.19.

    >>> few = {"head_dim": 128, "num_key_value_heads": 1}
    >>> _counts_by_width({"head_dim": 64, "num_key_value_heads": 2, "per_layer_config": {"5": few}})
    {64: {2}, 128: {1}}
    """
    layers = [config, *({**config, **layer} for layer in (config.get("per_layer_config") or {}).values())]
    kinds = [(layer.get("head_dim"), layer.get("num_key_value_heads")) for layer in layers]
    if config.get("attention_k_eq_v"):
        kinds.append((config.get("global_head_dim"), config.get("num_global_key_value_heads")))
    found: dict[int | None, set[int]] = {}
    for width, num_heads in kinds:
        if width and num_heads:
            found.setdefault(width, set()).add(num_heads)
    return found


def _head_counts(config: Any) -> Iterator[int]:
    """Every KV head count in a model's configuration, for any layer."""
    for key, value in config.to_dict().items():
        if "kv_heads" in key or "key_value_heads" in key:
            values = value if isinstance(value, list) else [value]
            yield from (count for count in values if isinstance(count, int) and count > 0)
