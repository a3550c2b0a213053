"""``kvferry status``: what running engines are doing now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvferry.cli.help_text import examples
from kvferry.cli.options import Json

if TYPE_CHECKING:
    from rich.console import Console

HELP = "\n\n".join(
    (
        "Show what running engines are doing: source engines and how they are read, loads, leases, counts.",
        "Without an argument: every engine of this user on this host (in a container: inside it). A file is"
        " the socket of one of them. An address (tcp://HOST:PORT) is that of a source engine, anywhere: the"
        " secret is taken from KVFERRY_SECRET_FILE, as engines do.",
        "It only asks: no engine does anything else because of it, and no answer has keys or tickets in it.",
        examples("kvferry status", "kvferry status tcp://10.0.0.7:5555", "kvferry status --json"),
        "Exit codes: 0 shown; 1 no engine was found; 2 bad usage, or an engine that does not answer.",
    )
)

NOT_FOUND = 1


def status(
    engine: Annotated[
        str, typer.Argument(metavar="[FILE|ADDRESS]", help="One engine.", show_default="all of this user")
    ] = "",
    secret_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The fleet's secret.", show_default="KVFERRY_SECRET_FILE"),
    ] = None,
    as_json: Json = False,
) -> int:
    """What running engines are doing now."""
    reports = _reports(engine, secret_file)
    if as_json:
        print(json.dumps({"engines": reports}, ensure_ascii=False))
    else:
        from kvferry.cli import output

        out = output.console()
        for report in reports:
            _show(out, report)
        if not reports:
            out.print("no engine of this user runs here; name its socket, or a source engine's address")
    return 0 if reports else NOT_FOUND


def _reports(engine: str, secret_file: Path | None) -> list[dict[str, Any]]:
    from kvferry.endpoint.ask_status import ask_status
    from kvferry.endpoint.secret_source import secret_from_environment, secret_from_file
    from kvferry.endpoint.status_socket import live_sockets, read_status
    from kvferry.errors import SpecError

    if "://" in engine:
        secret = secret_from_file(secret_file) if secret_file else secret_from_environment()
        return [ask_status(engine, secret)]
    if engine:
        return [{"socket": engine, **read_status(Path(engine))}]
    found = []
    for path in live_sockets():
        try:
            found.append({"socket": str(path), **read_status(path)})
        except SpecError as error:  # it may have ended just now; the others are still worth a look
            found.append({"socket": str(path), "error": str(error)})
    return found


def _show(out: Console, report: dict[str, Any]) -> None:
    from rich.text import Text

    from kvferry.cli import output

    if error := report.get("error"):
        out.print(Text.assemble(("NO ANSWER", "bold red"), f"  {_text(error)}\n"), soft_wrap=True)
        return
    name = _text(report["engine"] if report["side"] == "source" else report["reader"])
    place = f"{_text(report['host'])}, process {report['pid']}, up {_duration(report['up_seconds'])}"
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
    from kvferry.cli import output

    pinned = sum(each["value"] for each in report["figures"] if each["metric"] == "kvferry_pinned_bytes")
    waits = f"{report['offered']} offered, {report['being_read']} being read, {output.num_bytes(pinned)}"
    return [("at", _text(report["address"])), ("ranks", f"{report['ranks']} joined"), ("pinned", waits)]


def _show_leases(out: Console, report: dict[str, Any]) -> None:
    from kvferry.cli import output

    if report["leases"]:
        table = output.table("request", "tokens", "reader", "lease left", left=("request", "reader"))
        for lease in report["leases"]:
            reader = _text(lease["reader"]) or "nobody yet"
            cells = (str(lease["num_tokens"]), reader, f"{lease['seconds_left']:.0f} s")
            table.add_row(_text(lease["request_id"]), *cells)
        output.print_table(out, table)


def _destination_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    under_way = _counts(report["fetches"]) or "none"
    return [
        ("rank", str(report["rank"])),
        ("loads", f"{under_way} under way, {report['in_flight']} reads in flight"),
        ("ended", _counts(report["ended"])),
        ("quarantined", str(report["quarantined"]) if report["quarantined"] else ""),
        ("sources", str(report["num_sources"])),
    ]


def _show_loads(out: Console, report: dict[str, Any]) -> None:
    from kvferry.cli import output

    for source in report["sources"]:
        way = f", {source['way']} from rank {', '.join(map(str, source['ranks']))}" if source["way"] else ""
        why = f", since {_text(source['why'])}" if source["why"] else ""
        line = f"{_text(source['engine'])} at {_text(source['address'])}: {source['state']}{way}{why}"
        output.wrapped(out, [line, *_costs(source["costs"])], "    ")
    if report["loads"]:
        table = output.table("request", "from", "phase", "for", left=("request", "from", "phase"))
        for load in report["loads"]:
            where, since = f"{_text(load['engine'])} at {_text(load['address'])}", f"{load['seconds']:.1f} s"
            table.add_row(_text(load["request_id"]), where, load["phase"], since)
        output.print_table(out, table)


def _costs(costs: dict[str, Any]) -> list[str]:
    """What was learned of a link, in a line for each way."""
    return [
        f"  {way}: {cost['seconds_per_run'] * 1e6:.1f} µs per run, {cost['bytes_per_second'] / 1e9:.1f} GB/s,"
        f" learned from {cost['num_loads']} loads"
        for way, cost in costs.items()
    ]


def _figure(each: dict[str, Any]) -> str:
    labels = ", ".join(f"{name}={value}" for name, value in each["labels"].items())
    return f"{each['metric']}{f' ({labels})' if labels else ''}: {each['value']:,.0f}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {_text(what)}" for what, number in sorted(counts.items()))


def _duration(seconds: float) -> str:
    """A time as people say it.

    >>> _duration(42.0), _duration(600.0), _duration(9000.0)
    ('42 s', '10 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _text(value: object) -> str:
    """What a peer may have named: on one line, without control characters."""
    from kvferry.wire.bad_input import printable

    return printable(str(value))
