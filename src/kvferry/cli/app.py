"""All commands, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from kvferry.cli import bench, demo, diff, doctor, keygen, models, plan, proxy, runs, status

COMMANDS: dict[str, tuple[Callable[..., int | None], str]] = {
    "plan": (plan.plan, plan.HELP),
    "diff": (diff.diff, diff.HELP),
    "doctor": (doctor.doctor, doctor.HELP),
    "demo": (demo.demo, demo.HELP),
    "bench": (bench.bench, bench.HELP),
    "models": (models.models, models.HELP),
    "describe": (models.describe, models.DESCRIBE_HELP),
    "runs": (runs.runs, runs.HELP),
    "status": (status.status, status.HELP),
    "proxy": (proxy.proxy, proxy.HELP),
    "keygen": (keygen.keygen, keygen.HELP),
}
"""Each command with its help. The list of commands shows the first line of its docstring."""

app = typer.Typer(
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)
for name, (command, text) in COMMANDS.items():
    app.command(name, help=text, short_help=command.__doc__)(command)


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
    """Transfer the KV cache between prefill and decode engines, and prove each plan first.

    \b
    Are two deployments compatible, and what does a request cost?
      kvferry plan --model llama-3.1-70b --src tp=4 --dst tp=8,block=64
    \b
    Is this host ready?
      kvferry doctor
    \b
    Transfer caches between local processes and verify every cell:
      kvferry demo

    Exit codes: 0 success; 1 refused, or wrong bytes; 2 bad usage or input.
    """
