"""All commands, by name."""

from __future__ import annotations

from typing import Annotated

import typer

from kvferry.cli.demo import demo
from kvferry.cli.describe import describe
from kvferry.cli.models import models
from kvferry.cli.plan import plan
from kvferry.cli.runs import runs

COMMANDS = {
    "plan": (plan, "Can two engines talk, who sends what, what does it cost?"),
    "demo": (demo, "Move real bytes in memory and check every cell by name."),
    "models": (models, "The models that are known by name."),
    "describe": (describe, "Write the manifest of an engine."),
    "runs": (runs, "The exact byte runs of one request."),
}
"""Each command and what it is for, in one line."""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)
for name, (command, summary) in COMMANDS.items():
    app.command(name, short_help=summary)(command)


def _show_version(value: bool) -> None:
    if value:
        import kvferry

        print(f"kvferry {kvferry.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Move a language model's KV cache between engines of different shape, and prove it first.

    \b
    Can two deployments talk, who sends what, and what does it cost?
      kvferry plan --model llama-3.1-70b --src tp=4 --dst tp=8,block=64
    \b
    See it move and be checked, cell by cell:
      kvferry demo

    Exit codes: 0 good; 1 refused, or bytes found wrong; 2 bad usage or input.
    """
