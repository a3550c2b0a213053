"""``kvferry runs``: the byte runs of one request."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvferry.cli.options import Json, examples
from kvferry.core.choices import MAX_RUNS_PER_BLOCK

if TYPE_CHECKING:
    from kvferry.core.plan import Plan
    from kvferry.core.request import Request
    from kvferry.core.select import Selection, Slack

HELP = "\n\n".join(
    (
        "Print the byte runs of one request: copying them transfers its cache.",
        "The request is a JSON file: block tables of both sides by group, and the token intervals that each"
        " destination group needs (docs/manifest.md has the format).",
        examples(
            "kvferry runs src.json dst.json --dst-rank 0 --request request.json",
            "kvferry runs src.json dst.json --dst-rank 0 --request request.json --json",
        ),
        "Exit codes: 0 proved and printed; 1 refused; 2 bad usage or input.",
    )
)

COLUMNS = ("src", "src region", "src offset", "dst region", "dst offset", "bytes")
ZERO = "zero"
"""In place of the source rank, for bytes to be zeroed."""


def runs(
    src: Annotated[Path, typer.Argument(metavar="SRC.json", help="The source's manifest.")],
    dst: Annotated[Path, typer.Argument(metavar="DST.json", help="The destination's manifest.")],
    dst_rank: Annotated[int, typer.Option(min=0, metavar="R", help="The destination rank.")],
    request: Annotated[Path, typer.Option(metavar="REQUEST.json", help="Block tables and needs.")],
    max_runs_per_block: Annotated[
        int, typer.Option(min=1, metavar="N", help="Refuse a state with more runs per block.")
    ] = MAX_RUNS_PER_BLOCK,
    as_json: Json = False,
) -> None:
    """List the byte runs of one request."""
    import kvferry
    from kvferry.cli.asked import asked_ranks
    from kvferry.cli.engines import manifest_of
    from kvferry.cli.options import at

    source, destination = manifest_of(src), manifest_of(dst)
    asked_ranks(destination, dst_rank)
    asked, slack = _request_file(request)
    plan = kvferry.plan(source, destination, dst_rank)
    route = kvferry.lower(kvferry.prove(plan), max_runs_per_block=max_runs_per_block)
    with at(str(request)):
        selection = kvferry.select(route, asked, slack=slack)
    if as_json:
        from kvferry.wire.request import selection_to_json

        sys.stdout.write(selection_to_json(plan, selection).decode())
    else:
        _show(plan, selection)


def _request_file(path: Path) -> tuple[Request, Slack]:
    from kvferry.cli.options import at
    from kvferry.wire.request import request_from_json

    with at(str(path)):
        return request_from_json(path.read_bytes())


def _show(plan: Plan, selection: Selection) -> None:
    """Plain columns that are never cut, whatever the terminal."""
    from kvferry.cli.output import plain

    rows = [COLUMNS, *_rows(plan, selection)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<" if "region" in column else ">" for column in COLUMNS]
    line = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    for row in rows:
        print(plain(line.format(*row)))
    totals = f"{selection.num_runs} runs, {selection.total_bytes} bytes"
    print(f"{totals}; {len(selection.zeros)} to zero, {selection.zeros.total_bytes} bytes")


def _rows(plan: Plan, selection: Selection) -> Iterator[tuple[str, ...]]:
    dst_names = [region.name for region in plan.dst.rank(plan.dst_rank).regions]
    for src_rank, some in selection.reads.items():
        src_names = [region.name for region in plan.src.rank(src_rank).regions]
        for src_region, src_offset, dst_region, dst_offset, size in some:
            source = (str(src_rank), src_names[src_region], str(src_offset))
            yield (*source, dst_names[dst_region], str(dst_offset), str(size))
    for _, _, dst_region, dst_offset, size in selection.zeros:
        yield (ZERO, "", "", dst_names[dst_region], str(dst_offset), str(size))
