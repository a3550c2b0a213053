"""The connector's statistics, in the form of vLLM's periodic log and metrics."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvferry.endpoint.metric_table import (
    DENIALS,
    LEASES_ENDED,
    METRICS,
    OFFERS,
    Metric,
    MetricKind,
    Sample,
    samples_of,
)
from kvferry.endpoint.metrics import Instruments
from kvferry.runtime.values import Record

RECORDS, CHANGES = "records", "changes"
PREFIX = "vllm:"


@dataclass
class LoadStats(KVConnectorStats):
    """Records of loads, one per worker and request, and changes of counters and gauges."""

    data: dict[str, Any] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        self._records.append(asdict(record))

    def change(self, samples: Iterable[Sample]) -> None:
        self._merge([metric.name, list(labels), number] for metric, labels, number in samples)

    @property
    def _records(self) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = self.data.setdefault(RECORDS, [])
        return records

    def _merge(self, changes: Iterable[list[Any]]) -> None:
        """Add changes, summed by metric and labels."""
        total = Tally[tuple[str, ...]]()
        for name, labels, number in (*self.data.get(CHANGES, ()), *changes):
            total[name, *labels] += number
        self.data[CHANGES] = [[name, labels, number] for (name, *labels), number in total.items() if number]

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self._records and not self.data.get(CHANGES)

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self._records.extend(other.data.get(RECORDS, []))
        self._merge(other.data.get(CHANGES, []))
        return self

    def reduce(self) -> dict[str, int | float]:
        """The values for vLLM's periodic log line."""
        offered = self._offered()
        return offered if offered and not self._records else {**self._loaded(), **offered}

    def _loaded(self) -> dict[str, int | float]:
        records = self._records
        good = [record for record in records if is_good(record)]
        seconds = sum(record["move_seconds"] for record in good)
        num_bytes = sum(record["num_bytes"] for record in good)
        return {
            "loads": len(good),
            "failed loads": len(records) - len(good),
            "MB": round(num_bytes / 1e6, 3),
            "runs": sum(record["num_runs"] for record in good),
            "median ms": round(1e3 * median(r["total_seconds"] for r in good), 3) if good else 0.0,
            "GB/s": round(num_bytes / seconds / 1e9, 3) if seconds else 0.0,
        }

    def _offered(self) -> dict[str, int | float]:
        """A producer's values; empty on other engines."""
        total = Tally[str]()
        for name, labels, number in self.data.get(CHANGES, ()):
            total[f"{labels[0]}" if name == LEASES_ENDED.name else name] += number
        shown: dict[str, int | float] = {
            "offered": total[OFFERS.name],
            "read": total["read"],
            "not read": total["expired"] + total["failed"],
            "denied": total[DENIALS.name],
        }
        return shown if any(shown.values()) else {}


def is_good(record: dict[str, Any]) -> bool:
    return bool(record["outcome"] == "read")


class LoadMetrics(KVConnectorPromMetrics):
    """Prometheus metrics with vLLM's labels."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def make(metric: Metric) -> Any:
            about: dict[str, Any] = {
                "name": f"{PREFIX}{metric.name}",
                "documentation": metric.help,
                "labelnames": [*labelnames, *metric.label_names],
            }
            match metric.kind:
                case MetricKind.COUNTER:
                    return metric_types[Counter](**about)
                case MetricKind.GAUGE:  # several front ends receive changes of one engine
                    return metric_types[Gauge](**about, multiprocess_mode="sum")
                case MetricKind.HISTOGRAM:
                    return metric_types[Histogram](**about, buckets=metric.buckets)

        self._instruments = Instruments(make)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for record in transfer_stats_data.get(RECORDS, ()):
            self._instruments.add(samples_of(Record(**record)), labels)
        changes = transfer_stats_data.get(CHANGES, ())
        self._instruments.add(((METRICS[name], tuple(some), n) for name, some, n in changes), labels)
