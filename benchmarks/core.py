"""What the core costs: planning per peer, selecting per request.

    make bench            a table, and the same numbers as JSON in benchmarks/core.json

Times are the best of several runs on this machine; compare ratios, not milliseconds, across machines.
"""

from __future__ import annotations

import json
import math
import platform
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from kvferry import (
    AxisMap,
    BlockTable,
    Digit,
    Group,
    Manifest,
    Rank,
    Refused,
    Region,
    Request,
    Route,
    Span,
    State,
    View,
    lower,
    plan,
    prove,
    select,
)
from kvferry.models import Layer, Model, Topology, describe
from kvferry.models.model import attention

BLOCK = 16
HEADS, DIM = 8, 128


def engine(tp: int, num_layers: int, num_blocks: int, **topology: Any) -> Manifest:
    """GQA layers with K and V as states of their own."""
    cache = attention(HEADS, DIM, "bf16")
    model = Model("gqa", tuple(Layer(f"layers.{i}", (cache,)) for i in range(num_layers)))
    return describe(model, Topology(tp=tp, block=BLOCK, blocks=num_blocks, **topology), f"tp{tp}")


def route(src: Manifest, dst: Manifest, dst_rank: int = 1) -> Route:
    return lower(prove(plan(src, dst, dst_rank)))


def best(work: Callable[[], object], repeat: int = 9) -> float:
    """Milliseconds of the fastest run."""
    times = []
    for _ in range(repeat):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times) * 1e3


def exponent(sizes: list[int], times: list[float]) -> float:
    """The slope of log(time) over log(size): 0 is constant, 1 is linear."""
    return float(np.polyfit(np.log(sizes), np.log(times), 1)[0])


def peak_kib(work: Callable[[], object]) -> float:
    tracemalloc.start()
    kept = work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    del kept
    return peak / 1024


def bench_planning() -> list[dict[str, Any]]:
    pools = [10**3, 10**4, 10**5, 10**6]
    pairs = {pool: (engine(8, 64, pool), engine(4, 64, pool)) for pool in pools}
    # Pools take turns, so that a slow second of the machine does not fall on one of them alone.
    times: dict[int, list[float]] = {pool: [] for pool in pools}
    for _ in range(7):
        for pool, pair in pairs.items():
            times[pool].append(best(lambda pair=pair: route(*pair), 4))
    rows = [
        {
            "what": "plan",
            "pool_blocks": pool,
            "ms": min(times[pool]),
            "peak_kib": peak_kib(lambda pair=pair: route(*pair)),
        }
        for pool, pair in pairs.items()
    ]
    rows[-1]["exponent_in_pool"] = exponent(pools, [row["ms"] for row in rows])
    rows[-1]["ratio_largest_to_smallest_pool"] = rows[-1]["ms"] / rows[0]["ms"]
    layers = [16, 32, 64, 128]
    engines = [(engine(8, n, 1000), engine(4, n, 1000)) for n in layers]
    by_layers = [best(lambda pair=pair: route(*pair), 5) for pair in engines]
    rows[-1]["exponent_in_layers"] = exponent(layers, by_layers)
    return rows


def bench_whole_engine() -> list[dict[str, Any]]:
    """All destination ranks of two large engines, one after another."""
    src, dst = engine(128, 1000, 1000), engine(96, 1000, 1000)
    started = time.perf_counter()
    for rank in dst.ranks:
        route(src, dst, rank.rank)
    whole = {"what": "plan all, 1,000 layers, TP128 -> TP96", "ranks": len(dst.ranks)}
    return [whole | {"s": time.perf_counter() - started}, refusing()]


def refusing() -> dict[str, Any]:
    """2,000 states that all sit on the same bytes, on both sides."""
    states = tuple(State(f"s{i}", (), 2, "bf16") for i in range(2000))
    axes = {"token": AxisMap((Digit(BLOCK, 2),))}
    views = tuple(View.of(state.name, "full", "kv", block_stride=32, axes=axes) for state in states)
    ranks = (Rank(0, (Region("kv", 32_000),), views),)
    manifest = Manifest("one place", states, (Group("full", 1000, BLOCK),), ranks)
    made = plan(manifest, manifest, 0)

    def refused() -> Refused:
        try:
            prove(made)
        except Refused as error:
            return error
        raise SystemExit("a plan was proved that writes each byte 2,000 times")

    found = refused()
    return {
        "what": "refuse 2,000 states on the same bytes",
        "findings": len(found.findings) + found.num_more,
        "s": best(refused, 3) / 1e3,
        "peak_kib": peak_kib(refused),
    }


def bench_fusing() -> dict[str, Any]:
    src, dst = engine(8, 64, 1000), engine(4, 64, 1000)
    num_blocks = 10
    ids = {"full": BlockTable.of(np.arange(num_blocks) * 7)}
    selection = select(route(src, dst), Request(ids, ids, {"full": (Span(0, num_blocks * BLOCK),)}))
    per = {rank: len(runs) / (64 * num_blocks) for rank, runs in selection.reads.items()}
    return {"what": "runs per (layer, block, source), K and V fused", "by_source": per}


def bench_selecting() -> list[dict[str, Any]]:
    pool = 1 << 14
    src = dst = engine(4, 64, pool)
    planned = route(src, dst)
    rng = np.random.default_rng(0)
    rows = []
    for name in ("scattered", "consecutive"):
        sizes = [128, 256, 512, 1024, 2048, 4096]
        for n in sizes:
            ids = rng.permutation(pool)[:n] if name == "scattered" else np.arange(n) + 5
            other = rng.permutation(pool)[:n] if name == "scattered" else np.arange(n) + 9
            request = Request(
                {"full": BlockTable.of(ids)}, {"full": BlockTable.of(other)}, {"full": (Span(0, n * BLOCK),)}
            )
            ms = best(lambda request=request: select(planned, request), 25)
            runs = select(planned, request).num_runs
            rows.append({"what": f"select, {name}", "blocks": n, "ms": ms, "runs": runs})
        rows[-1]["exponent_in_blocks"] = exponent(sizes[1:], [row["ms"] for row in rows[-len(sizes) + 1 :]])
    return rows


def show(result: dict[str, Any]) -> None:
    table = Table(
        title="64 GQA layers, K and V as states of their own, blocks of 16 tokens. plan = compare + plan"
        " + prove + lower of one rank, TP8 -> TP4; select = select + coalesce from one source.",
        title_justify="left",
    )
    for column in ("what", "size", "ms", "runs", "KiB peak", "fitted exponent"):
        table.add_column(column, justify="left" if column == "what" else "right", no_wrap=True)
    for row in result["planning"]:
        fits = [f"{k.removeprefix('exponent_in_')} {row[k]:.2f}" for k in row if k.startswith("exponent")]
        table.add_row(
            row["what"],
            f"{row['pool_blocks']:,} blocks",
            f"{row['ms']:.1f}",
            "",
            f"{row['peak_kib']:,.0f}",
            ", ".join(fits),
        )
    for row in result["selecting"]:
        fits = [f"blocks {row[k]:.2f}" for k in row if k.startswith("exponent")]
        table.add_row(
            row["what"],
            f"{row['blocks']:,} blocks",
            f"{row['ms']:.2f}",
            f"{row['runs']:,}",
            "",
            "".join(fits),
        )
    console = Console(width=100)
    console.print(table)
    for row in result["large"]:
        console.print(
            ", ".join(
                f"{key} {value:,.2f}" if isinstance(value, float) else f"{key} {value}"
                for key, value in row.items()
            )
        )
    console.print(f"runs per (layer, block, source) after fusing: {result['fusing']['by_source']}")
    ratio = result["planning"][-1]["ratio_largest_to_smallest_pool"]
    console.print(f"planning with 10^6 blocks in the pool against 10^3: {ratio:.2f} x")


def main() -> None:
    result = {
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "machine": platform.machine(),
        "planning": bench_planning(),
        "large": bench_whole_engine(),
        "fusing": bench_fusing(),
        "selecting": bench_selecting(),
    }
    if any(math.isnan(row["ms"]) for row in result["planning"]):
        raise SystemExit("a measurement failed")
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    show(result)


if __name__ == "__main__":
    main()
