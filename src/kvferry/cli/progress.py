"""A bar that shows how far a long command is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from kvferry.cli.output import console

Step = Callable[[str], None]
"""Moves the bar on, and says what is done next."""


@contextmanager
def progress(num_steps: int, doing: str, *, visible: bool) -> Iterator[Step]:
    """A bar, on a terminal only."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    shown = visible and console().is_terminal
    with Progress(*columns, transient=True, disable=not shown) as bar:
        task = bar.add_task(doing, total=num_steps)

        def step(then: str) -> None:
            bar.update(task, advance=1, **({"description": then} if then else {}))  # type: ignore[arg-type]

        yield step
