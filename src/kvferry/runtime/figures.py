"""The numbers behind the metrics: how things stand, what has changed since, and what one load adds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields

from kvferry.runtime.metric_table import (
    LOAD_BYTES,
    LOAD_DIGESTS,
    LOAD_RUNS,
    LOAD_SECONDS,
    LOADED_BYTES,
    LOADED_RUNS,
    LOADS,
    METRICS,
    REFUSED_MESSAGES,
    Metric,
    MetricKind,
    MetricSide,
)
from kvferry.runtime.values import Record
from kvferry.wire.messages import Outcome

Figures = Mapping[tuple[str, ...], float]
"""Where each counter and gauge of an endpoint stands: (metric, values of its labels) to number."""

Sample = tuple[Metric, tuple[str, ...], float]
"""A metric, the values of its labels, and by how much it changes; of a histogram: what is observed."""

SUFFIX = "_seconds"
NO_WAY = "none"


def figure(metric: Metric, number: float, *labels: str) -> dict[tuple[str, ...], float]:
    """One number, to be put together with others.

    >>> from kvferry.runtime.metric_table import GRANTS
    >>> figure(GRANTS, 3)
    {('kvferry_grants',): 3}
    """
    return {(metric.name, *labels): number}


def by_label(metric: Metric, numbers: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    """One number for each value of a metric's one label."""
    return {(metric.name, label): number for label, number in numbers.items()}


def refused_messages(side: MetricSide, *counts: Mapping[str, int]) -> dict[tuple[str, ...], float]:
    """Messages that an endpoint dropped or refused, by why."""
    found: Counter[str] = Counter()
    for some in counts:
        found.update(dict(some))
    return {(REFUSED_MESSAGES.name, side.value, why): number for why, number in found.items()}


class Changes:
    """What has changed in the figures of one endpoint since they were last looked at.

    Gauges are told as changes, too: so they add up over ranks and processes.

    >>> from kvferry.runtime.metric_table import GRANTS, LEASES
    >>> changes = Changes()
    >>> [number for *_, number in changes.since(figure(GRANTS, 3) | figure(LEASES, 2, "offered"))]
    [3, 2]
    >>> [(metric.name, number) for metric, _, number in changes.since(figure(GRANTS, 3))]
    [('kvferry_leases', -2)]
    """

    def __init__(self) -> None:
        self._last: Figures = {}

    def since(self, figures: Figures) -> list[Sample]:
        """The changes from the last call to these figures. A gauge that is missing is 0; a counter stays."""
        last = self._last
        gauges = {key for key in last if METRICS[key[0]].kind is MetricKind.GAUGE}
        moved = {
            key: figures.get(key, 0) - last.get(key, 0) for key in (*figures, *(gauges - figures.keys()))
        }
        counters = {key: number for key, number in last.items() if key not in gauges}
        self._last = counters | dict(figures)
        return [(METRICS[key[0]], key[1:], number) for key, number in moved.items() if number]


def samples_of(record: Record) -> Iterator[Sample]:
    """What one load adds to the metrics."""
    yield LOADS, (record.outcome, record.way or NO_WAY), 1
    for name in PARTS:
        yield LOAD_SECONDS, (name,), getattr(record, f"{name}{SUFFIX}")
    if record.digest:
        yield LOAD_DIGESTS, (record.digest,), 1
    if record.outcome != Outcome.READ.value:
        return
    yield LOADED_BYTES, (), record.num_bytes
    yield LOADED_RUNS, (), record.num_runs
    yield LOAD_BYTES, (), record.num_bytes
    yield LOAD_RUNS, (), record.num_runs


PARTS = tuple(field.name.removesuffix(SUFFIX) for field in fields(Record) if field.name.endswith(SUFFIX))
"""Of a load's time."""
