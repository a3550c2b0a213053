"""What one engine said, whole, for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from kvferry.cli import output
from kvferry.wire.bad_input import printable


def show(out: Console, report: dict[str, Any]) -> None:
    """One engine's answer, or that there is none."""
    if error := report.get("error"):
        out.print(Text.assemble(("NO ANSWER", "bold red"), f"  {_text(error)}\n"), soft_wrap=True)
        return
    name = _text(report["engine"] if report["side"] == "source" else report["reader"])
    place = f"{_text(report['host'])}, process {report['pid']}, up {output.duration(report['up_seconds'])}"
    version = f"kvferry {report['kvferry']}, protocol {report['protocol']}"
    is_source = report["side"] == "source"
    rows = _source_rows(report) if is_source else _destination_rows(report)
    messages = _counts({**report["refused"], **report["dropped"]})
    out.print(Text.assemble((report["side"].upper(), "bold"), f"  {name}"), soft_wrap=True)
    output.labelled(out, [("on", place), ("version", version), *rows, ("bad messages", messages)])
    (_show_leases if is_source else _show_loads)(out, report)
    out.print("  counts and gauges")
    output.wrapped(out, [_figure(each) for each in report["figures"]] or ["none yet"], "    ")
    out.print()


def _source_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    pinned = sum(each["value"] for each in report["figures"] if each["metric"] == "kvferry_pinned_bytes")
    waits = f"{report['offered']} offered, {report['being_read']} being read, {output.num_bytes(pinned)}"
    return [("at", _text(report["address"])), ("ranks", f"{report['ranks']} joined"), ("pinned", waits)]


def _show_leases(out: Console, report: dict[str, Any]) -> None:
    if report["leases"]:
        table = output.table("request", "tokens", "reader", "lease left", left=("request", "reader"))
        for lease in report["leases"]:
            reader = _text(lease["reader"]) or "nobody yet"
            cells = (str(lease["num_tokens"]), reader, f"{lease['seconds_left']:.0f} s")
            table.add_row(_text(lease["request_id"]), *cells)
        output.print_table(out, table)


def _destination_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
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


def _show_loads(out: Console, report: dict[str, Any]) -> None:
    for source in report["sources"]:
        way = f", {source['way']} from rank {', '.join(map(str, source['ranks']))}" if source["way"] else ""
        why = f", since {_text(source['why'])}" if source["why"] else ""
        line = f"{_text(source['engine'])} at {_text(source['address'])}: {source['state']}{way}{why}"
        output.wrapped(out, [line], "    ")
    if report["loads"]:
        table = output.table("request", "from", "phase", "for", left=("request", "from", "phase"))
        for load in report["loads"]:
            where, since = f"{_text(load['engine'])} at {_text(load['address'])}", f"{load['seconds']:.1f} s"
            table.add_row(_text(load["request_id"]), where, load["phase"], since)
        output.print_table(out, table)


def _figure(each: dict[str, Any]) -> str:
    labels = ", ".join(f"{name}={value}" for name, value in each["labels"].items())
    return f"{each['metric']}{f' ({labels})' if labels else ''}: {each['value']:,.0f}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {_text(what)}" for what, number in sorted(counts.items()))


def _text(value: object) -> str:
    """What a peer may have named: on one line, without control characters."""
    return printable(str(value))
