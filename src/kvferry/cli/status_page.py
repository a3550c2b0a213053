"""The reports of running engines: queried, and shown to people."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from kvferry.cli import output
from kvferry.endpoint.secret_source import secret_from_environment, secret_from_file
from kvferry.endpoint.status import ask_status, live_sockets, read_status
from kvferry.errors import SpecError
from kvferry.wire.reading import printable

Report = Mapping[str, Any]

NOTHING = "–"


def answers_of(engine: str, secret_file: Path | None) -> list[dict[str, Any]]:
    """The reports of one engine or of all engines of this user, sources first; of all: errors, too."""
    if "://" in engine:
        return [
            ask_status(engine, secret_from_file(secret_file) if secret_file else secret_from_environment())
        ]
    if engine:
        return [_read(Path(engine))]
    found = []
    for path in live_sockets():
        try:
            found.append(_read(path))
        except SpecError as error:  # it may have ended just now
            found.append({"socket": str(path), "error": str(error)})
    return sorted(found, key=lambda answer: answer.get("side") != "source")


def _read(path: Path) -> dict[str, Any]:
    return {"socket": str(path), **read_status(path)}


def show(reports: Sequence[Report]) -> None:
    out = output.console()
    for report in reports:
        _show_engine(out, report)
    if not reports:
        out.print("no engine of this user runs here; name its socket, or a source engine's address")


def _show_engine(out: Console, report: Report) -> None:
    if error := report.get("error"):
        out.print(Text.assemble(("NO ANSWER", "bold red"), f"  {_text(error)}\n"), soft_wrap=True)
        return
    is_source = report["side"] == "source"
    name = _text(report["engine"] if is_source else report["reader"])
    place = f"{_text(report['host'])}, process {report['pid']}, up {output.duration(report['up_seconds'])}"
    version = f"kvferry {report['kvferry']}, protocol {report['protocol']}"
    rows = _source_rows(report) if is_source else _destination_rows(report)
    messages = _counts({**report["refused"], **report["dropped"]})
    out.print(Text.assemble((report["side"].upper(), "bold"), f"  {name}"), soft_wrap=True)
    output.labelled(out, [("on", place), ("version", version), *rows, ("bad messages", messages)])
    if is_source:
        _show_leases(out, report["leases"])
    else:
        _show_sources(out, report["sources"])
        _show_loads(out, report["loads"])
    out.print("  counts and gauges")
    output.wrapped(out, [_figure(each) for each in report["figures"]] or ["none yet"], "    ")
    out.print()


def _source_rows(report: Report) -> list[tuple[str, str]]:
    pinned = sum(each["value"] for each in report["figures"] if each["metric"] == "kvferry_pinned_bytes")
    waits = f"{report['offered']} offered, {report['being_read']} being read, {output.num_bytes(pinned)}"
    return [("at", _text(report["address"])), ("ranks", f"{report['ranks']} joined"), ("pinned", waits)]


def _show_leases(out: Console, leases: Iterable[Report]) -> None:
    """Those that end next first."""
    rows = []
    for each in sorted(leases, key=_seconds_left):
        left = NOTHING if each["seconds_left"] is None else f"{each['seconds_left']:.0f} s"
        rows.append((each["request_id"], f"{each['num_tokens']:,}", each["reader"] or "not claimed", left))
    _show_table(out, ("request", "tokens", "reader", "lease left"), ("request", "reader"), rows)


def _seconds_left(lease: Report) -> float:
    left = lease["seconds_left"]
    return math.inf if left is None else float(left)


def _destination_rows(report: Report) -> list[tuple[str, str]]:
    under_way, rank = _counts(report["fetches"]) or "none", ("rank", str(report["rank"]))
    if not (report["fetches"] or report["ended"] or report["num_sources"]):
        return [rank, ("loads", "nothing so far")]  # as the workers of an engine that only prefills
    return [
        rank,
        ("loads", f"{under_way} under way, {report['in_flight']} reads in flight"),
        ("ended", _counts(report["ended"])),
        ("quarantined", str(report["quarantined"]) if report["quarantined"] else ""),
        ("sources", str(report["num_sources"])),
    ]


def _show_sources(out: Console, sources: Iterable[Report]) -> None:
    for source in sources:
        way = f", {source['way']} from rank {', '.join(map(str, source['ranks']))}" if source["way"] else ""
        why = f", since {_text(source['why'])}" if source["why"] else ""
        line = f"{_text(source['engine'])} at {_text(source['address'])}: {source['state']}{way}{why}"
        output.wrapped(out, [line], "    ")


def _show_loads(out: Console, loads: Iterable[Report]) -> None:
    rows = [
        (
            load["request_id"],
            f"{load['engine']} at {load['address']}",
            load["phase"],
            f"{load['seconds']:.1f} s",
        )
        for load in loads
    ]
    _show_table(out, ("request", "from", "phase", "for"), ("request", "from", "phase"), rows)


def _show_table(
    out: Console, columns: Sequence[str], left: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    if rows:
        table = output.table(*columns, left=left)
        for row in rows:
            table.add_row(*map(_text, row))
        output.print_table(out, table)


def _figure(each: Report) -> str:
    labels = ", ".join(f"{name}={value}" for name, value in each["labels"].items())
    return f"{each['metric']}{f' ({labels})' if labels else ''}: {each['value']:,.0f}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {_text(what)}" for what, number in sorted(counts.items()))


def _text(value: object) -> str:
    """A name that a peer may have chosen: on one line, without control characters."""
    return printable(str(value))
