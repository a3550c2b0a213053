"""``kvferry status``: the state of running engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvferry.cli.options import Json, examples
from kvferry.errors import SpecError

HELP = "\n\n".join(
    (
        "Show running engines: peers, loads, leases, counters.",
        "Without an argument: all engines of this user on this host (or in this container). FILE is the"
        " socket of one of them. ADDRESS (tcp://HOST:PORT) is a source engine on any host; the secret"
        " comes from KVFERRY_SECRET_FILE.",
        "--watch refreshes until Ctrl-C: peers, loads, rates by transfer mode, leases, quarantine. Without"
        " a terminal it prints one line per engine and refresh; with --json one object per refresh.",
        "The command is read-only, and answers contain no keys or tickets.",
        examples(
            "kvferry status",
            "kvferry status --watch",
            "kvferry status tcp://10.0.0.7:5555",
            "kvferry status --json",
        ),
        "Exit codes: 0 shown, or watched until Ctrl-C; 1 no engine found; 2 bad usage, or none answered.",
    )
)

NOT_FOUND, NO_ANSWER = 1, 2
EVERY, MIN_EVERY, MAX_EVERY = 1.0, 0.1, 86400.0


def status(
    engine: Annotated[
        str, typer.Argument(metavar="[FILE|ADDRESS]", help="One engine.", show_default="all of this user")
    ] = "",
    secret_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The fleet's secret.", show_default="KVFERRY_SECRET_FILE"),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(metavar="S", help="Seconds between two refreshes.")] = EVERY,
    count: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="End after N refreshes.", show_default="go on")
    ] = None,
    as_json: Json = False,
) -> int:
    """Show running engines."""
    from kvferry.cli.status.asking import EngineAsker, answers_of, secret_for

    secret = secret_for(engine, secret_file)
    if not watch and (every, count) != (EVERY, None):
        raise SpecError("--every and --count need --watch")
    if not MIN_EVERY <= every <= MAX_EVERY:
        raise SpecError(f"--every {every:g}: must be {MIN_EVERY:g} to {MAX_EVERY:g} seconds")
    if watch:
        from kvferry.cli.status.shown import display_for, watch_engines

        watch_engines(EngineAsker(engine, secret), display_for(as_json=as_json, every=every), every, count)
        return 0
    answers = answers_of(engine, secret, is_raw=as_json)
    if as_json:
        print(json.dumps({"engines": answers}, ensure_ascii=False))
    else:
        from kvferry.cli import output
        from kvferry.cli.status.shown import show

        out = output.console()
        for answer in answers:
            show(out, answer)
        if not answers:
            out.print("no running engine of this user on this host; pass a socket or a source's address")
    if not answers:
        return NOT_FOUND
    return NO_ANSWER if all("error" in answer for answer in answers) else 0
