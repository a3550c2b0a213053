"""What an operator watches: counters and histograms for Prometheus, and one line per fetch in the log."""

from __future__ import annotations

from dataclasses import asdict

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from kvferry.endpoint.loop import log
from kvferry.runtime import Report

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
BYTES = tuple(float(4**n) for n in range(6, 19))


class FetchMetrics:
    """The metrics of all destination ranks in this process."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """``registry``: where the metrics appear; by default where Prometheus looks."""
        into = {"registry": registry or REGISTRY}
        self._fetches = Counter("kvferry_fetches", "Fetches that ended, by outcome", ["outcome"], **into)
        self._bytes = Counter("kvferry_fetched_bytes", "Bytes of fetches that ended well", **into)
        self._runs = Counter("kvferry_fetched_runs", "Runs of fetches that ended well", **into)
        self._size = Histogram("kvferry_fetch_bytes", "Bytes per fetch", buckets=BYTES, **into)
        self._seconds = Histogram(
            "kvferry_fetch_seconds", "Where the time of a fetch went", ["part"], buckets=SECONDS, **into
        )
        self.in_flight = Gauge("kvferry_reads_in_flight", "Posted reads that have not ended", **into)
        self.quarantined = Gauge("kvferry_quarantined", "Fetches whose reads do not end", **into)
        self.refused = Gauge("kvferry_refused_messages", "Messages that were dropped or refused", **into)

    def count(self, report: Report) -> None:
        """One fetch ended: count it, and write its line."""
        record = report.record
        self._fetches.labels(report.failure.code if report.failure else "read").inc()
        if report.failure is None:
            self._bytes.inc(record.num_bytes)
            self._runs.inc(record.num_runs)
            self._size.observe(record.num_bytes)
        for part in ("meet", "plan", "move", "total"):
            self._seconds.labels(part).observe(getattr(record, f"{part}_seconds"))
        level = log.warning if report.failure else log.info
        level("%s", line(report), extra={"kvferry": asdict(record)})


def line(report: Report) -> str:
    """The account of a fetch in one readable line."""
    record = report.record
    return (
        f"fetched {record.request_id} from {record.engine}: {record.outcome}; {record.num_bytes} bytes in"
        f" {record.num_runs} runs from {record.num_sources} ranks;"
        f" moved in {record.move_seconds * 1e3:.1f} ms, {record.total_seconds * 1e3:.1f} ms in all"
    )
