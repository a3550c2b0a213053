"""What engines said, for people: one answer whole, or ``--watch``, which looks again and again."""

from __future__ import annotations

import itertools
import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from kvferry.cli import output
from kvferry.cli.status.asking import EngineAsker
from kvferry.cli.status.board import Board, board, lines, seconds_left
from kvferry.cli.status.reported import Watched
from kvferry.wire.reading import printable

# -- again and again -------------------------------------------------------------------------------


ShowEngines = Callable[[Watched, float], None]
"""Shows what is known at a time, by the clock that measured it."""

MIN_ROWS = 3
NUM_TABLES = 6


def watch_engines(
    asker: EngineAsker, display: AbstractContextManager[ShowEngines], every: float, count: int | None
) -> None:
    """Look each ``every`` seconds, ``count`` times or until Ctrl-C (or SIGTERM), which is no failure."""
    known = Watched()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # the terminal is restored
    try:
        with suppress(KeyboardInterrupt), display as show:
            for num_looks in itertools.count(1):
                begun = time.monotonic()
                looks = asker.look()
                now = time.monotonic()
                known = known.then(now, looks)
                show(known, now)
                if num_looks == count:
                    break
                time.sleep(max(0.0, begun + every - time.monotonic()))
    finally:
        signal.signal(signal.SIGTERM, before)


def display_for(*, as_json: bool, every: float) -> AbstractContextManager[ShowEngines]:
    """Tables on a terminal, else a line for each engine and look, or an object for each look."""
    out = output.console()
    if as_json:
        return nullcontext(_print_object)
    return on_terminal(out, every) if out.is_terminal else nullcontext(_print_lines)


def _print_lines(known: Watched, now: float) -> None:
    clock = time.strftime("%H:%M:%S")
    for line in lines(known, now):
        print(f"{clock} {line}", flush=True)


def _print_object(known: Watched, now: float) -> None:
    engines = [
        {
            "place": place,
            "side": each.last.title.partition(" ")[0],
            **asdict(each.last),
            "per_second": each.per_second,
            "bytes_per_second": each.bytes_per_second,
            "seconds_since_answer": round(now - each.answered_at, 3),
            "error": each.error,
            "is_gone": each.is_gone,
        }
        for place, each in known.engines.items()
    ]
    shown = {"at": round(time.time(), 3), "engines": engines, "unanswered": known.unanswered}
    print(json.dumps(shown, ensure_ascii=False), flush=True)


@contextmanager
def on_terminal(out: Console, every: float) -> Iterator[ShowEngines]:
    """The whole terminal while it lasts; what was seen last stays on it."""
    drawn: RenderableType = ""
    try:
        with Live(console=out, screen=True, auto_refresh=False) as live:

            def show(known: Watched, now: float) -> None:
                nonlocal drawn
                rows = max(MIN_ROWS, out.height // NUM_TABLES - NUM_TABLES // 2)
                drawn = draw(board(known, now, rows), f"every {every:g} s · {time.strftime('%H:%M:%S')}")
                live.update(drawn, refresh=True)

            yield show
    finally:
        out.print(drawn)


def draw(shown: Board, when: str) -> RenderableType:
    head = f" · {when} · Ctrl-C ends"
    parts: list[RenderableType] = [Text.assemble(("kvferry status", "bold"), head), Text(shown.summary)]
    for warning in shown.warnings:
        word, _, rest = warning.partition("  ")
        parts.append(Text.assemble((word, output.STYLES.get(word, "bold red")), f"  {rest}"))
    for each in shown.tables:
        table = output.table(*each.columns, left=each.text_columns)
        for column in table.columns:
            column.no_wrap, column.overflow = column.justify == "right", "ellipsis"
        for row in each.rows:
            table.add_row(*row)
        parts += [Text(), Text(each.title, "bold"), table]
        if each.num_more:
            parts.append(Text(f"… and {each.num_more} more", "dim"))
    return Group(*parts)


# -- one answer, whole -----------------------------------------------------------------------------


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
            reader, left = _text(lease["reader"]) or "nobody yet", seconds_left(lease["seconds_left"])
            table.add_row(_text(lease["request_id"]), str(lease["num_tokens"]), reader, left)
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
