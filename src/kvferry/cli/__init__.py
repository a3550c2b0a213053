"""The command line: ``kvferry plan``, ``diff``, ``demo``, ``bench`` and more (``app.py`` has the list).

Only this room imports Typer and Rich. Commands import what they need when they run, so that help is quick.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 good, 1 refused or wrong, 2 bad usage or input."""
    from kvferry.cli.run_command import run_command

    return run_command(list(sys.argv[1:] if argv is None else argv))
