"""Caches whose inside is not known: a block, or a slot, is one item.

It can be moved as it is or not at all. Whatever decides how a kernel may have written it is in the tag,
which both sides must share: the backend, the dtype, the shape of a block with its heads, the kernel's own
block. Equal engines work; the others are refused, and the tags say why.
"""

from __future__ import annotations

from math import prod

from vllm.v1.kv_cache_interface import AttentionSpec, CircularBufferSpec, MambaSpec

from kvferry.integrations.vllm.worker.interiors import Contents, Subject, class_path, cpu_isa
from kvferry.layout.pages import opaque_block, opaque_slot


def opaque(subject: Subject) -> Contents:
    """The cache as one item per block or slot and rank."""
    sizes = (_block_bytes(subject), _num_shards(subject))
    if isinstance(subject.spec, MambaSpec | CircularBufferSpec):
        return Contents(opaque_slot(*sizes, ", ".join(("opaque slot", *_traits(subject)))))
    tag = ", ".join(("opaque block", *_traits(subject), f"kernel block of {subject.kernel_tokens} tokens"))
    return Contents(opaque_block(*sizes, int(subject.spec.block_size), tag))


def _block_bytes(subject: Subject) -> int:
    """Bytes of one scheduler's block: as many kernel blocks as it has."""
    tensor = subject.tensor
    per_kernel_block = prod(tensor.shape[1:]) * tensor.element_size()
    return per_kernel_block * (tensor.shape[0] // subject.num_blocks)


def _num_shards(subject: Subject) -> int:
    """How many different blocks the ranks hold between them: one where each holds the whole."""
    spec = subject.spec
    if isinstance(spec, MambaSpec):
        return 1 if spec.tp_replicated else subject.tp_size
    if isinstance(spec, AttentionSpec) and spec.max_tp_shards is not None:
        return min(subject.tp_size, int(spec.max_tp_shards))
    return min(subject.tp_size, subject.num_heads)


def _traits(subject: Subject) -> list[str]:
    spec, layer = subject.spec, subject.layer
    traits = [f"layer {class_path(type(layer))}", f"backend {class_path(subject.backend)}"]
    if isa := cpu_isa(subject):
        traits.append(f"isa {isa}")
    if isinstance(spec, MambaSpec):
        return [*traits, f"shapes {spec.shapes}", f"dtypes {spec.dtypes}"]
    quantised = getattr(spec, "kv_quant_mode", None)
    if quantised:
        traits.append(f"{quantised.name.lower()} {getattr(layer, 'kv_cache_dtype', '')}".strip())
        traits.append(f"scales {[getattr(layer, f'_{s}_scale_float', 1.0) for s in 'kv']}")
    shape, strides = (list(map(int, of[1:])) for of in (subject.tensor.shape, subject.tensor.stride()))
    return [*traits, f"dtype {subject.tensor.dtype}", f"[head, token, content] {shape} by {strides}"]
