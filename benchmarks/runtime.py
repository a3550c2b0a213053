"""What a direct fetch costs beside NIXL alone: the same run lists, the same two processes, turn by turn.

    make bench                                   host memory; also writes benchmarks/runtime.json
    python -m benchmarks.runtime cuda:0          device memory

64 layers × 512 blocks of 16 KiB (512 MiB), scattered (32,768 runs) and consecutive (64 runs, and one raw run
beside them); then the caller's time in ``fetch`` while such a read is in flight, and how long one block takes
from the call to its report when nothing else happens: that is what threads take to wake each other.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.raw_nixl import MeasuredDestination
from kvferry import BlockTable, Manifest, Span
from kvferry.cli.processes import FABRICS
from kvferry.models import Layer, Model, Topology, describe
from kvferry.models.model import attention
from kvferry.runtime import Timing
from kvferry.transport.settings import CUDA_ENVIRONMENT
from tests.support.fleet import DestinationFleet, SourceFleet

NUM_LAYERS, NUM_BLOCKS, BLOCK = 64, 512, 16
POOL = NUM_BLOCKS + 128
TURNS = 7


class TimedDestination(MeasuredDestination):
    """A destination rank that times its own calls: a pipe between would be slower than what is measured."""

    def timed(
        self, ticket: Any, tables: Mapping[str, BlockTable], need: Mapping[str, Any]
    ) -> dict[str, float]:
        """One fetch, from the call to its report."""
        self._recording.start()
        started = time.perf_counter()
        self.fetch(ticket, tables, need)
        called = time.perf_counter()
        while not (reports := self.poll()):
            time.sleep(0.0002)
        ended = time.perf_counter()
        if reports[0].failure is not None:
            raise RuntimeError(str(reports[0].failure))
        record = reports[0].record
        return {
            "fetch_ms": 1e3 * (called - started),
            "total_ms": 1e3 * (ended - started),
            "move_ms": 1e3 * record.move_seconds,
            "runs": record.num_runs,
            "bytes": record.num_bytes,
        }

    def prepare_ms(self) -> float:
        """NIXL's time to make one transfer of the last list, without posting it."""
        raw = self._opened()
        started = time.perf_counter()
        handles = [raw._prepared(peer, runs) for peer, runs in self._recording.reads]
        took = time.perf_counter() - started
        for handle in handles:
            raw._agent.release(handle)
        return 1e3 * took

    def alone(self, small: list[Any], tables: Any, need: Any) -> list[float]:
        """Microseconds from the call to the report of small requests, one after the other."""
        took: list[float] = []
        for ticket in small:
            started = time.perf_counter()
            self.fetch(ticket, tables, need)
            while not (reports := self.poll()):
                time.sleep(1e-5)
            took.append(1e6 * (time.perf_counter() - started))
            if reports[0].failure is not None:
                raise RuntimeError(str(reports[0].failure))
        return took

    def busy(self, big: list[Any], small: list[Any], tables: Any, need: Any) -> list[float]:
        """Microseconds in ``fetch`` of small requests while big ones are in flight."""
        took: list[float] = []
        waiting = {self.fetch(ticket, *asked) for ticket, *asked in big}
        for ticket in small:
            started = time.perf_counter()
            handle = self.fetch(ticket, tables, need)
            took.append(1e6 * (time.perf_counter() - started))
            waiting.add(handle)
            time.sleep(0.001)  # near 1,000 requests a second
        while waiting:
            for report in self.poll():
                if report.failure is not None:
                    raise RuntimeError(str(report.failure))
                waiting.discard(report.handle)
        return took


def engine(name: str) -> Manifest:
    cache = attention(2, 128, "bf16")
    model = Model("gqa", tuple(Layer(f"layers.{i}", (cache,)) for i in range(NUM_LAYERS)))
    return describe(model, Topology(block=BLOCK, blocks=POOL), name)


def tables(seed: int | None) -> dict[str, BlockTable]:
    ids = (
        np.arange(NUM_BLOCKS) + 3
        if seed is None
        else np.random.default_rng(seed).permutation(POOL)[:NUM_BLOCKS]
    )
    return {"full": BlockTable.of(ids)}


def measure(source: SourceFleet, destination: DestinationFleet, name: str) -> dict[str, Any]:
    seeds = (None, None) if name == "consecutive" else (1, 2)
    src, dst = tables(seeds[0]), tables(seeds[1])
    need = {"full": (Span(0, NUM_BLOCKS * BLOCK),)}
    rank = destination.ranks[0]
    turns = []
    for turn in range(TURNS + 1):
        ticket = source.offer(f"{name}-{turn}", src, NUM_BLOCKS * BLOCK)
        ours = rank.call("timed", ticket, dst, need)
        same, whole = rank.call("raw_same_runs"), rank.call("raw_one_run")
        turns.append((ours, 1e3 * same.seconds, 1e3 * whole.seconds, rank.call("prepare_ms")))
    turns = turns[1:]  # the first sets up connections
    return {
        "what": name,
        "runs": turns[0][0]["runs"],
        "bytes": turns[0][0]["bytes"],
        "fetch_call_ms": median(t[0]["fetch_ms"] for t in turns),
        "move_ms": median(t[0]["move_ms"] for t in turns),
        "total_ms": median(t[0]["total_ms"] for t in turns),
        "raw_same_ms": median(t[1] for t in turns),
        "raw_one_run_ms": median(t[2] for t in turns),
        "raw_prepare_ms": median(t[3] for t in turns),
        "of_raw_same": median(t[1] / t[0]["move_ms"] for t in turns),
        "of_raw_one_run": median(t[2] / t[0]["move_ms"] for t in turns),
        "lead_in_ms": median(t[0]["total_ms"] - t[0]["move_ms"] for t in turns),
    }


ONE_BLOCK, FEW_TOKENS = {"full": BlockTable.of([POOL - 1])}, {"full": (Span(0, 8),)}


def small_offers(source: SourceFleet, name: str) -> list[Any]:
    return [source.offer(f"{name}-{i}", ONE_BLOCK, 8) for i in range(400)]


def measure_alone(source: SourceFleet, destination: DestinationFleet) -> dict[str, Any]:
    small = small_offers(source, "alone")
    return percentiles(destination.ranks[0].call("alone", small, ONE_BLOCK, FEW_TOKENS))


def measure_busy(source: SourceFleet, destination: DestinationFleet) -> dict[str, Any]:
    need = {"full": (Span(0, NUM_BLOCKS * BLOCK),)}
    big = [(source.offer(f"big-{i}", tables(i), NUM_BLOCKS * BLOCK), tables(i + 50), need) for i in range(4)]
    small = small_offers(source, "small")
    return percentiles(destination.ranks[0].call("busy", big, small, ONE_BLOCK, FEW_TOKENS))


def percentiles(took: list[float]) -> dict[str, Any]:
    return {
        "calls": len(took),
        "p50_us": float(np.percentile(took, 50)),
        "p99_us": float(np.percentile(took, 99)),
        "max_us": max(took),
    }


def show(result: dict[str, Any]) -> None:
    console = Console(width=110)
    table = Table(
        title=f"a fetch of 512 MiB beside NIXL alone; medians of {TURNS} turns", title_justify="left"
    )
    for column in ("what", "runs", "fetch()", "move", "raw, same runs", "raw, one run", "lead-in", "prepare"):
        table.add_column(column, justify="left" if column == "what" else "right", no_wrap=True)
    for row in result["fetches"]:
        table.add_row(
            row["what"],
            f"{row['runs']:,}",
            f"{row['fetch_call_ms']:.2f} ms",
            f"{row['move_ms']:.0f} ms",
            f"{row['raw_same_ms']:.0f} ms {row['of_raw_same']:.2f}x",
            f"{row['raw_one_run_ms']:.0f} ms {row['of_raw_one_run']:.2f}x",
            f"{row['lead_in_ms']:.1f} ms",
            f"{row['raw_prepare_ms']:.1f} ms",
        )
    console.print(table)
    busy, alone = result["busy"], result["alone"]
    console.print(
        f"fetch() while 2 GiB are in flight, near 1,000 calls a second: p50 {busy['p50_us']:.0f} µs,"
        f" p99 {busy['p99_us']:.0f} µs of {busy['calls']} calls"
    )
    console.print(
        f"one block, alone, from the call to its report: p50 {alone['p50_us']:.0f} µs,"
        f" p99 {alone['p99_us']:.0f} µs"
    )


def main() -> None:
    timing = Timing(lease=60, meet=30, read=120)
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    env = FABRICS["cma"] if device == "cpu" else {**FABRICS["cma"], **CUDA_ENVIRONMENT}
    source = SourceFleet(engine("src"), timing=timing, device=device, env=env)
    actor = TimedDestination
    destination = DestinationFleet(engine("dst"), timing=timing, device=device, env=env, actor=actor)
    try:
        source.wait_whole()
        destination.wait_ready()
        fetches = [measure(source, destination, name) for name in ("scattered", "consecutive")]
        alone = measure_alone(source, destination)
        result = {"fetches": fetches, "alone": alone, "busy": measure_busy(source, destination)}
    finally:
        destination.close()
        source.close()
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    show(result)


if __name__ == "__main__":
    main()
