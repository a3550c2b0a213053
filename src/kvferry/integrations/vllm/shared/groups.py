"""Groups of layers that share a block table, described identically by the scheduler and its workers."""

from __future__ import annotations

from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size
from vllm.v1.kv_cache_interface import (
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

from kvferry.core.request import need_of
from kvferry.core.span import Span, Spans
from kvferry.core.state import Addressing, Group
from kvferry.errors import SpecError

POOL = "blocks"
"""All groups of a vLLM engine draw from one pool of blocks."""


def group_name(index: int) -> str:
    return f"group-{index}"


def needed_tokens(config: KVCacheConfig, index: int, num_tokens: int, num_kept: int = 0) -> Spans:
    """The tokens that a request must load for a group. Chunked attention needs only its last chunk."""
    group = describe_group(config, index)
    spec = spec_of_group(config, index)
    if not isinstance(spec, ChunkedLocalAttentionSpec):
        return need_of(group, num_tokens, num_kept)
    # vLLM keeps the blocks of the chunk that contains the next token.
    oldest = num_tokens // spec.attention_chunk_size * spec.attention_chunk_size
    start = max(oldest, num_kept)
    return (Span(start, num_tokens),) if start < num_tokens else ()


def is_prefix_cached(spec: KVCacheSpec) -> bool:
    """Whether vLLM's prefix cache keeps blocks of a group; it recomputes DeepSeek-V4.1's windows instead."""
    return bool(getattr(spec, "prefix_cacheable", True))  # older vLLM has no such property


def describe_group(config: KVCacheConfig, index: int, dcp_size: int = 1) -> Group:
    """A group. A block is spread over the context-parallel ranks, so it has ``dcp_size`` times the tokens."""
    group = config.kv_cache_groups[index]
    spec = spec_of_group(config, index)
    _check_group(group, spec)
    name = group_name(index)
    if isinstance(spec, MambaSpec | CircularBufferSpec):
        return Group(name, config.num_blocks, addressing=Addressing.SLOT, pool=POOL)
    num_tokens = resolve_dcp_kv_block_size(spec, dcp_size)
    return Group(name, config.num_blocks, num_tokens, pool=POOL, window=_window(spec))


def _check_group(group: KVCacheGroupSpec, spec: KVCacheSpec) -> None:
    """Reject groups that do not cache a request's own tokens on the device."""
    kind = type(spec).__name__
    if group.host_resident or not spec.has_layer_views:
        raise SpecError(f"kvferry cannot transfer caches that vLLM keeps in host memory ({kind})")
    if isinstance(spec, CrossAttentionSpec):
        raise SpecError("kvferry cannot transfer cross-attention caches: their tokens belong to the encoder")


def check_one_group(config: KVCacheConfig, version: str) -> None:
    """Reject windows and states on versions of vLLM that may zero their blocks during a load."""
    groups = [describe_group(config, index) for index in config.transfer_group_ids]
    if len(groups) > 1 or groups[0].window or groups[0].addressing is Addressing.SLOT:
        raise SpecError(
            f"vLLM {version} may zero blocks of sliding windows and recurrent states while they are loaded:"
            " use vLLM 0.32 or newer for this model"
        )


def _window(spec: KVCacheSpec) -> int:
    """Tokens that the next one reads. vLLM's window also counts the next one, and frees earlier blocks."""
    match spec:
        case SlidingWindowSpec():
            return max(1, int(spec.sliding_window) - 1)
        case ChunkedLocalAttentionSpec():
            return int(spec.attention_chunk_size)
        case _:
            return 0


def spec_of_group(config: KVCacheConfig, index: int) -> KVCacheSpec:
    """A group's specification; its first one if the group combines several."""
    spec = config.kv_cache_groups[index].kv_cache_spec
    return spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec
