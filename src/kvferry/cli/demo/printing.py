"""The report of a demonstration, for people."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.cli.demo.result import DemoReport, MemoryResult, ProcessResult, Speed, Verdict
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
