"""What a vLLM worker's cache is made of, as a manifest.

Addresses, strides and sizes are read from the tensors; the kind of each layer from its own specification,
unwrapped from whatever holds it; the order inside a block from ``interiors``, that of a recurrent slot from
``states``; what neither knows is ``opaque``.

A worker of a pipeline stage describes its own layers. Names of layers, and the numbers of groups, are those
of the whole model on every stage, so the stages' manifests merge into the engine's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvferry.core.manifest import Manifest, Rank
from kvferry.core.request import need_of
from kvferry.core.span import Span, Spans
from kvferry.core.state import Addressing, Group
from kvferry.errors import SpecError
from kvferry.integrations.vllm.interiors import Contents, Subject, known
from kvferry.integrations.vllm.layers import Layer, regions_of
from kvferry.integrations.vllm.opaque import opaque
from kvferry.integrations.vllm.states import known_state

POOL = "blocks"


@dataclass(frozen=True)
class Place:
    """Where a worker stands in its engine."""

    engine: str
    rank: int
    tp_rank: int
    tp_size: int


def describe(
    vllm_config: VllmConfig, config: KVCacheConfig, caches: Mapping[str, torch.Tensor], place: Place
) -> Manifest:
    """The manifest of one worker: its engine's states and groups as far as it has them, and its memory."""
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise SpecError("kvferry does not describe context-parallel vLLM engines yet")
    layers = list(_layers(vllm_config, config, caches, place))
    regions = regions_of({layer.name: layer.subject.tensor for layer in layers})
    return Manifest(
        engine=place.engine,
        model=vllm_config.model_config.model,
        states=tuple(state for layer in layers for state in layer.states),
        groups=tuple(describe_group(config, i) for i in config.transfer_group_ids),
        ranks=(
            Rank(
                place.rank,
                tuple(regions.values()),
                tuple(view for layer in layers for view in layer.views(regions)),
            ),
        ),
    )


# -- groups --------------------------------------------------------------------------------------------


def group_name(index: int) -> str:
    """Our name of a KV cache group."""
    return f"group-{index}"


def needed_tokens(config: KVCacheConfig, index: int, num_tokens: int, num_kept: int = 0) -> Spans:
    """The tokens that a group of a request must load. Chunked attention reads its last chunk only."""
    group = describe_group(config, index)
    spec = _first(config.kv_cache_groups[index].kv_cache_spec)
    if not isinstance(spec, ChunkedLocalAttentionSpec):
        return need_of(group, num_tokens, num_kept)
    # vLLM keeps the blocks of the chunk that the next token falls into.
    oldest = num_tokens // spec.attention_chunk_size * spec.attention_chunk_size
    start = max(oldest, num_kept)
    return (Span(start, num_tokens),) if start < num_tokens else ()


def describe_group(config: KVCacheConfig, index: int) -> Group:
    """A group of the scheduler's, as all of its workers describe it."""
    group = config.kv_cache_groups[index]
    spec = _first(group.kv_cache_spec)
    _check_group(group, spec)
    name = group_name(index)
    if isinstance(spec, MambaSpec | CircularBufferSpec):
        return Group(name, config.num_blocks, addressing=Addressing.SLOT, pool=POOL)
    return Group(name, config.num_blocks, spec.block_size, pool=POOL, window=_window(spec))


_group = describe_group


def _check_group(group: KVCacheGroupSpec, spec: KVCacheSpec) -> None:
    """Refuse, by name, what is not the cache of a request's own tokens on the device."""
    kind = type(spec).__name__
    if group.host_resident or not spec.has_layer_views:
        raise SpecError(f"kvferry does not describe caches that vLLM keeps on the host ({kind})")
    if isinstance(spec, CrossAttentionSpec):
        raise SpecError("kvferry does not describe cross-attention: its tokens are the encoder's")


def _window(spec: KVCacheSpec) -> int:
    """Tokens that the next one reads. vLLM's window counts that one too, and frees what is before it."""
    match spec:
        case SlidingWindowSpec():
            return max(1, int(spec.sliding_window) - 1)
        case ChunkedLocalAttentionSpec():
            return int(spec.attention_chunk_size)
        case _:
            return 0


def _first(spec: KVCacheSpec) -> KVCacheSpec:
    return spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec


# -- layers --------------------------------------------------------------------------------------------


def _layers(
    vllm_config: VllmConfig, config: KVCacheConfig, caches: Mapping[str, torch.Tensor], place: Place
) -> Iterator[Layer]:
    """The layers that own a cache; those that share one are its aliases."""
    layer_objects = vllm_config.compilation_config.static_forward_context
    named = [
        (index, name)
        for index in config.transfer_group_ids
        for name in config.kv_cache_groups[index].layer_names
        if name in caches
    ]
    aliases = _aliases(named, caches)
    for index, name in named:
        if name not in aliases:
            continue
        spec = _spec_of(config.kv_cache_groups[index].kv_cache_spec, name)
        subject = Subject(
            name,
            spec,
            layer_objects.get(name),
            caches[name],
            place.tp_size,
            _total_heads(vllm_config, name, spec, place.tp_size),
            config.num_blocks,
        )
        yield Layer(subject, _contents(subject), group_name(index), place.tp_rank, tuple(aliases[name]))


def _aliases(named: list[tuple[int, str]], caches: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """The owner of each cache, and who shares it: layers of one group at one address."""
    owners: dict[tuple[int, int], str] = {}
    aliases: dict[str, list[str]] = {}
    for index, name in named:
        owner = owners.setdefault((index, caches[name].data_ptr()), name)
        aliases.setdefault(owner, []).extend([name] if name != owner else [])
    return aliases


def _spec_of(spec: KVCacheSpec, layer: str) -> KVCacheSpec:
    """A layer's own specification, also where several kinds are wrapped into one group."""
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _contents(subject: Subject) -> Contents:
    """What is known of a layer's cache, or that nothing is."""
    match subject.spec:
        case MambaSpec():
            found = known_state(subject)
        case CircularBufferSpec():
            found = None
        case AttentionSpec():
            found = known(subject)
        case _:
            found = None
    return found or opaque(subject)


def _total_heads(vllm_config: VllmConfig, name: str, spec: KVCacheSpec, tp_size: int) -> int:
    """KV heads over all ranks: a model's, where this rank's share is what follows from it.

    Ranks beyond the heads hold copies, neighbours the same one; so a wrong total is a refusal between
    unequal engines, never a wrong head.
    """
    share = int(getattr(spec, "num_kv_heads", 1))
    for total in _head_counts(vllm_config, name):
        if share == max(1, total // tp_size):
            return total
    return share * tp_size


def _head_counts(vllm_config: VllmConfig, name: str) -> Iterator[int]:
    """The KV heads that the model, or its draft, says a layer has."""
    speculative = vllm_config.speculative_config
    models: list[Any] = [vllm_config.model_config, getattr(speculative, "draft_model_config", None)]
    index = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    for model in models:
        arch = getattr(model, "model_arch_config", None)
        if arch is None:
            continue
        is_its_own = index is not None and int(index[1]) < arch.total_num_hidden_layers
        yield int((arch[int(index[1])] if index and is_its_own else arch).total_num_kv_heads)
