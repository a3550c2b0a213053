"""Output for people: tables of 80 columns, colours only on a terminal."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from kvferry.core.plan import name_together
from kvferry.core.state import State
from kvferry.errors import Code, Finding, counted
from kvferry.wire.reading import printable

OWN_FAULT = (
    "The manifest is wrong. Correct your own manifest (strides and offsets are in bytes); report one from"
    " vLLM or `kvferry describe`."
)
OWN_BUG = "Report this: kvferry made a plan that it cannot prove."

BY_CODE = {
    Code.VERSION: "Run kvferry of the same version on both sides.",
    Code.IDENTITY_DIFFERS: "Serve the same checkpoint, with the same settings, on both sides.",
    Code.IDENTITY_UNKNOWN: "Load weights from files, or set identity to unchecked on both engines.",
    Code.MISSING_STATE: "Serve the same model, draft model and attention backend on both sides.",
    Code.STATE_DIFFERS: "Serve the same model, with the same draft model, on both sides.",
    Code.UNKNOWN_RANK: "Choose a rank that the engine has.",
    Code.NOT_HELD: "Provide the manifests of all source ranks: the rank that holds this part is missing.",
    Code.OUT_OF_BOUNDS: OWN_FAULT,
    Code.CELLS_COLLIDE: OWN_FAULT,
    Code.VIEWS_OVERLAP: OWN_FAULT,
    Code.GAP: OWN_BUG,
    Code.WRITTEN_TWICE: OWN_BUG,
    Code.NOT_NEEDED: OWN_BUG,
    Code.WRONG_SOURCE: OWN_BUG,
    Code.TURNS_TOO_MANY: "Use the same number of context-parallel ranks, or interleave sizes of which one"
    " is a multiple of the other.",
    Code.TOO_MANY_RUNS: "Use the same layout and block size on both sides.",
}

WHOLE = (
    "Give both sides the same TP, block size, cache dtype and attention backend: such blocks are transferred"
    " whole."
)

BY_FIELD = {
    "dtype": "Give both engines the same cache dtype (vLLM: --kv-cache-dtype).",
    "encoding": "Run the same attention backend, and the same cache dtype, on both sides.",
    "tail": "Run the same attention backend on both sides.",
    "tokens_per_cell": "Use the same block size on both engines.",
    "item_bytes": WHOLE,
    "axis shard": WHOLE,
}
"""For states that differ in this field."""


def remedy(finding: Finding) -> str:
    """
    >>> remedy(Finding(Code.STATE_DIFFERS, "layers.0/k", "dtype", "bf16", "fp8_e4m3"))
    'Give both engines the same cache dtype (vLLM: --kv-cache-dtype).'
    """
    if finding.code is Code.STATE_DIFFERS and finding.field in BY_FIELD:
        return BY_FIELD[finding.field]
    return BY_CODE[finding.code]


def console() -> Console:
    """Standard output, without markup and automatic highlighting."""
    return Console(highlight=False, markup=False, emoji=False)


def num_bytes(count: float) -> str:
    """
    >>> num_bytes(640), num_bytes(16384), num_bytes(1342177280)
    ('640 B', '16 KiB', '1.25 GiB')
    """
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while count >= 1024 and len(units) > 1:
        count, units = count / 1024, units[1:]
    return f"{count:.2f}".rstrip("0").rstrip(".") + f" {units[0]}"


def duration(seconds: float) -> str:
    """
    >>> duration(42.0), duration(600.0), duration(9000.0)
    ('42 s', '10 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def milliseconds(value: float) -> str:
    """
    >>> milliseconds(0.1234), milliseconds(31.4), milliseconds(2531.0)
    ('0.12 ms', '31 ms', '2.53 s')
    """
    return f"{value / 1e3:.2f} s" if value >= 1e3 else f"{value:.2f} ms" if value < 10 else f"{value:.0f} ms"


def microseconds(seconds: float) -> str:
    """
    >>> microseconds(2.84e-6), microseconds(1.88e-4)
    ('2.8 µs', '188 µs')
    """
    return f"{seconds * 1e6:.{1 if seconds < 1e-5 else 0}f} µs"


def gigabytes_per_second(value: float) -> str:
    """
    >>> gigabytes_per_second(0.0412), gigabytes_per_second(4.12), gigabytes_per_second(1234.5)
    ('0.04 GB/s', '4.1 GB/s', '1234 GB/s')
    """
    return f"{value:.{0 if value >= 100 else 1 if value >= 1 else 2}f} GB/s"


def ratio(value: float) -> str:
    """
    >>> ratio(0.8712), ratio(0.0012)
    ('0.87×', '<0.01×')
    """
    return f"{value:.2f}×" if value >= 0.01 else "<0.01×"


def times(value: float) -> str:
    """
    >>> times(131.4), times(2.34)
    ('131 times', '2.3 times')
    """
    return f"{value:.0f} times" if value >= 10 else f"{value:.1f} times"


def table(*columns: str, left: Sequence[str] = ()) -> Table:
    """An empty table; columns are aligned right, except those in ``left``."""
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if column in left else "right", no_wrap=not i)
    return made


def plain(text: str) -> str:
    """Others' text without control characters, which a terminal would obey."""
    return printable(text, len(text))


def print_table(out: Console, made: Table) -> None:
    """Print a table without trailing blanks."""
    with out.capture() as captured:
        out.print(made)
    out.file.write("\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n\n")


def wrapped(out: Console, lines: Iterable[str], indent: str = "  ", *, hang: int = 4) -> None:
    """Lines of text with a hanging indent, wrapped between words only."""
    for line in lines:
        parts = textwrap.wrap(
            line,
            max(1, out.width - 1),
            initial_indent=indent,
            subsequent_indent=indent + " " * hang,
            break_long_words=False,
            break_on_hyphens=False,
        )
        out.print("\n".join(map(plain, parts)), soft_wrap=True)


def labelled(out: Console, rows: Sequence[tuple[str, str]], indent: str = "  ") -> None:
    """Values behind their labels; rows without a value are skipped."""
    rows = [(label, value) for label, value in rows if value]
    width = max((len(label) for label, _ in rows), default=0) + 2
    wrapped(out, (f"{label:<{width}}{value}" for label, value in rows), indent, hang=width)


def command(out: Console, label: str, text: str) -> None:
    """A command behind its label, wrapped with backslashes for a shell."""
    parts: list[str] = []
    for word in map(shlex.quote, shlex.split(text)):
        if parts and parts[-1].startswith("--") and " " not in parts[-1] and not word.startswith("--"):
            parts[-1] += f" {word}"  # an option stays with its value
        else:
            parts.append(word)
    lines: list[str] = []
    indent = " " * 10
    for word in parts:
        if lines and len(indent) + len(lines[-1]) + len(word) + 3 < out.width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    for at, line in enumerate(lines):
        begin = f"  {label:<8}" if at == 0 else indent
        end = " \\" if at + 1 < len(lines) else ""
        out.print(f"{begin}{line}{end}", soft_wrap=True)


STYLES = {"PROVED": "bold green", "SAME": "bold green", "SLOW": "bold yellow", "NOTE": "bold yellow"}


def verdict(out: Console, word: str, rest: str) -> None:
    out.print(Text.assemble((word, STYLES.get(word, "bold red")), f"  {plain(rest)}"), soft_wrap=True)


def findings(out: Console, found: dict[Finding, list[int]], num_ranks: int, num_more: int = 0) -> None:
    """The reasons of a refusal with their remedies, each once for all of its states."""
    for code, rows in finding_rows(found, num_ranks):
        out.print(Text(f"\n  {code}", "bold"))
        labelled(out, rows, "    ")
    if num_more:
        out.print(f"\n  … and {num_more:,} more")


def finding_rows(
    found: dict[Finding, list[int]], num_ranks: int
) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The code and the labelled values of each reason of a refusal."""
    alike: dict[Finding, list[tuple[str, list[int]]]] = {}
    other_dtype = {finding.state for finding in found if finding.field == "dtype"}
    for finding, ranks in found.items():
        # Another dtype implies another item size.
        if finding.field != "item_bytes" or finding.state not in other_dtype:
            alike.setdefault(replace(finding, state=""), []).append((finding.state, ranks))
    for finding, members in alike.items():
        states = sorted({state for state, _ in members if state}, key=by_numbers)
        ranks = sorted({rank for _, some in members for rank in some})
        rows = [
            ("field", finding.field),
            ("source", finding.src),
            ("destination", finding.dst),
            ("note", finding.note),
            ("state", together(states)),
            ("dst ranks", "" if len(ranks) == num_ranks else ", ".join(map(str, ranks))),
            ("remedy", remedy(finding)),
        ]
        yield finding.code.value, [(label, value) for label, value in rows if value]


def finding_object(finding: Finding) -> dict[str, object]:
    return {**asdict(finding), "code": finding.code.value}


def together(states: Sequence[str]) -> str:
    """Names, joined into one if they differ in their first number only."""
    kinds: dict[str, list[str]] = {}
    for state in states:
        kinds.setdefault(kind_of(state), []).append(state)
    return ", ".join(name_together(names) for names in kinds.values())


def kind_of(state: str) -> str:
    """The name of a state without its first number, which is the layer's."""
    return re.sub(r"\d+", "#", state, count=1)


def by_numbers(name: str) -> list[tuple[int, str]]:
    """An order of names in which 10 comes after 9."""
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", name)]


def cell_words(state: State) -> str:
    """One cell of a state, in words.

    >>> from kvferry import Axis
    >>> cell_words(State("k", (Axis("head", 8), Axis("channel", 128)), item_bytes=2, dtype="bf16"))
    '8 heads × 128 channels of bf16'
    """
    axes = " × ".join(counted(axis.size, axis.name) for axis in state.axes)
    what = f"{state.item_bytes:,} opaque bytes" if state.dtype == "opaque" else state.dtype
    return f"{axes} of {what}" if axes else what


Step = Callable[[str], None]
"""Advances the bar, with a description of the next step."""


@contextmanager
def progress(num_steps: int, doing: str, *, visible: bool) -> Iterator[Step]:
    """A progress bar, on a terminal only."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    shown = visible and console().is_terminal
    with Progress(*columns, transient=True, disable=not shown) as bar:
        task = bar.add_task(doing, total=num_steps)

        def step(then: str) -> None:
            bar.update(task, advance=1, **({"description": then} if then else {}))  # type: ignore[arg-type]

        yield step
