"""The report of a benchmark, for people."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.cli.bench.calls import CallTimes
from kvferry.cli.bench.report import BenchReport, BenchVerdict, NotRun, RivalTimes, by_case, speed_ratio
from kvferry.cli.bench.rivals import Rival
from kvferry.cli.measured_link import how_close
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

COLUMNS = {Rival.COPY: "copy", Rival.ONE_RUN: "1 run", Rival.NIXL: "NIXL", Rival.VLLM: "vLLM"}
"""Whom others are measured by."""
SHORT = {"half-consecutive": "half"}


def show(report: BenchReport) -> None:
    """All of it; the last line says what was found."""
    for medium in dict.fromkeys(one.medium for one in report.times):
        times = [one for one in report.times if one.medium == medium]
        present = list(dict.fromkeys(one.rival for one in times))
        for rival in [one for one in present if one.is_ours] or present:
            _show_rival(rival, times, [one for one in COLUMNS if one in present and one is not rival])
    _show_calls(report.calls)
    _show_machine(report)
    _conclude(report)


def _show_rival(rival: Rival, times: Sequence[RivalTimes], others: Sequence[Rival]) -> None:
    """One of ours, case by case, beside everybody else of the same run."""
    mine = [one for one in times if one.rival is rival]
    ways = ", ".join(dict.fromkeys(one.way for one in mine))
    out = console()
    by = "" if ways == rival.value else f" ({ways})"
    out.print(f"{mine[0].medium}: {rival.value}{by}", style="bold")
    is_predicted = any(one.predicted_seconds for one in mine)
    times_of = ("time", "profile", "spread") if is_predicted else ("time", "spread")
    rows = table(
        "runs", "of", "blocks", *times_of, "speed", *(COLUMNS[one] for one in others), left=["blocks"]
    )
    cases = by_case(times)
    for one in mine:
        beside = cases[one.case]
        rows.add_row(
            f"{one.case.num_pages:,}",
            num_bytes(one.case.shape.run_bytes),
            SHORT.get(one.case.order.value, one.case.order.value),
            milliseconds(1e3 * one.median),
            *([milliseconds(1e3 * (one.predicted_seconds or 0))] if is_predicted else []),
            ratio(one.spread),
            gigabytes_per_second(one.gigabytes_per_second),
            *(ratio(speed_ratio(one, beside[other])) if other in beside else "·" for other in others),
        )
    print_table(out, rows)
    if is_predicted:
        told = [(one.predicted_seconds, one.median) for one in mine if one.predicted_seconds]
        wrapped(out, [f"by the profile: {how_close(told)}"])
        out.print()


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


def _show_calls(calls: Sequence[CallTimes]) -> None:
    """What a read costs its caller."""
    for one in calls:
        p50, p99, first, second = (
            milliseconds(1e3 * seconds)
            for seconds in (one.call_p50_s, one.call_p99_s, one.first_read_s, one.second_read_s)
        )
        line = (
            f"{one.medium}: read() returns within {p50} (p50), {p99} (p99 of {one.num_calls:,} calls) while"
            f" large reads are under way; the first read after connecting takes {first}, the next {second};"
            f" an idle transport takes {one.idle_cores:.3f} cores"
        )
        wrapped(console(), [line])
    if calls:
        console().print()


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
