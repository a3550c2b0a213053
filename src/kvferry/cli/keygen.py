"""``kvferry keygen``: a secret for engines that talk to each other across hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvferry.cli.options import examples

HELP = "\n\n".join(
    (
        "Create a 256-bit secret: only engines that share it can connect to each other.",
        "Give every engine the same file (KVFERRY_SECRET_FILE), readable by its user only. The secret"
        " gives read and write access to every cache of the fleet.",
        examples("kvferry keygen -o /run/secrets/kvferry", "kvferry keygen"),
        "Exit codes: 0 created; 2 bad usage, or the file exists.",
    )
)


def keygen(
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="A new file, mode 0600.", show_default="standard output"
        ),
    ] = None,
) -> None:
    """Create a secret for engines on several hosts."""
    import os
    import secrets

    from kvferry.cli.options import at

    text = secrets.token_urlsafe(32)
    if output is None:
        print(text)
        return
    with at(str(output)):
        # Never over an existing file: engines that run with it would lose each other.
        opened = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            with open(opened, "w", encoding="ascii") as file:
                file.write(f"{text}\n")
        except OSError:
            output.unlink()
            raise
