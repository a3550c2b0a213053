"""What the transport adds to NIXL: the same reads by NIXL alone and through kvferry, between two processes.

    python benchmarks/transport.py          a table, and the same numbers as JSON in benchmarks/transport.json
    python benchmarks/transport.py cuda:0   the same on device memory

Both ways share the processes, the memory and the minute: they take turns, and ratios are of medians.
"scattered" is 64 layers × 512 blocks of 16 KiB in no order; "one run" is the same number of bytes in a row.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from kvferry.core.runs import Runs
from kvferry.testing.sources import Holder, Source, serving
from kvferry.transport.emulation import Way
from kvferry.transport.nixl import Agent, NixlTransport, RegionTable, SlicePair, unpack_card
from kvferry.transport.ucx import UcxSettings, prepare_for_cuda

LAYERS, BLOCKS, BLOCK_BYTES = 64, 512, 16 << 10
POOL_BLOCKS = 2 * BLOCKS
"""Blocks of a layer's pool; a request has every other one, in no order, so that nothing can be merged."""
REGION_BYTES = LAYERS * POOL_BLOCKS * BLOCK_BYTES
TURNS = 7


def scattered() -> Runs:
    rng = np.random.default_rng(0)
    layers = np.repeat(np.arange(LAYERS) * POOL_BLOCKS, BLOCKS)
    src, dst = (
        (layers + np.concatenate([2 * rng.permutation(BLOCKS) for _ in range(LAYERS)])) * BLOCK_BYTES
        for _ in range(2)
    )
    return Runs(src, dst, np.full(len(src), BLOCK_BYTES))


def one_run() -> Runs:
    return Runs(np.array([0]), np.array([0]), np.array([LAYERS * BLOCKS * BLOCK_BYTES]))


class Raw:
    """NIXL alone: one list of descriptors, one post, then look until it is done."""

    def __init__(self, holder: Holder, source: Source) -> None:
        self.agent = Agent("raw", UcxSettings.from_environment(os.environ).engine_config(Way.FAST))
        self.dst, self.src = RegionTable("dst", holder.regions), RegionTable("src", source.regions)
        self.kind = self.dst.kinds[0].name
        self.registered = self.agent.register(self.kind, self.dst.whole())
        self.remote, metadata = unpack_card(source.card)
        self.agent.add(self.remote, metadata)

    def read(self, runs: Runs) -> tuple[float, float]:
        """Seconds until the post returned, and until all was in."""
        started = time.perf_counter()
        src = self.src.descriptors(runs.src, runs.num_bytes)
        dst = self.dst.descriptors(runs.dst, runs.num_bytes)
        handle = self.agent.prepare(SlicePair(self.kind, self.kind, src, dst), self.remote)
        is_done = self.agent.post(handle)
        posted = time.perf_counter()
        while not is_done:
            is_done = self.agent.check(handle)
        ended = time.perf_counter()
        self.agent.release(handle)
        return posted - started, ended - started

    def close(self) -> None:
        self.agent.remove(self.remote)
        self.agent.deregister(self.registered)


def ours(transport: NixlTransport, runs: Runs) -> tuple[float, float]:
    """Seconds until ``read`` returned, and until its end was polled."""
    started = time.perf_counter()
    transport.read(0, "src", runs)
    submitted = time.perf_counter()
    while not transport.poll():
        time.sleep(1e-4)
    return submitted - started, time.perf_counter() - started


def compare(raw: Raw, transport: NixlTransport, what: str, runs: Runs) -> dict[str, Any]:
    ours(transport, runs)
    raw.read(runs)
    pairs = [(raw.read(runs), ours(transport, runs)) for _ in range(TURNS)]
    (raw_post, raw_all), (our_post, our_all) = (
        [statistics.median(column) for column in zip(*side, strict=True)] for side in zip(*pairs, strict=True)
    )
    gigabytes = runs.total_bytes / 1e9
    return {
        "what": what,
        "num_runs": len(runs),
        "num_bytes": runs.total_bytes,
        "raw_post_ms": 1e3 * raw_post,
        "our_read_ms": 1e3 * our_post,
        "raw_total_ms": 1e3 * raw_all,
        "our_total_ms": 1e3 * our_all,
        "raw_gb_per_s": gigabytes / raw_all,
        "our_gb_per_s": gigabytes / our_all,
        "total_ratio": our_all / raw_all,
    }


def latency(transport: NixlTransport, big: Runs) -> dict[str, Any]:
    """How long ``read`` of a small request takes its caller while 512 MiB reads are under way."""
    small = Runs(big.src[:64], big.dst[:64], big.num_bytes[:64])
    times: list[float] = []
    for _ in range(3):
        for i in range(2):
            transport.read(i, "src", big)
        numbers = iter(range(100, 10**6))
        num_big, submitted = 2, 0
        while num_big:
            started = time.perf_counter()
            transport.read(next(numbers), "src", small)
            times.append(time.perf_counter() - started)
            submitted += 1
            time.sleep(1e-3)
            ends = transport.poll()
            submitted -= sum(end.transfer >= 100 for end in ends)
            num_big -= sum(end.transfer < 100 for end in ends)
        while submitted:
            submitted -= len(transport.poll())
            time.sleep(1e-3)
    p50, p99 = (1e6 * float(np.percentile(times, q)) for q in (50, 99))
    return {"calls": len(times), "p50_us": p50, "p99_us": p99, "max_us": 1e6 * max(times)}


def idle_cpu() -> float:
    before = time.process_time()
    time.sleep(1)
    return time.process_time() - before


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    if device != "cpu":
        prepare_for_cuda(os.environ)
    with serving(1, [REGION_BYTES], device) as served:
        source, holder = served.sources[0], Holder(device)
        holder.add("kv", np.zeros(REGION_BYTES, np.uint8))
        transport = NixlTransport()
        transport.register(holder.regions)
        transport.connect("src", source.card, source.regions)
        first = ours(transport, Runs(*(np.array([n]) for n in (0, 0, 64))))[1]
        second = ours(transport, Runs(*(np.array([n]) for n in (0, 0, 64))))[1]
        raw = Raw(holder, source)
        lists = (("scattered", scattered()), ("one run", one_run()))
        rows = [compare(raw, transport, what, runs) for what, runs in lists]
        raw.close()
        result = {
            "python": platform.python_version(),
            "nixl": version("nixl"),
            "cpu_count": os.cpu_count(),
            "device": device,
            "ucx_tls": os.environ.get("UCX_TLS", ""),
            "reads": rows,
            "caller_while_busy": latency(transport, scattered()),
            "first_read_us": 1e6 * first,
            "second_read_us": 1e6 * second,
            "idle_cpu_cores": idle_cpu(),
        }
        transport.close()
        holder.free()
    show(result)
    if device == "cpu":
        path = Path(__file__).with_suffix(".json")
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def show(result: dict[str, Any]) -> None:
    table = Table(title=f"two processes, {result['device']}, NIXL {result['nixl']}; medians of {TURNS} turns")
    for name in ("read", "runs", "NIXL post ms", "our read() ms", "NIXL GB/s", "our GB/s", "time, ours/NIXL"):
        table.add_column(name, justify="left" if name == "read" else "right")
    for row in result["reads"]:
        table.add_row(
            row["what"],
            f"{row['num_runs']:,}",
            f"{row['raw_post_ms']:.1f}",
            f"{row['our_read_ms']:.3f}",
            f"{row['raw_gb_per_s']:.2f}",
            f"{row['our_gb_per_s']:.2f}",
            f"{row['total_ratio']:.2f}",
        )
    console = Console(width=110)
    console.print(table)
    busy = result["caller_while_busy"]
    console.print(
        f"read() while 512 MiB reads are under way: p50 {busy['p50_us']:.0f} µs, p99 {busy['p99_us']:.0f} µs,"
        f" max {busy['max_us']:.0f} µs ({busy['calls']} calls)"
    )
    console.print(
        f"first read after connect {result['first_read_us']:.0f} µs, the next {result['second_read_us']:.0f};"
        f" idle: {result['idle_cpu_cores']:.4f} cores"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
