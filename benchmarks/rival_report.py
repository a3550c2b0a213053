"""What a run of the benchmark found, as values, and how it is shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from statistics import median
from typing import Any

from benchmarks.rival_cases import BenchCase
from benchmarks.rival_sides import OURS
from kvferry.cli.output import (
    console,
    gigabytes_per_second,
    labelled,
    milliseconds,
    num_bytes,
    print_table,
    ratio,
    table,
    verdict,
    wrapped,
)

FORMAT = 1
"""The version of the JSON document."""


class BenchVerdict(StrEnum):
    """What came of it, the worst that applies."""

    RIGHT = "right"
    """Every rival that ran put every cell where it belongs."""
    FAILED = "failed"
    """A read failed."""
    WRONG = "wrong"
    """A cell was wrong after a read."""


@dataclass(frozen=True)
class RivalTimes:
    medium: str
    case: BenchCase
    rival: str
    way: str
    """What moved the bytes."""
    num_runs: int
    """In how many runs it moved them."""
    seconds: tuple[float, ...]

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
        case = self.case
        return {
            "medium": self.medium,
            "rival": str(self.rival),
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
        }


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
    times: list[RivalTimes] = field(default_factory=list)
    not_run: list[NotRun] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    checked_bytes: int = 0
    """Compared after a read, all reads together."""

    @property
    def verdict(self) -> BenchVerdict:
        if self.wrong:
            return BenchVerdict.WRONG
        return BenchVerdict.FAILED if self.failures or not self.times else BenchVerdict.RIGHT

    def as_object(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "verdict": self.verdict.value,
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "times": [one.as_object() for one in self.times],
            "not_run": [asdict(one) for one in self.not_run],
            "failures": self.failures,
            "wrong": self.wrong,
            "checked_bytes": self.checked_bytes,
        }


def by_case(times: Iterable[RivalTimes]) -> dict[BenchCase, dict[str, RivalTimes]]:
    """Who took how long for each case; only times of one kind of memory and one run are ever compared."""
    found: dict[BenchCase, dict[str, RivalTimes]] = {}
    for one in times:
        found.setdefault(one.case, {})[one.rival] = one
    return found


def speed_ratio(ours: RivalTimes, theirs: RivalTimes) -> float:
    """How many times as fast ``ours`` is, by medians."""
    return theirs.median / ours.median


SHORT = {"half-consecutive": "half"}
LEGEND = (
    "runs, size: number of pieces of the request, bytes of each; blocks: placement of its blocks in the pool;"
    " median: over all turns; max/min: the slowest turn divided by the fastest; vs X: speed relative to X"
    " (0.5× takes twice as long)"
)


def show(report: BenchReport) -> None:
    for medium in dict.fromkeys(one.medium for one in report.times):
        times = [one for one in report.times if one.medium == medium]
        present = list(dict.fromkeys(one.rival for one in times))
        others = [one for one in present if one not in OURS]
        for rival in [one for one in present if one in OURS] or present:
            _show_rival(rival, times, [one for one in others if one != rival])
    wrapped(console(), [LEGEND])
    console().print()
    _show_machine(report)
    _conclude(report)


def _show_rival(rival: str, times: Sequence[RivalTimes], others: Sequence[str]) -> None:
    mine = [one for one in times if one.rival == rival]
    ways = ", ".join(dict.fromkeys(one.way for one in mine))
    out = console()
    by = "" if ways == rival else f" ({ways})"
    out.print(f"{mine[0].medium}: {rival}{by}", style="bold")
    than = [f"vs {other}" for other in others]
    rows = table("runs", "size", "blocks", "median", "max/min", "rate", *than, left=["blocks"])
    cases = by_case(times)
    for one in mine:
        beside = cases[one.case]
        rows.add_row(
            f"{one.case.num_pages:,}",
            num_bytes(one.case.shape.run_bytes),
            SHORT.get(one.case.order.value, one.case.order.value),
            milliseconds(1e3 * one.median),
            ratio(one.spread),
            gigabytes_per_second(one.gigabytes_per_second),
            *(ratio(speed_ratio(one, beside[other])) if other in beside else "·" for other in others),
        )
    print_table(out, rows)


def _show_machine(report: BenchReport) -> None:
    machine, out = report.machine, console()
    rows = [
        ("machine", f"{machine['processor']}, {machine['num_cores']} cores, {machine['system']}"),
        ("device", machine["device"]),
        ("load", f"{machine['load']:g} when it began"),
        ("versions", ", ".join(f"{name} {number}" for name, number in report.versions.items())),
        *_not_run(report.not_run),
    ]
    labelled(out, rows)
    out.print()


def _not_run(not_run: Sequence[NotRun]) -> list[tuple[str, str]]:
    """Who did not take part, and why; the same for several kinds of memory is said once."""
    media: dict[tuple[str, str], list[str]] = {}
    for one in not_run:
        media.setdefault((one.rival, one.why), []).append(one.medium)
    return [
        ("not run", f"{rival} ({', '.join(names)}): {why}" if rival else f"{', '.join(names)}: {why}")
        for (rival, why), names in media.items()
    ]


def _conclude(report: BenchReport) -> None:
    """What was found; after a failure, what failed and the first wrong cell of each read."""
    out = console()
    num_reads = len(report.times)
    if report.verdict is BenchVerdict.RIGHT:
        text = f"{num_reads:,} reads checked cell by cell, {num_bytes(report.checked_bytes)}, 0 wrong"
        out.print(f"right: {text}", style="bold green")
        return
    verdict(out, report.verdict.upper(), f"{num_reads:,} reads checked, {len(report.wrong)} of them wrong")
    wrapped(out, [*report.wrong, *report.failures])
