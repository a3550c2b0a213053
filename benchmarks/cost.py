"""How well the cost model tells the time of a read, and the coefficients that tell it best here.

    python -m benchmarks.cost stream       one host, packed reads; also writes benchmarks/cost-stream.json
    python -m benchmarks.cost cma          the same by NIXL (KVFERRY_EXPOSE=fabric)
    python -m benchmarks.cost fetches      whole fetches, each with what was predicted for it
    python -m benchmarks.cost cuda:0       such fetches on a device

One source process, one reader, scattered runs. All sizes take turns; times are medians of the turns. "Known"
is the link profile that ``kvferry plan`` uses; "fitted" is fitted to these very reads.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from kvferry import BlockTable, Runs, Span
from kvferry.cli.processes import AskingTransport
from kvferry.core.cost import Cost, Traffic
from kvferry.core.link_profile import HOST_CMA, TCP_STREAM
from kvferry.core.span import Spans
from kvferry.models import Layer, Model, Topology, describe
from kvferry.models.cache import attention
from kvferry.runtime import Timing
from kvferry.runtime.learned_cost import fitted
from kvferry.runtime.values import Record
from kvferry.testing.transport_world import Holder
from kvferry.transport.nixl import NixlTransport
from kvferry.transport.ucx import FABRICS
from kvferry.wire.ticket import Ticket
from tests.support.fleet import DestinationFleet, SourceFleet
from tests.support.fleet.actors import DestinationActor
from tests.support.sources import serving

POOL_BYTES = 512 << 20
RUN_BYTES = (256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 1 << 20)
TOTAL_BYTES = (16 << 10, 256 << 10, 4 << 20, 32 << 20, 256 << 20)
MAX_RUNS = 32_768
TURNS = 7
NUM_FETCHES = 100
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


def timed(transport: NixlTransport, runs: Runs) -> float:
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
        source, holder, transport = served.sources[0], Holder("cpu"), AskingTransport()
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


class RecordedDestination(DestinationActor):
    """A destination rank that gives the record of a fetch."""

    def record(self, ticket: Ticket, tables: Mapping[str, BlockTable], need: Mapping[str, Spans]) -> Record:
        self._endpoint.fetch(ticket, tables, need)
        while not (reports := self._endpoint.poll()):
            time.sleep(2e-4)
        if reports[0].failure is not None:
            raise RuntimeError(str(reports[0].failure))
        return reports[0].record


def fetches(device: str) -> list[Record]:
    """Fetches of 1 to 65,536 tokens in no order, one after the other: 4 KiB to 256 MiB, up to 65,536 runs."""
    cache = attention(1, 64, "bf16")
    model = Model("gqa", tuple(Layer(f"layers.{i}", (cache,)) for i in range(16)))
    manifests = [describe(model, Topology(block=16, blocks=4500), name) for name in ("src", "dst")]
    timing = Timing(lease=60, meet=30, read=120)
    source = SourceFleet(manifests[0], timing=timing, device=device)
    destination = DestinationFleet(manifests[1], timing=timing, device=device, actor=RecordedDestination)
    rng = np.random.default_rng(0)
    records = []
    try:
        source.wait_whole()
        destination.wait_ready()
        for i in range(NUM_FETCHES):
            num_tokens = max(1, int(4 ** rng.uniform(0, 8)))
            src, dst = (
                {"full": BlockTable.of(rng.permutation(4500)[: -(-num_tokens // 16)])} for _ in range(2)
            )
            ticket = source.offer(f"load-{i}", src, num_tokens)
            need = {"full": (Span(0, num_tokens),)}
            records.append(destination.ranks[0].call("record", ticket, dst, need))
    finally:
        destination.close()
        source.close()
    return records


def show_fetches(records: list[Record]) -> None:
    print(f"{'bytes':>12}{'runs':>8}{'moved ms':>12}{'predicted ms':>14}{'off':>7}")
    off = [record.predicted_seconds / record.move_seconds - 1 for record in records]
    for record, each in sorted(zip(records, off, strict=True), key=lambda pair: pair[0].num_bytes):
        times = f"{record.move_seconds * 1e3:>12.3f}{record.predicted_seconds * 1e3:>14.3f}"
        print(f"{record.num_bytes:>12}{record.num_runs:>8}{times}{each:>+7.0%}")
    for name, some in (("the first 20", off[:20]), ("later ones", off[20:])):
        sizes = sorted(abs(each) for each in some)
        within = sum(size <= 0.3 for size in sizes)
        print(
            f"{name}: {within} of {len(sizes)} within 30 %; median {median(sizes):.0%}, worst {sizes[-1]:.0%}"
        )


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
    if over in KNOWN:
        os.environ |= FABRICS["cma" if over == "cma" else "tcp"]
    match over:
        case over if over in KNOWN:
            show_reads(over)
        case "fetches":
            show_fetches(fetches("cpu"))
        case _:
            show_fetches(fetches(over))


if __name__ == "__main__":
    main()
