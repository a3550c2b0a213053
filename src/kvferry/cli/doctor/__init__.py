"""``kvferry doctor``: check and measure this host, or the link between two hosts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvferry.cli import options
from kvferry.cli.options import examples
from kvferry.errors import SpecError

HELP = "\n\n".join(
    (
        "Check whether this host is ready for transfers, measure it, and suggest fixes.",
        "Checks versions, drivers, limits, settings and the secret. Then one process reads host memory, and"
        " memory of the first GPU if there is one, from another process. The report has the transfer mode,"
        " the speed against a plain copy and the time per short run; every cell is verified. Each finding"
        " has an observation, its effect and a remedy. Takes a few seconds.",
        "Run it in the environment of the engine: the same container, user and variables.",
        "\n".join(
            (
                "\b",
                "Between two hosts, with the same secret on both:",
                "  on one    kvferry doctor --listen 10.0.0.7:7777",
                "  on other  kvferry doctor --peer 10.0.0.7:7777",
                "The side with --peer reads, as a decode engine does.",
            )
        ),
        examples(
            "kvferry doctor",
            "kvferry doctor --json > doctor.json",
            "kvferry doctor --save here.json",
            "kvferry plan --model qwen3-32b --src tp=8 --dst tp=4 --link here.json",
            "KVFERRY_SECRET_FILE=/run/secrets/kvferry kvferry doctor --peer 10.0.0.7:7777",
        ),
        "Exit codes: 0 no problem found; 1 at least one problem found; 2 bad usage or input.",
    )
)


def doctor(
    memory: Annotated[
        list[str] | None,
        typer.Option(
            metavar="host|cuda:N",
            help="Memory to read.",
            show_default="host, and cuda:0 if available",
        ),
    ] = None,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Serve memory to the doctor of another host, until Ctrl-C.",
            show_default=False,
        ),
    ] = "",
    peer: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Read from the doctor that listens at this address.", show_default=False
        ),
    ] = "",
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json", help="Write a profile for `kvferry plan --link`.", show_default=False
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Check whether this host is ready for transfers."""
    from kvferry.cli.doctor.checks import diagnose
    from kvferry.cli.doctor.examine import examine
    from kvferry.cli.doctor.peer import serve
    from kvferry.cli.doctor.report import busy_words, is_ready, profile_document, report_object, show
    from kvferry.cli.machine import asked_memories

    if listen and (peer or save or as_json):
        raise SpecError("--listen only serves memory: give --peer, --save and --json to the other doctor")
    options.check_output("--save", save, ".json")
    memories = asked_memories(memory or ())
    if listen:
        serve(listen, memories, _say)
        return
    observed = examine(memories, peer, _progress)
    found = diagnose(observed)
    if as_json:
        print(json.dumps(report_object(observed, found), ensure_ascii=False))
    else:
        show(observed, found)
    if save and (document := profile_document(observed)):
        options.write_output(save, json.dumps(document, indent=1).encode() + b"\n")
        if busy := busy_words(observed):
            _say(f"{busy}: the times in {save} may be too long. Measure again on an idle machine")
    elif save:
        _say(f"no read succeeded; {save} is not written")
    if not is_ready(found):
        raise typer.Exit(1)


def _say(text: str) -> None:
    print(f"kvferry doctor: {text}", file=sys.stderr, flush=True)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        _say(text)
