"""``kvferry status``: what running engines are doing now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvferry.cli.help_text import examples
from kvferry.cli.options import Json

HELP = "\n\n".join(
    (
        "Show what running engines are doing: source engines and how they are read, loads, leases, counts.",
        "Without an argument: every engine of this user on this host (in a container: inside it). A file is"
        " the socket of one of them. An address (tcp://HOST:PORT) is that of a source engine, anywhere: the"
        " secret is taken from KVFERRY_SECRET_FILE, as engines do.",
        "--watch looks again and again until Ctrl-C: peers, loads under way, rates by way, leases,"
        " quarantine. Engines may come and go meanwhile. Where the output is no terminal: a line for each"
        " engine and look; with --json: an object for each look.",
        "It only asks: no engine does anything else because of it, and no answer has keys or tickets in it.",
        examples(
            "kvferry status",
            "kvferry status --watch",
            "kvferry status tcp://10.0.0.7:5555",
            "kvferry status --json",
        ),
        "Exit codes: 0 shown, or watched until Ctrl-C; 1 no engine was found; 2 bad usage, or an engine that"
        " does not answer.",
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
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again and again, until Ctrl-C.")] = False,
    every: Annotated[
        float, typer.Option(min=0.1, metavar="S", help="Seconds from one look to the next.")
    ] = 1.0,
    count: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="End after N looks.", show_default="go on")
    ] = None,
    as_json: Json = False,
) -> int:
    """What running engines are doing now."""
    from kvferry.cli.status.asking import EngineAsker, answers_of, secret_for

    secret = secret_for(engine, secret_file)
    if watch:
        from kvferry.cli.status.printing import display_for, watch_engines

        watch_engines(EngineAsker(engine, secret), display_for(as_json=as_json, every=every), every, count)
        return 0
    answers = answers_of(engine, secret)
    if as_json:
        print(json.dumps({"engines": answers}, ensure_ascii=False))
    else:
        from kvferry.cli import output
        from kvferry.cli.status.printing import show

        out = output.console()
        for answer in answers:
            show(out, answer)
        if not answers:
            out.print("no engine of this user runs here; name its socket, or a source engine's address")
    return 0 if answers else NOT_FOUND
