"""What a demonstration finds out, whatever carried the bytes, and how it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from rich.console import Console

from kvferry.cli.demo.engines import Sample
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


@dataclass(frozen=True)
class Speed:
    """How fast the last request went to one destination rank."""

    dst_rank: int
    total_bytes: int
    num_runs: int
    num_sources: int
    move_ms: float
    """The median of the turns."""


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
    # between processes
    device: str = "cpu"
    num_processes: int = 0
    ways: list[str] = field(default_factory=list)
    """By which ways the first request was read."""
    meet_ms: float = 0.0
    """From the first call to a connected and planned peer, on the slowest rank."""
    speeds: list[Speed] = field(default_factory=list)
    num_leases: int = 0
    """Leases that are outstanding at the end."""
    # in memory, all requests and ranks together
    select_ms: float = 0.0
    copy_ms: float = 0.0

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


def worst(results: Sequence[DemoResult]) -> Verdict:
    return min((result.verdict for result in results), key=list(Verdict).index)


def as_object(results: Sequence[DemoResult]) -> dict[str, object]:
    totals = {
        key: sum(getattr(one, key) for one in results) for key in ("num_requests", "num_cells", "num_wrong")
    }
    pairs = [{"verdict": one.verdict.value, **asdict(one)} for one in results]
    return {"verdict": worst(results).value, **totals, "pairs": pairs}


def show(results: Sequence[DemoResult]) -> None:
    out = console()
    if results[0].num_processes:
        _show_processes(out, results[0])
    else:
        _show_in_memory(out, results)
    _conclude(out, results)


def _sizes(one: DemoResult | Speed) -> tuple[str, str, str]:
    """Bytes, runs, and bytes of an average run."""
    average = one.total_bytes / max(1, one.num_runs)
    return num_bytes(one.total_bytes), f"{one.num_runs:,}", num_bytes(average)


def _speed(total_bytes: int, milli: float) -> float:
    return total_bytes / max(milli, 1e-3) / 1e6


def _show_processes(out: Console, result: DemoResult) -> None:
    ways = " and ".join(result.ways) or "no"
    labelled(
        out,
        [
            ("model", result.model),
            ("from", result.src),
            ("to", result.dst),
            ("by", f"{ways} reads of {result.device} memory, {result.num_processes} processes"),
            ("moved", f"{num_bytes(result.total_bytes)} in {result.num_runs:,} runs"),
        ],
    )
    out.print()
    if not result.speeds:
        return
    rows = table("dst", "sources", "bytes", "runs", "average run", "time", "speed")
    for one in result.speeds:
        speed = gigabytes_per_second(_speed(one.total_bytes, one.move_ms))
        rows.add_row(str(one.dst_rank), str(one.num_sources), *_sizes(one), milliseconds(one.move_ms), speed)
    print_table(out, rows)
    plan, meet = milliseconds(result.plan_ms), milliseconds(result.meet_ms)
    planning = f"{plan}, once for all ranks; first contact {meet}, all told"
    labelled(out, [("planning", planning), ("leases", f"{result.num_leases} outstanding")])
    out.print()


def _show_in_memory(out: Console, results: Sequence[DemoResult]) -> None:
    labelled(out, [(result.model, f"{result.src} → {result.dst}") for result in results])
    out.print()
    rows = table("model", "bytes", "runs", "average run", "copy", "plan", "select", left=["model"])
    for one in results:
        copy = f"{_speed(one.total_bytes, one.copy_ms):.1f} GB/s"
        rows.add_row(one.model, *_sizes(one), copy, milliseconds(one.plan_ms), milliseconds(one.select_ms))
    print_table(out, rows)


def _conclude(out: Console, results: Sequence[DemoResult]) -> None:
    """What was found; after a failure, the first wrong cells and whatever else is wrong."""
    cells, wrong = (sum(getattr(one, key) for one in results) for key in ("num_cells", "num_wrong"))
    requests = counted(sum(result.num_requests for result in results), "request")
    summary = f"{cells:,} cells of {requests}, {wrong} wrong"
    if worst(results) is Verdict.VERIFIED:
        out.print(f"verified: {summary}", style="bold green")
        return
    verdict(out, worst(results).upper(), summary)
    for result in results:
        first = [f"first: {result.first_wrong}"] if result.first_wrong else []
        wrapped(out, [*first, *result.failures, *result.leaks])
