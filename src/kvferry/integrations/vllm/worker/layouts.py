"""Cache layouts: one rule per attention backend, and one per recurrent layer class.

vLLM publishes every attention cache as [block, head, token, content] with strides. The order *inside* content
depends on the backend. The table is keyed by the backend's class, not its name: AITER's backend on ROCm calls
itself FLASH_ATTN, but has a different layout. An unlisted backend, or a mode that its rule does not cover, is
opaque (``opaque``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from vllm.model_executor.layers.linear import MergedColumnParallelLinear
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import AttentionSpec, CircularBufferSpec, KVQuantMode, MambaSpec

from kvferry.core.state import Kind
from kvferry.errors import SpecError
from kvferry.layout.order import Fork, Order, Tile, packed_interior
from kvferry.layout.pages import (
    Dim,
    Item,
    Page,
    PagePart,
    Sharding,
    delta_net,
    k_and_v,
    latent,
    mamba1,
    mamba2,
    opaque_block,
    opaque_slot,
    time_major,
    values_then_scales,
)

_ATTENTION = "vllm.v1.attention.backends"
_MLA = f"{_ATTENTION}.mla"


@dataclass(frozen=True)
class Contents:
    """A page, and the outer loops that are axes of the tensor."""

    page: Page
    """Its order covers the memory inside the ``outer`` axes."""
    outer: tuple[str, ...] = ()
    """The tensor's axes after the block (``part``: one plane per part); strides come from the tensor."""


@dataclass(frozen=True)
class CacheTensor:
    """One layer's cache: the input of a rule."""

    name: str
    spec: Any
    layer: Any
    tensor: torch.Tensor
    tp_size: int
    num_heads: int
    """KV heads over all ranks; 1 if the cache has none."""
    num_blocks: int
    num_turns: int = 1
    """Ranks of context parallelism that take turns at the tokens."""
    tokens_per_turn: int = 1

    @property
    def backend(self) -> type | None:
        """The class of the layer's backend, without wrappers that only build metadata."""
        found = self.layer.get_attn_backend() if self.layer is not None else None
        while found is not None and _adds_only_a_builder(found):
            found = found.__mro__[1]
        return found

    @property
    def kernel_tokens(self) -> int:
        """Tokens per kernel block; a scheduler block may consist of several kernel blocks."""
        return int(self.spec.block_size) * self.num_blocks // int(self.tensor.shape[0])

    @property
    def is_cut_further(self) -> bool:
        """Whether the layer's own view has shorter pages than ours: with layers packed side by side, vLLM
        splits blocks only for layers that need it, and not in the tensors that connectors get.
        """
        bound = getattr(self.layer, "kv_cache", None)
        return isinstance(bound, torch.Tensor) and bound.ndim > 2 and bound.shape[-2] != self.tensor.shape[-2]


def class_path(cls: type | None) -> str:
    return "none" if cls is None else f"{cls.__module__}.{cls.__qualname__}"


def _adds_only_a_builder(cls: type) -> bool:
    """Chunked-local attention and static sinks wrap a backend without changing its cache layout."""
    own = {name for name in vars(cls) if not name.startswith("__")}
    return own - {"_abc_impl"} == {"get_builder_cls"}


# -- dtypes --------------------------------------------------------------------------------------------

DTYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.uint8: "uint8",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e4m3fnuz: "fp8_e4m3fnuz",
    torch.float8_e5m2: "fp8_e5m2",
}


def dtype_of(dtype: torch.dtype) -> str:
    if dtype not in DTYPES:
        raise SpecError(f"unsupported cache dtype {dtype}")
    return DTYPES[dtype]


def _item(cache: CacheTensor, scale: str) -> Item | None:
    """The elements of a cache; None if only a kernel knows how they are packed.

    fp8 is stored as plain bytes: the layer names the dtype. The model's scale is part of the encoding.
    """
    spec, layer = cache.spec, cache.layer
    match spec.kv_quant_mode:
        case KVQuantMode.NONE:
            return Item(dtype_of(spec.dtype), spec.dtype.itemsize)
        case KVQuantMode.FP8_PER_TENSOR:
            is_e5m2 = "e5m2" in str(getattr(layer, "kv_cache_dtype", ""))
            dtype = torch.float8_e5m2 if is_e5m2 else current_platform.fp8_dtype()
            value = getattr(layer, f"_{scale}_scale_float", 1.0)
            return Item(dtype_of(dtype), 1, f"fp8, scale {value}")
        case _:
            return None


# -- attention over K and V ----------------------------------------------------------------------------


def _k_and_v(cache: CacheTensor) -> tuple[PagePart, ...] | None:
    spec = cache.spec
    k, v = _item(cache, "k"), _item(cache, "v")
    if k is None or v is None or spec.tokens_per_state != 1:  # Whisper pools blocks of encoder frames
        return None
    return k_and_v(cache.num_heads, (spec.head_size, spec.head_size_v or spec.head_size), (k, v))


def packed_rows(cache: CacheTensor) -> Contents | None:
    """For each head and token, K followed by V."""
    parts = _k_and_v(cache)
    is_plain = cache.spec.state_content_bytes is None and cache.spec.num_head_slots is None
    return Contents(Page(parts, ("part", "channel")), ("head", "token")) if parts and is_plain else None


def rows_with_scales(cache: CacheTensor) -> Contents | None:
    """Triton: packed rows, or for each head K and V, each followed by its own scale."""
    spec = cache.spec
    if not spec.kv_quant_mode.is_per_token_head:
        return packed_rows(cache)
    heads = Dim("head", cache.num_heads, Sharding.SPREAD)
    row_bytes = int(cache.tensor.shape[-1]) * cache.tensor.element_size() // 2
    tag = spec.kv_quant_mode.name.lower()
    parts = tuple(PagePart(name, (heads,), Item("uint8", row_bytes, tag)) for name in "kv")
    return Contents(Page(parts, ("part",)), ("head", "token"))


def planes(cache: CacheTensor) -> Contents | None:
    """All of a block's K, then all of its V; each token's heads are adjacent."""
    parts = _k_and_v(cache)
    return Contents(Page(parts, ("head", "channel")), ("part", "token")) if parts else None


def hip_planes(cache: CacheTensor) -> Contents | None:
    """ROCm's HIP kernels: K in 16-byte packs of channels, token by token; V transposed."""
    parts = _k_and_v(cache)
    if not parts:
        return None
    pack = Tile("channel", 16 // parts[0].item.num_bytes)
    order = (Fork.of(k=("head", "channel", "token", pack), v=("head", "channel", "token")),)
    return Contents(Page(parts, order), ("part",))


# -- CPU attention -------------------------------------------------------------------------------------

CPU_ORDERS: dict[str, Order] = {
    "vec": packed_interior("cpu-vec"),
    "vec16": packed_interior("cpu-vec"),
    "amx": packed_interior("cpu-amx"),
    "neon": packed_interior("cpu-vec"),
    "neon bfloat16": packed_interior("cpu-neon-bf16"),
}
"""Instruction set -> order; an entry that names a dtype takes precedence."""


def cpu_attention(cache: CacheTensor) -> Contents | None:
    """CPU attention: the order of K and V depends on the instruction set."""
    parts = _k_and_v(cache)
    isa, dtype = cpu_isa(cache), str(cache.spec.dtype).removeprefix("torch.")
    order = CPU_ORDERS.get(f"{isa} {dtype}") or CPU_ORDERS.get(isa)
    return Contents(Page(parts, order), ("head",)) if parts and order else None


def cpu_isa(cache: CacheTensor) -> str:
    """The instruction set of CPU attention; empty for other backends."""
    if class_path(cache.backend) != f"{_ATTENTION}.cpu_attn.CPUAttentionBackend":
        return ""
    # Set by the backend at run time: the compute dtype cannot be derived from a cache of bytes.
    if isa := getattr(cache.layer, "isa", ""):
        return str(isa)
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    dtype = getattr(cache.layer, "dtype", cache.spec.dtype)
    cache_dtype = getattr(cache.layer, "kv_cache_dtype", None)
    return str(_get_attn_isa(dtype, cache.kernel_tokens, cache.spec.head_size, cache_dtype))


# -- latents, indexers, DeepSeek-V4 --------------------------------------------------------------------


def latent_rows(cache: CacheTensor) -> Contents | None:
    """MLA: one latent per token, replicated on every rank; or a packed row with a named encoding."""
    spec = cache.spec
    if spec.state_content_bytes is not None:
        tag = getattr(spec, "cache_dtype_str", None) or spec.kv_quant_mode.name.lower()
        row = PagePart("latent", (), Item("uint8", spec.state_content_bytes, tag))
        return _by_token(spec, Page((row,), ("part",)), ("head", "token"))
    item = _item(cache, "k")
    if item is None:
        return None
    page = replace(latent(spec.head_size, item), order=("channel",))
    return _by_token(spec, page, ("head", "token"))


V4_ROWS = {584: (576, 8, "fp8 and bf16 rows, ue8m0 scales")}
"""Bytes per token -> bytes of values, bytes of scales, and their encoding. FlashMLA stores a page's scales
after all of its values."""
INDEXER_ROWS = {132: (128, 4, "fp8 rows, fp32 scales"), 68: (64, 4, "mxfp4 rows, ue8m0 scales")}


def v4_rows(cache: CacheTensor) -> Contents | None:
    """DeepSeek-V4: FlashMLA's packed rows, or plain ones."""
    packed = cache.spec.state_content_bytes
    return latent_rows(cache) if packed is None else _values_then_scales(cache, V4_ROWS.get(packed))


def indexer_keys(cache: CacheTensor) -> Contents | None:
    """The indexer of DeepSeek-V3.2 and V4. ROCm's shuffled form is internal to its kernels."""
    if getattr(cache.layer, "uses_shuffled_layout", False) or current_platform.is_rocm():
        return None
    return _values_then_scales(cache, INDEXER_ROWS.get(cache.spec.head_size))


def _values_then_scales(cache: CacheTensor, rows: tuple[int, int, str] | None) -> Contents | None:
    """All rows of a kernel page, followed by all of their scales."""
    if rows is None or cache.is_cut_further:
        return None
    return _by_token(cache.spec, values_then_scales(*rows))


def _by_token(spec: AttentionSpec, page: Page, outer: tuple[str, ...] = ()) -> Contents | None:
    """The page with the cache's compression ratio as tokens per cell."""
    ratio = spec.tokens_per_state
    if ratio != int(ratio) or ratio < 1:
        return None
    return Contents(replace(page, tokens_per_cell=int(ratio)), outer)


Rule = Callable[[CacheTensor], Contents | None]

ATTENTION_LAYOUTS: dict[str, Rule] = {
    f"{_ATTENTION}.cpu_attn.CPUAttentionBackend": cpu_attention,
    f"{_ATTENTION}.flash_attn.FlashAttentionBackend": packed_rows,
    f"{_ATTENTION}.flash_attn_diffkv.FlashAttentionDiffKVBackend": packed_rows,
    f"{_ATTENTION}.flashinfer.FlashInferBackend": packed_rows,
    f"{_ATTENTION}.flex_attention.FlexAttentionBackend": packed_rows,
    f"{_ATTENTION}.hpc_attn.HpcAttentionBackend": packed_rows,
    f"{_ATTENTION}.triton_attn.TritonAttentionBackend": rows_with_scales,
    f"{_ATTENTION}.triton_attn_diffkv.TritonAttentionDiffKVBackend": packed_rows,
    f"{_ATTENTION}.triton_flash_attn.TritonFlashAttentionBackend": packed_rows,
    f"{_ATTENTION}.triton_flashinfer.TritonFlashInferBackend": packed_rows,
    f"{_ATTENTION}.rocm_aiter_fa.AiterFlashAttentionBackend": packed_rows,
    f"{_ATTENTION}.rocm_aiter_unified_attn.RocmAiterUnifiedAttentionBackend": packed_rows,
    f"{_ATTENTION}.rocm_attn.RocmAttentionBackend": hip_planes,
    f"{_ATTENTION}.rocm_segmented_attn.RocmSegmentedAttentionBackend": planes,
    f"{_ATTENTION}.b12x.B12xPagedAttentionBackend": planes,
    f"{_MLA}.cpu_mla.CPUMLABackend": latent_rows,
    f"{_MLA}.amx_mla.AMXMLABackend": latent_rows,
    f"{_MLA}.triton_mla.TritonMLABackend": latent_rows,
    f"{_MLA}.flashmla.FlashMLABackend": latent_rows,
    f"{_MLA}.cutlass_mla.CutlassMLABackend": latent_rows,
    f"{_MLA}.flashinfer_mla.FlashInferMLABackend": latent_rows,
    f"{_MLA}.flashattn_mla.FlashAttnMLABackend": latent_rows,
    f"{_MLA}.tokenspeed_mla.TokenspeedMLABackend": latent_rows,
    f"{_MLA}.flashmla_sparse.FlashMLASparseBackend": latent_rows,
    f"{_MLA}.flashattn_mla_sparse.FlashAttnMLASparseBackend": latent_rows,
    f"{_MLA}.flashinfer_mla_sparse.FlashInferMLASparseTRTLLMBackend": latent_rows,
    f"{_MLA}.flashinfer_mla_sparse_sm90.FlashInferMLASparseSM90Backend": latent_rows,
    f"{_MLA}.indexer.DeepseekV32IndexerBackend": indexer_keys,
    f"{_MLA}.indexer.DeepseekV4IndexerBackend": indexer_keys,
    f"{_MLA}.sparse_swa.DeepseekSparseSWABackend": v4_rows,
    "vllm.models.deepseek_v4.sparse_mla.DeepseekV4FlashMLABackend": v4_rows,
    "vllm.models.deepseek_v4.nvidia.flashinfer_sparse.DeepseekV4FlashInferMLASparseBackend": v4_rows,
    "vllm.models.deepseek_v4.compressor.CompressorBackend": latent_rows,
}


def known_attention(cache: CacheTensor) -> Contents | None:
    rule = ATTENTION_LAYOUTS.get(class_path(cache.backend))
    return rule(cache) if rule else None


# The slot of a recurrent layer: one rule per layer class.
#
# A slot holds the arrays of the layer's ``get_state_shape`` one after another: usually the last inputs of a
# convolution and a recurrent state. An unlisted layer, or one with more arrays than its rule covers (rings
# and records of speculative decoding), is opaque (``opaque``).


@dataclass(frozen=True)
class _Slot:
    kernel: int
    """Taps of the convolution, including those for speculative tokens that may be rolled back."""
    conv: Item
    ssm: Item
    is_time_major: bool
    tp_replicated: bool

    @classmethod
    def of(cls, spec: MambaSpec) -> _Slot:
        is_time_major = not is_conv_state_dim_first()
        items = [Item(dtype_of(dtype), dtype.itemsize) for dtype in spec.dtypes]
        time = spec.shapes[0][0 if is_time_major else 1]
        return cls(time + 1, items[0], items[-1], is_time_major, spec.tp_replicated)

    def ordered(self, page: Page) -> Contents:
        """A page of a convolution and a recurrent state, in vLLM's configured order."""
        return Contents(time_major(page) if self.is_time_major else page)


def _mamba1(layer: Any, slot: _Slot) -> Contents:
    sizes = (layer.intermediate_size, layer.ssm_state_size)
    return slot.ordered(mamba1(*sizes, slot.kernel, slot.conv, slot.ssm))


def _mamba2(layer: Any, slot: _Slot) -> Contents:
    """A single group is replicated, and counted once per rank; the convolution is then not merged."""
    groups = layer.n_groups if isinstance(layer.conv1d, MergedColumnParallelLinear) else 1
    sizes = (layer.num_heads, layer.head_dim, groups, layer.ssm_state_size)
    return slot.ordered(mamba2(*sizes, slot.kernel, slot.conv, slot.ssm))


def _gated_delta_net(layer: Any, slot: _Slot) -> Contents:
    heads = (layer.num_k_heads, layer.head_k_dim, layer.num_v_heads, layer.head_v_dim)
    return slot.ordered(delta_net(*heads, slot.kernel, slot.conv, slot.ssm))


def _kimi_delta(layer: Any, slot: _Slot) -> Contents:
    heads = (layer.num_heads, layer.head_dim) * 2
    return slot.ordered(delta_net(*heads, slot.kernel, slot.conv, slot.ssm))


def _short_conv(num_channels: int, slot: _Slot) -> Contents:
    sharding = Sharding.WHOLE if slot.tp_replicated else Sharding.EVEN
    dims = (Dim("channel", num_channels, sharding), Dim("time", slot.kernel - 1))
    order: Order = ("time", "channel") if slot.is_time_major else ("channel", "time")
    return Contents(Page((PagePart("conv.x", dims, slot.conv),), order, Kind.RECURRENT))


def _linear(layer: Any, slot: _Slot) -> Contents:
    """One matrix per head, without a convolution."""
    dims = (
        Dim("head", layer.num_heads, Sharding.EVEN),
        Dim("channel", layer.head_dim),
        Dim("state", layer.head_dim),
    )
    order: Order = ("head", "channel", "state")
    return Contents(Page((PagePart("state", dims, slot.ssm),), order, Kind.RECURRENT))


RecurrentRule = Callable[[Any, _Slot], Contents]

_MAMBA = "vllm.model_executor.layers.mamba"

RECURRENT_LAYOUTS: dict[str, tuple[int, RecurrentRule]] = {
    f"{_MAMBA}.mamba_mixer.MambaMixer": (2, _mamba1),
    f"{_MAMBA}.mamba_mixer2.MambaMixer2": (2, _mamba2),
    f"{_MAMBA}.gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention": (2, _gated_delta_net),
    f"{_MAMBA}.gdn.olmo_gdn_linear_attn.OlmoHybridGatedDeltaNetAttention": (2, _gated_delta_net),
    f"{_MAMBA}.gdn.kimi_gdn_linear_attn.KimiGatedDeltaNetAttention": (2, _kimi_delta),
    "vllm.models.kimi_k3.nvidia.kda.KimiK3DeltaAttention": (2, _kimi_delta),
    "vllm.models.glm5next.common.kda.Glm5NextLinearAttention": (2, _kimi_delta),
    "vllm.model_executor.models.bailing_moe_v3.BailingMoeV3KimiDeltaAttention": (2, _kimi_delta),
    f"{_MAMBA}.short_conv.ShortConv": (1, lambda layer, slot: _short_conv(layer.conv_dim, slot)),
    "vllm.models.qwen4_exp.nvidia.ple_layer.Qwen4ExpPLELayer": (
        1,
        lambda layer, slot: _short_conv(layer.hc_hidden_size, slot),
    ),
    f"{_MAMBA}.linear.bailing_linear_attn.BailingMoELinearAttention": (1, _linear),
    f"{_MAMBA}.linear.minimax_linear_attn.MiniMaxText01LinearAttention": (1, _linear),
}
"""Layer class -> number of arrays in its slot, and the rule for them."""


def known_state(cache: CacheTensor) -> Contents | None:
    """The contents of a recurrent layer's slot, if a rule covers all of it."""
    num_arrays, rule = RECURRENT_LAYOUTS.get(class_path(type(cache.layer)), (0, None))
    if rule is None or num_arrays != len(cache.spec.shapes):
        return None
    return rule(cache.layer, _Slot.of(cache.spec))


# Caches with an unknown layout: a block, or a slot, is one item that is transferred unchanged.
#
# The tag holds everything that determines the kernel's layout: the backend, the dtype, the shape of a block
# with its heads, and the kernel block. Engines with equal tags work; others are rejected, and the difference
# between the tags shows why.


def opaque(cache: CacheTensor) -> Contents:
    """The cache as one item per block or slot and rank."""
    sizes = (_block_bytes(cache), _num_shards(cache))
    if isinstance(cache.spec, MambaSpec | CircularBufferSpec):
        return Contents(opaque_slot(*sizes, ", ".join(("opaque slot", *_traits(cache)))))
    tag = ", ".join(("opaque block", *_traits(cache), f"kernel block of {cache.kernel_tokens} tokens"))
    return Contents(opaque_block(*sizes, int(cache.spec.block_size), tag))


def _block_bytes(cache: CacheTensor) -> int:
    tensor = cache.tensor
    per_kernel_block = prod(tensor.shape[1:]) * tensor.element_size()
    return per_kernel_block * (tensor.shape[0] // cache.num_blocks)


def _num_shards(cache: CacheTensor) -> int:
    """Number of distinct shards of a block over all ranks; 1 if every rank holds the whole."""
    spec = cache.spec
    if isinstance(spec, MambaSpec):
        return 1 if spec.tp_replicated else cache.tp_size
    if isinstance(spec, AttentionSpec) and spec.max_tp_shards is not None:
        return min(cache.tp_size, int(spec.max_tp_shards))
    return min(cache.tp_size, cache.num_heads)


def _traits(cache: CacheTensor) -> list[str]:
    spec, layer = cache.spec, cache.layer
    traits = [f"layer {class_path(type(layer))}", f"backend {class_path(cache.backend)}"]
    if isa := cpu_isa(cache):
        traits.append(f"isa {isa}")
    if isinstance(spec, MambaSpec):
        return [*traits, f"shapes {spec.shapes}", f"dtypes {spec.dtypes}"]
    quantised = getattr(spec, "kv_quant_mode", None)
    if quantised:
        traits.append(f"{quantised.name.lower()} {getattr(layer, 'kv_cache_dtype', '')}".strip())
        traits.append(f"scales {[getattr(layer, f'_{s}_scale_float', 1.0) for s in 'kv']}")
    shape, strides = (list(map(int, of[1:])) for of in (cache.tensor.shape, cache.tensor.stride()))
    return [*traits, f"dtype {cache.tensor.dtype}", f"[head, token, content] {shape} by {strides}"]
