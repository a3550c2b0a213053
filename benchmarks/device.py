"""What a load costs between two processes that share a GPU: our copy kernel, NIXL, and a plain copy.

    python -m benchmarks.device            reads, whole fetches, and who slows whom down; needs a GPU
    python -m benchmarks.device reads      one part: reads, fetches or beside
    python -m benchmarks.device fetches mapped    without what does not have that word in its name
    python -m benchmarks.device beside another    the loop in another process only

``beside`` needs torch, for something to compute. Every part is written to benchmarks/device.json.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kvferry import BlockTable, Product, Region, Runs, Span, Term
from kvferry.cli.processes import FABRICS
from kvferry.models import Layer, Model, Topology, describe
from kvferry.models.model import attention
from kvferry.runtime import Timing
from kvferry.testing.transport_world import Source
from kvferry.transport.copy_kernel import CopyLimits
from kvferry.transport.cuda import Cuda
from kvferry.transport.exports import Opened
from kvferry.transport.mapped import DeviceCopier, MappedLink
from kvferry.transport.places import Places
from kvferry.transport.process import ProcessTransport
from kvferry.transport.reads import Read
from kvferry.transport.region_memory import RegionMemory
from kvferry.transport.settings import CUDA_ENVIRONMENT, WAY_SETTING, Expose, WayChoice
from kvferry.transport.transfers import Transfers
from tests.support.fleet import DestinationFleet, SourceFleet
from tests.support.fleet.actors import DestinationActor
from tests.support.fleet.worker import Worker
from tests.support.sources import serving

DEVICE = "cuda:0"
MIB = 1 << 20
REGION = 1024 * MIB
ALL = CopyLimits(0, 0)
FABRIC = {**FABRICS["cma"], **CUDA_ENVIRONMENT, WAY_SETTING: "auto"}
"""NIXL takes part beside the copy kernel."""
TURNS = 21
PAUSES = {"after a pause": 0.005, "one after the other": 0.0}
"""Between two turns, in seconds. Idle cores are several times slower at first: a load finds an engine
somewhere between the two."""


# ---- reads: one transport call, from the call to its end


def scattered(run_bytes: int, num_runs: int) -> Product:
    """Pages of 64 layers, no two neighbours."""
    random = np.random.default_rng(1)
    layers, stride = min(64, num_runs), REGION // num_runs
    pairs = num_runs // layers
    pattern = np.arange(layers) * stride * pairs
    steps = np.stack([random.permutation(pairs), random.permutation(pairs)]) * stride
    return Product((Term(Runs(pattern, pattern.copy(), np.full(layers, run_bytes)), steps),))


def transposed(cell_bytes: int, heads: int, tokens: int, blocks: int, layers: int) -> Product:
    """Head-major to token-major: every cell is a run of its own."""
    random = np.random.default_rng(1)
    head, token = np.meshgrid(np.arange(heads), np.arange(tokens), indexing="ij")
    block_bytes = heads * tokens * cell_bytes
    start = np.arange(layers)[:, None] * block_bytes * blocks
    src = (start + ((head * tokens + token) * cell_bytes).ravel()).ravel()
    dst = (start + ((token * heads + head) * cell_bytes).ravel()).ravel()
    steps = np.stack([random.permutation(blocks), random.permutation(blocks)]) * block_bytes
    return Product((Term(Runs(src, dst, np.full(len(src), cell_bytes)), steps),))


CASES = {
    "16 KiB pages, scattered": scattered(16 << 10, 32768),
    "512 B cells, head-major to token-major": transposed(512, 8, 16, 512, 16),
    "256 B cells, head-major to token-major": transposed(256, 8, 16, 1024, 16),
    "4 KiB pages, scattered": scattered(4 << 10, 131072),
    "1 MiB pages, scattered": scattered(MIB, 512),
    "2 MiB in 128 pages": scattered(16 << 10, 128),
    "8,192 pages of 16 KiB, scattered": scattered(16 << 10, 8192),
    "1,000 B runs": scattered(1000, 524288),
}


@contextmanager
def reader(
    holder: RegionMemory, source: Source, how: WayChoice, limits: CopyLimits
) -> Iterator[ProcessTransport]:
    transport = ProcessTransport(way=how, expose=Expose.FABRIC, copy_limits=limits)
    transport.register(holder.regions)
    try:
        transport.connect("src", source.card, source.regions)
        yield transport
    finally:
        transport.close()


def read_seconds(transport: ProcessTransport, product: Product, number: int) -> float:
    ended = threading.Event()
    transport.on_end(ended.set)
    started = time.perf_counter()
    transport.read(number, "src", product)
    ended.wait(60)
    seconds = time.perf_counter() - started
    (end,) = transport.poll()
    if end.error:
        raise RuntimeError(end.error)
    return seconds


def check(cuda: Cuda, region: Region, product: Product, contents: np.ndarray) -> None:
    """A few thousand runs of a product, byte by byte; the tests look at every byte."""
    runs = product.runs
    for i in np.random.default_rng(2).integers(0, len(runs), 2000):
        src, dst, num_bytes = (int(column[i]) for column in (runs.src, runs.dst, runs.num_bytes))
        got = np.frombuffer(cuda.download(region.address + dst, num_bytes), np.uint8)
        if not (got == contents[src : src + num_bytes]).all():
            raise RuntimeError(f"wrong bytes at {dst}")


def plain_copy_seconds(cuda: Cuda, region: Region) -> float:
    """Within one process: what the device can do."""
    with cuda.current():
        stream = cuda.make_stream()
        half, took = region.num_bytes // 2, []
        for _ in range(TURNS):
            started = time.perf_counter()
            cuda._cu.cuMemcpyDtoDAsync(region.address, region.address + half, half, stream)
            cuda.wait_stream(stream)
            took.append(time.perf_counter() - started)
    return median(took)


def reads() -> list[dict[str, Any]]:
    cuda, rows = Cuda(0), []
    holder = RegionMemory(DEVICE)
    holder.add("kv", np.zeros(REGION, np.uint8))
    ways = [
        ("mapped, all of the device", WayChoice.MAPPED, ALL),
        ("mapped, default limits", WayChoice.MAPPED, CopyLimits()),
        ("direct (NIXL)", WayChoice.DIRECT, CopyLimits()),
    ]
    seconds = plain_copy_seconds(cuda, holder.regions[0])
    show(rows, "512 MiB", "plain copy in one process", 1, REGION // 2, [seconds])
    os.environ |= FABRIC
    with serving(1, [REGION], DEVICE) as served:
        source = served.sources[0]
        for way, how, limits in [one for one in ways if is_asked_for(one[0])]:
            with reader(holder, source, how, limits) as transport:
                for name, product in CASES.items():
                    turns = TURNS if how is WayChoice.MAPPED else 2
                    if how is WayChoice.DIRECT and product.num_runs > 140_000:
                        continue  # a quarter of a minute and more
                    for when, pause in PAUSES.items():
                        took = []
                        for number in range(turns + 1):
                            took.append(read_seconds(transport, product, number))
                            time.sleep(pause)
                        what = f"{way}, {when}"
                        show(rows, name, what, product.num_runs, product.total_bytes, took[1:])
                    check(cuda, holder.regions[0], product, source.contents[0])
    holder.free()
    return rows


def show(
    rows: list[dict[str, Any]], name: str, way: str, num_runs: int, num_bytes: int, took: list[float]
) -> None:
    row = {"case": name, "way": way, "runs": num_runs, "bytes": num_bytes, "us": median(took) * 1e6}
    row |= {"best_us": min(took) * 1e6, "gb_per_s": num_bytes / median(took) / 1e9}
    rows.append(row)
    times = f"{row['us']:>9,.0f} µs (best {row['best_us']:,.0f})"
    per_run = f"{row['us'] / num_runs:.2f} µs per run"
    print(
        f"{name:40} {way:47} {num_runs:>9,} runs {times:26} {row['gb_per_s']:8,.1f} GB/s, {per_run}",
        flush=True,
    )


# ---- fetches: from the call to the report, ticket held and peer met


class TimedDestination(DestinationActor):
    """Times its own calls: a pipe between would be slower than what is measured."""

    def timed(self, ticket: Any, tables: Any, need: Any) -> tuple[float, Any]:
        """Hold, wait until that is granted, then fetch: seconds to the report, and its record."""
        held = self.hold(ticket)
        time.sleep(0.02)
        for _ in range(20):  # awake, as an engine is: the machine that runs it is not idle
            self.poll()
            time.sleep(0.0001)
        started = time.perf_counter()
        self.fetch(ticket, tables, need, held=held)
        while not (reports := self.poll()):
            time.sleep(10e-6)
        seconds = time.perf_counter() - started
        if reports[0].failure is not None:
            raise RuntimeError(str(reports[0].failure))
        return seconds, reports[0].record


NUM_TOKENS = 4096


def pair(
    name: str, *, src: str = "block=16", dst: str = "block=16", is_scattered: bool = True
) -> tuple[Any, ...]:
    return name, src, dst, is_scattered


FETCH_TIMING = Timing(lease=120, meet=60, read=120)
WAYS_TO_FETCH = {
    "mapped, default limits": {WAY_SETTING: "mapped"},
    "packed": {WAY_SETTING: "packed"},
    "direct (NIXL)": {WAY_SETTING: "direct"},
}
PARTS_OF_A_FETCH = ("meet", "post", "move")
PAIRS = [
    pair("blocks of 16, scattered"),
    pair("blocks of 16, consecutive", is_scattered=False),
    pair("blocks 16 to 64", dst="block=64"),
    pair("HND to NHD", dst="block=16,layout=NHD"),
]


def engine(topology: str, name: str) -> Any:
    """An 8B-like cache: 32 layers, 8 KV heads of 128 channels in bf16; 4,096 tokens are 512 MiB."""
    cache = attention(8, 128, "bf16")
    model = Model("8b", tuple(Layer(f"layers.{i}", (cache,)) for i in range(32)))
    cut = Topology.parse(topology)
    return describe(model, Topology.parse(f"{topology},blocks={NUM_TOKENS * 3 // 2 // cut.block}"), name)


def tables(manifest: Any, is_scattered: bool, seed: int) -> dict[str, BlockTable]:
    group = manifest.groups[0]
    number = NUM_TOKENS // group.tokens_per_block
    ids = np.random.default_rng(seed).permutation(group.num_blocks) if is_scattered else np.arange(number) + 1
    return {group.name: BlockTable.of(ids[:number])}


@dataclass
class TimedPair:
    """Two engines that are ready, and the readers of each way; checked when all pairs have been timed."""

    name: str
    source: SourceFleet
    readers: dict[str, DestinationFleet]
    src_tables: dict[str, BlockTable]
    dst_tables: dict[str, BlockTable]
    need: dict[str, tuple[Span, ...]]
    names: dict[str, str]

    @classmethod
    def make(cls, what: str, src_topology: str, dst_topology: str, is_scattered: bool) -> TimedPair:
        src, dst = engine(src_topology, "src"), engine(dst_topology, "dst")
        src_tables, dst_tables = tables(src, is_scattered, 1), tables(dst, is_scattered, 2)
        source = SourceFleet(src, timing=FETCH_TIMING, device=DEVICE, env=FABRIC)
        source.wait_whole()
        source.prefill("first", src_tables, NUM_TOKENS)
        readers = {
            way: DestinationFleet(
                dst, timing=FETCH_TIMING, device=DEVICE, env=FABRIC | env, actor=TimedDestination
            )
            for way, env in WAYS_TO_FETCH.items()
            if is_asked_for(way)
        }
        for reader in readers.values():
            reader.wait_ready()
        need = {dst.groups[0].name: (Span(0, NUM_TOKENS),)}
        names = {state.name: state.name for state in dst.states}
        return cls(what, source, readers, src_tables, dst_tables, need, names)

    def time(self, rows: list[dict[str, Any]], way: str, turns: int) -> None:
        took = []
        for turn in range(turns + 1):
            ticket = self.source.offer(f"{way}-{turn}", self.src_tables, NUM_TOKENS)
            took.append(self.readers[way].ranks[0].call("timed", ticket, self.dst_tables, self.need))
        record, seconds = took[-1][1], [seconds for seconds, _ in took[1:]]
        show(rows, self.name, way, record.num_runs, record.num_bytes, seconds)
        parts = [f"{name} {1e6 * getattr(record, f'{name}_seconds'):.0f}" for name in PARTS_OF_A_FETCH]
        print(f"{'':40} {record.way}; the last, in µs: {', '.join(parts)}", flush=True)

    def check(self, way: str) -> str:
        (checked,) = self.readers[way].check(self.dst_tables, self.need, self.names, "first")
        if checked.num_wrong:
            raise RuntimeError(f"wrong cells: {checked}")
        return f"{self.name}, {way}: {checked.num_cells:,} cells right"

    def close(self) -> None:
        for fleet in (*self.readers.values(), self.source):
            fleet.close()


def fetches() -> list[dict[str, Any]]:
    """All pairs are made side by side, timed one after the other, then checked side by side."""
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(len(PAIRS)) as several:
        pairs = [*several.map(lambda one: TimedPair.make(*one), PAIRS)]
        try:
            for one in pairs:
                for way in one.readers:
                    one.time(rows, way, 3 if "direct" in way else TURNS)
            checks = [several.submit(one.check, way) for one in pairs for way in one.readers]
            for done in checks:
                print(done.result(), flush=True)
        finally:
            for one in pairs:
                one.close()
    return rows


# ---- beside: how much a copy slows other work down, and other work the copy


class Loops:
    """Work of an engine, over and over: in the process that copies, or in another one."""

    NAMES = ("4096³ products", "64 × 8192² products (decode-like)")

    def __init__(self) -> None:
        import torch

        self._torch = torch
        make = partial(torch.randn, device=DEVICE, dtype=torch.bfloat16)
        self._square = [make(4096, 4096) for _ in range(3)]
        self._few, self._weights = make(64, 8192), [make(8192, 8192) for _ in range(8)]

    def _work(self, name: str) -> None:
        mm = self._torch.mm
        if name == self.NAMES[0]:
            for _ in range(10):
                mm(self._square[0], self._square[1], out=self._square[2])
        else:
            for i in range(20):
                mm(self._few, self._weights[i % 8])

    def time(self, name: str) -> list[float]:
        """Milliseconds from the end of one turn to that of the next, by the device's own clock.

        The next turn always waits already, so what the device gives to another process meanwhile counts.
        """
        cuda, ends = self._torch.cuda, []
        with cuda.stream(cuda.Stream()):
            for _ in range(81):
                self._work(name)
                ends.append(cuda.Event(enable_timing=True))
                ends[-1].record()
                if len(ends) > 2:
                    ends[-3].synchronize()
            ends[-1].synchronize()
        return [before.elapsed_time(end) for before, end in pairwise(ends)][20:]


def beside() -> list[dict[str, Any]]:
    import torch

    cuda, rows = Cuda(0), []
    memory = [torch.empty(REGION, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    src, dst = (Places("it", [Region("kv", REGION, one.data_ptr(), DEVICE)]) for one in memory)
    product, here, there = CASES["16 KiB pages, scattered"], Loops(), Worker("loops", Loops)
    timers: dict[str, Callable[[str], list[float]]] = {
        "same process": here.time,
        "another process": lambda name: there.call("time", name),
    }
    for where, timer in timers.items():
        for name in Loops.NAMES if is_asked_for(where) else ():
            alone = np.array(timer(name))
            for num_blocks in (8, 16, 32, 64, 0):
                for launch_mib in (16, 64, 512):
                    transfers, limits = Transfers(), CopyLimits(num_blocks, launch_mib * MIB)
                    copier = DeviceCopier(transfers, cuda, dst, limits)
                    link = copier.link("it", Opened(cuda, src.regions))
                    with copying(transfers, link, product) as moved:
                        before, started = moved[0], time.perf_counter()
                        took = np.array(timer(name))
                        speed = (moved[0] - before) / (time.perf_counter() - started) / 1e9
                    copier.close(5)
                    row = {"loop": name, "where": where, "blocks": num_blocks, "launch_mib": launch_mib}
                    row |= {"copies_gb_per_s": speed, "slower": float(np.median(took) / np.median(alone))}
                    row |= {"slower_p99": float(np.percentile(took, 99) / np.median(alone))}
                    rows.append(row)
                    slower = f"{row['slower']:.2f}x, p99 {row['slower_p99']:.2f}x"
                    print(
                        f"{name:34} {where:16} blocks {num_blocks or 'all':>4} launches of"
                        f" {launch_mib:>3} MiB: the loop {slower}; copies {speed:6,.0f} GB/s",
                        flush=True,
                    )
    there.close()
    return rows


@contextmanager
def copying(transfers: Transfers, link: MappedLink, product: Product) -> Iterator[list[int]]:
    """One copy after another, meanwhile; how many bytes, so far."""
    moved, is_over = [0], threading.Event()

    def feed() -> None:
        while not is_over.is_set():
            ended = threading.Event()
            transfers.submit(Read(link.prepare(product, None), lambda _, ended=ended: ended.set()))
            ended.wait()
            moved[0] += product.total_bytes

    thread = threading.Thread(target=feed)
    thread.start()
    time.sleep(0.02)
    try:
        yield moved
    finally:
        is_over.set()
        thread.join()


PARTS = {"reads": reads, "fetches": fetches, "beside": beside}


def is_asked_for(way: str) -> bool:
    """Whether a way has one of the words in its name that were given, if any were."""
    words = [word for word in sys.argv[1:] if word not in PARTS]
    return not words or any(word in way for word in words)


def main() -> None:
    path = Path(__file__).with_suffix(".json")
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for part in [word for word in sys.argv[1:] if word in PARTS] or list(PARTS):
        print(f"--- {part}", flush=True)
        results[part] = PARTS[part]()
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
