"""kvferry's ways beside NIXL alone and the worker of vLLM's own NixlConnector, in turns.

    make bench                                              all of it; writes benchmarks/bench.json
    python -m benchmarks.rivals --quick --memory host       some seconds
    python -m benchmarks.rivals --plot bench.svg            a picture, too; needs matplotlib

NIXL alone takes its turns in the processes of kvferry's ways. vLLM's worker keeps a core busy in each of its
processes, so it is measured after the others, in two processes of its own, where vLLM is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import rival_cases as grid
from benchmarks.raw_nixl import RawNixl
from benchmarks.rival_cases import (
    NUM_LAYERS,
    TOKENS_PER_BLOCK,
    BenchCase,
    BlockOrder,
    CacheShape,
    Medium,
    RankCard,
)
from benchmarks.rival_measure import (
    asked_media,
    asked_rivals,
    environment,
    measure,
    new_report,
    no_nixl,
)
from benchmarks.rival_report import BenchReport, BenchVerdict, NotRun, RivalTimes, show
from benchmarks.rival_sides import READ_SECONDS, BenchReader, BenchSource, Contender, Rival
from kvferry.cli.output import milliseconds, num_bytes, progress
from kvferry.cli.processes import GPU_DRIVER, Worker
from kvferry.core.manifest import Region
from kvferry.core.runs import Runs
from kvferry.errors import TransportError
from kvferry.transport.process import ProcessTransport
from kvferry.transport.region_memory import Bytes, RegionMemory
from kvferry.transport.settings import UCX_EMULATES, UCX_TRANSPORTS, Expose, WayChoice

TURNS, QUICK_TURNS = 7, 3


class Fabric(StrEnum):
    """What carries bytes of host memory."""

    CMA = "cma"
    TCP = "tcp"


FOLDER = "KVFERRY_BENCH_FOLDER"
"""For files that both processes of vLLM's workers need."""
SCRATCH_BYTES = 64
TCP_ALONE = {UCX_TRANSPORTS: "tcp,self,cuda_copy" if GPU_DRIVER.exists() else "tcp,self", UCX_EMULATES: "y"}
"""Of vLLM's own worker, so that it uses TCP between two processes of one host."""


class Foreign(StrEnum):
    """Rivals that are not kvferry's."""

    NIXL = "nixl"
    """NIXL alone, given the same list of runs."""
    ONE_RUN = "nixl-one-run"
    """NIXL alone, as many bytes in one run: what no request between paged caches can be."""
    VLLM = "vllm"
    """The worker of vLLM's own NixlConnector, on the same contents and block ids."""


class ForeignSource(BenchSource):
    """Offers requests by vLLM's own worker and listener, too."""

    def offering(self, rival: str, shape: CacheShape) -> Any:
        return (
            _OfferingWorker(shape, self._memory) if rival == Foreign.VLLM else super().offering(rival, shape)
        )


class _OfferingWorker:
    def __init__(self, shape: CacheShape, memory: RegionMemory) -> None:
        from benchmarks.nixl_worker import NixlSource

        self._worker = NixlSource(worker_caches(shape), memory.regions[0], host_bytes(memory))

    def offer(self, request_id: str, case: BenchCase) -> Any:
        return self._worker.offer(request_id, case.block_ids()[0].tolist())

    def close(self) -> None:
        self._worker.close()


class ForeignReader(BenchReader):
    """Has the others read, too."""

    _raw: RawNixl | None = None

    def make(self, rival: str, source: RankCard) -> Contender:
        if rival == Foreign.VLLM:
            return OwnWorker(self._memory)
        if rival not in list(Foreign):
            return super().make(rival, source)
        self._raw = self._raw or RawNixl(self._memory.regions, {"src": source}, SCRATCH_BYTES)
        return RawList(self._raw) if rival == Foreign.NIXL else RawOneRun(self._raw)

    def call_times(self, medium: str, source: RankCard, case: BenchCase) -> CallTimes:
        """What calls of a transport cost while reads of a case are under way."""
        return time_calls(medium, self._memory.regions[0], source, case)

    def close(self) -> None:
        if self._raw:
            self._raw.close()
        super().close()


class RawList(Contender):
    """NIXL alone, on the list that kvferry would post."""

    way = "nixl"

    def __init__(self, raw: RawNixl) -> None:
        self._raw = raw

    def read(self, case: BenchCase, offer: Any) -> float:
        return self._raw.read([("src", self._runs(case))]).seconds

    def _runs(self, case: BenchCase) -> Runs:
        return case.product().runs


class RawOneRun(RawList):
    """NIXL alone, as if all were in a row."""

    is_whole = True

    def _runs(self, case: BenchCase) -> Runs:
        return Runs(np.array([0]), np.array([0]), np.array([case.total_bytes]))


class OwnWorker(Contender):
    """The worker of vLLM's own connector. It does not merge neighbours."""

    way = "vllm"
    _worker: Any = None

    def __init__(self, memory: RegionMemory) -> None:
        self._memory = memory

    def lay_out(self, shape: CacheShape) -> None:
        from benchmarks.nixl_worker import NixlReader

        self.close()
        self._worker = NixlReader(worker_caches(shape), self._memory.regions[0], host_bytes(self._memory))

    def read(self, case: BenchCase, offer: Any) -> float:
        return float(self._worker.load(offer, case.block_ids()[1].tolist(), READ_SECONDS))

    def num_runs(self, case: BenchCase) -> int:
        return case.num_pages

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()


def host_bytes(memory: RegionMemory) -> Bytes:
    """The memory, if it is the host's; else nothing."""
    return np.zeros(0, np.uint8) if memory.cuda else memory.arrays()[0]


def worker_caches(shape: CacheShape) -> Any:
    """A shape in vLLM's words."""
    from benchmarks.nixl_worker import WorkerCaches

    return WorkerCaches(
        os.environ[FOLDER],
        num_layers=NUM_LAYERS,
        num_blocks=shape.num_blocks,
        num_kv_heads=shape.num_heads,
        head_size=shape.head_dim,
        block_size=TOKENS_PER_BLOCK,
    )


# -- what a read costs the thread that asks for it, however much is under way, and what idling costs

NUM_BIG, NUM_ROUNDS = 2, 3
SMALL_RUNS = 64
PAUSE_SECONDS = 1e-3
IDLE_SECONDS = 1.0


@dataclass(frozen=True)
class CallTimes:
    """Of one transport."""

    medium: str
    first_read_s: float
    """From the call to its end, right after connecting."""
    second_read_s: float
    num_calls: int
    """Small reads, asked for while large ones were under way: how long those calls took their caller."""
    call_p50_s: float
    call_p99_s: float
    call_max_s: float
    idle_cores: float
    """Processor time per second of a process whose transport has nothing to do."""


def time_calls(medium: str, region: Region, source: RankCard, case: BenchCase) -> CallTimes:
    """Connect a transport of its own; large reads are those of ``case``."""
    transport = ProcessTransport(way=WayChoice.DIRECT, expose=Expose.FABRIC)
    transport.register([region])
    try:
        transport.connect("src", source.card, source.regions)
        single = Runs(*(np.array([number]) for number in (0, 0, 64)))
        first, second = (_read_seconds(transport, single) for _ in range(2))
        calls = [seconds for _ in range(NUM_ROUNDS) for seconds in _busy(transport, case)]
        before = time.process_time()
        time.sleep(IDLE_SECONDS)
        idle = (time.process_time() - before) / IDLE_SECONDS
    finally:
        transport.close()
    p50, p99 = (float(np.percentile(calls, percent)) for percent in (50, 99))
    return CallTimes(medium, first, second, len(calls), p50, p99, max(calls), idle)


def _read_seconds(transport: ProcessTransport, runs: Runs) -> float:
    ended = threading.Event()
    transport.on_end(ended.set)
    started = time.perf_counter()
    transport.read(0, "src", runs)
    ended.wait(READ_SECONDS)
    seconds = time.perf_counter() - started
    _collect(transport, {0})
    return seconds


def _busy(transport: ProcessTransport, case: BenchCase) -> list[float]:
    """How long the calls of small reads take while large reads are under way."""
    runs = case.product().runs
    small = Runs(runs.src[:SMALL_RUNS], runs.dst[:SMALL_RUNS], runs.num_bytes[:SMALL_RUNS])
    big = set(range(NUM_BIG))
    for transfer in big:
        transport.read(transfer, "src", case.product())
    under_way, numbers, calls = set(big), count(NUM_BIG), []
    while big & under_way:
        transfer = next(numbers)
        started = time.perf_counter()
        transport.read(transfer, "src", small)
        calls.append(time.perf_counter() - started)
        under_way.add(transfer)
        time.sleep(PAUSE_SECONDS)
        _look(transport, under_way)
    _collect(transport, under_way)
    return calls


def _collect(transport: ProcessTransport, under_way: set[int]) -> None:
    deadline = time.monotonic() + READ_SECONDS
    while under_way:
        _look(transport, under_way)
        if time.monotonic() > deadline:
            raise TransportError("late", f"{len(under_way)} reads did not end within {READ_SECONDS:g} s")
        time.sleep(PAUSE_SECONDS)


def _look(transport: ProcessTransport, under_way: set[int]) -> None:
    for end in transport.poll():
        if end.error:
            raise TransportError("failed", end.error)
        under_way.discard(end.transfer)


def add_calls(medium: Medium, shapes: Sequence[Sequence[BenchCase]]) -> CallTimes:
    """In two processes of their own; large reads are the largest of these."""
    scattered = [case for cases in shapes for case in cases if case.order is BlockOrder.SCATTERED]
    case, env = max(scattered, key=lambda case: case.total_bytes), environment(medium)
    source = Worker("calls-src", BenchSource, medium.device, case.shape.total_bytes, env=env)
    reader = Worker("calls-dst", ForeignReader, medium.device, case.shape.total_bytes, env=env)
    try:
        card = source.call("card", Rival.DIRECT, timeout=READ_SECONDS)
        times: CallTimes = reader.call("call_times", medium.name, card, case, timeout=READ_SECONDS)
        return times
    finally:
        reader.close()
        source.close()


# -- the picture

STYLES = {
    Rival.DIRECT: ("#0b6", "o", "kvferry, direct"),
    Rival.MAPPED: ("#06c", "o", "kvferry, mapped"),
    Rival.FETCH: ("#0b6", "s", "kvferry, whole fetch"),
    Foreign.NIXL: ("#c60", "^", "NIXL, same list"),
    Foreign.ONE_RUN: ("#c60", "x", "NIXL, one run"),
    Rival.COPY: ("#888", ".", "plain copy"),
    Foreign.VLLM: ("#93c", "v", "vLLM's own worker"),
}
"""Colour, mark and name."""


def draw(report: BenchReport, path: Path) -> None:
    """Speed by the length of a run: a row for each kind of memory, a column for each order of blocks.

    Where a length was run with several numbers of runs, the largest counts.
    """
    import matplotlib

    matplotlib.use("agg")
    # The same figures give the same file.
    settings: dict[Any, Any] = {"svg.hashsalt": "kvferry", "svg.fonttype": "none", "font.size": 8}
    with matplotlib.rc_context(settings):
        figure = _figure(report)
        metadata = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(path, metadata=metadata, dpi=120)


def _figure(report: BenchReport) -> Any:
    from matplotlib.figure import Figure

    media = list(dict.fromkeys(one.medium for one in report.times))
    orders = [order for order in BlockOrder if any(one.case.order is order for one in report.times)]
    figure = Figure(figsize=(3.2 * len(orders) + 1.2, 2.6 * len(media) + 0.6), layout="constrained")
    panels = figure.subplots(len(media), len(orders), squeeze=False, sharex=True, sharey="row")
    for row, medium in enumerate(media):
        for column, order in enumerate(orders):
            times = [one for one in report.times if one.medium == medium and one.case.order is order]
            _panel(panels[row][column], times)
            panels[row][column].set_title(f"{medium}, {order.value}")
        panels[row][0].set_ylabel("GB/s")
    handles: dict[str, Any] = {}
    for panel in panels.flat:
        lines, names = panel.get_legend_handles_labels()
        handles |= dict(zip(names, lines, strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def _panel(panel: Any, times: Sequence[RivalTimes]) -> None:
    for rival, (colour, mark, name) in STYLES.items():
        longest: dict[int, RivalTimes] = {}
        for one in times:
            if one.rival == rival:
                known = longest.get(one.case.shape.run_bytes, one)
                longest[one.case.shape.run_bytes] = max(known, one, key=lambda each: each.case.num_pages)
        if longest:
            lengths = sorted(longest)
            speeds = [longest[length].gigabytes_per_second for length in lengths]
            line = "--" if rival in (Rival.COPY, Foreign.ONE_RUN) else "-"
            panel.plot(lengths, speeds, line, color=colour, marker=mark, markersize=4, label=name)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    lengths = sorted({one.case.shape.run_bytes for one in times})
    panel.set_xticks(lengths, [num_bytes(length) for length in lengths], rotation=30)
    panel.minorticks_off()
    panel.grid(alpha=0.3)


# -- the command


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.rivals", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    for name, kind in (("memory", str), ("over", str), ("only", str), ("run-bytes", int), ("runs", int)):
        parser.add_argument(f"--{name}", action="append", type=kind, default=[])
    parser.add_argument("--turns", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


def rivals_of(medium: Medium, asked: Sequence[str], report: BenchReport) -> list[str]:
    """Who takes part; for those who cannot, the report says why."""
    ours = [name for name in asked if name not in list(Foreign)]
    rivals = asked_rivals(medium, ours, report) if ours or not asked else []
    for rival in [one for one in Foreign if not asked or one in asked]:
        why = "" if medium.uses_nixl or rival is Foreign.VLLM else "kvferry does not let NIXL use TCP"
        if rival is Foreign.VLLM:
            why = "" if find_spec("vllm") else "vLLM is not installed in this environment"
            why = why or no_nixl()
        if why:
            report.not_run.append(NotRun(medium.name, rival.value, why))
        else:
            rivals.append(rival)
    return rivals


def main() -> int:
    asked = options()
    report = new_report()
    fabrics = asked.over or ([Fabric.TCP if no_nixl() else Fabric.CMA] if asked.quick else list(Fabric))
    lengths = asked.run_bytes or (grid.QUICK_RUN_BYTES if asked.quick else grid.RUN_BYTES)
    numbers = asked.runs or (grid.QUICK_NUM_RUNS if asked.quick else grid.NUM_RUNS)
    turns = asked.turns or (QUICK_TURNS if asked.quick else TURNS)
    sides, calls = (ForeignSource, ForeignReader), []
    for medium in asked_media(asked.memory, fabrics, report):
        shapes = list(grid.grid(lengths, numbers, list(BlockOrder), medium.max_bytes))
        rivals = rivals_of(medium, asked.only, report)
        shared = [rival for rival in rivals if rival != Foreign.VLLM]
        with progress(2 * sum(map(len, shapes)), "measuring", visible=True) as step:
            if shared:
                measure(medium, shapes, shared, turns, report, step, sides=sides)
            if Foreign.VLLM in rivals:
                with tempfile.TemporaryDirectory() as folder:
                    env = {FOLDER: folder, **({} if medium.uses_nixl else TCP_ALONE)}
                    measure(medium, shapes, [Foreign.VLLM], turns, report, step, env, sides)
        if Rival.DIRECT in rivals and not asked.quick:
            calls.append(add_calls(medium, shapes))
    show(report)
    for one in calls:
        print(
            f"{one.medium}: read() returns within {milliseconds(1e3 * one.call_p50_s)} (p50),"
            f" {milliseconds(1e3 * one.call_p99_s)} (p99 of {one.num_calls:,} calls) while large reads are"
            f" under way; an idle transport takes {one.idle_cores:.3f} cores"
        )
    if asked.json:
        document = {**report.as_object(), "calls": [asdict(one) for one in calls]}
        asked.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if asked.plot:
        draw(report, asked.plot)
    return 0 if report.verdict is BenchVerdict.RIGHT else 1


if __name__ == "__main__":
    sys.exit(main())
