"""Families of caches that need a GPU to run, tiny: vLLM's own layers, and vLLM's own views of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil
from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn import OlmoHybridGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.linear.minimax_linear_attn import MiniMaxText01LinearAttention
from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.models.deepseek_v4.attention import DeepseekV4IndexerCache
from vllm.models.deepseek_v4.compressor import CompressorStateCache
from vllm.models.deepseek_v4.nvidia.flashmla import (
    DeepseekSparseSWAFlashMLABackend,
    DeepseekV4FlashMLAAttention,
)
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.mla.flashmla import FlashMLABackend
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache

from tests.vllm.corpus.allocated import MAX_TOKENS, Cut, Layers, Worker, bare, owner_of


@dataclass(frozen=True)
class Plane:
    """An array of a layer, as vLLM's code sees it: [block, axis, axis, …], items as integers."""

    name: str
    cells: torch.Tensor
    axes: tuple[str, ...]
    """What the dimensions behind the block are; ``token`` is the cell inside its block."""
    starts: tuple[tuple[str, int], ...] = ()
    """The first coordinate that this rank holds, where it is not 0."""
    is_slot: bool = False
    tokens_per_cell: int = 1


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _as_bits(view: torch.Tensor) -> torch.Tensor:
    """The same memory with items as integers, so that every pattern of bits survives."""
    return view.view(_BITS[view.element_size()])


# -- attention over K and V ----------------------------------------------------------------------------


def gqa(cut: Cut, heads: int, head_size: int, window: int = 0, backend: type = FlashAttentionBackend) -> Any:
    """An attention layer of which this rank has its share of heads."""
    return bare(
        Attention,
        attn_backend=backend,
        num_kv_heads=max(1, heads // cut.tp),
        head_size=head_size,
        head_size_v=head_size,
        kv_cache_dtype="auto",
        kv_cache_torch_dtype=torch.bfloat16,
        sliding_window=window or None,
        attn_type=AttentionType.DECODER,
        num_heads_of_model=heads,
    )


def _gqa_planes(name: str, layer: Any, cut: Cut, cache: torch.Tensor) -> Iterator[Plane]:
    """As FlashAttention's forward has it: [block, head, token, K then V]."""
    first = cut.rank * layer.num_heads_of_model // cut.tp
    k, v = cache.split(layer.head_size, dim=-1)
    for part, view in (("k", k), ("v", v)):
        yield Plane(f"{name}/{part}", _as_bits(view), ("head", "token", "channel"), (("head", first),))


# -- MLA -----------------------------------------------------------------------------------------------


def mla(head_size: int = 576, backend: type = FlashMLABackend, kv_cache_dtype: str = "auto") -> Any:
    """An MLA layer: the same on every rank."""
    return bare(
        MLAAttention,
        attn_backend=backend,
        head_size=head_size,
        kv_cache_dtype=kv_cache_dtype,
        sliding_window=None,
        indexer=None,
        non_causal_multi_token_decode=False,
        _vllm_config=SimpleNamespace(kernel_config=SimpleNamespace(enable_jit_warmup=False)),
    )


def _rows(name: str, cache: torch.Tensor) -> Iterator[Plane]:
    """[block, 1, token, content]."""
    yield Plane(name, _as_bits(cache.squeeze(1)), ("token", "channel"))


# -- KDA -----------------------------------------------------------------------------------------------


def kda(cut: Cut, heads: int, dim: int, cache_config: Any, kernel: int = 4) -> Any:
    """A KDA layer: convolution and state of this rank's heads."""
    return bare(
        KimiGatedDeltaNetAttention,
        num_heads=heads,
        head_dim=dim,
        conv_size=kernel,
        num_spec=0,
        tp_size=cut.tp,
        cache_config=cache_config,
        model_config=cut.config().model_config,
    )


def _kda_planes(name: str, layer: Any, cut: Cut) -> Iterator[Plane]:
    """As the layer's own ``bind_kv_cache`` has it: (slot, time, q k v of this rank), (slot, head, v, k)."""
    conv, ssm = (_as_bits(state) for state in layer.kv_cache)
    local = layer.num_heads // cut.tp
    starts = (("head", cut.rank * local),)
    for part, view in zip("qkv", conv.split(local * layer.head_dim, dim=-1), strict=True):
        heads = view.unflatten(-1, (local, layer.head_dim))
        yield Plane(f"{name}/conv.{part}", heads, ("time", "head", "channel"), starts, is_slot=True)
    yield Plane(f"{name}/ssm", ssm, ("head", "channel", "state"), starts, is_slot=True)


# -- values, and their scales behind them --------------------------------------------------------------


def _values_and_scales(
    name: str, pages: torch.Tensor, value_bytes: int, scale_bytes: int, ratio: int = 1
) -> Iterator[Plane]:
    """As the kernels address them, in a layer's own view [page, row, bytes]: row r of a page of n rows is at
    r * value_bytes, its scale at n * value_bytes + r * scale_bytes."""
    num_pages, num_rows, row_bytes = pages.shape
    assert row_bytes == value_bytes + scale_bytes
    for part, size, start in (("values", value_bytes, 0), ("scales", scale_bytes, num_rows * value_bytes)):
        cells = pages.as_strided(
            (num_pages, num_rows, size), (pages.stride(0), size, 1), pages.storage_offset() + start
        )
        yield Plane(f"{name}/{part}", cells, ("token", "channel"), tokens_per_cell=ratio)


# -- families ------------------------------------------------------------------------------------------


def kimi_linear(cut: Cut) -> Layers:
    """KDA and MLA by turns, in one pool: an MLA block is as large as a KDA slot, by vLLM's platform."""
    heads, dim, row_bytes = 8, 64, 1152
    config = cut.config().cache_config
    layer = kda(cut, heads, dim, config)
    slot_bytes = layer.get_kv_cache_spec(cut.config()).page_size_bytes
    block = cut.block * ceil(slot_bytes / (cut.block * row_bytes))
    layers: Layers = {}
    for index in range(8):
        name = f"model.layers.{index}.self_attn"
        layers[f"{name}.attn" if index % 4 == 3 else name] = (
            mla() if index % 4 == 3 else kda(cut, heads, dim, config)
        )
    return {name: _with_sizes(layer, block, block * row_bytes) for name, layer in layers.items()}


def _with_sizes(layer: Any, block: int, page_bytes: int) -> Any:
    """The layer, told the block and page size that the platform settled on."""
    inner = layer.get_kv_cache_spec

    def spec(config: Any) -> Any:
        config.cache_config.block_size = block
        config.cache_config.mamba_page_size_padded = page_bytes
        config.cache_config.mamba_block_size = MAX_TOKENS
        return inner(config)

    object.__setattr__(layer, "get_kv_cache_spec", spec)
    return layer


def _mamba1(cut: Cut) -> Any:
    layer = _recurrent(cut, MambaMixer, intermediate_size=256, ssm_state_size=16, conv_kernel_size=4)
    return _of_shape(layer, lambda: MambaStateShapeCalculator.mamba1_state_shape(cut.tp, 256, 16, 4))


def _short_conv(cut: Cut) -> Any:
    layer = _recurrent(cut, ShortConv, conv_dim=128, L_cache=3)
    return _of_shape(layer, lambda: MambaStateShapeCalculator.short_conv_state_shape(cut.tp, 128, 3))


def _linear(cut: Cut) -> Any:
    return _recurrent(cut, MiniMaxText01LinearAttention, num_heads=4, head_dim=32, tp_size=cut.tp)


def _gated_delta(cut: Cut) -> Any:
    sizes = {"num_k_heads": 4, "num_v_heads": 8, "head_k_dim": 16, "head_v_dim": 32}
    return _recurrent(
        cut, OlmoHybridGatedDeltaNetAttention, conv_kernel_size=4, num_spec=0, tp_size=cut.tp, **sizes
    )


def _recurrent(cut: Cut, cls: type, **sizes: int) -> Any:
    config = cut.config()
    return bare(cls, cache_config=config.cache_config, model_config=config.model_config, **sizes)


def _of_shape(layer: Any, shapes: Callable[[], Any]) -> Any:
    """Some layers ask the process how many ranks there are; here that is in the cut."""
    object.__setattr__(layer, "get_state_shape", shapes)
    return layer


def states(cut: Cut) -> Layers:
    """The kinds of recurrent state that no family above has, and attention for company."""
    return {
        "model.layers.0.mixer": _mamba1(cut),
        "model.layers.1.conv": _short_conv(cut),
        "model.layers.2.linear_attn": _linear(cut),
        "model.layers.3.linear_attn": _gated_delta(cut),
        "model.layers.4.self_attn.attn": gqa(cut, 4, 64),
    }


def _state_planes(name: str, layer: Any, cut: Cut) -> Iterator[Plane]:
    """As ``bind_kv_cache`` has it; a rank has the same share of every part."""
    arrays = [_as_bits(array) for array in layer.kv_cache]

    def plane(part: str, cells: torch.Tensor, *axes: str) -> Plane:
        starts = ((axes[0], cut.rank * cells.shape[1]),)
        return Plane(f"{name}/{part}", cells, axes, starts, is_slot=True)

    match layer:
        case MambaMixer():
            yield plane("conv.x", arrays[0].transpose(1, 2), "channel", "time")
            yield plane("ssm", arrays[1], "channel", "state")
        case ShortConv():
            yield plane("conv.x", arrays[0].transpose(1, 2), "channel", "time")
        case MiniMaxText01LinearAttention():
            yield plane("state", arrays[0], "head", "channel", "state")
        case OlmoHybridGatedDeltaNetAttention():
            k_heads, v_heads = layer.num_k_heads // cut.tp, layer.num_v_heads // cut.tp
            widths = ((k_heads, layer.head_k_dim), (k_heads, layer.head_k_dim), (v_heads, layer.head_v_dim))
            conv = arrays[0].transpose(1, 2).split([heads * dim for heads, dim in widths], dim=1)
            for part, cells, width in zip("qkv", conv, widths, strict=True):
                yield plane(f"conv.{part}", cells.unflatten(1, width), "head", "channel", "time")
            yield plane("ssm", arrays[1], "head", "channel", "state")
        case _:
            raise TypeError(f"no view of a {type(layer).__name__} is known")


def only_mla(cut: Cut) -> Layers:
    """DeepSeek-V3."""
    return {f"model.layers.{i}.self_attn.attn": mla() for i in range(3)}


def one_head(cut: Cut) -> Layers:
    """A head that all ranks share: there context parallelism has something to cut."""
    return {f"model.layers.{i}.self_attn.attn": gqa(cut, 1, 64) for i in range(2)}


def mla_with_gqa_draft(cut: Cut) -> Layers:
    """Kimi-K2.5 with an EAGLE-3 draft of plain attention."""
    layers: Layers = {f"model.layers.{i}.self_attn.attn": mla() for i in range(3)}
    return {**layers, "model.layers.3.self_attn.attn": gqa(cut, 8, 64)}


def gqa_with_mla_draft(cut: Cut) -> Layers:
    """The other way round."""
    layers: Layers = {f"model.layers.{i}.self_attn.attn": gqa(cut, 4, 64) for i in range(3)}
    return {**layers, "draft.layers.3.self_attn.attn": mla()}


def gemma4(cut: Cut) -> Layers:
    """Windows with many narrow heads, and a full layer with one wide head after every two."""
    return {
        f"model.layers.{i}.self_attn.attn": gqa(cut, 1, 128) if i % 3 == 2 else gqa(cut, 4, 64, window=96)
        for i in range(6)
    }


def deepseek_v32(cut: Cut) -> Layers:
    """MLA in rows of 656 bytes with their scales inside, and an indexer with its scales behind."""
    layers: Layers = {}
    for index in range(3):
        name = f"model.layers.{index}.self_attn"
        layers[f"{name}.attn"] = mla(backend=FlashMLASparseBackend, kv_cache_dtype="fp8_ds_mla")
        layers[f"{name}.indexer.k_cache"] = bare(
            DeepseekV32IndexerCache, head_dim=132, dtype=torch.uint8, cache_config=cut.config().cache_config
        )
    return layers


V4_RATIOS = (0, 4, 128, 4, 128, 4)


def deepseek_v4(cut: Cut) -> Layers:
    """A window in each layer; compressed rows, their indexer, and what the compressors have not done yet."""
    cut = replace(cut, cache_dtype="fp8_ds_mla")
    config = cut.config().cache_config
    layers: Layers = {}
    for index, ratio in enumerate(V4_RATIOS):
        name = f"model.layers.{index}.attn"
        layers[f"{name}.swa_cache"] = _v4_window(config)
        if ratio:
            layers[f"{name}.mla_attn"] = bare(
                DeepseekV4FlashMLAAttention, compress_ratio=ratio, head_dim=512, kv_cache_dtype="fp8_ds_mla"
            )
            layers[f"{name}.compressor.state_cache"] = _v4_compressor(ratio, 512)
        if ratio == 4:
            layers[f"{name}.indexer.k_cache"] = bare(
                DeepseekV4IndexerCache,
                head_dim=132,
                dtype=torch.uint8,
                cache_config=config,
                compress_ratio=ratio,
            )
            layers[f"{name}.indexer.compressor.state_cache"] = _v4_compressor(ratio, 128)
    return layers


def _v4_window(config: Any) -> Any:
    return bare(
        DeepseekV4SWACache,
        head_dim=512,
        window_size=128,
        dtype=torch.uint8,
        cache_config=config,
        block_size=64,
        packed_bytes_per_token=584,
        packed_page_alignment=576,
        bounded_replay=False,
        backend_cls=DeepseekSparseSWAFlashMLABackend,
    )


def _v4_compressor(ratio: int, dim: int) -> Any:
    overlap = 2 if ratio == 4 else 1
    return bare(
        CompressorStateCache,
        state_dim=2 * overlap * dim,
        dtype=torch.float32,
        sliding_window=overlap * ratio,
        block_size={4: 4, 128: 8}[ratio],
    )


HEADS: dict[str, dict[str, int]] = {
    "states": {"num_key_value_heads": 4},
    "one_head": {"num_key_value_heads": 1},
    "mla_with_gqa_draft": {"num_key_value_heads": 8},
    "gqa_with_mla_draft": {"num_key_value_heads": 4},
    "gemma4": {
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_global_key_value_heads": 1,
        "global_head_dim": 128,
        "attention_k_eq_v": True,
    },
}
"""What a model's configuration says of its heads, by family."""


def planes(worker: Worker) -> Iterator[Plane]:
    """Every array of a worker's layers, through vLLM's own views."""
    for name, cache in worker.caches.items():
        layer = worker.layers[name]
        if owner_of(layer):
            continue
        match layer:
            case Attention():
                yield from _gqa_planes(name, layer, worker.cut, cache)
            case MLAAttention():
                yield from _rows(f"{name}/latent", cache)
            case KimiGatedDeltaNetAttention():
                yield from _kda_planes(name, layer, worker.cut)
            case MambaBase():
                yield from _state_planes(name, layer, worker.cut)
            case DeepseekV32IndexerCache():
                yield from _values_and_scales(name, layer.kv_cache, 128, 4)
            case DeepseekV4IndexerCache():
                yield from _values_and_scales(name, layer.kv_cache, 128, 4, layer.compress_ratio)
            case DeepseekV4SWACache():
                yield from _values_and_scales(name, layer.kv_cache, 576, 8)
            case DeepseekV4FlashMLAAttention():
                yield from _values_and_scales(name, layer.kv_cache, 576, 8, layer.compress_ratio)
            case CompressorStateCache():
                yield from _rows(f"{name}/latent", cache)
            case _:
                raise TypeError(f"no view of a {type(layer).__name__} is known")
