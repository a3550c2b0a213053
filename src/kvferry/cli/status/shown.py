"""Displays the status of engines: one answer in full, or with ``--watch`` tables that are refreshed."""

from __future__ import annotations

import itertools
import json
import math
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvferry.cli import output
from kvferry.cli.status.asking import EngineAsker
from kvferry.cli.status.reported import (
    ENDED,
    GRANTED,
    OFFERED,
    READ,
    WINDOW_SECONDS,
    Reported,
    Watched,
    WatchedEngine,
)
from kvferry.errors import counted
from kvferry.runtime.figures import NO_WAY
from kvferry.wire.reading import printable

Cells = tuple[str, ...]
Engines = Sequence[WatchedEngine]
ShowEngines = Callable[[Watched, float], None]
"""Displays the engines at a time of the monotonic clock."""

NOTHING = "–"
MIN_ROWS = 3
NUM_TABLES = 6

# -- watch -----------------------------------------------------------------------------------------


def watch_engines(
    asker: EngineAsker, display: AbstractContextManager[ShowEngines], every: float, count: int | None
) -> None:
    """Refresh each ``every`` seconds, ``count`` times or until Ctrl-C or SIGTERM, which are no failures."""
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
    """Tables on a terminal, else a line per engine and refresh, or a JSON object per refresh."""
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
            **{key: value for key, value in each.last.items() if key != "title"},
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
    """Use the whole terminal, and leave the last display on it."""
    drawn: RenderableType = ""
    try:
        with Live(console=out, screen=True, auto_refresh=False) as live:

            def show(known: Watched, now: float) -> None:
                nonlocal drawn
                rows = max(MIN_ROWS, out.height // NUM_TABLES - NUM_TABLES // 2)
                when = f"every {every:g} s · {time.strftime('%H:%M:%S')}"
                drawn = draw(known, now, rows, when)
                live.update(drawn, refresh=True)

            yield show
    finally:
        out.print(drawn)


def draw(watched: Watched, now: float, max_rows: int, when: str) -> RenderableType:
    """A summary, warnings, and tables of at most ``max_rows`` rows."""
    destinations, sources = _answering(watched, "destination"), _answering(watched, "source")
    summary = f"{counted(len(sources), 'source engine')}, {counted(len(destinations), 'destination rank')}"
    head = f" · {when} · Ctrl-C ends"
    parts: list[RenderableType] = [Text.assemble(("kvferry status", "bold"), head), Text(summary)]
    for warning in warnings(watched, now):
        word, _, rest = warning.partition("  ")
        parts.append(Text.assemble((word, output.STYLES.get(word, "bold red")), f"  {rest}"))
    for each in tables(destinations, sources):
        if each.rows:
            table = _filled(each, max_rows)
            for column in table.columns:
                column.no_wrap, column.overflow = column.justify == "right", "ellipsis"
            parts += [Text(), Text(each.title, "bold"), table]
        if len(each.rows) > max_rows:
            parts.append(Text(f"… and {len(each.rows) - max_rows} more", "dim"))
    return Group(*parts)


def warnings(watched: Watched, now: float) -> Iterator[str]:
    """Warnings for the operator, worst first."""
    engines = watched.engines.values()
    for each in engines:
        if num_stuck := each.last.get("num_quarantined"):
            stuck = counted(num_stuck, "load")
            yield f"QUARANTINE  {_named(each)}: {stuck} whose reads do not end; their blocks stay reserved"
    for each in engines:
        if each.error:
            word = "GONE" if each.is_gone else "NO ANSWER"
            yield f"{word}  {_named(each)}, for {now - each.answered_at:.0f} s: {each.error}"
    for place, why in watched.unanswered.items():
        yield f"NO ANSWER  {place}: {why}"
    for each in engines:
        if expired := each.grown(f"{ENDED}expired"):
            yield f"EXPIRED  {_named(each)}: {counted(int(expired), 'lease')} expired unread recently"
    for (engine, _, state, _, why), ranks in _by_source(_answering(watched, "destination")).items():
        if why:
            word = "NOTE" if state == "met" else state.upper()
            yield f"{word}  source {engine}, for {counted(ranks, 'rank')}: {why}"
    if not engines and not watched.unanswered:
        yield "NONE  no running engine of this user on this host; waiting for one to start"


def lines(watched: Watched, now: float) -> Iterator[str]:
    """The warnings, then a line per engine."""
    yield from warnings(watched, now)
    for each in _answering(watched, "destination"):
        rates = (f"; {way} {rate} loads/s, {speed}" for way, rate, speed, *_ in _way_rows([each]))
        under_way = f"{_phases(each.last)} under way, {each.last['num_reads']} reads in flight"
        yield f"{each.last['title']}: {under_way}{''.join(rates)}"
    for each in _answering(watched, "source"):
        _, _, offered, being_read, pinned, offers, speed = _source_row(each)
        leases = f"{offered} offered, {being_read} being read, {pinned} pinned"
        yield f"{each.last['title']}: {leases}; {offers} offers/s, {speed}"


def _named(each: WatchedEngine) -> str:
    return f"{each.last['title']} ({each.last['host']}, process {each.last['pid']})"


# -- tables ----------------------------------------------------------------------------------------


class TableRows(NamedTuple):
    title: str
    columns: Cells
    text_columns: Cells
    """The other columns are numbers."""
    rows: Sequence[Cells]


def tables(destinations: Engines, sources: Engines) -> list[TableRows]:
    return [
        _destinations(destinations),
        _ways(destinations),
        _peers(destinations),
        _sources(sources),
        _loads(destinations),
        leases_table([lease for each in sources for lease in each.last["leases"]]),
    ]


def _answering(watched: Watched, side: str) -> list[WatchedEngine]:
    return [each for each in watched.engines.values() if not each.error and each.last["side"] == side]


def _filled(shown: TableRows, max_rows: int | None = None) -> Table:
    table = output.table(*shown.columns, left=shown.text_columns)
    for row in shown.rows[:max_rows]:
        table.add_row(*map(_text, row))
    return table


def _destinations(engines: Engines) -> TableRows:
    columns = ("destination", "rank", "under way", "reads", "quarantined", "up")
    title = "Destinations: loads under way, reads in flight, quarantine"
    return TableRows(title, columns, ("destination", "under way"), [_rank_row(each.last) for each in engines])


def _rank_row(last: Reported) -> Cells:
    numbers = (str(last["num_reads"]), str(last["num_quarantined"]), output.duration(last["up_seconds"]))
    return last["name"], str(last["rank"]), _phases(last), *numbers


def _phases(last: Reported) -> str:
    return ", ".join(f"{number} {phase}" for phase, number in sorted(last["phases"].items())) or NOTHING


def _ways(engines: Engines) -> TableRows:
    columns = ("way", "loads/s", "bytes/s", "loads", "bytes")
    title = f"Rates by way, over {WINDOW_SECONDS:.0f} s; totals since the start"
    return TableRows(title, columns, columns[:1], [*_way_rows(engines)])


def _way_rows(engines: Engines) -> Iterator[Cells]:
    """Sums over ranks: successful loads by way, then failed ones."""
    num_loads, per_second = _sum(e.last["counts"] for e in engines), _sum(e.per_second for e in engines)
    num_bytes, speed = (
        _sum(e.last["byte_counts"] for e in engines),
        _sum(e.bytes_per_second for e in engines),
    )
    is_read = {name: name.partition(" ")[0] == READ for name in num_loads}
    for name, number in sorted(num_loads.items(), key=lambda item: (not is_read[item[0]], item)):
        rate, total = f"{per_second[name]:.1f}", f"{number:,.0f}"
        if is_read[name]:
            way = name.partition(" ")[2] or NO_WAY
            yield way, rate, _speed(speed[way]), total, output.num_bytes(num_bytes[way])
        else:
            yield f"failed: {name}", rate, NOTHING, total, NOTHING


def _sum(all_counts: Iterable[Mapping[str, float]]) -> defaultdict[str, float]:
    total: defaultdict[str, float] = defaultdict(float)
    for counts in all_counts:
        for name, number in counts.items():
            total[name] += number
    return total


def _peers(engines: Engines) -> TableRows:
    columns = ("source", "address", "state", "way", "ranks")
    rows = [
        (engine, address, state, way or NOTHING, str(ranks))
        for (engine, address, state, way, _), ranks in _by_source(engines).items()
    ]
    return TableRows("Peers: source engines by state, with the number of ranks", columns, columns[:4], rows)


def _by_source(engines: Engines) -> Counter[Cells]:
    """Source engines (name, address, state, way, why) -> number of ranks that report them so."""
    return Counter(tuple(source.values()) for each in engines for source in each.last["sources"])


def _sources(engines: Engines) -> TableRows:
    columns = ("source", "ranks", "offered", "read", "pinned", "offers/s", "bytes/s")
    rows = [_source_row(each) for each in engines]
    return TableRows("Sources: leases offered and being read", columns, columns[:1], rows)


def _source_row(each: WatchedEngine) -> Cells:
    last = each.last
    leases = (str(last["num_offered"]), str(last["num_being_read"]), output.num_bytes(last["pinned_bytes"]))
    rates = (f"{each.per_second.get(OFFERED, 0):.1f}", _speed(each.bytes_per_second.get(GRANTED, 0)))
    return last["name"], last["ranks"], *leases, *rates


def _loads(engines: Engines) -> TableRows:
    columns = ("request", "from", "phase", "rank", "for")
    found = [(load, each.last["rank"]) for each in engines for load in each.last["loads"]]
    found.sort(key=lambda each: -each[0]["seconds"])
    rows = [
        (one["request_id"], one["engine"], one["phase"], str(rank), f"{one['seconds']:.1f} s")
        for one, rank in found
    ]
    return TableRows("Loads under way, oldest first", columns, columns[:3], rows)


def _seconds_left(lease: Mapping[str, Any]) -> float:
    left = lease["seconds_left"]
    return math.inf if left is None else float(left)  # None: no end


def leases_table(leases: Iterable[Mapping[str, Any]]) -> TableRows:
    columns = ("request", "tokens", "reader", "lease left")
    rows = []
    for each in sorted(leases, key=_seconds_left):
        left = NOTHING if each["seconds_left"] is None else f"{each['seconds_left']:.0f} s"
        rows.append((each["request_id"], f"{each['num_tokens']:,}", each["reader"] or "none yet", left))
    return TableRows("Leases, by time left", columns, ("request", "reader"), rows)


def _speed(bytes_per_second: float) -> str:
    """A rate with three significant digits.

    >>> _speed(100_123.4), _speed(0)
    ('97.8 KiB/s', '0 B/s')
    """
    scale = 1024 ** max(0, int(math.log(max(1.0, bytes_per_second), 1024)))
    digits = 2 - int(math.log10(max(1.0, bytes_per_second / scale)))
    return f"{output.num_bytes(round(bytes_per_second / scale, max(0, digits)) * scale)}/s"


# -- one answer in full ----------------------------------------------------------------------------


def show(out: Console, report: dict[str, Any]) -> None:
    """Print one engine's answer, or its error."""
    if error := report.get("error"):
        out.print(Text.assemble(("NO ANSWER", "bold red"), f"  {_text(error)}\n"), soft_wrap=True)
        return
    name = _text(report["engine"] if report["side"] == "source" else report["reader"])
    place = f"{_text(report['host'])}, process {report['pid']}, up {output.duration(report['up_seconds'])}"
    version = f"kvferry {report['kvferry']}, protocol {report['protocol']}"
    is_source = report["side"] == "source"
    rows = _source_rows(report) if is_source else _destination_rows(report)
    messages = _counts({**report["refused"], **report["dropped"]})
    out.print(Text.assemble((_text(report["side"]).upper(), "bold"), f"  {name}"), soft_wrap=True)
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
        output.print_table(out, _filled(leases_table(report["leases"])))


def _destination_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    under_way, rank = _counts(report["fetches"]) or "none", ("rank", str(report["rank"]))
    if not (report["fetches"] or report["ended"] or report["num_sources"]):
        return [rank, ("loads", "none so far")]  # as the workers of an engine that only prefills
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
        why = f"; reason: {_text(source['why'])}" if source["why"] else ""
        line = f"{_text(source['engine'])} at {_text(source['address'])}: {source['state']}{way}{why}"
        output.wrapped(out, [line], "    ")
    if report["loads"]:
        table = output.table("request", "from", "phase", "for", left=("request", "from", "phase"))
        for load in report["loads"]:
            where, since = f"{_text(load['engine'])} at {_text(load['address'])}", f"{load['seconds']:.1f} s"
            table.add_row(_text(load["request_id"]), where, _text(load["phase"]), since)
        output.print_table(out, table)


def _figure(each: dict[str, Any]) -> str:
    labels = ", ".join(f"{name}={value}" for name, value in each["labels"].items())
    return f"{each['metric']}{f' ({labels})' if labels else ''}: {each['value']:,.0f}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {_text(what)}" for what, number in sorted(counts.items()))


def _text(value: object) -> str:
    return printable(str(value))
