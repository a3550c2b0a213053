"""What a digest costs: CPU time of one side, by model and layout, in memory that no cache holds.

    python -m benchmarks.digest

4,096 tokens in scattered blocks of a pool of 300; numpy and a read of another process's memory (CMA) in
turns, the best of each. See docs/lab/performance.md.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from kvferry import plan
from kvferry.core.digest import DigestSide, digest_parts, most_bytes
from kvferry.core.digest_cells import sums_by_numpy
from kvferry.core.sample import Placement, sample_request
from kvferry.models import Topology, describe, model_named

ENGINES = (
    ("llama-3.1-8b", "layout=NHD-apart,blocks=300"),
    ("llama-3.1-8b", "layout=HND,blocks=300"),
    ("llama-3.1-8b", "layout=cpu-vec,blocks=300"),
    ("llama-3.1-8b", "layout=HND,blocks=300,dtype=fp8_e4m3"),
    ("gpt-oss-20b", "blocks=300"),
    ("deepseek-v3", "blocks=300"),
    ("qwen3-next-80b", "blocks=300"),
)
TURNS = 5
EVERY = 100
CMA_BYTES, RUN_BYTES = 256 << 20, 32 << 10


class _Run(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t)]


class OtherProcess:
    """A process whose memory is read in scattered runs, as a load over CMA does."""

    def __init__(self) -> None:
        self._memory = np.full(CMA_BYTES, 7, np.uint8)
        self._to = np.zeros(CMA_BYTES, np.uint8)
        self._pid = os.fork()
        if not self._pid:
            signal.pause()
            os._exit(0)
        order = np.random.default_rng(1).permutation(CMA_BYTES // RUN_BYTES).tolist()
        starts = [RUN_BYTES * i for i in order]
        self._calls = [starts[i : i + 512] for i in range(0, len(starts), 512)]
        self._read = ctypes.CDLL(None, use_errno=True).process_vm_readv
        self._read.restype = ctypes.c_ssize_t

    def read(self) -> None:
        for starts in self._calls:
            theirs = (_Run * len(starts))(*(_Run(self._memory.ctypes.data + at, RUN_BYTES) for at in starts))
            ours = (_Run * len(starts))(*(_Run(self._to.ctypes.data + at, RUN_BYTES) for at in starts))
            number = ctypes.c_ulong(len(starts))
            if self._read(self._pid, ours, number, theirs, number, ctypes.c_ulong(0)) < 0:
                raise OSError(ctypes.get_errno(), "process_vm_readv")

    def close(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def seconds_of(function: Callable[[], object]) -> float:
    started = time.process_time()
    function()
    return time.process_time() - started


def main() -> None:
    other = OtherProcess()
    try:
        for name, topology in ENGINES:
            engine = describe(model_named(name), Topology.parse(topology), "engine")
            request = sample_request(engine, engine, 4096, placement=Placement.SCATTERED)
            (parts,) = digest_parts(plan(engine, engine, 0), request).values()
            rank = engine.rank(0)
            memory = {region.name: np.full(region.num_bytes, 7, np.uint8) for region in rank.regions}
            total = sum(most_bytes(engine, part) for part in parts)
            best: dict[str, float] = {}
            for _ in range(TURNS):
                best["CMA"] = max(best.get("CMA", 0), CMA_BYTES / seconds_of(other.read))
                chunk_sums = partial(sums_by_numpy, memory)
                side = DigestSide(engine, rank, request.src, memory, "src", chunk_sums)
                taken = seconds_of(partial(side.sums, parts))
                best["digest"] = max(best.get("digest", 0), total / taken)
            cma = best.pop("CMA")
            print(f"{name:<15} {topology:<37} {total / 1e6:4.0f} MB  CMA {cma / 1e9:4.2f} GB/s", end="")
            for way, pace in best.items():
                print(
                    f"  {way} {pace / 1e9:4.2f} GB/s, 1 in {EVERY}: {100 * cma / pace / EVERY:3.1f} %", end=""
                )
            print(flush=True)
    finally:
        other.close()


if __name__ == "__main__":
    main()
