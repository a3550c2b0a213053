"""What a run of the benchmark found, as values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import median
from typing import Any

from kvferry.cli.bench.calls import CallTimes
from kvferry.cli.bench.grid import BenchCase
from kvferry.cli.bench.rivals import TRANSPORT_RIVALS, Rival
from kvferry.cli.measured_link import MeasuredCosts, known_cost
from kvferry.core.cost import Traffic

FORMAT = 1
"""The version of the JSON document."""


class BenchVerdict(StrEnum):
    """What came of it, the worst that applies."""

    RIGHT = "right"
    """Every rival that ran put every cell where it belongs."""
    FAILED = "failed"
    """A read of ours or of NIXL's failed."""
    WRONG = "wrong"
    """A cell was wrong after a read."""


@dataclass(frozen=True)
class RivalTimes:
    """How long one rival took for one case, turn by turn."""

    medium: str
    case: BenchCase
    rival: Rival
    way: str
    """What moved the bytes."""
    num_runs: int
    """In how many runs it moved them."""
    seconds: tuple[float, ...]
    predicted_seconds: float | None = None
    """What a profile said of it, if there was one."""

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def gigabytes_per_second(self) -> float:
        return self.case.total_bytes / self.median / 1e9

    @property
    def spread(self) -> float:
        """The slowest turn against the fastest."""
        return max(self.seconds) / min(self.seconds)

    def as_object(self) -> dict[str, Any]:
        """Plain data."""
        case = self.case
        return {
            "medium": self.medium,
            "rival": self.rival.value,
            "way": self.way,
            "run_bytes": case.shape.run_bytes,
            "num_pages": case.num_pages,
            "order": case.order.value,
            "num_runs": self.num_runs,
            "total_bytes": case.total_bytes,
            "num_turns": len(self.seconds),
            "median_s": self.median,
            "min_s": min(self.seconds),
            "max_s": max(self.seconds),
            "gb_per_s": self.gigabytes_per_second,
            "predicted_s": self.predicted_seconds,
        }

    @property
    def traffic(self) -> Traffic:
        """What moving it costs is told from this."""
        return Traffic(1, self.num_runs, self.case.total_bytes)


@dataclass(frozen=True)
class NotRun:
    """A rival, or a kind of memory, that cannot take part here."""

    medium: str
    rival: str
    """Empty: nobody can."""
    why: str


@dataclass
class BenchReport:
    """Everything; filled while the benchmark runs."""

    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    predicted_by: MeasuredCosts = field(default_factory=dict)
    """What a profile says of each kind of memory and way."""
    times: list[RivalTimes] = field(default_factory=list)
    calls: list[CallTimes] = field(default_factory=list)
    not_run: list[NotRun] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    checked_bytes: int = 0
    """Compared after a read, all reads together."""

    def add(self, times: RivalTimes) -> None:
        """One rival and case more, with what the profile says of it."""
        cost = known_cost(self.predicted_by, times.medium, times.way)
        if cost and times.rival in TRANSPORT_RIVALS:
            times = replace(times, predicted_seconds=cost.of(times.traffic).seconds)
        self.times.append(times)

    @property
    def verdict(self) -> BenchVerdict:
        if self.wrong:
            return BenchVerdict.WRONG
        return BenchVerdict.FAILED if self.failures or not self.times else BenchVerdict.RIGHT

    def as_object(self) -> dict[str, Any]:
        """Plain data, for ``--json``."""
        return {
            "format": FORMAT,
            "verdict": self.verdict.value,
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "times": [one.as_object() for one in self.times],
            "calls": [one.as_object() for one in self.calls],
            "not_run": [{"medium": one.medium, "rival": one.rival, "why": one.why} for one in self.not_run],
            "failures": self.failures,
            "wrong": self.wrong,
            "checked_bytes": self.checked_bytes,
        }


def by_case(times: Iterable[RivalTimes]) -> dict[BenchCase, dict[Rival, RivalTimes]]:
    """Who took how long for each case; only times of one kind of memory and one run are ever compared."""
    found: dict[BenchCase, dict[Rival, RivalTimes]] = {}
    for one in times:
        found.setdefault(one.case, {})[one.rival] = one
    return found


def speed_ratio(ours: RivalTimes, theirs: RivalTimes) -> float:
    """How many times as fast ``ours`` is, by medians."""
    return theirs.median / ours.median
