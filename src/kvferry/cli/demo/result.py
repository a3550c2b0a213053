"""What a demonstration finds out, whatever carried the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from kvferry.cli.demo.samples import Sample
from kvferry.core.words import counted
from kvferry.testing.pattern import Checked


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
