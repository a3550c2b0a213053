"""The bill as a chart: what a request takes over each kind of link, and what that time is spent on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.cli.bill import LinkBill
from kvferry.cli.link_profile import RDMA_400, Origin
from kvferry.cli.output import milliseconds
from kvferry.cli.picture.shapes import LogScale
from kvferry.core.cost import CostTerm

WORDS = {CostTerm.READS: "starting reads", CostTerm.RUNS: "runs", CostTerm.BYTES: "bytes"}


@dataclass(frozen=True, slots=True)
class TimePart:
    """What a part of a time is spent on."""

    term: str
    """``reads``, ``runs`` or ``bytes``."""
    words: str
    percent: float


@dataclass(frozen=True, slots=True)
class LinkRow:
    """One kind of link: its line of the chart."""

    bill: LinkBill
    is_first: bool
    """Whether the page shows this one until another is chosen."""
    from_percent: float
    """Where the time of long runs is on the chart, and where the time of these runs."""
    to_percent: float
    parts: tuple[TimePart, ...]

    @property
    def is_predicted(self) -> bool:
        return self.bill.profile.origin is Origin.PREDICTED


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark of the axis."""

    percent: float
    words: str


@dataclass(frozen=True, slots=True)
class BillChart:
    """All links on one axis of time."""

    links: tuple[LinkRow, ...]
    ticks: tuple[Tick, ...]

    @property
    def first(self) -> LinkRow | None:
        return next((link for link in self.links if link.is_first), None)

    @property
    def has_predictions(self) -> bool:
        return any(link.is_predicted for link in self.links)


def bill_chart(bills: Sequence[LinkBill]) -> BillChart:
    """The chart of a request that moves something."""
    if not bills:
        return BillChart((), ())
    first = next((bill for bill in bills if bill.profile is RDMA_400), bills[0])
    scale = LogScale.of([seconds for bill in bills for seconds in (bill.seconds, bill.long_run_seconds)])
    rows = (
        LinkRow(bill, bill is first, scale.at(bill.long_run_seconds), scale.at(bill.seconds), _parts(bill))
        for bill in bills
    )
    return BillChart(tuple(rows), tuple(Tick(scale.at(each), _tick_words(each)) for each in scale.ticks))


def _parts(bill: LinkBill) -> tuple[TimePart, ...]:
    parts, whole = bill.estimate.parts, bill.seconds or 1.0
    return tuple(TimePart(term.value, WORDS[term], 100 * parts[term] / whole) for term in CostTerm)


def _tick_words(seconds: float) -> str:
    """A power of ten.

    >>> _tick_words(1e-5), _tick_words(0.001), _tick_words(10.0)
    ('10 µs', '1 ms', '10 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size * 0.999:
            return f"{seconds / size:.0f} {unit}"
    return milliseconds(1e3 * seconds)
