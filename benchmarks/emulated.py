"""Reads over TCP, which UCX emulates, by the length of a run: careful (the default) and fast.

    python benchmarks/emulated.py

One source process, one reader, loopback; at most 2,000 runs of each length, scattered over 128 MiB. Why:
"Reads that the fabric cannot do by itself" in docs/engine.md.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from statistics import median

import numpy as np

from kvferry.core.runs import Runs
from kvferry.testing.sources import Holder, serving
from kvferry.transport.nixl import NixlTransport
from kvferry.transport.ucx import FABRICS

POOL_BYTES = 128 << 20
LENGTHS = (4 << 10, 16 << 10, 64 << 10, 255 << 10, POOL_BYTES)
TURNS = 5


def measure() -> list[float]:
    """GB/s of each length, in the environment of this process."""
    with serving(1, [POOL_BYTES], "cpu") as served:
        source, holder, transport = served.sources[0], Holder("cpu"), NixlTransport()
        holder.add("kv", np.zeros(POOL_BYTES, np.uint8))
        transport.register(holder.regions)
        transport.connect("src", source.card, source.regions)
        speeds = []
        for length in LENGTHS:
            offsets = np.random.default_rng(0).permutation(POOL_BYTES // length)[:2000] * length
            runs = Runs(offsets, offsets, np.full(len(offsets), length))
            speeds.append(len(offsets) * length / median(timed(transport, runs) for _ in range(TURNS)) / 1e9)
        transport.close()
        holder.free()
    return speeds


def timed(transport: NixlTransport, runs: Runs) -> float:
    started = time.perf_counter()
    transport.read(0, "src", runs)
    while not (ends := transport.poll()):
        time.sleep(1e-4)
    if ends[0].error:
        raise RuntimeError(ends[0].error)
    return time.perf_counter() - started


def main() -> None:
    print(f"{'GB/s':10}" + "".join(f"{f'{length >> 10} KiB':>12}" for length in LENGTHS))
    for setting in ("careful", "fast"):
        env = os.environ | FABRICS["tcp"] | {"KVFERRY_EMULATED_READS": setting}
        child = subprocess.run(
            [sys.executable, __file__, "measure"], env=env, check=True, capture_output=True, text=True
        )
        speeds = child.stdout.splitlines()[-1].split()
        print(f"{setting:10}" + "".join(f"{float(speed):12.2f}" for speed in speeds))


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        print(*measure())
    else:
        main()
