"""Caches whose inside is not known: a block, or a slot, is one item.

It can be moved as it is or not at all. Whatever decides how a kernel may have written it is in the tag,
which both sides must share: the backend, the dtype, the shape of a block with its heads, the kernel's own
block. Equal engines work; the others are refused, and the tags say why.
"""

from __future__ import annotations

from math import prod

from vllm.v1.kv_cache_interface import AttentionSpec, CircularBufferSpec, MambaSpec

from kvferry.integrations.vllm.worker.attention_layouts import CacheTensor, Contents, class_path, cpu_isa
from kvferry.layout.pages import opaque_block, opaque_slot


def opaque(cache: CacheTensor) -> Contents:
    """The cache as one item per block or slot and rank."""
    sizes = (_block_bytes(cache), _num_shards(cache))
    if isinstance(cache.spec, MambaSpec | CircularBufferSpec):
        return Contents(opaque_slot(*sizes, ", ".join(("opaque slot", *_traits(cache)))))
    tag = ", ".join(("opaque block", *_traits(cache), f"kernel block of {cache.kernel_tokens} tokens"))
    return Contents(opaque_block(*sizes, int(cache.spec.block_size), tag))


def _block_bytes(cache: CacheTensor) -> int:
    """Bytes of one scheduler's block: as many kernel blocks as it has."""
    tensor = cache.tensor
    per_kernel_block = prod(tensor.shape[1:]) * tensor.element_size()
    return per_kernel_block * (tensor.shape[0] // cache.num_blocks)


def _num_shards(cache: CacheTensor) -> int:
    """How many different blocks the ranks hold between them: one where each holds the whole."""
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
