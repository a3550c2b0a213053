"""What a connector costs before it serves: registering a large pool, and the first contact of two engines.

    make vllm-startup            needs the environment of `make e2e`

Two real vLLM engines on a CPU with 100,000 blocks of 8 KiB in each of four layers (llama, one KV head, bf16,
blocks of 32): kvferry, and vLLM's own NixlConnector, turn by turn. First contact is how much longer the first
request takes than the median of the next five. Memory is that of the processes that hold the cache.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.e2e.harness import KVFERRY, STOCK, Engine, Nursery, ferry

NUM_BLOCKS = 100_000
TURNS = 3
ARGS = {"dtype": "bfloat16", "block_size": 32, "num_gpu_blocks_override": NUM_BLOCKS}


def measure(nursery: Nursery, connector: Mapping[str, Any]) -> dict[str, float]:
    model = nursery.make("llama-1kv")
    src, dst = (nursery.begin(model, connector, **ARGS) for _ in range(2))
    for engine in (src, dst):
        engine.wait_ready()
        engine.ask(prompt(99))  # bf16 kernels want a warm-up
    before = memory(src), memory(dst)
    took = [timed(src, dst, prompt(seed)) for seed in range(6)]
    after = memory(src), memory(dst)
    result = {
        "register_ms": 1e3 * max(src.register_seconds(), dst.register_seconds()),
        "first_contact_ms": 1e3 * (took[0] - median(took[1:])),
        "request_ms": 1e3 * median(took[1:]),
        "memory_mb": (sum(after) - sum(before)) / 1e6,
        "at_rest_mb": sum(before) / 1e6,
    }
    src.close()
    dst.close()
    return result


def prompt(seed: int) -> list[int]:
    return [(seed * 17 + 31 * index) % 256 for index in range(300)]


def timed(src: Engine, dst: Engine, tokens: list[int]) -> float:
    started = time.perf_counter()
    ferry(src, dst, tokens, 2)
    return time.perf_counter() - started


def memory(engine: Engine) -> int:
    """Resident bytes of all of its processes."""
    return sum(resident(pid) for pid in engine.pids())


def resident(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


def main() -> None:
    results: dict[str, list[dict[str, float]]] = {"kvferry": [], "NixlConnector": []}
    with tempfile.TemporaryDirectory() as logs, Nursery(Path(logs)) as nursery:
        for _ in range(TURNS):
            for name, connector in (("kvferry", KVFERRY), ("NixlConnector", STOCK)):
                results[name].append(measure(nursery, connector))
                print(name, results[name][-1], flush=True)
    medians = {
        name: {key: median(turn[key] for turn in turns) for key in turns[0]}
        for name, turns in results.items()
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(medians, indent=1) + "\n", encoding="utf-8")
    table = Table(title=f"{NUM_BLOCKS:,} blocks × 4 layers; medians of {TURNS} turns", title_justify="left")
    columns = ("connector", "register", "first contact", "a request", "memory of first contact", "at rest")
    for column in columns:
        table.add_column(column, justify="left" if column == "connector" else "right")
    for name, row in medians.items():
        table.add_row(
            name,
            f"{row['register_ms']:.0f} ms",
            f"{row['first_contact_ms']:.0f} ms",
            f"{row['request_ms']:.0f} ms",
            f"{row['memory_mb']:+.0f} MB",
            f"{row['at_rest_mb']:.0f} MB",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
