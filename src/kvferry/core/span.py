"""Half-open intervals, and sorted lists of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvferry.errors import SpecError

MAX_STOP = 1 << 62
"""Larger than any token or byte offset; the sum of two still fits 63 bits."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """The integers from ``start`` up to, not including, ``stop``.

    >>> Span(2, 6), len(Span(2, 6)), 5 in Span(2, 6), 6 in Span(2, 6)
    (Span(start=2, stop=6), 4, True, False)
    >>> Span(6, 2)
    Traceback (most recent call last):
    kvferry.errors.SpecError: a span needs whole numbers with 0 <= start <= stop, got [6, 2)
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        if type(self.start) is not int or type(self.stop) is not int or not 0 <= self.start <= self.stop:
            given = f"[{self.start!r}, {self.stop!r})"
            raise SpecError(f"a span needs whole numbers with 0 <= start <= stop, got {given}")
        if self.stop > MAX_STOP:
            raise SpecError(f"a span ends at {MAX_STOP} or before, got {self}")

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, value: int) -> bool:
        return self.start <= value < self.stop

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"


Spans = tuple[Span, ...]
"""Sorted, non-empty spans that do not touch: the canonical form of a set of integers."""


def normal(spans: Iterable[Span]) -> Spans:
    """The canonical form of a set of integers."""
    if isinstance(spans, tuple) and len(spans) == 1 and len(spans[0]):
        return spans  # the common case, many times per request
    merged: list[Span] = []
    for span in sorted(span for span in spans if len(span)):
        if merged and span.start <= merged[-1].stop:
            merged[-1] = Span(merged[-1].start, max(merged[-1].stop, span.stop))
        else:
            merged.append(span)
    return tuple(merged)


def intersect(a: Sequence[Span], b: Sequence[Span]) -> Spans:
    both: list[Span] = []
    x, y = normal(a), normal(b)
    i = j = 0
    while i < len(x) and j < len(y):
        start, stop = max(x[i].start, y[j].start), min(x[i].stop, y[j].stop)
        if start < stop:
            both.append(Span(start, stop))
        if x[i].stop < y[j].stop:
            i += 1
        else:
            j += 1
    return tuple(both)


def subtract(a: Sequence[Span], b: Sequence[Span]) -> Spans:
    """The integers in ``a`` that are not in ``b``."""
    if not a or (len(a) == len(b) == 1 and b[0].start <= a[0].start and a[0].stop <= b[0].stop):
        return ()  # the common case, many times per request
    left: list[Span] = []
    holes = normal(b)
    at = 0
    for span in normal(a):
        start = span.start
        while at < len(holes) and holes[at].stop <= start:
            at += 1
        for hole in holes[at:]:
            if hole.start >= span.stop:
                break
            left.append(Span(start, max(start, hole.start)))
            start = min(hole.stop, span.stop)
        left.append(Span(start, span.stop))
    return normal(left)


def holds(spans: Spans, value: int) -> bool:
    at = bisect_right(spans, value, key=lambda span: span.start)
    return at > 0 and value in spans[at - 1]


def count(spans: Iterable[Span]) -> int:
    return sum(len(span) for span in spans)


def show(spans: Iterable[Span]) -> str:
    return " ".join(str(span) for span in spans) or "nothing"
