"""What a digest costs: CPU time of one side, by model and layout, in memory that no cache holds.

    python benchmarks/digest.py

4,096 tokens in scattered blocks of a pool of 300; the best of three turns. See docs/reliability.md.
"""

from __future__ import annotations

import time

import numpy as np

from kvferry import plan
from kvferry.core.digest import DigestSide, digest_parts, num_bytes
from kvferry.core.sample import Placement, sample_request
from kvferry.models import Topology, describe, model_named

ENGINES = (
    ("llama-3.1-8b", "layout=NHD-apart,blocks=300"),
    ("llama-3.1-8b", "layout=HND,blocks=300"),
    ("llama-3.1-8b", "layout=cpu-vec,blocks=300"),
    ("llama-3.1-8b", "layout=HND,blocks=300,dtype=fp8_e4m3"),
    ("deepseek-v3", "blocks=300"),
    ("qwen3-next-80b", "blocks=300"),
)
TURNS = 3


def main() -> None:
    for name, topology in ENGINES:
        engine = describe(model_named(name), Topology.parse(topology), "engine")
        request = sample_request(engine, engine, 4096, placement=Placement.SCATTERED)
        (parts,) = digest_parts(plan(engine, engine, 0), request).values()
        memory = {region.name: np.full(region.num_bytes, 7, np.uint8) for region in engine.rank(0).regions}
        side = DigestSide(engine, engine.rank(0), request.src, memory, "src")
        total, seconds = sum(num_bytes(engine, part) for part in parts), []
        for _ in range(TURNS):
            started = time.process_time()
            side.sums(parts)
            seconds.append(time.process_time() - started)
        print(f"{name:<15} {topology:<37} {total / 1e6:5.0f} MB  {total / min(seconds) / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
