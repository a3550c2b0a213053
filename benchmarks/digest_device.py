"""What a whole digest of device memory costs, by model: milliseconds per GB, table and waiting included.

    python -m benchmarks.digest_device

4,096 tokens in scattered blocks of a pool of 300, on the first GPU; the best of five turns. Needs a GPU.
"""

from __future__ import annotations

import time
from dataclasses import replace

from kvferry import plan
from kvferry.core.digest import digest_parts, most_bytes
from kvferry.core.sample import Placement, sample_request
from kvferry.endpoint.load_digest import LoadDigest
from kvferry.models import Topology, describe, model_named
from kvferry.transport.cuda import Cuda, has_cuda

ENGINES = (
    ("llama-3.1-8b", "layout=NHD-apart,blocks=300"),
    ("llama-3.1-8b", "layout=HND,blocks=300"),
    ("gpt-oss-20b", "blocks=300"),
    ("deepseek-v3", "blocks=300"),
    ("qwen3-next-80b", "blocks=300"),
)
TURNS = 5


def main() -> None:
    if not has_cuda():
        print("no GPU here: nothing is measured")
        return
    cuda = Cuda(0)
    for name, topology in ENGINES:
        engine = describe(model_named(name), Topology.parse(topology), "engine")
        request = sample_request(engine, engine, 4096, placement=Placement.SCATTERED)
        (parts,) = digest_parts(plan(engine, engine, 0), request).values()
        rank = engine.rank(0)
        regions = tuple(
            replace(region, device="cuda:0", address=cuda.allocate(region.num_bytes))
            for region in rank.regions
        )
        here = replace(engine, ranks=(replace(rank, regions=regions), *engine.ranks[1:]))
        total, best = sum(most_bytes(engine, part) for part in parts), float("inf")
        for turn in range(TURNS):
            started = time.perf_counter()
            LoadDigest(here, 0, "src", lambda: True).sums(request.src, parts, turn)
            best = min(best, time.perf_counter() - started)
        print(f"{name:<15} {topology:<30} {total / 1e6:5.0f} MB  {1e12 * best / total:6.1f} ms per GB")
        for region in regions:
            cuda.free(region.address)
    cuda.close()


if __name__ == "__main__":
    main()
