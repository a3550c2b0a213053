"""What vLLM shows of loads: its periodic log line, and its metrics."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

pytest.importorskip("vllm", reason="needs vLLM")

from kvferry.integrations.vllm.shared.stats import LoadMetrics, LoadStats
from kvferry.runtime.values import Record

GOOD = Record(
    "r1",
    "prefill",
    num_bytes=4_000_000,
    num_runs=30,
    num_sources=1,
    move_seconds=0.004,
    predicted_seconds=0.002,
    total_seconds=0.006,
    outcome="read",
)
FAILED = replace(GOOD, outcome="lease-ended", move_seconds=9.0)


def test_the_periodic_line_has_what_a_person_wants_to_see():
    stats, other = LoadStats(), LoadStats()
    stats.add(GOOD)
    other.add(replace(GOOD, move_seconds=0.002, total_seconds=0.004))
    other.add(FAILED)
    assert stats.aggregate(other).reduce() == {
        "loads": 2,
        "failed loads": 1,
        "MB": 8.0,
        "runs": 60,
        "median ms": 5.0,
        "GB/s": 1.333,
        "times predicted": 1.5,
    }


def test_an_interval_without_a_good_load_has_no_times():
    stats = LoadStats()
    assert stats.is_empty()
    stats.add(FAILED)
    stats.add(replace(FAILED, predicted_seconds=0.0))
    shown = stats.reduce()
    assert (shown["loads"], shown["failed loads"], shown["times predicted"]) == (0, 2, 0.0)


def test_the_metrics_say_what_was_predicted_and_how_true_that_was():
    registry = CollectorRegistry()
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    metrics = LoadMetrics(SimpleNamespace(kv_transfer_config=None), kinds, ["engine"], {0: ["0"]})
    stats = LoadStats()
    for record in (GOOD, FAILED, replace(GOOD, predicted_seconds=0.0)):
        stats.add(record)
    metrics.observe(stats.data)

    def sample(name, **labels):
        return registry.get_sample_value(f"vllm:kvferry_{name}", {"engine": "0", **labels})

    assert sample("loads_total", outcome="read") == 2
    assert sample("loads_total", outcome="lease-ended") == 1
    assert sample("load_bytes_sum") == 8_000_000
    assert sample("load_seconds_sum", part="predicted") == 0.004
    assert (sample("load_move_ratio_count"), sample("load_move_ratio_sum")) == (1, 2.0)
