"""Prometheus metrics of the endpoints in a process, from ``metric_table``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvferry.endpoint.metric_table import METRICS, Changes, Metric, MetricKind, Sample, samples_of
from kvferry.errors import MissingPackage
from kvferry.runtime import Report
from kvferry.runtime.figures import Figures

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
    from prometheus_client import Metric as CollectorMetric
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise MissingPackage.named(error) from None


class Instruments:
    """One Prometheus instrument per metric of the table."""

    def __init__(self, make: Callable[[Metric], Any]) -> None:
        self._by_name: Mapping[str, Any] = {metric.name: make(metric) for metric in METRICS.values()}

    def add(self, samples: Iterable[Sample], label_values: Iterable[object] = ()) -> None:
        """Apply samples; ``label_values`` precede those of each sample."""
        first = tuple(label_values)
        for metric, labels, number in samples:
            instrument, values = self._by_name[metric.name], (*first, *labels)
            instrument = instrument.labels(*values) if values else instrument
            if metric.kind is MetricKind.HISTOGRAM:
                instrument.observe(number)
            else:
                instrument.inc(number)


class EngineMetrics:
    """The metrics of all endpoints in this process: pass one object to each endpoint."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        """``registry``: by default the global one of prometheus_client."""

        def make(metric: Metric) -> Counter | Gauge | Histogram:
            about: dict[str, Any] = {"labelnames": metric.label_names, "registry": registry}
            match metric.kind:
                case MetricKind.COUNTER:
                    return Counter(metric.name, metric.help, **about)
                case MetricKind.GAUGE:
                    return Gauge(metric.name, metric.help, **about)
                case MetricKind.HISTOGRAM:
                    return Histogram(metric.name, metric.help, buckets=metric.buckets, **about)

        self._lock = threading.Lock()
        self._watched: dict[object, tuple[Callable[[], Figures], Changes]] = {}
        # A registry collects in the order of registration: this updates the instruments before they are read.
        registry.register(_BeforeOthers(self._look))
        self._instruments = Instruments(make)

    def count(self, report: Report) -> None:
        self._instruments.add(samples_of(report.record))

    def watch(self, endpoint: object, figures: Callable[[], Figures]) -> None:
        """Publish an endpoint's figures; they are read at every scrape."""
        with self._lock:
            self._watched[endpoint] = figures, Changes()

    def forget(self, endpoint: object) -> None:
        """Remove an endpoint: its gauges return to 0, its counters stay."""
        with self._lock:
            if known := self._watched.pop(endpoint, None):
                figures, changes = known
                self._instruments.add(changes.since(figures()))
                self._instruments.add(changes.since({}))

    def _look(self) -> None:
        with self._lock:
            for figures, changes in self._watched.values():
                self._instruments.add(changes.since(figures()))


class _BeforeOthers(Collector):
    """Updates the instruments before a registry reads them."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def describe(self) -> Iterable[CollectorMetric]:
        return ()

    def collect(self) -> Iterable[CollectorMetric]:
        self._act()
        return ()
