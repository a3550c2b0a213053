"""``kvferry status --watch``: look at engines again and again, until somebody has seen enough."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict
from types import FrameType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvferry.cli import output
from kvferry.cli.status.asking import EngineAsker
from kvferry.cli.status.board import Board, BoardTable, board, lines
from kvferry.cli.status.watched import Watched

ShowEngines = Callable[[Watched, float], None]
"""Shows what is known at a time, by the clock that measured it."""

MIN_ROWS = 3
NUM_TABLES = 6


def watch_engines(
    asker: EngineAsker,
    display: AbstractContextManager[ShowEngines],
    every: float,
    count: int | None,
) -> None:
    """Look each ``every`` seconds, ``count`` times or until Ctrl-C (or SIGTERM), which is no failure."""
    known = Watched()
    with suppress(KeyboardInterrupt), _ended_by_sigterm(), display as show:
        num_looks = 0
        while True:
            begun = time.monotonic()
            looks = asker.look()
            now = time.monotonic()
            known = known.then(now, looks)
            show(known, now)
            num_looks += 1
            if num_looks == count:
                return
            time.sleep(max(0.0, begun + every - time.monotonic()))


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """A terminal is left as it was found, whoever ends the watch."""

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def display_for(*, as_json: bool, every: float) -> AbstractContextManager[ShowEngines]:
    """Tables on a terminal, else a line for each engine and look, or an object for each look."""
    out = output.console()
    if as_json:
        return _each(_print_object)
    return on_terminal(out, every) if out.is_terminal else _each(_print_lines)


@contextmanager
def _each(show: ShowEngines) -> Iterator[ShowEngines]:
    yield show


def _print_object(known: Watched, now: float) -> None:
    print(json.dumps(as_object(known, now), ensure_ascii=False), flush=True)


def _print_lines(known: Watched, now: float) -> None:
    clock = time.strftime("%H:%M:%S")
    for line in lines(known, now):
        print(f"{clock} {line}", flush=True)


def as_object(known: Watched, now: float) -> dict[str, Any]:
    """What is known, for programs."""
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
    return {"at": round(time.time(), 3), "engines": engines, "unanswered": dict(known.unanswered)}


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
    """A board as Rich draws it."""
    head = f" · {when} · Ctrl-C ends"
    parts: list[RenderableType] = [Text.assemble(("kvferry status", "bold"), head), Text(shown.summary)]
    for warning in shown.warnings:
        word, _, rest = warning.partition("  ")
        parts.append(Text.assemble((word, output.STYLES.get(word, "bold red")), f"  {rest}"))
    for each in shown.tables:
        parts += [Text(), Text(each.title, "bold"), _drawn(each)]
        if each.num_more:
            parts.append(Text(f"… and {each.num_more} more", "dim"))
    return Group(*parts)


def _drawn(shown: BoardTable) -> Table:
    table = output.table()
    for column in shown.columns:
        is_text = column in shown.text_columns
        table.add_column(
            column, justify="left" if is_text else "right", no_wrap=not is_text, overflow="ellipsis"
        )
    for row in shown.rows:
        table.add_row(*row)
    return table
