"""The caches as engines describe them, for whole fetches."""

from __future__ import annotations

from dataclasses import replace

from kvferry.cli.bench.grid import NUM_LAYERS, TOKENS_PER_BLOCK, CacheShape
from kvferry.core.identity import STATED, Identity
from kvferry.core.manifest import Manifest, Region
from kvferry.models import Layer, Model, Topology, describe
from kvferry.models.cache import attention
from kvferry.runtime import Timing

GROUP = "full"
NUMBERED_CELLS = Identity.of({STATED: "cells numbered by kvferry bench"})
BENCH_TIMING = Timing(lease=300, meet=60, read=300)
"""A slow fabric may take minutes; nobody is to give up meanwhile."""


def cache_manifest(engine: str, shape: CacheShape, memory: Region) -> Manifest:
    """An engine of one rank, whose layers lie one behind the other in one piece of memory."""
    cache = attention(shape.num_heads, shape.head_dim, "bf16")
    model = Model("bench", tuple(Layer(f"layers.{i}", (cache,)) for i in range(NUM_LAYERS)))
    manifest = describe(model, Topology(block=TOKENS_PER_BLOCK, blocks=shape.num_blocks), engine)
    (rank,) = manifest.ranks
    regions = tuple(
        replace(region, address=memory.address + i * shape.layer_bytes, device=memory.device)
        for i, region in enumerate(rank.regions)
    )
    return replace(manifest, ranks=(replace(rank, regions=regions),), identity=NUMBERED_CELLS)
