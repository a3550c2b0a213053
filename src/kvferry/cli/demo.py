"""``kvferry demo``: move real bytes between made-up engines, and check every cell by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from kvferry.cli.options import Json, Model
from kvferry.cli.words import examples, topology_help

if TYPE_CHECKING:
    from kvferry.cli.trip import Trip
    from kvferry.core.manifest import Manifest

HELP = "\n\n".join(
    (
        "Move real bytes between engines of different shape, in memory, and check every cell by name.",
        "Without options: three models with their true dimensions and a few of their layers (KDA and MLA on"
        " shared tensors, MLA with an indexer, GQA), each at two unequal topologies. Every item of every"
        " state holds bytes of its own; they are moved by the runs of proved plans for all destination ranks,"
        " and read back through the destination's views. Nothing outside this process is touched.",
        topology_help(),
        examples(
            "kvferry demo",
            "kvferry demo --model qwen3-next-80b --src tp=2 --dst tp=4,conv=DS",
            "kvferry demo --model gpt-oss-20b --tokens 3000 --layers 6",
        ),
        "Exit codes: 0 all cells right; 1 a cell is wrong (the first is named), or refused; 2 bad usage.",
    )
)


@dataclass(frozen=True, slots=True)
class Case:
    """One pair of engines to demonstrate."""

    model: str
    num_layers: int
    src: str
    dst: str


CASES = (
    Case("kimi-linear-48b", 4, "tp=4,block=256", "tp=8,block=96,layout=cross-layer"),
    Case("deepseek-v3.2", 4, "tp=3,block=64", "tp=5,block=128,layout=cross-layer"),
    Case("llama-3.1-70b", 4, "tp=4,block=16,layout=HND", "tp=6,block=24,layout=NHD"),
)
"""What is shown where nothing else is asked for."""

MAX_MEMORY = 4 << 30
"""Bytes that the two engines may take together."""
DEFAULT_SRC, DEFAULT_DST = "tp=2", "tp=4,layout=NHD"


def demo(
    model: Model = "",
    src: Annotated[str | None, typer.Option(metavar="TOPOLOGY", help="The source engine.")] = None,
    dst: Annotated[str | None, typer.Option(metavar="TOPOLOGY", help="The destination engine.")] = None,
    requests: Annotated[int, typer.Option(min=1, metavar="N", help="Requests per model.")] = 3,
    tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of the longest request.")] = 600,
    layers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="About how many layers.", show_default="4")
    ] = None,
    as_json: Json = False,
) -> None:
    """Move real bytes in memory and check every cell by name."""
    from kvferry.cli import show
    from kvferry.errors import SpecError

    if model:
        cases: tuple[Case, ...] = (Case(model, layers or 4, src or DEFAULT_SRC, dst or DEFAULT_DST),)
    elif src or dst or layers:
        raise SpecError("--src, --dst and --layers belong to a --model: name one of `kvferry models`")
    else:
        cases = CASES
    out = show.console()
    with _progress(len(cases) * requests, visible=out.is_terminal and not as_json) as step:
        trips = [_trip(case, requests, tokens, step) for case in cases]
    if as_json:
        print(json.dumps(as_object(trips), ensure_ascii=False))
    else:
        _show(trips)
    if any(trip.num_wrong for trip in trips):
        raise typer.Exit(1)


def _trip(case: Case, num_requests: int, num_tokens: int, step: Callable[[], None]) -> Trip:
    from kvferry.cli.trip import Trip, some_requests, travel

    src, dst = _engine(case, "src", case.src, num_tokens), _engine(case, "dst", case.dst, num_tokens)
    _check_memory(src, dst)
    trip = Trip(case.model, case.src, case.dst)
    travel(trip, src, dst, list(some_requests(src, dst, num_requests, num_tokens)), step)
    return trip


def _check_memory(*manifests: Manifest) -> None:
    from kvferry.cli.show import num_bytes
    from kvferry.errors import SpecError

    total = sum(region.num_bytes for each in manifests for rank in each.ranks for region in rank.regions)
    if total > MAX_MEMORY:
        raise SpecError(
            f"the two engines would take {num_bytes(total)} of memory, more than {num_bytes(MAX_MEMORY)}:"
            " fewer --tokens, --layers or ranks take less"
        )


def _engine(case: Case, name: str, topology: str, num_tokens: int) -> Manifest:
    from kvferry.cli.ending import at
    from kvferry.cli.sides import a_model, snug
    from kvferry.cli.trip import shortened

    model = shortened(a_model(case.model, None), case.num_layers)
    with at(f"--{name} {topology}"):
        return snug(model, topology, name, num_tokens)


@contextmanager
def _progress(num_steps: int, *, visible: bool) -> Iterator[Callable[[], None]]:
    """A bar over the requests, on a terminal only; gives the function that moves it on."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("moving and checking"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, transient=True, disable=not visible) as bar:
        task = bar.add_task("", total=num_steps)
        yield lambda: bar.advance(task)


def as_object(trips: list[Trip]) -> object:
    """The whole account as plain data."""
    num_wrong = sum(trip.num_wrong for trip in trips)
    return {
        "verdict": "wrong" if num_wrong else "verified",
        "num_cells": sum(trip.num_cells for trip in trips),
        "num_wrong": num_wrong,
        "num_requests": sum(trip.num_requests for trip in trips),
        "first_wrong": next((trip.first_wrong for trip in trips if trip.first_wrong), ""),
        "trips": [asdict(trip) for trip in trips],
    }


def _show(trips: list[Trip]) -> None:
    from kvferry.cli.show import console, labelled, milliseconds, num_bytes, put, table, verdict, wrapped

    out = console()
    labelled(out, [(trip.model, f"{trip.src} → {trip.dst}") for trip in trips])
    out.print()
    columns = ("model", "bytes", "runs", "average run", "copy", "plan", "select")
    rows = table(*columns, left=["model"])
    for trip in trips:
        rows.add_row(
            trip.model,
            num_bytes(trip.total_bytes),
            f"{trip.num_runs:,}",
            num_bytes(trip.total_bytes / max(1, trip.num_runs)),
            f"{trip.gigabytes_per_second:.1f} GB/s",
            milliseconds(trip.plan_ms),
            milliseconds(trip.select_ms),
        )
    put(out, rows)
    cells, wrong = sum(trip.num_cells for trip in trips), sum(trip.num_wrong for trip in trips)
    requests = sum(trip.num_requests for trip in trips)
    summary = f"{cells:,} cells of {requests} requests, {wrong} wrong"
    if not wrong:
        out.print(f"verified: {summary}", style="bold green")
        return
    verdict(out, "WRONG", summary)
    wrapped(out, (f"first: {trip.first_wrong}" for trip in trips if trip.first_wrong))
