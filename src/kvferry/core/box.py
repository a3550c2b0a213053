"""Boxes: the part of one state that a rank holds, or needs.

A box is a product of sets of coordinates, one per axis. The token axis is unbounded, so its set is periodic:
the cells whose index modulo ``period`` lies in the spans. The period is 1 without context parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm, prod

from kvferry.core.span import Span, Spans, count, intersect, normal, show
from kvferry.errors import Code, Finding, Refused

TOKEN = "token"
"""The name of the axis that the block table divides into blocks. Its coordinates count cells."""

MAX_TURNS = 1 << 15
"""The most spans in one period of the token axis."""

EVERY = (Span(0, 1),)
"""The token axis of a box with every cell: residue 0 modulo 1."""


@dataclass(frozen=True, slots=True)
class Box:
    """A product of sets of coordinates.

    >>> a = Box((("channel", (Span(0, 128),)), ("head", (Span(0, 4),))))
    >>> b = Box((("channel", (Span(0, 128),)), ("head", (Span(3, 6),))))
    >>> print(a & b)
    channel [0, 128) × head [3, 4)
    """

    axes: tuple[tuple[str, Spans], ...]
    """Axis name and coordinates, sorted by name."""
    period: int = 1
    """Number of cells after which the set on the token axis repeats."""

    def __and__(self, other: Box) -> Box:
        period = lcm(self.period, other.period)
        mine, theirs = self.over(period), other.over(period)
        pairs = zip(mine.axes, theirs.axes, strict=True)
        return Box(tuple((name, intersect(a, b)) for (name, a), (_, b) in pairs), period)

    def over(self, period: int) -> Box:
        """The same box, written with a multiple of its period."""
        if period == self.period:
            return self
        axes = (
            (name, _repeated(spans, self.period, period) if name == TOKEN else spans)
            for name, spans in self.axes
        )
        return Box(tuple(axes), period)

    def num_cells(self) -> int:
        """Cells per period of the token axis (per value, for a state without one)."""
        return prod(count(spans) for _, spans in self.axes)

    def __bool__(self) -> bool:
        return all(spans for _, spans in self.axes)

    def __str__(self) -> str:
        parts = [
            f"{name} {show(spans)}" + (f" of {self.period}" if name == TOKEN else "")
            for name, spans in self.axes
            if name != TOKEN or spans != (Span(0, self.period),)
        ]
        return " × ".join(parts) or "everything"


def _repeated(spans: Spans, period: int, longer: int) -> Spans:
    """A set with this period, written with a longer one."""
    if spans == (Span(0, period),):
        return (Span(0, longer),)  # one span, however long the other side's period is
    parts = longer // period * len(spans)
    if parts > MAX_TURNS:
        note = f"the common period of both sides is {longer} cells in {parts} parts, the limit is {MAX_TURNS}"
        raise Refused(Finding(Code.TURNS_TOO_MANY, field=TOKEN, note=note))
    return normal(Span(span.start + at, span.stop + at) for at in range(0, longer, period) for span in spans)
