"""What a person is shown of many engines at once: a few small tables, in a terminal or on a page. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from kvferry.cli import output
from kvferry.cli.status.reported import (
    ENDED,
    GRANTED,
    OFFERED,
    READ,
    WINDOW_SECONDS,
    ReportedDestination,
    ReportedEngine,
    ReportedSource,
    SeenSource,
    Watched,
    WatchedEngine,
)
from kvferry.core.words import counted
from kvferry.runtime.figures import NO_WAY

Cells = tuple[str, ...]
E = TypeVar("E", bound=ReportedEngine)
Destinations = Sequence[tuple[WatchedEngine, ReportedDestination]]
Sources = Sequence[tuple[WatchedEngine, ReportedSource]]

NOTHING = "–"


@dataclass(frozen=True, slots=True)
class BoardTable:
    title: str
    columns: Cells
    text_columns: Cells
    """The others are numbers."""
    rows: Sequence[Cells]
    num_more: int = 0
    """Rows that are left out."""


@dataclass(frozen=True, slots=True)
class Board:
    summary: str
    warnings: tuple[str, ...]
    """What an operator should look at, worst first."""
    tables: tuple[BoardTable, ...]


def board(watched: Watched, now: float, max_rows: int) -> Board:
    destinations, sources = _answering(watched, ReportedDestination), _answering(watched, ReportedSource)
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
        tuple(
            replace(each, rows=tuple(each.rows[:max_rows]), num_more=max(0, len(each.rows) - max_rows))
            for each in tables
            if each.rows
        ),
    )


def _answering(watched: Watched, side: type[E]) -> list[tuple[WatchedEngine, E]]:
    engines = (each for each in watched.engines.values() if not each.error)
    return [(each, each.last) for each in engines if isinstance(each.last, side)]


def warnings(watched: Watched, now: float) -> Iterator[str]:
    """What an operator should look at, worst first."""
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
    for source, ranks in _by_source(_answering(watched, ReportedDestination)).items():
        if source.why:
            word = "NOTE" if source.state == "met" else source.state.upper()
            yield f"{word}  source {source.engine}, for {counted(ranks, 'rank')}: {source.why}"
    if not engines and not watched.unanswered:
        yield "NOBODY  no engine of this user runs here; one that starts will appear"


def lines(watched: Watched, now: float) -> Iterator[str]:
    """The same as a line for each engine, after the warnings."""
    yield from warnings(watched, now)
    for rank, destination in _answering(watched, ReportedDestination):
        rates = (f"; {way} {rate} loads/s, {speed}" for way, rate, speed, *_ in _way_rows([rank]))
        under_way = f"{_phases(destination)} under way, {destination.num_reads} reads in flight"
        yield f"{destination.title}: {under_way}{''.join(rates)}"
    for engine, source in _answering(watched, ReportedSource):
        _, _, offered, being_read, pinned, offers, speed = _source_row(engine, source)
        leases = f"{offered} offered, {being_read} being read, {pinned} pinned"
        yield f"{source.title}: {leases}; {offers} offers/s, {speed}"


def _named(each: WatchedEngine) -> str:
    return f"{each.last.title} ({each.last.host}, process {each.last.pid})"


def _destinations(engines: Destinations) -> BoardTable:
    columns = ("destination", "rank", "under way", "reads", "quarantined", "up")
    title = "Destinations: loads under way, reads in flight, quarantine"
    return BoardTable(title, columns, ("destination", "under way"), [_rank_row(last) for _, last in engines])


def _rank_row(last: ReportedDestination) -> Cells:
    numbers = (str(last.num_reads), str(last.num_quarantined), output.duration(last.up_seconds))
    return last.name, str(last.rank), _phases(last), *numbers


def _phases(last: ReportedDestination) -> str:
    return ", ".join(f"{number} {phase}" for phase, number in sorted(last.phases.items())) or NOTHING


def _ways(engines: Destinations) -> BoardTable:
    columns = ("way", "loads/s", "bytes/s", "loads", "bytes")
    title = f"Rates by way, over {WINDOW_SECONDS:.0f} s; and all since the start"
    return BoardTable(title, columns, columns[:1], [*_way_rows([each for each, _ in engines])])


def _way_rows(engines: Sequence[WatchedEngine]) -> Iterator[Cells]:
    """Summed over ranks; first what was read, then what failed."""
    num_loads, per_second = _sum(e.last.counts for e in engines), _sum(e.per_second for e in engines)
    num_bytes, speed = _sum(e.last.byte_counts for e in engines), _sum(e.bytes_per_second for e in engines)
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


def _peers(engines: Destinations) -> BoardTable:
    columns = ("source", "address", "state", "way", "ranks")
    rows = [
        (each.engine, each.address, each.state, each.way or NOTHING, str(ranks))
        for each, ranks in _by_source(engines).items()
    ]
    return BoardTable("Peers: source engines, and how many ranks know them so", columns, columns[:4], rows)


def _by_source(engines: Destinations) -> Counter[SeenSource]:
    """Source engines, and how many ranks see each of them the same."""
    return Counter(source for _, last in engines for source in last.sources)


def _sources(engines: Sources) -> BoardTable:
    columns = ("source", "ranks", "offered", "read", "pinned", "offers/s", "bytes/s")
    rows = [_source_row(each, last) for each, last in engines]
    return BoardTable("Sources: leases offered and being read", columns, columns[:1], rows)


def _source_row(each: WatchedEngine, last: ReportedSource) -> Cells:
    leases = (str(last.num_offered), str(last.num_being_read), output.num_bytes(last.pinned_bytes))
    rates = (f"{each.per_second.get(OFFERED, 0):.1f}", _speed(each.bytes_per_second.get(GRANTED, 0)))
    return last.name, last.ranks, *leases, *rates


def _loads(engines: Destinations) -> BoardTable:
    columns = ("request", "from", "phase", "rank", "for")
    found = [(load, last.rank) for _, last in engines for load in last.loads]
    found.sort(key=lambda each: -each[0].seconds)
    rows = [(one.request_id, one.engine, one.phase, str(rank), f"{one.seconds:.1f} s") for one, rank in found]
    return BoardTable("Loads under way, oldest first", columns, columns[:3], rows)


def _leases(engines: Sources) -> BoardTable:
    columns = ("request", "tokens", "reader", "lease left")
    found = [lease for _, last in engines for lease in last.leases]
    found.sort(key=lambda lease: math.inf if lease.seconds_left is None else lease.seconds_left)
    rows = [
        (
            each.request_id,
            f"{each.num_tokens:,}",
            each.reader or "nobody yet",
            seconds_left(each.seconds_left),
        )
        for each in found
    ]
    return BoardTable("Leases, those that end next first", columns, ("request", "reader"), rows)


def seconds_left(seconds: float | None) -> str:
    """Of a lease; None: it has no end."""
    return NOTHING if seconds is None else f"{seconds:.0f} s"


def _speed(bytes_per_second: float) -> str:
    """Three digits are enough for what changes each second.

    >>> _speed(100_123.4), _speed(0)
    ('97.8 KiB/s', '0 B/s')
    """
    scale = 1024 ** max(0, int(math.log(max(1.0, bytes_per_second), 1024)))
    digits = 2 - int(math.log10(max(1.0, bytes_per_second / scale)))
    return f"{output.num_bytes(round(bytes_per_second / scale, max(0, digits)) * scale)}/s"
