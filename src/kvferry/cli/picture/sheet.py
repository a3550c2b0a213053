"""The picture of a plan on one sheet, for documents: everything has its place, nothing reacts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvferry.cli.picture.plan_picture import PlanPicture
from kvferry.cli.picture.shapes import WIDTH, HeldShape, Strip

TOP, ROW_HEIGHT, BOTTOM = 124, 182, 52
ADVICE_HEIGHT = 24
LABEL_WIDTH = 36
"""Characters of a row's name on one line."""
MOST_LINES = 3
MOST_NUMBERS = 24
"""Ranks of which each has its number; of more, some have."""


@dataclass(frozen=True, slots=True)
class SheetRow:
    """One row: how far down it is, and its name on several lines."""

    y: int
    label: tuple[str, ...]
    strip: Strip

    def every(self, shapes: Sequence[HeldShape]) -> int:
        """Which ranks have their number on the sheet: each, or one in so many."""
        return -(-len(shapes) // MOST_NUMBERS)


@dataclass(frozen=True, slots=True)
class Sheet:
    """Where the rows are."""

    WIDTH: ClassVar[int] = 960
    LEFT: ClassVar[int] = 340
    """Where the strips begin."""
    STRIP_WIDTH: ClassVar[int] = 588
    height: int
    rows: tuple[SheetRow, ...]

    def x(self, shape: HeldShape) -> float:
        """The middle of a rank's column."""
        middle = shape.frame.x + shape.frame.width / 2
        return self.LEFT + self.STRIP_WIDTH * middle / WIDTH


def sheet(picture: PlanPicture) -> Sheet:
    """All rows, one below the other."""
    top = TOP + ADVICE_HEIGHT * len(picture.reasons)
    rows = tuple(
        SheetRow(top + ROW_HEIGHT * i, tuple(_label(strip.row.label)), strip)
        for i, strip in enumerate(picture.strips)
    )
    return Sheet(top + ROW_HEIGHT * len(rows) + BOTTOM, rows)


def _label(name: str) -> list[str]:
    """A name on at most three lines, cut after its marks.

    >>> _label("layers.{0-2,4-6,8-10,12-14,16-18,20-22,24-25}.linear/conv.q")
    ['layers.{0-2,4-6,8-10,12-14,16-18,', '20-22,24-25}.linear/conv.q']
    >>> [len(line) for line in _label("x" * 200)]
    [35, 35, 35]
    """
    lines = [""]
    for part in re.findall(rf".[^,./}}]{{0,{LABEL_WIDTH - 2}}}[,./}}]*", name):
        if len(lines[-1]) + len(part) > LABEL_WIDTH:
            lines.append("")
        lines[-1] += part
    return lines if len(lines) <= MOST_LINES else [*lines[: MOST_LINES - 1], f"{lines[MOST_LINES - 1][:-1]}…"]
