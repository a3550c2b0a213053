"""The demonstration: requests are transferred between engines in waves, and checked."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from enum import StrEnum

import kvferry
from kvferry import BlockTable, KVFerryError, Manifest, Span, SpecError
from kvferry.cli.demo.engines import (
    BlockPool,
    DestinationProcess,
    Pair,
    Sample,
    SourceProcess,
    some_samples,
)
from kvferry.cli.output import Step, console, labelled, num_bytes, verdict, wrapped
from kvferry.cli.processes import Worker, call_all, until
from kvferry.endpoint import SourceEngine
from kvferry.errors import counted
from kvferry.pattern import KEPT, Checked
from kvferry.runtime import Report, Timing
from kvferry.transport.cuda import has_cuda
from kvferry.transport.process import ProcessTransport
from kvferry.transport.settings import CUDA_ENVIRONMENT
from kvferry.wire.ticket import Ticket

MAX_MEMORY = 4 << 30
"""Limit of both engines together, in bytes."""
WAVE = 3
"""Requests that are fetched together."""
SETTLED_SECONDS = 10.0
"""Timeout for leases and releases at the end."""
MAX_PROCESSES = 64
DEFAULT_TOKENS = 8000
DEMO_TIMING = Timing(lease=30, meet=20, read=60, retry=0.2)
LEASES = "leases outstanding"


class Verdict(StrEnum):
    """How a demonstration ended, the worst first."""

    WRONG = "wrong"
    """A cell is wrong."""
    FAILED = "failed"
    """A request or an engine failed."""
    LEAKED = "leaked"
    """A lease, a read or a block is left over."""
    VERIFIED = "verified"


@dataclass
class DemoResult:
    """The keys of ``--json``."""

    model: str
    src: str
    dst: str
    device: str = "cpu"
    num_processes: int = 0
    ways: list[str] = field(default_factory=list)
    """Transfer modes of the first request."""
    num_requests: int = 0
    total_bytes: int = 0
    num_runs: int = 0
    num_cells: int = 0
    """Cells verified in the destination, by name."""
    num_wrong: int = 0
    first_wrong: str = ""
    failures: list[str] = field(default_factory=list)
    """Failed requests, or the error that ended the demonstration."""
    leaks: list[str] = field(default_factory=list)
    """Leases, reads and blocks that are left over."""

    @property
    def verdict(self) -> Verdict:
        if self.num_wrong:
            return Verdict.WRONG
        return Verdict.FAILED if self.failures else Verdict.LEAKED if self.leaks else Verdict.VERIFIED

    def count(self, sample: Sample, what: str, dst_rank: int, checked: Checked) -> None:
        """Add the result of a destination rank; ``what``: a prefix for the kind of cells."""
        self.num_cells += checked.num_cells
        self.num_wrong += checked.num_wrong
        if checked.first and not self.first_wrong:
            place = f"{self.model}, {sample.request_id}: dst rank {dst_rank}"
            self.first_wrong = f"{place}: {what}{checked.first}"

    def as_object(self) -> dict[str, object]:
        return {"verdict": self.verdict.value, **asdict(self)}


def show(result: DemoResult) -> None:
    out = console()
    ways = " and ".join(result.ways) or "no"
    rows = [
        ("model", result.model),
        ("from", result.src),
        ("to", result.dst),
        ("by", f"{ways} reads of {result.device} memory, {result.num_processes} processes"),
        ("moved", f"{num_bytes(result.total_bytes)} in {result.num_runs:,} runs"),
    ]
    labelled(out, rows)
    out.print()
    requests = counted(result.num_requests, "request")
    summary = f"{result.num_cells:,} cells of {requests}, {result.num_wrong} wrong"
    if result.verdict is Verdict.VERIFIED:
        out.print(f"verified: {summary}; nothing left over", style="bold green")
        return
    verdict(out, result.verdict.upper(), summary)
    first = [f"first: {result.first_wrong}"] if result.first_wrong else []
    wrapped(out, [*first, *result.failures, *result.leaks])


def demonstrate(pair: Pair, num_requests: int, num_tokens: int | None, device: str, step: Step) -> DemoResult:
    src, dst, num_tokens = _engines(pair, num_requests, num_tokens)
    if device == "cuda" and not has_cuda():
        raise SpecError("--device cuda: this host has no CUDA driver, or no usable device")
    ProcessTransport().close()  # raises TransportError for settings that no process accepts
    result = DemoResult(pair.model, pair.src, pair.dst, device=device)
    names = _src_names(src, dst)  # a refusal starts no process
    samples = some_samples(dst, num_requests, num_tokens)
    with closing(DemoTransfers(result, src, dst, names, step)) as transfers:
        try:
            transfers.wait_ready()
            step("moving and checking")
            for first in range(0, len(samples), WAVE):
                transfers.move(samples[first : first + WAVE])
            transfers.settle()
        except KVFerryError as error:
            result.failures.append(str(error))
    return result


def _src_names(src: Manifest, dst: Manifest) -> dict[str, str]:
    """The source's name of each state; raises Refused for incompatible engines."""
    if found := kvferry.compare(src, dst):
        raise kvferry.Refused(*found)
    routes = [kvferry.lower(kvferry.prove(kvferry.plan(src, dst, rank.rank))) for rank in dst.ranks]
    return {state: route.plan.src_name(state) for route in routes for state in route.plan.states}


def _engines(pair: Pair, num_requests: int, tokens: int | None) -> tuple[Manifest, Manifest, int]:
    """Both engines, with room for two waves and for one, and the tokens of the longest request."""
    room = {"src": min(num_requests, 2 * WAVE), "dst": min(num_requests, WAVE)}
    num_tokens = tokens or DEFAULT_TOKENS
    while True:
        src, dst = (pair.manifest(side, num_tokens, number + 1) for side, number in room.items())
        if tokens is not None or num_tokens == 1 or _memory_bytes(src, dst) <= MAX_MEMORY:
            break
        num_tokens //= 2  # the default is too long for this model
    if (total := _memory_bytes(src, dst)) > MAX_MEMORY:
        raise SpecError(
            f"the two engines would take {num_bytes(total)} of memory, more than {num_bytes(MAX_MEMORY)}:"
            " reduce --tokens, --layers or ranks"
        )
    if len(src.ranks) + len(dst.ranks) >= MAX_PROCESSES:
        raise SpecError(f"too many ranks: each is a process, and the limit is {MAX_PROCESSES} processes")
    for manifest in (src, dst):
        pool, number = BlockPool(manifest), room[manifest.engine]
        if not all(pool.take(num_tokens) for _ in range(number)):
            wanted = f"{counted(number, 'request')} of {num_tokens} tokens"
            raise SpecError(f"--{manifest.engine}: the block pool is too small for {wanted}: set blocks=N")
    return src, dst, num_tokens


def _memory_bytes(*manifests: Manifest) -> int:
    return sum(region.num_bytes for each in manifests for rank in each.ranks for region in rank.regions)


class DemoTransfers:
    """Two engines, each rank a process; transfers requests between them."""

    def __init__(
        self, result: DemoResult, src: Manifest, dst: Manifest, src_names: Mapping[str, str], step: Step
    ) -> None:
        self._result, self._src_names, self._step, self._groups = result, src_names, step, dst.groups
        self._src_pool, self._dst_pool = BlockPool(src), BlockPool(dst, seed=1)
        self._out: dict[str, Mapping[str, BlockTable]] = {}
        """The source blocks of requests."""
        self._engine = SourceEngine(src.engine, len(src.ranks), timing=DEMO_TIMING)
        device, env = result.device, CUDA_ENVIRONMENT if result.device == "cuda" else {}
        invitation, reader = self._engine.invitation, f"{dst.engine}#{time.time_ns()}"
        self.sources = [
            Worker(f"src-{one.rank}", SourceProcess, src, one.rank, invitation, device, env=env)
            for one in src.ranks
        ]
        self._destinations = [
            Worker(f"dst-{one.rank}", DestinationProcess, dst, one.rank, reader, DEMO_TIMING, device, env=env)
            for one in dst.ranks
        ]
        result.num_processes = 1 + len(src.ranks) + len(dst.ranks)

    def wait_ready(self) -> None:
        for rank in (*self.sources, *self._destinations):
            rank.wait_ready()
        until(lambda: self._engine.is_whole, "all ranks of the source have joined it", 60)

    def move(self, wave: Sequence[Sample]) -> None:
        """Fetch all requests of a wave at once, and check them."""
        requests = [self._prepared(sample) for sample in wave]
        handles = []
        for sample, request in zip(wave, requests, strict=True):
            self._out[sample.request_id] = request.src
            ticket = self.offer(sample.request_id, request.src, sample.num_tokens)
            arguments = (ticket, request.dst, request.need)
            handles.append(call_all(self._destinations, "fetch", *arguments, kept=request.kept))
        for sample, request, reports in zip(wave, requests, self._reports(handles), strict=True):
            failed = [(rank, report.failure) for rank, report in enumerate(reports) if report.failure]
            self._result.failures += [f"{sample.request_id}: dst rank {rank}: {why}" for rank, why in failed]
            if not failed:
                self._check(sample, request)
            self._finish(request, reports)

    def _prepared(self, sample: Sample) -> kvferry.Request:
        """Take blocks; write the request at the source, and the cached prefix at the destination."""
        src, dst = (self._taken(pool, sample.num_tokens) for pool in (self._src_pool, self._dst_pool))
        call_all(self.sources, "fill", src, sample.num_tokens, sample.request_id)
        need = {one.name: kvferry.need_of(one, sample.num_tokens, sample.num_kept) for one in self._groups}
        paged = [one.name for one in self._groups if one.addressing is kvferry.Addressing.TABLE]
        kept = {name: (Span(0, sample.num_kept),) for name in paged} if sample.num_kept else {}
        if kept:
            call_all(self._destinations, "fill", dst, kept, KEPT)
        return kvferry.Request(src, dst, need, kept)

    def _taken(self, pool: BlockPool, num_tokens: int) -> dict[str, BlockTable]:
        """Blocks for a request, once enough are free."""
        tables: dict[str, BlockTable] = {}

        def is_taken() -> bool:
            self._take_back()
            tables.update(pool.take(num_tokens) or {})
            return bool(tables)

        until(is_taken, f"free blocks for {num_tokens} tokens", SETTLED_SECONDS)
        return tables

    def _take_back(self) -> None:
        """Free the source blocks of released requests."""
        for released in self._engine.poll():
            self._src_pool.give_back(self._out.pop(released.request_id, {}))

    def offer(self, request_id: str, tables: Mapping[str, BlockTable], num_tokens: int) -> Ticket:
        return self._engine.offer(request_id, tables, num_tokens)

    def _reports(self, handles: Sequence[Sequence[int]]) -> list[list[Report]]:
        """Wait for requests, given as handles per rank; their reports in the same order."""
        found: dict[tuple[int, int], Report] = {}

        def are_in() -> bool:
            for rank, reports in enumerate(call_all(self._destinations, "poll")):
                found.update({(rank, report.handle): report for report in reports})
            return len(found) == sum(map(len, handles))

        until(are_in, "every rank of the destination has reported its loads", DEMO_TIMING.read)
        return [[found[key] for key in enumerate(some)] for some in handles]

    def _check(self, sample: Sample, request: kvferry.Request) -> None:
        """Check every needed and every cached cell, by name, on every rank."""
        own_names = {name: name for name in self._src_names}
        for what, tokens, names, salt in (
            ("", request.need, self._src_names, sample.request_id),
            ("kept ", request.kept, own_names, KEPT),
        ):
            checked = call_all(self._destinations, "check", request.dst, tokens, names, salt)
            for rank, one in enumerate(checked):
                self._result.count(sample, what, rank, one)

    def _finish(self, request: kvferry.Request, reports: Sequence[Report]) -> None:
        """Free the destination's blocks, and add the ranks' reports to the result."""
        self._dst_pool.give_back(request.dst)
        result, records = self._result, [report.record for report in reports]
        result.num_requests += 1
        result.total_bytes += sum(record.num_bytes for record in records)
        result.num_runs += sum(record.num_runs for record in records)
        if result.num_requests == 1:
            result.ways = sorted({record.way for record in records})
        self._step("")

    def settle(self) -> None:
        """Wait until nothing is left over; the rest are leaks."""
        deadline = time.monotonic() + SETTLED_SECONDS
        while any((left := self._left()).values()) and time.monotonic() < deadline:
            time.sleep(0.05)
        self._result.leaks = [f"{count} {what}" for what, count in left.items() if count]

    def _left(self) -> dict[str, int]:
        self._take_back()
        status: dict[str, int] = self._engine.status()  # type: ignore[assignment]
        are_alive = all(rank.is_alive for rank in self.sources)
        left = {
            LEASES: status["offered"] + status["being_read"],
            "source blocks not returned": self._src_pool.num_missing,
            "releases not confirmed by every rank": status["unheard"] if are_alive else 0,
            "destination blocks not returned": self._dst_pool.num_missing,
        }
        for rank in self._destinations:
            shown = rank.call("status")
            left[f"fetches at {rank.name}"] = sum(shown["fetches"].values())
            for what in ("in_flight", "settling", "quarantined"):
                left[f"reads {what.replace('_', ' ')} at {rank.name}"] = int(shown[what])
        return left

    def close(self) -> None:
        for rank in (*self.sources, *self._destinations):
            rank.close()
        self._engine.close()
