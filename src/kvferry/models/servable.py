"""Whether an engine would start as a topology says. kvferry moves the bytes of more than engines serve."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.core.shard import Sharding
from kvferry.models.model import Model
from kvferry.models.topology import Topology


def why_not_served(model: Model, topology: Topology) -> Iterator[str]:
    """Each reason for which vLLM, and engines like it, would refuse to start.

    >>> from kvferry.models import model_named
    >>> list(why_not_served(model_named("llama-3.1-70b"), Topology(tp=7)))
    ['64 attention heads do not divide by tp=7', '8 KV heads and tp=7: neither divides by the other']
    >>> list(why_not_served(model_named("llama-3.1-70b"), Topology(tp=16)))
    []
    """
    tp, num_heads = topology.tp, model.num_query_heads
    if num_heads % tp:
        yield f"{num_heads} attention heads do not divide by tp={tp}"
    for num_kv_heads in sorted(_kv_heads(model)):
        if num_kv_heads % tp and tp % num_kv_heads:
            yield f"{num_kv_heads} KV heads and tp={tp}: neither divides by the other"


def _kv_heads(model: Model) -> set[int]:
    parts = (part for layer in model.layers for cache in layer.caches for part in cache.page.parts)
    return {
        dim.size
        for part in parts
        for dim in part.dims
        if dim.axis == "head" and dim.sharding is Sharding.SPREAD
    }
