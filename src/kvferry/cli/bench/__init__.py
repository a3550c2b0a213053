"""``kvferry bench``: every way to move the same bytes between two processes, side by side in one run."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvferry.cli.options import examples
from kvferry.errors import SpecError

HELP = "\n\n".join(
    (
        "Time every way to move the same bytes between two processes, side by side, and check every cell.",
        "A source process holds memory, a reader process reads blocks of it into its own. All rivals share"
        " the two processes, the memory and the minutes: in each turn every one of them reads once. Medians"
        " are compared, and only within one run. After the last turn of each case every cell that a rival"
        " wrote is compared with what the block ids say; one wrong cell fails the command.",
        "\n".join(
            (
                "\b",
                "Rivals (--only NAME, as often as you like):",
                "  direct  kvferry's transport over NIXL: list made, posted, ended",
                "  mapped  kvferry's copy kernel over the source's device memory",
                "  packed  the source gathers and sends over TCP, kvferry scatters",
                "  fetch   kvferry's whole fetch, by the best way, ticket held",
                "  copy    a plain copy of as many bytes within the reader",
            )
        ),
        "Cases: runs of 256 B to 1 MiB, 64 to 16,384 of them in 16 layers, with the blocks scattered, half"
        " of them consecutive, or all. Media: host memory over CMA (KVFERRY_EXPOSE=fabric on both sides, so"
        " NIXL takes part), host memory over TCP (the default of kvferry), and the first GPU if there is"
        " one. Media that need NIXL are left out where it is not installed."
        " Neighbouring blocks are merged into longer runs, as in a request. It takes some minutes; --quick"
        " takes some seconds and shows that it works.",
        examples(
            "kvferry bench --quick",
            "kvferry bench --json bench.json",
            "kvferry bench --memory cuda:0",
            "kvferry bench --memory host --over tcp --run-bytes 16384 --only packed",
            "kvferry doctor --save here.json && kvferry bench --link here.json",
        ),
        "Exit codes: 0 all cells right; 1 a cell is wrong (the first is named), or a read failed; 2 bad"
        " usage, with nothing run and nothing written.",
    )
)

TURNS, QUICK_TURNS = 7, 3


class Fabric(StrEnum):
    """What carries bytes of host memory."""

    CMA = "cma"
    TCP = "tcp"


def bench(
    quick: Annotated[bool, typer.Option("--quick", help="One length of runs, few turns.")] = False,
    memory: Annotated[
        list[str] | None,
        typer.Option(metavar="host|cuda:N", help="Where the memory is.", show_default="all there is"),
    ] = None,
    over: Annotated[
        list[Fabric] | None,
        typer.Option(metavar="cma|tcp", help="What carries host memory.", show_default="both; quick: cma"),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="RIVAL", help="Who takes part.", show_default="everybody")
    ] = None,
    run_bytes: Annotated[
        list[int] | None, typer.Option(metavar="N", help="Bytes of a run.", show_default="256 to 1 MiB")
    ] = None,
    runs: Annotated[
        list[int] | None, typer.Option(metavar="N", help="Runs of a case.", show_default="64, 1024, 16384")
    ] = None,
    turns: Annotated[
        int | None, typer.Option(min=3, metavar="N", help="Turns of a case.", show_default="7; quick: 3")
    ] = None,
    link: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Beside each time of ours, what this profile predicts."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all figures to a file.")
    ] = None,
) -> None:
    """Time every way to move the same bytes, side by side."""
    from kvferry.cli.bench import cases as grid
    from kvferry.cli.bench.measure import asked_media, asked_rivals, measure, new_report, no_nixl
    from kvferry.cli.bench.report import BenchVerdict, show
    from kvferry.cli.link_profile import measured_costs
    from kvferry.cli.output import progress

    if json_file and not json_file.parent.is_dir():
        raise SpecError(f"--json {json_file}: there is no folder {json_file.parent}")
    report = new_report(measured_costs(link) if link else {})
    fabrics = over or ([Fabric.TCP if no_nixl() else Fabric.CMA] if quick else list(Fabric))
    media = asked_media(memory or [], [fabric.value for fabric in fabrics], report)
    rivals = {medium: asked_rivals(medium, only or [], report) for medium in media}
    lengths = run_bytes or (grid.QUICK_RUN_BYTES if quick else grid.RUN_BYTES)
    numbers = runs or (grid.QUICK_NUM_RUNS if quick else grid.NUM_RUNS)
    orders = list(grid.BlockOrder)
    cases = {medium: list(grid.grid(lengths, numbers, orders, medium.max_bytes)) for medium in media}
    num_turns = turns or (QUICK_TURNS if quick else TURNS)
    num_steps = sum(len(some) for shapes in cases.values() for some in shapes)
    with progress(num_steps, "measuring", visible=True) as step:
        for medium in media:
            measure(medium, cases[medium], rivals[medium], num_turns, report, step)
    show(report)
    if json_file:
        json_file.write_text(json.dumps(report.as_object(), indent=1) + "\n", encoding="utf-8")
    if report.verdict is not BenchVerdict.RIGHT:
        raise typer.Exit(1)
