"""Caches made by vLLM's own code, without an engine: for families that do not run on a CPU.

A layer is an object of vLLM's own class with the few attributes that its cache depends on. It says its
specification itself (``get_kv_cache_spec``); vLLM groups the layers, lays them out, cuts blocks for kernels,
allocates, and binds each layer to its view, all by the code that a GPU worker runs. What is left out is what
needs a GPU: weights, and kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PretrainedConfig
from vllm.config import CacheConfig, ParallelConfig, VllmConfig
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheSpec, UniformTypeKVCacheSpecs
from vllm.v1.worker.utils import (
    AttentionGroup,
    allocate_kv_cache,
    customize_attention_spec,
    map_kv_caches_to_kernel_blocks,
    prepare_kernel_block_sizes,
    select_common_block_size,
)

try:
    from vllm.v1.core import kv_cache_planning as planning  # since 0.33
except ImportError:
    from vllm.v1.core import kv_cache_utils as planning

from kvferry.core.manifest import Manifest
from kvferry.integrations.vllm.worker.describe import WorkerRank, describe

STALE = 0x5A
"""What every byte holds before anything is written."""
NUM_BLOCKS = 160
MAX_TOKENS = 512

Layers = dict[str, Any]
"""vLLM's layer objects by name."""
Family = Callable[["Cut"], Layers]


@dataclass(frozen=True)
class Cut:
    """How an engine is set up, and which rank of it this is."""

    tp: int = 1
    block: int = 64
    layout: str = ""
    """vLLM's name of a layout; empty: its own choice."""
    rank: int = 0
    cache_dtype: str = "auto"
    pp: int = 1
    stage: int = 0
    dcp: int = 1
    """Neighbouring ranks that take turns at the tokens …"""
    interleave: int = 1
    """… after so many."""
    heads: tuple[tuple[str, int], ...] = ()
    """What the model's configuration says of its heads."""

    def __str__(self) -> str:
        turns = f"-dcp{self.dcp}i{self.interleave}" if self.dcp > 1 else ""
        return f"tp{self.tp}-b{self.block}{turns}" + (f"-{self.layout}" if self.layout else "")

    def config(self) -> VllmConfig:
        """A configuration of vLLM's that says so; it has no model."""
        config = VllmConfig(
            cache_config=CacheConfig(block_size=self.block, cache_dtype="auto"),
            parallel_config=ParallelConfig(
                tensor_parallel_size=self.tp,
                pipeline_parallel_size=self.pp,
                decode_context_parallel_size=self.dcp,
                cp_kv_cache_interleave_size=self.interleave,
                distributed_executor_backend="mp",
            ),
        )
        config.model_config = SimpleNamespace(
            model="toy",
            dtype=torch.bfloat16,
            max_model_len=MAX_TOKENS,
            original_max_model_len=MAX_TOKENS,
            hf_text_config=PretrainedConfig(**dict(self.heads)),
            get_total_num_kv_heads=lambda: dict(self.heads).get("num_key_value_heads", 1),
            supports_kv_cache_grouping=False,
        )
        config.scheduler_config.max_num_batched_tokens = 64
        config.cache_config.cache_dtype = self.cache_dtype
        config.cache_config.num_gpu_blocks_override = NUM_BLOCKS
        config.cache_config.mamba_block_size = MAX_TOKENS
        config.cache_config.kv_cache_layout = self.layout or None
        return config


@dataclass(frozen=True)
class Worker:
    """A rank: what a connector would be given, and vLLM's own views, bound to its layers."""

    cut: Cut
    config: KVCacheConfig
    layers: Layers
    caches: dict[str, torch.Tensor]
    manifest: Manifest


NEWER = {"topk_buffer_width": None, "packed_block_stride_alignment": None}
"""What layers of 0.33 have besides."""


def bare(cls: type, **attributes: Any) -> Any:
    """An object of a layer's class that was not built, with what its cache depends on."""
    layer: Any = object.__new__(cls)
    torch.nn.Module.__init__(layer)
    for name, value in (NEWER | attributes).items():
        setattr(layer, name, value)
    return layer


def workers(family: Family, cuts: list[Cut], engine: str) -> list[Worker]:
    """The ranks of one engine, as vLLM's own code makes their caches."""
    layers = [family(cut) for cut in cuts]
    configs = [cut.config() for cut in cuts]
    specs = [_specs(config, own) for config, own in zip(configs, layers, strict=True)]
    leader = configs[0]
    backends = list(dict.fromkeys(layer.get_attn_backend() for own in layers for layer in own.values()))
    names = [layout.name for layout in get_supported_kv_cache_layouts(backends)]
    every = [spec for own in specs for spec in own.values()]
    resolve_kv_cache_layout(leader, [names], every)
    found = _kv_cache_configs(leader, specs)
    return [
        _worker(cut, config, leader, own, kv_config, engine, number)
        for number, (cut, config, own, kv_config) in enumerate(zip(cuts, configs, layers, found, strict=True))
    ]


def _kv_cache_configs(leader: VllmConfig, specs: list[dict[str, KVCacheSpec]]) -> list[KVCacheConfig]:
    memory = [1 << 40] * len(specs)
    if hasattr(planning, "get_global_kv_cache_groups"):
        groups = planning.get_global_kv_cache_groups(leader, specs)
        return list(planning.get_kv_cache_configs(leader, specs, memory, groups))
    return list(planning.get_kv_cache_configs(leader, specs, memory))


def owner_of(layer: Any) -> str:
    """The layer whose cache this one uses, if it has none."""
    return getattr(layer, "kv_sharing_target_layer_name", "")


def _specs(config: VllmConfig, layers: Layers) -> dict[str, KVCacheSpec]:
    specs = {}
    for name, layer in layers.items():
        if owner_of(layer):
            continue
        spec = layer.get_kv_cache_spec(config)
        if isinstance(spec, AttentionSpec):
            spec = customize_attention_spec(layer.get_attn_backend(), spec)
        if spec is not None:
            specs[name] = spec
    return specs


def _worker(
    cut: Cut,
    config: VllmConfig,
    leader: VllmConfig,
    layers: Layers,
    kv: KVCacheConfig,
    engine: str,
    number: int,
) -> Worker:
    layout = leader.cache_config.get_resolved_kv_cache_layout()
    groups = _attention_groups(kv, layers)
    kernel_blocks = prepare_kernel_block_sizes(kv, groups)
    caches = allocate_kv_cache(kv, torch.device("cpu"), layout, kernel_blocks)
    next(iter(caches.values())).untyped_storage().fill_(STALE)
    caches |= {name: caches[owner] for name, layer in layers.items() if (owner := owner_of(layer))}
    for name, cache in map_kv_caches_to_kernel_blocks(caches, _cut_further(groups, kernel_blocks)).items():
        layers[name].bind_kv_cache(cache)
    config.compilation_config.static_forward_context.update(layers)
    place = WorkerRank(engine, number, cut.rank, cut.tp)
    return Worker(cut, kv, layers, caches, describe(config, kv, caches, place))


def _attention_groups(config: KVCacheConfig, layers: Mapping[str, Any]) -> list[list[AttentionGroup]]:
    """As a model runner makes them: layers of one backend and one specification."""
    groups = []
    for index, group in enumerate(config.kv_cache_groups):
        spec = group.kv_cache_spec
        by_backend: dict[tuple[type, KVCacheSpec], list[str]] = {}
        for name in group.layer_names:
            own = spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
            by_backend.setdefault((layers[name].get_attn_backend(), own), []).append(name)
        groups.append(
            [AttentionGroup(backend, names, own, index) for (backend, own), names in by_backend.items()]
        )
    return groups


def _cut_further(groups: list[list[AttentionGroup]], kernel_blocks: list[int]) -> list[AttentionGroup]:
    """Layers packed side by side are not cut together; a backend that needs shorter blocks cuts its own."""
    for members, num_tokens in zip(groups, kernel_blocks, strict=True):
        for group in members:
            if isinstance(spec := group.kv_cache_spec, AttentionSpec):
                fitting = select_common_block_size(num_tokens, [group.backend], [spec])
                group.kernel_block_size = fitting if fitting != spec.block_size else None
    return [group for members in groups for group in members]
