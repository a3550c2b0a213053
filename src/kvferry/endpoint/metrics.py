"""What an operator watches: counters and histograms for Prometheus, and one line per fetch in the log."""

from __future__ import annotations

import logging
from dataclasses import asdict

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from kvferry.runtime import Report
from kvferry.wire.bad_input import printable
from kvferry.wire.limits import MAX_WORDS

log = logging.getLogger("kvferry")

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
RATIOS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 2, 3, 10, 30)
BYTES = tuple(float(4**n) for n in range(6, 19))


class FetchMetrics:
    """The metrics of all destination ranks in this process."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        """``registry``: where the metrics appear; by default where Prometheus looks."""
        self._fetches = Counter(
            "kvferry_fetches", "Fetches that ended, by outcome", ["outcome"], registry=registry
        )
        self._ways = Counter(
            "kvferry_fetch_ways", "Fetches that ended, by how their bytes came", ["way"], registry=registry
        )
        self._bytes = Counter("kvferry_fetched_bytes", "Bytes of fetches that ended well", registry=registry)
        self._runs = Counter("kvferry_fetched_runs", "Runs of fetches that ended well", registry=registry)
        self._size = Histogram("kvferry_fetch_bytes", "Bytes per fetch", buckets=BYTES, registry=registry)
        self._seconds = Histogram(
            "kvferry_fetch_seconds",
            "Where the time of a fetch went",
            ["part"],
            buckets=SECONDS,
            registry=registry,
        )
        self._ratio = Histogram(
            "kvferry_fetch_move_ratio",
            "Time to move, measured over predicted",
            buckets=RATIOS,
            registry=registry,
        )
        self._in_flight = Gauge(
            "kvferry_reads_in_flight", "Posted reads that have not ended", registry=registry
        )
        self._quarantined = Gauge("kvferry_quarantined", "Fetches whose reads do not end", registry=registry)
        self._refused = Gauge(
            "kvferry_refused_messages", "Messages that were dropped or refused", registry=registry
        )

    def count(self, report: Report) -> None:
        """One fetch ended."""
        record = asdict(report.record)
        self._fetches.labels(report.record.outcome).inc()
        if report.record.way:
            self._ways.labels(report.record.way).inc()
        if report.failure is None:
            self._bytes.inc(report.record.num_bytes)
            self._runs.inc(report.record.num_runs)
            self._size.observe(report.record.num_bytes)
            if report.record.predicted_seconds:
                self._ratio.observe(report.record.move_seconds / report.record.predicted_seconds)
        for name, value in record.items():
            if name.endswith("_seconds"):
                self._seconds.labels(name.removesuffix("_seconds")).observe(value)

    def gauge(self, in_flight: int, quarantined: int, refused: int) -> None:
        """How things stand now."""
        self._in_flight.set(in_flight)
        self._quarantined.set(quarantined)
        self._refused.set(refused)


def account(report: Report, metrics: FetchMetrics | None = None) -> None:
    """One fetch ended: write its line, and count it."""
    level = log.warning if report.failure else log.info
    level("%s", log_line(report), extra={"kvferry": asdict(report.record)})
    if metrics:
        metrics.count(report)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def log_line(report: Report) -> str:
    """The account of a fetch in one readable line."""
    record, outcome = report.record, printable(str(report.failure or report.record.outcome), MAX_WORDS)
    return (
        f"fetched {printable(record.request_id)} from {printable(record.engine)}: {outcome};"
        f" {record.num_bytes} bytes in"
        f" {_count(record.num_runs, 'run')} from {_count(record.num_sources, 'rank')}"
        f"{f', {record.way}' if record.way else ''};"
        f" moved in {record.move_seconds * 1e3:.1f} ms"
        f"{f', predicted {record.predicted_seconds * 1e3:.1f}' if record.predicted_seconds else ''};"
        f" {record.total_seconds * 1e3:.1f} ms in all"
    )
