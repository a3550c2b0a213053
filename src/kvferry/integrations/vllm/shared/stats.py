"""The record of each load, in the shape that vLLM's own log and metrics take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from prometheus_client import Counter, Histogram
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvferry.endpoint.metrics import BYTES, RATIOS, SECONDS
from kvferry.runtime.values import Record

RECORDS = "records"
PARTS = ("meet", "plan", "post", "move", "predicted", "total")
RUNS = tuple(float(4**n) for n in range(11))


@dataclass
class LoadStats(KVConnectorStats):
    """The records of loads, one per worker and request."""

    data: dict[str, Any] = field(default_factory=lambda: {RECORDS: []})

    def add(self, record: Record) -> None:
        """One load ended."""
        self._records.append(asdict(record))

    @property
    def _records(self) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = self.data.setdefault(RECORDS, [])
        return records

    def reset(self) -> None:
        self.data = {RECORDS: []}

    def is_empty(self) -> bool:
        return not self._records

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """The records of another worker, or of a later step, are added."""
        self._records.extend(other.data.get(RECORDS, []))
        return self

    def reduce(self) -> dict[str, int | float]:
        """What a person wants to see of an interval, in vLLM's periodic log line."""
        records = self._records
        good = [record for record in records if is_good(record)]
        seconds = sum(record["move_seconds"] for record in good)
        num_bytes = sum(record["num_bytes"] for record in good)
        ratios = _ratios(good)
        return {
            "loads": len(good),
            "failed loads": len(records) - len(good),
            "MB": round(num_bytes / 1e6, 3),
            "runs": sum(record["num_runs"] for record in good),
            "median ms": round(1e3 * median(r["total_seconds"] for r in good), 3) if good else 0.0,
            "GB/s": round(num_bytes / seconds / 1e9, 3) if seconds else 0.0,
            "times predicted": round(median(ratios), 2) if ratios else 0.0,
        }


def is_good(record: dict[str, Any]) -> bool:
    """Whether a record is of a load that ended well."""
    return bool(record["outcome"] == "read")


def _ratios(records: Iterable[dict[str, Any]]) -> list[float]:
    """How long moving took, over what was predicted for it."""
    return [r["move_seconds"] / r["predicted_seconds"] for r in records if r["predicted_seconds"]]


class LoadMetrics(KVConnectorPromMetrics):
    """The same records as Prometheus metrics, beside vLLM's own and with its labels."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, histogram = metric_types[Counter], metric_types[Histogram]
        self._loads = counter(
            name="vllm:kvferry_loads",
            documentation="Loads that ended, per worker, by outcome",
            labelnames=[*labelnames, "outcome"],
        )
        self._bytes = histogram(
            name="vllm:kvferry_load_bytes",
            documentation="Bytes of a load",
            buckets=BYTES,
            labelnames=labelnames,
        )
        self._runs = histogram(
            name="vllm:kvferry_load_runs", documentation="Runs of a load", buckets=RUNS, labelnames=labelnames
        )
        self._seconds = histogram(
            name="vllm:kvferry_load_seconds",
            documentation="Where the time of a load went",
            buckets=SECONDS,
            labelnames=[*labelnames, "part"],
        )
        self._ratio = histogram(
            name="vllm:kvferry_load_move_ratio",
            documentation="Time to move a load, measured over predicted",
            buckets=RATIOS,
            labelnames=labelnames,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for record in transfer_stats_data.get(RECORDS, ()):
            self._loads.labels(*labels, record["outcome"]).inc()
            if is_good(record):
                self._bytes.labels(*labels).observe(record["num_bytes"])
                self._runs.labels(*labels).observe(record["num_runs"])
                for ratio in _ratios([record]):
                    self._ratio.labels(*labels).observe(ratio)
            for part in PARTS:
                self._seconds.labels(*labels, part).observe(record[f"{part}_seconds"])
