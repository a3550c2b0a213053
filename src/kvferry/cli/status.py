"""``kvferry status``: what running engines are doing now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvferry.cli.options import Json, examples

HELP = "\n\n".join(
    (
        "Show running engines: peers, loads, leases, counters.",
        "Without an argument: all engines of this user on this host (or in this container). FILE is the"
        " socket of one of them. ADDRESS (tcp://HOST:PORT) is a source engine on any host; the secret"
        " comes from KVFERRY_SECRET_FILE.",
        "The command is read-only, and answers contain no keys or tickets.",
        examples(
            "kvferry status",
            "watch kvferry status",
            "kvferry status tcp://10.0.0.7:5555",
            "kvferry status --json",
        ),
        "Exit codes: 0 shown; 1 no engine found; 2 bad usage, or no answer.",
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
    as_json: Json = False,
) -> int:
    """Show running engines."""
    from kvferry.cli.status_page import answers_of, show

    answers = answers_of(engine, secret_file)
    if as_json:
        print(json.dumps({"engines": answers}, ensure_ascii=False))
    else:
        show(answers)
    return 0 if answers else NOT_FOUND
