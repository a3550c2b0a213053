"""What a demonstration finds out, whatever carried the bytes, and how it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from kvferry.cli.demo.pairs import Sample
from kvferry.cli.output import (
    console,
    gigabytes_per_second,
    labelled,
    milliseconds,
    num_bytes,
    print_table,
    table,
    verdict,
    wrapped,
)
from kvferry.core.words import counted
from kvferry.pattern import Checked


class Verdict(StrEnum):
    """How a demonstration ended, the worst first."""

    WRONG = "wrong"
    """A cell does not hold what it should."""
    FAILED = "failed"
    """A request was reported as failed, or an engine did not do its part."""
    LEAKED = "leaked"
    """A lease, a read or a block was left behind."""
    VERIFIED = "verified"


@dataclass
class DemoResult:
    """What was moved between one pair of engines, and what was found there."""

    model: str
    src: str
    dst: str
    num_requests: int = 0
    total_bytes: int = 0
    num_runs: int = 0
    plan_ms: float = 0.0
    """To plan, prove and lower, for all destination ranks."""
    num_cells: int = 0
    """Cells looked at in the destination, by name."""
    num_wrong: int = 0
    first_wrong: str = ""
    failures: list[str] = field(default_factory=list)
    """Requests that were reported as failed, or what ended the demonstration."""
    leaks: list[str] = field(default_factory=list)
    """Whatever did not come back."""

    @property
    def verdict(self) -> Verdict:
        if self.num_wrong:
            return Verdict.WRONG
        return Verdict.FAILED if self.failures else Verdict.LEAKED if self.leaks else Verdict.VERIFIED

    def count(self, sample: Sample, what: str, dst_rank: int, checked: Checked) -> None:
        """Add what was found at a destination rank; ``what`` says of which cells."""
        self.num_cells += checked.num_cells
        self.num_wrong += checked.num_wrong
        if checked.first and not self.first_wrong:
            place = f"{self.model}, {sample.request_id}: dst rank {dst_rank}"
            self.first_wrong = f"{place}: {what}{checked.first}"

    def fail(self, sample: Sample, dst_rank: int, why: object) -> None:
        """Note that a request failed at a destination rank."""
        self.failures.append(f"{sample.request_id}: dst rank {dst_rank}: {why}")


@dataclass
class MemoryResult(DemoResult):
    """In this process: times of all requests and ranks together."""

    select_ms: float = 0.0
    copy_ms: float = 0.0

    @property
    def gigabytes_per_second(self) -> float:
        return self.total_bytes / self.copy_ms / 1e6 if self.copy_ms else 0.0


@dataclass
class Speed:
    """How fast the last request went to one destination rank; times are medians of the turns."""

    dst_rank: int
    total_bytes: int
    num_runs: int
    num_sources: int
    move_ms: float

    @property
    def gigabytes_per_second(self) -> float:
        return self.total_bytes / self.move_ms / 1e6 if self.move_ms else 0.0


@dataclass
class ProcessResult(DemoResult):
    """Between processes."""

    device: str = "cpu"
    num_processes: int = 0
    ways: list[str] = field(default_factory=list)
    """By which ways the first request was read."""
    meet_ms: float = 0.0
    """From the first call to a connected and planned peer, on the slowest rank."""
    speeds: list[Speed] = field(default_factory=list)
    num_leases: int = 0
    """Leases that are outstanding at the end."""


@dataclass(frozen=True)
class DemoReport:
    """All pairs of engines that were shown."""

    pairs: Sequence[DemoResult]

    @property
    def verdict(self) -> Verdict:
        """The worst of all."""
        found = {pair.verdict for pair in self.pairs}
        return next(verdict for verdict in Verdict if verdict in found)

    @property
    def summary(self) -> str:
        """What was looked at, in words."""
        cells = sum(pair.num_cells for pair in self.pairs)
        return f"{cells:,} cells of {counted(self.num_requests, 'request')}, {self.num_wrong} wrong"

    @property
    def num_requests(self) -> int:
        return sum(pair.num_requests for pair in self.pairs)

    @property
    def num_wrong(self) -> int:
        return sum(pair.num_wrong for pair in self.pairs)

    def as_object(self) -> dict[str, object]:
        """The whole report as plain data."""
        return {
            "verdict": self.verdict.value,
            "num_requests": self.num_requests,
            "num_cells": sum(pair.num_cells for pair in self.pairs),
            "num_wrong": self.num_wrong,
            "pairs": [{"verdict": pair.verdict.value, **asdict(pair)} for pair in self.pairs],
        }


def show(report: DemoReport) -> None:
    """All of it; the last line says what was found."""
    for pair in report.pairs:
        if isinstance(pair, ProcessResult):
            _show_processes(pair)
    in_memory = [pair for pair in report.pairs if isinstance(pair, MemoryResult)]
    if in_memory:
        _show_in_memory(in_memory)
    _conclude(report)


def _show_processes(result: ProcessResult) -> None:
    out, ways = console(), " and ".join(result.ways) or "no"
    rows = [
        ("model", result.model),
        ("from", result.src),
        ("to", result.dst),
        ("by", f"{ways} reads of {result.device} memory, {result.num_processes} processes"),
        ("moved", f"{num_bytes(result.total_bytes)} in {result.num_runs:,} runs"),
    ]
    labelled(out, rows)
    out.print()
    if not result.speeds:
        return
    _show_speeds(result.speeds)
    plan, meet = milliseconds(result.plan_ms), milliseconds(result.meet_ms)
    rows = [
        ("planning", f"{plan}, once for all ranks; first contact {meet}, all told"),
        ("leases", f"{result.num_leases} outstanding"),
    ]
    labelled(out, rows)
    out.print()


def _show_speeds(speeds: Sequence[Speed]) -> None:
    rows = table("dst", "sources", "bytes", "runs", "average run", "time", "speed")
    for one in speeds:
        rows.add_row(
            str(one.dst_rank),
            str(one.num_sources),
            num_bytes(one.total_bytes),
            f"{one.num_runs:,}",
            num_bytes(one.total_bytes / max(1, one.num_runs)),
            milliseconds(one.move_ms),
            gigabytes_per_second(one.gigabytes_per_second),
        )
    print_table(console(), rows)


def _show_in_memory(results: Sequence[MemoryResult]) -> None:
    out = console()
    labelled(out, [(result.model, f"{result.src} → {result.dst}") for result in results])
    out.print()
    rows = table("model", "bytes", "runs", "average run", "copy", "plan", "select", left=["model"])
    for result in results:
        rows.add_row(
            result.model,
            num_bytes(result.total_bytes),
            f"{result.num_runs:,}",
            num_bytes(result.total_bytes / max(1, result.num_runs)),
            f"{result.gigabytes_per_second:.1f} GB/s",
            milliseconds(result.plan_ms),
            milliseconds(result.select_ms),
        )
    print_table(out, rows)


def _conclude(report: DemoReport) -> None:
    """What was found; after a failure, the first wrong cells and whatever else is wrong."""
    out = console()
    if report.verdict is Verdict.VERIFIED:
        out.print(f"verified: {report.summary}", style="bold green")
        return
    verdict(out, report.verdict.upper(), report.summary)
    for pair in report.pairs:
        first = [f"first: {pair.first_wrong}"] if pair.first_wrong else []
        wrapped(out, [*first, *pair.failures, *pair.leaks])
