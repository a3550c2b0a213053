"""What a vLLM worker's cache is made of, as a manifest.

Addresses, strides and sizes are read from the tensors; the kind of each layer from its own specification,
unwrapped from whatever holds it; the order inside a block from ``interiors``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvferry.core.manifest import Manifest, Rank, Region
from kvferry.core.shard import Sharding, held
from kvferry.core.span import Span
from kvferry.core.state import Addressing, Axis, Group, Kind, State
from kvferry.core.view import AxisMap, Digit, View
from kvferry.errors import SpecError
from kvferry.integrations.vllm.interiors import INTERIORS, Interior
from kvferry.models.cache import Dim, Part, delta_net, mamba2, time_major
from kvferry.models.order import Leaf, Order, Spot, grow, spots

POOL = "blocks"
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "uint8"}


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
    regions = _regions(caches)
    layers = list(_layers(vllm_config, config, caches, place))
    states = tuple(state for layer in layers for state in layer.states)
    views = tuple(view for layer in layers for view in layer.views(regions))
    groups = tuple(_group(config, i) for i in config.transfer_group_ids)
    return Manifest(
        engine=place.engine,
        model=vllm_config.model_config.model,
        states=states,
        groups=groups,
        ranks=(Rank(place.rank, tuple(regions.values()), views),),
    )


def group_name(index: int) -> str:
    """Our name of a KV cache group."""
    return f"group-{index}"


def _regions(caches: Mapping[str, torch.Tensor]) -> dict[int, Region]:
    """One region per allocation, however many layers point into it."""
    regions: dict[int, Region] = {}
    for tensor in caches.values():
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in regions:
            device = (
                "cpu" if tensor.device.type == "cpu" else f"{tensor.device.type}:{tensor.device.index or 0}"
            )
            name = f"allocation-{len(regions)}"
            regions[storage.data_ptr()] = Region(name, storage.nbytes(), storage.data_ptr(), device)
    return regions


def _group(config: KVCacheConfig, index: int) -> Group:
    spec = _first(config.kv_cache_groups[index].kv_cache_spec)
    if isinstance(spec, MambaSpec):
        return Group(group_name(index), config.num_blocks, addressing=Addressing.SLOT, pool=POOL)
    window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0
    return Group(group_name(index), config.num_blocks, spec.block_size, pool=POOL, window=window)


def _first(spec: KVCacheSpec) -> KVCacheSpec:
    return spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _spec_of(spec: KVCacheSpec, layer: str) -> KVCacheSpec:
    """A layer's own specification, also where several kinds are wrapped into one group."""
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


@dataclass(frozen=True)
class _Layer:
    """One layer's cache: its parts, where its tensor sits, and the order inside a page."""

    name: str
    group: str
    tensor: torch.Tensor
    parts: tuple[Part, ...]
    order: Order
    """Inside one block, the outermost loop first."""
    kind: Kind
    num_tokens: int
    place: Place
    aliases: tuple[str, ...] = ()

    @property
    def states(self) -> Iterator[State]:
        for part in self.parts:
            yield State(
                f"{self.name}/{part.name}",
                tuple(Axis(dim.axis, dim.size) for dim in part.dims),
                item_bytes=part.bytes_per_item,
                dtype=part.dtype,
                kind=self.kind,
                encoding=part.encoding,
                aliases=tuple(f"{alias}/{part.name}" for alias in self.aliases),
            )

    def views(self, regions: Mapping[int, Region]) -> Iterator[View]:
        storage = self.tensor.untyped_storage().data_ptr()
        offset = self.tensor.data_ptr() - storage
        block_stride = self.tensor.stride(0) * self.tensor.element_size()
        leaves = [Leaf(self.name, part.name, self._sizes(part), part.bytes_per_item) for part in self.parts]
        for spot in spots(grow(self.order, leaves, num_blocks=1)):
            part = next(part for part in self.parts if part.name == spot.leaf.part)
            yield View.of(
                f"{self.name}/{part.name}",
                self.group,
                regions[storage].name,
                block_stride=block_stride,
                offset=offset + spot.offset,
                axes=self._axes(part, spot),
            )

    def _sizes(self, part: Part) -> dict[str, int]:
        sizes = {axis: len(span) for axis, span in self._held(part).items()}
        return sizes if self.kind is Kind.RECURRENT else {**sizes, "token": self.num_tokens}

    def _held(self, part: Part) -> dict[str, Span]:
        place = self.place
        return {dim.axis: held(dim.sharding, dim.size, place.tp_rank, place.tp_size) for dim in part.dims}

    def _axes(self, part: Part, spot: Spot) -> dict[str, AxisMap]:
        digits = {axis: tuple(Digit(*d) for d in found) for axis, found in spot.digits.items()}
        if "head" in digits and self.kind is Kind.PAGED:
            # The stride between heads is the tensor's own; what is inside a head is the backend's.
            digits["head"] = (
                Digit(digits["head"][0].size, self.tensor.stride(1) * self.tensor.element_size()),
            )
        axes = {axis: AxisMap(digits.get(axis, ()), span.start) for axis, span in self._held(part).items()}
        return axes if self.kind is Kind.RECURRENT else {**axes, "token": AxisMap(digits["token"])}


def _layers(
    vllm_config: VllmConfig, config: KVCacheConfig, caches: Mapping[str, torch.Tensor], place: Place
) -> Iterator[_Layer]:
    owners: dict[tuple[int, int], str] = {}
    aliases: dict[str, list[str]] = {}
    context = vllm_config.compilation_config.static_forward_context
    named = [
        (index, name)
        for index in config.transfer_group_ids
        for name in config.kv_cache_groups[index].layer_names
        if name in caches
    ]
    for index, name in named:
        owner = owners.setdefault((index, caches[name].data_ptr()), name)
        aliases.setdefault(owner, []).extend([name] if name != owner else [])
    for index, name in named:
        if name not in aliases:
            continue
        spec = _spec_of(config.kv_cache_groups[index].kv_cache_spec, name)
        parts, order, kind = _contents(vllm_config, spec, context.get(name), caches[name], place)
        num_tokens = 1 if kind is Kind.RECURRENT else spec.block_size
        yield _Layer(
            name, group_name(index), caches[name], parts, order, kind, num_tokens, place, tuple(aliases[name])
        )


def _contents(
    vllm_config: VllmConfig, spec: KVCacheSpec, layer: Any, tensor: torch.Tensor, place: Place
) -> tuple[tuple[Part, ...], Order, Kind]:
    """The parts of a layer's cache and their order inside a block."""
    match spec:
        case MambaSpec():
            return _mamba(spec, layer)
        case MLAAttentionSpec():
            interior = _interior(layer, spec)
            part = Part("latent", (Dim("channel", spec.head_size),), _dtype(spec.dtype), 0, interior.tag)
            return (part,), interior.order, Kind.PAGED
        case AttentionSpec():
            interior = _interior(layer, spec)
            heads = Dim("head", _total_heads(vllm_config, spec, place), Sharding.SPREAD)
            parts = tuple(
                Part(name, (heads, Dim("channel", width)), _dtype(spec.dtype), 0, interior.tag)
                for name, width in (("k", spec.head_size), ("v", spec.head_size_v or spec.head_size))
            )
            return parts, ("head", *interior.order), Kind.PAGED
        case _:
            raise SpecError(f"kvferry knows no cache of the kind {type(spec).__name__}")


def _total_heads(vllm_config: VllmConfig, spec: AttentionSpec, place: Place) -> int:
    """KV heads over all ranks: the model's, where this rank's share is what follows from it."""
    total = int(vllm_config.model_config.get_total_num_kv_heads())
    if spec.num_kv_heads == max(1, total // place.tp_size):
        return total
    return int(spec.num_kv_heads) * place.tp_size


def _interior(layer: Any, spec: AttentionSpec) -> Interior:
    backend = layer.get_attn_backend().get_name() if layer is not None else "unknown"
    isa = getattr(layer, "isa", "")
    if backend == "CPU_ATTN" and not isa:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        isa = _get_attn_isa(
            spec.dtype, spec.block_size, spec.head_size, getattr(layer, "kv_cache_dtype", None)
        )
    interior = INTERIORS[backend](isa) if backend in INTERIORS else None
    if interior is None:
        raise SpecError(
            f"kvferry does not know the order inside a block of backend {backend} ({isa or 'any'})"
        )
    return interior


def _mamba(spec: MambaSpec, layer: Any) -> tuple[tuple[Part, ...], Order, Kind]:
    """A recurrent layer: the parts of its convolution, then its state."""
    conv_dtype, ssm_dtype = (_dtype(dtype) for dtype in spec.dtypes)
    # The time axis is the short one: the kernel, and the tokens that speculation may take back.
    is_time_major = spec.shapes[0][0] < spec.shapes[0][1]
    kernel = min(spec.shapes[0]) + 1
    match type(layer).__name__:
        case "MambaMixer2":
            groups = 1 if _is_one_group(layer) else layer.n_groups
            sizes = (layer.num_heads, layer.head_dim, groups, layer.ssm_state_size)
            cache = mamba2(*sizes, kernel, conv_dtype, ssm_dtype)
        case "QwenGatedDeltaNetAttention":
            heads = (layer.num_k_heads, layer.head_k_dim, layer.num_v_heads, layer.head_v_dim)
            cache = delta_net(*heads, kernel, conv_dtype, ssm_dtype)
        case unknown:
            raise SpecError(f"kvferry does not describe the state of {unknown} yet")
    conv, ssm = cache.parts[:-1], cache.parts[-1]
    order = time_major(conv, ssm) if is_time_major else cache.interior or ()
    return cache.parts, order, Kind.RECURRENT


def _is_one_group(layer: Any) -> bool:
    """Whether the model has one group, of which every rank holds a copy (vLLM counts one per rank)."""
    config = getattr(layer, "model_config", None)
    hf = getattr(config, "hf_text_config", None) or getattr(config, "hf_config", None)
    return bool(getattr(hf, "n_groups", getattr(hf, "mamba_n_groups", 0)) == 1)


def _dtype(dtype: torch.dtype) -> str:
    if dtype not in _DTYPES:
        raise SpecError(f"kvferry knows no cache dtype {dtype}")
    return _DTYPES[dtype]
