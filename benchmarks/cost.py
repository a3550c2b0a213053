"""How well the cost model tells the time of a read, and the coefficients that tell it best here.

    python -m benchmarks.cost stream       one host, packed reads; also writes benchmarks/cost-stream.json
    python -m benchmarks.cost cma          the same by NIXL (KVFERRY_EXPOSE=fabric)

One source process, one reader, scattered runs. All sizes take turns; times are medians of the turns. "Known"
is the link profile that ``kvferry plan`` uses; "fitted" is fitted to these very reads.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from kvferry import Runs
from kvferry.cli.link_profile import HOST_CMA, TCP_STREAM, Cost, Traffic, fitted
from kvferry.cli.processes import FABRICS, AskingTransport
from kvferry.transport.process import ProcessTransport
from kvferry.transport.region_memory import RegionMemory
from tests.support.sources import serving

POOL_BYTES = 512 << 20
RUN_BYTES = (256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 1 << 20)
TOTAL_BYTES = (16 << 10, 256 << 10, 4 << 20, 32 << 20, 256 << 20)
MAX_RUNS = 32_768
TURNS = 7
KNOWN = {"cma": HOST_CMA, "stream": TCP_STREAM}


class Case(NamedTuple):
    """One size of a read, and how long it took."""

    run_bytes: int
    num_runs: int
    seconds: float

    @property
    def traffic(self) -> Traffic:
        return Traffic(1, self.num_runs, self.run_bytes * self.num_runs)


def sizes(most_runs: int) -> list[tuple[int, int]]:
    """Run bytes and number of runs of each case."""
    pairs = [(run, total // run) for total in TOTAL_BYTES for run in RUN_BYTES]
    return [(run, num_runs) for run, num_runs in pairs if 1 <= num_runs <= most_runs]


def scattered(run_bytes: int, num_runs: int) -> Runs:
    """Runs in no order, no two of which touch."""
    step = max(2 * run_bytes, 4096)
    num_places = min(POOL_BYTES // step, max(4 * num_runs, 64))
    rng = np.random.default_rng([run_bytes, num_runs])
    src, dst = (rng.permutation(num_places)[:num_runs] * step for _ in range(2))
    return Runs(src, dst, np.full(len(src), run_bytes))


def timed(transport: ProcessTransport, runs: Runs) -> float:
    """Seconds of a read, from the call to its end."""
    started = time.perf_counter()
    transport.read(0, "src", runs)
    while not (ends := transport.poll()):
        time.sleep(2e-5)
    seconds = time.perf_counter() - started
    if ends[0].error:
        raise RuntimeError(ends[0].error)
    return seconds


def measure(most_runs: int) -> list[Case]:
    """All sizes, in turns."""
    with serving(1, [POOL_BYTES], "cpu") as served:
        source, holder, transport = served.sources[0], RegionMemory("cpu"), AskingTransport()
        holder.add("kv", np.zeros(POOL_BYTES, np.uint8))
        transport.register(holder.regions)
        transport.connect("src", source.card, source.regions)
        lists = {size: scattered(*size) for size in sizes(most_runs)}
        for runs in lists.values():  # the first touch of memory costs more
            timed(transport, runs)
        turns = [{size: timed(transport, runs) for size, runs in lists.items()} for _ in range(TURNS)]
        transport.close()
        holder.free()
    return [Case(run, num, median(turn[run, num] for turn in turns)) for run, num in lists]


def show(cases: list[Case], costs: dict[str, Cost]) -> None:
    names = "".join(f"{name + ' ms':>14}{'off':>7}" for name in costs)
    print(f"{'run':>9}{'runs':>8}{'bytes':>12}{'measured ms':>13}{names}")
    for run_bytes, num_runs, seconds in sorted(cases, key=lambda case: case.seconds):
        row = f"{run_bytes:>9}{num_runs:>8}{run_bytes * num_runs:>12}{seconds * 1e3:>13.3f}"
        for cost in costs.values():
            told = cost.of(Traffic(1, num_runs, run_bytes * num_runs)).seconds
            row += f"{told * 1e3:>14.3f}{told / seconds - 1:>+7.0%}"
        print(row)
    for name, cost in costs.items():
        off = sorted(abs(cost.of(case.traffic).seconds / case.seconds - 1) for case in cases)
        within = sum(value <= 0.3 for value in off)
        print(f"{name}: {cost}")
        print(f"  {within} of {len(off)} within 30 %; median {median(off):.0%}, worst {off[-1]:.0%}")


def show_reads(over: str) -> None:
    cases = measure(MAX_RUNS)
    known = KNOWN[over].cost
    path = Path(__file__).with_name(f"cost-{over}.json")
    path.write_text(json.dumps([case._asdict() for case in cases], indent=1) + "\n", encoding="utf-8")
    show(cases, {"known": known, "fitted": fitted(known, [(case.traffic, case.seconds) for case in cases])})


def main() -> None:
    over = sys.argv[1] if len(sys.argv) > 1 else "stream"
    os.environ |= FABRICS["cma" if over == "cma" else "tcp"]
    show_reads(over)


if __name__ == "__main__":
    main()
