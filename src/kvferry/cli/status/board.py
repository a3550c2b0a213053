"""What a person is shown of many engines at once: a few small tables, in a terminal or on a page. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvferry.cli import output
from kvferry.cli.status.reported import (
    ENDED,
    GRANTED,
    OFFERED,
    READ,
    WINDOW_SECONDS,
    ReportedDestination,
    ReportedSource,
    SeenSource,
    Watched,
    WatchedEngine,
)
from kvferry.core.words import counted
from kvferry.runtime.figures import NO_WAY

Cells = tuple[str, ...]

NOTHING = "–"


@dataclass(frozen=True, slots=True)
class BoardTable:
    """One table: each row has a cell for each column."""

    title: str
    columns: Cells
    text_columns: frozenset[str]
    """Those that are words; the others are numbers."""
    rows: tuple[Cells, ...]
    num_more: int = 0
    """Rows that are left out."""


@dataclass(frozen=True, slots=True)
class Board:
    """All that is shown at one moment."""

    summary: str
    warnings: tuple[str, ...]
    """What somebody should look at, worst first."""
    tables: tuple[BoardTable, ...]


def board(watched: Watched, now: float, max_rows: int) -> Board:
    """What is shown of the engines, each table cut to so many rows."""
    answering = [each for each in watched.engines.values() if not each.error]
    destinations = [each for each in answering if isinstance(each.last, ReportedDestination)]
    sources = [each for each in answering if isinstance(each.last, ReportedSource)]
    tables = (
        _destinations(destinations),
        _ways(destinations),
        _peers(destinations),
        _sources(sources),
        _loads(destinations),
        _leases(sources),
    )
    return Board(
        f"{counted(len(sources), 'source engine')}, {counted(len(destinations), 'destination rank')}",
        tuple(warnings(watched, now)),
        tuple(_cut(table, max_rows) for table in tables if table.rows),
    )


def warnings(watched: Watched, now: float) -> Iterator[str]:
    """What somebody should look at, worst first."""
    engines = watched.engines.values()
    for each in engines:
        if isinstance(each.last, ReportedDestination) and each.last.num_quarantined:
            stuck = counted(each.last.num_quarantined, "load")
            yield f"QUARANTINE  {_named(each)}: {stuck} whose reads do not end; their blocks stay out of use"
    for each in engines:
        if each.error:
            word = "GONE" if each.is_gone else "NO ANSWER"
            yield f"{word}  {_named(each)}, for {now - each.answered_at:.0f} s: {each.error}"
    for place, why in watched.unanswered.items():
        yield f"NO ANSWER  {place}: {why}"
    for each in engines:
        if expired := each.grown(f"{ENDED}expired"):
            yield f"EXPIRED  {_named(each)}: {counted(int(expired), 'lease')} ended unread just now"
    for source, ranks in _by_source(engines).items():
        if source.why:
            word = "NOTE" if source.state == "met" else source.state.upper()
            yield f"{word}  source {source.engine}, for {counted(ranks, 'rank')}: {source.why}"
    if not engines and not watched.unanswered:
        yield "NOBODY  no engine of this user runs here; one that starts will appear"


def lines(watched: Watched, now: float) -> Iterator[str]:
    """The same as a line for each engine, behind what somebody should look at."""
    yield from warnings(watched, now)
    for each in watched.engines.values():
        if not each.error:
            yield f"{each.last.title}: {'; '.join(filter(None, _said(each)))}"


def _said(each: WatchedEngine) -> Iterator[str]:
    match each.last:
        case ReportedSource() as source:
            pinned = output.num_bytes(source.pinned_bytes)
            yield f"{source.num_offered} offered, {source.num_being_read} being read, {pinned} pinned"
            rates = each.per_second.get(OFFERED, 0), _speed(each.bytes_per_second.get(GRANTED, 0))
            yield "{:.1f} offers/s, {}".format(*rates)
        case ReportedDestination() as destination:
            yield f"{_phases(destination)} under way, {destination.num_reads} reads in flight"
            yield from (f"{way} {rate} loads/s, {speed}" for way, rate, speed, *_ in _way_rows([each]))


def _phases(destination: ReportedDestination) -> str:
    found = sorted(destination.phases.items())
    return ", ".join(f"{number} {phase}" for phase, number in found) or NOTHING


def _named(each: WatchedEngine) -> str:
    return f"{each.last.title} ({each.last.host}, process {each.last.pid})"


def _destinations(engines: Sequence[WatchedEngine]) -> BoardTable:
    columns = ("destination", "rank", "under way", "reads", "quarantined", "up")
    rows = []
    for each in engines:
        if isinstance(last := each.last, ReportedDestination):
            numbers = (_phases(last), str(last.num_reads), str(last.num_quarantined))
            rows.append((last.name, str(last.rank), *numbers, output.duration(last.up_seconds)))
    title = "Destinations: loads under way, reads in flight, quarantine"
    return _table(title, columns, ("destination", "under way"), rows)


def _ways(engines: Sequence[WatchedEngine]) -> BoardTable:
    columns = ("way", "loads/s", "bytes/s", "loads", "bytes")
    title = f"Rates by way, over {WINDOW_SECONDS:.0f} s; and all since the start"
    return _table(title, columns, columns[:1], _way_rows(engines))


def _way_rows(engines: Sequence[WatchedEngine]) -> Iterator[Cells]:
    """Summed over ranks; first what was read, then what failed."""
    per_second, num_loads = (
        _sum(each.per_second for each in engines),
        _sum(each.last.counts for each in engines),
    )
    speed = _sum(each.bytes_per_second for each in engines)
    num_bytes = _sum(each.last.byte_counts for each in engines)
    for name, number in sorted(num_loads.items(), key=lambda item: (not _is_read(item[0]), item)):
        rate, total = f"{per_second.get(name, 0):.1f}", f"{number:,.0f}"
        if _is_read(name):
            way = name.partition(" ")[2] or NO_WAY
            yield way, rate, _speed(speed.get(way, 0)), total, output.num_bytes(num_bytes.get(way, 0))
        else:
            yield f"failed: {name}", rate, NOTHING, total, NOTHING


def _is_read(name: str) -> bool:
    return name.partition(" ")[0] == READ


def _peers(engines: Sequence[WatchedEngine]) -> BoardTable:
    columns = ("source", "address", "state", "way", "ranks")
    rows = [
        (each.engine, each.address, each.state, each.way or NOTHING, str(ranks))
        for each, ranks in _by_source(engines).items()
    ]
    return _table("Peers: source engines, and how many ranks know them so", columns, columns[:4], rows)


def _by_source(engines: Iterable[WatchedEngine]) -> Counter[SeenSource]:
    """Source engines, and how many ranks see each of them the same."""
    return Counter(
        source
        for each in engines
        if isinstance(each.last, ReportedDestination) and not each.error
        for source in each.last.sources
    )


def _sources(engines: Sequence[WatchedEngine]) -> BoardTable:
    columns = ("source", "ranks", "offered", "read", "pinned", "offers/s", "bytes/s")
    rows = []
    for each in engines:
        if isinstance(last := each.last, ReportedSource):
            leases = (str(last.num_offered), str(last.num_being_read), output.num_bytes(last.pinned_bytes))
            rates = (f"{each.per_second.get(OFFERED, 0):.1f}", _speed(each.bytes_per_second.get(GRANTED, 0)))
            rows.append((last.name, last.ranks, *leases, *rates))
    return _table("Sources: leases offered and being read", columns, columns[:1], rows)


def _loads(engines: Sequence[WatchedEngine]) -> BoardTable:
    columns = ("request", "from", "phase", "rank", "for")
    found = sorted(
        (
            (load, each.last.rank)
            for each in engines
            if isinstance(each.last, ReportedDestination)
            for load in each.last.loads
        ),
        key=lambda pair: -pair[0].seconds,
    )
    rows = [
        (load.request_id, load.engine, load.phase, str(rank), f"{load.seconds:.1f} s") for load, rank in found
    ]
    return _table("Loads under way, oldest first", columns, columns[:3], rows)


def _leases(engines: Sequence[WatchedEngine]) -> BoardTable:
    columns = ("request", "tokens", "reader", "lease left")
    found = [lease for each in engines if isinstance(each.last, ReportedSource) for lease in each.last.leases]
    rows = [
        (each.request_id, f"{each.num_tokens:,}", each.reader or "nobody yet", _left(each.seconds_left))
        for each in sorted(found, key=lambda lease: (lease.seconds_left is None, lease.seconds_left or 0))
    ]
    return _table("Leases, those that end next first", columns, ("request", "reader"), rows)


def _left(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{seconds:.0f} s"


def _table(title: str, columns: Cells, text_columns: Cells, rows: Iterable[Cells]) -> BoardTable:
    return BoardTable(title, columns, frozenset(text_columns), tuple(rows))


def _cut(table: BoardTable, max_rows: int) -> BoardTable:
    num_more = max(0, len(table.rows) - max_rows)
    return BoardTable(table.title, table.columns, table.text_columns, table.rows[:max_rows], num_more)


def _speed(bytes_per_second: float) -> str:
    """Three digits are enough for what changes each second.

    >>> _speed(100_123.4), _speed(0)
    ('97.8 KiB/s', '0 B/s')
    """
    scale = 1024 ** max(0, int(math.log(max(1.0, bytes_per_second), 1024)))
    digits = 2 - int(math.log10(max(1.0, bytes_per_second / scale)))
    return f"{output.num_bytes(round(bytes_per_second / scale, max(0, digits)) * scale)}/s"


def _sum(all_counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: defaultdict[str, float] = defaultdict(float)
    for counts in all_counts:
        for name, number in counts.items():
            total[name] += number
    return total
