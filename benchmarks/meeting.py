"""What it costs to meet a source engine: of many ranks, and many engines of equal geometry.

    make bench                                   also writes benchmarks/meeting.json
    python -m benchmarks.meeting 1024 [MODEL]    engines of so many ranks only
    python -m benchmarks.meeting 256 engines     only meeting so many engines

The authorities run in processes of their own, real messages over TCP; the memory transport, so that no
fabric is measured, and addresses that nobody reads.
"""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing as mp
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvferry import Identity, Manifest, lower, plan, prove
from kvferry.core.manifest import Outline
from kvferry.endpoint import Destination, SourceEngine
from kvferry.models import Topology, describe, model_named
from kvferry.runtime import Timing
from kvferry.transport.memory import Hub, MemoryTransport
from kvferry.wire.messages import Join, RankDescriptions, Welcome, encode
from kvferry.wire.outline import (
    describe_rank,
    join_of,
    manifest_of_joins,
    outline_from_msgpack,
    outline_to_msgpack,
    with_ranks,
)
from kvferry.wire.ticket import Ticket

TIMING = Timing(meet=120.0, lease=600.0)
SETUPS = {
    "llama-3.1-70b": {1: "tp=1", 16: "tp=8,pp=2", 128: "tp=8,pp=16", 1024: "tp=8,pp=16,cp=8"},
    "deepseek-v3": {1: "tp=1", 16: "tp=16", 128: "tp=128", 1024: "tp=1024"},
}
"""Ranks -> topology: every rank holds something else, and every rank holds the same."""
READER = "tp=8,blocks=64"
ENGINES_PER_PROCESS = 32
AT_ONCE = 64
"""Engines that are met at the same time: a reader bounds how many strangers it calls."""


def placed(manifest: Manifest, first: int = 1 << 32) -> Manifest:
    """An engine whose regions have addresses; nobody reads there."""
    ranks = []
    for rank in manifest.ranks:
        regions = []
        for region in rank.regions:
            regions.append(replace(region, address=first))
            first += region.num_bytes
        ranks.append(replace(rank, regions=tuple(regions)))
    return replace(manifest, ranks=tuple(ranks), identity=Identity.of({"weights": "none: nobody reads"}))


def joins_of(manifest: Manifest, hub: Hub) -> list[Join]:
    """What each rank says to its authority. Their transports are in this process, where they are read."""
    joins = []
    for rank in manifest.ranks:
        transport = MemoryTransport(hub)
        transport.register(rank.regions)
        joins.append(join_of(replace(manifest, ranks=(rank,)), transport.kind, transport.card()))
    return joins


def authorities(pipe: Connection) -> None:
    """Runs in a process of its own: an engine for each list of joins, and a ticket of each."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    engines = []
    for joins in pipe.recv():
        started = time.perf_counter()
        engine = SourceEngine(joins[0].engine, len(joins), timing=TIMING)
        for join in joins:
            engine.admit(join)
        engines.append(engine)
        pipe.send((engine.offer("request", {}, 16), time.perf_counter() - started))
    pipe.recv()
    for engine in engines:
        engine.close()


@contextmanager
def serving(engines: Sequence[Sequence[Join]]) -> Iterator[list[tuple[Ticket, float]]]:
    """A ticket of each engine, and how long it took until all of its ranks had joined."""
    pipe, theirs = mp.Pipe()
    process = mp.get_context("spawn").Process(target=authorities, args=(theirs,))
    process.start()
    pipe.send(engines)
    yield [pipe.recv() for _ in engines]
    pipe.send("over")
    process.join(60)


class MetAt(logging.Handler):
    """When each peer was met: the log says so."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("met "):
            self.times.append(time.perf_counter())


class Reader:
    """A destination rank that meets the engines of tickets."""

    def __init__(self, manifest: Manifest, hub: Hub) -> None:
        self.destination = Destination(manifest, 0, MemoryTransport(hub), reader="reader", timing=TIMING)
        self._met = MetAt()
        self._log = logging.getLogger("kvferry")
        self._log.setLevel(logging.INFO)
        self._log.addHandler(self._met)

    def meet(self, tickets: Sequence[Ticket]) -> float:
        """Seconds from the first call until the last engine can be read from."""
        before, started = len(self._met.times), time.perf_counter()
        for ticket in tickets:
            self.destination.hold(ticket)
        while len(self._met.times) < before + len(tickets):
            if failed := self.destination.poll():
                raise SystemExit(f"not met: {failed[0].failure}")
            time.sleep(0.0005)
        return self._met.times[-1] - started

    def close(self) -> None:
        self._log.removeHandler(self._met)
        self.destination.close()


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    return work(), time.perf_counter() - started


def stages(src: Manifest, joins: Sequence[Join], dst: Manifest) -> dict[str, Any]:
    """Each stage by itself, once, as it happens once."""
    whole, merge_s = timed(lambda: manifest_of_joins({join.rank: join for join in joins}))
    data, outline_s = timed(lambda: outline_to_msgpack(Outline.of(whole)))
    outline, decode_s = timed(lambda: outline_from_msgpack(data, "prefill"))
    planned, plan_s = timed(lambda: plan(outline.common, dst, 0, holders=outline.holders))
    ranks = sorted({piece.src_rank for piece in planned.pieces})
    described = {rank: joins[rank].description for rank in ranks}
    source, described_s = timed(lambda: with_ranks(outline.common, described))
    proof, prove_s = timed(lambda: prove(replace(planned, src=source)))
    _, lower_s = timed(lambda: lower(proof))
    return {
        "merge_ms": 1e3 * (merge_s + outline_s),
        "outline_ms": 1e3 * decode_s,
        "plan_ms": 1e3 * plan_s,
        "described_ms": 1e3 * described_s,
        "prove_ms": 1e3 * prove_s,
        "lower_ms": 1e3 * lower_s,
        "welcome_bytes": len(encode(Welcome(3, "prefill", 1, "memory", data))),
        "described_bytes": len(encode(RankDescriptions(1, 1, described))),
        "all_ranks_bytes": sum(describe_rank(rank, b"").num_bytes for rank in src.ranks),
        "ranks_read": len(ranks),
    }


def bench_ranks(model: str, num_ranks: int) -> dict[str, Any]:
    hub = Hub()
    topology = Topology.parse(f"{SETUPS[model][num_ranks]},blocks=64")
    src = placed(describe(model_named(model), topology, "prefill"))
    dst = placed(describe(model_named(model), Topology.parse(READER), "decode"), 1 << 46)
    joins = joins_of(src, hub)
    row = {"model": model, "topology": SETUPS[model][num_ranks], "ranks": num_ranks}
    row |= stages(src, joins, dst)
    gc.collect()
    with serving([joins]) as [(ticket, whole_s)], closing(Reader(dst, hub)) as reader:
        row |= {"joined_ms": 1e3 * whole_s, "met_ms": 1e3 * reader.meet([ticket])}
    return row


def resident_bytes() -> int:
    time.sleep(3.0)  # threads that have met somebody wait a little for more to do
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def bench_engines(num_engines: int, *, are_alike: bool) -> dict[str, Any]:
    """One destination rank meets many engines of 8 ranks, the first of them before the others."""
    hub, model = Hub(), model_named("llama-3.1-70b")
    dst = placed(describe(model, Topology.parse(READER), "decode"), 1 << 46)
    engines = []
    for number in range(num_engines):
        topology = Topology.parse(f"tp=8,blocks={64 if are_alike else 64 + number}")
        engines.append(joins_of(placed(describe(model, topology, f"prefill-{number}")), hub))
    with _serving_all(engines) as tickets, closing(Reader(dst, hub)) as reader:
        first_s = reader.meet(tickets[:1])
        before = resident_bytes()
        rest_s = sum(reader.meet(tickets[at : at + AT_ONCE]) for at in range(1, num_engines, AT_ONCE))
        status: dict[str, Any] = reader.destination.status()
        return {
            "what": "equal geometry" if are_alike else "each of its own",
            "engines": len(status["peers"]),
            "plans": status["plans"],
            "first_ms": 1e3 * first_s,
            "next_ms": 1e3 * rest_s / (num_engines - 1),
            "kib_per_peer": (resident_bytes() - before) / (num_engines - 1) / 1024,
        }


@contextmanager
def _serving_all(engines: Sequence[Sequence[Join]]) -> Iterator[list[Ticket]]:
    if not engines:
        yield []
        return
    with serving(engines[:ENGINES_PER_PROCESS]) as some, _serving_all(engines[ENGINES_PER_PROCESS:]) as more:
        yield [*(ticket for ticket, _ in some), *more]


def show(result: dict[str, Any]) -> None:
    console = Console(width=200)
    table = Table(
        title="One destination rank of TP8 meets one engine. met: from the call until it can be read from,"
        " two processes. The stages by themselves; joined: until the authority has taken in all ranks.",
        title_justify="left",
    )
    columns = ("model", "topology", "ranks", "ranks read", "met ms", "outline ms", "plan ms", "described ms")
    columns += ("prove ms", "lower ms", "joined ms", "welcome KiB", "described KiB", "all ranks KiB")
    for column in columns:
        table.add_column(column, justify="right")
    for row in result["ranks"]:
        cells = [f"{row[c.replace(' ', '_')]:.0f}" for c in columns[4:11]]
        sizes = [f"{row[c.replace(' KiB', '_bytes').replace(' ', '_')] / 1024:,.0f}" for c in columns[11:]]
        table.add_row(*(str(row[c.replace(" ", "_")]) for c in columns[:4]), *cells, *sizes)
    if result["ranks"]:
        console.print(table)
    for row in result["engines"]:
        console.print(
            f"{row['engines']} engines of 8 ranks, {row['what']}: {row['plans']} plans; the first met in"
            f" {row['first_ms']:.0f} ms, each other in {row['next_ms']:.1f} ms; {row['kib_per_peer']:.0f} KiB"
            " of resident memory for each of the others"
        )


def main(arguments: Sequence[str]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    number = int(arguments[0]) if arguments else 0
    only_engines = "engines" in arguments
    models = [model for model in SETUPS if model in arguments] or list(SETUPS)
    sizes = [] if only_engines else [number] if number else [1, 16, 128, 1024]
    result = {
        "python": sys.version.split()[0],
        "machine": platform.machine(),
        "ranks": [bench_ranks(model, size) for model in models for size in sizes],
        "engines": [],
    }
    if only_engines or not number:
        result["engines"] = [
            bench_engines(number or 256, are_alike=True),
            bench_engines(32, are_alike=False),
        ]
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    show(result)


if __name__ == "__main__":
    main(sys.argv[1:])
