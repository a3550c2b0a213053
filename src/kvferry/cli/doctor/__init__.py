"""``kvferry doctor``: is this machine, or the way between two of them, ready to move caches?"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kvferry.cli import options
from kvferry.cli.options import examples
from kvferry.errors import SpecError

HELP = "\n\n".join(
    (
        "Find out whether this machine is ready to move caches, how fast it is, and what to change.",
        "Looks at versions, drivers, limits, settings and the secret. Then two processes are started, and"
        " one really reads the other's memory, of the host and of the first GPU if there is one: by which"
        " way, carried by what, how fast against a plain copy, and how long each of many short runs takes."
        " Every cell is checked. Each finding says what was seen, why it matters, and what to do. It takes"
        " some seconds.",
        "Run it in the environment of the engine: the same container, user and variables. What engines do"
        " is decided by these.",
        "\n".join(
            (
                "\b",
                "Between two hosts, with the same secret on both:",
                "  on one    kvferry doctor --listen 10.0.0.7:7777",
                "  on other  kvferry doctor --peer 10.0.0.7:7777",
                "The one with --peer reads, as a decoding engine would.",
            )
        ),
        examples(
            "kvferry doctor",
            "kvferry doctor --json > doctor.json",
            "kvferry doctor --save here.json",
            "kvferry plan --model qwen3-32b --src tp=8 --dst tp=4 --link here.json",
            "kvferry doctor --profile here.json",
            "KVFERRY_SECRET_FILE=/run/secrets/kvferry kvferry doctor --peer 10.0.0.7:7777",
        ),
        "Exit codes: 0 nothing found that stops work; 1 a finding of the level problem; 2 bad usage or"
        " input.",
    )
)


def doctor(
    memory: Annotated[
        list[str] | None,
        typer.Option(
            metavar="host|cuda:N",
            help="Which memory to read.",
            show_default="host, and cuda:0 if it is there",
        ),
    ] = None,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Serve memory to a doctor elsewhere, until Ctrl-C.", show_default=False
        ),
    ] = "",
    peer: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="Read from a doctor that listens there.", show_default=False),
    ] = "",
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json", help="Write a profile for `kvferry plan --link`.", show_default=False
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Is a profile of before still true?", show_default=False),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Is this machine ready to move caches? What to change?"""
    from kvferry.cli.doctor.checks import diagnose
    from kvferry.cli.doctor.examine import asked_memories, examine, serve
    from kvferry.cli.doctor.report import compared_profile, is_ready, profile_document, report_object, show

    if listen and (peer or save or profile or as_json):
        raise SpecError(
            "--listen serves, and finds nothing out: give the other options to the doctor with --peer"
        )
    for path in (save, profile):
        _check_file(path)
    memories = asked_memories(memory or ())
    if listen:
        serve(listen, memories, _say)
        return
    observed = examine(memories, peer, _progress)
    if profile:
        observed = replace(observed, profile=compared_profile(profile, observed))
    found = diagnose(observed)
    if as_json:
        print(json.dumps(report_object(observed, found), ensure_ascii=False))
    else:
        show(observed, found)
    if save and (document := profile_document(observed)):
        save.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    elif save:
        _say(f"no read came to a good end, so {save} is not written")
    if not is_ready(found):
        raise typer.Exit(1)


def _check_file(path: Path | None) -> None:
    """Before any work: a profile is a JSON file, in a folder that is there."""
    if path is None:
        return
    if path.suffix != ".json":
        raise SpecError(f"{path}: a profile's name ends in .json")
    if not path.absolute().parent.is_dir():
        raise SpecError(f"{path}: there is no folder {path.parent}")


def _say(text: str) -> None:
    print(f"kvferry doctor: {text}", file=sys.stderr, flush=True)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        _say(text)
